"""The check finds code that ptxas compiles wrongly, and no other code."""

from __future__ import annotations

import pytest
from ptx_flags import functions_testing_words

# As nvcc 13.0 writes them, for `all = (p ? 1 : 0) | (q ? 2 : 0)`.
WORD = """
	selp.u32 	%r24, 1, 0, %p8;
	selp.b32 	%r25, 2, 0, %p9;
	or.b32  	%r11, %r25, %r24;
"""
TEST = "\tsetp.eq.s32 \t%p11, %r11, 0;\n"
ENTRY = ".visible .entry first(\n\t.param .u64 first_param_0\n)\n{{{}}}\n"
FUNCTION = ".func  (.param .b32 func_retval0) second(\n\t.param .b32 second_param_0\n)\n{{{}}}\n"


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (WORD + TEST, "", ["first"]),
        (WORD, WORD + TEST.replace("eq", "ne"), ["second"]),
        (WORD + TEST, WORD + TEST, ["first", "second"]),
        (WORD, TEST, []),  # the register of another function
        (WORD.replace("2, 0", "2, %r3") + TEST, "", []),
        (WORD.replace("2, 0", "0, 2") + TEST, "", ["first"]),
        (WORD.replace("2, 0", "1, 0") + TEST, "", []),  # the same flag: compiled right
        (WORD + TEST.replace(", 0;", ", 3;"), "", []),
    ],
)
def test_words_of_flags(first: str, second: str, names: list[str]) -> None:
    ptx = ENTRY.format(first) + FUNCTION.format(second)
    assert functions_testing_words(ptx) == names


def test_a_file_may_have_no_kernel() -> None:
    assert functions_testing_words(".version 9.0\n.target sm_90\n") == []
