"""vLLM's groups of ranks take pycomm's collectives, in eager and in compiled models."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import helpers
import pytest
import torch
import torch.distributed as dist
from test_missing_frameworks import plugin

import pycomm

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
SIZES = [(3, 5), (0, 4), (2, 2)]  # of the ranks' parts


@pytest.fixture
def installed(tmp_path):
    """A folder in which vLLM finds the plugin, whether or not pycomm is installed."""
    entry, folder = plugin(), tmp_path / "pycomm-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: pycomm\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[{entry.group}]\n{entry.name} = {entry.value}\n")
    return str(tmp_path)


def group_of_vllm(rank, size, name):
    """A group as vLLM's workers make it, with the communicator of its platform."""
    from vllm.distributed.parallel_state import GroupCoordinator

    ranks = [list(range(size))]
    return GroupCoordinator(ranks, rank, "gloo", use_device_communicator=True, group_name=name)


def sample(rank, *shape, dtype=torch.float32, strided=False):
    generator = torch.Generator().manual_seed(rank)
    x = (100 * torch.randn(*shape, generator=generator)).to(dtype)
    return x.mT.contiguous().mT if strided else x


def of_all(x):
    """All ranks' tensors, by torch's own way."""
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, x)
    return everything


def total_of(tensors):
    return sum(x.double() for x in tensors).to(tensors[0].dtype)


def check_same(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.is_contiguous()
    assert torch.equal(found, expected)


def check_equal_parts(group, rank, x):
    parts = of_all(x)
    check_same(group.all_reduce(x.clone()), total_of(parts))
    for dim in range(-x.dim(), x.dim()):
        joined = torch.cat(parts, dim)
        check_same(group.all_gather(x, dim), joined)
        for dst in range(group.world_size):
            gathered = group.gather(x, dst, dim)
            if rank == dst:
                check_same(gathered, joined)
            else:
                assert gathered is None
        total = total_of(of_all(torch.cat([x, -2 * x], dim)))
        mine = total.chunk(group.world_size, dim)[rank].contiguous()
        check_same(group.reduce_scatter(torch.cat([x, -2 * x], dim), dim), mine)


def check_own_sizes(group, rank, sizes):
    """Experts' tokens: each rank has as many as it has."""
    hidden, ids = sample(rank, sizes[rank], 7), torch.full((sizes[rank], 2), rank)
    whole = group.all_gatherv([hidden, ids], 0, sizes)
    for found, mine in zip(whole, [hidden, ids], strict=True):
        check_same(found, torch.cat(of_all(mine)))
    check_same(group.all_gatherv(hidden.mT, 1, sizes), torch.cat(of_all(hidden), 0).mT.contiguous())
    x = sample(rank, sum(sizes), 7)
    mine = total_of(of_all(x)).split(sizes)[rank].contiguous()
    check_same(group.reduce_scatterv(x, 0, sizes), mine)
    check_same(group.reduce_scatterv(x.mT, -1, sizes), mine.mT.contiguous())


def check_compiled(group, rank):
    """In one graph, as vLLM compiles a model."""

    def layer(x):
        y = group.all_reduce(2 * x)
        return x, y, group.reduce_scatter(group.all_gather(y + x, -1), 0)

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for rows in (4, 6):
            x = sample(rank, rows, 3)
            for found, expected in zip(compiled(x), layer(x), strict=True):
                assert torch.equal(found, expected)


def check_stages(group, rank):
    """What a stage of a pipeline sends to the next."""
    hidden, residual = sample(0, 300, 7, strided=True), sample(0, 0, 3, dtype=torch.bfloat16)
    sent = {"hidden": hidden, "step": 3, "residual": residual, "one": torch.tensor(7)}
    if rank == 0:
        assert group.send_tensor_dict(sent) is None
        return
    found = group.recv_tensor_dict()
    assert found.keys() == sent.keys()
    assert found.pop("step") == sent.pop("step")
    for name, tensor in sent.items():
        check_same(found[name], tensor.contiguous())


def all_collectives(rank, size, store, plugins):
    helpers.join_world(rank, size, store)
    os.environ["VLLM_PLUGINS"] = "pycomm"
    sys.path.append(plugins)
    group = group_of_vllm(rank, size, "tp")
    shapes, dtypes = [(1, 1), (6, 5), (2, 3, 4)], [torch.float32, torch.bfloat16]
    for shape, dtype, strided in itertools.product(shapes, dtypes, [False, True]):
        check_equal_parts(group, rank, sample(rank, *shape, dtype=dtype, strided=strided))
    for sizes in SIZES:
        check_own_sizes(group, rank, list(sizes))
    check_same(group.all_gatherv(sample(rank, 3)), torch.cat(of_all(sample(rank, 3))))
    check_compiled(group, rank)
    check_stages(group, rank)
    communicator = group.device_communicator
    group.destroy()
    with pytest.raises(pycomm.GroupUnusable):
        pycomm.barrier(group=communicator.group)
    return f"{type(communicator).__module__}.{type(communicator).__name__}"


def test_every_collective_has_the_result_of_torch(installed):
    names = helpers.run_ranks(2, all_collectives, installed)
    assert names == ["pycomm.integrations.vllm.Communicator"] * 2


def test_two_ranks_generate_the_tokens_of_transformers(installed, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": 512}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **layers, initializer_range=0.2)).eval()
    model.save_pretrained(tmp_path / "model")
    path = os.pathsep.join([str(ROOT), installed])
    variables = {"PYTHONPATH": path, "VLLM_CACHE_ROOT": str(tmp_path), "PYCOMM_LOG": "info"}
    example = ROOT / "examples/frameworks/with_vllm.py"
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, example, tmp_path / "model"],
            env=os.environ | variables, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        status = process.wait(280)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # vLLM's processes, too
        process.wait()
    said = output.read_text()
    assert status == 0, said
    prompt = torch.arange(1, 9)[None]
    expected = model.generate(prompt, do_sample=False, min_new_tokens=16, max_new_tokens=16)
    (tokens,) = re.findall(r"^tokens (.+)$", said, re.MULTILINE)
    assert json.loads(tokens) == expected[0, prompt.numel() :].tolist()
    assert "pycomm.group INFO rank 1 of 2" in said
