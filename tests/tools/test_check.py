"""python -m pycomm.check: passes here, and fails where anything is broken."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import pycomm
from pycomm import collect_env
from pycomm.check import cli, items

PACKAGE = Path(pycomm.__file__).parents[1]
PROCESSES = cli.Setting("two processes", 2, parts=("operations",))


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["--json", str(tmp_path / "no folder" / "found.json")])
    said = capsys.readouterr()
    assert "a folder that exists" in said.err
    assert said.out == ""


@pytest.mark.slow
def test_the_command(tmp_path):
    """In another folder, by nobody in particular; all items are fine, or there is no GPU."""
    file = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, "-m", "pycomm.check", "--json", file],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(PACKAGE), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("versions:      pycomm ")
    found = json.loads(file.read_text())
    assert found["environment"].keys() == collect_env.PROBES.keys()
    states = {(each["place"], each["item"]): each["state"] for each in found["items"]}
    assert states.pop(("CUDA", "all items")) == "not here"
    assert set(states.values()) == {"ok"}
    here = [setting for setting in cli.settings() if isinstance(setting, cli.Setting)][:2]
    assert list(states) == [(each.name, item) for each in here for item in each.items]
    assert f"{len(states)} ok, 0 FAILED, 1 not here" in done.stdout
    assert list(tmp_path.iterdir()) == [file]


def test_every_public_operation_and_optimizer_is_an_item():
    """A new one must get an item."""
    text = Path(items.__file__).read_text()
    homes = ("pycomm.collectives", "pycomm.block_collectives", "pycomm.compressed", "pycomm.p2p")
    names = [name for home in homes for name in pycomm._HOMES[home]]
    missing = [name for name in names if f"pycomm.{name}(" not in text]
    assert missing == ["Request", "irecv", "send"]
    fused = {name for name in pycomm.optim.__all__ if name.startswith("Fused")}
    assert {f"Fused{name}" for name in items.RULES} == fused


def verdicts(part, *names, ranks=3):
    """The verdicts of items on threads of this process."""
    found = {}
    lock = threading.Lock()

    def run(group):
        for name in names:
            outcome = items.outcome(cli.PARTS[part](False)[name], name, group, "cpu")
            with lock:
                found.setdefault(name, {})[group.rank] = outcome

    with pycomm.LocalWorld(ranks, timeout=60) as world:
        world.run(run)
    return [cli._verdict(found[name]) for name in names]


def broken(function, spoil):
    """Calls `function`, then spoils its first argument."""

    def call(tensor, *args, group, **options):
        result = function(tensor, *args, group=group, **options)
        if tensor is not None and tensor.numel() > 1000:
            spoil(tensor, group.rank)
        return result

    return call


def add_one(tensor, rank):
    if rank == 2:
        tensor[17] += 1


def next_number(tensor, rank):
    """The last bit of an element, on one rank."""
    if rank == 1 and tensor.dtype == torch.float32:
        tensor.view(torch.int32)[5] += 1


OPERATIONS = {
    "all_gather": "all_gather",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "all_to_all": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "reduce": "reduce",
    "messages": "recv",
    "all_reduce tree": "all_reduce",
    "compressed int8": "compressed_all_reduce",
    "compressed_reduce_scatter": "compressed_reduce_scatter",
}


@pytest.mark.parametrize("item", OPERATIONS)
def test_a_wrong_element_is_named(monkeypatch, item):
    name = OPERATIONS[item]
    if item == "messages":
        recv = pycomm.recv

        def spoilt(tensor, src, *, group):
            recv(tensor, src, group=group)
            if tensor.numel() > 1000:
                add_one(tensor, group.rank)

        monkeypatch.setattr(pycomm, name, spoilt)
    else:
        monkeypatch.setattr(pycomm, name, broken(getattr(pycomm, name), add_one))
    [(state, detail)] = verdicts("operations", item)
    assert state == "FAILED"
    assert detail.startswith("rank 2: ")
    assert "element 17 is" in detail
    assert " must be " in detail


def test_another_bit_on_one_rank_is_seen(monkeypatch):
    """Also within the bound of a codec."""
    for name in ("all_reduce", "compressed_all_reduce"):
        monkeypatch.setattr(pycomm, name, broken(getattr(pycomm, name), next_number))
    coded, exact = verdicts("operations", "compressed int8 ring", "all_reduce two_shot")
    assert coded == ("FAILED", "mean of 1003: rank 1 has other bits than rank 0")
    assert exact[1].startswith("rank 1: sum of 1003 float32: element 5 is")


@pytest.mark.parametrize("name", items.COMPRESSIONS)
def test_a_wrong_codec_is_seen(monkeypatch, name):
    kind = type(pycomm.parse_compression(name))
    decode = kind.decode
    monkeypatch.setattr(kind, "decode", lambda *args, **kw: decode(*args, **kw) * 1.05)
    [(state, detail)] = verdicts("local", f"codec {name}", ranks=2)
    assert state == "FAILED"
    assert "must be" in detail


@pytest.mark.parametrize("name", items.RULES)
def test_a_wrong_step_is_seen(monkeypatch, name):
    kind, options = items.RULES[name]

    def wrong(params, **given):
        return kind(params, **given | {"weight_decay": 0.11})

    monkeypatch.setitem(items.RULES, name, (wrong, options))
    [(state, detail)] = verdicts("local", f"Fused{name}", ranks=2)
    assert state == "FAILED"
    assert "weights after step 1, fp32: element" in detail


@pytest.mark.parametrize("name", ["wrapper none", "wrapper int8", "wrapper, gradients divided"])
def test_a_wrong_training_is_seen(monkeypatch, name):
    """The wrapper averages over too few ranks, so to say."""
    step = pycomm.optim.FusedSGD.step

    def larger(self):
        self.param_groups[0]["lr"] *= 1.5
        return step(self)

    monkeypatch.setattr(pycomm.optim.FusedSGD, "step", larger)
    [(state, detail)] = verdicts("wrapper", name)
    assert state == "FAILED"
    assert "must be" in detail


# Ranks that are processes, in which `sitecustomize` has broken something.


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """Breaks the processes of ranks, and returns what is printed of the items there."""

    def run(program):
        (tmp_path / "sitecustomize.py").write_text("import os, time\nimport pycomm\n" + program)
        paths = (tmp_path, PACKAGE)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        found = list(cli.examine(PROCESSES))
        assert multiprocessing.active_children() == []
        return {line.item: (line.state, line.detail) for line in found}

    return run


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_setting(lines, monkeypatch):
    monkeypatch.setattr(cli, "ITEM_LIMIT", 5.0)
    found = lines("""
reduce = pycomm.reduce
pycomm.reduce = lambda *args, group, **kw: time.sleep(1000 * group.rank)
""")
    assert found["all_reduce auto"] == ("ok", "")
    state, detail = found["reduce"]
    assert state == "FAILED"
    assert detail.endswith("no answer within 5 s")
    assert "1" in detail
    rest = len(PROCESSES.items) - list(PROCESSES.items).index("reduce") - 1
    assert found[f"the other {rest} items"] == ("FAILED", "have not run")


@pytest.mark.slow
def test_a_rank_that_dies_is_named(lines):
    found = lines("pycomm.reduce = lambda *args, group, **kw: os._exit(7) if group.rank else None")
    state, detail = found["reduce"]
    assert state == "FAILED"
    assert "process 1 has ended with 7" in detail or "PeerDied" in detail


def test_ranks_that_cannot_begin_say_why(lines):
    found = lines("""
def init(**options):
    raise OSError("no shared memory here")
pycomm.init = init
""")
    assert found[cli.START] == ("FAILED", "rank 0: OSError: no shared memory here")
    assert len(found) == 2


@pytest.mark.slow
def test_a_failed_item_is_the_exit_code(tmp_path, monkeypatch, capsys):
    setting = cli.Setting("a thread", 2, nodes=(2,), parts=("operations",))
    monkeypatch.setattr(cli, "settings", lambda: iter([setting]))
    (tmp_path / "sitecustomize.py").write_text("""
import pycomm
broadcast = pycomm.broadcast
def broken(tensor, *args, group, **options):
    broadcast(tensor, *args, group=group, **options)
    tensor[0] += group.rank
pycomm.broadcast = broken
""")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, PACKAGE))))
    assert cli.main([]) == 1
    said = capsys.readouterr().out
    failed = [line for line in said.splitlines() if "FAILED " in line]
    assert len(failed) == 1
    assert failed[0].split()[:4] == ["FAILED", "broadcast", "rank", "1:"]
    assert f"{len(setting.items) - 1} ok, 1 FAILED, 0 not here" in said
