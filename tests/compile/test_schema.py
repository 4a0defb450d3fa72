"""The pinned schemas: every manifest that is compiled fits, another key does not, and the validator is one."""

import copy
import json
import shutil
from pathlib import Path

import pytest

from kimi_graph.compile.bundle import FORMAT, MANIFEST, dump, open_bundle, read_json
from kimi_graph.compile.lint import lint_bundle
from kimi_graph.compile.schema import DATA, KNOWN, check, schema
from kimi_graph.compile.write_weights import write_weights
from kimi_graph.errors import BundleError
from kimi_graph.parallel import Mesh

BUNDLES = {
    "one rank": {},
    "constants": {"weights": "constant", "phases": ("decode",)},
    "composed": {"providers": ("builtin", "composed"), "phases": ("decode",)},
    "a mesh": {"mesh": Mesh.parse("pp=2,tp=2"), "phases": ("decode",)},
    "copies of experts": {"mesh": Mesh.parse("tp=2"), "redundant_experts": 2, "exchange": True, "phases": ("decode",)},
}


@pytest.fixture(scope="module")
def manifests(compile_small, family_bundle, tmp_path_factory):
    """Manifests of bundles of many kinds, by words."""
    folder = tmp_path_factory.mktemp("schema")
    made = {}
    for i, (what, options) in enumerate(BUNDLES.items()):
        compile_small(folder / str(i), **options)
        made[what] = folder / str(i)
    made["vision, 8-bit caches"] = family_bundle("kimi-k3.1-pro", "a3", kv_dtype="int8")
    return {what: read_json(folder / MANIFEST) for what, folder in made.items()}


def keys(value, path=()):
    """The path of every key in objects of some JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            yield from keys(item, (*path, key))
    elif isinstance(value, list) and value:
        yield from keys(value[0], (*path, 0))


FREE = {("model", "config"), ("mesh", "rules"), ("mesh", "groups"), ("kernels", "files")}  # keys there are names


def is_free(path):
    return any(path[: len(f)] == f and len(path) > len(f) for f in FREE) or "ops" in path[:-1] or "places" in path[:-1]


@pytest.mark.parametrize("what", [*BUNDLES, "vision, 8-bit caches"])
def test_every_compiled_manifest_fits_and_every_key_has_its_name(manifests, what):
    manifest = manifests[what]
    check(manifest, "manifest", "m")
    tried = 0
    for path in list(keys(manifest)):
        if is_free(path):
            continue
        changed = copy.deepcopy(manifest)
        where = changed
        for step in path[:-1]:
            where = where[step]
        where[f"{path[-1]}s"] = where.pop(path[-1])
        with pytest.raises(BundleError, match=r"no entry '|is not known; the keys there are"):
            check(changed, "manifest", "m")
        tried += 1
    assert tried > 60


@pytest.mark.parametrize("what", [*BUNDLES, "vision, 8-bit caches"])
def test_every_value_has_its_type(manifests, what):
    manifest = manifests[what]
    for path in list(keys(manifest)):
        if path[:2] == ("model", "config") and len(path) > 2:
            continue
        changed = copy.deepcopy(manifest)
        where = changed
        for step in path[:-1]:
            where = where[step]
        where[path[-1]] = {"x": 1.5} if not isinstance(where[path[-1]], dict) else "text"
        with pytest.raises(BundleError):
            check(changed, "manifest", "m")


def test_a_renamed_field_is_refused_when_the_bundle_is_opened(bundle, tmp_path):
    folder = Path(shutil.copytree(bundle, tmp_path / "b"))
    manifest = read_json(folder / MANIFEST)
    manifest["state"]["page_size"] = manifest["state"].pop("page_tokens")
    (folder / MANIFEST).write_bytes(dump(manifest))
    with pytest.raises(BundleError, match=r"manifest\.json: no entry 'state\.page_tokens'; the file was changed"):
        open_bundle(folder)


def test_the_schema_is_of_the_format_that_is_written():
    assert schema("manifest")["properties"]["format"]["const"] == FORMAT
    assert f"format {FORMAT}" in schema("manifest")["title"]


def test_a_written_index_fits(bundle, tmp_path):
    folder = Path(shutil.copytree(bundle, tmp_path / "b"))
    write_weights(folder)
    check(read_json(folder / "weights" / "index.json"), "weights-index", "i")


def test_a_bundle_with_constants_passes_lint(compile_small, host, tmp_path):
    compile_small(tmp_path / "b", weights="constant", phases=("decode",))
    report = lint_bundle(tmp_path / "b", host.root)
    assert report.passed, report.text()


@pytest.mark.parametrize("name", ["manifest", "weights-index"])
def test_schemas_use_words_that_the_validator_knows(name):
    def visit(s):
        if isinstance(s, dict):
            assert KNOWN.issuperset(s), s
            for key in ("properties", "$defs"):
                for item in s.get(key, {}).values():
                    visit(item)
            for key in ("items", "additionalProperties", "propertyNames"):
                if s.get(key) is not False:
                    visit(s.get(key))
            for key in ("anyOf", "prefixItems"):
                for item in s.get(key, ()):
                    visit(item)
            assert not set(s.get("required", ())) - set(s.get("properties", ()))

    visit(schema(name))
    assert sorted(p.name for p in DATA.glob("*.schema.json")) == ["manifest.schema.json", "weights-index.schema.json"]


KINDS = {
    "type": ({"type": "integer"}, [0, -1], [1.0, "1", None, True, [], {}]),
    "boolean": ({"type": "boolean"}, [True, False], [0, 1, None, "true"]),
    "const": ({"const": 4}, [4], [3, "4", None]),
    "enum": ({"enum": ["a", "b"]}, ["a"], ["c", None, 1]),
    "minimum": ({"type": "integer", "minimum": 0}, [0, 5], [-1]),
    "pattern": ({"type": "string", "pattern": "^[a-f]+$"}, ["abc"], ["", "x", "abc "]),
    "items": ({"type": "array", "items": {"type": "string"}}, [[], ["a"]], [["a", 1], {}, "a"]),
    "prefixItems": (
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        [["a", 1]],
        [["a"], ["a", 1, 2], [1, "a"]],
    ),
    "properties": (
        {"type": "object", "required": ["a"], "properties": {"a": {"type": "null"}}, "additionalProperties": False},
        [{"a": None}],
        [{}, {"a": 1}, {"a": None, "b": 1}],
    ),
    "additionalProperties": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "propertyNames": {"pattern": "^x"}},
        [{}, {"x": 1}],
        [{"x": "1"}, {"y": 1}],
    ),
    "anyOf": ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, [None, 1], ["a", 1.5]),
    "$ref": ({"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}}, [[1]], [["1"]]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_keyword_means_what_json_schema_says(kind, monkeypatch):
    rules, good, bad = KINDS[kind]
    monkeypatch.setattr("kimi_graph.compile.schema.schema", lambda name: rules)
    for value in good:
        check(value, "it", "here")
    for value in bad:
        with pytest.raises(BundleError, match=r"^here: "):
            check(value, "it", "here")


def test_a_word_that_is_not_known_is_not_ignored(monkeypatch):
    monkeypatch.setattr("kimi_graph.compile.schema.schema", lambda name: {"type": "array", "maxItems": 1})
    with pytest.raises(AssertionError, match="maxItems"):
        check([], "it", "here")


def test_schemas_are_json_that_others_can_read():
    for file in DATA.glob("*.schema.json"):
        found = json.loads(file.read_text())
        assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert found["title"].endswith(("format 4", "format 1"))
