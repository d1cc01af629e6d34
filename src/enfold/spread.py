"""One encoder that is in memory, spread over the ranks in place."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from enfold.comm import DEFAULT_TIMEOUT_S, Groups, Mesh, build_mesh
from enfold.config import Mode, Numerics, check_mode, check_numerics
from enfold.errors import CheckpointError, ConfigError, LayoutError
from enfold.exact import Current, align_activations, gather_few_rows, has_bf16_instructions, tile_rows
from enfold.flow import Spread
from enfold.layout import Layout
from enfold.plan import Plan, plan_encoder
from enfold.shard import ShardPlan, cut_weights, forward_of, plan_shards, replace_forward, wire

logger = logging.getLogger("enfold")


def parallelize_encoder(
    module: PreTrainedModel,
    mode: Mode = "auto",
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout | None = None,
    numerics: Numerics = "exact",
    timeout: float = DEFAULT_TIMEOUT_S,
    batch_size: int | None = None,
    groups: Groups | None = None,
) -> PreTrainedModel:
    """Spread one Hugging Face encoder over the ranks of `group` (default: all), in place, and return it.

    Collective: every rank calls it with the same module. With tp > 1 each rank keeps its rows of the weights and frees
    the others. The module keeps its class, its attributes and its call; `module.plan` says what was decided and why.

    layout: replicate x dp x tp; its size divides the ranks of the group, which it cuts into replicas.
    timeout: seconds that a call waits for the other ranks.
    batch_size: prompts per call that `auto` plans for, None where it differs from call to call.
    groups: process groups to reuse; encoders of one pipeline share them.

    Raises LayoutError, UnknownFamilyError or ConfigError before any weight is touched.
    """
    groups = groups or Groups(group)
    return spread_out(prepare(module, mode, groups, layout, numerics, batch_size), groups, timeout)


@dataclass(frozen=True)
class Prepared:
    """An encoder that is planned and not touched yet. shards is None where no weight is cut."""

    module: PreTrainedModel
    plan: Plan
    shards: ShardPlan | None


def prepare(
    module: PreTrainedModel,
    mode: Mode,
    groups: Groups,
    layout: Layout | None = None,
    numerics: Numerics = "exact",
    batch_size: int | None = None,
) -> Prepared:
    """Plan one encoder; everything that can be refused is refused here, alike on every rank."""
    check_mode(mode)
    check_numerics(numerics)
    if not isinstance(module, PreTrainedModel):
        raise ConfigError(f"{type(module).__name__} is no Hugging Face encoder (a transformers.PreTrainedModel)")
    if hasattr(module, "plan") and isinstance(module.plan, Plan):
        raise ConfigError(f"{type(module).__name__} is spread already ({module.plan.summary()}); load it again")
    plan = decide(module.config, type(module).__name__, mode, groups, layout, numerics, batch_size, module.dtype)
    shards = None
    if plan.layout.tp > 1:
        check_in_memory(module)
        shards = plan_shards(module, plan.layout.tp, numerics)
    return Prepared(module, plan, shards)


def spread_out(prepared: Prepared, groups: Groups, timeout: float = DEFAULT_TIMEOUT_S) -> PreTrainedModel:
    """Cut and wire a prepared encoder; collective, since it makes the process groups that are missing."""
    module, plan, shards = prepared.module, prepared.plan, prepared.shards
    mesh = build_mesh(plan.layout, groups, timeout)
    if shards is not None:
        cut_weights(module, shards, mesh.tp.index)
    attach(module, plan, mesh, shards)
    return module


def decide(
    config: Any,
    architecture: str,
    mode: Mode,
    groups: Groups,
    layout: Layout | None,
    numerics: Numerics,
    batch_size: int | None,
    dtype: torch.dtype,
) -> Plan:
    """Return the plan for an encoder over the ranks of `groups`, and say at WARNING what it can't honour."""
    plan = plan_encoder(
        {**config.to_dict(), "model_type": config.model_type or architecture, "architectures": [architecture]},
        mode,
        len(groups.ranks) if layout is None else layout.size,
        batch_size,
        layout=layout,
        dtype=str(dtype).removeprefix("torch."),
        numerics=numerics,
    )
    for warning in plan.warnings:
        logger.warning("%s: %s", plan.family, warning)
    return plan


def attach(module: Any, plan: Plan, mesh: Mesh, shards: ShardPlan | None) -> Spread:
    """Make `module`, whose weights are cut as `shards` says, run on `mesh`: wire its layers and replace its forward."""
    wire_layers(module, plan, mesh, shards)
    current = Current()
    if plan.numerics == "exact" and mesh.dp.size > 1:
        gather_few_rows(module, mesh.dp, current)
    spread = Spread(forward_of(module), mesh, plan, current)
    replace_forward(module, spread.encode)
    return spread


def wire_layers(module: Any, plan: Plan, mesh: Mesh, shards: ShardPlan | None) -> None:
    """Have the layers of a cut module gather over tp, add the exact rules that hold for any forward, note the plan."""
    if shards is not None:
        wire(module, shards, mesh.tp)
        module.save_pretrained = refuse_to_save
    if plan.numerics == "exact":
        align_activations(module)
        if not has_bf16_instructions():
            tile_rows(module)
    module.plan = plan


def refuse_to_save(*_: Any, **__: Any) -> None:
    """Stand in for save_pretrained where it would save a part of the weights; raise CheckpointError."""
    raise CheckpointError(
        "each rank of a folded encoder holds a part of its weights; save the module before folding it"
    )


def check_in_memory(module: nn.Module) -> None:
    """Raise LayoutError where weights are not where they are computed with: a fold can't cut what an offload moves."""
    away = _on_meta(module)
    if away:
        raise LayoutError(
            f"fold can't cut {len(away)} offloaded weights ({', '.join(away[:3])}, ...); call enfold.parallelize first "
            "and enable the offload afterwards, or load with enfold.load_encoder"
        )


def _on_meta(module: nn.Module) -> Sequence[str]:
    return [name for name, parameter in module.named_parameters() if parameter.is_meta]
