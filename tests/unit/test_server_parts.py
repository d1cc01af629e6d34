"""The small parts of the server: the shelf of pictures, conditioning files, limits, and the table of errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="needs the extra server")

from enfold import errors
from enfold.errors import DeadlineError, InputError
from enfold.server.backends import split_by
from enfold.server.drawing import size_of
from enfold.server.failures import RequestError, answer, to_request_error
from enfold.server.gates import is_open
from enfold.server.limits import FLAGS, Limits, check_at_most
from enfold.server.replica import is_fatal
from enfold.server.shelf import Shelf, new_id
from enfold.server.tensors import pack, unpack


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_shelf_forgets_what_is_old() -> None:
    clock = Clock()
    shelf = Shelf(100, kept_s=10, clock=clock)
    assert shelf.put("a", b"1", "image/png")
    clock.now = 9.9
    assert shelf.get("a") is not None
    clock.now = 10
    assert shelf.get("a") is None and shelf.num_bytes == 0


@settings(deadline=None)
@given(st.lists(st.integers(0, 120), max_size=20))
def test_a_shelf_is_bounded_and_keeps_the_newest(sizes: list[int]) -> None:
    shelf = Shelf(100)
    kept = [number for number, size in enumerate(sizes) if shelf.put(str(number), b"x" * size, "image/png")]
    assert kept == [number for number, size in enumerate(sizes) if size <= 100]
    assert shelf.num_bytes <= 100
    there = [number for number in kept if shelf.get(str(number)) is not None]
    assert there == kept[len(kept) - len(there) :]
    if kept:
        assert there[-1] == kept[-1]


def test_ids_are_long_and_differ() -> None:
    ids = {new_id("img") for _ in range(100)}
    assert len(ids) == 100 and min(map(len, ids)) >= 28


@settings(deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(["prompt_embeds", "te.hidden_states.1"]), st.integers(1, 3)), max_size=4)
)
def test_conditioning_comes_back_as_it_was(shapes: list[dict[str, int]]) -> None:
    batch = torch.arange(12.0).reshape(1, 12)
    sets = [{name: batch[:, :size] for name, size in each.items()} for each in shapes]  # views of one tensor
    found = unpack(pack(sets, "model"))
    while sets and not sets[-1]:
        sets.pop()  # a text with no tensor leaves no trace
    assert [sorted(each) for each in found] == [sorted(each) for each in sets]
    assert all(torch.equal(x, each[name]) for own, each in zip(found, sets, strict=True) for name, x in own.items())


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_conditioning_are_an_input_error(content: bytes) -> None:
    try:
        unpack(content)
    except InputError as error:
        assert "safetensors" in str(error) or "prompt_embeds" in str(error)


def test_a_limit_names_both_numbers_its_flag_and_the_field() -> None:
    limits = Limits(steps=5)
    check_at_most(limits, "steps", 5, "num_inference_steps")
    check_at_most(limits, "steps", None, "num_inference_steps")
    with pytest.raises(RequestError) as caught:
        check_at_most(limits, "steps", 6, "num_inference_steps")
    assert caught.value.status == 400 and caught.value.param == "num_inference_steps"
    assert all(part in caught.value.message for part in ("6", "5", "--max-steps"))
    assert all(hasattr(limits, name) for name in FLAGS)


def test_every_error_of_enfold_has_an_answer_and_no_other_tells_its_text() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    told = {kind.__name__: to_request_error(kind("words")).status for kind in [*kinds, DeadlineError]}
    assert told == {
        "EnfoldError": 500,
        "LayoutError": 400,
        "ConfigError": 400,
        "UnknownFamilyError": 400,
        "CheckpointError": 500,
        "InputError": 400,
        "QueueFullError": 429,
        "QueueClosedError": 503,
        "EncodeError": 500,
        "MismatchError": 500,
        "LostRankError": 503,
        "DeadlineError": 408,
    }
    assert "secret" not in to_request_error(ValueError("secret path /home/x")).message
    assert answer(to_request_error(errors.QueueFullError("full"))).headers["retry-after"] == "1"


def test_out_of_memory_and_lost_ranks_end_the_ranks_and_nothing_else_does() -> None:
    assert is_fatal(errors.LostRankError("rank 1 is gone"))
    assert is_fatal(errors.EncodeError("rank 0 of 2 failed: OutOfMemoryError: CUDA out of memory"))
    assert is_fatal(errors.EncodeError("rank 0 of 2 failed: RuntimeError: DefaultCPUAllocator: can't allocate memory"))
    assert not is_fatal(errors.EncodeError("rank 0 of 2 failed: ValueError: boom"))
    assert not is_fatal(errors.InputError("out of memory is what the prompt says"))


def test_only_the_page_health_and_pictures_need_no_key() -> None:
    open_paths = ["/", "/page.js", "/page.css", "/health", "/health/live", "/health/ready", "/v1/images/img_x/content"]
    assert all(map(is_open, open_paths))
    shut = [
        "/v1/models",
        "/metrics",
        "/encode",
        "/v1/images/generations",
        "/v1/videos/video_x/content",
        "/openapi.json",
    ]
    assert not any(map(is_open, shut))


def test_sizes_and_runs() -> None:
    assert size_of("64x48") == (64, 48) and size_of("auto") == size_of(None) == (None, None)
    assert split_by([2, 0, 1], "abc") == [["a", "b"], [], ["c"]]
