"""Checkpoints are read as they are, without copies, and anything that is not the model's is refused by name."""

import functools
import json
import re
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_graph import formats, tree
from kimi_graph.checkpoint import (
    Checkpoint,
    audit,
    load_packed,
    load_params,
    load_tree,
    param_dtype,
    pieces_of,
    released_formats,
    save_checkpoint,
    write_shards,
)
from kimi_graph.errors import CheckpointError, ConfigError
from kimi_graph.fixture import make_fixture, small_config
from kimi_graph.headers import DTYPES, INDEX, SINGLE, read_header
from kimi_graph.init import init_tensor
from kimi_graph.models import model_specs
from kimi_graph.read_config import load_config, parse_config
from kimi_graph.spec import weight

CONFIG = parse_config(small_config(load_config("kimi-linear-48b"), 2), origin="", name="two layers")
SPECS = model_specs(CONFIG)


def values(dtype=None):
    """Parameters of CONFIG, in `dtype` or as released."""
    return tree.map_with_path(lambda path, s: init_tensor(s, path).to(dtype or param_dtype(s, CONFIG.dtype)), SPECS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of CONFIG in several files. Not to be written to."""
    folder = tmp_path_factory.mktemp("checkpoint") / "saved"
    save_checkpoint(folder, SPECS, values(), CONFIG, max_shard_bytes=2_000_000)
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    """A copy of it in one file, and nothing else: to be changed."""
    folder = tmp_path / "copy"
    folder.mkdir()
    write_shards(folder, SPECS, values(), CONFIG.dtype, 1 << 40)
    return folder


def released(folder) -> dict[str, torch.Tensor]:
    """The tensors of a folder, read by the safetensors library."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for f in files for name, tensor in safetensors.torch.load_file(f).items()}


def same(a, b) -> bool:
    """Bytes and dtype, NaN included."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# Loading.


def test_parameters_come_back_as_they_were_saved(saved):
    loaded = dict(tree.items(load_params(saved, CONFIG)))
    for path, value in tree.items(values()):
        assert loaded[path].shape == value.shape
        assert same(loaded[path], value), path


def test_every_parameter_is_assigned_even_where_memory_holds_nan(saved):  # case W11
    torch.use_deterministic_algorithms(True)  # torch.empty now gives memory full of NaN
    try:
        assert torch.empty(3).isnan().all()
        params = load_params(saved, CONFIG, dtype=torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(bool(x.isfinite().all()) for x in tree.leaves(params))


def test_loading_twice_gives_equal_bytes(saved):  # case W10
    checkpoint = Checkpoint.open(saved)
    once, twice = load_params(checkpoint, CONFIG), load_params(checkpoint, CONFIG)
    assert all(same(a, b) for a, b in zip(tree.leaves(once), tree.leaves(twice), strict=True))


def test_a_parameter_of_one_tensor_is_a_view_of_the_file(saved):
    checkpoint = Checkpoint.open(saved)
    params = load_params(checkpoint, CONFIG)
    query = params.layers[0].kda.query
    assert query.shape == (4, 128, 256)
    stored = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    assert query.data_ptr() == stored.data_ptr()


def test_writing_to_a_parameter_does_not_change_the_file(saved):
    before = {f.name: f.read_bytes() for f in saved.iterdir()}
    load_params(saved, CONFIG).layers[0].kda.query.zero_()
    assert {f.name: f.read_bytes() for f in saved.iterdir()} == before
    assert load_params(saved, CONFIG).layers[0].kda.query.any()


def test_experts_are_stacked_in_order_gate_before_up(saved):
    moe = load_params(saved, CONFIG).layers[1].moe
    stored = released(saved)
    for e in range(16):
        at = f"model.layers.1.block_sparse_moe.experts.{e}."
        assert torch.equal(moe.gate_up[e, 0], stored[at + "w1.weight"])
        assert torch.equal(moe.gate_up[e, 1], stored[at + "w3.weight"])
        assert torch.equal(moe.down[e], stored[at + "w2.weight"])


@pytest.mark.parametrize(
    "dtype, fixed",
    [
        (None, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_fixed_parameters_stay_float32_unless_all_are_float64(saved, dtype, fixed):
    layer = load_params(saved, CONFIG, dtype=dtype).layers[1]
    kda = load_params(saved, CONFIG, dtype=dtype).layers[0].kda
    assert {kda.log_rate.dtype, kda.decay_bias.dtype, layer.moe.bias.dtype} == {fixed}
    assert {kda.query.dtype, kda.norm.dtype, layer.moe.router.dtype, layer.moe.down.dtype} == {dtype or CONFIG.dtype}


def test_a_dtype_that_is_no_float_is_refused(saved):
    with pytest.raises(ConfigError, match="expected float64, float32, bfloat16 or float16"):
        load_params(saved, CONFIG, dtype=torch.int32)


def test_one_layer_is_loaded_alone(saved):
    whole, part = load_params(saved, CONFIG), load_params(saved, CONFIG, layers=[1])
    assert {path.split(".")[1] for path, _ in tree.items(part)} == {"1"}
    assert part.layers[0].kda is part.embed is part.norm is part.head is None
    for a, b in zip(tree.leaves(part.layers[1]), tree.leaves(whole.layers[1]), strict=True):
        assert same(a, b)


@pytest.mark.parametrize("layers", [[2], [-1], [0, 7]])
def test_a_layer_the_model_does_not_have_is_refused(saved, layers):
    with pytest.raises(ConfigError, match="the model has the layers 0 to 1"):
        load_params(saved, CONFIG, layers=layers)


@pytest.mark.parametrize("name", ["q_conv1d.weight", "o_norm.weight", "A_log", "dt_bias", "e_score_correction_bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_convolutions_norms_and_biases_are_read_in_either_dtype(copy, name, dtype):
    tensors = released(copy)
    (full,) = (n for n in tensors if n.endswith(name))
    tensors[full] = tensors[full].to(dtype)
    safetensors.torch.save_file(tensors, copy / SINGLE)
    loaded = {s.source[0]: x for s, x in zip(tree.leaves(SPECS), tree.leaves(load_params(copy, CONFIG)), strict=True)}
    spec = next(s for s in tree.leaves(SPECS) if s.source[0] == full)
    assert loaded[full].dtype == param_dtype(spec, torch.bfloat16)
    assert torch.equal(loaded[full].flatten().float(), tensors[full].flatten().to(loaded[full].dtype).float())


# Audit.


def test_opening_and_auditing_reads_no_data(saved, tmp_path):
    """The data of every file is a hole of the right size: headers alone decide."""
    for file in saved.iterdir():
        head = file.read_bytes()
        if file.suffix == ".safetensors":
            head = head[: 8 + struct.unpack("<Q", head[:8])[0]]
        (tmp_path / file.name).write_bytes(head)
        with (tmp_path / file.name).open("r+b") as f:
            f.truncate(file.stat().st_size)
    assert audit(SPECS, Checkpoint.open(tmp_path), CONFIG.dtype).ok


def test_each_kind_of_difference_has_its_own_message_count_and_first_names(copy):
    tensors = released(copy)
    experts = [f"model.layers.1.block_sparse_moe.experts.{e}.w1.weight" for e in range(16)]
    for name in experts[:10]:
        del tensors[name]
    tensors["model.layers.0.self_attn.rotary.inv_freq"] = torch.ones(3)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].T.contiguous()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    safetensors.torch.save_file(tensors, copy / SINGLE)
    found = audit(SPECS, Checkpoint.open(copy), CONFIG.dtype)
    assert not found.ok
    assert found.missing == tuple(experts[:10])
    assert found.unexpected == ("model.layers.0.self_attn.rotary.inv_freq",)
    assert found.shapes == ("lm_head.weight: found [256, 512], expected [512, 256]",)
    assert found.dtypes == ("model.norm.weight: found F32, expected BF16",)
    with pytest.raises(CheckpointError) as e:
        load_params(copy, CONFIG)
    message = str(e.value)
    assert "10 tensors missing, the model needs them:" in message
    assert "... and 2 more" in message
    assert experts[7] in message
    assert experts[8] not in message
    for kind in ("1 tensors unexpected", "1 tensors of a wrong shape", "1 tensors of a wrong dtype"):
        assert kind in message


def test_no_tensor_may_be_left_out(copy):  # case W11
    """Every single name of the model is needed."""
    checkpoint = Checkpoint.open(copy)
    for name in checkpoint.tensors:
        rest = {k: v for k, v in checkpoint.tensors.items() if k != name}
        assert audit(SPECS, Checkpoint(copy, rest), CONFIG.dtype).missing == (name,)


def test_a_model_of_another_dtype_is_told_which_the_file_has(saved):
    config = parse_config(CONFIG.source | {"dtype": "float32"}, origin="", name="wide")
    with pytest.raises(CheckpointError, match=r"of a wrong dtype:\n .*embed_tokens.weight: found BF16, expected F32"):
        load_params(saved, config)


# Files that are not what they should be.


def put(folder, header, data=b"", length=None, name=SINGLE):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return folder


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header, data, message",
    [
        ({"a": entry()}, b"x" * 7, "a: ends at byte .*: the file is cut short"),
        ({"a": entry()}, b"x" * 9, "1 bytes after the last tensor belong to none"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, b"x" * 12, "b: starts at byte .*: it overlaps another tensor"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, b"x" * 20, "b: starts at byte .*: it leaves a gap"),
        ({"a": entry(offsets=(8, 0))}, b"x" * 8, r"a: data_offsets hold -8 bytes, F32 \[2\] has 8"),
        ({"a": entry(shape=(3,))}, b"x" * 8, r"a: data_offsets hold 8 bytes, F32 \[3\] has 12"),
        ({"a": entry(shape=(2**40, 2**40))}, b"x" * 8, "a: data_offsets hold 8 bytes"),
        ({"a": entry(shape=(-2,))}, b"x" * 8, r"a: shape \[-2\]"),
        ({"a": entry(shape=(2.0,))}, b"x" * 8, r"a: shape \[2.0\]"),
        ({"a": entry(shape=(True, 2))}, b"x" * 8, r"a: shape \[True, 2\]"),
        ({"a": entry(offsets=(-8, 0))}, b"x" * 8, r"a: shape .* or data_offsets \[-8, 0\] are not sizes"),
        ({"a": entry(offsets=(0, 8, 9))}, b"x" * 8, "a: shape .* are not sizes"),
        ({"a": entry(dtype="F31")}, b"x" * 8, "a: unknown dtype 'F31'; known are BOOL, "),
        ({"a": entry(dtype=["F32"])}, b"x" * 8, "a: unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"x" * 8, "a: expected dtype, shape and data_offsets"),
        ({"a": None}, b"", "a: expected dtype, shape and data_offsets"),
        (b'{"a": 1, "a": 1}', b"", 'the key "a" is given twice'),
        (b'{"a": ', b"", "not JSON at line 1"),
        (b"[]", b"", "expected a JSON object"),
        (b"\xff\xff", b"", "not text"),
    ],
)
def test_a_damaged_header_is_refused_with_file_and_tensor(tmp_path, header, data, message):
    folder = put(tmp_path, header, data)
    with pytest.raises(CheckpointError, match=message) as e:
        Checkpoint.open(folder)
    assert str(folder / SINGLE) in str(e.value)


@pytest.mark.parametrize("length", [3, 2**31, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(tmp_path, length):
    with pytest.raises(CheckpointError, match="a header of"):
        Checkpoint.open(put(tmp_path, b"{}", length=length))


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_without_a_length_is_refused(tmp_path, size):
    (tmp_path / SINGLE).write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match="cut short"):
        Checkpoint.open(tmp_path)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_a_changed_header_is_read_or_refused_in_words(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("changed")
    good = {"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", (2, 3), (8, 20))}
    text = bytearray(json.dumps(good).encode())
    text = bytearray(struct.pack("<Q", len(text))) + text + b"x" * 20
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 21))] = data.draw(st.integers(0, 255))
    (folder / SINGLE).write_bytes(bytes(text[: data.draw(st.integers(len(text) - 3, len(text)))]))
    try:
        checkpoint = Checkpoint.open(folder)
    except CheckpointError:
        return
    for name in checkpoint.tensors:
        assert checkpoint.read(name).shape == checkpoint.tensors[name].shape


@pytest.mark.parametrize(
    "file", ["/etc/passwd", "../x.safetensors", "..", ".", "", "sub/x.safetensors", "a\\b", "a\0b"]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, file):
    put(tmp_path, {"a": entry()}, b"x" * 8, name="x.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="expected a plain name of a file in this folder"):
        Checkpoint.open(tmp_path)


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    put(outside, {"a": entry()}, b"x" * 8)
    (inside / SINGLE).symlink_to(outside / SINGLE)
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        Checkpoint.open(inside)


def test_the_links_of_the_hub_cache_are_followed(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    put(blobs, {"a": entry()}, b"x" * 8, name="abc123")
    (snapshot / SINGLE).symlink_to(Path("../../blobs/abc123"))
    assert set(Checkpoint.open(snapshot).tensors) == {"a"}


@pytest.mark.parametrize(
    "weight_map, message",
    [
        ({"a": "x.safetensors"}, "tensors are here that the index does not put here:\n    b"),
        ({"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors"}, "the index puts here are not:\n    c"),
        ({"a": "x.safetensors", "b": "y.safetensors"}, "there is no such file"),
        (["a"], "weight_map: expected an object"),
        ({"a": 5}, "weight_map: expected an object"),
        ({"a": ["x.safetensors"]}, "weight_map: expected an object"),
    ],
)
def test_index_and_files_must_agree(tmp_path, weight_map, message):
    put(tmp_path, {"a": entry(), "b": entry(offsets=(8, 16))}, b"x" * 16, name="x.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_a_folder_without_checkpoint_says_what_is_there(tmp_path):
    with pytest.raises(CheckpointError, match="found neither"):
        Checkpoint.open(tmp_path)
    put(tmp_path, {"a": entry()}, b"x" * 8, name="part.safetensors")
    with pytest.raises(CheckpointError, match=r"there are 1 files such as part\.safetensors, but no index"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="is a file; expected a checkpoint"):
        Checkpoint.open(tmp_path / "part.safetensors")
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoint.open(tmp_path / "nothing")


def test_two_ways_to_read_a_folder_are_refused(copy):
    (copy / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="found both"):
        Checkpoint.open(copy)


def test_a_tensor_that_is_not_there_is_refused_by_name(copy):
    with pytest.raises(CheckpointError, match="no tensor 'model"):
        Checkpoint.open(copy).read("model.nothing")


# What the safetensors library writes is read, and the other way round.


def test_every_dtype_of_the_library_is_read(tmp_path):
    tensors = {code: torch.arange(6).view(2, 3).to(dtype) for code, dtype in DTYPES.items() if code != "F8_E8M0"}
    tensors |= {"F8_E8M0": torch.arange(120, 126, dtype=torch.uint8).view(2, 3).view(torch.float8_e8m0fnu)}
    tensors |= {"empty": torch.empty(0, 5), "scalar": torch.tensor(2.5)}
    safetensors.torch.save_file(tensors, tmp_path / SINGLE)
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert read.shape == tensor.shape
        assert same(read.reshape(-1), tensor.reshape(-1)), name


def test_tensors_that_are_not_aligned_are_read(tmp_path):
    data = torch.tensor([1.5], dtype=torch.bfloat16), torch.tensor([2.5, -3.5])
    raw = b"".join(bytes(t.view(torch.uint8).tolist()) for t in data)
    put(tmp_path, {"a": entry("BF16", (1,), (0, 2)), "b": entry("F32", (2,), (2, 10))}, raw)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("a").tolist() == [1.5]
    assert checkpoint.read("b").tolist() == [2.5, -3.5]
    assert checkpoint.read("b").data_ptr() % 4 == 0


def test_the_library_reads_what_we_write(saved):
    tensors = released(saved)
    assert tensors.keys() == Checkpoint.open(saved).tensors.keys()
    for spec, value in zip(tree.leaves(SPECS), tree.leaves(values()), strict=True):
        parts = value.reshape(len(spec.source), *spec.stored)
        assert all(same(tensors[name], part) for name, part in zip(spec.source, parts, strict=True))


def test_shards_keep_to_their_size_and_the_index_lists_all(saved):
    index = json.loads((saved / INDEX).read_text())
    files = sorted(saved.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == [f.name for f in files]
    assert index["metadata"]["total_size"] == sum(s.numel * (4 if s.dtype else 2) for s in tree.leaves(SPECS))
    for file in files:
        tensors = read_header(file).values()
        assert sum(t.end - t.begin for t in tensors) <= 2_000_000
        assert all(t.begin % t.dtype.itemsize == 0 for t in tensors)


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@given(st.lists(st.tuples(SHAPES, st.integers(1, 3), st.sampled_from([None, torch.float32])), max_size=6), st.data())
@settings(max_examples=40, deadline=None)
def test_any_tree_comes_back(tmp_path_factory, params, data):
    folder = tmp_path_factory.mktemp("any")
    specs = {
        str(i): weight(
            (count, *shape),
            " ".join("_" * (len(shape) + 1)),
            source=tuple(f"t.{i}.{j}" for j in range(count)),
            dtype=dt,
        )
        if count > 1
        else weight(shape, " ".join("_" * len(shape)), source=f"t.{i}", dtype=dt)
        for i, (shape, count, dt) in enumerate(params)
    }
    tensors = tree.map_with_path(lambda p, s: init_tensor(s, p).to(param_dtype(s, torch.bfloat16)), specs)
    write_shards(folder, specs, tensors, torch.bfloat16, data.draw(st.integers(1, 200)))
    checkpoint = Checkpoint.open(folder)
    assert audit(specs, checkpoint, torch.bfloat16).ok
    back = load_tree(specs, checkpoint, torch.bfloat16)
    assert all(same(tensors[k], back[k]) and tensors[k].shape == back[k].shape for k in tensors)


# Writing.


def test_a_tensor_that_is_not_contiguous_is_made_so_with_a_note(tmp_path, caplog):  # case A4
    params = values()
    turned = params.embed.T.contiguous().T
    assert not turned.is_contiguous()
    with caplog.at_level("INFO", "kimi_graph.checkpoint"):
        save_checkpoint(tmp_path / "turned", SPECS, tree.replace(params, embed=turned), CONFIG)
    assert caplog.messages == ["embed: not contiguous, written from a contiguous copy"]
    assert same(load_params(tmp_path / "turned", CONFIG).embed, params.embed)


def test_other_float_dtypes_are_written_in_the_released_ones(tmp_path, saved):
    save_checkpoint(tmp_path / "wide", SPECS, values(torch.float64), CONFIG, max_shard_bytes=2_000_000)
    assert {f.name: f.read_bytes() for f in (tmp_path / "wide").iterdir()} == {
        f.name: f.read_bytes() for f in saved.iterdir()
    }


@pytest.mark.parametrize(
    "embed, message",
    [
        (torch.ones(256, 512), r"embed: shape \[256, 512\], expected \[512, 256\]"),
        (None, "embed: found NoneType, expected a tensor"),
        (torch.ones(512, 256, dtype=torch.int64), "embed: torch.int64 on cpu; expected a float tensor"),
        (torch.ones(512, 256, device="meta"), "expected a float tensor that has data"),
    ],
)
def test_a_wrong_parameter_is_refused_and_nothing_is_written(tmp_path, embed, message):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "new", SPECS, tree.replace(values(), embed=embed), CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_without_a_place_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no place in the model:\n    b"):
        write_shards(tmp_path, {"a": weight((2,), "_", source="a")}, {"a": torch.ones(2), "b": 1}, torch.bfloat16, 9)


def test_a_folder_that_exists_is_not_written_to(saved):
    with pytest.raises(CheckpointError, match="exists already"):
        save_checkpoint(saved, SPECS, values(), CONFIG)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("kimi_graph.checkpoint._raw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(tmp_path / "new", SPECS, values(), CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_fixture_is_a_checkpoint_of_its_own_config(tmp_path):
    made = make_fixture(load_config("kimi-linear-48b"), tmp_path / "tiny", layers=2)
    assert load_config(tmp_path / "tiny") == made.config
    assert audit(model_specs(made.config), Checkpoint.open(tmp_path / "tiny"), made.config.dtype).ok


# Quantised weights.

QUANTISED = ("kimi-k3", "kimi-k2.5", "deepseek-v3.2")


@functools.cache
def small(name):
    """A model of two layers, quantised as released, its specs and random parameters in float32."""
    config = parse_config(small_config(load_config(name), 2, quantised=True), origin="", name="small")
    specs = model_specs(config)
    params = tree.map_with_path(lambda path, s: init_tensor(s, path).to(param_dtype(s, config.dtype)), specs)
    return config, specs, params


@pytest.fixture(scope="module", params=QUANTISED)
def packed(request, tmp_path_factory):
    """A checkpoint with released names and formats, its config, specs and parameters. Not to be written to."""
    config, specs, params = small(request.param)
    folder = tmp_path_factory.mktemp("packed") / "packed"
    save_checkpoint(folder, specs, params, config, packed=released_formats(config, specs))
    return folder, config, specs, params


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_quantised_parameters_are_what_their_format_keeps(packed, dtype):
    folder, config, specs, params = packed
    forms = released_formats(config, specs)
    loaded, placed = dict(tree.items(load_params(folder, config, dtype))), dict(tree.items(specs))
    for path, value in tree.items(params):
        if (form := forms.get(path)) is None:
            assert torch.equal(loaded[path], value.to(loaded[path].dtype)), path
            continue
        for part, whole in zip(*(x.reshape(-1, *placed[path].stored) for x in (loaded[path], value)), strict=True):
            assert torch.equal(part, formats.unpack(form, formats.pack(form, whole), dtype)), path


def test_released_names_of_quantised_weights(packed):
    folder, config, _, _ = packed
    names = {name.rpartition("experts.")[2] for name in Checkpoint.open(folder).tensors if ".experts.0." in name}
    expected = {
        "mxfp4": {f"0.{w}.{part}" for w in ("w1", "w2", "w3") for part in ("weight_packed", "weight_scale")},
        "int4": {
            f"0.{w}_proj.{part}"
            for w in ("gate", "up", "down")
            for part in ("weight_packed", "weight_scale", "weight_shape")
        },
        "fp8": {f"0.{w}_proj.{part}" for w in ("gate", "up", "down") for part in ("weight", "weight_scale_inv")},
    }
    assert names == expected[config.quant.format]


def test_the_number_of_tensors_and_bytes_of_kimi_k3_is_the_released_one():
    config = load_config("kimi-k3")
    specs = model_specs(config)
    pieces = pieces_of(specs, config.dtype, released_formats(config, specs))
    assert len(pieces) == 497_220
    assert sum(p.bytes for p in pieces) == 1_560_860_324_864
    shapes = {p.name: (p.dtype, p.shape) for p in pieces if ".layers.5.block_sparse_moe.experts.895." in p.name}
    at = "language_model.model.layers.5.block_sparse_moe.experts.895"
    assert shapes[f"{at}.w1.weight_packed"] == (torch.uint8, (3072, 1792))
    assert shapes[f"{at}.w2.weight_scale"] == (torch.uint8, (3584, 96))


def test_experts_are_dequantised_one_at_a_time(monkeypatch, packed):
    """Beside the stack itself, memory holds one matrix."""
    folder, config, specs, _ = packed
    experts = dict(tree.items(specs))["layers.1.moe.gate_up"]
    sizes = []
    unpack = formats.unpack
    monkeypatch.setattr(formats, "unpack", lambda *a: sizes.append((made := unpack(*a)).numel()) or made)
    load_tree(experts, Checkpoint.open(folder), config.dtype)
    assert sizes == [experts.numel // len(experts.source)] * len(experts.source)


def test_a_scale_that_is_nan_is_refused_with_its_tensor(tmp_path):  # case W3
    config, specs, params = small("kimi-k3")
    write_shards(tmp_path, specs, params, config.dtype, 1 << 40, released_formats(config, specs))
    tensors = released(tmp_path)
    name = "language_model.model.layers.1.block_sparse_moe.experts.2.w3"
    tensors[f"{name}.weight_scale"][0, 1] = 255
    safetensors.torch.save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}\.weight: weight_scale\[0, 1\] is 255, which is NaN"):
        load_params(tmp_path, config)


def test_parts_that_are_stored_in_the_format_asked_for_are_taken_as_they_are(packed):
    folder, config, specs, _ = packed
    checkpoint, form = Checkpoint.open(folder), config.quant.format
    spec = dict(tree.items(specs))["layers.1.moe.gate_up"]
    whole = load_packed(spec, checkpoint, form)
    stems = [s.removesuffix(".weight") for s in spec.source]
    for part, stack in whole.items():
        assert stack.shape[:2] == spec.shape[:2]
        for made, stem in zip(stack.flatten(0, 1), stems, strict=True):
            assert same(made, checkpoint.read(f"{stem}.{part}"))


@pytest.mark.parametrize("to", ["int8-g32", "int4-g32"])
def test_a_stack_is_packed_anew_in_another_format(packed, to):
    folder, config, specs, _ = packed
    checkpoint = Checkpoint.open(folder)
    spec = dict(tree.items(specs))["layers.1.moe.down"]
    parts = load_packed(spec, checkpoint, to)
    exact = load_tree(spec, checkpoint, torch.float64)
    made = formats.unpack(to, parts, torch.float64)
    assert made.shape == spec.shape
    kept = {"mxfp4": ("int8-g32",), "int4": ("int8-g32", "int4-g32"), "fp8": ()}[config.quant.format]
    assert torch.equal(made, exact) == (to in kept)


def test_what_is_no_matrix_cannot_be_packed(packed):
    folder, _, specs, _ = packed
    with pytest.raises(CheckpointError, match=r"norm.weight: \[\d+\] is not a matrix to be stored as int8-g32"):
        load_packed(specs.norm, Checkpoint.open(folder), "int8-g32")


# Padding.

RATES = "language_model.model.layers.0.self_attn.A_log"


@pytest.fixture
def padded(tmp_path):
    """A parameter of 96 heads in a tensor of 128, as Kimi K3 stores it; the folder, and a function that writes it."""
    spec = weight((96,), "heads", source=RATES, stored=(128,), dtype=torch.float32, padding=32)

    def write(**changes):
        values = torch.cat([torch.arange(1.0, 97.0), torch.zeros(32)])
        for index, value in changes.items():
            values[int(index[1:])] = value
        safetensors.torch.save_file({RATES: values}, tmp_path / SINGLE)
        return Checkpoint.open(tmp_path)

    return spec, write


def test_padding_is_no_part_of_a_parameter(padded):  # case W1
    spec, write = padded
    checkpoint = write()
    assert audit({"a": spec}, checkpoint, torch.bfloat16).ok
    heads = load_tree(spec, checkpoint, torch.bfloat16)
    assert (heads.shape, heads.dtype) == ((96,), torch.float32)
    for ways, rank, first, last in ((8, 7, 84, 95), (32, 31, 93, 95)):
        assert heads.chunk(ways)[rank].tolist() == [float(i) for i in range(first + 1, last + 2)]


def test_padding_that_is_not_zero_is_refused(padded):  # case W1
    spec, write = padded
    words = rf"{re.escape(RATES)}: 128 elements for a parameter of 96: .* must be zero, but element 100 is 0\.5"
    with pytest.raises(CheckpointError, match=words):
        load_tree(spec, write(i100=0.5), torch.float64)


def test_padding_is_written_as_zeros(tmp_path, padded):
    spec, _ = padded
    write_shards(tmp_path, {"a": spec}, {"a": torch.arange(1.0, 97.0)}, torch.bfloat16, 1 << 30)
    assert released(tmp_path)[RATES].tolist() == [*map(float, range(1, 97)), *[0.0] * 32]


def test_sizes_of_one_are_dropped_and_added_by_writers(copy):
    tensors = released(copy)
    conv, rates = (f"model.layers.0.self_attn.{n}" for n in ("q_conv1d.weight", "A_log"))
    assert tensors[conv].shape == (512, 1, 4)
    assert tensors[rates].shape == (1, 1, 4, 1)
    before = load_params(copy, CONFIG)
    tensors |= {conv: tensors[conv][:, 0].contiguous(), rates: tensors[rates].flatten()}
    safetensors.torch.save_file(tensors, copy / SINGLE)
    after = load_params(copy, CONFIG)
    assert all(same(a, b) for a, b in zip(tree.leaves(before), tree.leaves(after), strict=True))


# Names.


def test_two_names_that_differ_in_a_dot_are_two_tensors(tmp_path):  # case W7
    """`a.b_c` and `a_b.c` would be one file where dots become underscores."""
    names = ("self_attention_res.proj_weight", "self_attention_res_proj.weight")
    specs = {str(i): weight((1, 4), "_ _", source=name) for i, name in enumerate(names)}
    values = {str(i): torch.full((1, 4), float(i)) for i in range(2)}
    write_shards(tmp_path, specs, values, torch.bfloat16, 1 << 30)
    checkpoint = Checkpoint.open(tmp_path)
    assert audit(specs, checkpoint, torch.bfloat16).ok
    loaded = load_tree(specs, checkpoint, torch.float32)
    assert all(torch.equal(loaded[k], values[k]) for k in values)


@pytest.mark.parametrize(
    "prefix, older", [("", False), ("model.", True), ("language_model.", True), ("model.language_model.", False)]
)  # case W7
def test_a_checkpoint_under_other_names_is_the_same_model(tmp_path, prefix, older):
    config, specs, params = small("kimi-k3")
    write_shards(tmp_path, specs, params, config.dtype, 1 << 40, released_formats(config, specs))
    before = load_params(tmp_path, config)

    def renamed(name):
        name = name.replace("language_model.model.", prefix).replace("language_model.lm_head", "lm_head")
        if older:
            name = re.sub(r"_res_(proj|norm)\.weight$", r"_res.\1_weight", name)
            name = name.replace("mm_projector.proj.0", "mm_projector.linear_1")
            name = name.replace("mm_projector.proj.2", "mm_projector.linear_2")
        return name

    tensors = {renamed(name): tensor for name, tensor in released(tmp_path).items()}
    safetensors.torch.save_file(tensors, tmp_path / SINGLE)
    after = load_params(tmp_path, config)
    assert all(same(a, b) for a, b in zip(tree.leaves(before), tree.leaves(after), strict=True))


def test_w1_is_gate_w3_is_up_and_w2_is_down(packed):  # case W3
    folder, config, _, _ = packed
    if config.model_type != "kimi_k3":
        return
    moe = load_params(folder, config).layers[1].moe
    stored = released(folder)
    for e in (0, 7, 15):
        at = f"language_model.model.layers.1.block_sparse_moe.experts.{e}."
        for name, matrix in (("w1", moe.gate_up[e, 0]), ("w3", moe.gate_up[e, 1]), ("w2", moe.down[e])):
            parts = {part: stored[f"{at}{name}.{part}"] for part in ("weight_packed", "weight_scale")}
            assert torch.equal(matrix, formats.unpack("mxfp4", parts, torch.bfloat16))
