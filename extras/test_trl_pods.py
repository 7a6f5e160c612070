"""Tests of trl_pods.py, through the real TRL, on a CPU with gloo.

Run as a script, this file is one of the processes that accelerate launches.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from extras.checks import Refusal
from sampling import RULES

N, M = 4, 2
BATCH = dict(num_generations=N, per_device_train_batch_size=N, gradient_accumulation_steps=2)  # 2 groups


# ----- What each process does


def by_tokens(completion_ids, **_) -> list[float]:
    return [float(sum(ids) % 5) for ids in completion_ids]


def by_place(completion_ids, **_) -> list[float]:
    return [1.1, 0.1, 0.1, 0.0] * (len(completion_ids) // 4)


def none_for_the_first(completion_ids, **_) -> list[float | None]:
    return [None, *(float(len(ids)) for ids in completion_ids[1:])]


def build(kind: str, model: str, reward=by_tokens, m=None, rule="max_variance", **settings):
    """A trainer that records what it does. m = None is TRL's own."""
    import trl
    from datasets import Dataset

    from extras.trl_pods import DownSampled

    class Inner:  # sees the rewards as TRL computed them
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids):
            scores = super()._calculate_rewards(inputs, prompts, completions, completion_ids)
            rank, count = self.accelerator.process_index, len(inputs)
            own = scores[rank * count : (rank + 1) * count, 0].clone()
            self.steps.append(dict(scores=own, completion_ids=completion_ids, prompts=prompts))
            return scores

    class Outer:  # sees what the update gets
        steps, losses, kept_bytes = None, None, None

        def _generate_and_score_completions(self, inputs):
            self.steps = self.steps or []
            batch = super()._generate_and_score_completions(inputs)
            self.steps[-1] |= dict(batch=batch, kept=getattr(self, "_kept", None))
            return batch

        def compute_loss(self, model, inputs, *args, **kwargs):
            parameters = {p.data_ptr() for p in model.parameters()}
            seen = {}

            def note(tensor):
                if tensor.data_ptr() not in parameters:
                    seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                loss = super().compute_loss(model, inputs, *args, **kwargs)
            self.losses = (self.losses or []) + [loss.item()]
            self.kept_bytes = sum(seen.values())
            return loss

    trainer, config = (getattr(trl, kind.upper() + part) for part in ("Trainer", "Config"))
    bases = (Outer, Inner, trainer) if m is None else (Outer, DownSampled, Inner, trainer)
    args = dict(
        output_dir=settings.pop("folder"), use_cpu=True, bf16=False, max_completion_length=8, max_steps=3
    )
    args |= dict(
        learning_rate=1e-3, report_to="none", save_strategy="no", gradient_checkpointing=False, seed=3
    )
    args |= dict(disable_tqdm=True, model_init_kwargs={"dtype": "float32"}, beta=0.0) | BATCH | settings
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": f"What is {i}?"}]} for i in range(40)])
    own = {} if m is None else dict(m=m, rule=rule)
    return type("Recorded", bases, {})(model, reward, config(**args), data, **own)


def worker(out: str, model: str) -> None:
    found = {}
    rank = int(os.environ.get("RANK", 0))
    folder = f"{out}/{rank}"
    for kind in ("grpo", "rloo"):
        for name, settings in (
            ("plain", {}),
            ("all", dict(m=N)),
            ("max_variance", dict(m=M)),
            ("random", dict(m=M, rule="random")),
            ("by place", dict(m=M, reward=by_place, max_steps=1)),
        ):
            trainer = build(kind, model, folder=folder, **settings)
            start = [p.detach().clone() for p in trainer.model.parameters()]
            trainer.train()
            weights = [
                p.detach().clone() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()
            ]
            found[kind, name] = dict(
                steps=trainer.steps, losses=trainer.losses, kept_bytes=trainer.kept_bytes
            )
            found[kind, name] |= dict(
                weights=weights, start=start, kind=trainer.accelerator.distributed_type.value
            )
    trainer = build("grpo", model, folder=folder, m=M, per_device_eval_batch_size=N)
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    found["evaluation"] = dict(rows=len(trainer.steps[0]["batch"]["advantages"]))
    try:
        build("grpo", model, folder=folder, m=M, reward=none_for_the_first).train()
    except ValueError as error:
        found["unscored"] = str(error)
    split = dict(
        per_device_train_batch_size=N // 2, gradient_accumulation_steps=1 if "RANK" in os.environ else 2
    )
    uneven = dict(num_generations=8, gradient_accumulation_steps=2)
    for name, settings, m in (
        ("split", split, M),
        ("uneven", uneven, 3),
        ("too many", {}, N + 1),
        ("one", {}, 1),
    ):
        try:
            build("grpo", model, folder=folder, m=m, **settings)
            found[name] = ""
        except Refusal as error:
            found[name] = str(error)
    torch.save(found, f"{out}/{rank}.pt")


if __name__ == "__main__":
    worker(*sys.argv[1:])
    sys.exit()


# ----- The tests

trl = pytest.importorskip("trl", reason="needs extras/requirements.txt")
from test_pods import tiny  # noqa: E402, F401


def launch(processes: int, *command: str) -> subprocess.CompletedProcess:
    """Under accelerate launch, on the CPU."""
    how = ["--cpu"] if processes == 1 else ["--multi_gpu"]  # with gloo where there is no GPU
    line = [sys.executable, "-m", "accelerate.commands.launch", *how, "--num_processes", str(processes)]
    line += [
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "0",
    ]
    env = os.environ | dict(ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    return subprocess.run([*line, *command], env=env, capture_output=True, text=True)


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, tiny, tmp_path_factory) -> list[dict]:  # noqa: F811
    """What each of 1 or 2 processes recorded."""
    out = tmp_path_factory.mktemp("trl")
    done = launch(request.param, __file__, str(out), str(tiny))
    assert done.returncode == 0, done.stderr[-3000:]
    found = [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(request.param)]
    kind = "NO" if request.param == 1 else "MULTI_CPU"  # accelerate's name for a copy of the model in each
    assert {run["kind"] for of_rank in found for run in of_rank.values() if "kind" in run} == {kind}
    return found


KINDS = pytest.mark.parametrize("kind", ["grpo", "rloo"])


@KINDS
def test_m_equal_to_n_is_trl_itself(ranks, kind):
    for found in ranks:
        plain, ours = found[kind, "plain"], found[kind, "all"]
        assert len(plain["losses"]) == 6
        assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-5)
        moved = 0.0
        for a, b, start in zip(plain["weights"], ours["weights"], plain["start"]):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
            moved = max(moved, (a - start).abs().max().item())
        assert moved > 1e-4  # else equal weights would say nothing


@KINDS
@pytest.mark.parametrize("rule", ["max_variance", "random"])
def test_kept_rows_and_their_advantages(ranks, kind, rule):
    for found in ranks:
        assert len(found[kind, rule]["steps"]) == 3
        for step in found[kind, rule]["steps"]:
            rewards, batch = step["scores"].view(-1, N), step["batch"]
            assert all(len(set(map(str, step["prompts"][i : i + N]))) == 1 for i in (0, N))  # whole groups
            mask = step["kept"].view(-1, N)
            assert mask.sum(-1).tolist() == [M, M] and len(batch["advantages"]) == 2 * M
            if rule == "max_variance":
                expected = RULES[rule](rewards, M)
                assert [set(row.nonzero().flatten().tolist()) for row in mask] == [
                    set(r.tolist()) for r in expected
                ]
            kept_ids = [ids for ids, kept in zip(step["completion_ids"], step["kept"]) if kept]
            for ids, row, of_row in zip(kept_ids, batch["completion_ids"], batch["completion_mask"]):
                assert row[of_row.bool()].tolist() == list(ids)
            kept = rewards[mask].view(-1, M)
            if kind == "grpo":
                expected = (kept - kept.mean(-1, keepdim=True)) / (kept.std(-1, keepdim=True) + 1e-4)
            else:
                expected = kept - (kept.sum(-1, keepdim=True) - kept) / (M - 1)
            torch.testing.assert_close(batch["advantages"], expected.flatten())


def test_advantages_by_hand(ranks):
    """Of 1.1, 0.1, 0.1, 0.0 max-variance keeps 1.1 and 0.0: mean 0.55, deviation 1.1 / sqrt(2)."""
    for found in ranks:
        rloo = found["rloo", "by place"]["steps"][0]["batch"]["advantages"]
        assert rloo.tolist() == pytest.approx([1.1, -1.1] * 2)  # 1.1 - 0.0, and 0.0 - 1.1
        grpo = found["grpo", "by place"]["steps"][0]["batch"]["advantages"]
        assert grpo.tolist() == pytest.approx([0.70702, -0.70702] * 2, abs=1e-5)  # 0.55 / (0.77782 + 0.0001)


def test_all_processes_divide_by_the_tokens_that_all_of_them_kept(ranks):
    for steps in zip(*(found["grpo", "max_variance"]["steps"] for found in ranks)):
        tokens = sum(step["batch"]["completion_mask"].sum().item() for step in steps)
        assert [step["batch"]["num_items_in_batch"].item() for step in steps] == [tokens] * len(ranks)


def test_processes_end_with_the_same_weights(ranks):
    for kind in ("grpo", "rloo"):
        for others in zip(*(found[kind, "max_variance"]["weights"] for found in ranks)):
            assert all(torch.equal(others[0], other) for other in others)


@KINDS
def test_memory_of_the_update_falls_with_m(ranks, kind):
    for found in ranks:
        everything, kept = found[kind, "all"]["kept_bytes"], found[kind, "max_variance"]["kept_bytes"]
        assert 0.4 < kept / everything < 0.65  # m / n = 0.5


def test_a_completion_without_a_reward_is_an_error(ranks):
    assert all(found["unscored"] == "rewards must be finite, got nan" for found in ranks)


def test_an_evaluation_keeps_all(ranks):
    assert all(found["evaluation"]["rows"] == N for found in ranks)


def test_settings_that_cannot_work(ranks):
    for found in ranks:
        assert "is 2: no whole groups of 4" in found["split"] if len(ranks) == 2 else found["split"] == ""
        assert "a process keeps 3, which 2 (steps_per_generation) does not divide" in found["uneven"]
        assert "m is 1, but must be from 2" in found["one"]
        assert "m is 5, but must be from 2 to num_generations, which is 4" in found["too many"]


def test_a_trl_without_what_is_wrapped_is_told_in_one_line():
    from extras.trl_pods import DownSampled

    class Other:
        pass

    with pytest.raises(Refusal, match="has no _calculate_rewards: DownSampled needs TRL"):
        type("Trainer", (DownSampled, Other), {})(m=1)


def down_sampled(batch: dict):
    """What becomes of a batch that some TRL returns, of which the first of two completions is kept."""
    from extras.trl_pods import DownSampled

    class Other:
        model = SimpleNamespace(training=True)
        _kept = torch.tensor([True, False])

        def _generate_and_score_completions(self, inputs):
            return batch

    trainer = type("Trainer", (DownSampled, Other), {"__init__": lambda self: None})()
    return trainer._generate_and_score_completions([])


def test_images_are_refused_in_one_line():
    with pytest.raises(Refusal, match="takes text only"):
        down_sampled({"num_images": [1]})


def test_a_trl_that_scores_nan_is_told_in_one_line():
    with pytest.raises(Refusal, match="gives an advantage to a reward that is NaN"):
        down_sampled({"advantages": torch.tensor([1.0, -1.0])})


def problems_in(folder: Path) -> Path:
    row = {"question": "What is 1 + 1?", "answer": "#### 2"}
    (folder / "train.jsonl").write_text((json.dumps(row) + "\n") * 8)
    return folder


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_command_trains_and_saves(tiny, tmp_path, algorithm):  # noqa: F811
    command = [
        str(HERE / "trl_pods.py"),
        algorithm,
        "--model",
        str(tiny),
        "--data",
        str(problems_in(tmp_path)),
    ]
    command += [
        "--m=2",
        "--num_generations=4",
        "--per_device_train_batch_size=4",
        "--gradient_accumulation_steps=2",
    ]
    command += ["--max_completion_length=8", "--max_steps=1", "--use_cpu", "--bf16=False", "--report_to=none"]
    done = launch(1, *command, f"--output_dir={tmp_path / 'out'}", "--logging_steps=1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "reward_of_all" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "the first argument is '', but must be grpo or rloo"),
        (["ppo"], "the first argument is 'ppo', but must be grpo or rloo"),
        (["grpo", "--m=1"], "the following arguments are required: --model"),
        (["grpo", "--model=x", "--m=x"], "argument --m: invalid int value: 'x'"),
        (["grpo", "--model=x", "--m=1", "--rule=best"], "argument --rule: invalid choice: 'best'"),
        (["grpo", "--model=x", "--m=1", "--sleep=3"], "['--sleep=3']"),
        (["grpo", "--model=x", "--m=1", "--data=/no/such"], "--data: no file /no/such/train.jsonl"),
        (
            ["rloo", "--model={tiny}", "--data={problems}", "--m=5", "--num_generations=4"],
            "m is 5, but must be from 2 to num_generations, which is 4",
        ),
    ],
)
def test_a_wrong_argument_is_one_line(tiny, tmp_path, monkeypatch, capsys, arguments, line):  # noqa: F811
    from extras import checks, trl_pods

    problems = problems_in(tmp_path)
    arguments = [argument.format(tiny=tiny, problems=problems) for argument in arguments]
    arguments += ["--use_cpu", "--bf16=False", "--report_to=none", f"--output_dir={tmp_path}"] * (
        len(arguments) > 1
    )
    monkeypatch.setattr(sys, "argv", ["trl_pods.py", *arguments])
    assert checks.explained(trl_pods.main, "trl_pods.py", trains=False) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("trl_pods.py: ") and line in last
