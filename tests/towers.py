"""Small random vision towers of every family, built from the real configuration classes, and sets of images for them.

Widths are real enough for a wrong cut to show: no multiple of 192, Qwen3-VL with K >= 1024, an MLP width that is no
multiple of 64.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers as hf
from torch import nn
from transformers.initialization import no_init_weights
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

HIDDEN, WIDTH, OUT, HEADS = 1088, 2872, 1024, 16
SMALL = {"hidden_size": 544, "intermediate_size": 1436, "num_heads": 8, "depth": 2}
IMAGE_SIZE, PATCH_SIZE = 70, 14


def qwen3_vl(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_heads": HEADS, "depth": 2, "out_hidden_size": OUT}
    others = {"num_position_embeddings": 144, "deepstack_visual_indexes": [0]}
    return hf.Qwen3VLVisionModel(Qwen3VLVisionConfig(**{**sizes, **others, **changes}))


def qwen3_5() -> nn.Module:
    return Qwen3_5VisionModel(Qwen3_5VisionConfig(**SMALL, out_hidden_size=512, num_position_embeddings=144))


def qwen2_5_vl(**changes: Any) -> nn.Module:
    others = {"out_hidden_size": 512, "fullatt_block_indexes": [1]}
    return Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**{**SMALL, **others, **changes}))


def qwen2_vl() -> nn.Module:
    config = Qwen2VLVisionConfig(embed_dim=544, hidden_size=512, num_heads=8, depth=2)
    return Qwen2VisionTransformerPretrainedModel(config)


def siglip() -> nn.Module:
    sizes = {"hidden_size": 544, "intermediate_size": 1436, "num_attention_heads": 8, "num_hidden_layers": 2}
    return hf.SiglipVisionModel(hf.SiglipVisionConfig(**sizes, image_size=IMAGE_SIZE, patch_size=PATCH_SIZE))


TOWERS: dict[str, Callable[[], nn.Module]] = {
    "Qwen3-VL": qwen3_vl,
    "Qwen2.5-VL": qwen2_5_vl,
    "Qwen2-VL": qwen2_vl,
    "Qwen3.5": qwen3_5,
    "SigLIP": siglip,
}

IMAGES: dict[str, list[tuple[int, int, int]]] = {
    "no image": [],
    "1 image": [(1, 10, 14)],
    "2 equal": [(1, 8, 12)] * 2,
    "3 mixed": [(1, 6, 4), (1, 12, 10), (1, 2, 8)],
    "5 equal": [(1, 6, 8)] * 5,
    "5 mixed": [(1, 2, 2), (1, 14, 6), (1, 4, 22), (1, 10, 10), (1, 2, 6)],
    "one huge, three small": [(1, 4, 6), (1, 20, 22), (1, 6, 4), (1, 4, 4)],
    "two videos, one image": [(3, 4, 6), (1, 8, 6), (2, 10, 4)],
}
"""(frames, rows, columns) in patches. Blocks are of BLOCK_SIZE: the huge one is larger than a block."""

BLOCK_SIZE = 256


@lru_cache(maxsize=2)
def plain(name: str, dtype: torch.dtype) -> nn.Module:
    with no_init_weights():
        module = TOWERS[name]()
    return randomize(module).to(dtype).eval()


def randomize(module: nn.Module, seed: int = 3) -> nn.Module:
    """Give every parameter, biases and norms too, random values of a size that keeps signals alive."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.data = noise / parameter[0].numel() ** 0.5
        else:
            parameter.data = noise * 0.1 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
    return module


def images(name: str, which: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the arguments of a tower's call for one set of images."""
    grids = IMAGES[which]
    generator = torch.Generator().manual_seed(len(which))
    if name == "SigLIP":
        count = sum(frames for frames, _, _ in grids)
        return {"pixel_values": torch.randn(count, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator).to(dtype)}
    features = 3 * 2 * (16 if name in ("Qwen3-VL", "Qwen3.5") else 14) ** 2
    num_patches = sum(frames * height * width for frames, height, width in grids)
    return {
        "hidden_states": torch.randn(num_patches, features, generator=generator).to(dtype),
        "grid_thw": torch.tensor(grids, dtype=torch.int64).view(-1, 3),
    }


def outputs(output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a tower's output by name."""
    named = {"last_hidden_state": output.last_hidden_state, "pooler_output": output.pooler_output}
    levels = getattr(output, "deepstack_features", None) or []
    named.update({f"deepstack {number}": level for number, level in enumerate(levels)})
    return {name: value for name, value in named.items() if value is not None}
