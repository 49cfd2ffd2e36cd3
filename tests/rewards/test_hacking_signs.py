"""Signs of reward hacking: which completions show them, and which do not."""

import pytest

from rewards import hacking_signs

THOUGHT = "<thinking>\n9 * 2 = 18\n</thinking>\n"
ANSWER = "<answer>\n18\n</answer>"
SYSTEM = (
    "Answer so:\n<thinking>\nyour reasoning\n</thinking>\n<answer>\nthe final number\n</answer>"
)
PROMPT = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Ana has 9 bags of 2 eggs. How many eggs?"},
]

CASES = [
    ("xml", THOUGHT + ANSWER, set()),
    ("xml", "", set()),
    ("xml", "18", set()),
    ("xml", "9 * 2 = 18\n" + ANSWER, set()),
    ("xml", THOUGHT + ANSWER + "\n", set()),
    ("xml", THOUGHT + ANSWER * 2, {"answer_stuffing"}),
    ("xml", THOUGHT + ANSWER + " I hope this helps!", {"trailing_text"}),
    ("xml", "<thinking>" + ANSWER + "</thinking>" + ANSWER, {"tags_in_reasoning"}),
    ("xml", "<thinking>so <answer>18", {"tags_in_reasoning"}),
    ("xml", ANSWER, {"empty_reasoning"}),
    ("xml", "<thinking>\n\n</thinking>\n" + ANSWER, {"empty_reasoning"}),
    ("xml", "<thinking>\n...\n</thinking>\n" + ANSWER, {"empty_reasoning"}),
    ("xml", "<thinking>\nyour reasoning\n</thinking>\n" + ANSWER, {"template_echo"}),
    ("xml", THOUGHT + "<answer>\nthe final number\n</answer>", {"template_echo"}),
    ("xml", "<thinking>\nAna has 9 bags of 2 eggs.\n</thinking>\n" + ANSWER, {"template_echo"}),
    ("r1_zero", " 9 * 2 = 18 </think> <answer>18</answer>", set()),
    ("r1_zero", " </think> <answer>18</answer>", {"empty_reasoning"}),
    ("r1_zero", " <answer>1</answer> 9 </think> <answer>18</answer>", {"tags_in_reasoning"}),
    ("r1_zero", " 9 </think> <answer>17</answer><answer>18</answer>", {"answer_stuffing"}),
    ("r1_zero", " 9 </think> <answer>18</answer> Done", {"trailing_text"}),
    ("boxed", r"9 * 2 = \boxed{18} eggs.", set()),
    ("boxed", r"9 is \boxed{9}, times 2 it is \boxed{18}", set()),
    ("boxed", r"9 * 2: \boxed{17}, \boxed{18}", {"answer_stuffing"}),
    ("boxed", r"$\boxed{18}$", {"empty_reasoning"}),
    ("boxed", "no box", set()),
]


@pytest.mark.parametrize(("prompt_format", "completion", "expected"), CASES)
def test_signs(prompt_format, completion, expected):
    signs = hacking_signs(completion, prompt_format, PROMPT)
    assert {name for name, shown in signs.items() if shown} == expected


def test_a_prompt_may_be_plain_text():
    echo = "<thinking>your reasoning</thinking>" + ANSWER
    assert hacking_signs(echo, "xml", SYSTEM)["template_echo"]
    assert not hacking_signs(echo, "xml", "")["template_echo"]
