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
from kimi_graph.compile.targets import Target
from kimi_graph.config import MlaConfig, ModelConfig, arranged, check_length, in_chunks
from kimi_graph.errors import ConfigError
from kimi_graph.models import decoder
from kimi_graph.models.counts import Counts, parameter_counts, part_of
from kimi_graph.models.pipeline import parameter_bytes
from kimi_graph.parallel import Mesh, Rules, place, preset
from kimi_graph.parallel.collectives import Issued
from kimi_graph.parallel.experts import MAX_EXPERTS, MAX_RANKS, no_pair
from kimi_graph.parallel.legality import Size, legal_meshes, sizes_of
from kimi_graph.parallel.stages import split
from kimi_graph.progress import Notify, silent

from .factors import Factors
from .ledger import Weights, buckets_of, census_of
from .network import crossing, edge
from .routing import routing

GIB = 2**30
STEP_TOKENS = 8192  # of a rank in a prefill step: beyond it products are no faster, and activations take more
PAIR_ROWS = 512  # of a rank, that CANN's pair sends to experts at once
LONG = 32_768  # tokens from which context parallelism is tried: what it shares out is attention and steps of a prefill
CONTEXTS = (2, 4, 8, 16)
LAUNCHES = 50  # of kernels of a layer, about
MANY = 10_000_000  # choices of experts of a long prefill: luck evens out, popularity does not
KINDS = {
    "plain": "data, tensor, pipe and experts alone",
    "context": "context parallelism",
    "pad": "a padded vocabulary",
    "copies": "copies of experts",
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A mesh, and how rows and caches lie on it.

    Attributes:
        chunk: tokens of a prefill step, all rows in one bundle.
        chunks: parts in which rows go to experts.
        pad: the vocabulary is padded.
        copies: of experts, in each layer.
    """

    mesh: Mesh
    exchange: bool = False
    split_cache: bool = False
    chunk: int = 512
    chunks: int = 1
    pad: bool = False
    copies: int = 0

    def __str__(self) -> str:
        flags = [" --exchange"] * self.exchange + [f" --moe-chunks {self.chunks}"] * (self.chunks > 1)
        flags += [" --split-cache"] * self.split_cache + [" --pad"] * self.pad
        return str(self.mesh) + "".join(flags) + f" --redundant-experts {self.copies}" * (self.copies > 0)

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        if self.mesh.context > 1:
            return "context"
        return "pad" if self.pad else "copies" if self.copies else "plain"


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of the fullest rank, and bounds for a token and for the prefill of the longest, in seconds."""

    choice: Choice
    bytes: int
    decode: float
    prefill: float


def like(request: Request, **changes: Any) -> Request:
    """The request with other choices; what its experts are stored in does not depend on them."""
    made = replace(request, **changes)
    made.__dict__["native"] = request.native
    if made.config is request.config:
        made.__dict__["_specs"] = request._specs
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
    """Meshes for a request without one (`base`): rows, length, formats and flags of all.

    Args:
        chunk: tokens of a prefill step; None: what suits each mesh.
        progress: told of meshes that are looked at.

    Raises:
        ConfigError: nothing of a die is left beside what driver and runtime take.
    """

    def __init__(self, base: Request, factors: Factors, chunk: int | None = None, progress: Notify = silent) -> None:
        self.given, self.progress = chunk, progress
        self.base, self.f, self.c = base, factors, base.config
        self.pages = check_length(self.c, base.max_len, base.page).pages
        self.sparse = decoder.is_sparse(self.c, self.pages * base.page)
        self.census = census_of(base, buckets_of(base)[0])
        if self.room <= 0:
            free, t = base.target.memory_bytes / GIB, base.target
            raise ConfigError(f"--factor reserve_gib={factors.reserve_gib:g}: a die of {t.name} has {free:,.2f} GiB.")
        self.weights: dict[Any, Shares] = {}
        self.states: dict[Any, list[int]] = {}
        self.reads = [self._read(i) for i in range(len(self.c.layers))]
        self.configs: dict[int, ModelConfig] = {0: base.config}

    @property
    def room(self) -> int:
        """Bytes of a die that weights and states may take."""
        return self.base.target.memory_bytes - int(self.f.reserve_gib * GIB)

    def legal(self, devices: int) -> list[Mesh]:
        """Meshes on which everything divides, and the rows of the request too; without context parallelism."""
        return self._meshes(devices, _sizes(self.c))

    def _meshes(self, devices: int, sizes: tuple[Size, ...], context: int = 1) -> list[Mesh]:
        def rules_of(mesh: Mesh) -> Rules:
            return preset(self.c, replace(mesh, context=context), "decode")

        found = legal_meshes(sizes, devices // context, rules_of, stages=len(self.c.layers))
        return [replace(mesh, context=context) for mesh in found if self.base.rows % mesh.data == 0]

    def all_choices(self, devices: int) -> Iterator[Choice]:
        """Everything that is tried of so many devices."""
        plain = self.legal(devices)
        for mesh in plain:
            yield from self.choices(mesh)
            for copied, copies in self._copied(mesh):
                yield from self.choices(copied, copies=copies)
        if self.base.max_len >= LONG:
            for context in (n for n in CONTEXTS if devices % n == 0):
                for mesh in self._meshes(devices, _sizes(self.c), context):
                    yield from self.choices(mesh)
        for mesh in self._meshes(devices, tuple(s for s in _sizes(self.c) if s.axis != "vocab")):
            if mesh not in plain:
                yield from self.choices(mesh, pad=True)

    def _copied(self, mesh: Mesh) -> Iterator[tuple[Mesh, int]]:
        """With copies of experts: one more on each rank, and as many as let the most ranks share the experts."""
        moe = self.c.moe
        if moe is None or moe.redundant:
            return
        found = {mesh.experts: mesh.experts} if mesh.experts > 1 else {}
        more = [n for n in mesh.expert_sizes if n > mesh.experts and n <= moe.experts]
        found |= {n: -moe.experts % n for n in more[-1:]}
        for ways, copies in found.items():
            if moe.experts + copies <= MAX_EXPERTS and ways <= MAX_RANKS.get(self.base.target.soc, MAX_EXPERTS):
                yield replace(mesh, experts=ways), copies

    def choices(self, mesh: Mesh, **given: Any) -> Iterator[Choice]:
        """How rows and caches may lie on a mesh. `given`: fields of all of them."""
        plain = self.roomy(Choice(mesh=mesh, chunk=self.chunk(mesh), **given))
        long = (
            mesh.tensor > 1 and self.base.kv_dtype == "bf16" and self._cache(plain) > self.base.target.memory_bytes / 8
        )
        queries = mesh.context * (mesh.tensor if self.sparse else 1)
        if plain.chunk % queries:  # of a chunk that was asked for
            return
        for choice in (plain, *self._exchanged(plain)):
            yield choice
            if long:
                yield self.roomy(replace(choice, split_cache=True, chunk=self.chunk(mesh)))

    def roomy(self, choice: Choice) -> Choice:
        """The choice with the longest prefill step that should find room; at least 512 tokens of a rank."""
        rows, ways = max(1, self.base.rows // choice.mesh.data), choice.mesh.context * choice.mesh.tensor
        held = self.held(choice)
        while self.given is None and held + self._working(choice) > self.room and choice.chunk > max(512 // rows, ways):
            choice = replace(choice, chunk=max(ways, choice.chunk // 2 // ways * ways))
        return choice

    def fits(self, choice: Choice) -> bool:
        """Whether the fullest rank has room for what it holds and for what it works with."""
        return self.held(choice) + self._working(choice) <= self.room

    def _working(self, choice: Choice) -> float:
        """About what a prefill step takes: rows of experts or what attention reads, running sum and closed blocks,
        buffers of HCCL."""
        c, mesh, moe = self.c, choice.mesh, self.c.moe
        tokens = max(1, self.base.rows // mesh.data) * choice.chunk
        values = tokens * c.embed * 2 * (8 + (len(c.layers) // c.residual_block if c.residual_block else 0))
        read = self._attended(mesh) * 4 / 3
        if moe is None:
            return values + read
        pairs = tokens * moe.top_k * max(1, mesh.experts // mesh.tensor)
        if choice.exchange:
            ways = max(1, mesh.experts)
            own = -(-tokens // (mesh.tensor * choice.chunks))
            pairs = own * ways * min(self._slots(choice) // ways, moe.top_k)
        wide = ((moe.latent or c.embed) + 2 * moe.ffn) * 2
        return values + max(read, pairs * wide * 4 / 3) + 3 * self.f.group_mib * 2**20

    def _attended(self, mesh: Mesh) -> int:
        """Bytes of what attention to all tokens reads in a prefill: latents, keys and values of all a cache holds."""
        mixers = [x.mixer for x in self.c.layers if isinstance(x.mixer, MlaConfig)]
        if self.sparse or not mixers:
            return 0
        m, tokens = mixers[0], self.base.rows // mesh.data * self.pages * self.base.page
        heads = -(-m.heads // mesh.tensor) * (m.key_nope + m.value)
        return tokens * (heads + m.latent + m.key_rope) * self.c.dtype.itemsize

    def chunk(self, mesh: Mesh, rows: int | None = None, tokens: int = STEP_TOKENS) -> int:
        """Tokens of a prefill step: as many as make `tokens` on a rank, and divide over what shares out queries."""
        if self.given is not None:
            return self.given
        rows, ways = rows or self.base.rows, mesh.context * mesh.tensor
        most = min(tokens // max(1, rows // mesh.data), self.base.max_len)
        return max(ways, most // ways * ways)

    def _exchanged(self, plain: Choice) -> Iterator[Choice]:
        """With rows sent to their experts, where CANN's pair can."""
        c, mesh, moe = self.c, plain.mesh, self.c.moe
        world = mesh.data * mesh.tensor
        if (
            moe is None
            or mesh.experts == 1
            or self.base.rows % world
            or self.base.rows * plain.chunk % (world * mesh.context)
        ):
            return
        rows = self.base.rows * plain.chunk // (world * mesh.context)
        chunks = -(-rows // PAIR_ROWS) if "prefill" in self.base.phases else 1
        choice = replace(plain, exchange=True, chunks=chunks)
        sizes = moe.latent or c.embed, moe.top_k, mesh.experts, self._slots(choice) // mesh.experts
        if not no_pair(self.base.target, self.base.rows // world, *sizes) and not no_pair(
            self.base.target, -(-rows // chunks), *sizes
        ):
            yield choice

    def _slots(self, choice: Choice) -> int:
        """Of experts of a layer, on all ranks that share them."""
        moe, ways = self.c.moe, choice.mesh.experts
        return 0 if moe is None else -(-(moe.slots + choice.copies) // ways) * ways

    def _cache(self, choice: Choice) -> int:
        """Bytes of the caches of a rank."""
        held = self.states_of(choice)
        caches = [size if isinstance(x.mixer, MlaConfig) else 0 for x, size in zip(self.c.layers, held, strict=True)]
        return max(sum(caches[own.start : own.stop]) for own in _layers(self.c, choice.mesh.pipe))

    def config(self, choice: Choice) -> ModelConfig:
        """The model as graphs of a choice have it, but for chunks."""
        if choice.copies not in self.configs:
            self.configs[choice.copies] = arranged(self.c, choice.copies)
        return self.configs[choice.copies]

    def request(self, choice: Choice) -> Request:
        """The request on a mesh."""
        c = self.config(choice)
        return like(
            self.base, config=in_chunks(c, choice.chunks) if choice.chunks > 1 else c, mesh=choice.mesh,
            exchange=choice.exchange, split_cache=choice.split_cache, pad=choice.pad or self.base.pad,
            chunk=min(choice.chunk, self.base.max_len),
        )  # fmt: skip

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def held(self, choice: Choice) -> int:
        """Bytes of weights and states of the fullest rank."""
        own, states = self._weights(choice), self.states_of(choice)
        stages = _layers(self.c, choice.mesh.pipe)
        share = self._slots(choice) // choice.mesh.experts
        sizes = [
            sum(own.layers[stage.start : stage.stop])
            + share * sum(own.expert[stage.start : stage.stop])
            + sum(states[stage.start : stage.stop])
            for stage in stages
        ]
        sizes[0] += own.first
        sizes[-1] += own.last if len(stages) > 1 else own.last_alone
        return max(sizes)

    def _weights(self, choice: Choice) -> "Shares":
        key = choice.mesh.tensor, choice.exchange, choice.pad
        if key not in self.weights:
            mesh, layers, ends = Mesh(tensor=choice.mesh.tensor, experts=1), self.census.by_layer, self.census.ends
            layout = Layout(config=self.c, mesh=mesh, exchange=choice.exchange, pad=choice.pad or self.base.pad)
            made = Weights(like(self.base, mesh=mesh), layout.rules("decode"), self.census)
            once = dict.fromkeys(self.census.alike)
            experts = {i: made.bytes_of(k for k in layers[i] if part_of(k[0]) == "experts") for i in once}
            own = {i: made.bytes_of(layers[i]) - experts[i] for i in once}
            slots = max(1, getattr(self.c.moe, "slots", 1))
            self.weights[key] = Shares(
                layers=[own[i] for i in self.census.alike],
                expert=[experts[i] // slots for i in self.census.alike],
                first=made.bytes_of(ends[0]),
                last=made.bytes_of(ends[1]),
                last_alone=made.bytes_of(k for k in ends[1] if k not in ends[0]),
            )
        return self.weights[key]

    def states_of(self, choice: Choice) -> list[int]:
        """Bytes of each layer's states, on a rank."""
        mesh = choice.mesh
        rows, cached = self.base.rows // mesh.data, mesh.context * (mesh.tensor if choice.split_cache else 1)
        key = rows, mesh.tensor, mesh.context, cached
        if key not in self.states:
            rules = preset(self.c, mesh.stage, "decode", split_cache=choice.split_cache)
            pages = -(-self.pages // cached) * cached
            slots, pool = pools(rules, self.base.rows, pages)
            specs = caches.state_specs(self.c, self.base.kv_dtype, slots=slots, pages=pool, page=self.base.page)
            each = {
                i: sum(place("", s, rules, self.c.dtype).bytes for s in tree.leaves(specs[i]) if s is not None)
                for i in dict.fromkeys(self.census.alike)
            }
            self.states[key] = [each[first] for first in self.census.alike]
        return self.states[key]

    # ---- a bound of time ---------------------------------------------------------------------------------------------

    def promise(self, choice: Choice) -> Held:
        """What a mesh could do at best."""
        t, mesh, f, moe = self.base.target, choice.mesh, self.f, self.c.moe
        own, rows = self._weights(choice), self.base.rows // mesh.data
        experts = self._slots(choice) // mesh.experts * sum(own.expert)
        rest = sum(own.layers) + own.first + own.last_alone
        states = sum(size * part for size, part in zip(self.states_of(choice), self.reads, strict=True))
        touched = 1.0
        if moe is not None:
            outside = mesh.data * mesh.tensor // mesh.experts
            here = max(1, self.base.rows // max(1, min(outside, mesh.data))) * moe.top_k
            touched = 1 - (1 - 1 / moe.experts) ** here
        rate = t.die.bandwidth.value * f.memory
        decode = (rest + touched * experts + states) / rate + self._waits(choice, rows, 1)
        # a prefill has one sequence for each of data, and room for as many tokens as the bundle's
        chunk = self.chunk(mesh, mesh.data, max(1, self.base.rows // mesh.data) * choice.chunk)
        flops = 2 * self._work(choice) * chunk / (mesh.tensor * mesh.context)
        step = max((rest + experts) / rate, flops / (t.die.cube["bf16"].value * f.cube))
        step += self._waits(choice, 1, chunk)
        steps = -(-self.base.max_len // chunk)
        return Held(choice=choice, bytes=self.held(choice), decode=decode, prefill=step * (1 + (steps - 1) / mesh.pipe))

    def _waits(self, choice: Choice, rows: int, tokens: int) -> float:
        """Seconds of a step, through all stages, in which nothing is computed: links, and starts of kernels."""
        mesh, f, layers = choice.mesh, self.f, len(self.c.layers)
        own = rows * tokens
        hops = (mesh.pipe - 1) * edge(own * self.c.embed * 2, self.base.target.links, mesh.stage.world, f)
        context = self._handovers(choice, own) if tokens > 1 else 0.0
        starts = LAUNCHES * layers * f.launch_us * 1e-6
        return self._crossings(choice, max(1, own // (mesh.context if tokens > 1 else 1))) + hops + context + starts

    def _work(self, choice: Choice) -> float:
        """Products of a token of a prefill half way through the longest, in multiplications, of all ranks together."""
        counts, moe, mesh = _counts(self.c), self.c.moe, choice.mesh
        experts = 0 if moe is None else counts.parts["experts"] * moe.top_k / moe.experts
        seen, work = self.base.max_len / 2, float(counts.active)
        for m in (x.mixer for x in self.c.layers):
            if isinstance(m, MlaConfig) and self.sparse and m.indexer is not None:
                work += 0 if m.indexer.shared else seen * m.indexer.heads * m.indexer.key
            elif isinstance(m, MlaConfig):
                work += seen * m.heads * (m.key_nope + m.key_rope + m.value)
        if moe is not None and not choice.copies and moe.experts % mesh.experts == 0:
            # the busiest rank is waited for; copies can at best make all as busy
            work += experts * (routing(moe.experts, MANY, mesh.experts, 0, self.f.spread).median.rows - 1)
        return work

    def _read(self, layer: int) -> float:
        """The part of a layer's states that a step reads: of caches whose keys are selected the index alone."""
        m = self.c.layers[layer].mixer
        if not self.sparse or not isinstance(m, MlaConfig) or m.indexer is None:
            return 1.0
        key = 0 if m.indexer.shared else m.indexer.key
        return key / (m.latent + m.key_rope + key)

    def _handovers(self, choice: Choice, tokens: int) -> float:
        """Seconds in which the ranks of context tell each other what they made of a prefill step."""
        mesh = choice.mesh
        if mesh.context == 1:
            return 0.0
        size = (max(1, tokens // mesh.context), self.c.embed)
        whole = Issued("all_gather", mesh.stage.atoms("context"), size, torch.bfloat16)
        count = 2 * len(self.c.layers)  # a mixer's results and an ffn's
        return count * crossing(whole, mesh.stage, self.base.target.links, self.f).seconds

    def _crossings(self, choice: Choice, rows: int) -> float:
        """Seconds of the collectives of all layers within a stage. `rows`: tokens of a rank, in a step."""
        c, stage, f, links = self.c, choice.mesh.stage, self.f, self.base.target.links
        tensor, experts = stage.atoms("tensor"), stage.atoms("experts")

        def one(name: str, axes: tuple[str, ...], rows: int, width: int) -> float:
            if stage.size(axes) == 1:
                return 0.0
            return crossing(Issued(name, axes, (max(1, rows), width), torch.bfloat16), stage, links, f).seconds

        layers, moe = len(c.layers), c.moe
        total = layers * one("all_reduce", tensor, rows, c.embed)  # of mixers
        if moe is None:
            return total + layers * one("all_reduce", tensor, rows, c.embed)
        width = moe.latent or c.embed
        if choice.exchange:
            own = max(1, rows // choice.mesh.tensor)
            sent = 2 * one("expert_dispatch", experts, own * moe.top_k, width)
            ends = one("reduce_scatter", tensor, rows, c.embed) + one("all_gather", tensor, own, c.embed)
            return total + layers * (sent + ends)
        data = tuple(axis for axis in experts if axis not in tensor)
        read = rows * stage.size(data)  # of all ranks that share the experts
        each = one("all_gather", data, rows, c.embed) + one("all_reduce", tensor, rows, c.embed)
        each += one("all_reduce", experts, read, width)
        if moe.latent:
            each += one("all_gather", tensor, read, width // stage.size(tensor))
        return total + layers * each


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Bytes of a rank's weights. `layers`: of each, without experts; `expert`: of one. Both ends beside, and the last
    one on a stage that has both."""

    layers: list[int]
    expert: list[int]
    first: int
    last: int
    last_alone: int


@functools.lru_cache(maxsize=4)
def _counts(c: ModelConfig) -> Counts:
    return parameter_counts(c)


def least(sieve: Sieve) -> int:
    """The fewest dies on which weights and states that were shared out evenly would fit."""
    alone = Choice(mesh=Mesh())
    own = sieve._weights(alone)
    experts = getattr(sieve.c.moe, "slots", 0) * sum(own.expert)
    everything = sum(own.layers) + experts + own.first + own.last_alone + sum(sieve.states_of(alone))
    return max(1, math.ceil(everything / sieve.room))


def counts_up_to(sieve: Sieve, most: int) -> Iterator[int]:
    """Numbers of devices that might do and can be had, smallest first: whole packages; beyond a host whole hosts."""
    count = whole_up(sieve.base.target, least(sieve))
    while count <= most:
        yield count
        count = whole_up(sieve.base.target, count + 1)


def whole_up(t: Target, dies: int) -> int:
    """So many dies, or the next more that are whole packages, and beyond a host whole hosts."""
    joined = {link.name: link.dies for link in t.links}
    host = joined.get("host", 1)
    one = joined.get("package", 1) if dies <= host else host
    return -(-dies // one) * one
