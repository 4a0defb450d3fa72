# pyright: reportMissingImports=false
"""The tokenizer and chats of a checkpoint in an engine: read as data, or by the checkpoint's code where that is asked.

Nothing here imports the engine before it asks for a tokenizer.
"""

import json
import re
from pathlib import Path
from typing import Any

from kimi_graph.errors import CheckpointError
from kimi_graph.read_config import read_json
from kimi_graph.released_tokenizer import MOST_CONFIG, RANKS, TEMPLATE, is_released, released_tokenizer
from kimi_graph.tokenizer import TOKENIZER, TOKENIZER_CONFIG

GENERATION = "generation_config.json"
MODE = "kimi_graph"  # of the engine's tokenizers
# Families whose chats the engine writes itself, where a checkpoint has no template. K3's by the checkpoint's code.
RENDERERS = {"deepseek_v32": "deepseek_v32"}
RENDERERS_BY_CODE = {"kimi_k3": "kimi_k3"}


def tokenizer_flags(folder: Path, model_type: str, *, trusted: bool) -> list[str]:
    """What a server is told of a checkpoint's tokenizer.

    Args:
        model_type: of its config.json.
        trusted: whether the checkpoint's code may run.
    """
    renderers = {**RENDERERS, **(RENDERERS_BY_CODE if trusted else {})}
    own = ["--trust-remote-code"] if trusted else []
    if not has_template(folder) and model_type in renderers:
        return [*own, "--tokenizer-mode", renderers[model_type]]
    return own if trusted or not is_released(folder) else ["--tokenizer-mode", MODE]


def check_tokenizer(folder: Path, *, trusted: bool) -> None:
    """Refuse a checkpoint whose tokenizer a server could not read, before it starts.

    Raises:
        CheckpointError: it has none, or one that only its code can read.
    """
    if trusted:
        return
    if (folder / TOKENIZER).exists():
        from tokenizers import Tokenizer  # comes with the engine

        try:
            Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # it raises that and no other
            why = re.sub(r" \(os error \d+\)", "", str(error))
            raise CheckpointError(f"{folder / TOKENIZER}: no tokenizer that can be read ({why}).") from None
        return
    if not is_released(folder):
        raise CheckpointError(f"{folder}: no {TOKENIZER} and no {RANKS}; the server needs the checkpoint's tokenizer.")
    try:
        released_tokenizer(folder)
    except CheckpointError as e:
        raise CheckpointError(f"{e} --trust-remote-code runs the checkpoint's own code instead.") from None


def chat_note(folder: Path, model_type: str, *, trusted: bool) -> str | None:
    """What to say of a checkpoint whose chats nothing writes; None: something does."""
    flags = tokenizer_flags(folder, model_type, trusted=trusted)
    if has_template(folder) or {*RENDERERS.values(), *RENDERERS_BY_CODE.values()} & {*flags}:
        return None
    how = "; --trust-remote-code lets its code write them" if model_type in RENDERERS_BY_CODE else ""
    return f"{folder} has no chat template: requests for chats are refused, completions are answered{how}."


def check_generation(folder: Path) -> None:
    """Refuse a generation_config.json that is none; a checkpoint may lack it.

    Raises:
        CheckpointError: see `read_json`.
    """
    if (folder / GENERATION).exists():
        read_json(folder / GENERATION, MOST_CONFIG, CheckpointError)


def has_template(folder: Path) -> bool:
    """Whether a checkpoint says as data how a chat is written."""
    path = folder / TOKENIZER_CONFIG
    if (folder / TEMPLATE).is_file() or not path.is_file():
        return (folder / TEMPLATE).is_file()
    return read_json(path, MOST_CONFIG, CheckpointError).get("chat_template") is not None


class ReleasedTokenizer:
    """What the engine makes a tokenizer with, in the mode of this name."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, *args: Any, truncation_side: str = "left", **kwargs: Any) -> Any:
        """Of a checkpoint's folder.

        Raises:
            CheckpointError: see `released_tokenizer`.
        """
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast
        from vllm.tokenizers.hf import get_cached_tokenizer

        made, about = released_tokenizer(Path(folder))
        backend = Tokenizer.from_str(json.dumps(made))
        return get_cached_tokenizer(
            PreTrainedTokenizerFast(tokenizer_object=backend, truncation_side=truncation_side, **about)
        )
