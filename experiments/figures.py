"""Draws all figures and prints all tables, from committed results: python -m experiments.figures

    docs/method.png      rewards of one real group, the variance of each choice, what rules keep
    docs/paper.png       the authors' curves
    docs/accuracy.png    our study: GRPO on m, GRPO on all n, max-variance; docs/arms.png: all arms
    docs/gradients.png, docs/gradients-trained.png

Takes seconds, and needs neither a model nor a GPU. What has no results yet is named in a line.
"""

import json
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from experiments.paired import (
    bootstrap_interval,
    first_time,
    mean_height,
    median_time,
    permutation_p,
    restricted_mean,
    value_at,
)
from experiments.study import RESULTS, Parser, column, markdown, read_study
from sampling import RULES
from tools.drawing import (
    INK,
    PALE,
    RULE_COLOURS,
    arm_colours,
    arm_name,
    canvas,
    label_ends,
    save,
)

HERE = Path(__file__).resolve().parent
STUDY = "demonstration"
LEVEL = 0.5  # of the times to a level
BOTH, RIGHT = "eval/accuracy_with_format", "eval/accuracy"
THREE = ("grpo_m", "grpo_n", "max_variance")


# ----- The method


def variances(ordered: list[float], m: int) -> list[float]:
    """Of the k highest and the m - k lowest of rewards that fall, for k = 0 ... m."""
    n = len(ordered)
    return [float(np.var(ordered[:k] + ordered[n - m + k :])) for k in range(m + 1)]


def method_figure(rewards: list[float], m: int = 16):
    ordered = sorted(rewards, reverse=True)
    n, colour = len(ordered), RULE_COLOURS["max_variance"]
    options = dict(rows=3, height=5.4, height_ratios=[1.15, 1.15, 0.8])
    figure, ((top,), (middle,), (bottom,)) = canvas(**options)
    ranks = range(1, n + 1)

    found = variances(ordered, m)
    best = len(found) - 1 - int(np.argmax(found[::-1]))
    kept = [rank <= best or rank > n - m + best for rank in ranks]
    shades = [colour if keep else PALE for keep in kept]
    top.vlines(ranks, 0, ordered, color=shades, linewidth=3)
    top.scatter(ranks, ordered, color=shades, s=22, zorder=3)
    top.set(title=f"1. The rewards of {n} rollouts of one prompt, sorted", ylabel="reward")
    top.set(xlim=(0, n + 1), ylim=(-0.08, 1.3), xticks=[1, *range(8, n + 1, 8)])

    middle.plot(range(m + 1), found, "o-", color=INK, markersize=4, clip_on=False)
    middle.plot(best, found[best], "o", color=colour, markersize=9)
    text = f"k = {best}: the {best} highest and the {m - best} lowest"
    place = dict(xytext=(best, max(found) * 0.55), ha="center", color=colour)
    middle.annotate(
        text, (best, found[best]), arrowprops={"arrowstyle": "-", "color": colour}, **place
    )
    title = f"2. The variance of the k highest and the {m} - k lowest, for each k"
    middle.set(title=title, xlabel="k", ylabel="variance", ylim=(0, max(found) * 1.15))
    middle.set(xticks=range(0, m + 1, 2), xlim=(-0.5, m + 0.5))

    torch.manual_seed(0)
    row = torch.tensor(ordered, dtype=torch.float64)
    for place, rule in enumerate(("max_variance", "max_reward", "random")):
        chosen = set((RULES[rule](row, m) + 1).tolist())
        shades = [RULE_COLOURS[rule] if rank in chosen else PALE for rank in ranks]
        bottom.bar(ranks, 0.7, bottom=-place - 0.35, width=0.8, color=shades)
        variance = np.var([ordered[rank - 1] for rank in chosen])
        bottom.text(
            n + 1.5, -place, f"variance {variance:.2f}", va="center", color=RULE_COLOURS[rule]
        )
    names = ["max-variance", "max-reward", "random"]
    bottom.set(title=f"3. The {m} that each rule keeps", xlim=(0, n + 1), ylim=(-2.5, 0.5))
    bottom.set(yticks=[0, -1, -2], yticklabels=names, xticks=[1, *range(8, n + 1, 8)])
    bottom.set_xlabel("rollout, from the highest reward to the lowest")
    bottom.grid(False)
    bottom.tick_params(length=0)
    return figure


# ----- The authors' curves


def paper_figure(paper: dict):
    figure, ((axes,),) = canvas()
    curves = {(c["rule"], c["n"], c["m"]): c for c in paper["curves"]}
    chosen = [
        curves[case] | {"rule": case[0]}
        for case in (("max_variance", 16, 16), ("max_variance", 64, 16), ("random", 64, 16))
    ]
    colours, ends = arm_colours(chosen), []
    for curve in chosen:
        name, shares = arm_name(curve), [100 * share for share in curve["accuracy"]]
        axes.plot(paper["hours"], shares, "o-", color=colours[name], markersize=3.5, clip_on=False)
        ends.append((paper["hours"][-1], shares[-1], name, colours[name]))
    axes.set(xlabel="hours of training on one GPU", ylabel="% right on GSM8K's test split")
    axes.set_xlim(0, paper["hours"][-1])
    label_ends(axes, ends)
    return figure


def paper_table(paper: dict) -> str:
    hours = (0.5, 1.0, 2.0, 3.0, 6.0)
    rows = []
    for curve in paper["curves"]:
        shares = dict(zip(paper["hours"], curve["accuracy"]))
        numbers = [shares[h] for h in hours] + [max(shares.values())]
        numbers.append(max(curve["accuracy_and_format"]))
        rows.append([arm_name(curve), *(f"{100 * x + 1e-9:.1f}" for x in numbers)])
    head = ["% right after", *(f"{h:g} h" for h in hours), "best", "right and well-formed, best"]
    return markdown(head, rows)


# ----- Our study


def curve(run: dict, key: str, plan: dict) -> tuple[list[float], list[float]]:
    """Minutes of training (steps x the arm's median step time), and the metric there."""
    steps, values = column(run, key)
    return [step * plan["step_seconds"][run["arm"]] / 60 for step in steps], values


def measured(run: dict, plan: dict) -> dict[str, float]:
    """What is compared of a run. Shares in percent; rewards from 0 to 1.2."""
    end, found = plan["minutes"], {}
    for what, key in (("right and well-formed", BOTH), ("right", RIGHT)):
        xs, ys = curve(run, key, plan)
        found[f"{what}, at the end, %"] = 100 * value_at(end, xs, ys)
        found[f"{what}, mean over the run, %"] = 100 * mean_height(xs, ys, end)
    steps, rewards = column(run, "rollout/reward_mean")
    last = [r for step, r in zip(steps, rewards) if step > 0.8 * steps[-1]]
    found["mean reward of samples, last fifth"] = fmean(last)
    return found


def comparison(arms: dict[str, list[dict]], plan: dict, measure: str) -> dict[str, dict]:
    """Of each arm: the values by seed, and the paired differences to grpo_m's of the same seed."""
    base = {run["seed"]: measured(run, plan)[measure] for run in arms.get("grpo_m", [])}
    found = {}
    for arm, runs in arms.items():
        values = {run["seed"]: measured(run, plan)[measure] for run in runs}
        differences = [value - base[seed] for seed, value in values.items() if seed in base]
        found[arm] = {"values": list(values.values()), "differences": differences}
    return found


def cells_of(found: dict, arm: str, measure: str) -> list[str]:
    """Of one arm: the mean and range of the seeds; the mean of the paired differences with its
    95 % interval, and p."""
    form = ".1f" if measure.endswith("%") else ".2f"
    values, differences = found["values"], found["differences"]
    cells = [f"{fmean(values):{form}}", f"{min(values):{form}} to {max(values):{form}}"]
    if arm == "grpo_m" or len(differences) < 2:
        return [*cells, "", ""]
    mean, low, high = (
        f"{x:+{form}}" for x in (fmean(differences), *bootstrap_interval(differences))
    )
    return [*cells, f"{mean} ({low} to {high})", f"{permutation_p(differences):.3f}"]


def name_of(runs: list[dict]) -> str:
    return arm_name(runs[0]["settings"])


def short_table(arms: dict, plan: dict) -> str:
    """Four rows, for README.md."""
    end, whole = (
        f"right and well-formed, {what}, %" for what in ("at the end", "mean over the run")
    )
    head = ["arm", "runs", end, "more than GRPO", whole, "more than GRPO"]
    rows = []
    for arm, runs in list(arms.items())[:4]:
        cells = [name_of(runs), str(len(runs))]
        for measure in (end, whole):
            found = comparison(arms, plan, measure)[arm]
            mean, _, difference, _ = cells_of(found, arm, measure)
            cells += [mean, difference]
        rows.append(cells)
    return markdown(head, rows)


def long_table(arms: dict, plan: dict) -> str:
    """Every measure of every arm, for docs/results.md."""
    rows = []
    for measure in measured(next(iter(arms.values()))[0], plan):
        rows.append([f"**{measure}**", "", "", "", ""])
        for arm, found in comparison(arms, plan, measure).items():
            rows.append([name_of(arms[arm]), *cells_of(found, arm, measure)])
    return markdown(["arm", "mean", "seeds", "more than GRPO with n = m (95 %)", "p"], rows)


def cost_table(arms: dict, plan: dict) -> str:
    """Steps and time of each arm, and when it gets to LEVEL, for docs/results.md."""
    rows = []
    for arm, runs in arms.items():
        end = plan["minutes"]
        times = [first_time(LEVEL, *curve(run, BOTH, plan), end) for run in runs]
        as_run = fmean(run["trained_seconds_as_run"] for run in runs) / 60
        cells = [f"{plan['step_seconds'][arm]:.1f}", str(plan["steps"][arm]), f"{as_run:.1f}"]
        median = median_time(times)
        cells += [f"{sum(reached for _, reached in times)} of {len(times)}"]
        cells += [
            f"{restricted_mean(times, end):.1f}",
            f"{median:.1f}" if median <= end else "never",
        ]
        rows.append([name_of(runs), *cells])
    head = ["arm", "seconds a step", "steps", "minutes as run", f"runs that reach {LEVEL:.0%}"]
    return markdown([*head, f"mean minutes to it, at most {end:g}", "median"], rows)


def study_figure(arms: dict, plan: dict, keys: dict[str, str]):
    """A panel for each metric of `keys`, with its title: thin lines are seeds, thick ones means."""
    figure, (panels,) = canvas(len(keys), height=3.6, sharey=True)
    colours = arm_colours([runs[0]["settings"] for runs in arms.values()])
    for axes, (key, title) in zip(panels, keys.items()):
        ends = []
        for runs in arms.values():
            name, curves = name_of(runs), [curve(run, key, plan) for run in runs]
            times = sorted({x for xs, _ in curves for x in xs})
            mean = [100 * fmean(value_at(x, *each) for each in curves) for x in times]
            for xs, ys in curves:
                shares = [100 * y for y in ys]
                axes.plot(xs, shares, color=colours[name], linewidth=0.7, alpha=1 / len(arms))
            axes.plot(times, mean, color=colours[name], linewidth=2.4)
            ends.append((times[-1], mean[-1], name, colours[name]))
        axes.set(xlabel="minutes of training", title=title)
        axes.set(xlim=(0, plan["minutes"]), ylim=(0, 100))
    panels[0].set_ylabel("% of held-out problems")
    label_ends(panels[-1], ends)
    return figure


# ----- Gradients of subsets


def gradients_figure(found: dict):
    panels = {
        "cosine": "cosine to the gradient of all n",
        "norm": "norm, of that of all n",
        "zero_std_groups": "groups without gradient",
    }
    figure, (columns,) = canvas(3, height=3.4)
    for axes, (key, title) in zip(columns, panels.items()):
        for rule, colour in RULE_COLOURS.items():
            rows = [row for row in found["rows"] if row["rule"] == rule]
            ms = [row["m"] for row in rows]
            low, mean, high = ([row[key][at] for row in rows] for at in ("low", "mean", "high"))
            axes.plot(ms, mean, "o-", color=colour, markersize=4, label=rule.replace("_", "-"))
            axes.fill_between(ms, low, high, color=colour, alpha=0.13, linewidth=0)
        axes.set(title=title, xlabel=f"m of n = {found['n']}", xscale="log")
        axes.set_xticks(ms, ["" if m == 48 else str(m) for m in ms])
        axes.minorticks_off()
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    options = dict(loc="outside lower center", ncols=3, frameon=False)
    figure.legend(handles=columns[0].lines, **options)
    return figure


def gradients_table(found: dict) -> str:
    keys = {"cosine": ".2f", "norm": ".2f", "zero_std_groups": ".0%"}
    rows = [
        [row["rule"].replace("_", "-"), str(row["m"])]
        + [format(row[key]["mean"], form) for key, form in keys.items()]
        for row in found["rows"]
    ]
    return markdown(["rule", "m", "cosine", "norm", "groups without gradient"], rows)


# ----- Speed


def speed_table(sections: dict[str, list[list]]) -> str:
    """What bench.py measured."""

    def short(x: float) -> str:
        return f"{x:.0f}" if x >= 1000 else f"{x:.3g}"

    rows = []
    for name, lines in sections.items():
        rows.append([f"**{name}**", "", "", ""])
        for what, value, unit, beside, ratio in lines:
            cells = [what, f"{short(value)} {unit}", beside, "" if ratio is None else short(ratio)]
            rows.append(cells)
    return markdown(["what", "measured", "beside", "ratio"], rows)


# ----- All of them


def read(name: str) -> dict | None:
    """A result of this folder; None, and a line, where there is none yet."""
    file = RESULTS / f"{name}.json"
    if file.exists():
        return json.loads(file.read_text())
    print(f"There is no {file} yet: left out.", file=sys.stderr)
    return None


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("study", nargs="?", default=STUDY, help=f"its name (default {STUDY})")
    parser.add_argument(
        "--out", type=Path, default=HERE.parent / "docs", help="folder (default docs)"
    )
    args = parser.parse_args()
    if not args.out.is_dir():
        parser.error(f"--out is {args.out}, but there is no such folder")
    paper = json.loads((HERE / "paper_results.json").read_text())
    figures = {"paper": paper_figure(paper)}
    tables = {"The authors' results": paper_table(paper)}
    if group := read("method_group"):
        figures["method"] = method_figure(group["rewards"])
    plan, arms = read(f"{args.study}/timing"), read_study(args.study)
    if plan and arms:
        three = {arm: runs for arm, runs in arms.items() if arm in THREE}
        figures["accuracy"] = study_figure(three or arms, plan, {BOTH: "right and well-formed"})
        panels = {BOTH: "right and well-formed", RIGHT: "right, in any form"}
        figures["arms"] = study_figure(arms, plan, panels)
        tables[f"{args.study}, for README.md"] = short_table(arms, plan)
        tables[f"{args.study}, all arms and measures"] = long_table(arms, plan)
        tables[f"{args.study}, cost and time to a level"] = cost_table(arms, plan)
    elif plan:
        print(f"The study {args.study} has no finished run yet: left out.", file=sys.stderr)
    for name in ("gradients", "gradients-trained"):
        if found := read(name):
            figures[name] = gradients_figure(found)
            tables[name] = gradients_table(found)
    if bench := read("bench"):
        tables[f"Speed, on {bench['machine']}"] = speed_table(bench["sections"])
    for title, table in tables.items():
        print(f"{title}\n\n{table}\n")
    for name, figure in figures.items():
        save(figure, args.out / f"{name}.png")
    print("Drawn:", *(f"{args.out / name}.png" for name in figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
