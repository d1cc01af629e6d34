"""Diffusers pipelines through enfold.parallelize: what their own methods return has the bits of the plain pipeline."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pipelines
import pytest
import torch
import torch.distributed as dist
from cells import differences
from models import BY_NAME
from ranks import Ranks

import enfold
from enfold.errors import ConfigError, EnfoldError, LayoutError, UnknownFamilyError
from enfold.exact import has_bf16_instructions
from enfold.pipelines.diffusion import encoders_of

ENCODERS = {
    "Flux": {"text_encoder", "text_encoder_2", "image_encoder"},
    "SD3": {"text_encoder", "text_encoder_2", "text_encoder_3"},
    "Wan": {"text_encoder", "image_encoder"},
    "QwenImage": {"text_encoder"},
    "Flux2": {"text_encoder"},
}
MODES: dict[tuple[int, torch.dtype], list[tuple[str, tuple[int, int, int] | None]]] = {
    (2, torch.float32): [("auto", None), ("fold", None)],
    (4, torch.float32): [("auto", (1, 2, 2))],
    (2, torch.bfloat16): [("dp", None)],
}
"""dp (what auto comes to), fold and both together; test_generate.py draws whole pictures in every mode on 2 ranks."""

LAYOUTS = {"fold": (1, 1, -1), "dp": (1, -1, 1), "auto": (1, -1, 1)}
"""What each mode comes to at these widths; -1: all ranks."""


@lru_cache(maxsize=4)
def wanted(name: str, dtype: torch.dtype, num_prompts: int) -> list[Any]:
    return pipelines.encode(name, pipelines.build(name, dtype), num_prompts)


def compare(group: dist.ProcessGroup, name: str, dtype: torch.dtype, mode: str, layout: Any) -> list[str]:
    """Return in words what is wrong with a pipeline in one mode, on this rank."""
    pipe = pipelines.build(name, dtype)
    before = {part: type(encoder) for part, encoder in encoders_of(pipe).items()}
    numbers = {part: num_parameters(encoder) for part, encoder in encoders_of(pipe).items()}
    options = {"layout": enfold.Layout(*layout)} if layout else {}
    if enfold.parallelize(pipe, mode, group=group, **options) is not pipe:
        return ["parallelize returned another object"]
    world = dist.get_world_size(group)
    expected = tuple(layout or (world if size == -1 else size for size in LAYOUTS[mode]))
    found = [f"encoders {sorted(before)}"] if set(before) != ENCODERS[name] else []
    for part, encoder in encoders_of(pipe).items():
        plan = encoder.plan
        actual = (plan.layout.replicate, plan.layout.dp, plan.layout.tp)
        if type(encoder) is not before[part] or encoder is not getattr(pipe, part):
            found.append(f"{part} became {type(encoder).__name__}")
        if actual != expected or plan.mode != mode:
            found.append(f"{part} has layout {actual} for mode {plan.mode}, not {expected}")
        share = num_parameters(encoder) / numbers[part]
        if (share > 1 / expected[2] + 0.2) if expected[2] > 1 else share != 1:
            found.append(f"{part} holds {share:.0%} of its parameters at tp={expected[2]}")
    for num_prompts in (1, 3):
        with torch.set_grad_enabled(num_prompts == 3):  # nobody has to call encode_prompt without gradients
            got = pipelines.encode(name, pipe, num_prompts)
            found += differences(wanted(name, dtype, num_prompts), got, f"{num_prompts} prompts")
    return found


def num_parameters(encoder: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in encoder.parameters())


@pytest.mark.parametrize("name", pipelines.PIPELINES)
def test_a_pipeline_returns_the_bits_of_the_plain_one(ranks: Ranks, name: str) -> None:
    found = []
    for (world, dtype), modes in MODES.items():
        if dtype == torch.bfloat16 and name != "SD3" and not has_bf16_instructions():
            continue  # several times slower there than fp32
        for mode, layout in modes:
            answers = ranks.run(compare, world, name, dtype, mode, layout)
            found += [
                f"{mode} {layout or ''} on {world} ranks, {dtype}, rank {rank}: {text}"
                for rank, texts in enumerate(answers)
                for text in texts
            ]
    assert not found, "\n".join(found)


def _with_fast_numerics(group: dist.ProcessGroup) -> list[str]:
    pipe = enfold.parallelize(pipelines.build("SD3", torch.float32), "fold", group=group, numerics="fast")
    return differences(wanted("SD3", torch.float32, 3), pipelines.encode("SD3", pipe, 3))


def test_an_all_reduce_fold_of_a_pipeline_is_seen(ranks: Ranks) -> None:
    for texts in ranks.run(_with_fast_numerics, 4):
        assert any("values differ" in text for text in texts)


def _groups_made(group: dist.ProcessGroup, name: str, layout: tuple[int, int, int]) -> int:
    made = []
    new_group = dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return new_group(*args, **kwargs)

    dist.new_group = counted
    try:
        enfold.parallelize(pipelines.build(name, torch.bfloat16), layout=enfold.Layout(*layout), group=group)
    finally:
        dist.new_group = new_group
    return len(made)


@pytest.mark.parametrize("layout,number", [((1, 1, 4), 0), ((1, 2, 2), 4), ((2, 1, 2), 2)])
def test_encoders_of_a_pipeline_share_their_process_groups(
    ranks: Ranks, layout: tuple[int, int, int], number: int
) -> None:
    """Three encoders need the groups of one: none where the world does, else a tp pair and a dp pair for each half."""
    assert ranks.run(_groups_made, 4, "SD3", layout) == [number] * 4


def _images(group: dist.ProcessGroup, mode: str | None) -> list[torch.Tensor]:
    pipe = pipelines.flux(torch.float32, whole=True)
    pipe.set_progress_bar_config(disable=True)
    if mode is not None:
        enfold.parallelize(pipe, mode, group=group)
    shape = {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 16}
    return [
        pipe(prompt, **shape, generator=torch.Generator().manual_seed(7), output_type=kind).images
        for prompt, kind in ((pipelines.PROMPT, "latent"), (pipelines.PROMPTS, "pt"))
    ]


def _compare_images(group: dist.ProcessGroup) -> list[str]:
    want = _images(group, None)
    assert all(image.isfinite().all() and image.std() > 0 for image in want)
    modes = ("fold", "dp", "replicate", "auto")
    return [f"{mode}: {text}" for mode in modes for text in differences(want, _images(group, mode))]


def test_pictures_are_the_same_whatever_the_encoders_do(ranks: Ranks) -> None:
    """Text to picture in two steps, the transformer unsplit on every rank."""
    assert ranks.run(_compare_images, 2) == [[], []]


# What can't be spread. None of this needs ranks.


def test_an_object_that_is_no_pipeline() -> None:
    with pytest.raises(ConfigError, match="int is neither a torch module nor a Diffusers pipeline"):
        enfold.parallelize(3)


def test_a_pipeline_without_encoders() -> None:
    pipe = SimpleNamespace(components={"vae": None, "transformer": torch.nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match="no text or image encoder among vae, transformer"):
        enfold.parallelize(pipe)


def test_an_encoder_under_two_names_is_spread_once() -> None:
    model = BY_NAME["BERT"].build()
    pipe = SimpleNamespace(components={"text_encoder": model, "text_encoder_2": model})
    assert enfold.parallelize(pipe).components["text_encoder_2"].plan.resolved == "replicate"


def test_a_model_that_takes_neither_texts_nor_images_is_no_encoder() -> None:
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    vocoder = SpeechT5HifiGan(SpeechT5HifiGanConfig(upsample_initial_channel=32))
    model = BY_NAME["BERT"].build()
    assert list(encoders_of(SimpleNamespace(components={"vocoder": vocoder, "text_encoder": model}))) == [
        "text_encoder"
    ]


def test_a_pipeline_twice_names_the_component() -> None:
    pipe = enfold.parallelize(SimpleNamespace(components={"text_encoder": BY_NAME["BERT"].build()}))
    with pytest.raises(ConfigError, match=r"text_encoder: BertModel is spread already .*; load it again"):
        enfold.parallelize(pipe)


def _unknown_beside_known(group: dist.ProcessGroup, mode: str, layout: Any) -> tuple[str, str, list[bool], int]:
    """Return the error of a pipeline whose second encoder can't be spread so, and what became of the first."""
    from transformers import DistilBertConfig, DistilBertModel

    small = DistilBertModel(DistilBertConfig(dim=64, hidden_dim=64, n_heads=1, n_layers=1, vocab_size=50))
    known = BY_NAME["BERT"].build()
    pipe = SimpleNamespace(components={"text_encoder": known, "text_encoder_2": small})
    number = num_parameters(known)
    try:
        enfold.parallelize(pipe, mode, group=group, layout=layout)
    except EnfoldError as error:
        touched = [hasattr(each, "plan") for each in (known, small)]
        return type(error).__name__, str(error), touched, num_parameters(known) - number
    return "", "", [], 0


def test_nothing_is_touched_where_one_encoder_is_refused(ranks: Ranks) -> None:
    for kind, text, touched, cut in ranks.run(_unknown_beside_known, 2, "fold", None):
        assert kind == UnknownFamilyError.__name__
        assert text.startswith("text_encoder_2: model_type='distilbert'")
        assert "T5" in text and "use dp or replicate" in text
        assert touched == [False, False] and cut == 0


def test_a_layout_that_contradicts_the_mode(ranks: Ranks) -> None:
    for kind, text, touched, _ in ranks.run(_unknown_beside_known, 2, "dp", enfold.Layout(tp=2)):
        assert kind == LayoutError.__name__
        assert text.startswith("text_encoder: mode dp contradicts")
        assert touched == [False, False]


def test_a_layout_that_does_not_fit_the_ranks(ranks: Ranks) -> None:
    for kind, text, _, _ in ranks.run(_unknown_beside_known, 2, "auto", enfold.Layout(dp=3)):
        assert kind == LayoutError.__name__
        assert "3" in text and "2 ranks" in text
