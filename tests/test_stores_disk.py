"""The disk store alone: restarts, other processes, killed writers and failing disks."""

import ctypes
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from vllm_kvcompress.stores import StoreConfigError, StoreError, create_stack, disk
from vllm_kvcompress.stores.disk import MARKER, DiskStore


def keys_of(count, seed=0):
    chance = random.Random(seed)
    return [chance.randbytes(48) for _ in range(count)]


def files_below(path, suffix):
    return [
        os.path.join(directory, name)
        for directory, _, names in os.walk(path)
        for name in names
        if name.endswith(suffix)
    ]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store")


def test_restart_keeps_blobs_sizes_and_order(path):
    store = DiskStore(path, bytes=1000)
    keys = keys_of(5)
    for key in keys:
        store.put(key, key * 2)
    store.get(keys[0])
    order = store.keys()
    again = DiskStore(path, bytes=1000)
    assert again.keys() == order == keys[1:] + keys[:1]
    assert again.stats().bytes_held == 5 * 96
    assert all(again.get(key) == key * 2 for key in keys)


def test_restart_with_a_smaller_bound_evicts_the_oldest(path):
    store = DiskStore(path, bytes=1000)
    keys = keys_of(5)
    for key in keys:
        store.put(key, bytes(100))
    again = DiskStore(path, bytes=250)
    assert again.keys() == keys[3:]
    assert len(files_below(path, ".kv")) == 2


def test_files_are_spread_and_foreign_files_are_left_alone(path):
    store = DiskStore(path, bytes=10**6)
    keys = keys_of(500)
    for key in keys:
        store.put(key, b"blob")
    directories = {os.path.dirname(name) for name in files_below(path, ".kv")}
    assert len(directories) > 150
    foreign = [
        os.path.join(path, "notes.txt"),
        os.path.join(min(directories), "notes.txt"),
        os.path.join(min(directories), "nothex.kv"),
        os.path.join(min(directories), "ABCD.kv"),
        os.path.join(min(directories), "zzz.kv"),
    ]
    for name in foreign:
        with open(name, "w") as file:
            file.write("mine")
    again = DiskStore(path, bytes=10**6)
    assert sorted(again.keys()) == sorted(keys)
    again.clear()
    assert files_below(path, ".kv") and all(map(os.path.exists, foreign))
    assert again.contains(keys) == [False] * 500


def test_no_key_leaves_the_directory(path, tmp_path):
    store = DiskStore(path, bytes=10**6)
    for key in (b"../../x", b"/etc/passwd", b"\0", b"..", b"a/b"):
        store.put(key, b"blob")
    assert os.listdir(tmp_path) == ["store"]
    assert len(files_below(path, ".kv")) == 5


def test_start_and_lookup_are_quick_with_ten_thousand_keys(path):
    # Processor time, which other load on the machine does not change.
    store = DiskStore(path, bytes="1GiB")
    keys = keys_of(10_000)
    store.put(keys[0], b"blob")
    (first,) = files_below(path, ".kv")
    for key in keys[1:]:
        name = store._blob_path(key)
        os.makedirs(os.path.dirname(name), exist_ok=True)
        os.link(first, name)
    times = []
    for _ in range(3):
        start = time.process_time()
        again = DiskStore(path, bytes="1GiB")
        times.append(time.process_time() - start)
    assert min(times) < 1
    assert again.stats().entries == 10_000
    wanted = keys[:250] + keys_of(250, seed=1)
    times = []
    for _ in range(5):
        start = time.process_time()
        assert again.contains(wanted) == [True] * 250 + [False] * 250
        times.append(time.process_time() - start)
    assert min(times) < 0.010


def test_namespaces_share_nothing(path):
    one = DiskStore(path, bytes=1000, namespace="one")
    two = DiskStore(path, bytes=1000, namespace="two")
    plain = DiskStore(path, bytes=1000)
    for number, store in enumerate((one, two, plain)):
        assert store.get(b"a") is None
        store.put(b"a", bytes([number]))
    plain.clear()
    assert (one.get(b"a"), two.get(b"a"), plain.get(b"a")) == (b"\0", b"\1", None)
    plain.put(b"a", b"\2")
    one.clear()
    assert (one.get(b"a"), two.get(b"a"), plain.get(b"a")) == (None, b"\1", b"\2")
    assert DiskStore(path, bytes=1000, namespace="two").keys() == [b"a"]


@pytest.mark.parametrize("namespace", ["..", ".a", "a/b", 7, None, "a\0", "x" * 65], ids=repr)
def test_bad_namespaces_are_named(path, namespace):
    with pytest.raises(StoreConfigError, match=r"^namespace: "):
        DiskStore(path, bytes=10, namespace=namespace)


def test_each_sees_what_the_other_stores_and_evicts(path):
    one, two = DiskStore(path, bytes=1000), DiskStore(path, bytes=1000)
    one.put(b"a", b"blob")
    assert two.contains([b"a", b"b"]) == [True, False]
    assert two.get(b"a") == b"blob"
    assert two.stats().bytes_held == 4
    two.remove([b"a"])
    assert one.contains([b"a"]) == [False]
    assert one.get(b"a") is None
    assert one.stats().bytes_held == 0


def test_eviction_respects_use_by_the_other(path):
    one, two = DiskStore(path, bytes=1000), DiskStore(path, bytes=1000)
    for key in (b"a", b"b", b"c"):
        one.put(key, bytes(300))
    two.get(b"a")
    one.put(b"d", bytes(300))
    assert one.contains([b"a", b"b", b"c", b"d"]) == [True, False, True, True]
    assert one.stats().evictions == 1


def test_the_bound_holds_for_both_together(path):
    one, two = DiskStore(path, bytes=16_000), DiskStore(path, bytes=16_000)
    for number, key in enumerate(keys_of(400)):
        (one if number % 2 else two).put(key, bytes(100))
    total = sum(map(os.path.getsize, files_below(path, ".kv")))
    assert 14_000 <= total <= 16_000 + 2 * 1000 + 2 * 100
    one.refresh()
    assert one.stats().bytes_held == total


def test_a_scan_keeps_what_changes_meanwhile(path, monkeypatch):
    store = DiskStore(path, bytes=10_000)
    store.put(b"removed", b"1")
    store.put(b"replaced", b"22")
    store.put(b"kept", b"333")
    scan = disk._scan_blobs

    def scan_and_change(root):
        found = list(scan(root))
        store.remove([b"removed"])
        store.put(b"replaced", b"4444")
        store.put(b"new", b"55555")
        return iter(found)

    monkeypatch.setattr(disk, "_scan_blobs", scan_and_change)
    store.refresh()
    assert sorted(store.keys()) == [b"kept", b"new", b"replaced"]
    assert store.stats().bytes_held == 3 + 4 + 5


def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(path):
    store = DiskStore(path, bytes=1000)
    store.put(b"a", b"blob")
    directory = os.path.dirname(files_below(path, ".kv")[0])
    dead = [os.path.join(directory, "0123.tmp"), os.path.join(path, "4567.tmp")]
    for name in dead:
        with open(name, "w") as file:
            file.write("half a blo")
    with disk._temporary_file(directory) as (_, living):
        DiskStore(path, bytes=1000)
        assert not any(map(os.path.exists, dead)) and os.path.exists(living)
        os.unlink(living)


def test_memory_evictions_reach_the_disk_that_evicted_them_before(path):
    stack = create_stack(
        [{"type": "memory", "bytes": 300}, {"type": "disk", "path": path, "bytes": 10_000}]
    )
    stack.put(b"a", bytes(200))
    stack.stores[1].remove([b"a"])
    stack.put(b"b", bytes(200))
    assert stack.stores[1].get(b"a") == bytes(200)
    stack.put(b"c", bytes(200))
    stack.close()
    assert sorted(DiskStore(path, bytes=10_000).keys()) == [b"a", b"b", b"c"]


WRITER = """
import hashlib, random, sys
from vllm_kvcompress.stores.disk import DiskStore

path, seed, count, size = sys.argv[1], *map(int, sys.argv[2:])
chance = random.Random(seed)
store = DiskStore(path, bytes=20 * size)
print("ready", flush=True)
done = 0
while done != count:
    done += 1
    key = b"key %d" % chance.randrange(40)
    blob = store.get(b"key %d" % chance.randrange(40))
    assert blob is None or hashlib.blake2b(blob[16:], digest_size=16).digest() == blob[:16]
    body = chance.randbytes(size - chance.randrange(size // 4) - 16)
    assert store.put(key, hashlib.blake2b(body, digest_size=16).digest() + body)
print("errors", store.stats().errors, flush=True)
"""


def start_writer(path, seed, count, size):
    arguments = [sys.executable, "-c", WRITER, path, *map(str, (seed, count, size))]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def assert_only_whole_blobs(path, capacity):
    """Open the directory as a server does after a restart and read everything; returns how many."""
    store = DiskStore(path, bytes=capacity)
    assert not files_below(path, ".tmp")
    keys = store.keys()
    sizes = []
    for key in keys:
        blob = store.get(key)
        assert hashlib.blake2b(blob[16:], digest_size=16).digest() == blob[:16]
        sizes.append(len(blob))
    assert store.stats().bytes_held == sum(sizes) <= capacity
    return len(keys)


def test_a_writer_killed_at_any_moment_leaves_only_whole_blobs(path):
    size, chance = 1 << 20, random.Random(7)
    for seed in range(25):
        process = start_writer(path, seed, -1, size)
        time.sleep(chance.uniform(0, 0.06))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        held = assert_only_whole_blobs(path, 20 * size)
    assert held > 0


KILLED_INSIDE = """
import os, signal, sys
from vllm_kvcompress.stores.disk import DiskStore

path, step, moment = sys.argv[1:]
store = DiskStore(path, bytes=1 << 20)
assert store.put(b"before", bytes(1000))
real = getattr(os, step)

def fatal(*arguments, **options):
    if moment == "after":
        real(*arguments, **options)
    elif step == "write":
        real(arguments[0], arguments[1][:500])
    os.kill(os.getpid(), signal.SIGKILL)

setattr(os, step, fatal)
store.put(b"killed", bytes(1000))
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_writer_killed_inside_a_write_leaves_its_blob_whole_or_not_at_all(path, step, moment):
    process = subprocess.run([sys.executable, "-c", KILLED_INSIDE, path, step, moment])
    assert process.returncode == -signal.SIGKILL
    renamed = (step, moment) == ("rename", "after")
    assert len(files_below(path, ".tmp")) == (0 if renamed else 1)
    store = DiskStore(path, bytes=1 << 20)
    assert not files_below(path, ".tmp")
    assert store.get(b"before") == bytes(1000)
    assert store.get(b"killed") == (bytes(1000) if renamed else None)


def test_two_processes_share_a_directory(path):
    size = 10_000
    writers = [start_writer(path, seed, 300, size) for seed in (1, 2)]
    reader = DiskStore(path, bytes=20 * size)
    while any(writer.poll() is None for writer in writers):
        reader.refresh()
        known = reader.keys()
        for key in known:
            blob = reader.get(key)
            assert blob is None or hashlib.blake2b(blob[16:], digest_size=16).digest() == blob[:16]
    for writer in writers:
        assert writer.communicate()[0] == "errors 0\n"
        assert writer.returncode == 0
    total = sum(map(os.path.getsize, files_below(path, ".kv")))
    assert total <= 20 * size * (1 + 2 / 16) + 2 * size
    reader.refresh()
    assert reader.stats().bytes_held == total
    assert assert_only_whole_blobs(path, 20 * size) > 10


def test_a_missing_parent_is_told_at_start(tmp_path):
    with pytest.raises(StoreConfigError, match=r"^path: .*/missing, .*make it first"):
        DiskStore(str(tmp_path / "missing" / "store"), bytes=10)


def test_a_file_in_the_way_is_told_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreConfigError, match=r"^path: .*/file cannot be used .*not a directory"):
        DiskStore(str(tmp_path / "file"), bytes=10)
    with pytest.raises(StoreConfigError, match=r"^path: .*not a directory"):
        DiskStore(str(tmp_path / "file" / "store"), bytes=10)


def test_a_store_of_another_version_is_told_at_start(path):
    DiskStore(path, bytes=10).put(b"a", b"blob")
    marker = os.path.join(path, MARKER)
    with open(marker) as file:
        content = json.load(file)
    with open(marker, "w") as file:
        json.dump({**content, "version": 2}, file)
    with pytest.raises(StoreConfigError, match=r"^path: .* version 2, .* reads 1; give another"):
        DiskStore(path, bytes=10)
    assert files_below(path, ".kv")


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b"\xff", b'{"format": "x", "version": 1}'])
def test_a_foreign_marker_is_told_at_start(path, content):
    os.mkdir(path)
    with open(os.path.join(path, MARKER), "wb") as file:
        file.write(content)
    with pytest.raises(StoreConfigError, match=r"^path: .* is not the marker of a store"):
        DiskStore(path, bytes=10)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("existing", [False, True], ids=["new", "existing"])
def test_a_directory_that_cannot_be_written_is_told_at_start(path, monkeypatch, code, existing):
    if existing:
        DiskStore(path, bytes=10)
    break_writes(monkeypatch, code)
    with pytest.raises(StoreConfigError, match=rf"^path: {path} .*{os.strerror(code)}"):
        DiskStore(path, bytes=10)


def test_a_read_only_file_system_is_told_at_start(small_file_system):
    path = os.path.join(small_file_system, "store")
    DiskStore(path, bytes=1000)
    MS_REMOUNT_RDONLY = 32 | 1
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"", small_file_system.encode(), b"", MS_REMOUNT_RDONLY, None) == 0
    with pytest.raises(StoreConfigError, match=r"^path: .*Read-only file system"):
        DiskStore(path, bytes=1000)
    with pytest.raises(StoreConfigError, match=r"^path: .*Read-only file system"):
        DiskStore(os.path.join(small_file_system, "other"), bytes=1000)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_directory_is_told_at_start(path):
    os.mkdir(path, 0o555)
    with pytest.raises(StoreConfigError, match=r"^path: .*Permission denied"):
        DiskStore(path, bytes=10)


def test_a_full_file_system(small_file_system):
    """At start an error; at run time the oldest blobs make room, and none of it is fatal."""
    path = os.path.join(small_file_system, "store")
    store = DiskStore(path, bytes="1GiB")
    keys = keys_of(30)
    for key in keys:
        assert store.put(key, bytes(100_000))
    assert 1 <= store.stats().entries <= 10 and store.stats().evictions >= 20
    assert store.contains(keys[-1:]) == [True]
    filler = os.path.join(small_file_system, "filler")
    store.clear()
    with open(filler, "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    assert not store.put(b"a", bytes(100_000))
    assert store.stats().errors == 1
    assert not files_below(path, ".tmp")
    with pytest.raises(StoreConfigError, match=r"^path: .*No space left"):
        DiskStore(path, bytes="1GiB")
    with pytest.raises(StoreConfigError, match=r"^path: .*No space left"):
        DiskStore(os.path.join(small_file_system, "other"), bytes="1GiB")
    os.unlink(filler)
    assert store.put(b"a", bytes(100_000)) and store.get(b"a") == bytes(100_000)


def test_start_on_a_device_that_the_store_itself_has_filled(small_file_system):
    path = os.path.join(small_file_system, "store")
    store = DiskStore(path, bytes="1GiB")
    while store.stats().evictions == 0:
        store.put(os.urandom(16), bytes(4096))
    assert DiskStore(path, bytes="1GiB").stats().entries > 10


def break_writes(monkeypatch, code):
    """Let every write of the disk store fail, half of it done."""
    write, failed = os.write, OSError(code, os.strerror(code))

    def fail(descriptor, content):
        write(descriptor, content[: len(content) // 2])
        raise failed

    monkeypatch.setattr(disk.os, "write", fail)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_failing_writes_are_counted_and_heal(path, monkeypatch, code):
    store = DiskStore(path, bytes=1000)
    store.put(b"a", b"old")
    with monkeypatch.context() as context:
        break_writes(context, code)
        assert store.put(b"a", b"new") is False
        assert store.put(b"b", b"new") is False
        assert store.stats().errors == 2
        assert store.get(b"a") is None
        assert store.stats().bytes_held == 0
    assert not files_below(path, ".tmp")
    assert store.put(b"b", b"new") and store.get(b"b") == b"new"


def test_failing_reads_are_store_errors_and_heal(path, monkeypatch):
    store = DiskStore(path, bytes=1000)
    store.put(b"a", b"blob")

    def fail(descriptor, size):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as context:
        context.setattr(disk.os, "read", fail)
        with pytest.raises(StoreError, match=r"cannot read .*Input/output error"):
            store.get(b"a")
        assert store.stats().errors == 1
    assert store.get(b"a") == b"blob"


def test_a_file_larger_than_the_store_is_not_read(path):
    store = DiskStore(path, bytes=1000)
    store.put(b"a", b"blob")
    os.truncate(files_below(path, ".kv")[0], 1 << 40)
    with pytest.raises(StoreError, match="larger than the store"):
        store.get(b"a")
    assert DiskStore(path, bytes=1000).keys() == []


def test_failing_deletes_are_counted_and_heal(path, monkeypatch):
    store = DiskStore(path, bytes=1000)
    store.put(b"a", bytes(600))
    store.put(b"b", bytes(300))

    def fail(name):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as context:
        context.setattr(disk.os, "unlink", fail)
        with pytest.raises(StoreError, match="cannot remove"):
            store.remove([b"b"])
        with pytest.raises(StoreError, match="cannot clear"):
            store.clear()
        assert store.put(b"c", bytes(300))
        assert store.stats().errors == 3
    store.refresh()
    assert store.put(b"d", bytes(300))
    assert store.contains([b"a", b"b", b"c", b"d"]) == [False, True, True, True]


@pytest.mark.parametrize("namespace", ["", "one"], ids=["plain", "namespace"])
def test_a_removed_directory_is_a_miss_and_is_made_again(path, namespace):
    store = DiskStore(path, bytes=1000, namespace=namespace)
    store.put(b"a", b"blob")
    shutil.rmtree(path)
    assert store.contains([b"a"]) == [False]
    assert store.get(b"a") is None
    store.refresh()
    store.clear()
    assert store.put(b"b", b"blob") and store.get(b"b") == b"blob"
    assert DiskStore(path, bytes=1000, namespace=namespace).keys() == [b"b"]
    assert store.stats().errors == 0


def test_a_directory_removed_with_its_parent_heals_when_that_is_back(tmp_path):
    parent = tmp_path / "parent"
    parent.mkdir()
    store = DiskStore(str(parent / "store"), bytes=1000)
    store.put(b"a", b"blob")
    shutil.rmtree(parent)
    assert store.put(b"a", b"blob") is False
    assert store.get(b"a") is None
    assert store.stats().errors == 1
    parent.mkdir()
    assert store.put(b"a", b"blob") and store.get(b"a") == b"blob"


def test_a_directory_replaced_by_a_file(path):
    store = DiskStore(path, bytes=1000)
    store.put(b"a", b"blob")
    shutil.rmtree(path)
    with open(path, "w"):
        pass
    assert store.contains([b"a"]) == [False]
    with pytest.raises(StoreError, match="cannot read"):
        store.get(b"a")
    assert store.put(b"a", b"blob") is False
    with pytest.raises(StoreError, match="cannot clear"):
        store.clear()
    store.refresh()
    assert store.stats().errors == 4
    os.unlink(path)
    assert store.put(b"a", b"blob") and store.get(b"a") == b"blob"


def test_an_unmounted_device_is_not_replaced_by_the_directory_under_it(small_file_system):
    store = DiskStore(small_file_system, bytes=100_000)
    store.put(b"a", b"blob")
    ctypes.CDLL(None).umount2(small_file_system.encode(), 2)
    assert store.contains([b"a"]) == [False]
    assert store.put(b"a", b"blob") is False
    assert os.listdir(small_file_system) == []


def test_writers_and_a_scan_in_one_process(path):
    store = DiskStore(path, bytes=10_000)
    stop = threading.Event()

    def scan():
        while not stop.is_set():
            store.refresh()

    scanner = threading.Thread(target=scan)
    scanner.start()
    for number in range(500):
        assert store.put(b"key %d" % (number % 70), bytes(200))
    stop.set()
    scanner.join()
    held = store.stats().bytes_held
    assert store.stats().errors == 0
    assert held == sum(map(os.path.getsize, files_below(path, ".kv"))) == 10_000
    store.refresh()
    assert store.stats().bytes_held == held


def test_a_clock_that_jumps_costs_no_blob_that_was_just_put_and_no_bound(path, monkeypatch):
    day = 86_400 * 10**9
    real, offset = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: real() + offset[0])
    store = DiskStore(path, bytes=1000)
    for number in range(60):
        offset[0] = (0, -day, day, -300 * day)[number % 4]
        key, blob = b"%d" % number, bytes([number]) * 90
        assert store.put(key, blob) and store.get(key) == blob
        assert store.stats().bytes_held <= 1000
    again = DiskStore(path, bytes=1000)
    assert set(again.keys()) == set(store.keys())
    assert all(again.get(key) == bytes([int(key)]) * 90 for key in again.keys())  # noqa: SIM118
