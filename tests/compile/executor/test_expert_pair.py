"""CANN's pair of experts in lockstep: rows go to the ranks of their experts and what they made comes back, weighed."""

from typing import Any

import pytest
import torch

from kimi_graph.compile.executor import Executor, run_together
from kimi_graph.compile.executor.run import Ran
from kimi_graph.compile.ge_proto import set_attr
from kimi_graph.errors import BundleError

RANKS, EXPERTS, ROWS, TOP_K, WIDTH = 3, 2, 4, 3, 5  # experts of each rank
MOST = RANKS * ROWS * min(EXPERTS, TOP_K)
TOTAL = RANKS * EXPERTS
PAIR = {"group_ep": "experts:tensor", "ep_world_size": RANKS, "moe_expert_num": TOTAL}
SENT = "expand_x dynamic_scales assist_info_for_combine expert_token_nums ep_recv_count tp_recv_count expand_scales"


def given(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, chosen experts and weights of a rank."""
    g = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(TOTAL, generator=g)[:TOP_K] for _ in range(ROWS)]).int()
    return torch.randn(ROWS, WIDTH, generator=g), chosen, torch.rand(ROWS, TOP_K, generator=g)


def pair(new_builder: Any, rank: int, *, own: int | None = None, **changed: Any) -> Any:
    """A graph that sends rows, doubles what comes, and sends it back."""
    x, chosen, weights = given(rank)
    b = new_builder()
    attrs = PAIR | {"ep_rank_id": rank if own is None else own} | changed
    ids = b.source("chosen", chosen)
    sent = b.node(
        "MoeDistributeDispatchV2", {"x": b.source("x", x), "expert_ids": ids}, outputs=SENT, attrs=attrs, name="send"
    )
    (twice,) = b.node("Add", {"x1": sent[0], "x2": sent[0]}, name="twice")
    back = {
        "expand_x": twice, "expert_ids": ids, "assist_info_for_combine": sent[2], "ep_send_counts": sent[4],
        "expert_scales": b.source("weights", weights),
    }  # fmt: skip
    (y,) = b.node("MoeDistributeCombineV2", back, outputs="x", attrs=attrs, name="back")
    b.result(y, sent[0], sent[3])
    return b


def ranks(graphs: list[Any], mode: str = "exact", **replaced: torch.Tensor) -> list[Ran]:
    runs = []
    for rank, b in enumerate(graphs):
        x, chosen, weights = given(rank)
        inputs = {"x": x, "chosen": chosen, "weights": weights} | (replaced if rank == 0 else {})
        runs.append(Executor(b.model).steps(inputs, {}, mode))
    return run_together(runs, lambda _: [list(range(RANKS))])


def test_rows_go_to_the_ranks_of_their_experts_and_come_back_weighed(new_builder):
    for rank, ran in enumerate(ranks([pair(new_builder, r) for r in range(RANKS)])):
        x, _, weights = given(rank)
        y, came, sizes = ran.outputs
        torch.testing.assert_close(y, 2 * x.double() * weights.double().sum(1, keepdim=True), rtol=1e-13, atol=0)
        wanted = [
            their_x[row].double()
            for expert in range(rank * EXPERTS, (rank + 1) * EXPERTS)
            for their_x, their_ids, _ in map(given, range(RANKS))
            for row in range(ROWS)
            if expert in their_ids[row].tolist()
        ]
        assert torch.equal(came[: len(wanted)], torch.stack(wanted))
        assert came.shape == (MOST, WIDTH) and came[len(wanted) :].isnan().all()
        assert int(sizes.sum()) == len(wanted)


def test_half_floats_are_weighed_in_float32_and_rounded_once(new_builder):
    for rank, ran in enumerate(ranks([pair(new_builder, r) for r in range(RANKS)], "native")):
        x, _, weights = given(rank)
        torch.testing.assert_close(ran.outputs[0], 2 * x * weights.sum(1, keepdim=True), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"ep_world_size": 2}, "ep_world_size 2 in a group of 3"),
        ({"moe_expert_num": 7}, "7 experts on 3 ranks"),
        ({"shared_expert_rank_num": 1}, "'shared_expert_rank_num' is 1"),
        ({"comm_alg": "hierarchy"}, "'comm_alg' is 'hierarchy'"),
        ({"tp_world_size": 2}, "'tp_world_size' is 2"),
        ({"zero_expert_num": 1}, "'zero_expert_num' is 1"),
        ({"more": 1}, "does not interpret: more=1"),
    ],
)
def test_what_the_pair_has_no_meaning_for_is_refused(new_builder, changed, message):
    graphs = [pair(new_builder, r) for r in range(RANKS)]
    for b in graphs:
        (send,) = [op for op in b.model.graph[0].op if op.type == "MoeDistributeDispatchV2"]
        for name, value in changed.items():
            set_attr(send, name, value)
    with pytest.raises(BundleError, match=message):
        ranks(graphs)


def test_a_graph_of_a_rank_at_another_place_is_refused(new_builder):
    with pytest.raises(BundleError, match="ep_rank_id is 0 on rank 1 of its group"):
        ranks([pair(new_builder, r, own=0) for r in range(RANKS)])


def test_an_expert_that_is_none_or_twice_in_a_row_is_refused(new_builder):
    graphs = [pair(new_builder, r) for r in range(RANKS)]
    for wrong, message in ((TOTAL, "an expert outside 0..5"), (None, "an expert twice in a row")):
        chosen = given(0)[1].clone()
        chosen[0, 0] = chosen[0, 1] if wrong is None else wrong
        with pytest.raises(BundleError, match=message):
            ranks(graphs, chosen=chosen)
