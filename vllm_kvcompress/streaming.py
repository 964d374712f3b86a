"""Which level of each next chunk to fetch, or to recompute the rest, after CacheGen's streamer.

Nothing here knows a thread, a store or vLLM: a caller tells when something happened and asks what
to do next, so that simulated time does as well as real time. Times are seconds, sizes are bytes;
levels are numbered from the best quality to the least.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

LINK_WINDOW = 3
"""Fetches that the measured bandwidth covers: after a change it is right again with the third."""

SPEED_WINDOW = 8
"""Chunks, or steps of the model, that the other measured speeds cover."""

STALE_SECONDS = 30.0
"""How long a bandwidth is believed enough to fetch nothing. After that a chunk is risked, to
measure it anew."""

PATIENCE_SECONDS = 0.05
"""Delays up to this come from threads and not from the link; no load is given up for them."""


@dataclass(frozen=True)
class Cost:
    """Seconds that all chunks still to come would take at one level."""

    fetch: float
    decode: float

    def seconds(self, chunks: int) -> float:
        """With fetching and decoding overlapped: the slower of the two, and the other's share of
        one chunk."""
        return max(self.fetch, self.decode) + min(self.fetch, self.decode) / max(1, chunks)


def choose(
    costs: Sequence[Cost], chunks: int, recompute_seconds: float, seconds_left: float
) -> int | None:
    """The level of the next chunk, or None to recompute what is left.

    costs: of all ``chunks`` that are left, per level; recompute_seconds: what recomputing them
    would take; seconds_left: until the deadline. Both may be infinite.

    The best level that keeps the deadline and is not slower than recomputing. Where there is none,
    the fastest of all.
    """
    seconds = [cost.seconds(chunks) for cost in costs]
    for level, needed in enumerate(seconds):
        if needed <= min(seconds_left, recompute_seconds):
            return level
    fastest = min(range(len(costs)), key=seconds.__getitem__)
    return fastest if seconds[fastest] <= recompute_seconds else None


class Rate:
    """What the last few amounts come to, over what they took."""

    def __init__(self, window: int, prior: float | None = None) -> None:
        self._window = window
        self._recent: deque[tuple[float, float]] = deque(maxlen=window)
        self._prior = prior

    def add(self, amount: float, taken: float) -> None:
        self._recent.append((amount, taken))

    def forget(self) -> None:
        self._recent.clear()

    @property
    def value(self) -> float | None:
        """The prior while nothing was measured, None without one."""
        return _quotient(self._recent) if self._recent else self._prior

    def value_with(self, amount: float, taken: float) -> float:
        """What ``value`` would be after ``add``."""
        return _quotient([*self._recent, (amount, taken)][-self._window :])


def _quotient(recent: Collection[tuple[float, float]]) -> float:
    return sum(amount for amount, _ in recent) / max(1e-9, sum(taken for _, taken in recent))


class Link:
    """The bandwidth of what lies beyond this process, over fetches that may overlap."""

    def __init__(self) -> None:
        self._speed = Rate(LINK_WINDOW)
        self._last = -math.inf

    def fetched(self, size: int, started: float, now: float) -> None:
        """A fetch ended; size is 0 for one that was given up.

        Of fetches at once each counts for the time since the one before it ended, so that all of
        them together give the bandwidth that they shared.
        """
        if self.is_stale(started):
            self._speed.forget()
        self._speed.add(size, now - max(started, self._last))
        self._last = now

    def bandwidth(self) -> float:
        """Bytes a second, infinite while it is not known."""
        value = self._speed.value
        return math.inf if value is None else max(value, 1e-3)

    def is_stale(self, now: float) -> bool:
        """Whether the bandwidth was measured too long ago to rely on, or never."""
        return now - self._last > STALE_SECONDS

    def bandwidth_with(self, size: float, started: float, now: float) -> float:
        """What the bandwidth is at most if a fetch of so many bytes has not ended yet."""
        return self._speed.value_with(size, now - max(started, self._last))


class RecomputeSpeed:
    """Tokens a second of prefill, from the steps of the model."""

    MIN_TOKENS = 64
    """A step of fewer tokens tells of its fixed cost, not of prefill."""

    def __init__(self) -> None:
        self._speed = Rate(SPEED_WINDOW)
        self._begun: deque[tuple[int, float]] = deque()
        self._last = -math.inf

    def step_begins(self, tokens: int, now: float) -> None:
        if tokens:
            self._begun.append((tokens, now))

    def step_ends(self, now: float) -> None:
        """The oldest step that began is over; a step that was queued behind another began when
        that one ended."""
        if not self._begun:
            return
        tokens, began = self._begun.popleft()
        if tokens >= self.MIN_TOKENS:
            self._speed.add(tokens, now - max(began, self._last))
        self._last = now

    @property
    def value(self) -> float:
        """Tokens a second, 0 while it is not known."""
        return self._speed.value or 0.0


@dataclass(frozen=True)
class Prior:
    """What is assumed of a level until chunks of it have been seen."""

    ratio: float
    """Bytes of a chunk over bytes of its blob."""
    decode: float
    """Bytes of a chunk decoded a second, by one thread."""


class Speeds:
    """All that was measured, shared by the loads of one worker."""

    def __init__(self, priors: Sequence[Prior], threads: int) -> None:
        self.link = Link()
        self.decode = [Rate(SPEED_WINDOW, prior.decode) for prior in priors]
        self.ratio = [Rate(SPEED_WINDOW, prior.ratio) for prior in priors]
        self.recompute = 0.0
        """Tokens a second, 0 while it is not known."""
        self.threads = threads
        self.loads = 0
        """Loads under way, which share the link and the threads."""


@dataclass
class StreamChunk:
    """One chunk of a load."""

    tokens: int
    """Tokens that need not be computed once it and all before it are loaded."""
    raw_bytes: int
    levels: set[int]
    """Levels that may be there."""
    here: Collection[int] = ()
    """Levels that are in this process and need no link."""


class Stream:
    """The decisions of one load, chunk by chunk.

    chunks: in the order in which they are to be loaded. deadline: seconds for the whole load,
    infinite for none. salvage: whether the chunks before one that is not loaded are of use; where
    they are not, giving up means to recompute all.
    """

    def __init__(
        self,
        speeds: Speeds,
        chunks: Sequence[StreamChunk],
        deadline: float,
        now: float,
        salvage: bool = True,
    ) -> None:
        self._speeds = speeds
        self._chunks = chunks
        self._deadline = deadline
        self._started = now
        self._salvage = salvage
        self._crowd = 1  # most loads at once in its time: all would have been recomputed
        self._tokens_before = [0, *accumulate(chunk.tokens for chunk in chunks)]
        self._bytes_before = [0, *accumulate(chunk.raw_bytes for chunk in chunks)]
        self._afar_before = [
            [0, *accumulate(0 if level in chunk.here else chunk.raw_bytes for chunk in chunks)]
            for level in range(len(speeds.decode))
        ]
        self._asked: dict[int, tuple[float, float]] = {}  # chunk -> bytes of its blob, when
        self._undecoded: dict[int, float] = {}  # chunk -> seconds that its decoding will take

    def choose(self, place: int, now: float) -> int | None:
        """The level to fetch chunk ``place`` at, or None to recompute it and all after it."""
        levels = sorted(self._chunks[place].levels)
        bandwidth = self._speeds.link.bandwidth()
        chosen = choose(
            [self._cost(level, place, bandwidth) for level in levels],
            len(self._chunks) - place,
            self._recompute_seconds(place if self._salvage else 0, len(self._chunks)),
            self._deadline - (now - self._started),
        )
        if chosen is None:
            if not self._speeds.link.is_stale(now):
                return None
            chosen = len(levels) - 1
        level = levels[chosen]
        self._asked[place] = (self._chunks[place].raw_bytes / self._ratio(level), now)
        return level

    def fetched(self, place: int, level: int) -> None:
        """A chunk came and waits for a decoder."""
        self._undecoded[place] = self._decode_seconds(level, self._chunks[place].raw_bytes)

    def decoded(self, place: int, level: int, seconds: float | None) -> None:
        """A chunk is out of the decoder, after so many seconds on one thread; None: it failed."""
        del self._undecoded[place]
        if seconds is not None:
            self._speeds.decode[level].add(self._chunks[place].raw_bytes, seconds)

    def is_late(self, place: int, now: float) -> bool:
        """Whether to stop waiting for chunk ``place``, the first that has not come.

        Had everything been recomputed from the start, chunk ``place`` would be done by now: giving
        up here costs one chunk's time more than never having begun. Whatever the estimates were,
        no load may cost more. It is late before that where recomputing would be the choice even
        if the chunk came now.
        """
        end = len(self._chunks)
        spent = now - self._started + self._backlog()
        allowed = self._recompute_seconds(0, place + 1 if self._salvage else end)
        if spent > max(allowed, PATIENCE_SECONDS):
            return True
        size, asked = self._asked.get(place, (0.0, now))
        if now - asked <= PATIENCE_SECONDS or place + 1 == end:
            return False
        bandwidth = self._speeds.link.bandwidth_with(size, asked, now)
        fastest = min(
            self._cost(level, place + 1, bandwidth).seconds(end - place - 1)
            for level in range(len(self._afar_before))
        )
        return fastest > self._recompute_seconds(place if self._salvage else 0, end)

    def _cost(self, level: int, place: int, bandwidth: float) -> Cost:
        """Of all chunks from ``place`` on."""
        afar = self._afar_before[level][-1] - self._afar_before[level][place]
        raw_bytes = self._bytes_before[-1] - self._bytes_before[place]
        share = bandwidth / max(1, self._speeds.loads)
        return Cost(
            fetch=afar / self._ratio(level) / share,
            decode=self._decode_seconds(level, raw_bytes) + self._backlog(),
        )

    def _ratio(self, level: int) -> float:
        return self._speeds.ratio[level].value or 1.0

    def _backlog(self) -> float:
        return sum(self._undecoded.values())

    def _decode_seconds(self, level: int, raw_bytes: int) -> float:
        speed = self._speeds.decode[level].value or math.inf
        return raw_bytes / speed * max(1, self._speeds.loads) / self._speeds.threads

    def _recompute_seconds(self, place: int, end: int) -> float:
        self._crowd = max(self._crowd, self._speeds.loads)
        tokens = self._crowd * (self._tokens_before[end] - self._tokens_before[place])
        return tokens / self._speeds.recompute if self._speeds.recompute else math.inf
