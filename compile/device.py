"""What bring-up asks of a machine with devices: what it is, and to run graphs on some of its ranks.

`CpuDevice` is a CPU that does as the executor does: what devices should do. `faults.FaultyDevice` is one of which
something is broken, and `npu_device.NpuDevice` runs graphs on NPUs, through the loader of a deployment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .executor import Executor, Ran, run_together
from .ge_proto import ModelDef


@dataclass(frozen=True)
class Job:
    """A graph of one rank, and what it reads, by name of the graph's Data and RefData nodes."""

    model: ModelDef
    inputs: Mapping[str, Tensor]
    states: Mapping[str, Tensor]


Groups = Mapping[str, Sequence[Sequence[int]]]


class Device(Protocol):
    """A machine, or several, whose devices are ranks."""

    def facts(self) -> dict[str, str]:
        """What is there, as far as it can be known: `soc_version`, `cann`, `devices`, `operators` (own types)."""
        ...

    def run(self, jobs: Mapping[int, Job], groups: Groups) -> dict[int, Ran]:
        """Compile and run one graph on each of some ranks, together.

        Args:
            jobs: by rank. groups: rank lists of the groups that the graphs name.

        Returns:
            Of each rank the graph's results, and its states as they are after it. The tensors given stay as they are.

        Raises:
            KimiGraphError: it cannot be compiled or run, in the device's words.
        """
        ...


class CpuDevice:
    """A CPU in place of devices. `said`: what it says of itself."""

    def __init__(self, said: Mapping[str, str]) -> None:
        self.said = dict(said)

    def facts(self) -> dict[str, str]:
        return self.said

    def executor(self, rank: int, model: ModelDef) -> Executor:
        """What runs a graph on a rank."""
        return Executor(model)

    def run(self, jobs: Mapping[int, Job], groups: Groups) -> dict[int, Ran]:
        ranks = sorted(jobs)
        place = {rank: i for i, rank in enumerate(ranks)}
        steps = [
            self.executor(rank, jobs[rank].model).steps(jobs[rank].inputs, jobs[rank].states, "native")
            for rank in ranks
        ]

        def lists(name: str) -> list[list[int]]:
            return [[place[r] for r in own] for own in groups[name] if set(own) <= set(ranks)]

        return dict(zip(ranks, run_together(steps, lists), strict=True))
