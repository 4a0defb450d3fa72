"""Which expert is in each slot of a bundle that holds copies of some (`compile --redundant-experts`).

As long as nobody has counted loads, copies are of the first experts. `kimi-graph weights --loads FILE` takes counts: a
JSON object with, for each layer of experts by its number, the tokens of each expert, `{"1": [812, 40, ..], ..}`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kimi_graph.config import ModelConfig, MoeConfig
from kimi_graph.errors import BundleError, ShardingError
from kimi_graph.files import from_json
from kimi_graph.parallel.balance import balance, plain_table

Loads = Mapping[int, Sequence[float]]  # tokens of each expert, by layer


def read_loads(file: Path) -> Loads:
    """Counts from a file.

    Raises:
        BundleError: it is no such file; the layer is named.
    """
    try:
        found = from_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise BundleError(f"--loads {file}: {getattr(error, 'strerror', None) or error}.") from None
    if not isinstance(found, dict) or not all(key.isdecimal() and key.isascii() for key in found):
        raise BundleError(f'--loads {file}: expected an object by layer, {{"1": [tokens of each expert]}}.')
    for key, counts in found.items():
        if not isinstance(counts, list) or not all(type(n) in (int, float) for n in counts):
            raise BundleError(f"--loads {file}: layer {key}: expected a list of numbers, the tokens of each expert.")
    return {int(key): counts for key, counts in found.items()}


def expert_slots(config: ModelConfig, ranks: int, loads: Loads | None = None) -> dict[str, tuple[int, ...]]:
    """The expert in each slot, of the parameters that hold copies of some.

    Args:
        ranks: that share out the slots of a layer. loads: None: nobody has counted.

    Raises:
        BundleError: loads of other layers or experts than there are.
    """
    layers = {
        i: layer.ffn
        for i, layer in enumerate(config.layers)
        if isinstance(layer.ffn, MoeConfig) and layer.ffn.redundant
    }
    if loads is not None and loads.keys() != layers.keys():
        odd = min(loads.keys() ^ layers.keys())
        what = "is not there" if odd in layers else "holds no copies of experts"
        expected = ", ".join(map(str, layers)) or "none: compile with --redundant-experts"
        raise BundleError(f"--loads: layer {odd} {what}; expected layers {expected}.")
    found = {}
    for i, moe in layers.items():
        slots = plain_table(moe.experts, moe.slots, ranks).slots
        if loads is not None:
            if len(loads[i]) != moe.experts:
                raise BundleError(
                    f"--loads: layer {i} has {len(loads[i])} numbers; expected {moe.experts}, its experts."
                )
            try:
                slots = balance(loads[i], moe.slots, ranks).table.slots
            except ShardingError as error:
                raise BundleError(f"--loads: layer {i}: {error}") from None
        found |= {f"layers.{i}.moe.{name}": slots for name in ("gate_up", "down")}
    return found
