"""The operators of sparse attention: against loops written from their documents, and what they refuse."""

import math

import pytest
import torch

from kimi_graph.compile.executor import Selections, infer_shapes
from kimi_graph.compile.ge_proto import dtype_of, get_attr, set_attr, shape_of
from kimi_graph.errors import KimiGraphError

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
LONG = 2**63 - 1
PAGE = 16
TABLE = torch.tensor([[3, 1], [2, 9]], dtype=I32)  # the second row's second page is never read
QUERIES, KEYS = torch.tensor([2, 1], dtype=I32), torch.tensor([19, 5], dtype=I32)


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def cached(pool: torch.Tensor, row: int, token: int) -> torch.Tensor:
    return pool[int(TABLE[row, token // PAGE]), token % PAGE, 0].double()


def both(values: dict[str, torch.Tensor | None], b) -> dict[str, str | None]:
    return {name: None if value is None else b.source(name, value) for name, value in values.items()}


# ---- selection -------------------------------------------------------------------------------------------------------

SELECT = {
    "layout_query": "BSND",
    "layout_key": "PA_BSND",
    "sparse_count": 6,
    "sparse_mode": 3,
    "pre_tokens": LONG,
    "next_tokens": LONG,
    "return_values": False,
}


def indexed(**changes) -> dict[str, torch.Tensor | None]:
    values = {"query": rand(2, 3, 4, 128), "key": rand(4, PAGE, 1, 128), "weights": rand(2, 3, 4, dtype=F32)}
    values |= {"actual_seq_lengths_query": QUERIES, "actual_seq_lengths_key": KEYS, "block_table": TABLE}
    return values | changes


def select(b, values, **attrs):
    made = b.node(
        "LightningIndexer", both(values, b), outputs="sparse_indices sparse_values", attrs=SELECT | attrs, name="select"
    )
    b.result(*made)
    return b


def best(values, row: int, t: int, count: int) -> list[int]:
    """By the document: Top-k of sum over heads of w * relu(q . k), of the keys up to the query's own."""
    seen = int(KEYS[row]) - int(QUERIES[row]) + t + 1
    scores = []
    for token in range(seen):
        key = cached(values["key"], row, token)
        heads = [max(0.0, float(q.double() @ key)) for q in values["query"][row, t]]
        scores.append(sum(float(w) * s for w, s in zip(values["weights"][row, t], heads, strict=True)))
    return sorted(range(seen), key=lambda i: (-scores[i], i))[:count]


def test_keys_are_chosen_as_the_document_says(build):
    values = indexed()
    chosen, none = select(build, values).run().outputs
    assert chosen.dtype == I32 and chosen.shape == (2, 3, 1, 6) and none.shape == (0,)
    for row, t in ((0, 0), (0, 1), (1, 0)):
        wanted = best(values, row, t, 6)
        assert chosen[row, t, 0].tolist() == wanted + [-1] * (6 - len(wanted))
    assert (chosen[0, 2] == -1).all() and (chosen[1, 1:] == -1).all()  # rows past the number of queries


def test_where_all_keys_fit_all_are_chosen(build):
    (chosen, _) = select(build, indexed(), sparse_count=20).run().outputs
    assert sorted(chosen[0, 1, 0].tolist()) == [-1, *range(19)]


def test_equal_scores_go_to_the_lower_position(build):
    (chosen, _) = select(build, indexed(key=torch.ones(4, PAGE, 1, 128).to(BF16))).run("native").outputs
    assert chosen[0, 1, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_row_without_keys_chooses_none(build):
    lengths = {"actual_seq_lengths_key": torch.tensor([1, 0], dtype=I32)}
    (chosen, _) = select(build, indexed(**lengths)).run().outputs
    assert chosen[0, :, 0].tolist() == [[-1] * 6, [0] + [-1] * 5, [-1] * 6]  # two queries over one key
    assert (chosen[1] == -1).all()


def test_a_native_selection_can_be_that_of_the_exact_run(build):
    b = select(build, indexed())
    recorded = Selections()
    exact = b.run("exact", selections=recorded).outputs[0]
    flipped = Selections({"select": exact.flip(-1)}, replaying=True)
    assert torch.equal(b.run("native", selections=flipped).outputs[0], exact.flip(-1))


def test_shapes_of_a_selection_are_inferred(build):
    b = select(build, indexed())
    infer_shapes(b.model)
    node = next(op for op in b.graph.op if op.name == "select")
    assert [(shape_of(d), dtype_of(d)) for d in node.output_desc] == [((2, 3, 1, 6), I32), ((0,), BF16)]


@pytest.mark.parametrize(
    "changes, attrs, message",
    [
        ({}, {"layout_key": "BSND"}, "attribute 'layout_key' is 'BSND', supported is 'PA_BSND'"),
        ({}, {"sparse_mode": 0}, "attribute 'sparse_mode' is 0, supported is 3"),
        ({}, {"return_values": True}, "attribute 'return_values' is True, supported is False"),
        ({}, {"sparse_count": 0}, "sparse_count 0"),
        ({}, {"cmp_ratio": 2}, "attributes the executor does not interpret: cmp_ratio=2"),
        ({"weights": rand(2, 3, 5)}, {}, r"weights \[2, 3, 5\] for query \[2, 3, 4, 128\]"),
        ({"key": rand(4, PAGE, 2, 128)}, {}, r"width 128, key \[4, 16, 2, 128\]"),
        ({"key": rand(4, 8, 1, 128), "actual_seq_lengths_key": QUERIES}, {}, "pages of 8 tokens"),
        ({"actual_seq_lengths_key": None}, {}, "actual_seq_lengths_key is required here"),
        ({"actual_seq_lengths_key": KEYS + 20}, {}, r"actual_seq_lengths_key outside 0\.\.32"),
        ({"block_table": TABLE + 3}, {}, "block_table names"),
    ],
)
def test_a_selection_outside_the_document_is_refused(build, changes, attrs, message):
    with pytest.raises(KimiGraphError, match=rf"select \(LightningIndexer\): {message}"):
        select(build, indexed(**changes), **attrs).run()


# ---- attention -------------------------------------------------------------------------------------------------------

ATTEND = {
    "scale_value": 0.0625,
    "sparse_block_size": 1,
    "layout_query": "BSND",
    "layout_kv": "PA_BSND",
    "sparse_mode": 3,
    "pre_tokens": LONG,
    "next_tokens": LONG,
    "attention_mode": 2,
    "return_softmax_lse": False,
}
CHOSEN = torch.tensor(
    [[[17, 3, 9, -1], [18, 0, 17, 4], [1, 2, 3, 4]], [[4, 2, -1, -1], [0, 1, 2, 3], [-1, -1, -1, -1]]], dtype=I32
)[:, :, None]


def latents(**changes) -> dict[str, torch.Tensor | None]:
    pool = rand(4, PAGE, 1, 512)
    values = {"query": rand(2, 3, 3, 512), "key": pool, "value": pool, "sparse_indices": CHOSEN, "block_table": TABLE}
    values |= {"actual_seq_lengths_query": QUERIES, "actual_seq_lengths_kv": KEYS}
    values |= {"query_rope": rand(2, 3, 3, 64), "key_rope": rand(4, PAGE, 1, 64)}
    return values | changes


def attend(b, values, **attrs):
    outputs = "attention_out softmax_max softmax_sum"
    b.result(*b.node("SparseFlashAttention", both(values, b), outputs=outputs, attrs=ATTEND | attrs, name="attend"))
    return b


def attended(values, row: int, t: int, chosen: list[int]) -> torch.Tensor:
    """By the document: softmax(scale * (q k + q_rope k_rope)) v over the chosen keys."""
    outs = []
    for head in range(3):
        q, q_r = (values[n][row, t, head].double() for n in ("query", "query_rope"))
        keys = [cached(values["key"], row, i) for i in chosen]
        ropes = [cached(values["key_rope"], row, i) for i in chosen]
        scores = [0.0625 * float(q @ k + q_r @ r) for k, r in zip(keys, ropes, strict=True)]
        shares = [math.exp(s - max(scores)) for s in scores]
        outs.append(sum(share * k for share, k in zip(shares, keys, strict=True)) / sum(shares))
    return torch.stack(outs)


def test_chosen_keys_are_attended_to_as_the_document_says(build):
    values = latents()
    out, *statistics = attend(build, values).run().outputs
    assert [x.shape for x in statistics] == [(0,), (0,)]
    for row, t, chosen in ((0, 0, [17, 3, 9]), (0, 1, [18, 0, 17, 4]), (1, 0, [4, 2])):
        torch.testing.assert_close(out[row, t], attended(values, row, t, chosen), rtol=1e-12, atol=1e-12)
    assert not out[0, 2].any() and not out[1, 1:].any()  # rows past the number of queries


def test_a_key_after_the_query_is_not_attended_to(build):
    later = CHOSEN.clone()
    later[0, 0, 0, 0] = 18
    values = latents(sparse_indices=later)
    (out, *_) = attend(build, values).run().outputs
    torch.testing.assert_close(out[0, 0], attended(values, 0, 0, [3, 9]), rtol=1e-12, atol=1e-12)


def test_a_native_attention_rounds_its_weights_and_its_result(build):
    values = latents()
    (out, *_) = attend(build, values).run("native").outputs
    assert out.dtype == BF16
    wanted = attended(values, 0, 1, [18, 0, 17, 4])
    # weights and result are rounded to 8 bits of mantissa each
    torch.testing.assert_close(out[0, 1].double(), wanted, rtol=0, atol=2 * 2**-8 * float(wanted.abs().max()))


def test_shapes_of_an_attention_are_inferred(build):
    b = attend(build, latents())
    infer_shapes(b.model)
    node = next(op for op in b.graph.op if op.name == "attend")
    assert [(shape_of(d), dtype_of(d)) for d in node.output_desc] == [
        ((2, 3, 3, 512), BF16),
        ((0,), F32),
        ((0,), F32),
    ]


def test_the_scale_matters(new_builder):
    b = attend(new_builder(), latents())
    before = b.run().outputs[0]
    node = next(op for op in b.graph.op if op.name == "attend")
    set_attr(node, "scale_value", 2 * get_attr(node, "scale_value"))
    assert not torch.equal(b.run().outputs[0], before)


@pytest.mark.parametrize(
    "changes, attrs, message",
    [
        ({}, {"attention_mode": 0}, "attribute 'attention_mode' is 0, supported is 2"),
        ({}, {"sparse_block_size": 2}, "attribute 'sparse_block_size' is 2, supported is 1"),
        ({}, {"layout_kv": "TND"}, "attribute 'layout_kv' is 'TND', supported is 'PA_BSND'"),
        ({}, {"return_softmax_lse": True}, "attribute 'return_softmax_lse' is True, supported is False"),
        ({"query_rope": None}, {}, "query_rope and key_rope are required"),
        ({"value": rand(4, PAGE, 1, 512) + 1}, {}, "value differs from key"),
        ({"key_rope": rand(4, PAGE, 1, 32)}, {}, r"key_rope \[4, 16, 1, 32\]"),
        ({"sparse_indices": CHOSEN.flip(-1)}, {}, "a position after -1, where kernels stop"),
        ({"sparse_indices": CHOSEN[:, :2]}, {}, r"sparse_indices \[2, 3, 1, J\] expected"),
        ({"actual_seq_lengths_query": None}, {}, "actual_seq_lengths_query is required here"),
    ],
)
def test_an_attention_outside_the_document_is_refused(build, changes, attrs, message):
    with pytest.raises(KimiGraphError, match=rf"attend \(SparseFlashAttention\): {message}"):
        attend(build, latents(**changes), **attrs).run()


# ---- our own ---------------------------------------------------------------------------------------------------------

COUNTS = QUERIES.long()
ANY = torch.tensor(
    [[[17, -1, 3, 9], [18, -1, 17, 19], [1, 2, 3, 4]], [[-1, 2, 4, -1], [0, 1, 2, 3], [-1, -1, -1, -1]]], dtype=I32
)  # in any order; 19 is after its query


def own(**changes) -> dict[str, torch.Tensor | None]:
    values = {"q": rand(2, 3, 3, 512), "q_rope": rand(2, 3, 3, 64), "latent": rand(4, PAGE, 1, 512)}
    values |= {"rope": rand(4, PAGE, 1, 64), "selected": ANY, "block_table": TABLE}
    return values | {"lengths": KEYS.long(), "counts": COUNTS} | changes


def ours(b, values, scale: float = 0.0625):
    b.result(*b.node("SparseAttend", both(values, b), outputs="o lse", attrs={"scale": scale}, name="attend"))
    return b


def test_our_attention_takes_selections_in_any_order_and_gives_log_sum_exps(build):
    values = own()
    o, lse = ours(build, values).run().outputs
    named = {"query": values["q"], "query_rope": values["q_rope"], "key": values["latent"], "key_rope": values["rope"]}
    for row, t, chosen in ((0, 0, [17, 3, 9]), (0, 1, [18, 17]), (1, 0, [2, 4])):
        torch.testing.assert_close(o[row, t], attended(named, row, t, chosen), rtol=1e-12, atol=1e-12)
        keys = [torch.cat([cached(named[n], row, i) for n in ("key", "key_rope")]) for i in chosen]
        asks = torch.cat([values["q"][row, t], values["q_rope"][row, t]], -1).double()
        scores = 0.0625 * asks @ torch.stack(keys).double().mT
        torch.testing.assert_close(lse[row, t], scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    assert not o[0, 2].any() and not o[1, 1:].any() and (lse[0, 2] == torch.tensor(-1e30)).all()


def test_shapes_of_our_attention_are_inferred(build):
    b = ours(build, own())
    infer_shapes(b.model)
    node = next(op for op in b.graph.op if op.name == "attend")
    assert [(shape_of(d), dtype_of(d)) for d in node.output_desc] == [((2, 3, 3, 512), BF16), ((2, 3, 3), F32)]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"selected": ANY[:, :2]}, r"selected \[2, 3, J\] expected"),
        ({"rope": rand(4, 8, 1, 64)}, r"rope \[4, 8, 1, 64\]"),
        ({"latent": rand(4, PAGE, 2, 512)}, r"latent \[P, page, 1, 512\] expected"),
        ({"block_table": TABLE + 4}, "block_table names"),
    ],
)
def test_an_attention_of_ours_to_what_does_not_fit_is_refused(build, changes, message):
    with pytest.raises(KimiGraphError, match=rf"attend \(SparseAttend\): {message}"):
        ours(build, own(**changes)).run()
