"""What enfold knows of each family of encoders: one file per family, nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enfold.config import EncoderFacts
from enfold.encoders import bert, clip, composites, decoders, dinov2, modernbert, qwen_vl, siglip, t5, vit
from enfold.encoders.family import Config, Family, Tower, architecture
from enfold.errors import ConfigError, UnknownFamilyError

__all__ = [
    "FAMILIES",
    "Config",
    "Family",
    "family_of",
    "model_type_of",
    "packs_patches",
    "parts",
    "read_facts",
    "supported",
    "tower_of",
]

FAMILIES: tuple[Family, ...] = (
    *t5.FAMILIES,
    *clip.FAMILIES,
    *siglip.FAMILIES,
    *vit.FAMILIES,
    *dinov2.FAMILIES,
    *bert.FAMILIES,
    *modernbert.FAMILIES,
    *decoders.FAMILIES,
    *composites.FAMILIES,
    *qwen_vl.FAMILIES,
)

_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}
_TOWERS = {
    "clip": clip.towers,
    "siglip": siglip.towers,
    "siglip2": siglip.towers,
    **dict.fromkeys(qwen_vl.MODELS, qwen_vl.towers),
}


def family_of(model_type: str) -> Family | None:
    """Return the family that reads configs of this `model_type`; None where there is none."""
    return _BY_TYPE.get(model_type)


def tower_of(model_type: str) -> Tower | None:
    """Return how an encoder of this `model_type` runs as a vision tower; None where it does not."""
    family = family_of(model_type)
    return None if family is None else family.tower


def packs_patches(model_type: str) -> bool:
    """Return whether this is a tower that takes images of any size, packed as patches."""
    tower = tower_of(model_type)
    return tower is not None and tower.takes == "patches"


def supported() -> list[str]:
    """Return the names of all families, sorted."""
    return sorted((family.name for family in FAMILIES), key=str.lower)


def model_type_of(config: Mapping[str, Any]) -> str:
    """Return config["model_type"]; raise ConfigError where it is missing or no text."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"model_type={model_type!r} can't be used; a config.json names it, such as 't5'")
    return model_type


def read_facts(config: Mapping[str, Any]) -> EncoderFacts:
    """Read the sizes and the weights of one encoder from its config.json.

    `architectures[0]` tells apart classes that share a config (with projection, with lm_head); without it, the plain
    model is meant. Raises UnknownFamilyError for a family without a table, ConfigError for a value that can't be used.
    """
    model_type = model_type_of(config)
    family = family_of(model_type)
    if family is None:
        raise UnknownFamilyError(
            f"model_type={model_type!r} has no table to fold it by; replicate and dp still work. "
            f"Supported: {', '.join(supported())}"
        )
    return family.facts(config)


def parts(config: Mapping[str, Any]) -> dict[str, Config]:
    """Return the encoders inside one config.json by name: "text" and "vision" of a two-tower model, else one, "".

    A vision-language model gives its "vision" tower; its language model is no encoder, but Qwen2.5-VL is a "text"
    encoder of pipelines, too. A class that is one tower of the config (CLIPVisionModel with a clip config.json) is that
    tower alone. The precision is the whole model's where it names one.
    """
    towers = _TOWERS.get(model_type_of(config))
    if towers is None:
        return {"": config}
    name = architecture(config)
    named = config.get("dtype") or config.get("torch_dtype")
    shared = {"architectures": [name], **({"dtype": named} if named else {})}
    found: dict[str, Config] = {kind: {**part, **shared} for kind, part in towers(config).items()}
    for kind, words in (("text", ("TextModel",)), ("vision", ("VisionModel", "VisionTransformer"))):
        if kind in found and any(word in name for word in words):
            return {"": found[kind]}
    return found
