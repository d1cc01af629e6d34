"""Small random vision-language models from the real configuration classes, and prompts with images and videos for them.

A prompt is a list of parts: a number of text tokens, or ("image" | "video", (frames, rows, columns)) in patches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from towers import randomize
from transformers.initialization import no_init_weights
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

IMAGE, VIDEO, START, END = 390, 391, 392, 393
VOCAB = 400
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [8, 4, 4]},
}
TOWER = {"depth": 3, "hidden_size": 256, "intermediate_size": 520, "num_heads": 4, "out_hidden_size": 128}


def qwen3_vl() -> nn.Module:
    vision = {**TOWER, "num_position_embeddings": 144, "deepstack_visual_indexes": [2, 0]}
    return hf.Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config={**TEXT, "head_dim": 32}, vision_config=vision, **TOKENS)
    )


def qwen2_5_vl() -> nn.Module:
    vision = {**TOWER, "fullatt_block_indexes": [1]}
    return hf.Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision, **TOKENS))


def qwen2_vl() -> nn.Module:
    vision = {"depth": 2, "embed_dim": 256, "hidden_size": 128, "num_heads": 4}
    return hf.Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=TEXT, vision_config=vision, **TOKENS))


VLMS: dict[str, Callable[[], nn.Module]] = {
    "Qwen3-VL": qwen3_vl,
    "Qwen2.5-VL": qwen2_5_vl,
    "Qwen2-VL": qwen2_vl,
}

PROMPTS: dict[str, list[Any]] = {
    "text only": [9],
    "one image": [3, ("image", (1, 8, 12)), 5],
    "several images": [2, ("image", (1, 8, 4)), 3, ("image", (1, 14, 10)), ("image", (1, 2, 6)), 4],
    "image, video, image": [2, ("image", (1, 6, 8)), 2, ("video", (3, 4, 6)), 3, ("image", (1, 4, 4)), 3],
    "two videos": [2, ("video", (2, 6, 4)), 4, ("video", (5, 4, 8)), 3],
}
NUM_CALLS = {"text only": 0, "one image": 1, "several images": 1, "image, video, image": 2, "two videos": 1}
"""How often a model calls its tower for a prompt: once for all images and once for all videos."""


def build(name: str) -> nn.Module:
    with no_init_weights():
        model = VLMS[name]()
    return randomize(model).eval()


def inputs(name: str, which: str) -> dict[str, torch.Tensor]:
    """Return the arguments of generate(), as a processor makes them, for one prompt."""
    generator = torch.Generator().manual_seed(len(which))
    ids: list[int] = []
    kinds: list[int] = []
    grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
    for part in PROMPTS[which]:
        if isinstance(part, int):
            ids += torch.randint(3, IMAGE, (part,), generator=generator).tolist()
            kinds += [0] * part
            continue
        kind, grid = part
        grids[kind].append(grid)
        for num_tokens in _runs(name, kind, grid):
            ids += [START, *[IMAGE if kind == "image" else VIDEO] * num_tokens, END]
            kinds += [0, *[1 if kind == "image" else 2] * num_tokens, 0]
    found = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    found["mm_token_type_ids"] = torch.tensor([kinds])
    features = 3 * 2 * (16 if name == "Qwen3-VL" else 14) ** 2
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if grids[kind]:
            total = sum(t * h * w for t, h, w in grids[kind])
            found[pixels] = torch.randn(total, features, generator=generator)
            found[f"{kind}_grid_thw"] = torch.tensor(grids[kind])
    return found


def _runs(name: str, kind: str, grid: tuple[int, int, int]) -> list[int]:
    """Return the lengths of the runs of placeholder tokens: Qwen3-VL puts a time stamp before each frame of a video."""
    frames, height, width = grid
    per_frame = height * width // 4
    return [per_frame] * frames if name == "Qwen3-VL" and kind == "video" else [per_frame * frames]
