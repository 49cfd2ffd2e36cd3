"""Properties of every verdict, and linear time for hostile completions."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.format import is_integer_answer
from rewards.grading import (
    extract_answer,
    is_correct,
    judge,
    lenient_is_correct,
)
from rewards.values import MAX_TEXT, read_value
from sologrpo.prompts import PROMPT_FORMATS

WRAP = {
    "xml": "<thinking>\nso\n</thinking>\n<answer>{}</answer>",
    "r1_zero": "so </think> <answer>{}</answer>",
    "boxed": "so \\boxed{{{}}}",
    "lm_eval": "so\n#### {}",
}
formats = st.sampled_from([*PROMPT_FORMATS])
# Every code point, lone surrogates and control characters included.
any_text = st.text(st.characters(exclude_categories=()), max_size=300)
PIECES = [
    *("<answer>", "</answer>", "<thinking>", "</thinking>", "<think>", "</think>"),
    *("\\boxed{", "}", "18", "-", "1,", " or ", "$", "=", "*", "\n", ".", "e9", "not ", "\ud800"),
]
pieces = st.sampled_from(PIECES)
tag_soup = st.lists(pieces | any_text, max_size=40).map("".join)
number_like = st.text(st.sampled_from("0123456789.,-+$%eE xk()=*/'\\{}^_ :"), max_size=40)
integers = st.integers(-(10**30), 10**30) | st.integers(-1_000, 1_000)


def spellings(n):
    """Ways to write the integer n."""
    text, grouped = str(n), f"{n:,}"
    return [
        *(text, grouped, text + ".", text + ".00", f" {text}\n", f"**{grouped}**", f"x = {text}"),
        *(grouped.replace(",", " "), grouped.replace(",", "\u202f"), grouped.replace(",", "{,}")),
        *(text.replace("-", "\u2212"), text.replace("-", "-$") if n < 0 else f"+{text}"),
        *(f"$ {text}", f"{grouped} apples", f"The answer is {text}.", f"\\text{{{grouped} eggs}}"),
        *(f"`{text}`", f"\\({text}\\)", f"${text}$", f"{text}e0", f"{text}%", f"\u200b{text}"),
        text.translate({ord(digit): ord(digit) + 0xFEE0 for digit in "0123456789"}),
    ]


@given(integers, formats)
def test_every_spelling_equals_its_integer_and_no_other(n, prompt_format):
    for spelling in spellings(n):
        completion = WRAP[prompt_format].format(spelling)
        assert extract_answer(completion, prompt_format) == str(n), spelling
        assert is_correct(completion, f"#### {n}", prompt_format), spelling
        for other in (n + 1, n - 1, n * 10, -n or 7):
            assert not is_correct(completion, f"#### {other}", prompt_format) or other == n


@given(any_text | tag_soup | number_like, formats)
@settings(max_examples=600)
def test_nothing_raises(text, prompt_format):
    reading = read_value(text)
    assert (reading.number is None) == bool(reading.problem)
    for completion in (text, WRAP[prompt_format].format(text), text + "18"):
        verdict = judge(completion, "#### 18", prompt_format)
        assert verdict.correct == (verdict.extracted == "18")
        lenient_is_correct(completion, "#### 18")
        is_integer_answer(completion)


@given(any_text | tag_soup, st.text(" \t\r\n", max_size=5), st.text(" \t\r\n", max_size=5), formats)
def test_surrounding_white_space_changes_nothing(text, before, after, prompt_format):
    completion = WRAP[prompt_format].format(text)
    if prompt_format == "lm_eval":  # there the answer ends with its line
        before = before.replace("\n", " ")
    inside = WRAP[prompt_format].format(before + text + after)
    answer = extract_answer(completion, prompt_format)
    assert extract_answer(before + completion + after, prompt_format) == answer
    # More than MAX_TEXT characters are not read, so only look at what stays well below.
    if len(text) < MAX_TEXT - 20:
        assert extract_answer(inside, prompt_format) == answer


# A complete answer followed by text that opens and closes nothing itself.
no_tags = st.text(st.characters(exclude_characters="<{}\\", exclude_categories=()), max_size=200)


@given(any_text, no_tags, formats)
def test_text_after_the_answer_never_makes_it_right(content, tail, prompt_format):
    completion = WRAP[prompt_format].format(content)
    if not is_correct(completion, "#### 18", prompt_format):
        assert not is_correct(completion + tail, "#### 18", prompt_format)


@given(any_text | tag_soup)
def test_not_even_tags_after_a_wrong_element_make_it_right(tail):
    assert not is_correct(WRAP["xml"].format(17) + tail, "#### 18", "xml")


@given(integers, st.text(" \n", min_size=1, max_size=5), integers)
def test_a_box_is_retracted_by_another_answer_and_by_no_other_text(n, space, other):
    box = f"So \\boxed{{{n}}}.{space}"
    for tail in (f"The answer is {other}.", f"Wait, it is {other}.", f"#### {other}"):
        assert is_correct(box + tail, f"#### {n}", "boxed") is (n == other), tail
    for tail in (f"Check: {n} + {other}.", f"It is not {other}, but {n}."):
        assert is_correct(box + tail, f"#### {n}", "boxed") or n == other, tail


@given(st.integers(-99, 99), st.integers(-99, 99), formats)
def test_a_second_answer_never_helps(first, second, prompt_format):
    hedge = WRAP[prompt_format].format(first) + WRAP["xml"][-20:].format(second)
    if prompt_format == "boxed":
        hedge = f"\\boxed{{{first}}} \\boxed{{{second}}}"
    if prompt_format == "lm_eval":
        hedge = f"#### {first}\n#### {second}"
    assert is_correct(hedge, f"#### {first}", prompt_format) is (first == second)


# --- speed --------------------------------------------------------------------------------------

UNITS = [
    *("<answer>", "</answer>", "<answer></answer>", "<answer>18</answer>", "<answer>\n", "<"),
    *("<think>", "</think>", "<think></think>", "<thinking ", "<thinking><think>", "</", "< "),
    *("\\boxed{", "\\boxed{1}", "\\boxed{{", "\\boxed", "{", "}", "{}", "\\{", "$", "\\"),
    *(" ", "\n", "1", "1,", "1,000,", "1 ", "1.", "18 "),
    *("-", "+", "e1", "9*2=", "(", "=", "*", "`"),
    *("answer is ", "answer is 20 ", "wait, no, ", "or ", "not ", "eighteen ", "one hundred "),
    *("\u200b", "\u202e", "\ud800", "\x00", "\uff11", "#### ", "**", "~~", "_"),
    *("1 is ", "no no ", "one - ", "not 18 ", "that is ", "the answer ", "so 20. ", "hm"),
    *("\\sqrt{", "\\text{", "\\,", "^{ ", "√", "one    ", "twenty, and ", "thousands ", "18 to "),
    *("a    ", "(1", " x ", "\\frac{1}{", "\\end ", "...", "- ", "18 dollars and "),
]
SHELLS = [
    *("{}", "<answer>{}</answer>", "<answer>18</answer>{}", "<answer>18</answer><answer>{}"),
    *("\\boxed{{{}}}", "\\boxed{{18}}{}", "\\boxed{{18}} wait, {}", "{}\\boxed{{18}}"),
]


def grade_all(completion):
    for prompt_format in PROMPT_FORMATS:
        judge(completion, "#### 18", prompt_format)
    lenient_is_correct(completion, "#### 18")
    is_integer_answer(completion)


def best_time(completion, repeats):
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        grade_all(completion)
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.parametrize("unit", UNITS, ids=ascii)
def test_time_is_linear_in_the_length(unit):
    for shell in SHELLS:
        small = shell.format(unit * (25_000 // len(unit)))
        large = shell.format(unit * (100_000 // len(unit)))
        # Quadratic work would take 16 times as long. Half a millisecond is timer noise.
        if best_time(large, 1) > 0.002:
            assert best_time(large, 3) < 8 * best_time(small, 3) + 0.0005


def test_many_different_spellings_are_not_all_read():
    elements = "".join(f"<answer>18.{'0' * zeros}</answer>" for zeros in range(300))
    assert best_time(elements, 3) < 10 * best_time("<answer>18.0</answer>" * 300, 3) + 0.0005


def test_verdicts_do_not_depend_on_the_thread():
    completions = [WRAP["xml"].format(n) for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        verdicts = list(pool.map(lambda text: is_correct(text, "#### 18", "xml"), completions))
    assert verdicts == [n == 18 for n in range(200)]
