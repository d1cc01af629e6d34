"""Tiny random DiTs of the real classes, their inputs, and what runs on the ranks to split them."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any, NamedTuple

import diffusers
import torch
import torch.distributed as dist
from diffusers.hooks import tensor_parallel
from diffusers.models import attention_dispatch
from pipelines import randomized
from torch import nn

from enfold.diffusion.layout import PipelineLayout
from enfold.diffusion.split import split_transformer, whole
from enfold.errors import EnfoldError

HEADS, HEAD_SIZE, TEXT_SIZE = 4, 16, 48


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=HEAD_SIZE,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_SIZE,
        pooled_projection_dim=TEXT_SIZE,
        axes_dims_rope=(4, 4, 8),
    )


def wan() -> nn.Module:
    return diffusers.WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT_SIZE,
        freq_dim=32,
        ffn_dim=96,
        num_layers=2,
        rope_max_seq_len=32,
    )


def qwen_image() -> nn.Module:
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=HEAD_SIZE,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_SIZE,
        axes_dims_rope=(4, 4, 8),
    )


BUILDERS = {"Flux": flux, "Wan": wan, "QwenImage": qwen_image}


def build(name: str, seed: int = 0) -> Any:
    return randomized(BUILDERS[name](), torch.float32, seed)


def inputs(name: str, text: int = 16, side: int = 4, masked: int = 0) -> dict[str, Any]:
    """Return arguments for two pictures of side x side tokens (or clips of 2 frames); masked: text tokens unseen."""
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shared = {"encoder_hidden_states": noise(2, text, TEXT_SIZE), "timestep": torch.tensor([0.3, 0.7])}
    if name == "Wan":
        return {**shared, "hidden_states": noise(2, 4, 2, 2 * side, 2 * side), "timestep": torch.tensor([300, 700])}
    if name == "QwenImage":
        mask = torch.ones(2, text, dtype=torch.bool)
        mask[1, text - masked :] = False
        some = {"encoder_hidden_states_mask": mask} if masked else {}
        return {**shared, **some, "hidden_states": noise(2, side * side, 16), "img_shapes": [[(1, side, side)]] * 2}
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return {
        **shared,
        "hidden_states": noise(2, side * side, 16),
        "pooled_projections": noise(2, TEXT_SIZE),
        "img_ids": torch.stack((rows * 0, rows, columns), -1).flatten(0, 1).float(),
        "txt_ids": torch.zeros(text, 3),
    }


def run(transformer: Any, given: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = transformer(**given, return_dict=False)[0]
    return out


class Answer(NamedTuple):
    """One rank's results: unsplit before, split, unsplit again within `whole`, split once more after it."""

    plain: torch.Tensor
    split: torch.Tensor
    whole: torch.Tensor
    again: torch.Tensor
    said: str


def split_and_run(
    group: dist.ProcessGroup, name: str, sizes: dict[str, int], shape: dict[str, int] | None = None
) -> Answer:
    shape = shape or {}
    plain = run(build(name), inputs(name, **shape))
    transformer = build(name)
    said = split_transformer(transformer, PipelineLayout(**sizes), group=group, device="cpu")
    split = run(transformer, inputs(name, **shape))
    if "tp" in sizes:
        return Answer(plain, split, plain, run(transformer, inputs(name, **shape)), said)
    with whole(transformer):
        unsplit = run(transformer, inputs(name, **shape))
    return Answer(plain, split, unsplit, run(transformer, inputs(name, **shape)), said)


def without_exchange(group: dist.ProcessGroup, name: str, sizes: dict[str, int]) -> Answer:
    """Like `split_and_run`, but attention sees this rank's tokens alone."""
    transformer = build(name)
    said = split_transformer(transformer, PipelineLayout(**sizes), group=group, device="cpu")
    for module in transformer.modules():
        if getattr(getattr(module, "processor", None), "_parallel_config", None) is not None:
            module.processor._parallel_config = None
    wrong = run(transformer, inputs(name))
    return Answer(run(build(name), inputs(name)), wrong, wrong, wrong, said)


def without_one_share(group: dist.ProcessGroup, name: str) -> Answer:
    """Split by weights, but the second rank's share of one layer is zero."""
    transformer = build(name)
    said = split_transformer(transformer, PipelineLayout(tp=2), group=group, device="cpu")
    if dist.get_rank(group) == 1:
        transformer.transformer_blocks[0].attn.to_out[0].weight.to_local().zero_()
    wrong = run(transformer, inputs(name))
    return Answer(run(build(name), inputs(name)), wrong, wrong, wrong, said)


def share_of_parameters(group: dist.ProcessGroup, name: str) -> float:
    transformer = build(name)
    before = sum(each.numel() for each in transformer.parameters())
    split_transformer(transformer, PipelineLayout(tp=2), group=group, device="cpu")
    held = (each.to_local() if hasattr(each, "to_local") else each for each in transformer.parameters())
    return sum(each.numel() for each in held) / before


def error_of(group: dist.ProcessGroup, name: str, sizes: dict[str, int], shape: dict[str, int]) -> tuple[str, str, str]:
    """Return the class and text of what a split or its forward raises, and of what the next good forward gives."""
    transformer = build(name)
    try:
        split_transformer(transformer, PipelineLayout(**sizes), group=group, device="cpu")
        run(transformer, inputs(name, **shape))
    except EnfoldError as error:
        found = type(error).__name__, str(error)
    else:
        return "", "", ""
    if transformer._parallel_config is None:
        return (*found, "unsplit")
    after = run(transformer, inputs(name))
    return (*found, "right" if relative(after, run(build(name), inputs(name))) < 1e-4 else "wrong")


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def broken_rank(group: dist.ProcessGroup, name: str, sizes: dict[str, int], timeout_s: float) -> tuple[str, float]:
    """Split over a group of its own; the last rank fails inside the forward. Return what was raised, and when."""
    ranks = dist.get_process_group_ranks(group)
    dist.barrier(group)  # the first call of a rank imports for many seconds
    is_part = len(ranks) < dist.get_world_size()
    own = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), use_local_synchronization=is_part)
    transformer = build(name)
    split_transformer(transformer, PipelineLayout(**sizes), group=own, device="cpu", timeout_s=timeout_s)
    if dist.get_rank(own) == len(ranks) - 1:
        last = [module for module in transformer.modules() if hasattr(module, "processor")][-1]
        last.register_forward_pre_hook(_fail)
    start = time.monotonic()
    try:
        run(transformer, inputs(name))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def _fail(module: nn.Module, args: Any) -> None:
    raise MemoryError("made up")


def patches() -> list[Any]:
    """Return what a split replaces for a moment."""
    return [
        attention_dispatch._native_attention_forward_op,
        tensor_parallel._SUPPORTED_TP_DEVICES,
        attention_dispatch._AttentionBackendRegistry._active_backend,
        logging.getLogger("diffusers.models.modeling_utils").disabled,
    ]


def what_stays_replaced(group: dist.ProcessGroup, name: str, sizes: dict[str, int]) -> list[str]:
    """Return what is not as before after a split, a forward, and a forward that fails in its last attention."""
    before, transformer = patches(), build(name)
    split_transformer(transformer, PipelineLayout(**sizes), group=group, device="cpu")
    found = [] if "_resolve_parallel_config" not in vars(transformer) else ["after the split: the look-up of the mesh"]
    run(transformer, inputs(name))
    found += [] if patches() == before else [f"after a forward: {patches()}"]
    last = [module for module in transformer.modules() if hasattr(module, "processor")][-1]
    last.register_forward_pre_hook(_fail)
    try:
        run(transformer, inputs(name))
    except MemoryError:
        return found + ([] if patches() == before else [f"after a failure: {patches()}"])
    return [*found, "nothing failed"]


def plain_diffusers(group: dist.ProcessGroup, kind: str) -> str:
    """Return what Diffusers raises on CPU ranks by itself: the reasons for what enfold replaces."""
    transformer = build("Flux")
    try:
        if kind == "ring":
            split_transformer(transformer, PipelineLayout(ring=2), group=group, device="cpu")
            transformer._forward_pre_hooks.clear()
            run(transformer, inputs("Flux"))
        elif kind == "tp":
            transformer.enable_parallelism(config=diffusers.TensorParallelConfig(tp_degree=2))
        else:
            transformer.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def split_twice(group: dist.ProcessGroup) -> str:
    transformer = build("Flux")
    split_transformer(transformer, PipelineLayout(ulysses=2), group=group, device="cpu")
    try:
        split_transformer(transformer, PipelineLayout(ring=2), group=group, device="cpu")
    except EnfoldError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def whole_of_split_weights(group: dist.ProcessGroup) -> str:
    transformer = build("Flux")
    split_transformer(transformer, PipelineLayout(tp=2), group=group, device="cpu")
    try:
        with whole(transformer):
            return ""
    except EnfoldError as error:
        return f"{type(error).__name__}: {error}"


def whole_that_fails(group: dist.ProcessGroup) -> bool:
    """Return whether a transformer is split as before after an error within `whole`."""
    transformer = build("Flux")
    split_transformer(transformer, PipelineLayout(ulysses=2), group=group, device="cpu")
    before = run(transformer, inputs("Flux"))
    try:
        with whole(transformer):
            raise MemoryError
    except MemoryError:
        return torch.equal(run(transformer, inputs("Flux")), before)
