"""Pictures for a vision tower: from a file to normalised patches, as the released processors make them.

A picture is made smaller if it has too many patches, never larger, and padded with black on the right and at the
bottom. What the released code does not say is decided here: the orientation that a camera noted is applied, of an
animation the first frame counts, and pictures of 16 bits keep their upper 8.
Source: fact sheet of models, section 6.3; K3's chessboard: https://github.com/smg-project/smg/pull/1984.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .config import VisionConfig
from .errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE_LIMIT = 512  # patches of one side, all released models

Source = Any  # a path, the bytes of a file, or a PIL image


@dataclass(frozen=True, kw_only=True)
class VisionInput:
    """A picture, or a few frames of one size, ready for the tower.

    Attributes:
        patches: `[frames * rows * columns, 3 * patch * patch]` float32, in that order; each by colour, row, column.
        grid: frames, rows and columns of patches.
        size: width and height of the picture as given, in pixels.
        tokens: embeddings it becomes, and placeholders it needs.
    """

    patches: Tensor
    grid: tuple[int, int, int]
    size: tuple[int, int]
    tokens: int


def prepare_image(c: VisionConfig, image: Source | Sequence[Source], patch_limit: int | None = None) -> VisionInput:
    """Read, scale, pad and cut a picture into patches.

    Args:
        image: a path, the bytes of a file, a PIL image, or a sequence of those: frames of one size, which the model
            averages.
        patch_limit: patches of a frame; the config's by default.

    Raises:
        ConfigError: not a picture that can be read, without pixels, frames of unequal sizes or too many of them.
    """
    if not isinstance(c, VisionConfig):
        raise ConfigError(f"image: found {type(c).__name__}, expected the config of a vision tower: config.vision.")
    frames = [open_image(x) for x in (image if isinstance(image, (list, tuple)) else [image])]
    sizes = [frame.size for frame in frames]
    if not 1 <= len(frames) <= c.frames:
        raise ConfigError(f"image: {len(frames)} frames, expected 1 to {c.frames}; give longer videos in parts.")
    if len(set(sizes)) > 1:
        raise ConfigError(f"image: frames of unequal sizes {sorted(set(sizes))}; give frames of one size.")
    width, height = sizes[0]
    size = fit(c, width, height, patch_limit)
    pixels = np.stack([_pad(c, _resize(c, frame, size)) for frame in frames])
    rows, columns = (n // c.patch for n in pixels.shape[1:3])
    split = pixels.reshape(len(frames), rows, c.patch, columns, c.patch, 3).transpose(0, 1, 3, 5, 2, 4)
    patches = torch.from_numpy(split.reshape(len(frames) * rows * columns, -1)).float()
    return VisionInput(
        patches=(patches / 255 - 0.5) / 0.5,
        grid=(len(frames), rows, columns),
        size=(width, height),
        tokens=rows * columns // math.prod(c.merge),
    )


def fit(c: VisionConfig, width: int, height: int, patch_limit: int | None = None) -> tuple[int, int]:
    """Width and height in pixels that a picture is scaled to, before padding.

    The released rule counts whole patches of the picture as given, so that a little more than the limit can come out
    (`most_patches`), and cuts off fractions of a pixel.
    """
    limit, longest = patch_limit or c.patch_limit, SIDE_LIMIT * c.patch
    patches = max(1, width // c.patch) * max(1, height // c.patch)
    scale = min(1.0, math.sqrt(limit / patches), longest / width, longest / height)
    return min(longest, max(1, int(width * scale))), min(longest, max(1, int(height * scale)))


def most_patches(c: VisionConfig, patch_limit: int | None = None) -> int:
    """More patches than any frame has once it is scaled and padded: room that every picture fits into.

    With whole patches m and n as given and a scale s, m n s^2 is at most the limit and m s and n s at most that of a
    side; a side ends with fewer than (m + 1) s + 2 patches.
    """
    limit, merged = patch_limit or c.patch_limit, math.prod(c.merge)
    return -(-(limit + 3 * (SIDE_LIMIT + limit // SIDE_LIMIT + 1) + 9) // merged) * merged


def image_prompt(c: VisionConfig, image: VisionInput) -> str:
    """The text that stands for a picture in a prompt, with one placeholder for each of its tokens."""
    size = " {}x{}".format(*image.size) if c.sized_prompt else ""
    return f"<|media_begin|>image{size}<|media_content|>{'<|media_pad|>' * image.tokens}<|media_end|>"


def open_image(source: Source) -> "Image":
    """The picture in a file (a path, or its bytes) or a PIL image, upright.

    Raises:
        ConfigError: not a picture that can be read, or one without pixels.
    """
    pil = _pil()
    if isinstance(source, pil.Image.Image):
        image = pil.ImageOps.exif_transpose(source)
        name = "image"
    else:
        name = "image" if isinstance(source, bytes) else str(source)
        if not isinstance(source, (bytes, str, Path)):
            raise ConfigError(f"image: found {type(source).__name__}, expected a path, bytes of a file or a PIL image.")
        try:
            with pil.Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
                image = pil.ImageOps.exif_transpose(opened)
        except Exception as e:  # decoders of broken files raise whatever they come across
            raise ConfigError(f"{name}: not a picture that can be read ({type(e).__name__}: {e}).") from e
    if not min(image.size):
        raise ConfigError(f"{name}: a picture of {image.width} x {image.height} pixels.")
    return image


def _pil() -> ModuleType:
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError as e:
        raise ConfigError("Pictures are read with Pillow, which is not installed: pip install pillow.") from e
    return PIL


def _resize(c: VisionConfig, image: "Image", size: tuple[int, int]) -> np.ndarray:
    """`[height, width, 3]` uint8. K3 puts its chessboard behind the scaled picture: its squares stay as they are."""
    bicubic = _pil().Image.Resampling.BICUBIC
    image = _eight_bits(image)
    if c.chessboard is None:
        return np.asarray(_colours(image).resize(size, bicubic))
    return _on_chessboard(image.resize(size, bicubic), *c.chessboard)


def _eight_bits(image: "Image") -> "Image":
    if image.mode.startswith("I;16"):
        return _pil().Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ConfigError(
            f"image: pixels of mode {image.mode} have no known range; convert to 8 or 16 bits a colour before."
        )
    return image


def _colours(image: "Image") -> "Image":
    """Without transparency: colours as they are stored."""
    if "transparency" in image.info:
        image = image.convert("RGBA")  # else PIL warns of palettes with transparency
    return image.convert("RGB")


def _on_chessboard(image: "Image", side: int, light: int, dark: int) -> np.ndarray:
    if image.mode == "RGB" or ("A" not in image.getbands() and "transparency" not in image.info):
        return np.asarray(image.convert("RGB"))
    pixels = np.asarray(image.convert("RGBA"))
    rows, columns = np.ogrid[: pixels.shape[0], : pixels.shape[1]]
    board = np.where((rows // side + columns // side) % 2, dark, light)[..., None].astype(np.uint8)
    alpha = pixels[..., 3:].astype(np.float32) / 255
    return (alpha * pixels[..., :3] + (1 - alpha) * board).astype(np.uint8)


def _pad(c: VisionConfig, pixels: np.ndarray) -> np.ndarray:
    """Black on the right and at the bottom, up to whole tokens."""
    height, width = pixels.shape[:2]
    steps = (c.merge[0] * c.patch, c.merge[1] * c.patch)
    return np.pad(pixels, ((0, -height % steps[0]), (0, -width % steps[1]), (0, 0)))
