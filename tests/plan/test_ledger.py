"""The ledger against what bundles hold, and against published sizes of Kimi K3."""

import dataclasses
import functools

import pytest

from kimi_graph import tree
from kimi_graph.checkpoint import released_formats
from kimi_graph.compile.driver import Clock, Request, build_all, compile_bundle, legal_phases
from kimi_graph.compile.ge_proto import bytes_of
from kimi_graph.compile.prototypes import DTYPES, layouts_of
from kimi_graph.compile.targets import target
from kimi_graph.compile.view import Edge, view
from kimi_graph.config import ModelConfig, arranged, check_length
from kimi_graph.errors import ConfigError
from kimi_graph.fixture import small_config
from kimi_graph.models import decoder
from kimi_graph.models.counts import parameter_counts, part_of
from kimi_graph.parallel import Mesh
from kimi_graph.plan import ledger
from kimi_graph.plan.buffers import full_ledger
from kimi_graph.plan.factors import Factors
from kimi_graph.plan.ledger import hybrid_page, make_ledger, state_bytes, statistics_bytes
from kimi_graph.read_config import load_config, parse_config
from tests.compile.test_mesh_bundle import SHARED

GIB = 2**30
FIXTURES = ("kimi-linear-48b", "kimi-k3", "kimi-k3.1-pro", "kimi-k2.5", "deepseek-v3.2", "glm-5", "glm-5.2")


def small_request(name: str, mesh: str | None, options: dict, **given) -> Request:
    """What `compile` makes of a fixture on a mesh of the tests of bundles."""
    options = dict(options)
    ways, copies, chunks = (options.pop(k, n) for k, n in (("ways", 1), ("redundant_experts", 0), ("moe_chunks", 1)))
    config = parse_config(small_config(load_config(name), ways=ways), origin=name, name=name)
    return Request(
        config=arranged(config, copies, chunks), target=target("a3"), phases=legal_phases(config), max_len=96, page=16,
        rows=3 if ways == 3 else 4, chunk=24 if ways == 3 else 16, patches=16 if config.vision else None,
        mesh=None if mesh is None else Mesh.parse(mesh), **options, **given,
    )  # fmt: skip


def check_against_bundle(request: Request, host) -> None:
    memory = compile_bundle(request, host, None)["memory"]
    stages = make_ledger(request).stages
    want = memory.get("stages") or [{"weights": memory["weights"], "states": memory["states"]}]
    assert [{"weights": s.of("weights"), "states": s.of("states")} for s in stages] == want


@pytest.mark.parametrize(
    "name, mesh, options",
    [
        ("kimi-linear-48b", None, {}),
        ("kimi-k3.1-pro", "pp=2,tp=2", {}),
        ("kimi-k3", "dp=2,tp=2", {"exchange": True, "moe_chunks": 2, "redundant_experts": 4}),
        ("kimi-linear-48b", "tp=3", {"pad": True, "ways": 3}),
        ("deepseek-v3.2", "tp=2", {"split_cache": True}),
    ],
    ids=str,
)
def test_weights_and_states_are_those_of_the_compiled_bundle(host, name, mesh, options):
    check_against_bundle(small_request(name, mesh, options), host)


@pytest.mark.heavy
@pytest.mark.parametrize("mesh, options", SHARED, ids=str)
@pytest.mark.parametrize("name", FIXTURES)
def test_weights_and_states_are_those_of_every_bundle_of_a_mesh(host, name, mesh, options):
    check_against_bundle(small_request(name, mesh, options), host)


@pytest.mark.parametrize(
    "name, given", [("kimi-linear-48b", {"weights_format": "int4"}), ("deepseek-v3.2", {"kv_dtype": "int8"})], ids=str
)
def test_packed_experts_and_caches_in_8_bits_count_as_graphs_have_them(host, name, given):
    check_against_bundle(small_request(name, "dp=2,tp=2", {}, **given), host)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def laid_out(request: Request, host) -> list[tuple[int, int]]:
    """Bytes of weights that the graphs of each stage read in a layout that no reader takes, and in one of several."""
    found: dict[int, dict[str, tuple[int, bool, bool]]] = {}
    for graph in (g for b in request.buckets() for g in build_all(request, b, host, Clock())):
        seen = view(graph.model.graph[0])
        for name in graph.weights:
            node = seen.by_name[f"p.{name}" if f"p.{name}" in seen.by_name else name]
            desc = node.op.output_desc[0]
            ports = {(r.node.type, r.node.ins[r.position].name.rstrip("0")) for r in seen.readers[Edge(node.name, 0)]}
            taken = [layouts_of(type_, port, desc.dtype) for type_, port in ports]
            right = all(desc.layout in layouts for layouts in taken)
            either = right and all(len(layouts) > 1 for layouts in taken)
            found.setdefault(graph.stage or 0, {})[name] = bytes_of(desc), not right, either
    return [
        (sum(n for n, wrong, _ in own.values() if wrong), sum(n for n, _, either in own.values() if either))
        for _, own in sorted(found.items())
    ]


@pytest.mark.parametrize(
    "name, chip, given",
    [
        ("kimi-linear-48b", "a3", {}),
        ("kimi-linear-48b", "a3", {"weights_format": "int4"}),
        ("kimi-k3", "950dt", {"weights_format": "native"}),
    ],
    ids=str,
)
def test_bytes_that_ge_would_convert_in_layout_are_those_of_the_compiled_graphs(host, name, chip, given):
    request = dataclasses.replace(small_request(name, "pp=2,tp=2", {}, **given), target=target(chip))
    if given.get("weights_format") == "native":
        experts = (path for path, _ in tree.items(decoder.model_specs(request.config)) if part_of(path) == "experts")
        request = dataclasses.replace(request, stored=dict.fromkeys(experts, "mxfp4"))
        assert request.form == "mxfp4"
    stages = make_ledger(request).stages
    assert [(s.laid_out(True), s.laid_out(False)) for s in stages] == laid_out(request, host)
    assert (sum(s.laid_out(False) for s in stages) > 0) == (not given)  # plain experts are taken in tiles too


def test_a_weight_in_a_layout_that_its_operator_does_not_take_is_a_line(monkeypatch):
    request = small_request("kimi-linear-48b", "tp=2", {})
    monkeypatch.setattr(ledger, "layouts_of", lambda type_, port, dtype: ("FRACTAL_NZ",))
    (stage,) = full_ledger(request, Factors()).stages
    (line,) = [x for x in stage.lines if x.part == "layout"]
    assert line.bytes == stage.laid_out(True) > stage.of("weights") / 2 and "all but" in line.derivation


def test_the_registration_of_grouped_matmul_says_what_lies_in_tiles():
    bf16, int4, fp4 = (layouts_of("GroupedMatmul", "weight", DTYPES[x].proto) for x in ("BF16", "I4", "E2M1"))
    assert (bf16, int4, fp4) == (("ND", "FRACTAL_NZ"), ("ND",), ("FRACTAL_NZ",))
    assert layouts_of("MatMul", "x2", DTYPES["BF16"].proto) == ("ND",)


# ---- Kimi K3 ---------------------------------------------------------------------------------------------------------


@functools.cache
def k3() -> ModelConfig:
    return load_config("kimi-k3")


@functools.cache
def lines_at_ep32():
    """Of a rank of 32 of Ascend 950, each row going to its experts, experts as released."""
    stored = released_formats(k3(), decoder.model_specs(k3()))
    request = Request(
        config=k3(), target=target("950dt"), rows=32, max_len=16384, mesh=Mesh.parse("tp=32"), exchange=True,
        weights_format="native", stored=stored,
    )  # fmt: skip
    (stage,) = make_ledger(request).stages
    return stage


def part(name: str) -> int:
    return sum(size for (_, part, _), size in lines_at_ep32().by_part().items() if part == name)


def line(name: str):
    (found,) = [x for x in lines_at_ep32().lines if x.name == name]
    return found


def test_text_parameters_are_2779_5_billion():
    assert round(parameter_counts(k3()).text / 1e9, 1) == 2779.5


def test_experts_of_a_card_at_ep32_are_42_097_gib():
    assert round(part("experts") / GIB, 3) == 42.097


def test_the_router_is_on_every_rank_in_float32_with_2_201_gib():
    router = line("layers.*.moe.router.float32")
    assert round(router.bytes / GIB, 3) == 2.201 and router.whole
    assert router.derivation == "92 layers x [896, 7168], float32, 4 B each"


def test_latent_projections_are_on_every_rank_with_8_805_gib():
    down, up = line("layers.*.moe.down_latent"), line("layers.*.moe.up_latent")
    assert round((down.bytes + up.bytes) / GIB, 3) == 8.805 and down.whole and up.whole


def test_the_kda_state_of_a_sequence_is_434_1_mb():
    assert round(state_bytes(k3()) / 1e6, 1) == 434.1


def test_the_mla_cache_is_27648_bytes_a_token_and_27_gib_at_a_million():
    capacity = check_length(k3(), 1_048_576, 128)
    assert capacity.bytes == 1_048_576 * 27_648 == 27 * GIB
    latent, rope = line("s.layers.*.mla.latent"), line("s.layers.*.mla.rope")
    assert latent.derivation == "4,097 pages x 128 tokens x 24,576 B = 24 layers x 512 x 2 B"
    assert rope.derivation == "4,097 pages x 128 tokens x 3,072 B = 24 layers x 64 x 2 B"
    assert 24_576 + 3_072 == 27_648


@pytest.mark.parametrize("tensor, number, page", [(8, 1, 1536), (16, 2, 384)])
def test_a_hybrid_page_has_as_many_tokens_as_a_kda_slot_has_bytes_for(tensor, number, page):
    assert hybrid_page(k3(), tensor, number) == page


def test_statistics_of_attention_residuals_take_336_mib_for_24_sites_and_512_tokens():
    assert statistics_bytes(k3(), 512) == 336 * 2**20 == 24 * 512 * 7168 * 4


def test_a_length_that_is_no_whole_page_is_rounded_up_and_one_over_the_limit_refused():
    assert [check_length(k3(), 1_000_000, page).tokens for page in (128, 384)] == [1_000_064, 1_000_320]
    with pytest.raises(ConfigError, match="found 1,048,577, expected 1 to 1,048,576"):
        check_length(k3(), 1_048_577, 128)


def test_four_stages_of_tp32_have_the_layers_of_the_launch_line():
    request = Request(config=k3(), target=target("a3"), mesh=Mesh.parse("pp=4,tp=32"))
    stages = make_ledger(request).stages
    assert [s.layers[1] - s.layers[0] + 1 for s in stages] == [24, 23, 23, 23]
    assert [s.ranks for s in stages] == [(0, 31), (32, 63), (64, 95), (96, 127)]
    latent = [x for s in stages for x in s.lines if x.name == "s.layers.*.mla.latent"]
    assert [int(x.derivation.partition("= ")[2].split()[0]) for x in latent] == [6, 5, 6, 7]


def test_every_line_says_how_its_bytes_come_about():
    for x in lines_at_ep32().lines:
        assert x.bytes > 0 and x.part and x.derivation
