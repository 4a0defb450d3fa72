"""The paged cache gives back, in order, what was written, wherever the pages lie."""

import torch

from kimi_graph import ops
from kimi_graph.layers import step_batch

TABLE = torch.tensor([[5, 2], [1, 4]], dtype=torch.int32)  # two rows, pages of three tokens


def pools():
    return torch.randn(6, 3, 4), torch.randn(6, 3, 2)


def test_what_is_written_in_steps_is_read_in_order():
    latent, rope = torch.randn(2, 6, 4), torch.randn(2, 6, 2)
    kept = pools()
    slots, before = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 0])
    for size in (1, 4, 1):
        batch = step_batch(TABLE, slots, before, torch.tensor([size, size]), size, 3)
        first, last = int(before[0]), int(before[0]) + size
        kept = ops.cache_write(latent[:, first:last], rope[:, first:last], *kept, batch.slot_mapping)
        before = batch.lengths
    for read, written in zip(ops.cache_read(*kept, TABLE), (latent, rope), strict=True):
        assert torch.equal(read, written)


def test_padding_writes_into_nobodys_page_alone():
    kept = pools()
    counts = torch.tensor([2, 0])
    batch = step_batch(TABLE, torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3, 1]), counts, 4, 3)
    after = ops.cache_write(torch.randn(2, 4, 4), torch.randn(2, 4, 2), *kept, batch.slot_mapping)
    for pool, new in zip(kept, after, strict=True):
        changed = {(int(p), int(i)) for p, i in (pool != new).any(-1).nonzero()}
        assert {c for c in changed if c[0]} == {(2, 0), (2, 1)}  # tokens 3 and 4 of the first row


def test_pools_are_overwritten_only_when_given_away():
    kept, at = pools(), torch.arange(3, 11)
    new = torch.randn(2, 4, 4), torch.randn(2, 4, 2)
    copies = [pool.clone() for pool in kept]
    after = ops.cache_write(*new, *kept, at)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    with ops.donating():
        same = ops.cache_write(*new, *kept, at)
    assert all(s.data_ptr() == k.data_ptr() and torch.equal(s, a) for s, k, a in zip(same, kept, after, strict=True))


def test_a_pool_that_autograd_watches_is_never_overwritten():
    latent, rope = (pool.requires_grad_() for pool in pools())
    with ops.donating():
        after, _ = ops.cache_write(torch.randn(1, 2, 4), torch.randn(1, 2, 2), latent, rope, torch.tensor([7, 8]))
    after.sum().backward()
    assert latent.grad is not None and latent.grad.sum() == latent.numel() - 8
