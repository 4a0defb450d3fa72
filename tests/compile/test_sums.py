"""Sums over ranks, proved from a bundle's files: what compile writes passes; each that is left out, doubled or late is
named (public case K8)."""

import pytest

from kimi_graph import tree
from kimi_graph.compile import air, driver, lint, phases
from kimi_graph.compile.bundle import open_bundle
from kimi_graph.compile.ge_proto import ModelDef, OpDef, shape_of
from kimi_graph.compile.recipe import to_json
from kimi_graph.compile.sharded import dims_of
from kimi_graph.compile.sums import check_sums, viewed, weight_dims
from kimi_graph.compile.targets import target
from kimi_graph.compile.verify import bundle_config
from kimi_graph.errors import BundleError
from kimi_graph.models import model_specs
from kimi_graph.models.decoder import state_specs
from kimi_graph.parallel import Mesh, preset
from tests.compile.family import small_model

MODELS = [("kimi-k3.1-pro", "tp=2"), ("glm-5.2", "dp=2,tp=2"), ("kimi-linear-48b", "pp=2,dp=2,tp=2,ep=2")]


@pytest.fixture(params=MODELS, ids=" ".join)
def files(request, family_bundle):
    """A bundle of a mesh, read."""
    name, mesh = request.param
    bundle = open_bundle(family_bundle(name, "a3", mesh=Mesh.parse(mesh), batch=4))
    models = {g["name"]: air.from_bytes(bundle.graph_bytes(g), g["file"]) for g in bundle.manifest["graphs"]}
    return lint.Files(bundle, bundle_config(bundle), models)


def changed(files, name: str, change) -> str:
    """What the proof says of a bundle one of whose graphs was changed."""
    model = ModelDef.FromString(files.models[name].SerializeToString())
    change(model.graph[0].op)
    with pytest.raises(BundleError) as error:
        lint._sums(lint.Files(files.bundle, files.config, files.models | {name: model}))
    return str(error.value)


def reductions(model: ModelDef) -> list[OpDef]:
    return [op for op in model.graph[0].op if op.type == "HcomAllReduce"]


def skip(name: str):
    """Whoever reads a node reads what it reads."""

    def change(ops) -> None:
        (edge,) = [op.input[0] for op in ops if op.name == name]
        for op in ops:
            op.input[:] = [edge if e == f"{name}:0" else e for e in op.input]

    return change


def twice(name: str):
    """A second reduction of what the first gave."""

    def change(ops) -> None:
        at = [op.name for op in ops].index(name)
        for op in list(ops)[at + 1 :]:
            op.input[:] = ["again:0" if e == f"{name}:0" else e for e in op.input]
        again = OpDef.FromString(ops[at].SerializeToString())
        again.name, again.input[:] = "again", [f"{name}:0"]
        made = [OpDef.FromString(op.SerializeToString()) for op in ops]
        del ops[:]
        ops.extend([*made[: at + 1], again, *made[at + 1 :]])

    return change


def test_what_compile_writes_is_proved(files):
    found = lint._sums(files)
    count = sum(sum(op.type.startswith("Hcom") for op in m.graph[0].op) for m in files.models.values())
    assert found == f"{count:,} collectives: each sum is taken once, and before what is not linear"


def test_every_reduction_that_is_left_out_is_noticed(files):
    for name, model in files.models.items():
        for op in reductions(model):
            said = changed(files, name, skip(op.name))
            assert said.startswith(f"{name}: ") and "along" in said, op.name


def test_every_reduction_that_is_taken_twice_is_noticed(files):
    for name, model in files.models.items():
        for op in reductions(model):
            said = changed(files, name, twice(op.name))
            assert "again (HcomAllReduce): takes the sum along" in said and "where all ranks have the same" in said


def test_a_norm_of_latents_before_their_sum_is_refused(family_bundle):
    """Public case K8: routed experts give summands of latents; the norm after them needs all."""
    bundle = open_bundle(family_bundle("kimi-k3.1-pro", "a3", mesh=Mesh.parse("tp=2"), batch=4))
    models = {g["name"]: air.from_bytes(bundle.graph_bytes(g), g["file"]) for g in bundle.manifest["graphs"]}
    files = lint.Files(bundle, bundle_config(bundle), models)
    (name,) = [n for n in models if n.startswith("decode")]
    first = next(op.name for op in reductions(models[name]) if ".moe/" in op.name)
    said = changed(files, name, skip(first))
    assert ".moe/RmsNorm" in said and "reads a summand along tensor; the sum has to be taken first" in said


def test_a_state_that_is_said_to_be_the_same_is(family_bundle):
    bundle = open_bundle(family_bundle("kimi-linear-48b", "a3", mesh=Mesh.parse("tp=2"), batch=4))
    models = {g["name"]: air.from_bytes(bundle.graph_bytes(g), g["file"]) for g in bundle.manifest["graphs"]}
    state = next(s for s in bundle.manifest["state"]["states"] if s["name"].endswith("kda.memory"))
    state["over"] = [[], [], [], []]
    with pytest.raises(BundleError, match=r"kda\.memory, written by .* is not the same along tensor"):
        lint._sums(lint.Files(bundle, bundle_config(bundle), models))


T, D = ("tensor",), ("data",)


@pytest.mark.parametrize(
    "shape, over, made, want",
    [
        ([4, 128, 256], [T, (), ()], [512, 256], [T, ()]),
        ([256, 4, 128], [(), T, ()], [256, 512], [(), T]),
        ([256, 1, 128], [(), T, ()], [256, 128], [(), T]),  # one head a rank
        ([1, 128, 256], [T, (), ()], [128, 256], [T, ()]),
        ([1, 2, 64, 32], [(*D, *T), (), (), ()], [1, 128, 32], [(*D, *T), (), ()]),  # one expert a rank
        ([8, 64], [T, D], [8, 64], [T, D]),
    ],
)
def test_dimensions_of_a_view_keep_their_axes(shape, over, made, want):
    assert viewed(shape, over, made) == want


def test_a_weight_is_split_where_its_steps_leave_it_so():
    entry = {
        "shape": [4, 256, 512],
        "over": [["tensor"], [], []],
        "steps": [["slice", 1, 0, 128], ["permute", 1, 0, 2]],
    }
    assert weight_dims(entry, (128, 2, 512), {"tensor": 2}) == ((), T, ())
    packed = {"shape": [8, 64, 32], "over": [["tensor"], [], []], "steps": [["pack", "int4", "weight"]]}
    assert weight_dims(packed, (4, 2, 4, 16, 32), {"tensor": 2}) == (T, (), (), (), ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options", [("kimi-linear-48b", {"weights_format": "int4"}), ("deepseek-v3.2", {"kv_dtype": "int8"})]
)
def test_packed_experts_and_caches_in_8_bits_are_proved_too(family_bundle, name, options):
    bundle = open_bundle(family_bundle(name, "a3", mesh=Mesh.parse("dp=2,tp=2"), batch=4, **options))
    models = {g["name"]: air.from_bytes(bundle.graph_bytes(g), g["file"]) for g in bundle.manifest["graphs"]}
    files = lint.Files(bundle, bundle_config(bundle), models)
    assert lint._sums(files)
    for graph, model in models.items():
        for op in reductions(model):
            assert "along" in changed(files, graph, skip(op.name))


# ---- graphs that no bundle has yet -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("mesh, options", [
    ("cp=2,tp=2", {}), ("tp=2", {"split_cache": True}), ("dp=2,tp=2", {"exchange": True}), ("cp=2,dp=2,tp=2,ep=2", {}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["kimi-k3.1-pro", "glm-5.2", "kimi-linear-48b"])
def test_graphs_of_other_meshes_are_proved(host, name, mesh, options, phase):
    """Tokens shared out, caches split, rows sent: every sum is taken once, and each that is left out is noticed."""
    c, on = small_model(name), Mesh.parse(mesh)
    rules = preset(c, on, phase, **options)
    rows, tokens, pages = 4, 1 if phase == "decode" else 16, 8
    slots, pool = phases.pools(rules, rows, pages)
    b = phases.Bucket(
        phase=phase, rows=rows, tokens=tokens, page=16, pages=pool, sequence_pages=pages, slots=slots, images=4
    )
    request = driver.Request(config=c, target=target("a3"), phases=(phase,))
    graph = driver.build_graph(request, b, host, rules=rules)
    ops, axes, specs = graph.model.graph[0].op, phases.named_axes(c, b), dict(tree.items(model_specs(c)))
    dims = {}
    for op in ops:
        if op.name in graph.weights:
            path, steps = graph.weights[op.name]
            entry = {"shape": specs[path].shape, "over": [rules.on(a) for a in specs[path].axes]}
            entry["steps"] = to_json(steps)
            dims[op.name] = weight_dims(entry, shape_of(op.output_desc[0]), on.axes)
        elif op.type == "Data" and not op.name.startswith("own_index.") and op.name != "causal_mask":
            dims[op.name] = dims_of(rules, axes(op.name))
    for i, spec in enumerate(state_specs(c, slots=slots, pages=pool, page=16, dtype=c.dtype)):
        for leaf, s in tree.items(spec):
            dims[f"s.layers.{i}.{c.layers[i].kinds[0]}.{leaf}"] = [rules.on(a) for a in s.axes]
    results = [("logits", dims_of(rules, axes("logits")))]
    assert check_sums(graph.model, dims, results) == sum(op.type.startswith("Hcom") for op in ops)
    for op in reductions(graph.model):
        model = ModelDef.FromString(graph.model.SerializeToString())
        skip(op.name)(model.graph[0].op)
        with pytest.raises(BundleError, match="along"):
            check_sums(model, dims, results)
