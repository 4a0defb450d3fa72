"""`kimi-graph plan --html`: a plan as one file, with pictures drawn here as SVG; nothing is loaded from elsewhere."""

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from kimi_graph.display import Html, document
from kimi_graph.files import write_file

from .estimate import Decode
from .ledger import StageLedger
from .report import (
    commands,
    count_lines,
    decode_points,
    duration,
    form,
    lengths,
    pages_text,
    sequences,
    tried_lines,
)
from .search import Option, Plan, dies, formats, gib

COLOURS = ("#3b6ea5", "#c8553d", "#588157", "#8d6a9f", "#d9a441", "#4aa3a2", "#7d7d7d", "#a3b18a", "#b56576", "#2f3e46",
           "#9c6b30", "#e07a5f", "#5f0f40")  # fmt: skip
WIDTH, LEFT, LETTER = 700, 70, 6.6  # of pictures, of their left margin, of a letter: pixels
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; margin: .6em 0 } tr:nth-child(even) { background: #f6f6f6 }
div { overflow-x: auto } td:not(:last-child), th { white-space: nowrap }
td, th { padding: .15em .8em; text-align: left; vertical-align: top }
.words td:last-child { min-width: 22em }
th { border-bottom: 1px solid #999 }
code { background: #f3f3f3; padding: 0 .2em }
svg { max-width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: #333 } .note { color: #666 }
"""


def write_html(plan: Plan, where: Path) -> None:
    """Write the report.

    Raises:
        OSError: the file cannot be written.
    """
    write_file(where, page(plan).encode())


def page(plan: Plan) -> str:
    """The whole document."""
    o, ask = plan.best, plan.ask
    title = f"{ask.config.name} on {dies(plan.devices, ask.target)} of {ask.target.name}"
    intro = (
        f"{sequences(plan.base.rows)} of at most {plan.base.max_len:,} tokens ({pages_text(plan)}); experts "
        f"as {form(o)}. Best mesh for both phases: <b>{_text(o.choice)}</b>, {gib(o.room)} of a die free."
    )
    said = [*count_lines(plan), *tried_lines(plan)]
    body = [
        f"<h1>{_text(title)}</h1><p>{intro}</p>", "<ul>", *(f"<li>{_text(line)}</li>" for line in said), "</ul>",
        "<p class=note>Nothing here is measured: rates are those of data sheets, efficiencies are assumed.</p>",
        *("<p><code>" + _text(line) + "</code></p>" for line in commands(plan)),
        "<h2>Meshes</h2>", _meshes(plan),
        "<h2>Mesh</h2>", mesh_picture(o),
        "<h2>Memory of a rank, by stage</h2>", memory_picture(o),
        "<h2>Time to the first token</h2>", ttft_picture(plan),
        "<h2>Time of a token</h2>", tpot_picture(plan),
        "<h2>Roofline of a die</h2>", roofline_picture(o),
        "<h2>Formats</h2>", _formats(plan),
        "<h2>Ledger of the fullest rank</h2>", _ledger(o.ledger.fullest),
    ]  # fmt: skip
    return document(title, STYLE, Html("".join(body)))


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(rows: Sequence[Sequence[object]], kind: str = "numbers") -> str:
    """A table. `kind`: "words" where the last column is a sentence."""
    head, *rest = ["".join(f"<{tag}>{_text(x)}</{tag}>" for x in row) for tag, row in _tagged(rows)]
    return f"<div class={kind}><table><tr>" + "</tr><tr>".join([head, *rest]) + "</tr></table></div>"


def _tagged(rows: Sequence[Sequence[object]]) -> Iterable[tuple[str, Sequence[object]]]:
    return (("th" if i == 0 else "td", row) for i, row in enumerate(rows))


def _meshes(plan: Plan) -> str:
    rows: list[Sequence[object]] = [("mesh", "of a die", "TTFT", "bound by", "TPOT", "bound by")]
    for o in plan.options:
        used = gib(o.ledger.fullest.total)
        rows.append((o.choice, used, duration(o.ttft), o.prefill.bound, duration(o.tpot), o.decode.median.spent.bound))
    return _table(rows)


def _formats(plan: Plan) -> str:
    rows: list[Sequence[object]] = [("", "format", "bytes", "values", "kernel")]
    for f in formats(plan):
        taken = "" if f["taken"] else "no: "
        rows.append((f["what"], f["format"], f"{f['bytes']:,}", f["values"], taken + f["kernel"]))
    return _table(rows, "words")


def _ledger(s: StageLedger) -> str:
    rows: list[Sequence[object]] = [("line", "kind", "bytes", "derivation")]
    rows += [(line.name, line.kind, f"{line.bytes:,}", line.derivation) for line in s.lines]
    return _table(rows, "words")


# ---- pictures --------------------------------------------------------------------------------------------------------


def _svg(width: int, height: int, parts: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img">{"".join(parts)}</svg>'


def _label(x: float, y: float, text: object, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_text(text)}</text>'


def _box(x: float, y: float, w: float, h: float, colour: str, title: str = "") -> str:
    hint = f"<title>{_text(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0, w):.1f}" height="{h:.1f}" fill="{colour}">{hint}</rect>'


def memory_picture(o: Option) -> str:
    """A bar for a rank of each stage, what it has by part, and what a die has."""
    die, width, left = o.request.target.memory_bytes, WIDTH - LEFT - 90, LEFT
    names = list(dict.fromkeys(part for s in o.ledger.stages for _, part, _ in s.by_part()))
    sizes = {n: max(_parts(s).get(n, 0) for s in o.ledger.stages) for n in names}
    shown = sorted(names, key=lambda n: -sizes[n])[:9]
    scale = width / max(die, o.ledger.fullest.total)
    parts, y, edge = [], 10.0, left + die * scale
    for s in o.ledger.stages:
        x, own = float(left), _parts(s)
        parts.append(_label(left - 8, y + 14, f"stage {s.stage}", "end"))
        for name in (*shown, "other"):
            size = own.get(name, 0) if name != "other" else sum(v for n, v in own.items() if n not in shown)
            colour = COLOURS[shown.index(name)] if name in shown else COLOURS[9]
            parts.append(_box(x, y, size * scale, 18, colour, f"{name}: {gib(size)}"))
            x += size * scale
        parts.append(_label(max(x, edge) + 6, y + 14, gib(s.total)))  # beside the line, not under it
        y += 24
    parts.append(f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="4" y2="{y:.1f}" stroke="#b00" stroke-dasharray="4 3"/>')
    parts.append(_label(edge, y + 14, f"a die has {gib(die)}", "end"))
    y += 24
    colours = [*((name, COLOURS[i]) for i, name in enumerate(shown)), ("other", COLOURS[9])]
    names, below = _legend(colours, int(y))
    return _svg(WIDTH, below, [*parts, *names])


def _parts(s: StageLedger) -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, part, _), size in s.by_part().items():
        found[part] = found.get(part, 0) + size
    return found


Curve = tuple[str, Sequence[tuple[float, float]]]


def curves(lines: Sequence[Curve], x_name: str, y_name: str) -> str:
    """Lines on two logarithmic axes, and their names below."""
    width, height, left, right, bottom = WIDTH, 330, 70, 20, 50
    points = [p for _, line in lines for p in line]
    x0, x1 = (math.log10(f(p[0] for p in points)) for f in (min, max))
    y0, y1 = math.floor(math.log10(min(p[1] for p in points))), math.ceil(math.log10(max(p[1] for p in points)))
    y1 = max(y1, y0 + 1)
    x1 = max(x1, x0 + 1e-3)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x0) / (x1 - x0) * (width - left - right)
        return left + across, height - bottom - (math.log10(y) - y0) / (y1 - y0) * (height - bottom - 20)

    parts = []
    for exponent in range(y0, y1 + 1):
        _, y = at(10**x0, 10.0**exponent)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_label(left - 8, y + 4, f"{10.0**exponent:,g}", "end"))
    ticks = sorted({p[0] for p in points})
    if len(ticks) > 9:
        ticks = [10.0**n for n in range(math.ceil(x0), math.floor(x1) + 1)]
    places = [at(x, 10.0**y0)[0] for x in ticks]
    for x, here, after in zip(ticks, places, [*places[1:], math.inf], strict=True):
        if after - here > 34:  # a label's width
            parts.append(_label(here, height - bottom + 18, _short(x), "middle"))
    for i, (name, line) in enumerate(lines):
        colour, places = COLOURS[i % len(COLOURS)], [at(*p) for p in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), p in zip(places, line, strict=True):
            hint = f"<title>{_text(name)}: {_short(p[0])}, {p[1]:.4g}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">{hint}</circle>')
    parts.append(_label((width - right + left) / 2, height - 8, x_name, "middle"))
    names, below = _legend([(name, COLOURS[i % len(COLOURS)]) for i, (name, _) in enumerate(lines)], height + 8)
    turn = f'transform="rotate(-90 16 {height / 2})" text-anchor="middle"'
    parts.append(f'<text x="16" y="{height / 2}" {turn}>{_text(y_name)}</text>')
    return _svg(width, below, [*parts, *names])


def _legend(names: Iterable[tuple[str, str]], y: int) -> tuple[list[str], int]:
    """Names with their colours, as many in a row as there is room for, from some height on; and the height after."""
    parts, x = [], LEFT
    for name, colour in names:
        room = 40 + LETTER * len(name)
        if x > LEFT and x + room > WIDTH:
            x, y = LEFT, y + 20
        parts += [_box(x, y, 12, 12, colour), _label(x + 18, y + 11, name)]
        x += room
    return parts, y + 24


def _short(x: float) -> str:
    if x in (1e3, 1e4):
        return f"{x:,.0f}"
    return f"{x / 2**20:.3g}M" if x >= 2**20 else f"{x / 1024:.4g}K" if x >= 1024 else f"{x:.3g}"


def ttft_picture(plan: Plan) -> str:
    """Seconds to the first token against tokens of a prompt, of every mesh, and the law of the best one."""
    lines = [(str(o.choice), [(float(n), o.prefill.seconds(n)) for n in lengths(plan)]) for o in plan.options]
    p = plan.best.prefill
    where = "never" if p.b == 0 else f"at {p.equal:,.0f} tokens"
    law = f"{p.fill:.3g} s + {p.a:.4g} s T + {p.b:.4g} s T² for T tokens, both terms equal {where}"
    law += f"; {sequences(p.rows)}, steps of {p.chunk:,} tokens"
    return curves(lines, "tokens of a prompt", "seconds") + f"<p class=note>{_text(law)}</p>"


def tpot_picture(plan: Plan) -> str:
    """Of batches at the longest length, and of lengths."""
    o = plan.best
    points = decode_points(plan, o)
    batches = sorted({(x.rows, 1e3 * x.seconds) for x in points if x.context == plan.base.max_len})
    contexts = sorted({(x.context, 1e3 * x.seconds) for x in [*points, o.decode] if x.rows == plan.base.rows})
    pictures = [
        curves([(f"{plan.base.max_len:,} tokens", [(float(x), y) for x, y in batches])], "sequences", "ms"),
        curves([(sequences(plan.base.rows), [(float(x), y) for x, y in contexts])], "tokens of each", "ms"),
    ]
    return "".join(pictures) + _without_room(o, points)


def _without_room(o: Option, points: Iterable[Decode]) -> str:
    """Which points are drawn though a rank has no room for their states."""
    found = [(x, o.lacks(x.rows, x.context)) for x in points]
    words = [f"{sequences(x.rows)} of {x.context:,} tokens ({gib(size)} too many)" for x, size in found if size]
    return f"<p class=note>A rank has no room for {_text('; '.join(words))}.</p>" if words else ""


def roofline_picture(o: Option) -> str:
    """FLOP a byte of the kinds of parts in both phases, and what a die allows."""
    die = o.request.target.die
    rate, bandwidth = die.cube["bf16"].value, die.bandwidth.value
    roof = [(x, min(rate, x * bandwidth) / 1e12) for x in (0.1, 1.0, 10.0, rate / bandwidth, 1e4)]
    lines: list[Curve] = [("roof, bf16", roof)]
    for phase, step in (("decode", o.decode.median), ("prefill", o.prefill.steps[-1])):
        for kind in ("kda", "mla", "moe", "dense", "head"):
            if kind in step.kinds and (point := _intensity(*step.loads[kind], step.kinds[kind][1].seconds)):
                lines.append((f"{kind}, {phase}", [point]))
    return curves(lines, "FLOP a byte of memory", "TFLOP/s")


def _intensity(flops: float, moved: float, seconds: float) -> tuple[float, float] | None:
    return (max(0.1, flops / moved), max(1e-3, flops / seconds / 1e12)) if flops and moved and seconds else None


def mesh_picture(o: Option) -> str:
    """Stages one under another; in each, ranks of data by tensor; a host or a package of dies has one shade."""
    mesh, links = o.choice.mesh, o.request.target.links
    host = next((x.dies for x in links if x.name == "host"), links[0].dies) or 1
    stages, rows, columns = min(mesh.pipe, 8), min(mesh.data * mesh.context, 16), min(mesh.tensor, 64)
    side, parts, y = max(6, min(18, (WIDTH - 180) // max(1, columns))), [], 8.0
    for stage in range(stages):
        first, last = o.ledger.stages[stage].layers
        parts.append(_label(4, y + 12, f"stage {stage}: layers {first} to {last}"))
        for row in range(rows):
            for column in range(columns):
                rank = (stage * mesh.data * mesh.context + row) * mesh.tensor + column
                shade = COLOURS[rank // host % 9]
                parts.append(_box(180 + column * side, y + row * side, side - 1, side - 1, shade, f"rank {rank}"))
        y += rows * side + 10
    more = [f"{mesh.pipe - stages} more stages"] * (mesh.pipe > stages)
    more += [f"{mesh.data * mesh.context - rows} more rows of data"] * (mesh.data * mesh.context > rows)
    more += [f"{mesh.tensor - columns} more ranks of tensor"] * (mesh.tensor > columns)
    over = "data x context" if mesh.context > 1 else "data"
    words = f"columns: tensor, rows: {over}; a colour is {host} dies next to each other; ep={mesh.experts}"
    parts.append(_label(4, y + 14, "; ".join([words, *more])))
    return _svg(WIDTH, int(y + 24), parts)
