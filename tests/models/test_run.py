"""Prefill, decode and generate: every way of reading the same tokens gives the same logits."""

import itertools

import pytest
import torch

import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.errors import ConfigError
from kimi_graph.fixture import make_fixture
from kimi_graph.taps import collect

ROUNDING = 1e-12  # float64, sums in another order


@pytest.fixture(scope="module")
def config(tiny):
    return kg.load_config(tiny)


@pytest.fixture(scope="module")
def params(config):
    return kg.init_params(config, seed=1, dtype=torch.float64)


@pytest.fixture(scope="module")
def tokens(config):
    return torch.randint(config.vocab, (2, 70), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def whole(config, params, tokens):
    """Logits of all tokens, read at once."""
    return kg.prefill(config, params, tokens, kg.init_state(config, 2, 70))[0]


def differ(a, b):
    return float((a - b).abs().max() / b.abs().max())


def test_chunks_and_steps_give_the_logits_of_one_prefill(config, params, tokens, whole):
    state, parts = kg.init_state(config, 2, 70, page=16), []
    for start, end in ((0, 1), (1, 17), (17, 64)):
        logits, state = kg.prefill(config, params, tokens[:, start:end], state)
        parts.append(logits)
    for t in range(64, 70):
        logits, state = kg.decode(config, params, tokens[:, t], state)
        parts.append(logits[:, None])
    assert differ(torch.cat(parts, 1), whole) < ROUNDING
    assert state.lengths.tolist() == [70, 70]


def test_last_only_gives_the_last_tokens_logits(config, params, tokens, whole):
    last, _ = kg.prefill(config, params, tokens, kg.init_state(config, 2, 70), last_only=True)
    assert differ(last, whole[:, -1]) < ROUNDING


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_exact_and_so_is_what_follows(config, params, tokens, side):
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, slice(0, 13) if side == "left" else slice(57, 70)] = False
    logits, state = kg.prefill(config, params, tokens, kg.init_state(config, 2, 80), mask=mask)
    alone, own = kg.prefill(config, params, tokens[1:, mask[1]], kg.init_state(config, 1, 80))
    assert differ(logits[1:, mask[1]], alone) < ROUNDING
    assert not logits[~mask].any()
    after, _ = kg.decode(config, params, torch.tensor([5, 6]), state)
    expected, _ = kg.decode(config, params, torch.tensor([6]), own)
    assert differ(after[1:], expected) < ROUNDING


def test_packed_sequences_do_not_see_each_other(config, params, tokens):
    sizes = [1, 17, 64, 30]
    packed = tokens.flatten()[: sum(sizes)][None]
    bounds = torch.tensor([0, *sizes]).cumsum(0)
    logits, state = kg.prefill(config, params, packed, kg.init_state(config, 4, 70), cu_seqlens=bounds)
    assert logits.shape == (1, sum(sizes), config.vocab)
    assert state.lengths.tolist() == sizes
    for start, end in itertools.pairwise(bounds):
        alone, _ = kg.prefill(config, params, packed[:, start:end], kg.init_state(config, 1, 70))
        assert differ(logits[:, start:end], alone) < ROUNDING


def test_the_state_that_goes_in_is_not_changed(config, params, tokens):
    _, state = kg.prefill(config, params, tokens[:, :20], kg.init_state(config, 2, 70))
    before = [x.clone() for x in tree.leaves(state.layers)]
    kg.decode(config, params, tokens[:, 20], state)
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves(state.layers), strict=True))


def test_a_donated_state_gives_the_same_numbers(config, params, tokens):
    state, donated = kg.init_state(config, 2, 70), kg.init_state(config, 2, 70)
    for part in (tokens[:, :20], tokens[:, 20:41]):
        kept, state = kg.prefill(config, params, part, state)
        given, donated = kg.prefill(config, params, part, donated, donate=True)
        assert torch.equal(kept, given)


def test_a_state_with_one_layer_of_another_dtype_is_refused(config, params, tokens):
    _, state = kg.prefill(config, params, tokens[:, :20], kg.init_state(config, 2, 70))
    last = tree.map(lambda x: x.to(torch.bfloat16), state.layers[-1])
    mixed = tree.replace(state, layers=(*state.layers[:-1], last))
    with pytest.raises(ConfigError, match="start from a new state"):
        kg.decode(config, params, tokens[:, 20], mixed)


def test_what_a_donated_step_gives_may_be_trained_on(config, params, tokens):
    with torch.no_grad():
        _, state = kg.prefill(config, params, tokens[:, :20], kg.init_state(config, 2, 70))
        want, _ = kg.decode(config, params, tokens[:, 20], state)
        logits, after = kg.decode(config, params, tokens[:, 20], state, donate=True)
    assert torch.equal(logits, want)
    assert not any(x.is_inference() for x in (logits, after.lengths, *tree.leaves(after.layers)))
    weight = torch.ones_like(logits, requires_grad=True)
    (weight * logits).sum().backward()
    assert torch.equal(weight.grad, logits)


def test_taps_name_what_was_asked_for(config, params, tokens):
    want = ["layers.3.kda.state", "layers.*.moe.experts"]
    (logits, state), taps = kg.prefill(config, params, tokens, kg.init_state(config, 2, 70), taps=want)
    assert set(taps) == {"layers.3.kda.state", *(f"layers.{i}.moe.experts" for i in (1, 2, 3, 4))}
    assert taps["layers.3.kda.state"].shape == (2, 4, 128, 128)
    assert torch.equal(taps["layers.3.kda.state"], state.layers[3].memory[1:])
    assert taps["layers.1.moe.experts"].shape == (140, 4)
    assert logits.shape == (2, 70, config.vocab)


def test_what_is_collected_around_a_call_is_what_its_taps_give(config, params, tokens):
    want = ["layers.1.moe.experts"]
    with collect(want) as around:
        state = kg.prefill(config, params, tokens, kg.init_state(config, 2, 80))[1]
    _, taps = kg.prefill(config, params, tokens, kg.init_state(config, 2, 80), taps=want)
    assert torch.equal(around[want[0]], taps[want[0]])
    with collect(want) as around:
        kg.decode(config, params, tokens[:, 0], state)
    assert around[want[0]].shape == (2, 4)


@pytest.mark.parametrize("taps", [["layers.*.kda.stat"], "layers.*.kda.stat"], ids=["in a list", "a string"])
def test_a_tap_that_does_not_exist_names_the_nearest(config, params, tokens, taps):
    with pytest.raises(
        ConfigError, match=r"nothing is called 'layers\.\*\.kda\.stat'; the nearest is layers\.\d\.kda\.state"
    ):
        kg.prefill(config, params, tokens, kg.init_state(config, 2, 70), taps=taps)


@pytest.mark.parametrize("bad", [[1, 2, 3], torch.tensor([1, 2, 3])], ids=["a list", "one row"])
def test_tokens_of_another_form_are_refused_in_words(config, params, bad):
    with pytest.raises(ConfigError, match=r"prefill: tokens: found .*, expected a tensor \[B, T\]"):
        kg.prefill(config, params, bad, kg.init_state(config, 1, 16))


def test_parameters_of_integers_are_refused(config):
    with pytest.raises(ConfigError, match=r"found torch\.int8, expected a float"):
        kg.init_params(config, dtype=torch.int8)


def test_generate_is_greedy_decoding_and_rows_do_not_disturb_each_other(config, params):
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    together = kg.generate(config, params, prompts, max_new_tokens=6, chunk=4)
    for row, prompt in enumerate(prompts):
        state, ids = kg.init_state(config, 1, 20), []
        logits, state = kg.prefill(config, params, torch.tensor([prompt]), state, last_only=True)
        for _ in range(6):
            ids.append(int(logits.argmax()))
            logits, state = kg.decode(config, params, torch.tensor(ids[-1:]), state)
        assert together[row].tolist() == ids


def test_sampling_repeats_with_its_seed(config, params):
    draw = lambda seed: kg.generate(config, params, [1, 2, 3], 8, temperature=2.0, top_p=0.9, seed=seed)  # noqa: E731
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_a_tiny_top_p_is_greedy(config, params):
    greedy = kg.generate(config, params, [1, 2, 3], 4)
    assert torch.equal(kg.generate(config, params, [1, 2, 3], 4, temperature=1.5, top_p=1e-6), greedy)


@pytest.mark.parametrize("bad", [-1, 512])
def test_tokens_outside_the_vocabulary_are_refused(config, params, bad):
    with pytest.raises(ConfigError, match=f"token {bad} is outside the vocabulary 0..511"):
        kg.prefill(config, params, torch.tensor([[1, bad]]), kg.init_state(config, 1, 16))


def test_a_full_state_refuses_more_and_says_how_to_make_room(config, params):
    state = kg.init_state(config, 1, 16, page=16)
    _, state = kg.prefill(config, params, torch.ones(1, 16, dtype=torch.int64), state)
    with pytest.raises(ConfigError, match="17 tokens, the state has room for 16; make it with init_state"):
        kg.decode(config, params, torch.tensor([1]), state)


def test_a_used_state_keeps_its_dtype(config, params):
    _, state = kg.prefill(config, params, torch.ones(1, 4, dtype=torch.int64), kg.init_state(config, 1, 16))
    half = kg.init_params(config, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="start from a new state"):
        kg.decode(config, half, torch.tensor([1]), state)


def test_a_length_over_the_models_limit_is_refused(config):
    with pytest.raises(ConfigError, match=r"1,048,577 .* the largest is 1,048,576"):
        kg.init_state(config, 1, 1_048_577)


def test_a_new_sequence_starts_from_zero_whatever_its_slot_held(config, params, tokens, whole):
    _, used = kg.prefill(config, params, tokens.flip(1), kg.init_state(config, 2, 70))
    reused = tree.replace(used, lengths=torch.zeros(2, dtype=torch.int64))
    logits, _ = kg.prefill(config, params, tokens, reused)
    assert differ(logits, whole) < ROUNDING


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """KDA and sparse attention, latent experts: three layers of K3.1-Pro."""
    config = kg.load_config("kimi-k3.1-pro")
    folder = make_fixture(config, tmp_path_factory.mktemp("hybrid") / "small", layers=4).folder
    small = kg.load_config(folder)
    return small, kg.init_params(small, seed=4, dtype=torch.float64)


@pytest.mark.parametrize(
    "page, ends", [(384, (383, 384, 385, 767, 768)), pytest.param(1536, (1535, 1536, 1537), marks=pytest.mark.heavy)]
)
def test_what_goes_on_at_the_end_of_a_large_page_is_what_was_read_at_once(hybrid, page, ends):  # K6
    """Pages of TP16 in bfloat16 and of TP8 in fp8: each length cold, resumed with one token left to read, which is a
    prompt of one, and gone on from by two steps."""
    config, params = hybrid
    tokens = torch.randint(config.vocab, (1, ends[-1] + 2), generator=torch.Generator().manual_seed(5))
    whole, _ = kg.prefill(config, params, tokens, kg.init_state(config, 1, tokens.shape[1], page=tokens.shape[1]))
    state, read = kg.init_state(config, 1, tokens.shape[1], page=page), 0
    for end in ends:
        for stop in sorted({end - 1, end} - {read}):
            logits, state = kg.prefill(config, params, tokens[:, read:stop], state, last_only=True)
            assert differ(logits, whole[:, stop - 1]) < ROUNDING, stop
            read = stop
        after = state
        for at in (end, end + 1):
            logits, after = kg.decode(config, params, tokens[:, at], after)
            assert differ(logits, whole[:, at]) < ROUNDING, (end, at)
    cold, _ = kg.prefill(config, params, tokens[:, :page], kg.init_state(config, 1, page, page=page), last_only=True)
    assert differ(cold, whole[:, page - 1]) < ROUNDING
