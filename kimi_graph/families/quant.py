"""What a file says of quantised weights. Which tensors are quantised, the checkpoint's headers decide."""

from collections.abc import Iterator

from kimi_graph.config import QuantConfig
from kimi_graph.config_keys import Choice, Key, Section, integer, list_of, one_of, only, optional, text

from .common import Values

_NOT_GIVEN = only(None, "quantised activations are not implemented")

_COMPRESSED = Section(
    {
        "format": Key(one_of("pack-quantized", "mxfp4-pack-quantized")),
        "quantization_status": Key(only("compressed", "weights are packed in the file"), "compressed"),
        "ignore": Key(list_of(text), ()),
        "kv_cache_scheme": Key(only(None, "quantised caches are not a property of the checkpoint here"), None),
        "config_groups": Section(
            {
                "group_0": Section(
                    {
                        "format": Key(optional(text), None),
                        "targets": Key(list_of(only("Linear", "what is quantised"))),
                        "input_activations": Key(_NOT_GIVEN, None),
                        "output_activations": Key(_NOT_GIVEN, None),
                        "weights": Section(
                            {
                                "num_bits": Key(integer(1, 64)),
                                "type": Key(one_of("int", "float")),
                                "group_size": Key(integer()),
                                "strategy": Key(only("group", "a scale for every group_size inputs")),
                                "symmetric": Key(only(True, "there are no zero points")),
                                "dynamic": Key(only(False, "weights are quantised ahead"), False),
                                "actorder": Key(only(None, "inputs keep their order"), None),
                                "scale_dtype": Key(optional(text), None),
                                "zp_dtype": Key(only(None, "there are no zero points"), None),
                            },
                            inert=frozenset({"block_structure", "observer", "observer_kwargs"}),
                        ),
                    }
                )
            }
        ),
    },
    inert=frozenset({"global_compression_ratio", "version"}),
)

_FP8 = Section(
    {
        "activation_scheme": Key(only("dynamic", "activations are quantised as they come")),
        "fmt": Key(only("e4m3", "weights are float8 E4M3"), "e4m3"),
        "scale_fmt": Key(optional(only("ue8m0", "scales are powers of two")), None),
        "weight_block_size": Key(list_of(only(128, "blocks are 128 x 128"), 2)),
    },
    inert=frozenset({"ignored_layers", "modules_to_not_convert"}),
)

QUANTISATION = Choice(
    ("quant_method",),
    {"compressed-tensors": _COMPRESSED, "fp8": _FP8},
    "others would be read as something they are not",
)

# format in the file: ours, and the weights it must have
_PACKED = {
    "pack-quantized": ("int4", {"num_bits": 4, "type": "int"}),
    "mxfp4-pack-quantized": ("mxfp4", {"num_bits": 4, "type": "float", "group_size": 32}),
}


def quant_faults(v: Values | None, at: str) -> Iterator[str]:
    if v is None or v["kind"] != "compressed-tensors":
        return
    name, group = v["format"], v["config_groups"]["group_0"]
    inside = f"{at}config_groups.group_0."
    for key, expected in _PACKED[name][1].items():
        if group["weights"][key] != expected:
            yield f"{inside}weights.{key}: found {group['weights'][key]}, expected {expected} ({at}format is {name})."
    if group["format"] not in (None, name):
        yield f"{inside}format: found {group['format']}, expected {name} ({at}format)."
    if name.startswith("mxfp4") and (scale := group["weights"]["scale_dtype"]) not in (None, "torch.uint8"):
        yield f"{inside}weights.scale_dtype: found {scale}, expected torch.uint8 (exponents, {at}format is {name})."


def read_quant(v: Values | None) -> QuantConfig | None:
    if v is None:
        return None
    if v["kind"] == "fp8":
        rows, columns = v["weight_block_size"]
        return QuantConfig(format="fp8", block=(rows, columns), activations="dynamic", ignore=())
    size = v["config_groups"]["group_0"]["weights"]["group_size"]
    return QuantConfig(format=_PACKED[v["format"]][0], block=(1, size), activations=None, ignore=v["ignore"])
