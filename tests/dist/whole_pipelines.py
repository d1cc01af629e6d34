"""Tiny random Diffusers pipelines that draw, saved as folders: encoders of pipelines.py, and a DiT and a VAE each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import models
import pipelines
import torch
import transformers as hf

from enfold.diffusion.requests import GenerateRequest

DTYPE = torch.float32
SIDE = 32


def flux() -> Any:
    pipe = pipelines.flux(DTYPE, whole=True)
    pipe.register_modules(image_encoder=None, feature_extractor=None)
    return pipe


def sd3() -> Any:
    pipe = pipelines.sd3(DTYPE)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=2176,
        caption_projection_dim=64,
        pooled_projection_dim=1024 + 1088,
        pos_embed_max_size=32,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,), latent_channels=4, norm_num_groups=4, sample_size=16, shift_factor=0.1
    )
    pipe.register_modules(transformer=_randomized(transformer, 10), vae=_randomized(vae, 11))
    return pipe


def wan() -> Any:
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=models.HIDDEN,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    )
    vae = diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    config = hf.UMT5Config(**{**pipelines.T5, "num_layers": 1})
    return diffusers.WanPipeline(
        tokenizer=pipelines.t5_tokenizer(),
        text_encoder=_randomized(hf.UMT5EncoderModel(config), 0),
        vae=_randomized(vae, 11),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=_randomized(transformer, 10),
    )


def qwen_image() -> Any:
    pipe = pipelines.qwen_image(DTYPE)
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=1024,
        axes_dims_rope=(8, 4, 4),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    pipe.register_modules(transformer=_randomized(transformer, 10), vae=_randomized(vae, 11))
    return pipe


def _randomized(module: Any, seed: int) -> Any:
    return pipelines.randomized(module, DTYPE, seed)


BUILDERS: dict[str, Callable[[], Any]] = {"Flux": flux, "SD3": sd3, "Wan": wan, "QwenImage": qwen_image}

GUIDED = {"Flux": "true_cfg_scale", "QwenImage": "true_cfg_scale", "SD3": "guidance_scale", "Wan": "guidance_scale"}

DEFAULTS: dict[str, dict[str, Any]] = {
    "Flux": {"max_sequence_length": 16},
    "SD3": {"max_sequence_length": 16, "guidance_scale": 1.0},
    "Wan": {"max_sequence_length": 16, "num_frames": 5, "guidance_scale": 1.0},
    "QwenImage": {"max_sequence_length": 64, "true_cfg_scale": 1.0},
}
"""What generation_defaults.json says: nothing is guided unless a request asks for it."""


def save(name: str, folder: Path) -> Path:
    """Write a pipeline, with a generation_defaults.json of small sizes; equal names give equal weights."""
    BUILDERS[name]().save_pretrained(folder)
    defaults = {"height": SIDE, "width": SIDE, "num_inference_steps": 2, **DEFAULTS[name]}
    (folder / "generation_defaults.json").write_text(json.dumps(defaults))
    return folder


def plain(folder: str) -> Any:
    """Return a saved pipeline as Diffusers loads it."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=DTYPE)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw_plain(name: str, pipe: Any, requests: list[GenerateRequest], output_type: str) -> torch.Tensor:
    """Return what the plain pipeline draws for the texts of requests: the strongest reference."""
    first = requests[0]
    arguments: dict[str, Any] = {"height": SIDE, "width": SIDE, "num_inference_steps": 2, **DEFAULTS[name]}
    scale = getattr(first, GUIDED[name])
    if scale is not None:
        arguments[GUIDED[name]] = scale
        arguments["negative_prompt"] = [each.negative_prompt for each in requests for _ in range(each.num_images)]
    seeds = [each.seed + i for each in requests for i in range(each.num_images)]
    with torch.no_grad():
        output = pipe(
            prompt=[each.prompt for each in requests for _ in range(each.num_images)],
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type=output_type,
            return_dict=False,
            **arguments,
        )[0]
    return output if isinstance(output, torch.Tensor) else torch.as_tensor(output)
