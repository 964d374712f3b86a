"""Keys of blobs: everything that changes what their bytes mean.

A key is 32 bytes: 8 that name the fingerprint and its epoch, 21 of a digest over fingerprint,
epoch, block hash and cache group, 1 for the level and 2 for the worker's rank. The header of every
blob repeats the key, and the worker that loads one checks it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvcompress import __version__, compat
from vllm_kvcompress.config import PROFILE, KiviSettings, profile_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

KEY_BYTES = 32
NAMESPACE_BYTES = 8
LEVEL_BYTES = 1
RANK_BYTES = 2
CHUNK_BYTES = KEY_BYTES - LEVEL_BYTES - RANK_BYTES
"""Length of what names a chunk, whatever its level and the rank."""
SAMPLE_BYTES = 1 << 16

FORMAT = 2
"""Raise it when the meaning of keys or of what is stored under them changes."""


def digest(*parts: bytes, size: int = 32) -> bytes:
    """BLAKE2b over ``parts``, each preceded by its length, so that borders count."""
    state = hashlib.blake2b(digest_size=size)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def server_fingerprint(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, codec_key: bytes, chunk_blocks: int
) -> bytes:
    """A digest of every setting known to the scheduler that the stored bytes depend on."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    profile = profile_of(vllm_config.additional_config)
    settings: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__.rpartition(".")[0],
        "model": _model_identity(model.model, model.revision, vllm_config),
        "hf_config": {
            name: value
            for name, value in model.hf_config.to_dict().items()
            if name not in ("_name_or_path", "transformers_version")
        },
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        # Scaled rotary embeddings (dynamic, LongRoPE) depend on it.
        "max_model_len": model.max_model_len,
        "kv_cache_dtype": cache.cache_dtype,
        "kv_cache_dtype_skip_layers": list(getattr(cache, "kv_cache_dtype_skip_layers", ()) or ()),
        "block_hash": cache.prefix_caching_hash_algo,
        "block_hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "chunk_blocks": chunk_blocks,
        "groups": [
            [list(group.layer_names), repr(group.kv_cache_spec)]
            for group in kv_cache_config.kv_cache_groups
        ],
        "parallel": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
        ],
        "speculative": None if speculative is None else [speculative.method, speculative.model],
        "additional": _without_profile(vllm_config.additional_config),
        "kivi": repr(KiviSettings.parse(vllm_config.additional_config)),
        "page_profile": profile and profile.digest,
    }
    return digest(codec_key, json.dumps(settings, sort_keys=True, default=str).encode())


def _without_profile(additional_config: Any) -> Any:
    """The user's additional configuration without the directory of a profile, which may lie
    anywhere: its digest tells it from others."""
    if not isinstance(additional_config, dict) or "kvcompress" not in additional_config:
        return additional_config
    ours = {k: v for k, v in additional_config["kvcompress"].items() if k != PROFILE}
    return {**additional_config, "kvcompress": ours}


def _model_identity(name: str, revision: str | None, vllm_config: VllmConfig) -> list[Any]:
    """What tells this model's weights from others': its files where they can be found."""
    if vllm_config.load_config.load_format == "dummy":
        return [name, revision, "dummy", vllm_config.model_config.seed]
    path = Path(name)
    if path.is_file():
        return [_sampled_digest(path)]
    folder = compat.checkpoint_folder(vllm_config)
    files = [] if folder is None else sorted(file for file in folder.iterdir() if file.is_file())
    weights = [file for file in files if file.suffix in (".safetensors", ".bin", ".pt", ".gguf")]
    if not weights:
        return [name, revision]
    return [[file.name, _sampled_digest(file)] for file in weights]


def _sampled_digest(path: Path) -> str:
    """A digest of a weight file: its size, samples spread over it, and some of each tensor.

    Reading everything would make the start of a large model wait for its disk twice.
    """
    size = path.stat().st_size
    spread = max(0, size - SAMPLE_BYTES)
    places = {(spread * place // 63, SAMPLE_BYTES) for place in range(64)}
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            header = file.read(8)
            header = file.read(min(int.from_bytes(header, "little"), size))
            places.add((8, len(header)))
            for tensor in json.loads(header).values():
                begin, end = tensor.get("data_offsets", (0, 0))
                start = 8 + len(header) + begin
                places |= {(start, 1024), (start + (end - begin) // 2, 1024)}
        state = hashlib.blake2b(str(size).encode(), digest_size=32)
        for place, length in sorted(places):
            file.seek(place)
            state.update(file.read(length))
    return state.hexdigest()


def worker_fingerprint(scales: Iterable[tuple[str, list[float], list[float]]]) -> bytes:
    """A digest of what only a worker knows: the scales that each layer's pages are written with."""
    return digest(json.dumps(list(scales)).encode())


def namespace(fingerprint: bytes, epoch: bytes) -> bytes:
    """The first bytes of every key under this fingerprint and epoch."""
    return digest(b"namespace", fingerprint, epoch, size=NAMESPACE_BYTES)


def chunk_key(fingerprint: bytes, epoch: bytes, offload_key: bytes) -> bytes:
    """What names a chunk, whatever its level and the rank.

    offload_key: vLLM's block hash and group.
    """
    size = CHUNK_BYTES - NAMESPACE_BYTES
    return namespace(fingerprint, epoch) + digest(fingerprint, epoch, offload_key, size=size)


def blob_key(chunk: bytes, rank: int, level: int = 0) -> bytes:
    """The key under which one worker keeps its part of a chunk at one of the levels."""
    return chunk + level.to_bytes(LEVEL_BYTES) + rank.to_bytes(RANK_BYTES, "little")


def split_blob_key(key: bytes) -> tuple[bytes, int]:
    """What names the chunk, and the level, of a blob's key."""
    return key[:CHUNK_BYTES], key[CHUNK_BYTES]
