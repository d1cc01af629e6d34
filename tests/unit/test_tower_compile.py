"""With whole blocks the shapes of a bucket never change: torch.compile traces a tower once, and the bits stay."""

from __future__ import annotations

import copy

import pytest
import torch
import towers
from torch._dynamo.testing import CompileCounter

from enfold import VisionParallelConfig
from enfold.comm import Groups
from enfold.vision.spread import prepare_tower, spread_tower
from enfold.vision.tower import run_tower


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "SigLIP"])
def test_images_of_any_size_run_the_graphs_of_their_bucket(name: str) -> None:
    torch._dynamo.reset()
    groups = Groups(None)
    config = VisionParallelConfig(vision_attention_block_size=256, pad_blocks=True)
    tower = copy.deepcopy(towers.plain(name, torch.float32))
    module = spread_tower(prepare_tower(tower, config, groups), groups)
    counter = CompileCounter()
    compiled = torch.compile(run_tower, backend=counter, dynamic=False)
    counts = []
    with torch.no_grad():
        for which in ("3 mixed", "1 image", "5 equal"):
            call = towers.images(name, which, torch.float32)
            module.spread.run = run_tower
            want = module(**call).pooler_output
            module.spread.run = compiled
            assert torch.equal(module(**call).pooler_output, want)
            counts.append(counter.frame_count)
    torch._dynamo.reset()
    assert counts[0] > 0
    assert counts == [counts[0]] * 3


def test_compile_is_off_on_a_cpu() -> None:
    groups = Groups(None)
    config = VisionParallelConfig(vision_attention_block_size=256, compile=True)
    tower = copy.deepcopy(towers.plain("SigLIP", torch.float32))
    module = spread_tower(prepare_tower(tower, config, groups), groups)
    assert config.has_fixed_shapes
    assert module.spread.run is run_tower
