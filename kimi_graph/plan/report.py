"""A plan for a reader, and for a program."""

import shlex
from collections.abc import Iterator
from typing import Any

from kimi_graph.compile.targets import Target
from kimi_graph.config import MlaConfig
from kimi_graph.display import several
from kimi_graph.models.decoder import is_sparse
from kimi_graph.ops.attention import latent_heads, padded_heads
from kimi_graph.parallel import Mesh
from kimi_graph.parallel.collectives import Issued

from .estimate import Decode, Prefill, Step, decode
from .factors import PUBLISHED, Factors
from .ledger import buckets_of
from .network import crossing, hops
from .profiles import table, wrapped
from .search import Option, Plan, dies, formats, gib
from .sieve import KINDS, whole_up

LENGTHS = (4_096, 8_192, 32_768, 131_072, 524_288, 1_048_576)
IMAGES = (1, 8, 64)
MORE_BATCH = (1, 8, 32, 128)


def plan_text(plan: Plan) -> str:
    """The plan for a reader: meshes, the ledger and times of the best one, and what is published beside them."""
    o, ask = plan.best, plan.ask
    lines = [
        f"{ask.config.name} on {dies(plan.devices, ask.target)} of {ask.target.name} ({ask.target.product}, "
        f"{gib(ask.target.memory_bytes)} each)",
        *wrapped(
            f"{sequences(plan.base.rows)} of at most {several(plan.base.max_len, 'token')} ({pages_text(plan)}); "
            f"experts as {form(o)}, caches as {plan.base.kv_dtype}",
            2,
        ),
        "",
        *(line for words in count_lines(plan) for line in wrapped(words, 2)),
        *[""] * bool(count_lines(plan)),
        _legal(plan),
        *_meshes(plan),
        *(line for words in (*_others(plan), *tried_lines(plan)) for line in wrapped(words, 2)),
        "",
        *(line for words in _apart(plan) for line in wrapped(words)),
        *(line for words in link_lines(plan) for line in wrapped(words)),
        "",
        *_ledger(o),
        *(wrapped(f"heads     {padded}") if (padded := padded_queries(plan)) else []),
        "",
        *_prefill(plan, o.prefill),
        "",
        *_decode(plan, o),
        "",
        *_formats(plan),
        "",
        "published, beside what is estimated; most with speculative decoding and forced balance",
        *("  " + line for line in table([(what, f"{figure} ({where})") for what, figure, where in PUBLISHED])),
        *wrapped(f"factors   {_factors(plan)}"),
        "",
        *(f"compile   {line}" for line in commands(plan)),
    ]
    return "\n".join(lines)


def _legal(plan: Plan) -> str:
    if plan.ask.mesh is not None:
        return "the mesh that was asked for:"
    legal = "1 choice is" if plan.legal == 1 else f"{plan.legal:,} choices are"
    return f"meshes: {legal} legal, {plan.fitting:,} should fit; traced, best for both phases first:"


def count_lines(plan: Plan) -> list[str]:
    """How many dies, and how they are had."""
    t, lines = plan.ask.target, []
    if plan.fewer:
        lines.append(f"fewest devices: {plan.devices:,}. Why not fewer: {plan.fewer}")
    if 0 < plan.bare < plan.devices:
        lines.append(f"{several(plan.bare, 'die')} would do, but {hosts(t)}")
    if (whole := whole_up(t, plan.devices)) != plan.devices:
        lines.append(
            f"{several(plan.devices, 'die')} cannot be had alone: {hosts(t)}; the next whole number is {whole:,}"
        )
    return lines


def tried_lines(plan: Plan) -> list[str]:
    """Why what costs something beside is taken, or is not."""
    return [f"{KINDS[kind]}: {words}" for kind, words in plan.tried.items()]


def hosts(t: Target) -> str:
    """`dies of a3 come in packages of 2 and hosts of 16`."""
    joined = [f"{link.name}s of {link.dies}" for link in t.links if link.name in ("package", "host")]
    return f"dies of {t.name} come in {' and '.join(joined)}"


def pages_text(plan: Plan) -> str:
    """`1,000,064 in pages of 128`: what a sequence's pages hold, and what those of all ranks that share it do."""
    base, ways = plan.base, plan.best.request.placed.pools
    own = -(-base.max_len // base.page) * base.page
    shared = f", {capacity(plan):,} on the {ways} ranks that share a sequence" if capacity(plan) != own else ""
    return f"{own:,} in pages of {base.page}{shared}"


def capacity(plan: Plan) -> int:
    """Tokens that a sequence's pages hold."""
    return buckets_of(plan.best.request)[0].sequence_pages * plan.base.page


def padded_queries(plan: Plan) -> str:
    """What attention over cached latents pads the heads of a rank to; "" where its operator takes them."""
    request = plan.best.request
    mixers = [x.mixer for x in request.config.layers if isinstance(x.mixer, MlaConfig)]
    if not mixers or request.split_cache:  # with a cache that is split every rank has all heads
        return ""
    heads = mixers[0].heads // plan.best.choice.mesh.tensor
    sparse = is_sparse(request.config, capacity(plan))
    wanted = latent_heads(heads, request.target.soc, request.target.cann, sparse=sparse)
    said = padded_heads(heads, wanted).removeprefix("; ")
    return said and f"attention of a rank: {said}, which the estimate leaves out"


_HEAD = ("mesh", "of a die", "free", "TTFT", "bound by", "TPOT", "bound by", "tokens/s")


def _meshes(plan: Plan) -> Iterator[str]:
    """A row for each choice; its flags on a line below, so that rows stay narrow."""
    head, *rows = table([_HEAD, *(_row(x) for x in plan.options)])
    yield head
    for line, option in zip(rows, plan.options, strict=True):
        yield line
        if flags := str(option.choice).removeprefix(str(option.choice.mesh)):
            yield f"  {flags.lstrip()}"
    yield "(TPOT of even/median/p90 routing; tokens/s of a die)"


def _row(o: Option) -> tuple[str, ...]:
    d = o.decode
    spread = "/".join(f"{1e3 * s.seconds:.1f}" for s in (d.even, d.median, d.high))
    return (
        str(o.choice.mesh), gib(o.ledger.fullest.total), gib(o.room), duration(o.ttft), o.prefill.bound,
        f"{spread} ms", d.median.spent.bound,
        f"{d.tokens_per_second(_world(o)):,.1f}{', no room' * (o.lacks_in_flight > 0)}",
    )  # fmt: skip


def _world(o: Option) -> int:
    return o.request.mesh.world if o.request.mesh else 1


def form(o: Option) -> str:
    """What graphs keep experts in."""
    dtype = str(o.request.config.dtype).removeprefix("torch.")
    return dtype if o.request.form == "plain" else o.request.form


def sequences(count: int) -> str:
    """`1 sequence`, `32 sequences`."""
    return several(count, "sequence")


def duration(seconds: float) -> str:
    """`31.4 ms`, `2.81 s`."""
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _others(plan: Plan) -> list[str]:
    """Meshes that were not traced, by what they promise."""
    if not plan.others:
        return []
    shown = ", ".join(f"{h.choice} ({gib(h.bytes)})" for h in plan.others[:5])
    more = f" and {len(plan.others) - 5:,} more" if len(plan.others) > 5 else ""
    return [f"next by a bound, not traced, with weights and states of a die: {shown}{more}; --mesh takes one"]


def _apart(plan: Plan) -> list[str]:
    first = min(plan.options, key=lambda o: o.ttft)
    second = min(plan.options, key=lambda o: o.tpot)
    return [
        f"prefill alone: {first.choice}: {duration(first.ttft)} to the first token of {plan.base.max_len:,}",
        f"decode alone:  {second.choice}: {duration(second.tpot)} a token of {sequences(plan.base.rows)}",
    ]


def link_lines(plan: Plan) -> list[str]:
    """Which links the groups of the best mesh go over, and what one collective of a decode step takes on them."""
    o, f = plan.best, plan.ask.factors
    stage, links, c = o.choice.mesh.stage, o.request.target.links, o.request.config
    rows = max(1, o.request.rows // stage.data)
    names = {"tensor": "all_reduce", "context": "all_gather", "experts": "all_reduce"}
    if o.choice.exchange and c.moe is not None:
        names["experts"] = "expert_dispatch"
    found = []
    for direction, name in names.items():
        axes = stage.atoms(direction)
        if stage.size(axes) == 1 or (direction == "experts" and axes == stage.atoms("tensor")):
            continue
        sent = rows * (1 if c.moe is None or name != "expert_dispatch" else c.moe.top_k)
        issued = Issued(name, axes, (sent, c.embed), c.dtype)
        cross, levels = crossing(issued, stage, links, f), [hop.link.name for hop in hops(stage, axes, links)]
        took = f"{name} of {several(sent, 'row')} {1e6 * cross.seconds:,.1f} us ({cross.algorithm})"
        where = f"{direction} {stage.size(axes):,} goes over {', '.join(levels)}"
        found.append(f"{where}: {took}, most of it on {cross.link}{_inside(o, issued, f)}")
    return [f"links     {line}" for line in found]


def _inside(o: Option, issued: Issued, f: Factors) -> str:
    """What the same takes within a host, where tensor crosses hosts."""
    links = o.request.target.links
    host = next((link.dies for link in links if link.name == "host"), 0)
    stage = o.choice.mesh.stage
    if not host or issued.axes != stage.atoms("tensor") or stage.tensor <= host:
        return ""
    within = Mesh(tensor=host)
    own = crossing(Issued(issued.name, within.atoms("tensor"), issued.shape, issued.dtype), within, links, f)
    return f"; of {host} in one host {1e6 * own.seconds:,.1f} us"


def _ledger(o: Option) -> Iterator[str]:
    rows = [("ledger", "part", "dtype", *(f"stage {s.stage}" for s in o.ledger.stages[:8]))]
    keys = list(dict.fromkeys(key for s in o.ledger.stages for key in s.by_part()))
    for key in sorted(keys, key=lambda k: ("weights", "states", "buffers").index(k[0])):
        rows.append((*key, *(_small(s.by_part().get(key, 0)) for s in o.ledger.stages[:8])))
    rows.append(("all", "", "", *(gib(s.total) for s in o.ledger.stages[:8])))
    yield from table(rows)
    if len(o.ledger.stages) > 8:
        yield f"... {len(o.ledger.stages) - 8} more stages; --json has all, and the derivation of every line"
    else:
        yield "--json has the derivation of every line; phases share weights and states, bound at load"
    for line in o.ledger.asides:
        yield from wrapped(f"beside: {line.name}: {line.bytes:,} B = {line.derivation}", 8)


def _small(size: int) -> str:
    """As `gib`, but nothing is a dash and little is not rounded to nothing."""
    return "-" if size == 0 else gib(size) if size >= 10 * 2**20 else f"{size / 2**20:.2f} MiB"


def lengths(plan: Plan) -> list[int]:
    """Lengths of curves: up to the longest asked for, and what the model can."""
    most = plan.ask.config.max_len
    return sorted({*(n for n in LENGTHS if n <= most), plan.base.max_len})


def _prefill(plan: Plan, p: Prefill) -> Iterator[str]:
    equal = "never" if p.equal == float("inf") else f"{p.equal:,.0f} tokens"
    yield from wrapped(
        f"prefill   {p.fill:.4g} s + a T + b T^2, a = {p.a:.4g} s, b = {p.b:.4g} s, equal at {equal}; "
        f"{sequences(p.rows)} in steps of {p.chunk:,} tokens; at {plan.base.max_len:,}: {p.bound}"
    )
    yield from ("  " + x for x in table([("tokens", "TTFT", "tokens/s", ""), *_prefill_rows(plan, p)]))
    if p.image:
        rows = [("pictures", "tower first", "tower working ahead")]
        rows += [(str(n), *map(duration, p.with_images(plan.base.max_len // 4, n))) for n in IMAGES]
        each = f"{p.image_tokens:,} tokens, {duration(p.image)} of the tower each"
        yield f"  with pictures of {each}, beside {plan.base.max_len // 4:,} tokens of text"
        yield from ("  " + x for x in table(rows))
    yield from _kinds("prefill", p.steps[-1])


def _prefill_rows(plan: Plan, p: Prefill) -> Iterator[tuple[str, ...]]:
    for n in lengths(plan):
        lacks = lacking(plan.best.lacks(p.rows, n))
        yield f"{n:,}", duration(p.seconds(n)), f"{p.rows * n / p.seconds(n):,.0f}", lacks


def lacking(size: int) -> str:
    """What is said beside times of states for which a rank has no room; "" where there is room."""
    return f"no room: {gib(size)} too many" if size else ""


def _decode(plan: Plan, o: Option) -> Iterator[str]:
    d = o.decode
    yield from wrapped(
        f"decode    {duration(d.seconds)} a token of {sequences(d.rows)} with {d.context:,} tokens; "
        f"{d.rows / d.seconds:,.0f} tokens/s with one batch in flight{_card(plan, o, d)}{_in_flight(o)}"
    )
    rows = [("batch", "tokens of each", "a token", "bound by", "tokens/s a die", "")]
    rows += [
        (
            f"{x.rows:,}",
            f"{x.context:,}",
            duration(x.seconds),
            x.median.spent.bound,
            f"{x.tokens_per_second(_world(o)):,.1f}",
            lacking(o.lacks(x.rows, x.context)),
        )
        for x in decode_points(plan, o)
    ]
    yield from ("  " + x for x in table(rows))
    yield from _kinds("decode", d.median)


def _in_flight(o: Option) -> str:
    """How many batches keep all stages busy, and whether there is room for their states."""
    d, count = o.decode, len(o.ledger.stages)
    if count == 1:
        return ""
    lacks = lacking(o.lacks_in_flight)
    return f"; stages idle {d.idle:.0%} with one: {count} batches fill them{lacks and f' ({lacks})'}"


def _card(plan: Plan, o: Option, d: Decode) -> str:
    """Tokens/s of a die with all stages busy, and of a card where that has several dies."""
    one = d.tokens_per_second(_world(o))
    dies = next((link.dies for link in plan.ask.target.links if link.name == "package"), 1)
    card = f", {dies * one:,.1f} a card of {dies}" if dies > 1 else ""
    return f", {one:,.1f} a die{card} with all stages busy"


def decode_points(plan: Plan, o: Option) -> list[Decode]:
    """Steps of other batches and contexts, on the same mesh."""
    unit = o.choice.mesh.data * (o.choice.mesh.tensor if o.choice.exchange else 1)
    rows = sorted({max(1, n // unit) * unit for n in (*MORE_BATCH, plan.base.rows)})
    points = [(n, plan.base.max_len) for n in rows if n <= max(plan.base.rows, 128)][:4]
    most = plan.ask.config.max_len
    points += [(plan.base.rows, n) for n in (4096, 65_536, 262_144, 1_048_576) if n <= most and n != plan.base.max_len]
    return [decode(o.request, plan.ask.factors, rows=n, context=length) for n, length in points]


def _kinds(phase: str, step: Step) -> Iterator[str]:
    rows = [(f"{phase} step", "parts", "one", "all", "bound by")]
    order = sorted(step.kinds.items(), key=lambda item: -item[1][0] * item[1][1].seconds)
    for name, (count, spent) in order[:8]:
        rows.append((name, str(count), f"{1e6 * spent.seconds:,.1f} us", duration(count * spent.seconds), spent.bound))
    yield from ("  " + x for x in table(rows))


def _formats(plan: Plan) -> Iterator[str]:
    rows = [("format", "", "bytes", "values", "kernel")]
    for f in formats(plan):
        taken = ("yes" if f["made"] else "not made yet") if f["taken"] else "NO"
        used = " <- used" if f["used"] else ""
        rows.append((f["what"], f["format"], f"{f['bytes']:,}", f["values"], f"{taken}: {f['kernel']}{used}"))
    yield from table(rows)


def _factors(plan: Plan) -> str:
    return ", ".join(f"{k}={v:g}" for k, v in vars(plan.ask.factors).items()) + " (assumed; --factor NAME=VALUE)"


def commands(plan: Plan) -> list[str]:
    """Command lines: of one bundle for both phases, and of a prefill alone where another mesh is better for it."""
    o = plan.best
    lines = [command(plan, o, o.request.rows, o.request.chunk)]
    first = min(plan.options, key=lambda o: o.ttft)
    alone = command(plan, first, first.prefill.rows, first.prefill.chunk, "-prefill")
    phases = ",".join(p for p in first.request.phases if p != "decode")
    return [*lines, f"{alone} --phase {phases}   # prefill alone"]


def command(plan: Plan, o: Option, rows: int, chunk: int, suffix: str = "") -> str:
    """`kimi-graph compile` of an option, into a folder that is not the model's own: `build/NAME-TARGET` + `suffix`."""
    ask, r = plan.ask, o.request
    out = f"build/{ask.config.name}-{ask.target.name}{suffix}"
    words = [f"kimi-graph compile {shlex.quote(str(ask.model))} --target {ask.target.name} --mesh {r.mesh}"]
    words += ["--exchange"] * r.exchange + ["--split-cache"] * r.split_cache + ["--pad"] * r.pad
    words += [f"--moe-chunks {o.choice.chunks}"] * (o.choice.chunks > 1)
    copies = o.choice.copies or ask.redundant_experts
    words += [f"--redundant-experts {copies}"] * (copies > 0)
    words += [f"--weights-format {r.weights_format}"] * (r.weights_format != "bf16")
    words += [f"--kv-dtype {r.kv_dtype}"] * (r.kv_dtype != "bf16")
    words += [f"--page {r.page}"] * (r.page != 128)
    return " ".join([*words, f"--batch {rows} --chunk {chunk} --max-len {r.max_len} -o {shlex.quote(out)}"])


# ---- JSON ------------------------------------------------------------------------------------------------------------


def plan_json(plan: Plan) -> Any:
    """The same for a program; seconds and bytes."""
    ask = plan.ask
    return {
        "model": ask.config.name,
        "target": ask.target.name,
        "devices": plan.devices,
        "why_not_fewer": plan.fewer,
        "fewest_one_by_one": plan.bare or None,
        "tried": dict(plan.tried),
        "links": [line.removeprefix("links").strip() for line in link_lines(plan)],
        "batch": plan.base.rows,
        "max_len": plan.base.max_len,
        "capacity": capacity(plan),
        "weights_format": plan.base.weights_format,
        "kv_dtype": plan.base.kv_dtype,
        "compile": commands(plan),
        "padded_queries": padded_queries(plan),
        "legal": plan.legal,
        "fitting": plan.fitting,
        "factors": vars(ask.factors),
        "options": [option_json(plan, o) for o in plan.options],
        "others": [{"choices": str(h.choice), "weights_and_states_bytes": h.bytes} for h in plan.others],
        "formats": formats(plan),
        "published": [{"what": w, "figure": f, "where": x} for w, f, x in PUBLISHED],
    }


def option_json(plan: Plan, o: Option) -> dict[str, Any]:
    """One mesh of a plan; seconds and bytes."""
    p, d = o.prefill, o.decode
    return {
        "mesh": str(o.choice.mesh),
        "choices": str(o.choice),
        "ranks": _world(o),
        "free_bytes": o.room,
        "ledger": o.ledger.to_json(),
        "prefill": {
            "seconds": o.ttft, "fill": p.fill, "a": p.a, "b": p.b, "equal_at": None if p.b == 0 else p.equal,
            "rows": p.rows, "chunk": p.chunk, "bound": p.bound, "image_seconds": p.image,
            "curve": [{"tokens": n, "seconds": p.seconds(n)} for n in lengths(plan)], "step": step_json(p.steps[-1]),
        },
        "decode": {
            "seconds": d.seconds, "even": d.even.seconds, "high": d.high.seconds, "rows": d.rows, "context": d.context,
            "tokens_per_second_a_die": d.tokens_per_second(_world(o)), "batches_in_flight": len(o.ledger.stages),
            "bytes_lacking_for_them": o.lacks_in_flight, "step": step_json(d.median),
        },
    }  # fmt: skip


def step_json(step: Step) -> dict[str, Any]:
    """Times of a step in seconds: of all of it, by what they go to, of stages and of kinds of parts."""
    return {
        "seconds": step.seconds,
        "by": dict(step.spent.by),
        "stages": [s.seconds for s in step.stages],
        "kinds": {k: {"count": n, "seconds": s.seconds, "bound": s.bound} for k, (n, s) in step.kinds.items()},
    }
