"""Prints the rollouts of a step of a run: the question, then each completion, the best first.

    python -m tools.show_rollouts runs/cpu-demo 3               the first prompt of step 3
    python -m tools.show_rollouts runs/cpu-demo 3 --prompt 2    the second

Coloured on a terminal, plain when piped: what was kept is bright, what the rule left out is dim.
"""

import signal
import sys
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from tools.run_files import plain, read_jsonl

GREEN, RED, DIM, BOLD, END = "\033[32m", "\033[31m", "\033[2m", "\033[1m", "\033[0m"
NEEDED = "step prompt question gold reward correct kept advantage truncated text".split()


def read_group(run: Path, step: int, prompt: int) -> list[dict]:
    """The rollouts of one prompt. Raises ValueError, saying which steps and prompts there are."""
    file, of_step, first, last = run / "rollouts.jsonl", [], None, None
    if not file.exists():
        raise ValueError(f"{run} has no rollouts.jsonl: no run, or one without a finished step")
    for row in read_jsonl(file, *NEEDED):
        first, last = first or row["step"], row["step"]
        if row["step"] == step:
            of_step.append(row)
    if not of_step:
        raise ValueError(f"{run} has no step {step}; it has {first} to {last}")
    if not (group := [row for row in of_step if row["prompt"] == prompt]):
        raise ValueError(f"--prompt is {prompt}; step {step} has 1 to {of_step[-1]['prompt']}")
    return group


def describe(row: dict) -> str:
    words = [f"reward {row['reward']:.3g}", "right" if row["correct"] else "wrong"]
    words += [f"kept, advantage {row['advantage']:+.3f}" if row["kept"] else "not kept"]
    return ", ".join(words + ["cut off"] * row["truncated"])


def paint(text: str, code: str, colour: bool) -> str:
    return code + text + END if colour else text


def render(group: list[dict], colour: bool) -> str:
    """The text to print, without control characters but for the colours."""
    kept, lines = sum(row["kept"] for row in group), []
    for row in sorted(group, key=lambda row: -row["reward"]):
        head, text = f"--- {describe(row)}", plain(row["text"])
        if row["kept"]:
            sign = GREEN if row["advantage"] > 0 else RED if row["advantage"] < 0 else BOLD
            lines += ["", paint(head, sign, colour), text]
        else:
            lines += ["", paint(f"{head}\n{text}", DIM, colour)]
    question = paint(plain(group[0]["question"]), BOLD, colour)
    counted = f"answer {plain(group[0]['gold'])}; {kept} of {len(group)} rollouts kept"
    return "\n".join([question, counted, *lines])


def main() -> None:
    options = dict(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser = ArgumentParser(usage=SUPPRESS, **options)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, as runs/cpu-demo")
    parser.add_argument("step", type=int, metavar="STEP", help="from 1")
    parser.add_argument("--prompt", type=int, default=1, metavar="K", help="of the step, from 1")
    args = parser.parse_args()
    try:
        group = read_group(args.run, args.step, args.prompt)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it in silence
    print(render(group, sys.stdout.isatty()))


if __name__ == "__main__":
    main()
