"""Loads: chunks fetched in order, decoded beside the next fetch, given up where they are late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, Protocol, TypeVar

from vllm_kvcompress.streaming import Speeds, Stream, StreamChunk

Chunk = TypeVar("Chunk")
Fetched = TypeVar("Fetched")

WAIT_SECONDS = 0.02
"""How often a wait for loads looks whether one of them is late."""

IDLE_SECONDS = 0.002
"""How long an engine that has nothing to compute leaves the interpreter to the loads."""


class LoadFailed(Exception):
    """A chunk cannot be loaded; the message is the cause, as the metrics label it."""


class ChunkSource(Protocol[Chunk, Fetched]):
    """Where chunks come from and go to. Every method is called on a thread of the loads."""

    def fetch(self, chunk: Chunk, level: int) -> tuple[Fetched, int] | None:
        """A chunk at a level, and its bytes that crossed the link, 0 if it was here already.

        None if it is not there at this level. Raises LoadFailed.
        """

    def place(self, job_id: int, chunk: Chunk, level: int, fetched: Fetched) -> int:
        """Decode it and write it to where it belongs; returns its bytes. Raises LoadFailed."""

    def failed(self, job_id: int, chunk: Chunk, cause: str) -> None: ...

    def given_up(self, job_id: int, chunks: Sequence[Chunk]) -> None:
        """The policy has them recomputed. They may be all right."""

    def done(self, job_id: int, raw_bytes: int, seconds: float) -> None:
        """Nothing is written for this load any more."""


class _State(Enum):
    WAITING = auto()
    FETCHING = auto()
    DECODING = auto()
    SETTLED = auto()


@dataclass
class _Load(Generic[Chunk]):
    job_id: int
    chunks: Sequence[Chunk]
    plan: Sequence[StreamChunk]
    stream: Stream
    started: float
    states: list[_State]
    next: int = 0
    fetching: int = 0
    decoding: int = 0
    fetch_began: float = 0.0
    raw_bytes: int = 0


class Loads(Generic[Chunk, Fetched]):
    """Runs loads on threads.

    threads: for fetching, and as many for decoding. deadline: seconds for each load. salvage: see
    ``Stream``. make_pool: from a name and a number of threads.
    """

    def __init__(
        self,
        source: ChunkSource[Chunk, Fetched],
        speeds: Speeds,
        threads: int,
        deadline: float,
        salvage: bool,
        make_pool: Callable[[str, int], ThreadPoolExecutor],
    ) -> None:
        self._source = source
        self._speeds = speeds
        self._threads = threads
        # Blobs that are fetched before a decoder has time for them take memory.
        self._ahead = 2 * threads + 1
        self._deadline = deadline
        self._salvage = salvage
        self._changed = threading.Condition()
        self._loads: dict[int, _Load[Chunk]] = {}
        self._fetchers = make_pool("kv-fetch", threads)
        self._decoders = make_pool("kv-decode", threads)

    def begin(self, job_id: int, chunks: Sequence[Chunk], plan: Sequence[StreamChunk]) -> None:
        """Load ``chunks``, at least one, in their order; ``plan`` is what is known of each."""
        now = time.monotonic()
        with self._changed:
            self._speeds.loads += 1
            stream = Stream(self._speeds, plan, self._deadline, now, self._salvage)
            states = [_State.WAITING] * len(chunks)
            load = _Load(job_id, chunks, plan, stream, now, states, fetch_began=now)
            self._loads[job_id] = load
            self._advance(load)

    def blob_seen(self, level: int, raw_bytes: int, blob_bytes: int) -> None:
        """A chunk was encoded, which tells how large others will be."""
        with self._changed:
            self._speeds.ratio[level].add(raw_bytes, blob_bytes)

    def give_up_late(self) -> None:
        """Give up every load whose next chunk has been waited for too long."""
        with self._changed:
            now = time.monotonic()
            for load in list(self._loads.values()):
                missing = (_State.WAITING, _State.FETCHING)
                place = next((i for i, s in enumerate(load.states) if s in missing), None)
                if place is not None and load.stream.is_late(place, now):
                    if load.states[place] is _State.FETCHING:
                        self._speeds.link.fetched(0, load.fetch_began, now)
                    self._give_up(load, place)

    def wait_a_little(self) -> None:
        """Return when a load is done, or soon, if loads are under way."""
        with self._changed:
            if self._loads:
                self._changed.wait(IDLE_SECONDS)

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when these loads are done."""
        with self._changed:
            while any(job_id in self._loads for job_id in job_ids):
                self.give_up_late()
                self._changed.wait(WAIT_SECONDS)

    def shutdown(self) -> None:
        """Give up what has not been fetched and end the threads."""
        with self._changed:
            for load in list(self._loads.values()):
                self._give_up(load, 0)
        self._fetchers.shutdown(wait=True, cancel_futures=True)
        self._decoders.shutdown(wait=True)

    # --- the rest of the methods but for the two on threads want the lock ---------------------

    def _advance(self, load: _Load[Chunk]) -> None:
        while (
            load.next < len(load.chunks)
            and load.fetching < self._threads
            and load.fetching + load.decoding < self._ahead
        ):
            load.states[load.next] = _State.FETCHING
            load.fetching += 1
            self._fetchers.submit(self._fetch, load, load.next)
            load.next += 1

    def _choose(self, load: _Load[Chunk], place: int) -> int | None:
        """The level to fetch a chunk at; None if it is settled, or was settled just now."""
        if load.states[place] is _State.SETTLED:
            return None
        if not load.plan[place].levels:
            self._fail(load, place, "missing")
            return None
        load.fetch_began = time.monotonic()
        level = load.stream.choose(place, load.fetch_began)
        if level is None:
            self._give_up(load, place)
        return level

    def _give_up(self, load: _Load[Chunk], place: int) -> None:
        """Settle every chunk from ``place`` on that no decoder has begun."""
        given_up = []
        load.next = len(load.chunks)
        for later in range(place, len(load.chunks)):
            if load.states[later] in (_State.WAITING, _State.FETCHING):
                given_up.append(load.chunks[later])
                load.states[later] = _State.SETTLED
        self._source.given_up(load.job_id, given_up)
        self._finish_if_settled(load)

    def _fail(self, load: _Load[Chunk], place: int, cause: str) -> None:
        self._source.failed(load.job_id, load.chunks[place], cause)
        load.states[place] = _State.SETTLED
        self._finish_if_settled(load)

    def _finish_if_settled(self, load: _Load[Chunk]) -> None:
        if all(state is _State.SETTLED for state in load.states) and (
            self._loads.pop(load.job_id, None) is not None
        ):
            self._speeds.loads -= 1
            self._source.done(load.job_id, load.raw_bytes, time.monotonic() - load.started)
            self._changed.notify_all()

    # --- on the threads -----------------------------------------------------------------------

    def _fetch(self, load: _Load[Chunk], place: int) -> None:
        while True:
            with self._changed:
                level = self._choose(load, place)
                if level is None:
                    load.fetching -= 1
                    self._advance(load)
                    return
            began = time.monotonic()
            cause, found = "", None
            try:
                found = self._source.fetch(load.chunks[place], level)
            except LoadFailed as failure:
                cause = str(failure)
            with self._changed:
                if load.states[place] is _State.FETCHING and found is None and not cause:
                    load.plan[place].levels.discard(level)
                    continue
                load.fetching -= 1
                if load.states[place] is _State.FETCHING:
                    if found is None:
                        self._fail(load, place, cause)
                    else:
                        fetched, link_bytes = found
                        if link_bytes:
                            self._speeds.link.fetched(link_bytes, began, time.monotonic())
                            self.blob_seen(level, load.plan[place].raw_bytes, link_bytes)
                        load.states[place] = _State.DECODING
                        load.decoding += 1
                        load.stream.fetched(place, level)
                        self._decoders.submit(self._decode, load, place, level, fetched)
                self._advance(load)
                return

    def _decode(self, load: _Load[Chunk], place: int, level: int, fetched: Fetched) -> None:
        began = time.monotonic()
        cause, raw_bytes = "", 0
        try:
            raw_bytes = self._source.place(load.job_id, load.chunks[place], level, fetched)
        except LoadFailed as failure:
            cause = str(failure)
        seconds = time.monotonic() - began
        with self._changed:
            load.decoding -= 1
            load.raw_bytes += raw_bytes
            load.stream.decoded(place, level, None if cause else seconds)
            if cause:
                self._fail(load, place, cause)
            else:
                load.states[place] = _State.SETTLED
                self._finish_if_settled(load)
            self._advance(load)
