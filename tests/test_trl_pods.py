"""Tests of integrations/trl_pods.py, through the real TRL, on a CPU with gloo.

Run as a module, this file is one of the processes that accelerate launches. TRL is imported late,
since it imports vLLM.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sampling import RULES

pytest.importorskip("trl", reason="needs TRL: see integrations/README.md")
N, M = 4, 2
BATCH = dict(num_generations=N, per_device_train_batch_size=N, gradient_accumulation_steps=2)
CPU = dict(use_cpu=True, bf16=False, report_to="none", max_completion_length=8)
REWARDS = [1.1, 0.1, 0.1, 0.0, 0.1, 0.1, 0.0, 2.2]  # of two groups
PROBLEM = '{"question": "What is 1 + 1?", "answer": "#### 2"}\n'
KINDS = pytest.mark.parametrize("kind", ["grpo", "rloo"])


def by_tokens(completion_ids: list[list[int]]) -> list[float]:
    return [float(sum(ids) % 5) for ids in completion_ids]


class Recorder:
    """Goes before a trainer: notes what the update gets, and what autograd keeps for it."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.steps[-1] |= dict(batch=batch, kept=getattr(self, "_kept", None))
        return batch

    def compute_loss(self, model, *args, **kwargs):
        sizes = {p.data_ptr(): 0 for p in model.parameters()}

        def note(tensor):
            sizes.setdefault(tensor.data_ptr(), tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = super().compute_loss(model, *args, **kwargs)
        self.losses.append(loss.item())
        self.kept_bytes = sum(sizes.values())
        return loss


def build(kind: str, model: str, folder: str, selection: dict, reward=by_tokens, **settings):
    """A trainer that records what it does: TRL's own, if `selection` is empty."""
    from datasets import Dataset

    from integrations.trl_pods import ALGORITHMS

    def record(prompts, completion_ids, **_):
        scores = reward(completion_ids)
        steps.append(dict(prompts=prompts, completion_ids=completion_ids, scores=scores))
        return scores

    steps, (pods, config) = [], ALGORITHMS[kind]
    trainer = type("T", (Recorder, pods if selection else pods.__bases__[-1]), {})
    args = dict(output_dir=folder, max_steps=3, learning_rate=1e-3, save_strategy="no", seed=3)
    args |= dict(gradient_checkpointing=False, disable_tqdm=True, beta=0.0) | CPU | BATCH
    args |= dict(model_init_kwargs={"dtype": "float32"}) | settings
    data = Dataset.from_dict({"prompt": [f"What is {i}?" for i in range(40)]})
    trainer = trainer(model, record, config(**args), data, **selection)
    trainer.steps, trainer.losses = steps, []
    return trainer


def worker(out: str, model: str) -> None:
    folder, found = f"{out}/{os.environ.get('RANK', 0)}", {}
    runs = {rule: dict(m=M, rule=rule) for rule in ("max_variance", "max_reward")}
    runs |= dict(plain={}, all=dict(m=N))
    for kind in ("grpo", "rloo"):
        for name, selection in runs.items():
            trainer = build(kind, model, folder, selection)
            trainer.train()
            run = {key: getattr(trainer, key) for key in ("steps", "losses", "kept_bytes")}
            found[kind, name] = run | dict(weights=trainer.model.state_dict())
        trainer = build(kind, model, folder, dict(m=M), lambda ids: REWARDS)
        trainer.train()
        found[kind, "by hand"] = trainer.steps[0]["batch"]["advantages"].tolist()
    trainer = build("grpo", model, folder, dict(m=M), per_device_eval_batch_size=N)
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    found["evaluated"] = len(trainer.steps[0]["batch"]["advantages"])
    refused = dict(unscored=dict(reward=lambda ids: [None, *by_tokens(ids[1:])]))
    refused["split"] = dict(gradient_accumulation_steps=1, per_device_train_batch_size=2)
    for name, settings in refused.items():
        with pytest.raises(ValueError) as error:
            build("grpo", model, folder, dict(m=M), **settings).train()
        found[name] = str(error.value)
    torch.save(found, f"{folder}.pt")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    """The folder of a random Qwen2 that reads and writes bytes."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    end = dict(eos_token="<|end|>", pad_token="<|end|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **end)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    config = Qwen2Config(**sizes, initializer_range=0.1, eos_token_id=tokenizer.eos_token_id)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def launch(processes: int, *command: str) -> str:
    """What is printed under accelerate launch, from the root of the repository, on the CPU."""
    how = "--cpu" if processes == 1 else "--multi_gpu"  # with gloo where there is no GPU
    line = f"-m accelerate.commands.launch {how} --num_processes {processes} --num_machines 1"
    line += " --mixed_precision no --dynamo_backend no --main_process_port 0 -m"
    env = dict(ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    line = [sys.executable, *line.split(), *command]
    where = dict(cwd=Path(__file__).parents[1], env=os.environ | env)
    done = subprocess.run(line, **where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, tiny, tmp_path_factory) -> list[dict]:
    """What each of 1 or 2 processes recorded."""
    out = tmp_path_factory.mktemp("trl")
    launch(request.param, "tests.test_trl_pods", str(out), tiny)
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(request.param)]


@KINDS
def test_m_equal_to_n_is_trl_itself(ranks, kind):
    for found in ranks:
        plain, ours = found[kind, "plain"], found[kind, "all"]
        assert len(plain["losses"]) == 6
        assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-5)
        torch.testing.assert_close(ours["weights"], plain["weights"], rtol=0, atol=1e-5)
        other = found[kind, "max_variance"]["weights"]  # differs: else this would say nothing
        assert max((other[key] - w).abs().max() for key, w in ours["weights"].items()) > 1e-4


@KINDS
@pytest.mark.parametrize("rule", ["max_variance", "max_reward"])
def test_kept_rows_are_those_of_sampling(ranks, kind, rule):
    for step in (step for found in ranks for step in found[kind, rule]["steps"]):
        groups = [step["prompts"][i : i + N] for i in (0, N)]
        assert all(prompt == group[0] for group in groups for prompt in group)
        rewards, batch = torch.tensor(step["scores"]).view(-1, N), step["batch"]
        index = RULES[rule](rewards, M).sort(-1).values
        assert step["kept"].view(-1, N).nonzero()[:, 1].view(-1, M).equal(index)
        kept_ids = [ids for ids, kept in zip(step["completion_ids"], step["kept"]) if kept]
        rows = zip(batch["completion_ids"], batch["completion_mask"].bool())
        assert [row[mask].tolist() for row, mask in rows] == kept_ids


def test_advantages_by_hand(ranks):
    """Max-variance keeps 1.1 and 0.0 (mean 0.55, deviation 1.1 / sqrt(2)), then 0.0 and 2.2."""
    grpo = [0.55 / (1.1 / 2**0.5 + 1e-4), 1.1 / (2.2 / 2**0.5 + 1e-4)]
    for found in ranks:
        for kind, (a, b) in dict(grpo=grpo, rloo=[1.1 - 0.0, 2.2 - 0.0]).items():
            assert found[kind, "by hand"] == pytest.approx([a, -a, -b, b])


def test_processes_divide_by_the_tokens_that_all_kept_and_end_with_the_same_weights(ranks):
    for steps in zip(*(found["grpo", "max_variance"]["steps"] for found in ranks)):
        tokens = sum(step["batch"]["completion_mask"].sum() for step in steps)
        assert all(step["batch"]["num_items_in_batch"] == tokens for step in steps)
    for kind in ("grpo", "rloo"):
        weights = [found[kind, "max_variance"]["weights"] for found in ranks]
        torch.testing.assert_close(weights[0], weights[-1], rtol=0, atol=0)


@KINDS
def test_memory_of_the_update_falls_with_m(ranks, kind):
    for found in ranks:
        kept, everything = (found[kind, name]["kept_bytes"] for name in ("max_variance", "all"))
        assert 0.4 < kept / everything < 0.65  # m / n = 0.5


def test_evaluation_keeps_all_and_what_cannot_be_selected_is_refused(ranks):
    for found in ranks:
        assert found["evaluated"] == N
        assert "rewards must be finite" in found["unscored"]
        assert len(ranks) == 1 or "generates 2 at a time: no whole groups of 4" in found["split"]


def test_another_trl_is_refused(monkeypatch):
    from integrations import trl_pods

    monkeypatch.setattr(trl_pods, "version", "1.17.0")
    with pytest.raises(ValueError, match="TRL is 1.17.0, but must be 1.16.0"):
        trl_pods.PodsGRPO(m=M)


def test_the_command_trains_and_saves(tiny, tmp_path):
    (tmp_path / "train.jsonl").write_text(PROBLEM * 8)
    settings = CPU | BATCH | dict(model=tiny, data=tmp_path, m=M, max_steps=1, logging_steps=1)
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    printed = launch(1, "integrations.trl_pods", "rloo", *arguments, f"--output_dir={tmp_path}")
    assert "reward_of_all" in printed and (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    "arguments, data, line",
    [
        ("ppo", "", "the first argument is 'ppo', but must be grpo or rloo"),
        ("grpo --m=2", "", "the following arguments are required: --model"),
        ("grpo --model=x --m=2 --sleep=3", "", "['--sleep=3']"),
        ("grpo --model=x --m=2 --data=/no", "", "Unable to find '/no/train.jsonl'"),
        ("grpo --model=x --m=2 --data={here}", "", "train.jsonl: it is empty"),
        ("grpo --model=x --m=2 --data={here}", '{"q": 1}', "['q'], not question and answer"),
        ("grpo --model={tiny} --m=1 --data={here}", PROBLEM, "m is 1, but must be from 2 to num"),
        ("rloo --model={tiny} --m=5 --data={here}", PROBLEM, "to num_generations, which is 4"),
        ("grpo --model={tiny} --m=3 --data={here} --num_generations=8", PROBLEM, "keeps 3, not a"),
    ],
)
def test_a_wrong_setting_is_one_line(tiny, tmp_path, monkeypatch, capsys, arguments, data, line):
    from integrations import trl_pods

    (tmp_path / "train.jsonl").write_text(data)
    algorithm, *words = arguments.format(tiny=tiny, here=tmp_path).split()
    settings = CPU | BATCH | dict(output_dir=tmp_path)
    words = [*(f"--{name}={value}" for name, value in settings.items()), *words]
    monkeypatch.setattr(sys, "argv", ["trl_pods.py", algorithm, *words])
    assert trl_pods.main() == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("trl_pods: ") and line in last


if __name__ == "__main__":
    worker(*sys.argv[1:])
