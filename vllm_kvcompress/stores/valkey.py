"""The ``valkey`` store: blobs in a Valkey or Redis server, by its own client.

A blob is a string under ``kvcompress:NAMESPACE:KEY``. How much is kept, and what goes first, is
the server's to say: ``maxmemory`` and ``maxmemory-policy allkeys-lru``.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import valkey
from valkey.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    ResponseError,
    ValkeyError,
)

from vllm_kvcompress.stores.base import StoreConfigError, StoreError, check_namespace
from vllm_kvcompress.stores.remote import AccessDenied, RemoteStore, check_timeout
from vllm_kvcompress.stores.secret import read_secret

MEASURE_SECONDS = 10.0
"""How often a ``put`` also asks how much the server holds."""

_READ_BYTES = 1 << 18
_SMALL = 1 << 18
_LARGEST = 1 << 30
_HEAD_BYTES = 32
_BUFFER_BYTES = _SMALL + _HEAD_BYTES + 2
_BLOB_FOLLOWS = re.compile(rb"\$(\d{1,18})\r\n")
_BATCH = 1000
_SCHEMES = ("valkey://", "valkeys://", "redis://", "rediss://", "unix://")
_GLOB = re.compile(rb"[\\*?\[\]]")


class ValkeyStore(RemoteStore):
    """Settings: ``url``, ``password``, ``timeout_seconds`` and ``namespace``.

    ``url`` is the client's: ``valkey://USER@HOST:PORT/DB``, ``valkeys://`` with TLS,
    ``unix:///PATH``; after ``?`` come settings of a connection, such as
    ``ssl_ca_certs=/etc/ssl/own.pem``. ``password`` says where it is to be read, ``"file:PATH"`` or
    ``"env:NAME"``. ``timeout_seconds`` bounds connecting, and each wait for the server.
    """

    name = "valkey"

    def __init__(
        self,
        url: str,
        password: str | None = None,
        timeout_seconds: float = 2.0,
        namespace: str = "",
    ) -> None:
        super().__init__()
        self._prefix = f"kvcompress:{check_namespace(namespace)}:".encode()
        self._timeout = check_timeout(timeout_seconds)
        self._pool = _make_pool(url, password, self._timeout)
        self._client = valkey.Valkey(connection_pool=self._pool)
        self._idle: list[valkey.Connection] = []
        self._closed = False
        self._own = threading.local()
        self._entries = self._bytes = self._maximum = 0
        self._evicted_before: int | None = None
        self._evicted = 0
        self._next_measure = 0.0
        self._start()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().disconnect()
        self._pool.disconnect()

    def _contains(self, keys: list[bytes]) -> list[bool]:
        # One write and as many answers; the client's pipeline takes three times as long over it.
        size = len(self._prefix)
        questions = b"".join(
            b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b%b\r\n" % (size + len(key), self._prefix, key)
            for key in keys
        )
        answers = []
        with self._as_ours():
            with self._connection() as connection:
                connection.send_packed_command([questions])
                for _ in keys:
                    try:
                        answers.append(connection.read_response())
                    except ResponseError as error:
                        answers.append(error)
            for answer in answers:
                if isinstance(answer, ResponseError):
                    raise answer
        return [answer == 1 for answer in answers]

    def _get(self, key: bytes) -> bytes | None:
        name = self._prefix + key
        with self._as_ours(), self._connection() as connection:
            connection.send_packed_command(
                [b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)]
            )
            try:
                return _read_blob(connection, self._buffer())
            except ResponseError as error:
                if str(error).startswith("WRONGTYPE"):
                    return None
                raise

    def _put(self, key: bytes, blob: bytes) -> None:
        name = self._prefix + key
        with self._as_ours():
            try:
                with self._connection() as connection:
                    # The client would first copy the blob to where the rest of the command is.
                    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(blob))
                    _send(connection, [head, blob, b"\r\n"])
                    connection.read_response()
            except ResponseError:
                # A server that is full refuses what takes memory and still deletes.
                self._client.unlink(name)
                raise
        if time.monotonic() >= self._next_measure:
            self._next_measure = time.monotonic() + MEASURE_SECONDS
            with suppress(StoreError):  # the blob is there, whatever comes of this
                self._measure()

    @contextmanager
    def _connection(self) -> Iterator[valkey.Connection]:
        """A connection that is in order; it is made anew after an error in it.

        The client's pool takes a third of the time of a small blob, most of it for the same look
        at the connection, with two changes of its time-out.
        """
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._pool.make_connection()
        try:
            if connection._sock is not None and _has_ended(connection):
                connection.disconnect()
            if connection._sock is None:
                connection.connect()
                _leave_time_outs_to_the_kernel(connection, self._timeout)
            yield connection
        except ResponseError:
            raise
        except BaseException:
            connection.disconnect()
            raise
        finally:
            if self._closed:
                connection.disconnect()
            else:
                self._idle.append(connection)

    def _buffer(self) -> memoryview:
        """Of this thread."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(bytearray(_BUFFER_BYTES))
        return self._own.buffer

    @contextmanager
    def _as_ours(self) -> Iterator[None]:
        """The client's errors as ours."""
        try:
            yield
        except (AuthenticationError, NoPermissionError) as error:
            raise AccessDenied(str(error)) from error
        except (ValkeyError, OSError) as error:
            if BlockingIOError in (type(error), type(error.__context__)):
                raise StoreError(f"TimeoutError: no answer in {self._timeout:g} s") from error
            raise StoreError(f"{type(error).__name__}: {error}") from error

    def _remove(self, keys: list[bytes]) -> None:
        with self._as_ours():
            for first in range(0, len(keys), _BATCH):
                self._client.unlink(*(self._prefix + key for key in keys[first : first + _BATCH]))

    def _remove_prefix(self, prefix: bytes) -> None:
        self._remove(self._list(prefix))

    def _list(self, prefix: bytes) -> list[bytes]:
        pattern = _GLOB.sub(rb"\\\g<0>", self._prefix + prefix) + b"*"
        with self._as_ours():
            found = set(self._client.scan_iter(match=pattern, count=_BATCH))
        return [name[len(self._prefix) :] for name in found]

    def _check(self) -> None:
        self._contains([b"?"])
        self._measure()

    def _measure(self) -> None:
        with self._as_ours():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.info("memory")
            pipeline.info("stats")
            pipeline.dbsize()
            self._take_size(pipeline.execute(raise_on_error=False))

    def _take_size(self, answers: Sequence[Any]) -> None:
        memory, stats, entries = answers
        with self._lock:
            if isinstance(memory, dict):
                self._bytes = int(memory.get("used_memory", 0))
                self._maximum = int(memory.get("maxmemory", 0))
            if isinstance(stats, dict):
                evicted = int(stats.get("evicted_keys", 0))
                # The server counts from its own start.
                if self._evicted_before is not None and evicted > self._evicted_before:
                    self._evicted += evicted - self._evicted_before
                self._evicted_before = evicted
            if isinstance(entries, int):
                self._entries = entries

    def _size(self) -> tuple[int, int, int]:
        return self._entries, self._bytes, self._maximum

    def _evictions(self) -> int:
        return self._evicted


def _make_pool(url: str, password: str | None, timeout: float) -> valkey.ConnectionPool:
    if not isinstance(url, str) or not url.lower().startswith(_SCHEMES):
        raise StoreConfigError(
            f"url: {url!r}; give an address such as valkey://localhost:6379/0, which begins with "
            f"{', '.join(_SCHEMES)}"
        )
    try:
        # What the address says of a connection comes before what is given here.
        pool = valkey.ConnectionPool.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            socket_read_size=_READ_BYTES,
        )
        settings = pool.connection_kwargs
        if "password" in settings:
            raise StoreConfigError(
                "url: settings are logged, so a password is not written there; leave it out, and "
                "give the setting password, 'file:PATH' or 'env:NAME'"
            )
        if password is not None:
            settings["password"] = read_secret(password, "password")
        if pool.connection_class is valkey.SSLConnection:
            settings.setdefault("ssl_check_hostname", True)
        pool.make_connection()
    except StoreConfigError:
        raise
    except (TypeError, ValueError, ValkeyError, OSError) as error:
        raise StoreConfigError(f"url: {url} cannot be used: {error}") from error
    return pool


def _has_ended(connection: valkey.Connection) -> bool:
    """Whether the server has closed a connection, or sent what nobody has asked for."""
    if isinstance(connection._sock, ssl.SSLSocket):
        try:
            return connection.can_read()
        except ValkeyError:
            return True
    try:
        connection._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _leave_time_outs_to_the_kernel(connection: valkey.Connection, seconds: float) -> None:
    """With a time-out of Python's own every call first asks whether it would wait, and none waits
    for all its bytes. TLS knows no other."""
    plain = connection._sock
    if not isinstance(plain, ssl.SSLSocket):
        plain.settimeout(None)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _send(connection: valkey.Connection, parts: Sequence[bytes]) -> None:
    """All of ``parts``, in one call where the socket can."""
    if isinstance(connection._sock, ssl.SSLSocket):
        connection.send_packed_command(parts)
        return
    sent = connection._sock.sendmsg(parts)
    for part in parts:
        if sent < len(part):
            connection._sock.sendall(memoryview(part)[sent:])
        sent = max(sent - len(part), 0)


def _some(count: int) -> int:
    """Bytes that came. Raises ConnectionResetError where there were none."""
    if not count:
        raise ConnectionResetError("the connection ended in the middle of a blob")
    return count


def _read_blob(connection: valkey.Connection, buffer: memoryview) -> bytes | None:
    """The answer to a GET. Raises what the client raises.

    The client's parser copies a blob twice; here it is copied once where it is small, and
    where it is large the kernel writes it where it stays. buffer: of ``_BUFFER_BYTES``, for
    the copy.
    """
    plain = connection._sock
    head = None
    if not isinstance(plain, ssl.SSLSocket):
        head = _BLOB_FOLLOWS.match(plain.recv(_HEAD_BYTES, socket.MSG_PEEK))
    if head is None:
        answer = connection.read_response()
        if answer is not None and not isinstance(answer, bytes):
            raise InvalidResponse("a GET was answered with something else than a string")
        return answer
    start, size = head.end(), int(head[1])
    if size > _LARGEST:
        raise InvalidResponse(f"a blob of {size} bytes")
    if size <= _SMALL:
        end = start + size
        received = 0
        while received < end + 2:
            received += _some(plain.recv_into(buffer[received : end + 2]))
        return bytes(buffer[start:end])
    plain.recv(start)
    parts = []
    while size:
        parts.append(plain.recv(size, socket.MSG_WAITALL))
        size -= _some(len(parts[-1]))
    _some(len(plain.recv(2, socket.MSG_WAITALL)))
    return parts[0] if len(parts) == 1 else b"".join(parts)
