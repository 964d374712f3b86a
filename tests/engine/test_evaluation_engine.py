"""``eval`` and ``bench`` as a user types them, on a tiny model."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engine.models import add_byte_tokenizer, tiny_llama
from vllm_kvcompress import cli
from vllm_kvcompress.evaluation import engine, quality
from vllm_kvcompress.evaluation.settings import parse_setting
from vllm_kvcompress.evaluation.tasks import Question


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_byte_tokenizer(tiny_llama(tmp_path_factory.mktemp("model"), vocab_size=257))


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, dict]:
    capsys.readouterr()
    status = cli.main([*map(str, arguments), "--json"])
    # vLLM may print lines of its own before.
    return status, json.loads(capsys.readouterr().out.strip().splitlines()[-1])


class CountingEngine:
    """Answers everything with the first token, and has all that was asked before in its store."""

    def generate(self, prompts, parameters, use_tqdm):
        score = SimpleNamespace(logprob=-1.0, rank=1)
        return [
            SimpleNamespace(
                prompt_logprobs=[{token: score} for token in prompt["prompt_token_ids"]],
                outputs=[SimpleNamespace(token_ids=[0] * parameters.max_tokens)],
                num_cached_tokens=1,
            )
            for prompt in prompts
        ]

    def reset_prefix_cache(self):
        return True

    def get_metrics(self):
        return []


@pytest.mark.parametrize("setting", ["auto", "offload:raw"])
def test_the_bar_ends_where_everything_has_been_asked(setting, monkeypatch):
    monkeypatch.setattr(engine.compat, "finish_stores", lambda llm: None)
    plan = quality.Plan(history=300, scored=20, answer_tokens=10)
    question = Question("passkey", 400, 0.5, [0] * 400, "1")
    asked = quality.Inputs([[0] * 321] * 6, [question] * 5, [[0] * 300] * 3)
    done = []
    progress = SimpleNamespace(advance=done.append)
    session = engine.Session(CountingEngine(), parse_setting(setting), progress)
    quality.measure(session, plan, asked, str, None)
    assert sum(done) == asked.tokens(plan)
    assert len(done) >= 6


SMALL = (
    *("--windows", 2, "--history", 320, "--scored", 32, "--lengths", 512, "--depths", 1),
    *("--trials", 1, "--questions", 2, "--answers", 1, "--answer-tokens", 8),
)


@pytest.mark.slow
def test_eval_reads_history_compressed_and_judges(model, capsys):
    status, found = run(
        capsys,
        *("eval", model, "--settings", "kivi_2bit", "offload:cachegen/low", *SMALL),
        *("--tolerance-nats", 100),
    )
    base, packed, offloaded = found["settings"]
    assert base["perplexity"]["above"]["value"] == 0
    # Other chunks round otherwise, and a random model likes two tokens about as much.
    assert base["agreement"]["same_until"] == [8] and base["agreement"]["kept"]["value"] > 0.5
    assert packed["perplexity"]["above"]["value"] != 0
    assert offloaded["perplexity"]["above"]["value"] != 0
    assert 2 < packed["bits_per_value"] < 4
    assert 1 < offloaded["bits_per_value"] < 6
    assert offloaded["loaded_share"] > 0.4
    for row in (packed, offloaded):
        # A random model knows no answer that could be lost.
        assert row["checks"]["answers"]["verdict"] == "nothing to lose"
    assert status == int("unclear" in {packed["verdict"], offloaded["verdict"]})


@pytest.mark.slow
def test_eval_of_a_codec_without_loss_differs_from_the_engine_by_rounding(model, capsys):
    status, found = run(
        capsys,
        *("eval", model, "--settings", "offload:cachegen/lossless", *SMALL),
        *("--tasks", "perplexity"),
    )
    assert abs(found["settings"][1]["perplexity"]["above"]["value"]) < 0.02
    assert status == 0


def test_eval_tells_a_setting_that_the_model_cannot_have_and_fails(model, capsys):
    status, found = run(
        capsys,
        *("eval", model, "--settings", "kivi_2bit,skip_layers=99", "--tasks", "perplexity"),
        *SMALL,
    )
    assert status == 1
    assert "99" in found["settings"][1]["refused"]
    assert found["settings"][1]["verdict"] == "failed"


def test_eval_that_is_interrupted_tells_what_it_has(model, capsys, monkeypatch):
    measured = iter([quality.Measured(nats=[1.0, 2.0]), quality.Measured(nats=[1.5, 2.0])])

    def measure(*_):
        found = next(measured, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(quality, "session", lambda *_, **__: nullcontext())
    monkeypatch.setattr(quality, "measure", measure)
    status, found = run(
        capsys,
        *("eval", model, "--settings", "fp8", "kivi_2bit", "kivi_4bit", "--tasks", "perplexity"),
        *SMALL,
    )
    assert status == 130 and found["interrupted"]
    assert found["settings"][1]["perplexity"]["above"]["value"] == 0.25
    assert [row.get("refused") for row in found["settings"]] == [None, None, *["interrupted"] * 2]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--history", 4000), "give a shorter --history"),
        (("--windows", 5000), "fewer --windows"),
        (("--engine", "[]"), "write an object"),
        (("--settings", "zip"), "is no kv_cache_dtype"),
        (("--lm-eval", "arc_easy"), "lm-eval is not installed"),
    ],
)
def test_eval_refuses_early_what_cannot_be_asked(model, capsys, monkeypatch, arguments, expected):
    monkeypatch.setattr("vllm_kvcompress.evaluation.harness.is_installed", lambda: False)
    assert cli.main(["eval", str(model), *map(str, arguments)]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_bench_measures_cold_warm_and_restored_prompts_in_turns(model, capsys, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(cores[-1]))
    status, found = run(
        capsys,
        *("bench", model, "--settings", "offload:raw", "--contexts", 600, "--rounds", 2),
        *("--concurrencies", 2, "--requests", 2, "--output-tokens", 4, "--block-size", 32),
    )
    assert status == 0
    order = [(one["round"], one["setting"]) for one in found["runs"]]
    assert order == [(0, "auto"), (0, "offload:raw"), (1, "offload:raw"), (1, "auto")]
    rows = {(row["setting"], row["phase"]): row for row in found["rows"]}
    assert set(rows) == {
        *(("auto", "cold"), ("auto", "warm")),
        *(("offload:raw", "cold"), ("offload:raw", "warm"), ("offload:raw", "restored")),
    }
    assert rows["offload:raw", "restored"]["restored_share"] > 0.8
    for row in rows.values():
        assert row["ttft_ms"] > 0 and row["tpot_ms"] > 0 and row["output_tokens_s"] > 0
    ratio = rows["offload:raw", "restored"]["ttft_ratio"]
    assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]


@pytest.mark.slow
def test_bench_says_why_a_server_does_not_start(model, capsys, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    settings = ("--settings", "kivi_2bit,skip_layers=99", "--one-at-a-time", "--rounds", "1")
    assert cli.main(["bench", str(model), *settings, "--contexts", "64"]) == 2
    assert "kv_cache_dtype_skip_layers" in capsys.readouterr().err
