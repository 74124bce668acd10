"""The table of docs/reference/options.md says which options of training combine."""

import combinations
import pytest


@pytest.fixture(scope="module")
def on_one_node():
    return combinations.outcomes()


def test_table(on_one_node):
    """`PYTHONPATH=tests/support python tests/support/combinations.py` writes it anew."""
    assert combinations.tables(on_one_node) == combinations.shown()


@pytest.mark.slow
def test_nodes(on_one_node):
    """Several nodes make no difference, but for what nodes of threads refuse."""
    needs_processes = {"`should_commit()`", "`Sharding(replicas=2)`"}
    between = combinations.outcomes(nodes=[1, 1])
    compared = {pair for pair in between if not pair & needs_processes}
    assert len(compared) > 100
    assert {pair: between[pair] for pair in compared} == {
        pair: on_one_node[pair] for pair in compared
    }
