"""A tp_plan applied to a Hugging Face module: each rank keeps slices of the full weights, linear layers are told how
to put the pieces together. The module's own code stays as it is.

numerics="exact" is gather-fold: every sharded layer is cut along its output features, and a layer that would be
row-parallel gathers its input first. No sum is ever split, so the bits are those of the whole layer.
numerics="fast" cuts row-parallel layers along their input features and sums with all-reduce.

Planning (`plan_shards`) looks at the module only, needs no process group, and works on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from enfold.comm import Axis
from enfold.config import Numerics
from enfold.encoders import family_of
from enfold.encoders.family import Family
from enfold.errors import LayoutError
from enfold.layout import FEATURE_UNIT, Cut, HeadCut, cut_features, cut_heads

STYLES = ("colwise", "packed_colwise", "rowwise", "colwise_gather_output", "head_columns")
"""The styles of a tp_plan that cut something; the others that Transformers ships (replicated norms) need no work."""

LM_HEAD = {"lm_head": "colwise_gather_output"}

HEAD_DIM_NAMES = ("head_dim", "key_value_proj_dim", "attention_head_size")
"""What the models call the width of one head."""


@dataclass(frozen=True)
class Shard:
    """How one module is spread over the tp ranks. Cuts are per rank; None means whole.

    out_cuts: the rows (output features) that each rank holds, as the ranges of `num_fused` stacked projections.
    in_cuts: the entries of the last dimension of the input that each rank has.
    dim: the dimension of the weight that is cut (1 for tables, and for row-parallel layers in numerics="fast").
    """

    style: str
    out_cuts: tuple[Cut, ...] | None = None
    in_cuts: tuple[Cut, ...] | None = None
    dim: int = 0
    num_fused: int = 1
    size: int = 0

    @property
    def in_widths(self) -> list[int] | None:
        """Entries of the input that each rank has; None where each has all of them."""
        return None if self.in_cuts is None else [stop - start for start, stop in self.in_cuts]

    @property
    def out_widths(self) -> list[int] | None:
        """Entries of the output that each rank makes; None where each makes all of them."""
        return None if self.out_cuts is None else [stop - start for start, stop in self.out_cuts]

    def ranges(self, index: int) -> list[Cut] | None:
        """Return the ranges of the cut dimension of the full weight that rank `index` holds; None: all of it."""
        cuts = self.in_cuts if self.style == "fast_rowwise" else self.out_cuts
        if cuts is None:
            return None
        start, stop = cuts[index]
        return [(part * self.size + start, part * self.size + stop) for part in range(self.num_fused)]


@dataclass(frozen=True)
class AttentionShard:
    """The heads of one attention module that each tp rank has."""

    heads: tuple[HeadCut, ...]
    head_dim: int


@dataclass(frozen=True)
class ShardPlan:
    """What plan_shards found: shards by module name, heads by attention module name, and what stays whole and why."""

    tp_size: int
    modules: Mapping[str, Shard]
    attentions: Mapping[str, AttentionShard]
    whole: tuple[str, ...]


def plan_shards(module: nn.Module, tp_size: int, numerics: Numerics = "exact") -> ShardPlan:
    """Return how `module` is cut over `tp_size` ranks; raise LayoutError where nothing would be.

    A module whose family has no table stays whole, and so does one that can't be cut (fewer heads than ranks).
    """
    shards: dict[str, Shard] = {}
    attentions: dict[str, AttentionShard | None] = {}
    whole: set[str] = set()
    for table, name, child in _covered(module):
        style = table.style_of(name, child)
        if style is None:
            continue
        parent = name.rpartition(".")[0]
        if parent not in attentions and table.is_attention(module.get_submodule(parent)):
            attentions[parent] = _attention_shard(table.family, module.get_submodule(parent), tp_size)
        shard = _shard(table.family, name, child, style, attentions, tp_size, numerics)
        if isinstance(shard, Shard):
            shards[name] = shard
        else:
            whole.add(shard)
    if tp_size > 1 and not shards:
        reasons = "; ".join(sorted(whole)) or "no module of it has a table"
        raise LayoutError(f"fold over tp={tp_size} would shard nothing ({reasons}); use dp or replicate")
    cut = {name: attention for name, attention in attentions.items() if attention is not None}
    return ShardPlan(tp_size, shards, cut, tuple(sorted(whole)))


@dataclass(frozen=True)
class _Table:
    """The styles of one model inside a module tree: its family's table, or the one its config ships."""

    family: Family
    styles: Mapping[str, str]
    token_embedding: nn.Module | None

    def style_of(self, name: str, child: nn.Module) -> str | None:
        if child is self.token_embedding:
            return "columns"
        for pattern, style in self.styles.items():
            if re.search(rf"(^|\.){re.escape(pattern).replace(re.escape('*'), '[0-9]+')}$", name):
                return style if style in STYLES else None
        return None

    def is_attention(self, parent: nn.Module) -> bool:
        names = (self.family.fused_qkv,) if self.family.fused_qkv else (self.family.query, self.family.key)
        return all(hasattr(parent, name) for name in names)


def _covered(module: nn.Module) -> Iterator[tuple[_Table, str, nn.Module]]:
    """Yield each linear layer and table with the styles of the innermost model around it that has some."""
    tables: dict[str, _Table] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, PreTrainedModel) and (family := family_of(child.config.model_type)):
            shipped = getattr(child.config, "base_model_tp_plan", None) or {}
            tables[name] = _Table(family, family.tp_plan or {**shipped, **LM_HEAD}, _token_embedding(child))
        if isinstance(child, nn.Linear | nn.Embedding):
            owners = [prefix for prefix in tables if not prefix or name.startswith(f"{prefix}.")]
            if owners:
                yield tables[max(owners, key=len)], name, child


def _token_embedding(model: PreTrainedModel) -> nn.Module | None:
    try:
        found = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Embedding) else None


def _attention_shard(family: Family, attention: nn.Module, tp_size: int) -> AttentionShard | None:
    """Return the heads of every rank, counted from the module itself; None where there are fewer heads than ranks."""
    head_dim = next(int(getattr(attention, name)) for name in HEAD_DIM_NAMES if hasattr(attention, name))
    if family.fused_qkv:
        num_heads = num_kv_heads = getattr(attention, family.fused_qkv).out_features // (3 * head_dim)
    else:
        num_heads = getattr(attention, family.query).out_features // head_dim
        num_kv_heads = getattr(attention, family.key).out_features // head_dim
    cuts = cut_heads(num_heads, num_kv_heads, tp_size)
    return None if cuts is None else AttentionShard(tuple(cuts), head_dim)


def _shard(
    family: Family,
    name: str,
    child: nn.Module,
    style: str,
    attentions: Mapping[str, AttentionShard | None],
    tp_size: int,
    numerics: Numerics,
) -> Shard | str:
    """Return the shard of one module, or the words that say why it stays whole."""
    parent, _, leaf = name.rpartition(".")
    attention = attentions.get(parent)
    in_attention = parent in attentions
    if style == "columns":
        cuts = cut_features(child.embedding_dim, tp_size)
        return _or_whole(Shard(style, _frozen(cuts), dim=1), f"token embedding: {child.embedding_dim} features")
    if style == "head_columns" or (in_attention and style in ("colwise", "packed_colwise")):
        if attention is None:
            return f"attention: fewer heads than {tp_size} ranks"
        return _head_shard(family, leaf, child, style, attention)
    num_fused = (family.num_fused or {}).get(leaf, 1)
    size = child.out_features // num_fused
    out_cuts = _frozen(cut_features(size, tp_size))
    if style != "rowwise":
        return _or_whole(Shard(style, out_cuts, num_fused=num_fused, size=size), f"{leaf}: {size} features")
    if in_attention:
        in_cuts = attention and tuple(
            (heads.query[0] * attention.head_dim, heads.query[1] * attention.head_dim) for heads in attention.heads
        )
    else:
        in_cuts = _frozen(cut_features(child.in_features, tp_size))
    if numerics == "fast":
        return Shard("fast_rowwise", None, in_cuts, dim=1) if in_cuts else f"{leaf}: {child.in_features} input features"
    if in_cuts is None:
        return _or_whole(Shard(style, out_cuts, None), f"{leaf}: {size} features")
    return Shard(style, out_cuts, in_cuts)


def _head_shard(family: Family, leaf: str, child: nn.Module, style: str, attention: AttentionShard) -> Shard:
    if style == "head_columns":
        return Shard(style, tuple(heads.query for heads in attention.heads), dim=1)
    is_kv = leaf in (family.key, family.value)
    heads = [heads.key_value if is_kv else heads.query for heads in attention.heads]
    cuts = tuple((start * attention.head_dim, stop * attention.head_dim) for start, stop in heads)
    num_fused = 3 if leaf == family.fused_qkv else 1
    return Shard("colwise", cuts, num_fused=num_fused, size=child.out_features // num_fused)


def _or_whole(shard: Shard, what: str) -> Shard | str:
    return f"{what} are too few to cut at multiples of {FEATURE_UNIT}" if shard.out_cuts is None else shard


def _frozen(cuts: Sequence[Cut] | None) -> tuple[Cut, ...] | None:
    return None if cuts is None else tuple(cuts)


# Applying a plan: weights are cut, counts are corrected, and the layers that put pieces together are told how.


def cut_weights(module: nn.Module, plan: ShardPlan, index: int) -> None:
    """Replace each sharded parameter of `module` by the slice of tp rank `index`; tied ones stay tied.

    Slices are copies and each full weight is freed at once; on the meta device only shapes change.
    """
    made: dict[tuple[int, Shard], nn.Parameter] = {}
    full: list[nn.Parameter] = []  # keeps ids unique while they are keys
    for name, shard in plan.modules.items():
        child = module.get_submodule(name)
        ranges = shard.ranges(index)
        if ranges is None:
            continue
        for key, parameter in list(child.named_parameters(recurse=False)):
            if parameter.dim() <= shard.dim:
                continue  # the bias of a row-parallel layer stays whole
            if (id(parameter), shard) not in made:
                made[id(parameter), shard] = nn.Parameter(
                    take(parameter.data, ranges, shard.dim), requires_grad=parameter.requires_grad
                )
                full.append(parameter)
            setattr(child, key, made[id(parameter), shard])
        _correct_sizes(child)
    for name, attention in plan.attentions.items():
        _correct_counts(module.get_submodule(name), attention, index)


def take(full: torch.Tensor, ranges: Sequence[Cut], dim: int) -> torch.Tensor:
    """Return a copy of the ranges of `full` along `dim`, one after another."""
    return torch.cat([full.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def _correct_sizes(child: nn.Module) -> None:
    if isinstance(child, nn.Linear):
        child.out_features, child.in_features = child.weight.shape
    elif isinstance(child, nn.Embedding):
        child.embedding_dim = child.weight.shape[1]


def _correct_counts(attention: nn.Module, shard: AttentionShard, index: int) -> None:
    heads = shard.heads[index]
    counts = {
        "n_heads": heads.num_query,
        "num_heads": heads.num_query,
        "num_attention_heads": heads.num_query,
        "num_key_value_heads": heads.num_key_value,
        "num_key_value_groups": heads.num_query // heads.num_key_value,
        "inner_dim": heads.num_query * shard.head_dim,
        "all_head_size": heads.num_query * shard.head_dim,
    }
    for name, count in counts.items():
        if hasattr(attention, name):
            setattr(attention, name, count)


def wire(module: nn.Module, plan: ShardPlan, axis: Axis) -> None:
    """Have the layers of a module whose weights are cut gather over `axis` what the pieces make."""
    for name, shard in plan.modules.items():
        child: Any = module.get_submodule(name)
        if shard.style == "fast_rowwise":
            child.forward = partial(_sum_partials, child, axis)
        elif shard.style in ("rowwise", "colwise_gather_output", "columns"):
            child.forward = partial(_gathered, child.forward, axis, shard.in_widths, shard.out_widths)
    for name, attention in plan.attentions.items():
        child = module.get_submodule(name)
        child.forward = partial(_whole_attention_weights, child.forward, axis, attention)


def _gathered(
    forward: Callable[..., torch.Tensor],
    axis: Axis,
    in_widths: Sequence[int] | None,
    out_widths: Sequence[int] | None,
    x: torch.Tensor,
) -> torch.Tensor:
    if in_widths is not None:
        x = axis.gather_features(x, in_widths)
    y = forward(x)
    return y if out_widths is None else axis.gather_features(y, out_widths)


def _sum_partials(layer: nn.Linear, axis: Axis, x: torch.Tensor) -> torch.Tensor:
    y = axis.all_reduce(F.linear(x, layer.weight))
    return y if layer.bias is None else y + layer.bias


def _whole_attention_weights(
    forward: Callable[..., Any], axis: Axis, shard: AttentionShard, *args: Any, **kwargs: Any
) -> Any:
    """Gather the attention weights [batch, heads, query, key] over the heads, where a caller asked for them."""
    output = forward(*args, **kwargs)
    if not (isinstance(output, tuple) and len(output) > 1 and isinstance(output[-1], torch.Tensor)):
        return output
    return (*output[:-1], axis.gather_features(output[-1], [heads.num_query for heads in shard.heads], dim=1))
