"""Sums over ranks, proved from a bundle's files: what compile writes passes; each that is left out, doubled or late is
named (public case K8)."""

from pathlib import Path

import pytest

from kimi_graph.compile import air, lint
from kimi_graph.compile.bundle import open_bundle
from kimi_graph.compile.ge_proto import ModelDef, OpDef
from kimi_graph.compile.sums import viewed, weight_dims
from kimi_graph.compile.verify import bundle_config
from kimi_graph.errors import BundleError
from kimi_graph.parallel import Mesh

MODELS = [("kimi-k3.1-pro", "tp=2"), ("glm-5.2", "dp=2,tp=2"), ("kimi-linear-48b", "pp=2,dp=2,tp=2,ep=2")]


@pytest.fixture(params=MODELS, ids=" ".join)
def files(request, family_bundle):
    """A bundle of a mesh, read."""
    name, mesh = request.param
    return read(family_bundle(name, "a3", mesh=Mesh.parse(mesh), batch=4))


def read(folder: Path) -> lint.Files:
    bundle = open_bundle(folder)
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
    """Companion of public case K8: an all-reduce too many is refused."""
    for name, model in files.models.items():
        for op in reductions(model):
            said = changed(files, name, twice(op.name))
            assert "again (HcomAllReduce): takes the sum along" in said and "where all ranks have the same" in said


def test_a_norm_of_latents_before_their_sum_is_refused(family_bundle):
    """Public case K8: routed experts give summands of latents; the norm after them needs all."""
    files = read(family_bundle("kimi-k3.1-pro", "a3", mesh=Mesh.parse("tp=2"), batch=4))
    (name,) = [n for n in files.models if n.startswith("decode")]
    first = next(op.name for op in reductions(files.models[name]) if ".moe/" in op.name)
    said = changed(files, name, skip(first))
    assert ".moe/RmsNorm" in said and "reads a summand along tensor; the sum has to be taken first" in said


def test_a_state_that_is_said_to_be_the_same_is(family_bundle):
    files = read(family_bundle("kimi-linear-48b", "a3", mesh=Mesh.parse("tp=2"), batch=4))
    state = next(s for s in files.bundle.manifest["state"]["states"] if s["name"].endswith("kda.memory"))
    state["over"] = [[], [], [], []]
    with pytest.raises(BundleError, match=r"kda\.memory, written by .* is not the same along tensor"):
        lint._sums(files)


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
    files = read(family_bundle(name, "a3", mesh=Mesh.parse("dp=2,tp=2"), batch=4, **options))
    assert lint._sums(files)
    for graph, model in files.models.items():
        for op in reductions(model):
            assert "along" in changed(files, graph, skip(op.name))


@pytest.mark.slow
@pytest.mark.parametrize("mesh, options", [
    ("cp=2,tp=2", {}), ("cp=4", {}), ("tp=2", {"split_cache": True}), ("dp=2,tp=2", {"exchange": True}),
    ("tp=2", {"exchange": True, "moe_chunks": 2}), ("dp=2,tp=2", {"redundant_experts": 4}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["kimi-k3.1-pro", "glm-5.2", "kimi-linear-48b"])
def test_tokens_shared_out_caches_split_and_rows_sent_are_proved_too(family_bundle, name, mesh, options):
    files = read(family_bundle(name, "a3", mesh=Mesh.parse(mesh), batch=4, **options))
    assert lint._sums(files)
    for graph, model in files.models.items():
        for op in reductions(model):
            assert "along" in changed(files, graph, skip(op.name))
