"""A byte-level tokenizer for fixtures, in the files that `transformers` and serving engines read.

Id b is byte b; the ids from 256 on are special tokens, those of chats first, the rest reserved, so that every id a
model can produce decodes.
"""

from typing import Any

from .config import ModelConfig

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BYTES = 256
CHAT = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")  # ids in a row; the last: a picture

# user and assistant have a token of their own, every other role is named behind the system token.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = message['role'] -%}
{{ '<|im_' + (role if role in ('user', 'assistant') else 'system') + '|>' + role + '<|im_middle|>' }}
{{- message['content'] + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_assistant|>assistant<|im_middle|>' }}
{%- endif -%}
"""


def special_tokens(config: ModelConfig) -> dict[int, str]:
    """Text of every id from 256 to the end of the vocabulary."""
    texts = {config.eos[0]: "<|im_end|>"}
    for i, at in enumerate(config.eos[1:], 2):
        texts.setdefault(at, f"<|end_{i}|>")
    if config.bos is not None:
        texts.setdefault(config.bos, "[BOS]")
    texts.setdefault(config.pad, "[PAD]")
    if config.vision is not None:
        texts |= {config.vision.placeholder - 3 + i: text for i, text in enumerate(MEDIA)}
    chat = iter(CHAT)
    for at in range(BYTES, config.vocab):
        if at not in texts:
            texts[at] = next(chat, f"<|reserved_token_{at}|>")
    return dict(sorted(texts.items()))


def byte_letters() -> list[str]:
    """The letter that stands for each byte: itself if it prints, else the next from U+0100 on (as GPT-2 has it)."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    rest = iter(range(0x100, 0x200))
    return [chr(b if b in printed else next(rest)) for b in range(BYTES)]


def byte_level(
    added: list[dict[str, Any]],
    vocabulary: dict[str, int],
    merges: list[list[str]] | None = None,
    pattern: str | None = None,
) -> dict[str, Any]:
    """Contents of tokenizer.json for a byte-pair encoding of letters that stand for bytes.

    Args:
        added: special tokens, as the file has them.
        vocabulary: ids of the other tokens.
        merges: pairs of tokens that make one, first merged first. With some, a piece of text that is a token is that
            token, however its parts would merge.
        pattern: by which text is cut into pieces before; None: it is one piece.
    """
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level if pattern is None else {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": bool(merges),
            "vocab": vocabulary,
            "merges": merges or [],
        },
    }


def chat_tokenizer(config: ModelConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Contents of tokenizer.json and tokenizer_config.json, for a vocabulary of 256 bytes and then special tokens."""
    special = special_tokens(config)
    assert len(special) >= len(CHAT) + 1 and min(special) >= BYTES, special
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": at, "content": text, **flags} for at, text in special.items()]
    tokenizer = byte_level(added, {letter: b for b, letter in enumerate(byte_letters())})
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_len,
        **({} if config.bos is None else {"bos_token": special[config.bos]}),
        "eos_token": special[config.eos[0]],
        "pad_token": special[config.pad],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return tokenizer, about
