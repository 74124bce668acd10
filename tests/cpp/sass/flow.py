"""The control flow of a function: basic blocks, loops, and the cheapest paths through them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sass.listing import Function, Instruction

ENDS = ("BRA", "BRX", "EXIT", "RET", "BSYNC", "CALL", "JMP")


@dataclass
class Block:
    """Instructions that run one after another, and the blocks that can be next."""

    code: list[Instruction]
    next: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """A natural loop: its first block, and all of them with those of inner loops."""

    header: int
    blocks: frozenset[int]


class Flow:
    """The blocks of a function; the first one is its entry."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.blocks = list(_blocks(function))
        _, self.back = _depth_first([block.next for block in self.blocks])
        self.before: dict[int, list[int]] = {i: [] for i in range(len(self.blocks))}
        for number, block in enumerate(self.blocks):
            for follower in block.next:
                self.before[follower].append(number)
        self.forward = self._forward()
        self.order, _ = _depth_first(self.forward)

    def _forward(self) -> list[list[int]]:
        """The followers of each block if every loop runs once: its last blocks lead out of it."""
        forward = [
            [follower for follower in block.next if (number, follower) not in self.back]
            for number, block in enumerate(self.blocks)
        ]
        for loop in self.loops():
            ways_out = {f for b in loop.blocks for f in self.blocks[b].next} - loop.blocks
            for latch in self.latches(loop):
                forward[latch] += sorted(ways_out - set(forward[latch]))
        return forward

    def loops(self) -> list[Loop]:
        """All loops, those of one header as one."""
        found: dict[int, set[int]] = {}
        for latch, header in self.back:
            body = found.setdefault(header, {header})
            waiting = [latch]
            while waiting:
                block = waiting.pop()
                if block not in body:
                    body.add(block)
                    waiting += self.before[block]
        return [Loop(header, frozenset(body)) for header, body in sorted(found.items())]

    def edges(self) -> set[tuple[int, int]]:
        """All edges, if every loop runs once."""
        return {(one, follower) for one in self.order for follower in self.forward[one]}

    def ways_through(self, loop: Loop, number: int) -> set[tuple[int, int]]:
        """The edges of a loop on the ways through one of its blocks, if inner loops run once."""
        after, before = {number}, {number}
        for one in self.order:
            if one in after:
                after.update(self.forward[one])
        for one in reversed(self.order):
            if before.intersection(self.forward[one]):
                before.add(one)
        edges = {(one, follower) for one in loop.blocks for follower in self.forward[one]}
        to_it = {edge for edge in edges if before.issuperset(edge)}
        return to_it | {edge for edge in edges if (after & loop.blocks).issuperset(edge)}

    def exits(self) -> frozenset[int]:
        """The blocks that end the function."""
        return frozenset(i for i, block in enumerate(self.blocks) if not block.next)

    def latches(self, loop: Loop) -> frozenset[int]:
        """The blocks from which a loop begins again."""
        return frozenset(latch for latch, header in self.back if header == loop.header)

    def shortest_way_around(self, loop: Loop) -> list[Instruction]:
        """The instructions of one iteration, if as few as possible are run."""
        ways = {loop.header: self.blocks[loop.header].code}
        for number in self.order:
            for follower in self.forward[number] if number in ways else ():
                if follower in loop.blocks:
                    way = ways[number] + self.blocks[follower].code
                    ways[follower] = min(ways.get(follower, way), way, key=len)
        return min((ways[latch] for latch in self.latches(loop)), key=len)


def _blocks(function: Function) -> Iterator[Block]:
    code, labels = function.code, function.labels
    targets = {labels[one.target] for one in code if one.target in labels}
    starts = sorted({0} | targets | {i + 1 for i, one in enumerate(code) if one.name in ENDS})
    starts = [start for start in starts if start < len(code)]
    number = {start: i for i, start in enumerate(starts)}
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else len(code)
        last = code[end - 1]
        followers: list[int] = []
        is_call = last.name == "CALL" and last.target not in labels
        if last.target in labels and last.name in ("BRA", "JMP", "CALL"):
            followers = [number[labels[last.target]]]  # some jumps are written as calls
        elif last.name == "BRX":  # a jump table, whose targets are labels that nothing else names
            followers = [number[at] for at in labels.values() if at in number]
        elif last.name == "BSYNC":
            at = _target_of_sync(code, labels, end - 1)
            followers = [number[at]] if at in number else []
        goes_on = last.name not in ENDS or is_call or _may_not_jump(last)
        if goes_on and end in number:
            followers.append(number[end])
        yield Block(code[start:end], sorted(set(followers)))


def _target_of_sync(code: list[Instruction], labels: Mapping[str, int], at: int) -> int | None:
    """Where a BSYNC goes: to the label of the last BSSY before it with the same barrier."""
    barrier = code[at].operands.strip()
    for one in reversed(code[:at]):
        if one.name == "BSSY" and one.operands.partition(",")[0].strip() == barrier:
            return labels.get(one.target)
    return None


def _may_not_jump(last: Instruction) -> bool:
    """True for a branch under a condition, which may also stand among its operands."""
    return bool(last.guard) or (last.name == "BRA" and not last.operands.startswith("`"))


def _depth_first(followers: list[list[int]]) -> tuple[list[int], set[tuple[int, int]]]:
    """The blocks that can be reached, in topological order, and the edges that lead back."""
    order: list[int] = []
    back: set[tuple[int, int]] = set()
    state = [0] * len(followers)  # 1: on the current path, 2: done
    stack = [(0, iter(followers[0]))] if followers else []
    state[:1] = [1]
    while stack:
        block, left = stack[-1]
        follower = next(left, None)
        if follower is None:
            stack.pop()
            state[block] = 2
            order.append(block)
        elif state[follower] == 1:
            back.add((block, follower))
        elif state[follower] == 0:
            state[follower] = 1
            stack.append((follower, iter(followers[follower])))
    return order[::-1], back
