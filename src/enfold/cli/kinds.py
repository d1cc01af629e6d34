"""Decide from config.json and from the inputs whether `encode` is about texts or images; what isn't clear is an error.

model                                        takes
text encoders, and whatever is not known     texts
Qwen2-VL, Qwen3-VL, Qwen3.5, a tower alone   images
Qwen2.5-VL, SigLIP                           both: the inputs decide
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from enfold.cli.model_path import read_json
from enfold.encoders import family_of, model_type_of, packs_patches, parts, tower_of
from enfold.errors import ConfigError, EnfoldError, InputError
from enfold.vision.finding import LISTS, SUFFIXES

Kind = Literal["texts", "images"]

FORMS: Mapping[Kind, str] = {
    "texts": 'texts come from a .txt file (one per line), a .jsonl file with "text", or - for standard input',
    "images": 'images come from image files, folders, or a .jsonl file with "image"',
}
SNIFFED_BYTES = 4096
SETTINGS = ["*config.json"]
"""What of a hub id is fetched before it is loaded: config.json and that of the image processor."""


def settings_folder(model_path: str, subfolder: str | None) -> Path:
    """Return the local folder with config.json; of a hub id, it is fetched or found in the cache."""
    root = Path(model_path).expanduser()
    if not root.is_dir():
        from huggingface_hub import snapshot_download

        try:
            root = Path(snapshot_download(model_path, allow_patterns=SETTINGS))
        except Exception as error:  # the hub client raises errors of its HTTP library, too
            reason = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"--model-path {model_path} is no local folder, and the hub did not give its config.json ({reason}); "
                "download the model and give its folder"
            ) from error
    return root / subfolder if subfolder else root


def decide_kind(folder: Path, inputs: Sequence[str]) -> Kind:
    """Return what the inputs hold, if the model in `folder` takes it.

    Raises InputError for an input that can't be read, one that this model does not take, one that may be either where
    the model takes both, and for texts and images together.
    """
    config = read_config(folder)
    try:
        name, taken = model_type_of(config), kinds_of_model(config)
    except ConfigError as error:
        raise type(error)(f"{folder / 'config.json'}: {error}") from error
    found = {source: kind_of_input(source) for source in inputs}
    for source, kind in found.items():
        if kind is not None and kind not in taken:
            raise InputError(_not_taken(name, taken, source, kind))
    if len(taken) == 1:
        return next(iter(taken))
    unclear = [source for source, kind in found.items() if kind is None]
    if unclear:
        raise InputError(
            f"{unclear[0]} may hold texts or images, and model_type={name!r} encodes both; "
            f"{FORMS['texts']}; {FORMS['images']}"
        )
    if len(set(found.values())) > 1:
        one, other = (next(source for source, kind in found.items() if kind == each) for each in ("texts", "images"))
        raise InputError(f"{one} holds texts and {other} images; encode them with two commands, into two files")
    return next(kind for kind in found.values() if kind is not None)


def _not_taken(name: str, taken: frozenset[Kind], source: str, kind: Kind) -> str:
    what = "is a folder" if Path(source).is_dir() else f"holds {kind}"
    if kind == "texts":
        return f"model_type={name!r} is encoded by its vision tower, and {source} {what}; {FORMS['images']}"
    return (
        f"model_type={name!r} has no vision tower that enfold packs (those of Qwen-VL, SigLIP vision), and {source} "
        f"{what}; {FORMS['texts']}"
    )


def kinds_of_model(config: Mapping[str, Any]) -> frozenset[Kind]:
    """Return what a model takes. One that takes neither counts as taking texts: its own loader says best what it is."""
    kinds: set[Kind] = set()
    for part in parts(config).values():
        model_type = model_type_of(part)
        family = family_of(model_type)
        if tower_of(model_type) is not None:
            kinds.add("images")
        elif family is None or _is_text(part):
            kinds.add("texts")
    return frozenset(kinds or {"texts"})


def _is_text(config: Mapping[str, Any]) -> bool:
    family = family_of(model_type_of(config))
    try:
        return family is not None and family.facts(config).kind == "text"
    except EnfoldError:  # a size that can't be used: the loader says it
        return True


def packs_only_images(config: Mapping[str, Any]) -> bool:
    """Return whether a model has nothing that enfold spreads but a tower for images of any size."""
    return all(packs_patches(model_type_of(part)) for part in parts(config).values())


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the object in config.json; raise ConfigError that names the file."""
    path = folder / "config.json"
    try:
        return read_json(path)
    except ConfigError as error:
        raise type(error)(f"{path} {error}") from error


def kind_of_input(source: str) -> Kind | None:
    """Return what one input holds, by its name or its first bytes; None where it may be either."""
    path = Path(source)
    suffix = path.suffix.lower()
    if source == "-":
        return "texts"
    if path.is_dir():
        return "images"
    if suffix in SUFFIXES and path.exists():
        return "images"
    try:
        with path.open("rb") as file:
            return _kind_of_list(file.readline()) if suffix in LISTS else _sniff(file.read(SNIFFED_BYTES), suffix)
    except OSError as error:
        raise InputError(f"can't read {source}: {error.strerror}") from None


def _sniff(start: bytes, suffix: str) -> Kind | None:
    if suffix == ".txt":
        return "texts"
    if b"\0" in start:
        return "images"
    try:
        start.decode("utf-8")
    except UnicodeDecodeError as error:
        return "texts" if error.reason == "unexpected end of data" else None
    return "texts"


def _kind_of_list(line: bytes) -> Kind | None:
    """Return what a .jsonl file holds, by the keys of its first line."""
    try:
        fields = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError):
        return None
    has_text, has_image = ("text" in fields, "image" in fields) if isinstance(fields, dict) else (False, False)
    if has_text == has_image:
        return None
    return "texts" if has_text else "images"
