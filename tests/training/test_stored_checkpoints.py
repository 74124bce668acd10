"""Checkpoints that earlier code has written load, and training goes on with the same bits."""

import dataclasses
import functools

import helpers
import pytest
import stored_checkpoints as stored
import sweep
import torch
from stored_checkpoints import (
    HOOKS,
    IN_PLACES,
    PLACES,
    RULES,
    SAVED,
    STATES,
    case,
    digest,
    is_large,
)

GATHERED = [name for name in STATES if stored.gathers(name)]


def read(name):
    return torch.load(stored.FOLDER / f"{name}.pt", weights_only=True)


def holds(values, wanted):
    """Compares digests; later code may keep more."""
    missing = {path: value for path, value in wanted.items() if values.get(path) != value}
    assert not missing, {path: (value, values.get(path)) for path, value in missing.items()}


def resume(training, saved):
    """Loads a checkpoint and trains on; returns digests of the loaded states and of the last."""
    training.load(saved)
    return digest(training.save()), training.finish()


def elsewhere(of):
    """The same optimizer with another learning rate, which the checkpoint changes."""
    return dataclasses.replace(of, options={**of.options, "lr": 64.0})


def goes_on(place, of, record, large=False):
    body = functools.partial(resume, saved=record["saved"])
    for loaded, after in PLACES[place](elsewhere(of), body, large=large, seed=9):
        holds(loaded, digest(record["saved"]))
        holds(after, record["after"])


@pytest.mark.parametrize(("rule", "place"), sweep.a_third_of(RULES, PLACES))
def test_an_optimizer_goes_on_in_every_place(rule, place):
    records = read(rule)
    assert records.keys() == stored.FORMS.keys()
    for form, record in records.items():
        goes_on(place, case(rule, form), record, is_large(form))


@pytest.mark.parametrize(("name", "place"), sweep.a_third_of(IN_PLACES, PLACES))
def test_gathered_states_go_on_in_every_place(name, place):
    goes_on(place, IN_PLACES[name], read(name), is_large(name))


@pytest.mark.parametrize("place", ["alone", "sharded_states"])
def test_the_form_of_torch_has_all_that_ours_has(place):
    ours = read("adamw")["remainder"]
    body = functools.partial(resume, saved=read("torch")["saved"])
    for loaded, after in PLACES[place](case("adamw", "remainder"), body, seed=9):
        holds(loaded, digest(ours["saved"]))
        holds(after, ours["after"])


def resume_parts(group, shard):
    of = IN_PLACES["sharded_states"]
    training = stored.Training(elsewhere(of), group, large=True, seed=9, shard=shard)
    stored.load_parts(training, stored.FOLDER / stored.PARTS)
    return digest(training.save()), training.finish()


@pytest.mark.parametrize(
    ("ranks", "shard"), [(3, "optimizer"), (2, "gradients"), (4, "optimizer"), (1, None)]
)
def test_parts_go_on_on_any_number_of_ranks(ranks, shard):
    wanted = read(stored.PARTS)
    for loaded, after in helpers.run_group(ranks, resume_parts, shard):
        holds(loaded, wanted["loaded"])
        holds(after, wanted["after"])


def resume_rank(training, records, gathered):
    record = records[training.rank]
    saved = record["saved"]
    if gathered:
        saved = {**records[0]["saved"], "comm": records[0]["gathered"]}
    loaded, after = resume(training, saved)
    holds(loaded, digest(record["saved"]))
    holds(after, record["after"])


@pytest.mark.parametrize("name", STATES)
def test_a_state_goes_on(name):
    body = functools.partial(resume_rank, records=read(name), gathered=False)
    stored.with_state(name, 2, body, seed=9)


@pytest.mark.parametrize("name", GATHERED)
def test_every_rank_finds_its_own_among_gathered_residuals(name):
    body = functools.partial(resume_rank, records=read(name), gathered=True)
    stored.with_state(name, 2, body, seed=9)


def residuals(comm):
    """The part of a state that has residuals, and the number of its steps."""
    return comm.get("differences", comm)


def load_and_train(training, saved):
    training.load(saved)
    comm = residuals(training.comm.state_dict())
    training.train(range(SAVED, 2 * SAVED))
    return comm, digest(training.net.state_dict())


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", GATHERED)
def test_another_number_of_ranks_gets_the_mean_of_residuals(name, ranks):
    records = read(name)
    gathered = records[0]["gathered"]
    body = functools.partial(load_and_train, saved={**records[0]["saved"], "comm": gathered})
    found = stored.with_state(name, ranks, body, seed=9)
    one, other = (residuals(record["saved"]["comm"])["kept"] for record in records)
    mean = {
        kind: {name: (values + other["1"][kind][name]) / 2 for name, values in kept.items()}
        for kind, kept in one["0"].items()
    }
    for rank, (comm, parameters) in enumerate(found):
        assert comm["step"] == residuals(gathered)["step"]
        assert digest(comm["kept"]) == digest({str(rank): mean})
        assert parameters == found[0][1]


def resume_hook(group, name, records):
    for gathered in (False, True):
        stored.with_hook(group, name, resume_rank, records, gathered)


@pytest.mark.parametrize("name", HOOKS)
def test_the_state_of_a_hook_goes_on(name):
    helpers.run_group(2, resume_hook, name, read(name))


def test_every_file_is_read():
    names = {path.stem for path in stored.FOLDER.glob("*.pt")}
    assert names == {*RULES, *IN_PLACES, *STATES, *HOOKS, "torch", stored.PARTS}
