"""Rotary positions, in the spellings of older and of newer files.

Source: fact sheet of models, section 7.
"""

import math
from collections.abc import Iterator

from kimi_graph.config import RopeConfig, YarnConfig
from kimi_graph.config_keys import Choice, Entry, Key, Section, integer, only, optional, real

from .common import Values

_YARN: dict[str, Entry] = {
    "factor": Key(real(0)),
    "original_max_position_embeddings": Key(integer()),
    "beta_fast": Key(real(0)),
    "beta_slow": Key(real(0)),
    "mscale": Key(real(0)),
    "mscale_all_dim": Key(real(0)),
}
_THETA: dict[str, Entry] = {"rope_theta": Key(real(1))}
_ROPE_KINDS = "of another kind positions would be left unscaled"
ROPE: dict[str, Entry] = {
    "rope_theta": Key(optional(real(1)), None),
    "rope_scaling": Choice(("type", "rope_type"), {"yarn": Section(_YARN), "default": Section({})}, _ROPE_KINDS),
    "rope_parameters": Choice(
        ("rope_type", "type"), {"yarn": Section({**_THETA, **_YARN}), "default": Section(_THETA)}, _ROPE_KINDS
    ),
    "rope_interleave": Key(only(True, "rotated pairs are neighbours"), True),
}


def rope_faults(v: Values) -> Iterator[str]:
    scaling, parameters, theta = v["rope_scaling"], v["rope_parameters"], v["rope_theta"]
    if v["qk_rope_head_dim"] % 2:
        yield f"qk_rope_head_dim: found {v['qk_rope_head_dim']}, expected an even number: channels turn in pairs."
    if theta is None and parameters is None:
        yield "rope_theta: not given, and it has no default; rope_parameters would do as well."
    if parameters is None:
        return
    if theta not in (None, parameters["rope_theta"]):
        yield f"rope_theta: {theta:g} and rope_parameters.rope_theta: {parameters['rope_theta']:g} differ; delete one."
    if scaling is not None and _bands(scaling) != _bands(parameters):
        yield "rope_scaling and rope_parameters differ; delete one."


def _bands(v: Values) -> YarnConfig | None:
    if v["kind"] != "yarn":
        return None
    return YarnConfig(
        factor=v["factor"],
        original_len=v["original_max_position_embeddings"],
        beta_fast=v["beta_fast"],
        beta_slow=v["beta_slow"],
        mscale=v["mscale"],
        mscale_all=v["mscale_all_dim"],
    )


def read_rope(v: Values) -> RopeConfig:
    scaling, parameters = v["rope_scaling"], v["rope_parameters"]
    given = parameters or scaling
    theta = parameters["rope_theta"] if v["rope_theta"] is None else v["rope_theta"]
    return RopeConfig(theta=theta, interleaved=v["rope_interleave"], yarn=None if given is None else _bands(given))


def score_scale(key: int, yarn: YarnConfig | None) -> float:
    """What attention scores are multiplied with: `key ** -0.5`, with YaRN times the square of its mscale."""
    stretch = 1.0
    if yarn is not None and yarn.factor > 1:
        stretch = 0.1 * yarn.mscale_all * math.log(yarn.factor) + 1
    return key**-0.5 * stretch**2
