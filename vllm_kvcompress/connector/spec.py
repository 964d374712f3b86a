"""What vLLM's offloading asks for: a manager in the scheduler and a worker beside each model."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
)

from vllm_kvcompress import compat
from vllm_kvcompress.codecs import Codec, create_codec
from vllm_kvcompress.config import OffloadSettings
from vllm_kvcompress.connector import fingerprint
from vllm_kvcompress.connector.groups import CacheGroup, MixedGroup, PackedGroup, PlainGroup
from vllm_kvcompress.connector.manager import ChunkManager
from vllm_kvcompress.connector.metrics import metric_definitions
from vllm_kvcompress.connector.worker import ChunkWorker, Level
from vllm_kvcompress.kernels import pages as page_kernels
from vllm_kvcompress.layout import PageLayout, find_layout
from vllm_kvcompress.stores import StoreStack, create_stack
from vllm_kvcompress.streaming import Prior, Speeds

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = init_logger(compat.LOGGER_NAME)

DEFAULT_CHUNK_TOKENS = 256


def chunk_blocks(settings: OffloadSettings, block_tokens: int) -> int:
    """Blocks of a chunk, the same for every group; ``block_tokens`` is the largest of a block.

    Raises ValueError if the chunk that is asked for is not made of whole blocks.
    """
    if settings.chunk_tokens is None:
        return max(1, DEFAULT_CHUNK_TOKENS // block_tokens)
    if settings.chunk_tokens % block_tokens:
        nearest = max(1, round(settings.chunk_tokens / block_tokens)) * block_tokens
        raise ValueError(
            f"kv_connector_extra_config: chunk_tokens is {settings.chunk_tokens}, not a multiple "
            f"of the KV cache's block of {block_tokens} tokens; use {nearest}"
        )
    return settings.chunk_tokens // block_tokens


class KVCompressSpec(OffloadingSpec):
    """Made by ``KVCompressConnector`` on either side; vLLM's front end asks it for metrics."""

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    def __init__(
        self,
        config: OffloadingConfig,
        settings: OffloadSettings,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(config)
        self.settings = settings
        self.codecs = settings.create_codecs()
        self.groups = compat.offload_groups(kv_cache_config)
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self._layouts: dict[compat.GroupSpec, PageLayout] = {}

    def get_manager(self) -> OffloadingManager:
        stack = create_stack(self.settings.stores, write_back=self.settings.write_back)
        shared = [store for store in stack.stores if store.shared]
        ranks = self.config.parallel.world_size
        if len(self.codecs) > 1 and not shared:
            raise ValueError(
                f"kv_connector_extra_config: levels is {list(self.settings.levels or ())}, and "
                "stores has none that outlives this process, to which all but the first level "
                "would go; add one, such as disk, or give one level"
            )
        _log_setup(self, stack)
        for store in stack.stores:
            if not store.shared:
                store.close()
        return ChunkManager(
            fingerprint.server_fingerprint(
                self.vllm_config,
                self.kv_cache_config,
                b"\0".join(codec.cache_key() for codec in self.codecs),
                self.blocks_per_chunk,
            ),
            ranks=ranks,
            shared_stores=shared,
            workers_hold=len(shared) < len(stack.stores),
            levels=len(self.codecs),
            retry_seconds=self.settings.retry_seconds,
            lookup_seconds=self.settings.lookup_seconds,
        )

    def find_layouts(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Find the element order of all pages. Raises ValueError where there is none."""
        for part in (part for parts in self.groups for part in parts if not part.packed):
            layer = compat.attention_layer(self.vllm_config, part.layer_names[0])
            cache = kv_caches[part.layer_names[0]]
            self._layouts[part] = find_layout(part, layer, cache, self.kv_cache_config.num_blocks)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> ChunkWorker:
        groups = [
            self._cache_group(parts, [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs])
            for parts, refs in zip(self.groups, kv_caches.group_data_refs, strict=True)
        ]
        samples = list(self._layouts.values())
        for layout in samples:
            self._warm_up(layout)
            if len(self.codecs) > 1 and layout.dtype.itemsize == 1:
                self._refuse_levels()
        if len(self.codecs) > 1 and any(part.packed for parts in self.groups for part in parts):
            self._refuse_levels()
        settings = self.settings
        deadline = math.inf if settings.ttft_slo_ms is None else settings.ttft_slo_ms / 1000
        priors = [
            self._measure(codec, samples[0]) if samples else Prior(1.0, math.inf)
            for codec in self.codecs
        ]
        return ChunkWorker(
            groups,
            blocks_per_chunk=self.blocks_per_chunk,
            levels=[Level(codec.level or codec.name, codec) for codec in self.codecs],
            stores=create_stack(self.settings.stores, write_back=self.settings.write_back),
            rank=self.config.parallel.rank,
            threads=self.settings.threads,
            staging_bytes=self.settings.staging_bytes,
            speeds=Speeds(priors, self.settings.threads),
            deadline=deadline,
        )

    def worker_fingerprint(self) -> bytes:
        """What this worker's pages were written with."""
        names = [name for parts in self.groups for part in parts for name in part.layer_names]
        return fingerprint.worker_fingerprint(
            (name, *compat.scales_of(compat.attention_layer(self.vllm_config, name)))
            for name in names
        )

    def _cache_group(
        self, parts: Sequence[compat.GroupSpec], pages: Sequence[torch.Tensor]
    ) -> CacheGroup:
        """A cache group of this worker from the pages ``[blocks, bytes]`` of each layer."""
        layers = sum(len(part.layer_names) for part in parts)
        if len(pages) != layers:
            raise ValueError(
                "KVCompressConnector needs each layer's pages apart; this KV cache layout "
                f"packs {layers} layers in {len(pages)} regions"
            )
        groups: list[CacheGroup] = []
        for part in parts:
            own = [pages[place][:, : part.page_bytes] for place in part.places]
            if part.packed:
                groups += self._packed_groups(part, own)
            else:
                groups.append(PlainGroup(part.group_id, self._layouts[part], own))
        group = groups[0] if len(groups) == 1 else MixedGroup(groups)
        chunk_bytes = group.block_bytes * self.blocks_per_chunk
        if chunk_bytes > self.settings.staging_bytes:
            raise ValueError(
                f"kv_connector_extra_config: staging_bytes is {self.settings.staging_bytes}, "
                f"and one chunk takes {chunk_bytes}; nothing would ever be stored"
            )
        return group

    def _packed_groups(
        self, part: compat.GroupSpec, pages: Sequence[torch.Tensor]
    ) -> list[CacheGroup]:
        """One for each residual pool: vLLM plans layers of other windows or query heads apart."""
        of_pool: dict[int, PackedGroup] = {}
        for name, page in zip(part.layer_names, pages, strict=True):
            pooled = compat.attention_layer(self.vllm_config, name).impl.group
            if id(pooled) not in of_pool:
                exact_codec = create_codec("cachegen", level="lossless")
                of_pool[id(pooled)] = PackedGroup(part.group_id, pooled, [], exact_codec)
            of_pool[id(pooled)].pages.append(page)
        return list(of_pool.values())

    def _refuse_levels(self) -> None:
        raise ValueError(
            f"kv_connector_extra_config: levels is {list(self.settings.levels or ())}, and "
            "pages that are compressed in place are stored without further loss, whatever "
            "the level; give one level"
        )

    def _warm_up(self, layout: PageLayout) -> None:
        """Compile what this group's chunks need, so that no request waits for a compiler."""
        page_kernels.warm_up(layout.dtype.itemsize)
        shape = (
            self._sample_layers(layout),
            *(layout.values, layout.block_tokens, layout.kv_heads, layout.head_size),
        )
        bits = torch.randn(shape).to(layout.index.device, layout.dtype)
        for codec in self.codecs:
            codec.decode(codec.encode(bits), device=layout.index.device)

    def _sample_layers(self, layout: PageLayout) -> int:
        """Layers of a chunk to try a codec on: all where a profile must fit them, else one."""
        return 1 if self.settings.profile is None else layout.layers

    def _measure(self, codec: Codec, layout: PageLayout) -> Prior:
        """What to expect of a level before it has been used, from a chunk of noise."""
        tokens = layout.block_tokens * self.blocks_per_chunk
        layers = self._sample_layers(layout)
        shape = (layers, layout.values, tokens, layout.kv_heads, layout.head_size)
        sample = torch.randn(shape).to(layout.index.device, layout.dtype)
        blob = codec.encode(sample)
        started = time.perf_counter()
        codec.decode(blob, device=layout.index.device).view(-1)[0].item()  # waits for a GPU
        seconds = time.perf_counter() - started
        return Prior(ratio=sample.nbytes / len(blob), decode=sample.nbytes / seconds)


def _log_setup(spec: KVCompressSpec, stack: StoreStack) -> None:
    """The one line at start: codec, level, stores and what they hold."""
    held = ", ".join(
        f"{stats.name} {stats.entries} blobs, {stats.bytes_held / 2**20:.1f} MiB"
        + (f" of {stats.capacity_bytes / 2**20:.0f} MiB" if stats.capacity_bytes else "")
        for stats in (store.stats() for store in stack.stores)
    )
    levels = [codec.level or codec.name for codec in spec.codecs]
    names = dict.fromkeys(codec.name for codec in spec.codecs)
    logger.info(
        "KV offload: codec %s%s, chunks of %s tokens, %d threads, stores: %s",
        " and ".join(names),
        "" if levels == list(names) else f" level {', '.join(levels)}",
        " and ".join(
            str(tokens)
            for tokens in sorted(
                {parts[0].block_tokens * spec.blocks_per_chunk for parts in spec.groups}
            )
        ),
        spec.settings.threads,
        held,
    )
