"""What earlier compiles made is found again where nothing that it depends on has changed; it changes no byte."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_graph.compile import driver, kept, torchair_host
from kimi_graph.compile.bundle import LOCAL
from kimi_graph.compile.cache_store import Store
from kimi_graph.compile.driver import Clock, Request, build_pieces
from kimi_graph.compile.kept import Kept, pack_pieces, unpack_pieces
from kimi_graph.compile.prototypes import Prototypes
from kimi_graph.compile.targets import target
from kimi_graph.config import arranged
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config
from tests.compile.family import FAMILY, small_model
from tests.compile.test_driver import content

ROOT = Path(__file__).parents[2]
FOUND = "hit: nothing has changed"


@pytest.fixture
def cache(tmp_path, host, monkeypatch):
    """A cache folder of a test's own, and torchair from where it is."""
    monkeypatch.setattr(torchair_host, "_loaded", host)
    return tmp_path / "cache"


@pytest.fixture
def compile_kept(compile_small, cache):
    """`compile_kept(out, **options)`: what was made, and what was said of the cache."""

    def run(out, **options):
        made = compile_small(out, cache_dir=cache, keep=True, **options)
        return made, list(made.kept)

    return run


# ---- bundles ---------------------------------------------------------------------------------------------------------


def no_work(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("work was started")

    for name in ("captured_pieces", "convert", "stamp_graph", "check_graph", "make_manifest"):
        monkeypatch.setattr(driver, name, fail)
    monkeypatch.setattr(torchair_host, "load", fail)
    monkeypatch.setattr(torchair_host, "find", fail)


def test_a_second_compile_makes_nothing_needs_no_torchair_and_writes_the_same_bytes(
    compile_kept, bundle, small, tmp_path, monkeypatch
):
    _, said = compile_kept(tmp_path / "first")
    assert said[0] == "miss: nothing is kept yet"
    assert "prefill_b2_t16, decode_b2: traced (nothing is kept yet)" in said
    no_work(monkeypatch)
    made, said = compile_kept(tmp_path / "second")
    assert said == [FOUND]
    assert f"cache     {FOUND}" in made.text()
    assert set(made.clock.seconds) == {"cache", "write"}
    assert content(tmp_path / "first") == content(tmp_path / "second") == content(bundle)
    assert json.loads((tmp_path / "second" / LOCAL).read_bytes()) == {"checkpoint": str(small)}


def test_where_a_checkpoint_lies_is_not_kept(compile_kept, small, tmp_path):
    compile_kept(tmp_path / "a")
    shutil.copytree(small, tmp_path / small.name)
    _, said = compile_kept(tmp_path / "b", model=tmp_path / small.name, checkpoint=tmp_path / small.name)
    assert said == [FOUND]
    assert json.loads((tmp_path / "b" / LOCAL).read_bytes()) == {"checkpoint": str(tmp_path / small.name)}


OPTIONS = {
    "--chunk": {"chunk": 32},
    "--phase": {"phases": ("decode",)},
    "--target": {"target": "950dt"},
    "--providers": {"providers": ("builtin", "composed")},
    "--mesh": {"mesh": Mesh.parse("tp=2")},
    "stages": {"mesh": Mesh.parse("pp=3,tp=2")},
    "--exchange": {"mesh": Mesh.parse("tp=2"), "exchange": True},
    "experts": {"weights_format": "int4"},
}


def test_whatever_was_compiled_before_bytes_are_those_without_a_cache(compile_small, compile_kept, tmp_path):
    compile_kept(None)
    for name, options in OPTIONS.items():
        _, said = compile_kept(tmp_path / "kept", **options)
        assert said[0].startswith("miss: ") and "is damaged" not in said[0], (name, said)
        compile_small(tmp_path / "new", **options)
        assert content(tmp_path / "kept") == content(tmp_path / "new"), name
    for options in OPTIONS.values():
        assert compile_kept(None, **options)[1] == [FOUND]


def test_a_miss_says_what_changed_and_what_of_it_was_found(compile_kept):
    compile_kept(None)
    assert compile_kept(None, chunk=32)[1] == [
        "miss: --chunk is 32, was 16",
        "prefill_b2_t32: traced (tokens is 32, was 16); decode_b2: pieces found",
    ]
    compile_kept(None, mesh=Mesh.parse("pp=3,tp=2"))
    assert compile_kept(None, mesh=Mesh.parse("pp=2,tp=2"))[1] == [
        "miss: --mesh is pp=2,tp=2, was pp=3,tp=2",
        "prefill_b2_t16, decode_b2: pieces found",
    ]


def test_weights_are_not_kept_but_the_pieces_that_read_them_are(compile_kept, compile_small, cache, tmp_path):
    for _ in range(2):
        _, said = compile_kept(tmp_path / "kept", weights="constant")
    assert said == ["prefill_b2_t16, decode_b2: pieces found"]
    compile_small(tmp_path / "new", weights="constant")
    assert content(tmp_path / "kept") == content(tmp_path / "new")
    assert not list(cache.glob("*/bundle/*"))


def test_without_keep_nothing_is_kept(compile_small, cache):
    made = compile_small(None, cache_dir=cache)
    assert not made.kept and not cache.exists()


def test_a_damaged_entry_is_noticed_and_made_again(compile_kept, cache, bundle, tmp_path):
    compile_kept(None)
    entries = [p for p in cache.rglob("*") if p.is_file()]
    assert len(entries) == 3  # the bundle, and the pieces of two phases
    for path in entries:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    _, said = compile_kept(tmp_path / "b")
    assert sum(line.endswith("damaged; made again") for line in said) == 3
    assert content(tmp_path / "b") == content(bundle)
    assert compile_kept(None)[1] == [FOUND]


def test_a_cache_that_cannot_be_written_is_said_and_the_bundle_made(compile_kept, cache, bundle, tmp_path):
    cache.mkdir()
    (cache / kept.FOLDER).write_text("mine")
    _, said = compile_kept(tmp_path / "b")
    assert any("nothing was kept" in line for line in said)
    assert content(tmp_path / "b") == content(bundle)


def command(cache, home, out, *options, source="kimi-linear-48b"):
    """A compile in a process of its own."""
    environ = {k: v for k, v in os.environ.items() if k not in ("KIMI_GRAPH_CACHE", "XDG_CACHE_HOME")}
    environ |= {"HOME": str(home), "PYTHONPATH": str(ROOT)}
    sizes = ["--phase", "decode", "--cache-dir", str(cache), *options]
    arguments = [sys.executable, "-m", "kimi_graph", "compile", str(source), "--target", "a3", "-o", str(out), *sizes]
    return subprocess.Popen(arguments, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def fetched(tmp_path, host):
    """A cache with torchair in it, to be filled by processes."""
    cache = tmp_path / "cache"
    shutil.copytree(host.root, cache / host.root.relative_to(host.root.parents[1]))
    return cache


def test_two_builders_at_once_make_one_whole_bundle_and_a_moved_cache_serves_another_home(
    fetched, small, tmp_path, compile_small
):
    both = [command(fetched, tmp_path, tmp_path / "b", source=small) for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    (tmp_path / "other").mkdir()
    shutil.move(fetched / kept.FOLDER, tmp_path / "other" / kept.FOLDER)  # without torchair
    again = command(tmp_path / "other", tmp_path / "home", tmp_path / "again", source=small)
    out, err = again.communicate(timeout=120)
    assert f"cache     {FOUND}" in out, err
    assert "torchair" not in err
    compile_small(tmp_path / "new", phases=("decode",), batch=None, chunk=None, max_len=None, page=None)
    assert content(tmp_path / "b") == content(tmp_path / "again") == content(tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "b", "cache", "new", "other"]


# ---- keys ------------------------------------------------------------------------------------------------------------

PRESET = load_config("kimi-linear-48b")


def keys(request, made_with=None):
    """Keys of the bundle and of the pieces of its first phase."""
    mine = Kept(Store(Path("nowhere")), {"torch": "2.13.0"} | (made_with or {}))
    b = request.buckets()[0]
    rules = None if request.layout is None else request.layout.rules(b.phase)
    fields = mine._bundle_fields(request), mine._piece_fields(request, b, rules)
    assert json.loads(json.dumps(fields)) == list(fields)  # JSON says all of it
    return fields


CHANGES = {
    "phases": {"phases": ("decode",)},
    "rows": {"rows": 2},
    "chunk": {"chunk": 256},
    "max_len": {"max_len": 1000},
    "page": {"page": 64},
    "pages": {"pages": 99},
    "slots": {"slots": 99},
    "patches": {"config": load_config("kimi-k2.5"), "patches": 64},
    "kv_dtype": {"config": load_config("kimi-k3.1-pro"), "kv_dtype": "int8"},
    "weights_format": {"weights_format": "int4"},
    "mesh": {"mesh": Mesh.parse("tp=2")},
    "exchange": {"mesh": Mesh.parse("dp=2"), "rows": 2, "exchange": True},
    "split_cache": {"mesh": Mesh.parse("tp=2"), "split_cache": True},
    "pad": {"mesh": Mesh.parse("tp=2"), "pad": True},
    "config": {"config": dataclasses.replace(PRESET, norm_eps=1e-3)},
    "target": {"target": target("950dt")},
}
NOT_IN_KEYS = {"constants", "stored"}  # bundles with weights are not kept; what is stored says what experts are kept as


def test_every_field_of_a_request_is_in_the_key_of_a_bundle():
    assert set(CHANGES) | NOT_IN_KEYS == {f.name for f in dataclasses.fields(Request)}
    for name, change in CHANGES.items():
        others = {field: value for field, value in change.items() if field != name}
        default = Request(**{"config": PRESET, "target": target("a3"), **others})
        changed = dataclasses.replace(default, **change)
        assert keys(default)[0] != keys(changed)[0], name


@pytest.mark.parametrize(
    "change",
    [
        {"chunk": 256},
        {"max_len": 1000},
        {"weights_format": "int4"},
        {"mesh": Mesh.parse("tp=2")},
        {"mesh": Mesh.parse("tp=4")},
        {"config": dataclasses.replace(PRESET, norm_eps=1e-3)},
        {"config": arranged(PRESET, 4)},
        {"target": target("950dt")},
        {"target": target("a3", cann="9.1")},
        {"target": target("a3", providers=("builtin", "composed"))},
        {"target": dataclasses.replace(target("a3"), op_soc="another")},
    ],
    ids=str,
)
def test_what_changes_pieces_is_in_their_key(change):
    default = Request(config=PRESET, target=target("a3"))
    assert keys(default)[1] != keys(dataclasses.replace(default, **change))[1]


def test_padding_is_in_the_key_of_pieces():
    odd = dataclasses.replace(PRESET, vocab=163841)
    requests = [Request(config=odd, target=target("a3"), mesh=Mesh.parse("tp=4"), pad=pad) for pad in (False, True)]
    b = Request(config=PRESET, target=target("a3")).buckets()[0]
    mine = Kept(Store(Path("nowhere")), {})
    first, second = (mine._piece_fields(r, b, r.layout.rules("prefill")) for r in requests)
    assert first != second


def test_pipeline_stages_are_not_in_the_key_of_pieces():
    by_stages = [Request(config=PRESET, target=target("a3"), mesh=Mesh.parse(f"pp={n},tp=2")) for n in (2, 4)]
    assert keys(by_stages[0])[1] == keys(by_stages[1])[1]


def test_versions_and_sources_are_in_every_key(tmp_path, host, monkeypatch):
    late = torchair_host.Late()
    made_with = Kept.at(tmp_path, late).made_with
    assert made_with["torchair"] == late.digest and made_with["torch-npu"] == host.version
    request = Request(config=PRESET, target=target("a3"))
    for name in made_with:
        before, after = keys(request, made_with), keys(request, made_with | {name: "another"})
        assert before[0] != after[0] and before[1] != after[1], name


def test_the_digest_of_the_source_is_that_of_the_files_wherever_they_lie(tmp_path):
    for name in ("kimi_graph", "ops", "parallel", "compile"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    copy = tmp_path / "kimi_graph"
    assert kept.digest_of(copy) == kept.source_digest()
    with (tmp_path / "ops" / "norm.py").open("a") as file:
        file.write("# a comment\n")
    assert kept.digest_of(copy) != kept.source_digest()
    shutil.copy(ROOT / "ops" / "norm.py", tmp_path / "ops" / "norm.py")
    kernel = tmp_path / "ops" / "kernels" / "common" / "op_kernel" / "rows.h"
    kernel.write_bytes(kernel.read_bytes() + b"\n")  # bundles hold them
    assert kept.digest_of(copy) != kept.source_digest()
    shutil.copy(ROOT / kernel.relative_to(tmp_path), kernel)
    assert kept.digest_of(copy) == kept.source_digest()
    (tmp_path / "parallel" / "mesh.py").rename(tmp_path / "parallel" / "meshes.py")
    assert kept.digest_of(copy) != kept.source_digest()


# ---- pieces as bytes -------------------------------------------------------------------------------------------------


def orders(piece):
    """Names in the orders that dicts have them in."""
    return [list(names) for names in (piece.inputs, piece.outputs, piece.weights, piece.origins["values"])]


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("mesh", [None, "tp=2"], ids=str)
def test_pieces_come_back_as_they_were(host, name, mesh):
    config = small_model(name)
    sizes = {"chunk": 16, "max_len": 96, "page": 16, "patches": 16 if config.vision else None}
    request = Request(config=config, target=target("950dt"), mesh=mesh and Mesh.parse(mesh), **sizes)
    for b in request.buckets():
        rules = None if request.layout is None else request.layout.rules(b.phase)
        made = build_pieces(request, b, host, Prototypes("950", host.root), Clock(), rules)
        back = unpack_pieces(pack_pieces(made))
        assert back == made
        assert list(back) == list(made)
        assert [orders(piece) for piece in back.values()] == [orders(piece) for piece in made.values()]
        assert pack_pieces(back) == pack_pieces(made)


def test_a_late_torchair_is_that_which_is_imported(host):
    late = torchair_host.Late()
    assert (late.version, late.load(), late.root) == (host.version, host, host.root)
    assert host.load() is host


def test_a_torchair_that_is_not_there_is_known_before_it_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(torchair_host, "_loaded", None)
    monkeypatch.setattr(torchair_host, "installed", lambda: None)
    monkeypatch.setattr(torchair_host, "_fetch", lambda *_: pytest.fail("fetched"))
    late = torchair_host.Late(cache=tmp_path)
    assert (late.version, late.digest) == (torchair_host.VERSION, torchair_host.SHA256)
