"""The ``object`` store: an object for each blob, in an S3-compatible service or in local files.

The object of a key is ``ns-NAMESPACE/<first 8 bytes in hex>/<the rest in hex>.kv`` below the
address. What a fingerprint stored so lies in one folder, which a listing can be asked for. Nothing
is evicted here: an expiry rule of the bucket does that.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import LocalStore, ObjectStore, from_url

from vllm_kvcompress.stores.base import StoreConfigError, StoreError, check_namespace
from vllm_kvcompress.stores.remote import (
    AccessDenied,
    RemoteStore,
    check_timeout,
)

_FOLDER_BYTES = 8
_BLOB = ".kv"
_AT_ONCE = 64
"""Questions that are under way together: a bucket is asked for each object by itself."""
_MOST_KNOWN = 100_000
_SCHEMES = ("s3", "gs", "az", "file")


class BucketStore(RemoteStore):
    """Settings: ``url``, ``endpoint``, ``region``, ``timeout_seconds`` and ``namespace``.

    ``url`` is ``s3://BUCKET/PATH``, ``gs://``, ``az://`` or ``file:///PATH``. ``endpoint`` is the
    address of an S3-compatible service, with ``http://`` or ``https://``. Credentials come from
    the environment, as the service's own tools take them (``AWS_ACCESS_KEY_ID`` and so on).
    ``timeout_seconds`` bounds each request; one is tried twice.

    What was once seen to be there is not asked for again: ``contains`` may be told late that an
    object has expired, by a ``get`` that does not find it.
    """

    name = "object"

    def __init__(
        self,
        url: str,
        endpoint: str | None = None,
        region: str | None = None,
        timeout_seconds: float = 10.0,
        namespace: str = "",
    ) -> None:
        super().__init__()
        timeout = check_timeout(timeout_seconds)
        self._folder = f"ns-{check_namespace(namespace)}"
        self._objects = _open(url, endpoint, region, timeout)
        self._entries = self._bytes = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._start()

    def _contains(self, keys: list[bytes]) -> list[bool]:
        with self._lock:
            unknown = list(dict.fromkeys(key for key in keys if key not in self._known))
        found = {key for key, there in zip(unknown, self._ask(unknown), strict=True) if there}
        for key in found:
            self._remember(key)
        return [key in found or key in self._known for key in keys]

    def _ask(self, keys: list[bytes]) -> list[bool]:
        if len(keys) <= 1:
            return [self._is_there(key) for key in keys]

        async def ask_all() -> list[bool]:
            turn = asyncio.Semaphore(_AT_ONCE)

            async def ask(path: str) -> bool:
                async with turn:
                    try:
                        await obstore.head_async(self._objects, path)
                    except FileNotFoundError:
                        return False
                    return True

            return await asyncio.gather(*(ask(self._path(key)) for key in keys))

        with _errors():
            return asyncio.run(ask_all())

    def _get(self, key: bytes) -> bytes | None:
        with _errors():
            try:
                return obstore.get(self._objects, self._path(key)).bytes().to_bytes()
            except FileNotFoundError:
                self._forget([key])
                return None

    def _put(self, key: bytes, blob: bytes) -> None:
        with _errors():
            # In one request: a reader finds all of it or nothing.
            obstore.put(self._objects, self._path(key), blob, use_multipart=False)
        self._remember(key)
        with self._lock:
            self._entries += 1
            self._bytes += len(blob)

    def _remove(self, keys: list[bytes]) -> None:
        self._forget(keys)
        with _errors(), suppress(FileNotFoundError):
            if isinstance(self._objects, LocalStore):
                for key in keys:
                    with suppress(FileNotFoundError):
                        obstore.delete(self._objects, self._path(key))
            else:
                obstore.delete(self._objects, [self._path(key) for key in keys])

    def _remove_prefix(self, prefix: bytes) -> None:
        self._remove(self._list(prefix))

    def _list(self, prefix: bytes) -> list[bytes]:
        return [key for key, _ in self._entries_of(prefix)]

    def _check(self) -> None:
        self._is_there(b"?")

    def _measure(self) -> None:
        sizes = [size for _, size in self._entries_of(b"")]
        with self._lock:
            self._entries, self._bytes = len(sizes), sum(sizes)

    def _size(self) -> tuple[int, int, int]:
        return self._entries, self._bytes, 0

    def _remember(self, key: bytes) -> None:
        with self._lock:
            self._known[key] = None
            self._known.move_to_end(key)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def _forget(self, keys: list[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._known.pop(key, None)

    def _is_there(self, key: bytes) -> bool:
        with _errors():
            try:
                obstore.head(self._objects, self._path(key))
            except FileNotFoundError:
                return False
            return True

    def _path(self, key: bytes) -> str:
        first, rest = key[:_FOLDER_BYTES].hex(), key[_FOLDER_BYTES:].hex()
        return f"{self._folder}/{first}/{rest}{_BLOB}"

    def _entries_of(self, prefix: bytes) -> Iterator[tuple[bytes, int]]:
        folder = self._folder
        if len(prefix) >= _FOLDER_BYTES:
            folder += f"/{prefix[:_FOLDER_BYTES].hex()}"
        with _errors():
            for page in obstore.list(self._objects, folder):
                for entry in page:
                    key = self._key_of(entry["path"])
                    if key is not None and key.startswith(prefix):
                        yield key, entry["size"]

    def _key_of(self, path: str) -> bytes | None:
        try:
            key = bytes.fromhex(
                path.removeprefix(self._folder).removesuffix(_BLOB).replace("/", "")
            )
        except ValueError:
            return None
        return key if key and self._path(key) == path else None


def _open(url: str, endpoint: str | None, region: str | None, timeout: float) -> ObjectStore:
    scheme = urlsplit(url).scheme if isinstance(url, str) else ""
    if scheme not in _SCHEMES:
        raise StoreConfigError(
            f"url: {url!r}; give an address such as s3://bucket/path, which begins with "
            f"{', '.join(f'{known}://' for known in _SCHEMES)}"
        )
    for setting, value in (("endpoint", endpoint), ("region", region)):
        if value is not None and (scheme != "s3" or not isinstance(value, str) or not value):
            raise StoreConfigError(f"{setting}: {value!r}; it is a text, and goes with s3:// only")
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise StoreConfigError(
            f"endpoint: {endpoint!r}; give an address such as https://objects.example:9000"
        )
    try:
        if scheme == "file":
            path = Path(urlsplit(url).path)
            if not path.parent.is_dir():
                raise StoreConfigError(
                    f"url: {path.parent}, which should hold {path.name}, is not a directory; "
                    "make it first"
                )
            return LocalStore(path, mkdir=True)
        options = {"timeout": timedelta(seconds=timeout)}
        options["connect_timeout"] = options["timeout"]
        config = {"endpoint": endpoint, "region": region}
        if endpoint is not None and endpoint.startswith("http://"):
            options["allow_http"] = True
        return from_url(
            url,
            config={name: value for name, value in config.items() if value is not None},
            client_options=options,
            retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=timeout)},
        )
    except (exceptions.BaseError, ValueError, OSError) as error:
        if isinstance(error, StoreConfigError):
            raise
        raise StoreConfigError(f"url: {url} cannot be used: {error}") from error


@contextmanager
def _errors() -> Iterator[None]:
    """The client's errors as ours."""
    try:
        yield
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise AccessDenied(_first_line(error)) from error
    except (exceptions.BaseError, OSError) as error:
        raise StoreError(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
