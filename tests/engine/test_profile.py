"""A calibrated profile in the engine: used, kept apart from others, refused for another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.engine.conftest import BLOCK, CHUNK, prompt, running_engine
from tests.engine.models import tiny_llama
from vllm_kvcompress.calibration.codec_profile import Statistics, fit_profile
from vllm_kvcompress.calibration.collect import rotary_turns
from vllm_kvcompress.calibration.dump import dump_kv
from vllm_kvcompress.codecs import profile as files

CHUNKS = 3
MEMORY = {"type": "memory", "bytes": "64MiB"}


def calibrated(model_path: Path, folder: Path) -> Path:
    """The files of a profile of a model, from random tokens."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    statistics, kept = None, []
    for seed in range(4):
        kv = dump_kv(model, torch.tensor(prompt(512, seed=100 + seed)))
        layers, _, _, heads, size = kv.shape
        if statistics is None:
            statistics = Statistics(rotary_turns(model), layers, heads, size, 1)
        for number, chunk in enumerate(kv.split(CHUNK, 2)):
            if number == 3 and seed < 2:
                kept.append(chunk)
            else:
                statistics.add(chunk, number * CHUNK)
    made = fit_profile(statistics, model.config.max_position_embeddings, kept)
    folder.mkdir()
    save_file(files.arrays_of(made.transform), folder / files.TENSORS_NAME)
    described = files.describe(made.transform, made.levels)
    (folder / files.JSON_NAME).write_text(json.dumps({"format": 1, "cachegen": described}))
    return folder


@pytest.mark.slow
def test_a_profile_makes_smaller_blobs_that_come_back(llama, tmp_path):
    offload = {"codec": "cachegen", "level": "medium", "stores": [MEMORY]}
    text = prompt(CHUNKS * CHUNK + BLOCK // 2)
    stored = []
    for more in ({}, {"profile": str(calibrated(llama, tmp_path / "profile"))}):
        with running_engine(llama, {**offload, **more}) as engine:
            engine.generate(text)
            engine.settle()
            engine.forget_local()
            assert engine.generate(text)[0].cached == CHUNKS * CHUNK
            metrics = engine.metrics()
            assert metrics["loaded_chunks"] == metrics["stored_chunks"] == CHUNKS
            assert metrics.get("load_failures", 0) == 0
            stored.append(metrics["stored_blob_bytes"])
    assert stored[1] < stored[0]


def test_a_profile_of_another_model_is_refused_at_the_start(llama, tmp_path):
    other = tiny_llama(tmp_path / "other", num_hidden_layers=3)
    profile = calibrated(other, tmp_path / "profile")
    offload = {"codec": "cachegen", "profile": str(profile), "stores": [MEMORY]}
    with (
        pytest.raises(ValueError, match=r"3 layers of 2 KV heads of 32.*calibrate this model"),
        running_engine(llama, offload),
    ):
        pass


def test_a_directory_without_a_profile_is_refused_at_the_start(llama, tmp_path):
    offload = {"codec": "cachegen", "profile": str(tmp_path), "stores": [MEMORY]}
    with pytest.raises(ValueError, match="holds no profile"), running_engine(llama, offload):
        pass
