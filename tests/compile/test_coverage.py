"""`kimi-graph ops`: who serves each kind of layer, with what evidence and within which limits; refusals by kind."""

import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from kimi_graph.compile import coverage
from kimi_graph.compile.coverage import Coverage, Served, cover, request_of
from kimi_graph.compile.driver import compile_model
from kimi_graph.compile.packages import PACKAGES, packages_of
from kimi_graph.compile.prototype_rows import ROWS
from kimi_graph.compile.targets import PROVIDERS_DEFAULT, target
from kimi_graph.config import KdaConfig, ModelConfig, MoeConfig
from kimi_graph.errors import CompileError, ShardingError
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config

from .family import small_model

Cover = Callable[..., Coverage]
RESIDUALS = ("attn_res", "ffn_res", "out_res")
STRUCTURE = {"Data", "RefData", "Const", "NetOutput"}


@pytest.fixture(scope="module")
def covered(host) -> Cover:
    """`covered("kimi-k3", "a3", "9.1")`: of the small model, decode alone unless phases are given."""

    @functools.cache
    def made(name: str, chip="a3", cann="9.2", mesh=None, providers=PROVIDERS_DEFAULT, phases=("decode",), whole=False):
        config = load_config(name) if whole else small_model(name)
        profile = target(chip, cann=cann, providers=providers)
        parsed = None if mesh is None else Mesh.parse(mesh)
        return cover(request_of(config, target=profile, mesh=parsed, phases=phases), host)

    return made


def row(found: Coverage, part: str, kind: str) -> Served:
    (one,) = (r for r in found.served if (r.part, r.kind) == (part, kind))
    return one


def numbers(found: Coverage, part: str, kind: str) -> str:
    return row(found, part, kind).limits


# ---- what serves -----------------------------------------------------------------------------------------------------


def test_a_row_says_who_serves_with_what_evidence_and_why_not_another(covered):
    found = covered("kimi-k3", cann="9.1")
    step = row(found, "kda", "recurrent KDA")
    assert (step.provider, step.evidence) == ("composed", "documented")
    assert "RecurrentGatedDeltaRule of builtin: takes a float32 memory since CANN 9.2" in step.reason
    assert row(found, "moe", "routing").evidence.startswith("ran: on 950")
    assert row(found, "kda", "gated norm").provider == "own"
    assert row(found, "kda", "gated norm").evidence == "run on the CPU twin alone"
    assert found.passed and "all is served by" in found.summary
    assert row(covered("kimi-k3"), "kda", "recurrent KDA").provider == "builtin"


@pytest.mark.parametrize("name", ["kimi-k3.1-pro", "glm-5.2"])
def test_the_operators_of_a_report_are_those_of_the_graphs(host, covered, name):
    """Every type, as often as the graphs have it: layers times nodes of a layer, without what chains took."""
    config = small_model(name)
    made = compile_model(config, target=target("a3"), out=None, phases=("decode",))
    (graph,) = made.manifest["graphs"]
    parts: dict[tuple[str, str], int] = {}
    for r in covered(name).served:  # a type that two kinds of a part share is counted in both
        for type_, n in r.types:
            parts[r.part, type_] = n * r.layers
    counted = Counter[str]()
    for (_, type_), n in parts.items():
        counted[type_] += n
    for r in covered(name).served:
        counted.subtract(dict(r.instead))
    made_of = {t: n for t, n in graph["ops"].items() if t not in STRUCTURE}
    counted["Reshape"] = made_of["Reshape"]  # stamping makes one of two that meet where parts do
    assert +counted == made_of
    chosen = {(c["kind"], c["operator"], c["provider"]) for c in made.manifest["choices"]}
    kinds = {(r.kind, r.provider) for r in covered(name).served if r.reason}
    assert kinds == {(kind, provider) for kind, _, provider in chosen}


# ---- limits with their numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp, local, padded", [(1, 96, 128), (8, 12, 16), (32, 3, 4)])
def test_limits_are_those_of_a_rank_of_the_mesh(covered, tp, local, padded):
    """K3.1-Pro has 96 heads; A3's sparse attention takes powers of two."""
    mesh = None if tp == 1 else f"tp={tp}"
    found = covered("kimi-k3.1-pro", cann="9.1", mesh=mesh, whole=True)
    assert found.passed
    attended = numbers(found, "mla", "sparse attention")
    assert f"the number of heads is {padded} (one of 1, 2, 4, 8, 16, 32, 64, 128)" in attended
    assert "the width of query and key is [512, 512]" in attended
    assert f"{local} heads padded to {padded}" in row(found, "mla", "sparse attention").reason
    assert "sparse_count is 2048 (1 to 2,048" in numbers(found, "mla", "selection of keys")
    experts = numbers(found, "moe", "products of experts")
    assert f"the number of groups is {896 // tp} (at most 1,024)" in experts
    assert "k is 16 (1 to 896" in numbers(found, "moe", "routing")
    between = [r for r in found.served if r.kind == "between ranks"]
    assert bool(between) == (tp > 1) and all(t.startswith("Hcom") for r in between for t, _ in r.types)


HEADS = {"kimi-k3": 96, "kimi-k3.1-pro": 96, "glm-5": 64}
EXPERTS = {"kimi-k3": (896, 16), "kimi-k3.1-pro": (896, 16), "glm-5": (256, 8)}
POWERS = "one of 1, 2, 4, 8, 16, 32, 64, 128"


@pytest.mark.parametrize("cann", ["9.1", "9.2"])
@pytest.mark.parametrize("chip", ["a3", "950dt"])
@pytest.mark.parametrize("name", HEADS)
def test_every_limit_is_said_with_the_number_of_a_rank_at_1_8_and_32_ways(covered, name, chip, cann):
    """Whether heads have to be a power of two is the operator's, chip's and release's; padding is said."""
    for tp in (1, 8, 32):
        found = covered(name, chip, cann, mesh=None if tp == 1 else f"tp={tp}", whole=True)
        assert found.passed, found.summary
        heads, (experts, chosen) = HEADS[name] // tp, EXPERTS[name]
        if name == "kimi-k3":
            powers, attention = cann == "9.1", "attention to latents"
            of = "the number of heads over the latent cache"
        else:
            powers, attention, of = chip == "a3", "sparse attention", "the number of heads"
            assert "sparse_count is 2048 (1 to 2,048" in numbers(found, "mla", "selection of keys")
            index = "one of 8, 16, 24, 32, 64" if chip == "950dt" else "at most 64"
            assert f"the number of index heads is 32 ({index})" in numbers(found, "mla", "selection of keys")
        used = 1 << (heads - 1).bit_length() if powers else heads
        legal = POWERS if powers else "at most 128"
        assert f"{of} is {used} ({legal})" in numbers(found, "mla", attention)
        said = f"{heads} heads padded to {used}, a power of two, and stripped: {used / heads - 1:.0%} more queries"
        assert (said in row(found, "mla", attention).reason) == (used != heads)
        assert f"the number of groups is {experts // tp} (at most 1,024)" in numbers(
            found, "moe", "products of experts"
        )
        assert f"the number of experts is {experts} (at most 2,048)" in numbers(found, "moe", "routing")
        assert f"k is {chosen} (1 to {experts}, the experts of 1 groups)" in numbers(found, "moe", "routing")
        if name != "glm-5":
            step = row(found, "kda", "recurrent KDA")
            assert step.provider == ("builtin" if cann == "9.2" else "composed")
            limit = f"the number of value heads is {heads} (at most 256)"
            assert (limit in step.limits) == (cann == "9.2")
            channels = f"the number of channels is {128 * heads} (a multiple of 16)"
            assert channels in numbers(found, "kda", "short convolution")


def test_what_compile_can_be_told_changes_the_operators_here_too(host):
    config, profile = small_model("glm-5.2"), target("950dt")
    told = {"mesh": Mesh.parse("tp=2"), "exchange": True, "batch": 4, "kv_dtype": "fp8"}
    found = cover(request_of(config, target=profile, phases=("decode",), **told), host)
    types = {t for r in found.served for t, _ in r.types}
    assert {"QuantLightningIndexer", "KvQuantSparseFlashAttention"} <= types and found.passed
    sent = row(found, "moe", "rows to experts of other ranks")
    assert "MoeDistributeDispatchV2" in sent.operators + sent.reason


def test_a_mesh_that_does_not_divide_is_refused_before_anything_is_traced(host):
    request = request_of(load_config("kimi-k3.1-pro"), target=target("a3"), mesh=Mesh.parse("tp=7"))
    with pytest.raises(ShardingError, match="heads=96 does not divide over 7"):
        cover(request, host)


# ---- what cannot be --------------------------------------------------------------------------------------------------


def with_heads(heads: int) -> ModelConfig:
    """A small Kimi Linear whose KDA has another number of heads."""
    config = small_model("kimi-linear-48b")
    layers = [
        replace(x, mixer=replace(x.mixer, heads=heads)) if isinstance(x.mixer, KdaConfig) else x for x in config.layers
    ]
    return replace(config, layers=tuple(layers))


def test_a_broken_limit_is_said_with_its_number_and_nothing_passes(host):
    found = cover(request_of(with_heads(258), target=target("a3"), phases=("decode",)), host)
    assert not found.passed
    (line,) = (words for r in found.served for words in r.broken)
    assert "RecurrentGatedDeltaRule: the number of value heads is 258; expected at most 256" in line
    assert f"BROKEN: {line}" in " ".join(found.text().split()) and "1 of its needs cannot be served" in found.summary
    assert found.to_json()["passed"] is False


def test_a_limit_that_one_rank_breaks_half_of_its_heads_keep(host):
    request = request_of(with_heads(258), target=target("a3"), phases=("decode",), mesh=Mesh.parse("tp=2"))
    found = cover(request, host)
    assert found.passed
    assert "the number of value heads is 129 (at most 256)" in numbers(found, "kda", "recurrent KDA")


def test_a_size_that_no_operator_computes_with_leaves_a_part_unserved(host):
    config = small_model("kimi-linear-48b")
    many = [replace(x, ffn=replace(x.ffn, experts=2049)) if isinstance(x.ffn, MoeConfig) else x for x in config.layers]
    found = cover(request_of(replace(config, layers=tuple(many)), target=target("a3"), phases=("decode",)), host)
    (one,) = found.unserved
    assert one.part == "moe" and "layers/moe.py" in one.why and "2048" in one.why


def test_a_provider_that_is_left_out_leaves_parts_that_nobody_serves(covered):
    found = covered("kimi-k3", cann="9.1", providers=("builtin",))
    assert not found.passed
    assert {u.part.rstrip("0123456789") for u in found.unserved} == {*("kda", "mla", "dense", "moe"), *RESIDUALS}
    moe = next(u.why for u in found.unserved if u.part == "moe")
    assert (
        "layers/moe.py" in moe and "SiTU: nobody serves it" in moe and "--providers does not name composed, own" in moe
    )
    assert "CANNOT BE SERVED" in found.text()


def test_without_an_operator_the_next_that_can_serves_and_what_only_it_does_is_broken(host):
    def asked(*avoid: str) -> Coverage:
        profile = target("a3", avoid=avoid)
        return cover(request_of(small_model("kimi-linear-48b"), target=profile, phases=("decode",)), host)

    found = asked("ShortConv", "RecurrentGatedDeltaRule=own")
    assert found.passed and "asked: builtin, own, composed, without ShortConv, Recurrent" in found.text()
    assert row(found, "kda", "short convolution").provider == "composed"
    assert "ShortConv is left out by --avoid" in row(found, "kda", "short convolution").reason
    assert "KdaStep" in row(found, "kda", "recurrent KDA").operators
    assert found.to_json()["target"]["avoid"] == ["ShortConv", "RecurrentGatedDeltaRule=own"]
    left = asked("MoeGatingTopK")
    assert not left.passed
    assert row(left, "moe", "routing").broken == ("--avoid MoeGatingTopK: nobody else serves what it does",)


def test_two_packages_are_a_conflict_that_names_both_and_what_to_do(covered):
    found = covered("kimi-k3", cann="9.1", providers=("builtin", "vllm-ascend", "own", "composed"))
    assert not found.passed and not found.unserved
    assert "RecurrentKda of vllm-ascend" in found.conflict and "GatedRmsNorm" in found.conflict
    assert f"CONFLICT: {found.conflict}" in " ".join(found.text().split()) and found.to_json()["conflict"]


def test_a_conflict_between_the_graphs_of_a_bundle_stops_compile_too(host):
    """Prefill takes KdaChunk, decode takes RecurrentKda: no graph has both, the deployment would."""
    profile = target("a3", cann="9.1", providers=("builtin", "vllm-ascend", "own", "composed"))
    with pytest.raises(CompileError, match="operators of two packages"):
        compile_model(small_model("kimi-k3"), target=profile, out=None)


def test_a_package_that_replaces_operators_of_cann_is_built_of_what_is_needed_alone():
    (needed,) = packages_of(["RecurrentKda", "MoeGatingTopK", "MatMul", "RmsNorm"])
    assert needed.text() == (
        "vllm-ascend, with RecurrentKda (csrc/build.sh --pkg --ops=recurrent_kda), and with nothing else: all of it "
        "would replace CANN's MoeGatingTopK (without input_ids and tid2eid)"
    )
    assert packages_of(["MatMul", "MoeGatingTopK"]) == []


def test_packages_are_those_of_the_table():
    assert set(PACKAGES) == {r.provider for r in ROWS.values()} - {"builtin", "ge"}
    assert all(ROWS[t].provider == "builtin" for p in PACKAGES.values() for t in p.replaces)


# ---- how it is written -----------------------------------------------------------------------------------------------


def test_an_operator_of_ours_without_a_kernel_is_said_to_have_none(covered, monkeypatch, tmp_path):
    found = covered("kimi-k3")
    assert "no kernel yet" not in found.text()  # a decode step's have all
    monkeypatch.setattr(coverage, "KERNELS", tmp_path)
    assert "\nno kernel yet: AttnResMix, GatedRmsNorm, ShortConv; without own in --providers" in found.text()


def test_a_report_is_no_wider_than_100_columns(covered):
    """What is served, what cannot be, a conflict, packages; and no name is broken at its hyphen."""
    reports = [covered("kimi-k3", cann="9.1"), covered("kimi-k3", cann="9.1", providers=("builtin",))]
    reports.append(covered("kimi-k3", cann="9.1", providers=("builtin", "vllm-ascend", "own", "composed")))
    for found in reports:
        lines = found.text().splitlines()
        assert max(map(len, lines)) <= 100 and not [line for line in lines if line.endswith("vllm-")]


def test_markdown_is_a_table_for_each_phase(covered):
    found = replace(covered("glm-5.2"), markdown=True)
    lines = found.text().splitlines()
    assert lines[0] == "# Operators of glm-5.2 for a3 with CANN 9.2" and "## decode" in lines
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == len(found.served) + 2 and len({line.count("|") for line in table}) == 1
    step = next(line for line in table if "| sparse attention |" in line)
    assert row(found, "mla", "sparse attention").reason in step
    assert lines[2].startswith("asked: builtin, own, composed; sequences ") and found.text().endswith("\n")


def test_json_has_what_was_asked_and_what_the_text_says_of_it(covered):
    found = covered("glm-5.2")
    made = json.loads(json.dumps(found.to_json()))
    r = found.request
    assert made["sizes"] == {"sequences": r.rows, "chunk": r.chunk, "max_len": r.max_len, "page": r.page}
    assert len(made["served"]) == len(found.served) and "avoid" not in made["target"]


def test_json_has_every_operator_type_with_its_whole_registration(covered):
    made = covered("kimi-k3.1-pro").to_json()
    by_type = {o["type"]: o for o in made["operators"]}
    assert set(by_type) == {t for r in made["served"] for t in r["operators"]}
    for o in by_type.values():
        assert o["outputs"] and o["socs"] and o["provider"] and o["source"] and o["evidence"]
        assert o["semantics"]["provenance"]
    norm = by_type["SparseFlashAttention"]
    assert (norm["since"], norm["limits"]) == ("9.1 950", True)
    assert by_type["ShortConv"]["in_place"] == ["window"]
