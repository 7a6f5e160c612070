"""tools/: what a run's files say, what is shown of them, and how much memory a run needs."""

import importlib
import json
import os
import pty
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import pods
from rewards import ASK
from tools.ask import encode
from tools.drawing import arm_colours, canvas, label_ends, save
from tools.memory import CACHE, GIB, activations, in_all, predict, qwen_config
from tools.plot import read_curves
from tools.run_files import plain, read_jsonl
from tools.show_rollouts import DIM, GREEN, NEEDED


@pytest.fixture
def run(tmp_path):
    """The folder of a run with two steps, of which the log of a third is half written."""
    folder = tmp_path / "run"
    folder.mkdir()
    settings = dict(n=4, m=2, rule="max_variance", prompts_per_step=1, example=True)
    (folder / "config.json").write_text(json.dumps(settings | {"max_new_tokens": 5}))
    names = ("time/generate", "time/update", "rollout/reward_mean", "rollout/tokens")
    rows = [{"step": 0, "eval/accuracy": 0.25}, {"step": 1} | dict(zip(names, (40, 20, 0.5, 80)))]
    rows += [{"step": 2, "eval/accuracy": 0.75} | dict(zip(names, (20, 10, 1.0, 40)))]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "time/gen'
    (folder / "metrics.jsonl").write_text(text)
    same = dict(step=1, prompt=1, question="Q\x1b[2J?", gold="4", truncated=False)
    parts = [
        (1.2, True, False, 0),
        (0.1, False, True, -1),
        (1.2, True, True, 1),
        (0, False, False, 0),
    ]
    names = ("reward", "correct", "kept", "advantage")
    rows = [same | dict(zip(names, part)) | {"text": "4\x1b[31m\nfour"} for part in parts]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rollouts.jsonl").write_text(text + '{"step": 1, "pro')
    return folder


@pytest.fixture
def call(monkeypatch):
    """Calls a tool's main() as if its arguments came from the command line."""

    def call(name: str, *arguments) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        importlib.import_module(f"tools.{name}").main()

    return call


# ----- Files and text


def test_a_half_written_last_line_is_left_out_and_other_bad_lines_are_named(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n{"a": 2, "b": 3}\n{"a": ')
    assert list(read_jsonl(file, "a")) == [{"a": 1}, {"a": 2, "b": 3}]
    for bad in ('{"a": \n', "5\n", '{"b": 1}\n', '{"b": 1}', '{"a": "\xff"}\n'):
        file.write_bytes(b'{"a": 1}\n' + bad.encode("latin-1"))
        with pytest.raises(ValueError, match=r"x\.jsonl, line 2 (is not|lacks a)"):
            list(read_jsonl(file, "a"))


def test_nothing_in_a_text_can_steer_a_terminal():
    assert (
        plain("a\n\tb é 数 70\u00a0000 \N{SLIGHTLY SMILING FACE}") == "a\n\tb é 数 70\u00a0000 🙂"
    )
    hostile = [*map(chr, range(32)), *map(chr, range(127, 160)), "\u202e", "\u200b", "\ud800"]
    for character in set(hostile) - {"\n", "\t"}:
        assert plain(f"<{character}>") == "<\N{REPLACEMENT CHARACTER}>"


def test_wrong_arguments_end_in_one_line(run, tmp_path, call, capsys, tiny):
    broken, empty = tmp_path / "broken", tmp_path / "empty"
    broken.mkdir(), empty.mkdir()
    (broken / "rollouts.jsonl").write_text('{"step": 1}\n')
    for named, name, *arguments in (
        ("has no step 7; it has 1 to 1", "show_rollouts", run, 7),
        ("--prompt is 2; step 1 has 1 to 1", "show_rollouts", run, 1, "--prompt=2"),
        ("has no rollouts.jsonl", "show_rollouts", empty, 1),
        (f"rollouts.jsonl, line 1 lacks {NEEDED[1]}", "show_rollouts", broken, 1),
        ("empty is not the folder of a run", "plot", run, empty, "--out", tmp_path / "x.png"),
        ("is not of pods.py", "plot", tiny, "--out", tmp_path / "x.png"),
        ("the run is not finished", "ask", run, "Q?"),
        ("there is no such folder", "ask", tmp_path / "none", "Q?"),
        ("--m is 99", "memory", tiny, "--m=99"),
        ("MODEL must come before", "memory", "--dtype", "float32"),
    ):
        with pytest.raises(SystemExit) as stop:
            call(name, *arguments)
        out, err = capsys.readouterr()
        assert (stop.value.code, out, err.count("\n")) == (2, "", 1), (name, arguments, err)
        assert err.startswith(f"{name}.py: error: ") and named in err


# ----- Single rollouts


def test_rollouts_are_plain_when_piped_and_coloured_on_a_terminal(run):
    command = [sys.executable, "-m", "tools.show_rollouts", run, "1"]
    piped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    heads = ["1.2, right, not kept", "1.2, right, kept, advantage +1.000"]
    heads += ["0.1, wrong, kept, advantage -1.000", "0, wrong, not kept"]
    shown = "".join(f"\n--- reward {head}\n4\ufffd[31m\nfour\n" for head in heads)
    assert piped == "Q\ufffd[2J?\nanswer 4; 2 of 4 rollouts kept\n" + shown
    ours, theirs = pty.openpty()
    subprocess.run(command, stdout=theirs, check=True)
    coloured = os.read(ours, 100_000).decode()
    assert f"{GREEN}--- reward 1.2, right, kept" in coloured
    assert f"{DIM}--- reward 0, wrong, not kept" in coloured and "\x1b[31m\r\nfour" not in coloured


# ----- Figures


def test_curves_by_hand(run, call, tmp_path):
    settings, curves = read_curves(run, "minutes")  # steps of 60 and 30 seconds, 4 rollouts each
    assert curves[0] == ([0, 1.5], [25, 75])
    assert curves[1:] == [([1, 1.5], [0.5, 1]), ([1, 1.5], [20, 10]), ([1, 1.5], [60, 30])]
    assert [xs for xs, _ in read_curves(run, "step")[1]] == [[0, 2], *[[1, 2]] * 3]
    call("plot", run, run, "--out", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_figures_are_opaque_labels_do_not_overlap_and_colours_differ(tmp_path):
    from matplotlib.image import imread

    figure, ((panel,),) = canvas(height=3)
    ends = [(1, y, f"arm {y}", "black") for y in (0, 0.1, 0.2, 5, 9.9, 10)]
    panel.plot([0, 1], [0, 10])
    label_ends(panel, ends)
    save(figure, tmp_path / "x.png")
    pixels = imread(tmp_path / "x.png")  # (height, width, RGBA)
    assert pixels.shape == (600, 1700, 4) and pixels[..., 3].min() == 1 and pixels[0, 0].min() == 1
    boxes = [text.get_window_extent() for text in panel.texts]
    assert len(boxes) == 6 and all(low.y1 <= high.y0 + 2 for low, high in pairwise(boxes))
    assert all(0 <= text.xy[1] <= 1 for text in panel.texts) and max(b.x1 for b in boxes) <= 1700
    arms = [(64, 16, "random"), (64, 16, "max_variance"), (64, 64, "random"), (16, 16, "random")]
    arms += [(64, 32, "max_variance"), (64, 16, "a fork's rule")]
    colours = arm_colours(
        [dict(n=n, m=m, rule=rule, seed=s) for n, m, rule in arms for s in (0, 1)]
    )
    assert len(colours) == len(set(colours.values())) == 6
    assert list(colours)[:3] == ["GRPO 16", "GRPO 64", "max-variance 64 to 16"]


# ----- Asking


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("example", [False, True])
def test_the_prompt_is_that_of_the_training(tiny, example, refuses):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    tokenizer.chat_template = refusal * refuses + tokenizer.chat_template
    assert encode("Q?", tokenizer, example).tolist() == pods.encode(["Q?"], tokenizer, example)


def test_a_run_is_asked_as_it_asked(run, tiny, call, monkeypatch, capsys):
    shutil.copytree(tiny, run / "model")
    asked = []

    def answer(model, tokenizer, prompt, max_new_tokens):
        asked.append((ASK in tokenizer.decode(prompt[0]), max_new_tokens))
        return "\x1b[31mred"

    with monkeypatch.context() as patch:
        patch.setattr("tools.ask.answer", answer)
        for place in (run, run / "model", tiny):
            call("ask", place, "Q?")
    assert asked == [(True, 5), (True, 5), (False, 512)]
    assert capsys.readouterr().out == "\ufffd[31mred\n" * 3
    answers = []
    for settings in ({}, {"repetition_penalty": 9.0, "do_sample": True, "temperature": 9.0}):
        (run / "model" / "generation_config.json").write_text(json.dumps(settings))
        call("ask", run, "Q?")
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and 1 <= len(answers[0]) <= 60  # greedy, as in evaluations


# ----- Memory


@pytest.mark.parametrize("kind", [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM)])
@pytest.mark.parametrize("autocast", [True, False])
def test_predicted_activations_are_those_that_autograd_keeps(kind, autocast):
    heads = dict(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2)
    config = kind[0](vocab_size=1000, hidden_size=512, intermediate_size=1111, **heads)
    model, kept = kind[1](config).train(), {}
    weights = {tuple(sorted(p.shape)) for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(sorted(tensor.shape)) not in weights:  # nor their casts and transposes
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    mask = torch.ones(1, 1, 100, 100, dtype=torch.bool).tril()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model.base_model(torch.arange(100)[None], attention_mask=mask, use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert activations(config, 100, 2 if autocast else 4, False) == pytest.approx(
        measured, rel=0.02
    )


def test_predicted_memory_by_hand(call, capsys, tiny):
    cfg = pods.Config(gradient_checkpointing=True)
    parts = predict(cfg, qwen_config("3B"), 80 * GIB, 512)
    weights = 3_085_938_688  # Qwen2.5-3B's
    assert parts["weights, float32"] == (4 * weights, 4 * weights)
    assert parts["AdamW's two moments"] == (8 * weights, 8 * weights)
    assert parts["gradient"] == (0, 4 * weights) and parts["vLLM's weights"] == (2 * weights, 0)
    assert parts[CACHE] == (0.35 * 80 * GIB - 2 * weights, 0)  # vLLM sleeps in updates
    assert parts["logits of 512 tokens"] == (0, 512 * 151936 * 16)
    # Checkpointing keeps 36 inputs of 2048 numbers, and one layer's activations (`activations`).
    layer = 16 * 2048 + 2 * (5 * 2048 + 4 * 2048 + 4 * 11008 + 2048)
    kept = 2048 * (36 * 4 * 2048 + layer + 8 * 2048)
    assert parts["activations of 2048 tokens"] == (0, kept)
    assert max(in_all(parts)) < 80 * GIB
    call("memory")
    lines = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in lines[-1].split("|")[1:4]] == [
        "all",
        "12.3, 11.3",
        "32.8, 29.1",
    ]

    call("memory", tiny, "--gpu_gib=8")
    assert "No room" not in capsys.readouterr().out
    call("memory", tiny, "--gpu_gib=1")
    assert "No room" in capsys.readouterr().out
    call("memory", tiny, "--gpu_gib=0")  # on a CPU, vLLM never sleeps
    assert "| vLLM's KV cache, at most       |         1.0, 1.0 |" in capsys.readouterr().out
