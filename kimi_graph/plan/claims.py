"""`kimi-graph plan --claims`: what is said of such models and machines, with the arithmetic of what holds and where.

* A million tokens are prefilled in under 60 s on one machine.
* tp=32 is the degree to take.
* All-to-all of experts is near-linear to 1,024 cards.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kimi_graph.compile.targets import Target, target
from kimi_graph.config import ModelConfig
from kimi_graph.errors import KimiGraphError
from kimi_graph.parallel import Mesh
from kimi_graph.parallel.collectives import Issued
from kimi_graph.parallel.experts import MAX_EXPERTS, MAX_RANKS
from kimi_graph.read_config import load_config

from .factors import Factors
from .network import crossing
from .profiles import table, wrapped
from .report import duration
from .search import Ask, Option, PlanError, base_request, evaluate, gib, make_plan
from .sieve import Choice, Sieve

MODEL = "kimi-k3.1-pro"
MILLION, SECONDS = 1_048_576, 60.0
NEAR = 0.9  # of the rate of a rank in the smallest group: what we call near-linear


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim, what becomes of it, and the numbers."""

    claim: str
    verdict: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Claims:
    """All of them."""

    claims: tuple[Claim, ...]
    factors: Factors

    @property
    def summary(self) -> str:
        return f"{len(self.claims)} claims checked on paper, with assumed efficiencies; nothing is measured"

    def text(self) -> str:
        found = []
        for c in self.claims:
            found += [*wrapped(f'"{c.claim}": {c.verdict}', 2), *("  " + line for line in table([c.head, *c.rows])), ""]
        factors = ", ".join(f"{k}={v:g}" for k, v in vars(self.factors).items())
        return "\n".join([*found, *wrapped(f"factors   {factors}")])

    def to_json(self) -> Any:
        return [
            {"claim": c.claim, "verdict": c.verdict, "rows": [dict(zip(c.head, r, strict=True)) for r in c.rows]}
            for c in self.claims
        ]


def check_claims(factors: Factors) -> Claims:
    """Each claim against every target that it can be meant of."""
    config = load_config(MODEL)
    return Claims((million(config, factors), degree(config, factors), linear(factors), scale(config, factors)), factors)


# ---- a million tokens ------------------------------------------------------------------------------------------------

MACHINES = (("a3", 16), ("950dt", 8), ("a3-superpod", 768), ("950-superpod", 1024))


def million(config: ModelConfig, factors: Factors) -> Claim:
    """One machine: a host, or a superpod."""
    rows, holds = [], []
    for name, dies in MACHINES:
        ask = Ask(model=MODEL, config=config, target=target(name), max_len=MILLION, batch=1, factors=factors)
        try:
            plan = make_plan(replace(ask, devices=dies), traced=1)
        except PlanError as error:
            rows.append((name, str(dies), "-", "-", "-", "-", str(error).split(": ", 1)[1].split(". ")[0]))
            continue
        p, seconds = plan.best.prefill, plan.best.ttft
        law = f"{p.fill:.2f} + {p.a:.3g} x {MILLION:,} + {p.b:.3g} x {MILLION:,}^2"
        holds += [name] if seconds < SECONDS else []
        rows.append((name, str(dies), str(plan.best.choice), law, duration(seconds), p.bound, _equal(p.equal)))
    words = f"holds on one {', '.join(holds)}" if holds else "holds nowhere"
    verdict = f"{words}; a host of 16 dies of A3, or of 8 of 950DT, does not hold the weights"
    head = ("target", "dies", "mesh", "fill + a T + b T^2, seconds", "TTFT", "bound by", "remark")
    return Claim(
        claim="a million tokens are prefilled in under 60 s on one machine",
        verdict=verdict,
        head=head,
        rows=tuple(rows),
    )


def _equal(tokens: float) -> str:
    return "no quadratic term" if math.isinf(tokens) else f"both terms equal at {tokens:,.0f} tokens"


# ---- tp=32 -----------------------------------------------------------------------------------------------------------

DEGREES, DIES, LENGTH = (8, 16, 32), 128, 131_072


def degree(config: ModelConfig, factors: Factors) -> Claim:
    """The same dies with other degrees: stages make up for what tensor leaves."""
    rows, best = [], []
    for name in ("a3", "a3-superpod", "950-superpod"):
        found = list(_degrees(config, target(name), factors))
        for tensor, ttft, tpot, used, link in found:
            mesh = str(Mesh(pipe=DIES // tensor, tensor=tensor))
            rows.append((name, mesh, gib(used), duration(ttft), duration(tpot), link))
        quick = min(found, key=lambda x: x[2])[0], min(found, key=lambda x: x[1])[0]
        best.append(f"{name}: tp={quick[0]} for decode, tp={quick[1]} for prefill")
    head = ("target", "mesh", "of a die", f"TTFT of {LENGTH:,}", "TPOT of one sequence", "sums of a layer go over")
    return Claim(
        claim="tp=32 is the degree to take", verdict=f"of 8, 16 and 32, {'; '.join(best)}", head=head, rows=tuple(rows)
    )


def _degrees(config: ModelConfig, t: Target, factors: Factors) -> Iterator[tuple[int, float, float, int, str]]:
    for tensor in DEGREES:
        mesh = Mesh(pipe=DIES // tensor, tensor=tensor)
        ask = Ask(model=MODEL, config=config, target=t, max_len=LENGTH, batch=1, mesh=mesh, factors=factors)
        sieve = Sieve(base_request(ask), factors)
        try:
            option = evaluate(ask, sieve, sieve.roomy(Choice(mesh=mesh, chunk=sieve.chunk(mesh))))
        except KimiGraphError:
            continue
        one = Issued("all_reduce", mesh.stage.atoms("tensor"), (1, config.embed), torch.bfloat16)
        cross = crossing(one, mesh.stage, t.links, factors)
        link = f"{cross.link}, {1e6 * cross.seconds:.1f} us, {cross.algorithm}"
        yield tensor, option.ttft, option.tpot, option.ledger.fullest.total, link


# ---- all-to-all ------------------------------------------------------------------------------------------------------

RANKS = (64, 256, 512, 1024, 2048, 8192)
ROWS, CHUNKS = (16, 256), 4  # of a rank, in a decode step and in a part of a prefill


def linear(factors: Factors) -> Claim:
    """Rows of a rank to their experts and back, as the group grows; alone, and in chunks behind experts' products."""
    config = load_config(MODEL)
    rows, words = [], []
    for t in map(target, ("a3-superpod", "950-superpod")):
        most = widest(t, config)
        for count in ROWS:
            first: tuple[float, float] | None = None
            last = RANKS[0]
            for ranks in RANKS:
                ways = min(ranks, most)
                sent, made = (f(t, ways, count, config, factors) for f in (all_to_all, expert_seconds))
                both = max(sent, made) + min(sent, made) / CHUNKS
                first = first or (sent, both)
                last = ranks if first[0] / sent >= NEAR else last
                note = f"groups of {ways:,}, the most that there may be" if ways < ranks else ""
                rows.append(
                    (t.name, f"{count}", f"{ranks:,}", f"{1e6 * sent:,.0f} us", f"{first[0] / sent:.0%}",
                     f"{1e6 * made:,.0f} us", f"{1e6 * both:,.0f} us", f"{first[1] / both:.0%}", note)
                )  # fmt: skip
            words.append(f"{t.name}, {count} rows: to {last:,} dies")
    head = ("target", "rows", "dies", "there and back", "rate", "products", f"both, {CHUNKS} chunks", "rate", "remark")
    verdict = (
        f"alone it keeps {NEAR:.0%} of the rate of {RANKS[0]} dies only so far: {'; '.join(words)}. What ends it: a "
        "message to every peer, with ever fewer rows. It is hidden behind experts' products as far as these take longer"
    )
    return Claim(
        claim="all-to-all of experts is near-linear to 1,024 cards", verdict=verdict, head=head, rows=tuple(rows)
    )


def widest(t: Target, config: ModelConfig) -> int:
    """Ranks that may share the experts: so many that slots divide, within what CANN's pair takes."""
    moe = config.moe
    assert moe is not None
    slots = range(moe.experts, MAX_EXPERTS + 1)
    return max(n for n in range(1, MAX_RANKS[t.soc] + 1) if any(s % n == 0 for s in slots))


def all_to_all(t: Target, ways: int, rows: int, config: ModelConfig, factors: Factors) -> float:
    """Seconds for a layer's rows of a rank to go to their experts, and back."""
    moe, mesh = config.moe, Mesh(data=ways)
    assert moe is not None
    size = (rows * moe.top_k, moe.latent or config.embed)
    issued = Issued("expert_dispatch", mesh.atoms("experts"), size, torch.bfloat16)
    return 2 * crossing(issued, mesh, t.links, factors).seconds


def expert_seconds(t: Target, ways: int, rows: int, config: ModelConfig, factors: Factors) -> float:
    """Seconds of the products of a rank's experts: of their bytes, or of the rows that come."""
    moe = config.moe
    assert moe is not None
    numbers = 3 * moe.ffn * (moe.latent or config.embed)
    flops = 2 * rows * moe.top_k * numbers / (t.die.cube["bf16"].value * factors.cube)
    read = max(1.0, moe.experts / ways) * numbers * 2 / (t.die.bandwidth.value * factors.memory)
    return max(flops, read)


# ---- scale -----------------------------------------------------------------------------------------------------------

# Dies, ranks that share the experts, copies of experts.
COUNTS = (
    ("a3-superpod", ((128, 128, 0), (512, 128, 0), (512, 512, 128), (1536, 128, 0))),
    ("950-superpod", ((128, 128, 0), (1024, 128, 0), (1024, 1024, 128), (8192, 128, 0), (8192, 1024, 128))),
)
BUSY, TENSOR = 1, 32  # sequences of a die, and its degree of tensor


def scale(config: ModelConfig, factors: Factors) -> Claim:
    """One instance on ever more dies: experts on as many ranks as before with more copies of all, or on more ranks."""
    rows, words = [], []
    for name, counts in COUNTS:
        first: tuple[float, float] | None = None
        for dies, experts, copies in counts:
            option = _instance(config, target(name), dies, experts, copies, factors)
            prefill = option.prefill.rows * option.request.max_len / option.ttft / dies
            decode = option.decode.tokens_per_second(dies)
            first = first or (prefill, decode)
            rows.append(
                (name, f"{dies:,}", str(option.choice), gib(option.ledger.fullest.total), f"{prefill:,.0f}",
                 f"{prefill / first[0]:.0%}", f"{decode:,.1f}", f"{decode / first[1]:.0%}")
            )  # fmt: skip
        words.append(f"{name} to {counts[-1][0]:,} dies")
    verdict = (
        f"{'; '.join(words)}: with experts on 128 ranks more dies are more copies of the whole, and linear; on more "
        "ranks a die holds fewer experts, and rows go further"
    )
    head = ("target", "dies", "mesh", "of a die", "prefill tokens/s a die", "rate", "decode tokens/s a die", "rate")
    return Claim(claim="scale on paper", verdict=verdict, head=head, rows=tuple(rows))


def _instance(config: ModelConfig, t: Target, dies: int, experts: int, copies: int, factors: Factors) -> Option:
    mesh = Mesh(data=dies // TENSOR, tensor=TENSOR, experts=experts)
    ask = Ask(
        model=MODEL, config=config, target=t, mesh=mesh, batch=BUSY * dies, max_len=4096, exchange=True,
        redundant_experts=copies, factors=factors,
    )  # fmt: skip
    sieve = Sieve(base_request(ask), factors)
    choice = Choice(mesh=mesh, exchange=True, split_cache=True, chunk=TENSOR)
    return evaluate(ask, sieve, choice)
