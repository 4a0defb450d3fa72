"""The tokenizer of a released Kimi checkpoint, read as data: no code of the checkpoint is run.

Such a folder has no tokenizer.json. It has the tokens of a byte-pair encoding in `tiktoken.model`, one a line with its
rank, the special ones in tokenizer_config.json, and a Python file that a caller would have to trust. What is needed of
that file are two literals: the pattern by which text is split before tokens are merged, and how many ids are reserved.
They are found in its syntax tree.
"""

import ast
import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .read_config import read_json
from .tokenizer import BYTES, TOKENIZER, TOKENIZER_CONFIG, byte_letters, byte_level

RANKS, TEMPLATE = "tiktoken.model", "chat_template.jinja"
PATTERN, RESERVED = "pat_str", "num_reserved_special_tokens"  # names in the checkpoint's Python
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MOST_CONFIG = 16 << 20  # bytes of tokenizer_config.json
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def is_released(folder: Path) -> bool:
    """Whether a folder has its tokenizer as tokens and ranks, and not as tokenizer.json."""
    return (folder / RANKS).is_file() and not (folder / TOKENIZER).is_file()


def released_tokenizer(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Contents of tokenizer.json and tokenizer_config.json that say what the checkpoint's files say.

    Text splits as its pattern does and merges by rank. Ids from the end of the ranks on are special tokens; those that
    have no name are `<|reserved_token_ID|>`.

    Raises:
        CheckpointError: a file is missing or is not of this kind; the message names it and the place in it.
    """
    ranks = read_ranks(folder / RANKS)
    about = read_json(folder / TOKENIZER_CONFIG, MOST_CONFIG, CheckpointError)
    pattern, reserved = read_code(folder / _code_file(folder, about))
    added = list(_added(about, len(ranks), reserved))
    letters = byte_letters()
    vocabulary = {_as_letters(token, letters): rank for token, rank in ranks.items()}
    merges = [[_as_letters(x, letters) for x in pair] for pair in merges_of(ranks)]
    made = byte_level(added, vocabulary, merges, pattern)
    texts = {name: _text(about[name]) for name in NAMED if about.get(name) is not None}
    kept = {name: about[name] for name in ("model_max_length", "chat_template") if about.get(name) is not None}
    if (folder / TEMPLATE).is_file():
        kept["chat_template"] = _read_text(folder / TEMPLATE)
    return made, {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **texts, **kept}


# ---- tokens and merges -----------------------------------------------------------------------------------------------


def read_ranks(path: Path) -> dict[bytes, int]:
    """The tokens of a file with their ranks, which are their ids.

    Raises:
        CheckpointError: no such file; a line that is not a token in base64 and its rank; ranks that are not 0, 1, ..;
            a byte that is no token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        where = f"{path}:{number}"
        try:
            token, rank = line.split()
            read = base64.b64decode(token, validate=True), int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(f"{where}: found {line[:60]!r}; expected a token in base64 and its rank.") from None
        if read[1] != len(ranks) or read[0] in ranks:
            raise CheckpointError(f"{where}: rank {read[1]:,}; expected {len(ranks):,}, of a token that is new.")
        ranks[read[0]] = read[1]
    lacking = [b for b in range(BYTES) if bytes([b]) not in ranks]
    if lacking:
        raise CheckpointError(
            f"{path}: byte {lacking[0]} is no token; expected all {BYTES}, so that all text has some."
        )
    return ranks


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Pairs of tokens that make a token, in the order of its rank: what is merged first.

    Every pair is one, since any two neighbours whose bytes are a token merge in this encoding, however they came about.
    """
    pairs = []
    for token in ranks:
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs += sorted((p for p in cuts if p[0] in ranks and p[1] in ranks), key=lambda p: (ranks[p[0]], ranks[p[1]]))
    return pairs  # ranks are in order in the file


def _as_letters(token: bytes, letters: list[str]) -> str:
    return "".join(letters[b] for b in token)


def _added(about: dict[str, Any], first: int, reserved: int) -> Iterator[dict[str, Any]]:
    """The special tokens, with those that have no name."""
    named = about.get("added_tokens_decoder", {})
    if not isinstance(named, dict) or not all(x.isdecimal() and isinstance(named[x], dict) for x in named):
        raise CheckpointError(f"{TOKENIZER_CONFIG}: added_tokens_decoder; expected an object of tokens by their ids.")
    entries = {int(at): entry for at, entry in named.items()}
    if entries and min(entries) < first:
        raise CheckpointError(
            f"{TOKENIZER_CONFIG}: added_tokens_decoder: id {min(entries):,} is one of {RANKS}; expected {first:,} on."
        )
    plain = dict.fromkeys(FLAGS, False) | {"special": True}
    for at in range(first, max([first + reserved, *(x + 1 for x in entries)])):
        entry = entries.get(at, {"content": f"<|reserved_token_{at}|>"})
        yield {"id": at, "content": _text(entry), **{flag: entry.get(flag, plain[flag]) for flag in FLAGS}}


def _text(entry: Any) -> str:
    """A token's text, which is written as it is or in an object."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise CheckpointError(f"{TOKENIZER_CONFIG}: a token {entry!r}; expected a text, or an object with its content.")
    return text


# ---- the checkpoint's Python, as text --------------------------------------------------------------------------------


def read_code(path: Path) -> tuple[str, int]:
    """The pattern by which text splits and the number of ids that are reserved, of literals in a Python file.

    Raises:
        CheckpointError: no such file, or not the two literals.
    """
    try:
        code = ast.parse(_read_text(path))
    except (SyntaxError, ValueError) as e:
        raise CheckpointError(f"{path}: no Python that can be read: {e}.") from None
    found = {
        target.id: node.value
        for node in ast.walk(code)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id in (PATTERN, RESERVED)
    }
    pattern, reserved = (_literal(found.get(name)) for name in (PATTERN, RESERVED))
    for name, kind, value in ((PATTERN, str, pattern), (RESERVED, int, reserved)):
        if not isinstance(value, kind):
            raise CheckpointError(f"{path}: found no {name} that is a literal; it is read as text and is not run.")
    return pattern, reserved


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal, or of literals that a literal joins; None: it is none."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Call(
            func=ast.Attribute(value=between, attr="join"), args=[ast.List(elts=parts) | ast.Tuple(elts=parts)]
        ):
            texts = [_literal(x) for x in (between, *parts)]
            return texts[0].join(texts[1:]) if all(isinstance(x, str) for x in texts) else None
    return None


def _code_file(folder: Path, about: dict[str, Any]) -> str:
    """Name of the Python file that the config says the tokenizer is in."""
    said = (about.get("auto_map") or {}).get("AutoTokenizer")
    first = said[0] if isinstance(said, list) and said else said
    if not isinstance(first, str) or "." not in first or "/" in first:
        raise CheckpointError(
            f"{folder / TOKENIZER_CONFIG}: auto_map.AutoTokenizer is {said!r}; expected FILE.CLASS, as {RANKS} has its "
            f"pattern in that file."
        )
    return first.rpartition(".")[0].rpartition("--")[2] + ".py"


# ---- files -----------------------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; the tokenizer needs it beside {RANKS}.") from None
    except UnicodeDecodeError as e:
        raise CheckpointError(f"{path}: no text in UTF-8, at byte {e.start:,}.") from None
