"""The command line. Flags that also exist in nccl-tests have the same names."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch

from pycomm import _C
from pycomm._inputs import ALGORITHMS, COMPRESSIBLE, DTYPES, OPS
from pycomm.bench import (
    c10d,
    codec_session,
    extras,
    launch,
    optim_session,
    overlap,
    session,
    shard,
    step,
)
from pycomm.bench.cases import MIB, Settings
from pycomm.bench.codec_tasks import UNIT, CodecSettings
from pycomm.bench.optim_tasks import OPTIMIZERS, PEERS, SCHEMES, OptimizerSettings
from pycomm.bench.parsers import compressions, picture, seconds, size, sizes, some_of, whole
from pycomm.bench.peers import FINDERS
from pycomm.bench.shard import ShardSettings
from pycomm.bench.shard_peers import PEERS as SHARD_PEERS
from pycomm.bench.training import MODES, TrainingSettings

AnySettings = Settings | CodecSettings | OptimizerSettings | TrainingSettings | c10d.C10dSettings
COLLECTIVES = {
    "all_reduce": "time all-reduces",
    "reduce_scatter": "time reduce-scatters; size is that of the whole input",
    "all_gather": "time all-gathers; size is that of the whole output",
    "broadcast": "time broadcasts from rank 0",
}
TRAINING = {"overlap": overlap.run, "step": step.run, "shard": shard.run}
OPTIMIZER = "time fused optimizer steps beside torch's, without ranks"
C10D = "time torch.distributed's operations on the backend pycomm, beside Gloo"
CODEC = "time encoding, decoding and selecting, without ranks"
OVERLAP = "time training steps, and say how much of the exchange backward does not hide"
SHARD = "exchange and optimizer step together, with and without shard='optimizer'"
STEP = "time training steps, pycomm's exchange beside that of DDP on Gloo"
DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)
CODEC_DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in COMPRESSIBLE)
COMPRESSION_HELP = "none, bf16, fp16, int8, int8:BLOCK, topk:DENSITY"


def make_parser() -> argparse.ArgumentParser:
    """Makes a sub-command for each collective, one for codecs, and two for training."""
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench",
        description="Times pycomm and other installed libraries in interleaved rounds.",
        epilog="The command starts the ranks itself, unless torchrun or mpirun has started it.",
    )
    commands = parser.add_subparsers(dest="collective", required=True, metavar="WHAT")
    for name, text in COLLECTIVES.items():
        command = commands.add_parser(name, help=text, description=text)
        _add_size_flags(command)
        _add_what_flags(command, name)
        _add_how_flags(command, name)
    _add_codec_flags(commands.add_parser("codec", help=CODEC, description=CODEC))
    _add_optimizer_flags(commands.add_parser("optimizer", help=OPTIMIZER, description=OPTIMIZER))
    _add_c10d_flags(commands.add_parser("c10d", help=C10D, description=C10D))
    command = commands.add_parser("overlap", help=OVERLAP, description=OVERLAP)
    _add_training_flags(command, parameters=64 * MIB, batch=128)
    command = commands.add_parser("step", help=STEP, description=STEP)
    _add_training_flags(command, parameters=25 * MIB, batch=8)
    _add_shard_flags(command)
    return parser


def _add_size_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("sizes").add_argument
    add("-b", "--minbytes", type=size, default=8, metavar="SIZE", help="smallest size (default 8)")
    add(
        "-e",
        "--maxbytes",
        type=size,
        default=64 * MIB,
        metavar="SIZE",
        help="largest size (default 64M)",
    )
    add(
        "-f",
        "--stepfactor",
        type=whole(1),
        default=2,
        metavar="N",
        help="factor between sizes (default 2)",
    )
    add("-i", "--stepbytes", type=size, metavar="SIZE", help="difference of sizes, instead of -f")


def _add_what_flags(command: argparse.ArgumentParser, collective: str) -> None:
    add = command.add_argument_group("what to time; comma-separated, or `all`").add_argument
    add("-d", "--datatype", type=some_of(DTYPE_NAMES), default=("float32",), metavar="TYPE",
        help=f"{', '.join(DTYPE_NAMES)} (default float32)")  # fmt: skip
    if collective in ("all_reduce", "reduce_scatter"):
        add("-o", "--op", type=some_of(tuple(OPS)), default=("sum",), metavar="OP",
            help=f"{', '.join(OPS)} (default sum)")  # fmt: skip
    if collective == "all_reduce":
        add("-a", "--algorithm", type=some_of(tuple(ALGORITHMS)), default=("auto",),
            metavar="ALGORITHM", help=f"{', '.join(ALGORITHMS)} (default auto)")  # fmt: skip
        add("--compression", type=compressions, default=("none",),
            metavar="COMPRESSION", help=f"{COMPRESSION_HELP} (default none)")  # fmt: skip
    add("--buffer", choices=("tensor", "window", "both"), default="tensor",
        help="ordinary tensors (default), tensors made by group.empty, or both")  # fmt: skip
    add("--peer", type=some_of(tuple(FINDERS)), default=(), metavar="PEER",
        help=f"other libraries to time: {', '.join(FINDERS)}")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu")


def _add_how_flags(command: argparse.ArgumentParser, collective: str) -> None:
    add = command.add_argument_group("how").add_argument
    add("--ranks", type=whole(1), default=2, help="processes to start (default 2)")
    add("-n", "--iters", type=whole(1), help="timed calls (default: as many as fit into 0.25 s)")
    add("-w", "--warmup_iters", type=whole(0), help="untimed calls before each round")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="verify results (default 1)")
    if collective == "all_reduce":
        add("--feedback", action="store_true", help="compress with a residual")
    add("--timeout", type=seconds, default=60.0, help="seconds to wait for a rank (default 60)")
    add("--brief", action="store_true", help="print only medians, as they come")
    add("-J", "--json", metavar="FILE", help="write results")
    add("--plot", type=picture, metavar="FILE", help="draw results as a PNG")


def _add_codec_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--compression", type=compressions, action="extend", metavar="COMPRESSION",
        help=f"{COMPRESSION_HELP}, comma-separated, or `all` (default int8)")  # fmt: skip
    add("-n", "--elements", type=size, default=64 * MIB, metavar="N",
        help=f"elements, rounded down to a multiple of {UNIT} (default 64M)")  # fmt: skip
    add("-d", "--datatype", type=some_of(CODEC_DTYPE_NAMES), default=("float32",), metavar="TYPE",
        help=f"{', '.join(CODEC_DTYPE_NAMES)}, or `all` (default float32)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cpu (one thread) or cuda")
    add("--iters", type=whole(1), help="timed calls (default: as many as fit into 0.25 s)")
    add("-J", "--json", metavar="FILE", help="write results")


def _add_training_flags(command: argparse.ArgumentParser, parameters: int, batch: int) -> None:
    add = command.add_argument
    add("-p", "--parameters", type=sizes, default=(parameters,), metavar="N",
        help=f"approximate parameters of the model (default {parameters // MIB}M)")  # fmt: skip
    add("--batch", type=whole(1), default=batch, metavar="N",
        help=f"rows per rank (default {batch})")  # fmt: skip
    add("--mode", type=some_of(MODES), default=MODES, metavar="MODE",
        help=f"{' or '.join(MODES)} (default both)")  # fmt: skip
    add("--ranks", type=whole(2), default=2, help="processes to start (default 2)")
    add("-n", "--iters", type=whole(1), metavar="N",
        help="timed steps (default: 21, or as many as fit into 0.25 s)")  # fmt: skip
    add("--timeout", type=seconds, default=60.0, help="seconds to wait for a rank (default 60)")
    add("-J", "--json", metavar="FILE", help="write results")


def _add_shard_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group(SHARD).add_argument
    add("--shard", action="store_true", help="time these instead; --parameters may be a list")
    add("--scheme", type=some_of(tuple(SCHEMES)), default=("fp32",), metavar="SCHEME",
        help=f"storage: {', '.join(SCHEMES)}, or `all` (default fp32)")  # fmt: skip
    add("--peer", type=some_of(SHARD_PEERS), default=SHARD_PEERS, metavar="PEER",
        help=f"others to time: {', '.join(SHARD_PEERS)} (default all)")  # fmt: skip


def _add_c10d_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    operations = tuple(c10d.SIZES)
    add("--operation", type=some_of(operations), default=operations, metavar="OPERATION",
        help=f"{', '.join(operations)} (default all)")  # fmt: skip
    add("--ranks", type=whole(2), default=2, help="processes to start (default 2)")
    add("-n", "--iters", type=whole(1), metavar="N",
        help="timed calls (default: as many as fit into 0.25 s)")  # fmt: skip
    add("--timeout", type=seconds, default=60.0, help="seconds to wait for a rank (default 60)")
    add("-J", "--json", metavar="FILE", help="write results")


def _add_optimizer_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--name", choices=tuple(OPTIMIZERS), default="adamw", help="rule (default adamw)")
    add("--scheme", type=some_of(tuple(SCHEMES)), default=("fp32",), metavar="SCHEME",
        help=f"{', '.join(SCHEMES)}, or `all` (default fp32)")  # fmt: skip
    add(
        "-n",
        "--elements",
        type=size,
        default=64 * MIB,
        metavar="N",
        help="elements of all parameters (default 64M)",
    )
    add("--small", action="store_true", help="500 tensors of 1K to 100K elements instead")
    add("--full", action="store_true", help="also time steps with unscaling, check and clipping")
    add(
        "--peer",
        type=some_of(PEERS),
        default=(),
        metavar="PEER",
        help=f"others to time: {', '.join(PEERS)}",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add(
        "--threads",
        type=whole(1),
        default=torch.get_num_threads(),
        help="number of threads (default: torch's)",
    )
    add("--iters", type=whole(1), help="timed calls (default: as many as fit into 0.25 s)")
    add("-J", "--json", metavar="FILE", help="write results")


def _sizes(arguments: argparse.Namespace) -> tuple[int, ...]:
    """The sizes from the smallest to the largest, by factor or step."""
    sizes = []
    current = arguments.minbytes
    while current <= arguments.maxbytes:
        sizes.append(current)
        current = (
            current + arguments.stepbytes if arguments.stepbytes else current * arguments.stepfactor
        )
    return tuple(sizes)


def parse(argv: Sequence[str] | None = None) -> AnySettings:
    """Settings from a command line; exits with a message if they are not possible here."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    words = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "pycomm.bench", *words])
    if arguments.collective in TRAINING:
        return _training_settings(parser, arguments, command)
    if arguments.collective == "c10d":
        return _c10d_settings(arguments, command)
    if arguments.device == "cuda" and not _C.has_cuda:
        parser.error("--device cuda: this build of pycomm has no CUDA")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU on this machine")
    if arguments.collective == "optimizer":
        return _optimizer_settings(arguments, command)
    if arguments.collective == "codec":
        return _codec_settings(arguments, command)
    return _settings(parser, arguments, command)


def _codec_settings(arguments: argparse.Namespace, command: str) -> CodecSettings:
    return CodecSettings(
        codecs=tuple(arguments.compression or ("int8",)),
        count=max(arguments.elements // UNIT, 1) * UNIT,
        dtypes=arguments.datatype,
        device=arguments.device,
        iters=arguments.iters,
        json=arguments.json,
        command=command,
    )


def _training_settings(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, command: str
) -> TrainingSettings:
    shards = getattr(arguments, "shard", False)
    if len(arguments.parameters) > 1 and not shards:
        parser.error("--parameters must be one number without --shard")
    common: dict[str, Any] = {
        "benchmark": "shard" if shards else arguments.collective,
        "ranks": arguments.ranks,
        "parameters": arguments.parameters[0],
        "batch": arguments.batch,
        "modes": arguments.mode,
        "iters": arguments.iters,
        "timeout": arguments.timeout,
        "json": arguments.json,
        "command": command,
    }
    if not shards:
        return TrainingSettings(**common)
    own = {"sizes": arguments.parameters, "schemes": arguments.scheme, "peers": arguments.peer}
    return ShardSettings(**common, **own)


def _c10d_settings(arguments: argparse.Namespace, command: str) -> c10d.C10dSettings:
    return c10d.C10dSettings(
        ranks=arguments.ranks,
        operations=arguments.operation,
        iters=arguments.iters,
        timeout=arguments.timeout,
        json=arguments.json,
        command=command,
    )


def _optimizer_settings(arguments: argparse.Namespace, command: str) -> OptimizerSettings:
    return OptimizerSettings(
        name=arguments.name,
        schemes=arguments.scheme,
        count=arguments.elements,
        small=arguments.small,
        full=arguments.full,
        peers=arguments.peer,
        device=arguments.device,
        threads=arguments.threads,
        iters=arguments.iters,
        json=arguments.json,
        command=command,
    )


def _settings(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, command: str
) -> Settings:
    if arguments.minbytes > arguments.maxbytes:
        parser.error("--minbytes must not exceed --maxbytes")
    if arguments.stepfactor < 2 and not arguments.stepbytes:
        parser.error("--stepfactor must be at least 2")
    for name in arguments.datatype:
        element = getattr(torch, name).itemsize
        if arguments.minbytes % element or (arguments.stepbytes or 0) % element:
            parser.error(
                f"--minbytes and --stepbytes must be multiples of an element's size, {element} for "
                f"{name}, got {arguments.minbytes} and {arguments.stepbytes}"
            )
    extras.require("numpy", *(["matplotlib"] if arguments.plot else []))
    return Settings(
        collective=arguments.collective,
        ranks=arguments.ranks,
        sizes=_sizes(arguments),
        dtypes=arguments.datatype,
        ops=getattr(arguments, "op", ("sum",)),
        algorithms=getattr(arguments, "algorithm", ("auto",)),
        buffers=("tensor", "window") if arguments.buffer == "both" else (arguments.buffer,),
        compressions=getattr(arguments, "compression", ("none",)),
        feedback=getattr(arguments, "feedback", False),
        peers=arguments.peer,
        iters=arguments.iters,
        warmup_iters=arguments.warmup_iters,
        check=bool(arguments.check),
        brief=arguments.brief,
        device=arguments.device,
        timeout=arguments.timeout,
        json=arguments.json,
        plot=arguments.plot,
        command=command,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Parses, starts the ranks if necessary, and runs."""
    settings = parse(argv)
    if isinstance(settings, CodecSettings):
        codec_session.run(settings)
    elif isinstance(settings, TrainingSettings):
        run = TRAINING[settings.benchmark]
        launch.run(run, settings, ranks=settings.ranks, timeout=settings.timeout)
    elif isinstance(settings, OptimizerSettings):
        optim_session.run(settings)
    elif isinstance(settings, c10d.C10dSettings):
        launch.run(
            c10d.run, settings, ranks=settings.ranks, timeout=settings.timeout, backend="pycomm"
        )
    else:
        launch.run(session.run, settings, ranks=settings.ranks, timeout=settings.timeout)
