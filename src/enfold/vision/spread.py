"""A vision tower that is in memory or on the meta device, planned, cut and wired over its own mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from enfold.comm import DEFAULT_TIMEOUT_S, Groups, Mesh, build_mesh
from enfold.config import Mode, Numerics
from enfold.encoders import family_of, packs_patches
from enfold.encoders.family import Tower, TowerSizes
from enfold.errors import ConfigError, LayoutError
from enfold.layout import Layout
from enfold.plan import Plan
from enfold.shard import ShardPlan, cut_weights, plan_shards, replace_forward
from enfold.spread import check_in_memory, decide, wire_layers
from enfold.vision.config import VisionParallelConfig
from enfold.vision.flow import TowerSpread


@dataclass(frozen=True)
class PreparedTower:
    """A tower that is planned and not touched yet."""

    module: PreTrainedModel
    tower: Tower
    sizes: TowerSizes
    config: VisionParallelConfig
    plan: Plan
    shards: ShardPlan | None


def prepare_tower(
    module: PreTrainedModel, config: VisionParallelConfig, groups: Groups, numerics: Numerics = "exact"
) -> PreparedTower:
    """Plan one tower; everything that can be refused is refused here, alike on every rank. Resolves `config`."""
    if not isinstance(config, VisionParallelConfig):
        raise ConfigError(f"vision={config!r} is no VisionParallelConfig; use VisionParallelConfig(tp_size=1)")
    family = family_of(module.config.model_type)
    if family is None or family.tower is None:
        raise ConfigError(f"{type(module).__name__} is no vision tower that enfold packs; leave vision= out")
    if isinstance(getattr(module, "plan", None), Plan):
        raise ConfigError(f"{type(module).__name__} is spread already ({module.plan.summary()}); load it again")
    layout = config.layout(len(groups.ranks))
    sizes = family.tower.read(module.config.to_dict())
    config.check_merge_size(sizes.merge_size)
    plan = decide(module.config, type(module).__name__, "auto", groups, layout, numerics, None, module.dtype)
    shards = None
    if layout.tp > 1:
        shards = plan_shards(module, layout.tp, numerics)
    return PreparedTower(module, family.tower, sizes, config, plan, shards)


def check_only_vision(mode: str, layout: Layout | None, batch_size: int | None) -> None:
    """Raise ConfigError where arguments that are for other encoders are given beside vision=."""
    if mode != "auto" or layout is not None or batch_size is not None:
        raise ConfigError(
            "vision= spreads a vision tower by its own sizes, VisionParallelConfig(tp_size=, dp_size=); leave mode, "
            "layout and batch_size out"
        )


def config_of_mode(mode: Mode, layout: Layout | None) -> VisionParallelConfig:
    """Return how a tower is spread that was given like any other encoder, by a mode or a layout."""
    if layout is not None:
        if layout.replicate > 1:
            raise LayoutError(f"layout {layout} repeats a vision tower; use replicate 1, such as 1x{layout.size}x1")
        return VisionParallelConfig(tp_size=layout.tp, dp_size=layout.dp)
    return VisionParallelConfig(dp_size=1) if mode == "fold" else VisionParallelConfig()


def is_tower(module: Any) -> bool:
    """Return whether a module is a vision tower that packs the patches of images of any size."""
    return isinstance(module, PreTrainedModel) and packs_patches(module.config.model_type)


def spread_tower(
    prepared: PreparedTower,
    groups: Groups,
    timeout: float = DEFAULT_TIMEOUT_S,
    text_group: dist.ProcessGroup | None = None,
) -> PreTrainedModel:
    """Cut and wire a prepared tower that is in memory; collective, since it makes the process groups that are missing.

    text_group: the text model's tensor parallel group, used again where it is the tower's too.
    """
    if prepared.shards is not None:
        check_in_memory(prepared.module)
    mesh = build_mesh(prepared.plan.layout, groups, timeout, tp_group=text_group)
    if prepared.shards is not None:
        cut_weights(prepared.module, prepared.shards, mesh.tp.index)
    attach_tower(prepared, mesh)
    return prepared.module


def attach_planned(module: PreTrainedModel, plan: Plan, mesh: Mesh, shards: ShardPlan | None) -> TowerSpread:
    """As attach_tower, for a tower that was planned and cut like any other encoder, by a mode or a layout."""
    family = family_of(module.config.model_type)
    assert family is not None
    assert family.tower is not None
    config = VisionParallelConfig(tp_size=mesh.tp.size, dp_size=mesh.dp.size)
    config.resolve_tp_dp(mesh.layout.size)
    sizes = family.tower.read(module.config.to_dict())
    return attach_tower(PreparedTower(module, family.tower, sizes, config, plan, shards), mesh)


def attach_tower(prepared: PreparedTower, mesh: Mesh) -> TowerSpread:
    """Make a tower whose weights are cut run on `mesh`: wire its layers and replace its forward.

    The module gets `plan` and `spread` (a TowerSpread, with counters and warm_up). Where weights are cut it refuses to
    be saved.
    """
    module: Any = prepared.module
    wire_layers(module, prepared.plan, mesh, prepared.shards)
    spread = TowerSpread(module, prepared.tower, prepared.sizes, mesh, prepared.config)
    replace_forward(module, spread.encode_patches if prepared.tower.takes == "patches" else spread.encode_images)
    module.spread = spread
    return spread
