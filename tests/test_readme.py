"""The README names everything that a user can set or read."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from vllm_kvcompress import cli
from vllm_kvcompress.codecs import codec_names, fp8, kivi
from vllm_kvcompress.config import (
    IN_PLACE,
    KIVI_DTYPES,
    PASSED_TO_VLLM,
    PRESETS,
    Fp8Settings,
    KiviSettings,
    OffloadSettings,
)
from vllm_kvcompress.kernels.cachegen import format as cachegen
from vllm_kvcompress.stores import disk, memory, store_types

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def named() -> dict[str, set[str]]:
    from vllm_kvcompress.connector.metrics import COUNTERS, GAUGES

    settings = {field.name for field in dataclasses.fields(OffloadSettings)}
    stores = (memory.MemoryStore, disk.DiskStore)
    return {
        "settings": settings | {*PASSED_TO_VLLM, IN_PLACE},
        "KIVI settings": {field.name for field in dataclasses.fields(KiviSettings)},
        "FP8 settings": {field.name for field in dataclasses.fields(Fp8Settings)},
        "KIVI dtypes and presets": {*KIVI_DTYPES, *PRESETS},
        "codecs": set(codec_names()),
        "levels": {*cachegen.LEVELS, *fp8.LEVELS, *kivi.LEVELS},
        "store types": set(store_types()),
        "store settings": {p for store in stores for p in inspect.signature(store).parameters},
        "metrics": set(COUNTERS) | set(GAUGES),
        "commands": {module.__name__.rpartition(".")[2] for module in cli.COMMANDS},
    }


@pytest.mark.parametrize(
    "kind",
    [
        "settings",
        "KIVI settings",
        "FP8 settings",
        "KIVI dtypes and presets",
        "codecs",
        "levels",
        "store types",
        "store settings",
        "metrics",
        "commands",
    ],
)
def test_readme_names_all(kind):
    words = set(re.findall(r"\w+", README))
    assert named()[kind] <= words


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_paths_in_the_documents_exist(document):
    paths = re.findall(
        r"`((?:vllm_kvcompress|kernels|tests|requirements|packaging|benchmarks)/[\w./-]+)`",
        (ROOT / document).read_text(),
    )
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_make_targets_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:`|^    )make ([a-z-]+)", README, re.M))
    assert [target for target in targets if not re.search(f"^{target}:", makefile, re.M)] == []
