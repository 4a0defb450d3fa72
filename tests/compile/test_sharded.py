"""Every part of the fixtures on meshes: one trace for all ranks, run in lockstep, equals the part without a mesh."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_graph import tree
from kimi_graph.compile import phases
from kimi_graph.compile.phases import Bucket
from kimi_graph.compile.sharded import ShardedCapture, capture_on, check, run
from kimi_graph.config import DenseConfig, KdaConfig, LayerConfig, ModelConfig, MoeConfig
from kimi_graph.errors import ShardingError
from kimi_graph.init import init_tensor
from kimi_graph.layers import Batch, step_batch, vision_tables
from kimi_graph.models import decoder
from kimi_graph.models.decoder import Use
from kimi_graph.parallel import Mesh, Rules, legality
from kimi_graph.parallel.presets import preset
from kimi_graph.spec import ParamSpec
from tests.compile.family import small_model

MODELS = ("kimi-linear-48b", "kimi-k3", "kimi-k3.1-pro", "deepseek-v3.2", "glm-5.2")
MESHES = ("tp=2", "tp=4", "dp=2,tp=2", "dp=2,tp=2,ep=2")
ROWS, PAGE, PAGES = 4, 16, 6  # 96 tokens a sequence: more than the fixtures' top-k of 64, so that keys are selected
TOKENS = 12  # of a prefill; split over 2 and 4 where the indexer's queries are
BEFORE = torch.tensor([70, 3, 80, 0])
STEPS = torch.ones(ROWS).long()
PATCHES = 16

# Collectives by part, all in all; those of MoE by whether its experts are latent, and whether they are split over data.
SUMS = {"embed": 1, "embed_vision": 1, "kda": 1, "mla": 1, "mla_shared": 1, "dense": 1, "vision_block": 2}
MOE = {"plain": 1, "latent": 3, "plain over data": 3, "latent over data": 4}


@functools.cache
def model(name: str) -> ModelConfig:
    """A preset's fixture."""
    return small_model(name)


def sequence_pages(ways: int) -> int:
    """Pages of a sequence that so many devices share."""
    return -(-PAGES // ways) * ways


def bucket(c: ModelConfig, phase: str, shards: int, ways: int = 1) -> Bucket:
    """Rows, pages and slots of all ranks: each shard of rows has a null page and a null slot of its own.

    Args:
        ways: devices that share a sequence; each has a null page.
    """
    tokens = {"vision": PATCHES, "prefill": TOKENS, "decode": 1}[phase]
    each = sequence_pages(ways)
    pages, slots = ROWS * each + shards * ways, ROWS + shards
    images = 4 if c.vision is not None and phase != "decode" else 0
    return Bucket(
        phase=phase, rows=ROWS, tokens=tokens, page=PAGE, pages=pages, sequence_pages=each, slots=slots, images=images
    )


def page_table(rows: int, ways: int) -> Tensor:
    """Pages of each row: page i of a sequence is one of device i mod ways; page 0 of each device is nobody's."""
    each = sequence_pages(ways) // ways
    own = torch.arange(1, rows * each + 1, dtype=torch.int32).view(rows, each, 1)
    return (own + torch.arange(ways, dtype=torch.int32) * (rows * each + 1)).flatten(1)


def without_null_pages(rules: Rules, name: str, x: Tensor) -> Tensor:
    """A state without the pages that are nobody's: devices write each other's tokens there."""
    if not name.endswith((".latent", ".rope", ".index")):
        return x
    return x.unflatten(0, (rules.ways("pages"), -1))[:, 1:]


def batches(
    c: ModelConfig, b: Bucket, shards: int, ways: int = 1, new: tuple[int, ...] = (TOKENS, 7, 0, 9)
) -> tuple[Batch[Tensor], Batch[Tensor]]:
    """A batch whose ids count through the pools of all shards, and the same with ids within each.

    Args:
        new: tokens of each row in a prefill.
    """
    rows = ROWS // shards
    counts = STEPS if b.step else torch.tensor(new)
    table = page_table(rows, ways)
    slots = torch.arange(1, rows + 1, dtype=torch.int32)
    within, through = [], []
    for i in range(shards):
        some, page = slice(i * rows, (i + 1) * rows), i * b.pages // shards
        own = step_batch(table, slots, BEFORE[some], counts[some], b.tokens, PAGE, rope=c.rotation, dtype=torch.float64)
        within.append(own)
        moved = {"slots": own.slots + i * (rows + 1), "block_table": own.block_table + page}
        through.append(tree.replace(own, slot_mapping=own.slot_mapping + page * PAGE, **moved))
    join = lambda parts: tree.map(lambda *x: torch.cat(x), *parts)  # noqa: E731
    return join(through), join(within)


def number(path: str, like: Tensor) -> Tensor:
    """Any value of an input that is no parameter."""
    if path == "selected":  # ascending, some of a row's tokens and then none
        at = torch.arange(like.shape[-1], dtype=torch.int32)
        return torch.where(at < 4, at, -1).expand(like.shape).contiguous()
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=torch.float64)
    return torch.randint(4, like.shape).to(like.dtype)


def parameter(path: str, spec: ParamSpec) -> Tensor:
    return init_tensor(spec, path).double()


def values_of(c: ModelConfig, b: Bucket, use: Use, args: dict[str, Any], shards: int, ways: int = 1) -> tuple[Any, Any]:
    """Numbers for a part's arguments: on the mesh, and without it."""
    specs = decoder.model_specs(c)
    vision = b.phase == "vision"
    params = phases.vision_part_params(use, specs.vision) if vision else decoder.part_params(use, specs)
    found = {f"in{i}": number(name, args[f"in{i}"]) for i, name in enumerate(use.reads)}
    found |= {"p": tree.map_with_path(parameter, params)}
    found |= {"s": tree.map(lambda x: torch.randn(x.shape, dtype=torch.float64), args["s"])}
    if vision:
        assert c.vision is not None
        tables = vision_tables(c.vision, (1, 4, 4), PATCHES, torch.float64)
        return found | {"tables": tables}, None
    through, within = batches(c, b, shards, ways)
    return found | {"batch": within}, found | {"batch": through}


def parts(c: ModelConfig, b: Bucket, rules: Rules) -> dict[str, ShardedCapture]:
    """Every kind of part, checked where it is used first."""
    piece, axes = phases._piece_at(c, b), phases._piece_axes(c, b)
    shards, found = rules.mesh.data, {}
    for use in phases.uses(c, b):
        if use.part not in found:
            f, args = piece(use)
            values, unsharded = values_of(c, b, use, args, shards, rules.ways("cached"))
            owned = functools.partial(without_null_pages, rules)
            found[use.part] = check(rules, f, values, *axes(use), unsharded=unsharded, compared=owned)
    return found


def counts(found: dict[str, ShardedCapture]) -> dict[str, int]:
    return {part: len(piece.collectives) for part, piece in found.items() if piece.collectives}


def expected(c: ModelConfig, b: Bucket, mesh: Mesh) -> dict[str, int]:
    """Collectives by part, of those that have any."""
    latent = any(getattr(x.ffn, "latent", None) for x in c.layers)
    over_data = mesh.data > 1 and mesh.experts > mesh.tensor
    sums = SUMS | {"moe": MOE[("latent" if latent else "plain") + (" over data" if over_data else "")]}
    selects = not b.step and any(getattr(x.mixer, "indexer", None) for x in c.layers)
    sums |= {"vision_project": 1, "mla": 1 + selects}  # queries of the indexer are shared out, what they find gathered
    return {use.part: sums[use.part] for use in phases.uses(c, b) if use.part in sums}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_parts_of_a_model_on_a_mesh_equal_those_without(name, mesh, phase):
    c, m = model(name), Mesh.parse(mesh)
    b = bucket(c, phase, m.data)
    found = parts(c, b, preset(c, m, phase))
    assert counts(found) == expected(c, b, m)


def in_threes(name: str, vocab: int = 513, experts: int = 15) -> ModelConfig:
    """A preset's fixture with three heads, and sizes that three ranks can share out."""
    c = model(name)

    def sizes(layer: LayerConfig) -> LayerConfig:
        ffn = (
            {"ffn": 192} if isinstance(layer.ffn, DenseConfig) else {"experts": experts, "groups": 1, "kept_groups": 1}
        )
        ffn |= {"shared_ffn": 96} if isinstance(layer.ffn, MoeConfig) else {}
        mixer = dataclasses.replace(layer.mixer, heads=3)
        if isinstance(mixer, KdaConfig):
            mixer = dataclasses.replace(mixer, stored_rates=(3,))
        return dataclasses.replace(layer, mixer=mixer, ffn=dataclasses.replace(layer.ffn, **ffn))

    return dataclasses.replace(c, layers=tuple(map(sizes, c.layers)), vocab=vocab)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("mesh", ["tp=3", "dp=2,tp=3,ep=3"])
@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3.1-pro", "deepseek-v3.2"])
def test_three_ranks_are_as_good_as_two(name, mesh, phase):
    c, m = in_threes(name), Mesh.parse(mesh)
    b = bucket(c, phase, m.data)
    assert counts(parts(c, b, preset(c, m, phase))) == expected(c, b, m)


def padded(c: ModelConfig, rules: Rules) -> Rules:
    """Rules with physical sizes in place of those that do not divide."""
    return rules.padded(legality.pad(legality.sizes_of(decoder.model_specs(c)), rules))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("mesh", ["tp=3", "dp=2,tp=3,ep=3"])
@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3.1-pro", "deepseek-v3.2"])
def test_a_vocabulary_and_experts_that_do_not_divide_are_padded_and_exact(name, mesh, phase):
    c, m = in_threes(name, vocab=512, experts=16), Mesh.parse(mesh)
    rules = padded(c, preset(c, m, phase))
    assert rules.padding == {("vocab", 512): 513, ("experts", 16): 18}
    b = bucket(c, phase, m.data)
    found = parts(c, b, rules)
    assert counts(found) == expected(c, b, m)  # nothing more crosses devices
    assert found["moe"].ins["p.moe.gate_up"].shape[0] == 18
    assert found["moe"].ins["p.moe.router"].shape[0] == 16  # so that none of the others is ever chosen


def test_logits_of_words_that_are_padding_are_minus_infinity():
    c, m = in_threes("kimi-linear-48b", vocab=512), Mesh.parse("tp=3")
    b = bucket(c, "decode", 1)
    head = next(use for use in phases.uses(c, b) if use.part == "head")
    f, args = phases._piece_at(c, b)(head)
    values, _ = values_of(c, b, head, args, 1)
    found = capture_on(padded(c, preset(c, m, "decode")), f, args, *phases._piece_axes(c, b)(head))
    logits = run(found, values)["out.0"]
    assert logits.shape == (ROWS, 513)
    assert logits[:, 512].tolist() == [float("-inf")] * ROWS
    assert logits[:, :512].isfinite().all()


def test_what_does_not_divide_is_refused_without_padding():
    c, m = in_threes("kimi-linear-48b", vocab=512), Mesh.parse("tp=3")
    with pytest.raises(ShardingError, match=r"p\.embed: axis 'vocab' has size 512, not divisible by tensor = 3"):
        parts(c, bucket(c, "decode", 1), preset(c, m, "decode"))


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
def test_parts_of_a_vision_tower_on_a_mesh_equal_those_without(mesh):
    c, m = model("kimi-k3"), Mesh.parse(mesh)
    b = bucket(c, "vision", 1)
    assert counts(parts(c, b, preset(c, m, "vision"))) == expected(c, b, m)


# ---- caches that are split by sequence -------------------------------------------------------------------------------

# Of a mixer in a step: scores and positions of the best keys, log-sum-exps, and the sum that waited for the output.
# In a prefill: pages of the batch, selected positions, and the stretches of the results beside their sum over tensor.
STEP = {"mla": ("all_gather", "all_gather", "all_reduce"), "mla_shared": ("all_gather", "all_reduce")}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("mesh", ["cp=2,tp=2", "cp=4", "cp=2,dp=2", "cp=3"])
@pytest.mark.parametrize("name", MODELS)
def test_parts_of_a_model_whose_caches_are_split_equal_those_without(name, mesh, phase):
    c, m = model(name), Mesh.parse(mesh)
    rules = preset(c, m, phase)
    b = bucket(c, phase, m.data, rules.ways("cached"))
    found = {part: tuple(i.name for i in x.collectives) for part, x in parts(c, b, rules).items()}
    dense = not any(getattr(x.mixer, "indexer", None) for x in c.layers)
    summed = ("all_reduce",) * (m.tensor > 1)
    handed_over = () if b.step else ("all_gather", "all_gather")  # inputs of convolutions, maps of the memory
    kda = (*handed_over, *summed, *(() if b.step else ("all_gather",)))
    assert found.get("kda", kda) == kda
    if b.step:
        assert found["mla"] == STEP["mla_shared" if dense else "mla"]
        assert found.get("mla_shared", STEP["mla_shared"]) == STEP["mla_shared"]
    else:
        read, left = ("all_gather",), (*summed, "all_gather")
        assert found["mla"] == (*read, *(() if dense else ("all_gather",)), *left)
        assert found.get("mla_shared", (*read, *left)) == (*read, *left)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("mesh", ["tp=2", "cp=2,tp=2"])
@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3.1-pro", "glm-5.2"])
def test_caches_may_be_split_over_tensor_as_well(name, mesh, phase):
    c, m = model(name), Mesh.parse(mesh)
    rules = preset(c, m, phase, split_cache=True)
    assert rules.on("cached")[-1] == "tensor"
    found = parts(c, bucket(c, phase, m.data, rules.ways("cached")), rules)
    if phase == "decode":  # heads of the queries are gathered, results scattered to the heads of a rank
        heads = ("all_gather", "all_gather", "reduce_scatter", "all_reduce")
        names = tuple(i.name for i in found["mla"].collectives)
        assert names == (heads if name == "kimi-linear-48b" else ("all_gather", *heads))


@pytest.mark.parametrize("before", [(0, 0, 0, 0), (15, 16, 17, 31), (95, 63, 64, 1)])
@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3.1-pro"])
def test_a_step_is_exact_wherever_sequences_end(name, before, monkeypatch):
    """Before, on and after the boundary of a page; sequences within one page, of which most devices have nothing."""
    monkeypatch.setitem(globals(), "BEFORE", torch.tensor(before))
    c, m = model(name), Mesh.parse("cp=4")
    parts(c, bucket(c, "decode", 1, 4), preset(c, m, "decode"))


@pytest.mark.parametrize("name", ["kimi-linear-48b", "kimi-k3.1-pro"])
def test_rows_without_a_sequence_give_no_nan(name, monkeypatch):
    monkeypatch.setitem(globals(), "BEFORE", torch.tensor([70, 0, 20, 0]))
    monkeypatch.setitem(globals(), "STEPS", torch.tensor([1, 0, 1, 0]))
    c, m = model(name), Mesh.parse("cp=2,tp=2")
    parts(c, bucket(c, "decode", 1, 2), preset(c, m, "decode"))


def test_pages_of_a_sequence_that_do_not_divide_are_refused_with_the_nearest_number():
    c, m = model("kimi-linear-48b"), Mesh.parse("cp=4")
    b = dataclasses.replace(bucket(c, "decode", 1, 4), sequence_pages=6)
    with pytest.raises(
        ShardingError, match=r"sequences of 6 pages do not divide over the 4 devices .* nearest: 8 pages"
    ):
        phases.capture_sharded_pieces(c, b, preset(c, m, "decode"))


def test_equal_scores_on_several_devices_go_to_the_lower_position(monkeypatch):
    """With index weights of zero all scores are equal, and the first tokens are selected."""
    c, m = model("kimi-k3.1-pro"), Mesh.parse("cp=4")
    monkeypatch.setitem(
        globals(), "parameter", lambda path, spec: init_tensor(spec, path).double() * ("weights" not in path)
    )
    found = parts(c, bucket(c, "decode", 1, 4), preset(c, m, "decode"))
    assert "mla" in found
