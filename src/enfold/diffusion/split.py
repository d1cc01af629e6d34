"""Diffusers' split of a transformer (DiT) over the ranks of a replica, by tokens (Ulysses, ring) or by weights (tp).

Diffusers 0.42 does the work; it was written for accelerators and for a replica that is the whole world. Here is what it
takes on CPU ranks and in any process group, and checks that come before the first collective:

- the device mesh is given, not looked up (`_placed`); ring attention on CPUs is in ring_attention.py;
- sequences that can't be cut evenly are refused with their length, or padded behind a mask (lengths.py).

A rank that fails inside a split forward leaves its peers in a collective: they raise after the timeout of the process
group, which can't be used any more after that. The Watch of the encoders does not reach into Diffusers.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, ParallelConfig, TensorParallelConfig
from diffusers.hooks import context_parallel, tensor_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from enfold.comm import DEFAULT_TIMEOUT_S
from enfold.diffusion.layout import PipelineLayout
from enfold.diffusion.lengths import explain_lengths, fit_text
from enfold.diffusion.ring_attention import check_ring_attention, take_ring_attention
from enfold.errors import ConfigError, LayoutError


@dataclass(frozen=True)
class SplitFacts:
    """Whether Diffusers can split a class of transformers by tokens (Ulysses, ring) and by weights (tp)."""

    has_cp_plan: bool
    has_tp_plan: bool


def split_facts(transformer: str | type) -> SplitFacts:
    """Return how a class of transformers, or its name in Diffusers, can be split; needs no weights.

    Raises ConfigError where Diffusers has no class of that name.
    """
    if isinstance(transformer, str):
        import diffusers

        found = getattr(diffusers, transformer, None)
        if not isinstance(found, type):
            raise ConfigError(f"Diffusers {diffusers.__version__} has no class {transformer}; is a newer one needed?")
        transformer = found
    return SplitFacts(*(bool(getattr(transformer, plan, None)) for plan in ("_cp_plan", "_tp_plan")))


def split_transformer(
    transformer: Any,
    layout: PipelineLayout,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> str:
    """Split a Diffusers transformer over the ranks of one replica, in place; return in words what was done.

    Collective over `group`, which holds the replica's ranks and no others, in the order of the layout. The transformer
    must be on `device`, whole and equal on every rank; with tp a rank keeps its share of the planned weights. After it
    all ranks call the transformer with the same inputs and get the same outputs. `timeout_s` is for groups made here.

    Raises, before anything is touched: LayoutError where the layout does not fit the ranks or the attention heads,
    ConfigError where Diffusers can't split this transformer so.
    """
    device = torch.device(device)
    name = type(transformer).__name__
    num_ranks = 1 if group is None else dist.get_world_size(group)
    if layout.replica_size != num_ranks:
        raise LayoutError(
            f"layout {layout} has replicas of {layout.replica_size} ranks, the process group has {num_ranks}; "
            f"use sizes whose product is {num_ranks}"
        )
    if not layout.is_split or group is None:
        where = "one rank" if num_ranks == 1 else f"each of {num_ranks} ranks"
        return f"{name} runs whole on {where}"
    _check_splittable(transformer, layout, device)
    if layout.tp > 1:
        _split_weights(transformer, group, device)
        return f"{name}'s weights are split over {layout.tp} ranks (tp {layout.tp})"
    _split_tokens(transformer, layout, group, device, timeout_s)
    return f"{name}'s tokens are split over {num_ranks} ranks (ring {layout.ring} x ulysses {layout.ulysses})"


@contextmanager
def whole(transformer: Any) -> Iterator[None]:
    """Within it a transformer whose tokens are split runs unsplit on every rank: what a split result is compared with.

    Not collective. Does nothing where the transformer isn't split. Raises ConfigError where its weights are split (tp):
    no rank has them all.
    """
    parallel = transformer._parallel_config
    if parallel is None:
        yield
        return
    if parallel.tensor_parallel_config is not None:
        raise ConfigError(
            f"the weights of {type(transformer).__name__} are split over {parallel.tensor_parallel_config._tp_degree} "
            "ranks and none has them all; load it again, or split it by --ulysses-degree"
        )
    processors = [each for each in _processors(transformer) if each._parallel_config is parallel]
    context_parallel.remove_context_parallel(transformer, transformer._cp_plan)
    _use(None, transformer, processors)
    try:
        yield
    finally:
        config = parallel.context_parallel_config
        context_parallel.apply_context_parallel(transformer, config, transformer._cp_plan)
        explain_lengths(transformer, PipelineLayout(ring=config.ring_degree, ulysses=config.ulysses_degree))
        _use(parallel, transformer, processors)


def _use(parallel: Any, transformer: Any, processors: list[Any]) -> None:
    for each in (transformer, *processors):
        each._parallel_config = parallel


def _check_splittable(transformer: Any, layout: PipelineLayout, device: torch.device) -> None:
    """Raise ConfigError or LayoutError where this transformer can't be split so; touch nothing."""
    name, facts = type(transformer).__name__, split_facts(type(transformer))
    if getattr(transformer, "_parallel_config", None) is not None:
        raise ConfigError(f"{name} is split already; load it again to split it in another way")
    if layout.tp > 1 and layout.ring * layout.ulysses > 1:
        raise ConfigError(f"Diffusers splits weights or tokens, not both: {layout}; use tp 1, or ring 1 and ulysses 1")
    has_plan, plan = (facts.has_tp_plan, "_tp_plan") if layout.tp > 1 else (facts.has_cp_plan, "_cp_plan")
    if not has_plan:
        raise ConfigError(
            f"{name} can't be split over {layout.replica_size} ranks (no {plan} in Diffusers); use --dp-size "
            f"{layout.replica_size} for as many replicas, or --whole-dit to run it whole on every rank"
        )
    num_heads = getattr(transformer.config, "num_attention_heads", None)
    for flag, size in (("--ulysses-degree", layout.ulysses), ("--tp-size", layout.tp)):
        if num_heads is not None and num_heads % size:
            raise LayoutError(f"{flag} {size} does not divide the {num_heads} attention heads of {name}")
    if layout.ring > 1:
        check_ring_attention(transformer, device)


def _split_weights(transformer: Any, group: dist.ProcessGroup, device: torch.device) -> None:
    config = TensorParallelConfig(mesh=_mesh(group, device))

    def setup(parallel: ParallelConfig) -> None:
        parallel.setup(dist.get_rank(group), dist.get_world_size(group), device, mesh=config.mesh)

    known = tensor_parallel._SUPPORTED_TP_DEVICES
    # hooks/tensor_parallel.py, apply_tensor_parallel, knows accelerators only; what it calls in torch takes a CPU mesh.
    tensor_parallel._SUPPORTED_TP_DEVICES = (*known, "cpu")
    try:
        with _placed(transformer, setup):
            transformer.enable_parallelism(config=config)
    except ValueError as error:  # a dimension that tp does not divide, quantized or offloaded weights
        raise ConfigError(f"{type(transformer).__name__}: {error}") from error
    finally:
        tensor_parallel._SUPPORTED_TP_DEVICES = known


def _split_tokens(
    transformer: Any, layout: PipelineLayout, group: dist.ProcessGroup, device: torch.device, timeout_s: float
) -> None:
    config = ContextParallelConfig(ring_degree=layout.ring, ulysses_degree=layout.ulysses)
    ring, ulysses = _lines(layout, group, timeout_s)

    def setup(parallel: ParallelConfig) -> None:
        # ContextParallelConfig.setup cuts these from one mesh, for which torch makes groups of the whole world.
        config._rank, config._world_size, config._device = dist.get_rank(group), layout.replica_size, device
        config._flattened_mesh = _mesh(group, device)
        for name, line in (("ring", ring), ("ulysses", ulysses)):
            if line is not None:
                setattr(config, f"_{name}_mesh", _mesh(line, device))
                setattr(config, f"_{name}_local_rank", dist.get_rank(line))

    warnings.filterwarnings("ignore", ".*all_gather_tensor.* is deprecated", FutureWarning)
    with _placed(transformer, setup):
        transformer.enable_parallelism(config=config)
    explain_lengths(transformer, layout)
    transformer.register_forward_pre_hook(fit_text, with_kwargs=True)
    if layout.ring > 1:
        take_ring_attention(transformer, device)


@contextmanager
def _placed(transformer: Any, setup: Callable[[ParallelConfig], None]) -> Iterator[None]:
    """Let one call of `enable_parallelism` on this object take the meshes and the device that `setup` gives.

    Stands in for ModelMixin._resolve_parallel_config (models/modeling_utils.py): its `rank %
    torch.accelerator.device_count()` divides by zero without an accelerator, and its mesh is always the whole world.
    """

    def resolve(config: ContextParallelConfig | TensorParallelConfig) -> ParallelConfig:
        kind = "tensor" if isinstance(config, TensorParallelConfig) else "context"
        parallel = ParallelConfig(**{f"{kind}_parallel_config": config})
        setup(parallel)
        transformer._parallel_config = parallel
        return parallel

    logger = logging.getLogger("diffusers.models.modeling_utils")
    silent = logger.disabled
    logger.disabled = True  # "an experimental feature", once for each rank
    transformer._resolve_parallel_config = resolve
    try:
        yield
    except BaseException:
        transformer._parallel_config = None
        raise
    finally:
        del transformer._resolve_parallel_config
        logger.disabled = silent


def _mesh(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    # Named after its group: DTensor remembers meshes, and takes an older group for a mesh that equals that group's.
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(group.group_name,))
    # torch holds the group by name already, and a gloo group that lives until the interpreter ends can abort it (Axis).
    mesh._pg_registry.clear()
    return mesh


def _lines(
    layout: PipelineLayout, group: dist.ProcessGroup, timeout_s: float
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return this rank's ring and ulysses groups, None for one of size 1; ulysses neighbours are innermost."""
    if layout.ring == 1:
        return None, group
    if layout.ulysses == 1:
        return group, None
    ranks = dist.get_process_group_ranks(group)
    rings = [ranks[column :: layout.ulysses] for column in range(layout.ulysses)]
    rows = [ranks[start : start + layout.ulysses] for start in range(0, len(ranks), layout.ulysses)]
    return _line_of(rings, group, timeout_s), _line_of(rows, group, timeout_s)


def _line_of(lines: list[list[int]], parent: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """Make the process groups of one partition of `parent`; return the one that this rank is in.

    Inside a part of the world (no command does that) torch asks that all ranks be in equally many groups.
    """
    whole_world = parent is dist.group.WORLD  # every rank of it makes every group
    made = {
        tuple(line): dist.new_group(
            line, timeout=timedelta(seconds=timeout_s), use_local_synchronization=not whole_world
        )
        for line in lines
        if whole_world or dist.get_rank() in line
    }
    return cast(dist.ProcessGroup, next(group for line, group in made.items() if dist.get_rank() in line))


def _processors(transformer: nn.Module) -> Iterator[Any]:
    """Yield the attention processors that Diffusers tells of a split."""
    for module in transformer.modules():
        processor = getattr(module, "processor", None)
        if processor is not None and hasattr(processor, "_parallel_config"):
            yield processor
