"""Experts move between two steps: whole or not at all, and a model goes on with the same tokens."""

import pytest
import torch

import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.config import MoeConfig, with_copies
from kimi_graph.errors import ShardingError
from kimi_graph.layers import step_batch
from kimi_graph.models import decoder
from kimi_graph.parallel.balance import Table, balance, plain_table
from kimi_graph.parallel.live import Shelf, digest
from kimi_graph.taps import collect

EXPERTS, SLOTS, RANKS = 8, 12, 4
ROOM = SLOTS // RANKS
ZIPF = [1000 // (EXPERTS - e) for e in range(EXPERTS)]  # the busiest last: copies are of the first to begin with


def expert(e, dtype=torch.bfloat16):
    """Weights that no other expert has."""
    drawn = torch.Generator().manual_seed(e)
    return torch.randn(2, 3, 5, generator=drawn).to(dtype), torch.randn(5, 3, generator=drawn).to(dtype)


def held(table, ranks):
    """What some ranks hold by a table."""
    rows = {r: [expert(e) for e in table.by_rank[r]] for r in ranks}
    return {r: [torch.stack(x) for x in zip(*found, strict=True)] for r, found in rows.items()}


def shelf_of(wire=None, ranks=range(RANKS)):
    table = plain_table(EXPERTS, SLOTS, RANKS)
    return Shelf(table, held(table, ranks), wire)


def choices(loads):
    """Ids that some rows chose so that experts have these loads."""
    return torch.arange(len(loads)).repeat_interleave(torch.tensor(loads))


def test_slots_hold_the_bytes_of_the_experts_that_the_new_table_says():
    shelf = shelf_of()
    places = [x.data_ptr() for w in shelf.weights.values() for x in w] + [shelf.table.data_ptr()]
    shelf.saw(choices(ZIPF))
    plan = shelf.rebalance()
    assert plan.moves and shelf.placed == plan.table
    assert plan.skew[1] < plan.skew[0] / 1.5
    for rank, experts in enumerate(shelf.placed.by_rank):
        for slot, e in enumerate(experts):
            assert digest([x[slot] for x in shelf.weights[rank]]) == digest(expert(e))
    assert Table.unpack(shelf.table.tolist(), EXPERTS, RANKS) == plan.table
    assert places == [x.data_ptr() for w in shelf.weights.values() for x in w] + [shelf.table.data_ptr()]


def test_tables_follow_loads_that_change_and_forget_old_ones():
    shelf = shelf_of()
    for hot in (0, 5, 2, 7):
        shelf.saw(choices([4000 if e == hot else 10 for e in range(EXPERTS)]))
        shelf.rebalance()
        assert len(shelf.placed.copies[hot]) > 1
    for rank, experts in enumerate(shelf.placed.by_rank):
        for slot, e in enumerate(experts):
            assert digest([x[slot] for x in shelf.weights[rank]]) == digest(expert(e))


class Faulty:
    """A wire to the ranks of another process, which hold what a table says; a bit of what comes may flip."""

    def __init__(self, table, flip=False, others_well=True):
        self.table, self.flip, self.others_well, self.sent = table, flip, others_well, 0

    def send(self, expert, mark, rank):
        assert digest(expert) == mark
        self.sent += 1

    def receive(self, like, rank):
        e = self.wanted.pop(0)
        made = [x.clone() for x in expert(e)]
        mark = digest(made)
        if self.flip:
            made[1].view(torch.int16)[0, 0] ^= 1
        return made, mark

    def agree(self, well):
        return well and self.others_well


def on_two_ranks(**faults):
    """A process that has two ranks of four, and a plan by which experts come to them from the others."""
    shelf = shelf_of(Faulty(plain_table(EXPERTS, SLOTS, RANKS), **faults), range(2))
    plan = balance([0, 0, 0, 0, 0, 9, 9, 9], SLOTS, RANKS, shelf.placed)
    comes = [m for m in plan.moves if m.target < 2 * ROOM <= m.source]
    shelf.wire.wanted = [m.expert for m in comes]
    assert comes
    return shelf, plan


@pytest.mark.parametrize(
    "fault, words", [({"flip": True}, r"expert \d on its way to slot \d"), ({"others_well": False}, "of another rank")]
)
def test_an_expert_that_arrives_changed_on_any_rank_leaves_all_as_it_was(fault, words):
    shelf, plan = on_two_ranks(**fault)
    before, table = {r: digest(w) for r, w in shelf.weights.items()}, shelf.table.clone()
    with pytest.raises(ShardingError, match=words):
        shelf.put(plan)
    assert before == {r: digest(w) for r, w in shelf.weights.items()}
    assert shelf.table.equal(table) and shelf.placed == plan.previous


def test_experts_go_to_ranks_of_other_processes_and_come_from_them():
    shelf, plan = on_two_ranks()
    shelf.put(plan)
    assert shelf.wire.sent == sum(m.source < 2 * ROOM <= m.target for m in plan.moves)
    for rank in range(2):
        for slot, e in enumerate(plan.table.by_rank[rank]):
            assert digest([x[slot] for x in shelf.weights[rank]]) == digest(expert(e))


def test_what_does_not_fit_is_refused():
    table = plain_table(EXPERTS, SLOTS, RANKS)
    with pytest.raises(ShardingError, match="rank 0: weights of 2 slots, the table has 3 of a rank"):
        Shelf(table, {0: [torch.empty(2, 4)]})
    other = balance(ZIPF, SLOTS, RANKS).table
    with pytest.raises(ShardingError, match="starts from another table"):
        shelf_of().put(balance(ZIPF[::-1], SLOTS, RANKS, other))


# ---- a model ---------------------------------------------------------------------------------------------------------


def small():
    """Layers of both kinds, with experts in two of three."""
    from kimi_graph.fixture import small_config
    from kimi_graph.read_config import parse_config

    source = small_config(kg.load_config("kimi-linear-48b"), 3)
    return parse_config(source, origin="test", name="small")


def test_tokens_go_on_after_a_swap_between_two_decode_steps():
    """A model on simulated ranks of 5 slots each, whose copies move twice while it decodes, and the model without."""
    config, ranks, rows = small(), 4, 3
    made = with_copies(config, 4)
    params = kg.init_params(config, seed=1, dtype=torch.float64)
    state = kg.init_state(config, rows, 32, torch.float64)
    tokens = torch.tensor([[5, 9, 300], [7, 7, 7], [1, 2, 3]])
    want, _ = kg.prefill(config, params, tokens, state, last_only=True)

    shelves, layers = {}, list(params.layers)
    for i, layer in enumerate(made.layers):
        if isinstance(layer.ffn, MoeConfig):
            table = plain_table(layer.ffn.experts, layer.ffn.slots, ranks)
            moe = layers[i].moe
            whole = [x[list(table.slots)].clone() for x in (moe.gate_up, moe.down)]
            moe = tree.replace(moe, gate_up=whole[0], down=whole[1])
            layers[i] = tree.replace(layers[i], moe=moe)
            shelves[i] = Shelf(table, {r: [x.chunk(ranks)[r] for x in whole] for r in range(ranks)})
    copied = tree.replace(params, layers=tuple(layers))
    tables = {decoder.table_name(i): shelf.table for i, shelf in shelves.items()}

    def step(ids, states, before):
        counts = torch.full((rows,), ids.shape[1])
        batch = step_batch(
            state.block_table, state.slots, before, counts, ids.shape[1], state.page,
            rope=config.rotation, dtype=torch.float64,
        )  # fmt: skip
        with collect([f"layers.{i}.moe.experts" for i in shelves]) as found:
            logits, states = decoder.forward(
                copied, made, ids, states, batch, step=ids.shape[1] == 1, last_only=True, tables=tables
            )
        for i, shelf in shelves.items():
            shelf.saw(found[f"layers.{i}.moe.experts"])
        return logits[:, 0], states

    got, states = step(tokens, state.layers, torch.zeros(rows, dtype=torch.int64))
    _, plain = kg.prefill(config, params, tokens, state, last_only=True)
    moves = 0
    for count in range(6):
        assert got.argmax(-1).equal(want.argmax(-1))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12 * float(want.abs().max()))  # sums in another order
        if count in (2, 4):  # between two steps
            plans = [shelf.rebalance(good=1.0) for shelf in shelves.values()]
            moves += sum(len(p.moves) for p in plans)
            assert all(p.skew[1] <= p.skew[0] for p in plans)
        token = want.argmax(-1)
        want, plain = kg.decode(config, params, token, plain)
        got, states = step(token[:, None], states, torch.full((rows,), tokens.shape[1] + count))
    assert moves > 0
