"""Is this engine the policy that is trained? The first minutes of a run, checked one by one.

    bash run_gsm8k.sh check                      on the model that this machine trains
    python -m tools.check --model MODEL --data FOLDER       (settings as for pods.py)

Generates for two problems and compares the log-probs of vLLM with the trainer's: at the start,
after new weights without a sleep (while the prefix cache holds the prompts), and after each of two
whole steps, with sleep and wake. Each line has a figure, its bound, and ok or NOT OK; the exit code
is 1 if one is not. Nothing is saved.
"""

import sys
import time
from dataclasses import replace

import torch
from transformers import AutoTokenizer, set_seed
from transformers.utils import logging

import pods

# Mean |log-prob difference| in nats a token. In bfloat16, rounding alone makes 0.03 to 0.06; in
# float32, 1e-6 on a CPU, and about 1e-3 on a GPU, where vLLM multiplies in TF32.
BOUNDS = {("bfloat16", "cpu"): 0.1, ("bfloat16", "cuda"): 0.1}
BOUNDS |= {("float32", "cpu"): 1e-4, ("float32", "cuda"): 1e-2}
FAILED: list[str] = []


def report(what: str, figure: float, least: float, most: float, unit: str = "") -> None:
    """Prints a line, and notes in FAILED what is not between `least` and `most`."""
    ok = least <= figure <= most
    bound = f"at most {most:g}" if most < torch.inf else f"at least {least:g}"
    print(f"{'ok     ' if ok else 'NOT OK '} {what}: {figure:.3g}{unit} ({bound})", flush=True)
    if not ok:
        FAILED.append(what)


def trainer_logprobs(model, groups: list[list[pods.Rollout]], cfg: pods.Config) -> torch.Tensor:
    """The trainer's log-probs (T,) of all completion tokens, on the CPU."""
    with (
        torch.no_grad(),
        torch.autocast(pods.DEVICE.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16"),
    ):
        found = [pods.completion_logprobs(model, *pods.pack(g), cfg.temperature) for g in groups]
    return torch.cat(found).cpu()


def compare(when: str, llm, model, problems: list[dict], cfg: pods.Config):
    """Fresh rollouts of the same prompts: checks them, and returns them."""
    set_seed(0)
    groups = pods.generate(llm, problems, cfg.n, cfg.temperature, cfg.max_new_tokens)
    engine = torch.tensor([x for group in groups for r in group for x in r.old_logprobs])
    difference = (engine - trainer_logprobs(model, groups, cfg)).abs().mean().item()
    bound = BOUNDS[cfg.dtype, pods.DEVICE.type]
    report(f"vLLM and trainer differ {when}", difference, 0, bound, " nats a token")
    return groups


def length_reward(text: str, gold: str) -> float:
    """In place of the task's reward: it varies in every group, so that each update moves."""
    return float(len(text))


def addresses(engine_model: torch.nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in engine_model.parameters()]


def check(cfg: pods.Config) -> int:
    # A temperature, because raw log-probs ignore it; a high learning rate, because weights that
    # hardly move would let an engine with the old ones pass.
    cfg = replace(cfg, temperature=0.7, lr=2e-5, n=4, m=4, max_new_tokens=32)
    pods.reward = length_reward
    with pods.as_refusal(f"--model: cannot use {cfg.model}", OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(cfg.model)
        problems = pods.load_problems(cfg, tokenizer, "train")
    ordered = sorted(problems, key=lambda problem: len(problem["prompt_ids"]))
    two = [ordered[0], ordered[-1]]  # of different lengths
    started = time.perf_counter()
    llm = pods.start_engine(cfg, two)
    model, optimizer = pods.build_model_and_optimizer(cfg)
    runner = "V2" if llm.llm_engine.vllm_config.use_v2_model_runner else "V1"
    seconds = time.perf_counter() - started
    print(f"        started in {seconds:.0f} s on {pods.DEVICE}, vLLM's model runner {runner}")
    (before,) = llm.apply_model(addresses)

    groups = compare("at the start", llm, model, two, cfg)
    old = trainer_logprobs(model, groups, cfg)
    for group in groups:
        for i, rollout in enumerate(group):
            rollout.advantage = (-1.0) ** i
    pods.update(model, optimizer, sum(groups, []), 8, cfg)
    moved = (trainer_logprobs(model, groups, cfg) - old).abs().mean().item()
    bound = BOUNDS[cfg.dtype, pods.DEVICE.type]
    report("an update moves the trainer by", moved, 2 * bound, torch.inf, " nats a token")
    pods.load_weights_into_vllm(llm, model, cfg.dtype)
    compare("after new weights", llm, model, two, cfg)
    for turn in ("a first", "a second"):
        set_seed(1)
        _, metrics = pods.take_step(llm, model, optimizer, two, cfg)
        seconds = metrics["time/update"]
        compare(f"after {turn} step with sleep and wake ({seconds:.1f} s)", llm, model, two, cfg)
    (after,) = llm.apply_model(addresses)
    report(
        "weights of vLLM that lie elsewhere now", sum(a != b for a, b in zip(before, after)), 0, 0
    )
    if pods.DEVICE.type == "cuda":
        free = torch.cuda.mem_get_info()[0] / 2**30
        report("free GPU memory with all awake", free, 0.5, torch.inf, " GiB")
    print(f"{len(FAILED)} of the checks failed." if FAILED else "All is well.")
    return 1 if FAILED else 0


def main() -> int:
    logging.disable_progress_bar()
    FAILED.clear()
    try:
        return check(pods.parse_settings())
    except pods.Refusal as error:
        print(f"tools.check: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
