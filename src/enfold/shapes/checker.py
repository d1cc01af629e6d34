"""Say whether a picture shows its prompt: colours, shapes, sizes and places of its connected components."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enfold.shapes.scenes import BACKGROUNDS, COLOURS, RELATIONS, Scene, Thing

__all__ = ["Component", "check_picture", "find_components"]

_SMALLEST_PIXELS = 30  # a small triangle covers about 80; fewer are specks
_SMALLEST_FILL = 0.3  # the ring of mixed colours around a large shape covers 0.1 to 0.2 of its box, a triangle 0.5
_PALETTE = {**COLOURS, **BACKGROUNDS}
_SIZE_LIMITS = {"small": (0, 15.5), "": (0, 99), "large": (19.5, 99)}
"""Height in pixels; 11-14, 16-19 and 21-25 are drawn."""

_FORM_LIMITS = {
    "triangle": {"upper_share": (0.0, 0.6), "fill": (0.35, 0.8)},
    "circle": {"upper_share": (0.6, 1.6), "fill": (0.65, 0.845)},
    "square": {"upper_share": (0.6, 1.6), "fill": (0.845, 1.01)},
}
"""Upper third over lower third: 0.2 for a triangle, 1 for the others. Share of the box: 0.5, pi/4 and 1. Drawn ones
come within 0.1 of these, decoded ones are rounder."""


@dataclass(frozen=True)
class Component:
    """A connected patch of one colour: the middle (x, y), width and height of its box, and how it fills the box.

    upper_share: pixels in the upper third of the box over those in the lower third.
    """

    colour: str
    x: float
    y: float
    width: int
    height: int
    num_pixels: int
    upper_share: float

    @property
    def fill(self) -> float:
        """Return the covered share of the bounding box."""
        return self.num_pixels / (self.width * self.height)


def check_picture(picture: NDArray[np.uint8], scene: Scene) -> list[str]:
    """Return what is wrong with an RGB picture [H, W, 3] of 64 x 64, one sentence each; none: it shows the scene."""
    nearest = _nearest_colours(picture)
    components = find_components(nearest)
    faults = []
    border = np.concatenate([nearest[0], nearest[-1], nearest[:, 0], nearest[:, -1]])
    background = list(_PALETTE)[int(np.bincount(border, minlength=len(_PALETTE)).argmax())]
    if background != (scene.background or "white"):
        faults.append(f"the background is {background}, not {scene.background or 'white'}")
    things = [component for component in components if component.colour != background]
    if len(things) != 2:
        seen = ", ".join(component.colour for component in things) or "none"
        return [*faults, f"{len(things)} shapes ({seen}) instead of 2"]
    pairings = [_pairing_faults(scene, *pair) for pair in (things, things[::-1])]
    return [*faults, *min(pairings, key=len)]


def find_components(nearest: NDArray[np.int64]) -> list[Component]:
    """Return the 4-connected components of an [H, W] map of palette indices, largest first; no specks, no edges."""
    height, width = nearest.shape
    seen = np.zeros((height, width), dtype=bool)
    found = []
    for start in np.ndindex(height, width):
        if seen[start]:
            continue
        colour, stack, pixels = nearest[start], [start], []
        seen[start] = True
        while stack:
            y, x = stack.pop()
            pixels.append((y, x))
            for below, right in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                inside = 0 <= below < height and 0 <= right < width
                if inside and not seen[below, right] and nearest[below, right] == colour:
                    seen[below, right] = True
                    stack.append((below, right))
        component = _measure(list(_PALETTE)[int(colour)], np.array(pixels))
        if component.num_pixels >= _SMALLEST_PIXELS and component.fill >= _SMALLEST_FILL:
            found.append(component)
    return sorted(found, key=lambda component: -component.num_pixels)


def _nearest_colours(picture: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return for each pixel the index of the nearest palette colour."""
    palette = np.array(list(_PALETTE.values()), dtype=np.int64)
    away = picture[:, :, None, :].astype(np.int64) - palette
    return np.asarray((away**2).sum(-1).argmin(-1))


def _measure(colour: str, pixels: NDArray[np.int64]) -> Component:
    low, high = pixels.min(0), pixels.max(0)
    height, width = (int(side) for side in high - low + 1)
    y, x = ((low + high) / 2).tolist()
    upper, lower = (int((away < height / 3).sum()) for away in (pixels[:, 0] - low[0], high[0] - pixels[:, 0]))
    return Component(colour, x, y, width, height, len(pixels), upper / lower)


def _pairing_faults(scene: Scene, first: Component, second: Component) -> list[str]:
    faults = [*_thing_faults(scene.first, first), *_thing_faults(scene.second, second)]
    dx, dy = RELATIONS[scene.relation]
    along = dx * (first.x - second.x) + dy * (first.y - second.y)
    across = abs(dy * (first.x - second.x)) + abs(dx * (first.y - second.y))
    if along <= across:
        faults.append(f"the {first.colour} one is not {scene.relation} the {second.colour} one")
    return faults


def _thing_faults(thing: Thing, seen: Component) -> list[str]:
    if seen.colour != thing.colour:
        return [f"{seen.colour} where {thing.colour} was asked"]
    limits: list[tuple[str, float, tuple[float, float]]] = [
        ("height", seen.height, _SIZE_LIMITS[thing.size]),
        *((name, getattr(seen, name), limit) for name, limit in _FORM_LIMITS[thing.shape].items()),
    ]
    what = " ".join(word for word in (thing.size, thing.colour, thing.shape) if word)
    return [
        f"{name.replace('_', ' ')} {value:.2f} is none of a {what} ({low} to {high})"
        for name, value, (low, high) in limits
        if not low <= value < high
    ]
