"""load_encoder: an encoder built on the meta device, cut, and filled with just this rank's slices of its checkpoint."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import PreTrainedModel

from enfold.comm import DEFAULT_TIMEOUT_S, Groups, build_mesh, build_watch
from enfold.config import Mode, Numerics, check_mode, check_numerics
from enfold.encoders import family_of
from enfold.errors import CheckpointError, ConfigError
from enfold.layout import Cut, Layout
from enfold.shard import ShardPlan, cut_weights, plan_shards
from enfold.skeleton import build_on_meta, match_names, own_parameters
from enfold.spread import attach, decide
from enfold.vision.config import VisionParallelConfig
from enfold.vision.spread import attach_planned, attach_tower, check_only_vision, is_tower, prepare_tower
from enfold.weights import Source, open_branch, open_source, read_slice, stored_dtype

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
    vision: VisionParallelConfig | None = None,
    text_group: dist.ProcessGroup | None = None,
) -> PreTrainedModel:
    """Load an encoder from a local folder or a hub id, spread over the ranks of `group` (default: all).

    Collective. Each rank reads its slices of the safetensors files straight into place: with tp = R no rank ever
    holds more than its share and the parts that stay whole. Where a checkpoint holds a larger model (a decoder, a task
    head) the encoder part of it is loaded.

    dtype: precision of the weights; None takes that of the checkpoint.
    architecture: the Transformers class to build, where the checkpoint's own is not the encoder that is wanted.
    vision: load the vision tower of a vision-language model, or a tower by itself, and spread it in blocks.
    The other arguments are those of `enfold.parallelize`.

    Raises CheckpointError naming each parameter that is missing, unexpected, of another shape or never written;
    pickle files are refused unless `allow_pickle`, since unpickling a file runs what is in it.
    """
    check_mode(mode)
    check_numerics(numerics)
    groups = Groups(group)
    if vision is not None:
        check_only_vision(mode, layout, batch_size)
        open_folder = partial(_open_tower, path_or_hub_id, subfolder, dtype, allow_pickle)
        return _load_tower(open_folder, vision, groups, numerics, timeout, device, text_group)
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
    if is_tower(module) and plan.layout.replicate == 1:
        attach_planned(module, plan, mesh, shards)
    else:
        attach(module, plan, mesh, shards)
    return module.eval()


def _load_tower(
    open_folder: Callable[[], tuple[PreTrainedModel, Source]],
    vision: VisionParallelConfig,
    groups: Groups,
    numerics: Numerics,
    timeout: float,
    device: torch.device | str | None,
    text_group: dist.ProcessGroup | None,
) -> PreTrainedModel:
    """As load_encoder, for a vision tower: dp ranks read all of its weights, tp ranks their slices."""
    watch = build_watch(groups, timeout)
    with watch.call("load_encoder"):
        module, source = open_folder()
        stored = match_names(module, source, strict=True)
        prepared = prepare_tower(module, vision, groups, numerics)
        watch.agree(f"{type(module).__name__}, {prepared.plan.summary()}, tensors {sorted(stored.items())}")
    mesh = build_mesh(prepared.plan.layout, groups, timeout, tp_group=text_group)
    with watch.call("load_encoder"):
        if prepared.shards is not None:
            cut_weights(module, prepared.shards, mesh.tp.index)
        fill(module, source, stored, partial(_slice_of, prepared.shards, mesh.tp.index), torch.device(device or "cpu"))
    attach_tower(prepared, mesh)
    return module.eval()


def _open_tower(
    path_or_hub_id: str | Path, subfolder: str | None, dtype: torch.dtype | str | None, allow_pickle: bool
) -> tuple[PreTrainedModel, Source]:
    """Return the tower of a folder, without memory, and the part of the checkpoint that is its own."""
    folder = find_folder(path_or_hub_id, subfolder)
    whole = open_source(folder, allow_pickle)
    config = tower_config(read_config(folder))
    family = family_of(config.model_type)
    assert family is not None
    assert family.tower is not None
    cls = _tower_class(config, _encoder_name(config, ""))
    source = open_branch(whole, family.tower.prefixes)
    return build_on_meta(cls, config, choose_dtype(dtype, config, source), source.names), source


def _tower_class(config: Any, name: str) -> type[PreTrainedModel]:
    """Return the class of a tower; a few are only in the file beside that of their config."""
    beside = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    cls = getattr(transformers, name, None) or getattr(beside, name, None)
    if not _is_model_class(cls):
        raise ConfigError(f"{name!r} is no model class of transformers {transformers.__version__}")
    return cast(type[PreTrainedModel], cls)


def tower_config(config: Any) -> Any:
    """Return the config of the vision tower that enfold packs: `config` itself, or the one inside it."""
    for candidate in (config, getattr(config, "vision_config", None)):
        family = family_of(getattr(candidate, "model_type", ""))
        if family is not None and family.tower is not None:
            return candidate
    raise ConfigError(
        f"model_type={config.model_type!r} has no vision tower that enfold packs (those of Qwen-VL, SigLIP vision); "
        "leave vision= out"
    )


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
    config = read_config(folder)
    declared = (config.architectures or [""])[0]
    name = architecture or _encoder_name(config, declared)
    cls: Any = getattr(transformers, name, None)
    if not _is_model_class(cls):
        raise ConfigError(f"architecture={name!r} is no model class of transformers {transformers.__version__}")
    if not isinstance(config, cls.config_class):
        config = cls.config_class.from_pretrained(folder)
    return cls, config, declared


def read_config(folder: Path) -> Any:
    """Return the Transformers config of a folder."""
    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / 'config.json'} can't be read: {error}") from error


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
    for (prefix, owner), key, parameter in own_parameters(module):
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
