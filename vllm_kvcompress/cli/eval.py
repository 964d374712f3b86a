"""What compression costs in quality, on your model and your text, with a verdict.

Every setting is asked the same: to predict text that follows a long history, to find one of several
pass keys in a long prompt, to tell passages of the text apart, and to write long answers. History
is read as it is stored: in small chunks from compressed pages, or through the codec of the offload.
A setting passes if the whole 95% interval of what it loses is within the tolerance; status 1 if one
does not pass.

  vllm-kvcompress eval MODEL --text book.txt --json > eval.json
  vllm-kvcompress eval MODEL --settings kivi_2bit kivi_2bit,skip_layers=0:1 offload:cachegen/low
  vllm-kvcompress eval MODEL --settings all --windows 32
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_kvcompress.cli.options import (
    add_comparison,
    add_counts,
    engine_options,
    log_aside,
    number,
)
from vllm_kvcompress.evaluation import settings
from vllm_kvcompress.evaluation.verdict import FAILED, UNCLEAR, Tolerance, judge

TASKS = ("perplexity", "retrieval", "passages", "agreement")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the settings, how much is asked, and what may be lost."""
    add_comparison(parser, settings.DEFAULT)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add_counts(
        parser,
        (
            ("windows", 8, "windows of text whose ends are predicted"),
            ("history", 1024, "tokens of history, and of prompts across passages"),
            ("scored", 128, "tokens that are predicted in a window"),
            ("lengths", [512, 1024], "tokens of prompts with pass keys"),
            ("depths", 3, "places of a pass key in a prompt"),
            ("trials", 2, "prompts of each length and place, with one key and with several"),
            ("questions", 12, "questions across passages"),
            ("answers", 4, "long answers"),
            ("answer-tokens", 64, "tokens of a long answer"),
            ("prefill-chunk", 64, "tokens of a step of prefill, vLLM's max_num_batched_tokens"),
        ),
    )
    parser.add_argument(
        "--tolerance-nats",
        type=number,
        default=Tolerance.nats,
        metavar="NATS",
        help=f"most that may be lost on text, in nats a token ({Tolerance.nats})",
    )
    parser.add_argument(
        "--tolerance-answers",
        type=number,
        default=Tolerance.answers,
        metavar="SHARE",
        help=f"largest share of questions whose answer may be lost ({Tolerance.answers})",
    )
    parser.add_argument(
        "--engine",
        default="{}",
        metavar="JSON",
        help="more arguments of vllm.LLM, such as '{\"tensor_parallel_size\": 2}'",
    )
    parser.add_argument(
        "--lm-eval",
        nargs="+",
        default=[],
        metavar="TASK",
        help="also run these tasks of lm-eval, if it is installed, against a server a setting",
    )
    add_counts(parser, (("limit", 100, "documents of a task of lm-eval"),))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and judge."""
    log_aside(arguments.verbose)
    chosen = settings.parse_settings(arguments.settings)
    tolerance = Tolerance(arguments.tolerance_nats, arguments.tolerance_answers)
    options = engine_options(arguments.engine)

    from vllm_kvcompress.evaluation import harness, quality
    from vllm_kvcompress.evaluation.text import read_texts

    plan = quality.Plan(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name in quality.Plan.__dataclass_fields__
            for value in [getattr(arguments, name)]
        }
    )
    if arguments.lm_eval and not harness.is_installed():
        raise ValueError(harness.MISSING)
    texts = read_texts(arguments.text)
    found = quality.evaluate(arguments.model, chosen, plan, texts, options)
    for setting, row in zip(chosen, found["settings"], strict=True):
        if found["interrupted"] and "refused" in row:
            continue
        if setting.name != settings.BASE:
            row |= judge(row, tolerance)
        if arguments.lm_eval and not found["interrupted"] and "refused" not in row:
            row["lm_eval"] = run_harness(arguments, setting)
    if arguments.json:
        print(json.dumps(found))
    else:
        print_eval(found)
    if found["interrupted"]:
        return 130
    verdicts = {row.get("verdict") for row in found["settings"]}
    return 1 if verdicts & {FAILED, UNCLEAR} else 0


def run_harness(arguments: argparse.Namespace, setting: settings.Setting) -> dict[str, Any]:
    """Scores of lm-eval through a server. Raises ValueError where one of the two fails."""
    from vllm_kvcompress.evaluation import harness
    from vllm_kvcompress.evaluation.server import Server

    print(f"lm-eval: {setting.name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        try:
            with Server(arguments.model, setting, place / "store", place / "log") as server:
                return harness.run(
                    server, arguments.model, arguments.lm_eval, arguments.limit, place / "results"
                )
        except RuntimeError as error:
            raise ValueError(str(error)) from error


def print_eval(found: Mapping[str, Any]) -> None:
    """A table for a person, and the verdicts."""
    plan = found["plan"]
    print(
        f"{found['model']}: {plan['history']} tokens of history, "
        f"{100 * found['confidence']:.0f}% intervals\n"
    )
    rows = found["settings"]
    width = max(len("setting"), *(len(row["name"]) for row in rows))
    heads = f"{'bits':>6}  {'nats above':>18}  {'keys':>7}  {'passages':>8}  {'kept':>5}  verdict"
    print(f"{'setting':{width}}  {heads}")
    for row in rows:
        if "refused" in row:
            print(f"{row['name']:{width}}  {row['refused']}")
            continue
        print(
            f"{row['name']:{width}}  {row['bits_per_value']:6.2f}  {_nats(row):>18}  "
            f"{_right(row, 'passkey', 'multikey'):>7}  {_right(row, 'passages'):>8}  "
            f"{_kept(row):>5}  {row.get('verdict', '')}".rstrip()
        )
    print(
        "\nbits: a value of the KV cache. nats above: lost a token on text, 0.05 is 5% of "
        "perplexity.\nkeys, passages: questions answered right. kept: tokens of a long answer that "
        "the model would\nchoose again."
    )
    if any(row.get("verdict") == UNCLEAR for row in rows):
        print("unclear: raise --windows, --trials and --questions until the interval is narrow.")
    for row in rows:
        for task, scores in row.get("lm_eval", {}).items():
            told = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
            print(f"lm-eval {task:24} {row['name']:{width}}  {told}")


def _nats(row: Mapping[str, Any]) -> str:
    if "perplexity" not in row:
        return ""
    above = row["perplexity"]["above"]
    if above["high"] is None:
        return f"{above['value']:+.3f}"
    return f"{above['value']:+.3f} ± {above['high'] - above['value']:.3f}"


def _right(row: Mapping[str, Any], *tasks: str) -> str:
    asked = [row["questions"][task] for task in tasks if task in row.get("questions", {})]
    if not asked:
        return ""
    right = sum(cell["right"] for task in asked for cell in task["cells"])
    return f"{right}/{sum(task['asked'] for task in asked)}"


def _kept(row: Mapping[str, Any]) -> str:
    kept = row.get("agreement", {}).get("kept")
    return f"{100 * kept['value']:.0f}%" if kept else ""
