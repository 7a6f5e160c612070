"""The claims of this project, as tests: bash run_gsm8k.sh test

The engine in here is the real vLLM. Where there is no model at hand, the tests make a tiny random Qwen2.
"""

import io
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)

import pods
import rewards
from extras import bench, checks
from extras.easy import easy_problems
from extras.memory import GIB, Memory, activations, predict, qwen, sums
from extras.runs import open_run
from pods import Config, Rollout, SamplingParams, advantages, completion_logprobs, grpo_loss, pack
from rewards import (
    build_messages,
    extract_answer,
    format_score,
    gold_answer,
    is_correct,
    is_well_formed,
    reward,
)
from sampling import RULES, max_reward, max_variance, random_subset

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


def test_max_variance_keeps_half_and_half_of_binary_rewards():
    for ones, m, kept_ones in [
        (8, 8, 4),
        (2, 8, 2),
        (14, 8, 6),
        (8, 5, 3),
        (1, 16, 1),
        (0, 4, 0),
        (16, 4, 4),
    ]:
        rewards = torch.tensor([1.0] * ones + [0.0] * (16 - ones))
        assert rewards[max_variance(rewards, m)].sum() == kept_ones, (ones, m)


def test_max_variance_breaks_ties_as_documented():
    equal = torch.full((6,), 0.1, dtype=torch.float64)
    assert max_variance(equal, 4).tolist() == [0, 1, 4, 5]  # balanced; first of the row, last of the row
    assert max_variance(equal, 3).tolist() == [0, 1, 5]  # two equally balanced: the one with more at the top
    assert max_variance(torch.tensor([0.0, 3.0, 1.0]), 1).tolist() == [1]  # m = 1: the best
    rows = torch.rand(500, 5, generator=torch.Generator().manual_seed(0))
    assert (
        max_variance(rows, 1)[:, 0].tolist() == rows.argmax(-1).tolist()
    )  # also where variances round below 0
    # k = 1 and k = 2 have the same variance, but not the same rounding: the larger k, however it rounds.
    for scale in [1.0, 0.1, 0.3, 7e-5, 1e9]:
        row = torch.tensor([1.0, 0.9, 0.2, 0.1, 0.0], dtype=torch.float64) * scale
        assert max_variance(row, 3).tolist() == [0, 1, 4], scale


def test_rows_are_selected_independently_for_every_rule():
    rewards = torch.rand(2, 5, 12, generator=torch.Generator().manual_seed(0))
    for name, rule in RULES.items():
        kept = rule(rewards, 4)
        assert kept.shape == (2, 5, 4) and kept.dtype == torch.int64
        assert all(len(set(row)) == 4 for row in kept.view(-1, 4).tolist())
        if name != "random":
            for i, j in itertools.product(range(2), range(5)):
                assert torch.equal(kept[i, j], rule(rewards[i, j], 4))


def test_every_rule_keeps_everything_when_m_is_n():
    rewards = torch.rand(3, 7)
    for rule in RULES.values():
        assert torch.equal(rule(rewards, 7).sort(-1).values, torch.arange(7).expand(3, 7))


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
    ],
)
def test_rules_name_the_bad_value(rule, rewards, m, named):
    with pytest.raises(ValueError, match=named):
        rule(torch.tensor(rewards), m)


# ----- The prompt


def test_a_system_message_always_comes_first_and_the_question_last():
    for example in (False, True):
        messages = build_messages("How many?", example)
        roles = [message["role"] for message in messages]
        assert roles == ["system", *(["user", "assistant"] if example else []), "user"]
        assert messages[-1]["content"] == "How many?"


def test_the_solved_example_earns_the_full_reward():
    assert reward(build_messages("", example=True)[2]["content"], "63") == pytest.approx(1.2)


def test_building_messages_twice_gives_equal_and_independent_lists():
    first = build_messages("a", example=True)
    first.append({})
    assert len(build_messages("a", example=True)) == 4


# ----- Which number a text means


@pytest.mark.parametrize(
    "written, number",
    [
        # amounts
        ("1234", "1234"),
        ("$1,234.00", "1234.00"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        ("70,\\!000", "70000"),
        ("$.50", ".50"),
        ("...5", "5"),
        ("Rs.500", "500"),
        ("£3 or €4", "4"),
        ("18.", "18"),
        ("18,", "18"),
        ("**73**", "73"),
        ("18%", "18"),
        ("540 meters/week", "540"),
        ("540meters", "540"),
        ("$2/egg", "2"),
        ("007", "007"),
        # several numbers: the last
        ("16 - 7 = 9", "9"),
        ("5 apples for $10", "10"),
        ("18, 19", "19"),
        ("70 000", "000"),
        # units that hold digits
        ("5 kg of CO2", "5"),
        ("5 m^2", "5"),
        ("5 m^{25}", "5"),
        ("5 m2", "5"),
        # fractions
        ("1/2", "1/2"),
        ("\\frac{1}{2}", "1/2"),
        ("-\\dfrac{1}{2}", "-1/2"),
        ("\\frac{-1}{2}", "-1/2"),
        ("3\\frac{1}{2}", "1/2"),
        # signs
        ("-7", "-7"),
        ("\u22127", "-7"),
        ("-$7", "-7"),
        ("$-7", "-7"),
        ("-\\$7", "-7"),
        ("-**7**", "-7"),
        ("-.5", "-.5"),
        ("= -7", "-7"),
        ("= - 7", "-7"),
        ("=- 7", "-7"),
        ("the loss is -7", "-7"),
        ("(-7)", "-7"),
        ("-(7)", "-7"),
        ("3 * -7", "-7"),
        ("5\n-7", "-7"),
        # not signs
        ("16 - 7", "7"),
        ("16-7", "7"),
        ("16 -7", "7"),
        ("16 \t -7", "7"),
        ("$16 -$7", "7"),
        ("(9 + 7)-7", "7"),
        ("(9 + 7) -7", "7"),
        ("5% -7", "7"),
        ("x-7", "7"),
        ("eggs - 7", "7"),
        ("- 7", "7"),
        ("--5", "5"),
        ("10-12", "12"),
        # not numbers
        ("", None),
        ("none", None),
        ("1,23", None),
        ("18,19", None),
        ("1,2345", None),
        ("1234,567", None),
        ("1.2.3", None),
        ("1.234,56", None),
        ("1/0", None),
        ("1/2/3", None),
        ("1e999999", None),
        ("1E-5", None),
        ("2^3", None),
        ("10^{5}", None),
        ("\\frac12", None),
        ("\u0661\u0662", None),
        ("5 or \u0662", None),
        ("5\u0662", None),
        ("9" * 50, "9" * 50),
        ("9" * 51, None),
        ("5 or 1/0", None),
    ],
)
def test_one_rule_reads_every_way_of_writing_a_number(written, number):
    assert extract_answer(f"<answer>{written}</answer>") == number
    assert extract_answer(f"The answer: {written}") == number


@pytest.mark.parametrize(
    "text, number",
    [
        ("<answer>5</answer> 6", "5"),
        ("7 #### 8 \\boxed{9} <answer>5</answer> 6", "5"),
        ("<answer>4</answer><answer>5</answer>", "5"),
        ("<answer>4<answer>5</answer>", "5"),
        ("<answer>5</answer> 6 </answer>", "5"),
        ("<answer>5</answer><answer>6", "5"),
        ("<answer>no</answer> 6", None),
        ("<answer></answer> #### 6", None),
        ("<answer>5 dollars in\nall</answer>", "5"),
        ("<think><answer>5</answer> 6</think> 7", "5"),
        ("</answer> 6 <answer>", "6"),
        ("4 <answer>\n$5", "5"),  # unfinished: the last number
        ("4\n#### 5\n6", "5"),
        ("#### 4\n#### 5", "5"),
        ("#### -1,080.\nDone, see step 3", "-1080"),
        ("#### 5 \\boxed{6}", "6"),  # letters: a heading
        ("#### Step 4\n\\boxed{6}", "6"),
        ("#### 2. Total\n6", "6"),
        ("5 ####", "5"),
        ("\\boxed{5} 6", "5"),
        ("\\boxed{4} \\boxed{5}", "5"),
        ("\\boxed{\\frac{1}{2}} 6", "1/2"),
        ("\\boxed{\\$1{,}234} 6", "1234"),
        ("\\boxed{\\text{about }5} 6", "5"),
        ("\\boxed{no} 6", None),
        ("\\boxed{5", "5"),
        ("\\boxed{5 {} 6", "6"),
        ("4 and so 5.", "5"),
        ("5\n6", "6"),
        ("5} 6", "6"),
    ],
)
def test_the_answer_is_in_the_block_else_after_hashes_else_in_the_box_else_last(text, number):
    assert extract_answer(text) == number


@pytest.mark.parametrize("text, gold", [("$29.00", "29"), ("1,080", "1080"), ("2/4", "0.5"), ("-3", "-3.0")])
def test_equal_numbers_are_correct_however_they_are_written(text, gold):
    assert is_correct(text, gold) and is_correct(gold, text)


@pytest.mark.parametrize(
    "text, gold", [("3", "-3"), ("0.33", "1/3"), ("18", "1819"), ("", "0"), ("9" * 49, "1" + "0" * 49)]
)
def test_unequal_numbers_are_wrong_however_near(text, gold):
    assert not is_correct(text, gold)


@pytest.mark.parametrize("gold", ["", "none", "1/0", "1e5", "\ud800"])
def test_an_unreadable_gold_answer_is_an_error_and_never_a_verdict(gold):
    with pytest.raises(ValueError, match="gold answer"):
        is_correct(gold, gold)
    with pytest.raises(ValueError, match="gold answer"):
        reward("5", gold)


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
        (f"{RIGHT}{RIGHT}", 1, False),
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
        ("<answer>5", 1 + 0.025),
    ],
)
def test_the_reward_is_one_for_the_answer_and_up_to_a_fifth_for_the_format(text, expected):
    assert reward(text, "5") == pytest.approx(expected)


# ----- Text that no one expects

PIECES = [
    *rewards.TAGS,
    "1",
    "1,",
    "1/",
    "1,234",
    ".",
    ",",
    "-",
    "= - ",
    "#",
    "####",
    "#### 7\n",
    "\\boxed{",
    "{",
    "}",
]
PIECES += [
    "\\frac{",
    "}{",
    "\\!",
    "{,}",
    "^",
    "^{",
    "e",
    "e-",
    "$",
    "%",
    "*",
    "(",
    " ",
    "\n",
    "x",
    "\0",
    "\ud800",
    "\u200f",
]
PIECES += ["\u2212", "\u0661", "9" * 60]


def test_every_text_has_a_finite_reward_between_0_and_1_2():
    rng = random.Random(0)
    for _ in range(20_000):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
        value = reward(text, "7")
        assert isinstance(value, float) and math.isfinite(value) and 0 <= value <= 1.2 + 1e-9, text
        assert is_well_formed(text) <= (format_score(text) > 0), text
        assert (value >= 1) == is_correct(text, "7"), text


@pytest.mark.parametrize(
    "piece", [*PIECES, "1.", "-1", " -", "</think> ", "<answer></answer>", "1e", "\\frac{1}{"], ids=ascii
)
def test_a_megabyte_of_anything_is_read_in_linear_time(piece):
    # Linear is well under a second each; code that restarts at every piece would sit here for hours.
    text = piece * (1_000_000 // len(piece))
    for hostile in (f"<think>{text}</think> <answer>{text}</answer>", f"\\boxed{{\\frac{{{text}</answer>"):
        assert 0 <= reward(hostile, "7") <= 1.2 + 1e-9


# ----- Real data


def test_every_gold_answer_of_gsm8k_is_read_and_its_own_solution_is_correct():
    rows = read_jsonl(shared("gsm8k/train.jsonl")) + read_jsonl(shared("gsm8k/test.jsonl"))
    assert len(rows) == 8792
    for row in rows:
        gold = gold_answer(row["answer"])
        assert gold == row["answer"].split("#### ")[1].replace(",", "")
        assert is_correct(row["answer"], gold)


def test_verdicts_on_800_real_completions_agree_except_where_the_recorded_one_is_wrong():
    rows = read_jsonl(shared("cases/graded_completions.jsonl"))
    differ = [i for i, row in enumerate(rows) if is_correct(row["completion"], row["gold"]) != row["correct"]]
    # Read one by one: each ends in the right answer ("the answer is $70,000."), which the grader of the
    # paper's authors missed because of a full stop, a sentence or a text cut off. None of OpenAI's differ.
    assert differ == [74, 78, 88, 159, 160, 171, 240, 312]
    assert not any(rows[i]["correct"] for i in differ)
    # Their format is looser: nine completions have a tag too many.
    for row in rows:
        assert is_well_formed(row["completion"]) <= row.get("format", False)


# ----- Problems


def test_easy_problems_share_no_numbers_between_train_and_test():
    pairs = {}
    for split in ("train", "test"):
        problems = easy_problems(split)
        assert problems == easy_problems(split)
        numbers = [tuple(sorted(re.findall(r"\d+", p["question"]))) for p in problems]
        assert all(len(pair) == 2 for pair in numbers)
        assert all(eval(p["answer"].split("=")[0]) == int(gold_answer(p["answer"])) for p in problems)
        pairs[split] = set(numbers)
        assert len({p["question"] for p in problems}) == len(problems) >= 200
    assert not pairs["train"] & pairs["test"]


def test_problems_are_a_function_of_seed_and_step_and_each_pass_sees_all():
    steps = [pods.problems_of_step(10, 4, seed=3, step=step) for step in range(1, 6)]
    assert steps == [pods.problems_of_step(10, 4, seed=3, step=step) for step in range(1, 6)]
    order = sum(steps, [])
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10)) and order[:10] != order[10:]
    assert pods.problems_of_step(10, 4, seed=4, step=1) != steps[0]


# ----- Advantages and loss


def test_advantages_by_hand():
    # Kept 1.0 and 0.0: mean 0.5, std 0.5. All four: mean 0.5, squares 0.25 0.25 0.01 0.01, std sqrt(0.13).
    rewards_, kept = torch.tensor([[0.4, 1.0, 0.0, 0.6]]), torch.tensor([[1, 2]])
    a = 0.5 / (0.5 + 1e-4)
    assert advantages(rewards_, kept).tolist() == [pytest.approx([a, -a])]
    a = 0.5 / (math.sqrt(0.13) + 1e-4)
    assert advantages(rewards_, kept, "all").tolist() == [pytest.approx([a, -a])]
    assert [0.5 / 0.5001, a] == pytest.approx([0.9998, 1.386], abs=5e-4)  # as the docstring has them


def test_equal_rewards_have_exactly_no_advantage():
    for n, i in itertools.product(range(2, 20), range(20)):  # among them means that are not exact
        rewards_ = torch.full((1, n), i / 19, dtype=torch.float64)
        for over in ("kept", "all"):
            assert (advantages(rewards_, torch.arange(n)[None], over) == 0).all()


def test_each_prompt_keeps_its_own_rollouts_with_their_own_advantages():
    rows = [[0.0, 1.0, 0.4, 0.6], [5.0, 5.0, 5.0, 7.0], [0.2, 0.2, 0.2, 0.2]]
    groups = [[Rollout([1], [2], [0.0], "", False, reward=r) for r in row] for row in rows]
    rewards_, kept = pods.down_sample(groups, Config(n=4, m=2))
    assert rewards_.tolist() == rows and kept.tolist() == [[1, 0], [3, 2], [0, 3]]
    assert [[r.kept for r in group] for group in groups] == [
        [True, True, False, False],
        [False, False, True, True],
        [True, False, False, True],
    ]
    a, b = 0.5 / 0.5001, 1 / 1.0001
    assert [[r.advantage for r in group] for group in groups] == [
        pytest.approx([-a, a, 0, 0]),
        pytest.approx([0, 0, -b, b]),
        [0, 0, 0, 0],
    ]
    groups[1][2].reward = math.inf
    with pytest.raises(FloatingPointError, match="not finite"):
        pods.down_sample(groups, Config(n=4, m=2))


def test_each_prompt_is_normalised_by_its_own_rewards():
    rewards_ = torch.tensor([[1.0, 0.0, 0.5], [9.0, 5.0, 9.0]])
    kept = max_variance(rewards_, 2)
    both = advantages(rewards_, kept)
    assert torch.equal(both[1:], advantages(rewards_[1:], kept[1:]))
    assert both[1].tolist() == pytest.approx([2 / 2.0001, -2 / 2.0001])


def test_loss_by_hand():
    log = math.log
    # Two completions, of two tokens and of three.
    logprobs = torch.tensor([log(0.5), log(0.9), log(0.2), log(0.1), log(0.3)])
    old = torch.tensor([log(0.4), log(0.3), log(0.4), log(0.1), log(0.2)])
    A, lengths = torch.tensor([2.0, -1.0]), torch.tensor([2, 3])
    losses, ratio = grpo_loss(logprobs, old, A, lengths, clip=0.2)
    # Ratios 1.25 and 3, both clipped to 1.2, times 2. Ratios 0.5 (clipped to 0.8, worse), 1, 1.5, times -1.
    assert losses.tolist() == pytest.approx([-(2.4 + 2.4) / 2, (0.8 + 1.0 + 1.5) / 3])
    assert ratio.tolist() == pytest.approx([1.25, 3.0, 0.5, 1.0, 1.5])
    # k3 with pi_ref / pi = 2 at one token and 1 elsewhere: 2 - log 2 - 1.
    ref = logprobs.clone()
    ref[0] += log(2)
    with_kl, _ = grpo_loss(logprobs, old, A, lengths, 0.2, ref, kl=0.5)
    assert (with_kl - losses).tolist() == pytest.approx([0.5 * (1 - log(2)) / 2, 0.0], abs=1e-6)
    assert 1 - log(2) == pytest.approx(0.307, abs=5e-4)


def test_a_ratio_beyond_the_clip_has_no_gradient_where_it_would_earn_more():
    """0 above 1.2 for A > 0, and below 0.8 for A < 0: as the docstring says."""
    for A, ratio, slope in [
        (2, 1.25, 0),
        (2, 0.5, 2),
        (-1, 0.5, 0),
        (-1, 1.5, -1),
        (2, 1.1, 2),
        (-1, 0.9, -1),
    ]:
        logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
        losses, _ = grpo_loss(logprobs, torch.zeros(1), torch.tensor([float(A)]), torch.tensor([1]), clip=0.2)
        losses.sum().backward()
        assert logprobs.grad.item() == pytest.approx(-slope * ratio)  # d ratio / d log pi = ratio


# ----- The update, on a tiny model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A random Qwen2 in a folder, with tied embeddings and a byte-level tokenizer whose pad is its eos.

    Each tag is one token, so that now and then a random completion has one, and rewards vary.
    """
    folder = tmp_path_factory.mktemp("tiny")
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(byte_tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.add_tokens(list(rewards.TAGS))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).train()


def cpu_config(tiny, **settings) -> Config:
    base = Config(
        model=str(tiny), dtype="float32", eager=True, n=8, m=4, max_prompt_tokens=512, max_new_tokens=24
    )
    return replace(base, **settings)


EOS = 256


def some_rollouts(count: int, rng: random.Random) -> list[Rollout]:
    """Rollouts of many lengths, 1 to 3 a prompt; eos ends them and is inside of prompts; pi_old off pi."""
    rollouts = []
    while len(rollouts) < count:
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 30))] + [EOS] + [rng.randrange(256)]
        for _ in range(min(rng.randint(1, 3), count - len(rollouts))):
            completion = [rng.randrange(256) for _ in range(rng.randint(0, 20))] + [EOS]
            old = [rng.uniform(-7, -4) for _ in completion]
            rollouts.append(Rollout(prompt, completion, old, "", False, kept=True, advantage=rng.gauss(0, 1)))
    return rollouts


def naive_loss(model, rollout: Rollout, temperature: float, clip: float) -> torch.Tensor:
    """The loss of one completion, token by token, without batches, padding or masks."""
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    log_softmax = (model(ids).logits[0] / temperature).log_softmax(-1)
    total, P, A = 0.0, len(rollout.prompt_ids), rollout.advantage
    for t, token in enumerate(rollout.completion_ids):
        ratio = (log_softmax[P + t - 1, token] - rollout.logprobs[t]).exp()
        total = total + torch.min(ratio * A, ratio.clamp(1 - clip, 1 + clip) * A)
    return -total / len(rollout.completion_ids)


def gradient(model) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return flat


class KeepGradient:
    """In the optimizer's place: leaves weights and gradients as they are, for a look at the gradient."""

    step = zero_grad = lambda self: None


def update_gradient(model, rollouts, count=None, ref_model=None, **settings) -> tuple[torch.Tensor, dict]:
    cfg = Config(dtype="float32", max_grad_norm=math.inf, **settings)
    metrics = pods.update(model, ref_model, KeepGradient(), rollouts, count or len(rollouts), cfg)
    return gradient(model), metrics


def test_the_gradient_is_that_of_a_loop_over_single_completions(model):
    rollouts = some_rollouts(7, random.Random(0))
    losses = [naive_loss(model, r, temperature=0.7, clip=0.2) for r in rollouts]
    (sum(losses) / 7).backward()
    expected = gradient(model)
    found, metrics = update_gradient(model, rollouts, temperature=0.7)
    assert metrics["loss"] == pytest.approx(sum(losses).item() / 7, rel=1e-4)
    assert (found - expected).norm() < 1e-4 * expected.norm()


def test_accumulated_gradient_is_the_full_batch_gradient(model):
    rollouts = some_rollouts(9, random.Random(1))
    whole, _ = update_gradient(model, rollouts, micro_batch_tokens=10_000)
    assert (
        len(pods.cut_into_rows(rollouts, 1)) == len(rollouts) > len(pods.cut_into_rows(rollouts, 10_000)) > 1
    )
    for tokens in (1, 50):
        cut, _ = update_gradient(model, rollouts, micro_batch_tokens=tokens)
        assert (cut - whole).norm() < 1e-5 * whole.norm()


def test_rows_hold_every_rollout_once_within_the_limit_and_never_two_prompts():
    rollouts = some_rollouts(40, random.Random(2))
    rows = pods.cut_into_rows(rollouts, 50)
    assert sum(rows, []) == rollouts and 1 < max(map(len, rows))
    for row in rows:
        tokens = len(row[0].prompt_ids) + sum(len(r.completion_ids) for r in row)
        assert len(row) == 1 or tokens <= 50
        assert all(r.prompt_ids == row[0].prompt_ids for r in row)
    # No row could have taken the first rollout of the next one of the same prompt.
    for row, after in zip(rows, rows[1:]):
        tokens = len(row[0].prompt_ids) + sum(len(r.completion_ids) for r in row)
        assert after[0].prompt_ids != row[0].prompt_ids or tokens + len(after[0].completion_ids) > 50


def test_packed_completions_see_the_prompt_and_themselves_and_are_told_apart_by_length():
    first = Rollout([5, 6, EOS], [7, EOS, EOS], [-1.0] * 3, "", False)
    second = Rollout([5, 6, EOS], [8], [-3.0], "", True)
    ids, positions, predictor, sees = pack([first, second], torch.device("cpu"))
    assert ids.tolist() == [5, 6, EOS, 7, EOS, EOS, 8]
    assert positions.tolist() == [0, 1, 2, 3, 4, 5, 3]
    assert predictor.tolist() == [
        2,
        3,
        4,
        2,
    ]  # the eos of a completion are learnt, and that of the prompt is not
    assert sees.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 0, 1],
    ]


def test_packing_gives_the_gradient_of_separate_rows_for_llama_too(tiny):
    torch.manual_seed(0)
    small = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_key_value_heads=2, **small)).train()
    rollouts = some_rollouts(9, random.Random(12))
    packed, _ = update_gradient(llama, rollouts, micro_batch_tokens=10_000)
    alone, _ = update_gradient(llama, rollouts, micro_batch_tokens=1)
    assert len(pods.cut_into_rows(rollouts, 1)) == 9 and (packed - alone).norm() < 1e-5 * alone.norm()


def test_never_more_than_a_chunk_of_logits_is_there_and_none_is_kept_for_the_backward_pass(
    model, monkeypatch
):
    monkeypatch.setattr(pods, "LOGITS_AT_ONCE", 8)
    rollouts = [Rollout([1, 2, 3], [i] * 20, [-1.0] * 20, "", False) for i in range(3)]
    vocabulary, made, kept = model.config.vocab_size, [], []

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.extend(t.shape for t in tree_leaves(result) if isinstance(t, torch.Tensor))
            return result

    with Note(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        logprobs = completion_logprobs(model, *pack(rollouts, torch.device("cpu")), 1.0)
        logprobs.sum().backward()
    logits = {shape[0] for shape in made if shape[-1:] == (vocabulary,)} - {model.config.hidden_size}
    assert max(logits) == 8 and len(logprobs) == 60
    assert kept and not any(
        shape[-1:] == (vocabulary,) for shape in kept if shape[0] != model.config.hidden_size
    )


def test_groups_without_gradient_can_be_left_out_if_the_denominator_stays(model):
    rollouts = some_rollouts(8, random.Random(3))
    for r in rollouts[4:]:
        r.advantage = 0.0
    whole, _ = update_gradient(model, rollouts)
    left, _ = update_gradient(model, rollouts[:4], count=8)
    assert (left - whole).norm() < 1e-5 * whole.norm()


def test_plain_grpo_is_m_equal_to_n(model):
    rng = random.Random(4)
    groups = [some_rollouts(6, rng) for _ in range(2)]
    rewards_ = torch.tensor([[rng.choice([0.0, 0.1, 1.2]) for _ in range(6)] for _ in groups])
    naive = 0.0
    for group, row in zip(groups, rewards_.tolist()):
        mean = sum(row) / 6
        std = math.sqrt(sum((r - mean) ** 2 for r in row) / 6)
        for rollout, r in zip(group, row):
            rollout.advantage = (r - mean) / (std + 1e-4)
            naive = naive + naive_loss(model, rollout, 1.0, 0.2) / 12
    naive.backward()
    expected = gradient(model)
    for rule in RULES.values():
        kept = rule(rewards_, 6)
        learn = []
        for group, row, values in zip(groups, kept.tolist(), advantages(rewards_, kept).tolist()):
            learn += [replace(group[i], advantage=value) for i, value in zip(row, values)]
        found, _ = update_gradient(model, learn)
        assert (found - expected).norm() < 1e-4 * expected.norm()


def test_the_kl_penalty_is_zero_at_the_start_and_pulls_back_later(model, tiny):
    rollouts = some_rollouts(4, random.Random(5))
    for r in rollouts:
        r.advantage = 0.0
    ref = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    at_start, metrics = update_gradient(model, rollouts, ref_model=ref, kl=0.1)
    assert at_start.norm() < 1e-6 and metrics["loss"] == pytest.approx(0, abs=1e-7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    _, metrics = update_gradient(model, rollouts, ref_model=ref, kl=0.1)
    assert metrics["loss"] > 1e-4


def test_a_nan_stops_before_the_weights_change(model):
    rollouts = some_rollouts(3, random.Random(6))
    rollouts[1].advantage = math.nan
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with pytest.raises(FloatingPointError, match="nan"):
        pods.update(model, None, optimizer, rollouts, 3, Config(dtype="float32"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_step_without_any_gradient_changes_nothing_and_has_all_metrics(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1)
    empty = pods.update(model, None, optimizer, [], 8, Config(dtype="float32"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert (
        empty.keys()
        == pods.update(model, None, optimizer, some_rollouts(1, random.Random()), 8, Config()).keys()
    )
    assert empty["loss"] == empty["grad_norm"] == empty["tokens_updated"] == 0


def test_gradient_checkpointing_changes_nothing_but_memory(model):
    rollouts = some_rollouts(4, random.Random(7))
    plain, _ = update_gradient(model, rollouts)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing
    again, _ = update_gradient(model, rollouts)
    assert (again - plain).norm() < 1e-5 * plain.norm()


# ----- The engine: the real vLLM, in this process


@pytest.fixture(scope="module")
def llm(tiny):
    return pods.start_engine(cpu_config(tiny), torch.cuda.is_available())


def engine_gap(llm, model, temperature: float, seed: int = 0) -> tuple[float, list[list[Rollout]]]:
    """The largest difference between the log-probs of engine and trainer on fresh rollouts, in nats."""
    # Longer than a block of the prefix cache (32 tokens on CPU), or a stale cache would go unnoticed.
    prompts = [[7, 11, 13] * 60 + [i] for i in range(3)]
    set_seed(seed)
    groups = pods.generate(
        llm, prompts, SamplingParams(n=4, temperature=temperature, max_tokens=24, logprobs=0)
    )
    gaps = []
    for group in groups:
        with torch.no_grad():
            logprobs = completion_logprobs(model, *pack(group, torch.device("cpu")), temperature)
        gaps.append(logprobs - torch.tensor([x for r in group for x in r.logprobs]))
    return torch.cat(gaps).abs().max().item(), groups


def test_engine_and_trainer_agree_before_and_after_an_update(llm, model, tiny):
    pods.sync(llm, model, "float32")
    gap, groups = engine_gap(llm, model, temperature=0.5)
    assert gap < 1e-3
    assert all(len(group) == 4 for group in groups)
    for rollout in sum(groups, []):
        assert rollout.truncated == (rollout.completion_ids[-1] != EOS) and len(rollout.completion_ids) <= 24
        assert len(rollout.logprobs) == len(rollout.completion_ids)

    rollouts = sum(groups, [])
    for i, rollout in enumerate(rollouts):
        rollout.advantage = (-1.0) ** i
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cfg = cpu_config(tiny, temperature=0.5)
    first = pods.update(model, None, optimizer, rollouts, len(rollouts), cfg)
    assert first["logprob_gap"] < 1e-4 and first["ratio"] == pytest.approx(1, abs=1e-3)
    assert first["clip_fraction"] == 0
    stale_gap, _ = engine_gap(llm, model, temperature=0.5)
    assert stale_gap > 0.1  # so the update was large enough to be seen
    pods.sync(llm, model, "float32")
    gap, _ = engine_gap(llm, model, temperature=0.5)
    assert gap < 1e-3


def test_sampling_follows_the_global_seed_and_not_the_calls_before(llm, model):
    pods.sync(llm, model, "float32")
    _, first = engine_gap(llm, model, 1.0, seed=1)
    pods.evaluate(llm, [[7, 11, 13] * 60 + [0]], [{"answer": "#### 1"}], Config(max_new_tokens=8))
    _, second = engine_gap(llm, model, 1.0, seed=1)
    _, other = engine_gap(llm, model, 1.0, seed=2)
    assert first == second != other


def test_many_prompts_with_many_rollouts_each(llm):
    params = SamplingParams(n=8, temperature=1.0, max_tokens=4, logprobs=0)
    groups = pods.generate(llm, [[i] * (100 + i) for i in range(16)], params)
    assert [len(group) for group in groups] == [8] * 16
    assert all(r.prompt_ids == [i] * (100 + i) for i, group in enumerate(groups) for r in group)


# ----- Whole runs, as processes


def logs(run: Path) -> list[dict]:
    timings = ("train_seconds", "generate_seconds", "update_seconds")
    return [{k: v for k, v in row.items() if k not in timings} for row in read_jsonl(run / "metrics.jsonl")]


def start_pods(folder: Path, *arguments: str) -> subprocess.Popen:
    """pods.py as a process in a group of its own, from a copy in `folder`, so that its runs/ is there."""
    folder.mkdir(exist_ok=True)
    for file in ("pods.py", "sampling.py", "rewards.py"):
        shutil.copy(HERE / file, folder)
    shutil.copytree(HERE / "extras", folder / "extras", dirs_exist_ok=True)
    command = [sys.executable, str(folder / "pods.py"), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder, start_new_session=True)


def finish(process: subprocess.Popen, code: int = 0) -> str:
    """Waits for the process, checks its exit code and that no process of its group is left; its stderr."""
    _, stderr = process.communicate()
    assert process.returncode == code, stderr[-3000:]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return stderr


TINY_RUN = ["--n=6", "--m=3", "--prompts-per-step=2", "--max-prompt-tokens=1200", "--max-new-tokens=12"]
TINY_RUN += ["--eval-every=2", "--eval-problems=8", "--lr=1e-3", "--name=x", "--save-every=1", "--eager"]
EASY_RUN = [*TINY_RUN, "--data=easy", "--dtype=float32", "--rule=random"]


def test_two_steps_on_gsm8k_and_transformers_and_vllm_load_the_result(tiny, tmp_path):
    command = [f"--data={shared('gsm8k')}", *TINY_RUN]
    finish(start_pods(tmp_path, f"--model={tiny}", *command, "--max-steps=2"))
    run = tmp_path / "runs" / "x"
    metrics = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert ["eval_accuracy" in row for row in metrics] == [True, False, True]
    assert {type(value) for row in metrics for value in row.values()} <= {int, float}
    assert metrics[2]["train_seconds"] > metrics[1]["train_seconds"] > 0
    rollouts = read_jsonl(run / "rollouts.jsonl")
    assert Counter(row["step"] for row in rollouts) == {1: 12, 2: 12}  # all of 2 prompts x 6
    for i in range(0, 24, 6):
        group = rollouts[i : i + 6]
        assert len({row["question"] for row in group}) == 1 and sum(row["kept"] for row in group) == 3
        assert group[0]["gold"] == gold_answer(
            next(
                p["answer"]
                for p in pods.load_problems(str(shared("gsm8k")), "train")
                if p["question"] == group[0]["question"]
            )
        )
    assert sum(row["reward"] for row in rollouts[:12]) / 12 == pytest.approx(metrics[1]["reward_mean"])
    trained = AutoModelForCausalLM.from_pretrained(run / "model")
    assert trained.dtype == torch.bfloat16
    start = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).state_dict()
    end = torch.load(run / "checkpoint" / "state.pt", weights_only=True)["model"]
    for name, value in trained.state_dict().items():
        assert torch.equal(value, end[name].bfloat16()) and not torch.equal(value, start[name]), name
    finish(start_pods(tmp_path, f"--model={run / 'model'}", *command, "--name=again", "--max-steps=0"))
    again = read_jsonl(tmp_path / "runs" / "again" / "metrics.jsonl")
    assert [again[0][key] for key in ("eval_accuracy", "eval_format")] == [
        metrics[2][key] for key in ("eval_accuracy", "eval_format")
    ]


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory) -> Path:
    """The run folder of four steps in one go."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(start_pods(folder, f"--model={tiny}", *EASY_RUN, "--max-steps=4"))
    return folder / "runs" / "x"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, sums may change their order")
def test_a_resumed_run_is_the_same_to_the_bit(tiny, undisturbed, tmp_path):
    finish(start_pods(tmp_path, f"--model={tiny}", *EASY_RUN, "--max-steps=2"))
    run = tmp_path / "runs" / "x"
    assert [row["step"] for row in logs(run)] == [0, 1, 2]
    # What a kill may leave behind: a later step that no checkpoint knows, half a line, half a checkpoint.
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "reward_mean": 9}\n{"step": 4, "rewa')
    (run / "checkpoint" / "state.pt.new").write_bytes(b"half")
    finish(start_pods(tmp_path, f"--model={tiny}", *EASY_RUN, "--max-steps=4"))
    assert logs(run) == logs(undisturbed)
    assert read_jsonl(run / "rollouts.jsonl") == read_jsonl(undisturbed / "rollouts.jsonl")
    states = [torch.load(r / "checkpoint" / "state.pt", weights_only=True) for r in (run, undisturbed)]
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name
    for a, b in zip(*(state["optimizer"]["state"].values() for state in states), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert [path.name for path in (run / "checkpoint").iterdir()] == ["state.pt"]


@pytest.mark.skipif(
    shutil.which("g++") is None or " " in torch.__file__,
    reason="compiling vLLM for the CPU needs g++, and a path without a space",
)
def test_a_compiled_engine_follows_the_weights_too(tiny, tmp_path):
    command = [argument for argument in EASY_RUN if argument != "--eager"]
    finish(start_pods(tmp_path, f"--model={tiny}", *command, "--max-steps=3"))
    metrics = read_jsonl(tmp_path / "runs" / "x" / "metrics.jsonl")
    assert len(metrics) == 4
    for row in metrics[1:]:  # before each update, so after the sync of the one before
        assert row["logprob_gap"] < 1e-4 and row["grad_norm"] > 0


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    while not (run / "metrics.jsonl").exists() or len(logs(run)) <= step:
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.05)


def wait_for_stopping(process: subprocess.Popen) -> None:
    while "Stopping" not in (line := process.stderr.readline()):
        assert line


def test_ctrl_c_or_sigterm_ends_the_step_and_ctrl_c_twice_the_process(tiny, tmp_path):
    run, command = tmp_path / "runs" / "x", [f"--model={tiny}", *EASY_RUN, "--save-every=1000"]
    process = start_pods(tmp_path, *command)
    wait_for_step(run, 1, process)
    process.send_signal(signal.SIGINT)
    assert "Stopping" in finish(process, 130)
    stopped = logs(run)[-1]["step"]
    state = torch.load(run / "checkpoint" / "state.pt", weights_only=True)
    assert state["metrics"]["step"] == stopped >= 1
    process = start_pods(tmp_path, *command)
    wait_for_step(run, stopped + 1, process)
    process.send_signal(signal.SIGTERM)
    wait_for_stopping(process)
    process.send_signal(signal.SIGTERM)  # a kernel may send it for each thread of a parent that dies
    finish(process, 128 + signal.SIGTERM)
    state = torch.load(run / "checkpoint" / "state.pt", weights_only=True)
    assert state["metrics"]["step"] == logs(run)[-1]["step"] > stopped
    # Again, with steps of seconds: it goes on, and the second signal does not wait for the step to end.
    slow = ["--name=slow", "--n=128", "--max-new-tokens=800"]
    process = start_pods(tmp_path, *command, *slow)
    wait_for_step(tmp_path / "runs" / "slow", 0, process)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    wait_for_stopping(process)
    process.send_signal(signal.SIGINT)
    finish(process, -signal.SIGINT)


@pytest.mark.kills
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, sums may change their order")
def test_twenty_kills_change_nothing(tiny, tmp_path):
    rng = random.Random(0)
    command = [f"--model={tiny}", *EASY_RUN, "--max-steps=40", "--save-every=2"]
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
    killed, undisturbed = (logs(tmp_path / name / "runs" / "x") for name in "ba")
    assert [row["step"] for row in killed] == list(range(41))
    for row, expected in zip(killed, undisturbed, strict=True):
        assert row == expected


def test_a_failed_write_leaves_the_last_checkpoint_whole(tiny, undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "runs" / "x")
    before = (tmp_path / "runs" / "x" / "checkpoint" / "state.pt").read_bytes()
    # A limit on the size of files fails writes as a full disk does, in the midst of the checkpoint.
    limit = (len(before) // 2, len(before) // 2)
    process = start_pods(tmp_path, f"--model={tiny}", *EASY_RUN, "--max-steps=6")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limit)
    stderr = finish(process, 1).strip().splitlines()[-1]
    assert stderr.startswith("pods.py: ") and "whole" in stderr
    assert (tmp_path / "runs" / "x" / "checkpoint" / "state.pt").read_bytes() == before


# ----- What extras/bench.py measures with


def test_the_textbook_loop_that_selection_is_timed_beside_finds_a_best_subset():
    rng = random.Random(0)
    for kind in ("binary", "graded"):
        for row in reward_rows(20, 8, kind, rng).tolist():
            found = variance([row[i] for i in bench.textbook(row, 3)])
            assert found == pytest.approx(max(map(variance, itertools.combinations(row, 3))))


def test_calls_are_timed_in_turns_and_the_first_round_is_not_counted(monkeypatch):
    calls, clock = [], itertools.count()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: 10.0 ** next(clock))
    medians = bench.in_turns(2, 3, a=lambda: calls.append("a"), b=lambda: calls.append("b"))
    assert "".join(calls) == "aaabbb" * 3
    # Clock readings of a's three turns: 1 to 10, 1e4 to 1e5, 1e8 to 1e9. The first is dropped.
    assert medians["a"] == pytest.approx((9e4 + 9e8) / 2 / 3)


def test_peak_memory_is_that_of_the_call_and_not_of_what_came_before():
    torch.zeros(2**27)  # 512 MiB, gone before
    peak = bench.peak_memory(lambda: torch.ones(2**25).sum())  # 128 MiB
    assert peak == pytest.approx(2**27, rel=0.05)


@pytest.mark.parametrize(
    "arguments, named",
    [("nonsense", "no section nonsense"), ("--repeats=0", "--repeats is 0"), ("--out=/no/x", "/no")],
)
def test_wrong_arguments_of_the_benchmark_are_one_line(arguments, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", arguments])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(lines) == 1 and named in lines[0]


# ----- What can be wrong ends in one line


@pytest.fixture
def command(tiny, tmp_path, monkeypatch, capsys):
    """pods.py's main in this process, with its runs/ in tmp_path. Returns exit code and stderr's one line."""
    monkeypatch.setattr(pods, "HERE", tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        defaults = [f"--model={tiny}", "--data=easy", "--max-prompt-tokens=900", "--max-new-tokens=12"]
        monkeypatch.setattr(sys, "argv", ["pods.py", *defaults, *arguments])
        code = checks.explained(lambda: pods.train(checks.parse(Config, "")))
        lines = capsys.readouterr().err.strip().splitlines()
        assert len([line for line in lines if line.startswith("pods.py: ")]) == 1 and "Traceback" not in str(
            lines
        )
        return code, lines[-1]

    return run


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("--m=65", "--m is 65, but must be from 1 to --n, which is 64"),
        ("--m=0", "--m is 0"),
        ("--n=0", "--n is 0"),
        ("--rule=best", "'best' (choose from"),
        ("--lr=fast", "invalid float value: 'fast'"),
        ("--lr=0", "--lr is 0.0"),
        ("--temperature=-1", "--temperature is -1.0"),
        ("--temperature=nan", "--temperature is nan"),
        ("--eval-every=0", "--eval-every is 0"),
        ("--bogus=1", "--bogus"),
        ("--eval=1", "there is no setting --eval=1"),  # no guess at what was meant
        ("--model=/no/such/model", "could not load /no/such/model"),
        ("--model=no-such/model-anywhere", "without the Hugging Face hub, give a local folder"),
        ("--data=gsm8k", "could not load openai/gsm8k"),
        ("--data=/no/such/folder", "no file /no/such/folder/train.jsonl"),
        ("--name=../escape", "--name is '../escape'"),
        ("--max-new-tokens=4000 --micro-batch-tokens=9000", "has a context of 2048"),
        ("--micro-batch-tokens=100", "--micro-batch-tokens is 100, but must be at least"),
        ("--max-prompt-tokens=20", "--max-prompt-tokens is 20, but the shortest prompt has"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(command, monkeypatch, arguments, named):
    for library in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)  # as where the hub is out of reach
    code, line = command(*arguments.split())
    assert code == 2 and named in line


@pytest.mark.parametrize(
    "content, named",
    [
        (
            '{"question": "1 + 1?", "answer": "2 #### 2"}\n{"question": "1',
            "train.jsonl, line 2 cannot be used",
        ),
        ('{"question": "1 + 1?"}', "train.jsonl, line 1 lacks 'answer'"),
        (
            '{"question": "1 + 1?", "answer": "2"}',
            "train.jsonl, line 1 cannot be used: the solution does not end",
        ),
        ("[]", "train.jsonl, line 1 cannot be used"),
        ("", "train.jsonl is empty"),
    ],
)
def test_a_bad_data_file_is_named_with_its_line(command, tmp_path, content, named):
    (tmp_path / "train.jsonl").write_text(content)
    code, line = command(f"--data={tmp_path}")
    assert code == 2 and named in line


def test_a_model_without_tokenizer_or_chat_template_is_refused(command, tiny, tmp_path):
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(bare)
    code, line = command(f"--model={bare}")
    assert code == 2 and "no working tokenizer" in line
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / file, bare)
    code, line = command(f"--model={bare}")
    assert code == 2 and "has no chat template" in line


def test_a_run_in_use_or_of_other_settings_is_refused_and_fresh_moves_it_aside(tmp_path, capsys):
    run = tmp_path / "runs" / "x"
    open_run(run, {"m": 2, "lr": 1.0}, fresh=False).close()  # failed before its first step: no run yet
    lock = open_run(run, {"m": 4, "lr": 1.0}, fresh=False)
    (run / "metrics.jsonl").write_text("")
    for fresh in (False, True):
        with pytest.raises(checks.Refusal, match="in use"):
            open_run(run, {"m": 4, "lr": 1.0}, fresh)
    lock.close()
    with pytest.raises(checks.Refusal, match=r"other settings \(m was 4, is 8\)"):
        open_run(run, {"m": 8, "lr": 1.0}, fresh=False)
    open_run(run, {"m": 8, "lr": 1.0}, fresh=True).close()
    assert json.loads((tmp_path / "runs" / "x.1" / "config.json").read_text())["m"] == 4
    assert json.loads((run / "config.json").read_text())["m"] == 8


def test_a_run_folder_that_cannot_be_made_is_one_line(command, tmp_path):
    (tmp_path / "runs").write_text("a file in the way")
    code, line = command()
    assert code == 1 and str(tmp_path / "runs") in line


def test_long_prompts_are_counted_and_left_out(tiny, capsys):
    rows = [{"question": "x" * length, "answer": "#### 1"} for length in (10, 2000, 3000)]
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompts, problems = pods.encode(rows, tokenizer, Config(max_prompt_tokens=900))
    assert len(prompts) == 1 and problems == rows[:1]
    assert "Left out 2 of 3 problems" in capsys.readouterr().out


def test_failures_are_one_line_and_exit_code_1(capsys):
    for error, named in [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "lower --micro-batch-tokens"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "lower --micro-batch-tokens"),
        (MemoryError(), "lower --micro-batch-tokens"),
        (FloatingPointError("loss nan"), "loss nan. The last checkpoint is good"),
        (OSError(28, "No space left on device"), "No space left on device. The last checkpoint is whole"),
    ]:

        def fail():
            raise error

        assert checks.explained(fail) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and named in lines[0]
    with pytest.raises(RuntimeError):  # a bug keeps its traceback
        checks.explained(lambda: (_ for _ in ()).throw(RuntimeError("a bug")))


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

    sees = torch.ones(1, 1, 100, 100, dtype=torch.bool).tril()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model.base_model(torch.arange(100)[None], attention_mask=sees, use_cache=False)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert activations(config, 100, 2 if autocast else 4, False) == pytest.approx(measured, rel=0.02)


def test_predicted_memory_by_hand(capsys):
    config = qwen("3B")
    cfg = Config(gradient_checkpointing=True, micro_batch_tokens=2048, kl=0.1)
    parts = {
        name: [round(value / GIB, 2) for value in values]
        for name, values in predict(cfg, config, True, 80 * GIB, 512).items()
    }
    weights = 3_085_938_688  # Qwen2.5-3B's, of which GIB makes 2.874
    assert parts["weights, float32"] == [round(4 * weights / GIB, 2)] * 2 == [11.5, 11.5]
    assert parts["AdamW's two moments"] == [22.99, 22.99] and parts["gradient"] == [0, 11.5]
    assert parts["reference model"] == [5.75, 5.75] == [parts["vLLM's weights"][0]] * 2
    assert parts["vLLM's KV cache, at most"] == [28 - 5.75, 0]  # 0.35 of 80, and vLLM sleeps in updates
    assert parts["logits of 512 tokens"] == [0, round(512 * 151936 * 16 / GIB, 2)]
    # Checkpointing keeps 36 inputs of 2048 numbers, and what is kept of one layer (see `activations`).
    layer = 16 * 2048 + 2 * (5 * 2048 + 4 * 2048 + 4 * 11008 + 2048)
    assert parts["activations of 2048 tokens"] == [0, round(2048 * (36 * 8192 + layer + 16384) / GIB, 2)]
    assert max(sums(predict(cfg, config, True, 80 * GIB, 512))) < 80 * GIB


def test_a_gpu_that_is_too_small_is_refused_and_the_table_says_why(tiny, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=2**20))
    with pytest.raises(checks.Refusal, match=r"needs 0\.\d GiB of GPU memory and there are 0\.0; take a sm"):
        Memory(cpu_config(tiny), True, 512)
    out = capsys.readouterr().out
    assert re.search(r"generating +updating\n  weights, float32 ", out) and "\n  all " in out


def test_rollouts_that_do_not_fit_the_engine_are_refused(tiny):
    def start(cfg, on_gpu):  # the real vLLM, with room for 64 tokens of the 536 that a rollout may need
        return pods.LLM(
            cfg.model, max_model_len=536, kv_cache_memory_bytes=2**16, enforce_eager=True, block_size=32
        )

    with pytest.raises(checks.Refusal, match=r"vLLM cannot start .*; lower --max-new-tokens"):
        checks.started(start, cpu_config(tiny), False)


def test_compiling_without_a_compiler_is_refused_and_eager_needs_none(tiny, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    cfg = cpu_config(tiny, eager=False)
    with pytest.raises(checks.Refusal, match="with no-such-compiler, and there is none; .* --eager"):
        checks.started(lambda *args: pytest.fail("started"), cfg, False)
    monkeypatch.setenv("CXX", sys.executable)  # there, as a compiler would be
    monkeypatch.setattr(torch, "__file__", "/a b/torch/__init__.py")
    with pytest.raises(checks.Refusal, match="path with a space, /a b/torch.*; add --eager"):
        checks.started(lambda *args: pytest.fail("started"), cfg, False)
    for cfg, on_gpu in ((cfg, True), (replace(cfg, eager=True), False)):
        assert checks.started(lambda *args: "an engine", cfg, on_gpu) == "an engine"


def test_the_watch_warns_once_of_cut_off_rollouts_and_of_twenty_idle_steps(capsys):
    shown = dict(reward_mean=0.5, accuracy=0.25, generate_seconds=3.0, update_seconds=4.0)

    def watched(metrics) -> list[str]:
        with tqdm(total=60, file=io.StringIO()) as bar:
            watch = checks.Watch(Config(prompts_per_step=2), bar)
            for step in range(60):
                watch(shown | metrics(step))
            assert bar.n == 60 and bar.postfix.startswith("reward 0.50, accuracy 25%")
        return capsys.readouterr().out.splitlines()

    said = watched(lambda step: {"truncated": 0.9, "groups_skipped": 2, "logprob_gap": 1.0})
    assert len(said) == 3
    assert "--max-new-tokens" in said[0] and "1.00 nats" in said[1] and "20 steps" in said[2]
    assert not watched(
        lambda step: {"truncated": 0.5, "groups_skipped": 2 if step % 20 else 1, "logprob_gap": 0.04}
    )


def test_what_a_completion_says_cannot_reach_the_terminal(undisturbed):
    # A random model writes all bytes; its log must still be plain text, one line a rollout.
    raw = (undisturbed / "rollouts.jsonl").read_text()
    assert raw.isascii() and raw.replace("\n", "").isprintable()
    assert not all(row["completion"].isascii() for row in read_jsonl(undisturbed / "rollouts.jsonl"))


def test_a_run_that_is_told_to_end_where_it_stopped_is_evaluated_and_saved(tiny, undisturbed, tmp_path):
    run = tmp_path / "runs" / "x"
    shutil.copytree(undisturbed, run)
    state = torch.load(run / "checkpoint" / "state.pt", weights_only=True)
    state["metrics"] = {k: v for k, v in state["metrics"].items() if not k.startswith("eval_")}
    torch.save(state, run / "checkpoint" / "state.pt")
    shutil.rmtree(run / "model")
    finish(start_pods(tmp_path, f"--model={tiny}", *EASY_RUN, "--max-steps=3"))
    assert (run / "model" / "config.json").exists()
