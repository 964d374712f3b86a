"""The streaming policy in simulated time, and the machinery that follows it on threads."""

from __future__ import annotations

import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.streaming_simulation import (
    LEVELS,
    TICK,
    Context,
    LevelSpeed,
    Trace,
    recorded_trace,
    simulate,
    synthetic_traces,
)
from vllm_kvcompress.connector.loading import LoadFailed, Loads
from vllm_kvcompress.streaming import (
    PATIENCE_SECONDS,
    STALE_SECONDS,
    Cost,
    Link,
    Prior,
    RecomputeSpeed,
    Speeds,
    Stream,
    StreamChunk,
    choose,
)

# --- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fetch", "recompute", "left", "chosen"),
    [
        ((4.0, 1.0), math.inf, math.inf, 0),  # no deadline: the best level
        ((4.0, 1.0), 2.0, math.inf, 1),  # the best is slower than recomputing
        ((4.0, 1.0), 0.5, math.inf, None),  # all are
        ((4.0, 1.0), math.inf, 2.0, 1),  # the best misses the deadline
        ((4.0, 1.0), math.inf, 0.5, 1),  # all miss it: the fastest
        ((4.0, 1.0), 0.8, 0.5, None),  # all miss it, and recomputing is faster
        ((4.0, 1.0), 3.0, -1.0, 1),  # the deadline has passed
    ],
)
def test_the_best_level_that_is_in_time_is_chosen(fetch, recompute, left, chosen):
    costs = [Cost(seconds, 0.0) for seconds in fetch]
    assert choose(costs, 8, recompute, left) == chosen


def test_an_overlapped_load_costs_the_slower_of_link_and_decoder():
    assert Cost(8.0, 4.0).seconds(8) == 8.5
    assert Cost(4.0, 8.0).seconds(8) == 8.5
    assert Cost(4.0, 8.0).seconds(1) == 12.0


# --- over traces ---------------------------------------------------------------------------------

rates = st.one_of(st.just(0.0), st.floats(1e4, 1e10))


@settings(deadline=None, max_examples=150)
@given(
    rates=st.lists(rates, min_size=1, max_size=12),
    interval=st.floats(0.02, 1.0),
    recompute=st.floats(500.0, 50_000.0),
    levels=st.lists(st.tuples(st.floats(1.0, 12.0), st.floats(3e8, 5e9)), min_size=1, max_size=4),
    deadline=st.one_of(st.just(math.inf), st.floats(0.01, 10.0)),
)
def test_no_link_makes_a_load_slower_than_recomputing_by_more_than_a_chunk(
    rates, interval, recompute, levels, deadline
):
    context = Context(chunks=16, recompute=recompute)
    made = [LevelSpeed(str(i), ratio, decode) for i, (ratio, decode) in enumerate(levels)]
    outcome = simulate(Trace("random", rates, interval), made, context, deadline)
    chunk = max(context.chunk_seconds, *(context.raw_bytes / level.decode for level in made))
    assert outcome.seconds <= context.recompute_seconds + chunk + PATIENCE_SECONDS + TICK


@pytest.mark.parametrize("factor", [10.0, 0.1, 3.0, 0.3])
def test_the_measured_bandwidth_is_right_again_three_chunks_after_the_link_changes(factor):
    before, after = 50e6, 50e6 * factor
    outcome = simulate(Trace("change", [before] * 5 + [after]), LEVELS[:1], Context(recompute=0.0))
    changed = next(i for i, (now, _) in enumerate(outcome.bandwidths) if now >= 0.5)
    # The chunk in flight at the change belongs to both sides.
    assert outcome.bandwidths[changed - 1][1] == pytest.approx(before, rel=0.01)
    assert outcome.bandwidths[changed + 3][1] == pytest.approx(after, rel=0.01)


def test_levels_follow_a_link_that_drops_and_comes_back():
    # For the deadline the high level needs 20 MB/s and the low one 8 MB/s.
    trace = Trace("dip", [40e6] * 4 + [13e6] * 4 + [200e6], 0.1)
    outcome = simulate(trace, LEVELS, Context(recompute=0.0), deadline=1.2)
    assert outcome.levels[0] == "high"
    assert "low" in outcome.levels
    assert outcome.levels[-1] == "high"
    assert outcome.seconds <= 1.2


@pytest.mark.parametrize("mean", [10e6, 50e6, 1e9])
@pytest.mark.parametrize("deadline", [0.5, 2.0, math.inf])
def test_synthetic_and_recorded_links_cost_at_most_a_chunk_more_than_recomputing(mean, deadline):
    context = Context()
    for trace in [*synthetic_traces(mean), recorded_trace(mean)]:
        outcome = simulate(trace, LEVELS, context, deadline)
        allowed = context.recompute_seconds + context.chunk_seconds + TICK
        assert outcome.seconds <= allowed, trace.name


@pytest.mark.parametrize("deadline", [1.5, 3.0, 6.0])
def test_a_deadline_that_the_low_level_keeps_with_a_little_to_spare_is_kept(deadline):
    context = Context(recompute=0.0)
    needed = context.chunks * context.raw_bytes / LEVELS[1].ratio
    # The first chunk comes at the high level, as nothing is known of the link.
    trace = Trace("steady", [1.2 * needed / deadline])
    outcome = simulate(trace, LEVELS, context, deadline)
    assert outcome.seconds <= deadline
    assert outcome.levels.count("high") > 1  # the time that was left


def test_a_crowd_shares_the_link_and_would_share_the_model():
    speeds = Speeds([Prior(1.0, 1e9)], threads=1)
    speeds.recompute = 1000.0
    speeds.link.fetched(1000, 0.0, 1.0)
    chunks = [StreamChunk(tokens=100, raw_bytes=50, levels={0}) for _ in range(4)]
    streams = []
    for _ in range(8):
        speeds.loads += 1
        streams.append(Stream(speeds, chunks, math.inf, now=1.0))
    # Alone 0.05 s a chunk against 0.1; of eight at once 0.4 s against 0.8.
    assert [stream.choose(0, 1.0) for stream in streams] == [0] * 8
    assert not any(stream.is_late(0, 1.7) for stream in streams)
    assert all(stream.is_late(0, 1.9) for stream in streams)
    speeds.loads = 1  # the others are done, and would have been in the way
    assert not streams[0].is_late(1, 2.5)


def test_a_link_that_was_too_slow_is_tried_again_later_with_the_smallest_level():
    speeds = Speeds([Prior(1.0, 1e9), Prior(4.0, 1e9)], threads=1)
    speeds.recompute = 1000.0
    chunks = [StreamChunk(tokens=100, raw_bytes=1000, levels={0, 1}) for _ in range(4)]
    assert Stream(speeds, chunks, math.inf, now=0.0).choose(0, 0.0) == 0  # nothing is known
    speeds.link.fetched(0, 0.0, 5.0)
    assert Stream(speeds, chunks, math.inf, now=6.0).choose(0, 6.0) is None
    later = 6.0 + STALE_SECONDS
    stream = Stream(speeds, chunks, math.inf, now=later)
    assert stream.choose(0, later) == 1
    speeds.link.fetched(250, later, later + 0.01)
    assert stream.choose(1, later + 0.01) == 0  # what was measured before counts no more


def test_fetches_at_once_add_up_to_the_bandwidth_that_they_share():
    link = Link()
    link.fetched(100, 0.0, 2.0)
    link.fetched(100, 0.0, 2.0)
    link.fetched(200, 0.5, 4.0)
    assert link.bandwidth() == pytest.approx(100.0)


def test_prefill_speed_is_that_of_long_steps_and_queued_steps_count_once():
    speed = RecomputeSpeed()
    assert speed.value == 0
    speed.step_begins(1, 0.0)
    speed.step_ends(1.0)
    assert speed.value == 0
    speed.step_begins(0, 1.0)  # no tokens, no step
    speed.step_begins(200, 1.0)
    speed.step_begins(100, 1.5)  # waits for the one before it
    speed.step_ends(3.0)
    speed.step_ends(4.0)
    assert speed.value == pytest.approx(100.0)
    speed.step_ends(9.0)  # nothing was begun
    assert speed.value == pytest.approx(100.0)


# --- on threads ----------------------------------------------------------------------------------


class Source:
    """Chunks are numbers. ``slow`` ones wait for ``gate``, ``bad`` ones fail."""

    def __init__(self, slow=(), bad=(), missing=()):
        self.slow, self.bad, self.missing = set(slow), set(bad), set(missing)
        self.gate = threading.Event()
        self.placed, self.failures, self.lost, self.finished = [], {}, [], []
        self.fetched = []

    def fetch(self, chunk, level):
        self.fetched.append((chunk, level))
        if chunk in self.slow:
            assert self.gate.wait(20)
        if chunk in self.bad:
            raise LoadFailed("corrupt")
        return None if (chunk, level) in self.missing else (b"x" * 100, 100)

    def place(self, job_id, chunk, level, fetched):
        self.placed.append((chunk, level))
        return 1000

    def failed(self, job_id, chunk, cause):
        self.failures[chunk] = cause

    def given_up(self, job_id, chunks):
        self.lost += chunks

    def done(self, job_id, raw_bytes, seconds):
        self.finished.append((job_id, raw_bytes))


def loads(source, threads=1, levels=2, recompute=0.0):
    speeds = Speeds([Prior(10.0, 1e9)] * levels, threads)
    speeds.recompute = recompute
    return Loads(source, speeds, threads, math.inf, True, lambda name, n: ThreadPoolExecutor(n))


def plan(count, levels=2):
    return [StreamChunk(10, 1000, set(range(levels))) for _ in range(count)]


@pytest.mark.parametrize("threads", [1, 4])
def test_every_chunk_is_placed_and_the_load_is_done_once(threads):
    source = Source()
    made = loads(source, threads)
    for job in range(8):
        made.begin(job, list(range(20)), plan(20))
    made.wait(range(8))
    assert sorted(source.placed) == sorted([(i, 0) for i in range(20)] * 8)
    assert sorted(source.finished) == [(job, 20_000) for job in range(8)]
    made.shutdown()


def test_the_next_chunk_is_fetched_while_the_former_is_decoded():
    both = threading.Barrier(2, timeout=20)

    class Meeting(Source):
        def fetch(self, chunk, level):
            if chunk == 1:
                both.wait()
            return super().fetch(chunk, level)

        def place(self, job_id, chunk, level, fetched):
            if chunk == 0:
                both.wait()
            return super().place(job_id, chunk, level, fetched)

    source = Meeting()
    made = loads(source)
    made.begin(0, [0, 1, 2], plan(3))
    made.wait([0])
    assert len(source.placed) == 3
    made.shutdown()


def test_no_more_is_fetched_than_the_decoder_has_room_for():
    class Stuck(Source):
        def place(self, job_id, chunk, level, fetched):
            assert self.gate.wait(20)
            return super().place(job_id, chunk, level, fetched)

    source = Stuck()
    made = loads(source)
    made.begin(0, list(range(50)), plan(50))
    end = time.monotonic() + 10
    while len(source.fetched) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(source.fetched) == 3
    source.gate.set()
    made.wait([0])
    assert len(source.placed) == 50
    made.shutdown()


def test_a_level_that_is_not_there_is_replaced_by_another():
    source = Source(missing=[(1, 0), (2, 0), (2, 1)])
    made = loads(source)
    made.begin(0, [0, 1, 2, 3], plan(4))
    made.wait([0])
    assert sorted(source.placed) == [(0, 0), (1, 1), (3, 0)]
    assert source.failures == {2: "missing"}
    made.shutdown()


def test_a_load_whose_link_hangs_is_given_up_and_keeps_what_came():
    source = Source(slow=[3])
    made = loads(source, recompute=1000.0)
    made.begin(7, list(range(6)), plan(6))
    made.wait([7])  # although the fetch still hangs
    assert sorted(source.placed) == [(0, 0), (1, 0), (2, 0)]
    assert source.lost == [3, 4, 5]
    assert source.finished == [(7, 3000)]
    source.gate.set()
    made.shutdown()
    assert sorted(source.placed) == [(0, 0), (1, 0), (2, 0)]  # what came late is dropped


def test_after_a_link_that_hung_nothing_is_fetched_where_recomputing_is_faster():
    source = Source(slow=[0])
    made = loads(source, recompute=1000.0)
    made.begin(0, [0, 1], plan(2))
    made.wait([0])
    source.gate.set()
    fetched = len(source.fetched)
    made.begin(1, [10, 11], plan(2))
    made.wait([1])
    assert len(source.fetched) == fetched
    assert source.lost == [0, 1, 10, 11]
    made.shutdown()


def test_failures_at_random_settle_every_chunk_once():
    rng = random.Random(5)
    bad = {i for i in range(200) if rng.random() < 0.3}
    missing = {(i, level) for i in range(200) for level in range(2) if rng.random() < 0.3}
    source = Source(bad=bad, missing=missing)
    made = loads(source, threads=3)
    for job in range(10):
        made.begin(job, list(range(20 * job, 20 * job + 20)), plan(20))
    made.wait(range(10))
    placed = [chunk for chunk, _ in source.placed]
    assert sorted(placed + list(source.failures)) == list(range(200))
    assert len(source.finished) == 10
    made.shutdown()


def test_a_shutdown_ends_loads_and_threads():
    source = Source(slow=[2])
    made = loads(source)
    made.begin(0, list(range(5)), plan(5))
    threading.Timer(0.2, source.gate.set).start()
    made.shutdown()
    assert [job for job, _ in source.finished] == [0]
    assert {chunk for chunk, _ in source.placed} <= {0, 1}
