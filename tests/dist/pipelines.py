"""Diffusers pipelines whose encoders are tiny and random, built from the real classes without a download.

Encoders are as wide as a wrong fold needs to show (1088 = 17 heads of 64), tokenizers know the characters and a few
words. Only `flux(whole=True)` has a transformer and a VAE: encode_prompt needs neither.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import diffusers
import models
import torch
import transformers as hf
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from torch import nn

diffusers.utils.logging.set_verbosity_error()

WORDS = "a the red green blue fox whale circle square above below sings jumps over small large and one two".split()
PROMPT = "A small red fox jumps over the blue whale"
PROMPTS = [PROMPT, "one green circle", "two large squares above and below the fox, the whale and one small red circle"]
NEGATIVE = ["blurry", "a large whale", ""]

CLIP = {**models.BERT_LIKE, "vocab_size": 640, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
T5 = {**models.T5_LIKE, "num_layers": 1, **models.GATED}
IMAGES = {**models.VISION_LIKE, "projection_dim": 1024}


def randomized(module: nn.Module, dtype: torch.dtype, seed: int) -> nn.Module:
    """Return the module with random weights of a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.flatten(1).shape[1] ** -0.5, generator=generator)
            else:
                parameter.normal_(mean=0.5, std=0.2, generator=generator)
    return module.eval().to(dtype)


def clip_tokenizer() -> hf.CLIPTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(f"{letter}</w>" for letter in alphabet)]
    return hf.CLIPTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[], model_max_length=77)


def t5_tokenizer() -> hf.T5TokenizerFast:
    letters = [chr(code) for code in range(33, 127)]
    pieces = [*(f"▁{word}" for word in WORDS), "▁", *letters]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    scored = [(piece, -1.0 - i / 100) for i, piece in enumerate(pieces)]
    return hf.T5TokenizerFast(vocab=[*special, *scored], extra_ids=0, model_max_length=512)


def qwen_tokenizer(template: str) -> hf.Qwen2Tokenizer:
    """Bytes, and the words of the pipeline's prompt template as one token each."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = hf.Qwen2Tokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[])
    marks = template.replace("<|im_start|>", " ").replace("<|im_end|>", " ")
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.add_tokens(sorted({word for word in marks.replace(",", " ").replace(":", " ").split() if len(word) > 3}))
    return tokenizer


def mistral_tokenizer() -> hf.PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(["<pad>", "<s>", "<unk>", "[INST]", *WORDS])}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # type: ignore[assignment]
    template = "{% for m in messages %}[INST] {{ m.role }} {{ m.content[0].text }} {% endfor %}"
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", unk_token="<unk>", chat_template=template
    )


def flux(dtype: torch.dtype, whole: bool = False) -> diffusers.FluxPipeline:
    encoders = {
        "text_encoder": hf.CLIPTextModel(hf.CLIPTextConfig(**CLIP)),
        "text_encoder_2": hf.T5EncoderModel(hf.T5Config(**T5)),
        "image_encoder": hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**IMAGES)),
    }
    return diffusers.FluxPipeline(
        **{name: randomized(module, dtype, seed) for seed, (name, module) in enumerate(encoders.items())},
        tokenizer=clip_tokenizer(),
        tokenizer_2=t5_tokenizer(),
        feature_extractor=hf.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=_flux_transformer(dtype) if whole else None,
        vae=_vae(dtype) if whole else None,
    )


def _flux_transformer(dtype: torch.dtype) -> nn.Module:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=models.HIDDEN,
        pooled_projection_dim=models.HIDDEN,
        axes_dims_rope=(4, 4, 8),
    )
    return randomized(transformer, dtype, 10)


def _vae(dtype: torch.dtype) -> nn.Module:
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,), latent_channels=4, norm_num_groups=4, sample_size=16, shift_factor=0.1
    )
    return randomized(vae, dtype, 11)


def sd3(dtype: torch.dtype) -> diffusers.StableDiffusion3Pipeline:
    narrow = {**CLIP, "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 2}
    encoders = {
        "text_encoder": hf.CLIPTextModelWithProjection(hf.CLIPTextConfig(**narrow, projection_dim=1024)),
        "text_encoder_2": hf.CLIPTextModelWithProjection(hf.CLIPTextConfig(**CLIP, projection_dim=1088)),
        "text_encoder_3": hf.T5EncoderModel(hf.T5Config(**{**T5, "d_model": 2176})),
    }
    return diffusers.StableDiffusion3Pipeline(
        **{name: randomized(module, dtype, seed) for seed, (name, module) in enumerate(encoders.items())},
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        tokenizer_3=t5_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=None,
        vae=None,
    )


def wan(dtype: torch.dtype) -> diffusers.WanImageToVideoPipeline:
    encoders = {
        "text_encoder": hf.UMT5EncoderModel(hf.UMT5Config(**{**T5, "num_layers": 2})),
        "image_encoder": hf.CLIPVisionModel(hf.CLIPVisionConfig(**IMAGES)),
    }
    return diffusers.WanImageToVideoPipeline(
        **{name: randomized(module, dtype, seed) for seed, (name, module) in enumerate(encoders.items())},
        tokenizer=t5_tokenizer(),
        image_processor=hf.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=None,
    )


def qwen_image(dtype: torch.dtype) -> diffusers.QwenImagePipeline:
    pipe = diffusers.QwenImagePipeline(
        text_encoder=randomized(models.BY_NAME["Qwen2.5-VL"].build(), dtype, 0),
        tokenizer=None,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=None,
        vae=None,
    )
    pipe.register_modules(tokenizer=qwen_tokenizer(pipe.prompt_template_encode))
    before, _, _ = pipe.prompt_template_encode.partition("{}")
    pipe.prompt_template_encode_start_idx = len(pipe.tokenizer(before).input_ids)
    return pipe


def flux2(dtype: torch.dtype) -> diffusers.Flux2Pipeline:
    return diffusers.Flux2Pipeline(
        text_encoder=randomized(models.BY_NAME["Mistral3"].build(), dtype, 0),
        tokenizer=mistral_tokenizer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        transformer=None,
        vae=None,
    )


PIPELINES: dict[str, Callable[[torch.dtype], Any]] = {
    "Flux": flux,
    "SD3": sd3,
    "Wan": wan,
    "QwenImage": qwen_image,
    "Flux2": flux2,
}


@lru_cache(maxsize=1)
def _built(name: str, dtype: torch.dtype) -> Any:
    return PIPELINES[name](dtype)


def build(name: str, dtype: torch.dtype) -> Any:
    """Return a new pipeline; equal names and precisions give equal weights."""
    return copy.deepcopy(_built(name, dtype))


def encode(name: str, pipe: Any, num_prompts: int) -> list[Any]:
    """Return all that the pipeline's own methods give for prompts (and negative prompts, and images)."""
    prompts = PROMPT if num_prompts == 1 else PROMPTS[:num_prompts]
    negative = NEGATIVE[0] if num_prompts == 1 else NEGATIVE[:num_prompts]
    if name == "Flux":
        found = [pipe.encode_prompt(prompts, max_sequence_length=32), pipe.encode_image(images(num_prompts), "cpu", 1)]
    elif name == "SD3":
        shared = {"prompt": prompts, "prompt_2": None, "prompt_3": None, "max_sequence_length": 16}
        guided = pipe.encode_prompt(**shared, negative_prompt=negative)
        found = [guided, pipe.encode_prompt(**shared, do_classifier_free_guidance=False, clip_skip=1)]
    elif name == "Wan":
        found = [pipe.encode_prompt(prompts, negative, max_sequence_length=48), pipe.encode_image(images(num_prompts))]
    elif name == "QwenImage":
        found = [pipe.encode_prompt(prompts)]
    else:
        found = [pipe.encode_prompt(prompts, max_sequence_length=64, text_encoder_out_layers=(0, 1, 2))]
    return [list(each) if isinstance(each, tuple) else each for each in found]


def images(num_images: int) -> list[Any]:
    """Return pictures of several sizes."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0)
    return [Image.fromarray(noise.integers(0, 256, (60 + 8 * i, 72, 3), dtype=np.uint8)) for i in range(num_images)]
