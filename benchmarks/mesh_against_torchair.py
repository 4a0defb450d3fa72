"""What one rank of a mesh costs: torchair's own `dynamo_export` of its layers against `kimi-graph compile`.

    python benchmarks/mesh_against_torchair.py [MODEL] [--mesh pp=4,tp=32] [--phase decode] [--layers N] [--rounds 3]

Both sides make the graph of the first N layers of the first pipeline stage (all of them, unless told), in the shapes of
one rank, and write it as an .air file.

Theirs: `torchair.dynamo_export` of the torch-npu wheel on a module that runs the layers one after another. Included:
Dynamo, AOT autograd, torchair's FX passes, its conversion, its GE passes, serialising, and the text copy of the graph
that it writes beside the file. Given to it, and so not included: the sharding (layers are the local functions that our
tracing made: ATen calls, operators, collectives, after our FX passes), and our lowerings, registered as converters of
what it has none for. Its native module, which is CANN's, is replaced by one that writes the bytes it gets; one GE pass
stumbles over GroupedMatmul without optional inputs and is left out. Weights and states are arguments without data:
parameters would be written to files as well, by every rank.

Ours: from the model's source. Every kind of part of these layers is traced on the mesh, then FX passes, conversion,
stamping, the checks of the finished graph, serialising. Nothing is kept from one round to the next.

All ranks: theirs counts the time of one rank for each of them, by their layers, as each exports its own. Ours makes the
graphs of all stages, which serve all ranks. Imports count on neither side. The graphs have as many collectives, grouped
products and attentions on both. Promised is 3 times less for one rank; the exit code says whether it held. Seconds are
medians of CPU seconds; sides take turns with garbage collection off, after an export of one layer that is not counted.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compile_time import Stock, alternate, median, two_cores

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, fx  # noqa: E402

PROMISE = 3.0


class Stage:
    """Some layers of the first stage of a mesh, for one phase."""

    def __init__(self, args: argparse.Namespace) -> None:
        from kimi_graph.compile import driver, phases
        from kimi_graph.compile.meshes import default_chunk
        from kimi_graph.compile.prototypes import Prototypes
        from kimi_graph.compile.targets import target
        from kimi_graph.compile.torchair_host import default_cache, load
        from kimi_graph.parallel import Mesh
        from kimi_graph.read_config import load_config

        config, self.mesh = load_config(args.model), Mesh.parse(args.mesh)
        self.request = driver.Request(
            config=config, target=target(args.target), phases=(args.phase,), rows=self.mesh.data,
            chunk=default_chunk(512, self.mesh), max_len=args.max_len, mesh=self.mesh,
        )  # fmt: skip
        (self.bucket,) = self.request.buckets()
        layout = self.request.layout
        assert layout is not None
        self.rules, self.stages = layout.rules(args.phase), layout.stages(self.bucket)
        first, *_ = phases.stage_parts(config, self.bucket, self.stages)
        self.most = len(first.stage.layers)
        self.layers = self.most if args.layers is None else min(args.layers, self.most)
        self.host = load(cache=os.environ.get("KIMI_GRAPH_CACHE") or default_cache(os.environ))
        self.prototypes = Prototypes(self.request.target.soc, self.host.root)

    def uses(self, layers: int) -> list[Any]:
        """The parts of the first layers."""
        from kimi_graph.compile import phases

        first, *_ = phases.stage_parts(self.request.config, self.bucket, self.stages)
        return list(takewhile(lambda use: use.layer is None or use.layer < layers, first.parts))

    def trace(self, layers: int) -> dict[str, Any]:
        """Each kind of part of the first layers, captured on the mesh."""
        from kimi_graph.compile import phases

        trace = phases.sharded_piece_tracer(self.request.config, self.bucket, self.rules)
        first = {use.part: use for use in reversed(self.uses(layers))}
        return {part: trace(use).captured for part, use in first.items()}

    def ours(self, folder: Path) -> Any:
        """The graph of a rank of the stage, written."""
        from kimi_graph.compile import air, driver

        uses, host = self.uses(self.layers), self.host
        first = {use.part: use for use in reversed(uses)}
        pieces = {
            name: driver.convert_piece(
                name, c, self.request.target, host, self.prototypes, self.request.weights_of(first[name], self.rules)
            )
            for name, c in self.trace(self.layers).items()
        }
        placed = [(use, pieces[use.part]) for use in uses]
        graph = driver.stamp_graph(self.request.config, self.bucket, placed, self.prototypes, uses[-1].writes)
        driver.check(graph, self.request.target, self.prototypes)
        (folder / "ours.air").write_bytes(air.to_bytes(graph.model))
        return graph

    def ours_of_all(self, folder: Path) -> list[Any]:
        """The graphs of all stages, which serve all ranks, written."""
        from kimi_graph.compile import air, pipeline

        made = pipeline.build_stages(self.request, self.bucket, self.host, self.rules, self.stages)
        for stage in made:
            (folder / f"{stage.graph.name}.air").write_bytes(air.to_bytes(stage.graph.model))
        return made


# ---- theirs ----------------------------------------------------------------------------------------------------------


class Layers(torch.nn.Module):
    """Layers one after another, each a local function on values by name."""

    def __init__(self, functions: Sequence[fx.GraphModule], steps: Sequence[Any], results: Sequence[str]) -> None:
        super().__init__()
        self.functions = torch.nn.ModuleList(fx.GraphModule(f, f.graph) for f in functions)  # with code, for Dynamo
        self.steps, self.results = steps, results  # steps: which function, values it reads, values it gives

    def forward(self, given: dict[str, Tensor]) -> list[Tensor]:
        values = dict(given)
        for function, reads, gives in self.steps:
            made = self.functions[function](*[values[name] for name in reads])
            for name, value in zip(gives, made, strict=True):
                values[name] = value
        return [values[name] for name in self.results]


def local_layers(stage: Stage, layers: int) -> tuple[Layers, dict[str, Tensor]]:
    """The first layers as one module of local functions, after our passes, and its arguments without data."""
    from kimi_graph.compile import phases

    uses, config = stage.uses(layers), stage.request.config
    folded = {part: phases.fold_piece(c).captured for part, c in stage.trace(layers).items()}
    added = {part: own_indexes(c.module) for part, c in folded.items()}
    names = list(folded)
    steps, given, results = [], {}, []
    for use in uses:
        piece, here = folded[use.part], {f"in{i}": name for i, name in enumerate(use.reads)}

        def name(value: str, use: Any = use, here: Any = here) -> str:
            if value.startswith("p."):
                return f"p.{use.prefix}.{value}"
            return phases.state_name(config, use, value[2:]) if value.startswith("s.") else here.get(value, value)

        reads = [name(value) for value in piece.inputs] + added[use.part]
        inputs = [n for n in piece.module.graph.nodes if n.op == "placeholder"]
        written = {f"out.{i}": value for i, value in enumerate(use.writes)}
        gives = [written.get(value) or f"next.{name(value)}" for value in piece.outputs]
        known = {value for _, _, values in steps for value in values}
        given |= {value: node.meta["val"] for value, node in zip(reads, inputs, strict=True) if value not in known}
        results += [value for value in gives if value.startswith("next.")]
        steps.append((names.index(use.part), reads, gives))
    results += uses[-1].writes
    given = {name: torch.empty(v.shape, dtype=v.dtype, device="meta") for name, v in given.items()}
    return Layers([c.module for c in folded.values()], steps, results), given


def own_indexes(module: fx.GraphModule) -> list[str]:
    """Where a rank stands becomes an argument: Dynamo has no calls that read nothing. Names of these arguments."""
    from kimi_graph.parallel.collectives import OPS

    found = [n for n in module.graph.nodes if n.target is OPS["own_index"]]
    for i, node in enumerate(found):
        with module.graph.inserting_before(next(n for n in module.graph.nodes if n.op != "placeholder")):
            made = module.graph.placeholder(f"own_index_{i}")
        made.meta = node.meta
        node.replace_all_uses_with(made)
        module.graph.erase_node(node)
    module.recompile()
    return [f"own_index.{n.args}" for n in found]


class Export(Stock):
    """torchair's own export."""

    def __init__(self, stage: Stage) -> None:
        self.target = stage.request.target  # what a bench has for its room
        super().__init__(stage)  # type: ignore[arg-type]
        import torchair  # pyright: ignore[reportMissingImports]

        torchair.get_npu_backend = self.fx.get_npu_backend
        with warnings.catch_warnings(), stage.host.shield():
            warnings.simplefilter("ignore")
            from torchair import npu_export  # pyright: ignore[reportMissingImports]
        self.stage, self.npu_export = stage, npu_export
        self.written = b""  # the last graph
        self.text: list[float] = []  # CPU seconds of each text copy
        export_utils: Any = sys.modules["torchair._utils.export_utils"]
        export_utils.dump_graph = self.timed(export_utils.dump_graph)
        if not stage.host.real:
            sys.modules["torchair.core._torchair"].export = self.write  # type: ignore[attr-defined]
        for name in self.SKIPPED:
            setattr(self.ge, name, lambda graph: None)
        self.ge.GeConcreteGraph = self.graph_class(self.ge.GeConcreteGraph)

    def write(self, graph: bytes, options: dict[str, str]) -> None:
        """What the native module does with a serialised graph."""
        folder = Path(options["export_path_dir"])
        (folder / options["export_name"]).write_bytes(graph)
        self.written = graph

    def timed(self, dump: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            start = time.process_time()
            dump(*args)
            self.text.append(time.process_time() - start)

        return timed

    def graph_class(self, base: Any) -> Any:
        """torchair's graph, with a room for our lowerings as long as it lasts."""
        from kimi_graph.compile.lower import Room

        export = self

        class Graph(base):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                export.room = Room(export.stage.host, export.target, export.target.cann)
                # Our lowerings add an input for where a rank stands; in a graph of its own it may be a constant.
                export.room.input = lambda name, shape, dtype: export.room.const([0], dtype)

        return Graph

    def export(self, module: Layers, given: dict[str, Tensor], folder: Path) -> None:
        """One rank's file."""
        with warnings.catch_warnings(), self.stage.host.shield():
            warnings.simplefilter("ignore")
            config = self.config()
            self.npu_export.dynamo_export(
                given, model=module, export_path=str(folder), export_name="theirs", config=config
            )


# ---- both ------------------------------------------------------------------------------------------------------------


def counts(model: Any) -> dict[str, int]:
    """Of the operators that both sides have to have: collectives, grouped products, attention, KDA."""
    from kimi_graph.compile.order import COLLECTIVE, HEAVY

    return dict(Counter(op.type for op in model.graph[0].op if op.type in HEAVY or op.type.startswith(COLLECTIVE)))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from kimi_graph.compile.ge_proto import ModelDef

    stage = Stage(args)
    export = Export(stage)
    module, given = local_layers(stage, stage.layers)
    with TemporaryDirectory() as name:
        folder = Path(name)
        export.export(*local_layers(stage, 1), folder)  # what is imported late
        sides: dict[str, Callable[[], Any]] = {
            "ours": lambda: stage.ours(folder),
            "all": lambda: stage.ours_of_all(folder),
            "theirs": lambda: export.export(module, given, folder),
        }
        times = alternate(args.rounds, sides)
        ours_model, their_model = stage.ours(folder).model, ModelDef.FromString(export.written)
    if counts(ours_model) != counts(their_model):
        raise SystemExit(f"the graphs differ: ours has {counts(ours_model)}, theirs {counts(their_model)}")
    ours, theirs, everyone = (median(times, side) for side in ("ours", "theirs", "all"))
    layers = len(stage.request.config.layers)
    alone = theirs[0] * layers / stage.layers * stage.mesh.stage.world
    ratio = theirs[0] / ours[0]
    return {
        "model": args.model, "mesh": args.mesh, "phase": args.phase, "target": args.target, "rounds": args.rounds,
        "load": os.getloadavg()[0], "layers": stage.layers, "of_stage": stage.most, "of_model": layers,
        "ranks": stage.mesh.world, "counts": counts(ours_model),
        "nodes": {"ours": len(ours_model.graph[0].op), "theirs": len(their_model.graph[0].op)},
        "one": {"ours": ours[0], "theirs": theirs[0], "ratio": ratio, "wall_ratio": theirs[1] / ours[1],
                "text": statistics.median(export.text[2:])},
        "all": {"ours": everyone[0], "theirs": alone, "ratio": alone / everyone[0]},
        "promise": PROMISE, "held": ratio >= PROMISE,
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    one, everyone, ranks = found["one"], found["all"], found["ranks"]
    how = f"{found['rounds']} rounds, load {found['load']:.1f}"
    print(f"{found['model']} for {found['target']} on {found['mesh']}, {found['phase']}; {how}")
    print(f"{found['layers']} of the {found['of_stage']} layers of the first stage; {found['of_model']} in all")
    print(f"{'CPU seconds':40}{'ours':>8}{'dynamo_export':>15}{'ratio':>9}{'by wall':>9}{'promise':>9}")
    numbers = f"{one['ours']:8.2f}{one['theirs']:15.2f}{one['ratio']:9.1f}{one['wall_ratio']:9.1f}{PROMISE:9.1f}"
    print(f"{'these layers of one rank':40}{numbers}{'' if found['held'] else '   missed'}")
    what = f"all layers, {ranks:,} ranks (theirs: {ranks:,} exports)"
    print(f"{what:40}{everyone['ours']:8.2f}{everyone['theirs']:15.0f}{everyone['ratio']:9.0f}")
    print(f"of theirs the text copy is {one['text']:.2f}; without it {(one['theirs'] - one['text']) / one['ours']:.1f}")
    operators = ", ".join(f"{count} {name}" for name, count in found["counts"].items())
    print(f"nodes: ours {found['nodes']['ours']:,}, theirs {found['nodes']['theirs']:,}; both have {operators}")
    print("the promise held" if found["held"] else "missed: one rank")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="kimi-k3.1-pro", help="preset, config.json or checkpoint folder")
    parser.add_argument("--mesh", default="pp=4,tp=32")
    parser.add_argument("--phase", default="decode", choices=("prefill", "decode"))
    parser.add_argument("--target", default="a3")
    parser.add_argument("--layers", type=int, help="of the first stage; default all")
    parser.add_argument("--max-len", type=int, default=4096, help="longest sequence, tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = parser.parse_args()
    two_cores()
    found = measure(args)
    print(json.dumps(found, indent=2)) if args.json else show(found)
    return 0 if found["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
