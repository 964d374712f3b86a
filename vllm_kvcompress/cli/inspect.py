"""What a blob, a disk store, or a calibrated checkpoint holds."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_kvcompress.cli import calibrated
from vllm_kvcompress.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The path, of any kind, and the picture."""
    parser.add_argument(
        "path",
        metavar="BLOB|STORE_DIR|CHECKPOINT_DIR",
        type=Path,
        help="the file of a blob; the directory of a disk store, every blob of which is read and"
        " checked; or that of a checkpoint, whose FP8 scales and codec profile are shown",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE.svg",
        type=Path,
        help="also draw the scales and losses of a checkpoint's layers",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the description of the path; 1 where a store or checkpoint holds what is damaged.

    Nothing is written to the store.
    """
    path: Path = arguments.path
    if path.is_dir() and calibrated.is_calibrated(path):
        return run_calibrated(arguments)
    if arguments.plot is not None:
        raise ValueError(f"{path} is no checkpoint: --plot draws the scales of one")
    found = inspect_store(path) if path.is_dir() else inspect_file(path)
    if arguments.json:
        print(json.dumps(found))
    elif path.is_dir():
        print_store(found)
    else:
        for name, value in found.items():
            print(f"{name:18} {value}")
    return 1 if found.get("damaged") else 0


def run_calibrated(arguments: argparse.Namespace) -> int:
    """Print the description of a checkpoint; 1 where something in it is wrong."""
    found = calibrated.inspect_calibrated(arguments.path)
    if arguments.plot is not None:
        calibrated.plot_calibrated(found, arguments.plot)
    if arguments.json:
        print(json.dumps(found))
    else:
        calibrated.print_calibrated(found)
    return 1 if found["faults"] or found["warnings"] else 0


def inspect_file(path: Path) -> dict[str, Any]:
    """That of the blob in a file, or under ``damaged`` why it cannot be read.

    Raises ValueError, which names the file, for one that is no blob at all.
    """
    from vllm_kvcompress.codecs import BlobError, container

    blob = path.read_bytes()
    try:
        return inspect_blob(blob)
    except BlobError as error:
        if blob.startswith(container.MAGIC):
            return {"damaged": str(error), "blob_bytes": len(blob)}
        raise ValueError(
            f"{path}: {error}; name a blob, the directory of a disk store, or a checkpoint"
        ) from error


def inspect_blob(blob: bytes) -> dict[str, Any]:
    """The header of a blob with its size, ratio and bits a value.

    Raises a subclass of ``BlobError`` that says why the bytes are not a blob.
    """
    from vllm_kvcompress.codecs import codec_names, container, create_codec

    header, sections = container.unpack(blob)
    if header.codec in codec_names():
        found = create_codec(header.codec).inspect(blob)
    else:
        found = container.describe(header, sections)
    return {
        **found,
        "blob_bytes": len(blob),
        "ratio": round(header.decoded_bytes / len(blob), 3),
        "bits_per_value": round(8 * len(blob) / math.prod(header.shape), 3),
    }


def inspect_store(root: Path) -> dict[str, Any]:
    """Size and content of a disk store, its blobs grouped by codec, level, dtype and shape.

    Raises ValueError if the directory is not a disk store.
    """
    from vllm_kvcompress.codecs import BlobError, container
    from vllm_kvcompress.stores import disk

    marker = root / disk.MARKER
    namespaces = sorted(path.parent.name for path in root.glob(f"ns-*/{disk.MARKER}"))
    if not marker.is_file() and not namespaces:
        raise ValueError(
            f"{root} is not a disk store: it has no {disk.MARKER}; and not a checkpoint: it has no "
            "config.json. Name one of them"
        )
    groups: Counter[tuple[Any, ...]] = Counter()
    blob_bytes: Counter[tuple[Any, ...]] = Counter()
    damaged: list[dict[str, str]] = []
    paths = list(blob_files(root))
    with Progress(len(paths), "blob") as progress:
        for path in paths:
            progress.advance()
            try:
                blob = path.read_bytes()
                header, _ = container.unpack(blob)
            except FileNotFoundError:
                # Evicted by a server that uses the store.
                continue
            except BlobError as error:
                told = {"error": type(error).__name__, "detail": str(error)}
                damaged.append({"path": str(path), **told})
                continue
            dtype = str(header.dtype).removeprefix("torch.")
            key = (header.codec, header.level, dtype, header.shape)
            groups[key] += 1
            blob_bytes[key] += len(blob)
    rows = []
    for key, count in groups.most_common():
        codec, level, dtype, shape = key
        values = count * math.prod(shape)
        raw = values * container_itemsize(dtype)
        rows.append(
            {
                "codec": codec,
                "level": level,
                "dtype": dtype,
                "shape": list(shape),
                "blobs": count,
                "decoded_bytes": raw,
                "blob_bytes": blob_bytes[key],
                "ratio": round(raw / blob_bytes[key], 3),
                "bits_per_value": round(8 * blob_bytes[key] / values, 3),
            }
        )
    return {
        "path": str(root),
        "namespaces": [name.removeprefix("ns-") for name in namespaces],
        "blobs": sum(groups.values()),
        "decoded_bytes": sum(row["decoded_bytes"] for row in rows),
        "blob_bytes": sum(blob_bytes.values()),
        "groups": rows,
        "damaged": damaged,
    }


def container_itemsize(dtype: str) -> int:
    """Bytes of one value of a dtype by its name in torch."""
    import torch

    return getattr(torch, dtype).itemsize


def blob_files(root: Path) -> Iterator[Path]:
    """The files of a store's blobs, those of its namespaces too, in the order of their names."""
    for folder, folders, files in os.walk(root):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".kv"))


def print_store(found: dict[str, Any]) -> None:
    held, raw = found["blob_bytes"], found["decoded_bytes"]
    ratio = f", ratio {raw / held:.2f}" if held else ""
    print(f"{found['path']}: {found['blobs']} blobs, {size(held)} for {size(raw)}{ratio}")
    if found["namespaces"]:
        print("namespaces: " + ", ".join(found["namespaces"]))
    if found["groups"]:
        print()
        form = "{:>6}  {:10} {:9} {:14} {:>10} {:>10} {:>6} {:>5}  {}"
        print(
            form.format(
                *("blobs", "codec", "level", "dtype", "decoded", "stored", "ratio", "bits"),
                "layers x K|V x tokens x heads x head size",
            )
        )
        for row in found["groups"]:
            print(
                form.format(
                    *(row["blobs"], row["codec"], row["level"] or "-", row["dtype"]),
                    *(size(row["decoded_bytes"]), size(row["blob_bytes"])),
                    *(f"{row['ratio']:.2f}", f"{row['bits_per_value']:.2f}"),
                    " x ".join(map(str, row["shape"])),
                )
            )
    for blob in found["damaged"]:
        print(f"damaged: {blob['path']}: {blob['error']}: {blob['detail']}")


def size(count: int) -> str:
    """Bytes for a person, in powers of 1024."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
