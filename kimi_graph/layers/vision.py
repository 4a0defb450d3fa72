"""MoonViT3d and its projector: pictures and short runs of frames become embeddings of the text model.

Patches come in *token order*: the frames of a patch lie together, then the patches of a token, then tokens row by row
(`token_order`). So merging is a view whatever the picture's shape; what depends on the shape is in tables made
beforehand (`vision_tables`), and one static graph serves every picture of at most N patches.

Axes: B pictures (one), N patches, P pixels of a patch (colour, row, column), D embed of the tower, F ffn, H heads,
K channels of a head, A and C rows and columns of the learned grid, G its points, I frames, M tokens (N / frames /
patches of a token), W channels of their patches, E embed of the text.
Source: Kimi K2.5 (arXiv:2602.02276); fact sheet of models, section 6; `source=` gives released names.
"""

import math
from collections.abc import Sequence
from typing import Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_graph import ops
from kimi_graph.config import VisionConfig
from kimi_graph.errors import ConfigError
from kimi_graph.ops import at_least_f32, contract
from kimi_graph.spec import ParamSpec, weight
from kimi_graph.tree import Leaf, param_tree

THETA = 10000.0  # of the rotation and of the time table
CUBIC = -0.75  # torch's coefficient of bicubic interpolation

Grid = tuple[int, int, int]  # frames, rows and columns of patches


@param_tree
class Affine(Generic[Leaf]):
    """A linear layer or a norm; without biases (K3) a norm is RMSNorm, with them (K2.5) LayerNorm."""

    weight: Leaf
    bias: Leaf | None


@param_tree
class VisionBlock(Generic[Leaf]):
    """One layer of the tower; `qkv` is all queries, then all keys, then all values."""

    attn_norm: Affine[Leaf]
    qkv: Affine[Leaf]
    out: Affine[Leaf]
    ffn_norm: Affine[Leaf]
    up: Affine[Leaf]
    down: Affine[Leaf]


@param_tree
class Projector(Generic[Leaf]):
    """From the merged patches of a token to the text model; `norm` stands before (K2.5) or after (K3)."""

    norm: Affine[Leaf]
    up: Affine[Leaf]
    down: Affine[Leaf]


@param_tree
class Vision(Generic[Leaf]):
    """Tower and projector; `grid` holds an embedding per place of a square picture."""

    patch: Affine[Leaf]
    grid: Leaf
    blocks: tuple[VisionBlock[Leaf], ...]
    norm: Affine[Leaf]
    projector: Projector[Leaf]


@param_tree
class VisionTables(Generic[Leaf]):
    """What a forward pass knows of a picture's shape, for N patches in token order; float32.

    Attributes:
        rows, columns: `[N, A]` and `[N, C]`, weights of the learned grid's rows and columns at each patch.
        cos, sin: `[N, K / 2]`, of the angles that pairs of channels turn by.
        time: `[I, D]`, added to each frame; None for a single one.
        count: `[1]` int64, patches that are real; the rest is padding.
    """

    rows: Leaf
    columns: Leaf
    cos: Leaf
    sin: Leaf
    time: Leaf | None
    count: Leaf


# ---- parameters ------------------------------------------------------------------------------------------------------


def vision_specs(c: VisionConfig, embed: int) -> Vision[ParamSpec]:
    """Specs of tower and projector by the checkpoint's names; `embed` is E, the text model's width."""
    pixels, merged = 3 * c.patch**2, c.embed * math.prod(c.merge)
    split = (3, c.heads, c.head_dim)

    def affine(name: str, shape: tuple[int, ...], axes: str, stored: tuple[int, ...] | None = None, outs: int = 1):
        """`outs`: leading dimensions of the weight that the bias has too."""
        matrix = weight(shape, axes, source=f"{name}.weight", stored=stored)
        if not c.bias:
            return Affine(weight=matrix, bias=None)
        axes = " ".join(matrix.axes[:outs])
        return Affine(weight=matrix, bias=weight(shape[:outs], axes, source=f"{name}.bias", stored=matrix.stored[:1]))

    def block(name: str) -> VisionBlock[ParamSpec]:
        heads = c.heads * c.head_dim
        return VisionBlock(
            attn_norm=affine(f"{name}.norm0", (c.embed,), "vision_embed"),
            qkv=affine(
                f"{name}.wqkv", (*split, c.embed), "_ vision_heads key vision_embed", (3 * heads, c.embed), outs=3
            ),
            out=affine(f"{name}.wo", (c.embed, *split[1:]), "vision_embed vision_heads key", (c.embed, heads)),
            ffn_norm=affine(f"{name}.norm1", (c.embed,), "vision_embed"),
            up=affine(f"{name}.mlp.fc0", (c.ffn, c.embed), "vision_ffn vision_embed"),
            down=affine(f"{name}.mlp.fc1", (c.embed, c.ffn), "vision_embed vision_ffn"),
        )

    tower, projector = "vision_tower", "mm_projector"
    norm = ("pre_norm", c.embed, "vision_embed") if c.projector_norm == "before" else ("post_norm", embed, "embed")
    return Vision(
        patch=affine(f"{tower}.patch_embed.proj", (c.embed, pixels), "vision_embed _", (c.embed, 3, c.patch, c.patch)),
        grid=weight((*c.grid, c.embed), "_ _ vision_embed", source=f"{tower}.patch_embed.pos_emb.weight"),
        blocks=tuple(block(f"{tower}.encoder.blocks.{i}") for i in range(c.layers)),
        norm=affine(f"{tower}.encoder.final_layernorm", (c.embed,), "vision_embed"),
        projector=Projector(
            norm=affine(f"{projector}.{norm[0]}", (norm[1],), norm[2]),
            up=affine(f"{projector}.proj.0", (c.projector_ffn, merged), "vision_ffn _"),
            down=affine(f"{projector}.proj.2", (embed, c.projector_ffn), "embed vision_ffn"),
        ),
    )


# ---- tables ----------------------------------------------------------------------------------------------------------


def vision_tables(
    c: VisionConfig, grid: Grid, room: int | None = None, dtype: torch.dtype = torch.float32
) -> VisionTables[Tensor]:
    """The tables of a picture of `grid` (frames, rows, columns of patches), padded to `room` patches.

    Raises:
        ConfigError: `grid` is not a picture's, or does not fit into `room`.
    """
    frames, height, width = grid
    order = token_order(c, grid)
    row, column = order % (height * width) // width, order % width
    tables = [m[at] for m, at in zip(position_matrices(c, height, width), (row, column), strict=True)]
    rates = THETA ** -(torch.arange(0, c.head_dim, 4, dtype=torch.float64) / c.head_dim)
    angles = (torch.stack([column, row], -1)[:, None] * rates[:, None]).flatten(1)  # pairs take turns, column first
    tables += [angles.cos(), angles.sin()]
    rows, columns, cos, sin = (_padded(c, table.to(dtype), grid, room) for table in tables)
    time = time_table(c, frames).to(dtype) if frames > 1 else None
    return VisionTables(rows=rows, columns=columns, cos=cos, sin=sin, time=time, count=torch.tensor([len(order)]))


def arrange_patches(c: VisionConfig, patches: Tensor, grid: Grid, room: int | None = None) -> Tensor:
    """Patches `[frames * rows * columns, P]` in that order, put into token order and padded to `[room, P]`.

    Raises:
        ConfigError: see `vision_tables`; or the patches are not those of `grid`.
    """
    order = token_order(c, grid)
    pixels = 3 * c.patch**2
    if patches.shape != (len(order), pixels):
        raise ConfigError(
            f"patches: found {list(patches.shape)}, expected {[len(order), pixels]} for a grid of {list(grid)}."
        )
    return _padded(c, patches[order], grid, room)


def token_order(c: VisionConfig, grid: Grid) -> Tensor:
    """Where in (frame, row, column) order each patch of the token order lies: `[N]` int64.

    Raises:
        ConfigError: `grid` is not a picture's.
    """
    frames, height, width = grid
    if not 1 <= frames <= c.frames:
        raise ConfigError(f"grid {list(grid)}: {frames} frames; the time table has 1 to {c.frames}.")
    if min(height, width) < 1 or height % c.merge[0] or width % c.merge[1]:
        raise ConfigError(f"grid {list(grid)}: rows and columns must be multiples of {list(c.merge)}; pad the picture.")
    split = (frames, height // c.merge[0], c.merge[0], width // c.merge[1], c.merge[1])
    return torch.arange(frames * height * width).view(split).permute(1, 3, 2, 4, 0).reshape(-1)


def _padded(c: VisionConfig, x: Tensor, grid: Grid, room: int | None) -> Tensor:
    """`x` with rows of zeros up to `room`."""
    if room is None:
        return x
    step = grid[0] * math.prod(c.merge)
    if room < len(x) or room % step:
        raise ConfigError(f"room for {room:,} patches: {list(grid)} needs at least {len(x):,}, in steps of {step}.")
    return torch.cat([x, x.new_zeros(room - len(x), x.shape[1])])


def position_matrices(c: VisionConfig, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Interpolation of the learned grid as two matrices, `[height, A]` and `[width, C]` float64.

    `rows @ grid @ columns.T` is torch's `interpolate` of that mode, with `align_corners` false and no antialiasing.

    Raises:
        ConfigError: the mode is neither "bilinear" nor "bicubic".
    """
    rows, columns = c.grid
    return _interpolation(height, rows, c.interpolation), _interpolation(width, columns, c.interpolation)


def _interpolation(size: int, grid: int, mode: str) -> Tensor:
    """`[size, grid]` float64: what each of `grid` points counts at `size` evenly spread places."""
    at = (torch.arange(size, dtype=torch.float64) + 0.5) * grid / size - 0.5
    if mode == "bilinear":
        at, taps = at.clamp(min=0), range(2)
    elif mode == "bicubic":
        taps = range(-1, 3)
    else:
        raise ConfigError(f"interpolation: found {mode!r}, expected 'bilinear' or 'bicubic'.")
    first = at.floor()
    matrix = torch.zeros(size, grid, dtype=torch.float64)
    for tap in taps:
        point = (first + tap).clamp(0, grid - 1).long()  # the border's points stand for those outside
        far = (at - first - tap).abs()
        matrix.scatter_add_(1, point[:, None], (1 - far if mode == "bilinear" else _cubic(far))[:, None])
    return matrix


def _cubic(x: Tensor) -> Tensor:
    """Keys' convolution kernel at distances from 0 to 2."""
    near = ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1
    far = ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC
    return torch.where(x <= 1, near, far)


def time_table(c: VisionConfig, frames: int) -> Tensor:
    """What is added to each of several frames: `[frames, D]` float64, sines and then cosines."""
    rates = THETA ** -(torch.arange(0, c.embed, 2, dtype=torch.float64) / c.embed)
    angles = torch.arange(frames)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


# ---- forward ---------------------------------------------------------------------------------------------------------


def vision_forward(p: Vision[Tensor], c: VisionConfig, patches_NP: Tensor, tables: VisionTables[Tensor]) -> Tensor:
    """Embeddings of a picture's tokens, row by row: `[M, E]`; tokens past the real ones are anything finite.

    Args:
        patches_NP: see `arrange_patches`.
        tables: of the same picture and room.
    """
    x_ND = vision_embed(p, patches_NP, tables)
    for block in p.blocks:
        x_ND = vision_block(block, c, x_ND, tables)
    return vision_project(p, c, x_ND, 1 if tables.time is None else tables.time.shape[0])


def vision_embed(p: Vision[Tensor], patches_NP: Tensor, tables: VisionTables[Tensor]) -> Tensor:
    """Patches and where they are: `[N, P]` -> `[N, D]`. The place is summed in float32."""
    x_ND = _linear("np,dp->nd", patches_NP, p.patch)
    cells_NG = (tables.rows[:, :, None] * tables.columns[:, None]).flatten(1, 2)
    place_ND = contract("ng,gd->nd", cells_NG, at_least_f32(p.grid).flatten(0, 1))
    if tables.time is not None:
        place_ND = (place_ND.unflatten(0, (-1, tables.time.shape[0])) + tables.time).flatten(0, 1)
    return x_ND + place_ND.to(x_ND.dtype)


def vision_block(p: VisionBlock[Tensor], c: VisionConfig, x_ND: Tensor, tables: VisionTables[Tensor]) -> Tensor:
    """Attention over the whole picture, then the feed-forward part: `[N, D]` -> `[N, D]`."""
    h_ND = _norm(x_ND, p.attn_norm, c.norm_eps)
    q, k, v = (_linear("nd,bhkd->bnhk", h_ND, _part(p.qkv, i)) for i in range(3))
    q, k = (ops.rope(x, tables.cos[None], tables.sin[None], True) for x in (q, k))
    o_BNHK = ops.full_attention(q, k, v, tables.count, c.head_dim**-0.5)
    x_ND = x_ND + _linear("bnhk,dhk->bnd", o_BNHK, p.out).flatten(0, 1)
    h_ND = _norm(x_ND, p.ffn_norm, c.norm_eps)
    return x_ND + _linear("nf,df->nd", F.gelu(_linear("nd,fd->nf", h_ND, p.up), approximate="tanh"), p.down)


def vision_project(p: Vision[Tensor], c: VisionConfig, x_ND: Tensor, frames: int) -> Tensor:
    """Frames averaged, patches merged and moved to the text model's width: `[N, D]` -> `[M, E]`."""
    x_ND = _norm(x_ND, p.norm, c.norm_eps)
    if frames > 1:
        x_ND = at_least_f32(x_ND).unflatten(0, (-1, frames)).mean(1).to(x_ND.dtype)
    if c.projector_norm == "before":
        x_ND = _norm(x_ND, p.projector.norm, c.projector_eps)
    x_MW = x_ND.unflatten(0, (-1, math.prod(c.merge))).flatten(1, 2)
    y_ME = _linear("mf,ef->me", F.gelu(_linear("mw,fw->mf", x_MW, p.projector.up)), p.projector.down)
    return _norm(y_ME, p.projector.norm, c.projector_eps) if c.projector_norm == "after" else y_ME


def _linear(equation: str, x: Tensor, p: Affine[Tensor]) -> Tensor:
    y = contract(equation, x, p.weight)
    return y if p.bias is None else y + p.bias


def _norm(x: Tensor, p: Affine[Tensor], eps: float) -> Tensor:
    return ops.rms_norm(x, p.weight, eps) if p.bias is None else ops.layer_norm(x, p.weight, p.bias, eps)


def _part(p: Affine[Tensor], i: int) -> Affine[Tensor]:
    """Queries, keys or values of a `qkv`, as a slice: a range of the checkpoint's bytes."""
    part = slice(i, i + 1)
    return Affine(weight=p.weight[part], bias=None if p.bias is None else p.bias[part])


# ---- into the text ---------------------------------------------------------------------------------------------------


def vision_rows(tokens_BT: Tensor, placeholder: int, counts: Sequence[int]) -> Tensor:
    """Which image embedding stands for each token: `[B, T]` int64, 0 for text, else 1 + its row.

    Args:
        placeholder: the token that stands for one image embedding. They are taken in order, row after row of tokens.
        counts: tokens of each picture, in order.

    Raises:
        ConfigError: there are more or fewer placeholders than image tokens.
    """
    here = tokens_BT == placeholder
    found, expected = int(here.sum()), sum(counts)
    if found != expected:
        raise ConfigError(
            f"tokens: found {found:,} placeholders (token {placeholder}), expected {expected:,}: "
            f"one for each token of the {len(counts)} pictures ({', '.join(map(str, counts[:8]))}"
            f"{', ...' if len(counts) > 8 else ''})."
        )
    return torch.where(here, here.flatten().cumsum(0).view(here.shape), 0)


def replace_rows(x_BTD: Tensor, rows_BT: Tensor, values_MD: Tensor) -> Tensor:
    """`x` with image embeddings in place of placeholders: `[B, T, D]`.

    Args:
        rows_BT: see `vision_rows`.
        values_MD: embeddings of all pictures, in order; at least one row.
    """
    picked_BTD = F.embedding((rows_BT - 1).clamp(min=0), values_MD.to(x_BTD.dtype))
    return torch.where((rows_BT > 0)[..., None], picked_BTD, x_BTD)
