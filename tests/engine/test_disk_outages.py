"""A busy engine whose only disk fails in one way after another: every request ends with the right
answer, nothing grows, and the store heals by itself."""

from __future__ import annotations

import os
import threading

import pytest

from tests.conftest import megabyte
from tests.engine.conftest import running_engine
from tests.engine.outages import DISK_OUTAGES, LOAD, threads_of_the_engine, wait_until_healed


@pytest.fixture(scope="module")
def strained(llama, tmp_path_factory):
    """An engine, the file system under its only store, and the answers to ``LOAD``."""
    with megabyte(tmp_path_factory.mktemp("disk")) as path:
        store = {"type": "disk", "path": f"{path}/store", "bytes": "512KiB"}
        offload = {"codec": "raw", "stores": [store], "retry_seconds": 0.2}
        with running_engine(llama, offload) as engine:
            yield engine, path, [answer.tokens for answer in engine.generate(*LOAD)]


@pytest.mark.parametrize("outage", DISK_OUTAGES)
def test_requests_under_load_outlive_a_broken_disk_and_the_store_heals(strained, outage):
    engine, path, expected = strained
    begin, end = DISK_OUTAGES[outage]
    wait_until_healed(engine)
    threads, files = threads_of_the_engine(), len(os.listdir("/proc/self/fd"))
    timer = threading.Timer(0.1, begin, (path,))
    timer.start()
    for _ in range(4):
        engine.forget_local()
        assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
    timer.join()
    engine.forget_local()
    assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
    end(path)

    wait_until_healed(engine)
    engine.forget_local()
    assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
    assert threads_of_the_engine() <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
