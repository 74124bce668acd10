"""All-reduces message by message, as references for the advisor's closed forms."""

import heapq

from pycomm import _C


def ring(machine_of, far, near):
    """Seconds until every rank has received its last chunk.

    Args:
        machine_of: of every rank.
        far: latency, and seconds that a chunk keeps the sender, between machines.
        near: the same inside a machine.
    """
    n = len(machine_of)
    has = [0.0] * n  # when a rank can send its next chunk
    free = [0.0] * n  # when it is done with sending the last one
    for _ in range(2 * (n - 1)):
        arrived = []
        for rank in range(n):
            left = (rank - 1) % n
            latency, occupied = near if machine_of[left] == machine_of[rank] else far
            free[left] = max(has[left], free[left]) + occupied
            arrived.append(free[left] + latency)
        has = [max(own, new) for own, new in zip(has, arrived, strict=True)]
    return max(has)


def tree(n, pieces, latency, occupied):
    """Seconds until the last piece of both trees is everywhere, one rank per machine.

    Args:
        n: ranks.
        pieces: of each half of the tensor.
        latency: of a message.
        occupied: seconds that a piece keeps the sender's link.
    """
    nodes = [[_C.tree_node(t, rank, n) for rank in range(n)] for t in range(2)]
    free, finished, count = [0.0] * n, 0.0, 0
    missing, events = {}, []  # events: when a message can be sent, and which

    def offer(when, sender, receiver, *what):
        nonlocal count
        count += 1
        heapq.heappush(events, (when, count, sender, receiver, what))

    def send_down(when, t, k, rank):
        for child in nodes[t][rank][1:]:
            if child >= 0:
                offer(when, rank, child, "down", t, k)

    def send_up(when, t, k, rank):
        parent = nodes[t][rank][0]
        if parent < 0:
            send_down(when, t, k, rank)
        else:
            offer(when, rank, parent, "up", t, k)

    for k in range(pieces):
        for t in range(2):
            for rank in range(n):
                missing[t, k, rank] = sum(child >= 0 for child in nodes[t][rank][1:])
                if missing[t, k, rank] == 0:
                    send_up(0.0, t, k, rank)
    while events:
        when, _, sender, receiver, (way, t, k) = heapq.heappop(events)
        if free[sender] > when:  # its link carries something else
            offer(free[sender], sender, receiver, way, t, k)
            continue
        free[sender] = when + occupied
        arrived = free[sender] + latency
        finished = max(finished, arrived)
        if way == "down":
            send_down(arrived, t, k, receiver)
        else:
            missing[t, k, receiver] -= 1
            if missing[t, k, receiver] == 0:
                send_up(arrived, t, k, receiver)
    return finished


def two_shot(rounds, latency, occupied, stage, reduce, gather, ahead):
    """Seconds of a two-shot between machines that do the same at the same time.

    Args:
        rounds: of messages, in each phase.
        latency: of a message.
        occupied: seconds that a round's messages of one phase keep the link.
        stage: seconds of a core before a round's first phase.
        reduce: between the phases.
        gather: after the second one.
        ahead: rounds between them.
    """
    now = free = 0.0
    staged, reduced = {}, {}

    def post():
        nonlocal free
        free = max(now, free) + occupied
        return free + latency

    for step in range(rounds + 2 * ahead):
        if step < rounds:
            now += stage
            staged[step] = post()
        if 0 <= (t := step - ahead) < rounds:
            now = max(now, staged[t]) + reduce
            reduced[t] = post()
        if 0 <= (t := step - 2 * ahead) < rounds:
            now = max(now, reduced[t]) + gather
    return now


def training(compute, backward, buckets, exchange):
    """Seconds of a step whose buckets become ready evenly and are exchanged one after another."""
    done = 0.0
    for bucket in range(1, buckets + 1):
        ready = compute * (1 - backward) + compute * backward * bucket / buckets
        done = max(done, ready) + exchange
    return done
