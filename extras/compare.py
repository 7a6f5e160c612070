"""GRPO beside PODS and its three rules: the same data, seeds and training time, one run after another.

    bash run_gsm8k.sh compare                            the figures and the table, from one seed
    bash run_gsm8k.sh compare --seeds 3 --minutes 6      more settings go to pods.py, for all runs alike

It times a step of each arm first, in turns, then trains. Runs that are finished are kept: after a kill or
Ctrl-C the same command goes on where it stopped. Runs go to runs/NAME-ARM-SEED, all else to runs/NAME.
"""

import argparse
import ctypes
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
from extras import checks, plot_runs, runs

OWN = ("rule", "seed", "max-steps", "max-minutes", "eval-every", "fresh")  # what a run gets from here
EVALUATIONS = 8  # in each run, besides the one before it
ROUNDS = 5  # steps of each arm that are timed


def arms(n: int, m: int) -> dict[str, list[str]]:
    """The settings of pods.py for each arm: GRPO at either cost of an update, and the three rules."""
    setting = lambda n, m, rule: [f"--n={n}", f"--m={m}", f"--rule={rule}"]
    grpo = {f"grpo-{k}": setting(k, k, "max_variance") for k in (m, n)}  # n = m: every rule keeps all
    return grpo | {rule: setting(n, m, rule) for rule in ("max_variance", "max_reward", "random")}


def time_steps(settings: list[str], each: dict[str, list[str]]) -> dict[str, float]:
    """Median seconds of a step of each arm. All train one model in turns, so that it changes as in a run."""
    import pods
    from extras import bench

    cfgs = {arm: checks.parse(pods.Config, "", [*settings, *more]) for arm, more in each.items()}
    for cfg in cfgs.values():
        checks.check_settings(cfg)
    bench.keep_freed_memory()
    tokenizer = checks.load_tokenizer(cfg)
    prompts, problems = pods.encode(pods.load_problems(cfg.data, "train"), tokenizer, cfg)
    llm = checks.started(pods.start_engine, cfg, bench.ON_GPU)
    model = bench.load(cfg)
    optimizer = pods.AdamW(model.parameters(), cfg.lr, (0.9, 0.99), fused=True)
    bar = tqdm(total=(ROUNDS + 1) * len(cfgs), desc="timing", unit="step")

    def step(cfg, count=None) -> None:
        chosen = pods.problems_of_step(len(prompts), cfg.prompts_per_step, cfg.seed, next(count))
        golds = [pods.gold_answer(problems[i]["answer"]) for i in chosen]
        score = lambda prompt, i, rollout: pods.reward(rollout.text, golds[prompt])
        bench.one_step(llm, model, optimizer, [prompts[i] for i in chosen], score, cfg)
        bar.update()

    pods.set_seed(cfg.seed)
    calls = {arm: lambda cfg=cfg, count=itertools.count(1): step(cfg, count) for arm, cfg in cfgs.items()}
    return bench.in_turns(ROUNDS, **calls)


def trained(run: Path) -> tuple[float, bool]:
    """Minutes that a run has trained, and whether its last step was evaluated."""
    log = run / "metrics.jsonl"
    last = (plot_runs.read_lines(log) if log.exists() else [])[-1:] or [{"train_seconds": 0}]
    return last[0]["train_seconds"] / 60, "eval_accuracy" in last[0]


def train(run: Path, settings: list[str], log: Path, minutes: float, bar: tqdm) -> int:
    """One run of pods.py, its output in `log`. Moves the bar by the minutes it trains."""
    prctl, killed_with_us = ctypes.CDLL(None).prctl, 1
    before = trained(run)[0]
    with open(log, "a") as file:
        command = [sys.executable, "-W", "ignore::FutureWarning", str(HERE / "pods.py"), *settings]
        process = subprocess.Popen(
            command, stdout=file, stderr=file, preexec_fn=lambda: prctl(killed_with_us, signal.SIGTERM)
        )
    try:
        while process.poll() is None:
            time.sleep(1)
            now = min(trained(run)[0], minutes)
            bar.update(now - before)
            before = now
    except KeyboardInterrupt:  # the run has got it too
        bar.write("Stopping after this step. The same command goes on from there.", file=sys.stderr)
        process.wait()
        return 130
    if process.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        bar.write(f"{run.name}: {lines[-1] if lines else 'no output'} (all of it: {log})", file=sys.stderr)
    return process.returncode


def compare(args: argparse.Namespace, settings: list[str]) -> int:
    plot_runs.check_matplotlib()
    folder, each = HERE / "runs" / args.name, arms(args.n, args.m)
    timing = folder / "timing.json"
    if not timing.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-W", "ignore", __file__, "--timing", f"--n={args.n}", f"--m={args.m}"]
        code = subprocess.run([*command, f"--name={args.name}", *settings]).returncode
        if code:
            return code
    seconds = json.loads(timing.read_text())
    if seconds.keys() != each.keys():
        raise checks.Refusal(f"{timing} is of other arms ({', '.join(seconds)}): take another --name")
    plan = {
        HERE / "runs" / f"{args.name}-{arm}-{seed}": (arm, seed) for seed in range(args.seeds) for arm in each
    }
    done = {run: min(trained(run)[0], args.minutes) for run in plan}
    total = args.minutes * len(plan)
    bar = tqdm(total=total, initial=sum(done.values()), smoothing=0, bar_format=BAR)
    for number, (run, (arm, seed)) in enumerate(plan.items(), start=1):
        bar.set_description(f"run {number} of {len(plan)}, {arm}, seed {seed}")
        checkpoint = run / "checkpoint" / "state.pt"
        if done[run] < args.minutes or not trained(run)[1]:
            if (run / "model").exists() and not checkpoint.exists():
                raise checks.Refusal(
                    f"{run} was finished after {done[run]:.1f} minutes, and its checkpoint is deleted:"
                    " take another --name for longer runs"
                )
            every = max(1, round(60 * args.minutes / EVALUATIONS / seconds[arm]))
            own = [f"--name={run.name}", f"--seed={seed}", f"--eval-every={every}", "--max-steps=1000000"]
            own += [f"--max-minutes={args.minutes}", *each[arm]]
            if code := train(run, [*settings, *own], folder / f"{arm}-{seed}.log", args.minutes, bar):
                bar.close()
                return code
        checkpoint.unlink(missing_ok=True)  # 12 bytes a parameter, in each run
    bar.close()
    found = [plot_runs.read_run(run) for run in plan]
    by_label = {run.label: seconds[arm] for run, (arm, _) in zip(found, plan.values())}
    return plot_runs.show(found, folder, step_seconds=by_label, minutes=args.minutes)


BAR = "{desc}{percentage:.0f}%|{bar}| {n:.1f} of {total:.0f} training minutes, {remaining} left"


def main() -> int:
    parser = checks.Parser(__doc__)
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of each arm, with the seeds 0, 1, ... (default 1)"
    )
    minutes = 240 if torch.cuda.is_available() else 6
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="training time of a run (default 6, on a GPU 240)"
    )
    parser.add_argument("--name", default="compare", help="the runs are runs/NAME-ARM-SEED (default compare)")
    parser.add_argument("--n", type=int, default=64, help="rollouts generated for each prompt (default 64)")
    parser.add_argument(
        "--m", type=int, default=16, help="rollouts kept, and those of the smaller GRPO (default 16)"
    )
    parser.add_argument("--timing", action="store_true", help=argparse.SUPPRESS)
    args, settings = parser.parse_known_args()
    given = {setting.partition("=")[0].lstrip("-").replace("_", "-") for setting in settings}
    if own := given & set(OWN):
        raise checks.Refusal(f"a comparison sets --{min(own)} of its runs itself")
    for name, least in (("seeds", 1), ("minutes", 1e-3), ("m", 1), ("n", args.m + 1)):
        if not least <= getattr(args, name) < 1e6:
            raise checks.Refusal(f"--{name} is {getattr(args, name)}, but must be at least {least}")
    if args.name in ("", ".", "..") or "/" in args.name:
        raise checks.Refusal(f"--name is {args.name!r}, but must be a plain folder name")
    if args.timing:
        seconds = time_steps(settings, arms(args.n, args.m))
        file = HERE / "runs" / args.name / "timing.json"
        runs.write_whole(file, lambda out: out.write(json.dumps(seconds, indent=1).encode()))
        return 0
    return compare(args, settings)


if __name__ == "__main__":
    sys.exit(checks.explained(main, "compare.py"))
