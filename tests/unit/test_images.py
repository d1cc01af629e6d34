"""Finding images, reading every kind of file as the right pixels or refusing it by name, and the models' processors."""

from __future__ import annotations

import io
import json
import logging
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL import ImageFile as PillowFile

from enfold.errors import ConfigError, InputError
from enfold.vision.finding import ImageFile, find_images
from enfold.vision.images import image_size, read_image
from enfold.vision.processor import Preprocessor, load_processor

HEIGHT, WIDTH = 6, 9
RGB = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
PICTURE = Image.fromarray(RGB)
SMOOTH = PICTURE.resize((131, 97), Image.Resampling.BICUBIC)

UPRIGHT: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda stored: stored,
    2: lambda stored: stored[:, ::-1],
    3: lambda stored: stored[::-1, ::-1],
    4: lambda stored: stored[::-1],
    5: lambda stored: stored.swapaxes(0, 1),
    6: lambda stored: np.rot90(stored, -1),
    7: lambda stored: stored[::-1, ::-1].swapaxes(0, 1),
    8: lambda stored: np.rot90(stored, 1),
}


def saved(image: Image.Image, path: Path, **options: Any) -> Path:
    image.save(path, **options)
    return path


def pixels(path: Path, **options: Any) -> np.ndarray:
    image = read_image(path, **options)
    assert image.mode == "RGB"
    return np.asarray(image)


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, depth: int, colour: int, samples: bytes, *more: bytes) -> bytes:
    """Return a PNG with the rows of `samples` (a whole number of bytes each) and further chunks before them."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    row = len(samples) // height if samples else 0
    rows = b"".join(b"\0" + samples[start : start + row] for start in range(0, len(samples), row or 1))
    body = [chunk(b"IHDR", header), *more, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def tiff(width: int, height: int, bits: int, samples: bytes, photometric: int = 1, kind: int = 1) -> bytes:
    """Return an uncompressed grey TIFF; photometric 0 means white is zero; kind 1 unsigned, 2 signed, 3 float."""
    entries = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 0, 277: 1, 278: height}
    entries |= {279: len(samples), 339: kind}
    entries[273] = 8 + 2 + 12 * len(entries) + 4
    fields = b"".join(struct.pack("<HHII", tag, 4 if tag in (273, 279) else 3, 1, n) for tag, n in entries.items())
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + fields + bytes(4) + samples


# Finding


def test_files_folders_and_lists(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "pictures"
    names = ["b.PNG", "a.jpeg", "sub/0.webp", "sub/.hidden.png", ".git/d.png", "notes.txt", "x.heic", "y.heic"]
    for name in names:
        written(folder / name, b"not looked at")
    single = written(tmp_path / "photo", b"any suffix")
    lines = ['{"image": "pictures/a.jpeg", "id": "first"}', f'{{"id": 7, "image": {json.dumps(str(single))}}}']
    listed = str(written(tmp_path / "list.jsonl", b"\xef\xbb\xbf" + "\r\n".join([*lines, lines[0], ""]).encode()))
    with caplog.at_level(logging.WARNING, "enfold"):
        found = find_images([str(single), str(folder), listed])
    assert [image.path for image in found] == [
        single, folder / "a.jpeg", folder / "b.PNG", folder / "sub/0.webp",
        folder / "a.jpeg", single, folder / "a.jpeg",
    ]  # fmt: skip
    assert [image.id for image in found] == [None, None, None, None, "first", 7, "first"]
    assert [image.where for image in found[3:5]] == [str(folder), f"{listed}, line 1"]
    assert "3 images; skipped 3 others (2 .heic, 1 .txt)" in caplog.text
    assert json.loads(found[0].to_json()) == {"image": str(single)}
    assert found[5].to_json() == f'{{"id": 7, "image": {json.dumps(str(single))}}}'
    assert find_images(str(single)) == [ImageFile(single, None, str(single))]


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    written(tmp_path / "in/a.png", b"")
    written(tmp_path / "elsewhere/b.png", b"")
    (tmp_path / "in/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/other").symlink_to(tmp_path / "elsewhere")
    assert [image.path.name for image in find_images([str(tmp_path / "in")])] == ["a.png", "b.png"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "the line is empty; remove it"),
        (b"{", "no valid JSON"),
        (b"[" * 100_000, "no valid JSON"),
        (b'{"image": "\xc3("}', r"byte 12 of the line \(0xc3\) is no valid UTF-8"),
        (b'"a.png"', r'no "image" \(no object\)'),
        (b'{"path": "a.png", "n": 1}', r"no \"image\" \(it has 'path', 'n'\); write one"),
        (b'{"image": ["a.png"]}', '"image" is a list; give one path'),
        (b'{"image": ""}', '"image" is empty'),
        (b'{"image": "https://example.com/a.png"}', r'"image" is a URL \(https://example.com/a.png\); download it'),
        (b'{"image": "a.png", "id": 1.5}', '"id" is a float'),
        (b'{"image": "a.png", "id": "\\ud800"}', "surrogates not allowed"),
        (b'{"image": "none.png"}', r"none\.png can't be read: No such file"),
        (b'{"image": "sub"}', "sub is a folder; name the files in it"),
        (b'{"image": "a\\u0000.png"}', "is no path: embedded null"),
        (b'{"image": "' + b"a" * 300 + b'.png"}', "File name too long"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "sub").mkdir()
    fine = b'{"image": "a.png"}'
    written(tmp_path / "a.png", b"")
    listed = written(tmp_path / "list.jsonl", b"\n".join([fine, line, fine]) + b"\n")
    with pytest.raises(InputError, match=r"^\S+list\.jsonl, line 2: .*" + message):
        find_images([str(listed)])


def test_several_problems_are_listed_at_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    written(tmp_path / "other/a.txt", b"")
    lines = "\n".join(f'{{"image": "{number}.png"}}' for number in range(6))
    inputs = ["empty", "other", "other/a.txt", "none.png", "-"]
    os.mkfifo(tmp_path / "pipe.png")
    written(tmp_path / "list.jsonl", lines.encode())
    written(tmp_path / "blank.jsonl", b"\n")
    for names, message in (
        (["empty"], r"^\S+empty holds no images \(\.avif"),
        (["other"], r"holds no images \(.*\); it holds 1 others \(1 \.txt\)$"),
        (["other/a.txt"], r"a\.txt is no image; a list of images is a \.jsonl file"),
        (["none.png"], r"^\S+none\.png can't be read: No such file"),
        (["none.jsonl"], r"^can't read \S+none\.jsonl: No such file"),
        (["pipe.png"], "is no regular file"),
        (["blank.jsonl"], "is empty; give one"),
        (["empty", "list.jsonl"], r"^7 inputs can't be used:\n  .*empty.*\n(  .*line [1-4].*\n){4}  and 2 more$"),
        ([*inputs, "list.jsonl"], r"^11 inputs can't be used:"),
        ([], "^no input; give image files"),
    ):
        with pytest.raises(InputError, match=message):
            find_images([str(tmp_path / name) for name in names])
    with pytest.raises(InputError, match="standard input is not read"):
        find_images(["-"])


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    written(tmp_path / os.fsdecode(b"\xe4.png"), b"")
    with pytest.raises(InputError, match=r"\\xe4\.png has a name that is no valid UTF-8; rename it"):
        find_images([str(tmp_path)])


# Reading


@pytest.mark.parametrize("kind", ["png", "bmp", "tiff", "ppm", "webp"])
def test_lossless_files_come_back_as_they_are(tmp_path: Path, kind: str) -> None:
    path = saved(PICTURE, tmp_path / f"a.{kind}", **({"lossless": True} if kind == "webp" else {}))
    assert (pixels(path) == RGB).all()
    assert image_size(path) == (WIDTH, HEIGHT)
    assert (pixels(path.rename(tmp_path / "a.jpg")) == RGB).all()  # told by content


@pytest.mark.parametrize(
    ("ink", "colour"),
    [
        ((0, 255, 255, 0), (255, 0, 0)),
        ((255, 0, 0, 0), (0, 255, 255)),
        ((0, 0, 0, 255), (0, 0, 0)),
        ((0, 0, 0, 0), (255, 255, 255)),
    ],
)
def test_cmyk(tmp_path: Path, ink: tuple[int, ...], colour: tuple[int, ...]) -> None:
    for name in ("a.jpg", "a.tif"):
        path = saved(Image.new("CMYK", (16, 16), ink), tmp_path / name)
        assert np.abs(pixels(path).astype(int) - colour).max() <= 2


def test_transparency_is_laid_on_white_as_transformers_does(tmp_path: Path) -> None:
    from transformers.image_transforms import convert_to_rgb

    alpha = np.linspace(0, 255, HEIGHT * WIDTH).astype(np.uint8).reshape(HEIGHT, WIDTH)
    rgba = Image.fromarray(np.dstack([RGB, alpha]))
    paths = [saved(rgba, tmp_path / "a.png"), saved(rgba.convert("LA"), tmp_path / "b.png")]
    paths += [
        saved(rgba.quantize(16), tmp_path / "c.png"),
        saved(PICTURE.quantize(8), tmp_path / "d.gif", transparency=3),
    ]
    paths += [saved(PICTURE, tmp_path / "e.png", transparency=tuple(RGB[2, 3].tolist()))]
    paths += [saved(PICTURE.convert("L"), tmp_path / "f.png", transparency=int(np.asarray(PICTURE.convert("L"))[0, 0]))]
    for path in paths:
        with Image.open(path) as image:
            assert image.has_transparency_data
            assert (pixels(path) == convert_to_rgb(image, return_numpy=True)).all(), path
    expected = RGB * (alpha / 255)[..., None] + 255 * (1 - alpha / 255)[..., None]
    assert np.abs(pixels(paths[0]) - expected).max() <= 1
    assert (pixels(paths[4])[2, 3] == 255).all()


def test_palette_and_one_bit(tmp_path: Path) -> None:
    palette = PICTURE.quantize(16)
    assert (pixels(saved(palette, tmp_path / "a.png")) == np.asarray(palette.convert("RGB"))).all()
    bits = np.asarray(PICTURE.convert("1"))
    for name in ("b.png", "b.tif", "b.bmp", "b.pbm"):
        assert (pixels(saved(PICTURE.convert("1"), tmp_path / name)) == 255 * bits[..., None]).all()


GREY = np.array([[0, 1, 128, 129, 255, 256, 257], [32767, 32768, 40000, 65278, 65406, 65407, 65535]], np.uint16)
GREY_8 = np.array([[0, 0, 0, 1, 1, 1, 1], [127, 128, 156, 254, 254, 255, 255]])


def test_16_bit_grey_is_scaled_and_not_clipped(tmp_path: Path) -> None:
    big, little = GREY.astype(">u2").tobytes(), GREY.tobytes()
    paths = [
        written(tmp_path / "a.png", png(7, 2, 16, 0, big)),
        written(tmp_path / "b.tif", tiff(7, 2, 16, little)),
        written(tmp_path / "c.tif", tiff(7, 2, 16, (65535 - GREY).tobytes(), photometric=0)),
        written(tmp_path / "d.pgm", b"P5 7 2 65535\n" + big),
        saved(Image.fromarray(GREY.astype(">u2")), tmp_path / "e.tif"),
        saved(Image.fromarray(GREY), tmp_path / "f.tif", compression="tiff_lzw"),
    ]
    for path in paths:
        assert (pixels(path) == GREY_8[..., None]).all(), path
    with Image.open(paths[0]) as image:
        assert (np.asarray(image.convert("RGB")) != GREY_8[..., None]).any()  # the control: Pillow alone clips


def test_other_deep_samples(tmp_path: Path) -> None:
    twelve = bytes([0x00, 0x0F, 0xFF, 0x80, 0x00, 0x10])  # 0, 4095, 2048, 16
    assert pixels(written(tmp_path / "a.tif", tiff(4, 1, 12, twelve)))[0, :, 0].tolist() == [0, 255, 128, 1]
    key = png(7, 2, 16, 0, GREY.astype(">u2").tobytes(), chunk(b"tRNS", struct.pack(">H", 256)))
    got = pixels(written(tmp_path / "b.png", key))
    assert got[0, 5].tolist() == [255] * 3 and (np.delete(got[0], 5, 0) == np.delete(GREY_8[0], 5)[:, None]).all()
    floats = np.array([[0, 0.25, 0.5, 1]], np.float32)
    assert pixels(written(tmp_path / "c.tif", tiff(4, 1, 32, floats.tobytes(), kind=3)))[0, :, 0].tolist() == [
        0,
        64,
        128,
        255,
    ]
    deep = (RGB.astype(np.uint16) * 257).astype(">u2").tobytes()
    assert (pixels(written(tmp_path / "d.png", png(WIDTH, HEIGHT, 16, 2, deep))) == RGB).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tiff(4, 1, 32, np.float32([0, 1, 2, 300]).tobytes(), kind=3), r"floats from 0 to 300; only 0 \(black\) to 1"),
        (tiff(4, 1, 32, np.float32([0, 1, 0, np.nan]).tobytes(), kind=3), "floats from nan to nan"),
        (tiff(4, 1, 32, np.uint32([0, 1, 2, 300]).tobytes()), "32-bit or signed samples"),
        (tiff(4, 1, 16, np.int16([0, 1, 2, -3]).tobytes(), kind=2), "32-bit or signed samples"),
        (png(1, 1, 16, 2, bytes(6), chunk(b"tRNS", bytes(6))), "16-bit RGB PNG with one transparent colour"),
    ],
)
def test_samples_whose_white_is_unknown_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=r"a\.img (has|is a) " + message):
        read_image(written(tmp_path / "a.img", content))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    expected = UPRIGHT[orientation](RGB)
    for kind, options in (("png", {}), ("webp", {"lossless": True}), ("tif", {}), ("tif", {"compression": "tiff_lzw"})):
        path = saved(PICTURE, tmp_path / f"a.{kind}", exif=exif, **options)
        assert (pixels(path) == expected).all(), (kind, orientation)
        assert image_size(path) == expected.shape[1::-1]
    path = saved(SMOOTH, tmp_path / "a.jpg", exif=exif)
    with Image.open(path) as image:
        assert (pixels(path) == np.asarray(ImageOps.exif_transpose(image))).all()
        assert (pixels(path) == UPRIGHT[orientation](np.asarray(image))).all()


def test_exif_in_odd_places(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(PICTURE, "PNG")
    late = written(tmp_path / "late.png", content[:-12] + chunk(b"eXIf", exif.tobytes()[6:]) + content[-12:])
    assert (pixels(late) == UPRIGHT[6](RGB)).all()
    odd = [b"", b"Exif\0\0", b"Exif\0\0garbage", exif.tobytes()[:20], exif.tobytes().replace(b"\x06\0", b"\x63\0")]
    for number, damaged in enumerate(odd):
        path = saved(SMOOTH, tmp_path / f"{number}.jpg", exif=damaged, dpi=(72, 72))
        with Image.open(path) as image:
            assert (pixels(path) == np.asarray(image)).all()
            assert image_size(path) == image.size


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GIF", {}),
        ("WEBP", {"lossless": True}),
        ("PNG", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("AVIF", {}),
    ],
)
def test_several_frames_are_refused_by_number(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    frames = [SMOOTH, SMOOTH.rotate(180), SMOOTH.convert("L").convert("RGB")]
    path = saved(frames[0], tmp_path / "a.img", format=kind, save_all=True, append_images=frames[1:], **options)
    with pytest.raises(InputError, match=rf"a\.img has 3 frames \({kind}\).*first_frame=True"):
        read_image(path)
    with Image.open(path) as image:
        first = np.asarray(image.convert("RGB"))
    assert (pixels(path, first_frame=True) == first).all()
    if kind not in ("GIF", "AVIF"):
        assert (first == np.asarray(SMOOTH)).all()


def test_of_a_cameras_mpo_the_main_picture_is_taken(tmp_path: Path) -> None:
    path = saved(SMOOTH, tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[SMOOTH.convert("L")])
    with Image.open(path) as image:
        assert image.n_frames == 2
        assert (pixels(path) == np.asarray(image.convert("RGB"))).all()


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {}), ("WEBP", {"lossless": True}), ("BMP", {}),
    ("GIF", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("AVIF", {}), ("PPM", {}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Truncated File Read", "ignore:Corrupt EXIF")
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_truncated_files_are_refused(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    content = encoded(SMOOTH, kind, **options)
    whole = pixels(written(tmp_path / "a.img", content))
    for length in sorted({len(content) * part // 50 for part in range(50)} | {len(content) - 30}):
        path = written(tmp_path / "a.img", content[:length])
        with pytest.raises(InputError, match=r"a\.img (can't be decoded, it is truncated|begins like|is no image)"):
            read_image(path)
    for missing in range(1, 30):  # of the last bytes some hold no pixels
        path = written(tmp_path / "a.img", content[:-missing])
        try:
            assert (pixels(path) == whole).all()
        except InputError:
            continue


@pytest.mark.parametrize("part", [0.3, 0.6, 0.95])
def test_a_download_filled_up_with_zeros_is_refused(tmp_path: Path, part: float) -> None:
    for kind in ("PNG", "JPEG", "GIF"):
        content = encoded(SMOOTH, kind)
        kept = int(len(content) * part)
        with pytest.raises(InputError, match="truncated or damaged"):
            read_image(written(tmp_path / "a.img", content[:kept] + bytes(len(content) - kept)))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8),
)
@pytest.mark.filterwarnings("ignore")
def test_damage_never_ends_in_another_error(
    tmp_path_factory: pytest.TempPathFactory, kind: tuple[str, dict[str, Any]], places: list[tuple[float, int]]
) -> None:
    content = bytearray(encoded(PICTURE, kind[0], **kind[1]))
    for place, value in places:
        content[int(place * (len(content) - 1))] = value
    path = written(tmp_path_factory.getbasetemp() / "damaged.img", bytes(content))
    for use in (read_image, image_size):
        try:
            use(path, 10_000, **({"first_frame": True} if use is read_image else {}))
        except InputError as error:
            assert "damaged.img" in str(error)


def patched(content: bytes, offset: int, layout: str, *values: int) -> bytes:
    size = struct.pack(layout, *values)
    return content[:offset] + size + content[offset + len(size) :]


JPEG = encoded(SMOOTH, "JPEG")
BOMBS = {
    "png": png(60000, 60000, 8, 2, b""),
    "gif": patched(encoded(PICTURE, "GIF"), 6, "<HH", 60000, 60000),
    "bmp": patched(encoded(PICTURE, "BMP"), 18, "<II", 60000, 60000),
    "jpg": patched(JPEG, JPEG.index(b"\xff\xc0") + 5, ">HH", 60000, 60000),
    "tif": tiff(60000, 60000, 8, b""),
    "ppm": b"P6 60000 60000 255\n",
}


@pytest.mark.parametrize("kind", sorted(BOMBS))
def test_a_bomb_is_refused_from_its_header(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PillowFile.ImageFile, "load", lambda _: pytest.fail("decoded"))
    path = written(tmp_path / f"a.{kind}", BOMBS[kind])
    limit = Image.MAX_IMAGE_PIXELS
    for use in (read_image, image_size):
        with pytest.raises(
            InputError, match=r"60000 x 60000 = 3600000000 pixels .*max_pixels=89478485, and was not dec"
        ):
            use(path)
    assert Image.MAX_IMAGE_PIXELS == limit


def test_a_webp_bomb_is_refused(tmp_path: Path) -> None:
    size = (59999).to_bytes(3, "little")
    content = b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + size + size + bytes(8)
    with pytest.raises(InputError, match=r"a\.webp was not decoded: .*3600000000 pixels"):
        read_image(written(tmp_path / "a.webp", content))


def test_the_limit_is_the_callers_and_not_pillows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(PICTURE, tmp_path / "a.png")
    with pytest.raises(InputError, match="9 x 6 = 54 pixels by its header, more than max_pixels=53"):
        read_image(path, 53)
    with pytest.raises(InputError, match="max_pixels=0 lets no image through"):
        read_image(path, 0)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    assert (pixels(path, max_pixels=54) == RGB).all()
    monkeypatch.setattr(PillowFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(InputError, match="LOAD_TRUNCATED_IMAGES is on"):
        read_image(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04\x14\0\0\0", "a zip archive; unpack it first"),
        (b"\n<!DOCTYPE html><html>", "a web page, as a failed download leaves"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<svg xmlns=", "an SVG drawing"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC; convert it"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "a video; extract its frames"),
        (b"a caption", "it begins with the bytes 61 20 63 61"),
    ],
)
def test_what_is_no_image_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=r"a\.png is no image that is read here \(JPEG, .*" + message):
        read_image(written(tmp_path / "a.png", content))


def test_sizes_and_places_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="begins like PNG, but its header is damaged or unknown: not identified"):
        read_image(written(tmp_path / "a.png", png(0, 5, 8, 2, b"")))
    with pytest.raises(InputError, match="is a folder or a device"):
        read_image(tmp_path)
    with pytest.raises(InputError, match=r"none\.png can't be read: No such file"):
        read_image(tmp_path / "none.png")
    assert pixels(saved(Image.new("L", (1, 1), 7), tmp_path / "b.png")).tolist() == [[[7, 7, 7]]]


# Processors

QWEN2_5 = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
QWEN3 = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
SIGLIP = {
    "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "image_processor_type": "SiglipImageProcessor", "resample": 3, "size": {"height": 56, "width": 56},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14}},
    "qwen3_vl": {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}},
    "siglip": {"model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14},
}
MODELS = [("qwen2_5_vl", QWEN2_5), ("qwen3_vl", QWEN3), ("siglip", SIGLIP)]
SIZES = [(30, 20), (1, 1), (3, 3), (1, 3), (3, 100), (57, 640), (200, 1), (3, 600)]


def pictures(sizes: list[tuple[int, int]] = SIZES) -> list[Image.Image]:
    random = np.random.default_rng(1)
    return [Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]


def model_folder(folder: Path, config: object, stored: object = None, name: str = "preprocessor_config.json") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if stored is not None:
        (folder / name).write_text(json.dumps(stored))
    return folder


def loaded(folder: Path, model: str) -> Preprocessor:
    return load_processor(model_folder(folder, CONFIGS[model], dict(MODELS)[model]))


@pytest.mark.parametrize(("model", "stored"), MODELS)
def test_pixels_have_the_bits_of_transformers(tmp_path: Path, model: str, stored: dict[str, Any]) -> None:
    from transformers import AutoImageProcessor

    processor, images = loaded(tmp_path, model), pictures()
    reference = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(images, return_tensors="pt")
    got = processor.preprocess(images)
    assert got.pixel_values.dtype == torch.float32
    assert torch.equal(got.pixel_values, reference["pixel_values"])
    alone = [processor.preprocess([image]).pixel_values for image in images]
    assert torch.equal(torch.cat(alone), got.pixel_values)
    if model == "siglip":
        assert got.grid_thw is None and processor.processed_size(30, 20) == (4, 4)
    else:
        assert got.grid_thw is not None and torch.equal(got.grid_thw, reference["image_grid_thw"])
        assert [tuple(grid[1:]) for grid in got.grid_thw.tolist()] == [
            processor.processed_size(*size) for size in SIZES
        ]
    nothing = processor.preprocess([])
    assert nothing.pixel_values.shape == (0, *got.pixel_values.shape[1:])
    assert nothing.grid_thw is None or nothing.grid_thw.shape == (0, 3)


@pytest.mark.parametrize(("model", "stored"), MODELS)
def test_without_a_stored_processor_the_published_settings_are_used(
    tmp_path: Path, model: str, stored: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = loaded(tmp_path / "stored", model).preprocess(pictures())
    with caplog.at_level(logging.WARNING, "enfold"):
        got = load_processor(model_folder(tmp_path / "bare", CONFIGS[model])).preprocess(pictures())
    assert torch.equal(got.pixel_values, expected.pixel_values)
    assert load_processor(tmp_path / "bare").processed_size(9000, 7000) == load_processor(
        tmp_path / "stored"
    ).processed_size(9000, 7000)
    assert f"bare has no preprocessor_config.json; using the defaults of {model}: {{" in caplog.text


def test_other_places_and_names_of_the_settings(tmp_path: Path) -> None:
    expected = loaded(tmp_path / "a", "qwen2_5_vl").preprocess(pictures()).pixel_values
    nested = {"image_processor": QWEN2_5, "processor_class": "Qwen2_5_VLProcessor"}
    folders = [model_folder(tmp_path / "b", CONFIGS["qwen2_5_vl"], nested, "processor_config.json")]
    model_folder(folders[0], CONFIGS["qwen2_5_vl"], SIGLIP)  # there too, and not looked at
    without = {key: value for key, value in QWEN2_5.items() if key != "image_processor_type"}
    for number, kind in enumerate(
        ["Qwen2VLImageProcessorFast", "Qwen2_5_VLImageProcessor", "Qwen2VLImageProcessorPil"]
    ):
        stored = {**without, "image_processor_type": kind}
        folders.append(model_folder(tmp_path / f"c{number}", CONFIGS["qwen2_5_vl"], stored))
    folders.append(model_folder(tmp_path / "d", CONFIGS["qwen2_5_vl"], without))
    for folder in folders:
        assert torch.equal(load_processor(folder).preprocess(pictures()).pixel_values, expected), folder


@pytest.mark.parametrize("kind", ["CLIPImageProcessor", "CLIPFeatureExtractor", "BitImageProcessor"])
def test_towers_of_one_size_with_a_crop(tmp_path: Path, kind: str) -> None:
    from transformers import AutoImageProcessor

    stored = {"size": {"shortest_edge": 64}, "crop_size": {"height": 56, "width": 56}, "do_center_crop": True}
    stored["feature_extractor_type" if "Feature" in kind else "image_processor_type"] = kind
    config = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14}
    processor = load_processor(model_folder(tmp_path, config, stored))
    reference = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(pictures(), return_tensors="pt")
    assert torch.equal(processor.preprocess(pictures()).pixel_values, reference["pixel_values"])
    assert processor.processed_size(1, 1) == (4, 4)


@pytest.mark.parametrize(
    ("config", "stored", "message"),
    [
        ({"model_type": "llama"}, None, r"no preprocessor_config\.json, and .* no default for model_type='llama'"),
        ({}, None, r"no default for model_type=''.*copy the file from the checkpoint"),
        (CONFIGS["qwen3_vl"], QWEN2_5, "patch_size=14, but config.json has 16; .* another model"),
        (
            CONFIGS["siglip"],
            {**SIGLIP, "size": {"height": 224, "width": 224}},
            "224 x 224 pictures, but .*image_size=56",
        ),
        (CONFIGS["siglip"], {**SIGLIP, "size": {"shortest_edge": 56}}, "does not bring every picture to one size"),
        (CONFIGS["siglip"], {**SIGLIP, "image_mean": [0.5]}, "mean must have 3 elements"),
        (
            {},
            {"image_processor_type": "LlavaNextImageProcessor"},
            "'LlavaNextImageProcessor' is not known here; known are Q",
        ),
        ({}, {**QWEN3, "size": {"height": 56, "width": 56}}, "size needs 0 < shortest_edge <= longest_edge"),
        ({}, {**QWEN3, "size": "large"}, "the settings of Qwen2VLImageProcessorPil can't be used"),
        ({}, [], r"preprocessor_config\.json holds a list, not an object"),
    ],
)
def test_processors_that_are_refused(tmp_path: Path, config: object, stored: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_processor(model_folder(tmp_path, config, stored))


def test_files_that_cant_be_read_and_folders_that_are_none(tmp_path: Path) -> None:
    (model_folder(tmp_path, {}) / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"can't read \S+preprocessor_config\.json: Expecting"):
        load_processor(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        load_processor(tmp_path / "none")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SIGLIP))
    with pytest.raises(ConfigError, match=r"config\.json names no patch_size"):
        load_processor(tmp_path).processed_size(9, 9)


def test_tokens_are_counted_from_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = loaded(tmp_path, "qwen2_5_vl")
    exif = Image.Exif()
    exif[0x0112] = 6
    path = saved(pictures([(300, 150)])[0], tmp_path / "a.jpg", exif=exif)
    got = processor.preprocess([read_image(path)])
    assert got.grid_thw is not None and got.grid_thw.tolist() == [[1, 22, 10]]
    monkeypatch.setattr(PillowFile.ImageFile, "load", lambda _: pytest.fail("decoded"))
    assert processor.processed_size(*image_size(path)) == (22, 10)
    assert processor.tokens_of(path) == 220 == got.pixel_values.shape[0]
    with pytest.raises(InputError, match="more than max_pixels=100"):
        processor.tokens_of(path, 100)
    assert processor.tokens_of(written(tmp_path / "b.png", png(300, 150, 8, 2, b""))) == 220  # a header and no pixels
    monkeypatch.undo()
    thin = saved(Image.new("RGB", (1, 201)), tmp_path / "thin.png")
    with pytest.raises(InputError, match=r"thin\.png: 1 x 201 pixels: .*aspect ratio .*200.*; crop or pad it"):
        processor.tokens_of(thin)
    with pytest.raises(InputError, match=r"^thin\.png: 1 x 201 pixels"):
        processor.preprocess([*pictures([(9, 9)]), read_image(thin)], names=["a", "thin.png"])


def test_only_rgb_pictures_are_preprocessed(tmp_path: Path) -> None:
    processor = loaded(tmp_path, "siglip")
    for wrong, message in (
        (PICTURE.convert("RGBA"), "image 1 is mode RGBA, not an RGB picture; read it with read_image"),
        ("a.png", "image 1 is a str"),
        (RGB, "image 1 is a ndarray"),
    ):
        with pytest.raises(InputError, match=message):
            processor.preprocess([wrong])  # type: ignore[list-item]
