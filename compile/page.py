"""`kimi-graph inspect --html`: a bundle as one page that loads nothing: layers, their graphs, memory, operators."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from kimi_graph.display import Html, document, join, tag
from kimi_graph.files import write_file
from kimi_graph.progress import Notify, silent

from .layering import Point, lay_out
from .manifest import target_of
from .mesh_manifest import mesh_lines
from .picture import FAMILIES, Box, Curve, Figure, Picture, Row, Value, family_of, picture

DATA = Path(__file__).parent / "data"
LETTER, BOLD, LINE, PAD = 6.75, 8.5, 15.0, 9.0  # of a letter, a bold one, a line, around text: pixels
LONGEST = 34  # letters of a line in a box; whole in the details
HELD = 4  # lines of weights and states in a box
MARKS = {"p": "◆", "s": "■"}  # of a weight, of a state; an input has ○
MARGIN = 24.0

# Nothing may be loaded, whatever a name in a bundle says.
_POLICY = Html(
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
)


def write_page(bundle: Path, where: Path, progress: Notify = silent) -> None:
    """Draw a bundle.

    Raises:
        BundleError: it is not one, or damaged. OSError: the file cannot be written.
    """
    made = page(picture(bundle, progress))
    write_file(where, made.encode())


def page(p: Picture) -> str:
    """The whole document."""
    m = p.bundle.manifest
    title = f"{m['model']['name']} for {m['target']['name']}"
    figures = list(p.figures)
    style, script = ((DATA / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    body = [
        tag("h1", title),
        _facts(p),
        tag("nav", *(tag("a", words, href=f"#{words.split()[0].lower()}") for words in SECTIONS)),
        _section(SECTIONS[0], *_schedule(p, figures)),
        _section(SECTIONS[1], *_graphs(figures, m["mesh"] is not None)),
        _section(SECTIONS[2], *_memory(p)),
        _section(SECTIONS[3], *_operators(p)),
        tag("script", _json([[_said(b) for b in f.boxes] for f in figures]), type="application/json", id="figures"),
        tag("script", Html(script)),
    ]
    return document(title, style, join(body), head=_POLICY)


SECTIONS = ("Layers in order", "Graph of a layer", "Memory over time", "Operators")


def _section(title: str, *body: object) -> Html:
    return tag("section", tag("h2", title), *body, id=title.split()[0].lower())


def _facts(p: Picture) -> Html:
    m = p.bundle.manifest
    made = ", ".join(f"{k.replace('_', '-')} {v}" for k, v in m["made_by"].items())
    mesh = mesh_lines(m)
    name, soc = m["target"]["name"], target_of(m).soc
    chip = "" if soc == name else f", {soc}"
    rows = [
        ("model", f"{m['model']['name']} ({m['model']['type']}), fingerprint {m['model']['fingerprint'][:16]}"),
        ("target", f"{name} ({m['target']['product']}){chip}, CANN {m['target']['cann']}"),
        ("mesh", mesh[0].removeprefix("mesh").strip() if mesh else "one rank"),
        ("made by", made),
        ("drawn from", "the bundle's files; nothing of it has run on a device"),
    ]
    return tag("table", *(tag("tr", tag("th", a), tag("td", b)) for a, b in rows), class_="facts")


# ---- layers ----------------------------------------------------------------------------------------------------------


def _schedule(p: Picture, figures: Sequence[Figure]) -> Iterator[Html]:
    index = {(f.phase, f.title): i for i, f in enumerate(figures)}
    yield tag("p", "A row is the graph of a stage, in the order of the file. A layer chooses the graph of its kind.")
    for phase in dict.fromkeys(r.phase for r in p.rows):
        rows = [r for r in p.rows if r.phase == phase]
        entry = next(g for g in p.bundle.manifest["graphs"] if g["phase"] == phase)
        size = (
            f"{entry['tokens']:,} patches" if phase == "vision" else f"{entry['rows']:,} x {entry['tokens']:,} tokens"
        )
        yield tag("h3", f"{phase}, {size} a step")
        yield from (_row(r, index, len(rows) > 1) for r in rows)


def _row(r: Row, index: dict[tuple[str, str], int], several: bool) -> Html:
    def button(number: str, words: Sequence[str], title: str) -> Html:
        spans = [tag("span", word, class_=word.split()[0].lower()) for word in words if word]
        label = f"{'layer ' + number if words else number}, {r.phase}: {title}"
        kind = {} if words else {"class_": "beside"}
        return tag(
            "button", number, *spans, type="button", data_figure=index[r.phase, title], aria_label=label, title=label,
            **kind,
        )  # fmt: skip

    first = [w for w in r.beside if w.startswith(("embed", "vision_embed", "vision.vision_embed"))]
    cells = [button(w.rpartition(".")[2], (), w) for w in first]
    cells += [button(str(c.number), (c.mixer.split()[0], c.feed), c.figure) for c in r.cells]
    cells += [button(w.rpartition(".")[2], (), w) for w in r.beside if w not in first]
    name = f"stage {r.stage}" if several else r.graph
    return tag("div", tag("span", name), tag("div", *cells, class_="cells"), class_="row")


# ---- graphs ----------------------------------------------------------------------------------------------------------


def _graphs(figures: Sequence[Figure], mesh: bool) -> Iterator[Html]:
    yield tag(
        "p", "One layer of each kind, on one rank: shapes are a rank's own. Views (Reshape and the like) are drawn as "
        "the edge they are on, constants not at all."
        + " How a value between two nodes lies on the mesh is not in the bundle; of weights, states and inputs it is "
        "said." * mesh,
    )  # fmt: skip
    groups = []
    for phase in dict.fromkeys(f.phase for f in figures):
        own = [(i, f) for i, f in enumerate(figures) if f.phase == phase]
        options = [tag("option", f"{phase}: {f.title}", value=i) for i, f in own]
        groups.append(tag("optgroup", *options, label=phase))
    tools = [
        tag("button", words, type="button", data_tool=tool, aria_label=label)
        for tool, words, label in (
            ("larger", "+", "larger"), ("smaller", "−", "smaller"), ("whole", "whole", "the whole graph"),
            ("start", "top", "from the top"),
        )
    ]  # fmt: skip
    yield tag("div", tag("label", "graph ", tag("select", *groups, id="figure")), *tools, class_="tools")
    yield _legend(mesh)
    drawings = tag("div", *(_figure(f, figures) for f in figures), class_="drawing")
    yield tag("div", drawings, tag("div", id="details", class_="details", aria_live="polite"), class_="sides")


def _legend(mesh: bool) -> Html:
    families = _families(*(name for name in FAMILIES if name != "view"))
    marks = [tag("li", f"{mark} {words}") for mark, words in (("◆", "weight"), ("■", "state"), ("○", "input"))]
    if mesh:
        marks.append(tag("li", "÷ tensor: split over that mesh axis; without it, whole on every rank"))
    return tag("ul", *families, *marks, class_="legend")


def _figure(f: Figure, figures: Sequence[Figure]) -> Html:
    named = f"{f.where}: {f.title}" if f.where != f.title else f.title
    views = f", {f.folded} views folded" if f.folded else ""
    nodes = sum(bool(b.type) for b in f.boxes)
    words = f"{named}, of graph {f.graph}; {f.note}; {nodes} nodes{views}"
    first = f.title == next((g.title for g in reversed(figures) if g.phase == "decode" and "+" in g.title), "")
    chosen = {"data_first": "1"} if first and f.phase == "decode" else {}
    return tag("figure", tag("figcaption", words, style="padding:.3em .7em"), _drawing(f), class_="layer", **chosen)


def _drawing(f: Figure) -> Html:
    texts = [_lines(b) for b in f.boxes]
    sizes = [(_width(lines), LINE * len(lines) + 2 * PAD - 4) for lines in texts]
    layout = lay_out(sizes, [(a, b) for a, b, _ in f.edges])
    width, height = layout.width + 2 * MARGIN, layout.height + 2 * MARGIN
    edges = [
        tag("path", tag("title", words), d=_path(route), class_="edge", data_a=a, data_b=b)
        for (a, b, words), route in zip(f.edges, layout.routes, strict=True)
    ]
    boxes = [
        _box(b, lines, place, size) for b, lines, place, size in zip(f.boxes, texts, layout.places, sizes, strict=True)
    ]
    inside = tag("g", *edges, *boxes, transform=f"translate({MARGIN:g} {MARGIN:g})")
    size = f"{width:.0f} {height:.0f}"
    label = f"graph of {f.title}, {f.phase}: {len(f.boxes)} boxes; arrow keys go from node to node"
    return tag("svg", inside, viewBox=f"0 0 {size}", data_size=size, tabindex=0, role="application", aria_label=label)


Line = tuple[str, str]
"""Its class, and its words."""


def _lines(b: Box) -> list[Line]:
    """What is written in a box."""
    lines = [("type", b.type)] if b.type else [("", b.name)]
    lines += [("", str(value)) for value in b.results[:1]]
    if b.carries:
        lines.append(("carries", b.carries.rpartition(", ")[0] or b.carries))
    held = [("held", f"{MARKS[v.name[0]]} {_short(v)}") for v in b.held if _kind(v)]
    inputs = ", ".join(v.name.removeprefix("batch.") for v in b.held if not _kind(v))
    held += [("held", f"○ {inputs}")] if inputs else []
    lines += held if len(held) <= HELD else [*held[: HELD - 1], ("held", f"... {len(held) - HELD + 1} more")]
    return [(kind, words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…") for kind, words in lines]


def _kind(v: Value) -> bool:
    """Whether it is a weight or a state."""
    return v.name[:2] in ("p.", "s.")


def _short(v: Value) -> str:
    name = v.name[2:].partition(".")
    axes = [words.partition(" over ")[2] for words in v.lies.split(", ") if " over " in words]
    return (name[2] or name[0]) + (f" ÷ {', '.join(axes)}" if axes else "")


def _width(lines: Sequence[Line]) -> float:
    return max(len(words) * (BOLD if kind == "type" else LETTER) for kind, words in lines) + 2 * PAD


def _box(b: Box, lines: Sequence[Line], place: Point, size: Point) -> Html:
    (x, y), (width, height) = place, size
    family = family_of(b.type) if b.type else "end"
    texts = [
        tag("text", words, x=f"{x + PAD:.1f}", y=f"{y + PAD + 8 + i * LINE:.1f}", **({"class_": kind} if kind else {}))
        for i, (kind, words) in enumerate(lines)
    ]
    rect = tag("rect", x=f"{x:.1f}", y=f"{y:.1f}", width=f"{width:.1f}", height=f"{height:.1f}", rx=4)
    return tag("g", rect, *texts, class_=f"box {family}")


def _path(points: Sequence[Point]) -> str:
    """A curve that goes straight down at every point of a layer."""
    (x, y), *rest = points
    words = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in rest:
        middle = (y + to_y) / 2
        words.append(f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}")
        x, y = to_x, to_y
    return "".join(words)


def _said(b: Box) -> dict[str, object]:
    """Details of a box, for the script."""
    held = [f"{v.name} {v}" + (f": {v.lies}" if v.lies else "") for v in b.held]
    attributes = [f"{name} = {words}" for name, words in sorted(b.attributes.items())]
    return {
        "name": b.name, "type": b.type, "source": b.source, "carries": b.carries,
        "results": [str(v) for v in b.results], "held": held, "attributes": attributes,
    }  # fmt: skip


def _json(value: object) -> Html:
    """For a script element, which ends at the first `</script`, whatever it is in."""
    return Html(json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"))


# ---- memory ----------------------------------------------------------------------------------------------------------

WIDE, HIGH, LEFT, BELOW = 860, 170, 74, 34  # of a chart: pixels


def _memory(p: Picture) -> Iterator[Html]:
    m = p.bundle.manifest
    die = m["memory"]["die"]
    yield tag(
        "p", "What lives on one rank while a step goes on: each value from its node to its last reader, in the order "
        "of the file. Weights and states are there all the time. The runtime places values itself: this is what it "
        "cannot do without in this order, not what it takes.",
    )  # fmt: skip
    rows: list[Sequence[str]] = [
        ("phase", "stage", "weights", "states", "values, at most", "together", f"of a die's {_size(die)}", "most at")
    ]
    for c in p.curves:
        total = c.weights + c.states + c.peak[0]
        share = f"{100 * total / die:.1f} %"
        cells = (c.weights, c.states, c.peak[0], total)
        rows.append((c.phase, str(c.stage), *map(_size, cells), share, c.peak[1]))
    yield _table(rows, numbers=range(1, 7))
    for phase in dict.fromkeys(c.phase for c in p.curves):
        yield tag("h3", f"{phase}: values between nodes")
        yield _chart([c for c in p.curves if c.phase == phase])


def _chart(curves: Sequence[Curve]) -> Html:
    """Stages one after another, as they run."""
    top = max(1, *(c.peak[0] for c in curves))
    across = (WIDE - LEFT - 8) / sum(max(1, c.nodes) for c in curves)
    parts: list[Html] = []
    for share in (0, 0.5, 1):
        y = HIGH - share * (HIGH - 14)
        parts.append(tag("line", x1=LEFT, x2=WIDE - 8, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        parts.append(_label(LEFT - 8, y + 4, _size(int(share * top)), "end"))
    x, last = float(LEFT), -100.0
    for c in curves:
        width = across * max(1, c.nodes)
        step = width / max(1, len(c.live))
        points = [f"L{x + i * step:.1f} {y:.1f}H{x + (i + 1) * step:.1f}" for i, y in enumerate(_heights(c.live, top))]
        area = f"M{x:.1f} {HIGH}{''.join(points)}V{HIGH}Z"
        title = f"{c.phase}, stage {c.stage}: at most {c.peak[0]:,} bytes, at {c.peak[1]}"
        parts.append(tag("path", tag("title", title), d=area, class_="area"))
        for layer, node in c.marks:
            at = x + node * across
            if at - last > 34:
                last = at
                parts.append(tag("line", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=HIGH, y2=HIGH + 4, class_="grid"))
                parts.append(_label(at, HIGH + 16, layer, "start", "faint"))
        if len(curves) > 1:
            parts.append(tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=4, y2=HIGH + 30, class_="stage"))
            parts.append(_label(x + 4, HIGH + 30, f"stage {c.stage}", "start", "faint"))
        x += width
    parts.append(_label(LEFT - 8, HIGH + 16, "layer", "end", "faint"))
    label = f"bytes of values over the nodes of {curves[0].phase}"
    return tag(
        "div", tag("svg", *parts, viewBox=f"0 0 {WIDE} {HIGH + BELOW}", class_="chart", role="img",
                   aria_label=label), class_="wide",
    )  # fmt: skip


def _heights(live: Sequence[int], top: int) -> list[float]:
    return [HIGH - value / top * (HIGH - 14) for value in live]


def _label(x: float, y: float, text: object, anchor: str, kind: str = "") -> Html:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, **({"class_": kind} if kind else {}))


def _size(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,} B"


# ---- operators -------------------------------------------------------------------------------------------------------


def _operators(p: Picture) -> Iterator[Html]:
    counts = p.counts
    phases = list(dict.fromkeys(phase for row in counts.values() for phase in row))
    phases = [g for g in dict.fromkeys(e["phase"] for e in p.bundle.manifest["graphs"]) if g in phases]
    most = max((sum(row.values()) for row in counts.values()), default=1)
    yield tag("p", "Nodes by type, of the graphs of all stages together; every rank of a stage runs the same graph.")
    yield tag("ul", *_families(*FAMILIES), class_="legend")
    head = tag("tr", tag("th", "operator"), *(tag("th", phase, class_="number") for phase in phases), tag("th", ""))
    rows = []
    for type_, row in counts.items():
        swatch = tag("span", class_=f"swatch {family_of(type_)}")
        bar = tag("span", class_=f"bar {family_of(type_)}", style=f"width:{180 * sum(row.values()) / most:.0f}px")
        numbers = (tag("td", f"{row.get(phase, 0):,}" if row.get(phase) else "", class_="number") for phase in phases)
        rows.append(tag("tr", tag("td", swatch, type_), *numbers, tag("td", bar)))
    yield tag("div", tag("table", tag("thead", head), tag("tbody", *rows)), class_="wide")


def _families(*names: str) -> Iterator[Html]:
    return (tag("li", tag("span", class_=f"swatch {name}"), FAMILIES[name][0]) for name in names)


def _table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> Html:
    def row(name: str, cells: Sequence[str]) -> Html:
        return tag("tr", *(tag(name, c, **({"class_": "number"} if i in numbers else {})) for i, c in enumerate(cells)))

    head, *rest = rows
    return tag(
        "div", tag("table", tag("thead", row("th", head)), tag("tbody", *(row("td", r) for r in rest))), class_="wide"
    )
