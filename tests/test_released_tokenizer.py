"""A tokenizer of ranks and a Python file is read without running the file, and gives the same ids."""

import base64
import itertools
import json
import random
import re
from collections import Counter

import pytest

from kimi_graph.errors import CheckpointError
from kimi_graph.released_tokenizer import is_released, merges_of, read_code, released_tokenizer

# Splits as the released Kimi checkpoints do; class intersections are what engines of regular expressions differ in.
WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PIECES = (
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{WORD}*{LOWER}+{ENDING}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{WORD}+{LOWER}*{ENDING}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
CODE = """raise RuntimeError("this file is not to be run")
import tiktoken

class TikTokenTokenizer(PreTrainedTokenizer):
    special_tokens: Dict[str, int]
    num_reserved_special_tokens = 8
    pat_str = "|".join(
        [
PIECES
        ]
    )
"""
TEXTS = (
    "Hello, how are you?",
    "你好，世界！混合English文本。",
    "don't WE'RE I'll it's CAN'T",
    "20261130 tokens 1234567 42",
    "  spaced\ttabs\r\n\nand newlines  \n ",
    "naïve Ünïcode ßtraße καλημέρα こんにちは 안녕 🙂‍↔️",
    "a<|im_end|>b<|reserved_token_303|>",
    "aaaaaaaaaaaaa" + " " * 37 + "\n" * 9 + "0" * 11,
)


def trained(size, seed=0):
    """Tokens of a byte-pair encoding by their ranks, of bytes in an order of their own and of texts."""
    order = list(range(256))
    random.Random(seed).shuffle(order)
    ranks = {bytes([b]): i for i, b in enumerate(order)}
    words = Counter(re.findall(r"\s+|\w+|[^\s\w]+", " ".join(TEXTS) * 2 + "aa aaa aaaa    " * 5))
    parts = {word: [bytes([b]) for b in word.encode()] for word in words}
    while len(ranks) < size:
        pairs = Counter()
        for word, some in parts.items():
            for pair in itertools.pairwise(some):
                pairs[pair] += words[word]
        if not pairs:
            break
        (one, two), _ = pairs.most_common(1)[0]
        ranks.setdefault(one + two, len(ranks))
        for some in parts.values():
            i = 0
            while i < len(some) - 1:
                if (some[i], some[i + 1]) == (one, two):
                    some[i : i + 2] = [one + two]
                i += 1
    return ranks


def write(folder, ranks, code=None, **about):
    """A folder as it is released."""
    folder.mkdir(exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items())
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    pieces = ",\n".join(f'            r"""{piece}"""' for piece in PIECES)
    (folder / "tokenization_kimi.py").write_text(code or CODE.replace("PIECES", pieces))
    first = len(ranks)
    given = {
        "added_tokens_decoder": {
            str(first): {"content": "[BOS]", "special": True},
            str(first + 2): {"content": "<|im_end|>", "special": True},
            str(first + 3): {"content": "<|tool_call_begin|>", "special": False},
        },
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": {"content": "<|im_end|>"},
        "tokenizer_class": "TikTokenTokenizer",
        "model_max_length": 1000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(given | about))
    return folder


@pytest.fixture(scope="module")
def ranks():
    return trained(300)


def backend(folder):
    tokenizers = pytest.importorskip("tokenizers", reason="with transformers")
    return tokenizers.Tokenizer.from_str(json.dumps(released_tokenizer(folder)[0]))


@pytest.mark.parametrize("seed", range(3))
def test_ids_are_those_of_the_encoding_itself(tmp_path, seed):
    """Merged by rank, one by one, as the definition says."""
    ranks = trained(300, seed)
    tokenizer = backend(write(tmp_path, ranks))

    def merged(piece):
        parts = [bytes([b]) for b in piece]
        while True:
            found = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if piece in ranks or not found:
                return [ranks[piece]] if piece in ranks else [ranks[x] for x in parts]
            _, i = min(found)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]

    draw = random.Random(seed)
    for _ in range(300):
        word = "".join(draw.choice("aehlotn") for _ in range(draw.randint(1, 30)))  # one piece by the pattern
        assert tokenizer.encode(word).ids == merged(word.encode()), word


def test_special_tokens_have_their_ids_and_the_unnamed_are_reserved(tmp_path, ranks):
    made, about = released_tokenizer(write(tmp_path, ranks))
    first = len(ranks)
    texts = {entry["id"]: (entry["content"], entry["special"]) for entry in made["added_tokens"]}
    assert list(texts) == [*range(first, first + 8)]
    assert texts[first] == ("[BOS]", True)
    assert texts[first + 1] == (f"<|reserved_token_{first + 1}|>", True)
    assert texts[first + 3] == ("<|tool_call_begin|>", False)  # stays in the text of an answer, where parsers look
    assert about["eos_token"] == "<|im_end|>"
    assert about["model_max_length"] == 1000


def test_a_template_in_a_file_is_the_one(tmp_path, ranks):
    folder = write(tmp_path, ranks, chat_template="inside")
    assert released_tokenizer(folder)[1]["chat_template"] == "inside"
    (folder / "chat_template.jinja").write_text("beside")
    assert released_tokenizer(folder)[1]["chat_template"] == "beside"


def test_a_folder_with_a_tokenizer_json_is_not_of_this_kind(tmp_path, ranks):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not is_released(write(tmp_path, ranks))
    assert is_released(write(tmp_path / "k", ranks))


def test_every_pair_that_makes_a_token_is_a_merge():
    ranks = {b: i for i, b in enumerate([b"a", b"b", b"c", b"bc", b"ab", b"abc"])}
    assert merges_of(ranks) == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc"), (b"ab", b"c")]


@pytest.mark.parametrize(
    "code, found",
    [
        ('pat_str = r"a|b"\nnum_reserved_special_tokens = 3', ("a|b", 3)),
        ('class A:\n  pat_str: str = "|".join(("a", r"\\s"))\n  num_reserved_special_tokens: int = 3', (r"a|\s", 3)),
    ],
)
def test_literals_are_found_in_code(tmp_path, code, found):
    (tmp_path / "x.py").write_text(code)
    assert read_code(tmp_path / "x.py") == found


def damage(folder, name, text):
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda f: damage(f, "tokenization_kimi.py", "pat_str = make()\n"), "no pat_str that is a literal"),
        (lambda f: damage(f, "tokenization_kimi.py", "pat_str = 'a'\n"), "no num_reserved_special_tokens"),
        (lambda f: damage(f, "tokenization_kimi.py", "pat_str = ("), "no Python that can be read"),
        (lambda f: (f / "tokenization_kimi.py").unlink(), "tokenization_kimi.py: no such file"),
        (lambda f: (f / "tokenizer_config.json").unlink(), "tokenizer_config.json: cannot be read"),
        (lambda f: damage(f, "tokenizer_config.json", "[]"), "tokenizer_config.json"),
        (lambda f: damage(f, "tokenizer_config.json", "{}"), "auto_map.AutoTokenizer is None"),
        (lambda f: damage(f, "tiktoken.model", "YQ== 0\n"), "byte 0 is no token"),
        (lambda f: damage(f, "tiktoken.model", "YQ== 1\n"), "tiktoken.model:1: rank 1; expected 0"),
        (lambda f: damage(f, "tiktoken.model", "YQ== 0\nYQ== 1\n"), "tiktoken.model:2: rank 1; expected 1, of a token"),
        (lambda f: damage(f, "tiktoken.model", "a b c\n"), "tiktoken.model:1: found 'a b c'"),
        (lambda f: (f / "tiktoken.model").write_bytes(b"\xff\xfe"), "no text in UTF-8, at byte 0"),
    ],
)
def test_a_file_that_is_not_of_this_kind_is_named(tmp_path, ranks, spoil, words):
    folder = write(tmp_path, ranks)
    spoil(folder)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        released_tokenizer(folder)


@pytest.mark.parametrize(
    "about, words",
    [
        ({"added_tokens_decoder": {"x": {}}}, "expected an object of tokens by their ids"),
        ({"added_tokens_decoder": {"3": {"content": "a"}}}, "id 3 is one of"),
        ({"added_tokens_decoder": {"300": {"content": 5}}}, "expected a text"),
        ({"auto_map": {"AutoTokenizer": "../x.Y"}}, "expected FILE.CLASS"),
        ({"auto_map": []}, "expected FILE.CLASS"),
        ({"eos_token": 3}, "expected a text"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(tmp_path, ranks, about, words):
    with pytest.raises(CheckpointError, match=re.escape(words)):
        released_tokenizer(write(tmp_path, ranks, **about))
