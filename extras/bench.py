"""How long each part takes, beside the least it could take, and how much memory.

    python extras/bench.py                      all sections, about half an hour on 2 cores
    python extras/bench.py selection update     some of them
    python extras/bench.py shapes               the update at the shapes of Qwen2.5, for a GPU

Prints one table and writes extras/bench.json. All that is compared runs in turns, in one process
(but for settings that an engine takes at its start); times are medians of --repeats.
"""

import argparse
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
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from transformers import AutoModelForCausalLM, set_seed

import pods
from extras import checks, runs
from extras.memory import GIB, QWEN, keep_freed_memory, predict, qwen, sums
from pods import Config, Rollout, SamplingParams
from sampling import max_variance

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
MODEL = HERE.parent / "models" / "SmolLM2-135M-Instruct"
ROWS: list[dict] = []


def row(what: str, value: float, unit: str, beside: str = "", ratio: float | None = None, target: str = ""):
    """A line of the table. `ratio` is what the target is about, as in ">= 0.9", and `beside` says of what."""
    met = ""
    if target:
        sign, bound = target.split()
        met = "yes" if (ratio >= float(bound) if sign == ">=" else ratio < float(bound)) else "no"
    cells = dict(what=what, value=value, unit=unit, beside=beside, ratio=ratio, target=target, met=met)
    ROWS.append(cells)
    print(line(cells), file=sys.stderr, flush=True)


def line(cells: dict) -> str:
    value, ratio = (f"{x:.0f}" if x >= 1000 else f"{x:.3g}" for x in (cells["value"], cells["ratio"] or 0))
    measured = f"{value} {cells['unit']}"
    ratio = ratio if cells["ratio"] is not None else ""
    return (
        f"| {cells['what']} | {measured} | {cells['beside']} | {ratio} | {cells['target']} | {cells['met']} |"
    )


def timed(call: Callable):
    """Seconds that call() takes, and what it returns."""
    if ON_GPU:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def in_turns(repeats: int, number: int = 1, **calls: Callable) -> dict[str, float]:
    """The median seconds of each call, after one round that is not counted.

    Each round times all of them, one after another, and each `number` times in a row: what takes microseconds
    would otherwise be measured with the caches that the one before left behind.
    """
    seconds = defaultdict(list)
    for turn in range(repeats + 1):
        for name, call in calls.items():
            taken, _ = timed(lambda: [call() for _ in range(number)])
            if turn:
                seconds[name].append(taken / number)
    return {name: median(values) for name, values in seconds.items()}


def demo(**settings) -> Config:
    """The settings of the CPU demonstration."""
    base = Config(
        str(MODEL), "easy", "bench", n=16, m=4, prompts_per_step=6, lr=1e-5, example=True, eager=True
    )
    base = replace(base, max_prompt_tokens=192, max_new_tokens=64, micro_batch_tokens=1024)
    return replace(base, **settings)


def load(cfg: Config):
    options = dict(attn_implementation="sdpa", trust_remote_code=cfg.trust_remote_code)
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32, **options)
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(DEVICE).train()


def prompts_of(cfg: Config, count: int) -> list[list[int]]:
    tokenizer = checks.load_tokenizer(cfg)
    prompts, _ = pods.encode(pods.load_problems(cfg.data, "train"), tokenizer, cfg)
    return random.Random(0).sample(prompts, count)


def made_up(groups: int, m: int, prompt: int, shortest: int, longest: int, vocabulary: int) -> list[Rollout]:
    """Rollouts of random tokens, m for each of `groups` prompts, with advantages that are not 0."""
    rng = random.Random(0)
    tokens = lambda count: [rng.randrange(vocabulary) for _ in range(count)]
    rollouts = []
    for _ in range(groups):
        prompt_ids = tokens(prompt)
        for i in range(m):
            ids = tokens(rng.randint(shortest, longest))
            rollouts.append(Rollout(prompt_ids, ids, [-5.0] * len(ids), "", False, advantage=(-1.0) ** i))
    return rollouts


# ----- 1. Selection


def textbook(rewards: list[float], m: int) -> list[int]:
    """O(n log n + m^2): each of the m + 1 candidates has its variance computed from its m rewards."""
    order = sorted(range(len(rewards)), key=lambda i: -rewards[i])
    best, best_variance = None, -1.0
    for k in range(m + 1):
        kept = [rewards[i] for i in order[:k] + order[len(order) - m + k :]]
        mean = math.fsum(kept) / m
        variance = math.fsum([(r - mean) ** 2 for r in kept]) / m
        if variance > best_variance:
            best, best_variance = k, variance
    return order[:best] + order[len(order) - m + best :]


def selection(repeats: int) -> None:
    for n in (16, 64, 512, 4096, 65_536, 1_000_000):
        m = n // 4
        rewards = torch.rand(n, generator=torch.Generator().manual_seed(n)).to(DEVICE)
        calls = dict(ours=lambda: max_variance(rewards, m), sort=lambda: rewards.sort(descending=True))
        if n <= 4096:
            values = rewards.tolist()
            calls["loop"] = lambda: textbook(values, m)
            found = rewards[max_variance(rewards, m)].var(), rewards[textbook(values, m)].var()
            assert math.isclose(*found, rel_tol=1e-6), found
        rounds = in_turns(repeats, 20 if n < 10_000 else 1, **calls)
        ratio, target = rounds["ours"] / rounds["sort"], "< 3" if n == 1_000_000 else ""
        row(f"max_variance, n = {n}, m = {m}", rounds["ours"] * 1e3, "ms", "time / torch.sort", ratio, target)
        if "loop" in rounds:
            speed_up = rounds["loop"] / rounds["ours"]
            row(
                "the loop, O(n log n + m^2)",
                rounds["loop"] * 1e3,
                "ms",
                "its time / ours",
                speed_up,
                ">= 20" if n == 512 else "",
            )
    rewards = torch.rand(64, 64).to(DEVICE)
    calls = dict(one=lambda: max_variance(rewards, 16), many=lambda: [max_variance(r, 16) for r in rewards])
    rounds = in_turns(repeats, 20, **calls)
    row(
        "64 prompts, n = 64, m = 16, in one call",
        rounds["one"] * 1e3,
        "ms",
        "64 calls / it",
        rounds["many"] / rounds["one"],
        ">= 10",
    )


# ----- 2. The update


def update(repeats: int) -> None:
    cfg = demo()
    model = load(cfg)
    optimizer = pods.AdamW(model.parameters(), 1e-7, fused=True)
    rollouts = made_up(2, cfg.n, 128, 16, 512, model.config.vocab_size)
    groups = [rollouts[i : i + cfg.n] for i in range(0, len(rollouts), cfg.n)]
    for i, rollout in enumerate(rollouts):
        rollout.reward = float(i % 4 == 0)
    pods.down_sample(groups, cfg)
    kept = [r for r in rollouts if r.kept]
    tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for r in kept)
    rows = pods.cut_into_rows(kept, cfg.micro_batch_tokens)
    packed = [pods.pack(each, DEVICE) for each in rows]
    alone = [torch.tensor([r.prompt_ids + r.completion_ids], device=DEVICE) for r in kept]

    def ours() -> None:
        pods.down_sample(groups, cfg)
        pods.update(model, None, optimizer, [r for r in rollouts if r.kept], len(kept), cfg)

    def bare(sequences: list[torch.Tensor]) -> None:
        for ids in sequences:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.zero_grad()

    rounds = in_turns(
        repeats, ours=ours, bare=lambda: bare(alone), once=lambda: bare([ids[None] for ids, *_ in packed])
    )
    rate = tokens / rounds["ours"]
    row(
        f"{len(kept)} rollouts of 16 to 512 tokens, whole update",
        rate,
        "tokens/s",
        "rate / bare forward, backward",
        rounds["bare"] / rounds["ours"],
        ">= 0.9",
    )
    computed = sum(len(ids) for ids, *_ in packed)
    row(
        "the same beside bare work on the packed tokens",
        computed / rounds["ours"],
        "tokens/s",
        "rate / bare, prompts once",
        rounds["once"] / rounds["ours"],
    )
    row("tokens computed, each prompt once", computed, "tokens", "of all", computed / tokens)
    needed = sum(len(each[0].prompt_ids) + sum(len(r.completion_ids) for r in each) for each in rows)
    row("padding", computed - needed, "tokens", "share", 1 - needed / computed, "< 0.1")
    flops = 6 * sum(p.numel() for p in model.parameters()) * computed
    peak = peak_flops()
    row(
        "operations, 6 x parameters x computed tokens",
        flops / 1e12,
        "TFLOP",
        "floor / time",
        flops / peak / rounds["ours"],
    )
    logits_memory()


def peak_flops() -> float:
    """Multiplications and additions a second in bfloat16, of 2048 x 2048 matrices (8192 on a GPU)."""
    size = 8192 if ON_GPU else 2048
    a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    return 2 * size**3 / in_turns(9, product=lambda: a @ a)["product"]


def bandwidth() -> float:
    """Bytes a second that are read from memory, of 512 MiB."""
    x = torch.ones(2**27, device=DEVICE)
    return 4 * x.numel() / in_turns(9, read=lambda: x.sum())["read"]


def logits_memory() -> None:
    """What the log-probs of T tokens take at their peak, with Qwen2.5's vocabulary and next to no trunk."""
    config = qwen("0.5B")
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 64, 64, 1
    config.num_attention_heads, config.num_key_value_heads, config.layer_types = 1, 1, ["full_attention"]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(DEVICE).train()
    for tokens in (512, 2048, 4096):
        rollout = Rollout([1, 2, 3], [5] * tokens, [-5.0] * tokens, "", False)
        packed = pods.pack([rollout], DEVICE)

        def logprobs() -> None:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                found = pods.completion_logprobs(model, *packed, 1.0)
            found.sum().backward()

        taken = peak_memory(logprobs) / GIB
        all_at_once = 4 * tokens * config.vocab_size / GIB
        row(
            f"log-probs of {tokens} tokens, peak memory",
            taken,
            "GiB",
            "of one float32 copy of all logits",
            taken / all_at_once,
        )


def peak_memory(call: Callable) -> int:
    """Bytes by which the peak of call() is above what was taken before."""
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    read = lambda key: int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) * 1024
    call()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = read("VmRSS")
    call()
    return read("VmHWM") - before


# ----- 3. Generation


def generation(repeats: int) -> None:
    cfg = demo()
    prompts = prompts_of(cfg, cfg.prompts_per_step)
    llm = pods.start_engine(cfg, ON_GPU)
    ours = SamplingParams(n=cfg.n, temperature=1.0, max_tokens=cfg.max_new_tokens, logprobs=0)
    produced = defaultdict(int)

    def rollouts() -> None:
        set_seed(0)
        groups = pods.generate(llm, prompts, ours)
        produced["ours"] = sum(len(r.completion_ids) for group in groups for r in group)

    def bare(logprobs) -> None:
        set_seed(0)
        llm.reset_prefix_cache()
        params = SamplingParams(n=cfg.n, temperature=1.0, max_tokens=cfg.max_new_tokens, logprobs=logprobs)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        produced["bare", logprobs] = sum(len(o.token_ids) for output in outputs for o in output.outputs)

    rounds = in_turns(repeats, ours=rollouts, bare=lambda: bare(0), without=lambda: bare(None))
    rate = {
        key: produced[key] / rounds[name]
        for key, name in (("ours", "ours"), (("bare", 0), "bare"), (("bare", None), "without"))
    }
    what = f"{cfg.prompts_per_step} prompts x {cfg.n} rollouts"
    row(what, rate["ours"], "tokens/s", "rate / LLM.generate", rate["ours"] / rate["bare", 0], ">= 0.97")
    row(
        "",
        rate["bare", None],
        "tokens/s",
        "rate / LLM.generate without log-probs",
        rate["ours"] / rate["bare", None],
    )

    # The floor of one decode step with all sequences alive: read the weights once, and multiply by them.
    sequences = cfg.prompts_per_step * cfg.n
    steps = lambda count: pods.generate(
        llm, prompts, SamplingParams(n=cfg.n, max_tokens=count, ignore_eos=True, logprobs=0)
    )
    rounds = in_turns(repeats, short=lambda: steps(2), long=lambda: steps(34))
    step = (rounds["long"] - rounds["short"]) / 32
    weights = sum(p.numel() for p in load(cfg).parameters())
    read, multiply = 2 * weights / bandwidth(), 2 * weights * sequences / peak_flops()
    row(f"a decode step of {sequences} sequences", step * 1e3, "ms")
    row("reading the weights once", read * 1e3, "ms", "floor / time", read / step)
    row("multiplying by them", multiply * 1e3, "ms", "floor / time", multiply / step)
    if not ON_GPU:
        settings(repeats)


VARIANTS = {  # the demonstration's prompts have 129 tokens or a few more: 4 blocks of 32, and 1 of 128
    "vLLM's defaults: uncompiled, blocks of 128 tokens; prompts 5 tokens shorter": dict(
        block_size=None, shorter=5
    ),
    "... blocks of 32 tokens": dict(shorter=5),
    "uncompiled, as pods.py with --eager": dict(),
    "... with Intel's OpenMP": dict(preload="libiomp5.so"),
    "... compiled, as pods.py without --eager": dict(eager=False),
}


def settings(repeats: int) -> None:
    """Engines with other settings, each in a process of its own, one after the other."""
    base = None
    for name, variant in VARIANTS.items():
        env = dict(os.environ)
        if "preload" in variant:
            env["LD_PRELOAD"] = str(Path(sys.prefix) / "lib" / variant["preload"])
        rates, start = worker(["--engine", json.dumps(variant)], repeats, env)
        base = base or median(rates)
        target = ">= 1.5" if "as pods.py" in name else ""
        ratio = median(rates) / base
        row(
            f"{name}; starts in {start:.0f} s",
            median(rates),
            "tokens/s",
            "rate / vLLM's defaults",
            ratio,
            target,
        )


def worker(arguments: list[str], repeats: int, env: dict | None = None):
    """What this file prints as JSON when it is run with `arguments`, in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, *arguments, "--repeats", str(repeats)]
    output = subprocess.run(command, env=env, capture_output=True, text=True)
    if output.returncode:
        sys.exit(f"bench.py: {arguments} failed:\n{output.stderr}")
    return json.loads(output.stdout.splitlines()[-1])


def engine(variant: dict, repeats: int) -> None:
    """For `settings`: prints the rates of one engine, tokens a second, and the seconds it took to start."""
    cfg = demo(eager=variant.get("eager", True))
    prompts = [ids[variant.get("shorter", 0) :] for ids in prompts_of(cfg, cfg.prompts_per_step)]
    start = pods.LLM
    if "block_size" in variant:
        pods.LLM = lambda *args, **kwargs: start(*args, **(kwargs | {"block_size": variant["block_size"]}))
    seconds, llm = timed(lambda: pods.start_engine(cfg, ON_GPU))
    params, rates = SamplingParams(n=cfg.n, temperature=1.0, max_tokens=cfg.max_new_tokens, logprobs=0), []
    for turn in range(repeats + 1):
        set_seed(turn)
        taken, groups = timed(lambda: pods.generate(llm, prompts, params))
        rates += [sum(len(r.completion_ids) for group in groups for r in group) / taken] if turn else []
    print(json.dumps([rates, seconds]))


# ----- 4 and 5. Sync, and the shares of a step


def trained(cfg: Config, steps: int, folder: str) -> list[dict]:
    """The metrics of a run of pods.py, with next to no evaluation and one checkpoint, at its end."""
    pods.HERE = Path(folder)
    pods.train(replace(cfg, max_steps=steps, eval_problems=1, eval_every=1000, save_every=1000))
    return [json.loads(line) for line in open(pods.HERE / "runs" / cfg.name / "metrics.jsonl")]


def step(repeats: int) -> None:
    """pods.py's own training loop, with a clock around each of its functions."""
    seconds = defaultdict(list)

    def clock(module, name: str, part: str) -> None:
        call = getattr(module, name)

        def clocked(*args, **kwargs):
            taken, result = timed(lambda: call(*args, **kwargs))
            seconds[part].append(taken)
            return result

        setattr(module, name, clocked)

    for module, name, part in (
        (pods, "generate", "generate"),
        (pods, "reward", "reward"),
        (pods, "down_sample", "select"),
        (pods, "update", "update"),
        (pods, "sync", "sync"),
        (runs, "measure", "log"),
        (runs, "append", "log"),
        (runs, "log_rollouts", "log"),
        (runs, "write_whole", "checkpoint"),
    ):
        clock(module, name, part)
    with tempfile.TemporaryDirectory() as folder:
        metrics = trained(demo(), repeats + 1, folder)
    total = metrics[-1]["train_seconds"]
    parts = {part: sum(taken) for part, taken in seconds.items()}
    # Evaluations, the sync before the first step and the last checkpoint belong to no step.
    parts["generate"] = sum(row.get("generate_seconds", 0) for row in metrics)
    parts["sync"] -= seconds["sync"][0]
    total += parts["log"]
    for part in ("generate", "update", "sync"):
        row(part, parts[part] / (repeats + 1), "s", "share of a step", parts[part] / total)
    rest = total - sum(parts[part] for part in ("generate", "update", "sync"))
    for part in ("reward", "select", "log"):
        row(part, parts[part] / (repeats + 1), "s", "share of a step", parts[part] / total)
    row(
        "all but generate, update and sync",
        rest / (repeats + 1),
        "s",
        "share of a step",
        rest / total,
        "< 0.03",
    )
    saved = max(seconds["checkpoint"])
    row("a checkpoint, every 10 steps", saved, "s", "share of 10 steps", saved / (10 * total / (repeats + 1)))

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    copies = {name: weight.detach().to(torch.bfloat16) for name, weight in model.state_dict().items()}
    size = sum(copy.numel() * copy.element_size() for copy in copies.values())
    plain = in_turns(repeats, copy=lambda: [copies[name].copy_(w) for name, w in model.state_dict().items()])[
        "copy"
    ]
    synced = median(seconds["sync"][1:])
    row(f"{size / 1e6:.0f} MB of weights", synced, "s", "time / a plain copy", synced / plain)
    row("", synced, "s", "share of a step", synced / (total / (repeats + 1)), "< 0.05")


# ----- 6 and 7. Peers, and the cost as the work grows


def growth(repeats: int) -> None:
    """Steps of one prompt, at several n and m. Each group gets rewards of two kinds: none is left out."""
    cfg = demo(n=128, m=64, prompts_per_step=1)
    prompts, model = prompts_of(cfg, 1), load(cfg)
    optimizer = pods.AdamW(model.parameters(), 1e-7, fused=True)
    llm = pods.start_engine(cfg, ON_GPU)

    def one(n: int, m: int) -> None:
        with patch.object(pods, "reward", lambda text, gold, count=itertools.count(): next(count) % 2):
            pods.take_step(llm, model, None, optimizer, prompts, ["7"], replace(cfg, n=n, m=m))

    grid = [(16, 16), (64, 16), (128, 16), (64, 4), (64, 64)]
    rounds = in_turns(repeats, **{f"{n},{m}": lambda n=n, m=m: one(n, m) for n, m in grid})
    for n, m in grid:
        row(f"a step, n = {n}, m = {m}", rounds[f"{n},{m}"], "s")
    pods_step = rounds["64,16"]
    row("(64, 16) beside (64, 64)", pods_step, "s", "time / GRPO on all n", pods_step / rounds["64,64"])
    row("(64, 16) beside (16, 16)", pods_step, "s", "time / GRPO with n = m", pods_step / rounds["16,16"])
    for what, points in (
        ("rollout more, m = 16", [(16, 16), (128, 16)]),
        ("kept rollout more, n = 64", [(64, 4), (64, 64)]),
    ):
        (n0, m0), (n1, m1) = points
        slope = (rounds[f"{n1},{m1}"] - rounds[f"{n0},{m0}"]) / (n1 - n0 + m1 - m0)
        row(f"a {what}", slope * 1e3, "ms")


def peers(repeats: int) -> None:
    if importlib.util.find_spec("trl") is None:
        print("  peers: TRL is not installed here, so nothing is compared with it", file=sys.stderr)
        return
    ours, theirs = (worker(["--peer", name], repeats) for name in ("ours", "trl"))  # each with its own peak
    what = "a step of 1 prompt, n = m = 16, 64 tokens"
    row(what, ours[0], "s", "TRL's time / ours", theirs[0] / ours[0], ">= 1.5")
    row("its peak memory", ours[1] / GIB, "GiB", "TRL's / ours", theirs[1] / ours[1])


def peer(name: str, repeats: int) -> None:
    """For `peers`: prints the median seconds of a step and the peak of memory in bytes."""
    cfg, steps = demo(n=16, m=16, prompts_per_step=1), repeats + 1
    with tempfile.TemporaryDirectory() as folder:
        if name == "ours":
            ends = [metrics["train_seconds"] for metrics in trained(cfg, steps, folder)]
        else:
            ends = train_trl(replace(cfg, max_steps=steps), folder)
    seconds = [after - before for before, after in zip(ends, ends[1:])]
    peak = (
        torch.cuda.max_memory_reserved()
        if ON_GPU
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    print(json.dumps([median(seconds[1:]), peak]))


def train_trl(cfg: Config, folder: str) -> list[float]:
    """The same training by TRL, generation by transformers. Returns the moments at which steps ended."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends = [time.perf_counter()]

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ends.append(time.perf_counter())

    problems = pods.load_problems(cfg.data, "train")
    data = Dataset.from_list(
        [
            {"prompt": pods.build_messages(p["question"], True), "answer": pods.gold_answer(p["answer"])}
            for p in problems
        ]
    )
    args = GRPOConfig(
        folder,
        use_cpu=not ON_GPU,
        bf16=True,
        num_generations=cfg.n,
        max_completion_length=cfg.max_new_tokens,
        per_device_train_batch_size=cfg.n,
        gradient_accumulation_steps=cfg.prompts_per_step,
        learning_rate=cfg.lr,
        max_steps=cfg.max_steps,
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=False,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    score = lambda completions, answer, **_: [
        pods.reward(c[0]["content"], a) for c, a in zip(completions, answer)
    ]
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    GRPOTrainer(
        cfg.model, score, args=args, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]
    ).train()
    return ends


# ----- 8. The update at the shapes of Qwen2.5, on a GPU


def shapes(repeats: int) -> None:
    """Random weights, so nothing is downloaded. Left out of "all": minutes a step without a GPU."""
    for size in QWEN:
        config = qwen(size)
        cfg = Config(gradient_checkpointing=True, micro_batch_tokens=4096, m=16)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        model = model.to(DEVICE).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = pods.AdamW(model.parameters(), 1e-6, fused=True)
        rollouts = made_up(2, cfg.m, 150, 100, 500, config.vocab_size)
        rows = [pods.pack(each, DEVICE)[0] for each in pods.cut_into_rows(rollouts, cfg.micro_batch_tokens)]
        computed = sum(map(len, rows))
        call = lambda: pods.update(model, None, optimizer, rollouts, len(rollouts), cfg)
        seconds = in_turns(repeats, update=call)["update"]
        tokens = sum(len(r.prompt_ids) + len(r.completion_ids) for r in rollouts)
        row(f"Qwen2.5-{size}, update", tokens / seconds, "tokens/s")
        parameters = sum(p.numel() for p in model.parameters())
        share = 6 * parameters * computed / seconds / peak_flops()  # what is computed again is not counted
        row(
            "share of the peak in bfloat16",
            100 * share,
            "%",
            "share",
            share,
            ">= 0.4" if size == "3B" else "",
        )
        if ON_GPU:
            present = torch.cuda.get_device_properties(0).total_memory
            predicted = sums(predict(cfg, config, True, present, pods.LOGITS_AT_ONCE))[1]
            free, total = torch.cuda.mem_get_info()
            row("peak memory", (total - free) / GIB, "GiB", "predicted / it", predicted / (total - free))
        model = optimizer = None
        torch.cuda.empty_cache()


SECTIONS = dict(
    selection=selection,
    update=update,
    generation=generation,
    step=step,
    growth=growth,
    peers=peers,
    shapes=shapes,
)


def refuse(why: str) -> None:
    print(f"bench.py: {why}", file=sys.stderr)
    sys.exit(2)


def table(rows: list[dict]) -> str:
    lines = ["| what | measured | beside | ratio | target | met |", "|---|---|---|---|---|---|"]
    for section, of_section in itertools.groupby(rows, key=lambda cells: cells["section"]):
        lines += [f"| **{section}** | | | | | |", *map(line, of_section)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="section",
        help=f"of {', '.join(SECTIONS)}; all but shapes if none is named",
    )
    parser.add_argument("--repeats", type=int, default=5, help="how often each thing is timed (default 5)")
    parser.add_argument(
        "--out",
        type=Path,
        default=HERE / "bench.json",
        help="where the JSON goes (default extras/bench.json)",
    )
    parser.add_argument("--engine", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        refuse(f"there is no section {unknown.pop()}; there are {', '.join(SECTIONS)}")
    if args.repeats < 1:
        refuse(f"--repeats is {args.repeats}, but must be at least 1")
    if not args.out.parent.is_dir():
        refuse(f"--out is {args.out}, but there is no folder {args.out.parent}")
    if not MODEL.exists():
        subprocess.run([sys.executable, HERE / "unpack.py", MODEL], check=True)
    if not ON_GPU:
        keep_freed_memory()  # as pods.py does, and for what it is compared with alike
    if args.engine is not None:
        return engine(args.engine, args.repeats)
    if args.peer:
        return peer(args.peer, args.repeats)
    for name in args.sections or [name for name in SECTIONS if name != "shapes"]:
        if len(args.sections) == 1:
            SECTIONS[name](args.repeats)
            ROWS[:] = [dict(section=name, **cells) for cells in ROWS]
        else:  # a process for each, so that none finds the memory and the engines of another
            part = Path(tempfile.mkdtemp()) / "part.json"
            print(f"{name} ...", file=sys.stderr)
            subprocess.run(
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    __file__,
                    name,
                    "--repeats",
                    str(args.repeats),
                    "--out",
                    part,
                ],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            ROWS.extend(json.loads(part.read_text())["rows"])
    machine = torch.cuda.get_device_name() if ON_GPU else f"{os.cpu_count()} cores, {platform.machine()}"
    args.out.write_text(json.dumps(dict(machine=machine, torch=torch.__version__, rows=ROWS), indent=1))
    print(table(ROWS))


if __name__ == "__main__":
    main()
