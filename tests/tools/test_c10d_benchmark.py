"""``python -m pycomm.bench c10d``: what it prints and writes."""

import json

import backends
import helpers
import pytest
import torch.distributed as dist

from pycomm.bench import c10d, cli


def session(rank, size, store, argv):
    backends.join(rank, size, store)
    c10d.run(cli.parse(["c10d", *argv]))
    dist.destroy_process_group()


@pytest.mark.slow
def test_backends_compete(tmp_path):
    file = tmp_path / "c10d.json"
    operations = "all_reduce,all_to_all_single,ping_pong,new_group,ddp,fsdp"
    helpers.run_ranks(2, session, ["-n", "2", "--operation", operations, "-J", str(file)])
    rows = json.loads(file.read_text())["rows"]
    found = {(row["operation"], row["bytes"], row["impl"]) for row in rows}
    cases = [(name, size) for name in operations.split(",") for size in c10d.SIZES[name]]
    both = {(*case, impl) for case in cases for impl in ("gloo", "pycomm")}
    floor = {("all_reduce", 256, impl) for impl in ("nothing", "pycomm.all_reduce")}
    floor.add(("ping_pong", 256, "nothing"))
    floor |= {(name, c10d.SIZES[name][0], "alone") for name in ("ddp", "fsdp")}
    assert found == both | floor
    for row in rows:
        assert 0 < row["p50_us"] <= row["p99_us"]
        gloos = next(
            r["time_us"]
            for r in rows
            if (r["operation"], r["bytes"], r["impl"]) == (row["operation"], row["bytes"], "gloo")
        )
        assert row["speedup"] == pytest.approx(gloos / row["time_us"], rel=0.05, abs=0.01)


@pytest.mark.parametrize("argv", ["--ranks 1", "--operation nothing", "-n 0"])
def test_nonsense_is_refused(argv, capsys):
    with pytest.raises(SystemExit):
        cli.parse(["c10d", *argv.split()])
    assert "expected" in capsys.readouterr().err
