"""What a calibrated directory holds, for ``vllm-kvcompress inspect``: scales, profile, losses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape


def is_calibrated(path: Path) -> bool:
    """Whether a directory is a checkpoint, or holds what calibration writes beside one."""
    return (path / "kvcompress.json").is_file() or (path / "config.json").is_file()


def inspect_calibrated(path: Path) -> dict[str, Any]:
    """Scales by layer, the profile and the measured losses; ``faults`` and ``warnings``, a line
    each, of what is wrong with them.

    Raises ValueError, which names the file, for one that cannot be read at all.
    """
    found: dict[str, Any] = {"path": str(path), "faults": [], "warnings": []}
    if (path / "config.json").is_file():
        _inspect_scales(path, found)
    if (path / "kvcompress.json").is_file():
        _inspect_profile(path, found)
    return found


def _inspect_scales(path: Path, found: dict[str, Any]) -> None:
    from vllm_kvcompress.calibration import scales

    strategy = _strategy(path / "config.json", found["faults"])
    held = scales.of_checkpoint(path)
    layers = scales.by_layer(held)
    found["strategy"] = strategy
    found["scales"] = [
        {"layer": layer, **{kind: tensor.tolist() for kind, tensor in sorted(kinds.items())}}
        for layer, kinds in layers.items()
    ]
    if strategy or held:
        found["faults"] += _check_scales(path, held, strategy or "tensor")
    for kind in "kv":
        left = [n for n, kinds in layers.items() if kind in kinds and _is_one(kinds[kind])]
        if left:
            found["warnings"].append(
                f"{kind}_scale left at 1.0 in layers {_listed(left)}: calibration did not set it; "
                "calibrate again"
            )


def _is_one(scale: Any) -> bool:
    return scale.numel() > 0 and bool((scale == 1).all())


def _strategy(path: Path, faults: list[str]) -> str | None:
    """The strategy that ``config.json`` declares for the KV cache; what is wrong goes to *faults*.

    Raises ValueError if the file cannot be read.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); copy the checkpoint again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not the configuration of a model; copy the checkpoint again")
    for name in ("quantization_config", "kv_cache_scheme"):
        value = value.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            faults.append(f"{path}: {name} is {_short(value)}, not an object; calibrate again")
            return None
    strategy = value.get("strategy")
    if strategy not in (None, "tensor", "attn_head"):
        faults.append(
            f"{path}: the strategy of kv_cache_scheme is {_short(strategy)}, not tensor or "
            "attn_head; calibrate again"
        )
        return None
    return strategy


def _check_scales(path: Path, held: Mapping[str, Any], strategy: str) -> list[str]:
    from transformers import AutoConfig

    from vllm_kvcompress.calibration import scales
    from vllm_kvcompress.page_profile import MAX_LAYERS

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config()
        if not 0 < config.num_hidden_layers <= MAX_LAYERS:
            raise ValueError(f"num_hidden_layers is {_short(config.num_hidden_layers)}")
        lines = scales.check(held, config, strategy)
        # Layers that draft tokens come after those of the model.
        count = config.num_hidden_layers + (getattr(config, "num_nextn_predict_layers", 0) or 0)
    except Exception as error:  # transformers raises whatever such a configuration leads to
        return [
            f"{path / 'config.json'} is of no model that is known here, and its scales are "
            f"not checked ({type(error).__name__}: {_line(error):.200}); copy it again if it was "
            "changed"
        ]
    if extra := [layer for layer in scales.by_layer(held) if layer >= count]:
        lines.append(f"layers {_listed(extra)} have scales, and the model has {count} layers")
    return lines


def _inspect_profile(path: Path, found: dict[str, Any]) -> None:
    from safetensors import SafetensorError, safe_open

    from vllm_kvcompress import page_profile
    from vllm_kvcompress.codecs import profile as files

    faults, name = found["faults"], path / files.JSON_NAME
    try:
        content = files.read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; calibrate again") from error
    if "cachegen" in content:
        tensors = path / files.TENSORS_NAME
        try:
            if tensors.exists():
                safe_open(tensors, "pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{tensors} cannot be read ({error}); calibrate again") from error
        try:
            profile = files.load_profile(path)
            found["profile"] = files.describe(profile.transform, profile.levels)
        except ValueError as error:
            faults.append(f"{name}: cachegen: {_line(error)}")
    if page_profile.SECTION in content:
        try:
            page_profile.load_page_profile(path)
            found["pages"] = content[page_profile.SECTION]
        except ValueError as error:
            faults.append(f"{name}: {page_profile.SECTION}: {_line(error)}")
    made = content.get("calibration")
    if made is None:
        return
    if not isinstance(made, dict):
        faults.append(f"{name}: calibration is {_short(made)}, not an object; calibrate again")
    elif type(made.get("tokens")) is not int or not isinstance(made.get("data"), str):
        faults.append(f"{name}: calibration does not name its data and tokens; calibrate again")
    else:
        found["calibration"] = made


def _short(value: Any) -> str:
    """A value of a file that someone may have written anything into."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def print_calibrated(found: Mapping[str, Any]) -> None:
    rows = rows_of(found)
    print(f"{found['path']}: {summary_of(found)}")
    for kind, lines in (("wrong", found["faults"]), ("warning", found["warnings"])):
        for line in lines:
            print(f"{kind}: {line}")
    if rows:
        names = names_of(rows)
        print("\nlayer  " + "".join(f"{name:>22}" for name in names))
        for row in rows:
            cells = (_cell(row[name]) if name in row else "" for name in names)
            print(f"{row['layer']:>5}  {''.join(f'{cell:>22}' for cell in cells)}".rstrip())
    if "profile" in found:
        profile = found["profile"]
        print(
            f"\nprofile {profile['digest']}: {profile['layers']} layers of {profile['kv_heads']} "
            f"KV heads of {profile['head_size']}, {profile['group_layers']} layers together"
        )
        for name, level in profile["levels"].items():
            steps = ", ".join(f"{alpha:.3g}" for alpha in level["alpha"])
            ranks = ", ".join(map(str, level["rank"]))
            print(f"  {name:8} steps of K and V {steps}; ranks {ranks}")
    for name, loss in losses_of(found).items():
        print(
            f"\n{name}: {loss['all']:.3g} nats a token for all layers; for at most "
            f"{found['pages']['max_loss']:g} leave out: {_listed(loss['skip_layers'])} "
            f"({loss['left']:.3g} left)"
        )
        if name != "fp8":
            four = loss["with_4bit"]
            print(
                f"  or four bits for: {_listed(four['layers'])}, and leave out: "
                f"{_listed(four['skip_layers'])} ({four['left']:.3g} left); clipping "
                f"{loss['clipping']}"
            )


def _listed(layers: Sequence[int]) -> str:
    return " ".join(map(str, layers)) or "none"


def summary_of(found: Mapping[str, Any]) -> str:
    if not found.get("scales"):
        return "no FP8 scales" if "scales" in found else "no checkpoint"
    made = found.get("calibration", {})
    data = f", from {made['tokens']:,} tokens of {made['data']}" if made else ""
    return f"FP8 scales of {len(found['scales'])} layers, strategy {found['strategy']}{data}"


def losses_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """What each kind of page costs, by its ``kv_cache_dtype``."""
    pages = found.get("pages")
    if pages is None:
        return {}
    kivi = pages.get("kivi")
    return {"fp8": pages["fp8"]} | ({} if kivi is None else {kivi["dtype"]: kivi})


def rows_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a layer: scales of K and of V, and what the layer's pages cost alone.

    A row has what is there: scales may be of other layers than losses.
    """
    rows: dict[int, dict[str, Any]] = {}
    for scale in found.get("scales", ()):
        row = rows.setdefault(scale["layer"], {"layer": scale["layer"]})
        row |= {f"{kind}_scale": scale.get(kind) for kind in "kv"}
    for name, loss in losses_of(found).items():
        for layer, value in enumerate(loss["layers"]):
            rows.setdefault(layer, {"layer": layer})[f"loss in {name}"] = value
    return [rows[layer] for layer in sorted(rows)]


def names_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What there is of any layer, in the order in which rows are filled."""
    fullest = max(rows, key=len, default={})
    names = dict.fromkeys([*fullest, *(name for row in rows for name in row)])
    return [name for name in names if name != "layer"]


def _cell(value: Any) -> str:
    if value is None:
        return "missing"
    if not isinstance(value, list):
        return f"{value:.3g}"
    if len(value) < 2:
        return f"{value[0]:.3g}" if value else "empty"
    return f"{min(value):.3g} to {max(value):.3g}"


_WIDTH, _HEIGHT, _LEFT, _TOP = 900, 220, 70, 40
_COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3")


def plot_calibrated(found: Mapping[str, Any], path: Path) -> None:
    """Write the scales and losses of the layers as an SVG picture.

    Raises ValueError where there is nothing to draw.
    """
    rows = rows_of(found)
    names = names_of(rows)
    if not names:
        raise ValueError(f"{found['path']} holds no scales and no losses to plot")
    panels = [_panel(rows, name, number) for number, name in enumerate(names)]
    height = len(panels) * (_HEIGHT + _TOP) + _TOP
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="13"><rect width="100%" height="100%" fill="white"/>'
        + "".join(panels)
        + "</svg>\n"
    )


def _panel(rows: Sequence[Mapping[str, Any]], name: str, number: int) -> str:
    """Bars of one quantity over the layers, one a head where there are several."""
    top = _TOP + number * (_HEIGHT + _TOP)
    values = [v if isinstance(v, list) else [v or 0.0] for v in (row.get(name) for row in rows)]
    highest = max((v for heads in values for v in heads if math.isfinite(v)), default=0.0)
    highest = highest if highest > 0 else 1.0
    slot = (_WIDTH - 2 * _LEFT) / len(rows)
    parts = [
        f'<text x="{_LEFT}" y="{top - 8}">{escape(name)} (largest {highest:.5g})</text>',
        f'<line x1="{_LEFT}" y1="{top + _HEIGHT - 20}" x2="{_WIDTH - _LEFT}" '
        f'y2="{top + _HEIGHT - 20}" stroke="black"/>',
    ]
    for position, (row, heads) in enumerate(zip(rows, values, strict=True)):
        left = _LEFT + position * slot
        bar = 0.8 * slot / max(1, len(heads))
        for head, value in enumerate(heads):
            part = max(0.0, value) / highest if math.isfinite(value) else 0.0
            size = part * (_HEIGHT - 40)
            parts.append(
                f'<rect x="{left + head * bar:.1f}" y="{top + _HEIGHT - 20 - size:.1f}" '
                f'width="{bar:.1f}" height="{size:.1f}" fill="{_COLOURS[number % 4]}">'
                f"<title>layer {row['layer']}, head {head}: {value:.6g}</title></rect>"
            )
        if position % max(1, len(rows) // 20) == 0:
            parts.append(f'<text x="{left:.1f}" y="{top + _HEIGHT - 4}">{row["layer"]}</text>')
    return "".join(parts)
