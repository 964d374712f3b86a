"""What stores on a server have in common: time-outs, and being left alone while they fail."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from vllm_kvcompress.stores.base import (
    Store,
    StoreConfigError,
    StoreError,
    StoreStats,
    check_key,
    check_keys,
)

logger = logging.getLogger("vllm.kvcompress.stores")

FAILURES = 3
"""So many failures in a row open a circuit."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds for which an open circuit lets nothing pass; they double from pause to pause."""

Result = TypeVar("Result")


class AccessDenied(StoreError):
    """The server is there and does not let these settings in."""


class CircuitBreaker:
    """Lets calls pass until ``FAILURES`` in a row have failed; then one call a pause, to see.

    what: the calls, for the log. clock: seconds, never going back.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._closed_until = 0.0
        self._opened: float | None = None
        self._probing = False

    def call(self, action: Callable[[], Result]) -> Result:
        """What ``action`` returns. Raises StoreError if it does, or if it was not even tried."""
        with self._lock:
            if self._opened is not None:
                if self._probing or self._clock() < self._closed_until:
                    raise StoreError(f"{self._what}: left alone after failures")
                self._probing = True
        try:
            result = action()
        except BaseException as error:
            self._failed(error)
            raise
        self._succeeded()
        return result

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            now = self._clock()
            self._failures += 1
            if self._opened is None:
                if self._failures < FAILURES:
                    return
                self._opened = now
                self._pause = FIRST_PAUSE
                logger.warning(
                    "KV offload: %s failed %d times and are left off for now: %s",
                    self._what,
                    self._failures,
                    error,
                )
            elif now < self._closed_until:
                return  # a call from before the circuit opened
            else:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._probing = False
            self._closed_until = now + self._pause

    def _succeeded(self) -> None:
        with self._lock:
            if self._opened is not None:
                logger.warning(
                    "KV offload: %s work again after %.0f s",
                    self._what,
                    self._clock() - self._opened,
                )
            self._failures = 0
            self._opened = None
            self._probing = False


class RemoteStore(Store):
    """A store behind a connection. Subclasses do the work in the methods with an underscore,
    which raise StoreError.

    Reads and writes have a circuit breaker each, as a server that is full can still be read.
    """

    shared = True
    reports_evictions = False

    def __init__(self) -> None:
        self._reads = CircuitBreaker(f"reads of store {self.name}")
        self._writes = CircuitBreaker(f"writes to store {self.name}")
        self._lock = threading.Lock()
        self._hits = self._misses = self._errors = self._refused = 0

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        keys = check_keys(keys)
        if not keys:
            return []
        try:
            return self._guard(self._reads, lambda: self._contains(keys))
        except StoreError:
            return [False] * len(keys)

    def get(self, key: bytes) -> bytes | None:
        check_key(key)
        blob = self._guard(self._reads, lambda: self._get(key))
        with self._lock:
            if blob is None:
                self._misses += 1
            else:
                self._hits += 1
        return blob

    def put(self, key: bytes, blob: bytes) -> bool:
        check_key(key)
        capacity = self._size()[2]
        try:
            if capacity and len(blob) > capacity:
                with self._lock:
                    self._refused += 1
                self._guard(self._writes, lambda: self._remove([key]))
                return False
            self._guard(self._writes, lambda: self._put(key, blob))
        except StoreError:
            return False
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        keys = check_keys(keys)
        if keys:
            self._guard(self._writes, lambda: self._remove(keys))

    def clear(self) -> None:
        self.remove_prefix(b"")

    def remove_prefix(self, prefix: bytes) -> None:
        self._guard(self._writes, lambda: self._remove_prefix(prefix))

    def keys(self) -> list[bytes]:
        return self._guard(self._reads, lambda: self._list(b""))

    def refresh(self) -> None:
        self._guard(self._reads, self._measure)

    def stats(self) -> StoreStats:
        entries, held, capacity = self._size()
        with self._lock:
            return StoreStats(
                name=self.name,
                entries=entries,
                bytes_held=held,
                capacity_bytes=capacity,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions(),
                errors=self._errors,
                refused=self._refused,
            )

    def _start(self) -> None:
        """See whether the server is there; one that is not may come later.

        Raises StoreConfigError if it is, and refuses.
        """
        try:
            self._guard(self._reads, self._check)
        except AccessDenied as error:
            self.close()
            raise StoreConfigError(
                f"store {self.name}: the server denies access, see to user, password and rights: "
                f"{error}"
            ) from error
        except StoreError as error:
            logger.warning(
                "KV offload: store %s cannot be reached and is used when it can: %s",
                self.name,
                error,
            )

    def _guard(self, breaker: CircuitBreaker, action: Callable[[], Result]) -> Result:
        failed = False

        def attempt() -> Result:
            nonlocal failed
            try:
                return action()
            except StoreError:
                failed = True
                raise

        try:
            return breaker.call(attempt)
        finally:
            if failed:
                with self._lock:
                    self._errors += 1

    @abstractmethod
    def _contains(self, keys: list[bytes]) -> list[bool]: ...

    @abstractmethod
    def _get(self, key: bytes) -> bytes | None: ...

    @abstractmethod
    def _put(self, key: bytes, blob: bytes) -> None: ...

    @abstractmethod
    def _remove(self, keys: list[bytes]) -> None: ...

    @abstractmethod
    def _remove_prefix(self, prefix: bytes) -> None: ...

    @abstractmethod
    def _list(self, prefix: bytes) -> list[bytes]:
        """The keys that begin so."""

    @abstractmethod
    def _check(self) -> None:
        """See whether the server answers. Raises AccessDenied if it lets nobody in."""

    @abstractmethod
    def _measure(self) -> None:
        """Ask the server what ``_size`` tells."""

    @abstractmethod
    def _size(self) -> tuple[int, int, int]:
        """Entries, bytes and capacity in bytes, as last known."""

    def _evictions(self) -> int:
        """Blobs that the server has evicted since this store was made, as last known."""
        return 0


def check_timeout(seconds: float) -> float:
    """The time-out itself. Raises StoreConfigError unless it is more than 0, up to 600 s."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= 600:
        raise StoreConfigError(
            f"timeout_seconds: {seconds!r}; give a number of seconds above 0, up to 600"
        )
    return float(seconds)
