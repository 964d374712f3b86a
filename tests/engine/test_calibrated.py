"""From a model to a calibrated checkpoint, into this engine and into plain vLLM."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from benchmarks.fp8_models import rescaled
from tests.engine.conftest import running_engine
from tests.engine.test_fp8 import prompt_logprobs
from tests.engine.test_kivi import answers_of_a_process
from vllm_kvcompress import audit, page_profile
from vllm_kvcompress.calibration import oneshot
from vllm_kvcompress.cli import calibrate

pytestmark = pytest.mark.slow

TOKENS, IGNORED = 700, 64
WIDE = (-6, 1, 10), (-6, 1, 10)
"""Powers of two of each head's K and V: further apart than FP8 spans, the last beyond it."""


def calibrated(model: Path, out: Path, *more: str) -> Path:
    """The checkpoint that calibration makes of a model on a few samples of Python's manual."""
    text = out.parent / "text.txt"
    text.write_text("\n\n".join(topics[name] for name in sorted(topics)))
    try:
        python = calibrate.python()
    except ValueError as error:
        pytest.skip(str(error))
    command = [python, oneshot.__file__, str(model), str(out), "--data", str(text)]
    command += ["--samples", "4", "--tokens", "512", "--windows", "1", *more]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module", params=oneshot.STRATEGIES)
def checkpoint(request, smollm2, tmp_path_factory):
    """(strategy, calibrated SmolLM2)"""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, calibrated(smollm2, folder / "out", "--strategy", request.param)


@pytest.fixture(scope="module")
def tokens(smollm2):
    """Tokens of a text that calibration has not seen."""
    from transformers import AutoTokenizer

    text = Path(argparse.__file__).read_text()[8000:]
    return AutoTokenizer.from_pretrained(smollm2)(text).input_ids[:TOKENS]


def logprobs(model: Path, tokens: list[int], **settings) -> torch.Tensor:
    """Of the tokens behind the first ones, in chunks, so that history is read from pages."""
    settings = {"dtype": "float32", "max_num_batched_tokens": 128, **settings}
    with running_engine(model, **settings) as engine:
        return prompt_logprobs(engine, tokens)[IGNORED:]


@pytest.fixture(scope="module")
def exact(smollm2, tokens):
    """Log-probabilities of the original checkpoint with pages in its dtype."""
    return logprobs(smollm2, tokens)


def test_a_calibrated_checkpoint_is_served_with_its_scales_and_little_loss(
    checkpoint, tokens, exact, monkeypatch
):
    strategy, folder = checkpoint
    told: list[str] = []
    monkeypatch.setattr(audit.logger, "info", lambda form, *of: told.append(form % of))
    strict = {"kvcompress": {"fp8": {"strict_scales": True}}}
    found = logprobs(folder, tokens, kv_cache_dtype="fp8", additional_config=strict)
    how = "per head" if strategy == "attn_head" else "per tensor"
    assert any(f"layers 0-29, scales {how}, 30 of 30 from the checkpoint" in line for line in told)
    loss = (exact - found).mean().item()
    print(f"{strategy}: {loss:+.4f} nats a token")
    assert abs(loss) < 0.05


def test_plain_vllm_serves_a_calibrated_checkpoint_as_it_serves_the_model(
    checkpoint, smollm2, tmp_path
):
    """With pages of 16 bits: FP8 pages, which it takes by itself, need AVX-512 on a CPU."""
    settings = {"kv_cache_dtype": "bfloat16", "dtype": "bfloat16", "additional_config": {}}
    answers = [
        answers_of_a_process(
            tmp_path, {**settings, "model": str(model)}, [20, 70], 8, VLLM_PLUGINS=""
        )
        for model in (smollm2, checkpoint[1])
    ]
    assert answers[0] == answers[1]


def test_the_profile_of_pages_is_of_the_model_and_is_taken_by_its_engine(checkpoint, tokens, exact):
    _, folder = checkpoint
    profile = page_profile.load_page_profile(folder)
    assert (profile.shape.layers, profile.shape.kv_heads, profile.shape.head_size) == (30, 3, 64)
    given = {"kvcompress": {"profile": str(folder)}}
    found = logprobs(
        folder, tokens, kv_cache_dtype="kivi_2bit", additional_config=given, block_size=128
    )
    loss = (exact - found).mean().item()
    print(f"kivi_2bit with a profile: {loss:+.4f} nats a token")
    assert abs(loss) < 0.1


def test_a_model_that_needs_scales_gets_them(smollm2, tokens, exact, tmp_path):
    """Heads beyond each other's range: one scale a head gives back what one a layer does not."""
    wide = rescaled(smollm2, tmp_path / "wide", *WIDE)
    losses = {}
    for strategy in oneshot.STRATEGIES:
        more = ("--strategy", strategy, "--no-profile", "--windows", "0")
        folder = calibrated(wide, tmp_path / strategy, *more)
        scheme = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert scheme["kv_cache_scheme"]["strategy"] == strategy
        losses[strategy] = (exact - logprobs(folder, tokens)).mean().item()
    losses["1.0"] = (exact - logprobs(wide, tokens, kv_cache_dtype="fp8")).mean().item()
    print({name: round(loss, 4) for name, loss in losses.items()})
    assert abs(losses["attn_head"]) < 0.05
    assert losses["attn_head"] < losses["tensor"] < losses["1.0"]
