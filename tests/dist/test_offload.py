"""Offloaded encoders: where a weight is stored and where it is computed with are different things."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import accelerate
import models
import pytest
import torch
import torch.distributed as dist
from accelerate.hooks import remove_hook_from_module
from cells import differences, groups_of, plain
from ranks import Ranks

import enfold
from enfold.errors import LayoutError
from enfold.spread import parallelize_encoder

CPU = torch.device("cpu")
NAMES = ("T5", "CLIP text + projection", "Qwen3", "SigLIP vision")
PRELOADED = ["SiglipMultiheadAttentionPoolingHead"]
"""It uses the weights of its layers without calling them, so a hook on each of them comes to nothing."""

DATA_PATH = ("blocks", "comm", "exact", "flow", "shard", "watch")


def offload(module: Any) -> None:
    """Keep every weight on the meta device between calls; a hook brings it to the CPU for its layer's call."""
    accelerate.cpu_offload(module, execution_device=CPU, preload_module_classes=PRELOADED)
    assert all(parameter.is_meta for parameter in module.parameters())


def _encode(module: Any, name: str) -> Any:
    return [module(**models.inputs(name, num_rows), output_hidden_states=True) for num_rows in (1, 3)]


def _offloaded(group: dist.ProcessGroup, name: str, layout: tuple[int, int, int], first: str) -> list[str]:
    """Return the differences to the plain module; `first` says what was done first, the spreading or the offload."""
    module = copy.deepcopy(plain(name, torch.float32))
    if first == "offload":
        offload(module)
    parallelize_encoder(module, layout=enfold.Layout(*layout), groups=groups_of(group))
    if first == "spread":
        offload(module)
    want = _encode(plain(name, torch.float32), name)
    found = differences(want, _encode(module, name), f"{name}, offloaded")
    if not all(parameter.is_meta for parameter in module.parameters()):
        found.append("a weight stayed in memory after the call")
    remove_hook_from_module(module, recurse=True)  # puts the weights back
    found += differences(want, _encode(module, name), f"{name}, no longer offloaded")
    calls = module.forward.func.__self__.mesh.watch.num_calls
    return found if calls == 4 else [*found, f"{calls} of 4 calls went over the ranks"]


@pytest.mark.parametrize(
    "world,layout,first",
    [
        (2, (1, 1, 2), "spread"),
        (4, (1, 2, 2), "spread"),
        (2, (1, 2, 1), "spread"),
        (2, (1, 2, 1), "offload"),
        (2, (2, 1, 1), "offload"),
    ],
)
def test_offloaded_encoders_keep_the_bits(ranks: Ranks, world: int, layout: tuple[int, int, int], first: str) -> None:
    for name in NAMES:
        assert ranks.run(_offloaded, world, name, layout, first) == [[]] * world, name


def _fold_of_an_offloaded(group: dist.ProcessGroup) -> tuple[str, bool]:
    module = copy.deepcopy(plain("T5", torch.float32))
    offload(module)
    try:
        enfold.parallelize(module, "fold", group=group)
    except LayoutError as error:
        return str(error), hasattr(module, "plan")
    return "", True


def test_a_fold_can_not_cut_what_is_offloaded(ranks: Ranks) -> None:
    for text, touched in ranks.run(_fold_of_an_offloaded, 2):
        assert "offloaded weights" in text
        assert "call enfold.parallelize first and enable the offload afterwards" in text
        assert not touched


def _hooked_as_a_whole(group: dist.ProcessGroup, layout: tuple[int, int, int]) -> list[str]:
    """A hook on the whole encoder (enable_model_cpu_offload) comes before and is taken off and put on between calls."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    module = copy.deepcopy(plain("T5", torch.float32))
    add_hook_to_module(module, AlignDevicesHook(execution_device=CPU))
    parallelize_encoder(module, layout=enfold.Layout(*layout), groups=groups_of(group))
    want = _encode(plain("T5", torch.float32), "T5")
    found = differences(want, _encode(module, "T5"), "hooked")
    remove_hook_from_module(module)
    found += differences(want, _encode(module, "T5"), "hook taken off")
    add_hook_to_module(module, AlignDevicesHook(execution_device=CPU))
    found += differences(want, _encode(module, "T5"), "hooked again")
    calls = module._old_forward.func.__self__.mesh.watch.num_calls
    return found if calls == 6 else [*found, f"{calls} of 6 calls went over the ranks"]


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 1)])
def test_a_hook_may_come_and_go(ranks: Ranks, layout: tuple[int, int, int]) -> None:
    assert ranks.run(_hooked_as_a_whole, 2, layout) == [[], []]


def test_the_data_path_takes_devices_from_tensors_that_travel() -> None:
    """A parameter may be on the meta device or on the CPU while its layer computes on a GPU."""
    for name in DATA_PATH:
        source = Path(enfold.__file__).with_name(f"{name}.py").read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and node.attr in ("device", "get_device"):
                owner = ast.unparse(node.value)
                assert owner in ("x", "op", "torch"), f"{name}.py:{node.lineno} takes the device of {owner}"
