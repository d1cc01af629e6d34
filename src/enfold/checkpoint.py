"""load_encoder: an encoder built on the meta device, cut, and filled with just this rank's slices of its checkpoint."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from enfold.comm import DEFAULT_TIMEOUT_S, Groups, build_mesh, build_watch
from enfold.config import Mode, Numerics, check_mode, check_numerics
from enfold.encoders import family_of
from enfold.errors import CheckpointError, ConfigError
from enfold.layout import Cut, Layout
from enfold.shard import ShardPlan, cut_weights, plan_shards
from enfold.spread import attach, decide
from enfold.weights import Source, open_source, read_slice, stored_dtype

logger = logging.getLogger("enfold")


def load_encoder(
    path_or_hub_id: str | Path,
    mode: Mode = "auto",
    *,
    subfolder: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    layout: Layout | None = None,
    numerics: Numerics = "exact",
    timeout: float = DEFAULT_TIMEOUT_S,
    batch_size: int | None = None,
    architecture: str | None = None,
    allow_pickle: bool = False,
) -> PreTrainedModel:
    """Load an encoder from a local folder or a hub id, spread over the ranks of `group` (default: all).

    Collective. Each rank reads its slices of the safetensors files straight into place: with tp = R no rank ever
    holds more than its share and the parts that stay whole. Where a checkpoint holds a larger model (a decoder, a task
    head) the encoder part of it is loaded.

    dtype: precision of the weights; None takes that of the checkpoint.
    architecture: the Transformers class to build, where the checkpoint's own is not the encoder that is wanted.
    The other arguments are those of `enfold.parallelize`.

    Raises CheckpointError naming each parameter that is missing, unexpected, of another shape or never written;
    pickle files are refused unless `allow_pickle`, since unpickling a file runs what is in it.
    """
    check_mode(mode)
    check_numerics(numerics)
    groups = Groups(group)
    watch = build_watch(groups, timeout)
    with watch.call("load_encoder"):
        folder = find_folder(path_or_hub_id, subfolder)
        source = open_source(folder, allow_pickle)
        cls, config, declared = encoder_class(folder, architecture)
        torch_dtype = choose_dtype(dtype, config, source)
        plan = decide(config, cls.__name__, mode, groups, layout, numerics, batch_size, torch_dtype)
        module = build_on_meta(cls, config, torch_dtype, source.names)
        stored = match_names(module, source, strict=declared == cls.__name__)
        shards = plan_shards(module, plan.layout.tp, numerics) if plan.layout.tp > 1 else None
        watch.agree(f"{cls.__name__}, {plan.summary()}, tensors {sorted(stored.items())}")
    mesh = build_mesh(plan.layout, groups, timeout)
    with watch.call("load_encoder"):
        if shards is not None:
            cut_weights(module, shards, mesh.tp.index)
        fill(module, source, stored, partial(_slice_of, shards, mesh.tp.index), torch.device(device or "cpu"))
    attach(module, plan, mesh, shards)
    return module.eval()


# What to load: a folder, a class, a precision.


def find_folder(path_or_hub_id: str | Path, subfolder: str | None = None) -> Path:
    """Return the local folder of an encoder; a hub id is downloaded (or found in the cache) first."""
    root = Path(path_or_hub_id).expanduser()
    if not root.is_dir():
        root = _download(str(path_or_hub_id), subfolder)
    folder = root / subfolder if subfolder else root
    if not (folder / "config.json").is_file():
        is_pipeline = (folder / "model_index.json").is_file()
        remedy = "it is a pipeline, name an encoder with subfolder=" if is_pipeline else "give the folder of an encoder"
        raise CheckpointError(f"{folder} has no config.json; {remedy}")
    return folder


def _download(hub_id: str, subfolder: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    prefix = f"{subfolder}/" if subfolder else ""
    try:
        return Path(snapshot_download(hub_id, allow_patterns=[f"{prefix}*.json", f"{prefix}*.safetensors"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"{hub_id!r} is no local folder, and the hub did not give it: {error}") from error


def encoder_class(folder: Path, architecture: str | None = None) -> tuple[type[PreTrainedModel], Any, str]:
    """Return the class to build, its config, and the class that the checkpoint names."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / 'config.json'} can't be read: {error}") from error
    declared = (config.architectures or [""])[0]
    name = architecture or _encoder_name(config, declared)
    cls: Any = getattr(transformers, name, None)
    if not _is_model_class(cls):
        raise ConfigError(f"architecture={name!r} is no model class of transformers {transformers.__version__}")
    if not isinstance(config, cls.config_class):
        config = cls.config_class.from_pretrained(folder)
    return cls, config, declared


def _is_model_class(cls: Any) -> bool:
    return inspect.isclass(cls) and issubclass(cls, PreTrainedModel)


def _encoder_name(config: Any, declared: str) -> str:
    """Return the encoder in what a checkpoint declares: the model without its decoder or task head."""
    family = family_of(config.model_type)
    if family is not None and family.encoder_class:
        return family.encoder_class
    if {"text_config", "vision_config"} <= set(config.sub_configs) and hasattr(config, "projection_dim"):
        raise ConfigError(f"{declared or config.model_type} holds two encoders; give architecture=, e.g. CLIPTextModel")
    if declared and "For" not in declared:
        return declared
    base = transformers.MODEL_MAPPING.get(type(config), None)
    if base is None:
        raise ConfigError(f"no encoder class is known for model_type={config.model_type!r}; give architecture=")
    return cast(str, base.__name__)


def choose_dtype(dtype: torch.dtype | str | None, config: Any, source: Source) -> torch.dtype:
    """Return the precision to load in: the one asked for, else the checkpoint's own."""
    if isinstance(dtype, str):
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise ConfigError(f"dtype={dtype!r} is no floating-point precision; use float32, bfloat16 or float16")
        return found
    return dtype or getattr(config, "dtype", None) or stored_dtype(source)


# Building without memory.


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
    for owner, key, parameter in _parameters(module):
        if id(parameter) not in made:
            meta = parameter.data.to("meta", _kept_dtype(module, f"{owner[0]}.{key}", dtype))
            made[id(parameter)] = nn.Parameter(meta, requires_grad=False)
        setattr(owner[1], key, made[id(parameter)])
    module.tie_weights()
    return module


def _parameters(module: nn.Module) -> list[tuple[tuple[str, nn.Module], str, nn.Parameter]]:
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


# Filling a module.


def fill(
    module: PreTrainedModel,
    source: Source,
    stored: Mapping[str, str],
    shard_of: Callable[[str], Slice],
    device: torch.device,
) -> None:
    """Give each parameter of `module` (on meta, cut) memory on `device` and read its slice of the checkpoint into it.

    shard_of: from a module's name to what this rank holds of its weight. Raises CheckpointError where a parameter was
    not written.
    """
    written: dict[int, nn.Parameter] = {}
    for (prefix, owner), key, parameter in _parameters(module):
        if id(parameter) not in written:
            ranges, dim = shard_of(prefix)
            out = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            name = f"{prefix}.{key}" if prefix else key
            read_slice(source, stored[name], ranges if parameter.dim() > dim else None, dim, out)
            written[id(parameter)] = nn.Parameter(out, requires_grad=False)
        setattr(owner, key, written[id(parameter)])
    for name, buffer in module.named_buffers():
        if name in stored:
            read_slice(source, stored[name], None, 0, buffer)
    module.to(device)
    unwritten = [name for name, tensor in module.state_dict().items() if tensor.is_meta]
    if unwritten:
        raise CheckpointError(f"never written: {', '.join(unwritten[:8])}")


Slice = tuple[Sequence[Cut] | None, int]
"""The ranges of a weight along a dimension; None: all of it."""


def _slice_of(shards: ShardPlan | None, index: int, module_name: str) -> Slice:
    shard = shards.modules.get(module_name) if shards is not None else None
    return (None, 0) if shard is None else (shard.ranges(index), shard.dim)
