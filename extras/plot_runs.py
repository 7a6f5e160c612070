"""Draws runs of pods.py and prints their table. Runs of the same n, m and rule are seeds of one arm.

    python extras/plot_runs.py runs/compare-* --out docs
    python extras/plot_runs.py runs/gsm8k --paper         with the paper's curves, for runs on a GPU

accuracy.png    test accuracy against steps, training time, and steps x the arm's median step time
training.png    mean reward, length of completions, and where the time of a step goes
rewards.png     rewards of all generated and of the kept rollouts of one step: what a rule throws away
"""

import importlib.util
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from extras.checks import Parser, Refusal, explained

GRPO_COLOURS = ["#000000", "#7f7f7f"]  # the smaller group first
COLOURS = {"max-variance": "#D55E00", "max-reward": "#0072B2", "random": "#009E73"}  # Okabe and Ito's
NEVER = math.inf


@dataclass
class Run:
    folder: Path
    label: str  # of its arm
    rule: str
    n: int
    m: int
    seed: int
    steps: list[dict]  # lines of metrics.jsonl from step 1 on
    evaluated: list[dict]  # those with a test accuracy, from step 0 on


def label(n: int, m: int, rule: str) -> str:
    return f"GRPO {n}" if n == m else f"{rule.replace('_', '-')} {n} to {m}"


def read_run(folder: Path) -> Run:
    """Raises Refusal, with file and line, for a folder that is no run, is empty, or has a broken line."""
    try:
        cfg = json.loads((folder / "config.json").read_text())
        n, m, rule = cfg["n"], cfg["m"], cfg["rule"].replace("_", "-")
        rows = read_lines(folder / "metrics.jsonl", "step", "train_seconds")
        evaluated = [row for row in rows if "eval_accuracy" in row]
        [row["eval_format"] for row in evaluated]
        steps = [row for row in rows if row["step"] > 0]
        for row in steps:
            row["tokens"] = row["tokens_generated"] / (n * cfg["prompts_per_step"])
        run = Run(folder, label(n, m, rule), rule, n, m, cfg["seed"], steps, evaluated)
    except (OSError, ValueError) as error:
        raise Refusal(f"{folder} is not the folder of a run: {error}") from None
    except KeyError as error:
        raise Refusal(f"{folder} is not the folder of a run of this version: it lacks {error}") from None
    if not (run.steps and run.evaluated):
        raise Refusal(f"{folder} has no finished step yet")
    return run


def read_lines(file: Path, *needed: str) -> list[dict]:
    """The lines of a .jsonl file but for a last one that is only half written."""
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if line.endswith("\n"):
            try:
                rows.append(json.loads(line))
                [rows[-1][key] for key in needed]
            except (ValueError, KeyError, TypeError) as error:
                raise Refusal(f"{file}, line {number} is broken ({error})") from None
    return rows


def by_arm(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by label: GRPO first, the smaller group before the larger, then the rules."""
    order = sorted(
        runs, key=lambda run: (run.n != run.m, run.n, list(COLOURS).index(run.rule), run.m, run.seed)
    )
    return {
        label: [run for run in order if run.label == label] for label in dict.fromkeys(r.label for r in order)
    }


def median_step_seconds(runs: list[Run]) -> dict[str, float]:
    """Of each arm, from its own steps. They were not taken in turns: another hour, another figure."""
    taken = lambda run: [row["generate_seconds"] + row["update_seconds"] for row in run.steps]
    return {arm: median([s for run in of_arm for s in taken(run)]) for arm, of_arm in by_arm(runs).items()}


def minutes_of(run: Run, step_seconds: float | None) -> list[float]:
    """When each evaluation came: as the run went, or as it would have at so many seconds a step."""
    if step_seconds is None:
        return [row["train_seconds"] / 60 for row in run.evaluated]
    return [row["step"] * step_seconds / 60 for row in run.evaluated]


def at(x: float, xs: list[float], ys: list[float]) -> float:
    """y at x, linear between the points and constant outside of them."""
    if x <= xs[0]:
        return ys[0]
    for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:]):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return ys[-1]


# ----- The table


def spread(values: list[float], form: str = "{:.0f}", middle=fmean) -> str:
    """The middle of the seeds' values and, in brackets, the lowest and the highest."""
    word = lambda value: "never" if value == NEVER else form.format(value)
    low, high = word(min(values)), word(max(values))
    return word(middle(values)) + (f" ({low} to {high})" if low != high else "")


def first_at(target: float, minutes: list[float], accuracies: list[float]) -> float:
    """When an evaluation first reached the target."""
    return next((t for t, a in zip(minutes, accuracies) if a >= target), NEVER)


def table(runs: list[Run], minutes: float, step_seconds: dict[str, float] | None) -> str:
    """Markdown. Accuracy: mean and range of the seeds; times and speed-ups: median and range.

    A run is compared with the GRPO run of the same seed: "its best" is that run's highest accuracy, reached
    when an evaluation first shows it. The speed-up is GRPO's time over the arm's; 0 if that never gets there.
    """
    arms = by_arm(runs)
    grpo = [arm for arm in arms if arm.startswith("GRPO ")]
    curve = lambda run: (
        minutes_of(run, step_seconds and step_seconds[run.label]),
        [row["eval_accuracy"] for row in run.evaluated],
    )
    head = ["arm", "steps", "seconds a step", f"accuracy at {minutes / 4:.3g} min", f"{minutes / 2:.3g} min"]
    head += [f"{minutes:.3g} min", "best", "well-formed, last"]
    head += [cell for arm in grpo for cell in (f"min to {arm}'s best", "speed-up")]
    seconds = step_seconds or median_step_seconds(runs)
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for arm, seeds in arms.items():
        cells = [arm, spread([run.steps[-1]["step"] for run in seeds]), f"{seconds[arm]:.1f}"]
        for part in (0.25, 0.5, 1):
            cells.append(spread([100 * at(part * minutes, *curve(run)) for run in seeds], "{:.1f}"))
        cells.append(spread([100 * max(curve(run)[1]) for run in seeds], "{:.1f}"))
        cells.append(spread([100 * run.evaluated[-1]["eval_format"] for run in seeds]))
        for other in grpo:
            reached, gained = [], []
            for run in seeds:
                for theirs in (theirs for theirs in arms[other] if theirs.seed == run.seed):
                    best = max(curve(theirs)[1])
                    reached.append(first_at(best, *curve(run)))
                    gained.append(first_at(best, *curve(theirs)) / reached[-1] if reached[-1] else 1.0)
            cells.append(spread(reached, "{:.1f}", median) if reached else "")
            cells.append(spread(gained, "{:.2f}", median) if gained else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ----- The figures


def check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise Refusal("needs matplotlib: .venv/bin/pip install -r extras/requirements.txt")


def canvas(panels: int, height: float = 3.4, **kwargs):
    """A row of panels that can be read at the width of a README: 10 inches, letters of 10 points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    return pyplot.subplots(1, panels, figsize=(10, height), layout="constrained", squeeze=False, **kwargs)


def save(figure, file: Path) -> Path:
    figure.savefig(file, dpi=160)
    figure.clear()
    return file


def colours(runs: list[Run]) -> dict[str, str]:
    shades, found = iter(GRPO_COLOURS * len(runs)), {}
    for label, (run, *_) in by_arm(runs).items():
        found[label] = next(shades) if run.n == run.m else COLOURS[run.rule]
    return found


def label_ends(axes, ends: list[tuple[float, float, str, str]], size: float = 9.5) -> None:
    """Writes (x, y, text, colour) beside the ends of lines, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.085
    placed = -math.inf
    right = max(x for x, *_ in ends)
    for x, y, text, colour in sorted(ends, key=lambda end: end[1]):
        placed = max(y, placed + gap)
        axes.annotate(
            text,
            (x, y),
            (right * 1.04, placed),
            color=colour,
            fontsize=size,
            va="center",
            annotation_clip=False,
        )
    axes.set_ylim(low, max(high, placed + gap / 2))


def draw_seeds(axes, curves: list[tuple[list[float], list[float]]], colour: str, **kwargs):
    """The mean of some curves as a line, their range as a band. Returns where the line ends."""
    end = min(xs[-1] for xs, _ in curves)
    xs = sorted({x for curve, _ in curves for x in curve if x <= end} | {end})
    values = [[at(x, *curve) for curve in curves] for x in xs]
    means = [fmean(v) for v in values]
    axes.plot(xs, means, color=colour, linewidth=1.8, **kwargs)
    if len(curves) > 1:
        axes.fill_between(
            xs, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.13, lw=0
        )
    return xs[-1], means[-1]


def accuracy_figure(runs: list[Run], step_seconds: dict[str, float], paper: bool):
    figure, ((*panels,),) = canvas(3, 3.6, sharey=True)
    clocks = [
        ("steps", lambda run: [row["step"] for row in run.evaluated]),
        ("training minutes, as run", lambda run: minutes_of(run, None)),
        ("steps x median step, minutes", lambda run: minutes_of(run, step_seconds[run.label])),
    ]
    shade = colours(runs)
    for axes, (name, clock) in zip(panels, clocks):
        ends = []
        for arm, seeds in by_arm(runs).items():
            curves = [(clock(run), [100 * row["eval_accuracy"] for row in run.evaluated]) for run in seeds]
            ends.append((*draw_seeds(axes, curves, shade[arm]), arm, shade[arm]))
        axes.set_xlabel(name)
        axes.set_xlim(left=0)
    if paper:
        data = json.loads((HERE / "paper_results.json").read_text())
        for curve in data["curves"]:
            if curve["m"] != 16 or curve["n"] not in (16, 64):
                continue
            colour = GRPO_COLOURS[0] if curve["n"] == curve["m"] else COLOURS[curve["rule"].replace("_", "-")]
            xs, ys = [60 * h for h in data["hours"]], [100 * a for a in curve["accuracy"]]
            panels[1].plot(xs, ys, "--", color=colour, linewidth=1)
            text = "paper: " + label(curve["n"], curve["m"], curve["rule"])
            panels[1].annotate(text, (xs[-1], ys[-1]), color=colour, fontsize=8, va="center", ha="right")
    panels[0].set_ylabel("test accuracy, %")
    label_ends(panels[-1], ends)
    return figure


def smoothed(run: Run, key: str, points: int = 12) -> tuple[list[float], list[float]]:
    """Training minutes and the mean of metrics[key], both over `points` stretches of about as many steps."""
    count = min(points, len(run.steps))
    parts = [run.steps[i * len(run.steps) // count : (i + 1) * len(run.steps) // count] for i in range(count)]
    return [fmean(r["train_seconds"] / 60 for r in part) for part in parts], [
        fmean(r[key] for r in part) for part in parts
    ]


def training_figure(runs: list[Run]):
    figure, ((reward, length, time),) = canvas(3, 3.6, width_ratios=[1, 1, 1.15])
    shade = colours(runs)
    for axes, key, name in (
        (reward, "reward_mean", "mean reward of all n"),
        (length, "tokens", "tokens a completion"),
    ):
        ends = []
        for arm, seeds in by_arm(runs).items():
            ends.append(
                (*draw_seeds(axes, [smoothed(run, key) for run in seeds], shade[arm]), arm, shade[arm])
            )
        axes.set(title=name, xlabel="training minutes")
        axes.set_xlim(left=0)
    for place, (arm, seeds) in enumerate(reversed(by_arm(runs).items())):
        left = 0
        for key, alpha in (("generate_seconds", 0.45), ("update_seconds", 1.0)):
            seconds = median(row[key] for run in seeds for row in run.steps)
            time.barh(place, seconds, left=left, color=shade[arm], alpha=alpha, height=0.42)
            left += seconds
        time.text(0, place + 0.26, arm, color=shade[arm], va="bottom", fontsize=9.5)
        time.text(left, place, f" {left:.0f} s", va="center", fontsize=9.5)
    time.set(title="a step: generate (pale), update", xlabel="seconds, median", yticks=[])
    time.set_ylim(-0.5, len(shade) - 0.1)
    time.margins(x=0.15)
    return figure


def rewards_figure(runs: list[Run], step: int):
    """Of one run of each arm. At step 1 arms with the same n and seed have the very same rollouts."""
    firsts = [seeds[0] for seeds in by_arm(runs).values()]
    figure, ((*panels,),) = canvas(len(firsts), 3.0, sharex=True, sharey=True)
    shade = colours(runs)
    for axes, run in zip(panels, firsts):
        rows = [
            row
            for row in read_lines(run.folder / "rollouts.jsonl", "step", "reward", "kept")
            if row["step"] == step
        ]
        if not rows:
            raise Refusal(f"{run.folder} has no rollouts of step {step}")
        rewards, kept = [row["reward"] for row in rows], [row["reward"] for row in rows if row["kept"]]
        top = max(1.2, *rewards)
        options = dict(bins=13, range=(min(0.0, *rewards) - top / 24, top + top / 24))
        axes.hist(rewards, color="#cccccc", **options)
        axes.hist(kept, color=shade[run.label], rwidth=0.62, **options)
        axes.set_title(run.label, color=shade[run.label], fontsize=9.5)
        axes.text(
            0.5, 0.93, f"{len(rewards)} generated", transform=axes.transAxes, ha="center", color="#666666"
        )
        axes.text(
            0.5, 0.83, f"{len(kept)} kept", transform=axes.transAxes, ha="center", color=shade[run.label]
        )
    panels[0].set_ylabel(f"rollouts of step {step}")
    panels[len(panels) // 2].set_xlabel("reward")
    panels[0].margins(y=0.35)
    return figure


def show(
    runs: list[Run], out: Path, step_seconds=None, minutes=None, step: int = 1, paper: bool = False
) -> int:
    """Draws the figures into `out`, writes the tables into out/table.md and prints them."""
    check_matplotlib()
    step_seconds = step_seconds or median_step_seconds(runs)
    minutes = minutes or min(minutes_of(run, None)[-1] for run in runs)
    figures = {
        "accuracy": accuracy_figure(runs, step_seconds, paper),
        "training": training_figure(runs),
        "rewards": rewards_figure(runs, step),
    }
    files = [save(figure, out / f"{name}.png") for name, figure in figures.items()]
    text = f"By training time as run:\n\n{table(runs, minutes, None)}\n\n"
    text += f"By steps x the arm's median step time:\n\n{table(runs, minutes, step_seconds)}\n"
    (out / "table.md").write_text(text)
    print(text)
    print("Drawn:", *files)
    return 0


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, as runs/gsm8k")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the figures (default: this one)")
    parser.add_argument("--step", type=int, default=1, help="step whose rewards are drawn (default 1)")
    parser.add_argument("--paper", action="store_true", help="draw the paper's curves into accuracy.png too")
    args = parser.parse_args()
    if not args.out.is_dir():
        raise Refusal(f"--out is {args.out}, but there is no such folder")
    return show([read_run(run) for run in args.runs], args.out, step=args.step, paper=args.paper)


if __name__ == "__main__":
    sys.exit(explained(main, "plot_runs.py", trains=False))
