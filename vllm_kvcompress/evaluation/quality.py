"""The quality of settings on a model: every task under every setting, and what differs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_kvcompress import capacity, compat
from vllm_kvcompress.config import KiviSettings
from vllm_kvcompress.evaluation import statistics, tasks
from vllm_kvcompress.evaluation.engine import Score, Session, session
from vllm_kvcompress.evaluation.settings import Setting
from vllm_kvcompress.model_layers import ModelLayers
from vllm_kvcompress.page_profile import load_page_profile
from vllm_kvcompress.progress import Progress

TASKS = ("perplexity", "retrieval", "passages", "agreement")

SHORT_ANSWER = 8
"""Tokens of the answer to a question: enough for a pass key, or for a word."""


@dataclass(frozen=True)
class Plan:
    """How much is asked."""

    tasks: tuple[str, ...] = TASKS
    windows: int = 8
    """Windows of text in all whose ends are predicted."""
    history: int = 1024
    """Tokens before those that are predicted, and of prompts across passages."""
    scored: int = 128
    """Tokens of a window that are predicted, at its end."""
    lengths: tuple[int, ...] = (512, 1024)
    """Tokens of prompts with pass keys."""
    depths: int = 3
    trials: int = 2
    """Prompts of each length and depth, with one key and with several."""
    questions: int = 12
    answers: int = 4
    """Long answers that are compared."""
    answer_tokens: int = 64
    prefill_chunk: int = 64

    def __post_init__(self) -> None:
        unknown = sorted(set(self.tasks) - set(TASKS))
        if unknown or not self.tasks:
            raise ValueError(f"--tasks {' '.join(unknown)}: choose from {', '.join(TASKS)}")
        for name, least in (
            *(("windows", 1), ("history", 1), ("scored", 1), ("depths", 1), ("trials", 1)),
            *(("questions", 1), ("answers", 1), ("answer_tokens", 1), ("prefill_chunk", 4)),
        ):
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is {getattr(self, name)}; expected at least {least}")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError("--lengths are numbers of tokens of at least 1")

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, with those that are generated."""
        longest = max(self.history + self.scored + self.answer_tokens, *self.lengths)
        return longest + 64


@dataclass
class Inputs:
    """What every setting is asked, the same for all."""

    windows: list[list[int]] = field(default_factory=list)
    questions: list[tasks.Question] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    """Of the long answers."""

    @classmethod
    def make(cls, plan: Plan, tokenizer: Any, texts: Sequence[tuple[str, str]]) -> Inputs:
        """Raises ValueError for texts that are too short."""
        found = cls()
        encoded = [tasks.encode(tokenizer, text) for _, text in texts]
        length = plan.history + 1 + plan.scored
        if "perplexity" in plan.tasks:
            share = math.ceil(plan.windows / len(texts))
            each = [tasks.windows(ids, length, share) for ids in encoded]
            found.windows = [w for own in zip(*each, strict=False) for w in own][: plan.windows]
            if len(found.windows) < plan.windows:
                raise ValueError(
                    f"the texts give {len(found.windows)} of {plan.windows} windows of {length} "
                    "tokens; give longer ones with --text, or fewer --windows"
                )
        if "retrieval" in plan.tasks:
            for keys in (1, tasks.KEYS):
                found.questions += tasks.pass_keys(
                    tokenizer, encoded[0], plan.lengths, plan.depths, plan.trials, keys
                )
        if "passages" in plan.tasks:
            share = math.ceil(plan.questions / len(texts))
            for _, text in texts:
                found.questions += tasks.passage_questions(tokenizer, text, plan.history, share)
        if "agreement" in plan.tasks:
            share = math.ceil(plan.answers / len(texts))
            each = [tasks.windows(ids, plan.history, share) for ids in encoded]
            found.prompts = [w for own in zip(*each, strict=False) for w in own][: plan.answers]
            if not found.prompts:
                raise ValueError(
                    f"no text has {plan.history} tokens; give longer ones with --text, or a "
                    "shorter --history"
                )
        return found

    def tokens(self, plan: Plan) -> int:
        """Tokens that a setting reads and writes to answer all of it."""
        # Long answers are written, and then read again to be rated.
        return (
            sum(len(window) + 1 for window in self.windows)
            + sum(len(question.ids) + SHORT_ANSWER for question in self.questions)
            + sum(2 * (len(prompt) + plan.answer_tokens) + 1 for prompt in self.prompts)
        )


@dataclass
class Measured:
    """What a setting gave."""

    nats: list[float] = field(default_factory=list)
    """Per window, a token."""
    right: list[bool] = field(default_factory=list)
    """Per question."""
    answers: list[list[int]] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    """Per long answer of the base, the share of its tokens that are the most likely ones still."""
    ratio: float | None = None
    """Of the codec."""
    loaded_share: float | None = None
    """Of the prompt tokens, those that came out of the store."""


def measure(
    asked: Session,
    plan: Plan,
    inputs: Inputs,
    decode: Callable[[list[int]], str],
    base: Measured | None,
) -> Measured:
    """Every task under one setting. ``base``: what it is compared with, None for itself."""
    found = Measured()
    if inputs.windows:
        scores = asked.scores(inputs.windows, plan.scored)
        found.nats = [-_mean(score.logprob for score in own) for own in scores]
    if inputs.questions:
        asked_with = [question.ids for question in inputs.questions]
        answers = asked.answers(asked_with, SHORT_ANSWER)
        found.right = [
            question.is_right(decode(answer))
            for question, answer in zip(inputs.questions, answers, strict=True)
        ]
    if inputs.prompts:
        found.answers = asked.answers(inputs.prompts, plan.answer_tokens)
        expected = found.answers if base is None else base.answers
        prompts = [p + answer for p, answer in zip(inputs.prompts, expected, strict=True)]
        # The first token of an answer is predicted by the last one of the history.
        scores = asked.scores(prompts, plan.answer_tokens - 1) if plan.answer_tokens > 1 else []
        found.kept = [share_first(own) for own in scores]
    found.ratio = asked.ratio()
    if asked.loaded_tokens:
        found.loaded_share = asked.loaded_tokens / asked.prompt_tokens
    return found


def share_first(scores: Sequence[Score]) -> float:
    """Share of tokens that were the most likely ones."""
    return _mean(float(score.first) for score in scores)


def same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens until the first that differs."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def evaluate(
    model: str,
    settings: Sequence[Setting],
    plan: Plan,
    texts: Sequence[tuple[str, str]],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Measure every setting, the base first, one engine after another.

    A setting that an engine refuses is told with its reason; the base has to run. ``options``: more
    arguments of ``vllm.LLM``. An interrupt leaves the settings out that are not done, and says so
    under ``interrupted``, once the base is. Raises ValueError for what cannot be asked.
    """
    from transformers import AutoTokenizer

    layers = ModelLayers.read(model, options.get("dtype", "auto"))
    if plan.max_model_len > layers.max_model_len:
        raise ValueError(
            f"the model takes {layers.max_model_len} tokens, and {plan.max_model_len} are asked "
            "for; give a shorter --history and shorter --lengths"
        )
    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = Inputs.make(plan, tokenizer, texts)
    rows = [describe(setting, layers) for setting in settings]
    if "refused" in rows[0]:
        raise ValueError(f"setting {settings[0].name}: {rows[0]['refused']}")
    base: Measured | None = None
    interrupted = False
    tokens = inputs.tokens(plan)
    with Progress(tokens * len(settings), "token") as progress:
        for number, (setting, row) in enumerate(zip(settings, rows, strict=True), 1):
            place = f"{number}/{len(settings)} {setting.name}"
            progress.doing(place)
            started = time.monotonic()
            if "refused" not in row:
                try:
                    with session(
                        model, setting, plan.max_model_len, plan.prefill_chunk, progress, **options
                    ) as asked:
                        mine = measure(asked, plan, inputs, tokenizer.decode, base)
                except (ValueError, RuntimeError, NotImplementedError, OSError) as error:
                    if base is None:
                        raise ValueError(f"setting {setting.name}: {error}") from error
                    row["refused"] = " ".join(str(error).split()) or type(error).__name__
                except KeyboardInterrupt:
                    if base is None:
                        raise
                    for left_out in rows[number - 1 :]:
                        left_out["refused"] = "interrupted"
                    interrupted = True
                    break
            progress.reach(tokens * number)
            if "refused" in row:
                progress.tell(f"{place}: {row['refused']}")
                continue
            base = base or mine
            row |= summary(inputs, mine, base)
            if mine.ratio is not None:
                row["ratio"] = mine.ratio
                row["bits_per_value"] /= mine.ratio
            row["seconds"] = time.monotonic() - started
            progress.tell(f"{place}: {row['seconds']:.0f} s")
    return {
        "kind": "eval",
        "model": layers.name,
        "texts": [name for name, _ in texts],
        "plan": asdict(plan),
        "confidence": statistics.CONFIDENCE,
        "interrupted": interrupted,
        "settings": rows,
    }


def describe(setting: Setting, layers: ModelLayers) -> dict[str, Any]:
    """What a setting is, and the bits a value of its pages; why, if the model cannot have them."""
    row = {key: value for key, value in asdict(setting).items() if value not in (None, {}, ())}
    kivi = KiviSettings.parse({"kvcompress": {"kivi": setting.kivi}})
    profile = None if setting.pages_profile is None else load_page_profile(setting.pages_profile)
    cache = capacity.CacheOptions(setting.cache_dtype, kivi, setting.skip_layers, profile)
    engine = capacity.EngineOptions(device="cpu" if compat.is_cpu() else "cuda")
    try:
        planned = capacity.plan(layers, engine, cache)
        row["bits_per_value"] = 8 * planned.token_bytes() / planned.values()
    except ValueError as error:
        row["refused"] = str(error)
    return row


def summary(inputs: Inputs, mine: Measured, base: Measured) -> dict[str, Any]:
    """Figures of a setting, with intervals of what differs from the base."""
    found: dict[str, Any] = {}
    if mine.nats:
        above = [a - b for a, b in zip(mine.nats, base.nats, strict=True)]
        found["perplexity"] = {
            "windows": len(above),
            "nats": _mean(mine.nats),
            "perplexity": math.exp(_mean(mine.nats)),
            "above": statistics.mean_interval(above).to_json(),
        }
    if mine.right:
        by_task: dict[str, list[int]] = {}
        for place, question in enumerate(inputs.questions):
            by_task.setdefault(question.task, []).append(place)
        found["questions"] = {
            task: {
                "asked": len(places),
                "right": statistics.share_interval(
                    sum(mine.right[i] for i in places), len(places)
                ).to_json(),
                "cells": cells([(inputs.questions[i], mine.right[i]) for i in places]),
            }
            for task, places in by_task.items()
        }
        found["answers"] = {
            "asked": len(mine.right),
            "right": sum(mine.right),
            "base_right": sum(base.right),
            "lost": statistics.lost_share_interval(base.right, mine.right).to_json(),
        }
    if mine.answers:
        same = [same_tokens(a, b) for a, b in zip(mine.answers, base.answers, strict=True)]
        found["agreement"] = {
            "answers": len(same),
            "tokens": len(mine.answers[0]),
            "same_until": same,
            "kept": statistics.mean_interval(mine.kept).to_json() if mine.kept else None,
        }
    if mine.loaded_share is not None:
        found["loaded_share"] = mine.loaded_share
    return found


def cells(answered: Sequence[tuple[tasks.Question, bool]]) -> list[dict[str, float]]:
    """Of each length and depth, how many were asked and right."""
    found: dict[tuple[int, float], list[bool]] = {}
    for question, right in answered:
        found.setdefault((question.length, question.depth), []).append(right)
    return [
        {"length": length, "depth": depth, "asked": len(right), "right": sum(right)}
        for (length, depth), right in sorted(found.items())
    ]


def _mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found)
