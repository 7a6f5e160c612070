"""Trains each arm of a study with each seed, one run of pods.py after the other, at equal time.

    python -m experiments.compare --study first --seeds 10 --minutes 6 --n 16 --m 4 SETTINGS
    python -m experiments.compare --study pilot --arms grpo_m max_variance --first_seed 100 SETTINGS

SETTINGS go to pods.py, to all runs alike. The arms are GRPO with n = m (grpo_m), GRPO on all n
(grpo_n), and each rule's m of n. They are paired: a seed has the same problems in the same order in
every arm. First, the arms' steps are timed in turns (time_steps.py), and each arm gets as many
steps as fit in --minutes of training by their median, so that a slow hour favours none.

A finished run leaves experiments/results/STUDY/ARM-SEED.json (metrics and settings, a few kB) and
its logs in runs/STUDY/ARM-SEED, without its model and its checkpoint. What has finished is skipped:
after Ctrl-C (which ends the step and saves) or a kill, the same command goes on where it stopped,
and with more --seeds it adds to what is there.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from experiments.study import ARMS, RESULTS, Parser, arm_settings, to_columns, write_json
from tools.run_files import read_config, read_jsonl

HERE = Path(__file__).resolve().parent.parent
OWN = ("output_dir", "seed", "rule", "max_steps", "eval_every")  # what a run gets from here
EVALUATIONS = 8  # in each run, besides the one before it

STOP: list[int] = []  # the signals that asked for it


def run_to_its_end(arguments: list) -> int:
    """Runs Python with these arguments, in the foreground, and returns its exit code.

    Ctrl-C reaches the child as well, and a SIGTERM is passed on: the child ends its step, saves and
    exits, and we wait for that. (subprocess.run would kill it after a quarter of a second.)
    """
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    child = subprocess.Popen([sys.executable, *map(str, arguments)], env=environment)

    def stop(number: int, frame) -> None:
        STOP.append(number)
        if number == signal.SIGTERM:
            child.terminate()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    return child.wait()


def plan_of(args, settings: list[str], parser: Parser) -> dict:
    """The study's timing.json, which is made if there is none; exits if that fails."""
    file = RESULTS / args.study / "timing.json"
    plan = {"n": args.n, "m": args.m, "minutes": args.minutes}
    if not file.exists():
        own = [f"--{key}={value}" for key, value in plan.items()]
        code = run_to_its_end(["-m", "experiments.time_steps", args.study, *own, *settings])
        if code or STOP:
            sys.exit(code or 128 + STOP[-1])
    found = json.loads(file.read_text())
    for key, value in (plan | {"settings": settings}).items():
        if found[key] != value:
            parser.error(f"{args.study} was begun with {key} {found[key]}; take another --study")
    return found


def finish(run: Path, arm: str, seed: int, result: Path) -> None:
    """Keeps the metrics and the settings of a run in `result`; deletes what is large."""
    rows = list(read_jsonl(run / "metrics.jsonl", "step"))
    trained = sum(row.get("time/generate", 0) + row.get("time/update", 0) for row in rows)
    times = {"trained_seconds_as_run": round(trained, 1)}
    names = {"arm": arm, "seed": seed, "settings": read_config(run)}
    write_json(result, names | times | {"metrics": to_columns(rows)})


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--study", default="study", help="its name (default study)")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS, help="default: all five")
    parser.add_argument("--seeds", type=int, default=3, help="how many, of each arm (default 3)")
    parser.add_argument("--first_seed", type=int, default=0, help="the others follow (default 0)")
    parser.add_argument("--minutes", type=float, default=6, help="training time of a run (6)")
    parser.add_argument("--n", type=int, default=64, help="rollouts generated (default 64)")
    parser.add_argument("--m", type=int, default=16, help="rollouts updated on (default 16)")
    args, settings = parser.parse_known_args()
    for name in OWN:
        if any(given.partition("=")[0].replace("-", "_") == f"__{name}" for given in settings):
            parser.error(f"a comparison sets --{name} of its runs itself")
    if not (0 < args.minutes < 1e6 and args.seeds > 0 and 0 < args.m < args.n):
        parser.error("--minutes and --seeds must be above 0, and --m below --n")
    if args.study in ("", ".", "..") or Path(args.study).name != args.study:
        parser.error(f"--study is {args.study}, but must be a plain folder name")

    plan = plan_of(args, settings, parser)
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for arm in args.arms:
            run = Path("runs") / args.study / f"{arm}-{seed}"
            result = RESULTS / args.study / f"{arm}-{seed}.json"
            if not result.exists():
                steps = plan["steps"][arm]
                own = {"output_dir": run, "seed": seed, "max_steps": steps}
                own["eval_every"] = max(1, round(steps / EVALUATIONS))
                own |= arm_settings(arm, args.n, args.m)
                print(f"{arm}, seed {seed}: {steps} steps in {run}", flush=True)
                options = [f"--{key}={value}" for key, value in own.items()]
                code = run_to_its_end([HERE / "pods.py", *settings, *options])
                if code or STOP:
                    what = "stopped" if STOP else f"ended with exit code {code}"
                    print(f"compare: {arm}, seed {seed}: {what}", file=sys.stderr)
                    return 128 + STOP[-1] if STOP else max(code, 1)
                finish(run, arm, seed, result)
            (run / "checkpoint.pt").unlink(missing_ok=True)  # 12 bytes a parameter
            shutil.rmtree(run / "model", ignore_errors=True)
    print(f"All runs of {args.study} are finished: {RESULTS / args.study}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
