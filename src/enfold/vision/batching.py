"""Images and videos of several requests in one encoder call, within a token budget; each request gets its own rows.

 requests --admit--> distinct items --look up--> misses --micro-batches--> encode --> outputs --deliver--> results
             |            |                                      |
      a bad one fails   duplicates once            retried one by one where it fails

A token is one patch before merging, t*h*w of an item, here and in every limit and counter of this file. (The cache is
bounded in bytes, and a call's blocks are the encoder's own affair: a batch that does not fit them is retried too.)
"""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from enfold.errors import ConfigError, EncodeError, InputError, LostRankError, MismatchError
from enfold.vision.cache import CacheKey, OutputCache, cache_key, own_copy
from enfold.vision.requests import VisionItem, VisionRequest, VisionResult, check_count, check_item, check_request

Encode = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
"""encode(pixel_values [P, F], grid_thw int64 [n, 3] on the CPU): one tensor [merged rows, D] per item, in order."""

Agree = Callable[[list[bool]], Sequence[bool]]
"""From the hits of this rank to those that every rank has (a logical and, element by element)."""

ErrorT = TypeVar("ErrorT", bound=Exception)
KEPT_KINDS = (ConfigError, InputError, LostRankError, MismatchError)
"""Errors of an encode whose kind a request sees; any other becomes an EncodeError."""


@dataclass(frozen=True)
class SchedulerCounters:
    """Sums since the scheduler was made. `items`: of admitted requests; `duplicates`: those equal to another of a run.

    `encode_calls` and `tokens` (patches in those calls) count retries too; `failures` are requests.
    """

    requests: int = 0
    failures: int = 0
    items: int = 0
    duplicates: int = 0
    encode_calls: int = 0
    tokens: int = 0


@dataclass(eq=False)
class _Work:
    """One distinct item of a run: a copy of its pixels, and what became of it."""

    key: CacheKey
    pixel_values: torch.Tensor
    num_rows: int
    output: torch.Tensor | None = None
    error: Exception | None = None
    delivered: bool = False

    @property
    def num_tokens(self) -> int:
        return math.prod(self.key.grid)

    def finish(self, outcome: torch.Tensor | Exception) -> None:
        """Note the outcome and let go of the pixels."""
        if isinstance(outcome, torch.Tensor):
            self.output = outcome
        else:
            self.error = self.error or outcome
        self.pixel_values = self.pixel_values.new_empty(0)

    def deliver(self) -> torch.Tensor:
        assert self.output is not None
        output = own_copy(self.output) if self.delivered else self.output
        self.delivered = True
        return output


def make_micro_batches(token_counts: Sequence[int], budget: int) -> list[list[int]]:
    """Return the places of `token_counts`, in order, cut into as few runs of at most `budget` tokens as there can be.

    An item above the budget is alone in its run. Raises InputError where a count or the budget is less than 1.
    """
    if min((budget, *token_counts)) < 1:
        raise InputError(f"token counts {list(token_counts)} and budget={budget} must all be at least 1")
    batches: list[list[int]] = []
    used = 0
    for place, count in enumerate(token_counts):
        if not batches or used + count > budget:
            batches.append([])
            used = 0
        batches[-1].append(place)
        used += count
    return batches


class VisionScheduler:
    """Runs the items of requests through `encode`, as few calls as `token_budget` allows. Safe between threads.

    token_budget: tokens of one encode call; a larger item is encoded alone. max_item_tokens: what is larger is refused.
    patch_features: F of pixel_values. salt: which model, weights and settings `encode` stands for; in the cache's keys.
    agree: called once per run, where each rank has a cache: an entry that one rank has lost is encoded by all.

    The same runs give the same encode calls on every rank: what is called hangs on nothing but the requests and the
    cache (each rank its own, of one size, used by this alone). Raises ConfigError for sizes less than 1.
    """

    def __init__(
        self,
        encode: Encode,
        *,
        token_budget: int,
        max_item_tokens: int,
        merge_size: int,
        patch_features: int,
        cache: OutputCache | None = None,
        salt: str = "",
        agree: Agree = list,
    ) -> None:
        self.token_budget = check_count("token_budget", token_budget)
        self.max_item_tokens = check_count("max_item_tokens", max_item_tokens)
        self.merge_size = check_count("merge_size", merge_size)
        self.patch_features = check_count("patch_features", patch_features)
        self.cache = OutputCache(0) if cache is None else cache
        self.counters = SchedulerCounters()
        self._encode, self._salt, self._agree = encode, salt, agree
        self._lock = threading.Lock()

    def run(self, requests: Sequence[VisionRequest]) -> list[VisionResult]:
        """Encode the items of all requests and return one result per request, in order.

        A request with an item that is refused or fails gets an InputError, ConfigError or EncodeError that names it;
        LostRankError where the ranks were lost before all its items were encoded. The others get their outputs. Raises
        InputError for what is no VisionRequest, and what `agree` raises.
        """
        with self._lock:
            works: dict[CacheKey, _Work] = {}
            admitted = [self._admit(check_request(request), works) for request in requests]
            with self.cache.hold(works):
                self._look_up(works.values())
                self._encode_all([work for work in works.values() if work.output is None])
            results = [self._result(*each, works) for each in zip(requests, admitted, strict=True)]
            items = sum(len(keys) for keys in admitted if isinstance(keys, list))
            failures = sum(result.error is not None for result in results)
            self._count(requests=len(results), failures=failures, items=items, duplicates=items - len(works))
            return results

    def _count(self, **more: int) -> None:
        self.counters = replace(self.counters, **{name: getattr(self.counters, name) + more[name] for name in more})

    def _admit(self, request: VisionRequest, works: dict[CacheKey, _Work]) -> list[CacheKey] | InputError:
        """Add the distinct items of a request to `works` and return their keys; add none where one can't be used."""
        mine: list[_Work] = []
        for place, item in enumerate(request.items):
            try:
                mine.append(self._prepare(item))
            except Exception as error:  # a tensor of an unheard-of kind fails in its own way; it must fail alone
                told = error if isinstance(error, InputError) else f"can't be read: {type(error).__name__}: {error}"
                refused = InputError(f"request {request.request_id!r}, item {place}: {told}")
                refused.__cause__ = error
                return refused
        for work in mine:
            works.setdefault(work.key, work)
        return [work.key for work in mine]

    def _prepare(self, item: VisionItem) -> _Work:
        check_item(item, self.merge_size, self.patch_features, self.max_item_tokens)
        pixel_values = own_copy(item.pixel_values)  # so that what is encoded is what the key and the checks have seen
        if not all(bool(each.isfinite()) for each in pixel_values.aminmax()):
            bad = int((~pixel_values.isfinite()).sum())
            raise InputError(f"{bad} of {pixel_values.numel()} pixel_values are NaN or infinite; preprocess it again")
        key = cache_key(pixel_values, item.grid, self._salt)
        return _Work(key, pixel_values, math.prod(item.grid) // self.merge_size**2)

    def _look_up(self, works: Iterable[_Work]) -> None:
        found = [(work, self.cache.get(work.key, work.num_rows)) for work in works]
        shared = self._agree([output is not None for _, output in found])
        for (work, output), everywhere in zip(found, shared, strict=True):
            if output is not None and everywhere:
                work.finish(output)

    def _encode_all(self, works: Sequence[_Work]) -> None:
        kinds: dict[tuple[torch.dtype, torch.device], list[_Work]] = {}  # what one tensor can hold
        for work in works:
            kinds.setdefault((work.pixel_values.dtype, work.pixel_values.device), []).append(work)
        lost: LostRankError | None = None
        for alike in kinds.values():
            for places in make_micro_batches([work.num_tokens for work in alike], self.token_budget):
                batch = [alike[place] for place in places]
                lost = lost or self._encode_batch(batch)
                for work in batch:
                    if lost and work.output is None:
                        work.finish(lost)

    def _encode_batch(self, batch: list[_Work]) -> LostRankError | None:
        """Encode `batch` in one call, or one by one where that fails; return the error that leaves no ranks to try."""
        try:
            outputs = self._call(batch)
        except LostRankError as error:
            return _without_tensors(error)
        except Exception as error:
            if len(batch) == 1:
                batch[0].finish(_without_tensors(error))
        else:
            for work, output in zip(batch, outputs, strict=True):
                self.cache.put(work.key, output)
                work.finish(output)
            return None
        for work in batch if len(batch) > 1 else ():
            if lost := self._encode_batch([work]):
                return lost
        return None

    def _call(self, batch: list[_Work]) -> list[torch.Tensor]:
        pixels = [work.pixel_values for work in batch]
        grid_thw = torch.tensor([work.key.grid for work in batch], dtype=torch.int64)
        self._count(encode_calls=1, tokens=sum(work.num_tokens for work in batch))
        outputs = self._encode(pixels[0] if len(pixels) == 1 else torch.cat(pixels), grid_thw)
        if isinstance(outputs, torch.Tensor) or len(outputs) != len(batch):
            raise EncodeError(f"encode returned {type(outputs).__name__} of {len(outputs)} for {len(batch)} items")
        for work, output in zip(batch, outputs, strict=True):
            if not isinstance(output, torch.Tensor) or output.ndim != 2 or len(output) != work.num_rows:
                shown = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
                raise EncodeError(f"encode returned {shown} for grid {work.key.grid}, which has {work.num_rows} rows")
        return [own_copy(output) for output in outputs]

    def _result(
        self, request: VisionRequest, keys: list[CacheKey] | InputError, works: dict[CacheKey, _Work]
    ) -> VisionResult:
        if isinstance(keys, InputError):
            return VisionResult(request.request_id, error=keys)
        for place, key in enumerate(keys):
            if (error := works[key].error) is not None:
                kind = next((kind for kind in KEPT_KINDS if isinstance(error, kind)), EncodeError)
                told = f"request {request.request_id!r}, item {place} (grid {key.grid}) was not encoded: "
                failed = kind(f"{told}{type(error).__name__}: {error}")
                failed.__cause__ = error
                return VisionResult(request.request_id, error=failed)
        return VisionResult(request.request_id, [works[key].deliver() for key in keys])


def _without_tensors(error: ErrorT) -> ErrorT:
    """Empty the frames of a failed encode, so that its error keeps the lines and not the activations."""
    traceback.clear_frames(error.__traceback__)
    return error
