"""The planner: how one encoder, or each encoder of a pipeline, is spread over the ranks of a replica, and why.

Pure: from config.json alone, without torch, so that `enfold plan` answers at once on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

from enfold.choice import Ask, Choice, choose
from enfold.config import DTYPE_BYTES, EncoderFacts, Mode, Numerics, check_mode, check_numerics
from enfold.encoders import family_of, model_type_of, parts, read_facts
from enfold.encoders.model_index import encoder_components
from enfold.encoders.shares import rank_parameters, shards_something, whole_parts
from enfold.encoders.unknown import unknown_facts
from enfold.errors import ConfigError, EnfoldError, LayoutError
from enfold.layout import Layout, check_size, resolve_layout


@runtime_checkable
class HasToDict(Protocol):
    """A Hugging Face config, or anything else that gives its keys as a dict."""

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of config.json."""


@dataclass(frozen=True)
class Plan:
    """How one encoder is spread over the ranks of a replica.

    mode is what was asked, resolved what it came to: replicate, fold, dp, or combined (two axes above 1).
    reasons say in words, with the numbers, how one led to the other; warnings are those among them that tell what
    could not be honoured (the caller logs them). bytes_per_rank is that of the rank which holds
    most. whole_parts names what could be split and is not. Sizes of an unknown family are 0 and its bytes None.
    """

    family: str
    model_type: str
    mode: Mode
    resolved: str
    layout: Layout
    numerics: Numerics
    dtype: str
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    num_layers: int
    num_parameters: int | None
    bytes_per_rank: int | None
    replicate_bytes: int | None
    whole_parts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    predicted_ms: Mapping[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as what json.dumps takes."""
        return {**asdict(self), "replica_size": self.layout.size}

    def summary(self) -> str:
        """Return the plan in one line of words."""
        share = ""
        if self.bytes_per_rank is not None and self.replicate_bytes:
            gib, ratio = self.bytes_per_rank / 2**30, self.bytes_per_rank / self.replicate_bytes
            share = f", {gib:.2f} GiB per rank ({ratio:.0%} of the whole)"
        asked = "" if self.mode == self.resolved else f" (asked: {self.mode})"
        return f"{self.family}: {self.resolved}{asked}, layout {self.layout}{share}: {'; '.join(self.reasons)}"


def plan_encoder(
    config: Mapping[str, Any] | EncoderFacts | HasToDict,
    mode: str = "auto",
    replica_size: int = 1,
    batch_size: int | None = None,
    *,
    layout: Layout | None = None,
    tp_size: int | None = None,
    dp_size: int | None = None,
    dtype: str | None = None,
    numerics: str = "exact",
) -> Plan:
    """Return how one encoder is spread over `replica_size` ranks.

    config: a config.json as a mapping, a Hugging Face config, or facts that were read before.
    batch_size: the prompts (or images) that may come in one call; None where it is not known.
    layout, or tp_size and dp_size, override what the mode would choose. A vision tower that packs images of any size
    is spread by images (tp 1 x dp replica_size) under `auto`.

    Raises LayoutError for sizes that do not fit and for a fold that would shard nothing, UnknownFamilyError for a fold
    without a table, ConfigError for a config that can't be used.
    """
    check_size("replica_size", replica_size)
    if batch_size is not None:
        check_size("batch_size", batch_size)
    if dtype is not None and dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype={dtype!r} is not supported; use one of {', '.join(DTYPE_BYTES)}")
    asked = _asked_layout(replica_size, layout, tp_size, dp_size)
    ask = Ask(check_mode(mode), replica_size, batch_size, asked, check_numerics(numerics))
    facts, is_known = _facts(config)
    facts = facts if dtype is None else replace(facts, dtype=dtype)
    return _measured(ask, facts, is_known, choose(ask, facts, is_known))


def plan_pipeline(
    model_index: Mapping[str, Any],
    read_config: Callable[[str], Mapping[str, Any]],
    mode: str = "auto",
    replica_size: int = 1,
    batch_size: int | None = None,
    **options: Any,
) -> dict[str, Plan]:
    """Return the plan of every text and image encoder of a Diffusers pipeline, by component name.

    model_index is its model_index.json; read_config takes a component's name and returns that component's config.json.
    `options` are those of plan_encoder. An error names the component, or its file, that it is about.
    """
    # Sizes that fit no encoder are no component's fault.
    _asked_layout(replica_size, *(options.get(key) for key in ("layout", "tp_size", "dp_size")))
    plans: dict[str, Plan] = {}
    for name, class_name in encoder_components(model_index).items():
        try:
            config: Mapping[str, Any] = {**read_config(name), "architectures": [class_name]}
            tower = parts(config).get("", config)  # one of two, where the class says so
            plans[name] = plan_encoder(tower, mode, replica_size, batch_size, **options)
        except EnfoldError as error:
            where = f"{name}/config.json" if isinstance(error, ConfigError) else name
            raise type(error)(f"{where}: {error}") from error
    return plans


# What was given: the config, and a layout where one was asked for.


def _facts(config: Mapping[str, Any] | EncoderFacts | HasToDict) -> tuple[EncoderFacts, bool]:
    """Return the facts and whether a table of weights came with them."""
    if isinstance(config, EncoderFacts):
        return config, bool(config.weights)
    if not isinstance(config, Mapping):
        if not isinstance(config, HasToDict):
            raise ConfigError(f"a {type(config).__name__} is no config; give a mapping or a Hugging Face config")
        config = config.to_dict()
    model_type = model_type_of(config)
    if family_of(model_type) is not None:
        return read_facts(config), True
    return unknown_facts(model_type, config), False


def _asked_layout(replica_size: int, layout: Layout | None, tp_size: int | None, dp_size: int | None) -> Layout | None:
    if layout is not None:
        if tp_size is not None or dp_size is not None:
            raise LayoutError(f"layout {layout} and tp_size={tp_size}, dp_size={dp_size} are both given; give one")
        layout.check_fits(replica_size)
        return layout
    if tp_size is None and dp_size is None:
        return None
    return resolve_layout(replica_size, tp_size, dp_size)


# What it costs.


def _measured(ask: Ask, facts: EncoderFacts, is_known: bool, choice: Choice) -> Plan:
    """Return the plan with its bytes; raise LayoutError for a fold that shards nothing."""
    layout = choice.layout
    if layout.tp > 1 and not shards_something(facts, layout.tp, ask.numerics):
        why = "; ".join(whole_parts(facts, layout.tp, ask.numerics))
        raise LayoutError(f"fold over tp={layout.tp} would shard nothing ({why}); use a smaller tp, dp or replicate")
    item_bytes = DTYPE_BYTES.get(facts.dtype)
    whole = facts.num_parameters if is_known else None
    most = max(rank_parameters(facts, layout.tp, ask.numerics)) if is_known else None
    axes = {"replicate": layout.replicate, "dp": layout.dp, "fold": layout.tp}
    used = [name for name, size in axes.items() if size > 1] or ["replicate"]
    return Plan(
        family=facts.family,
        model_type=facts.model_type,
        mode=ask.mode,
        resolved="combined" if len(used) > 1 else used[0],
        layout=layout,
        numerics=ask.numerics,
        dtype=facts.dtype,
        reasons=choice.reasons,
        warnings=choice.warnings,
        hidden_size=facts.hidden_size,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        num_layers=facts.num_layers,
        num_parameters=whole,
        bytes_per_rank=None if most is None or item_bytes is None else most * item_bytes,
        replicate_bytes=None if whole is None or item_bytes is None else whole * item_bytes,
        whole_parts=whole_parts(facts, layout.tp, ask.numerics),
        notes=facts.notes,
    )
