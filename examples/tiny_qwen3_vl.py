"""A Qwen3-VL of a few layers with random weights, from the real configuration class: nothing to download."""

from __future__ import annotations

import torch
import transformers as hf
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig


def tiny_qwen3_vl() -> hf.Qwen3VLForConditionalGeneration:
    torch.manual_seed(0)  # every rank makes the same weights
    text = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [8, 4, 4]},
    }
    vision = {
        "depth": 3,
        "hidden_size": 576,
        "intermediate_size": 2152,
        "num_heads": 8,
        "out_hidden_size": 256,
        "deepstack_visual_indexes": [0, 1],
    }
    ids = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
    return hf.Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **ids)).eval()
