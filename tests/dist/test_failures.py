"""One rank raises, ranks disagree, a rank does not come: every rank gets the same clear error, and nothing hangs."""

from __future__ import annotations

import time
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from cells import differences, spread, wanted
from ranks import Ranks

from enfold.errors import EncodeError, EnfoldError, LostRankError, MismatchError

LAYOUTS = {"fold": (1, 1, 4), "dp": (1, 4, 1), "combined": (1, 2, 2), "replicate": (4, 1, 1)}


def _outcome(module: Any, batch: dict[str, Any]) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        module(**batch)
    except (EnfoldError, IndexError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def _raising(
    group: dist.ProcessGroup, layout: tuple[int, int, int], culprits: tuple[int, ...], where: str
) -> tuple[tuple[str, str, float], list[str]]:
    module = spread(group, "T5", torch.float32, layout)
    batch = models.inputs("T5", 5)
    handle = None
    if dist.get_rank(group) in culprits:

        def fail(*_: Any) -> None:
            raise RuntimeError(f"no memory in {where}")

        handle = module.get_submodule(where).register_forward_hook(fail)
    outcome = _outcome(module, batch)
    if handle is not None:
        handle.remove()
    again = module(**batch, output_hidden_states=True)
    return outcome, differences(wanted("T5", torch.float32, 5, 1), again)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("where", "culprits"),
    [("encoder.block.0.layer.0.SelfAttention.q", (1,)), ("encoder.final_layer_norm", (0, 3))],
)
def test_one_rank_raises(ranks: Ranks, layout: tuple[int, int, int], where: str, culprits: tuple[int, ...]) -> None:
    answers = ranks.run(_raising, 4, layout, culprits, where)
    kinds, texts, seconds = zip(*(outcome for outcome, _ in answers), strict=True)
    assert set(kinds) == {EncodeError.__name__}
    assert len(set(texts)) == 1
    assert f"rank {culprits[0]} failed in encode" in texts[0]
    assert f"no memory in {where}" in texts[0]
    assert max(seconds) < 20
    assert not any(after for _, after in answers), "the next call must work, with the right bits"


def _different(group: dist.ProcessGroup, layout: tuple[int, int, int], change: str) -> Any:
    module = spread(group, "T5", torch.float32, layout)
    batch = models.inputs("T5", 3)
    if dist.get_rank(group) == 2:
        if change == "rows":
            batch = models.inputs("T5", 4)
        elif change == "order":
            batch = {key: value.flip(0) for key, value in batch.items()}
        else:
            batch["output_hidden_states"] = True
    outcome = _outcome(module, batch)
    again = _outcome(module, models.inputs("T5", 3))
    return outcome, again


@pytest.mark.parametrize("change", ["rows", "order", "option"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_called_with_different_batches(ranks: Ranks, layout: tuple[int, int, int], change: str) -> None:
    answers = ranks.run(_different, 4, layout, change)
    texts = {outcome[:2] for outcome, _ in answers}
    assert len(texts) == 1
    kind, text = texts.pop()
    assert kind == MismatchError.__name__
    assert "rank 2: " in text and "input_ids=[" in text
    assert all(again[0] == "" for _, again in answers)


def _bad_token(group: dist.ProcessGroup, layout: tuple[int, int, int]) -> Any:
    module = spread(group, "T5", torch.float32, layout)
    batch = models.inputs("T5", 5)
    batch["input_ids"][4, 0] = 10**6  # with dp only one rank looks it up
    return _outcome(module, batch), _outcome(module, models.inputs("T5", 5))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_token_id_outside_the_vocabulary(ranks: Ranks, layout: tuple[int, int, int]) -> None:
    """Where every rank looks the token up each raises torch's own error, as the plain module does."""
    answers = ranks.run(_bad_token, 4, layout)
    kind = IndexError if layout[1] == 1 else EncodeError
    assert {first[0] for first, _ in answers} == {kind.__name__}
    assert len({first[1] for first, _ in answers}) == 1
    assert {second[0] for _, second in answers} == {""}


def _absent(group: dist.ProcessGroup, layout: tuple[int, int, int]) -> Any:
    module = spread(group, "T5", torch.float32, layout, timeout=2.0)
    if dist.get_rank(group) == 1:
        time.sleep(6)
        return None
    return _outcome(module, models.inputs("T5", 3)), _outcome(module, models.inputs("T5", 3))


def test_a_rank_that_is_not_called_is_named_within_the_timeout() -> None:
    """The process group is lost with it, so these ranks are not shared with other tests."""
    own = Ranks(4)
    try:
        answers = [answer for answer in own.run(_absent, 4, (1, 1, 4)) if answer is not None]
    finally:
        own.stop()
    assert len(answers) == 3
    for first, second in answers:
        assert first[0] == LostRankError.__name__
        assert "for ranks [1]" in first[1]
        assert first[2] < 5
        assert second[0] == LostRankError.__name__
        assert second[2] < 1, "a lost group is not tried again"


def _dying(group: dist.ProcessGroup) -> Any:
    import os

    module = spread(group, "T5", torch.float32, (1, 1, 4), timeout=30.0)
    if dist.get_rank(group) == 1:
        module.get_submodule("encoder.block.1").register_forward_hook(lambda *_: os._exit(9))
    return _outcome(module, models.inputs("T5", 3))


def test_a_rank_that_dies_is_noticed() -> None:
    own = Ranks(4)
    try:
        for pipe in own.pipes:
            pipe.send((_dying, 4, ()))
        answers = {}
        for rank in (0, 2, 3):
            assert own.pipes[rank].poll(60), f"rank {rank} hangs"
            answers[rank] = own.pipes[rank].recv()
    finally:
        own.stop()
    for ok, outcome in answers.values():
        assert ok, outcome
        assert outcome[0] == LostRankError.__name__
        assert outcome[2] < 25


def _bad_argument(group: dist.ProcessGroup) -> Any:
    module = spread(group, "T5", torch.float32, (1, 2, 2))
    batch = models.inputs("T5", 3)
    extra = {"no_such_argument_of_T5": object()} if dist.get_rank(group) == 3 else {}
    try:
        module(**batch, **extra, input_ids_twice=1) if extra else module(**batch)
    except EnfoldError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_argument_that_only_one_rank_passes(ranks: Ranks) -> None:
    answers = set(ranks.run(_bad_argument, 4))
    assert len(answers) == 1
    assert answers.pop()[0] in (EncodeError.__name__, MismatchError.__name__)


def _no_argument(group: dist.ProcessGroup) -> Any:
    module = spread(group, "T5", torch.float32, (4, 1, 1))
    return _outcome(module, {} if dist.get_rank(group) == 3 else models.inputs("T5", 3))


def test_a_rank_that_passes_nothing(ranks: Ranks) -> None:
    kinds, texts, _ = zip(*ranks.run(_no_argument, 4), strict=True)
    assert set(kinds) == {MismatchError.__name__}
    assert len(set(texts)) == 1 and "rank 3: no arguments" in texts[0]
