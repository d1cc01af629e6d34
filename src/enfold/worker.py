"""One rank: holds an encoder and does what the commands ask. It knows nothing of who started it.

Every method is called on all ranks with the same arguments. What a method returns is plain values and CPU or device
tensors; whoever runs the ranks usually reads rank 0's.
"""

from __future__ import annotations

import gc
import platform
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from enfold.config import Mode, Numerics
from enfold.errors import CheckpointError, EncodeError, InputError
from enfold.layout import Layout
from enfold.probe import (
    Comparison,
    compare_outputs,
    digest_output,
    max_positions,
    named_outputs,
    probe_inputs,
    tower_inputs,
)
from enfold.vision.config import VisionParallelConfig
from enfold.vision.pooled import attach_pooled

Pooling = Literal["none", "mean", "cls", "last"]
"""`none`: every token's hidden state.  `mean`: over a text's tokens, in fp32.  `cls`: its first.  `last`: its last."""

REFERENCE = "plain module"
ONE_RANK = "one rank"


@dataclass(frozen=True)
class EncoderSpec:
    """Which encoder to load and how to spread it; the arguments of `load_encoder` as plain values."""

    path: str
    subfolder: str | None = None
    mode: Mode = "auto"
    layout: Layout | None = None
    dtype: str | None = None
    numerics: Numerics = "exact"
    timeout_s: float = 60.0
    batch_size: int | None = None


@dataclass(frozen=True)
class TowerSpec:
    """Which vision tower to load and how to spread it; the arguments of `load_encoder(vision=)` as plain values."""

    path: str
    subfolder: str | None = None
    vision: VisionParallelConfig = field(default_factory=VisionParallelConfig)
    dtype: str | None = None
    numerics: Numerics = "exact"
    timeout_s: float = 60.0


@dataclass(frozen=True)
class LoadReport:
    """What a rank says of the encoder it has loaded."""

    plan: Any
    summary: str
    dtype: str
    input_name: str


class Worker:
    """One rank of `world_size`; `group` is None where it is the only one."""

    def __init__(self, *, rank: int, world_size: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.group = group
        self.device = device
        self._encoder: Any = None
        self._kept: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def encoder(self) -> Any:
        """The loaded encoder; raises EncodeError before `load`."""
        if self._encoder is None:
            raise EncodeError("no encoder is loaded on this rank; call load first")
        return self._encoder

    def load(self, spec: EncoderSpec) -> LoadReport:
        """Load the encoder, in place of the one before."""
        from enfold.checkpoint import load_encoder

        self.unload()
        self._encoder = load_encoder(
            spec.path,
            mode=spec.mode,
            subfolder=spec.subfolder,
            dtype=None if spec.dtype is None else getattr(torch, spec.dtype),
            device=self.device,
            group=self.group,
            layout=spec.layout,
            numerics=spec.numerics,
            timeout=spec.timeout_s,
            batch_size=spec.batch_size,
        )
        self._encoder.eval()
        return self._report()

    def _report(self) -> LoadReport:
        plan = self.encoder.plan
        return LoadReport(
            plan=plan.to_json(),
            summary=plan.summary(),
            dtype=str(next(self.encoder.parameters()).dtype).removeprefix("torch."),
            input_name=self.encoder.main_input_name,
        )

    def unload(self) -> None:
        """Free the encoder's memory."""
        self._encoder = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def memory_bytes(self) -> int:
        """Return the bytes that this rank's parameters and buffers take."""
        tensors = [*self.encoder.parameters(), *self.encoder.buffers()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.inference_mode()
    def encode(self, ids_NT: torch.Tensor, lengths: list[int], pooling: Pooling, use_mask: bool = True) -> torch.Tensor:
        """Encode N texts of token ids, padded on the right to T; text i has lengths[i] tokens.

        Returns [sum(lengths), hidden] for pooling "none" (the texts one after another, without padding), else
        [N, hidden]; on every rank. use_mask=False is for encoders that were trained to attend to padding.
        """
        ids_NT = ids_NT.to(self.device)
        if self.encoder.main_input_name != "input_ids":
            raise InputError(f"this encoder takes {self.encoder.main_input_name}, not text; use a text encoder")
        keywords: dict[str, torch.Tensor] = {"input_ids": ids_NT}
        if use_mask:
            places_T = torch.arange(ids_NT.shape[1], device=self.device)
            ends_N1 = torch.tensor(lengths, device=self.device).unsqueeze(1)
            keywords["attention_mask"] = (places_T < ends_N1).long()
        hidden_NTF = self.encoder(**keywords).last_hidden_state
        texts = [hidden_TF[:length] for hidden_TF, length in zip(hidden_NTF, lengths, strict=True)]
        return torch.cat(texts) if pooling == "none" else torch.stack([pool(text, pooling) for text in texts])

    # Vision towers.

    def load_tower(self, spec: TowerSpec) -> LoadReport:
        """Load a vision tower, in place of the encoder before."""
        self._load_tower(spec, self.group)
        return self._report()

    def _load_tower(self, spec: TowerSpec, group: dist.ProcessGroup | None) -> None:
        from enfold.checkpoint import load_encoder

        self.unload()
        self._encoder = load_encoder(
            spec.path,
            subfolder=spec.subfolder,
            dtype=None if spec.dtype is None else getattr(torch, spec.dtype),
            device=self.device,
            group=group,
            numerics=spec.numerics,
            timeout=spec.timeout_s,
            vision=replace(spec.vision),  # loading writes the sizes into it
        )

    @torch.inference_mode()
    def encode_images(self, pixels_PF: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        """Encode images given as patches, and return the rows [tokens, D] of each; on every rank.

        pixels_PF: the patches of all images, on the CPU. Where the tower has a pooling head, the rows are those that
        `attach_pooled` makes. The head sees one image at a time, so its bits don't hang on the others.
        """
        rows: list[torch.Tensor] = self.encoder.spread.encode_items(pixels_PF, grid_thw)
        head = getattr(self.encoder, self.encoder.spread.tower.head, None)
        return rows if head is None else [attach_pooled(x, head(x.unsqueeze(0))[0]) for x in rows]

    def tower_counters(self) -> dict[str, int]:
        """Return what the tower has done since it was loaded: calls, images, tokens, padded_tokens."""
        return dict(vars(self.encoder.spread.counters))

    # For `enfold verify`: outputs are kept by name on rank 0, and compared there.

    def fitting_length(self, wanted: int) -> int:
        """Return `wanted` tokens per text, or as many as the encoder has positions for."""
        return min(wanted, max_positions(self.encoder.config.get_text_config()) or wanted)

    @torch.inference_mode()
    def probe(self, name: str, batch_size: int, length: int) -> dict[str, str]:
        """Run the encoder on random input, keep its outputs on rank 0 as `name`; return a digest of each output."""
        inputs = probe_inputs(self.encoder, batch_size, length, self.device)
        return self._keep(name, self.encoder(**inputs, output_hidden_states=True))

    @torch.inference_mode()
    def probe_plain(self, spec: EncoderSpec, batch_size: int, length: int) -> str | None:
        """Keep, as REFERENCE, what Transformers' own module of the loaded encoder's class returns.

        Only rank 0 loads it. Frees the loaded encoder. Returns the name of the class on rank 0.
        """
        from transformers.utils import logging as transformers_logging

        plain_class: Any = type(self.encoder)
        dtype = self.encoder.dtype
        keywords: dict[str, Any] = {} if spec.subfolder is None else {"subfolder": spec.subfolder}
        if getattr(self.encoder, "pooler", False) is None:
            # The checkpoint has no pooler: Transformers would make one of random weights.
            keywords["add_pooling_layer"] = False
        self.unload()
        if self.rank:
            return None
        transformers_logging.disable_progress_bar()
        plain = plain_class.from_pretrained(spec.path, dtype=dtype, **keywords).eval().to(self.device)
        inputs = probe_inputs(plain, batch_size, length, self.device)
        self._keep(REFERENCE, plain(**inputs, output_hidden_states=True))
        return str(plain_class.__name__)

    @torch.inference_mode()
    def probe_tower(self, name: str, num_images: int) -> dict[str, str]:
        """As `probe`, for a vision tower and random images."""
        return self._keep(name, self.encoder(**tower_inputs(self.encoder.config, num_images)))

    @torch.inference_mode()
    def probe_one_rank(self, spec: TowerSpec, num_images: int) -> dict[str, Any] | None:
        """Keep what rank 0 alone returns for random images, as ONE_RANK, and Transformers' own tower, as REFERENCE.

        The other ranks load nothing. Returns, on rank 0, the name of the tower's class and its precision.
        """
        self.unload()
        if self.rank:
            return None
        alone = None if self.group is None else dist.new_group([0], backend="gloo", use_local_synchronization=True)
        self._load_tower(spec, alone)
        self.probe_tower(ONE_RANK, num_images)
        about = {"model_class": type(self.encoder).__name__, "dtype": self._report().dtype}
        plain = self._plain_tower(spec).to(self.device)
        inputs = {name: x.to(self.device) for name, x in tower_inputs(plain.config, num_images).items()}
        pixels = "pixel_values" if "pixel_values" in inputs else "hidden_states"
        inputs[pixels] = inputs[pixels].to(plain.dtype)
        self._keep(REFERENCE, plain(**inputs))
        return about

    def _plain_tower(self, spec: TowerSpec) -> Any:
        """Return Transformers' own tower, read by Transformers, in place of the loaded one."""
        from transformers.utils import logging as transformers_logging

        plain_class: Any = type(self.encoder)
        config, dtype = self.encoder.config, self.encoder.dtype
        names = {f"^{re.escape(prefix)}": "" for prefix in self.encoder.spread.tower.prefixes}
        self.unload()
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()  # it would list the weights of the language model
        keywords = {"subfolder": spec.subfolder or "", "config": config, "dtype": dtype, "key_mapping": names}
        plain, found = plain_class.from_pretrained(spec.path, output_loading_info=True, **keywords)
        if missing := found["missing_keys"]:
            raise CheckpointError(f"Transformers finds no weights for {', '.join(sorted(missing)[:4])} in {spec.path}")
        return plain.eval()

    def compare(self, name: str, reference: str) -> list[Comparison]:
        """Compare two kept sets of outputs; an empty list on ranks other than 0."""
        return compare_outputs(self._kept[name], self._kept[reference]) if self.rank == 0 else []

    def forget(self, name: str) -> None:
        """Drop the outputs kept as `name`."""
        self._kept.pop(name, None)

    def describe(self) -> dict[str, Any]:
        """Return what the bits may hang on: versions, processor and number of threads."""
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "python": platform.python_version()}
        if self.device.type == "cuda":
            driver = Path("/proc/driver/nvidia/version")
            about["gpu"] = torch.cuda.get_device_name(self.device)
            about["cuda"] = torch.version.cuda
            about["driver"] = driver.read_text().splitlines()[0] if driver.exists() else "unknown"
        else:
            about["cpu"] = torch.backends.cpu.get_cpu_capability()
        return about

    def _keep(self, name: str, output: Any) -> dict[str, str]:
        outputs = named_outputs(output)
        if self.rank == 0:
            self._kept[name] = {key: value.cpu() for key, value in outputs.items()}
        return {key: digest_output(value) for key, value in outputs.items()}


def pool(hidden_TF: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Pool one text's hidden states. The mean is taken over its own tokens only, so padding can't change its bits."""
    if pooling == "mean":
        return hidden_TF.float().mean(0)
    return hidden_TF[0] if pooling == "cls" else hidden_TF[-1]
