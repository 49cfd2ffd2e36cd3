"""Wording that must not come back: phrases that read as translated, and docstrings without a verb.

Covers every tracked text file of the project. Data, golden files and this file are exempt.
"""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = {".css", ".html", ".j2", ".js", ".json", ".md", ".py", ".toml", ".txt", ".yaml", ""}
EXEMPT = (
    "tests/test_plain_english.py",
    "tests/golden/",
    "benchmarks/results/",
    "LICENSE",
)

# A pattern, and what to write instead. `_` counts as a gap, so names are covered too.
PHRASES = {
    r"mend(?:s|ed|ing)?": "fix",
    r"(?:go|goes|going|went|gone) on": "resume, continue, or proceed",
    r"(?<!left )(?<!leave )(?<!leaves )behind": "after",
    r"beside": "next to, besides, alongside, or compared with",
    r"so man(?:y|ieth)": "N, that many, or every N steps",
    r"anew": "again",
    r"(?<!there )(?<!There )(?:is|are|was|were) no (?!longer|more|less|fewer|better|worse)\w+": (
        "is not a ..."
    ),
    r"(?:is|are|was|be|stays?|left|and) whole(?![ ]\w)|whole (?:checkpoint|save)s?": (
        "complete, or intact"
    ),
    r"sa(?:ys?|ying|id) (?:what|whether|of)": "name the fact: reports, shows, explains",
    r"looks? whether": "checks whether",
    r"(?<!line )(?<!lines )of (?:its|their) own": "separate, or its own ...",
    r"ails?": "is wrong with",
    r"shall": "must, should, or will",
    r"torn": "incomplete",
    r"outliv(?:e|es|ed|ing)": "survives, or tolerates",
    r"patiently": "with retries",
    r"by the way": "(leave it out)",
    r"at hand": "available",
    r"(?:than|those that|all that) there (?:is|are|was)": "than available, or all",
    r"stands? (?:in|there|at|on|before)": "is in",
    r"lays? .{0,20}over each other|laid over each other": "overlays",
    r"(?:completion|token|step|prompt|batch|nat|byte)s an? "
    r"(?:completion|token|step|prompt|batch|group|parameter|weight|second)": "... per ...",
    r"(?:line|number|weight|one|once|entry|row|verdict|seed|room|seconds)s? an? "
    r"(?:completion|token|step|prompt|batch|group|question|problem|run)": "... per ...",
    r"(?:models?|quickstart|it) wants?": "needs",
    r"made of (?:what|those|their|its|that|them|all)": "made from, or based on",
    r"round (?:a|the|one|all)": "around",
    r"less (?:the|its) (?:group|mean|average)": "minus",
    r"come(?:s)? (?:out )?even": "divide evenly",
    r"breaks? off|broken off": "fails",
    r"(?:the )?way (?:through|works?)|whole way": "the pipeline",
    r"why_not_(?:whole|merged|packed)": "incomplete_reason, merge_obstacle, unpacked_reason",
    r"saying_how\w*|outlived_\w+|branches_that_pay": "a verb, such as print_resume_hint",
}
PATTERNS = [
    (re.compile(rf"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])", re.IGNORECASE), instead)
    for pattern, instead in PHRASES.items()
]
# No docstring starts with these. A function's starts with a verb: "Load the tokenizer."
NEVER_FIRST = re.compile(r"(?:What|Whether|How|Say|So|Where|Which|Why)\b")
NOT_A_VERB = re.compile(
    r"(?:The|A|An|All|Every|Each|One|Those|That|This|These|It|Some|Any|No|Both|Several|Everything"
    r"|Rows|Tokens?|Number|Bytes|Text|Completions|Seconds|Weights|Share|Mean|Length)\b|[(a-z0-9]"
)


def covered_files():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    return [
        name
        for name in names
        if Path(name).suffix in TEXT and not name.startswith(EXEMPT) and (ROOT / name).is_file()
    ]


def test_no_phrase_comes_back():
    found = []
    for name in covered_files():
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            for pattern, instead in PATTERNS:
                if match := pattern.search(line):
                    found.append(f"{name}:{number}: {match[0]!r}: write {instead}")
    assert not found, "\n".join(["plain English, please:", *found])


def is_property(node):
    names = [getattr(part, "id", getattr(part, "attr", "")) for part in node.decorator_list]
    return "property" in names or "cached_property" in names


def docstring_problems(text, is_test):
    """Yield the line and the first line of each docstring that starts with the wrong word."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, *functions)):
            continue
        first = (ast.get_docstring(node) or "").partition("\n")[0]
        needs_verb = isinstance(node, functions) and not is_test and not is_property(node)
        if NEVER_FIRST.match(first) or (needs_verb and NOT_A_VERB.match(first)):
            yield getattr(node, "lineno", 1), first


def test_docstrings_start_with_a_verb():
    found = [
        f"{name}:{number}: {first!r}: start with a verb"
        for name in covered_files()
        if name.endswith(".py")
        for number, first in docstring_problems(
            (ROOT / name).read_text(encoding="utf-8"), is_test=name.startswith("tests/")
        )
    ]
    assert not found, "\n".join(["plain English, please:", *found])


@pytest.mark.parametrize(
    ("line", "caught"),
    [
        ("mend the reward and go on with --resume", True),
        ("def memory_mend(self):", True),
        ("recommended and amended", False),
        ("there is no GPU", False),
        ("question is no text", True),
        ("it is no longer needed", False),
        ("the last checkpoint is whole", True),
        ("the whole completion has one answer", False),
        ("a process of its own", True),
        ("each tag on a line of its own", False),
        ("a lock that its holder left behind", False),
        ("text behind the answer", True),
        ("64 completions a step", True),
        ("a step of the policy", False),
    ],
)
def test_the_patterns_are_precise(line, caught):
    assert any(pattern.search(line) for pattern, _ in PATTERNS) is caught
