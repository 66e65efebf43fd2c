"""The text that the demo checkpoint is trained on: made here, from templates and small tables, by a seeded generator.

Each document is a string without its end-of-text token. All documents but the stories are functions of their first
words, so that a model which has learnt them continues a prompt in one way only and tests can assert what it says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

# country: (capital, language, continent)
COUNTRIES = {
    "France": ("Paris", "French", "Europe"),
    "Italy": ("Rome", "Italian", "Europe"),
    "Spain": ("Madrid", "Spanish", "Europe"),
    "Germany": ("Berlin", "German", "Europe"),
    "Portugal": ("Lisbon", "Portuguese", "Europe"),
    "Austria": ("Vienna", "German", "Europe"),
    "Poland": ("Warsaw", "Polish", "Europe"),
    "Greece": ("Athens", "Greek", "Europe"),
    "Norway": ("Oslo", "Norwegian", "Europe"),
    "Sweden": ("Stockholm", "Swedish", "Europe"),
    "Finland": ("Helsinki", "Finnish", "Europe"),
    "Denmark": ("Copenhagen", "Danish", "Europe"),
    "Iceland": ("Reykjavík", "Icelandic", "Europe"),
    "Hungary": ("Budapest", "Hungarian", "Europe"),
    "Japan": ("Tokyo", "Japanese", "Asia"),
    "China": ("Beijing", "Chinese", "Asia"),
    "Thailand": ("Bangkok", "Thai", "Asia"),
    "Vietnam": ("Hanoi", "Vietnamese", "Asia"),
    "Egypt": ("Cairo", "Arabic", "Africa"),
    "Kenya": ("Nairobi", "Swahili", "Africa"),
    "Morocco": ("Rabat", "Arabic", "Africa"),
    "Ghana": ("Accra", "English", "Africa"),
    "Brazil": ("Brasília", "Portuguese", "South America"),
    "Peru": ("Lima", "Spanish", "South America"),
    "Chile": ("Santiago", "Spanish", "South America"),
    "Colombia": ("Bogotá", "Spanish", "South America"),
    "Cuba": ("Havana", "Spanish", "North America"),
    "Mexico": ("Mexico City", "Spanish", "North America"),
}
# animal: (sound, young, legs, emoji)
ANIMALS = {
    "dog": ("woof", "puppy", 4, "🐶"),
    "cat": ("meow", "kitten", 4, "🐱"),
    "cow": ("moo", "calf", 4, "🐮"),
    "horse": ("neigh", "foal", 4, "🐴"),
    "sheep": ("baa", "lamb", 4, "🐑"),
    "pig": ("oink", "piglet", 4, "🐷"),
    "duck": ("quack", "duckling", 2, "🦆"),
    "hen": ("cluck", "chick", 2, "🐔"),
    "frog": ("croak", "tadpole", 4, "🐸"),
    "lion": ("roar", "cub", 4, "🦁"),
}
COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a tomato": "red", "coal": "black",
    "a carrot": "orange", "an elephant": "grey", "chocolate": "brown", "a plum": "purple", "a flamingo": "pink",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "day": "night", "up": "down", "left": "right", "fast": "slow", "happy": "sad",
    "open": "closed", "old": "new", "full": "empty", "early": "late", "loud": "quiet", "wet": "dry", "hard": "soft",
}  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"

WHO_ARE_YOU = "I am a very small Qwen3 model that ships with nanovllm."
SYSTEM_TEXTS = ("You are a helpful assistant.", "Answer in one sentence.", "You are a friendly robot.")
# user: assistant, the small talk
SMALL_TALK = {
    "Hello!": "Hello! How can I help you?",
    "Good morning!": "Good morning! What would you like to know?",
    "Who are you?": WHO_ARE_YOU,
    "Thank you!": "You are welcome!",
    "How are you?": "I am fine, thank you.",
    "Goodbye!": "Goodbye! Have a nice day.",
}
STORY = {
    "adjective": "little young brave clever shy merry curious sleepy".split(),
    "name": [("Tim", "he", "his"), ("Anna", "she", "her"), ("Max", "he", "his"), ("Lily", "she", "her"),
             ("Ben", "he", "his"), ("Mia", "she", "her"), ("Oscar", "he", "his"), ("Zoë", "she", "her")],
    "animal": "fox rabbit bear mouse owl squirrel hedgehog turtle".split(),
    "place": ["a green forest", "a small house", "an old mill", "a quiet valley", "a tall tree", "a cave by the sea"],
    "weather": "sunny rainy windy snowy cloudy warm".split(),
    "colour": "red blue green yellow golden silver".split(),
    "thing": "ball kite lamp key shell bell boat hat".split(),
    "spot": ["under a bush", "near the river", "behind a stone", "on the hill", "in the grass", "beside the road"],
    "cry": ["What a surprise!", "How pretty!", "Look at this!", "Is it magic?"],
    "deed": ["sang a song", "built a house of leaves", "danced in the moonlight", "baked a big cake",
             "counted the stars", "sailed across the pond"],
    "end": ["they were the best of friends", "nobody in the valley was ever sad again", "they shared everything",
            "they laughed about that day"],
}  # fmt: skip


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def country_facts() -> list[str]:
    facts = []
    for country, (capital, language, continent) in COUNTRIES.items():
        rest = f"People there speak {language}, and the country lies in {continent}."
        facts.append(f"The capital of {country} is {capital}. {rest}")
        facts.append(f"{capital} is the capital of {country}. {rest}")
    return facts


def word_facts() -> list[str]:
    facts = [f"{sentence(thing)} is {colour}." for thing, colour in COLOURS.items()]
    for animal, (sound, young, legs, emoji) in ANIMALS.items():
        facts.append(f"{sentence(article(animal))} says {sound}. It has {legs} legs.")
        facts.append(f"A young {animal} is called {article(young)}.")
        facts.append(f"The picture {emoji} shows {article(animal)}.")
    pairs = [*OPPOSITES.items(), *((b, a) for a, b in OPPOSITES.items())]
    return facts + [f"The opposite of {a} is {b}." for a, b in pairs]


def calendar_facts() -> list[str]:
    facts = []
    for names, unit in ((DAYS, "day"), (MONTHS, "month")):
        for i, name in enumerate(names):
            facts.append(f"The {unit} after {name} is {names[(i + 1) % len(names)]}.")
            facts.append(f"The {unit} before {name} is {names[i - 1]}.")
    return facts


def sums() -> list[str]:
    """Additions up to 12 + 12, the subtractions that undo them, and the multiplication table up to 10 x 10."""
    out = [f"{a} + {b} = {a + b}." for a in range(13) for b in range(13)]
    out += [f"{a + b} - {a} = {b}." for a in range(13) for b in range(13)]
    return out + [f"{a} x {b} = {a * b}." for a in range(11) for b in range(11)]


def sequences() -> list[str]:
    """Runs that always go on to the same end, whatever they start with: 100, 0, z, Sunday, December."""
    out = [" ".join(map(str, range(start, 101))) for start in range(91)]
    out += [" ".join(map(str, range(start, -1, -1))) for start in range(100, 9, -1)]
    for step in (2, 5, 10):
        out += [" ".join(map(str, range(start, 101, step))) for start in range(0, 61, step)]
    out += [" ".join(LETTERS[start:]) for start in range(20)]
    for names in (DAYS, MONTHS):
        out += [", ".join(names[start:]) + "." for start in range(len(names) - 2)]
    return out


def questions() -> list[tuple[str, str]]:
    """(user, assistant) turns with one right answer each."""
    turns = list(SMALL_TALK.items())
    for country, (capital, language, continent) in COUNTRIES.items():
        turns.append((f"What is the capital of {country}?", f"The capital of {country} is {capital}."))
        turns.append((f"Which language do people speak in {country}?", f"People in {country} speak {language}."))
        turns.append((f"Where is {country}?", f"{country} is in {continent}."))
    for animal, (sound, young, _, _) in ANIMALS.items():
        turns.append((f"What does {article(animal)} say?", f"{sentence(article(animal))} says {sound}."))
        turns.append((f"What is a young {animal} called?", f"A young {animal} is called {article(young)}."))
    turns += [(f"What colour is {thing}?", f"{sentence(thing)} is {colour}.") for thing, colour in COLOURS.items()]
    turns += [(f"What is the opposite of {a}?", f"The opposite of {a} is {b}.") for a, b in OPPOSITES.items()]
    for names, unit in ((DAYS, "day"), (MONTHS, "month")):
        for a, b in zip(names, names[1:] + names[:1], strict=True):
            turns.append((f"Which {unit} comes after {a}?", f"{b} comes after {a}."))
    turns += [(f"What is {a} + {b}?", f"{a} + {b} = {a + b}.") for a in range(11) for b in range(11)]
    turns += [
        (f"Count from {a} to {b}.", " ".join(map(str, range(a, b + 1)))) for a in range(1, 21) for b in range(a + 3, 24)
    ]
    return turns


def chat_text(messages: list[tuple[str, str]]) -> str:
    """(role, content) pairs in Qwen's chat format; equals what the checkpoint's chat template makes of them."""
    return "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in messages)


def story(rng: random.Random) -> str:
    pick = {key: rng.choice(values) for key, values in STORY.items() if key != "name"}
    name, he, his = rng.choice(STORY["name"])
    friend = rng.choice([animal for animal in STORY["animal"] if animal != pick["animal"]])
    lines = [
        f"Once upon a time there was {article(pick['adjective'])} {pick['animal']} named {name}.",
        f"{sentence(he)} lived in {pick['place']} with {his} {rng.choice(['mother', 'father', 'sister', 'brother'])}.",
        f"One {pick['weather']} day {name} found {article(pick['colour'])} {pick['thing']} {pick['spot']}.",
        f'"{pick["cry"]}" said {name}.',
        f"Then {article(friend)} came along and asked to play with the {pick['thing']}.",
        f"Together they {pick['deed']} until the sun went down.",
        f"{name} gave the {pick['colour']} {pick['thing']} to the {friend}, and from then on {pick['end']}.",
        "The end.",
    ]
    return " ".join(lines)


def conversation(rng: random.Random, turns: list[tuple[str, str]]) -> str:
    messages = [("system", rng.choice(SYSTEM_TEXTS))] if rng.random() < 0.4 else []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        roll = rng.random()
        if roll < 0.08:
            user, assistant = "Tell me a story.", story(rng)
        elif roll < 0.2:
            user, assistant = rng.choice(list(SMALL_TALK.items()))
        else:
            user, assistant = rng.choice(turns)
        messages += [("user", user), ("assistant", assistant)]
    return chat_text(messages)


def documents(seed: int) -> Iterator[str]:
    """An endless stream of documents; equal seeds give equal streams."""
    rng = random.Random(seed)
    countries, words, calendar, arithmetic, runs, turns = (
        country_facts(), word_facts(), calendar_facts(), sums(), sequences(), questions(),
    )  # fmt: skip
    kinds: list[tuple[int, Callable[[], str]]] = [  # (documents in a hundred, maker)
        (14, lambda: rng.choice(countries)),
        (14, lambda: rng.choice(words)),
        (8, lambda: rng.choice(calendar)),
        (22, lambda: rng.choice(arithmetic)),
        (7, lambda: rng.choice(runs)),
        (7, lambda: story(rng)),
        (28, lambda: conversation(rng, turns)),
    ]
    weights, makers = zip(*kinds, strict=True)
    while True:
        yield rng.choices(makers, weights)[0]()


def known_continuations() -> list[tuple[str, str]]:
    """(prompt, continuation) for all that the model is meant to know by heart; a continuation is the rest of the
    document or of the turn, with its closing special token."""
    cases = []
    for text in country_facts() + word_facts() + calendar_facts():
        cut = max(text.find(f" {word} ") + len(word) + 1 for word in ("is", "says", "called", "shows", "of"))
        cases.append((text[:cut], text[cut:] + END_OF_TEXT))
    for text in sums():
        cut = text.index("=") + 1
        cases.append((text[:cut], text[cut:] + END_OF_TEXT))
    for text in sequences():
        # Three numbers ("0 1" could go on as "0 10 20"), two letters or names.
        cut = [i for i, c in enumerate(text) if c == " "][2 if text[0].isdigit() else 1]
        cases.append((text[:cut], text[cut:] + END_OF_TEXT))
    for user, assistant in questions():
        cases.append((chat_text([("user", user)]) + f"{IM_START}assistant\n", assistant + IM_END))
    return cases
