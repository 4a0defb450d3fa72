"""FusedInferAttentionScore against plain loops: layouts, pages, causal masks, rows without tokens, refusals."""

import math
from types import MappingProxyType

import pytest
import torch

from kimi_graph.compile.executor import infer_shapes
from kimi_graph.compile.ge_proto import set_attr, shape_of
from kimi_graph.errors import KimiGraphError

BF16, F64 = torch.bfloat16, torch.float64
SCALE = 0.125
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def by_loops(q, k, v, lengths_q, lengths_kv, causal):
    """Of each row, head and query: q `[B, S, N, D]`, k `[B, C, N, D]`, v `[B, C, N, V]` -> `[B, S, N, V]`."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=F64)
    for b, (n_q, n_kv) in enumerate(zip(lengths_q, lengths_kv, strict=True)):
        for i in range(n_q):
            seen = max(0, min(n_kv, n_kv - n_q + i + 1)) if causal else n_kv
            for h in range(q.shape[2]):
                scores = [SCALE * float(q[b, i, h].double() @ k[b, j, h].double()) for j in range(seen)]
                total = sum(math.exp(s - max(scores)) for s in scores)
                for j, s in enumerate(scores):
                    out[b, i, h] += math.exp(s - max(scores)) / total * v[b, j, h].double()
    return out


class Expanded:
    """Expanded MLA: 2 rows, 5 query tokens, 7 key tokens, 3 heads, 128 + 64 and 128 wide."""

    q, q_rope = rand(2, 5, 3, 128), rand(2, 5, 3, 64)
    k, k_rope, v = rand(2, 7, 3, 128), rand(2, 7, 3, 64), rand(2, 7, 3, 128)
    attrs = MappingProxyType(
        {"num_heads": 3, "num_key_value_heads": 3, "scale": SCALE, "sparse_mode": 3, "inner_precise": 0}
    )

    @classmethod
    def graph(cls, b, counts, lengths, *, mask=TRIANGLE, layout="BSND", **attrs):
        def entering(x):
            x = x.transpose(1, 2) if layout.startswith("BNSD") else x
            return x.flatten(2) if layout.startswith("BSH") else x

        inputs = {
            "query": b.source("q", entering(cls.q)),
            "key": [b.source("k", entering(cls.k))],
            "value": [b.source("v", entering(cls.v))],
            "pse_shift": None,
            "atten_mask": None if mask is None else b.source("mask", mask),
            "actual_seq_lengths": None if counts is None else b.source("counts", torch.tensor(counts)),
            "actual_seq_lengths_kv": None if lengths is None else b.source("lengths", torch.tensor(lengths)),
            "query_rope": b.source("q_rope", entering(cls.q_rope)),
            "key_rope": b.source("k_rope", entering(cls.k_rope)),
        }
        return attend(b, inputs, {**cls.attrs, "input_layout": layout, **attrs})

    @classmethod
    def expected(cls, counts, lengths, causal=True):
        q, k = torch.cat([cls.q, cls.q_rope], -1), torch.cat([cls.k, cls.k_rope], -1)
        return by_loops(q, k, cls.v, counts, lengths, causal)


def attend(b, inputs, attrs):
    outputs = b.node("FusedInferAttentionScore", inputs, outputs="attention_out softmax_lse", attrs=attrs, name="fia")
    b.result(*outputs)
    return b


@pytest.mark.parametrize("counts, lengths", [([5, 2], [7, 4]), ([0, 1], [3, 1]), ([5, 5], [5, 2]), ([3, 0], [7, 0])])
def test_causal_attention_follows_each_rows_real_lengths(build, counts, lengths):
    out, lse = Expanded.graph(build, counts, lengths).run().outputs
    torch.testing.assert_close(out, Expanded.expected(counts, lengths), rtol=1e-12, atol=1e-12)
    assert lse.shape == (0,)


def test_without_a_mask_every_key_is_seen(build):
    (out, _) = Expanded.graph(build, [5, 2], [7, 4], mask=None, sparse_mode=0).run().outputs
    torch.testing.assert_close(out, Expanded.expected([5, 2], [7, 4], causal=False), rtol=1e-12, atol=1e-12)


def test_a_mask_of_the_full_size_hides_what_it_says(build):
    causal = torch.ones(5, 7, dtype=torch.bool).triu(3)[None]  # right-down: 7 keys for 5 queries
    (out, _) = Expanded.graph(build, None, None, mask=causal, sparse_mode=0).run().outputs
    torch.testing.assert_close(out, Expanded.expected([5, 5], [7, 7]), rtol=1e-12, atol=1e-12)


def test_native_attention_is_close_to_exact(build):
    (out, _) = Expanded.graph(build, [5, 2], [7, 4]).run("native").outputs
    assert out.dtype == BF16
    # two roundings of bfloat16: the weights before they meet the values, and the result
    torch.testing.assert_close(out.double(), Expanded.expected([5, 2], [7, 4]), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    "layout, shape, back",
    [
        ("BSND", (2, 5, 3, 128), lambda x: x),
        ("BNSD", (2, 3, 5, 128), lambda x: x.transpose(1, 2)),
        ("BSH", (2, 5, 384), lambda x: x.unflatten(2, (3, 128))),
        ("BSND_BNSD", (2, 3, 5, 128), lambda x: x.transpose(1, 2)),
        ("BSH_BNSD", (2, 3, 5, 128), lambda x: x.transpose(1, 2)),
        ("BNSD_BSND", (2, 5, 3, 128), lambda x: x),
    ],
)
def test_layouts_say_how_heads_enter_and_leave(build, layout, shape, back):
    b = Expanded.graph(build, [5, 2], [7, 4], layout=layout)
    infer_shapes(b.model)
    assert shape_of(next(op for op in b.graph.op if op.name == "fia").output_desc[0]) == shape
    (out, _) = b.run().outputs
    torch.testing.assert_close(back(out), Expanded.expected([5, 2], [7, 4]), rtol=1e-12, atol=1e-12)


def test_keys_and_values_past_a_length_are_never_read(build):
    b = Expanded.graph(build, [5, 2], [7, 4])
    for name in ("k", "v", "k_rope"):
        b.values[name] = b.values[name].clone()
        b.values[name][1, 4:] = float("nan")
    (out, _) = b.run().outputs
    torch.testing.assert_close(out, Expanded.expected([5, 2], [7, 4]), rtol=1e-12, atol=1e-12)


class Absorbed:
    """Absorbed MLA: 3 rows of one token, 4 heads, latents 512 + 64 wide in pages of 16."""

    q, q_rope = rand(3, 1, 4, 512), rand(3, 1, 4, 64)
    latent, rope = rand(6, 16, 512), rand(6, 16, 64)
    table = torch.tensor([[2, 5], [3, 0], [-1, -1]], dtype=torch.int32)
    attrs = MappingProxyType(
        {
            "num_heads": 4,
            "num_key_value_heads": 1,
            "scale": SCALE,
            "block_size": 16,
            "sparse_mode": 0,
            "inner_precise": 0,
        }
    )

    @classmethod
    def graph(cls, b, lengths, *, layout="BNSD", four=True, table=None, **attrs):
        heads_first = layout.startswith("BNSD")
        q, q_rope = ((x.transpose(1, 2) if heads_first else x) for x in (cls.q, cls.q_rope))
        latent, rope = ((x.unsqueeze(1) if four else x) for x in (cls.latent, cls.rope))
        pool = b.state("latent", latent)
        inputs = {
            "query": b.source("q", q),
            "key": [pool],
            "value": [pool],
            "actual_seq_lengths_kv": b.source("lengths", torch.tensor(lengths)),
            "block_table": b.source("table", cls.table if table is None else table),
            "query_rope": b.source("q_rope", q_rope),
            "key_rope": b.state("rope", rope),
        }
        return attend(b, inputs, {**cls.attrs, "input_layout": layout, **attrs})

    @classmethod
    def expected(cls, lengths):
        pages = cls.table.long().clamp(min=0)
        latent, rope = cls.latent[pages].flatten(1, 2), cls.rope[pages].flatten(1, 2)
        q, k = torch.cat([cls.q, cls.q_rope], -1), torch.cat([latent, rope], -1)[:, :, None].expand(-1, -1, 4, -1)
        return by_loops(q, k, latent[:, :, None].expand(-1, -1, 4, -1), [1, 1, 1], lengths, causal=False)


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BNSD_NBSD"])
@pytest.mark.parametrize("four", [True, False], ids=["pool of 4 dimensions", "pool of 3"])
def test_absorbed_attention_reads_pages_by_table(build, layout, four):
    (out, _) = Absorbed.graph(build, [20, 16, 0], layout=layout, four=four).run().outputs
    back = {"BNSD": lambda x: x.transpose(1, 2), "BSND": lambda x: x, "BNSD_NBSD": lambda x: x.permute(1, 2, 0, 3)}
    torch.testing.assert_close(back[layout](out), Absorbed.expected([20, 16, 0]), rtol=1e-12, atol=1e-12)
    assert not out.isnan().any()  # the row of length 0 gives zeros


def test_absorbed_attention_gives_the_log_sum_exp_of_its_scores(build):
    out, lse = Absorbed.graph(build, [20, 16, 0], softmax_lse_flag=True).run().outputs
    torch.testing.assert_close(out.transpose(1, 2), Absorbed.expected([20, 16, 0]), rtol=1e-12, atol=1e-12)
    assert lse.shape == (3, 4, 1, 1)
    for row, length in enumerate([20, 16]):
        pages = Absorbed.table[row].long().clamp(min=0)
        latent, rope = (pool[pages].flatten(0, 1)[:length].double() for pool in (Absorbed.latent, Absorbed.rope))
        scores = Absorbed.q[row, 0].double() @ latent.mT + Absorbed.q_rope[row, 0].double() @ rope.mT
        want = (scores * Absorbed.attrs["scale"]).logsumexp(-1)
        torch.testing.assert_close(lse[row, :, 0, 0], want, rtol=1e-12, atol=1e-12)
    assert lse[2].isinf().all()  # nobody may use what a row without a key has


def test_a_page_that_does_not_exist_is_refused(build):
    table = torch.tensor([[2, 6], [3, 0], [0, 0]], dtype=torch.int32)
    with pytest.raises(KimiGraphError, match=r"fia .*block_table names page 6 of 6"):
        Absorbed.graph(build, [20, 16, 0], table=table).run()


def test_a_length_past_the_cache_is_refused(build):
    with pytest.raises(KimiGraphError, match=r"fia .*a length outside 0..32"):
        Absorbed.graph(build, [33, 16, 0]).run()


@pytest.mark.parametrize(
    "attrs, message",
    [
        ({"block_size": 24}, "block_size 24 is not a multiple of 16"),
        ({"block_size": 32}, r"pool \[6, 1, 16, 512\], 1 heads, pages of 32"),
        ({"num_heads": 3}, "BNSD of 3 heads expected"),
        ({"num_key_value_heads": 4}, r"pool \[6, 1, 16, 512\], 4 heads"),
        ({"sparse_mode": 4}, "sparse_mode 4, supported is 0 or 3"),
        ({"sparse_mode": 3}, "sparse_mode 3 needs atten_mask"),
        ({"input_layout": "TND"}, "input_layout 'TND', supported is"),
        ({"input_layout": "BNSD_BSND"}, "input_layout 'BNSD_BSND' for width 512"),
        ({"softmax_lse_flag": 2}, "attribute 'softmax_lse_flag' is 2, supported is False or True"),
        ({"softmax_lse_flag": True, "input_layout": "BNSD_NBSD"}, "log-sum-exp in input_layout 'BNSD_NBSD'"),
        ({"pre_tokens": 0}, "attribute 'pre_tokens' is 0"),
        ({"antiquant_mode": 1}, "attribute 'antiquant_mode' is 1"),
        ({"inner_precise": 2}, "attribute 'inner_precise' is 2, supported is 0"),
        ({"unheard": 1}, "attributes the executor does not interpret: unheard=1"),
    ],
)
def test_attributes_outside_the_documents_are_refused(build, attrs, message):
    b = Absorbed.graph(build, [20, 16, 0], **attrs)
    with pytest.raises(KimiGraphError, match=rf"fia \(FusedInferAttentionScore\): {message}"):
        b.run()


def test_a_mask_that_is_not_the_triangle_is_refused(build):
    wrong = TRIANGLE.clone()
    wrong[3, 2] = True
    with pytest.raises(KimiGraphError, match="atten_mask is not true above its diagonal only"):
        Expanded.graph(build, [5, 2], [7, 4], mask=wrong).run()


def test_an_input_without_semantics_is_refused(build):
    b = Expanded.graph(build, [5, 2], [7, 4])
    node = next(op for op in b.graph.op if op.name == "fia")
    node.input[3] = "q:0"  # pse_shift
    with pytest.raises(KimiGraphError, match=r"fia .*input 'pse_shift' is given; supported is none"):
        b.run()


def test_a_changed_scale_changes_the_result(build, new_builder):
    (one, _) = Expanded.graph(build, [5, 2], [7, 4]).run().outputs
    b = Expanded.graph(new_builder(), [5, 2], [7, 4])
    set_attr(next(op for op in b.graph.op if op.name == "fia"), "scale", SCALE * 1.01)
    assert not torch.equal(one, b.run().outputs[0])


def test_lengths_need_actual_keys_where_paged(build):
    b = Absorbed.graph(build, [20, 16, 0])
    node = next(op for op in b.graph.op if op.name == "fia")
    position = [desc.name for desc in node.input_desc].index("actual_seq_lengths_kv")
    node.input[position] = ""
    with pytest.raises(KimiGraphError, match="paged keys need actual_seq_lengths_kv"):
        b.run()
