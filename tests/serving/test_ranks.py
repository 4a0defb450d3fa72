"""Ranks that each have their shards give what one rank gives that has all. Needs no engine."""

import torch
import torch.distributed as dist
import torch.multiprocessing

import kimi_graph as kg
from kimi_graph import tree
from kimi_graph.models import decoder
from kimi_graph.ops import donating
from kimi_graph.parallel import Mesh, place_tree
from kimi_graph.parallel.processes import Member
from kimi_graph.serving.ranks import Place
from kimi_graph.layers import step_batch

WAYS, PAGE = 2, 8
EXACT = 1e-10  # float64, sums in another order


def states_of(place, rows, pages):
    """Empty states of one rank, in float64."""
    c = place.config
    specs = decoder.state_specs(c, slots=rows + 1, pages=rows * pages + 1, page=PAGE, dtype=torch.float64)
    rules = kg.parallel.preset(c, place.mesh.stage)
    return {
        i: tree.map(lambda p: torch.zeros(p.local, dtype=torch.float64), place_tree(s, rules, torch.float64))
        for i, s in enumerate(specs)
    }


def played(place, params, ids, steps):
    """Logits of prompts of unequal lengths, read in two parts, and of steps after them, as an engine asks for them."""
    rows, longest = len(ids), max(map(len, ids))
    pages = -(-(longest + len(steps)) // PAGE)
    table = torch.arange(1, rows * pages + 1, dtype=torch.int32).view(rows, pages)
    slots, states, made = torch.arange(1, rows + 1, dtype=torch.int32), states_of(place, rows, pages), []
    before = torch.zeros(rows, dtype=torch.int64)
    cuts = [[p[:6] for p in ids], [p[6:] for p in ids], *[[[t]] * rows for t in steps]]
    for some in cuts:
        counts = torch.tensor([len(p) for p in some])
        step = bool((counts == 1).all())
        width = 1 if step else -(-int(counts.max()) // WAYS) * WAYS
        tokens = torch.tensor([[*p, *[0] * (width - len(p))] for p in some])
        batch = step_batch(table, slots, before, counts, width, PAGE, rope=place.config.rotation, dtype=torch.float64)
        sparse = decoder.is_sparse(place.config, pages * PAGE)
        uses = decoder.schedule(place.config, sparse=sparse)
        with donating():
            run = place.run(uses, params, {"tokens": tokens}, states, dict.fromkeys(states, batch), step=step)
        made += [row[: len(p)] for row, p in zip(run["logits"], some, strict=True)]
        before = before + counts
    return torch.cat(made)


def rank_of(rank, folders, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WAYS)
    torch.set_num_threads(1)
    for folder in folders:
        config, mesh = kg.load_config(folder), Mesh(tensor=WAYS)
        ids = [list(range(1, 20)), list(range(30, 39)), list(range(5, 18))]
        whole, own = Place(config, Mesh()), Place(config, mesh, 0, Member(mesh, rank, dist.group.WORLD, torch.device("cpu")))
        with torch.inference_mode():
            params = [place.load(folder, torch.float64) for place in (whole, own)]
            want, got = (played(place, p, ids, [3, 77]) for place, p in zip((whole, own), params, strict=True))
        assert (got - want).abs().max() <= EXACT * want.abs().max()
        sizes = [sum(x.numel() for x in tree.leaves(tree.map(lambda x: getattr(x, "local", x), p))) for p in params]
        print(folder.name, (got - want).abs().max() / want.abs().max(), sizes, sizes[1]/sizes[0])
    dist.destroy_process_group()


def test_two_ranks_give_the_logits_of_one_that_has_all(folder):
    folders = [folder(name) for name in ("kimi-linear-48b", "kimi-k3.1-pro", "deepseek-v3.2")]
    torch.multiprocessing.spawn(rank_of, (folders, 29517), WAYS)
