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
from torch import Tensor

from kimi_graph import formats, tree
from kimi_graph.checkpoint import Checkpoint, load_packed, load_tree
from kimi_graph.config import ModelConfig
from kimi_graph.errors import BundleError, CompileError
from kimi_graph.models import model_specs
from kimi_graph.models.counts import part_of
from kimi_graph.spec import ParamSpec

from . import recipe
from .ge_proto import Dtype, TensorDescriptor, bytes_of, is_tiled, shape_of
from .recipe import Step

NAMES = ("native", "bf16", "int8-g32", "int4")
SOCS = ("a2", "a3", "950")
MADE = ("plain", "mxfp4", "fp8", "int4", "int4-g32")  # forms that graphs are made with
MX_MULTIPLE = 64  # of outputs and inputs, of GroupedMatmul with E2M1 weights

_NO_GROUPS = "GroupedMatmul with 8-bit weights takes a scale per output only, not one per 32 inputs"
_A16W4 = "GroupedMatmul, bf16 x int4 with a scale per group (A16W4)"
_PER_OUTPUT = "GroupedMatmul, activations quantised to int8 per token"
# Of each form: the kernel that takes it by SoC, or why there is none.
_KERNELS: dict[str, dict[str, tuple[bool, str]]] = {
    "plain": dict.fromkeys(SOCS, (True, "GroupedMatmul")),
    "mxfp4": {
        **dict.fromkeys(("a2", "a3"), (False, "no FP4 in the hardware")),
        "950": (True, "GroupedMatmul MX-A8W4, activations quantised to MXFP8"),
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
        name: of `NAMES`.
        soc: "a2", "a3" or "950".
        bytes: of all weights.
        exact: what becomes of the experts' values.
        taken: whether a kernel takes it, and `kernel` which, or why there is none.
        made: whether compile makes graphs for it.
    """

    name: str
    soc: str
    bytes: int
    exact: str
    taken: bool
    kernel: str
    made: bool


def choices(config: ModelConfig, specs: Any, stored: Mapping[str, str], socs: Iterable[str] = SOCS) -> list[Choice]:
    """Every way to keep the experts of a model.

    Args:
        specs: of the model. stored: format of the parameters that the checkpoint has quantised, by path.
    """
    native = native_form(config, specs, stored)
    specs = dict(tree.items(specs))
    experts = [path for path in specs if part_of(path) == "experts"]
    rows = []
    for name in NAMES:
        held = form_of(name, native)
        forms = dict.fromkeys(experts, held)  # everything else is dequantised
        size = sum(_size(spec, config.dtype, forms.get(path, "plain")) for path, spec in specs.items())
        exact = "as stored" if name == "native" else _KEPT.get((native, name), "not exact")
        for soc in socs:
            taken, kernel = _KERNELS[held][soc]
            made = usable(held, soc)
            rows.append(Choice(name=name, soc=soc, bytes=size, exact=exact, taken=taken, kernel=kernel, made=made))
    return rows


def form_of(name: str, native: str) -> str:
    """The format of `formats.py` that experts stored as `native` have under `--weights-format name`, or "plain"."""
    return {"native": native, "bf16": "plain", "int4": "int4-g32"}.get(name, name)


def kept_form(name: str, native: str, soc: str) -> str:
    """The form that experts stored as `native` have in graphs under `--weights-format name`: "plain" or of `MADE`.

    Raises:
        CompileError: no kernel of the chip takes it, or none is called for it yet.
    """
    if name not in NAMES:
        raise CompileError(f"--weights-format {name}: unknown; one of {', '.join(NAMES)}.")
    form = form_of(name, native)
    taken, kernel = _KERNELS[form][soc]
    others = [n for n in NAMES if usable(form_of(n, native), soc)]
    instead = f"use {' or '.join(others)}."
    if not taken:
        raise CompileError(f"--weights-format {name}: experts as {form} on {soc}: {kernel}; {instead}")
    if form not in MADE:
        raise CompileError(f"--weights-format {name}: graphs for experts as {form} are not made yet; {instead}")
    return "int4-g32" if form == "int4" else form


def usable(form: str, soc: str) -> bool:
    """Whether a chip has a kernel for experts in a form, and graphs are made for it."""
    return form in MADE and _KERNELS[form][soc][0]


def native_form(config: ModelConfig, specs: Any, stored: Mapping[str, str]) -> str:
    """The format the routed experts are stored in, "plain" where they are not quantised.

    Raises:
        CompileError: there are several.
    """
    found = {stored.get(path, "plain") for path, _ in tree.items(specs) if part_of(path) == "experts"} or {"plain"}
    if len(found) > 1:
        raise CompileError(f"{config.name}: experts are stored in several formats: {', '.join(sorted(found))}.")
    return found.pop()


def _size(spec: ParamSpec, dtype: torch.dtype, form: str) -> int:
    if form == "plain":
        return spec.numel * (spec.dtype or dtype).itemsize
    parts = formats.layout(form, spec.stored).values()
    return len(spec.source) * sum(math.prod(shape) * d.itemsize for d, shape in parts)


def table(rows: Iterable[Choice]) -> list[str]:
    """Lines for a reader; chips that are served alike share one."""
    merged: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        served = "yes" if row.made else "not yet" if row.taken else "NO"
        merged.setdefault((row.name, row.bytes, row.exact, served, row.kernel), []).append(row.soc)
    return [
        f"{name:<9}{_amount(size):>9}  {', '.join(socs):<12} {served:<8}{exact}. {kernel}"
        for (name, size, exact, served, kernel), socs in merged.items()
    ]


def _amount(size: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if size >= u), (1e3, "KB"))
    return f"{size / unit:.2f} {name}"


# ---- inputs of a graph -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed:
    """An input of a graph that holds a weight, or its scales.

    Attributes:
        steps: its recipe.
        dtype, shape: as the graph reads it.
        tiled: in tiles (FRACTAL_NZ), see `recipe.tile`.
    """

    steps: tuple[Step, ...]
    dtype: Dtype
    shape: tuple[int, ...]
    tiled: bool = False


def expert_weights(form: str, spec: ParamSpec) -> dict[str, Packed]:
    """Inputs of GroupedMatmul (transpose_weight true) that hold a stack of experts, by the operator's names for them.

    Args:
        form: "mxfp4" or "fp8" (950), "int4-g32". spec: of the experts, `[E, .., in]`.

    Returns:
        mxfp4: `weight` E2M1 `[E, out, in]` in tiles, `antiquant_scale` E8M0 `[E, out, in / 64, 2]`, of the
            checkpoint's bytes.
        fp8: `weight` E4M3 `[E, out, in]`, `scale` float32 `[E, out / 128, in / 128]`, as the checkpoint has them.
        int4-g32: `weight` INT4 `[E, out, in]`, two's complement, `antiquant_scale` bfloat16 `[E, in / 32, out]`; there
            is no offset.

    Raises:
        CompileError: sizes that the kernel does not take.
    """
    count, outs, ins = spec.shape[0], math.prod(spec.shape[1:-1]), spec.shape[-1]
    whole = (count, outs, ins)
    if form == "fp8":
        under, rows = math.prod(spec.shape[1:-2]), spec.stored[0]  # matrices under each other, rows of each
        if under > 1:
            _check_size(spec, "outputs", rows, formats.BLOCK, form)
        blocks = (count, under * -(-rows // formats.BLOCK), -(-ins // formats.BLOCK))
        return {
            "weight": Packed((_part(form, 0),), Dtype.FLOAT8_E4M3FN, whole),
            "scale": Packed((_part(form, 1),), Dtype.FLOAT, blocks),
        }
    groups = ins // formats.GROUP
    packed = (_part(form, 0), *_view(spec, (count, outs, ins // 2)))
    if form == "mxfp4":
        _check_size(spec, "outputs", outs, MX_MULTIPLE, form)
        _check_size(spec, "inputs", ins, MX_MULTIPLE, form)
        pairs = (count, outs, groups // 2, 2)
        return {
            "weight": Packed((*packed, Step("tile")), Dtype.FLOAT4_E2M1, whole, tiled=True),
            "antiquant_scale": Packed((_part(form, 1),), Dtype.FLOAT8_E8M0, pairs),
        }
    scale = (_part(form, 1), *_view(spec, (count, outs, groups)), Step("permute", (0, 2, 1)))
    return {
        "weight": Packed(packed, Dtype.INT4, whole),
        "antiquant_scale": Packed(scale, Dtype.BF16, (count, groups, outs)),
    }


def _view(spec: ParamSpec, shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Matrices of an expert that lie under each other as one, where there are several."""
    return (Step("view", shape),) if len(spec.shape) > 3 else ()


def _part(form: str, index: int) -> Step:
    return Step("pack", (form, formats.FORMATS[form].parts[index].name))


def _check_size(spec: ParamSpec, what: str, size: int, multiple: int, form: str) -> None:
    if size % multiple:
        nearest = max(multiple, round(size / multiple) * multiple)
        raise CompileError(
            f"{spec.source[0]}: {size} {what}; the kernel for {form} takes multiples of {multiple}, such as {nearest}."
        )


def bound(where: str, desc: TensorDescriptor, made: Tensor, form: str | None) -> Tensor:
    """What a recipe made as a graph reads it in an input described by `desc`.

    Args:
        where: the weight, for errors. form: see `recipe.form`: where there is one, `made` are bytes.

    Raises:
        BundleError: it is of another size.
    """
    if form is None:
        fits = made.numel() == math.prod(shape_of(desc))
    else:
        made = made.contiguous().view(torch.uint8)
        fits = made.numel() == bytes_of(desc)
    if not fits:
        raise BundleError(f"{where}: the plan makes {list(made.shape)}, the graph reads {list(shape_of(desc))}.")
    return made.reshape(shape_of(desc)) if form is None else as_read(desc, made)


def as_read(desc: TensorDescriptor, raw: Tensor) -> Tensor:
    """What a graph reads in the bytes `raw` (of any shape) of an input described by `desc`: a tensor of that shape.

    Four-bit numbers become a tensor of the dtype that holds them (`Dtype.held`).
    """
    dtype, shape = Dtype.of_proto(desc.dtype), shape_of(desc)
    raw = raw.reshape(-1)
    if is_tiled(desc):
        raw = recipe.untile(raw.view(shape[0], -1, shape[1] // recipe.TILE_ROWS, recipe.TILE_ROWS, recipe.TILE_BYTES))
    if dtype is Dtype.INT4:
        return formats.int4_numbers(raw).view(shape)
    if dtype is Dtype.FLOAT4_E2M1:
        return formats.e2m1_numbers(raw).view(shape)
    return raw.contiguous().view(dtype.torch_dtype).view(shape)


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
