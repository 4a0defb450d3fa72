"""Run notebooks and keep what they show: `python notebooks/run.py [NAME ...]`, all without a name.

Outputs are committed, so that whoever looks at the repository on the web sees the pictures. What is kept is what every
run gives: numbers of execution, times and other metadata are left out. A notebook that warns is refused.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def run(path: Path) -> nbformat.NotebookNode:
    """The notebook after a run from top to bottom in a new kernel, in the notebooks' folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell fails, an assertion among others.
    """
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(FOLDER)}}
    return NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()


def warnings(notebook: nbformat.NotebookNode) -> list[str]:
    """What cells wrote to standard error that names a warning."""
    outputs = (x for cell in notebook.cells for x in cell.get("outputs", ()) if x.get("name") == "stderr")
    return [x.text for x in outputs if "Warning" in x.text]


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same without what differs from run to run, and without what went to standard error."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02}", {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _joined([x for x in cell.outputs if x.get("name") != "stderr"])
    return notebook


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Pieces of standard output in one: how it is cut is chance."""
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and kept and kept[-1].output_type == "stream":
            kept[-1].text += output.text
            continue
        if "execution_count" in output:
            output.execution_count = None
        kept.append(output)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Run notebooks and keep what they show.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as 01_a_layer; all by default")
    parser.add_argument("--to", type=Path, default=FOLDER, metavar="DIR", help="where they are written; in place")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    for path in [FOLDER / f"{Path(name).stem}.ipynb" for name in given.names] or NOTEBOOKS:
        started = time.perf_counter()
        notebook = run(path)
        if found := warnings(notebook):
            sys.exit(f"{path.name}: {found[0]}")
        nbformat.validate(tidy(notebook))
        out = given.to / path.name
        out.write_text(nbformat.writes(notebook, indent=1).rstrip("\n") + "\n", encoding="utf-8")
        print(f"{path.name}: {out.stat().st_size:,} bytes, {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
