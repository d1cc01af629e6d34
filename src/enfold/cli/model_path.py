"""Check --model-path and --subfolder from the names of files alone, before anything heavy is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enfold.errors import ConfigError

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; the caller adds the file's name to what is raised."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"holds a {type(value).__name__}; an object with keys such as model_type is needed")
    return value


def check_model_path(model_path: str, subfolder: str | None) -> None:
    """Raise ConfigError unless this is a folder with an encoder's config.json, or may be a hub id."""
    root = Path(model_path).expanduser()
    if not root.exists():
        if not HUB_ID.fullmatch(model_path) or model_path.startswith("."):
            raise ConfigError(f"--model-path {model_path}: there is no such folder, and it is no hub id (owner/name)")
        return
    if not root.is_dir():
        raise ConfigError(f"--model-path {model_path} is a file; give the folder that holds config.json")
    folder = root / subfolder if subfolder else root
    if not folder.is_dir():
        raise ConfigError(f"--subfolder {subfolder}: {root} has no such folder{_choices(root)}")
    if not (folder / "config.json").is_file():
        if (folder / "model_index.json").is_file():
            raise ConfigError(f"{folder} is a pipeline; name one encoder with --subfolder{_choices(folder)}")
        raise ConfigError(f"{folder} has no config.json; give the folder of one encoder{_choices(folder)}")


def _choices(root: Path) -> str:
    folders = sorted(path.parent.name for path in root.glob("*/config.json") if _is_encoder(path))
    return f" ({', '.join(folders)})" if folders else ""


def _is_encoder(config: Path) -> bool:
    """Whether a config.json is that of a Transformers model; those of Diffusers have no model_type."""
    try:
        return "model_type" in json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
