"""Writes all tables of results on the pages, and draws the picture of the first page.

``python -m benchmarks.published`` reads the files of results and writes between the marks of each
table, ``<!-- table: NAME -->`` and ``<!-- end -->``. ``--picture FILE`` draws the picture instead.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = (
    "README.md",
    "benchmarks/README.md",
    "docs/lab/convergence.md",
    "docs/lab/performance.md",
)
MARKS = re.compile(r"(<!-- table: (\w+) -->\n\n).*?(\n<!-- end -->)", re.DOTALL)
SIZES = {"256 B": 256, "16 KiB": 16 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20}

Table = Iterator[tuple[str, ...]]


@cache
def _read(file: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{file}.json").read_text())  # type: ignore[no-any-return]


def rows(file: str, **wanted: object) -> list[dict[str, Any]]:
    """The rows of a file of results that have these values."""
    found = _read(file)["rows"]
    return [row for row in found if all(row.get(key) == value for key, value in wanted.items())]


def least(file: str, field: str, **wanted: object) -> float:
    """The least value of a field in these rows."""
    return min(float(row[field]) for row in rows(file, **wanted))


def digits(number: float, unit: str = "") -> str:
    """Three of them, or all of a whole number."""
    text = f"{number:,.0f}" if abs(number) >= 100 else f"{float(f'{number:.3g}'):g}"
    return f"{text} {unit}".strip()


def time(microseconds: float) -> str:
    """With its unit."""
    unit, scale = ("ms", 1e3) if microseconds >= 3e3 else ("us", 1)
    return digits(microseconds / scale, unit)


def verdict(reached: bool) -> str:
    """Whether a goal is reached."""
    return "yes" if reached else "**missed**"


def against(goal: float, number: float, text: str = "") -> str:
    """A number, and whether it misses its goal."""
    return (text or digits(number)) + ("" if number >= goal else ": **missed**")


def percent(share: float) -> str:
    """A relative difference; 0 if it is less than a thousandth of a percent."""
    return f"{100 * share:+.3g} %" if abs(share) >= 1e-5 else "0"


def all_reduces() -> Table:
    """Times of the README."""
    names = {
        ("pycomm", "tensor"): "**pycomm**",
        ("pycomm", "window"): "**pycomm**, tensors in its window",
        ("mpi", "tensor"): "Open MPI 5.0",
        ("deepspeed", "tensor"): "DeepSpeed 0.19.8, shared memory",
        ("gloo", "tensor"): "Gloo, torch 2.13",
    }
    sizes = list(SIZES)[1:]
    yield "", *sizes
    for (impl, buffer), name in names.items():
        times = [
            time(least("cpu_2ranks_mpi", "p50_us", impl=impl, buffer=buffer, bytes=SIZES[size]))
            for size in sizes
        ]
        yield name, *(f"**{each}**" if impl == "pycomm" else each for each in times)


def peers() -> Table:
    """Goals of all-reduces beside other libraries, on one node."""
    yield "size", "pycomm", "Open MPI", "DeepSpeed", "Gloo", "goals, and whether they are reached"
    goals: dict[tuple[str, str], list[tuple[float, str]]] = {
        ("256 B", "tensor"): [(3, "deepspeed"), (500, "gloo"), (4, "mpi")],
        ("16 KiB", "tensor"): [(3, "best")],
        ("16 KiB", "window"): [(3, "best")],
        ("1 MiB", "tensor"): [(5, "best")],
        ("1 MiB", "window"): [(5, "best")],
        ("64 MiB", "tensor"): [(6, "gloo"), (2.2, "deepspeed")],
        ("64 MiB", "window"): [],
    }
    titles = {"mpi": "MPI", "deepspeed": "DeepSpeed", "gloo": "Gloo", "best": "the best peer"}
    for (size, buffer), wanted in goals.items():
        of_size = {"bytes": SIZES[size]}
        ours = least("cpu_2ranks_mpi", "p50_us", impl="pycomm", buffer=buffer, **of_size)
        theirs = {
            impl: least("cpu_2ranks_mpi", "p50_us", impl=impl, buffer="tensor", **of_size)
            for impl in ("mpi", "deepspeed", "gloo")
        }
        times = theirs | {"best": min(theirs.values())}
        said = [f"{g:g}x {titles[peer]}: {verdict(times[peer] >= g * ours)}" for g, peer in wanted]
        where = {"tensor": ", ordinary tensors", "window": ", in the window"}[buffer]
        yield (
            size + ("" if size == "256 B" else where),
            time(ours),
            *(f"{time(each)} ({digits(each / ours)}x)" for each in theirs.values()),
            "; ".join(said) or "none beside peers",
        )


def floors() -> Table:
    """Goals of all-reduces beside what crossing takes at least."""
    yield "what", "goal", "measured", "reached", "file"

    def over(file: str, buffer: str = "tensor", *, impl: str = "pycomm", **of: object) -> float:
        of |= {"impl": impl, "algorithm": "auto", "buffer": buffer}
        return least(file, "over_floor", **of)

    mpi, two, four = "`cpu_2ranks_mpi.json`", "`cpu_2ranks.json`", "`cpu_4ranks.json`"
    small = least("cpu_2ranks_mpi", "p50_us", impl="pycomm", bytes=256)
    goal = "the flags, a call of one rank and 0.3 us: 1.2 us"
    yield "256 B", goal, time(small), verdict(small <= 1.2), mpi
    for kib in (16, 32, 64, 128, 256, 512):
        found = over("cpu_2ranks", bytes=kib << 10)
        yield f"{kib} KiB", "1.3 times the floor", digits(found), verdict(found <= 1.3), two
    large = over("cpu_2ranks_mpi", "window", bytes=64 << 20)
    yield (
        "64 MiB, in the window",
        "1.43 (70 % of the floor)",
        digits(large),
        verdict(large <= 1.43),
        mpi,
    )
    for buffer, name in {"tensor": "ordinary", "window": "in the window"}.items():
        of: dict[str, object] = {"impl": "pycomm", "algorithm": "auto", "buffer": buffer}
        of["bytes"] = 64 << 20
        wide = least("cpu_2ranks_bf16", "p50_us", dtype="float32", **of)
        rate = wide / least("cpu_2ranks_bf16", "p50_us", dtype="bfloat16", **of)
        cells = "0.8 of fp32's bytes per second", digits(rate), verdict(rate >= 0.8)
        yield f"bf16, 64 MiB, {name}", *cells, "`cpu_2ranks_bf16.json`"
    found = least("cpu_4ranks", "p50_us", impl="pycomm", bytes=256, algorithm="auto")
    yield "4 ranks on 2 cores, 256 B", "at most 5 us", time(found), verdict(found <= 5), four


def blocks() -> Table:
    """Other collectives over their floors."""
    collectives = ("reduce_scatter", "all_gather", "broadcast")
    yield "size", *(name.replace("_", "-") for name in collectives)
    for size, nbytes in SIZES.items():
        yield (
            size,
            *(
                ", ".join(
                    digits(
                        least(
                            f"cpu_2ranks_{name}",
                            "over_floor",
                            buffer=b,
                            bytes=nbytes,
                            impl="pycomm",
                        )
                    )
                    for b in ("tensor", "window")
                )
                for name in collectives
            ),
        )


def compression() -> Table:
    """Goals of codecs and compressed all-reduces."""
    yield "what", "goal", "measured", "reached"
    for operation, name in {"encode": "encode", "decode_add": "decode and add"}.items():
        (row,) = rows("codec_int8", codec="int8", operation=operation)
        share = row["stream_percent"]
        said = f"{time(row['p50_us'])}, {digits(row['GBps'])} GB/s: {share:.0f} %"
        yield f"int8 {name}", "70 % of a stream with the same mix", said, verdict(share >= 70)
    (row,) = rows("codec_topk", operation="select")
    ours, torchs, ratio = time(row["p50_us"]), time(row["torch_us"]), row["torch_ratio"]
    said = f"{ours}, torch.topk {torchs}: {ratio:.0f} times"
    yield "top-k selection", "8 times as fast as torch.topk", said, verdict(ratio >= 8)
    reads = 100 / row["stream_percent"]
    yield "", "at most 5 times a plain read", f"{digits(reads)} times", verdict(reads <= 5)
    of = {"bytes": 64 << 20}
    coded, plain = (
        least("cpu_2ranks_compressed", "p50_us", compression=c, **of) for c in ("int8", "none")
    )
    said = f"{time(coded)}, {time(plain)}: {digits(coded / plain)} times"
    goal = "at most 1.5 times the uncompressed one"
    yield "int8 all-reduce, 64 MiB", goal, said, verdict(coded <= 1.5 * plain)
    for operation, name in {"encode": "encode", "decode_add": "decode and add"}.items():
        share = 100 * least("h200/gpu", "share", name=f"int8_{operation}")
        goal = "85 % of the copy bandwidth"
        yield f"int8 {name}, on a GPU", goal, f"{share:.0f} %", verdict(share >= 85)
    ratio = least("h200/gpu", "peer_ratio", name="topk_select")
    goal = "20 times as fast as torch.topk"
    yield "top-k selection, on a GPU", goal, f"{digits(ratio)} times", verdict(ratio >= 20)


def shards_of_four() -> Table:
    """Sharded steps beside the unsharded wrapper."""
    yield "", "goal", "reached"
    for scheme, name in {"fp32": "fp32", "bf16_remainder": "bf16 + remainder"}.items():
        ratio = least("shard_4ranks", "ratio", scheme=scheme, name="optimizer")
        clipped = least("shard_4ranks", "ratio", scheme=scheme, name="optimizer clipped")
        yield name, "2.3 times faster", against(2.3, ratio)
        yield f"{name}, with clipping", "none", digits(clipped)


def shard_peers() -> Table:
    """Sharded steps beside other libraries'."""
    yield "", "goal", "reached"
    ours = least("shard_peers", "time_us", name="optimizer")
    names = {
        "ddp": ("DDP with AdamW on Gloo, the fastest peer on Gloo", 4),
        "fsdp2": ("FSDP2 on Gloo", 4),
        "fsdp2_pycomm": ("FSDP2 on pycomm's backend", 1.5),
        "deepspeed_zero1": ("DeepSpeed ZeRO-1", 4),
        "deepspeed_zero2": ("DeepSpeed ZeRO-2", 4),
    }
    for name, (title, goal) in names.items():
        ratio = least("shard_peers", "time_us", name=name) / ours
        yield title, f"{goal:g} times faster", against(goal, ratio)


def training() -> Table:
    """Exchanges of DDP and the wrapper, and what backward does not hide."""
    yield "what", "goal", "measured", "reached", "file"
    step = {row["name"]: row for row in rows("ddp_step")}
    hook, wrapper, gloo = (step[name] for name in ("ddp", "wrapper", "gloo"))
    ours, theirs = time(hook["exchange_us"]), time(gloo["exchange_us"])
    yield (
        "exchange of 25M parameters, `all_reduce_hook`",
        "4 times as fast as DDP on Gloo",
        f"{ours}, Gloo {theirs}: {digits(hook['speedup'])} times",
        verdict(hook["speedup"] >= 4),
        "`ddp_step.json`",
    )
    yield (
        "the same, `pycomm.DataParallel`",
        "a faster step than the hook's",
        f"{time(wrapper['step_us'])}, hook {time(hook['step_us'])}",
        verdict(wrapper["step_us"] <= hook["step_us"]),
        "`ddp_step.json`",
    )
    names = {"ddp": "hook, default buckets", "wrapper": "`pycomm.DataParallel`"}
    for row in rows("overlap"):
        exposed = row["exposed_percent"]
        what = f"exposed behind a slow link, 64M parameters, {names[row['mode']]}"
        yield what, "at most 25 %", f"{exposed} %", verdict(exposed <= 25), "`overlap.json`"
    for row in rows("overlap"):
        what = f"hand-over of a bucket, median, {names[row['mode']]}"
        found = row["call_p50_us"]
        yield what, "under 50 us", time(found), verdict(found < 50), "`overlap.json`"


def convergence() -> Table:
    """Losses beside plain DDP's."""
    yield "", "language model (SGD)", "digits (SGD, momentum 0.9)", "claimed"
    for row in rows("convergence", task="characters", front="hook"):
        if "difference" in row:
            same = {key: row[key] for key in ("front", "mode", "broken")}
            other = rows("convergence", task="digits", **same)[0]
            name = "uncompressed" if row["mode"] == "fp32" else row["mode"]
            broken = f"broken: {row['broken']} ({row['mode']})"
            side = "outside" if row["broken"] else "within"
            yield (
                broken if row["broken"] else name,
                *(percent(each["difference"]) for each in (row, other)),
                f"{side} {100 * row['band']:g} %" if row["band"] else "0",
            )


def _sparse(file: str, optimizers: dict[str, str], *, ranges: bool) -> Table:
    """Losses of sparse settings beside uncompressed training: means over seeds, perhaps ranges."""
    file = f"convergence_sparse_{file}"
    names = {
        "feedback, 1%, float32": "feedback, 1 %, fp32 values",
        "feedback, 3%, int8": "feedback, 3 %, int8 values",
        "reset, 3%, int8": "error reset, 3 %, int8 values",
    }
    yield "setting", "bits per parameter and step", *optimizers.values()
    keys = ("setting", "ranks", "steps", "bits")
    for setting in dict.fromkeys(tuple(row[key] for key in keys) for row in rows(file)):
        of = dict(zip(keys, setting, strict=True))
        cells = []
        for optimizer in optimizers:
            found = rows(file, optimizer=optimizer, **of)
            seeds = [100 * each for each in found[0]["differences"]]
            cell = f"{sum(seeds) / len(seeds):+.1f} %"
            cells.append(f"{cell} ({min(seeds):.1f} to {max(seeds):.1f})" if ranges else cell)
        title = f"{names[of['setting']]}, {of['ranks']} ranks, {of['steps']:,} steps"
        yield f"{title}, {len(seeds)} seeds", f"{of['bits']:.2f}", *cells


def sparse_characters() -> Table:
    """The small language model."""
    names = {"sgd": "SGD", "momentum": "momentum", "adamw": "AdamW"}
    return _sparse("characters", names, ranges=True)


def sparse_digits() -> Table:
    """The vision model."""
    names = {"sgd": "SGD", "momentum": "momentum", "adamw": "AdamW"}
    return _sparse("digits", names | {"adamw, higher rate": "AdamW, higher rate"}, ranges=False)


def optimizers() -> Table:
    """Goals of AdamW's steps."""
    yield "AdamW", "goal", "reached"

    def of(scheme: str, impl: str, field: str = "time_us", file: str = "optimizer") -> float:
        return least(file, field, scheme=scheme, impl=impl)

    fp32, ratio = of("fp32", "pycomm"), of("fp32", "torch", "ratio")
    stream = of("fp32", "pycomm", "stream_percent")
    yield "fp32", "torch's fused speed", f"{against(1, ratio)}, {stream:.0f} % of the stream"
    found = of("bf16_remainder", "pycomm") / fp32
    yield "bf16 + remainder, 26 B", "at most 1.05 times the fp32 step's time", digits(found)
    ratio = of("bf16_remainder", "deepspeed", "ratio")
    yield "", "1.1 times DeepSpeed's CPUAdam in bf16", against(1.1, ratio)
    ratio = of("bf16_remainder_bf16", "torch", "ratio")
    yield "bf16 + remainder, states in bf16, 18 B", "twice torch's all-bf16", against(2, ratio)
    found = of("bf16_remainder_8bit", "pycomm") / fp32
    stream = of("bf16_remainder_8bit", "pycomm", "stream_percent")
    said = f"{digits(found)} times the fp32 step's time, {stream:.0f} % of the stream"
    yield "bf16 + remainder, states in 8 bits, 14 B", "stated and explained", said
    schemes = ("fp32", "bf16_remainder", "bf16_remainder_bf16")
    full = [of(scheme, "pycomm full") / of(scheme, "pycomm") for scheme in schemes]
    said = ", ".join(map(digits, full)) + (": **missed**" if max(full) > 1.2 else "")
    yield "unscale, check, clip, step over the step", "at most 1.2", said
    ratio = of("fp32", "torch", "ratio", "optimizer_small")
    yield "500 tensors of 1K to 100K elements", "torch's fused speed", against(1, ratio)


def nodes() -> Table:
    """Goals between nodes: the ratio to Gloo; of a slower machine in brackets."""
    yield "", "goal", "reached"
    on = {"case": "all_reduce", "rate": "1gbit"}

    def pair(
        title: str, contestant: str, goal: float, ranks: int, file: str = "hosts"
    ) -> tuple[str, ...]:
        prefix = "hosts" if file == "hosts" else "nodes"
        there = {prefix: 2, f"ranks_per_{prefix[:-1]}": ranks}
        here = {"nodes": 2, "ranks_per_node": ranks}
        fast = least("nodes", "ratio", contestant=contestant, **on, **here)
        slow = least(file, "ratio", contestant=contestant, **on, **there)
        return title, f"{goal:g} times faster", f"{against(goal, fast)} ({against(goal, slow)})"

    yield pair("2 nodes x 1 rank, int8", "pycomm int8", 3.6, 1)
    yield pair("uncompressed", "pycomm none", 0.95, 1)
    yield pair("top-k 1 %", "pycomm topk:0.01", 15, 1)
    with_residual = "pycomm topk:0.01 feedback"
    yield pair("top-k 1 % with a residual", with_residual, 12, 1, "nodes_feedback")
    yield pair("2 nodes x 2 ranks, uncompressed", "pycomm none", 1.3, 2)
    yield pair("int8", "pycomm int8", 5, 2)
    train = {"case": "training", "contestant": "pycomm int8_hook"}
    fast, slow = (least(file, "ratio", **train) for file in ("nodes", "hosts"))
    title = "DDP, 10M parameters, int8 hook: steps per second"
    yield title, "2.5 times plain DDP's", f"{against(2.5, fast)} ({against(2.5, slow)})"
    title = "the same: step over the longer of computing and exchanging"
    trained = _read("nodes")["meta"]["training"][0]
    took = {name: each["time_us"] for name, each in trained["figures"].items()}
    over = {
        name: took[f"pycomm {hook}"] / max(took["compute"], took[f"pycomm {hook}, exchange alone"])
        for name, hook in {"uncompressed": "all_reduce_hook", "int8": "int8_hook"}.items()
    }
    said = ", ".join(f"{name} {digits(ratio)}" for name, ratio in over.items())
    yield title, "at most 1.15", said + (": **missed**" if max(over.values()) > 1.15 else "")
    exact, coded = (trained["losses"][name] for name in ("gloo", "pycomm int8_hook"))
    apart = f"a part in {exact / abs(coded - exact):,.0f} from it"
    yield f"the same: loss after {trained['steps']} steps", "plain DDP's", apart
    more: dict[bool, list[float]] = {False: [], True: []}
    for row in rows("nodes", case="all_reduce"):
        ratio = row["link_bytes"] / row["predicted_link_bytes"]
        more[row["contestant"].endswith("feedback")].append(100 * (ratio - 1))
    plain, fewer = max(map(abs, more[False])), [-each for each in more[True]]
    said = f"within {digits(plain)} %; with a residual {min(fewer):.0f} to {max(fewer):.0f} % fewer"
    yield "bytes on the link", "within 5 % of one exchange per node", said
    predicted = [row for row in rows("nodes_advisor") if row["predicted_us"]]
    near = [abs(row["time_us"] / row["predicted_us"] - 1) <= 0.2 for row in predicted]
    said = (
        f"{sum(near)} of {len(near)} rows{'' if sum(near) >= 0.9 * len(near) else ': **missed**'}"
    )
    yield "[predictions](results/nodes_advisor.json) within 20 %", "90 % of the rows", said
    cuts = _read("hosts")["meta"]["cuts"]
    whole, last = cuts["trials"] - len(cuts["broken_promises"]), cuts["seconds"]["max"]
    title = f"{cuts['trials']} cuts of the link in mid-exchange, timeout 3 s"
    said = f"{whole} of {cuts['trials']}, the last after {last:.2f} s"
    yield title, "an error on every rank within 4 s", said


def sharded_between_nodes() -> Table:
    """Sharded wrappers between nodes."""
    yield "", "goal", "exchange and optimizer", "whole step"
    names = {
        "sharded": ('`shard="optimizer"`', 1.05),
        "sharded int8": (
            'with `compression=pycomm.Int8()` and `Sharding("optimizer", publish=pycomm.Int8())`',
            3.5,
        ),
        "unsharded int8": ("without shards, `compression=pycomm.Int8()`", 0),
    }
    for contestant, (title, goal) in names.items():
        part, whole = (
            least("nodes_sharded", "ratio", contestant=contestant, case=case)
            for case in ("exchange and optimizer", "step")
        )
        told = f"{goal:g} times faster" if goal else "none"
        yield title, told, against(goal, part), digits(whole)


def c10d() -> Table:
    """The backend of torch.distributed beside Gloo."""
    yield "", "Gloo", "pycomm", "times faster"
    names = {
        ("all_reduce", 256): "`all_reduce` of 256 B",
        ("all_reduce", 1 << 20): "1 MiB",
        ("all_reduce", 64 << 20): "64 MiB",
        ("reduce_scatter_tensor", 64 << 20): "`reduce_scatter_tensor` of 64 MiB",
        ("all_gather_into_tensor", 64 << 20): "`all_gather_into_tensor` of 64 MiB",
        ("all_to_all_single", 64 << 10): "`all_to_all_single` of 64 KiB",
        ("all_to_all_single", 64 << 20): "64 MiB",
        ("ping_pong", 256): "`send` and `recv` there and back, 256 B",
        ("ping_pong", 64 << 20): "64 MiB",
        ("new_group", 0): "a new group, one barrier, its end",
        ("ddp", 100_000_000): "a step of DistributedDataParallel, 25 million fp32 parameters",
        ("fsdp", 100_000_000): "the same step of FSDP2",
    }
    for (operation, nbytes), title in names.items():
        of = {"operation": operation, "bytes": nbytes}
        gloo, ours = (least("c10d", "time_us", impl=impl, **of) for impl in ("gloo", "pycomm"))
        yield title, time(gloo), time(ours), digits(gloo / ours)


TABLES: dict[str, Callable[[], Table]] = {
    table.__name__: table
    for table in (
        all_reduces,
        peers,
        floors,
        blocks,
        compression,
        shards_of_four,
        shard_peers,
        training,
        convergence,
        sparse_characters,
        sparse_digits,
        optimizers,
        nodes,
        sharded_between_nodes,
        c10d,
    )
}


def text_of(name: str) -> str:
    """A table in Markdown."""
    head, *lines = TABLES[name]()
    return "".join(f"| {' | '.join(each)} |\n" for each in (head, ("---",) * len(head), *lines))


def with_tables(page: str) -> str:
    """A page's text with all of its tables made anew."""
    return MARKS.sub(lambda found: found[1] + text_of(found[2]) + found[3], page)


def picture(file: str) -> None:
    """Draws an all-reduce on one node, and a training step between two, beside other libraries'.

    One below the other, so that the text is legible on a narrow screen.
    """
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    ours, others = "#0072b2", "#9a9a9a"
    names = {
        "pycomm, in its window": ("pycomm", "window"),
        "pycomm": ("pycomm", "tensor"),
        "DeepSpeed, shared memory": ("deepspeed", "tensor"),
        "Open MPI": ("mpi", "tensor"),
        "Gloo": ("gloo", "tensor"),
    }
    large = {"bytes": 64 << 20}
    on_one_node = {
        name: least("cpu_2ranks_mpi", "p50_us", impl=impl, buffer=buffer, **large) / 1e3
        for name, (impl, buffer) in names.items()
    }
    step = {"case": "training", "rate": "1gbit", "nodes": 2}
    contestants = {
        "Gloo, PowerSGD rank 1": "gloo PowerSGD hook",
        "pycomm, int8": "pycomm int8_hook",
        "Gloo, bf16": "gloo bf16 hook",
        "Gloo": "gloo",
    }
    between_nodes = {
        name: least("nodes", "time_us", contestant=contestant, **step) / 1e3
        for name, contestant in contestants.items()
    }
    panels = {
        "All-reduce of 64 MiB in ms (2 ranks on one node, float32)": on_one_node,
        "Training step in ms (10M parameters, 2 nodes at 1 Gbit/s)": between_nodes,
    }
    heights = [len(times) for times in panels.values()]
    figure, axes = plt.subplots(2, 1, figsize=(6, 4.6), layout="constrained", height_ratios=heights)
    for axis, (title, times) in zip(axes, panels.items(), strict=True):
        labels = list(times)[::-1]
        colors = [ours if label.startswith("pycomm") else others for label in labels]
        bars = axis.barh(labels, [times[label] for label in labels], color=colors)
        axis.bar_label(bars, fmt="{:.3g}", padding=3, fontsize=13)
        axis.tick_params(labelsize=13, left=False)
        # From the picture's left edge, above the names.
        axis.set_title(title, fontsize=13, loc="right")
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.xaxis.set_visible(False)
        axis.margins(x=0.14)
    figure.savefig(file, dpi=120)


def main() -> None:
    """Writes the tables, or draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--picture", metavar="FILE", help="draw the picture, a PNG, instead")
    if file := parser.parse_args().picture:
        picture(file)
        return
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(path.read_text()))


if __name__ == "__main__":
    main()
