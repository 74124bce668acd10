"""The command line. Flags that also exist in nccl-tests have the same names."""

from __future__ import annotations

import argparse
import re
import select
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from pycomm import _C, PeerDied, parse_compression
from pycomm._inputs import ALGORITHMS, COMPRESSIBLE, DTYPES, OPS
from pycomm.bench import (
    c10d,
    choose,
    codecs,
    collectives,
    launch,
    optimizers,
    peers,
    scaling,
    sharding,
    training,
)
from pycomm.bench.contestants import REDUCTIONS
from pycomm.bench.gpu import session
from pycomm.bench.report import (
    GIB,
    KIB,
    MIB,
    UNREAD,
    RankSettings,
    Results,
    Settings,
    human_bytes,
    number_in,
    picture,
    whole,
    writable,
)

COLLECTIVES = {
    "all_reduce": "time all-reduces",
    "reduce_scatter": "time reduce-scatters; size is that of the whole input",
    "all_gather": "time all-gathers; size is that of the whole output",
    "broadcast": "time broadcasts from rank 0",
    "reduce": "time reductions to rank 0",
    "gather": "time gathers to rank 0; size is that of the whole output",
    "scatter": "time scatters from rank 0; size is that of the whole input",
    "all_to_all": "time all-to-alls; size is that of a rank's whole input",
    "send_recv": "time messages to the next rank and from the one before",
}
CODEC = "time encoding, decoding and selecting, without ranks"
OPTIMIZER = (
    "time fused optimizer steps beside torch's, without ranks; size is 4 bytes per parameter, "
    "however they are stored"
)
C10D = "time torch.distributed's operations on the backend pycomm, beside Gloo or NCCL"
GPU = "time every kernel on a GPU beside a copy and torch, and compare with goals"
OVERLAP = "time training steps, and say how much of the exchange backward does not hide"
STEP = "time training steps, pycomm's exchange beside that of DDP alone"
SCALING = "time training steps of more and more ranks, each with the same work"
CHOOSE = "make a table of algorithms from times between nodes, without ranks"
SHARD = "exchange and optimizer step together, with and without shard='optimizer'"
BENCHMARKS: dict[str, tuple[type[Settings], Callable[[Any], Results[Any] | None]]] = {
    **dict.fromkeys(COLLECTIVES, (collectives.CollectiveSettings, collectives.run)),
    "codec": (codecs.CodecSettings, codecs.run),
    "optimizer": (optimizers.OptimizerBenchSettings, optimizers.run),
    "c10d": (c10d.C10dSettings, c10d.run),
    "overlap": (training.TrainingSettings, training.run_overlap),
    "gpu": (session.GpuSettings, session.run),
    "step": (training.TrainingSettings, training.run_steps),
    "scaling": (scaling.ScalingSettings, scaling.run),
    "shard": (sharding.ShardSettings, sharding.run),
    "choose": (choose.ChooseSettings, choose.run),
}
DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)
CODEC_DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in COMPRESSIBLE)
SCHEME_NAMES = tuple(optimizers.SCHEMES)
ITERS_HELP = "timed calls (default: as many as fit into 0.25 s)"
WARMUP_HELP = "untimed calls before each round (default: a tenth of the round's)"
STEPS_HELP = "timed steps (default: 21, or as many as fit into 0.25 s)"
COMPRESSION_HELP = "none, bf16, fp16, int8, int8:BLOCK, topk:DENSITY"
COMPRESSIONS = ("none", "bf16", "fp16", "int8", "topk:0.01")
DEVICES = ("cpu", "cuda")
SECONDS = number_in(0, 1e6, "seconds above 0 and at most 1e+06")
UNITS = {"": 1, "K": KIB, "M": MIB, "G": GIB}


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, starts the ranks if necessary, and runs.

    Ctrl-C ends the run: rows are printed and written as they come.
    """
    settings = parse(argv)
    try:
        _start(settings)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except PeerDied:
        if not _is_unread():
            raise
        raise SystemExit(UNREAD) from None


def _is_unread() -> bool:
    """True if nobody reads what this process and its ranks print: rank 0 has ended then."""
    output = select.poll()
    output.register(1, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def _start(settings: Any) -> None:
    """Runs on ranks, or in this process."""
    if isinstance(settings, RankSettings):
        backend = "pycomm" if settings.benchmark == "c10d" else "gloo"
        device = getattr(settings, "device", "cpu")
        options: dict[str, Any] = {"ranks": settings.ranks, "timeout": settings.timeout}
        launch.run(measure, settings, backend=backend, device=device, **options)
    else:
        measure(settings)


def measure(settings: Settings) -> None:
    """Runs a benchmark on this rank, and draws its table."""
    _, run = BENCHMARKS[settings.benchmark]
    results = run(settings)
    if settings.plot is not None and results is not None and results.is_first and results.rows:
        from pycomm.bench import plot  # matplotlib is not always there

        plot.draw(settings.plot, results.what, results.rows)


def parse(argv: Sequence[str] | None = None) -> Any:
    """Settings from a command line; exits with a message if they cannot be measured here.

    Returns:
        The settings of the benchmark's own type, whose fields have the names of the arguments.
    """
    arguments, unknown = make_parser().parse_known_args(argv)
    parser: argparse.ArgumentParser = arguments.parser
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    words = sys.argv[1:] if argv is None else argv
    arguments.command = shlex.join(["python", "-m", "pycomm.bench", *words])
    device = getattr(arguments, "device", "cpu")
    if device == "cuda" and not _C.has_cuda:
        parser.error("--device cuda: this build of pycomm has no CUDA")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU on this machine")
    launch.require("numpy", *(["matplotlib"] if getattr(arguments, "plot", None) else []))
    if hasattr(arguments, "minbytes"):
        _set_sizes(parser, arguments)
    if arguments.benchmark in COLLECTIVES:
        buffer = arguments.buffer
        arguments.buffers = ("tensor", "window") if buffer == "both" else (buffer,)
    elif arguments.benchmark == "codec":
        arguments.codecs = tuple(arguments.codecs or ("int8",))
    elif arguments.benchmark in ("overlap", "step", "scaling"):
        _set_parameters(parser, arguments)
    kind, _ = BENCHMARKS[arguments.benchmark]
    names = [field.name for field in fields(kind) if hasattr(arguments, field.name)]
    return kind(**{name: getattr(arguments, name) for name in names})


def _set_sizes(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Sets the sizes from the smallest to the largest, by factor or step."""
    current, step, factor = arguments.minbytes, arguments.stepbytes or 0, arguments.stepfactor
    if current > arguments.maxbytes:
        parser.error("--minbytes must not exceed --maxbytes")
    if factor < 2 and not step:
        parser.error("--stepfactor must be at least 2")
    for name in getattr(arguments, "dtypes", ()):
        element = getattr(torch, name).itemsize
        if current % element or step % element:
            parser.error(
                f"--minbytes and --stepbytes must be multiples of an element's size, {element} for "
                f"{name}, got {current} and {arguments.stepbytes}"
            )
    found = []
    while current <= arguments.maxbytes:
        found.append(current)
        current = current + step if step else current * factor
    arguments.sizes = tuple(found)


def _set_parameters(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    arguments.parameters = arguments.sizes[0]
    if getattr(arguments, "shard", False):
        _set_trainees(parser, arguments)
        arguments.benchmark = "shard"
    elif len(arguments.sizes) > 1:
        parser.error("--parameters must be one number without --shard")


def _set_trainees(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Sets the peers of sharded steps: by default all that run on the device."""
    others = peers.CPU_TRAINEES if arguments.device == "cuda" else ()
    able = tuple(name for name in peers.TRAINEES if name not in others)
    for name in arguments.peers or ():
        if name not in able:
            parser.error(
                f"--peer: expected some of {', '.join(able)} with --shard --device "
                f"{arguments.device}, got {name!r}"
            )
    arguments.peers = arguments.peers or able


def make_parser() -> argparse.ArgumentParser:
    """Makes a sub-command for each benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench",
        description="Times pycomm and other installed libraries in interleaved rounds.",
        epilog="The command starts the ranks itself, unless torchrun or mpirun has started it.",
    )
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="WHAT")
    for name, text in COLLECTIVES.items():
        command = commands.add_parser(name, help=text, description=text)
        _add_size_flags(command, least=8, most=64 * MIB)
        _add_what_flags(command, name)
        _add_how_flags(command, name)
    _add_codec_flags(commands.add_parser("codec", help=CODEC, description=CODEC))
    _add_optimizer_flags(commands.add_parser("optimizer", help=OPTIMIZER, description=OPTIMIZER))
    _add_gpu_flags(commands.add_parser("gpu", help=GPU, description=GPU))
    _add_c10d_flags(commands.add_parser("c10d", help=C10D, description=C10D))
    command = commands.add_parser("overlap", help=OVERLAP, description=OVERLAP)
    _add_training_flags(command, parameters=64 * MIB, batch=128)
    command.add_argument("--device", choices=DEVICES, default="cpu")
    command = commands.add_parser("step", help=STEP, description=STEP)
    _add_training_flags(command, parameters=25 * MIB, batch=8)
    command.add_argument("--device", choices=DEVICES, default="cpu")
    _add_shard_flags(command)
    command = commands.add_parser("scaling", help=SCALING, description=SCALING)
    _add_model_flags(command, parameters=8 * MIB, batch=64)
    _add_scaling_flags(command)
    _add_choose_flags(commands.add_parser("choose", help=CHOOSE, description=CHOOSE))
    for command in commands.choices.values():
        command.set_defaults(parser=command)  # its errors show its own usage
    return parser


def _add_size_flags(command: argparse.ArgumentParser, least: int, most: int) -> None:
    add = command.add_argument_group("sizes").add_argument
    add("-b", "--minbytes", type=size, default=least, metavar="SIZE",
        help=f"smallest size (default {human_bytes(least)})")  # fmt: skip
    add("-e", "--maxbytes", type=size, default=most, metavar="SIZE",
        help=f"largest size (default {human_bytes(most)})")  # fmt: skip
    add("-f", "--stepfactor", type=whole(1), default=2, metavar="N",
        help="factor between sizes (default 2)")  # fmt: skip
    add("-i", "--stepbytes", type=size, metavar="SIZE", help="difference of sizes, instead of -f")


def _add_what_flags(command: argparse.ArgumentParser, collective: str) -> None:
    add = command.add_argument_group("what to time; comma-separated, or `all`").add_argument
    add("-d", "--datatype", dest="dtypes", type=some_of(DTYPE_NAMES), default=("float32",),
        metavar="TYPE", help=f"{', '.join(DTYPE_NAMES)} (default float32)")  # fmt: skip
    if collective in REDUCTIONS:
        add("-o", "--op", dest="ops", type=some_of(tuple(OPS)), default=("sum",), metavar="OP",
            help=f"{', '.join(OPS)} (default sum)")  # fmt: skip
    if collective == "all_reduce":
        add("-a", "--algorithm", dest="algorithms", type=some_of(tuple(ALGORITHMS)),
            default=("auto",), metavar="ALGORITHM",
            help=f"{', '.join(ALGORITHMS)} (default auto)")  # fmt: skip
        add("--compression", dest="compressions", type=compressions, default=("none",),
            metavar="COMPRESSION", help=f"{COMPRESSION_HELP} (default none)")  # fmt: skip
    add("--buffer", choices=("tensor", "window", "both"), default="tensor",
        help="ordinary tensors (default), tensors made by group.empty, or both")  # fmt: skip
    add("--peer", dest="peers", type=some_of(tuple(peers.COLLECTIVES)), default=(), metavar="PEER",
        help=f"other libraries to time: {', '.join(peers.COLLECTIVES)}")  # fmt: skip
    add("--device", choices=DEVICES, default="cpu")


def _add_how_flags(command: argparse.ArgumentParser, collective: str) -> None:
    add = command.add_argument_group("how").add_argument
    _add_run_flags(command, ITERS_HELP)
    add("--ranks", type=whole(1), default=2, help="processes to start (default 2)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="verify results (default 1)")
    if collective == "all_reduce":
        add("--feedback", action="store_true", help="compress with a residual")
    add("--timeout", type=SECONDS, default=60.0, help="seconds to wait for a rank (default 60)")
    add("--brief", action="store_true", help="print only medians, as they come")


def _add_codec_flags(command: argparse.ArgumentParser) -> None:
    _add_size_flags(command, least=256 * MIB, most=256 * MIB)
    add = command.add_argument
    add("--compression", dest="codecs", type=compressions, action="extend", metavar="COMPRESSION",
        help=f"{COMPRESSION_HELP}, comma-separated, or `all` (default int8)")  # fmt: skip
    add("-d", "--datatype", dest="dtypes", type=some_of(CODEC_DTYPE_NAMES), default=("float32",),
        metavar="TYPE",
        help=f"{', '.join(CODEC_DTYPE_NAMES)}, or `all` (default float32)")  # fmt: skip
    add("--device", choices=DEVICES, default="cpu", help="cpu (one thread) or cuda")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="verify results (default 1)")
    _add_run_flags(command, ITERS_HELP)


def _add_training_flags(command: argparse.ArgumentParser, parameters: int, batch: int) -> None:
    _add_model_flags(command, parameters, batch)
    _add_rank_flags(command, STEPS_HELP)


def _add_scaling_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--device", choices=DEVICES, default="cpu")
    add("--ranks", dest="counts", type=counts, default=(1, 2), metavar="N,N,...",
        help="numbers of processes to start (default 1,2)")  # fmt: skip
    add("--timeout", type=SECONDS, default=60.0, help="seconds to wait for a rank (default 60)")
    _add_run_flags(command, STEPS_HELP)


def _add_model_flags(command: argparse.ArgumentParser, parameters: int, batch: int) -> None:
    add = command.add_argument
    add("-p", "--parameters", dest="sizes", type=sizes, default=(parameters,), metavar="N",
        help=f"approximate parameters of the model (default {parameters // MIB}M)")  # fmt: skip
    add("--batch", type=whole(1), default=batch, metavar="N",
        help=f"rows per rank (default {batch})")  # fmt: skip
    add("--mode", dest="modes", type=some_of(training.MODES), default=training.MODES,
        metavar="MODE", help=f"{' or '.join(training.MODES)} (default both)")  # fmt: skip


def _add_shard_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group(SHARD).add_argument
    add(
        "--shard",
        action="store_true",
        help="time sharded steps instead; --parameters may be a list",
    )
    add("--scheme", dest="schemes", type=some_of(SCHEME_NAMES), default=("fp32",),
        metavar="SCHEME",
        help=f"storage: {', '.join(SCHEME_NAMES)}, or `all` (default fp32)")  # fmt: skip
    add("--peer", dest="peers", type=some_of(peers.TRAINEES), metavar="PEER",
        help=f"{', '.join(peers.TRAINEES)} (default: all that run on the device)")  # fmt: skip


def _add_gpu_flags(command: argparse.ArgumentParser) -> None:
    names = tuple(name for name, _ in session.sets("cuda"))
    add = command.add_argument
    add("--only", type=some_of(names), default=names, metavar="SET",
        help=f"{', '.join(names)} (default all)")  # fmt: skip
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="verify results (default 1)")
    warmup_help = f"untimed calls before the first round (default {session.WARM_UP})"
    _add_run_flags(command, f"timed calls (default {session.ROUNDS})", warmup_help)


def _add_choose_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("results", nargs="+", metavar="RESULTS",
        help="files that all_reduce -a two_shot,ring,tree -J has written, one for each numbers of "
        "nodes and ranks")  # fmt: skip
    add(
        "--write",
        type=writable,
        metavar="FILE",
        help="write the table, for pycomm.init(algorithms=FILE)",
    )


def _add_c10d_flags(command: argparse.ArgumentParser) -> None:
    names = tuple(c10d.SIZES)
    command.add_argument(
        "--operation", dest="operations", type=some_of(names), default=names, metavar="OPERATION",
        help=f"{', '.join(names)} (default all)",
    )  # fmt: skip
    command.add_argument("--device", choices=DEVICES, default="cpu")
    _add_rank_flags(command, ITERS_HELP)


def _add_rank_flags(command: argparse.ArgumentParser, iters_help: str) -> None:
    add = command.add_argument
    add("--ranks", type=whole(2), default=2, help="processes to start (default 2)")
    add("--timeout", type=SECONDS, default=60.0, help="seconds to wait for a rank (default 60)")
    _add_run_flags(command, iters_help)


def _add_run_flags(
    command: argparse.ArgumentParser, iters_help: str, warmup_help: str = WARMUP_HELP
) -> None:
    """The flags of every benchmark."""
    add = command.add_argument_group("how long, and what becomes of the results").add_argument
    add("-n", "--iters", type=whole(1), metavar="N", help=iters_help)
    add("-w", "--warmup_iters", type=whole(0), metavar="N", help=warmup_help)
    add("-J", "--json", type=writable, metavar="FILE", help="write results")
    add("--plot", type=picture, metavar="FILE", help="draw results as a PNG")
    add("--wide", action="store_true", help="show all columns; else those that fit 80 characters")


def _add_optimizer_flags(command: argparse.ArgumentParser) -> None:
    _add_size_flags(command, least=256 * MIB, most=256 * MIB)
    add = command.add_argument
    rules = tuple(optimizers.OPTIMIZERS)
    add("--name", dest="names", type=some_of(rules), default=("adamw",), metavar="RULE",
        help=f"{', '.join(rules)}, or `all` (default adamw)")  # fmt: skip
    add("--scheme", dest="schemes", type=some_of(SCHEME_NAMES), default=("fp32",),
        metavar="SCHEME", help=f"{', '.join(SCHEME_NAMES)}, or `all` (default fp32)")  # fmt: skip
    add("--small", action="store_true", help="500 tensors of 1K to 100K elements instead")
    add("--full", action="store_true", help="also time steps with unscaling, check and clipping")
    add("--peer", dest="peers", type=some_of(peers.OPTIMIZERS), default=(), metavar="PEER",
        help=f"others to time: {', '.join(peers.OPTIMIZERS)}")  # fmt: skip
    add("--device", choices=DEVICES, default="cpu")
    add("--threads", type=whole(1), default=torch.get_num_threads(),
        help="number of threads (default: torch's)")  # fmt: skip
    _add_run_flags(command, ITERS_HELP)


def size(text: str) -> int:
    """Parses a number with nccl-tests' suffixes: ``8``, ``64K``, ``1M``, ``2G``."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a number such as 8, 64K or 1M, got {text!r}")
    return int(match[1]) * UNITS[match[2]]


def sizes(text: str) -> tuple[int, ...]:
    """Parses comma-separated numbers; see :func:`size`."""
    return tuple(map(size, text.split(",")))


def counts(text: str) -> tuple[int, ...]:
    """Parses a comma-separated list of numbers that grow, such as ``1,2,4,8``."""
    words = text.split(",")
    numbers = [int(word) if word.isdecimal() else 0 for word in words]
    if numbers != sorted(set(numbers)) or numbers[0] < 1:
        raise argparse.ArgumentTypeError(f"expected numbers from 1 on that grow, got {text!r}")
    return tuple(numbers)


def some_of(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Makes a parser of a comma-separated list of choices, or ``all``."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(choices) if text == "all" else tuple(text.split(","))
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(
                    f"expected some of {', '.join(choices)}, got {name!r}"
                )
        return names

    return parse


def compressions(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of names for pycomm.parse_compression, or ``all``."""
    names = COMPRESSIONS if text == "all" else tuple(text.split(","))
    for name in names:
        try:
            parse_compression(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names
