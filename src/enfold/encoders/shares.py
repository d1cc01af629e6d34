"""How the weights of an inventory are shared out over a tp group: the arithmetic of shard.py, without the weights."""

from __future__ import annotations

from enfold.config import EncoderFacts, Numerics, Weight
from enfold.layout import FEATURE_UNIT, HeadCut, cut_features, cut_heads


def rank_parameters(facts: EncoderFacts, tp: int, numerics: Numerics = "exact") -> list[int]:
    """Return how many parameters each rank of a tp group holds."""
    cuts = [(weight, _weight_cuts(weight, facts, tp, numerics)) for weight in facts.weights]
    embedding_is_whole = any(weight.split == "columns" and cut is None for weight, cut in cuts)
    totals = [0] * tp
    for weight, cut in cuts:
        if weight.tied and cut is None and (tp == 1 or embedding_is_whole):
            continue  # it is the embedding itself
        for rank in range(tp):
            totals[rank] += weight.num_parameters if cut is None else cut[rank]
    return totals


def whole_parts(facts: EncoderFacts, tp: int, numerics: Numerics = "exact") -> tuple[str, ...]:
    """Return what could be split over `tp` ranks and stays whole, each with its reason."""
    parts: dict[str, None] = {}
    for weight in facts.weights:
        split = _split(weight, numerics)
        if split == "whole" or tp == 1 or _weight_cuts(weight, facts, tp, numerics) is not None:
            continue
        if split in ("heads", "kv_heads", "head_columns"):
            num_heads = (weight.heads or (facts.num_heads, 0))[0]
            owner = "attention" if weight.heads is None else f"attention of the {weight.name.partition(chr(39))[0]}"
            parts[f"{owner}: {num_heads} heads < {tp} ranks"] = None
        else:
            features = weight.shape[1] if split == "columns" else weight.shape[0] // weight.num_fused
            units = features // FEATURE_UNIT
            name = weight.name.removesuffix(" bias")
            parts[f"{name}: {features} features are {units} units of {FEATURE_UNIT} < {tp} ranks"] = None
    return tuple(parts)


def shards_something(facts: EncoderFacts, tp: int, numerics: Numerics = "exact") -> bool:
    """Return whether a fold over `tp` ranks would cut any weight."""
    return any(_weight_cuts(weight, facts, tp, numerics) is not None for weight in facts.weights)


def _split(weight: Weight, numerics: Numerics) -> str:
    return weight.fast_split if numerics == "fast" and weight.fast_split else weight.split


def _weight_cuts(weight: Weight, facts: EncoderFacts, tp: int, numerics: Numerics) -> list[int] | None:
    """Return the parameters of `weight` that each tp rank holds; None where every rank holds it whole."""
    split = _split(weight, numerics)
    if tp == 1 or split == "whole":
        return None
    if split in ("heads", "kv_heads", "head_columns"):
        num_heads, num_kv_heads = weight.heads or (facts.num_heads, facts.num_kv_heads)
        heads = cut_heads(num_heads, num_kv_heads, tp)
        total = num_kv_heads if split == "kv_heads" else num_heads
        shares = None if heads is None else [_num_heads(cut, split) for cut in heads]
    else:
        total = weight.shape[1] if split == "columns" else weight.shape[0] // weight.num_fused
        cuts = cut_features(total, tp)
        shares = None if cuts is None else [stop - start for start, stop in cuts]
    return None if shares is None else [weight.num_parameters // total * share for share in shares]


def _num_heads(cut: HeadCut, split: str) -> int:
    return cut.num_key_value if split == "kv_heads" else cut.num_query
