"""`enfold encode` for images as a user runs it: features and their bits, odd and bad files, and what is left behind."""

from __future__ import annotations

import io
import json
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import towers
import transformers as hf
import vlms
from e2e_harness import Commands, check_a_killed_rank, check_interrupted, start_long_encode
from PIL import Image
from safetensors import safe_open

from enfold.cli.images import looks_whole
from enfold.cli.main import main
from enfold.errors import InputError
from enfold.image_engine import ImageEngine
from enfold.worker import TowerSpec, Worker

SIZES = [(300, 200), (64, 96), (500, 333), (77, 200), (40, 40), (199, 64)]
MODELS = ["Qwen3-VL", "Qwen2.5-VL", "Qwen2-VL", "SigLIP"]


def save_model(name: str, folder: Path) -> Path:
    """Write a tiny model of real classes with the settings of its image processor."""
    if name == "SigLIP":
        towers.plain("SigLIP", torch.float32).save_pretrained(folder)
        side = {"height": towers.IMAGE_SIZE, "width": towers.IMAGE_SIZE}
        hf.SiglipImageProcessorPil(size=side).save_pretrained(folder)
        return folder
    vlms.build(name).save_pretrained(folder)
    patch = 16 if name == "Qwen3-VL" else 14
    limits = {"shortest_edge": 56 * 56, "longest_edge": 256 * 256}
    hf.Qwen2VLImageProcessorPil(patch_size=patch, size=limits).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lru_cache(lambda name: save_model(name, tmp_path_factory.mktemp(name.replace(".", ""))))


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """main() installs handlers: put pytest's own back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number, size in enumerate(SIZES):
        picture(*size, number).save(folder / f"{number}.{'jpg' if number % 2 else 'png'}")
    return folder


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()


def lines_of(tensor: torch.Tensor) -> list[dict[str, Any]]:
    return [json.loads(line) for line in bytes(tensor.tolist()).decode().splitlines()]


def rows_of(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    starts = tensors["offsets"].tolist()
    return [tensors["features"][first:last] for first, last in pairwise(starts)]


def encode(model: Path, output: Path, *arguments: object) -> int:
    """Run the command in this process, on one rank."""
    return main(["encode", "--model-path", str(model), "--output", str(output), *map(str, arguments)])


def encoded(model: Path, output: Path, *arguments: object) -> dict[str, torch.Tensor]:
    assert encode(model, output, *arguments) == 0
    return read(output)[0]


# What Transformers gives.


def plain_features(name: str, folder: Path, images: Sequence[Image.Image]) -> list[dict[str, torch.Tensor]]:
    """Each image by itself through Transformers' own processor and tower."""
    processor = hf.AutoImageProcessor.from_pretrained(folder, backend="pil")
    is_vlm = name != "SigLIP"
    model = hf.AutoModelForImageTextToText.from_pretrained(folder) if is_vlm else hf.AutoModel.from_pretrained(folder)
    tower = (model.model.visual if is_vlm else model).eval()
    found = []
    with torch.inference_mode():
        for image in images:
            inputs = processor([image], return_tensors="pt")
            if not is_vlm:
                output = tower(inputs["pixel_values"])
                found.append({"rows": output.last_hidden_state[0], "pooled": output.pooler_output[0]})
                continue
            output = tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
            levels = getattr(output, "deepstack_features", None) or []
            found.append({"rows": torch.cat([output.pooler_output, *levels], -1), "grid": inputs["image_grid_thw"][0]})
    return found


@pytest.mark.parametrize("name", MODELS)
def test_features_are_those_of_transformers(
    models: Callable[[str], Path], photos: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.safetensors"
    assert encode(models(name), output, "--input", photos, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    tensors, metadata = read(output)
    files = sorted(photos.iterdir())
    opened = [Image.open(path).convert("RGB") for path in files]
    plain = plain_features(name, models(name), opened)
    for mine, theirs in zip(rows_of(tensors), plain, strict=True):
        assert mine.shape == theirs["rows"].shape
        torch.testing.assert_close(mine, theirs["rows"], rtol=1e-5, atol=1e-5)
    if name == "SigLIP":
        expected = torch.stack([each["pooled"] for each in plain])
        torch.testing.assert_close(tensors["embeddings"], expected, rtol=1e-5, atol=1e-5)
        assert tensors["grid_thw"].tolist() == [[1, 5, 5]] * 6
    else:
        assert torch.equal(tensors["grid_thw"], torch.stack([each["grid"] for each in plain]))
        assert "embeddings" not in tensors
    assert tensors["image_hw"].tolist() == [[height, width] for width, height in SIZES]
    assert lines_of(tensors["inputs"]) == [{"image": str(path)} for path in files]
    num_tokens = len(tensors["features"])
    assert (metadata["images"], metadata["tokens"], metadata["skipped"]) == ("6", str(num_tokens), "0")
    width = int(metadata["out_features"]) * (1 + int(metadata["num_levels"]))
    assert tensors["features"].shape[1] == width and metadata["num_levels"] == ("2" if name == "Qwen3-VL" else "0")
    assert (metadata["layout"], metadata["dtype"]) == ("1x1x1", "float32")
    assert (answer["images"], answer["tokens"], answer["skipped"], answer["duplicates"]) == (6, num_tokens, 0, 0)


# The bits of an image hang on nothing but the image.


@pytest.mark.parametrize("name", ["Qwen3-VL", "Qwen2.5-VL", "SigLIP"])
def test_bits_are_the_same_for_any_ranks_layout_and_budget(
    commands: Commands, models: Callable[[str], Path], photos: Path, name: str
) -> None:
    base = ["--model-path", models(name), "--input", photos, "--threads-per-rank", 1]
    runs = {
        "dp": ["--num-gpus", 2, "--max-tokens-per-call", 300],
        "tp": ["--num-gpus", 2, "--vision-tp-size", 2, "--vision-block-size", 256],
    }
    if name != "Qwen3-VL":
        del runs["dp" if name == "Qwen2.5-VL" else "tp"]
    found = {}
    for run, options in runs.items():
        output = commands.folder / f"{run}.safetensors"
        done = commands.run("encode", *base, "--output", output, *options)
        assert done.returncode == 0, done.stderr
        assert "6 images, " in done.stdout and f"written to {output}" in done.stdout
        found[run], metadata = read(output)
        assert metadata["layout"] == {"dp": "1x2x1", "tp": "1x1x2"}[run]
        commands.check_nothing_left()
    torch.set_num_threads(1)
    found["one by one"] = encoded(
        models(name), commands.folder / "a.safetensors", "--input", photos, "--max-tokens-per-call", 1
    )
    one = encoded(models(name), commands.folder / "b.safetensors", "--input", photos)
    for run, other in found.items():
        assert one.keys() == other.keys()
        for key, tensor in one.items():
            assert torch.equal(tensor, other[key]), (run, key)
    few = encoded(models(name), commands.folder / "c.safetensors", "--input", photos / "4.png", photos / "1.jpg")
    for rows, index in zip(rows_of(few), (4, 1), strict=True):
        assert torch.equal(rows, rows_of(one)[index])


@pytest.mark.parametrize("kind", ["the tower alone", "SigLIP with its text side"])
def test_other_folders_that_hold_a_tower(
    models: Callable[[str], Path], photos: Path, tmp_path: Path, kind: str
) -> None:
    folder, output = tmp_path / "model", tmp_path / "out.safetensors"
    if kind == "the tower alone":
        whole = models("Qwen3-VL")
        hf.AutoModelForImageTextToText.from_pretrained(whole).model.visual.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_bytes((whole / "preprocessor_config.json").read_bytes())
    else:
        whole = models("SigLIP")
        vision = json.loads((whole / "config.json").read_text())
        text = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
        model = hf.SiglipModel(hf.SiglipConfig(text_config={**text, "vocab_size": 9}, vision_config=vision))
        model.vision_model.load_state_dict(hf.SiglipVisionModel.from_pretrained(whole).state_dict())
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_bytes((whole / "preprocessor_config.json").read_bytes())
    expected = encoded(whole, output, "--input", photos)
    found = encoded(folder, output, "--input", photos)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_library_gives_what_the_file_holds(models: Callable[[str], Path], photos: Path, tmp_path: Path) -> None:
    expected = rows_of(encoded(models("SigLIP"), tmp_path / "out.safetensors", "--input", photos))
    with ImageEngine(TowerSpec(str(models("SigLIP")))) as engine:
        images = engine.encode(sorted(photos.iterdir()))
        assert engine.encode([]) == []
        with pytest.raises(InputError, match=r"none\.png can't be read"):
            engine.encode([photos / "none.png"])
    for number, (image, rows) in enumerate(zip(images, expected, strict=True)):
        assert torch.equal(image.features, rows) and image.index == number and image.size == SIZES[number][::-1]
        assert image.pooled is not None and image.pooled.shape == rows.shape[1:]


def test_a_list_keeps_its_order_ids_and_repetitions(
    models: Callable[[str], Path], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [4, 1, 4, 0, 1, 4]
    copy = tmp_path / "copy.png"
    copy.write_bytes((photos / "4.png").read_bytes())
    names = [str(photos / f"{place}.{'jpg' if place % 2 else 'png'}") for place in places] + ["copy.png"]
    rows: list[dict[str, Any]] = [{"image": name, "id": f"n{i}"} for i, name in enumerate(names)]
    rows[3]["id"] = 17
    listed = tmp_path / "list.jsonl"
    listed.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    output = tmp_path / "out.safetensors"
    arguments = ["--input", listed, "--input", photos / "2.png", photos / "0.png", "--max-tokens-per-call", "200"]
    assert encode(models("Qwen3-VL"), output, *arguments, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["images"], answer["duplicates"]) == (9, 5)
    tensors, _ = read(output)
    expected = [*rows[:6], {"image": str(copy), "id": "n6"}]
    expected += [{"image": str(photos / "2.png")}, {"image": str(photos / "0.png")}]
    assert lines_of(tensors["inputs"]) == expected
    assert tensors["image_hw"].tolist() == [[*reversed(SIZES[place])] for place in [*places, 4, 2, 0]]
    found = rows_of(tensors)
    assert torch.equal(found[0], found[2]) and torch.equal(found[0], found[6]) and torch.equal(found[3], found[8])


def test_odd_images_are_taken_for_what_they_show(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Each odd file beside a plain PNG of the pixels that it should be seen as."""
    base = picture(96, 64, 5)
    exif = Image.Exif()
    exif[0x0112] = 6
    grey = np.asarray(base.convert("L"))
    alpha = Image.fromarray(grey)
    cmyk, palette = base.convert("CMYK"), base.quantize(16)
    cmyk.save(tmp_path / "cmyk.tif")
    palette.save(tmp_path / "palette.png")
    base.save(tmp_path / "exif.png", exif=exif)
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    Image.merge("RGBA", (*base.split(), alpha)).save(tmp_path / "rgba.png")
    base.save(tmp_path / "animated.gif", save_all=True, append_images=[base.rotate(90)])
    white = Image.new("RGBA", base.size, "white")
    with Image.open(tmp_path / "animated.gif") as animated:
        first = animated.convert("RGB")
    seen = {
        "cmyk.tif": cmyk.convert("RGB"),
        "palette.png": palette.convert("RGB"),
        "exif.png": base.transpose(Image.Transpose.ROTATE_270),
        "deep.png": base.convert("L").convert("RGB"),
        "rgba.png": Image.alpha_composite(white, Image.merge("RGBA", (*base.split(), alpha))).convert("RGB"),
        "animated.gif": first,
    }
    files: list[Path] = []
    for name, expected in seen.items():
        expected.save(tmp_path / f"{name}.expected.png")
        files += [tmp_path / name, tmp_path / f"{name}.expected.png"]
    tensors = encoded(models("Qwen3-VL"), tmp_path / "out.safetensors", "--first-frame", "--input", *files)
    found = rows_of(tensors)
    for number, name in enumerate(seen):
        assert torch.equal(found[2 * number], found[2 * number + 1]), name
    assert tensors["image_hw"][4].tolist() == [96, 64]


# Bad images.


def as_bytes(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, depth: int, colour: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"".join(
        [b"\x89PNG\r\n\x1a\n", header, *chunks, chunk(b"IDAT", zlib.compress(bytes(7))), chunk(b"IEND", b"")]
    )


BASE = picture(120, 80, 3)
FRAMES: dict[str, Any] = {"save_all": True, "append_images": [BASE.rotate(180)]}
BAD: dict[str, tuple[bytes, str]] = {
    **{
        f"truncated.{kind.lower()}": (as_bytes(BASE, kind)[:-200], "it is truncated or damaged")
        for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
    },
    "half.png": (as_bytes(BASE, "PNG")[: len(as_bytes(BASE, "PNG")) // 2], "it is truncated or damaged"),
    "zeros.jpg": (as_bytes(BASE, "JPEG")[:900] + bytes(2000), "it is truncated or damaged"),
    "bomb.png": (png(60000, 60000, 8, 2), "60000 x 60000 = 3600000000 pixels by its header, more than --max-pixels 89"),
    "animated.gif": (as_bytes(BASE, "GIF", **FRAMES), "has 2 frames (GIF), and one picture is expected"),
    "animated.png": (as_bytes(BASE, "PNG", **FRAMES), "one picture is expected; take the first with --first-frame"),
    "animated.webp": (as_bytes(BASE, "WEBP", **FRAMES), "2 frames (WEBP)"),
    "deep.png": (png(1, 1, 16, 2, chunk(b"tRNS", bytes(6))), "16-bit RGB PNG with one transparent colour"),
    "thin.png": (as_bytes(Image.new("RGB", (2, 900)), "PNG"), "2 x 900 pixels"),
    "empty.jpg": (b"", "the file is empty"),
    "page.jpg": (b"<!DOCTYPE html><html></html>", "a web page, as a failed download leaves"),
    "note.png": (b"a note", "is no image that is read here"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused_before_anything_is_loaded(
    models: Callable[[str], Path], photos: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    assert encode(models("Qwen3-VL"), tmp_path / "out.safetensors", "--input", photos, tmp_path / name) == 2
    said = capsys.readouterr()
    assert f"1 of 7 images can't be used:\n  {tmp_path / name}" in said.err and message in said.err
    assert "leave them out with --skip-bad" in said.err
    assert "loading" not in said.err and "Traceback" not in said.err and said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == [name]


def write_bad(folder: Path) -> None:
    for name, (content, _) in BAD.items():
        (folder / name).write_bytes(content)


def test_many_bad_images_are_counted(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bad(tmp_path)
    for options in ([], ["--skip-bad"]):
        assert encode(models("Qwen3-VL"), tmp_path / "out.safetensors", "--input", tmp_path, *options) == 2
        said = capsys.readouterr().err
        assert f"{len(BAD)} of {len(BAD)} images can't be used:" in said
        assert f"and {len(BAD) - 10} more" in said
    assert not (tmp_path / "out.safetensors").exists()


def test_bad_images_are_left_out_and_recorded(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bad(tmp_path)
    good = ["a.jpg", "k.png", "z.webp"]
    for number, name in enumerate(good):
        picture(80, 60, number).save(tmp_path / name)
    output = tmp_path / "out.safetensors"
    assert encode(models("Qwen3-VL"), output, "--input", tmp_path, "--skip-bad") == 0
    said = capsys.readouterr()
    assert f"{len(BAD)} of {len(BAD) + 3} images can't be used" in said.err and "they are left out" in said.err
    assert f"3 images, 12 tokens of 128 x 3, {len(BAD)} left out" in said.out
    tensors, metadata = read(output)
    assert lines_of(tensors["inputs"]) == [{"image": str(tmp_path / name)} for name in good]
    skipped = {Path(line["image"]).name: line["error"] for line in lines_of(tensors["skipped"])}
    assert sorted(skipped) == sorted(BAD) and metadata["skipped"] == str(len(BAD))
    assert all(BAD[name][1] in reason for name, reason in skipped.items())
    alone = encoded(models("Qwen3-VL"), output, "--input", *(tmp_path / name for name in good))
    assert torch.equal(tensors["features"], alone["features"]) and "skipped" not in alone


def damaged_png(image: Image.Image) -> bytes:
    """A PNG that ends well and has one wrong byte among its pixels, which only its checksum shows."""
    content = bytearray(as_bytes(image, "PNG"))
    content[len(content) // 2] ^= 0xFF
    return bytes(content)


@pytest.mark.parametrize("name", ["Qwen3-VL", "SigLIP"])
def test_damage_that_only_decoding_shows_costs_one_image_and_not_the_job(
    models: Callable[[str], Path], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, file in enumerate(["a.png", "b.png", "c.png", "d.png"]):
        picture(100 + 40 * number, 80, number).save(tmp_path / file)
    good = encoded(models(name), tmp_path / "good.safetensors", "--input", *(tmp_path / f"{x}.png" for x in "acd"))
    (tmp_path / "b.png").write_bytes(damaged_png(picture(140, 80, 1)))
    assert looks_whole(tmp_path / "b.png")
    output = tmp_path / "out.safetensors"
    for options, code in (([], 1), (["--skip-bad"], 0)):
        arguments = ["--input", tmp_path, "--max-tokens-per-call", "1", *options]
        assert encode(models(name), output, *arguments) == code
        said = capsys.readouterr()
        assert f"left out: {tmp_path / 'b.png'} can't be decoded, it is truncated or damaged" in said.err
        assert "1 left out" in said.out
        tensors, metadata = read(output)
        assert metadata["images"] == "3" and [Path(x["image"]).name for x in lines_of(tensors["skipped"])] == ["b.png"]
        assert all(torch.equal(good[key], tensors[key]) for key in good)
    output.unlink()
    assert encode(models(name), output, "--input", tmp_path / "b.png", "--skip-bad") == 2
    assert "1 of 1 images can't be used" in capsys.readouterr().err and not output.exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("limit", [200, 0])
def test_an_image_that_the_ranks_cannot_encode(
    models: Callable[[str], Path],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    limit: int,
) -> None:
    good = encoded(models("Qwen3-VL"), tmp_path / "good.safetensors", "--input", photos)
    encode_images = Worker.encode_images

    def fail_above(self: Worker, pixels: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        if int(grid_thw.prod(1).max()) > limit:
            raise RuntimeError("no memory")
        return encode_images(self, pixels, grid_thw)

    monkeypatch.setattr(Worker, "encode_images", fail_above)
    output = tmp_path / "out.safetensors"
    code = encode(models("Qwen3-VL"), output, "--input", photos)
    said = capsys.readouterr().err
    assert f"{photos / '0.png'} was not encoded: RuntimeError: no memory" in said
    assert code == (1 if limit else 2) and output.exists() == bool(limit)
    if limit:
        tensors, _ = read(output)
        kept = [int(Path(line["image"]).stem) for line in lines_of(tensors["inputs"])]
        assert kept == [1, 3, 4, 5], "images of at most 200 patches"
        for rows, number in zip(rows_of(tensors), kept, strict=True):
            assert torch.equal(rows, rows_of(good)[number])


def test_the_end_of_a_file_is_told_by_its_format(tmp_path: Path) -> None:
    def look(content: bytes) -> bool:
        (tmp_path / "x").write_bytes(content)
        return looks_whole(tmp_path / "x")

    for kind in ("JPEG", "PNG", "WEBP"):
        content = as_bytes(BASE, kind)
        assert look(content)
        assert not any(look(content[:length]) for length in range(0, len(content) - 2, 7)), kind
    assert look(as_bytes(BASE, "JPEG") + bytes(40)), "padding behind the end"
    assert not look(as_bytes(BASE, "JPEG") + b"more"), "decoding tells"
    assert not look(as_bytes(BASE, "GIF"))


# What is refused by model and input together.


def test_what_is_refused(
    models: Callable[[str], Path], photos: Path, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, listed, both = tmp_path / "texts.txt", tmp_path / "texts.jsonl", tmp_path / "both.jsonl"
    texts.write_text("a red fox\n")
    listed.write_text('{"text": "a"}\n')
    both.write_text(f'{{"text": "a", "image": "{photos / "0.png"}"}}\n')
    nameless = tmp_path / "nameless"
    nameless.write_bytes((photos / "0.png").read_bytes())
    empty = tmp_path / "empty"
    empty.mkdir()
    qwen3, qwen2_5 = models("Qwen3-VL"), models("Qwen2.5-VL")
    photo = photos / "0.png"
    cases: list[tuple[Path, list[object], str]] = [
        (qwen3, [texts], "'qwen3_vl' is encoded by its vision tower, and"),
        (qwen3, [listed], "holds texts; images come from image files, folders, or"),
        (qwen3, ["-"], "- holds texts; images come from"),
        (qwen3, [empty], "holds no images (.avif"),
        (qwen3, [tmp_path / "none.png"], "none.png: No such file"),
        (qwen3, [photo, "--pooling", "mean", "--tp-size", 1], "--tp-size and --pooling: for texts only"),
        (qwen3, [photo, "--num-gpus", 2, "--vision-tp-size", 3], "vision tp_size=3 does not divide the 2 ranks"),
        (qwen3, [photo, "--vision-block-size", 100], "vision_attention_block_size=100 is no multiple of 16; use 96"),
        (qwen3, [photo, "--max-pixels", 1000], "300 x 200 = 60000 pixels by its header, more than --max-pixels 1000"),
        (bert, [photo], "model_type='bert' has no vision tower that enfold packs (those of Qwen-VL, SigLIP vision)"),
        (bert, [nameless], "nameless holds images; texts come from"),
        (bert, [photos], "is a folder; texts come from"),
        (bert, [texts, "--skip-bad"], "--skip-bad: for images only, and the input holds texts"),
        (bert, [texts, listed], "texts come from one input, 2 are given"),
        (qwen2_5, [texts, photo], "encode them with two commands"),
        (qwen2_5, [both], "may hold texts or images, and model_type='qwen2_5_vl' encodes both"),
    ]
    for model, arguments, message in cases:
        assert encode(model, tmp_path / "out.safetensors", "--input", *arguments) == 2, message
        said = capsys.readouterr()
        assert message in said.err, (message, said.err)
        assert "loading" not in said.err and "Traceback" not in said.err and said.out == ""
    assert not (tmp_path / "out.safetensors").exists()


def test_a_list_with_texts_and_images_is_what_the_model_takes(
    models: Callable[[str], Path], photos: Path, bert: Path, tmp_path: Path
) -> None:
    both = tmp_path / "both.jsonl"
    both.write_text(json.dumps({"text": "a red fox", "image": str(photos / "0.png")}) + "\n")
    assert "hidden_states" in encoded(bert, tmp_path / "texts.safetensors", "--input", both)
    assert "grid_thw" in encoded(models("Qwen3-VL"), tmp_path / "images.safetensors", "--input", both)


def test_without_pillow_the_remedy_is_named(models: Callable[[str], Path], photos: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['PIL'] = None; from enfold.cli.main import main; "
        f"sys.exit(main(['encode', '--model-path', {str(models('Qwen3-VL'))!r}, '--input', {str(photos)!r}, "
        "'--output', 'out.safetensors']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2 and "pip install 'enfold[vision]'" in done.stderr and "Traceback" not in done.stderr


# Interrupted.


def start_long(commands: Commands, model: Path) -> tuple[Any, Path]:
    """Start a job of half a minute on two ranks, over an output that is there already; return once it writes."""
    folder = commands.folder / "many"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(800):
        image = Image.fromarray(random.integers(0, 256, (160, 160, 3), dtype=np.uint8))
        image.save(folder / f"{number}.png", compress_level=0)
    return start_long_encode(commands, model, folder, "--max-tokens-per-call", 1)


def test_interrupted(commands: Commands, models: Callable[[str], Path]) -> None:
    job, output = start_long(commands, models("Qwen3-VL"))
    check_interrupted(commands, job, output, signal.SIGINT, 130)


def test_a_killed_rank(commands: Commands, models: Callable[[str], Path]) -> None:
    job, output = start_long(commands, models("Qwen3-VL"))
    check_a_killed_rank(commands, job, output)
