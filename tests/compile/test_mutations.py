"""A bundle that was changed in any way is noticed: random changes to graphs, weight plan and manifest.

Each change is looked for as `verify` does, in its order: what the bundle says of itself is held against its graphs, the
executor reads the graph, runs it exactly and is compared with the model after every step; last, the compiler's checks.
Hashes are left out, they would notice everything.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.checkpoint import Checkpoint, load_params
from kimi_graph.compile import air
from kimi_graph.compile.bundle import LOCAL, Bundle, open_bundle
from kimi_graph.compile.caches import kept_states, model_states
from kimi_graph.compile.checks import check_graph
from kimi_graph.compile.executor import Executor, Selections
from kimi_graph.compile.ge_proto import ModelDef, get_attr, set_attr, split_edge, tensor_def, tensor_value
from kimi_graph.compile.manifest import check_claims, is_weight
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.targets import target
from kimi_graph.compile.verify import (
    EXACT_TOLERANCE,
    ModelSide,
    Step,
    generated_inputs,
    graph_weights,
    largest,
    script,
)
from kimi_graph.errors import KimiGraphError
from kimi_graph.read_config import load_config
from tests.compile.family import FAMILY
from tests.compile.mutate import Parts, count_again, mutants, sweep

EACH, SEED = 24, 0  # changes of each kind, 410 in all


@dataclass(frozen=True)
class Moment:
    """A step of the script, the model's states before and after it, and its logits."""

    step: Step
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    logits: Tensor


class Proof:
    """The model's side of a verification, computed once, and a bundle's parts to hold against it."""

    def __init__(self, folder, checkpoint, host) -> None:
        self.bundle = open_bundle(folder)
        self.config = load_config(checkpoint)
        params = load_params(Checkpoint.open(checkpoint), self.config, dtype=torch.float64)
        self.params = dict(tree.items(params))
        graphs = self.bundle.manifest["graphs"]
        self.phases = {g["name"]: g["phase"] for g in graphs}
        models = {g["name"]: air.from_bytes(self.bundle.graph_bytes(g), g["file"]) for g in graphs}
        self.parts = Parts(models, self.bundle.weights, self.bundle.manifest)
        self.moments = list(self._moments(params))
        self.target, self.prototypes = target("a3"), Prototypes("a3", host.root)

    def _moments(self, params) -> Iterator[Moment]:
        model = ModelSide(self.config, self.bundle.manifest["state"], params)
        for step in script(self.bundle, self.config, steps=2, seed=0):
            before = _copy(model.named_states())
            logits = model.step(step)
            after = {} if step.phase == "vision" else _copy(model.named_states())  # a picture has no state
            yield Moment(step, before, after, logits)

    def noticed(self, parts: Parts) -> str:
        """Who notices that `parts` is not the bundle; empty where nobody does."""
        try:
            check_claims(Bundle(self.bundle.folder, parts.manifest, parts.plan), self.config, parts.models)
        except KimiGraphError:
            return "claims"
        changed = [n for n, m in parts.models.items() if m != self.parts.models[n] or parts.plan != self.parts.plan]
        for name in changed:
            try:
                executor = Executor(parts.models[name])
            except KimiGraphError:
                return "executor"
            try:
                if self._differs(name, executor, parts):
                    return "values"
            except KimiGraphError:
                return "executor"
        return "checks" if any(self._refused(name, parts.models[name]) for name in changed) else ""

    def _differs(self, name: str, executor: Executor, parts: Parts) -> bool:
        """Whether logits or a state are not the model's, after any step. Each step starts from the model's states."""
        plan = parts.plan
        kv_dtype = self.bundle.manifest["state"]["kv_dtype"]
        weights = graph_weights(plan, parts.models[name], self.params) | generated_inputs(plan)
        shapes = {s["name"]: s["graph_shape"] for s in parts.manifest["state"]["states"]}
        for moment in self.moments:
            if moment.step.phase != self.phases[name]:
                continue
            given = weights | moment.step.named
            before = kept_states(self.config, kv_dtype, moment.before, exact=True)
            states = {s: before[s].view(shapes[s]) for s in executor.states}
            ran = executor.run({n: given[n] for n in executor.inputs}, states, "exact", selections=Selections())
            used = moment.step.used
            pairs = [(ran.outputs[0][used], moment.logits[used])]
            after = model_states(self.config, kv_dtype, ran.states)
            pairs += [(after[s].view(v.shape)[1:], v[1:]) for s, v in moment.after.items()]
            if not all(largest(mine, theirs) <= EXACT_TOLERANCE for mine, theirs in pairs):
                return True
        return False

    def _refused(self, name: str, model: ModelDef) -> bool:
        states = {op.name for op in self.parts.models[name].graph[0].op if op.type == "RefData"}
        weights = {op.name for op in model.graph[0].op if is_weight(op)}
        try:
            check_graph(model, self.target, self.prototypes, weights=weights, states=states)
        except KimiGraphError:
            return True
        return False


def _copy(states: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in states.items()}


@pytest.fixture(scope="module")
def proof(bundle, small, host) -> Proof:
    return Proof(bundle, small, host)


# ---- changes that mean the same --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Same:
    """Changes that no run can tell from the original, and why.

    `words` of a change (see `mutate`) hold all of `signs`; `example` makes one in a graph.
    """

    reason: str
    signs: tuple[str, ...]
    phase: str
    example: Callable[[ModelDef], None]


def _scaled(type_: str, attribute: str) -> Callable[[ModelDef], None]:
    def change(model: ModelDef) -> None:
        op = next(op for op in model.graph[0].op if op.type == type_)
        set_attr(op, attribute, get_attr(op, attribute) * 1.01)

    return change


def _attribute(type_: str, attribute: str, old: object, new: object) -> Callable[[ModelDef], None]:
    def change(model: ModelDef) -> None:
        op = next(op for op in model.graph[0].op if op.type == type_)
        assert get_attr(op, attribute) == old
        set_attr(op, attribute, new)

    return change


def _type(old: str, new: str) -> Callable[[ModelDef], None]:
    def change(model: ModelDef) -> None:
        next(op for op in model.graph[0].op if op.type == old).type = new

    return change


def _other_side(model: ModelDef) -> None:
    op = next(op for op in model.graph[0].op if op.name == "head/Unsqueeze_1")
    assert list(op.output_desc[0].shape.dim)[1:] == [1, 1]
    set_attr(op, "axes", [1])


SAME = (
    Same(
        "softplus gives way to x itself at the threshold: there the two differ by 2e-9, and no input is so large",
        ("SoftplusV2.threshold 20.0",),
        "prefill",
        _scaled("SoftplusV2", "threshold"),
    ),
    Same(
        "the router's eps of 1e-20 stands beside a sum of sigmoids; it is there for a sum of zero",
        ("MoeGatingTopK.eps 9.99",),
        "decode",
        _scaled("MoeGatingTopK", "eps"),
    ),
    Same(
        "MatMulV2 is MatMul with an offset that is not given (BatchMatMulV2 likewise): CANN keeps both",
        ("MatMul -> ", "MatMulV"),
        "decode",
        _type("MatMul", "MatMulV2"),
    ),
    Same(
        "negative_index_support is about negative indices alone, and no token is one",
        ("GatherV2.negative_index_support",),
        "decode",
        _attribute("GatherV2", "negative_index_support", False, True),
    ),
    Same(
        "expert_capacity is read only where rows are dropped (drop_pad_mode 1)",
        ("MoeInitRoutingV3.expert_capacity 0 -> -1",),
        "decode",
        _attribute("MoeInitRoutingV3", "expert_capacity", 0, -1),
    ),
    Same(
        "a dimension of one may stand before or behind another of one",
        ("head/Unsqueeze_1 Unsqueeze.axes [2] -> [1]",),
        "prefill",
        _other_side,
    ),
)


def _index_factor(model: ModelDef) -> None:
    """1 % more of the index weights' factor."""
    ops = {op.name: op for op in model.graph[0].op}
    indexer = next(op for op in ops.values() if op.type == "LightningIndexer")
    value = ops[split_edge(ops[split_edge(indexer.input[2])[0]].input[1])[0]].attr["value"].t
    value.CopyFrom(tensor_def(tensor_value(value) * 1.01))


def _index_weights(model: ModelDef) -> None:
    """The factor of the index weights left out."""
    ops = {op.name: op for op in model.graph[0].op}
    indexer = next(op for op in ops.values() if op.type == "LightningIndexer")
    product = ops[split_edge(indexer.input[2])[0]]
    assert product.type == "Mul"
    indexer.input[2] = product.input[0]
    sweep(model)


def _written_cache(model: ModelDef) -> None:
    """A cache read under its own name, by a node that waits for the write to it all the same."""
    ops = {op.name: op for op in model.graph[0].op}
    reader = next(op for op in ops.values() if op.type == "SparseFlashAttention")
    writer = ops[split_edge(reader.input[1])[0]]
    assert writer.type == "ScatterPaKvCache"
    reader.input[1] = writer.input[1]
    assert any(edge.startswith(f"{writer.name}:") for edge in reader.input)


SAME_SPARSE = (
    Same(
        "the index weights' factor is one positive number for all: it changes no order, and only the order is read",
        (".mla/Mul Mul bypassed by",),
        "decode",
        _index_weights,
    ),
    Same(
        "so is a factor a little larger: 32 ** -0.5 in these models",
        ("(read by Mul) 0.1767766922712326",),
        "decode",
        _index_factor,
    ),
    Same(
        "a cache is written in place: under its own name it is the written one too, for who waits for the write",
        ("ScatterPaKvCache", " s.layers.", ".mla.latent"),
        "decode",
        _written_cache,
    ),
)


@pytest.mark.parametrize("same", SAME, ids=lambda s: s.signs[0])
def test_a_change_that_means_the_same_is_not_noticed(proof, same):
    """So that no explanation outlives its reason."""
    changed = proof.parts.copy()
    name = next(n for n, phase in proof.phases.items() if phase == same.phase)
    same.example(changed.models[name])
    count_again(changed)
    assert air.to_bytes(changed.models[name]) != air.to_bytes(proof.parts.models[name])
    assert proof.noticed(changed) == ""


@pytest.mark.parametrize("same", SAME_SPARSE, ids=lambda s: s.signs[0])
def test_a_change_that_means_the_same_to_a_selection_is_not_noticed(family_bundle, host, same):
    test_a_change_that_means_the_same_is_not_noticed(family_proof(family_bundle, host, "deepseek-v3.2"), same)


def test_the_bundle_itself_is_what_it_should_be(proof):
    changed = proof.parts.copy()
    changed.plan["of"] = "this test"  # so that it is run like a changed one
    assert proof.noticed(changed) == ""


# ---- changes that mean something -------------------------------------------------------------------------------------


@pytest.mark.mutation
def test_random_changes_are_noticed(proof):
    """At least 200 changes, at least 99 % of them noticed, the rest explained."""
    assert random_changes(proof, SEED, EACH) >= 200


FEW = 8  # changes of each kind where there are two more kinds of models
OTHERS = [
    ("kimi-k3.1-pro", "bf16", FEW),
    ("deepseek-v3.2", "int8", FEW),
    *(pytest.param(name, "bf16", EACH, marks=pytest.mark.heavy) for name in FAMILY),
]


@pytest.mark.mutation
@pytest.mark.parametrize("name, kv_dtype, each", OTHERS)
def test_random_changes_to_other_models_are_noticed(family_bundle, host, name, kv_dtype, each):
    """Residual mixes, selections of keys, pictures, caches in 8 bits; above: the same promises."""
    proof = family_proof(family_bundle, host, name, kv_dtype)
    unchanged = proof.parts.copy()
    unchanged.plan["of"] = "this test"
    assert proof.noticed(unchanged) == ""
    assert random_changes(proof, SEED, each) >= 100


def family_proof(family_bundle, host, name, kv_dtype="bf16") -> Proof:
    folder = family_bundle(name, "a3", kv_dtype=kv_dtype)
    return Proof(folder, json.loads((folder / LOCAL).read_bytes())["checkpoint"], host)


def random_changes(proof, seed, each):
    """Make and look for them; how many there were."""
    noticed: Counter[str] = Counter()
    survived, unexplained = [], []
    for kind, words, parts in mutants(proof.parts, seed, each):
        who = proof.noticed(parts)
        noticed[who] += 1
        if not who:
            survived.append(words)
            if not any(all(sign in words for sign in same.signs) for same in SAME + SAME_SPARSE):
                unexplained.append(f"{kind}: {words}")
    total = sum(noticed.values())
    print(f"{total} changes: {dict(noticed)}; not noticed: {survived}")
    assert not unexplained, "\n".join(unexplained)
    assert len(survived) <= total / 100
    return total
