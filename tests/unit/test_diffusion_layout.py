from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enfold.diffusion.layout import PipelineLayout, check_lengths, resolve_pipeline_layout
from enfold.errors import InputError, LayoutError

SIZES = ("ulysses", "ring", "tp", "dp")

sizes = st.one_of(st.none(), st.integers(1, 6))
asked = st.fixed_dictionaries(dict.fromkeys(SIZES, sizes))


def refused(num_ranks: int, **options: Any) -> str:
    with pytest.raises(LayoutError) as caught:
        resolve_pipeline_layout(num_ranks, **options)
    return str(caught.value)


@given(
    num_ranks=st.integers(1, 24),
    options=asked,
    split_dit=st.booleans(),
    sequence=st.booleans(),
    weights=st.booleans(),
    num_heads=st.one_of(st.none(), st.integers(1, 24)),
)
def test_the_ranks_are_all_used_or_an_error_names_them(
    num_ranks: int,
    options: dict[str, int | None],
    split_dit: bool,
    sequence: bool,
    weights: bool,
    num_heads: int | None,
) -> None:
    facts = {"can_split_sequence": sequence, "can_split_weights": weights, "num_heads": num_heads}
    try:
        layout = resolve_pipeline_layout(num_ranks, split_dit=split_dit, **options, **facts)  # type: ignore[arg-type]
    except LayoutError as error:
        numbers = [str(size) for size in options.values() if size is not None and size > 1]
        assert "use" in str(error) or "drop" in str(error), "no remedy"
        assert str(num_ranks) in str(error) or any(number in str(error) for number in numbers)
        return
    assert layout.num_ranks == num_ranks
    for name in SIZES:
        assert options[name] in (None, getattr(layout, name))
    assert options["dp"] is not None or layout.dp == 1
    assert split_dit or not layout.is_split
    assert layout.copies == 1 or not split_dit
    assert sequence or layout.ring * layout.ulysses == 1
    assert weights or layout.tp == 1
    assert layout.tp == 1 or layout.ring * layout.ulysses == 1
    assert num_heads is None or num_heads % layout.ulysses == num_heads % layout.tp == 0


@given(num_ranks=st.integers(1, 24), options=st.fixed_dictionaries({name: st.integers(1, 6) for name in SIZES}))
def test_a_wrong_product_prints_all_numbers(num_ranks: int, options: dict[str, int]) -> None:
    product = options["ulysses"] * options["ring"] * options["tp"] * options["dp"]
    if product == num_ranks or (options["tp"] > 1 and options["ulysses"] * options["ring"] > 1):
        return
    text = refused(num_ranks, **options)
    assert f"= {product} ranks, --num-gpus is {num_ranks}; use " in text
    for flag, name in (("--ulysses-degree", "ulysses"), ("--ring-degree", "ring"), ("--dp-size", "dp")):
        assert f"{flag} {options[name]}" in text


@given(dp=st.integers(1, 5), ring=st.integers(1, 4), ulysses=st.integers(1, 4))
def test_replicas_cut_the_ranks_into_neighbours(dp: int, ring: int, ulysses: int) -> None:
    layout = PipelineLayout(dp=dp, ring=ring, ulysses=ulysses)
    ranks = [list(layout.ranks_of(replica)) for replica in range(dp)]
    assert [rank for replica in ranks for rank in replica] == list(range(layout.num_ranks))
    assert {len(replica) for replica in ranks} == {ring * ulysses}
    for replica in (-1, dp):
        with pytest.raises(LayoutError, match=rf"replica {replica} of {dp}; use 0 to {dp - 1}"):
            layout.ranks_of(replica)


@pytest.mark.parametrize(
    "num_ranks,options,layout",
    [
        (1, {}, PipelineLayout()),
        (4, {}, PipelineLayout(ulysses=4)),
        (4, {"dp": 2}, PipelineLayout(dp=2, ulysses=2)),
        (8, {"dp": 2, "ring": 2}, PipelineLayout(dp=2, ring=2, ulysses=2)),
        (4, {"tp": 4}, PipelineLayout(tp=4)),
        (4, {"tp": 2, "dp": 2}, PipelineLayout(tp=2, dp=2)),
        (4, {"dp": 4, "can_split_sequence": False, "can_split_weights": False}, PipelineLayout(dp=4)),
        (4, {"split_dit": False}, PipelineLayout(copies=4)),
        (4, {"split_dit": False, "dp": 2}, PipelineLayout(dp=2, copies=2)),
        (2, {"split_dit": False, "ulysses": 1, "can_split_sequence": False}, PipelineLayout(copies=2)),
        (1, {"can_split_sequence": False, "can_split_weights": False}, PipelineLayout()),
        (6, {"num_heads": 24}, PipelineLayout(ulysses=6)),
    ],
)
def test_what_is_left_out_is_filled_in(num_ranks: int, options: dict[str, Any], layout: PipelineLayout) -> None:
    assert resolve_pipeline_layout(num_ranks, **options) == layout


@pytest.mark.parametrize(
    "num_ranks,options,text",
    [
        (
            4,
            {"transformer": "SD3Transformer2DModel", "can_split_sequence": False, "can_split_weights": False},
            "--num-gpus 4: SD3Transformer2DModel can't be split over ranks (no _cp_plan in Diffusers); use --dp-size 4 "
            "for 4 replicas, or --whole-dit to run it whole on every rank",
        ),
        (4, {"can_split_sequence": False, "dp": 2}, "use --dp-size 4 for 4 replicas"),
        (4, {"can_split_sequence": False, "dp": 2}, "or --tp-size 2 to split its weights"),
        (2, {"tp": 2, "can_split_weights": False}, "(no _tp_plan in Diffusers); use --dp-size 2 for 2 replicas"),
        (2, {"tp": 2, "can_split_weights": False}, "or --ulysses-degree 2 to split its tokens"),
        (4, {"tp": 2}, "not by both: --tp-size 2, and ring 1 x ulysses 2; use --tp-size 1, or"),
        (4, {"ulysses": 2}, "= 2 ranks, --num-gpus is 4; use --dp-size 2 for as many replicas, or --num-gpus 2"),
        (3, {"ulysses": 2}, "= 2 ranks, --num-gpus is 3; use --num-gpus 2, or sizes whose product is 3"),
        (4, {"dp": 3}, "= 3 does not divide --num-gpus 4; use sizes whose product is one of 1, 2, 4"),
        (6, {"num_heads": 4}, "--ulysses-degree 6 does not divide the 4 attention heads of FluxTransformer2DModel"),
        (6, {"num_heads": 4}, "use one of 1, 2 and give the other ranks to --dp-size or --ring-degree"),
        (8, {"tp": 8, "num_heads": 12}, "--tp-size 8 does not divide the 12 attention heads"),
        (4, {"split_dit": False, "ring": 2}, "--ring-degree 2 splits the DiT, --whole-dit keeps it whole"),
        (4, {"split_dit": False, "dp": 3}, "--dp-size 3 does not divide --num-gpus 4; use one of 1, 2, 4"),
        (0, {}, "--num-gpus=0 is smaller than 1"),
        (2, {"ulysses": -2}, "--ulysses-degree=-2 is smaller than 1"),
        (2, {"dp": True}, "--dp-size=True is a bool; use a whole number"),
    ],
)
def test_errors_name_the_numbers_and_the_remedy(num_ranks: int, options: dict[str, Any], text: str) -> None:
    assert text in refused(num_ranks, **options)


def test_copies_are_not_split() -> None:
    with pytest.raises(LayoutError, match=r"tp 1 x ring 1 x ulysses 2 split the DiT, copies=2 run it whole; use dp=2"):
        PipelineLayout(ulysses=2, copies=2)
    with pytest.raises(LayoutError, match=r"ring=0 is smaller than 1"):
        PipelineLayout(ring=0)


def test_words() -> None:
    assert str(PipelineLayout(ulysses=2)) == "dp 1 x tp 1 x ring 1 x ulysses 2"
    assert str(PipelineLayout(dp=2, copies=2)) == "dp 2 x copies 2"


@given(length=st.integers(0, 5000), ring=st.integers(1, 4), ulysses=st.integers(1, 4))
def test_lengths_are_multiples_of_the_ranks(length: int, ring: int, ulysses: int) -> None:
    layout, num_parts = PipelineLayout(ring=ring, ulysses=ulysses), ring * ulysses
    if length % num_parts == 0:
        check_lengths(layout, {"picture tokens": length})
        return
    with pytest.raises(InputError) as caught:
        check_lengths(layout, {"prompt tokens": 0, "picture tokens": length})
    text = str(caught.value)
    assert (
        f"{length} picture tokens can't be cut into {num_parts} equal shares (ring {ring} x ulysses {ulysses})" in text
    )
    example = int(text.split("such as ")[1].split(",", maxsplit=1)[0])
    assert example % num_parts == 0 and example > 0


def test_weights_and_copies_take_any_length() -> None:
    for layout in (PipelineLayout(tp=2), PipelineLayout(copies=2), PipelineLayout(dp=2)):
        check_lengths(layout, {"picture tokens": 7})


def test_it_needs_no_torch() -> None:
    code = "import sys, enfold.diffusion.layout; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
