"""Settings by name, statistics, questions and verdicts of an evaluation, without an engine."""

from __future__ import annotations

import json
import math
import random
import statistics as reference
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.page_profiles import write_profile
from vllm_kvcompress.codecs import codec_names, fp8, kivi
from vllm_kvcompress.config import FP8_DTYPES, KIVI_DTYPES
from vllm_kvcompress.evaluation import harness, speed, statistics, tasks
from vllm_kvcompress.evaluation.quality import Inputs, Measured, Plan, same_tokens, summary
from vllm_kvcompress.evaluation.settings import (
    BASE,
    Setting,
    all_settings,
    parse_setting,
    parse_settings,
)
from vllm_kvcompress.evaluation.text import read_texts
from vllm_kvcompress.evaluation.verdict import EMPTY, FAILED, PASSED, UNCLEAR, Tolerance, judge
from vllm_kvcompress.kernels.cachegen.format import LEVELS

# --- settings -----------------------------------------------------------------------------------


def test_a_setting_says_what_the_engine_and_the_server_get():
    setting = parse_setting("kivi_2bit,group_size=128,skip_layers=0:29+offload:cachegen/low")
    stores = [{"type": "memory", "bytes": "1GiB"}]
    assert setting.engine_arguments(stores) == {
        "kv_cache_dtype": "kivi_2bit",
        "kv_cache_dtype_skip_layers": ["0", "29"],
        "additional_config": {"kvcompress": {"kivi": {"group_size": 128}}},
        "kv_transfer_config": {
            "kv_connector": "KVCompressConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"codec": "cachegen", "level": "low", "stores": stores},
        },
    }
    line = setting.server_arguments(stores)
    assert line[:5] == [
        *("--kv-cache-dtype", "kivi_2bit", "--kv-cache-dtype-skip-layers", "0", "29"),
    ]
    assert line[5:7] == ["--additional-config", '{"kvcompress": {"kivi": {"group_size": 128}}}']
    other = parse_setting("auto,model=/m/gptq")
    assert other.model == "/m/gptq" and not other.offloads
    assert other.engine_arguments([]) == {"kv_cache_dtype": "auto"}


def test_a_profile_is_of_the_pages_that_are_packed_and_else_of_the_codec(tmp_path):
    folder = str(write_profile(tmp_path, layers=4))
    pages = parse_setting(f"kivi_4bit,profile={folder},sink_tokens=4")
    assert pages.engine_arguments([])["additional_config"] == {
        "kvcompress": {"profile": folder, "kivi": {"sink_tokens": 4}}
    }
    both = parse_setting(f"fp8,profile={folder}+offload:raw").engine_arguments([])
    assert both["additional_config"] == {"kvcompress": {"profile": folder}}
    assert "profile" not in both["kv_transfer_config"]["kv_connector_extra_config"]
    with pytest.raises(ValueError, match="profile"):
        parse_setting(f"auto,profile={folder}+offload:cachegen/low")
    offload = Setting("codec", codec="cachegen", level="low", codec_profile=folder)
    extra = offload.engine_arguments([])["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["profile"] == folder


def test_all_settings_are_every_page_and_every_level_of_every_codec():
    settings = parse_settings(["all"])
    assert settings[0].name == BASE
    dtypes = {setting.cache_dtype for setting in settings}
    assert dtypes >= {*KIVI_DTYPES, *FP8_DTYPES} - {"fp8_e4m3"}
    codecs = {(setting.codec, setting.level) for setting in settings if setting.offloads}
    assert {codec for codec, _ in codecs} == set(codec_names())
    levels = {"cachegen": LEVELS, "fp8": fp8.LEVELS, "kivi": kivi.LEVELS}
    assert {(c, level) for c, own in levels.items() for level in own} <= codecs
    assert len(settings) == len(all_settings())


def test_the_base_is_always_the_first_setting():
    names = [setting.name for setting in parse_settings(["fp8", BASE, "kivi_4bit"])]
    assert names == [BASE, "fp8", "kivi_4bit"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kivi_3bit", "is no kv_cache_dtype; choose from auto"),
        ("", "is no kv_cache_dtype"),
        ("kivi_2bit,group_size", "is not NAME=VALUE"),
        ("kivi_2bit,group_size=48", "expected 32, 64 or 128"),
        ("kivi_2bit,group_size=64,group_size=64", "given twice"),
        ("fp8,group_size=64", "does not belong to fp8; choose from skip_layers, model, profile"),
        ("fp8,model=a,model=b", "given twice"),
        ("auto,profile=/somewhere", "profile changes nothing without packed pages or an offload"),
        ("kivi_2bit,profile=/nowhere", "/nowhere holds no profile"),
        ("auto,profile=/nowhere+offload:cachegen/low", "/nowhere"),
        ("auto,profile=/nowhere+offload:raw", "profile"),
        ("auto,skip_layers=0", "changes nothing without packed pages"),
        ("offload:zip", "codec 'zip' is unknown"),
        ("offload:cachegen/extreme", "extreme"),
        ("fp8+offload:", "codec"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name(text, expected):
    with pytest.raises(ValueError, match="setting ") as error:
        parse_setting(text)
    assert expected in str(error.value)


@given(
    st.one_of(
        st.text(max_size=40),
        st.lists(
            st.sampled_from(
                [
                    "kivi_2bit",
                    "fp8",
                    ",",
                    "=",
                    "+offload:",
                    "offload:",
                    "/",
                    "group_size",
                    "64",
                    ":",
                ]
            ),
            max_size=8,
        ).map("".join),
    )
)
def test_any_text_is_a_setting_or_a_value_error(text):
    try:
        setting = parse_setting(text)
    except ValueError:
        return
    assert setting.name == text


# --- statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.30265), (7, 2.36462), (30, 2.04227)]
)
def test_quantiles_are_those_of_students_table(freedom, expected):
    assert statistics.student_quantile(0.975, freedom) == pytest.approx(expected, rel=1e-4)


def test_a_mean_has_students_interval_and_a_single_value_none():
    found = statistics.mean_interval([1.0, 2.0, 3.0])
    assert found.value == 2
    assert found.high - 2 == pytest.approx(4.30265 / math.sqrt(3), rel=1e-4)
    assert statistics.mean_interval([5.0]) == statistics.Interval(5.0, None, None)


def test_mean_intervals_hold_the_truth_as_often_as_they_say():
    chance = random.Random(1)
    held = 0
    for _ in range(400):
        found = statistics.mean_interval([chance.gauss(3, 2) for _ in range(5)])
        held += found.low <= 3 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_a_share_is_bounded_by_wilson_even_if_all_are_right():
    assert statistics.share_interval(10, 10).low == pytest.approx(0.7225, abs=1e-3)
    assert statistics.share_interval(10, 10).high == 1
    middle = statistics.share_interval(5, 10)
    assert (middle.low, middle.high) == pytest.approx((0.2366, 0.7634), abs=1e-3)


def test_agreement_of_few_cases_does_not_show_that_nothing_is_lost():
    few = statistics.lost_share_interval([True] * 5, [True] * 5)
    many = statistics.lost_share_interval([True] * 200, [True] * 200)
    assert few.value == many.value == 0
    assert few.high > 0.3 and many.high < 0.02
    lost = statistics.lost_share_interval([True] * 30, [True] * 18 + [False] * 12)
    assert lost.value == 0.4 and lost.low > 0


def test_few_ratios_are_told_by_their_extremes_and_many_by_resampling():
    few = statistics.ratio_interval([0.9, 1.3, 1.0])
    assert (few.low, few.value, few.high) == (0.9, 1.0, 1.3)
    chance = random.Random(2)
    values = [chance.gauss(1, 0.1) for _ in range(40)] + [50.0]
    many = statistics.ratio_interval(values)
    assert many.value == reference.median(values)
    assert 0.9 < many.low <= many.value <= many.high < 1.1
    assert statistics.ratio_interval(values) == many


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_a_quantile_lies_between_the_extremes(values, share):
    assert min(values) - 1e-6 <= statistics.quantile(values, share) <= max(values) + 1e-6


def test_quantiles_interpolate_between_neighbours():
    assert statistics.quantile([3.0, 1.0, 2.0], 0.5) == 2
    assert statistics.quantile([0.0, 10.0], 0.99) == pytest.approx(9.9)


# --- questions ----------------------------------------------------------------------------------


def letters(text: str, add_special_tokens: bool = False) -> SimpleNamespace:
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize("keys", [1, 4])
def test_every_pass_key_stands_where_it_says_and_is_asked_for(keys):
    filler = letters("lorem ipsum dolor sit amet. " * 20).input_ids
    found = tasks.pass_keys(letters, filler, [900, 1800], 3, 2, keys)
    assert len(found) == 12
    for question in found:
        assert len(question.ids) == question.length
        prompt = text_of(question.ids)
        assert prompt.count(" box is ") == keys and prompt.count(question.answer) == 1
        box = prompt.rpartition("box is")[0].rpartition("of the ")[2].strip()
        assert f"The pass key of the {box} box is {question.answer}." in prompt
        assert prompt.index(question.answer) / len(prompt) == pytest.approx(question.depth, abs=0.2)
        assert question.is_right(f" {question.answer}.") and not question.is_right(" 1234")


def test_a_prompt_too_short_for_its_keys_is_refused():
    with pytest.raises(ValueError, match="give longer --lengths"):
        tasks.pass_keys(letters, [1], [100], 1, 1, 4)


def test_questions_across_passages_are_answered_by_the_passage_that_is_named():
    texts = dict(read_texts([]))
    found = tasks.passage_questions(letters, texts["manual"][:200_000], 4000, 5)
    assert len(found) == 5
    for question in found:
        prompt = text_of(question.ids)
        shown, _, asked = prompt.rpartition("\n\n")
        begin = asked.partition('begins "')[2].partition('"')[0]
        pair = asked.rpartition('words: "')[2].rstrip('"')
        passages = shown.split("Passage: ")[1:]
        named = [p for p in passages if p.startswith(begin)]
        assert len(named) == 1 and f"{pair} {question.answer}" in named[0]
        others = [p for p in passages if pair in p and p is not named[0]]
        assert others and not any(f"{pair} {question.answer} " in p for p in others)
        assert question.is_right(f' {question.answer}"') and not question.is_right(" xylophone")


def test_a_text_that_never_repeats_itself_gives_no_questions():
    text = " ".join(f"word{i}" for i in range(4000))
    assert tasks.passage_questions(letters, text, 2000, 3) == []


def test_windows_lie_side_by_side_and_spread_over_the_text():
    found = tasks.windows(range(100), 10, 3)
    assert [window[0] for window in found] == [0, 30, 60]
    assert all(len(window) == 10 for window in found)
    assert tasks.windows(range(15), 10, 3) == [list(range(10))]


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"a\.txt is empty"):
        read_texts([tmp_path / "a.txt"])
    with pytest.raises(OSError, match=r"b\.txt"):
        read_texts([tmp_path / "b.txt"])


# --- summaries and verdicts ---------------------------------------------------------------------


def inputs() -> Inputs:
    question = tasks.Question("passkey", 512, 0.5, [], "1")
    return Inputs(windows=[[]] * 4, questions=[question] * 40, prompts=[[]] * 2)


def measured(loss: float, wrong: int = 0) -> Measured:
    return Measured(
        nats=[2 + i + loss for i in range(4)],
        right=[False] * wrong + [True] * (40 - wrong),
        answers=[[1, 2, 3], [4, 5, 6]],
        kept=[1.0, 0.5],
    )


def test_a_summary_compares_what_was_asked_of_both():
    base, mine = measured(0), measured(0.25, wrong=4)
    mine.answers = [[1, 2, 9], [7, 5, 6]]
    found = summary(inputs(), mine, base)
    assert found["perplexity"]["above"] == {"value": 0.25, "low": 0.25, "high": 0.25}
    assert found["perplexity"]["perplexity"] == pytest.approx(math.exp(3.75))
    assert found["agreement"]["same_until"] == [2, 0]
    assert found["answers"]["right"] == 36 and found["answers"]["lost"]["value"] == 0.1
    (cell,) = found["questions"]["passkey"]["cells"]
    assert cell == {"length": 512, "depth": 0.5, "asked": 40, "right": 36}


@pytest.mark.parametrize(
    ("loss", "wrong", "expected"),
    [(0.01, 0, PASSED), (0.2, 0, FAILED), (0.01, 8, FAILED), (0.01, 2, UNCLEAR)],
)
def test_a_setting_passes_only_if_that_is_shown(loss, wrong, expected):
    row = summary(inputs(), measured(loss, wrong), measured(0))
    assert judge(row, Tolerance(0.05, 0.1))["verdict"] == expected


def test_a_base_without_a_right_answer_shows_nothing():
    asked = inputs()
    asked.windows = []
    none = Measured(right=[False] * 40)
    row = summary(asked, none, none)
    assert judge(row, Tolerance())["verdict"] == EMPTY


def test_a_setting_that_was_refused_has_failed():
    assert judge({"refused": "no"}, Tolerance())["verdict"] == FAILED


@pytest.mark.parametrize("wrong", [{"windows": 0}, {"lengths": ()}, {"tasks": ("poetry",)}])
def test_a_plan_that_asks_nothing_is_refused_by_its_option(wrong):
    with pytest.raises(ValueError, match=f"--{next(iter(wrong))}"):
        Plan(**wrong)


def test_answers_agree_until_the_first_token_that_differs():
    assert same_tokens([1, 2, 3], [1, 2, 4]) == 2
    assert same_tokens([1, 2], [1, 2]) == 2
    assert same_tokens([], [1]) == 0


# --- lm-eval ------------------------------------------------------------------------------------


def test_scores_of_lm_eval_are_read_by_task_and_metric():
    found = harness.parse(
        {"results": {"arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "n": True}}}
    )
    assert found == {"arc": {"acc": 0.5, "acc_stderr": 0.1}}


FAKE_LM_EVAL = """
import json, pathlib, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if options["--tasks"] == "broken":
    sys.exit("the task is broken")
folder = pathlib.Path(options["--output_path"]) / "m"
folder.mkdir(parents=True)
scores = {"acc,none": float(options["--limit"])}
results = {task: scores for task in options["--tasks"].split(",")}
(folder / "results_1.json").write_text(json.dumps({"results": results, "options": options}))
"""


def test_lm_eval_is_run_against_the_server_and_its_results_are_read(tmp_path, monkeypatch):
    package = tmp_path / "lm_eval"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE_LM_EVAL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = SimpleNamespace(url="http://127.0.0.1:1", setting=parse_setting("fp8"))
    out = tmp_path / "out"
    found = harness.run(server, "folder", ["arc", "mmlu"], 7, out)
    assert found == {"arc": {"acc": 7.0}, "mmlu": {"acc": 7.0}}
    (written,) = out.rglob("results*.json")
    given = json.loads(written.read_text())["options"]["--model_args"]
    assert "base_url=http://127.0.0.1:1/v1/completions" in given and "tokenizer=folder" in given
    with pytest.raises(RuntimeError, match="the task is broken"):
        harness.run(server, "folder", ["broken"], 7, out)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(json_values | st.fixed_dictionaries({"results": json_values}))
def test_any_results_of_lm_eval_are_read_or_a_value_error(found):
    try:
        harness.parse(found)
    except ValueError:
        return


# --- speed --------------------------------------------------------------------------------------


def test_figures_are_those_of_the_requests():
    answers = [speed.Answered(1.0, 2.0, [0.5, 0.5], 3), speed.Answered(3.0, 4.0, [0.25, 0.75], 3)]
    found = speed.figures(answers, prompt_tokens=100, seconds=2)
    assert found["ttft_ms"] == 2000
    assert found["tpot_ms"] == 500
    assert found["output_tokens_s"] == 3
    assert found["total_tokens_s"] == 103
    assert found["itl_p99_ms"] == pytest.approx(742.5)


def test_a_noise_of_the_machine_that_hits_both_leaves_their_ratio():
    runs = []
    for round_, noise in enumerate((1.0, 3.0, 10.0)):
        for setting, factor in (("auto", 1.0), ("fp8", 0.8)):
            figures = {name: noise * factor for name in speed.FIGURES}
            phases = {speed.COLD: figures, speed.WARM: figures}
            if setting == "fp8":
                phases[speed.RESTORED] = {**figures, "ttft_ms": noise * 0.5, "restored_share": 0.9}
            place = {"round": round_, "setting": setting, "context": 8, "concurrency": 1}
            runs.append({**place, "phases": phases})
    table = {(row["setting"], row["phase"]): row for row in speed.rows(runs, "auto")}
    assert table["fp8", "cold"]["ttft_ratio"] == pytest.approx(
        {"value": 0.8, "low": 0.8, "high": 0.8}
    )
    assert table["fp8", "restored"]["ttft_ratio"]["value"] == pytest.approx(0.5)
    assert table["auto", "cold"]["ttft_ms"] == 3
    assert "ttft_ratio" not in table["auto", "cold"]


def test_every_setting_is_first_in_some_round():
    assert [list(speed.turned(3, by)) for by in range(3)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_no_two_prompts_begin_alike_and_a_short_text_is_refused():
    prompts = speed.Prompts(range(10))
    found = prompts.take(4, 15) + prompts.take(6, 5)
    assert len({prompt[0] for prompt in found}) == 10
    assert len(found[0]) == 15
    with pytest.raises(ValueError, match="give more with --text"):
        prompts.take(1, 5)


@pytest.mark.parametrize("wrong", [{"contexts": ()}, {"rounds": 0}, {"concurrencies": (1, 1)}])
def test_a_load_that_asks_nothing_is_refused_by_its_option(wrong):
    with pytest.raises(ValueError, match=f"--{next(iter(wrong))}"):
        speed.Load(**wrong)
