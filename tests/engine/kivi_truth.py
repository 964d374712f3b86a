"""What KIVI pages must give, in plain torch: a memory of exact and packed tokens that follows what
the residual pool says it does, and attention over it.

``checked_layers`` gives every layer such a memory, fed with the queries, keys and values that the
engine computed, and compares what the layer's attention returns. ``Replay`` is a whole Llama in
float32 that computes its own, from the same checkpoint, over the recorded steps of an engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vllm_kvcompress.attention.residual import ResidualPool, StepInput, StepPlan
from vllm_kvcompress.kernels.attention import Attention
from vllm_kvcompress.kernels.kivi import reference
from vllm_kvcompress.kernels.kivi.format import PageFormat


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Memory:
    """Everything that one layer has stored, by block. Reading what is not there is an error."""

    def __init__(self, fmt: PageFormat, kv_heads: int) -> None:
        self.fmt = fmt
        self.block_tokens = fmt.block_tokens
        self.kv_heads = kv_heads
        self.exact: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # [tokens, heads, size]
        self.pages: dict[int, torch.Tensor] = {}  # uint8 [1, heads, tokens, token_bytes]
        self.read: dict[int, tuple[torch.Tensor, ...]] = {}  # what pages give, once it was asked
        self.fills: dict[int, int] = {}
        self.firsts: dict[int, int] = {}

    def _empty(self) -> torch.Tensor:
        fmt = self.fmt
        return torch.zeros(fmt.block_tokens, self.kv_heads, fmt.head_size, dtype=fmt.dtype)

    def _pack(self, block: int, fill: int, first: int) -> None:
        assert fill == self.fills[block], f"block {block} is packed with a wrong fill"
        key, value = self.exact.pop(block)
        fmt = self.fmt
        page = torch.zeros(1, self.kv_heads, fmt.block_tokens, fmt.token_bytes, dtype=torch.uint8)
        reference.pack(
            fmt, key[None], value[None], _ints(0), page, _ints(0), _ints(fill), _ints(first)
        )
        self.pages[block] = page
        self.read.pop(block, None)
        self.firsts[block] = first

    def _unpack(self, block: int, fill: int, first: int) -> None:
        assert fill <= self.fills[block], f"block {block} has never been filled so far"
        assert first == self.firsts[block]
        key, value = reference.dequantise(self.fmt, self.pages.pop(block), _ints(0), _ints(first))
        self.exact[block] = tuple(
            part[0].transpose(0, 1).to(self.fmt.dtype) for part in (key, value)
        )

    def store(
        self, given: StepInput, plan: StepPlan, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """A step's moves and new tokens ``[tokens, heads, size]``, all that comes before it
        attends."""
        size = self.fmt.block_tokens
        slots = given.slot_mapping
        for block in set((slots[(slots >= 0) & (slots % size == 0)] // size).tolist()):
            for held in (self.exact, self.pages, self.fills, self.firsts):
                held.pop(block, None)
        for _, block, fill, first in zip(*plan.evict, strict=True):
            self._pack(block, fill, first)
        for _, block, fill, first in zip(*plan.reopen, strict=True):
            self._unpack(block, fill, first)
        for block, fill, first, _, _ in zip(*plan.append, strict=True):
            if fill:
                self._unpack(block, fill, first)
        said = [
            row + i
            for counts, rows in (plan.write[2:], plan.append[3:])
            for count, row in zip(counts, rows, strict=True)
            for i in range(count)
        ]
        written = np.flatnonzero(slots >= 0).tolist()
        assert sorted(said) == written, "the plan does not write each new token once"
        for row in written:
            block, offset = divmod(int(slots[row]), size)
            if block not in self.exact:
                assert offset == 0, f"block {block} was never written and begins at {offset}"
                self.exact[block] = (self._empty(), self._empty())
            self.exact[block][0][offset] = key[row]
            self.exact[block][1][offset] = value[row]
            self.fills[block] = offset + 1
        for block, fill, first, count, _ in zip(*plan.append, strict=True):
            self._pack(block, fill + count, first)

    def retire(self, plan: StepPlan) -> None:
        """What the step packs after it has attended."""
        for _, block, fill, first in zip(*plan.retire, strict=True):
            self._pack(block, fill, first)

    def history(self, table: np.ndarray, length: int, begin: int) -> tuple[torch.Tensor, ...]:
        """K and V of tokens ``begin`` to ``length`` as stored: float32 ``[tokens, heads, size]``;
        begin is the first token of a block."""
        size = self.fmt.block_tokens
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for column in range(begin // size, -(-length // size)):
            block = int(table[column])
            fill = min(length - column * size, size)
            assert self.fills.get(block, 0) >= fill, f"block {block} is read and was not written"
            if block in self.exact:
                key, value = self.exact[block]
            else:
                first = int(column == 0)
                assert first == self.firsts[block]
                if block not in self.read:
                    page = self.pages[block]
                    packed = reference.dequantise(self.fmt, page, _ints(0), _ints(first))
                    self.read[block] = tuple(part[0].transpose(0, 1) for part in packed)
                key, value = self.read[block]
            parts.append((key[:fill].float(), value[:fill].float()))
        if not parts:
            empty = torch.zeros(0, self.kv_heads, self.fmt.head_size)
            return empty, empty
        return torch.cat([key for key, _ in parts]), torch.cat([value for _, value in parts])


class ExactMemory:
    """What a layer that is left out of KIVI pages has stored, by block."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.blocks: dict[int, torch.Tensor] = {}  # [K or V, tokens, heads, size], nan: not there

    def store(self, given: StepInput, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep a step's new tokens."""
        self.nothing = torch.stack([key[:0], value[:0]]).float()
        for row in np.flatnonzero(given.slot_mapping >= 0).tolist():
            block, offset = divmod(int(given.slot_mapping[row]), self.block_tokens)
            if offset == 0 or block not in self.blocks:
                shape = (2, self.block_tokens, *key.shape[1:])
                self.blocks[block] = torch.full(shape, torch.nan)
            self.blocks[block][0, offset] = key[row]
            self.blocks[block][1, offset] = value[row]

    def history(self, table: np.ndarray, length: int, begin: int) -> tuple[torch.Tensor, ...]:
        """As ``Memory.history``."""
        size = self.block_tokens
        columns = range(begin // size, -(-length // size))
        parts = [self.blocks[int(table[column])] for column in columns]
        found = torch.cat(parts, 1)[:, : length - begin] if parts else self.nothing
        assert not found.isnan().any(), "a token is read that was not written"
        return found[0], found[1]


def attend(
    rule: Attention,
    memory: Any,
    given: StepInput,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Each new token over its sequence's history as stored and, exactly, over its own chunk:
    float32 ``[tokens, heads, size]``."""
    out = torch.zeros(query.shape)
    groups = query.shape[1] // key.shape[1]
    for row, length in enumerate(given.seq_lens.tolist()):
        begin, end = given.query_start[row : row + 2].tolist()
        if end == begin or given.slot_mapping[begin] < 0:
            continue
        history = length - (end - begin)
        seen = 0
        if rule.window:  # what is out of every token's sight may have been given back
            seen = max(0, history - rule.window + 1) // memory.block_tokens
            seen *= memory.block_tokens
        k, v = memory.history(given.block_table[row], history, seen)
        k = torch.cat([k, key[begin:end].float()]).repeat_interleave(groups, 1)
        v = torch.cat([v, value[begin:end].float()]).repeat_interleave(groups, 1)
        logits = torch.einsum("qhd,khd->hqk", query[begin:end].float(), k) * rule.scale
        if rule.soft_cap:
            logits = rule.soft_cap * torch.tanh(logits / rule.soft_cap)
        distance = torch.arange(seen, length) - torch.arange(history, length)[:, None]
        if rule.slopes is not None:
            logits = logits + rule.slopes[:, None, None] * distance
        hidden = distance > 0
        if rule.window:
            hidden = hidden | (distance <= -rule.window)
        logits = logits.masked_fill(hidden, -torch.inf)
        if rule.sinks is not None:
            sink = rule.sinks[:, None, None].expand(-1, end - begin, 1)
            weights = torch.cat([logits, sink], 2).softmax(2)[..., :-1]
        else:
            weights = logits.softmax(2)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def _copy(given: StepInput) -> StepInput:
    """vLLM uses its buffers again."""
    return StepInput(
        block_table=given.block_table.copy(),
        query_start=given.query_start.copy(),
        seq_lens=given.seq_lens.copy(),
        slot_mapping=given.slot_mapping.copy(),
    )


@contextmanager
def _recorded_plans() -> Iterator[dict[ResidualPool, tuple[StepInput, StepPlan]]]:
    """The last step of every pool."""
    plans: dict[ResidualPool, tuple[StepInput, StepPlan]] = {}
    original = ResidualPool.plan

    def plan(self: ResidualPool, step: StepInput) -> StepPlan:
        made = original(self, step)
        plans[self] = (_copy(step), made)
        return made

    ResidualPool.plan = plan
    try:
        yield plans
    finally:
        ResidualPool.plan = original


@dataclass
class Events:
    """What the pools of an engine did."""

    evict: int = 0
    reopen: int = 0
    append: int = 0
    grow: int = 0
    """Appends to pages that had tokens already."""
    retire: int = 0
    steps: int = 0
    mixed: int = 0
    """Steps with first prefills or continued ones beside decodes."""

    def count(self, given: StepInput, plan: StepPlan) -> None:
        for name in ("evict", "reopen", "append", "retire"):
            setattr(self, name, getattr(self, name) + len(getattr(plan, name)[0]))
        self.grow += sum(fill > 0 for fill in plan.append[1])
        new = np.diff(given.query_start)
        self.steps += 1
        self.mixed += bool((new > 1).any() and (new == 1).any())


@dataclass
class LayerErrors:
    """How far layers' outputs are from the truth, as a share of the largest V that a token sees."""

    fitted: list[float] = field(default_factory=list)
    """The worst of each call of a layer whose scales are fitted."""
    rows: int = 0
    exact_rows: int = 0
    """Rows of layers that are left out of KIVI pages."""
    events: Events = field(default_factory=Events)


A_CODE = 0.3
"""Bound on what one code can do to a layer's output, of the largest V, on the tests' models."""


@contextmanager
def checked_layers(tolerance: float) -> Iterator[LayerErrors]:
    """Compare every call of every layer with the truth, within ``tolerance`` of the largest V that
    it attends to. Entered before the engine serves anything.

    Fitted scales are sums, whose order differs: now and then a value on the border between two
    codes gets the other one, and stays so for the block's life. One call in ten of layers with such
    scales may therefore be off by what a code is worth.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from vllm_kvcompress.attention.kivi import KiviImpl

    found = LayerErrors()
    memories: dict[Any, Any] = {}
    counted: list[StepPlan] = []
    packed_forward, exact_forward = KiviImpl.forward, CPUAttentionBackendImpl.forward

    def compare(truth, output, value, what, fitted=False) -> None:
        output = output[: len(truth)].view(truth.shape).float()
        scale = max(float(value.float().abs().max()), 1e-9)
        error = float((output - truth).abs().max()) / scale
        if fitted:
            found.fitted.append(error)
        allowed = max(tolerance, A_CODE) if fitted else tolerance
        assert error <= allowed, f"the attention of {what} is off by {error:.3g}"

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *more, **options):
        result = packed_forward(
            self, layer, query, key, value, kv_cache, attn_metadata, output, *more, **options
        )
        if attn_metadata is None:
            return result
        given, plan = plans[attn_metadata.group.pool]
        if not (given.slot_mapping >= 0).any():
            return result
        if not any(plan is other for other in counted):
            counted[:] = [*counted[-8:], plan]
            found.events.count(given, plan)
        memory = memories.setdefault(self, Memory(self.fmt, self.num_kv_heads))
        count = len(given.slot_mapping)
        query, key, value = query[:count], key[:count], value[:count]
        memory.store(given, plan, key, value)
        truth = attend(self.attention, memory, given, query, key, value)
        memory.retire(plan)
        fitted = self.fmt.fit != "minmax" or self.fmt.rotated
        compare(truth, output, value, "a packed layer", fitted)
        found.rows += count
        return result

    def forward_exact(
        self, layer, query, key, value, kv_cache, attn_metadata, output, *more, **options
    ):
        result = exact_forward(
            self, layer, query, key, value, kv_cache, attn_metadata, output, *more, **options
        )
        if attn_metadata is None:
            return result
        count = attn_metadata.num_actual_tokens
        given = StepInput(
            block_table=attn_metadata.block_table.numpy(),
            query_start=attn_metadata.query_start_loc.numpy(),
            seq_lens=attn_metadata.seq_lens.numpy(),
            slot_mapping=attn_metadata.slot_mapping[:count].numpy(),
        )
        if not (given.slot_mapping >= 0).any():
            return result
        memory = memories.setdefault(self, ExactMemory(kv_cache.shape[2]))
        query, key, value = query[:count], key[:count], value[:count]
        memory.store(given, key, value)
        rule = Attention(
            scale=self.scale, window=max(self.sliding_window, 0), soft_cap=self.logits_soft_cap
        )
        truth = attend(rule, memory, given, query, key, value)
        compare(truth, output, value, "a layer that is left out")
        found.exact_rows += count
        return result

    KiviImpl.forward, CPUAttentionBackendImpl.forward = forward, forward_exact
    try:
        with _recorded_plans() as plans:
            yield found
        assert not found.fitted or np.quantile(found.fitted, 0.9) <= tolerance
    finally:
        KiviImpl.forward, CPUAttentionBackendImpl.forward = packed_forward, exact_forward


@dataclass
class Step:
    """One step of an engine with one cache group."""

    given: StepInput
    plan: StepPlan
    tokens: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor
    """Of the last token of every sequence, float32."""


class Recording:
    """The steps of an engine, in their order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.events = Events()


def model_of(engine: Any) -> torch.nn.Module:
    """The model that an engine in this process runs."""
    return engine.core.model_executor.driver_worker.worker.model_runner.model


@contextmanager
def recorded(engine: Any) -> Iterator[Recording]:
    """Record what an engine in this process computes; entered before it has served anything."""
    recording = Recording()
    model = model_of(engine)
    inputs: list[torch.Tensor] = []
    forward, compute_logits = model.forward, model.compute_logits

    def recorded_forward(input_ids, positions, *more, **options):
        inputs[:] = [input_ids.clone(), positions.clone()]
        return forward(input_ids, positions, *more, **options)

    def recorded_logits(hidden, *more, **options):
        logits = compute_logits(hidden, *more, **options)
        (given, plan) = next(iter(plans.values()))
        recording.steps.append(Step(given, plan, *inputs, logits.detach().float().clone()))
        recording.events.count(given, plan)
        return logits

    model.forward, model.compute_logits = recorded_forward, recorded_logits
    try:
        with _recorded_plans() as plans:
            yield recording
    finally:
        del model.forward, model.compute_logits


class Replay:
    """A Llama in float32. K and V are rounded to the engine's dtype, as what is stored is."""

    def __init__(self, path: Path, format_of: Any, dtype: torch.dtype) -> None:
        """``format_of`` gives a page format for the block's tokens and the head size."""
        from safetensors.torch import load_file

        self.config = json.loads((path / "config.json").read_text())
        weights = load_file(path / "model.safetensors")
        self.weights = {name: weight.float() for name, weight in weights.items()}
        self.dtype = dtype
        heads = self.config["num_attention_heads"]
        self.heads, self.kv_heads = heads, self.config["num_key_value_heads"]
        self.size = self.config.get("head_dim") or self.config["hidden_size"] // heads
        rope = self.config.get("rope_parameters") or self.config
        self.theta = float(rope["rope_theta"])
        self.memories = [
            Memory(format_of(self.size), self.kv_heads)
            for _ in range(self.config["num_hidden_layers"])
        ]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[name]

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.size // 2
        frequencies = self.theta ** (-torch.arange(half).float() / half)
        angles = positions.float()[:, None, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ],
            -1,
        )

    def step(self, step: Step) -> torch.Tensor:
        """Logits of the last token of every sequence."""
        given = step.given
        count = len(given.slot_mapping)
        positions = step.positions[:count]
        x = self.weights["model.embed_tokens.weight"][step.tokens[:count].long()]
        rule = Attention(scale=self.size**-0.5)
        for number, memory in enumerate(self.memories):
            name = f"model.layers.{number}."
            y = self._norm(x, name + "input_layernorm.weight")
            query, key, value = (
                F.linear(y, self.weights[f"{name}self_attn.{part}_proj.weight"]).view(
                    count, heads, self.size
                )
                for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
            )
            query, key = self._rotate(query, positions), self._rotate(key, positions)
            key, value = key.to(self.dtype), value.to(self.dtype)
            memory.store(given, step.plan, key, value)
            y = attend(rule, memory, given, query, key, value).flatten(1)
            memory.retire(step.plan)
            x = x + F.linear(y, self.weights[name + "self_attn.o_proj.weight"])
            y = self._norm(x, name + "post_attention_layernorm.weight")
            gate, up = (
                F.linear(y, self.weights[f"{name}mlp.{part}_proj.weight"])
                for part in ("gate", "up")
            )
            x = x + F.linear(F.silu(gate) * up, self.weights[name + "mlp.down_proj.weight"])
        last = torch.from_numpy(given.query_start[1:]).long() - 1
        y = self._norm(x[last], "model.norm.weight")
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return F.linear(y, head)


def errors(recording: Recording, truth: Replay) -> list[float]:
    """By how much the log-probability of the likeliest token, of each sequence of each step,
    differs between the engine and the truth."""
    found = []
    # The engine has bound this process to one core, and hidden the function by its usual name.
    torch._C.set_num_threads(1)
    with torch.inference_mode():
        for step in recording.steps:
            expected = truth.step(step).log_softmax(-1)
            computed = step.logits.log_softmax(-1)
            assert len(expected) == len(computed)
            best = computed.argmax(-1, keepdim=True)
            found += (computed - expected).gather(1, best).abs().flatten().tolist()
    return found
