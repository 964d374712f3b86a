"""Fixtures that every test may use."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import servers

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""Which of the processes that share the machine this one is."""

if "PYTEST_XDIST_WORKER" in os.environ:
    # Threads that spin while they wait would take the other processes' cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """What a command tells vLLM in its own process must not reach the next test."""
    before = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    yield
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The checkpoint of SmolLM2-135M-Instruct that `make setup` makes."""
    path = ROOT / ".cache" / "smollm2-135m"
    if not (path / "model.safetensors").is_file():
        message = "the test model is not there: run `make setup`"
        # Where tests gate a change, a test that cannot run must not look like one that passed.
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path


@contextmanager
def megabyte(folder: Path) -> Iterator[str]:
    """A file system of one megabyte in a folder."""
    target = str(folder / "mounted")
    os.mkdir(target)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", target.encode(), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip("mounting a file system needs a privilege")
    try:
        yield target
    finally:
        libc.umount2(target.encode(), 2)


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[str]:
    with megabyte(tmp_path) as path:
        yield path


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.ValkeyServer]:
    """A server that tests share: each takes a namespace of its own and leaves the server as is."""
    with servers.valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Settings of a store in a bucket that tests share, each in a namespace of its own."""
    with (
        servers.object_server(tmp_path_factory.mktemp("objects")) as address,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("AWS_ACCESS_KEY_ID", servers.ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET_KEY)
        yield {
            "type": "object",
            "url": f"s3://{servers.BUCKET}/store",
            "endpoint": address,
            "region": "us-east-1",
        }
