"""The protocols of csrc/cuda (docs/explanation/kernels.md) as programs in the PTX memory model.

Every part of a protocol can be left out. Then the model allows old data or a race, so each part is
needed, and the checks can fail.
"""

import pytest
from ptx import GPU, SYSTEM, Program


class Protocol:
    """A program, the condition under which its threads get to its end, and what must hold then."""

    def __init__(self, without=None):
        self.program = Program()
        self.without = without
        self.given = {}
        self.loads = {}
        self.last = {}

    def has(self, part):
        return part != self.without

    def expect(self, load, value):
        self.loads[load] = value

    def holds(self):
        outcome = self.program.run(self.given)
        assert outcome.values, "no execution gets to the end"
        return (
            not outcome.races
            and all(outcome.values[load] == {value} for load, value in self.loads.items())
            and all(outcome.final[where] == {value} for where, value in self.last.items())
        )


class Rank:
    """A block on a GPU of its own: the thread that handles flags, and one of the others."""

    def __init__(self, protocol, number):
        self.protocol = protocol
        self.number = number
        self.flags = protocol.program.thread(gpu=number)
        self.data = protocol.program.thread(gpu=number)
        self.barriers = 0

    def sync(self, part="barrier"):
        """__syncthreads(), or a vote."""
        if self.protocol.has(part):
            self.barriers += 1
            for thread in (self.flags, self.data):
                thread.barrier(f"{self.number}.{self.barriers}")

    def signal(self, flag, value):
        """The store of BlockComm::signal() and publish()."""
        order = "release" if self.protocol.has("release") else "relaxed"
        scope = SYSTEM if self.protocol.has("system scope") else GPU
        self.flags.store(flag, value, scope, order=order)

    def wait(self, flag, *values):
        """BlockComm::poll_flag()."""
        poll = self.flags.load(flag, SYSTEM)
        self.protocol.given[poll] = values
        if self.protocol.has("acquire"):
            self.flags.load(flag, SYSTEM, order="acquire")


def publish_and_meet(without=None):
    """A rank reads a tensor of another where it lies, and returns a result in the same way."""
    protocol = Protocol(without)
    owner, reader = Rank(protocol, 0), Rank(protocol, 1)
    owner.data.store("tensor", 1)
    owner.sync("barrier before the signal")
    owner.flags.store("operation", 1)
    owner.signal("epoch", 1)

    reader.wait("epoch", 1)
    protocol.expect(reader.flags.load("operation"), 1)
    reader.sync("barrier after the wait")
    protocol.expect(reader.data.load("tensor"), 1)
    reader.data.store("result", 1)
    reader.sync("barrier before the signal")
    reader.signal("reduced", 1)

    owner.wait("reduced", 1)
    owner.sync("barrier after the wait")
    protocol.expect(owner.data.load("result"), 1)
    return protocol


def withdrawn_announcement(without=None):
    """A rank that drains withdraws its announcement; another rank may have seen it before."""
    protocol = Protocol(without)
    owner, reader = Rank(protocol, 0), Rank(protocol, 1)
    owner.flags.store("operation", 1)
    owner.signal("epoch", 1)
    owner.flags.store("epoch", 0, SYSTEM)
    reader.wait("epoch", 1)
    protocol.expect(reader.flags.load("operation"), 1)
    return protocol


def packet_with_clear(without=None):
    """A packet of operation 3 arrives in the place of one of operation 1, read and overwritten."""
    protocol = Protocol(without)
    writer, reader = Rank(protocol, 0), Rank(protocol, 1)
    writer.data.store("packet", 1, SYSTEM)
    protocol.given[reader.data.load("packet", SYSTEM)] = {1}
    reader.data.store("packet", 0, SYSTEM)
    reader.sync("barrier before the signal")
    reader.signal("epoch", 2)

    writer.wait("epoch", 2)
    writer.sync("barrier after the wait")
    writer.data.store("packet", 3, SYSTEM)
    protocol.last["packet"] = 3  # so the reader will find it
    return protocol


def announcement_parity(without=None):
    """Announcement 3 is written where announcement 1 was, which has been read."""
    protocol = Protocol(without)
    writer, reader = Rank(protocol, 0), Rank(protocol, 1)
    writer.flags.store("line", 1)
    writer.signal("odd epoch", 1)
    reader.wait("odd epoch", 1)
    protocol.expect(reader.flags.load("line"), 1)
    reader.sync()
    reader.signal("even epoch", 2)
    if protocol.has("operation 2"):
        writer.wait("even epoch", 2)
    writer.sync()
    writer.flags.store("line", 3)
    writer.signal("odd epoch", 3)
    return protocol


def meeting_in_packets(without=None):
    """Operation 2 is in packets, and no rank awaits its announcements. Announcement 3 is written
    where announcement 1 was, and a packet of operation 3 where one of operation 1 was cleared.
    """
    protocol = Protocol(without)
    writer, reader = Rank(protocol, 0), Rank(protocol, 1)
    writer.flags.store("line", 1)
    writer.signal("epoch", 1)
    reader.wait("epoch", 1)
    protocol.expect(reader.flags.load("line"), 1)
    reader.data.store("packet", 0, SYSTEM)
    reader.sync("order of kernels")

    if protocol.has("fence before the packets"):
        reader.flags.fence(SYSTEM)
    reader.flags.store("operation", 2, SYSTEM)
    protocol.given[writer.flags.load("operation", SYSTEM)] = {2}
    if protocol.has("fence after the packets"):
        writer.flags.fence(SYSTEM)
    writer.sync("order of kernels")

    writer.flags.store("line", 3)
    writer.data.store("packet", 3, SYSTEM)
    protocol.last["packet"] = 3  # so the reader will find it
    return protocol


def slot_reuse(without=None):
    """One-shot stages tile 2 in the slot of tile 0."""
    protocol = Protocol(without)
    writer, reader = Rank(protocol, 0), Rank(protocol, 1)
    writer.data.store("slot", 10)
    writer.sync("barrier before the signal")
    writer.signal("staged", 1)
    reader.wait("staged", 1)
    reader.sync("barrier after the wait")
    protocol.expect(reader.data.load("slot"), 10)
    reader.sync("barrier before the signal")
    reader.signal("also staged", 2)  # tile 1, which lies in the other slot

    if protocol.has("rotation of slots"):
        writer.wait("also staged", 2)
        writer.sync("barrier after the wait")
    writer.data.store("slot", 12)
    return protocol


def tickets_of_sums(without=None):
    """Trees::climb(): the warp that comes last reads what the others have written."""
    protocol = Protocol(without)
    early = protocol.program.thread(block=0)
    late, lane = protocol.program.thread(block=1), protocol.program.thread(block=1)
    for number, thread in enumerate((early, late)):
        thread.store(f"term {number}", 1)
        if protocol.has("fence before the ticket"):
            thread.fence(GPU)
        protocol.given[thread.add("ticket", GPU)] = {number}
    if protocol.has("fence after the ticket"):
        late.fence(GPU)
    late.store("ticket", 0, GPU)
    if protocol.has("warp barrier"):
        late.barrier("warp")
        lane.barrier("warp")
    for number in range(2):
        protocol.expect(lane.load(f"term {number}"), 1)
    protocol.last["ticket"] = 0
    return protocol


def meeting_of_lanes(without=None):
    """meet_lanes(): a lane reads what another one has written, and whether it has failed."""
    protocol = Protocol(without)
    writer, reader = (
        [protocol.program.thread(block=block) for _ in range(2)] for block in range(2)
    )
    writer[1].store("sum", 1)
    for thread in writer if protocol.has("barrier before the ticket") else ():
        thread.barrier("writer")
    writer[0].store("failed", 1, SYSTEM)
    if protocol.has("fence"):
        writer[0].fence(GPU)
    writer[0].add("came", GPU)
    order = "acquire" if protocol.has("acquire") else "relaxed"
    protocol.given[reader[0].load("came", SYSTEM, order=order)] = {1}
    protocol.expect(reader[0].load("failed", SYSTEM), 1)
    for thread in reader if protocol.has("barrier after the wait") else ():
        thread.barrier("reader")
    protocol.expect(reader[1].load("sum"), 1)
    return protocol


def rank_that_has_left(without=None):
    """BlockComm::poll(): a rank that has come and then left is not reported as dead."""
    protocol = Protocol(without)
    left, host, waiting = (protocol.program.thread(gpu=number) for number in range(3))
    left.store("signal", 1, SYSTEM)
    left.store("left", 1, SYSTEM, order="release")  # as its process ends
    protocol.given[host.load("left", SYSTEM, order="acquire")] = {1}
    host.store("gone", 1, SYSTEM, order="release" if protocol.has("host's release") else "relaxed")
    order = "acquire" if protocol.has("acquire") else "relaxed"
    protocol.given[waiting.load("gone", SYSTEM, order=order)] = {1}
    protocol.expect(waiting.load("signal", SYSTEM), 1)
    return protocol


def entering_peers_heaps(without=None):
    """The lane sees the abort, or the host sees the lane inside."""
    protocol = Protocol(without)
    loads = []
    for mine, other, fence in (("inside", "abort", "fence"), ("abort", "inside", "host's fence")):
        thread = protocol.program.thread(gpu=len(loads))
        thread.store(mine, 1, SYSTEM)
        thread.fence(SYSTEM, order="sc" if protocol.has(fence) else "acq_rel")
        loads.append(thread.load(other, SYSTEM))
    return protocol, loads


def entering_beside_a_rank_that_drains(without=None):
    """Another thread of the lane sees that a rank has withdrawn, or that rank's host sees the lane
    inside."""
    protocol = Protocol(without)
    lane = Rank(protocol, 0)
    lane.flags.store("inside", 1, SYSTEM)
    lane.flags.fence(SYSTEM, order="sc" if protocol.has("fence") else "acq_rel")
    lane.sync("barrier after the fence")
    drained = protocol.program.thread(gpu=1)
    drained.store("withdrawn", 1, SYSTEM)
    drained.fence(SYSTEM, order="sc" if protocol.has("host's fence") else "acq_rel")
    return protocol, [lane.data.load("withdrawn", SYSTEM), drained.load("inside", SYSTEM)]


EXCHANGE = (
    "release", "acquire", "system scope", "barrier before the signal", "barrier after the wait",
)  # fmt: skip
PARTS = [
    (publish_and_meet, EXCHANGE),
    (withdrawn_announcement, ("release", "acquire")),
    (packet_with_clear, EXCHANGE),
    (announcement_parity, ("operation 2",)),
    (
        meeting_in_packets,
        ("fence before the packets", "fence after the packets", "order of kernels"),
    ),
    (slot_reuse, (*EXCHANGE, "rotation of slots")),
    (rank_that_has_left, ("acquire", "host's release")),
    (tickets_of_sums, ("fence before the ticket", "fence after the ticket", "warp barrier")),
    (
        meeting_of_lanes,
        ("fence", "acquire", "barrier before the ticket", "barrier after the wait"),
    ),
]


@pytest.mark.parametrize("make", [make for make, _ in PARTS])
def test_protocol(make):
    assert make().holds()


@pytest.mark.parametrize(("make", "part"), [(make, p) for make, parts in PARTS for p in parts])
def test_every_part_is_needed(make, part):
    assert not make(without=part).holds()


ENTERING = [
    (entering_peers_heaps, ("fence", "host's fence")),
    (
        entering_beside_a_rank_that_drains,
        ("fence", "host's fence", "barrier after the fence"),
    ),
]


@pytest.mark.parametrize(
    ("enter", "without"), [(enter, p) for enter, parts in ENTERING for p in (None, *parts)]
)
def test_a_lane_enters_or_sees_why_not(enter, without):
    protocol, loads = enter(without)
    neither = protocol.program.run({load: {0} for load in loads})
    assert bool(neither.values) == (without is not None)
