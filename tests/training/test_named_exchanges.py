"""Errors, reports, traces and pycomm.top name the parameters of a bucket that was exchanged."""

import json
import signal
import subprocess
import sys
import threading
import time

import helpers
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import hooks
from pycomm._training.parameters import Parameters

WAYS = {
    "dense": {},
    "int8": {"compression": pycomm.Int8()},
    "gradients": {"shard": "gradients"},
    "optimizer": {"shard": "optimizer", "compression": pycomm.Int8()},
}
LAYERS = 4
CAP = 25_920 / 2**20  # a bias and a weight of a layer
# Backward reaches the last parameters first.
FIRST, SECOND = (f"layers.{i}.bias ... layers.{i}.weight (2 parameters)" for i in (3, 2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(80, 80) for _ in range(LAYERS)))

    def forward(self, x, between=None):
        """`between` is called in backward, between the last layer and the one before it."""
        x = self.layers[:-1](x)
        if between is not None:
            x.register_hook(between)
        return self.layers[-1](x)


def wrap(group, options):
    return pycomm.DataParallel(Model(), group=group, bucket_cap_mb=CAP, **options)


def stay_away(group, options):
    """Rank 1 does not come to the second bucket in time."""
    model = wrap(group, options)
    model(torch.ones(2, 80)).sum().backward()
    between = (lambda _: time.sleep(1.5)) if group.rank == 1 else None
    loss = model(torch.ones(2, 80), between).sum()
    with pytest.raises(pycomm.CollectiveError) as caught:
        loss.backward()
    return caught.value, group.report()


@pytest.mark.parametrize("way", WAYS)
def test_an_error_names_the_parameters_of_its_bucket(way):
    error, later = helpers.run_group(2, stay_away, WAYS[way], timeout=0.5)[0]
    assert f"; this rank exchanged {SECOND}; known to be complete" in str(error)
    for report in (error.report, later):
        subjects = [told.subject for told in report.ranks[0].operations]
        assert FIRST in subjects
        assert subjects[-1] == SECOND
        assert f" of {SECOND}, for " in str(report)
        assert json.loads(report.json())["ranks"][0]["operations"][-1]["subject"] == SECOND


def all_subjects(group):
    model = wrap(group, WAYS["int8"])
    for _ in range(2):
        model(torch.ones(2, 80)).sum().backward()
    pycomm.all_reduce(torch.ones(3), group=group)
    report = group.report(128)
    pycomm.barrier(group=group)
    return [[told.subject for told in rank.operations] for rank in report.ranks]


def test_what_is_no_bucket_has_no_name(world):
    for subjects in world(2).run(all_subjects)[0]:
        named = [subject for subject in subjects if subject]
        assert named[-2 * LAYERS :] == [  # a bias and a weight for each layer
            f"layers.{layer}.bias ... layers.{layer}.weight (2 parameters)"
            for layer in reversed(range(LAYERS))
            for _ in range(2)
        ]
        assert subjects[-1] == ""


def in_dying_group(rank, size, store):
    with helpers.member(rank, size, store, timeout=300) as group:
        model = DistributedDataParallel(Model(), bucket_cap_mb=CAP)
        state = hooks.Int8State(model.named_parameters(), group=group)
        model.register_comm_hook(state, hooks.int8_hook)
        for _ in range(2):
            model(torch.ones(2, 80)).sum().backward()
        if rank == 1:
            time.sleep(300)  # until it is killed
        loss = model(torch.ones(2, 80)).sum()
        with pytest.raises(pycomm.PeerDied) as caught:
            loss.backward()
        return str(caught.value), caught.value.report


def top(pid):
    """The reports of a process's groups, from another process."""
    command = [sys.executable, "-m", "pycomm.top", str(pid), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)["groups"]


def waiting_for(pid, rank):
    return [group for group in top(pid) if group["late"] == [rank]]


def test_others_see_names_also_of_the_dead():
    with helpers.Ranks(2, in_dying_group) as ranks:
        found = []  # looking takes seconds where much else runs
        helpers.wait_until(lambda: found or found.extend(waiting_for(ranks.pids[0], 1)), 200)
        (group,) = found
        for rank in group["ranks"]:
            assert any(told["subject"].endswith("parameters)") for told in rank["operations"])
        assert group["ranks"][0]["operations"][-1]["subject"].startswith("layers.3.")
        ranks.signal(1, signal.SIGKILL)
        (outcome,) = ranks.wait_for([0])
    assert outcome.error is None, outcome.trace
    message, report = outcome.value
    assert "this rank exchanged layers.3." in message
    last = report.ranks[1].operations[-1]
    assert report.ranks[1].gone
    assert last.subject.startswith("layers.0.")


def traced(group, path):
    model = wrap(group, {})
    with pycomm.trace(path, group=group):
        model(torch.ones(2, 80)).sum().backward()


def test_traces_name_them(world, tmp_path):
    path = tmp_path / "trace.json"
    world(2).run(traced, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    subjects = {e["args"].get("subject") for e in events if e.get("cat") == "operation"}
    assert FIRST in subjects
    assert None in subjects


def test_more_names_than_there_is_room_for(world):
    """The newest ones stay, also if they were there before; and threads do not share them."""
    (group,) = world(1)
    core = group._core

    def run(subject):
        core.subject = subject
        assert core.subject == subject
        pycomm.barrier(group=group)
        core.subject = ""

    for number in range(300):
        run(f"parameter {number}")
        run("always")
    run("parameter 0")
    subjects = [told.subject for told in group.report(3).ranks[0].operations]
    assert subjects == ["parameter 299", "always", "parameter 0"]
    core.subject = "mine"
    thread = threading.Thread(target=pycomm.barrier, kwargs={"group": group})
    thread.start()
    thread.join()
    core.subject = ""
    assert group.report(1).ranks[0].operations[0].subject == ""


def test_long_names_are_cut():
    names = [f"{'a.long.prefix.' * 20}layer{i}" for i in range(2)]
    tensors = [torch.ones(1, requires_grad=True) for _ in names]
    model = Parameters(zip(names, tensors, strict=True), None)
    for some, ends in ((tensors[:1], ["layer0"]), (tensors, ["layer0", "layer1"])):
        subject = model.subject(some)
        assert len(subject) <= 120
        assert subject.startswith("...")
        assert all(end in subject for end in ends)
    assert Parameters(None, None).subject(tensors) == ""


def test_names_in_other_letters(world):
    """Also names that are not valid Unicode."""
    (group,) = world(1)
    x = torch.ones(1, requires_grad=True)
    subject = Parameters([("\u5c64.\udc80", x)], None).subject([x])
    group._core.subject = subject
    assert group._core.subject == subject == r"\u5c64.\udc80"
    group._core.subject = ""


def test_a_smaller_group_has_names_of_its_own(world):
    """Its window lies in a heap, where room for names is reserved with the first one."""

    def body(group):
        assert group.should_commit()
        if group.rank == 1:
            group.close()
            return None
        with group.shrink() as smaller:
            model = wrap(smaller, WAYS["int8"])
            before = [told.subject for rank in smaller.report().ranks for told in rank.operations]
            model(torch.ones(2, 80)).sum().backward()
            smaller.should_commit()
            report = smaller.report(128)
            smaller.should_commit()
        return before, [[told.subject for told in rank.operations] for rank in report.ranks]

    before, after = world(3).run(body)[0]
    assert set(before) == {""}
    assert all({FIRST, SECOND} <= set(subjects) for subjects in after)
