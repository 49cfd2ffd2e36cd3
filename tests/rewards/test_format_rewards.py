"""The format of a completion: strict tags, trailing text, bare integers."""

import pytest

from rewards.format import (
    has_asked_format,
    has_strict_format,
    has_trailing_text,
    integer_answer,
    is_integer_answer,
    strict_format,
    trailing_text,
)

GOOD = "<thinking>\n9 * 2 = 18\n</thinking>\n<answer>\n18\n</answer>"


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (GOOD, "the template"),
        (GOOD.replace("9 * 2", "line one\nline two\n\n"), "several lines of reasoning"),
        ("<thinking>\n\n</thinking>\n<answer>\n\n</answer>", "empty, but every line is there"),
        (GOOD.replace("9 * 2", "<think> is another tag"), "another tag inside"),
        (GOOD.replace("9 * 2", "\ud800\x00"), "odd characters inside"),
    ],
)
def test_strict_format_accepts(text, note):
    assert has_strict_format(text), note


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("", "nothing"),
        ("18", "no tags"),
        (" " + GOOD, "a space before"),
        ("\n" + GOOD, "a newline before"),
        (GOOD + "\n", "a newline after"),
        (GOOD + " ", "a space after"),
        ("Sure!\n" + GOOD, "text before"),
        (GOOD + "\nDone.", "text after"),
        (GOOD + "\n" + GOOD, "twice"),
        (GOOD + "\n<answer>\n18\n</answer>", "a second answer block"),
        ("<thinking>\na\n</thinking>\n" + GOOD, "a second thinking block"),
        (GOOD.replace("9 * 2", "</thinking>\n<answer>\n18\n</answer>"), "blocks in the reasoning"),
        (GOOD.replace("9 * 2", "<answer>"), "an answer tag in the reasoning"),
        (GOOD.replace("9 * 2", "<thinking>"), "a thinking tag in the reasoning"),
        (GOOD.replace("18\n</", "</thinking>\n</"), "a thinking tag in the answer"),
        (GOOD.replace("\n</thinking>", "</thinking>"), "no newline before the close tag"),
        (GOOD.replace("<thinking>\n", "<thinking>"), "no newline after the open tag"),
        (GOOD.replace("</thinking>\n", "</thinking>"), "no newline between the blocks"),
        (GOOD.replace("</thinking>\n", "</thinking>\n\n"), "a blank line between the blocks"),
        (GOOD.replace("</thinking>\n", "</thinking>\nso\n"), "text between the blocks"),
        (GOOD.replace("<answer>\n", "<answer>"), "answer on one line"),
        (GOOD.replace("\n", "\r\n"), "Windows line ends"),
        (GOOD.replace("\n", " "), "spaces for newlines"),
        (GOOD.replace("thinking", "think"), "another tag"),
        (GOOD.replace("thinking", "Thinking"), "capitals"),
        (GOOD.replace("<answer>", "<answer >"), "white space in a tag"),
        (GOOD.removesuffix("</answer>"), "truncated"),
        (GOOD.removeprefix("<thinking>\n"), "no open tag"),
        ("<answer>\n18\n</answer>\n<thinking>\n9 * 2\n</thinking>", "in the wrong order"),
        ("<thinking>\n</thinking>\n<answer>\n\n</answer>", "one newline does for two"),
    ],
)
def test_strict_format_refuses(text, note):
    assert not has_strict_format(text), note
    assert strict_format([text]) == [-1.0]


@pytest.mark.parametrize(
    ("text", "trailing", "reward"),
    [
        (GOOD, False, 0.0),
        (GOOD + " \n\t\u3000", False, 0.0),
        (GOOD + "x", True, -0.5),
        (GOOD + "\x00", True, -0.5),
        ("<answer>18</answer> text <answer>18</answer>", False, 0.0),
        ("</answer>", False, 0.0),
        ("<answer>18", False, -0.5),
        ("<answer>18</ANSWER>", False, -0.5),
        ("", False, -0.5),
    ],
)
def test_trailing_text(text, trailing, reward):
    assert has_trailing_text(text) is trailing
    assert trailing_text([text]) == [reward]


INTEGERS = [
    "18", "\n18\n", "+18", "-18", "018", "0", "1,200", "-1,234,567", "9" * 5_000,
]  # fmt: skip
NOT_INTEGERS = [
    "", "-", "18.", "18.0", "$18", "18 dollars", "18%", "12,00", "1,2", ",200", "1 200", "- 18",
    "--18", "1e3", "1_8", "0x12", "eighteen", "**18**", "\u0661\u0668", "\uff11\uff18", "\u221218",
    "1\u200b8", "18 18", "<answer>18",
]  # fmt: skip


@pytest.mark.parametrize("content", [*INTEGERS, *NOT_INTEGERS], ids=lambda text: ascii(text)[1:41])
def test_integer_answer(content):
    text = f"<thinking>\nso\n</thinking>\n<answer>{content}</answer>"
    integer = content in INTEGERS
    assert is_integer_answer(text) is integer
    assert integer_answer([text]) == [1.0 if integer else -1.0]


@pytest.mark.parametrize(
    ("text", "integer"),
    [
        ("18", False),
        ("<answer>18", False),
        ("<answer>18</answer><answer>18</answer>", False),
        ("<answer>18</answer><answer>19</answer>", False),
        ("<thinking><answer>18</answer></thinking>", False),
        ("<thinking>never closes <answer>18</answer>", False),
        ("<Answer>18</Answer>", False),
        ("<thinking><answer>x</answer></thinking><answer>18</answer>", True),
    ],
)
def test_integer_needs_a_single_element_outside_the_reasoning(text, integer):
    assert is_integer_answer(text) is integer


@pytest.mark.parametrize(
    ("prompt_format", "text", "expected"),
    [
        ("xml", "<thinking>\n9\n</thinking>\n<answer>\n18\n</answer>", True),
        ("xml", "9 </think> <answer> 18 </answer>", False),
        ("r1_zero", " 9 * 2 = 18 </think> <answer> 18 </answer>", True),
        ("r1_zero", " 9 </think> so <answer> 18 </answer>", False),
        ("r1_zero", " 9 </think> <answer> 18 </answer> Done", False),
        ("r1_zero", " 9 </think> <answer> 18", False),
        ("r1_zero", " 9 </think> <answer>17</answer> <answer>18</answer>", False),
        ("r1_zero", "<answer> 18 </answer>", False),
        ("r1_zero", "<think> 9 </think> <answer> 18 </answer>", False),
        ("boxed", r"9 * 2 = \boxed{18}.", True),
        ("boxed", r"\boxed{9} times 2 is \boxed{18}.", True),
        ("boxed", r"\boxed{17}, \boxed{18}", False),
        ("boxed", "18", False),
    ],
)
def test_asked_format(prompt_format, text, expected):
    assert has_asked_format(text, prompt_format) is expected
