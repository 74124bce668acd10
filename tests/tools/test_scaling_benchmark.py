"""The benchmark of scaling: what it times, and what it makes of times that are made up."""

import json

import pytest
from helpers import join_world, run_ranks

from pycomm.bench import cli, measure, plot, scaling

WAYS = ("none", "ddp", "wrapper", "gloo")


def session(rank, size, store, path):
    join_world(rank, size, store)
    argv = "scaling -p 1M --batch 1 -n 1 -w 0"
    scaling.time_steps(cli.parse(argv.split()), path)


@pytest.mark.slow
def test_ranks_time_all_ways(tmp_path):
    """None has wrong gradients, and each holds parameters and gradients at least."""
    path = tmp_path / "found.json"
    run_ranks(2, session, str(path))
    found = json.loads(path.read_text())
    assert tuple(found["figures"]) == WAYS
    assert found["absent"] == {}
    assert set(found["wrong"].values()) == {0}
    assert all(held > 1.9 * 4 * found["parameters"] for held in found["memory"].values())
    assert all(columns["iterations"] == 1 for columns in found["figures"].values())


@pytest.fixture
def made_up(monkeypatch):
    """Two cores; steps without communication take 100 us per rank, and others a half more."""

    def of(_settings, ranks):
        times = {"none": 100.0 * ranks, "wrapper": 150.0 * ranks}
        figures = {name: measure.summarise([[t]], 1).columns() for name, t in times.items()}
        return {
            "figures": figures, "absent": {"nccl": "needs GPUs"}, "parameters": 1 << 20,
            "memory": dict.fromkeys(times, 3 << 20), "wrong": dict.fromkeys(times, 0),
        }  # fmt: skip

    monkeypatch.setattr(scaling, "_measure", of)
    monkeypatch.setattr(scaling.collect_env, "usable_cores", lambda: 2)


@pytest.mark.usefixtures("made_up")
def test_figures_and_picture(tmp_path, monkeypatch, capsys):
    path, picture, drawn = tmp_path / "scaling.json", tmp_path / "scaling.png", []
    save = plot.save
    monkeypatch.setattr(plot, "save", lambda figure, to: drawn.append(figure) or save(figure, to))
    argv = ["scaling", "--ranks", "1,2,4", "-J", str(path), "--plot", str(picture)]
    cli.main(argv)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["ranks"], row["name"]) for row in rows] == [
        (ranks, name) for ranks in (1, 2, 4) for name in ("none", "wrapper")
    ]
    assert [row["speedup"] for row in rows] == 3 * [1.0, 0.667]
    assert [row["efficiency_percent"] for row in rows] == [100, 66.7, 50, 33.3, None, None]
    assert [row["communication_percent"] for row in rows] == 3 * [0, 33.3]
    assert {row["memory_MiB"] for row in rows} == {3}
    said = capsys.readouterr().out
    assert said.count("no nccl: needs GPUs") == 1
    assert " - " in next(line for line in said.splitlines() if line.split()[:2] == ["4", "none"])
    speedup, efficiency = drawn[0].axes
    ideal, *ways = speedup.lines
    assert ideal.get_xydata().tolist() == [[1, 1], [2, 2], [4, 4]]
    assert [len(line.get_xdata()) for line in ways] == [3, 3]
    assert [len(line.get_xdata()) for line in efficiency.lines[1:]] == [2, 2]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ranks", ["2,1", "0,1", "1,1", "1,two", ""])
def test_nonsense_is_refused(ranks, capsys):
    with pytest.raises(SystemExit):
        cli.parse(["scaling", "--ranks", ranks])
    assert "expected numbers from 1 on that grow" in capsys.readouterr().err


def test_it_starts_its_ranks_itself(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit, match="without torchrun"):
        cli.main(["scaling"])
