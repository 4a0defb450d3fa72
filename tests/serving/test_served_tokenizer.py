# pyright: reportMissingImports=false
"""A checkpoint whose tokenizer comes as ranks and code is served as one with a tokenizer.json; no code of it is run."""

import json
import random
import shutil

import pytest

from kimi_graph.errors import CheckpointError
from kimi_graph.parallel import Mesh
from kimi_graph.released_tokenizer import released_tokenizer
from kimi_graph.serving.launch import Launch
from kimi_graph.tokenizer import BYTES
from tests.serving.served import ask, engine
from tests.test_released_tokenizer import PIECES, TEXTS, backend, trained, write

RANKS = {bytes([b]): b for b in range(BYTES)}


def as_released(folder, out, *, template=True):
    """The same checkpoint with its tokenizer as released ones have it."""
    about = json.loads((folder / "tokenizer_config.json").read_text())
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    named = {str(x["id"]): {"content": x["content"], "special": x["special"]} for x in added}
    chat = about.pop("chat_template")
    write(out, RANKS, **about | {"added_tokens_decoder": named, "tokenizer_class": "TikTokenTokenizer"})
    if template:
        (out / "chat_template.jinja").write_text(chat)
    for path in folder.iterdir():
        if "token" not in path.name:
            shutil.copy(path, out)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "configuration_kimi.KimiConfig", "AutoModelForCausalLM": "modeling_kimi.KimiModel"}
    (out / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    return out


@pytest.fixture(autouse=True)
def _an_engine(monkeypatch):
    monkeypatch.setattr("kimi_graph.serving.launch.check_engine", lambda: None)


def launch(folder, **changes):
    given = {"folder": folder, "name": "k", "host": "127.0.0.1", "port": 8123, "max_len": 512, "mesh": Mesh()}
    return Launch(**given | changes)


def mode(command):
    return command[command.index("--tokenizer-mode") + 1] if "--tokenizer-mode" in command else None


def test_a_server_is_told_to_read_the_tokenizer_as_data_and_runs_code_only_when_asked(tiny, tmp_path):
    assert mode(launch(tiny).command) is None
    released = as_released(tiny, tmp_path / "released")
    assert mode(launch(released).command) == "kimi_graph"
    assert "--trust-remote-code" not in launch(released).command
    launch(released).check_here()
    trusting = launch(released, trusted=True).command
    assert "--trust-remote-code" in trusting
    assert mode(trusting) is None


def test_a_checkpoint_that_nothing_can_write_chats_of_is_said_to_be(tiny, tmp_path):
    released = as_released(tiny, tmp_path / "released", template=False)
    assert launch(tiny).note is None
    assert launch(as_released(tiny, tmp_path / "another")).note is None
    assert "requests for chats are refused" in (launch(released).note or "")


def test_what_a_server_would_end_of_is_refused_before_it_starts(tiny, tmp_path):
    released = as_released(tiny, tmp_path / "released")
    (released / "tokenization_kimi.py").write_text("pat_str = made()\n")
    with pytest.raises(CheckpointError, match="--trust-remote-code runs the checkpoint's own code"):
        launch(released).check_here()
    launch(released, trusted=True).check_here()
    (released / "tiktoken.model").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json and no tiktoken\.model"):
        launch(released).check_here()
    weights = next(p for p in released.iterdir() if p.suffix == ".safetensors")
    weights.unlink()
    with pytest.raises(CheckpointError):
        launch(released, trusted=True).check_here()


@pytest.mark.serving
def test_ids_are_those_of_the_engine_that_the_pattern_is_written_for(tmp_path):
    import tiktoken

    ranks = trained(300)
    folder = write(tmp_path, ranks)
    special = {entry["content"]: entry["id"] for entry in released_tokenizer(folder)[0]["added_tokens"]}
    judge = tiktoken.Encoding("kimi", pat_str="|".join(PIECES), mergeable_ranks=ranks, special_tokens=special)
    tokenizer = backend(folder)
    draw = random.Random(1)
    letters = "aAzZ  \t\n\r.,'é中文字アЖ09५🙂‍s"
    made_up = ("".join(draw.choice(letters) for _ in range(draw.randint(1, 40))) for _ in range(2000))
    for text in (*TEXTS, *made_up):
        assert tokenizer.encode(text).ids == judge.encode(text, allowed_special="all"), text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.serving
@pytest.mark.filterwarnings("default")
def test_texts_and_chats_are_read_and_written_as_with_a_tokenizer_json(folder, tmp_path):
    from vllm import SamplingParams

    plain = folder("kimi-linear-48b")
    said = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}

    def answers(path, **options):
        with engine(path, **options) as llm:
            texts = llm.generate(["héllo 中文", "2026 don't<|im_end|>"], SamplingParams(**said), use_tqdm=False)
            chats = llm.chat([[{"role": "user", "content": "hello"}]], SamplingParams(**said), use_tqdm=False)
            assert ask(llm, [[7] * 9])[0].tokens
            return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].text) for o in (*texts, *chats)]

    assert answers(as_released(plain, tmp_path / "released"), tokenizer_mode="kimi_graph") == answers(plain)
