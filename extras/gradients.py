"""Where does the choice of the subset matter? The gradient of each rule's m rollouts beside that of all n.

    python extras/gradients.py                    24 prompts, n = 64: about half an hour on 2 cores
    python extras/gradients.py --model runs/cpu-demo/model --out docs/gradients-trained.png

One set of real rollouts from the demonstration's model and problems. g_i is the gradient of rollout i's
loss at advantage 1, with pi_old the trainer's own policy: the ratio is 1, nothing is clipped, and so the
gradient of any subset S, as pods.py takes it, is the sum of A_i(S) g_i / m, with the advantages within S.

134 million numbers for each of 1536 rollouts do not fit, but only inner products are asked for, and a sketch
keeps those (Charikar, Chen and Farach-Colton's count sketch): each number gets a random sign and is added
to one of 2^18 buckets. That is linear, and the inner product of two sketches is that of the gradients a and
b, with an error of about |a| |b| / 500.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from extras import checks, plot_runs, runs

BUCKETS, DRAWS = 2**18, 50
MS = (2, 4, 8, 16, 32, 48, 64)


class Sketch:
    """Keeps inner products of vectors of `size` numbers, in `buckets` (see above)."""

    def __init__(self, size: int, buckets: int, device: torch.device):
        whole = -(-size // buckets) * buckets
        generator = torch.Generator(device).manual_seed(0)
        self.signs = torch.randint(2, (whole,), generator=generator, device=device).float() * 2 - 1
        self.signed = torch.zeros(whole, device=device)
        self.buckets = buckets

    def __call__(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """(buckets,) float32 of the vector that the parts (float32) make, one after another."""
        start = 0
        for part in parts:
            at = slice(start, start := start + part.numel())
            torch.mul(part.flatten(), self.signs[at], out=self.signed[at])
        return self.signed.view(-1, self.buckets).sum(0)


def gradients(model, groups: list[list], cfg, buckets: int = BUCKETS) -> torch.Tensor:
    """Sketches of g_i, (prompts, n, buckets) float32."""
    import pods

    parameters = list(model.parameters())
    device = parameters[0].device
    sketch = Sketch(sum(p.numel() for p in parameters), buckets, device)
    found = torch.empty(len(groups), len(groups[0]), buckets)
    with tqdm(total=found.shape[0] * found.shape[1], desc="gradients", unit="rollout") as bar:
        for i, group in enumerate(groups):
            for j, rollout in enumerate(group):
                with torch.autocast(device.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
                    logprobs = pods.completion_logprobs(model, *pods.pack([rollout], device), cfg.temperature)
                one, length = torch.ones(1, device=device), torch.tensor([len(logprobs)], device=device)
                loss, _ = pods.grpo_loss(logprobs, logprobs.detach(), one, length, cfg.clip)
                found[i, j] = sketch(torch.autograd.grad(loss.sum(), parameters))
                bar.update()
    return found


def study(rewards: torch.Tensor, grams: torch.Tensor, per_step: int) -> list[dict]:
    """For each rule and m: the subset's gradient beside that of all n, and the share of idle groups.

    rewards (prompts, n); grams (prompts, prompts, n, n), the inner products of all g. Gradients are those of
    steps of `per_step` prompts; random subsets are drawn DRAWS times. Returns a row for each step and draw,
    but none for a step without any gradient. A subset without one has the cosine 0.
    """
    from pods import advantages
    from sampling import RULES

    n, rows = rewards.shape[-1], []

    def weights(kept: torch.Tensor) -> torch.Tensor:
        """(prompts, n) float64: what each g is multiplied by."""
        return torch.zeros_like(rewards).scatter(-1, kept, advantages(rewards, kept) / kept.shape[-1])

    def inner(a: torch.Tensor, b: torch.Tensor, at: slice) -> float:
        return torch.einsum("pi,pqij,qj->", a[at], grams[at, at], b[at]).item()

    torch.manual_seed(0)
    full = weights(torch.arange(n).expand_as(rewards))
    steps = [slice(start, start + per_step) for start in range(0, len(rewards), per_step)]
    squares = [inner(full, full, at) for at in steps]
    for rule in RULES:
        for m in (m for m in MS if m <= n):
            for _ in range(DRAWS if rule == "random" and m < n else 1):
                kept = RULES[rule](rewards, m)
                of_kept = rewards.gather(-1, kept)
                idle = (of_kept.amax(-1) == of_kept.amin(-1)).double()
                subset = weights(kept)
                for step, (at, square) in enumerate(zip(steps, squares)):
                    if square > 0:
                        dot, own = inner(subset, full, at), inner(subset, subset, at)
                        cosine = dot / (own * square) ** 0.5 if own > 0 else 0.0
                        found = dict(cosine=cosine, norm=(own / square) ** 0.5, idle=idle[at].mean().item())
                        rows.append(dict(rule=rule, m=m, step=step) | found)
    return rows


def figure(rows: list[dict], n: int):
    drawn, ((*panels,),) = plot_runs.canvas(3, 3.6)
    shown = [
        ("cosine", "cosine to the gradient of all n"),
        ("norm", "norm, of that of all n"),
        ("idle", "groups without gradient"),
    ]
    for axes, (key, title) in zip(panels, shown):
        for colour, rule in zip(plot_runs.RULE_COLOURS, dict.fromkeys(row["rule"] for row in rows)):
            ms = sorted({row["m"] for row in rows})
            values = [[row[key] for row in rows if (row["rule"], row["m"]) == (rule, m)] for m in ms]
            name = rule.replace("_", "-")
            axes.plot(ms, [fmean(v) for v in values], "o-", color=colour, markersize=4, label=name)
            low, high = zip(*(quantiles(v) for v in values))
            axes.fill_between(ms, low, high, color=colour, alpha=0.13, lw=0)
        axes.set(title=title, xlabel=f"m of n = {n}", xscale="log", xticks=ms, xticklabels=map(str, ms))
        axes.minorticks_off()
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    # Below, since the lines meet where their names would stand.
    drawn.legend(
        handles=panels[0].lines, loc="outside lower center", ncols=len(panels[0].lines), frameon=False
    )
    return drawn


def quantiles(values: list[float]) -> tuple[float, float]:
    """Between which 8 of 10 lie; all, of fewer than ten."""
    ordered = sorted(values)
    return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def table(rows: list[dict]) -> str:
    lines = ["| rule | m | cosine | norm | groups without gradient |", "|---|---|---|---|---|"]
    for rule, m in dict.fromkeys((row["rule"], row["m"]) for row in rows):
        of = [row for row in rows if (row["rule"], row["m"]) == (rule, m)]
        cosine, norm, idle = (fmean(row[key] for row in of) for key in ("cosine", "norm", "idle"))
        lines.append(f"| {rule.replace('_', '-')} | {m} | {cosine:.2f} | {norm:.2f} | {idle:.0%} |")
    return "\n".join(lines)


def main() -> int:
    parser = checks.Parser(__doc__)
    parser.add_argument("--model", help="folder of the model (default: the demonstration's, as it starts)")
    parser.add_argument("--prompts", type=int, default=24, help="how many, 6 to a step (default 24)")
    parser.add_argument("--n", type=int, default=64, help="rollouts for each (default 64)")
    parser.add_argument(
        "--out", type=Path, default=Path("gradients.png"), help="the figure; the numbers go beside it"
    )
    args = parser.parse_args()
    plot_runs.check_matplotlib()
    if not args.out.parent.is_dir() or args.out.suffix != ".png":
        raise checks.Refusal(f"--out is {args.out}, but must be a .png in a folder that exists")
    if args.prompts < 6 or args.prompts % 6 or args.n < 2:
        raise checks.Refusal("--prompts must be a multiple of 6, and --n at least 2")
    import pods
    from extras import bench

    bench.keep_freed_memory()
    cfg = bench.demo(n=args.n, m=args.n)
    if not args.model and not bench.MODEL.exists():
        raise checks.Refusal(f"there is no {bench.MODEL}: run_gsm8k.sh unpacks it before it trains")
    cfg = replace(cfg, model=args.model or cfg.model)
    tokenizer = checks.load_tokenizer(cfg)
    prompts, problems = pods.encode(pods.load_problems(cfg.data, "train"), tokenizer, cfg)
    chosen = pods.problems_of_step(len(prompts), args.prompts, cfg.seed, 1)
    llm = checks.started(pods.start_engine, cfg, bench.ON_GPU)
    pods.set_seed(0)
    params = pods.SamplingParams(
        n=cfg.n, temperature=cfg.temperature, max_tokens=cfg.max_new_tokens, logprobs=0
    )
    groups = pods.generate(llm, [prompts[i] for i in chosen], params)
    golds = [pods.gold_answer(problems[i]["answer"]) for i in chosen]
    rewards = torch.tensor(
        [[pods.reward(r.text, gold) for r in group] for group, gold in zip(groups, golds)]
    ).double()
    found = gradients(bench.load(cfg), groups, cfg)
    flat = found.flatten(0, 1)
    grams = (flat @ flat.T).view(args.prompts, args.n, args.prompts, args.n).transpose(1, 2).double()
    rows = study(rewards, grams, cfg.prompts_per_step)
    data = dict(rewards=rewards.tolist(), rows=rows)
    runs.write_whole(args.out.with_suffix(".json"), lambda file: file.write(json.dumps(data).encode()))
    if not rows:
        raise checks.Refusal("in no step did the rewards of a prompt differ: there is no gradient to compare")
    print(f"Mean reward {rewards.mean():.3f}; right {(rewards >= 1).double().mean():.1%}\n{table(rows)}")
    print("Drawn:", plot_runs.save(figure(rows, args.n), args.out))
    return 0


if __name__ == "__main__":
    sys.exit(checks.explained(main, "gradients.py", trains=False))
