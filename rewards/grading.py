"""The judge: is the answer in a completion the gold answer? Everything that scores asks here.

Where the answer is
    ``xml`` and ``r1_zero``: complete, exactly spelled ``<answer>…</answer>`` elements outside the
    reasoning; if there are several they must agree. ``boxed``: the last complete ``\\boxed{…}``
    outside the reasoning, unless it ends a row of different boxes or later prose contradicts it.
    Reasoning is ``<thinking>``, ``<think>`` or ``<reasoning>`` up to its close tag; one that never
    closes swallows the rest. The prompt of ``r1_zero`` ends in ``<think>``, so there everything up
    to the last ``</think>`` is reasoning.
What the answer is
    Exactly one value, compared exactly; `rewards.values` has the rules.

Every verdict takes time linear in the completion and raises for no text: tags are found by
`str.find` or by patterns that cannot backtrack, and what is inside an answer is only read when it
is short.

Math-Verify, which TRL's `accuracy_reward` uses, is not the judge here. It looks for LaTeX or
``\\boxed`` anchors, so it passes over plain text inside tags; it accepts what is mathematically
equivalent, which lets unevaluated sums and several candidates pass; and its time-outs rest on
`signal.alarm`, which works only on the main thread.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from rewards.values import Number, holds_number, read_integer, read_value

PROMPT_FORMATS = ("xml", "r1_zero", "boxed")
OPEN, CLOSE, BOX = "<answer>", "</answer>", "\\boxed"
# No honest completion has as many tags; the limits keep hostile ones linear and fast.
MAX_TAGS = 400
MAX_DISTINCT_ANSWERS = 8
MAX_BOXES = 32
MAX_BOX_CHARS = 400


class GoldError(ValueError):
    """The gold answer cannot be judged against: it has no ``####``, or no integer after it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a completion is right, the value it gives, and one plain sentence saying why."""

    correct: bool
    extracted: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class _Answer:
    number: Number | None
    reason: str = ""


# --- gold ---------------------------------------------------------------------------------------


def parse_gold(answer: str) -> str:
    """The gold integer of a GSM8K answer: what follows the last ``####``, in canonical digits.

    >>> parse_gold("9 * 2 = <<9*2=18>>18\\n#### 1,018")
    '1018'
    """
    number = _gold_number(answer)
    return ("-" if number.negative else "") + number.digits + "0" * number.exponent


def _gold_number(answer: str) -> Number:
    _, mark, text = answer.rpartition("####")
    if not mark:
        raise GoldError("gold answer has no '####'")
    number = read_integer(text.strip())
    if number is None:
        raise GoldError(f"gold answer is no integer: {text.strip()[:40]!a}")
    return number


# --- verdicts -----------------------------------------------------------------------------------


def judge(completion: str, gold: str, prompt_format: str = "xml") -> Verdict:
    """Judge a completion against a raw GSM8K answer, with the value found and the reason.

    >>> judge("<thinking>9 * 2</thinking><answer>$18</answer>", "#### 18", "xml")
    Verdict(correct=True, extracted='18', reason='18 is the gold answer')
    >>> judge("<thinking><answer>18</answer></thinking>", "#### 18", "xml").reason
    'no complete <answer> element outside the reasoning'
    """
    wanted = _gold_number(gold)
    answer = _find_answer(completion, prompt_format)
    if answer.number is None:
        return Verdict(False, None, answer.reason)
    extracted = str(answer.number)
    if answer.number == wanted:
        return Verdict(True, extracted, f"{_short(wanted)} is the gold answer")
    reason = f"{_short(answer.number)} is not the gold answer {_short(wanted)}"
    return Verdict(False, extracted, reason)


def is_correct(completion: str, gold: str, prompt_format: str = "xml") -> bool:
    r"""Whether the completion's answer equals the gold answer; ValueError if there is no gold.

    >>> is_correct("<answer>eighteen</answer>", "#### 18", "xml")
    True
    >>> is_correct(r"9 * 2 = \boxed{18}", "#### 18", "boxed")
    True
    """
    wanted = _gold_number(gold)
    return _find_answer(completion, prompt_format).number == wanted


def extract_answer(completion: str, prompt_format: str = "xml") -> str | None:
    """The value that the completion answers, in canonical digits; None if it gives no single one.

    >>> extract_answer("<answer>$1,200.00 a year</answer>", "xml")
    '1200'
    >>> extract_answer("<answer>18 or 20</answer>", "xml") is None
    True
    """
    number = _find_answer(completion, prompt_format).number
    return None if number is None else str(number)


def lenient_is_correct(completion: str, gold: str) -> bool:
    """Whether the last number anywhere in the completion is the gold answer.

    For reporting beside the strict verdict, to tell wrong arithmetic from wrong format. Never for
    training: a model learns to end on a number and nothing else from it.

    >>> lenient_is_correct("So she makes 9 * 2 = $18.00.", "#### 18")
    True
    """
    wanted = _gold_number(gold)
    end = 1 + max(completion.rfind(digit) for digit in "0123456789")
    head = completion[:end].rstrip("0123456789.,")
    last = completion[len(head) : end].lstrip(".,")
    sign = "-" if re.search(r"(?<![\w)])[-\u2212][$€£]?$", head[-3:]) else ""
    number = read_value(sign + last).number or read_value(last.rpartition(",")[2]).number
    return number == wanted


def _short(number: Number) -> str:
    text = str(number)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"


def _find_answer(completion: str, prompt_format: str) -> _Answer:
    if prompt_format not in _FINDERS:
        known = ", ".join(PROMPT_FORMATS)
        raise ValueError(f"unknown prompt_format {prompt_format!r}: use one of {known}")
    return _FINDERS[prompt_format](visible_text(completion, prompt_format))


# --- reasoning ----------------------------------------------------------------------------------

# Unlike the answer's own tags these are recognised in any case and with attributes: spelling the
# tag of the reasoning wrongly must not bring what is inside it into view.
# The look-ahead changes nothing but halves the time on a text full of "<".
_REASONING_TAG = re.compile(
    r"<(?=/?[tr])(/?)(think(?:ing)?|reasoning)(?:\s[^<>]*)?>", re.IGNORECASE
)
# Stands where reasoning was cut out, so that no answer can reach across the gap.
_GAP = "<reasoning>"


def visible_text(completion: str, prompt_format: str) -> str:
    """The completion without its reasoning: what may count as an answer.

    >>> visible_text("<think>9 * 2</think> It is 18.", "boxed")
    '<reasoning> It is 18.'
    """
    tags = list(islice(_REASONING_TAG.finditer(completion), MAX_TAGS + 1))
    if len(tags) > MAX_TAGS:
        return ""
    position, pieces = 0, []
    if prompt_format == "r1_zero":
        position, tags = _after_prompted_reasoning(tags)
        if not position:
            return ""
    for start, end in _reasoning_spans(tags, len(completion)):
        pieces.append(completion[position:start])
        position = end
    return _GAP.join([*pieces, completion[position:]])


def _after_prompted_reasoning(tags: list[re.Match[str]]) -> tuple[int, list[re.Match[str]]]:
    """Where the text after the last ``</think>`` starts (0 if there is none), and its tags."""
    for index in range(len(tags) - 1, -1, -1):
        if tags[index][1] and tags[index][2].lower() == "think":
            return tags[index].end(), tags[index + 1 :]
    return 0, []


def _reasoning_spans(tags: list[re.Match[str]], length: int) -> list[tuple[int, int]]:
    """The stretches of reasoning, in order and apart from each other."""
    partners = _partners(tags)
    spans: list[tuple[int, int]] = []
    seen_open = False
    for index, tag in enumerate(tags):
        if spans and tag.start() < spans[-1][1]:
            continue
        if not tag[1]:
            seen_open = True
            close = partners[index]
            spans.append((tag.start(), length if close is None else tags[close].end()))
        elif not seen_open:
            # A close tag before any open one: the prompt had opened the reasoning.
            spans = [(0, tag.end())]
    return spans


def _partners(tags: list[re.Match[str]]) -> dict[int, int | None]:
    """The close tag of every open one: its own if they nest, else the next of its name, else none.

    The second case is reasoning that speaks of its own tag, as in "<think> I <think> so </think>".
    """
    partners: dict[int, int | None] = {}
    waiting: dict[str, list[int]] = {}
    for index, tag in enumerate(tags):
        name = tag[2].lower()
        if not tag[1]:
            waiting.setdefault(name, []).append(index)
        elif waiting.get(name):
            partners[waiting[name].pop()] = index
    for name, indices in waiting.items():
        if not indices:
            continue
        closes = [i for i, tag in enumerate(tags) if tag[1] and tag[2].lower() == name]
        for index in indices:
            partners[index] = next((close for close in closes if close > index), None)
    return partners


# --- <answer> elements --------------------------------------------------------------------------


def answer_elements(visible: str) -> list[str]:
    """The contents of all complete ``<answer>`` elements in text freed of reasoning.

    >>> answer_elements("<answer>17</answer> or <answer>18</answer>")
    ['17', '18']
    """
    return _elements(visible)[0]


def _elements(visible: str) -> tuple[list[str], str]:
    """Complete elements, and what follows an open tag that never closes."""
    contents: list[str] = []
    position = 0
    while (start := visible.find(OPEN, position)) >= 0:
        end = visible.find(CLOSE, start)
        if end < 0:
            return contents, visible[start + len(OPEN) :]
        contents.append(visible[start + len(OPEN) : end])
        position = end + len(CLOSE)
    return contents, ""


def _find_element(visible: str) -> _Answer:
    if visible.count(OPEN) > MAX_TAGS:
        return _Answer(None, "the completion is stuffed with <answer> tags")
    contents, unclosed = _elements(visible)
    if not contents:
        return _Answer(None, "no complete <answer> element outside the reasoning")
    answer = _agreed(contents, "elements")
    if answer.number is not None and _contradicts(unclosed, contents[-1]):
        return _Answer(None, "a second <answer> is opened and differs")
    return answer


def _agreed(contents: list[str], what: str) -> _Answer:
    """The one value that all `contents` hold."""
    distinct = list(dict.fromkeys(contents))
    if len(distinct) > MAX_DISTINCT_ANSWERS:
        return _Answer(None, f"several answer {what} that differ")
    answers = [_read_element(content) for content in distinct]
    if any(answer.number != answers[0].number for answer in answers):
        return _Answer(None, f"several answer {what} that differ")
    return answers[0]


def _read_element(content: str) -> _Answer:
    """Read one element; "<answer>" may stand in it as a mere mention, before the real one."""
    *before, content = content.split(OPEN)
    if any(holds_number(text) for text in before):
        return _Answer(None, "an <answer> element is opened inside another")
    number, problem = read_value(content)
    return _Answer(number, problem)


def _contradicts(unclosed: str, answer: str) -> bool:
    """Whether an answer that is cut off goes another way than the complete one before it."""
    text = unclosed.strip()
    return holds_number(text) and not answer.strip().startswith(text)


# --- \\boxed -----------------------------------------------------------------------------------

_BOX_OPEN = re.compile(r"\\boxed\s?\{")
_BRACE = re.compile(r"\\[{}]|[{}]")


def answer_boxes(visible: str) -> list[str]:
    r"""The contents of the last complete boxes in text freed of reasoning.

    >>> answer_boxes(r"\boxed{9} times 2 is \boxed{18}")
    ['9', '18']
    """
    return [visible[start:end] for _, start, end in _boxes(visible)]


def _boxes(visible: str) -> list[tuple[int, int, int]]:
    """The last complete outermost boxes as (start, content start, end), in order."""
    boxes: list[tuple[int, int, int]] = []
    limit = visible.rfind("}")
    for _ in range(MAX_BOXES):
        start = visible.rfind(BOX, 0, max(limit, 0))
        if start < 0:
            break
        limit = start
        opening = _BOX_OPEN.match(visible, start)
        end = _closing_brace(visible, opening.end()) if opening else None
        if opening and end is not None:
            boxes = [box for box in boxes if box[0] > end]  # drop boxes inside this one
            boxes.insert(0, (start, opening.end(), end))
    return boxes


def _closing_brace(text: str, position: int) -> int | None:
    """The index of the brace that closes what opened before `position`; None if there is none.

    A box that is still open far away is taken to hold all the rest: whether it closes or not, it
    is too long to be an answer, and is refused as such.
    """
    depth, window = 1, position + MAX_BOX_CHARS
    for match in _BRACE.finditer(text, position, window):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return match.start()
    return len(text) if window < len(text) else None


def _find_boxed(visible: str) -> _Answer:
    boxes = _boxes(visible)
    if not boxes:
        return _Answer(None, "no complete \\boxed{...} outside the reasoning")
    answer = _agreed([_box_text(visible, box) for box in _last_row(visible, boxes)], "boxes")
    if answer.number is None:
        return answer
    before, tail = visible[: boxes[-1][0]], visible[boxes[-1][2] + 1 :]
    if _NOT_MEANT.search(before[-MAX_LEAD:]):
        return _Answer(None, "the text before the box denies or weakens it")
    if reason := _retraction(tail, answer.number):
        return _Answer(None, reason)
    _, opened, unclosed = tail.rpartition(BOX + "{")
    if opened and _contradicts(unclosed, _box_text(visible, boxes[-1])):
        return _Answer(None, "a second box is opened and differs")
    return answer


def _box_text(visible: str, box: tuple[int, int, int]) -> str:
    start, content_start, end = box
    sign = re.search(r"(?:^|[\s=$(])([-\u2212])$", visible[max(start - 2, 0) : start])
    return (sign[1] if sign else "") + visible[content_start:end]


_LATEX_BETWEEN_BOXES = re.compile(r"\\(?:quad|qquad|text|mathrm)|[{}]")
_BARE_GAP = re.compile(
    r"(?:[\s$.,;:!?()\[\]|/&~\\*_=-]|[0-9]+[.)]|\b(?:and|or|maybe|perhaps|possibly|either|also)\b)*"
)


def _last_row(visible: str, boxes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The last box and those before it that no prose separates: they are offered together."""
    first = len(boxes) - 1
    while first:
        gap = visible[boxes[first - 1][2] + 1 : boxes[first][0]]
        if len(gap) > 60 or not _BARE_GAP.fullmatch(_LATEX_BETWEEN_BOXES.sub("", gap)):
            break
        first -= 1
    return boxes[first:]


# --- prose round a box ---------------------------------------------------------------------------

MAX_LEAD = 30  # characters read before the box
_NOT_MEANT = re.compile(r"(?i)(?:\b(?:not|never|than|at least|at most|up to|or)|n['\u2019]t)\W*$")
MAX_TAIL = 2_000  # characters read at each end of what follows the box
_PHRASE = r"((?:[^.\n!?;]|\.(?=[0-9])){1,60})"
_CLAIM = re.compile(
    r"\banswer\b(?:\s+\w{1,20}){0,3}?\s*"
    rf"(?:\b(?:is|was|should be|must be|becomes|equals)\b|[=:])\s*{_PHRASE}",
    re.IGNORECASE,
)
_CHANGE_OF_MIND = re.compile(
    # "Or" counts right behind the box alone: "she needs 2 or 3 more days" is about something else.
    r"(?:\A\W*(?:or|maybe|perhaps)|\b(?:wait|actually|oops|correction|sorry|hmm|rather|no|i mean"
    r"|i meant|make that|instead|should be|should have been|must be))\b"
    r"(?:[\s,.:;-]|\b(?:no|wait|actually|it is|it's|it|should be|that's|that is|maybe|perhaps"
    r"|rather|i mean|i meant|make that|must be)\b){0,20}"
    rf"(?=[-\u2212$€£0-9]){_PHRASE}",
    re.IGNORECASE,
)
_TAKEN_BACK = re.compile(
    r"\b(?:that|this|it|which|(?:the|my) (?:answer|box|result|calculation)(?: above)?)"
    r"(?: is| was|'s)(?: actually| clearly)? "
    r"(?:wrong|incorrect|a mistake|mistaken|not (?:right|correct|the (?:\w+ )?answer))\b"
    r"|\bi (?:have )?made an? (?:\w+ )?(?:mistake|error)\b|\bi was wrong\b|\bscratch that\b"
    r"|\b(?:ignore|disregard) (?:that|the|my|this)\b"
    r"|\b(?:isn't|is not) (?:right|correct|the (?:\w+ )?answer)\b",
    re.IGNORECASE,
)
_SCALED = re.compile(r"[\s$]*(?:hundred|thousand|million|billion|trillion)\b", re.IGNORECASE)


def _retraction(tail: str, number: Number) -> str:
    """Why the prose after a box contradicts it; empty if it does not."""
    if len(tail) > 2 * MAX_TAIL:
        tail = tail[:MAX_TAIL] + "\n" + tail[-MAX_TAIL:]
    tail = tail.replace("\u2019", "'")
    if _SCALED.match(tail):
        return "the box is followed by a word that multiplies it"
    if _TAKEN_BACK.search(tail):
        return "the text after the box takes it back"
    for pattern in (_CLAIM, _CHANGE_OF_MIND):
        for match in pattern.finditer(tail):
            if read_value(match[1]).number not in (None, number):
                return "the text after the box gives another answer"
    return ""


_FINDERS: dict[str, Callable[[str], _Answer]] = {
    "xml": _find_element,
    "r1_zero": _find_element,
    "boxed": _find_boxed,
}
