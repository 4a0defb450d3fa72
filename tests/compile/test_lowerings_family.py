"""Each operator of the family lowered alone, for every chip and release: legal there, and the same as its reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kimi_graph import ops
from kimi_graph.compile.bundle import open_bundle
from kimi_graph.compile.capture import capture
from kimi_graph.compile.checks import check_graph
from kimi_graph.compile.convert import Converted, convert
from kimi_graph.compile.driver import convert_piece
from kimi_graph.compile.executor import Executor, infer_shapes
from kimi_graph.compile.ge_proto import ModelDef, data_edges, dtype_of, shape_of
from kimi_graph.compile.lower import Choice, not_there
from kimi_graph.compile.prototype_rows import ROWS
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.stamp import Assembly, alias_states
from kimi_graph.compile.targets import PROVIDERS_DEFAULT
from kimi_graph.compile.targets import target as target_of
from kimi_graph.compile.torchair_host import Host
from kimi_graph.errors import CompileError
from kimi_graph.layers.attn_residual import AttnResidual, attn_residual
from kimi_graph.ops.moe import MX_ROWS

Tensor = torch.Tensor
BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64

PLACES = [
    ("a2", "9.1"),
    ("a3", "8.5"),
    ("a3", "9.1"),
    ("a3", "9.2"),
    ("950dt", "8.5"),
    ("950dt", "9.1"),
    ("950dt", "9.2"),
]
OLD_950 = [p for p in PLACES if p != ("950dt", "8.5")]  # CANN 8.5 has no sparse attention for 950


@dataclass(frozen=True)
class Case:
    """A call of operators: arguments by name; `states` are written in place, the call gives their next values last."""

    call: Callable[..., Any]
    args: dict[str, Tensor]
    states: tuple[str, ...] = ()
    places: tuple[tuple[str, str], ...] = tuple(PLACES)
    native: float = 2**-7  # two roundings of bfloat16


@dataclass(frozen=True)
class Lowered:
    model: ModelDef
    converted: Converted
    inputs: dict[str, str]  # argument by node

    @property
    def types(self) -> list[str]:
        return [op.type for op in self.model.graph[0].op if op.type not in ("Data", "RefData", "Const", "NetOutput")]

    @property
    def choices(self) -> dict[str, Choice]:
        return {c.kind: c for c in self.converted.choices}


def lower(host: Host, case: Case, where: tuple[str, str], providers: tuple[str, ...] = PROVIDERS_DEFAULT) -> Lowered:
    """Captured, converted, states in place, described, held against every rule of the target."""
    target = target_of(where[0], cann=where[1], providers=providers)
    prototypes = Prototypes(target.soc, host.root)

    def call(x: dict[str, Tensor], s: dict[str, Tensor]) -> dict[str, Any]:
        made = case.call(**x, **s)
        results = list(made) if isinstance(made, (tuple, list)) else [made]
        first = len(results) - len(case.states)
        return {"out": results[:first], "s": dict(zip(case.states, results[first:], strict=True))}

    meta = {name: torch.empty_like(x, device="meta") for name, x in case.args.items()}
    groups = {"x": {n: x for n, x in meta.items() if n not in case.states}, "s": {n: meta[n] for n in case.states}}
    captured = capture(call, groups)
    made = convert(captured.module, name="call", host=host, target=target, cann=target.cann)
    placeholders = [n.name for n in captured.module.graph.nodes if n.op == "placeholder"]
    inputs = dict(zip(placeholders, captured.inputs, strict=True)) | {"causal_mask": "causal_mask"}
    alias_states(made.model, inputs, captured.outputs, prototypes)
    infer_shapes(made.model)
    states = {node for node, name in inputs.items() if name.startswith("s.")}
    check_graph(made.model, target, prototypes, weights=set(), states=states)
    return Lowered(made.model, made, {node: name.split(".")[-1] for node, name in inputs.items()})


def run(lowered: Lowered, args: dict[str, Tensor], mode: str) -> list[Tensor]:
    """Results, then states."""
    executor = Executor(lowered.model)
    given = args | {"causal_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1)}
    inputs = {node: given[lowered.inputs[node]] for node in executor.inputs}
    nodes = {op.name: op for op in lowered.model.graph[0].op}
    states = {n: given[lowered.inputs[n]].view(shape_of(nodes[n].output_desc[0])) for n in executor.states}
    ran = executor.run(inputs, states, mode)
    return [*ran.outputs, *(ran.states[node] for node in executor.states)]


def reference(case: Case, args: dict[str, Tensor]) -> list[Tensor]:
    made = case.call(**{name: x.clone() for name, x in args.items()})
    return list(made) if isinstance(made, (tuple, list)) else [made]


def compare(mine: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    assert len(mine) == len(theirs)
    for m, t in zip(mine, theirs, strict=True):
        scale = t.double().abs().amax().item() if t.is_floating_point() and t.numel() else 0
        torch.testing.assert_close(m.view(t.shape).double(), t.double(), rtol=0, atol=tolerance * scale)


# ---- the calls -------------------------------------------------------------------------------------------------------


def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


def angles(rows: int, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    turn = rand(rows, tokens, width // 2, dtype=F32, scale=3.0)
    return turn.cos(), turn.sin()


def rotated(heads: int, interleaved: bool) -> Case:
    cos, sin = angles(2, 3, 64)
    return Case(
        lambda x, cos, sin: ops.rope(x, cos, sin, interleaved), {"x": rand(2, 3, heads, 64), "cos": cos, "sin": sin}
    )


PAGE, PAGES = 16, 3  # three pages a sequence: 48 tokens of room
TABLE = torch.tensor([[4, 1, 6], [2, 5, 3], [0, 0, 0]], dtype=I32)
LENGTHS, COUNTS = torch.tensor([41, 17, 0]), torch.tensor([3, 1, 0])


def indexed(heads: int, top_k: int, lengths: Tensor = LENGTHS, counts: Tensor = COUNTS) -> Case:
    args = {"q": rand(3, 3, heads, 128), "weights": rand(3, 3, heads, dtype=F32), "pool": rand(7, PAGE, 128)}
    args |= {"block_table": TABLE, "lengths": lengths, "counts": counts}
    return Case(lambda **x: ops.select_keys(**x, top_k=top_k), args, places=tuple(OLD_950))


def attended(heads: int) -> Case:
    selected = torch.full((3, 3, 8), -1, dtype=I32)
    for t in range(3):  # some of those each query sees, best first, fewer than there is room for
        selected[0, t, : 6 + t] = torch.randperm(39 + t, generator=torch.Generator().manual_seed(t))[: 6 + t]
    selected[1, 0] = torch.tensor([16, 0, 3, 9, 12, 1, 2, 15])
    args = {"q_latent": rand(3, 3, heads, 512), "q_rope": rand(3, 3, heads, 64), "latent_pool": rand(7, PAGE, 512)}
    args |= {"rope_pool": rand(7, PAGE, 64), "selected": selected, "block_table": TABLE}
    args |= {"lengths": LENGTHS, "counts": COUNTS}
    return Case(lambda **x: ops.sparse_attention(**x, scale=192**-0.5), args, places=tuple(OLD_950))


def attended_part(heads: int, room: int = 8) -> Case:
    """One query a row; of what it selected some is elsewhere, in one row all of it."""
    selected = torch.full((3, 1, room), -1, dtype=I32)
    selected[0, 0, 1:7] = torch.tensor([40, -1, 3, 25, -1, 0])
    selected[1, 0, :3] = torch.tensor([17, 16, 5])  # 17 is past the end
    args = attended(heads).args | {"q_latent": rand(3, 1, heads, 512), "q_rope": rand(3, 1, heads, 64)}
    args |= {"selected": selected, "counts": torch.tensor([1, 1, 0])}

    def attend(**x: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = ops.sparse_attention_lse(**x, scale=192**-0.5)
        return o, torch.where(lse > ops.NO_SCORE, lse, 0.0)  # of so large a number no digit counts

    return Case(attend, args)


def latent(heads: int) -> Case:
    args = {"q_latent": rand(3, 1, heads, 512), "q_rope": rand(3, 1, heads, 64), "latent_pool": rand(7, PAGE, 512)}
    args |= {"rope_pool": rand(7, PAGE, 64), "block_table": TABLE, "lengths": LENGTHS}
    return Case(lambda **x: ops.latent_attention(**x, scale=192**-0.5), args)


def latent_lse(heads: int) -> Case:
    args = latent(heads).args | {"lengths": LENGTHS.clamp(min=1)}  # what a row without a key has is not said
    return Case(lambda **x: ops.latent_attention_lse(**x, scale=192**-0.5), args)


def merged_best() -> Case:
    """Scores of three devices, some equal, some without a key."""
    score = torch.tensor([3.0, 1, 1, 2, -1e30, 1, 3, -2]).view(1, 1, 8).expand(2, 1, 8).contiguous()
    position = torch.tensor([[9, 4, 30, 2, 77, 3, 8, 1], [0, 7, 6, 5, 70, 3, 2, 1]], dtype=I32).view(2, 1, 8)
    return Case(lambda **x: ops.best_positions(**x, top_k=5), {"score": score, "position": position})


def expanded(heads: int, nope: int, value: int) -> Case:
    args = {"q_nope": rand(2, 4, heads, nope), "q_rope": rand(2, 4, heads, 64), "k_nope": rand(2, 32, heads, nope)}
    args |= {"k_rope": rand(2, 32, 64), "v": rand(2, 32, heads, value)}
    args |= {"lengths": torch.tensor([9, 27]), "counts": torch.tensor([4, 2])}
    return Case(lambda **x: ops.attention(**x, scale=(nope + 64) ** -0.5), args)


def routed(groups: int, kept: int) -> Case:
    args = {"scores": rand(5, 32, dtype=F32), "bias": rand(32, dtype=F32, scale=0.3)}
    return Case(lambda **x: list(ops.moe_route(**x, top_k=4, scale=2.5, groups=groups, kept_groups=kept)), args)


def mixed(count: int) -> Case:
    args = {f"x{i}": rand(2, 3, 16 + 0 * i) * (i + 1) for i in range(count)}
    args |= {"norm": rand(16), "query": rand(16)}

    def mix(norm: Tensor, query: Tensor, **sources: Tensor) -> Tensor:
        return ops.residual_mix(list(sources.values()), norm, query, 1e-6)

    return Case(mix, args)


def written() -> Case:
    slots = torch.tensor([16, 17, 1, 50, 0, 2])
    args = {"key": rand(2, 3, 128), "pool": rand(4, PAGE, 128), "slot_mapping": slots}

    def write(**x: Tensor) -> tuple[Tensor, Tensor]:
        pool = ops.index_write(**x)
        return pool.neg(), pool  # a write that nobody reads would be dropped

    return Case(write, args, states=("pool",))


def stepped(key: int = 16, value: int = 8) -> Case:
    args = {name: rand(3, 1, 4, key) for name in ("q", "k")}
    args |= {"v": rand(3, 1, 4, value), "beta": rand(3, 1, 4, dtype=F32)}
    args |= {"decay": -rand(3, 1, 4, key, dtype=F32).abs(), "memory": rand(5, 4, value, key, dtype=F32)}
    args |= {"slots": torch.tensor([3, 1, 4], dtype=I32)}
    args["beta"] = args["beta"].to(BF16).float()  # CANN's operator takes it in bfloat16

    return Case(lambda **x: ops.kda_step(**x, scale=0.25), args, states=("memory",))


CASES = {
    "kda_step": stepped(),
    "rope, neighbours": rotated(5, True),
    "rope, halves": rotated(5, False),
    "rope of one head": rotated(1, True),
    "index_write": written(),
    "select_keys of 64 heads": indexed(64, 8),
    "select_keys of 32 heads": indexed(32, 8),
    "select_keys of 5 heads": indexed(5, 8),
    "select_keys, room for all": indexed(16, 48),
    "sparse_attention of 8 heads": attended(8),
    "sparse_attention of 3 heads": attended(3),
    "sparse_attention_lse of 3 heads": attended_part(3),
    "sparse_attention_lse, room for more than a page": attended_part(8, 20),
    "latent_attention of 4 heads": latent(4),
    "latent_attention of 6 heads": latent(6),
    "latent_attention_lse of 6 heads": latent_lse(6),
    "best_positions": merged_best(),
    "attention, 128 + 64 to 128": expanded(3, 128, 128),
    "attention, 192 + 64 to 256": expanded(3, 192, 256),
    "moe_route without groups": routed(1, 1),
    "moe_route, 4 of 8 groups": routed(8, 4),
    "moe_route, all groups": routed(8, 8),
    "situ": Case(lambda x: ops.situ(x, 4.0, 25.0), {"x": rand(7, 12, scale=5.0)}),
    "situ_mul": Case(
        lambda gate, up: ops.situ_mul(gate, up, 4.0, 25.0),
        {"gate": rand(2, 3, 6, scale=5.0), "up": rand(2, 3, 6, scale=30.0)},
    ),
    "sigmoid_gate": Case(
        lambda x, gate: ops.sigmoid_gate(x, gate), {"x": rand(2, 3, 4, 8), "gate": rand(2, 3, 4, 8, scale=3.0)}
    ),
    "residual_mix of one": mixed(1),
    "residual_mix of four": mixed(4),
    "layer_norm": Case(
        lambda x, weight, bias: ops.layer_norm(x, weight, bias, 1e-6),
        {"x": rand(2, 3, 16) + 2, "weight": rand(16), "bias": rand(16)},
    ),
    "a gate on heads": Case(lambda x, gate: x * torch.sigmoid(gate), {"x": rand(2, 3, 4, 8), "gate": rand(2, 3, 4, 8)}),
}
ALL = [pytest.param(name, place, id=f"{name} {'-'.join(place)}") for name, c in CASES.items() for place in c.places]
SEEN: set[tuple[str, str, bytes]] = set()


def results(host: Host, name: str, place: tuple[str, str], mode: str) -> list[Tensor] | None:
    """Of the case lowered for a place, where it must be legal; None where the same graph was executed for another."""
    lowered = lower(host, CASES[name], place)
    key = (name, mode, lowered.model.SerializeToString(deterministic=True))
    if key in SEEN:
        return None
    SEEN.add(key)
    return run(lowered, CASES[name].args, mode)


@pytest.mark.parametrize("name, place", ALL)
def test_exact_execution_of_an_operator_is_its_reference_in_float64(host, name, place):
    case, mine = CASES[name], results(host, name, place, "exact")
    if mine is not None:
        wide = {n: x.double() if x.is_floating_point() else x for n, x in case.args.items()}
        compare(mine, reference(case, wide), 1e-12)


@pytest.mark.parametrize("name, place", ALL)
def test_native_execution_of_an_operator_is_its_reference(host, name, place):
    case, mine = CASES[name], results(host, name, place, "native")
    if mine is None:
        return
    theirs = reference(case, case.args)
    if name.startswith("select_keys"):  # rounded weights may swap neighbours
        mine, theirs = [m.sort().values for m in mine], [t.sort().values for t in theirs]
        assert (mine[0] != theirs[0]).float().mean() < 0.05
        return
    assert [m.dtype for m in mine] == [t.dtype for t in theirs]
    compare(mine, theirs, case.native)


# ---- what is chosen --------------------------------------------------------------------------------------------------


def nodes(host: Host, name: str, *place: str) -> list[str]:
    return lower(host, CASES[name], (place[0], place[1])).types


def test_angles_are_spread_over_channels_once_for_all_rotations(host):
    cos, sin = angles(2, 3, 64)

    def turn(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        return [ops.rope(x, cos, sin, True), ops.rope(y, cos, sin, True)]

    case = Case(turn, {"x": rand(2, 3, 4, 64), "y": rand(2, 3, 1, 64), "cos": cos, "sin": sin})
    types = lower(host, case, ("a3", "9.1")).types
    assert types.count("RotaryPositionEmbedding") == types.count("BroadcastTo") == types.count("Cast") == 2


def test_interleave_rope_is_not_used_and_why_is_said(host):
    for place in (("a3", "9.1"), ("950dt", "9.1")):
        made = lower(host, CASES["rope, neighbours"], place)
        assert "InterleaveRope" not in made.types
        assert "pairs stay where they are, unlike in InterleaveRope" in made.choices["rotation"].reason


def test_situ_is_one_operator_from_cann_9_2_on(host):
    assert nodes(host, "situ", "a3", "9.2") == ["SituGlu"]
    assert nodes(host, "situ_mul", "950dt", "9.2") == ["ConcatV2", "SituGlu"]
    old = lower(host, CASES["situ"], ("a3", "9.1"))
    assert {"Tanh", "Sigmoid", "Mul", "RealDiv"} <= set(old.types) and "SituGlu" not in old.types
    why = "SituGlu of builtin: built in since CANN 9.2, this is for 9.1"
    reason = old.choices["SiTU"].reason
    assert reason.startswith("element functions in float32; ") and reason.endswith(why)
    assert "DequantSituQuant of builtin: gives rows in INT8, which no product of these graphs takes" in reason
    new = lower(host, CASES["situ"], ("950dt", "9.2")).choices["SiTU"].reason
    assert "SituMxQuant of builtin: gives rows in MXFP8" in new


@pytest.mark.parametrize("name, types", [("situ", ["SplitV", "SituMul"]), ("situ_mul", ["SituMul"])])
@pytest.mark.parametrize("mode, tolerance", [("exact", 1e-12), ("native", 2**-7)])
def test_situ_by_a_kernel_of_ours_where_it_is_asked_first(host, name, types, mode, tolerance):
    case = CASES[name]
    lowered = lower(host, case, ("a3", "9.2"), ("own", "builtin"))
    assert lowered.types == types
    wide = {n: x.double() if mode == "exact" else x for n, x in case.args.items()}
    compare(run(lowered, case.args, mode), reference(case, wide), tolerance)


def test_rows_that_situ_makes_for_packed_experts_are_quantised_with_it_where_cann_can(family_bundle):
    """The first product of an expert reads rows as they come, so those are quantised alone."""
    types = open_bundle(family_bundle("kimi-k3", "950dt", weights_format="native")).graph("decode")["ops"]
    assert types["SituMxQuant"] == types["DynamicMxQuant"] == types["GroupedMatmul"] // 2
    both = MX_ROWS[0]
    assert both.operator == "SituMxQuant" and "since CANN 9.2" in not_there(both, target_of("950dt", cann="9.1"))
    assert not_there(both, target_of("950dt", cann="9.2")) == ""
    assert "no kernel" in not_there(both, target_of("a3", cann="9.2"))


K10 = [((1, 1), 0.71582), ((4, 25), 56.9593), ((100, 1000), 100.0), ((-100, 5), 0.0)]  # public case: betas 4 and 25


@pytest.mark.parametrize("mode, tolerance", [("exact", 1e-5), ("native", 1e-2)])  # printed digits; bfloat16 as it says
@pytest.mark.parametrize("providers", [("composed",), ("builtin",), ("own",)], ids=str)
@pytest.mark.parametrize("halves", [True, False])
def test_the_public_numbers_of_situ_come_out_of_every_way_to_make_it(host, halves, providers, mode, tolerance):
    gate, up = (torch.tensor([[float(pair[i])] for pair, _ in K10], dtype=BF16) for i in (0, 1))
    if halves:
        case = Case(lambda x: ops.situ(x, 4.0, 25.0), {"x": torch.cat([gate, up], 1)})
    else:
        case = Case(lambda gate, up: ops.situ_mul(gate, up, 4.0, 25.0), {"gate": gate, "up": up})
    lowered = lower(host, case, ("a3", "9.2"), tuple(dict.fromkeys((*providers, "builtin"))))
    assert {c.provider for c in lowered.choices.values()} == set(providers)
    (made,) = run(lowered, case.args, mode)
    for value, (_, expected) in zip(made.flatten().tolist(), K10, strict=True):
        assert value == pytest.approx(expected, rel=tolerance, abs=1e-6)


def test_a_recurrent_step_is_one_operator_where_it_takes_a_float32_memory(host):
    assert "RecurrentGatedDeltaRule" in nodes(host, "kda_step", "a3", "9.2")
    made = lower(host, CASES["kda_step"], ("a3", "9.1"))
    assert "RecurrentGatedDeltaRule" not in made.types and "ScatterNdUpdate" in made.types
    assert "takes a float32 memory since CANN 9.2" in made.choices["recurrent KDA"].reason


# ---- whose operators -------------------------------------------------------------------------------------------------

VLLM_ASCEND = ("builtin", "vllm-ascend", "composed")


def test_the_first_provider_that_can_serves_in_the_order_given_and_says_why(host):
    case = stepped(128, 128)
    for cann, providers, operator, provider in (
        ("9.2", VLLM_ASCEND, "RecurrentGatedDeltaRule", "builtin"),
        ("9.1", VLLM_ASCEND, "RecurrentKda", "vllm-ascend"),
        ("9.2", ("vllm-ascend", "builtin"), "RecurrentKda", "vllm-ascend"),
        ("9.2", ("own", "builtin", "composed"), "KdaStep", "own"),
        ("9.1", ("builtin", "own", "composed", "vllm-ascend"), "KdaStep", "own"),
        ("9.1", ("builtin", "composed", "vllm-ascend"), "GatherV2, Mul, ReduceSum, ScatterNdUpdate", "composed"),
    ):
        choice = lower(host, case, ("a3", cann), providers).choices["recurrent KDA"]
        assert (choice.operator, choice.provider) == (operator, provider)
    why = "RecurrentGatedDeltaRule of builtin: takes a float32 memory since CANN 9.2, this is for 9.1"
    assert choice.reason == f"float32 throughout, on every release; {why}"


def whole_step(bound: float | None) -> Case:
    """KDA's step as the layer has it, from the convolutions on."""
    args = {name: rand(3, 1, 4, 128) for name in ("q", "k", "v", "raw")}
    args |= {"logits": rand(3, 1, 4), "bias": rand(4, 128, dtype=F32), "log_rate": rand(4, dtype=F32)}
    args |= {"memory": rand(5, 4, 128, 128, dtype=F32), "slots": torch.tensor([3, 1, 4], dtype=I32)}

    def step(q, k, v, raw, logits, bias, log_rate, memory, slots):
        decay = ops.kda_gate(raw, bias, log_rate, bound)
        beta = torch.sigmoid(ops.at_least_f32(logits))
        return ops.kda_step(ops.l2_norm(q, 1e-6), ops.l2_norm(k, 1e-6), v, decay, beta, memory, slots, 128**-0.5)

    return Case(step, args, states=("memory",))


@pytest.mark.parametrize("bound", [None, -5.0, -7.0], ids=str)
@pytest.mark.parametrize("provider, operator", [("vllm-ascend", "RecurrentKda"), ("own", "KdaStep")])
@pytest.mark.parametrize("mode, tolerance", [("exact", 1e-12), ("native", 2**-7)])
def test_norms_gate_and_beta_are_in_the_kernel_that_makes_them_as_the_model_does(
    host, bound, provider, operator, mode, tolerance
):
    case = whole_step(bound)
    lowered = lower(host, case, ("a3", "9.2"), (provider, "builtin"))
    assert operator in lowered.types
    assert ("Sigmoid" in lowered.types) == (provider == "vllm-ascend" and bound == -7.0)  # its bound goes down to -5
    assert ("Rsqrt" in lowered.types) == (provider == "vllm-ascend")  # its own norm has no epsilon
    assert lowered.types == [operator] or provider == "vllm-ascend"
    wide = {n: x.double() if x.is_floating_point() and mode == "exact" else x for n, x in case.args.items()}
    compare(run(lowered, case.args, mode), reference(case, wide), tolerance)


def test_by_default_a_step_that_cann_has_not_is_composed_as_it_was_before_there_was_a_kernel_of_ours(host):
    assert lower(host, stepped(128, 128), ("a3", "9.1")).choices["recurrent KDA"].provider == "composed"


def test_sizes_that_a_kernel_of_ours_cannot_hold_are_composed(host):
    for name in ("short_conv of one token", "gated_rms_norm", "kda_chunk of three chunks"):  # 24, 8, and 8 channels
        (choice,) = lower(host, COMPOSED[name], ("a3", "9.2")).converted.choices
        assert choice.provider == "composed" and "of own: takes" in choice.reason


def test_what_nobody_serves_is_refused_with_why_each_cannot_and_who_was_not_asked(host):
    with pytest.raises(CompileError) as refused:
        lower(host, CASES["kda_step"], ("a3", "9.1"), ("builtin", "vllm-ascend", "own"))
    said = ("takes a float32 memory since CANN 9.2", "128 or 256, these are 16 and 8", "up to 256, these are 16 and 8")
    for words in (*said, "--providers does not name composed"):
        assert words in str(refused.value)


@pytest.mark.parametrize("place", PLACES, ids="-".join)
@pytest.mark.parametrize("provider, operator", [("vllm-ascend", "RecurrentKda"), ("own", "KdaStep")])
@pytest.mark.parametrize("mode, tolerance", [("exact", 1e-12), ("native", 2**-7)])
def test_a_step_of_another_provider_is_the_reference(host, place, provider, operator, mode, tolerance):
    case = stepped(128, 128)
    lowered = lower(host, case, place, (provider, "builtin"))
    assert lowered.types == [operator]
    wide = {n: x.double() if x.is_floating_point() and mode == "exact" else x for n, x in case.args.items()}
    compare(run(lowered, case.args, mode), reference(case, wide), tolerance)


def convolved(tokens: int, counts: list[int], lengths: list[int]) -> Case:
    """Rows that go on, start, are padded or stand still; where one starts, its slot holds no numbers."""
    args = {"x": rand(4, tokens, 3, 8), "weight": rand(3, 8, 4, dtype=F32), "window": rand(6, 3, 8, 3)}
    args["window"][5] = float("nan")
    args |= {"slots": torch.tensor([3, 5, 1, 4], dtype=I32)}
    args |= {"lengths": torch.tensor(lengths), "counts": torch.tensor(counts)}
    return Case(ops.short_conv, args, states=("window",))


def chunked(tokens: int, counts: list[int], lengths: list[int], decay: float = 1.0) -> Case:
    """Rows that go on, start, are padded or stand still; where one starts, its slot holds no numbers."""
    args = {name: torch.nn.functional.normalize(rand(4, tokens, 2, 8) + i, dim=-1) for i, name in enumerate("qk")}
    args |= {"v": rand(4, tokens, 2, 6), "decay": -decay * rand(4, tokens, 2, 8, dtype=F32).abs()}
    args |= {"beta": rand(4, tokens, 2, dtype=F32).sigmoid(), "memory": rand(6, 2, 6, 8, dtype=F32)}
    args["memory"][5] = float("nan")
    args |= {"slots": torch.tensor([3, 5, 1, 4], dtype=I32)}
    args |= {"lengths": torch.tensor(lengths), "counts": torch.tensor(counts)}
    real = (torch.arange(tokens) < torch.tensor(counts)[:, None]).double()[:, :, None, None]

    def mix(real: Tensor, **x: Tensor) -> tuple[Tensor, Tensor]:
        o, memory = ops.kda_chunk(**x, scale=0.35)
        return o * real.to(o.dtype), memory  # of padding nothing is said

    return Case(mix, args | {"real": real.to(BF16)}, states=("memory",))


COMPOSED = {
    "kda_chunk of less than a chunk": chunked(7, [7, 3, 1, 0], [19, 3, 5, 4]),
    "kda_chunk of three chunks": chunked(41, [41, 40, 17, 0], [60, 40, 19, 4]),
    "kda_chunk with decays that vanish": chunked(32, [32, 32, 20, 16], [64, 32, 33, 17], decay=40.0),
    "gated_rms_norm": Case(
        lambda x, gate, weight: ops.gated_rms_norm(x, gate, weight, 1e-5),
        {"x": rand(2, 3, 4, 8), "gate": rand(2, 3, 4, 8, scale=3.0), "weight": rand(8)},
    ),
    "sigmoid_gate": Case(
        lambda x, gate: ops.sigmoid_gate(x, gate), {"x": rand(2, 3, 4, 8), "gate": rand(2, 3, 4, 8, scale=3.0)}
    ),
    "residual_mix of one": mixed(1),
    "residual_mix of four": mixed(4),
    "short_conv of many tokens": convolved(7, [7, 3, 1, 0], [19, 3, 5, 4]),
    "short_conv of one token": convolved(1, [1, 1, 0, 1], [9, 1, 5, 2]),
}


@pytest.mark.parametrize("mode, tolerance", [("exact", 1e-12), ("native", 2**-7)])
@pytest.mark.parametrize("name", COMPOSED)
def test_a_composition_is_the_reference_without_a_type_of_ours(host, name, mode, tolerance):
    case = COMPOSED[name]
    lowered = lower(host, case, ("a3", "8.5"), ("builtin", "composed"))
    assert not [t for t in lowered.types if t in ROWS and ROWS[t].provider == "own"]
    wide = {n: x.double() if x.is_floating_point() and mode == "exact" else x for n, x in case.args.items()}
    compare(run(lowered, case.args, mode), reference(case, wide), tolerance)


def test_heads_are_padded_where_the_chip_or_release_wants_powers_of_two_and_the_cost_is_said(host):
    for place, padded in ((("a3", "9.1"), True), (("a3", "9.2"), True), (("950dt", "9.1"), False)):
        made = lower(host, CASES["sparse_attention of 3 heads"], place)
        assert (made.types.count("PadV3"), made.types.count("Slice")) == ((2, 1) if padded else (0, 0))
        reason = made.choices["sparse attention"].reason
        assert ("3 heads padded to 4, a power of two, and stripped: 33% more queries" in reason) == padded
    for cann, padded in (("8.5", True), ("9.1", True), ("9.2", False)):
        made = lower(host, CASES["latent_attention of 6 heads"], ("950dt", cann))
        assert (made.types.count("PadV3"), made.types.count("Slice")) == ((2, 1) if padded else (0, 0))
        assert ("6 heads padded to 8" in made.choices["attention to latents"].reason) == padded


@pytest.mark.parametrize(
    "place, heads, narrow",
    [
        (("a3", "8.5"), 64, True),
        (("a3", "9.1"), 5, False),
        (("a2", "9.1"), 5, False),
        (("950dt", "9.1"), 8, True),
        (("950dt", "9.2"), 8, True),
    ],
    ids=str,
)
def test_index_heads_and_weights_are_what_the_indexer_takes(host, place, heads, narrow):
    made = lower(host, CASES["select_keys of 5 heads"], place)
    node = next(op for op in made.model.graph[0].op if op.type == "LightningIndexer")
    assert [shape_of(d)[2] for d in node.input_desc if d.name in ("query", "weights")] == [heads, heads]
    weights = next(d for d in node.input_desc if d.name == "weights")
    assert dtype_of(weights) == (BF16 if narrow else F32)
    reason = made.choices["selection of keys"].reason
    assert (f"5 heads padded to {heads}" in reason) == (heads != 5)
    assert ("weights rounded to bfloat16" in reason) == narrow


def test_scores_are_not_scaled_since_their_order_alone_counts(host):
    assert set(nodes(host, "select_keys of 64 heads", "a3", "9.1")) == {"Cast", "Reshape", "LightningIndexer"}


def test_keys_as_wide_as_values_are_attended_to_without_rope_inputs(host):
    assert nodes(host, "attention, 128 + 64 to 128", "a3", "9.1").count("ConcatV2") == 0
    made = lower(host, CASES["attention, 192 + 64 to 256"], ("a3", "9.1"))
    assert made.types.count("ConcatV2") == 2
    assert made.choices["attention to expanded keys"].operator == "ConcatV2, FusedInferAttentionScore"


def test_widths_that_cann_does_not_take_are_refused_with_those_it_does(host):
    with pytest.raises(CompileError, match=r"attention of 128 \+ 64 channels to values of 64: .* takes 128 \+ 64"):
        lower(host, expanded(3, 128, 64), ("a3", "9.1"))


def test_canns_sparse_attention_on_950_wants_cann_9_1(host):
    with pytest.raises(CompileError, match=r"on 950dt with CANN 8.5; expected CANN 9.1 or later"):
        lower(host, CASES["select_keys of 64 heads"], ("950dt", "8.5"))
    choice = lower(host, CASES["sparse_attention of 8 heads"], ("950dt", "8.5")).choices["sparse attention"]
    assert choice.provider == "own"
    assert "SparseFlashAttention of builtin: built in since CANN 9.1, this is for 8.5" in choice.reason


@pytest.mark.parametrize("place", PLACES, ids="-".join)
@pytest.mark.parametrize("name", ["sparse_attention of 3 heads", "sparse_attention_lse of 3 heads"])
@pytest.mark.parametrize("mode, tolerance", [("exact", 1e-12), ("native", 2**-7)])
def test_our_sparse_attention_takes_any_heads_as_they_are_and_is_the_reference(host, place, name, mode, tolerance):
    case = CASES[name]
    lowered = lower(host, case, place, ("own", "builtin", "composed"))
    assert set(lowered.types) - {"Greater", "SelectV2"} == {"SparseAttend", "Reshape"}  # pools get their head's dim
    wide = {n: x.double() if x.is_floating_point() and mode == "exact" else x for n, x in case.args.items()}
    compare(run(lowered, case.args, mode), reference(case, wide), tolerance)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"heads": 129}, "takes up to 128 heads, these are 129"),
        ({"q_rope": 24}, "takes multiples of 16 channels up to 512 and 64, these are 512 and 24"),
        ({"dtype": F32}, "takes bfloat16 or float16, these are torch.float32"),
    ],
    ids=str,
)
def test_what_our_sparse_attention_does_not_take_is_said(host, change, said):
    args, dtype = attended(change.get("heads", 3)).args, change.get("dtype", BF16)
    args = {n: x.to(dtype) if x.is_floating_point() else x for n, x in args.items()}
    args |= {n: args[n][..., : change.get("q_rope", 64)].contiguous() for n in ("q_rope", "rope_pool")}
    case = Case(lambda **x: ops.sparse_attention_lse(**x, scale=0.1), args)  # of three queries: CANN's cannot
    with pytest.raises(CompileError, match=f"SparseAttend of own: {said}"):
        lower(host, case, ("a3", "9.1"), ("own", "builtin"))


def test_queries_that_are_several_of_a_part_of_a_cache_are_ours(host):
    case = Case(lambda **x: ops.sparse_attention_lse(**x, scale=0.1), attended(3).args)
    choice = lower(host, case, ("a3", "9.1")).choices["sparse attention to a part of a cache"]
    assert choice.provider == "own" and "reads for one query a row, these are 3" in choice.reason


def test_a_choice_names_the_line_that_asked_for_it_and_is_said_once(host):
    def twice(x: Tensor, norm: Tensor, query: Tensor) -> Tensor:
        for _ in range(2):
            x = attn_residual(AttnResidual(norm=norm, query=query), [x, x], 1e-5)
        return x

    made = lower(host, Case(twice, {"x": rand(1, 2, 16), "norm": rand(16), "query": rand(16)}), ("a3", "9.2"))
    (choice,) = made.converted.choices
    assert (choice.kind, choice.operator) == ("attention over depth", "AttnResMix")
    assert choice.source.startswith("layers/attn_residual.py:")


def test_a_state_that_no_output_needs_is_written_all_the_same(host):
    """A dense layer of a model with indexers keeps their keys for the day that the sequence is longer."""
    target = target_of("a3")
    prototypes = Prototypes(target.soc, host.root)
    args = {"x": {"key": rand(1, 2, 128), "slot_mapping": torch.tensor([16, 17])}, "s": {"pool": rand(3, PAGE, 128)}}

    def write(x: dict[str, Tensor], s: dict[str, Tensor]) -> dict[str, Any]:
        return {"out": x["key"].neg(), "s": {"pool": ops.index_write(x["key"], s["pool"], x["slot_mapping"])}}

    captured = capture(write, {g: {n: x.to("meta") for n, x in group.items()} for g, group in args.items()})
    piece = convert_piece("write", captured, target, host, prototypes)
    assembly = Assembly("whole")
    edges = assembly.stamp(piece, "a/", assembly.input)
    model = assembly.finish(edges, prototypes)
    check_graph(model, target, prototypes, weights=set(), states={"s.pool"})
    executor = Executor(model)
    given = {"x.key": args["x"]["key"], "x.slot_mapping": args["x"]["slot_mapping"]}
    ran = executor.run(given, {"s.pool": args["s"]["pool"].view(48, 128)}, "native")
    assert torch.equal(ran.states["s.pool"][16:18], args["x"]["key"][0])


def test_a_cache_that_is_written_is_attended_to_without_a_view_in_between(host):
    """ScatterPaKvCache, ScatterNdUpdate and the operators of sparse attention want the same pools."""
    args = {"latent": rand(3, 1, 512), "rope": rand(3, 1, 64), "q": rand(3, 1, 4, 512), "q_rope": rand(3, 1, 4, 64)}
    args |= {"slots": torch.tensor([24, 32, 0]), "selected": torch.zeros(3, 1, 8, dtype=I32), "block_table": TABLE}
    args |= {"lengths": LENGTHS, "counts": torch.tensor([1, 1, 0])}
    args |= {"latents": rand(7, PAGE, 512), "ropes": rand(7, PAGE, 64)}

    def step(latent, rope, q, q_rope, slots, selected, block_table, lengths, counts, latents, ropes):
        latents, ropes = ops.cache_write(latent, rope, latents, ropes, slots)
        o = ops.sparse_attention(q, q_rope, latents, ropes, selected, block_table, lengths, counts, 0.1)
        return o, latents.neg(), ropes.neg(), latents, ropes

    made = lower(host, Case(step, args, states=("latents", "ropes")), ("a3", "9.1"))
    node = next(op for op in made.model.graph[0].op if op.type == "SparseFlashAttention")
    read = {d.name: edge for d, edge in zip(node.input_desc, data_edges(node), strict=True)}
    assert [read[n] for n in ("key", "value", "key_rope")] == ["ScatterPaKvCache:0"] * 2 + ["ScatterPaKvCache:1"]
