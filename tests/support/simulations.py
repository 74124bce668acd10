"""All-reduces message by message, as references for the advisor's closed forms."""

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
