"""The decoder every model of the family is made of: parts, and a schedule that says how values flow through them.

A part (embedding, mixer half, feed-forward half, residual mix, head) is a pure function of its parameters, the values
it reads, its state and the batch. The schedule of a config lists the parts in order with the names of the values they
read and write. Running a model goes through the schedule; compiling one traces each kind of part once and follows the
same schedule.

Axes: B sequences, T tokens, D embed, V vocab.
Source: fact sheet of models, sections 1.2 and 2.2 (tensor names), 1.3 and 2.3 (block order).
"""

import dataclasses
import functools
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph import layers, ops, tree
from kimi_graph.config import DenseConfig, KdaConfig, LayerConfig, MlaConfig, ModelConfig, MoeConfig, check_config
from kimi_graph.layers import AttnResidual, Batch, Ffn, Kda, KdaState, Mla, MlaState, Moe
from kimi_graph.ops.contract import contract
from kimi_graph.parallel import own_index, shard_map
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.taps import scope, tap
from kimi_graph.tree import Leaf, param_tree


@param_tree
class Block(Generic[Leaf]):
    """One decoder layer: a mixer (`kda` or `mla`), then a feed-forward part (`dense` or `moe`); the others are None.

    `attn_res`, `ffn_res`: what each half reads instead of the running sum, in models with attention residuals.
    """

    mixer_norm: Leaf
    kda: Kda[Leaf] | None
    mla: Mla[Leaf] | None
    ffn_norm: Leaf
    dense: Ffn[Leaf] | None
    moe: Moe[Leaf] | None
    attn_res: AttnResidual[Leaf] | None
    ffn_res: AttnResidual[Leaf] | None


@param_tree
class Decoder(Generic[Leaf]):
    """A whole model: `embed` `[V, D]`, the layers, the last norm and `head` `[V, D]`, None where it is tied to `embed`.

    `out_res` is None without attention residuals, `vision` (a `layers.Vision`) in models of text alone.
    """

    embed: Leaf
    layers: tuple[Block[Leaf], ...]
    out_res: AttnResidual[Leaf] | None
    norm: Leaf
    head: Leaf | None
    vision: Any


LayerState = KdaState[Tensor] | MlaState[Tensor]


# ---- specs -----------------------------------------------------------------------------------------------------------


def block_specs(c: ModelConfig, layer: LayerConfig, prefix: str) -> Block[ParamSpec]:
    """Specs of a layer whose names in the checkpoint start with `prefix` (`model.layers.3.`)."""
    mixer, ffn = layer.mixer, layer.ffn
    kda = layers.kda_specs(mixer, c.embed) if isinstance(mixer, KdaConfig) else None
    mla = layers.mla_specs(mixer, c.embed) if isinstance(mixer, MlaConfig) else None
    dense = layers.ffn_specs(ffn.ffn, c.embed) if isinstance(ffn, DenseConfig) else None
    moe = layers.moe_specs(ffn, c.embed, c.names) if isinstance(ffn, MoeConfig) else None

    def under(part: Any, name: str) -> Any:
        return tree.map(lambda s: s.under(f"{prefix}{name}"), part)

    def residual(name: str) -> AttnResidual[ParamSpec] | None:
        return layers.attn_residual_specs(c.embed, f"{prefix}{name}") if c.residual_block else None

    return Block(
        mixer_norm=weight((c.embed,), "embed", source=f"{prefix}input_layernorm.weight"),
        kda=under(kda, "self_attn."),
        mla=under(mla, "self_attn."),
        ffn_norm=weight((c.embed,), "embed", source=f"{prefix}post_attention_layernorm.weight"),
        dense=under(dense, "mlp."),
        moe=under(moe, f"{c.names.moe}."),
        attn_res=residual("self_attention_res"),
        ffn_res=residual("mlp_res"),
    )


@functools.lru_cache(maxsize=2)  # 0.1 s for K3, whose specs name 250,000 tensors
def model_specs(c: ModelConfig) -> Decoder[ParamSpec]:
    """Every parameter of the model: shape, dtype, logical axes, and its name in the released checkpoint. No memory.

    Raises:
        ConfigError: `c` is not a config, the name of one say.
    """
    check_config(c, "model_specs")
    text = f"{c.names.prefix}model."
    vocab = (c.vocab, c.embed)
    return Decoder(
        embed=weight(vocab, "vocab embed", source=f"{text}embed_tokens.weight"),
        layers=tuple(block_specs(c, layer, f"{text}layers.{i}.") for i, layer in enumerate(c.layers)),
        out_res=layers.attn_residual_specs(c.embed, f"{text}output_attn_res") if c.residual_block else None,
        norm=weight((c.embed,), "embed", source=f"{text}norm.weight"),
        head=None if c.tied else weight(vocab, "vocab embed", source=f"{c.names.prefix}lm_head.weight"),
        vision=None if c.vision is None else layers.vision_specs(c.vision, c.embed),
    )


def state_specs(c: ModelConfig, *, slots: int, pages: int, page: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The state of every layer, in order: `KdaState` or `MlaState` of specs.

    Args:
        slots: KDA slots, the null slot included.
        pages: cache pages, the null page included.
        page: tokens of a page.
        dtype: of windows and caches; the KDA memory is float32 (float64 when `dtype` is).
    """

    def state(layer: LayerConfig) -> Any:
        if isinstance(layer.mixer, KdaConfig):
            return layers.kda_state_specs(layer.mixer, slots, dtype)
        return layers.mla_state_specs(layer.mixer, pages, page, dtype)

    return tuple(state(layer) for layer in c.layers)


# ---- schedule --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Use:
    """A part at its place.

    Attributes:
        part: kind of part; equal kinds are the same computation with other weights.
        prefix: of its parameters' names (`layers.3`).
        layer: number of its layer, whose state it has; else None.
        reads, writes: names of values; a value nobody writes is an input of the model.
        frees: values that are not read after this.
    """

    part: str
    prefix: str = ""
    layer: int | None = None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    frees: tuple[str, ...] = ()


def mixer_part(layer: LayerConfig) -> str:
    """Kind of a layer's mixer half: layers that reuse another's selection are a kind of their own."""
    kind = layer.kinds[0]
    shared = isinstance(layer.mixer, MlaConfig) and layer.mixer.indexer is not None and layer.mixer.indexer.shared
    return f"{kind}_shared" if shared else kind


def is_sparse(c: ModelConfig, capacity: int) -> bool:
    """Whether attention over caches of `capacity` tokens a sequence selects keys (else top-k covers all of them)."""
    top_k = [m.indexer.top_k for m in (x.mixer for x in c.layers) if isinstance(m, MlaConfig) and m.indexer]
    return bool(top_k) and capacity > min(top_k)


@functools.lru_cache(maxsize=64)
def schedule(c: ModelConfig, *, sparse: bool = False, vision: bool = False) -> tuple[Use, ...]:
    """The parts of the whole model in order.

    Args:
        sparse: see `is_sparse`.
        vision: tokens may stand for rows of `vision.values`, as `vision.rows` says.
    """
    inputs = ("tokens", "vision.rows", "vision.values") if vision else ("tokens",)
    uses = [Use(part="embed_vision" if vision else "embed", reads=inputs, writes=("x",))]
    stream, stored = "x", []

    def add(part: str, reads: Sequence[str], *writes: str, layer: int | None = None) -> str:
        prefix = "" if layer is None else f"layers.{layer}"
        uses.append(Use(part=part, prefix=prefix, layer=layer, reads=tuple(reads), writes=writes))
        return writes[0]

    def mixed(part: str, layer: int | None, write: str) -> str:
        return add(f"{part}{len(stored)}", [*stored, stream], write, layer=layer) if stored else stream

    for i, layer in enumerate(c.layers):
        read = mixed("attn_res", i, f"{i}.h")
        starts = c.residual_block is not None and i % c.residual_block == 0
        if starts:
            stored.append(stream)
        part = mixer_part(layer)
        reads, writes = [read], [f"{i}.a"]
        if sparse and isinstance(layer.mixer, MlaConfig) and layer.mixer.indexer:
            (reads if layer.mixer.indexer.shared else writes).append("selected")
        y = add(part, reads, *writes, layer=i)
        stream = y if starts else add("attn_add", [stream, y], f"{i}.m", layer=i)
        tables = [table_name(i)] if getattr(layer.ffn, "redundant", 0) else []
        y = add(layer.kinds[1], [mixed("ffn_res", i, f"{i}.n"), *tables], f"{i}.f", layer=i)
        stream = add("ffn_add", [stream, y], f"{i}.x", layer=i)
    add("head", [mixed("out_res", None, "out")], "logits")
    return tuple(_with_frees(uses))


def table_name(layer: int) -> str:
    """The value that says which slots hold a layer's experts, where some have copies."""
    return f"layers.{layer}.moe.table"


def _with_frees(uses: Sequence[Use]) -> list[Use]:
    later: set[str] = {"logits"}
    out = []
    for use in reversed(uses):
        names = set(use.reads) | set(use.writes)
        out.append(dataclasses.replace(use, frees=tuple(sorted(names - later))))
        later |= names
    return out[::-1]


# ---- parts -----------------------------------------------------------------------------------------------------------


def part_params(use: Use, p: Decoder[Any]) -> dict[str, Any]:
    """The parameters of a part, as a tree whose names follow the part's prefix in the model's names."""
    if use.layer is None:
        if use.part == "head":
            return {"norm": p.norm, "head": p.embed if p.head is None else p.head}
        return {"out_res": p.out_res} if use.part.startswith("out_res") else {"embed": p.embed}
    block = p.layers[use.layer]
    name = use.part.rstrip("0123456789").removesuffix("_shared")
    norm = {"kda": "mixer_norm", "mla": "mixer_norm", "dense": "ffn_norm", "moe": "ffn_norm"}.get(name)
    fields = [] if name.endswith("_add") else [name] if norm is None else [norm, name]
    return {field: getattr(block, field) for field in fields}


@dataclass(frozen=True, kw_only=True)
class How:
    """What is fixed while tracing: `step`: one token a row. `last_only`: logits of each row's last token alone."""

    step: bool
    last_only: bool


def run_part(
    use: Use, c: ModelConfig, p: Mapping[str, Any], given: Sequence[Tensor], state: Any, batch: Batch[Tensor], how: How
) -> tuple[list[Tensor], Any]:
    """One part: the values it writes, and its next state (None where it has none).

    Args:
        p: its parameters, see `part_params`.
        given: the values it reads, in the order of `use.reads`: ids `[B, T]`, hidden states `[B, T, D]`, a selection.
        state: of its layer.
    """
    part = use.part.rstrip("0123456789").removesuffix("_shared")
    if part.endswith("_add"):
        return [given[0] + given[1]], None
    if part in ("attn_res", "ffn_res", "out_res"):
        return [layers.attn_residual(p[part], list(given), c.norm_eps)], None
    if part == "embed":
        return [F.embedding(given[0], p["embed"])], None
    if part == "embed_vision":
        return [layers.replace_rows(F.embedding(given[0], p["embed"]), given[1], given[2])], None
    if part == "head":
        x_BTD = last_token(given[0], batch.counts) if how.last_only else given[0]
        logits_BTV = contract("btd,vd->btv", ops.rms_norm(x_BTD, p["norm"], c.norm_eps), p["head"])
        return [own_words(logits_BTV, c.vocab, "sequence" if not how.last_only else None)], None
    assert use.layer is not None
    with scope(part):
        if part in ("kda", "mla"):
            return _mix(p, c, c.layers[use.layer], given, state, batch, how)
        return [_feed(p, c, c.layers[use.layer], *given)], None


def _mix(
    p: Mapping[str, Any], c: ModelConfig, layer: LayerConfig, given: Sequence[Tensor], state: Any, batch: Any, how: How
) -> tuple[list[Tensor], Any]:
    h_BTD = ops.rms_norm(given[0], p["mixer_norm"], c.norm_eps)
    if isinstance(layer.mixer, KdaConfig):
        y_BTD, state = layers.kda(p["kda"], layer.mixer, h_BTD, state, batch, c.norm_eps, step=how.step)
        return [y_BTD], state
    before = given[1] if len(given) > 1 else None
    y_BTD, state, selected = layers.mla(p["mla"], layer.mixer, h_BTD, state, batch, step=how.step, selected=before)
    return [y_BTD] if selected is None or before is not None else [y_BTD, selected], state


def _feed(
    p: Mapping[str, Any], c: ModelConfig, layer: LayerConfig, x_BTD: Tensor, table: Tensor | None = None
) -> Tensor:
    h_BTD = ops.rms_norm(x_BTD, p["ffn_norm"], c.norm_eps)
    if isinstance(layer.ffn, DenseConfig):
        return layers.ffn(p["dense"], h_BTD, layer.ffn.situ)
    return layers.moe(p["moe"], layer.ffn, h_BTD, c.norm_eps, table)


def last_token(x_BTD: Tensor, counts_B: Tensor) -> Tensor:
    """The last real token of each row: `[B, T, D]` -> `[B, 1, D]` (the first of a row without tokens)."""
    at_B = (counts_B - 1).clamp(min=0)
    return torch.gather(x_BTD, 1, at_B[:, None, None].expand(x_BTD.shape[0], 1, x_BTD.shape[2]))


def own_words(logits_BTV: Tensor, vocab: int, tokens: str | None) -> Tensor:
    """Minus infinity for words that only a padded vocabulary has: they never win, and weigh nothing.

    Args:
        logits_BTV: `[B, T, V]`, V = `vocab` and what it was padded by.
        vocab: words that the model has.
        tokens: logical axis of T.
    """
    if logits_BTV.shape[-1] == vocab:
        return logits_BTV

    def masked(x: Tensor) -> Tensor:
        words = torch.arange(x.shape[-1], device=x.device) + own_index(x, "vocab", x.shape[-1])
        return x.masked_fill(words >= vocab, float("-inf"))

    axes = ("batch", tokens, "vocab")
    return shard_map(masked, (axes,), axes)(logits_BTV)


# ---- the whole -------------------------------------------------------------------------------------------------------


def forward(
    p: Decoder[Tensor],
    c: ModelConfig,
    tokens_BT: Tensor,
    states: Sequence[LayerState],
    batch: Batch[Tensor],
    *,
    step: bool,
    last_only: bool,
    vision: tuple[Tensor, Tensor] | None = None,
    tables: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, tuple[LayerState, ...]]:
    """The whole model on a batch: logits `[B, T or 1, V]` and the next state of every layer.

    Args:
        vision: rows `[B, T]` int64 (0: text, else 1 + row of values) and values `[M, D]` that stand for tokens.
        tables: where the copies of experts are, by `table_name`, in models that have some.
    """
    how, after = How(step=step, last_only=last_only), list(states)
    values = {"tokens": tokens_BT, **(tables or {})}
    if vision is not None:
        values |= {"vision.rows": vision[0], "vision.values": vision[1]}
    uses = schedule(c, sparse=is_sparse(c, capacity_of(states, batch)), vision=vision is not None)
    return run_uses(uses, p, c, values, after, batch, how)["logits"], tuple(after)


def run_uses(
    uses: Sequence[Use],
    p: Decoder[Tensor],
    c: ModelConfig,
    values: Mapping[str, Tensor],
    states: MutableSequence[Any],
    batch: Batch[Tensor] | Sequence[Batch[Tensor]],
    how: How,
) -> dict[str, Tensor]:
    """Some parts of a schedule, in order: a whole model, a pipeline stage, or what comes before the head.

    Args:
        values: what the parts read and do not write themselves, by name.
        states: of every layer; the next ones take their places.
        batch: of all layers; or one for each layer, where their slots and pages are not the same. Then the head gives
            the logits of all tokens.

    Returns:
        the values that are left: given or written, and not freed by a part.
    """
    values = dict(values)
    for use in uses:
        given = [values[name] for name in use.reads]
        state = None if use.layer is None else states[use.layer]
        own: Any = batch if isinstance(batch, Batch) or use.layer is None else batch[use.layer]
        with scope(use.prefix):
            results, state = run_part(use, c, part_params(use, p), given, state, own, how)
            if use.writes == (f"{use.layer}.x",):
                tap("out", results[0])
        del given
        if state is not None and use.layer is not None:
            states[use.layer] = state
        values |= zip(use.writes, results, strict=True)
        for name in use.frees:
            values.pop(name, None)
    return values


def capacity_of(states: Sequence[Any], batch: Batch[Any]) -> int:
    """Tokens a sequence's pages hold; 0 where no layer has pages."""
    pages = [s.latent.shape[1] for s in states if isinstance(s, MlaState)]
    return batch.block_table.shape[1] * pages[0] if pages else 0


def count_parameters(c: ModelConfig) -> int:
    """Number of parameters of the text model, from the specs alone; without draft layers and the vision tower."""
    return sum(spec.numel for spec in tree.leaves(tree.replace(model_specs(c), vision=None)))
