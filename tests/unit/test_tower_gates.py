"""Vision towers on one rank against Transformers: fp64 within 1e-10, fp32 within 1e-5, and what these gates can see.

Some Transformers layers compute in fp32 whatever the module's precision: Qwen2.5-VL's RMSNorm, and every rotation. In
an fp64 module such a cast is a step: values 1e-16 apart round to fp32 numbers 1e-7 apart now and then, and the outputs
differ by 1e-8 where nothing is wrong. So the fp64 gate is taken with these casts removed on both sides, and the casts
themselves are compared bit by bit.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import towers
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

import enfold
from enfold.errors import InputError
from enfold.vision import flow, geometry, tower
from enfold.vision.geometry import BlockInputs, RowInputs
from enfold.vision.tower import TowerInputs

GATES = {torch.float64: 1e-10, torch.float32: 1e-5}
PATCHES = ("Qwen3-VL", "Qwen2.5-VL", "Qwen2-VL", "Qwen3.5")
"""The families that take patches of any size."""

SETS = [which for which in towers.IMAGES if which != "no image"]
FEW = ["3 mixed", "two videos, one image"]
MIXED = "5 mixed"


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def small_qwen3_vl(**changes: Any) -> nn.Module:
    return towers.qwen3_vl(**towers.SMALL, **{"out_hidden_size": 256, "deepstack_visual_indexes": [0], **changes})


def unsorted_qwen3_vl() -> nn.Module:
    """Layers that deepstack reads, listed out of order: the list says which merger is whose."""
    return towers.qwen3_vl(**{**towers.SMALL, "depth": 3}, out_hidden_size=256, deepstack_visual_indexes=[2, 0])


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    **towers.TOWERS,
    "Qwen3-VL": small_qwen3_vl,
    "Qwen3-VL, 1088 wide": towers.qwen3_vl,
    "Qwen3-VL, unsorted": unsorted_qwen3_vl,
}


@lru_cache(maxsize=2)
def plain(name: str, dtype: torch.dtype) -> Any:
    with towers.no_init_weights():
        module = BUILDERS[name]()
    return towers.randomize(module).to(dtype).eval()


@lru_cache(maxsize=4)
def packed(name: str, dtype: torch.dtype, pad_blocks: bool) -> Any:
    config = enfold.VisionParallelConfig(vision_attention_block_size=towers.BLOCK_SIZE, pad_blocks=pad_blocks)
    return enfold.parallelize(copy.deepcopy(plain(name, dtype)), vision=config)


def call_of(name: str, which: str | list[tuple[int, int, int]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if isinstance(which, str):
        return towers.images(name.partition(",")[0], which, dtype)
    size = 16 if name.startswith(("Qwen3-VL", "Qwen3.5")) else 14
    num_patches = sum(frames * height * width for frames, height, width in which)
    pixels = torch.randn(num_patches, 6 * size**2, generator=torch.Generator().manual_seed(num_patches))
    return {"hidden_states": pixels.to(dtype), "grid_thw": torch.tensor(which)}


def error(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any output, relative to the largest value of that output."""
    assert want.keys() == got.keys()
    worst = 0.0
    for name, x in want.items():
        assert (got[name].shape, got[name].dtype) == (x.shape, x.dtype), name
        assert got[name].isfinite().all(), name
        worst = max(worst, ((got[name] - x).abs().max() / x.abs().max()).item())
    return worst


def errors(name: str, dtype: torch.dtype, sets: Any, pad_blocks: bool) -> dict[str, float]:
    mine, its = packed(name, dtype, pad_blocks), plain(name, dtype)
    calls = {str(which): call_of(name, which, dtype) for which in sets}
    return {which: error(towers.outputs(its(**call)), towers.outputs(mine(**call))) for which, call in calls.items()}


# The casts to fp32 that Transformers makes, out of the way of the fp64 gate.


def norm_without_cast(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def rotate_without_cast(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


def rotate_both_without_cast(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        rotate_without_cast(q, cos.unsqueeze(-2), sin.unsqueeze(-2)),
        rotate_without_cast(k, cos.unsqueeze(-2), sin.unsqueeze(-2)),
    )


def remove_casts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Qwen2_5_VLRMSNorm, "forward", norm_without_cast)
    patch.setattr(tower, "rotate", rotate_without_cast)
    for kind in (module for name, module in sys.modules.items() if name.startswith("transformers.models.qwen")):
        if hasattr(kind, "apply_rotary_pos_emb_vision"):
            patch.setattr(kind, "apply_rotary_pos_emb_vision", rotate_both_without_cast)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_rotation_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 30, 8, 68, generator=generator, dtype=torch.float64).to(dtype)
    cos, sin = geometry.rotary(*geometry.patch_places(6, 5, 1), 68, 1e4)
    want = apply_rotary_pos_emb_vision(q, k, cos, sin)
    assert torch.equal(tower.rotate(q, cos[:, None], sin[:, None]), want[0])
    assert torch.equal(tower.rotate(k, cos[:, None], sin[:, None]), want[1])


# The gates.


@pytest.mark.parametrize("dtype", GATES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", [*(name for name in BUILDERS if "1088" not in name)])
def test_gates(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        remove_casts(monkeypatch)
    sets = ["3 mixed"] if "unsorted" in name else SETS if dtype == torch.float32 else FEW
    for pad_blocks, some in ((False, sets), (True, [which for which in FEW if which in sets])):
        found = errors(name, dtype, some, pad_blocks)
        assert max(found.values()) < GATES[dtype], (pad_blocks, found)


@pytest.mark.parametrize("dtype", GATES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_gates_at_a_real_width(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    if dtype == torch.float64:
        remove_casts(monkeypatch)
    found = errors("Qwen3-VL, 1088 wide", dtype, [[(1, 6, 10), (2, 4, 4)]], False)
    assert max(found.values()) < GATES[dtype], found


@pytest.mark.parametrize("pad_blocks", [False, True])
def test_an_image_larger_than_a_block(monkeypatch: pytest.MonkeyPatch, pad_blocks: bool) -> None:
    remove_casts(monkeypatch)
    found = errors("Qwen3-VL", torch.float64, [[(1, 4, 6), (1, 18, 16), (1, 4, 4)]], pad_blocks)
    assert max(found.values()) < GATES[torch.float64], found


ODD_GRIDS = [[(1, 10, 14)], [(1, 2, 50), (1, 34, 2), (2, 18, 6)], [(1, 8, 8), (1, 16, 8), (3, 2, 2)]]
"""Windows have 8 x 8 patches: grids that are no multiple of them, thinner than them, and whole ones."""


@pytest.mark.parametrize("dtype", GATES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("pad_blocks", [False, True])
def test_windows_of_odd_grids(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, pad_blocks: bool) -> None:
    if dtype == torch.float64:
        remove_casts(monkeypatch)
    found = errors("Qwen2.5-VL", dtype, ODD_GRIDS, pad_blocks)
    assert max(found.values()) < GATES[dtype], found


@pytest.mark.parametrize("name", ["Qwen3-VL", "Qwen2.5-VL"])
def test_bf16_is_no_less_precise_than_transformers(name: str) -> None:
    """A gate of 1e-2 would hide a wrong activation; the ratio of the two errors against fp32 does not."""
    call = call_of(name, "3 mixed", torch.float32)
    want = towers.outputs(plain(name, torch.float32)(**call))
    its, mine = plain(name, torch.bfloat16), packed(name, torch.bfloat16, False)
    found = [{key: x.float() for key, x in towers.outputs(module(**call)).items()} for module in (its, mine)]
    assert error(want, found[1]) < 1.5 * error(want, found[0]) < 0.1


def test_why_the_casts_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With them the fp64 difference is what rounding to fp32 makes of 1e-16: no bug, and no pass either."""
    with monkeypatch.context() as patch:
        remove_casts(patch)
        without = max(errors("Qwen2.5-VL", torch.float64, ["3 mixed"], True).values())
    assert without < 1e-13
    assert max(errors("Qwen2.5-VL", torch.float64, ["3 mixed"], True).values()) < 1e-6


def test_deepstack_features_keep_the_order_of_transformers() -> None:
    call = call_of("Qwen3-VL, unsorted", MIXED, torch.float32)
    module = packed("Qwen3-VL, unsorted", torch.float32, False)
    want, got = plain("Qwen3-VL, unsorted", torch.float32)(**call), module(**call)
    assert len(got.deepstack_features) == 2 and type(got) is type(want)
    assert error(towers.outputs(want), {**towers.outputs(got)}) < 1e-5
    swapped = dict(zip(("deepstack 0", "deepstack 1"), reversed(got.deepstack_features), strict=True))
    assert error({"deepstack 0": want.deepstack_features[0]}, {"deepstack 0": swapped["deepstack 0"]}) > 0.1
    items = module.spread.encode_items(*call.values())
    fat = torch.cat([got.pooler_output, *got.deepstack_features], -1)
    assert torch.equal(torch.cat(items), fat), "fat rows: [main | ds0 | ds1]"
    assert [len(item) for item in items] == [t * h * w // 4 for t, h, w in towers.IMAGES[MIXED]]


@pytest.mark.parametrize("pad_blocks", [False, True])
def test_pixels_and_grids_of_any_form(pad_blocks: bool) -> None:
    module = packed("Qwen2.5-VL", torch.float32, pad_blocks)
    pixels, grid = call_of("Qwen2.5-VL", MIXED, torch.float32).values()
    want = module(pixels, grid).pooler_output
    spaced = torch.zeros(len(pixels), 2 * pixels.shape[1])
    spaced[:, ::2] = pixels
    forms = [
        (spaced[:, ::2], grid),
        (pixels.T.contiguous().T, grid),
        (pixels.double(), grid),
        (pixels, grid.int()),
        (pixels, grid.to(torch.uint8)),
        (pixels, grid.T.contiguous().T),
    ]
    assert all(torch.equal(module(*form).pooler_output, want) for form in forms)


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.parametrize("pad_blocks", [False, True])
def test_no_images_give_no_rows(name: str, pad_blocks: bool) -> None:
    some = towers.outputs(packed(name, torch.float32, pad_blocks)(**call_of(name, "1 image", torch.float32)))
    none = towers.outputs(packed(name, torch.float32, pad_blocks)(**call_of(name, "no image", torch.float32)))
    assert {key: (0, *x.shape[1:]) for key, x in some.items()} == {key: tuple(x.shape) for key, x in none.items()}


def test_no_images_of_one_size_give_no_rows() -> None:
    got = packed("SigLIP", torch.float32, False)(**call_of("SigLIP", "no image", torch.float32))
    assert tuple(got.last_hidden_state.shape) == (0, 25, 544) and tuple(got.pooler_output.shape) == (0, 544)


def test_siglip_drops_what_is_left_of_an_image_as_its_convolution_does() -> None:
    """The published SigLIP-SO400M takes 384 x 384 pixels in patches of 14: 27 x 27 of them, and 6 pixels over."""
    config = towers.hf.SiglipVisionConfig(
        hidden_size=544,
        intermediate_size=1436,
        num_attention_heads=8,
        num_hidden_layers=2,
        image_size=76,
        patch_size=14,
    )
    module = towers.randomize(towers.hf.SiglipVisionModel(config)).eval()
    mine: Any = enfold.parallelize(copy.deepcopy(module), vision=enfold.VisionParallelConfig())
    pixels = torch.randn(3, 3, 76, 76, generator=torch.Generator().manual_seed(0))
    assert error(towers.outputs(module(pixels)), towers.outputs(mine(pixels))) < 1e-5
    with pytest.raises(InputError, match=r"\[3, 3, 84, 76\].*\[images, 3, 70, 70\], or less than a patch"):
        mine(pixels.new_zeros(3, 3, 84, 76))


# Negative controls: each of these gave plausible embeddings, and must not pass the weaker of the two gates.

VIDEO = [(3, 4, 6)]
TWO_IMAGES = [(1, 6, 4), (1, 12, 10)]


def broken(name: str, which: Any, pad_blocks: bool) -> float:
    return errors(name, torch.float32, [which], pad_blocks)[str(which)]


def one_segment(rows: RowInputs) -> RowInputs:
    return replace(rows, lengths=(sum(rows.lengths),))


def one_segment_per_block(blocks: BlockInputs) -> BlockInputs:
    valid = blocks.bound_max > 0
    low, high = torch.zeros_like(blocks.bound_min), blocks.bound_max.amax(1, keepdim=True)
    return replace(blocks, bound_min=low, bound_max=torch.where(valid, high, 0))


def after(patch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
    """Have a function's results changed before anybody sees them."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args: change(original(*args)))


@pytest.mark.parametrize("pad_blocks", [False, True])
@pytest.mark.parametrize("which", [VIDEO, TWO_IMAGES], ids=["a video as one segment", "images not isolated"])
def test_control_segments(monkeypatch: pytest.MonkeyPatch, which: Any, pad_blocks: bool) -> None:
    assert broken("Qwen3-VL", which, pad_blocks) < 1e-5
    after(monkeypatch, flow, "row_inputs", one_segment)
    after(monkeypatch, flow, "block_inputs", one_segment_per_block)
    assert broken("Qwen3-VL", which, pad_blocks) > 1e-2


def test_control_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    after(monkeypatch, flow, "ragged_inputs", lambda inputs: replace(inputs, attend_windows=inputs.attend_frames))
    assert broken("Qwen2.5-VL", TWO_IMAGES, False) > 1e-2


def test_control_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in packed("Qwen3-VL", torch.float32, False).blocks:
        monkeypatch.setitem(layer.mlp._modules, "act_fn", nn.GELU())
    assert 1e-5 < broken("Qwen3-VL", MIXED, False) < 1e-2, "too small for a bf16 gate to see"


def test_control_precision_of_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    after(monkeypatch, geometry, "position_taps", lambda taps: (taps[0], taps[1].bfloat16().float()))
    assert 1e-5 < broken("Qwen3-VL", MIXED, False) < 1e-2, "too small for a bf16 gate to see"


def test_control_raster_order(monkeypatch: pytest.MonkeyPatch) -> None:
    original = geometry.rotary

    def raster(rows: torch.Tensor, columns: torch.Tensor, *rest: Any) -> Any:
        width = int(columns.max()) + 1
        places = torch.arange(len(rows))
        return original(places // width, places % width, *rest)

    monkeypatch.setattr(geometry, "rotary", raster)
    assert broken("Qwen3-VL", MIXED, False) > 1e-2


def test_control_order_of_windows_not_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry.FrameTable, "order", lambda *_: None)
    assert broken("Qwen2.5-VL", [(1, 10, 14)], False) > 1e-2


# Poison: whatever stands in padding must not reach a valid row.

NAN = float("nan")
POISONED = ["3 mixed", "two videos, one image"]


def poison_blocks(blocks: BlockInputs) -> BlockInputs:
    """Fill all padding with NaN, and with numbers that are no entry of any table."""
    padding = (blocks.bound_max == 0).squeeze(-1)
    assert padding.any(), "a test without padding would show nothing"

    def fill(x: torch.Tensor | None, value: float) -> torch.Tensor | None:
        if x is None:
            return None
        x = x.clone()
        x[padding] = value
        return x

    def fill_taps(x: torch.Tensor | None, value: float) -> torch.Tensor | None:
        return None if x is None else fill(x.movedim(0, -1), value).movedim(-1, 0)  # type: ignore[union-attr]

    return replace(
        blocks,
        pixels=fill(blocks.pixels, NAN),
        cos=fill(blocks.cos, NAN),
        sin=fill(blocks.sin, NAN),
        pos_emb_weight=fill_taps(blocks.pos_emb_weight, NAN),
        pos_emb_idx=fill_taps(blocks.pos_emb_idx, 10**6),
    )


@pytest.mark.parametrize("name", towers.TOWERS)
def test_poison_in_the_padding_of_blocks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, calls = packed(name, torch.float32, True), [call_of(name, which, torch.float32) for which in POISONED]
    want = [towers.outputs(module(**call)) for call in calls]
    original = flow.padded_inputs
    monkeypatch.setattr(flow, "padded_inputs", lambda blocks, device: original(poison_blocks(blocks), device))
    for call, before in zip(calls, want, strict=True):
        assert all(torch.equal(x, before[key]) for key, x in towers.outputs(module(**call)).items())


def test_control_poison_that_is_not_cleaned_reaches_valid_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why padding is cleared on the device: a mask alone does not keep NaN out of a weighted sum."""
    module, call = packed("Qwen3.5", torch.float32, True), call_of("Qwen3.5", "1 image", torch.float32)

    def poison(inputs: TowerInputs) -> TowerInputs:
        return replace(inputs, pixels=torch.where(inputs.pixels.any(1, keepdim=True), inputs.pixels, NAN))

    after(monkeypatch, flow, "padded_inputs", poison)
    assert module(**call).pooler_output.isnan().any()


@pytest.mark.parametrize("name", towers.TOWERS)
def test_poison_in_the_row_tiles(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Ragged rows are lengthened to whole tiles, for the sake of their bits."""
    module, calls = packed(name, torch.float32, False), [call_of(name, which, torch.float32) for which in POISONED]
    want = [towers.outputs(module(**call)) for call in calls]
    num_poisoned = []

    def poison(inputs: TowerInputs, num_rows: int) -> TowerInputs:
        num_poisoned.append(len(inputs.pixels) - num_rows)
        inputs.pixels[num_rows:] = NAN
        for x in (inputs.cos, inputs.sin):
            if x is not None:
                x[num_rows:] = NAN
        if inputs.tap_weights is not None:
            inputs.tap_weights[:, num_rows:] = NAN
        return inputs

    original = flow.ragged_inputs
    monkeypatch.setattr(flow, "ragged_inputs", lambda rows, device: poison(original(rows, device), len(rows.pixels)))
    for call, before in zip(calls, want, strict=True):
        assert all(torch.equal(x, before[key]) for key, x in towers.outputs(module(**call)).items())
    assert all(num_poisoned)


# n images in one call are n calls.


def singles(module: Any, call: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs of a call per image, one after another."""
    if "pixel_values" in call:
        found = [towers.outputs(module(image[None])) for image in call["pixel_values"]]
    else:
        counts = call["grid_thw"].prod(1).tolist()
        parts = zip(call["hidden_states"].split(counts), call["grid_thw"].split(1), strict=True)
        found = [towers.outputs(module(*part)) for part in parts]
    return {name: torch.cat([each[name] for each in found]) for name in found[0]}


@pytest.mark.parametrize("name", towers.TOWERS)
@pytest.mark.parametrize("which", ["5 mixed", "two videos, one image"])
def test_n_images_are_n_single_runs(name: str, which: str) -> None:
    """Equal bits where blocks are ragged: what an image is packed with must not show. Whole blocks: within the gate."""
    call = call_of(name, which, torch.float32)
    want = singles(packed(name, torch.float32, False), call)
    got = towers.outputs(packed(name, torch.float32, False)(**call))
    assert [key for key, x in got.items() if not torch.equal(x, want[key])] == []
    assert error(want, got) < 1e-5
    assert error(want, towers.outputs(packed(name, torch.float32, True)(**call))) < 1e-5


def test_the_frames_of_a_video_are_n_single_images() -> None:
    module, call = packed("Qwen2.5-VL", torch.float32, False), call_of("Qwen2.5-VL", [(3, 10, 14)], torch.float32)
    frames = {"hidden_states": call["hidden_states"], "grid_thw": torch.tensor([[1, 10, 14]] * 3)}
    want = towers.outputs(module(**call))
    for got in (towers.outputs(module(**frames)), singles(module, frames)):
        assert all(torch.equal(x, want[key]) for key, x in got.items())
