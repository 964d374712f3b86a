"""How stores work together: what moves up, what moves down, and what a failure does."""

import pytest

from vllm_kvcompress.stores import StoreError, StoreStack
from vllm_kvcompress.stores import stack as stack_module
from vllm_kvcompress.stores.memory import MemoryStore


class FailingStore(MemoryStore):
    """A memory store whose input and output fail while ``broken`` is set."""

    broken = False

    def contains(self, keys):
        self._check()
        return super().contains(keys)

    def get(self, key):
        self._check()
        return super().get(key)

    def put(self, key, blob):
        self._check()
        return super().put(key, blob)

    def remove(self, keys):
        self._check()
        super().remove(keys)

    def clear(self):
        self._check()
        super().clear()

    def _check(self):
        if self.broken:
            raise StoreError("broken")


class SharedStore(MemoryStore):
    shared = True

    def close(self):
        pass


@pytest.fixture
def top():
    return FailingStore(bytes=10)


@pytest.fixture
def bottom():
    return FailingStore(bytes=100)


def test_put_writes_through(top, bottom):
    stack = StoreStack([top, bottom])
    assert stack.put(b"a", b"blob")
    assert top.get(b"a") == bottom.get(b"a") == b"blob"


def test_a_blob_too_large_for_the_top_is_held_below(top, bottom):
    for write_back in (False, True):
        stack = StoreStack([top, bottom], write_back=write_back)
        assert stack.put(b"a", bytes(50))
        assert stack.get(b"a") == bytes(50)
        assert top.keys() == []


def test_a_hit_below_moves_up_and_counts_once(top, bottom):
    middle = MemoryStore(bytes=50)
    stack = StoreStack([top, middle, bottom])
    bottom.put(b"a", b"blob")
    assert stack.get(b"a") == b"blob"
    assert top.keys() == middle.keys() == bottom.keys() == [b"a"]
    stack.get(b"a")
    stats = stack.stats()
    assert (stats.hits, stats.misses) == (2, 0)
    assert (top.stats().hits, bottom.stats().hits) == (1, 1)


def test_evictions_move_down_unless_held_there(top, bottom):
    stack = StoreStack([top, bottom])
    stack.put(b"a", b"aaaa")
    stack.put(b"b", b"bbbb")
    bottom.remove([b"a"])
    bottom_puts = []
    bottom.put = lambda key, blob, put=bottom.put: bottom_puts.append(key) or put(key, blob)
    stack.put(b"c", b"cccc")
    stack.put(b"d", b"dddd")
    assert top.keys() == [b"c", b"d"]
    assert sorted(bottom.keys()) == [b"a", b"b", b"c", b"d"]
    assert bottom_puts == [b"a", b"c", b"d"]


def test_evictions_of_the_bottom_leave_the_stack(top):
    stack = StoreStack([top, MemoryStore(bytes=15)])
    left = []
    stack.on_evict = lambda key, blob: left.append((key, blob))
    for key in (b"a", b"b", b"c", b"d", b"e"):
        stack.put(key, key * 5)
    assert left == [(b"a", b"aaaaa"), (b"b", b"bbbbb")]
    assert stack.stats().evictions == 2


def test_write_back_keeps_to_the_top_until_close(top):
    bottom = SharedStore(bytes=100)
    stack = StoreStack([top, bottom], write_back=True)
    stack.put(b"a", b"aaaa")
    stack.put(b"b", b"bbbb")
    assert bottom.keys() == []
    stack.put(b"c", b"cccc")
    assert bottom.keys() == [b"a"]
    stack.close()
    assert bottom.keys() == [b"a", b"b", b"c"]
    assert [bottom.get(key) for key in (b"a", b"b", b"c")] == [b"aaaa", b"bbbb", b"cccc"]


def test_write_back_brings_down_the_newer_blob(top):
    bottom = SharedStore(bytes=100)
    stack = StoreStack([top, bottom], write_back=True)
    bottom.put(b"a", b"old")
    bottom.put(b"b", b"old")
    stack.put(b"a", b"newer")
    stack.put(b"b", b"newer")
    stack.put(b"c", b"cccc")
    assert bottom.get(b"a") == b"newer"
    stack.close()
    assert bottom.get(b"b") == b"newer"


def test_close_brings_down_what_the_bottom_has_lost(top):
    bottom = SharedStore(bytes=100)
    stack = StoreStack([top, bottom])
    stack.put(b"a", b"aaaa")
    bottom.remove([b"a"])
    stack.close()
    assert bottom.get(b"a") == b"aaaa"


def test_close_does_not_wait_for_ever_for_a_slow_store(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(stack_module.time, "monotonic", lambda: next(clock))
    bottom = SharedStore(bytes=1000)
    stack = StoreStack([MemoryStore(bytes=1000), bottom], write_back=True)
    for number in range(20):
        stack.put(b"%d" % number, b"blob")
    stack.close()
    assert 1 <= len(bottom.keys()) <= 3


@pytest.mark.parametrize("write_back", [False, True], ids=["write-through", "write-back"])
def test_a_failing_lower_store_never_breaks_the_upper(top, bottom, write_back):
    stack = StoreStack([top, bottom], write_back=write_back)
    bottom.broken = True
    for key in (b"a", b"b", b"c"):
        assert stack.put(key, b"blob")
    assert stack.contains([b"b", b"c", b"x"]) == [True, True, False]
    assert stack.get(b"c") == b"blob"
    with pytest.raises(StoreError, match="broken"):
        stack.get(b"x")
    bottom.broken = False
    assert stack.get(b"x") is None
    assert stack.put(b"d", b"blob") and stack.get(b"d") == b"blob"


def test_a_failing_upper_store_is_passed_over(top, bottom):
    stack = StoreStack([top, bottom])
    top.broken = True
    assert stack.put(b"a", b"blob")
    assert stack.contains([b"a"]) == [True]
    assert stack.get(b"a") == b"blob"
    assert stack.stats().hits == 1
    top.broken = False
    assert stack.get(b"a") == b"blob"
    assert top.keys() == [b"a"]


def test_all_stores_failing(top, bottom):
    stack = StoreStack([top, bottom])
    top.broken = bottom.broken = True
    assert not stack.put(b"a", b"blob")
    assert stack.contains([b"a"]) == [False]
    with pytest.raises(StoreError, match=r"broken.*broken"):
        stack.get(b"a")


def test_remove_and_clear_reach_the_stores_that_work(top, bottom):
    stack = StoreStack([top, bottom])
    for action in (lambda: stack.remove([b"a"]), stack.clear):
        top.broken = False
        stack.put(b"a", b"blob")
        top.broken = True
        with pytest.raises(StoreError, match="broken"):
            action()
        assert bottom.keys() == []


def test_shared_if_any_store_is():
    assert not StoreStack([MemoryStore(bytes=1)]).shared
    assert StoreStack([MemoryStore(bytes=1), SharedStore(bytes=1)]).shared


def test_stats_sum_the_stores(top, bottom):
    stack = StoreStack([top, bottom])
    stack.put(b"a", b"blob")
    stack.put(b"b", bytes(50))
    stats = stack.stats()
    assert (stats.name, stats.entries, stats.bytes_held) == ("stack", 3, 58)
    assert (stats.capacity_bytes, stats.refused) == (110, 1)


def test_keys_of_lower_stores_come_first(top, bottom):
    stack = StoreStack([top, bottom])
    for key in (b"a", b"b", b"c"):
        stack.put(key, b"blob")
    assert stack.keys() == [b"a", b"b", b"c"]


def test_the_stack_tells_what_only_the_shared_stores_can_still_have():
    top, middle, disk = MemoryStore(bytes=10), MemoryStore(bytes=20), SharedStore(bytes=100)
    stack = StoreStack([top, middle, disk])
    forgotten = []
    stack.on_forget = forgotten.append
    for key in (b"a", b"b", b"c"):
        stack.put(key, bytes(8))
    assert forgotten == [b"a"]  # the top forgot b too, but the middle holds it
    assert disk.contains([b"a", b"b", b"c"]) == [True] * 3
    assert disk.on_evict is None  # nobody asked, so a disk reads nothing


def test_a_stack_of_memory_alone_tells_what_it_evicts():
    stack = StoreStack([MemoryStore(bytes=10)])
    forgotten, evicted = [], []
    stack.on_forget = forgotten.append
    stack.on_evict = lambda key, blob: evicted.append((key, blob))
    stack.put(b"a", bytes(8))
    stack.put(b"b", bytes(8))
    assert forgotten == [b"a"]
    assert evicted == [(b"a", bytes(8))]
