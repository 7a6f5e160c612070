"""The down-samplers of PODS (arXiv 2504.13818): which m of a prompt's n rollouts to train on.

Every rule takes `rewards`, a float tensor of shape (..., n) with one row for each prompt, and m. It
returns a LongTensor of shape (..., m) on the same device: for each row, the positions of the m
rollouts to keep, all different. Rows do not influence each other. ValueError, naming the value, if
m < 1 or m > n, if a reward is NaN or infinite, or if the tensor is empty.

The file works alone and needs only torch:

    >>> max_variance(torch.tensor([0.2, 1.0, 0.1, 0.8, 0.0]), m=3)
    tensor([1, 2, 4])                                      # the rewards 1.0, 0.1 and 0.0
"""

import torch


def max_variance(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The m rollouts whose rewards have the largest variance: the rule that the paper proposes.

    Exact, in O(n log n) a row. Each row of the result holds the k highest rewards, best first, then
    the m - k lowest, worst last. Ties are broken in a fixed way:

    - If several k give the same variance (to 1e-12 of the best), the most balanced one wins: the k
      nearest to m / 2, and of two equally near the larger. So m = 1, where every variance is 0,
      keeps the best rollout.
    - Of equal rewards, the highest are taken from the front of the row, the lowest from its back.
    """
    _check(rewards, m)
    n = rewards.shape[-1]

    # 1. Why the best subset can always be "the k highest and the m - k lowest", for some k.
    #
    #    Hold all rewards of a subset fixed but one, x. With s the sum of the others and q the sum
    #    of their squares, the variance of the subset is
    #
    #        Var(x) = (q + x^2) / m - ((s + x) / m)^2    so that    Var''(x) = 2 / m - 2 / m^2 >= 0.
    #
    #    Var is convex in x, and a convex function on an interval is largest at one of the two ends.
    #
    #    Now sort the row, and suppose that the subset keeps x but leaves out rewards on both sides
    #    of it. Let y be the lowest reward left out and z the highest. As x lies between them, at
    #    least one of two swaps does not lower the variance: to take y for x, or to take z for x.
    #    Either makes a block of kept rewards longer by one, y the block at the bottom of the row,
    #    z the one at its top. After at most m swaps nothing is kept outside the two blocks. So of
    #    the (n choose m) subsets only m + 1 need to be compared, k = 0 ... m.

    ordered, order = rewards.double().sort(dim=-1, descending=True, stable=True)

    # 2. Shift and scale the row. Neither changes which subset is best, but rounding needs both.
    #
    #    The variance below is sum(r^2) / m - (sum(r) / m)^2. For rewards like 1e8 + {0, 1} that is
    #    the difference of two huge, nearly equal numbers, and no correct digit would be left. So we
    #    shift the row by one of its own rewards: the difference of two floats that are close to
    #    each other has no rounding error (Sterbenz's lemma). The scale keeps r^2 from overflowing.
    #    A row of equal rewards becomes all zeros, which the clamp saves from 0 / 0.

    centred = ordered - ordered[..., n // 2, None]
    largest = centred.abs().amax(dim=-1, keepdim=True)
    centred = centred / largest.clamp(min=torch.finfo(torch.float64).tiny)

    # 3. All m + 1 variances, from running sums.
    #
    #    A variance needs only the sum of r and the sum of r^2. For k = 0 these are the sums over
    #    the m lowest rewards. From k to k + 1 one reward leaves and one comes: the highest of the
    #    block at the bottom leaves (position n - m + k of the sorted row), the next of the block at
    #    the top comes (position k). So each k costs one subtraction, and all of them together O(m).
    #    Only the sort takes O(n log n).
    #
    #    By hand, for n = 5, m = 3 and the rewards 1.0 0.8 0.2 0.1 0.0 (not shifted, to be short):
    #
    #        k   kept         sum r               sum r^2                sum r^2 / 3 - (sum r / 3)^2
    #        0   0.2 0.1 0.0                 0.3                   0.05   0.007
    #        1   1.0 0.1 0.0  + 1.0 - 0.2 =  1.1  + 1.00 - 0.04 =  1.01   0.202   <- the best
    #        2   1.0 0.8 0.0  + 0.8 - 0.1 =  1.8  + 0.64 - 0.01 =  1.64   0.187
    #        3   1.0 0.8 0.2  + 0.2 - 0.0 =  2.0  + 0.04 - 0.00 =  1.68   0.116

    powers = torch.stack((centred, centred**2))  # (2, ..., n)
    bottom = powers[..., n - m :]
    swaps = powers[..., :m] - bottom
    sums = torch.cat((bottom.sum(dim=-1, keepdim=True), swaps), dim=-1).cumsum(dim=-1)
    mean, mean_square = sums / m  # (..., m + 1) each, one entry for each k
    variance = (mean_square - mean**2).clamp(min=0)  # rounding could make the 0 of m = 1 negative

    # 4. The best k.
    #
    #    For rewards of 0 and 1, let p be the share of ones among the m kept. The variance p (1 - p)
    #    is a parabola with its top at p = 1/2: half right and half wrong, or as near to it as the
    #    row allows. Where the row runs out of ones or zeros, or where all rewards are equal,
    #    several k give the same variance, and rounding must not choose between them. So all within
    #    1e-12 of the best count as equal, and the most balanced k wins. The 0.1 lets the larger of
    #    two equally near k win: for m = 5, k = 2 is off by 0.6 and k = 3 by 0.4.

    k = torch.arange(m + 1, device=rewards.device)
    imbalance = (k - (m / 2 + 0.1)).abs()
    tied = variance >= variance.amax(dim=-1, keepdim=True) * (1 - 1e-12)
    best_k = torch.where(tied, imbalance, torch.inf).argmin(dim=-1, keepdim=True)

    # 5. In the sorted row, keep positions 0 ... k - 1 and n - (m - k) ... n - 1. `order` says where
    #    in `rewards` these are.

    slot = k[:m]
    return order.gather(-1, slot + (n - m) * (slot >= best_k))


def max_reward(rewards: torch.Tensor, m: int) -> torch.Tensor:
    """The m highest rewards, best first; of equal rewards, those at the front of the row.

    It throws away the failures. Where m or more rollouts share the highest reward, all that it
    keeps are equal: every advantage is 0, and the prompt teaches nothing. And the worst rollouts,
    which show what to move away from, are the first to go. The paper finds it the worst of the
    three rules.
    """
    _check(rewards, m)
    return rewards.sort(dim=-1, descending=True, stable=True).indices[..., :m]


def random_subset(
    rewards: torch.Tensor, m: int, generator: torch.Generator | None = None
) -> torch.Tensor:
    """m of the n rollouts, every subset equally likely, whatever the rewards are.

    The random numbers come from `generator`, or from torch's global generator if there is none.

    It throws away rare rollouts as readily as common ones: it is GRPO with a group of m, after n
    were paid for. Of 64 rollouts with a single right one, 16 drawn at random miss it 3 times in 4.
    """
    _check(rewards, m)
    keys = torch.rand(rewards.shape, generator=generator, device=rewards.device)
    return keys.argsort(dim=-1)[..., :m]


def _check(rewards: torch.Tensor, m: int) -> None:
    """ValueError, naming the bad value, unless m of `rewards` can be chosen."""
    if rewards.numel() == 0 or rewards.dim() == 0:
        shape = tuple(rewards.shape)
        raise ValueError(f"rewards must hold at least one rollout, got the shape {shape}")
    n = rewards.shape[-1]
    if not 1 <= m <= n:
        raise ValueError(f"m must be between 1 and n = {n}, got m = {m}")
    finite = torch.isfinite(rewards)
    if not finite.all():
        raise ValueError(f"rewards must be finite, got {rewards[~finite][0].item()}")


RULES = {"max_variance": max_variance, "max_reward": max_reward, "random": random_subset}
