"""How ranks of several nodes tell each other why they stop, if one is stopped, slow or dead."""

import os
import signal
import threading
import time
from pathlib import Path

import helpers
import spanning

import pycomm
from pycomm._runtime import internode


def be_stopped(group, folder):
    Path(f"{folder}/{group.rank}").touch()
    error = spanning.operate_until_failure(group)
    try:
        return type(error).__name__, error.rank, spanning.shrink(group, 30)
    except pycomm.GroupUnusable as raised:
        return str(raised)


def test_a_stopped_rank_is_left_out_and_told(tmp_path):
    with spanning.ranks([1, 1, 1], be_stopped, str(tmp_path), timeout=2) as ranks:
        for rank in range(3):
            helpers.wait_until((tmp_path / str(rank)).exists)
        ranks.signal(0, signal.SIGSTOP)
        left = [outcome.value for outcome in ranks.wait_for([1, 2])]
        ranks.signal(0, signal.SIGCONT)
        told = ranks.wait_for([0])[0].value
    assert left == [("Timeout", 0, (1, 2))] * 2
    assert "without this rank" in told  # perhaps before it hears that it did not answer


def be_stopped_early(rank, size, store, folder):
    """Rank 0 is stopped before it can receive the others' reasons to stop."""
    spanning.pretend(str(rank))
    if rank == 0:
        internode.GlooTransport._listen = lambda *_: threading.Event().wait()
    with helpers.member(rank, size, store, timeout=2) as group:
        return be_stopped(group, folder)


def test_a_rank_that_cannot_hear_why_the_others_stop_is_left_out(tmp_path):
    with helpers.Ranks(3, be_stopped_early, str(tmp_path)) as ranks:
        for rank in range(3):
            helpers.wait_until((tmp_path / str(rank)).exists)
        ranks.signal(0, signal.SIGSTOP)
        left = [outcome.value for outcome in ranks.wait_for([1, 2])]
    assert left == [("Timeout", 0, (1, 2))] * 2


def note_what_is_heard(folder, rank):
    """What this rank has heard at each end of its connections; a file tells that it has told."""
    link, heard, at_end = internode.GlooTransport, set(), []
    hear, tell, disconnect = link.heard, link.stop, link.disconnect

    def hear_and_note(self, node, farewell):
        heard.add(node)
        hear(self, node, farewell)

    def tell_and_say(self, farewell):
        tell(self, farewell)
        Path(f"{folder}/told-{rank}").touch()

    def note_and_disconnect(self):
        at_end.append(sorted(heard))
        disconnect(self)

    link.heard, link.stop, link.disconnect = hear_and_note, tell_and_say, note_and_disconnect
    return at_end


def be_slow(rank, size, store, folder):
    """Rank 2 dies while the others are between operations, and rank 1 is stopped for a while."""
    spanning.pretend(str(rank))
    at_end = note_what_is_heard(folder, rank)
    with helpers.member(rank, size, store, timeout=20) as group:
        pycomm.barrier(group=group)
        Path(f"{folder}/between-{rank}").touch()
        if rank > 0:
            helpers.wait_until(Path(f"{folder}/go").exists)
        return *be_stopped(group, folder), at_end[0]


def test_a_slow_rank_is_heard_before_the_connections_end(tmp_path):
    """Otherwise it may take a rank that has disconnected for dead."""
    with helpers.Ranks(3, be_slow, str(tmp_path)) as ranks:
        for rank in range(3):
            helpers.wait_until((tmp_path / f"between-{rank}").exists)
        ranks.signal(1, signal.SIGSTOP)
        ranks.signal(2, signal.SIGKILL)
        helpers.wait_until((tmp_path / "told-0").exists)
        time.sleep(0.5)
        (tmp_path / "go").touch()
        ranks.signal(1, signal.SIGCONT)
        left = [outcome.value for outcome in ranks.wait_for([0, 1])]
    assert left == [("PeerDied", 2, (0, 1), [1]), ("PeerDied", 2, (0, 1), [0])]


def send_late(rank, size, store, folder):
    """Rank 0 dies when it sends data; rank 2 sends its own when rank 1 has noticed that."""
    spanning.pretend(str(rank))
    at_end, link, posted = note_what_is_heard(folder, rank), internode.GlooTransport, []
    post, note_failure = link.post, link.fail

    def post_late(self, sends, receives):
        posted.append(self)
        if len(posted) == 2 and rank == 0:
            helpers.wait_until(lambda: all(Path(f"{folder}/in-{r}").exists() for r in (1, 2)))
            time.sleep(0.3)  # so that they wait for data
            os.kill(os.getpid(), signal.SIGKILL)
        if len(posted) == 2:
            Path(f"{folder}/in-{rank}").touch()
        if len(posted) == 2 and rank == 2:
            helpers.wait_until(Path(f"{folder}/failed").exists)
        post(self, sends, receives)

    def say_and_fail(self, node):
        Path(f"{folder}/failed").touch()
        note_failure(self, node)

    link.post, link.fail = post_late, say_and_fail
    with helpers.member(rank, size, store, timeout=20) as group:
        return *be_stopped(group, folder), at_end[0]


def test_a_failed_batch_jams_no_connection(tmp_path):
    """What arrives for it is read, so that farewells behind it are heard."""
    with helpers.Ranks(3, send_late, str(tmp_path)) as ranks:
        left = [outcome.value for outcome in ranks.wait_for([1, 2])]
    assert left == [("PeerDied", 0, (1, 2), [2]), ("PeerDied", 0, (1, 2), [1])]
