"""`kimi-graph shard`: what it says of a model on a mesh, and what it refuses."""

import json
import math
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kimi_graph as kg
from kimi_graph import cli, tree
from kimi_graph.compile import targets
from kimi_graph.display import columns
from kimi_graph.errors import CompileError, ConfigError, ShardingError
from kimi_graph.models import model_specs
from kimi_graph.parallel import Mesh
from kimi_graph.parallel.links import DOMAINS, domains_spanned
from kimi_graph.shard import (
    Request,
    explain_parameter,
    legal_meshes,
    meshes_of,
    ranks_text,
    shard_model,
)

PAGE = Path(kg.__file__).resolve().parent.parent / "docs" / "sharding.md"


def request(model, mesh, **kwargs):
    return Request(config=kg.load_config(model), mesh=Mesh.parse(mesh), **kwargs)


def command(*arguments):
    return CliRunner().invoke(cli.app, ["shard", *arguments], prog_name="kimi-graph")


@pytest.fixture(scope="module")
def launch():
    """The launch line of the model's documentation."""
    return shard_model(request("kimi-k3.1-pro", "pp=4,tp=32", max_len=1_000_000))


# ---- for programs ----------------------------------------------------------------------------------------------------


def test_bytes_of_the_ranks_are_those_of_their_stages(launch):
    plan = kg.shard_plan("kimi-k3.1-pro", "pp=4,tp=32", max_len=1_000_000)
    assert plan == launch
    for rank in (0, 31, 32, 127):
        held, stage = plan.rank(rank), plan.stages[rank // 32]
        assert (held.stage, held.at["tensor"]) == (rank // 32, rank % 32)
        assert (held.weights, held.states) == (stage.weights, stage.states)
    assert plan.rank(0).parts["embed"] == 163_840 // 32 * 7168 * 2 and "embed" not in plan.rank(127).parts
    assert repr(plan.rank(3)).splitlines()[0] == "rank 3 of stage 0: 45.00 GB of weights, 8.46 GB of states"
    with pytest.raises(ShardingError, match="no rank 128; there are 0 to 127"):
        plan.rank(128)


def test_a_placement_says_which_ranks_of_a_stage_hold_an_expert(launch):
    placed = launch.placement("layers.3.moe.gate_up")
    assert placed.path == "layers.3.moe.gate_up" and placed.own(0, 0) == range(28)
    assert [rank for rank in placed.where(0, 29) if rank < 32] == [1]
    assert launch.placement("s.layers.3.mla.latent").axes == ("pages", "_", "latent")
    with pytest.raises(ShardingError, match=r"no parameter 'layers\.3\.moe\.gate'; nearest: layers\.3\.moe\."):
        launch.placement("layers.3.moe.gate")


def test_one_rule_can_be_another():
    usual, whole = (kg.shard_plan("kimi-linear-48b", "tp=4", rules=r) for r in (None, {"vocab": None}))
    config = usual.request.config
    assert whole.rank(0).weights - usual.rank(0).weights == 2 * config.vocab * config.embed * 2 * 3 // 4
    assert {p.part for p in usual.collectives} - {p.part for p in whole.collectives} == {"embed"}


def test_a_rule_that_no_operator_can_follow_is_refused_at_the_line_of_the_layer():
    plan = kg.shard_plan("kimi-linear-48b", "tp=4", rules={"heads": None, "key": "tensor"})
    (kda,) = (p for p in plan.collectives if p.part == "kda")
    assert kda.refused.startswith("layers/kda.py:") and "l2_norm" in kda.refused
    with pytest.raises(ShardingError, match="no logical axis 'head'; the nearest is 'heads'"):
        kg.shard_plan("kimi-linear-48b", "tp=4", rules={"head": None})
    with pytest.raises(ShardingError, match="would split both 'vocab' and 'embed'"):
        kg.shard_plan("kimi-linear-48b", "tp=4", rules={"embed": "tensor"})


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_every_parameter_is_in_one_kind_and_bytes_of_all_ranks_are_those_of_the_model(launch):
    config = launch.request.config
    specs = dict(tree.items(model_specs(config)))
    assert sorted(path for kind in launch.parameters for path in kind.paths) == sorted(specs)
    whole = sum(s.numel * (s.dtype or config.dtype).itemsize for s in specs.values())
    assert whole == sum(kind.bytes * 32 // kind.placement.replicas for kind in launch.parameters)


def test_stages_of_k3_are_as_published(launch):
    """Public case M3: 24, 23, 23 and 23 layers; hidden states and 2, 4, 6 closed residual blocks cross."""
    stages = launch.to_json()["stages"]
    assert [s["layers"] for s in stages] == [[0, 23], [24, 46], [47, 69], [70, 92]]
    assert [s["mixers"]["mla"] for s in stages] == [6, 5, 6, 7]
    assert [s["mixers"]["kda"] for s in stages] == [18, 18, 17, 16]
    assert [s["edge"] and len(s["edge"]["values"]) - 1 for s in stages] == [2, 4, 6, None]
    assert [s["edge"] and s["edge"]["bytes_per_token"] for s in stages] == [3 * 14336, 5 * 14336, 7 * 14336, None]


def test_weights_as_released_are_those_of_the_published_files():
    """Experts are MXFP4: 1,560,860,324,864 bytes in all. A_log has 128 entries in the file and 96 here."""
    (stage,) = shard_model(request("kimi-k3", "tp=1")).stages
    assert stage.released == 1_560_860_324_864 - 69 * 32 * 4


@pytest.mark.parametrize("tensor", [4, 16, 32])
def test_a_tower_of_12_heads_is_split_or_whole_and_said_and_text_is_as_without_it(tensor):
    """Public case M4: at tp=16 and 32 every rank computes the tower; at tp=4 it is split."""
    plan = shard_model(request("kimi-k3", f"tp={tensor}", phase="vision"))
    towers = [kind for kind in plan.parameters if kind.part == "vision" and "vision_heads" in kind.placement.axes]
    assert towers and {kind.placement.replicas for kind in towers} == {1 if tensor == 4 else tensor}
    said = f"vision: the tower's 12 heads do not divide over tp={tensor}: every rank computes all of it"
    assert (said in plan.notes) == (tensor != 4)
    heads = [k for k in plan.parameters if "heads" in k.placement.axes]
    assert heads and all(k.placement.replicas == 1 for k in heads)


def test_a_tower_that_is_whole_is_said(launch):
    """Public case M4."""
    assert "vision: the tower's 12 heads do not divide over tp=32: every rank computes all of it" in launch.notes
    (row,) = [w for w in launch.whole if "12 heads" in w[1]]
    assert row[0] == "tensor" and row[2] == ("vision", "projector")


def test_axes_that_cross_hosts_are_said_by_target(launch):
    assert "tp=32 crosses hosts: a group spans 2 hosts of 16 dies (a3)" in launch.notes
    near = shard_model(request("kimi-k3.1-pro", "pp=4,tp=32", target="a3-superpod"))
    assert not [note for note in near.notes if "crosses" in note]
    wide = shard_model(request("kimi-k3.1-pro", "dp=8,tp=16"))
    assert [note for note in wide.notes if "crosses" in note] == [
        "ep=128 crosses hosts: a group spans 8 hosts of 16 dies (a3)"
    ]


def test_what_does_not_fit_a_die_is_said_and_what_fits_is_not(launch):
    assert not any("does not fit" in note for note in launch.notes)
    assert any("does not fit" in note for note in shard_model(request("kimi-k3", "tp=8")).notes)


def test_states_of_a_rank_have_a_slot_and_a_page_more_than_its_sequences():
    plan = shard_model(request("kimi-k3.1-pro", "dp=2,cp=2,tp=4", batch=6, max_len=1000))
    local = {kind.name: kind.placement.local for kind in plan.states}
    assert local["s.layers.*.kda.memory"] == (3 + 1, 24, 128, 128)
    assert local["s.layers.*.mla.latent"] == (3 * 8 // 2 + 1, 128, 512)
    assert [w[1] for w in plan.whole if w[0] == "context" and "kda states" in w[2]] == [
        "a row's memory lives where the row is computed; along context each rank has what the last stretch left"
    ]


def test_a_million_tokens_are_rounded_to_whole_pages_on_each_rank():
    plan = shard_model(request("kimi-k3.1-pro", "tp=32", max_len=1_000_000, split_cache=True))
    (latent,) = [k for k in plan.states if k.name.endswith("latent")]
    assert latent.placement.local == (math.ceil(math.ceil(1_000_000 / 128) / 32) + 1, 128, 512)
    assert "caches: 7,813 pages of a sequence rounded up to 7,840, the same on each of its ranks" in plan.notes
    with pytest.raises(ConfigError, match="1,048,577"):
        shard_model(request("kimi-k3.1-pro", "tp=32", max_len=1_048_577))


@pytest.mark.parametrize(
    "model, target, phase, words",
    [
        ("kimi-k3.1-pro", "a3", "decode", "attention: SparseFlashAttention of a3 takes powers of two: "),
        ("kimi-k3.1-pro", "a3", "prefill", "attention: SparseFlashAttention of a3 takes powers of two: "),
        ("kimi-k3.1-pro", "950dt", "decode", ""),
        ("kimi-k3", "a3", "decode", ""),
    ],
)
def test_heads_that_attention_pads_are_said_where_the_target_needs_it(model, target, phase, words):
    """Public case M7: tp=8 leaves 12 heads. The prolog it is about is not used; attention to selected keys takes any
    number of heads on 950 and powers of two on A3, attention to all cached keys any number from CANN 9.2 on."""
    notes = shard_model(request(model, "tp=8", target=target, phase=phase)).notes
    wanted = [f"{words}12 heads of a rank padded to 16 and stripped, 33% more queries"] if words else []
    assert [note for note in notes if note.startswith("attention:")] == wanted


def test_heads_that_are_a_power_of_two_are_not_padded():
    notes = shard_model(request("deepseek-v3.2", "tp=8")).notes
    assert not any(note.startswith("attention:") for note in notes)


def test_heads_of_the_whole_attention_are_those_of_every_rank_where_caches_are_split():
    notes = shard_model(request("kimi-k3.1-pro", "tp=8", split_cache=True)).notes
    assert not any(note.startswith("attention:") for note in notes)  # merged densely, and any number from CANN 9.2 on


def test_experts_on_an_inner_part_are_copied_over_the_rest_and_that_is_said():
    plan = shard_model(request("kimi-k3", "dp=4,tp=32,ep=64"))
    (row,) = [w for w in plan.whole if "experts" in w[2]]
    assert row[:2] == ("data", "ep=64: experts are split over the inner part, and copied over the rest")
    (kind,) = [k for k in plan.parameters if k.name.endswith("gate_up")]
    assert (kind.placement.local[0], kind.placement.replicas) == (14, 2)


def test_padding_is_taken_only_when_asked_for():
    with pytest.raises(ShardingError, match="experts=896 does not divide over 1,024"):
        shard_model(request("kimi-k3", "dp=32,tp=32"))
    plan = shard_model(request("kimi-k3", "dp=32,tp=32", pad=True))
    assert "padded: experts 896 -> 1,024, zeros; the router does not know what is added" in plan.notes
    (kind,) = [k for k in plan.parameters if k.name.endswith("gate_up")]
    assert kind.placement.local[0] == 1


@pytest.mark.parametrize("model", ["kimi-linear-48b", "kimi-k2.5", "deepseek-v3.2", "glm-5", "glm-5.2"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_model_can_be_on_the_usual_mesh(model, phase):
    plan = shard_model(request(model, "pp=2,dp=2,tp=8", phase=phase))
    assert len(plan.stages) == 2
    assert plan.summary.startswith(f"{model} on pp=2,dp=2,tp=8: 32 ranks, at most ")
    assert json.loads(json.dumps(plan.to_json()))["mesh"]["axes"]["tensor"] == 8


@pytest.mark.parametrize("tensor", [8, 16, 32])
def test_a_decode_layer_of_k3_has_one_collective_for_its_mixer_and_three_for_its_experts(tensor):
    plan = shard_model(request("kimi-k3.1-pro", f"pp=4,tp={tensor}", batch=2))
    found = {p.part: [(i.name, i.axes, i.shape) for i in p.issued] for p in plan.collectives}
    hidden = ("all_reduce", ("tensor",), (2, 1, 7168))
    assert found["kda"] == found["mla"] == found["dense"] == found["embed"] == [hidden]
    gathered = ("all_gather", ("tensor",), (2, 3584 // tensor))
    assert found["moe"] == [gathered, ("all_reduce", ("tensor",), (2, 3584)), hidden]
    assert {p.part: p.count for p in plan.collectives} == {"embed": 1, "kda": 69, "mla": 24, "dense": 1, "moe": 92}
    lines = {i.source.split(":")[0] for p in plan.collectives for i in p.issued}
    assert lines == {"models/decoder.py", "layers/kda.py", "layers/mla.py", "layers/ffn.py", "layers/moe.py"}


@pytest.mark.parametrize("tensor, column", [(8, 3), (16, 4), (32, 5)])
def test_bytes_and_collectives_of_a_decode_layer_are_those_of_the_page(tensor, column):
    """At most one collective in KDA, two in DSA and four in MoE was promised."""
    plan = shard_model(request("kimi-k3.1-pro", f"tp={tensor}"))
    parts = {part.part: part for part in plan.collectives}
    rows = [[cell.strip() for cell in line.split("|")] for line in PAGE.read_text().splitlines()]
    for name, part, most in (("KDA", "kda", 1), ("DSA", "mla", 2), ("MoE", "moe", 4)):
        (row,) = [row for row in rows if row[1:2] == [name]]
        assert (row[2], row[column]) == (str(len(parts[part].issued)), f"{parts[part].bytes:,}")
        assert len(parts[part].issued) <= most
    (line,) = [line for line in plan.text().splitlines() if line.startswith("in one part: ")]
    assert f"kda 1 ({parts['kda'].bytes:,} bytes)" in line
    assert {p["part"]: p["bytes"] for p in plan.to_json()["collectives"]} == {n: p.bytes for n, p in parts.items()}


def test_experts_over_data_read_all_rows_and_sum_over_both():
    plan = shard_model(request("kimi-k3", "dp=2,tp=4"))
    (moe,) = [p for p in plan.collectives if p.part == "moe"]
    assert [(i.name, i.axes) for i in moe.issued] == [
        ("all_gather", ("data",)), ("all_gather", ("tensor",)), ("all_reduce", ("data", "tensor")),
        ("all_reduce", ("tensor",)),
    ]  # fmt: skip


def test_one_device_has_no_collectives_and_a_whole_tower_has_none():
    assert shard_model(request("kimi-linear-48b", "tp=1")).collectives == ()
    assert shard_model(request("kimi-k3", "tp=8", phase="vision")).collectives == ()
    assert "no collectives." in shard_model(request("kimi-linear-48b", "pp=3")).text()


def test_padded_experts_and_vocabulary_are_traced_as_padded():
    plan = shard_model(request("kimi-k3", "tp=3", pad=True))
    assert not any(p.refused for p in plan.collectives)


def moe_of(plan):
    return next(part for part in plan.collectives if part.part == "moe")


def test_an_exchange_says_its_collectives_and_what_the_pair_needs():
    plan = shard_model(request("kimi-k3", "dp=4,tp=32,ep=128", batch=1024, exchange=True))
    over = ("data", "tensor")
    assert [(i.name, i.axes, i.shape) for i in moe_of(plan).issued] == [
        ("expert_dispatch", over, (128, 3584)),  # 8 rows of a rank, each to 16 experts
        ("expert_combine", over, (128, 3584)),
        ("reduce_scatter", ("tensor",), (256, 7168)),
        ("all_gather", ("tensor",), (8, 7168)),
    ]
    (note,) = [n for n in plan.notes if n.startswith("exchange:")]
    assert "MoeDistributeDispatchV2 and MoeDistributeCombineV2, 8 rows of a rank" in note
    assert "HCCL_BUFFSIZE of 107 or more" in note


def test_an_exchange_that_the_pair_cannot_do_says_why():
    plan = shard_model(request("kimi-linear-48b", "tp=2", batch=1, phase="prefill", exchange=True, target="a2"))
    assert any("every rank reads all rows of its group" in n and "do not have it for a2" in n for n in plan.notes)
    few = shard_model(request("kimi-k3", "tp=32", batch=64, phase="prefill", exchange=True))
    assert any("1,024 rows of a rank, it takes 512; --moe-chunks 2 or more" in n for n in few.notes)


def test_copies_of_experts_are_placed_and_their_table_is_an_input():
    result = command("kimi-k3", "--mesh", "dp=4,tp=32,ep=128", "--redundant-experts", "128")
    assert result.exit_code == 0
    assert (
        "experts: 896 and 128 copies in 1,024 slots, 8 a rank; layers.*.moe.table, an input of 7,684" in result.stdout
    )
    refused = command("kimi-k3", "--mesh", "tp=32", "--redundant-experts", "5")
    assert refused.exit_code == 1
    assert "901 slots do not divide over 32 ranks. Nearest: 0, 32." in refused.output


def test_chunks_of_an_exchange_are_as_many_pairs():
    result = command("kimi-k3", "--mesh", "tp=32", "--batch", "64", "--exchange", "--moe-chunks", "2", "--json")
    (moe,) = [p for p in json.loads(result.stdout)["collectives"] if p["part"] == "moe"]
    assert [i["collective"] for i in moe["issued"]][:4] == ["expert_dispatch"] * 2 + ["expert_combine"] * 2


def test_a_part_that_a_layer_cannot_do_on_the_mesh_says_so_with_its_line(monkeypatch):
    def refuses(*_):
        def trace(use):
            raise ShardingError("layers/kda.py:129: it cannot.")

        return trace

    monkeypatch.setattr("kimi_graph.shard.sharded_piece_tracer", refuses)
    plan = shard_model(request("kimi-linear-48b", "tp=2"))
    assert "kda cannot run on this mesh yet: layers/kda.py:129: it cannot." in plan.text()
    assert plan.to_json()["collectives"][1]["refused"]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_64_ways_of_96_heads_exit_with_1_and_name_the_nearest():
    """Public case M1."""
    result = command("kimi-k3", "--mesh", "tp=64")
    assert result.exit_code == 1
    assert "error: kimi-k3 cannot be on tp=64:" in result.output
    assert "heads=96" in result.output
    assert "Legal tp: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96; nearest 48" in result.output
    assert "The nearest tp at which everything divides, nothing padded: 32." in result.output


def test_64_ranks_whose_attention_is_16_ways_in_4_copies_are_taken():
    """Public case M1: the same 64 devices with data-parallel attention; experts stay split over all of them."""
    plan = shard_model(request("kimi-k3", "dp=4,tp=16,ep=64"))
    local = {kind.name: kind.placement.local for kind in plan.parameters}
    assert local["layers.*.kda.query"][0] == 6 and local["layers.*.moe.gate_up"][0] == 14
    assert "the same ranks as dp=2,tp=32" in command("kimi-k3", "--mesh", "tp=64").output


def test_a_batch_of_31_is_refused_where_its_rows_are_sent_to_experts():
    """Public case M10, of batches: 31 rows over 32 ranks; 32 pass. Where rows are not split over tp any number does."""
    with pytest.raises(ShardingError, match=r"batch: token=31 does not divide over 32 .* Nearest: 32"):
        shard_model(request("kimi-k3", "tp=32", batch=31, exchange=True))
    shard_model(request("kimi-k3", "tp=32", batch=32, exchange=True))
    shard_model(request("kimi-k3", "tp=32", batch=31))
    with pytest.raises(ShardingError, match="--batch: batch=3 does not divide over 2"):
        shard_model(request("kimi-k3", "dp=2", batch=3))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--mesh", "pp=100"], "pp=100: there are 93 layers"),
        (
            ["--mesh", "tp=8", "--moe-chunks", "2"],
            "--moe-chunks 2: rows are sent to their experts with --exchange alone",
        ),
        (["--mesh", "sp=2"], "unknown axis 'sp'"),
        (["--mesh", "tp=8,ep=16"], "nearest 8"),
        (["--mesh", "tp=8", "--target", "a4"], "a4"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, words):
    result = command("kimi-k3", *arguments)
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if line.startswith("error:")]
    assert words in line


def test_a_mesh_or_a_number_of_devices_is_needed_and_not_both():
    for arguments in ([], ["--mesh", "tp=2", "--devices", "4"]):
        assert command("kimi-k3", *arguments).exit_code == 2


# ---- one parameter ---------------------------------------------------------------------------------------------------


def test_explaining_a_parameter_says_every_step():
    text = explain_parameter(request("kimi-k3.1-pro", "pp=4,dp=4,tp=32,ep=128"), "layers.8.kda.query").text()
    assert "from language_model.model.layers.8.self_attn.q_proj.weight" in text
    assert re.search(r"0  heads +96  tensor  tensor=32 +3  heads do not depend on each other", text)
    assert "of a rank [3, 128, 7168], 5,505,024 bytes of 176,160,768" in text
    assert "stage     0 of 4 (layers 0 to 23): ranks 0 to 127" in text
    assert "heads 3 to 5: ranks 1, 33, 65, 97" in text


def test_explaining_in_a_later_stage_names_that_stages_ranks():
    found = explain_parameter(request("kimi-k3.1-pro", "pp=4,tp=2"), "layers.92.moe.gate_up")
    assert "and 1,791 more" in found.text()
    assert "experts 448 to 895: rank 7" in found.text()
    assert found.to_json()["stages"] == [3]


def test_explaining_states_tied_embeddings_and_padded_axes():
    state = explain_parameter(request("kimi-k3.1-pro", "cp=2,tp=2"), "s.layers.3.mla.latent").text()
    assert "a state" in state and "pages 0 to 16: ranks 0, 1" in state
    padded = explain_parameter(request("kimi-k3", "tp=3", pad=True), "embed").text()
    assert "padded    to [163842, 7168]" in padded


def test_a_name_that_is_not_there_gets_those_of_its_layer():
    with pytest.raises(ShardingError, match=r"no parameter 'layers.7.kda.query'; nearest: layers\.7\.mla\.query,"):
        explain_parameter(request("kimi-k3.1-pro", "tp=2"), "layers.7.kda.query")
    with pytest.raises(ShardingError, match="nearest: embed"):
        explain_parameter(request("kimi-k3.1-pro", "tp=2"), "embedding")
    with pytest.raises(ShardingError, match="heads=96 does not divide"):
        explain_parameter(request("kimi-k3.1-pro", "tp=64"), "layers.8.kda.query")


# ---- meshes of N devices ---------------------------------------------------------------------------------------------


def test_listed_meshes_have_the_bytes_that_shard_says():
    config = kg.load_config("kimi-linear-48b")
    found = meshes_of(Request(config=config, mesh=Mesh()), 8)
    assert legal_meshes(config, 8) == [mesh for mesh, _ in found.meshes]
    assert {str(mesh) for mesh, _ in found.meshes} >= {"tp=8", "dp=2,tp=4", "pp=2,tp=4", "pp=8"}
    for mesh, size in found.meshes[::3]:
        plan = shard_model(Request(config=config, mesh=mesh))
        assert max(s.weights for s in plan.stages) == size
    assert len(found.to_json()) == len(found.meshes)
    assert "8 devices" in found.summary and "weights of a rank" in found.text()


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_last_lines_of_the_command_show_stages_notes_and_what_was_made():
    result = command("kimi-k3.1-pro", "--mesh", "pp=4,tp=32", "--phase", "decode")
    assert result.exit_code == 0
    tail = result.stdout.splitlines()[-40:]
    assert any(line.startswith("the same along") for line in tail)
    assert any("hidden + 6 closed blocks" in line for line in tail)
    assert re.fullmatch(r"kimi-k3\.1-pro on pp=4,tp=32: 128 ranks, at most .* of weights each in [\d.]+ s", tail[-1])


def test_the_command_prints_json_alone():
    for arguments in (
        ["--mesh", "tp=4"],
        ["--mesh", "pp=2,tp=4"],
        ["--mesh", "tp=4", "--explain", "norm"],
        ["--devices", "4"],
    ):
        assert json.loads(command("kimi-linear-48b", *arguments, "--json").stdout)


def test_a_model_of_93_layers_takes_less_than_a_second_once_torch_is_there():
    request_ = request("kimi-k3.1-pro", "pp=4,dp=8,tp=32,ep=128")
    times = []
    for _ in range(3):
        start = time.process_time()
        shard_model(request_).text()
        times.append(time.process_time() - start)
    assert min(times) < 1.0


# ---- links and text --------------------------------------------------------------------------------------------------


def test_every_target_has_a_domain():
    assert set(DOMAINS) == set(targets.TARGETS)
    with pytest.raises(ShardingError, match="target 'a4' is not known"):
        domains_spanned(Mesh(tensor=2), "a4")
    with pytest.raises(CompileError):
        targets.target("a4")


def test_ranks_and_columns_read_well():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(32)) == "ranks 0 to 31"
    assert ranks_text([0, 8]) == "ranks 0, 8"
    assert ranks_text(range(0, 80, 8)) == "ranks 0, 8, 16, 24, ... (10)"
    assert columns([("name", "bytes"), ("a", "1,000"), ("long", "2")]) == ["name  bytes", "a     1,000", "long      2"]
