"""Teach the text encoder to read: from a prompt's hidden states, what stands above, below, left and right.

The denoiser needs just that, and learns it slowly through noise: which colour belongs to which shape shows in small
parts of its loss. Here it is asked directly, without pictures, at a tenth of the cost of a step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import T5EncoderModel

from enfold.shapes.scenes import BACKGROUNDS, COLOURS, RADII, RELATIONS, SHAPES, Scene, Thing

__all__ = ["Reader", "labels_of", "look_around", "reading_loss"]

_PLACES = ("above", "below", "left of", "right of")
_OPPOSITE = {"above": "below", "below": "above", "left of": "right of", "right of": "left of"}
_COLOURS, _SIZES, _GROUNDS = list(COLOURS), list(RADII), list(BACKGROUNDS)
_STRENGTH = 4.0
_NUM_CLASSES = (len(COLOURS) + 1, len(SHAPES) + 1, len(RADII) + 1)  # colour, shape, size; the last class: nothing there


@torch.no_grad()
def look_around(t5: T5EncoderModel) -> None:
    """Start T5's four heads with position biases: the word before, the one before it, what follows, what precedes.

    From biases near zero a text is a bag of words, and Adam, which moves each bias by its rate at most, takes
    thousands of steps to make order visible. T5's buckets count distances to the left first, then to the right.
    """
    bias = t5.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight  # [buckets, heads]
    half = bias.shape[0] // 2
    bias.zero_()
    bias[1, 0] = bias[2, 1] = _STRENGTH
    bias[half + 1 :, 2] = _STRENGTH
    bias[1:half, 3] = _STRENGTH


class Reader(nn.Module):
    """Asks one learned question per place, and one about the background, of hidden states [N, tokens, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.questions = nn.Parameter(torch.randn(len(_PLACES) + 1, width) * width**-0.5)
        self.keys = nn.Linear(width, width, bias=False)
        self.things = nn.Linear(width, sum(_NUM_CLASSES))
        self.background = nn.Linear(width, len(BACKGROUNDS))

    def forward(self, hidden_NTF: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the four places [N, 4, classes] and of the background [N, backgrounds]."""
        scores = self.questions @ self.keys(hidden_NTF).transpose(1, 2)
        answers = (scores * self.questions.shape[1] ** -0.5).softmax(-1) @ hidden_NTF
        return self.things(answers[:, :-1]), self.background(answers[:, -1])


def labels_of(scenes: Sequence[Scene]) -> tuple[Tensor, Tensor]:
    """Return what stands at each place, [N, 4, 3] classes of colour, shape and size, and the background, [N]."""
    nothing = [count - 1 for count in _NUM_CLASSES]
    places = torch.tensor(nothing).repeat(len(scenes), len(_PLACES), 1)
    for row, scene in enumerate(scenes):
        places[row, _PLACES.index(scene.relation)] = _classes(scene.first)
        places[row, _PLACES.index(_OPPOSITE[scene.relation])] = _classes(scene.second)
    grounds = [_GROUNDS.index(scene.background or "white") for scene in scenes]
    return places, torch.tensor(grounds)


def reading_loss(logits: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    """Return the mean cross entropy, and the share of the scenes that were read without a mistake."""
    things, grounds = logits
    parts = torch.split(things, list(_NUM_CLASSES), dim=-1)
    right = grounds.argmax(-1) == labels[1]
    loss = functional.cross_entropy(grounds, labels[1])
    for number, part in enumerate(parts):
        wanted = labels[0][..., number]
        loss = loss + functional.cross_entropy(part.flatten(0, 1), wanted.flatten())
        right = right & (part.argmax(-1) == wanted).all(-1)
    return loss, float(right.float().mean())


def _classes(thing: Thing) -> Tensor:
    return torch.tensor([_COLOURS.index(thing.colour), SHAPES.index(thing.shape), _SIZES.index(thing.size)])


assert set(_PLACES) == set(RELATIONS)
