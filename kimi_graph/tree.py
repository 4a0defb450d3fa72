"""Trees of specs, placements, meta tensors or real tensors: one shape for all of them.

A node is a `@param_tree` dataclass, a tuple or a dict; everything else is a leaf. A field that is None is not there.
The nodes are registered with torch's pytrees, so `torch.func` transforms take them as they are.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.utils._pytree as pytree
from typing_extensions import dataclass_transform

from .display import Html, card, columns, pictured, table

Leaf = TypeVar("Leaf")
T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def param_tree(cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only dataclass whose fields are children of a tree.

    Its repr, and what a notebook shows, is a table of its leaves, those of many layers in one row.
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True, repr=False)(cls)
    cls.__repr__, cls._repr_html_ = _text, _html  # type: ignore[method-assign,attr-defined]
    names = tuple(f.name for f in dataclasses.fields(cls))  # type: ignore[arg-type]

    def present(node: Any) -> tuple[str, ...]:
        return tuple(n for n in names if getattr(node, n) is not None)

    def keyed(node: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        return [(pytree.GetAttrKey(n), getattr(node, n)) for n in present(node)], present(node)

    pytree.register_pytree_node(
        cls,
        lambda node: ([getattr(node, n) for n in present(node)], present(node)),
        lambda values, given: cls(**{**dict.fromkeys(names), **dict(zip(given, values, strict=True))}),
        flatten_with_keys_fn=keyed,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    return cls


def _word(key: Any) -> str:
    for field in ("name", "idx", "key"):
        if hasattr(key, field):
            return str(getattr(key, field))
    raise AssertionError(f"unknown key {key!r}")


def items(tree: Any) -> Iterator[tuple[str, Any]]:
    """Leaves with their dotted path, in order: `("layers.3.kda.query", leaf)`."""
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        yield ".".join(_word(key) for key in path), leaf


def leaves(tree: Any) -> list[Any]:
    """The leaves, in order."""
    return pytree.tree_leaves(tree)


def map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:  # noqa: A001 (read as `tree.map`)
    """`f` of every leaf (and of the leaves at the same place in `rest`), in a tree of the same shape."""
    return None if tree is None else pytree.tree_map(f, tree, *rest)


def map_with_path(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Like `map`, with the leaf's dotted path as the first argument."""
    return pytree.tree_map_with_path(lambda p, *x: f(".".join(_word(k) for k in p), *x), tree, *rest)


def _rows(node: Any) -> list[tuple[str, ...]]:
    """Of each kind of leaf (the same name in several layers, alike in shape and dtype) its name, count and looks."""
    found: dict[tuple[str, ...], list[str]] = {}
    for path, leaf in items(node):
        found.setdefault((re.sub(r"(^|\.)\d+(?=\.)", r"\1*", path), *_looks(leaf)), []).append(path)
    rows = [(kind[0] if len(paths) > 1 else paths[0], f"{len(paths):,}", *kind[1:]) for kind, paths in found.items()]
    named = [("", "#", "shape", "axes", "dtype"), *rows]
    kept = [i for i in range(5) if i in (0, 2) or any(row[i] not in ("", "1") for row in rows)]
    return [tuple(row[i] for i in kept) for row in named]


def _looks(leaf: Any) -> tuple[str, str, str]:
    """Shape, axes and dtype of a tensor or of what is declared or placed for one; else the leaf itself."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return repr(leaf)[:60], "", ""
    dims = getattr(leaf, "dims", None)  # of a placement, which says more than a shape
    shape = pictured(leaf.shape) if dims is None else str(leaf)
    dtype = "" if leaf.dtype is None else str(leaf.dtype).removeprefix("torch.")
    return shape, " ".join(getattr(leaf, "axes", ())), dtype


def _text(node: Any) -> str:
    return "\n".join([type(node).__name__, *(f"  {line}" for line in columns(_rows(node)))])


def _html(node: Any) -> Html:
    count = len(leaves(node))
    return card(type(node).__name__, table(_rows(node)), note=f"{count:,} leaves")


def replace(node: T, **fields: Any) -> T:
    """A copy of a node with some children changed."""
    return dataclasses.replace(node, **fields)  # type: ignore[type-var]
