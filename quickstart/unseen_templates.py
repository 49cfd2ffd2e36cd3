"""Sentence patterns and words of the split `test_unseen`, in the form of `quickstart.templates`.

They read like problems of another author: other people and things, other settings, and questions
that open the text or stand alone. Training patterns must not be written after them.
"""

from quickstart.templates import Noun, Template, nouns, people

_SHE = (
    "Greta",
    "Hana",
    "Isla",
    "Keiko",
    "Lucia",
    "Meera",
    "Nadia",
    "Olga",
    "Petra",
    "Sofia",
    "Tanya",
    "Wanda",
    "Fatima",
    "Bella",
)
_HE = (
    "Adam",
    "Boris",
    "Carlos",
    "Dmitri",
    "Felix",
    "Gavin",
    "Henry",
    "Igor",
    "Jamal",
    "Kenji",
    "Lars",
    "Marco",
    "Oscar",
    "Victor",
)
UNSEEN_PEOPLE = people(_SHE, _HE)

_THINGS = (
    "plum",
    "pear",
    "walnut",
    "acorn",
    "muffin",
    "pebble",
    "feather",
    "spoon",
    "cup",
    "tile",
    "key",
    "badge",
    "pen",
    "bolt",
    "cork",
    "napkin",
    "glove",
    "whistle",
    "puzzle",
    "notebook",
)
UNSEEN_THINGS = nouns(_THINGS)

UNSEEN_CONTAINERS = (
    Noun("bucket", "buckets"),
    Noun("tray", "trays"),
    Noun("sack", "sacks"),
    Noun("pouch", "pouches"),
    Noun("tub", "tubs"),
    Noun("chest", "chests"),
)

TEST_UNSEEN: dict[str, tuple[Template, ...]] = {
    "add": (
        (
            "How many plates does {name} have to wash when {a} are in the sink and {b} are on the "
            "counter?",
            "{name} has to wash {step} plates.",
        ),
        (
            "{name} drives a bus with {a} passengers on board. At the bridge {b} more climb in. "
            "How many passengers ride across?",
            "{step} passengers ride across.",
        ),
        (
            "{name} plants {a} tulips along the fence, then {b} roses by the gate. "
            "How many flowers has {she} planted?",
            "{name} has planted {step} flowers.",
        ),
        (
            "With {a} goals before the break and {b} after it, how many goals does {name} score "
            "in the match?",
            "{name} scores {step} goals.",
        ),
        (
            "Walking to the station takes {name} {a} minutes, and the ride from there takes {b} "
            "minutes. How many minutes long is the whole journey?",
            "The whole journey is {step} minutes long.",
        ),
        (
            "{name} read {a} pages before breakfast and another {b} before lunch. "
            "What is the total number of pages {she} read?",
            "{name} read {step} pages.",
        ),
        (
            "{name} is {a} years old. {other} was born {b} years before {her}. How old is {other}?",
            "{other} is {step} years old.",
        ),
        (
            "Up on the hill {name} can see {a} goats, and down by the river {b} sheep. "
            "How many animals can {she} see?",
            "{name} can see {step} animals.",
        ),
        (
            "{name} takes {a} {things} out of a {box}, and {b} {things} remain inside. "
            "How many did the {box} hold before?",
            "The {box} held {step} {things}.",
        ),
        (
            "How many {things} end up in an empty {box} after {name} drops in {a} and {other} "
            "drops in {b}?",
            "The {box} ends up with {step} {things}.",
        ),
    ),
    "subtract": (
        (
            "A soup needs {a} onions. {name} has already chopped {b}. "
            "How many onions does {she} still have to chop?",
            "{name} still has to chop {step} onions.",
        ),
        (
            "{name} drives a bus with {a} passengers. {b} of them step off at the museum. "
            "How many stay on board?",
            "{step} passengers stay on board.",
        ),
        (
            "How many of the {a} seeds that {name} planted have not come up, if {b} of them have?",
            "{step} seeds have not come up.",
        ),
        (
            "Out of {a} matches, {name} won {b} and lost the others. How many did {she} lose?",
            "{name} lost {step} matches.",
        ),
        (
            "A chapter is {a} pages long, and {name} is done with {b} of them. "
            "How many pages remain?",
            "{step} pages remain.",
        ),
        (
            "The cake needs {a} minutes in the oven. {name} put it in {b} minutes ago. "
            "In how many more minutes will it be done?",
            "It will be done in {step} minutes.",
        ),
        (
            "{name} is {a} years old and {other} is {b}. How many years older is {name}?",
            "{name} is {step} years older.",
        ),
        (
            "{a} ducks were on the pond. When {name} clapped, {b} flew off. "
            "How many ducks stayed on the water?",
            "{step} ducks stayed.",
        ),
        (
            "There is room for {a} {things} in the {box}, and {name} has put in {b}. "
            "How many more will fit?",
            "{step} more {things} will fit.",
        ),
        (
            "{name} cuts {b} meters off a rope of {a} meters. "
            "What length of rope, in meters, remains?",
            "The rest of the rope is {step} meters long.",
        ),
    ),
    "multiply": (
        (
            "How many slices does {name} get from {a} loaves if every loaf is cut into {b} slices?",
            "{name} gets {step} slices.",
        ),
        (
            "{a} minibuses bring {name}'s choir to the concert, and {b} singers ride in each. "
            "How many singers come?",
            "{step} singers come.",
        ),
        (
            "In {name}'s garden there are {a} beds, and {b} lettuces grow in every bed. "
            "How many lettuces grow there?",
            "{step} lettuces grow there.",
        ),
        (
            "{name} runs {b} laps, and every lap takes {her} {a} minutes. "
            "How many minutes does {she} run?",
            "{name} runs for {step} minutes.",
        ),
        (
            "If {name} reads {a} pages an evening, how many pages will {she} have read after {b} "
            "evenings?",
            "{name} will have read {step} pages.",
        ),
        (
            "To feed {a} rabbits, {name} cuts up {b} carrots for each one. "
            "How many carrots does {she} cut up?",
            "{name} cuts up {step} carrots.",
        ),
        (
            "{name} lines up {a} {boxes} and drops {b} {things} into every one. "
            "How many {things} has {she} used?",
            "{name} has used {step} {things}.",
        ),
        (
            "{other} is {b} times as old as {name}, who is {a}. What is the age of {other}?",
            "{other} is {step} years old.",
        ),
        (
            "One jug holds {a} liters. {name} fills {b} of these jugs with tea. "
            "How many liters of tea is that?",
            "That is {step} liters of tea.",
        ),
        (
            "{name} played the piano {a} times this month, {b} minutes each time. "
            "How many minutes of music is that?",
            "That is {step} minutes of music.",
        ),
    ),
    "divide": (
        (
            "{name} spreads {a} olives over {b} pizzas, with the same number on each. "
            "How many olives go on a pizza?",
            "On a pizza go {step} olives.",
        ),
        (
            "A minibus seats {b}. How many minibuses does {name} order for {a} guests, if every "
            "seat is taken?",
            "{name} orders {step} minibuses.",
        ),
        (
            "How many bulbs go into each flower bed when {name} spreads {a} bulbs evenly over {b} "
            "beds?",
            "Into each bed go {step} bulbs.",
        ),
        (
            "{a} players come to {name}'s tournament. A side has {b} players, and everyone plays. "
            "How many sides are there?",
            "There are {step} sides.",
        ),
        (
            "{name}'s novel has {a} pages. At {b} pages an evening, how many evenings will it "
            "last?",
            "It will last {step} evenings.",
        ),
        (
            "{name} keeps {a} hens in {b} coops that hold equal numbers. "
            "How many hens share a coop?",
            "A coop is shared by {step} hens.",
        ),
        (
            "{name} sorts {a} {things} into piles of {b}, using all of them. "
            "How many piles are there?",
            "There are {step} piles.",
        ),
        (
            "A rope is {a} meters long. {name} cuts all of it into {b}-meter pieces. "
            "How many pieces does {she} get?",
            "{name} gets {step} pieces.",
        ),
        (
            "In {a} minutes {name} swims {b} laps, each as fast as the last. "
            "How many minutes does one lap take?",
            "One lap takes {step} minutes.",
        ),
        (
            "{name} stacks {b} identical blocks into a tower of {a} centimeters. "
            "How many centimeters high is one block?",
            "One block is {step} centimeters high.",
        ),
    ),
    "add_subtract": (
        (
            "{a} passengers ride in {name}'s bus. At the harbor {b} get on and {c} get off. "
            "How many passengers ride on from there?",
            "With those who get on, there are {step} passengers.",
            "{step} passengers ride on.",
        ),
        (
            "{name} baked {a} rolls at dawn and {b} at noon. By evening {c} had been eaten. "
            "How many rolls had not been eaten?",
            "{name} baked {step} rolls.",
            "{step} rolls had not been eaten.",
        ),
        (
            "{name} has {a} pages of history and {b} pages of biology to read. {c} of the pages "
            "are done. How many are still to be read?",
            "There are {step} pages to read.",
            "{step} pages are still to be read.",
        ),
        (
            "Of the {a} frogs and {b} toads in {name}'s pond, {c} hop out. "
            "How many of these animals stay in?",
            "In the pond there are {step} animals.",
            "{step} animals stay in.",
        ),
        (
            "How many {things} are in the {box} at the end? {name} starts with {a} {things} in it, "
            "adds {b}, and then removes {c}.",
            "After adding there are {step} {things}.",
            "At the end there are {step} {things}.",
        ),
    ),
    "multiply_add": (
        (
            "Each of {a} benches on {name}'s ferry seats {b} people, and {c} people can sit at the "
            "bar. How many seats does the ferry have?",
            "The benches have {step} seats.",
            "The ferry has {step} seats.",
        ),
        (
            "{name} runs {a} laps of {b} minutes each and then stretches for {c} minutes. "
            "How many minutes does the workout take?",
            "The laps take {step} minutes.",
            "The workout takes {step} minutes.",
        ),
        (
            "{name} picks {b} beans from each of {a} plants, and {c} more off the ground. "
            "How many beans does {she} bring in?",
            "From the plants {name} picks {step} beans.",
            "{name} brings in {step} beans.",
        ),
        (
            "How many kilometers does {name} cycle by riding {a} kilometers on each of {b} "
            "mornings and another {c} kilometers on the final evening?",
            "In the mornings {name} cycles {step} kilometers.",
            "{name} cycles {step} kilometers in all.",
        ),
        (
            "{a} {boxes} stand in the attic, each with {b} {things} in it. {name} carries up {c} "
            "loose {things}. How many {things} are in the attic then?",
            "The {boxes} hold {step} {things}.",
            "Then {step} {things} are in the attic.",
        ),
    ),
    "multiply_subtract": (
        (
            "{name} bakes {a} batches of {b} rolls, but {c} rolls burn. "
            "How many rolls can be served?",
            "{name} bakes {step} rolls.",
            "{step} rolls can be served.",
        ),
        (
            "A hall has {a} benches for {b} people each. {c} places are taken when {name} looks "
            "in. How many places are free?",
            "The hall has {step} places.",
            "{step} places are free.",
        ),
        (
            "{name} wants to swim {a} laps on each of {b} mornings. After {c} laps, "
            "how many are still to go?",
            "{name} wants to swim {step} laps.",
            "{step} laps are still to go.",
        ),
        (
            "Each of {name}'s {a} tomato plants bore {b} tomatoes, and birds pecked {c} of these "
            "tomatoes. How many were untouched?",
            "The plants bore {step} tomatoes.",
            "{step} tomatoes were untouched.",
        ),
        (
            "How many {things} remain if {name} opens {a} {boxes} holding {b} {things} apiece and "
            "hands {c} of those {things} to {other}?",
            "The {boxes} hold {step} {things}.",
            "{step} {things} remain.",
        ),
    ),
    "add_divide": (
        (
            "{name} picks {a} tomatoes and {other} picks {b}. All of these go into {c} bowls, the "
            "same number in every bowl. How many tomatoes go into a bowl?",
            "They pick {step} tomatoes.",
            "Into a bowl go {step} tomatoes.",
        ),
        (
            "{a} adults and {b} teenagers sign up for rafting. {name} puts {c} of them in every "
            "raft. How many rafts set off?",
            "{step} guests sign up.",
            "{step} rafts set off.",
        ),
        (
            "{name} will read aloud a fable of {a} pages and a legend of {b} pages. "
            "With {c} pages a night, how many nights does {she} need for both?",
            "The two have {step} pages.",
            "{name} needs {step} nights.",
        ),
        (
            "{name} sews a cloth of {a} meters to one of {b} meters, then cuts the long strip into "
            "{c} pieces of equal length. How many meters long is a piece?",
            "The strip is {step} meters long.",
            "A piece is {step} meters long.",
        ),
        (
            "How many {things} go into each of {c} {boxes}, all filled alike, when {name} puts in "
            "{a} {things} altogether and {other} {b}?",
            "They put in {step} {things}.",
            "Into each {box} go {step} {things}.",
        ),
    ),
}
