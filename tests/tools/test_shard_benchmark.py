"""The benchmark of sharded steps: contestants, bytes of the floor, detection of wrong results."""

import importlib.util
import json
import os

import pytest
import torch
import torch.distributed as dist
from helpers import join_world, run_group, run_ranks

from pycomm.bench import cli, peers, sharding, verify
from pycomm.bench.optimizers import SCHEMES


def measure_shards(rank, size, store, path):
    join_world(rank, size, store)
    os.environ["LOCAL_RANK"] = str(rank)  # which DeepSpeed requires
    what = f"step --shard -p 1M,2M --scheme fp32,bf16_remainder_8bit --batch 2 -n 2 -J {path}"
    sharding.run(cli.parse(what.split()))


@pytest.mark.slow
def test_shard_benchmark(tmp_path):
    path = tmp_path / "shard.json"
    run_ranks(2, measure_shards, str(path))
    results = json.loads(path.read_text())
    assert results["meta"]["ranks"] == 2
    absent = results["meta"]["absent_peers"]
    if importlib.util.find_spec("deepspeed") is None:
        reason = "No module named 'deepspeed'"
        assert absent == {"deepspeed_zero1": reason, "deepspeed_zero2": reason}
    present = [peer for peer in peers.TRAINEES if peer not in absent]
    rows = {(r["scheme"], r["parameters"] >> 20, r["name"]): r for r in results["rows"]}
    own = [mode + suffix for suffix in sharding.BOUNDS for mode in sharding.MODES]
    assert list(rows) == [
        (scheme, size, name)
        for scheme in ("fp32", "bf16_remainder_8bit")
        for size in (1, 2)
        for name in (*own, *present)
    ]
    for (scheme, _, name), row in rows.items():
        is_peer = name in present
        assert row["iterations"] == 2
        is_compared = not is_peer or scheme == "fp32"
        assert row["wrong"] == (0 if is_compared else None)
        if name.startswith("unsharded"):
            assert row["ratio"] == 1
        if not is_peer:
            assert row["floor_percent"] == pytest.approx(
                100 * row["floor_us"] / row["time_us"], 0.1
            )


@pytest.mark.parametrize(
    ("scheme", "ranks", "clips", "moved"),
    [
        ("fp32", 2, False, 18),
        ("fp32", 4, False, 13),
        ("fp32", 2, True, 22),
        ("bf16_remainder", 2, False, 15),
        ("bf16_remainder", 4, False, 9.5),
        ("bf16_master", 2, False, 16),
        ("bf16_remainder_8bit", 2, False, 9.03),
    ],
)
def test_bytes_of_the_floor(scheme, ranks, clips, moved):
    """Per parameter: g + p, and a share of what the optimizer moves besides."""
    mix = sharding.make_mix(SCHEMES[scheme], 1 << 20, ranks, clips)
    assert mix.total / (1 << 20) == pytest.approx(moved, abs=0.005)


def count_both(ours, theirs):
    limit = sharding.LR / 10
    return [verify.count_different(ours, theirs), verify.count_far(ours, theirs, limit)]


def count_spoilt(group):
    settings = cli.parse(["step", "--shard", "-p", "1M", "--batch", "2"])
    made = [
        sharding.WrappedTrainee(settings, SCHEMES["fp32"], group, shard=mode)
        for mode in (None, "optimizer")
    ]
    for one in made:
        one.step()
    whole, divided = (one.model for one in made)
    counts = count_both(divided, whole)
    if group.rank == 1:
        with torch.no_grad():
            next(divided.parameters())[7] += 2e-6
    counts += count_both(divided, whole)
    if group.rank == 1:
        with torch.no_grad():
            next(divided.parameters())[7] += sharding.LR
    return [*counts, count_both(divided, whole)[1]]


def test_wrong_parameters_are_found():
    """One bit on one rank counts between our own modes, a part of a step beside a peer."""
    assert run_group(2, count_spoilt) == [[0, 0, 1, 0, 1]] * 2


def test_several_sizes_need_shard(capsys):
    with pytest.raises(SystemExit):
        cli.parse(["step", "-p", "1M,2M"])
    assert "must be one number" in capsys.readouterr().err


def backend_of_fsdp2(group, name):
    settings = cli.parse(["step", "--shard", "-p", "1M", "--batch", "2"])
    peer = peers.make_trainee(name, settings, torch.float32, sharding.LR, group)
    return dist.get_backend(next(peer.model.parameters()).device_mesh.get_group())


@pytest.mark.parametrize(("name", "backend"), [("fsdp2", "gloo"), ("fsdp2_pycomm", "pycomm")])
def test_fsdp2_runs_on_both_backends(name, backend):
    """In new processes, because torch takes a parameter's mesh from a cache of equal meshes."""
    assert run_group(2, backend_of_fsdp2, name) == [backend] * 2
