"""Sentence patterns and words for `quickstart.problems`.

A template is a question followed by one answer line per step. `{a}`, `{b}` and `{c}` are the
numbers in the order of the calculation, and `{step}` is the calculation. The test patterns ask for
the same skills as the training patterns, in sentences that training never shows. All patterns draw
people, things and containers from the same lists, so no noun hints at an operation.
"""

from typing import NamedTuple

Template = tuple[str, ...]


class Person(NamedTuple):
    """A name and the pronouns that go with it."""

    name: str
    subject: str
    object: str
    possessive: str


class Noun(NamedTuple):
    """A countable noun. Numbers in a problem are never below 2, so most uses are plural."""

    singular: str
    plural: str


_SHE = (
    "Ana",
    "Mia",
    "Lena",
    "Sara",
    "Zoe",
    "Nora",
    "Ruth",
    "Priya",
    "Aisha",
    "Yuki",
    "Clara",
    "Ivy",
    "Rosa",
    "Emma",
)
_HE = (
    "Tom",
    "Ben",
    "Omar",
    "Leo",
    "Sam",
    "Paul",
    "Max",
    "Juan",
    "Kofi",
    "Ivan",
    "Noah",
    "Ravi",
    "Hugo",
    "Eli",
)
PEOPLE = tuple(
    [Person(name, "she", "her", "her") for name in _SHE]
    + [Person(name, "he", "him", "his") for name in _HE]
)

# Small, sturdy and sold anywhere: each can be bought, lost, shared, packed and put on a table.
_THINGS = (
    "apple",
    "orange",
    "lemon",
    "egg",
    "cookie",
    "book",
    "card",
    "sticker",
    "stamp",
    "ribbon",
    "marble",
    "bead",
    "button",
    "shell",
    "pencil",
    "crayon",
    "candle",
    "toy",
    "ticket",
    "magnet",
)
THINGS = tuple(Noun(word, word + "s") for word in _THINGS)

CONTAINERS = (
    Noun("box", "boxes"),
    Noun("bag", "bags"),
    Noun("jar", "jars"),
    Noun("basket", "baskets"),
    Noun("crate", "crates"),
    Noun("tin", "tins"),
)

TRAIN: dict[str, tuple[Template, ...]] = {
    "add": (
        (
            "{name} has {a} {things}. {other} gives {her} {b} more. "
            "How many {things} does {name} have now?",
            "{name} has {step} {things}.",
        ),
        (
            "There are {a} {things} in one {box} and {b} {things} in another {box}. "
            "How many {things} are there in total?",
            "There are {step} {things}.",
        ),
        (
            "{name} finds {a} {things} in the morning and {b} {things} in the afternoon. "
            "How many {things} does {name} find that day?",
            "{name} finds {step} {things}.",
        ),
        (
            "{name} has {a} {things} and {other} has {b} {things}. "
            "How many {things} do they have together?",
            "Together they have {step} {things}.",
        ),
        (
            "A shop sold {a} {things} on Monday and {b} {things} on Tuesday. "
            "How many {things} did the shop sell on both days together?",
            "The shop sold {step} {things}.",
        ),
        (
            "{name} had {a} {things} and bought {b} more at the market. "
            "What is the number of {things} that {name} has now?",
            "{name} has {step} {things}.",
        ),
        (
            "{name} gave {a} {things} to {other} and still has {b} {things}. "
            "How many {things} did {name} have at first?",
            "At first {name} had {step} {things}.",
        ),
        (
            "{other} has {a} {things}. {name} has {b} more {things} than {other}. "
            "How many {things} does {name} have?",
            "{name} has {step} {things}.",
        ),
        (
            "{name} put {a} small {things} and {b} large {things} on a table. "
            "How many {things} did {she} put on the table?",
            "{name} put {step} {things} on the table.",
        ),
        (
            "A {box} had {a} {things} in it, and {name} put in {b} more. "
            "How many {things} are in the {box} now?",
            "The {box} has {step} {things} in it.",
        ),
        (
            "{name} paid {a} dollars for some {things} and {b} dollars for a {box}. "
            "How many dollars did {she} pay in all?",
            "{name} paid {step} dollars.",
        ),
        (
            "Yesterday {name} counted {a} {things}, and today {she} counted {b} others. "
            "How many {things} did {she} count altogether?",
            "{name} counted {step} {things}.",
        ),
    ),
    "subtract": (
        (
            "{name} has {a} {things}. {She} gives {b} {things} to {other}. "
            "How many {things} does {name} have left?",
            "{name} has {step} {things} left.",
        ),
        (
            "There are {a} {things} in a {box}. {name} takes out {b} of them. "
            "How many {things} stay in the {box}?",
            "In the {box} there are {step} {things}.",
        ),
        (
            "{name} has {a} {things} and {other} has {b} {things}. "
            "How many more {things} does {name} have than {other}?",
            "{name} has {step} more {things}.",
        ),
        (
            "A shop had {a} {things} and sold {b} of them on Monday. "
            "How many {things} were not sold on Monday?",
            "The shop did not sell {step} {things}.",
        ),
        (
            "{name} lost {b} of {possessive} {a} {things}. "
            "How many {things} does {she} still have?",
            "{name} still has {step} {things}.",
        ),
        (
            "{name} wants to have {a} {things} but has only {b}. "
            "How many more {things} does {she} need?",
            "{name} needs {step} more {things}.",
        ),
        (
            "There are {a} {things} on a table. {b} of them are small and the rest are large. "
            "How many of the {things} are large?",
            "There are {step} large {things}.",
        ),
        (
            "{name} had {a} dollars and spent {b} dollars on {things}. "
            "How many dollars does {name} have now?",
            "{name} has {step} dollars.",
        ),
        (
            "{name} and {other} have {a} {things} together. {b} of the {things} belong to {name}. "
            "How many belong to {other}?",
            "{other} has {step} {things}.",
        ),
        (
            "{name} bought {a} {things} in two days. On the first day {she} bought {b} of them. "
            "How many {things} did {she} buy on the second day?",
            "On the second day {name} bought {step} {things}.",
        ),
        (
            "{name} has {a} {things}. {other} has {b} fewer {things} than {name}. "
            "How many {things} does {other} have?",
            "{other} has {step} {things}.",
        ),
        (
            "Of the {a} {things} that {name} bought, {b} were broken. "
            "How many {things} were not broken?",
            "There were {step} {things} that were not broken.",
        ),
    ),
    "multiply": (
        (
            "{name} has {a} {boxes} with {b} {things} in each {box}. "
            "How many {things} does {name} have?",
            "{name} has {step} {things}.",
        ),
        (
            "One {thing} costs {a} dollars. How many dollars do {b} {things} cost?",
            "The {things} cost {step} dollars.",
        ),
        (
            "{name} buys {a} {things} every day for {b} days. "
            "How many {things} does {she} buy in all?",
            "{name} buys {step} {things}.",
        ),
        (
            "There are {a} rows of {things} on a table with {b} {things} in every row. "
            "How many {things} are there in total?",
            "There are {step} {things}.",
        ),
        (
            "{name} gives {a} {things} to each of {b} friends. "
            "How many {things} does {she} give away?",
            "{name} gives away {step} {things}.",
        ),
        (
            "{other} has {a} {things}. {name} has {b} times as many {things} as {other}. "
            "How many {things} does {name} have?",
            "{name} has {step} {things}.",
        ),
        (
            "Each {box} holds {a} {things}. How many {things} can {name} put in {b} {boxes}?",
            "{name} can put in {step} {things}.",
        ),
        (
            "A shop sells {a} {things} per hour. How many {things} does it sell in {b} hours?",
            "The shop sells {step} {things}.",
        ),
        (
            "A group of {a} children go to school, and each child brings {b} {things}. "
            "How many {things} do they bring together?",
            "Together they bring {step} {things}.",
        ),
        (
            "{name} puts {a} {things} on each of {b} tables. "
            "How many {things} are on the tables now?",
            "On the tables there are {step} {things}.",
        ),
        (
            "{name} earns {a} dollars for every {box} of {things} that {she} sells. "
            "How many dollars does {she} earn for {b} {boxes}?",
            "{name} earns {step} dollars.",
        ),
        (
            "{name} makes {a} trips to the market and brings back {b} {things} each time. "
            "How many {things} does {she} bring back altogether?",
            "{name} brings back {step} {things}.",
        ),
    ),
    "divide": (
        (
            "{name} shares {a} {things} equally among {b} friends. "
            "How many {things} does each friend get?",
            "Each friend gets {step} {things}.",
        ),
        (
            "{name} has {a} {things} and puts {b} {things} in each {box}. "
            "How many {boxes} does {she} need for all of them?",
            "{name} needs {step} {boxes}.",
        ),
        (
            "{name} paid {a} dollars for {b} {things} of the same price. "
            "How many dollars did one {thing} cost?",
            "One {thing} cost {step} dollars.",
        ),
        (
            "{name} puts {a} {things} on a table in {b} equal rows. "
            "How many {things} are in each row?",
            "In each row there are {step} {things}.",
        ),
        (
            "{name} has {a} {things} and gives away {b} every day. "
            "In how many days will all the {things} be gone?",
            "The {things} will be gone in {step} days.",
        ),
        (
            "There are {a} {things}, split evenly between {b} {boxes}. "
            "How many {things} are in each {box}?",
            "In each {box} there are {step} {things}.",
        ),
        (
            "One {thing} costs {b} dollars. How many {things} can {name} buy with {a} dollars?",
            "{name} can buy {step} {things}.",
        ),
        (
            "{name} found {a} {things} in {b} days, the same number each day. "
            "How many {things} did {she} find per day?",
            "{name} found {step} {things} per day.",
        ),
        (
            "{name} gives {b} {things} to each child and gives away {a} {things} in total. "
            "How many children get {things}?",
            "The {things} go to {step} children.",
        ),
        (
            "A group of {b} children bring {a} {things} to school, each child the same number. "
            "How many {things} does each child bring?",
            "Each child brings {step} {things}.",
        ),
        (
            "{name} has {a} {things}, which is {b} times as many as {other} has. "
            "How many {things} does {other} have?",
            "{other} has {step} {things}.",
        ),
        (
            "A shop has {a} {things} and sells them only in sets of {b}. "
            "How many sets does the shop have?",
            "The shop has {step} sets.",
        ),
    ),
    "add_subtract": (
        (
            "{name} has {a} {things} and buys {b} more. Then {she} gives {c} {things} to {other}. "
            "How many {things} does {name} have left?",
            "After buying more, {name} has {step} {things}.",
            "{name} has {step} {things} left.",
        ),
        (
            "There are {a} small {things} and {b} large {things} in a {box}. "
            "{name} takes out {c} of the {things}. How many {things} are still in the {box}?",
            "At first there are {step} {things}.",
            "Then there are {step} {things} in the {box}.",
        ),
        (
            "{name} found {a} {things} on Monday and {b} {things} on Tuesday, but lost {c} of them "
            "on Wednesday. How many of the {things} does {she} still have?",
            "{name} found {step} {things}.",
            "{name} still has {step} {things}.",
        ),
        (
            "{name} has {a} {things} and {other} has {b} {things}. Together they sell {c} of them. "
            "How many {things} do they have now?",
            "Together they had {step} {things}.",
            "Now they have {step} {things}.",
        ),
        (
            "{name} had {a} dollars and earned {b} dollars more. Then {she} paid {c} dollars for "
            "a {box} of {things}. How many dollars does {she} have now?",
            "Before paying, {name} had {step} dollars.",
            "{name} has {step} dollars now.",
        ),
    ),
    "multiply_add": (
        (
            "{name} has {a} {boxes} with {b} {things} in each {box}, and {c} {things} on a table. "
            "How many {things} does {name} have in total?",
            "In the {boxes} there are {step} {things}.",
            "In total {name} has {step} {things}.",
        ),
        (
            "{name} buys {a} {things} that cost {b} dollars each and a {box} that costs {c} "
            "dollars. How many dollars does {she} spend?",
            "The {things} cost {step} dollars.",
            "{name} spends {step} dollars.",
        ),
        (
            "{name} finds {a} {things} every day for {b} days, and then {other} gives {her} {c} "
            "more. How many {things} does {name} get in all?",
            "{name} finds {step} {things}.",
            "{name} gets {step} {things}.",
        ),
        (
            "There are {a} rows of {b} {things} on a table and {c} {things} in a {box}. "
            "How many {things} are there altogether?",
            "In the rows there are {step} {things}.",
            "Altogether there are {step} {things}.",
        ),
        (
            "Each of {a} children brings {b} {things} to school, and the teacher brings {c} "
            "{things}. How many {things} do they all bring together?",
            "The children bring {step} {things}.",
            "Together they bring {step} {things}.",
        ),
    ),
    "multiply_subtract": (
        (
            "{name} has {a} {boxes} with {b} {things} in each {box}. {She} gives {c} {things} to "
            "{other}. How many {things} does {name} have left?",
            "{name} has {step} {things} at first.",
            "{name} has {step} {things} left.",
        ),
        (
            "{name} buys {a} {things} every day for {b} days and then loses {c} of them. "
            "How many of the {things} does {she} still have?",
            "{name} buys {step} {things}.",
            "{name} still has {step} {things}.",
        ),
        (
            "There are {a} rows of {b} {things} on a table. {c} of the {things} are small and the "
            "rest are large. How many of the {things} are large?",
            "On the table there are {step} {things}.",
            "There are {step} large {things}.",
        ),
        (
            "{name} wants to give {a} {things} to each of {b} friends but has only {c} {things}. "
            "How many more {things} does {she} need?",
            "{name} wants to give {step} {things}.",
            "{name} needs {step} more {things}.",
        ),
        (
            "{name} sells {a} {things} for {b} dollars each and then spends {c} of these dollars. "
            "How many of the dollars are left?",
            "{name} gets {step} dollars for the {things}.",
            "There are {step} dollars left.",
        ),
    ),
    "add_divide": (
        (
            "{name} has {a} {things} and {other} has {b} {things}. They share all of them equally "
            "among {c} friends. How many {things} does each friend get?",
            "Together they have {step} {things}.",
            "Each friend gets {step} {things}.",
        ),
        (
            "{name} buys {a} small {things} and {b} large {things}. {She} puts {c} {things} in "
            "each {box}. How many {boxes} does {she} need for all of them?",
            "{name} buys {step} {things}.",
            "{name} needs {step} {boxes}.",
        ),
        (
            "{name} found {a} {things} on Monday and {b} {things} on Tuesday. {She} puts all of "
            "them in {c} equal rows. How many {things} are in each row?",
            "{name} found {step} {things}.",
            "In each row there are {step} {things}.",
        ),
        (
            "{name} had {a} dollars and earned {b} dollars more. One {thing} costs {c} dollars. "
            "How many {things} can {she} buy with all the money?",
            "{name} has {step} dollars.",
            "{name} can buy {step} {things}.",
        ),
        (
            "There are {a} {things} in one {box} and {b} {things} in another {box}. {name} splits "
            "all of them evenly between {c} children. How many {things} does each child get?",
            "There are {step} {things}.",
            "Each child gets {step} {things}.",
        ),
    ),
}

TEST: dict[str, tuple[Template, ...]] = {
    "add": (
        (
            "{name} owns {a} {things}, and {other} brings {her} {b} extra {things} as a present. "
            "How many {things} does {name} own after that?",
            "{name} owns {step} {things}.",
        ),
        (
            "On a shelf, {a} new {things} lie next to {b} old {things}. "
            "How many {things} lie on the shelf?",
            "On the shelf there are {step} {things}.",
        ),
        (
            "After giving away {a} {things}, {name} is left with {b} {things}. "
            "How many {things} were there to begin with?",
            "To begin with there were {step} {things}.",
        ),
        (
            "{name} needs {a} {things} for school and {b} {things} for home. "
            "How many {things} is that in all?",
            "In all that is {step} {things}.",
        ),
        (
            "{name} collected {a} {things}, and {other} collected {b} more than {name} did. "
            "How many {things} did {other} collect?",
            "{other} collected {step} {things}.",
        ),
    ),
    "subtract": (
        (
            "{name} owned {a} {things} until {she} gave away {b} of them. "
            "How many {things} are left?",
            "There are {step} {things} left.",
        ),
        (
            "On the way home {name} loses {b} {things} from a {box} of {a}. "
            "How many {things} are in the {box} at home?",
            "At home the {box} has {step} {things} in it.",
        ),
        (
            "{name} collected {a} {things}, and {other} collected {b}. "
            "By how many {things} is {name} ahead?",
            "{name} is ahead by {step} {things}.",
        ),
        (
            "A class must bring {a} {things} and has brought {b} so far. "
            "How many more {things} must the class bring?",
            "The class must bring {step} more {things}.",
        ),
        (
            "{name} looks at {a} {things}, and {b} of the {things} are old. "
            "How many of these {things} are new, if all the others are new?",
            "There are {step} new {things}.",
        ),
    ),
    "multiply": (
        (
            "Inside every one of {a} {boxes} there are {b} {things}. "
            "How many {things} is that altogether?",
            "Altogether that is {step} {things}.",
        ),
        (
            "At {a} dollars apiece, how many dollars must {name} pay for {b} {things}?",
            "{name} must pay {step} dollars.",
        ),
        (
            "For {a} weeks, {name} collects {b} {things} a week. "
            "How many {things} has {she} collected at the end?",
            "{name} has collected {step} {things}.",
        ),
        (
            "A team of {a} people needs {b} {things} per person. "
            "How many {things} does the team need?",
            "The team needs {step} {things}.",
        ),
        (
            "{name} owns {a} {things}, and {other} owns {b} times that number. "
            "How many {things} does {other} own?",
            "{other} owns {step} {things}.",
        ),
    ),
    "divide": (
        (
            "A team of {b} people divides {a} {things} so that everyone has the same number. "
            "How many {things} does one person have?",
            "One person has {step} {things}.",
        ),
        (
            "{name} needs {a} {things}, and they come in {boxes} of {b}. "
            "How many {boxes} must {she} buy?",
            "{name} must buy {step} {boxes}.",
        ),
        (
            "At {b} dollars apiece, {name} spends {a} dollars on {things}. "
            "How many {things} is that?",
            "That is {step} {things}.",
        ),
        (
            "{name} arranged {a} {things} on {b} shelves, equally many on every shelf. "
            "How many {things} lie on one shelf?",
            "On one shelf there are {step} {things}.",
        ),
        (
            "In {b} weeks {name} collected {a} {things}, always the same number a week. "
            "How many {things} did {she} collect in one week?",
            "In one week {name} collected {step} {things}.",
        ),
    ),
    "add_subtract": (
        (
            "In the morning a shop had {a} {things}. During the day it got {b} new ones and sold "
            "{c} {things}. How many {things} did it have in the evening?",
            "With the new ones the shop had {step} {things}.",
            "In the evening it had {step} {things}.",
        ),
        (
            "{name} puts {a} {things} and {other} puts {b} {things} into an empty {box}. Later {c} "
            "of these {things} fall out. How many {things} are left in the {box}?",
            "They put in {step} {things}.",
            "There are {step} {things} left in the {box}.",
        ),
        (
            "{name} collected {a} {things} at home and {b} {things} at school, and {c} of all "
            "these were broken. How many {things} were whole?",
            "{name} collected {step} {things}.",
            "There were {step} whole {things}.",
        ),
    ),
    "multiply_add": (
        (
            "{name} filled {a} {boxes} with {b} {things} each, and {c} {things} were left over. "
            "How many {things} were there to begin with?",
            "In the {boxes} there were {step} {things}.",
            "To begin with there were {step} {things}.",
        ),
        (
            "A team of {a} people collected {b} {things} per person, and {name} brought {c} extra "
            "{things}. How many {things} is that altogether?",
            "The team collected {step} {things}.",
            "Altogether that is {step} {things}.",
        ),
        (
            "At {a} dollars apiece, {name} bought {b} {things}. {She} also spent {c} dollars on "
            "the bus. How many dollars were spent in all?",
            "The {things} cost {step} dollars.",
            "In all {name} spent {step} dollars.",
        ),
    ),
    "multiply_subtract": (
        (
            "A shop got {a} {boxes} of {b} {things} and sold {c} {things} the same day. "
            "How many of these {things} did the shop keep?",
            "The shop got {step} {things}.",
            "The shop kept {step} {things}.",
        ),
        (
            "A team of {a} people needs {b} {things} per person and has brought {c} {things} so "
            "far. How many more {things} must the team bring?",
            "The team needs {step} {things}.",
            "The team must bring {step} more {things}.",
        ),
        (
            "For {a} weeks, {name} collected {b} {things} a week, and {c} of all these were "
            "broken. How many {things} were whole?",
            "{name} collected {step} {things}.",
            "There were {step} whole {things}.",
        ),
    ),
    "add_divide": (
        (
            "{name} owned {a} {things} and got {b} extra {things} as a present. {She} arranged all "
            "of them on {c} shelves, equally many on every shelf. How many {things} lie on one "
            "shelf?",
            "{name} had {step} {things}.",
            "On one shelf there are {step} {things}.",
        ),
        (
            "{name} needs {a} {things} for school and {b} {things} for home, and they come in "
            "{boxes} of {c}. How many {boxes} must {she} buy?",
            "{name} needs {step} {things}.",
            "{name} must buy {step} {boxes}.",
        ),
        (
            "{name} brings {a} {things} and {other} brings {b}. A team of {c} people divides them "
            "so that everyone has the same number. How many {things} does one person have?",
            "Together they bring {step} {things}.",
            "One person has {step} {things}.",
        ),
    ),
}
