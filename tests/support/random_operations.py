"""Random operations of torch.distributed, on any device, and what must come out of them."""

import random

import torch
import torch.distributed as dist

# Gloo cannot move the others; they are viewed as bytes for it.
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
NUMBERS = DTYPES[:9]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
BITWISE = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]


def values(dtype, count, seed):
    """Random values, the same on every rank that passes the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.randn(count, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-100 if dtype.is_signed else 0, 100, (count,), generator=generator).to(
        dtype
    )


def as_bytes(x):
    """The bytes of a tensor's elements, on the CPU."""
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.flatten()).view(torch.uint8)


def same(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(as_bytes(a), as_bytes(b))


def reduced(parts, op):
    """A reduction in rank order, with torch's arithmetic; 16-bit floats add in fp32."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = parts[0].to(wide)
    combine = {
        dist.ReduceOp.MIN: torch.minimum,
        dist.ReduceOp.MAX: torch.maximum,
        dist.ReduceOp.BAND: torch.bitwise_and,
        dist.ReduceOp.BOR: torch.bitwise_or,
        dist.ReduceOp.BXOR: torch.bitwise_xor,
    }.get(op, torch.add)
    for part in parts[1:]:
        total = combine(total, part.to(wide))
    if op == dist.ReduceOp.AVG:
        n = len(parts)
        total = total / n if wide.is_floating_point else total.div(n, rounding_mode="trunc")
    return total.to(dtype)


class Works:
    """Several works as one work."""

    def __init__(self, works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()


class Trial:
    """One operation on a group: what all ranks pass, what must come out.

    `gloo` is a group of the same ranks on Gloo, which moves CPU tensors.
    """

    def __init__(self, dice, group, gloo, device):
        self.group, self.gloo, self.device = group, gloo, device
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
        self.root = dice.randrange(self.size)
        self.count = dice.choice([0, 1, 2, 3, 17, 256, 1000, 65536, 250_000])
        self.seed = dice.randrange(1 << 30)
        self.dtype = dice.choice(DTYPES)
        self.number = dice.choice(NUMBERS)
        integers = not self.number.is_floating_point
        self.op = dice.choice(OPS + BITWISE * integers)
        self.sizes = [dice.randrange(4) * dice.choice([1, 100]) for _ in range(self.size)]
        self.even = dice.random() < 0.4
        if self.even:
            self.sizes = self.sizes[:1] * self.size
        self.matrix = [[dice.randrange(50) for _ in range(self.size)] for _ in range(self.size)]
        self.strided = dice.random() < 0.3
        self.asynchronous = dice.random() < 0.5
        self.kind = dice.choice(sorted(KINDS))

    def parts(self, dtype, counts):
        return [values(dtype, count, self.seed + r) for r, count in enumerate(counts)]

    def tensor(self, like):
        """A copy on the device, sometimes with gaps between its elements."""
        if not self.strided:
            return like.to(self.device, copy=True)
        padded = torch.zeros(2 * like.numel(), dtype=like.dtype, device=self.device)[::2]
        return padded.copy_(like)

    def empty(self, dtype, count):
        return self.tensor(torch.zeros(count, dtype=dtype))

    def start(self):
        """Starts the operation; returns its work, or None, and a function that checks it."""
        return getattr(self, self.kind)()

    def op_all_reduce(self):
        parts = self.parts(self.number, [self.count] * self.size)
        x = self.tensor(parts[self.rank])
        work = dist.all_reduce(x, self.op, self.group, self.asynchronous)
        return work, lambda: same(x, reduced(parts, self.op))

    def op_reduce(self):
        parts = self.parts(self.number, [self.count] * self.size)
        x = self.tensor(parts[self.rank])
        work = dist.reduce(
            x, group_dst=self.root, op=self.op, group=self.group, async_op=self.asynchronous
        )
        expected = reduced(parts, self.op) if self.rank == self.root else parts[self.rank]
        return work, lambda: same(x, expected)

    def op_reduce_scatter(self):
        blocks = [
            [values(self.number, n, self.seed + 97 * r + i) for i, n in enumerate(self.sizes)]
            for r in range(self.size)
        ]
        out = self.empty(self.number, self.sizes[self.rank])
        given = [self.tensor(block) for block in blocks[self.rank]]
        work = dist.reduce_scatter(out, given, self.op, self.group, self.asynchronous)
        expected = reduced([blocks[r][self.rank] for r in range(self.size)], self.op)
        return work, lambda: same(out, expected)

    def op_reduce_scatter_tensor(self):
        parts = self.parts(self.number, [self.count * self.size] * self.size)
        out = self.empty(self.number, self.count)
        work = dist.reduce_scatter_tensor(
            out, self.tensor(parts[self.rank]), self.op, self.group, self.asynchronous
        )
        expected = reduced([p.view(self.size, -1)[self.rank] for p in parts], self.op)
        return work, lambda: same(out, expected)

    def op_broadcast(self):
        x = self.tensor(self.parts(self.dtype, [self.count] * self.size)[self.rank])
        peer = as_bytes(x)
        work = dist.broadcast(x, group=self.group, async_op=self.asynchronous, group_src=self.root)
        dist.broadcast(peer, group=self.gloo, group_src=self.root)
        return work, lambda: same(as_bytes(x), peer)

    def op_all_gather(self):
        parts = self.parts(self.dtype, self.sizes)
        out = [self.empty(self.dtype, count) for count in self.sizes]
        work = dist.all_gather(out, self.tensor(parts[self.rank]), self.group, self.asynchronous)
        return work, lambda: [same(a, b) for a, b in zip(out, parts, strict=True)]

    def op_all_gather_into_tensor(self):
        parts = self.parts(self.dtype, [self.count] * self.size)
        out = self.empty(self.dtype, self.count * self.size)
        given = self.tensor(parts[self.rank])
        peer = [torch.empty_like(as_bytes(part)) for part in parts]
        work = dist.all_gather_into_tensor(out, given, self.group, self.asynchronous)
        dist.all_gather(peer, as_bytes(given), self.gloo)
        return work, lambda: same(as_bytes(out), torch.cat(peer))

    def op_gather(self):
        parts = self.parts(self.dtype, [self.count] * self.size)
        is_root = self.rank == self.root
        out = [self.empty(self.dtype, self.count) for _ in parts] if is_root else None
        work = dist.gather(
            self.tensor(parts[self.rank]), out, group=self.group, async_op=self.asynchronous,
            group_dst=self.root,
        )  # fmt: skip
        return work, lambda: [same(a, b) for a, b in zip(out or [], parts, strict=is_root)]

    def op_scatter(self):
        parts = self.parts(self.dtype, [self.count] * self.size)
        given = [self.tensor(part) for part in parts] if self.rank == self.root else None
        out = self.empty(self.dtype, self.count)
        work = dist.scatter(
            out, given, group=self.group, async_op=self.asynchronous, group_src=self.root
        )
        return work, lambda: same(out, parts[self.rank])

    def op_all_to_all(self):
        row = self.parts(self.dtype, self.matrix[self.rank])
        counts = [self.matrix[r][self.rank] for r in range(self.size)]
        out = [self.empty(self.dtype, count) for count in counts]
        work = dist.all_to_all(
            out, [self.tensor(part) for part in row], self.group, self.asynchronous
        )
        expected = [values(self.dtype, n, self.seed + self.rank) for n in counts]
        return work, lambda: [same(a, b) for a, b in zip(out, expected, strict=True)]

    def op_all_to_all_single(self):
        if self.even:
            self.matrix = [[self.count] * self.size] * self.size
        sent, got = self.matrix[self.rank], [row[self.rank] for row in self.matrix]
        x = self.tensor(values(self.dtype, sum(sent), self.seed + self.rank))
        out = self.empty(self.dtype, sum(got))
        splits = (None, None) if self.even else (got, sent)
        work = dist.all_to_all_single(out, x, *splits, self.group, self.asynchronous)
        peer, item = torch.empty(sum(got) * x.itemsize, dtype=torch.uint8), x.itemsize
        dist.all_to_all_single(
            peer, as_bytes(x), [n * item for n in got], [n * item for n in sent], self.gloo
        )
        return work, lambda: same(as_bytes(out), peer)

    def op_messages(self):
        """Every rank sends to the next one, with tags, and receives them in another order."""
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        tags = list(range(len(self.sizes)))
        parts = [values(self.dtype, n * 50, self.seed + tag) for tag, n in enumerate(self.sizes)]
        out = [self.empty(self.dtype, part.numel()) for part in parts]
        works = [
            dist.irecv(out[tag], tag=tag, group=self.group, group_src=source)
            for tag in reversed(tags)
        ]
        works += [
            dist.isend(self.tensor(parts[tag]), tag=tag, group=self.group, group_dst=to)
            for tag in tags
        ]
        return Works(works), lambda: [same(a, b) for a, b in zip(out, parts, strict=True)]

    def op_barrier(self):
        return dist.barrier(self.group, self.asynchronous), lambda: None

    def op_objects(self):
        out = [None] * self.size
        dist.all_gather_object(out, {"rank": self.rank, "seed": self.seed}, self.group)
        return None, lambda: self.check_objects(out)

    def check_objects(self, out):
        assert out == [{"rank": r, "seed": self.seed} for r in range(self.size)]


KINDS = {name for name in dir(Trial) if name.startswith("op_")}


def sequence(rank, size, seed, count, device="cpu"):
    """Runs `count` operations; several of them at a time if they are asynchronous.

    Returns their kinds.
    """
    dice = random.Random(seed)
    members = [list(range(size)), list(range(size))[:2], list(range(size))[-2:]]
    groups = [(m, dist.new_group(m), dist.new_group(m, backend="gloo")) for m in members]
    running, seen = [], set()
    for _ in range(count):
        number = dice.randrange(1 << 60)
        ranks, group, gloo = dice.choice(groups)
        if rank not in ranks:
            continue
        trial = Trial(random.Random(number), group, gloo, device)
        work, check = trial.start()
        seen.add(trial.kind)
        running.append((work, check, trial.kind))
        if work is None or len(running) > 4:
            for work, check, kind in running:
                if work is not None:
                    work.wait()
                try:
                    check()
                except AssertionError as error:
                    raise AssertionError(f"{kind}, seed {seed}, number {number}") from error
            running.clear()
    return seen
