"""The shape of a completion: strict tags, trailing text, bare integers."""

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
        (GOOD.replace("9 * 2", "  spaces  "), "spaces inside"),
        (GOOD.replace("18\n</answer>", "no number\n</answer>"), "the content is not judged"),
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
        (GOOD.replace("\n</answer>", "</answer>"), "answer on one line"),
        (GOOD.replace("\n", "\r\n"), "Windows line ends"),
        (GOOD.replace("\n", " "), "spaces for newlines"),
        (GOOD.replace("thinking", "think"), "another tag"),
        (GOOD.replace("thinking", "Thinking"), "capitals"),
        (GOOD.replace("answer", "ANSWER"), "capitals"),
        (GOOD.replace("<answer>", "<answer >"), "white space in a tag"),
        (GOOD.removesuffix("</answer>"), "cut off"),
        (GOOD.removesuffix(">"), "cut off"),
        (GOOD.removeprefix("<thinking>\n"), "no open tag"),
        ("<answer>\n18\n</answer>\n<thinking>\n9 * 2\n</thinking>", "the wrong way round"),
        ("<thinking>\n</thinking>\n<answer>\n\n</answer>", "one newline does for two"),
        ("<thinking>\n\n</thinking>\n<answer>\n</answer>", "one newline does for two"),
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
        (GOOD + "\n\n.", True, -0.5),
        (GOOD + "<answer>", True, -0.5),
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


@pytest.mark.parametrize(
    ("content", "integer"),
    [
        ("18", True),
        ("\n18\n", True),
        ("+18", True),
        ("-18", True),
        ("018", True),
        ("0", True),
        ("1,200", True),
        ("-1,234,567", True),
        ("9" * 5_000, True),
        ("", False),
        ("-", False),
        ("18.", False),
        ("18.0", False),
        ("$18", False),
        ("18 dollars", False),
        ("18%", False),
        ("12,00", False),
        ("1,2", False),
        (",200", False),
        ("1 200", False),
        ("- 18", False),
        ("--18", False),
        ("1e3", False),
        ("1_8", False),
        ("0x12", False),
        ("eighteen", False),
        ("**18**", False),
        ("\u0661\u0668", False),
        ("\uff11\uff18", False),
        ("\u221218", False),
        ("1\u200b8", False),
        ("18 18", False),
        ("<answer>18", False),
    ],
)
def test_integer_answer(content, integer):
    text = f"<thinking>\nso\n</thinking>\n<answer>{content}</answer>"
    assert is_integer_answer(text) is integer
    assert integer_answer([text]) == [1.0 if integer else -1.0]


@pytest.mark.parametrize(
    "text",
    [
        "18",
        "<answer>18",
        "<answer>18</answer><answer>18</answer>",
        "<answer>18</answer><answer>19</answer>",
        "<thinking><answer>18</answer></thinking>",
        "<thinking>never closes <answer>18</answer>",
        "<Answer>18</Answer>",
    ],
)
def test_integer_needs_a_single_element_outside_the_reasoning(text):
    assert not is_integer_answer(text)


def test_integer_in_the_reasoning_is_not_looked_at():
    assert is_integer_answer("<thinking><answer>x</answer></thinking><answer>18</answer>")


@pytest.mark.parametrize(
    ("prompt_format", "text", "expected"),
    [
        ("xml", "<thinking>\n9\n</thinking>\n<answer>\n18\n</answer>", True),
        ("xml", "9 </think> <answer> 18 </answer>", False),
        ("r1_zero", " 9 * 2 = 18 </think> <answer> 18 </answer>", True),
        ("r1_zero", " 9 * 2 = 18 </think>\n<answer>18</answer>\n", True),
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
        ("boxed", "", False),
    ],
)
def test_asked_format(prompt_format, text, expected):
    assert has_asked_format(text, prompt_format) is expected
