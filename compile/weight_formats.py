"""`--weights-format`: what the routed experts of a model can be for a target, what that costs, and whether a kernel
takes it.

Experts are all but a few percent of a model's bytes and the only weights whose form is a choice; the others are
dequantised to the model's dtype.

* native: as the checkpoint stores them. bf16: dequantised. int8-g32, int4: integers with a scale per 32 inputs.

Kernels are those of CANN's GroupedMatmul.
Source: aclnnGroupedMatmulV5 in the documents of CANN's ops-transformer: tables "scenarios" and their limits, for A2 and
A3, and for 950. Nothing here has run on a device.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kimi_graph import formats, tree
from kimi_graph.checkpoint import Checkpoint, load_packed, load_tree
from kimi_graph.config import ModelConfig
from kimi_graph.errors import CompileError
from kimi_graph.models import model_specs
from kimi_graph.models.counts import part_of
from kimi_graph.spec import ParamSpec

from .recipe import Step

NAMES = ("native", "bf16", "int8-g32", "int4")
SOCS = ("a2", "a3", "950")
WIRED = ("bf16",)  # what graphs are made with today

_NO_GROUPS = "GroupedMatmul with 8-bit weights takes a scale per output only, not one per 32 inputs"
_A16W4 = "GroupedMatmul, bf16 x int4 with a scale per group (A16W4)"
_PER_OUTPUT = "GroupedMatmul, activations quantised to int8 per token"
# Of each form: the kernel that takes it by SoC, or why there is none.
_KERNELS: dict[str, dict[str, tuple[bool, str]]] = {
    "plain": dict.fromkeys(SOCS, (True, "GroupedMatmul")),
    "mxfp4": {
        **dict.fromkeys(("a2", "a3"), (False, "no FP4 in the hardware")),
        "950": (True, "GroupedMatmul MX, activations quantised to MXFP8 or MXFP4"),
    },
    "fp8": {
        **dict.fromkeys(("a2", "a3"), (False, "no FP8 in the hardware")),
        "950": (True, "GroupedMatmul G-B, activations quantised to E4M3 per 128"),
    },
    "int4": dict.fromkeys(SOCS, (True, _A16W4)),
    "int4-g32": dict.fromkeys(SOCS, (True, _A16W4)),
    "int8-g32": dict.fromkeys(SOCS, (False, _NO_GROUPS)),
    "w8": dict.fromkeys(SOCS, (True, _PER_OUTPUT)),
    "w8-static": dict.fromkeys(SOCS, (True, "GroupedMatmul, activations quantised to int8 with a fixed scale")),
    "w4": dict.fromkeys(SOCS, (True, f"{_PER_OUTPUT} (A8W4)")),
}
_KERNELS["w4-mx"] = _KERNELS["mxfp4"]
# Whether experts stored in one form keep their values in another; what is not here loses some.
_KEPT = {
    ("mxfp4", "bf16"): "exact",
    ("w4-mx", "bf16"): "exact",
    ("mxfp4", "int8-g32"): "exact",
    ("w4-mx", "int8-g32"): "exact",
    ("int4", "int8-g32"): "exact",
    ("int4", "int4"): "exact",
    ("int4", "bf16"): "rounded to bf16, as released code does",
    ("fp8", "bf16"): "exact where scales are powers of two (scale_fmt ue8m0), else rounded to bf16",
    ("plain", "bf16"): "exact",
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A row of the table.

    Attributes:
        name: of `NAMES`. soc: "a2", "a3" or "950". bytes: of all weights. exact: what becomes of the experts' values.
        taken: whether a kernel takes it, and `kernel` which, or why there is none.
    """

    name: str
    soc: str
    bytes: int
    exact: str
    taken: bool
    kernel: str


def choices(config: ModelConfig, specs: Any, stored: Mapping[str, str], socs: Iterable[str] = SOCS) -> list[Choice]:
    """Every way to keep the experts of a model.

    Args:
        specs: of the model. stored: format of the parameters that the checkpoint has quantised, by path.
    """
    specs = dict(tree.items(specs))
    experts = [path for path in specs if part_of(path) == "experts"]
    natives = {stored.get(path, "plain") for path in experts} or {"plain"}
    if len(natives) > 1:
        raise CompileError(f"{config.name}: experts are stored in several formats: {', '.join(sorted(natives))}.")
    (native,) = natives
    rows = []
    for name in NAMES:
        held = form_of(name, native)
        forms = stored if name == "native" else dict.fromkeys(experts, held)
        size = sum(_size(spec, config.dtype, forms.get(path, "plain")) for path, spec in specs.items())
        exact = "as stored" if name == "native" else _KEPT.get((native, name), "not exact")
        for soc in socs:
            taken, kernel = _KERNELS[held][soc]
            rows.append(Choice(name=name, soc=soc, bytes=size, exact=exact, taken=taken, kernel=kernel))
    return rows


def form_of(name: str, native: str) -> str:
    """The format of `formats.py` that experts stored as `native` have under `--weights-format name`, or "plain"."""
    return {"native": native, "bf16": "plain", "int4": "int4-g32"}.get(name, name)


def _size(spec: ParamSpec, dtype: torch.dtype, form: str) -> int:
    if form == "plain":
        return spec.numel * (spec.dtype or dtype).itemsize
    parts = formats.layout(form, spec.stored).values()
    return len(spec.source) * sum(math.prod(shape) * d.itemsize for d, shape in parts)


def table(rows: Iterable[Choice]) -> list[str]:
    """Lines for a reader; chips that are served alike share one."""
    merged: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        merged.setdefault((row.name, row.bytes, row.exact, row.taken, row.kernel), []).append(row.soc)
    return [
        f"{name:<9}{_amount(size):>9}  {', '.join(socs):<12} {'yes' if taken else 'NO':<4} {exact}. {kernel}"
        for (name, size, exact, taken, kernel), socs in merged.items()
    ]


def _amount(size: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if size >= u), (1e3, "KB"))
    return f"{size / unit:.2f} {name}"


# ---- recipes ---------------------------------------------------------------------------------------------------------


def expert_weights(form: str, spec: ParamSpec) -> dict[str, tuple[Step, ...]]:
    """Inputs of GroupedMatmul (transpose_weight true) that hold a stack of experts, and their recipes.

    Args:
        form: "plain", "mxfp4" (950), "int4-g32" or "int8-g32". spec: of the experts, `[E, .., in]`.

    Returns:
        `weight`: `[E, out, in]`, or packed pairs `[E, out, in / 2]`, low nibble first.
        `scale` (mxfp4): `[E, out, in / 64, 2]` E8M0, the bytes of the checkpoint.
        `antiquant_scale` (integers): `[E, in / 32, out]`; there is no offset.
    """
    count, outs, ins = spec.shape[0], math.prod(spec.shape[1:-1]), spec.shape[-1]
    if form == "plain":
        return {"weight": (Step("view", (count, outs, ins)),)}
    first = formats.FORMATS[form].parts[0].name
    width = ins if form == "int8-g32" else ins // 2
    weight = (Step("pack", (form, first)), Step("view", (count, outs, width)))
    groups = ins // formats.GROUP
    scale = Step("pack", (form, "weight_scale"))
    if form == "mxfp4":
        if groups % 2:
            raise CompileError(
                f"{spec.source[0]}: {ins} inputs; MX kernels read scales in pairs: expected a multiple of 64."
            )
        return {"weight": weight, "scale": (scale, Step("view", (count, outs, groups // 2, 2)))}
    turned = (scale, Step("view", (count, outs, groups)), Step("permute", (0, 2, 1)))
    return {"weight": weight, "antiquant_scale": turned}


# ---- errors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """Root of the mean square of what a format changes in a weight, by that of the weight, over `matrices` matrices;
    the mean and the largest."""

    mean: float
    worst: float
    matrices: int


def measure_loss(config: ModelConfig, checkpoint: Checkpoint, name: str, matrices: int = 12) -> Loss | None:
    """What `--weights-format name` loses, on the first expert of some layers; None where a model has no experts."""
    specs = [s for path, s in tree.items(model_specs(config)) if part_of(path) == "experts"]
    single = [_one(spec, i) for spec in specs for i in range(len(spec.source) // spec.shape[0])]
    chosen = single[:: max(1, len(single) // matrices)][:matrices]
    losses = []
    for spec in chosen:
        exact = load_tree(spec, checkpoint, torch.float64)
        if name in ("native", "bf16"):
            made = exact if name == "native" else load_tree(spec, checkpoint, torch.bfloat16).double()
        else:
            form = form_of(name, "plain")
            made = formats.unpack(form, load_packed(spec, checkpoint, form), torch.float64).view(exact.shape)
        losses.append(float(((made - exact).square().mean() / exact.square().mean()).sqrt()))
    return Loss(sum(losses) / len(losses), max(losses), len(losses)) if losses else None


def _one(spec: ParamSpec, index: int) -> ParamSpec:
    """A single matrix of a stack."""
    return ParamSpec(
        shape=spec.stored,
        axes=("_",) * len(spec.stored),
        source=(spec.source[index],),
        stored=spec.stored,
        dtype=spec.dtype,
    )
