"""Numbers of hardware that say where they are from, and the links of every target.

Source: fact sheet of Ascend, C.2 (published numbers and how they fit). A link is of one die: bytes that it sends in a
second while it receives as many.
"""

from dataclasses import dataclass
from typing import Literal

How = Literal["published", "derived", "assumed"]


@dataclass(frozen=True)
class Number:
    """A number of hardware.

    Attributes:
        how: whether somebody published it, it follows from published numbers, or we assume it.
        source: in words.
    """

    value: float
    unit: str
    how: How
    source: str

    def __str__(self) -> str:
        return f"{self.text} ({self.how}: {self.source})"

    @property
    def text(self) -> str:
        """`1.60 TB/s`."""
        size, unit = self.value, self.unit
        if unit == "s":
            size, unit = size * 1e6, "us"
        if unit in ("B", "B/s", "FLOP/s", "op/s"):
            step, names = (1024, ("", "Ki", "Mi", "Gi")) if unit == "B" else (1000, ("", "k", "M", "G", "T"))
            index = 0
            while size >= step and index < len(names) - 1:
                size, index = size / step, index + 1
            unit = names[index] + unit
        return f"{size:.4g} {unit}"


@dataclass(frozen=True)
class Link:
    """A level of a machine's network.

    Attributes:
        name: what the dies that it joins are together.
        dies: how many they are; 0: as many as there are.
        bandwidth: bytes/s of one die, one way.
        latency: seconds until the first byte of a message is there.
    """

    name: str
    dies: int
    bandwidth: Number
    latency: Number


def _link(name: str, dies: int, gigabytes: float, how: How, source: str, microseconds: float, why: str) -> Link:
    latency = Number(microseconds * 1e-6, "s", "assumed", why)
    return Link(name, dies, Number(gigabytes * 1e9, "B/s", how, source), latency)


_STEP = "a step of a collective inside a host; no published number"
_FAR = "two switches of Ethernet more than inside a host; no published number"
_PACKAGE = _link(
    "package", 2, 270, "assumed", "540 GB/s both ways between the two dies; no source is at hand", 1, _STEP
)
_A3_HOST = _link(
    "host", 16, 196, "derived", "7 links of 224 Gb/s of a die, 392 GB/s of a package: CloudMatrix384", 2, _STEP
)
_RDMA = "400 Gb/s RDMA of a package of two dies: CloudMatrix384"
_950_HOST = _link(
    "host", 8, 1000, "derived", "72 lanes of 112 Gb/s, 2.0 TB/s both ways in the white paper", 2.1, "fabric, keynote"
)
_950_OUT = _link("network", 0, 100, "derived", "2 x 400 Gb/s Ethernet of a card, white paper", 5, _FAR)

LINKS: dict[str, tuple[Link, ...]] = {  # innermost first; the last one joins as many as there are
    "a2": (
        _link("host", 8, 196, "assumed", "about 56 GB/s for each of 7 peers, taken as the sum of both ways", 2, _STEP),
        _link("network", 0, 25, "assumed", "200 Gb/s RoCE of a die, the usual server", 5, _FAR),
    ),
    "a3": (_PACKAGE, _A3_HOST, _link("network", 0, 25, "derived", _RDMA, 5, _FAR)),
    "a3-superpod": (
        _PACKAGE,
        _A3_HOST,
        _link("superpod", 768, 190, "derived", "of a host, less 3 %: CloudMatrix384", 3, "1 us more than a host"),
        _link("network", 0, 25, "derived", _RDMA, 5, _FAR),
    ),
    "950pr": (_950_HOST, _950_OUT),
    "950dt": (_950_HOST, _950_OUT),
    "950-superpod": (
        _link("superpod", 8192, 1000, "derived", _950_HOST.bandwidth.source, 2.1, "published of the fabric, keynote"),
        _950_OUT,
    ),
}  # fmt: skip
