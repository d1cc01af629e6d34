"""The encoders that a Diffusers pipeline names in its model_index.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_MODELS = (
    "Tokenizer",
    "TokenizerFast",
    "Backend",
    "Processor",
    "ImageProcessor",
    "ImageProcessorFast",
    "FeatureExtractor",
)
"""Endings of the Transformers classes in a pipeline that hold no weights (a tokenizer may be a TokenizersBackend)."""


def encoder_components(model_index: Mapping[str, Any]) -> dict[str, str]:
    """Return the Transformers models of a model_index.json: component name -> class name."""
    found: dict[str, str] = {}
    for name, entry in model_index.items():
        if name.startswith("_") or not isinstance(entry, list | tuple) or len(entry) != 2:
            continue
        library, class_name = entry
        if library == "transformers" and isinstance(class_name, str) and not class_name.endswith(NOT_MODELS):
            found[name] = class_name
    return found
