"""The output cache: what is found, what is kept, and that its bytes are bounded whatever happens."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enfold.errors import ConfigError, InputError
from enfold.vision import cache as cache_module
from enfold.vision.cache import CacheKey, OutputCache, cache_key

GRID = (1, 2, 2)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure


def pixels(seed: int, num_rows: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_rows, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def key_of(seed: int) -> CacheKey:
    return cache_key(pixels(seed), GRID, "tower")


def output_of(number: int, num_bytes: int = 40) -> torch.Tensor:
    return torch.full((num_bytes // 8, 2), float(number))


def same_bits(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    assert a is not None
    same_kind = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same_kind and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def stored_bytes(cache: OutputCache) -> int:
    return sum(entry.output.untyped_storage().nbytes() for entry in cache._entries.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_hit_has_the_bits_of_what_was_put(dtype: torch.dtype) -> None:
    cache = OutputCache(1000)
    output = torch.tensor([[0.0, -0.0, torch.nan], [1.1, torch.inf, 1e-45]]).to(dtype)
    assert cache.get(key_of(0)) is None
    assert cache.put(key_of(0), output)
    assert same_bits(cache.get(key_of(0), num_rows=2), output)
    assert (cache.counters.hits, cache.counters.misses) == (1, 1)


def test_writes_into_what_was_put_or_got_do_not_spoil_an_entry() -> None:
    cache = OutputCache(1000)
    given_output, original = output_of(7), output_of(7)
    cache.put(key_of(0), given_output)
    given_output.zero_()
    for _ in range(2):
        got = cache.get(key_of(0))
        assert same_bits(got, original)
        assert got is not None
        got.fill_(-1)
    assert cache.counters.corrupted == 0


def test_outputs_of_inference_mode_are_ordinary_tensors_afterwards() -> None:
    cache = OutputCache(1000)
    with torch.inference_mode():
        cache.put(key_of(0), output_of(1) * 2)
        inside = cache.get(key_of(0))
    outside = cache.get(key_of(0))
    assert inside is not None and outside is not None
    assert not inside.is_inference() and not outside.is_inference()
    inside.add_(1)
    leaf = torch.ones(5, 2, requires_grad=True)
    cache.put(key_of(1), leaf * 3)
    got = cache.get(key_of(1))
    assert got is not None and not got.requires_grad


# Keys


def test_a_key_hangs_on_everything_that_gives_content_its_meaning() -> None:
    x = pixels(0)
    changed = x.clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1], torch.tensor(torch.inf))
    zero = torch.zeros(4, 6)
    keys = [
        cache_key(x, GRID, "tower"),
        cache_key(changed, GRID, "tower"),
        cache_key(x, (1, 4, 1), "tower"),
        cache_key(x, (1, 1, 4), "tower"),
        cache_key(x, GRID, "another tower"),
        cache_key(x.view(6, 4), GRID, "tower"),
        cache_key(x.view(torch.int32), GRID, "tower"),
        cache_key(x.to(torch.bfloat16), GRID, "tower"),
        cache_key(x.to(torch.float16), GRID, "tower"),
        cache_key(zero, GRID, "tower"),
        cache_key(-zero, GRID, "tower"),
    ]
    for part in (keys, [key.digest for key in keys], [key.check for key in keys]):
        assert len(set(part)) == len(keys)


def test_a_key_does_not_hang_on_strides_or_autograd() -> None:
    x = pixels(0)
    expected = cache_key(x, GRID, "tower")
    assert cache_key(x.t().contiguous().t(), GRID, "tower") == expected
    assert cache_key(torch.cat([x, x])[4:], GRID, "tower") == expected
    assert cache_key(x.clone().requires_grad_(), GRID, "tower") == expected
    assert cache_key(torch._neg_view(-x), GRID, "tower") == expected  # negated lazily
    assert (len(expected.digest), expected.shape, expected.dtype) == (32, (4, 6), "float32")


class SameDigest:
    def __init__(self, *_: Any) -> None: ...

    def update(self, *_: Any) -> None: ...

    def digest(self) -> bytes:
        return bytes(32)


def test_items_whose_digests_collide_keep_an_entry_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module.hashlib, "sha256", SameDigest)
    cache = OutputCache(1000)
    a, b = key_of(0), key_of(1)
    assert a.digest == b.digest
    cache.put(a, output_of(0))
    assert cache.get(b) is None
    cache.put(b, output_of(1))
    assert same_bits(cache.get(a), output_of(0))
    assert same_bits(cache.get(b), output_of(1))


def test_where_both_digests_collide_other_shapes_still_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module.hashlib, "sha256", SameDigest)
    monkeypatch.setattr(cache_module.zlib, "crc32", lambda *_: 0)
    cache = OutputCache(1000)
    cache.put(cache_key(pixels(0), GRID, ""), output_of(0))
    assert cache.get(cache_key(pixels(0, 8), (1, 2, 4), "")) is None
    assert cache.get(cache_key(pixels(0, dtype=torch.float16), GRID, "")) is None
    assert cache.get(cache_key(pixels(0), (2, 2, 1), "")) is None


# Verified on hit


def flip_a_bit(output: torch.Tensor) -> None:
    output.view(torch.int32)[-1, -1] ^= 1


@pytest.mark.parametrize("damage", [flip_a_bit, lambda output: output.resize_(2, 5), lambda output: output.zero_()])
def test_a_damaged_entry_is_dropped_and_a_miss(damage: Any) -> None:
    cache = OutputCache(1000)
    cache.put(key_of(0), output_of(3))
    damage(cache._entries[key_of(0)].output)
    assert cache.get(key_of(0)) is None
    counters = cache.counters
    assert (counters.corrupted, counters.misses, counters.hits) == (1, 1, 0)
    assert (counters.num_bytes, counters.num_entries) == (0, 0)
    cache.put(key_of(0), output_of(3))
    assert same_bits(cache.get(key_of(0)), output_of(3))


def test_an_entry_with_another_number_of_rows_than_expected_is_dropped() -> None:
    cache = OutputCache(1000)
    cache.put(key_of(0), output_of(3))
    assert cache.get(key_of(0), num_rows=4) is None
    assert cache.get(key_of(0), num_rows=5) is None
    assert (cache.counters.corrupted, cache.counters.misses, cache.counters.num_bytes) == (1, 2, 0)


# Bytes, eviction, holds


def test_the_least_recently_used_goes_first() -> None:
    cache = OutputCache(120)
    for number in range(3):
        assert cache.put(key_of(number), output_of(number))
    cache.get(key_of(0))
    cache.put(key_of(3), output_of(3))
    assert [cache.get(key_of(number)) is not None for number in range(4)] == [True, False, True, True]
    assert (cache.counters.evictions, cache.counters.num_bytes, cache.counters.num_entries) == (1, 120, 3)


def test_a_view_is_stored_with_the_bytes_of_its_own() -> None:
    cache = OutputCache(64)
    whole = torch.randn(1000, 8)
    assert cache.put(key_of(0), whole[10:12])
    assert cache.put(key_of(1), whole.t()[:2, 5:9])  # strided: replaces the first
    assert cache.put(key_of(2), torch.ones(1, 1).expand(4, 2))
    assert stored_bytes(cache) == cache.counters.num_bytes == 64
    assert same_bits(cache.get(key_of(1)), whole.t()[:2, 5:9])
    cache.put(key_of(3), torch.randn(4, 2).t())
    got = cache.get(key_of(3))
    assert got is not None and got.is_contiguous()


def test_an_entry_in_use_is_not_evicted_and_what_does_not_fit_is_not_stored() -> None:
    cache = OutputCache(120)
    for number in range(3):
        cache.put(key_of(number), output_of(number))
    with cache.hold([key_of(0), key_of(1)]):
        assert cache.counters.num_held == 2
        assert cache.put(key_of(3), output_of(3))
        assert not cache.put(key_of(4), output_of(4, 80)), "only one entry of 40 bytes is free"
        assert cache.get(key_of(3)) is not None, "evicted in vain"
        assert [cache.get(key_of(number)) is not None for number in range(3)] == [True, True, False]
    assert cache.counters.num_held == 0
    assert cache.put(key_of(4), output_of(4, 80))
    assert (cache.counters.rejected, cache.counters.evictions) == (1, 3)


def test_keys_may_be_held_before_they_are_stored_and_more_than_once() -> None:
    cache = OutputCache(40)
    cache.acquire({key_of(0): 5})  # an iterable of keys like any other
    with cache.hold([key_of(0), key_of(0)]):
        cache.put(key_of(0), output_of(0))
    assert not cache.put(key_of(1), output_of(1))
    cache.release([key_of(0)])
    assert cache.put(key_of(1), output_of(1))


def test_release_of_what_is_not_held_changes_nothing() -> None:
    cache = OutputCache(40)
    cache.acquire([key_of(0)])
    with pytest.raises(InputError, match="2 keys are not held; release what acquire was given"):
        cache.release([key_of(0), key_of(0), key_of(1)])
    cache.put(key_of(0), output_of(0))
    assert not cache.put(key_of(1), output_of(1)), "the failed release has released"
    cache.release([key_of(0)])


def test_a_hold_ends_with_an_error_too() -> None:
    cache = OutputCache(40)
    cache.put(key_of(0), output_of(0))
    with pytest.raises(KeyError), cache.hold([key_of(0)]):
        raise KeyError
    assert cache.put(key_of(1), output_of(1))


def test_what_is_put_again_replaces() -> None:
    cache = OutputCache(100)
    cache.put(key_of(0), output_of(0))
    with cache.hold([key_of(0)]):
        assert cache.put(key_of(0), output_of(1, 96))
        assert not cache.put(key_of(0), output_of(2, 104))
    assert same_bits(cache.get(key_of(0)), output_of(1, 96))
    assert (cache.counters.num_bytes, cache.counters.num_entries, cache.counters.evictions) == (96, 1, 0)


def test_an_output_without_bytes_is_not_stored() -> None:
    cache = OutputCache(40)
    assert not cache.put(key_of(0), torch.zeros(4, 0))
    assert (cache.counters.rejected, cache.counters.num_entries) == (1, 0)


def test_no_bytes_turn_the_cache_off() -> None:
    cache = OutputCache(0)
    assert not cache.put(key_of(0), output_of(0))
    assert not cache.put(key_of(0), torch.zeros(4, 0))
    assert cache.get(key_of(0)) is None
    with cache.hold([key_of(0)]):
        pass
    assert cache.counters == cache_module.CacheCounters()


@pytest.mark.parametrize("max_bytes", [-1, 1.5, True, None, "1"])
def test_the_bound_is_a_whole_number(max_bytes: Any) -> None:
    with pytest.raises(ConfigError, match="must be a whole number of bytes; use 0 for no cache"):
        OutputCache(max_bytes)


def test_an_output_that_can_not_be_copied_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    cache = OutputCache(40)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "own_copy", no_memory)
        assert not cache.put(key_of(0), output_of(0))
    assert cache.counters == cache_module.CacheCounters(rejected=1)
    assert cache.get(key_of(0)) is None
    assert cache.put(key_of(0), output_of(0))


KEYS = [key_of(number) for number in range(6)]
operations = st.lists(
    st.tuples(st.sampled_from(["put", "put", "get", "acquire", "release"]), st.integers(0, 5), st.integers(0, 9)),
    max_size=60,
)


@unhurried
@given(max_bytes=st.integers(1, 200), steps=operations)
def test_bytes_stay_within_the_bound_and_held_entries_stay(max_bytes: int, steps: list[tuple[str, int, int]]) -> None:
    cache, held = OutputCache(max_bytes), Counter[int]()
    backing = torch.arange(1000.0)
    for what, number, size in steps:
        before = set(cache._entries)
        if what == "put":
            cache.put(KEYS[number], backing[number : number + 3 * size].view(size, 3))
        elif what == "get":
            got = cache.get(KEYS[number])
            assert (got is not None) == (KEYS[number] in before)
            assert got is None or same_bits(got, backing[number : number + got.numel()].view(-1, 3))
        elif what == "acquire":
            cache.acquire([KEYS[number]])
            held[number] += 1
        elif held[number]:
            cache.release([KEYS[number]])
            held[number] -= 1
        assert stored_bytes(cache) == cache.counters.num_bytes <= max_bytes
        lost = before - set(cache._entries)
        assert not [each for each in lost if held[KEYS.index(each)] and each != KEYS[number]]


def test_threads_get_what_belongs_to_their_keys() -> None:
    cache = OutputCache(200)
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(thread: int) -> None:
        start.wait()
        for step in range(200):
            number = (thread * 7 + step * 5) % 6
            with cache.hold([KEYS[number]]):
                if (got := cache.get(KEYS[number])) is None:
                    cache.put(KEYS[number], output_of(number, 80))
                elif not same_bits(got, output_of(number, 80)):
                    failures.append(f"{number}: {got}")
                else:
                    got.fill_(-1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counters = cache.counters
    assert not failures
    assert counters.hits + counters.misses == 8 * 200
    assert (counters.corrupted, counters.num_held, cache._holds) == (0, 0, Counter())
    assert stored_bytes(cache) == counters.num_bytes <= 200
