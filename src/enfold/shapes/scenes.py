"""Scenes: two coloured shapes in a relation. Their prompts (write and read), their pictures, the held-out ones.

A prompt is `a [SIZE] COLOUR SHAPE RELATION a [SIZE] COLOUR SHAPE [on a BACKGROUND background]`. Left out, a size is
between small and large, and the background is white. Pictures are [N, 3, 64, 64] in [-1, 1].
"""

import hashlib
import random
import re
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "BACKGROUNDS",
    "COLOURS",
    "PICTURE_SIZE",
    "RADII",
    "RELATIONS",
    "SHAPES",
    "Scene",
    "Thing",
    "draw_scenes",
    "held_out_scenes",
    "is_held_out",
    "random_scene",
    "read_prompt",
    "words",
    "write_prompt",
]

PICTURE_SIZE = 64
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 70),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 50),
    "purple": (150, 60, 180),
    "cyan": (60, 200, 220),
}
BACKGROUNDS = {"white": (250, 250, 250), "black": (15, 15, 15), "gray": (128, 128, 128)}
SHAPES = ("circle", "square", "triangle")
RELATIONS = {
    "above": (0, -1),
    "below": (0, 1),
    "left of": (-1, 0),
    "right of": (1, 0),
}  # (x, y) from second to first
RADII = {"small": (6.0, 6.8), "": (8.6, 9.4), "large": (11.4, 12.2)}  # half the height, in pixels
_HELD_OUT_ONE_IN = 20
_LONG_FORMS = {"left of": "to the left of", "right of": "to the right of"}
_PROMPT = re.compile(
    rf"an? (?:(small|large) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) (?:to the )?({'|'.join(RELATIONS)}) "
    rf"an? (?:(small|large) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})"
    rf"(?: on an? ({'|'.join(BACKGROUNDS)}) background)?"
)


@dataclass(frozen=True)
class Thing:
    """One shape of a scene. `size` is "small", "large", or "" where the prompt doesn't say."""

    colour: str
    shape: str
    size: str = ""


@dataclass(frozen=True)
class Scene:
    """`first` is `relation` (above, below, ...) `second`; `background` is "" where the prompt doesn't say."""

    first: Thing
    relation: str
    second: Thing
    background: str = ""


def write_prompt(scene: Scene, *, long_form: bool = False) -> str:
    """Return the prompt of a scene; `long_form` says "to the left of" for "left of"."""
    relation = _LONG_FORMS.get(scene.relation, scene.relation) if long_form else scene.relation
    ending = f" on a {scene.background} background" if scene.background else ""
    return f"{_name(scene.first)} {relation} {_name(scene.second)}{ending}"


def read_prompt(prompt: str) -> Scene | None:
    """Return the scene that a prompt describes (either form), or None where it is no prompt of this grammar."""
    found = _PROMPT.fullmatch(" ".join(prompt.lower().replace(".", " ").split()))
    if found is None:
        return None
    size, colour, shape, relation, size2, colour2, shape2, background = (part or "" for part in found.groups())
    return Scene(Thing(colour, shape, size), relation, Thing(colour2, shape2, size2), background)


def words() -> list[str]:
    """Return every word that a prompt may hold, sorted."""
    parts = ["a an on background to the", *COLOURS, *BACKGROUNDS, *SHAPES, *RELATIONS, *RADII]
    return sorted({word for part in parts for word in part.split()})


def random_scene(rng: random.Random) -> Scene:
    """Draw a scene: its things differ in colour or shape; each size and the background are said in half the prompts."""
    while True:
        first, second = _random_thing(rng), _random_thing(rng)
        if (first.colour, first.shape) != (second.colour, second.shape):
            background = rng.choice(("", "", "", *BACKGROUNDS))
            return Scene(first, rng.choice(list(RELATIONS)), second, background)


def _random_thing(rng: random.Random) -> Thing:
    return Thing(rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.choice(("", "", "small", "large")))


def is_held_out(scene: Scene) -> bool:
    """Say whether training never sees this scene's prompt: one in twenty, by a hash of the prompt."""
    digest = hashlib.sha256(write_prompt(scene).encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def held_out_scenes(count: int, seed: int = 0) -> list[Scene]:
    """Return `count` different held-out scenes, the same for the same seed."""
    rng, found = random.Random(seed), dict[Scene, None]()
    while len(found) < count:
        scene = random_scene(rng)
        if is_held_out(scene):
            found[scene] = None
    return list(found)


def draw_scenes(scenes: list[Scene], rng: random.Random) -> Tensor:
    """Draw one picture of each scene, [N, 3, 64, 64] in [-1, 1]; `rng` sets what the prompt leaves open."""
    placed = [_place(scene, rng) for scene in scenes]
    backgrounds = torch.tensor([BACKGROUNDS[scene.background or "white"] for scene in scenes], dtype=torch.float32)
    pictures = backgrounds[:, :, None, None].expand(-1, -1, PICTURE_SIZE, PICTURE_SIZE)
    for things, places in (
        ([scene.first for scene in scenes], [place[0] for place in placed]),
        ([scene.second for scene in scenes], [place[1] for place in placed]),
    ):
        cover = _cover(things, torch.tensor(places))
        colours = torch.tensor([COLOURS[thing.colour] for thing in things], dtype=torch.float32)
        pictures = pictures + cover[:, None] * (colours[:, :, None, None] - pictures)
    return pictures / 127.5 - 1


def _name(thing: Thing) -> str:
    return " ".join(part for part in ("a", thing.size, thing.colour, thing.shape) if part)


def _place(scene: Scene, rng: random.Random) -> list[tuple[float, float, float]]:
    """Return (x, y, radius) of both things: apart along the relation, nearly level across it, inside the picture."""
    radii = [rng.uniform(*RADII[thing.size]) for thing in (scene.first, scene.second)]
    dx, dy = RELATIONS[scene.relation]
    gap = rng.uniform(3.0, 6.0)
    distance = sum(radii) + gap
    slack = (PICTURE_SIZE - 2 - 2 * sum(radii) - gap) / 2
    middle = PICTURE_SIZE / 2 + rng.uniform(-1, 1) * min(3.0, max(0.0, slack))
    places = []
    along = middle - distance / 2 + (radii[0] - radii[1]) / 2
    order = (0, 1) if dx + dy < 0 else (1, 0)
    if order == (1, 0):
        along = middle - distance / 2 + (radii[1] - radii[0]) / 2
    positions = {order[0]: along, order[1]: along + distance}
    for index in (0, 1):
        across = PICTURE_SIZE / 2 + rng.uniform(-4, 4)
        x, y = (positions[index], across) if dx else (across, positions[index])
        places.append((x, y, radii[index]))
    return places


def _cover(things: list[Thing], places: Tensor) -> Tensor:
    """Return how much of each pixel each thing covers, [N, 64, 64] in 0..1, from its signed distance in pixels."""
    axis = torch.arange(PICTURE_SIZE) + 0.5
    x = (axis[None, None, :] - places[:, 0, None, None]).expand(-1, PICTURE_SIZE, -1)
    y = (axis[None, :, None] - places[:, 1, None, None]).expand(-1, -1, PICTURE_SIZE)
    radius = places[:, 2, None, None]
    distances = {
        "circle": (x * x + y * y).sqrt() - radius,
        "square": torch.maximum(x.abs(), y.abs()) - radius * 0.92,
        # apex up: the flat side below, two sides of slope 2
        "triangle": torch.maximum(y - radius, (2 * x.abs() - y - radius) / 5**0.5),
    }
    which = torch.tensor([SHAPES.index(thing.shape) for thing in things])
    distance = torch.stack([distances[shape] for shape in SHAPES])[which, torch.arange(len(things))]
    return (0.5 - distance).clamp(0, 1)
