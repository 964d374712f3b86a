"""The residual pool: which blocks are exact, in which slot, and what each step does about it.

A block's tokens are either in its page, packed, or exact, in a slot of the pool. A block enters the
pool when its first tokens are written near the end of a sequence, and leaves it, packed, when it is
full and out of the window of the last ``residual`` tokens. Nothing tells a backend that a request
has ended, so a full pool is the normal state: a slot is taken from the block that has been touched
least recently and belongs to no window of this step, after packing it. A block that is not full is
packed with its fill count, and unpacked into a slot again when it grows. With no slot to be had,
new tokens go into the page straight away: lossier, since the page is packed once more, and never
wrong.

A step goes, for every layer, in this order: pack what is evicted, unpack what grows again, write
new tokens to slots and to pages, attend, pack what has left the window. A sequence that shares
blocks with one that writes them in the same step therefore finds them, and the writer itself takes
its own new tokens from the step's input.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np


@dataclass
class StepPlan:
    """What a step does, the same in all layers of a group. Lists of ints, a column a list."""

    evict: tuple[list[int], list[int], list[int], list[int]] = field(
        default_factory=lambda: ([], [], [], [])
    )
    """Slots, blocks, fills, firsts: pack before anything else."""
    reopen: tuple[list[int], list[int], list[int], list[int]] = field(
        default_factory=lambda: ([], [], [], [])
    )
    """Slots, blocks, fills, firsts: unpack the fill's tokens into the slot."""
    write: tuple[list[int], list[int], list[int], list[int]] = field(
        default_factory=lambda: ([], [], [], [])
    )
    """Slots, offsets, counts, rows: copy new tokens into slots."""
    append: tuple[list[int], list[int], list[int], list[int], list[int]] = field(
        default_factory=lambda: ([], [], [], [], [])
    )
    """Blocks, fills before, firsts, counts, rows: pack new tokens into pages."""
    retire: tuple[list[int], list[int], list[int], list[int]] = field(
        default_factory=lambda: ([], [], [], [])
    )
    """Slots, blocks, fills, firsts: pack after attention."""


def _add(columns: tuple[list[int], ...], *values: int) -> None:
    for column, value in zip(columns, values, strict=True):
        column.append(value)


@dataclass
class StepInput:
    """One step of one cache group, on the host."""

    block_table: np.ndarray  # int32 [sequences, width]
    query_start: np.ndarray  # int32 [sequences + 1]
    seq_lens: np.ndarray  # int32 [sequences], new tokens included
    slot_mapping: np.ndarray  # int64 [tokens], -1 where nothing is written


class ResidualPool:
    """The exact blocks of one cache group on one worker."""

    def __init__(self, slots: int, blocks: int, block_tokens: int, residual: int) -> None:
        """``slots`` exact blocks among ``blocks`` of ``block_tokens``; a window of ``residual``."""
        self.slots = slots
        self.block_tokens = block_tokens
        self.residual = residual
        self.slot_of_block = np.full(blocks, -1, np.int32)
        self.changed: set[int] = set()
        """Blocks whose slot has changed since the holder of a copy of the map cleared this."""
        self._block = np.full(slots, -1, np.int64)
        self._fill = np.zeros(slots, np.int32)
        self._first = np.zeros(slots, np.int32)
        self._free = list(range(slots - 1, -1, -1))
        self._recent: OrderedDict[int, None] = OrderedDict()  # slots in use, oldest first
        self._retired: list[tuple[int, int]] = []
        self._step = 0
        self._touched = np.zeros(slots, np.int64)  # the step that last had the slot in a window
        self.evictions = 0
        self.appends = 0

    # --- between steps ----------------------------------------------------------------------

    def finish_step(self) -> None:
        """Give back the slots of blocks that the last step packed after its attention."""
        for slot, block in self._retired:
            if self._block[slot] == block:
                self._release(slot)
        self._retired.clear()

    def drop(self, block: int) -> None:
        """Forget a block's exact tokens: something else is, or will be, in its page."""
        self.finish_step()
        slot = int(self.slot_of_block[block])
        if slot >= 0:
            self._release(slot)

    def is_exact(self, block: int) -> bool:
        """Whether all of a block's tokens are exact."""
        slot = self.slot_of_block[block]
        return bool(slot >= 0 and self._fill[slot] == self.block_tokens)

    def adopt(self, block: int, first: bool) -> tuple[int, tuple[int, int, int, int] | None]:
        """A slot for a full block whose exact tokens come from elsewhere, -1 if there is none.

        The caller writes the tokens, after it has packed what had the slot: slot, block, fill and
        first, or None. No window of the last step loses a slot.
        """
        self.drop(block)
        victim = None
        if not self._free:
            slot = next(iter(self._recent), -1)
            if slot < 0 or self._touched[slot] == self._step:
                return -1, None
            victim = (slot, int(self._block[slot]), int(self._fill[slot]), int(self._first[slot]))
            self._release(slot)
            self.evictions += 1
        return self._take(block, self.block_tokens, first), victim

    def _take(self, block: int, fill: int, first: bool) -> int:
        slot = self._free.pop()
        self._touched[slot] = self._step
        self._block[slot] = block
        self._fill[slot] = fill
        self._first[slot] = first
        self.slot_of_block[block] = slot
        self.changed.add(block)
        self._recent[slot] = None
        return slot

    def _release(self, slot: int) -> None:
        block = int(self._block[slot])
        self.slot_of_block[block] = -1
        self.changed.add(block)
        self._block[slot] = -1
        self._recent.pop(slot, None)
        self._free.append(slot)

    # --- a step -----------------------------------------------------------------------------

    def plan(self, step: StepInput) -> StepPlan:
        """Decide the step's moves and make the map what it is during the step's attention.

        ``finish_step`` and, for the blocks of ``new_lives`` of all groups, ``drop`` come first.
        """
        size = self.block_tokens
        plan = StepPlan()
        self._step += 1
        rows = []
        for row in range(len(step.seq_lens)):
            begin, end = int(step.query_start[row]), int(step.query_start[row + 1])
            if end > begin and step.slot_mapping[begin] >= 0:
                length = int(step.seq_lens[row])
                rows.append((row, begin, length - (end - begin), length))

        held: set[int] = set()  # slots that this step writes to
        window: dict[int, None] = {}  # other slots in a window of this step, oldest first
        tails: list[tuple[int, bool]] = []  # blocks that want a slot, the most urgent first
        wanted: list[tuple[int, bool]] = []
        for row, _, history, length in rows:
            table = step.block_table[row]
            last = (length - 1) // size
            for column in range(self._first_exact(length), last + 1):
                block = int(table[column])
                slot = int(self.slot_of_block[block])
                grows = (column + 1) * size > history
                if slot >= 0:
                    self._touch(slot)
                    if grows:
                        held.add(slot)
                    else:
                        window[slot] = None
                elif grows:
                    (tails if column == last else wanted).append((block, column == 0))
            # A block that is completed here and leaves the window keeps its slot for the step.
            column = history // size
            if history % size and column < self._first_exact(length):
                slot = int(self.slot_of_block[table[column]])
                if slot >= 0:
                    self._touch(slot)
                    held.add(slot)
        for slot in held:
            window.pop(slot, None)

        fresh: set[int] = set()  # blocks that got their slot in this step
        for urgent, blocks in ((True, tails), (False, wanted)):
            for block, first in blocks:
                if self.slot_of_block[block] >= 0:
                    continue
                if not self._free and not self._evict(plan, held, window, urgent):
                    break
                held.add(self._take(block, 0, first))
                fresh.add(block)

        retired: set[int] = set()
        for row, begin, history, length in rows:
            self._store_row(plan, step.block_table[row], begin, history, length, fresh)
            for column in range(self._first_exact(history), self._first_exact(length)):
                block = int(step.block_table[row, column])
                slot = int(self.slot_of_block[block])
                if slot >= 0 and slot not in retired and self._fill[slot] == size:
                    retired.add(slot)
                    _add(plan.retire, slot, block, size, int(self._first[slot]))
                    self._retired.append((slot, block))
        return plan

    def _touch(self, slot: int) -> None:
        self._recent.move_to_end(slot)
        self._touched[slot] = self._step

    def _first_exact(self, length: int) -> int:
        """The first block column of a sequence that has a token among the last ``residual``."""
        return max(0, length - self.residual) // self.block_tokens

    def _evict(self, plan: StepPlan, held: set[int], window: dict[int, None], urgent: bool) -> bool:
        """Free the slot that matters least. Only for an urgent block one in a window is taken."""
        for slot in self._recent:
            if slot not in held and slot not in window:
                break
        else:
            slot = next(iter(window), -1) if urgent else -1
            if slot < 0:
                return False
            del window[slot]
        block = int(self._block[slot])
        _add(plan.evict, slot, block, int(self._fill[slot]), int(self._first[slot]))
        self._release(slot)
        self.evictions += 1
        return True

    def _store_row(
        self,
        plan: StepPlan,
        table: np.ndarray,
        begin: int,
        history: int,
        length: int,
        fresh: set[int],
    ) -> None:
        """Where the new tokens of one sequence go: tokens ``history`` to ``length``."""
        size = self.block_tokens
        for column in range(history // size, (length - 1) // size + 1):
            block = int(table[column])
            start = max(history - column * size, 0)
            stop = min(length - column * size, size)
            row = begin + column * size + start - history
            slot = int(self.slot_of_block[block])
            if slot < 0:
                _add(plan.append, block, start, int(column == 0), stop - start, row)
                self.appends += 1
                continue
            if start and block in fresh:
                _add(plan.reopen, slot, block, start, int(column == 0))
            _add(plan.write, slot, start, stop - start, row)
            self._fill[slot] = stop


def new_lives(slot_mapping: np.ndarray, block_tokens: int) -> list[int]:
    """The blocks that a step writes from their first token on: their old content is gone."""
    starts = slot_mapping[(slot_mapping >= 0) & (slot_mapping % block_tokens == 0)]
    return (starts // block_tokens).tolist()


def slots_for(sequences: int, residual: int, block_tokens: int) -> int:
    """Slots that keep the windows of so many sequences exact."""
    return sequences * (-(-residual // block_tokens) + 1)
