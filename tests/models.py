"""Small random models of every family, built from the real configuration classes.

Widths are real enough for a wrong fold to show: K >= 1024 and no multiple of 192, head counts that don't divide by 4,
key-value heads fewer than ranks, a vocabulary that is prime.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers as hf
from torch import nn
from transformers.initialization import no_init_weights

HIDDEN = 1088  # 17 heads of 64
WIDTH = 2816  # 44 units of 64
VOCAB = 997
LENGTH = 13
IMAGE_SIZE = 56
PATCH_SIZE = 14

TOKENS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT_LIKE = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": 17,
    "num_hidden_layers": 2,
    **TOKENS,
}
VISION_LIKE = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": 17,
    "num_hidden_layers": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}
LLAMA_LIKE = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    **TOKENS,
}
T5_LIKE = {"d_model": HIDDEN, "d_ff": WIDTH, "num_heads": 17, "d_kv": 64, "num_layers": 2, **TOKENS}
GATED = {"feed_forward_proj": "gated-gelu"}


@dataclass(frozen=True)
class Model:
    """One row of the equivalence matrix: how to build the model, and what it takes."""

    name: str
    build: Callable[[], nn.Module]
    kind: str = "text"  # text, image, patches
    vocab: int = VOCAB


def _qwen2_5_vl() -> nn.Module:
    text = {**LLAMA_LIKE, "hidden_size": 1024, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
    text.pop("head_dim")
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 1024}
    ids = {"image_token_id": 900, "video_token_id": 901, "vision_start_token_id": 902, "vision_end_token_id": 903}
    return hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def _mistral3() -> nn.Module:
    text = {"model_type": "mistral", **LLAMA_LIKE, "num_key_value_heads": 4}
    vision = {"model_type": "pixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    vision.update(num_attention_heads=2, head_dim=32, image_size=IMAGE_SIZE, patch_size=PATCH_SIZE)
    config = hf.Mistral3Config(text_config=text, vision_config=vision, image_token_index=900)
    return hf.Mistral3ForConditionalGeneration(config)


def _gemma3() -> nn.Module:
    text = {"model_type": "gemma3_text", **LLAMA_LIKE, "num_key_value_heads": 4, "sliding_window": 8}
    vision = {"model_type": "siglip_vision_model", **VISION_LIKE}
    config = hf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=900, boi_token_index=901,
        eoi_token_index=902,
    )  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(config)


MODELS = (
    Model("T5", lambda: hf.T5EncoderModel(hf.T5Config(**T5_LIKE, **GATED))),
    Model("T5 (relu)", lambda: hf.T5EncoderModel(hf.T5Config(**T5_LIKE))),
    Model("mT5", lambda: hf.MT5EncoderModel(hf.MT5Config(**T5_LIKE))),
    Model("UMT5", lambda: hf.UMT5EncoderModel(hf.UMT5Config(**T5_LIKE))),
    Model("CLIP text", lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**BERT_LIKE, projection_dim=HIDDEN))),
    Model(
        "CLIP text + projection",
        lambda: hf.CLIPTextModelWithProjection(hf.CLIPTextConfig(**BERT_LIKE, projection_dim=1024)),
    ),
    Model("CLIP vision", lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION_LIKE)), "image"),
    Model(
        "CLIP vision + projection",
        lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**VISION_LIKE, projection_dim=1024)),
        "image",
    ),
    Model("SigLIP text", lambda: hf.SiglipTextModel(hf.SiglipTextConfig(**BERT_LIKE, projection_size=1024))),
    Model("SigLIP vision", lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION_LIKE)), "image"),
    Model("SigLIP2 text", lambda: hf.Siglip2TextModel(hf.Siglip2TextConfig(**BERT_LIKE, projection_size=1024))),
    Model(
        "SigLIP2 vision",
        lambda: hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**{**VISION_LIKE, "image_size": None}, num_patches=16)),
        "patches",
    ),
    Model("ViT", lambda: hf.ViTModel(hf.ViTConfig(**VISION_LIKE)), "image"),
    Model("DINOv2", lambda: hf.Dinov2Model(hf.Dinov2Config(**VISION_LIKE)), "image"),
    Model(
        "DINOv2 (SwiGLU)",
        lambda: hf.Dinov2Model(hf.Dinov2Config(**VISION_LIKE, use_swiglu_ffn=True, mlp_ratio=6)),
        "image",
    ),
    Model("DINOv2 (odd width)", lambda: hf.Dinov2Model(hf.Dinov2Config(**VISION_LIKE, use_swiglu_ffn=True)), "image"),
    Model("BERT", lambda: hf.BertModel(hf.BertConfig(**BERT_LIKE))),
    Model("RoBERTa", lambda: hf.RobertaModel(hf.RobertaConfig(**BERT_LIKE))),
    Model("XLM-R", lambda: hf.XLMRobertaModel(hf.XLMRobertaConfig(**BERT_LIKE))),
    Model(
        "ModernBERT",
        lambda: hf.ModernBertModel(hf.ModernBertConfig(**BERT_LIKE, cls_token_id=1, sep_token_id=2, local_attention=8)),
    ),
    Model("Llama", lambda: hf.LlamaModel(hf.LlamaConfig(**LLAMA_LIKE))),
    Model("Mistral", lambda: hf.MistralModel(hf.MistralConfig(**LLAMA_LIKE))),
    Model("Mistral3", _mistral3),
    Model(
        "Qwen2",
        lambda: hf.Qwen2Model(hf.Qwen2Config(**{**LLAMA_LIKE, "num_attention_heads": 17, "num_key_value_heads": 1})),
    ),
    Model("Qwen2.5-VL", _qwen2_5_vl),
    Model("Qwen3", lambda: hf.Qwen3Model(hf.Qwen3Config(**LLAMA_LIKE))),
    Model("Gemma 2", lambda: hf.Gemma2Model(hf.Gemma2Config(**LLAMA_LIKE, query_pre_attn_scalar=64, sliding_window=8))),
    Model("Gemma 3 text", lambda: hf.Gemma3TextModel(hf.Gemma3TextConfig(**LLAMA_LIKE, sliding_window=8))),
    Model("Gemma 3", _gemma3),
)
BY_NAME = {model.name: model for model in MODELS}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Return a model with random weights: matrices scaled to keep activations near 1, other parameters off 0 and 1."""
    with no_init_weights():
        module = BY_NAME[name].build().eval()
    module.tie_weights()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(mean=0.5, std=0.2)
    return module.to(dtype).requires_grad_(False)


def inputs(name: str, num_rows: int, dtype: torch.dtype = torch.float32, length: int = LENGTH, seed: int = 1) -> dict:
    """Return a batch for a model: texts of different lengths, padded on the right, or images."""
    model = BY_NAME[name]
    generator = torch.Generator().manual_seed(seed)
    if model.kind == "image":
        pixels = torch.randn(num_rows, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
        return {"pixel_values": pixels.to(dtype)}
    if model.kind == "patches":
        pixels = torch.randn(num_rows, 16, 3 * PATCH_SIZE**2, generator=generator)
        mask = torch.ones(num_rows, 16, dtype=torch.long)
        mask[1::2, 12:] = 0
        shapes = torch.tensor([[4, 4], [3, 4]] * (num_rows + 1))[:num_rows]
        return {"pixel_values": pixels.to(dtype), "pixel_attention_mask": mask, "spatial_shapes": shapes}
    ids = torch.randint(3, 890, (num_rows, length), generator=generator)
    mask = torch.ones(num_rows, length, dtype=torch.long)
    for row in range(1, num_rows, 2):  # even rows have no padding: some ranks of a dp split see no mask at all
        mask[row, length - 1 - (3 * row) % (length - 1) :] = 0
    return {"input_ids": ids.where(mask.bool(), torch.tensor(0)), "attention_mask": mask}
