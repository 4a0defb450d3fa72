"""NaN and infinity in the bytes of tensors: one such number in a weight, and every token is NaN.

They have all bits of the exponent (E4M3: of the number, which has no infinity), so that bits tell, in a tenth of the
time of a hash.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .errors import CheckpointError
from .files import read_into
from .headers import Stored
from .progress import Notify, silent

EXPONENTS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF << 52),
    torch.float32: (torch.int32, 0xFF << 23),
    torch.bfloat16: (torch.int16, 0xFF << 7),
    torch.float16: (torch.int16, 0x1F << 10),
    torch.float8_e5m2: (torch.uint8, 0x1F << 2),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.float8_e8m0fnu: (torch.uint8, 0xFF),
}
CACHED = 1 << 19  # bytes that are looked at at once: what a core's cache holds
READ = 1 << 24  # bytes that are read at once


def count_not_finite(raw: Tensor, dtype: torch.dtype | None) -> int:
    """How many numbers are NaN or infinite.

    Args:
        raw: bytes, uint8 `[n]`, of whole numbers.
        dtype: what they are; None, or no float: nothing in them can be.
    """
    if dtype not in EXPONENTS:
        return 0
    as_bits, all_ones = EXPONENTS[dtype]
    count = 0
    for bits in raw.view(as_bits).split(CACHED // dtype.itemsize):
        exponents = bits.bitwise_and(all_ones)
        if int(exponents.amax()) == all_ones:
            count += int((exponents == all_ones).sum())
    return count


def tensors_not_finite(tensors: Mapping[str, Stored], progress: Notify = silent) -> Iterator[tuple[str, int]]:
    """Read all tensors of a checkpoint; those that have NaN or infinity, with how many numbers of theirs are.

    Raises:
        CheckpointError: a file became shorter meanwhile.
    """
    floats = {name: t for name, t in tensors.items() if t.dtype in EXPONENTS}
    total, done = sum(t.end - t.begin for t in floats.values()), 0
    buffer = torch.empty(READ, dtype=torch.uint8)
    for name, t in sorted(floats.items(), key=lambda item: (item[1].file, item[1].begin)):
        count = 0
        for at in range(t.begin, t.end, READ):
            part = buffer[: min(READ, t.end - at)]
            if read_into(t.file, at, part.numpy().data):
                raise CheckpointError(f"{t.file}: {name}: the file is cut short.")
            count += count_not_finite(part, t.dtype)
            done += len(part)
            progress("read weights", done, total)
        if count:
            yield name, count


def said(count: int, numbers: int) -> str:
    """In words."""
    return f"{count:,} of {numbers:,} numbers {'is' if count == 1 else 'are'} NaN or infinite"
