"""Limits of CANN's pair of experts: what its documents list passes, one more of anything is refused or not chosen."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_graph.compile.capture import capture
from kimi_graph.compile.checks import check_graph
from kimi_graph.compile.convert import Converted, convert
from kimi_graph.compile.executor import infer_shapes
from kimi_graph.compile.ge_proto import set_attr
from kimi_graph.compile.places import bind_rank, placed_groups
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.targets import target
from kimi_graph.errors import CompileError
from kimi_graph.parallel.collectives import OPS
from kimi_graph.parallel.experts import buffer_bytes, no_pair

A3, DT, PR, A2 = (target(name) for name in ("a3", "950dt", "950pr", "a2"))
SIZES = {"rows": 8, "width": 3584, "top_k": 16, "ways": 128, "experts": 8}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def converted(host: Any, on: Any, rows: int, width: int, top_k: int, ways: int, experts: int) -> Converted:
    """A graph that sends rows and brings them back."""

    def f(x: Tensor, chosen: Tensor, weights: Tensor) -> dict[str, Any]:
        sent, sizes, *notes = OPS["expert_dispatch"](x, "tensor", chosen, ways, experts)
        return {"y": OPS["expert_combine"](sent + sent, "tensor", chosen, weights, *notes, ways, experts), "n": sizes}

    ids, weights = meta(rows, top_k, dtype=torch.int32), meta(rows, top_k, dtype=torch.float32)
    captured = capture(f, {"x": meta(rows, width), "chosen": ids, "weights": weights})
    made = convert(captured.module, name="pair", host=host, target=on, cann=on.cann)
    infer_shapes(made.model)
    return made


def check(made: Converted, host: Any, on: Any) -> None:
    check_graph(made.model, on, Prototypes(on.soc, host.root), weights=set(), states=set())


@pytest.mark.parametrize("on", [A3, DT], ids=lambda t: t.name)
@pytest.mark.parametrize(
    "change",
    [{}, {"rows": 512, "ways": 4}, {"width": 1024}, {"width": 8192}, {"top_k": 1}, {"ways": 512, "experts": 2}],
)
def test_sizes_that_the_documents_list_are_sent_by_the_pair(host, on, change):
    made = converted(host, on, **SIZES | change)
    check(made, host, on)
    assert placed_groups(made.model) == {"experts:tensor"}


BEYOND = [
    ({"rows": 513}, r"513 rows of a rank, it takes 512; --moe-chunks 2 or more"),
    ({"width": 1023}, "rows of 1,023 channels, it takes 1,024 to 8,192"),
    ({"width": 8193}, "rows of 8,193 channels"),
    ({"top_k": 17}, "17 experts of a row, it takes 16"),
    ({"experts": 9}, "1,152 experts with their copies, it takes 1,024"),
    ({"ways": 1}, "1 ranks, it takes 2 to 768"),
    ({"ways": 769, "experts": 1}, "769 ranks, it takes 2 to 768"),
]


@pytest.mark.parametrize("change, why", BEYOND)
def test_why_the_pair_is_not_taken_is_said(host, change, why):
    found = no_pair(A3, **SIZES | change)
    assert why in found
    small = {"rows": 2, "ways": 4} if "rows" not in change and "ways" not in change else {}
    sizes = SIZES | {"experts": 8} | small | change
    if sizes["ways"] > 1 and no_pair(A3, **sizes):
        made = converted(host, A3, **sizes)
        check(made, host, A3)
        assert not placed_groups(made.model)
        assert any(why in choice.reason for choice in made.choices)


@pytest.mark.parametrize("on", [A2, PR], ids=lambda t: t.name)
def test_chips_whose_documents_do_not_have_the_pair_read_all_rows(host, on):
    made = converted(host, on, **SIZES | {"ways": 4})
    check(made, host, on)
    types = [op.type for op in made.model.graph[0].op if op.type.startswith("Hcom")]
    assert types == ["HcomAllGather", "HcomAllGather", "HcomAllGather", "HcomReduceScatter"]


@pytest.mark.parametrize(
    "attr, value, message",
    [
        ("ep_world_size", 1, "1 ranks, it takes 2 to 768"),
        ("ep_world_size", 3, "moe_expert_num is 1024 for 3 ranks"),
        ("moe_expert_num", 1152, "1,152 experts"),
        ("moe_expert_num", 512, "expand_x is"),
        ("ep_rank_id", 128, "ep_rank_id is 128"),
        ("group_ep", "", "group_ep has 0 characters"),
    ],
)
def test_a_changed_attribute_of_the_pair_is_refused(host, attr, value, message):
    made = converted(host, A3, **SIZES)
    (send,) = [op for op in made.model.graph[0].op if op.type == "MoeDistributeDispatchV2"]
    set_attr(send, attr, value)
    with pytest.raises(CompileError, match=message):
        check(made, host, A3)


def test_the_graph_of_a_rank_differs_in_its_place_alone(host):
    model = converted(host, A3, **SIZES).model
    bound = bind_rank(model, lambda name: {"experts:tensor": 5}[name])
    changed = [
        (op.type, sorted(k for k in op.attr if op.attr[k] != old.attr[k]))
        for op, old in zip(bound.graph[0].op, model.graph[0].op, strict=True)
        if op != old
    ]
    assert changed == [("MoeDistributeDispatchV2", ["ep_rank_id"]), ("MoeDistributeCombineV2", ["ep_rank_id"])]


def test_the_buffer_is_that_of_the_documents():
    """2 * (E * N * R * up512(up32(2 H) + 64) + K * N * up512(2 H)) bytes."""
    assert buffer_bytes(rows=8, width=3584, top_k=16, ways=128, experts=8) == 2 * (8 * 8 * 128 * 7680 + 16 * 8 * 7168)
