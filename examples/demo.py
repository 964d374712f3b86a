"""A real vLLM server stores its KV cache compressed, restarts, and serves from it. Run `make demo`.

Per codec, two servers one after the other share a store on disk. The first sees a document of at
least 3,000 tokens, cold; the second, started on the same store, gets the same prompt and another
one that shares its first half. A table tells what came from the store and what it cost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from openai import APIError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".cache" / "smollm2-135m"
LOGS = ROOT / ".cache" / "demo"
NAME = "smollm2-135m"

CHUNK_TOKENS = 256
PROMPT_TOKENS = 3072
ANSWER_TOKENS = 32
EVERY_SECOND = ANSWER_TOKENS // 2
START_SECONDS = 600
STOP_SECONDS = 30
STORE_SECONDS = 120
AUTOMATIC_RAW_SECONDS = 120

# vLLM logs the traceback of the process that failed before those of the processes above it.
ROOT_CAUSE = re.compile(r"(?:\(.*?\) ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)")

STARTED = time.monotonic()


class DemoError(Exception):
    """The demo cannot go on; the message is one line."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.1f} s] {text}", flush=True)


@dataclass
class Answer:
    """What one request cost and gave."""

    prompt_tokens: int
    from_gpu_cache: int
    """Prompt tokens found in vLLM's own prefix cache."""
    from_store: int
    """Prompt tokens restored by the connector."""
    first_token_seconds: float
    token_ids: list[int]


class Server:
    """`vllm serve` with the connector on a free loopback port, stopped when the block ends."""

    def __init__(self, codec: str, level: str | None, store: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        extra = {
            "codec": codec,
            "stores": [
                {"type": "memory", "bytes": "1GiB"},
                {"type": "disk", "path": str(store), "bytes": "4GiB"},
            ],
        }
        if level is not None:
            extra["level"] = level
        transfer = {
            "kv_connector": "KVCompressConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        self.command = [
            str(Path(sys.executable).with_name("vllm")),
            *("serve", str(MODEL), "--served-model-name", NAME),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", "8192", "--enforce-eager", "--enable-prompt-tokens-details"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        self.client = OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    def __enter__(self) -> Server:
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # One request at a time: the front end needs no core of its own while the model works.
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            # The endpoint that empties vLLM's own prefix cache is one for development.
            "VLLM_SERVER_DEV_MODE": "1",
        }
        started = time.monotonic()
        with open(self.log, "wb") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which then stops the server.
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        say(f"starting vllm serve, process {self.process.pid}, log {self.log.relative_to(ROOT)}")
        try:
            self._wait_until_ready(started + START_SECONDS)
        except BaseException:
            self.stop()
            raise
        say(f"the server is up after {time.monotonic() - started:.0f} s")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        say("the server is stopped")

    def stop(self) -> None:
        """Stop the server and the engine processes of its group, gently first."""
        for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                self.process.poll()
                try:
                    os.killpg(self.process.pid, 0)
                except ProcessLookupError:
                    return
                time.sleep(0.1)

    def _wait_until_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise DemoError(f"the server ended at start: {self._last_error()}")
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise DemoError(f"the server is not up after {START_SECONDS} s; see {self.log}")

    def _last_error(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() or ["no output"]
        causes = [match[1] for line in lines if (match := ROOT_CAUSE.match(line))]
        return f"{(causes or lines[-1:])[0]} (log: {self.log})"

    def get(self, path: str, body: dict | None = None) -> str:
        """GET a path, or POST a JSON body to it."""
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.read().decode()

    def metrics(self) -> dict[str, float]:
        """Every sample at /metrics by name, summed over its labels."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a prompt, chat template included."""
        body = {"model": NAME, "messages": messages(text)}
        return json.loads(self.get("/tokenize", body))["tokens"]

    def ask(self, text: str, salt: str | None = None) -> Answer:
        """Send one greedy request; a salt keeps it from every cache."""
        before = self.metrics()
        extra: dict[str, object] = {"return_token_ids": True, "ignore_eos": True}
        if salt is not None:
            extra["cache_salt"] = salt
        token_ids: list[int] = []
        first = usage = None
        started = time.monotonic()
        for event in self.client.chat.completions.create(
            model=NAME,
            messages=messages(text),
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        ):
            usage = event.usage or usage
            if event.choices and (new := getattr(event.choices[0], "token_ids", None)):
                first = first or time.monotonic() - started
                token_ids += new
        if first is None or usage is None:
            raise DemoError(f"the server answered without a token; see {self.log}")
        after = self.metrics()

        def grown(name: str) -> int:
            return round(after.get(name, 0.0) - before.get(name, 0.0))

        return Answer(
            prompt_tokens=usage.prompt_tokens,
            from_gpu_cache=grown("vllm:prefix_cache_hits_total"),
            from_store=grown("vllm:external_prefix_cache_hits_total"),
            first_token_seconds=first,
            token_ids=token_ids,
        )

    def next_tokens_kept(self, text: str, answer: list[int]) -> int:
        """How often the most likely token after a part of an answer is the answer's own next one.

        Asked of every second part of it, all at once. The prompt comes from vLLM's own cache,
        which holds what was restored into it.
        """
        ids = self.tokenize(text)
        ends = range(0, len(answer), 2)
        response = self.client.completions.create(
            model=NAME,
            prompt=[ids + answer[:end] for end in ends],
            temperature=0,
            max_tokens=1,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        chosen = {choice.index: choice.token_ids[0] for choice in response.choices}
        return sum(chosen[place] == answer[end] for place, end in enumerate(ends))


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def cut(text: str, words: int) -> str:
    """The first words of a text, its white space kept."""
    position = 0
    for _ in range(words):
        while position < len(text) and text[position].isspace():
            position += 1
        while position < len(text) and not text[position].isspace():
            position += 1
    return text[:position]


def fit(measure: Callable[[int], int], tokens: int) -> int:
    """The most words for which `measure` gives a few tokens more than a whole number of chunks.

    vLLM's own cache keeps whole blocks and the store whole chunks; just above a border both end
    at the same token, so that their answers can be compared.
    """
    low, high = 0, tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if measure(middle) <= tokens + 14 else (low, middle - 1)
    for words in range(low, max(low - 200, 0), -1):
        if 2 <= measure(words) % CHUNK_TOKENS <= 14:
            return words
    raise DemoError("no prompt fits the chunks of the store")


def make_prompts(server: Server) -> tuple[str, str]:
    """A document of the Python reference with a question, and one that shares its first half."""
    document = topics["compound"]
    question = "\n\nWhat is the text above about? Answer in one sentence."
    other_question = "\n\nName three statements that the text above describes."
    words = fit(lambda n: len(server.tokenize(cut(document, n) + question)), PROMPT_TOKENS)
    first = cut(document, words) + question
    first_ids = server.tokenize(first)

    def second_with(shared: int) -> str:
        return cut(document, shared) + other_question

    def shared_tokens(shared: int) -> int:
        ids = server.tokenize(second_with(shared))
        pairs = enumerate(zip(first_ids, ids, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(first_ids), len(ids)))

    return first, second_with(fit(shared_tokens, PROMPT_TOKENS // 2))


def seconds(answer: Answer) -> str:
    return f"{answer.first_token_seconds:.2f} s"


def agreement(answer: Answer, expected: Answer) -> str:
    same = 0
    for a, b in zip(answer.token_ids, expected.token_ids, strict=False):
        if a != b:
            break
        same += 1
    return f"{same} of {len(expected.token_ids)}"


@dataclass
class Case:
    """One prompt under one codec: cold, from vLLM's own cache, and from the store."""

    cold: Answer
    own_cache: Answer
    restored: Answer | None = None
    next_tokens_kept: int = 0


@dataclass
class Run:
    """What a codec gave: both prompts, and the KV that was stored of the first one."""

    title: str
    same: Case
    half: Case
    raw_bytes: int
    stored_bytes: int


def wait_until_stored(server: Server, chunks: int) -> tuple[int, int]:
    """Wait until the store has taken that many chunks in all: raw bytes, stored bytes."""
    deadline = time.monotonic() + STORE_SECONDS
    while time.monotonic() < deadline:
        found = server.metrics()
        if found.get("vllm:kvcompress_stored_chunks_total", 0) >= chunks:
            raw, stored = (
                round(found[f"vllm:kvcompress_stored_{kind}_bytes_total"])
                for kind in ("raw", "blob")
            )
            return raw, stored
        time.sleep(0.25)
    raise DemoError(f"nothing more was stored for {STORE_SECONDS} s; see {server.log}")


def run(codec: str, level: str | None, store: Path) -> Run:
    """Two servers on one store; the case of the same prompt, and of the one that shares half."""
    title = codec if level is None else f"{codec} {level}"
    log = LOGS / title.replace(" ", "-")
    with Server(codec, level, store, log.with_suffix(".1.log")) as server:
        same, half = make_prompts(server)
        server.ask("Say hello.", salt="warm-up")
        say("the first prompt, cold: all of it is computed")
        cold = server.ask(same)
        raw, stored = wait_until_stored(server, cold.prompt_tokens // CHUNK_TOKENS)
        say("the same prompt, and one that shares its first half, from vLLM's own cache")
        first = Case(cold, server.ask(same))
        own = server.ask(half)
        say("the second prompt, cold: kept from every cache")
        second = Case(server.ask(half, salt="cold"), own)
    with Server(codec, level, store, log.with_suffix(".2.log")) as server:
        server.ask("Say hello.", salt="warm-up")
        for text, case in ((same, first), (half, second)):
            server.get("/reset_prefix_cache", {})
            answer = case.restored = server.ask(text)
            case.next_tokens_kept = server.next_tokens_kept(text, case.own_cache.token_ids)
            say(f"{answer.from_store} of {answer.prompt_tokens} tokens came from the store")
    return Run(title, first, second, raw, stored)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def table(runs: list[Run]) -> str:
    """All figures, a column for each prompt and codec."""
    cases = [case for run in runs for case in (run.same, run.half)]
    rows = [
        ("codec", [run.title for run in runs for _ in range(2)]),
        ("prompt", ["same", "shares half"] * len(runs)),
        ("prompt tokens", [str(case.cold.prompt_tokens) for case in cases]),
        ("tokens from the store", [str(case.restored.from_store) for case in cases]),
        ("first token, cold", [seconds(case.cold) for case in cases]),
        ("first token, from the store", [seconds(case.restored) for case in cases]),
        ("first token, vLLM's own cache", [seconds(case.own_cache) for case in cases]),
        ("KV of the first prompt, raw", [t for r in runs for t in (mebibytes(r.raw_bytes), "")]),
        ("  stored", [t for r in runs for t in (mebibytes(r.stored_bytes), "")]),
        ("  ratio", [t for r in runs for t in (f"{r.raw_bytes / r.stored_bytes:.2f}", "")]),
        ("tokens that agree with own cache:", [""] * len(cases)),
        ("  each after the same text", [f"{c.next_tokens_kept} of {EVERY_SECOND}" for c in cases]),
        ("  until the first that differs", [agreement(c.restored, c.own_cache) for c in cases]),
        ("  the same, of the cold run", [agreement(c.cold, c.own_cache) for c in cases]),
    ]
    return "\n".join(
        f"{name:33}" + "".join(f"{value:>16}" for value in values) for name, values in rows
    )


NOTES = """
Answers are greedy and compared with the one from vLLM's own prefix cache, which ends at the same
token as what the store restored. A lossy level changes a choice now and then, and what follows
another choice is another answer: compare each token after the same text. A cold run may differ too,
without this package, because the engine computes the prompt in other pieces."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="cachegen", help="default: cachegen")
    parser.add_argument("--level", help="level of the codec (default: high for cachegen)")
    parser.add_argument(
        "--raw",
        action=argparse.BooleanOptionalAction,
        help="show codec raw beside it (default: where that takes less than two minutes in all)",
    )
    arguments = parser.parse_args()
    if arguments.level is None and arguments.codec == "cachegen":
        arguments.level = "high"
    return arguments


def main() -> int:
    arguments = parse_arguments()
    os.environ["NO_PROXY"] = "127.0.0.1"
    # Ending the demo from outside stops the servers too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    LOGS.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="store-", dir=LOGS))
    try:
        runs = [run(arguments.codec, arguments.level, work / arguments.codec)]
        took = time.monotonic() - STARTED
        raw = arguments.raw
        if raw is None and arguments.codec != "raw":
            raw = 2 * took < AUTOMATIC_RAW_SECONDS
            if not raw:
                say(f"codec raw is left out, as it takes another {took:.0f} s: --raw shows it")
        if raw and arguments.codec != "raw":
            runs.append(run("raw", None, work / "raw"))
    except DemoError as error:
        print(f"demo: error: {error}", file=sys.stderr)
        return 1
    except APIError as error:
        print(f"demo: error: a request failed: {error} (logs: {LOGS})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print("\n" + table(runs) + "\n" + NOTES)
    missed = [
        r.title for r in runs if not (r.same.restored.from_store and r.half.restored.from_store)
    ]
    if missed:
        print(f"demo: error: nothing came from the store with {', '.join(missed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
