"""A busy engine whose only disk fails: every request ends with the right answer, nothing grows, and
the store heals by itself."""

from __future__ import annotations

import os
import threading

import pytest

from tests.engine.conftest import running_engine
from tests.engine.outages import DISK_OUTAGES, LOAD, threads_of_the_engine, wait_until_healed


@pytest.mark.parametrize("outage", DISK_OUTAGES)
def test_requests_under_load_outlive_a_broken_disk_and_the_store_heals(
    llama, small_file_system, outage
):
    begin, end = DISK_OUTAGES[outage]
    store = {"type": "disk", "path": f"{small_file_system}/store", "bytes": "512KiB"}
    with running_engine(llama, {"codec": "raw", "stores": [store], "retry_seconds": 0.2}) as engine:
        expected = [answer.tokens for answer in engine.generate(*LOAD)]
        wait_until_healed(engine)
        threads, files = threads_of_the_engine(), len(os.listdir("/proc/self/fd"))
        timer = threading.Timer(0.1, begin, (small_file_system,))
        timer.start()
        for _ in range(4):
            engine.forget_local()
            assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
        timer.join()
        engine.forget_local()
        assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
        end(small_file_system)

        wait_until_healed(engine)
        engine.forget_local()
        assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
        assert threads_of_the_engine() <= threads
        assert len(os.listdir("/proc/self/fd")) <= files
