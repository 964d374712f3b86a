"""Whether a setting loses no more than a tolerance, and whether that has been shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PASSED, UNCLEAR, FAILED, EMPTY = "passed", "unclear", "failed", "nothing to lose"


@dataclass(frozen=True)
class Tolerance:
    """The most that may be lost against the base."""

    nats: float = 0.05
    """A token, on text."""
    answers: float = 0.1
    """Share of all questions whose answer is lost."""

    def __post_init__(self) -> None:
        if not self.nats >= 0 or not 0 <= self.answers <= 1:
            raise ValueError(
                f"--tolerance-nats {self.nats} and --tolerance-answers {self.answers}: expected "
                "nats of at least 0, and a share from 0 to 1"
            )


def judge(row: Mapping[str, Any], tolerance: Tolerance) -> dict[str, Any]:
    """The verdict on a row of an evaluation, and the check behind each part of it.

    ``passed``: the whole interval is within the tolerance. ``failed``: the value is not.
    ``unclear``: the value is, and the interval is too wide to show it; more windows or questions
    narrow it. ``nothing to lose``: the base itself knows no answer.
    """
    if "refused" in row:
        return {"verdict": FAILED, "checks": {}}
    checks = {}
    if "perplexity" in row:
        checks["perplexity"] = _check(row["perplexity"]["above"], tolerance.nats)
    if "answers" in row:
        checks["answers"] = _check(row["answers"]["lost"], tolerance.answers)
        if not row["answers"]["base_right"]:
            checks["answers"]["verdict"] = EMPTY
    verdicts = [check["verdict"] for check in checks.values()]
    worst = next((kind for kind in (FAILED, UNCLEAR, PASSED) if kind in verdicts), EMPTY)
    return {"verdict": worst, "checks": checks}


def _check(interval: Mapping[str, float | None], tolerance: float) -> dict[str, Any]:
    if interval["value"] > tolerance:
        verdict = FAILED
    elif interval["high"] is not None and interval["high"] <= tolerance:
        verdict = PASSED
    else:
        verdict = UNCLEAR
    return {"verdict": verdict, "tolerance": tolerance, **interval}
