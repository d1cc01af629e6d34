"""Calls of a spread vision tower between ranks: the groups it talks on, what it refuses, how it fails and goes on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import towers
from cells import groups_of
from ranks import Ranks
from torch import nn
from torch.distributed import distributed_c10d
from tower_cells import digest

import enfold
from enfold.comm import Groups
from enfold.errors import ConfigError, EncodeError, EnfoldError, InputError, MismatchError
from enfold.vision import flow
from enfold.vision.spread import prepare_tower, spread_tower

F32 = torch.float32
LAYOUTS = {"tp 1 x dp 4": (1, 4), "tp 2 x dp 2": (2, 2), "tp 4 x dp 1": (4, 1)}
SEVERAL = "5 mixed"

every_layout = pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)


NARROW = {"hidden_size": 288, "intermediate_size": 764, "num_heads": 8, "depth": 2, "out_hidden_size": 256}
"""Wrong bits at real widths are for the matrix to find."""

BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "Qwen3-VL": lambda: towers.qwen3_vl(**NARROW, deepstack_visual_indexes=[0]),
    "Qwen2.5-VL": lambda: towers.qwen2_5_vl(**NARROW),
    "SigLIP": towers.siglip,
}


@lru_cache
def plain(name: str) -> nn.Module:
    with towers.no_init_weights():
        module = BUILDERS[name]()
    return towers.randomize(module).eval()


def spread(group: dist.ProcessGroup | None, sizes: tuple[int, int], name: str = "Qwen3-VL", **options: Any) -> Any:
    """Return a small tower in a layout; without a group on one rank."""
    numerics, timeout = options.pop("numerics", "exact"), options.pop("timeout", 60.0)
    options = {"vision_attention_block_size": towers.BLOCK_SIZE, "gather_hidden_states": True, **options}
    config = enfold.VisionParallelConfig(*sizes, **options)
    groups = groups_of(group) if group is not None else Groups(None)
    return spread_tower(prepare_tower(copy.deepcopy(plain(name)), config, groups, numerics), groups, timeout)


def images(which: str = SEVERAL, name: str = "Qwen3-VL") -> dict[str, torch.Tensor]:
    return towers.images(name, which, F32)


def digests(output: Any) -> dict[str, str]:
    return {name: digest(value) for name, value in towers.outputs(output).items()}


def _cells(
    group: dist.ProcessGroup | None, sizes: tuple[int, int], name: str, sets: list[str], options: dict[str, Any]
) -> list[dict[str, str]]:
    module = spread(group, sizes, name, **options)
    return [digests(module(**images(which, name))) for which in sets]


@lru_cache
def alone(name: str = "Qwen3-VL", sets: tuple[str, ...] = (SEVERAL,), pad_blocks: bool = False) -> list[dict[str, str]]:
    """Return what one rank with one thread makes of sets of images."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return _cells(None, (1, 1), name, list(sets), {"pad_blocks": pad_blocks})
    finally:
        torch.set_num_threads(num_threads)


# Which groups a tower talks on.

COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv",
    "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list",
    "send", "new_group",
)  # fmt: skip


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, Any]]]:
    """Record every function of torch.distributed that talks: its name, and its group (for new_group: the ranks)."""
    seen: list[tuple[str, Any]] = []

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            about = tuple(args[0]) if name == "new_group" else kwargs.get("group") or dist.group.WORLD
            seen.append((name, about))
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner in (dist, distributed_c10d):
            for name in COLLECTIVES:
                if hasattr(owner, name):
                    patch.setattr(owner, name, wrap(name, getattr(owner, name)))
        yield seen


def traffic(group: Any) -> int:
    """Return how many collectives a gloo group has run, by its own count."""
    return int(group._get_sequence_number_for_group())


def _decoy(group: dist.ProcessGroup, sizes: tuple[int, int]) -> Any:
    """A tower on two ranks, beside a text model whose group has four."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    text = dist.new_group([0, 1, 2, 3])
    own = pairs[dist.get_rank() // 2]
    config = enfold.VisionParallelConfig(*sizes, vision_attention_block_size=towers.BLOCK_SIZE)
    module = enfold.parallelize(copy.deepcopy(plain("Qwen3-VL")), vision=config, group=own, text_group=text)
    before = {name: traffic(each) for name, each in (("text", text), ("world", dist.group.WORLD), ("own", own))}
    with recorded() as seen:
        got = module(**images())
        module.spread.warm_up()
    moved = {
        name: traffic(each) - before[name] for name, each in (("text", text), ("world", dist.group.WORLD), ("own", own))
    }
    return digests(got)["pooler_output"], moved, {name for name, _ in seen}, all(each is own for _, each in seen)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)], ids=["dp 2", "tp 2"])
def test_a_tower_talks_in_its_own_group_only(ranks: Ranks, sizes: tuple[int, int]) -> None:
    """By what torch.distributed was asked for, and by what each group has counted."""
    for bits, moved, names, only_own in ranks.run(_decoy, 4, sizes):
        assert bits == alone()[0]["pooler_output"]
        assert names <= {"all_gather_single", "all_gather_into_tensor"}
        assert only_own
        assert moved["text"] == moved["world"] == 0 and moved["own"] >= 6


def _groups_used(group: dist.ProcessGroup) -> Any:
    """A tower on four ranks as tp 2 x dp 2, beside a text model whose groups are the columns [0, 2] and [1, 3]."""
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    text = columns[dist.get_rank() % 2]
    config = enfold.VisionParallelConfig(2, 2, vision_attention_block_size=towers.BLOCK_SIZE)
    with recorded() as made:
        module: Any = enfold.parallelize(copy.deepcopy(plain("Qwen3-VL")), vision=config, group=group, text_group=text)
    mesh = module.spread.mesh
    with recorded() as seen:
        got = module(**images())
    data = [each for _, each in seen[1:-1]]  # between the two small ones of the watch
    found = [
        mesh.tp.ranks,
        mesh.dp.ranks,
        [about for name, about in made if name == "new_group"],
        all(each is mesh.tp.group or each is mesh.dp.group for each in data),
        sum(each is mesh.dp.group for each in data),
        seen[0][1] is seen[-1][1] is mesh.replica.group,
        traffic(text),
    ]
    return digests(got)["pooler_output"], found


def test_a_combined_layout_talks_along_its_rows_and_columns(ranks: Ranks) -> None:
    lines = [(0, 2), (1, 3), (0, 1), (2, 3)]
    for rank, (bits, found) in enumerate(ranks.run(_groups_used, 4)):
        assert bits == alone()[0]["pooler_output"]
        tp, dp, made, only_own, num_dp, watched, on_text = found
        assert tp == ((0, 1) if rank < 2 else (2, 3))
        assert dp == (rank % 2, rank % 2 + 2)
        assert sorted(made) == sorted(lines), "the text model's columns are no tp groups: not touched"
        assert only_own and watched and on_text == 0
        assert num_dp == 1, "one gather for main and deepstack together"


def _reused(group: dist.ProcessGroup, sizes: tuple[int, int]) -> Any:
    size = sizes[0]
    parts = [dist.new_group(list(range(start, start + size))) for start in range(0, 4, size)] if size > 1 else []
    text = parts[dist.get_rank() // size] if parts else None
    with recorded() as seen:
        config = enfold.VisionParallelConfig(*sizes, vision_attention_block_size=towers.BLOCK_SIZE)
        module: Any = enfold.parallelize(copy.deepcopy(plain("Qwen3-VL")), vision=config, group=group, text_group=text)
    mesh = module.spread.mesh
    made = [about for name, about in seen if name == "new_group"]
    counts = traffic(text) if text is not None else 0
    bits = digests(module(**images()))["pooler_output"]
    used = traffic(text) - counts if text is not None else 0
    return bits, made, mesh.tp.group is text, mesh.dp.group is None, used


@every_layout
def test_the_text_models_group_is_used_again(ranks: Ranks, sizes: tuple[int, int]) -> None:
    columns = [(0, 2), (1, 3)] if sizes == (2, 2) else []  # where dp is 4 its column is the parent itself
    for bits, made, same_tp, no_dp, used in ranks.run(_reused, 4, sizes):
        assert bits == alone()[0]["pooler_output"]
        assert sorted(made) == columns, "no tp group is made, a dp column only where dp > 1"
        assert same_tp, "the same object; none where tp is 1"
        assert no_dp == (sizes[1] == 1)
        assert (used > 0) == (sizes[0] > 1)


# Few images, none, one call after another.


@every_layout
@pytest.mark.parametrize("pad_blocks", [False, True])
def test_fewer_images_than_ranks(ranks: Ranks, sizes: tuple[int, int], pad_blocks: bool) -> None:
    """Ranks without rows work; calls of different sizes follow each other."""
    sets = ("1 image", "no image", "2 equal", "one huge, three small", "1 image")
    want = alone(sets=sets, pad_blocks=pad_blocks)
    assert ranks.run(_cells, 4, sizes, "Qwen3-VL", list(sets), {"pad_blocks": pad_blocks}) == [want] * 4


PADDED = ("3 mixed", SEVERAL, "two videos, one image")


@pytest.mark.parametrize("name", ["Qwen3-VL", "Qwen2.5-VL"])
@pytest.mark.parametrize(
    "sizes", [(1, 2), (2, 1), *LAYOUTS.values()], ids=lambda sizes: f"tp {sizes[0]} x dp {sizes[1]}"
)
def test_whole_blocks_have_the_bits_of_one_rank(ranks: Ranks, name: str, sizes: tuple[int, int]) -> None:
    want = alone(name, PADDED, pad_blocks=True)
    world = sizes[0] * sizes[1]
    assert ranks.run(_cells, world, sizes, name, list(PADDED), {"pad_blocks": True}) == [want] * world


def test_control_whole_blocks_have_other_bits_than_ragged_rows() -> None:
    """Attention over a whole block sums in another order: so a frame must have the same place in its block anywhere."""
    assert alone(sets=PADDED, pad_blocks=True) != alone(sets=PADDED)


def _counters(group: dist.ProcessGroup, sizes: tuple[int, int]) -> Any:
    module = spread(group, sizes)
    for which in ("no image", SEVERAL, "two videos, one image"):
        module(**images(which))
    counters = module.spread.counters
    return counters.calls, counters.images, counters.tokens, counters.padded_tokens, module.spread.last.num_tokens


@every_layout
def test_counters(ranks: Ranks, sizes: tuple[int, int]) -> None:
    tokens = {which: sum(t * h * w for t, h, w in towers.IMAGES[which]) for which in towers.IMAGES}
    blocks = max(2, sizes[1]) + max(1, sizes[1])  # 288 and 200 tokens in blocks of 256
    sum_of_tokens = tokens[SEVERAL] + tokens["two videos, one image"]
    want = (3, 8, sum_of_tokens, blocks * towers.BLOCK_SIZE, tokens["two videos, one image"])
    assert ranks.run(_counters, 4, sizes) == [want] * 4


def _hidden(group: dist.ProcessGroup, sizes: tuple[int, int]) -> Any:
    module = spread(group, sizes, gather_hidden_states=False)
    got = module(**images())
    hidden = got.last_hidden_state
    as_tuple = module(**images(), return_dict=False)
    return hidden is None or digest(hidden), digests(got)["pooler_output"], len(as_tuple)


@every_layout
def test_the_last_hidden_state_is_left_out_only_where_dp_splits_it(ranks: Ranks, sizes: tuple[int, int]) -> None:
    want = alone()[0]
    hidden = True if sizes[1] > 1 else want["last_hidden_state"]
    num_fields = 2 if sizes[1] > 1 else 3
    assert ranks.run(_hidden, 4, sizes) == [(hidden, want["pooler_output"], num_fields)] * 4


# Fast: the control that shows what the matrix can see.


def _fast(group: dist.ProcessGroup | None, sizes: tuple[int, int], numerics: str) -> dict[str, torch.Tensor]:
    outputs = towers.outputs(spread(group, sizes, numerics=numerics)(**images()))
    return {name: x.clone() for name, x in outputs.items()}


@pytest.mark.parametrize("tp", [2, 4])
def test_control_fast_has_other_bits_and_like_values(ranks: Ranks, tp: int) -> None:
    exact = ranks.run(_fast, tp, (tp, 1), "exact")[0]
    assert {name: digest(x) for name, x in exact.items()} == alone()[0]
    answers = ranks.run(_fast, tp, (tp, 1), "fast")
    for name, want in exact.items():
        for got in answers:
            assert torch.equal(got[name], answers[0][name]), "alike on every rank"
            assert not torch.equal(got[name], want), name
            assert (got[name] - want).abs().max() < 1e-5 * want.abs().max(), name


# One outcome on every rank.


def _outcome(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except (EnfoldError, RuntimeError, TypeError, IndexError) as error:
        return type(error).__name__, str(error)
    return "", ""


CHANGES = ("pixels", "grid", "order", "precision", "count")


def _different(group: dist.ProcessGroup, sizes: tuple[int, int]) -> Any:
    module, found = spread(group, sizes), {}
    for change in CHANGES:
        call = images()
        if dist.get_rank(group) == 2:
            if change == "pixels":
                call["hidden_states"][37, 5] += 1e-6
            elif change == "grid":
                call["grid_thw"][1] = torch.tensor([1, 6, 14])
            elif change == "order":
                call["grid_thw"] = call["grid_thw"].flip(0)
            elif change == "precision":
                call["hidden_states"] = call["hidden_states"].double()
            else:
                call = images("3 mixed")
        found[change] = _outcome(lambda call=call: module(**call))
    return found, digests(module(**images()))


@every_layout
def test_ranks_called_with_different_images(ranks: Ranks, sizes: tuple[int, int]) -> None:
    answers = ranks.run(_different, 4, sizes)
    for change in CHANGES:
        assert len({found[change] for found, _ in answers}) == 1, change
        kind, text = answers[0][0][change]
        assert kind == MismatchError.__name__, change
        assert "rank 2: " in text and "grid_thw=[" in text and "pixel_values=[" in text
    assert [bits for _, bits in answers] == alone() * 4, "the next call works"


FAILURES = {
    "in a layer": ((1,), "blocks.1.attn.proj", SEVERAL),
    "two ranks in the merger": ((0, 3), "merger.linear_fc1", SEVERAL),
    "the only rank that has rows": ((0,), "blocks.0.mlp.linear_fc2", "1 image"),
}


def _raising(group: dist.ProcessGroup, sizes: tuple[int, int]) -> Any:
    module, found = spread(group, sizes, timeout=20.0), {}
    for label, (culprits, where, which) in FAILURES.items():

        def fail(*_: Any, where: str = where) -> None:
            raise RuntimeError(f"no memory in {where}")

        handle = module.get_submodule(where).register_forward_hook(fail) if dist.get_rank(group) in culprits else None
        outcome = _outcome(lambda which=which: module(**images(which)))
        if handle is not None:
            handle.remove()
        found[label] = outcome, digests(module(**images()))
    return found


@every_layout
def test_a_rank_that_raises(ranks: Ranks, sizes: tuple[int, int]) -> None:
    answers = ranks.run(_raising, 4, sizes)
    for label, (culprits, where, _) in FAILURES.items():
        assert len({answer[label][0] for answer in answers}) == 1, label
        kind, text = answers[0][label][0]
        assert kind == EncodeError.__name__, label
        assert f"rank {culprits[0]} failed in encode" in text and f"no memory in {where}" in text
        assert [answer[label][1] for answer in answers] == alone() * 4, "the next call works"


# Bad inputs: InputError with the numbers, alike on every rank, before anything is sent.


def _bad_calls() -> dict[str, dict[str, Any]]:
    good = images()
    pixels, grid = good["hidden_states"], good["grid_thw"]
    odd, zero = grid.clone(), grid.clone()
    odd[2] = torch.tensor([1, 11, 8])
    zero[3, 0] = 0
    return {
        "a grid of fractions": {**good, "grid_thw": grid.float()},
        "a complex grid": {**good, "grid_thw": grid.to(torch.complex64)},
        "a grid of bools": {**good, "grid_thw": grid.bool()},
        "a grid of two columns": {**good, "grid_thw": grid[:, 1:]},
        "a flat grid": {**good, "grid_thw": grid[0]},
        "a list": {**good, "grid_thw": grid.tolist()},
        "odd rows": {**good, "grid_thw": odd},
        "no frames": {**good, "grid_thw": zero},
        "a negative side": {**good, "grid_thw": -grid},
        "too few patches": {**good, "hidden_states": pixels[:-4]},
        "too many patches": {**good, "grid_thw": grid[:-1]},
        "narrow patches": {**good, "hidden_states": pixels[:, :1176]},
        "whole pixels": {**good, "hidden_states": pixels.to(torch.uint8)},
        "three dimensions": {**good, "hidden_states": pixels[None]},
    }


NUMBERS = {
    "a grid of fractions": "grid_thw is [5, 3] torch.float32; it must be whole numbers [images, 3]",
    "a complex grid": "grid_thw is [5, 3] torch.complex64",
    "a grid of bools": "grid_thw is [5, 3] torch.bool",
    "a grid of two columns": "grid_thw is [5, 2] torch.int64",
    "a flat grid": "grid_thw is [3] torch.int64",
    "a list": "grid_thw is a list; a tensor is needed",
    "odd rows": "image 2 has grid 1 x 11 x 8; frames are at least 1, rows and columns multiples of merge_size=2",
    "no frames": "image 3 has grid 0 x 10 x 10",
    "a negative side": "image 0 has grid -1 x -2 x -2",
    "too few patches": "grid_thw describes 288 patches, pixel_values has 284",
    "too many patches": "grid_thw describes 276 patches, pixel_values has 288",
    "narrow patches": "pixel_values is [288, 1176] torch.float32; it must be floating-point [patches, 1536]",
    "whole pixels": "pixel_values is [288, 1536] torch.uint8",
    "three dimensions": "pixel_values is [1, 288, 1536] torch.float32",
}


def _refused(group: dist.ProcessGroup, sizes: tuple[int, int]) -> Any:
    module = spread(group, sizes)
    with recorded() as seen:
        found = {name: _outcome(lambda call=call: module(**call)) for name, call in _bad_calls().items()}
    counters = module.spread.counters
    return found, len(seen), counters.calls, digests(module(**images()))


@every_layout
def test_bad_inputs_are_refused_before_anything_is_sent(ranks: Ranks, sizes: tuple[int, int]) -> None:
    for found, num_sent, num_calls, bits in ranks.run(_refused, 4, sizes):
        for name, (kind, text) in found.items():
            assert kind == InputError.__name__, name
            assert NUMBERS[name] in text
        assert num_sent == num_calls == 0
        assert bits == alone()[0], "the next call works"


def _above_the_limits(group: dist.ProcessGroup, sizes: tuple[int, int]) -> Any:
    limited = spread(group, sizes, max_vision_seq_len=99)
    bucketed = spread(group, sizes, num_vision_tokens_buckets=[256])
    many = images("5 equal")
    many = {"hidden_states": many["hidden_states"].repeat(6, 1), "grid_thw": many["grid_thw"].repeat(6, 1)}
    with recorded() as seen:
        found = [_outcome(lambda: limited(**images())), _outcome(lambda: bucketed(**many))]
    return found, len(seen), digests(bucketed(**images("1 image")))


@every_layout
def test_what_is_above_the_limits_is_refused(ranks: Ranks, sizes: tuple[int, int]) -> None:
    answers = ranks.run(_above_the_limits, 4, sizes)
    assert len({tuple(found) for found, _, _ in answers}) == 1
    (kind, text), (bucket_kind, bucket_text) = answers[0][0]
    assert kind == InputError.__name__
    assert "image 3 has 10 x 10 = 100 patches, the limit is max_vision_seq_len=99; resize it" in text
    assert bucket_kind == ConfigError.__name__
    assert "need 6 blocks of 256 patches, and the largest of num_vision_tokens_buckets=[256] holds" in bucket_text
    assert [bits for _, _, bits in answers] == [alone(sets=("1 image",))[0]] * 4, "the next call works"


def test_what_is_above_the_limits_is_refused_before_anything_is_sent(ranks: Ranks) -> None:
    assert [num_sent for _, num_sent, _ in ranks.run(_above_the_limits, 4, (2, 2))] == [0] * 4


def _bad_on_one(group: dist.ProcessGroup, sizes: tuple[int, int]) -> Any:
    module = spread(group, sizes, timeout=20.0)
    call = _bad_calls()["odd rows"] if dist.get_rank(group) == 3 else images()
    return _outcome(lambda: module(**call)), digests(module(**images()))


@every_layout
def test_bad_inputs_on_one_rank_only(ranks: Ranks, sizes: tuple[int, int]) -> None:
    answers = ranks.run(_bad_on_one, 4, sizes)
    assert len({outcome for outcome, _ in answers}) == 1
    kind, text = answers[0][0]
    assert kind == EncodeError.__name__
    assert "rank 3 failed in encode: InputError: image 2 has grid 1 x 11 x 8" in text
    assert [bits for _, bits in answers] == alone() * 4, "the next call works"


# Warm-up.

BUCKETS = [1500, 256, 700]


def _warm_up(group: dist.ProcessGroup | None, sizes: tuple[int, int], name: str, options: dict[str, Any]) -> Any:
    module = spread(group, sizes, name, **options)
    module(**images(name=name))
    before, last = copy.copy(module.spread.counters), module.spread.last
    visited = []
    with pytest.MonkeyPatch.context() as patch:
        packer = flow.pack_images
        patch.setattr(flow, "pack_images", lambda *args: visited.append(packer(*args)) or visited[-1])
        done = module.spread.warm_up()
    kept = module.spread.counters == before and module.spread.last is last
    return (
        [len(each.blocks) for each in visited],
        [each.num_tokens for each in visited],
        done,
        kept,
        module.spread.config,
    )


@pytest.mark.parametrize(
    ("name", "sizes"), [*(("Qwen3-VL", sizes) for sizes in LAYOUTS.values()), ("SigLIP", (2, 2))], ids=str
)
def test_warm_up_visits_every_bucket(ranks: Ranks, sizes: tuple[int, int], name: str) -> None:
    """The rule of padding holds at configuration, at run time and here."""
    options = {"num_vision_tokens_buckets": BUCKETS, "pad_blocks": True}
    for blocks, tokens, done, kept, config in ranks.run(_warm_up, 4, sizes, name, options):
        counts = config.num_total_vision_attention_blocks
        assert blocks == sorted(set(counts)), "one call for each, smallest first"
        assert counts == {1: [1, 3, 6], 2: [2, 4, 6], 4: [4, 4, 8]}[sizes[1]]
        assert done == [count * towers.BLOCK_SIZE for count in blocks]
        per_block = 256 if name == "Qwen3-VL" else 250  # 10 images of 25 patches
        assert tokens == [count * per_block for count in blocks], "every block is full"
        assert kept, "counters and the latest packing are those of real calls"


def test_warm_up_without_buckets_runs_one_block_per_rank(ranks: Ranks) -> None:
    for blocks, tokens, done, kept, _ in ranks.run(_warm_up, 4, (2, 2), "Qwen3-VL", {}):
        assert (blocks, tokens, done, kept) == ([2], [512], [512], True)


def _failing_warm_up(group: dist.ProcessGroup, sizes: tuple[int, int], culprits: list[int]) -> Any:
    """The second bucket has more rows than there is memory for."""
    module = spread(group, sizes, num_vision_tokens_buckets=[256, 2048])
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2 and dist.get_rank(group) in culprits:
            raise RuntimeError("no memory")

    handle = module.merger.register_forward_hook(fail)
    outcome = _outcome(module.spread.warm_up)
    handle.remove()
    return outcome, module.spread.counters.calls, digests(module(**images()))


@every_layout
def test_warm_up_names_the_bucket_that_failed(ranks: Ranks, sizes: tuple[int, int]) -> None:
    answers = ranks.run(_failing_warm_up, 4, sizes, [1])
    assert len({outcome for outcome, _, _ in answers}) == 1
    kind, text = answers[0][0]
    assert kind == EncodeError.__name__
    assert "warm-up of the bucket of 8 blocks of 256 patches failed" in text
    assert "rank 1 failed in encode: RuntimeError: no memory" in text
    assert [bits for _, _, bits in answers] == alone() * 4, "the next call works"


def test_warm_up_names_the_bucket_that_failed_on_every_rank(ranks: Ranks) -> None:
    for (kind, text), _, _ in ranks.run(_failing_warm_up, 4, (2, 2), [0, 1, 2, 3]):
        assert kind == EncodeError.__name__ and "bucket of 8 blocks" in text and "no memory" in text


def test_a_failed_warm_up_leaves_the_counters_alone(ranks: Ranks) -> None:
    assert [calls for _, calls, _ in ranks.run(_failing_warm_up, 4, (2, 2), [1])] == [0] * 4


def test_warm_up_where_no_image_may_fill_a_block() -> None:
    with torch.no_grad():
        blocks, tokens, *_ = _warm_up(None, (1, 1), "Qwen3-VL", {"max_vision_seq_len": 100})
    assert blocks == [1] and tokens[0] > 128


# A rank without rows sends what the others send.


def _under_autocast(group: dist.ProcessGroup) -> Any:
    """Nothing is sent: gloo ends the process where sizes differ."""
    module, seen = spread(group, (1, 2)), []

    def gather(mine: torch.Tensor, counts: list[int], mesh: Any) -> torch.Tensor:
        seen.append((len(mine), mine.dtype))
        return mine.new_zeros(mesh.dp.size * max(counts), mine.shape[1])

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype=torch.bfloat16):
        patch.setattr(flow, "all_gather", gather)
        module(**images("1 image"))
    return seen


def test_a_rank_without_rows_has_the_precision_of_the_others(ranks: Ranks) -> None:
    answers = ranks.run(_under_autocast, 2)
    assert sorted(rows for (rows, _), *_ in answers) == [0, 35]
    assert len({tuple(dtype for _, dtype in seen) for seen in answers}) == 1
