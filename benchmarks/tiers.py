"""What should leave a tier of cached pages first: four rules on replayed conversations, documents and chains of tools.

    python benchmarks/tiers.py [--requests N] [--seed S]

A request is a chain of pages (128 tokens), each named by the prefix that ends there. A rule keeps `room` pages. A
request finds its longest prefix of which every page is there and, in a model with recurrent layers, the memory at its
end (3 pages: kimi-k3.1-pro has three recurrent layers for one of attention). The rest is computed in parts of 64 pages
and stored, with the memory at the end of each part.

Rules: `lru` and `arc` are the engine's own (a test holds them against it). `even` and the others keep the half that
was used last and of the rest drop what has the lowest score: how much sparse attention selected of a page, forgotten by
3 % a request. A page counts as much as the best of those that cannot be found without it; `alone` leaves that out.

No traffic was recorded. The traces are made, from a seed:

* turns: conversations of 1 to 40 turns (geometric, mean 6) over one of 4 system prompts (4 to 16 pages); 60 are open at
  a time and go on in random order, one in three ten times as often; a turn adds 1 to 10 pages;
* documents: 200 of 10 to 100 pages, asked for by a power law; every third request is about one that nobody asks for
  again; a question adds 1 to 3 pages;
* tools: 12 agents at a time, each with one of 6 sets of tools (30 to 60 pages); a step adds a result of 1 to 12 pages,
  5 to 40 steps; one step in five is given up, and the chain goes on from before it.

What sparse attention selects says something only in a model that was trained, and there is none here: random weights
select at random. So selections are made too. A request shares them out over its pages in proportion to a weight of the
piece that a page belongs to (document, question, turn, result), the first page and the last four times four. The
logarithm of a piece's weight follows how many requests of the whole trace read the piece, with a correlation of 0.9 in
`akin`, 0 in `unlike` and -0.9 in `against`. In `even` all pages have the same: its score is how often a page was used.
A request selects the same number of tokens whatever its length, so counts are in shares of an even one.

The promise: what ships is the best on average. It fails if `akin`, told nearly all about the future, beats the better
of `lru` and `arc`: then scores would be worth having.
"""

import argparse
import functools
import heapq
import itertools
import math
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

PAGE = 128  # tokens
PART = 64  # pages that are computed, and stored, at a time
MEMORY = 3  # pages of a memory
PAGE_MB = 4.9  # of kimi-k3.1-pro in bfloat16 on one of 32 ranks: 24 layers, each page as large as a memory's
SHARES = (0.05, 0.1, 0.25)  # room, of all pages of a trace
LINKS = {"akin": 0.9, "unlike": 0.0, "against": -0.9}

Key = tuple[int, int]  # a prefix, and 0 for its page or the number of a part of its memory


# ---- rules -----------------------------------------------------------------------------------------------------------


class Lru:
    """The least recently used leaves first; `keys` are in that order."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.keys: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self.keys

    def __len__(self) -> int:
        return len(self.keys)

    def insert(self, key: Key) -> None:
        self.keys[key] = None

    def missed(self, keys: Iterable[Key]) -> None:
        """These are about to be inserted."""

    def finished(self, keys: Sequence[Key], found: Collection[Key]) -> None:
        """A request has used these, in the order of its tokens, and found some of them there. The end of a prefix
        counts as older than its beginning."""
        for key in reversed(keys):
            if key in self.keys:
                self.keys.move_to_end(key)

    def evict(self, count: int, kept: Collection[Key]) -> list[Key] | None:
        """Take some out that are not of `kept`; None, and nothing is taken, where there are not as many."""
        return self.take(list(itertools.islice((k for k in self.keys if k not in kept), count)), count)

    def take(self, keys: list[Key], count: int) -> list[Key] | None:
        if len(keys) < count:
            return None
        for key in keys:
            del self.keys[key]
        return keys


class Arc:
    """Keys used once and keys used again, in lists whose sizes follow what was missed (Megiddo and Modha, 2003)."""

    def __init__(self, room: int) -> None:
        self.room, self.target = room, 0.0
        self.once, self.again, self.lost_once, self.lost_again = (OrderedDict[Key, None]() for _ in range(4))

    def __contains__(self, key: Key) -> bool:
        return key in self.once or key in self.again

    def __len__(self) -> int:
        return len(self.once) + len(self.again)

    def insert(self, key: Key) -> None:
        self.once[key] = None
        self.lost_once.pop(key, None)
        self.lost_again.pop(key, None)

    def finished(self, keys: Sequence[Key], found: Collection[Key]) -> None:
        for key in reversed(keys):
            if key in self.once and key in found:
                self.again[key] = self.once.pop(key)
            elif key in self.once:
                self.once.move_to_end(key)
            elif key in self.again:
                self.again.move_to_end(key)

    def missed(self, keys: Iterable[Key]) -> None:
        for key in reversed(list(keys)):
            if key in self.lost_once:
                step = max(1.0, len(self.lost_again) / len(self.lost_once))
                self.target = min(self.target + step, float(self.room))
                self.lost_once.move_to_end(key)
            elif key in self.lost_again:
                self.target = max(self.target - max(1.0, len(self.lost_once) / len(self.lost_again)), 0.0)
                self.lost_again.move_to_end(key)

    def evict(self, count: int, kept: Collection[Key]) -> list[Key] | None:
        once, again = ([k for k in keys if k not in kept][:count] for keys in (self.once, self.again))
        left, chosen = len(self.once), []
        for _ in range(count):
            own = once if once and (left >= int(self.target) or not again) else again
            if not own:
                return None
            left -= own is once
            chosen.append(own.pop(0))
        for key in chosen:
            keys, lost = (self.once, self.lost_once) if key in self.once else (self.again, self.lost_again)
            del keys[key]
            lost[key] = None
        for lost in (self.lost_once, self.lost_again):
            while len(lost) > self.room:
                lost.popitem(last=False)
        return chosen


class Scored(Lru):
    """Of the half that was not used lately, what has the lowest score; among equals the older one. All pages of a
    prefix have its score, its memory too. Without the safe half, what just came in would leave before it is used."""

    forget = 0.97

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.clock, self.scores = 0, {}

    def observe(self, counts: dict[int, float]) -> None:
        self.clock += 1
        self.scores |= {prefix: (self.score(prefix) + count, self.clock) for prefix, count in counts.items()}

    def score(self, prefix: int) -> float:
        score, at = self.scores.get(prefix, (0.0, self.clock))
        return score * self.forget ** (self.clock - at)

    def evict(self, count: int, kept: Collection[Key]) -> list[Key] | None:
        free = [k for k in self.keys if k not in kept]
        old = free[: max(len(free) - self.room // 2, count)]
        return self.take(heapq.nsmallest(count, old, key=lambda k: self.score(k[0])), count)


# ---- traces ----------------------------------------------------------------------------------------------------------


@dataclass
class Piece:
    """Pages that come together. reads: by requests of the whole trace; noise: of its weight."""

    pages: list[int]
    noise: float
    reads: int = 0


Request = list[Piece]


@dataclass
class Maker:
    random: random.Random
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def piece(self, least: int, most: int) -> Piece:
        pages = list(itertools.islice(self.numbers, self.random.randint(least, most)))
        return Piece(pages, self.random.gauss(0, 1))


def turns(m: Maker, count: int) -> Iterator[Request]:
    prompts = [m.piece(4, 16) for _ in range(4)]

    def conversation() -> tuple[float, Request, int]:
        length = min(1 + int(math.log(1 - m.random.random()) / math.log(1 - 1 / 6)), 40)
        return m.random.choice((1.0, 1.0, 10.0)), [m.random.choice(prompts)], length

    going = [conversation() for _ in range(60)]
    for _ in range(count):
        at = m.random.choices(range(len(going)), [c[0] for c in going])[0]
        often, request, left = going[at]
        request = [*request, m.piece(1, 10)]
        going[at] = (often, request, left - 1) if left > 1 else conversation()
        yield request


def documents(m: Maker, count: int) -> Iterator[Request]:
    known = [m.piece(10, 100) for _ in range(200)]
    popular = [1 / (1 + rank) ** 0.9 for rank in range(len(known))]
    for n in range(count):
        yield [m.piece(10, 100) if n % 3 == 0 else m.random.choices(known, popular)[0], m.piece(1, 3)]


def tools(m: Maker, count: int) -> Iterator[Request]:
    sets = [m.piece(30, 60) for _ in range(6)]

    def agent() -> tuple[Request, int]:
        return [m.random.choice(sets), m.piece(1, 4)], m.random.randint(5, 40)

    agents = [agent() for _ in range(12)]
    for _ in range(count):
        at = m.random.randrange(len(agents))
        before, left = agents[at]
        request = [*before, m.piece(1, 12)]
        given_up = m.random.random() < 0.2
        agents[at] = (before if given_up else request, left - 1) if left > 1 else agent()
        yield request


TRACES: dict[str, Callable[[Maker, int], Iterator[Request]]] = {"turns": turns, "documents": documents, "tools": tools}


def pages_of(request: Request) -> list[int]:
    return [page for piece in request for page in piece.pages]


def counts_of(request: Request, link: float | None, *, alone: bool = False) -> dict[int, float]:
    """What a request selects of each of its pages, in shares of an even one; see the top. `link`: None is `even`."""
    pages = pages_of(request)
    if link is None:
        return dict.fromkeys(pages, 1.0)
    weights: list[float] = []
    for piece in request:
        told = math.log(piece.reads) - 1  # mean and deviation are about 1 in these traces
        weights += [math.exp(link * told + math.sqrt(1 - link**2) * piece.noise)] * len(piece.pages)
    for place in {0, *range(max(len(weights) - 4, 0), len(weights))}:
        weights[place] *= 4
    mean = statistics.fmean(weights)
    if not alone:
        weights = list(itertools.accumulate(reversed(weights), max))[::-1]
    return {page: weight / mean for page, weight in zip(pages, weights, strict=True)}


# ---- replay ----------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """In pages. asked: of prompts; found: of those; moved: to the tier and from it."""

    asked: int = 0
    found: int = 0
    moved: int = 0


def replay(trace: Sequence[Request], rule: Lru | Arc, recurrent: bool, seen: Callable[[Request], None]) -> Result:
    """Serve a trace from one tier. `seen` is called with each request after it."""
    result = Result()
    for request in trace:
        pages = pages_of(request)
        places = {page: n for n, page in enumerate(pages)}
        there = next((n for n, page in enumerate(pages) if (page, 0) not in rule), len(pages))
        memories = range(1, MEMORY + 1) if recurrent else ()
        if recurrent:
            there = next((n for n in range(there, 0, -1) if all((pages[n - 1], m) in rule for m in memories)), 0)
        ends = {*range(there + PART, len(pages), PART), len(pages)}
        wanted = [(page, m) for n, page in enumerate(pages, 1) for m in (0, *(memories if n in ends else ()))]
        loaded = [(page, m) for n, page in enumerate(pages[:there], 1) for m in (0, *(memories if n == there else ()))]
        kept = {*wanted, *loaded}
        found = {key for key in kept if key in rule}
        new = [key for key in wanted if key not in rule]
        rule.missed(new)
        stored = 0
        for part in (new[at : at + PART] for at in range(0, len(new), PART)):
            need = max(len(rule) + len(part) - rule.room, 0)
            if need and rule.evict(need, kept) is None:
                break
            for key in part:
                rule.insert(key)
            stored += len(part)
        rule.finished(sorted(kept, key=lambda key: places[key[0]]), found)
        seen(request)
        result.asked += len(pages)
        result.found += there
        result.moved += stored + len(loaded)
    return result


def learn(rule: Scored, link: float | None, alone: bool, request: Request) -> None:
    rule.observe(counts_of(request, link, alone=alone))


def results_of(trace: Sequence[Request], room: int, recurrent: bool) -> dict[str, Result]:
    """Of each rule."""
    made = {
        "lru": replay(trace, Lru(room), recurrent, lambda request: None),
        "arc": replay(trace, Arc(room), recurrent, lambda request: None),
    }
    for name, link, alone in (("even", None, False), *((n, x, False) for n, x in LINKS.items()), ("alone", 0.9, True)):
        made[name] = replay(trace, rule := Scored(room), recurrent, functools.partial(learn, rule, link, alone))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begun, rates = time.monotonic(), []
    names = ("lru", "arc", "even", *LINKS, "alone")
    print(f"hit rate, and for lru and arc: thousands of tokens computed again, GB moved\n{'':26}", end="")
    print("".join(f"{name:>9}" for name in names))
    for name, recurrent in itertools.product(TRACES, (False, True)):
        trace = list(TRACES[name](Maker(random.Random(given.seed)), given.requests))
        for piece in (piece for request in trace for piece in request):
            piece.reads += 1
        every = {page for request in trace for page in pages_of(request)}
        asked = sum(len(pages_of(request)) for request in trace)
        print(f"{name}, {'recurrent' if recurrent else 'attention alone'}: {len(every):,} pages, at most "
              f"{1 - len(every) / asked:.3f}")  # fmt: skip
        for share in SHARES:
            results = results_of(trace, int(len(every) * share), recurrent)
            rates.append({rule: r.found / r.asked for rule, r in results.items()})
            print(f"    room for {share:4.0%}          ", "".join(f"{rates[-1][rule]:9.3f}" for rule in names), end="")
            for r in (results["lru"], results["arc"]):
                print(f"   {(r.asked - r.found) * PAGE / 1000:,.0f} {r.moved * PAGE_MB / 1000:,.0f}", end="")
            print(flush=True)
    means = {rule: statistics.fmean(row[rule] for row in rates) for rule in names}
    print(f"{'mean':26} " + "".join(f"{means[rule]:9.3f}" for rule in names))
    gain = statistics.fmean(row["akin"] - max(row["lru"], row["arc"]) for row in rates)
    told = means["akin"] - means["even"]
    print(f"selections that foretell reuse: {told:+.3f} over mere use, {gain:+.3f} over the better of lru and arc")
    print(f"{time.monotonic() - begun:.0f} s; {'scores are not worth having' if gain <= 0 else 'MISSED: scores win'}")
    return int(gain > 0)


if __name__ == "__main__":
    sys.exit(main())
