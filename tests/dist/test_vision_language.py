"""generate() of a model whose vision tower is spread: the tokens of the plain model, the tower in prefill only."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import vlms
from ranks import Ranks
from safetensors.torch import load_file, save_file
from torch import nn

import enfold
from enfold import VisionParallelConfig
from enfold.errors import CheckpointError, ConfigError

NEW_TOKENS = 6


def generate(model: Any, name: str, which: str) -> list[int]:
    output = model.generate(**vlms.inputs(name, which), max_new_tokens=NEW_TOKENS, do_sample=False)
    tokens: list[int] = output[0].tolist()
    return tokens


@lru_cache(maxsize=1)
def plain(name: str) -> nn.Module:
    return vlms.build(name)


@lru_cache
def wanted(name: str) -> dict[str, list[int]]:
    with torch.no_grad():
        return {which: generate(plain(name), name, which) for which in vlms.PROMPTS}


def spread(group: dist.ProcessGroup, name: str, tp: int, dp: int) -> Any:
    config = VisionParallelConfig(tp_size=tp, dp_size=dp, vision_attention_block_size=128)
    return enfold.parallelize(vlms.build(name), vision=config, group=group)


def tokens_and_calls(group: dist.ProcessGroup, name: str, tp: int, dp: int) -> dict[str, tuple[list[int], int]]:
    model = spread(group, name, tp, dp)
    found = {}
    for which in vlms.PROMPTS:
        before = model.model.visual.spread.counters.calls
        tokens = generate(model, name, which)
        found[which] = (tokens, model.model.visual.spread.counters.calls - before)
    return found


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", vlms.VLMS)
def test_generate_returns_the_tokens_of_the_plain_model(ranks: Ranks, name: str, tp: int, dp: int) -> None:
    want = {which: (tokens, vlms.NUM_CALLS[which]) for which, tokens in wanted(name).items()}
    assert len({tuple(tokens) for tokens, _ in want.values()}) == len(want)
    for found in ranks.run(tokens_and_calls, tp * dp, name, tp, dp):
        assert found == want


def load_and_run(group: dist.ProcessGroup, folder: str, name: str, tp: int, dp: int) -> tuple[bool, int]:
    """Return whether a tower loaded from the whole model's checkpoint has the bits of one spread in memory."""
    config = VisionParallelConfig(tp_size=tp, dp_size=dp, vision_attention_block_size=128)
    loaded: Any = enfold.load_encoder(folder, vision=config, group=group)
    batch = vlms.inputs(name, "several images")
    call = {"grid_thw": batch["image_grid_thw"]}
    want = spread(group, name, tp, dp).model.visual(batch["pixel_values"], **call).pooler_output
    got = loaded(batch["pixel_values"], **call).pooler_output
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in loaded.parameters())
    assert num_bytes == loaded.plan.bytes_per_rank or tp > 1
    return torch.equal(got, want), num_bytes


@pytest.mark.parametrize("name", vlms.VLMS)
def test_a_tower_is_loaded_from_the_checkpoint_of_the_whole_model(ranks: Ranks, name: str, tmp_path: Path) -> None:
    plain(name).save_pretrained(tmp_path)  # type: ignore[operator]
    whole = [num_bytes for _, num_bytes in ranks.run(load_and_run, 2, str(tmp_path), name, 1, 2)]
    for equal, num_bytes in ranks.run(load_and_run, 2, str(tmp_path), name, 2, 1):
        assert equal
        assert num_bytes < 0.62 * whole[0]


def test_loading_is_strict(tmp_path: Path) -> None:
    plain("Qwen3-VL").save_pretrained(tmp_path)  # type: ignore[operator]
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.visual.blocks.1.mlp.linear_fc2.bias"
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: blocks\.1\.mlp\.linear_fc2\.bias"):
        enfold.load_encoder(tmp_path, vision=VisionParallelConfig())
    save_file({**tensors, "model.visual.blocks.1.extra": tensors[name].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected: blocks\.1\.extra"):
        enfold.load_encoder(tmp_path, vision=VisionParallelConfig())


def test_vision_beside_what_is_for_other_encoders_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave mode, layout and batch_size out"):
        enfold.parallelize(plain("Qwen3-VL"), "fold", vision=VisionParallelConfig())
    with pytest.raises(ConfigError, match="has no vision tower"):
        enfold.parallelize(plain("Qwen3-VL").model.language_model, vision=VisionParallelConfig())  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="is no VisionParallelConfig"):
        enfold.parallelize(plain("Qwen3-VL"), vision={"tp_size": 1})
