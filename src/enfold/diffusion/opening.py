"""Any Diffusers pipeline of text to pictures or videos, opened on the ranks of one replica.

The text and image encoders are read by enfold's own loader, each rank its slices; Diffusers reads all else.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import PreTrainedModel

from enfold.checkpoint import choose_dtype, load_encoder
from enfold.diffusion.few_texts import separate_texts
from enfold.diffusion.layout import DENOISERS
from enfold.diffusion.requests import PipelineSpec
from enfold.diffusion.split import split_transformer
from enfold.encoders.model_index import encoder_components
from enfold.errors import CheckpointError, ConfigError, EnfoldError
from enfold.flow import MAIN_INPUTS
from enfold.weights import open_source, stored_dtype

INDEX = "model_index.json"
DEFAULTS = "generation_defaults.json"
GIVEN = frozenset({"self", "prompt"})


@dataclass(frozen=True)
class Opened:
    """A pipeline ready to draw on this rank, its spread encoders by component, and what was done to its DiT."""

    pipeline: Any
    encoders: dict[str, PreTrainedModel]
    split: str
    dtype: torch.dtype


def open_pipeline(spec: PipelineSpec, *, group: dist.ProcessGroup | None, device: torch.device) -> Opened:
    """Load a pipeline over the ranks of `group`, which are one replica: encoders spread by mode, the DiT by layout.

    Collective. Nothing is unpickled, and no code that comes with a model is run. Precision: spec.dtype, else fp32 on a
    CPU and the checkpoint's own on a GPU. With offload_encoders the encoders are on the CPU when this returns.

    Raises ConfigError or CheckpointError before any weight is read where the folder can't be used.
    """
    import diffusers

    diffusers.utils.logging.disable_progress_bar()
    folder = find_pipeline(spec.path)
    index = read_index(folder)
    pipeline_class(index)
    dtype = pipeline_dtype(spec.dtype, folder, index, device)
    encoders = {
        name: _load_encoder(spec, folder, name, architecture, dtype, group, device)
        for name, architecture in spread_components(index).items()
    }
    pipeline = _load_rest(folder, encoders, dtype)
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module) and name not in encoders:
            component.eval().requires_grad_(False).to(device)
    return Opened(pipeline, encoders, _split(pipeline, spec, group, device), dtype)


def find_pipeline(path_or_hub_id: str) -> Path:
    """Return the local folder of a pipeline; a hub id is downloaded (or found in the cache) first."""
    folder = Path(path_or_hub_id).expanduser()
    if not folder.is_dir():
        folder = _download(path_or_hub_id)
    if not (folder / INDEX).is_file():
        raise ConfigError(f"{folder} has no {INDEX}; give the folder of a whole Diffusers pipeline, or its hub id")
    return folder


def _download(hub_id: str) -> Path:
    from diffusers import DiffusionPipeline

    try:
        return Path(DiffusionPipeline.download(hub_id, use_safetensors=True))
    except Exception as error:  # the hub's client fails in many ways: no such name, no network, no permission
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{hub_id!r} is no local folder, and the hub did not give it: {reason}") from error


def read_index(folder: Path) -> dict[str, Any]:
    """Return model_index.json; raise ConfigError where it is none, or names classes from outside the libraries."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / INDEX} can't be read: {error}") from error
    if not isinstance(index, dict):
        raise ConfigError(f"{folder / INDEX} holds a {type(index).__name__}; it must be an object")
    for name, entry in index.items():
        if not name.startswith("_") and isinstance(entry, list) and not _is_known(entry):
            raise ConfigError(
                f"{folder / INDEX} takes {name} from {entry}; only classes of diffusers and transformers are used, "
                "code that comes with a model is never run"
            )
    return index


def _is_known(entry: list[Any]) -> bool:
    from diffusers import pipelines

    library = entry[0] if entry else None
    if library in (None, "diffusers", "transformers"):
        return True
    return isinstance(library, str) and not library.startswith("_") and hasattr(pipelines, library)


def pipeline_class(index: Mapping[str, Any]) -> Any:
    """Return the Diffusers class of a pipeline; ConfigError where there is none, or it needs more than a prompt."""
    import diffusers

    name = index.get("_class_name")
    cls = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not (inspect.isclass(cls) and issubclass(cls, diffusers.DiffusionPipeline)):
        raise ConfigError(
            f"_class_name={name!r} is no pipeline of diffusers {diffusers.__version__}; install another one"
        )
    parameters = inspect.signature(cls.__call__).parameters
    needed = [key for key, each in parameters.items() if each.default is each.empty and each.kind not in _LOOSE]
    if missing := sorted(set(needed) - GIVEN):
        raise ConfigError(f"{name} needs {', '.join(missing)} beside a prompt; use a pipeline from text to pictures")
    if "prompt" not in parameters:
        raise ConfigError(f"{name} takes no prompt; use a pipeline from text to pictures")
    return cls


_LOOSE = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def spread_components(index: Mapping[str, Any]) -> dict[str, str]:
    """Return the components that enfold loads and spreads: Transformers models that take texts or images, by class."""
    found: dict[str, str] = {}
    for name, class_name in encoder_components(index).items():
        cls = getattr(transformers, class_name, None)
        if cls is None:
            raise ConfigError(f"{name}: {class_name} is no class of transformers {transformers.__version__}")
        is_model = inspect.isclass(cls) and issubclass(cls, PreTrainedModel)
        if is_model and not set(MAIN_INPUTS).isdisjoint(inspect.signature(cls.forward).parameters):
            found[name] = class_name
    return found


def pipeline_dtype(dtype: str | None, folder: Path, index: Mapping[str, Any], device: torch.device) -> torch.dtype:
    """Return the precision to load in: the one asked for, else fp32 on a CPU, else what the denoiser is stored in."""
    name = next((each for each in DENOISERS if isinstance(index.get(each), list) and (folder / each).is_dir()), None)
    if dtype is not None:
        return choose_dtype(dtype, None, None)  # type: ignore[arg-type]  # a name needs no checkpoint to look at
    if device.type == "cpu" or name is None:
        return torch.float32
    return stored_dtype(open_source(folder / name, allow_pickle=False))


def _load_encoder(
    spec: PipelineSpec,
    folder: Path,
    name: str,
    architecture: str,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> PreTrainedModel:
    try:
        encoder = load_encoder(
            folder,
            spec.mode,
            subfolder=name,
            dtype=dtype,
            device=torch.device("cpu") if spec.offload_encoders else device,
            group=group,
            layout=spec.encoder_layout,
            numerics=spec.numerics,
            timeout=spec.timeout_s,
            batch_size=spec.batch_size,
            architecture=architecture,
        )
    except EnfoldError as error:
        raise type(error)(f"{name}: {error}") from error
    if spec.numerics == "exact":
        separate_texts(encoder)
    return encoder


def _load_rest(folder: Path, encoders: Mapping[str, PreTrainedModel], dtype: torch.dtype) -> Any:
    """Have Diffusers load what is not an encoder. It opens safetensors files alone."""
    from diffusers import DiffusionPipeline

    try:
        return DiffusionPipeline.from_pretrained(
            folder, **encoders, dtype=dtype, use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"Diffusers can't load {folder}: {error}") from error


def denoisers_of(pipeline: Any) -> list[Any]:
    """Return the components that are split where the layout says so."""
    return [each for name in DENOISERS if (each := getattr(pipeline, name, None)) is not None]


def _split(pipeline: Any, spec: PipelineSpec, group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Split the denoisers as the layout says; return in words what was done."""
    denoisers = denoisers_of(pipeline)
    if not denoisers:
        raise ConfigError(f"{type(pipeline).__name__} has no {' or '.join(DENOISERS)} to draw with")
    if not spec.layout.is_split:
        name = type(denoisers[0]).__name__
        size = spec.layout.replica_size
        return f"{name} runs whole on every rank of {size}" if size > 1 else f"{name} runs whole on its one rank"
    return "; ".join(
        split_transformer(each, spec.layout, group=group, device=device, timeout_s=spec.timeout_s) for each in denoisers
    )


def read_defaults(folder: Path, known: frozenset[str]) -> dict[str, Any]:
    """Return what generation_defaults.json says, {} where there is none; ConfigError where it can't be used."""
    path = folder / DEFAULTS
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(values, dict) or not set(values) <= known:
        extra = sorted(set(values) - known) if isinstance(values, dict) else type(values).__name__
        raise ConfigError(f"{path} must be an object of {', '.join(sorted(known))}; it has {extra}")
    for name, value in values.items():
        kind: Any = str if name == "negative_prompt" else int | float
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigError(f"{path}: {name}={value!r} must be a {'text' if kind is str else 'number'}")
    return values
