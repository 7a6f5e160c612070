"""Times a step of each arm of a study, in turns: python -m experiments.time_steps STUDY ...

compare.py runs this first, with its own --n and --m and with the settings for pods.py. Writes
experiments/results/STUDY/timing.json.

All arms train one and the same model, in this one process, one step each a round, each round on the
same problems: a slow hour of the machine slows all alike, and as the model learns from round to
round, completions have the lengths that they have in a run of as many steps. What comes first in a
round moves on by one each time. The first round is not counted.
"""

import sys
from statistics import median

from tqdm import tqdm
from transformers import AutoTokenizer, set_seed
from transformers.utils import logging

import pods
from experiments.study import ARMS, RESULTS, Parser, arm_settings, write_json

ROUNDS = 5
PARTS = ("time/generate", "time/update")
LOGGED = (*PARTS, "rollout/tokens", "train/tokens", "rollout/zero_std_groups")


def time_steps(cfgs: dict[str, pods.Config]) -> list[dict]:
    """The timed steps, in order: {"arm", "round", what is LOGGED of its metrics}."""
    first, arms, steps = next(iter(cfgs.values())), list(cfgs), []
    with pods.as_refusal(f"--model: cannot use {first.model}", OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(first.model)
        problems = pods.load_problems(first, tokenizer, "train")
    llm = pods.start_engine(first, problems)
    model, optimizer = pods.build_model_and_optimizer(first)
    set_seed(first.seed)  # after the engine, which reseeds
    bar = tqdm(total=(ROUNDS + 1) * len(arms), desc="timing", unit="step")
    for turn in range(ROUNDS + 1):
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            chosen = pods.problems_of_step(problems, cfgs[arm], turn + 1)
            _, metrics = pods.take_step(llm, model, optimizer, chosen, cfgs[arm])
            steps.append({"arm": arm, "round": turn} | {key: metrics[key] for key in LOGGED})
            bar.update()
    bar.close()
    return [step for step in steps if step["round"] > 0]


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("study")
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--m", type=int, required=True)
    parser.add_argument("--minutes", type=float, required=True, help="training time of each run")
    args, settings = parser.parse_known_args()
    logging.disable_progress_bar()
    try:
        cfgs = {}
        for arm in ARMS:
            own = [f"--{k}={v}" for k, v in arm_settings(arm, args.n, args.m).items()]
            cfgs[arm] = pods.parse_settings(settings + own)
        timed = time_steps(cfgs)
    except pods.Refusal as error:
        parser.error(str(error))
    plan = {"n": args.n, "m": args.m, "minutes": args.minutes, "settings": settings}
    seconds = {
        arm: median(sum(step[part] for part in PARTS) for step in timed if step["arm"] == arm)
        for arm in ARMS
    }
    steps = {arm: max(1, int(60 * args.minutes / taken)) for arm, taken in seconds.items()}
    found = {"step_seconds": seconds, "steps": steps, "timed": timed}
    write_json(RESULTS / args.study / "timing.json", plan | found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
