"""Each operator of the family lowered alone, for every chip and release: legal there, and the same as its reference."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kimi_graph import ops
from kimi_graph.compile.capture import capture
from kimi_graph.compile.checks import check_graph
from kimi_graph.compile.convert import Converted, convert
from kimi_graph.compile.executor import Executor, infer_shapes
from kimi_graph.compile.ge_proto import ModelDef, shape_of
from kimi_graph.compile.lower import Choice
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.stamp import alias_states
from kimi_graph.compile.targets import target as target_of
from kimi_graph.compile.torchair_host import Host
from kimi_graph.errors import CompileError, KimiGraphError

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


def lower(host: Host, case: Case, where: tuple[str, str]) -> Lowered:
    """Captured, converted, states in place, described, held against every rule of the target."""
    target = target_of(where[0], cann=where[1])
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


def latent(heads: int) -> Case:
    args = {"q_latent": rand(3, 1, heads, 512), "q_rope": rand(3, 1, heads, 64), "latent_pool": rand(7, PAGE, 512)}
    args |= {"rope_pool": rand(7, PAGE, 64), "block_table": TABLE, "lengths": LENGTHS}
    return Case(lambda **x: ops.latent_attention(**x, scale=192**-0.5), args)


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


CASES = {
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
    "latent_attention of 4 heads": latent(4),
    "latent_attention of 6 heads": latent(6),
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
    "residual_mix of one": mixed(1),
    "residual_mix of four": mixed(4),
    "layer_norm": Case(
        lambda x, weight, bias: ops.layer_norm(x, weight, bias, 1e-6),
        {"x": rand(2, 3, 16) + 2, "weight": rand(16), "bias": rand(16)},
    ),
    "a gate on heads": Case(lambda x, gate: x * torch.sigmoid(gate), {"x": rand(2, 3, 4, 8), "gate": rand(2, 3, 4, 8)}),
}
ALL = [pytest.param(name, place, id=f"{name} {'-'.join(place)}") for name, c in CASES.items() for place in c.places]


@pytest.mark.parametrize("name, place", ALL)
def test_exact_execution_of_an_operator_is_its_reference_in_float64(host, name, place):
    case = CASES[name]
    wide = {n: x.double() if x.is_floating_point() else x for n, x in case.args.items()}
    compare(run(lower(host, case, place), case.args, "exact"), reference(case, wide), 1e-12)


@pytest.mark.parametrize("name, place", ALL)
def test_native_execution_of_an_operator_is_its_reference(host, name, place):
    case = CASES[name]
    mine, theirs = run(lower(host, case, place), case.args, "native"), reference(case, case.args)
    if name.startswith("select_keys"):  # rounded weights may swap neighbours
        mine, theirs = [m.sort().values for m in mine], [t.sort().values for t in theirs]
        assert (mine[0] != theirs[0]).float().mean() < 0.05
        return
    assert [m.dtype for m in mine] == [t.dtype for t in theirs]
    compare(mine, theirs, case.native)
