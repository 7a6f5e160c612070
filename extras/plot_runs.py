"""Draws runs of pods.py and prints their table. Runs of the same n, m and rule are seeds of one arm.

    python extras/plot_runs.py runs/cpu-demo              a run, or several
    python extras/plot_runs.py runs/gsm8k --paper         with the paper's curves, for runs on a GPU
    python extras/plot_runs.py runs/compare-*-[0-9] --timing runs/compare/timing.json --out docs

accuracy.png    test accuracy against steps, training time, and steps x the arm's median step time
training.png    mean reward and length of completions against the same three
time.png        what a step of each arm spends its time on
rewards.png     rewards of all generated and of the kept rollouts of one step: what a rule throws away
"""

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, median_high, median_low

import numpy

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from extras.checks import Parser, Refusal, explained
from sampling import RULES

# Okabe and Ito's colours, which the colour-blind can tell apart; a rule has its place in RULES.
GRPO_COLOURS = ["#000000", "#7f7f7f"]  # the smaller group first
RULE_COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
MAY_DIFFER = {"name", "seed", "eval_every"}  # between seeds of an arm
NEVER = math.inf


@dataclass
class Run:
    folder: Path
    cfg: dict
    label: str  # of its arm
    steps: list[dict]  # lines of metrics.jsonl from step 1 on
    evaluated: list[dict]  # those with a test accuracy, from step 0 on


Clock = Callable[[Run, dict], float]  # where on the x axis a line of metrics is


def label(n: int, m: int, rule: str) -> str:
    return f"GRPO {n}" if n == m else f"{rule.replace('_', '-')} {n} to {m}"


def read_run(folder: Path) -> Run:
    """Raises Refusal, with file and line, for a folder that is no run, is empty, or has a broken line."""
    try:
        cfg = json.loads((folder / "config.json").read_text())
        rows = list(read_lines(folder / "metrics.jsonl", "step", "train_seconds"))
        evaluated = [row for row in rows if "eval_accuracy" in row]
        [row["eval_format"] for row in evaluated]
        steps = [row for row in rows if row["step"] > 0]
        for row in steps:
            row["tokens"] = row["tokens_generated"] / (cfg["n"] * cfg["prompts_per_step"])
        cfg["seed"], RULES[cfg["rule"]]
        run = Run(folder, cfg, label(cfg["n"], cfg["m"], cfg["rule"]), steps, evaluated)
    except (OSError, ValueError) as error:
        raise Refusal(f"{folder} is not the folder of a run: {error}") from None
    except KeyError as error:
        raise Refusal(f"{folder} is not the folder of a run of this version: it lacks {error}") from None
    if not (run.steps and run.evaluated):
        raise Refusal(f"{folder} has no finished step yet")
    return run


def read_lines(file: Path, *needed: str) -> Iterator[dict]:
    """The lines of a .jsonl file but for a last one that is only half written."""
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith("\n"):
                try:
                    row = json.loads(line)
                    [row[key] for key in needed]
                except (ValueError, KeyError, TypeError) as error:
                    raise Refusal(f"{file}, line {number} is broken ({error})") from None
                yield row


def by_arm(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by label: GRPO first, the smaller group before the larger, then the rules.

    Raises Refusal for two runs that are no seeds of one arm, but would be drawn as if they were.
    """
    rules, arms = list(RULES), {}
    place = lambda cfg: (cfg["n"] != cfg["m"], cfg["n"], rules.index(cfg["rule"]), cfg["m"], cfg["seed"])
    for run in sorted(runs, key=lambda run: place(run.cfg)):
        arms.setdefault(run.label, []).append(run)
    for seeds in arms.values():
        for a, b in zip(seeds, seeds[1:]):
            differ = {key for key in a.cfg | b.cfg if a.cfg.get(key) != b.cfg.get(key)}
            if a.cfg["n"] == a.cfg["m"]:
                differ.discard("rule")  # all rules keep all
            if "seed" not in differ or differ - MAY_DIFFER:
                what = "seed" if "seed" not in differ else min(differ - MAY_DIFFER)
                how = f"have both the seed {a.cfg['seed']}" if what == "seed" else f"differ in {what}"
                raise Refusal(f"{a.folder} and {b.folder} {how}: they are not seeds of one arm")
    return arms


def median_step_seconds(runs: list[Run]) -> dict[str, float]:
    """Of each arm, from its own steps. They were not taken in turns: another hour, another figure."""
    taken = lambda run: [row["generate_seconds"] + row["update_seconds"] for row in run.steps]
    return {arm: median([s for run in of_arm for s in taken(run)]) for arm, of_arm in by_arm(runs).items()}


def clocks(step_seconds: dict[str, float]) -> dict[str, Clock]:
    """Training time as the run went hangs on the hour it ran in; that by the median step does not."""
    return {
        "steps": lambda run, row: row["step"],
        "training minutes, as run": lambda run, row: row["train_seconds"] / 60,
        "minutes, steps x median step": lambda run, row: row["step"] * step_seconds[run.label] / 60,
    }


def at(x: float, xs: list[float], ys: list[float]) -> float:
    """y at x, linear between the points and constant outside of them."""
    return float(numpy.interp(x, xs, ys))


# ----- The table


def spread(values: list[float], form: str = "{:.0f}", middle=fmean) -> str:
    """The middle of the seeds' values and, in brackets, the lowest and the highest."""
    word = lambda value: "never" if value == NEVER else form.format(value)
    low, high = word(min(values)), word(max(values))
    return word(middle(values)) + (f" ({low} to {high})" if low != high else "")


def first_at(target: float, minutes: list[float], accuracies: list[float]) -> float:
    """When an evaluation first reached the target."""
    return next((t for t, a in zip(minutes, accuracies) if a >= target), NEVER)


def accuracy_until(end: float, run: Run, clock: Clock) -> tuple[list[float], list[float]]:
    """Minutes and accuracies of a run's evaluations up to `end`, and the accuracy at `end`."""
    xs, ys = [clock(run, row) for row in run.evaluated], [row["eval_accuracy"] for row in run.evaluated]
    within = sum(x < end for x in xs)
    return xs[:within] + [end], ys[:within] + [at(end, xs, ys)]


def table(runs: list[Run], minutes: float, clock: Clock, step_seconds: dict[str, float]) -> str:
    """Markdown. Accuracy: mean and range of the seeds; times and speed-ups: median and range.

    A run is compared with the GRPO run of the same seed: "its best" is that run's highest accuracy, reached
    when an evaluation first shows it. The speed-up is GRPO's time over the arm's; 0 if that never gets there.
    What comes after `minutes` does not count, and a curve that ends before them goes on as a constant.
    """
    arms = by_arm(runs)
    grpo = [arm for arm, (run, *_) in arms.items() if run.cfg["n"] == run.cfg["m"]]
    curve = lambda run: accuracy_until(minutes, run, clock)
    head = ["arm", "steps", "seconds a step", f"accuracy at {minutes / 4:.3g} min", f"{minutes / 2:.3g} min"]
    head += [f"{minutes:.3g} min", "best", "well-formed, last"]
    head += [cell for arm in grpo for cell in (f"min to {arm}'s best", "speed-up")]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for arm, seeds in arms.items():
        cells = [arm, spread([run.steps[-1]["step"] for run in seeds]), f"{step_seconds[arm]:.1f}"]
        for part in (0.25, 0.5, 1):
            cells.append(spread([100 * at(part * minutes, *curve(run)) for run in seeds], "{:.1f}"))
        cells.append(spread([100 * max(curve(run)[1]) for run in seeds], "{:.1f}"))
        cells.append(spread([100 * run.evaluated[-1]["eval_format"] for run in seeds]))
        for other in grpo:
            reached, gained = [], []
            for run in seeds:
                for theirs in arms[other]:
                    if theirs.cfg["seed"] == run.cfg["seed"]:
                        best = max(curve(theirs)[1])
                        reached.append(first_at(best, *curve(run)))
                        gained.append(first_at(best, *curve(theirs)) / reached[-1] if reached[-1] else 1.0)
            cells.append(spread(reached, "{:.1f}", median_high) if reached else "")
            cells.append(spread(gained, "{:.2f}", median_low) if gained else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ----- The figures


def check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise Refusal("needs matplotlib: .venv/bin/pip install -r extras/requirements.txt")


def canvas(columns: int, height: float = 3.4, rows: int = 1, **kwargs):
    """Panels that can be read at the width of a README: 10 inches, letters of 10 points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    return pyplot.subplots(rows, columns, figsize=(10, height), layout="constrained", squeeze=False, **kwargs)


def save(figure, file: Path) -> Path:
    figure.savefig(file, dpi=160)
    figure.clear()
    return file


def colours(runs: list[Run]) -> dict[str, str]:
    shades, found = iter(GRPO_COLOURS * len(runs)), {}
    for arm, (run, *_) in by_arm(runs).items():
        of_rule = RULE_COLOURS[list(RULES).index(run.cfg["rule"]) % len(RULE_COLOURS)]
        found[arm] = next(shades) if run.cfg["n"] == run.cfg["m"] else of_rule
    return found


def label_ends(axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Writes (x, y, text, colour) beside the ends of lines, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[1])
    gap, places = (high - low) * 0.085, [end[1] for end in ends]
    for i in range(1, len(places)):  # up, from the lowest
        places[i] = max(places[i], places[i - 1] + gap)
    places[-1] = min(places[-1], high)
    for i in reversed(range(len(places) - 1)):  # and down again, where they left the panel
        places[i] = min(places[i], places[i + 1] - gap)
    right = axes.get_xlim()[1]
    for (x, y, text, colour), place in zip(ends, places):
        at_end = dict(xycoords="data", textcoords="data", va="center", annotation_clip=False)
        axes.annotate(text, (x, y), (right * 1.02, place), color=colour, fontsize=9.5, **at_end)


def draw_seeds(axes, curves: list[tuple[list[float], list[float]]], colour: str):
    """The mean of some curves as a line, their range as a band. Returns where the line ends."""
    end = min(xs[-1] for xs, _ in curves)
    xs = sorted({x for curve, _ in curves for x in curve if x <= end} | {end})
    values = [[at(x, *curve) for curve in curves] for x in xs]
    means = [fmean(v) for v in values]
    axes.plot(xs, means, color=colour, linewidth=1.8)
    if len(curves) > 1:
        axes.fill_between(
            xs, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.1, lw=0
        )
    return xs[-1], means[-1]


def curves_figure(runs: list[Run], of_clock: dict[str, Clock], rows: dict[str, Callable]):
    """A row of panels for each name in `rows`, which gives (lines of metrics, values) of a run."""
    figure, grid = canvas(
        len(of_clock), 3.6 if len(rows) == 1 else 5.4, len(rows), sharex="col", sharey="row"
    )
    shade = colours(runs)
    for axes, x_name in zip(grid[-1], of_clock):
        axes.set_xlabel(x_name)
    for of_row, (name, values) in zip(grid, rows.items()):
        for axes, clock in zip(of_row, of_clock.values()):
            ends = []
            for arm, seeds in by_arm(runs).items():
                curves = [
                    ([clock(run, row) for row in found], ys) for run in seeds for found, ys in [values(run)]
                ]
                ends.append((*draw_seeds(axes, curves, shade[arm]), arm, shade[arm]))
            axes.set_xlim(left=0)
        of_row[0].set_ylabel(name)
        label_ends(of_row[-1], ends)
    return figure


def accuracy_figure(runs: list[Run], of_clock: dict[str, Clock], paper: bool):
    accuracies = lambda run: (run.evaluated, [100 * row["eval_accuracy"] for row in run.evaluated])
    figure = curves_figure(runs, of_clock, {"test accuracy, %": accuracies})
    if paper:
        data, axes = json.loads((HERE / "paper_results.json").read_text()), figure.axes[1]
        for curve in data["curves"]:
            if curve["m"] == 16 and curve["n"] in (16, 64):
                of_rule = RULE_COLOURS[list(RULES).index(curve["rule"])]
                colour = GRPO_COLOURS[0] if curve["n"] == curve["m"] else of_rule
                xs, ys = [60 * h for h in data["hours"]], [100 * a for a in curve["accuracy"]]
                axes.plot(xs, ys, "--", color=colour, linewidth=1)
        axes.set_title("dashed: the paper's, GRPO 16 and 64 to 16", fontsize=9.5)
    return figure


def smoothed(run: Run, key: str, points: int = 12) -> tuple[list[dict], list[float]]:
    """metrics[key] in means over `points` stretches of about as many steps, each with its middle line."""
    count = min(points, len(run.steps))
    parts = [run.steps[i * len(run.steps) // count : (i + 1) * len(run.steps) // count] for i in range(count)]
    return [part[len(part) // 2] for part in parts], [fmean(row[key] for row in part) for part in parts]


def training_figure(runs: list[Run], of_clock: dict[str, Clock]):
    rows = {"mean reward of all n": "reward_mean", "tokens a completion": "tokens"}
    return curves_figure(
        runs, of_clock, {name: lambda run, key=key: smoothed(run, key) for name, key in rows.items()}
    )


def time_figure(runs: list[Run]):
    shade = colours(runs)
    figure, ((axes,),) = canvas(1, 0.8 + 0.5 * len(shade))
    for place, (arm, seeds) in enumerate(reversed(by_arm(runs).items())):
        left = 0
        for key, alpha in (("generate_seconds", 0.45), ("update_seconds", 1.0)):
            seconds = median(row[key] for run in seeds for row in run.steps)
            axes.barh(place, seconds, left=left, color=shade[arm], alpha=alpha, height=0.6)
            left += seconds
        axes.text(left, place, f" {left:.0f} s", va="center")
    axes.set_yticks(range(len(shade)), reversed(list(shade)))
    axes.set_xlabel("median seconds of a step, as run: generating (pale) and updating")
    return figure


def rewards_figure(runs: list[Run], step: int):
    """Of one run of each arm. At step 1, on a CPU, arms of one n and one seed have the very same rollouts."""
    firsts = [seeds[0] for seeds in by_arm(runs).values()]
    figure, ((*panels,),) = canvas(len(firsts), 3.0, sharex=True, sharey=True)
    shade = colours(runs)
    for axes, run in zip(panels, firsts):
        logged = read_lines(run.folder / "rollouts.jsonl", "step", "reward", "kept")
        rows = [row for row in logged if row["step"] == step]
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
    own = median_step_seconds(runs)
    step_seconds = step_seconds or own
    of_clock = clocks(step_seconds)
    _, as_run, by_step = of_clock.values()
    minutes = minutes or min(as_run(run, run.evaluated[-1]) for run in runs)
    figures = {
        "accuracy": accuracy_figure(runs, of_clock, paper),
        "training": training_figure(runs, of_clock),
        "time": time_figure(runs),
        "rewards": rewards_figure(runs, step),
    }
    files = [save(figure, out / f"{name}.png") for name, figure in figures.items()]
    text = f"By training time as run:\n\n{table(runs, minutes, as_run, own)}\n\n"
    text += f"By steps x the arm's median step time:\n\n{table(runs, minutes, by_step, step_seconds)}\n\n"
    text += "Accuracies in %: mean (lowest to highest) of the seeds. Times and speed-ups: median, by seed.\n"
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
    parser.add_argument(
        "--timing", type=Path, help="a comparison's timing.json (default: the runs' own steps)"
    )
    args = parser.parse_args()
    if not args.out.is_dir():
        raise Refusal(f"--out is {args.out}, but there is no such folder")
    found = [read_run(run) for run in args.runs]
    try:
        seconds = {run.label: json.loads(args.timing.read_text())[run.label] for run in found if args.timing}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(f"--timing is {args.timing}, but cannot be used: {error}") from None
    return show(found, args.out, seconds, step=args.step, paper=args.paper)


if __name__ == "__main__":
    sys.exit(explained(main, "plot_runs.py", trains=False))
