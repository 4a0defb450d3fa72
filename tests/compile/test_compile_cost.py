"""Compiling 48 billion parameters takes little: what is imported, how much memory, how often a layer is traced.

Times are benchmarks/compile_time.py's: a test on a busy machine proves none.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import kimi_graph
from kimi_graph import tree
from kimi_graph.compile import driver, phases
from kimi_graph.compile.capture import Captured
from kimi_graph.compile.targets import target
from kimi_graph.config import ModelConfig
from kimi_graph.models.decoder import Use
from kimi_graph.read_config import load_config
from tests.compile.family import FAMILY, small_model


def test_compiling_the_48b_model_imports_no_torch_npu_and_no_inductor_and_stays_small(host):
    """torchair's converter imports dynamo and with it inductor's package, but no code generator of it."""
    code = """if True:
        import contextlib, json, re, sys
        from pathlib import Path
        from kimi_graph.cli import app
        with contextlib.redirect_stdout(sys.stderr):
            app(sys.argv[1:], standalone_mode=False)
        status = Path("/proc/self/status")
        peak = re.search(r"VmHWM:\\s*(\\d+) kB", status.read_text()).group(1) if status.exists() else 0
        print(json.dumps({"modules": sorted(sys.modules), "kib": int(peak)}))
    """
    arguments = ["compile", "kimi-linear-48b", "--target", "a3", "--dry-run", "--no-cache"]
    arguments += ["--cache-dir", str(host.root.parents[1])]
    paths = os.pathsep.join([str(Path(kimi_graph.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    unwanted = """torch_npu transformers triton networkx matplotlib torch._inductor.lowering torch._inductor.codegen
        torch._inductor.compile_fx torchair.npu_fx_compiler torchair._utils.npu_fx_passes""".split()
    assert set(unwanted) & set(report["modules"]) == set()
    assert report["kib"] < 800_000_000 / 1024  # 0.4 GB in 2026; more than twice that is a promise broken


@pytest.fixture(scope="module")
def request_48b() -> driver.Request:
    return driver.Request(config=load_config("kimi-linear-48b"), target=target("a3"))


def test_each_kind_of_part_is_captured_once(request_48b, monkeypatch):
    captured = []
    real = phases.capture
    monkeypatch.setattr(phases, "capture", lambda *args: captured.append(args) or real(*args))
    pieces = phases.capture_pieces(request_48b.config, request_48b.buckets()[0])
    assert sorted(pieces) == ["attn_add", "dense", "embed", "ffn_add", "head", "kda", "mla", "moe"]
    assert len(captured) == 8
    assert len(phases.uses(request_48b.config, request_48b.buckets()[0])) == 1 + 4 * 27 + 1


def as_values(captured: Captured) -> tuple[Any, ...]:
    """All there is of a captured part, but the lines it comes from."""
    shapes = [str(tree.map(lambda x: (x.shape, x.dtype), n.meta["val"])) for n in captured.module.graph.nodes]
    return str(captured.module.graph), captured.inputs, captured.outputs, shapes


def places(config: ModelConfig, b: phases.Bucket) -> dict[str, list[Use]]:
    """Where each kind of part stands."""
    found: dict[str, list[Use]] = {}
    for use in phases.uses(config, b):
        found.setdefault(use.part, []).append(use)
    return found


@pytest.mark.parametrize("name", FAMILY)
def test_a_places_own_capture_gives_the_graph_that_stamping_gives(name):
    """So a part does not depend on the place it was captured at: everywhere in a fixture, at both ends of a preset."""
    for config, ends in ((small_model(name), False), (load_config(name), True)):
        pictures = {"patches": 16} if config.vision else {}
        for b in driver.Request(config=config, target=target("a3"), rows=2, chunk=16, **pictures).buckets():
            trace = phases.piece_tracer(config, b)
            for part, uses in places(config, b).items():
                first, *others = [as_values(trace(use)) for use in (uses[:: max(1, len(uses) - 1)] if ends else uses)]
                assert all(other == first for other in others), (config.name, b.name, part)


def test_equal_constants_are_one_node(request_48b, host):
    graph = driver.build_graph(request_48b, request_48b.buckets()[1], host)
    constants = [op for op in graph.model.graph[0].op if op.type == "Const"]
    values = Counter(op.attr["value"].SerializeToString(deterministic=True) for op in constants)
    assert len(constants) > 10
    assert set(values.values()) == {1}


@pytest.mark.slow
def test_the_comparison_with_torchairs_own_export_makes_the_same_operators_on_both_sides(host):
    """The benchmark refuses graphs that differ in collectives, grouped products, attention and KDA."""
    script = Path(kimi_graph.__file__).resolve().parents[1] / "benchmarks/mesh_against_torchair.py"
    arguments = ["kimi-linear-48b", "--mesh", "tp=2", "--layers", "4", "--rounds", "1", "--json"]
    env = {**os.environ, "KIMI_GRAPH_CACHE": str(host.root.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, env=env)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["counts"]["HcomAllReduce"] == 1 + 4 + 4
    assert found["layers"] == 4 and found["all"]["theirs"] > found["one"]["theirs"]
