"""Prints the rollouts of a step of a run as text: the question, then each completion, the best first.

    python extras/show_rollouts.py runs/cpu-demo 3               the first prompt of step 3
    python extras/show_rollouts.py runs/cpu-demo 3 --prompt 2    the second

Coloured on a terminal, plain when piped: what was kept is bright, what the rule threw away is dim.
"""

import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from extras.checks import Parser, Refusal, explained
from extras.plot_runs import read_lines

GREEN, RED, DIM, BOLD, END = "\033[32m", "\033[31m", "\033[2m", "\033[1m", "\033[0m"
NEEDED = ("step", "prompt", "question", "gold", "reward", "kept", "advantage", "truncated", "completion")


def group_of(run: Path, step: int, prompt: int) -> list[dict]:
    """The rollouts of one prompt. Raises Refusal, saying which steps and prompts there are."""
    file = run / "rollouts.jsonl"
    if not file.exists():
        raise Refusal(f"{run} is not the folder of a run: it has no rollouts.jsonl")
    of_step, steps = [], []
    for row in read_lines(file, *NEEDED):
        steps = [*steps[:1], row["step"]]  # the first and the last
        if row["step"] == step:
            of_step.append(row)
    if not steps:
        raise Refusal(f"{run} has no finished step yet")
    if not of_step:
        raise Refusal(f"{run} has no step {step}; it has {steps[0]} to {steps[-1]}")
    if not (group := [row for row in of_step if row["prompt"] == prompt]):
        raise Refusal(f"--prompt is {prompt}, but step {step} has 1 to {of_step[-1]['prompt']}")
    return group


def plain(text: str) -> str:
    """Without what could steer a terminal: a random model writes any byte."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def shown(group: list[dict], colour: bool) -> str:
    paint = lambda text, code: code + text + END if colour else text
    first, kept = group[0], sum(row["kept"] for row in group)
    lines = [
        paint(plain(first["question"]), BOLD),
        f"answer {first['gold']}; {kept} of {len(group)} rollouts kept",
    ]
    for row in sorted(group, key=lambda row: -row["reward"]):
        head = f"reward {row['reward']:.3g}, "
        head += f"kept, advantage {row['advantage']:+.3f}" if row["kept"] else "not kept"
        head += ", cut off" if row["truncated"] else ""
        sign = GREEN if row["advantage"] > 0 else RED if row["advantage"] < 0 else BOLD
        text = plain(row["completion"])
        lines += (
            ["", paint(f"--- {head}", sign), text] if row["kept"] else ["", paint(f"--- {head}\n{text}", DIM)]
        )
    return "\n".join(lines)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, as runs/cpu-demo")
    parser.add_argument("step", type=int, metavar="STEP", help="from 1")
    parser.add_argument("--prompt", type=int, default=1, help="which prompt of the step, from 1 (default 1)")
    args = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it in silence
    print(shown(group_of(args.run, args.step, args.prompt), sys.stdout.isatty()))
    return 0


if __name__ == "__main__":
    sys.exit(explained(main, "show_rollouts.py", trains=False))
