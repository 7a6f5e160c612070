"""The three down-samplers of PODS (arXiv 2504.13818): which m of a prompt's n rollouts to learn from.

Every rule takes `rewards`, a float tensor of shape (..., n) with one row a prompt, and m. It returns a
LongTensor of shape (..., m) on the same device: distinct indices along the last axis, each row chosen by
itself. It raises ValueError, naming the value, for m < 1, m > n, a NaN or infinite reward, an empty tensor.

The file needs only torch and works alone:

    >>> max_variance(torch.tensor([0.2, 1.0, 0.1, 0.8, 0.0]), m=3)
    tensor([1, 2, 4])                                            # the rewards 1.0, 0.1 and 0.0
"""

import torch


def max_variance(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The m rollouts whose rewards vary most: exact, in O(n log n) a row (the paper's max-variance rule).

    Each row holds the k highest rewards, best first, then the m - k lowest, worst last. How ties fall:
    - between several k of the same variance (to 1e-12 of the best), the most balanced: k nearest to m / 2,
      and the larger of two equally near. So m = 1, where every variance is 0, keeps the best rollout.
    - between equal rewards, the highest are taken from the front of the row and the lowest from its back.
    """
    _check(rewards, m)
    n = rewards.shape[-1]

    # 1. Why some "k highest and m - k lowest" is always a best subset.
    #
    #    Let one kept reward x vary and hold the m - 1 others. With s and q their sum and sum of squares,
    #
    #        Var(x) = (q + x^2) / m - ((s + x) / m)^2    and so    Var''(x) = 2 / m - 2 / m^2 >= 0.
    #
    #    Var is convex in x, and a convex function on an interval is largest at one of its ends. Exchange:
    #    where a subset keeps x but leaves out rewards on both sides of it in the sorted row, let y be the
    #    lowest left out and z the highest. One of the swaps "y for x" and "z for x" does not lower the
    #    variance, and it makes the block of kept rewards at the bottom or at the top of the row longer: after
    #    at most m swaps, what is kept is these two blocks. Of the (n choose m) subsets only m + 1 are left to
    #    compare, k = 0 ... m.

    ordered, order = rewards.double().sort(dim=-1, descending=True, stable=True)

    # 2. Shift and scale. Neither changes which subset wins. Unshifted, sum(r^2) / m - (sum(r) / m)^2 would be
    #    the difference of two huge, nearly equal numbers: of rewards like 1e8 + {0, 1} no correct digit would
    #    be left. The shift is by one of the row's own rewards, since the difference of two close floats has
    #    no rounding error (Sterbenz); the scale keeps r^2 from overflowing. Equal rewards become zeros.

    centred = ordered - ordered[..., n // 2, None]
    centred = centred / centred.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)

    # 3. Why running sums suffice. A variance needs only the sum of r and the sum of r^2. For k = 0, they are
    #    those of the m lowest. From k to k + 1, one reward of those leaves and one comes: position n - m + k
    #    of the sorted row, the highest of the block at the bottom, and position k, next in the block at the
    #    top. So each k costs one subtraction, all m + 1 together O(m). What costs O(n log n) is the sort.
    #
    #    In numbers, n = 5, m = 3, the rewards 1.0 0.8 0.2 0.1 0.0 (not shifted here, to keep them short):
    #
    #        k    kept           sum r               sum r^2                sum r^2 / 3 - (sum r / 3)^2
    #        0    0.2 0.1 0.0                  0.3                   0.05   0.007
    #        1    1.0 0.1 0.0    + 1.0 - 0.2 = 1.1   + 1.00 - 0.04 = 1.01   0.202   <- the best
    #        2    1.0 0.8 0.0    + 0.8 - 0.1 = 1.8   + 0.64 - 0.01 = 1.64   0.187
    #        3    1.0 0.8 0.2    + 0.2 - 0.0 = 2.0   + 0.04 - 0.00 = 1.68   0.116

    powers = torch.stack((centred, centred**2))
    bottom = powers[..., n - m :]
    swaps = powers[..., :m] - bottom
    sums = torch.cat((bottom.sum(dim=-1, keepdim=True), swaps), dim=-1).cumsum(dim=-1)
    mean, mean_square = sums / m  # (..., m + 1) each
    variance = (mean_square - mean**2).clamp(min=0)  # 0 for m = 1, which rounding could make less

    # 4. The best k. For binary rewards, p = (ones kept) / m gives the variance p (1 - p), a parabola with its
    #    top at p = 1/2: half right and half wrong, or as near to it as the row allows. When a row runs out of
    #    ones or zeros, or all its rewards are equal, several k stand for the same variance. Rounding must not
    #    choose between them: variances within 1e-12 of the best count as equal, and the most balanced k wins.
    #    (The tenth makes the larger of two equally near k win: for m = 5, 2 and 3 are off by 0.6 and 0.4.)

    k = torch.arange(m + 1, device=rewards.device)
    imbalance = (k - (m / 2 + 0.1)).abs()
    tied = variance >= variance.amax(dim=-1, keepdim=True) * (1 - 1e-12)
    best_k = torch.where(tied, imbalance, torch.inf).argmin(dim=-1, keepdim=True)

    # 5. Positions in the sorted row: 0 ... k - 1 from the top, then n - (m - k) ... n - 1 from the bottom.

    slot = k[:m]
    return order.gather(-1, slot + (n - m) * (slot >= best_k))


def max_reward(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The m highest rewards, best first; between equal rewards, from the front of the row.

    What it loses: the failures. When m or more rollouts share the highest reward, all that is kept is equal:
    every advantage is 0 and the prompt teaches nothing. And the worst rollouts, which show what to move away
    from, are the first to go. The paper finds it the worst of the three.
    """
    _check(rewards, m)
    return rewards.sort(dim=-1, descending=True, stable=True).indices[..., :m]


def random_subset(rewards: torch.Tensor, m: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """A uniformly random m of n, from `generator` or, without one, from torch's global generator.

    What it loses: the rare rollouts. It is GRPO with a group of m, after paying for n. Of 64 rollouts with
    one right, 16 at random miss it 3 times in 4.
    """
    _check(rewards, m)
    keys = torch.rand(rewards.shape, generator=generator, device=rewards.device)
    return keys.argsort(dim=-1)[..., :m]


def _check(rewards: torch.Tensor, m: int) -> None:
    if rewards.numel() == 0 or rewards.dim() == 0:
        raise ValueError(f"rewards must hold at least one rollout, got the shape {tuple(rewards.shape)}")
    if not 1 <= m <= rewards.shape[-1]:
        raise ValueError(f"m must be between 1 and n = {rewards.shape[-1]}, got m = {m}")
    if not torch.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards[~torch.isfinite(rewards)][0].item()}")


RULES = {"max_variance": max_variance, "max_reward": max_reward, "random": random_subset}
