"""vLLM's attention backend for KIVI pages, on any device.

Attention and storing are one call a layer, ``forward``: what a step does to the pool and the pages
is planned once, when the first layer of the step asks, because by then the metadata of every cache
group has been built, and a block that one group has given up may be another group's now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_kvcompress import compat
from vllm_kvcompress.attention.base import PageBackend, PageImpl
from vllm_kvcompress.attention.residual import (
    ResidualPool,
    StepInput,
    StepPlan,
    new_lives,
    slots_for,
)
from vllm_kvcompress.config import FOUR_BIT_DTYPE, KIVI_DTYPES, KiviSettings
from vllm_kvcompress.kernels.kivi import implementation
from vllm_kvcompress.kernels.kivi.format import DTYPES, HEAD_SIZES, PageFormat

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(compat.LOGGER_NAME)

MUCH_PADDING = 1.25
"""A block that is so much larger than its page is worth a warning."""


class KiviBackend(PageBackend):
    """Chosen for the layers whose ``kv_cache_dtype`` is one of ours."""

    cache_dtype: ClassVar[str | None] = None
    """The layers' ``kv_cache_dtype``; None: the engine's."""
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KIVI_DTYPES)

    @staticmethod
    def get_impl_cls() -> type[KiviImpl]:
        return KiviImpl

    @staticmethod
    def get_builder_cls() -> type[KiviMetadataBuilder]:
        return KiviMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(_active().settings.group_size)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The bytes of a KIVI page for a layer with our dtype, anything else as it is."""
        if not compat.is_opaque_spec(spec):
            return spec
        active = _active()
        # vLLM asks for the bytes of one token before a sliding-window layer has its block.
        block = spec.block_size if spec.block_size > 1 else active.block_tokens
        fmt = active.settings.page_format(
            cls.cache_dtype or active.cache_dtype, block, spec.head_size, active.model_dtype
        )
        return replace(spec, state_content_bytes=fmt.token_bytes)


class FourBitBackend(KiviBackend):
    """Chosen for the layers to which a profile gives four bits."""

    cache_dtype = FOUR_BIT_DTYPE


@dataclass(frozen=True)
class _Active:
    """What the process's engine was configured with, for calls that vLLM makes without it."""

    settings: KiviSettings
    cache_dtype: str
    model_dtype: torch.dtype
    block_tokens: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> _Active:
        cache = vllm_config.cache_config
        return cls(
            settings=KiviSettings.parse(vllm_config.additional_config),
            cache_dtype=cache.cache_dtype,
            model_dtype=vllm_config.model_config.dtype,
            block_tokens=cache.block_size,
        )


_last_active: _Active | None = None


def _active() -> _Active:
    global _last_active
    vllm_config = compat.current_vllm_config()
    if vllm_config is not None and vllm_config.cache_config.cache_dtype in KIVI_DTYPES:
        _last_active = _Active.of(vllm_config)
    if _last_active is None:
        raise RuntimeError("no engine with KIVI pages has been configured in this process")
    return _last_active


@dataclass
class KiviMetadata:
    """One step as the layers of one group see it."""

    group: PooledGroup
    num_actual_tokens: int
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int


class KiviMetadataBuilder(AttentionMetadataBuilder[KiviMetadata]):
    """Hands a step's tensors on, and its numbers on the host to the pool."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = [compat.attention_layer(vllm_config, name) for name in layer_names]
        self._group = PooledGroup.of(layers, kv_cache_spec.block_size, vllm_config)
        own, taken = kv_cache_spec.unpadded_page_size_bytes, kv_cache_spec.page_size_bytes
        if taken > MUCH_PADDING * own:
            logger.warning_once(
                "KIVI pages of %s fill %d bytes of blocks of %d, as vLLM makes the blocks of all "
                "cache groups equally large; with fewer layers left out "
                "(kv_cache_dtype_skip_layers) more tokens fit",
                ", ".join(layer_names),
                own,
                taken,
            )
        implementation(device).warm_up()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> KiviMetadata:
        common = common_attn_metadata
        count = common.num_reqs
        self._group.pending = StepInput(
            block_table=common.block_table_tensor[:count].cpu().numpy(),
            query_start=common.query_start_loc_cpu[: count + 1].numpy(),
            seq_lens=common.seq_lens[:count].cpu().numpy(),
            slot_mapping=common.slot_mapping[: common.num_actual_tokens].cpu().numpy(),
        )
        return KiviMetadata(
            group=self._group,
            num_actual_tokens=common.num_actual_tokens,
            query_start=common.query_start_loc[: count + 1],
            seq_lens=common.seq_lens[:count],
            block_table=common.block_table_tensor[:count],
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )


class PooledGroup:
    """The layers of one cache group with their residual pool; the same for every builder."""

    def __init__(self, layers: Sequence[Any], block_tokens: int, vllm_config: VllmConfig) -> None:
        self.layers = layers
        self.block_tokens = block_tokens
        self.pending: StepInput | None = None
        self.pool: ResidualPool | None = None
        self.plan: DevicePlan | None = None
        self.slot_of_block: torch.Tensor | None = None
        self._residual = _Active.of(vllm_config).settings.residual_length
        self._sequences = vllm_config.scheduler_config.max_num_seqs
        self._everyone: list[PooledGroup] = []

    @classmethod
    def of(cls, layers: Sequence[Any], block_tokens: int, vllm_config: VllmConfig) -> PooledGroup:
        """The group of these layers: the one they have, or a new one."""
        known = layers[0].impl.group
        if known is not None and known.block_tokens == block_tokens:
            return known
        group = cls(layers, block_tokens, vllm_config)
        for layer in layers:
            layer.impl.group = group
        everyone = pooled_groups(vllm_config)
        for other in everyone:
            other._everyone = everyone
        return group

    def ensure_pool(self) -> ResidualPool:
        """The pool, made when it is first asked for: the layers then have their caches."""
        if self.pool is not None:
            return self.pool
        cache = self.layers[0].kv_cache
        tokens = self.layers[0].impl.pool_tokens
        slots = slots_for(self._sequences, self._residual, self.block_tokens)
        if tokens is not None:
            slots = max(1, tokens // self.block_tokens)
        for layer in self.layers:
            layer.impl.create_pool(slots, self.block_tokens, cache.device)
        self.pool = ResidualPool(slots, cache.shape[0], self.block_tokens, self._residual)
        on_host = torch.from_numpy(self.pool.slot_of_block)
        self.slot_of_block = on_host if cache.device.type == "cpu" else on_host.to(cache.device)
        return self.pool

    def begin(self) -> DevicePlan:
        """The plan of the step at hand; made, with all other groups', when first asked for."""
        if self.pending is not None:
            groups = [group for group in self._everyone if group.pending is not None]
            pools = [group.ensure_pool() for group in groups]
            for pool in pools:
                pool.finish_step()
            for group in groups:
                for block in new_lives(group.pending.slot_mapping, group.block_tokens):
                    for other in pools:
                        other.drop(block)
            for group, pool in zip(groups, pools, strict=True):
                group.plan = DevicePlan.of(pool.plan(group.pending), group)
                group.pending = None
        assert self.plan is not None
        return self.plan

    # --- between steps, for the connector ---------------------------------------------------

    def exact_blocks(self, blocks: Sequence[int]) -> list[bool]:
        """Which of these full blocks are exact, the others being packed."""
        pool = self.ensure_pool()
        pool.finish_step()
        return [pool.is_exact(block) for block in blocks]

    def exact_tokens(self, block: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of an exact block's K and V, ``[tokens, kv_heads, head_size]``, a pair a layer."""
        slot = int(self.ensure_pool().slot_of_block[block])
        return [
            (layer.impl.exact_keys[slot], layer.impl.exact_values[slot]) for layer in self.layers
        ]

    def put_exact(self, block: int, first: bool, kv: torch.Tensor) -> None:
        """Make a block's tokens ``kv [layers, 2, tokens, kv_heads, head_size]``, exactly if the
        pool has room for them, else packed."""
        slot, victim = self.ensure_pool().adopt(block, first)
        if victim is not None:
            self._pack_now(victim)
        for layer, (key, value) in zip(self.layers, kv, strict=True):
            impl = layer.impl
            if slot >= 0:
                impl.exact_keys[slot].copy_(key)
                impl.exact_values[slot].copy_(value)
            else:
                fill = len(key)
                columns = _columns(([0], [block], [fill], [int(first)]), key.device)
                impl.pack(columns, layer.kv_cache, key[None], value[None])
        self.update_map()

    def drop(self, blocks: Sequence[int]) -> None:
        """Forget the exact tokens of blocks whose pages are about to be written by others."""
        pool = self.ensure_pool()
        for block in blocks:
            pool.drop(block)
        self.update_map()

    def _pack_now(self, victim: tuple[int, int, int, int]) -> None:
        columns = _columns(tuple([value] for value in victim), self.layers[0].kv_cache.device)
        for layer in self.layers:
            layer.impl.pack(columns, layer.kv_cache)

    def update_map(self) -> None:
        """Bring the device's copy of the map up to date."""
        assert self.pool is not None and self.slot_of_block is not None
        changed = self.pool.changed
        if changed and self.slot_of_block.device.type != "cpu":
            blocks = torch.tensor(list(changed), dtype=torch.int64)
            slots = torch.from_numpy(self.pool.slot_of_block)[blocks]
            device = self.slot_of_block.device
            self.slot_of_block[blocks.to(device)] = slots.to(device)
        changed.clear()


def pooled_groups(vllm_config: VllmConfig) -> list[PooledGroup]:
    """The groups of the model's layers with KIVI pages."""
    impls = [layer.impl for layer in compat.attention_layers(vllm_config).values()]
    groups = [impl.group for impl in impls if isinstance(impl, KiviImpl) and impl.group]
    return list({id(group): group for group in groups}.values())


def _columns(columns: tuple[list[int], ...], device: torch.device) -> torch.Tensor | None:
    """int32 ``[columns, n]`` on the device, None for n = 0."""
    if not columns[0]:
        return None
    return torch.tensor(columns, dtype=torch.int32).to(device, non_blocking=True)


@dataclass(frozen=True)
class DevicePlan:
    """A ``StepPlan`` as tensors on the layers' device, shared by the layers of a group."""

    evict: torch.Tensor | None
    reopen: torch.Tensor | None
    retire: torch.Tensor | None
    write: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """Per token: slot, offset, row."""
    append: torch.Tensor | None
    """Blocks, fills before, firsts, fills after, scratch slots."""
    append_write: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    """Per token: scratch slot, offset, row."""

    @classmethod
    def of(cls, plan: StepPlan, group: PooledGroup) -> DevicePlan:
        device = group.layers[0].kv_cache.device
        group.update_map()
        append, tokens = None, None
        if plan.append[0]:
            blocks, before, firsts, counts, rows = plan.append
            scratch = list(range(len(blocks)))
            after = [fill + count for fill, count in zip(before, counts, strict=True)]
            append = _columns((blocks, before, firsts, after, scratch), device)
            tokens = _per_token(scratch, before, counts, rows, device)
        return cls(
            evict=_columns(plan.evict, device),
            reopen=_columns(plan.reopen, device),
            retire=_columns(plan.retire, device),
            write=_per_token(*plan.write, device) if plan.write[0] else None,
            append=append,
            append_write=tokens,
        )


def _per_token(
    slots: list[int],
    offsets: list[int],
    counts: list[int],
    rows: list[int],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slot, offset and row of each token of runs of ``counts`` tokens."""
    counts = np.asarray(counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return tuple(
        torch.from_numpy(index).to(device, non_blocking=True)
        for index in (
            np.repeat(np.asarray(slots), counts),
            np.repeat(np.asarray(offsets), counts) + within,
            np.repeat(np.asarray(rows), counts) + within,
        )
    )


class KiviImpl(PageImpl):
    """Attention of one layer, and what it stores."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_sharing_target_layer_name is not None:
            raise ValueError(
                f"kv_cache_dtype {self.kv_cache_dtype}: a layer that shares the KV cache of "
                f"{self.kv_sharing_target_layer_name} is not supported"
            )
        self.model_dtype = _active().model_dtype
        self.settings = _active().settings
        self.group: PooledGroup | None = None
        self.pool_tokens: int | None = None
        self.exact_keys: torch.Tensor | None = None
        self.exact_values: torch.Tensor | None = None
        compat.on_available_memory(reserve_pool)
        compat.on_cache_write(forget_rewritten, KiviMetadataBuilder)

    @property
    def exact_token_bytes(self) -> int:
        """Bytes of one exact token of all KV heads."""
        return 2 * self.num_kv_heads * self.head_size * self.model_dtype.itemsize

    def create_pool(self, slots: int, block_tokens: int, device: torch.device) -> None:
        """Allocate this layer's exact tokens, and know its pages from now on."""
        shape = (slots, block_tokens, self.num_kv_heads, self.head_size)
        self.exact_keys = torch.zeros(shape, dtype=self.model_dtype, device=device)
        self.exact_values = torch.zeros(shape, dtype=self.model_dtype, device=device)
        self.fmt = self.page_format(block_tokens)
        self.kernels = implementation(device)

    def page_format(self, block_tokens: int) -> PageFormat:
        """The format of this layer's pages."""
        return self.settings.page_format(
            self.kv_cache_dtype, block_tokens, self.head_size, self.model_dtype
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KiviMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query ``[tokens, heads, head_size]``, key and value ``[tokens, kv_heads, head_size]``;
        writes ``output [tokens, heads, head_size]``."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("KIVI pages have no fused output quantization")
        if attn_metadata is None:  # profiling
            return output
        plan = attn_metadata.group.begin()
        tokens = attn_metadata.num_actual_tokens
        query, key, value = query[:tokens], key[:tokens], value[:tokens]
        self._store(plan, key, value, kv_cache)
        self.kernels.attend(
            self.fmt,
            self.attention,
            query,
            key,
            value,
            kv_cache,
            self.exact_keys,
            self.exact_values,
            attn_metadata.group.slot_of_block,
            attn_metadata.block_table,
            attn_metadata.query_start,
            attn_metadata.seq_lens,
            output[:tokens],
            attn_metadata.max_query_len,
            attn_metadata.max_seq_len,
        )
        if plan.retire is not None:
            self.pack(plan.retire, kv_cache)
        return output

    def pack(
        self,
        columns: torch.Tensor,
        kv_cache: torch.Tensor,
        keys: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> None:
        """Pack slots of the pool, or of other exact tokens, into pages; columns: slots, blocks,
        fills, firsts."""
        slots, blocks, fills, firsts = columns
        keys = self.exact_keys if keys is None else keys
        values = self.exact_values if values is None else values
        self.kernels.pack(self.fmt, keys, values, slots, kv_cache, blocks, fills, firsts)

    def _store(
        self, plan: DevicePlan, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        """All of the step's stores but those that wait for its attention."""
        fmt, kernels = self.fmt, self.kernels
        keys, values = self.exact_keys, self.exact_values
        if plan.evict is not None:
            self.pack(plan.evict, kv_cache)
        if plan.reopen is not None:
            slots, blocks, fills, firsts = plan.reopen
            kernels.unpack(fmt, kv_cache, blocks, fills, firsts, keys, values, slots)
        if plan.write is not None:
            slots, offsets, rows = plan.write
            keys[slots, offsets] = key[rows]
            values[slots, offsets] = value[rows]
        if plan.append is not None:
            blocks, before, firsts, after, scratch = plan.append
            keys = keys.new_zeros((len(blocks), *keys.shape[1:]))
            values = torch.zeros_like(keys)
            if bool((before > 0).any()):
                kernels.unpack(fmt, kv_cache, blocks, before, firsts, keys, values, scratch)
            slots, offsets, rows = plan.append_write
            keys[slots, offsets] = key[rows]
            values[slots, offsets] = value[rows]
            kernels.pack(fmt, keys, values, scratch, kv_cache, blocks, after, firsts)


def forget_rewritten(
    vllm_config: VllmConfig, slot_mapping: torch.Tensor, block_tokens: int
) -> None:
    """Drop the blocks that a cache group without KIVI pages writes from their first token on.

    Groups share block numbers and memory: packing such a block later would write into the other
    group's tokens.
    """
    pools = [group.pool for group in pooled_groups(vllm_config) if group.pool is not None]
    if not pools:
        return
    for block in new_lives(slot_mapping.cpu().numpy(), block_tokens):
        for pool in pools:
            pool.drop(block)


def reserve_pool(vllm_config: VllmConfig, available: int) -> int:
    """Take the residual pool out of the memory for the KV cache; returns what is left, in bytes.

    vLLM's profiling has not seen the pool, which is made later. Raises ValueError if it would not
    hold a single block.
    """
    layers = compat.attention_layers(vllm_config)
    impls = [layer.impl for layer in layers.values() if isinstance(layer.impl, KiviImpl)]
    if not impls:
        return available
    active = _Active.of(vllm_config)
    size = active.block_tokens
    per_token = sum(impl.exact_token_bytes for impl in impls)
    sequences = vllm_config.scheduler_config.max_num_seqs
    wanted = slots_for(sequences, active.settings.residual_length, size)
    slots = min(wanted, int(available * active.settings.pool_share) // (per_token * size))
    if slots < 1:
        raise ValueError(
            f"additional_config: kvcompress.kivi: pool_share is {active.settings.pool_share}, less "
            f"than one block of {size} exact tokens, {per_token * size / 2**20:.1f} MiB; raise it, "
            "or the memory of the KV cache"
        )
    for impl in impls:
        impl.pool_tokens = slots * size
    taken = slots * size * per_token
    values = sum(2 * impl.num_kv_heads * impl.head_size for impl in impls)
    packed = sum(impl.page_format(size).token_bytes * impl.num_kv_heads for impl in impls)
    page = sum(
        layer.impl.page_format(size).page_bytes * layer.impl.num_kv_heads
        if isinstance(layer.impl, KiviImpl)
        else 2 * size * layer.num_kv_heads * layer.head_size * layer.kv_cache_torch_dtype.itemsize
        for layer in layers.values()
    )
    # Layers with a window are cache groups of their own, which share the pages in vLLM's way.
    alone = all(layer.sliding_window is None for layer in layers.values())
    logger.info(
        "KIVI pages: %s, preset %s, %.3g bits a value%s",
        active.cache_dtype,
        active.settings.preset,
        8 * packed / values,
        f"; {available // page * size:,} tokens in {available / 2**30:.2f} GiB of pages alone"
        if alone
        else "",
    )
    logger.info(
        "KIVI residual pool: %d blocks of %d exact tokens, %.1f MiB, %.1f%% of the KV cache's "
        "memory (max_num_seqs %d would fill %d blocks, %.1f MiB)",
        slots,
        size,
        taken / 2**20,
        100 * taken / available,
        sequences,
        wanted,
        wanted * size * per_token / 2**20,
    )
    return available - taken
