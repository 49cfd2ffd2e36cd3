"""Sentence patterns and words for `quickstart.problems`.

A template is a question followed by one answer line per step. `{a}`, `{b}` and `{c}` are the
numbers in the order of the calculation, and `{step}` is the calculation. The test patterns ask for
the same skills as the training patterns, in sentences that training never shows. People, things and
containers come from lists that all patterns share, and nouns that a pattern names itself (pages,
seats, metres) occur with other operations too, so that none hints at an operation. The third split
is in `quickstart.unseen_templates`.
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


def people(she: tuple[str, ...], he: tuple[str, ...]) -> tuple[Person, ...]:
    """Return the people with these names."""
    return tuple(
        [Person(name, "she", "her", "her") for name in she]
        + [Person(name, "he", "him", "his") for name in he]
    )


def nouns(words: tuple[str, ...]) -> tuple[Noun, ...]:
    """Return nouns whose plural ends in s."""
    return tuple(Noun(word, word + "s") for word in words)


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
PEOPLE = people(_SHE, _HE)

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
THINGS = nouns(_THINGS)

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
        (
            "How many {things} did {name} have before {she} lost {a} of them, if {b} are left?",
            "Before that, {name} had {step} {things}.",
        ),
        (
            "A train carries {a} passengers. At the next station {b} people get on and nobody "
            "gets off. How many passengers does the train carry then?",
            "The train carries {step} passengers.",
        ),
        (
            "Find the number of pages that {name} read on Sunday if {she} read {a} pages before "
            "lunch and {b} pages after lunch.",
            "On Sunday {name} read {step} pages.",
        ),
        (
            "If {a} girls and {b} boys sing in the school choir, how many children sing in it?",
            "In the choir {step} children sing.",
        ),
        (
            "After {b} birds flew away, only {a} birds were left in the tree. "
            "How many birds were in the tree at the start?",
            "There were {step} birds in the tree.",
        ),
        (
            "A rope was cut into a piece of {a} metres and a piece of {b} metres. "
            "How many metres long was the rope before it was cut?",
            "The rope was {step} metres long.",
        ),
        (
            "{name} needs {b} more points to reach the goal that {she} set. {She} already has {a} "
            "points. What is the goal?",
            "The goal is {step} points.",
        ),
        (
            "Calculate how many minutes {name} worked: the maths homework took {a} minutes and "
            "the reading took {b} minutes.",
            "{name} worked for {step} minutes.",
        ),
        (
            "{other} wrote {a} letters, which is {b} fewer than {name} wrote. "
            "How many letters did {name} write?",
            "{name} wrote {step} letters.",
        ),
        (
            "Of the books in a small library, {a} are on loan and the other {b} are on the "
            "shelves. What is the total number of books that the library owns?",
            "The library owns {step} books.",
        ),
        (
            "The bus ride to school normally lasts {a} minutes, but because of the snow it took "
            "{b} minutes longer today. How many minutes did the ride last today?",
            "Today the ride lasted {step} minutes.",
        ),
        (
            "To fill an empty {box}, {name} put in {a} {things} and {other} put in the "
            "other {b}. How many {things} does the full {box} hold?",
            "The full {box} holds {step} {things}.",
        ),
        (
            "A recipe asks for {a} scoops of flour and {b} scoops of sugar. "
            "How many scoops does {name} have to measure out?",
            "{name} has to measure out {step} scoops.",
        ),
        (
            "{name} wants each of the {a} girls and {b} boys at a picnic to get a present. "
            "How many presents does {she} have to bring?",
            "{name} has to bring {step} presents.",
        ),
        (
            "On the left side of the garden path grow {a} tulips, and on the right side {b}. "
            "How many tulips grow along the path?",
            "Along the path grow {step} tulips.",
        ),
        (
            "In the workshop there is a board of {a} centimetres, but {name} needs a board that "
            "is {b} centimetres longer. What length does {she} need, in centimetres?",
            "{name} needs a board of {step} centimetres.",
        ),
        (
            "With a discount of {b} dollars, {name} paid only {a} dollars for a coat. "
            "How many dollars would {she} have paid without the discount?",
            "Without the discount {name} would have paid {step} dollars.",
        ),
        (
            "{name} sent {a} {things} to {other} and {b} {things} to a neighbour. "
            "Find how many {things} {she} sent away.",
            "{name} sent away {step} {things}.",
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
        (
            "There are {a} people on a bus. At the school {b} of them get off, and nobody "
            "gets on. How many people does the bus carry after that?",
            "After that the bus carries {step} people.",
        ),
        (
            "By how many points did {name} beat {other} if {name} scored {a} points and {other} "
            "scored {b}?",
            "{name} won by {step} points.",
        ),
        (
            "{name} is reading a book of {a} pages and has finished {b} of the pages. "
            "How many pages has {she} not read yet?",
            "{name} has not read {step} pages yet.",
        ),
        (
            "After getting {b} more {things} from {other}, {name} had {a} {things}. "
            "How many {things} did {name} have before?",
            "Before that, {name} had {step} {things}.",
        ),
        (
            "A class is made up of {a} children, of whom {b} are girls. Find the number of boys.",
            "The number of boys is {step}.",
        ),
        (
            "How many metres longer is a rope of {a} metres than a rope of {b} metres?",
            "The first rope is {step} metres longer.",
        ),
        (
            "Today {name} turns {a}. How old was {she} {b} years ago?",
            "{name} was {step} years old.",
        ),
        (
            "If {b} of the {a} seats in a theatre are taken, how many seats are free?",
            "There are {step} free seats.",
        ),
        (
            "Out of {a} eggs in the kitchen, {name} used {b} for a cake. "
            "Calculate how many eggs remain.",
            "In the kitchen {step} eggs remain.",
        ),
        (
            "By bike, {name} needs {b} minutes to get to school, while the walk takes {a} minutes. "
            "How many minutes does {she} save by taking the bike?",
            "{name} saves {step} minutes.",
        ),
        (
            "{name} bought {a} {things}, which is {b} more than {other} bought. "
            "How many {things} did {other} buy?",
            "{other} bought {step} {things}.",
        ),
        (
            "The total price of a lamp and a {box} is {a} dollars. The {box} alone costs {b} "
            "dollars. What is the price of the lamp?",
            "The price of the lamp is {step} dollars.",
        ),
        (
            "A tower has {a} stairs, and {name} has already climbed {b} of them. "
            "How many stairs must {she} still climb to reach the top?",
            "{name} must still climb {step} stairs.",
        ),
        (
            "In a hall {b} lamps are switched on. The hall has {a} lamps altogether. "
            "What is the number of lamps that are off?",
            "The number of lamps that are off is {step}.",
        ),
        (
            "{name} planted {a} seeds, but {b} of them were eaten by birds. "
            "How many of the seeds did the birds not eat?",
            "The birds did not eat {step} seeds.",
        ),
        (
            "A game lasts {a} minutes, and {b} minutes have been played. "
            "In how many minutes will the game end?",
            "The game will end in {step} minutes.",
        ),
        (
            "How many {things} must {other} buy to have as many as {name}, if {other} has {b} "
            "{things} and {name} has {a}?",
            "{other} must buy {step} {things}.",
        ),
        (
            "A {box} was filled with {a} {things}. Some children helped themselves, and in the "
            "end {b} {things} were left in it. How many {things} did the children take?",
            "The children took {step} {things}.",
        ),
        (
            "{name} began the year with {b} {things} and ended it with {a}. "
            "By how many {things} did {possessive} collection grow?",
            "The collection grew by {step} {things}.",
        ),
        (
            "The water in a pond was {a} centimetres deep in spring. During the dry summer the "
            "level fell by {b} centimetres. Find the depth after the summer.",
            "After the summer the pond was {step} centimetres deep.",
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
        (
            "If a bench seats {a} people, how many people can sit on {b} such benches?",
            "On the benches {step} people can sit.",
        ),
        (
            "{name} spends {a} days with a book and reads {b} pages a day. "
            "Find the number of pages that {she} reads.",
            "{name} reads {step} pages.",
        ),
        (
            "A train is made up of {a} cars, and every car has {b} windows. "
            "What is the total number of windows?",
            "The total number of windows is {step}.",
        ),
        (
            "A cake takes {b} eggs. Calculate how many eggs {name} uses for {a} cakes.",
            "{name} uses {step} eggs.",
        ),
        (
            "In the garden stand {a} apricot trees. {name} picks {b} apricots from every tree. "
            "How many apricots does {she} pick?",
            "{name} picks {step} apricots.",
        ),
        (
            "A rectangular floor is {a} slabs long and {b} slabs wide. "
            "How many slabs cover the floor?",
            "The floor is covered by {step} slabs.",
        ),
        (
            "How many kilometres does {name} run in {b} laps around a lake, if a lap is {a} "
            "kilometres long?",
            "{name} runs {step} kilometres.",
        ),
        (
            "{name} cut a whole rope into {a} pieces of {b} metres, and nothing was left over. "
            "How long was the rope, in metres?",
            "The rope was {step} metres long.",
        ),
        (
            "After {name} shared out all {possessive} {things} equally among {a} children, every "
            "child had {b} of them. How many {things} did {name} share out?",
            "{name} shared out {step} {things}.",
        ),
        (
            "{other} built a tower of {a} blocks. The tower that {name} built has {b} times that "
            "number of blocks. How many blocks did {name} use?",
            "{name} used {step} blocks.",
        ),
        (
            "The zoo charges {b} dollars per person. How many dollars must a family of {a} pay?",
            "The family must pay {step} dollars.",
        ),
        (
            "{name} looks after {a} rabbits on a farm. If every rabbit eats {b} carrots, "
            "how many carrots are eaten?",
            "The rabbits eat {step} carrots.",
        ),
        (
            "How many players take part in a contest between {a} teams of {b} players?",
            "In the contest {step} players take part.",
        ),
        (
            "Every minute {a} litres of water run out of a tank. "
            "What number of litres runs out in {b} minutes?",
            "In that time {step} litres run out.",
        ),
        (
            "To fill a {box}, {name} needs {b} {things}. {She} wants to fill {a} {boxes} of this "
            "size. How many {things} does {she} need?",
            "{name} needs {step} {things}.",
        ),
        (
            "Every shelf of a bookcase carries {b} books, and the bookcase has {a} shelves. "
            "How many books does the bookcase carry?",
            "The bookcase carries {step} books.",
        ),
        (
            "{name} played {b} rounds of a game and lost {a} points in each round. "
            "How many points did {she} lose in all?",
            "{name} lost {step} points.",
        ),
        (
            "{name} goes to football training {a} times a month. "
            "How many times does {she} go in {b} months?",
            "{name} goes {step} times.",
        ),
        (
            "There are {b} full {boxes}, and {name} takes {a} {things} out of every {box}. "
            "Find how many {things} {she} takes out.",
            "{name} takes out {step} {things}.",
        ),
        (
            "It takes {a} nails to build a birdhouse. In the workshop {name} builds {b} "
            "birdhouses. What number of nails does {she} use?",
            "{name} uses {step} nails.",
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
        (
            "If {a} people sit on benches and there are {b} people on every bench, "
            "how many benches are used?",
            "The people use {step} benches.",
        ),
        (
            "A book has {a} pages. How many days does {name} take to read it at {b} pages a day?",
            "{name} takes {step} days.",
        ),
        (
            "{name} cuts all of a rope of {a} metres into pieces that are {b} metres long. "
            "Find the number of pieces.",
            "The number of pieces is {step}.",
        ),
        (
            "The teacher makes teams of {b} from the {a} children of a sports club. "
            "How many teams are there?",
            "There are {step} teams.",
        ),
        (
            "Each cart on a farm has {b} wheels, and together the carts have {a} wheels. "
            "How many carts are on the farm?",
            "On the farm there are {step} carts.",
        ),
        (
            "A train goes {a} kilometres in {b} hours, always at the same speed. "
            "How many kilometres does it go in an hour?",
            "In an hour the train goes {step} kilometres.",
        ),
        (
            "How many minutes does it take to fill an empty tank of {a} litres if {b} litres flow "
            "in every minute?",
            "It takes {step} minutes.",
        ),
        (
            "Some children divide {a} {things} fairly, and every child ends up with {b}. "
            "How many children are there?",
            "There are {step} children.",
        ),
        (
            "{name} baked {b} pans of rolls, with equally many rolls in all pans. When they were "
            "done, {she} counted {a} rolls. How many rolls were in a pan?",
            "In a pan there were {step} rolls.",
        ),
        (
            "{name} makes chairs in a workshop and needs {b} nails for every chair. So far {she} "
            "has used {a} nails. Calculate how many chairs {she} has made.",
            "{name} has made {step} chairs.",
        ),
        (
            "In a parade {a} musicians march in {b} lines of equal length. "
            "What is the number of musicians in a line?",
            "In a line there are {step} musicians.",
        ),
        (
            "{name}'s rope is {b} times as long as {other}'s rope. {name}'s rope measures "
            "{a} metres. How many metres does {other}'s rope measure?",
            "{other}'s rope measures {step} metres.",
        ),
        (
            "How many times can {name} fill a can of {b} litres from a barrel that holds {a} "
            "litres of water?",
            "{name} can fill the can {step} times.",
        ),
        (
            "It takes {b} {boxes} of the same size, all full, to hold {name}'s {a} {things}. "
            "How many {things} fit in a {box}?",
            "In a {box} there is room for {step} {things}.",
        ),
        (
            "A kitchen wall is covered with {a} boards. "
            "If every row has {b} boards, how many rows of boards are on the wall?",
            "On the wall there are {step} rows of boards.",
        ),
        (
            "All the hens of a farmer laid the same number of eggs this week. There are {b} hens, "
            "and they laid {a} eggs in total. How many eggs did each hen lay?",
            "Each hen laid {step} eggs.",
        ),
        (
            "{name} has no {things} yet but adds {b} to {possessive} collection every week. "
            "After how many weeks will {she} own {a} {things}?",
            "{name} will own that many after {step} weeks.",
        ),
        (
            "For every right answer in a quiz a player gets {b} points. {name} got {a} points. "
            "How many of {possessive} answers were right?",
            "{name} had {step} right answers.",
        ),
        (
            "{name} spent {a} dollars on {things} at {b} dollars apiece. "
            "Find how many {things} {she} bought.",
            "{name} bought {step} {things}.",
        ),
        (
            "With {b} children and {a} {things}, what is the number of {things} per child if "
            "everybody gets the same number and no {things} remain?",
            "The number of {things} per child is {step}.",
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
        (
            "A bus sets off with {a} passengers. At the first stop {b} people get on, and at the "
            "second stop {c} people get off. How many passengers are on the bus then?",
            "After the first stop there are {step} passengers.",
            "After the second stop there are {step} passengers on the bus.",
        ),
        (
            "If {name} brings {a} {things} to a sale, {other} brings {b}, and {c} of all these "
            "{things} are sold, how many are not sold?",
            "They bring {step} {things} to the sale.",
            "Of these, {step} {things} are not sold.",
        ),
        (
            "A school choir consists of {a} girls and {b} boys. Today {c} of the children are "
            "ill. Find the number of children who can sing today.",
            "The choir has {step} children.",
            "Today {step} children can sing.",
        ),
        (
            "{name} joins a pipe of {a} metres to a pipe of {b} metres and then saws {c} metres "
            "off the end. How many metres long is the pipe now?",
            "At first the joined pipe is {step} metres long.",
            "Now it is {step} metres long.",
        ),
        (
            "The red team got {a} points before the break and {b} points after it. In the whole "
            "game the blue team got {c} points. By how many points did the red team win?",
            "The red team got {step} points.",
            "The red team won by {step} points.",
        ),
        (
            "A park has {c} oaks, and all its other trees are pines. If {a} trees stand in the "
            "north half of the park and {b} trees in the south half, how many pines are there?",
            "In the park there are {step} trees.",
            "There are {step} pines.",
        ),
        (
            "{name} needs {c} eggs for baking. There are {a} eggs in the fridge and {b} on the "
            "kitchen table. How many eggs will remain after the baking?",
            "Before the baking there are {step} eggs.",
            "After the baking {step} eggs will remain.",
        ),
        (
            "A coat costs {c} dollars. {name} has {a} dollars and gets {b} dollars from {other}. "
            "Calculate how many dollars {name} will keep after buying the coat.",
            "Before buying the coat, {name} has {step} dollars.",
            "{name} will keep {step} dollars.",
        ),
        (
            "{name} used {c} {things} at school today. {She} had taken {a} {things} from home and "
            "got {b} from the teacher. How many of these {things} did {she} not use?",
            "At school {name} had {step} {things}.",
            "{name} did not use {step} {things}.",
        ),
        (
            "A theatre has {a} seats downstairs and {b} seats upstairs. Tonight {c} of the seats "
            "are empty and all others are taken. What is the number of seats that are taken?",
            "The theatre has {step} seats.",
            "Tonight {step} seats are taken.",
        ),
        (
            "How many kilos of fruit did a farmer sell if {a} kilos of peaches and {b} kilos of "
            "cherries were picked, {c} kilos of this fruit were made into jam, and the rest was "
            "sold?",
            "There were {step} kilos of fruit.",
            "The farmer sold {step} kilos.",
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
        (
            "How many rolls does {name} bake if {she} fills {a} pans with {b} rolls each and "
            "bakes {c} rolls on a stone?",
            "In the pans {name} bakes {step} rolls.",
            "In all {name} bakes {step} rolls.",
        ),
        (
            "On a school trip {a} vans carry {b} children each, and {c} children go by train. "
            "Find the number of children on the trip.",
            "The vans carry {step} children.",
            "On the trip there are {step} children.",
        ),
        (
            "For {a} days {name} read {b} pages of a book per day, and now {c} pages are left. "
            "How many pages does the book have?",
            "{name} read {step} pages.",
            "The book has {step} pages.",
        ),
        (
            "A taxi ride costs {c} dollars plus {b} dollars for every kilometre. "
            "How many dollars does {name} pay for a ride of {a} kilometres?",
            "The kilometres cost {step} dollars.",
            "{name} pays {step} dollars for the ride.",
        ),
        (
            "From a long rope {name} cut off {a} pieces of {b} metres, and {c} metres remained. "
            "What was the length of the rope at first, in metres?",
            "The pieces were {step} metres long together.",
            "At first the rope was {step} metres long.",
        ),
        (
            "{name} had {a} times as many {things} as {other}, who had {b}. Then {name} found {c} "
            "more. How many {things} does {name} have now?",
            "At first {name} had {step} {things}.",
            "Now {name} has {step} {things}.",
        ),
        (
            "In a quiz every right answer is worth {b} points. {name} gives {a} right answers and "
            "also gets a bonus of {c} points. Calculate how many points {she} gets.",
            "For the answers {name} gets {step} points.",
            "With the bonus {name} gets {step} points.",
        ),
        (
            "In a classroom {c} chairs stand along the wall, and {b} chairs stand at each of the "
            "{a} tables. What is the total number of chairs?",
            "At the tables stand {step} chairs.",
            "The total number of chairs is {step}.",
        ),
        (
            "{name} kept only {c} of {possessive} {things}, because {she} gave {b} {things} to "
            "each of {a} cousins. How many {things} did {name} own before?",
            "The cousins got {step} {things}.",
            "Before that, {name} owned {step} {things}.",
        ),
        (
            "A farm has {a} stables with {b} sheep in each. If the {c} sheep in the meadow are "
            "counted as well, how many sheep are on the farm?",
            "In the stables there are {step} sheep.",
            "On the farm there are {step} sheep.",
        ),
        (
            "{name} swam {c} laps on Sunday. Before that, {she} had gone swimming {a} times and "
            "had swum {b} laps each time. How many laps did {she} swim altogether?",
            "Before Sunday {name} swam {step} laps.",
            "Altogether {name} swam {step} laps.",
        ),
        (
            "To build a garden fence, {name} needs {b} nails for every panel and {c} nails for "
            "the gate. The fence has {a} panels and a gate. How many nails does {she} need?",
            "The panels need {step} nails.",
            "{name} needs {step} nails for the fence.",
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
        (
            "If {c} seats are taken in a hall with {a} rows of {b} seats, how many seats are free?",
            "The hall has {step} seats.",
            "There are {step} free seats.",
        ),
        (
            "{name} bakes {a} pans of buns, with {b} buns in every pan. {c} of the buns "
            "are eaten at a picnic. Find the number of buns that remain.",
            "{name} bakes {step} buns.",
            "After the picnic {step} buns remain.",
        ),
        (
            "A book has {a} chapters of {b} pages. {name} has {c} pages left to read. "
            "How many pages has {she} read?",
            "The book has {step} pages.",
            "{name} has read {step} pages.",
        ),
        (
            "A club with {c} members travels in {a} vans that have {b} seats each. "
            "How many seats stay empty?",
            "In the vans there are {step} seats.",
            "Of these, {step} seats stay empty.",
        ),
        (
            "A {box} of {things} costs {b} dollars. {name} takes {a} {boxes} and gets a discount "
            "of {c} dollars on the total. How many dollars does {she} pay?",
            "Without the discount the {boxes} cost {step} dollars.",
            "{name} pays {step} dollars.",
        ),
        (
            "{name} had planned to run {b} kilometres on each of {a} days, but in total {she} "
            "ran {c} kilometres less than planned. How many kilometres did {she} run?",
            "The plan was to run {step} kilometres.",
            "{name} ran {step} kilometres.",
        ),
        (
            "{other} has {c} {things}, while {name} has {a} {boxes} of {b} {things}. "
            "How many more {things} does {name} have than {other}?",
            "{name} has {step} {things}.",
            "{name} has {step} more {things} than {other}.",
        ),
        (
            "In a game {name} hit the target {a} times and got {b} points for each hit, but lost "
            "{c} points at the end. What was {possessive} final number of points?",
            "For the hits {name} got {step} points.",
            "The final number of points was {step}.",
        ),
        (
            "A wall will be covered with {a} rows of boards, {b} boards to a row. After {name} has "
            "put up {c} boards, how many boards are still missing?",
            "The wall needs {step} boards.",
            "There are {step} boards still missing.",
        ),
        (
            "A gardener set {b} bulbs in each of {a} pots. All but {c} of the bulbs came up. "
            "How many bulbs came up?",
            "In the pots there were {step} bulbs.",
            "Of these, {step} bulbs came up.",
        ),
        (
            "Calculate how many metres of rope are not used if {name} buys {a} ropes of {b} metres "
            "and uses {c} metres in all.",
            "{name} buys {step} metres of rope.",
            "Of the rope, {step} metres are not used.",
        ),
        (
            "On a farm {a} hens laid {b} eggs each this month. {name} collected the eggs but "
            "dropped {c} of them. How many eggs did {she} not drop?",
            "The hens laid {step} eggs.",
            "{name} did not drop {step} eggs.",
        ),
        (
            "With the {c} {things} that {name} bought today, {she} has exactly enough to fill {a} "
            "{boxes} with {b} {things} each. How many {things} did {name} have before today?",
            "The {boxes} hold {step} {things}.",
            "Before today {name} had {step} {things}.",
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
        (
            "On sports day {a} girls and {b} boys form teams of {c} children. "
            "How many teams are there?",
            "There are {step} children.",
            "The children form {step} teams.",
        ),
        (
            "If {name} wants to read a story of {a} pages and another story of {b} pages, how "
            "many days does {she} need at {c} pages a day?",
            "The stories have {step} pages together.",
            "{name} needs {step} days.",
        ),
        (
            "{name} picked {a} kilos of peaches, and {other} picked {b} kilos. They put all the "
            "peaches into crates of {c} kilos. Find the number of crates.",
            "Together they picked {step} kilos of peaches.",
            "The number of crates is {step}.",
        ),
        (
            "A club pays {a} dollars for a bus and {b} dollars for a guide. The {c} members split "
            "the cost evenly. How many dollars is that per member?",
            "The whole cost is {step} dollars.",
            "That is {step} dollars per member.",
        ),
        (
            "There are {c} seats for passengers in every van. How many vans carry {a} children "
            "and {b} adults if no seat stays empty?",
            "There are {step} passengers.",
            "The passengers need {step} vans.",
        ),
        (
            "Calculate how many {things} each of {c} children gets when {a} {things} from {name} "
            "and {b} {things} from {other} are shared out equally.",
            "The children share {step} {things}.",
            "Each child gets {step} {things}.",
        ),
        (
            "{name} had {a} litres of juice and made {b} litres more. {She} poured all of the "
            "juice into jugs of {c} litres. How many jugs did {she} fill?",
            "{name} had {step} litres of juice.",
            "{name} filled {step} jugs.",
        ),
        (
            "The kitchen needs {a} boards and the hall needs {b} boards. A worker who lays {c} "
            "boards per hour does both rooms. How many hours does the work take?",
            "Both rooms together need {step} boards.",
            "The work takes {step} hours.",
        ),
        (
            "An empty train of {c} cars picked up {a} people at the first station and {b} people "
            "at the second. All cars had equally many people then. How many people were in a car?",
            "On the train there were {step} people.",
            "In a car there were {step} people.",
        ),
        (
            "A cake takes {c} eggs. {name} has {a} eggs in the kitchen and gets {b} eggs from a "
            "farm. How many cakes can {she} bake with all the eggs?",
            "{name} has {step} eggs.",
            "{name} can bake {step} cakes.",
        ),
        (
            "{name} had {a} {things}, and {other} gave {her} {b} {things} as a present. Now {name} "
            "has {c} times as many as {possessive} cousin. How many {things} does the cousin have?",
            "Now {name} has {step} {things}.",
            "The cousin has {step} {things}.",
        ),
        (
            "It took {name} {c} days to send {a} letters and {b} cards to friends, and every day "
            "the same number of messages was sent. What was the number of messages per day?",
            "{name} sent {step} messages.",
            "The number of messages per day was {step}.",
        ),
        (
            "{name} emptied {c} {boxes} that held equally many {things}. {She} gave away {a} of "
            "the {things} and kept the other {b}. How many {things} had been in each {box}?",
            "In all the {boxes} there had been {step} {things}.",
            "In each {box} there had been {step} {things}.",
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
