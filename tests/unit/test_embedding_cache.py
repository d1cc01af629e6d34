"""Conditioning kept by text: a hit has the bits of what was stored, and nobody can write into it."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from enfold.diffusion.embedding_cache import EmbeddingCache
from enfold.errors import ConfigError

SALT = "model, float32"


def row(seed: int = 0, tokens: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "prompt_embeds": torch.randn(1, tokens, 16, generator=generator).to(torch.bfloat16),
        "pooled_prompt_embeds": torch.randn(1, 16, generator=generator),
        "prompt_attention_mask": torch.arange(tokens).unsqueeze(0) < 5,
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8))
        for name in a
    )


def test_a_hit_has_the_bits_that_were_stored() -> None:
    cache = EmbeddingCache(2**20, SALT)
    stored = row()
    stored["pooled_prompt_embeds"][0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    assert cache.get("a fox", "") is None
    assert cache.put("a fox", "", stored)
    found = cache.get("a fox", "")
    assert found is not None and same(found, stored)
    assert (cache.counters.hits, cache.counters.misses) == (1, 1)


@pytest.mark.parametrize("which", ["given", "got"])
def test_writing_into_a_row_does_not_spoil_it(which: str) -> None:
    cache = EmbeddingCache(2**20, SALT)
    mine = row()
    cache.put("a fox", "", mine)
    spoiled = mine if which == "given" else cache.get("a fox", "")
    assert spoiled is not None
    for value in spoiled.values():
        value.zero_()
    found = cache.get("a fox", "")
    assert found is not None and same(found, row())


def test_a_slice_of_a_batch_is_stored_alone() -> None:
    cache = EmbeddingCache(4096, SALT)
    batch = torch.randn(1000, 16)
    assert cache.put("a", "", {"pooled": batch[3:4]})
    found = cache.get("a", "")
    assert found is not None and torch.equal(found["pooled"], batch[3:4])


@pytest.mark.parametrize(("text", "options"), [("b", "1"), ("a", "2"), ("", "a1"), ("A", "1"), ("a ", "1")])
def test_other_text_and_other_options_miss(text: str, options: str) -> None:
    cache = EmbeddingCache(2**20, SALT)
    cache.put("a", "1", row())
    assert cache.get(text, options) is None
    assert cache.get("a", "1") is not None


def test_an_empty_text_is_a_text() -> None:
    cache = EmbeddingCache(2**20, SALT)
    cache.put("", "", row(1))
    found = cache.get("", "")
    assert found is not None and same(found, row(1))


def test_the_least_recently_used_goes_and_the_bound_holds() -> None:
    one = EmbeddingCache(2**20, SALT)
    one.put("x", "", row())
    size = one.counters.num_bytes
    cache = EmbeddingCache(2 * size, SALT)
    for text in ("a", "b"):
        cache.put(text, "", row())
    assert cache.get("a", "") is not None
    cache.put("c", "", row())
    assert cache.get("b", "") is None
    assert cache.get("a", "") is not None and cache.get("c", "") is not None
    assert cache.counters.num_bytes <= 2 * size
    assert not cache.put("long", "", row(tokens=2000))
    assert cache.counters.rejected == 1 and cache.counters.num_entries == 2


def test_zero_bytes_turn_it_off() -> None:
    cache = EmbeddingCache(0, SALT)
    assert not cache.put("a", "", row())
    assert cache.get("a", "") is None
    assert vars(cache.counters) == dict.fromkeys(vars(cache.counters), 0)
    with pytest.raises(ConfigError, match="max_bytes=-1"):
        EmbeddingCache(-1, SALT)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=40), st.integers(1, 4))
def test_it_never_gives_what_was_not_stored(steps: list[tuple[str, bool]], room: int) -> None:
    one = EmbeddingCache(2**20, SALT)
    one.put("a", "", row())
    cache = EmbeddingCache(room * one.counters.num_bytes, SALT)
    put: set[str] = set()
    for text, is_put in steps:
        if is_put:
            put.add(text)
            assert cache.put(text, "", row(ord(text)))
        found = cache.get(text, "")
        assert found is None or (text in put and same(found, row(ord(text))))
        assert found is not None or not is_put
        assert cache.counters.num_bytes <= cache._outputs.max_bytes and cache.counters.num_entries <= room


def test_threads_share_it() -> None:
    cache = EmbeddingCache(2**15, SALT)
    broken: list[str] = []

    def work(number: int) -> None:
        for step in range(60):
            text = str((number + step) % 7)
            cache.put(text, "", row(int(text)))
            found = cache.get(text, "")
            if found is not None and not same(found, row(int(text))):
                broken.append(text)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not broken
    assert cache.counters.num_bytes <= 2**15
