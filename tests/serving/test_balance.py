"""Ranks that count, plan and move experts between steps give the logits of one rank without copies. Needs no engine."""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import kimi_graph as kg
from kimi_graph.config import with_copies
from kimi_graph.errors import KimiGraphError
from kimi_graph.layers import step_batch
from kimi_graph.models import decoder
from kimi_graph.ops import donating
from kimi_graph.parallel import Mesh
from kimi_graph.parallel.balance import plain_table
from kimi_graph.parallel.processes import Member
from kimi_graph.serving.balance import Balance, with_asked
from kimi_graph.serving.ranks import Place
from tests.serving.test_ranks import EXACT, WAYS, states_of

COPIES, PAGE, EVERY = 4, 16, 2
PROMPT, STEPS = [*range(1, 10)], [3, 3, 77, 3, 3]


def logits(place, params, balance=None):
    """Of a prompt and of steps; with a balance, experts move between some of them."""
    table, slots = torch.ones(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    states, before, made, plans = states_of(place), torch.zeros(1).long(), [], []
    uses = decoder.schedule(place.config)
    for given in (PROMPT, *[[token] for token in STEPS]):
        counts = torch.tensor([len(given)])
        tokens = len(given) if len(given) == 1 else -(-len(given) // WAYS) * WAYS
        ids = torch.tensor([[*given, *[0] * (tokens - len(given))]])
        batch = step_batch(table, slots, before, counts, tokens, PAGE, rope=place.config.rotation, dtype=torch.float64)
        run = (uses, params), (states, dict.fromkeys(states, batch))
        values = {"tokens": ids}
        with donating():
            if balance is None:
                results = place.run(*run[0], values, *run[1], step=tokens == 1)
            else:
                plans += balance.between_steps().values()
                with balance.counting(torch.arange(tokens)[None] < counts):
                    results = place.run(*run[0], values | balance.tables(uses), *run[1], step=tokens == 1)
        made.append(results["logits"][0, : len(given)])
        before = before + counts
    return torch.cat(made), plans


def on_a_rank(rank, folder, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WAYS)
    config = kg.load_config(folder)
    member = Member(Mesh(tensor=WAYS), rank, dist.group.WORLD, torch.device("cpu"))
    place = Place(with_copies(config, COPIES), member.mesh, member=member)
    alone = Place(config, Mesh())
    with torch.inference_mode():
        params = place.load(folder, torch.float64)
        want, _ = logits(alone, alone.load(folder, torch.float64))
        got, plans = logits(place, params, Balance(place, params, EVERY))
    assert (got - want).abs().max() <= EXACT * want.abs().max()
    between = [m for p in plans for m in p.moves if not p.same_rank(m)]
    assert between, "no expert went to another rank"
    assert all(p.skew[1] <= p.skew[0] for p in plans)
    dist.destroy_process_group()


def test_experts_move_between_two_processes_while_they_decode(folder, tmp_path):
    spawn(on_a_rank, (folder("kimi-linear-48b"), tmp_path / "store"), WAYS)


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"redundant": 4}, "expected an object of redundant_experts and rebalance_steps"),
        ({"redundant_experts": -1}, r"kimi_graph_experts\.redundant_experts: found -1, expected a number from 0 on"),
        ({"rebalance_steps": True}, r"kimi_graph_experts\.rebalance_steps: found True"),
        ({"rebalance_steps": 9}, r"redundant_experts: found 0, nearest 2: without copies nothing moves"),
        ({"redundant_experts": 3}, r"19 slots do not divide over 2 ranks"),
        ({"redundant_experts": 40}, r"at most once on each of 2 ranks"),
    ],
)
def test_what_cannot_be_asked_of_the_engine_is_refused(folder, asked, words):
    config = kg.load_config(folder("kimi-linear-48b"))
    with pytest.raises(KimiGraphError, match=words):
        with_asked(config, {"kimi_graph_experts": asked}, WAYS)


def test_one_rank_has_nothing_to_balance_and_nobody_has_to_ask(folder):
    config = kg.load_config(folder("kimi-linear-48b"))
    with pytest.raises(KimiGraphError, match="experts lie on one rank; leave it out, or set --tensor-parallel-size"):
        with_asked(config, {"kimi_graph_experts": {"redundant_experts": 2}}, 1)
    for nothing in ({}, {"another": 1}, None):
        assert with_asked(config, nothing, 1) == (config, 0)
    made, every = with_asked(config, {"kimi_graph_experts": {"redundant_experts": 4, "rebalance_steps": 50}}, WAYS)
    assert (made, every) == (with_copies(config, 4), 50)


@pytest.mark.serving
@pytest.mark.filterwarnings("default")
def test_experts_that_move_while_the_engine_serves_leave_its_tokens(folder, library, monkeypatch):
    """Two tensor ranks of vLLM, which rebalance every few steps, and go on from the prefix cache."""
    from tests.serving.served import engine, tables_in_use
    from tests.serving.test_tokens import rounds

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|0")
    lib = library("kimi-linear-48b")
    asked = {"kimi_graph_experts": {"redundant_experts": COPIES, "rebalance_steps": 5}}
    options = {"tensor_parallel_size": WAYS, "additional_config": asked, "disable_log_stats": True}
    with engine(folder("kimi-linear-48b"), **options) as llm:
        rounds(lib, llm, lib.prompts(8, 140, 33, seed=11), times=2)
        tables = llm.apply_model(tables_in_use)
    assert tables[0] == tables[1]
    moe = [layer.ffn for layer in lib.config.layers if hasattr(layer.ffn, "experts")]
    assert all(
        table != plain_table(c.experts, c.experts + COPIES, WAYS) for table, c in zip(tables[0], moe, strict=True)
    )
