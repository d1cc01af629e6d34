"""What a user of many texts holds: a tokenizer, the ranks with their encoder, and batches made the same way each time.

with Engine(EncoderSpec("path/to/model", mode="dp"), num_ranks=2) as engine:
    vectors = engine.encode(["a red fox", "a blue whale"], pooling="mean")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

from enfold.errors import ConfigError, EncodeError, InputError
from enfold.plan import plan_encoder
from enfold.probe import max_positions
from enfold.runtime.base import Executor
from enfold.runtime.local import LocalExecutor
from enfold.runtime.spawn import SpawnExecutor
from enfold.worker import EncoderSpec, LoadReport, Pooling, TowerSpec

DEFAULT_MAX_LENGTH = 512
UNLIMITED = 1_000_000
"""Tokenizers without a limit of their own say 10**30."""

TOKENIZE_CHUNK = 1024
LOAD_PATIENCE_S = 1800.0
"""One rank may read its weights from a cold disk long after the other had them from the page cache."""


@dataclass(frozen=True)
class Tokens:
    """Texts as token ids: one list per text, and whether its end was cut off to fit max_length."""

    ids: list[list[int]]
    truncated: list[bool]

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts together."""
        return sum(map(len, self.ids))


@dataclass(frozen=True)
class BatchResult:
    """The results of one batch: `tensors[i]` belongs to text `indices[i]`."""

    indices: list[int]
    tensors: list[torch.Tensor]


SpecT = TypeVar("SpecT", bound=EncoderSpec | TowerSpec)


class OnRanks(Generic[SpecT]):
    """An encoder on the ranks of an executor. In a `with` block it is loaded, and no rank outlives the block."""

    load_method: ClassVar[str]
    """The worker's method that takes the spec."""

    def __init__(self, spec: SpecT, executor: Executor) -> None:
        self.spec = spec
        self.executor = executor
        self.report: LoadReport | None = None

    def start(self) -> LoadReport:
        """Start the ranks and load the encoder on them."""
        self.executor.start()
        try:
            self.report = self.executor.call(self.load_method, self.spec, patience_s=LOAD_PATIENCE_S)
        except BaseException:
            self.executor.shutdown(graceful=False)
            raise
        return self.loaded

    def close(self, *, graceful: bool = True) -> None:
        """End the ranks."""
        self.executor.shutdown(graceful=graceful)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(graceful=error is None)

    @property
    def loaded(self) -> LoadReport:
        """What the ranks said of the encoder; raises EncodeError before `start`."""
        if self.report is None:
            raise EncodeError("the encoder is not loaded yet; call start() first")
        return self.report

    @property
    def plan_summary(self) -> str:
        """How the encoder is spread, in one line; raises EncodeError before `start`."""
        return self.loaded.summary


class Engine(OnRanks[EncoderSpec]):
    """One text encoder over `num_ranks` ranks. Opening it reads the tokenizer; `start` starts ranks and loads weights.

    Raises ConfigError where the folder has no tokenizer, or where the model takes no text.
    """

    load_method = "load"

    def __init__(
        self,
        spec: EncoderSpec,
        *,
        num_ranks: int = 1,
        batch_size: int = 32,
        max_length: int | None = None,
        threads_per_rank: int | None = None,
        executor: Executor | None = None,
    ) -> None:
        spec = replace(spec, path=local_or_hub(spec.path), batch_size=spec.batch_size or batch_size)
        super().__init__(spec, executor or make_executor(num_ranks, threads_per_rank, spec.timeout_s))
        self.batch_size = batch_size
        whole_config, config = read_config(spec)
        # What can't be planned is refused here, before any rank is started.
        self.plan = plan_encoder(
            whole_config,
            spec.mode,
            num_ranks,
            spec.batch_size,
            layout=spec.layout,
            dtype=spec.dtype,
            numerics=spec.numerics,
        )
        self.tokenizer = load_tokenizer(spec)
        self.max_length = choose_max_length(max_length, self.tokenizer.model_max_length, max_positions(config))
        self._pad_id = self._find_pad_id(config)
        self._vocab_size = int(config.vocab_size)
        # Some encoders (SigLIP) were trained on texts padded to full length, without a mask.
        self._use_mask = "attention_mask" in self.tokenizer.model_input_names

    def _find_pad_id(self, config: Any) -> int:
        candidates = (self.tokenizer.pad_token_id, config.pad_token_id, self.tokenizer.eos_token_id)
        return int(next((number for number in candidates if isinstance(number, int) and number >= 0), 0))

    def tokenize(self, texts: Sequence[str]) -> Tokens:
        """Return token ids with special tokens, at most `max_length` per text; needs no rank.

        Raises InputError, naming the text's place (0-based), where a text has no token at all; ConfigError where the
        model does not know a token.
        """
        ids: list[list[int]] = []
        truncated: list[bool] = []
        for start in range(0, len(texts), TOKENIZE_CHUNK):
            for text, row in zip(
                chunk := list(texts[start : start + TOKENIZE_CHUNK]), self._tokenize_chunk(chunk), strict=True
            ):
                cut = len(row) > self.max_length
                ids.append(self._tokenize_chunk([text], max_length=self.max_length)[0] if cut else row)
                truncated.append(cut)
        empty = [place for place, row in enumerate(ids) if not row]
        if empty:
            raise InputError(f"text {empty[0]} has no tokens ({len(empty)} in all); leave such texts out")
        largest = max(map(max, ids), default=0)
        if largest >= self._vocab_size:
            raise ConfigError(
                f"the tokenizer gives token id {largest} and the model has {self._vocab_size}; they "
                "do not belong together"
            )
        return Tokens(ids, truncated)

    def _tokenize_chunk(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        keywords: dict[str, Any] = {} if max_length is None else {"max_length": max_length}
        encoded = self.tokenizer(texts, truncation=max_length is not None, verbose=False, **keywords)
        rows: list[list[int]] = encoded["input_ids"]
        return rows

    def encode_batches(self, tokens: Tokens, pooling: Pooling = "none") -> Iterator[BatchResult]:
        """Encode batch by batch, longest texts first; each result holds copies, one tensor per text.

        Pooling "none" gives [tokens of the text, hidden], else [hidden].
        """
        for indices in make_batches([len(row) for row in tokens.ids], self.batch_size):
            rows = [tokens.ids[index] for index in indices]
            lengths = [len(row) for row in rows]
            output = self.executor.call("encode", self._pad(rows), lengths, pooling, self._use_mask).cpu()
            parts = output.split(lengths) if pooling == "none" else output.unbind(0)
            yield BatchResult(indices, [part.clone() for part in parts])

    def _pad(self, rows: list[list[int]]) -> torch.Tensor:
        width = max(map(len, rows)) if self._use_mask else self.max_length
        return torch.tensor([row + [self._pad_id] * (width - len(row)) for row in rows], dtype=torch.long)

    def encode(self, texts: Sequence[str], pooling: Pooling = "mean") -> list[torch.Tensor]:
        """Return one tensor per text, in the order of `texts`; see encode_batches."""
        results: dict[int, torch.Tensor] = {}
        for batch in self.encode_batches(self.tokenize(texts), pooling):
            results.update(zip(batch.indices, batch.tensors, strict=True))
        return [results[index] for index in range(len(texts))]


def make_executor(num_ranks: int, threads_per_rank: int | None, timeout_s: float) -> Executor:
    """Return the executor for `num_ranks` ranks on this machine: one runs in this process."""
    if num_ranks == 1:
        return LocalExecutor(num_threads=threads_per_rank)
    return SpawnExecutor(num_ranks, threads_per_rank=threads_per_rank, timeout_s=timeout_s)


def make_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return places grouped into batches of similar length, longest first (so that memory runs out at once or never).

    Texts of equal length keep their order: the same input always gives the same batches.
    """
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def choose_max_length(wanted: int | None, tokenizer_limit: int, positions: int | None) -> int:
    """Return the token limit per text: what the user wants, else what the tokenizer and the model can take."""
    if wanted is not None:
        if positions is not None and wanted > positions:
            raise ConfigError(
                f"max_length={wanted} is more than the {positions} positions of the model; use at most {positions}"
            )
        return wanted
    limits = [limit for limit in (tokenizer_limit, positions) if limit is not None and 0 < limit < UNLIMITED]
    return min(limits, default=DEFAULT_MAX_LENGTH)


def local_or_hub(path: str) -> str:
    """Return an absolute path for a local folder; a hub id as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def read_config(spec: EncoderSpec) -> tuple[Any, Any]:
    """Return a model's configuration and the text side of it (often the same).

    Raises ConfigError if there is none, or if the model takes no text.
    """
    from transformers import AutoConfig

    where = f"{spec.path}{'/' + spec.subfolder if spec.subfolder else ''}"
    try:
        config = AutoConfig.from_pretrained(spec.path, subfolder=spec.subfolder or "")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"can't read the configuration of {where}: {_first_line(error)}") from error
    text = config.get_text_config()
    if getattr(text, "vocab_size", None) is None:
        raise ConfigError(
            f"{where} is an image encoder ({config.model_type}) and takes no text; use a text encoder (--subfolder "
            f"text_encoder in a pipeline folder)"
        )
    return config, text


def tokenizer_place(spec: EncoderSpec) -> tuple[str, str]:
    """Return (path, subfolder) of the tokenizer: beside the weights, or text_encoder_2's tokenizer_2 in a pipeline."""
    root, folder = spec.path, spec.subfolder or ""
    local = Path(root)
    if not folder and local.is_dir() and local.name.startswith("text_encoder"):
        root, folder = str(local.parent), local.name
    sibling = folder.replace("text_encoder", "tokenizer")
    if not folder.startswith("text_encoder"):
        return spec.path, folder
    beside = Path(root, folder, "tokenizer_config.json").is_file()
    missing = Path(root).is_dir() and not Path(root, sibling).is_dir()
    return (root, folder) if beside or missing else (root, sibling)


def load_tokenizer(spec: EncoderSpec) -> Any:
    """Return the tokenizer of a model folder, or of the folder beside a pipeline's encoder."""
    from transformers import AutoTokenizer

    path, folder = tokenizer_place(spec)
    where = f"{path}{'/' + folder if folder else ''}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, subfolder=folder)
    except Exception as error:  # a tokenizer's own files fail in as many ways as there are formats
        raise ConfigError(f"can't load a tokenizer from {where}: {_first_line(error)}") from error
    # Where the files are missing, Transformers may return a tokenizer that knows its special tokens and nothing else.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ConfigError(f"{where} has no tokenizer files (such as tokenizer.json); put the model's own there")
    return tokenizer


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
