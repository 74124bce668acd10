"""Encoded bytes: their layout and length; decode() stays within its memory for any bytes."""

import itertools
import random
import re
from pathlib import Path

import golden
import golden_compression as reference
import numpy as np
import pytest
import sweep
import torch
from compressing import FLOATS, codec_of, compare, gradient, sent_elements
from e4m3 import E4M3

import pycomm
from pycomm._inputs import CODECS

BLOCKS = (128, 256, 512, 1024, 2048, 4096)
COUNTS = (0, 1, 2, 15, 255, 256, 257, 65_535, 65_536, 65_537, 140_003)
VALUES = (torch.float32, torch.bfloat16, torch.int8)


def encoded(compression, x, **options):
    wire = compression.encode(x, **options)
    assert wire.numel() == compression.encoded_bytes(x.numel(), x.dtype)
    return wire.numpy().tobytes()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_int8(count, dtype):
    for turn, block in enumerate(BLOCKS):
        x = gradient(dtype, count, turn)
        rounding = ("nearest", "stochastic")[(turn + count) % 2]
        compression = pycomm.Int8(block, rounding, seed=turn << 33)
        options = {"step": 9 * turn, "offset": block * 3 * turn}
        codec = codec_of(compression, dtype, options["step"])
        assert encoded(compression, x, **options) == reference.int8_wire(
            x, codec, options["offset"]
        )
        wire, at = compression.encode(x, **options), np.arange(count) + options["offset"]
        made = codec.through(golden.widen(x), 0, at)
        for target in FLOATS:
            compare(
                f"{compression} as {target}",
                compression.decode(wire, count, dtype=target),
                golden.narrow(made, target),
            )


def test_the_class_of_a_new_codec(monkeypatch):
    """That of docs/contributing/extending.md, with int8's number."""
    monkeypatch.setitem(CODECS, "e4m3", CODECS["int8"])
    x = gradient(torch.float32, 1000, 0)
    assert encoded(E4M3(512), x) == encoded(pycomm.Int8(512), x)
    with pytest.raises(ValueError, match="block must be a power of two from 128 to 4096, got 100"):
        E4M3(100)


@pytest.mark.parametrize("compression", [pycomm.Cast(), pycomm.Cast(torch.float16)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_cast(dtype, compression):
    for count in COUNTS:
        x = gradient(dtype, count, count)
        wire = encoded(compression, x)
        assert wire == reference.cast_wire(x, compression.dtype)
        decoded = compression.decode(compression.encode(x), count, dtype=dtype)
        compare("decoded", decoded, x.to(compression.dtype).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_identity(dtype):
    for count in COUNTS:
        x = gradient(dtype, count, count)
        assert encoded(pycomm.Identity(), x) == reference.cast_wire(x, dtype)
        wire = pycomm.Identity().encode(x)
        compare("decoded", pycomm.Identity().decode(wire, count, dtype=dtype), x)


@pytest.mark.parametrize("values", VALUES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_top_k(count, values):
    for turn, density in enumerate((0.0001, 0.01, 0.15)):
        dtype = FLOATS[turn]
        compression = pycomm.TopK(density, values=values)
        if count == 1 and dtype != torch.float32:
            continue
        x = gradient(dtype, count, turn)
        k = sent_elements(compression, count)
        wire = encoded(compression, x)
        assert wire == reference.top_k_wire(x, k, values)
        at = reference.largest(golden.widen(x), k)
        dense = np.zeros(count, np.float32)
        dense[at] = reference.through_wire(golden.widen(x)[at], at, values)
        decoded = compression.decode(compression.encode(x), count, dtype=dtype)
        compare("decoded", decoded, golden.narrow(dense, dtype))
        if values == torch.float32:
            indices, sent = compression.select(x)
            assert indices.tolist() == at.tolist()
            compare("selected", sent, x.float()[torch.from_numpy(at)])


@pytest.mark.parametrize("values", VALUES, ids=str)
def test_top_k_of_ties_and_of_fewer_than_k(values):
    """Of equal elements the first ones are selected; zeros of either sign never are."""
    x = torch.zeros(200_000)
    x[1::2] = -0.0
    x[7::1000] = 3
    x[8::1000] = -3
    for k in (1, 2, 65, 66, 131, 199, 400, 401, 5000):
        assert encoded(pycomm.TopK(k=k, values=values), x) == reference.top_k_wire(x, k, values)
    few = pycomm.TopK(k=5000).select(x)[0]
    assert few.tolist() == sorted([*range(7, 200_000, 1000), *range(8, 200_000, 1000)])
    assert pycomm.TopK(k=3).select(x)[0].tolist() == [7, 8, 1007]


@pytest.mark.parametrize("k", [1, 2, 8, 300])
def test_top_k_of_few_elements_in_many_chunks(k):
    x = torch.zeros(1 << 24)
    x[:: (1 << 16) - 1] = 1
    wire = encoded(pycomm.TopK(k=k), x)
    assert wire == reference.top_k_wire(x, k)
    decoded = pycomm.TopK(k=k).decode(torch.frombuffer(bytearray(wire), dtype=torch.uint8), len(x))
    assert decoded.nonzero().flatten().tolist() == reference.largest(x.numpy(), k).tolist()


@pytest.mark.parametrize("spread", ["narrow", "one value", "few bits", "growing", "subnormal"])
def test_selection_where_magnitudes_crowd(spread):
    """More elements share the leading bits than are collected at once, so that all digits count."""
    count, generator = 300_000, torch.Generator().manual_seed(3)
    noise = torch.rand(count, generator=generator)
    x = {
        "narrow": 1 + noise * 2**-12,
        "one value": torch.ones(count),
        "few bits": 1 + (noise * 8).floor() * 2**-23,
        "growing": torch.arange(1, count + 1).float(),
        "subnormal": noise * 2**-130,
    }[spread]
    x = x * (1 - 2 * (torch.rand(count, generator=generator) < 0.5).float())
    for k in (1, 100, 65_537, 150_000):
        indices, values = pycomm.TopK(k=k).select(x)
        at = reference.largest(x.numpy(), k)
        assert indices.tolist() == at.tolist()
        compare("values", values, x[torch.from_numpy(at)])


def test_density_over_the_steps_of_a_warm_up():
    compression = pycomm.TopK(0.001, density_steps=4)
    shares = [compression.density_at(step) for step in range(6)]
    assert shares[0] == 0.25
    assert shares[4:] == [0.001, 0.001]
    for before, after in itertools.pairwise(shares[:5]):
        assert after / before == pytest.approx((0.001 / 0.25) ** 0.25)
    x = gradient(torch.float32, 10_000, 0)
    for step in range(6):
        found = len(compression.select(x, step=step)[0])
        wire = compression.encode(x, step=step)
        assert found == -(-int(shares[step] * 1e9) * 10_000 // 10**9)
        assert wire.numel() == compression.encoded_bytes(10_000, step=step)


def test_nan_and_infinity_survive():
    """A NaN or infinity makes the whole block, or a chunk's int8 values, NaN, in one encoding."""
    x = gradient(torch.float32, 140_000, 0)
    x[300], x[301], x[302], x[139_999] = float("nan"), float("inf"), -float("nan"), float("-inf")
    golden.bits(x)[303] = 0x7F800001
    for rounding in ("nearest", "stochastic"):
        compression = pycomm.Int8(256, rounding)
        assert encoded(compression, x) == reference.int8_wire(x, codec_of(compression, x.dtype))
        decoded = compression.decode(compression.encode(x), 140_000)
        wrong = [*range(256, 512), *range(140_000 - 140_000 % 256, 140_000)]
        assert decoded.isnan().nonzero().flatten().tolist() == wrong
    for values in VALUES:
        compression = pycomm.TopK(k=500, values=values)
        assert encoded(compression, x) == reference.top_k_wire(x, 500, values)
    for compression in (pycomm.Cast(), pycomm.Identity(), pycomm.TopK(k=500)):
        decoded = compression.decode(compression.encode(x), 140_000)
        assert decoded[[300, 302, 303]].isnan().all()
        assert decoded[301] == -decoded[139_999] == float("inf")


@pytest.mark.parametrize("name", ["int8", "bf16", "topk:0.1", "none"])
def test_decode_adds(name):
    compression = pycomm.parse_compression(name)
    x, start = gradient(torch.float32, 70_000, 0), gradient(torch.float32, 70_000, 1)
    wire, out = compression.encode(x), start.clone()
    assert compression.decode(wire, 70_000, out, add=True) is out
    compare("sum", out, start + compression.decode(wire, 70_000))


def test_the_documentation_s_examples():
    text = (Path(__file__).parents[2] / "docs/reference/wire-format.md").read_text()
    blocks = re.findall(r"```text\n(50 43 .*?)```", text, re.S)
    lines = [[line.split("   ")[0] for line in block.splitlines()] for block in blocks]
    int8, top = (bytes.fromhex("".join(block)) for block in lines)
    assert encoded(pycomm.Int8(), torch.tensor([0.5, -1, 0.25, 2.54])) == int8
    x = torch.zeros(70_000)
    x[3], x[9], x[65_543] = 1.5, -2, 4
    assert encoded(pycomm.TopK(k=3), x) == top


# Bytes that are not the result of encoding.

FUZZED = (
    pycomm.Int8(),
    pycomm.Int8(4096),
    pycomm.Cast(),
    pycomm.Identity(),
    pycomm.TopK(0.1),
    pycomm.TopK(0.1, values=torch.bfloat16),
    pycomm.TopK(0.1, values=torch.int8),
)


def mutations(wire, dice):
    """Truncated, longer, with flipped bits, with wild words, random altogether."""
    for _ in range(40):
        bad = bytearray(wire)
        for _ in range(dice.randrange(1, 4)):
            how = dice.randrange(6)
            if how == 0:
                del bad[dice.randrange(len(bad) + 1) :]
            elif how == 1:
                bad += dice.randbytes(dice.randrange(1, 40))
            elif how == 2 and bad:
                bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
            elif how == 3 and len(bad) > 24:
                at = 16 + 4 * dice.randrange(min(len(bad) // 4 - 4, 6))
                bad[at : at + 4] = dice.choice((b"\xff\xff\xff\xff", b"\0\0\1\0", b"\xff\0\0\0"))
            elif how == 4:
                bad[16:] = dice.randbytes(len(bad[16:]))
            else:
                bad = bytearray(dice.randbytes(len(bad)))
        yield bytes(bad)


@pytest.mark.parametrize("compression", FUZZED, ids=str)
def test_no_bytes_make_decode_stray(compression):
    """ValueError or a result; memory around `out` does not change."""
    dice, refused, guard = random.Random(str(compression)), 0, 64
    for turn in range(25):
        count = dice.choice((1, 200, 257, 700, 70_000)) if turn else 70_000
        x = gradient(torch.float32, count, turn)
        wire = compression.encode(x)
        for bad in mutations(wire.numpy().tobytes(), dice):
            dtype = torch.float32 if "Identity" in str(compression) else dice.choice(FLOATS)
            around = torch.full((count + 2 * guard,), 77.0, dtype=dtype)
            out, add = around[guard:-guard], dtype == torch.float32 and dice.random() < 0.3
            source = torch.frombuffer(bytearray(bad) or bytearray(1), dtype=torch.uint8)[: len(bad)]
            try:
                compression.decode(source.clone(), count, out, add=add)
            except ValueError:
                refused += 1
            assert (around[:guard] == 77).all()
            assert (around[-guard:] == 77).all()
    assert 100 < refused < 1000


BAD_HEADERS = {
    "shorter than a header": (lambda wire: wire[:15], "header of 16 bytes, got 15"),
    "empty": (lambda wire: wire[:0], "header of 16 bytes, got 0"),
    "no encoding": (lambda wire: b"XY" + wire[2:], "wire is not a pycomm encoding"),
    "another version": (lambda wire: wire[:2] + b"\2" + wire[3:], "version 1 .* got 2"),
    "another codec": (lambda wire: wire[:3] + b"\1" + wire[4:], "another codec than int8 .*kind 1"),
    "another block": (lambda wire: wire[:4] + b"\x80\0" + wire[6:], "another codec.*parameter 128"),
    "another count": (lambda wire: wire[:8] + b"\x2b" + wire[9:], "holds 299 elements.* 300"),
    "truncated": (lambda wire: wire[:-4], "must have 328 bytes, got 324"),
    "longer": (lambda wire: wire + bytes(4), "must have 328 bytes, got 332"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_what_is_wrong_is_said(name):
    change, message = BAD_HEADERS[name]
    wire = pycomm.Int8().encode(torch.ones(300)).numpy().tobytes()
    bad = torch.tensor(list(change(wire)), dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        pycomm.Int8().decode(bad, 300)


# Three entries: counts at 16 and 20, values from 24 on, then the indices 3 and 9 (low bits of 15
# each, and two bits from bit 30 on), and 7 (12 low bits, and bit 12).
BAD_LISTS = {
    "a count beyond the chunk": (16, (65_537).to_bytes(4, "little"), "65537 entries in a chunk"),
    "a count beyond the bytes": (16, (900).to_bytes(4, "little"), "truncated"),
    "indices in the wrong order": (
        36,
        (9 | 3 << 15 | 3 << 30).to_bytes(8, "little"),
        "after 1 of 2",
    ),
    "an index twice": (36, (3 | 3 << 15 | 3 << 30).to_bytes(8, "little"), "after 1 of 2 entries"),
    "an entry too few": (36, (3 | 9 << 15 | 1 << 30).to_bytes(8, "little"), "after 1 of 2"),
    "an entry too many": (36, (3 | 9 << 15 | 7 << 30).to_bytes(8, "little"), "after 2 of 2"),
    "an index beyond a short chunk": (
        44,
        (4464 % 4096 | 1 << 13).to_bytes(4, "little"),
        "after 0 of 1 entries in a chunk of 4464",
    ),
}


@pytest.mark.parametrize("name", BAD_LISTS)
def test_what_is_wrong_with_a_list_is_said(name):
    at, new, message = BAD_LISTS[name]
    x = torch.zeros(70_000)
    x[3], x[9], x[65_543] = 1.5, -2, 4
    wire = pycomm.TopK(k=3).encode(x)
    wire[at : at + len(new)] = torch.tensor(list(new), dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        pycomm.TopK(k=3).decode(wire, 70_000)


def test_an_index_twice_where_a_word_ends():
    """Of ten indices with 6 low bits each, entries 3 and 4 have the last and first bit of words."""
    wire = pycomm.TopK(k=10).encode(torch.ones(1000))
    indices = 16 + 4 + 10 * 4
    assert wire[indices + 3] == 4 | (5 & 3) << 6  # entry 4 and a part of entry 5
    wire[indices + 3] = 3 | (5 & 3) << 6
    with pytest.raises(ValueError, match="after 4 of 10 entries"):
        pycomm.TopK(k=10).decode(wire, 1000)


# Bytes that ranks read from each other.


def bytes_read(compression, size, count, dtype=torch.float32, make=gradient):
    def body(group):
        x = make(dtype, count, group.rank)
        pycomm.compressed_all_reduce(x, compression, group=group)
        return group.traffic()[1]

    with pycomm.LocalWorld(size, 30) as world:
        return max(world.run(body))


@pytest.mark.parametrize(
    ("compression", "size"),
    sweep.a_third_of(
        [pycomm.Int8(), pycomm.Int8(4096), pycomm.Cast(), pycomm.Identity()], range(1, 6)
    ),
    ids=str,
)
def test_wire_bytes_are_what_is_read(compression, size):
    """The rank that owns the most elements reads n - 1 encodings of them, and other parts once."""
    for count in (0, 1, 16_384, 16_385, 16_384 * size, 50_001, 16_384 * 2 * size + 5000):
        for dtype in FLOATS[:2]:
            read = bytes_read(compression, size, count, dtype)
            assert read == compression.wire_bytes(count, size, dtype)
            block = getattr(compression, "block", 1)
            scale = 4 if block > 1 else 0
            payload = getattr(compression, "dtype", dtype).itemsize if block == 1 else 1
            owned = np.bincount(np.arange(count) // 16_384 % size, minlength=size)
            cost = owned * payload + -(-owned // block) * scale
            assert read == max((size - 1) * own + cost.sum() - own for own in cost)


@pytest.mark.parametrize(("values", "size"), sweep.a_third_of(VALUES, range(1, 6)), ids=str)
def test_top_k_reads_no_more_than_wire_bytes(values, size):
    for count in (1000, 65_536 * size, 65_536 * size * 2 - 77):
        for density in (0.001, 0.05):
            compression = pycomm.TopK(density, values=values)
            assert bytes_read(compression, size, count) <= compression.wire_bytes(count, size)


@pytest.mark.parametrize("size", range(2, 6))
def test_top_k_reads_wire_bytes_where_all_lists_are_full(size):
    """All others send rank 0 as much as they may, and every region has a share of results."""
    share, first = 400, torch.arange(1, 65_537)

    def crowded(dtype, count, rank):
        x = torch.zeros(count, dtype=dtype).view(size, -1)
        if rank == 0:
            x[1:, :share] = first[:share].to(dtype)
        else:
            x[0, : 2 * share] = first[: 2 * share].to(dtype)
        return x.flatten()

    compression = pycomm.TopK(k=share * size)
    read = bytes_read(compression, size, 65_536 * size, make=crowded)

    def list_bytes(entries):
        return reference.top_k_bytes(65_536, entries, torch.float32) - 16

    assert read == (size - 1) * (list_bytes(2 * share) + list_bytes(share))
    assert read == compression.wire_bytes(65_536 * size, size)
