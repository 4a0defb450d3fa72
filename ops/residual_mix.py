"""Attention over depth: each token mixes what earlier blocks of layers left, by a learned query of the site."""

import torch
from torch import Tensor

from .base import at_least_f32, by_rows, operator
from .offers import Offer


@operator(sharding="b t d, d, d -> b t d", whole="d")
def residual_mix(sources: list[Tensor], norm: Tensor, query: Tensor, eps: float) -> Tensor:
    """Softmax over sources of `norm(source) . query`, times the raw sources; float32 inside, given in their dtype.

    Args:
        sources: at least one `[B, T, D]`. norm: `[D]`, weight of the sources' RMSNorm. query: `[D]`.

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
    return torch.empty_like(sources[0])


@residual_mix.lowering
def _(ge, *args):
    return ge.serve("attention over depth", OFFERS, *args)


def _own(ge, sources, norm, query, eps):
    return ge.own("AttnResMix", {"sources": list(sources), "norm": norm, "query": query}, ["y"], {"eps": eps})


OFFERS = (
    Offer(
        "own",
        "AttnResMix",
        _own,
        "CANN has no operator for it, and a composition reads the sources several times",
    ),
)
