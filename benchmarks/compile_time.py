"""Time and memory of `kimi-graph compile`, and what stamping saves.

    python benchmarks/compile_time.py [MODEL] [--target a3] [--rounds 5] [--json]
    python benchmarks/compile_time.py MODEL --mesh pp=4,dp=8,tp=32,ep=128

Three promises; the exit code says whether all hold. Prefill and decode, default shapes:

1. The command itself on 2 cores, imports included, the torch-npu wheel cached: at most 10 s and 0.8 GB.
2. Stamping against every layer. Ours captures and converts each *kind* of piece once; the other side captures and
   converts the pieces of every layer. Both stamp them into the graph by the same function and run the same checks, and
   must give the same bytes. Trace, convert, stamp and checks count, imports do not: 5 times less.
3. Our way against stock torchair. All layers are captured as one FX graph, which goes through our FX passes, then
   through torchair's own converter and its FX and GE passes, with our operators and lowerings registered as converters;
   states are inputs and outputs of that graph. Ours counts trace, passes, convert and stamp. Stock counts its own
   conversion and passes alone, or (second row) the trace of the whole graph and our passes too: 3 times less than each.

With a mesh the command alone is measured, all its ranks at once: at most 15 s and 1.0 GB.

Seconds of the command are wall time of its fastest run: other work on the machine only adds, and the load is printed.
The comparisons are medians of CPU seconds; sides take turns in one process, after a turn that is not counted, with
garbage collection off as in the command. Each part runs in processes of its own.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CORES, SECONDS, GIGABYTES, STAMPING, STOCK = 2, 10.0, 0.8, 5.0, 3.0
MESH_SECONDS, MESH_GIGABYTES = 15.0, 1.0
UNITS = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss

Times = dict[str, list[tuple[float, float]]]  # CPU and wall seconds of each round, by side


# ---- in a process of its own -----------------------------------------------------------------------------------------


def alternate(rounds: int, sides: dict[str, Callable[[], Any]]) -> Times:
    """Times of the sides, which take turns."""
    found: Times = {name: [] for name in sides}
    for i in range(rounds + 1):
        for name in list(sides) if i % 2 else reversed(sides):
            gc.collect()
            gc.disable()
            wall, cpu = time.perf_counter(), time.process_time()
            sides[name]()
            if i:
                found[name].append((time.process_time() - cpu, time.perf_counter() - wall))
            gc.enable()
    return found


class Bench:
    """A model to compile, torchair loaded."""

    def __init__(self, model: str, target: str) -> None:
        from kimi_graph.compile import driver
        from kimi_graph.compile.prototypes import Prototypes
        from kimi_graph.compile.targets import target as find_target
        from kimi_graph.compile.torchair_host import default_cache, load
        from kimi_graph.read_config import load_config

        self.config, self.target = load_config(model), find_target(target)
        self.request = driver.Request(config=self.config, target=self.target)
        self.buckets = self.request.buckets()
        self.host = load(cache=os.environ.get("KIMI_GRAPH_CACHE") or default_cache(os.environ))
        self.prototypes = Prototypes(self.target.soc, self.host.root)

    def checked(self, graph: Any) -> Any:
        from kimi_graph.compile import driver

        driver.check(graph, self.target, self.prototypes)
        return graph

    def ours(self, b: Any) -> Any:
        """The graph of a bucket as the command makes it: each kind of piece captured and converted once."""
        from kimi_graph.compile import phases

        pieces = {name: self.convert(name, c) for name, c in phases.capture_pieces(self.config, b).items()}
        return self.stamp(b, [(use, pieces[use.part]) for use in phases.uses(self.config, b)])

    def every_layer(self, b: Any) -> Any:
        """The same graph, each piece captured and converted anew for every layer."""
        from kimi_graph.compile import phases

        trace = phases.piece_tracer(self.config, b)
        return self.stamp(b, [(use, self.convert(use.part, trace(use))) for use in phases.uses(self.config, b)])

    def convert(self, name: str, captured: Any) -> Any:
        from kimi_graph.compile import driver

        return driver.convert_piece(name, captured, self.target, self.host, self.prototypes)

    def stamp(self, b: Any, placed: list[Any]) -> Any:
        from kimi_graph.compile import driver

        return driver.stamp_graph(self.config, b, placed, self.prototypes)

    def whole(self, b: Any) -> Any:
        """All layers in one FX graph, after our passes."""
        import torch

        from kimi_graph.compile import phases
        from kimi_graph.compile.capture import capture
        from kimi_graph.models import decoder

        def f(tokens: Any, p: Any, s: Any, batch: Any) -> dict[str, Any]:
            logits, after = decoder.forward(p, self.config, tokens, s, batch, step=b.step, last_only=not b.step)
            return {"logits": logits.flatten(0, 1), "s": after}

        args = {
            "tokens": phases.meta((b.rows, b.tokens), torch.int64),
            "p": phases.meta_params(self.config),
            "s": phases.meta_states(self.config, b),
            "batch": phases.batch_inputs(self.config, b),
        }
        return phases.fold_piece(capture(f, args)).captured.module


def stamping(bench: Bench, rounds: int) -> dict[str, Any]:
    """Part 2."""
    from kimi_graph.compile import air

    sides = {
        "ours": lambda: [bench.checked(bench.ours(b)) for b in bench.buckets],
        "every layer": lambda: [bench.checked(bench.every_layer(b)) for b in bench.buckets],
    }
    ours, other = ([air.to_bytes(g.model) for g in side()] for side in sides.values())
    return {"times": alternate(rounds, sides), "equal": ours == other, "bytes": sum(map(len, ours))}


def stock(bench: Bench, rounds: int) -> dict[str, Any]:
    """Part 3."""
    torchair, modules = Stock(bench), [bench.whole(b) for b in bench.buckets]
    sides = {
        "ours": lambda: [bench.ours(b) for b in bench.buckets],
        "stock": lambda: [torchair.convert(module) for module in modules],
        "trace": lambda: [bench.whole(b) for b in bench.buckets],
    }
    nodes = [sum(len(g.model.graph[0].op) for g in sides["ours"]()), sum(map(len, sides["stock"]()))]
    return {"times": alternate(rounds, sides), "nodes": nodes}


class Stock:
    """torchair's own way from FX to GE."""

    # Tidies quantised weights of GroupedMatmul, and stumbles over optional inputs that our node leaves out.
    SKIPPED = ("move_transpose_into_mm",)

    def __init__(self, bench: Bench) -> None:
        for name in ("torchair._utils", "torchair.inference"):  # ours does without what their __init__ imports
            del sys.modules[name]
        with warnings.catch_warnings(), bench.host.shield():
            warnings.simplefilter("ignore")
            from torchair import npu_fx_compiler  # pyright: ignore[reportMissingImports]
            from torchair._ge_concrete_graph import fx2ge_converter  # pyright: ignore[reportMissingImports]
            from torchair._utils.graph_transform_observer import (  # pyright: ignore[reportMissingImports]
                GraphTransformObserver,
            )
            from torchair.configs.compiler_config import CompilerConfig  # pyright: ignore[reportMissingImports]
        from kimi_graph.compile.convert import default_lowerings

        if not bench.host.real:  # the engine is CANN's; converting needs none
            sys.modules["torchair.core._torchair"].InitializeGraphEngine = lambda options: None  # type: ignore[attr-defined]
        self.bench, self.fx, self.ge = bench, npu_fx_compiler, fx2ge_converter
        self.config, self.observer = CompilerConfig, GraphTransformObserver
        for overload, lowering in default_lowerings().items():
            fx2ge_converter.register_fx_node_ge_converter(overload)(self.converter(lowering))

    def converter(self, lowering: Callable[..., Any]) -> Callable[..., Any]:
        def convert(*args: Any, meta_outputs: Any = None, **kwargs: Any) -> Any:
            self.room.result = _tensors(meta_outputs)
            return lowering(self.room, *args, **kwargs)

        return convert

    def convert(self, module: Any) -> Any:
        """The nodes of the GE graph, from fake tensors in a tracing context, as `torch.compile` would give them."""
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode

        from kimi_graph.compile.lower import Room
        from kimi_graph.compile.phases import meta

        fake = FakeTensorMode(allow_non_fake_inputs=True)
        inputs = [fake.from_tensor(n.meta["val"]) for n in module.graph.nodes if n.op == "placeholder"]
        config = self.config()
        config.experimental_config.enable_ref_data = True
        config.export.export_mode = True
        with self.bench.host.shield(), tracing(TracingContext(fake)):
            observer = self.observer(module, inputs, config)
            run = observer.apply_gegraph_pass
            observer.apply_gegraph_pass = lambda f, g, name: None if name in self.SKIPPED else run(f, g, name)
            module = self.fx._optimize_fx(module, config, observer)
            graph = self.ge.GeConcreteGraph(config, name="whole")
            graph.save_fx_graph(module)
            self.room = Room(self.bench.host, self.bench.target, self.bench.target.cann)
            # The causal mask, an input that a lowering adds, is made the way torchair makes inputs.
            self.room.input = lambda name, shape, dtype: graph.parse_input(name, (), {}, meta(tuple(shape), dtype))
            made = self.fx._NpuGraphConverter(module, graph=graph, garbage_collect_values=False).run(*inputs)
            made.optimize_graph_without_runtime(*inputs, observer=observer, aot_gm=module)
        return made.graph.op


def _tensors(spec: Any) -> Any:
    """The meta tensors behind what torchair tells a converter of its results."""
    return [_tensors(s) for s in spec] if isinstance(spec, (list, tuple)) else spec._meta


WORKERS = {"stamping": stamping, "stock": stock}


# ---- the three parts -------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def two_cores() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


def command(model: str, target: str, *options: str) -> dict[str, float]:
    """The command: wall and CPU seconds, and peak memory in GB. This process is small, so the peak is the command's."""
    with TemporaryDirectory() as folder:
        arguments = [sys.executable, "-m", "kimi_graph", "compile", model, "--target", target, "--no-cache", *options]
        arguments += ["-o", f"{folder}/bundle"]
        start = time.perf_counter()
        with Path(folder, "said").open("w+") as said:
            process = subprocess.Popen(
                arguments, env=environment(), stdout=subprocess.DEVNULL, stderr=said, preexec_fn=two_cores
            )
            _, status, used = os.wait4(process.pid, 0)
            wall = time.perf_counter() - start
            if status:
                raise SystemExit(f"failed: {' '.join(arguments)}\n{Path(said.name).read_text()}")
    return {"wall": wall, "cpu": used.ru_utime + used.ru_stime, "gigabytes": used.ru_maxrss * UNITS / 1e9}


def worker(part: str, args: argparse.Namespace) -> dict[str, Any]:
    arguments = [sys.executable, __file__, args.model, "--target", args.target, "--rounds", str(args.rounds)]
    done = subprocess.run(
        [*arguments, "--part", part], env=environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def median(times: Times, *sides: str) -> tuple[float, float]:
    """CPU and wall seconds of sides that run one after the other."""
    rounds = list(zip(*(times[side] for side in sides), strict=True))
    cpu, wall = (statistics.median(sum(t[i] for t in turn) for turn in rounds) for i in (0, 1))
    return cpu, wall


def compare(name: str, ours: tuple[float, float], other: tuple[float, float], promise: float) -> dict[str, Any]:
    ratio = other[0] / ours[0]
    return {
        "name": name,
        "ours": ours[0],
        "other": other[0],
        "ratio": ratio,
        "wall_ratio": other[1] / ours[1],
        "promise": promise,
        "held": ratio >= promise,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    command(args.model, args.target)  # fetches the wheel, writes bytecode
    runs = [command(args.model, args.target) for _ in range(args.rounds)]
    wall, peak = min(r["wall"] for r in runs), max(r["gigabytes"] for r in runs)
    layers, whole = worker("stamping", args), worker("stock", args)
    return {
        "model": args.model,
        "target": args.target,
        "rounds": args.rounds,
        "load": os.getloadavg()[0],
        "command": {
            "runs": runs,
            "seconds": {"name": "compile, wall seconds", "value": wall, "promise": SECONDS, "held": wall <= SECONDS},
            "memory": {"name": "compile, peak GB", "value": peak, "promise": GIGABYTES, "held": peak <= GIGABYTES},
        },
        "comparisons": [
            compare("every layer", median(layers["times"], "ours"), median(layers["times"], "every layer"), STAMPING),
            compare("stock conversion", median(whole["times"], "ours"), median(whole["times"], "stock"), STOCK),
            compare(
                "stock, with trace", median(whole["times"], "ours"), median(whole["times"], "trace", "stock"), STOCK
            ),
        ],
        "same_bytes": layers["equal"],
        "bytes": layers["bytes"],
        "nodes": whole["nodes"],
    }


def measure_mesh(args: argparse.Namespace) -> dict[str, Any]:
    """The command alone, of all ranks."""
    options = ("--mesh", args.mesh)
    command(args.model, args.target, *options)
    runs = [command(args.model, args.target, *options) for _ in range(args.rounds)]
    wall, peak = min(r["wall"] for r in runs), max(r["gigabytes"] for r in runs)
    return {
        "model": args.model,
        "target": args.target,
        "mesh": args.mesh,
        "rounds": args.rounds,
        "load": os.getloadavg()[0],
        "runs": runs,
        "rows": [
            {"name": "compile, wall seconds", "value": wall, "promise": MESH_SECONDS, "held": wall <= MESH_SECONDS},
            {"name": "compile, peak GB", "value": peak, "promise": MESH_GIGABYTES, "held": peak <= MESH_GIGABYTES},
        ],
    }


def show_mesh(found: dict[str, Any]) -> None:
    usual = {key: statistics.median(r[key] for r in found["runs"]) for key in ("wall", "cpu")}
    how = f"{found['rounds']} rounds, load {found['load']:.1f}"
    print(f"{found['model']} for {found['target']} on {found['mesh']}, all phases; {how}")
    for row in found["rows"]:
        print(f"{row['name']:24}{row['value']:8.2f}   at most {row['promise']}{'' if row['held'] else '   missed'}")
    print(f"{'':24}medians: wall {usual['wall']:.2f} s, CPU {usual['cpu']:.2f} s")


def missed(found: dict[str, Any]) -> list[str]:
    rows = [found["command"]["seconds"], found["command"]["memory"], *found["comparisons"]]
    return [row["name"] for row in rows if not row["held"]] + ([] if found["same_bytes"] else ["the same bytes"])


def show(found: dict[str, Any]) -> None:
    runs, nodes = found["command"]["runs"], found["nodes"]
    usual = {key: statistics.median(r[key] for r in runs) for key in ("wall", "cpu")}
    how = f"{found['rounds']} rounds, load {found['load']:.1f}"
    print(f"{found['model']} for {found['target']}, prefill and decode; {how}")
    for row in (found["command"]["seconds"], found["command"]["memory"]):
        print(f"{row['name']:24}{row['value']:8.2f}   at most {row['promise']}{'' if row['held'] else '   missed'}")
    print(f"{'':24}medians: wall {usual['wall']:.2f} s, CPU {usual['cpu']:.2f} s")
    print(f"\n{'CPU seconds against':24}{'ours':>8}{'other':>8}{'ratio':>8}{'by wall':>9}{'promise':>9}")
    for row in found["comparisons"]:
        numbers = (
            f"{row['ours']:8.2f}{row['other']:8.2f}{row['ratio']:8.1f}{row['wall_ratio']:9.1f}{row['promise']:9.1f}"
        )
        print(f"{row['name']:24}{numbers}{'' if row['held'] else '   missed'}")
    same = "the same" if found["same_bytes"] else "NOT the same"
    print(f"\nstamped and converted layer by layer: {same} {found['bytes']:,} bytes")
    print(f"nodes: ours {nodes[0]:,} (equal constants are one), stock {nodes[1]:,}")
    print("missed: " + ", ".join(missed(found)) if missed(found) else "all promises held")


def main() -> int:
    parser = argparse.ArgumentParser(description="Time and memory of `kimi-graph compile`, and what stamping saves.")
    parser.add_argument("model", nargs="?", default="kimi-linear-48b", help="preset, config.json or checkpoint folder")
    parser.add_argument("--target", default="a3")
    parser.add_argument("--mesh", help="measure the command on a mesh alone: pp=4,dp=8,tp=32,ep=128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--part", choices=tuple(WORKERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        two_cores()
        print(json.dumps(WORKERS[args.part](Bench(args.model, args.target), args.rounds)))
        return 0
    if args.mesh:
        found = measure_mesh(args)
        print(json.dumps(found, indent=2)) if args.json else show_mesh(found)
        return 0 if all(row["held"] for row in found["rows"]) else 1
    found = measure(args)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
