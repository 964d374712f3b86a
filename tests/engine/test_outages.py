"""A busy engine whose only store fails in one way after another: every request ends with the right
answer, nothing grows, and the store heals by itself."""

from __future__ import annotations

import threading
import time

import pytest

from tests import servers
from tests.engine.conftest import CHUNK, prompt, running_engine
from tests.engine.outages import (
    LOAD,
    OUTAGES,
    threads_of_the_engine,
    valkey_store,
    wait_until_healed,
)
from vllm_kvcompress.stores import remote


@pytest.fixture(scope="module")
def short_pauses():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "FIRST_PAUSE", 0.2)
        patch.setattr(remote, "LONGEST_PAUSE", 0.2)
        yield


@pytest.fixture(scope="module")
def strained(llama, short_pauses, tmp_path_factory):
    """An engine, the link to its only store, the store's server, and the answers to ``LOAD``."""
    with servers.valkey_server(tmp_path_factory.mktemp("server")) as server:
        link = servers.Link(server.port)
        offload = {
            "codec": "raw",
            "stores": [valkey_store(link.port)],
            "retry_seconds": 0.2,
            "lookup_seconds": 0.1,
        }
        with running_engine(llama, offload) as engine:
            answers = [answer.tokens for answer in engine.generate(*LOAD)]
            yield engine, link, server, answers
        link.down()


@pytest.mark.parametrize("outage", OUTAGES)
def test_requests_under_load_outlive_an_outage_and_the_store_heals(strained, outage):
    engine, link, server, expected = strained
    wait_until_healed(engine)
    threads = threads_of_the_engine()
    errors = engine.metrics().get("store_errors", 0)
    timer = threading.Timer(0.1, OUTAGES[outage].begin, (link, server))
    timer.start()
    for _ in range(4):
        engine.forget_local()
        assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
    timer.join()
    engine.forget_local()
    fresh = prompt(2 * CHUNK + 5, seed=sum(outage.encode()))
    answers = engine.generate(fresh, *LOAD)
    assert [answer.tokens for answer in answers[1:]] == expected
    deadline = time.monotonic() + 60
    while engine.metrics().get("store_errors", 0) <= errors:  # a time-out may still run
        assert time.monotonic() < deadline
        engine.forget_local()
        assert [answer.tokens for answer in engine.generate(*LOAD)] == expected
    OUTAGES[outage].end(link, server)

    wait_until_healed(engine)
    engine.forget_local()
    again = engine.generate(fresh, *LOAD)
    assert [answer.tokens for answer in again] == [answers[0].tokens, *expected]
    assert threads_of_the_engine() <= threads + 4  # those of pools that had yet to start
