"""VisionParallelConfig: sizes, buckets, blocks; numbers and remedy in every refusal."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enfold.errors import ConfigError, LayoutError
from enfold.layout import Layout, divisors
from enfold.vision.config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_SEQ_LEN,
    VisionParallelConfig,
    bucket_blocks,
    round_up,
    select_vision_bucket,
)

# resolve_tp_dp.


@pytest.mark.parametrize(
    ("given_sizes", "world", "resolved"),
    [
        ((None, None), 16, (1, 16)),
        ((1, 1), 16, (1, 16)),
        ((4, None), 16, (4, 4)),
        ((16, None), 16, (16, 1)),
        ((1, None), 16, (1, 16)),
        ((None, 4), 16, (4, 4)),
        ((None, 16), 16, (1, 16)),
        ((None, 1), 16, (16, 1)),
        ((4, 4), 16, (4, 4)),
        ((1, 16), 16, (1, 16)),
        ((16, 1), 16, (16, 1)),
        ((2, 3), 6, (2, 3)),
        ((None, None), 1, (1, 1)),
        ((1, 1), 1, (1, 1)),
        ((1, None), 1, (1, 1)),
    ],
)
def test_sizes_resolve(given_sizes: tuple[int | None, int | None], world: int, resolved: tuple[int, int]) -> None:
    config = VisionParallelConfig(*given_sizes)
    assert (config.tp_size, config.dp_size) == given_sizes
    assert config.resolve_tp_dp(world) == resolved
    assert (config.tp_size, config.dp_size) == resolved, "the result is written back"


def test_the_layout_has_no_repeated_work() -> None:
    assert VisionParallelConfig().layout(4) == Layout(1, 4, 1)
    assert VisionParallelConfig(tp_size=2).layout(4) == Layout(1, 2, 2)


@pytest.mark.parametrize(
    ("given_sizes", "world", "words"),
    [
        ((1, 4), 8, "vision tp_size=1 x dp_size=4 = 4 must be the 8 ranks; with tp_size=1 use dp_size=8, or leave one"),
        ((2, 2), 8, "vision tp_size=2 x dp_size=2 = 4 must be the 8 ranks; with tp_size=2 use dp_size=4"),
        ((4, 4), 8, "vision tp_size=4 x dp_size=4 = 16 must be the 8 ranks; with tp_size=4 use dp_size=2"),
        ((2, 1), 8, "vision tp_size=2 x dp_size=1 = 2 must be the 8 ranks"),
        ((1, 2), 1, "vision dp_size=2 does not divide the 1 ranks; use one of 1"),
        ((3, None), 8, "vision tp_size=3 does not divide the 8 ranks; use one of 1, 2, 4, 8"),
        ((None, 3), 8, "vision dp_size=3 does not divide the 8 ranks; use one of 1, 2, 4, 8"),
        ((16, None), 8, "vision tp_size=16 does not divide the 8 ranks"),
        ((None, 16), 8, "vision dp_size=16 does not divide the 8 ranks"),
        ((2, 3), 8, "vision dp_size=3 does not divide the 8 ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_and_left_alone(
    given_sizes: tuple[int | None, int | None], world: int, words: str
) -> None:
    config = VisionParallelConfig(*given_sizes)
    with pytest.raises(LayoutError, match=re.escape(words)):
        config.resolve_tp_dp(world)
    assert (config.tp_size, config.dp_size) == given_sizes
    assert VisionParallelConfig().resolve_tp_dp(world) == (1, world), "a refusal has no effect on others"


@pytest.mark.parametrize("given_sizes", [(None, None), (1, 1), (2, None), (None, 2), (2, 4)])
def test_resolving_again_is_idempotent_for_the_same_world_only(given_sizes: tuple[int | None, int | None]) -> None:
    config = VisionParallelConfig(*given_sizes)
    first = config.resolve_tp_dp(8)
    assert config.resolve_tp_dp(8) == config.resolve_tp_dp(8) == first
    words = f"is resolved for 8 ranks (tp {first[0]} x dp {first[1]}), not for 16; make a new one"
    with pytest.raises(LayoutError, match=re.escape(words)):
        config.resolve_tp_dp(16)
    assert config.resolve_tp_dp(8) == first, "and is still good after the refusal"


def test_a_world_of_one_is_resolved_too() -> None:
    config = VisionParallelConfig()
    assert config.resolve_tp_dp(1) == (1, 1)
    with pytest.raises(LayoutError, match="resolved for 1 ranks"):
        config.resolve_tp_dp(4)


def test_a_refused_world_may_be_followed_by_one_that_fits() -> None:
    config = VisionParallelConfig(tp_size=3)
    with pytest.raises(LayoutError):
        config.resolve_tp_dp(8)
    assert config.resolve_tp_dp(6) == (3, 2)


def test_a_size_that_was_changed_later_is_checked_again() -> None:
    config = VisionParallelConfig()
    config.resolve_tp_dp(4)
    config.tp_size = 2
    with pytest.raises(LayoutError, match="tp_size=2 x dp_size=4 = 8 must be the 4 ranks"):
        config.resolve_tp_dp(4)
    for value in (0, True):
        config.tp_size = value
        with pytest.raises(LayoutError, match=f"vision tp_size={value}"):
            config.resolve_tp_dp(4)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_copies_remember_their_world(copied: Any) -> None:
    config = VisionParallelConfig(tp_size=2)
    config.resolve_tp_dp(4)
    other = copied(config)
    assert other == config
    assert other.resolve_tp_dp(4) == (2, 2)
    with pytest.raises(LayoutError, match="resolved for 4 ranks"):
        other.resolve_tp_dp(8)


def test_replace_makes_a_config_that_is_not_resolved() -> None:
    config = VisionParallelConfig(tp_size=2)
    config.resolve_tp_dp(4)
    assert replace(config, dp_size=None).resolve_tp_dp(8) == (2, 4)


@settings(deadline=None)
@given(world=st.integers(1, 64), data=st.data())
def test_every_pair_of_sizes_resolves_to_the_world_or_is_refused(world: int, data: st.DataObject) -> None:
    sizes = st.none() | st.sampled_from(divisors(world)) | st.integers(1, 70)
    tp, dp = data.draw(sizes), data.draw(sizes)
    config = VisionParallelConfig(tp, dp)
    default = (tp, dp) in ((None, None), (1, 1))
    fits = all(size is None or world % size == 0 for size in (tp, dp)) and (None in (tp, dp) or tp * dp == world)
    if not default and not fits:
        with pytest.raises(LayoutError, match=str(world)):
            config.resolve_tp_dp(world)
        return
    got = config.resolve_tp_dp(world)
    assert got[0] * got[1] == world
    assert config.layout(world) == Layout(1, got[1], got[0])
    assert got == config.resolve_tp_dp(world)
    assert default or all(size in (None, found) for size, found in zip((tp, dp), got, strict=True)), "as asked"


# Values that can't be used.

WRONG_SIZES = [
    (True, "True is a bool; use a whole number such as 1, 2 or 4"),
    (False, "False is a bool"),
    (2.0, "2.0 is a float; use a whole number"),
    (float("nan"), "nan is a float"),
    ("2", "'2' is a str"),
    (0, "0 is smaller than 1; use 1, 2, 4"),
    (-4, "-4 is smaller than 1"),
]


@pytest.mark.parametrize(("value", "words"), WRONG_SIZES, ids=repr)
@pytest.mark.parametrize("name", ["tp_size", "dp_size", "vision_attention_block_size", "max_vision_seq_len"])
def test_a_size_that_is_no_whole_number_is_named(name: str, value: Any, words: str) -> None:
    prefix = "vision " if name in ("tp_size", "dp_size") else ""
    with pytest.raises(LayoutError, match=f"^{re.escape(f'{prefix}{name}={words}')}"):
        VisionParallelConfig(**{name: value})


@pytest.mark.parametrize(("value", "words"), [*WRONG_SIZES, (None, "None is a NoneType")], ids=repr)
def test_a_world_that_is_no_whole_number_is_named(value: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(f"world_size={words}")):
        VisionParallelConfig().resolve_tp_dp(value)


@pytest.mark.parametrize("name", ["vision_attention_block_size", "max_vision_seq_len"])
def test_sizes_with_a_default_may_not_be_none(name: str) -> None:
    with pytest.raises(LayoutError, match=f"{name}=None is a NoneType"):
        VisionParallelConfig(**{name: None})


@pytest.mark.parametrize("name", ["pad_blocks", "compile", "gather_hidden_states"])
@pytest.mark.parametrize("value", [1, 0, "yes", None])
def test_flags_are_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r} can't be used; it must be True or False")):
        VisionParallelConfig(**{name: value})


@pytest.mark.parametrize(
    ("size", "remedy"), [(1, 16), (15, 16), (17, 16), (100, 96), (2040, 2048), (2049, 2048), (2050, 2048), (5000, 4992)]
)
def test_a_block_holds_whole_merge_groups(size: int, remedy: int) -> None:
    words = f"vision_attention_block_size={size} is no multiple of 16; use {remedy}"
    with pytest.raises(ConfigError, match=f"^{words}$"):
        VisionParallelConfig(vision_attention_block_size=size)
    VisionParallelConfig(vision_attention_block_size=remedy)


@pytest.mark.parametrize("merge", [1, 2, 4])
def test_the_default_block_fits_the_merge_groups_of_known_towers(merge: int) -> None:
    VisionParallelConfig().check_merge_size(merge)


@settings(deadline=None)
@given(merge=st.integers(1, 12), blocks=st.integers(1, 300))
def test_a_block_that_would_cut_a_merge_group_says_which_size_would_not(merge: int, blocks: int) -> None:
    config = VisionParallelConfig(vision_attention_block_size=16 * blocks)
    if 16 * blocks % merge**2 == 0:
        config.check_merge_size(merge)
        return
    words = rf"={16 * blocks} is no multiple of {merge} x {merge} = {merge**2}.*; use (\d+)$"
    with pytest.raises(ConfigError, match=words) as caught:
        config.check_merge_size(merge)
    found = re.search(words, str(caught.value))
    assert found is not None
    VisionParallelConfig(vision_attention_block_size=int(found[1])).check_merge_size(merge)


# Buckets.


def test_defaults() -> None:
    config = VisionParallelConfig()
    assert (config.tp_size, config.dp_size, config.num_vision_tokens_buckets) == (None, None, None)
    assert config.vision_attention_block_size == DEFAULT_BLOCK_SIZE == 2048
    assert config.max_vision_seq_len == DEFAULT_MAX_SEQ_LEN == 4096 * 4096 // 16**2
    assert config.num_total_vision_attention_blocks is None
    assert not config.has_fixed_shapes
    assert VisionParallelConfig(pad_blocks=True).has_fixed_shapes
    assert VisionParallelConfig(compile=True).has_fixed_shapes, "compiling needs shapes that do not change"


@pytest.mark.parametrize("buckets", [[8192, 2048, 4096, 2048], (2048, 4096, 8192), range(2048, 8193, 2048)])
def test_buckets_are_sorted_and_counted_once(buckets: Any) -> None:
    found = VisionParallelConfig(num_vision_tokens_buckets=buckets).num_vision_tokens_buckets
    assert found == tuple(sorted(set(buckets)))


@pytest.mark.parametrize(
    ("buckets", "error", "words"),
    [
        (2048, ConfigError, "num_vision_tokens_buckets=2048 is no list; use one such as [2048, 8192]"),
        ("2048", ConfigError, "num_vision_tokens_buckets='2048' is no list"),
        (b"ab", ConfigError, "num_vision_tokens_buckets=b'ab' is no list"),
        ({2048}, ConfigError, "num_vision_tokens_buckets={2048} is no list"),
        ([], ConfigError, "num_vision_tokens_buckets is empty; leave it out (None)"),
        ([2048, 0], LayoutError, "num_vision_tokens_buckets=0 is smaller than 1"),
        ([-2048], LayoutError, "num_vision_tokens_buckets=-2048 is smaller than 1"),
        ([2048.0], LayoutError, "num_vision_tokens_buckets=2048.0 is a float"),
        ([True], LayoutError, "num_vision_tokens_buckets=True is a bool"),
        ([None], LayoutError, "num_vision_tokens_buckets=None is a NoneType"),
    ],
)
def test_buckets_that_can_not_be_used_are_named(buckets: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        VisionParallelConfig(num_vision_tokens_buckets=buckets)


def test_blocks_of_a_bucket_are_a_multiple_of_dp_once_it_is_resolved() -> None:
    config = VisionParallelConfig(num_vision_tokens_buckets=[1000, 2049, 20000], vision_attention_block_size=1024)
    assert config.num_total_vision_attention_blocks == [1, 3, 20]
    config.resolve_tp_dp(8)
    assert config.num_total_vision_attention_blocks == [8, 8, 24]
    given_dp = VisionParallelConfig(dp_size=3, num_vision_tokens_buckets=[1000], vision_attention_block_size=1024)
    assert given_dp.num_total_vision_attention_blocks == [3]


@pytest.mark.parametrize(
    ("bucket", "block", "dp", "blocks"),
    [
        (1, 2048, 1, 1),
        (2048, 2048, 1, 1),
        (2049, 2048, 1, 2),
        (2049, 2048, 4, 4),
        (8192, 2048, 4, 4),
        (8193, 2048, 4, 8),
    ],
)
def test_bucket_blocks(bucket: int, block: int, dp: int, blocks: int) -> None:
    assert bucket_blocks(bucket, block, dp) == blocks


def test_a_bucket_is_chosen_by_the_blocks_that_packing_needs() -> None:
    # 600, 600 and 600 patches need three blocks of 1024, although 1800 patches would fit into two.
    assert select_vision_bucket(3, [1024, 2048, 3072, 4096], 1024, 1) == (3072, 3)
    assert select_vision_bucket(2, [1024, 2048, 3072, 4096], 1024, 1) == (2048, 2)
    assert select_vision_bucket(3, [4096, 1024], 1024, 2) == (4096, 4), "buckets in any order"
    assert select_vision_bucket(2, [1024, 2048], 1024, 4) == (1024, 4), "rounding up to dp makes room"
    assert select_vision_bucket(0, [2048, 1024], 1024, 2) == (1024, 2)


def test_images_that_no_bucket_holds_are_refused_with_the_limit() -> None:
    words = (
        "need 5 blocks of 1024 patches, and the largest of num_vision_tokens_buckets=[1024, 3072] holds 4; "
        "add a bucket of 5120, or send fewer images per call"
    )
    with pytest.raises(ConfigError, match=re.escape(words)):
        select_vision_bucket(5, [1024, 3072], 1024, 2)


@settings(deadline=None)
@given(
    num_blocks=st.integers(0, 100),
    buckets=st.lists(st.integers(1, 200_000), min_size=1, max_size=6),
    block=st.sampled_from([16, 1024, 2048]),
    dp=st.integers(1, 9),
)
def test_the_smallest_bucket_that_fits_is_chosen(num_blocks: int, buckets: list[int], block: int, dp: int) -> None:
    fitting = [bucket for bucket in buckets if bucket_blocks(bucket, block, dp) >= num_blocks]
    if not fitting:
        with pytest.raises(ConfigError, match=f"add a bucket of {num_blocks * block}"):
            select_vision_bucket(num_blocks, buckets, block, dp)
        assert bucket_blocks(num_blocks * block, block, dp) >= num_blocks, "the remedy helps"
        return
    bucket, size = select_vision_bucket(num_blocks, buckets, block, dp)
    assert bucket == min(fitting)
    assert size == bucket_blocks(bucket, block, dp)
    assert size >= num_blocks
    assert size % dp == 0
    assert size * block >= bucket


@settings(deadline=None)
@given(number=st.integers(0, 10_000), unit=st.integers(1, 300))
def test_round_up(number: int, unit: int) -> None:
    assert round_up(number, unit) % unit == 0
    assert number <= round_up(number, unit) < number + unit


def test_it_imports_no_torch() -> None:
    code = "import sys; from enfold.vision.config import VisionParallelConfig; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
