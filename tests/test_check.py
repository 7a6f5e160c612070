"""tools/check.py finds each of the faults it is there for, through the real vLLM."""

import sys
from functools import partial

import pytest
import torch

import pods
from tools import check


@pytest.fixture
def checked(tiny, monkeypatch, capsys):
    """Runs the check on the tiny model. Returns its exit code and the lines that are not ok."""

    def run() -> tuple[int, list[str]]:
        settings = [f"--model={tiny}", "--data=data/easy", "--dtype=float32"]
        monkeypatch.setattr(sys, "argv", ["check", *settings])
        monkeypatch.setattr(pods, "reward", pods.reward)  # which the check replaces
        code = check.main()
        lines = capsys.readouterr().out.splitlines()
        assert sum(line.startswith(("ok ", "NOT OK ")) for line in lines) >= 6
        return code, [line.removeprefix("NOT OK ") for line in lines if line.startswith("NOT OK")]

    return run


def test_all_is_well(checked):
    assert checked() == (0, [])


def test_weights_that_do_not_reach_the_engine(checked, monkeypatch):
    monkeypatch.setattr(pods, "load_weights_into_vllm", lambda *args: None)
    code, lines = checked()
    assert code == 1 and len(lines) == 3 and "after new weights" in lines[0]


def test_a_prefix_cache_that_is_not_reset(checked, monkeypatch):
    monkeypatch.setattr(pods.LLM, "reset_prefix_cache", lambda self: True)
    code, lines = checked()
    assert code == 1 and "after new weights" in lines[0]


def test_raw_log_probs(checked, monkeypatch):
    def raw(*args, **options):
        return vllm(*args, **options | {"logprobs_mode": "raw_logprobs"})

    vllm = pods.LLM
    monkeypatch.setattr(pods, "LLM", raw)
    code, lines = checked()
    assert code == 1 and "at the start" in lines[0]


def test_a_stale_head(checked, monkeypatch):
    load, lacking = pods.load_weights_into_vllm, partial(torch.nn.Module.state_dict)

    def without_head(llm, model, dtype):
        state = {k: v for k, v in lacking(model).items() if k != "lm_head.weight"}
        monkeypatch.setattr(model, "state_dict", lambda: state)
        load(llm, model, dtype)

    monkeypatch.setattr(pods, "load_weights_into_vllm", without_head)
    code, lines = checked()
    assert code == 1 and "after new weights" in lines[0]
