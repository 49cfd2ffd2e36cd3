"""The judge: decide whether the answer in a completion is the gold answer. All scores come from it.

docs/grading.md has its rules, and why it is not Math-Verify. A verdict takes time linear in the
length of the completion, and never raises: tags are found with `str.find` or with patterns that
cannot backtrack, and an answer is read only if it is short.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from rewards.values import (
    Number,
    Reading,
    holds_number,
    numbers_in,
    plain,
    read_integer,
    read_value,
)
from sologrpo.prompts import BOX, CLOSE, MARK, OPEN, PROMPT_FORMATS, XML, PromptFormat

# No honest completion has this many tags. The limits keep judging hostile ones linear and fast.
MAX_TAGS = 400
MAX_DISTINCT_ANSWERS = 8
MAX_ABANDONED = 2_000  # characters of an unfinished answer that are searched for a number
MAX_BOXES = 32
MAX_BOX_CHARS = 400


class GoldError(ValueError):
    """The gold answer is invalid: it has no ``####``, or no integer after it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict: correct or not, the extracted value, and the reason in one sentence."""

    correct: bool
    extracted: str | None
    reason: str


# --- gold ---------------------------------------------------------------------------------------


def parse_gold(answer: str) -> str:
    """Parse the gold integer of a GSM8K answer, after its last ``####``; else raise `GoldError`.

    >>> parse_gold("9 * 2 = <<9*2=18>>18\\n#### 1,018")
    '1018'
    """
    number = _gold_number(answer)
    return ("-" if number.negative else "") + number.digits + "0" * number.exponent


def _gold_number(answer: str) -> Number:
    _, mark, text = answer.rpartition(MARK)
    if not mark:
        raise GoldError("gold answer has no '####'; end it in '#### 42'")
    number = read_integer(text.strip())
    if number is None:
        raise GoldError(f"gold answer must be an integer, not {text.strip()[:40]!a}")
    return number


# --- verdicts -----------------------------------------------------------------------------------


def judge(completion: str, gold: str, prompt_format: str = "xml") -> Verdict:
    """Judge a completion against a raw GSM8K answer (``#### 18``), or raise `GoldError`.

    >>> judge("<thinking>9 * 2</thinking><answer>$18</answer>", "#### 18", "xml")
    Verdict(correct=True, extracted='18', reason='18 is the gold answer')
    >>> judge("<thinking><answer>18</answer></thinking>", "#### 18", "xml").reason
    'no complete <answer> element outside the reasoning'
    """
    wanted = _gold_number(gold)
    answer = _find_answer(completion, prompt_format)
    if answer.number is None:
        return Verdict(False, None, answer.problem)
    extracted = str(answer.number)
    if answer.number == wanted:
        return Verdict(True, extracted, f"{_short(wanted)} is the gold answer")
    reason = f"{_short(answer.number)} is not the gold answer {_short(wanted)}"
    return Verdict(False, extracted, reason)


def is_correct(completion: str, gold: str, prompt_format: str = "xml") -> bool:
    r"""Check whether the completion's answer equals the gold answer, as `judge` does.

    >>> is_correct("<answer>eighteen</answer>", "#### 18", "xml")
    True
    >>> is_correct(r"9 * 2 = \boxed{18}", "#### 18", "boxed")
    True
    """
    return judge(completion, gold, prompt_format).correct


def extract_answer(completion: str, prompt_format: str = "xml") -> str | None:
    """Extract the value of the completion's answer in canonical digits; None if it has none.

    >>> extract_answer("<answer>$1,200.00 a year</answer>", "xml")
    '1200'
    >>> extract_answer("<answer>18 or 20</answer>", "xml") is None
    True
    """
    number = _find_answer(completion, prompt_format).number
    return None if number is None else str(number)


def lenient_is_correct(completion: str, gold: str) -> bool:
    """Check whether the last number in the completion is the gold answer.

    It tells wrong arithmetic from wrong format. Do not train on it: a model only learns from it to
    end on a number.

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


def _find_answer(completion: str, prompt_format: str) -> Reading:
    if prompt_format not in PROMPT_FORMATS:
        known = ", ".join(PROMPT_FORMATS)
        raise ValueError(f"unknown prompt_format {prompt_format!r}: use one of {known}")
    return _FINDERS[format_of(prompt_format).mark](visible_text(completion, prompt_format))


def format_of(name: str) -> PromptFormat:
    """Look up a prompt format; a completion of any other is looked at like one of ``xml``."""
    return PROMPT_FORMATS.get(name, XML)


# --- reasoning ----------------------------------------------------------------------------------

# Unlike answer tags, these are recognised in any case and with attributes: a misspelled reasoning
# tag must not make the reasoning visible.
# The look-ahead does not change the matches. It halves the time on a text full of "<".
REASONING_TAG = re.compile(r"<(?=/?[tr])(/?)(think(?:ing)?|reasoning)(?:\s[^<>]*)?>", re.IGNORECASE)
# Replaces removed reasoning, so that no answer can span the gap.
_GAP = "<reasoning>"


def visible_text(completion: str, prompt_format: str) -> str:
    """Remove the reasoning from a completion. The rest may contain an answer.

    >>> visible_text("<think>9 * 2</think> It is 18.", "boxed")
    '<reasoning> It is 18.'
    """
    position, pieces = 0, []
    for start, end in _reasoning(completion, prompt_format):
        pieces.append(completion[position:start])
        position = end
    return _GAP.join([*pieces, completion[position:]])


def reasoning_text(completion: str, prompt_format: str) -> str:
    """Return the text that `visible_text` removes, without the reasoning tags.

    >>> reasoning_text("<think>9 * 2</think> It is 18.", "boxed")
    '9 * 2'
    """
    spans = _reasoning(completion, prompt_format)
    return "".join(REASONING_TAG.sub("", completion[start:end]) for start, end in spans)


def _reasoning(completion: str, prompt_format: str) -> list[tuple[int, int]]:
    """Find the spans of reasoning, tags included. A completion full of tags is one span."""
    tags = list(islice(REASONING_TAG.finditer(completion), MAX_TAGS + 1))
    if len(tags) > MAX_TAGS:
        return [(0, len(completion))]
    if not format_of(prompt_format).opens_reasoning:
        return _reasoning_spans(tags, len(completion))
    end, tags = _after_prompted_reasoning(tags)
    spans = _reasoning_spans(tags, len(completion))
    # A later stray close tag is taken to end the reasoning that the prompt opened.
    return spans if spans and not spans[0][0] else [(0, end or len(completion)), *spans]


def _after_prompted_reasoning(tags: list[re.Match[str]]) -> tuple[int, list[re.Match[str]]]:
    """Return the end of the last ``</think>`` (0 if there is none) and the tags after it."""
    for index in range(len(tags) - 1, -1, -1):
        if tags[index][0] == "</think>":
            return tags[index].end(), tags[index + 1 :]
    return 0, []


def _reasoning_spans(tags: list[re.Match[str]], length: int) -> list[tuple[int, int]]:
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
            # A close tag before any open tag: the prompt opened the reasoning.
            spans = [(0, tag.end())]
    return spans


def _partners(tags: list[re.Match[str]]) -> dict[int, int | None]:
    """Match each open tag with its close tag, else with the next close tag of its name, else None.

    The second case is reasoning that mentions its tag, as in "<think> I <think> so </think>".
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
    """Return the contents of all complete ``<answer>`` elements.

    >>> answer_elements("<answer>17</answer> or <answer>18</answer>")
    ['17', '18']
    """
    return _elements(visible)[0]


def _elements(visible: str) -> tuple[list[str], str]:
    """Return the complete elements, and the text after an open tag that never closes."""
    contents: list[str] = []
    position = 0
    while (start := visible.find(OPEN, position)) >= 0:
        end = visible.find(CLOSE, start)
        if end < 0:
            return contents, visible[start + len(OPEN) :]
        contents.append(visible[start + len(OPEN) : end])
        position = end + len(CLOSE)
    return contents, ""


def _find_element(visible: str) -> Reading:
    if visible.count(OPEN) > MAX_TAGS:
        return Reading(None, "the completion is stuffed with <answer> tags")
    contents, unclosed = _elements(visible)
    if not contents:
        return Reading(None, "no complete <answer> element outside the reasoning")
    answer = _agreed(contents, "elements")
    if answer.number is not None and _contradicts(unclosed, contents[-1]):
        return Reading(None, "a second <answer> is opened and differs")
    return answer


def _agreed(contents: list[str], what: str) -> Reading:
    distinct = list(dict.fromkeys(contents))
    answers = [_read_element(content) for content in distinct[:MAX_DISTINCT_ANSWERS]]
    if len(distinct) > MAX_DISTINCT_ANSWERS or len({answer.number for answer in answers}) > 1:
        return Reading(None, f"several answer {what} that differ")
    return answers[0]


def _read_element(content: str) -> Reading:
    """Read one element. It may mention "<answer>" before the real answer."""
    before, _, content = content.rpartition(OPEN)
    if _may_hold_number(before):
        return Reading(None, "an <answer> element is opened inside another")
    return read_value(content)


def _contradicts(unclosed: str, answer: str) -> bool:
    """Check whether a truncated answer differs from the complete one before it."""
    text = unclosed.strip()
    return _may_hold_number(text) and not answer.strip().startswith(text)


def _may_hold_number(text: str) -> bool:
    return len(text) > MAX_ABANDONED or holds_number(text)


# --- #### lines ---------------------------------------------------------------------------------


# The harness stops a completion at these, and they are kept here.
_LINE_END = re.compile(r"\n|Question:|</s>|<\|im_end\|>")


def answer_lines(visible: str) -> list[str]:
    """Return what follows each ``####``, up to the end of its line or a stop string.

    >>> answer_lines("9 * 2 = 18\\n#### 18")
    [' 18']
    """
    return [_LINE_END.split(rest, 1)[0] for rest in visible.split(MARK, MAX_TAGS + 1)[1:]]


def _find_line(visible: str) -> Reading:
    lines = answer_lines(visible)
    if len(lines) > MAX_TAGS:
        return Reading(None, f"the completion is stuffed with {MARK}")
    return _agreed(lines, "lines") if lines else Reading(None, f"no line with {MARK}")


# --- \\boxed -----------------------------------------------------------------------------------

_BOX_OPEN = re.compile(r"\\boxed\s{0,3}\{")
_BRACE = re.compile(r"\\[{}]|[{}]")


def answer_boxes(visible: str) -> list[str]:
    r"""Return the contents of the last complete box, and of the boxes offered together with it.

    >>> answer_boxes(r"\boxed{9} times 2 is \boxed{18}")
    ['18']
    >>> answer_boxes(r"\boxed{9}, \boxed{18}")
    ['9', '18']
    """
    return [visible[start:end] for _, start, end in _last_row(visible, _boxes(visible))]


def _boxes(visible: str) -> list[tuple[int, int, int]]:
    """Find the last complete outermost boxes: (start, content start, end), in order."""
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
    """Find the brace that closes the one before `position`; None if there is none.

    A box that is open for too long to be an answer is taken to contain the rest of the text.
    """
    depth, window = 1, position + MAX_BOX_CHARS
    for match in _BRACE.finditer(text, position, window):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return match.start()
    return len(text) if window < len(text) else None


def _find_boxed(visible: str) -> Reading:
    boxes = _boxes(visible)
    if not boxes:
        return Reading(None, "no complete \\boxed{...} outside the reasoning")
    row = _last_row(visible, boxes)
    answer = _agreed([visible[start:end] for _, start, end in row], "boxes")
    tail, opened, unclosed = visible[row[-1][2] + 1 :].partition(BOX + "{")
    if len(tail) > 2 * MAX_TAIL:
        tail = tail[:MAX_TAIL] + "\n" + tail[-MAX_TAIL:]
    tail = plain(tail)
    if answer.number is not None:
        answer = _in_context(visible[: row[0][0]], answer.number, tail)
    if answer.number is None:
        return answer
    if reason := _retraction(tail, answer.number):
        return Reading(None, reason)
    if opened and _contradicts(unclosed, visible[row[-1][1] : row[-1][2]]):
        return Reading(None, "a second box is opened and differs")
    return answer


_BARE_GAP = re.compile(
    r"(?:[\s$.,;:!?()\[\]|/&~\\*_=]|-(?!\Z)|(?:[0-9]+|\b[A-Za-z])[.):]"
    r"|\b(?:and|or|to|(?:then )?(?:maybe|perhaps|possibly)|either|also)\b)*"
)


def _last_row(visible: str, boxes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the last box and the boxes before it that no prose separates: one offer."""
    first = max(len(boxes) - 1, 0)
    while first:
        start, content, end = boxes[first - 1]
        gap = plain(visible[end + 1 : boxes[first][0]][: 2 * MAX_NEAR])
        if len(gap) > MAX_NEAR or not _BARE_GAP.fullmatch(gap):
            break
        number = read_value(visible[content:end]).number
        if "=" in gap and number and _in_context(visible[:start], number, "").number is None:
            break  # "\boxed{9} * \boxed{2} = \boxed{18}" is a calculation and its result
        first -= 1
    return boxes[first:]


# --- prose around a box --------------------------------------------------------------------------

MAX_NEAR = 60  # characters read on each side of a box, as if there were no box
MAX_TAIL = 1_000  # characters searched at each end of the text after the box
# What is read ends at punctuation, a tag, a comparison, a line, a calculation or a conjunction.
_EDGE = (
    r"[:!?]+(?=\s|\Z)|(?:\bor)?[.,]+(?=\s)|(?<![0-9])[.,]+\Z|<[/|a-z][^<>]*>?|[<>](?=[ $]*[0-9])"
    r"|[\n|;→]|&(?!\w)|(?<![!<>])=|[-=]>|\s\((?=[$0-9])"
    r"|\\(?:[\\\s]|\Z|(?:n|qed|blacksquare|checkmark)\b|(?:begin|end|tag)\s*\S*)"
    r"|\b(?:so|thus|then|which|because|since|if)\b"
)
# It also ends at a number that a word keeps apart: "9 jars make \boxed{18}", not "9 by \boxed{18}".
_JOINT = r"(?:and|to|x|times|by)\b"
_BEFORE = re.compile(
    rf"(?m:^\s*[-*•]\s)|{_EDGE}|[0-9](?=[^\n]*(?<![\\A-Za-z])(?!{_JOINT})[A-Za-z])", re.IGNORECASE
)
_AFTER = re.compile(_EDGE, re.IGNORECASE)
_NEAR = re.compile(
    rf"(?:[^\w\\]|\b{_JOINT})*[0-9][0-9.,]*|.*?(?=(?:\bnot )?[a-z$]*[0-9]|\Z)", re.IGNORECASE
)


def _in_context(before: str, number: Number, tail: str) -> Reading:
    """Read the number of a box again, together with the signs and words around the box."""
    lead = _BEFORE.split(plain(before[-MAX_NEAR:]))[-1]
    space = " " if lead[-1:].isalpha() else ""
    near = _NEAR.findall(_AFTER.split(tail[:MAX_NEAR], 1)[0])[0]
    around = read_value(f"{lead}{space}{number}{near}".replace("$", ""))
    if around.number and around.number[1:] != number[1:]:  # all but the sign
        return Reading(None, "the number continues outside the box")
    return around


_FIGURE = r"((?<![0-9,.])[-\u2212]?[$€£]?[0-9][0-9,.]{0,30})"
_PHRASE = r"((?:[^.\n!?;<]|\.(?=[0-9])){1,60})"
_ERROR = r"(?:wrong|incorrect|false|mistaken|a mistake|an error)"
_RIGHT = r"(?:quite )?(?:right|correct|the (?:\w+ )?answer)"
# Each captures an answer that the text gives after the box.
_ANSWERED_AGAIN = [
    # "the answer is 20", "#### 20"
    r"(?:\banswer\b(?:\s+(?!would|not)\w{1,20}){0,3}?\s*(?:\b(?:is|was|equals|becomes"
    r"|(?:should|must|could|might|may)(?: also)? be)\b|[=:>])|####|\banswer(?= [0-9]))\s*"
    + _PHRASE,
    # "wait, no, 20". "Or" counts only directly after the box: "she needs 2 or 3 more days" is about
    # something else.
    r"(?:\A\W*(?:or|maybe|perhaps|possibly|else)|\b(?:wait|actually|oops|correction|sorry|hmm"
    r"|rather|no(?:pe)?|i mean|i meant|make that|instead|alternatively|otherwise"
    r"|(?:it|that|this|which|box|result|value) (?:should be|should have been|must be)))\b"
    r"(?:[\s,.:;]|-(?![0-9$€£])|\b(?:no|wait|actually|it is|it's|it|is|should be|that's"
    r"|that is|maybe|perhaps|possibly|rather|say|i mean|i meant|make that|must be)\b){0,20}+"
    rf"(?=[-\u2212$€£0-9]){_PHRASE}",
    # "It is really 20."
    r"\b(?:it|that)(?:'s| is| equals| (?:may|might|could) be)(?: really| actually| now| just)?"
    rf" {_FIGURE}(?= ?(?:[!?\n]|dollars|$))",
    # "\boxed{18}, 20", "\boxed{18} = 20"
    rf"\A[ $]*[,;&|=] *{_FIGURE}(?=\s*(?:$|[\n!?)]))",
]
# Each captures a number that the text rejects.
_REJECTED = [
    rf"(?:\b(?:not|never|instead of|rather than|replace)|n't)(?: be| equal(?: to)?)? {_FIGURE}",
    rf"{_FIGURE} (?:is|was) (?:\w+ly )?(?:{_ERROR}|not {_RIGHT})\b",
]
_TAKEN_BACK = re.compile(
    # "that is wrong", "the answer above can't be right"; but "it is wrong to count them twice".
    r"(?:\A\W*|\b(?:that|this|it|which|the above"
    r"|(?:the|my)(?: \w+){0,2} (?:answer|box|result|calculation|solution)(?: above)?) ?)"
    rf"(?:(?:is|'s|was|would be|must be|looks|seems)(?: \w+ly)? (?:{_ERROR}|not {_RIGHT})"
    r"|(?:isn't|wasn't|can't|cannot|can not|doesn't|does not)(?: be| look| seem)?"
    rf" {_RIGHT})\b(?! to\b)"
    rf"|\bdon't think (?:that|this|it)(?:'s| is) {_RIGHT}\b"
    r"|\bi (?:have |had |just )?(?:made an? (?:\w+ )?(?:mistake|error)|was wrong"
    r"|mis(?:read|count|calculat|understood|interpret)\w*|take (?:that|this|it) back)\b"
    r"|\bthere(?: is|'s| was) an? (?:\w+ )?(?:mistake|error)\b"
    r"|\bscratch that\b|\b(?:ignore|disregard) (?:that|the|my|this)\b",
    re.IGNORECASE,
)
_DOUBT = re.compile(
    r"\bwait\b(?=\s*[,.!:;-])|\bh+m+\b|\boops\b|\bon second thoughts?\b|\bi forgot\b|\bkidding\b"
    r"|\b(?:recount|recalculate|recompute|reconsider|redo)\b|\bcorrect (?:that|this|it|my)\b"
    r"|\b(?:correction|edit|update):|\bchang(?:e|ing) my (?:answer|mind)\b|\bgo with\b"
    r"|\bmy (?:bad|mistake|error)\b|\bi now (?:think|believe)\b",
    re.IGNORECASE,
)
_CONCLUSION = r"\A\s*(?:so|thus|therefore|hence)\b(?!.*\b(?:if|would|could)\b)[\s,]*(.*)"
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[\n;]")


def _retraction(tail: str, number: Number) -> str:
    """Return why the prose after a box contradicts it; empty if it does not."""
    if _TAKEN_BACK.search(tail) or number in _captured(_REJECTED, tail):
        return "the text after the box takes it back"
    differs = any(other != number for other in _captured(_ANSWERED_AGAIN, tail))
    if differs or _ends_elsewhere(tail, number):
        return "the text after the box gives another answer"
    return ""


def _captured(patterns: list[str], text: str) -> Iterator[Number]:
    for pattern in patterns:
        found = re.finditer(pattern, text, re.IGNORECASE)
        for phrase in dict.fromkeys(match[1] for match in found):
            number = read_value(phrase).number
            if number is not None:
                yield number


def _ends_elsewhere(tail: str, number: Number) -> bool:
    """Check whether a final conclusion, or a sentence after a doubt, has only other numbers."""
    doubt = _DOUBT.search(tail)
    sentences = _SENTENCE_END.split(tail[doubt.start() :] if doubt else tail)
    last = next((text for text in reversed(sentences) if holds_number(text)), "")
    if doubt:
        found = numbers_in(last)
        return bool(found) and number not in found
    return any(other != number for other in _captured([_CONCLUSION], last))


_FINDERS: dict[str, Callable[[str], Reading]] = {
    OPEN: _find_element,
    BOX: _find_boxed,
    MARK: _find_line,
}
_LISTERS = {OPEN: answer_elements, BOX: answer_boxes, MARK: answer_lines}


def answers_in(visible: str, prompt_format: str) -> list[str]:
    """Return the contents of all complete answers: elements, the last boxes or lines.

    >>> answers_in("9 * 2 = 18\\n#### 18", "lm_eval")
    [' 18']
    """
    return _LISTERS[format_of(prompt_format).mark](visible)
