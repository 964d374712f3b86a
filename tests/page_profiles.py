"""A directory with a profile of pages, as calibration writes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_kvcompress.page_profile import SECTION, digest_of


def section(
    layers: int = 2,
    kv_heads: int = 2,
    head_size: int = 32,
    model_type: str = "llama",
    clipping: str = "least_squares",
    four_bits: tuple[int, ...] = (),
    kivi_skip_layers: tuple[int, ...] = (),
    fp8_skip_layers: tuple[int, ...] = (),
) -> dict[str, Any]:
    """The section of a model; by default that of ``tests.engine.models.tiny_llama``."""
    losses = {"layers": [0.5**n for n in range(layers)], "all": 1.0, "left": 0.25}
    content = {
        "model": {
            "name": "some/model",
            "model_type": model_type,
            "layers": layers,
            "kv_heads": kv_heads,
            "head_size": head_size,
        },
        "windows": 1,
        "max_loss": 0.3,
        "fp8": {**losses, "skip_layers": list(fp8_skip_layers)},
        "kivi": {
            "dtype": "kivi_2bit",
            "clipping": clipping,
            **losses,
            "skip_layers": [0],
            "with_4bit": {
                "layers": list(four_bits),
                "skip_layers": list(kivi_skip_layers),
                "left": 0.2,
            },
            "boosted_channels": [[list(range(head_size // 4))] * kv_heads] * layers,
        },
    }
    return {"digest": digest_of(content), **content}


def write_profile(folder: Path, content: dict[str, Any] | None = None, **of: Any) -> Path:
    """Write a section, or the one of these arguments, into a directory."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {"format": 1, SECTION: section(**of) if content is None else content}
    (folder / "kvcompress.json").write_text(json.dumps(written))
    return folder
