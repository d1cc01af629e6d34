"""Find the image files that files, folders and .jsonl lists name, and refuse what can't be used, by file and line."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from enfold.errors import InputError

logger = logging.getLogger("enfold")

SUFFIXES = tuple(".avif .bmp .gif .jfif .jpe .jpeg .jpg .mpo .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split())
"""What is taken from a folder, in lower or upper case; a file that is named itself is judged by its content."""

LISTS = (".jsonl", ".ndjson")
NOT_IMAGES = (".txt", ".csv", ".tsv", ".json", ".parquet", ".zip", ".tar", ".gz", ".tgz")
NAMED_PROBLEMS = 5
"""How many problems a message lists before it only counts."""


@dataclass(frozen=True)
class ImageFile:
    """One file to encode, the id that a line of a .jsonl gave it, and where it was named (an input, or a line)."""

    path: Path
    id: str | int | None
    where: str

    def to_json(self) -> str:
        """Return it as one line of JSON: {"id"?, "image"}."""
        fields = {"image": str(self.path)} if self.id is None else {"id": self.id, "image": str(self.path)}
        return json.dumps(fields, ensure_ascii=False)


def find_images(inputs: Sequence[str]) -> list[ImageFile]:
    """Return the image files that the inputs name, in their order; the same file twice is two items.

    An input is an image file, a folder (searched with its subfolders, by suffix, sorted by path; hidden names are
    skipped, other files skipped and counted in a log line), or a .jsonl file: per line {"image": path, "id": optional},
    paths relative to its folder. No image is opened. Raises InputError that lists the first problems of all inputs.
    """
    found = list(chain.from_iterable(map(_look_up, [inputs] if isinstance(inputs, str) else inputs)))
    problems = [str(item) for item in found if isinstance(item, InputError)]
    if len(problems) == 1:
        raise InputError(problems[0])
    if problems:
        more = len(problems) - NAMED_PROBLEMS
        listed = [*problems[:NAMED_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
        raise InputError("\n  ".join([f"{len(problems)} inputs can't be used:", *listed]))
    if not found:
        raise InputError("no input; give image files, folders, or a .jsonl file")
    return [item for item in found if isinstance(item, ImageFile)]


def _look_up(source: str) -> Iterator[ImageFile | InputError]:
    """Yield what one input names, and an error for each thing that can't be used."""
    path = Path(source)
    suffix = path.suffix.lower()
    if source == "-":
        yield InputError("standard input is not read for images; give files, folders, or a .jsonl file")
    elif path.is_dir():
        yield from _in_folder(source, path)
    elif suffix in LISTS:
        yield from _in_list(source, path)
    elif suffix in NOT_IMAGES and path.exists():
        yield InputError(f'{source} is no image; a list of images is a .jsonl file with lines {{"image": "PATH"}}')
    else:
        yield _checked(path, None, source)


def _checked(path: Path, identity: str | int | None, where: str) -> ImageFile | InputError:
    problem = _problem_of(path)
    if problem is None:
        return ImageFile(path, identity, where)
    name = os.fsencode(path).decode("utf-8", "backslashreplace")
    return InputError(f"{name} {problem}" if where == str(path) else f"{where}: {name} {problem}")


def _problem_of(path: Path) -> str | None:
    try:
        str(path).encode()
        mode = path.stat().st_mode
    except UnicodeEncodeError:
        return "has a name that is no valid UTF-8; rename it"
    except OSError as error:
        return f"can't be read: {error.strerror}"
    except ValueError as error:
        return f"is no path: {error}"
    if stat.S_ISDIR(mode):
        return "is a folder; name the files in it"
    return None if stat.S_ISREG(mode) else "is no regular file"


def _in_folder(source: str, folder: Path) -> Iterator[ImageFile | InputError]:
    unreadable: list[OSError] = []
    files = list(_walk(folder, unreadable))
    images = sorted((path for path in files if path.suffix.lower() in SUFFIXES), key=lambda path: path.parts)
    counts = Counter(path.suffix.lower() or "no suffix" for path in files if path.suffix.lower() not in SUFFIXES)
    skipped = f"{counts.total()} others ({', '.join(f'{n} {suffix}' for suffix, n in counts.most_common(5))})"
    for error in unreadable:
        yield InputError(f"{error.filename} can't be read: {error.strerror}")
    if not images and not unreadable:
        rest = f"; it holds {skipped}" if counts else ""
        yield InputError(f"{source} holds no images ({' '.join(SUFFIXES)}){rest}")
    elif counts:
        logger.warning("%s: %d images; skipped %s", source, len(images), skipped)
    for path in images:
        yield _checked(path, None, source)


def _walk(folder: Path, unreadable: list[OSError]) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden. Links to folders are followed, each real folder once."""
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, onerror=unreadable.append, followlinks=True):
        real = os.path.realpath(root)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in names if real not in seen and not name.startswith("."))
        seen.add(real)


def _in_list(source: str, path: Path) -> Iterator[ImageFile | InputError]:
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        yield InputError(f"can't read {source}: {error.strerror}")
        return
    if not content.strip():
        yield InputError(f'{source} is empty; give one {{"image": "PATH"}} per line')
        return
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), 1):
        where = f"{source}, line {number}"
        try:
            name, identity = _parse_line(line)
        except ValueError as error:
            yield InputError(f"{where}: {error}")
        else:
            yield _checked(path.parent / name, identity, where)


def _parse_line(line: bytes) -> tuple[str, str | int | None]:
    """Return path and id of one line of JSON; raise ValueError with what is wrong."""
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} of the line (0x{line[error.start]:02x}) is no valid UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no valid JSON ({error})" if line.strip() else "the line is empty; remove it") from None
    if not isinstance(fields, dict) or "image" not in fields:
        what = f"it has {', '.join(map(repr, fields)) or 'nothing'}" if isinstance(fields, dict) else "no object"
        raise ValueError(f'no "image" ({what}); write one {{"image": "PATH"}} per line')
    name, identity = fields["image"], fields.get("id")
    if not isinstance(name, str) or not name:
        raise ValueError(f'"image" is {"empty" if name == "" else f"a {type(name).__name__}"}; give one path')
    if name.startswith(("http://", "https://", "s3://", "gs://", "data:")):
        raise ValueError(f'"image" is a URL ({name[:40]}); download it first and give its path')
    if isinstance(identity, bool) or not isinstance(identity, (str, int, type(None))):
        raise ValueError(f'"id" is a {type(identity).__name__}; use a string or a whole number')
    str(identity).encode()  # half of a surrogate pair stands for no character; UnicodeEncodeError says so
    return name, identity
