"""The folder of a run: one owner at a time, one set of settings, and files that are whole at every moment.

And what is written into it of a step. No part of the algorithm.
"""

import fcntl
import itertools
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import IO

import torch

from extras.checks import Refusal
from rewards import gold_answer, is_well_formed

MAY_CHANGE = ("max_steps", "max_minutes", "save_every", "fresh")  # when a run goes on; no other setting may


def open_run(run: Path, settings: dict, fresh: bool = False) -> IO:
    """Makes the folder `run`, or moves an old one aside if `fresh`. Returns its lock: keep it until the end.

    Raises Refusal if a live process has the run, or if it was made with other `settings`, and lists those.
    """
    run.mkdir(parents=True, exist_ok=True)
    lock = open(run / "lock", "w")
    try:  # however this process ends, the kernel lets go of the lock
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal(f"{run} is in use by a live run: wait for its end, or take another --name") from None
    way_out = "take another --name" + ", or --fresh" * ("fresh" in settings)
    settings = {key: value for key, value in settings.items() if key not in MAY_CHANGE}
    file = run / "config.json"
    begun = ("metrics.jsonl", "checkpoint", "timing.json")  # the last of a comparison
    if not any((run / made).exists() for made in begun):
        write_whole(file, lambda out: out.write(json.dumps(settings, indent=1).encode()))
    elif fresh:
        aside = next(path for i in itertools.count(1) if not (path := Path(f"{run}.{i}")).exists())
        run.rename(aside)
        print(f"The run that was in {run} is now in {aside}.")
        return open_run(run, settings)
    before = json.loads(file.read_text())
    differ = [
        f"{key} was {before.get(key)}, is {now}" for key, now in settings.items() if before.get(key) != now
    ]
    if differ:
        raise Refusal(f"{run} has other settings ({'; '.join(differ)}): {way_out}")
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


def append(log: Path, *rows: dict) -> None:
    """More lines for a .jsonl file."""
    with open(log, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def measure(groups: list[list], rewards: torch.Tensor, kept: torch.Tensor) -> dict[str, float]:
    """What the rollouts of a step were like: rewards (prompts, n), kept the indices (prompts, m)."""
    rollouts = [rollout for group in groups for rollout in group]
    kept_rewards = rewards.gather(-1, kept)
    return {
        "tokens_generated": sum(len(r.completion_ids) for r in rollouts),
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std(-1, correction=0).mean().item(),  # within a group
        "kept_reward_mean": kept_rewards.mean().item(),
        "kept_reward_std": kept_rewards.std(-1, correction=0).mean().item(),
        "accuracy": (rewards >= 1).double().mean().item(),  # format alone earns at most 0.2
        "format": fmean(is_well_formed(r.text) for r in rollouts),
        "truncated": fmean(r.truncated for r in rollouts),
        "entropy": -fmean(logprob for r in rollouts for logprob in r.logprobs),  # E[-log pi_old(token)]
    }


def log_rollouts(run: Path, step: int, groups: list[list], problems: list[dict]) -> None:
    """All rollouts of a step, a line each: a prompt's n together, in the order that the rules saw."""
    rows = [
        dict(step=step, prompt=i, question=problem["question"], gold=gold_answer(problem["answer"]))
        | dict(reward=r.reward, kept=r.kept, advantage=r.advantage, truncated=r.truncated, completion=r.text)
        for i, (group, problem) in enumerate(zip(groups, problems), start=1)
        for r in group
    ]
    append(run / "rollouts.jsonl", *rows)


def say_how_to_ask(model: Path, example: bool) -> None:
    print(f"The model is in {model}. To ask it something:")
    ask = [sys.executable, Path(__file__).with_name("ask.py"), model, "Mia has 8 pens and gets 7 more. ..."]
    print("   ", shlex.join(map(str, ask + ["--example"] * example)))


class Stop:
    """Notes SIGINT (Ctrl-C) or SIGTERM, so that the step in progress can end. Ctrl-C again ends it at once.

    SIGTERM again does not: if compare.py is killed, the kernel may send one for each of its threads.
    """

    number = 0

    def __init__(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number: int, frame) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # before it says so: who reads it may be quick
        if not self.number:
            print("Stopping after this step; Ctrl-C again stops at once.", file=sys.stderr)
        self.number = number
