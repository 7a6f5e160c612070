"""Tests of the scripts in this folder that compare, draw and show runs. pytest finds them with the others."""

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import pytest
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import pods
from extras import checks, compare, gradients, plot_runs, show_rollouts
from extras.plot_runs import read_run, table
from sampling import RULES
from test_pods import finish, shared, start_pods, tiny  # noqa: F401

pytest.importorskip("matplotlib", reason="needs extras/requirements.txt")
EXTRAS = Path(__file__).resolve().parent


def made_up_run(
    folder: Path, n=8, m=2, rule="max_variance", seed=0, accuracies=(0.4, 0.5, 0.7), step=30.0
) -> Path:
    """Two steps between evaluations, `step` seconds each."""
    folder.mkdir()
    cfg = dict(n=n, m=m, rule=rule, seed=seed, prompts_per_step=2)
    (folder / "config.json").write_text(json.dumps(cfg))
    rows = []
    for i in range(2 * len(accuracies) - 1):
        row = dict(step=i, train_seconds=i * step)
        if i:
            row |= dict(
                generate_seconds=step / 3,
                update_seconds=2 * step / 3,
                reward_mean=0.1 * i,
                tokens_generated=40 * n,
            )
        rows.append(row | (dict(eval_accuracy=accuracies[i // 2], eval_format=i / 8) if i % 2 == 0 else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollouts = [
        dict(
            step=step,
            prompt=prompt,
            question=f"Q{step}{prompt}?",
            gold="4",
            reward=[0.0, 0.1, 1.2][i % 3],
            kept=i >= n - m,
        )
        | dict(
            advantage=float(i - n + 1.5) if i >= n - m else 0.0,
            truncated=i == 0,
            completion=f"answer {i}\x1b[31m",
        )
        for step in (1, 2)
        for prompt in (1, 2)
        for i in range(n)
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    return folder


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """Two arms, two seeds each. GRPO: its best after 2 minutes and after 1; PODS takes 20 s a step."""
    return [
        made_up_run(tmp_path / "grpo-0", m=8, accuracies=(0.4, 0.5, 0.6)),
        made_up_run(tmp_path / "grpo-1", m=8, seed=1, accuracies=(0.4, 0.7, 0.6)),
        made_up_run(tmp_path / "pods-0", accuracies=(0.4, 0.6, 0.8), step=20.0),
        made_up_run(tmp_path / "pods-1", seed=1, accuracies=(0.4, 0.5, 0.6), step=20.0),
    ]


@pytest.fixture
def script(monkeypatch, capsys):
    """The main of a script in this process: exit code, stdout, stderr."""

    def run(module, *arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, arguments)])
        return checks.explained(module.main, f"{module.__name__}.py"), *capsys.readouterr()

    return run


@pytest.fixture
def refused(script):
    """The one line on stderr of a script that ends with exit code 2."""

    def run(*arguments) -> str:
        code, _, err = script(*arguments)
        assert code == 2 and err.count("\n") == 1, err
        return err

    return run


# ----- Curves and tables


def tables(runs: list[Path], step_seconds: dict | None = None) -> list[list[list[str]]]:
    """Cells of the table by time as run and of that by the median step."""
    found = [read_run(run) for run in runs]
    seconds = step_seconds or plot_runs.median_step_seconds(found)
    _, *by_time = plot_runs.clocks(seconds).values()
    lines = [table(found, 2.0, clock, seconds).splitlines() for clock in by_time]
    return [[[cell.strip() for cell in line.split("|")[1:-1]] for line in of_table] for of_table in lines]


def test_the_table_by_hand(runs):
    cells, _ = tables(runs)
    assert cells[0][3:8] == ["accuracy at 0.5 min", "1 min", "2 min", "best", "well-formed, last"]
    assert cells[0][8:] == ["min to GRPO 8's best", "speed-up"]
    # GRPO after 0.5 minutes, half-way to its first evaluation: 45 and 55 %.
    assert cells[2] == ["GRPO 8", "4", "30.0", "50.0 (45.0 to 55.0)", "60.0 (50.0 to 70.0)", "60.0"] + [
        "65.0 (60.0 to 70.0)", "50", "2.0 (1.0 to 2.0)", "1.00"
    ]  # fmt: skip
    # PODS, evaluated after 40 and 80 s: seed 0 has 60 % after 40, where GRPO took 120; seed 1 never 70 %.
    assert cells[3][0] == "max-variance 8 to 2" and cells[3][2] == "20.0"
    assert cells[3][3] == "51.2 (47.5 to 55.0)" and cells[3][5] == "70.0 (60.0 to 80.0)"
    # Of two seeds the median is the less favourable one: half of never is no time.
    assert cells[3][8:] == ["never (0.7 to never)", "0.00 (0.00 to 3.00)"]


def test_times_by_the_median_step(runs):
    found = [read_run(run) for run in runs]
    assert plot_runs.median_step_seconds(found) == {"GRPO 8": 30.0, "max-variance 8 to 2": 20.0}
    steps, as_run, by_step = plot_runs.clocks({"GRPO 8": 30.0, "max-variance 8 to 2": 60.0}).values()
    for clock, expected in ((steps, [0, 2, 4]), (as_run, [0, 40 / 60, 80 / 60]), (by_step, [0, 2, 4])):
        assert [clock(found[2], row) for row in found[2].evaluated] == expected
    _, cells = tables(runs, {"GRPO 8": 30.0, "max-variance 8 to 2": 60.0})
    assert cells[3][2] == "60.0" and cells[3][8:] == ["never (2.0 to never)", "0.00 (0.00 to 1.00)"]


def test_what_comes_after_the_budget_does_not_count(runs):
    run, by_step = (
        read_run(runs[2]),
        plot_runs.clocks({"max-variance 8 to 2": 45.0})["minutes, steps x median step"],
    )
    # Evaluations at 0, 1.5 and 3 minutes with 40, 60 and 80 %: a third of the way from 1.5 to 3 is 66.7 %.
    minutes, accuracies = plot_runs.accuracy_until(2.0, run, by_step)
    assert minutes == [0, 1.5, 2.0] and accuracies == pytest.approx([0.4, 0.6, 2 / 3])


def test_curves_between_and_outside_their_points():
    assert [plot_runs.at(x, [0, 2, 4], [1, 5, 3]) for x in (-1, 0, 1, 2, 3.5, 4, 9)] == [
        1,
        1,
        3,
        5,
        3.5,
        3,
        3,
    ]


def test_arms_are_in_order_and_have_colours_of_their_own(tmp_path):
    kinds = [
        (16, 4, "random"),
        (16, 16, "max_variance"),
        (16, 4, "max_variance"),
        (4, 4, "random"),
        (16, 4, "max_reward"),
    ]
    found = [read_run(made_up_run(tmp_path / str(i), n, m, rule)) for i, (n, m, rule) in enumerate(kinds)]
    names = ["GRPO 4", "GRPO 16", "max-variance 16 to 4", "max-reward 16 to 4", "random 16 to 4"]
    assert list(plot_runs.by_arm(found)) == names
    assert len(set(plot_runs.colours(found).values())) == 5


def test_labels_at_the_ends_of_lines_do_not_overlap():
    figure, ((axes,),) = plot_runs.canvas(1)
    axes.set_ylim(0, 100)
    plot_runs.label_ends(axes, [(1, 50 + 0.1 * i, f"arm {i}", "k") for i in range(5)])
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 5 and not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def texts(figure) -> set[str]:
    from matplotlib.text import Text

    return {text.get_text().strip() for text in figure.findobj(Text)} - {""}


def test_figures_and_table_are_written_and_drawn_with_the_paper(runs, tmp_path, script):
    out = tmp_path / "out"
    out.mkdir()
    code, text, err = script(plot_runs, *runs, "--out", out, "--paper", "--step", 2)
    assert code == 0, err
    for name in ("accuracy", "training", "time", "rewards"):
        assert (out / f"{name}.png").stat().st_size > 10_000
    assert (out / "table.md").read_text().strip() in text


def test_figures_name_the_arms_and_hold_their_curves(runs):
    found, arms = [read_run(run) for run in runs], {"GRPO 8", "max-variance 8 to 2"}
    of_clock = plot_runs.clocks({"GRPO 8": 30.0, "max-variance 8 to 2": 60.0})
    accuracy = plot_runs.accuracy_figure(found, of_clock, True)
    assert arms | set(of_clock) <= texts(accuracy)
    assert [len(axes.lines) for axes in accuracy.axes] == [2, 2 + 4, 2]
    ends = [axes.lines[1].get_xdata()[-1] for axes in accuracy.axes]
    assert ends == pytest.approx([4, 80 / 60, 4])  # steps, minutes as run, minutes at 60 s a step
    best = max(line.get_ydata().max() for line in accuracy.axes[1].lines)
    assert best == pytest.approx(82.6, abs=0.1)  # the paper's, of max-variance 64 to 16
    training = plot_runs.training_figure(found, of_clock)
    assert arms | set(of_clock) | {"mean reward of all n", "tokens a completion"} <= texts(training)
    assert [len(axes.lines) for axes in training.axes] == [2] * 6
    assert training.axes[0].lines[0].get_ydata().tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert training.axes[3].lines[0].get_ydata().tolist() == pytest.approx([20] * 4)  # 40 x 8 of 8 x 2
    time_of_step = plot_runs.time_figure(found)
    assert arms | {"30 s", "20 s"} <= texts(time_of_step)
    assert [bar.get_width() for bar in time_of_step.axes[0].patches] == pytest.approx(
        [20 / 3, 40 / 3, 10, 20]
    )
    rewards = plot_runs.rewards_figure(found, 1)
    assert arms | {"16 generated", "4 kept", "16 kept"} <= texts(rewards)


def test_a_line_ends_where_the_first_of_its_seeds_ends():
    _, ((axes,),) = plot_runs.canvas(1)
    assert plot_runs.draw_seeds(axes, [([0, 2], [0, 4]), ([0, 1, 3], [2, 2, 8])], "red") == (2, 4.5)
    assert axes.lines[0].get_xydata().tolist() == [[0, 1], [1, 2], [2, 4.5]]


def test_names_at_the_ends_of_lines_do_not_overlap():
    _, ((axes,),) = plot_runs.canvas(1)
    axes.set_ylim(0, 100)
    plot_runs.label_ends(axes, [(1, y, str(y), "red") for y in (99, 2, 100, 98, 3)])
    places = {text.get_text(): text.xyann[1] for text in axes.texts}
    # 8.5 % of the height apart, in their order, and none above the panel
    assert places == pytest.approx({"2": 2, "3": 10.5, "98": 83, "99": 91.5, "100": 100})


def test_without_a_choice_the_rule_makes_no_other_arm(runs):
    cfg = json.loads((runs[1] / "config.json").read_text()) | dict(rule="random")
    (runs[1] / "config.json").write_text(json.dumps(cfg))
    assert list(plot_runs.by_arm([read_run(run) for run in runs])) == ["GRPO 8", "max-variance 8 to 2"]


def test_the_rewards_that_are_drawn_are_those_of_the_step(runs):
    figure = plot_runs.rewards_figure([read_run(runs[0]), read_run(runs[2])], 1)
    heights = [[round(bar.get_height()) for bar in axes.patches if bar.get_height()] for axes in figure.axes]
    # 8 rollouts of each of 2 prompts, rewards 0, 0.1, 1.2, 0, 0.1, 1.2, 0, 0.1; kept are the last 2 of 8.
    assert heights == [[6, 6, 4, 6, 6, 4], [6, 6, 4, 2, 2]]


@pytest.mark.parametrize(
    "file, text, named",
    [
        ("metrics.jsonl", None, "metrics.jsonl"),
        ("metrics.jsonl", "", "has no finished step yet"),
        (
            "metrics.jsonl",
            '{"step": 0, "train_seconds": 0}\n{"step": 1, bro\n{}\n',
            "metrics.jsonl, line 2 is broken",
        ),
        (
            "metrics.jsonl",
            '{"step": 1, "train_seconds": 1, "eval_accuracy": 1, "eval_format": 1}\n',
            "lacks 'tokens_generated'",
        ),
        ("config.json", "{", "is not the folder of a run"),
        ("config.json", '{"n": 8}', "lacks 'prompts_per_step'"),
        ("rollouts.jsonl", "", "has no rollouts of step 1"),
    ],
)
def test_a_broken_run_folder_is_one_line(runs, tmp_path, file, text, named, refused):
    (runs[0] / file).unlink()
    if text is not None:
        (runs[0] / file).write_text(text)
    line = refused(plot_runs, *runs, "--out", tmp_path)
    assert named in line and str(runs[0]) in line


def test_other_inputs_that_cannot_be_drawn_are_one_line(runs, tmp_path, refused):
    (tmp_path / "empty").mkdir()
    assert "empty is not the folder of a run" in refused(plot_runs, tmp_path / "empty")
    assert "RUN" in refused(plot_runs)
    assert "nowhere" in refused(plot_runs, runs[0], "--out", "nowhere")
    assert "has no rollouts of step 9" in refused(plot_runs, runs[0], "--out", tmp_path, "--step", 9)
    (tmp_path / "timing.json").write_text('{"GRPO 8": 1}')
    line = refused(plot_runs, *runs, "--out", tmp_path, "--timing", tmp_path / "timing.json")
    assert "cannot be used: 'max-variance 8 to 2'" in line


def test_runs_that_are_no_seeds_of_one_arm_are_one_line(runs, tmp_path, refused):
    again = made_up_run(tmp_path / "again")
    assert "pods-0 and" in (line := refused(plot_runs, *runs, again, "--out", tmp_path)) and "seed 0" in line
    cfg = json.loads((again / "config.json").read_text()) | dict(seed=2, lr=1e-3)
    (again / "config.json").write_text(json.dumps(cfg))
    assert "differ in lr: they are not seeds of one arm" in refused(
        plot_runs, *runs, again, "--out", tmp_path
    )


def test_a_run_that_is_still_going_can_be_drawn(runs):
    with open(runs[0] / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "train_sec')
    assert len(read_run(runs[0]).steps) == 4


def test_the_papers_curves_are_those_that_its_authors_published():
    ours = json.loads((EXTRAS / "paper_results.json").read_text())
    theirs = json.loads(shared("paper_results.json").read_text())
    assert len(ours["curves"]) == len(theirs["runs"]) == 10 and "Apache-2.0" in ours["source"]
    for curve in ours["curves"]:
        name = "grpo" if curve["n"] == curve["m"] else curve["rule"]
        assert curve["accuracy"] == theirs["runs"][f"{name} n={curve['n']} m={curve['m']}"]["accuracy"]


# ----- Single rollouts


def test_rollouts_are_shown_plain_when_piped(runs):
    command = [sys.executable, EXTRAS / "show_rollouts.py", runs[2], "1", "--prompt=2"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = text.splitlines()
    assert lines[:2] == ["Q12?", "answer 4; 2 of 8 rollouts kept"]
    heads = [line for line in lines if line.startswith("---")]
    assert (
        len(heads) == 8
        and heads[0] == "--- reward 1.2, not kept"
        and "reward 0, not kept, cut off" in str(heads)
    )
    assert (
        "--- reward 0.1, kept, advantage +0.500" in heads and "--- reward 0, kept, advantage -0.500" in heads
    )
    assert sorted(re.findall(r"answer (\d)\N{REPLACEMENT CHARACTER}\[31m", text)) == list("01234567")
    assert "\x1b" not in text


def test_rollouts_are_coloured_on_a_terminal(runs):
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, EXTRAS / "show_rollouts.py", runs[2], "1"], stdout=theirs, check=True)
    text = os.read(ours, 100_000).decode()
    assert f"{show_rollouts.GREEN}--- reward 0.1, kept, advantage +0.500{show_rollouts.END}" in text
    assert f"{show_rollouts.DIM}--- reward 1.2, not kept" in text


def test_rollouts_that_are_not_there_are_one_line(runs, tmp_path, refused):
    (tmp_path / "empty").mkdir()
    assert "has no step 3; it has 1 to 2" in refused(show_rollouts, runs[0], 3)
    assert "--prompt is 3, but step 1 has 1 to 2" in refused(show_rollouts, runs[0], 1, "--prompt", 3)
    assert "empty is not the folder of a run" in refused(show_rollouts, tmp_path / "empty", 1)
    assert "invalid int value" in refused(show_rollouts, runs[0], "last")
    (runs[0] / "rollouts.jsonl").write_text('{"step": 1}\n')
    assert "rollouts.jsonl, line 1 is broken" in refused(show_rollouts, runs[0], 1)


# ----- Gradients of subsets


def test_a_sketch_keeps_inner_products():
    torch.manual_seed(0)
    a, b = torch.randn(2, 100_003)
    b += a  # so that the inner product is far from 0
    sketch = gradients.Sketch(100_003, 2**14, torch.device("cpu"))
    sa, sb = sketch([a[:7], a[7:]]), sketch([b])
    for x, y, sx, sy in ((a, b, sa, sb), (a, a, sa, sa), (b, b, sb, sb)):
        assert (sx @ sy).item() == pytest.approx((x @ y).item(), abs=4 * (x.norm() * y.norm()).item() / 2**7)
    assert torch.allclose(sketch([a + 2 * b]), sa + 2 * sb, atol=1e-3)
    exact = gradients.Sketch(100_003, 2**17, torch.device("cpu"))  # more buckets than numbers
    assert (exact([a]) @ exact([b])).item() == pytest.approx((a @ b).item(), rel=1e-4)


def test_sketched_gradients_add_up_to_that_of_an_update(tiny):  # noqa: F811
    """The weighted sum of single gradients is what pods.update leaves for the optimizer."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="sdpa")
    cfg = pods.Config(
        str(tiny), n=4, m=2, prompts_per_step=2, dtype="float32", temperature=0.7, max_grad_norm=1e9
    )
    torch.manual_seed(0)
    ids = lambda count: torch.randint(100, (count,)).tolist()
    groups = []
    for _ in range(2):
        prompt = ids(9)
        groups.append([pods.Rollout(prompt, ids(3 + i), [], "", False, reward=i % 3 / 2) for i in range(4)])
    rollouts = sum(groups, [])
    for rollout in rollouts:
        with torch.no_grad():
            packed = pods.pack([rollout], torch.device("cpu"))
            rollout.logprobs = pods.completion_logprobs(model, *packed, cfg.temperature).tolist()
    size = sum(p.numel() for p in model.parameters())
    found = gradients.gradients(model, groups, cfg, buckets=size)
    rewards, kept = pods.down_sample(groups, cfg)
    A = pods.advantages(rewards, kept)
    weights = torch.zeros_like(rewards).scatter(-1, kept, A / 2) / 2  # the mean over 2 kept, then 2 prompts
    expected = torch.einsum("pi,pib->b", weights.float(), found)

    class Keep(torch.optim.SGD):
        def step(self):
            self.kept = gradients.Sketch(size, size, torch.device("cpu"))(
                [p.grad for p in model.parameters()]
            )

    optimizer = Keep(model.parameters(), lr=0.0)
    pods.update(model, None, optimizer, [r for r in rollouts if r.kept], 4, cfg)
    assert torch.allclose(optimizer.kept, expected, atol=1e-6 + 1e-4 * expected.abs().max().item())
    assert expected.norm() > 0.01


def test_the_study_of_subsets_against_explicit_gradients():
    torch.manual_seed(0)
    prompts, n = 4, 8
    g = torch.randn(prompts, n, 50).double()
    rewards = torch.tensor(
        [[1.0, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0.1, 0.2], [0] * 8, [1] * 7 + [0]]
    ).double()
    grams = torch.einsum("pid,qjd->pqij", g, g)
    rows = gradients.study(rewards, grams, per_step=2)
    full = pods.advantages(rewards, torch.arange(n).expand(prompts, n))
    for rule, m in (("max_variance", 4), ("max_reward", 2), ("max_variance", 8)):
        kept = RULES[rule](rewards, m)
        A = pods.advantages(rewards, kept)
        for step in range(2):
            a = sum((full[p, i] * g[p, i] / n for p in (2 * step, 2 * step + 1) for i in range(n)))
            b = sum(
                (
                    A[p, j] * g[p, i] / m
                    for p in (2 * step, 2 * step + 1)
                    for j, i in enumerate(kept[p].tolist())
                )
            )
            (row,) = (r for r in rows if (r["rule"], r["m"], r["step"]) == (rule, m, step))
            assert row["norm"] == pytest.approx((b.norm() / a.norm()).item())
            assert row["cosine"] == pytest.approx(
                (a @ b / a.norm() / b.norm()).item() if b.norm() > 0 else 0.0
            )
    at = lambda rule, m, step: [r for r in rows if (r["rule"], r["m"], r["step"]) == (rule, m, step)]
    assert at("max_variance", 8, 0)[0]["cosine"] == pytest.approx(1)
    assert [at("max_variance", 2, step)[0]["idle"] for step in range(2)] == [0, 0.5]
    assert [at("max_reward", 4, step)[0]["idle"] for step in range(2)] == [0.5, 1]
    random = at("random", 2, 0)
    assert len(random) == gradients.DRAWS and len({r["cosine"] for r in random}) > 5
    # 2 of 8 with one right miss it 3 times in 4; with 4 right, 2 wrong and 2 between, they tie 7 in 28.
    assert sum(r["idle"] for r in random) / len(random) == pytest.approx((3 / 4 + 7 / 28) / 2, abs=0.15)
    rewards[:2] = 0.5  # a step without any gradient has no rows
    assert {row["step"] for row in gradients.study(rewards, grams, per_step=2)} == {1}
    drawn = gradients.figure(rows, n)
    assert {"max-variance", "max-reward", "random"} <= texts(drawn)
    assert [len(axes.lines) for axes in drawn.axes] == [len(RULES)] * 3
    assert len(gradients.table(rows).splitlines()) == 2 + len(RULES) * 3


# ----- A whole comparison


SMALL = [
    "--n=4",
    "--m=2",
    "--prompts-per-step=1",
    "--max-prompt-tokens=1200",
    "--max-new-tokens=12",
    "--eval-problems=4",
]
SMALL += ["--lr=1e-3", "--eager", "--data=easy", "--dtype=float32", "--save-every=1", "--minutes=0.05"]
NAMES = [f"compare-{arm}-0" for arm in ("grpo-2", "grpo-4", "max_variance", "max_reward", "random")]


def start_compare(folder: Path, *arguments: str) -> subprocess.Popen:
    finish(start_pods(folder, "--help"))  # makes the copy
    command = [sys.executable, str(folder / "extras" / "compare.py"), *arguments]
    pipe = subprocess.PIPE
    # Where the tests run in the background, SIGINT is ignored, and so it would be there.
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    options = dict(text=True, cwd=folder, start_new_session=True, preexec_fn=listen)
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, **options)


def wait_for(file: Path, process: subprocess.Popen) -> None:
    until = time.time() + 300
    while not file.exists():
        assert process.poll() is None and time.time() < until, process.communicate()[1][-3000:]
        time.sleep(0.1)


def wait_for_end(run: Path, log: Path) -> None:
    """Of a run that was told once to stop, and so says where. Told twice, it would end in silence."""
    with owned(run):
        until = time.time() + 60  # what it says is flushed after it lets go of the run
    while "Stopped after step" not in log.read_text():
        assert time.time() < until, log.read_text()
        time.sleep(0.1)


@contextmanager
def owned(run: Path):
    """Waits until no process has the run, and then has it."""
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_a_comparison_survives_a_kill_and_keeps_what_is_finished(
    tiny,  # noqa: F811
    tmp_path,
    monkeypatch,
    script,
    refused,
):
    command = [f"--model={tiny}", *SMALL]
    monkeypatch.setattr(compare, "HERE", tmp_path)  # for what is refused, which needs no process of its own
    folder, (first, second, third, *_) = tmp_path / "runs" / "compare", [tmp_path / "runs" / n for n in NAMES]
    process = start_compare(tmp_path, *command)
    wait_for(second / "metrics.jsonl", process)
    with open(folder / "lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    process.kill()  # the run that it had started ends by itself, after its step
    process.communicate()
    wait_for_end(second, folder / "grpo-4-0.log")
    with owned(folder):
        assert "compare is in use by a live run" in refused(compare, *command)
    assert (
        (first / "finished").exists() and (first / "model").exists() and not (first / "checkpoint").exists()
    )
    kept = [(first / "metrics.jsonl").read_bytes(), (folder / "timing.json").read_bytes()]
    for other, named in (
        ("--minutes=9", "minutes was 0.05, is 9.0"),
        ("--lr=2", "--lr=1e-3"),
        ("--m=3", "m was 2"),
    ):
        line = refused(compare, *command, other)
        assert "compare has other settings" in line and named in line and "fresh" not in line

    process = start_compare(tmp_path, *command)
    wait_for(third / "metrics.jsonl", process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, but the run gets only the one passed on
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130 and "The same command goes on from there" in err
    wait_for_end(third, folder / "max_variance-0.log")

    process = start_compare(tmp_path, *command)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    assert "run 5 of 5, random, seed 0: 100%" in err and "0.2 of 0.25 training minutes" in err
    assert kept == [(first / "metrics.jsonl").read_bytes(), (folder / "timing.json").read_bytes()]
    settings = [json.loads((tmp_path / "runs" / name / "config.json").read_text()) for name in NAMES]
    assert [(cfg["n"], cfg["m"]) for cfg in settings] == [(2, 2), (4, 4), (4, 2), (4, 2), (4, 2)]
    assert [cfg["rule"] for cfg in settings][2:] == ["max_variance", "max_reward", "random"]
    steps = json.loads((folder / "timing.json").read_text())
    expected = [max(1, round(60 * 0.05 / 8 / seconds)) for seconds in steps.values()]
    assert [cfg["eval_every"] for cfg in settings] == expected
    different = {key for key in settings[0] if len({str(cfg[key]) for cfg in settings}) > 1}
    assert different <= {"n", "m", "rule", "name", "eval_every"}
    for name in NAMES:
        last = read_run(tmp_path / "runs" / name).steps[-1]
        assert last["train_seconds"] >= 0.05 * 60 and "eval_accuracy" in last
    assert len(re.findall(r"^\| (?:GRPO|max|random)", out, re.M)) == 2 * 5
    assert (folder / "accuracy.png").exists()

    process = start_compare(tmp_path, *command)  # all is there: it only draws
    again, err = process.communicate(timeout=100)
    assert process.returncode == 0 and again == out

    last = tmp_path / "runs" / NAMES[-1]
    shutil.rmtree(last)
    last.touch()  # so that it cannot make its folder
    code, _, err = script(compare, *command)
    assert code == 1 and "compare.py: compare-random-0: pods.py: " in err
    assert str(folder / "random-0.log") in err


SLOW_TO_STOP = """
import signal, time
def note(*_):
    print("one", flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGINT, note)
print("ready", flush=True)
time.sleep(100)
"""


def test_ctrl_c_twice_is_passed_on_twice(tmp_path, monkeypatch):
    log, children, start = tmp_path / "log", [], compare.start

    def start_child(command, **kwargs):
        children.append(start(["-c", SLOW_TO_STOP], **kwargs))
        return children[-1]

    def press_twice() -> None:
        for word in ("ready", "one"):
            while not log.exists() or word not in log.read_text():
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(compare, "start", start_child)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=press_twice, daemon=True).start()
    try:
        code = compare.train(tmp_path, [], log, 1.0, tqdm(disable=True))
    except KeyboardInterrupt:
        code = "interrupted"
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130 and children[0].poll() == -signal.SIGINT


def test_comparisons_that_cannot_work_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "HERE", tmp_path)
    for arguments, named in [
        (["--seeds=0"], "--seeds is 0, but must be at least 1"),
        (["--minutes=0"], "--minutes is 0.0"),
        (["--minutes=nan"], "--minutes is nan"),
        (["--minutes=inf"], "--minutes is inf, but must be at least 0.001 and below a million"),
        (["--m=64"], "--n is 64, but must be at least 65"),
        (["--seeds=x"], "invalid int value: 'x'"),
        (["--seed=3"], "a comparison sets --seed of its runs itself"),
        (["--eval_every=3"], "a comparison sets --eval-every of its runs itself"),
        (["--rule", "random"], "a comparison sets --rule of its runs itself"),
        (["--name=a/b"], "must be a plain folder name"),
    ]:
        monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
        assert checks.explained(compare.main, "compare.py") == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and named in lines[0]
    assert not list(tmp_path.iterdir())
