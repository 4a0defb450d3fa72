"""Passes on a captured graph keep what it computes, and do to it what they are for."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from kimi_graph import tree
from kimi_graph.compile import recipe
from kimi_graph.compile.capture import capture
from kimi_graph.compile.passes import bytes_only, fold_weights, lower_einsum, simplify, weight_name
from kimi_graph.compile.phases import Bucket, capture_pieces, fold_piece
from kimi_graph.compile.recipe import Step
from kimi_graph.errors import CompileError
from kimi_graph.ops import contract
from kimi_graph.ops.einsum import batch_matmul, matmul
from kimi_graph.read_config import load_config

aten = torch.ops.aten
EXACT = {"rtol": 0, "atol": 1e-12}  # sums of some ten products of float64


def meta(*shape, dtype=torch.float64):
    return torch.empty(shape, dtype=dtype, device="meta")


def targets(captured):
    return [n.target for n in captured.module.graph.nodes if n.op == "call_function"]


class Interpreter(fx.Interpreter):
    """Runs a graph on real tensors; a view of a permuted one copies, as the graph's tensors have no strides."""

    def call_function(self, target, args, kwargs):
        return args[0].reshape(args[1]) if target is aten.view.default else super().call_function(target, args, kwargs)


def run(captured, *values):
    return Interpreter(captured.module).run(*values)


# ---- einsum ----------------------------------------------------------------------------------------------------------


def product(equation, x, y):
    """What einsum gives, and the lowered graph that should give the same."""
    graph = lower_einsum(
        capture(lambda x, y: {"z": torch.einsum(equation, x, y)}, {"x": x.to("meta"), "y": y.to("meta")})
    )
    return torch.einsum(equation, x, y), graph


def operands(equation, sizes):
    a, b = equation.split("->")[0].split(",")
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn([sizes[c] for c in x], generator=generator, dtype=torch.float64) for x in (a, b))


SIZES = dict(zip("abcdefgh", (2, 3, 4, 5, 2, 3, 4, 5), strict=True))


@st.composite
def equations(draw):
    """The second operand reads batch, kept, summed or batch, summed, kept letters; the others are in any order."""
    letters = draw(st.permutations("abcdefgh"))
    cuts = sorted(draw(st.lists(st.integers(0, 6), min_size=3, max_size=3)))
    batch, left, right, summed = (
        "".join(letters[i:j]) for i, j in itertools.pairwise([0, *cuts, draw(st.integers(cuts[-1], 8))])
    )
    second = batch + draw(st.sampled_from([right + summed, summed + right]))
    if not (batch + left + summed) or not second:
        return "a,b->ab"
    first = "".join(draw(st.permutations(batch + left + summed)))
    return f"{first},{second}->{''.join(draw(st.permutations(batch + left + right)))}"


@settings(max_examples=60)
@given(equations())
def test_a_product_of_any_letters_is_what_einsum_gives(equation):
    x, y = operands(equation, SIZES)
    expected, graph = product(equation, x, y)
    torch.testing.assert_close(run(graph, x, y)[0], expected, **EXACT)
    assert "einsum" not in str(targets(graph))


@pytest.mark.parametrize(
    "equation", ["btd,hkd->bthk", "bthv,dhv->btd", "nd,ed->ne", "bcl,hnl->bchn", "bthn,hnl->bthl", "bthl,hvl->bthv"]
)
def test_a_weight_is_viewed_and_never_moved(equation):
    letters = sorted(set(equation) - set("->,"))
    x, y = operands(equation, dict(zip(letters, range(2, 9), strict=False)))
    expected, graph = product(equation, x, y)
    torch.testing.assert_close(run(graph, x, y)[0], expected, **EXACT)
    weight = [n for n in graph.module.graph.nodes if n.op == "placeholder"][1]
    todo = [weight]
    while todo:
        node = todo.pop()
        assert node is weight or node.target is aten.view.default
        todo += [u for u in node.users if u.target not in (matmul.op, batch_matmul.op)]


def test_a_product_without_a_common_kept_letter_is_one_matrix_product():
    _, graph = product("btd,hkd->bthk", torch.randn(2, 3, 4), torch.randn(5, 6, 4))
    assert targets(graph) == [aten.view.default, aten.view.default, matmul.op, aten.view.default]


def test_moving_dimensions_of_size_one_is_a_view():
    """A decode step has one token a row: the batch of heads costs no transposes of tokens."""
    _, graph = product("bthn,hnl->bthl", torch.randn(1, 1, 4, 8), torch.randn(4, 8, 16))
    assert aten.permute.default not in targets(graph)


@pytest.mark.parametrize(
    "equation, why",
    [
        ("ii,ij->ij", "without traces or broadcasts"),
        ("ab,bb->a", "without traces or broadcasts"),
        ("ab,bc->a", "without traces or broadcasts"),
        ("abc,cd->ad", "without traces or broadcasts"),
        ("bnk,knb->bn", "the second operand must read batch, kept, summed"),
        ("ak,bkc->abc", "the second operand must read batch, kept, summed"),
    ],
)
def test_what_is_no_product_is_refused_with_its_line(equation, why):
    a, b = (meta(*[2] * len(x)) for x in equation.split("->")[0].split(","))
    with pytest.raises(CompileError, match=rf"einsum '{equation}': .*{why}"):
        lower_einsum(capture(lambda a, b: {"y": torch.einsum(equation, a, b)}, {"a": a, "b": b}))


@pytest.mark.parametrize("equation", ["ab,bc,cd->ad", "ab,bc", "...b,bc->...c", "ab->ba"])
def test_other_forms_of_einsum_are_refused(equation):
    given = [meta(2, 2)] * len(equation.split("->")[0].split(","))
    with pytest.raises(CompileError, match="only products of two operands with a written result are lowered"):
        lower_einsum(capture(lambda given: {"y": torch.einsum(equation, *given)}, {"given": given}))


# ---- simplify --------------------------------------------------------------------------------------------------------


def simplified(f, *shapes, dtype=torch.float64):
    return simplify(capture(f, {"x": [meta(*s, dtype=dtype) for s in shapes]}))


def test_views_of_views_are_one_and_views_that_change_nothing_none():
    got = simplified(lambda x: {"y": x[0].view(6).view(3, 2).view(2, 3).exp()}, (2, 3))
    assert targets(got) == [aten.exp.default]
    got = simplified(lambda x: {"y": x[0].view(6).view(3, 2)}, (2, 3))
    assert targets(got) == [aten.view.default]
    assert run(got, torch.arange(6.0).view(2, 3))[0].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_equal_calls_are_made_once():
    got = simplified(lambda x: {"y": (x[0].exp() + 1) * (x[0].exp() + 1), "z": x[1].exp()}, (2,), (2,))
    assert [t for t in targets(got) if t is aten.exp.default] == [aten.exp.default] * 2
    assert len([t for t in targets(got) if t is aten.add.Tensor]) == 1


def test_one_and_one_point_zero_and_true_are_kept_apart():
    """They are equal in Python, and give sums of different dtypes."""
    got = simplified(lambda x: {"a": x[0] + 1, "b": x[0] + 1.0, "c": x[0] + True}, (2,), dtype=torch.bool)
    made = run(got, torch.tensor([True, False]))
    assert [m.dtype for m in made] == [torch.int64, torch.float32, torch.bool]


def test_minus_zero_and_zero_are_kept_apart():
    got = simplified(lambda x: {"a": torch.full_like(x[0], 0.0), "b": torch.full_like(x[0], -0.0)}, (2,))
    a, b = run(got, torch.ones(2, dtype=torch.float64))
    assert not a.signbit().any() and b.signbit().all()


def test_the_order_of_keyword_arguments_does_not_matter():
    got = simplified(lambda x: {"y": x[0].to(torch.float32) + x[0].to(torch.float32)}, (2,))
    assert len([t for t in targets(got) if t is aten._to_copy.default]) == 1


# ---- weights ---------------------------------------------------------------------------------------------------------


def folded(f, x, **weights):
    args = {"x": x.to("meta"), "p": {name: w.to("meta") for name, w in weights.items()}}
    return fold_weights(simplify(capture(f, args)), lambda name: name.startswith("p."))


def check_folded(f, x, **weights):
    """The folded graph on its recipes' weights gives what the function gives."""
    got = folded(f, x, **weights)
    given = {f"p.{name}": w for name, w in weights.items()} | {"x": x}
    made = {name: recipe.apply(steps, given[path]) for name, (path, steps) in got.weights.items()}
    out = run(got.captured, *[made.get(name, given.get(name)) for name in got.captured.inputs])
    for mine, theirs in zip(out, tree.leaves(f(x, weights)), strict=True):
        assert torch.equal(mine, theirs)
    for node in got.captured.module.graph.nodes:
        if node.op == "call_function":
            assert any(n.op != "placeholder" or n.name.startswith("arg") for n in node.all_input_nodes)
    return got


X, W = torch.randn(4, 6), torch.randn(8, 6)


@pytest.mark.parametrize(
    "f, name, steps",
    [
        (lambda x, p: {"y": x * p["w"][2:6]}, "p.w.slice0_2_6", (("slice", 0, 2, 6),)),
        (lambda x, p: {"y": x * p["w"][-4:]}, "p.w.slice0_4_8", (("slice", 0, 4, 8),)),
        (lambda x, p: {"y": x * p["w"][:-4]}, "p.w.slice0_0_4", (("slice", 0, 0, 4),)),
        (lambda x, p: {"y": x[:, :3] * p["w"][4:, 3:]}, "p.w.slice0_4_8.slice1_3_6",
         (("slice", 0, 4, 8), ("slice", 1, 3, 6))),
        (lambda x, p: {"y": x @ p["w"].t()}, "p.w.permute10", (("permute", 1, 0),)),
        (lambda x, p: {"y": x @ p["w"].permute(-1, 0)}, "p.w.permute10", (("permute", 1, 0),)),
        (lambda x, p: {"y": x * -p["w"][0].exp()}, None, None),
        (lambda x, p: {"y": x * p["w"].unsqueeze(0)[0, :4]}, None, None),
        (lambda x, p: {"y": x.double() * p["w"].double()[:4]}, "p.w.float64.slice0_0_4",
         (("cast", "float64"), ("slice", 0, 0, 4))),
        (lambda x, p: {"y": x * p["w"].view(2, 4, 6).view(8, 6)[:4]}, "p.w.slice0_0_4", (("slice", 0, 0, 4),)),
    ],
    ids=range(10),
)  # fmt: skip
def test_work_on_a_weight_alone_moves_into_its_recipe(f, name, steps):
    if name is None:  # a select is no recipe step
        with pytest.raises(CompileError, match="no recipe step does that"):
            check_folded(f, X, w=W)
        return
    got = check_folded(f, X, w=W)
    assert list(got.weights) == [name]
    assert recipe.to_json(got.weights[name][1]) == [list(s) for s in steps]


def test_a_weight_used_twice_is_made_once_for_each_recipe():
    def f(x, p):
        w = p["w"]
        return {"y": x * w[:4] + x * w[:4].exp() + w[4:] * x + w[:4] * 2 * x}

    with pytest.raises(CompileError, match=r"aten\.mul\.Tensor works on weights alone \(p\.w\)"):
        folded(f, X, w=W)
    got = check_folded(lambda x, p: {"y": x * p["w"][:4] + x * p["w"][:4].exp() + p["w"][4:] * x}, X, w=W)
    assert sorted(got.weights) == ["p.w.slice0_0_4", "p.w.slice0_0_4.exp", "p.w.slice0_4_8"]


def test_a_weight_read_as_it_is_and_in_parts_is_both():
    got = check_folded(lambda x, p: {"y": (x @ p["w"].t())[:, :6] * p["w"][:4]}, X, w=W)
    assert sorted(got.weights) == ["p.w.permute10", "p.w.slice0_0_4"]
    got = check_folded(lambda x, p: {"y": x.flatten() * p["w"][:4].flatten(), "z": x * p["w"][:4]}, X, w=W)
    assert sorted(got.weights) == ["p.w.slice0_0_4", "p.w.slice0_0_4.as_24"] or sorted(got.weights) == [
        "p.w.slice0_0_4",
        "p.w.slice0_0_4.as_4x6",
    ]


def test_inputs_that_nobody_reads_are_dropped():
    got = check_folded(lambda x, p: {"y": x * p["w"][:4]}, X, w=W, unread=torch.ones(3))
    assert got.captured.inputs == ("x", "p.w.slice0_0_4") or set(got.captured.inputs) == {"x", "p.w.slice0_0_4"}


@pytest.mark.parametrize(
    "f, call",
    [
        (lambda x, p: {"y": x + (p["w"] + p["v"])[:4]}, "aten.add.Tensor works on weights alone (p.w, p.v)"),
        (lambda x, p: {"y": x + (p["w"] * 2)[:4]}, "aten.mul.Tensor works on weights alone (p.w)"),
        (lambda x, p: {"y": x + p["w"].sum(0)}, "aten.sum.dim_IntList works on weights alone (p.w)"),
        (lambda x, p: {"y": x + p["w"][::2]}, "a weight is sliced with step 2; recipes slice without gaps"),
    ],
    ids=["two weights", "a number", "a sum", "gaps"],
)
def test_arithmetic_on_weights_that_no_step_covers_is_refused(f, call):
    with pytest.raises(CompileError) as error:
        folded(f, X, w=W, v=W)
    assert call in str(error.value)


def test_the_refusal_names_the_line_of_the_layer():
    """The two halves of the up-projection are recipes of slices; were one a sine, there would be no step for it."""
    bucket = Bucket(phase="decode", rows=1, tokens=1, page=16, pages=9, sequence_pages=4, slots=2)
    piece = capture_pieces(load_config("kimi-linear-48b"), bucket)["mla"]
    node = next(n for n in piece.module.graph.nodes if n.target is aten.slice.Tensor and n.args[0].op == "placeholder")
    node.target, node.args = aten.sin.default, node.args[:1]
    with pytest.raises(CompileError, match=r"layers/mla\.py:\d+: aten\.sin\.default works on weights alone"):
        fold_piece(piece)


STEPS = st.lists(
    st.sampled_from(
        [Step("view", (4, 6)), Step("view", (2, 12)), Step("view", (24,)), Step("view", (2, 3, 4)), Step("exp"),
         Step("neg"), Step("slice", (0, 0, 1)), Step("permute", (1, 0)), Step("cast", ("float32",))]
    ),
    max_size=6,
)  # fmt: skip


@given(STEPS)
def test_idle_views_do_nothing_to_bytes(steps):
    """What is left without them makes the same elements in the same order."""
    x = torch.randn(4, 6, dtype=torch.float64)
    try:
        made = recipe.apply(steps, x)
    except (RuntimeError, IndexError):
        return  # not a recipe of this parameter
    kept = bytes_only(tuple(steps))
    assert torch.equal(recipe.apply(kept, x).reshape(-1), made.reshape(-1))
    assert all(
        any(s.kind in ("slice", "permute") for s in kept[i + 1 :]) for i, step in enumerate(kept) if step.kind == "view"
    )


def test_a_weights_name_says_what_was_done_to_its_bytes():
    steps = (Step("view", (2, 12)), Step("slice", (0, 0, 1)), Step("cast", ("float32",)), Step("view", (12,)))
    assert weight_name("layers.3.mla.up", steps) == "layers.3.mla.up.slice0_0_1.float32"


# ---- all together ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase, tokens", [("prefill", 4), ("decode", 1)])
def test_no_node_of_a_finished_piece_works_on_weights_alone(phase, tokens):
    bucket = Bucket(phase=phase, rows=2, tokens=tokens, page=16, pages=9, sequence_pages=4, slots=3)
    for name, piece in capture_pieces(load_config("kimi-linear-48b"), bucket).items():
        folded = fold_piece(piece)
        nodes = list(folded.captured.module.graph.nodes)
        names = dict(zip([n for n in nodes if n.op == "placeholder"], folded.captured.inputs, strict=True))
        for node in nodes:
            reads = {names.get(n, "") for n in node.all_input_nodes}
            assert node.op != "call_function" or not reads or not reads <= set(folded.weights), (name, node)
            assert node.op != "placeholder" or node.users, (name, names[node])


def test_contract_is_lowered_like_einsum():
    got = lower_einsum(capture(lambda x, w: {"y": contract("nd,ed->ne", x, w)}, {"x": meta(2, 3), "w": meta(4, 3)}))
    assert targets(got) == [matmul.op]
