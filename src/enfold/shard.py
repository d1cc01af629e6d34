"""A tp_plan applied to a Hugging Face module: each rank keeps slices of the full weights, linear layers are told how
to put the pieces together. The module's own code stays as it is.

numerics="exact" is gather-fold: every sharded layer is cut along its output features, and a layer that would be
row-parallel gathers its input first. No sum is ever split, so the bits are those of the whole layer.
numerics="fast" cuts row-parallel layers along their input features and sums with all-reduce.

Planning (`plan_shards`) looks at the module only, needs no process group, and works on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
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
        style = STYLES.get(table.style_of(name, child) or "")
        if style is None:
            continue
        parent = name.rpartition(".")[0]
        if parent not in attentions and table.is_attention(module.get_submodule(parent)):
            attentions[parent] = _attention_shard(table.family, module.get_submodule(parent), tp_size)
        owner = _attention_of(table.family, name, attentions)
        attention = attentions[owner] if owner is not None else None
        leaf = name.rpartition(".")[2]
        shard = style(_Site(table.family, leaf, child, owner is not None, attention, tp_size, numerics))
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
                return style
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
            styles = family.tp_plan or {**shipped, **LM_HEAD}
            if name and family.tower is not None and family.tower.takes == "patches":
                styles = {}  # a tower inside another model is spread by itself (enfold.vision), or stays whole
            tables[name] = _Table(family, styles, _token_embedding(child))
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


@dataclass(frozen=True)
class _Site:
    """One layer or table that a style names. attention: the heads per rank where it belongs to one that can be cut."""

    family: Family
    leaf: str
    child: Any
    in_attention: bool
    attention: AttentionShard | None
    tp_size: int
    numerics: Numerics

    @property
    def num_fused(self) -> int:
        return (self.family.num_fused or {}).get(self.leaf, 1)

    @property
    def size(self) -> int:
        """Output features of one of the fused projections."""
        return int(self.child.out_features) // self.num_fused

    def cut(self, num_features: int) -> tuple[Cut, ...] | None:
        cuts = cut_features(num_features, self.tp_size)
        return None if cuts is None else tuple(cuts)

    def head_features(self, heads: Iterable[Cut]) -> tuple[Cut, ...]:
        dim = self.attention.head_dim if self.attention else 0
        return tuple((start * dim, stop * dim) for start, stop in heads)

    def too_few(self, num_features: int, what: str = "") -> str:
        return (
            f"{what or self.leaf}: {num_features} features are too few to cut at multiples of {FEATURE_UNIT} "
            f"over {self.tp_size} ranks"
        )


def _colwise(site: _Site) -> Shard | str:
    if site.in_attention:
        return _heads(site)
    cuts = site.cut(site.size)
    shard = Shard("colwise", cuts, num_fused=site.num_fused, size=site.size)
    return site.too_few(site.size) if cuts is None else shard


def _heads(site: _Site) -> Shard | str:
    if site.attention is None:
        return f"attention: fewer heads than {site.tp_size} ranks"
    is_kv = site.leaf in (site.family.key, site.family.value)
    cuts = site.head_features(heads.key_value if is_kv else heads.query for heads in site.attention.heads)
    return Shard("colwise", cuts, num_fused=site.num_fused, size=site.size)


def _head_columns(site: _Site) -> Shard | str:
    if site.attention is None:
        return f"attention: fewer heads than {site.tp_size} ranks"
    return Shard("head_columns", tuple(heads.query for heads in site.attention.heads), dim=1)


def _rowwise(site: _Site) -> Shard | str:
    """Gather-fold cuts the rows too, after gathering the input; the fast form cuts the columns and sums."""
    if site.in_attention:
        in_cuts = site.head_features(heads.query for heads in site.attention.heads) if site.attention else None
    else:
        in_cuts = site.cut(site.child.in_features)
    if site.numerics == "fast":
        return Shard("fast_rowwise", None, in_cuts, dim=1) if in_cuts else site.too_few(site.child.in_features)
    out_cuts = site.cut(site.size)
    if out_cuts is None and in_cuts is None:
        return site.too_few(site.size)
    return Shard("rowwise", out_cuts, in_cuts)


def _gather_output(site: _Site) -> Shard | str:
    cuts = site.cut(site.size)
    return site.too_few(site.size) if cuts is None else Shard("colwise_gather_output", cuts)


def _columns(site: _Site) -> Shard | str:
    width = int(site.child.embedding_dim)
    cuts = site.cut(width)
    return site.too_few(width, "token embedding") if cuts is None else Shard("columns", cuts, dim=1)


STYLES: Mapping[str, Callable[[_Site], Shard | str]] = {
    "colwise": _colwise,
    "packed_colwise": _colwise,
    "rowwise": _rowwise,
    "colwise_gather_output": _gather_output,
    "head_columns": _head_columns,
    "columns": _columns,
}
"""How each style of a tp_plan is cut: a shard, or the words that say why it stays whole. The other styles that
Transformers ships (replicated norms) need no work."""


def _attention_of(family: Family, name: str, attentions: Iterable[str]) -> str | None:
    """Return the attention module that a projection belongs to: its parent, or (BERT's output) its parent's sibling."""
    base = (
        name.removesuffix(family.output).rstrip(".") if name.endswith(f".{family.output}") else name.rpartition(".")[0]
    )
    return next((owner for owner in attentions if owner == base or owner.startswith(f"{base}.")), None)


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
            wrap_forward(child, _sum_partials, child, axis)
        elif shard.style in ("rowwise", "colwise_gather_output", "columns"):
            wrap_forward(child, _gathered, axis, shard.in_widths, shard.out_widths)
    for name, attention in plan.attentions.items():
        wrap_forward(module.get_submodule(name), _whole_attention_weights, axis, attention)


def wrap_forward(module: Any, function: Callable[..., Any], *first: Any) -> None:
    """Replace a module's forward by `function(forward, *first, ...)`."""
    replace_forward(module, partial(function, forward_of(module), *first))


def forward_of(module: Any) -> Callable[..., Any]:
    """Return a module's forward; where accelerate has hooked the module, the one beneath the hook."""
    forward: Callable[..., Any] = getattr(module, "_old_forward", module.forward)
    return forward


def replace_forward(module: Any, function: Callable[..., Any]) -> None:
    """Put `function` in the place of a module's forward, with its signature (generate() reads that).

    Beneath an accelerate hook, which so still brings weights and inputs together before the call, and which can be
    taken off again.
    """
    name = "_old_forward" if hasattr(module, "_old_forward") else "forward"
    setattr(module, name, update_wrapper(partial(function), forward_of(module)))


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


def _sum_partials(_: Callable[..., torch.Tensor], layer: nn.Linear, axis: Axis, x: torch.Tensor) -> torch.Tensor:
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
