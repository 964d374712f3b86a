"""Calibration: what it reads, what it writes, and what it refuses."""

import argparse
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.engine.models import add_byte_tokenizer, tiny_deepseek
from tests.page_profiles import write_profile
from vllm_kvcompress import cli
from vllm_kvcompress.calibration import hints, oneshot, scales, sensitivity
from vllm_kvcompress.calibration.dump import load_model
from vllm_kvcompress.calibration.samples import Source, load_samples
from vllm_kvcompress.cli import calibrate
from vllm_kvcompress.page_profile import ModelShape, load_page_profile

ROOT = Path(__file__).resolve().parents[1]
LAYERS, HEADS, SIZE = 4, 2, 32
PYTHON = ROOT / ".venv-calibrate" / "bin" / "python"


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def tiny(tokenizer, tmp_path_factory):
    """A checkpoint of a small random Llama with the tokenizer of SmolLM2."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=SIZE,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"Line {n}: the quick brown fox jumps {n * n}." for n in range(900)))
    return path


def samples_of(path, tokenizer, count=3, tokens=64, seed=0, **source):
    return load_samples(Source(str(path), **source), tokenizer, count, tokens, seed)


def test_a_text_is_cut_into_full_sequences_in_an_order_of_the_seed(text, tokenizer):
    first, again, other = (samples_of(text, tokenizer, seed=seed) for seed in (0, 0, 1))
    assert [len(ids) for ids in first] == [64, 64, 64]
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))
    ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[0]
    assert any(torch.equal(first[0], window) for window in ids.split(64))


def test_a_chat_goes_through_the_template_and_text_does_not(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "word " * 40}, {"role": "assistant", "content": "Yes."}]
    rows = [{"messages": chat}, {"conversations": [{"from": "human", "value": "word " * 40}]}]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, {"text": "plain " * 40}, "bare " * 40])))
    found = [tokenizer.decode(ids) for ids in samples_of(path, tokenizer, count=9)]
    assert len(found) == 4
    assert sum("<|im_start|>user\nword" in text for text in found) == 2
    assert sum(text.startswith(("plain", "bare")) for text in found) == 2


def test_a_chat_of_parts_and_of_calls_gives_the_text_that_it_has(tmp_path, tokenizer):
    parts = [{"type": "text", "text": "word " * 40}, {"type": "image"}, {"text": None}, "bare"]
    chat = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]},
        {"role": "assistant", "tool_calls": [{"type": "function"}]},
        {"role": "tool", "content": [{"type": "image"}]},
        {"role": "assistant", "content": "Yes."},
    ]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"messages": chat}, {"messages": chat[1:3]}, chat])))
    found = [tokenizer.decode(ids) for ids in samples_of(path, tokenizer, 9, tokens=128)]
    assert len(found) == 2
    assert found[0] == found[1]
    assert "word \nbare<|im_end|>\n<|im_start|>assistant\nYes." in found[0]
    assert found[0].count("<|im_start|>assistant") == 1


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_cannot_be_used_are_counted_and_left_out_whatever_the_seed(
    seed, tmp_path, tokenizer
):
    good, bad = [{"text": "plain " * 40}] * 5, [{"words": "x"}, [1, 2], {"text": 3}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, good + bad)))
    told = []
    found = load_samples(Source(str(path)), tokenizer, 9, 64, seed, told.append)
    assert len(found) == 5
    assert len(told) == 1
    assert told[0].startswith("3 of 8 rows that were read are left out; a row of ")
    path.write_text("\n".join(map(json.dumps, good[:2] + bad)))
    with pytest.raises(ValueError, match=r"\(3 of 5 rows that were read cannot be used\)"):
        load_samples(Source(str(path)), tokenizer, 9, 64, seed)


def test_a_chat_that_the_template_refuses_is_left_out(tmp_path, tokenizer, monkeypatch):
    def template(turns, **_):
        raise TypeError("no system role")

    monkeypatch.setattr(tokenizer, "apply_chat_template", template)
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "system", "content": "word " * 40}]}))
    with pytest.raises(ValueError, match=r"chat template refuses a chat in .*: no system role"):
        samples_of(path, tokenizer)


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl"])
def test_samples_too_short_for_a_cache_are_refused_from_every_kind_of_file(
    name, tmp_path, tokenizer
):
    path = tmp_path / name
    path.write_text('{"text": "' + "word " * 40 + '"}')
    with pytest.raises(ValueError, match="at least 16"):
        samples_of(path, tokenizer, tokens=15)
    assert [len(ids) for ids in samples_of(path, tokenizer, count=1, tokens=16)] == [16]


def test_a_text_with_a_few_broken_characters_is_read(tmp_path, tokenizer):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"plain words " * 99 + b"\xff\xfe")
    assert len(samples_of(path, tokenizer, count=2)) == 2


def test_ends_of_lines_within_a_text_and_a_mark_before_it_are_read(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    row = json.dumps({"text": "one\u2028two\x85three\f" * 4}, ensure_ascii=False)
    path.write_text("\ufeff" + row + "\r\n" + row, encoding="utf-8")
    found = [tokenizer.decode(ids) for ids in samples_of(path, tokenizer, count=9)]
    assert found == ["one\u2028two\x85three\f" * 4] * 2


@pytest.fixture
def in_its_environment():
    """Run a script in the environment of calibration, which can do more kinds of data."""
    if not PYTHON.is_file():
        pytest.skip("the environment of calibration is not there: run `make calibrate`")

    def run(script, *arguments):
        done = subprocess.run(
            [str(PYTHON), "-c", script, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


EVERY_KIND = """
import json, sys
from pathlib import Path
import pyarrow
from datasets import Dataset, DatasetDict
from pyarrow import parquet
from transformers import AutoTokenizer
from vllm_kvcompress.calibration.samples import Source, load_samples

folder, tokenizer = Path(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[2])
rows = [{"text": f"{number} word " * 40} for number in range(20)]
chat = [{"role": "user", "content": "word " * 40}, {"role": "assistant", "content": "Yes."}]
parquet.write_table(pyarrow.Table.from_pylist([*rows, {"text": "short"}, {"text": None}]),
                    folder / "rows.parquet")
parquet.write_table(pyarrow.Table.from_pylist([{"messages": chat}]), folder / "chat.parquet")
(folder / "files").mkdir()
(folder / "files" / "train.jsonl").write_text("\\n".join(map(json.dumps, rows)))
Dataset.from_list(rows).save_to_disk(folder / "saved")
DatasetDict({"train": Dataset.from_list(rows[:1]), "test": Dataset.from_list(rows)}).save_to_disk(
    folder / "splits")
found = {}
for name, more in {"rows.parquet": {}, "chat.parquet": {}, "files": {}, "saved": {},
                   "splits": {"split": "test"}}.items():
    for seed in (0, 0, 1):
        samples = load_samples(Source(str(folder / name), **more), tokenizer, 5, 64, seed)
        found.setdefault(name, []).append([tokenizer.decode(ids) for ids in samples])
for name, more in {"no/such-set": {}, str(folder / "splits"): {"split": "other"},
                   str(folder / "files"): {"split": "other"}, str(folder): {}}.items():
    try:
        load_samples(Source(name, **more), tokenizer, 5, 64, 0)
    except ValueError as error:
        found.setdefault("refused", []).append(str(error))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_every_kind_of_data_set_is_read_in_an_order_of_the_seed(
    in_its_environment, tmp_path, smollm2
):
    found = in_its_environment(EVERY_KIND, tmp_path, smollm2)
    refused = found.pop("refused")
    (chat,) = found.pop("chat.parquet")[0]
    assert "<|im_start|>user\nword" in chat
    assert set(found) == {"rows.parquet", "files", "saved", "splits"}
    for first, again, other in found.values():
        assert len(first) == len({*first}) == 5
        assert all(" word " in text for text in first)
        assert first == again != other
    assert len(refused) == 4
    assert "neither a file here nor a data set that the hub gives" in refused[0]
    assert all("give --data a local file that ends in .txt" in line for line in refused)
    assert all("is no data set" in line for line in refused[1:])


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("data.csv", "a,b", r"no kind that is known.*\.jsonl"),
        ("data.txt", "few words", "one sequence takes 64"),
        ("data.txt", bytes(range(256)) * 20, "is not UTF-8 text"),
        ("data.txt", "words " * 99 + "\0", "is not UTF-8 text"),
        ("data.md", ("caf\xe9 " * 99).encode("latin-1"), "is not UTF-8 text.*convert it"),
        ("data.jsonl", '[{"a": 1}, 2]', "neither text nor a chat, which is a list of turns"),
        ("data.jsonl", "[]", "neither text nor a chat, which is a list of turns"),
        ("data.jsonl", '{"messages": [{"role": "user", "content": "x"}, 3]}', "lacks role"),
        ("data.jsonl", '{"words": "x"}\n' * 999, r"none of the columns.*\(64 of 64 rows"),
        ("data.jsonl", '{"text": "x"}\n{', "line 2 is not JSON"),
        ("data.jsonl", '{"words": "x"}', "none of the columns.*it has words; name one with"),
        ("data.jsonl", '{"text": 3}', "neither text nor a chat"),
        ("data.jsonl", '{"messages": [{"role": "user"}]}', "lacks role or content"),
        ("data.jsonl", '{"text": "short"}', "no row of at least"),
        ("data.jsonl", "[" * 100000, "line 1 is not JSON"),
        ("data.jsonl", b'{"text": "\xff"}', "is not UTF-8 text"),
    ],
)
def test_data_that_cannot_be_used_is_refused(name, content, expected, tmp_path, tokenizer):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=expected):
        samples_of(path, tokenizer)


def scale_tensors(strategy="tensor"):
    shape = (HEADS, 1, 1) if strategy == "attn_head" else (1,)
    return {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.full(shape, 0.01 * (layer + 1))
        for layer in range(LAYERS)
        for kind in "kv"
    }


def faults(tensors, strategy="tensor"):
    config = LlamaConfig(num_hidden_layers=LAYERS, num_key_value_heads=HEADS)
    found = {name: tensor.flatten() for name, tensor in tensors.items()}
    return scales.check(found, config, strategy)


@pytest.mark.parametrize("strategy", oneshot.STRATEGIES)
def test_good_scales_have_no_faults(strategy):
    assert faults(scale_tensors(strategy), strategy) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "k_scale of layer 2 is zero"),
        (-1.0, "k_scale of layer 2 is zero or negative"),
        (torch.nan, "k_scale of layer 2 is not finite"),
        (torch.inf, "k_scale of layer 2 is not finite"),
        (1e9, "k_scale of layer 2 is absurd"),
        (1e-20, "k_scale of layer 2 is absurd"),
    ],
)
def test_a_wrong_scale_is_named(value, expected):
    tensors = scale_tensors()
    tensors["model.layers.2.self_attn.k_scale"].fill_(value)
    (line,) = faults(tensors)
    assert expected in line


def test_missing_scales_and_wrong_counts_are_named():
    tensors = scale_tensors()
    del tensors["model.layers.1.self_attn.v_scale"]
    del tensors["model.layers.3.self_attn.k_scale"], tensors["model.layers.3.self_attn.v_scale"]
    assert faults(tensors) == ["layers 3 have no scales", "layer 1 has no v_scale"]
    assert len(faults(scale_tensors(), "attn_head")) == 2 * LAYERS


def test_layers_without_a_cache_need_no_scales():
    kinds = ["full_attention", "linear_attention", "sliding_attention", "mamba"]
    config = LlamaConfig(num_hidden_layers=LAYERS, num_key_value_heads=HEADS)
    config.layer_types = kinds
    assert scales.layers_with_cache(config) == {0, 2}
    config.layer_types = None
    config.num_kv_shared_layers = 1
    assert scales.layers_with_cache(config) == {0, 1, 2}


def test_a_checkpoint_that_differs_from_the_model_is_found_out():
    wanted = {name: tensor.flatten() for name, tensor in scale_tensors().items()}
    assert (
        scales.compare(wanted, {k: v.to(torch.bfloat16).float() for k, v in wanted.items()}) == []
    )
    other = {**wanted, "model.layers.0.self_attn.k_scale": torch.ones(1)}
    del other["model.layers.1.self_attn.k_scale"]
    assert len(scales.compare(wanted, other)) == 2


def test_layers_that_are_missed_are_named_with_the_reason(tiny):
    model = LlamaForCausalLM.from_pretrained(tiny)
    model.model.vision_tower = torch.nn.ModuleDict(
        {"attn": torch.nn.ModuleDict({n: torch.nn.Linear(1, 1) for n in ("k_proj", "v_proj")})}
    )
    found = {
        name: tensor.flatten()
        for name, tensor in scale_tensors().items()
        if not name.startswith("model.layers.3")
    }
    model.config.num_kv_shared_layers = 1
    shared, tower = map(str, scales.missed_layers(model, found))
    assert "layers.3" in shared
    assert "shares the KV cache" in shared
    assert "vision_tower" in tower
    assert "no KV cache" in tower


@pytest.mark.parametrize("strategy", oneshot.STRATEGIES)
def test_inspect_shows_the_scales_of_a_checkpoint(strategy, tiny, tmp_path, capsys):
    folder = tmp_path / "out"
    folder.mkdir()
    config = json.loads((tiny / "config.json").read_text())
    config["quantization_config"] = {"kv_cache_scheme": {"strategy": strategy}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(scale_tensors(strategy), folder / "model.safetensors")
    of = {"layers": LAYERS, "kv_heads": HEADS, "head_size": SIZE}
    write_profile(folder, **of, fp8_skip_layers=(1, 3), four_bits=(2,))
    picture = tmp_path / "scales.svg"
    assert cli.main(["inspect", str(folder), "--plot", str(picture)]) == 0
    told = capsys.readouterr().out
    assert f"FP8 scales of 4 layers, strategy {strategy}" in told
    assert "0.04" in told
    assert "leave out: 1 3" in told
    assert "four bits for: 2, and leave out: none" in told
    assert picture.read_text().count("<title>") == LAYERS * (
        2 * (HEADS if "head" in strategy else 1) + 2
    )
    assert cli.main(["inspect", str(folder), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["scales"]) == LAYERS


def test_inspect_fails_where_scales_are_wrong(tiny, tmp_path, capsys):
    config = json.loads((tiny / "config.json").read_text())
    config["quantization_config"] = {"kv_cache_scheme": {"strategy": "tensor"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = scale_tensors()
    tensors["model.layers.0.self_attn.k_scale"].zero_()
    save_file(tensors, tmp_path / "model.safetensors")
    assert cli.main(["inspect", str(tmp_path)]) == 1
    assert "wrong: k_scale of layer 0 is zero" in capsys.readouterr().out


@pytest.fixture(scope="module")
def probe(tiny):
    model = LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    torch.manual_seed(3)
    return sensitivity.Probe(model, [torch.randint(0, 40000, (sensitivity.WINDOW,))])


def test_pages_that_change_nothing_cost_nothing(probe):
    assert max(map(abs, probe.divergences(lambda kv: kv, [[0], [0, 1, 2, 3]]))) < 1e-6


def test_each_layer_is_measured_alone(probe):
    def spoil_layer_2(kv):
        back = kv.clone()
        back[2] = torch.randn(back[2].shape).to(back.dtype) * 5
        return back

    found = sensitivity.measure(probe, spoil_layer_2)
    assert max(range(LAYERS), key=found["layers"].__getitem__) == 2
    assert found["layers"][0] == pytest.approx(0, abs=1e-6)
    assert found["all"] == pytest.approx(found["layers"][2], rel=1e-3)
    skipped, left = sensitivity.skip_layers(probe, spoil_layer_2, found["layers"], 1e-5)
    assert skipped == [2]
    assert left < 1e-5
    assert sensitivity.skip_layers(probe, spoil_layer_2, found["layers"], 100.0)[0] == []


def test_layers_go_through_other_pages_instead_of_staying_as_they_are(probe):
    def spoil(kv):
        return torch.randn(kv.shape, generator=torch.Generator().manual_seed(7)).to(kv.dtype)

    alone, both = probe.divergences(spoil, [[0], [0, 1, 2, 3]])
    assert probe.divergences(lambda kv: kv, [[1, 2, 3]], spoil) == pytest.approx([alone])
    assert probe.divergences(lambda kv: kv, [[]], spoil) == pytest.approx([both])
    better = sensitivity.fewest(probe, spoil, [3, 2, 1, 0], 0.0, spoil)
    assert better == (4, pytest.approx(both))


def fp8_scales():
    return {layer: {kind: torch.full((1,), 0.05) for kind in "kv"} for layer in range(LAYERS)}


@pytest.mark.parametrize("share", [2.0, 0.6, 0.1, 1e-9], ids=str)
def test_the_hints_meet_the_loss_that_they_are_asked_for(probe, share, tmp_path):
    """Layers get four bits first, and are left out where that is not enough."""
    everything = probe.divergences(sensitivity.kivi_pages(), [[*range(LAYERS)]])[0]
    name = {"name": "tiny", "model_type": "llama"}
    asked = share * everything
    section = hints.measure_pages(probe, fp8_scales(), name, asked, lambda line: None)
    profile = load_page_profile(write_profile(tmp_path, section))
    assert profile.shape == ModelShape("llama", LAYERS, HEADS, SIZE)
    kivi = section["kivi"]
    assert kivi["left"] <= asked
    assert kivi["with_4bit"]["left"] <= asked
    four, left_out = list(profile.kivi.four_bits), profile.kivi.skip_layers
    two = [layer for layer in range(LAYERS) if layer not in (*four, *left_out)]
    history = {"clipping": profile.kivi.clipping}
    four_bits = sensitivity.kivi_pages("kivi_4bit", **history)

    def mixed(kv):
        back = sensitivity.kivi_pages(**history)(kv)
        back[four] = four_bits(kv)[four]
        return back

    again = probe.divergences(mixed, [[*two, *four]])
    assert again == pytest.approx([kivi["with_4bit"]["left"]], abs=1e-6)
    assert (share > 1) == (len(two) == LAYERS)
    assert (share < 1e-6) == (len(left_out) == LAYERS)


def test_fp8_pages_are_e4m3_with_the_scales():
    kv = torch.tensor([1.0, 1000.0, -0.3]).expand(1, 2, 1, 1, 3).to(torch.bfloat16)
    back = sensitivity.fp8_pages({0: {"k": torch.ones(1), "v": torch.full((1,), 4.0)}})(kv)
    assert back[0, 0, 0, 0].tolist() == [1.0, 448.0, -0.3125]
    assert back[0, 1, 0, 0].tolist() == [1.0, 1024.0, -0.3125]


def parse(*argv):
    parser = argparse.ArgumentParser()
    oneshot.add_arguments(parser)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--samples", "3", "--tokens", "16", "--seed", "7", "--strategy", "attn_head", "--json"],
        ["--config", "a", "--column", "b", "--split", "c", "--no-profile", "--max-loss", "0.5"],
    ],
)
def test_the_command_hands_all_arguments_to_the_script(more):
    given = parse("model", "out", "--data", "x", *more)
    assert parse(*oneshot.to_argv(given)) == given


@pytest.mark.parametrize(
    ("option", "values", "wanted"),
    [
        ("--windows", ("-1", "x", "1.5"), "a whole number from 0 on"),
        ("--samples", ("0", "-1", "x"), "a whole number from 1 on"),
        ("--tokens", ("0", "-1", "15"), "a whole number from 16 on"),
        ("--width", ("0", "-1"), "a whole number from 1 on"),
        ("--max-loss", ("nan", "-1", "inf", "x", "-0.01"), "a number from 0 on"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_with_its_option(option, values, wanted, capsys):
    for value in values:
        with pytest.raises(SystemExit, match="2"):
            parse("m", "out", "--data", "x", f"{option}={value}")
        told = capsys.readouterr().err
        assert f"argument {option}: takes {wanted}, not {value!r}" in told


def test_an_environment_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv(calibrate.ENVIRONMENT, raising=False)
    monkeypatch.setattr(oneshot, "__file__", str(tmp_path / "calibration" / "oneshot.py"))
    with pytest.raises(ValueError, match="make calibrate"):
        calibrate.python()


def refused(expected, model, out, *more):
    """A calibration is refused before it has read or written anything."""
    with pytest.raises(ValueError, match=expected):
        oneshot.calibrate(parse(str(model), str(out), "--data", "/nowhere.txt", *more), print)


def made_by_calibration(folder, *others):
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    oneshot._add_to_json(folder, {"files": ["config.json", "kvcompress.json"]})
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    return folder


def test_an_output_that_is_there_is_kept(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("out", "file"):
        refused("--overwrite", "m", tmp_path / name)
        refused("no list of what calibration wrote", "m", tmp_path / name, "--overwrite")
    (tmp_path / "out" / "config.json").write_text("{}")
    refused("no list of what calibration wrote", "m", tmp_path / "out", "--overwrite")
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("name", ["mynotes.txt", "sub/more.json"])
def test_files_that_calibration_did_not_write_are_kept(name, tmp_path):
    out = made_by_calibration(tmp_path / "out", name)
    refused(rf"holds {name}, which calibration did not write", "m", out, "--overwrite")
    assert (out / name).read_text() == "mine"


def test_what_calibration_wrote_may_be_replaced(tmp_path):
    out = made_by_calibration(tmp_path / "out")
    oneshot._refuse_place(out, parse("m", "out", "--data", "x", "--overwrite"))


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
@pytest.mark.parametrize(
    "place", ["model", "link", "../{}/model", "model/new", ".", "..", "link/x"]
)
def test_the_model_itself_is_no_output(place, more, tmp_path, monkeypatch):
    folder = tmp_path / "top"
    folder.mkdir()
    model = made_by_calibration(folder / "model")
    (folder / "link").symlink_to(model)
    monkeypatch.chdir(folder)
    refused("OUT .* and MODEL .* are one directory", "model", place.format("top"), *more)
    refused("OUT .* and MODEL .* are one directory", "link", place.format("top"), *more)


def test_an_output_that_is_a_link_is_what_it_leads_to(tmp_path, monkeypatch):
    written = []

    def write(arguments, folder, say):
        (folder / "templates").mkdir()
        (folder / "templates" / "one").write_text("new")
        written.append(folder)
        return {}

    monkeypatch.setattr(oneshot, "_write", write)
    link = tmp_path / "link"
    link.symlink_to("place")
    for more in ((), ("--overwrite",)):  # it leads nowhere, and then to a checkpoint
        oneshot.calibrate(parse("m", str(link), "--data", "x", *more), print)
        assert link.is_symlink()
        assert (tmp_path / "place" / "templates" / "one").read_text() == "new"
    monkeypatch.chdir(tmp_path / "place")
    oneshot.calibrate(parse("m", ".", "--data", "x", "--overwrite"), print)
    monkeypatch.chdir(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "place"]
    assert {path.parent for path in written} == {tmp_path}
    (tmp_path / "loop").symlink_to("loop")
    refused("there already", "m", tmp_path / "loop")


def test_what_killed_runs_have_left_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(oneshot, "_write", lambda *_: {})
    told = []
    for kind in ("unfinished", "replaced"):
        (tmp_path / f".out-{kind}-x").mkdir()
    oneshot.calibrate(parse("m", str(tmp_path / "out"), "--data", "x"), told.append)
    assert [line.split()[0] for line in told[:2]] == [
        str(tmp_path / f".out-{kind}-x") for kind in ("unfinished", "replaced")
    ]
    assert "was before a run that was killed; take it back" in told[1]


def test_an_old_checkpoint_keeps_its_name_where_the_new_one_cannot_take_it(tmp_path):
    out = made_by_calibration(tmp_path / "out")
    with pytest.raises(OSError, match="missing"):
        oneshot._publish(tmp_path / "missing", out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "config.json").is_file()


def test_the_index_names_the_weights_alone(tiny, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    oneshot._write_index(tmp_path)
    save_file({"cachegen.scale": torch.ones(1)}, tmp_path / "kvcompress.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    assert set(index["weight_map"]) == set(load_file(tmp_path / "model.safetensors"))


def changed(tiny, tmp_path, **settings):
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_hidden_layers": LAYERS + 2}, r"lack model\.layers\.4\..* and \d+ more"),
        ({"num_hidden_layers": LAYERS - 1}, r"hold model\.layers\.3\..*only 3 layers"),
        ({"tie_word_embeddings": False}, r"lack lm_head\.weight, which"),
    ],
)
def test_weights_of_another_model_than_the_configuration_says_are_refused(
    settings, expected, tiny, tmp_path
):
    with pytest.raises(ValueError, match=expected):
        load_model(changed(tiny, tmp_path, **settings))


def test_layers_that_predict_further_tokens_may_be_left_alone(tiny, tmp_path):
    more = {"num_hidden_layers": LAYERS - 1, "num_nextn_predict_layers": 1}
    model, _ = load_model(changed(tiny, tmp_path, **more))
    assert len(model.model.layers) == LAYERS - 1


def test_weights_that_are_tied_are_not_missed(tiny):
    load_model(tiny)


@pytest.mark.parametrize(
    ("name", "size", "content"),
    [
        ("model.safetensors", 100_000, None),
        ("model.safetensors", 0, None),
        ("config.json", None, "[]"),
        ("config.json", None, "{"),
        ("config.json", None, "[" * 100_000),
        ("tokenizer.json", None, "{"),
        ("tokenizer_config.json", None, "3"),
        ("model.safetensors.index.json", None, '{"weight_map": {"a": "missing"}}'),
        ("model.safetensors.index.json", None, "[]"),
    ],
)
def test_a_damaged_file_is_named(name, size, content, tiny, tmp_path):
    folder = changed(tiny, tmp_path)
    if content is None:
        os.truncate(folder / name, size)
    else:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} is damaged \(.*\); get the checkpoint again$"):
        oneshot._refuse_damaged(folder)


def test_a_whole_model_is_not_damaged(tiny):
    oneshot._refuse_damaged(tiny)
    oneshot._refuse_damaged(Path("a/name-of-the-hub"))


@pytest.mark.parametrize("name", ["foo", "meta", "cuda:99", "cpu:3"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name):
    with pytest.raises(ValueError, match=f"--device {name} is not there.*choose auto or .*cpu"):
        oneshot._device(name)


def test_an_error_of_a_library_is_one_short_line():
    config = LlamaConfig()
    error = oneshot._in_short(TypeError(f"Cannot find\n  it.\n{config}"))
    assert error == "TypeError: Cannot find it."
    assert len(oneshot._in_short(ValueError("x" * 9999))) < 500


def test_a_model_of_which_no_layer_can_be_seen_is_known_before_the_pass(tiny, tmp_path):
    config = GPT2Config(vocab_size=9, n_embd=8, n_layer=2, n_head=2)
    lines = list(map(str, scales.unseen_layers(GPT2LMHeadModel(config))))
    assert len(lines) == 2
    assert "transformer.h.0.attn: LLM Compressor takes only" in lines[0]
    latent, _ = load_model(add_byte_tokenizer(tiny_deepseek(tmp_path)))
    assert "latent attention" in str(scales.unseen_layers(latent)[0])
    assert scales.unseen_layers(LlamaForCausalLM.from_pretrained(tiny)) == []


@pytest.fixture
def calibrating(tiny, text, tmp_path):
    """Start the script in its own environment on the small model."""
    if not PYTHON.is_file():
        pytest.skip("the environment of calibration is not there: run `make calibrate`")

    def start(*more):
        command = [PYTHON, ROOT / "calibration" / "oneshot.py", tiny, tmp_path / "out"]
        command += ["--data", text, "--samples", "5", "--tokens", "768", *more]
        return subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )

    return start


@pytest.mark.slow
@pytest.mark.parametrize("strategy", oneshot.STRATEGIES)
def test_a_calibrated_checkpoint_is_whole(strategy, calibrating, tiny, tmp_path):
    done = calibrating("--strategy", strategy, "--windows", "1", "--json")
    out, told = done.communicate(timeout=600)
    assert done.returncode == 0, told
    assert "left" in told
    assert all(line.startswith("calibrate: ") for line in told.splitlines())  # no foreign bars
    assert json.loads(out)["layers_without_scales"] == []
    made = tmp_path / "out"
    found = scales.of_checkpoint(made)
    assert {tensor.numel() for tensor in found.values()} == {HEADS if "head" in strategy else 1}
    before, after = (load_file(path / "model.safetensors") for path in (tiny, made))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert cli.main(["inspect", str(made)]) == 0
    assert list(tmp_path.glob(".out-*")) == []


def wait_for(process, words):
    """Read what a calibration tells until these words."""
    while words not in (line := process.stderr.readline()):
        assert process.poll() is None, line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("loading", signal.SIGINT),
        ("writing the checkpoint", signal.SIGTERM),
        ("measuring what fp8", signal.SIGHUP),
    ],
)
def test_an_interrupted_calibration_leaves_nothing(words, number, calibrating, tmp_path):
    started = calibrating()
    wait_for(started, words)
    assert list(tmp_path.glob(".out-*"))
    started.send_signal(number)
    _, told = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "nothing was written" in told
    assert list(tmp_path.glob("*out*")) == []


@pytest.mark.slow
def test_a_killed_calibration_leaves_the_old_checkpoint_and_the_next_one_tells_of_it(
    calibrating, tmp_path
):
    first = calibrating("--no-profile")
    first.communicate(timeout=600)
    held = json.loads((tmp_path / "out" / "kvcompress.json").read_text())
    assert set(held) == {"format", "calibration", "files"}  # and no profile
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    killed = calibrating("--overwrite", "--strategy", "attn_head")
    wait_for(killed, "measuring what fp8")
    killed.kill()
    killed.communicate(timeout=60)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    (left,) = tmp_path.glob(".out-*")
    again = calibrating("--overwrite", "--no-profile", "--windows", "0")
    _, told = again.communicate(timeout=600)
    assert again.returncode == 0
    assert f"{left} is of a run that was killed" in told
    assert list(tmp_path.glob(".out-*")) == [left]


def test_a_whole_checkpoint_takes_the_place_of_another(tmp_path):
    for name in ("out", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    oneshot._publish(tmp_path / "new", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
