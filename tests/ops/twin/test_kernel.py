"""What a kernel cannot be run with is refused in a line, before anything runs."""

import re

import pytest
import torch

from kimi_graph.errors import KernelError
from kimi_graph.ops.twin import Kernel

ROWS = torch.ones(9, 64, dtype=torch.bfloat16)
VALUES = {"x": ROWS, "gate": ROWS, "weight": torch.ones(64)}


def test_the_cache_may_be_a_string(twin_cache):
    assert Kernel("gated_rms_norm", str(twin_cache)).run(VALUES, {"eps": 1e-6}, cores=1).cores == 1


@pytest.mark.parametrize(
    "values, asked, words",
    [
        ({}, {"arch": 950}, "no arch 950; there are 2201 (A2, A3) and 3510 (950)"),
        ({}, {"cores": 0}, "0 vector cores; 2201 has 1 to 48"),
        ({}, {"cores": 49}, "49 vector cores; 2201 has 1 to 48"),
        ({"x": [[1.0]]}, {}, "x is list; expected a CPU tensor"),
        ({"x": ROWS.to("meta")}, {}, "x is on meta; expected a CPU tensor"),
        ({"x": ROWS.double()}, {}, "x is float64; expected one of bfloat16, float16, float32"),
        ({"x": ROWS.view(*[1] * 7, 9, 64)}, {}, "x is [1, 1, 1, 1, 1, 1, 1, 9, 64]; expected at most 8 dimensions"),
        ({"x": ROWS.T}, {}, "x is strided [1, 64]; expected contiguous elements: call contiguous()"),
        ({"gate": None}, {}, "input 'gate' is missing"),
    ],
)
def test_what_no_run_takes_is_refused(values, asked, words, twin_cache):
    with pytest.raises(KernelError, match=re.escape(words)):
        Kernel("gated_rms_norm", twin_cache).run({**VALUES, **values}, {"eps": 1e-6}, **asked)


def test_dtypes_that_no_combination_has_are_refused(twin_cache):
    """Each may be declared by itself: the kernel is built for columns, and would read one as the other."""
    words = "no combination has x float16, gate bfloat16, weight float32; there are bfloat16, bfloat16, float32;"
    with pytest.raises(KernelError, match=re.escape(words)):
        Kernel("gated_rms_norm", twin_cache).run({**VALUES, "x": ROWS.half()}, {"eps": 1e-6})
