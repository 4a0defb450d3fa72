"""Lines of a ledger beside weights and states: what a rank needs while graphs run.

Activations are the peak of liveness of the traced graph; a compiled graph has up to a third more (a test holds that),
which is added. Phases run one after another and share this memory; that is assumed, as are the lines of the runtime.
"""

from collections.abc import Iterator, Mapping, Sequence

from kimi_graph.compile.driver import Request
from kimi_graph.compile.phases import Bucket, StageParts, stage_parts
from kimi_graph.parallel.experts import buffer_bytes, no_pair

from .estimate import Part, traced, workspace
from .factors import Factors
from .ledger import Ledger, Line, StageLedger, buckets_of, make_ledger

LOWERING = (4, 3)  # of activations in a compiled graph to those that are traced, at most
GIB, MIB = 2**30, 2**20
Parts = Mapping[str, Mapping[str, Part]]  # by phase and kind
Split = Mapping[str, Sequence[StageParts]]  # by phase


def full_ledger(request: Request, factors: Factors) -> Ledger:
    """The ledger of a request with all that its graphs need.

    Raises:
        ShardingError: a part that cannot run on the mesh.
    """
    ledger, buckets = make_ledger(request), buckets_of(request)
    parts = {b.phase: traced(request, b) for b in buckets}
    lines: dict[int, list[Line]] = {s.stage: [] for s in ledger.stages}
    split = {b.phase: stage_parts(request.config, b, request.placed.stages(b)) for b in buckets}
    for stage, line in _activations(request, buckets, parts, split):
        lines[stage].append(line)
    for stage, held in zip(lines, ledger.stages, strict=True):
        lines[stage].append(_layouts(held))
        own = {b.phase: [s for s in split[b.phase] if s.stage.index == stage] for b in buckets}
        lines[stage] += [*_groups(request, buckets, parts, own, factors), _reserve(factors)]
    return ledger.with_buffers({stage: tuple(found) for stage, found in lines.items()})


def _line(name: str, part: str, size: int, words: str, dtype: str = "bytes") -> Line:
    return Line(name=name, kind="buffers", part=part, dtype=dtype, bytes=size, derivation=words)


def _activations(
    request: Request, buckets: tuple[Bucket, ...], parts: Parts, split: Split
) -> Iterator[tuple[int, Line]]:
    """Of the phase that needs most in each stage."""
    most: dict[int, tuple[int, int, int, Bucket]] = {}
    for b in buckets:
        own = {s.stage.index: s for s in split[b.phase]}
        for stage, (between, inside) in workspace(request, b, parts[b.phase]).items():
            scores = max((parts[b.phase][use.part].scores for use in own[stage].parts), default=0)
            most[stage] = max(most.get(stage, (0, 0, 0, b)), (between, inside, scores, b), key=lambda x: sum(x[:3]))
    up, down = LOWERING
    for stage, (between, inside, scores, b) in sorted(most.items()):
        rows = f"{b.name}, all ranks together"
        blocks = "running sum and blocks of attention residuals" if request.config.residual_block else "hidden states"
        yield stage, _line("values between parts", "AttnRes and hidden", between, f"{blocks}; peak of {rows}")
        words = (
            f"peak of liveness inside a part of {rows}, rows of experts among it, x {up}/{down} for what lowering adds"
        )
        yield stage, _line("activations", "workspace", (between + inside) * up // down - between, words)
        if scores:
            words = f"every score in float32, as the kernel may keep them; {rows}"
            yield stage, _line("index scores", "index scratch", scores, words, "float32")


def _groups(request: Request, buckets: tuple[Bucket, ...], parts: Parts, own: Split, f: Factors) -> Iterator[Line]:
    """HCCL's buffers of a stage: of each group, and the window of the pair that sends rows to experts."""
    found: dict[tuple[str, ...], None] = {}
    pair = False
    for b in buckets:
        kinds = dict.fromkeys(use.part for s in own[b.phase] for use in s.parts)
        for issued in (w.issued for kind in kinds for w in parts[b.phase][kind].works if w.issued):
            pair |= issued.name.startswith("expert_")
            if not issued.name.startswith("expert_"):
                found[issued.axes] = None
    if found:
        words = f"{len(found)} groups ({'; '.join(' x '.join(axes) for axes in found)}) x {f.group_mib:g} MiB (assumed)"
        yield _line("HCCL groups", "HCCL", int(len(found) * f.group_mib * MIB), words)
    if pair:
        size, words = _window(request, buckets)
        yield _line("rows to experts", "HCCL", max(size, int(f.group_mib * MIB)), words)


def _window(request: Request, buckets: tuple[Bucket, ...]) -> tuple[int, str]:
    """Twice the HCCL_BUFFSIZE that CANN's pair asks for; nothing where it is not taken."""
    moe = request.config.moe
    assert moe is not None, "rows go to experts where there are some"
    most, words = 0, "two of HCCL_BUFFSIZE"
    for b in (b for b in buckets if b.phase != "vision"):
        rules = request.placed.rules(b.phase)
        ways = rules.ways("experts")
        rows = -(-b.rows * b.tokens // rules.ways("token") // moe.chunks)
        sizes = rows, moe.latent or request.config.embed, moe.top_k, ways, rules.physical("experts", moe.slots) // ways
        if not no_pair(request.target, *sizes) and (need := buffer_bytes(*sizes)) > most:
            most = need
            words = f"two of HCCL_BUFFSIZE, {-(-need // MIB):,} MiB for {rows:,} rows of a rank ({b.phase})"
    return 2 * most, words


def _layouts(stage: StageLedger) -> Line:
    """Weights that lie in a layout that their operators do not take: GE would make a second copy of them at load."""
    lying = sorted({line.layout for line in stage.lines if line.kind == "weights"})
    wrong, either = stage.laid_out(True), stage.laid_out(False)
    some = f"all but {wrong:,} B of the weights lie" if wrong else "every weight lies"
    words = f"{some} as its operator's registration takes it ({', '.join(lying)})"
    if either:
        words += f"; {either / GIB:,.2f} GiB are taken in tiles (FRACTAL_NZ) too, and GE may still prefer them so"
    return _line("bytes GE would still convert in layout", "layout", wrong, words)


def _reserve(f: Factors) -> Line:
    return _line("runtime", "runtime", int(f.reserve_gib * GIB), "driver, CANN and loaded graphs (assumed)")
