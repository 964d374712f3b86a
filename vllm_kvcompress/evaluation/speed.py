"""The speed of settings: the same requests to a server of each, side by side in rounds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_kvcompress.evaluation.server import NAME, Server, ServerError
from vllm_kvcompress.evaluation.settings import Setting
from vllm_kvcompress.evaluation.statistics import quantile, ratio_interval
from vllm_kvcompress.evaluation.tasks import encode, repeated
from vllm_kvcompress.model_layers import ModelLayers
from vllm_kvcompress.progress import Progress

_ROOM = 16
"""Tokens that a server takes beside those that are asked for."""

COLD, WARM, RESTORED = "cold", "warm", "restored"
"""A prompt that is new; again, from the engine's own prefix cache; again, from the stores alone."""

FIGURES = {
    "ttft_ms": "median time to the first token",
    "ttft_p99_ms": "its 99th percentile",
    "tpot_ms": "median time of a further token, mean over a request",
    "itl_p99_ms": "99th percentile of the time between two tokens",
    "output_tokens_s": "tokens a second of all requests",
    "total_tokens_s": "the same, with those of the prompts",
}


def phases_of(setting: Setting) -> tuple[str, ...]:
    """The phases that a server of the setting is measured in."""
    return (COLD, WARM, RESTORED) if setting.offloads else (COLD, WARM)


@dataclass(frozen=True)
class Load:
    """What is asked of every server."""

    contexts: tuple[int, ...] = (1024,)
    """Tokens of a prompt."""
    concurrencies: tuple[int, ...] = (1, 4)
    """Requests at a time."""
    requests: int = 4
    """Of each context and concurrency in a round, at least."""
    output_tokens: int = 32
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("contexts", "concurrencies"):
            values = getattr(self, name)
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise ValueError(f"--{name} are different numbers of at least 1")
        for name, least in (("requests", 1), ("output_tokens", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is {getattr(self, name)}; expected at least {least}")

    def cells(self) -> list[tuple[int, int]]:
        """Every context with every concurrency."""
        return list(itertools.product(self.contexts, self.concurrencies))

    def batch(self, concurrency: int) -> int:
        """Requests of a cell in a round: enough for as many at a time."""
        return max(self.requests, concurrency)

    def asked(self, settings: Sequence[Setting]) -> int:
        """Requests that are measured in all."""
        phases = sum(len(phases_of(setting)) for setting in settings)
        requests = sum(self.batch(concurrency) for _, concurrency in self.cells())
        return self.rounds * phases * requests


class Prompts:
    """Prompts out of a text, no two of which begin alike."""

    def __init__(self, ids: Sequence[int], seed: int = 0) -> None:
        starts = list(range(len(ids)))
        random.Random(seed).shuffle(starts)
        self._ids = ids
        self._starts = iter(starts)

    def take(self, count: int, length: int) -> list[list[int]]:
        """Raises ValueError where the text has no more."""
        starts = list(itertools.islice(self._starts, count))
        if len(starts) < count:
            raise ValueError("the text is too short for so many prompts; give more with --text")
        return [repeated(self._ids, start, length) for start in starts]


@dataclass(frozen=True)
class Answered:
    """How long a request took, in seconds."""

    first: float
    """To the first token."""
    whole: float
    gaps: list[float]
    """Between two tokens."""
    tokens: int
    """That were generated."""


def figures(answers: Sequence[Answered], prompt_tokens: int, seconds: float) -> dict[str, float]:
    """FIGURES of requests that took ``seconds`` in all, ``prompt_tokens`` of each."""
    tokens = sum(answer.tokens for answer in answers)
    further = [(one.whole - one.first) / (one.tokens - 1) for one in answers if one.tokens > 1]
    # A server that has several tokens ready sends them together, without a gap.
    gaps = [gap for answer in answers for gap in answer.gaps] or further
    firsts = [answer.first for answer in answers]
    return {
        "ttft_ms": 1e3 * statistics.median(firsts),
        "ttft_p99_ms": 1e3 * quantile(firsts, 0.99),
        "tpot_ms": 1e3 * statistics.median(further),
        "itl_p99_ms": 1e3 * quantile(gaps, 0.99),
        "output_tokens_s": tokens / seconds,
        "total_tokens_s": (tokens + prompt_tokens * len(answers)) / seconds,
    }


async def _ask(
    server: Server, prompts: Sequence[list[int]], concurrency: int, tokens: int
) -> list[Answered]:
    """Through the functions that ``vllm bench serve`` asks with."""
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import (
        RequestFuncInput,
        async_request_openai_completions,
    )

    free = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=3600)

    async def one(client: aiohttp.ClientSession, prompt: list[int]) -> Answered:
        asked = RequestFuncInput(
            prompt=prompt,
            api_url=server.url + "/v1/completions",
            prompt_len=len(prompt),
            output_len=tokens,
            model=NAME,
            ignore_eos=True,
            extra_body={"temperature": 0},
        )
        async with free:
            found = await async_request_openai_completions(asked, client)
        if not found.success:
            cause = (found.error.strip().splitlines() or ["no answer"])[-1]
            raise ServerError(f"{server.setting.name}: {cause} (log: {server.log})")
        return Answered(found.ttft, found.latency, found.itl, found.output_tokens)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        return await asyncio.gather(*(one(client, prompt) for prompt in prompts))


def ask(server: Server, prompts: list[list[int]], concurrency: int, tokens: int) -> dict:
    """FIGURES of prompts that are sent together, ``concurrency`` at a time."""
    started = time.perf_counter()
    answers = asyncio.run(_ask(server, prompts, concurrency, tokens))
    return figures(answers, len(prompts[0]), time.perf_counter() - started)


def measure(
    server: Server, prompts: list[list[int]], concurrency: int, tokens: int, progress: Progress
) -> dict:
    """FIGURES by phase."""
    found = {}
    for phase in phases_of(server.setting):
        if phase == RESTORED:
            server.wait_until_stored()
            server.forget()
        before = server.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)
        found[phase] = ask(server, prompts, concurrency, tokens)
        progress.advance(len(prompts))
        if phase == RESTORED:
            after = server.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)
            found[phase]["restored_share"] = (after - before) / sum(map(len, prompts))
    return found


def bench(
    model: str,
    settings: Sequence[Setting],
    load: Load,
    texts: Sequence[tuple[str, str]],
    options: Sequence[str],
    one_at_a_time: bool,
) -> dict[str, Any]:
    """Measure every setting, the base first among them.

    In every round each setting answers the same prompts, and the order of the settings turns by
    one from round to round. ``one_at_a_time``: a server is started for each setting and round,
    where the memory does not hold all of them at once. ``options``: more of ``vllm serve``.
    Raises ServerError, with the place of the log, for a server that does not do, and ValueError for
    what cannot be asked.
    """
    from transformers import AutoTokenizer

    layers = ModelLayers.read(model)
    longest = max(load.contexts) + load.output_tokens + _ROOM
    if longest > layers.max_model_len:
        raise ValueError(
            f"the model takes {layers.max_model_len} tokens, and {longest} are asked for; give "
            "shorter --contexts"
        )
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = Prompts([token for _, text in texts for token in encode(tokenizer, text)])
    options = ["--max-model-len", str(longest), *options]
    runs: list[dict[str, Any]] = []

    def server(number: int, attempt: int) -> Server:
        name = f"{number}-{attempt}"
        return Server(
            model, settings[number], folder / f"store-{name}", folder / f"{name}.log", options
        )

    def ready(running: Server) -> None:
        """Let it compile what it compiles at the first request, of every size."""
        for context in load.contexts:
            # One prompt is enough: from its second request on the engine has it in its cache.
            own = prompts.take(1, context)
            for concurrency in sorted({1, *load.concurrencies}):
                ask(running, own * concurrency, concurrency, 2)

    def record(round_: int, number: int, running: Server, cell: tuple[int, int], own: list) -> None:
        context, concurrency = cell
        place = (
            f"round {round_ + 1}/{load.rounds}, {context} tokens, {concurrency} at a time, "
            f"{settings[number].name}"
        )
        progress.doing(place)
        found = measure(running, own, concurrency, load.output_tokens, progress)
        runs.append(
            {
                "round": round_,
                "setting": settings[number].name,
                "context": context,
                "concurrency": concurrency,
                "phases": found,
            }
        )
        progress.tell(f"{place}: first token after {found[COLD]['ttft_ms']:.0f} ms")

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder())
        progress = stack.enter_context(Progress(load.asked(settings), "request"))
        running: dict[int, Server] = {}
        if not one_at_a_time:
            for number, setting in enumerate(settings):
                progress.tell(f"starting a server of {setting.name}")
                running[number] = stack.enter_context(server(number, 0))
                ready(running[number])
        for round_ in range(load.rounds):
            own = {cell: prompts.take(load.batch(cell[1]), cell[0]) for cell in load.cells()}
            if one_at_a_time:
                for number in turned(len(settings), round_):
                    progress.tell(f"starting a server of {settings[number].name}")
                    with server(number, round_) as single:
                        ready(single)
                        for cell in load.cells():
                            record(round_, number, single, cell, own[cell])
                continue
            for cell in load.cells():
                for number in turned(len(settings), round_):
                    record(round_, number, running[number], cell, own[cell])
    return {
        "kind": "bench",
        "model": layers.name,
        "load": asdict(load),
        "one_at_a_time": one_at_a_time,
        "options": options,
        "settings": [setting.name for setting in settings],
        "rows": rows(runs, settings[0].name),
        "runs": runs,
    }


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for stores and logs, of which the logs stay if a server fails."""
    folder = Path(tempfile.mkdtemp(prefix="kvcompress-bench-"))
    failed = False
    try:
        yield folder
    except ServerError:
        failed = True
        raise
    finally:
        for path in folder.glob("store-*") if failed else [folder]:
            shutil.rmtree(path, ignore_errors=True)


def turned(count: int, by: int) -> Iterator[int]:
    """The numbers below ``count``, from ``by`` on, and round the end."""
    return ((by + i) % count for i in range(count))


def rows(runs: Sequence[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    """Per setting, context, concurrency and phase the median of each figure over the rounds, and
    its ratio to the base in the same round.

    What is restored from a store is compared with the base that computes it: with its COLD.
    """
    by_place: dict[tuple, dict[int, dict]] = {}
    for run in runs:
        for phase, found in run["phases"].items():
            place = (run["setting"], run["context"], run["concurrency"], phase)
            by_place.setdefault(place, {})[run["round"]] = found
    table = []
    for (setting, context, concurrency, phase), rounds in by_place.items():
        against = COLD if phase == RESTORED else phase
        bases = by_place[base, context, concurrency, against]
        row = {
            "setting": setting,
            "context": context,
            "concurrency": concurrency,
            "phase": phase,
            "rounds": len(rounds),
        }
        for name in FIGURES:
            values = [found[name] for found in rounds.values()]
            row[name] = statistics.median(values)
            if setting != base:
                ratios = [found[name] / bases[number][name] for number, found in rounds.items()]
                row[name.removesuffix("_ms") + "_ratio"] = ratio_interval(ratios).to_json()
        if phase == RESTORED:
            row["restored_share"] = statistics.median(
                found["restored_share"] for found in rounds.values()
            )
        table.append(row)
    return table
