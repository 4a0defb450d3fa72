"""`kimi-graph plan`: does a model fit, on how many devices, on which mesh, and how fast.

All legal meshes are sieved by bytes and by a bound of time (`sieve`); the few that promise most are traced, get a full
ledger, and are estimated. What does not fit is refused with the reason and the nearest that does, without any time.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kimi_graph.checkpoint import released_formats
from kimi_graph.compile import weight_formats
from kimi_graph.compile.caches import CHIPS
from kimi_graph.compile.driver import Request, legal_phases
from kimi_graph.compile.targets import Target
from kimi_graph.compile.weight_formats import kept_form
from kimi_graph.config import MlaConfig, ModelConfig, arranged, check_length
from kimi_graph.display import several
from kimi_graph.errors import ConfigError, KimiGraphError, ShardingError
from kimi_graph.models import decoder
from kimi_graph.parallel import Mesh
from kimi_graph.progress import Notify, silent

from .buffers import full_ledger
from .estimate import Decode, Prefill, bucket_at, decode, prefill
from .factors import Factors
from .ledger import Ledger, buckets_of, stage_states
from .sieve import GIB, KINDS, LONG, Choice, Held, Sieve, counts_up_to, least, like, whole_up

TRACED = 2  # of the meshes that promise most
SPARE = 4  # that are tried beside where some of these do not fit
MOST = 8192  # devices that are tried, of targets whose fast domain is smaller


class PlanError(KimiGraphError):
    """A request that nothing meets."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is wanted.

    Attributes:
        model: as it was named.
        devices: dies; None: as few as will do.
        batch: sequences; None: one for each device, one where devices are free.
        max_len: tokens of the longest; None: 4,096.
        ttft, tpot: seconds that must be kept, with `max_len` tokens.
        mesh: the only one, with its choices; None: the best.
        weights_format: None: the smallest exact form that a kernel takes.
    """

    model: str
    config: ModelConfig
    target: Target
    devices: int | None = None
    max_len: int | None = None
    batch: int | None = None
    ttft: float | None = None
    tpot: float | None = None
    mesh: Mesh | None = None
    weights_format: str | None = None
    kv_dtype: str = "bf16"
    page: int = 128
    chunk: int | None = None
    exchange: bool = False
    split_cache: bool = False
    pad: bool = False
    redundant_experts: int = 0
    moe_chunks: int = 1
    factors: Factors = field(default_factory=Factors)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return min(4096, self.config.max_len) if self.max_len is None else self.max_len


@dataclass(frozen=True, kw_only=True)
class Option:
    """A mesh that was traced.

    Attributes:
        request: as `compile` would make both phases of it.
        ledger: of both.
        decode: of its batch at its longest.
        prefill: of graphs for prefill alone, one sequence for each of dp.
    """

    choice: Choice
    request: Request
    ledger: Ledger
    decode: Decode
    prefill: Prefill

    @property
    def room(self) -> int:
        """Bytes that are left on the fullest rank."""
        return self.request.target.memory_bytes - self.ledger.fullest.total

    @property
    def ttft(self) -> float:
        """Seconds until the first token after a prompt of the longest length."""
        return self.prefill.seconds(self.request.max_len)

    @property
    def tpot(self) -> float:
        """Seconds a token."""
        return self.decode.seconds

    def lacks(self, rows: int, context: int) -> int:
        """Bytes that the fullest rank lacks for the states of so many sequences of so many tokens; 0: they fit."""
        states = stage_states(self.request, bucket_at(self.request, "decode", rows=rows, tokens=1, context=context))
        needs = (s.total - s.of("states") + own for s, own in zip(self.ledger.stages, states, strict=True))
        return max(0, max(needs) - self.request.target.memory_bytes)

    @property
    def lacks_in_flight(self) -> int:
        """The same with as many batches as keep all stages busy."""
        return self.lacks(self.decode.rows * len(self.ledger.stages), self.decode.context)


@functools.lru_cache(maxsize=4)
def _forms(c: ModelConfig, soc: str) -> tuple[weight_formats.Choice, ...]:
    """Forms of the weights of a model as it was released."""
    specs = decoder.model_specs(c)
    return tuple(weight_formats.choices(c, specs, released_formats(c, specs), [soc]))


def format_of(ask: Ask) -> str:
    """How experts are kept: what is asked for, or the smallest exact form that a kernel takes."""
    if ask.weights_format is not None:
        return ask.weights_format
    exact = [row for row in _forms(ask.config, ask.target.soc) if row.made and row.exact in ("as stored", "exact")]
    return min(exact, key=lambda row: (row.bytes, row.name != "bf16")).name if exact else "bf16"


def base_request(ask: Ask) -> Request:
    """The request without a mesh.

    Raises:
        ConfigError, CompileError: numbers and choices that cannot be.
    """
    c = arranged(ask.config, ask.redundant_experts, ask.moe_chunks)
    stored = released_formats(c, decoder.model_specs(c))
    check_length(c, ask.length, max(1, ask.page))
    if ask.chunk is not None and ask.chunk > ask.length:
        raise ConfigError(f"--chunk {ask.chunk:,} is over --max-len {ask.length:,}; the largest is {ask.length:,}.")
    rows = ask.batch or (ask.mesh.data if ask.mesh is not None else ask.devices) or 1
    request = Request(
        config=c, target=ask.target, phases=legal_phases(c), rows=rows, max_len=ask.length, page=ask.page,
        chunk=min(512, ask.length), weights_format=format_of(ask), kv_dtype=ask.kv_dtype, stored=stored,
    )  # fmt: skip
    kept_form(request.weights_format, request.native, ask.target.soc)
    buckets_of(request)
    return request


# ---- one mesh --------------------------------------------------------------------------------------------------------


def evaluate(ask: Ask, sieve: Sieve, choice: Choice) -> Option:
    """Trace a mesh, with the longest prefill step that leaves room.

    Raises:
        ShardingError, CompileError: the mesh cannot be.
        PlanError: it does not fit.
    """
    memory = ask.target.memory_bytes
    while True:
        request = sieve.request(choice)
        request.check()
        ledger = full_ledger(request, ask.factors)
        over = ledger.fullest.total - memory
        if over <= 0:
            break
        smaller = sieve.chunk(choice.mesh, tokens=choice.chunk * max(1, request.rows // choice.mesh.data) // 2)
        if ask.chunk is not None or smaller >= choice.chunk or ledger.fullest.of("buffers") < over:
            raise PlanError(_full(ask, choice, ledger))
        choice = replace(choice, chunk=smaller, chunks=max(1, choice.chunks // 2))
    alone = prefill_request(ask, sieve, request, choice)
    return Option(
        choice=choice, request=request, ledger=ledger, decode=decode(request, ask.factors),
        prefill=prefill(alone, ask.factors),
    )  # fmt: skip


def prefill_request(ask: Ask, sieve: Sieve, request: Request, choice: Choice) -> Request:
    """Graphs for prefill alone: one sequence for each of dp, in steps with as many tokens of a rank as fit."""
    mesh, rows = choice.mesh, choice.mesh.data
    tokens = request.rows // rows * request.chunk  # as many found room beside all states
    phases = tuple(p for p in request.phases if p != "decode")
    while True:
        chunk = min(ask.chunk or sieve.chunk(mesh, rows, tokens), request.max_len)
        exchange = choice.exchange and rows * chunk % (mesh.data * mesh.tensor) == 0
        alone = like(request, phases=phases, rows=rows, chunk=chunk, exchange=exchange)
        if tokens <= 64 or full_ledger(alone, ask.factors).fullest.total <= ask.target.memory_bytes:
            return alone
        tokens //= 2


def _full(ask: Ask, choice: Choice, ledger: Ledger) -> str:
    s = ledger.fullest
    parts = ", ".join(f"{gib(s.of(kind))} of {kind}" for kind in ("weights", "states", "buffers"))
    return (
        f"{ask.config.name} does not fit {choice} of {ask.target.name}: a rank of stage {s.stage} needs {gib(s.total)} "
        f"({parts}), a die has {gib(ask.target.memory_bytes)}"
    )


def dies(count: int, t: Target) -> str:
    """`1 die`, `96 dies (6 hosts)`, `2 dies (1 package)`: in what they are had, where that is a whole number."""
    joined = {link.name: link.dies for link in t.links if link.name in ("package", "host")}
    whole = [several(count // n, name) for name, n in reversed(joined.items()) if n and count % n == 0]
    return several(count, "die") + (f" ({whole[0]})" if whole else "")


def sequences(rows: int, length: int) -> str:
    """`32 sequences of 4,096 tokens`."""
    return f"{several(rows, 'sequence')} of {several(length, 'token')}"


def gib(size: float) -> str:
    """Bytes, in words."""
    return f"{size / GIB:,.2f} GiB"


# ---- the best --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was found.

    Attributes:
        options: traced meshes, the best for both phases first.
        legal: how many there are, and of them `fitting`.
        others: those that should fit too, by what they promise; not traced.
        devices: dies.
        fewer: why fewer do not do; empty where the number was given.
        bare: the fewest dies that would do if dies could be had one by one; 0 where nobody asked.
        tried: what became of context parallelism, padding and copies of experts, in words.
    """

    ask: Ask
    base: Request
    devices: int
    options: tuple[Option, ...]
    legal: int
    fitting: int
    fewer: str = ""
    bare: int = 0
    others: tuple[Held, ...] = ()
    tried: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Option:
        """The mesh to take."""
        return self.options[0]

    @property
    def summary(self) -> str:
        o = self.best
        return (
            f"{self.ask.config.name} on {dies(self.devices, self.ask.target)} of {self.ask.target.name}: {o.choice}, "
            f"{gib(o.room)} of a die free"
        )

    def text(self) -> str:
        from .report import plan_text

        return plan_text(self)

    def to_json(self) -> Any:
        from .report import plan_json

        return plan_json(self)


def make_plan(ask: Ask, traced: int = TRACED, progress: Notify = silent) -> Plan:
    """The best mesh for what is wanted, of the `traced` ones that promise most.

    Raises:
        PlanError: nothing fits, or nothing is quick enough; with the nearest that is.
        ShardingError, CompileError, ConfigError: what cannot be at all.
    """
    if ask.devices is not None and ask.devices > MOST:
        raise ConfigError(f"--devices {ask.devices:,}: at most {MOST:,} are planned for; the nearest is {MOST:,}.")
    base = base_request(ask)
    sieve = Sieve(base, ask.factors, ask.chunk, progress)
    if ask.mesh is not None:
        return _one_mesh(ask, base, sieve)
    if ask.devices is not None:
        plan = _with(ask, base, sieve, ask.devices, traced)
        if plan is None:
            raise PlanError(_nothing(ask, base, sieve, ask.devices))
        return _quick_enough(ask, plan)
    return _fewest(ask, base, sieve)


def _one_mesh(ask: Ask, base: Request, sieve: Sieve) -> Plan:
    mesh = ask.mesh
    assert mesh is not None
    if ask.devices not in (None, mesh.world):
        raise PlanError(f"--mesh {mesh} has {mesh.world:,} ranks, --devices {ask.devices}; leave one of them out.")
    checked = like(
        base, mesh=mesh, exchange=ask.exchange, split_cache=ask.split_cache, pad=ask.pad,
        chunk=max(mesh.tensor * mesh.context, ask.chunk or 1),
    )  # fmt: skip
    checked.check()
    chunk = ask.chunk or sieve.chunk(mesh)
    choice = Choice(
        mesh=mesh, exchange=ask.exchange, split_cache=ask.split_cache, chunk=chunk, chunks=ask.moe_chunks, pad=ask.pad
    )
    try:
        option = evaluate(ask, sieve, choice)
    except PlanError as error:
        raise PlanError(f"{error}. {_instead(ask, base, sieve, mesh.world)}") from None
    return _quick_enough(ask, Plan(ask=ask, base=base, devices=mesh.world, options=(option,), legal=1, fitting=1))


def _instead(ask: Ask, base: Request, sieve: Sieve, devices: int) -> str:
    """A mesh of as many dies that fits, or how many would do."""
    free = replace(ask, mesh=None, ttft=None, tpot=None, batch=base.rows)
    found = _with(free, base, sieve, devices, traced=1)
    return _nearest(free, sieve, devices) if found is None else f"Of so many dies {found.best.choice} does."


def _fitting(sieve: Sieve, devices: int) -> tuple[list[Choice], list[Choice]]:
    """Choices that should fit, and all there are."""
    found = list(sieve.all_choices(devices))
    return [choice for choice in found if sieve.fits(choice)], found


def _with(ask: Ask, base: Request, sieve: Sieve, devices: int, traced: int = TRACED) -> Plan | None:
    """The best of so many devices; None where nothing fits."""
    fitting, legal = _fitting(sieve, devices)
    held = [sieve.promise(choice) for choice in fitting]
    first = promising(held, traced)
    spare = (choice for choice in promising(held, traced + SPARE) if choice not in first)
    options = []
    for option in itertools.islice(_evaluated(ask, sieve, itertools.chain(first, spare)), len(first)):
        options.append(option)
        sieve.progress(f"meshes of {dies(devices, base.target)}", len(options), len(first))
    if not options:
        return None
    options.sort(key=_both)
    seen = {_bare(o.choice) for o in options}
    others = [h for h in held if _bare(h.choice) not in seen]
    return Plan(
        ask=ask, base=base, devices=devices, options=tuple(options), legal=len(legal), fitting=len(fitting),
        others=tuple(sorted(others, key=_bound)), tried=_tried(base, legal, held, options),
    )  # fmt: skip


def _evaluated(ask: Ask, sieve: Sieve, choices: Iterable[Choice]) -> Iterator[Option]:
    """Those that fit: others need more room for activations, or a part has no form on them."""
    for choice in choices:
        with contextlib.suppress(PlanError, ShardingError):
            yield evaluate(ask, sieve, choice)


def _both(o: Option) -> float:
    return o.ttft * o.tpot


def _bound(held: Held) -> float:
    return held.decode * held.prefill


def _bare(choice: Choice) -> Choice:
    """Without what follows from the rest."""
    return replace(choice, chunk=0, chunks=0)


def _tried(base: Request, legal: Iterable[Choice], held: Iterable[Held], options: list[Option]) -> dict[str, str]:
    """Why each kind of choice that costs something beside is taken, or is not."""
    best = {}
    for h in sorted(held, key=_bound):
        best.setdefault(h.choice.kind, h)
    kinds = {choice.kind for choice in legal}
    return {kind: _verdict(base, kind, kinds, best, options) for kind in KINDS if kind != "plain"}


def _verdict(base: Request, kind: str, kinds: set[str], best: dict[str, Held], options: list[Option]) -> str:
    if kind not in kinds:
        return _not_there(base, kind)
    if kind not in best:
        return "does not fit"
    plain, own = best.get("plain"), best[kind]
    if plain is None:
        return f"taken: nothing fits without ({own.choice})"
    both = {k: next((o for o in options if o.choice.kind == k), None) for k in ("plain", kind)}
    if (mine := both[kind]) is not None and (other := both["plain"]) is not None:
        times = f"x{mine.ttft / other.ttft:.2f} of the TTFT and x{mine.tpot / other.tpot:.2f} of the TPOT"
        head = "taken" if options[0] is mine else "traced, not taken"
        return f"{head}: {mine.choice} has {times} of {other.choice}"
    times = f"x{own.prefill / plain.prefill:.2f} of a prefill and x{own.decode / plain.decode:.2f} of a token"
    return f"not traced: the best, {own.choice}, promises {times} of {plain.choice}"


def _not_there(base: Request, kind: str) -> str:
    moe = base.config.moe
    if kind == "context":
        if base.max_len < LONG:
            return f"not tried: it shares out long sequences, and is tried from {LONG:,} tokens"
        return "no legal mesh has it"
    if kind == "pad":
        return "no mesh needs it: nothing more divides with it"
    if moe is None:
        return "there are no experts"
    return "as asked for" if moe.redundant else "no legal number of copies: experts are on one rank, or too many"


def promising(held: Iterable[Held], count: int) -> list[Choice]:
    """The best for both phases, for decode and for prefill, in turn; and the best that costs nothing beside."""
    held = list(held)
    orders = [
        sorted(held, key=_bound),
        sorted(held, key=lambda h: h.decode),
        sorted(held, key=lambda h: h.prefill),
    ]
    turns = [h.choice for rank in range(len(held)) for h in (order[rank] for order in orders)]
    found = list(dict.fromkeys(turns))[:count]
    plain = next((h.choice for h in orders[0] if h.choice.kind == "plain"), None)
    return [*found, plain] if plain is not None and all(c.kind != "plain" for c in found) else found


def _fewest(ask: Ask, base: Request, sieve: Sieve) -> Plan:
    """The fewest devices that do: whole packages, beyond a host whole hosts."""
    last, found = "", None
    for devices in counts_up_to(sieve, MOST):
        fitting, legal = _fitting(sieve, devices)
        if not fitting:
            last = _why_not(devices, len(legal), min(map(sieve.held, legal), default=0), sieve)
            continue
        found = _with(ask, base, sieve, devices)
        if found is not None and _slow(ask, found) == "":
            break
        tight = "activations and buffers do not fit beside weights and states"
        last = f"{devices:,}: {tight if found is None else _slow(ask, found)}"
        if found is not None:  # it fits: more devices make it quicker in larger steps
            return _quicker(ask, base, sieve, found, last)
    if found is None:
        raise PlanError(_nothing(ask, base, sieve, MOST))
    few = least(sieve)
    even = f"weights and states, shared out evenly, would not fit fewer than {few:,}"
    fewer = last or (even if few > 1 else "")
    return _quick_enough(ask, replace(found, fewer=fewer, bare=_one_by_one(ask, base, sieve, found.devices)))


def _one_by_one(ask: Ask, base: Request, sieve: Sieve, devices: int) -> int:
    """The fewest dies that would do, whole hosts or not."""
    for count in range(least(sieve), devices):
        if whole_up(ask.target, count) == devices and _fitting(sieve, count)[0]:
            plan = _with(ask, base, sieve, count, traced=1)
            if plan is not None and not _slow(ask, plan):
                return count
    return devices


def _quicker(ask: Ask, base: Request, sieve: Sieve, found: Plan, last: str) -> Plan:
    """More devices until times are kept: one after another within a host, beyond it half as many again each time."""
    best, t = found, ask.target
    host = next((link.dies for link in t.links if link.name == "host"), 8)
    before = devices = found.devices
    while devices < MOST:
        before, devices = devices, whole_up(t, devices + 1 if devices < host else min(MOST, -(-devices * 3 // 2)))
        more = _with(ask, base, sieve, devices, traced=2)
        if more is None:
            continue
        if not _slow(ask, more):
            between = "; what lies between was not tried" * (whole_up(t, before + 1) < devices)
            return _quick_enough(ask, replace(more, fewer=last + between))
        best, last = min(best, more, key=lambda p: _misses(ask, p)), f"{devices:,}: {_slow(ask, more)}"
    raise PlanError(_too_slow(ask, best))


def _why_not(devices: int, legal: int, least: int, sieve: Sieve) -> str:
    if not legal:
        return f"{devices:,}: no mesh on which all sizes divide"
    return f"{devices:,}: weights and states take {gib(least)} of a die at least, {gib(sieve.room)} are there for them"


def _quick_enough(ask: Ask, plan: Plan) -> Plan:
    if _slow(ask, plan):
        raise PlanError(_too_slow(ask, plan))
    met = [o for o in plan.options if _met(ask, o)]
    return replace(plan, options=(*met, *(o for o in plan.options if o not in met)))


def _met(ask: Ask, o: Option) -> bool:
    return o.ttft <= (ask.ttft or math.inf) and o.tpot <= (ask.tpot or math.inf)


def _slow(ask: Ask, plan: Plan) -> str:
    """Why none of the traced meshes is quick enough; empty where one is."""
    if any(_met(ask, o) for o in plan.options):
        return ""
    limits = {"--ttft": ask.ttft, "--tpot": None if ask.tpot is None else 1e3 * ask.tpot}
    wanted = [f"{flag} {limit:g}" for flag, limit in limits.items() if limit is not None]
    return f"no mesh keeps {' and '.join(wanted)}"


def _misses(ask: Ask, plan: Plan) -> float:
    return min(max(o.ttft / (ask.ttft or math.inf), o.tpot / (ask.tpot or math.inf)) for o in plan.options)


def _too_slow(ask: Ask, plan: Plan) -> str:
    o = min(plan.options, key=lambda o: max(o.ttft / (ask.ttft or math.inf), o.tpot / (ask.tpot or math.inf)))
    asked = []
    if ask.ttft is not None:
        asked.append(f"--ttft {math.ceil(o.ttft * 10) / 10:g}")
    if ask.tpot is not None:
        asked.append(f"--tpot {math.ceil(o.tpot * 1e3):g}")
    return (
        f"{ask.config.name} on {dies(plan.devices, ask.target)} of {ask.target.name}: {_slow(ask, plan)} with "
        f"{sequences(plan.base.rows, plan.base.max_len)}. Nearest that can be asked for: {' '.join(asked)} "
        f"({o.choice})."
    )


def _nothing(ask: Ask, base: Request, sieve: Sieve, devices: int) -> str:
    """Why so many devices do not do, and how many would."""
    c, t = ask.config, ask.target
    if not (legal := _fitting(sieve, devices)[1]):
        near = _neighbour(ask, sieve, devices)
        return f"{c.name} cannot be on {dies(devices, t)}: no mesh on which all sizes divide. {near}"
    rows = _forms(c, t.soc)
    size = {row.name: row.bytes for row in rows}
    kept = size.get(base.weights_format, 0)
    released = f"{gib(size['native'])} of weights as released"
    as_kept = "" if kept == size["native"] else f", {gib(kept)} as graphs keep them ({base.weights_format})"
    copies = f", {several(ask.redundant_experts, 'copy')} of experts in each layer" * (ask.redundant_experts > 0)
    each = " (--batch: one for each die where none is given)" if ask.batch is None and devices > 1 else ""
    states = sum(sieve.states_of(Choice(mesh=Mesh())))
    lean = min(legal, key=sieve.held)
    head = (
        f"{c.name} does not fit {dies(devices, t)} of {t.name}: it needs {released}{as_kept}{copies}, {gib(states)} "
        f"of states for {sequences(base.rows, base.max_len)}{each}; there are "
        f"{gib(devices * t.memory_bytes)}. Of a die {lean} takes least: {gib(sieve.held(lean))} of weights and states, "
        f"and activations beside; {gib(sieve.room)} are there for them"
    )
    return f"{head}. {_fewer_rows(ask, base, devices)}{_nearest(ask, sieve, devices)}"


def _neighbour(ask: Ask, sieve: Sieve, devices: int) -> str:
    """A number of dies a little below that some mesh has and that should fit; else the smallest that fits."""
    near = next((n for n in range(devices - 1, max(0, devices - 65), -1) if _fitting(sieve, n)[0]), None)
    return _nearest(ask, sieve, devices) if near is None else f"The nearest below that should fit is --devices {near}."


def _fewer_rows(ask: Ask, base: Request, devices: int) -> str:
    """How many sequences the same dies hold, by halves; "" where not even one."""
    rows = base.rows
    while rows > 1:
        rows //= 2
        fewer = like(base, rows=rows)
        free = replace(ask, batch=rows, ttft=None, tpot=None)
        found = _with(free, fewer, Sieve(fewer, ask.factors, ask.chunk), devices, traced=1)
        if found is not None:
            return f"As many dies hold {sequences(rows, base.max_len)}: --batch {rows}, {found.best.choice}. "
    return ""


def _nearest(ask: Ask, sieve: Sieve, devices: int) -> str:
    base = sieve.base
    if base.rows == devices and ask.batch is None:  # one sequence for each device: of more devices, too
        base = like(base, rows=1)
        sieve = Sieve(base, ask.factors, ask.chunk)
    for count in counts_up_to(sieve, MOST):
        fitting, _ = _fitting(sieve, count)
        found = _with(replace(ask, batch=base.rows), base, sieve, count, traced=1) if fitting else None
        if found is not None:
            bare = _one_by_one(replace(ask, ttft=None, tpot=None, batch=base.rows), base, sieve, count)
            where = f", {bare:,} if dies could be had one by one" if bare < count else ""
            some = f"{dies(count, ask.target)} for {sequences(base.rows, base.max_len)}"
            return f"The smallest fit is {some}{where}: {found.best.choice}."
    length = base.max_len // 2
    return f"Nothing up to {MOST:,} devices fits; ask for fewer sequences than {base.rows:,}, or --max-len {length:,}."


# ---- formats ---------------------------------------------------------------------------------------------------------


def formats(plan: Plan) -> list[dict[str, Any]]:
    """Forms of weights and of caches, smallest first, with whether a kernel takes them."""
    c, t, base = plan.ask.config, plan.ask.target, plan.base
    rows = _forms(c, t.soc)
    found = [
        {
            "what": "weights", "format": row.name, "bytes": row.bytes, "values": row.exact, "taken": row.taken,
            "made": row.made, "kernel": row.kernel, "used": row.name == base.weights_format,
        }
        for row in sorted(rows, key=lambda row: row.bytes)
    ]  # fmt: skip
    indexed = [x.mixer for x in c.layers if isinstance(x.mixer, MlaConfig) and x.mixer.indexer]
    for name in ("int8", "fp8", "bf16"):
        taken = name == "bf16" or (bool(indexed) and t.soc in CHIPS[name])
        why = "" if taken else ("no sparse attention in the model" if not indexed else f"{t.soc} has no 8-bit floats")
        found.append(
            {
                "what": "caches", "format": name, "bytes": _row(c, name),
                "values": "exact" if name == "bf16" else "rounded", "taken": taken, "made": taken,
                "kernel": why or "a token's row", "used": name == base.kv_dtype,
            }
        )  # fmt: skip
    return found


def _row(c: ModelConfig, kv_dtype: str) -> int:
    """Bytes of a token in the caches of all layers."""
    from kimi_graph.compile import caches
    from kimi_graph.ops.quantised_cache import INDEX_SCALE, row_width

    size = 0
    for m in (x.mixer for x in c.layers if isinstance(x.mixer, MlaConfig)):
        own = m.indexer is not None and not m.indexer.shared
        key = m.indexer.key if m.indexer is not None and own else 0
        if kv_dtype == "bf16" or m.indexer is None:
            size += (m.latent + m.key_rope + key) * c.dtype.itemsize
        else:
            scale = INDEX_SCALE[caches.STORED[kv_dtype]].itemsize if own else 0
            size += row_width(m.latent, m.key_rope) + key + scale
    return size
