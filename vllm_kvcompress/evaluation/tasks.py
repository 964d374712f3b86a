"""What a model is asked: windows to predict, pass keys to find, passages to tell apart."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BOXES = ("red", "blue", "green", "black", "white", "silver", "golden", "purple")
"""What the pass keys of a prompt are told apart by."""

KEYS = 4
"""Pass keys in a prompt of several."""

_PASSAGES = 4
_WORD = re.compile(r"[A-Za-z]{3,}")


@dataclass(frozen=True)
class Question:
    """A prompt whose answer is right or wrong."""

    task: str
    """``passkey``, ``multikey`` or ``passages``."""
    length: int
    """Tokens that were asked for; the prompt has no more."""
    depth: float
    """Where the answer stands, from 0, the beginning, to 1."""
    ids: list[int]
    answer: str

    def is_right(self, text: str) -> bool:
        """Whether what a model wrote holds the answer: as its first word among passages."""
        if self.task == "passages":
            found = _WORD.search(text)
            return found is not None and found[0].lower() == self.answer.lower()
        return self.answer in text


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text without those that a tokenizer adds around it."""
    return tokenizer(text, add_special_tokens=False).input_ids


def windows(ids: Sequence[int], length: int, count: int) -> list[list[int]]:
    """Windows of ``length`` tokens side by side, at most ``count``, spread over the text."""
    whole = len(ids) // length
    count = min(count, whole)
    starts = [(i * whole // count) * length for i in range(count)]
    return [list(ids[start : start + length]) for start in starts]


def pass_keys(
    tokenizer: Any,
    filler: Sequence[int],
    lengths: Sequence[int],
    depths: int,
    trials: int,
    keys: int,
    seed: int = 0,
) -> list[Question]:
    """Pass keys hidden in text, one of which is asked for at the end.

    Each length has ``depths`` places of the key that is asked for, spread evenly, and each place
    ``trials`` prompts. With several keys the others stand at random places. Raises ValueError for
    a length that leaves no room for text.
    """
    chance = random.Random(seed)
    task = "passkey" if keys == 1 else "multikey"
    found = []
    for length in lengths:
        for place in range(depths):
            for _ in range(trials):
                boxes = chance.sample(BOXES, keys)
                numbers = [str(number) for number in chance.sample(range(10_000, 100_000), keys)]
                needles = [
                    encode(tokenizer, f"\n\nThe pass key of the {box} box is {number}.\n\n")
                    for box, number in zip(boxes, numbers, strict=True)
                ]
                question = encode(
                    tokenizer,
                    f"\n\nWhat is the pass key of the {boxes[0]} box? "
                    f"The pass key of the {boxes[0]} box is",
                )
                room = length - len(question) - sum(map(len, needles))
                if room < length // 4:
                    raise ValueError(
                        f"a prompt of {length} tokens has no room for {keys} pass keys; "
                        "give longer --lengths"
                    )
                depth = (place + 0.5) / depths
                places = [depth, *(chance.random() for _ in boxes[1:])]
                start = chance.randrange(max(1, len(filler) - room))
                text = repeated(filler, start, room)
                ids: list[int] = []
                before = 0
                for at, needle in sorted(zip(places, needles, strict=True)):
                    here = round(at * room)
                    ids += text[before:here] + needle
                    before = here
                ids += text[before:] + question
                found.append(Question(task, length, depth, ids, numbers[0]))
    return found


def repeated(ids: Sequence[int], start: int, length: int) -> list[int]:
    """``length`` tokens from ``start`` on, from the beginning again where the text ends."""
    return [ids[(start + i) % len(ids)] for i in range(length)]


def passage_questions(
    tokenizer: Any, text: str, length: int, count: int, seed: int = 0
) -> list[Question]:
    """Questions across passages, made from the text itself.

    A prompt shows several passages of the text. Two words that stand together in at least two of
    them go on differently there: the question names the passage by its first words and asks how
    they go on in it. What the words alone suggest is wrong as often as right. Fewer than ``count``
    where the text does not repeat itself enough.
    """
    chance = random.Random(seed)
    words = text.split()
    per_passage = max(24, len(words) * length * 3 // (4 * _PASSAGES * len(encode(tokenizer, text))))
    found: list[Question] = []
    for _ in range(40 * count):
        if len(found) == count or len(words) < 2 * _PASSAGES * per_passage:
            break
        starts = sorted(chance.sample(range(len(words) // per_passage), _PASSAGES))
        passages = [words[s * per_passage : (s + 1) * per_passage] for s in starts]
        pairs = ambiguous_pairs(passages)
        if not pairs:
            continue
        pair, answers = chance.choice(pairs)
        asked = chance.choice(sorted(answers))
        shown = "\n\n".join(f"Passage: {' '.join(passage)}" for passage in passages)
        begin = " ".join(passages[asked][:5])
        ids = encode(
            tokenizer,
            f'{shown}\n\nThe passage that begins "{begin}" also has these words: "{" ".join(pair)}',
        )
        if len(ids) <= length:
            depth = (asked + 0.5) / _PASSAGES
            found.append(Question("passages", length, depth, ids, answers[asked]))
    return found


def ambiguous_pairs(
    passages: Sequence[Sequence[str]],
) -> list[tuple[tuple[str, str], dict[int, str]]]:
    """Pairs of words that stand once in each of several passages, and what follows in each.

    Only what follows differently everywhere, and is a plain word.
    """
    places: dict[tuple[str, str], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for number, passage in enumerate(passages):
        # The first words are what a passage is named by.
        for i in range(5, len(passage) - 2):
            places[passage[i], passage[i + 1]][number].append(passage[i + 2])
    found = []
    for pair, followers in places.items():
        once = {number: words[0] for number, words in followers.items() if len(words) == 1}
        plain = all(_WORD.fullmatch(word) for word in once.values())
        different = len({word.lower() for word in once.values()}) == len(once)
        if len(once) == len(followers) >= 2 and plain and different:
            found.append((pair, once))
    return found
