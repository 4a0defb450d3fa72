"""What holds for the repository as a whole: who may import whom, links, packaging, words, docstrings, documents."""

import ast
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kimi_graph
from kimi_graph import cli
from kimi_graph._links import LINKED
from tests.documents import blocks, pages

ROOT = Path(kimi_graph.__file__).resolve().parent.parent
PACKAGE = ROOT / "kimi_graph"

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs the repository, not a wheel")


def git(*arguments, cwd=ROOT):
    return subprocess.check_output(["git", *arguments], cwd=cwd, text=True, stderr=subprocess.PIPE)


def files():
    """Tracked files and new ones that git does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git clone")
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return sorted({ROOT / name for name in listed if name and os.path.lexists(ROOT / name)})


def modules():
    """Name and path of every module of the package."""
    found = {}
    for folder, name in [(PACKAGE, "kimi_graph"), *((ROOT / x, f"kimi_graph.{x}") for x in LINKED)]:
        for path in folder.rglob("*.py"):
            if not path.is_symlink():
                parts = path.relative_to(folder).with_suffix("").parts
                found[".".join([name, *(p for p in parts if p != "__init__")])] = path
    return found


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(), str(path))


def statements(node):
    """Every statement inside, at any depth; the expressions are nine tenths of a tree."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, field, ()):
            yield inner
            yield from statements(inner)


def imports(name, path):
    """What a module imports, anywhere in its body and for type checkers too: `(line, full name, relative)`."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            yield from ((node.lineno, f"{base}.{alias.name}", node.level > 0) for alias in node.names)


# Import direction.

# A module's floor; it may import from its own floor and the ones before it. First match counts.
FLOORS = [
    ("language", r"kimi_graph\.(errors|tree|spec|config|display|formats|progress|taps|files|hardware|_links)"),
    ("parallel", r"kimi_graph\.parallel"),
    ("ops", r"kimi_graph\.ops"),
    ("layers", r"kimi_graph\.layers"),
    ("models", r"kimi_graph\.(models|read_config|families|config_keys|init|tokenizer|released_tokenizer|vision)"),
    ("files", r"kimi_graph\.(headers|finite|naming|audit|streamed|checkpoint|fixture|sampling)"),
    ("compile", r"kimi_graph\.compile"),
    ("commands", r"kimi_graph\.(check|doctor|shard)"),
    ("plan", r"kimi_graph\.plan"),
    ("serving", r"kimi_graph\.serving"),
    ("day0", r"kimi_graph\.day0"),
    ("cli", r"kimi_graph\.(cli|__main__)"),
]


def floor(name):
    for height, (_, pattern) in enumerate(FLOORS):
        if re.match(pattern + r"(\.|$)", name):
            return height
    return None


def test_every_module_has_a_floor():
    assert [n for n in modules() if floor(n) is None] == ["kimi_graph"]


def test_imports_point_one_way():
    wrong = []
    for name, path in modules().items():
        for line, target, _ in imports(name, path):
            if name != "kimi_graph" and target.startswith("kimi_graph.") and (floor(target) or 0) > floor(name):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_imports_are_relative_inside_a_folder_and_absolute_across():
    wrong = []
    for name, path in modules().items():
        folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
        if folder == "kimi_graph":
            continue  # every other folder is inside this one
        for line, target, relative in imports(name, path):
            inside = target.startswith(f"{folder}.")
            if relative != inside and target.startswith("kimi_graph"):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {target}, {'relative' if relative else 'absolute'}")
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_a_second_copy_of_the_linked_folders():
    wrong = []
    for path in files():
        if path.suffix == ".py" and not path.is_symlink():
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text())):
                named = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                named += [node.module] if isinstance(node, ast.ImportFrom) and not node.level and node.module else []
                wrong += [f"{name}:{node.lineno}: {n}" for n in named if n.split(".")[0] in LINKED]
    assert not wrong, "\n".join(wrong)


def test_every_file_parses_as_python_3_10():
    for path in files():
        if path.suffix == ".py" and not path.is_symlink():
            ast.parse(path.read_text(), str(path), feature_version=(3, 10))


@pytest.mark.parametrize(
    "name, least",
    [
        ("dataclass_transform", (3, 11)),
        ("Self", (3, 11)),
        ("assert_never", (3, 11)),
        ("override", (3, 12)),
        ("TypeIs", (3, 13)),
    ],
)
def test_names_newer_than_python_3_10_come_from_typing_extensions(name, least):
    users = [n for n, path in modules().items() for _, target, _ in imports(n, path) if target == f"typing.{name}"]
    assert not users, f"typing.{name} exists from Python {least}: {users}"


# Links and packaging.


def test_links_are_committed_as_links():
    for name in LINKED:
        mode, _, _, path = git("ls-files", "-s", f"kimi_graph/{name}").split()
        assert (mode, path) == ("120000", f"kimi_graph/{name}")
        assert str((PACKAGE / name).readlink()) == f"../{name}"


def test_a_clone_without_links_says_so_and_the_remedy_it_names_works(tmp_path):
    clone = tmp_path / "clone"
    git("-c", "core.symlinks=false", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone))

    def load():
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.run(
            [sys.executable, "-c", "import kimi_graph; print(kimi_graph.__file__)"],
            cwd=clone,
            env=env,
            capture_output=True,
            text=True,
        )

    before = load()
    message = before.stderr.split("ImportError: ")[1]
    assert before.returncode == 1
    assert "kimi_graph/ops should be a link to the folder ../ops, found a text file" in message
    assert message.count("\n") == 4, "one message of four lines"
    for command in re.findall(r"^    (git .*)$", message, re.M):
        git(*shlex.split(command)[1:], cwd=clone)
    assert load().stdout.strip() == str(clone / "kimi_graph" / "__init__.py")


@pytest.mark.parametrize("left", ["a text file", "a link to nothing", "nothing"])
def test_a_copy_without_the_linked_folders_says_so(tmp_path, left):
    package = tmp_path / "kimi_graph"
    shutil.copytree(PACKAGE, package, ignore=lambda folder, _: LINKED if Path(folder) == PACKAGE else ())
    for name in LINKED:
        if left == "a text file":
            (package / name).write_text(f"../{name}")
        elif left == "a link to nothing":
            (package / name).symlink_to(f"../{name}")
    run = subprocess.run([sys.executable, "-c", "import kimi_graph"], cwd=tmp_path, capture_output=True, text=True)
    assert f"kimi_graph{os.sep}ops should be a folder, found {left}." in run.stderr


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory):
    """A copy of the repository, so that building leaves nothing behind here."""
    tree = tmp_path_factory.mktemp("source") / "kimi-graph"
    for path in files():
        to = tree / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to, follow_symlinks=False)
    return tree


def packaged_files():
    """What belongs into a wheel: the package's files, with linked folders as real ones."""
    kept = set()
    for path in files():
        first, *rest = path.relative_to(ROOT).parts
        if first in LINKED:
            kept.add("/".join(["kimi_graph", first, *rest]))
        elif first == "kimi_graph" and not path.is_symlink():
            kept.add("/".join([first, *rest]))
    return kept


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_built_holds_every_file_as_a_real_one(source_tree, tmp_path, kind):
    code = f"import setuptools.build_meta as b; print(b.build_{kind}({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source_tree, check=True, capture_output=True)
    (built,) = tmp_path.iterdir()
    if kind == "wheel":
        with zipfile.ZipFile(built) as archive:
            inside = {i.filename for i in archive.infolist()}
    else:
        with tarfile.open(built) as archive:
            assert all(m.isfile() or m.isdir() for m in archive.getmembers())
            inside = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    inside = {name for name in inside if name.startswith("kimi_graph/")}
    assert inside == packaged_files()
    assert {"kimi_graph/presets/kimi-linear-48b.json", "kimi_graph/ops/base.py", "kimi_graph/py.typed"} <= inside


# The public names.


def test_importing_the_package_imports_nothing_else():
    code = "import sys, kimi_graph; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]


def test_lazy_names_are_those_a_type_checker_sees():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.level == 1
        seen |= {alias.name: node.module for alias in node.names}
    lazy = dict.fromkeys(kimi_graph._FOLDERS) | kimi_graph._HOMES
    assert lazy == seen
    assert set(kimi_graph.__all__) == {"__version__", *lazy}


@pytest.mark.parametrize("name", kimi_graph.__all__)
def test_every_public_name_exists(name):
    assert getattr(kimi_graph, name) is not None
    assert name in dir(kimi_graph)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'prefil'"):
        kimi_graph.prefil  # noqa: B018


def test_every_module_says_what_it_is():
    silent = [n for n, path in modules().items() if path.stat().st_size and not ast.get_docstring(parsed(path))]
    assert not silent


@pytest.mark.parametrize("name", ["", ".layers", ".models", ".ops", ".parallel"])
def test_every_public_function_says_what_it_gives(name):
    """Except `*_specs`: the tree it fills and the layer's function say it."""
    module = importlib.import_module(f"kimi_graph{name}")
    public = {n: getattr(module, n) for n in module.__all__ if not n.endswith("_specs")}
    silent = [n for n, f in public.items() if callable(f) and not isinstance(f, type) and not f.__doc__]
    assert not silent


# Words.

# A machine's paths, hosts of package registries, and keys. Written so that this file does not match itself.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~}])/(?:work|tmp|root|home|Users)/\w|[A-Z]:\\Users",
    "a folder beside the repository": r"\.\./sha" + "red",
    "a registry's host": r"py" + r"pi\.org|python" + r"hosted|registry\.np" + r"mjs|deb\.deb" + "ian",
    "a private key": "BEGIN [A-Z ]*PRIVATE" + " KEY",
    "a merge left undone": r"^(<{7}|>{7}) ",
}


def test_no_file_names_this_machine_or_a_registry():
    found = []
    for path in files():
        if path.is_symlink() or path.name == "LICENSE":
            continue
        text = path.read_bytes().decode("utf-8", "replace")
        for what, pattern in FORBIDDEN.items():
            for match in re.finditer(pattern, text, re.M):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{line}: {what}: {match[0]!r}")
    assert not found, "\n".join(found)


def test_no_large_or_generated_file_is_kept():
    large = [f"{p.relative_to(ROOT)}: {p.stat().st_size:,} bytes" for p in files() if p.stat().st_size > 1 << 20]
    assert not large, "\n".join(large)


# Documents.


def commands(name):
    """Every `kimi-graph` command in a document, in its blocks and in its lines, as a list of words."""
    shown = [b.code.replace("\\\n", " ") for b in blocks(name) if b.language == "bash"]
    said = re.findall(r"`(kimi-graph [^`]+)`", (ROOT / name).read_text())
    for line in "\n".join([*shown, *said]).splitlines():
        for part in re.split(r"&&|[|>]", line.partition("#")[0]):
            words = shlex.split(part)
            if words[:1] == ["kimi-graph"]:
                yield words[1:]


@pytest.mark.parametrize("name", pages())
def test_commands_and_options_of_the_documents_exist(name):
    from typer.main import get_command

    group = get_command(cli.app)
    for words in commands(name):
        if words and not words[0].startswith("-"):
            command = group.commands[words[0]]
            options = {o for p in command.params for o in p.opts} | {"--help"}
            own = words[1 : words.index("--")] if "--" in words else words[1:]  # what follows is the engine's
            unknown = [w for w in own if w.startswith("-") and w.partition("=")[0] not in options]
            assert not unknown, f"{name}: kimi-graph {' '.join(words)}: {unknown}"


def test_the_readme_opens_with_a_sentence_a_command_and_its_last_line():
    title, _, sentence, *rest = (ROOT / "README.md").read_text().splitlines()
    assert title == "# kimi-graph"
    assert len(sentence) > 40 and sentence.endswith(".")
    opening = "\n".join(rest[:24])
    assert "pip install torch==2.13.0 -e . && kimi-graph compile kimi-linear-48b --target a3 -o build/kl48b" in opening


def test_the_readme_has_exactly_two_commands_for_a_fresh_machine():
    lines = [line for b in blocks("README.md") for line in b.code.splitlines() if line.startswith("pip install")]
    assert lines == [
        "pip install torch==2.13.0 -e . && kimi-graph compile kimi-linear-48b --target a3 -o build/kl48b",
        "pip install -e '.[test]' && pytest -n 2 --dist loadfile",
    ]


def test_no_document_has_a_number_left_to_fill_in():
    gaps = [
        line
        for name in ("README.md", "CHANGELOG.md")
        for line in (ROOT / name).read_text().splitlines()
        if "FILL" in line
    ]
    assert not gaps, "\n".join(gaps)


def test_relative_links_of_the_documents_lead_somewhere():
    for document in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)}: {target}"


def test_the_version_heads_the_changelog():
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released[0] == kimi_graph.__version__
    assert released == sorted(released, key=lambda v: [int(x) for x in v.split(".")], reverse=True)


def test_the_licence_is_the_full_apache_2():
    # The file as the Apache Software Foundation gives it out.
    digest = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == digest


def test_presets_are_configs_of_a_known_model():
    presets = sorted((PACKAGE / "presets").iterdir())
    assert presets
    for path in presets:
        assert path.suffix == ".json"
        assert json.loads(path.read_text())["model_type"]
        assert kimi_graph.load_config(path.stem).name == path.stem


def test_scripts_of_ci_are_executable_and_parse():
    for name in ("run", "run-torch"):
        path = ROOT / ".ci" / name
        assert os.access(path, os.X_OK)
        subprocess.run(["bash", "-n", path], check=True)
