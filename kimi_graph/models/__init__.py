"""Models: a spec, a schedule and a name map; and the functions that run them."""

from .counts import Counts, parameter_counts
from .decoder import Block, Decoder, count_parameters, forward, model_specs, state_specs
from .run import State, decode, init_params, init_state, prefill
from .vision import encode_image

__all__ = [
    "Block",
    "Counts",
    "Decoder",
    "State",
    "count_parameters",
    "decode",
    "encode_image",
    "forward",
    "init_params",
    "init_state",
    "model_specs",
    "parameter_counts",
    "prefill",
    "state_specs",
]
