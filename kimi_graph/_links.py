"""`kimi_graph/ops`, `parallel` and `compile` are links to folders beside this package: are they here?

A clone where git may not make links (the default on Windows), or an archive unpacked without them, has small text
files in their place, and Python would only say that a module is missing. Imports nothing but the standard library.
"""

from pathlib import Path

LINKED = ("ops", "parallel", "compile")


def check_links(package: Path) -> None:
    """Raise an ImportError that says what to do if a linked folder is not a folder.

    Args:
        package: the folder of `kimi_graph`.
    """
    missing = [name for name in LINKED if not (package / name).is_dir()]
    if missing:
        raise ImportError(_explain(package, missing))


def _explain(package: Path, missing: list[str]) -> str:
    first = package / missing[0]
    found = "a text file" if first.is_file() else "a link to nothing" if first.is_symlink() else "nothing"
    if not (package.parent / ".git").exists():
        return (
            f"kimi_graph is incomplete: {first} should be a folder, found {found}. This copy was made where symbolic "
            "links were lost. Install again from a git clone that has them, or from a wheel."
        )
    names = " ".join(f"kimi_graph/{name}" for name in missing)
    return (
        f"kimi_graph is incomplete: {first} should be a link to the folder ../{missing[0]}, found {found}. "
        "Git made this clone without symbolic links. In the clone, run\n"
        "    git config core.symlinks true\n"
        f"    git checkout -- {names}\n"
        "On Windows switch on developer mode first (Settings, System, For developers), or use WSL."
    )
