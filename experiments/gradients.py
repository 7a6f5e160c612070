"""Where does the choice of the subset matter? Each rule's gradient beside that of all n rollouts.

    python -m experiments.gradients        half an hour on 2 cores

and for a trained model: --model runs/demo/model --prompts 12 --name gradients-trained. Writes
experiments/results/NAME.json, from which figures.py draws. One set of real rollouts from the
demonstration's model and problems. g_i is the gradient of rollout i's loss at advantage 1, with
pi_old the trainer's own policy: the ratio is 1 and nothing is clipped. So the gradient of any
subset S, as pods.py takes it, is the sum of A_i(S) g_i / m, with the advantages within S.

134 million numbers for each of 1536 rollouts do not fit, but only inner products are asked for, and
a sketch keeps those (Charikar, Chen and Farach-Colton's count sketch): each number gets a random
sign and is added to one of 2^18 buckets. That is linear, and the inner product of two sketches is
that of the gradients a and b, with an error of about |a| |b| / 500.
"""

import sys
from statistics import fmean

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, set_seed
from transformers.utils import logging

import pods
from experiments.study import DEMONSTRATION, RESULTS, Parser, write_json
from sampling import RULES

BUCKETS, DRAWS, PER_STEP = 2**18, 50, 6
MS = (2, 4, 8, 16, 32, 48, 64)
MEASURED = ("cosine", "norm", "zero_std_groups")


class Sketch:
    """Keeps inner products of vectors of `size` numbers, in `buckets` (see above)."""

    def __init__(self, size: int, buckets: int = BUCKETS, device: torch.device = pods.DEVICE):
        whole = -(-size // buckets) * buckets
        generator = torch.Generator(device).manual_seed(0)
        signs = torch.randint(2, (whole,), generator=generator, device=device)
        self.signs = signs.float() * 2 - 1
        self.signed = torch.zeros(whole, device=device)
        self.buckets = buckets

    def __call__(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """(buckets,) float32 of the vector that the parts (float32) make, one after another."""
        start = 0
        for part in parts:
            at = slice(start, start + part.numel())
            torch.mul(part.flatten(), self.signs[at], out=self.signed[at])
            start = at.stop
        return self.signed.view(-1, self.buckets).sum(0)


def gradients(model, groups: list[list[pods.Rollout]], cfg: pods.Config, buckets: int = BUCKETS):
    """Sketches of g_i, (prompts, n, buckets) float32."""
    parameters = list(model.parameters())
    sketch = Sketch(sum(p.numel() for p in parameters), buckets)
    found = torch.empty(len(groups), len(groups[0]), buckets)
    one = torch.ones(1, device=pods.DEVICE)
    with tqdm(total=len(groups) * len(groups[0]), desc="gradients", unit="rollout") as bar:
        for i, group in enumerate(groups):
            for j, rollout in enumerate(group):
                bf16 = cfg.dtype == "bfloat16"
                with torch.autocast(pods.DEVICE.type, torch.bfloat16, enabled=bf16):
                    packed = pods.pack([rollout])
                    logprobs = pods.completion_logprobs(model, *packed, cfg.temperature)
                old, length = logprobs.detach(), torch.tensor([len(logprobs)], device=pods.DEVICE)
                losses, _, _ = pods.grpo_loss(logprobs, old, one, length, cfg.clip_eps)
                found[i, j] = sketch(torch.autograd.grad(losses.sum(), parameters))
                bar.update()
    return found


def study(rewards: torch.Tensor, grams: torch.Tensor, per_step: int = PER_STEP) -> list[dict]:
    """For each rule and m, a row for each step and draw: the subset's gradient beside the full one.

    rewards (prompts, n) float64; grams (prompts, prompts, n, n) float64, the inner products of all
    g. Gradients are those of steps of `per_step` prompts; random subsets are drawn DRAWS times.
    A row has the cosine of the two gradients (0 where the subset has none), the subset's norm as
    a share of the full one's, and the share of groups without gradient. A step of which not even
    all rollouts have a gradient has no row.
    """
    n, rows = rewards.shape[-1], []

    def weights(kept: torch.Tensor) -> torch.Tensor:
        """(prompts, n) float64: what each g is multiplied by."""
        A = pods.advantages(rewards, kept) / kept.shape[-1]
        return torch.zeros_like(rewards).scatter(-1, kept, A)

    def inner(a: torch.Tensor, b: torch.Tensor, at: slice) -> float:
        return torch.einsum("pi,pqij,qj->", a[at], grams[at, at], b[at]).item()

    torch.manual_seed(0)
    full = weights(torch.arange(n).expand_as(rewards))
    steps = [slice(start, start + per_step) for start in range(0, len(rewards), per_step)]
    squares = [inner(full, full, at) for at in steps]
    cases = [(rule, m) for rule in RULES for m in MS if m <= n]
    for rule, m in cases:
        for _ in range(DRAWS if rule == "random" and m < n else 1):
            kept = RULES[rule](rewards, m)
            of_kept = rewards.gather(-1, kept)
            zero_std = (of_kept.amax(-1) == of_kept.amin(-1)).double()
            subset = weights(kept)
            for step, (at, square) in enumerate(zip(steps, squares)):
                if square > 0:
                    dot, own = inner(subset, full, at), inner(subset, subset, at)
                    cosine = dot / (own * square) ** 0.5 if own > 0 else 0.0
                    found = (cosine, (own / square) ** 0.5, zero_std[at].mean().item())
                    rows.append(dict(rule=rule, m=m, step=step) | dict(zip(MEASURED, found)))
    return rows


def summary(rows: list[dict]) -> list[dict]:
    """A row for each rule and m: of each measure the mean, between which values 8 of 10 rows lie
    (all, of fewer than ten), and the mean of each step."""
    summed = []
    for rule, m in dict.fromkeys((row["rule"], row["m"]) for row in rows):
        of_case = [row for row in rows if (row["rule"], row["m"]) == (rule, m)]
        measured = {}
        for key in MEASURED:
            values = sorted(row[key] for row in of_case)
            ends = values[len(values) // 10], values[-1 - len(values) // 10]
            steps = dict.fromkeys(row["step"] for row in of_case)
            by_step = [fmean(r[key] for r in of_case if r["step"] == step) for step in steps]
            found = {"mean": fmean(values), "low": ends[0], "high": ends[1]}
            measured[key] = {name: round(x, 4) for name, x in found.items()}
            measured[key]["steps"] = [round(x, 4) for x in by_step]
        summed.append({"rule": rule, "m": m} | measured)
    return summed


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--model", default=DEMONSTRATION["model"], help="folder of the model")
    parser.add_argument("--prompts", type=int, default=24, help="how many, 6 a step (default 24)")
    parser.add_argument("--n", type=int, default=64, help="rollouts of each (default 64)")
    parser.add_argument("--name", default="gradients", help="of the results (default gradients)")
    args = parser.parse_args()
    if args.prompts < PER_STEP or args.prompts % PER_STEP or args.n < 2:
        parser.error(f"--prompts must be a multiple of {PER_STEP}, and --n at least 2")
    settings = DEMONSTRATION | dict(model=args.model, n=args.n, m=args.n)
    cfg = pods.Config(**settings | dict(prompts_per_step=args.prompts))
    logging.disable_progress_bar()
    try:
        with pods.as_refusal(f"--model: cannot use {cfg.model}", OSError, ValueError):
            tokenizer = AutoTokenizer.from_pretrained(cfg.model)
        problems = pods.load_problems(cfg, tokenizer, "train")
        llm = pods.start_engine(cfg, problems)
    except pods.Refusal as error:
        parser.error(str(error))
    set_seed(0)  # after the engine, which reseeds
    chosen = pods.problems_of_step(problems, cfg, 1)
    groups = pods.generate(llm, chosen, cfg.n, cfg.temperature, cfg.max_new_tokens)
    rewards = torch.tensor([[r.reward for r in group] for group in groups], dtype=torch.float64)
    model, _ = pods.build_model_and_optimizer(cfg)
    flat = gradients(model, groups, cfg).flatten(0, 1)
    grams = (flat @ flat.T).view(args.prompts, args.n, args.prompts, args.n).transpose(1, 2)
    rows = study(rewards, grams.double())
    if not rows:
        parser.error("in no step did the rewards of a prompt differ: there is no gradient")
    right = fmean(r.correct for group in groups for r in group)
    made = {"model": args.model, "prompts": args.prompts, "n": args.n, "per_step": PER_STEP}
    made |= {"mean_reward": round(rewards.mean().item(), 4), "right": round(right, 4)}
    file = RESULTS / f"{args.name}.json"
    write_json(file, made | {"rows": summary(rows)})
    print(f"Written: {file}. The figure and the table: python -m experiments.figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
