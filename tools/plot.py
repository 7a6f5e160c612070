"""Draws the curves of one or more runs, also of one that is still going.

    python -m tools.plot runs/grpo runs/pods --out curves.png

Four panels: test accuracy; mean reward of all rollouts; tokens a completion; seconds a step. All
but the first are running means over a twentieth of the run. Training minutes are those of
generating and updating, without evaluations. Runs of the same n, m and rule have one colour.
"""

from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from tools.drawing import arm_colours, arm_name, canvas, save
from tools.run_files import read_config, read_jsonl

PANELS = ("test accuracy, %", "mean reward", "tokens a completion", "seconds a step")
DASHES = ("-", "--", ":", "-.")
Curve = tuple[list[float], list[float]]  # xs, ys


def read_curves(run: Path, x: str) -> tuple[dict, list[Curve]]:
    """The settings of a run and its curves, one for each of PANELS; x is "minutes" or "step".

    Raises ValueError if the folder is not that of a run, or no step is finished yet; OSError.
    """
    settings, file = read_config(run), run / "metrics.jsonl"
    rollouts = settings["n"] * settings["prompts_per_step"]
    rows = list(read_jsonl(file, "step"))
    steps = [row for row in rows if row["step"] > 0]
    if not steps:
        raise ValueError(f"{run} has no finished step yet")
    try:
        seconds = [row["time/generate"] + row["time/update"] for row in steps]
        rewards = [row["rollout/reward_mean"] for row in steps]
        lengths = [row["rollout/tokens"] / rollouts for row in steps]
    except KeyError as error:
        raise ValueError(f"{file} has a step without {error}") from None
    numbers = [row["step"] for row in steps]
    xs = numbers if x == "step" else [total / 60 for total in accumulate(seconds)]
    place = {0: 0} | dict(zip(numbers, xs))
    evaluated = [row for row in rows if "eval/accuracy" in row]
    accuracy = [100 * row["eval/accuracy"] for row in evaluated]
    curves = [([place[row["step"]] for row in evaluated], accuracy)]
    return settings, curves + [running_mean(xs, ys) for ys in (rewards, lengths, seconds)]


def running_mean(xs: list[float], ys: list[float]) -> Curve:
    """Means of each stretch of a twentieth of the points, of x as of y."""
    width = max(1, len(xs) // 20)
    starts = range(len(xs) - width + 1)
    return tuple([fmean(values[i : i + width]) for i in starts] for values in (xs, ys))


def draw(names: list[str], runs: list[tuple[dict, list[Curve]]], x_label: str):
    """The figure of runs, each as read_curves gives it."""
    colours = arm_colours([settings for settings, _ in runs])
    figure, panels = canvas(columns=2, rows=2, height=5.6 + 0.11 * len(runs), sharex=True)
    of_arm, lines = dict.fromkeys(colours, 0), []
    for settings, curves in runs:
        arm = arm_name(settings)
        style = dict(color=colours[arm], linestyle=DASHES[of_arm[arm] % len(DASHES)])
        of_arm[arm] += 1
        for panel, (xs, ys) in zip(panels.flat, curves):
            marker = "o" if panel is panels[0, 0] else None
            (line,) = panel.plot(xs, ys, **style, linewidth=1.6, marker=marker, markersize=3)
        lines.append(line)
    for panel, title in zip(panels.flat, PANELS):
        panel.set_title(title)
        panel.set_ylim(bottom=0 if title != "mean reward" else None)
    for panel in panels[1]:
        panel.set_xlabel(x_label)
    labels = [f"{name}: {arm_name(settings)}" for name, (settings, _) in zip(names, runs)]
    figure.legend(lines, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def main() -> None:
    options = dict(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser = ArgumentParser(usage=SUPPRESS, **options)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", required=True, metavar="FILE.png", help="where the figure goes")
    parser.add_argument("--x", choices=("minutes", "step"), default="minutes", help="the x axis")
    args = parser.parse_args()
    try:
        runs = [read_curves(run, args.x) for run in args.runs]
        names = [run.resolve().name for run in args.runs]
        save(draw(names, runs, {"minutes": "training minutes"}.get(args.x, args.x)), args.out)
    except ImportError as error:
        parser.error(f"{error}; the figures need: pip install matplotlib")
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
