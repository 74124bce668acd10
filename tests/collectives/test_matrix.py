"""The tables "What runs where" of docs/reference/api.md, for tensors on the CPU."""

import matrix
import pytest


@pytest.mark.parametrize(
    ("column", "nodes"), [("CPU, one node", None), ("CPU, several nodes", (2, 1))]
)
def test_what_runs_on_the_cpu(world, column, nodes):
    table = matrix.documented(column)
    assert table.keys() == matrix.PROGRAMS.keys()
    assert world(matrix.RANKS, nodes=nodes).run(matrix.cells, "cpu") == [table] * matrix.RANKS


def test_what_it_has_run_on():
    assert "\n".join(matrix.status()) in matrix.PAGE.read_text()
