"""Damaged files of every kind: each command ends, with a clear error where it must, and touches nothing outside.

`pytest -m fuzz` tries many; without it a few of each kind are tried.
"""

import contextlib
import copy
import hashlib
import json
import math
import os
import shutil
import signal
import struct
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kimi_graph import cli
from kimi_graph.compile.ge_proto import ModelDef

SECONDS = 60  # of one command on a small bundle, on a busy machine; they take one or two

# ---- what may be opened ----------------------------------------------------------------------------------------------

opened: list[str] = []
watching = False


def _hook(event, args):
    if watching and event in ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        opened.extend(os.fsdecode(a) for a in args[:2] if isinstance(a, (str, bytes)) and len(a) > 1)


sys.addaudithook(_hook)


@contextlib.contextmanager
def watched(outside):
    """Nothing in the folder `outside` may be opened, and all has to end in time."""
    global watching
    opened.clear()
    before = {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()}

    def late(*_):
        raise TimeoutError(f"still running after {SECONDS} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    watching = True
    try:
        yield
    finally:
        watching = False
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    home = str(outside.resolve())
    assert not [name for name in opened if os.path.realpath(name).startswith(home)]
    assert {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()} == before


def run(*arguments, outside):
    """A command line in this process: how it ended."""
    with watched(outside):
        result = CliRunner().invoke(cli.app, [str(a) for a in arguments], prog_name="kimi-graph")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"{arguments[0]}: {result.exception!r}") from result.exception
    assert result.exit_code in (0, 1), result.output
    if result.exit_code and not (arguments[0] == "diff" and result.stdout):
        last = result.stderr.strip().splitlines()[-1] if result.stderr.strip() else ""
        assert "error: " in result.stderr or "FAULT" in result.stdout, result.output
        assert len(last) < 3000, f"{len(last)} characters"
    return result


# ---- damage ----------------------------------------------------------------------------------------------------------

WORDS = [
    "",
    "x",
    "../outside/secret",
    "graphs/../../outside/secret",
    "nan",
    "\0",
    "é" * 300,
    "float32",
    "a/b",
    "pp=1e9",
]
NUMBERS = [0, 1, -1, 7, 2**31, 2**63, 10**40, 0.5, -0.0, math.inf, math.nan]


def values(outside):
    """Anything that JSON may hold, places outside among them."""
    words = st.sampled_from([*WORDS, str(outside / "secret"), str(outside)])
    leaves = st.one_of(st.none(), st.booleans(), st.sampled_from(NUMBERS), words)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=5
    )


def places(value, path=()):
    """Paths of all that is inside a JSON value; of long lists the first and the last."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    chosen = list(items)
    for key, inner in chosen if len(chosen) < 12 else [*chosen[:4], *chosen[-2:]]:
        yield from places(inner, (*path, key))


def damage(draw, value, outside):
    """A JSON value with one or two things replaced, taken away or doubled."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(places(value))))
        if not path:
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        what = draw(st.sampled_from(["replace", "replace", "replace", "delete", "double"]))
        if what == "replace":
            holder[path[-1]] = draw(values(outside))
        elif what == "delete":
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(holder[path[-1]]))
        else:
            holder["new"] = copy.deepcopy(holder[path[-1]])
    return value


def flip(draw, data):
    """Bytes with some flipped, cut out, cut off or put in."""
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        what = draw(st.sampled_from(["flip", "flip", "cut off", "cut out", "put in"]))
        if what == "flip" and data:
            data[at] ^= draw(st.integers(1, 255))
        elif what == "cut off":
            del data[at:]
        elif what == "cut out":
            del data[at : at + draw(st.integers(1, 40))]
        else:
            data[at:at] = draw(st.binary(min_size=1, max_size=20))
    return bytes(data)


def as_json(value):
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def text_or_bytes(draw, data, outside):
    """A JSON file, damaged in what it says or in its bytes."""
    if draw(st.integers(0, 3)):
        return as_json(damage(draw, json.loads(data), outside))
    return flip(draw, data)


def rehash(folder):
    """Make the manifest agree with the files, so that they are read."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        manifest["weights"]["sha256"] = hashlib.sha256((folder / "weights.json").read_bytes()).hexdigest()
        for entry in manifest["graphs"]:
            data = (folder / entry["file"]).read_bytes()
            entry["sha256"], entry["bytes"] = hashlib.sha256(data).hexdigest(), len(data)
    except (ValueError, KeyError, TypeError, OSError):
        return
    path.write_bytes(as_json(manifest))


def change_graph(draw, data):
    """A graph with one thing changed that its bytes still say well."""
    model = ModelDef.FromString(data)
    ops = model.graph[0].op
    op = ops[draw(st.integers(0, len(ops) - 1))]
    descs = [*op.input_desc, *op.output_desc]
    word, number = draw(st.sampled_from(WORDS[:5])), draw(st.sampled_from([0, -1, 1, 2**31, 2**62, 999]))
    what = draw(
        st.sampled_from(["type", "name", "input", "dim", "dtype", "attr", "delete", "double", "no graph", "loop"])
    )
    if what == "type":
        op.type = draw(st.sampled_from([word, "Add", "Reshape", "NetOutput", "Data", "Const"]))
    elif what == "name":
        op.name = draw(st.sampled_from([word, ops[0].name]))
    elif what == "input" and op.input:
        op.input[0] = draw(st.sampled_from([word, f"{ops[0].name}:{number}", f"{ops[-1].name}:0", ":", "x:-1"]))
    elif what == "dim" and descs and descs[0].shape.dim:
        descs[0].shape.dim[0] = number
    elif what == "dtype" and descs:
        descs[-1].dtype = number % 2**31
    elif what == "attr" and op.attr:
        attr = op.attr[draw(st.sampled_from(sorted(op.attr)))]
        if draw(st.booleans()):
            attr.i = number
        else:
            attr.s = word.encode()
    elif what == "delete":
        ops.remove(op)
    elif what == "double":
        ops.add().CopyFrom(op)
    elif what == "no graph":
        del ops[:]
    elif what == "loop" and op.input:
        op.input[0] = f"{op.name}:0"
    return model.SerializeToString()


# ---- bundles ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder to work in; `outside` holds what nobody may open."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "outside").mkdir()
    (folder / "outside" / "secret").write_text('{"secret": 1}')
    return folder


@pytest.fixture(scope="module")
def originals(small, host, place):
    """Bundles of one rank, of a mesh, and with weights inside."""
    from kimi_graph.compile.driver import compile_model
    from kimi_graph.compile.targets import target
    from kimi_graph.parallel import Mesh
    from kimi_graph.read_config import load_config

    sizes = {"batch": 1, "chunk": 16, "max_len": 32, "page": 16, "phases": ("decode",), "checkpoint": small}
    options = {"one": {}, "mesh": {"mesh": Mesh.parse("pp=2,tp=2")}, "constants": {"weights": "constant"}}
    for name, more in options.items():
        compile_model(load_config(small), target=target("a3"), out=place / name, **more, **sizes)
    return [place / name for name in options]


FILES = ["manifest.json", "weights.json", "sources.json", "graph", "graph bytes", "link"]
COMMANDS = {
    "inspect": ["inspect"],
    "nodes": ["inspect", "--graph", "decode"],
    "cost": ["inspect", "--cost"],
    "lint": ["lint"],
    "diff": ["diff"],
    "buckets": ["buckets", "--length", "20"],
    "verify": ["verify", "--steps", "1", "--mode", "native"],
}


def damaged_bundle(draw, originals, place, kind):
    folder = place / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(draw(st.sampled_from(originals)), folder)
    graph = sorted((folder / "graphs").iterdir())[0]
    if kind in ("graph", "graph bytes"):
        data = graph.read_bytes()
        graph.write_bytes(change_graph(draw, data) if kind == "graph" else flip(draw, data))
    elif kind == "link":
        file = draw(st.sampled_from([graph, folder / "weights.json", folder / "manifest.json", folder / "graphs"]))
        inside = file.read_bytes() if file.is_file() else b""
        shutil.rmtree(file) if file.is_dir() else file.unlink()
        to = place / "outside" / draw(st.sampled_from(["secret", "copy"]))
        if inside and to.name == "copy":
            to.write_bytes(inside)
        file.symlink_to(to.parent if file.name == "graphs" else to)
        return folder
    else:
        file = folder / kind
        file.write_bytes(text_or_bytes(draw, file.read_bytes(), place / "outside"))
    if kind != "manifest.json" and draw(st.booleans()) | (kind != "sources.json"):
        rehash(folder)
    return folder


def fuzz(examples, check):
    """Draw and check so many."""

    @settings(
        max_examples=examples, deadline=None, database=None, print_blob=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def drawn(data):
        check(data.draw)

    drawn()


def fuzz_bundle(examples, originals, place, host, kind, commands):
    cache = host.root.parents[1]

    def check(draw):
        folder = damaged_bundle(draw, originals, place, kind)
        name, *options = COMMANDS[draw(st.sampled_from(commands))]
        before = {"lint": ["--cache-dir", cache], "diff": [originals[0]]}.get(name, [])
        run(name, *before, folder, *options, outside=place / "outside")

    fuzz(examples, check)


@pytest.mark.parametrize("kind", FILES)
def test_a_few_damaged_bundles(originals, place, host, kind):
    fuzz_bundle(8, originals, place, host, kind, list(COMMANDS))


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_many_damaged_bundles(originals, place, host, kind, command):
    fuzz_bundle(15 if command == "verify" else 60, originals, place, host, kind, [command])


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("command", ["lint", "diff", "verify", "nodes"])
def test_a_graph_whose_results_are_no_longer_its_own_is_refused(originals, place, host, which, command):
    """Its last node is of another type, and all hashes fit: nothing but the graph itself says so."""
    folder = place / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(originals[which], folder)
    for graph in (folder / "graphs").iterdir():
        model = ModelDef.FromString(graph.read_bytes())
        (net,) = [op for op in model.graph[0].op if op.type == "NetOutput"]
        net.type = "Add"
        graph.write_bytes(model.SerializeToString())
    rehash(folder)
    name, *options = COMMANDS[command]
    before = {"lint": ["--cache-dir", host.root.parents[1]], "diff": [originals[which]]}.get(name, [])
    result = run(name, *before, folder, *options, outside=place / "outside")
    assert result.exit_code == (0 if command == "nodes" else 1)  # inspect shows what is there


# ---- checkpoints -----------------------------------------------------------------------------------------------------

INDEX, SHARDS = "model.safetensors.index.json", "*.safetensors"


def change_header(draw, data, outside):
    """A safetensors file whose header says something else, or claims another size."""
    (size,) = struct.unpack("<Q", data[:8])
    header = as_json(damage(draw, json.loads(data[8 : 8 + size]), outside))
    claimed = draw(st.sampled_from([len(header), len(header), len(header), 0, 2**63, len(data), 2**64 - 1]))
    return struct.pack("<Q", claimed) + header + data[8 + size :]


def damaged_checkpoint(draw, small, place, kind):
    folder = place / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(small, folder)
    shard = sorted(folder.glob(SHARDS))[0]
    outside = place / "outside"
    if kind == "header":
        shard.write_bytes(change_header(draw, shard.read_bytes(), outside))
    elif kind == "shard":
        shard.write_bytes(flip(draw, shard.read_bytes()))
    elif kind == "link":
        file = draw(st.sampled_from([shard, folder / INDEX]))
        file.unlink()
        file.symlink_to(outside / "secret")
    else:
        file = folder / kind
        file.write_bytes(text_or_bytes(draw, file.read_bytes(), outside))
    return folder


CHECKS = {
    "check": lambda folder, bundle, small: ["check", folder],
    "check the index": lambda folder, bundle, small: ["check", folder / INDEX, "--model", small / "config.json"],
    "verify": lambda folder, bundle, small: ["verify", bundle, "--steps", "1", "--checkpoint", folder],
    "shard": lambda folder, bundle, small: ["shard", folder, "--mesh", "tp=2"],
    "weights": lambda folder, bundle, small: ["weights", bundle, "--dry-run", "--checkpoint", folder],
}


def fuzz_checkpoint(examples, originals, small, place, kind, commands):
    def check(draw):
        folder, command = damaged_checkpoint(draw, small, place, kind), draw(st.sampled_from(commands))
        if (kind, command) != ("link", "check the index"):  # a link that is named is followed
            run(*CHECKS[command](folder, originals[0], small), outside=place / "outside")

    fuzz(examples, check)


KINDS = ["config.json", INDEX, "header", "shard", "link"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_damaged_checkpoints(originals, small, place, host, kind):
    fuzz_checkpoint(8, originals, small, place, kind, list(CHECKS))


@pytest.mark.fuzz
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", CHECKS)
def test_many_damaged_checkpoints(originals, small, place, host, kind, command):
    fuzz_checkpoint(15 if command == "verify" else 60, originals, small, place, kind, [command])
