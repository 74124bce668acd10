"""The advisor's command line."""

import os
import threading

import helpers
import pytest
import torch
from imagined import MACHINE, imagined

from pycomm.advise import cli, constants, measure
from pycomm.advise.constants import UNITS, Constant, Constants

MILLION = 10**6


GOOD = "--params 125M --ranks 16 --nodes 4 --link 1Gbit --step-ms 400"


def test_sizes():
    assert [cli.count(text) for text in ("125M", "1.3B", "7b", "10000", "2k")] == [
        125 * MILLION, 1300 * MILLION, 7000 * MILLION, 10000, 2000,
    ]  # fmt: skip
    assert [cli.rate(text) for text in ("100Mbit", "1Gbit", "2.5gbit/s", "400G", "10Gbps")] == [
        1e8, 1e9, 2.5e9, 4e11, 1e10,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--params 125X", "expected a number such as 125M"),
        ("--params 0", "expected a number such as 125M"),
        ("--link 1", "expected a rate such as"),
        ("--link 0Gbit", "expected a rate such as"),
        ("--link 1GB", "expected a rate such as"),
        ("--link 100MBps", "in bits, got '100MBps'"),
        ("--link 100MB/s", "in bits, got '100MB/s'"),
        ("--ranks 3", "--ranks must be at least --nodes, 4, got 3"),
        ("--ranks 20000", "expected a number from 1 to 16384"),
        ("--nodes -1", "expected"),
        ("--step-ms 0", "expected milliseconds"),
        ("--step-ms nan", "expected milliseconds"),
        ("--step-ms inf", "expected milliseconds"),
        ("--accumulate 0", "expected a number from 1"),
        ("--density 2", "expected a share"),
        ("--density 0.98", "send fewer elements"),
        ("--constants nowhere.json", "there is no file nowhere.json"),
        ("--measure --constants no/where.json", "there is no folder no"),
    ],
)
def test_wrong_arguments(capsys, change, message):
    with pytest.raises(SystemExit) as raised:
        cli.main([*GOOD.split(), *change.split()])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("", "--params, --ranks, --nodes, --step-ms"),
        ("--measure", "--params, --ranks, --nodes, --step-ms"),
        ("--ranks 2 --params 1M", "--nodes, --step-ms"),
        ("--measure --constants out.json --ranks 2", "--params, --nodes, --step-ms"),
        ("--measure --constants out.json --plot x", "--params, --ranks, --nodes, --step-ms"),
    ],
)
def test_what_is_missing(capsys, given, missing):
    with pytest.raises(SystemExit):
        cli.main(given.split())
    assert f"the following arguments are required: {missing}\n" in capsys.readouterr().err


def test_measuring_alone(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cli.measure, "measure", imagined)
    path = tmp_path / "mine.json"
    cli.main(["--measure", "--constants", str(path)])
    assert constants.load(path) == imagined()
    assert str(path) in capsys.readouterr().out


def measure_link(rank, size, store):
    helpers.join_world(rank, size, store)
    cores = os.sched_getaffinity(0)
    found = measure.link_constants(["here", "there"])
    assert threading.active_count() == 1
    assert os.sched_getaffinity(0) == cores
    torch.distributed.destroy_process_group()
    return found


def test_a_link_is_measured():
    """By ranks that take turns on one core meanwhile, and afterwards have all of theirs."""
    one, other = helpers.run_ranks(2, measure_link)
    units = UNITS | {"link.rate": "Gbit/s"}
    assert list(one) == list(other) == [
        "link.latency", "link.busy", "link.message", "link.core", "link.rate",
    ]  # fmt: skip
    assert all(constant.unit == units[name] for name, constant in one.items())
    assert all(constant.value > 0 for constant in one.values())


def test_a_measured_link_needs_no_rate(tmp_path, capsys):
    found = imagined().values | {"link.rate": Constant(2.5, "Gbit/s", "imagined")}
    constants.save(Constants(MACHINE, found), tmp_path / "mine.json")
    question = GOOD.replace("--link 1Gbit", "").split()
    cli.main([*question, "--constants", str(tmp_path / "mine.json")])
    assert "links of 2.5 Gbit/s" in capsys.readouterr().out


def test_ranks_and_nodes_are_torchruns(monkeypatch, tmp_path, capsys):
    """Unless they are given; a measurement alone needs neither."""
    monkeypatch.setattr(cli.measure, "measure", imagined)
    for name, value in {"RANK": 0, "WORLD_SIZE": 12, "GROUP_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    few = ["--params=1M", "--step-ms=400", "--link=1Gbit", "--measure", "--accumulate=4"]
    cli.main(few)
    shown = capsys.readouterr().out
    assert "12 ranks on 3 nodes, links of 1 Gbit/s, 400 ms of computation per step in 4 m" in shown
    cli.main([*few, "--ranks", "8"])
    assert "8 ranks on 3 nodes" in capsys.readouterr().out
    cli.main(["--measure", "--constants", str(tmp_path / "mine.json")])
    assert "mine.json: " in capsys.readouterr().out


def test_a_link_must_be_known(tmp_path):
    constants.save(imagined(), tmp_path / "mine.json")
    without = [
        *GOOD.replace("--link 1Gbit", "").split(),
        "--constants",
        str(tmp_path / "mine.json"),
    ]
    with pytest.raises(SystemExit, match="--link must be given"):
        cli.main(without)


def test_command_line(tmp_path, capsys):
    """Every algorithm with every compression, a choice, and a picture."""
    picture = tmp_path / "plot.png"
    cli.main([*GOOD.split(), "--plot", str(picture)])
    out = capsys.readouterr().out
    assert "125M parameters, 16 ranks on 4 nodes, links of 1 Gbit/s" in out
    assert "Choose * stripes, " in out
    assert picture.read_bytes().startswith(b"\x89PNG")
