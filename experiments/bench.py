"""How long each part takes, beside the least it could take, and how much memory.

    python -m experiments.bench                        all sections, about 20 minutes on 2 cores
    python -m experiments.bench selection update       some of them

Writes experiments/results/bench.json, from which figures.py makes the table. Each section has a
process of its own, so that none finds the memory and the engines of another. In it, all that is
compared runs in turns; times are medians of --repeats. The model is the demonstration's, in bf16.
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
HEAD = ["what", "measured", "beside", "ratio"]


def row(
    what: str, value: float, unit: str, beside: str = "", ratio: float | None = None
) -> list[str]:
    """A line of the table. `beside` says what the ratio is of."""
    return [what, f"{number(value)} {unit}", beside, "" if ratio is None else number(ratio)]


def number(x: float) -> str:
    return f"{x:.0f}" if x >= 1000 else f"{x:.3g}"


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
    for turn in range(repeats + 1):
        for name, call in calls.items():
            taken, _ = timed(lambda: [call() for _ in range(number)])
            if turn:
                seconds[name].append(taken / number)
    return {name: median(values) for name, values in seconds.items()}


def demonstration(**settings) -> pods.Config:
    return pods.Config(**DEMONSTRATION | settings)


def problems_of(cfg: pods.Config) -> list[dict]:
    problems = pods.load_problems(cfg, AutoTokenizer.from_pretrained(cfg.model), "train")
    return pods.problems_of_step(problems, cfg, 1)


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


def selection(repeats: int) -> list[list[str]]:
    rows = []
    for n in (64, 512, 1_000_000):
        m, generator = n // 4, torch.Generator().manual_seed(n)
        rewards = torch.rand(n, generator=generator).to(pods.DEVICE)
        calls = {"ours": partial(max_variance, rewards, m)}
        calls["sort"] = partial(rewards.sort, descending=True)
        if n < 1000:
            calls["loop"] = partial(textbook, rewards.tolist(), m)
        taken = in_turns(repeats, 20 if n < 1000 else 1, **calls)
        ratio = taken["ours"] / taken["sort"]
        what = f"max_variance, n = {n}, m = {m}"
        rows.append(row(what, 1e3 * taken["ours"], "ms", "time / torch.sort", ratio))
        if n < 1000:
            ratio, what = taken["loop"] / taken["ours"], "the loop, O(n log n + m^2)"
            rows.append(row(what, 1e3 * taken["loop"], "ms", "its time / ours", ratio))
    rewards = torch.rand(64, 64, device=pods.DEVICE)
    calls = dict(one=partial(max_variance, rewards, 16))
    calls["many"] = partial(lambda: [max_variance(each, 16) for each in rewards])
    taken = in_turns(repeats, 20, **calls)
    what, ratio = "64 prompts, n = 64, m = 16, in one call", taken["many"] / taken["one"]
    return [*rows, row(what, 1e3 * taken["one"], "ms", "64 calls / it", ratio)]


# ----- The update


def made_up(prompts: int, n: int, prompt: int, shortest: int, longest: int) -> list[list]:
    """Groups of rollouts of random tokens; a fourth of them has a reward of 1."""
    rng, groups = random.Random(0), []
    for _ in range(prompts):
        prompt_ids, group = [rng.randrange(1000) for _ in range(prompt)], []
        for i in range(n):
            ids = [rng.randrange(1000) for _ in range(rng.randint(shortest, longest))]
            grades = i % 4 == 0, False, float(i % 4 == 0)
            group.append(pods.Rollout(prompt_ids, ids, [-5.0] * len(ids), "", False, *grades))
        groups.append(group)
    return groups


def update(repeats: int) -> list[list[str]]:
    cfg = demonstration(lr=1e-7)
    model, optimizer = pods.build_model_and_optimizer(cfg)
    groups = made_up(2, cfg.n, 128, 16, 512)
    pods.down_sample(groups, cfg)
    kept = [rollout for group in groups for rollout in group if rollout.kept]
    batches = pods.micro_batches(kept, cfg.micro_batch_tokens)
    packed = [pods.pack(batch)[0] for batch in batches]
    single = [torch.tensor(r.prompt_ids + r.completion_ids, device=pods.DEVICE) for r in kept]

    def ours() -> None:
        pods.down_sample(groups, cfg)
        pods.update(model, optimizer, kept, len(kept), cfg)

    def bare(sequences: list[torch.Tensor]) -> None:
        for ids in sequences:
            with torch.autocast(pods.DEVICE.type, torch.bfloat16):
                loss = model(ids[None], labels=ids[None], use_cache=False).loss
            loss.backward()
        optimizer.zero_grad()

    calls = dict(ours=ours, single=partial(bare, single), packed=partial(bare, packed))
    taken = in_turns(repeats, **calls)
    tokens, computed = sum(map(len, single)), sum(map(len, packed))
    completions = sum(len(rollout.completion_ids) for rollout in kept)
    needed = completions + sum(len(batch[0].prompt_ids) for batch in batches)
    what, beside = (
        f"{len(kept)} rollouts of 16 to 512 tokens, update",
        "rate / bare forward, backward",
    )
    rate, ratio = tokens / taken["ours"], taken["single"] / taken["ours"]
    rows = [row(what, rate, "tokens/s", beside, ratio)]
    what, beside = "the same beside bare work on the packed tokens", "rate / bare, prompts once"
    rate, ratio = computed / taken["ours"], taken["packed"] / taken["ours"]
    rows.append(row(what, rate, "tokens/s", beside, ratio))
    rows.append(row("tokens computed", computed, "tokens", "of all", computed / tokens))
    rows.append(row("padding", computed - needed, "tokens", "share", 1 - needed / computed))
    return rows + logprobs_memory()


def logprobs_memory() -> list[list[str]]:
    """Peaks of the log-probs of T tokens, with Qwen2.5's vocabulary and next to no trunk."""
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=1, num_key_value_heads=1, vocab_size=151_936)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes), attn_implementation="sdpa")
    model, rows = model.to(pods.DEVICE).train(), []
    for tokens in (512, 2048, 4096):
        packed = pods.pack(made_up(1, 1, 3, tokens, tokens)[0])

        def forward_and_backward() -> None:
            with torch.autocast(pods.DEVICE.type, torch.bfloat16):
                found = pods.completion_logprobs(model, *packed, 1.0)
            found.sum().backward()

        taken, whole = peak_memory(forward_and_backward), 4 * tokens * model.config.vocab_size
        what, beside = f"log-probs of {tokens} tokens, peak memory", "of all logits in float32"
        rows.append(row(what, taken / GIB, "GiB", beside, taken / whole))
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


def rates(llm, problems: list[dict], cfg: pods.Config, repeats: int) -> dict[str, float]:
    """Tokens a second of pods.generate, and of vLLM's own LLM.generate with the same settings."""
    prompts = [{"prompt_token_ids": problem["prompt_ids"]} for problem in problems]
    options = dict(n=cfg.n, temperature=1.0, max_tokens=cfg.max_new_tokens)
    tokens = defaultdict(list)

    def ours() -> None:
        set_seed(0)
        groups = pods.generate(llm, problems, cfg.n, 1.0, cfg.max_new_tokens)
        tokens["ours"] = sum(len(r.completion_ids) for group in groups for r in group)

    def bare() -> None:
        set_seed(0)
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, SamplingParams(**options, logprobs=0), use_tqdm=False)
        tokens["bare"] = sum(len(o.token_ids) for output in outputs for o in output.outputs)

    taken = in_turns(repeats, ours=ours, bare=bare)
    return {name: tokens[name] / taken[name] for name in taken}


def shorter(problems: list[dict]) -> list[dict]:
    """With prompts below 128 tokens, of which a block of 128 shares nothing between rollouts."""
    return [problem | {"prompt_ids": problem["prompt_ids"][-124:]} for problem in problems]


def generation(repeats: int) -> list[list[str]]:
    cfg = demonstration()
    problems = problems_of(cfg)
    llm = pods.start_engine(cfg, problems)
    found = rates(llm, problems, cfg, repeats)
    what, ratio = f"{len(problems)} prompts x {cfg.n} rollouts", found["ours"] / found["bare"]
    rows = [row(what, found["ours"], "tokens/s", "rate / LLM.generate", ratio)]
    if not CUDA:
        ours = rates(llm, shorter(problems), cfg, repeats)["ours"]
        theirs = in_own_process("default_blocks", repeats)
        what, beside = "the same with prompts of 124 tokens", "rate / vLLM's blocks of 128 tokens"
        rows.append(row(what, ours, "tokens/s", beside, ours / theirs))
    return rows


def default_blocks(repeats: int) -> float:
    """Tokens a second of our engine, but with vLLM's own size of a cache's block."""
    cfg, start = demonstration(), pods.LLM

    def without_block_size(*args, block_size, **options):
        return start(*args, **options)

    problems = shorter(problems_of(cfg))
    with patch.object(pods, "LLM", without_block_size):
        llm = pods.start_engine(cfg, problems)
    return rates(llm, problems, cfg, repeats)["ours"]


# ----- A step, and its growth


def step(repeats: int) -> list[list[str]]:
    """The shares of a step, by a clock around each of its functions; a checkpoint; the weights."""
    cfg, seconds = demonstration(), defaultdict(list)
    problems = problems_of(cfg)
    llm = pods.start_engine(cfg, problems)
    model, optimizer = pods.build_model_and_optimizer(cfg)

    def clocked(call: Callable, name: str, *args, **kwargs):
        taken, result = timed(partial(call, *args, **kwargs))
        seconds[name].append(taken)
        return result

    parts = ("generate", "down_sample", "update", "load_weights_into_vllm")
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for name in parts:
            clock = partial(clocked, getattr(pods, name), name)
            stack.enter_context(patch.object(pods, name, clock))
        for number in range(repeats + 1):
            groups, metrics = clocked(pods.take_step, "step", llm, model, optimizer, problems, cfg)
            clocked(pods.log_rollouts, "log", Path(folder), number, problems, groups)
        clocked(pods.save, "checkpoint", Path(folder), model, optimizer, metrics)
    taken = {name: median(values) for name, values in seconds.items()}
    whole = taken["step"] + taken["log"]
    rows = [
        row(name, taken[name], "s", "share of a step", taken[name] / whole)
        for name in (*parts, "log")
    ]
    rest = whole - sum(taken[name] for name in ("generate", "update", "load_weights_into_vllm"))
    rows.append(row("all but generate, update and weights", rest, "s", "share", rest / whole))
    saved, sent = taken["checkpoint"], taken["load_weights_into_vllm"]
    rows.append(row("a checkpoint", saved, "s", "share of 10 steps", saved / (10 * whole)))
    state = model.state_dict()
    copies = {name: weight.to(torch.bfloat16) for name, weight in state.items()}
    plain = in_turns(repeats, copy=lambda: [copies[k].copy_(w) for k, w in state.items()])["copy"]
    size = sum(copy.nbytes for copy in copies.values()) / 1e6
    rows.append(
        row(f"{size:.0f} MB of weights into vLLM", sent, "s", "time / a copy", sent / plain)
    )
    return rows


def growth(repeats: int) -> list[list[str]]:
    """Steps of one prompt, at several n and m. Rewards alternate, so that no group is left out."""
    cfg = demonstration(n=128, m=64, prompts_per_step=1, lr=1e-7)
    problems, count = problems_of(cfg), itertools.count()
    llm = pods.start_engine(cfg, problems)
    model, optimizer = pods.build_model_and_optimizer(cfg)

    def one(n: int, m: int) -> None:
        pods.take_step(llm, model, optimizer, problems, replace(cfg, n=n, m=m))

    grid = [(16, 16), (64, 16), (128, 16), (64, 4), (64, 64)]
    with patch.object(pods, "reward", lambda text, gold: float(next(count) % 2)):
        taken = in_turns(repeats, **{f"{n}, {m}": partial(one, n, m) for n, m in grid})
    rows = [row(f"a step, (n, m) = ({case})", seconds, "s") for case, seconds in taken.items()]
    ours = taken["64, 16"]
    for other, beside in (("64, 64", "time / GRPO on all n"), ("16, 16", "time / GRPO with n = m")):
        rows.append(row(f"(64, 16) beside ({other})", ours, "s", beside, ours / taken[other]))
    generated = (taken["128, 16"] - taken["16, 16"]) / 112
    updated = (taken["64, 64"] - taken["64, 4"]) / 60
    rows.append(row("a rollout more generated", 1e3 * generated, "ms"))
    beside = "time / one generated"
    rows.append(row("a rollout more updated", 1e3 * updated, "ms", beside, updated / generated))
    return rows


# ----- Beside TRL


def peers(repeats: int) -> list[list[str]]:
    if importlib.util.find_spec("trl") is None:
        return []
    ours, theirs = (in_own_process(name, repeats) for name in ("our_steps", "trl_steps"))
    what, beside = "a step of 1 prompt, n = m = 16, 64 tokens", "TRL's time / ours"
    rows = [row(what, ours[0], "s", beside, theirs[0] / ours[0])]
    beside = "TRL's / ours"
    return [*rows, row("its peak memory", ours[1] / GIB, "GiB", beside, theirs[1] / ours[1])]


def peak_of_process() -> int:
    """Bytes."""
    if CUDA:
        return torch.cuda.max_memory_reserved()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def our_steps(repeats: int) -> tuple[float, int]:
    """Median seconds of a step, and the peak of memory in bytes."""
    cfg = demonstration(n=16, m=16, prompts_per_step=1)
    problems = problems_of(cfg)
    llm = pods.start_engine(cfg, problems)
    model, optimizer = pods.build_model_and_optimizer(cfg)
    call = partial(pods.take_step, llm, model, optimizer, problems, cfg)
    return in_turns(repeats, step=call)["step"], peak_of_process()


def trl_steps(repeats: int) -> tuple[float, int]:
    """The same by TRL, which generates with transformers."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cfg, ends = demonstration(n=16, m=16, prompts_per_step=1), []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ends.append(time.perf_counter())

    def score(completions, answer, **_):
        return [pods.reward(c[0]["content"], gold) for c, gold in zip(completions, answer)]

    problems = [
        {"prompt": pods.build_messages(problem["question"], True), "answer": problem["gold"]}
        for problem in pods.read_problems(cfg.data, "train")
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder,
            use_cpu=not CUDA,
            bf16=True,
            num_generations=cfg.n,
            max_completion_length=cfg.max_new_tokens,
            per_device_train_batch_size=cfg.n,
            learning_rate=cfg.lr,
            max_steps=repeats + 2,
            temperature=1.0,
            beta=0.0,
            save_strategy="no",
            report_to="none",
            gradient_checkpointing=False,
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        )
        data = Dataset.from_list(problems)
        GRPOTrainer(cfg.model, score, settings, data, callbacks=[Clock()]).train()
    steps = [after - before for before, after in zip(ends, ends[1:])]
    return median(steps), peak_of_process()


# ----- All sections

SECTIONS = dict(selection=selection, update=update, generation=generation)
SECTIONS |= dict(step=step, growth=growth, peers=peers)
HELPERS = dict(default_blocks=default_blocks, our_steps=our_steps, trl_steps=trl_steps)


def in_own_process(name: str, repeats: int):
    """What the function of this name returns in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "experiments.bench", name]
    command += ["--repeats", str(repeats), "--in_this_process"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench: {name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "sections", nargs="*", help=f"of {', '.join(SECTIONS)}; all if none is named"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="how often each is timed (default 5)"
    )
    parser.add_argument(
        "--in_this_process", action="store_true", help="prints JSON, writes nothing"
    )
    args = parser.parse_args()
    known = SECTIONS | (HELPERS if args.in_this_process else {})
    if unknown := set(args.sections) - set(known):
        parser.error(f"there is no section {min(unknown)}; there are {', '.join(SECTIONS)}")
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}, but must be at least 1")
    if args.in_this_process:
        for name in args.sections:
            print(json.dumps(known[name](args.repeats)))
        return 0
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    machine = torch.cuda.get_device_name() if CUDA else machine
    file = RESULTS / "bench.json"
    found = json.loads(file.read_text())["sections"] if file.exists() else {}
    for name in args.sections or SECTIONS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found[name] = in_own_process(name, args.repeats)
        ordered = {section: found[section] for section in SECTIONS if section in found}
        write_json(file, {"machine": machine, "head": HEAD, "sections": ordered})
    print(f"Written: {file}. The table: python -m experiments.figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
