"""One page about what compression gives and costs, from the JSON of the other commands."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from vllm_kvcompress.evaluation import charts
from vllm_kvcompress.evaluation.settings import BASE

TIMES = "\N{MULTIPLICATION SIGN}"

KINDS = ("estimate", "eval", "bench")

Draw = Callable[[int], str]
"""A chart of a width."""


@dataclass
class Section:
    """A part of the page: a question, what answers it, and its figures."""

    name: str
    """Of its image and of its data."""
    title: str
    text: str
    """HTML."""
    charts: list[tuple[str, Draw]] = field(default_factory=list)
    """Heading and chart."""
    table: list[list[str]] = field(default_factory=list)
    """Its first row is the head."""
    data: Any = None
    findings: list[str] = field(default_factory=list)
    """Sentences for the top of the page."""


def read_input(path: Path) -> tuple[str, dict[str, Any]]:
    """(kind, content) of a file that another command wrote with ``--json``.

    Raises ValueError that names the file for what none of them wrote.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    kind = found.get("kind") if isinstance(found, dict) else None
    if isinstance(found, dict) and "dtypes" in found and "codec_levels" in found:
        kind = "estimate"
    if kind not in KINDS:
        raise ValueError(
            f"{path} is none of what `vllm-kvcompress estimate --json`, `eval --json` and "
            "`bench --json` write"
        )
    return kind, found


_SECTIONS = {
    "estimate": ("capacity", "levels"),
    "eval": ("quality", "retrieval", "rate_distortion"),
    "bench": ("latency",),
}


def sections(kind: str, found: dict[str, Any]) -> list[Section]:
    """What a file gives. Raises ValueError for one whose fields are missing or of other kinds."""
    makers = {
        "capacity": capacity,
        "levels": levels,
        "quality": quality,
        "retrieval": retrieval,
        "rate_distortion": rate_distortion,
        "latency": latency,
    }
    try:
        made = [makers[name](found) for name in _SECTIONS[kind]]
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(
            f"this is not what `vllm-kvcompress {kind} --json` writes: "
            f"{type(error).__name__}: {error}"
        ) from error
    return [section for section in made if section is not None]


def _name(row: dict[str, Any]) -> str:
    told = [str(v) if k == "preset" else f"{k} {v}" for k, v in row["settings"].items()]
    return ", ".join([row["kv_cache_dtype"], *told])


def _number(value: Any) -> float:
    """A finite number. Raises TypeError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is no number")
    return value


def capacity(found: dict[str, Any]) -> Section | None:
    """How much fits."""
    rows = [row for row in found["dtypes"] if "refused" not in row]
    if not rows:
        return None
    memory = found["kv_memory"]
    bars, table = [], [["KV cache", "bits a value", "bytes a token", "tokens", "times"]]
    whole = _number(rows[0]["token_bytes"])
    for row in rows:
        size = _number(row["token_bytes"])
        tokens = _number(row["tokens"]) if memory is not None else 2**30 / size
        times = _number(row["times"]) if memory is not None else whole / size
        told = f"{tokens:,.0f}  {times:.1f}{TIMES}"
        ink = "faint" if row["kv_cache_dtype"] == BASE else "c0"
        bars.append(charts.Bar(_name(row), tokens, told, ink=ink))
        bits = _number(row["bits_per_value"])
        table.append([_name(row), f"{bits:.2f}", f"{size:,.0f}", f"{tokens:,.0f}", f"{times:.2f}"])
    # The published method loses so much more that its sizes alone say little.
    own = [
        (bar, line)
        for row, bar, line in zip(rows, bars, table[1:], strict=True)
        if row.get("settings", {}).get("preset") != "kivi"
    ]
    best = max(own, key=lambda pair: pair[0].value, default=(bars[0], table[1]))
    model = escape(str(found["model"]))
    most = f"<b>{best[1][4]}{TIMES}</b> the tokens in the same memory"
    room = "one GiB" if memory is None else f"{_number(memory) / 2**30:g} GiB"
    return Section(
        "capacity",
        "How much fits?",
        "<p>A model that reads a long text keeps, for every token (a piece of a word), numbers "
        "that it needs again for each token that follows: the <b>KV cache</b>. It fills the "
        "memory, and decides how long a text can be and how many users are served at once. Kept "
        f"in fewer bits, more of it fits. The bars are tokens of <b>{model}</b> in "
        f"{room} of memory; everything that the compressed form needs beside it is counted.</p>",
        [(f"Tokens in {room}", lambda width: charts.bars("Tokens that fit", bars, width))],
        table,
        found["dtypes"],
        [f"{most}, at most ({escape(best[0].label)})."],
    )


def levels(found: dict[str, Any]) -> Section | None:
    """Which level of the codec pays on which link."""
    rows = found["codec_levels"]
    if not rows:
        return None
    speeds = [10 ** (-2 + 3.5 * i / 40) for i in range(41)]
    size = 1.0  # GB of 16-bit KV

    def seconds(bits: float, decode: float | None, link: float) -> float:
        return size * bits / 16 / link + (size / decode if decode else 0)

    lines = [charts.Curve("not compressed", [(s, seconds(16, None, s)) for s in speeds], "faint")]
    table = [["level", "bits a value", "as small", "decodes, GB/s", "loads sooner below, GB/s"]]
    for number, row in enumerate(rows):
        bits, decode = _number(row["bits_per_value"]), _number(row["decode_gb_s"])
        points = [(s, seconds(bits, decode, s)) for s in speeds]
        lines.append(charts.Curve(str(row["level"]), points, charts.colour(number)))
        below = _number(row["load_below_gb_s"])
        table.append(
            [
                str(row["level"]),
                f"{bits:.2f}",
                f"{16 / bits:.1f}{TIMES}",
                f"{decode:.2f}",
                f"{below:.2f}",
            ]
        )
    return Section(
        "levels",
        "Which codec level for which link?",
        "<p>What a server has computed once can be put away, on a disk or on another machine, and "
        "loaded instead of computed again (<b>offload</b>). Before, it goes through a codec with "
        "several levels: smaller costs accuracy, and decoding costs time. On a slow link the "
        "smallest level is there first; on a link faster than the decoder none pays. The lowest "
        "line at your link's speed is the fastest level, with "
        f"{found['threads']} thread(s) that decode.</p>",
        [
            (
                "Seconds until one GB of KV cache is loaded",
                lambda width: charts.curves(
                    "Load time by link speed",
                    lines,
                    width,
                    "speed of the link, GB a second",
                    "seconds",
                ),
            )
        ],
        table,
        rows,
    )


_VERDICTS = {
    "passed": ("good", "✓ passed"),
    "unclear": ("soft", "? unclear"),
    "failed": ("bad", "✗ failed"),
    "nothing to lose": ("soft", "nothing to lose"),
}


def _tried(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in found["settings"] if "refused" not in row]


def quality(found: dict[str, Any]) -> Section | None:
    """What is lost."""
    rows = _tried(found)
    head = ["setting", "bits a value", "perplexity", "nats above", "answers", "kept", "verdict"]
    bars, table, passed = [], [head], []
    tolerance = None
    for row in rows:
        name = str(row["name"])
        line = [name, f"{_number(row['bits_per_value']):.2f}"]
        if "perplexity" in row:
            above = row["perplexity"]["above"]
            value = _number(above["value"])
            low, high = (
                above[k] if above[k] is None else _number(above[k]) for k in ("low", "high")
            )
            told = f"{value:+.3f}" + ("" if high is None else f" ± {high - value:.3f}")
            ink, verdict = "faint", ""
            check = (row.get("checks") or {}).get("perplexity")
            if check:
                ink, verdict = _VERDICTS[check["verdict"]][0], f", {check['verdict']}"
                tolerance = _number(check["tolerance"])
            bars.append(charts.Bar(name, value, told + verdict, low, high, ink))
            line += [f"{_number(row['perplexity']['perplexity']):.3f}", told]
        else:
            line += ["", ""]
        answers = row.get("answers")
        line.append(f"{answers['right']}/{answers['asked']}" if answers else "")
        kept = (row.get("agreement") or {}).get("kept")
        line.append(f"{100 * _number(kept['value']):.0f}%" if kept else "")
        verdict = row.get("verdict")
        line.append(_VERDICTS[verdict][1] if verdict else "")
        if verdict == "passed":
            passed.append(row)
        table.append(line)
    for row in found["settings"]:
        if "refused" in row:
            table.append([str(row["name"]), *[""] * 5, "refused: " + str(row["refused"])])
    plan = found["plan"]
    drawn = []
    if len(bars) > 1:
        drawn.append(
            (
                "Loss on text, in nats a token",
                lambda width: charts.intervals(
                    "Loss on text",
                    bars,
                    width,
                    0.0,
                    "no loss",
                    tolerance,
                    "tolerance",
                ),
            )
        )
    findings = []
    if passed:
        small = min(passed, key=lambda row: row["bits_per_value"])
        findings.append(
            f"<b>{escape(str(small['name']))}</b> ({small['bits_per_value']:.1f} bits instead of "
            f"{_number(rows[0]['bits_per_value']):.0f}) is the smallest that passed its quality "
            "check."
        )
    elif any("verdict" in row for row in rows):
        findings.append("<b>No setting passed</b> its quality check.")
    return Section(
        "quality",
        "What does it cost in quality?",
        f"<p>The model reads {plan['history']} tokens of text through the compressed cache and "
        "predicts those that follow. What it loses against the cache in full precision is told in "
        "<b>nats a token</b>: 0 is no loss, 0.01 is 1% more perplexity, the usual measure of how "
        "surprised a model is. The bar around a dot is where the true value lies with "
        f"{100 * _number(found['confidence']):.0f}% confidence. A setting passes if the whole bar "
        "is within the tolerance. <b>Answers</b> are questions about a long prompt that were "
        "answered right; <b>kept</b> is the share of the tokens of a long answer that the model "
        "would choose again.</p>",
        drawn,
        table,
        found["settings"],
        findings,
    )


def retrieval(found: dict[str, Any]) -> Section | None:
    """Which pass keys were found where."""
    maps = []
    table = [["setting", "task", "right", "interval"]]
    for row in _tried(found):
        asked = row.get("questions") or {}
        merged: dict[tuple[float, float], dict[str, float]] = {}
        for task, answered in asked.items():
            right = answered["right"]
            share = _number(right["value"])
            table.append(
                [
                    str(row["name"]),
                    str(task),
                    f"{share * answered['asked']:.0f}/{answered['asked']}",
                    f"{_number(right['low']):.2f} to {_number(right['high']):.2f}",
                ]
            )
            if task == "passages":
                continue
            for cell in answered["cells"]:
                place = (_number(cell["length"]), _number(cell["depth"]))
                sums = merged.setdefault(
                    place, {"length": place[0], "depth": place[1], "asked": 0, "right": 0}
                )
                sums["asked"] += cell["asked"]
                sums["right"] += cell["right"]
        if merged:
            maps.append((str(row["name"]), list(merged.values())))
    if len(table) == 1:
        return None
    drawn = []
    if maps:
        drawn.append(
            (
                "Pass keys found, by length of the prompt and place of the key",
                lambda width: charts.heat_maps("Pass keys found", maps, width),
            )
        )
    return Section(
        "retrieval",
        "Does it still find things in a long text?",
        "<p>Numbers are hidden in a long text, one alone or several with names, and asked for at "
        "its end. Columns are lengths of the prompt in tokens, rows the place of the number from "
        "the beginning to the end; a dark cell is one where all were found. <b>passages</b> are "
        "questions made from the text itself, which can only be answered by telling its passages "
        "apart. What the model fails at in full precision, the first map, no compression has lost."
        "</p>",
        drawn,
        table,
    )


def rate_distortion(found: dict[str, Any]) -> Section | None:
    """Size against loss."""
    rows = [row for row in _tried(found) if "perplexity" in row]
    if len(rows) < 2:
        return None
    points, across = [], []
    for number, row in enumerate(rows):
        above = row["perplexity"]["above"]
        name, bits = str(row["name"]), _number(row["bits_per_value"])
        told = f"{bits:.2f} bits, {_number(above['value']):+.3f}"
        points.append(
            charts.Bar(
                name,
                above["value"],
                told,
                above["low"],
                above["high"],
                "faint" if name == BASE else charts.colour(number - 1),
            )
        )
        across.append(bits)
    return Section(
        "rate_distortion",
        "What does a bit buy?",
        "<p>Each dot is a setting: how many bits it spends on a number of the cache, and what it "
        "loses. Left is smaller, down is better; a setting that lies to the right of another and "
        "no lower is not worth its bits.</p>",
        [
            (
                "Bits a value against loss",
                lambda width: charts.scatter(
                    "Bits against loss",
                    points,
                    across,
                    width,
                    "bits a value",
                    "nats a token lost",
                ),
            )
        ],
        [["setting", "bits a value", "nats lost"]]
        + [
            [point.label, f"{bits:.2f}", f"{point.value:+.3f}"]
            for point, bits in zip(points, across, strict=True)
        ],
        [
            {"name": p.label, "bits": b, "nats": p.value}
            for p, b in zip(points, across, strict=True)
        ],
    )


def latency(found: dict[str, Any]) -> Section | None:
    """What users wait for."""
    rows = found["rows"]
    names = list(found["settings"])
    head = ["setting", "prompt", "context", "at a time", "first token", "next token", "tokens/s"]
    table = [head]
    panels: dict[tuple[Any, Any], dict[str, list[charts.Bar]]] = {}
    findings = []
    for row in rows:
        table.append(
            [
                str(row["setting"]),
                str(row["phase"]),
                str(row["context"]),
                str(row["concurrency"]),
                f"{_number(row['ttft_ms']):,.0f} ms",
                f"{_number(row['tpot_ms']):,.1f} ms",
                f"{_number(row['output_tokens_s']):,.1f}",
            ]
        )
        if "ttft_ratio" not in row:
            continue
        place = panels.setdefault((row["context"], row["concurrency"]), {"ttft": [], "tpot": []})
        for what in ("ttft", "tpot"):
            ratio = row[f"{what}_ratio"]
            value, low, high = (_number(ratio[k]) for k in ("value", "low", "high"))
            place[what].append(
                charts.Bar(
                    f"{row['setting']}, {row['phase']}",
                    value,
                    f"{value:.2f} ({low:.2f} to {high:.2f})",
                    low,
                    high,
                    charts.colour(names.index(row["setting"]) - 1),
                )
            )
        if row["phase"] == "restored":
            findings.append(
                f"A prompt of {row['context']} tokens restored from a store "
                f"({escape(str(row['setting']))}, {row['concurrency']} at a time) begins to be "
                f"answered after <b>{row['ttft_ratio']['value']:.2f}{TIMES}</b> the time that "
                "computing it takes."
            )
    drawn: list[tuple[str, Draw]] = []
    titles = {"ttft": "Time to the first token", "tpot": "Time of each further token"}
    for (context, concurrency), panel in panels.items():
        for what, bars in panel.items():
            drawn.append(
                (
                    f"{titles[what]}: {context} tokens, {concurrency} at a time",
                    lambda width, bars=bars, what=what: charts.intervals(
                        titles[what], bars, width, 1.0, "as fast as without", logarithmic=True
                    ),
                )
            )
    return Section(
        "latency",
        "What does it do to waiting?",
        "<p>The same requests to a server of each setting, in "
        f"{found['load']['rounds']} rounds that change places. Dots are times over those without "
        "compression: left of the line is faster, and the bar is the spread over the rounds. "
        "<b>cold</b> prompts are new; <b>warm</b> ones come from the server's own cache; "
        "<b>restored</b> ones from a store alone, compared with computing them.</p>",
        drawn,
        table,
        rows,
        findings[:2],
    )


LIGHT = {
    **{"paper": "#fbfaf7", "card": "#fff", "ink": "#1d2430", "soft": "#5c6675", "line": "#dcdfe5"},
    **{"faint": "#a5adba", "bad": "#b3263c", "good": "#1a7a4c", "on": "#fff"},
    **{"c0": "#2563c9", "c1": "#b4530f", "c2": "#1a7a4c"},
    **{"c3": "#7d44bd", "c4": "#b3265f", "c5": "#6d6100"},
}
"""Colours by the names that charts use."""

DARK = {
    **{"paper": "#12161c", "card": "#1b212a", "ink": "#e8ebf0", "soft": "#a3adbb"},
    **{"line": "#343c48", "faint": "#6f7a89", "bad": "#ff8a97", "good": "#63d49b", "on": "#10141a"},
    **{"c0": "#7fb0ff", "c1": "#ffa66b", "c2": "#63d49b"},
    **{"c3": "#c9a0ff", "c4": "#ff8fb8", "c5": "#d8c84f"},
}


def _style() -> str:
    light, dark = (
        ":root{" + ";".join(f"--{name}:{value}" for name, value in colours.items()) + "}"
        for colours in (LIGHT, DARK)
    )
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}{STYLE}"


STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,sans-serif}
main{max-width:840px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:1.7rem;line-height:1.25;margin:0 0 8px}
h2{font-size:1.3rem;margin:0 0 8px}h3{font-size:1rem;margin:24px 0 10px}
.sub,footer{color:var(--soft)}p{margin:0 0 12px}
section,.found{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:22px 24px;margin:22px 0}
.found ul{margin:0;padding-left:20px}.found li{margin:4px 0}
.n{display:none}.n svg{width:100%;max-width:560px}
svg{display:block;max-width:100%;height:auto}
summary{cursor:pointer;color:var(--soft);margin-top:16px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.875rem;margin-top:10px;min-width:100%}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);
white-space:nowrap;font-variant-numeric:tabular-nums}
th{color:var(--soft);font-weight:600}td:last-child{white-space:normal}
@media(max-width:820px){main{padding:20px 10px 40px}section,.found{padding:16px 9px}
h1{font-size:1.4rem}.w{display:none}.n{display:block}}
@media print{section{break-inside:avoid}}
"""


def page(model: str, made: Sequence[Section]) -> str:
    """The page: HTML that needs nothing else."""
    findings = [finding for section in made for finding in section.findings]
    found = "".join(f"<li>{finding}</li>" for finding in findings)
    body = "".join(_section(section) for section in made)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Compressed KV cache: {escape(model)}</title>"
        f"<style>{_style()}</style></head><body><main>"
        f"<h1>What a compressed KV cache is worth</h1>"
        f'<p class="sub">{escape(model)}, measured with vllm-kvcompress</p>'
        + (f'<div class="found"><h2>In short</h2><ul>{found}</ul></div>' if found else "")
        + body
        + "<footer><p>Settings are named by vLLM's <code>--kv-cache-dtype</code>. "
        "<code>auto</code> is the model's own precision, <code>fp8</code> 8 bits; "
        "<code>kivi_…</code> are pages of 2 to 4 bits after KIVI, a method that keeps keys by "
        "channel and values by token, and the newest tokens exact. <code>offload:…</code> is what "
        "is put away through a codec. The weights of the model are the same throughout, unless a "
        "setting names others.</p></footer></main></body></html>\n"
    )


def _section(section: Section) -> str:
    drawn = "".join(
        f'<h3>{escape(heading)}</h3><div class="w">{draw(charts.WIDE)}</div>'
        f'<div class="n">{draw(charts.NARROW)}</div>'
        for heading, draw in section.charts
    )
    return (
        f'<section id="{section.name}"><h2>{escape(section.title)}</h2>{section.text}{drawn}'
        f"<details><summary>The figures</summary>{_table(section.table)}</details></section>"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:]
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def images(model: str, made: Sequence[Section]) -> dict[str, bytes]:
    """Every chart under its heading as a PNG picture, by the name of its file."""
    from vllm_kvcompress.evaluation import pictures

    found = {}
    for section in made:
        for number, (heading, draw) in enumerate(section.charts, 1):
            suffix = f"-{number}" if len(section.charts) > 1 else ""
            name = f"{section.name.replace('_', '-')}{suffix}.png"
            found[name] = pictures.png(heading, model, draw(charts.WIDE), LIGHT)
    return found
