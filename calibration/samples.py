"""Token sequences to calibrate on, from a local file or a hub data set, shuffled by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_kvcompress.calibration.oneshot import MIN_TOKENS

LOCAL_KINDS = {".txt": "text", ".md": "text", ".jsonl": "json lines", ".parquet": "parquet"}
TEXT_COLUMNS = ("text", "content", "prompt")
CHAT_COLUMNS = ("messages", "conversations", "conversation")

BROKEN_CHARACTERS = 0.01
"""Of a text at most so many characters may be no UTF-8; more are another encoding, or no text."""

ROWS_BEFORE_GIVING_UP = 64
"""Rows that cannot be used before a data set is refused whose other half has not been read."""

_CHARACTERS_PER_TOKEN = 16
"""No tokenizer in use makes tokens of more on average."""


@dataclass(frozen=True)
class Source:
    """Where the sequences come from.

    data: a local file (text, JSON lines or parquet by its ending), a directory with a data set, or
    the name of one on the hub. split, config: of the data set. column: what holds the text or the
    chat; found if None.
    """

    data: str
    split: str = "train"
    config: str | None = None
    column: str | None = None


class UnusableRow(ValueError):
    """A row that holds no text and no chat; the message says what is wrong with it."""


def load_samples(
    source: Source,
    tokenizer: Any,
    count: int,
    tokens: int,
    seed: int,
    say: Callable[[str], None] = lambda line: None,
) -> list[torch.Tensor]:
    """Up to *count* sequences of up to *tokens* tokens, int64 ``[length]`` each.

    A text file is cut into sequences of full length. A row of the other kinds is one sequence, cut
    off; a chat (a list of role and content) goes through the tokenizer's chat template. Rows that
    hold neither are left out, which *say* is told. Raises ValueError, which says what is wrong with
    the data, where they are more than half of those read, and OSError.
    """
    if tokens < MIN_TOKENS:
        raise ValueError(f"samples of {tokens} tokens say nothing; at least {MIN_TOKENS} are taken")
    path = Path(source.data)
    if path.suffix.lower() in LOCAL_KINDS or path.is_file():
        kind = LOCAL_KINDS.get(path.suffix.lower())
        if kind is None:
            raise ValueError(
                f"{path} is of no kind that is known; give a file that ends in "
                + ", ".join(LOCAL_KINDS)
            )
        if kind == "text":
            return _windows(path, tokenizer, count, tokens, seed)
        row, rows = _json_lines(path) if kind == "json lines" else _parquet(path)
        order = list(range(rows))
        random.Random(seed).shuffle(order)
        chosen: Iterator[Any] = map(row, order)
    else:
        chosen = _data_set(source, seed)
    found: list[torch.Tensor] = []
    unusable: list[UnusableRow] = []
    read = 0
    for row in chosen:
        read += 1
        try:
            ids = _encode_row(row, source, tokenizer, tokens)
        except UnusableRow as error:
            unusable.append(error)
            if len(unusable) >= ROWS_BEFORE_GIVING_UP and 2 * len(unusable) > read:
                break
            continue
        if len(ids) >= MIN_TOKENS:
            found.append(ids)
        if len(found) == count:
            break
    if 2 * len(unusable) > read:
        raise ValueError(
            f"{unusable[0]} ({len(unusable)} of {read} rows that were read cannot be used)"
        ) from unusable[0]
    if unusable:
        say(f"{len(unusable)} of {read} rows that were read are left out; {unusable[0]}")
    if not found:
        raise ValueError(f"{source.data} has no row of at least {MIN_TOKENS} tokens")
    return found


def _windows(path: Path, tokenizer: Any, count: int, tokens: int, seed: int) -> list[torch.Tensor]:
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    if "\0" in text or text.count("\ufffd") > BROKEN_CHARACTERS * len(text):
        raise ValueError(f"{path} is not UTF-8 text; give --data a text, or convert it to UTF-8")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    windows = [window for window in ids.split(tokens) if len(window) == tokens]
    if not windows:
        raise ValueError(f"{path} has {len(ids)} tokens; one sequence takes {tokens} (--tokens)")
    random.Random(seed).shuffle(windows)
    return windows[:count]


Rows = tuple[Callable[[int], Any], int]
"""A row by its number, and how many there are."""


def _json_lines(path: Path) -> Rows:
    rows = []
    try:
        # Not by splitlines: text within JSON may hold what it takes for the end of a line.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return rows.__getitem__, len(rows)


def _parquet(path: Path) -> Rows:
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path, memory_map=True)
    except ArrowException as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error
    return lambda number: table.slice(number, 1).to_pylist()[0], table.num_rows


def _data_set(source: Source, seed: int) -> Iterator[Any]:
    """The rows of a data set in a directory, or of the hub."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    folder = Path(source.data)
    try:
        if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            rows = load_from_disk(source.data)
            rows = rows[source.split] if isinstance(rows, DatasetDict) else rows
        else:
            rows = load_dataset(source.data, source.config, split=source.split)
    except Exception as error:  # the hub's client raises whatever its parts do
        what = "no data set"
        if not folder.is_dir():
            what = "neither a file here nor a data set that the hub gives"
        raise ValueError(
            f"{source.data} is {what} ({type(error).__name__}: {error}); name its --split or "
            f"--config, or give --data a local file that ends in {', '.join(LOCAL_KINDS)}"
        ) from error
    return iter(rows.shuffle(seed=seed))


def _encode_row(row: Any, source: Source, tokenizer: Any, tokens: int) -> torch.Tensor:
    value = row
    if isinstance(row, dict):
        names = (source.column,) if source.column else (*CHAT_COLUMNS, *TEXT_COLUMNS)
        value = next((row[name] for name in names if row.get(name)), None)
        if value is None and not any(name in row for name in names):
            raise UnusableRow(
                f"a row of {source.data} has none of the columns {', '.join(names)}; it has "
                f"{', '.join(map(str, row))}; name one with --column"
            )
    if value is None:
        return torch.empty(0, dtype=torch.int64)
    if isinstance(value, str):
        text, special = value, True
    elif isinstance(value, list) and any(map(_is_turn, value)):
        turns = [turn for turn in (_turn(turn, source) for turn in value) if turn["content"]]
        if not turns:
            return torch.empty(0, dtype=torch.int64)
        # A template writes its own special tokens.
        special = not tokenizer.chat_template
        if special:
            text = "\n".join(turn["content"] for turn in turns)
        else:
            try:
                text = tokenizer.apply_chat_template(turns, tokenize=False)
            except Exception as error:  # a template raises what it likes, and jinja its own
                raise UnusableRow(
                    f"the model's chat template refuses a chat in {source.data}: {error}"
                ) from error
    else:
        raise UnusableRow(
            f"a row of {source.data} holds neither text nor a chat, which is a list of turns with "
            f"role and content: {value!r:.60}"
        )
    text = text[: _CHARACTERS_PER_TOKEN * tokens]
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=special, verbose=False)
    return ids.input_ids[0, :tokens].long()


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and ("role" in turn or "from" in turn)


def _turn(turn: Any, source: Source) -> dict[str, str]:
    """The role of a turn, and its text: "" for a turn that only calls a tool or shows a picture."""
    wrong = UnusableRow(f"a turn of a chat in {source.data} lacks role or content: {turn!r:.60}")
    if not isinstance(turn, dict):
        raise wrong
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if content is None and (turn.get("tool_calls") or {"content", "value"} & set(turn)):
        content = ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "\n".join(part for part in parts if isinstance(part, str))
    if not isinstance(role, str) or not isinstance(content, str):
        raise wrong
    role = {"human": "user", "gpt": "assistant"}.get(role, role)
    return {"role": role, "content": content}
