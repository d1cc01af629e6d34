from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enfold.errors import LayoutError
from enfold.layout import (
    FEATURE_UNIT,
    Layout,
    cut_evenly,
    cut_features,
    cut_heads,
    divisors,
    dp_groups,
    resolve_layout,
    tp_groups,
)

small = st.integers(1, 6)


def test_groups_of_16_ranks_with_tp_4_and_dp_4() -> None:
    assert tp_groups(16, 4, 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert dp_groups(16, 4, 4) == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_groups_of_8_ranks_with_dp_4_only() -> None:
    assert tp_groups(8, 1, 4) == [[rank] for rank in range(8)]
    assert dp_groups(8, 1, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_groups_of_16_ranks_with_tp_4_and_dp_2() -> None:
    expected = [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert dp_groups(16, 4, 2) == expected


def test_groups_of_8_ranks_with_tp_2_and_dp_4() -> None:
    assert dp_groups(8, 2, 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]


@given(supers=small, tp=small, dp=small)
def test_groups_partition_the_world(supers: int, tp: int, dp: int) -> None:
    world = supers * tp * dp
    for groups, size in ((tp_groups(world, tp, dp), tp), (dp_groups(world, tp, dp), dp)):
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {size}


@given(supers=small, tp=small, dp=small)
def test_a_tp_group_and_a_dp_group_share_one_rank_at_most(supers: int, tp: int, dp: int) -> None:
    world = supers * tp * dp
    for dp_group in dp_groups(world, tp, dp):
        assert len({rank // (tp * dp) for rank in dp_group}) == 1, "a dp group crosses a super-group"
        assert len({rank % tp for rank in dp_group}) == 1, "a dp group mixes tp coordinates"
        for tp_group in tp_groups(world, tp, dp):
            assert len(set(tp_group) & set(dp_group)) <= 1
            assert tp_group == list(range(tp_group[0], tp_group[0] + tp))


@pytest.mark.parametrize(("world", "tp", "dp"), [(8, 3, 1), (8, 2, 3), (6, 4, 1)])
def test_groups_that_do_not_fit_the_world_name_the_sizes(world: int, tp: int, dp: int) -> None:
    with pytest.raises(LayoutError, match=rf"tp={tp} x dp={dp} = {tp * dp} does not divide world_size={world}"):
        tp_groups(world, tp, dp)


def test_layout_is_replicate_dp_tp() -> None:
    layout = Layout(replicate=2, dp=3, tp=4)
    assert (layout.size, str(layout)) == (24, "2x3x4")
    layout.check_fits(24)
    with pytest.raises(LayoutError, match="needs 24 ranks, the replica has 8"):
        layout.check_fits(8)


@pytest.mark.parametrize("size", [0, -1, 1.0, True, "2", None])
def test_layout_sizes_are_whole_numbers(size: object) -> None:
    with pytest.raises(LayoutError, match="tp="):
        Layout(tp=size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "tp", "dp", "expected"),
    [
        (8, 2, None, Layout(1, 4, 2)),
        (8, None, 2, Layout(1, 2, 4)),
        (8, 2, 2, Layout(2, 2, 2)),
        (8, 8, None, Layout(1, 1, 8)),
        (8, None, 1, Layout(1, 1, 8)),
        (8, 1, 1, Layout(8, 1, 1)),
        (1, 1, 1, Layout()),
    ],
)
def test_resolve_layout(ranks: int, tp: int | None, dp: int | None, expected: Layout) -> None:
    assert resolve_layout(ranks, tp, dp) == expected


@pytest.mark.parametrize(
    ("ranks", "tp", "dp", "words"),
    [
        (4, 3, None, r"tp_size=3 does not divide the 4 ranks; use one of 1, 2, 4"),
        (6, None, 4, r"dp_size=4 does not divide the 6 ranks; use one of 1, 2, 3, 6"),
        (8, 4, 4, r"tp_size=4 x dp_size=4 = 16 does not divide the 8 ranks; with tp_size=4 use a dp_size of 1, 2"),
        (8, 0, None, r"tp_size=0 is smaller than 1"),
        (8, None, None, r"neither tp_size nor dp_size"),
    ],
)
def test_resolve_layout_refuses_with_numbers_and_remedy(ranks: int, tp: int | None, dp: int | None, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        resolve_layout(ranks, tp, dp)


@given(ranks=st.integers(1, 64), data=st.data())
def test_a_resolved_layout_always_fits(ranks: int, data: st.DataObject) -> None:
    tp = data.draw(st.sampled_from(divisors(ranks)))
    dp = data.draw(st.none() | st.sampled_from(divisors(ranks // tp)))
    layout = resolve_layout(ranks, tp, dp)
    layout.check_fits(ranks)
    assert layout.tp == tp
    assert dp is None or layout.dp == dp


@given(units=st.integers(0, 500), parts=st.integers(1, 32))
def test_an_even_cut_is_a_partition_with_the_larger_shares_first(units: int, parts: int) -> None:
    cuts = cut_evenly(units, parts)
    sizes = [stop - start for start, stop in cuts]
    assert len(cuts) == parts
    assert [unit for start, stop in cuts for unit in range(start, stop)] == list(range(units))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_features_are_cut_at_multiples_of_64() -> None:
    assert cut_features(10250, 4) == [(0, 2560), (2560, 5120), (5120, 7680), (7680, 10250)]
    assert cut_features(256, 4) == [(0, 64), (64, 128), (128, 192), (192, 256)]
    assert cut_features(192, 4) is None
    assert cut_features(193, 4) is None, "one feature by itself has other bits than among 64"
    assert cut_features(193, 3) == [(0, 64), (64, 128), (128, 193)]


@given(features=st.integers(1, 40_000), parts=st.integers(1, 32))
def test_a_cut_of_features_is_a_partition_at_multiples_of_the_unit(features: int, parts: int) -> None:
    cuts = cut_features(features, parts)
    if cuts is None:
        assert features // FEATURE_UNIT < parts
        return
    assert (cuts[0][0], cuts[-1][1]) == (0, features)
    assert all(stop == start for (_, stop), (start, _) in pairwise(cuts))
    assert all(start % FEATURE_UNIT == 0 and stop - start >= FEATURE_UNIT for start, stop in cuts)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "parts", "shares"),
    [
        (12, 12, 8, [(2, 2)] * 4 + [(1, 1)] * 4),
        (28, 4, 8, [(4, 1), (3, 1)] * 4),
        (32, 8, 4, [(8, 2)] * 4),
        (8, 1, 4, [(2, 1)] * 4),
        (6, 3, 4, [(1, 1), (1, 1), (2, 1), (2, 1)]),
    ],
)
def test_heads_per_rank(heads: int, kv_heads: int, parts: int, shares: list[tuple[int, int]]) -> None:
    cuts = cut_heads(heads, kv_heads, parts)
    assert cuts is not None
    assert [(cut.num_query, cut.num_key_value) for cut in cuts] == shares


@given(group=st.integers(1, 16), kv_heads=st.integers(1, 16), parts=st.integers(1, 64))
def test_each_query_head_finds_its_key_value_head_on_its_rank(group: int, kv_heads: int, parts: int) -> None:
    heads = group * kv_heads
    cuts = cut_heads(heads, kv_heads, parts)
    if cuts is None:
        assert heads < parts
        return
    assert len(cuts) == parts
    assert [head for cut in cuts for head in range(*cut.query)] == list(range(heads))
    assert {head for cut in cuts for head in range(*cut.key_value)} == set(range(kv_heads))
    for cut in cuts:
        assert cut.num_query >= 1
        assert cut.num_query % cut.num_key_value == 0
        # The module repeats each local key-value head for its share of the local query heads, in order.
        local_group = cut.num_query // cut.num_key_value
        for index, head in enumerate(range(*cut.query)):
            assert cut.key_value[0] + index // local_group == head // group


def test_key_value_heads_must_divide_the_heads() -> None:
    with pytest.raises(LayoutError, match="num_kv_heads=5 does not divide num_heads=12"):
        cut_heads(12, 5, 2)
