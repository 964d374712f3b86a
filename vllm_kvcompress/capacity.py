"""Bytes of a KV cache, exactly as vLLM lays it out, for any model, dtype and setting.

vLLM cuts the memory of the KV cache into blocks. A block holds the pages of one *group* of layers,
and every group takes its blocks from the same pool, so a block is as large as its largest group. A
request takes from each group as many blocks as its tokens need; layers with a sliding window need
the window and what is being computed, whatever the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vllm_kvcompress.config import (
    FOUR_BIT_DTYPE,
    FP8_DTYPES,
    KIVI_DTYPES,
    SLIDING_WINDOW,
    KiviSettings,
)
from vllm_kvcompress.kernels.kivi.format import ITEMSIZES
from vllm_kvcompress.model_layers import AttentionLayer, ModelLayers
from vllm_kvcompress.page_profile import PageProfile

DEVICES = ("cpu", "cuda")

_ONE_BYTE = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
_TURBOQUANT = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
_PER_TOKEN_HEAD = {"int8_per_token_head": 1, "fp8_per_token_head": 1, "int4_per_token_head": 2}
_LATENT = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_NVFP4 = ("nvfp4", "nvfp4_4over6")
_ULTRAQUANT = "ultraquant_4bit"

CACHE_DTYPES = (
    *("auto", "bfloat16", "float16"),
    *_ONE_BYTE,
    *_PER_TOKEN_HEAD,
    *_NVFP4,
    *_TURBOQUANT,
    _ULTRAQUANT,
    *_LATENT,
    *KIVI_DTYPES,
)
"""Every ``kv_cache_dtype``: vLLM's own and KIVI pages."""


@dataclass(frozen=True)
class EngineOptions:
    """What of an engine's options the size of its KV cache depends on; None: vLLM's default."""

    device: str = "cuda"
    """``cpu`` or ``cuda``: block sizes and defaults differ."""
    tensor_parallel_size: int = 1
    block_size: int | None = None
    """Tokens of a block."""
    max_model_len: int | None = None
    """Tokens of the longest request."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory: int | None = None
    """Bytes of the whole GPU, which the defaults of ``vllm serve`` depend on; None: 80 GiB."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"device is {self.device!r}; choose from {', '.join(DEVICES)}")
        for name in (
            *("tensor_parallel_size", "block_size", "max_model_len", "max_num_seqs"),
            "max_num_batched_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected a number of at least 1")

    def batch(self, max_model_len: int) -> tuple[int, int]:
        """``max_num_seqs`` and ``max_num_batched_tokens``, as ``vllm serve`` sets what is not."""
        memory = self.gpu_memory or 80 << 30
        if self.device == "cpu":
            sequences, batched = (128 * self.tensor_parallel_size, 2048 * self.tensor_parallel_size)
        elif memory >= 160 << 30:
            sequences, batched = (1024, 16384)
        elif memory >= 70 << 30:
            sequences, batched = (1024, 8192)
        else:
            sequences, batched = (256, 2048)
        sequences = self.max_num_seqs or sequences
        batched = self.max_num_batched_tokens or min(batched, sequences * max_model_len)
        if self.max_num_seqs is None:
            sequences = min(sequences, batched)
        return sequences, batched

    def tokens_in_flight(self, max_model_len: int) -> int:
        """Tokens that may be scheduled and not yet settled."""
        # On a GPU the next step is scheduled while one runs.
        return self.batch(max_model_len)[1] * (1 if self.device == "cpu" else 2)


@dataclass(frozen=True)
class CacheOptions:
    """How the KV cache is kept."""

    kv_cache_dtype: str = "auto"
    kivi: KiviSettings = field(default_factory=KiviSettings)
    """Of KIVI pages; with another dtype they change nothing."""
    skip_layers: tuple[str, ...] = ()
    """``kv_cache_dtype_skip_layers``: numbers of layers, or ``sliding_window``."""
    profile: PageProfile | None = None
    """Of the pages; it changes FP8 and KIVI pages as it does in the engine."""

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype is {self.kv_cache_dtype!r}; choose from {', '.join(CACHE_DTYPES)}"
            )

    @property
    def is_kivi(self) -> bool:
        """Whether pages are KIVI's."""
        return self.kv_cache_dtype in KIVI_DTYPES


@dataclass(frozen=True)
class LayerPages:
    """The pages of one layer on one rank. Layers with equal pages can share a group."""

    kind: str
    """``full``, ``window``, ``chunk``, or ``state`` of a layer that keeps no tokens."""
    block: int
    """Tokens of a page."""
    token_bytes: int
    """Bytes of a token, of all heads of the rank."""
    dtype: str
    heads: int
    head_size: int
    reach: int = 0
    """Tokens of the window or chunk; blocks that a request holds of a state."""
    padded: int | None = None
    """Bytes that the page is padded to."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, with its padding."""
        return self.padded or self.block * self.token_bytes

    def blocks(self, tokens: int, in_flight: int) -> int:
        """Blocks that a request of so many tokens may hold at once."""
        if self.kind == "full":
            return -(-tokens // self.block)
        if self.kind == "state":
            return self.reach
        if self.kind == "chunk":
            return -(-min(self.reach + in_flight, tokens) // self.block)
        # A window may begin anywhere in a block.
        return -(-min(self.reach - 1 + in_flight, tokens) // self.block) + 1


@dataclass(frozen=True)
class CachePlan:
    """The KV cache of one rank, in groups of layers that share blocks."""

    groups: tuple[tuple[LayerPages, ...], ...]
    max_model_len: int
    in_flight: int
    pool_block: int = 0
    """Tokens of a block of the residual pool; 0 where there is none."""
    pool_token_bytes: int = 0
    """Bytes of one exact token, of all layers with KIVI pages."""
    pool_blocks_wanted: int = 0
    """Blocks that would keep every sequence's last tokens exact."""
    pool_share: float = 0.0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the pool that all groups take from."""
        return max(sum(pages.page_bytes for pages in group) for group in self.groups)

    def pool_blocks(self, memory: int) -> int:
        """Blocks of the residual pool in so many bytes of KV cache.

        Raises ValueError if the share of the memory does not hold one.
        """
        if not self.pool_block:
            return 0
        size = self.pool_block * self.pool_token_bytes
        found = min(self.pool_blocks_wanted, int(memory * self.pool_share) // size)
        if found < 1:
            raise ValueError(
                f"pool_share {self.pool_share} of {memory / 2**20:.1f} MiB is less than one block "
                f"of {self.pool_block} exact tokens, {size / 2**20:.1f} MiB; raise it, or the "
                "memory of the KV cache"
            )
        return found

    def pool_bytes(self, memory: int) -> int:
        """Bytes of the residual pool in so many bytes of KV cache."""
        return self.pool_blocks(memory) * self.pool_block * self.pool_token_bytes

    def blocks(self, memory: int) -> int:
        """Blocks in so many bytes, the residual pool taken out."""
        return (memory - self.pool_bytes(memory)) // self.block_bytes

    def request_blocks(self, tokens: int) -> int:
        """Blocks of all groups that a request of so many tokens may hold at once."""
        return sum(
            max(pages.blocks(tokens, self.in_flight) for pages in group) for group in self.groups
        )

    def request_bytes(self, tokens: int) -> int:
        """Bytes of those blocks."""
        return self.request_blocks(tokens) * self.block_bytes

    def tokens(self, memory: int) -> int:
        """The ``KV cache size`` of vLLM's start-up log.

        In models with sliding windows it depends on ``max_model_len``: it is that length times the
        requests of that length that fit.
        """
        longest = self.request_blocks(self.max_model_len)
        return int(self.blocks(memory) / longest * self.max_model_len)

    def requests(self, memory: int, tokens: int) -> int:
        """Whole requests of so many tokens that fit at once; vLLM keeps one block for itself."""
        return max(self.blocks(memory) - 1, 0) // self.request_blocks(tokens)

    def values(self) -> int:
        """Values of K and V that a token has in all layers of the rank."""
        return sum(
            pages.heads * pages.head_size for group in self.groups for pages in group if pages.heads
        )

    def token_bytes(self) -> float:
        """Bytes that a token adds to all layers, padding of pages included; states grow by none."""
        return sum(
            pages.page_bytes / pages.block
            for group in self.groups
            for pages in group
            if pages.kind != "state"
        )


def plan(model: ModelLayers, engine: EngineOptions, cache: CacheOptions) -> CachePlan:
    """Lay out the KV cache of one rank.

    Raises ValueError, which names the setting, for what vLLM or the page format refuses.
    """
    if cache.kv_cache_dtype == "auto":
        cache = replace(cache, kv_cache_dtype=model.kv_cache_dtype)
    if not model.layers:
        raise ValueError(f"{model.name} has no layer with a KV cache")
    if cache.is_kivi:
        _check_kivi(model, cache)
    if cache.profile is not None:
        cache = _with_profile(model, cache, cache.profile)
    if engine.device == "cpu":
        _check_cpu(model, cache)
    skipped = _skipped(model, cache)
    max_model_len = engine.max_model_len or model.max_model_len
    layout = _Layout(model, engine, cache, skipped)
    groups = _group(layout.pages())
    planned = CachePlan(tuple(groups), max_model_len, engine.tokens_in_flight(max_model_len))
    if not cache.is_kivi:
        return planned
    packed = [layer for layer in model.layers if layer.number not in skipped]
    item = ITEMSIZES[model.dtype]
    heads = layout.heads(packed[0]) if packed else 0
    residual = cache.kivi.residual_length
    return replace(
        planned,
        pool_block=layout.block if packed else 0,
        pool_token_bytes=sum(2 * heads * layer.key_size * item for layer in packed),
        pool_blocks_wanted=engine.batch(max_model_len)[0] * (-(-residual // layout.block) + 1),
        pool_share=cache.kivi.pool_share,
    )


def _with_profile(model: ModelLayers, cache: CacheOptions, profile: PageProfile) -> CacheOptions:
    """The options with the layers that the profile leaves out, and without it where it says
    nothing of such pages. Raises ValueError for the profile of another model."""
    profile.check_model(model.shape)
    if cache.kv_cache_dtype in FP8_DTYPES:
        layers = profile.fp8_skip_layers
    elif cache.is_kivi and not model.has_some_windows:
        layers = profile.kivi.skip_layers
    else:
        return replace(cache, profile=None)
    return replace(cache, skip_layers=cache.skip_layers or tuple(map(str, layers)))


def _check_cpu(model: ModelLayers, cache: CacheOptions) -> None:
    known = ["auto", "bfloat16", "float16"]
    if not any(layer.is_latent for layer in model.layers):
        known += [*FP8_DTYPES, *KIVI_DTYPES]
    if cache.kv_cache_dtype not in known:
        raise ValueError(
            f"kv_cache_dtype {cache.kv_cache_dtype}: the CPU engine cannot do it with this model; "
            f"choose from {', '.join(known)}"
        )


def _check_kivi(model: ModelLayers, cache: CacheOptions) -> None:
    for refused, what in (
        (any(layer.is_latent for layer in model.layers), "multi-head latent attention (MLA)"),
        (model.shares_layers, "layers that share the KV cache of another layer"),
        (any(layer.chunk for layer in model.layers), "chunked local attention"),
        (bool(model.states), "models with Mamba or other state layers"),
    ):
        if refused:
            raise ValueError(f"kv_cache_dtype {cache.kv_cache_dtype} does not support {what}")


def _skipped(model: ModelLayers, cache: CacheOptions) -> frozenset[int]:
    """Numbers of the layers that are left out of ``kv_cache_dtype``."""
    numbers = {layer.number for layer in model.layers}
    found = set()
    for entry in cache.skip_layers:
        if entry == SLIDING_WINDOW:
            windowed = {layer.number for layer in model.layers if layer.window}
            if not windowed:
                raise ValueError(
                    f"kv_cache_dtype_skip_layers: {entry!r}, and no layer of this model has one"
                )
            found |= windowed
        elif not entry.isdecimal() or str(int(entry)) != entry or int(entry) not in numbers:
            raise ValueError(
                f"kv_cache_dtype_skip_layers: there is no layer {entry!r}; choose from 0 to "
                f"{max(numbers)}, or {SLIDING_WINDOW}"
            )
        else:
            found.add(int(entry))
    if cache.kv_cache_dtype in (*_TURBOQUANT, _ULTRAQUANT):
        # vLLM keeps the first and last two layers in 16 bits.
        edge = min(2, len(numbers) // 2)
        found |= {*sorted(numbers)[:edge], *sorted(numbers)[len(numbers) - edge :]}
    if found and any(layer.is_latent for layer in model.layers):
        raise ValueError("kv_cache_dtype_skip_layers is not counted for models with MLA")
    if found and model.states:
        raise ValueError("kv_cache_dtype_skip_layers is not counted for models with state layers")
    return frozenset(found)


class _Layout:
    """The pages of each layer, before they are grouped."""

    def __init__(
        self,
        model: ModelLayers,
        engine: EngineOptions,
        cache: CacheOptions,
        skipped: frozenset[int],
    ) -> None:
        self._model = model
        self._engine = engine
        self._cache = cache
        self._skipped = skipped
        self._shared_page: int | None = None
        self.block = self._first_block()
        if skipped and engine.device == "cuda":
            self._align()
        if model.states:
            self._cover_states()

    def heads(self, layer: AttentionLayer) -> int:
        """KV heads on one rank. Raises ValueError if they cannot be shared out."""
        ranks = self._engine.tensor_parallel_size
        if layer.is_latent:
            return 1
        if layer.kv_heads % ranks and ranks % layer.kv_heads:
            raise ValueError(
                f"tensor_parallel_size is {ranks}, and {layer.kv_heads} KV heads cannot be shared "
                "out; choose a divisor or a multiple"
            )
        return max(1, layer.kv_heads // ranks)

    def pages(self) -> list[LayerPages]:
        """One entry a layer, and one for an indexer beside it."""
        found = []
        for layer in self._model.layers:
            dtype = self._dtype(layer)
            heads = self.heads(layer)
            kind, reach, block, padded = "full", 0, self.block, None
            per_token = self._token_bytes(layer, dtype, heads)
            if layer.window:
                kind, reach = "window", layer.window
                budget = self._shared_page or per_token * self.block
                base = self._kernel_block(dtype)
                block = max(base, budget // per_token // base * base)
                padded = self._shared_page
                if padded is not None and block * per_token > padded:
                    raise ValueError(
                        f"vLLM cannot lay out layer {layer.number} beside the others; leave "
                        "kv_cache_dtype_skip_layers away, or raise the block size"
                    )
            elif layer.chunk:
                kind, reach = "chunk", layer.chunk
            values = layer.key_size + layer.value_size
            found.append(LayerPages(kind, block, per_token, dtype, heads, values, reach, padded))
            if layer.index_bytes:
                found.append(LayerPages("full", self.block, layer.index_bytes, "index", 0, 0))
        page = found[0].page_bytes
        for state in self._model.states:
            found.append(LayerPages("state", self.block, 0, "state", 0, 0, state.blocks, page))
        return found

    def _first_block(self) -> int:
        """Tokens of a block as vLLM chooses them. Raises ValueError for one that does not work."""
        block = self._engine.block_size
        latent = any(layer.is_latent for layer in self._model.layers)
        if self._cache.is_kivi:
            group = self._cache.kivi.group_size
            block = block or (128 if self._engine.device == "cpu" else group)
        elif latent:
            # What kernels for a GPU take differs; all of the large ones take 64.
            block = block or (16 if self._engine.device == "cpu" else 64)
        elif self._cache.kv_cache_dtype == _ULTRAQUANT:
            block = block or 64
        block = block or (128 if self._engine.device == "cpu" else 16)
        base = self._kernel_block(self._cache.kv_cache_dtype)
        if block % base:
            raise ValueError(f"block_size is {block}; expected a multiple of {base}")
        return block

    def _kernel_block(self, dtype: str) -> int:
        """The least tokens of a block that attention over such pages takes."""
        if dtype in KIVI_DTYPES:
            return self._cache.kivi.group_size
        if any(layer.is_latent for layer in self._model.layers):
            return 16
        return 32 if self._engine.device == "cpu" and dtype not in _ONE_BYTE else 16

    def _align(self) -> None:
        """Let a block of packed pages cover the smallest block of the layers left out."""
        first = self._model.layers[0]
        heads = self.heads(first)
        dtype = self._cache.kv_cache_dtype
        if first.number in self._skipped:
            # vLLM asks the backend of the first layer, which does not know the packed pages.
            packed = heads * (first.key_size + first.value_size) * self._itemsize(dtype)
            kernel_block = self._kernel_block("auto")
        else:
            packed = self._token_bytes(first, dtype, heads)
            kernel_block = self._kernel_block(dtype)
        whole = self._token_bytes(first, "auto", heads)
        if whole == packed:
            return
        if whole < packed:
            raise ValueError(f"kv_cache_dtype {dtype} is larger than the layers left out of it")
        step = max(kernel_block, self.block)
        self.block = max(self.block, step * -(-whole * kernel_block // (step * packed)))
        self._shared_page = self.block * packed

    def _cover_states(self) -> None:
        """Let a block of tokens cover a state, which is then padded to the block's bytes."""
        first = self._model.layers[0]
        dtype = self._dtype(first)
        per_token = self._token_bytes(first, dtype, self.heads(first))
        ranks, base = self._engine.tensor_parallel_size, self._kernel_block(dtype)
        state = max(state.bytes(ranks, self._model.dtype) for state in self._model.states)
        step = max(base, self.block)
        block = step * -(-state // (step * per_token))
        self.block = max(self.block, base * -(-block // base))

    def _dtype(self, layer: AttentionLayer) -> str:
        cache = self._cache
        if layer.number in self._skipped:
            return cache.kivi.skip_dtype if cache.is_kivi else "auto"
        if cache.is_kivi and cache.profile and layer.number in cache.profile.kivi.four_bits:
            return FOUR_BIT_DTYPE
        return cache.kv_cache_dtype

    def _itemsize(self, dtype: str) -> int:
        return ITEMSIZES[self._model.dtype] if dtype == "auto" else ITEMSIZES.get(dtype, 1)

    def _token_bytes(self, layer: AttentionLayer, dtype: str, heads: int) -> int:
        """Bytes of a token of one layer. Raises ValueError for a dtype that it cannot have."""
        sizes = (layer.key_size, layer.value_size)
        if dtype == "auto" or dtype in ITEMSIZES or dtype in _ONE_BYTE:
            return heads * sum(sizes) * self._itemsize(dtype)
        if dtype in _PER_TOKEN_HEAD:
            # A float32 scale of K and one of V, with MLA too.
            return heads * (sum(size // _PER_TOKEN_HEAD[dtype] for size in sizes) + 8)
        if layer.is_latent:
            if dtype in _LATENT:
                return _LATENT[dtype]
            raise ValueError(f"kv_cache_dtype {dtype} does not support models with MLA")
        if dtype in _LATENT:
            raise ValueError(f"kv_cache_dtype {dtype} is for models with MLA only")
        size = layer.key_size
        if dtype in _NVFP4:
            # Four bits a value, and an FP8 scale for 16 values.
            return 2 * heads * (size // 2 + size // 16)
        if dtype in _TURBOQUANT:
            key, value = _TURBOQUANT[dtype]
            # Two bytes of the norm of K, four of scale and zero of V, in an even number of bytes.
            keys = size if key == 8 else math.ceil(size * key / 8) + 2
            both = keys + math.ceil(size * value / 8) + 4
            return heads * (both + both % 2)
        if dtype == _ULTRAQUANT:
            # Four bits a value, and a scale of one byte for 32 values.
            return 2 * heads * (size // 2 + size // 32)
        return heads * self._kivi_token_bytes(dtype, size)

    def _kivi_token_bytes(self, dtype: str, head_size: int) -> int:
        fmt = self._cache.kivi.page_format(dtype, self.block, head_size, self._model.dtype)
        return fmt.token_bytes


def _group(layers: Sequence[LayerPages]) -> list[tuple[LayerPages, ...]]:
    """Groups of layers as vLLM forms them.

    One group if all layers need the same tokens. Else pages are made equally large, and layers of
    one kind are split into groups of about as many layers as the rarest kind has.
    """
    first = layers[0]
    if all((o.kind, o.block, o.reach) == (first.kind, first.block, first.reach) for o in layers):
        return [tuple(layers)]
    largest = max(pages.page_bytes for pages in layers)
    kinds: dict[LayerPages, list[LayerPages]] = {}
    for pages in layers:
        if largest % pages.page_bytes == 0:
            pages = replace(pages, block=pages.block * (largest // pages.page_bytes))
        else:
            pages = replace(pages, padded=largest)
        kinds.setdefault(pages, []).append(pages)
    counts = [len(members) for members in kinds.values()]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    groups = []
    for members in kinds.values():
        parts = -(-len(members) // size)
        groups += [tuple(members[part::parts]) for part in range(parts)]
    return groups
