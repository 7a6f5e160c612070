"""What a model is asked on GSM8K, which number its text gives as the answer, and what that earns.

The file works alone and needs only Python. For another task, change what pods.py takes from here:

- build_messages: the chat that asks the question.
- gold_answer: the right answer, taken from the solution in the data.
- reward: what a text earns, any finite number. The rules and the advantages work on it.
- is_correct: whether a text is right. pods.py stores its verdict with each rollout and does not
  infer it from the reward, so the reward may have any scale.
- is_well_formed: whether a text has the form that was asked for. It is only reported.

All of it takes time linear in the text. In training, models do write "</think>" a hundred times in
a row, and a regular expression with a lazy .*? takes quadratic time on that.
"""

import re
from fractions import Fraction

# ----- What the model is asked

TAGS = ("<think>", "</think>", "<answer>", "</answer>")

SYSTEM_PROMPT = (
    "Solve the math problem. Reason inside <think> and </think>, then write the answer, "
    "a single number, inside <answer> and </answer>, and nothing else."
)

# The numbers of this example are in none of the easy problems (data/easy). With it, the
# prompts of those problems fill four blocks of vLLM's prefix cache.
ASK = "Rosa has 3 red bags with 21 pencils in each of them. How many pencils does Rosa have in all?"
SOLVED = "<think> 3 * 21 = 63 </think> <answer> 63 </answer>"
EXAMPLE = [{"role": "user", "content": ASK}, {"role": "assistant", "content": SOLVED}]


def build_messages(question: str, example: bool = False, system_role: bool = True) -> list[dict]:
    """The chat that asks `question`: a list of {"role": ..., "content": ...}.

    With `example`, a solved problem comes first. Without `system_role`, the instructions stand at
    the front of the first user message, for chat templates that refuse a system message (Gemma's).
    Otherwise there always is one: without, Qwen2.5's template adds its own (LlamaFactory#10772).
    """
    chat = [*(EXAMPLE if example else []), {"role": "user", "content": question}]
    if system_role:
        return [{"role": "system", "content": SYSTEM_PROMPT}, *chat]
    chat[0] = {"role": "user", "content": f"{SYSTEM_PROMPT}\n\n{chat[0]['content']}"}
    return chat


# ----- Which number a text means
#
# In two steps: NUMBER finds everything that is written like a number, sensible or not (1,234 and
# 1.2.3 and 18 19), and READABLE is what we can read of that.

# A minus is a sign, except after what it can be subtracted from (16-7, x-7, 16 -7) or after another
# minus. Currency, bold or a bracket may stand between the sign and its number: -$7.
SIGN = r"(?<![\w)\]}%-])(?<![\d)\]}%] )(-)[$€£\\*({]*"

# A number does not start inside a word or an exponent: CO2, m^2, m^{2}.
START = r"(?<![\w^])(?<!\^\{)"

# Everything that is written as one, also across a space between two digits. It may start with a
# point (.5), but not with the last of several (...5), and it leaves out a full stop at its end.
WRITTEN = r"(?:(?<!\.)\.)?\d(?:[\d.,/^]|[eE][-+]?\d|(?<=\d) (?=\d))*(?<![.,/])"

NUMBER = re.compile(f"(?:{SIGN})?{START}({WRITTEN})")

# What we can read: 1234, 1,234 and 1 234, also with decimals; .5; 1/2; 2 1/2. A denominator is not
# 0. The first pattern that fits counts, so 17 000/5 is 17000/5 and not 17 and 000/5.
WHOLE = r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+)"
FRACTION = rf"{WHOLE}/0*[1-9][0-9]*"
MIXED = rf"(?P<whole>{WHOLE}) (?P<part>[0-9]+/0*[1-9][0-9]*)"
READABLE = re.compile(rf"{WHOLE}(?:\.[0-9]+)?|\.[0-9]+|{FRACTION}|{MIXED}")

# \frac{1}{2}, \dfrac{1}{2}, \tfrac{1}{2}. In TeX, a single digit needs no braces: \frac12.
TEX_FRACTION = r"\\[dt]?frac" + r" ?(?:\{([^{}]*)\}|([0-9]))" * 2


def last_number(text: str) -> str | None:
    r"""The last number in `text`, as Fraction reads it ("1234.00", "-3", "1/2"), or None.

    These rules are the only ones, for the answers of models and for gold answers:

    - Thousands are grouped by three, with commas (1,234 or 1{,}234) or with spaces (70 000) of any
      kind, also TeX's \, (70\,000). A point is decimal.
    - a/b and \frac{a}{b} are fractions. A whole number before a fraction below 1 makes a mixed
      number: 2 1/2 and 2\frac{1}{2} give "5/2". Before a larger one (4 10/3) it is unreadable.
    - Other numbers with only space between are several, and the last counts: 19 of "18 19", 2345 of
      "1 2345", 0000 of "70 0000". The price is that "in step 3 100 are left" is read as 3100. But
      eleven problems of GSM8K have thousands like that ("$2 500"), and one has two such numbers.
    - Currency, units, percent, bold and a full stop are ignored.
    - A minus, - or U+2212, is a sign if it touches the number or its currency, or follows "=". It
      is none after a digit, closing bracket or % (16-7, 16 -7), right after a letter or another
      minus, or with a space after it (- 7).
    - Digits in a word or an exponent (CO2, m^2) are no number.
    - 1,23  1.2.3  1/0  1e5  2^3, digits of other scripts (which \d takes) and anything longer than
      50 characters are unreadable. An unreadable last number is not skipped: the answer is None.
    """
    text = text.replace("\u2212", "-").replace("{,}", ",").replace("\\!", "").replace("\\,", " ")
    text = re.sub(r"[^\S\n]+", " ", text).replace("= - ", "= -").replace("=- ", "= -")
    text = re.sub(rf"(?<=\d) ?{TEX_FRACTION}", r" \1\2/\3\4", text)  # 2\frac{1}{2} is 2 1/2, but
    text = re.sub(TEX_FRACTION, r"(\1\2/\3\4)", text)  # -\frac{1}{2} is -(1/2)

    minus, written = (NUMBER.findall(text) or [("", "")])[-1]
    if not READABLE.fullmatch(written):  # several, of which a sign belongs to the first
        minus, written = "", written.rpartition(" ")[2]
    number = READABLE.fullmatch(written)
    if number is None or len(written) > 50 or Fraction(number["part"] or 0) >= 1:
        return None
    if number["part"]:
        written = str(int(re.sub("[, ]", "", number["whole"])) + Fraction(number["part"]))
    return minus + re.sub("[, ]", "", written)


# ----- Where the answer is, and whether it is right


def number_after_hashes(text: str) -> str | None:
    """The number after the last "####", on its line. None if the line has letters: a heading."""
    _, hashes, rest = text.rpartition("####")
    line = rest.partition("\n")[0]
    return last_number(line) if hashes and not any(map(str.isalpha, line)) else None


def gold_answer(solution: str) -> str:
    """The number after the last "####" of a GSM8K solution: "1080" for "#### 1,080".

    ValueError, showing the end of the solution, if there is none.
    """
    if (number := number_after_hashes(solution)) is None:
        raise ValueError(f"the solution does not end in '#### number' but in {solution[-60:]!r}")
    return number


def extract_answer(text: str) -> str | None:
    r"""The number that `text` gives as its answer, as `last_number` writes it, or None.

    It is looked for in the first of these that the text has:

    1. the last complete <answer> block, even inside <think>, however much is said after it
       (verl#7274)
    2. the line of the last "####", if it holds a number and no letters
    3. the last \boxed{}, if it is complete
    4. the whole text, so that a right answer without its tags is still right

    Of several numbers there, the last one counts: "16 - 7 = 9" says 9. If the block or the box
    holds no readable number, the answer is None. An <answer> that is never closed is no block: it
    is read by 4, so it can be right, but its tags earn less.
    """
    _, opened, block = text.rpartition("</answer>")[0].rpartition("<answer>")
    if opened:
        return last_number(block.partition("</answer>")[0])

    if (number := number_after_hashes(text)) is not None:
        return number

    _, opened, rest = text.rpartition("\\boxed{")
    depth = 1  # of braces: \boxed{\frac{1}{2}} ends at its third }
    for i, character in enumerate(rest if opened else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return last_number(rest[:i])

    return last_number(text)


def is_correct(text: str, gold: str) -> bool:
    """Whether the answer of `text` equals `gold` exactly, as numbers: 29.00 is 29.

    ValueError if `gold` has no readable number. Any verdict would hide that, whether it scored such
    problems as right (as in open-r1#566) or as wrong.
    """
    if (gold_number := last_number(gold)) is None:
        raise ValueError(f"the gold answer {gold!r} is not a readable number")
    answer = extract_answer(text)
    return answer is not None and Fraction(answer) == Fraction(gold_number)


# ----- What the text earns


def format_score(text: str) -> float:
    """1 for <think>...</think> <answer>...</answer>, less 0.01 for each character around it.

    Never below 0, and 0 without those blocks. As in the code of the paper's authors
    (YixuanEvenXu/pods, utils/data.py), they reach from the first <think> to the last </answer>. We
    allow any white space between the two blocks, the authors one character.
    """
    start, end = text.find("<think>"), text.rfind("</answer>")
    if start < 0 or end < 0 or not re.compile(r"</think>\s*<answer>").search(text, start, end):
        return 0.0
    return max(0.0, 1 - 0.01 * (start + len(text) - end - len("</answer>")))


def is_well_formed(text: str) -> bool:
    """Whether `text` is <think>...</think> <answer>...</answer>, each tag once, nothing around it.

    White space is allowed between the blocks and around them.
    """
    return all(text.count(tag) == 1 for tag in TAGS) and format_score(text.strip()) == 1


def reward(text: str, gold: str) -> float:
    """1 if correct, + 0.1 format_score, + 0.025 for each tag that occurs once: from 0 to 1.2.

    The reward of the authors' code (the same file, at commit 187f43b), except for what is correct:
    their grader can lose a minus and accepts the answer in any of three places. ValueError as in
    `is_correct`.
    """
    tags_once = sum(text.count(tag) == 1 for tag in TAGS)
    return is_correct(text, gold) + 0.1 * format_score(text) + 0.025 * tags_once
