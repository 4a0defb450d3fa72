"""The vision tower against transformers (K2.5) and a form written from the fact sheet (K3); buckets; injection."""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import kimi_graph as kg
from kimi_graph import layers, ops, tree
from kimi_graph.compile.capture import capture
from kimi_graph.compile.sharded import check
from kimi_graph.config import VisionConfig
from kimi_graph.errors import ConfigError
from kimi_graph.init import init_tensor
from kimi_graph.layers import vision
from kimi_graph.parallel import Mesh, Rules

K25, K3 = kg.load_config("kimi-k2.5"), kg.load_config("kimi-k3")
TOLERANCE = 1e-4  # of the scale; float32 sums in another order give 4e-6 to 8e-6 (fact sheet, section 8)
ROUNDING = 1e-12  # float64, sums in another order
TEXT = 40
GRIDS = [(1, 4, 6), (3, 4, 2), (1, 64, 64), (4, 2, 2)]


def small(c: VisionConfig, heads: int = 2, blocks: int = 2) -> VisionConfig:
    """The released head, patch, grid and merge; few heads, narrow."""
    embed = 48 if c.embed != c.heads * c.head_dim else heads * c.head_dim
    sizes = {"embed": embed, "layers": blocks, "heads": heads, "ffn": 56, "projector_ffn": 4 * embed}
    return dataclasses.replace(c, **sizes)


def params(c: VisionConfig, dtype: torch.dtype = torch.float64):
    return tree.map_with_path(lambda path, s: init_tensor(s, path).to(dtype), layers.vision_specs(c, TEXT))


def picture(c: VisionConfig, grid: tuple[int, int, int], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(math.prod(grid), 3 * c.patch**2, dtype=dtype)


def forward(p, c, patches, grid, room=None):
    tables = layers.vision_tables(c, grid, room, torch.promote_types(patches.dtype, torch.float32))
    return layers.vision_forward(p, c, layers.arrange_patches(c, patches, grid, room), tables)


def differ(got, want):
    return float((got - want).abs().max() / want.abs().max())


# Parameters.


def test_k3_has_the_released_number_of_parameters_and_tensors():
    assert K3.vision is not None
    specs = layers.vision_specs(K3.vision, K3.embed)
    total, projector = (sum(s.numel for s in tree.leaves(part)) for part in (specs, specs.projector))
    assert (total - projector, projector) == (401_214_464, 46_144_512)
    assert (len(tree.leaves(specs)), len(tree.leaves(specs.projector))) == (168, 3)


def test_names_and_shapes_are_those_of_the_fact_sheet():
    stored = {}
    for model in (K25, K3):
        assert model.vision is not None
        found = tree.leaves(layers.vision_specs(model.vision, model.embed))
        stored[model.name] = {s.source[0]: s.stored for s in found}
    k25, k3 = stored["kimi-k2.5"], stored["kimi-k3"]
    assert k25["vision_tower.patch_embed.proj.weight"] == (1152, 3, 14, 14)
    assert k25["vision_tower.patch_embed.pos_emb.weight"] == (64, 64, 1152)
    assert k25["vision_tower.encoder.blocks.26.wqkv.weight"] == (3456, 1152)
    assert k25["vision_tower.encoder.blocks.26.wqkv.bias"] == (3456,)
    assert k25["vision_tower.encoder.blocks.0.mlp.fc0.bias"] == (4304,)
    assert k25["mm_projector.pre_norm.bias"] == (1152,)
    assert k25["mm_projector.proj.0.weight"] == (4608, 4608)
    assert k25["mm_projector.proj.2.weight"] == (7168, 4608)
    assert k3["vision_tower.encoder.blocks.0.wqkv.weight"] == (4608, 1024)
    assert k3["vision_tower.encoder.blocks.0.wo.weight"] == (1024, 1536)
    assert k3["mm_projector.post_norm.weight"] == (7168,)
    assert not [name for name in k3 if name.endswith("bias") or "pre_norm" in name]


def test_a_head_of_k3_is_128_wide_and_not_hidden_size_over_heads():
    assert K3.vision is not None
    assert (K3.vision.embed, K3.vision.heads, K3.vision.head_dim) == (1024, 12, 128)
    assert layers.vision_specs(K3.vision, K3.embed).blocks[0].qkv.weight.shape == (3, 12, 128, 1024)


# K2.5 against transformers.


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(config, our parameters, transformers' model) of one checkpoint with released names."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    assert K25.vision is not None
    c = small(K25.vision)
    p = params(c, torch.float32)
    text = {
        "model_type": "deepseek_v3", "hidden_size": TEXT, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "intermediate_size": 16, "first_k_dense_replace": 1, "vocab_size": 32, "pad_token_id": 0,
    }  # fmt: skip
    config = {
        "model_type": "kimi_k25", "architectures": ["Kimi_K25ForConditionalGeneration"], "text_config": text,
        "projection_hidden_size": c.embed, "tie_word_embeddings": False, "image_token_id": 31,
        "vision_config": {
            "model_type": "kimi_k25_vision", "hidden_size": c.embed, "num_attention_heads": c.heads,
            "num_hidden_layers": c.layers, "intermediate_size": c.ffn,
        },
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("kimi-k25")
    (folder / "config.json").write_text(json.dumps(config))
    specs = dict(tree.items(layers.vision_specs(c, TEXT)))
    tensors = {specs[name].source[0]: x.reshape(specs[name].stored) for name, x in tree.items(p)}
    load = transformers.Kimi_K25ForConditionalGeneration
    for name, x in load(transformers.AutoConfig.from_pretrained(folder)).state_dict().items():
        if "language_model" in name or "lm_head" in name:
            short = name.removeprefix("model.language_model.").removeprefix("language_model.")
            tensors[f"language_model.{short}" if "lm_head" in name else f"language_model.model.{short}"] = x.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    theirs, info = load.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
    return c, p, theirs.eval()


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_k25_agrees_with_transformers(both, grid):
    c, p, theirs = both
    patches = picture(c, grid, torch.float32)
    with torch.no_grad():
        pixels = patches.view(-1, 3, c.patch, c.patch)
        (want,) = theirs.model.get_image_features(pixels, torch.tensor([grid])).pooler_output
    assert differ(forward(p, c, patches, grid), want) < TOLERANCE


# K3 against a form of its own.


def k3_form(w, c, patches, grid):
    """Section 6.2 in patches by frame, row and column; `w`: tensors by released name."""
    frames, height, width = grid

    def rms(x, name, eps):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w[name]

    tower, eps = "vision_tower.", torch.finfo(torch.float32).eps
    x = F.conv2d(patches.view(-1, 3, 14, 14), w[f"{tower}patch_embed.proj.weight"], stride=14).flatten(1)
    table = w[f"{tower}patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
    where = F.interpolate(table, size=(height, width), mode="bilinear", align_corners=False)[0].flatten(1).T
    where = where.repeat(frames, 1)
    if frames > 1:
        angle = torch.arange(frames)[:, None] / 10000 ** (2 * torch.arange(c.embed // 2).double() / c.embed)
        where = where + torch.cat([angle.sin(), angle.cos()], 1).repeat_interleave(height * width, 0)
    x = x + where
    dim = c.head_dim
    theta = 10000 ** (-4 * torch.arange(dim // 4).double() / dim)
    turn = torch.zeros(frames, height, width, dim // 2, dtype=torch.float64)
    turn[..., 0::2] = torch.arange(width)[:, None] * theta
    turn[..., 1::2] = torch.arange(height)[:, None, None] * theta
    turn = torch.polar(torch.ones_like(turn), turn).reshape(-1, 1, dim // 2)

    def rotated(x):
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:2], -1, 2)) * turn).flatten(2)

    for i in range(c.layers):
        name = f"{tower}encoder.blocks.{i}."
        qkv = rms(x, f"{name}norm0.weight", eps) @ w[f"{name}wqkv.weight"].T
        q, k, v = qkv.view(-1, 3, c.heads, dim).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", rotated(q), rotated(k)) / math.sqrt(dim)
        o = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + o @ w[f"{name}wo.weight"].T
        h = rms(x, f"{name}norm1.weight", eps) @ w[f"{name}mlp.fc0.weight"].T
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + h @ w[f"{name}mlp.fc1.weight"].T
    x = rms(x, f"{tower}encoder.final_layernorm.weight", eps).view(frames, height // 2, 2, width // 2, 2, c.embed)
    x = x.permute(0, 1, 3, 2, 4, 5).mean(0).reshape(-1, 4 * c.embed)
    h = x @ w["mm_projector.proj.0.weight"].T
    h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    return rms(h @ w["mm_projector.proj.2.weight"].T, "mm_projector.post_norm.weight", 1e-5)


@pytest.mark.parametrize("grid", [*GRIDS, (4, 6, 4)], ids=str)
def test_k3_agrees_with_the_form_of_the_fact_sheet(grid):
    assert K3.vision is not None
    c = small(K3.vision, blocks=2 if math.prod(grid) < 1000 else 1)
    p = params(c)
    specs = dict(tree.items(layers.vision_specs(c, TEXT)))
    released = {specs[name].source[0]: x.reshape(specs[name].stored) for name, x in tree.items(p)}
    patches = picture(c, grid)
    # eps of RMSNorm and the scale of scores are float32 numbers in the operators
    assert differ(forward(p, c, patches, grid), k3_form(released, c, patches, grid)) < 1e-7


# Tables.


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("height, width", [(78, 138), (64, 64), (2, 6), (512, 32), (1, 3)])
def test_position_matrices_are_torchs_interpolation(mode, height, width):
    assert K3.vision is not None
    c = dataclasses.replace(K3.vision, interpolation=mode)
    grid = torch.randn(*c.grid, 3, dtype=torch.float64)
    rows, columns = vision.position_matrices(c, height, width)
    want = F.interpolate(grid.permute(2, 0, 1)[None], size=(height, width), mode=mode, align_corners=False)[0]
    assert differ(torch.einsum("ya,abd,xb->dyx", rows, grid, columns), want) < ROUNDING


def test_four_frames_of_78_by_138_patches_have_interpolated_places_and_times_of_their_own():
    """Public case V5."""
    assert K3.vision is not None
    c = dataclasses.replace(small(K3.vision, blocks=0), embed=8)
    grid = (4, 78, 138)
    p = params(c)
    tables = layers.vision_tables(c, grid, dtype=torch.float64)
    places = layers.vision_embed(p, torch.zeros(math.prod(grid), 3 * c.patch**2, dtype=torch.float64), tables)
    by_frame = torch.empty_like(places)
    by_frame[vision.token_order(c, grid)] = places
    got = by_frame.view(*grid, c.embed)
    table = p.grid.permute(2, 0, 1)[None]
    want = F.interpolate(table, size=grid[1:], mode="bilinear", align_corners=False)[0].permute(1, 2, 0)
    for frame in range(4):
        rest = got[frame] - want
        assert float((rest - rest[0, 0]).abs().max()) < ROUNDING, "what a frame adds is the same everywhere"
        angle = frame / 10000 ** (torch.arange(0, c.embed, 2).double() / c.embed)
        assert float((rest[0, 0] - torch.cat([angle.sin(), angle.cos()])).abs().max()) < ROUNDING


def test_a_single_picture_has_no_time():
    assert K3.vision is not None
    assert layers.vision_tables(K3.vision, (1, 2, 2)).time is None


def test_token_order_keeps_frames_together_then_the_patches_of_a_token():
    assert K3.vision is not None
    order = vision.token_order(K3.vision, (2, 2, 4)).tolist()
    assert order == [0, 8, 1, 9, 4, 12, 5, 13, 2, 10, 3, 11, 6, 14, 7, 15]


@pytest.mark.parametrize(
    "grid, room, message",
    [
        ((5, 2, 2), None, r"grid \[5, 2, 2\]: 5 frames; the time table has 1 to 4"),
        ((0, 2, 2), None, "0 frames"),
        ((1, 3, 2), None, r"multiples of \[2, 2\]; pad the picture"),
        ((1, 0, 2), None, "multiples of"),
        ((1, 4, 4), 12, r"room for 12 patches: \[1, 4, 4\] needs at least 16, in steps of 4"),
        ((3, 2, 2), 16, "needs at least 12, in steps of 12"),
    ],
)
def test_a_picture_that_cannot_be_is_refused(grid, room, message):
    assert K3.vision is not None
    with pytest.raises(ConfigError, match=message):
        layers.vision_tables(K3.vision, grid, room)


def test_patches_of_another_grid_are_refused():
    assert K3.vision is not None
    with pytest.raises(ConfigError, match=r"patches: found \[4, 588\], expected \[8, 588\] for a grid of \[1, 2, 4\]"):
        layers.arrange_patches(K3.vision, torch.zeros(4, 588), (1, 2, 4))


# Buckets.


@pytest.mark.parametrize("model", [K25, K3], ids=lambda m: m.name)
@pytest.mark.parametrize("grid", [(1, 4, 6), (3, 4, 2)], ids=str)
def test_padding_to_a_bucket_changes_nothing(model, grid):
    c = small(model.vision)
    p, patches = params(c), picture(c, grid)
    alone = forward(p, c, patches, grid)
    inside = forward(p, c, patches, grid, room=math.prod(grid) + 12 * grid[0])
    assert differ(inside[: len(alone)], alone) < ROUNDING
    assert bool(inside.isfinite().all())


def test_what_lies_in_the_padding_of_a_bucket_is_not_seen():
    c = small(K25.vision)
    p, grid = params(c), (1, 2, 4)
    tables = layers.vision_tables(c, grid, 16, torch.float64)
    patches = layers.arrange_patches(c, picture(c, grid), grid, 16)
    other = torch.cat([patches[:8], torch.full_like(patches[8:], 1e3)])
    assert torch.equal(*(layers.vision_forward(p, c, x, tables)[:2] for x in (patches, other)))


def test_bfloat16_stays_close_to_float64():
    c = small(K3.vision)
    p, grid = params(c), (2, 4, 4)
    patches = picture(c, grid)
    rough = forward(tree.map(lambda x: x.bfloat16(), p), c, patches.bfloat16(), grid)
    assert rough.dtype == torch.bfloat16
    assert differ(rough.double(), forward(p, c, patches, grid)) < 0.06  # a few roundings of 2^-9 in a row


class Largest(TorchDispatchMode):
    """Remembers the most elements that a result had."""

    size = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        self.size = max([self.size, *(x.numel() for x in tree.leaves(out) if isinstance(x, torch.Tensor))])
        return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_attention_holds_no_matrix_of_all_scores(dtype):
    """For the 16,384 patches of K2.5's limit it would take 1 GiB a head."""
    q = torch.randn(1, 2048, 2, 72, dtype=dtype)
    with Largest() as largest:
        out = ops.full_attention(q, q, q, torch.tensor([2040]), 0.125)
    assert largest.size <= q.numel()
    assert bool(out[0, 2040:].eq(0).all())
    query, keys = q[0, 5, 1].double(), q[0, :2040, 1].double()
    assert differ(out[0, 5, 1].double(), torch.softmax(keys @ query / 8, -1) @ keys) < 64 * torch.finfo(dtype).eps


# Graphs.


KNOWN = {
    "kimi.einsum", "kimi.rms_norm", "kimi.layer_norm", "kimi.rope", "kimi.full_attention",
    "aten.view", "aten._unsafe_view", "aten.unsqueeze", "aten.select", "aten.slice", "aten.mul", "aten.add",
    "aten.gelu", "aten._to_copy", "aten.mean",
}  # fmt: skip


@pytest.mark.parametrize("model", [K25, K3], ids=lambda m: m.name)
@pytest.mark.parametrize("frames", [1, 4])
def test_forward_is_captured_as_products_and_known_operators(model, frames):
    c = model.vision
    meta = lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta")  # noqa: E731
    specs = layers.vision_specs(dataclasses.replace(c, layers=1), model.embed)
    p = tree.map(lambda s: torch.empty(s.shape, dtype=torch.bfloat16, device="meta"), specs)
    tables = tree.map(meta, layers.vision_tables(c, (frames, 4, 4), 64 * frames))
    patches = torch.empty(64 * frames, 3 * c.patch**2, dtype=torch.bfloat16, device="meta")
    run = lambda p, patches, tables: {"out": layers.vision_forward(p, c, patches, tables)}  # noqa: E731
    captured = capture(run, {"p": p, "patches": patches, "tables": tables})
    nodes = [n for n in captured.module.graph.nodes if n.op == "call_function"]
    assert {str(n.target).rpartition(".")[0] for n in nodes} <= KNOWN
    assert sum("einsum" in str(n.target) for n in nodes) == 2 + 6 + 2
    (out,) = next(n for n in captured.module.graph.nodes if n.op == "output").args[0]
    assert (out.meta["val"].shape, out.meta["val"].dtype) == ((16, 7168), torch.bfloat16)


RULES = {
    "patches": None,
    "vision_embed": None,
    "vision_heads": "tensor",
    "key": None,
    "vision_ffn": "tensor",
    "embed": None,
}


@pytest.mark.parametrize("model", [K25, K3], ids=lambda m: m.name)
@pytest.mark.parametrize("ways", [1, 2, 3])
def test_heads_and_widths_split_over_devices_give_the_same_with_one_all_reduce_a_half(model, ways):
    c = dataclasses.replace(small(model.vision, heads=6), ffn=54)
    grid = (1, 2, 4)
    p, tables = params(c), layers.vision_tables(c, grid, dtype=torch.float64)
    patches = layers.arrange_patches(c, picture(c, grid), grid)
    args = {"p": p, "x": patches, "t": tables}
    axes = {"p": layers.vision_specs(c, TEXT), "x": "_ _", "t": tree.map(lambda x: " ".join("_" * x.ndim), tables)}
    rules = Rules.of(Mesh(tensor=ways), RULES)
    piece = check(rules, lambda p, x, t: {"y": layers.vision_forward(p, c, x, t)}, args, axes, {"y": "_ embed"})
    assert len(piece.collectives) == (0 if ways == 1 else 2 * c.layers + 1)


# Into the text.


def test_rows_number_the_placeholders_in_order():
    tokens = torch.tensor([[9, 1, 9, 9], [2, 9, 3, 4]])
    assert layers.vision_rows(tokens, 9, [3, 1]).tolist() == [[1, 0, 2, 3], [0, 4, 0, 0]]


@pytest.mark.parametrize("counts, pictures", [([3], 1), ([2, 3], 2), ([], 0)])
def test_unequal_numbers_of_placeholders_and_image_tokens_are_refused_with_both(counts, pictures):
    tokens = torch.tensor([[9, 1, 9, 9, 9]])
    expected = (
        rf"found 4 placeholders \(token 9\), expected {sum(counts)}: one for each token of the {pictures} pictures"
    )
    with pytest.raises(ConfigError, match=expected):
        layers.vision_rows(tokens, 9, counts)


def test_replacing_rows_is_exact_and_leaves_text_alone():
    x, values = torch.randn(2, 4, 3), torch.randn(4, 3)
    tokens = torch.tensor([[9, 1, 9, 9], [2, 9, 3, 4]])
    got = layers.replace_rows(x, layers.vision_rows(tokens, 9, [4]), values)
    want = x.clone()
    want[tokens == 9] = values
    assert torch.equal(got, want)


def test_embeddings_that_are_not_numbers_stay_out_of_text_positions():
    x = torch.zeros(1, 2, 3)
    got = layers.replace_rows(x, torch.tensor([[0, 2]]), torch.tensor([[math.nan] * 3, [1.0] * 3]))
    assert got.tolist() == [[[0.0] * 3, [1.0] * 3]]
