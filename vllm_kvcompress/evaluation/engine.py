"""An engine that reads its history compressed: log-probabilities and answers of a setting."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_kvcompress import compat
from vllm_kvcompress.evaluation.settings import Setting
from vllm_kvcompress.progress import Progress

AT_A_TIME = 4
"""Requests that an engine works on together, and between which progress is told."""

STORE = ({"type": "memory", "bytes": "4GiB"},)


@dataclass(frozen=True)
class Score:
    """How a model rated the token that came next."""

    logprob: float
    """In nats."""
    first: bool
    """Whether it was the most likely one."""


class Session:
    """A running engine of one setting, asked so that history is read as it is stored.

    Pages in the cache are read as stored from the second chunk of a prefill on: chunks are small.
    What is offloaded is stored first, forgotten in the engine, and then loaded.
    """

    def __init__(self, llm: Any, setting: Setting, progress: Progress) -> None:
        self._llm = llm
        self._setting = setting
        self._progress = progress
        """Of tokens, of prompts and of answers."""
        self.loaded_tokens = 0
        """Prompt tokens that came out of the store."""
        self.prompt_tokens = 0
        """Prompt tokens that were asked with."""

    def scores(self, prompts: Sequence[list[int]], count: int) -> list[list[Score]]:
        """Per prompt the ratings of its last ``count`` tokens. Each has ``count + 2`` or more."""
        outputs = self._ask(
            prompts, [p[: -count - 1] for p in prompts], max_tokens=1, prompt_logprobs=0
        )
        found = []
        for prompt, output in zip(prompts, outputs, strict=True):
            steps = zip(output.prompt_logprobs[-count:], prompt[-count:], strict=True)
            rated = [step[token] for step, token in steps]
            found.append([Score(one.logprob, one.rank == 1) for one in rated])
        return found

    def answers(self, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Greedy answers of exactly ``tokens`` tokens."""
        outputs = self._ask(prompts, prompts, max_tokens=tokens, ignore_eos=True)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def ratio(self) -> float | None:
        """Bytes of the KV that was stored over those of its blobs; None without an offload."""
        total = {"raw": 0.0, "blob": 0.0}
        for metric in self._llm.get_metrics():
            for kind in total:
                if metric.name == f"vllm:kvcompress_stored_{kind}_bytes":
                    total[kind] += metric.value
        return total["raw"] / total["blob"] if total["blob"] else None

    def _ask(
        self, prompts: Sequence[list[int]], histories: Sequence[list[int]], **parameters: Any
    ) -> list[Any]:
        from vllm import SamplingParams

        counts = [len(prompt) + parameters["max_tokens"] for prompt in prompts]
        if self._setting.offloads:
            stored = [len(history) for history in histories]
            self._generate(histories, SamplingParams(temperature=0, max_tokens=1), stored)
            counts = [all_ - before for all_, before in zip(counts, stored, strict=True)]
            compat.finish_stores(self._llm)
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("the engine still holds blocks, and did not forget them")
        outputs = self._generate(
            prompts,
            # vLLM computes prompts anew whose log-probabilities are asked for; the rows of what it
            # has loaded stay empty then, and none of the last tokens is among them.
            SamplingParams(
                temperature=0,
                detokenize=False,
                skip_reading_prefix_cache=not self._setting.offloads,
                **parameters,
            ),
            counts,
        )
        self.prompt_tokens += sum(map(len, prompts))
        if self._setting.offloads:
            loaded = sum(output.num_cached_tokens for output in outputs)
            self.loaded_tokens += loaded
            if not loaded:
                raise RuntimeError(
                    "nothing was loaded from the store: prompts are shorter than its chunks of 256 "
                    "tokens, or the model's windows forget them; give longer ones"
                )
        return outputs

    def _generate(
        self, prompts: Sequence[list[int]], parameters: Any, counts: Sequence[int]
    ) -> list[Any]:
        """``counts``: the tokens that each prompt stands for in the progress."""
        outputs = []
        for start in range(0, len(prompts), AT_A_TIME):
            part = slice(start, start + AT_A_TIME)
            asked = [{"prompt_token_ids": prompt} for prompt in prompts[part]]
            outputs += self._llm.generate(asked, parameters, use_tqdm=False)
            self._progress.advance(sum(counts[part]))
        return outputs


@contextmanager
def session(
    model: str,
    setting: Setting,
    max_model_len: int,
    prefill_chunk: int,
    progress: Progress,
    **options: Any,
) -> Iterator[Session]:
    """An engine in this process; ``options`` are more arguments of ``vllm.LLM``."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # In this process, so that it can be seen when the stores are done.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    llm = None
    try:
        llm = LLM(
            setting.model or model,
            **{
                "enforce_eager": True,
                "seed": 0,
                "skip_tokenizer_init": True,
                "disable_log_stats": False,
                "use_tqdm_on_load": False,
                "max_model_len": max_model_len,
                "max_num_seqs": AT_A_TIME,
                "max_num_batched_tokens": prefill_chunk,
                **setting.engine_arguments(STORE),
                **options,
            },
        )
        yield Session(llm, setting, progress)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        ensure_kv_transfer_shutdown()
        gc.collect()
        cleanup_dist_env_and_memory()
