"""explain() and traffic(): predictions and measured traffic are equal."""

import pytest
import sweep
import torch

import pycomm


def test_plan_of_auto_is_what_auto_does(world):
    """For sizes on both sides of every crossover."""

    def body(group):
        seen = []
        for kib in (0, 4, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1024):
            x = torch.ones(kib * 256 + kib % 2)
            plan = group.explain(x.numel() * 4)
            pycomm.all_reduce(x, group=group)
            assert group.traffic() == (plan.steps, plan.bytes_in, plan.bytes_out), plan
            assert plan.algorithm in ("one_shot", "two_shot")
            assert plan.device == "cpu"
            assert plan.path == "staged"
            assert "measured" in plan.why or "table" in plan.why
            seen.append(plan.algorithm)
        return seen

    for size in (2, 3, 4, 5):
        choices = world(size).run(body)
        assert choices.count(choices[0]) == size  # the same on every rank
        assert choices[0] == sorted(choices[0])  # one crossover: one_shot, then two_shot


@pytest.mark.parametrize("algorithm", sweep.ALGORITHMS)
def test_named_algorithms(world, algorithm):
    group = world(4).groups[2]
    staged = group.explain(1 << 20, algorithm=algorithm)
    assert (staged.algorithm, staged.path) == (algorithm, "staged")
    assert "caller" in staged.why
    window = group.explain(1 << 20, algorithm=algorithm, in_window=True)
    assert window.path == ("staged" if algorithm == "one_shot" else "window")
    assert window.bytes_in <= staged.bytes_in


def test_every_algorithm_has_costs(world):
    """A new algorithm needs no formula: its costs are counted."""
    group = world(2).groups[0]
    for algorithm in pycomm._C.algorithms.keys() - {"multicast"}:
        assert group.explain(4096, algorithm=algorithm).bytes_in > 0
    assert len(group.explain(4096, algorithm="multicast", device="cuda").links) == 1


def test_a_world_of_one_moves_nothing(world):
    group = world(1).groups[0]
    for algorithm in (*sweep.ALGORITHMS, "auto"):
        plan = group.explain(4096, torch.float16, algorithm=algorithm)
        assert (plan.path, plan.steps, plan.bytes_in, plan.bytes_out) == ("alone", 0, 0, 0)


def test_plans_are_values(world):
    group = world(3).groups[0]
    assert group.explain(64) == group.explain(64)
    assert group.explain(64) != group.explain(128)
    assert isinstance(group.explain(64), pycomm.Plan)
    with pytest.raises(AttributeError):
        group.explain(64).steps = 3


def test_no_bytes(world):
    for algorithm in sweep.ALGORITHMS:
        plan = world(3).groups[1].explain(0, algorithm=algorithm)
        assert (plan.steps, plan.bytes_in, plan.bytes_out) == (0, 0, 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_wrong_arguments(world, device):
    """As the call refuses them, on each device."""
    group = world(2).groups[0]
    for wrong, words in (
        ({"algorithm": "rings"}, "algorithm must be one of"),
        ({"nbytes": 3}, "nbytes must be a multiple of 4"),
        ({"device": "tpu"}, "device must be cpu or cuda, got 'tpu'"),
        (
            {"algorithm": "multicast", "dtype": torch.int32},
            "sum and avg of float32, float16 and bfloat16, which switches add, got sum of int32",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            group.explain(**{"nbytes": 64, "device": device} | wrong)
