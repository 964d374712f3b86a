"""Serve a prompt with two ranks, restore it, damage one rank's part; write down what happened.

A script of its own, since vLLM starts the ranks as processes that import it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams

from tests.engine.conftest import BLOCK, CHUNK, prompt
from vllm_kvcompress.codecs.container import unpack
from vllm_kvcompress.stores import create_store


def main(model: str, path: str, output: str) -> None:
    disk = {"type": "disk", "path": path, "bytes": "64MiB"}
    llm = LLM(
        model,
        tensor_parallel_size=2,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        block_size=BLOCK,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KVCompressConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "codec": "cachegen",
                "level": "lossless",
                "chunk_tokens": CHUNK,
                "stores": [disk],
                "retry_seconds": 0.2,
            },
        },
    )
    text = prompt(4 * CHUNK + BLOCK // 2)

    def generate() -> dict:
        answer = llm.generate(
            [{"prompt_token_ids": text}],
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
            use_tqdm=False,
        )[0]
        return {"tokens": list(answer.outputs[0].token_ids), "cached": answer.num_cached_tokens}

    def blobs_settle() -> int:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            store = create_store(disk)
            if len(store.keys()) >= 8:
                return len(store.keys())
            time.sleep(0.2)
        return len(create_store(disk).keys())

    result = {"cold": generate(), "local": generate(), "blobs": blobs_settle()}
    llm.reset_prefix_cache()
    result["restored"] = generate()

    store = create_store(disk)
    damaged = next(key for key in store.keys() if key.endswith(b"\1\0"))  # noqa: SIM118
    assert unpack(store.get(damaged))[0].fingerprint == damaged
    store.put(damaged, store.get(damaged)[:-1])
    llm.reset_prefix_cache()
    result["damaged"] = generate()
    result["blobs_after"] = blobs_settle()
    result["failures"] = sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:kvcompress_load_failures"
    )
    time.sleep(0.5)
    llm.reset_prefix_cache()
    result["healed"] = generate()
    Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
