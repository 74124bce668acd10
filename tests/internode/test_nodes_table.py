"""A table of algorithms: what ``algorithm="auto"`` runs between nodes, and where it does not."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import golden
import golden_nodes
import growing
import helpers
import pytest
import spanning
import torch
from test_nodes import DTYPES, HANDSHAKE, OPS, tensor
from test_nodes_state_algorithms import COUNT, Given, inputs

import pycomm
from pycomm import hooks
from pycomm._runtime import algorithm_table

RING = [{"algorithm": "ring"}]
BY_SIZE = [
    {"nodes": 2, "algorithm": "ring"},
    {"bytes": 4 * 1000, "algorithm": "tree"},
    {"bytes": 4 * 2000, "algorithm": "two_shot"},
    {"ranks": 4, "bytes": 4 * 3000, "algorithm": "ring"},
]


@pytest.fixture
def table(tmp_path):
    """Writes a table; returns its path."""
    numbers = itertools.count()

    def write(rows: object) -> str:
        path = tmp_path / f"{next(numbers)}.json"
        path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
        return str(path)

    return write


def matching(rows: list[dict], nodes: int, ranks: int, nbytes: int) -> dict | None:
    """The row that applies."""
    of = {"nodes": nodes, "ranks": ranks, "bytes": nbytes}
    applies = [row for row in rows if all(of[name] <= row.get(name, of[name]) for name in of)]
    return applies[0] if applies else None


@pytest.mark.parametrize("seed", range(3))
def test_the_first_row_that_applies_counts(world, table, seed):
    draw = random.Random(seed)
    layouts = [[1, 1], [2, 1], [1, 1, 1], [2, 1, 1]]
    for _ in range(10):
        rows = []
        for _ in range(draw.randrange(7)):
            row = {"algorithm": draw.choice(algorithm_table.ALGORITHMS)}
            limits = {"nodes": (1, 4), "ranks": (1, 5), "bytes": (1, 5000)}
            rows.append(
                row | {n: draw.randint(*of) for n, of in limits.items() if draw.random() < 0.4}
            )
        layout = draw.choice(layouts)
        groups = world(sum(layout), nodes=layout, algorithms=table(rows))
        edges = [row["bytes"] for row in rows if "bytes" in row]
        for nbytes in [0, 4, *(4 * (edge // 4) + more for edge in edges for more in (0, 4))]:
            row = matching(rows, len(layout), sum(layout), nbytes)
            plans = {group.explain(nbytes) for group in groups}
            assert {plan.algorithm for plan in plans} == {row["algorithm"] if row else "two_shot"}
            for plan in plans:
                number = re.match(r"row (\d+) of the table: ", plan.why)
                assert (rows[int(number[1]) - 1] if number else None) == row, plan.why


def test_reasons(world, table):
    def why(rows: list[dict] | None, nbytes: int, **options) -> str:
        given = {} if rows is None else {"algorithms": table(rows)}
        return world(3, nodes=[1, 1, 1], **given).groups[0].explain(nbytes, **options).why

    assert why(None, 4) == why([], 4) == "no table: two-shot between nodes, whatever the size"
    assert why(BY_SIZE, 4000) == "row 2 of the table: up to 4,000 bytes"
    assert why(BY_SIZE, 12_000) == "row 4 of the table: up to 4 ranks, up to 12,000 bytes"
    assert why(BY_SIZE, 12_004) == "none of the table's 4 rows applies"
    assert why(RING, 4) == "row 1 of the table: everything"
    assert why(RING, 4, algorithm="tree") == "named by the caller"


@pytest.mark.parametrize("nodes", [[1, 1], [1, 1, 1], [2, 1, 1], [2, 2, 1]], ids=str)
def test_auto_has_the_bits_of_what_the_table_says(world, table, nodes):
    """And bytes on the links; on every way into C++."""
    groups = world(sum(nodes), nodes=nodes, algorithms=table(BY_SIZE))
    for count in (1, 999, 1000, 1001, 2000, 2001, 3000, 3001, 50_000):
        row = matching(BY_SIZE, len(nodes), sum(nodes), 4 * count)
        algorithm = row["algorithm"] if row else "two_shot"
        given = [tensor(torch.float32, count, rank) for rank in range(sum(nodes))]
        wanted = golden_nodes.all_reduced(given, "sum", nodes, algorithm)
        in_order = golden_nodes.all_reduced(given, "sum", nodes, "two_shot")

        def body(group, given=given):
            x = given[group.rank]
            made = [pycomm.all_reduce(x.clone(), group=group)]
            sent = group.link_traffic()
            pycomm.all_reduce(later := x.clone(), group=group, async_op=True).wait()
            pycomm.all_reduce(sparse := torch.stack([x, x], 1)[:, 1], group=group)
            made += [later, sparse, torch.ops.pycomm.all_reduce(x, "sum", "auto", group.name)]
            fixed = [pycomm.all_reduce(x.clone(), deterministic=True, group=group)]
            pycomm.all_reduce(
                other := torch.stack([x, x], 1)[:, 1], deterministic=True, group=group
            )
            fixed += [other, pycomm.all_reduce(x.clone(), algorithm="two_shot", group=group)]
            plan = group.explain(4 * len(x))
            return made, fixed, sent, (plan.bytes_out, plan.bytes_in)

        for made, fixed, sent, planned in groups.run(body):
            assert all(golden.same_bits(result, wanted) for result in made), count
            assert all(golden.same_bits(result, in_order) for result in fixed), count
            handshakes = HANDSHAKE * (len(nodes) - 1) if sent != (0, 0) else 0
            assert sent == (planned[0] + handshakes, planned[1] + handshakes), count


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_all_dtypes_and_reductions(world, table, algorithm):
    nodes = [2, 1, 1]
    groups = world(4, nodes=nodes, algorithms=table([{"algorithm": algorithm}]))
    for dtype, op in itertools.product(DTYPES, OPS):
        given = [tensor(dtype, 5003, rank) for rank in range(4)]
        wanted = golden_nodes.all_reduced(given, op, nodes, algorithm)
        results = groups.run(
            lambda group, given=given, op=op: pycomm.all_reduce(
                given[group.rank].clone(), op, group=group
            )
        )
        assert all(golden.same_bits(result, wanted) for result in results), (dtype, op)


def everything_else(group: pycomm.Group) -> list[torch.Tensor]:
    """What a table does not change: compressed and other operations, hooks, the wrapper."""
    x = tensor(torch.float32, 12 * 2001, group.rank)
    part = torch.empty(x.numel() // group.size)
    made = [
        pycomm.compressed_all_reduce(x.clone(), pycomm.Int8(), group=group),
        pycomm.reduce_scatter(part, x, group=group),
        pycomm.reduce(x.clone(), 0, group=group),
    ]
    gradient = inputs(group.size)[group.rank]
    net = Given()
    state = hooks.AllReduceState(group=group)
    state.start(sent := gradient.clone(), [net.x])
    state.finish()
    made.append(sent)
    for options in ({}, {"shard": "optimizer"}, {"compression": pycomm.Int8()}):
        net = Given()
        model = pycomm.DataParallel(net, group=group, **options)
        optimizer = pycomm.optim.FusedAdamW(net.parameters())
        model(gradient).backward()
        optimizer.step()
        made.append(net.x.detach().clone())
    return made


@pytest.mark.parametrize("nodes", [[1, 1, 1], [2, 1, 1]], ids=str)
def test_hooks_and_wrapper_and_other_operations_stay_as_they_are(world, table, nodes):
    wanted = world(sum(nodes), nodes=nodes).run(everything_else)
    made = world(sum(nodes), nodes=nodes, algorithms=table(RING)).run(everything_else)
    for results, expected in zip(made, wanted, strict=True):
        assert [*map(golden.same_bits, results, expected)] == [True] * len(expected)
    averages = golden_nodes.all_reduced(inputs(sum(nodes)), "avg", nodes, "two_shot")
    others = golden_nodes.all_reduced(inputs(sum(nodes)), "avg", nodes, "ring")
    assert golden.same_bits(made[0][3], averages)
    assert not golden.same_bits(averages, others)


def test_why_buckets_ignore_the_table(world, table):
    def body(group):
        state = hooks.AllReduceState(group=group)
        state.start(torch.zeros(COUNT), [Given().x])
        state.finish()
        (plan,) = state.explain().buckets
        return plan.algorithm, plan.why

    wanted = ("two_shot", "gradients take it at every size, whatever the group's table says")
    assert world(2, nodes=[1, 1], algorithms=table(RING)).run(body) == [wanted] * 2


def test_one_node_ignores_the_table(world, table):
    with_table = world(3, algorithms=table(RING)).groups[0]
    assert with_table.explain(1 << 20) == world(3).groups[0].explain(1 << 20)


def test_over_nccl_the_table_is_ignored(world, table, monkeypatch):
    group = world(2, nodes=[1, 1], algorithms=table(RING)).groups[0]
    assert group.explain(4, device="cuda").algorithm == "ring"  # over Gloo
    monkeypatch.setattr(group, "_span", SimpleNamespace(node=None))
    plan = group.explain(4, device="cuda")
    assert (plan.algorithm, plan.device) == ("two_shot", "cuda")
    assert plan.bytes_out == group.explain(4).bytes_out
    assert plan.why == "over NCCL there is no other, whatever the table says"
    assert group.explain(4).algorithm == "ring"
    assert [link.link for link in plan.links] == ["NCCL, which chooses the link"]
    with pytest.raises(ValueError, match="algorithm must be auto or two_shot between nodes over"):
        group.explain(4, algorithm="ring", device="cuda")


WRONG = [
    ("[{]", r"must be a JSON file: .*line 1"),
    ('{"algorithm": "ring"}', r"must have a list of rows, got \{'algorithm': 'ring'\}"),
    (["ring"], r"row 1 must be an object, got 'ring'"),
    ([*RING, {"node": 2, "algorithm": "ring"}], r"row 2 may have the fields nodes, .*got 'node'"),
    ([*RING, {}], r"row 2: algorithm must be one of two_shot, ring, tree, got None"),
    ([{"algorithm": "one_shot"}], r"row 1: algorithm must be one of .*, got 'one_shot'"),
    ([{"algorithm": ["ring"]}], r"row 1: algorithm must be one of .*, got \['ring'\]"),
    (
        [{"bytes": 0, "algorithm": "ring"}],
        r"row 1: bytes must be a whole number from 1 to .*, got 0",
    ),
    ([{"bytes": 1e6, "algorithm": "ring"}], r"row 1: bytes must be .*, got 1000000\.0"),
    ([{"ranks": True, "algorithm": "ring"}], r"row 1: ranks must be .*, got True"),
    ([{"nodes": 2**31, "algorithm": "ring"}], r"row 1: nodes must be .* to 2147483647, got 2"),
    ([{"bytes": 2**63, "algorithm": "ring"}], r"row 1: bytes must be .*, got 9223372036854775808"),
]


@pytest.mark.parametrize(("rows", "error"), WRONG, ids=lambda x: str(x)[:30])
def test_files_that_are_no_table(table, rows, error):
    path = table(rows)
    with pytest.raises(ValueError, match=f"^algorithms: {re.escape(path)}:? {error}"):
        pycomm.LocalWorld(2, nodes=[1, 1], algorithms=path)


# In processes.


def bits_and_table(group: pycomm.Group) -> tuple[torch.Tensor, tuple[str, str]]:
    x = tensor(torch.float32, 5003, group.ranks[group.rank])
    plan = group.explain(x.nbytes)
    return pycomm.all_reduce(x, group=group), (plan.algorithm, plan.why)


def test_processes_get_the_table(table):
    nodes = [1, 1, 1]
    given = [tensor(torch.float32, 5003, rank) for rank in range(3)]
    wanted = golden_nodes.all_reduced(given, "sum", nodes, "ring")
    for bits, plan in spanning.run(nodes, bits_and_table, algorithms=table(RING)):
        assert golden.same_bits(bits, wanted)
        assert plan == ("ring", "row 1 of the table: everything")


def refused(rank: int, size: int, store: str, nodes: str, paths: list[str | None]) -> str:
    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    try:
        pycomm.init(timeout=60, algorithms=paths[rank])
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("nodes", ["ab", "aa"])
def test_different_tables_raise_on_all_ranks(table, nodes):
    same = table(json.dumps(BY_SIZE, indent=4))
    assert helpers.run_ranks(2, refused, nodes, [table(BY_SIZE), same]) == ["", ""]
    for other in (table(RING), None):
        for told in helpers.run_ranks(2, refused, nodes, [table(BY_SIZE), other]):
            assert told.startswith("ValueError: algorithms must be the same on every rank: rank 0")
            assert str(BY_SIZE) in told


def test_a_rank_without_a_valid_file_raises_on_all(table, tmp_path):
    absent = str(tmp_path / "absent.json")
    for wrong, what in (absent, "No such file"), (table("[1]"), "row 1 must be an object, got 1"):
        told = helpers.run_ranks(2, refused, "ab", [table(RING), wrong])
        assert told[0].startswith("ValueError: rank 1 could not introduce itself: ")
        assert all(what in text and wrong in text for text in told), told


def shrinks(group: pycomm.Group) -> object:
    before = bits_and_table(group)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    spanning.operate_until_failure(group)
    return before, bits_and_table(group.shrink())


def test_a_smaller_group_keeps_the_table(table):
    """Also if nobody can read the file any more; with the row for its size."""
    rows = [{"nodes": 3, "algorithm": "ring"}, {"algorithm": "tree"}]
    options = {"algorithms": table(rows), "timeout": 20}
    with spanning.ranks([1, 1, 1, 1], shrinks, **options) as ranks:
        seen = [outcome.value for outcome in ranks.join()]
    given = [tensor(torch.float32, 5003, rank) for rank in range(4)]
    left = [given[rank] for rank in (0, 2, 3)]
    for before, after in filter(None, seen):
        assert golden.same_bits(before[0], golden_nodes.all_reduced(given, "sum", [1] * 4, "tree"))
        assert golden.same_bits(after[0], golden_nodes.all_reduced(left, "sum", [1] * 3, "ring"))
        assert after[1] == ("ring", "row 1 of the table: up to 3 nodes")
    assert len([*filter(None, seen)]) == 3


def grows(rank: int, size: int, store: str, nodes: str, path: str, algorithms: str) -> object:
    spanning.pretend(nodes[rank])
    helpers.join_world(rank, size, store)
    group = pycomm.init(timeout=60, algorithms=algorithms)
    growing.publish(group, path)
    while group.size == size:
        group = group.grow()
    return bits_and_table(group)


def joins(_rank: int, _size: int, _store: str, path: str) -> object:
    spanning.pretend("c")
    return bits_and_table(pycomm.join(Path(path), 60))


@pytest.mark.parametrize(("nodes", "after"), [("ab", [1, 1, 1]), ("aa", [2, 1])])
def test_a_larger_group_keeps_the_table(table, tmp_path, nodes, after):
    """Also if it begins to span nodes."""
    path = str(tmp_path / "address")
    with (
        helpers.Ranks(2, grows, nodes, path, table(RING)) as members,
        helpers.Ranks(1, joins, path) as newcomer,
    ):
        seen = [outcome.value for outcome in (*members.join(), *newcomer.join())]
    given = [tensor(torch.float32, 5003, rank) for rank in range(3)]
    wanted = golden_nodes.all_reduced(given, "sum", after, "ring")
    for bits, plan in seen:
        assert golden.same_bits(bits, wanted)
        assert plan == ("ring", "row 1 of the table: everything")


def test_the_log_shows_the_table(world, table, caplog):
    with caplog.at_level(logging.INFO, "pycomm"):
        world(2, nodes=[1, 1], algorithms=table(RING))
        world(2, nodes=[1, 1])
    told = [record.getMessage() for record in caplog.records]
    assert sum("table of algorithms: [{'algorithm': 'ring'}], " in text for text in told) == 2
    assert sum("table of algorithms: none, " in text for text in told) == 2
