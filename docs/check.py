"""Check the docs against the tree: README's file table, local links, and the length of pages and source files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "enfold"
MAX_LINES = {"docs/structure.md": 80, **{str(path.relative_to(ROOT)): 60 for path in (ROOT / "docs/adr").glob("*.md")}}
MAX_SOURCE_LINES = 300
LONGER = {
    "src/enfold/shard.py": 400,  # planning and applying belong side by side
    "src/enfold/runtime/spawn.py": 310,
}


def table_problems() -> list[str]:
    """Return where README's table and the tree differ: one row per file or folder of src/enfold."""
    rows = set(re.findall(r"^\| `(src/enfold/[^`]+)` \|", (ROOT / "README.md").read_text(), re.M))
    there = {f"src/enfold/{path.name}{'/' if path.is_dir() else ''}" for path in SOURCE.iterdir()}
    hidden = {"src/enfold/__pycache__/", "src/enfold/__init__.py", "src/enfold/__main__.py", "src/enfold/py.typed"}
    there -= hidden
    return [f"README.md lists {row}, which is not there" for row in sorted(rows - there)] + [
        f"README.md does not list {row}" for row in sorted(there - rows)
    ]


def link_problems() -> list[str]:
    """Return local links of Markdown pages that lead nowhere."""
    pages = [page for page in ROOT.rglob("*.md") if not any(part.startswith(".") for part in page.parts)]
    return [
        f"{page.relative_to(ROOT)} links to {target}, which is not there"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]


def length_problems() -> list[str]:
    """Return pages and source files that are longer than they should be."""
    limits = dict(MAX_LINES)
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        limits[name] = LONGER.get(name, MAX_SOURCE_LINES)
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in limits}
    return [
        f"{name} has {lengths[name]} lines, at most {limit} are allowed"
        for name, limit in limits.items()
        if lengths[name] > limit
    ]


def main() -> int:
    """Print every problem; return 1 where there is one."""
    problems = table_problems() + link_problems() + length_problems()
    for problem in problems:
        print(problem)
    print(f"docs: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
