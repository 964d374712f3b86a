"""The scheduler's questions to shared stores: batched, on threads, and with a deadline."""

from __future__ import annotations

import threading
import time

import pytest

from vllm_kvcompress.connector import lookup as lookup_module
from vllm_kvcompress.connector.lookup import SharedLookup
from vllm_kvcompress.stores.memory import MemoryStore


class AskedStore(MemoryStore):
    """Remembers what it was asked, and waits or fails on demand."""

    shared = True

    def __init__(self, *keys: bytes) -> None:
        super().__init__(bytes=1000)
        self.asked: list[list[bytes]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.fails = False
        self.closed = False
        for key in keys:
            self.put(key, b"blob")

    def contains(self, keys):
        self.asked.append(list(keys))
        assert self.may_answer.wait(60)
        if self.fails:
            raise RuntimeError("told to fail")
        return super().contains(keys)

    def close(self):
        self.closed = True


@pytest.fixture
def making():
    made = []

    def make(*stores, deadline=60.0):
        made.append(SharedLookup(stores, deadline))
        made[-1].stores = stores
        return made[-1]

    yield make
    for lookup in made:
        for store in lookup.stores:
            store.may_answer.set()
        lookup.close()


def settled(answer):
    answer.wait(30)
    return answer


def test_one_question_covers_all_keys_and_the_answers_of_the_stores_are_united(making):
    one, two = AskedStore(b"a"), AskedStore(b"b")
    answer = settled(making(one, two).ask([b"a", b"b", b"c"]))
    assert [key in answer for key in (b"a", b"b", b"c")] == [True, True, False]
    assert [len(store.asked) for store in (one, two)] == [1, 1]
    assert not answer.is_pending(time.monotonic())


def test_questions_that_wait_for_a_busy_store_are_put_together(making):
    store = AskedStore(b"a", b"b")
    lookup = making(store)
    store.may_answer.clear()
    answers = [lookup.ask([b"x"])]
    while not store.asked:
        time.sleep(0.001)
    answers += [lookup.ask([key]) for key in (b"a", b"b", b"a", b"c")]
    store.may_answer.set()
    for answer in answers:
        settled(answer)
    assert [sorted(keys) for keys in store.asked] == [[b"x"], [b"a", b"b", b"c"]]
    assert b"a" in answers[1] and b"b" in answers[2] and b"a" in answers[3]
    assert b"a" not in answers[2]


def test_a_store_that_hangs_is_pending_until_the_deadline_and_then_asked_nothing(making):
    store, other = AskedStore(b"a"), AskedStore(b"b")
    lookup = making(store, other, deadline=0.2)
    store.may_answer.clear()
    answer = lookup.ask([b"a", b"b"])
    while b"b" not in answer:
        time.sleep(0.001)
    now = time.monotonic()
    assert answer.is_pending(now - 60)
    assert not answer.is_pending(now + 60)
    time.sleep(0.25)
    later = settled(lookup.ask([b"a", b"b"]))
    # Only the store that answers was asked, and nothing is waited for.
    assert b"b" in later and b"a" not in later
    assert len(store.asked) == 1
    store.may_answer.set()
    deadline = time.monotonic() + 30
    while b"a" not in settled(lookup.ask([b"a"])) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert b"a" in settled(lookup.ask([b"a"]))


def test_a_store_that_raises_holds_nothing_and_is_asked_again(making):
    store = AskedStore(b"a")
    lookup = making(store)
    store.fails = True
    assert b"a" not in settled(lookup.ask([b"a"]))
    store.fails = False
    assert b"a" in settled(lookup.ask([b"a"]))


def test_an_answer_is_stale_some_time_after_its_first_use_however_late_that_was(making):
    answer = settled(making(AskedStore(b"a")).ask([b"a"]))
    late = time.monotonic() + 1000
    assert not answer.is_stale(late)
    assert not answer.is_stale(late + lookup_module.FRESH_SECONDS / 2)
    assert answer.is_stale(late + lookup_module.FRESH_SECONDS * 2)


def test_keys_are_removed_in_their_turn_and_a_close_waits_for_that(making):
    store = AskedStore(b"aa", b"ab", b"b")
    lookup = making(store)
    store.may_answer.clear()
    before = lookup.ask([b"aa"])
    lookup.remove_prefix(b"a")
    store.may_answer.set()
    lookup.close()
    assert b"aa" in before
    assert store.keys() == [b"b"] and store.closed


def test_a_close_leaves_a_store_that_hangs_behind(making, monkeypatch):
    monkeypatch.setattr(lookup_module, "CLOSE_SECONDS", 0.1)
    store = AskedStore()
    lookup = making(store)
    store.may_answer.clear()
    lookup.ask([b"a"])
    lookup.close()
    assert not store.closed


def test_without_stores_an_answer_is_there_at_once(making):
    answer = making().ask([b"a"])
    assert b"a" not in answer and not answer.is_pending(0)
