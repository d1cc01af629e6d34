"""Requests made into the arguments of one call, the table of pipelines, what a folder may say, checks of requests."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from enfold.diffusion.checks import check_request
from enfold.diffusion.conditioning import (
    WAYS,
    ZEROS,
    different_texts,
    encode_options,
    encode_texts,
    stack,
    to_arguments,
    trim,
    wanted_of,
    way_of,
)
from enfold.diffusion.drawing import STAGES, Timeline, to_bytes, watched
from enfold.diffusion.layout import PipelineLayout
from enfold.diffusion.offload import Offload
from enfold.diffusion.opening import (
    find_pipeline,
    open_pipeline,
    pipeline_class,
    pipeline_dtype,
    read_defaults,
    read_index,
    spread_components,
)
from enfold.diffusion.requests import EmbedFacts, GenerateRequest, PipelineReport, PipelineSpec, Progress
from enfold.errors import CheckpointError, ConfigError, EncodeError, InputError

CPU = torch.device("cpu")
FLUX, QWEN, SDXL = WAYS["FluxPipeline"], WAYS["QwenImagePipeline"], WAYS["StableDiffusionXLPipeline"]


def request(prompt: str = "a fox", **fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt, **{"seed": 1, **fields})


# The table, against the installed Diffusers.


@pytest.mark.parametrize("name", WAYS)
def test_the_call_takes_what_the_table_says(name: str) -> None:
    way, call = WAYS[name], inspect.signature(getattr(diffusers, name).__call__).parameters
    encode = inspect.signature(getattr(diffusers, name).encode_prompt).parameters
    assert "prompt" in encode
    assert set(way.names) <= set(call)
    if way.guidance is None:
        assert "negative_prompt_embeds" not in call
    else:
        assert way.guidance in call
        assert {f"negative_{name}" for name in way.names} <= set(call)
    if way.max_tokens is not None:
        with pytest.raises(ValueError, match=str(way.max_tokens)):
            _check_inputs(name, way.max_tokens + 1)
        _check_inputs(name, way.max_tokens)


def _check_inputs(name: str, length: int) -> None:
    cls = getattr(diffusers, name)
    parameters = list(inspect.signature(cls.check_inputs).parameters)[1:]
    values = dict.fromkeys(parameters) | {"prompt": "a", "height": 64, "width": 64, "max_sequence_length": length}
    pipe = SimpleNamespace(vae_scale_factor=8, patch_size=2, _callback_tensor_inputs=[])
    cls.check_inputs(pipe, **values)


@pytest.mark.parametrize("name", WAYS)
def test_encode_prompt_returns_as_many_values(name: str) -> None:
    source = inspect.getsource(getattr(diffusers, name).encode_prompt)
    last = source[source.rindex("return ") :].removeprefix("return ").strip("() \n")
    found = [part.strip() for part in last.replace("\n", " ").split(",") if part.strip()]
    assert len(found) == len(WAYS[name].returns)
    for said, expected in zip(found, WAYS[name].returns, strict=True):
        assert expected is None or said == expected, (found, WAYS[name].returns)


# Texts.


def test_each_different_text_is_wanted_once() -> None:
    wanted = [
        wanted_of(request("a", negative_prompt="x", num_images=2), FLUX, 3.0, False),
        wanted_of(request("b", negative_prompt="a"), FLUX, 3.0, False),
        wanted_of(request("a", negative_prompt="x"), FLUX, 3.0, False),
    ]
    assert different_texts(wanted) == ["a", "b", "x"]


@pytest.mark.parametrize(
    ("way", "negative", "scale", "zeros", "expected"),
    [
        (FLUX, "x", 3.0, False, "x"),
        (FLUX, "x", 1.0, False, None),
        (FLUX, "x", None, False, None),
        (FLUX, None, 3.0, False, None),
        (SDXL, None, 5.0, False, ""),
        (SDXL, None, 5.0, True, ZEROS),
        (SDXL, "", 5.0, True, ""),
        (SDXL, "x", 0.5, True, None),
        (WAYS["Flux2Pipeline"], "x", 4.0, False, None),
    ],
)
def test_the_negative_prompt(way: Any, negative: str | None, scale: float | None, zeros: bool, expected: Any) -> None:
    assert wanted_of(request(negative_prompt=negative), way, scale, zeros).negative is expected


def row(value: float, tokens: int = 3) -> dict[str, torch.Tensor]:
    return {"prompt_embeds": torch.full((1, tokens, 2), value), "pooled_prompt_embeds": torch.full((1, 2), value)}


def test_pictures_of_a_request_stand_together() -> None:
    rows = {"a": row(1), "b": row(2), "x": row(-1), "y": row(-2)}
    wanted = [
        wanted_of(request("a", negative_prompt="y", num_images=2), FLUX, 3.0, False),
        wanted_of(request("b", negative_prompt="x", num_images=1), FLUX, 3.0, False),
    ]
    arguments = to_arguments(FLUX, wanted, rows, CPU)
    assert arguments["prompt_embeds"][:, 0, 0].tolist() == [1, 1, 2]
    assert arguments["pooled_prompt_embeds"][:, 0].tolist() == [1, 1, 2]
    assert arguments["negative_prompt_embeds"][:, 0, 0].tolist() == [-2, -2, -1]
    assert arguments["negative_pooled_prompt_embeds"][:, 0].tolist() == [-2, -2, -1]
    assert set(to_arguments(FLUX, [wanted_of(request("a"), FLUX, 3.0, False)], rows, CPU)) == set(row(1))


def test_zeros_for_a_negative_prompt() -> None:
    arguments = to_arguments(SDXL, [wanted_of(request("a"), SDXL, 5.0, True)], {"a": row(1)}, CPU)
    assert not arguments["negative_prompt_embeds"].any() and arguments["prompt_embeds"].all()
    assert arguments["negative_prompt_embeds"].shape == (1, 3, 2)


def test_rows_that_a_request_came_with() -> None:
    wanted = [wanted_of(request("label", negative_prompt="x", embeds=row(7)), FLUX, 3.0, False)]
    assert different_texts(wanted) == ["x"]
    arguments = to_arguments(FLUX, wanted, {"x": row(-1)}, CPU)
    assert arguments["prompt_embeds"].unique().item() == 7
    both = row(7) | {f"negative_{name}": value for name, value in row(-7).items()}
    wanted = [wanted_of(request("label", negative_prompt="x", embeds=both), FLUX, 3.0, False)]
    assert different_texts(wanted) == []
    assert to_arguments(FLUX, wanted, {}, CPU)["negative_prompt_embeds"].unique().item() == -7


def test_padding_is_cut_off_and_made_again() -> None:
    embeds = torch.arange(1.0, 17.0).view(2, 4, 2)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    rows = [trim(QWEN, {"prompt_embeds": embeds[i : i + 1], "prompt_embeds_mask": mask[i : i + 1]}) for i in (0, 1)]
    assert [list(each) for each in rows] == [["prompt_embeds"]] * 2
    assert [each["prompt_embeds"].shape[1] for each in rows] == [4, 2]
    batch = stack(QWEN, rows)
    assert torch.equal(batch["prompt_embeds_mask"], mask)
    assert torch.equal(batch["prompt_embeds"][0], embeds[0])
    assert torch.equal(batch["prompt_embeds"][1, :2], embeds[1, :2]) and not batch["prompt_embeds"][1, 2:].any()
    assert "prompt_embeds_mask" not in stack(QWEN, rows[1:])  # as Diffusers has it where all are as long


# One call of encode_prompt.


class FluxPipeline:
    """Encodes a text to its length; says what it was called with."""

    def __init__(self, num_values: int = 3, extra_rows: int = 0) -> None:
        self.calls: list[dict[str, Any]] = []
        self.num_values, self.extra_rows = num_values, extra_rows

    def __call__(
        self, prompt: Any = None, clip_skip: int = 7, max_sequence_length: int = 5, prompt_embeds: Any = 0
    ) -> None:
        raise NotImplementedError

    def encode_prompt(
        self,
        prompt: Any,
        prompt_2: Any,
        device: Any = None,
        num_images_per_prompt: int = 4,
        prompt_embeds: Any = None,
        max_sequence_length: int = 99,
        clip_skip: int | None = None,
        do_classifier_free_guidance: bool = True,
    ) -> Any:
        self.calls.append(dict(locals()))
        embeds = torch.tensor([[[float(len(text))]] for text in prompt] + [[[0.0]]] * self.extra_rows)
        return (embeds, embeds[:, 0], torch.zeros(3))[: self.num_values]


def test_texts_are_encoded_in_one_call_with_the_defaults_of_the_pipelines_call() -> None:
    pipe = FluxPipeline()
    assert way_of(pipe) is FLUX
    options = encode_options(pipe)
    assert options == {"clip_skip": 7, "max_sequence_length": 5}
    rows = encode_texts(pipe, FLUX, ["a", "abc"], options, CPU)
    assert [each["prompt_embeds"].item() for each in rows] == [1, 3]
    assert [list(each) for each in rows] == [["prompt_embeds", "pooled_prompt_embeds"]] * 2
    (call,) = pipe.calls
    assert call["prompt"] == ["a", "abc"] and call["prompt_2"] is None and call["prompt_embeds"] is None
    assert (call["clip_skip"], call["max_sequence_length"], call["num_images_per_prompt"]) == (7, 5, 1)
    assert call["do_classifier_free_guidance"] is False


def test_an_encode_prompt_that_has_changed_is_an_error() -> None:
    with pytest.raises(EncodeError, match="returned 2 values and not 3"):
        encode_texts(FluxPipeline(num_values=2), FLUX, ["a"], {}, CPU)
    with pytest.raises(EncodeError, match="prompt_embeds has 2 rows for 1 texts"):
        encode_texts(FluxPipeline(extra_rows=1), FLUX, ["a"], {}, CPU)


# Progress, offload, bytes.


def test_a_pipelines_own_bar_tells_the_steps() -> None:
    notes: list[Progress] = []
    timeline = Timeline(notes.append)
    pipe = SimpleNamespace(vae=SimpleNamespace(decode=lambda x: x + 1))
    plain = pipe.vae.decode
    with watched(pipe, timeline, CPU):
        with pipe.progress_bar(total=2) as bar:
            bar.set_description("drawing")
            bar.update()
            bar.update()
        assert list(pipe.progress_bar([5, 6])) == [5, 6]
        assert pipe.vae.decode(1) == 2
    assert not hasattr(pipe, "progress_bar")
    assert pipe.vae.decode is plain
    steps = [(note.step, note.total) for note in notes if note.stage == "denoise"]
    assert steps == [(0, 2), (1, 2), (2, 2)] * 2
    assert [note.step for note in notes if note.stage == "decode"] == [0, 1]
    table = timeline.table()
    assert table.shape == (len(STAGES), 2) and table[0].isnan().all()
    assert (table[1:, 0] <= table[1:, 1]).all() and table[1, 1] <= table[2, 0]


def test_encoders_come_home_even_after_an_error() -> None:
    moves: list[str] = []

    class Encoder(nn.Linear):
        def to(self, device: Any) -> Any:
            moves.append(str(device))
            return self

    encoder = Encoder(1, 1)
    pipe = SimpleNamespace(text_encoder=encoder)
    offload = Offload({"text_encoder": encoder}, torch.device("meta"), True)
    with pytest.raises(ZeroDivisionError), offload.on_device():
        1 / 0  # noqa: B018
    assert moves == ["meta", "cpu"]
    with pytest.raises(ZeroDivisionError), offload.hidden_from(pipe):
        assert pipe.text_encoder is None
        1 / 0  # noqa: B018
    assert pipe.text_encoder is encoder
    still = Offload({"text_encoder": encoder}, CPU, False)
    with still.on_device(), still.hidden_from(pipe):
        assert pipe.text_encoder is encoder
    assert len(moves) == 2


def test_pictures_become_bytes_as_diffusers_rounds_them() -> None:
    pictures = torch.rand(2, 3, 4, 5)
    pictures[0, 0, 0, :3] = torch.tensor([0.0, 1.0, 0.5])
    found = to_bytes(pictures)
    assert found.shape == (2, 1, 4, 5, 3) and found.dtype == torch.uint8
    numpy = pictures.permute(0, 2, 3, 1).numpy()
    assert (found[:, 0].numpy() == (numpy * 255).round().astype("uint8")).all()
    assert to_bytes(torch.rand(2, 7, 3, 4, 5)).shape == (2, 7, 4, 5, 3)
    pictures[1, 2, 3, 4] = float("nan")
    with pytest.raises(EncodeError, match=r"1 of 2 pictures hold NaN.*float32"):
        to_bytes(pictures)


# What a folder may say.


def write(folder: Path, **entries: Any) -> Path:
    (folder / "model_index.json").write_text(json.dumps(entries))
    return folder


def test_a_folder_that_is_no_pipeline(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model_index\.json"):
        find_pipeline(str(tmp_path))
    (tmp_path / "model_index.json").write_text("[")
    with pytest.raises(ConfigError, match="can't be read"):
        read_index(tmp_path)
    (tmp_path / "model_index.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must be an object"):
        read_index(tmp_path)


@pytest.mark.parametrize("entry", [["my_code", "MyModel"], ["os", "system"], ["_hidden", "X"], [3, "X"]])
def test_code_that_comes_with_a_model_is_refused(tmp_path: Path, entry: list[Any]) -> None:
    write(tmp_path, _class_name="FluxPipeline", transformer=entry)
    with pytest.raises(ConfigError, match="is never run"):
        open_pipeline(PipelineSpec(str(tmp_path), PipelineLayout()), group=None, device=CPU)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "_class_name=None is no pipeline"),
        ("NoSuchPipeline", "'NoSuchPipeline' is no pipeline of diffusers"),
        ("FluxTransformer2DModel", "is no pipeline"),
        (["my", "Pipe"], "is no pipeline"),
        ("WanImageToVideoPipeline", "needs image beside a prompt"),
    ],
)
def test_a_class_that_does_not_draw_from_a_prompt(name: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline_class({"_class_name": name})
    assert pipeline_class({"_class_name": "FluxPipeline"}) is diffusers.FluxPipeline


def test_components_that_are_spread() -> None:
    index = {
        "text_encoder": ["transformers", "CLIPTextModel"],
        "image_encoder": ["transformers", "CLIPVisionModel"],
        "vocoder": ["transformers", "SpeechT5HifiGan"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "text_encoder_2": [None, None],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    assert list(spread_components(index)) == ["text_encoder", "image_encoder"]
    with pytest.raises(ConfigError, match="text_encoder: NoModel is no class of transformers"):
        spread_components({"text_encoder": ["transformers", "NoModel"]})


def test_precision(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    index = {"transformer": ["diffusers", "FluxTransformer2DModel"]}
    (tmp_path / "transformer").mkdir()
    save_file({"w": torch.zeros(2, dtype=torch.float16)}, tmp_path / "transformer" / "model.safetensors")
    assert pipeline_dtype(None, tmp_path, index, CPU) == torch.float32
    assert pipeline_dtype(None, tmp_path, index, torch.device("cuda")) == torch.float16
    assert pipeline_dtype("bfloat16", tmp_path, index, torch.device("cuda")) == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype='int8' is no floating-point"):
        pipeline_dtype("int8", tmp_path, index, CPU)


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)
    vae.save_pretrained(tmp_path / "vae", safe_serialization=False)
    scheduler.save_pretrained(tmp_path / "scheduler")
    absent = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer")
    write(
        tmp_path,
        _class_name="FluxPipeline",
        vae=["diffusers", "AutoencoderKL"],
        scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"],
        **{name: [None, None] for name in absent},
    )
    with pytest.raises(CheckpointError, match="safetensors"):
        open_pipeline(PipelineSpec(str(tmp_path), PipelineLayout()), group=None, device=CPU)


def test_defaults_of_a_folder(tmp_path: Path) -> None:
    known = frozenset({"height", "guidance_scale"})
    assert read_defaults(tmp_path, known) == {}
    path = tmp_path / "generation_defaults.json"
    path.write_text('{"height": 64, "guidance_scale": 2.5}')
    assert read_defaults(tmp_path, known) == {"height": 64, "guidance_scale": 2.5}
    for text, message in (
        ("{", "can't be read"),
        ("[]", "list"),
        ('{"hight": 1}', "hight"),
        ('{"height": "1"}', "'1'"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_defaults(tmp_path, known)


# Requests.

REPORT = PipelineReport(
    pipeline_class="FluxPipeline",
    is_video=False,
    dtype="float32",
    plans={},
    summaries={},
    defaults={"height": 64, "width": 64, "num_inference_steps": 4, "max_sequence_length": 20},
    splits="",
    multiple=16,
    accepts=(
        "prompt", "seed", "num_images", "height", "width", "num_inference_steps", "guidance_scale", "true_cfg_scale",
        "max_sequence_length", "negative_prompt", "embeds",
    ),
    max_tokens=512,
    embeds={
        name: EmbedFacts(shape, "float32")
        for prefix in ("", "negative_")
        for name, shape in ((f"{prefix}prompt_embeds", (1, None, 8)), (f"{prefix}pooled_prompt_embeds", (1, 4)))
    },
    needed_embeds=("prompt_embeds", "pooled_prompt_embeds"),
)  # fmt: skip
VIDEO = replace(REPORT, is_video=True, accepts=(*REPORT.accepts, "num_frames"), frame_step=4)
ONE_RANK = PipelineLayout()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": 3}, "prompt is a int"),
        ({"prompt": "a \ud800"}, "half of a surrogate pair at place 2"),
        ({"negative_prompt": "\udfff"}, "negative_prompt holds half"),
        ({"height": 40}, "height=40 is no multiple of 16; use 32 or 48"),
        ({"width": 8}, "width=8 is no multiple of 16; use 16"),
        ({"height": 0}, "height=0 must be"),
        ({"height": 64.0}, r"height=64\.0 must be a whole number"),
        ({"num_inference_steps": 0}, "num_inference_steps=0 must be"),
        ({"num_images": 0}, "num_images=0"),
        ({"num_images": True}, "num_images=True"),
        ({"num_frames": 5}, "FluxPipeline takes no num_frames"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan must be a finite"),
        ({"true_cfg_scale": -1.0}, "at least 0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63 - 1, "num_images": 2}, "seed="),
        ({"max_sequence_length": 513}, "max_sequence_length=513 is more than FluxPipeline takes: 512"),
    ],
)
def test_a_request_that_can_not_be_honoured(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_request(replace(request(), **fields), REPORT, ONE_RANK)
    check_request(request(""), REPORT, ONE_RANK)


def test_frames_of_a_video() -> None:
    check_request(request(num_frames=5), VIDEO, ONE_RANK)
    with pytest.raises(InputError, match="num_frames=7 must be 1 more than a multiple of 4; use 5 or 9"):
        check_request(request(num_frames=7), VIDEO, ONE_RANK)


def test_shares_of_ranks_that_split_the_dit() -> None:
    three = PipelineLayout(ulysses=3)
    check_request(request(height=48), REPORT, three)
    with pytest.raises(InputError, match="16 picture tokens of 64 x 64 can't be cut into 3"):
        check_request(request(), REPORT, three)
    with pytest.raises(InputError, match=r"20 prompt tokens \(max_sequence_length\)"):
        check_request(request(height=48), replace(REPORT, cuts_text=True), three)


def embeds(**changes: Any) -> dict[str, Any]:
    return {"prompt_embeds": torch.ones(1, 5, 8), "pooled_prompt_embeds": torch.ones(1, 4), **changes}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt_embeds": torch.ones(1, 5, 8)}, "lack pooled_prompt_embeds"),
        (embeds(other=torch.ones(1)), "takes no other; it takes prompt_embeds"),
        (embeds(prompt_embeds=torch.ones(2, 5, 8)), r"has shape \[2, 5, 8\]; it must be \[1, 'tokens', 8\]"),
        (embeds(prompt_embeds=torch.ones(1, 0, 8)), r"shape \[1, 0, 8\]"),
        (embeds(prompt_embeds=torch.ones(1, 8)), r"shape \[1, 8\]"),
        (embeds(prompt_embeds=torch.ones(1, 5, 9)), r"shape \[1, 5, 9\]"),
        (embeds(prompt_embeds=torch.ones(1, 5, 8).half()), "is float16; it must be float32"),
        (embeds(prompt_embeds=[1.0]), "is a list"),
        (embeds(pooled_prompt_embeds=torch.tensor([[1, float("nan"), float("inf"), 1]])), "holds 2 numbers"),
        (embeds(negative_prompt_embeds=torch.ones(1, 5, 8)), "lack negative_pooled_prompt_embeds"),
    ],
)
def test_embeds_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_request(request(embeds=given), REPORT, ONE_RANK)


def test_embeds_that_fit() -> None:
    extra = {"text_encoder.hidden_states.2": torch.tensor(float("nan"))}
    check_request(request(embeds={**embeds(), **extra}), REPORT, ONE_RANK)


def test_masks_of_embeds() -> None:
    facts = {
        "prompt_embeds": EmbedFacts((1, None, 8), "float32"),
        "prompt_embeds_mask": EmbedFacts((1, None), "int64"),
    }
    report = replace(REPORT, embeds=facts, needed_embeds=("prompt_embeds",))

    def check(mask: torch.Tensor) -> None:
        rows = {"prompt_embeds": torch.ones(1, 3, 8), "prompt_embeds_mask": mask}
        check_request(request(embeds=rows), report, ONE_RANK)

    check(torch.tensor([[1, 1, 0]]))
    check(torch.tensor([[True, True, False]]))
    with pytest.raises(InputError, match="different numbers of tokens"):
        check(torch.ones(1, 2, dtype=torch.long))
    with pytest.raises(InputError, match="behind its padding"):
        check(torch.tensor([[1, 0, 1]]))
