"""What the shared stores hold: asked on threads, many keys at a time, and never waited for long."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence

from vllm.logger import init_logger

from vllm_kvcompress import compat
from vllm_kvcompress.stores import Store, StoreError

logger = init_logger(compat.LOGGER_NAME)

PATIENCE_SECONDS = 0.005
"""How long the scheduler waits for a store that answered its last question within that time."""

FRESH_SECONDS = 1.0
"""How long an answer is used, from its first use on."""

CLOSE_SECONDS = 10.0
"""How long a close waits for a store that does not return."""


class Answer:
    """What the stores said about some keys, as far as they have."""

    def __init__(self, keys: Collection[bytes], owed: int, deadline: float) -> None:
        self.keys = frozenset(keys)
        self._deadline = deadline
        self._lock = threading.Lock()
        self._owed = owed
        self._found: set[bytes] = set()
        self._complete = threading.Event()
        self._first_used: float | None = None
        if not owed:
            self._complete.set()

    def __contains__(self, key: bytes) -> bool:
        """Whether a store is known to hold it."""
        return key in self._found

    def add(self, found: Collection[bytes]) -> None:
        """Take what one of the stores holds."""
        with self._lock:
            self._found |= self.keys.intersection(found)
            self._owed -= 1
            if not self._owed:
                self._complete.set()

    def wait(self, seconds: float) -> None:
        """Return when every store has answered, or after so long."""
        self._complete.wait(seconds)

    def is_pending(self, now: float) -> bool:
        """Whether more may come that is worth waiting for."""
        return not self._complete.is_set() and now < self._deadline

    def is_stale(self, now: float) -> bool:
        """Whether to ask again. It counts from the first use: a step may take longer than an
        answer is fresh, and each has to be of use once."""
        if self.is_pending(now):
            return False
        if self._first_used is None:
            self._first_used = now
        return now - self._first_used > FRESH_SECONDS


class SharedLookup:
    """Asks every store on a thread of its own.

    A store that is late, however long it takes, costs a request no more than ``deadline_seconds``,
    and while it is, it is asked nothing. clock: seconds, never going back.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        deadline_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._askers = [_Asker(store, clock) for store in stores]

    def ask(self, keys: Collection[bytes]) -> Answer:
        """Ask which of ``keys`` are held; waits a moment, where that is likely to be enough."""
        now = self._clock()
        askers = [asker for asker in self._askers if asker.busy_for(now) < self._deadline_seconds]
        answer = Answer(keys, len(askers), now + self._deadline_seconds)
        for asker in askers:
            asker.put(answer)
        if all(asker.last_seconds < PATIENCE_SECONDS for asker in askers):
            answer.wait(PATIENCE_SECONDS)
        return answer

    def remove_prefix(self, prefix: bytes) -> None:
        """Have every store forget the keys that begin so, after what was asked before."""
        for asker in self._askers:
            asker.put(prefix)

    def close(self) -> None:
        """End the threads and close the stores; one that hangs is left behind."""
        for asker in self._askers:
            asker.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for asker in self._askers:
            asker.join(max(0.0, deadline - time.monotonic()))


class _Asker:
    """The thread that asks one store."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._queue: queue.SimpleQueue[Answer | bytes | None] = queue.SimpleQueue()
        self._began: float | None = None
        self.last_seconds = 0.0
        self.put = self._queue.put
        self._thread = threading.Thread(
            target=self._run, name=f"kv-lookup-{store.name}", daemon=True
        )
        self._thread.start()
        self.join = self._thread.join

    def busy_for(self, now: float) -> float:
        began = self._began
        return 0.0 if began is None else now - began

    def _run(self) -> None:
        answers: list[Answer] = []
        while True:
            item = self._queue.get()
            if isinstance(item, Answer):
                answers.append(item)
                if not self._queue.empty():
                    continue
            if answers:
                self._ask(answers)
                answers = []
            if item is None:
                break
            if isinstance(item, bytes):
                self._remove(item)
        self._store.close()

    def _ask(self, answers: list[Answer]) -> None:
        keys = list({key: None for answer in answers for key in answer.keys})
        found: set[bytes] = set()
        self._began = self._clock()
        try:
            there = self._store.contains(keys)
            found = {key for key, held in zip(keys, there, strict=True) if held}
        except Exception as error:
            logger.warning_once("KV offload: store %s cannot be asked: %s", self._store.name, error)
        finally:
            self.last_seconds = self._clock() - self._began
            self._began = None
        for answer in answers:
            answer.add(found)

    def _remove(self, prefix: bytes) -> None:
        try:
            self._store.remove_prefix(prefix)
        except StoreError as error:
            logger.warning("KV offload: store %s was not cleared: %s", self._store.name, error)
