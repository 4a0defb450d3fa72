"""What a bundle of a mesh says beside a bundle of one rank: ranks, rules, groups, stages, and who holds what.

Sizes in it (rows, tokens, pages, slots) are those of all ranks of a stage; shapes of a graph's inputs, outputs and
weights are those of one rank. `over` names the mesh axes that split each dimension, the first of them outermost: rank r
has part `Mesh.index(r, axes)` of it. Groups go by the name that the graphs' Hcom nodes have.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kimi_graph import tree
from kimi_graph.models.pipeline import model_stages
from kimi_graph.parallel import Rules
from kimi_graph.parallel.collectives import group_axes
from kimi_graph.parallel.mesh import Axes

from . import caches
from .ge_proto import ModelDef, OpDef, bytes_of, dtype_of, shape_of
from .meshes import Layout
from .order import COLLECTIVE
from .phases import Bucket, named_axes, stage_parts, written_values
from .places import group_of, placed_attributes
from .sharded import dims_of

MESH_RULES = [
    "A rank counts through the mesh axes, the last one fastest; stage s has the ranks from s * ranks / pp on.",
    "Rows of a step, slots and pages are shared out as `shards` says: those of the shard's ranks, the last index out.",
    "Slots and pages are counted within a shard, in batch.* inputs too; slot 0 is nobody's.",
    "The pages of a shard are `pools` equal pools, one after another, each of other ranks; page 0 of each is nobody's. "
    "Page i of a sequence is one of pool i mod pools.",
    "own_index.*: where a rank stands along the mesh axes in the name, the first of them outermost.",
    "places: attributes, by operator type, that are 0 in the file and have to be the rank's place in the group named.",
    "A stage reads values that earlier ones give (reads, gives), from the rank at the same place; it hands on "
    "what later ones read.",
]


def over(rules: Rules, axes: str) -> list[list[str]]:
    """Mesh axes of each dimension, by a text of logical axes."""
    return [list(dim) for dim in dims_of(rules, axes)]


def as_dims(over: Sequence[Sequence[str]]) -> tuple[Axes, ...]:
    """Mesh axes of each dimension, of an entry's `over`."""
    return tuple(tuple(axes) for axes in over)


def own_axes(name: str) -> Axes:
    """Mesh axes of an input `own_index.data.tensor`."""
    return tuple(name.split(".")[1:])


# ---- the mesh --------------------------------------------------------------------------------------------------------


def mesh_entry(layout: Layout, graphs: Iterable[tuple[Mapping[str, Any], ModelDef]]) -> dict[str, Any]:
    """Ranks, rules by phase, and the rank lists of every group that a graph names.

    Args:
        graphs: each with its entry in the manifest.
    """
    graphs, mesh = list(graphs), layout.mesh
    names = sorted({group for _, model in graphs for group in group_names(model)})
    phases = dict.fromkeys(entry["phase"] for entry, _ in graphs)
    layers = [s.layers for s in model_stages(layout.config, mesh.pipe)]
    stage = mesh.stage.world
    return layout.described() | {
        "ranks": mesh.world,
        "axes": [[axis, size] for axis, size in mesh.axes.items() if size > 1],  # in order, the outermost first
        "experts": mesh.experts,
        "rules": {phase: rules_text(layout.rules(phase)) for phase in phases},
        "stages": [{"layers": [x[0], x[-1]], "ranks": [i * stage, (i + 1) * stage - 1]} for i, x in enumerate(layers)],
        "groups": {name: mesh.groups(group_axes(name)) for name in names},
    }


def rules_text(rules: Rules) -> dict[str, str]:
    """Each logical axis with the mesh axes that split it, or "whole"."""
    return {axis: " x ".join(rules.on(axis)) or "whole" for axis in rules.mapping}


def group_names(model: ModelDef) -> set[str]:
    """Groups that a graph's collectives name."""
    return {group_of(op) for op in model.graph[0].op if op.type.startswith(COLLECTIVE)}


# ---- a graph ---------------------------------------------------------------------------------------------------------


def stage_entry(layout: Layout, b: Bucket, model: ModelDef, entry: dict[str, Any], stage: int) -> dict[str, Any]:
    """The entry of a graph of one stage; `entry`: what `manifest.graph_entry` says of it."""
    c, rules = layout.config, layout.rules(b.phase)
    axes, written, parts = named_axes(c, b), written_values(c, b), stage_parts(c, b, layout.stages(b))
    gives = next((p.gives for p in parts if p.stage.index == stage), ())

    def placed(described: dict[str, Any], name: str) -> dict[str, Any]:
        whole = name.startswith("own_index.") or name == "causal_mask"
        dims: list[list[str]] = [[] for _ in described["shape"]] if whole else over(rules, axes(name))
        return described | {"name": name, "over": dims}

    return entry | {
        "name": model.graph[0].name,
        "stage": stage,
        "inputs": [placed(i, i["name"]) for i in entry["inputs"]],
        "outputs": [placed(o, name) for o, name in zip(entry["outputs"], gives, strict=False)],
        "reads": [i["name"] for i in entry["inputs"] if i["name"] in written],
        "gives": list(gives),
        "collectives": collectives_of(model),
        "places": placed_attributes(model),
    }


def collectives_of(model: ModelDef) -> list[dict[str, Any]]:
    """What a rank issues in a step: collectives by kind and group, with the bytes that it gives to all of them."""
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for op in (op for op in model.graph[0].op if op.type.startswith(COLLECTIVE)):
        key = op.type, group_of(op)
        counts[key] += 1
        sizes[key] += _given(op)
    return [{"type": t, "group": g, "count": n, "bytes": sizes[t, g]} for (t, g), n in sorted(counts.items())]


def _given(op: OpDef) -> int:
    """Bytes that a rank gives: of rows of experts as many as are chosen, not all that their buffer has room for."""
    first = op.input_desc[0]
    if not op.type.startswith("MoeDistribute"):
        return bytes_of(first)
    return math.prod(shape_of(op.input_desc[1])) * shape_of(first)[-1] * dtype_of(first).itemsize


# ---- states ----------------------------------------------------------------------------------------------------------


def state_axes(layout: Layout, kv_dtype: str, b: Bucket) -> dict[str, tuple[str, int]]:
    """Logical axes and stage of each state, by name."""
    c = layout.config
    specs = caches.state_specs(c, kv_dtype, slots=b.slots, pages=b.pages, page=b.page)
    layers = [s.layers for s in layout.stages(b)]
    return {
        f"s.layers.{i}.{layer.kinds[0]}.{leaf}": (" ".join(s.axes), next(n for n, x in enumerate(layers) if i in x))
        for i, (layer, spec) in enumerate(zip(c.layers, specs, strict=True))
        for leaf, s in tree.items(spec)
    }


def shared_states(layout: Layout, kv_dtype: str, b: Bucket, contract: dict[str, Any]) -> dict[str, Any]:
    """A state contract with what each rank holds: `local` shapes, `over`, `stage`, and the shards of rows."""
    rules, axes = layout.rules("decode"), state_axes(layout, kv_dtype, b)

    def placed(entry: dict[str, Any]) -> dict[str, Any]:
        text, stage = axes[entry["name"]]
        dims = over(rules, text)
        local = [n // layout.mesh.size(d) for n, d in zip(entry["shape"], dims, strict=True)]
        return entry | {"over": dims, "local": local, "stage": stage}

    return contract | {
        "rules": contract["rules"] + MESH_RULES,
        "shards": list(shards(layout, b)),
        "pools": layout.pools,
        "states": [placed(s) for s in contract["states"]],
    }


def shards(layout: Layout, b: Bucket) -> Iterator[dict[str, Any]]:
    """Which rows, slots and pages of all a shard of ranks holds: `[first, end]` of each."""
    mesh, split, count = layout.mesh, layout.rules("decode").on("batch"), layout.shards
    for ranks in sorted(mesh.groups([axis for axis in mesh.axes if axis not in split])):
        index = mesh.index(ranks[0], split)
        sizes = {"rows": b.rows // count, "slots": b.slots // count, "pages": b.pages // count}
        yield {"ranks": sorted(ranks), **{what: [index * n, (index + 1) * n] for what, n in sizes.items()}}


# ---- for readers -----------------------------------------------------------------------------------------------------


def mesh_lines(manifest: Mapping[str, Any]) -> list[str]:
    """The mesh of a bundle; nothing where it has none."""
    mesh = manifest["mesh"]
    if mesh is None:
        return []
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh["axes"]) or "one rank"
    lines = [f"mesh      {mesh['text']}: {mesh['ranks']:,} ranks = {axes}; ep={mesh['experts']}"]
    for i, stage in enumerate(mesh["stages"]):
        (first, last), (start, end) = stage["layers"], stage["ranks"]
        lines.append(f"stage {i:<3} ranks {start:,} to {end:,}: layers {first} to {last}")
    return lines


def collective_lines(entry: Mapping[str, Any]) -> list[str]:
    """The collectives of a graph's step, and what it gets from other stages and gives."""
    lines = [
        f"  {c['count']:>6} {c['type']} over {c['group']}: {c['bytes']:,} bytes of a rank" for c in entry["collectives"]
    ]
    reads = ", ".join(entry["reads"]) or "nothing"
    return [*lines, f"  reads    {reads} of other stages", f"  gives    {', '.join(entry['gives'])}"]
