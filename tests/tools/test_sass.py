"""``make sass``: the reader of machine code, on listings written by hand."""

import json
from pathlib import Path

import pytest
from sass import disassembler, limits, model, rules
from sass.cubin import Resources
from sass.disassembler import Kernel
from sass.flow import Flow
from sass.hot import HOT_LOOPS, HotLoop
from sass.listing import parse
from sass.measure import Figures, in_flight, measure, resident_blocks
from sass.paths import Paths, Wanted

ROOT = Path(__file__).resolve().parents[2]


def listing(*lines, name="kernel"):
    """As nvdisasm prints it. A line that ends with a colon is a label; others are instructions."""
    text = f'\t.section\t.text.{name},"ax",@progbits\n.text.{name}:\n{name}:\n'
    for number, line in enumerate(lines):
        is_label = line.endswith(":")
        text += (
            f"{line}\n" if is_label else f"        /*{number:04x}*/                   {line} ;\n"
        )
    return text


def kernel_of(*lines, registers=32, threads=256, shared=0, stack=0):
    flows = {function.name: Flow(function) for function in parse(listing(*lines))}
    return Kernel("kernel", Resources(1, registers, threads, shared, stack), flows)


# Copies: `depth` loads of 16 bytes, then as many stores.
def copy_loop(depth):
    registers = [f"R{8 + 4 * i}" for i in range(depth)]
    return (
        "MOV R1, c[0x0][0x28]",
        ".L_x_0:",
        *(f"LDG.E.128 {r}, desc[UR4][R2.64+{i}]" for i, r in enumerate(registers)),
        *(f"STG.E.128 desc[UR4][R4.64+{i}], {r}" for i, r in enumerate(registers)),
        "@P0 BRA `(.L_x_0)",
        "EXIT",
    )


# The same without loads first.
ALTERNATING = (
    ".L_x_0:",
    "LDG.E.128 R8, desc[UR4][R2.64]",
    "STG.E.128 desc[UR4][R4.64], R8",
    "LDG.E.128 R8, desc[UR4][R2.64+0x10]",
    "STG.E.128 desc[UR4][R4.64+0x10], R8",
    "@P0 BRA `(.L_x_0)",
    "EXIT",
)


def test_instructions():
    (function,) = parse(
        listing(
            "@!P1 LD.E.U16 R7, desc[UR8][R10.64+0x3c]",
            "ST.E.128 desc[UR8][R10.64], R4",
            "CALL.REL.NOINC `($kernel$called)",
            "ERRBAR",
        )
    )
    load, store, call, last = function.code
    assert (load.guard, load.name, load.width, load.loaded) == ("!P1", "LD", 2, {"R7"})
    assert load.used == {"R10", "R11"}
    assert (store.is_store, store.is_load, store.width) == (True, False, 16)
    assert store.used == {"R10", "R11", "R4"}
    assert call.target == "$kernel$called"
    assert last.operands == ""


def test_a_wide_load_fills_neighbouring_registers():
    (function,) = parse(listing("LDG.E.128 R8, desc[UR4][R2.64]"))
    assert function.code[0].loaded == {"R8", "R9", "R10", "R11"}


def test_functions_of_a_kernel():
    text = listing("EXIT").replace(
        ";\n", ";\n$kernel$called:\n        /*0010*/  RET.REL.NODEC R20 ;\n"
    )
    first, second = parse(text)
    assert (first.name, second.name) == ("kernel", "$kernel$called")
    assert {first.kernel, second.kernel} == {"kernel"}


def test_blocks_follow_branches_and_barriers():
    (function,) = parse(
        listing(
            "BSSY B0, `(.L_x_2)",  # 0
            "@P0 BRA `(.L_x_1)",
            "MOV R0, R1",  # 1
            "BSYNC B0",
            ".L_x_1:",
            "MOV R0, R2",  # 2
            "BRA P1, `(.L_x_2)",
            "@P2 EXIT",  # 3
            "BRA `(.L_x_1)",  # 4
            ".L_x_2:",
            "EXIT",  # 5
        )
    )
    flow = Flow(function)
    assert [block.next for block in flow.blocks] == [[1, 2], [5], [3, 5], [4], [2], []]
    (loop,) = flow.loops()
    assert (loop.header, loop.blocks, flow.latches(loop)) == (2, {2, 3, 4}, {4})
    assert flow.exits() == {5}


def test_a_jump_that_is_written_as_a_call():
    (function,) = parse(listing("CALL.REL.NOINC `(.L_x_0)", "MOV R0, R1", ".L_x_0:", "EXIT"))
    assert [block.next for block in Flow(function).blocks] == [[2], [2], []]


def test_inner_loops_run_once():
    (function,) = parse(
        listing(
            ".L_x_0:",
            "MOV R0, R1",
            ".L_x_1:",
            "LDG.E R0, desc[UR4][R2.64]",
            "@P0 BRA `(.L_x_1)",
            "STG.E desc[UR4][R4.64], R0",
            "@P1 BRA `(.L_x_0)",
            "EXIT",
        )
    )
    flow = Flow(function)
    assert [sorted(loop.blocks) for loop in flow.loops()] == [[0, 1, 2], [1]]
    way = Paths({"kernel": flow}, Wanted(4, 4)).best(flow)
    assert [one.name for one in way] == ["MOV", "LDG", "BRA", "STG", "BRA"]


def test_the_way_that_loads_most_at_once():
    """Not the shorter one, which loads as much in two blocks; nor the one that loads too much."""
    flow = kernel_of(
        ".L_x_0:",
        "@P0 BRA `(.L_x_1)",
        "LDG.E.64 R8, desc[UR4][R2.64]",
        "@P1 BRA `(.L_x_2)",
        "LDG.E.64 R10, desc[UR4][R2.64]",
        "BRA `(.L_x_2)",
        ".L_x_1:",
        "@P3 BRA `(.L_x_3)",
        "MOV R20, R21",
        "MOV R20, R21",
        "LDG.E.128 R8, desc[UR4][R2.64]",
        "BRA `(.L_x_2)",
        ".L_x_3:",
        "LDG.E.128 R8, desc[UR4][R2.64]",
        "LDG.E.128 R12, desc[UR4][R2.64]",
        ".L_x_2:",
        "STG.E.128 desc[UR4][R4.64], R8",
        "@P2 BRA `(.L_x_0)",
        "EXIT",
    ).flows["kernel"]
    way = Paths({"kernel": flow}, Wanted(16, 16)).best(flow)
    assert sum(one.name == "MOV" for one in way) == 2
    assert Paths({"kernel": flow}, Wanted(12, 16)).best(flow) is None
    assert Paths({"kernel": flow}, Wanted(12, 16, slack=4)).best(flow) is not None


def test_work_that_no_shortcut_leaves_out():
    flow = kernel_of(
        ".L_x_0:",
        "LDG.E R8, desc[UR4][R2.64]",
        "@P0 BRA `(.L_x_1)",
        "MUFU.RSQ R9, R8",
        "F2I R9, R9",
        ".L_x_1:",
        "@P1 BRA `(.L_x_0)",
        "EXIT",
    ).flows["kernel"]
    assert len(Paths({"kernel": flow}, Wanted(4, 0)).best(flow)) == 3
    worked = Paths({"kernel": flow}, Wanted(4, 0, work="MUFU.RSQ", times=1)).best(flow)
    assert len(worked) == 5
    assert Paths({"kernel": flow}, Wanted(4, 0, work="MUFU.RSQ", times=2)).best(flow) is None


def test_a_called_function_is_part_of_the_way():
    text = listing(
        ".L_x_0:", "CALL.REL.NOINC `($kernel$called)", "@P0 BRA `(.L_x_0)", "EXIT"
    ) + "$kernel$called:\n" + listing(
        "LDG.E.128 R8, desc[UR4][R2.64]", "STG.E.128 desc[UR4][R4.64], R8", "RET.REL.NODEC R20"
    ).partition("kernel:\n")[2].partition("kernel:\n")[2]  # fmt: skip
    flows = {function.name: Flow(function) for function in parse(text)}
    way = Paths(flows, Wanted(16, 16)).best(flows["kernel"])
    assert [one.name for one in way] == ["CALL", "LDG", "STG", "RET", "BRA"]


def hot(elements, **options):
    return HotLoop("copy", "copy.cu", "kernel", elements, 4, 4, **options)


def test_measures_of_a_copy():
    figures = measure(kernel_of(*copy_loop(4), stack=24), hot(16), "90")
    assert figures == Figures(
        instructions=0.56, loads=4, rounds=1, registers=32, stack=24, threads=256, blocks=8,
        bytes_in_flight=64 * 256 * 8,
    )  # fmt: skip
    launched = measure(kernel_of(*copy_loop(4)), hot(16, launched=2), "90")
    assert launched.bytes_in_flight == 64 * 256 * 2


def test_a_copy_that_does_not_load_first():
    """It has as many bytes and instructions, but one load in flight: the limits notice that."""
    good = measure(kernel_of(*copy_loop(2)), hot(8), "90")
    bad = measure(kernel_of(*ALTERNATING), hot(8), "90")
    assert (bad.instructions, bad.loads, bad.rounds) == (good.instructions, 1, 2)
    written = {"copy": vars(good)}
    assert list(limits.worse(written, {"copy": good})) == []
    assert list(limits.worse(written, {"copy": bad})) == [
        "copy: loads 2 -> 1",
        "copy: rounds 1 -> 2",
        "copy: bytes_in_flight 65536 -> 32768",
    ]


def test_a_kernel_that_moves_other_bytes():
    with pytest.raises(ValueError, match="no loop takes 16 elements, loads 4 and stores 4 bytes"):
        measure(kernel_of(*copy_loop(2)), hot(16), "90")


def test_loads_return_in_order_and_together():
    def rounds(*lines):
        (function,) = parse(listing(*lines))
        return in_flight(function.code, Wanted(0, 0))

    a, b = "LDG.E.64 R8, desc[UR4][R2.64]", "LDG.E.64 R10, desc[UR4][R2.64]"
    use_a, use_b = "FADD R0, R0, R9", "FADD R0, R0, R10"
    assert rounds(a, b, use_a, use_b) == (2, 16, 1)
    assert rounds(a, b, use_b, use_a) == (2, 16, 1)
    assert rounds(a, use_a, b, use_b) == (1, 8, 2)
    assert rounds(a, b, use_a, a, use_b, use_a) == (2, 16, 2)


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks"),
    [(32, 256, 0, 8), (128, 512, 0, 1), (79, 256, 0, 3), (40, 512, 0, 3), (32, 256, 60000, 3)],
)
def test_resident_blocks(registers, threads, shared, blocks):
    assert resident_blocks(Resources(1, registers, threads, shared, 0), "90") == blocks


# Publishes data by a flag, and waits for one.
PUBLISH = (
    "ST.E.128 desc[UR8][R10.64], R4",
    "MEMBAR.ALL.SYS",
    "ERRBAR",
    "ST.E.STRONG.SYS desc[UR8][R12.64], R7",
)
POLL = (
    ".L_x_0:",
    "LD.E.STRONG.SYS R20, desc[UR8][R14.64]",
    "ISETP.GE.AND P0, PT, R20, R21, PT",
    "@!P0 BRA `(.L_x_0)",
    "LD.E.STRONG.SYS R20, desc[UR8][R14.64]",
    "CCTL.IVALL",
    "EXIT",
)


def found(*lines):
    return list(rules.problems(kernel_of(*lines)))


def test_a_kernel_that_keeps_the_rules():
    assert found(*PUBLISH, *POLL) == []


def test_flags_without_fences():
    unfenced = ["stores 1 flags without a fence of system scope"]
    assert found(*(line for line in PUBLISH if "MEMBAR" not in line), *POLL) == unfenced
    data_after_the_fence = (PUBLISH[1], PUBLISH[0], PUBLISH[3])
    assert found(*data_after_the_fence, *POLL) == unfenced
    only_sometimes = ("@P0 BRA `(.L_x_9)", PUBLISH[1], ".L_x_9:", PUBLISH[3])
    assert found(*only_sometimes, *POLL) == unfenced
    assert found("ST.E.STRONG.SYS desc[UR8][R12.64], R7", "MEMBAR.SC.SYS", *POLL) == []
    inside = "ST.E.STRONG.SYS desc[UR8][R12.64], R7"
    assert found(inside, "MOV R3, 0x1", "MEMBAR.SC.SYS", *POLL) == []
    assert found(inside, "RED.E.ADD [R2.64], R3", "MEMBAR.SC.SYS", *POLL) != []


def test_fences_of_device_scope():
    assert found(PUBLISH[0], "MEMBAR.SC.GPU", *PUBLISH[1:], *POLL) == [
        "MEMBAR.SC.GPU orders nothing for peers on other devices"
    ]


def test_polls_that_acquire():
    acquiring = [*POLL[:2], "CCTL.IVALL", *POLL[2:]]
    assert found(*PUBLISH, *acquiring) == [
        "empties the L1 cache at every spin (CCTL.IVALL): it polls with acquire"
    ]
    one_flag_per_rank = [POLL[0], "IADD3 R14, R14, R15, RZ", *acquiring[1:]]
    assert found(*PUBLISH, *one_flag_per_rank) == []
    now_and_then = [*POLL[:2], "@P1 BRA `(.L_x_8)", "CCTL.IVALL", ".L_x_8:", *POLL[2:]]
    assert found(*PUBLISH, *now_and_then) == []


def test_an_announcement_that_is_withdrawn():
    text = listing(*POLL) + "$kernel$withdraw:\n        /*0100*/   ST.E.STRONG.SYS [R12], R7 ;\n"
    flows = {function.name: Flow(function) for function in parse(text)}
    assert list(rules.problems(Kernel("kernel", Resources(1, 32, 256, 0, 0), flows))) == []


def test_a_kernel_without_flags_is_no_kernel_that_meets():
    assert found("EXIT") == ["stores no flag: is it a kernel that meets other ranks?"]


def test_limits_are_kept_per_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "FOLDER", tmp_path)
    figures = {"copy": measure(kernel_of(*copy_loop(4)), hot(16), "90")}
    assert limits.read("90") == ("", {})
    assert list(limits.worse({}, figures)) == ["copy has no limits yet"]
    limits.write("90", "13.0.88", figures)
    nvcc, written = limits.read("90")
    assert nvcc == "13.0.88"
    assert list(limits.worse(written, figures)) == []
    assert list(limits.worse(written, {})) == ["copy has limits, but is no hot loop any more"]
    assert limits.read("80") == ("", {})


FIGURES = {
    "instructions": 1.0, "loads": 2, "rounds": 1, "registers": 32, "stack": 0, "threads": 512,
    "blocks": 4, "bytes_in_flight": 0,
}  # fmt: skip


def predicted(blocks=0, **figures):
    """A row of int8_encode: 8 elements per thread and pass, 5 bytes of each."""
    gpu = model.Gpu("90", 4.8, 100, 2.0, "imagined")
    row = model.Row({"int8_encode": 1}, 5, blocks=blocks)
    return model.predict(row, gpu, {"int8_encode": {**FIGURES, **figures}})


def test_predictions_take_the_longest():
    assert predicted().limited_by == "memory"
    assert predicted().time == pytest.approx(5 / 4.3)
    slow = predicted(instructions=51.2)  # per element, of 100 multiprocessors
    assert (slow.limited_by, slow.time) == ("instructions", pytest.approx(2.0))
    waiting = predicted(rounds=20)
    assert waiting.limited_by == "waits"
    assert waiting.time == pytest.approx(20 * 0.7e6 / (8 * 512 * 4 * 100))
    assert predicted(rounds=20, blocks=200).time == pytest.approx(2 * waiting.time)


def test_predictions_are_those_of_the_limits():
    """`make sass-limits` has written the file and the tables."""
    made = model.predictions()
    assert json.loads(model.RESULTS.read_text())["predicted"] == made
    page = model.PAGE.read_text()
    assert model.with_predictions(page, made) == page


def test_every_hot_loop_has_limits_on_every_architecture():
    names = {one.name for one in HOT_LOOPS}
    for architecture in ("80", "90", "100"):
        assert limits.read(architecture)[1].keys() == names
    for one in HOT_LOOPS:
        assert (ROOT / "csrc/cuda" / one.source).exists()


def test_an_unreachable_index_is_no_success(tmp_path, monkeypatch):
    monkeypatch.setattr(disassembler.shutil, "which", lambda _: None)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(OSError, match="pip finds no nvidia-cuda-cuobjdump"):
        disassembler.get(tmp_path / "programs")
    assert not (tmp_path / "programs").exists()
