"""Pictures become the patches that the released processors make: sizes, scaling, padding, colours, broken files."""

import dataclasses
import io
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import kimi_graph as kg
from kimi_graph import layers, tree
from kimi_graph.errors import ConfigError
from kimi_graph.init import init_tensor
from kimi_graph.models import Decoder
from kimi_graph.vision import SIDE_LIMIT, fit, image_prompt, most_patches, open_image, prepare_image

Image = pytest.importorskip("PIL.Image")

K25_MODEL, K3_MODEL = kg.load_config("kimi-k2.5"), kg.load_config("kimi-k3")
K25, K3 = K25_MODEL.vision, K3_MODEL.vision
both = pytest.mark.parametrize("c", [K25, K3], ids=["k2.5", "k3"])


def noise(width, height, mode="RGB", seed=0, low=0, high=256):
    shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(low, high, shape, dtype=np.uint8), mode)


def smooth(width, height):
    y, x = np.mgrid[0:height, 0:width]
    waves = [127.5 + 127.5 * np.sin(x / a + y / b) for a, b in ((9, 17), (23, 5), (40, 40))]
    return Image.fromarray(np.stack(waves, -1).astype(np.uint8))


def pixels(c, image):
    """What the tower sees, as `[frames, height, width, 3]` uint8, padding included."""
    frames, rows, columns = image.grid
    split = image.patches.view(frames, rows, columns, 3, c.patch, c.patch).permute(0, 1, 4, 2, 5, 3)
    whole = split.reshape(frames, rows * c.patch, columns * c.patch, 3) * 127.5 + 127.5
    assert float((whole - whole.round()).abs().max()) < 1e-4
    return whole.round().to(torch.uint8).numpy()


def saved(image, format="PNG", **options):  # noqa: A002
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


# Sizes.


@pytest.mark.parametrize(
    "c, size, tokens",
    [
        (K25, (7168, 7168), 4096),
        (K3, (7168, 7168), 16384),
        (K25, (1024, 768), 37 * 28),
        (K3, (1024, 768), 37 * 28),
        (K3, (4000, 3000), 143 * 108),
        (K25, (4000, 3000), 75 * 56),
    ],
)
def test_the_limit_of_patches_is_that_of_the_model(c, size, tokens):
    """The counts of a public report of the wrong limit (smg-project/smg#1984), prompts taken off."""
    width, height = fit(c, *size)
    assert -(-width // 28) * -(-height // 28) == tokens


@pytest.mark.parametrize(
    "size, scaled",
    [
        ((1, 1), (1, 1)),
        ((27, 29), (27, 29)),
        ((100_000, 1), (7167, 1)),  # 7168 / 100,000 is a little less in float64
        ((7169, 10), (7168, 9)),
        ((1792, 1792), (1792, 1792)),
        ((1793, 1792), (1793, 1792)),  # 128 whole patches still
        ((1806, 1792), (1798, 1785)),
    ],
)
def test_pictures_are_made_smaller_only_beyond_a_limit(size, scaled):
    assert fit(K25, *size) == scaled


@given(st.integers(1, 30_000), st.integers(1, 30_000), st.sampled_from([None, 1, 64, 4096]))
def test_a_scaled_picture_keeps_to_the_side_limit_and_fits_into_the_largest_bucket(width, height, limit):
    for c in (K25, K3):
        w, h = fit(c, width, height, limit)
        assert 1 <= w <= min(width, SIDE_LIMIT * c.patch)
        assert 1 <= h <= min(height, SIDE_LIMIT * c.patch)
        assert -(-w // 28) * -(-h // 28) * 4 <= most_patches(c, limit)


def test_the_largest_bucket_is_hardly_larger_than_the_limit():
    assert most_patches(K25) < 1.11 * K25.patch_limit
    assert most_patches(K3) < 1.03 * K3.patch_limit


@both
def test_a_picture_of_one_pixel_is_one_token(c):
    image = prepare_image(c, noise(1, 1))
    assert (image.grid, image.tokens, image.size) == ((1, 2, 2), 1, (1, 1))


@both
def test_a_very_long_picture_keeps_to_the_side_limit(c):
    image = prepare_image(c, noise(20_000, 3))
    assert (image.grid, image.tokens) == ((1, 2, 512), 256)


# Pixels.


def test_scaling_is_within_two_of_255_of_an_antialiased_bicubic_and_far_from_a_plain_one():
    """Public case V4."""
    source = noise(1024, 1024, low=64, high=192)  # so that nothing overshoots and is cut off between the two passes
    got = pixels(K3, prepare_image(K3, source, patch_limit=34 * 34))
    assert got.shape == (1, 476, 476, 3)
    x = torch.from_numpy(np.array(source)).permute(2, 0, 1)[None].double()
    fine, plain = (
        F.interpolate(x, size=(476, 476), mode="bicubic", antialias=a).clamp(0, 255).round()[0].permute(1, 2, 0)
        for a in (True, False)
    )
    assert np.abs(got[0] - fine.numpy()).max() <= 2
    assert np.abs(got[0] - plain.numpy()).max() > 40


@both
def test_patches_are_cut_by_row_and_column_and_each_by_colour(c):
    source = noise(56, 28)
    image = prepare_image(c, source)
    array = np.asarray(source).astype(np.float32) / 255
    assert image.grid == (1, 2, 4)
    for i, (row, column) in enumerate(np.ndindex(2, 4)):
        part = array[14 * row : 14 * row + 14, 14 * column : 14 * column + 14].transpose(2, 0, 1).reshape(-1)
        assert torch.equal(image.patches[i], (torch.from_numpy(part.copy()) - 0.5) / 0.5)


@both
def test_padding_is_black_on_the_right_and_at_the_bottom(c):
    image = prepare_image(c, Image.new("RGB", (30, 20), (255, 255, 255)))
    seen = pixels(c, image)[0]
    assert seen.shape == (28, 56, 3)
    assert (seen[:20, :30] == 255).all()
    assert (seen[20:] == 0).all()
    assert (seen[:, 30:] == 0).all()
    assert image.patches.min() == -1


@both
@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV"])
def test_pictures_of_other_colours_become_red_green_and_blue(c, mode):
    source = smooth(28, 28).convert(mode)
    assert (pixels(c, prepare_image(c, source))[0] == np.asarray(source.convert("RGB"))).all()


def test_a_grey_picture_of_16_bits_keeps_its_upper_8():
    source = Image.fromarray(np.linspace(0, 65535, 28 * 28).reshape(28, 28).astype(np.uint16))
    seen = pixels(K3, prepare_image(K3, saved(source)))[0]
    assert (seen == (np.asarray(source) >> 8)[..., None]).all()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_range_are_refused(mode):
    with pytest.raises(ConfigError, match=f"pixels of mode {mode} have no known range"):
        prepare_image(K3, Image.new(mode, (4, 4)))


# Transparency.


def board(height, width):
    """8 pixels a square, white first, then 180."""
    out = np.full((height, width, 3), 255, np.uint8)
    for y in range(0, height, 8):
        for x in range(0, width, 8):
            if (x + y) // 8 % 2:
                out[y : y + 8, x : x + 8] = 180
    return out


def test_k3_sees_its_chessboard_behind_what_is_transparent():
    seen = pixels(K3, prepare_image(K3, Image.new("RGBA", (28, 28))))[0]
    assert (seen == board(28, 28)).all()
    assert (seen[0, 0, 0], seen[0, 8, 0], seen[8, 8, 0]) == (255, 180, 255)


def test_k3_mixes_what_is_half_transparent_and_cuts_off_fractions():
    source = noise(28, 28, "RGBA")
    array = np.asarray(source).astype(np.float32)
    alpha = array[..., 3:] / 255
    want = (alpha * array[..., :3] + (1 - alpha) * board(28, 28)).astype(np.uint8)
    assert (pixels(K3, prepare_image(K3, source))[0] == want).all()


def test_the_squares_of_the_chessboard_stay_as_they_are_when_a_picture_is_made_smaller():
    image = prepare_image(K3, Image.new("RGBA", (560, 560)), patch_limit=16)
    assert (pixels(K3, image)[0] == board(56, 56)).all()


def test_k3_knows_grey_and_palette_transparency():
    grey = Image.new("LA", (28, 28), (7, 0))
    palette = saved(Image.new("P", (28, 28)), transparency=0)
    for source in (grey, palette):
        assert (pixels(K3, prepare_image(K3, source))[0] == board(28, 28)).all()


@pytest.mark.parametrize("transparency", [5, bytes(256)], ids=["one colour", "a table"])
def test_k25_keeps_the_colours_of_transparent_pixels(transparency):
    clear = Image.new("RGBA", (28, 28), (10, 20, 30, 0))
    palette = Image.new("P", (28, 28), 5)
    palette.putpalette([10, 20, 30] * 256)
    for source in (clear, saved(palette, transparency=transparency)):
        assert (pixels(K25, prepare_image(K25, source))[0] == (10, 20, 30)).all()


# Files.


def test_the_orientation_that_a_camera_noted_is_applied():
    source = smooth(56, 28)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    image = prepare_image(K3, saved(source, exif=exif))
    assert (image.size, image.grid) == ((28, 56), (1, 4, 2))
    assert (pixels(K3, image)[0] == np.rot90(np.asarray(source), -1)).all()


def test_the_first_frame_of_an_animation_counts():
    first, second = Image.new("RGB", (28, 28), (255, 0, 0)), Image.new("RGB", (28, 28), (0, 0, 255))
    image = prepare_image(K3, saved(first, "GIF", save_all=True, append_images=[second]))
    assert (pixels(K3, image)[0] == (255, 0, 0)).all()


@both
def test_a_path_and_the_bytes_of_its_file_are_the_same_picture(c, tmp_path):
    path = tmp_path / "a.png"
    source = noise(40, 30)
    source.save(path)
    found = [prepare_image(c, x).patches for x in (path, str(path), path.read_bytes(), source)]
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_a_file_that_is_cut_short_is_refused(format):  # noqa: A002
    whole = saved(noise(64, 64), format)
    for end in (0, 1, 20, len(whole) // 2):
        with pytest.raises(ConfigError, match=r"image: not a picture that can be read \("):
            open_image(whole[:end])


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_file_is_a_picture_or_refused(data):
    whole = bytearray(saved(noise(24, 24), data.draw(st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF"]))))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[at] = data.draw(st.integers(0, 255))
    try:
        image = open_image(bytes(whole))
    except ConfigError:
        return
    assert min(image.size) > 0


def test_a_small_file_of_an_enormous_picture_is_refused():
    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(ConfigError, match="DecompressionBomb"):
        open_image(file)


def test_what_is_no_picture_is_refused_by_name(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ConfigError, match=r"notes\.txt: not a picture that can be read \(UnidentifiedImageError"):
        prepare_image(K3, text)
    with pytest.raises(ConfigError, match=r"absent\.png: not a picture that can be read \(FileNotFoundError"):
        prepare_image(K3, tmp_path / "absent.png")
    with pytest.raises(ConfigError, match="image: found int, expected a path, bytes of a file or a PIL image"):
        prepare_image(K3, 3)
    with pytest.raises(ConfigError, match="a picture of 0 x 4 pixels"):
        prepare_image(K3, Image.new("RGB", (0, 4)))


def test_without_pillow_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match="pip install pillow"):
        open_image(b"")


# Frames.


def test_frames_lie_one_after_another():
    frames = [noise(56, 28, seed=i) for i in range(3)]
    image = prepare_image(K25, frames)
    assert (image.grid, image.tokens) == ((3, 2, 4), 2)
    alone = [prepare_image(K25, frame).patches for frame in frames]
    assert torch.equal(image.patches, torch.cat(alone))


def test_frames_of_unequal_sizes_and_too_many_of_them_are_refused():
    with pytest.raises(ConfigError, match=r"frames of unequal sizes \[\(4, 4\), \(5, 4\)\]"):
        prepare_image(K3, [noise(4, 4), noise(5, 4)])
    for count in (0, 5):
        with pytest.raises(ConfigError, match=f"{count} frames, expected 1 to 4"):
            prepare_image(K3, [noise(4, 4)] * count)


# Prompts and embeddings.


def test_the_prompt_has_a_placeholder_for_each_token_and_in_k3_the_size_as_given():
    source = noise(30, 90)
    pads = "<|media_pad|>" * 8
    assert image_prompt(K25, prepare_image(K25, source)) == f"<|media_begin|>image<|media_content|>{pads}<|media_end|>"
    sized = f"<|media_begin|>image 30x90<|media_content|>{pads}<|media_end|>"
    assert image_prompt(K3, prepare_image(K3, source)) == sized


def tower(model):
    """The model with a tower of one narrow layer, and its parameters."""
    c = dataclasses.replace(model.vision, embed=16, layers=1, heads=2, head_dim=8, ffn=24, projector_ffn=64)
    p = tree.map_with_path(lambda path, s: init_tensor(s, path), layers.vision_specs(c, 12))
    return dataclasses.replace(model, vision=c), Decoder(
        embed=None, layers=(), out_res=None, norm=None, head=None, vision=p
    )


@pytest.mark.parametrize("model", [K25_MODEL, K3_MODEL], ids=lambda m: m.name)
def test_a_picture_becomes_an_embedding_a_token_whatever_the_bucket(model):
    config, params = tower(model)
    source = smooth(60, 80)
    found = kg.encode_image(config, params, source)
    assert found.shape == (9, 12)
    assert bool(found.isfinite().all())
    image = prepare_image(config.vision, source)
    for again in (kg.encode_image(config, params, image), kg.encode_image(config, params, image, room=60)):
        torch.testing.assert_close(again, found)


def test_pictures_that_differ_have_embeddings_that_differ():
    config, params = tower(K3_MODEL)
    one, other = (kg.encode_image(config, params, x) for x in (smooth(28, 28), Image.new("RGBA", (28, 28))))
    assert float((one - other).abs().max()) > 0.1 * float(one.abs().max())


def test_a_model_without_vision_is_refused():
    config, params = tower(K3_MODEL)
    with pytest.raises(ConfigError, match=r"kimi-linear-48b has no vision tower"):
        kg.encode_image(kg.load_config("kimi-linear-48b"), params, noise(4, 4))
    with pytest.raises(ConfigError, match="no vision tower"):
        kg.encode_image(config, tree.replace(params, vision=None), noise(4, 4))
