"""Attention over depth: each token mixes what earlier blocks of layers left, by a learned query of the site."""

import torch
from torch import Tensor

from .base import at_least_f32, by_rows, empty_like, operator
from .offers import Offer


@operator(sharding="b t d, d, d -> b t d", whole="d")
def residual_mix(sources: list[Tensor], norm: Tensor, query: Tensor, eps: float) -> Tensor:
    """Softmax over sources of `norm(source) . query`, times the raw sources; float32 inside, given in their dtype.

    Args:
        sources: at least one `[B, T, D]`.
        norm: `[D]`, weight of the sources' RMSNorm.
        query: `[D]`.

    Source: fact sheet of models, section 2.3.
    """
    aim = at_least_f32(norm) * at_least_f32(query)

    def mix(*sources: Tensor) -> Tensor:
        values = torch.stack([at_least_f32(s) for s in sources])
        scale = torch.rsqrt(values.square().mean(-1) + eps)
        weights = ((values @ aim) * scale).softmax(0)
        return torch.einsum("n...,n...d->...d", weights, values).to(sources[0].dtype)

    return by_rows(mix, *sources, width=len(sources) * sources[0].shape[-1])


@residual_mix.fake
def _(sources, norm, query, eps):
    return empty_like(sources[0])


@residual_mix.lowering
def _(ge, *args):
    return ge.serve("attention over depth", OFFERS, *args)


def _own(ge, sources, norm, query, eps):
    """`compile.fuse` gives it the sum and the norm beside it in the graph of all parts: addend and gain."""
    inputs = {"sources": list(sources), "norm": norm, "query": query, "addend": None, "gain": None}
    y, total = ge.own("AttnResMix", inputs, ["y", "total"], {"eps": eps})
    ge.mark(total, (0,), ge.dtype(sources[0]))
    return y


def _composed(ge, sources, norm, query, eps):
    """Sources side by side, then along their new first dimension; float32 throughout."""
    if len(sources) == 1:
        return sources[0]
    f32, count, shape = torch.float32, len(sources), ge.shape(sources[0])
    wide = [ge.reshape(ge.cast(s, f32), [1, *shape]) for s in sources]
    values = ge.concat(wide, 0)
    normed = ge.RmsNorm(values, ge.weight_as(norm, f32), epsilon=eps)[0]
    last, first = ge.const([len(shape)], torch.int64), ge.const([0], torch.int64)
    scores = ge.ReduceSum(ge.Mul(normed, ge.weight_as(query, f32)), last, keep_dims=True)
    weights = ge.SoftmaxV2(ge.mark(scores, (count, *shape[:-1], 1), f32), axes=[0])
    mixed = ge.ReduceSum(ge.Mul(weights, values), first, keep_dims=False)
    return ge.cast(ge.mark(mixed, shape, f32), ge.dtype(sources[0]))


def _own_width(ge, sources, *args) -> str:
    width = ge.shape(sources[0])[-1]
    return "" if width % 16 == 0 else f"takes multiples of 16 channels, these are {width}"


OFFERS = (
    Offer(
        "own",
        "AttnResMix",
        _own,
        "CANN has no operator for it, and a composition reads the sources several times",
        _own_width,
    ),
    Offer("composed", "ConcatV2, RmsNorm, ReduceSum, SoftmaxV2, Mul", _composed, "reads the sources several times"),
)
