"""Statistics of runs that are paired by seed, and of curves. Pure Python and numpy."""

import itertools
import math

import numpy as np

# ----- Differences between two arms, a value for each seed


def bootstrap_interval(
    differences: list[float], level: float = 0.95, draws: int = 10_000
) -> tuple[float, float]:
    """Percentile interval of the mean of paired differences, over resampled seeds (draws fixed)."""
    values = np.asarray(differences, dtype=float)
    chosen = np.random.default_rng(0).integers(len(values), size=(draws, len(values)))
    outside = (1 - level) / 2
    low, high = np.quantile(values[chosen].mean(axis=1), [outside, 1 - outside])
    return float(low), float(high)


def permutation_p(differences: list[float], most: int = 16, draws: int = 100_000) -> float:
    """Two-sided p of a mean of 0, for paired differences: if the arms were the same, each sign
    could as well be the other.

    The share of all 2^seeds choices of signs whose mean is at least as far from 0; over `most`
    seeds, of random choices, the true one included. The smallest p of s seeds is 2 / 2^s.
    """
    values = np.asarray(differences, dtype=float)
    count = len(values)
    if count <= most:
        signs = np.array(list(itertools.product((1, -1), repeat=count)))
    else:
        signs = np.random.default_rng(0).choice((1, -1), size=(draws, count))
        signs[0] = 1
    reached = np.abs(signs @ values) >= abs(values.sum()) * (1 - 1e-12)
    return float(reached.mean())


# ----- Curves: values ys at increasing times xs, linear between and constant outside of them


def value_at(x: float, xs: list[float], ys: list[float]) -> float:
    return float(np.interp(x, xs, ys))


def mean_height(xs: list[float], ys: list[float], end: float) -> float:
    """The area under the curve from 0 to `end`, divided by `end`: in the unit of ys."""
    inside = sorted({0.0, end, *(x for x in xs if 0 < x < end)})
    return float(np.trapezoid(np.interp(inside, xs, ys), inside) / end)


def first_time(level: float, xs: list[float], ys: list[float], end: float) -> tuple[float, bool]:
    """When an evaluation first showed `level`, and True; or False, and until when it had not."""
    for x, y in zip(xs, ys):
        if y >= level and x <= end:
            return x, True
    return min(end, xs[-1]), False


# ----- Times to an event, of which some are only known to be longer


def survival(times: list[tuple[float, bool]]) -> list[tuple[float, float]]:
    """Kaplan and Meier's curve: (time, share of runs not there yet from then on), from (0, 1).

    `times` are those of `first_time`. A run that was watched until t without getting there (False)
    counts as at risk up to and including t, and then leaves: it is neither there nor never there.
    """
    share, curve = 1.0, [(0.0, 1.0)]
    for moment in sorted({time for time, reached in times if reached}):
        at_risk = sum(time >= moment for time, _ in times)
        share *= 1 - sum(reached and time == moment for time, reached in times) / at_risk
        curve.append((moment, share))
    return curve


def restricted_mean(times: list[tuple[float, bool]], end: float) -> float:
    """The mean of min(time, end): the area under the survival curve up to `end`."""
    curve = [(time, share) for time, share in survival(times) if time < end] + [(end, 0.0)]
    return sum(share * (later - time) for (time, share), (later, _) in zip(curve, curve[1:]))


def median_time(times: list[tuple[float, bool]]) -> float:
    """When half of the runs are there; infinite if they never are."""
    return next((time for time, share in survival(times) if share <= 0.5 + 1e-12), math.inf)
