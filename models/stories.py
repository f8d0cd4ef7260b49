"""A generator of short stories in plain English: the whole training text of the tiny models.

A story is written by a *plot*: a function that draws people, things and places and then says one
sentence after another, each chosen among several templates. What makes the stories worth reading
for a language model is that they refer back: who lost what, where it was, who brought it home.
A template marks with `!` every word that refers to something named earlier *and* that the text
before it determines; these marks come out as `Story.marks.references`, character spans with which
evaluate.py measures whether a model really looks back (recall), rather than just writes English.
Words that say whether somebody is female or male ("she", "his", "girl") come out as `marks.pronouns`,
and the names that such a word announces ("a girl named Mia") as `marks.introductions`.

    python -m models.stories --seed 1         # print a few stories
    python -m models.stories --held-out       # write held_out.txt and held_out.json

Pure standard library. The same seed gives the same text on every machine and Python version: the
only source of chance is `random.Random.random()`, which Python promises to keep reproducible.

Template language, inside the strings given to `Writer.say`:

    {a}         the slot `a` in its plain form      (Mia; red kite; mill)
    {a.his}     another form of the slot            (her; see `person`, `thing`, `place`, ...)
    {a!}        as {a}, and the text so far determines this word: a reference
    [big|small] one of these; may be empty: [|very ]; does not nest; may contain slots
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

# ----------------------------------------------------------------------------
# Words


def words(text: str) -> list[str]:
    """Split a text at white space."""
    return text.split()


def phrases(text: str) -> list[str]:
    """Split a text at line ends and bars."""
    return text.replace("\n", "|").split("|")


GIRLS = words("""Ada Alice Amy Anna Anya Aria Beth Bella Bonnie Carla Carol Cara Celia Clara Clare Cora Daisy
Dana Delia Diana Dora Eda Edith Eliza Ella Ellen Elsa Emily Emma Erin Esme Esther Eva Eve Fay Flora
Freya Gemma Gina Grace Greta Gwen Hana Hanna Hazel Heidi Helen Holly Ida Ines Irene Iris Isla Ivy
Jane Janet Jenny Joan Judy Julia June Karin Kate Kira Lara Laura Leah Lena Lily Lina Lisa Lola Lucy
Luna Mabel Mara Maria Mary Maya Megan Mia Mina Mira Molly Mona Nadia Nancy Nell Nina Nora Olga Olive
Paula Pearl Petra Polly Rita Rosa Rose Ruby Ruth Sadie Sally Sara Sofia Stella Susan Tara Tess Tilda
Uma Vera Viola Wanda Willa Yara Zara Zoe""")

BOYS = words("""Adam Alan Alex Anton Arlo Asher Ben Bill Bobby Boris Bruno Carl Cecil Chris Colin Conor Cyril
Dan Dario David Dean Denis Dexter Dylan Eddie Edgar Eli Elmer Emil Eric Ernest Ethan Evan Felix Finn
Frank Fred Gary George Gil Glen Greg Gus Hans Harry Henry Hugo Ian Igor Isaac Ivan Ivo Jack Jacob
Jake James Jasper Jim Joe Joel John Jonas Josh Karl Kevin Kurt Lars Leo Leon Levi Lewis Liam Louis
Luca Lucas Luke Marco Mark Martin Matt Max Miles Milo Moses Ned Neil Nick Niko Noah Nolan Oliver Omar
Oscar Otis Otto Owen Paul Pedro Peter Phil Ralph Ravi Rex Robin Roger Ron Rory Roy Sam Saul Scott
Sean Simon Stan Steve Tariq Ted Theo Tim Tobias Tom Tony Victor Vince Walter Wes Will Yusuf Zack""")

COLOURS = words("""red blue green yellow white black brown pink purple orange golden silver grey""")
QUALITIES = words("""old new small big little tiny shiny wooden pretty striped painted heavy soft round""")

# What a child may own, lose, break, lend and find: one piece, carried by hand.
THINGS = words("""kite ball doll drum boat whistle hat scarf lamp book basket cup spoon bell ring key coat
blanket umbrella flute fiddle horn mirror clock watch box button brush bucket candle cap chair coin
crown cushion fan feather flag glove hammer jar jug kettle knife ladder lantern marble mask mitten
necklace paintbrush pencil pillow pot puppet purse ribbon rope saddle shell shovel sled spade stick
sword teapot top toy train wagon wheel""")
# The things worth wishing for and giving as a present.
GIFTS = words("""kite ball doll drum boat whistle hat scarf lamp book bell ring coat umbrella flute fiddle horn
mirror clock watch box cap crown lantern mask necklace puppet purse sled teapot train wagon""")
# The things that break.
FRAGILE = words("""kite drum boat whistle lamp umbrella flute fiddle mirror clock watch box chair fan jug
ladder lantern mask necklace puppet sled spade teapot train wagon wheel""")

# Places, with the words that stand before them when something is there.
PLACES = {
    "at the": words("mill market well bridge station harbour fair school bakery inn crossroads library church"),
    "in the": words("forest garden park barn cave valley meadow orchard stable tower castle village field museum"),
    "by the": words("river lake pond stream fountain gate waterfall canal"),
    "on the": words("hill beach island mountain farm shore"),
}
SHELTERS = words("mill inn school library church bakery station barn cave stable tower castle museum")
SPOTS = phrases("""under a bush|behind a big stone|under an old tree|next to a log|in the tall grass|behind a wall
between two rocks|under some leaves|beside a fence|on a bench|behind a cart|under a branch""")

# Animals, with the sound they make.
ANIMALS = {
    "dog": "barked", "cat": "purred", "duck": "quacked", "goat": "bleated", "horse": "neighed",
    "hen": "clucked", "lamb": "bleated", "owl": "hooted", "crow": "cawed", "fox": "yelped",
    "mouse": "squeaked", "rabbit": "squeaked", "squirrel": "chattered", "frog": "croaked",
    "goose": "honked", "donkey": "brayed", "pony": "neighed", "parrot": "squawked", "wolf": "howled",
    "bear": "growled", "robin": "sang", "swan": "hissed", "kitten": "meowed", "puppy": "yapped",
}  # fmt: skip
PETS = words("dog cat duck goat hen lamb owl crow fox mouse rabbit squirrel goose pony robin kitten puppy")
PET_NAMES = words("""Pip Biscuit Button Patch Pepper Bramble Clover Cookie Ginger Honey Muffin Nutmeg Pickle Pudding
Rusty Shadow Smoky Snowy Socks Sunny Toffee Whiskers Acorn Buttons Dusty Fern Fluffy Ginny Maple Misty
Mossy Pebble Poppy Scout Spot Tiger Velvet Willow""")

JOBS = words("""baker miller tailor farmer fisher gardener shepherd potter weaver painter carpenter blacksmith
teacher doctor sailor singer cook clockmaker shoemaker postman""")
MENDERS = words("carpenter blacksmith clockmaker shoemaker tailor potter painter weaver")

FOODS = words("""bread cheese apples plums honey soup cake berries nuts pears cookies grapes jam pancakes
cherries carrots muffins porridge butter eggs peaches buns""")
PLANTS = words("""pumpkin melon sunflower cabbage turnip rose tomato bean lettuce tulip daisy carrot radish lily
potato strawberry""")

TRAITS = words("""kind brave clever cheerful shy quiet gentle curious honest patient lively polite lazy proud
careful friendly stubborn thoughtful merry bold""")
RELATIVES = words("mother father grandmother grandfather aunt uncle sister brother cousin")
ELDERS = words("mother father grandmother grandfather aunt uncle")
MATERIALS = phrases("wood|clay|wool|paper|silk|leather|cloth|straw")
COUNTRY = phrases("""village by the sea|small town|village near the mountains|quiet valley|little house near the woods
town with many bridges|village on a hill|house by the road|cottage at the edge of the forest|busy city
farm far away|street full of children""")
WEATHER = words("sunny windy rainy cold warm bright cloudy foggy snowy frosty stormy hot")
MANNERS = phrases("softly|quietly|loudly|slowly|quickly|at once|at last|in a low voice|after a while|again")
SEASONS = words("spring summer autumn winter")

# ----------------------------------------------------------------------------
# Slots: a slot is a dict from the name of a form to its text; "" is the plain form.

Slot = dict[str, str]


def article(phrase: str) -> str:
    """Put the indefinite article in front of `phrase`."""
    return ("an " if re.match("[aeiou]|honest", phrase) else "a ") + phrase


def word(text: str) -> Slot:
    """Make the slot of a plain word or phrase."""
    return {"": text, "a": article(text), "A": article(text).capitalize()}


GENDERED = {"he", "his", "him", "himself", "He", "His", "girl", "woman"}  # forms of a person that show the gender


def person(name: str, female: bool, job: str = "") -> Slot:
    """Make the slot of a person: the name, pronouns and nouns that agree with it, the job."""
    pronouns = ("she", "her", "her", "herself") if female else ("he", "his", "him", "himself")
    he, his, him, himself = pronouns
    return {
        "": name,
        "he": he, "his": his, "him": him, "himself": himself,
        "He": he.capitalize(), "His": his.capitalize(),
        "girl": "girl" if female else "boy",
        "woman": "woman" if female else "man",
        "job": job,
    }  # fmt: skip


def thing(adjective: str, noun: str) -> Slot:
    """Make the slot of a thing (or an animal): with its adjective, or the noun alone."""
    full = f"{adjective} {noun}"
    return {"": full, "a": article(full), "noun": noun}


def place(preposition: str, noun: str) -> Slot:
    """Make the slot of a place; `in` is what stands before it when something is there."""
    return {"": noun, "in": preposition, "In": preposition.capitalize(), "a": article(noun)}


# ----------------------------------------------------------------------------
# The writer


Span = tuple[int, int]  # characters [start, end)
Pronoun = tuple[int, int, str]  # a span, and the name of the person it is about


@dataclass(frozen=True)
class Marks:
    """Places in a text, each kind in the text's order."""

    references: tuple[Span, ...] = ()  # words that refer back, where the text before determines which word it is
    pronouns: tuple[Pronoun, ...] = ()  # gendered words about somebody whose name came before
    introductions: tuple[Span, ...] = ()  # first mentions of a name that come after a gendered word about its bearer

    def spans(self) -> list[Span]:
        """All of them."""
        return sorted({*self.references, *(p[:2] for p in self.pronouns), *self.introductions})

    def shifted(self, by: int) -> Marks:
        """These places where `by` characters have been put in front."""
        return Marks(
            tuple((start + by, end + by) for start, end in self.references),
            tuple((start + by, end + by, name) for start, end, name in self.pronouns),
            tuple((start + by, end + by) for start, end in self.introductions),
        )

    def __add__(self, other: Marks) -> Marks:
        return Marks(
            self.references + other.references,
            self.pronouns + other.pronouns,
            self.introductions + other.introductions,
        )


@dataclass(frozen=True)
class Story:
    """A story and what is known about it."""

    text: str
    marks: Marks
    about: tuple[str, ...]  # what it is about, as a request would say it: ("Mia", "a red kite")
    where: str  # its main place, "the mill", or ""
    questions: tuple[tuple[str, str], ...]  # questions that the story answers, with answers


@dataclass
class Writer:
    """Collects the sentences of one story and remembers what the slots stand for."""

    rng: random.Random
    slots: dict[str, Slot] = field(default_factory=dict)
    text: str = ""
    references: list[Span] = field(default_factory=list)
    gendered: list[Pronoun] = field(default_factory=list)  # all gendered words
    questions: list[tuple[str, str]] = field(default_factory=list)
    about: list[str] = field(default_factory=list)
    where: str = ""
    used: list[str] = field(default_factory=list)  # words already drawn, never drawn twice

    # -- chance

    def pick(self, options: Sequence[str]) -> str:
        """One of `options`."""
        return options[int(self.rng.random() * len(options))]

    def draw(self, options: Sequence[str]) -> str:
        """One of `options` that this story has not drawn yet."""
        while (choice := self.pick(options)) in self.used:
            pass
        self.used.append(choice)
        return choice

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # -- slots

    def people(self, *keys: str, jobs: Sequence[str] = ()) -> None:
        """Bind each key to a new person; with `jobs`, to one who has one of these jobs."""
        for key in keys:
            female = self.chance(0.5)
            name = self.draw(GIRLS if female else BOYS)
            self.slots[key] = person(name, female, self.draw(jobs) if jobs else "")

    def things(self, *keys: str, among: Sequence[str] = THINGS) -> None:
        for key in keys:
            adjective = self.draw(COLOURS if self.chance(0.6) else QUALITIES)
            self.slots[key] = thing(adjective, self.draw(among))

    def places(self, *keys: str, among: Sequence[str] = ()) -> None:
        prepositions = {noun: preposition for preposition, nouns in PLACES.items() for noun in nouns}
        for key in keys:
            noun = self.draw(among or list(prepositions))
            self.slots[key] = place(prepositions[noun], noun)

    def choose(self, **choices: Sequence[str]) -> None:
        for key, options in choices.items():
            self.slots[key] = word(self.draw(options))

    def animal(self, key: str, among: Sequence[str]) -> None:
        """Bind a key to an animal: a thing with `.name`, what it may be called, and `.sound`, a verb."""
        kind = self.draw(among)
        self.slots[key] = thing(self.draw(words("red white black brown grey small big old young")), kind)
        self.slots[key] |= {"sound": ANIMALS[kind], "name": self.draw(PET_NAMES)}

    # -- text

    def expand(self, template: str) -> tuple[str, list[Span], list[Pronoun]]:
        """Fill in a template: the text, and in it the references and the gendered words."""
        if self.chance(0.2):
            template = re.sub(r"(said (?:the )?{[^}]*!})\.", rf"\1 {self.pick(MANNERS)}.", template)
        template = re.sub(r"\[([^\]]*)\]", lambda m: self.pick(m[1].split("|")), template)
        text, spans, gendered, end = "", [], [], 0
        for m in re.finditer(r"\{(\w+)(?:\.(\w+))?(!?)\}", template):
            text += template[end : m.start()]
            slot, form = self.slots[m[1]], m[2] or ""
            value = slot[form]
            if form in GENDERED:
                gendered.append((len(text), len(text) + len(value), slot[""]))
            if m[3]:
                start = value.index(" ") + 1 if m[2] == "a" else 0  # leaves out the article
                spans.append((len(text) + start, len(text) + len(value)))
            text, end = text + value, m.end()
        return text + template[end:], spans, gendered

    def say(self, *templates: str) -> None:
        """Add one of the templates to the story."""
        text, spans, gendered = self.expand(self.pick(templates))
        if not text:
            return
        if self.text:
            self.text += " "
        at = len(self.text)
        self.references += [(start + at, end + at) for start, end in spans]
        self.gendered += [(start + at, end + at, name) for start, end, name in gendered]
        self.text += text

    def maybe(self, probability: float, *templates: str) -> None:
        if self.chance(probability):
            self.say(*templates)

    def ask(self, question: str, answer: str) -> None:
        """Note a question that the story answers."""
        self.questions.append((self.expand(question)[0], self.expand(answer)[0]))

    def subject(self, *templates: str, where: str = "") -> None:
        """Note what the story is about; `where` its place."""
        self.about += [self.expand(t)[0] for t in templates]
        self.where = self.expand(where)[0]

    def story(self) -> Story:
        """Make the story of what has been said."""
        first = {name: re.search(rf"\b{name}\b", self.text).span() for name in {p[2] for p in self.gendered}}
        pronouns = tuple(p for p in self.gendered if p[0] > first[p[2]][0])
        introductions = sorted({first[name] for start, _, name in self.gendered if start < first[name][0]})
        marks = Marks(tuple(self.references), pronouns, tuple(introductions))
        return Story(self.text, marks, tuple(self.about), self.where, tuple(self.questions))


def open_one(w: Writer) -> None:
    """Introduce the slot `a` in a sentence or two."""
    w.choose(trait=TRAITS, trait2=TRAITS, country=COUNTRY, weather=WEATHER)
    roll = w.rng.random()
    if roll < 0.45:
        w.say(
            "Once upon a time there was a [|little |young ]{a.girl} named {a}.",
            "Once upon a time, there was {trait.a} {a.girl} named {a}.",
            "Once upon a time there lived a {a.girl} called {a}.",
            "Once upon a time, in {country.a}, there lived a {a.girl} named {a}.",
            "Once upon a time, {trait.a} {a.girl} named {a} lived in {country.a}.",
        )
    elif roll < 0.6:
        w.say(
            "Once there was a [|little ]{a.girl} named {a} who lived in {country.a}.",
            "Once there was {trait.a} and {trait2} {a.girl} called {a}.",
            "Once, in {country.a}, there lived a {a.girl} named {a}.",
        )
    elif roll < 0.7:
        w.say(
            "Long ago, in {country.a}, there was a {a.girl} named {a}.",
            "Long ago there lived {trait.a} {a.girl} whose name was {a}.",
            "Many years ago, a {a.girl} named {a} lived in {country.a}.",
        )
    elif roll < 0.8:
        w.say(
            "There was once a {a.girl} called {a}, who was [very |]{trait}.",
            "There once was {trait.a} {a.girl} named {a}.",
            "In {country.a} there lived a {a.girl} named {a}.",
        )
    elif roll < 0.9:
        w.say(
            "One [fine|quiet|fresh] morning, a {a.girl} named {a} woke up very early.",
            "One [spring|summer|autumn|winter] day, a {a.girl} named {a} looked out of the window.",
            "It was {weather.a} day, and a {a.girl} named {a} had nothing to do.",
        )
    else:
        w.say(
            "This is the story of a [|little ]{a.girl} named {a}.",
            "Do you know the story of {a}, the {trait} {a.girl}?",
            "Everyone in the village knew a {a.girl} named {a}.",
            "Not long ago, a {a.girl} called {a} lived in {country.a}.",
        )
    w.maybe(
        0.35,
        "{a.He} had [blue|brown|green|dark|bright] eyes and [red|black|curly|long|short|fair] hair.",
        "{a.He} always [wore a warm coat|got up early|helped at home|asked many questions|told the truth].",
        "People said that {a.he} was {trait2.a} child.",
        "{a.He} was always [very |]{trait}.",
        "{a.He} lived with {a.his} [mother|father|grandmother|grandfather|aunt|uncle].",
        "{a.He} was [six|seven|eight|nine|ten] years old.",
        "{a.He} liked to [sing|dance|read|draw|run|swim|climb trees|watch the clouds|count the stars|feed the birds"
        "|walk in the rain].",
    )


def open_two(w: Writer) -> None:
    """Introduce the slots `a` and `b` as friends, in a sentence or two."""
    w.choose(trait=TRAITS, trait2=TRAITS, country=COUNTRY)
    w.say(
        "Once upon a time there were two friends, {a} and {b}.",
        "Once upon a time, {a} and {b} lived in the same [street|village|house|town].",
        "Once upon a time, in {country.a}, there lived two friends named {a} and {b}.",
        "Once upon a time there was a {a.girl} named {a}, who had a friend called {b}.",
        "Once there were two friends called {a} and {b}.",
        "Once there was {trait.a} {a.girl} named {a}, and {a.his} best friend was {b}.",
        "One [sunny|windy|cold|warm|cloudy] [morning|day|afternoon], {a} went out to play with {b}.",
        "Long ago, {a} and {b} lived in {country.a}.",
        "There were once two neighbours, {a} and {b}.",
        "Two children, {a} and {b}, lived in {country.a}.",
        "Last [spring|summer|autumn|winter], a {a.girl} named {a} had a friend called {b}.",
    )
    w.maybe(
        0.3,
        "{a} was {trait}, and {b} was {trait2}.",
        "They [laughed a lot|never quarrelled|told each other everything|lived next door to each other].",
        "Everyone liked {a} and {b}.",
        "They [played together every day|had known each other for years|went to the same school].",
        "{a} was [six|seven|eight] years old, and {b} was [nine|ten].",
    )


def scene(w: Writer) -> None:
    """Perhaps a sentence that only paints the picture."""
    w.choose(colour=COLOURS, small=["bird", "butterfly", "beetle", "moth", "dragonfly", "ladybird"])
    w.maybe(
        0.45,
        "The sun [was shining|was high in the sky|was going down|was warm|had just come up].",
        "[A bird|A robin|An owl|A blackbird] was singing [in a tree|on a roof|nearby|somewhere].",
        "The wind [blew softly|was cold|smelled of flowers|made the leaves dance|had gone to sleep].",
        "It was [very |so |]quiet there[| that day| at that hour].",
        "There were [clouds|birds|butterflies|bees|snowflakes|flowers] everywhere.",
        "[White|Dark|Grey|Pink] clouds were [flying|sailing|drifting] across the sky.",
        "Somewhere a [dog was barking|bell was ringing|child was laughing|clock struck].",
        "Nobody else was there.",
        "{colour.A} {small} [flew by|landed on the ground|danced in the air|sat on a leaf].",
        "The [grass|ground|road|path] was [wet|dry|soft|white with frost|full of leaves].",
        "The air smelled of [rain|snow|hay|smoke|apples|flowers|bread].",
        "In the distance there was [music|smoke|thunder|laughter].",
    )


def feel(w: Writer, who: str) -> None:
    """Perhaps a sentence about how the slot `who` takes bad news."""
    w.slots["who_feels"] = w.slots[who]
    w.maybe(
        0.4,
        "{who_feels} was [sad|very sad|worried|afraid|upset|close to tears].",
        "{who_feels} did not know what to do.",
        "{who_feels} began to cry.",
        "{who_feels} felt [sad|cold|sick|small|lonely].",
        "The heart of {who_feels!} [beat fast|sank|was heavy].",
        "{who_feels} [sighed|bit {who_feels.his} lip|thought hard|took a deep breath].",
        "Tears ran down the face of {who_feels!}.",
    )


def end(w: Writer, *morals: str) -> None:
    """Close with a moral, a set phrase or nothing."""
    roll = w.rng.random()
    if roll < 0.45:
        w.say(*morals)
    elif roll < 0.6:
        w.say("The end.", "And that is the end of the story.", "And they all lived happily ever after.")


# ----------------------------------------------------------------------------
# Plots. In each, `a` is the main character and `b` the other one.
# One habit keeps references determined: after "the" a thing goes by its noun alone ("the kite"),
# after "my", "your", "his", "her" or "a" by its full name ("my red kite").


def lost_and_found(w: Writer) -> None:
    """Lose a thing; a friend finds it where it was last seen."""
    w.people("a", "b")
    w.things("t")
    w.places("p")
    w.choose(spot=SPOTS)
    w.subject("{a}", "{t.a}", where="the {p}")
    open_one(w)
    w.say(
        "{a.He} had {t.a}, and {a.he} loved it more than anything.",
        "{a.His} [mother|father|aunt|uncle|grandmother] had given {a.him} {t.a}.",
        "{a.He} had {t.a} and took it everywhere.",
        "Of all {a.his} things, {a.he} liked {t.a} best.",
    )
    w.say(
        "One day {a} took the {t.noun!} to the {p}.",
        "One [windy|sunny|cold|warm] [morning|afternoon], {a} went to the {p} with the {t.noun!}.",
        "One [morning|afternoon] {a.he} played with it {p.in} {p} until it was time to go home.",
        "One evening {a} came home from the {p} without it.",
    )
    scene(w)
    w.say(
        "At home {a.he} saw that the {t.noun!} was gone.",
        "That night {a.he} looked for it everywhere, but it was gone.",
        "When {a.he} went to bed, the {t.noun!} was not there.",
        "The next day {a.he} could not find it.",
    )
    w.say(
        '"Where is my {t!}?" [asked|cried] {a!}.',
        '"Oh no, I have lost my {t!}!" [said|cried] {a!}.',
        '"My {t!} is gone!" [said|cried] {a!}.',
        "{a} sat down and [cried|wept].",
    )
    feel(w, "a")
    w.say(
        "A {b.girl} named {b} heard this and came to help.",
        "{a.His} friend {b} saw how sad {a.he} was.",
        "Then {a.he} met a {b.girl} named {b} and told {b.him} about the {t.noun!}.",
        "{a.His} neighbour {b} came to see what was wrong.",
    )
    if w.chance(0.6):
        w.say(
            '"Do not [cry|worry|be sad], {a!}," said {b!}. "Where did you have it last?"',
            '"I will help you, {a!}," said {b!}. "Where were you when you lost it?"',
            '"Where were you yesterday?" asked {b!}.',
        )
        w.say('"I was {p.in} {p!}," said {a!}.', '"{p.In} {p!}," said {a!}.')
    w.say(
        "So {b} [ran|walked|went|hurried] back to the {p!} and looked [everywhere|all around].",
        "Then {b} and {a!} went back to the {p!} together.",
        "They [ran|walked|went|hurried] to the {p!} together and looked [everywhere|all around].",
    )
    w.say(
        "And there, {spot}, lay the {t.noun!}!",
        "There was the {t.noun!}, {spot}.",
        "After a long time {b} found the {t.noun!} {spot}.",
    )
    w.say(
        '"Here is your {t!}," said {b!}, and gave it to {a!}.',
        '"Look, {a!}, I have found your {t!}!" said {b!}.',
        "{b} gave the {t.noun!} back to {a!}.",
        '"I have found it!" [called|shouted] {b!}, and gave the {t.noun!} to {a!}.',
    )
    w.say(
        '"Thank you, {b!}!" said {a!}.',
        "{a} [hugged|thanked] {b!} and held the {t.noun!} tight.",
        "{a} was so happy that {a.he} [hugged|kissed] {b!}.",
    )
    w.maybe(
        0.5,
        "From that day on, {a} and {b!} were [good|best|great] friends.",
        "After that, {a} never took the {t.noun!} to the {p!} again.",
    )
    w.ask("Who found the {t.noun}?", "{b} found the {t}.")
    w.ask("Where was the {t.noun}?", "The {t.noun} was {p.in} {p}.")
    end(w, "A friend helps you look.", "What is lost can be found.", "It is good to have a friend.")


def birthday(w: Writer) -> None:
    """Find or make a present for a friend, with the help of someone who knows how."""
    w.people("a", "b")
    w.people("j", jobs=JOBS)
    w.things("t", among=GIFTS)
    w.choose(food=FOODS)
    w.subject("{a}", "{t.a}")
    open_two(w)
    w.say(
        "Soon it would be the birthday of {b!}.",
        "The next day was the birthday of {b!}.",
        "{a} knew that {b!} would soon have a birthday.",
    )
    w.say(
        '"What shall I give to {b!}?" thought {a!}.',
        '"I must find a present for {b!}," thought {a!}.',
        "{a} wanted to give {b!} something special.",
    )
    w.say(
        "{a.He} went to see {j}, the {j.job}.",
        "In the [market|square|street] {a.he} met a {j.job} whose name was {j}.",
        "So {a.he} asked a {j.job} named {j} for help.",
    )
    if w.chance(0.5):
        w.say("{j} was selling {t.a}.", "The {j.job!} showed {a!} {t.a}.")
        w.say(
            '"How much is the {t.noun!}?" asked {a!}.',
            '"May I have the {t.noun!}?" asked {a!}.',
        )
        w.say(
            '"It costs [one coin|two coins|three coins|five coins]," said {j!}.',
            '"Sweep my floor, and it is yours," said the {j.job!}.',
            '"Bring me some {food}, and it is yours," said the {j.job!}. '
            "So {a} ran home and came back with the {food!}.",
        )
    else:
        w.say(
            '"Everyone likes {t.a}," said the {j.job!}. "I will help you to make one."',
            '"I can help you to make {t.a}," said {j!}.',
        )
        w.say(
            "For [two|three|four|five] days {a} and the {j.job!} worked on the {t.noun!}.",
            "{a} and {j!} worked all night, and in the morning the {t.noun!} was ready.",
        )
    w.say(
        "{a} thanked {j!} and carried the {t.noun!} home.",
        "{a} put the {t.noun!} in a box and tied it with string.",
        "{a} thanked the {j.job!} and hid the {t.noun!} under {a.his} bed.",
    )
    w.say(
        "At the party they sang songs and ate {food}.",
        "At the party everyone ate {food} and laughed.",
        "When the day came, {a} knocked on the door.",
    )
    w.say(
        '"Happy birthday, {b!}!" said {a!}. "This is for you."',
        '"This is for you, {b!}," said {a!}.',
        "{a} gave the present to {b!}.",
    )
    w.say("{b} opened it and saw the {t.noun!}.", "{b} looked inside and found {t.a!}.")
    w.say(
        '"What a beautiful {t.noun!}!" [cried|said] {b!}.',
        '"I have always wanted {t.a!}!" [cried|said] {b!}.',
        '"Thank you, {a!}!" [cried|said] {b!}.',
    )
    w.maybe(
        0.6,
        "{b} kept the {t.noun!} for many years.",
        "From then on, {b} never went anywhere without the {t.noun!}.",
        "It was the best present that {b!} had ever had.",
    )
    w.ask("What did {b} get?", "{b} got {t.a}.")
    w.ask("Who helped {a}?", "{j} the {j.job} helped {a}.")
    end(w, "It is a joy to give.", "A gift from a friend is the best gift.", "Giving makes two people happy.")


def swap(w: Writer) -> None:
    """Swap two things, and perhaps regret it."""
    w.people("a", "b")
    w.things("t", "u")
    w.places("p")
    w.subject("{a}", "{b}", where="the {p}")
    open_two(w)
    w.say(
        "{a} had {t.a}, and {b} had {u.a}.",
        "{a} had {t.a}. {b} had no {t.noun!}, but {b.he} had {u.a}.",
        "{a} owned {t.a}, while {b} owned {u.a}.",
    )
    w.say(
        "One day they met {p.in} {p}.",
        "One [morning|afternoon|evening] they sat together {p.in} {p}.",
        "They often went to the {p} to play.",
    )
    scene(w)
    w.say(
        '"I like your {t!}," said {b!}.',
        '"May I play with your {t!}, {a!}?" asked {b!}.',
        '"I wish I had {t.a!}," said {b!}.',
        "{b} looked at the {t.noun!} that {a!} was holding.",
    )
    w.say(
        '"And I like your {u!}," said {a!}.',
        '"Then give me your {u!}," said {a!}.',
        '"You can have it for your {u!}," said {a!}.',
    )
    w.say(
        "So {a} gave the {t.noun!} to {b!}, and {b!} gave the {u.noun!} to {a!}.",
        "So they swapped, and now {a} had the {u.noun!} and {b!} had the {t.noun!}.",
        "{b} gave {a!} the {u.noun!}, and {a!} gave {b!} the {t.noun!}.",
    )
    w.maybe(
        0.6,
        "They both went home [happy|smiling|singing].",
        "{a} played with the {u.noun!} all day.",
        "{b} showed the {t.noun!} to {b.his} [mother|father|sister|brother].",
    )
    if w.chance(0.6):
        w.say(
            "But at night {a} [missed|thought of] {a.his} {t!}.",
            "But soon {a} was sad without {a.his} {t!}.",
            "But the next day {a} wanted the {t.noun!} back.",
        )
        w.say(
            "In the morning {a.he} went to {b!} with the {u.noun!}.",
            "So {a.he} took the {u.noun!} and went to see {b!}.",
        )
        w.say(
            '"Here is your {u!}, {b!}," said {a!}. "May I have my {t!} again?"',
            '"Please, {b!}, may I have my {t!} again?" asked {a!}. "Here is your {u!}."',
        )
        w.say(
            '"Of course, {a!}," said {b!}, and gave the {t.noun!} back.',
            '"Yes," said {b!}. "I missed my {u!} too."',
            "{b} laughed and gave {a!} the {t.noun!}.",
        )
        w.say(
            "{a} went home with the {t.noun!}, and {b!} kept the {u.noun!}.",
            "After that they often played together {p.in} {p!}.",
            "From then on, they shared the {t.noun!} and the {u.noun!}.",
        )
    else:
        w.say(
            "{a} took good care of the {u.noun!}, and {b!} took good care of the {t.noun!}.",
            "{a} loved the {u.noun!}, and {b!} loved the {t.noun!}.",
        )
        w.say(
            "When they met {p.in} {p!} again, they were both glad.",
            '"Thank you for the {u.noun!}," said {a!} the next time.',
            '"I am glad that we swapped," said {b} when they met {p.in} {p!} again.',
        )
    w.ask("What did {b} have at first?", "At first {b} had {u.a}.")
    w.ask("Where did they meet?", "They met {p.in} {p}.")
    end(w, "Friends can share.", "Your own things are often the best.", "A fair trade makes two people happy.")


def hurt_animal(w: Writer) -> None:
    """Nurse an animal; it saves the house, or its owner turns up."""
    w.people("a", "b")
    w.places("p")
    w.animal("d", among=PETS)
    w.choose(food=FOODS, relative=ELDERS, bed=["a basket", "a box", "the kitchen", "the barn", "an old hat"])
    w.subject("{a}", "{d.a}", where="the {p}")
    open_one(w)
    w.say(
        "One day {a.he} went to the {p} and heard a small cry.",
        "On the way to the {p}, {a.he} heard a strange noise.",
        "One [cold|rainy|snowy|windy] [morning|evening], {a.he} was walking to the {p}.",
    )
    scene(w)
    w.say(
        "There sat {d.a} with a hurt leg.",
        "There was {d.a} that could not walk.",
        "In the grass lay {d.a}, [cold and wet|weak and hungry|alone and afraid].",
    )
    w.say(
        '"Poor little {d.noun!}," said {a!}. "I will take you home."',
        '"Do not be afraid, {d.noun!}," said {a!}.',
        '"You poor {d.noun!}!" said {a!}.',
    )
    w.say(
        "{a.He} carried the {d.noun!} home and made a bed for it in {bed}.",
        "{a.He} wrapped the {d.noun!} in {a.his} coat and took it home.",
    )
    w.say(
        '"May I keep the {d.noun!}?" {a} asked {a.his} {relative}.',
        '"Look, I have found {d.a!}," {a} told {a.his} {relative}.',
        "{a.His} {relative} looked at the {d.noun!} and smiled.",
    )
    w.say(
        '"Yes," said {a.his} {relative!}, "but you must feed it every day."',
        '"Give it some {food}," said {a.his} {relative!}.',
        '"You must take good care of it," said {a.his} {relative!}.',
    )
    w.say(
        "So {a} gave the {d.noun!} some {food} and called it {d.name}.",
        "{a} named the {d.noun!} {d.name} and fed it with {food}.",
        "{a} gave it the name {d.name}, and every day {d.name!} ate {food}.",
    )
    w.say(
        "Day by day {d.name!} grew stronger.",
        "Soon {d.name!} could walk again.",
        "After [a week|two weeks|a month], {d.name!} was well.",
    )
    if w.chance(0.5):
        w.say(
            "One night there was a fire in the house, and everyone was asleep.",
            "One night {a} woke up and smelled smoke.",
            "Then one night a thief came to the house.",
        )
        w.say(
            "{d.name} {d.sound} so loudly that {a!} and {a.his} {relative!} woke up.",
            "The {d.noun!} {d.sound} and {d.sound!}, and everyone ran out.",
        )
        w.say(
            '"You have saved us, {d.name!}!" said {a!}.',
            '"What a clever {d.noun!}!" said {a.his} {relative!}.',
            '"Thank you, {d.name!}!" said {a!}.',
        )
    else:
        w.say(
            "A {b.girl} named {b} came to the door and saw the {d.noun!}.",
            "One day a {b.girl} named {b} met {a!} in the street.",
        )
        w.say(
            '"That is my {d!}!" said {b!}. "I lost it near the {p!}."',
            '"I have been looking for my {d!}," said {b!}.',
        )
        w.say(
            "{a} was sad, but {a.he} gave {d.name!} to {b!}.",
            '"Then you must take {d.name!} home," said {a!}.',
        )
        w.say(
            '"Come and see {d.name!} every day, {a!}," said {b!}.',
            '"Thank you, {a!}," said {b!}. "Please visit us soon."',
            "{b} thanked {a!}, and they both looked after {d.name!}.",
        )
    w.ask("What was the name of the {d.noun}?", "The {d.noun} was called {d.name}.")
    w.ask("Where did {a} find the {d.noun}?", "{a} found the {d.noun} near the {p}.")
    end(w, "Kindness comes back to you.", "Be kind to animals.", "A small friend can be a great friend.")


def broken(w: Writer) -> None:
    """Break what belongs to the family, have it mended, tell the truth."""
    w.people("a")
    w.people("j", jobs=MENDERS)
    w.things("t", among=FRAGILE)
    w.places("p")
    w.choose(food=FOODS, relative=ELDERS)
    w.subject("{a}", "{t.a}", where="the {p}")
    open_one(w)
    w.say(
        "{a.His} {relative} had {t.a} that was very old.",
        "In the house of {a.his} {relative} there was {t.a}.",
        '{a.His} {relative} gave {a.him} {t.a} and said, "Be careful with it."',
    )
    w.say(
        "One day {a} dropped the {t.noun!}, and it broke.",
        "One [morning|evening], {a} fell on the stairs and broke the {t.noun!}.",
        "{a} [tripped|slipped] and fell, and the {t.noun!} broke in two.",
    )
    feel(w, "a")
    w.say(
        '"Oh no! What will my {relative!} say?" [said|cried] {a!}.',
        '"I have broken the {t.noun!}!" [said|cried] {a!}.',
        '"I must mend the {t.noun!} before my {relative!} comes home," [said|thought] {a!}.',
    )
    w.say(
        "{p.In} {p} lived a {j.job} named {j}, who could mend anything.",
        "Now, there was a {j.job} called {j} who worked {p.in} {p}.",
        "A {j.job} whose name was {j} had a shop {p.in} {p}.",
    )
    w.say(
        "So {a} took the {t.noun!} and [ran|walked|hurried] to the {p!}.",
        "{a} [ran|walked|hurried] to the {p!} with the {t.noun!} under {a.his} arm.",
    )
    w.say(
        '"Please, {j!}, can you mend my {t!}?" asked {a!}.',
        '"Can you mend {t.a!}?" {a} asked the {j.job!}.',
        '"I have broken my {t!}, {j!}," said {a!}.',
    )
    w.say(
        '"Yes," said the {j.job!}, "but what will you give me?"',
        '"I can mend it," said {j!}. "What can you give me?"',
    )
    w.say(
        '"I will bring you some {food}," said {a!}.',
        '"I have no money, but I have some {food}," said {a!}.',
    )
    w.say(
        "The {j.job!} [smiled|laughed|nodded] and took out [some glue|a box of tools|a hammer and a nail].",
        '"I like {food!}," said {j!}, and began to work.',
    )
    w.say(
        "[Soon|After an hour|The next day] the {t.noun!} was as good as new.",
        "{j} worked on the {t.noun!} until it was dark.",
    )
    w.say(
        "{a} gave the {food!} to {j!} and ran home with the {t.noun!}.",
        '"Here is your {t!}," said the {j.job!}. "Thank you, {j!}," said {a!}, and gave {j.him} the {food!}.',
    )
    w.say(
        "{a} told {a.his} {relative!} everything.",
        "At home {a.he} showed the {t.noun!} to {a.his} {relative!} and told the truth.",
    )
    w.say(
        '"I am glad that you told me, {a!}," said {a.his} {relative!}.',
        '"You are an honest {a.girl}, {a!}," said {a.his} {relative!}.',
        "{a.His} {relative!} was not angry at all.",
    )
    w.ask("Who mended the {t.noun}?", "{j} the {j.job} mended the {t}.")
    w.ask("What did {a} give to {j}?", "{a} gave {j} some {food}.")
    end(w, "It is best to tell the truth.", "Honest people sleep well.", "What is broken can be mended.")


def errand(w: Writer) -> None:
    """Carry food to someone far away, past an animal that wants it."""
    w.people("a")
    w.people("j", jobs=JOBS)
    w.places("p", "q")
    w.animal("d", among=["fox", "wolf", "bear", "crow", "goat", "dog", "donkey", "goose", "horse", "parrot"])
    w.choose(food=FOODS, relative=ELDERS)
    w.subject("{a}", "{d.a}", where="the {q}")
    open_one(w)
    w.say(
        "One day {a.his} {relative} made some {food}.",
        "One [fine|cold|sunny|windy] morning, {a.his} {relative} gave {a.him} a basket of {food}.",
        "{a.His} {relative} put some {food} in a basket.",
    )
    w.say(
        '"Take the {food!} to {j} the {j.job}, who lives {q.in} {q}," said {a.his} {relative!}.',
        '"Please bring the {food!} to my friend {j}, the {j.job} {q.in} {q}," said {a.his} {relative!}.',
    )
    w.say(
        "So {a} took the basket and set out for the {q!}.",
        '"Yes, {relative!}," said {a!}, and went to look for the {j.job!}.',
        '"I will go to the {q!} at once," said {a!}.',
    )
    scene(w)
    w.say(
        "{p.In} {p}, {a.he} met {d.a}.",
        "On the way, near the {p}, {a.he} met {d.a}.",
        "When {a.he} came to the {p}, {d.a} stood in the road.",
    )
    feel(w, "a")
    w.say(
        '"What is in your basket?" asked the {d.noun!}.',
        '"Where are you going, {a.girl}?" asked the {d.noun!}.',
        '"I am so hungry," said the {d.noun!}.',
    )
    w.say(
        '"I am taking some {food!} to {j!}," said {a!}.',
        '"I have some {food!} for {j!} the {j.job!}," said {a!}.',
    )
    if w.chance(0.5):
        w.say(
            '"Give me the {food!}, or I will bite you!" said the {d.noun!}.',
            '"I want the {food!}!" said the {d.noun!}.',
        )
        w.say(
            '"No, I must keep the {food!} for {j!}," said {a!}.',
            '"No, it is not for you," said {a!} bravely.',
            "{a} [was not afraid|stood still], and {a.he} [shouted|called] for help.",
        )
        w.say(
            "Then {a.he} ran past the {d.noun!} as fast as {a.he} could.",
            "The {d.noun!} {d.sound} and ran away.",
        )
    else:
        w.say(
            '"May I have a little?" asked the {d.noun!}.',
            '"Please give me some of it," said the {d.noun!}.',
        )
        w.say(
            "{a} gave the {d.noun!} a little of the {food!}.",
            '"You may have some, {d.noun!}," said {a!}.',
        )
        w.say(
            '"Thank you," said the {d.noun!}. "I will show you the way to the {q!}."',
            "The {d.noun!} {d.sound} and walked with {a!} to the {q!}.",
        )
    w.say(
        "At last {a} came to the {q!} and found the {j.job!}.",
        "{a} reached the {q!} before dark and knocked on the door of the {j.job!}.",
    )
    w.say(
        '"Good day, {j!}," said {a!}. "My {relative!} sends you some {food!}."',
        '"Are you {j!}?" asked {a!}. "This is from my {relative!}."',
    )
    w.say(
        '"Thank you, my dear," said {j!}, and ate the {food!}.',
        "The {j.job!} [was very happy|smiled] and thanked {a.him}.",
        '"I love {food!}!" said the {j.job!}.',
    )
    w.say(
        "{a} told {j!} about the {d.noun!} {p.in} {p!}.",
        "In the evening {a} went home to {a.his} {relative!}.",
        "When {a} came home, {a.he} told {a.his} {relative!} about the {d.noun!}.",
    )
    w.ask("Who did {a} meet on the way?", "{a} met {d.a}.")
    w.ask("What did {a} carry?", "{a} carried some {food}.")
    end(w, "Be brave and keep your word.", "Whoever sets out will arrive.", "A promise must be kept.")


def hide_and_seek(w: Writer) -> None:
    """Play hide and seek: two hide, one seeks."""
    w.people("a", "b", "c")
    w.places("p")
    hides = words("cart haystack curtain cupboard barrel fence bush ladder table wardrobe statue wall")
    w.choose(h=hides, k=hides)
    w.subject("{a}", "{b}", where="the {p}")
    open_two(w)
    w.say(
        "One day they met {c} {p.in} {p}.",
        "A {c.girl} named {c} often came with them to the {p}.",
        "Their friend {c} was waiting for them {p.in} {p}.",
    )
    w.say(
        '"Let us play hide and seek," said {a}.',
        '"We two will hide, and you must find us," said {c}.',
        "They wanted to play hide and seek.",
    )
    w.say(
        "{a} closed {a.his} eyes and counted to [ten|twenty|fifty].",
        "{a} stood by a tree and counted to [ten|twenty|fifty].",
    )
    w.say(
        "{b} hid behind a {h}, and {c!} hid behind a {k}.",
        "{c} hid behind a {k}, and {b!} hid behind a {h}.",
        "{b} found a {h} and hid behind it, while {c!} hid behind a {k}.",
    )
    scene(w)
    w.say('"I am coming!" called {a!}.', '"Here I come!" shouted {a!}.')
    w.say(
        "{a.He} looked [up in the trees|in the grass|under the leaves] first, but nobody was there.",
        "At first {a.he} could not find anyone {p.in} {p!}.",
    )
    # `x` behind the `v` is found first, `y` behind the `z` last; which of the two friends is open.
    order = "bchk" if w.chance(0.5) else "cbkh"
    for slot, source in zip("xyvz", order, strict=True):
        w.slots[slot] = w.slots[source]
    w.say(
        "Then {a.he} heard [a laugh|a noise|a cough] behind the {v}.",
        "Then {a.he} saw a [foot|hand|nose] behind the {v}.",
    )
    w.say(
        '"I have found you, {x!}!" said {a!}.',
        '"Come out, {x!}!" called {a!}.',
        "It was {x!}!",
    )
    w.say(
        '"Now I must find {y!}," said {a!}.',
        '"But where is {y!}?" asked {a!}.',
        "But {a.he} could not find {y!}.",
    )
    if w.chance(0.5):
        w.say(
            "{x} [smiled|laughed] and pointed at the {z!}.",
            '"Look behind the {z!}," [whispered|said] {x!}.',
        )
        w.say(
            "{a} ran to the {z!}, and there was {y!}.",
            '"There you are, {y!}!" cried {a!}.',
        )
    else:
        w.say(
            "It grew dark, and {a} and {x!} were worried.",
            "They looked for a long time.",
        )
        w.say(
            "At last {a} found {y!} fast asleep behind the {z!}.",
            "At last {x} looked behind the {z!}, and there sat {y!}.",
        )
        w.say('"Wake up, {y!}!" said {a} and {x!}.', '"You won the game, {y!}!" said {a}.')
    w.say(
        "Then it was time to go home, and {a}, {b} and {c!} walked together.",
        "They played {p.in} {p!} until the sun went down.",
        '"Tomorrow it is your turn to seek," said {a!} to {b}.',
    )
    w.ask("Where did {b} hide?", "{b} hid behind a {h}.")
    w.ask("Where did {c} hide?", "{c} hid behind a {k}.")
    end(w, "It was a fine day.", "Games are best with friends.", "Nobody was sad that day.")


def race(w: Writer) -> None:
    """Race for a prize; one falls, or rests too soon."""
    w.people("a", "b")
    w.people("j", jobs=JOBS)
    w.places("p", "q")
    w.things("t", among=GIFTS)
    w.subject("{a}", "{b}", where="the {q}")
    open_two(w)
    w.say(
        "One day the {j.job}, whose name was {j}, showed them {t.a}.",
        "In their town there was a {j.job} named {j}, who had {t.a}.",
    )
    w.say(
        '"You must run from the {p} to the {q}," said {j!}. "The first one gets the {t.noun!}."',
        '"Whoever runs from the {p} to the {q} first shall have my {t!}," said the {j.job!}.',
    )
    w.say(
        '"I will win the {t.noun!}!" said {a}.',
        '"I am faster than you, {b!}," said {a!}.',
        '"You will never win, {b!}," said {a!}.',
    )
    w.say(
        "They stood {p.in} {p!}, and the {j.job!} counted to three.",
        "The next [morning|day] they met {p.in} {p!}.",
        '"Run!" cried the {j.job!}, and they ran.',
    )
    w.say(
        "{a} was [fast|quick], and soon {b!} was far behind.",
        "At first {a} was far ahead of {b!}.",
        "{a} ran like the wind, and {b!} could not keep up.",
    )
    if w.chance(0.5):
        w.say(
            "But then {a} fell over a [stone|root|log] and hurt {a.his} [knee|foot|leg].",
            "But on the way {a} stepped into a hole and fell.",
        )
        w.say(
            "{b} could have run on, but {b.he} stopped.",
            "{b} saw it and stopped at once.",
        )
        w.say(
            '"Are you hurt, {a!}?" asked {b!}.',
            '"Take my hand, {a!}," said {b!}.',
        )
        w.say(
            "They went on [together|hand in hand] until they came to the {q!}.",
            "{b} helped {a!} to walk, and together they reached the {q!}.",
        )
        w.say(
            '"You are both winners," said {j!}.',
            '"You have a good heart, {b!}," said {j!}, "and the {t.noun!} is yours."',
            "The {j.job!} gave the {t.noun!} to both of them.",
        )
        w.say(
            "{a} and {b!} shared the {t.noun!} from that day on.",
            '"Thank you for your help, {b!}," said {a!}.',
        )
        w.ask("Who fell?", "{a} fell, and {b} stopped to help.")
    else:
        w.say(
            "{a} was so sure of it that {a.he} [sat down to rest|lay down in the grass|stopped to eat an apple].",
            "So {a} stopped to [rest|sleep|pick flowers].",
        )
        w.say(
            "But {b} ran on and on, and was the first to reach the {q!}.",
            "But {b} did not stop until {b.he} came to the {q!}.",
        )
        w.say(
            "When {a} reached the {q!}, {b!} was there already.",
            '"Where is {b!}?" asked {a!}. But {b!} was at the end already.',
        )
        w.say(
            '"You have won my {t!}, {b!}," said {j!}.',
            "The {j.job!} gave the {t.noun!} to {b!}.",
            "So {b} got the {t.noun!}.",
        )
        w.say(
            '"You ran well, {b!}," said {a!}.',
            '"Next time I will not stop," said {a!}.',
            "{b} let {a!} play with the {t.noun!} too.",
        )
        w.ask("Who won the race?", "{b} won the race.")
    w.ask("What was the prize?", "The prize was {t.a}.")
    end(w, "Helping is better than winning.", "Never give up too soon.", "It is not only speed that wins.")


def wish(w: Writer) -> None:
    """Share food with someone who can grant a wish."""
    w.people("a", "b")
    w.things("t", among=GIFTS)
    w.places("p")
    w.choose(food=FOODS, who=["fairy", "wizard", "witch", "giant", "dwarf", "queen", "king", "mermaid", "troll"])
    w.subject("{a}", "{who.a}", where="the {p}")
    open_one(w)
    w.say(
        "More than anything, {a.he} wished for {t.a}.",
        "{a.He} had always wanted {t.a}, but {a.he} had no money.",
        "Every night {a.he} dreamed of {t.a}.",
    )
    w.say(
        "One day {a} went to the {p} with some {food}.",
        "One [spring|summer|autumn|winter] day {a} sat {p.in} {p} and ate {food}.",
    )
    scene(w)
    w.say(
        "There {a.he} met {who.a} who was cold and hungry.",
        "Then {who.a} came by and sat down.",
        "Suddenly {who.a} stood before {a.him}.",
    )
    w.say(
        '"I have not eaten for three days," said the {who!}.',
        '"Will you share the {food!} with me?" asked the {who!}.',
        '"I like {food!}," said the {who!}.',
    )
    w.say(
        '"Please take the {food!}," said {a!}.',
        "{a} gave the {food!} to the {who!}.",
        "{a} shared the {food!} with the {who!}.",
    )
    w.say(
        '"You are kind," said the {who!}. "What do you wish for?"',
        '"Thank you, {a.girl}," said the {who!}. "You may have one wish."',
    )
    w.say(
        '"I wish for {t.a!}," said {a!}.',
        '"I would like to have {t.a!}," said {a!}.',
    )
    if w.chance(0.5):
        w.say(
            '"Close your eyes," said the {who!}.',
            "The {who!} [smiled|nodded|laughed] and said a magic word.",
        )
        w.say(
            "The {who!} was gone, and there was {t.a!}!",
            "Then the {who!} was gone, and {a} had {t.a!}.",
        )
        w.say(
            '"Thank you!" cried {a!}, but nobody was there.',
            "{a} [laughed|danced|sang] all the way home from the {p!}.",
        )
    else:
        w.say(
            '"Then help a {b.girl} named {b}, who is alone and sad," said the {who!}.',
            '"First you must find a {b.girl} named {b} and make {b.him} laugh," said the {who!}.',
        )
        w.say(
            "So {a} went to look for {b!}.",
            "{a} walked for [a day|two days|an hour] until {a.he} found {b!}.",
        )
        w.say(
            "{a} told {b!} a [joke|funny story], and {b!} laughed.",
            "{a} sang a song for {b!}, and {b!} laughed and danced.",
        )
        w.say(
            "When {a} came home, the {t.noun!} was on the table.",
            "Then the {who!} came back and gave {a!} the {t.noun!}.",
        )
        w.say(
            "{a} and {b!} played with the {t.noun!} every day.",
            '"Look, {b!}, I have {t.a!}!" said {a!}.',
        )
    w.maybe(
        0.5,
        "{a} never forgot the {who!}.",
        "{a} often went to the {p!}, but {a.he} never saw the {who!} again.",
    )
    w.ask("What did {a} wish for?", "{a} wished for {t.a}.")
    w.ask("Who gave {a} a wish?", "It was {who.a}.")
    end(w, "Those who share will be rich.", "Kindness costs nothing.", "Good wishes come true.")


def garden(w: Writer) -> None:
    """Grow something huge in spite of an animal."""
    w.people("a", "b")
    w.choose(plant=PLANTS, relative=RELATIVES, size=phrases("house|horse|cow|barrel|wagon|boat"))
    w.animal("d", among=words("rabbit mouse goat crow hen goose squirrel"))
    w.subject("{a}", "{plant.a}", where="")
    open_one(w)
    w.say(
        "One spring {a.his} {relative} gave {a.him} a seed.",
        "{a.He} found a seed in the pocket of {a.his} {relative}.",
        "In spring {a.he} got a seed from {a.his} {relative}.",
    )
    w.say(
        '"It will grow into {plant.a}," said {a.his} {relative!}.',
        '"If you water it, you will have {plant.a}," said {a.his} {relative!}.',
    )
    w.say(
        "{a} [planted|put] the seed in the ground behind the house.",
        "{a} made a hole in the ground and put the seed in it.",
    )
    w.say(
        "Every [morning|evening] {a.he} gave it water and sang to it.",
        "The rain came, and the sun shone, and a little leaf came up.",
    )
    w.say(
        '"Will my {plant!} ever be big?" asked {a!}.',
        '"Grow, little {plant!}," said {a!}.',
    )
    w.say(
        "One day {d.a} came and wanted to eat the {plant!}.",
        "But {d.a} lived near the house, and it was hungry.",
        "One night {a} saw {d.a} beside the {plant!}.",
    )
    if w.chance(0.5):
        w.say(
            '"Go away, {d.noun!}!" [said|cried|shouted] {a!}.',
            '"You must not eat my {plant!}!" {a} told the {d.noun!}.',
        )
        w.say(
            "A {b.girl} called {b} heard this and helped {a!} to build a fence.",
            "{a.His} friend {b} made a fence around the {plant!}.",
        )
        w.say(
            "The {d.noun!} {d.sound} and went away.",
            "The {d.noun!} never came back.",
        )
    else:
        w.say(
            '"Leave my {plant!} alone, {d.noun!}, and I will feed you," said {a!}.',
            "{a} gave the {d.noun!} some bread, and it left the {plant!} alone.",
        )
        w.say(
            "From then on the {d.noun!} came every day, and {a} gave it food.",
            "So the {d.noun!} and {a!} became friends.",
        )
        w.say(
            "A {b.girl} called {b} came to see the {d.noun!} and the {plant!}.",
            "{a} showed the {plant!} to {a.his} friend {b}.",
        )
    w.say(
        "In [summer|autumn] the {plant!} was as big as a {size}.",
        "The {plant!} grew and grew until it was the biggest {plant!} in the village.",
    )
    w.say(
        '"What a {plant!}!" said {b!}.',
        '"I have never seen such a {plant!}, {a!}," said {b!}.',
        '"You did very well, {a!}," said {b!}.',
    )
    w.say(
        "{a} took the {plant!} to the fair and won first prize.",
        "{a} showed the {plant!} to {a.his} {relative!}, who was very proud.",
        '"Thank you for your help, {b!}," said {a!}.',
        "{a} and {b!} took the {plant!} to {a.his} {relative!}.",
    )
    w.ask("What did {a} grow?", "{a} grew {plant.a}.")
    w.ask("Which animal came?", "It was {d.a}.")
    end(w, "Good things grow slowly.", "Whoever plants will have a harvest.", "A little care every day is enough.")


def quarrel(w: Writer) -> None:
    """Find a thing together, quarrel over it, take turns."""
    w.people("a", "b")
    w.things("t", among=GIFTS)
    w.places("p")
    w.choose(relative=ELDERS, feeling=["angry", "cross", "upset"])
    w.subject("{a}", "{b}", "{t.a}", where="the {p}")
    open_two(w)
    w.say(
        "One day they were playing {p.in} {p} and found {t.a}.",
        "One [morning|afternoon|evening], {t.a} lay {p.in} {p}, and they both saw it.",
        "On the way to the {p} they saw {t.a} in the road.",
    )
    first, second = ("a", "b") if w.chance(0.5) else ("b", "a")
    w.slots["x"], w.slots["y"] = w.slots[first], w.slots[second]
    w.say('"I saw the {t.noun!} first!" said {x}.', '"This is my {t!} now," said {x}.')
    w.say(
        '"No, {x!}, it is mine!" said {y!}.',
        '"That is not fair, {x!}," said {y!}. "I want the {t.noun!} too."',
    )
    w.say(
        "{x} pulled, and {y!} pulled, and they were both {feeling}.",
        "{x} held the {t.noun!} tight, and {y!} was {feeling}.",
        "{y} took the {t.noun!} from {x!} and ran away.",
    )
    w.say(
        "Just then the {relative} of {x!} came by.",
        "The {relative} of {y!} heard the noise and came to the {p!}.",
    )
    w.say(
        '"Why are you so {feeling}?" asked the {relative!}.',
        '"What is the matter with you two?" asked the {relative!}.',
    )
    w.say(
        '"We both want the {t.noun!}," said {x} and {y!}.',
        "They showed the {t.noun!} to the {relative!}.",
    )
    w.say(
        '"Then you must take turns," said the {relative!}. "Today it is for {x}, and tomorrow it is for {y!}."',
        '"Today the {t.noun!} is for {x}, and tomorrow it is for {y!}," said the {relative!}.',
    )
    w.say(
        "So {x!} played with the {t.noun!} that day.",
        "That day {x!} took the {t.noun!} home.",
    )
    w.say(
        "The next day {x!} brought the {t.noun!} to {y!}.",
        "The next morning it was the turn of {y!}.",
    )
    w.say(
        '"Here is the {t.noun!}, {y!}," said {x!}.',
        '"Now it is your turn, {y!}," said {x!}.',
    )
    w.say(
        '"Let us play with it together, {x!}," said {y!}.',
        '"Thank you, {x!}," said {y!}. "I am sorry that I was {feeling}."',
    )
    w.say(
        "And they went to the {p!} with the {t.noun!} and played all day.",
        "After that they never fought over the {t.noun!} again.",
    )
    w.ask("What did they find?", "They found {t.a}.")
    w.ask("Who had the {t.noun} first?", "{x} had the {t.noun} first.")
    end(w, "Sharing is better than fighting.", "Two can play with one thing.", "It is good to take turns.")


def asking_animals(w: Writer) -> None:
    """Ask one animal after the other for what was lost."""
    w.people("a")
    w.things("t")
    w.places("p", "q")
    kinds = words("owl crow fox mouse rabbit squirrel frog goose donkey robin swan hen cat dog")
    w.animal("d", among=kinds)
    w.animal("e", among=kinds)
    w.choose(food=FOODS, spot=SPOTS)
    w.subject("{a}", "{t.a}", where="the {q}")
    open_one(w)
    w.say(
        "One [morning|day|evening] the wind took away {a.his} {t}.",
        "One day {a.he} could not find {a.his} {t}.",
        "One night someone stole {a.his} {t}.",
    )
    feel(w, "a")
    w.say(
        "So {a} went to the {p} and met {d.a}.",
        "So {a} walked to the {p}, where {a.he} saw {d.a}.",
    )
    w.say(
        '"Dear {d.noun!}, have you seen my {t!}?" asked {a!}.',
        '"Good day, {d.noun!}," said {a!}. "I am looking for my {t!}."',
        '"Do you know where my {t!} is?" {a} asked the {d.noun!}.',
    )
    w.say(
        '"No," said the {d.noun!}, "but ask the {e.noun} {q.in} {q}."',
        '"I have not seen it," said the {d.noun!}. "Go to the {q} and ask the {e.noun}."',
    )
    w.say(
        '"Thank you, {d.noun!}," said {a!}, and went to the {q!}.',
        "{a} thanked the {d.noun!} and [ran|walked|hurried] to the {q!}.",
    )
    scene(w)
    w.say(
        "{q.In} {q!}, the {e.noun!} was [asleep|eating|singing].",
        "There {a.he} found the {e.noun!}, who was very old.",
    )
    w.say(
        '"Please, {e.noun!}, where is my {t!}?" asked {a!}.',
        '"The {d.noun!} sent me," said {a!}. "Have you seen my {t!}?"',
    )
    w.say(
        '"Give me some {food}, and I will tell you," said the {e.noun!}.',
        '"First I want some {food}," said the {e.noun!}.',
    )
    w.say(
        "{a} gave the {food!} to the {e.noun!}.",
        "So {a} brought some {food!}, and the {e.noun!} ate.",
    )
    w.say(
        '"Look {spot}," said the {e.noun!}.',
        '"The {t.noun!} is {spot}," said the {e.noun!}.',
    )
    w.say(
        "{a} looked, and there it was: {a.his} {t!}!",
        "{a} found the {t.noun!} and [laughed|jumped] with joy.",
    )
    w.say(
        '"Thank you, {e.noun!}!" said {a!}.',
        "On the way home {a} stopped {p.in} {p!} and showed the {t.noun!} to the {d.noun!}.",
        "{a} went home with the {t.noun!} and told everyone about the {d.noun!} and the {e.noun!}.",
    )
    w.ask("Who knew where the {t.noun} was?", "The {e.noun} knew where it was.")
    w.ask("Who did {a} meet first?", "First {a} met the {d.noun}.")
    end(w, "Ask, and you will find out.", "The one who asks does not get lost.", "Good manners open doors.")


def journey(w: Writer) -> None:
    """Move away with a present from a friend, write a letter, be visited."""
    w.people("a", "b")
    w.places("p")
    w.things("t")
    ride = ["boat", "train", "cart", "wagon", "bus", "ship", "sled", "bicycle"]
    w.choose(ride=ride, sight=["a rainbow", "a whale", "a castle", "a waterfall", "a parade", "a circus", "snow"])
    w.subject("{a}", "{b}", where="the {p}")
    open_two(w)
    w.say(
        "One day {a} had to go away to live with {a.his} [aunt|uncle|grandmother|grandfather].",
        "One [spring|summer|autumn|winter], {a} had to go on a long journey.",
    )
    w.say(
        '"I will miss you, {a!}," said {b!}. "Take my {t}."',
        '"Take my {t} with you, {a!}," said {b!}.',
        "{b} was sad and gave {a!} {t.a}.",
    )
    feel(w, "a")
    w.say(
        '"Thank you, {b!}," said {a!}. "I will take good care of the {t.noun!}."',
        '"When I see the {t.noun!}, I will think of you, {b!}," said {a!}.',
    )
    w.say(
        "Then {a} took the {ride} and was gone.",
        "{a} went away by {ride}, and {b!} waved for a long time.",
    )
    scene(w)
    w.say(
        "On the way {a} saw {sight}.",
        "From the {ride!} {a} could see {sight}.",
    )
    w.say(
        "The new home was not far from {p.a}, and {a} went there every day with the {t.noun!}.",
        "{a} lived near {p.a} now, and {a.he} kept the {t.noun!} under {a.his} pillow.",
    )
    feel(w, "a")
    w.say(
        "Soon {a.he} wrote a letter to {b!}.",
        "One rainy day {a.he} wrote to {b!}.",
    )
    w.say(
        '"Dear {b!}," {a} wrote, "I still have your {t!}. Please come and see the {p!}."',
        '"Dear {b!}, I live near {p.a!} now, and I saw {sight!}," wrote {a!}.',
        '"Dear {b!}, I miss you, but I have your {t!}," wrote {a!}.',
    )
    w.say(
        "When {b} read the letter, {b.he} packed {b.his} bag at once.",
        "{b} read the letter again and again.",
    )
    w.say(
        "[In summer|After a month|The next week] {b} took the {ride!} and went to see {a!}.",
        "Then {b} came by {ride!} to visit {a!}.",
    )
    w.say(
        '"You have come, {b!}!" cried {a!}.',
        "{a} ran out of the house and [hugged|kissed] {b!}.",
        '"Here is your {t!}," said {a!}.',
    )
    w.say(
        '"Please keep the {t.noun!}, {a!}," said {b!}. "Show me the {p!}."',
        '"And now I want to see the {p!}," said {b!}.',
        "Together they went to the {p!} with the {t.noun!}.",
    )
    w.ask("What did {b} give to {a}?", "{b} gave {a} {t.a}.")
    w.ask("How did {a} travel?", "{a} went by {ride}.")
    end(w, "Old friends stay friends.", "No road is too long to see a friend.", "A letter can make someone happy.")


def storm(w: Writer) -> None:
    """Shelter from a storm, with a thing that turns out useful."""
    w.people("a", "b")
    w.things("t", among=words("lamp lantern candle blanket whistle rope bell drum horn"))
    w.places("q", among=SHELTERS)
    w.places("p")
    w.choose(food=FOODS, relative=ELDERS)
    w.subject("{a}", "{b}", "a storm", where="the {p}")
    open_two(w)
    w.say(
        "One day they walked to the {p} with some {food}.",
        "One [morning|afternoon] they went to the {p} to eat {food}.",
    )
    w.say(
        "{a} carried {t.a}, which {a.he} always had with {a.him}.",
        "{b} laughed because {a!} had brought {t.a}.",
        '"Why do you carry {t.a}?" {b} asked {a!}.',
    )
    w.say(
        "Suddenly the sky grew dark, and a storm came up.",
        "Then it began to [rain|snow|thunder], and the wind blew hard.",
    )
    feel(w, "b")
    w.say('"I am afraid, {a!}," said {b!}.', '"We must get away from the {p!}!" cried {b}.')
    w.say(
        '"We can hide {q.in} {q}," said {a}.',
        "Then {a} saw a way to the {q}.",
    )
    w.say(
        "So they ran to the {q!} and waited.",
        "They ran to the {q!} as fast as they could.",
        "{a} took {b!} by the hand, and they ran to the {q!}.",
    )
    w.say(
        "It was [dark and cold|cold and wet] there, but {a} had the {t.noun!}.",
        '"Now we need your {t!}, {a!}," said {b!}.',
        '"It is good that you have your {t!}," said {b!}.',
    )
    w.say(
        "They ate the {food!} and [sang songs|told each other stories].",
        "They shared the {food!}, and {a} told a story.",
        '"Have some {food!}, {b!}," said {a!}.',
    )
    w.say(
        "The {relative} of {b!} was looking for them {p.in} {p!}.",
        "At home the {relative} of {a!} was worried and went out to find them.",
    )
    w.say(
        "{a} used the {t.noun!} to show where they were.",
        "With the {t.noun!} {a} gave a sign.",
    )
    w.say(
        "The {relative!} saw it and found {a} and {b!} {q.in} {q!}.",
        "So the {relative!} came to the {q!} and found them.",
    )
    w.say(
        '"You are safe, {a} and {b!}!" said the {relative!}.',
        '"I am so glad that you had the {t.noun!}," said the {relative!}.',
        "The {relative!} took them home and gave them [hot soup|dry clothes|warm milk].",
    )
    w.say(
        "{b} never laughed about the {t.noun!} again.",
        "From that day on, {b} wanted to have {t.a!} too.",
        '"Your {t!} is a fine thing, {a!}," said {b!}.',
    )
    w.ask("Where did they hide from the storm?", "They hid {q.in} {q}.")
    w.ask("What did {a} carry?", "{a} carried {t.a}.")
    end(w, "It is wise to be ready.", "After the rain comes the sun.", "Be ready, and you need not be afraid.")


def lesson(w: Writer) -> None:
    """Learn a skill from a master and pass it on."""
    w.people("a", "b")
    w.people("j", jobs=JOBS)
    w.places("p")
    skills = phrases("swim|sing|dance|paint|read|write|cook|sew|ride|skate|whistle|fish|knit|juggle|climb|sail")
    w.choose(skill=skills, relative=ELDERS)
    w.subject("{a}", "a {j.job}", where="the {p}")
    open_one(w)
    w.say(
        "{a.He} wanted to learn to {skill}, but nobody had time to teach {a.him}.",
        "All the other children could {skill}, but {a} could not.",
        "{a.He} dreamed that one day {a.he} would {skill}.",
    )
    feel(w, "a")
    w.say(
        '"You are too small to {skill!}," said {a.his} {relative}.',
        '"Ask someone who can {skill!}," said {a.his} {relative}.',
    )
    w.say(
        "{p.In} {p} there was a {j.job} named {j}.",
        "Then {a.he} heard of {j}, a {j.job} who lived {p.in} {p}.",
    )
    w.say(
        "{a} went to the {p!} and found the {j.job!}.",
        "So {a} [ran|walked|went] to the {p!} to see {j!}.",
    )
    w.say(
        '"Please, {j!}, teach me to {skill!}," said {a!}.',
        '"Can you teach me to {skill!}?" {a} asked the {j.job!}.',
    )
    w.say(
        '"It is not easy to {skill!}," said the {j.job!}. "You must come every day."',
        '"I will teach you, {a!}," said {j!}, "if you help me with my work."',
    )
    w.say(
        "Every day {a} went to the {p!} and helped the {j.job!}.",
        "So {a} came back to the {p!} every day, in sun and rain.",
    )
    w.say(
        "At first it was hard, and {a} wanted to stop.",
        "At first {a.he} was [slow|afraid|tired], and the other children laughed.",
    )
    w.say('"Try again, {a!}," said {j!}.', '"Do not give up," said the {j.job!}.')
    w.say(
        "After [a week|a month|a year], {a} could {skill!} very well.",
        "And one fine morning {a} could {skill!} as well as {j!}.",
    )
    w.say(
        "Then {a.he} met a {b.girl} named {b}, who could not {skill!}.",
        "One day a {b.girl} called {b} came and watched {a!}.",
    )
    w.say(
        '"I wish I could {skill!} like you, {a!}," said {b!}.',
        '"Who taught you to {skill!}, {a!}?" asked {b!}.',
    )
    w.say(
        '"I learned it from {j!}," said {a!}. "I will teach you, {b!}."',
        '"I went to {j!} the {j.job!}," said {a!}. "Now I will teach you, {b!}."',
    )
    w.say(
        "When {a.his} {relative!} heard it, there was a party.",
        "{a.His} {relative!} saw them {p.in} {p!} and was very proud.",
        "And so {b} learned to {skill!} too.",
    )
    w.ask("Who taught {a}?", "{j} the {j.job} taught {a} to {skill}.")
    w.ask("What did {a} learn?", "{a} learned to {skill}.")
    end(w, "Practice makes perfect.", "Nobody is too small to learn.", "What you learn, you can teach.")


PLOTS: list[Callable[[Writer], None]] = [
    lost_and_found, birthday, swap, hurt_animal, broken, errand, hide_and_seek, race,
    wish, garden, quarrel, asking_animals, journey, storm, lesson,
]  # fmt: skip


def story(rng: random.Random) -> Story:
    """Tell one story, by a plot drawn at random."""
    w = Writer(rng)
    PLOTS[int(rng.random() * len(PLOTS))](w)
    return w.story()


def stories(seed: int) -> Iterator[Story]:
    """Tell stories without end."""
    rng = random.Random(seed)
    while True:
        yield story(rng)


# ----------------------------------------------------------------------------
# Chat


REQUESTS = [
    "Tell me a story about {about}.",
    "Please tell me a story about {about}.",
    "Can you tell me a story about {about}?",
    "Write a short story about {about}.",
    "I would like to hear a story about {about}.",
    "A story about {about}, please.",
]
SYSTEM = [
    "You are a storyteller.",
    "You tell short stories to children.",
    "You are a kind storyteller who writes in plain English.",
    "Answer every request with a story.",
]
GREETINGS = [
    ("Hello!", "Hello! What shall the story be about?"),
    ("Hi, who are you?", "I am a storyteller. What shall the story be about?"),
    ("Good evening.", "Good evening! Shall I tell you a story?"),
]
THANKS = [
    ("Thank you!", "You are welcome!"),
    ("That was a good story.", "I am glad that you liked it."),
    ("I liked that, thank you.", "I am glad! Come back for another story."),
]


def join(parts: Sequence[str]) -> str:
    """Enumerate: "Mia, a red kite and the mill"."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


@dataclass(frozen=True)
class Message:
    """A turn of a conversation. An assistant's turn has a thought, which may be shown before it or not."""

    role: str
    content: str
    thought: str = ""
    marks: Marks = Marks()  # as in a story; here the request counts as read, too


def mentions(text: str, wanted: Sequence[str]) -> list[Span]:
    """Find the first mention in `text` of each phrase, without its article."""
    spans = []
    for phrase in wanted:
        bare = re.sub(r"^(an?|the) ", "", phrase)
        if m := re.search(rf"\b{re.escape(bare)}\b", text):
            spans.append(m.span())
    return spans


def chat(rng: random.Random) -> list[Message]:
    """Make up a conversation: a request, the story, perhaps a greeting before and a question after."""

    def pick(options: Sequence[Any]) -> Any:
        return options[int(rng.random() * len(options))]

    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append(Message("system", pick(SYSTEM)))
    if rng.random() < 0.1:
        question, answer = pick(GREETINGS)
        messages += [Message("user", question), Message("assistant", answer, "A greeting.")]
    told = story(rng)
    about = list(told.about)
    thought = f"A story about {join([*about, told.where] if told.where else about)}."
    if rng.random() < 0.3 and told.where:
        about.append(told.where)
    messages.append(Message("user", pick(REQUESTS).replace("{about}", join(about))))
    references = tuple(sorted({*told.marks.references, *mentions(told.text, about)}))
    messages.append(Message("assistant", told.text, thought, replace(told.marks, references=references)))
    roll = rng.random()
    if roll < 0.4:
        question, answer = pick(told.questions)
        messages.append(Message("user", question))
        thought = f"A question about {told.about[0]}."
        messages.append(Message("assistant", answer, thought, Marks(references=((0, len(answer)),))))
    elif roll < 0.5:
        question, answer = pick(THANKS)
        messages += [Message("user", question), Message("assistant", answer, "They liked the story.")]
    return messages


# ----------------------------------------------------------------------------
# Plain sentences: digits, punctuation and grown-up matters, so that these are not unknown.


def note(rng: random.Random) -> str:
    """Write a few plain sentences with numbers, dates, prices and times."""
    w = Writer(rng)

    def number(low: int, high: int) -> str:
        return str(low + int(rng.random() * (high - low + 1)))

    w.people("a", "b", jobs=JOBS)
    w.places("p", "q")
    w.choose(food=FOODS, material=MATERIALS, weather=WEATHER, season=SEASONS, plant=PLANTS)
    months = words("January February March April May June July August September October November December")
    week = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
    for _ in range(2 + int(rng.random() * 4)):
        w.slots["n"] = word(number(2, 99))
        w.slots["m"] = word(number(100, 9999))
        w.slots["year"] = word(number(1800, 2030))
        w.slots["date"] = word(f"{number(1, 28)} {w.pick(months)}")
        w.slots["day"] = word(w.pick(week))
        w.slots["time"] = word(f"{number(1, 12)}:{number(10, 59)}")
        w.slots["price"] = word(f"${number(1, 40)}.{number(10, 99)}")
        w.say(
            "On {date} {year}, {n} people came to the {p}.",
            "The {a.job} sold {n} baskets of {food} for {price} each.",
            "Open on {day} from {time} to {time} (closed in {season}).",
            "It is {n} miles from the {p} to the {q}; the road was built in {year}.",
            "Note: the price of {material} rose by {n}%, from {price} to a new high.",
            "{a} ({n}) and {b} ({n}) work {p.in} {p}.",
            "Today it is {weather}; tomorrow it will be {n} degrees.",
            "How to grow {plant.a}: (1) dig a hole, (2) add water, (3) wait {n} days.",
            "The train leaves at {time} - don't be late! It's the only one until {day}.",
            "Room {m}: ask for {a}, the {a.job}.",
            "In {year} there were {m} houses; in {year} there weren't any.",
            "To: {a}. From: {b}. I'll be there on {day}, I'm sure; we've got {n} seats.",
            "Is {n} + {n} more than {m}? No, it isn't.",
        )
    return w.text


# ----------------------------------------------------------------------------
# Documents


@dataclass(frozen=True)
class Document:
    """A text with its marks, or a conversation (then `text` is empty)."""

    text: str = ""
    marks: Marks = Marks()
    messages: tuple[Message, ...] = ()


def collection(told: Sequence[Story], after: str = "") -> tuple[str, Marks]:
    """Put stories into one text, a blank line between them and `after` behind the last."""
    text, marks = "", Marks()
    for i, one in enumerate(told):
        text += "\n\n" if i else ""
        marks += one.marks.shifted(len(text))
        text += one.text
    return text + after, marks


def documents(seed: int, n: int) -> Iterator[Document]:
    """Make `n` documents: single stories, collections of stories, conversations, notes."""
    rng = random.Random(seed)
    for _ in range(n):
        roll = rng.random()
        if roll < 0.56:
            yield Document(*collection([story(rng)]))
        elif roll < 0.80:
            count = 2 + int(rng.random() * 3)
            yield Document(*collection([story(rng) for _ in range(count)]))
        elif roll < 0.98:
            yield Document(messages=tuple(chat(rng)))
        else:
            yield Document(note(rng))


HELD_OUT_SEED = 20240229
HELD_OUT_SIZE = 60_000


def held_out() -> tuple[str, Marks]:
    """Write HELD_OUT_SIZE characters of stories or a little more, a blank line after each, and the marks."""
    told: list[Story] = []
    for one in stories(HELD_OUT_SEED):
        told.append(one)
        if sum(len(t.text) + 2 for t in told) >= HELD_OUT_SIZE:
            break
    return collection(told, after="\n\n")


def training_documents(seed: int, n: int) -> Iterator[Document]:
    """Make `n` documents, less those with a story that is also among the held-out ones."""
    excluded = set(held_out()[0].split("\n\n")) - {""}
    for document in documents(seed, n):
        told = document.text.split("\n\n") if document.text else [m.content for m in document.messages]
        if excluded.isdisjoint(told):
            yield document


def main() -> None:
    """Print stories, or write the held-out ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=5, help="how many stories to print")
    parser.add_argument("--held-out", action="store_true", help="write held_out.txt and held_out.json instead")
    a = parser.parse_args()
    if a.held_out:
        text, marks = held_out()
        here = Path(__file__).parent
        (here / "held_out.txt").write_text(text)
        (here / "held_out.json").write_text(json.dumps(asdict(marks), separators=(",", ":")) + "\n")
        return
    for told in islice(stories(a.seed), a.n):
        print(told.text, end="\n\n")


if __name__ == "__main__":
    main()
