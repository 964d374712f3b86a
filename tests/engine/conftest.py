"""An engine in this process, so that tests can look into its stores and damage them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import WORKER

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# One thread: the models are tiny, and barriers between two cost more than they save.
_CORES = sorted(os.sched_getaffinity(0))
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(_CORES[WORKER % len(_CORES)]))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

BLOCK = 32
CHUNK = 64


@dataclass
class Answer:
    """Tokens and their log-probabilities, and how many prompt tokens were not computed."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


class Engine:
    """A vLLM engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(self, *prompts: list[int], tokens: int = 8, **params: Any) -> list[Answer]:
        from vllm import SamplingParams

        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1, **params),
            use_tqdm=False,
        )
        return [
            Answer(
                tokens=list(output.outputs[0].token_ids),
                logprobs=[
                    step[token].logprob
                    for step, token in zip(
                        output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True
                    )
                ],
                cached=output.num_cached_tokens,
            )
            for output in outputs
        ]

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def manager(self) -> Any:
        return self.scheduler.connector.scheduler.manager

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().connector_worker.worker

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache and leave the stores as they are."""
        assert self.llm.reset_prefix_cache()

    def settle(self) -> None:
        """Step until every store that was submitted has been reported."""
        while self.scheduler.connector.has_pending_push_work():
            self.llm.llm_engine.step()

    def metrics(self) -> dict[str, float]:
        """The connector's metrics, summed over labels; with labels as ``name{value,...}``."""
        found: dict[str, float] = {}
        self.settle()
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:kvcompress_") and hasattr(metric, "value"):
                name = metric.name.removeprefix("vllm:kvcompress_")
                labels = [
                    value
                    for label, value in sorted(metric.labels.items())
                    if label not in ("model_name", "engine", "rank")
                ]
                found[name] = found.get(name, 0) + metric.value
                if labels:
                    found[f"{name}{{{','.join(labels)}}}"] = metric.value
        return found


@contextmanager
def running_engine(
    model: Path, offload: dict[str, Any] | None = None, **settings: Any
) -> Iterator[Engine]:
    """Start an engine with the connector, or without it if ``offload`` is None; stop it after."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    if offload is not None:
        settings["kv_transfer_config"] = {
            "kv_connector": "KVCompressConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"chunk_tokens": CHUNK, **offload},
        }
    engine = None
    try:
        engine = Engine(
            LLM(
                str(model),
                **{
                    "skip_tokenizer_init": True,
                    "enforce_eager": True,
                    "max_model_len": 1024,
                    "max_num_batched_tokens": 1024,
                    "block_size": BLOCK,
                    "disable_log_stats": False,
                    "seed": 0,
                    **settings,
                },
            )
        )
        # vLLM takes torch.set_num_threads away. The models are tiny, and threads that wait for each
        # other spin.
        torch._C.set_num_threads(1)
        yield engine
    finally:
        if engine is not None:
            engine.llm.llm_engine.engine_core.shutdown()
        del engine
        ensure_kv_transfer_shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def gated() -> Iterator[None]:
    """The codec and the store of ``tests.engine.gates`` by the name ``gated``."""
    from tests.engine import gates

    with gates.registered():
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.models import tiny_gemma3

    return tiny_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture
def remember_hashes(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], list[Any]]:
    """Note each request's block hashes by its prompt."""
    from vllm.v1.core.sched.scheduler import Scheduler

    seen = {}
    add = Scheduler.add_request

    def add_request(self, request):
        seen[tuple(request.prompt_token_ids)] = request.block_hashes
        return add(self, request)

    monkeypatch.setattr(Scheduler, "add_request", add_request)
    return seen


def prompt(length: int, seed: int = 1) -> list[int]:
    """A prompt of random tokens."""
    import random

    return random.Random(seed).choices(range(5, 500), k=length)
