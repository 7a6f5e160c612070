"""Reads the files of a run's folder, and makes the text in them safe to print."""

import json
from collections.abc import Iterator
from pathlib import Path
from unicodedata import category


def read_jsonl(path: Path | str, *needed_keys: str) -> Iterator[dict]:
    """The rows of a .jsonl file, in order. A last line that is only half written is left out.

    Raises OSError without the file, and ValueError, with the file and the line's number, for any
    other line that is no JSON object or lacks one of the needed keys.
    """
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):  # the run is writing it, or was killed while it did
                    return
                raise ValueError(f"{path}, line {number} is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is not a JSON object")
            if missing := [key for key in needed_keys if key not in row]:
                raise ValueError(f"{path}, line {number} lacks {', '.join(missing)}")
            yield row


def read_config(run: Path | str) -> dict:
    """The settings of a run. Raises ValueError if `run` is not the folder of one."""
    file = Path(run) / "config.json"
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{run} is not the folder of a run: {error}") from None
    if not isinstance(settings, dict) or "rule" not in settings:
        raise ValueError(f"{run} is not the folder of a run: {file} is not of pods.py")
    return settings


def plain(text: str) -> str:
    """Without what could steer a terminal: a model may write any byte, also an escape sequence."""
    replace = {c: "\N{REPLACEMENT CHARACTER}" for c in set(text) if category(c).startswith("C")}
    return text.translate(str.maketrans(replace | {"\n": "\n", "\t": "\t"}))
