"""What a bundle leaves to whoever loads it, in words; from its manifest alone, and held against it again.

Some hosts do these things with `kimi-graph deploy`'s files; a runtime of its own has to do all of them.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def bucket_entries(graphs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The static shapes there are graphs for, each with those graphs: one, or one for each stage."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for g in graphs:
        found.setdefault((g["phase"], g["rows"], g["tokens"], g["images"]), []).append(g["name"])
    return [
        {"phase": phase, "rows": rows, "tokens": tokens, "images": images, "graphs": names}
        for (phase, rows, tokens, images), names in found.items()
    ]


def left_to_do(manifest: Mapping[str, Any], generated: Iterable[str], *, constants: bool) -> list[str]:
    """What has to be done before the first step.

    Args:
        generated: inputs that no checkpoint holds, as the weight plan lists them. constants: weights are in the bundle.
    """
    graphs, ranks = manifest["graphs"], 1 if manifest["mesh"] is None else manifest["mesh"]["ranks"]
    todo = []
    for package in manifest["packages"]:
        whose = "kernels/ of the bundle" if package["provider"] == "own" else package["provider"]
        todo.append(f"Build and install the operators {', '.join(package['operators'])} of {whose}.")
    todo.append(
        "Compile the graphs where CANN is."
        if ranks == 1
        else "Compile the graphs of each rank on its host, in a session with the groups; what is made fits no other."
    )
    if placed := sorted({kind for g in graphs for kind in g.get("places", ())}):
        todo.append(f"Before that, set in {', '.join(placed)} the rank's place in its group, as `places` says.")
    if constants:
        todo.append("Have constants.bin where the graphs are compiled.")
    else:
        todo.append("Bind weights: made by their recipes, or ahead by kimi-graph weights, as weights/index.json says.")
    if generated := sorted(generated):
        todo.append(f"Make the inputs {', '.join(generated)}.")
    if tables := sorted({i["name"] for g in graphs for i in g["inputs"] if i["name"].endswith(".moe.table")}):
        todo.append(f"Give the tables {', '.join(tables)}: the slots that the weights of experts were made for.")
    todo.append("Set all states to zero, once for all phases.")
    return todo
