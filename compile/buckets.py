"""`kimi-graph buckets BUNDLE`: which graph serves a batch and a length, and what is refused, by the state contract.

A phase has graphs of static sizes, its gears: the one with the fewest rows that are enough serves a batch, rows without
a sequence being nobody's. Sequences share the slots and pages of the contract, which all phases have in common: what
one phase refuses every phase does, so that prefill takes nothing that decode could not go on with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_graph.config import ModelConfig
from kimi_graph.errors import BundleError

from .bundle import Bundle, as_written, open_bundle
from .expect import bundle_config

Contract = Mapping[str, Any]


@dataclass(frozen=True)
class Gear:
    """A graph of a phase, or on a mesh one of each stage; `rows` and `tokens` of a step, of all ranks."""

    phase: str
    rows: int
    tokens: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Room:
    """What the states of a bundle have room for.

    Attributes:
        length: tokens of the longest sequence, and `length_why` what sets it.
        page: tokens of a page.
        pages: of one shard and pool that sequences may have.
        pools: that share a sequence's pages.
        shards: into which rows fall.
    """

    length: int
    length_why: str
    page: int
    pages: int
    pools: int
    shards: int

    @staticmethod
    def of(contract: Contract, config: ModelConfig) -> "Room":
        """Of a state contract. Pages are rounded up: the model itself may take less than they hold."""
        held, shards, pools = (
            contract["tokens_per_sequence"],
            len(contract.get("shards", [None])),
            contract.get("pools", 1),
        )
        why = f"a sequence has {contract['pages_per_sequence']:,} pages of {contract['page_tokens']} tokens"
        if config.max_len < held:
            held, why = config.max_len, f"{config.name} takes no longer ones"
        pages = contract["pages"] // (shards * pools) - 1  # the first is nobody's
        return Room(held, why, contract["page_tokens"], pages, pools, shards)

    def sequences(self, length: int) -> int:
        """Sequences of a length that have room at once, shared out evenly."""
        pages = -(-max(1, length) // self.page)
        return self.pages // -(-pages // self.pools) * self.shards


@dataclass(frozen=True)
class Served:
    """Of one phase: the gear and its steps, or why there is none."""

    phase: str
    gear: Gear | None
    steps: int
    why: str

    def text(self) -> str:
        if self.gear is None:
            return f"{self.phase:<10}refused: {self.why}"
        return f"{self.phase:<10}{', '.join(self.gear.names)}: {self.why}"


@dataclass(frozen=True)
class Buckets:
    """The gears of a bundle, and what a batch and a length get. `served` is empty where none was asked for."""

    folder: str
    gears: tuple[Gear, ...]
    room: Room
    asked: str
    served: tuple[Served, ...]

    @property
    def passed(self) -> bool:
        return all(s.gear is not None for s in self.served)

    @property
    def summary(self) -> str:
        if not self.asked:
            return f"{len(self.gears)} gears; lengths up to {self.room.length:,}"
        refused = next((s for s in self.served if s.gear is None), None)
        return f"{self.asked}: served" if refused is None else f"{self.asked}: refused: {refused.why}"

    def text(self) -> str:
        lines = [*self._gear_lines(), f"length    up to {self.room.length:,} tokens: {self.room.length_why}"]
        most = max((g.rows for g in self.gears if g.phase != "vision"), default=0)
        full = self.room.sequences(self.room.length)
        if full < most:
            lines.append(
                f"batch     {full:,} sequences of that length; pages for {most:,} up to {self._longest(most):,} tokens"
            )
        served = [s.text() for s in self.served if s.gear is not None]
        return "\n".join([*lines, *([""] if served else []), *served])

    def _gear_lines(self) -> Iterator[str]:
        for g in self.gears:
            tokens = "1 token" if g.tokens == 1 else f"{g.tokens:,} tokens"
            size = f"{g.tokens:,} patches" if g.phase == "vision" else f"batch up to {g.rows:,}, {tokens} a step"
            yield f"{g.phase:<10}{size}: {', '.join(g.names)}"

    def _longest(self, batch: int) -> int:
        """Tokens that as many sequences may have at once."""
        pages = self.room.pages // -(-batch // self.room.shards)
        return min(self.room.length, pages * self.room.pools * self.room.page)

    def to_json(self) -> Any:
        return {
            "gears": [vars(g) for g in self.gears],
            "length": self.room.length,
            "sequences_of_that_length": self.room.sequences(self.room.length),
            "asked": self.asked or None,
            "served": [{**vars(s), "gear": None if s.gear is None else vars(s.gear)} for s in self.served],
            "passed": self.passed,
        }


def buckets_of(folder: Path, batch: int | None = None, length: int | None = None) -> Buckets:
    """The gears of a bundle.

    Args:
        batch: sequences at once, None: one.
        length: tokens of each, prompt and new ones; None: one. Nothing is asked for where both are None.

    Raises:
        BundleError: no bundle there, or a damaged one.
    """
    bundle = open_bundle(folder)
    with as_written(folder):
        gears, room = gears_of(bundle), Room.of(bundle.manifest["state"], bundle_config(bundle))
        if batch is None and length is None:
            return Buckets(str(folder), gears, room, "", ())
        batch, length = batch or 1, length or 1
        phases = dict.fromkeys(g.phase for g in gears if g.phase != "vision")
        served = tuple(serve(gears, room, phase, batch, length) for phase in phases)
        asked = f"{batch:,} x {length:,} tokens"
        return Buckets(str(folder), gears, room, asked, served)


def gears_of(bundle: Bundle) -> tuple[Gear, ...]:
    """All gears, small ones first in each phase."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for entry in bundle.manifest["graphs"]:
        found.setdefault((entry["phase"], entry["rows"], entry["tokens"]), []).append(entry["name"])
    order = list(dict.fromkeys(phase for phase, _, _ in found))
    sizes = sorted(found, key=lambda size: (order.index(size[0]), *size[1:]))
    return tuple(Gear(phase, rows, tokens, tuple(found[phase, rows, tokens])) for phase, rows, tokens in sizes)


def serve(gears: Sequence[Gear], room: Room, phase: str, batch: int, length: int) -> Served:
    """What a phase does with a batch of sequences that become `length` tokens long."""
    rows = [g for g in gears if g.phase == phase]
    gear = next((g for g in rows if g.rows >= batch), None)
    if why := _refusal(rows, room, batch, length):
        return Served(phase, None, 0, why)
    assert gear is not None
    if phase == "decode":
        more = gear.rows - batch
        free = f", {more:,} {'row is' if more == 1 else 'rows are'} nobody's" if more else ""
        return Served(phase, gear, 1, f"one token a step, up to length {length:,}{free}")
    steps = -(-length // gear.tokens)
    return Served(phase, gear, steps, f"a prompt of {length:,} tokens takes {steps:,} steps of {gear.tokens:,}")


def _refusal(rows: Sequence[Gear], room: Room, batch: int, length: int) -> str:
    """Why a phase with these gears does not serve; empty: it does."""
    if length > room.length:
        return f"length {length:,} is over {room.length:,}: {room.length_why}; the largest is {room.length:,}"
    most = rows[-1].rows
    if batch > most:
        return f"batch {batch:,} is over {most:,} rows; take turns, or compile with --batch {batch}"
    if batch > (fits := room.sequences(length)):
        return (
            f"{batch:,} sequences of {length:,} tokens take more pages than there are; {fits:,} do not: compile with "
            "more --pages"
        )
    return ""


def largest_inputs(
    manifest: Mapping[str, Any], config: ModelConfig, entry: Mapping[str, Any]
) -> dict[str, tuple[int, str]]:
    """The largest number that an input of a graph may hold (the least is 0), and the key that says so.

    Slots and pages are those of one shard. What a graph does with larger ones nobody knows: it reads and writes states
    that are another sequence's, or none.

    Args:
        entry: of the graph, in the manifest.
    """
    contract, room = manifest["state"], Room.of(manifest["state"], config)
    shards = len(contract.get("shards", [None]))
    pages = contract["pages"] // shards
    length = "state.tokens_per_sequence" if room.length == contract["tokens_per_sequence"] else "model.config"
    known = {
        "tokens": (config.vocab - 1, "model.config"),
        "batch.slots": (contract["slots"] // shards - 1, "state.slots"),
        "batch.lengths": (room.length, length),
        "batch.counts": (entry["tokens"], f"graphs.{entry['name']}.tokens"),
        "batch.block_table": (pages - 1, "state.pages"),
        "batch.slot_mapping": (pages * contract["page_tokens"] - 1, "state.pages"),
    }
    return {i["name"]: known[i["name"]] for i in entry["inputs"] if i["name"] in known}


def check_request(bundle: Bundle, batch: int, length: int) -> None:
    """Whether every phase of a bundle serves a request: whoever loads it, for prefill or for decode, asks this first.

    Raises:
        BundleError: one does not.
    """
    with as_written(bundle.folder):
        gears, room = gears_of(bundle), Room.of(bundle.manifest["state"], bundle_config(bundle))
        for phase in dict.fromkeys(g.phase for g in gears if g.phase != "vision"):
            if (found := serve(gears, room, phase, batch, length)).gear is None:
                raise BundleError(f"{bundle.folder}: {phase}: {found.why}.")
