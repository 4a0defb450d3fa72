"""What a bundle says of itself (states, graphs, weight plan), made from its graphs and held against them again.

A runtime binds inputs, weights and states by what is written here, so `verify` does not take it on trust.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kimi_graph import tree
from kimi_graph.config import ModelConfig
from kimi_graph.errors import BundleError, CompileError, ShardingError
from kimi_graph.models import decoder
from kimi_graph.parallel.placement import place
from kimi_graph.spec import ParamSpec

from . import caches, mesh_manifest, recipe
from .at_load import bucket_entries, left_to_do
from .bundle import MANIFEST, WEIGHTS, Bundle
from .ge_proto import Dtype, ModelDef, OpDef, TensorDescriptor, bytes_of, dtype_of, get_attr, results_of, shape_of
from .meshes import Layout, layout_of
from .packages import own_types, packages_of
from .phases import Bucket, graph_inputs, stage_parts
from .recipe import Step
from .targets import Target, target

GENERATED = {"causal_mask": ("causal_mask", 2048)}  # inputs no checkpoint holds: kind and size

RULES = [
    "All states are zero before the first step. Graphs update them in place; all phases share them.",
    "Slot 0 and page 0 are nobody's: rows without a sequence use slot 0, padding tokens are written to page 0.",
    "A sequence starts in prefill with lengths equal to counts; its slot and pages need no clearing.",
    "batch.lengths: tokens of the sequence after the step. batch.counts: its new tokens; the rest of a row is padding.",
    "batch.block_table: the sequence's pages in order. batch.slot_mapping: page * page_tokens + offset of each token.",
    "graph_shape has the same elements in the same order as shape.",
    "A graph's inputs are bound by index: its inputs, weights (constants have no index) and states, as listed.",
]


# ---- graphs ----------------------------------------------------------------------------------------------------------


def is_weight(op: OpDef) -> bool:
    """Whether a node stands for a weight: an input, or a constant in a file."""
    return op.name.startswith("p.") and op.type in ("Data", "FileConstant")


def graph_entry(b: Bucket, model: ModelDef, file: str, data: bytes) -> dict[str, Any]:
    """A graph of bucket `b` whose file `file` holds `data`."""
    ops = model.graph[0].op
    results = results_of(ops).input_desc
    counts: dict[str, int] = {}
    for op in ops:
        counts[op.type] = counts.get(op.type, 0) + 1
    return {
        "name": b.name,
        "phase": b.phase,
        "rows": b.rows,
        "tokens": b.tokens,
        "images": b.images,
        "file": file,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "inputs": [_described(op.output_desc[0], op.name) for op in ops if op.type == "Data" and not is_weight(op)],
        "weights": [op.name for op in ops if is_weight(op)],
        "states": [op.name for op in ops if op.type == "RefData"],
        "outputs": [_described(desc, "vision.values" if b.phase == "vision" else "logits") for desc in results],
        "ops": counts,
    }


def _described(desc: TensorDescriptor, name: str) -> dict[str, Any]:
    return {"name": name, "shape": list(shape_of(desc)), "dtype": _dtype(dtype_of(desc))}


def target_entry(t: Target) -> dict[str, Any]:
    """What graphs are for."""
    return {
        "name": t.name,
        "product": t.product,
        "soc_version": t.soc_version,
        "cann": t.cann,
        "providers": list(t.providers),
        **({"avoid": list(t.avoid)} if t.avoid else {}),
    }


def target_of(manifest: Mapping[str, Any]) -> Target:
    """The target that a manifest names.

    Raises:
        CompileError: there is none such.
    """
    entry = manifest["target"]
    return target(entry["name"], cann=entry["cann"], providers=entry["providers"], avoid=entry.get("avoid", ()))


def _check_target(where: Any, manifest: Mapping[str, Any]) -> Target:
    """The target is one there is, with all that is said of it."""
    try:
        found = target_of(manifest)
    except CompileError as error:
        raise BundleError(f"{where}: target: {error}") from error
    _compare(where, "target", manifest["target"], target_entry(found))
    return found


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bucket_of(manifest: Mapping[str, Any], entry: Mapping[str, Any]) -> Bucket:
    """The bucket a graph of a bundle was made for."""
    s = manifest["state"]
    return Bucket(
        phase=entry["phase"],
        rows=entry["rows"],
        tokens=entry["tokens"],
        page=s["page_tokens"],
        pages=s["pages"],
        sequence_pages=s["pages_per_sequence"],
        slots=s["slots"],
        images=entry["images"],
    )


# ---- states ----------------------------------------------------------------------------------------------------------


def state_contract(c: ModelConfig, b: Bucket, models: Iterable[ModelDef], kv_dtype: str) -> dict[str, Any]:
    """What a runtime must hold between steps, and how it says where; `b`: any bucket of the bundle."""
    specs = caches.state_specs(c, kv_dtype, slots=b.slots, pages=b.pages, page=b.page)
    described = {op.name: op.output_desc[0] for m in models for op in m.graph[0].op if op.type == "RefData"}
    entries = []
    for i, (layer, spec) in enumerate(zip(c.layers, specs, strict=True)):
        for leaf, s in tree.items(spec):
            name = f"s.layers.{i}.{layer.kinds[0]}.{leaf}"
            entries.append(
                {
                    "name": name,
                    "shape": list(s.shape),
                    "graph_shape": list(shape_of(described[name])) if name in described else [],
                    "axes": list(s.axes),
                    "dtype": _dtype(s.dtype),
                }
            )
    return {
        "slots": b.slots,
        "pages": b.pages,
        "page_tokens": b.page,
        "pages_per_sequence": b.sequence_pages,
        "tokens_per_sequence": b.sequence_pages * b.page,
        "kv_dtype": kv_dtype,
        "rules": RULES if kv_dtype == "bf16" else RULES + caches.RULES,
        "states": entries,
    }


def memory_entry(
    weights: Mapping[str, Any], state: Mapping[str, Any], graphs: Iterable[Mapping[str, Any]], die: int | None
) -> dict[str, Any]:
    """Bytes of weights and states beside what a die has; on a mesh of the rank that holds most, and by stage."""

    def size(s: Mapping[str, Any], shape: str) -> int:
        return math.prod(s[shape]) * getattr(torch, s["dtype"]).itemsize

    if "shards" not in state:
        whole = {"weights": sum(w["bytes"] for w in weights.values())}
        return whole | {"states": sum(size(s, "shape") for s in state["states"]), "die": die}
    read: dict[int, set[str]] = {}
    for entry in graphs:
        read.setdefault(entry["stage"], set()).update(entry["weights"])
    stages = [
        {
            "weights": sum(weights[name]["bytes"] for name in names),
            "states": sum(size(s, "local") for s in state["states"] if s["stage"] == stage),
        }
        for stage, names in sorted(read.items())
    ]
    return max(stages, key=lambda s: s["weights"] + s["states"]) | {"die": die, "stages": stages}


# ---- weights ---------------------------------------------------------------------------------------------------------


def weight_plan(
    config: ModelConfig,
    models: Iterable[ModelDef],
    sources: Mapping[str, tuple[str, tuple[Step, ...]]],
    layout: Layout | None = None,
) -> dict[str, Any]:
    """Every graph weight: the parameter, its checkpoint tensors, and the steps from there.

    Args:
        sources: parameter and steps by weight. layout: of several ranks, whose part of a parameter steps start from.
    """
    specs = dict(tree.items(decoder.model_specs(config)))
    ops = {op.name: op for model in models for op in model.graph[0].op}
    plan = {
        name: weight_entry(specs[path], path, ops[name].output_desc[0], steps) | _over(specs[path], path, layout)
        for name, (path, steps) in sources.items()
    }
    return {"weights": plan, "generated": generated_entry(ops)}


def generated_entry(names: Iterable[str]) -> dict[str, list[Any]]:
    """Of a graph's inputs those that no checkpoint holds: kind, and its size or mesh axes."""
    own = {name: ["own_index", name.split(".")[1:]] for name in sorted(names) if name.startswith("own_index.")}
    return {name: list(kind) for name, kind in GENERATED.items() if name in names} | own


def _over(spec: ParamSpec, path: str, layout: Layout | None) -> dict[str, Any]:
    """Mesh axes that split each dimension of a parameter: rank r's part is cut before the first step.

    `padded`, where the parameter is: its shape with zeros after it, which is what is cut.
    """
    if layout is None:
        return {}
    placed = place(path, spec, layout.rules("decode"), layout.config.dtype)
    padded = {} if placed.shape == placed.given else {"padded": list(placed.shape)}
    return {"over": [list(axes) for axes in placed.dims], **padded}


def weight_entry(spec: ParamSpec, path: str, desc: TensorDescriptor, steps: tuple[Step, ...]) -> dict[str, Any]:
    """A weight that a graph reads as `desc`, made of the parameter `path` by `steps`."""
    return {
        "parameter": path,
        "tensors": list(spec.source),
        "stored": list(spec.stored),
        "shape": list(spec.shape),
        "dtype": Dtype.of_proto(desc.dtype).text,
        "bytes": bytes_of(desc),
        "steps": recipe.to_json(steps),
    }


# ---- held against the graphs -----------------------------------------------------------------------------------------


def check_claims(bundle: Bundle, config: ModelConfig, models: Mapping[str, ModelDef]) -> None:
    """Make manifest and weight plan again from the graphs, and compare.

    Args:
        models: each graph as it was read, by its name in the manifest.

    Raises:
        BundleError: the first thing that is not so, with the file and the key.
    """
    manifest, where = bundle.manifest, bundle.folder / MANIFEST
    profile = _check_target(where, manifest)
    buckets = [bucket_of(manifest, entry) for entry in manifest["graphs"]]
    layout = layout_in(manifest, config, where)
    if layout is not None:
        config = layout.config
    kv_dtype = manifest["state"].get("kv_dtype")
    if kv_dtype not in caches.KV_DTYPES:
        raise BundleError(f"{where}: state.kv_dtype is {kv_dtype!r}; one of {', '.join(caches.KV_DTYPES)} expected.")
    state = state_contract(config, buckets[0], models.values(), kv_dtype)
    if layout is not None:
        state = mesh_manifest.shared_states(layout, kv_dtype, buckets[0], state)
    _compare(where, "state", manifest["state"], state)
    kept = {op.name: op.output_desc[0] for m in models.values() for op in m.graph[0].op if op.type == "RefData"}
    for s in manifest["state"]["states"]:
        if s["name"] in kept and _dtype(dtype_of(kept[s["name"]])) != s["dtype"]:
            found = _dtype(dtype_of(kept[s["name"]]))
            raise BundleError(f"{where}: state {s['name']} is {s['dtype']}, in the graphs {found}.")
        if s["name"] in kept and math.prod(s["shape" if layout is None else "local"]) != math.prod(s["graph_shape"]):
            raise BundleError(f"{where}: state {s['name']} is {s['shape']}, in the graphs {s['graph_shape']}.")
    _check_whole(where, manifest["graphs"], config, layout, buckets)
    _compare(where, "weights.file", manifest["weights"].get("file"), WEIGHTS)
    _compare(where, "assumptions", manifest.get("assumptions"), list(config.assumptions))
    for index, (b, entry) in enumerate(zip(buckets, manifest["graphs"], strict=True)):
        made = described(layout, b, models[entry["name"]], entry, where)
        made |= {key: entry[key] for key in ("bytes", "sha256")}
        _compare(where, f"graphs.{index}", entry, made)
        _check_slots(where, f"graphs.{index}.rows", b, 1 if layout is None else layout.shards)
        if config.vision is None:
            _compare(where, f"graphs.{index}.images", entry["images"], 0)
        _check_inputs(config, b, where, entry, layout)
        _check_numbers(models[entry["name"]], where, entry)
    if layout is not None:
        pairs = [(entry, models[entry["name"]]) for entry in manifest["graphs"]]
        _compare(where, "mesh", manifest["mesh"], mesh_manifest.mesh_entry(layout, pairs))
    _check_plan(bundle, config, models.values(), layout)
    _compare(where, "buckets", manifest["buckets"], bucket_entries(manifest["graphs"]))
    types = {op.type for model in models.values() for op in model.graph[0].op}
    _check_kernels(where, manifest["kernels"], own_types(types))
    needed = packages_of(types)
    _compare(where, "packages", manifest.get("packages"), [n.to_json() for n in needed])
    constants = "constants" in manifest["weights"]
    todo = left_to_do(manifest, bundle.weights["generated"], constants=constants)
    _compare(where, "at_load", manifest["at_load"], todo)
    held = memory_entry(bundle.weights["weights"], manifest["state"], manifest["graphs"], profile.memory_bytes)
    _compare(where, "memory", manifest.get("memory"), held)


def _check_slots(where: Any, path: str, b: Bucket, shards: int) -> None:
    """Every row has a slot in its shard, beside nobody's."""
    if b.rows > b.slots - shards or b.slots % shards:
        raise BundleError(
            f"{where}: {path} is {b.rows}; state.slots is {b.slots} over {shards} shards, one of each is nobody's."
        )


def _check_kernels(where: Any, entry: Mapping[str, Any] | None, own: list[str]) -> None:
    """The operator project is there where graphs need it, and has their operators."""
    if entry is None and own:
        raise BundleError(f"{where}: kernels is nothing; the graphs have {', '.join(own)}, which no other package has.")
    if entry is not None and not own:
        raise BundleError(f"{where}: kernels are listed; the graphs have no operator of this project.")
    if entry is not None and (missing := sorted(set(own) - set(entry["operators"]))):
        raise BundleError(f"{where}: kernels has no operator {missing[0]}, which the graphs have.")


def _check_whole(
    where: Any, entries: Iterable[Mapping[str, Any]], config: ModelConfig, layout: Layout | None, buckets: list[Bucket]
) -> None:
    """Every stage that has a part in a phase has one graph."""
    found = Counter((entry["phase"], entry.get("stage")) for entry in entries)
    for b in {b.phase: b for b in buckets}.values():
        stages: list[int | None] = [None]
        if layout is not None:
            stages = [part.stage.index for part in stage_parts(config, b, layout.stages(b))]
        for stage in stages:
            if (count := found[b.phase, stage]) != 1:
                of = "" if stage is None else f": stage {stage} of {len(stages)}"
                raise BundleError(f"{where}: phase {b.phase}{of} has {count or 'no'} graphs, expected one.")


def layout_in(manifest: Mapping[str, Any], config: ModelConfig, where: Any) -> Layout | None:
    """How a bundle's model lies on its mesh; None: one rank.

    Raises:
        BundleError: what it says is no mesh.
    """
    entry = manifest.get("mesh")
    if entry is None:
        return None
    try:
        return layout_of(config, entry)
    except (ShardingError, TypeError, KeyError, AttributeError) as error:
        raise BundleError(f"{where}: mesh is none: {error}") from None


def described(
    layout: Layout | None, b: Bucket, model: ModelDef, entry: Mapping[str, Any], where: Any
) -> dict[str, Any]:
    """The entry of a graph, made anew."""
    made = graph_entry(b, model, entry["file"], b"")
    if layout is None:
        return made
    stage, stages = entry.get("stage"), layout.mesh.pipe
    if type(stage) is not int or not 0 <= stage < stages:
        raise BundleError(f"{where}: graph {entry['name']} is of stage {stage!r}; the mesh {layout.mesh} has {stages}.")
    return mesh_manifest.stage_entry(layout, b, model, made, stage)


def _compare(where: Any, path: str, found: Any, expected: Any) -> None:
    """Raises BundleError at the first key whose value differs; tuples and lists are the same."""
    for key, mine, made in differences(path, found, json.loads(json.dumps(expected))):
        raise BundleError(f"{where}: {key} is {short(mine)}; the graphs and the model make it {short(made)}.")


NOTHING = "nothing"  # stands for a key that is not there


def differences(path: str, found: Any, expected: Any) -> Iterable[tuple[str, Any, Any]]:
    """Keys of two JSON values where they differ, with what each has there (`NOTHING`: nothing)."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            yield from differences(f"{path}.{key}", found.get(key, NOTHING), expected.get(key, NOTHING))
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for index, (mine, made) in enumerate(zip(found, expected, strict=True)):
            yield from differences(f"{path}.{index}", mine, made)
    elif type(found) is not type(expected) or found != expected:
        yield path, found, expected


def short(value: Any) -> str:
    """A JSON value in at most 100 characters."""
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _check_inputs(c: ModelConfig, b: Bucket, where: Any, entry: Mapping[str, Any], layout: Layout | None) -> None:
    """Inputs are those of the bucket's batch, those that are generated, and what other stages give."""
    tensors = graph_inputs(c, b, entry.get("reads", ()))
    known = {name: {"name": name, "shape": list(x.shape), "dtype": _dtype(x.dtype)} for name, x in tensors.items()}
    for i in entry["inputs"]:
        if layout is not None:
            _check_own_input(i, known, layout, where, entry)
        elif i["name"] not in GENERATED:
            _compare(where, f"inputs of {entry['name']}: {i['name']}", i, known.get(i["name"]))


def _check_own_input(i: Mapping[str, Any], known: Any, layout: Layout, where: Any, entry: Mapping[str, Any]) -> None:
    """An input of one rank: its part of the whole one, or where it stands."""
    name, sizes = i["name"], [layout.mesh.size(axes) for axes in i["over"]]
    if name in GENERATED:
        return
    if name.startswith("own_index."):
        made: Any = {"name": name, "shape": [1], "dtype": "int64"}
    elif (whole := known.get(name)) is not None:
        made = whole | {"shape": [n // size for n, size in zip(whole["shape"], sizes, strict=True)]}
    else:
        made = None
    found = {key: i[key] for key in ("name", "shape", "dtype")}
    _compare(where, f"inputs of {entry['name']}: {name}", found, made)


def _check_numbers(model: ModelDef, where: Any, entry: Mapping[str, Any]) -> None:
    """Indexes run through inputs, weights and states as listed."""
    index = {op.name: get_attr(op, "index") for op in model.graph[0].op if op.type in ("Data", "RefData")}
    listed = [i["name"] for i in entry["inputs"]] + [n for n in entry["weights"] if n in index] + entry["states"]
    for at, name in enumerate(listed):
        if index[name] != at:
            found = f"{name} is at place {at} of the inputs of graph {entry['name']}"
            raise BundleError(f"{where}: {found}, there it has index {index[name]}.")


def _check_plan(bundle: Bundle, config: ModelConfig, models: Iterable[ModelDef], layout: Layout | None) -> None:
    specs = dict(tree.items(decoder.model_specs(config)))
    where, plan = bundle.folder / WEIGHTS, bundle.weights["weights"]
    forms = {recipe.form(recipe.from_json(entry["steps"])) for entry in plan.values()}
    kept = ", ".join(sorted(form for form in forms if form is not None)) or "plain"
    _compare(bundle.folder / MANIFEST, "weights.experts", bundle.manifest["weights"].get("experts"), kept)
    ops = {op.name: op for model in models for op in model.graph[0].op}
    for name in [op.name for op in ops.values() if is_weight(op)]:
        if name not in plan or plan[name]["parameter"] not in specs:
            raise BundleError(f"{where}: weight {name} of the graphs is not made of a parameter of the model.")
        entry, spec, desc = plan[name], specs[plan[name]["parameter"]], ops[name].output_desc[0]
        steps = recipe.from_json(entry["steps"])
        over = _over(spec, entry["parameter"], layout)
        made = weight_entry(spec, entry["parameter"], desc, steps) | over
        placed = {"offset": entry["offset"]} if ops[name].type == "FileConstant" else {}
        _compare(where, f"weights.{name}", entry, made | placed)
        shape = over.get("padded", spec.shape)
        if layout is not None:
            shape = [n // layout.mesh.size(axes) for n, axes in zip(shape, over["over"], strict=True)]
        _check_steps(name, steps, torch.empty(shape, dtype=spec.dtype or config.dtype, device="meta"), desc)
    _compare(where, "generated", bundle.weights["generated"], generated_entry(ops))
    if unused := sorted(set(plan) - set(ops)):
        raise BundleError(f"{where}: no graph reads {unused[0]}.")


def _check_steps(name: str, steps: tuple[Step, ...], parameter: torch.Tensor, desc: TensorDescriptor) -> None:
    """The steps, on a meta tensor, make what the graph reads, and each does something."""
    made = parameter
    for step in steps:
        before = made
        try:
            made = recipe.apply([step], before)
        except (RuntimeError, IndexError, TypeError, KeyError) as error:
            shape = list(before.shape)
            raise BundleError(f"weight {name}: step {recipe.to_json([step])} does not fit {shape}: {error}") from None
        if step.kind in ("slice", "view", "cast") and (made.shape, made.dtype) == (before.shape, before.dtype):
            raise BundleError(f"weight {name}: step {recipe.to_json([step])} does nothing to {list(before.shape)}.")
    dtype = Dtype.of_proto(desc.dtype)
    if made.nbytes != bytes_of(desc) or (made.dtype != dtype.shared and made.dtype != torch.uint8):
        found, read = f"{_dtype(made.dtype)}{list(made.shape)}", f"{dtype.text}{list(shape_of(desc))}"
        raise BundleError(f"weight {name}: the plan makes {found}, the graph reads {read}.")
