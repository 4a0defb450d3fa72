"""The vision tower and projector of Kimi K2.5 and K3.

Native files of transformers spell some keys without `vt_` and `init_`.
Source: fact sheet of models, section 6.
"""

from collections.abc import Iterator

import torch

from kimi_graph.config import VisionConfig
from kimi_graph.config_keys import Entry, Key, Section, integer, list_of, one_of, only, optional, real

from .common import MAX_LAYERS, Values

_MERGE_TYPE = "patches are merged in space and averaged over time"
_VISION: dict[str, Entry] = {
    "vt_hidden_size": Key(integer(), spellings=("hidden_size",)),
    "vt_num_hidden_layers": Key(integer(1, MAX_LAYERS), spellings=("num_hidden_layers",)),
    "vt_num_attention_heads": Key(integer(), spellings=("num_attention_heads",)),
    "vt_intermediate_size": Key(integer(), spellings=("intermediate_size",)),
    "patch_size": Key(integer()),
    "init_pos_emb_height": Key(integer(), spellings=("pos_emb_height",)),
    "init_pos_emb_width": Key(integer(), spellings=("pos_emb_width",)),
    "init_pos_emb_time": Key(integer(), spellings=("pos_emb_time",)),
    "pos_emb_type": Key(only("divided_fixed", "a learned grid and a fixed time table"), "divided_fixed"),
    "merge_kernel_size": Key(list_of(integer(), 2)),
    "merge_type": Key(only("sd2_tpool", _MERGE_TYPE)),
    "mm_hidden_size": Key(integer()),
    "text_hidden_size": Key(integer()),
    "activation_func": Key(only("gelu_pytorch_tanh", "of the tower"), "gelu_pytorch_tanh", ("hidden_act",)),
    "projector_hidden_act": Key(only("gelu", "of the projector, exact")),
    "projector_ln_eps": Key(real(0, 1)),
    "in_patch_limit": Key(optional(integer()), None),  # released files keep it in preprocessor_config.json
}

K25_VISION = Section(
    _VISION | {
        "mm_projector_type": Key(only("patchmerger", "norm, two linear layers")),
        "pos_emb_interpolation_mode": Key(one_of("bicubic", "bilinear"), "bicubic"),
        "video_attn_type": Key(only("spatial_temporal", "all frames attend to each other"), "spatial_temporal"),
    },
    inert=frozenset({"_attn_implementation", "model_type"}),
)  # fmt: skip

K3_VISION = Section(
    _VISION | {
        "qkv_hidden_size": Key(integer()),
        "mm_projector_type": Key(only("patchmergerv2", "two linear layers, norm")),
        "pos_emb_interpolation_mode": Key(one_of("bicubic", "bilinear")),
        "mlp_type": Key(only("mlp2", "two linear layers"), "mlp2"),
        "norm_type": Key(only("rmsnorm", "of the tower")),
        "attn_bias": Key(only(False, "the tower of kimi_k3 has no biases")),
        "linear_bias": Key(only(False, "the tower of kimi_k3 has no biases")),
        "patch_embed_proj_bias": Key(only(False, "the tower of kimi_k3 has no biases")),
        "video_attn_type": Key(only("spatial_temporal", "all frames attend to each other"), "spatial_temporal"),
    },
    inert=frozenset({"_attn_implementation", "model_type"}),
)  # fmt: skip

# Patches of one image. The released preprocessor_config.json of K3 is not known: 65,536 is a third party's default.
K25_PATCHES, K3_PATCHES = 16_384, 65_536
# Behind transparent pixels: side, light and dark of K3's preprocessor_config.json, as in
# https://github.com/smg-project/smg/pull/1991; K2.5 has none.
K3_CHESSBOARD = (8, 255, 180)
K3_VISION_EPS = torch.finfo(torch.float32).eps  # torch.nn.RMSNorm without eps (fact sheet, section 4)


def vision_faults(v: Values, width: str, embed: int) -> Iterator[str]:
    """Args:
    width: key of the width of all heads together. embed: of the text model.
    """
    heads, all_heads = v["vt_num_attention_heads"], v[width]
    if all_heads % heads or all_heads // heads % 4:
        yield f"{width}: found {all_heads}, expected a multiple of {4 * heads}: {heads} heads, channels in pairs twice."
    if v["mm_hidden_size"] != v["vt_hidden_size"]:
        yield f"mm_hidden_size: found {v['mm_hidden_size']}, expected {v['vt_hidden_size']} (vt_hidden_size)."
    if v["text_hidden_size"] != embed:
        yield f"text_hidden_size: found {v['text_hidden_size']}, expected {embed} (text_config.hidden_size)."


def read_vision(v: Values, *, width: str, k3: bool, placeholder: int) -> VisionConfig:
    merge = v["merge_kernel_size"]
    return VisionConfig(
        embed=v["vt_hidden_size"],
        layers=v["vt_num_hidden_layers"],
        heads=v["vt_num_attention_heads"],
        head_dim=v[width] // v["vt_num_attention_heads"],
        ffn=v["vt_intermediate_size"],
        patch=v["patch_size"],
        grid=(v["init_pos_emb_height"], v["init_pos_emb_width"]),
        frames=v["init_pos_emb_time"],
        interpolation=v["pos_emb_interpolation_mode"],
        bias=not k3,
        norm_eps=K3_VISION_EPS if k3 else 1e-5,
        merge=(merge[0], merge[1]),
        projector_ffn=v["vt_hidden_size"] * merge[0] * merge[1],
        projector_norm="after" if k3 else "before",
        projector_eps=v["projector_ln_eps"],
        patch_limit=v["in_patch_limit"] or (K3_PATCHES if k3 else K25_PATCHES),
        placeholder=placeholder,
        chessboard=K3_CHESSBOARD if k3 else None,
        sized_prompt=k3,
    )
