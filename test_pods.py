"""The claims of this project, as tests: bash run_gsm8k.sh test

The engine in here is the real vLLM. The model is a tiny random one (tests/tiny_model.py).
"""

import ast
import io
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tokenize
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    set_seed,
)

import pods
import rewards
from pods import Config, Rollout, advantages, grpo_loss
from rewards import (
    SYSTEM_PROMPT,
    build_messages,
    extract_answer,
    format_score,
    gold_answer,
    is_correct,
    is_well_formed,
    reward,
)
from sampling import RULES, max_reward, max_variance, random_subset
from tests import tiny_model

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent / "shared"  # real data for some tests, which skip without it


def shared(path: str) -> Path:
    if not (SHARED / path).exists():
        pytest.skip(f"no {SHARED / path}")
    return SHARED / path


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ----- Selection


def reward_rows(count: int, n: int, kind: str, rng: random.Random) -> torch.Tensor:
    """(count, n) rewards of one kind, float64."""
    draw = {
        "graded": lambda: rng.random(),
        "tied": lambda: rng.choice([0.0, 0.025, 0.1, 1.0, 1.2]),
        "binary": lambda: float(rng.random() < 0.3),
        "equal": lambda: 0.7,
        "offset": lambda: 1e8 + rng.choice([0.0, 0.5, 1.0]),
        "huge": lambda: rng.uniform(-1e200, 1e200),
    }[kind]
    return torch.tensor([[draw() for _ in range(n)] for _ in range(count)], dtype=torch.float64)


def variance(rewards: list[float]) -> float:
    mean = math.fsum(rewards) / len(rewards)
    return math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)


@pytest.mark.parametrize("kind", ["graded", "tied", "binary", "equal", "offset"])
def test_max_variance_is_the_best_of_all_subsets(kind):
    rng = random.Random(kind)
    for n in range(1, 10):
        for m in range(1, n + 1):
            rewards = reward_rows(3, n, kind, rng)
            for row, kept in zip(rewards.tolist(), max_variance(rewards, m).tolist()):
                assert len(set(kept)) == m and set(kept) <= set(range(n))
                best = max(variance(subset) for subset in itertools.combinations(row, m))
                assert variance([row[i] for i in kept]) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_max_variance_survives_rewards_whose_squares_overflow():
    rewards = reward_rows(20, 8, "huge", random.Random(0))
    assert torch.equal(max_variance(rewards, 4), max_variance(rewards / 1e200, 4))


def test_max_variance_gives_its_worked_example():
    assert max_variance(torch.tensor([0.2, 1.0, 0.1, 0.8, 0.0]), 3).tolist() == [1, 2, 4]
    row = [1.0, 0.8, 0.2, 0.1, 0.0]
    by_k = [variance(row[:k] + row[2 + k :]) for k in range(4)]
    assert by_k == pytest.approx([0.007, 0.202, 0.187, 0.116], abs=5e-4)


@pytest.mark.parametrize(
    "ones, m, kept_ones",
    [(8, 8, 4), (2, 8, 2), (14, 8, 6), (8, 5, 3), (1, 16, 1), (0, 4, 0), (16, 4, 4)],
)
def test_max_variance_keeps_half_and_half_of_16_binary_rewards(ones, m, kept_ones):
    rewards = torch.tensor([1.0] * ones + [0.0] * (16 - ones))
    assert rewards[max_variance(rewards, m)].sum() == kept_ones


def test_max_variance_breaks_ties_as_documented():
    equal = torch.full((6,), 0.1, dtype=torch.float64)
    assert max_variance(equal, 4).tolist() == [0, 1, 4, 5]  # from the front and from the back
    assert max_variance(equal, 3).tolist() == [0, 1, 5]  # k = 1 and 2 are equally balanced: 2
    rows = torch.rand(500, 5, generator=torch.Generator().manual_seed(0))
    best = max_variance(rows, 1)[:, 0]  # every variance is 0, and some round below it
    assert best.tolist() == rows.argmax(-1).tolist()
    # k = 1 and k = 2 have the same variance, but not the same rounding: the larger k, always.
    for scale in [1.0, 0.1, 0.3, 7e-5, 1e9]:
        row = torch.tensor([1.0, 0.9, 0.2, 0.1, 0.0], dtype=torch.float64) * scale
        assert max_variance(row, 3).tolist() == [0, 1, 4], scale


@pytest.mark.parametrize("name", RULES)
def test_every_rule_selects_in_each_row_by_itself(name):
    rule = RULES[name]
    rewards = torch.rand(2, 5, 12, generator=torch.Generator().manual_seed(0))
    kept = rule(rewards, 4)
    assert kept.shape == (2, 5, 4) and kept.dtype == torch.int64
    assert all(len(set(row)) == 4 for row in kept.view(-1, 4).tolist())
    assert torch.equal(rule(rewards, 12).sort(-1).values, torch.arange(12).expand(2, 5, 12))
    if name != "random":
        for i, j in itertools.product(range(2), range(5)):
            assert torch.equal(kept[i, j], rule(rewards[i, j], 4))


def test_max_reward_keeps_the_highest():
    assert max_reward(torch.tensor([0.1, 0.9, 0.9, 0.3]), 3).tolist() == [1, 2, 3]


def test_random_subsets_are_uniform_and_follow_the_generator():
    rewards = torch.zeros(6000, 4)
    kept = random_subset(rewards, 2, torch.Generator().manual_seed(1))
    assert torch.equal(kept, random_subset(rewards, 2, torch.Generator().manual_seed(1)))
    pairs = Counter(tuple(sorted(row)) for row in kept.tolist())
    assert len(pairs) == 6 and all(abs(count - 1000) < 150 for count in pairs.values())  # 5 sigma


@pytest.mark.parametrize("rule", RULES.values())
@pytest.mark.parametrize(
    "rewards, m, named",
    [
        ([1.0, 2.0], 0, "m = 0"),
        ([1.0, 2.0], 3, "m = 3"),
        ([1.0, math.nan], 1, "nan"),
        ([1.0, -math.inf], 1, "-inf"),
        ([], 1, r"\(0,\)"),
        (1.0, 1, r"\(\)"),
    ],
)
def test_rules_name_the_bad_value(rule, rewards, m, named):
    with pytest.raises(ValueError, match=named):
        rule(torch.tensor(rewards), m)


@pytest.mark.parametrize("name, alone", [("rewards", "torch"), ("sampling", "vllm")])
def test_the_two_files_work_alone(name, alone):
    code = f"import sys, {name}; sys.exit(bool({{'pods', '{alone}'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=HERE).returncode == 0


# ----- What the model is asked


@pytest.mark.parametrize("example", [False, True])
def test_the_instructions_come_first_also_without_a_system_role(example):
    messages = build_messages("How many?", example)
    solved = ["user", "assistant"] if example else []
    assert [m["role"] for m in messages] == ["system", *solved, "user"]
    assert messages[0]["content"] == SYSTEM_PROMPT and messages[-1]["content"] == "How many?"
    merged = build_messages("How many?", example, system_role=False)
    assert [m["role"] for m in merged] == [*solved, "user"]
    assert merged[0]["content"] == f"{SYSTEM_PROMPT}\n\n{messages[1]['content']}"
    assert merged[1:] == messages[2:]
    assert build_messages("How many?", example) == messages  # nothing of it stays in EXAMPLE


def test_the_solved_example_earns_the_full_reward():
    assert reward(build_messages("", example=True)[2]["content"], "63") == pytest.approx(1.2)


# ----- Which number a text means

NUMBERS = [
    # amounts
    {"1234": "1234", "$1,234.00": "1234.00", "1,234,567": "1234567", "1{,}234": "1234"},
    {"70,\\!000": "70000", "$.50": ".50", "...5": "5", "Rs.500": "500", "£3 or €4": "4"},
    {"18.": "18", "18,": "18", "**73**": "73", "18%": "18", "007": "007"},
    {"540 meters/week": "540", "540meters": "540", "$2/egg": "2", "9" * 50: "9" * 50},
    # thousands grouped by spaces
    {"70 000": "70000", "70\u2009000": "70000", "70\u00a0000": "70000", "70\u202f000": "70000"},
    {"70\\,000": "70000", "5 100 000": "5100000", "12 345 679": "12345679", "-7 000": "-7000"},
    {"$2 500.50.": "2500.50", "17 000/5": "17000/5", "16 -7 000": "7000", "step 3 100": "3100"},
    # not grouped: several numbers, of which the last counts
    {"18 19": "19", "-18 19": "19", "1 2345": "2345", "70 0000": "0000", "1234 567": "567"},
    {"1 234 5678": "5678", "1 234,567": "234567", "3.5 100": "100", "1/2 100": "100"},
    {"1,234 100": "100", "CO2 100": "100", "m^2 100": "100", "5\n100": "100", "5, 100": "100"},
    {"16 - 7 = 9": "9", "5 apples for $10": "10", "18, 19": "19", "1 " * 50 + "2": "2"},
    # units that hold digits
    {"5 kg of CO2": "5", "5 m^2": "5", "5 m^{25}": "5", "5 m2": "5"},
    # fractions
    {"1/2": "1/2", "\\frac{1}{2}": "1/2", "-\\dfrac{1}{2}": "-1/2", "\\frac{-1}{2}": "-1/2"},
    {"\\frac12": "1/2", "-\\dfrac12": "-1/2", "\\tfrac 3{10}": "3/10", "\\frac{10}3": "10/3"},
    # mixed numbers
    {"2 1/2": "5/2", "-2 1/2": "-5/2", "6 2/4 m": "13/2", "2 500 1/2": "5001/2"},
    {"3\\frac{1}{2}": "7/2", "-3 \\frac12": "-7/2", "3\u00a0\\tfrac{1}{2}": "7/2"},
    {"4 10/3": None, "2 2/2": None, "2 1/0": None, "9" * 51 + " 1/2": None},
    {"2.5 1/2": "1/2", "x^2 1/2": "1/2", "2\n1/2": "1/2", "2 + \\frac12": "1/2"},
    # signs
    {"-7": "-7", "\u22127": "-7", "-$7": "-7", "$-7": "-7", "-\\$7": "-7", "-**7**": "-7"},
    {"-.5": "-.5", "= -7": "-7", "= - 7": "-7", "=- 7": "-7", "= \t-  7": "-7", "5\n-7": "-7"},
    {"the loss is -7": "-7", "(-7)": "-7", "-(7)": "-7", "3 * -7": "-7"},
    # not signs
    {"16 - 7": "7", "16-7": "7", "16 -7": "7", "16 \t -7": "7", "$16 -$7": "7", "x-7": "7"},
    {"(9 + 7)-7": "7", "(9 + 7) -7": "7", "5% -7": "7", "eggs - 7": "7", "- 7": "7"},
    {"--5": "5", "10-12": "12", "10\u201312": "12"},
    # unreadable, and never skipped for an earlier number
    dict.fromkeys(["", "none", "1,23", "18,19", "1,2345", "1234,567", "1.2.3"]),
    dict.fromkeys(["1.234,56", "1/0", "1/2/3", "2 1/2/3", "1e999999", "1E-5", "2^3", "10^{5}"]),
    dict.fromkeys(["\u0661\u0662", "5 or \u0662", "5\u0662", "70 00\u0662", "9" * 51, "5 or 1/0"]),
]


@pytest.mark.parametrize("written, number", [case for row in NUMBERS for case in row.items()])
def test_one_rule_reads_every_way_of_writing_a_number(written, number):
    assert extract_answer(f"<answer>{written}</answer>") == number
    assert extract_answer(f"The answer: {written}") == number
    assert number is None or is_correct(number, written)


ANSWERS = [
    # a complete block, even if its answer is followed by much talk (verl#7274)
    {"<answer>5</answer> 6": "5", "7 #### 8 \\boxed{9} <answer>5</answer> 6": "5"},
    {"<answer>5</answer>" + " But 4 is less than 6, so let me check." * 20: "5"},
    {"<answer>4</answer><answer>5</answer>": "5", "<answer>4<answer>5</answer>": "5"},
    {"<answer>5</answer> 6 </answer>": "5", "<answer>5</answer><answer>6": "5"},
    {"<answer>no</answer> 6": None, "<answer></answer> #### 6": None},
    {"<answer>5 dollars in\nall</answer>": "5", "<think><answer>5</answer> 6</think> 7": "5"},
    # an unfinished one: the last number
    {"</answer> 6 <answer>": "6", "4 <answer>\n$5": "5"},
    # hashes, unless letters make them a heading
    {"4\n#### 5\n6": "5", "#### 4\n#### 5": "5", "#### -1,080.\nDone, see step 3": "-1080"},
    {"#### 5 \\boxed{6}": "6", "#### 2. Total\n6": "6", "5 ####": "5"},
    # a box, if it is complete
    {"\\boxed{5} 6": "5", "\\boxed{4} \\boxed{5}": "5", "\\boxed{\\frac{1}{2}} 6": "1/2"},
    {"\\boxed{\\$1{,}234} 6": "1234", "\\boxed{\\text{about }5} 6": "5", "\\boxed{no} 6": None},
    {"\\boxed{5": "5", "\\boxed{5 {} 6": "6"},
    # none of these
    {"5\n6": "6", "5} 6": "6"},
]


@pytest.mark.parametrize("text, number", [case for row in ANSWERS for case in row.items()])
def test_the_answer_is_in_the_block_else_after_hashes_else_in_the_box_else_last(text, number):
    assert extract_answer(text) == number


@pytest.mark.parametrize(
    "text, gold", [("$29.00", "29"), ("1,080", "1 080"), ("2 2/4", "2.5"), ("-3", "-3.0")]
)
def test_equal_numbers_are_correct_however_they_are_written(text, gold):
    assert is_correct(text, gold) and is_correct(gold, text)


@pytest.mark.parametrize(
    "text, gold",
    [("3", "-3"), ("0.33", "1/3"), ("18", "1819"), ("", "0"), ("9" * 49, "1" + "0" * 49)],
)
def test_unequal_numbers_are_wrong_however_near(text, gold):
    assert not is_correct(text, gold)


@pytest.mark.parametrize("gold", ["", "none", "1/0", "1e5", "4 10/3", "\ud800"])
def test_an_unreadable_gold_answer_is_an_error_and_never_a_verdict(gold):
    for judge in (is_correct, reward):
        with pytest.raises(ValueError, match="gold answer"):
            judge(gold, gold)


def test_the_gold_answer_follows_the_last_hashes():
    assert gold_answer("1 + 2 = <<1+2=3>>3\n#### 4\n#### $1,080 \n") == "1080"
    assert gold_answer("####-3") == "-3"


@pytest.mark.parametrize(
    "solution", ["", "so 5", "5 ####", "#### five", "#### 5 or 6", "#### 5\n#### ", "#### 1/0"]
)
def test_a_solution_without_a_gold_number_is_an_error_that_shows_its_tail(solution):
    with pytest.raises(ValueError) as error:
        gold_answer("x" * 500 + solution)
    assert repr(solution)[1:-1] in str(error.value) and len(str(error.value)) < 150


# ----- Format and reward

RIGHT = "<think>2 + 3 = 5</think> <answer>5</answer>"


@pytest.mark.parametrize(
    "text, score, well_formed",
    [
        (RIGHT, 1, True),
        ("<think></think><answer></answer>", 1, True),
        ("<think>a\nb</think> \n\n<answer>\n5\n</answer>", 1, True),
        (f"\n{RIGHT} \n", 0.97, True),
        (f"So: {RIGHT}", 0.96, False),
        (f"{RIGHT}{'x' * 99}", 0.01, False),
        (f"{RIGHT}{'x' * 5000}", 0, False),
        (f"<think>{RIGHT}", 1, False),  # from the first <think> ...
        (f"{RIGHT} </answer>", 1, False),  # ... to the last </answer>
        ("<think>2</think> so <answer>5</answer>", 0, False),
        ("<answer>5</answer> <think>2</think>", 0, False),
        ("</think> <answer> <think> </answer>", 0, False),
        ("<think> </answer> </think> <answer>", 0, False),
        ("<think>2</think> <answer>5", 0, False),
        ("2</think> <answer>5</answer>", 0, False),
        ("", 0, False),
    ],
)
def test_format_costs_a_hundredth_for_each_character_outside(text, score, well_formed):
    assert format_score(text) == pytest.approx(score)
    assert is_well_formed(text) is well_formed


@pytest.mark.parametrize(
    "text, expected",
    [
        (RIGHT, 1 + 0.1 + 0.1),
        (RIGHT.replace(">5<", ">6<"), 0.1 + 0.1),
        ("5", 1),
        ("6", 0),
        (f"<think>{RIGHT}", 1 + 0.1 + 0.075),  # a tag that is there twice does not count
        (f"{RIGHT} ok", 1 + 0.097 + 0.1),
        (f"{RIGHT} {'So 4 it was not. ' * 30}", 1 + 0.1),  # talk costs the format, not the answer
        ("<answer>5", 1 + 0.025),
    ],
)
def test_the_reward_is_one_for_the_answer_and_up_to_a_fifth_for_the_format(text, expected):
    assert reward(text, "5") == pytest.approx(expected)


# ----- Text that no one expects

PIECES = [*rewards.TAGS, " ", "\n", "\0", "\ud800", "\u200f", "\u2009", "\u2212", "= - "]
PIECES += "1 1, 1/ 1,234 . , - # #### e e- ^ ^{ $ % * ( x { } }{ {,} \\! \\, \u0661".split(" ")
PIECES += ["#### 7\n", "\\boxed{", "\\frac{", "\\frac1", " 000", " 1/2", "9" * 60]


def test_every_text_has_a_finite_reward_between_0_and_1_2():
    rng = random.Random(0)
    for _ in range(20_000):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
        value = reward(text, "7")
        assert isinstance(value, float) and math.isfinite(value) and 0 <= value <= 1.2 + 1e-9, text
        assert is_well_formed(text) <= (format_score(text) > 0), text
        assert (value >= 1) == is_correct(text, "7"), text


LONG = ["1.", "-1", " -", "</think> ", "<answer></answer>", "1e", "\\frac{1}{", "1\\frac12", "1 "]


@pytest.mark.parametrize("piece", [*PIECES, *LONG], ids=ascii)
def test_a_megabyte_of_anything_is_read_in_linear_time(piece):
    # Linear is well under a second each. Code that restarts at every piece would take hours.
    text = piece * (1_000_000 // len(piece))
    for hostile in (
        f"<think>{text}</think> <answer>{text}</answer>",
        f"\\boxed{{\\frac{{{text}</answer>",
        f"<answer>100{text}7/0</answer>",
    ):
        assert 0 <= reward(hostile, "7") <= 1.2 + 1e-9


# ----- Real data


def test_every_gold_answer_of_gsm8k_is_read_and_its_own_solution_is_correct():
    rows = read_jsonl(shared("gsm8k/train.jsonl")) + read_jsonl(shared("gsm8k/test.jsonl"))
    assert len(rows) == 8792
    without_hashes = 0
    for row in rows:
        gold = gold_answer(row["answer"])
        assert gold == row["answer"].split("#### ")[1].replace(",", "")
        assert is_correct(row["answer"], gold)
        without_hashes += is_correct(row["answer"].rpartition("####")[0], gold)
    # Before that line, the others give another number last. Four of the 8552 end like "$100 000".
    assert without_hashes == 8552


def test_verdicts_on_800_real_completions_agree_except_where_the_recorded_one_is_wrong():
    rows = read_jsonl(shared("cases/graded_completions.jsonl"))
    verdicts = [is_correct(row["completion"], row["gold"]) for row in rows]
    differ = [i for i, row in enumerate(rows) if verdicts[i] != row["correct"]]
    # Read one by one: each ends in the right answer ("the answer is $70,000."), which the grader of
    # the paper's authors missed because of a full stop, a sentence or a text cut off. None of
    # OpenAI's differ.
    assert differ == [74, 78, 88, 159, 160, 171, 240, 312]
    assert not any(rows[i]["correct"] for i in differ)
    # Their format is looser: nine completions have a tag too many.
    for row in rows:
        assert is_well_formed(row["completion"]) <= row.get("format", False)


# ----- Problems


def test_problems_are_a_function_of_seed_and_step_and_each_pass_sees_all():
    problems = [{"question": str(i)} for i in range(10)]

    def steps(seed: int) -> list[list[dict]]:
        cfg = Config(prompts_per_step=4, seed=seed)
        return [pods.problems_of_step(problems, cfg, step) for step in range(1, 6)]

    order = sum(steps(3), [])
    assert steps(3) == steps(3) != steps(4) and order[:10] != order[10:]
    for a_pass in (order[:10], order[10:]):
        assert sorted(a_pass, key=problems.index) == problems


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path):
    line = '{"question": " 1 + 1? ", "answer": "2 #### 2"}\n'
    (tmp_path / "train.jsonl").write_text("\ufeff" + line + line, encoding="utf-8")
    assert pods.read_problems(str(tmp_path), "train") == [{"question": "1 + 1?", "gold": "2"}] * 2


def test_a_template_without_system_messages_gets_the_instructions_from_the_user(tmp_path, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    (with_system,) = pods.encode(["How many?"], tokenizer, example=True)
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = refuse + tokenizer.chat_template
    (without,) = pods.encode(["How many?"], tokenizer, example=True)
    text = tokenizer.decode(without)
    assert text.startswith(f"user: {SYSTEM_PROMPT}\n\n") and text.count("How many?") == 1
    assert tokenizer.decode(with_system).startswith(f"system: {SYSTEM_PROMPT}")


# ----- Advantages and loss


def float64(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_advantages_by_hand():
    # Kept 1.0 and 0.0: mean 0.5, std 0.5. All: mean 0.5, squares 0.25 0.25 0.01 0.01.
    rows, kept = float64([[0.4, 1.0, 0.0, 0.6]]), torch.tensor([[1, 2]])
    a = 0.5 / (0.5 + 1e-4)
    assert advantages(rows, kept).tolist() == [pytest.approx([a, -a])]
    a = 0.5 / (math.sqrt(0.13) + 1e-4)
    assert advantages(rows, kept, "all").tolist() == [pytest.approx([a, -a])]
    assert [0.5 / 0.5001, a] == pytest.approx([0.9998, 1.386], abs=5e-4)  # as in the docstring


def test_equal_rewards_have_exactly_no_advantage():
    for n, i in itertools.product(range(2, 20), range(20)):  # among them means that are inexact
        rows = torch.full((1, n), i / 19, dtype=torch.float64)
        for over in ("kept", "all"):
            assert (advantages(rows, torch.arange(n)[None], over) == 0).all()


def rollout_of(prompt_ids, completion_ids, old_logprobs, **values) -> Rollout:
    graded = dict(text="", truncated=False, correct=False, well_formed=False, reward=0.0)
    return Rollout(prompt_ids, completion_ids, old_logprobs, **graded | values)


def test_each_prompt_keeps_its_own_rollouts_with_their_own_advantages():
    rows = [[0.0, 1.0, 0.4, 0.6], [5.0, 5.0, 5.0, 7.0], [0.2, 0.2, 0.2, 0.2]]
    groups = [[rollout_of([1], [2], [0.0], reward=r) for r in row] for row in rows]
    found, kept = pods.down_sample(groups, Config(n=4, m=2))
    assert found.tolist() == rows and kept.tolist() == [[1, 0], [3, 2], [0, 3]]
    a, b = 0.5 / 0.5001, 1 / 1.0001
    assert [r.advantage for r in groups[0]] == pytest.approx([-a, a, 0, 0])
    assert sorted(r.advantage for r in groups[1]) == pytest.approx([-b, 0, 0, b])
    assert groups[1][3].advantage == pytest.approx(b)
    assert all(r.advantage == 0 for r in groups[2]) and sum(r.kept for r in groups[2]) == 2
    groups[1][2].reward = math.inf
    with pytest.raises(ValueError, match="finite"):
        pods.down_sample(groups, Config(n=4, m=2))


def test_loss_by_hand():
    log = math.log
    # Two completions, of two tokens and of three.
    logprobs = torch.tensor([log(0.5), log(0.9), log(0.2), log(0.1), log(0.3)])
    old = torch.tensor([log(0.4), log(0.3), log(0.4), log(0.1), log(0.2)])
    A, lengths = torch.tensor([2.0, -1.0]), torch.tensor([2, 3])
    losses, ratio, clipped = grpo_loss(logprobs, old, A, lengths, clip_eps=0.2)
    # Ratios 1.25 and 3, clipped to 1.2, times 2. Ratios 0.5 (clipped to 0.8), 1, 1.5, times -1.
    assert losses.tolist() == pytest.approx([-(2.4 + 2.4) / 2, (0.8 + 1.0 + 1.5) / 3])
    assert ratio.tolist() == pytest.approx([1.25, 3.0, 0.5, 1.0, 1.5])
    assert clipped.tolist() == [True, True, True, False, False]  # 1.5 at A < 0 is not clipped


@pytest.mark.parametrize(
    "A, ratio, slope",
    [(2, 1.25, 0), (2, 0.5, 2), (-1, 0.5, 0), (-1, 1.5, -1), (2, 1.1, 2), (-1, 0.9, -1)],
)
def test_a_token_is_counted_as_clipped_exactly_where_it_has_no_gradient(A, ratio, slope):
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    of = (torch.zeros(1), torch.tensor([float(A)]), torch.tensor([1]))
    losses, _, clipped = grpo_loss(logprobs, *of, clip_eps=0.2)
    losses.sum().backward()
    assert logprobs.grad.item() == pytest.approx(-slope * ratio)  # d ratio / d log pi = ratio
    assert clipped.item() == (slope == 0)


# ----- The update, on a tiny model

EOS = 256


@pytest.fixture
def model(tiny):
    options = dict(dtype=torch.float32, attn_implementation="sdpa")
    return AutoModelForCausalLM.from_pretrained(tiny, **options).train()


def some_rollouts(count: int, seed: int) -> list[Rollout]:
    """Rollouts of many lengths, 1 to 3 a prompt; eos ends them and is in prompts; pi_old off pi."""
    rng, rollouts = random.Random(seed), []
    while len(rollouts) < count:
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 30))] + [EOS, rng.randrange(256)]
        for _ in range(min(rng.randint(1, 3), count - len(rollouts))):
            completion = [rng.randrange(256) for _ in range(rng.randint(0, 20))] + [EOS]
            old = [rng.uniform(-7, -4) for _ in completion]
            advantage = rng.gauss(0, 1)
            rollouts.append(rollout_of(prompt, completion, old, kept=True, advantage=advantage))
    return rollouts


def naive_loss(model, rollout: Rollout, temperature: float, eps: float) -> torch.Tensor:
    """The loss of one completion, token by token, without batches, padding or masks."""
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    log_softmax = (model(ids).logits[0] / temperature).log_softmax(-1)
    total, P, A = 0.0, len(rollout.prompt_ids), rollout.advantage
    for t, token in enumerate(rollout.completion_ids):
        ratio = (log_softmax[P + t - 1, token] - rollout.old_logprobs[t]).exp()
        total = total + torch.min(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A)
    return -total / len(rollout.completion_ids)


def gradient(model) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


class KeepGradient:
    """In the optimizer's place: leaves weights and gradients as they are."""

    def step(self):
        pass

    def zero_grad(self):
        pass


def update_gradient(model, rollouts, count=None, **settings) -> tuple[torch.Tensor, dict]:
    cfg = Config(dtype="float32", max_grad_norm=math.inf, **settings)
    metrics = pods.update(model, KeepGradient(), rollouts, count or len(rollouts), cfg)
    return gradient(model), metrics


def assert_same(found: torch.Tensor, expected: torch.Tensor, relative: float = 1e-5) -> None:
    assert (found - expected).norm() < relative * expected.norm()


def test_the_gradient_is_that_of_a_loop_over_single_completions(model):
    rollouts = some_rollouts(7, seed=0)
    losses = [naive_loss(model, r, temperature=0.7, eps=0.2) for r in rollouts]
    (sum(losses) / 7).backward()
    expected = gradient(model)
    found, metrics = update_gradient(model, rollouts, temperature=0.7)
    assert metrics["train/loss"] == pytest.approx(sum(losses).item() / 7, rel=1e-4)
    assert_same(found, expected, 1e-4)


def test_accumulated_gradient_is_the_full_batch_gradient(model):
    rollouts = some_rollouts(9, seed=1)
    whole, _ = update_gradient(model, rollouts, micro_batch_tokens=10_000)
    batches = [len(pods.micro_batches(rollouts, tokens)) for tokens in (1, 10_000)]
    assert batches[0] == len(rollouts) > batches[1] > 1
    for tokens in (1, 50):
        assert_same(update_gradient(model, rollouts, micro_batch_tokens=tokens)[0], whole)


def test_micro_batches_hold_every_rollout_once_within_the_limit_and_never_two_prompts():
    rollouts = some_rollouts(40, seed=2)
    batches = pods.micro_batches(rollouts, 50)
    tokens = [len(b[0].prompt_ids) + sum(len(r.completion_ids) for r in b) for b in batches]
    assert sum(batches, []) == rollouts and 1 < max(map(len, batches))
    for batch, size in zip(batches, tokens):
        assert len(batch) == 1 or size <= 50
        assert all(r.prompt_ids == batch[0].prompt_ids for r in batch)
    # None could have taken the first rollout of the next one of the same prompt.
    for batch, size, after in zip(batches, tokens, batches[1:]):
        fits = size + len(after[0].completion_ids) <= 50
        assert after[0].prompt_ids != batch[0].prompt_ids or not fits


def test_packed_completions_see_the_prompt_and_themselves_and_are_told_apart_by_length():
    first = rollout_of([5, 6, EOS], [7, EOS, EOS], [-1.0] * 3)
    second = rollout_of([5, 6, EOS], [8], [-3.0], truncated=True)
    ids, positions, predictor, attention_mask = pods.pack([first, second])
    assert ids.tolist() == [5, 6, EOS, 7, EOS, EOS, 8]
    assert positions.tolist() == [0, 1, 2, 3, 4, 5, 3]
    assert predictor.tolist() == [2, 3, 4, 2]  # eos of a completion is learnt, of a prompt not
    assert attention_mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 0, 1],
    ]


def test_only_a_chunk_of_logits_is_ever_there_and_none_is_kept_for_the_backward_pass(
    model, monkeypatch
):
    monkeypatch.setattr(pods, "LOGITS_AT_ONCE", 8)
    batch = [rollout_of([1, 2, 3], [i] * 20, [-1.0] * 20) for i in range(3)]
    sizes, made, kept = (model.config.vocab_size, model.config.hidden_size), [], []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.extend(t.shape for t in tree_leaves(result) if isinstance(t, torch.Tensor))
            return result

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    def logits(shapes) -> set[int]:
        return {s[0] for s in shapes if s[-1:] == sizes[:1] and s[0] != sizes[1]}

    with Note(), torch.autograd.graph.saved_tensors_hooks(note, tree_leaves):
        logprobs = pods.completion_logprobs(model, *pods.pack(batch), 1.0)
    assert max(logits(made)) == 8 and len(logprobs) == 60
    assert kept and not logits(kept)


def test_groups_without_gradient_can_be_left_out_if_the_denominator_stays(model):
    rollouts = some_rollouts(8, seed=3)
    for r in rollouts[4:]:
        r.advantage = 0.0
    whole, _ = update_gradient(model, rollouts)
    assert_same(update_gradient(model, rollouts[:4], count=8)[0], whole)


def test_plain_grpo_is_m_equal_to_n(model):
    rng = random.Random(4)
    groups = [some_rollouts(6, seed) for seed in (4, 5)]
    rows = float64([[rng.choice([0.0, 0.1, 1.2]) for _ in range(6)] for _ in groups])
    naive = 0.0
    for group, row in zip(groups, rows.tolist()):
        mean, std = sum(row) / 6, math.sqrt(variance(row))
        for rollout, r in zip(group, row):
            rollout.advantage = (r - mean) / (std + 1e-4)
            naive = naive + naive_loss(model, rollout, 1.0, 0.2) / 12
    naive.backward()
    expected = gradient(model)
    for rule in RULES:
        for group, row in zip(groups, rows.tolist()):
            for rollout, r in zip(group, row):
                rollout.reward, rollout.advantage = r, 0.0
        pods.down_sample(groups, Config(n=6, m=6, rule=rule))
        assert_same(update_gradient(model, sum(groups, []))[0], expected, 1e-4)


def test_a_nan_stops_before_the_weights_change(model):
    rollouts = some_rollouts(3, seed=6)
    rollouts[1].advantage = math.nan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with pytest.raises(FloatingPointError, match="nan"):
        pods.update(model, optimizer, rollouts, 3, Config(dtype="float32"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_step_without_any_gradient_changes_nothing_and_has_all_metrics(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1)
    empty = pods.update(model, optimizer, [], 8, Config(dtype="float32"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    some = pods.update(model, optimizer, some_rollouts(1, seed=0), 8, Config(dtype="float32"))
    assert empty.keys() == some.keys() and set(empty.values()) == {0}


def test_gradient_checkpointing_changes_nothing_but_memory(model):
    rollouts = some_rollouts(4, seed=7)
    plain, _ = update_gradient(model, rollouts)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing
    assert_same(update_gradient(model, rollouts)[0], plain)


# ----- The engine: the real vLLM, in this process

PROMPTS = [[7, 11, 13] * 60 + [i] for i in range(3)]  # longer than a block of the prefix cache
PROBLEMS = [dict(question="", gold="1", prompt_ids=ids) for ids in PROMPTS]


def cpu_config(tiny, **settings) -> Config:
    return replace(Config(str(tiny), dtype="float32", n=8, m=4, max_new_tokens=24), **settings)


def process_state() -> dict:
    """What a training step would see, if vLLM changed it."""
    return dict(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        dtype=torch.get_default_dtype(),
        device=torch.get_default_device(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        matmul=(torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
        cudnn=[getattr(torch.backends.cudnn, x) for x in ("benchmark", "deterministic", "enabled")],
        autocast=torch.is_autocast_enabled("cpu"),
        signals=[signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)],
    )


@pytest.fixture(scope="module")
def llm(tiny):
    before = process_state()
    llm = pods.start_engine(cpu_config(tiny), PROBLEMS)
    llm.changed = {k: (before[k], v) for k, v in process_state().items() if v != before[k]}
    return llm


def test_vllm_leaves_the_process_as_a_training_step_needs_it(llm):
    pods.generate(llm, PROBLEMS, 2, 1.0, 4)
    assert not llm.changed and process_state()["grad"] and not process_state()["inference"]


def engine_gap(llm, model, temperature: float, seed: int = 0) -> tuple[float, list[Rollout]]:
    """The largest difference between the log-probs of engine and trainer on fresh rollouts."""
    set_seed(seed)
    groups, gaps = pods.generate(llm, PROBLEMS, 4, temperature, 24), []
    for group in groups:
        with torch.no_grad():
            logprobs = pods.completion_logprobs(model, *pods.pack(group), temperature)
        gaps.append(logprobs - torch.tensor([x for r in group for x in r.old_logprobs]))
    return torch.cat(gaps).abs().max().item(), sum(groups, [])


def test_engine_and_trainer_agree_before_and_after_an_update(llm, model, tiny):
    pods.load_weights_into_vllm(llm, model, "float32")
    gap, rollouts = engine_gap(llm, model, temperature=0.5)
    assert gap < 1e-3 and len(rollouts) == 12
    for i, rollout in enumerate(rollouts):
        assert rollout.truncated == (rollout.completion_ids[-1] != EOS)
        assert len(rollout.old_logprobs) == len(rollout.completion_ids) <= 24
        rollout.advantage = (-1.0) ** i
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = pods.update(model, optimizer, rollouts, 12, cpu_config(tiny, temperature=0.5))
    assert first["train/logp_diff"] < 1e-4 and first["train/clip_fraction"] == 0
    assert first["train/ratio"] == pytest.approx(1, abs=1e-3)
    assert engine_gap(llm, model, temperature=0.5)[0] > 0.1  # an update large enough to be seen
    pods.load_weights_into_vllm(llm, model, "float32")
    assert engine_gap(llm, model, temperature=0.5)[0] < 1e-3


def test_sampling_follows_the_global_seed_and_not_the_calls_before(llm, model):
    pods.load_weights_into_vllm(llm, model, "float32")
    _, first = engine_gap(llm, model, 1.0, seed=1)
    pods.evaluate(llm, PROBLEMS[:1], Config(max_new_tokens=8))
    _, second = engine_gap(llm, model, 1.0, seed=1)
    _, other = engine_gap(llm, model, 1.0, seed=2)
    assert first == second != other


def test_many_prompts_with_many_rollouts_each(llm):
    problems = [PROBLEMS[0] | {"prompt_ids": [i] * (100 + i)} for i in range(16)]
    groups = pods.generate(llm, problems, 8, 1.0, 4)
    assert [len(group) for group in groups] == [8] * 16
    for problem, group in zip(problems, groups):
        assert all(r.prompt_ids == problem["prompt_ids"] for r in group)


def test_a_step_frees_the_trainer_s_memory_before_vllm_wakes_and_goes_in_this_order(
    llm, model, monkeypatch
):
    pods.load_weights_into_vllm(llm, model, "float32")
    monkeypatch.setattr(pods, "reward", lambda text, gold: len(text) / 10)
    calls, of_update = [], []

    def recorded(owner, name: str):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            if name == "wake_up":
                assert all(p.grad is None for p in model.parameters())
                assert of_update and not any(tensor() is not None for tensor in of_update)
            calls.append(" ".join([name, *map(str, kwargs.get("tags", []))]))
            result = real(*args, **kwargs)
            if name == "completion_logprobs":
                of_update.append(weakref.ref(result))
            return result

        monkeypatch.setattr(owner, name, call)

    for owner, name in [
        *((llm, name) for name in ("reset_prefix_cache", "generate", "sleep", "wake_up")),
        *((llm, name) for name in ("collective_rpc",)),
        *((pods, name) for name in ("update", "completion_logprobs")),
    ]:
        recorded(owner, name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pods.take_step(llm, model, optimizer, PROBLEMS, Config(n=4, m=4, dtype="float32"))
    steps = ["reset_prefix_cache", "generate", "sleep", "update", "completion_logprobs"]
    steps += ["wake_up weights", "collective_rpc", "wake_up kv_cache"]
    assert [call for i, call in enumerate(calls) if call not in calls[:i]] == steps
    real = llm.wake_up
    monkeypatch.setattr(llm, "wake_up", lambda tags: real(tags=tags) and False)
    with pytest.raises(RuntimeError, match="did not wake up"):
        pods.take_step(llm, model, optimizer, PROBLEMS, Config(n=4, m=4, dtype="float32"))


def test_a_step_defines_its_metrics_when_a_batch_has_several_updates(llm, model, monkeypatch):
    """The mean over the updates, but of logp_diff the first's: only there the weights are equal."""
    pods.load_weights_into_vllm(llm, model, "float32")
    monkeypatch.setattr(pods, "reward", lambda text, gold: len(text) / 10)
    optimizer, seen, update = torch.optim.AdamW(model.parameters(), lr=1e-3), [], pods.update

    def noted(*args):
        seen.append(update(*args))
        return seen[-1]

    monkeypatch.setattr(pods, "update", noted)
    cfg = Config(n=4, m=4, dtype="float32", max_new_tokens=24, updates_per_batch=3)
    _, metrics = pods.take_step(llm, model, optimizer, PROBLEMS, cfg)
    assert len(seen) == 3 and metrics["train/logp_diff"] == seen[0]["train/logp_diff"] < 1e-4
    assert seen[2]["train/logp_diff"] > 1e-3  # the weights have moved away from the engine's
    for key in ("train/loss", "train/ratio", "train/clip_fraction", "train/grad_norm"):
        assert metrics[key] == pytest.approx(sum(each[key] for each in seen) / 3)


def test_accuracy_is_what_is_correct_says_whatever_the_scale_of_the_reward(llm, monkeypatch):
    monkeypatch.setattr(pods, "reward", lambda text, gold: 100.0)
    monkeypatch.setattr(pods, "is_correct", lambda text, gold: len(text) % 2 == 0)
    groups = pods.generate(llm, PROBLEMS, 8, 1.0, 24)
    rows = float64([[r.reward for r in group] for group in groups])
    metrics = pods.rollout_metrics(groups, rows, rows)
    even = [len(r.text) % 2 == 0 for group in groups for r in group]
    assert metrics["rollout/accuracy"] == sum(even) / 24 and metrics["rollout/reward_mean"] == 100


# ----- Whole runs, as processes


def logs(run: Path) -> list[dict]:
    rows = read_jsonl(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def start_pods(folder: Path, *arguments: str) -> subprocess.Popen:
    """pods.py in a process group of its own, from a copy of the three files alone, in a folder
    with a space in its name."""
    alone = folder / "three files"
    alone.mkdir(parents=True, exist_ok=True)
    for file in ("pods.py", "sampling.py", "rewards.py"):
        shutil.copy(HERE / file, alone)
    command = [sys.executable, "-W", "ignore", "pods.py", "--output_dir=run", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, cwd=alone, start_new_session=True
    )


def finish(process: subprocess.Popen, code: int = 0) -> tuple[str, str]:
    """Waits for the process, checks its exit code and that none of its group is left."""
    stdout, stderr = process.communicate()
    assert process.returncode == code, stderr[-3000:]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return stdout, stderr


@pytest.fixture(scope="session")
def easy(tmp_path_factory) -> Path:
    """A folder with the demonstration's problems, of the test split only a few."""
    folder = tmp_path_factory.mktemp("easy")
    for split, count in (("train", 390), ("test", 8)):
        lines = (HERE / "data" / "easy" / f"{split}.jsonl").read_text().splitlines(keepends=True)
        assert len({json.loads(line)["question"] for line in lines}) == len(lines) >= 200
        (folder / f"{split}.jsonl").write_text("".join(lines[:count]))
    return folder


@pytest.fixture
def command(tiny, easy) -> list[str]:
    settings = "--n=6 --m=3 --prompts_per_step=2 --max_new_tokens=12 --eval_every=2 --save_every=1"
    return [f"--model={tiny}", f"--data={easy}", "--dtype=float32", *settings.split(), "--lr=1e-3"]


def test_the_three_files_alone_train_on_gsm8k_and_save_what_others_load(tiny, command, tmp_path):
    for split, count in (("train", 40), ("test", 4)):
        lines = shared(f"gsm8k/{split}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{split}.jsonl").write_text("".join(lines[:count]))
    command = [*command, f"--data={tmp_path}", "--dtype=bfloat16"]
    stdout, _ = finish(start_pods(tmp_path, *command, "--max_steps=2"))
    run = tmp_path / "three files" / "run"
    metrics, rollouts = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "rollouts.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert ["eval/accuracy" in row for row in metrics] == [True, False, True]
    assert {type(value) for row in metrics for value in row.values()} <= {int, float}
    assert [(row["step"], row["prompt"]) for row in rollouts[::6]] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    for i in range(0, 24, 6):
        assert sum(row["kept"] for row in rollouts[i : i + 6]) == 3
    mean = sum(row["reward"] for row in rollouts[:12]) / 12
    assert mean == pytest.approx(metrics[1]["rollout/reward_mean"])
    # The log of a random model's bytes is plain text, one line a rollout.
    raw = (run / "rollouts.jsonl").read_text()
    assert raw.isascii() and raw.replace("\n", "").isprintable()
    for line in stdout.splitlines():  # nothing but our own lines
        assert line.startswith(("Starting vLLM", "step ", "Warning: ", "Done: ")), line
    trained = AutoModelForCausalLM.from_pretrained(run / "model")
    start = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).state_dict()
    end = torch.load(run / "checkpoint.pt", weights_only=True)["model"]
    for name, value in trained.state_dict().items():
        assert torch.equal(value, end[name].bfloat16()) and not torch.equal(value, start[name])
    again = [*command, f"--model={run / 'model'}", "--output_dir=again", "--max_steps=0"]
    finish(start_pods(tmp_path, *again))
    (loaded,) = read_jsonl(tmp_path / "three files" / "again" / "metrics.jsonl")
    assert loaded["eval/accuracy"] == metrics[2]["eval/accuracy"]


@pytest.fixture(scope="module")
def undisturbed(tiny, easy, tmp_path_factory) -> Path:
    """The run folder of four steps in one go."""
    folder = tmp_path_factory.mktemp("undisturbed")
    settings = "--n=6 --m=3 --prompts_per_step=2 --max_new_tokens=12 --eval_every=2 --save_every=1"
    command = [f"--model={tiny}", f"--data={easy}", "--dtype=float32", *settings.split()]
    finish(start_pods(folder, *command, "--lr=1e-3", "--rule=random", "--max_steps=4"))
    return folder / "three files" / "run"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, sums may change their order")
def test_a_killed_and_resumed_run_is_the_same_to_the_bit(command, undisturbed, tmp_path):
    command = [*command, "--rule=random"]
    process = start_pods(tmp_path, *command, "--max_steps=4")
    run = tmp_path / "three files" / "run"
    wait_for_step(run, 2, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    # What a kill may also leave behind: a step that no checkpoint knows, half a line.
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 900, "rollout/reward_mean": 9}\n{"step": 901, "rollo')
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    assert 1 <= state["metrics"]["step"] <= 4
    finish(start_pods(tmp_path, *command, "--max_steps=4"))
    assert logs(run) == logs(undisturbed)
    assert read_jsonl(run / "rollouts.jsonl") == read_jsonl(undisturbed / "rollouts.jsonl")
    states = [torch.load(r / "checkpoint.pt", weights_only=True) for r in (run, undisturbed)]
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name
    for a, b in zip(*(state["optimizer"]["state"].values() for state in states), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    while not (run / "metrics.jsonl").exists() or len(logs(run)) <= step:
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.05)


def wait_for_stopping(process: subprocess.Popen) -> None:
    while "Stopping" not in (line := process.stderr.readline()):
        assert line


def test_ctrl_c_ends_the_step_and_saves_it_and_ctrl_c_twice_ends_the_process(command, tmp_path):
    command, run = [*command, "--save_every=1000"], tmp_path / "three files" / "run"
    process = start_pods(tmp_path, *command)
    wait_for_step(run, 1, process)
    process.send_signal(signal.SIGINT)
    assert "Stopping" in finish(process, 128 + signal.SIGINT)[1]
    stopped = logs(run)[-1]["step"]
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    assert state["metrics"]["step"] == stopped >= 1
    # Again, with steps of seconds: the second signal does not wait for the step to end.
    slow = ["--output_dir=slow", "--n=128", "--max_new_tokens=800"]
    process = start_pods(tmp_path, *command, *slow)
    wait_for_step(tmp_path / "three files" / "slow", 0, process)
    process.send_signal(signal.SIGINT)
    wait_for_stopping(process)
    process.send_signal(signal.SIGINT)
    finish(process, -signal.SIGINT)


@pytest.mark.kills
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, sums may change their order")
def test_twenty_kills_change_nothing(command, tmp_path):
    rng = random.Random(0)
    command = [*command, "--max_steps=40", "--save_every=2"]
    started = time.monotonic()
    finish(start_pods(tmp_path / "a", *command))
    duration = time.monotonic() - started
    for _ in range(20):
        process = start_pods(tmp_path / "b", *command)
        try:
            process.wait(rng.uniform(0, duration))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finish(start_pods(tmp_path / "b", *command))
    killed, undisturbed = (logs(tmp_path / name / "three files" / "run") for name in "ba")
    assert [row["step"] for row in killed] == list(range(41)) and killed == undisturbed


def test_a_run_told_to_end_where_it_stopped_is_evaluated_and_saved(command, undisturbed, tmp_path):
    run = tmp_path / "three files" / "run"
    shutil.copytree(undisturbed, run)
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    kept = {k: v for k, v in state["metrics"].items() if not k.startswith("eval/")}
    torch.save(state | {"metrics": kept}, run / "checkpoint.pt")
    shutil.rmtree(run / "model")
    out, _ = finish(start_pods(tmp_path, *command, "--rule=random", "--max_steps=3"))
    assert "step 4: test accuracy" in out and (run / "model" / "config.json").exists()


def test_a_full_disk_leaves_the_last_checkpoint_whole(command, undisturbed, tmp_path):
    run = tmp_path / "three files" / "run"
    shutil.copytree(undisturbed, run)
    before = (run / "checkpoint.pt").read_bytes()
    # A limit on the size of files fails writes as a full disk does, midway in the checkpoint.
    process = start_pods(tmp_path, *command, "--rule=random", "--max_steps=6")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (len(before) // 2,) * 2)
    line = finish(process, 1)[1].strip().splitlines()[-1]
    assert line.startswith("pods.py: [Errno") and "is whole" in line
    assert (run / "checkpoint.pt").read_bytes() == before


def refuses_system(template: str) -> str:
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    return refuse + template


GEMMA = dict(head_dim=64, attn_logit_softcapping=None, final_logit_softcapping=None)
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {}),
    "phi3": (Phi3Config, {}),
    "qwen3": (Qwen3Config, dict(head_dim=64)),
    # No lm_head in vLLM; a template that refuses system messages, as Gemma's does.
    "gemma2": (Gemma2Config, GEMMA | dict(template=refuses_system(tiny_model.TEMPLATE))),
    "padded vocabulary": (Qwen2Config, dict(vocab_size=320)),
    "untied head": (Qwen2Config, dict(tie_word_embeddings=False)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_train_and_engine_and_trainer_agree(family, command, tmp_path):
    config_class, settings = FAMILIES[family]
    folder = tiny_model.make_model(tmp_path / "model", config_class, **settings)
    wide = ["--n=48", "--m=24", "--max_steps=3"]  # so that rewards vary
    finish(start_pods(tmp_path, *command, f"--model={folder}", *wide))
    metrics = read_jsonl(tmp_path / "three files" / "run" / "metrics.jsonl")
    assert any(row["train/grad_norm"] > 0 for row in metrics[1:3])
    for row in metrics[1:]:  # before each update, so with the weights of the one before
        assert row["train/logp_diff"] < 1e-4


# ----- What can be wrong ends in one line


@pytest.fixture
def refused(tiny, tmp_path, monkeypatch, capsys):
    """Runs pods.main in this process, which must fail. Returns exit code and the line on stderr."""

    def run(*arguments: str) -> tuple[int, str]:
        defaults = [f"--model={tiny}", f"--data={HERE / 'data' / 'easy'}", "--max_new_tokens=12"]
        folder = f"--output_dir={tmp_path / 'run'}"
        monkeypatch.setattr(sys, "argv", ["pods.py", *defaults, folder, *arguments])
        code = pods.main()
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("pods.py: ")]
        return code, line

    return run


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("--m=65", "--m is 65, but must be from 2 to --n, which is 64"),
        ("--m=1", "--m is 1, but must be from 2"),
        ("--m=0", "--m is 0, but must be a number from 1"),
        ("--n=0", "--n is 0"),
        ("--rule=best", "'best' (choose from"),
        ("--lr=fast", "invalid float value: 'fast'"),
        ("--temperature=0", "--temperature is 0.0, but must be a number from 0.01"),
        ("--temperature=nan", "--temperature is nan"),
        ("--lr=-1", "--lr is -1.0"),
        ("--bogus=1", "--bogus"),
        ("--output=1", "--output=1"),  # no guess at what was meant
        ("--model=/no/such/model", "cannot use /no/such/model"),
        ("--model=no-such/model-anywhere", "cannot use no-such/model-anywhere"),
        ("--data=gsm8k", "cannot load GSM8K from the hub"),
        ("--data=/no/such/folder", "/no/such/folder/train.jsonl is missing or empty"),
        ("--max_new_tokens=4000", "vLLM cannot run"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(refused, monkeypatch, arguments, named):
    for library in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)  # as where the hub is out of reach
    code, line = refused(arguments)
    assert code == 2 and named in line


def test_an_engine_that_cannot_run_this_model_says_so_in_one_line(refused, tmp_path):
    odd = dict(hidden_size=104, num_attention_heads=4, num_key_value_heads=4)  # heads of 26
    code, line = refused(f"--model={tiny_model.make_model(tmp_path / 'odd', LlamaConfig, **odd)}")
    assert code == 2 and "vLLM cannot run" in line and "head" in line.lower() and len(line) < 700


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_on_a_gpu_vllm_sleeps_and_on_a_b200_it_needs_no_nvcc(capability, tiny, monkeypatch):
    """What is asked of vLLM there. (That it does so is not tested: no GPU.)"""
    asked = {}

    class Asked:
        def __init__(self, model, **options):
            asked.update(options)

        def generate(self, *args, **options):
            pass

    monkeypatch.setattr(pods, "LLM", Asked)
    monkeypatch.setattr(pods, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    pods.start_engine(cpu_config(tiny), PROBLEMS)
    assert asked["enable_sleep_mode"] and asked["logprobs_mode"] == "processed_logprobs"
    assert ("attention_backend" in asked) == (capability == (10, 0))


@pytest.mark.parametrize(
    "content, named",
    [
        (b'{"question": "a", "answer": "#### 2"}\n{"question": "1', "line 2 is not like"),
        (b'{"question": "1 + 1?"}', "line 1 is not like"),
        (b'{"question": "1 + 1?", "answer": "2"}', "does not end in"),
        (b'{"question": 5, "answer": "#### 2"}', "line 1 is not like"),
        (b"[]", "line 1 is not like"),
        (b'{"question": "\xff", "answer": "#### 2"}', "line 1 is not like"),
        (b"", "missing or empty"),
    ],
)
def test_a_bad_data_file_is_named_with_its_line(refused, tmp_path, content, named):
    (tmp_path / "train.jsonl").write_bytes(content)
    code, line = refused(f"--data={tmp_path}")
    assert code == 2 and f"{tmp_path / 'train.jsonl'}" in line and named in line


def test_a_model_without_a_chat_template_is_refused(refused, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "bare")
    for file in (tmp_path / "bare").glob("chat_template*"):
        file.unlink()
    code, line = refused(f"--model={tmp_path / 'bare'}")
    assert code == 2 and "chat_template" in line


def test_a_run_in_use_or_of_other_settings_is_refused(refused, tmp_path):
    run, _lock = pods.open_run(Config(output_dir=str(tmp_path / "run"), m=2))
    assert "is in use" in refused()[1]
    _lock.close()
    (run / "metrics.jsonl").write_text("")
    code, line = refused()
    assert code == 2 and "m: 2 there, 16 now" in line and "max_steps" not in line
    other = shutil.copytree(run, tmp_path / "other")
    (other / "metrics.jsonl").rename(other / "checkpoint.pt")  # its log is lost, its settings count
    assert "m: 2 there, 16 now" in refused(f"--output_dir={other}")[1]


def test_only_the_logs_of_a_run_are_cut_and_never_made_longer(tmp_path, model):
    optimizer = torch.optim.AdamW(model.parameters())
    for name in ("train.jsonl", "metrics.jsonl", "rollouts.jsonl"):
        (tmp_path / name).write_text("0123456789\n")
    pods.save(tmp_path, model, optimizer, {"step": 3})
    (tmp_path / "metrics.jsonl").write_text("0123456789\nlater\n")
    (tmp_path / "rollouts.jsonl").write_text("short\n")  # somebody made it shorter
    assert pods.restore(tmp_path, model, optimizer) == {"step": 3}
    assert (tmp_path / "metrics.jsonl").read_text() == "0123456789\n"
    assert (tmp_path / "rollouts.jsonl").read_text() == "short\n"
    (tmp_path / "checkpoint.pt").unlink()
    assert pods.restore(tmp_path, model, optimizer) is None
    sizes = [(tmp_path / name).stat().st_size for name in ("train.jsonl", "metrics.jsonl")]
    assert sizes == [11, 0]  # the data that lies beside them is not ours


def test_a_disk_that_fills_up_anywhere_in_a_checkpoint_is_an_oserror(tmp_path, model):
    optimizer = torch.optim.AdamW(model.parameters())
    pods.save(tmp_path, model, optimizer, {"step": 1})
    before = (tmp_path / "checkpoint.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for share in (0.001, 0.3, 0.501, 0.77, 0.9999):
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * len(before)), limits[1]))
            with pytest.raises(OSError):
                pods.save(tmp_path, model, optimizer, {"step": 2})
            assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_failures_are_one_line_and_exit_code_1(refused, monkeypatch):
    for error, named in [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "lower --micro_batch_tokens"),
        (RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp"), "lower --micro_batch"),
        (MemoryError(), "lower --micro_batch_tokens"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "lower --micro_batch_tokens"),
        (FloatingPointError("loss nan"), "loss nan. The last checkpoint, if"),
        (
            OSError(28, "No space left on device"),
            "No space left on device. The last checkpoint, if",
        ),
    ]:

        def fail(cfg):
            raise error

        monkeypatch.setattr(pods, "train", fail)
        code, line = refused()
        assert code == 1 and named in line
    error = RuntimeError("a bug")  # keeps its traceback
    with pytest.raises(RuntimeError, match="a bug"):
        refused()


# ----- The shape of the three files


@pytest.mark.parametrize("name, most", [("pods", 400), ("sampling", 40), ("rewards", 75)])
def test_a_file_stays_within_its_budget_of_code_lines(name, most):
    """Code lines: neither blank, nor comment, nor docstring. Air and explanation are free."""
    text = (HERE / f"{name}.py").read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    strings = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    docs = {i for s in strings for i in range(s.lineno, s.end_lineno + 1)}
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    used = [t for t in tokens if t.type not in (*layout, tokenize.ENDMARKER)]
    code = {i for t in used for i in range(t.start[0], t.end[0] + 1)} - docs
    assert len(code) <= most and max(map(len, text.splitlines())) <= 100
