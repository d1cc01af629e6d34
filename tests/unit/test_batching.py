"""The queue and its batches: who may share one, who goes first, and what a failure costs."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from enfold.batching import RequestQueue, Ticket, run_batch
from enfold.errors import ConfigError, DeadlineError, EncodeError, LostRankError, QueueClosedError, QueueFullError

unhurried = settings(deadline=None)


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(max_pending: int = 100, max_size: int = 4, delay_s: float = 1.0) -> tuple[RequestQueue[Any, Any], Clock]:
    clock = Clock()
    return RequestQueue(max_pending, max_size, delay_s, clock), clock


def items(batch: Sequence[Ticket[Any, Any]]) -> list[Any]:
    return [ticket.item for ticket in batch]


def test_a_batch_waits_for_the_delay_since_its_first_request() -> None:
    queue, clock = made()
    queue.submit("a", "x")
    clock.now += 0.9
    queue.submit("b", "x")
    assert queue.take(0) == []
    clock.now += 0.1
    assert items(queue.take(0)) == ["a", "b"]
    assert len(queue) == 0


def test_a_full_batch_goes_at_once_and_the_rest_waits() -> None:
    queue, _ = made(max_size=2)
    for item in "abc":
        queue.submit(item, "x")
    assert items(queue.take(0)) == ["a", "b"]
    assert queue.take(0) == [] and len(queue) == 1


def test_signatures_do_not_mix_and_the_oldest_goes_first() -> None:
    queue, clock = made()
    for item in ["a1", "b1", "a2", "c1", "b2"]:
        queue.submit(item, item[0])
        clock.now += 0.01
    clock.now += 1
    assert [items(queue.take(0)) for _ in range(4)] == [["a1", "a2"], ["b1", "b2"], ["c1"], []]


def test_a_stream_of_full_batches_does_not_starve_another_signature() -> None:
    queue, clock = made(max_size=2)
    queue.submit("rare", "y")
    taken = []
    for _ in range(20):
        for _ in range(2):
            queue.submit("often", "x")
        clock.now += 0.1
        taken.append(items(queue.take(0)))
    assert taken.index(["rare"]) <= 10  # its delay of 1 s is ten of these steps


def test_one_request_per_batch_needs_no_delay() -> None:
    queue, _ = made(max_size=1, delay_s=5)
    queue.submit("a", "x")
    assert items(queue.take(0)) == ["a"]


def test_a_full_queue_refuses_and_a_cancelled_request_makes_room() -> None:
    queue, _ = made(max_pending=2)
    first = queue.submit("a", "x")
    queue.submit("b", "x")
    with pytest.raises(QueueFullError, match="2 requests wait and at most 2 may"):
        queue.submit("c", "x")
    assert first.future.cancel()
    queue.submit("c", "x")
    assert len(queue) == 2


def test_late_requests_fail_before_they_start() -> None:
    queue, clock = made(max_size=2)
    late = queue.submit("late", "x", deadline=clock.now + 0.5)
    clock.now += 0.5
    assert queue.take(0) == []
    with pytest.raises(DeadlineError, match=r"waited 0\.5 s"):
        late.future.result(0)
    soon = queue.submit("soon", "x", deadline=clock.now + 0.5)
    queue.submit("there", "x")
    batch = queue.take(0)
    clock.now += 0.5
    assert items(queue.start(batch)) == ["there"]
    with pytest.raises(DeadlineError):
        soon.future.result(0)


def test_what_is_cancelled_between_take_and_start_is_left_out() -> None:
    queue, _ = made(max_size=2)
    tickets = [queue.submit(item, "x") for item in "ab"]
    batch = queue.take(0)
    assert tickets[0].future.cancel()
    assert items(queue.start(batch)) == ["b"]
    assert not tickets[1].future.cancel()


def test_a_batch_that_is_put_back_keeps_its_place() -> None:
    queue, clock = made(max_size=2)
    for item in "abcd":
        queue.submit(item, "x")
        clock.now += 0.01
    queue.put_back(queue.take(0))
    assert items(queue.take(0)) == ["a", "b"]


def test_a_closed_queue_gives_out_the_rest_without_delay_or_fails_it() -> None:
    queue, _ = made(delay_s=100)
    queue.submit("a", "x")
    queue.close()
    with pytest.raises(QueueClosedError):
        queue.submit("b", "x")
    assert not queue.finished
    assert items(queue.take()) == ["a"]
    assert queue.finished and queue.take() == []
    queue, _ = made(delay_s=100)
    ticket = queue.submit("a", "x")
    queue.close(drain=False)
    assert queue.take() == []
    with pytest.raises(QueueClosedError, match="send it again"):
        ticket.future.result(0)


def test_takers_wake_for_requests_delays_and_the_end() -> None:
    queue: RequestQueue[str, None] = RequestQueue(10, 2, 0.05)
    taken: list[list[str]] = []

    def work() -> None:
        while not queue.finished:
            if batch := queue.take():
                taken.append(items(batch))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for item in "abc":
        queue.submit(item, "x")
    ends = time.monotonic() + 5
    while len(taken) < 2 and time.monotonic() < ends:
        time.sleep(0.005)
    queue.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert sorted(taken) == [["a", "b"], ["c"]]


@pytest.mark.parametrize("sizes", [(0, 1, 0.0), (1, 0, 0.0), (1, 1, -1.0), (1, 1, float("nan")), (1, 1, float("inf"))])
def test_sizes_that_can_not_be_used(sizes: tuple[int, int, float]) -> None:
    with pytest.raises(ConfigError):
        RequestQueue(*sizes)


def test_a_signature_that_can_not_be_compared_is_refused_at_once() -> None:
    queue, _ = made()
    with pytest.raises(TypeError):
        queue.submit("a", [1])
    assert len(queue) == 0


class QueueMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order: no request is lost or given out twice, and every batch is one that may be."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.clock = made(max_pending=6, max_size=3, delay_s=1.0)
        self.tickets: list[Ticket[Any, Any]] = []
        self.started: list[Ticket[Any, Any]] = []

    @rule(signature=st.sampled_from("xyz"), life=st.sampled_from([0.3, 1.5, 100.0]))
    def submit(self, signature: str, life: float) -> None:
        waiting = len([ticket for ticket in self.tickets if not ticket.future.done() and ticket not in self.started])
        try:
            ticket = self.queue.submit(len(self.tickets), signature, self.clock.now + life)
        except QueueFullError:
            assert waiting >= 6
        except QueueClosedError:
            assert self.queue.closed
        else:
            self.tickets.append(ticket)

    @rule(seconds=st.sampled_from([0.0, 0.2, 1.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.tickets)).future.cancel()

    @rule(back=st.booleans())
    def take(self, back: bool) -> None:
        waiting = [ticket for ticket in self.tickets if not ticket.future.done() and ticket not in self.started]
        batch = self.queue.take(0)
        if not batch:
            now, heads = self.clock.now, {}
            for ticket in waiting:
                if ticket.deadline > now:
                    heads.setdefault(ticket.signature, ticket)
            assert self.queue.closed or all(now < head.submitted_at + 1 for head in heads.values())
            return
        assert len(batch) <= 3 and len({ticket.signature for ticket in batch}) == 1
        assert items(batch) == sorted(items(batch))
        assert not {id(ticket) for ticket in batch} & {id(ticket) for ticket in self.started}
        if back:
            return self.queue.put_back(batch)
        live = self.queue.start(batch)
        self.started += live
        for ticket in live:
            assert ticket.deadline > self.clock.now
            ticket.future.set_result(None)

    @rule()
    def close(self) -> None:
        self.queue.close()

    @invariant()
    def nothing_is_lost(self) -> None:
        known = Counter(ticket.future.done() for ticket in self.tickets)
        assert len(self.queue) == known[False] <= 6

    def teardown(self) -> None:
        self.queue.close(drain=False)
        assert all(ticket.future.done() for ticket in self.tickets)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


# A batch that fails.


def call_of(bad: set[int], fatal: set[int], calls: list[list[int]]) -> Any:
    def call(batch: list[int]) -> list[int]:
        calls.append(batch)
        for item in batch:
            if item in fatal:
                raise LostRankError(f"lost with {item}")
            if item in bad:
                raise EncodeError(f"bad {item}")
        return [item * 10 for item in batch]

    return call


@unhurried
@given(st.integers(0, 6), st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5), max_size=1))
def test_only_what_is_at_fault_fails(size: int, bad: set[int], fatal: set[int]) -> None:
    calls: list[list[int]] = []
    outcomes = run_batch(list(range(size)), call_of(bad, fatal, calls))
    assert len(outcomes) == size
    lost = False
    for item, outcome in enumerate(outcomes):
        first = min([each for each in bad | fatal if each < size], default=None)
        if lost or (first in fatal and first is not None):
            assert isinstance(outcome, LostRankError)
        elif item in fatal:
            assert isinstance(outcome, LostRankError)
            lost = True
        elif item in bad:
            assert isinstance(outcome, EncodeError) and f"bad {item}" in str(outcome)
        else:
            assert outcome == item * 10
    assert len(calls) <= 1 + size


def test_nothing_is_run_on_ranks_that_are_gone() -> None:
    calls: list[list[int]] = []
    run_batch([0, 1, 2], call_of(set(), {1}, calls))
    assert calls == [[0, 1, 2]]
    calls.clear()
    outcomes = run_batch([0, 1, 2], call_of({0}, {1}, calls))
    assert calls == [[0, 1, 2], [0], [1]]
    assert [type(outcome) for outcome in outcomes] == [EncodeError, LostRankError, LostRankError]


def test_too_few_results_are_a_failure_of_the_batch() -> None:
    outcomes = run_batch([1, 2], lambda batch: batch[:1])
    assert outcomes == [1, 2]  # one by one there is one each
    (outcome,) = run_batch([1], lambda batch: [])
    assert isinstance(outcome, RuntimeError)
