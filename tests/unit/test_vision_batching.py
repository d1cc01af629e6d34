"""Requests in micro-batches: everyone gets their own rows, whatever else was in the batch, failed or was cached."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enfold.errors import (
    ConfigError,
    EncodeError,
    InputError,
    LostRankError,
    MismatchError,
    QueueClosedError,
    QueueFullError,
)
from enfold.vision import cache as cache_module
from enfold.vision.batching import VisionScheduler, make_micro_batches
from enfold.vision.cache import OutputCache
from enfold.vision.queue import VisionQueue
from enfold.vision.requests import VisionItem, VisionRequest, VisionResult

FEATURES, MERGE = 6, 2
POISON = 999.0
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
GRIDS = [(1, 2, 2), (1, 2, 4), (2, 2, 4), (1, 4, 6), (3, 4, 4)]
"""4, 8, 16, 24 and 48 tokens."""


def item(seed: int, grid: tuple[int, int, int] = (1, 2, 4), dtype: torch.dtype = torch.float32) -> VisionItem:
    generator = torch.Generator().manual_seed(seed)
    return VisionItem(torch.randn(math.prod(grid), FEATURES, generator=generator).to(dtype), grid)


def poison(grid: tuple[int, int, int] = (1, 2, 4)) -> VisionItem:
    return VisionItem(torch.full((math.prod(grid), FEATURES), POISON), grid)


def rows_of(pixel_values: torch.Tensor) -> torch.Tensor:
    """What the encoder makes of one item by itself: [tokens // 4, 7]."""
    merged = pixel_values.double().view(-1, MERGE * MERGE, FEATURES)
    return torch.cat([merged.sum(1), merged[:, :1, 0]], dim=1).to(pixel_values.dtype)


class Tower:
    """An encoder that notes its calls, returns views of one buffer, and fails on poison."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, ...]]] = []
        self.dtypes: list[torch.dtype] = []
        self.error: Callable[[int], Exception | None] = lambda call: None
        self.cured = False

    def __call__(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        assert (grid_thw.dtype, grid_thw.ndim, grid_thw.device.type) == (torch.int64, 2, "cpu")
        self.calls.append([tuple(grid) for grid in grid_thw.tolist()])
        self.dtypes.append(pixel_values.dtype)
        if error := self.error(len(self.calls)):
            raise error
        if not self.cured and bool((pixel_values == POISON).any()):
            raise RuntimeError("a kernel failed")
        sizes = grid_thw.prod(1).tolist()
        outputs = torch.cat([rows_of(part) for part in pixel_values.split(sizes)])
        pixel_values.fill_(-1)  # nobody may rely on it afterwards
        return list(outputs.split([size // MERGE**2 for size in sizes]))


def make_scheduler(encode: Any, token_budget: int = 32, **keywords: Any) -> VisionScheduler:
    sizes = {"max_item_tokens": 64, "merge_size": MERGE, "patch_features": FEATURES, **keywords}
    return VisionScheduler(encode, token_budget=token_budget, **sizes)


def request(*items: VisionItem, name: Any = "r") -> VisionRequest:
    return VisionRequest(items, name)


def assert_right(outputs: Sequence[torch.Tensor], items: Sequence[VisionItem]) -> None:
    assert len(outputs) == len(items)
    for output, each in zip(outputs, items, strict=True):
        assert output.dtype == each.pixel_values.dtype
        assert torch.equal(output, rows_of(each.pixel_values))


def assert_all_right(results: Sequence[VisionResult], requests: Sequence[VisionRequest]) -> None:
    for result, each in zip(results, requests, strict=True):
        assert result.request_id == each.request_id
        assert_right(result.get(), each.items)


# make_micro_batches


@unhurried
@given(counts=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 60))
def test_micro_batches_are_ordered_full_and_within_the_budget(counts: list[int], budget: int) -> None:
    batches = make_micro_batches(counts, budget)
    assert [place for batch in batches for place in batch] == list(range(len(counts)))
    sums = [sum(counts[place] for place in batch) for batch in batches]
    assert all(total <= budget or len(batch) == 1 for total, batch in zip(sums, batches, strict=True))
    for (_, total), (batch, _) in pairwise(zip(batches, sums, strict=True)):
        assert total + counts[batch[0]] > budget, "the next item would have fitted"


@pytest.mark.parametrize(("counts", "budget"), [([1, 0], 5), ([-1], 5), ([1], 0), ([], 0)])
def test_micro_batches_of_nothing_are_refused(counts: list[int], budget: int) -> None:
    with pytest.raises(InputError, match=f"budget={budget} must all be at least 1"):
        make_micro_batches(counts, budget)


# Batches


def test_items_of_several_requests_share_calls_within_the_budget() -> None:
    tower = Tower()
    scheduler = make_scheduler(tower)
    requests = [
        request(item(0, GRIDS[1]), item(1, GRIDS[0]), name="a"),
        request(name="no images"),
        request(item(2, GRIDS[2]), name="b"),
        request(item(3, GRIDS[4]), item(4, GRIDS[1]), name="c"),  # 48 tokens: more than the budget, alone
    ]
    assert_all_right(scheduler.run(requests), requests)
    assert tower.calls == [[GRIDS[1], GRIDS[0], GRIDS[2]], [GRIDS[4]], [GRIDS[1]]]
    counters = scheduler.counters
    assert (counters.requests, counters.failures, counters.items, counters.duplicates) == (4, 0, 5, 0)
    assert (counters.encode_calls, counters.tokens) == (3, 28 + 48 + 8)
    assert scheduler.run([]) == []


def test_equal_items_of_a_batch_are_encoded_once_and_owned_by_each() -> None:
    tower = Tower()
    scheduler = make_scheduler(tower)
    requests = [request(item(0), item(1), item(0)), request(item(1)), request(item(0, (2, 2, 2)))]
    results = scheduler.run(requests)
    assert_all_right(results, requests)
    assert tower.calls == [[GRIDS[1], GRIDS[1], (2, 2, 2)]], "the same pixels in another shape are another item"
    assert (scheduler.counters.items, scheduler.counters.duplicates) == (5, 2)
    outputs = [output for result in results for output in result.outputs]
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == len(outputs)
    assert all(output.untyped_storage().nbytes() == output.nbytes for output in outputs)


def test_items_of_other_dtypes_are_not_promoted_in_a_shared_tensor() -> None:
    tower = Tower()
    items = [item(0), item(1, dtype=torch.bfloat16), item(0, dtype=torch.float16), item(2)]
    assert_all_right(make_scheduler(tower).run([request(*items)]), [request(*items)])
    assert tower.dtypes == [torch.float32, torch.bfloat16, torch.float16]


def test_callers_keep_their_pixels() -> None:
    mine = item(0)
    before = mine.pixel_values.clone()
    make_scheduler(Tower()).run([request(mine)])
    assert torch.equal(mine.pixel_values, before)


def test_what_is_encoded_is_what_was_checked() -> None:
    tower, late = Tower(), item(1, GRIDS[3])
    expected = rows_of(late.pixel_values)

    def encode(pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        late.pixel_values.fill_(5)  # its caller gave up and uses the memory for something else
        return tower(pixel_values, grid_thw)

    scheduler = make_scheduler(encode, cache=OutputCache(10_000))
    result = scheduler.run([request(item(0, GRIDS[3]), late)])[0]
    assert torch.equal(result.get()[1], expected)
    assert len(tower.calls) == 2


# The cache


def test_a_hit_has_the_bits_of_a_miss_and_callers_can_not_spoil_it() -> None:
    tower = Tower()
    scheduler = make_scheduler(tower, cache=OutputCache(10_000))
    requests = [request(item(0), item(1, GRIDS[2])), request(item(0))]
    for _ in range(3):
        results = scheduler.run(requests)
        assert_all_right(results, requests)
        for output in (output for result in results for output in result.outputs):
            output.fill_(torch.nan)
    assert len(tower.calls) == 1
    assert (scheduler.cache.counters.hits, scheduler.cache.counters.misses) == (4, 2)
    assert scheduler.cache.counters.num_held == 0


def test_other_models_do_not_share_entries() -> None:
    cache, tower = OutputCache(10_000), Tower()
    make_scheduler(lambda x, grid: [each * 2 for each in tower(x, grid)], cache=cache, salt="a").run([request(item(0))])
    requests = [request(item(0))]
    assert_all_right(make_scheduler(tower, cache=cache, salt="b").run(requests), requests)
    assert len(tower.calls) == 2


def test_a_cache_shared_by_towers_that_merge_differently_gives_no_wrong_lengths() -> None:
    cache, tower = OutputCache(10_000), Tower()
    make_scheduler(lambda x, grid: [x.clone()], cache=cache, merge_size=1).run([request(item(0))])
    requests = [request(item(0))]
    assert_all_right(make_scheduler(tower, cache=cache).run(requests), requests)
    assert cache.counters.corrupted == 1


class SameDigest:
    def __init__(self, *_: Any) -> None: ...

    def update(self, *_: Any) -> None: ...

    def digest(self) -> bytes:
        return bytes(32)


def test_images_whose_digests_collide_get_their_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module.hashlib, "sha256", SameDigest)
    scheduler = make_scheduler(Tower(), cache=OutputCache(10_000))
    for requests in ([request(item(0)), request(item(1))], [request(item(2), item(1))]):
        assert_all_right(scheduler.run(requests), requests)
    assert scheduler.counters.duplicates == 0


def test_a_cache_too_small_for_a_batch_keeps_the_results_right() -> None:
    tower = Tower()
    scheduler = make_scheduler(tower, cache=OutputCache(2 * 7 * 4 * 2))  # two outputs of two rows
    requests = [request(*(item(seed) for seed in range(6)))]
    for _ in range(2):
        assert_all_right(scheduler.run(requests), requests)
    assert scheduler.cache.counters.num_entries == 2


def test_an_entry_that_a_batch_uses_is_not_evicted_by_its_other_items() -> None:
    tower = Tower()
    scheduler = make_scheduler(tower, cache=OutputCache(2 * 7 * 4 * 2))
    scheduler.run([request(item(0), item(1))])
    scheduler.run([request(*(item(seed) for seed in (0, 2, 3, 4)))])
    assert (scheduler.cache.counters.evictions, scheduler.cache.counters.rejected) == (1, 2)
    num_calls = len(tower.calls)
    assert_right(scheduler.run([request(item(0))])[0].get(), [item(0)])
    assert len(tower.calls) == num_calls


def test_an_entry_that_one_rank_has_lost_is_encoded_by_all() -> None:
    towers = [Tower(), Tower()]
    flags: list[list[bool]] = []
    shared: list[list[bool]] = []

    def note(mine: list[bool]) -> list[bool]:
        flags.append(mine)
        return shared[-1] if shared else mine

    schedulers = [make_scheduler(tower, cache=OutputCache(10_000), agree=note) for tower in towers]
    requests = [request(item(0), item(1))]
    for scheduler in schedulers:
        scheduler.run(requests)
    next(iter(schedulers[0].cache._entries.values())).output.zero_()
    shared.append([False, True])
    for scheduler in schedulers:
        assert_all_right(scheduler.run(requests), requests)
    assert flags == [[False, False]] * 2 + [[False, True], [True, True]]
    assert towers[0].calls == towers[1].calls
    assert [len(call) for call in towers[1].calls] == [2, 1]


# Requests that are refused

NAN = item(0)
NAN.pixel_values[3, 2] = torch.nan
INF = item(0, dtype=torch.float16)
INF.pixel_values[0, 0] = -torch.inf
X = torch.zeros(8, FEATURES)

REFUSED = [
    (NAN, r"1 of 48 pixel_values are NaN or infinite"),
    (INF, r"1 of 48 pixel_values are NaN or infinite"),
    ("a picture", r"str is no item with a tensor"),
    (None, r"NoneType is no item"),
    (VisionItem([[1.0]], (1, 2, 4)), r"VisionItem is no item with a tensor"),  # type: ignore[arg-type]
    (VisionItem(X.to(torch.uint8), (1, 2, 4)), r"pixel_values are torch.uint8.*give a dense tensor of float32"),
    (VisionItem(X.to_sparse(), (1, 2, 4)), r"torch.sparse_coo.*give a dense tensor"),
    (VisionItem(X.to("meta"), (1, 2, 4)), r"on meta; give a dense tensor"),
    (VisionItem(X, (1, 2, 2)), r"\[8, 6\] and the grid \(1, 2, 2\) needs \[4, 6\]"),
    (VisionItem(X[:, :5], (1, 2, 4)), r"\[8, 5\] and the grid \(1, 2, 4\) needs \[8, 6\].*patch_features=6"),
    (VisionItem(X.flatten(), (1, 2, 4)), r"\[48\] and the grid"),
    (VisionItem(X[None], (1, 2, 4)), r"\[1, 8, 6\] and the grid"),
    (VisionItem(X, (1, 1, 8)), r"multiples of merge_size=2"),
    (VisionItem(X, (8, 1, 1)), r"multiples of merge_size=2"),
    (VisionItem(X, (0, 2, 4)), r"three ints >= 1; use tuple\(grid_thw\[i\].tolist\(\)\)"),
    (VisionItem(X, (-1, -2, 4)), r"three ints >= 1"),
    (VisionItem(X, (1, 2.0, 4)), r"three ints >= 1"),  # type: ignore[arg-type]
    (VisionItem(X, (True, 2, 4)), r"three ints >= 1"),
    (VisionItem(X, (2, 4)), r"three ints >= 1"),  # type: ignore[arg-type]
    (VisionItem(X, torch.tensor([1, 2, 4])), r"three ints >= 1"),  # type: ignore[arg-type]
    (item(0, (2, 6, 6)), r"has 72 patches, the limit is max_item_tokens=64; resize it \(or take fewer frames\)"),
]


@pytest.mark.parametrize(("bad", "match"), REFUSED)
def test_a_refused_item_fails_its_own_request_only(bad: Any, match: str) -> None:
    tower = Tower()
    scheduler = make_scheduler(tower, token_budget=100, cache=OutputCache(10_000))
    good = [request(item(seed), name=seed) for seed in range(1, 5)]
    requests = [*good[:2], request(item(7), bad, item(1), name="bad"), *good[2:]]
    results = scheduler.run(requests)
    refused = results.pop(2)
    assert_all_right(results, good)
    assert refused.outputs == [] and refused.request_id == "bad"
    with pytest.raises(InputError, match=rf"request 'bad', item 1: .*{match}"):
        refused.get()
    assert tower.calls == [[GRIDS[1]] * 4], "no item of the refused request is encoded"
    assert (scheduler.counters.failures, scheduler.counters.items) == (1, 4)


def test_what_is_no_request_is_refused_before_anything_is_encoded() -> None:
    tower = Tower()
    with pytest.raises(InputError, match="VisionItem is no VisionRequest"):
        make_scheduler(tower).run([request(item(0)), item(1)])  # type: ignore[list-item]
    assert tower.calls == []
    with pytest.raises(TypeError):
        VisionRequest(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["token_budget", "max_item_tokens", "merge_size", "patch_features"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, None])
def test_sizes_are_whole_numbers(name: str, value: Any) -> None:
    sizes: dict[str, Any] = {"token_budget": 1, "max_item_tokens": 1, "merge_size": 1, "patch_features": 1}
    with pytest.raises(ConfigError, match=f"{name}={value!r} must be a whole number, at least 1"):
        VisionScheduler(Tower(), **{**sizes, name: value})


# Encodes that fail


def test_a_failing_item_fails_its_own_request_only_and_leaves_nothing_in_the_cache() -> None:
    tower = Tower()
    scheduler = make_scheduler(tower, cache=OutputCache(10_000))
    requests = [request(item(seed), name=seed) for seed in range(7)]
    requests.insert(3, request(item(100), poison(), name="bad"))
    results = scheduler.run(requests)
    error = results.pop(3).error
    assert_all_right(results, [each for each in requests if each.request_id != "bad"])
    assert type(error) is EncodeError and isinstance(error.__cause__, RuntimeError)
    assert str(error) == "request 'bad', item 1 (grid (1, 2, 4)) was not encoded: RuntimeError: a kernel failed"
    # Four items per call; in the second the poison: retried one by one.
    assert [len(call) for call in tower.calls] == [4, 4, 1, 1, 1, 1, 1]
    assert scheduler.counters.encode_calls == 7
    assert scheduler.cache.counters.num_entries == 8
    tower.cured = True
    assert_all_right(scheduler.run(requests), requests)
    assert [len(call) for call in tower.calls[7:]] == [1], "a failed encode was read as a hit, or a good one was lost"


def test_an_item_that_fails_alone_is_not_tried_twice_and_fails_all_who_want_it() -> None:
    tower = Tower()
    results = make_scheduler(tower).run([request(poison(), name=0), request(poison(), name=1)])
    assert [str(result.error)[:9] for result in results] == ["request 0", "request 1"]
    assert len(tower.calls) == 1


WRONG = [
    (lambda rows: rows[:-1], "returned list of 0 for 1 items"),
    (lambda rows: [*rows, rows[0]], "returned list of 2 for 1 items"),
    (torch.stack, "returned Tensor of 1 for 1 items"),
    (lambda rows: [row[:-1] for row in rows], r"returned \[1, 7\] for grid \(1, 2, 4\), which has 2 rows"),
    (lambda rows: [row[:, 0] for row in rows], r"returned \[2\] for grid"),
    (lambda rows: [row.tolist() for row in rows], "returned list for grid"),
    (lambda rows: None, "TypeError"),
]


@pytest.mark.parametrize(("wrong", "match"), WRONG)
def test_what_an_encoder_may_not_return_is_an_error_and_not_cached(wrong: Any, match: str) -> None:
    tower = Tower()
    scheduler = make_scheduler(lambda x, grid: wrong(tower(x, grid)), cache=OutputCache(10_000))
    with pytest.raises(EncodeError, match=match):
        scheduler.run([request(item(0))])[0].get()
    assert scheduler.cache.counters.num_entries == 0


@pytest.mark.parametrize("wrong", [wrong for wrong, _ in WRONG])
def test_a_batch_that_comes_back_wrong_is_tried_one_by_one(wrong: Any) -> None:
    tower = Tower()

    def encode(pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        rows = tower(pixel_values, grid_thw)
        return wrong(rows) if len(rows) > 1 else rows

    requests = [request(item(0)), request(item(1))]
    assert_all_right(make_scheduler(encode).run(requests), requests)
    assert [len(call) for call in tower.calls] == [2, 1, 1]


@pytest.mark.parametrize("kind", [ConfigError, InputError, MismatchError])
def test_errors_of_enfold_keep_their_kind(kind: type[Exception]) -> None:
    tower = Tower()
    tower.error = lambda call: kind("more blocks than the largest bucket holds")
    error = make_scheduler(tower).run([request(item(0), item(1))])[0].error
    assert type(error) is kind
    assert str(error).endswith(f"{kind.__name__}: more blocks than the largest bucket holds")
    assert [len(call) for call in tower.calls] == [2, 1, 1]


def test_lost_ranks_fail_what_is_pending_and_are_not_tried_again() -> None:
    tower = Tower()
    tower.error = lambda call: LostRankError("rank 1 died") if call == 2 else None
    scheduler = make_scheduler(tower, token_budget=16, cache=OutputCache(10_000))
    requests = [
        request(item(0), name="done"),
        request(item(1), item(2), name="half"),
        request(item(3), name="same call"),
        request(item(4, dtype=torch.float16), name="later"),
        request(item(0), name="a duplicate of what is done"),
    ]
    results = scheduler.run(requests)
    assert len(tower.calls) == 2
    assert_all_right([results[0], results[4]], [requests[0], requests[4]])
    for result in results[1:4]:
        with pytest.raises(LostRankError, match=rf"request '{result.request_id}', item . .*rank 1 died"):
            result.get()
    assert scheduler.cache.counters.num_entries == 2
    assert scheduler.cache.counters.num_held == 0


def test_ranks_lost_while_items_are_tried_one_by_one() -> None:
    tower = Tower()
    tower.error = lambda call: LostRankError("rank 1 died") if call == 4 else None
    requests = [request(each, name=name) for name, each in enumerate([item(0), poison(), item(1), item(2)])]
    results = make_scheduler(tower).run(requests)
    assert [type(result.error) for result in results] == [type(None), EncodeError, LostRankError, LostRankError]
    assert_right(results[0].get(), requests[0].items)
    assert len(tower.calls) == 4


def test_an_interrupt_is_not_swallowed_and_holds_nothing() -> None:
    def interrupted(*_: torch.Tensor) -> list[torch.Tensor]:
        raise KeyboardInterrupt

    scheduler = make_scheduler(interrupted, cache=OutputCache(10_000))
    with pytest.raises(KeyboardInterrupt):
        scheduler.run([request(item(0))])
    assert not scheduler.cache._holds
    scheduler._encode = Tower()
    assert_all_right(scheduler.run([request(item(0))]), [request(item(0))])


def test_an_error_keeps_no_tensor_of_the_failed_encode() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def encode(pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        activations = pixel_values * 2
        seen.extend([weakref.ref(pixel_values), weakref.ref(activations)])
        raise RuntimeError("out of memory")

    results = make_scheduler(encode).run([request(item(0), item(1))])
    gc.collect()
    assert results[0].error is not None and len(seen) == 6
    assert [each() for each in seen] == [None] * 6


# Anything at all: a property, against rows_of

pieces = st.tuples(st.sampled_from(["good", "good", "good", "poison", "nan"]), st.integers(0, 4), st.integers(0, 4))
batches = st.lists(st.lists(st.lists(pieces, max_size=4), max_size=5), min_size=1, max_size=3)


def make_item(kind: str, seed: int, grid: int) -> VisionItem:
    made = poison(GRIDS[grid]) if kind == "poison" else item(seed, GRIDS[grid])
    if kind == "nan":
        made.pixel_values[0, 0] = torch.nan
    return made


@unhurried
@given(runs=batches, budget=st.integers(1, 80), max_bytes=st.sampled_from([0, 60, 500, 10_000]))
def test_every_run_is_right_and_the_same_on_every_rank(
    runs: list[list[list[tuple[str, int, int]]]], budget: int, max_bytes: int
) -> None:
    towers = [Tower(), Tower()]
    ranks = [make_scheduler(tower, budget, cache=OutputCache(max_bytes)) for tower in towers]
    for drawn in runs:
        requests = [request(*(make_item(*piece) for piece in row), name=name) for name, row in enumerate(drawn)]
        for scheduler in ranks:
            for row, each, result in zip(drawn, requests, scheduler.run(requests), strict=True):
                kinds = {kind for kind, _, _ in row}
                if kinds <= {"good"}:
                    assert_right(result.get(), each.items)
                else:
                    assert type(result.error) is (InputError if "nan" in kinds else EncodeError)
            counters = scheduler.cache.counters
            assert counters.num_bytes <= max_bytes and counters.num_held == 0 == counters.corrupted
    assert towers[0].calls == towers[1].calls
    for call in towers[0].calls:
        assert len(call) == 1 or sum(map(math.prod, call)) <= budget
    assert ranks[0].counters == ranks[1].counters
    assert ranks[0].counters.tokens == sum(math.prod(grid) for call in towers[0].calls for grid in call)


def test_threads_take_turns() -> None:
    inside = threading.Semaphore(1)
    tower = Tower()

    def encode(pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        assert inside.acquire(blocking=False), "two encodes at once"
        time.sleep(0.001)
        rows = tower(pixel_values, grid_thw)
        inside.release()
        return rows

    scheduler = make_scheduler(encode, cache=OutputCache(300))
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for step in range(5):
                requests = [request(item(thread + step), item(step))]
                assert_all_right(scheduler.run(requests), requests)
        except BaseException as error:
            failures.append(error)

    run_threads(work, 4)
    assert not failures
    assert scheduler.counters.items == 4 * 5 * 2


def run_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# The queue

LONG_S = 600.0
"""A delay that a test would not survive: what is run before was run for another reason."""


class Gate:
    """An encoder whose first call waits until it is let through."""

    def __init__(self) -> None:
        self.tower, self.entered, self.opened = Tower(), threading.Event(), threading.Event()

    def __call__(self, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> list[torch.Tensor]:
        self.entered.set()
        assert self.opened.wait(60)
        return self.tower(pixel_values, grid_thw)


def queue_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "enfold-vision-queue"]


@pytest.fixture(autouse=True)
def no_thread_is_left_behind() -> Any:
    yield
    assert queue_threads() == []


def test_requests_that_arrive_within_the_delay_share_a_call() -> None:
    tower = Tower()
    with VisionQueue(make_scheduler(tower), LONG_S, max_pending=3) as queue:
        requests = [request(item(seed), name=seed) for seed in range(3)]
        futures = [queue.submit(each) for each in requests]  # the third fills the queue: no need to wait
        for future, each in zip(futures, requests, strict=True):
            assert_right(future.result(60), each.items)
    assert [len(call) for call in tower.calls] == [3]


def test_a_lone_request_waits_for_the_delay_and_no_longer() -> None:
    with VisionQueue(make_scheduler(Tower()), 0.05, max_pending=3) as queue:
        start = time.monotonic()
        assert_right(queue.submit(request(item(0))).result(60), [item(0)])
        assert time.monotonic() - start >= 0.05


def test_a_bad_request_fails_its_own_future_only() -> None:
    with VisionQueue(make_scheduler(Tower()), LONG_S, max_pending=4) as queue:
        requests = [request(item(0)), request(poison()), request(NAN), request(item(1))]
        futures = [queue.submit(each) for each in requests]
        assert [type(future.exception(60)) for future in futures] == [type(None), EncodeError, InputError, type(None)]
        assert_right(futures[3].result(), requests[3].items)
        with pytest.raises(InputError, match="VisionItem is no VisionRequest"):
            queue.submit(item(0))  # type: ignore[arg-type]


def test_a_full_queue_says_so_and_cancelled_requests_make_room() -> None:
    gate = Gate()
    with VisionQueue(make_scheduler(gate), 0, max_pending=2) as queue:
        running = queue.submit(request(item(0)))
        assert gate.entered.wait(60)
        waiting = [queue.submit(request(item(seed, GRIDS[2]))) for seed in (1, 2)]
        with pytest.raises(QueueFullError, match="2 requests wait for the vision encoder, the limit is max_pending=2"):
            queue.submit(request(item(3)))
        assert not running.cancel()
        assert waiting[0].cancel()
        late = queue.submit(request(item(4)))
        gate.opened.set()
        assert_right(running.result(60), [item(0)])
        assert_right(late.result(60), [item(4)])
        with pytest.raises(CancelledError):
            waiting[0].result(60)
    assert gate.tower.calls == [[GRIDS[1]], [GRIDS[2], GRIDS[1]]], "a cancelled request was encoded"


def test_where_all_are_cancelled_nothing_is_encoded() -> None:
    gate = Gate()
    with VisionQueue(make_scheduler(gate), 0, max_pending=2) as queue:
        running = queue.submit(request(item(0)))
        assert gate.entered.wait(60)
        assert queue.submit(request(item(1))).cancel()
        gate.opened.set()
        running.result(60)
    assert len(gate.tower.calls) == 1


def test_close_encodes_what_waits() -> None:
    tower = Tower()
    queue = VisionQueue(make_scheduler(tower), LONG_S, max_pending=9)
    futures = [queue.submit(request(item(seed))) for seed in range(2)]
    queue.close()
    assert all(future.done() for future in futures)
    assert_right(futures[1].result(), [item(1)])
    assert [len(call) for call in tower.calls] == [2]
    queue.close()
    with pytest.raises(QueueClosedError, match="the vision queue is closed; make a new one"):
        queue.submit(request(item(0)))


def test_close_without_draining_fails_what_waits_and_finishes_what_runs() -> None:
    gate = Gate()
    queue = VisionQueue(make_scheduler(gate), 0, max_pending=9)
    running = queue.submit(request(item(0)))
    assert gate.entered.wait(60)
    waiting, cancelled = queue.submit(request(item(1))), queue.submit(request(item(2)))
    cancelled.cancel()
    waiting.add_done_callback(lambda _: gate.opened.set())
    queue.close(drain=False)
    with pytest.raises(QueueClosedError, match="closed before the request was encoded"):
        waiting.result(0)
    assert cancelled.cancelled()
    assert_right(running.result(0), [item(0)])
    assert len(gate.tower.calls) == 1


def test_an_error_in_a_with_block_does_not_wait_for_requests() -> None:
    tower, futures = Tower(), []
    with pytest.raises(KeyError), VisionQueue(make_scheduler(tower), LONG_S, max_pending=9) as queue:
        futures.append(queue.submit(request(item(0))))
        raise KeyError
    assert isinstance(futures[0].exception(0), QueueClosedError)
    assert tower.calls == []


def test_a_callback_may_use_and_close_the_queue() -> None:
    queue = VisionQueue(make_scheduler(Tower()), 0, max_pending=9)
    second: list[Future[list[torch.Tensor]]] = []
    closed: list[bool] = []  # what a callback raises is logged and lost

    def use(_: Future[list[torch.Tensor]]) -> None:
        second.append(queue.submit(request(item(1))))
        queue.close()
        closed.append(True)

    queue.submit(request(item(0))).add_done_callback(use)
    for thread in queue_threads():
        thread.join(60)
    assert_right(second[0].result(0), [item(1)])
    assert closed


def test_the_queue_outlives_whatever_a_run_raises() -> None:
    tower = Tower()
    scheduler = make_scheduler(tower)
    tower.error = lambda call: None if call > 1 else SystemExit("stop")  # type: ignore[return-value,assignment]
    with VisionQueue(scheduler, 0, max_pending=9) as queue:
        with pytest.raises(SystemExit):
            queue.submit(request(item(0))).result(60)
        assert_right(queue.submit(request(item(0))).result(60), [item(0)])


def test_the_queue_keeps_nothing_of_a_batch() -> None:
    with VisionQueue(make_scheduler(Tower()), 0, max_pending=9) as queue:
        asked = request(item(0))
        future = queue.submit(asked)
        future.result(60)
        seen = [weakref.ref(asked), weakref.ref(future)]
        del asked, future
        deadline = time.monotonic() + 30
        while any(each() is not None for each in seen) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [each() for each in seen] == [None, None]


def test_many_threads_get_their_own_rows() -> None:
    tower = Tower()
    failures: list[BaseException] = []
    with VisionQueue(make_scheduler(tower, cache=OutputCache(2_000)), 0.002, max_pending=100) as queue:

        def work(thread: int) -> None:
            try:
                for step in range(10):
                    items = [item(thread * step % 7, GRIDS[(thread + step) % 4]), item(step)]
                    assert_right(queue.submit(request(*items)).result(60), items)
            except BaseException as error:
                failures.append(error)

        run_threads(work, 8)
    assert not failures
    assert queue.scheduler.counters.requests == 80
    assert len(tower.calls) < 160


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf")])
def test_the_delay_is_a_time(delay: float) -> None:
    with pytest.raises(ConfigError, match=r"max_delay_s=.* must be a number of seconds"):
        VisionQueue(make_scheduler(Tower()), delay, max_pending=1)
    with pytest.raises(ConfigError, match="max_pending=0 must be a whole number"):
        VisionQueue(make_scheduler(Tower()), 0, max_pending=0)
