"""Which meshes of so many devices can hold a model, and which of them promise most: before anything is traced on them.

Bytes are those of the ledger, weights and states; times are a bound from bytes and from the sums of every layer over
its group. Only the meshes that are best by it are traced and estimated.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kimi_graph import tree
from kimi_graph.compile import caches
from kimi_graph.compile.driver import Request
from kimi_graph.compile.meshes import Layout
from kimi_graph.compile.phases import pools
from kimi_graph.config import MlaConfig, ModelConfig, arranged, check_length
from kimi_graph.models import decoder
from kimi_graph.models.pipeline import parameter_bytes
from kimi_graph.parallel import Mesh, Rules, place, preset
from kimi_graph.parallel.collectives import Issued
from kimi_graph.parallel.experts import no_pair
from kimi_graph.parallel.legality import Size, legal_meshes, sizes_of
from kimi_graph.parallel.stages import split

from .factors import Factors
from .ledger import Weights, buckets_of, census_of
from .network import crossing, edge

GIB = 2**30
STEP_TOKENS = 8192  # of a rank in a prefill step: beyond it products are no faster, and activations take more
PAIR_ROWS = 512  # of a rank, that CANN's pair sends to experts at once


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A mesh, and how rows and caches lie on it.

    Attributes:
        chunk: tokens of a prefill step, all rows in one bundle. chunks: parts in which rows go to experts.
    """

    mesh: Mesh
    exchange: bool = False
    split_cache: bool = False
    chunk: int = 512
    chunks: int = 1

    def __str__(self) -> str:
        flags = [" --exchange"] * self.exchange + [f" --moe-chunks {self.chunks}"] * (self.chunks > 1)
        return str(self.mesh) + "".join(flags) + " --split-cache" * self.split_cache


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of the fullest rank, and a bound for a token and for a prefilled token, in seconds."""

    choice: Choice
    bytes: int
    decode: float
    prefill: float


def like(request: Request, **changes: Any) -> Request:
    """The request with other choices; what its experts are stored in does not depend on them."""
    made = replace(request, **changes)
    made.__dict__["native"] = request.native
    return made


@functools.lru_cache(maxsize=8)
def _sizes(c: ModelConfig) -> tuple[Size, ...]:
    return tuple(sizes_of(decoder.model_specs(c), c.dtype))


@functools.lru_cache(maxsize=512)
def _layers(c: ModelConfig, stages: int) -> tuple[range, ...]:
    """Layers of each stage, as `model_stages` splits them."""
    costs, (first, last) = parameter_bytes(c)
    costs = [*costs]
    costs[0] += first
    costs[-1] += last
    return tuple(split(costs, stages))


class Sieve:
    """Meshes for a request without one (`base`): rows, length, formats and flags of all."""

    def __init__(self, base: Request, factors: Factors) -> None:
        self.base, self.f, self.c = base, factors, base.config
        self.pages = check_length(self.c, base.max_len, base.page).pages
        self.sparse = decoder.is_sparse(self.c, self.pages * base.page)
        self.census = census_of(base, buckets_of(base)[0])
        self.weights: dict[Any, tuple[dict[int, int], tuple[int, int], int]] = {}
        self.states: dict[Any, dict[int, int]] = {}

    @property
    def room(self) -> int:
        """Bytes of a die that weights and states may take."""
        return self.base.target.memory_bytes - int(self.f.reserve_gib * GIB)

    def legal(self, devices: int) -> list[Mesh]:
        """Meshes on which everything divides, and the rows of the request too."""
        c, stages = self.c, len(self.c.layers)
        found = legal_meshes(_sizes(c), devices, lambda mesh: preset(c, mesh, "decode"), stages=stages)
        return [mesh for mesh in found if self.base.rows % mesh.data == 0]

    def choices(self, mesh: Mesh) -> Iterator[Choice]:
        """How rows and caches may lie on a mesh."""
        plain = self.roomy(Choice(mesh=mesh, chunk=self.chunk(mesh)))
        long = (
            mesh.tensor > 1 and self.base.kv_dtype == "bf16" and self._cache(plain) > self.base.target.memory_bytes / 8
        )
        for choice in (plain, *self._exchanged(plain)):
            yield choice
            if long:
                yield self.roomy(replace(choice, split_cache=True, chunk=self.chunk(mesh)))

    def roomy(self, choice: Choice) -> Choice:
        """The choice with the longest prefill step that should find room; at least 512 tokens of a rank."""
        rows, ways = max(1, self.base.rows // choice.mesh.data), choice.mesh.context * choice.mesh.tensor
        held = self.held(choice)
        while held + self._working(choice) > self.room and choice.chunk * rows > 512 and choice.chunk > ways:
            choice = replace(choice, chunk=max(ways, choice.chunk // 2 // ways * ways))
        return choice

    def fits(self, choice: Choice) -> bool:
        return self.held(choice) + self._working(choice) <= self.room

    def _working(self, choice: Choice) -> float:
        """About what a prefill step takes: rows of experts, running sum and closed blocks, buffers of HCCL."""
        c, mesh, moe = self.c, choice.mesh, self.c.moe
        tokens = max(1, self.base.rows // mesh.data) * choice.chunk
        values = tokens * c.embed * 2 * (8 + (len(c.layers) // c.residual_block if c.residual_block else 0))
        if moe is None:
            return values
        pairs = tokens * moe.top_k * max(1, mesh.experts // mesh.tensor)
        if choice.exchange:
            ways = max(1, mesh.experts)
            own = -(-tokens // (mesh.tensor * choice.chunks))
            pairs = own * ways * min(moe.slots // ways, moe.top_k)
        wide = ((moe.latent or c.embed) + 2 * moe.ffn) * 2
        return values + pairs * wide * 4 / 3 + 3 * self.f.group_mib * 2**20

    def chunk(self, mesh: Mesh, rows: int | None = None, tokens: int = STEP_TOKENS) -> int:
        """Tokens of a prefill step: as many as make `tokens` on a rank, and divide over what shares out queries."""
        rows, ways = rows or self.base.rows, mesh.context * mesh.tensor
        most = min(tokens // max(1, rows // mesh.data), self.base.max_len)
        return max(ways, most // ways * ways)

    def _exchanged(self, plain: Choice) -> Iterator[Choice]:
        """With rows sent to their experts, where CANN's pair can."""
        c, mesh, moe = self.c, plain.mesh, self.c.moe
        world = mesh.data * mesh.tensor
        if moe is None or mesh.experts == 1 or self.base.rows % world:
            return
        rows = self.base.rows * plain.chunk // (world * mesh.context)
        chunks = -(-rows // PAIR_ROWS) if "prefill" in self.base.phases else 1
        choice = replace(plain, exchange=True, chunks=chunks)
        ways = self.rules(choice).ways("experts")
        sizes = moe.latent or c.embed, moe.top_k, ways, moe.slots // ways
        if not no_pair(self.base.target, self.base.rows // world, *sizes) and not no_pair(
            self.base.target, -(-rows // chunks), *sizes
        ):
            yield choice

    def _cache(self, choice: Choice) -> int:
        """Bytes of the caches of a rank."""
        held, layers = self._states(choice), _layers(self.c, choice.mesh.pipe)
        return max(sum(held[i] for i in own if isinstance(self.c.layers[i].mixer, MlaConfig)) for own in layers)

    def rules(self, choice: Choice, phase: str = "decode") -> Rules:
        own = Layout(config=self.c, mesh=choice.mesh, exchange=choice.exchange, split_cache=choice.split_cache)
        return own.rules(phase)

    def request(self, choice: Choice) -> Request:
        """The request on a mesh."""
        c = arranged(self.c, getattr(self.c.moe, "redundant", 0), choice.chunks) if choice.chunks > 1 else self.c
        return like(
            self.base, config=c, mesh=choice.mesh, exchange=choice.exchange, split_cache=choice.split_cache,
            chunk=min(choice.chunk, self.base.max_len),
        )  # fmt: skip

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def held(self, choice: Choice) -> int:
        """Bytes of weights and states of the fullest rank."""
        own, ends, _ = self._weights(choice)
        states, layers = self._states(choice), _layers(self.c, choice.mesh.pipe)
        alike = self.census.alike
        sizes = [sum(own[alike[i]] + states[i] for i in stage) for stage in layers]
        sizes[0] += ends[0]
        sizes[-1] += ends[1]
        return max(sizes)

    def _weights(self, choice: Choice) -> tuple[dict[int, int], tuple[int, int], int]:
        """Bytes of the layers that are alike, of both ends, and of the experts of all layers."""
        key = choice.mesh.tensor, choice.mesh.experts, choice.exchange
        if key not in self.weights:
            rules = self.rules(replace(choice, split_cache=False))
            made = Weights(like(self.base, mesh=choice.mesh), rules, self.census)
            own = {i: made.bytes_of(self.census.by_layer[i]) for i in dict.fromkeys(self.census.alike)}
            experts = {
                i: made.bytes_of(
                    k for k in self.census.by_layer[i] if ".moe.gate_up" in k[0] or k[0][-9:] == ".moe.down"
                )
                for i in own
            }
            ends = self.census.ends
            last = [k for k in ends[1] if k not in ends[0]] if choice.mesh.pipe == 1 else ends[1]
            sizes = made.bytes_of(ends[0]), made.bytes_of(last)
            self.weights[key] = own, sizes, sum(experts[i] for i in self.census.alike)
        return self.weights[key]

    def _states(self, choice: Choice) -> dict[int, int]:
        """Bytes of each layer's states."""
        rules = self.rules(choice)
        rows, cached = self.base.rows // choice.mesh.data, rules.ways("cached")
        key = rows, choice.mesh.tensor, choice.mesh.context, cached
        if key not in self.states:
            pages = -(-self.pages // cached) * cached
            slots, pool = pools(rules, self.base.rows, pages)
            specs = caches.state_specs(
                self.c, self.base.kv_dtype, slots=slots, pages=pool, page=self.base.page
            )  # fmt: skip
            each = {
                i: sum(place("", s, rules, self.c.dtype).bytes for s in tree.leaves(specs[i]) if s is not None)
                for i in dict.fromkeys(self.census.alike)
            }
            self.states[key] = {i: each[first] for i, first in enumerate(self.census.alike)}
        return self.states[key]

    # ---- a bound of time ---------------------------------------------------------------------------------------------

    def promise(self, choice: Choice) -> Held:
        """What a mesh could do at best."""
        c, t, mesh, f, moe = self.c, self.base.target, choice.mesh, self.f, self.c.moe
        own, ends, experts = self._weights(choice)
        everything = sum(own[i] for i in self.census.alike) + sum(ends)
        states = sum(size * self._read(i) for i, size in self._states(choice).items())
        rows = self.base.rows // mesh.data
        touched = 1.0
        if moe is not None:
            outside = mesh.data * mesh.tensor // mesh.experts
            here = max(1, self.base.rows // max(1, min(outside, mesh.data))) * moe.top_k
            touched = 1 - (1 - 1 / moe.experts) ** here
        read = everything - experts * (1 - touched) + states
        rate = t.die.bandwidth.value * f.memory
        hops = (mesh.pipe - 1) * edge(rows * c.embed * 2, t.links, mesh.stage.world, f)
        decode = read / rate + self._crossings(choice, rows) + hops
        tokens = choice.chunk
        rows_p = tokens
        flops = 2 * self._active() * tokens / (mesh.tensor * mesh.context)
        step = everything / rate / mesh.pipe + flops / (t.die.cube["bf16"].value * f.cube) / mesh.pipe
        step += self._crossings(choice, rows_p) / mesh.pipe
        return Held(choice=choice, bytes=self.held(choice), decode=decode, prefill=step / tokens * (1 + mesh.pipe / 64))

    def _read(self, layer: int) -> float:
        """The part of a layer's states that a step reads: of caches whose keys are selected the index alone."""
        m = self.c.layers[layer].mixer
        if not self.sparse or not isinstance(m, MlaConfig) or m.indexer is None:
            return 1.0
        key = 0 if m.indexer.shared else m.indexer.key
        return key / (m.latent + m.key_rope + key)

    def _crossings(self, choice: Choice, rows: int) -> float:
        """Seconds of the sums of all layers: of mixers, of shared experts, of routed ones."""
        c, mesh, f, links = self.c, choice.mesh, self.f, self.base.target.links
        tensor, experts = mesh.stage.atoms("tensor"), mesh.stage.atoms("experts")

        def one(name: str, axes: tuple[str, ...], width: int, rows: float) -> float:
            if mesh.stage.size(axes) == 1:
                return 0.0
            return crossing(Issued(name, axes, (int(rows), width), torch.bfloat16), mesh.stage, links, f).seconds

        moe, layers = c.moe, len(c.layers)
        total = 2 * layers * one("all_reduce", tensor, c.embed, rows)
        if moe is None:
            return total
        width = moe.latent or c.embed
        if choice.exchange:
            sent = 2 * one("expert_dispatch", experts, width, rows / mesh.tensor * moe.top_k)
            return total + layers * (sent + one("all_gather", tensor, c.embed, rows / mesh.tensor))
        shared = mesh.experts // mesh.tensor if mesh.experts > mesh.tensor else 1
        return total + layers * one("all_reduce", experts, width, rows * shared)

    def _active(self) -> int:
        """Parameters that a token goes through."""
        return _active(self.c)


@functools.lru_cache(maxsize=4)
def _active(c: ModelConfig) -> int:
    from kimi_graph.models.counts import parameter_counts

    return parameter_counts(c).active


def counts_up_to(sieve: Sieve, most: int) -> Iterator[int]:
    """Numbers of devices that might do, smallest first: from where weights divided evenly would fit."""
    own, ends, _ = sieve._weights(Choice(mesh=Mesh()))
    everything = sum(own[i] for i in sieve.census.alike) + sum(ends)
    yield from range(max(1, math.ceil(everything / sieve.room)), most + 1)
