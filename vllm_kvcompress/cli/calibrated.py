"""What a calibrated directory holds, for ``vllm-kvcompress inspect``: scales, profile, losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape


def is_calibrated(path: Path) -> bool:
    """Whether a directory is a checkpoint, or holds what calibration writes beside one."""
    return (path / "kvcompress.json").is_file() or (path / "config.json").is_file()


def inspect_calibrated(path: Path) -> dict[str, Any]:
    """Scales by layer, what is wrong with them, the profile and the measured losses.

    Raises ValueError for profiles that are damaged.
    """
    from transformers import AutoConfig

    from vllm_kvcompress import page_profile
    from vllm_kvcompress.calibration import scales
    from vllm_kvcompress.codecs import profile as files

    found: dict[str, Any] = {"path": str(path)}
    if (path / "config.json").is_file():
        held = scales.of_checkpoint(path)
        strategy = scales.strategy_of(path)
        found["strategy"] = strategy
        found["scales"] = [
            {"layer": layer, **{kind: tensor.tolist() for kind, tensor in sorted(kinds.items())}}
            for layer, kinds in scales.by_layer(held).items()
        ]
        if strategy or held:
            config = AutoConfig.from_pretrained(path).get_text_config()
            found["faults"] = scales.check(held, config, strategy or "tensor")
    if (path / files.JSON_NAME).is_file():
        content = files.read_json(path)
        if "cachegen" in content:
            profile = files.load_profile(path)
            found["profile"] = {**content["cachegen"], "digest": profile.digest.hex()}
        if page_profile.SECTION in content:
            page_profile.load_page_profile(path)
            found["pages"] = content[page_profile.SECTION]
        if "calibration" in content:
            found["calibration"] = content["calibration"]
    return found


def print_calibrated(found: Mapping[str, Any]) -> None:
    rows = rows_of(found)
    print(f"{found['path']}: {summary_of(found)}")
    for line in found.get("faults", ()):
        print(f"wrong: {line}")
    if rows:
        names = [name for name in rows[0] if name != "layer"]
        print("\nlayer  " + "".join(f"{name:>22}" for name in names))
        for row in rows:
            print(f"{row['layer']:>5}  " + "".join(f"{_cell(row[name]):>22}" for name in names))
    if "profile" in found:
        profile = found["profile"]
        print(
            f"\nprofile {profile['digest']}: {profile['layers']} layers of {profile['kv_heads']} "
            f"KV heads of {profile['head_size']}, {profile['group_layers']} layers together"
        )
        for name, level in profile["levels"].items():
            steps = ", ".join(f"{alpha:.3f}" for alpha in level["alpha"])
            ranks = ", ".join(map(str, level["rank"]))
            print(f"  {name:8} steps of K and V {steps}; ranks {ranks}")
    for name, loss in losses_of(found).items():
        print(
            f"\n{name}: {loss['all']:.4f} nats a token for all layers; for at most "
            f"{found['pages']['max_loss']:g} leave out: {_listed(loss['skip_layers'])} "
            f"({loss['left']:.4f} left)"
        )
        if "with_4bit" in loss:
            four = loss["with_4bit"]
            print(
                f"  or four bits for: {_listed(four['layers'])}, and leave out: "
                f"{_listed(four['skip_layers'])} ({four['left']:.4f} left); clipping "
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
    """A row a layer: scales of K and of V, and what the layer's pages cost alone."""
    rows: dict[int, dict[str, Any]] = {}
    for scale in found.get("scales", ()):
        row = rows.setdefault(scale["layer"], {"layer": scale["layer"]})
        row |= {f"{kind}_scale": scale.get(kind) for kind in "kv"}
    for name, loss in losses_of(found).items():
        for layer, value in enumerate(loss["layers"]):
            rows.setdefault(layer, {"layer": layer})[f"loss in {name}"] = value
    return list(rows.values())


def _cell(value: Any) -> str:
    if value is None:
        return "missing"
    if not isinstance(value, list):
        return f"{value:.5f}"
    if len(value) == 1:
        return f"{value[0]:.5f}"
    return f"{min(value):.5f} to {max(value):.5f}"


_WIDTH, _HEIGHT, _LEFT, _TOP = 900, 220, 70, 40
_COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3")


def plot_calibrated(found: Mapping[str, Any], path: Path) -> None:
    """Write the scales and losses of the layers as an SVG picture.

    Raises ValueError where there is nothing to draw.
    """
    rows = rows_of(found)
    names = [name for name in (rows[0] if rows else ()) if name != "layer"]
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
    highest = max((max(v, default=0.0) for v in values), default=0.0) or 1.0
    slot = (_WIDTH - 2 * _LEFT) / len(rows)
    parts = [
        f'<text x="{_LEFT}" y="{top - 8}">{escape(name)} (largest {highest:.5g})</text>',
        f'<line x1="{_LEFT}" y1="{top + _HEIGHT - 20}" x2="{_WIDTH - _LEFT}" '
        f'y2="{top + _HEIGHT - 20}" stroke="black"/>',
    ]
    for position, (row, heads) in enumerate(zip(rows, values, strict=True)):
        left = _LEFT + position * slot
        bar = 0.8 * slot / len(heads)
        for head, value in enumerate(heads):
            size = max(0.0, value) / highest * (_HEIGHT - 40)
            parts.append(
                f'<rect x="{left + head * bar:.1f}" y="{top + _HEIGHT - 20 - size:.1f}" '
                f'width="{bar:.1f}" height="{size:.1f}" fill="{_COLOURS[number % 4]}">'
                f"<title>layer {row['layer']}, head {head}: {value:.6g}</title></rect>"
            )
        if position % max(1, len(rows) // 20) == 0:
            parts.append(f'<text x="{left:.1f}" y="{top + _HEIGHT - 4}">{row["layer"]}</text>')
    return "".join(parts)
