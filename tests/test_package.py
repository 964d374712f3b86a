"""What is installed, what may import what, and the console command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

import vllm_kvcompress
from vllm_kvcompress import cli
from vllm_kvcompress.codecs import create_codec
from vllm_kvcompress.stores import create_store

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPED = {"kernels": "vllm_kvcompress.kernels", "calibration": "vllm_kvcompress.calibration"}


def python(code: str, cwd: Path) -> str:
    """Run code in a new interpreter and return what it printed."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_entry_points():
    (plugin,) = metadata.entry_points(group="vllm.general_plugins", name="kvcompress")
    assert plugin.value == "vllm_kvcompress.plugin:register"
    (command,) = metadata.entry_points(group="console_scripts", name="vllm-kvcompress")
    assert command.load() is cli.main


def test_version_is_the_installed_one():
    assert metadata.version("vllm-kvcompress") == vllm_kvcompress.__version__


@pytest.mark.parametrize("folder", MAPPED)
def test_folder_is_mapped_under_the_package(folder, tmp_path):
    out = python(
        "import importlib, importlib.util as util, sys\n"
        f"print(importlib.import_module('{MAPPED[folder]}').__file__)\n"
        f"print(util.find_spec('{folder}'))",
        tmp_path,
    )
    assert out.splitlines() == [str(ROOT / folder / "__init__.py"), "None"]


def test_every_package_is_installed():
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for folder in ("vllm_kvcompress", *MAPPED)
        for path in (ROOT / folder).rglob("__init__.py")
    }
    names = {
        next((MAPPED[top] + name[len(top) :] for top in MAPPED if name.split(".")[0] == top), name)
        for name in found
    }
    assert names == set(PROJECT["tool"]["setuptools"]["packages"])


@pytest.mark.parametrize("package", ["kernels", "codecs", "stores"])
def test_package_does_not_import_vllm(package, tmp_path):
    name = f"vllm_kvcompress.{package}"
    out = python(
        "import importlib, pkgutil, sys\n"
        f"package = importlib.import_module('{name}')\n"
        f"for module in pkgutil.walk_packages(package.__path__, '{name}.'):\n"
        "    importlib.import_module(module.name)\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'vllm'])",
        tmp_path,
    )
    assert out.strip() == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["inspect", "--help"]])
def test_command_starts_without_torch(arguments, tmp_path):
    out = python(
        "import sys\n"
        "from vllm_kvcompress.cli import main\n"
        "try:\n"
        f"    main({arguments})\n"
        "except SystemExit as error:\n"
        "    assert error.code == 0\n"
        "print({'torch', 'vllm', 'numba', 'triton'} & set(sys.modules))",
        tmp_path,
    )
    assert out.splitlines()[-1] == "set()"


def test_command_is_on_the_path():
    command = Path(sys.executable).with_name("vllm-kvcompress")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"vllm-kvcompress {vllm_kvcompress.__version__}"


def test_version_names_what_it_stands_on(capsys):
    assert cli.main(["version", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)
    assert versions["vllm-kvcompress"] == vllm_kvcompress.__version__
    assert versions["torch"] == metadata.version("torch")
    assert versions["vllm"].startswith("0.32.0")


def make_blob() -> bytes:
    return create_codec("raw").encode(torch.zeros(3, 2, 5, 2, 64, dtype=torch.bfloat16))


def make_store(path: Path, blobs: int) -> None:
    store = create_store({"type": "disk", "path": str(path), "bytes": "1MiB"})
    for number in range(blobs):
        store.put(bytes([number + 1]), make_blob())
    store.close()


def test_inspect_blob(tmp_path, capsys):
    path = tmp_path / "blob"
    path.write_bytes(make_blob())
    assert cli.main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["codec"] == "raw"
    assert found["dtype"] == "bfloat16"
    assert found["shape"] == [3, 2, 5, 2, 64]
    assert found["decoded_bytes"] == 2 * 3 * 2 * 5 * 2 * 64
    assert found["blob_bytes"] == path.stat().st_size
    assert cli.main(["inspect", str(path)]) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_inspect_store(tmp_path, capsys):
    path = tmp_path / "store"
    make_store(path, 4)
    before = sorted(path.rglob("*"))
    assert cli.main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["blobs"] == 4
    assert found["blob_bytes"] == 4 * len(make_blob())
    assert [(g["codec"], g["shape"], g["blobs"]) for g in found["groups"]] == [
        ("raw", [3, 2, 5, 2, 64], 4)
    ]
    assert found["damaged"] == []
    assert cli.main(["inspect", str(path)]) == 0
    assert "4 blobs" in capsys.readouterr().out
    assert sorted(path.rglob("*")) == before


def test_inspect_store_counts_damaged_blobs(tmp_path, capsys):
    path = tmp_path / "store"
    make_store(path, 3)
    first, second, _ = sorted(path.rglob("*.kv"))
    first.write_bytes(first.read_bytes()[:-1])
    second.write_bytes(second.read_bytes()[:-1] + b"\xff")
    assert cli.main(["inspect", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["blobs"] == 1
    assert {blob["error"] for blob in found["damaged"]} == {"WrongLength", "ChecksumMismatch"}
    assert cli.main(["inspect", str(path)]) == 1
    assert capsys.readouterr().out.count("damaged: ") == 2


def test_inspect_empty_store(tmp_path, capsys):
    make_store(tmp_path / "store", 0)
    assert cli.main(["inspect", str(tmp_path / "store")]) == 0
    assert "0 blobs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory"),
        (b"", "the blob ends after 0 bytes"),
        (b"PK\x03\x04 something else", "not a blob"),
    ],
    ids=["missing", "empty", "foreign"],
)
def test_inspect_tells_in_one_line_what_is_wrong(content, expected, tmp_path, capsys):
    path = tmp_path / "blob"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["inspect", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("vllm-kvcompress: error: ")
    assert expected in captured.err


@pytest.mark.parametrize(
    ("content", "expected"),
    [(make_blob()[:-1], "the blob should have"), (make_blob()[:-1] + b"\x01", "checksum")],
    ids=["truncated", "corrupt"],
)
def test_inspect_ends_with_status_1_for_a_damaged_blob(content, expected, tmp_path, capsys):
    path = tmp_path / "blob"
    path.write_bytes(content)
    assert cli.main(["inspect", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.err == "" and expected in captured.out


def test_inspect_refuses_a_directory_that_is_no_store(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "not a disk store" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["inspect"], ["inspect", "x", "--what"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(arguments)
    assert raised.value.code == 2
    assert re.search(r"see vllm-kvcompress.* --help\n$", capsys.readouterr().err)
