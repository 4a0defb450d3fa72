"""Modules of transformers as oracles: the layer's parameters under the checkpoint's names."""

from typing import Any

import torch
from torch import Tensor, nn

from kimi_graph import tree
from kimi_graph.init import init_tensor
from kimi_graph.spec import ParamSpec


def values(specs: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Random parameters in which every part counts."""
    return tree.map_with_path(lambda path, spec: init_tensor(spec, path, seed).to(dtype), specs)


def load(module: nn.Module, specs: Any, params: Any) -> None:
    """Give a module the parameters; a stack of experts' matrices becomes the one tensor transformers keeps."""

    def name(spec: ParamSpec) -> str:
        source = spec.source[0]
        if not source.startswith("experts."):
            return source
        return "experts.gate_up_proj" if len({s.split(".")[2] for s in spec.source}) == 2 else "experts.down_proj"

    found = {name(s): x for (_, s), (_, x) in zip(tree.items(specs), tree.items(params), strict=True)}
    state = module.state_dict()
    module.load_state_dict({key: x.reshape(state[key].shape) for key, x in found.items()}, strict=True)


def causal(tokens: int, before: int = 0) -> Tensor:
    """Additive mask `[1, 1, T, before + T]` as transformers' models give it to their layers."""
    mask = torch.full((tokens, before + tokens), torch.finfo(torch.float32).min)
    return mask.triu(before + 1)[None, None]


def assert_close(got: Tensor, want: Tensor, tolerance: float = 1e-4) -> None:
    """Within `tolerance` of the largest value."""
    assert got.shape == want.shape
    error = float((got.double() - want.double()).abs().max() / want.double().abs().max())
    assert error <= tolerance, f"{error:.2e} of scale"
