"""Ranks that have a half each give what one rank gives that has all. Needs no engine."""

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.layers import step_batch
from kimi_graph.models import decoder
from kimi_graph.ops import donating
from kimi_graph.parallel import Mesh, place_tree, preset
from kimi_graph.parallel.processes import Member
from kimi_graph.serving.ranks import Place

WAYS, PAGE = 2, 16
EXACT = 1e-12  # of the largest logit, in float64: sums in another order
PROMPTS = [[*range(1, 72)], [*range(30, 38)], [*range(5, 50)]]  # read in two parts, of odd numbers of tokens
STEPS = [3, 77]


def states_of(place):
    """Empty states of one rank."""
    rows, pages = len(PROMPTS), pages_of_a_row()
    sizes = {"slots": rows + 1, "pages": rows * pages + 1, "page": PAGE, "dtype": torch.float64}
    placed = place_tree(decoder.state_specs(place.config, **sizes), preset(place.config, place.mesh), torch.float64)
    return dict(enumerate(tree.map(lambda p: torch.zeros(p.local, dtype=torch.float64), placed)))


def pages_of_a_row():
    return -(-(max(map(len, PROMPTS)) + len(STEPS)) // PAGE)


def logits(place, params):
    """Of every token that is read, then of steps: the calls of an engine."""
    rows, pages = len(PROMPTS), pages_of_a_row()
    table = torch.arange(1, rows * pages + 1, dtype=torch.int32).view(rows, pages)
    slots, states, before, made = torch.arange(1, rows + 1).int(), states_of(place), torch.zeros(rows).long(), []
    uses = decoder.schedule(place.config, sparse=decoder.is_sparse(place.config, pages * PAGE))
    assert any("selected" in use.writes for use in uses), "prompts are so short that attention is dense"
    for given in [[p[:5] for p in PROMPTS], [p[5:] for p in PROMPTS], *[[[token]] * rows for token in STEPS]]:
        counts = torch.tensor([*map(len, given)])
        longest = int(counts.max())
        tokens = 1 if longest == 1 else -(-longest // WAYS) * WAYS
        ids = torch.tensor([[*p, *[0] * (tokens - len(p))] for p in given])
        batch = step_batch(table, slots, before, counts, tokens, PAGE, rope=place.config.rotation, dtype=torch.float64)
        with donating():
            run = place.run(uses, params, {"tokens": ids}, states, dict.fromkeys(states, batch), step=tokens == 1)
        made += [row[:count] for row, count in zip(run["logits"], counts.tolist(), strict=True)]
        before = before + counts
    return torch.cat(made)


def on_a_rank(rank, folder, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WAYS)
    config = kg.load_config(folder)
    member = Member(Mesh(tensor=WAYS), rank, dist.group.WORLD, torch.device("cpu"))
    places = Place(config, Mesh()), Place(config, member.mesh, member=member)
    whole, shards = (place.load(folder, torch.float64) for place in places)
    with torch.inference_mode():
        want, got = logits(places[0], whole), logits(places[1], shards)
    assert (got - want).abs().max() <= EXACT * want.abs().max()
    held, all_of_it = (sum(x.numel() for x in tree.leaves(p)) for p in (tree.map(lambda x: x.local, shards), whole))
    assert held <= 0.6 * all_of_it, (held, all_of_it)  # a fixture has few layers: its norms and latents weigh more
    dist.destroy_process_group()


def test_two_ranks_give_the_logits_of_one_and_hold_half(folder, tmp_path):
    """KDA, sparse attention, attention residuals and latent experts in one model."""
    spawn(on_a_rank, (folder("kimi-k3.1-pro"), tmp_path / "store"), WAYS)
