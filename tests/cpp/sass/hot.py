"""The hot loops: in which kernels they are, and what they must read and write per element."""

from __future__ import annotations

from dataclasses import dataclass

from sass.paths import Wanted


@dataclass(frozen=True)
class HotLoop:
    """A loop that decides how fast a kernel is.

    Attributes:
        name: of its limits.
        source: the file that the kernel is compiled from, in csrc/cuda.
        kernel: a part of the kernel's mangled name that no other kernel has.
        elements: that a thread takes per pass.
        reads: bytes per element that it loads.
        writes: bytes per element that it stores.
        slack: bytes that it may move once per pass beside its elements: scales, pointers.
        launched: blocks per multiprocessor that the host launches; 0 if as many as fit.
        least: accesses of fewer bytes are not data.
        work: an opcode that the loop runs, and how often per pass: no shortcut leaves it out.
        function: a part of the mangled name of the function that has the loop; "" if any may.
    """

    name: str
    source: str
    kernel: str
    elements: int
    reads: float
    writes: float
    slack: int = 0
    launched: int = 0
    least: int = 4
    work: tuple[str, int] = ("", 0)
    function: str = ""

    @property
    def wanted(self) -> Wanted:
        """What a way through the loop does."""
        loads, stores = int(self.reads * self.elements), int(self.writes * self.elements)
        return Wanted(loads, stores, self.slack, self.least, *self.work)


ADAMW = ("optim/adamw.cu", "step_kernelINS_5AdamW")
NORM = ("optim/grad_norm.cu", "grad_norm_kernel")
WIRE = "codecs/wire.cu"

TWO_SHOT = ("algorithms/two_shot.cu", "TwoShotEfNS0_5KnownILNS_8ReduceOpE0EEEE")
CODED = ("algorithms/coded_two_shot.cu", "TwoShotEfNS_10CodecTable")
ENCODE, DECODE = "encode_allIfNS_12Int8", "decode_allIfNS_12Int8"

HOT_LOOPS = (
    HotLoop("adamw_fp32", *ADAMW, 8, 16, 12, launched=2),
    HotLoop("adamw_bf16_remainder", *ADAMW, 8, 14, 12, launched=2),
    HotLoop("adamw_bf16_remainder_bf16_states", *ADAMW, 8, 10, 8, launched=2),
    HotLoop("adamw_8bit_states", *ADAMW, 8, 8, 6, slack=8, launched=2, work=("MUFU.RSQ", 24)),
    HotLoop("grad_norm_fp32", *NORM, 32, 4, 0, launched=3, work=("DFMA", 32)),
    HotLoop("grad_norm_bf16", *NORM, 64, 2, 0, launched=3, work=("DFMA", 64)),
    HotLoop("int8_encode", WIRE, "encode_kernelIfE", 8, 4, 1, slack=8, work=("SHFL", 1)),
    HotLoop("int8_decode", WIRE, "decode_kernelIfLb0E", 32, 1, 4, slack=96, work=("I2F", 32)),
    HotLoop(
        "int8_decode_add",
        WIRE,
        "decode_kernelIfLb1E",
        8,
        5,
        4,
        slack=4,
        work=("I2F", 8),
        function="decode_addIf",
    ),
    HotLoop(
        "topk_collect",
        "codecs/topk_select.cu",
        "collect_kernelIfE",
        32,
        4,
        0,
        launched=2,
        work=("VOTE", 4),
    ),
    HotLoop("int8_stage", *CODED, 16, 4, 1, slack=8, work=("SHFL", 4), function=ENCODE),
    HotLoop("int8_reduce_2_ranks", *CODED, 16, 2, 5, slack=64, work=("I2F", 48), function=ENCODE),
    HotLoop("int8_gather", *CODED, 16, 1, 4, slack=24, work=("I2F", 16), function=DECODE),
    HotLoop("copy", *TWO_SHOT, 16, 4, 4),
    HotLoop("reduce_4_ranks", *TWO_SHOT, 4, 16, 4),
)
