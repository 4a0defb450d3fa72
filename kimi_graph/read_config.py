"""Read a released `config.json`: every key is known, every value is meant, nothing is guessed.

A family of models is a table of keys, each with a reader and, where the released code has one, a default. A key that
is in no table is refused, since the one thing worse than an error is a setting that was silently ignored; keys without
influence on the result are listed as `inert`. All faults of a file are reported at once.
Source: fact sheet of models, section 1.1; what others read wrong, in the public cases C, R1 and K11.
"""

import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .config import DenseConfig, KdaConfig, LayerConfig, MlaConfig, ModelConfig, MoeConfig
from .errors import ConfigError

PRESETS = Path(__file__).parent / "presets"  # released files, unchanged, from public mirrors (fact sheet, section 0)
MAX_FILE = 4 << 20  # bytes; the largest released config.json has 7,006: anything this long is another kind of file
MAX_SIZE = 2**31 - 1  # of one dimension: routing and cache indices are int32
MAX_LAYERS = 4096
MAX_EXPERTS = 2048  # limit of the routing operators of CANN (MoeGatingTopK, MoeInitRoutingV3)
SHOWN = 8  # faults of a file, or members of a list, that a message names


def load_config(source: str | Path) -> ModelConfig:
    """The model that `source` means.

    Args:
        source: a preset's name (`presets()`; it goes before a folder of the same name, which is `./name`), a
            config.json, or a folder that has one.

    Raises:
        ConfigError: nothing is there, or the file is not a config of a known model, each fault with its key.
    """
    path = Path(source)
    if isinstance(source, str) and source in presets():
        path, name = PRESETS / f"{source}.json", source
    elif not str(source).strip():
        raise ConfigError(f"model: found an empty name. {_presets_like('')}")
    elif _exists(path, Path.is_dir):
        path, name = path / "config.json", path.resolve().name
        if not path.is_file():
            raise ConfigError(f"{source}: this folder has no config.json. {_presets_like(name)}")
    elif _exists(path, Path.is_file):
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
    else:
        raise ConfigError(f"{str(source)[:200]}: no preset, file or folder of this name. {_presets_like(path.name)}")
    return parse_config(read_json(path, MAX_FILE, ConfigError), origin=str(source), name=name)


def presets() -> list[str]:
    """Names of the released configs that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def _exists(path: Path, what: Callable[[Path], bool]) -> bool:
    try:
        return what(path)
    except (OSError, ValueError):  # a name too long for any file, or with a zero byte
        return False


def _presets_like(name: str) -> str:
    near = difflib.get_close_matches(name.lower()[:64], presets(), n=3, cutoff=0.5)
    if near:
        return f"Did you mean the preset {' or '.join(near)}?"
    return f"Presets: {', '.join(presets())}."


def read_json(path: Path, limit: int, error: type[Exception]) -> dict[str, Any]:
    """The JSON object in a file; a key given twice, NaN or Infinity is not JSON. `limit`: largest size in bytes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise error(f"{path}: {size:,} bytes; a file of this kind has at most {limit:,}.")
        return parse_json(path.read_bytes(), str(path), error)
    except OSError as e:
        raise error(f"{path}: cannot be read ({e.strerror}).") from e


def parse_json(text: bytes, where: str, error: type[Exception]) -> dict[str, Any]:
    """Like `read_json`, of bytes that came from `where`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))
            raise error(f"{where}: the key {_show(twice)} is given twice; delete one.")
        return found

    def refuse(word: str) -> Any:
        raise error(f"{where}: found {word}, which is not a JSON number.")

    try:
        data = json.loads(text.decode("utf-8-sig"), object_pairs_hook=unique, parse_constant=refuse)
    except UnicodeDecodeError as e:
        raise error(f"{where}: not text (byte {e.start} is not UTF-8); expected JSON.") from e
    except json.JSONDecodeError as e:
        raise error(f"{where}: not JSON at line {e.lineno}, column {e.colno}: {e.msg}. Is the file complete?") from e
    except (RecursionError, ValueError) as e:  # thousands of brackets; an integer of thousands of digits
        raise error(f"{where}: not JSON that can be read ({e}).") from e
    if not isinstance(data, dict):
        raise error(f"{where}: expected a JSON object ({{...}}), found {_show(data)}.")
    return data


# Readers of one value: give it back, or raise UnfitError saying what is expected.


class UnfitError(Exception):
    """A value that a reader refuses; the text says what is expected."""


Reader = Callable[[Any], Any]


def integer(low: int = 1, high: int = MAX_SIZE, why: str = "") -> Reader:
    def read(x: Any) -> int:
        if isinstance(x, bool) or not isinstance(x, int) or not low <= x <= high:
            raise UnfitError(f"an integer from {low:,} to {high:,}{why}")
        return x

    return read


def real(above: float, below: float = math.inf) -> Reader:
    def read(x: Any) -> float:
        # An integer of 400 digits compares with a float, but does not convert to one: compare first.
        if isinstance(x, bool) or not isinstance(x, int | float) or not above < x < min(below, 1e300):
            bounds = [f"above {above:g}"] * (above > -math.inf) + [f"below {below:g}"] * (below < math.inf)
            raise UnfitError(f"a number {' and '.join(bounds)}")
        return float(x)

    return read


def flag(x: Any) -> bool:
    if not isinstance(x, bool):
        raise UnfitError("true or false")
    return x


def only(value: Any, why: str) -> Reader:
    """One value is implemented; `why` says what it means, or why others are refused."""

    def read(x: Any) -> Any:
        if type(x) is not type(value) or x != value:
            raise UnfitError(f"{_show(value)} ({why})")
        return x

    return read


def optional(reader: Reader) -> Reader:
    return lambda x: None if x is None else reader(x)


def list_of(reader: Reader) -> Reader:
    def read(x: Any) -> tuple[Any, ...]:
        if not isinstance(x, list):
            raise UnfitError("a list")
        try:
            return tuple(reader(i) for i in x)
        except UnfitError as e:
            raise UnfitError(f"a list, each member {e}") from None

    return read


def _dtype(x: Any) -> torch.dtype:
    names = ("bfloat16", "float16", "float32")
    if x not in names:
        raise UnfitError(f"one of {', '.join(names)}")
    return getattr(torch, x)


# Tables.

_REQUIRED: Any = object()


@dataclass(frozen=True)
class Key:
    """A key: how its value is read, what it is when the file leaves it out, and how others spell it."""

    read: Reader
    default: Any = _REQUIRED
    spellings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """An object of keys and sections. `inert`: keys that are known and do not change any result."""

    keys: Mapping[str, "Key | Section"]
    inert: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Family:
    """The files of one `model_type`.

    Attributes:
        architecture: what `architectures` names, where the file has it.
        contradictions: values that do not fit each other, as messages; called when every single value was fine.
        build: fields of `ModelConfig` other than name, model_type and source.
    """

    architecture: str
    section: Section
    contradictions: Callable[[dict[str, Any]], Iterable[str]]
    build: Callable[[dict[str, Any]], dict[str, Any]]


def parse_config(data: Mapping[str, Any], *, origin: str, name: str) -> ModelConfig:
    """A config from the object in a file.

    Args:
        data: the object. origin: where it came from, for messages. name: what the model is called.

    Raises:
        ConfigError: see `load_config`.
    """
    kind = data.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        near = difflib.get_close_matches(str(kind), FAMILIES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        found = f"found {_show(kind)}" if "model_type" in data else "not given"
        raise ConfigError(f"{origin}: model_type: {found}, expected one of {', '.join(FAMILIES)}.{hint}")
    rest = {k: v for k, v in data.items() if k != "model_type"}
    problems: list[str] = []
    names = rest.pop("architectures", [family.architecture])
    if names != [family.architecture]:
        problems.append(
            f"architectures: found {_show(names)}, expected {_show([family.architecture])}, as model_type is {kind}."
        )
    values = _read(family.section, rest, "", problems)
    if not problems:
        problems.extend(family.contradictions(values))
    if problems:
        more = len(problems) - SHOWN
        lines = problems[:SHOWN] + ([f"... and {more} more"] if more > 0 else [])
        raise ConfigError("\n".join(f"{origin}: {line}" for line in lines))
    return ModelConfig(name=name, model_type=str(kind), source=dict(data), **family.build(values))


def _read(section: Section, data: Mapping[str, Any], at: str, problems: list[str]) -> dict[str, Any]:
    """Values of a section by key, defaults filled in. `at`: path of the section, "" or ending in a dot."""
    home = {s: key for key, k in section.keys.items() if isinstance(k, Key) for s in (key, *k.spellings)}
    home |= {key: key for key, k in section.keys.items() if isinstance(k, Section)}
    known = {*home, *section.inert}
    problems += [_unknown(x, data[x], known, at) for x in data if x not in known]
    values: dict[str, Any] = {}
    for key, entry in section.keys.items():
        if isinstance(entry, Section):
            inner = data.get(key)
            if isinstance(inner, dict):
                values[key] = _read(entry, inner, f"{at}{key}.", problems)
            else:
                problems.append(f"{at}{key}: {_found(data, key)}, expected an object with {', '.join(entry.keys)}.")
            continue
        given = {s: data[s] for s in (key, *entry.spellings) if s in data}
        read = {}
        for spelling, value in given.items():
            try:
                read[spelling] = entry.read(value)
            except UnfitError as e:
                problems.append(f"{at}{spelling}: found {_show(value)}, expected {e}.")
        if len(set(read.values())) > 1:
            both = " and ".join(f"{at}{s}: {_show(given[s])}" for s in read)
            problems.append(f"{both} are two spellings of one setting and differ; delete one.")
        elif not given and entry.default is _REQUIRED:
            problems.append(f"{at}{key}: not given, and it has no default.")
        values[key] = next(iter(read.values()), entry.default)
    return values


def _unknown(key: str, value: Any, known: Iterable[str], at: str) -> str:
    near = difflib.get_close_matches(key[:64], sorted(known), n=1)
    hint = f"did you mean {at}{near[0]}?" if near else "it would be ignored; delete it if that is meant."
    return f"{at}{key[:64]}: unknown key (its value is {_show(value)}); {hint}"


def _found(data: Mapping[str, Any], key: str) -> str:
    return f"found {_show(data[key])}" if key in data else "not given"


def _show(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # not from a JSON file, or an integer of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:60] + " ..."


def _some(numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + more


# Kimi Linear.

# What `PretrainedConfig` of transformers writes into any file, and hints for training or for running Python code.
INERT = frozenset({
    "_name_or_path", "attention_dropout", "attn_implementation", "auto_map", "aux_loss_alpha",
    "chunk_size_feed_forward", "ep_size", "id2label", "initializer_range", "label2id", "output_attentions",
    "output_hidden_states", "output_router_logits", "pretraining_tp", "problem_type", "return_dict",
    "router_aux_loss_coef", "seq_aux", "transformers_version", "use_cache",
})  # fmt: skip

_ATTENTION = Section(
    {
        "num_heads": Key(integer()),
        "head_dim": Key(integer()),
        "short_conv_kernel_size": Key(integer(2, 64)),
        "full_attn_layers": Key(list_of(integer(1, MAX_LAYERS))),
        "kda_layers": Key(list_of(integer(1, MAX_LAYERS))),
        "gate_lower_bound": Key(optional(real(-math.inf, 0)), None),
        "use_full_rank_gate": Key(
            only(False, "the output gate of kimi_linear is a product of two low-rank matrices"), False
        ),
    }
)

_KIMI_LINEAR = Section(
    {
        "vocab_size": Key(integer()),
        "hidden_size": Key(integer()),
        "num_hidden_layers": Key(integer(1, MAX_LAYERS)),
        "model_max_length": Key(integer(), spellings=("max_position_embeddings",)),
        "rms_norm_eps": Key(real(0, 1)),
        "hidden_act": Key(only("silu", "the activation of kimi_linear"), "silu"),
        "tie_word_embeddings": Key(flag, False),
        "dtype": Key(_dtype, spellings=("torch_dtype",)),
        "bos_token_id": Key(integer(0)),
        "eos_token_id": Key(integer(0)),
        "pad_token_id": Key(integer(0)),
        # Mixers
        "linear_attn_config": _ATTENTION,
        "num_attention_heads": Key(integer()),
        "num_key_value_heads": Key(optional(integer()), None),
        "q_lora_rank": Key(only(None, "queries of kimi_linear are projected by one full matrix"), None),
        "kv_lora_rank": Key(integer()),
        "qk_nope_head_dim": Key(integer()),
        "qk_rope_head_dim": Key(integer()),
        "v_head_dim": Key(integer()),
        "mla_use_nope": Key(only(True, "attention of kimi_linear has no rotary positions")),
        "rope_scaling": Key(only(None, "there are no rotary positions to scale: mla_use_nope is true"), None),
        "rope_parameters": Key(only(None, "there are no rotary positions: mla_use_nope is true"), None),
        "attention_bias": Key(only(False, "linear layers of kimi_linear have no bias"), False),
        # Feed-forward
        "intermediate_size": Key(integer()),
        "moe_intermediate_size": Key(integer()),
        "first_k_dense_replace": Key(integer(0)),
        "moe_layer_freq": Key(integer(1), 1),
        "num_experts": Key(
            integer(1, MAX_EXPERTS, " (limit of CANN's routing operators)"), spellings=("num_local_experts",)
        ),
        "num_experts_per_token": Key(integer(1, MAX_EXPERTS), spellings=("num_experts_per_tok",)),
        "num_shared_experts": Key(integer(), spellings=("n_shared_experts",)),
        "routed_scaling_factor": Key(real(0)),
        "moe_renormalize": Key(
            only(True, "weights of the chosen experts are divided by their sum"), True, spellings=("norm_topk_prob",)
        ),
        "moe_router_activation_func": Key(only("sigmoid", "the router's scores"), "sigmoid"),
        "topk_method": Key(only("noaux_tc", "selection with a correction bias"), "noaux_tc"),
        "num_expert_group": Key(
            only(1, "experts in groups, of which a few are chosen first, are not implemented"),
            1,
            spellings=("n_group",),
        ),
        "topk_group": Key(only(1, "there is one group of experts to choose"), 1),
        # What would change the model and is not there
        "num_nextn_predict_layers": Key(only(0, "draft layers are not implemented"), 0),
        "quantization_config": Key(only(None, "quantised checkpoints of kimi_linear are not implemented"), None),
        "is_encoder_decoder": Key(only(False, "this is a decoder"), False),
        "add_cross_attention": Key(only(False, "this is a decoder"), False),
    },
    # head_dim is 2304 / 32 = 72 in the released file and belongs to no tensor; rope_theta has nothing to rotate;
    # use_grouped_topk chooses among one group.
    inert=INERT | {"head_dim", "rope_theta", "use_grouped_topk"},
)


def _kimi_linear_contradictions(v: dict[str, Any]) -> Iterator[str]:
    heads, kv_heads = v["num_attention_heads"], v["num_key_value_heads"]
    if kv_heads not in (None, heads):
        yield f"num_key_value_heads: found {kv_heads}, expected {heads} (num_attention_heads): heads share one latent."
    top_k, experts = v["num_experts_per_token"], v["num_experts"]
    if top_k > experts:
        yield f"num_experts_per_token: found {top_k}, expected at most {experts} (num_experts)."
    layers, dense = v["num_hidden_layers"], v["first_k_dense_replace"]
    if dense > layers:
        yield f"first_k_dense_replace: found {dense}, expected at most {layers} (num_hidden_layers)."
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if v[key] >= v["vocab_size"]:
            yield f"{key}: found {v[key]}, expected at most {v['vocab_size'] - 1} (vocab_size {v['vocab_size']})."
    yield from _layer_list_faults(v["linear_attn_config"], layers)


def _layer_list_faults(v: dict[str, Any], layers: int) -> Iterator[str]:
    """Both lists count from 1 and are irregular in released files: together they name each layer once."""
    at = "linear_attn_config"
    full, kda = v["full_attn_layers"], v["kda_layers"]
    for key, found in (("full_attn_layers", full), ("kda_layers", kda)):
        if twice := [i for i, n in Counter(found).items() if n > 1]:
            yield f"{at}.{key}: layer {_some(twice)} is listed twice."
        if beyond := {i for i in found if i > layers}:
            yield f"{at}.{key}: layer {_some(beyond)}, but num_hidden_layers is {layers}; layers count from 1."
    if both := set(full) & set(kda):
        yield f"{at}: layer {_some(both)} is in full_attn_layers and in kda_layers; delete it from one."
    if neither := set(range(1, layers + 1)) - set(full) - set(kda):
        yield f"{at}: layer {_some(neither)} is in neither full_attn_layers nor kda_layers; layers count from 1."


def _kimi_linear(v: dict[str, Any]) -> dict[str, Any]:
    """No size is derived from another: hidden_size / num_attention_heads, for one, is the width of nothing here."""
    a = v["linear_attn_config"]
    kda = KdaConfig(
        heads=a["num_heads"],
        key=a["head_dim"],
        value=a["head_dim"],
        conv_width=a["short_conv_kernel_size"],
        gate_rank=a["head_dim"],  # released code builds f_a_proj and g_a_proj as wide as a head
        gate_lower_bound=a["gate_lower_bound"],
        stored_rates=(1, 1, a["num_heads"], 1),
    )
    mla = MlaConfig(
        heads=v["num_attention_heads"],
        latent=v["kv_lora_rank"],
        key_nope=v["qk_nope_head_dim"],
        key_rope=v["qk_rope_head_dim"],
        value=v["v_head_dim"],
        scale=(v["qk_nope_head_dim"] + v["qk_rope_head_dim"]) ** -0.5,
    )
    dense = DenseConfig(ffn=v["intermediate_size"])
    moe = MoeConfig(
        experts=v["num_experts"],
        top_k=v["num_experts_per_token"],
        ffn=v["moe_intermediate_size"],
        shared_ffn=v["num_shared_experts"] * v["moe_intermediate_size"],
        scale=v["routed_scaling_factor"],
    )
    full = set(a["full_attn_layers"])

    def layer(i: int) -> LayerConfig:
        sparse = i >= v["first_k_dense_replace"] and i % v["moe_layer_freq"] == 0
        return LayerConfig(mixer=mla if i + 1 in full else kda, ffn=moe if sparse else dense)

    return {
        "vocab": v["vocab_size"],
        "embed": v["hidden_size"],
        "layers": tuple(layer(i) for i in range(v["num_hidden_layers"])),
        "norm_eps": v["rms_norm_eps"],
        "tied": v["tie_word_embeddings"],
        "max_len": v["model_max_length"],
        "dtype": v["dtype"],
        "bos": v["bos_token_id"],
        "eos": v["eos_token_id"],
        "pad": v["pad_token_id"],
    }


FAMILIES: dict[str, Family] = {
    "kimi_linear": Family(
        architecture="KimiLinearForCausalLM",
        section=_KIMI_LINEAR,
        contradictions=_kimi_linear_contradictions,
        build=_kimi_linear,
    ),
}
