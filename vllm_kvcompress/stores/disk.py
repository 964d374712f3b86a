"""The ``disk`` store: a file for each blob, shared by every process that uses the directory.

Layout of the directory::

    kvstore.json           what this is, and the version of this layout
    7f/<key in hex>.kv     a blob; the directory is the low byte of the CRC-32 of the key
    7f/<random>.tmp        a blob that is being written

A blob is written to a ``.tmp`` file and renamed, so that a reader finds all of it or nothing,
wherever the writer is killed. Nothing is synced to the medium: losing the newest blobs with the
power is only a cache miss, a sync of every blob would bound the store by the medium's latency, and
a file that lost its content that way is caught by the checksum that every blob carries. A writer
holds an ``flock`` on its ``.tmp`` file, which dies with it; whoever scans the directory removes
those that nobody locks.

The files are the truth. ``contains`` and ``get`` ask the file system, so every process sees what
the others store and evict at once. The index in memory only serves the bound and the order of
eviction. It is read from directory entries at start and again from time to time, because other
processes write too: all of them together may pass the bound by what they write between two scans,
at most one sixteenth of it each. A blob's modification time is the time of its last use, so the
order of eviction survives a restart and is common to all processes.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import heapq
import json
import os
import secrets
import threading
import time
import zlib
from collections.abc import Iterator, Sequence

from vllm_kvcompress.stores.base import (
    Store,
    StoreConfigError,
    StoreError,
    StoreStats,
    check_key,
    check_keys,
    check_namespace,
    parse_size,
)

STORE_VERSION = 1
MARKER = "kvstore.json"
FORMAT = "vllm-kvcompress disk store"

_BLOB = ".kv"
_TEMPORARY = ".tmp"
# Longer keys would pass the 255 bytes that a file name may have; base 32 is shorter than hex.
_LONGEST_HEX_KEY = 120
_FULL = (errno.ENOSPC, errno.EDQUOT)
# A scan is due after this time, and after writing this share of the capacity; scans take at most
# this share of the time.
_SCAN_SECONDS = 60.0
_SCAN_AFTER_SHARE = 1 / 16
_SCAN_TIME_SHARE = 1 / 100


class DiskStore(Store):
    """Settings: ``path``, ``bytes`` and ``namespace``.

    ``path`` is made if only its last part is missing. ``bytes`` bounds the sum of the lengths of
    the blobs, whichever process wrote them. Stores with different ``namespace`` share a ``path``
    and nothing else; each has its own bound.
    """

    name = "disk"
    shared = True

    def __init__(self, path: str, bytes: int | str = "20GiB", namespace: str = "") -> None:
        self._capacity = parse_size(bytes)
        self._levels = _check_path(path, namespace)
        self._root = self._levels[-1]
        self._index = _Index()
        self._lock = threading.Lock()
        self._scan_lock = threading.Lock()
        # The keys that this process changed while a scan was running, which the scan may have
        # seen before or after.
        self._changed: set[bytes] | None = None
        self._reserved = 0
        self._written_since_scan = 0
        self._next_scan = 0.0
        self._hits = self._misses = self._evictions = self._errors = self._refused = 0
        self._start()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        access, path = os.access, self._blob_path
        return [access(path(key), os.F_OK) for key in check_keys(keys)]

    def get(self, key: bytes) -> bytes | None:
        path = self._blob_path(check_key(key))
        now = time.time_ns()
        try:
            with _open(path) as descriptor:
                if os.fstat(descriptor).st_size > self._capacity:
                    raise OSError(errno.EFBIG, "the file is larger than the store", path)
                blob = _read_all(descriptor)
        except FileNotFoundError:
            with self._lock:
                self._misses += 1
                # Asked again under the lock: it may have been put in the meantime.
                if not os.path.exists(path):
                    self._forget(key)
            return None
        except OSError as error:
            with self._lock:
                self._errors += 1
            raise StoreError(f"cannot read {path}: {error}") from error
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now))
        with self._lock:
            self._hits += 1
            if key in self._index:
                self._index.touch(key, now)
            elif os.path.exists(path):
                self._record(key, len(blob), now)
        return blob

    def put(self, key: bytes, blob: bytes) -> bool:
        check_key(key)
        size = len(blob)
        if size > self._capacity:
            with self._lock:
                self._refused += 1
                self._discard(key)
            return False
        if self._scan_is_due() and self._scan_lock.acquire(blocking=False):
            try:
                self._scan()
            finally:
                self._scan_lock.release()
        reserved = self._reserve(key, size)
        try:
            try:
                self._write(key, blob)
            except OSError as error:
                if error.errno not in _FULL or not self._evict(self._index.held - size):
                    raise
                self._write(key, blob)
        except OSError:
            with self._lock:
                self._errors += 1
                self._discard(key)
            return False
        finally:
            with self._lock:
                self._reserved -= reserved
        self._evict(self._capacity)
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        failures = []
        for key in check_keys(keys):
            with self._lock:
                try:
                    self._delete(key)
                except OSError as error:
                    self._errors += 1
                    failures.append(str(error))
        if failures:
            raise StoreError(f"cannot remove: {'; '.join(failures)}")

    def clear(self) -> None:
        with self._lock:
            try:
                for key, _, _ in _scan_blobs(self._root):
                    self._delete(key)
            except OSError as error:
                self._errors += 1
                raise StoreError(f"cannot clear {self._root}: {error}") from error
            self._index.replace_all({})

    def keys(self) -> list[bytes]:
        with self._lock:
            return self._index.keys()

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                name=self.name,
                entries=len(self._index),
                bytes_held=self._index.held,
                capacity_bytes=self._capacity,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                errors=self._errors,
                refused=self._refused,
            )

    def close(self) -> None:
        """Nothing is held open, and the blobs stay."""

    def refresh(self) -> None:
        """Bring the index up to what is in the directory, and remove what dead writers left."""
        with self._scan_lock:
            self._scan()

    def _start(self) -> None:
        try:
            self._make_root()
            self._check_marker()
            self._index.replace_all({key: entry for key, *entry in _scan_blobs(self._root)})
            self._evict(self._capacity)
            self._probe()
            self._next_scan = time.monotonic() + _SCAN_SECONDS
            self._device = os.stat(self._root).st_dev
        except OSError as error:
            raise StoreConfigError(
                f"path: {self._root} cannot be used ({error.strerror}); "
                "give a directory that can be written"
            ) from error

    def _make_root(self) -> None:
        for level in self._levels:
            try:
                os.mkdir(level)
            except FileExistsError:
                if not os.path.isdir(level):
                    raise NotADirectoryError(
                        errno.ENOTDIR, "it is not a directory", level
                    ) from None

    def _check_marker(self) -> None:
        marker = os.path.join(self._root, MARKER)
        try:
            with _open(marker) as descriptor:
                content = _read_all(descriptor)
        except FileNotFoundError:
            self._write_marker()
            return
        try:
            found = json.loads(content)
            is_store, version = found["format"] == FORMAT, found["version"]
        except (ValueError, TypeError, KeyError):
            is_store = False
        if not is_store:
            raise StoreConfigError(
                f"path: {marker} is not the marker of a store; give another directory"
            )
        if version != STORE_VERSION:
            raise StoreConfigError(
                f"path: {self._root} holds a store of version {version}, and this version reads "
                f"{STORE_VERSION}; give another directory, or delete that one"
            )

    def _write_marker(self) -> None:
        content = json.dumps({"format": FORMAT, "version": STORE_VERSION}).encode()
        with _temporary_file(self._root) as (descriptor, temporary):
            _write_all(descriptor, content)
            os.fsync(descriptor)
            os.rename(temporary, os.path.join(self._root, MARKER))

    def _probe(self) -> None:
        """Write to the directory; on a full device, after evicting as much as that takes."""
        while True:
            try:
                with _temporary_file(self._root) as (descriptor, temporary):
                    _write_all(descriptor, bytes(4096))
                    os.unlink(temporary)
                return
            except OSError as error:
                if error.errno not in _FULL or not self._evict(self._index.held - 1):
                    raise

    def _write(self, key: bytes, blob: bytes) -> None:
        path = self._blob_path(key)
        directory = os.path.dirname(path)
        try:
            self._write_in(directory, path, key, blob)
        except FileNotFoundError:
            self._restore(directory)
            self._write_in(directory, path, key, blob)

    def _write_in(self, directory: str, path: str, key: bytes, blob: bytes) -> None:
        with _temporary_file(directory) as (descriptor, temporary):
            _write_all(descriptor, blob)
            now = time.time_ns()
            os.utime(descriptor, ns=(now, now))
            with self._lock:
                os.rename(temporary, path)
                self._record(key, len(blob), now)
                self._written_since_scan += len(blob)

    def _restore(self, directory: str) -> None:
        """Make the directory of a blob: for its first blob, or because somebody deleted it."""
        if not os.path.exists(os.path.join(self._root, MARKER)):
            existing = self._root
            while not os.path.exists(existing):
                existing = os.path.dirname(existing)
            if os.stat(existing).st_dev != self._device:
                raise OSError(errno.ENODEV, "the device of the store is not mounted", self._root)
            self._make_root()
            self._write_marker()
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)

    def _reserve(self, key: bytes, size: int) -> int:
        """Evict until ``size`` bytes under ``key`` fit beside what is held and being written.

        Returns what was added to ``_reserved``.
        """
        while True:
            with self._lock:
                # The blob to be replaced makes room itself, and is not the one to evict for it.
                growth = size
                if key in self._index:
                    growth -= self._index.entry(key)[0]
                    self._index.touch(key, time.time_ns())
                victim = self._evict_one(self._capacity - self._reserved - growth)
                if victim is None:
                    self._reserved += growth
                    return growth
            self._report(*victim)

    def _evict(self, goal: int) -> bool:
        """Evict until at most ``goal`` bytes are held; whether there was anything to evict."""
        evicted = False
        while True:
            with self._lock:
                victim = self._evict_one(goal)
            if victim is None:
                return evicted
            evicted = True
            self._report(*victim)

    def _evict_one(self, goal: int) -> tuple[bytes, int | None] | None:
        """Delete the least recently used blob, if more than ``goal`` bytes are held.

        Returns its key and, for ``on_evict``, a file descriptor that still reads it; None if
        nothing was deleted. The lock is held: files are renamed and deleted under it, so that the
        index always agrees with what this process did to the directory.
        """
        while self._index.held > goal and (oldest := self._index.oldest()) is not None:
            key, used = oldest
            path = self._blob_path(key)
            descriptor = None
            try:
                entry = os.stat(path)
                if entry.st_mtime_ns > used:
                    self._record(key, entry.st_size, entry.st_mtime_ns)
                    continue
                if self.on_evict is not None:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._delete(key)
            except FileNotFoundError:
                self._forget(key)
            except OSError:
                self._errors += 1
                self._forget(key)
                if descriptor is not None:
                    os.close(descriptor)
            else:
                self._evictions += 1
                return key, descriptor
        return None

    def _report(self, key: bytes, descriptor: int | None) -> None:
        if descriptor is None:
            return
        try:
            blob = _read_all(descriptor)
        except OSError:
            with self._lock:
                self._errors += 1
            return
        finally:
            os.close(descriptor)
        if self.on_evict is not None:
            self.on_evict(key, blob)

    def _scan_is_due(self) -> bool:
        return (
            time.monotonic() >= self._next_scan
            or self._written_since_scan >= self._capacity * _SCAN_AFTER_SHARE
        )

    def _scan(self) -> None:
        with self._lock:
            self._changed = set()
        start = time.monotonic()
        try:
            found = {key: entry for key, *entry in _scan_blobs(self._root)}
        except OSError:
            found = None
        end = time.monotonic()
        with self._lock:
            if found is None:
                self._errors += 1
            else:
                for key in self._changed:
                    found.pop(key, None)
                    if key in self._index:
                        found[key] = self._index.entry(key)
                self._index.replace_all(found)
            self._changed = None
            self._written_since_scan = 0
            self._next_scan = end + max(_SCAN_SECONDS, (end - start) / _SCAN_TIME_SHARE)

    def _record(self, key: bytes, size: int, used: int) -> None:
        self._index.record(key, size, used)
        if self._changed is not None:
            self._changed.add(key)

    def _forget(self, key: bytes) -> None:
        self._index.forget(key)
        if self._changed is not None:
            self._changed.add(key)

    def _delete(self, key: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._blob_path(key))
        self._forget(key)

    def _discard(self, key: bytes) -> None:
        with contextlib.suppress(OSError):
            self._delete(key)

    def _blob_path(self, key: bytes) -> str:
        return f"{self._root}/{zlib.crc32(key) & 0xFF:02x}/{_file_name(key)}"


class _Index:
    """Size and last use of each blob, and which was used least recently.

    The heap has an entry for each key, with a time no later than its last use; entries that are
    out of date are corrected when they reach the top.
    """

    def __init__(self) -> None:
        self.held = 0
        self._entries: dict[bytes, tuple[int, int]] = {}
        self._heap: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def entry(self, key: bytes) -> tuple[int, int]:
        return self._entries[key]

    def keys(self) -> list[bytes]:
        return sorted(self._entries, key=lambda key: self._entries[key][1])

    def record(self, key: bytes, size: int, used: int) -> None:
        if key in self._entries:
            self.held -= self._entries[key][0]
        elif len(self._heap) > 2 * len(self._entries) + 64:
            self.replace_all({**self._entries, key: (0, used)})
        else:
            heapq.heappush(self._heap, (used, key))
        self._entries[key] = (size, used)
        self.held += size

    def touch(self, key: bytes, used: int) -> None:
        self._entries[key] = (self._entries[key][0], used)

    def forget(self, key: bytes) -> None:
        size, _ = self._entries.pop(key, (0, 0))
        self.held -= size

    def replace_all(self, entries: dict[bytes, Sequence[int]]) -> None:
        self._entries = {key: (size, used) for key, (size, used) in entries.items()}
        self._heap = [(used, key) for key, (_, used) in self._entries.items()]
        heapq.heapify(self._heap)
        self.held = sum(size for size, _ in self._entries.values())

    def oldest(self) -> tuple[bytes, int] | None:
        while self._heap:
            time_in_heap, key = self._heap[0]
            if key not in self._entries:
                heapq.heappop(self._heap)
                continue
            used = self._entries[key][1]
            if used <= time_in_heap:
                return key, used
            heapq.heapreplace(self._heap, (used, key))
        return None


def _check_path(path: str, namespace: str) -> list[str]:
    """The directories of a store, outermost first, which are made where they are missing."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in os.fspath(path):
        raise StoreConfigError(f"path: {path!r} is not a path; give a directory")
    top = os.path.abspath(os.path.expanduser(os.fspath(path)))
    if not os.path.isdir(os.path.dirname(top)):
        raise StoreConfigError(
            f"path: {os.path.dirname(top)}, which should hold {os.path.basename(top)}, "
            "is not a directory; make it first"
        )
    if check_namespace(namespace) == "":
        return [top]
    return [top, os.path.join(top, f"ns-{namespace}")]


def _file_name(key: bytes) -> str:
    if len(key) <= _LONGEST_HEX_KEY:
        return f"{key.hex()}{_BLOB}"
    # No hex digit, so that the two kinds of name cannot meet.
    return f"z{base64.b32hexencode(key).decode().rstrip('=').lower()}{_BLOB}"


def _key_of(file_name: str) -> bytes | None:
    """The key of a blob's file name; None for a file that is not a blob of this store."""
    stem = file_name.removesuffix(_BLOB)
    try:
        if stem.startswith("z"):
            key = base64.b32hexdecode(stem[1:].upper() + "=" * (-len(stem[1:]) % 8))
        else:
            key = bytes.fromhex(stem)
    except ValueError:
        return None
    return key if key and _file_name(key) == file_name else None


def _scan_blobs(root: str) -> Iterator[tuple[bytes, int, int]]:
    """Key, size and time of last use in nanoseconds of every blob below ``root``.

    Removes the temporary files of dead writers on the way.
    """
    _remove_dead_files(root)
    for directory in (f"{root}/{number:02x}" for number in range(256)):
        has_temporary = False
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    has_temporary |= entry.name.endswith(_TEMPORARY)
                    key = _key_of(entry.name)
                    if key is None:
                        continue
                    # Deleted by another process since.
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield key, status.st_size, status.st_mtime_ns
        except FileNotFoundError:
            continue
        if has_temporary:
            _remove_dead_files(directory)


def _remove_dead_files(directory: str) -> None:
    try:
        names = [name for name in os.listdir(directory) if name.endswith(_TEMPORARY)]
    except FileNotFoundError:
        return
    for name in names:
        path = os.path.join(directory, name)
        # Locked by a living writer, or gone already.
        with contextlib.suppress(OSError), _open(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)


@contextlib.contextmanager
def _temporary_file(directory: str) -> Iterator[tuple[int, str]]:
    """A new file, locked against removal by others: its descriptor and path.

    The caller renames or unlinks it; after an exception it is removed.
    """
    path, descriptor = _create_locked(directory)
    try:
        yield descriptor, path
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _create_locked(directory: str) -> tuple[str, int]:
    while True:
        path = os.path.join(directory, secrets.token_hex(8) + _TEMPORARY)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        # Some network file systems know no locks: what a killed writer leaves there, stays.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Somebody may have taken it for a dead writer's before it was locked.
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)


@contextlib.contextmanager
def _open(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_all(descriptor: int) -> bytes:
    remaining = os.fstat(descriptor).st_size
    parts = []
    while remaining and (part := os.read(descriptor, remaining)):
        parts.append(part)
        remaining -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
