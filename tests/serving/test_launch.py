"""The command that starts a server, and what it refuses; with vLLM, the server and its client."""

import base64
import contextlib
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from pathlib import Path

import pytest
from packaging.version import Version

from kimi_graph.errors import KimiGraphError
from kimi_graph.parallel import Mesh
from kimi_graph.serving import launch as launching
from kimi_graph.serving.launch import Launch, cores_of_ranks
from kimi_graph.serving.tiers.plan import Tiers
from tests.serving.served import SETTINGS, Output, differ_at_a_tie


def launch(folder, **changes):
    given = {"folder": folder, "name": "tiny", "host": "127.0.0.1", "port": 8123, "max_len": 512, "mesh": Mesh()}
    return Launch(**given | changes)


def cli(*words):
    own = {name: value for name, value in os.environ.items() if name not in (*SETTINGS, "HF_HUB_OFFLINE")}
    return subprocess.run(
        [sys.executable, "-m", "kimi_graph", *map(str, words)], capture_output=True, text=True, env=own
    )


def test_a_dry_run_prints_the_servers_command_and_needs_no_engine(tiny):
    done = cli("serve", tiny, "--mesh", "pp=2,tp=2", "--max-len", 512, "--port", 8123, "--dry-run")
    assert done.returncode == 0, done.stderr
    given, _, words = done.stdout.partition(f"{sys.executable} ")
    assert given.startswith("env HF_HUB_OFFLINE=1 ")  # what is printed is what is run
    assert "VLLM_CPU_OMP_THREADS_BIND=" in given
    words = words.split()
    assert words[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--pipeline-parallel-size") + 1] == "2"
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[words.index("--max-model-len") + 1] == "512"
    assert words[words.index("--block-size") + 1] == "128"  # else no memory is kept where pages grow to its size
    assert "--trust-remote-code" not in words
    said = cli("serve", tiny, "--mesh", "pp=2,tp=2", "--max-len", 512, "--port", 8123, "--dry-run", "--json")
    found = json.loads(said.stdout)
    assert found["command"][1:] == words
    assert found["environment"].keys() == {x.partition("=")[0] for x in shlex.split(given)[1:]}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"max_len": 0}, "nearest 1"),
        ({"max_len": 10**9}, "nearest 1,048,576"),
        ({"port": 70000}, "1 to 65535; nearest 65535"),
        ({"name": ""}, "--name ''"),
        ({"host": " "}, "--host ' '"),
        ({"tool_parser": ""}, "--tool-parser ''"),
        ({"mesh": Mesh(pipe=2, data=2, tensor=2)}, "nearest pp=2,tp=2"),
        ({"mesh": Mesh(tensor=2, experts=1)}, "nearest tp=2"),
        ({"mesh": Mesh(tensor=3)}, "nearest tp at which everything divides, nothing padded: 2"),
        ({"mesh": Mesh(pipe=100)}, "nearest 5"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(tiny, changes, words):
    with pytest.raises(KimiGraphError, match=words):
        launch(tiny, **changes)


def test_other_flags_of_the_engine_are_handed_on_but_not_those_that_are_given_already(tiny):
    done = cli("serve", tiny, "--max-len", 512, "--dry-run", "--", "--max-num-seqs", 64, "--seed=3")
    assert done.stdout.split()[-3:] == ["--max-num-seqs", "64", "--seed=3"], done.stderr
    for flags, words in {
        ("another",): "found another behind MODEL",
        ("--max-model-len=9",): "-- --max-model-len: say --max-len, before --",
        ("--seed", "3", "--block-size", "64"): "-- --block-size: serve gives it to the engine itself",
    }.items():
        with pytest.raises(KimiGraphError, match=words):
            launch(tiny, flags=flags)


@pytest.mark.parametrize(
    "cores, ranks, words", [(range(4), 2, "0,1|2,3"), (range(2), 2, "0|1"), (range(2), 4, "0|1|0|1"), ([3], 1, "3")]
)
def test_every_rank_of_a_cpu_has_cores(cores, ranks, words):
    assert cores_of_ranks(cores, ranks) == words


def test_a_folder_that_is_none_or_a_bundle_is_refused(tmp_path):
    with pytest.raises(KimiGraphError, match="no folder"):
        launch(tmp_path / "nothing")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(KimiGraphError, match="a bundle"):
        launch(tmp_path)


def test_a_port_that_is_in_use_is_refused_with_one_that_is_free(tiny, monkeypatch):
    monkeypatch.setattr(launching, "check_engine", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(KimiGraphError, match=rf"--port {port}: something listens there already .* \d+ is free"):
            launch(tiny, port=port).check_here()
    launch(tiny, port=port).check_here()
    with pytest.raises(KimiGraphError, match=r"--host 999\.1\.1\.1"):
        launch(tiny, host="999.1.1.1").check_here()


def test_a_tier_that_has_no_room_here_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "check_engine", lambda: None)
    with pytest.raises(KimiGraphError, match="/dev/shm has"):
        launch(tiny, tiers=Tiers.parse("host=100TB")).check_here()
    (tmp_path / "file").touch()
    with pytest.raises(KimiGraphError, match="pages: Not a directory; choose another place"):
        launch(tiny, tiers=Tiers.parse(f"host=1MB,file={tmp_path / 'file' / 'pages'}")).check_here()


def test_what_the_user_has_set_is_left_and_not_said_again(tiny):
    assert launch(tiny).variables({}).keys() == {"HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_MEDIA_CONNECTOR"}
    assert "HF_HUB_OFFLINE" not in launch(tiny).variables({"HF_HUB_OFFLINE": "0"})
    assert launch(tiny, quiet=True).variables({})["VLLM_LOGGING_LEVEL"] == "ERROR"


def test_the_checkpoint_is_named_the_same_from_everywhere(tiny, monkeypatch):
    """The engine marks the files of tiers with the path that it is given."""
    monkeypatch.chdir(tiny.parent)
    command = launch(Path(tiny.name)).command
    assert command[command.index("--model") + 1] == str(tiny.resolve())


def test_the_longest_sequence_is_what_the_cache_has_room_for_unless_it_is_said(tiny):
    command = launch(tiny, max_len=None, cache=10**9).command
    assert command[command.index("--max-model-len") + 1] == "auto"
    assert command[command.index("--kv-cache-memory-bytes") + 1] == "1000000000"


def test_a_path_that_is_no_folder_is_said_to_be_what_it_is(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(KimiGraphError, match=r"config\.json: a file"):
        launch(tmp_path / "config.json")
    with pytest.raises(KimiGraphError, match="kimi-graph fixture kimi-k3 -o DIR"):
        launch(Path("kimi-k3"))


def test_without_the_engine_one_line_says_how_to_install_it(tiny, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KimiGraphError, match=r"pip install -e '\.\[serve\]'"), launch(tiny).started({}):
        pass


# ---- the server ------------------------------------------------------------------------------------------------------

PORT = 18123


@contextlib.contextmanager
def running(folder, port, **environment):
    """`kimi-graph serve`: its process, and its first and last lines."""
    words = [sys.executable, "-m", "kimi_graph", "serve", str(folder), "--name", "k31"]
    own = {name: value for name, value in os.environ.items() if name not in SETTINGS and name != "OMP_NUM_THREADS"}
    words += ["--max-len", "512", "--port", str(port), "--tool-parser", "hermes"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=own | environment)
    assert process.stdout is not None
    command = process.stdout.readline()
    while (line := process.stdout.readline()) and "answers on" not in line:
        pass
    assert line, "the server ended"
    rest = threading.Thread(target=process.stdout.read)  # a full pipe would stop the server
    rest.start()
    yield process, command, line
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    rest.join()
    process.stdout.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)


@pytest.fixture(scope="module")
def server(folder):
    """Of a model with pictures."""
    with running(folder("kimi-k3.1-pro"), PORT) as found:
        yield found


def client_of(port):
    import openai

    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture
def client(server):
    with client_of(PORT) as client:
        yield client


def said(client, content, **options):
    options = {"max_tokens": 6, "temperature": 0, **options}
    return client.chat.completions.create(model="k31", messages=[{"role": "user", "content": content}], **options)


def as_output(places):
    """Words stand for tokens."""
    top = [{x.token: x.logprob for x in (place, *place.top_logprobs)} for place in places]
    return Output([place.token for place in places], 0, top)


def healthy():
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=30) as answer:
        return answer.status == 200


def picture(width, height, shade):
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 255 - shade, 90)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def bomb():
    """A PNG of 60,000 x 60,000 pixels in a few bytes: its header alone is believed."""

    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    size = (60_000).to_bytes(4, "big")
    parts = (
        chunk(b"IHDR", size + size + bytes([8, 2, 0, 0, 0])) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "enum": ["north", "south"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.serving
@pytest.mark.filterwarnings("default")
class TestServer:
    def test_the_last_line_says_where_it_answers(self, server):
        _, command, line = server
        assert "vllm.entrypoints.openai.api_server" in command
        assert line.startswith(f"k31 answers on http://127.0.0.1:{PORT}/v1 after ")

    def test_chat_completions_and_streams_give_one_answer(self, client):
        whole = said(client, "hello").choices[0].message.content
        stream = said(client, "hello", stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == whole
        assert client.completions.create(model="k31", prompt="one two", max_tokens=4).usage.completion_tokens <= 4

    def test_a_picture_repeats_its_answer(self, client):
        def asked(url):
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
            return said(client, content, logprobs=True, top_logprobs=1).choices[0].logprobs.content

        first, again, other = asked(picture(90, 60, 10)), asked(picture(90, 60, 10)), asked(picture(90, 60, 240))
        assert [x.token for x in first] == [x.token for x in again]
        assert [x.logprob for x in first] != [x.logprob for x in other]

    @pytest.mark.parametrize(
        "change, status",
        [
            ({"content": "word " * 400}, 400),
            ({"max_tokens": 100_000}, 400),
            ({"temperature": "hot"}, 400),
            ({"temperature": -1}, 400),
            ({"model": "another"}, 404),
            ({"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}]}, 400),
            ({"content": [{"type": "image_url", "image_url": {"url": bomb()}}]}, 400),
            ({"content": [{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}]}, 400),
            ({"content": {"no": "list"}}, 400),
            ({"tools": [{"type": "function"}]}, 400),
            ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "another"}}}, 400),
            ({"extra_body": {"top_logprobs": 1000, "logprobs": True}}, 400),
        ],
        ids=[
            *("too long", "too many tokens", "wrong type", "out of range", "unknown model", "no picture", "image bomb"),
            *("a file", "no content", "no tool", "unknown tool", "too many logprobs"),
        ],
    )
    def test_a_bad_request_gets_its_status_and_the_next_is_served(self, client, change, status):
        import openai

        change = dict(change)
        content, model = change.pop("content", "hello"), change.pop("model", "k31")
        given = {"max_tokens": 4, **change}
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": content}], **given)
        assert caught.value.status_code == status, caught.value
        assert healthy()
        assert said(client, "hello").usage.completion_tokens

    def test_a_prompt_may_be_as_long_as_the_limit_leaves_room_for_and_no_longer(self, client):
        """An answer to a prompt of ids ends at the limit, whatever was asked for; 0.27 refuses to be asked for more."""

        def asked(length, count):
            return client.completions.create(model="k31", prompt=[7] * length, max_tokens=count, temperature=0)

        import openai
        from vllm import __version__

        refused = [(512, 1), (513, 1)]
        if Version(__version__) < Version("0.28"):
            refused.append((511, 2))
        else:
            assert asked(511, 2).usage.total_tokens == 512
        for length, count in refused:
            with pytest.raises(openai.BadRequestError):
                asked(length, count)
        assert asked(511, 1).usage.total_tokens == 512

    def test_a_tool_is_called_with_arguments_of_its_schema(self, client):
        blanks = {str(ord(x)): -100 for x in "\t\n\r "}  # a model of random weights would write them without end
        named = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
        named |= {"logit_bias": blanks}
        one, other = (said(client, "weather?", max_tokens=120, **named).choices[0].message for _ in range(2))
        (call,) = one.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["place"] in ("north", "south")
        assert [x.function.arguments for x in other.tool_calls] == [call.function.arguments]

    def test_the_results_of_a_call_are_read_by_the_models_template(self, client):
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "north"}'}}

        def asked(result):
            messages = [
                {"role": "user", "content": "weather?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": result},
            ]
            options = {"max_tokens": 4, "temperature": 0, "logprobs": True, "tools": [WEATHER], "tool_choice": "none"}
            answer = client.chat.completions.create(model="k31", messages=messages, **options)
            return [place.logprob for place in answer.choices[0].logprobs.content]

        assert asked("cold") == asked("cold")
        assert asked("cold") != asked("warm")

    def test_where_the_worker_runs_changes_no_answer(self, client, folder):
        """One thread, no cores of its own and no process of its own, as tests in one process have it."""
        others = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

        def answers(api):
            asked = ("hello", "hello", "word " * 50, "word " * 80, "word " * 80)  # within a page and over its end
            given = (said(api, words, logprobs=True, top_logprobs=2).choices[0].logprobs.content for words in asked)
            return [as_output(places) for places in given]

        with running(folder("kimi-k3.1-pro"), PORT + 1, **others), client_of(PORT + 1) as other:
            for one, again in zip(answers(client), answers(other), strict=True):
                assert differ_at_a_tie(one, again, 2 * 2**-5), (one, again)

    def test_a_stream_that_is_left_leaves_the_server_well(self, client):
        stream = said(client, "hello", stream=True, max_tokens=300)
        next(iter(stream))
        stream.close()
        time.sleep(0.5)
        assert healthy()
        assert said(client, "hello").usage.completion_tokens
