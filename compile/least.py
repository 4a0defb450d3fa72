"""Whether a mesh is hopeless, known before any graph is made: the weights of layers alone are more than a die has.

`fit` has all numbers, of finished graphs.
"""

import math
from collections.abc import Mapping

from kimi_graph.errors import CompileError
from kimi_graph.parallel.placement import place
from kimi_graph.spec import ParamSpec

from .meshes import Layout
from .weight_formats import Packed

RUNTIME = 2 << 30  # bytes that the runtime takes of a die (assumed)


def least_weights(
    layout: Layout, specs: Mapping[str, ParamSpec], packed: Mapping[str, Mapping[str, Packed]]
) -> list[int]:
    """Bytes of weights that a rank holds at least, by layer; those of embedding, head and vision are not counted.

    Args:
        specs: of the model, by path.
        packed: inputs that hold a parameter in place of it, of one rank; by path.
    """
    rules = layout.rules("decode")
    held = [0] * len(layout.config.layers)
    for path, spec in specs.items():
        start, _, rest = path.partition(".")
        if start != "layers":
            continue
        inputs = packed.get(path, {}).values()
        size = sum(math.prod(p.shape) * p.dtype.bits // 8 for p in inputs)
        held[int(rest.partition(".")[0])] += size or place(path, spec, rules, layout.config.dtype).bytes
    return held


def check_least(where: str, target: str, die: int, runtime: int, stages: list[range], held: list[int]) -> None:
    """Whether there is hope.

    Args:
        where: what it is of, for the message.
        target: its name.
        die: bytes that one has.
        runtime: that the runtime takes of them.
        stages: their layers.
        held: by layer, see `least_weights`.

    Raises:
        CompileError: a rank does not hold its weights.
    """
    for index, layers in enumerate(stages):
        if (size := sum(held[i] for i in layers)) + runtime > die:
            gib = [f"{n / 2**30:,.2f}" for n in (size, runtime, die)]
            raise CompileError(
                f"{where}: a rank of stage {index} needs {gib[0]} GiB for the weights of its layers alone, the runtime "
                f"takes {gib[1]}, a die of {target} has {gib[2]}. More ranks hold less each; kimi-graph plan says what "
                "fits. No graph was made."
            )
