"""The scenes of the shipped model: prompts, pictures, the checker that reads pictures, and the weights that ship."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from enfold.shapes import model_folder, steps, train
from enfold.shapes.checker import check_picture
from enfold.shapes.scenes import (
    BACKGROUNDS,
    COLOURS,
    RELATIONS,
    SHAPES,
    Scene,
    Thing,
    draw_scenes,
    held_out_scenes,
    is_held_out,
    random_scene,
    read_prompt,
    words,
    write_prompt,
)

SHIPPED_LIMIT_BYTES = 12_000_000
RED_CIRCLE, BLUE_SQUARE = Thing("red", "circle"), Thing("blue", "square")
OPPOSITE = {"above": "below", "below": "above", "left of": "right of", "right of": "left of"}


def pictures_of(scenes: list[Scene], seed: int = 0) -> list[NDArray[np.uint8]]:
    pixels = (draw_scenes(scenes, random.Random(seed)) + 1) * 127.5
    return list(pixels.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy())


@given(st.integers(0, 2**32), st.booleans())
def test_a_prompt_says_its_scene(seed: int, long_form: bool) -> None:
    scene = random_scene(random.Random(seed))
    prompt = write_prompt(scene, long_form=long_form)
    assert read_prompt(prompt) == scene
    assert read_prompt(f" {prompt.upper()}. ") == scene
    assert set(prompt.split()) <= set(words())


@pytest.mark.parametrize(
    "prompt", ["", "a red circle", "a red circle above a pink square", "red circle above blue square"]
)
def test_other_texts_are_no_prompts(prompt: str) -> None:
    assert read_prompt(prompt) is None


def test_drawn_pictures_show_their_scenes() -> None:
    rng = random.Random(3)
    scenes = [random_scene(rng) for _ in range(60)]
    assert [check_picture(picture, scene) for picture, scene in zip(pictures_of(scenes), scenes, strict=True)] == [
        []
    ] * 60


def test_every_wrong_attribute_is_seen() -> None:
    scene = Scene(Thing("red", "circle", "large"), "above", Thing("blue", "square", "small"), "black")
    first, second = scene.first, scene.second
    wrong = {
        "colour": [
            dataclasses.replace(scene, first=dataclasses.replace(first, colour=c)) for c in COLOURS if c != "red"
        ],
        "shape": [
            dataclasses.replace(scene, first=dataclasses.replace(first, shape=s)) for s in SHAPES if s != "circle"
        ],
        "size": [dataclasses.replace(scene, second=dataclasses.replace(second, size="large"))],
        "relation": [dataclasses.replace(scene, relation=r) for r in RELATIONS if r != "above"],
        "background": [dataclasses.replace(scene, background=b) for b in BACKGROUNDS if b != "black"],
        "swapped": [dataclasses.replace(scene, first=second, second=first)],
    }
    picture = pictures_of([scene])[0]
    assert check_picture(picture, scene) == []
    for what, others in wrong.items():
        assert others
        for other in others:
            assert check_picture(picture, other), what


def test_a_missing_or_a_third_shape_is_seen() -> None:
    scene = Scene(RED_CIRCLE, "left of", BLUE_SQUARE)
    picture = pictures_of([scene])[0]
    third = picture.copy()
    third[:8, :8] = COLOURS["green"]
    alone = picture.copy()
    alone[:, :32] = BACKGROUNDS["white"]
    assert "3 shapes" in check_picture(third, scene)[0]
    assert "1 shapes" in check_picture(alone, scene)[0]
    assert "0 shapes" in check_picture(np.full((64, 64, 3), 250, dtype=np.uint8), scene)[0]


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_relation_is_read_from_its_opposite(relation: str) -> None:
    picture = pictures_of([Scene(RED_CIRCLE, relation, BLUE_SQUARE)])[0]
    assert check_picture(picture, Scene(BLUE_SQUARE, OPPOSITE[relation], RED_CIRCLE)) == []
    assert check_picture(picture, Scene(RED_CIRCLE, OPPOSITE[relation], BLUE_SQUARE))


def test_held_out_scenes_stay_the_same() -> None:
    scenes = held_out_scenes(200)
    assert len(set(scenes)) == 200
    assert all(map(is_held_out, scenes))
    assert held_out_scenes(200) == scenes
    rng = random.Random(0)
    share = sum(is_held_out(random_scene(rng)) for _ in range(4000)) / 4000
    assert 0.03 < share < 0.07


def test_the_shipped_model_is_small_and_whole() -> None:
    files = [path for path in model_folder().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= SHIPPED_LIMIT_BYTES
    index = json.loads((model_folder() / "model_index.json").read_text())
    assert index["_class_name"] == "FluxPipeline"
    for name in ("text_encoder", "text_encoder_2", "transformer", "vae"):
        assert list((model_folder() / name).glob("*.safetensors")), name
    assert not [path for path in files if path.suffix in {".bin", ".pt", ".pkl"}]


def test_training_goes_on_as_if_it_had_not_been_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SAVE_EVERY", 2)
    monkeypatch.setattr(train, "_POOL_SIZE", 16)
    learn, calls = train.learn, iter(range(100))

    def learn_until_cut(*args: Any) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        learn(*args)

    whole = train.train_autoencoder(tmp_path / "whole.pt", 4, seed=1, batch_size=4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "learn", learn_until_cut)
        train.train_autoencoder(tmp_path / "cut.pt", 4, seed=1, batch_size=4)
    resumed = train.train_autoencoder(tmp_path / "cut.pt", 4, seed=1, batch_size=4)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
