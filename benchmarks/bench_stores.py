"""Stores: put and get per blob size beside the bare medium, lookups, and restarts of a full store.

The bare medium is plain files for the disk, and for a server the bytes of its protocol on a
connection, without any client. Servers run on this machine, started here. The disk figures are
those of the page cache and the file system, as a server sees them; nothing is synced. ``--path``
chooses another file system than that of the temporary directory.

    python benchmarks/bench_stores.py [--path DIR] [--megabytes N] [--only NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from vllm_kvcompress.stores import Store, create_stack, create_store

BLOB_BYTES = (64 << 10, 100_000, 1 << 20, 4 << 20)
THREADS = (1, 4)
MOST_KEYS = 500
KEYS = 10_000
KEY_BLOB_BYTES = {"object": 64}
"""Bytes of each of the many keys' blobs, where it is not ``GIGABYTE``'s share."""
GIGABYTE = 10**9
LOOKUP = 500
CAPACITY = "64GiB"
BARE = {"disk": "plain files", "valkey": "bare valkey", "object": "bare object"}
"""What a store is held against."""


def make_keys(count: int, seed: int = 0) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(56) for _ in range(count)]


Maker = Callable[[], Store]


@contextmanager
def running(
    path: Path, only: Sequence[str]
) -> Iterator[tuple[dict[str, Maker], dict[str, object]]]:
    """What makes each store, and the bare media, with the servers that they need."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests import servers

    memory = {"type": "memory", "bytes": CAPACITY}
    disk = {"type": "disk", "bytes": CAPACITY, "path": str(path / "disk")}
    configs: dict[str, list[dict]] = {
        "memory": [memory],
        "disk": [disk],
        "memory over disk": [memory, {**disk, "path": str(path / "stack")}],
    }
    bare: dict[str, object] = {"plain files": PlainFiles(path)}
    with ExitStack() as stack:
        if not only or {"valkey", "valkey sealed"} & set(only):
            server = stack.enter_context(servers.valkey_server(path / "valkey"))
            config = {"type": "valkey", "url": server.url, "timeout_seconds": 60}
            os.environ["BENCH_SEAL_KEY"] = os.urandom(32).hex()
            configs["valkey"] = [{**config, "namespace": "plain"}]
            configs["valkey sealed"] = [
                {**config, "namespace": "sealed", "seal_key": "env:BENCH_SEAL_KEY"}
            ]
            bare["bare valkey"] = BareValkey(server.port)
        if not only or "object" in only:
            address = stack.enter_context(servers.object_server(path / "objects"))
            os.environ["AWS_ACCESS_KEY_ID"] = servers.ACCESS_KEY
            os.environ["AWS_SECRET_ACCESS_KEY"] = servers.SECRET_KEY
            config = {"type": "object", "url": f"s3://{servers.BUCKET}/store", "endpoint": address}
            configs["object"] = [{**config, "region": "us-east-1", "timeout_seconds": 60}]
            bare["bare object"] = BareObject(address, servers.BUCKET)
        chosen = [name for name in configs if not only or name in only]
        yield (
            {name: lambda name=name: make(configs[name]) for name in chosen},
            {name: medium for name, medium in bare.items() if name in map(BARE.get, chosen)},
        )


def make(configs: list[dict]) -> Store:
    return create_store(configs[0]) if len(configs) == 1 else create_stack(configs)


class PlainFiles:
    """What a disk store cannot beat: one file a blob, written and read with no more than that."""

    def __init__(self, path: Path) -> None:
        self._path = path / "plain"
        self._path.mkdir()

    def put(self, key: bytes, blob: bytes) -> bool:
        with open(self._path / key.hex(), "wb", buffering=0) as file:
            file.write(blob)
        return True

    def get(self, key: bytes) -> bytes:
        with open(self._path / key.hex(), "rb", buffering=0) as file:
            return file.read()

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            os.unlink(self._path / key.hex())


class BareValkey:
    """SET and GET as the protocol has them, into a buffer that is there already."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._own = threading.local()

    def _connection(self) -> socket.socket:
        if not hasattr(self._own, "socket"):
            self._own.socket = socket.create_connection(("127.0.0.1", self._port))
            self._own.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._own.buffer = memoryview(bytearray((max(BLOB_BYTES)) + 64))
        return self._own.socket

    def put(self, key: bytes, blob: bytes) -> bool:
        connection = self._connection()
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(blob))
        connection.sendall(head)
        connection.sendall(blob)
        connection.sendall(b"\r\n")
        return connection.recv(64) == b"+OK\r\n"

    def get(self, key: bytes) -> memoryview:
        connection = self._connection()
        connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key))
        buffer, received, wanted = self._own.buffer, 0, None
        while wanted is None or received < wanted:
            received += connection.recv_into(buffer[received:])
            if wanted is None and (end := bytes(buffer[: min(received, 32)]).find(b"\r\n")) > 0:
                wanted = end + 4 + int(buffer[1:end])
        return buffer[:received]

    def remove(self, keys: Sequence[bytes]) -> None:
        connection = self._connection()
        words = b"".join(b"$%d\r\n%b\r\n" % (len(key), key) for key in keys)
        connection.sendall(b"*%d\r\n$6\r\nUNLINK\r\n" % (len(keys) + 1) + words)
        connection.recv(64)


class BareObject:
    """PUT and GET of addresses that were signed before the clock began."""

    def __init__(self, address: str, bucket: str) -> None:
        from obstore.store import S3Store

        self._host = urlsplit(address).netloc
        self._bucket = S3Store(
            bucket, endpoint=address, region="us-east-1", client_options={"allow_http": True}
        )
        self._signed: dict[tuple[str, bytes], str] = {}
        self._own = threading.local()

    def prepare(self, keys: Sequence[bytes]) -> None:
        from datetime import timedelta

        import obstore

        paths = [f"bare/{key.hex()}" for key in keys]
        for method in ("PUT", "GET"):
            urls = obstore.sign(self._bucket, method, paths, timedelta(hours=1))
            for key, url in zip(keys, urls, strict=True):
                parts = urlsplit(url)
                self._signed[method, key] = f"{parts.path}?{parts.query}"

    def _ask(self, method: str, key: bytes, body: bytes | None = None) -> bytes:
        if not hasattr(self._own, "connection"):
            self._own.connection = http.client.HTTPConnection(self._host)
        self._own.connection.request(method, self._signed[method, key], body)
        answer = self._own.connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return content

    def put(self, key: bytes, blob: bytes) -> bool:
        self._ask("PUT", key, blob)
        return True

    def get(self, key: bytes) -> bytes:
        return self._ask("GET", key)

    def remove(self, keys: Sequence[bytes]) -> None:
        import obstore

        obstore.delete(self._bucket, [f"bare/{key.hex()}" for key in keys])


def seconds(action: Callable[[bytes], object], keys: list[bytes], threads: int = 1) -> float:
    """Wall-clock time of ``action`` over all keys."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        # One by one: what is read is dropped, as a decoder does, and its memory used again.
        each = pool.map(lambda key: bool(action(key)), keys) if threads > 1 else map(action, keys)
        done = all(each)
        elapsed = time.perf_counter() - start
    assert done
    return elapsed


def throughput(stores: dict[str, object], blob_bytes: int, total: int, threads: int) -> dict:
    """Per store, GB/s and microseconds an operation; the stores take turns, the median counts."""
    keys = make_keys(min(max(total // blob_bytes, threads), MOST_KEYS))
    blob = random.Random(1).randbytes(blob_bytes)
    times = {name: ([], []) for name in stores}
    for store in stores.values():
        if isinstance(store, BareObject):
            store.prepare(keys)
    for _ in range(3):
        for name, store in stores.items():
            times[name][0].append(seconds(lambda key: store.put(key, blob), keys, threads))  # noqa: B023
            times[name][1].append(seconds(store.get, keys, threads))
            store.remove(keys)
    rows = {}
    for name, (puts, gets) in times.items():
        rows[name] = {}
        for operation, elapsed in (
            ("put", statistics.median(puts)),
            ("get", statistics.median(gets)),
        ):
            rows[name][operation] = {
                "gigabytes_per_second": len(keys) * blob_bytes / elapsed / 1e9,
                "microseconds": 1e6 * elapsed / len(keys),
            }
    return rows


def many_keys(make_store: Maker, blob_bytes: int) -> dict:
    """Lookup of 500 keys, half of them missing, and start, with 10,000 keys."""
    store, keys = make_store(), make_keys(KEYS)
    blob = random.Random(4).randbytes(blob_bytes)
    seconds(lambda key: store.put(key, blob), keys, threads=4)
    wanted = random.Random(2).sample(keys, LOOKUP // 2) + make_keys(LOOKUP // 2, seed=3)
    lookups = []
    for _ in range(20):
        start = time.perf_counter()
        assert sum(store.contains(wanted)) == LOOKUP // 2
        lookups.append(time.perf_counter() - start)
    figures = {
        "bytes": KEYS * blob_bytes,
        "contains_milliseconds": 1e3 * statistics.median(lookups),
    }
    if store.shared:
        starts, first = [], []
        for _ in range(3):
            start = time.perf_counter()
            again = make_store()
            starts.append(time.perf_counter() - start)
            assert sum(again.contains(wanted)) == LOOKUP // 2
            first.append(time.perf_counter() - start - starts[-1])
        figures["start_milliseconds"] = 1e3 * statistics.median(starts)
        figures["first_contains_milliseconds"] = 1e3 * statistics.median(first)
    store.clear()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, help="a directory of the file system to measure")
    parser.add_argument("--megabytes", type=int, default=256, help="bytes written a figure")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="these stores")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()

    figures: dict = {"throughput": [], "many_keys": {}}
    with (
        tempfile.TemporaryDirectory(dir=arguments.path) as directory,
        running(Path(directory), arguments.only) as (makers, bare),
    ):
        stores: dict[str, object] = {**bare, **{name: make() for name, make in makers.items()}}
        print(f"{'blob':>9} {'threads':>7}  {'store':<17}{'put':>12}{'get':>31}   (x: to the bare)")
        for blob_bytes in BLOB_BYTES:
            for threads in THREADS:
                rows = throughput(stores, blob_bytes, arguments.megabytes << 20, threads)
                figures["throughput"].append(
                    {"blob_bytes": blob_bytes, "threads": threads, "stores": rows}
                )
                for name, row in rows.items():
                    print(f"{blob_bytes / 1024:>5.0f} KiB {threads:>7}  {name:<17}", end="")
                    for operation, figure in row.items():
                        speed = figure["gigabytes_per_second"]
                        print(f"{figure['microseconds']:9.0f} us {speed:7.2f} GB/s", end="")
                        ratio = ""
                        if name in BARE:
                            own = rows[BARE[name]][operation]["gigabytes_per_second"]
                            ratio = f"{speed / own:5.2f}x"
                        print(f"{ratio:>7}", end="")
                    print()

        print(f"\n{KEYS} keys: lookup of {LOOKUP}, half of them missing, and start")
        for name, make_store in makers.items():
            blob_bytes = KEY_BLOB_BYTES.get(name, GIGABYTE // KEYS)
            figures["many_keys"][name] = row = many_keys(make_store, blob_bytes)
            print(f"  {name:<17} {row['bytes'] / 1e9:.3f} GB, lookup ", end="")
            print(f"{row['contains_milliseconds']:.2f} ms", end="")
            if "start_milliseconds" in row:
                print(f", start {row['start_milliseconds']:.0f} ms, and the first lookup ", end="")
                print(f"{row['first_contains_milliseconds']:.2f} ms", end="")
            print()
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
