"""Run a model: state, prefill, decode, generate. Pure functions: the state that goes in is not changed.

Axes: B sequences, T tokens, V vocab.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

import torch
from torch import Tensor

from kimi_graph import layers, tree
from kimi_graph.config import ModelConfig, check_config, check_whole
from kimi_graph.errors import ConfigError
from kimi_graph.init import init_tensor
from kimi_graph.layers import Batch, KdaState, packing, step_batch
from kimi_graph.ops import donating
from kimi_graph.spec import ParamSpec
from kimi_graph.taps import collect
from kimi_graph.tree import Leaf, param_tree

from .decoder import Decoder, forward, model_specs, state_specs

PAGE = 128  # tokens of a cache page; CANN's paged attention takes multiples of 16 up to 1,024


@param_tree
class State(Generic[Leaf]):
    """What a batch of sequences has seen. Rows own slot `row + 1` and a run of pages; slot 0 and page 0 are nobody's.

    Attributes:
        layers: a `KdaState` or `MlaState` per layer.
        lengths: `[B]` int64, tokens seen.
        slots: `[B]` int32.
        block_table: `[B, pages of a sequence]` int32.
        page: tokens of a page.
    """

    layers: tuple[Any, ...]
    lengths: Leaf
    slots: Leaf
    block_table: Leaf
    page: int

    @property
    def capacity(self) -> int:
        """Tokens a sequence can hold, in whole pages."""
        return self.block_table.shape[1] * self.page  # type: ignore[attr-defined]


def init_params(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder[Tensor]:
    """Random parameters; the same seed gives the same parameters. Activations stay of order one through any depth.

    Args:
        dtype: of every parameter; those that fix float32 stay float32 unless it is float64.

    Raises:
        ConfigError: a dtype that is no float.
    """
    check_config(config, "init_params")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"init_params: dtype: found {dtype!r}, expected a float such as torch.float32.")

    def make(path: str, spec: ParamSpec) -> Tensor:
        fixed = spec.dtype if dtype != torch.float64 else None
        return init_tensor(spec, path, seed).to(fixed or dtype)

    return tree.map_with_path(make, model_specs(config))


def init_state(
    config: ModelConfig, batch: int, max_len: int, dtype: torch.dtype | None = None, page: int = PAGE
) -> State[Tensor]:
    """An empty state for `batch` sequences of up to `max_len` tokens (rounded up to whole pages).

    Args:
        dtype: of windows and caches until the state is used: an empty one takes the dtype of the parameters it meets.

    Raises:
        ConfigError: `max_len` is over the model's limit, or a number is not positive.
    """
    check_config(config, "init_state")
    check_whole("init_state", batch=batch, max_len=max_len, page=page)
    if max_len > config.max_len:
        raise ConfigError(
            f"init_state: max_len {max_len:,} is over the model's limit; the largest is {config.max_len:,}."
        )
    pages = -(-max_len // page)
    specs = state_specs(config, slots=batch + 1, pages=batch * pages + 1, page=page, dtype=dtype or config.dtype)
    return State(
        layers=tree.map(lambda s: torch.zeros(s.shape, dtype=_state_dtype(s.dtype, dtype)), specs),
        lengths=torch.zeros(batch, dtype=torch.int64),
        slots=torch.arange(1, batch + 1, dtype=torch.int32),
        block_table=torch.arange(1, batch * pages + 1, dtype=torch.int32).view(batch, pages),
        page=page,
    )


def _state_dtype(declared: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return torch.float64 if wanted == torch.float64 else declared


def _caches(state: State[Tensor]) -> list[Tensor]:
    """Of each layer, a tensor that has the state's dtype."""
    return [layer.query if isinstance(layer, KdaState) else layer.latent for layer in state.layers]


def _adopt(config: ModelConfig, params: Decoder[Tensor], state: State[Tensor]) -> State[Tensor]:
    """The state in the parameters' dtype. Only an empty state may change its dtype: that loses nothing."""
    dtype = params.embed.dtype
    if all(x.dtype == dtype for x in _caches(state)):  # specs are not made at every step
        return state
    if int(state.lengths.max()):
        found = {str(x.dtype) for x in tree.leaves(state.layers)}
        raise ConfigError(f"state of dtypes {sorted(found)} used with parameters of {dtype}; start from a new state.")
    specs = state_specs(config, slots=1, pages=1, page=1, dtype=dtype)
    wanted = iter([_state_dtype(s.dtype, dtype) for s in tree.leaves(specs)])
    return tree.replace(state, layers=tree.map(lambda x: x.to(next(wanted)), state.layers))


def _check(config: ModelConfig, tokens: Tensor, state: State[Tensor], counts: Tensor, what: str) -> None:
    rows = state.lengths.shape[0]
    if tokens.shape[0] != rows:
        raise ConfigError(f"{what}: {tokens.shape[0]} rows of tokens, but the state holds {rows} sequences.")
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ConfigError(f"{what}: tokens have dtype {tokens.dtype}; they must be integers (torch.int64).")
    if tokens.numel():
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= config.vocab:
            bad = low if low < 0 else high
            raise ConfigError(f"{what}: token {bad} is outside the vocabulary 0..{config.vocab - 1}.")
    longest = int((state.lengths + counts).max())
    if longest > state.capacity:
        raise ConfigError(
            f"{what}: a sequence would hold {longest:,} tokens, the state has room for {state.capacity:,}; "
            f"make it with init_state(config, batch={rows}, max_len={longest})."
        )


def _run(
    config: ModelConfig,
    params: Decoder[Tensor],
    tokens: Tensor,
    state: State[Tensor],
    counts: Tensor,
    *,
    step: bool,
    last_only: bool,
    taps: Iterable[str] | None,
    donate: bool,
    vision: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, State[Tensor], dict[str, Tensor]]:
    _check(config, tokens, state, counts, "decode" if step else "prefill")
    state = _adopt(config, params, state)
    pages = -(-int((state.lengths + counts).max()) // state.page)  # of the longest sequence: no layer looks further
    table = state.block_table[:, : max(1, pages)]
    dtype = torch.float64 if params.embed.dtype == torch.float64 else torch.float32
    width = tokens.shape[1]
    batch: Batch[Tensor] = step_batch(
        table, state.slots, state.lengths, counts, width, state.page, rope=config.rotation, dtype=dtype
    )
    # A step is bound by the cost of calls, a fifth of which is autograd's bookkeeping. What leaves must be ordinary
    # tensors again: the state is (it is written in place), the logits are copied.
    lean = step and donate and not taps and not torch.is_grad_enabled()
    lean = lean and not any(x.requires_grad for x in _caches(state))
    with (
        torch.inference_mode(lean or torch.is_inference_mode_enabled()),
        donating() if donate else contextlib.nullcontext(),
        collect(taps) if taps else contextlib.nullcontext({}) as found,
    ):
        logits, after = forward(
            params, config, tokens, state.layers, batch, step=step, last_only=last_only, vision=vision
        )
    if lean and not torch.is_inference_mode_enabled():
        logits = logits.clone()
    return logits, tree.replace(state, layers=after, lengths=batch.lengths), found


def prefill(
    config: ModelConfig,
    params: Decoder[Tensor],
    tokens: Tensor,
    state: State[Tensor],
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    vision: Sequence[Tensor] | None = None,
    last_only: bool = False,
    taps: Iterable[str] | None = None,
    donate: bool = False,
) -> Any:
    """Read many tokens; goes on where the state stands.

    Args:
        tokens: `[B, T]` int64, or `[1, total]` with `cu_seqlens`.
        mask: `[B, T]` bool, False at padding. Left, right or scattered padding is exact: the real tokens of a row move
            together and their logits move back; padding gives zeros.
        cu_seqlens: `[B + 1]`, where each packed sequence starts and the last ends; sequences do not see each other.
        vision: embeddings `[tokens, D]` of the images (`encode_image`), in the order of their placeholder tokens, which
            they replace: one placeholder per embedding row.
        last_only: logits of each sequence's last token only.
        taps: patterns of intermediates to return as well, such as `layers.*.moe.experts`.
        donate: the state given may be overwritten (do not use it again): saves a copy of every cache.

    Returns:
        logits `[B, T, V]` (`[1, total, V]` packed, `[B, V]` with `last_only`) and the next state; with `taps`, a pair
        of that and a dict of the tapped tensors by name.

    Raises:
        ConfigError: config, params and state of different models or swapped, no tokens, tokens outside the vocabulary,
            rows that are not the state's, no room left in the state, a state of another dtype than the parameters',
            images that do not fit their placeholders.
    """
    if mask is not None and cu_seqlens is not None:
        raise ConfigError("prefill: give `mask` or `cu_seqlens`, not both.")
    _check_given(config, params, state, "prefill")
    _check_tokens(tokens, "prefill", "[B, T], a row for each sequence", 2)
    move, restore = _layout(tokens, mask, cu_seqlens)
    inner, counts = move(tokens)
    images = None
    if vision is not None:
        images = _images(config, tokens, vision, params.embed.dtype)
        images = move(images[0])[0], images[1]
    logits, after, found = _run(
        config,
        params,
        inner,
        state,
        counts,
        step=False,
        last_only=last_only,
        taps=taps,
        donate=donate,
        vision=images,
    )
    if last_only:
        logits = logits[:, 0]
    else:
        logits = restore(logits)
    return (logits, after) if taps is None else ((logits, after), found)


def _check_tokens(tokens: Any, what: str, expected: str, dims: int) -> None:
    found = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
    if not isinstance(tokens, Tensor) or tokens.ndim != dims:
        raise ConfigError(f"{what}: tokens: found {found}, expected a tensor {expected}.")
    if not tokens.numel():
        raise ConfigError(f"{what}: tokens: found {found}, which are none; give at least one for each sequence.")


def _check_given(config: Any, params: Any, state: Any, what: str) -> None:
    """Whether these are a config, parameters of it and a state of it; what is swapped or of two models is told."""
    check_config(config, what)
    if not isinstance(params, Decoder):
        found = type(params).__name__
        raise ConfigError(f"{what}: params: found {found}, expected those of load_params or init_params.")
    if not isinstance(state, State):
        found = type(state).__name__
        raise ConfigError(f"{what}: state: found {found}, expected that of init_state or of the last step.")
    wanted = (len(config.layers), (config.vocab, config.embed))
    found = (len(params.layers), tuple(params.embed.shape))
    if found != wanted or len(state.layers) != wanted[0]:
        raise ConfigError(
            f"{what}: {config.name} has {wanted[0]} layers and an embedding {list(wanted[1])}; params have {found[0]} "
            f"and {list(found[1])}, the state has {len(state.layers)} layers. Make all three with one config."
        )


def _images(config: ModelConfig, tokens: Tensor, vision: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and values (see `decoder.forward`) of the pictures of a prefill."""
    if config.vision is None:
        raise ConfigError(f"prefill: images were given, but {config.name} has no vision tower.")
    pictures = list(vision)
    if isinstance(vision, Tensor) or not all(isinstance(v, Tensor) and v.ndim == 2 for v in pictures) or not pictures:
        raise ConfigError(
            f"prefill: vision: expected a list of embeddings [tokens, {config.embed}], one for each picture, as "
            "encode_image gives them."
        )
    rows = layers.vision_rows(tokens, config.vision.placeholder, [len(v) for v in pictures])
    return rows, torch.cat([v.to(dtype) for v in pictures])


def _layout(
    tokens: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Callable[[Tensor], Tensor]]:
    """How rows as given become right-padded rows with their counts, and back."""
    if cu_seqlens is not None:
        return lambda x: packing.unpack(x, cu_seqlens), lambda x: packing.pack(x, cu_seqlens)
    if mask is not None:
        return lambda x: packing.left_to_right(x, mask), lambda x: packing.right_to_left(x, mask)
    counts = torch.full((tokens.shape[0],), tokens.shape[1], dtype=torch.int64)
    return lambda x: (x, counts), lambda x: x


def decode(
    config: ModelConfig,
    params: Decoder[Tensor],
    token: Tensor,
    state: State[Tensor],
    *,
    taps: Iterable[str] | None = None,
    donate: bool = False,
) -> Any:
    """One more token for every sequence; the mathematics is `prefill`'s, the path is the one for a single token.

    Args:
        token: `[B]` int64.
        taps, donate: see `prefill`.

    Returns:
        logits `[B, V]` and the next state; with `taps` as `prefill`.

    Raises:
        ConfigError: see `prefill`.
    """
    _check_given(config, params, state, "decode")
    _check_tokens(token, "decode", "[B], one id per sequence", 1)
    counts = torch.ones_like(token)
    logits, after, found = _run(
        config, params, token[:, None], state, counts, step=True, last_only=False, taps=taps, donate=donate
    )
    return (logits[:, 0], after) if taps is None else ((logits[:, 0], after), found)
