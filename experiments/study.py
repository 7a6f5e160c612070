"""A study: its arms, and where it keeps what. Shared by the programs of this folder.

runs/STUDY/ARM-SEED                         a run of pods.py, as it goes
experiments/results/STUDY/ARM-SEED.json     what is left of a finished one
experiments/results/STUDY/timing.json       how long a step of each arm takes
"""

import argparse
import json
import os
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
DEMONSTRATION = {  # the settings of run_gsm8k.sh without a GPU
    "model": "models/SmolLM2-135M-Instruct",
    "data": "data/easy",
    "example": True,
    "n": 16,
    "m": 4,
    "prompts_per_step": 6,
    "lr": 1e-5,
    "max_new_tokens": 64,
    "micro_batch_tokens": 1024,
}
GRPO = ("grpo_m", "grpo_n")
ARMS = (*GRPO, "max_variance", "random", "max_reward")


def arm_settings(arm: str, n: int, m: int) -> dict:
    """What pods.py gets for an arm: GRPO with a group of m, GRPO on all n, or a rule's m of n."""
    if arm in GRPO:  # with n = m, every rule keeps all
        k = {"grpo_m": m, "grpo_n": n}[arm]
        return dict(n=k, m=k, rule="max_variance")
    return dict(n=n, m=m, rule=arm)


class Parser(argparse.ArgumentParser):
    """Its help is the program's docstring, and a wrong argument is one line and exit code 2."""

    def __init__(self, doc: str | None):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, formatter_class=form, allow_abbrev=False)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}; --help explains all\n")


def write_json(path: Path, data: dict) -> None:
    """Writes it beside the old file, then renames: a kill leaves one of them, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(data) + "\n")
    os.replace(new, path)


def to_columns(rows: list[dict]) -> dict[str, list]:
    """Rows of metrics as one list for each metric, to 5 digits, with None where a row lacks it."""

    def short(value):
        return float(f"{value:.5g}") if type(value) is float else value

    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [short(row.get(key)) for row in rows] for key in keys}


def column(run: dict, key: str) -> tuple[list[int], list[float]]:
    """The steps at which a finished run has a metric, and its values there."""
    found = [(s, x) for s, x in zip(run["metrics"]["step"], run["metrics"][key]) if x is not None]
    return [step for step, _ in found], [value for _, value in found]


def read_study(study: str) -> dict[str, list[dict]]:
    """The finished runs of each arm, by seed; {} where there are none."""
    arms = {}
    for arm in ARMS:
        files = (RESULTS / study).glob(f"{arm}-*.json")
        runs = sorted((json.loads(file.read_text()) for file in files), key=seed_of)
        if runs:
            arms[arm] = runs
    return arms


def seed_of(run: dict) -> int:
    return run["seed"]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table; the cells are text."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
