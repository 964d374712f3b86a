"""Secrets are named in the settings, never written there: vLLM logs its configuration."""

from __future__ import annotations

import os

from vllm_kvcompress.stores.base import StoreConfigError

MOST_BYTES = 4096


def read_secret(source: str, setting: str) -> str:
    """The text that ``source``, ``"file:PATH"`` or ``"env:NAME"``, stands for.

    White space around it is dropped. Raises StoreConfigError, which names ``setting`` and never
    shows a secret.
    """
    kind, _, name = source.partition(":") if isinstance(source, str) else ("", "", "")
    if kind not in ("file", "env") or not name or "\0" in name:
        raise StoreConfigError(
            f"{setting}: settings are logged, so a secret is not written there; give 'file:PATH' "
            "or 'env:NAME', where it is to be read"
        )
    if kind == "env":
        text = os.environ.get(name, "")
        where = f"the environment variable {name}"
    else:
        path = os.path.expanduser(name)
        where = f"the file {path}"
        try:
            with open(path, "rb") as file:
                content = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise StoreConfigError(
                f"{setting}: {where} cannot be read ({error.strerror}); give a file that can"
            ) from error
        try:
            text = content.decode("ascii")
        except UnicodeDecodeError:
            raise StoreConfigError(f"{setting}: {where} is not text") from None
        if len(content) > MOST_BYTES:
            raise StoreConfigError(f"{setting}: {where} is longer than {MOST_BYTES} bytes")
    text = text.strip()
    if not text:
        raise StoreConfigError(f"{setting}: {where} is empty or not set; put the secret there")
    return text
