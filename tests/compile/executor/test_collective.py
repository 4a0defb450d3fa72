"""Collectives of a GE graph: what each rank of a group gets."""

from typing import Any

import pytest
import torch

from kimi_graph.compile.executor import Executor, run_together
from kimi_graph.errors import BundleError

X = [torch.arange(12.0).view(6, 2) + 100 * rank for rank in range(3)]

# type: attributes, what the three ranks get
CASES: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {
    "HcomAllReduce": ({"reduction": "sum", "fusion": 0}, [X[0] + X[1] + X[2]] * 3),
    "HcomAllGather": ({"rank_size": 3, "fusion": 0}, [torch.cat(X)] * 3),
    "HcomReduceScatter": (
        {"reduction": "max", "rank_size": 3, "fusion": 0},
        [X[2][:2], X[2][2:4], X[2][4:]],
    ),
    "HcomAllToAll": ({}, [torch.cat([x[2 * r : 2 * r + 2] for x in X]) for r in range(3)]),
}


def ranks(new_builder, type_: str, x: list[torch.Tensor], mode: str = "exact", **attrs: Any) -> list[Any]:
    b = new_builder()
    b.result(*b.node(type_, {"x": b.source("x", x[0])}, attrs={"group": "tensor"} | attrs, name="it"))
    executor = Executor(b.model)
    return run_together([executor.steps({"x": part}, {}, mode) for part in x], lambda _: [list(range(len(x)))])


@pytest.mark.parametrize("type_", CASES)
def test_each_rank_gets_what_the_collective_says(new_builder, type_):
    attrs, want = CASES[type_]
    for ran, expected in zip(ranks(new_builder, type_, X, **attrs), want, strict=True):
        assert torch.equal(ran.outputs[0], expected.double())


def test_half_floats_are_summed_in_float32_and_rounded_once(new_builder):
    x = [torch.tensor([256.0]).bfloat16(), *[torch.tensor([1.0]).bfloat16()] * 4]  # 256 + 1 is 256 in bfloat16
    for ran in ranks(new_builder, "HcomAllReduce", x, "native", reduction="sum", fusion=0):
        assert ran.outputs[0].item() == 260


@pytest.mark.parametrize(
    "type_, attrs, message",
    [
        ("HcomAllReduce", {"reduction": "prod"}, "reduction 'prod', supported is sum or max"),
        ("HcomAllReduce", {"group": 1}, "attribute 'group' is 1, the prototype requires a str"),
        ("HcomAllReduce", {"fusion": 2}, "attribute 'fusion' is 2"),
        ("HcomAllReduce", {"fusion_id": 1}, "attribute 'fusion_id' is 1"),
        ("HcomAllReduce", {"more": 1}, "does not interpret: more=1"),
        ("HcomAllGather", {"rank_size": 2}, "rank_size 2 in a group of 3"),
        ("HcomReduceScatter", {"rank_size": 4}, "6 rows for 4 ranks"),
        ("HcomReduceScatter", {"rank_size": 2}, "rank_size 2 in a group of 3"),
        ("HcomAllToAll", {"fusion": 1}, "does not interpret: fusion=1"),
    ],
)
def test_other_attributes_are_refused(new_builder, type_, attrs, message):
    with pytest.raises(BundleError, match=rf"it \({type_}\): .*{message}"):
        ranks(new_builder, type_, X, **(CASES[type_][0] | attrs))
