"""What a mode comes to: the layout of one encoder, the reasons for it in words, and what could not be honoured.

Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from enfold.config import EncoderFacts, Mode, Numerics
from enfold.encoders import packs_patches, supported
from enfold.encoders.shares import shards_something
from enfold.errors import LayoutError, UnknownFamilyError
from enfold.layout import Layout, cut_heads

FOLD_MIN_HIDDEN_SIZE = 4096
"""From this width on one prompt is folded. Measured on H100s with NVLink; the fallback where there is no profile."""

DP_MIN_HIDDEN_SIZE = 1024
"""From this width on more than one prompt is split. Measured on H100s with NVLink; the fallback as above."""


@dataclass(frozen=True)
class Ask:
    """What the caller wants, checked. batch_size: items (prompts or images) per call, None where it is not known."""

    mode: Mode
    replica_size: int
    batch_size: int | None
    layout: Layout | None
    numerics: Numerics


@dataclass(frozen=True)
class Choice:
    """A layout, the reasons for it, and those among them that tell what could not be honoured."""

    layout: Layout
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def choose(ask: Ask, facts: EncoderFacts, is_known: bool) -> Choice:
    """Return the layout and the reasons for it: one rank, a given layout, a given mode, or the rules, in that order.

    Raises LayoutError where mode and layout contradict each other, UnknownFamilyError for a fold without a table.
    """
    if ask.replica_size == 1:
        text = "there is 1 rank: nothing to spread"
        is_quiet = ask.mode in ("auto", "replicate")
        return Choice(Layout(), (text,)) if is_quiet else _not_honoured(ask.mode, Layout(), text)
    if packs_patches(facts.model_type):
        return _choose_for_tower(ask, facts)
    if ask.layout is not None:
        _check_agrees(ask.mode, ask.layout)
        _check_foldable(facts, is_known, ask.layout.tp)
        is_idle = ask.layout.dp > 1 and ask.batch_size == 1
        idle = (_idle_dp(ask.layout.dp, facts),) if is_idle else ()
        return Choice(ask.layout, (f"layout {ask.layout} was asked", *idle), idle)
    if ask.mode == "auto":
        return _choose_by_rules(ask, facts, is_known)
    return _choose_by_mode(ask, facts, is_known)


def _choose_by_mode(ask: Ask, facts: EncoderFacts, is_known: bool) -> Choice:
    """Honour an explicit mode, whatever the rules would say."""
    ranks = ask.replica_size
    if ask.mode == "dp" and ask.batch_size == 1:
        return _not_honoured("dp", Layout(replicate=ranks), _idle_dp(ranks, facts))
    if ask.mode == "fold":
        _check_foldable(facts, is_known, ranks)
        return Choice(Layout(tp=ranks), ("fold was asked",))
    layout = Layout(dp=ranks) if ask.mode == "dp" else Layout(replicate=ranks)
    return Choice(layout, (f"{ask.mode} was asked",))


def _not_honoured(mode: str, layout: Layout, why: str) -> Choice:
    text = f"{mode} was asked, but {why}"
    return Choice(layout, (text,), (text,))


def _item(facts: EncoderFacts) -> str:
    return "image" if facts.kind == "image" else "prompt"


def _idle_dp(dp: int, facts: EncoderFacts) -> str:
    return (
        f"with one {_item(facts)} per call the {dp} ranks of dp have nothing to split and each encodes it; "
        "raise batch_size (--batching-max-size) above 1"
    )


def _check_agrees(mode: Mode, layout: Layout) -> None:
    """Raise LayoutError where an explicit mode and an explicit layout contradict each other."""
    remedies = {
        "fold": (layout.tp > 1, "fold needs tp above 1"),
        "dp": (layout.dp > 1, "dp needs dp above 1"),
        "replicate": (layout.tp == layout.dp == 1, "replicate needs tp 1 and dp 1"),
    }
    agrees, remedy = remedies.get(mode, (True, ""))
    if not agrees:
        raise LayoutError(
            f"mode {mode} contradicts layout replicate {layout.replicate} x dp {layout.dp} x tp {layout.tp}: {remedy}; "
            "change the sizes or leave the mode at auto"
        )


def _check_foldable(facts: EncoderFacts, is_known: bool, tp: int) -> None:
    if tp > 1 and not is_known:
        raise UnknownFamilyError(
            f"model_type={facts.model_type!r} has no table to fold it over {tp} ranks by; use dp or replicate. "
            f"Supported: {', '.join(supported())}"
        )


def _choose_by_rules(ask: Ask, facts: EncoderFacts, is_known: bool) -> Choice:
    """Apply the published rules; one prompt folds a wide encoder, more are split, a small encoder is repeated."""
    ranks, batch, hidden, item = ask.replica_size, ask.batch_size, facts.hidden_size, _item(facts)
    declined: tuple[str, ...] = ()
    if (batch or 1) > 1 and hidden >= DP_MIN_HIDDEN_SIZE:
        text = f"up to {batch} {item}s per call and hidden size {hidden} >= {DP_MIN_HIDDEN_SIZE}"
        return Choice(Layout(dp=ranks), (text,))
    if hidden >= FOLD_MIN_HIDDEN_SIZE:
        wide = f"hidden size {hidden} >= {FOLD_MIN_HIDDEN_SIZE}"
        if is_known and shards_something(facts, ranks, ask.numerics):
            return Choice(Layout(tp=ranks), (f"one {item} per call and {wide}" if batch else wide,))
        why = "nothing of it can be cut" if is_known else f"model_type={facts.model_type!r} has no table"
        declined = (f"{wide} asks for fold, but {why}",)
    if batch is None and hidden >= DP_MIN_HIDDEN_SIZE:
        text = f"hidden size {hidden} >= {DP_MIN_HIDDEN_SIZE}: a call with more than one {item} is split"
        return Choice(Layout(dp=ranks), (*declined, text))
    return Choice(Layout(replicate=ranks), declined or (_too_small(hidden, batch, item),))


def _too_small(hidden: int, batch: int | None, item: str) -> str:
    if hidden == 0:
        return "hidden size not known"
    if batch == 1 and hidden >= DP_MIN_HIDDEN_SIZE:
        return f"one {item} per call and hidden size {hidden} < {FOLD_MIN_HIDDEN_SIZE}: too narrow to fold"
    return f"hidden size {hidden} < {DP_MIN_HIDDEN_SIZE}: spreading it costs more than it saves"


# Towers that pack images of any size into blocks.


def _choose_for_tower(ask: Ask, facts: EncoderFacts) -> Choice:
    """Return what was asked; `auto` spreads the images of a call (tp 1 x dp R), whatever the width of the tower."""
    ranks = ask.replica_size
    modes = {"fold": Layout(tp=ranks), "replicate": Layout(replicate=ranks)}
    layout = ask.layout or modes.get(ask.mode, Layout(dp=ranks))
    _check_agrees(ask.mode, layout)
    words = "; ".join(_tower_words(facts, layout))
    asked = f"layout {layout} was asked: " if ask.layout else "" if ask.mode == "auto" else f"{ask.mode} was asked: "
    reasons: tuple[str, ...] = (f"{asked}{words}",)
    if layout.dp == 1 or ask.batch_size != 1:
        return Choice(layout, reasons)
    idle = (
        f"one image per call is computed by 1 of the {layout.dp} copies while the others wait (a video is spread by "
        "its frames); raise batch_size, or share each image (fold, or a larger tp_size)"
    )
    return Choice(layout, (*reasons, idle), () if asked == "" else (idle,))


def _tower_words(facts: EncoderFacts, layout: Layout) -> list[str]:
    """Return what the ranks of each axis do with the images of a call, with the numbers."""
    words: list[str] = []
    if layout.dp > 1:
        who = f"{layout.dp} groups of {layout.tp}" if layout.tp > 1 else f"{layout.dp} ranks, each with the whole tower"
        words.append(f"images of a call are spread over the {who}")
    if layout.tp > 1:
        cuts = cut_heads(facts.num_heads, facts.num_kv_heads, layout.tp)
        heads = "" if cuts is None else f", up to {max(cut.num_query for cut in cuts)} of {facts.num_heads} heads each"
        words.append(f"{layout.tp} ranks share each image and one copy of the weights{heads}")
    if layout.replicate > 1:
        alone = f"each of the {layout.replicate} ranks encodes every image"
        words.append(f"{layout.replicate} copies of this repeat the same images" if words else alone)
    return words
