"""A module whose parameters take no memory yet, and which stored tensor fills which of them."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from enfold.errors import CheckpointError
from enfold.weights import Source

logger = logging.getLogger("enfold")


class _EmptyOnMeta(TorchFunctionMode):
    """Parameters are made with torch.empty: put those on the meta device, and let buffers get their real values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_on_meta(
    cls: type[PreTrainedModel], config: Any, dtype: torch.dtype, stored: Iterable[str] = ("pooler",)
) -> PreTrainedModel:
    """Return a module whose parameters take no memory, with its non-persistent buffers in place.

    A pooling layer that the checkpoint does not have is not built, where the class leaves that choice.
    """
    options: dict[str, Any] = {}
    if "add_pooling_layer" in inspect.signature(cls.__init__).parameters and not any("pooler" in x for x in stored):
        logger.info("the checkpoint has no pooling layer; %s is built without one", cls.__name__)
        options["add_pooling_layer"] = False
    with local_torch_dtype(dtype, cls.__name__), no_init_weights(), _EmptyOnMeta():
        module = cls(config, **options)
    made: dict[int, nn.Parameter] = {}
    for owner, key, parameter in own_parameters(module):
        if id(parameter) not in made:
            meta = parameter.data.to("meta", _kept_dtype(module, f"{owner[0]}.{key}", dtype))
            made[id(parameter)] = nn.Parameter(meta, requires_grad=False)
        setattr(owner[1], key, made[id(parameter)])
    module.tie_weights()
    return module


def own_parameters(module: nn.Module) -> list[tuple[tuple[str, nn.Module], str, nn.Parameter]]:
    """Return every place that holds a parameter: (name and module that hold it, its key there, the parameter)."""
    return [
        ((name, child), key, parameter)
        for name, child in module.named_modules(remove_duplicate=False)
        for key, parameter in child.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _kept_dtype(module: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the precision of one parameter: a few families keep some layers in float32 (T5's `wo` beside float16)."""
    kept = set(module._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set()
    if dtype == torch.float16:
        kept |= set(module._keep_in_fp32_modules or ())
    return torch.float32 if any(re.search(rf"(^|\.){word}(\.|$)", name) for word in kept) else dtype


# Which stored tensor goes where.


def match_names(module: PreTrainedModel, source: Source, strict: bool) -> dict[str, str]:
    """Return, for each parameter and persistent buffer, the stored tensor that fills it.

    Stored names go through Transformers' own renames. With `strict` each must have a place; without (the checkpoint is
    of a larger model) whole branches that the encoder does not have are left out.
    Raises CheckpointError that names what is missing, unexpected or of another shape.
    """
    state = module.state_dict()
    aliases = _aliases(module)
    found: dict[str, str] = {}
    unexpected: list[str] = []
    for stored, name in _renamed(module, source.names, state).items():
        if name in state:
            found[name] = stored
        else:
            unexpected.append(name)
    for names in aliases.values():
        given = next((found[name] for name in names if name in found), None)
        if given is not None:
            found.update(dict.fromkeys(names, given))
    missing = sorted(set(state) - set(found))
    unexpected = _surprising(module, unexpected, found, strict)
    wrong = [
        f"{name} is {list(source.shape(stored))}, not {list(state[name].shape)}"
        for name, stored in found.items()
        if source.shape(stored) != tuple(state[name].shape)
    ]
    problems = [
        f"{what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong))
        if names
    ]
    if problems:
        raise CheckpointError(f"the checkpoint does not fit {type(module).__name__}; " + "; ".join(problems))
    return found


def _aliases(module: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter; tied ones have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _renamed(module: PreTrainedModel, names: Iterable[str], state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    transforms = get_model_conversion_mapping(module)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renames = [each for each in transforms if not isinstance(each, WeightConverter)]
    result: dict[str, str] = {}
    for name in names:
        new, pattern = rename_source_key(name, renames, converters, module.base_model_prefix, dict(state))
        if pattern is not None and new in state:
            raise CheckpointError(
                f"{name} is stored in a form that has to be converted ({pattern}); load it with "
                f"{type(module).__name__}.from_pretrained, save it again, or pass it to enfold.parallelize"
            )
        result[name] = new
    return result


def _surprising(module: PreTrainedModel, names: list[str], found: Mapping[str, str], strict: bool) -> list[str]:
    """Return the names that have no place and no excuse."""
    buffers = {name for name, _ in module.named_buffers()}
    ignored = [*(module._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    rest = [name for name in names if name not in buffers and not any(re.search(each, name) for each in ignored)]
    if strict:
        return sorted(rest)
    branches = {name.split(".")[0] for name in found}
    left_out = sorted({name.split(".")[0] for name in rest} - branches)
    if left_out:
        logger.info("not part of %s, left out: %s", type(module).__name__, ", ".join(left_out))
    return sorted(name for name in rest if name.split(".")[0] in branches)
