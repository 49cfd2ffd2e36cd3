"""Read the number that a short answer states, if a careful reader would call it one value.

The text is simplified, its numbers are located, and the rest, the skeleton, is searched for words
that change the meaning. Numbers are decimal digits and a power of ten: there are no floats, no
limit on the number of digits, and no work that grows with the exponent.
"""

import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from math import isqrt
from typing import NamedTuple

# The length of a short sentence, in characters. Plain digits may be longer. Bounds all work below.
MAX_TEXT = 250
# No completion has 10**18 digits, so longer exponents are rejected before int() is called.
MAX_EXPONENT_DIGITS = 18
# A number with more zeros than this is written with an exponent.
MAX_WRITTEN_ZEROS = 5_000


class Number(NamedTuple):
    """±digits times 10^exponent, without outer zeros: equal numbers are equal tuples."""

    negative: bool
    digits: str
    exponent: int

    def __str__(self) -> str:
        sign, digits, exponent = "-" if self.negative else "", self.digits, self.exponent
        if abs(exponent) > MAX_WRITTEN_ZEROS:
            return f"{sign}{digits}e{exponent}"
        if exponent >= 0:
            return sign + digits + "0" * exponent
        digits = digits.rjust(1 - exponent, "0")
        return f"{sign}{digits[:exponent]}.{digits[exponent:]}"


class Reading(NamedTuple):
    """The result of reading a text: a number, or the reason why it is not one."""

    number: Number | None
    problem: str


class _NotOneValueError(Exception):
    """The text does not state exactly one value. The message gives the reason."""


def make_number(negative: bool, whole: str, fraction: str = "", exponent: int = 0) -> Number:
    """Build a number from the digits before and after its decimal point, times 10^exponent.

    >>> make_number(False, "0018", "00")
    Number(negative=False, digits='18', exponent=0)
    """
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return Number(False, "0", 0)
    short = digits.rstrip("0")
    return Number(negative, short, exponent - len(fraction) + len(digits) - len(short))


# --- plain numbers ------------------------------------------------------------------------------

_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+"
# Possessive quantifiers: no backtracking into digits.
_PLAIN = re.compile(rf"([+-]?)({_GROUPED}+|[0-9]++)(?:\.([0-9]*+))?")
_FIGURE = re.compile(rf"(?<![\w.])-?\$?(?:{_GROUPED}|[0-9]+)(?:\.[0-9]+)?")
_INTEGER = re.compile(r"([+\-\u2212]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)")

# Zero-width and soft characters that show nothing. Bidirectional overrides are not among them.
_INVISIBLE = "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad\u061c\u180e"
_PADDING = " \t\n\r\f\v\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + (
    "".join(map(chr, range(0x2000, 0x200B))) + _INVISIBLE
)


def read_integer(text: str) -> Number | None:
    """Read an integer, with or without thousands separators; None if `text` is anything else.

    >>> str(read_integer("-1,200"))
    '-1200'
    """
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    return make_number(match[1] in ("-", "\u2212"), match[2].replace(",", ""))


def read_value(text: str) -> Reading:
    """Read the single value that `text` states, or the reason why there is none.

    >>> str(read_value("Janet makes $18 every day.").number)
    '18'
    >>> read_value("18 or 20").problem
    'the answer names alternatives'
    """
    text = text.strip(_PADDING)
    if plain := _PLAIN.fullmatch(text):
        whole = plain[2].replace(",", "")
        return Reading(make_number(plain[1] == "-", whole, plain[3] or ""), "")
    if not text:
        return Reading(None, "the answer is empty")
    if len(text) > MAX_TEXT:
        return Reading(None, f"the answer is longer than {MAX_TEXT} characters")
    try:
        return Reading(_read_sentence(text), "")
    except _NotOneValueError as problem:
        return Reading(None, str(problem))


def holds_number(text: str) -> bool:
    """Check whether `text` contains a digit or number word. Linear in its length."""
    return bool(_ANY_NUMBER.search(text))


def numbers_in(text: str) -> set[Number]:
    """Find every number in prose, in digits or words, whatever it means there.

    >>> sorted(str(number) for number in numbers_in("9 eggs at $2 make eighteen."))
    ['18', '2', '9']
    """
    found = (read_value(match[0]).number for match in _FIGURE.finditer(plain(text)))
    return {number for number in found if number is not None}


def plain(text: str) -> str:
    r"""Write LaTeX that shows plain text as that text, and number words but "one" in digits.

    >>> plain(r"Twenty-one of 18\,\text{cm}, one by one")
    '21 of 18   cm  , one by one'
    """
    return _WORD_RUN.sub(_in_digits, _without_latex(text.replace("\u2019", "'")))


def _in_digits(words: re.Match[str]) -> str:
    if words[0].lower() == "one":
        return words[0]
    try:
        return str(_words_value(words[0].lower()))
    except _NotOneValueError:
        return re.sub(r"\w+", lambda word: str(_SMALL.get(word[0].lower(), word[0])), words[0])


# --- a sentence around one number ---------------------------------------------------------------


def _read_sentence(text: str) -> Number:
    simple = _simplify(text)
    if "=" in simple and (number := _equation_value(simple)) is not None:
        return number
    found = list(_numbers(simple))
    _refuse_operations(simple)
    skeleton = _blank(simple, found).lower()
    words = list(_word_numbers(skeleton, with_digits=bool(found)))
    skeleton = _blank(skeleton, words)
    _refuse_by_wording(skeleton, [*_WORDING, _ARITHMETIC])
    values = {item.number for item in found + words}
    if not values:
        raise _NotOneValueError("the answer contains no number")
    if len(values) > 1:
        raise _NotOneValueError("the answer contains more than one value")
    return values.pop()


class _Found(NamedTuple):
    number: Number
    start: int
    end: int


def _blank(text: str, found: list[_Found]) -> str:
    """Replace every number with a single 0, so that patterns can match the wording."""
    pieces, last = [], 0
    for item in found:
        pieces += [text[last : item.start], " 0 "]
        last = item.end
    return re.sub(r"\s+", " ", "".join(pieces) + text[last:])


_WORD = re.compile(r"[^\W\d_]{2}|[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")


def _refuse_operations(text: str) -> None:
    """Raise for a sign that stands for an operation or another number, wherever it is."""
    before, mark, _ = text.partition("!")
    if mark and not _WORD.search(before):  # "The answer is 18!" is an exclamation
        raise _NotOneValueError("the answer is a factorial")
    for sign in text:
        if unicodedata.category(sign) in ("No", "Nl"):  # "18½", "18 ⁴", "18 ⑨"
            raise _NotOneValueError(f"the answer contains {sign!a}")


# --- simplify: other scripts, LaTeX, Markdown ---------------------------------------------------

_BIDI_CONTROL = re.compile("[\u202a-\u202e\u2066-\u2069]")
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63", "-"),
        **dict.fromkeys("\u2014\u2015", ":"),
        "\u3002": ".",
        "\u3001": ",",
        **dict.fromkeys("\u2018\u2019", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a\u300c\u300d", '"'),
        **dict.fromkeys("\u00d7\u2715\u22c5\u00b7", "*"),
        **dict.fromkeys("\u2248\u2243\u2245", "~"),
        **dict.fromkeys("\u00f7\u2044\u2215", "/"),
        **dict.fromkeys("\xa0\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B))), " "),
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full width
        "\u2026": "...",
        "\u2103": "°C",
        "\u2109": "°F",
    }
)
_INVISIBLE_IN_NUMBER = re.compile(f"(?<=[0-9])[{_INVISIBLE}]+(?=[0-9])")
_INVISIBLE_ANYWHERE = re.compile(f"[{_INVISIBLE}]")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_POWER_OF_TEN = re.compile("(?<![0-9])10([⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+)")
# "x_1 = 18" and "x_{12} = 18": the index is part of the name.
_INDEX = re.compile(r"(?<![\w.])([A-Za-z])_(?:[0-9]|\{[0-9]{1,3}\})(?=\s*=)")


def _simplify(text: str) -> str:
    if _BIDI_CONTROL.search(text):
        raise _NotOneValueError("the answer contains bidirectional control characters")
    if not text.isascii():
        text = _plain_characters(text)
    if any((ch < " " and ch not in "\t\n\r\f\v") or "\ud800" <= ch <= "\udfff" for ch in text):
        raise _NotOneValueError("the answer contains control characters")
    text = _without_latex(_INDEX.sub(r"\1", text))
    if "\\" in text:
        raise _NotOneValueError("the answer is LaTeX that is not a plain number")
    return _without_markup(text)


def _plain_characters(text: str) -> str:
    text = text.translate(_CHARACTERS)
    text = _POWER_OF_TEN.sub(lambda match: "10^" + match[1].translate(_SUPERSCRIPTS), text)
    decimals = {ch: unicodedata.decimal(ch) for ch in text if ch.isdecimal()}
    if len({ord(ch) - value for ch, value in decimals.items()}) > 1:
        raise _NotOneValueError("the answer mixes digits of several scripts")
    text = "".join(str(decimals.get(ch, ch)) for ch in text)
    if _INVISIBLE_IN_NUMBER.search(text):
        raise _NotOneValueError("the answer hides characters inside a number")
    return _INVISIBLE_ANYWHERE.sub("", text)


# In this order. Replacements are two spaces wide where one space could join "1" and "200" to 1,200.
_LATEX = [
    (
        r"\\(?:boxed|[fm]box|text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf)|operatorname|emph"
        r"|underline|bm)\s*(?=\{)",
        "",
    ),
    (r"\{([,-])\}", r"\1"),
    (r"\\!", ""),
    (r"\\[, ]", " "),
    (r"\\([$%#])", r"\1"),
    (r"\\pounds", "£"),
    (r"\\(?:times|cdot)", " * "),
    (r"\\div", " / "),
    (r"\\approx", " ~ "),
    (r"\^\{?\\circ\}?", "°"),
    (r"\\(?:therefore|implies|to|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])", "→"),
    (r"\\(?:q?quad|left|right|displaystyle|large|Large|LARGE|huge|Huge|bf|rm)(?![A-Za-z])", "  "),
    (r"\\[;:()\[\]]|\\(?:text)?color\s*\{(?!white)[a-z]+\}", "  "),  # white text is invisible
    (r"\\sqrt\s*\{([^{}]+)\}", r"√(\1)"),
    (r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}", r" ((\1)/(\2))"),
    (r"\^\s*\{([^{}]*)\}", r"^\1"),
    (r"[{}]", "  "),
    # "18 cm^2", "18 m²", "18 cm2". "x² = 18" does not give x.
    (
        r"(?:(?<=[A-Za-z])\s*(?:\^ ?[23]|⁻?[¹²³])|(?:(?<=[ckdm]m)|(?<= m)|(?<=ft))[23])"
        r"(?!\w|\s*=)",
        "",
    ),
]


def _without_latex(text: str) -> str:
    if re.search(r"[\\{}^¹²³]|[mt][23]", text):  # most answers have nothing to replace
        for pattern, plainly in _LATEX:
            text = re.sub(pattern, plainly, text)
    return text


_HTML = re.compile(r"</?(?:b|i|u|em|strong|code|p|br|span) ?/?>")
_BULLET = re.compile(r"\s*(?:[*•‣]|#{1,6})\s+(?=\S)")
# After a closing quotation mark, as in "'x'*18", an asterisk multiplies.
_OPENING_MARK = re.compile(r"(?<![^\s(\[\"':$])(?<!\w[\"'])[*_`]{1,3}(?=[^\s*_`])")
_CLOSING_MARK = re.compile(r"(?<=[^\s*_`])[*_`]{1,3}(?![^\s.,;:!?)\]\"'$%])")
_FENCE = re.compile(r"```[a-z]*\s")
_FORBIDDEN_SIGN = re.compile(
    r"[<>\u2241\u2244\u2246\u2247\u2249\u2260-\u22ff\u2a7d\u2a7e|\\^@±\u2213√∞²³✗✘❌\u20e3\u0336]|~~|``"
    r"|[!/] ?="
    r"|&(?![A-Za-z])|(?<![A-Za-z])&"
    # Chinese and Japanese: multiples, negations, bounds, halves.
    r"|[零十百千万萬亿億兆不非没沒無无未负負减減半多少超过過至于於以或]"
)
_ARROW = re.compile(r"-+>|\A\s*=+>")


def _without_markup(text: str) -> str:
    text = _FENCE.sub("  ", text + " ").rstrip()
    text = _ARROW.sub("→", _HTML.sub("  ", text))
    text = _BULLET.sub("", text, count=1) if _BULLET.match(text) else text
    text, opened = _OPENING_MARK.subn("  ", text)
    return (_CLOSING_MARK.sub("  ", text) if opened else text).strip()


# --- numbers written in digits ------------------------------------------------------------------

_CURRENCY = (
    r"(?:(?<![A-Za-z])(?:US|CA|AU|NZ|HK|[SRCA])?\$|[€£¥₹₽₩₪¢₫₴₦₱฿]"
    r"|(?<![A-Za-z])(?:USD|EUR|GBP|CAD|AUD|INR|JPY|CNY|RMB|CHF|Rs\.?))"
)
_NUMBER = re.compile(
    rf"""
    (?P<sign>(?<![\w)])[-+]\ ?)?
    (?P<currency>{_CURRENCY}\ ?)?
    (?P<inner>(?<=[\s$€£¥])[-+])?
    (?: (?P<whole>(?:[1-9][0-9]{{0,2}}(?:(?:,[0-9]{{3}})+|(?:\ [0-9]{{3}})+)(?![0-9])|[0-9]+))
        (?:\.(?P<fraction>[0-9]++(?!\.\.)|(?![.0-9])))?
      | (?<![\w.])\.(?P<bare>[0-9]+) )
    (?: [eE](?P<exponent>[-+]?[0-9]+)(?![0-9])
      | \s*[x*]\s*10\s*\^\s*(?P<power>[-+]?\s?[0-9]+) )?
    """,
    re.VERBOSE,
)
_POWERS = {"k": 3, "m": 6, "b": 9, "t": 12, "hundred": 2, "thousand": 3, "lakh": 5, "crore": 7}
_POWERS |= {"million": 6, "mil": 6, "mln": 6, "mn": 6, "billion": 9, "bn": 9, "trillion": 12}
_SCALE = "|".join(word for word in _POWERS if word[1:])
_MAGNITUDE = re.compile(rf"[\s-]*(?:(?i:({_SCALE})s?)|([kKMBT]))(?![A-Za-z'&]|-[A-Za-z])")
_MILLION_IN_MONEY = re.compile(r" ?(m)(?![A-Za-z])")
# Chinese, Japanese and Korean letters adjoin numbers without a space.
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")
_ALLOWED_BEFORE = " \t\n\r\f\v([\"':=#~,;*_$→⇒•№"
# Letters may follow if they can be a unit: two or more letters, or a common short one.
_ALLOWED_AFTER = re.compile(
    rf"""$ | \s | [;!?%°"\u2032\u2033\])}}=~] | [,:'](?![0-9]) | [*_]+(?![\w(])
      | \.(?:\.\.)?(?![.0-9]) | [\u2600-\u2775\U0001f300-\U0001faff] | {_UNSPACED.pattern}
      | -\s?[^\W\d_] | /\s*(?:[A-Za-z]{{2,}}|[mgshldL]\b) | {_CURRENCY}
      | (?!ish\b|[eE]\d)[^\W\d_]{{2,}}(?![0-9_]) | [mgshlLdCF](?![\w])""",
    re.VERBOSE,
)
_LABELS = ("answer", "result", "total", "solution")


def _numbers(text: str) -> Iterator[_Found]:
    """Yield every number written in digits. Raise if adjoining characters change its meaning."""
    position = 0
    while match := _NUMBER.search(text, position):
        before = text[: match.start()]
        if before and before[-1] not in _ALLOWED_BEFORE and not _UNSPACED.match(before[-1]):
            raise _NotOneValueError(f"a number follows {before[-1]!a} without a space")
        if re.search(r"[^\W_](?:\([^\w)]*|_\s*)$", before):
            raise _NotOneValueError("the number is an index or in a function call")
        power, end = _magnitude(text, match)
        if not _ALLOWED_AFTER.match(text, end):
            raise _NotOneValueError(f"a number is followed by {text[end]!a}")
        number = make_number(
            _is_negative(match, before),
            re.sub("[, ]", "", match["whole"] or ""),
            match["fraction"] or match["bare"] or "",
            _exponent(match["exponent"] or match["power"] or "0") + power,
        )
        yield _Found(number, match.start(), end)
        position = end


def _exponent(text: str) -> int:
    digits = text.lstrip("+- ").lstrip("0")
    if len(digits) > MAX_EXPONENT_DIGITS:
        raise _NotOneValueError("the exponent is too large")
    return int(digits or "0") * (-1 if text[0] == "-" else 1)


def _magnitude(text: str, match: re.Match[str]) -> tuple[int, int]:
    """Return the power of ten of "18 million" or "18k", and the end of the number."""
    suffix = _MAGNITUDE.match(text, match.end())
    if not suffix and match["currency"]:
        suffix = _MILLION_IN_MONEY.match(text, match.end())
    if not suffix:
        return 0, match.end()
    return _POWERS[suffix[suffix.lastindex or 0].lower()], suffix.end()


def _is_negative(match: re.Match[str], before: str) -> bool:
    sign = (match["sign"] or "") + (match["inner"] or "")
    marks = sign.replace(" ", "")
    word = re.search(r"(?i)\b(?:minus|negative)\s*$", before)
    if len(marks) + bool(word) > 1 or before.endswith(("-", "+")):
        raise _NotOneValueError("a number has two signs")
    if re.search(r"[0-9)]\s*[-+] ?$|\w\s*[-+] $", before + sign):
        # "Answer - 18" is a dash; "profit - 18" could be a subtraction.
        if marks == "-" and before.rstrip().lower().endswith(_LABELS):
            return False
        raise _NotOneValueError("the answer is unevaluated arithmetic")
    return marks == "-" or bool(word)


# --- numbers written in words -------------------------------------------------------------------

_UNITS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SMALL = {word: value for value, word in enumerate(_UNITS)}
_SMALL |= {word: value * 10 for value, word in enumerate(_TENS, start=2)}
_SMALL |= {"half a dozen": 6, "a dozen": 12}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NUMBER_WORD = "(?:" + "|".join([*_SMALL, "hundred", *_SCALES]) + ")"
_WORD_RUN = re.compile(
    rf"\b(?=[a-z])(?:a\s+(?=hundred|thousand|million|billion))?{_NUMBER_WORD}"
    rf"(?:(?:\s*-\s*|,?\s+(?:and\s+)?){_NUMBER_WORD})*\b",
    re.IGNORECASE,
)
_ANY_NUMBER = re.compile(rf"[0-9]|\b(?=[a-zA-Z])(?i:{_NUMBER_WORD}\b)")
_COUNTS = re.compile(r"(?:,|\b(?:and|or|point|less|0 to))\s*\Z")  # what "one" follows as a number


def _word_numbers(text: str, with_digits: bool) -> Iterator[_Found]:
    """Yield every number written in words, in lower-case `text`."""
    for match in _WORD_RUN.finditer(text):
        before = text[: match.start()]
        if with_digits and match[0] == "one" and not _COUNTS.search(before):
            continue  # a pronoun: "18 eggs for each one"
        value = _words_value(match[0])
        negative = bool(re.search(r"\b(?:minus|negative)\s*$", before))
        yield _Found(make_number(negative, str(value)), match.start(), match.end())


def _words_value(run: str) -> int:
    """Return the integer that a run of number words spells. Raise unless it spells exactly one."""
    total, group, last_scale = 0, 0, 10**15
    for word in re.findall(r"(?:half )?a dozen|[a-z]+", run):
        if word in ("a", "and"):
            group += word == "a"
        elif word == "hundred" and 0 < group < 100:
            group *= 100
        elif word in _SCALES and group and _SCALES[word] < last_scale:
            last_scale = _SCALES[word]
            total, group = total + group * last_scale, 0
        elif word in _SMALL and _fits(group, _SMALL[word], total):
            group += _SMALL[word]
        else:
            raise _NotOneValueError("the number words do not spell one number")
    return total + group


def _fits(group: int, value: int, total: int) -> bool:
    """Check whether `value` may follow in a group: "twenty" + "one", but not "two" + "three"."""
    if value == 0:
        return group == 0 and total == 0
    if value < 10:
        return group % 10 == 0 and group % 100 != 10
    return group % 100 == 0


# --- wording that changes what a number means ---------------------------------------------------

# Matched against the skeleton: lower case, with every number a single 0. The patterns stay close to
# the number, because "12 wrong answers" and "the difference between them is 12" are fine.
_DENIAL = (
    # Before the number; after it, only where it denies the number: "18 girls are not there".
    r"(?:\bnot\b(?! (?:sure|certain|counting|including)\b)|n't\b"
    r"|\b(?:never|neither|nor|cannot)\b)(?s:.*)0"
    r"|0\W+(?:\w+ ){0,3}?(?:not|never|cannot|\w+n't)\b(?=\W*$| (?:quite |be ){0,2}"
    r"(?:right|correct|true|valid|(?:the |my |an )(?:\w+ )?(?:answer|result|value|number)))"
    r"|\bnone\b(?! left)|\bno\s+(?:\w+\s+){0,2}0"
    r"|\b(?:is|was|are|be|'s) (?:\w+ )?(?:wrong|incorrect|false|untrue)\b"
    r"|\((?:wrong|incorrect|false)\)"
    r"|\b(?:wrong|incorrect|false) (?:answer|result|value|number)\b"
    r"|\b(?:anything|everything|all) (?:but|except)\b"
    r"|\b(?:except|instead of|rather than|other than|far from|unlike)\s+(?:\w+\s+){0,3}0"
)
# A "not" that denies something else. It describes the thing counted: "students who did not pass:
# 18", "the money she didn't spend is 18", "eggs not eaten: 18". Or it is part of a reason that
# comes first: "Since he cannot buy half a can, he needs 18."
_AUXILIARY = r"(?:do|does|did|are|were|have|has|had|can|could|will|would)"
_OTHER_DENIAL = re.compile(
    rf"(?:\b(?:who|which|that) (?:[a-z]+ ){{0,2}}?(?:{_AUXILIARY}(?:n't| not)|can't|won't|cannot"
    r"|(?:have |had )?never|(?:are )?neither\b[a-z ]{1,40}\bnor)|\bwho (?:is|was)(?:n't| not)"
    rf"|\b{_AUXILIARY}(?:n't| not)(?= [a-z]+(?: (?:on|for|with|at|in)(?: [a-z]+)?| yet)?"
    r" (?:is|was)\b)"
    r"|(?<!\bis )(?<!\bare )(?<!\bwas )(?<!\bwere )(?<!\bbe )(?<!\bbeen )(?<!'s )(?<!'re )"
    r"\bnot(?= [a-z]+(?:ed|en|ing| is| are| was| were)\b))"
    r"(?! (?:right|correct|true|valid|accurate|think|believe|say|the|an?|it|be(?= ?[:=]))\b)"
    r"(?=[a-z' -]{1,80}(?:\b(?:is|are|was|were|equals)|[:=])[\s$]*0)"
    r"|\A(?:since|because|as) [a-z' -]{1,80},(?= [a-z])"
)
_WORDING = [
    (
        "the answer names alternatives",
        r"\bor\s+(?:\w+\s+){0,2}0|0,? or\b(?! so\b)|\bor\W*$|\beither\s+(?:\w+\s+)?0"
        r"|\bor (?:more|less|fewer|greater|above|over|higher|below|under|lower|not|maybe)\b",
    ),
    (
        "the answer is a bound, not a value",
        r"\bat (?:least|most)\b(?! (?:once|twice)\b)|\b(?:upwards|shy|in excess) of\b"
        r"|\b(?:short|north|south) of 0|0 (?:-(?:odd|plus|some\w*)|-?ish)\b"
        # "The coins add up to 18" and "it takes 18 days to catch up to him" are values.
        r"|(?<!\badd )(?<!\badds )(?<!\bsum )(?<!\bsums )(?<!\bcatch )(?<!\bsign )\bup to\b"
        r"|\b(?:than|between)\s+(?:\w+\s+)?0"
        r"|\b(?:over|under|above|below|beyond|almost|nearly|within|exceed(?:s|ing)?)"
        r"\s+(?:the\s+|an?\s+)?0"
        r"|\bfrom 0 ?$|\band (?:up|above|over|more|below|under|less)\W*$"
        r"|\b(?:maybe|perhaps|possibly) (?:more|less|fewer)\b",
    ),
    (
        "the answer is a fraction or a mixed number",
        r"\band (?:an? |0 )?half\b|\bhalf (?:of |an? |past )?0|\b0 half\b(?!-)"
        r"|\b(?:an?|0)[ -]+(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth"
        r"|\w+teenth|\w+tieth|hundredth|thousandth)\b(?! grade)"
        r"|\b(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|\w+teenth|\w+tieth|hundredth"
        r"|thousandth)s\b"
        r"|\band (?:a bit|a fraction|some|change)\b|\bpoint\s+0",
    ),
    (
        "the answer is a placeholder",
        r"\bgoes here\b|\b(?:answer|number|integer|value|result)[ _]here\b|\bplaceholder\b"
        r"|\binsert\b|\bfill in (?:(?:the|your|an?) )?(?:answer|number|value|result|blanks?|0)",
    ),
    (
        "the answer gives instructions to the grader",
        r"\b(?:ignore|disregard|override|bypass)\b|(?<!th )(?<!st )(?<!nd )(?<!rd )\bgraders?\b"
        r"|\b(?:evaluator|verifier)s?\b|(?<!0 )\binstructions?\b|\b(?:system prompt|ground truth)\b"
        r"|\bfull (?:marks?|credit|score|points)\b|\b(?:max|maximum) reward\b"
        r"|\b(?:give|assign|grant|set|return|output) (?:\w+ ){0,2}(?:reward|credit|correct|true)\b"
        r"|\b(?:mark|count|treat|accept|consider|score|grade|rate|judge|award)"
        r" (?:this|it|me|my|as|the answer|correct)\b|\baccept (?:any|all|every|both)\b"
        r"|\bif (?:the )?(?:gold|reference|expected|target)\b",
    ),
    (
        "the answer is scaled by a word",
        rf"\b(?:{_SCALE})s?\b|\b0 \((?:in )?[kbt]\)"
        r"|\b0 (?:grand|thou)\W*$|\b0 ?(?:per ?mille?|basis points?|bps)\b"
        r"|\b(?:twice|thrice|double|triple|quadruple)\s+(?:\w+\s+)?0"
        r"|\b0 twice\b|\b0\W+(?:\w+\W+)?(?:(?:halv|doubl|tripl|quadrupl|squar|cub)ed"
        r"|(?:cut|split|divided|multiplied) (?:by|in half))\b"
        r"|\b(?:in )?(?:hex|hexadecimal|octal|binary)\W*$",
    ),
    (
        "the sign is unclear",
        # "-x = 18" gives the negative of x.
        r"\b(?:minus|negative)\b(?! 0)|(?<!\w)-(?:[a-z]|\s[a-z]\b)[^=]*="
        r"|\bin (?:the red|debt|deficit|arrears)\W*$|\boverdrawn\b|\bbelow freezing\b",
    ),
]
_ARITHMETIC = (
    "the answer is unevaluated arithmetic",
    r"\b0\s+(?:plus|minus)\b|\bplus\s+0"
    r"|\b(?:square|cube) root\b|\bfactorial\b|0 ?-\s*$"
    r"|\b(?:square|cube|root|reciprocal|inverse|opposite|negative|logarithm|log) of (?:the )?0"
    # At the start or after "=", where "they log 18 hours" does not stand.
    r"|(?:\A|[=:(])\s*(?:log|ln|lg|exp|sin|cos|tan|abs|sqrt)\b\s*(?:0|[a-z]\s*=)"
    r"|\+|[*/][\s(]*0|0\s*(?:times\s+)?(?:[xyn]|pi|sin|cos|ln|sqrt)\b"
    r"|0 ?(?:[-*]|/ ) ?[b-hj-z]\b"
    # A minus separated from its number by a bracket: "-(12)".
    r"|(?:^|[=:()])\s*-\W*0"
    # A bracket that is multiplied or divided: "(18)/x".
    r"|\)\s*[*/(]",
)


def _refuse_by_wording(skeleton: str, rules: list[tuple[str, str]]) -> None:
    if sign := _FORBIDDEN_SIGN.search(skeleton):
        raise _NotOneValueError(f"the answer contains {sign[0]!a}")
    if re.search(_DENIAL, _OTHER_DENIAL.sub("", skeleton)):
        raise _NotOneValueError("the answer is negated")
    for reason, pattern in rules:
        if re.search(pattern, skeleton):
            raise _NotOneValueError(reason)


# --- a true equation states one value -----------------------------------------------------------

_ARITHMETIC_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]+)?|[-+*/()√]")
_MAX_OPERANDS = 20
_MAX_OPERAND_DIGITS = 15
# Units are removed before evaluation. A letter that may be a variable, factor or digit is not one.
_NO_UNIT = re.compile(rf"[^\W\d_][0-9]|[0-9](?:{_MAGNITUDE.pattern}|[^\W\d_](?![^\W\d_]))")
_UNIT = re.compile(r"/? ?[^\W\d_]+|[%°:]|[.,]?\s*$")


def _equation_value(text: str) -> Number | None:
    """Return the value of a true equation such as "9 * 2 = 18"; None for any other text."""
    text = re.sub(rf"{_CURRENCY}|(?<=[0-9]),(?=[0-9]{{3}}(?![0-9]))", "", text)
    text = text.replace("sqrt", "√")
    text = re.sub(r"(?<=[0-9]) *(?:[xX]|times) *(?=[0-9])|(?<=[0-9)]) *(?=[(√])", "*", text)
    if _NO_UNIT.search(text) or _WORD_RUN.search(text.lower()):
        return None
    sides = [_UNIT.sub(" ", side).strip() for side in text.split("=")]
    values = [_evaluate(side) for side in sides if re.search("[0-9]", side)]
    last = _PLAIN.fullmatch(sides[-1].replace(" ", ""))
    if None in values or len(values) < 2 or len(set(values)) > 1 or not last:
        return None
    _refuse_by_wording(re.sub(r"√?\(?[0-9]+", "0", text).lower(), _WORDING)
    return make_number(last[1] == "-", last[2], last[3] or "")


def _evaluate(text: str) -> Fraction | None:
    """Evaluate a short expression of + - * / and brackets; None if it is anything else."""
    tokens = _ARITHMETIC_TOKEN.findall(text)
    bounded = len(tokens) <= 2 * _MAX_OPERANDS and all(
        len(token) <= _MAX_OPERAND_DIGITS for token in tokens
    )
    if not bounded or "".join(tokens) != re.sub(r"\s", "", text):
        return None
    tokens.reverse()  # so that pop() returns the next token
    try:
        value = _sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return None if tokens else value


def _sum(tokens: list[str]) -> Fraction:
    value = _product(tokens)
    while tokens and tokens[-1] in "+-":
        value = value + _product(tokens) if tokens.pop() == "+" else value - _product(tokens)
    return value


def _product(tokens: list[str]) -> Fraction:
    value = _operand(tokens)
    while tokens and tokens[-1] in "*/":
        value = value * _operand(tokens) if tokens.pop() == "*" else value / _operand(tokens)
    return value


def _operand(tokens: list[str]) -> Fraction:
    token = tokens.pop()
    if token == "-":
        return -_operand(tokens)
    if token == "√":
        square = _operand(tokens)
        root = Fraction(isqrt(square.numerator), isqrt(square.denominator))
        if root * root != square:
            raise ValueError("not a square")
        return root
    if token == "(":
        value = _sum(tokens)
        if tokens.pop() != ")":
            raise ValueError("unbalanced brackets")
        return value
    return Fraction(token)
