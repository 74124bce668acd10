"""The code blocks of pages: run, compared with a source, or marked with the reason why not."""

import json
import re
import shlex
from pathlib import Path

import pages
import pytest

from benchmarks import published

IMPORTS = """
import functools, logging, sys, tempfile
from pathlib import Path
from unittest import mock
import torch, pycomm
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
"""
GROUP = IMPORTS + "group = pycomm.init()\n"
# Another rank gets as many samples as its speed allows.
DEALT = """
from types import SimpleNamespace
mine = SimpleNamespace(ranks={group.rank: SimpleNamespace(own=1.0 + group.rank)})
assert own_part(60, 30, mine) == (40, 20)[group.rank]
"""
# A run that resumes ends with the bits of one that was not stopped.
RESUMED = """
def weights_after(steps, resume=None):
    torch.manual_seed(1)
    name = f"{shared}.{steps}.{bool(resume)}"
    net = train(steps, name, resume)
    return name, [weight.detach().clone() for weight in net.parameters()]

_, whole = weights_after(4)
stopped, early = weights_after(2)
_, resumed = weights_after(4, stopped)
assert all(map(torch.equal, whole, resumed)) and not torch.equal(whole[0], early[0])
"""
# A step that all ranks skip, because of one rank's gradients.
SKIPPED = """
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler, model = pycomm.optim.GradScaler("cpu"), pycomm.DataParallel(net)
scaler.scale(loss_of(model(batches[0])) * (1.0, float("inf"))[rank]).backward()
scaler.step(optimizer)
"""
# As the page says. Other processors may round otherwise.
LOSSES = """
assert losses["int8"] < 1.1 * losses["exact"]
assert losses["exact"] < losses["sign_all_reduce"] < losses["no_residual"] < 2 * losses["exact"]
learned = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
assert pycomm.all_gather(learned.new_empty(2, len(learned)), learned).diff(dim=0).eq(0).all()
assert residuals[net[0].weight].any()
"""
OF_DDP = "model = DistributedDataParallel(net)"
STATE = "model, state = net, pycomm.hooks.Int8State(net.named_parameters())"
RECEIVERS = """
Path("metrics").mkdir()
writer, meter, sys.modules["mlflow"], sys.modules["wandb"] = (mock.Mock() for _ in range(4))
"""
ACCELERATE = """
import helpers
from accelerate import Accelerator
helpers.pretend_torchrun(rank, 2)
accelerator = Accelerator(cpu=True)
"""
LIGHTNING = """
import lightning
from lightning.pytorch.strategies import DDPStrategy
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def training_step(self, batch):
        return loss_of(self.net(batch))
    def configure_optimizers(self):
        return optimizer
module, loader = Module(), torch.utils.data.DataLoader(batches, batch_size=None)
quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
options = {"accelerator": "cpu", "max_epochs": 1, "use_distributed_sampler": False}
lightning.Trainer = functools.partial(lightning.Trainer, **options, **quiet)
"""
TRAINED = """
net, batches = net.bfloat16(), [batch.bfloat16() for batch in batches]
model = pycomm.DataParallel(net, shard="optimizer")
optimizer = pycomm.optim.FusedAdamW(model.parameters(), master_weights="remainder")
loss_of(model(batches[0])).backward()
optimizer.step()
"""
ERROR_RESET = """
optimizer, sparse = torch.optim.SGD(net.parameters(), lr=0.1), pycomm.TopK(0.03, values=torch.int8)
names, options = net.named_parameters(), {"period": 1, "local_residuals": True}
local = pycomm.hooks.LocalSGDState(names, optimizer, compression=sparse, **options)
model = pycomm.DataParallel(net, state=local)
loss_of(model(batches[0])).backward()
optimizer.step()
local.step()
"""
# Over Gloo, after the warm-up, both ranks have the same averages.
POWERS = """
powers.iter = 1000
for batch in batches[:2]:
    model.zero_grad()
    loss_of(model(batch)).backward()
grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
least, most = (grads.clone() for _ in range(2))
dist.all_reduce(least, dist.ReduceOp.MIN)
dist.all_reduce(most, dist.ReduceOp.MAX)
assert least.equal(most) and powers.error_dict
"""
HALF = "net, batches = net.bfloat16(), [batch.bfloat16() for batch in batches]; model = net"
LOOP = "step, steps = 0, 2"
# As torchrun's processes begin: without a process group, with a Store.
AS_TORCHRUN = """
def leave(count=[0]):
    if dist.is_initialized():
        dist.destroy_process_group()
    count[0] += 1
    store = dist.FileStore(f"{shared}.{count[0]}", 2)
    meet = functools.partial(begin, store=store, rank=rank, world_size=2)
    dist.init_process_group = meet

begin = dist.init_process_group
"""

# All ranks find what the first one saves.
IN_SHARED = """
import os
from pathlib import Path
Path(shared).mkdir(exist_ok=True)
home = os.getcwd()
os.chdir(shared)
"""
TIMED = "batch, ended = batches[0], [each.clone() for each in model.module.parameters()]"
# The program stops at its first checkpoint, and goes on from there to the same bits.
FROM_CHECKPOINT = """
import pages
assert whole > 0 and alone > 0
(text,) = (b.text for b in pages.blocks_of(__name__, "python") if "checkpoint.pt" in b.text)
dist.barrier()
if rank == 0:
    path.unlink()
for part in (text.replace("(first, steps)", "(first, 10)"), text):
    dist.barrier()
    pages.readers_own(rank)  # seeds the program's network
    exec(part)
assert first == 10
assert all(map(torch.equal, ended, net.parameters()))
"""

# By page: a program before its blocks, programs before the blocks that have some words, and a check
# after all.
PROGRAMS = {
    "README.md": ("", {}, ""),
    "docs/how-to/arrays.md": ("", {}, ""),
    "docs/how-to/clusters.md": (
        IMPORTS,
        {'algorithms="table.json"': "Path('table.json').write_text('[{\"algorithm\": \"ring\"}]')"},
        "",
    ),
    "docs/how-to/coming-from.md": (
        "",
        {"def train(epochs": POWERS},
        DEALT + RESUMED + "assert done['samples'] == 50",
    ),
    "docs/how-to/data-parallel.md": (
        IMPORTS,
        {
            "register_comm_hook(None, pycomm": OF_DDP,
            "gathered=True)  # on all": STATE + IN_SHARED,
            'torch.load("checkpoint.pt")': "dist.barrier()",
            'algorithm="ring"': "model = net",
            "even_batches(loader)": "model, loader = pycomm.DataParallel(net), batches[: 1 + rank]",
            'states="8bit"': HALF,
            "outer_parameters()": ERROR_RESET + "validate = print; os.chdir(home)",
        },
        "",
    ),
    "docs/how-to/frameworks.md": (GROUP, {}, "test_on_threads()\nreduce(torch.ones(2), tp)"),
    "docs/how-to/from-zero-and-fsdp.md": (
        GROUP,
        {"def train(steps, to": "folder = shared"},
        RESUMED,
    ),
    "docs/how-to/integrations.md": (
        GROUP,
        {
            "register_for_checkpointing": ACCELERATE,
            "lightning.Trainer(": LIGHTNING,
            "dcp.save(": "folder, state = shared, pycomm.hooks.Int8State(net.named_parameters())",
        },
        "assert state.step == 0 and trainer.callbacks[0].state.step == len(batches)",
    ),
    "docs/how-to/mixed-precision.md": (
        GROUP,
        {"scheduler.step()": SKIPPED},
        "assert scheduler.last_epoch == 0",
    ),
    "docs/how-to/observing.md": (
        GROUP,
        {
            "if step % 100": "step = 0; pycomm.barrier()",
            "train(steps=50)": "train = lambda steps: [pycomm.barrier() for _ in range(steps)]",
            "memory.record(": "model = pycomm.DataParallel(net)",
            "write_prometheus": RECEIVERS,
            "pycomm.trace(": "train = lambda batch: pycomm.all_reduce(batch)",
        },
        "assert Path(f'metrics/{rank}.prom').exists() and slow is not None and writer.method_calls",
    ),
    "docs/how-to/optimizers.md": (
        GROUP,
        {
            "state_dict(to=0)": TRAINED,
            "dcp.save(": TRAINED + "folder = shared",
            "fully_shard(net, mesh=mesh)": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2,))
""",
            'offload="pinned"': HALF,
        },
        "",
    ),
    "docs/how-to/recovery.md": (
        GROUP,
        {
            "compression=pycomm.Int8(), group=group": LOOP,
            "stop_requested()": "first, steps, train_one, save = 0, 2, print, print",
            "ddp = process_group = None": LOOP,
            "def connect": "progress, is_new = {}, False",
            "replicas=2": LOOP,
            "model.regroup(group)  # a newcomer": "progress, is_new = {}, False",
            "LocalSGDState(": "steps, group = 2, pycomm.default_group()",
        },
        "assert reduce(torch.ones(4), group)[0].eq(1).all()",
    ),
    "docs/how-to/torch-distributed.md": (
        IMPORTS + AS_TORCHRUN,
        {
            "dist.all_reduce(x)": "leave(); x, model = torch.ones(4), net",
            "backend.options(": "leave()",
            "dist.shrink_group(": "model, batch = DistributedDataParallel(net), batches[0]",
        },
        "loss_of(net(batches[0])).backward()",
    ),
    "docs/reference/gradients.md": (
        GROUP,
        {
            "torch.compile(loss)": """
torch.compile = functools.partial(torch.compile, backend="eager")  # others are tested elsewhere
x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4)
"""
        },
        "assert x.grad.eq(x.grad[0, 0]).all() and x.grad[0, 0] > 0",
    ),
    "docs/tutorials/codec.md": ("", {}, LOSSES),
    "docs/tutorials/first-ddp.md": (
        "",
        {"checkpoint.pt": IN_SHARED, "def step_ms": TIMED},
        "assert before['exposed_ms'] > 0" + FROM_CHECKPOINT,
    ),
    "docs/tutorials/local-world.md": (
        IMPORTS,
        {"make_model()": "make_model = lambda: torch.nn.Linear(8, 1)"},
        "",
    ),
    "docs/tutorials/memory.md": ("", {}, ""),
    "docs/tutorials/tour.md": (
        GROUP,
        {
            "group.shrink()": """
model = pycomm.DataParallel(net)
loss_of(model(batches[0])).backward()
""",
        },
        "",
    ),
}
# Whose blocks stand in a source, which this or another test of this folder compares.
COMPARED = {
    "docs/contributing/extending.md",
    "docs/how-to/cpp.md",
    "docs/tutorials/survive.md",
}


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs(page):
    given, before, then = PROGRAMS[page]
    blocks = [block for block in pages.blocks_of(page, "python") if block.why is None]
    ran, printed = pages.run(page, given, before, then)
    assert ran == len(blocks) > 0
    for words in before:
        assert sum(words in block.text for block in blocks) == 1, words
    if page == "docs/tutorials/first-ddp.md":
        given = "import os; os.environ['PYCOMM_NODE'] = str(rank)"
        printed += pages.run(page, given, before)[1]
    assert pages.missing_in(printed, page) == []


def test_every_block_is_run_compared_or_marked():
    """Commands, and what is only read by others, are checked below."""
    of_others = {"mermaid", "sh", "console", "json"}
    for page in pages.pages():
        fences = re.findall(r"^ *```", (pages.ROOT / page).read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(list(pages.blocks_of(page))), page
        for block in pages.blocks_of(page):
            checked = page in COMPARED or block.kind in of_others
            run = page in PROGRAMS and block.kind in ("python", "text")
            bytes_of_formats = page == "docs/reference/wire-format.md" and block.text[:2] == "50"
            assert checked or run or block.why or bytes_of_formats, f"{page}:{block.line}"


def options_of(module):
    """The text in which a module, or the modules of its package, name their options."""
    path = pages.ROOT / module.replace(".", "/")
    files = path.glob("**/*.py") if path.is_dir() else [path.with_suffix(".py")]
    return "".join(file.read_text() for file in files)


def commands():
    """The commands of blocks, with their pages."""
    for page in pages.pages():
        for block in pages.blocks_of(page, "sh", "console"):
            text = block.text.replace("\\\n", " ")
            if block.kind == "console":
                text = "\n".join(line[2:] for line in text.splitlines() if line[:1] == "$")
            yield from ((page, shlex.split(line, comments=True)) for line in text.splitlines())


def test_commands():
    """They name modules, programs and options that there are."""
    seen = set()
    for page, words in commands():
        if "-m" in words and "pytest" not in words and "python" in [*words, Path(words[0]).name]:
            module, *rest = words[words.index("-m") + 1 :]
            source = options_of(module)
        elif program := next(
            (word for word in words if re.fullmatch(r"examples/\w+\.py", word)), None
        ):
            rest, source = words[words.index(program) + 1 :], (pages.ROOT / program).read_text()
            source += (pages.ROOT / "examples/devices.py").read_text()
            module = program
        else:
            continue
        options = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert {each for each in options if f'"{each}"' not in source} == set(), (page, words)
        seen.add(module)
    assert {"pycomm.bench", "pycomm.advise", "pycomm.run", "examples/survive.py"} <= seen


def test_data():
    """Blocks of JSON are such."""
    blocks = [block for page in pages.pages() for block in pages.blocks_of(page, "json")]
    assert blocks
    assert all(json.loads(block.text) for block in blocks)


def test_survive():
    """The tutorial's blocks stand in the example."""
    example = re.sub(r"^ +", "", (pages.ROOT / "examples/survive.py").read_text(), flags=re.M)
    blocks = [block.text for block in pages.blocks_of("docs/tutorials/survive.md", "python")]
    assert len(blocks) == 3
    assert all(re.sub(r"^ +", "", block, flags=re.M) in example for block in blocks)


@pytest.mark.parametrize("page", published.PAGES)
def test_tables_of_results(page):
    """`python -m benchmarks.published` makes them; others say why they are typed."""
    text = (pages.ROOT / page).read_text()
    assert published.MARKS.search(text)
    assert published.with_tables(text) == text


# Figures in sentences: the page, the words around each, and where it comes from.
FIGURES = [
    (
        "README.md",
        r"was ([\d.]+) times as fast as torch's fused one in fp32, and ([\d.]+) times in bf16",
        [
            ("h200/gpu", "peer_ratio", {"name": "adamw_fp32"}),
            ("h200/gpu", "peer_ratio", {"name": "adamw_bf16_remainder"}),
        ],
    ),
    *(
        ("docs/how-to/cuda.md", words, [("h200/gpu", "peer_ratio", {"name": name})])
        for words, name in [
            (r"\| the same \| ([\d.]+) times as fast \|", "adamw_fp32"),
            (r"copies to and from them \| ([\d.]+) \|", "adamw_bf16_remainder"),
            (
                r"states in bf16 \| everything in bf16 \| ([\d.]+) \|",
                "adamw_bf16_remainder_bf16_states",
            ),
            (r"everything in bf16 \| ([\d.]+): they save", "adamw_8bit_states"),
        ]
    ),
    (
        "docs/tutorials/first-ddp.md",
        r"a step of 10\s+million parameters took (\d+) ms instead of (\d+)",
        [
            ("nodes", "time_us", {"case": "training", "contestant": "pycomm int8_hook"}),
            ("nodes", "time_us", {"case": "training", "contestant": "gloo"}),
        ],
    ),
]


@pytest.mark.parametrize(("page", "words", "sources"), FIGURES)
def test_figures_of_sentences(page, words, sources):
    (told,) = (m.groups() for m in re.finditer(words, (pages.ROOT / page).read_text()))
    values = [published.least(file, field, **of) for file, field, of in sources]
    scale = {"time_us": 1e-3, "peer_ratio": 1}
    expected = [value * scale[field] for value, (_, field, _) in zip(values, sources, strict=True)]
    assert list(told) == [published.digits(each) for each in expected]


def test_every_table_of_the_results_is_made():
    """On the page of results; elsewhere tables have words."""
    text = (pages.ROOT / "benchmarks/README.md").read_text()
    tables = re.findall(r"(?:^<!-- (\w+): .+ -->\n\n)?^\|(?:.*\n\|)+ *-", text, re.MULTILINE)
    assert tables.count("typed") == 2  # of what is gone
    assert set(tables) == {"table", "typed"}
