"""Ascend C kernels on a CPU: their own sources, built with a C++ compiler against headers of ours.

`Kernel("kda_step", cache).run(inputs, attrs, arch=2201)` infers shapes and plans tiles with the operator's own host
code, runs every core on torch tensors, and gives outputs and counters. What the device would not do is refused with a
`KernelError`.
"""

from .build import compiler, run_source
from .kernel import ARCHES, FOLDER, Counters, Definition, Kernel, Run, kernels

__all__ = [
    "ARCHES",
    "FOLDER",
    "Counters",
    "Definition",
    "Kernel",
    "Run",
    "compiler",
    "kernels",
    "run_source",
]
