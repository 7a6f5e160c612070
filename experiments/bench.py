"""How long each part takes, beside the least it could take, and how much memory.

    python -m experiments.bench                        all sections, about 20 minutes on 2 cores
    python -m experiments.bench selection update       some of them

Writes experiments/results/bench.json, from which figures.py makes the table. Each section has a
process of its own, so that none finds the memory and the engines of another. In it, all that is
compared runs in turns; times are medians of --repeats. The model is the demonstration's, in bf16.

A section returns the lines of its table: (what, measured, unit, beside what, ratio to that).
"""

import ctypes
import importlib.util
import itertools
import json
import math
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, set_seed
from vllm import SamplingParams

import pods
from experiments.study import DEMONSTRATION, RESULTS, Parser, write_json
from sampling import max_variance

CUDA = pods.DEVICE.type == "cuda"
GIB = 2**30


def timed(call: Callable):
    """Seconds that call() takes, and what it returns."""
    wait = torch.cuda.synchronize if CUDA else int
    wait()
    started = time.perf_counter()
    result = call()
    wait()
    return time.perf_counter() - started, result


def in_turns(repeats: int, number: int = 1, **calls: Callable) -> dict[str, float]:
    """The median seconds of each call, after one round that is not counted.

    Each round times all of them, one after another, and each `number` times in a row: what takes
    microseconds would otherwise be measured with the caches that the one before left behind.
    """
    seconds = defaultdict(list)
    for _ in range(repeats + 1):
        for name, call in calls.items():
            taken, _ = timed(lambda: [call() for _ in range(number)])
            seconds[name].append(taken / number)
    return {name: median(values[1:]) for name, values in seconds.items()}


def demonstration(**settings) -> tuple[pods.Config, list[dict]]:
    """Its settings, but for these, and the problems of its first step."""
    cfg = pods.Config(**DEMONSTRATION | settings)
    problems = pods.load_problems(cfg, AutoTokenizer.from_pretrained(cfg.model), "train")
    return cfg, pods.problems_of_step(problems, cfg, 1)


# ----- Selection


def textbook(rewards: list[float], m: int) -> list[int]:
    """O(n log n + m^2): each of the m + 1 candidates has its variance computed from m rewards."""
    order = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    best, best_variance = 0, -1.0
    for k in range(m + 1):
        kept = [rewards[i] for i in order[:k] + order[len(order) - m + k :]]
        mean = math.fsum(kept) / m
        variance = math.fsum([(r - mean) ** 2 for r in kept]) / m
        if variance > best_variance:
            best, best_variance = k, variance
    return order[:best] + order[len(order) - m + best :]


def selection(repeats: int) -> list[tuple]:
    rows = []
    for n, number in ((64, 20), (512, 20), (1_000_000, 1)):
        m, generator = n // 4, torch.Generator().manual_seed(n)
        rewards = torch.rand(n, generator=generator).to(pods.DEVICE)
        calls = {"ours": partial(max_variance, rewards, m), "sort": rewards.sort}
        if n < 1000:
            calls["loop"] = partial(textbook, rewards.tolist(), m)
        taken = in_turns(repeats, number, **calls)
        ours, what = taken["ours"], f"max_variance, n = {n}, m = {m}"
        rows.append((what, 1e3 * ours, "ms", "time / torch.sort", ours / taken["sort"]))
        if n < 1000:
            what, loop = "the loop, O(n log n + m^2)", taken["loop"]
            rows.append((what, 1e3 * loop, "ms", "its time / ours", loop / ours))
    rewards = torch.rand(64, 64, device=pods.DEVICE)
    calls = {"one": partial(max_variance, rewards, 16)}
    taken = in_turns(repeats, 20, **calls, many=lambda: [max_variance(r, 16) for r in rewards])
    one, what = taken["one"], "64 prompts, n = 64, m = 16, in one call"
    return [*rows, (what, 1e3 * one, "ms", "64 calls / it", taken["many"] / one)]


# ----- The update


def made_up(prompts: int, n: int, prompt: int, shortest: int, longest: int) -> list[list]:
    """Groups of rollouts of random tokens; a fourth of them has a reward of 1."""
    rng, groups = random.Random(0), []
    for _ in range(prompts):
        prompt_ids, group = [rng.randrange(200) for _ in range(prompt)], []
        for i in range(n):
            ids = [rng.randrange(200) for _ in range(rng.randint(shortest, longest))]
            grades = i % 4 == 0, False, float(i % 4 == 0)
            group.append(pods.Rollout(prompt_ids, ids, [-5.0] * len(ids), "", False, *grades))
        groups.append(group)
    return groups


def update(repeats: int) -> list[tuple]:
    cfg, _ = demonstration(lr=1e-7)
    model, optimizer = pods.build_model_and_optimizer(cfg)
    groups = made_up(2, cfg.n, 128, 16, 512)
    pods.down_sample(groups, cfg)
    kept = [rollout for group in groups for rollout in group if rollout.kept]
    batches = pods.micro_batches(kept, cfg.micro_batch_tokens)
    packed = [pods.pack(batch)[0] for batch in batches]
    single = [torch.tensor(r.prompt_ids + r.completion_ids, device=pods.DEVICE) for r in kept]

    def whole_update() -> None:
        pods.down_sample(groups, cfg)
        pods.update(model, optimizer, kept, len(kept), cfg)

    def bare(sequences: list[torch.Tensor]) -> None:
        for ids in sequences:
            with torch.autocast(pods.DEVICE.type, torch.bfloat16):
                loss = model(ids[None], labels=ids[None], use_cache=False).loss
            loss.backward()
        optimizer.zero_grad()

    calls = dict(ours=whole_update, single=partial(bare, single), packed=partial(bare, packed))
    taken = in_turns(repeats, **calls)
    ours, tokens, computed = taken["ours"], sum(map(len, single)), sum(map(len, packed))
    prompts = sum(len(batch[0].prompt_ids) for batch in batches)
    padding = computed - prompts - sum(len(rollout.completion_ids) for rollout in kept)
    what, beside = f"{len(kept)} rollouts of 16 to 512 tokens, update", "rate / forward, backward"
    rows = [(what, tokens / ours, "tokens/s", beside, taken["single"] / ours)]
    what, beside = "the same, the prompt's tokens counted once", "rate / bare work on the same"
    rows.append((what, computed / ours, "tokens/s", beside, taken["packed"] / ours))
    rows.append(("padding", padding, "tokens", "share", padding / computed))

    # The log-probs of T tokens, with Qwen2.5's vocabulary and next to no trunk.
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=1, num_key_value_heads=1, vocab_size=151_936)
    head = AutoModelForCausalLM.from_config(Qwen2Config(**sizes), attn_implementation="sdpa")
    head = head.to(pods.DEVICE).train()

    def logprobs(rollouts: list[pods.Rollout]) -> None:
        with torch.autocast(pods.DEVICE.type, torch.bfloat16):
            found = pods.completion_logprobs(head, *pods.pack(rollouts), 1.0)
        found.sum().backward()

    for tokens in (512, 2048, 4096):
        peak = peak_memory(partial(logprobs, made_up(1, 1, 3, tokens, tokens)[0]))
        whole = 4 * tokens * sizes["vocab_size"]
        what, beside = f"log-probs of {tokens} tokens, peak memory", "of all logits in float32"
        rows.append((what, peak / GIB, "GiB", beside, peak / whole))
    return rows


def peak_memory(call: Callable) -> int:
    """Bytes by which the peak of call() is above what was taken before."""
    call()  # what is taken once and kept is not counted
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    status = Path("/proc/self/status")
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = int(status.read_text().split("VmRSS:")[1].split()[0])
    call()
    return 1024 * (int(status.read_text().split("VmHWM:")[1].split()[0]) - before)


# ----- Generation


def rates(llm, problems: list[dict], cfg: pods.Config, repeats: int) -> tuple[float, float]:
    """Tokens a second of pods.generate, and of vLLM's own LLM.generate with the same settings."""
    prompts = [{"prompt_token_ids": problem["prompt_ids"]} for problem in problems]
    options = dict(n=cfg.n, temperature=1.0, max_tokens=cfg.max_new_tokens, logprobs=0)
    tokens = {}

    def ours() -> None:
        set_seed(0)
        groups = pods.generate(llm, problems, cfg.n, 1.0, cfg.max_new_tokens)
        tokens["ours"] = sum(len(r.completion_ids) for group in groups for r in group)

    def bare() -> None:
        set_seed(0)
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, SamplingParams(**options), use_tqdm=False)
        tokens["bare"] = sum(len(o.token_ids) for output in outputs for o in output.outputs)

    taken = in_turns(repeats, ours=ours, bare=bare)
    return tokens["ours"] / taken["ours"], tokens["bare"] / taken["bare"]


def shorter(problems: list[dict]) -> list[dict]:
    """With prompts below 128 tokens, of which blocks of 128 let rollouts share nothing."""
    return [problem | {"prompt_ids": problem["prompt_ids"][-124:]} for problem in problems]


def generation(repeats: int) -> list[tuple]:
    cfg, problems = demonstration()
    llm = pods.start_engine(cfg, problems)
    ours, bare = rates(llm, problems, cfg, repeats)
    what = f"{len(problems)} prompts x {cfg.n} rollouts"
    rows = [(what, ours, "tokens/s", "rate / LLM.generate", ours / bare)]
    if not CUDA:
        ours, _ = rates(llm, shorter(problems), cfg, repeats)
        theirs, _ = in_own_process("default_blocks", repeats)
        what, beside = "the same with prompts of 124 tokens", "rate / vLLM's blocks of 128"
        rows.append((what, ours, "tokens/s", beside, ours / theirs))
    return rows


def default_blocks(repeats: int) -> tuple[float, float]:
    """The rates of our engine, but with vLLM's own size of a cache's block."""
    cfg, problems = demonstration()
    start = pods.LLM

    def without_block_size(*args, block_size, **options):
        return start(*args, **options)

    with patch.object(pods, "LLM", without_block_size):
        llm = pods.start_engine(cfg, problems)
    return rates(llm, shorter(problems), cfg, repeats)


# ----- A step, and its growth


def stepper(cfg: pods.Config, problems: list[dict]):
    """Engine, model and optimizer, and take_step with them on these problems."""
    llm, built = pods.start_engine(cfg, problems), pods.build_model_and_optimizer(cfg)
    set_seed(0)
    return *built, partial(pods.take_step, llm, *built, problems)


def step(repeats: int) -> list[tuple]:
    """The shares of a step, by a clock around each of its functions; a checkpoint; the weights."""
    cfg, problems = demonstration()
    model, optimizer, take_step = stepper(cfg, problems)
    seconds = defaultdict(list)

    def clocked(name: str, call: Callable, *args, **options):
        taken, result = timed(partial(call, *args, **options))
        seconds[name].append(taken)
        return result

    weights = "load_weights_into_vllm"
    parts = ("generate", "down_sample", "update", weights)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for name in parts:
            clock = partial(clocked, name, getattr(pods, name))
            stack.enter_context(patch.object(pods, name, clock))
        for number in range(repeats + 1):
            groups, metrics = clocked("step", take_step, cfg)
            clocked("log", pods.log_rollouts, Path(folder), number, problems, groups)
        clocked("checkpoint", pods.save, Path(folder), model, optimizer, metrics)
    taken = {name: median(values) for name, values in seconds.items()}
    whole = taken["step"] + taken["log"]
    rows = [(k, taken[k], "s", "share of a step", taken[k] / whole) for k in (*parts, "log")]
    rest = whole - taken["generate"] - taken["update"] - taken[weights]
    rows.append(("all but generate, update and weights", rest, "s", "share", rest / whole))
    saved = taken["checkpoint"]
    rows.append(("a checkpoint", saved, "s", "share of 10 steps", saved / (10 * whole)))
    state = model.state_dict()
    copies = {name: weight.to(torch.bfloat16) for name, weight in state.items()}
    plain = in_turns(repeats, copy=lambda: [copies[k].copy_(w) for k, w in state.items()])["copy"]
    what = f"{sum(copy.nbytes for copy in copies.values()) / 1e6:.0f} MB of weights into vLLM"
    return [*rows, (what, taken[weights], "s", "time / a plain copy", taken[weights] / plain)]


def mixed_rewards():
    """Rewards that alternate, so that no group is without gradient and left out of the update."""
    values = itertools.cycle((0.0, 1.0))
    return patch.object(pods, "reward", lambda text, gold: next(values))


def growth(repeats: int) -> list[tuple]:
    """Steps of one prompt, at several n and m."""
    cfg, problems = demonstration(n=128, m=64, prompts_per_step=1, lr=1e-7)
    *_, take_step = stepper(cfg, problems)
    grid = {f"{n}, {m}": (n, m) for n, m in [(16, 16), (64, 16), (128, 16), (64, 4), (64, 64)]}
    calls = {case: partial(take_step, replace(cfg, n=n, m=m)) for case, (n, m) in grid.items()}
    with mixed_rewards():
        taken = in_turns(repeats, **calls)
    rows = [(f"a step, (n, m) = ({case})", taken[case], "s", "", None) for case in grid]
    ours = taken["64, 16"]
    for other, beside in (("64, 64", "GRPO on all n"), ("16, 16", "GRPO with n = m")):
        what, ratio = f"(64, 16) beside ({other})", ours / taken[other]
        rows.append((what, ours, "s", f"time / {beside}", ratio))
    generated = (taken["128, 16"] - taken["16, 16"]) / 112
    updated = (taken["64, 64"] - taken["64, 4"]) / 60
    rows.append(("a rollout more generated", 1e3 * generated, "ms", "", None))
    what, beside = "a rollout more updated on", "time / generated"
    return [*rows, (what, 1e3 * updated, "ms", beside, updated / generated)]


# ----- Beside TRL


def peers(repeats: int) -> list[tuple]:
    if importlib.util.find_spec("trl") is None:
        return []
    ours, theirs = (in_own_process(name, repeats) for name in ("our_steps", "trl_steps"))
    what, beside = "a step of 1 prompt, n = m = 16, 64 tokens", "TRL's time / ours"
    rows = [(what, ours[0], "s", beside, theirs[0] / ours[0])]
    return [*rows, ("its peak memory", ours[1] / GIB, "GiB", "TRL's / ours", theirs[1] / ours[1])]


def peak_of_process() -> int:
    """Bytes."""
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return torch.cuda.max_memory_reserved() if CUDA else resident


def our_steps(repeats: int) -> tuple[float, int]:
    """Median seconds of a step, and the peak of memory in bytes."""
    cfg, problems = demonstration(n=16, m=16, prompts_per_step=1)
    *_, take_step = stepper(cfg, problems)
    with mixed_rewards():
        return in_turns(repeats, step=partial(take_step, cfg))["step"], peak_of_process()


def trl_steps(repeats: int) -> tuple[float, int]:
    """The same by TRL, which generates with transformers."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cfg, problems = demonstration(n=16, m=16, prompts_per_step=1)
    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **options):
            ends.append(time.perf_counter())

    def score(completions, **_) -> list[float]:
        return [float(i % 2) for i in range(len(completions))]

    prompt = pods.build_messages(problems[0]["question"], True)
    data = Dataset.from_list([{"prompt": prompt}] * 100)
    settings = dict(use_cpu=not CUDA, bf16=True, model_init_kwargs={"dtype": "float32"})
    settings |= dict(num_generations=cfg.n, per_device_train_batch_size=cfg.n, beta=0.0)
    settings |= dict(max_completion_length=cfg.max_new_tokens, temperature=1.0)
    settings |= dict(learning_rate=cfg.lr, max_steps=repeats + 2, gradient_checkpointing=False)
    settings |= dict(save_strategy="no", report_to="none", disable_tqdm=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(folder, **settings)
        GRPOTrainer(cfg.model, score, settings, data, callbacks=[Clock()]).train()
    return median(after - before for before, after in zip(ends, ends[1:])), peak_of_process()


# ----- All sections

SECTIONS = {each.__name__: each for each in (selection, update, generation, step, growth, peers)}
HELPERS = {each.__name__: each for each in (default_blocks, our_steps, trl_steps)}


def in_own_process(name: str, repeats: int):
    """What the function of this name returns, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "experiments.bench", name]
    command += ["--repeats", str(repeats), "--in_this_process"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"bench: {name} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--repeats", type=int, default=5, help="of each timing (default 5)")
    parser.add_argument("--in_this_process", action="store_true", help="only prints, as JSON")
    args = parser.parse_args()
    known = SECTIONS | HELPERS if args.in_this_process else SECTIONS
    if unknown := set(args.sections) - set(known):
        parser.error(f"there is no section {min(unknown)}; there are {', '.join(SECTIONS)}")
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}, but must be at least 1")
    if args.in_this_process:
        print(*(json.dumps(known[name](args.repeats)) for name in args.sections), sep="\n")
        return 0
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    machine = torch.cuda.get_device_name() if CUDA else machine
    file = RESULTS / "bench.json"
    found = json.loads(file.read_text())["sections"] if file.exists() else {}
    for name in args.sections or SECTIONS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = in_own_process(name, args.repeats)
        ordered = {section: found[section] for section in SECTIONS if section in found}
        write_json(file, {"machine": machine, "sections": ordered})
    print(f"Written: {file}. The table: python -m experiments.figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
