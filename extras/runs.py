"""The folder of a run: one owner at a time, one set of settings, and files that are whole at every moment."""

import fcntl
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from extras.checks import Refusal


MAY_CHANGE = ("max_steps", "max_minutes", "save_every", "fresh")  # when a run goes on; no other setting may


def open_run(run: Path, settings: dict, fresh: bool) -> IO:
    """Makes the folder `run`, or moves an old one aside if `fresh`. Returns its lock: keep it until the end.

    Raises Refusal if a live process has the run, or if it was made with other `settings`, and lists those.
    """
    run.mkdir(parents=True, exist_ok=True)
    lock = open(run / "lock", "w")
    try:  # however this process ends, the kernel lets go of the lock
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal(f"{run} is in use by a live run: wait for its end, or take another --name") from None
    settings = {key: value for key, value in settings.items() if key not in MAY_CHANGE}
    file = run / "config.json"
    if not any(
        (run / made).exists() for made in ("metrics.jsonl", "checkpoint")
    ):  # nothing to go on with yet
        write_whole(file, lambda out: out.write(json.dumps(settings, indent=1).encode()))
    elif fresh:
        aside = next(path for i in itertools.count(1) if not (path := Path(f"{run}.{i}")).exists())
        run.rename(aside)
        print(f"The run that was in {run} is now in {aside}.")
        return open_run(run, settings, fresh)
    before = json.loads(file.read_text())
    differ = [
        f"{key} was {before.get(key)}, is {now}" for key, now in settings.items() if before.get(key) != now
    ]
    if differ:
        raise Refusal(f"{run} has other settings ({'; '.join(differ)}): take another --name, or --fresh")
    return lock


def write_whole(path: Path, write: Callable[[IO], None]) -> None:
    """Writes a file beside the old one, then renames it: at every moment one of them is there, whole."""
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(path.name + ".new")
    try:
        with open(new, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def forget_after(run: Path, step: int) -> None:
    """Drops the log lines of later steps, which are run again, and one that a kill left half written."""
    for log in run.glob("*.jsonl"):
        lines = [line for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        kept = b"".join(line for line in lines if json.loads(line)["step"] <= step)
        write_whole(log, lambda file: file.write(kept))


class Stop:
    """Notes SIGINT (Ctrl-C) or SIGTERM, so that the step in progress can end. A second ends it at once."""

    number = 0

    def __init__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number: int, frame) -> None:
        self.number = number
        print("Stopping after this step; once more stops at once.", file=sys.stderr)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
