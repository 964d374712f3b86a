"""The residual pool alone: whatever a scheduler does, every token is where attention looks for it.

A scheduler of many sequences drives the pool, and a toy memory, in which each token is a number,
does what the pool plans. Numbers stay what they are when they are packed, with a mark.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import pytest

from vllm_kvcompress.attention.residual import (
    ResidualPool,
    StepInput,
    StepPlan,
    new_lives,
    slots_for,
)


class Memory:
    """Slots and pages of one layer. A token is a number; a packed one is negative."""

    def __init__(self, slots: int) -> None:
        self.slots: list[dict[int, int]] = [{} for _ in range(slots)]
        self.pages: dict[int, dict[int, int]] = {}
        self.fills: dict[int, int] = {}
        """Tokens that each block was last left with."""

    def pack(self, slots: list[int], blocks: list[int], fills: list[int]) -> None:
        for slot, block, fill in zip(slots, blocks, fills, strict=True):
            assert fill == self.fills[block]
            self.pages[block] = {at: -abs(self.slots[slot][at]) for at in range(fill)}

    def before_attention(self, plan: StepPlan, tokens: list[int], pool: ResidualPool) -> None:
        self.pack(*plan.evict[:3])
        for slot, block, fill, _ in zip(*plan.reopen, strict=True):
            self.slots[slot] = {at: self.pages[block][at] for at in range(fill)}
        for slot, offset, count, row in zip(*plan.write, strict=True):
            for i in range(count):
                self.slots[slot][offset + i] = tokens[row + i]
        for block, before, _, count, row in zip(*plan.append, strict=True):
            page = {at: self.pages[block][at] for at in range(before)}
            page.update({before + i: -abs(tokens[row + i]) for i in range(count)})
            self.pages[block] = page
            self.fills[block] = before + count
        for slot, offset, count, _ in zip(*plan.write, strict=True):
            self.fills[int(pool._block[slot])] = offset + count
        # What only slots hold is not in pages, and what no block holds is nowhere.
        used = {int(slot) for slot in pool.slot_of_block if slot >= 0}
        for block in np.flatnonzero(pool.slot_of_block >= 0).tolist():
            self.pages.pop(block, None)
        for slot in set(range(len(self.slots))) - used:
            self.slots[slot] = {}

    def after_attention(self, plan: StepPlan) -> None:
        self.pack(*plan.retire[:3])

    def read(self, pool: ResidualPool, block: int, at: int) -> int:
        slot = int(pool.slot_of_block[block])
        return (self.slots[slot] if slot >= 0 else self.pages[block])[at]


@dataclass
class Sequence:
    tokens: list[int]
    """All that it is meant to have in the end."""
    stored: int = 0
    blocks: list[int] = field(default_factory=list)
    hashed: int = 0
    """Blocks offered to other sequences."""


class Scheduler:
    """Sequences over a few blocks: as vLLM's, blocks keep their content until they are reused."""

    def __init__(self, seed: int, *, slots: int, simple: bool = False) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice((2, 4, 8))
        self.residual = self.random.choice((1, 3, self.size, 2 * self.size + 1, 5 * self.size))
        self.sharing = self.loads = self.drafting = not simple
        self.blocks = self.random.choice((16, 48))
        self.pool = ResidualPool(slots, self.blocks, self.size, self.residual)
        self.memory = Memory(slots)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, self.blocks))
        self.users: dict[int, int] = {}
        self.known: dict[tuple[int, ...], int] = {}
        self.name_of: dict[int, tuple[int, ...]] = {}
        self.next_token = 1
        self.events: dict[str, int] = {}

    def count(self, event: str, times: int = 1) -> None:
        self.events[event] = self.events.get(event, 0) + times

    # --- blocks

    def allocate(self) -> int | None:
        if not self.free:
            return None
        block, _ = self.free.popitem(last=False)
        name = self.name_of.pop(block, None)
        if name is not None:
            del self.known[name]
            self.count("reuse")
        self.users[block] = 1
        return block

    def release(self, sequence: Sequence) -> None:
        for block in reversed(sequence.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free[block] = None
        sequence.blocks, sequence.stored, sequence.hashed = [], 0, 0

    def fresh_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    # --- what happens between steps

    def arrive(self) -> None:
        tokens: list[int] = []
        others = self.running + self.waiting
        if self.sharing and others and self.random.random() < 0.6:
            parent = self.random.choice(others).tokens
            tokens = parent[: self.random.randint(0, len(parent))]
        tokens = tokens + self.fresh_tokens(self.random.randint(1, 6 * self.size))
        self.waiting.append(Sequence(tokens[: 9 * self.size]))

    def admit(self) -> None:
        sequence = self.waiting.pop(0)
        if self.sharing:
            limit = (len(sequence.tokens) - 1) // self.size  # the last token is computed anyway
            while len(sequence.blocks) < limit:
                name = tuple(sequence.tokens[: (len(sequence.blocks) + 1) * self.size])
                block = self.known.get(name)
                if block is None:
                    break
                self.count("hit")
                self.users[block] = self.users.get(block, 0) + 1
                self.free.pop(block, None)
                sequence.blocks.append(block)
        if self.loads and self.random.random() < 0.3:
            self.load(sequence)
        sequence.stored = sequence.hashed = len(sequence.blocks) * self.size
        sequence.hashed //= self.size
        self.running.append(sequence)

    def load(self, sequence: Sequence) -> None:
        """Blocks that come from elsewhere, packed or exact, before the sequence's first step."""
        while (len(sequence.blocks) + 1) * self.size < len(sequence.tokens):
            block = self.allocate()
            if block is None:
                return
            at = len(sequence.blocks) * self.size
            content = dict(enumerate(sequence.tokens[at : at + self.size]))
            slot = -1
            if self.random.random() < 0.5:
                slot, victim = self.pool.adopt(block, at == 0)
                if victim is not None:
                    self.memory.pack(*([value] for value in victim[:3]))
                    self.count("evict to adopt")
            else:
                self.pool.drop(block)
            if slot >= 0:
                self.memory.slots[slot] = content
                self.memory.pages.pop(block, None)
            else:
                self.memory.pages[block] = {at: -token for at, token in content.items()}
            self.memory.fills[block] = self.size
            self.count("load")
            sequence.blocks.append(block)
            if self.random.random() < 0.3:
                return

    def leave(self) -> None:
        sequence = self.running.pop(self.random.randrange(len(self.running)))
        self.release(sequence)
        if self.random.random() < 0.5:
            self.count("preemption")
            self.waiting.insert(0, sequence)
        else:
            self.count("abort")

    # --- a step

    def step(self, *, everyone: bool = False) -> None:
        chosen = [s for s in self.running if everyone or self.random.random() < 0.7]
        self.random.shuffle(chosen)
        plans: list[tuple[Sequence, int, int]] = []
        for sequence in chosen:
            if sequence.stored >= len(sequence.tokens):  # a decode: one more token was sampled
                sequence.tokens += self.fresh_tokens(1)
            left = len(sequence.tokens) - sequence.stored
            count = self.random.randint(1, min(left, 3 * self.size + 1))
            drafts = 0
            if self.drafting and count == left and self.random.random() < 0.2:
                drafts = self.random.randint(0, self.residual - 1)
            need = -(-(sequence.stored + count + drafts) // self.size)
            while len(sequence.blocks) < need:
                block = self.allocate()
                if block is None:
                    break
                sequence.blocks.append(block)
            room = len(sequence.blocks) * self.size - sequence.stored
            count = min(count, room)
            drafts = min(drafts, room - count)
            if count:
                plans.append((sequence, count, drafts))

        width = max([len(s.blocks) for s, _, _ in plans] + [2])
        table = np.full((len(plans) + 1, width), 7, np.int32)  # what lies beyond is made up
        starts, lengths, mapping, tokens = [0], [], [], []
        for row, (sequence, count, drafts) in enumerate(plans):
            table[row, : len(sequence.blocks)] = sequence.blocks
            new = sequence.tokens[sequence.stored : sequence.stored + count]
            new = new + self.fresh_tokens(drafts)
            for at in range(sequence.stored, sequence.stored + len(new)):
                mapping.append(sequence.blocks[at // self.size] * self.size + at % self.size)
            tokens += new
            starts.append(starts[-1] + len(new))
            lengths.append(sequence.stored + len(new))
        # A row of a dummy run: nothing of it is true, and nothing is written.
        starts.append(starts[-1] + 1)
        lengths.append(width * self.size)
        mapping.append(-1)
        tokens.append(0)
        given = StepInput(
            block_table=table,
            query_start=np.array(starts, np.int32),
            seq_lens=np.array(lengths, np.int32),
            slot_mapping=np.array(mapping, np.int64),
        )
        self.pool.finish_step()
        for block in new_lives(given.slot_mapping, self.pool.block_tokens):
            self.pool.drop(block)
        plan = self.pool.plan(given)
        self.check_pool(plan)
        self.memory.before_attention(plan, tokens, self.pool)
        for sequence, _, _ in plans:
            self.check_history(sequence)
        self.memory.after_attention(plan)
        for name in ("evict", "reopen", "write", "append", "retire"):
            self.count(name, len(getattr(plan, name)[0]))

        for sequence, count, drafts in plans:
            sequence.stored += count
            if drafts:  # some are accepted, the others are written again
                self.count("rejected drafts")
                accepted = self.random.randint(0, drafts)
                at = starts[[s is sequence for s, _, _ in plans].index(True)]
                sequence.tokens += tokens[at + count : at + count + accepted]
                sequence.stored += accepted
            while self.sharing and (sequence.hashed + 1) * self.size <= sequence.stored:
                block = sequence.blocks[sequence.hashed]
                sequence.hashed += 1
                name = tuple(sequence.tokens[: sequence.hashed * self.size])
                if name not in self.known and block not in self.name_of:
                    self.known[name] = block
                    self.name_of[block] = name

    def read(self, sequence: Sequence, at: int) -> int:
        return self.memory.read(self.pool, sequence.blocks[at // self.size], at % self.size)

    def check_history(self, sequence: Sequence) -> None:
        found = [abs(self.read(sequence, at)) for at in range(sequence.stored)]
        assert found == sequence.tokens[: sequence.stored]

    def check_pool(self, plan: StepPlan) -> None:
        pool = self.pool
        used = pool.slot_of_block[pool.slot_of_block >= 0].tolist()
        assert len(used) == len(set(used))
        assert sorted(used + pool._free) == list(range(pool.slots))
        assert set(pool._recent) == set(used)
        for moves in (plan.evict, plan.reopen):
            assert len(set(moves[1])) == len(moves[1])
        for moves in (plan.reopen, plan.retire):
            assert len(set(moves[0])) == len(moves[0])
        written = [
            (slot, offset + i)
            for slot, offset, count, _ in zip(*plan.write, strict=True)
            for i in range(count)
        ]
        assert len(written) == len(set(written))

    def live(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.waiting) < 3 and self.random.random() < 0.5:
                self.arrive()
            if self.waiting and len(self.running) < 6 and self.free:
                self.admit()
            full = len(self.free) < 4
            if self.running and self.random.random() < (0.8 if full else 0.08):
                self.leave()
            self.step()


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 9, 20, 47])
def test_no_token_is_lost_or_mixed_up_whatever_the_scheduler_does(slots):
    events: dict[str, int] = {}
    for seed in range(10):
        scheduler = Scheduler(1000 * slots + seed, slots=slots)
        scheduler.live(120)
        for name, times in scheduler.events.items():
            events[name] = events.get(name, 0) + times
    wanted = ["hit", "reuse", "load", "preemption", "abort", "rejected drafts", "write"]
    wanted += ["append", "evict", "evict to adopt"] if slots < 20 else ["retire"]
    wanted += ["reopen"] if slots < 9 else []
    for name in wanted:
        assert events.get(name), (name, events)


def test_a_pool_large_enough_keeps_windows_and_unfilled_blocks_exact():
    for seed in range(20):
        scheduler = Scheduler(seed, slots=1, simple=True)
        slots = slots_for(4, scheduler.residual, scheduler.size) + 4
        scheduler.pool = ResidualPool(slots, scheduler.blocks, scheduler.size, scheduler.residual)
        scheduler.memory = Memory(slots)
        reads = 0
        for _ in range(80):
            if len(scheduler.running) < 4 and scheduler.random.random() < 0.5:
                scheduler.arrive()
                if scheduler.free:
                    scheduler.admit()
            if scheduler.running and (len(scheduler.free) < 8 or scheduler.random.random() < 0.1):
                scheduler.leave()
                scheduler.waiting.clear()
            scheduler.step(everyone=True)
            for sequence in scheduler.running:
                first = max(0, sequence.stored - scheduler.residual)
                first = min(first, sequence.stored // scheduler.size * scheduler.size)
                window = [scheduler.read(sequence, at) for at in range(first, sequence.stored)]
                assert window == sequence.tokens[first : sequence.stored]
                reads += len(window)
        assert reads


def decode_input(block: int, length: int, columns: list[int], size: int) -> StepInput:
    return StepInput(
        block_table=np.array([columns], np.int32),
        query_start=np.array([0, 1], np.int32),
        seq_lens=np.array([length], np.int32),
        slot_mapping=np.array([block * size + (length - 1) % size], np.int64),
    )


def lines_of_a_decode(slots: int, cached: int) -> tuple[int, int]:
    """Lines that the pool runs for a step of one sequence, and evictions, with so many blocks
    of others in the pool."""
    size = 4
    pool = ResidualPool(slots, slots + cached + 100, size, 2 * size)
    for block in range(50, 50 + cached):
        pool.adopt(block, False)
    lines = 0

    def count(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename.endswith("residual.py"):
            lines += event == "line"
            return count
        return None

    columns = list(range(1, 9))
    traced = sys.gettrace()
    sys.settrace(count)
    try:
        for length in range(1, 8 * size + 1):
            given = decode_input(columns[(length - 1) // size], length, columns, size)
            pool.finish_step()
            for block in new_lives(given.slot_mapping, pool.block_tokens):
                pool.drop(block)
            pool.plan(given)
    finally:
        sys.settrace(traced)
    return lines, pool.evictions


def test_a_step_costs_the_same_however_many_blocks_are_cached():
    free, full = lines_of_a_decode(5000, 40), lines_of_a_decode(5000, 4900)
    assert free == full
    evicting = [lines_of_a_decode(count, count) for count in (40, 5000)]
    assert evicting[0] == evicting[1]
    assert evicting[0][1] > 0


def test_the_slot_map_tells_what_has_changed():
    """The copy on a device is made from ``changed`` alone."""
    scheduler = Scheduler(3, slots=4)
    copy = scheduler.pool.slot_of_block.copy()
    for _ in range(300):
        scheduler.live(1)
        changed = list(scheduler.pool.changed)
        copy[changed] = scheduler.pool.slot_of_block[changed]
        scheduler.pool.changed.clear()
        assert (copy == scheduler.pool.slot_of_block).all()


def test_a_block_adopted_right_after_it_was_packed_keeps_its_new_slot():
    size = 4
    pool = ResidualPool(2, 10, size, residual=1)
    for length in range(1, size + 2):
        given = decode_input(1 if length <= size else 2, length, [1, 2], size)
        pool.finish_step()
        plan = pool.plan(given)
    assert plan.retire[1] == [1]
    slot, _ = pool.adopt(1, True)
    pool.finish_step()
    assert slot >= 0 and pool.slot_of_block[1] == slot
