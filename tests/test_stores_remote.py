"""Stores on servers: what a broken link, a dead, slow or full server and a wrong setting do."""

from __future__ import annotations

import datetime
import ipaddress
import logging
import os
import random
import socket
import ssl
import threading
import time

import pytest
import valkey
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import servers
from vllm_kvcompress.stores import StoreConfigError, StoreError, create_stack, create_store
from vllm_kvcompress.stores import remote as remote_module
from vllm_kvcompress.stores import valkey as valkey_module
from vllm_kvcompress.stores.object import BucketStore
from vllm_kvcompress.stores.remote import FAILURES, LONGEST_PAUSE, CircuitBreaker

TIMEOUT = 0.3


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fail():
    raise StoreError("told to fail")


def call(breaker, action=lambda: "done"):
    """What a call gave: ``done``, ``failed``, or ``left`` if it was not tried."""
    try:
        return breaker.call(action)
    except StoreError as error:
        return "failed" if "told to" in str(error) else "left"


def test_a_breaker_opens_after_failures_in_a_row_and_lets_one_call_a_pause_through():
    clock = Clock()
    breaker = CircuitBreaker("calls", clock)
    assert [call(breaker, fail), call(breaker, fail), call(breaker)] == ["failed"] * 2 + ["done"]
    assert [call(breaker, fail) for _ in range(FAILURES)] == ["failed"] * FAILURES
    assert call(breaker) == "left"
    waited = []
    for _ in range(8):
        before = clock.now
        while (result := call(breaker, fail)) == "left":
            clock.now += 0.25
        assert result == "failed"
        waited.append(clock.now - before)
    assert waited == [1, 2, 4, 8, 16, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE]
    clock.now += LONGEST_PAUSE
    assert call(breaker) == "done"
    assert [call(breaker, fail), call(breaker)] == ["failed", "done"]


def test_while_one_call_sees_whether_the_server_is_back_the_others_are_left():
    clock = Clock()
    breaker = CircuitBreaker("calls", clock)
    for _ in range(FAILURES):
        call(breaker, fail)
    clock.now += 1
    assert breaker.call(lambda: call(breaker)) == "left"
    assert call(breaker) == "done"


def test_an_error_that_nobody_foresaw_does_not_hold_a_breaker_open_for_ever():
    clock = Clock()
    breaker = CircuitBreaker("calls", clock)

    def bug():
        raise KeyError

    for _ in range(FAILURES):
        with pytest.raises(KeyError):
            breaker.call(bug)
    clock.now += 1
    with pytest.raises(KeyError):
        breaker.call(bug)
    clock.now += 2
    assert call(breaker) == "done"


def test_an_outage_is_two_lines_of_the_log(caplog):
    clock = Clock()
    breaker = CircuitBreaker("reads of store x", clock)
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            call(breaker, fail)
            clock.now += 10
        call(breaker)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "reads of store x" in lines[0] and "told to fail" in lines[0]
    assert "work again" in lines[1]


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(remote_module, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(remote_module, "LONGEST_PAUSE", 0.1)


@pytest.fixture
def link(valkey_server):
    link = servers.Link(valkey_server.port)
    yield link
    link.hangs, link.delay = False, 0
    link.down()


@pytest.fixture
def store(link, short_pauses):
    store = create_store(
        {
            "type": "valkey",
            "url": f"valkey://127.0.0.1:{link.port}",
            "timeout_seconds": TIMEOUT,
            "namespace": f"r{time.time_ns()}",
        }
    )
    yield store
    store.close()


def heals(store) -> bool:
    """Whether a blob can be put and found again, if not at once."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if store.put(b"heals", b"blob") and store.contains([b"heals"]) == [True]:
            return store.get(b"heals") == b"blob"
        time.sleep(0.02)
    return False


def cut(link):
    link.down()


def hang(link):
    link.hangs = True


def slow_down(link):
    link.delay = 3 * TIMEOUT


def cut_in_mid_blob(link):
    link.cut_after = 5000


@pytest.mark.parametrize("damage", [cut, hang, slow_down])
def test_a_link_that_breaks_costs_a_few_calls_and_heals_by_itself(store, link, damage):
    assert store.put(b"a", b"blob") and store.get(b"a") == b"blob"
    damage(link)
    before = store.stats().errors
    with pytest.raises(StoreError):
        store.get(b"a")
    assert not store.put(b"a", b"blob")
    assert store.contains([b"a", b"b"]) == [False, False]
    for _ in range(2 * FAILURES):
        store.put(b"b", b"blob")
        store.contains([b"a"])
    with pytest.raises(StoreError):
        store.remove([b"a"])
    # Reads and writes were tried so often each, and by chance once more after a pause.
    asked = store.stats().errors - before
    assert 2 * FAILURES <= asked < 8 * FAILURES
    link.hangs, link.delay = False, 0
    if damage is cut:
        link.up()
    assert heals(store)


def test_a_blob_whose_connection_is_cut_in_the_middle_is_an_error_and_comes_whole_later(
    store, link
):
    blob = os.urandom(300_000)
    assert store.put(b"a", blob)
    link.cut_after = 100_000
    store.close()  # the next call connects anew, through the cut
    with pytest.raises(StoreError):
        store.get(b"a")
    link.cut_after = None
    assert heals(store) and store.get(b"a") == blob


def test_a_server_that_is_down_at_the_start_is_used_when_it_comes(tmp_path, short_pauses, caplog):
    with servers.valkey_server(tmp_path) as server:
        server.stop()
        settings = {"type": "valkey", "url": server.url, "timeout_seconds": TIMEOUT}
        store = create_store(settings)
        assert any("cannot be reached" in record.getMessage() for record in caplog.records)
        assert not store.put(b"a", b"blob")
        server.start()
        assert heals(store)
        server.stop()
        assert store.contains([b"heals"]) == [False]
        server.start()
        assert store.get(b"heals") is None or heals(store)  # the server forgot all
        assert heals(store)
        store.close()


def test_a_full_server_refuses_writes_and_goes_on_serving_reads(tmp_path, short_pauses):
    with servers.valkey_server(tmp_path, "--maxmemory", "8mb") as server:
        store = create_store({"type": "valkey", "url": server.url})
        blob = random.Random(1).randbytes(1 << 20)
        held = [key for key in (b"%d" % number for number in range(20)) if store.put(key, blob)]
        assert 2 <= len(held) < 8
        assert all(store.get(key) == blob for key in held)
        assert store.stats().errors >= FAILURES
        store.remove(held[1:]) if heals_write(store, held[1:]) else None
        assert heals(store)
        assert store.get(held[0]) == blob
        store.close()


def heals_write(store, keys) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            store.remove(keys)
            return True
        except StoreError:
            time.sleep(0.02)
    return False


def test_a_server_with_a_policy_makes_room_and_says_how_much_it_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(valkey_module, "MEASURE_SECONDS", 0.0)
    options = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    with servers.valkey_server(tmp_path, *options) as server:
        store = create_store({"type": "valkey", "url": server.url})
        blob = os.urandom(1 << 20)
        assert all(store.put(b"%d" % number, blob) for number in range(20))
        stats = store.stats()
        assert stats.capacity_bytes == 8 << 20
        assert 0 < stats.bytes_held <= 9 << 20
        assert 1 <= stats.entries < 20 and stats.evictions >= 12
        assert not store.put(b"large", bytes(9 << 20))
        assert store.stats().refused == 1 and store.stats().errors == 0
        store.close()


def test_a_key_that_holds_something_else_is_a_miss(valkey_server):
    store = create_store({"type": "valkey", "url": valkey_server.url, "namespace": "odd"})
    valkey_server.command("RPUSH", b"kvcompress:odd:a", "list")
    assert store.get(b"a") is None
    assert store.put(b"a", b"blob") and store.get(b"a") == b"blob"
    store.close()


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            lambda length, content: b"$%d\r\n%b" % (length, content),
            st.integers(-2, 10**19) | st.integers(0, 70_000),
            st.binary(max_size=100) | st.integers(0, 70_000).map(bytes),
        ),
        st.binary(max_size=20).map(lambda rest: b"*" + rest),
    )
)
def test_any_answer_of_a_server_is_a_blob_a_miss_or_an_error(answer):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)
        buffer = memoryview(bytearray(valkey_module._BUFFER_BYTES))
        connection = valkey.Connection(socket_timeout=1)
        connection._sock = ours
        connection._parser.on_connect(connection)
        try:
            blob = valkey_module._read_blob(connection, buffer)
        except (valkey.ValkeyError, OSError):
            return
        # Clients do not look at what ends a string; a blob has a checksum.
        assert blob is None or answer.startswith(b"$%d\r\n%b" % (len(blob), blob))


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda key: f"ns-/{key.hex()}.kv"))
def test_any_name_in_a_bucket_is_a_key_s_own_or_nobody_s(name):
    store = object.__new__(BucketStore)
    store._folder = "ns-"
    key = store._key_of(name)
    assert key is None or store._path(key) == name


@given(st.binary(min_size=1, max_size=128))
def test_a_key_has_a_name_of_its_own_in_a_bucket(key):
    store = object.__new__(BucketStore)
    store._folder = "ns-"
    assert store._key_of(store._path(key)) == key
    assert max(map(len, store._path(key).split("/"))) <= 255


def test_user_and_password_come_from_a_file_or_the_environment_and_wrong_ones_are_refused(
    tmp_path, monkeypatch
):
    user = "user kv on >open-sesame ~kvcompress:* +@all"
    (tmp_path / "password").write_text("open-sesame\n")
    monkeypatch.setenv("KV_PASSWORD", "open-sesame")
    monkeypatch.setenv("KV_WRONG", "closed")
    with servers.valkey_server(tmp_path / "server", "--requirepass", "other") as server:
        with valkey.Valkey(port=server.port, password="other") as client:
            client.execute_command("ACL", "SETUSER", *user.split()[1:])
        address = f"valkey://kv@127.0.0.1:{server.port}"
        for source in (f"file:{tmp_path / 'password'}", "env:KV_PASSWORD"):
            store = create_store({"type": "valkey", "url": address, "password": source})
            assert store.put(b"a", b"blob") and store.get(b"a") == b"blob"
            store.close()
        for wrong in ({"password": "env:KV_WRONG"}, {}):
            with pytest.raises(StoreConfigError, match="denies access") as caught:
                create_store({"type": "valkey", "url": address, **wrong})
            assert "closed" not in str(caught.value)


def make_certificate(folder, name):
    """A certificate for 127.0.0.1 that signs itself: the paths of certificate and key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


def test_tls_carries_blobs_and_a_server_with_another_certificate_gets_nothing(
    valkey_server, tmp_path, caplog
):
    certificate, key = make_certificate(tmp_path, "right")
    other, _ = make_certificate(tmp_path, "other")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    link = servers.Link(valkey_server.port, certificate=context)
    url = f"valkeys://127.0.0.1:{link.port}?ssl_ca_certs="
    blob = os.urandom(1 << 20)
    store = create_store({"type": "valkey", "url": f"{url}{certificate}", "namespace": "tls"})
    assert store.put(b"a", blob) and store.get(b"a") == blob
    store.close()
    store = create_store({"type": "valkey", "url": f"{url}{other}", "namespace": "tls"})
    assert not store.put(b"b", blob) and store.contains([b"a"]) == [False]
    assert any("certificate" in record.getMessage() for record in caplog.records)
    store.close()
    link.down()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "url: .*needs this setting"),
        ({"url": "localhost:6379"}, "url: 'localhost:6379'; give an address such as valkey://"),
        ({"url": 7}, "url: 7; give an address"),
        ({"url": "valkey://u:secret@h"}, "url: settings are logged.*password"),
        ({"url": "valkey://h?no_such_setting=1"}, "url: .*no_such_setting"),
        ({"url": "valkey://h?db=x"}, "url: .* cannot be used"),
        ({"url": "valkey://h:port"}, "url: .* cannot be used"),
        ({"url": "valkey://h", "password": "open-sesame"}, "password: .*'file:PATH' or 'env:NAME'"),
        ({"url": "valkey://h", "password": "env:NOT_SET_ANYWHERE"}, "password: .*NOT_SET_ANYWHERE"),
        ({"url": "valkey://h", "password": "file:/no/such"}, "password: .*/no/such cannot be read"),
        ({"url": "valkey://h", "timeout_seconds": 0}, "timeout_seconds: 0; give a number"),
        ({"url": "valkey://h", "timeout_seconds": True}, "timeout_seconds: True; give a number"),
        ({"url": "valkey://h", "namespace": "a:b"}, "namespace: 'a:b'; give up to 64"),
        ({"url": "valkey://h", "bytes": "1GiB"}, "bytes: .*no such setting.*url, password"),
    ],
)
def test_bad_settings_of_valkey_are_named_and_secrets_are_not(config, message):
    with pytest.raises(StoreConfigError, match=message) as caught:
        create_store({"type": "valkey", **config})
    assert "sesame" not in str(caught.value) and "secret@" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "url: .*needs this setting"),
        ({"url": "bucket"}, "url: 'bucket'; give an address such as s3://"),
        ({"url": "http://h/b"}, "url: 'http://h/b'; give an address such as s3://"),
        ({"url": "file:///no/such/folder"}, "url: /no/such, which should hold folder"),
        ({"url": "file:///tmp/x", "region": "eu"}, "region: 'eu'; .*s3:// only"),
        ({"url": "s3://b", "endpoint": "h:9000"}, "endpoint: 'h:9000'; give an address such as"),
        ({"url": "s3://b", "endpoint": 1}, "endpoint: 1; it is a text"),
        ({"url": "s3://b", "timeout_seconds": -1}, "timeout_seconds: -1"),
        ({"url": "s3://b", "namespace": ".."}, "namespace: '..'"),
    ],
)
def test_bad_settings_of_object_are_named(config, message):
    with pytest.raises(StoreConfigError, match=message):
        create_store({"type": "object", **config})


def test_wrong_credentials_of_a_bucket_are_refused_at_start(bucket, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreConfigError, match="denies access"):
        create_store(bucket)


def test_a_bucket_behind_a_link_that_hangs_is_left_alone_and_heals(bucket, short_pauses):
    link = servers.Link(int(bucket["endpoint"].rpartition(":")[2]))
    store = create_store(
        {
            **bucket,
            "endpoint": f"http://127.0.0.1:{link.port}",
            "timeout_seconds": TIMEOUT,
            "namespace": "link",
        }
    )
    assert heals(store)
    link.hangs = True
    assert not store.put(b"a", b"blob")
    assert store.contains([b"b"]) == [False]
    link.hangs = False
    assert heals(store)
    link.down()
    assert not store.put(b"a", b"blob")
    link.up()
    assert heals(store)
    store.close()
    link.down()


def test_objects_that_others_delete_are_misses(tmp_path):
    settings = {"type": "object", "url": f"file://{tmp_path / 'objects'}"}
    one, two = create_store(settings), create_store(settings)
    key = bytes(range(40))
    assert one.put(key, b"blob") and two.contains([key]) == [True]
    one.remove([key])
    assert two.get(key) is None
    assert two.contains([key]) == [False]


def test_a_bucket_that_is_not_there_refuses_blobs_and_holds_none(tmp_path, monkeypatch):
    import obstore

    store = create_store({"type": "object", "url": f"file://{tmp_path / 'objects'}"})

    def no_bucket(*_, **__):
        raise FileNotFoundError("NoSuchBucket")

    for name in ("put", "get", "head"):
        monkeypatch.setattr(obstore, name, no_bucket)
    assert not store.put(b"a", b"blob")
    assert store.contains([b"a"]) == [False] and store.get(b"a") is None
    assert store.stats().errors == 1


def test_files_of_others_in_the_folder_of_an_object_store_are_not_its_keys(tmp_path):
    store = create_store({"type": "object", "url": f"file://{tmp_path / 'objects'}"})
    assert store.put(bytes(40), b"blob")
    folder = tmp_path / "objects" / "ns-" / bytes(8).hex()
    for name in ("zz.kv", "AB.kv", "00.kv.tmp", "0.kv"):
        (folder / name).write_text("x")
    assert store.keys() == [bytes(40)]
    store.refresh()
    assert store.stats().entries == 1
    store.clear()
    assert (folder / "zz.kv").exists()


@pytest.mark.parametrize("kind", ["valkey", "object"])
def test_two_instances_share_and_namespaces_do_not(kind, request):
    if kind == "valkey":
        server = request.getfixturevalue("valkey_server")
        settings = {"type": "valkey", "url": server.url, "namespace": f"s{time.time_ns()}"}
    else:
        settings = {**request.getfixturevalue("bucket"), "namespace": f"s{time.time_ns()}"}
    one, two = create_store(settings), create_store(settings)
    other = create_store({**settings, "namespace": settings["namespace"] + "x"})
    assert one.put(b"a", b"blob")
    assert two.get(b"a") == b"blob" and two.keys() == [b"a"]
    assert other.get(b"a") is None and other.keys() == []
    other.clear()
    two.remove([b"a"])
    assert one.get(b"a") is None
    for store in (one, two, other):
        store.close()


def test_two_writers_of_one_key_leave_one_of_the_blobs_whole(valkey_server):
    settings = {"type": "valkey", "url": valkey_server.url, "namespace": f"w{time.time_ns()}"}
    stores = [create_store(settings), create_store(settings)]
    blobs = [bytes([number]) * 200_000 for number in range(2)]
    seen = []

    def write(store, blob):
        for _ in range(20):
            store.put(b"key", blob)
            seen.append(store.get(b"key"))

    threads = [
        threading.Thread(target=write, args=pair) for pair in zip(stores, blobs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) <= set(blobs)
    for store in stores:
        store.close()


def test_a_stack_serves_from_memory_and_keeps_putting_there_while_the_server_is_gone(
    link, short_pauses
):
    stack = create_stack(
        [
            {"type": "memory", "bytes": 1 << 20},
            {
                "type": "valkey",
                "url": f"valkey://127.0.0.1:{link.port}",
                "timeout_seconds": TIMEOUT,
                "namespace": f"k{time.time_ns()}",
            },
        ]
    )
    assert stack.put(b"a", b"blob")
    link.down()
    assert stack.put(b"b", b"blob")
    assert stack.contains([b"a", b"b", b"c"]) == [True, True, False]
    assert stack.get(b"b") == b"blob"
    link.up()
    assert heals(stack.stores[1])
    stack.close()  # which brings down what the server missed


def test_a_write_back_stack_puts_below_a_server_at_once_what_the_server_may_evict_silently(
    valkey_server, tmp_path
):
    stack = create_stack(
        [
            {"type": "memory", "bytes": 10},
            {"type": "valkey", "url": valkey_server.url, "namespace": f"b{time.time_ns()}"},
            {"type": "disk", "path": str(tmp_path / "disk")},
        ],
        write_back=True,
    )
    _, server, disk = stack.stores
    stack.put(b"a", bytes(8))
    assert (server.contains([b"a"]), disk.contains([b"a"])) == ([False], [False])
    stack.put(b"large", bytes(100))
    assert (server.contains([b"large"]), disk.contains([b"large"])) == ([True], [True])
    stack.close()
