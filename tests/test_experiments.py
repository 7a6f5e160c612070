"""What the experiments rest on: statistics by hand, a comparison that is killed, gradients."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

import pods
from experiments import bench, compare, figures, gradients, paired, study
from sampling import RULES

ROOT = Path(__file__).resolve().parent.parent

# ----- Statistics


def test_the_bootstrap_interval_of_two_seeds_is_known():
    # The means of two seeds drawn from (0, 1) are 0, 1/2, 1/2, 1, each with a chance of a quarter.
    assert paired.bootstrap_interval([0.0, 1.0]) == (0.0, 1.0)
    assert paired.bootstrap_interval([0.0, 1.0], level=0.4) == (0.5, 0.5)
    assert paired.bootstrap_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)


def test_the_permutation_test_by_hand():
    assert paired.permutation_p([1.0, 1.0, 1.0]) == 2 / 8
    assert paired.permutation_p([3.0, -1.0]) == 1.0  # |sums| 2, 4, 4, 2: all reach 2
    assert paired.permutation_p([3.0, 1.0, -1.0]) == 6 / 8  # |sums| 3: 6 of 8, the others 1
    assert paired.permutation_p([1.0] * 17) == pytest.approx(2 / 2**17, abs=1e-4)  # by chance


def test_curves_by_hand():
    xs, ys = [0.0, 2.0, 4.0], [1.0, 5.0, 3.0]
    found = [paired.value_at(x, xs, ys) for x in (-1, 0, 1, 2, 3.5, 4, 9)]
    assert found == [1, 1, 3, 5, 3.5, 3, 3]
    assert paired.mean_height(xs, ys, 4.0) == (6 + 8) / 4
    assert paired.mean_height(xs, ys, 1.0) == 2.0  # from 1 to 3
    assert paired.mean_height(xs, ys, 6.0) == (6 + 8 + 6) / 6  # goes on at 3
    assert paired.first_time(4.0, xs, ys, 4.0) == (2.0, True)
    assert paired.first_time(4.0, xs, ys, 1.5) == (1.5, False)
    assert paired.first_time(6.0, xs, ys, 9.0) == (4.0, False)  # watched until 4


def test_survival_keeps_runs_that_never_get_there():
    times = [(1.0, True), (2.0, False), (3.0, True), (4.0, False)]
    # At 1, one of 4 arrives: 3/4 are left. At 3 two are still watched, one arrives: 3/8.
    assert paired.survival(times) == [(0.0, 1.0), (1.0, 0.75), (3.0, 0.375)]
    assert paired.restricted_mean(times, 4.0) == 1 + 2 * 0.75 + 0.375
    assert paired.median_time(times) == 3.0
    never = [(4.0, False), (4.0, False), (1.0, True)]
    assert paired.restricted_mean(never, 4.0) == pytest.approx((4 + 4 + 1) / 3)
    assert paired.median_time(never) == math.inf


# ----- A comparison through the real pods.py

SMALL = "--study t --minutes 0.05 --seeds 1 --arms grpo_m max_variance --n 4 --m 2".split()
SMALL += "--data easy --prompts_per_step 1 --max_new_tokens 12 --lr 1e-3 --save_every 1".split()
SMALL += ["--dtype", "float32"]


def start(folder: Path, *arguments) -> subprocess.Popen:
    """A comparison in a copy of the repository, in a group of its own, as a terminal would."""
    command = [sys.executable, "-W", "ignore", "-m", "experiments.compare", *map(str, arguments)]
    options = dict(text=True, cwd=folder, start_new_session=True, stderr=subprocess.PIPE)
    listen = signal.default_int_handler  # it is ignored where the tests run in the background
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, listen)
    return subprocess.Popen(command, stdout=subprocess.PIPE, **options)


def wait_for(file: Path, process: subprocess.Popen) -> None:
    until = time.time() + 300
    while not file.exists() or file.stat().st_size == 0:
        assert process.poll() is None and time.time() < until, process.communicate()[1][-3000:]
        time.sleep(0.05)


def end(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def test_a_comparison_skips_what_is_finished_and_survives_a_kill(tiny, tmp_path):
    for name in ("pods.py", "sampling.py", "rewards.py", "tools", "experiments"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "easy").mkdir()
    for split, count in (("train", 60), ("test", 4)):
        lines = (ROOT / "data" / "easy" / f"{split}.jsonl").read_text().splitlines()[:count]
        (tmp_path / "easy" / f"{split}.jsonl").write_text("\n".join(lines))
    command = [*SMALL, "--model", tiny]
    results, runs = tmp_path / "experiments" / "results" / "t", tmp_path / "runs" / "t"

    process = start(tmp_path, *command)
    wait_for(runs / "max_variance-0" / "metrics.jsonl", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert sorted(file.name for file in results.iterdir()) == ["grpo_m-0.json", "timing.json"]
    before = {file: file.read_bytes() for file in results.iterdir()}

    code, _, err = end(start(tmp_path, *command, "--weight_decay", "1"))
    assert code == 2 and err.count("\n") == 1 and "t was begun with settings" in err

    process = start(tmp_path, *command)
    wait_for(runs / "max_variance-0" / "checkpoint.pt", process)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = end(process)
    assert code == 130 and "compare: max_variance, seed 0: stopped" in err and "grpo_m" not in out

    code, out, _ = end(start(tmp_path, *command))
    assert code == 0 and "All runs of t are finished" in out
    assert before == {file: file.read_bytes() for file in before}
    plan = json.loads((results / "timing.json").read_text())
    assert {step["arm"] for step in plan["timed"]} == set(study.ARMS)
    for arm, n, m in (("grpo_m", 2, 2), ("max_variance", 4, 2)):
        run = json.loads((results / f"{arm}-0.json").read_text())
        assert (run["arm"], run["settings"]["n"], run["settings"]["m"]) == (arm, n, m)
        assert run["metrics"]["step"] == list(range(plan["steps"][arm] + 1))  # each step once
        assert plan["steps"][arm] == max(1, int(3 / plan["step_seconds"][arm]))
        assert not {"checkpoint.pt", "model"} & {f.name for f in (runs / f"{arm}-0").iterdir()}


def test_a_run_that_fails_ends_the_comparison_with_its_exit_code(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    plan = {"n": 4, "m": 2, "minutes": 6, "settings": ["--example"]}
    study.write_json(tmp_path / "t" / "timing.json", plan | {"steps": {"random": 3}})
    monkeypatch.setattr(compare, "HERE", tmp_path)
    (tmp_path / "pods.py").write_text("import sys; print('pods.py: why', file=sys.stderr); exit(1)")
    command = "compare.py --study t --n 4 --m 2 --arms random --example"
    monkeypatch.setattr(sys, "argv", command.split())
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    assert compare.main() == 1
    for number, handler in before.items():
        signal.signal(number, handler)
    why = ["pods.py: why", "compare: random, seed 0: ended with exit code 1"]
    assert capfd.readouterr().err.splitlines() == why


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("--seeds 0", "--seeds must be above 0"),
        ("--minutes nan", "--minutes"),
        ("--m 64", "--m below --n"),
        ("--seed 3", "sets --seed of its runs itself"),
        ("--eval-every=3", "sets --eval_every of its runs itself"),
        ("--arms best", "invalid choice: 'best'"),
        ("--study a/b", "must be a plain folder name"),
    ],
)
def test_a_comparison_that_cannot_work_is_one_line(arguments, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        compare.main()
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and named in err


# ----- Selection and gradients


def test_the_textbook_loop_finds_a_best_subset():
    rng = random.Random(0)
    for n in range(1, 9):
        rewards = [rng.choice([0.0, 0.1, rng.random()]) for _ in range(n)]
        for m in range(1, n + 1):
            kept = bench.textbook(rewards, m)
            best = max(np.var(subset) for subset in combinations(rewards, m))
            assert len(set(kept)) == m
            assert np.var([rewards[i] for i in kept]) == pytest.approx(best, abs=1e-12)


def test_a_sketch_keeps_inner_products():
    torch.manual_seed(0)
    a, b = torch.randn(2, 100_003)
    b += a  # so that the inner product is far from 0
    sketch = gradients.Sketch(100_003, 2**14)
    sa, sb = sketch([a[:7], a[7:]]), sketch([b])
    for x, y, sx, sy in ((a, b, sa, sb), (a, a, sa, sa), (b, b, sb, sb)):
        error = 4 * (x.norm() * y.norm()).item() / 2**7
        assert (sx @ sy).item() == pytest.approx((x @ y).item(), abs=error)
    assert torch.allclose(sketch([a + 2 * b]), sa + 2 * sb, atol=1e-3)


def test_the_studys_gradients_add_up_to_that_of_an_update(tiny):
    settings = dict(n=4, m=2, dtype="float32", temperature=0.7, max_grad_norm=1e9)
    cfg = pods.Config(str(tiny), **settings)
    model, _ = pods.build_model_and_optimizer(cfg)
    rng, groups = random.Random(0), []
    for _ in range(2):
        prompt, group = rng.choices(range(100), k=9), []
        for i in range(4):
            grades = False, False, i % 3 / 2
            ids = rng.choices(range(100), k=3 + i)
            group.append(pods.Rollout(prompt, ids, [], "", False, *grades))
            with torch.no_grad():
                packed = pods.pack(group[-1:])
                logprobs = pods.completion_logprobs(model, *packed, cfg.temperature)
            group[-1].old_logprobs = logprobs.tolist()
        groups.append(group)
    size = sum(p.numel() for p in model.parameters())
    found = gradients.gradients(model, groups, cfg, buckets=size)
    rewards, kept = pods.down_sample(groups, cfg)
    A = pods.advantages(rewards, kept)
    # The mean over 2 kept rollouts, then over 2 prompts.
    weights = torch.zeros_like(rewards).scatter(-1, kept, A / 2) / 2
    expected = torch.einsum("pi,pib->b", weights.float(), found.to(weights.device))

    class Keep(torch.optim.SGD):
        def step(self):
            self.kept = gradients.Sketch(size, size)([p.grad for p in model.parameters()])

    optimizer = Keep(model.parameters(), lr=0.0)
    rollouts = [rollout for group in groups for rollout in group if rollout.kept]
    pods.update(model, optimizer, rollouts, 4, cfg)
    error = 1e-6 + 1e-4 * expected.abs().max().item()
    assert torch.allclose(optimizer.kept.cpu(), expected, atol=error) and expected.norm() > 0.01


def test_the_study_of_subsets_against_explicit_gradients():
    torch.manual_seed(0)
    g = torch.randn(4, 8, 50, dtype=torch.float64)
    rewards = [[1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0.1, 0.2], [0] * 8, [1] * 7 + [0]]
    rewards = torch.tensor(rewards, dtype=torch.float64)
    rows = gradients.study(rewards, torch.einsum("pid,qjd->pqij", g, g), per_step=2)

    def gradient(kept: torch.Tensor, prompts: tuple[int, int]) -> torch.Tensor:
        A, m = pods.advantages(rewards, kept), kept.shape[-1]
        return sum(A[p, j] * g[p, i] / m for p in prompts for j, i in enumerate(kept[p].tolist()))

    for rule, m in (("max_variance", 4), ("max_reward", 2), ("max_variance", 8)):
        for step, prompts in enumerate([(0, 1), (2, 3)]):
            full = gradient(torch.arange(8).expand(4, 8), prompts)
            own = gradient(RULES[rule](rewards, m), prompts)
            (row,) = (r for r in rows if (r["rule"], r["m"], r["step"]) == (rule, m, step))
            cosine = (full @ own / full.norm() / own.norm()).item() if own.norm() > 0 else 0.0
            assert row["cosine"] == pytest.approx(cosine)
            assert row["norm"] == pytest.approx((own.norm() / full.norm()).item())
    summed = {(row["rule"], row["m"]): row for row in gradients.summary(rows)}
    assert summed["max_variance", 8]["cosine"]["mean"] == 1
    assert summed["max_variance", 2]["zero_std_groups"]["steps"] == [0, 0.5]
    assert summed["max_reward", 4]["zero_std_groups"]["steps"] == [0.5, 1]
    # 2 of 8 with one right miss it 3 times in 4; with 4 right, 2 wrong, 2 between, 7 of 28 tie.
    share = summed["random", 2]["zero_std_groups"]["steps"][0]
    assert share == pytest.approx((3 / 4 + 7 / 28) / 2, abs=0.15)


# ----- Figures and tables


def test_the_variances_of_the_method_figure_are_those_of_all_subsets():
    rewards = sorted((random.Random(3).random() for _ in range(9)), reverse=True)
    best = max(np.var(subset) for subset in combinations(rewards, 4))
    assert max(figures.variances(rewards, 4)) == pytest.approx(best)
    group = json.loads((study.RESULTS / "method_group.json").read_text())["rewards"]
    kept = RULES["max_variance"](torch.tensor(group, dtype=torch.float64), 16)
    ordered = sorted(group, reverse=True)
    found = figures.variances(ordered, 16)
    assert max(found) == pytest.approx(np.var([group[i] for i in kept]))
    figure = figures.method_figure(group)
    assert figure.axes[1].lines[0].get_ydata().tolist() == found


def made_up_run(arm: str, seed: int, both: list[float]) -> dict:
    """Evaluated at steps 0, 2 and 4."""
    at = [both[0], None, both[1], None, both[2]]
    metrics = {"step": [0, 1, 2, 3, 4], "eval/accuracy_with_format": at, "eval/accuracy": at}
    metrics["rollout/reward_mean"] = [None, 0.1, 0.2, 0.3, 0.4]
    settings = study.arm_settings(arm, 8, 2)
    names = {"arm": arm, "seed": seed, "settings": settings, "trained_seconds_as_run": 90}
    return names | {"metrics": metrics}


def test_the_tables_and_figures_of_a_study_by_hand(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    curves = {("grpo_m", 0): [0, 0.2, 0.4], ("grpo_m", 1): [0, 0.2, 0.6]}
    curves |= {("max_variance", 0): [0, 0.6, 0.6], ("max_variance", 1): [0, 0.6, 0.8]}
    for (arm, seed), both in curves.items():
        study.write_json(tmp_path / "t" / f"{arm}-{seed}.json", made_up_run(arm, seed, both))
    # A step of either takes 15 and 30 s: the 4 steps of GRPO end after 1 minute, goes on as it is.
    plan = {"minutes": 2.0, "step_seconds": {"grpo_m": 15.0, "max_variance": 30.0}}
    study.write_json(tmp_path / "t" / "timing.json", plan | {"steps": dict.fromkeys(study.ARMS, 4)})
    monkeypatch.setattr(sys, "argv", ["figures.py", "t", "--out", str(tmp_path)])
    assert figures.main() == 0
    out = capsys.readouterr().out
    # GRPO's mean over 2 minutes: (0.05 + 0.15 + 0.4) / 2 and (0.05 + 0.2 + 0.6) / 2.
    # Max-variance: (0.3 + 0.6) / 2 and (0.3 + 0.7) / 2.
    assert "| GRPO 2 | 2 | 50.0 |  | 36.2 |  |" in out
    row = (
        "| max-variance 8 to 2 | 2 | 70.0 | +20.0 (+20.0 to +20.0) | 47.5 | +11.2 (+7.5 to +15.0) |"
    )
    assert row in out
    assert "| max-variance 8 to 2 | 0.40 | 0.40 to 0.40 | +0.00 (+0.00 to +0.00) | 1.000 |" in out
    # Half are right after 1 minute in GRPO's second seed; its first had not got there by then.
    assert "| GRPO 2 | 15.0 | 4 | 1.5 | 1 of 2 | 1.5 | 1.0 |" in out
    for name in ("accuracy", "arms", "paper"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_the_papers_curves_are_those_that_its_authors_published():
    file = ROOT.parent / "shared" / "paper_results.json"
    if not file.exists():
        pytest.skip(f"no {file}")
    ours = json.loads((ROOT / "experiments" / "paper_results.json").read_text())
    theirs = json.loads(file.read_text())["runs"]
    assert len(ours["curves"]) == len(theirs) == 10 and "Apache-2.0" in ours["source"]
    for curve in ours["curves"]:
        name = "grpo" if curve["n"] == curve["m"] else curve["rule"]
        published = theirs[f"{name} n={curve['n']} m={curve['m']}"]
        assert curve["accuracy"] == published["accuracy"]


def test_the_tables_in_the_texts_are_those_that_the_results_give():
    plan, arms = figures.read(f"{figures.STUDY}/timing"), study.read_study(figures.STUDY)
    if not arms:
        pytest.skip(f"the study {figures.STUDY} has no results yet")
    tables = {"README.md": [figures.short_table(arms, plan)]}
    tables["docs/results.md"] = [figures.long_table(arms, plan), figures.cost_table(arms, plan)]
    for file, made in tables.items():
        for table in made:
            assert table in (ROOT / file).read_text()
