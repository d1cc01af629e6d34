"""make demo: draw four prompts on two ranks with the model that ships, look at the pictures, say where they are.

Runs the command as a user would. Then each picture is read back, with the prompt that it carries, and a checker looks
at its pixels: two shapes of the right colour, form and size, one where the prompt says from the other?
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from enfold.shapes.checker import check_picture
from enfold.shapes.scenes import read_prompt

OUT = Path(__file__).parent.parent / "demo-out"
PROMPTS = (
    "a red circle above a blue square",
    "a small green triangle to the left of a large purple circle",
    "a yellow square below a cyan triangle on a black background",
    "a large blue circle right of a small red square on a gray background",
)


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    options = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    options += ["--num-gpus", "2", "--threads-per-rank", "1", "--output-path", str(OUT)]
    print(
        "$ enfold generate", " ".join(f'"{word}"' if " " in word else word for word in options), end="\n\n", flush=True
    )
    subprocess.run([sys.executable, "-m", "enfold", "generate", *options], check=True)
    files = sorted(OUT.glob("*.png"))
    faults = {file: look(file) for file in files}
    print("\nThe checker looks at the pixels:")
    for file, found in faults.items():
        print(f"  {file}: {'; '.join(found) if found else 'shows its prompt'}")
    wrong = sum(map(bool, faults.values()))
    print(f"\n{len(files) - wrong} of {len(PROMPTS)} pictures show their prompts.")
    print("Draw your own: enfold generate --prompt TEXT, or open the page of: enfold serve")
    return int(wrong > 0 or len(files) != len(PROMPTS))


def look(file: Path) -> list[str]:
    """Show a picture where there is a terminal, and return what is wrong with it."""
    with Image.open(file) as picture:
        scene = read_prompt(picture.text["prompt"])
        pixels = np.asarray(picture.convert("RGB"))
        if sys.stdout.isatty():
            print(f"\n{picture.text['prompt']}\n{blocks(picture.convert('RGB').resize((32, 32)))}")
    return check_picture(pixels, scene) if scene else ["its prompt is not of the model's grammar"]


def blocks(picture: Image.Image) -> str:
    """Return a picture in half blocks of a terminal: two rows of pixels in one of text."""
    pixels = np.asarray(picture)
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        cells = zip(upper.tolist(), lower.tolist(), strict=True)
        text = "".join("\x1b[38;2;{};{};{};48;2;{};{};{}m▀".format(*above, *below) for above, below in cells)
        lines.append(f"  {text}\x1b[0m")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
