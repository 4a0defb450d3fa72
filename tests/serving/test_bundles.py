"""A bundle's graphs fit an engine or are refused, and calls of them are a step. Needs no engine."""

import dataclasses
import itertools
import json
import math
import os
import shutil
from copy import deepcopy
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from typer.testing import CliRunner

import kimi_graph as kg
from kimi_graph.cli import app
from kimi_graph.compile import torchair_host
from kimi_graph.compile.buckets import Gear
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.executor.lockstep import run_together
from kimi_graph.compile.targets import target
from kimi_graph.compile.verify_ranks import whole_result
from kimi_graph.errors import BundleError, ConfigError
from kimi_graph.fixture import make_fixture
from kimi_graph.parallel import Mesh
from kimi_graph.serving.bundle_calls import calls_of, inputs_of, is_picture, picture_inputs_of
from kimi_graph.serving.bundle_runners import Seat, runner_for
from kimi_graph.serving.bundles import Choice, Graphs, graphs_for
from kimi_graph.serving.rows import rows_of
from kimi_graph.vision import VisionInput

PAGE, PAGES = 480, 5  # what two KDA layers need in bfloat16; slots as many as pages
HALF = 240  # what they need where each rank has half of the heads

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Three layers: KDA and dense, KDA and MoE, MLA and MoE. Read only."""
    config = kg.load_config("kimi-linear-48b")
    return make_fixture(config, tmp_path_factory.mktemp("of") / "small", layers=3, ways=2).folder


def bundle_of(checkpoint, out, page, **sizes):
    """2 rows, sequences of two pages."""
    compile_model(
        kg.load_config(checkpoint), target=target("a3"), out=out, checkpoint=checkpoint, batch=2, max_len=2 * page,
        page=page, pages=PAGES, slots=PAGES, cache_dir=torchair_host.default_cache(os.environ), **sizes,
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    """Its bundle: chunks of 240, pages of 480. Read only."""
    return bundle_of(checkpoint, tmp_path_factory.mktemp("bundles") / "small", PAGE, chunk=240)


@pytest.fixture(scope="module")
def shared(checkpoint, tmp_path_factory):
    """A bundle of two stages of two tensor ranks: KDA layers on the first, MLA on the second. Read only."""
    mesh = Mesh(pipe=2, tensor=2)
    return bundle_of(checkpoint, tmp_path_factory.mktemp("bundles") / "shared", HALF, chunk=HALF // 2, mesh=mesh)


@pytest.fixture(scope="module")
def graphs(folder, checkpoint):
    return Graphs.open(Choice(bundle=folder), checkpoint)


# ---- calls -----------------------------------------------------------------------------------------------------------

REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=9)
SMALL = {"prefill": [Gear("prefill", 3, 7, ("p",))], "decode": [Gear("decode", 2, 1, ("d",))]}


def step(requests):
    counts = [count for count, _ in requests]
    return [0, *itertools.accumulate(counts)], [count + before for count, before in requests]


@given(REQUESTS, st.booleans())
def test_every_token_is_in_one_call_after_those_before_it(requests, shared):
    starts, lengths = step(requests)
    seen = []
    reached = [before for _, before in requests]
    for rows in rows_of(starts, lengths, shared=shared):
        for call in calls_of(rows, SMALL, shared=shared):
            assert len(call.requests) <= call.gear.rows and len(set(call.requests.tolist())) == len(call.requests)
            for request, at, before, count in zip(call.requests, call.at, call.before, call.counts, strict=True):
                assert int(before) == reached[request] and 1 <= int(count) <= call.gear.tokens == at.numel()
                first = starts[request] + int(before) - requests[request][1]
                assert at[:count].tolist() == list(range(first, first + int(count)))
                reached[request] += int(count)
                seen += at[:count].tolist()
    assert sorted(seen) == list(range(starts[-1])) and reached == lengths


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=9), st.integers(1, 9), st.data()
)
def test_a_call_has_no_more_of_a_pictures_tokens_than_its_graph_takes(requests, most, data):
    starts, lengths = step(requests)
    pictured = torch.tensor(data.draw(st.lists(st.booleans(), min_size=starts[-1], max_size=starts[-1])))
    seen = []
    for rows in rows_of(starts, lengths):
        for call in calls_of(rows, SMALL, pictured=pictured, most=most):
            own = call.at[call.real].tolist()
            seen += own
            assert int(pictured[own].sum()) <= most or rows.step
    assert sorted(seen) == list(range(starts[-1]))


@given(REQUESTS)
def test_where_pages_are_shared_what_a_request_finds_is_written_before_or_with_its_first_call(requests):
    """It finds pages of the tokens before its own; any other request may be who writes them in this step."""
    starts, lengths = step(requests)
    reached = [before for _, before in requests]
    for rows in rows_of(starts, lengths, shared=True):
        for call in calls_of(rows, SMALL, shared=True):
            begun = [
                r for r, before in zip(call.requests.tolist(), call.before, strict=True) if before == requests[r][1]
            ]
            for request, count in zip(call.requests.tolist(), call.counts.tolist(), strict=True):
                reached[request] += count
            for found in (requests[r][1] for r in begun):
                assert all(at >= min(found, length) for at, length in zip(reached, lengths, strict=True))


def test_the_graph_with_the_fewest_rows_that_are_enough_is_called():
    gears = {"decode": [Gear("decode", n, 1, (f"d{n}",)) for n in (1, 4)]}
    for count, name in ((1, "d1"), (2, "d4"), (4, "d4")):
        (rows,) = rows_of(range(count + 1), [9] * count)
        assert [c.gear.names for c in calls_of(rows, gears)] == [(name,)]
    (rows,) = rows_of(range(6), [9] * 5)
    assert [len(c.requests) for c in calls_of(rows, gears)] == [4, 1]


def test_a_graph_gets_its_own_inputs_and_rows_that_are_left_are_nobodys(graphs):
    (rows,) = rows_of([0, 3], [3])
    (call,) = calls_of(rows, graphs.gears)
    old = torch.tensor([[4, 3, 2]], dtype=torch.int32)  # the sequence has one page; what follows is another's
    given = inputs_of(call, graphs, {"tokens": torch.tensor([7, 8, 9])}, old, torch.tensor([2]))
    described = {i["name"]: tuple(i["shape"]) for i in graphs.bundle.graph("prefill")["inputs"]}
    assert {name: tuple(x.shape) for name, x in given.items()} == {
        name: shape for name, shape in described.items() if name != "causal_mask"
    }
    assert given["tokens"][:, :4].tolist() == [[7, 8, 9, 9], [0, 0, 0, 0]]
    assert given["batch.block_table"].tolist() == [[4, 0], [0, 0]] and given["batch.slots"].tolist() == [2, 0]
    assert given["batch.lengths"].tolist() == given["batch.counts"].tolist() == [3, 0]
    assert given["batch.slot_mapping"][:4].tolist() == [4 * PAGE, 4 * PAGE + 1, 4 * PAGE + 2, 3]


def engine_like(graphs, dtype, stage=0):
    """Caches of a rank as an engine lays them: one block of bytes for each page, rows of all layers or memories of all
    layers in it, what others left there not a number."""
    page, pages = graphs.contract["page_tokens"], graphs.contract["pages"]
    raw = torch.full((pages, page * graphs.row * dtype.itemsize), 255, dtype=torch.uint8)
    rows, column, at, found = raw.view(dtype).view(pages, page, graphs.row), 0, 0, {}
    for name, shape in graphs.states(stage, "mla").items():
        found[name] = rows[..., column : column + shape[-1]]
        column += shape[-1]
    for name, shape in graphs.states(stage, "kda").items():
        own = torch.float32 if name.endswith(".memory") else dtype
        count = math.prod(shape[1:]) * own.itemsize
        found[name] = raw[:, at : at + count].view(own).unflatten(1, shape[1:])
        at += count
    return raw, found


def played(graphs, runner, states, prompts, count):
    """Greedy tokens, and logits of each call, of prompts that start together: page 1 and slot n + 1 are the first's."""
    n = len(prompts)
    table, slots = torch.arange(1, n + 1)[:, None], torch.arange(n + 1, 2 * n + 1)
    counts, before, ids = [len(p) for p in prompts], [0] * n, [t for p in prompts for t in p]
    tokens, logits = [[] for _ in prompts], [[] for _ in prompts]
    for _ in range(count):
        starts, lengths = [0, *itertools.accumulate(counts)], [a + b for a, b in zip(before, counts, strict=True)]
        for rows in rows_of(starts, lengths):
            for call in calls_of(rows, graphs.gears):
                given = inputs_of(call, graphs, {"tokens": torch.tensor(ids)}, table, slots)
                found = runner.call(call.gear.phase, given, states)["logits"]
                for request, row in zip(call.requests.tolist(), found, strict=False):
                    logits[request].append(row)
        for own, rows in zip(tokens, logits, strict=True):
            own.append(int(rows[-1].argmax()))
        before, counts, ids = lengths, [1] * n, [t[-1] for t in tokens]
    return tokens, logits


def own_states(graphs):
    """States as the contract has them, without an engine."""
    return {s["name"]: torch.zeros(s["shape"], dtype=getattr(torch, s["dtype"])) for s in graphs.contract["states"]}


def check_librarys_own(checkpoint, prompts, tokens, logits):
    """Against the library in float64."""
    config = kg.load_config(checkpoint)
    params = kg.load_params(checkpoint, config, torch.float64)
    for prompt, own, rows in zip(prompts, tokens, logits, strict=True):
        state = kg.init_state(config, 1, len(prompt) + 3, torch.float64)
        with torch.no_grad():
            want, state = kg.prefill(config, params, torch.tensor([prompt]), state, last_only=True)
            for token, row in zip(own, rows[-3:], strict=True):
                # caches between calls are float32: 2^-24 of what they hold, some of it in every layer and step
                assert float((want[0] - row).abs().max()) < 1e-5 * float(want.abs().max())
                assert int(want.argmax()) == token
                want, state = kg.decode(config, params, torch.tensor([token]), state)


def test_exact_calls_on_an_engines_caches_give_the_models_tokens(folder, checkpoint):
    """Memories and rows share blocks that held something else: nothing of it is read."""
    graphs = Graphs.open(Choice(bundle=folder, mode="exact"), checkpoint)
    assert graphs.least_page <= PAGE
    prompts = [torch.randint(0, graphs.config.vocab, (n,)).tolist() for n in (241, 5)]
    runner, (_, states) = runner_for(graphs, checkpoint, CPU, Seat()), engine_like(graphs, torch.float32)
    check_librarys_own(checkpoint, prompts, *played(graphs, runner, states, prompts, 3))


class Together:
    """All ranks of a bundle in this process, each with its seat and its caches, in lockstep."""

    def __init__(self, graphs, checkpoint, dtype, caches=engine_like):
        world, self.ways = graphs.mesh.world, graphs.mesh.tensor
        self.ranks = [runner_for(graphs, checkpoint, CPU, Seat(rank)) for rank in range(world)]
        self.states = [caches(graphs, dtype, rank // self.ways)[1] for rank in range(world)]

    def call(self, phase, given, _):
        plan, crossed = self.ranks[0].plan, {}
        for first in range(0, len(self.ranks), self.ways):
            own = range(first, first + self.ways)
            runs = [self.ranks[r].steps(phase, {**given, **crossed}, self.states[r]) for r in own]
            gives = run_together(runs, lambda _: [list(range(self.ways))])
            assert all(torch.equal(x, gives[1][name]) for name, x in gives[0].items() if name != "logits")
            crossed = gives[0]
        return {"logits": whole_result(plan, phase, dict(enumerate(gives)))}


def test_ranks_of_a_mesh_give_the_models_tokens_on_caches_that_hold_their_part(shared, checkpoint):
    graphs = Graphs.open(Choice(bundle=shared, mode="exact"), checkpoint)
    config, mixer = graphs.config, graphs.config.layers[0].mixer
    assert graphs.mesh == Mesh(pipe=2, tensor=2) and graphs.memories == 2
    assert dataclasses.replace(graphs, mode="native").least_page == HALF
    assert graphs.states(0, "mla") == graphs.states(1, "kda") == {}
    assert graphs.states(0, "kda")["s.layers.0.kda.memory"] == (PAGES, mixer.heads // 2, mixer.value, mixer.key)
    assert graphs.states(1, "mla")["s.layers.2.mla.latent"] == (PAGES, HALF, config.layers[2].mixer.latent)
    assert graphs.read_by(0) == {} and graphs.read_by(1) == {"1.x": ((config.embed,), torch.float64)}
    prompts = [torch.randint(0, config.vocab, (n,)).tolist() for n in (121, 5)]
    together = Together(graphs, checkpoint, torch.float32)
    check_librarys_own(checkpoint, prompts, *played(graphs, together, None, prompts, 3))


def test_ranks_write_an_engines_caches_where_they_lie_in_native_mode(shared, checkpoint):
    """To the bit what they give on states of their own."""

    def plain(graphs, dtype, stage):
        lies = engine_like(graphs, dtype, stage)[1]
        return None, {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in lies.items()}

    graphs = Graphs.open(Choice(bundle=shared), checkpoint)
    prompts = [torch.randint(0, graphs.config.vocab, (n,)).tolist() for n in (9, 4)]
    ran = [Together(graphs, checkpoint, torch.bfloat16, caches) for caches in (engine_like, plain)]
    (_, found), (_, want) = (played(graphs, together, None, prompts, 2) for together in ran)
    for x, y in zip(itertools.chain(*found), itertools.chain(*want), strict=True):
        assert torch.equal(x, y) and bool(torch.isfinite(x).all())


def test_native_calls_write_an_engines_caches_where_they_lie(graphs, checkpoint):
    """With the same numbers as on states of their own, and nothing beside the states."""
    prompts = [torch.randint(0, graphs.config.vocab, (n,)).tolist() for n in (9, 4)]
    runner = runner_for(graphs, checkpoint, CPU, Seat())
    (raw, lies), own = engine_like(graphs, torch.bfloat16), own_states(graphs)
    _, logits = played(graphs, runner, lies, prompts, 2)
    _, alone = played(graphs, runner, own, prompts, 2)
    for found, want in zip(itertools.chain(*logits), itertools.chain(*alone), strict=True):
        assert torch.equal(found, want) and bool(torch.isfinite(found).all())
    assert raw[:, -1].tolist() == [255] * PAGES  # a row's last channel is of page 480, which no token has reached
    for name, x in lies.items():  # block 1 and 2 hold rows, 3 and 4 memories; of nobody's there is no promise
        used = [3, 4] if ".kda." in name else [1, 2]
        at = (slice(None),) if ".kda." in name else (slice(None), slice(4))
        assert torch.equal(x[used][at], own[name][used][at]), name


def test_exact_calls_give_the_models_tokens_for_pictures(tmp_path):
    """Graphs of a smaller table of embeddings than the prompt has: they come in several calls."""
    checkpoint = make_fixture(kg.load_config("kimi-k2.5"), tmp_path / "of", layers=2).folder
    folder = bundle_of(checkpoint, tmp_path / "bundle", 32, chunk=16, patches=24)
    graphs = Graphs.open(Choice(bundle=folder, mode="exact"), checkpoint)
    config, runner = graphs.config, runner_for(graphs, checkpoint, CPU, Seat())
    params = kg.load_params(checkpoint, config, torch.float64)
    assert graphs.patches == 24 and graphs.settings.pictures
    patches, grids = torch.randn(2, 24, 3 * config.vision.patch**2), ((1, 4, 6), (1, 2, 4))
    made, want = [], []
    for x, grid in zip(patches, grids, strict=True):
        image = VisionInput(patches=x[: math.prod(grid)], grid=grid, size=(0, 0), tokens=math.prod(grid) // 4)
        (values,) = runner.call("vision", picture_inputs_of(graphs, image.patches, grid), {}).values()
        made.append(values[: image.tokens])
        want.append(kg.encode_image(config, params, image))
        assert torch.allclose(made[-1], want[-1], rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="24"):
        picture_inputs_of(graphs, torch.zeros(32, 3 * config.vision.patch**2), (1, 4, 8))
    ids = torch.tensor([5, *[config.vision.placeholder] * 6, 9, *[config.vision.placeholder] * 2, 7])
    embedded = torch.full((len(ids), config.embed), torch.nan, dtype=torch.float64)
    embedded[ids == config.vision.placeholder] = torch.cat(made)
    (rows,) = rows_of([0, len(ids)], [len(ids)])
    calls = calls_of(rows, graphs.gears, pictured=is_picture(embedded), most=graphs.bundle.graph("prefill")["images"])
    assert [call.counts.tolist() for call in calls] == [[8], [3]]
    _, states = engine_like(graphs, torch.float32)
    values = {"tokens": ids, "vision.values": embedded}
    for call in calls:
        given = inputs_of(call, graphs, values, torch.tensor([[1]]), torch.tensor([0]))
        logits = runner.call("prefill", given, states)["logits"][0]
    state = kg.init_state(config, 1, len(ids), torch.float64)
    expected, _ = kg.prefill(config, params, ids[None], state, last_only=True, vision=want)
    # pictures come in float32, as the caches between calls are
    assert float((logits - expected[0]).abs().max()) < 1e-5 * float(expected.abs().max())


# ---- whether they fit ------------------------------------------------------------------------------------------------

UNFIT = {
    "ranks": ({"mesh": Mesh(tensor=2)}, "mesh is tp=1, --tensor-parallel-size and .* tp=2; give tp=1"),
    "dtype": ({"dtype": torch.float16}, "model.config is bfloat16, --dtype float16; give bfloat16"),
    "page": ({"page": 128}, "state.page_tokens is 480, --block-size 128; give 480"),
    "pages": ({"pages": 6}, "state.pages is 5, --num-gpu-blocks-override 6; give 5"),
    "pages by memory": ({"pages": None}, "state.pages is 5, --num-gpu-blocks-override not given; give 5"),
    "length": ({"length": 961}, "state.tokens_per_sequence is 960, --max-model-len 961; lower it to 960"),
    "sequences": ({"sequences": 3}, "buckets.rows is 2, --max-num-seqs 3; lower it to 2"),
    "tokens": ({"tokens": 481}, "tokens of prefill is 480, --max-num-batched-tokens 481; lower it to 480"),
    "tiers": ({"connector": "OffloadingConnector"}, "--kv-transfer-config OffloadingConnector: .* leave it out"),
    "pictures": ({"pictures": 1}, "without phase vision .* is 0, --limit-mm-per-prompt image 1; lower it to 0"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_engine_that_differs_from_the_contract_is_refused_with_both_values(graphs, case):
    changes, words = UNFIT[case]
    graphs.settings.check(graphs)
    dataclasses.replace(graphs.settings, length=1, sequences=1, tokens=PAGE).check(graphs)
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(graphs.settings, **changes).check(graphs)


def test_exact_mode_wants_the_engine_in_float32(folder, checkpoint):
    graphs = Graphs.open(Choice(bundle=folder, mode="exact"), checkpoint)
    assert graphs.settings.dtype == torch.float32


def without(phase):
    def change(m):
        m["graphs"] = [g for g in m["graphs"] if g["phase"] != phase]

    return change


UNCALLED = {
    "of copies of the model": (lambda m: m.update(mesh={"text": "dp=2,tp=2"}), "mesh is dp=2,tp=2; .* --mesh tp=2"),
    "experts on few ranks": (lambda m: m.update(mesh={"text": "tp=2,ep=1"}), "mesh is tp=2,ep=1; .* --mesh tp=2"),
    "split caches": (lambda m: m["state"].update(pools=2), "state.pools is 2; .* without --split-cache"),
    "without decode": (without("decode"), "buckets has no decode; .* without --phase"),
    "without prefill": (without("prefill"), "buckets has no prefill"),
    "8-bit caches": (lambda m: m["state"].update(kv_dtype="int8"), "state.kv_dtype is int8; .* --kv-dtype bf16"),
    "small pages": (
        lambda m: m["state"].update(page_tokens=464),
        "page_tokens is 464; .* from 480 on.* --page 480 --pages 9 --slots 9",
    ),
    "few slots": (lambda m: m["state"].update(slots=3), "slots is 3, state.pages 5; .* --slots 9"),
    "a short chunk": (
        lambda m: [g.update(tokens=100) for g in m["graphs"] if g["phase"] == "prefill"],
        "has 200 tokens, a page 480; .* --chunk 240",
    ),
}


@pytest.mark.parametrize("case", UNCALLED)
def test_a_bundle_that_no_engine_can_call_is_refused_with_what_to_compile(graphs, case):
    change, words = UNCALLED[case]
    manifest = deepcopy(graphs.bundle.manifest)
    change(manifest)
    with pytest.raises(BundleError, match=words):
        dataclasses.replace(graphs, bundle=dataclasses.replace(graphs.bundle, manifest=manifest)).check()


def test_memories_that_no_page_holds_are_refused(graphs):
    """Of nine layers."""
    manifest = deepcopy(graphs.bundle.manifest)
    first = [s for s in manifest["state"]["states"] if s["name"].startswith("s.layers.0.")]
    more = (s | {"name": s["name"].replace(".0.", f".{i}.")} for i in range(3, 10) for s in first)
    manifest["state"]["states"].extend(more)
    with pytest.raises(
        BundleError, match=r"takes 2,128 tokens; .* at most 1,024\. With --mesh tp=\d+ of compile it takes \d+\."
    ):
        dataclasses.replace(graphs, bundle=dataclasses.replace(graphs.bundle, manifest=manifest)).check()


@pytest.mark.parametrize(
    "told, words",
    [
        ({"kimi_graph": "x"}, "expected an object of bundle, mode"),
        ({"kimi_graph": {}}, "with a bundle"),
        ({"kimi_graph": {"bundle": "x", "page": 1}}, "expected an object of bundle, mode"),
        ({"kimi_graph": {"bundle": "x", "mode": "fast"}}, "mode is 'fast'; expected native or exact"),
    ],
)
def test_what_is_told_of_a_bundle_is_understood_or_refused(told, words):
    assert Choice.of({}) is None and Choice.of(None) is None and Choice.of({"another": 1}) is None
    choice = Choice(bundle=Path("x"), mode="exact")
    assert Choice.of(choice.told) == choice
    with pytest.raises(ConfigError, match=words):
        Choice.of(told)


def test_a_bundle_that_is_gone_damaged_or_of_another_model_is_refused(folder, checkpoint, tiny, tmp_path):
    with pytest.raises(BundleError, match=r"gone: no manifest\.json"):
        Graphs.open(Choice(bundle=tmp_path / "gone"), checkpoint)
    with pytest.raises(BundleError, match="made for another model than"):
        Graphs.open(Choice(bundle=folder), tiny)
    with pytest.raises(BundleError, match=r"no config\.json; expected the checkpoint"):
        Graphs.open(Choice(bundle=folder), tmp_path)
    copy = shutil.copytree(folder, tmp_path / "copy")
    Graphs.open(Choice(bundle=copy), checkpoint)
    file = copy / json.loads((copy / "manifest.json").read_text())["graphs"][0]["file"]
    file.chmod(0o600)
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(BundleError, match="changed or damaged"):
        Graphs.open(Choice(bundle=copy), checkpoint)


def test_nothing_pretends_to_call_a_bundle_on_an_npu(graphs, checkpoint):
    with pytest.raises(BundleError, match="nothing here calls a bundle on meta in an engine"):
        runner_for(graphs, checkpoint, torch.device("meta"), Seat())


# ---- the command -----------------------------------------------------------------------------------------------------


def cli(*words):
    return CliRunner().invoke(app, ["serve", *map(str, words), "--dry-run"])


def test_serving_a_bundle_tells_the_engine_all_its_sizes(folder, checkpoint, tmp_path):
    moved = shutil.copytree(folder, tmp_path / "moved")
    (moved / "local.json").unlink()
    done = cli(moved, "--checkpoint", checkpoint)
    assert done.exit_code == 0, done.output
    for words in (
        f"--model {checkpoint} --served-model-name moved ",
        f"""--additional-config '{{"kimi_graph": {{"bundle": "{moved}"}}}}'""",
        "--max-model-len 960",
        "--dtype bfloat16 --block-size 480 --num-gpu-blocks-override 5 --max-num-seqs 2 --max-num-batched-tokens 480",
    ):
        assert words in done.output
    done = cli(moved)
    assert done.exit_code == 1 and "give --checkpoint DIR" in done.output
    assert graphs_for(Choice(bundle=folder), None)[1] == checkpoint
    done = cli(folder, "--max-len", 961)
    assert done.exit_code == 1 and "--max-len 961: expected 1 to 960; nearest 960" in done.output
    done = cli(folder, "--mesh", "tp=2")
    assert done.exit_code == 1 and "small is of tp=1; leave it out, or compile one with --mesh tp=2" in done.output
    done = cli(folder, "--tiers", "host=1GB")
    assert done.exit_code == 1 and "--tiers: a bundle's caches" in done.output
    done = cli(checkpoint, "--checkpoint", checkpoint)
    assert done.exit_code == 1 and "goes with a bundle" in done.output


def test_serving_a_bundle_of_a_mesh_starts_its_ranks(shared):
    for words in ((), ("--mesh", "tp=2,pp=2")):
        done = cli(shared, *words)
        assert done.exit_code == 0, done.output
        assert "--tensor-parallel-size 2 --pipeline-parallel-size 2" in done.output
    done = cli(shared, "--mesh", "tp=2")
    assert done.exit_code == 1 and "shared is of pp=2,tp=2; leave it out, or" in done.output
