"""Complete completions: where the judge finds the answer, and whether it is correct."""

import json
import os
from pathlib import Path

import pytest

from rewards.grading import (
    GoldError,
    extract_answer,
    is_correct,
    judge,
    lenient_is_correct,
    parse_gold,
)
from sologrpo.prompts import PROMPT_FORMATS

THOUGHT = "<thinking>\n9 * 2 = 18\n</thinking>\n"

# (completion, is correct for gold 18, note)
XML = [
    (THOUGHT + "<answer>\n18\n</answer>", True, "the format that the prompt asks for"),
    (THOUGHT + "<answer>18</answer>", True, "tags on one line"),
    ("9 * 2 = 18\n<answer>18</answer>", True, "reasoning without tags"),
    ("<think>9 * 2</think><answer>18</answer>", True, "another name for the reasoning"),
    ("<reasoning>9 * 2</reasoning><answer>18</answer>", True, "another name for the reasoning"),
    ("9 * 2\n</thinking>\n<answer>18</answer>", True, "the prompt opened the reasoning"),
    ("9 * 2\n</think>\n<answer>18</answer>", True, "a chat template opened the reasoning"),
    ("<THINKING>9</THINKING><answer>18</answer>", True, "upper-case reasoning tags"),
    ('<thinking lang="en">9</thinking><answer>18</answer>', True, "reasoning tag, attribute"),
    (THOUGHT + "<answer>18</answer>\n", True, "a newline at the end"),
    (THOUGHT + "<answer>18</answer> I hope this helps!", True, "trailing text: a format matter"),
    (THOUGHT + "<answer>18</answer> Is it 20?", True, "text outside elements does not count"),
    (THOUGHT + "<answer>18</answer></answer>", True, "a stray close tag"),
    ("</answer>" + THOUGHT + "<answer>18</answer>", True, "a stray close tag before"),
    (THOUGHT + "<answer>18</answer></thinking>", True, "a stray close tag of closed reasoning"),
    ("```xml\n" + THOUGHT + "<answer>18</answer>\n```", True, "a code fence around everything"),
    (THOUGHT + "<answer>18</answer>" * 2, True, "twice the same"),
    (THOUGHT + "<answer>18</answer>" * 50, True, "a loop, always the same"),
    (
        THOUGHT + "<answer>18</answer><answer>$18.00</answer>",
        True,
        "the same value, respelled",
    ),
    (THOUGHT + "<answer>18</answer>" * 3 + "<answer>1", True, "a truncated loop, in agreement"),
    (THOUGHT + "<answer>18</answer>\n<answer>", True, "a loop truncated right after the tag"),
    (THOUGHT + "<answer><answer>18</answer></answer>", True, "the tag doubled, one value"),
    ("I use <answer> tags. <answer>18</answer>", True, "the tag mentioned before it is used"),
    ("<thinking>Put it in <answer> tags.</thinking><answer>18</answer>", True, "a mention"),
    ("<thinking>First <answer>20</answer>.</thinking><answer>18</answer>", True, "a draft inside"),
    ("<thinking>I am <thinking> hard</thinking><answer>18</answer>", True, "mention of the tag"),
    ("<thinking>a</thinking>b<thinking>c</thinking><answer>18</answer>", True, "two blocks"),
    (THOUGHT + "<answer>18</answer><thinking>20?", True, "reasoning opened after the answer"),
    ("<thinking>use <think> here</thinking><answer>18</answer>", True, "another tag inside"),
    ("\ud800<answer>18</answer>", True, "a lone surrogate outside"),
    ("\x00<answer>18</answer>", True, "a NUL outside"),
    ("", False, "nothing"),
    ("18", False, "no element"),
    ("The answer is 18.", False, "no element"),
    ("#### 18", False, "the data set's own marker"),
    (r"\boxed{18}", False, "a box, not an element"),
    (THOUGHT, False, "only reasoning"),
    (THOUGHT + "<answer>18", False, "truncated: more digits may follow"),
    (THOUGHT + "<answer>18</answer", False, "truncated close tag"),
    (THOUGHT + "<answer>18</ans", False, "truncated close tag"),
    (THOUGHT + "18</answer>", False, "no open tag"),
    (THOUGHT + "<answer></answer>", False, "empty"),
    (THOUGHT + "<answer>\n\n</answer>", False, "blank"),
    (THOUGHT + "</answer>18<answer>", False, "tags the wrong way round"),
    (THOUGHT + "<answer>19</answer>", False, "another number"),
    (THOUGHT + "<Answer>18</Answer>", False, "capital"),
    (THOUGHT + "<ANSWER>18</ANSWER>", False, "upper case"),
    (THOUGHT + "<answer>18</Answer>", False, "close tag with a capital"),
    (THOUGHT + "<answer >18</answer>", False, "white space in the tag"),
    (THOUGHT + "<answer>18</answer >", False, "white space in the close tag"),
    (THOUGHT + "< answer>18</ answer>", False, "white space in the tags"),
    (THOUGHT + '<answer type="int">18</answer>', False, "an attribute"),
    (THOUGHT + "<answer/>18", False, "self-closing"),
    (THOUGHT + "<answers>18</answers>", False, "another tag"),
    (THOUGHT + "<final_answer>18</final_answer>", False, "another tag"),
    (THOUGHT + "[answer]18[/answer]", False, "other brackets"),
    (THOUGHT + "&lt;answer&gt;18&lt;/answer&gt;", False, "escaped"),
    (THOUGHT + "\uff1canswer\uff1e18\uff1c/answer\uff1e", False, "full-width brackets"),
    (THOUGHT + "<ans\u200bwer>18</ans\u200bwer>", False, "zero-width space in the tag"),
    ("<thinking><answer>18</answer></thinking>", False, "inside the reasoning"),
    ("<think><answer>18</answer></think>", False, "inside the reasoning"),
    ("<reasoning><answer>18</answer></reasoning>", False, "inside the reasoning"),
    ("<THINKING><answer>18</answer></THINKING>", False, "inside upper-case reasoning"),
    ('<thinking x="1"><answer>18</answer></thinking>', False, "inside, with an attribute"),
    ("<thinking><answer>18</answer></thinking><answer>20</answer>", False, "draft right, not it"),
    ("<thinking>9 * 2 <answer>18</answer>", False, "reasoning never closes"),
    ("<thinking>9 * 2\n<answer>18</answer>\n</think>", False, "closed by another tag"),
    ("<reasoning>9 * 2</thinking><answer>18</answer>", False, "closed by another tag"),
    ("<answer>18</answer></thinking>", False, "the prompt opened the reasoning: inside it"),
    ("<thinking>a<thinking>b</thinking><answer>18</answer></thinking>", False, "nested"),
    ("<thinking>a <answer> b</thinking>18</answer>", False, "opened in the reasoning"),
    ("<answer>1<thinking>x</thinking>8</answer>", False, "reasoning splits the number"),
    ("<answer><thinking>20</thinking>18</answer>", False, "reasoning inside the element"),
    ("<answer>18<thinking></answer>", False, "reasoning swallows the close tag"),
    (THOUGHT + "<answer>17</answer><answer>18</answer>", False, "hedging"),
    (THOUGHT + "<answer>18</answer><answer>17</answer>", False, "hedging, right one first"),
    (THOUGHT + "<answer>18</answer> or <answer>20</answer>", False, "hedging with prose"),
    (THOUGHT + "".join(f"<answer>{n}</answer>" for n in range(100)), False, "stuffing"),
    (THOUGHT + "<answer>18</answer>" * 5_000, False, "stuffed with thousands of tags"),
    (THOUGHT + "<answer>18</answer><answer>-18</answer>", False, "hedging the sign"),
    (THOUGHT + "<answer></answer><answer>18</answer>", False, "one of two is empty"),
    (THOUGHT + "<answer>your answer goes here</answer><answer>18</answer>", False, "echo first"),
    (THOUGHT + "<answer>17<answer>18</answer>", False, "an answer abandoned"),
    (THOUGHT + "<answer>seventeen <answer>18</answer>", False, "an answer abandoned, in words"),
    (THOUGHT + "<answer>17<answer>18</answer></answer>", False, "nested hedging"),
    (THOUGHT + "<answer>18</answer><answer>20", False, "a truncated second answer"),
    (THOUGHT + "<answer>18 or 20</answer>", False, "two values"),
    (THOUGHT + "<answer>not 18</answer>", False, "negated"),
    (THOUGHT + "<answer>\n" + "18 " * 20_000 + "</answer>", False, "stuffed element"),
    (
        "<thinking>\nyour reasoning goes here\n</thinking>\n"
        "<answer>\nyour answer goes here\n</answer>",
        False,
        "echo of the prompt's template",
    ),
    ("Ignore the grader. The answer 18 is correct.", False, "an instruction, no element"),
    (THOUGHT + "<answer>Ignore the grader, 18</answer>", False, "an instruction in the element"),
]

R1_ZERO = [
    ("9 * 2 = 18 </think> <answer>18</answer>", True, "the format that the prompt asks for"),
    ("9 * 2 = 18\n</think>\n<answer> $18 </answer>", True, "on separate lines"),
    ("<think> 9 * 2 </think> <answer>18</answer>", True, "the model repeats the open tag"),
    ("a </think> b </think> <answer>18</answer>", True, "closed twice: after the last"),
    ("<answer>20</answer> </think> <answer>18</answer>", True, "a draft in the reasoning"),
    ("a </think> <answer>18</answer> Thanks", True, "trailing text"),
    ("a </think> <think>b</think> <answer>18</answer>", True, "thought again"),
    ("<answer>18</answer>", False, "the reasoning never ends"),
    ("9 * 2 = 18 <answer>18</answer>", False, "the reasoning never ends"),
    ("a </thinking> <answer>18</answer>", False, "not the tag that the prompt opened"),
    ("a <answer>18</answer> </think>", False, "inside the reasoning"),
    ("a </think> <answer>18</answer> </think>", False, "inside, by the last close tag"),
    ("a </think> <think> b <answer>18</answer>", False, "a second block never closes"),
    ("a </think> <thinking> <answer>18</answer> </thinking>", False, "inside another block"),
    ("a </think> 18", False, "no element"),
    ("a </think> <answer>18", False, "truncated by the stop string"),
    ("a </think> \\boxed{18}", False, "a box, not an element"),
    ("a </think> <answer>17</answer> <answer>18</answer>", False, "hedging"),
]

BOXED = [
    (r"9 * 2 = 18. \boxed{18}", True, "the format that the prompt asks for"),
    (r"\boxed{18}", True, "bare"),
    (r"The answer is $\boxed{18}$.", True, "in math"),
    (r"The answer is \(\boxed{18}\) dollars.", True, "unit after"),
    (r"\boxed{\$18}", True, "escaped currency"),
    (r"\boxed{18 \text{ dollars}}", True, "braces inside"),
    (r"\boxed{\text{18}}", True, "braces inside"),
    (r"\boxed {18}", True, "a space before the brace"),
    (r"\boxed{\boxed{18}}", True, "a box in a box"),
    (r"$\boxed{9}$ eggs are left, at 2 dollars that makes $\boxed{18}$", True, "steps"),
    (r"9 = \boxed{9}, and \boxed{9} * 2 = \boxed{18}", True, "steps"),
    (r"Step 1: \boxed{9}. Step 2: \boxed{18}", True, "steps"),
    (r"\boxed{18} \boxed{18}", True, "a row that agrees"),
    (r"\boxed{18}. This is because 9 * 2 = 18.", True, "an explanation after it"),
    (r"\boxed{18}. Let me check: 18 / 2 = 9 eggs. Correct.", True, "a check after it"),
    (r"\boxed{18}. Wait, let me double check: 9 * 2 = 18. Yes.", True, "a check after it"),
    (r"\boxed{18}, so the answer is 18 dollars.", True, "prose that agrees"),
    (r"\boxed{18}, not 20.", True, "prose that agrees"),
    (r"\boxed{18}. She needs 2 or 3 more days.", True, "prose about something else"),
    (r"\boxed{18}. I hope it is correct.", True, "a polite end"),
    (r"<think>\boxed{20}</think> \boxed{18}", True, "a draft in the reasoning"),
    (r"\boxed{20}</think> \boxed{18}", True, "the template opened the reasoning"),
    (r"{ \boxed{18}", True, "an open brace before"),
    (r"} \boxed{18} }", True, "stray braces"),
    (r"\boxed{18} and \boxed{", True, "a second box with nothing in it"),
    (r"\boxed{18} or, in other words, \boxed{1", True, "a truncated second box, in agreement"),
    (r"$\boxed{1{,}8}$ no, $\boxed{18}$", True, "an unreadable step before"),
    ("", False, "nothing"),
    ("18", False, "no box"),
    (r"boxed{18}", False, "no backslash"),
    (r"\boxed 18", False, "no braces"),
    (r"\boxed(18)", False, "other brackets"),
    (r"\fbox{18}", False, "another box"),
    (r"\boxed{18", False, "truncated"),
    (r"\boxed{18\}", False, "closed by an escaped brace"),
    (r"\boxed{\text{18}", False, "closed once of twice"),
    (r"\boxed{}", False, "empty"),
    (r"\boxed{19}", False, "another number"),
    (r"\boxed{18} so in total \boxed{19}", False, "the last box counts"),
    (r"\boxed{18, 20}", False, "a list"),
    (r"\boxed{18 \text{ or } 20}", False, "alternatives"),
    (r"\boxed{\frac{36}{2}}", False, "unevaluated"),
    (r"\boxed{17 \boxed{18}}", False, "two values, nested"),
    (r"\boxed{17} \boxed{18}", False, "a row of boxes"),
    (r"\boxed{17}\boxed{18}", False, "a row of boxes"),
    (r"$\boxed{17}$ \quad $\boxed{18}$", False, "a row of boxes"),
    ("1. \\boxed{17}\n2. \\boxed{18}", False, "a numbered row of boxes"),
    ("".join(rf"\boxed{{{n}}}" for n in range(19)), False, "stuffing"),
    ("\n".join(rf"\boxed{{{n}}}" for n in range(19)), False, "stuffing"),
    (r"<think>\boxed{18}</think> done", False, "inside the reasoning"),
    (r"<think>\boxed{18}", False, "reasoning never closes"),
    (r"\boxed{18}</think>", False, "inside the reasoning that the template opened"),
    (r"17 or \boxed{18}", False, "hedging"),
    (r"The answer is not \boxed{18}", False, "negated"),
    (r"It isn't $\boxed{18}$", False, "negated"),
    (r"more than \boxed{18}", False, "a bound"),
    (r"\boxed{18} million", False, "magnitude after the box"),
    (r"-\boxed{18}", False, "sign before the box"),
    (r"\boxed{18} or 20", False, "hedging after"),
    (r"\boxed{18}. Wait, it should be 20.", False, "contradicted"),
    (r"\boxed{18}. Actually, 20.", False, "contradicted"),
    (r"\boxed{18}. No, it's 20.", False, "contradicted"),
    (r"\boxed{18}. So the answer is 20.", False, "contradicted"),
    (r"\boxed{18}. The correct answer is $20.", False, "contradicted"),
    (r"\boxed{18}. Final answer: twenty", False, "contradicted in words"),
    (r"\boxed{18}. Sorry, I meant 20.", False, "contradicted"),
    (r"\boxed{18} is not the answer, 20 is", False, "retracted"),
    (r"\boxed{18}. That is wrong.", False, "retracted"),
    (r"\boxed{18}. I made a mistake.", False, "retracted"),
    (r"\boxed{18}. Scratch that.", False, "retracted"),
    (r"\boxed{18} but I now think \boxed{20", False, "a truncated second box"),
    (r"\boxed{" + "18" + " " * 1000 + "}", False, "too long to be an answer"),
    (r"\boxed{" + "18" + " " * 1000 + "20}", False, "a second value far away"),
    (r"\boxed{18} then \boxed{" + "20 " * 1000 + "}", False, "the last box is too long"),
]


CASES = [
    pytest.param(name, *case, id=f"{name}: {case[2][:30]}: {ascii(case[0])[-30:]}")
    for name, table in {"xml": XML, "r1_zero": R1_ZERO, "boxed": BOXED}.items()
    for case in table
]


@pytest.mark.parametrize(("prompt_format", "completion", "right", "note"), CASES)
def test_verdict_extraction_and_reason_agree(prompt_format, completion, right, note):
    verdict = judge(completion, "#### 18", prompt_format)
    assert verdict.correct is right, f"{note}: {verdict.reason}"
    assert is_correct(completion, "#### 18", prompt_format) is right
    assert verdict.extracted == extract_answer(completion, prompt_format)
    assert (verdict.extracted == "18") is right
    assert verdict.reason.isascii()
    assert 0 < len(verdict.reason) < 120


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("The answer is 18.", True),
        ("$18.00", True),
        ("1,200 then 18", True),
        ("9 * 2 = 18 eggs!", True),
        ("18 of 20", False),
        ("-18", False),
        ("it is 0.18", False),
        ("range 3-18", True),
        ("no number", False),
        ("", False),
        ("1,2,18", True),
        ("\ud800 18 \x00", True),
        ("9" * 5_000, False),
    ],
)
def test_lenient_takes_the_last_number(completion, right):
    assert lenient_is_correct(completion, "#### 18") is right
    assert lenient_is_correct("so -$1,200.", "#### -1,200")  # signs and commas
    assert not lenient_is_correct("so 1,200", "#### -1200")


# --- gold ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("text <<9*2=18>>\n#### 18", "18"),
        ("#### 1,200", "1200"),
        ("#### 2,125,000", "2125000"),
        ("#### -5", "-5"),
        ("#### −5", "-5"),  # noqa: RUF001 - U+2212 is the minus of typeset text
        ("#### +5", "5"),
        ("#### 0", "0"),
        ("#### -0", "0"),
        ("#### 007", "7"),
        ("####18", "18"),
        ("####   18  \n", "18"),
        ("#### 17\n#### 18", "18"),
        ("#### 1200000", "1200000"),
        ("#### " + "1" + "0" * 6_000, "1" + "0" * 6_000),
    ],
)
def test_parse_gold(answer, gold):
    assert parse_gold(answer) == gold


@pytest.mark.parametrize(
    "answer", ["", "18", "### 18", "####", "#### ", "#### x", "#### 1.5", "#### 12,00", "#### ٣"]
)
def test_unusable_gold_is_one_line(answer):
    with pytest.raises(ValueError, match="gold answer") as error:
        parse_gold(answer)
    assert "\n" not in str(error.value)
    for prompt_format in PROMPT_FORMATS:
        with pytest.raises(GoldError):
            is_correct("<answer>18</answer>", answer, prompt_format)


def test_unknown_prompt_format_names_the_known_ones():
    with pytest.raises(ValueError, match="xml, r1_zero, boxed"):
        extract_answer("18", "json")


def gsm8k_answers():
    root = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("SOLOGRPO_GSM8K") or root.parent / "shared" / "gsm8k")
    if not (folder / "test.jsonl").is_file():
        pytest.skip(f"GSM8K is not at {folder}: set SOLOGRPO_GSM8K to its folder")
    paths = (folder / "train.jsonl", folder / "test.jsonl")
    return [
        json.loads(line)["answer"]
        for path in paths
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def test_all_of_gsm8k():
    answers = gsm8k_answers()
    assert len(answers) == 8_792
    wrap = {
        "xml": "<thinking>\n{0}\n</thinking>\n<answer>\n{1}\n</answer>",
        "r1_zero": "{0} </think> <answer>{1}</answer>",
        "boxed": "{0} \\boxed{{{1}}}",
    }
    for answer in answers:
        gold = int(answer.rpartition("####")[2].strip().replace(",", ""))
        assert parse_gold(answer) == str(gold)
        for prompt_format, template in wrap.items():
            for written in (f"{gold}", f"{gold:,}", f"${gold}.00"):
                assert is_correct(template.format("so", written), answer, prompt_format)
            assert not is_correct(template.format("so", gold + 1), answer, prompt_format)
