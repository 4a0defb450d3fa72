"""Sphinx: `sphinx-build -W docs build/docs`. Pages are MyST; the reference is made of docstrings (`api.md`)."""

import os
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
napoleon_use_ivar = True  # attributes stand once, in the table of their class
napoleon_google_docstring, napoleon_numpy_docstring = True, False
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": False}
autodoc_preserve_defaults = True
