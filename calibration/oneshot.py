"""Calibrate a model: a checkpoint with FP8 scales of the KV cache, and a profile for the codec.

    python calibration/oneshot.py MODEL OUT --data FILE_OR_HUB_DATASET

LLM Compressor finds the scales, in one pass over the data; the same pass gathers what the profile
of the cachegen codec is made of. OUT is an ordinary checkpoint, which serves in plain vLLM too. It
appears when it is whole: an interrupted run leaves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import glob
import importlib
import inspect
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

MIN_TOKENS = 16
"""Shorter sequences say nothing about a cache and are left out."""
STRATEGIES = ("tensor", "attn_head")
OBSERVER = "static_minmax"
"""The true extremes of all samples. LLM Compressor's default is a moving average, which forgets:
its scales came out as low as half of the largest value, and FP8 clips what is beyond."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SETTINGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Of a checkpoint, where it has them."""

FILES = "files"
"""In the JSON file beside the weights: all that calibration wrote into OUT, and may replace."""

KEPT_CHUNKS = 4
"""Chunks that the steps of the profile are fitted on."""


class CalibrationError(ValueError):
    """A calibration that cannot go on; the message is one line that says what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the script and of ``vllm-kvcompress calibrate``."""
    parser.add_argument("model", metavar="MODEL", help="directory or hub name of the checkpoint")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory that will be made")
    parser.add_argument(
        "--data",
        required=True,
        metavar="FILE|NAME",
        help="text to calibrate on, like what will be served: a .txt, .md, .jsonl or .parquet file,"
        " or a data set of the hub",
    )
    parser.add_argument("--split", default="train", help="of a hub data set (%(default)s)")
    parser.add_argument("--config", help="of a hub data set")
    parser.add_argument("--column", help="that holds the text or the chat; found by itself")
    parser.add_argument("--samples", type=_at_least(1), default=512, help="(%(default)s)")
    parser.add_argument(
        "--tokens", type=_at_least(MIN_TOKENS), default=2048, help="of a sample (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle (%(default)s)")
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="tensor",
        help="one scale a layer, or one a KV head of a layer (%(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (%(default)s)")
    parser.add_argument(
        "--no-profile",
        action="store_true",
        help="FP8 scales alone, without the profiles of the codec and of the pages",
    )
    parser.add_argument(
        "--width",
        type=_at_least(1),
        default=1024,
        help="channels that the profile decorrelates together, several layers' where they fit:"
        " more make smaller blobs and slower coding (%(default)s)",
    )
    parser.add_argument(
        "--windows",
        type=_at_least(0),
        default=4,
        help="pieces of the data on which each layer's loss in FP8 and KIVI pages is measured;"
        " 0: none (%(default)s)",
    )
    parser.add_argument(
        "--max-loss",
        type=_loss,
        default=0.01,
        help="nats a token that the pages may cost: layers are listed to be left out until they do"
        " (%(default)s)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace OUT if it is there, and holds nothing but what calibration wrote",
    )


def to_argv(arguments: argparse.Namespace) -> list[str]:
    """The command line that gives these arguments again."""
    argv = [str(arguments.model), str(arguments.out)]
    for name in ("data", "split", "config", "column", "samples", "tokens", "seed", "strategy"):
        if getattr(arguments, name) is not None:
            argv += [f"--{name}", str(getattr(arguments, name))]
    for name in ("device", "width", "windows", "max_loss"):
        argv += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    for name in ("no_profile", "overwrite", "json"):
        argv += [f"--{name.replace('_', '-')}"] if getattr(arguments, name) else []
    return argv


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        with contextlib.suppress(ValueError):
            if (value := int(text)) >= least:
                return value
        raise argparse.ArgumentTypeError(f"takes a whole number from {least} on, not {text!r}")

    return number


def _loss(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"takes a number from 0 on, not {text!r}")


def calibrate(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Write OUT and return its summary. Raises CalibrationError."""
    out = Path(os.path.realpath(arguments.out))
    _refuse_place(out, arguments)
    for left in sorted(out.parent.glob(f".{glob.escape(out.name)}-unfinished-*")):
        say(f"{left} is of a run that was killed, unless it still runs; remove it then")
    for left in sorted(out.parent.glob(f".{glob.escape(out.name)}-replaced-*")):
        say(f"{left} is what OUT was before a run that was killed; take it back, or remove it")
    started = time.monotonic()
    with _unfinished(out) as folder:
        summary = _write(arguments, folder, say)
        summary["seconds"] = round(time.monotonic() - started, 1)
        _add_to_json(folder, {"calibration": summary})
        _add_to_json(folder, {FILES: _files_in(folder)})
        _finish_files(folder)
        _refuse_place(out, arguments)  # somebody may have put something there
        _publish(folder, out)
    return summary


def _refuse_place(out: Path, arguments: argparse.Namespace) -> None:
    """Raise CalibrationError unless a checkpoint can be put there and nothing of a user's is lost.

    out: with all links followed.
    """
    model = Path(os.path.realpath(arguments.model))
    if model.is_dir() and (out.is_relative_to(model) or model.is_relative_to(out)):
        raise CalibrationError(
            f"OUT ({out}) and MODEL ({model}) are one directory or one within the other; "
            "give another OUT"
        )
    if os.path.lexists(out):
        if not arguments.overwrite:
            raise CalibrationError(f"{out} is there already; give another OUT, or --overwrite")
        _refuse_to_replace(out)
    if not out.parent.is_dir():
        raise CalibrationError(f"{out.parent} is not a directory; make it, or give another OUT")


def _refuse_to_replace(out: Path) -> None:
    """Raise CalibrationError unless calibration wrote all that is in a directory."""
    from vllm_kvcompress.codecs.profile import JSON_NAME

    try:
        written = json.loads((out / JSON_NAME).read_text())[FILES]
        others = sorted(set(_files_in(out)) - set(written))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CalibrationError(
            f"{out} has no list of what calibration wrote into it, and is not replaced; "
            "give another OUT, or remove it yourself"
        ) from error
    if others:
        raise CalibrationError(
            f"{out} holds {', '.join(others[:3])}{', ...' if others[3:] else ''}, which "
            "calibration did not write; take such files out, or give another OUT"
        )
    if os.path.ismount(out):
        raise CalibrationError(f"{out} is a mount, which cannot be replaced; give another OUT")


def _files_in(folder: Path) -> list[str]:
    """The paths, within a directory, of all that it holds but directories."""
    found = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _finish_files(folder: Path) -> None:
    """Have the files on the disk before they get their name, with permissions as files have that
    are made here; libraries make theirs for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.rglob("*"):
        if path.is_dir():  # of further chat templates
            path.chmod(0o777 & ~mask)
            continue
        path.chmod(0o666 & ~mask)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _publish(folder: Path, out: Path) -> None:
    """Give a whole directory its name. What had it before is whole until it is gone."""
    with _unstoppable():
        if not out.exists():
            os.rename(folder, out)
            return
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-replaced-", dir=out.parent))
        try:
            os.rename(out, aside)
        except OSError:
            aside.rmdir()
            raise
        try:
            os.rename(folder, out)
        except OSError:
            os.rename(aside, out)
            raise
        shutil.rmtree(aside)


@contextlib.contextmanager
def _unstoppable() -> Iterator[None]:
    """Whoever is impatient must not stop the cleaning up."""
    held = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _unfinished(out: Path) -> Iterator[Path]:
    """A directory beside OUT that goes away unless it has been renamed."""
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-unfinished-", dir=out.parent))
    try:
        yield folder
    finally:
        with _unstoppable():
            shutil.rmtree(folder, ignore_errors=True)


def _write(
    arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    _quiet_libraries()
    import torch
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    from vllm_kvcompress.calibration import scales
    from vllm_kvcompress.calibration.dump import load_weights, model_class
    from vllm_kvcompress.calibration.samples import Source, load_samples

    try:
        from llmcompressor import oneshot
        from llmcompressor.core import reset_session
        from llmcompressor.modifiers.quantization import QuantizationModifier
    except ImportError as error:
        raise CalibrationError(
            f"LLM Compressor is not in this environment ({error}); `make calibrate` makes one"
        ) from error

    _silence_bars()
    device = _device(arguments.device)
    _refuse_damaged(Path(arguments.model))
    settings = Path(arguments.model) / "config.json"
    with _loading(settings if settings.is_file() else arguments.model):
        config = AutoConfig.from_pretrained(arguments.model)
        model_class(config)
        if (getattr(config.get_text_config(), "num_hidden_layers", None) or 0) < 1:
            raise ValueError("its num_hidden_layers is not above 0")
    with _loading(arguments.model):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if getattr(config, "quantization_config", None):
        raise CalibrationError(
            f"{arguments.model} is quantised already; calibrate the original checkpoint"
        )
    longest = getattr(config.get_text_config(), "max_position_embeddings", arguments.tokens)
    source = Source(arguments.data, arguments.split, arguments.config, arguments.column)
    tokens = min(arguments.tokens, longest)
    samples = load_samples(source, tokenizer, arguments.samples, tokens, arguments.seed, say)
    total = sum(map(len, samples))
    if len(samples) < arguments.samples:
        say(f"the data gives {len(samples)} samples, fewer than the {arguments.samples} asked for")
    say(f"{len(samples)} samples, {total:,} tokens; loading {arguments.model} on {device}")
    with _loading(arguments.model):
        model = load_weights(arguments.model, config, "auto").to(device)
    if unseen := scales.unseen_layers(model):
        for line in unseen:
            say(f"no scales: {line}")
        raise CalibrationError(
            f"LLM Compressor sees no layer of {arguments.model}, a model of type "
            f"{config.model_type}, whose KV cache it could find scales for"
        )
    dtype = model.dtype
    if dtype in (torch.bfloat16, torch.float16) and not _is_fast(device):
        model.float()

    collector = None
    if not arguments.no_profile:
        from vllm_kvcompress.calibration.collect import Collector

        collector = Collector(model, total, arguments.width, KEPT_CHUNKS)
        if collector.refusal:
            say(f"no codec profile: {collector.refusal}")
            collector = None
    scheme = {
        "num_bits": 8,
        "type": "float",
        "strategy": arguments.strategy,
        "dynamic": False,
        "symmetric": True,
        "observer": OBSERVER,
    }
    passed = time.monotonic()
    try:
        with _whole_experts():
            oneshot(
                model=model,
                tokenizer=tokenizer,
                dataset=_loader(samples, model, collector, say),
                recipe=QuantizationModifier(kv_cache_scheme=scheme),
                pipeline="basic",
                moe_calibrate_all_experts=False,
                max_seq_length=tokens,
                num_calibration_samples=len(samples),
            )
    except Exception as error:  # it raises whatever a model of another make leads to
        raise CalibrationError(
            f"LLM Compressor cannot calibrate {arguments.model}, a model of type "
            f"{config.model_type} ({_in_short(error)})"
        ) from error
    pass_seconds = time.monotonic() - passed
    reset_session()  # it holds the model
    if collector is not None:
        collector.close()
    scales.drop_useless(model)
    found = scales.of_model(model)
    missed = scales.missed_layers(model, found)
    for line in missed:
        say(f"no scales: {line}")
    say("writing the checkpoint")
    model.to(dtype)
    model.save_pretrained(folder, save_compressed=True)
    tokenizer.save_pretrained(folder)
    if getattr(config, "vision_config", None) is not None:
        with contextlib.suppress(OSError, ValueError):  # a checkpoint without one
            AutoProcessor.from_pretrained(arguments.model).save_pretrained(folder)
    faults = scales.check(found, config.get_text_config(), arguments.strategy)
    # Layers that are named above do not make the others' scales useless.
    if found and any(line.cached for line in missed):
        faults = [line for line in faults if not line.endswith("have no scales")]
    faults += scales.compare(found, scales.of_checkpoint(folder))
    if Path(arguments.model).is_dir():
        faults += scales.compare_weights(Path(arguments.model), folder)
    if faults:
        raise CalibrationError("the checkpoint is not as it should be: " + "; ".join(faults[:5]))
    summary = {
        "model": str(arguments.model),
        "data": arguments.data,
        "samples": len(samples),
        "tokens": total,
        "seed": arguments.seed,
        "strategy": arguments.strategy,
        "observer": OBSERVER,
        "pass_seconds": round(pass_seconds, 1),
        "layers_without_scales": list(map(str, missed)),
    }
    del model
    if collector is not None:
        _write_profile(collector, longest, folder, say)
        collector = None  # it keeps K and V of some samples
    _give_back_memory()
    text_config = config.get_text_config()
    own, layers = scales.layers_with_cache(text_config), text_config.num_hidden_layers
    if arguments.no_profile or not arguments.windows:
        pass
    elif any(line.cached for line in missed):
        say("no profile of pages: some layers have no scales")
    elif len(own) != layers:
        say(f"no profile of pages: {len(own)} of {layers} layers have a cache of their own")
    else:
        _write_pages(arguments, samples, scales.by_layer(found), device, folder, say)
    return summary


def _device(name: str) -> str:
    """The device to calibrate on. Raises CalibrationError for one that is not there."""
    import torch

    there = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        there = [kind, *(f"{kind}:{n}" for n in range(torch.accelerator.device_count())), "cpu"]
    if name == "auto":
        return "cuda" if "cuda" in there else "cpu"
    if name not in there:
        raise CalibrationError(
            f"--device {name} is not there for this PyTorch ({torch.__version__}); "
            f"choose auto or {' or '.join(there)}"
        )
    return name


def _refuse_damaged(model: Path) -> None:
    """Raise CalibrationError that names the file of a local checkpoint that cannot be read."""
    from safetensors import safe_open

    path = model
    try:
        for path in filter(Path.is_file, (model / name for name in SETTINGS)):
            if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
                raise ValueError("it holds no JSON object")
        for path in sorted(model.glob("*.safetensors")):
            with safe_open(path, "pt"):
                pass
        for path in sorted(model.glob("*.safetensors.index.json")):
            names = set(json.loads(path.read_text())["weight_map"].values())
            if missing := sorted(name for name in names if not (model / name).is_file()):
                raise ValueError(f"it names {missing[0]}, which is not there")
    except Exception as error:  # a file of any content may lead to any
        raise CalibrationError(
            f"{path} is damaged ({_in_short(error)}); get the checkpoint again"
        ) from error


@contextlib.contextmanager
def _loading(what: str | Path) -> Iterator[None]:
    """Whatever goes wrong with a checkpoint, and libraries raise much, is a line about it."""
    try:
        yield
    except Exception as error:
        raise CalibrationError(f"cannot load {what}: {_in_short(error)}") from error


def _in_short(error: Exception) -> str:
    """One line of an error, without the configuration that some libraries print with it."""
    text = " ".join(str(error).split())
    text = re.sub(r" ?\w+Config \{.*", "", text)
    text = text if len(text) <= 400 else f"{text[:400]}..."
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


def _silence_bars() -> None:
    """Make bars of LLM Compressor that it asks for whatever TQDM_DISABLE says silent, too."""
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **{**more, "disable": True})

    for name, module in list(sys.modules.items()):
        if name.startswith("compressed_tensors.") and getattr(module, "tqdm", None) is tqdm:
            module.tqdm = Silent


def _give_back_memory() -> None:
    """Let go of what a model and its passes have left behind, before the next one is loaded."""
    gc.collect()  # LLM Compressor leaves cycles
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # and glibc what was freed, half of all here


def _write_pages(
    arguments: argparse.Namespace,
    samples: list[Any],
    by_layer: Any,
    device: str,
    folder: Path,
    say: Callable[[str], None],
) -> None:
    from vllm_kvcompress import page_profile
    from vllm_kvcompress.calibration import hints, sensitivity
    from vllm_kvcompress.calibration.dump import load_model

    pieces = [piece for ids in samples for piece in ids.split(sensitivity.WINDOW)]
    windows = [ids for ids in pieces if len(ids) == sensitivity.WINDOW][: arguments.windows]
    if not windows:
        say(f"no profile of pages: no sample has {sensitivity.WINDOW} tokens")
        return
    with _loading(arguments.model):
        model, _ = load_model(arguments.model, device)
    name = {
        "name": str(arguments.model),
        "model_type": str(model.config.get_text_config().model_type),
    }
    try:
        probe = sensitivity.Probe(model, windows)
    except ValueError as error:
        say(f"no profile of pages: {error}")
        return
    section = hints.measure_pages(probe, by_layer, name, arguments.max_loss, say)
    _add_to_json(folder, {page_profile.SECTION: section})
    if page_profile.load_page_profile(folder).digest != section["digest"]:
        raise CalibrationError("the profile of pages reads back as another one")


def _write_profile(
    collector: Any, max_positions: int, folder: Path, say: Callable[[str], None]
) -> None:
    from safetensors.torch import save_file

    from vllm_kvcompress.calibration.codec_profile import fit_profile
    from vllm_kvcompress.codecs import profile as files

    if collector.refusal:
        say(f"no codec profile: {collector.refusal}")
        return
    say("fitting the codec profile")
    made = fit_profile(collector.statistics, max_positions, collector.kept)
    _write_index(folder)
    save_file(files.arrays_of(made.transform), folder / files.TENSORS_NAME)
    _add_to_json(folder, {"cachegen": files.describe(made.transform, made.levels)})
    if files.load_profile(folder).digest != made.digest:
        raise CalibrationError("the profile that was written reads back as another one")


def _is_fast(device: str) -> bool:
    """Whether the device computes in 16 bits as fast as in 32; many CPUs take several times as long
    (and the weights, once, twice the memory)."""
    import torch

    return (
        device != "cpu"
        or torch.cpu._is_avx512_bf16_supported()
        or torch.cpu._is_amx_tile_supported()
    )


def _write_index(folder: Path) -> None:
    """Say which files hold the weights: vLLM would take every other one for weights as well."""
    from safetensors import safe_open

    path = folder / "model.safetensors.index.json"
    if path.exists():
        return
    place, size = {}, 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            place |= dict.fromkeys(weights.keys(), file.name)
        size += file.stat().st_size
    path.write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": place}, indent=1))


def _add_to_json(folder: Path, content: dict[str, Any]) -> None:
    from vllm_kvcompress.codecs.profile import FORMAT, JSON_NAME

    path = folder / JSON_NAME
    held = json.loads(path.read_text()) if path.exists() else {"format": FORMAT}
    path.write_text(json.dumps({**held, **content}, indent=1) + "\n")


@contextlib.contextmanager
def _whole_experts() -> Iterator[None]:
    """Leave mixtures of experts as they are.

    LLM Compressor takes their weights apart, in the dtype of the configuration, so that they can be
    quantised one by one; nobody looks at them here.
    """
    module = importlib.import_module("llmcompressor.entrypoints.oneshot")
    with mock.patch.object(module, "get_non_linearized_moes", lambda model: []):
        yield


def _without_logits(model: Any) -> dict[str, Any]:
    """What keeps the model from computing the predictions of a sample, which nobody reads."""
    import torch

    takes = inspect.signature(model.forward).parameters
    return {"logits_to_keep": torch.tensor([0])} if "logits_to_keep" in takes else {}


def _loader(samples: list[Any], model: Any, collector: Any, say: Callable[[str], None]) -> Any:
    """Batches of one sample; between two of them, progress and what the collector has to do."""
    from torch.utils.data import DataLoader, IterableDataset

    from vllm_kvcompress.calibration import scales
    from vllm_kvcompress.progress import Progress

    total, more = sum(map(len, samples)), _without_logits(model)

    class Samples(IterableDataset):
        def __len__(self) -> int:
            return len(samples)

        def __iter__(self) -> Iterator[dict[str, Any]]:
            started = told = time.monotonic()
            done = 0
            scales.unset(model)
            if collector is not None:
                collector.attach()
            with Progress(total, "token") as progress:
                progress.doing("calibrating")
                for number, ids in enumerate(samples):
                    yield {"input_ids": ids[None], **more}
                    if collector is not None:
                        collector.take()
                    progress.advance(len(ids))
                    done += len(ids)
                    now = time.monotonic()
                    last = number + 1 == len(samples)
                    if last or (not progress.is_bar and now - told >= 2):
                        told = now
                        left = (now - started) * (total - done) / done
                        say(
                            f"calibrating: {number + 1} of {len(samples)} samples, "
                            f"{done / (now - started):,.0f} tokens/s, {_duration(left)} left"
                        )

    return DataLoader(Samples(), batch_size=None)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _quiet_libraries() -> None:
    """One line of progress instead of the libraries' own bars and logs."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("LLM_COMPRESSOR_CLEAR_LOGGERS", "true")
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    arguments = parser.parse_args(argv)

    def say(text: str) -> None:
        print(f"calibrate: {text}", file=sys.stderr, flush=True)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    try:
        summary = calibrate(arguments, say)
    except KeyboardInterrupt:
        say("interrupted; nothing was written")
        return 130
    except (ValueError, OSError) as error:
        say(f"error: {' '.join(str(error).split())}")
        return 2
    if arguments.json:
        print(json.dumps(summary))
    else:
        say(f"{arguments.out} is ready, after {_duration(summary['seconds'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
