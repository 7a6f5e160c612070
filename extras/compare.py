"""GRPO beside PODS and its three rules: the same data, seeds and training time, one run after another.

    bash run_gsm8k.sh compare                            the figures and the table, from one seed
    bash run_gsm8k.sh compare --seeds 3 --minutes 6      more settings go to pods.py, for all runs alike

It times a step of each arm first, in turns, then trains. Runs that are finished are kept: after a kill or
Ctrl-C the same command goes on where it stopped, and with more --seeds it adds to what is there. Runs go to
runs/NAME-ARM-SEED, each with its model but without a checkpoint once it is finished; all else to runs/NAME.
"""

import argparse
import ctypes
import itertools
import json
import shutil
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
from sampling import RULES

OWN = ("rule", "seed", "max-steps", "max-minutes", "eval-every", "fresh")  # what a run gets from here
EVALUATIONS = 8  # in each run, besides the one before it
ROUNDS = 5  # steps of each arm that are timed
BAR = "{desc}{percentage:.0f}%|{bar}| {n:.1f} of {total:.3g} training minutes, {remaining} left"


def arms(n: int, m: int) -> dict[str, dict]:
    """What differs between the arms: GRPO at either cost of an update, and the rules."""
    grpo = {f"grpo-{k}": dict(n=k, m=k, rule="max_variance") for k in (m, n)}  # n = m: every rule keeps all
    return grpo | {rule: dict(n=n, m=m, rule=rule) for rule in RULES}


def options(settings: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in settings.items()]


def time_steps(settings: list[str], each: dict[str, dict]) -> dict[str, float]:
    """Median seconds of a step of each arm, by its label. In turns, so that a slow hour slows all alike.

    All train one model, for a few steps: an arm whose steps grow shorter or longer later on, as it learns,
    is timed at its start.
    """
    import pods
    from extras import bench

    cfgs = {label: checks.parse(pods.Config, "", [*settings, *options(arm)]) for label, arm in each.items()}
    for cfg in cfgs.values():
        checks.check_settings(cfg)
    bench.keep_freed_memory()
    tokenizer = checks.load_tokenizer(cfg)
    prompts, problems = pods.encode(pods.load_problems(cfg.data, "train"), tokenizer, cfg)
    llm = checks.started(pods.start_engine, cfg, bench.ON_GPU)
    model = bench.load(cfg)
    ref_model = bench.load(cfg).eval() if cfg.kl > 0 else None
    optimizer = pods.AdamW(model.parameters(), cfg.lr, (0.9, 0.99), fused=True)
    bar = tqdm(total=(ROUNDS + 1) * len(cfgs), desc="timing", unit="step")

    def step(cfg, count) -> None:
        chosen = pods.problems_of_step(len(prompts), cfg.prompts_per_step, cfg.seed, next(count))
        asked, golds = [prompts[i] for i in chosen], [pods.gold_answer(problems[i]["answer"]) for i in chosen]
        pods.take_step(llm, model, ref_model, optimizer, asked, golds, cfg)
        bar.update()

    pods.set_seed(cfg.seed)
    counts = {label: itertools.count(1) for label in cfgs}
    calls = {label: lambda cfg=cfg, count=counts[label]: step(cfg, count) for label, cfg in cfgs.items()}
    return bench.in_turns(ROUNDS, **calls)


def minutes_trained(run: Path) -> float:
    log = run / "metrics.jsonl"
    rows = list(plot_runs.read_lines(log, "train_seconds")) if log.exists() else []
    return rows[-1]["train_seconds"] / 60 if rows else 0.0


def start(command: list, **kwargs) -> subprocess.Popen:
    """A child that Ctrl-C does not reach, and that the kernel tells to stop when this process dies."""
    prctl, set_death_signal = ctypes.CDLL(None).prctl, 1
    die_with_us = lambda: prctl(set_death_signal, signal.SIGTERM)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore::FutureWarning", *command],
        preexec_fn=die_with_us,
        start_new_session=True,
        **kwargs,
    )


def train(run: Path, settings: list[str], log: Path, minutes: float, bar: tqdm) -> int:
    """One run of pods.py, its output in `log`: its exit code. Moves the bar by the minutes it trains."""
    before = min(minutes_trained(run), minutes)
    with open(log, "a") as file:
        process = start([HERE / "pods.py", *settings], stdout=file, stderr=file)
    try:
        while process.poll() is None:
            time.sleep(1)
            now = min(minutes_trained(run), minutes)
            bar.update(now - before)
            before = now
    except KeyboardInterrupt:
        bar.write("Stopping after this step. The same command goes on from there.", file=sys.stderr)
        process.send_signal(signal.SIGINT)
        try:
            process.wait()
        except KeyboardInterrupt:  # once more: at once
            process.send_signal(signal.SIGINT)
            process.wait()
        return 130
    if process.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = lines[-1] if lines and process.returncode > 0 else f"ended by signal {-process.returncode}"
        bar.write(f"compare.py: {run.name}: {why} (all of its output: {log})", file=sys.stderr)
    return process.returncode if process.returncode >= 0 else 1


def compare(args: argparse.Namespace, settings: list[str]) -> int:
    plot_runs.check_matplotlib()
    folder, each = HERE / "runs" / args.name, arms(args.n, args.m)
    same = dict(n=args.n, m=args.m, minutes=args.minutes, settings=" ".join(settings))
    lock = runs.open_run(folder, same)  # noqa: F841, held as long as this process lives
    timing = folder / "timing.json"
    if not timing.exists():
        own = options(dict(n=args.n, m=args.m, name=args.name))
        if code := start([__file__, "--timing", *own, *settings]).wait():
            return max(code, 1)
    seconds = json.loads(timing.read_text())
    plan = {
        HERE / "runs" / f"{args.name}-{arm}-{seed}": (arm, seed) for seed in range(args.seeds) for arm in each
    }
    done = sum(min(minutes_trained(run), args.minutes) for run in plan)
    bar = tqdm(total=args.minutes * len(plan), initial=done, smoothing=0, bar_format=BAR)
    for number, (run, (arm, seed)) in enumerate(plan.items(), start=1):
        bar.set_description(f"run {number} of {len(plan)}, {arm}, seed {seed}")
        finished = run / "finished"
        if not finished.exists():
            step = seconds[plot_runs.label(**each[arm])]
            own = {"name": run.name, "seed": seed, "max-steps": 1_000_000, "max-minutes": args.minutes}
            own["eval-every"] = max(1, round(60 * args.minutes / EVALUATIONS / step))
            if code := train(
                run, [*settings, *options(own | each[arm])], folder / f"{arm}-{seed}.log", args.minutes, bar
            ):
                bar.close()
                return code
            finished.touch()
        shutil.rmtree(run / "checkpoint", ignore_errors=True)  # 12 bytes a parameter, in each run
    bar.close()
    return plot_runs.show([plot_runs.read_run(run) for run in plan], folder, seconds, args.minutes)


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
            must = f"must be at least {least} and below a million"
            raise checks.Refusal(f"--{name} is {getattr(args, name)}, but {must}")
    checks.check_name(args.name)
    if args.timing:
        each = {plot_runs.label(**arm): arm for arm in arms(args.n, args.m).values()}
        seconds = time_steps(settings, each)
        file = HERE / "runs" / args.name / "timing.json"
        runs.write_whole(file, lambda out: out.write(json.dumps(seconds, indent=1).encode()))
        return 0
    return compare(args, settings)


if __name__ == "__main__":
    sys.exit(checks.explained(main, "compare.py", trains=False))
