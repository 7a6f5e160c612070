"""The one look of all figures of this repository. The only file that imports matplotlib.

    figure, panels = canvas(columns=2, height=3.4)
    panels[0, 0].plot(xs, ys, color=arm_colours([settings])[arm_name(settings)])
    label_ends(panels[0, 0], [(xs[-1], ys[-1], "max-variance 64 to 16", colour)])
    save(figure, "docs/figure.png")

Made for a README's column of about 850 pixels: there, letters come out as large as the text around
them. The background is white and opaque, so a page in dark mode shows the same figure.
"""

from pathlib import Path

WIDTH, DPI = 8.5, 200  # inches; 1700 pixels, two for each of a README's column
INK, GREY, PALE = "#1f2328", "#6e7781", "#d0d7de"  # text; remarks; what stands in the background
# Okabe and Ito's colours, which the colour-blind can tell apart.
GRPO_COLOURS = [INK, "#8c8c8c"]  # the smaller group first
RULE_COLOURS = {"max_variance": "#D55E00", "max_reward": "#0072B2", "random": "#009E73"}
SPARE_COLOURS = ["#CC79A7", "#E69F00", "#56B4E9", "#8B5A2B", "#6A3D9A"]


def arm_name(settings: dict) -> str:
    """What is compared, of a run's settings n, m and rule: "GRPO 16", "max-variance 64 to 16"."""
    n, m, rule = settings["n"], settings["m"], settings["rule"]
    return f"GRPO {n}" if n == m else f"{rule.replace('_', '-')} {n} to {m}"


def arm_colours(runs: list[dict]) -> dict[str, str]:
    """A colour for each arm among the settings of these runs: GRPO first, then rule by rule.

    A rule's first arm has the rule's own colour, the same in all figures; others have spare ones.
    """
    found = {}
    for settings in sorted(runs, key=_place):
        own = RULE_COLOURS.get(settings["rule"], SPARE_COLOURS[0])
        first = GRPO_COLOURS if settings["n"] == settings["m"] else [own]
        free = [c for c in [*first, *SPARE_COLOURS] if c not in found.values()]
        found.setdefault(arm_name(settings), free[0] if free else GREY)
    return found


def _place(settings: dict) -> tuple[int, int, int]:
    n, m, rules = settings["n"], settings["m"], [*RULE_COLOURS, settings["rule"]]
    return (0 if n == m else 1 + rules.index(settings["rule"])), n, m


def canvas(columns: int = 1, rows: int = 1, height: float = 3.4, **options):
    """An empty figure of `height` inches and its panels, an array (rows, columns) of axes.

    Options are those of matplotlib's Figure.subplots, as sharex or width_ratios. Raises ImportError
    where matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    look = {"font.size": 10, "axes.titlesize": 10.5, "axes.titlelocation": "left"}
    look |= {"axes.spines.top": False, "axes.spines.right": False, "axes.grid.axis": "y"}
    look |= {"axes.grid": True, "axes.axisbelow": True, "grid.color": "#eaeef2"}
    look |= dict.fromkeys(["text.color", "axes.labelcolor", "axes.titlecolor"], INK)
    look |= dict.fromkeys(["xtick.labelcolor", "ytick.labelcolor"], INK)
    look |= dict.fromkeys(["axes.edgecolor", "xtick.color", "ytick.color"], GREY)
    matplotlib.rcParams.update(look)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def label_ends(axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Writes (x, y, text, colour) right of a panel, at the heights of its lines' ends.

    Pushed apart where they would overlap. To be called when everything else is drawn, since what
    comes later may change the scale.
    """
    axes.figure.draw_without_rendering()  # only now has the panel its size
    line = 13 / 72 * DPI / axes.get_window_extent().height  # the height of a line of text
    to_panel = axes.transData + axes.transAxes.inverted()  # 0 is its lower edge, 1 its upper one
    ends = sorted(ends, key=lambda end: end[1])
    heights = [to_panel.transform(end[:2])[1] for end in ends]
    for i in range(1, len(ends)):  # up, from the lowest
        heights[i] = max(heights[i], heights[i - 1] + line)
    for i in reversed(range(len(ends))):  # and down again, where they left the panel
        above = heights[i + 1] if i + 1 < len(ends) else 1 + line
        heights[i] = min(heights[i], above - line)
    for (_, _, text, colour), height in zip(ends, heights):
        axes.annotate(text, (1.02, height), xycoords="axes fraction", color=colour, va="center")


def save(figure, path: Path | str) -> None:
    """Writes the figure as a PNG. Raises OSError where that is not possible."""
    figure.savefig(path, dpi=DPI, pad_inches=0.08)
