"""Sphinx: `sphinx-build -W docs build/docs`. Pages are MyST; the reference is made of docstrings (`api.md`)."""

import inspect
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]  # a clone need not be installed
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import kimi_graph  # noqa: E402

project, author, release = "kimi-graph", "the kimi-graph authors", kimi_graph.__version__
html_title = "kimi-graph"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build"]
html_theme = "furo"
default_role = "code"  # what docstrings set in single backticks
toc_object_entries_show_parents = "hide"
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_block"]
napoleon_use_rtype = False  # what is before the colon of Returns stands before it
napoleon_use_ivar = True  # attributes stand once, in the table of their class
napoleon_google_docstring, napoleon_numpy_docstring = True, False
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True


# Operators are values; the reference shows the functions that they are made of.
for name, operator in kimi_graph.ops.OPERATORS.items():
    if hasattr(kimi_graph.ops, name):
        setattr(kimi_graph.ops, name, operator.reference)


def join_names(app, what, name, obj, options, lines):
    """Names that share an entry of Attributes become one word: sphinx takes all but the last for a type."""
    if "Attributes:" in lines:
        start = lines.index("Attributes:")
        lines[start:] = [re.sub(r"^ {4}\w+(, \w+)+: ", lambda m: m[0].replace(", ", ","), x) for x in lines[start:]]


def add_letters(app, what, name, obj, options, lines):
    """What the module of a layer or operator says for all that is in it: which letters name axes, and the sources."""
    home = getattr(obj, "__module__", None) or ""
    if what in ("function", "class") and home.startswith(("kimi_graph.layers.", "kimi_graph.ops.")):
        said = inspect.getdoc(sys.modules[home]) or ""
        if found := re.search(r"^(Axes|Letters|Source):(.+\n?)+", said, re.M):
            lines += ["", *found[0].splitlines(), ""]


def setup(app):
    app.connect("autodoc-process-docstring", add_letters, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", join_names, priority=100)
