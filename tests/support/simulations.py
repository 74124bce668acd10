"""All-reduces message by message, as references for the advisor's closed forms."""

import heapq

from pycomm import _C

PARTS = 1000  # of an exchange, each of which runs as fast as the core allows then


def ring(node_of, segments, far, near):
    """Seconds until every rank has received its last segment.

    Args:
        node_of: of every rank.
        segments: that each of the ranks' parts is sent in.
        far: latency, and seconds that a segment keeps the sender, between nodes.
        near: the same inside a node.
    """
    n = len(node_of)
    has = [[0.0] * segments for _ in range(n)]  # when a rank has what it sends next
    free = [0.0] * n  # when it is done with sending the last segment
    for _ in range(2 * (n - 1)):
        arrived = [[] for _ in range(n)]
        for sender in range(n):
            receiver = (sender + 1) % n
            latency, occupied = near if node_of[sender] == node_of[receiver] else far
            for ready in has[sender]:
                free[sender] = max(ready, free[sender]) + occupied
                arrived[receiver].append(free[sender] + latency)
        has = arrived
    return max(max(times) for times in has)


def tree(n, pieces, latency, occupied):
    """Seconds until the last piece of both trees is everywhere, one rank per node.

    Args:
        n: ranks.
        pieces: of each half of the tensor.
        latency: seconds until a message arrives.
        occupied: seconds that a piece keeps the sender's link, and the receiver's.
    """
    nodes = [[_C.tree_node(t, rank, n) for rank in range(n)] for t in range(2)]
    sending, receiving, finished, count = [0.0] * n, [0.0] * n, 0.0, 0
    missing, events = {}, []  # events: when a message can be sent, or has come, and which

    def offer(when, *event):
        nonlocal count
        count += 1
        heapq.heappush(events, (when, count, *event))

    def go_on(when, way, t, k, rank):
        parent, *children = nodes[t][rank]
        if way == "up" and parent >= 0:
            offer(when, "send", rank, parent, ("up", t, k))
            return
        for child in children:
            if child >= 0:
                offer(when, "send", rank, child, ("down", t, k))

    for k in range(pieces):
        for t in range(2):
            for rank in range(n):
                missing[t, k, rank] = sum(child >= 0 for child in nodes[t][rank][1:])
                if missing[t, k, rank] == 0:
                    go_on(0.0, "up", t, k, rank)
    while events:
        when, _, what, sender, receiver, (way, t, k) = heapq.heappop(events)
        if what == "send":
            if sending[sender] > when:  # its link carries something else
                offer(sending[sender], "send", sender, receiver, (way, t, k))
                continue
            sending[sender] = when + occupied
            receiving[receiver] = max(when + latency, receiving[receiver]) + occupied
            offer(receiving[receiver], "has", sender, receiver, (way, t, k))
            continue
        finished = max(finished, when)
        missing[t, k, receiver] -= way == "up"
        if way == "down" or missing[t, k, receiver] == 0:
            go_on(when, way, t, k, receiver)
    return finished


def two_shot(part, transfer, latency, byte, add, ahead, inside=(0.0, 0.0)):
    """Seconds of an uncompressed two-shot of nodes that all work in step.

    Args:
        part: bytes of the tensor that each node owns, on its link to each of the others.
        transfer: the most bytes that go to a node at a time.
        latency: seconds until a message arrives.
        byte: seconds for which the link is busy with a byte to each of the other nodes.
        add: seconds of a core to add all contributions, per byte.
        ahead: tiles between the phases.
        inside: seconds of a core per byte, before a tile is sent and after its result arrives.
    """
    tiles = [min(transfer, part - begin) for begin in range(0, part, transfer)]
    now = free = 0.0  # the first tiles follow the handshake at once
    staged, reduced = {}, {}

    def post(tile):
        nonlocal free
        free = max(now, free) + tiles[tile] * byte
        return free + latency

    for step in range(len(tiles) + 2 * ahead):
        if step < len(tiles):
            now += tiles[step] * inside[0]
            staged[step] = post(step)
        if 0 <= (t := step - ahead) < len(tiles):
            now = max(now, staged[t]) + tiles[t] * add
            reduced[t] = post(t)
        if 0 <= (t := step - 2 * ahead) < len(tiles):
            now = max(now, reduced[t]) + tiles[t] * inside[1]
    return now


def training(compute, backward, buckets, exchange, slower):
    """Seconds of a step with buckets that become ready evenly and are exchanged one by one.

    While backward runs, an exchange takes `slower` seconds.
    """
    done = 0.0
    for bucket in range(1, buckets + 1):
        ready = compute * (1 - backward) + compute * backward * bucket / buckets
        done = max(done, ready)
        for _ in range(PARTS):
            done += (slower if done < compute else exchange) / PARTS
    return done
