"""The advisor: closed forms against cases by hand and against simulations; its tables."""

import dataclasses
import math

import pytest
import simulations
from hypothesis import given
from hypothesis import strategies as st
from imagined import MACHINE, TYPICAL, imagined

from pycomm.advise import advice, constants
from pycomm.advise.advice import Question
from pycomm.advise.constants import COMPRESSIONS, OPERATIONS, UNITS, Constants
from pycomm.advise.model import ALGORITHMS, BACKWARD, Cluster, Link, Model, possible, predict

MILLION = 10**6
PAIRS = [(a, c) for a in ALGORITHMS for c in COMPRESSIONS if possible(a, c)]


def cluster(ranks, nodes, rate=1e9, latency=0.0, **options):
    return Cluster(ranks, nodes, Link(rate, latency), **options)


def test_shipped_constants():
    """They have units and sources; no test checks a value."""
    known = constants.load()
    assert set(UNITS) <= set(known.values)
    assert all(len(constant.source) > 10 for constant in known.values.values())
    assert {"cpu", "cores", "kernel"} <= set(known.machine["machine"])


def test_constants_survive_a_file(tmp_path):
    known = imagined(int8__encode=0.25)
    constants.save(known, tmp_path / "constants.json")
    assert constants.load(tmp_path / "constants.json") == known
    assert known["int8.encode"] == pytest.approx(0.25e-9)
    assert known.link_rate is None


@pytest.mark.parametrize("content", ["", "{}", '{"machine": {}, "constants": {"a": 1}}',
                                     '{"machine": {}, "constants": {}}'])  # fmt: skip
def test_files_that_hold_no_constants(tmp_path, content):
    path = tmp_path / "constants.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"constants"):
        constants.load(path)


@pytest.mark.parametrize(("field", "value"), [("value", -1.0), ("value", math.inf), ("unit", "s")])
def test_constants_are_checked(field, value):
    values = dict(imagined().values)
    values["link.core"] = dataclasses.replace(values["link.core"], **{field: value})
    with pytest.raises(ValueError, match=r"link\.core must be"):
        Constants(MACHINE, values)


def test_two_nodes_by_hand():
    """64 MB over 1 Gbit/s: 64 MB each way, 512 ms; int8 about a quarter. 1 ms of latency twice,
    for contributions and results; int8 waits for a handshake before, and top-k twice more, for
    lengths."""
    model = Model(cluster(2, 2, latency=1e-3), imagined())
    plain = model.exchange("stripes", "none", 16 * MILLION)
    assert plain.link_bytes == plain.rank_bytes == 64 * MILLION
    assert plain.seconds == pytest.approx(0.512 + 0.002, rel=1e-3)
    small = model.exchange("stripes", "int8", 16 * MILLION)
    assert small.link_bytes == pytest.approx(16 * MILLION * (1 + 4 / 256), rel=1e-5)
    assert small.seconds == pytest.approx(0.130 + 0.003, rel=1e-3)
    lists = model.exchange("stripes", "topk", 16 * MILLION)
    assert lists.link_bytes == pytest.approx(0.813 * MILLION, rel=0.01)  # 40.6 bits of 160,000
    assert lists.seconds == pytest.approx(6.5e-3 + 0.005, rel=0.01)


def test_a_small_tensor_by_hand():
    """2,730 floats are sent whole to 3 other nodes, with the handshake; 2,731 are not."""
    model = Model(cluster(4, 4, latency=1e-3), imagined())
    whole = model.exchange("stripes", "none", 2730)
    assert whole.link_bytes == 3 * 4 * 2730
    assert whole.seconds == pytest.approx(1e-3 + whole.link_bytes * 8e-9, rel=1e-3)
    assert model.exchange("stripes", "none", 2731).link_bytes == pytest.approx(1.5 * 4 * 2731)


@pytest.mark.parametrize(
    ("nodes", "messages", "trips"),
    [(2, 2, 1), (8, 14, 1), (9, 6, 2), (16, 7, 2), (17, 8, 3), (64, 10, 3), (512, 14, 5)],
)
def test_a_small_tensor_goes_in_rounds_among_many_nodes(nodes, messages, trips):
    """A round has up to 3 messages and makes 4 blocks of one; a handshake goes to one neighbour.
    Up to 8 nodes send each other handshake and stripe. A message takes 10 us of a core."""
    model = Model(cluster(nodes, nodes, rate=1e15, latency=1e-3), imagined(link__message=10.0))
    small = model.exchange("stripes", "none", 4)
    assert small.latency == pytest.approx(trips * 1e-3)
    assert small.core == pytest.approx(messages * 10e-6, rel=1e-3)
    assert small.link_bytes == 16 * (nodes - 1)


def test_cores_by_hand():
    """100 M elements at 1 ns to encode (once and, of the half that is owned, again), 2 to add, 3 to
    decode: 650 ms of core, beside 1,600 ms of link; the shorter one is hidden but for a round."""
    known = imagined(bf16__encode=1.0, bf16__decode_add=2.0, bf16__decode=3.0, none__add=4.0)
    model = Model(cluster(2, 2), known)
    exchange = model.exchange("stripes", "bf16", 100 * MILLION)
    assert exchange.core == pytest.approx(0.65)
    assert exchange.rounds == math.ceil(200e6 / 2 / 2**19)
    assert exchange.seconds == pytest.approx(1.6 + 0.65 / exchange.rounds)
    slow = Model(cluster(2, 2, cores_per_rank=0.5), known)
    assert slow.exchange("stripes", "bf16", 100 * MILLION).core == pytest.approx(1.3)
    # What is not compressed is added only, and only what the other node has sent.
    assert model.exchange("stripes", "none", 100 * MILLION).core == pytest.approx(0.2)
    assert model.exchange("ring", "none", 100 * MILLION).core == pytest.approx(0.2)


def test_messages_by_hand():
    """8 MiB between 2 nodes: 8 transfers of contributions each, 8 of results, a handshake."""
    known = imagined(link__message=1000.0, link__core=0.5)
    model = Model(cluster(2, 2), known)
    core = model.exchange("stripes", "none", 2 << 20).core
    assert core == pytest.approx(17e-3 + 0.5e-9 * (8 << 20))
    assert model.exchange("stripes", "topk", 2 << 20).core == pytest.approx(5e-3, rel=0.02)
    # 2 steps of 4 MiB each, in segments of 1 MiB.
    ring = model.exchange("ring", "none", 2 << 20)
    assert ring.rounds == 8
    assert ring.core == pytest.approx(8e-3 + 0.5e-9 * (8 << 20))


def test_inside_the_nodes():
    """All ranks' bytes go through one memory, in parallel with the wire only if compressed."""
    known = imagined(local__all_reduce=0.25, local__latency=100.0)
    four = Model(cluster(8, 2), known)
    seconds = 1e-4 + 4e6 * 0.25e-9 * 4 / 2
    local = {c: four.exchange("stripes", c, MILLION).local for c in COMPRESSIONS}
    assert local["none"] == local["topk"] == pytest.approx(seconds)
    assert local["bf16"] == local["int8"] == 0
    assert four.exchange("stripes", "int8", MILLION).core == pytest.approx(seconds, rel=1e-3)
    assert Model(cluster(2, 2), known).exchange("stripes", "none", MILLION).local == 0
    alone = Model(cluster(4, 1), known).exchange("stripes", "none", MILLION)
    assert alone.seconds == pytest.approx(seconds)
    assert (alone.link_bytes, alone.rank_bytes) == (0, 6 * MILLION)


def test_bytes_over_the_link():
    """A node sends once in stripes, and its last rank in a ring; 2 nodes x 2 ranks."""
    model, size = Model(cluster(4, 2), imagined()), 4 * MILLION
    carried = {a: model.exchange(a, "none", MILLION).link_bytes / size for a in ALGORITHMS}
    assert carried == pytest.approx({"ring": 1.5, "stripes": 1.0})
    assert model.exchange("stripes", "topk", MILLION).link_bytes < 0.02 * size


def test_stripes_share_the_work():
    known = imagined(int8__encode=5.0)
    cores = [Model(cluster(ranks, 2), known).exchange("stripes", "int8", MILLION).core
             for ranks in (2, 8)]  # fmt: skip
    assert cores[0] == pytest.approx(4 * cores[1])


def test_headers_take_their_share():
    assert Link(1e9, 0.0, payload=0.5).seconds_per_byte == pytest.approx(16e-9)


def test_a_token_bucket_lets_some_pass():
    """Once per all-reduce, and once per step, however many buckets there are."""
    link = Link(1e9, 0.0, burst=MILLION)
    model = Model(Cluster(2, 2, link), imagined())
    for algorithm in ALGORITHMS:
        assert model.exchange(algorithm, "none", MILLION).wire == pytest.approx(24e-3, rel=0.05)
        assert model.exchange(algorithm, "none", MILLION // 8).wire == pytest.approx(0, abs=1e-9)
    step = predict(model, "stripes", "none", 100 * MILLION, 0.1)
    assert step.buckets * step.bucket.wire == pytest.approx(399e6 * 8e-9)


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 2), (3, 3), (8, 8), (8, 2), (12, 3), (7, 3)])
@pytest.mark.parametrize("latency", [0.0, 1e-4, 2e-3])
@pytest.mark.parametrize("elements", [10_000, MILLION, 16 * MILLION])
def test_ring_against_its_simulation(ranks, nodes, latency, elements):
    known = imagined(local__latency=10.0, local__all_reduce=0.1)
    model = Model(cluster(ranks, nodes, latency=latency), known)
    exchange = model.exchange("ring", "none", elements)
    segments = max(math.ceil(4 * elements / ranks / 2**20), 2)
    assert exchange.rounds == 2 * (ranks - 1) * segments
    segment = 4 * elements / ranks / segments
    far, near = (latency, segment * 8e-9), (1e-5, segment * 1e-10)
    node_of = [rank * nodes // ranks for rank in range(ranks)]  # neighbours share a node
    reference = simulations.ring(node_of, segments, far, near)
    assert exchange.wire == pytest.approx(reference, rel=0.3)


def transfer_bytes(owned: int, nodes: int) -> int:
    """An eighth, at least 32 KiB, and at most the size that makes a tile of 1 MiB."""
    return min(max(-(-owned // 8), 32 << 10), max((1 << 20) // nodes, 32 << 10))


@pytest.mark.parametrize("nodes", [2, 3, 8])
@pytest.mark.parametrize("add_ns", [0.1, 5.0, 100.0])
@pytest.mark.parametrize("latency", [0.0, 1e-4, 5e-3])
@pytest.mark.parametrize(
    ("elements", "rate"), [(10_000, 1e9), (8 * MILLION, 1e9), (8 * MILLION, 1e12)]
)
def test_two_shot_against_its_simulation(nodes, add_ns, latency, elements, rate):
    model = Model(cluster(nodes, nodes, rate, latency), imagined(none__add=add_ns))
    exchange = model.exchange("stripes", "none", elements)
    part = 4 * elements // nodes
    reference = simulations.two_shot(
        part, transfer_bytes(part, nodes), latency, (nodes - 1) * 8 / rate,
        (nodes - 1) * add_ns * 1e-9 / 4, ahead=2,
    )  # fmt: skip
    assert exchange.seconds == pytest.approx(reference, rel=0.15)


@pytest.mark.parametrize("rate", [1e8, 3e9, 1e11])
@pytest.mark.parametrize("local_ns", [0.01, 0.2, 2.0])
def test_phases_inside_the_node_against_their_simulation(rate, local_ns):
    """With bf16, half of the local time comes before a tile is sent and half after it."""
    known = imagined(local__all_reduce=local_ns, bf16__decode_add=0.5)
    elements = 8 * MILLION
    exchange = Model(cluster(4, 2, rate=rate), known).exchange("stripes", "bf16", elements)
    part = 2 * elements // 2 // 2  # of a stripe, on a node
    # Each float32 of 4 bytes is 2 bytes in bf16; there are 2 nodes and 2 stripes.
    inside = 4 / 2 * 2 * 2 * local_ns * 1e-9 / 2
    reference = simulations.two_shot(
        part,
        transfer_bytes(part, 2),
        0.0,
        2 * 8 / rate,
        2 * 0.5 * 0.5e-9,
        ahead=2,
        inside=(inside, inside),
    )
    assert exchange.seconds == pytest.approx(reference, rel=0.15)


@pytest.mark.parametrize("parameters", [MILLION, 20 * MILLION, 125 * MILLION])
@pytest.mark.parametrize("compute", [0.001, 0.1, 1.0, 30.0])
@pytest.mark.parametrize(("cores", "busy_us"), [(2, 1e6), (1, 1e-9), (1, 1e3), (1, 1e5)])
@pytest.mark.parametrize("batches", [1, 8])
def test_a_step_against_its_simulation(parameters, compute, cores, busy_us, batches):
    """With a core of its own, an exchange does not wait until computation makes room for it.
    Of the micro-batches of a step, only the last one's backward hides an exchange."""
    nodes = cluster(2, 2, cores_per_rank=cores)
    model = Model(nodes, imagined(link__busy=busy_us))
    step = predict(model, "stripes", "none", parameters, compute, accumulate=batches)
    link = dataclasses.replace(nodes.link, latency=nodes.link.latency + busy_us * 1e-6)
    busy = Model(dataclasses.replace(nodes, link=link), imagined())
    elements = parameters // step.buckets
    exchange, slower = (m.exchange("stripes", "none", elements).seconds for m in (model, busy))
    if cores == 2:
        slower = exchange
    assert (slower > 1.001 * exchange) == (cores == 1 and busy_us > 1)
    reference = simulations.training(compute, BACKWARD / batches, step.buckets, exchange, slower)
    assert step.seconds == pytest.approx(reference, rel=1e-3)
    assert step.exposed == pytest.approx(reference - compute, rel=1e-3, abs=1e-3 * reference)


def test_who_shares_a_core_waits_for_it():
    known = imagined(none__add=20.0)
    alone, shared = (
        predict(
            Model(cluster(2, 2, rate=1e12, cores_per_rank=cores), known),
            "stripes", "none", 20 * MILLION, 0.5,
        )
        for cores in (2.0, 1.0)
    )  # fmt: skip
    assert shared.seconds == pytest.approx(0.5 + shared.buckets * shared.bucket.work)
    assert shared.seconds > alone.seconds


links = st.builds(Link, rate=st.floats(1e7, 1e12), latency=st.floats(0, 0.1))


@given(links, st.integers(1, 64), st.integers(1, 8), st.integers(1, 10**9), st.sampled_from(PAIRS))
def test_more_is_never_faster(link, nodes, per_node, elements, pair):
    known = TYPICAL
    base = Cluster(nodes * per_node, nodes, link)
    seconds = Model(base, known).exchange(*pair, elements).seconds
    assert 0 <= seconds < math.inf
    for worse in (
        dataclasses.replace(link, rate=link.rate / 2),
        dataclasses.replace(link, latency=2 * link.latency),
    ):
        slower = Model(dataclasses.replace(base, link=worse), known).exchange(*pair, elements)
        assert slower.seconds >= seconds * (1 - 1e-9)
    busier = Model(dataclasses.replace(base, cores_per_rank=0.5), known)
    assert busier.exchange(*pair, elements).seconds >= seconds
    larger = Model(base, known).exchange(*pair, 2 * elements).seconds
    assert larger >= seconds * (1 - 1e-9)


@given(links, st.integers(1, 64), st.floats(1e-3, 1e3), st.sampled_from(PAIRS))
def test_a_step_hides_no_more_than_there_is(link, nodes, compute, pair):
    model = Model(Cluster(nodes, nodes, link), TYPICAL)
    step = predict(model, *pair, 10 * MILLION, compute)
    assert step.seconds >= compute
    assert 0 <= step.exposed <= step.exchange + 1e-9 * step.seconds


def ask(rate=1e9, compute=0.4, **known):
    return Question(125 * MILLION, cluster(16, 4, rate), compute, 0.01, imagined(**known))


def test_what_is_chosen():
    """Plain DDP on a fast link; on slow ones the smallest of the recommended compressions."""

    def chosen(**known):
        bucket = advice.choose(ask(**known)).bucket
        return bucket.algorithm, bucket.compression

    assert chosen(rate=1e13) == chosen(rate=1e9, compute=60) == ("ring", "none")
    assert chosen(rate=1e8) == chosen(rate=1e9) == ("stripes", "int8")
    dear = {f"int8__{operation}": 1000.0 for operation in OPERATIONS}
    assert chosen(rate=1e9, **dear) == ("stripes", "bf16")
    # 20 s of backward hide all but the last bucket of the 7.5 s that a ring takes; an eighth of
    # them does not.
    assert chosen(compute=30) == ("ring", "none")
    eight = dataclasses.replace(ask(compute=30), accumulate=8)
    assert advice.choose(eight).bucket.compression == "bf16"
    # On one node, Gloo is slower than the ring.
    alone = dataclasses.replace(ask(), cluster=cluster(4, 1))
    assert advice.choose(alone).bucket.algorithm == "stripes"


def test_break_even():
    question = ask(rate=1e9, int8__encode=1.0)
    limit = advice.break_even(question, "int8")
    below, above = (
        [question.with_rate(factor * limit).step("stripes", c).seconds for c in ("int8", "bf16")]
        for factor in (0.9, 1.1)
    )
    assert below[0] < advice.WORTH * below[1]
    assert above[0] >= advice.WORTH * above[1]
    assert advice.break_even(dataclasses.replace(question, cluster=cluster(4, 1)), "int8") is None
    assert advice.break_even(ask(compute=1e9), "int8") is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Link(0.0, 1.0), "rate must be positive"),
        (lambda: Link(1.0, -1.0), "latency and burst must not be negative"),
        (lambda: Link(1.0, 1.0, payload=2.0), "payload must be above 0"),
        (lambda: cluster(2, 0), "nodes must be at least 1"),
        (lambda: cluster(2, 4), "ranks must be at least nodes"),
        (lambda: cluster(2, 2, cores_per_rank=0), "cores_per_rank must be positive"),
        (lambda: Model(cluster(2, 2), imagined(), 0.0), "density must be"),
        (lambda: Model(cluster(2, 2), imagined()).exchange("rign", "none", 1), "algorithm must be"),
        (lambda: Model(cluster(2, 2), imagined()).exchange("ring", "int4", 1), "compression must"),
        (lambda: Model(cluster(2, 2), imagined()).exchange("ring", "topk", 1), "none or bf16"),
        (lambda: Model(cluster(2, 2), imagined()).exchange("ring", "none", 0), "elements must be"),
        (lambda: predict(Model(cluster(2, 2), imagined()), "ring", "none", 1, 0.0),
         "compute must be positive"),
        (lambda: predict(Model(cluster(2, 2), imagined()), "ring", "none", 0, 1.0),
         "parameters must be at least 1"),
        (lambda: predict(Model(cluster(2, 2), imagined()), "ring", "none", 1, 1.0, accumulate=0),
         "accumulate must be at least 1"),
    ],
)  # fmt: skip
def test_arguments_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_table():
    question = ask()
    steps = question.steps()
    lines = advice.table(steps, advice.choose(question)).splitlines()
    assert sum(line.startswith("---") for line in lines) == len(ALGORITHMS)
    assert len(lines) == 2 + len(ALGORITHMS) + len(PAIRS)
    assert sum(line.startswith("*") for line in lines) == 1
    assert {len(line) for line in lines} == {max(map(len, lines))}
    assert max(map(len, lines)) <= 80
    assert [advice.human_figure(value) for value in (12409.3, 86.44, 0.25, 0)] == [
        "12,409", "86.4", "0.25", "0",
    ]  # fmt: skip


def said(question):
    return "\n".join(advice.recommend(question, advice.choose(question)))


def test_the_choice_is_compared_with_plain_ddp():
    slow, fast = ask(rate=1e9), ask(rate=1e13)
    plain, none, int8 = (
        slow.step(*pair).seconds
        for pair in (("ring", "none"), ("stripes", "none"), ("stripes", "int8"))
    )
    told = f"{plain / int8:.3g} times as fast as plain DDP, {none / int8:.3g} times as fast as"
    step = f"stripes, int8, {advice.human_figure(1e3 * int8)} ms a step."
    assert f"{step}\nThat is {told}" in said(slow)
    assert said(fast).startswith("Keep plain DDP: * ring, none, ")


def test_what_is_faster_is_said():
    """Top-k, with its cost; and a ring of two ranks, which has less latency than a handshake."""
    slow, fast = ask(rate=1e8), ask(rate=1e13)
    topk = advice.human_figure(1e3 * slow.step("stripes", "topk").seconds)
    assert f"first: stripes, topk, {topk} ms. With AdamW,\ntop-k of 1 % ended with" in said(slow)
    assert "Faster" not in said(fast)
    far = Question(MILLION, cluster(2, 2, latency=5e-3), 0.05, 0.01, imagined())
    assert "Faster, but not pycomm's: ring, bf16, " in said(far)
    assert "not pycomm's" not in said(dataclasses.replace(far, cluster=cluster(2, 2)))


def test_sixteen_thousand_ranks():
    """The prediction is made at once, and is finite."""
    model = Model(cluster(16384, 2048, latency=1e-4), TYPICAL)
    for pair in PAIRS:
        assert math.isfinite(model.exchange(*pair, 125 * MILLION).seconds)
