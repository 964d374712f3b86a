"""Token sequences to calibrate on, from a local file or a hub data set, shuffled by a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LOCAL_KINDS = {".txt": "text", ".md": "text", ".jsonl": "json lines", ".parquet": "parquet"}
TEXT_COLUMNS = ("text", "content", "prompt")
CHAT_COLUMNS = ("messages", "conversations", "conversation")
MIN_TOKENS = 16
"""Shorter sequences say nothing about a cache and are left out."""

_CHARACTERS_PER_TOKEN = 16
"""No tokenizer in use makes tokens of more on average."""


@dataclass(frozen=True)
class Source:
    """Where the sequences come from.

    data: a local file (text, JSON lines or parquet by its ending) or the name of a hub data set.
    split, config: of the hub data set. column: what holds the text or the chat; found if None.
    """

    data: str
    split: str = "train"
    config: str | None = None
    column: str | None = None


def load_samples(
    source: Source, tokenizer: Any, count: int, tokens: int, seed: int
) -> list[torch.Tensor]:
    """Up to *count* sequences of up to *tokens* tokens, int64 ``[length]`` each.

    A text file is cut into sequences of full length. A row of the other kinds is one sequence, cut
    off; a chat (a list of role and content) goes through the tokenizer's chat template. Raises
    ValueError, which says what is wrong with the data, and OSError.
    """
    path = Path(source.data)
    if path.suffix.lower() in LOCAL_KINDS or path.exists():
        kind = LOCAL_KINDS.get(path.suffix.lower())
        if kind is None:
            raise ValueError(
                f"{path} is of no kind that is known; give a file that ends in "
                + ", ".join(LOCAL_KINDS)
            )
        if kind == "text":
            return _windows(path, tokenizer, count, tokens, seed)
        rows = _json_lines(path) if kind == "json lines" else _parquet(path)
        order = list(range(len(rows)))
        random.Random(seed).shuffle(order)
        chosen: Iterator[Any] = (rows[i] for i in order)
    else:
        chosen = _hub_rows(source, seed)
    found: list[torch.Tensor] = []
    for row in chosen:
        ids = _encode_row(row, source, tokenizer, tokens)
        if len(ids) >= MIN_TOKENS:
            found.append(ids)
        if len(found) == count:
            break
    if not found:
        raise ValueError(f"{source.data} has no row of at least {MIN_TOKENS} tokens")
    return found


def _windows(path: Path, tokenizer: Any, count: int, tokens: int, seed: int) -> list[torch.Tensor]:
    text = path.read_text(encoding="utf-8", errors="replace")
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    windows = [window for window in ids.split(tokens) if len(window) == tokens]
    if not windows:
        raise ValueError(f"{path} has {len(ids)} tokens; one sequence takes {tokens} (--tokens)")
    random.Random(seed).shuffle(windows)
    return windows[:count]


def _json_lines(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    return rows


def _parquet(path: Path) -> list[Any]:
    from pyarrow import ArrowException, parquet

    try:
        return parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error


def _hub_rows(source: Source, seed: int) -> Iterator[Any]:
    from datasets import load_dataset

    try:
        rows = load_dataset(source.data, source.config, split=source.split)
    except Exception as error:  # the hub's client raises whatever its parts do
        raise ValueError(
            f"{source.data} is neither a file here nor a data set that the hub gives "
            f"({type(error).__name__}: {error})"
        ) from error
    return iter(rows.shuffle(seed=seed))


def _encode_row(row: Any, source: Source, tokenizer: Any, tokens: int) -> torch.Tensor:
    value = row
    if isinstance(row, dict):
        names = (source.column,) if source.column else (*CHAT_COLUMNS, *TEXT_COLUMNS)
        value = next((row[name] for name in names if row.get(name)), None)
        if value is None and not any(name in row for name in names):
            raise ValueError(
                f"a row of {source.data} has none of the columns {', '.join(names)}; it has "
                f"{', '.join(map(str, row))}; name one with --column"
            )
    if value is None:
        return torch.empty(0, dtype=torch.int64)
    if isinstance(value, str):
        text, special = value, True
    elif isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        turns = [_turn(turn, source) for turn in value]
        # A template writes its own special tokens.
        special = not tokenizer.chat_template
        text = (
            "\n".join(turn["content"] for turn in turns)
            if special
            else tokenizer.apply_chat_template(turns, tokenize=False)
        )
    else:
        raise ValueError(f"a row of {source.data} holds neither text nor a chat: {value!r:.60}")
    text = text[: _CHARACTERS_PER_TOKEN * tokens]
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=special, verbose=False)
    return ids.input_ids[0, :tokens].long()


def _turn(turn: dict[str, Any], source: Source) -> dict[str, str]:
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"a turn of a chat in {source.data} lacks role or content: {turn!r:.60}")
    role = {"human": "user", "gpt": "assistant"}.get(role, role)
    return {"role": role, "content": content}
