"""Exporters of statistics, with the real packages, which only their own tests import."""

import json
import logging
import struct
import threading
from dataclasses import replace

import pytest
import torch

import pycomm
from pycomm import exporters
from pycomm._peaks import GAUGES, KINDS, PHASES, REST, MemoryPeak
from pycomm.stats import OperationStats, RankTimes, Stats, Times

MIDDLES = [0.001 * i for i in range(10)]


def row(size, count=4):
    whole = Times(0.003 * count, {1: count // 2, 5: count - count // 2}, MIDDLES)
    exchange = Times(0.002, {1: 1}, MIDDLES)
    total = 2 * size * count
    return OperationStats("all_reduce", "int8", "cpu", size, count, total, whole, exchange)


def of(*rows):
    ranks = {0: RankTimes(2.0, 8.0), 1: RankTimes(4.0, 6.0), 2: RankTimes(5.0, 5.0)}
    return Stats(1, 3, rows, ranks)


EXPECTED = {
    "operations_total": 4.0,
    "bytes_total": 32768.0,
    "p50_seconds": 0.001,
    "p99_seconds": 0.005,
    "late_seconds": 0.001,
    "transfer_seconds": 0.001,
    "contention_seconds": 0.001,
    "gb_per_second": 32768 / 0.008 / 1e9,
}
EXPECTED_OF_RANK = {
    "own_seconds_total": 4.0,
    "blocked_seconds_total": 6.0,
    "skew_score": 0.5,
    "slowest_rank": 2.0,
    "lowest_skew_score": 0.4,
}


def expected_by_path():
    of_row = {f"pycomm/rank1/all_reduce/int8/cpu/4096/{n}": v for n, v in EXPECTED.items()}
    return of_row | {f"pycomm/rank1/{n}": v for n, v in EXPECTED_OF_RANK.items()}


def test_samples():
    told = {sample.path: sample.value for sample in exporters.samples_of(of(row(4096)))}
    assert told == pytest.approx(expected_by_path())


def test_peaks_of_memory(tmp_path):
    peak = MemoryPeak({"activations": 7}, {"resident": 9}, 1)
    stats = replace(of(), memory={"backward": peak})
    told = {sample.path: sample.value for sample in exporters.samples_of(stats)}
    assert told["pycomm/rank1/backward/activations/memory_bytes"] == 7
    assert told["pycomm/rank1/backward/resident/memory_bytes"] == 9
    exporters.write_prometheus(stats, tmp_path / "x.prom")
    line = 'pycomm_memory_bytes{rank="1",phase="backward",kind="activations"} 7.0\n'
    assert line in (tmp_path / "x.prom").read_text()


def test_series_are_bounded():
    rows = [row(1 << i, count=i + 1) for i in range(40)]
    peak = MemoryPeak(dict.fromkeys([*KINDS, REST], 1), dict.fromkeys(GAUGES, 1), 1)
    stats = replace(of(*rows), memory=dict.fromkeys(PHASES, peak))
    samples = list(exporters.samples_of(stats))
    assert len(samples) == len({sample.path for sample in samples}) == 321
    kept = {int(sample.labels["size"]) for sample in samples if "size" in sample.labels}
    assert kept == {1 << i for i in range(8, 40)}  # those that have taken the most time


def test_before_the_first_operation(tmp_path):
    empty = Stats(0, 2, (), {0: RankTimes(0.0, 0.0), 1: RankTimes(0.0, 0.0)})
    assert [sample.name for sample in exporters.samples_of(empty)] == [
        "own_seconds_total",
        "blocked_seconds_total",
    ]
    exporters.write_prometheus(empty, tmp_path / "x.prom")


def test_the_text_of_prometheus(tmp_path):
    path = tmp_path / "pycomm.prom"
    exporters.write_prometheus(of(row(4096), row(8192)), path)
    lines = path.read_text().splitlines()
    begin = lines.index("# TYPE pycomm_operations_total counter")
    assert lines[begin - 1].startswith("# HELP pycomm_operations_total ")
    kind = 'rank="1",operation="all_reduce",codec="int8",device="cpu"'
    assert lines[begin + 1 : begin + 3] == [
        f'pycomm_operations_total{{{kind},size="{size}"}} 4.0' for size in (4096, 8192)
    ]
    assert "# TYPE pycomm_skew_score gauge" in lines
    assert 'pycomm_skew_score{rank="1"} 0.5' in lines
    assert [entry.name for entry in tmp_path.iterdir()] == ["pycomm.prom"]
    with pytest.raises(OSError, match="missing"):
        exporters.write_prometheus(of(), tmp_path / "missing" / "pycomm.prom")


def test_what_was_not_timed_has_no_times():
    untimed = OperationStats(
        "barrier", "none", "cpu", 0, 3, 0, Times(0.0, {}, MIDDLES), Times(0.0, {}, MIDDLES)
    )
    told = [sample.name for sample in exporters.samples_of(of(untimed))]
    assert told == ["operations_total", "bytes_total", *EXPECTED_OF_RANK]


def test_files_of_ranks_that_have_gone_are_removed(world, tmp_path):
    """After a shrink ranks have new numbers; other files stay."""
    for name in ("pycomm_x.prom", "other_7.prom", "pycomm_7.prom.old"):
        (tmp_path / name).touch()
    names = [f"pycomm_{rank}.prom" for rank in range(3)]

    def body(group):
        pycomm.barrier(group=group)
        exporters.write_prometheus(group.stats(), tmp_path / "pycomm_{rank}.prom")
        assert group.should_commit()
        assert all((tmp_path / name).exists() for name in names)
        assert group.should_commit()
        if group.rank == 1:
            group.close()
            return
        with group.shrink() as smaller:
            exporters.write_prometheus(smaller.stats(), tmp_path / "pycomm_{rank}.prom")
            smaller.should_commit()

    world(3).run(body)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(
        ["pycomm_x.prom", "other_7.prom", "pycomm_7.prom.old", *names[:2]]
    )
    assert 'rank="1"' in (tmp_path / "pycomm_1.prom").read_text()


def test_nodes_share_a_directory(monkeypatch, tmp_path):
    """Each node has two ranks; then one node has one rank less, and the ranks other numbers."""
    path = tmp_path / "{rank}.prom"

    def write(node, *ranks):
        monkeypatch.setattr(exporters, "node_identity", lambda: node)
        for rank in ranks:
            own = dict.fromkeys(ranks, RankTimes(1.0, 0.5))
            exporters.write_prometheus(Stats(rank, 4, (), own), path)
        return sorted(file.name for file in tmp_path.iterdir())

    write("a", 0, 1)
    assert write("b", 2, 3) == ["0.prom", "1.prom", "2.prom", "3.prom"]
    assert write("a", 0) == ["0.prom", "2.prom", "3.prom"]
    assert write("b", 1, 2) == ["0.prom", "1.prom", "2.prom"]
    (tmp_path / "7.prom").write_bytes(b"\xff another program's")
    assert write("b", 1, 2) == ["0.prom", "1.prom", "2.prom", "7.prom"]


def test_readers_see_whole_files(tmp_path):
    path, over = tmp_path / "pycomm.prom", threading.Event()
    stats = of(*(row(1 << i) for i in range(32)))
    exporters.write_prometheus(stats, path)
    whole = path.read_text()

    def write():
        while not over.is_set():
            exporters.write_prometheus(stats, path)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert all(path.read_text() == whole for _ in range(300))
    finally:
        over.set()
        thread.join()


def test_prometheus_reads_it(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    path = tmp_path / "pycomm.prom"
    exporters.write_prometheus(of(row(4096)), path)
    families = list(text_string_to_metric_families(path.read_text()))
    told = {}
    for family in families:
        for sample in family.samples:
            assert sample.labels["rank"] == "1"
            assert (family.type == "counter") == sample.name.endswith("_total")
            told[sample.name.removeprefix("pycomm_")] = sample.value
    assert told == pytest.approx(EXPECTED | EXPECTED_OF_RANK)


def test_tensorboard_reads_it(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        exporters.add_to_tensorboard(of(row(4096)), writer, 7)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    told = {}
    for tag in events.Tags()["scalars"]:
        (event,) = events.Scalars(tag)
        assert event.step == 7
        told[tag] = event.value
    assert told == pytest.approx(expected_by_path())


@pytest.mark.slow
def test_mlflow_reads_it(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        exporters.log_to_mlflow(of(row(4096)), 7)
    client = mlflow.MlflowClient()
    assert client.get_run(run.info.run_id).data.metrics == pytest.approx(expected_by_path())
    (metric,) = client.get_metric_history(run.info.run_id, "pycomm/rank1/skew_score")
    assert metric.step == 7


def records_of(file):
    """The records of an offline run: LevelDB's format of logs, after a header of 7 bytes."""
    data, at, record = file.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def test_wandb_reads_it(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(init_timeout=250)
    with wandb.init(mode="offline", dir=tmp_path, settings=settings):
        exporters.log_to_wandb(of(row(4096)), 7)
    wandb.teardown()  # waits for the process that writes
    (file,) = tmp_path.rglob("*.wandb")
    (history,) = (
        record.history
        for record in map(Record.FromString, records_of(file))
        if record.HasField("history")
    )
    items = {item.key or "".join(item.nested_key): item.value_json for item in history.item}
    assert history.step.num == json.loads(items["_step"]) == 7
    told = {name: json.loads(text) for name, text in items.items() if not name.startswith("_")}
    assert told == pytest.approx(expected_by_path())


def test_opentelemetry_reads_it(caplog):
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    meter = metrics.MeterProvider([reader]).get_meter("train")
    exporters.set_opentelemetry(of(row(4096, 2)), meter)
    exporters.set_opentelemetry(of(row(4096)), meter)
    ((scope,),) = (one.scope_metrics for one in reader.get_metrics_data().resource_metrics)
    told = {
        "/".join(["pycomm/rank1", *list(point.attributes.values())[1:], metric.name[7:]]): point
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    assert {path: point.value for path, point in told.items()} == pytest.approx(expected_by_path())
    assert {point.attributes["rank"] for point in told.values()} == {"1"}
    assert not caplog.records


def test_logs(caplog, world):
    def body(group):
        pycomm.all_reduce(torch.ones(100_000), group=group)
        return group.stats()

    stats = world(2).run(body)[0]
    with caplog.at_level(logging.INFO):
        exporters.log(stats, logging.getLogger("train"))
    assert "all_reduce" in caplog.text
    assert "262,144" in caplog.text
