"""Assumed efficiencies: what of a rate in a data sheet a kernel gets, and what costs time whatever its size.

None of them is tuned to a published figure; `PUBLISHED` is printed beside estimates so that a reader can judge. All can
be set: `--factor memory=0.8`.
"""

import difflib
from dataclasses import dataclass, fields, replace

from kimi_graph.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Attributes:
    cube, vector, memory, l2, network: parts of the rates of `kimi-graph targets`.
    launch_us: from one kernel to the next, in a graph that is resident on the device.
    collective_us: start of a collective, beside its steps. message_us: of each peer that is sent to.
    spread: of experts' popularity, see `routing`. reserve_gib: of a die, taken by driver and runtime.
    group_mib: HCCL's buffers of a group: two of HCCL_BUFFSIZE, 200 MiB each.
    """

    cube: float = 0.6
    vector: float = 0.5
    memory: float = 0.7
    l2: float = 0.5
    network: float = 0.7
    launch_us: float = 2.0
    collective_us: float = 8.0
    message_us: float = 0.05
    spread: float = 0.5
    reserve_gib: float = 2.0
    group_mib: float = 400.0

    @staticmethod
    def parse(texts: list[str]) -> "Factors":
        """Of `memory=0.8` and the like.

        Raises:
            ConfigError: a name that is not known, a value that is no positive number, a part of a rate above 1.
        """
        known = {f.name for f in fields(Factors)}
        rates = ("cube", "vector", "memory", "l2", "network")
        given: dict[str, float] = {}
        for text in texts:
            name, _, value = text.partition("=")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
                raise ConfigError(
                    f"--factor {text}: unknown; the nearest is {near!r}, all are {', '.join(sorted(known))}."
                )
            try:
                given[name] = float(value)
            except ValueError:
                raise ConfigError(f"--factor {text}: expected {name}=NUMBER.") from None
            if not 0 <= given[name] < 1e6 or (name in rates and not 0 < given[name] <= 1):
                raise ConfigError(
                    f"--factor {text}: expected {'a part, above 0 and at most 1' if name in rates else '0 or more'}."
                )
        return replace(Factors(), **given)


PUBLISHED = (  # (what, figure, where)
    ("K3 W4A8 on 64 A3 NPUs, 8K in, 1K out, speculative", "TPOT 8.2 ms, TTFT 2.8 s", "SGLang"),
    ("K3 W4A8, DP4 x TP16 x EP64 on A3, 4 requests", "TPOT 22.25 ms", "vllm-ascend"),
    ("K3 on 32 x 950, TP32/EP32", "58.51 GiB of weights a card", "cann-recipes-infer"),
    ("DeepSeek-V3.2 DSA on 64 x A3, 128K", "TTFT < 2 s, TPOT < 30 ms, bfloat16", "cann-recipes-infer"),
    ("DeepSeek-V4 Flash on 16 x 950DT, 1M, batch 64", "9.46 ms", "cann-recipes-infer"),
    ("DeepSeek-R1 on CloudMatrix384", "prefill 6,688 and decode 1,943 tokens/s of an NPU", "arXiv:2506.12708"),
)  # most of them with speculative decoding and often forced balance of experts: none is a plain decode
