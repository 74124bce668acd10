"""What an import loads: names at their first use, and for each part of pycomm only its needs."""

import ast
import socket
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import pycomm
import pycomm.optim

ROOT = Path(pycomm.__file__).parent
LAZY = [pycomm, pycomm.optim]

ONE_RANK = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import pycomm
"""
CLOSURES = {
    "import": ("import pycomm", 10, 1_300),
    "all_reduce": (
        ONE_RANK + "pycomm.init()\nassert pycomm.all_reduce(torch.ones(3)).tolist() == [1.0] * 3",
        25,
        5_000,
    ),
    "optimizer": (
        """
import torch, pycomm
model = torch.nn.Linear(3, 2)
optimizer = pycomm.optim.FusedAdamW(model.parameters())
before = model.weight.detach().clone()
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
assert not model.weight.equal(before)
""",
        25,
        4_900,
    ),
    "hook": (
        ONE_RANK
        + """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
state = pycomm.hooks.Int8State(model.named_parameters())
state.register(model)
model(torch.ones(1, 3)).sum().backward()
assert state.step == 1
""",
        33,
        7_700,
    ),
    "wrapper": (
        ONE_RANK
        + """
pycomm.init()
model = pycomm.DataParallel(torch.nn.Linear(3, 2))
model(torch.ones(1, 3)).sum().backward()
assert model.module.weight.grad.tolist() == [[1.0] * 3] * 2
""",
        41,
        9_950,
    ),
}
TELL = """
import sys
import typing
for name, module in sorted(sys.modules.items()):
    if name.split(".")[0] == "pycomm":
        print("loaded", name, module.__file__)
"""


def run_python(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(code):
    """The modules of pycomm that a fresh interpreter has after `code`, with their lines."""
    lines = [line.split() for line in run_python(code + TELL).splitlines()]
    files = {name: Path(file) for told, name, file in lines if told == "loaded"}
    return {
        name: len(file.read_text().splitlines()) if file.suffix == ".py" else 0
        for name, file in files.items()
    }


@pytest.mark.parametrize(("code", "modules", "lines"), CLOSURES.values(), ids=CLOSURES)
def test_only_what_is_needed_is_loaded(code, modules, lines):
    loaded = loaded_by(code)
    table = "\n".join(f"{count:6} {name}" for name, count in loaded.items())
    table += f"\n{sum(loaded.values()):6} lines in {len(loaded)} modules"
    assert len(loaded) <= modules, table
    assert sum(loaded.values()) <= lines, table


def homes_in_stub(package):
    """The module of each name, as type checkers read it."""
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    found = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name, "type checkers would not export it"
                found[alias.name] = node.module
    return found


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_type_checkers_see_the_same_names(package):
    homes = {name: home for home, names in package._HOMES.items() for name in names}
    modules = dict.fromkeys(getattr(package, "_MODULES", ()), "pycomm")
    assert homes_in_stub(package) == homes | modules
    assert package.__all__ == sorted(homes | modules)
    assert set(package.__all__) <= set(dir(package))
    for name, home in homes.items():
        assert getattr(package, name) is getattr(sys.modules[home], name)
        assert name in vars(package), "each use would look it up anew"


def test_names_can_be_imported_at_once():
    namespace = {}
    exec("from pycomm import *", namespace)
    assert set(pycomm.__all__) <= set(namespace)
    exec("from pycomm.hooks import *", namespace)
    assert namespace["LocalSGDState"] is pycomm.hooks.LocalSGDState


def test_modules_are_attributes():
    """Modules are attributes of the package, even if no program has imported them."""
    code = "import pycomm; print(pycomm.errors.Timeout is pycomm.Timeout, pycomm._init._default)"
    assert run_python(code).split() == ["True", "None"]
    with pytest.raises(AttributeError, match=r"no attribute .nothing.$"):
        pycomm.nothing  # noqa: B018
    assert not hasattr(pycomm, "nothing.in_it")
    with pytest.raises(ImportError):
        exec("from pycomm import nothing")


def test_types_of_fields_can_be_looked_up():
    """Programs that read options from a file look them up."""
    assert typing.get_type_hints(pycomm.Sharding)["group"] == pycomm.Group | None


def test_several_threads_may_be_the_first():
    code = """
import sys, threading
import pycomm
names = [name for name in pycomm.__all__ for _ in range(2)]
start, found, errors = threading.Barrier(len(names)), [], []
def use(name):
    start.wait()
    try:
        found.append((name, getattr(pycomm, name)))
    except BaseException as error:
        errors.append(error)
sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=use, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not errors, errors
assert all(one is getattr(pycomm, name) for name, one in found)
print(len(found) - 2 * len(pycomm.__all__))
"""
    assert run_python(code).split() == ["0"]


def test_a_forked_child_may_be_the_first():
    code = """
import os
import pycomm
child = os.fork()
if child == 0:
    with pycomm.LocalWorld(2) as world:
        os._exit(sum(world.run(lambda group: group.rank)))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code).split() == ["1"]


@pytest.mark.slow
def test_the_first_use_may_have_any_defaults():
    """A module that is imported in a context does not keep the context's defaults."""
    code = (
        ONE_RANK
        + """
torch.set_default_dtype(torch.float64)
with torch.inference_mode(), torch.device("meta"):
    group = pycomm.init()
    from pycomm import *
    hooks.LocalSGDState
    optim.FusedAdamW
torch.set_default_dtype(torch.float32)
x = torch.ones(300)
pycomm.compressed_all_reduce(x, pycomm.Int8())
assert x.tolist() == [1.0] * 300
model = pycomm.DataParallel(torch.nn.Linear(3, 2))
optimizer = pycomm.optim.FusedAdamW(model.parameters())
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
"""
    )
    run_python(code)


@pytest.mark.slow
def test_objects_come_in_pickles_and_copies():
    """They are unpickled in a process that has not used their names."""
    code = """
import copy, pickle, pycomm
kept = [pycomm.Int8(block=128), pycomm.Timeout("late", rank=1), pycomm.optim.FusedSGD]
assert copy.deepcopy(kept)[0] == kept[0]
print(pickle.dumps(kept).hex())
"""
    take = f"""
import pickle
made = pickle.loads(bytes.fromhex("{run_python(code).strip()}"))
print(made[0].block, made[1].rank)
"""
    assert run_python(take).split() == ["128", "1"]


def test_an_import_registers_operators_and_the_backend():
    code = """
import torch, pycomm
import torch.distributed as dist
assert "pycomm" in dist.Backend.backend_list
has = torch._C._dispatch_has_kernel_for_dispatch_key
for name in ("all_reduce", "broadcast_", "compressed_all_reduce_", "encode"):
    assert has(f"pycomm::{name}", "Autograd"), name
with torch._subclasses.FakeTensorMode():
    assert torch.ops.pycomm.all_gather(torch.ones(2, 3), 4, "any").shape == (8, 3)
    assert torch.ops.pycomm.encode(torch.ones(256), "int8", 0, 0).dtype == torch.uint8
"""
    run_python(code)


def test_exit_handlers_of_programs_come_first():
    """Those that are registered after the import, though before the first group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"""
import atexit, os
import torch
import torch.distributed as dist
import pycomm
def end():
    dist.barrier()
    print(pycomm.all_reduce(torch.ones(1)).item())
atexit.register(end)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}", RANK="0", WORLD_SIZE="1")
pycomm.init()
"""
    assert run_python(code).split() == ["1.0"]
