"""The table of pipelines, each row against Diffusers' own call: prepared conditioning draws what prompts draw.

Encoders are narrow here and there is one rank; wide ones on several ranks are in tests/dist/test_generate.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers as hf

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

import pipelines

from enfold.diffusion.conditioning import WAYS
from enfold.diffusion.drawing import Timeline
from enfold.diffusion.layout import PipelineLayout
from enfold.diffusion.requests import GenerateRequest, PipelineSpec, Progress
from enfold.diffusion.worker import PipelineWorker
from enfold.errors import InputError

WIDTH = 64
CLIP = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**pipelines.CLIP, **CLIP, "projection_dim": WIDTH}
T5 = {"d_model": WIDTH, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 1, "vocab_size": 997}


def made(module: Any, seed: int) -> Any:
    return pipelines.randomized(module, torch.float32, seed)


def t5() -> Any:
    return made(hf.T5EncoderModel(hf.T5Config(**T5, feed_forward_proj="gated-gelu")), 0)


def vae(**sizes: Any) -> Any:
    return made(diffusers.AutoencoderKL(**{"block_out_channels": (8,), "norm_num_groups": 4, **sizes}), 11)


def unet(**sizes: Any) -> Any:
    plain = {
        "block_out_channels": (16, 32),
        "layers_per_block": 1,
        "sample_size": 16,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 4,
        "attention_head_dim": 8,
    }
    return made(diffusers.UNet2DConditionModel(**plain, **sizes), 10)


def stable_diffusion() -> Any:
    return diffusers.StableDiffusionPipeline(
        vae=vae(),
        text_encoder=made(hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT)), 0),
        tokenizer=pipelines.clip_tokenizer(),
        unet=unet(cross_attention_dim=WIDTH),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        vae=vae(),
        text_encoder=made(hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT)), 0),
        text_encoder_2=made(hf.CLIPTextModelWithProjection(hf.CLIPTextConfig(**TEXT)), 1),
        tokenizer=pipelines.clip_tokenizer(),
        tokenizer_2=pipelines.clip_tokenizer(),
        unet=unet(
            cross_attention_dim=2 * WIDTH,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + WIDTH,
            use_linear_projection=True,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(),
        add_watermarker=False,
    )


def pixart() -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=32,  # of a few sizes that the pipeline knows, each with its own buckets of pixels
        num_layers=1,
        patch_size=2,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_channels=WIDTH,
        in_channels=4,
        cross_attention_dim=32,
        out_channels=8,
        use_additional_conditions=False,
    )
    return diffusers.PixArtSigmaPipeline(
        tokenizer=pipelines.t5_tokenizer(),
        text_encoder=t5(),
        vae=vae(
            block_out_channels=(8, 8, 8, 8),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        ),
        transformer=made(transformer, 10),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )


def chroma() -> Any:
    transformer = diffusers.ChromaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    return diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(latent_channels=4, shift_factor=0.1),
        text_encoder=t5(),
        tokenizer=pipelines.t5_tokenizer(),
        transformer=made(transformer, 10),
    )


def ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=1,
        caption_channels=WIDTH,
    )
    video_vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    )
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=made(video_vae, 11),
        text_encoder=t5(),
        tokenizer=pipelines.t5_tokenizer(),
        transformer=made(transformer, 10),
    )


def flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(shift_factor=0.1),
        text_encoder=made(hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT)), 0),
        tokenizer=pipelines.clip_tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=pipelines.t5_tokenizer(),
        transformer=made(transformer, 10),
    )


BUILDERS: dict[str, Callable[[], Any]] = {
    "StableDiffusionPipeline": stable_diffusion,
    "StableDiffusionXLPipeline": stable_diffusion_xl,
    "PixArtSigmaPipeline": pixart,
    "ChromaPipeline": chroma,
    "LTXPipeline": ltx,
    "FluxPipeline": flux,
}
SIZES: dict[str, dict[str, Any]] = {
    "LTXPipeline": {"num_frames": 9, "max_sequence_length": 16},
    "PixArtSigmaPipeline": {"max_sequence_length": 16},
    "ChromaPipeline": {"max_sequence_length": 16},
    "FluxPipeline": {"max_sequence_length": 16},
}


def worker_of(folder: Path) -> PipelineWorker:
    worker = PipelineWorker(rank=0, world_size=1, group=None, device=torch.device("cpu"))
    worker.load(PipelineSpec(str(folder), PipelineLayout()))
    return worker


def latents(worker: PipelineWorker, requests: list[GenerateRequest]) -> torch.Tensor:
    with torch.no_grad():
        return worker.loaded.pictures(requests, Timeline(lambda note: None), "latent")[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("negative", ["blurry", None])
@pytest.mark.parametrize("name", BUILDERS)
def test_prepared_conditioning_draws_what_prompts_draw(name: str, negative: str | None, tmp_path: Path) -> None:
    pipe = BUILDERS[name]()
    pipe.save_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    guidance = WAYS[name].guidance
    assert guidance is not None
    values = {"height": 32, "width": 32, "num_inference_steps": 2, guidance: 4.0, **SIZES.get(name, {})}
    with torch.no_grad():
        want = pipe(
            prompt=pipelines.PROMPTS[:2],
            **({} if negative is None else {"negative_prompt": [negative] * 2}),
            generator=[torch.Generator().manual_seed(seed) for seed in (5, 8)],
            output_type="latent",
            return_dict=False,
            **values,
        )[0]
    texts = [(pipelines.PROMPTS[0], 5), (pipelines.PROMPTS[1], 8)]
    requests = [GenerateRequest(text, seed, negative, **values) for text, seed in texts]
    worker = worker_of(tmp_path)
    found = latents(worker, requests)
    assert want.std() > 0.1
    assert (found - want).abs().max() <= 1e-4 * want.abs().max()
    others = [GenerateRequest(text, seed, "a large whale", **values) for text, seed in texts]
    assert (latents(worker, others) - want).abs().max() > 1e-3 * want.abs().max(), "the control"
    assert worker.generate(requests)[0].pictures.shape[2:] == (32, 32, 3)


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_that_is_not_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flux().save_pretrained(tmp_path)
    values: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 16}
    requests = [
        GenerateRequest(text, seed, "blurry", n, true_cfg_scale=3.0, **values)
        for text, seed, n in ((pipelines.PROMPTS[0], 5, 1), (pipelines.PROMPTS[1], 8, 2))
    ]
    want = latents(worker_of(tmp_path), requests)
    monkeypatch.setattr("enfold.diffusion.conditioning.WAYS", {})
    worker = worker_of(tmp_path)
    said = [record.getMessage() for record in caplog.records]
    assert sum("FluxPipeline is not known to take prepared embeddings" in text for text in said) == 1
    report = worker.loaded.report
    assert "embeds" not in report.accepts and "negative_prompt" in report.accepts and report.embeds == {}
    assert (latents(worker, requests) - want).abs().max() <= 1e-4 * want.abs().max()
    notes: list[Progress] = []
    worker.note = notes.append
    result = worker.generate(requests)[1]
    assert len(result.pictures) == 2 and (result.num_texts, result.cached_texts) == (0, 0)
    assert [span[0] for span in result.times[0].spans] == ["encode", "denoise", "decode"]
    assert {note.stage for note in notes} == {"encode", "denoise", "decode"}
    with pytest.raises(InputError, match="is not known to take prepared conditioning"):
        worker.encode(["a"], None, [])


@pytest.mark.filterwarnings("ignore")
def test_a_negative_prompt_without_effect_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flux().save_pretrained(tmp_path)
    worker = worker_of(tmp_path)
    values: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": 1, "max_sequence_length": 16}
    for _ in range(2):
        worker.generate([GenerateRequest("a", 1, "blurry", **values)])
    said = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert said == ["a negative prompt has no effect at true_cfg_scale=1.0; use more than 1"]
