"""Keys of a text model that many files have, and what about them can contradict itself."""

from collections.abc import Iterator
from typing import Any

from kimi_graph.config import Names
from kimi_graph.config_keys import Entry, Key, dtype, flag, integer, only, optional, real

MAX_LAYERS = 4096
MAX_EXPERTS = 2048  # limit of the routing operators of CANN (MoeGatingTopK, MoeInitRoutingV3)
INDEX_EPS = 1e-6  # of the index key's LayerNorm: a constant of the released code (fact sheet, section 5.2)

Values = dict[str, Any]


# What `PretrainedConfig` of transformers writes into any file, and hints for training or for running Python code.
INERT = frozenset({
    "_name_or_path", "attention_dropout", "attn_implementation", "auto_map", "aux_loss_alpha",
    "chunk_size_feed_forward", "ep_size", "id2label", "initializer_range", "label2id", "output_attentions",
    "output_hidden_states", "output_router_logits", "pretraining_tp", "problem_type", "return_dict",
    "router_aux_loss_coef", "seq_aux", "transformers_version", "use_cache",
})  # fmt: skip

# The same, inside a nested section: how to sample, how to fine-tune, and what its own classes are called.
INERT_INSIDE = INERT | {
    "architectures", "bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "is_decoder",
    "length_penalty", "max_length", "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "prefix", "pruned_heads", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torchscript", "typical_p",
    "use_bfloat16",
}  # fmt: skip

EXPERTS = integer(1, MAX_EXPERTS, " (limit of CANN's routing operators)")

TEXT: dict[str, Entry] = {
    "vocab_size": Key(integer()),
    "hidden_size": Key(integer()),
    "num_hidden_layers": Key(integer(1, MAX_LAYERS)),
    "rms_norm_eps": Key(real(0, 1)),
    "tie_word_embeddings": Key(flag, False),
    "dtype": Key(dtype, spellings=("torch_dtype",)),
    "num_attention_heads": Key(integer()),
    "num_key_value_heads": Key(optional(integer()), None),
    "kv_lora_rank": Key(integer()),
    "qk_nope_head_dim": Key(integer()),
    "qk_rope_head_dim": Key(integer()),
    "v_head_dim": Key(integer()),
    "attention_bias": Key(only(False, "linear layers of these models have no bias"), False),
    "intermediate_size": Key(integer()),
    "moe_intermediate_size": Key(integer()),
    "first_k_dense_replace": Key(integer(0)),
    "moe_layer_freq": Key(integer(1), 1),
    "routed_scaling_factor": Key(real(0)),
    "topk_method": Key(only("noaux_tc", "selection with a correction bias"), "noaux_tc"),
    "topk_group": Key(integer(), 1),
    "num_nextn_predict_layers": Key(integer(0, MAX_LAYERS), 0),  # draft layers: their tensors are passed over
    "is_encoder_decoder": Key(only(False, "this is a decoder"), False),
    "add_cross_attention": Key(only(False, "this is a decoder"), False),
}


def text_faults(v: Values, *, experts: str, top_k: str, groups: str) -> Iterator[str]:
    """Contradictions that any text model can have; the arguments are keys that families spell differently."""
    heads, kv_heads = v["num_attention_heads"], v["num_key_value_heads"]
    if kv_heads not in (None, heads):
        yield f"num_key_value_heads: found {kv_heads}, expected {heads} (num_attention_heads): heads share one latent."
    if v[top_k] > v[experts]:
        yield f"{top_k}: found {v[top_k]}, expected at most {v[experts]} ({experts})."
    layers, dense = v["num_hidden_layers"], v["first_k_dense_replace"]
    if dense > layers:
        yield f"first_k_dense_replace: found {dense}, expected at most {layers} (num_hidden_layers)."
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = v[key] if isinstance(v[key], tuple) else () if v[key] is None else (v[key],)
        for token in ids:
            if token >= v["vocab_size"]:
                yield f"{key}: found {token}, expected at most {v['vocab_size'] - 1} (vocab_size {v['vocab_size']})."
    yield from _group_faults(v[experts], v[top_k], v[groups], v["topk_group"], groups, experts)


def _group_faults(experts: int, top_k: int, groups: int, kept: int, key: str, experts_key: str) -> Iterator[str]:
    """Grouped routing: the two best experts score a group, a few groups are kept, experts are chosen inside them."""
    if experts % groups or (groups > 1 and experts < 2 * groups):
        yield f"{key}: found {groups}, expected a divisor of {experts} ({experts_key}), two experts a group at least."
    elif kept > groups:
        yield f"topk_group: found {kept}, expected at most {groups} ({key})."
    elif groups > 1 and kept * (experts // groups) < top_k:
        yield f"topk_group: found {kept}, expected more: {kept} groups of {experts // groups} hold no {top_k} experts."


def text_fields(v: Values, names: Names, max_len: str) -> Values:
    """Fields of `ModelConfig` that all text models have; without pad token sequences are filled up with their end."""
    return {
        "vocab": v["vocab_size"],
        "embed": v["hidden_size"],
        "norm_eps": v["rms_norm_eps"],
        "tied": v["tie_word_embeddings"],
        "names": names,
        "draft_layers": v["num_nextn_predict_layers"],
        "max_len": v[max_len],
        "dtype": v["dtype"],
        "bos": v["bos_token_id"],
        "eos": v["eos_token_id"],
        "pad": v["eos_token_id"][0] if v["pad_token_id"] is None else v["pad_token_id"],
    }


def is_moe(v: Values, layer: int) -> bool:
    return layer >= v["first_k_dense_replace"] and layer % v["moe_layer_freq"] == 0
