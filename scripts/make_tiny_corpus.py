"""Writes src/shardwise/data/corpus/tiny.jsonl: small stories from a grammar, the same on every run.

The text is ours, so it has no licence but this repository's. Each story keeps its people, places and things from
sentence to sentence: there is something to learn beyond the frequency of words. Golden loss curves rest on the file;
changing it means making them anew.

    python scripts/make_tiny_corpus.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "src/shardwise/data/corpus/tiny.jsonl"
STORIES = 260
SEED = 20240229

PEOPLE = {
    "she": "Mira Anna Hilda Ruth Clara Tessa Ingrid Nora Edith Paula Wanda Iris Greta Olive Martha Selma Judith",
    "he": "Tom Oskar Felix Hugo Peter Simon Walter Jonas Emil Albert Victor Ralph Henry Leo Martin Gustav Edgar",
}
PRONOUNS = {"she": {"her": "her", "his": "her"}, "he": {"her": "him", "his": "his"}}
TRADES = """baker|bread|oven  miller|flour|wheel  fisher|nets|boat  weaver|cloth|loom  potter|bowls|kiln
smith|horseshoes|anvil  gardener|roses|spade  carpenter|chairs|plane  printer|books|press  clockmaker|clocks|file
shepherd|wool|whistle  beekeeper|honey|smoker  painter|pictures|brush  sailor|ropes|compass  tailor|coats|needle
cook|soup|kettle  sculptor|statues|chisel  doctor|medicine|lamp  farmer|apples|ladder  toymaker|puppets|lathe
glassblower|bottles|pipe  cobbler|boots|hammer  mason|bricks|trowel  candlemaker|tapers|mould  cooper|barrels|saw"""
PLACES = """village by the river|town on the hill|harbour behind the dunes|valley of the two mills|city of seven bridges
hamlet beyond the forest|castle on the grey island|house under the old oak|street of the coppersmiths|market by the gate
monastery above the lake|inn at the crossroads|quarter of the tanners|fort on the mountain pass|garden of the duke"""
ROADS = "narrow path|stony road|long bridge|frozen canal|dark wood|steep stair|empty square|muddy lane|railway|shore"
WEATHER = """rain fell without a pause|the wind came from the north|snow lay on the roofs|the sun stood high and hot
fog hid the far bank|a storm was gathering|frost covered the windows|the air smelled of hay|thunder rolled in the west
the moon was full and yellow|leaves blew along the ground|the first swallows had returned"""
SEASONS = (
    "In spring|One summer|Early in autumn|In the coldest winter|Before the harvest|After the great flood|One Monday"
)
MOODS = """happy|smiled at everyone  sad|did not want to speak  angry|slammed the door  tired|slept until noon
curious|asked one question after another  afraid|looked over a shoulder twice  proud|told the story to the neighbours
patient|waited and said nothing  hungry|ate two plates of beans  lonely|wrote a long letter"""
ANIMALS = "dog cat goat horse donkey crow goose hen sparrow fox hedgehog owl rabbit mouse calf"
COLOURS = "red blue green yellow brown black white grey silver golden"
QUALITIES = "small heavy broken beautiful useful strange plain precious crooked sturdy forgotten dusty new cheap"
THINGS = "key ring coin map box lantern mirror cup button feather stone knife basket candle ribbon"
HIDING = "under the stairs|behind the stove|in the cellar|on the highest shelf|beneath a loose board|inside an old boot"
NUMBERS = "two three four five six seven eight nine ten twelve twenty thirty"
UNITS = "days weeks hours months nights years"
ADVERBS = "slowly quickly quietly carefully gladly suddenly secretly again together at once"
LESSONS = """patience is worth more than gold|a good neighbour is better than a far friend|work begun is half done
what is lent should be returned|no road is long in good company|small repairs prevent great damage
the one who asks is lost only once|a promise is a debt|many hands make light work|a sharp tool is a safe tool"""
OPENINGS = [
    "{season} there lived in the {place} a {trade} called {name}. ",
    "{name} was a {trade} in the {place}. ",
    "People in the {place} still talk about {name} the {trade}. ",
    "{season}, when {weather}, {name} the {trade} came to the {place}. ",
]
HABITS = [
    "Every morning {he} took {his} {tool} and made {good} until the bells rang. ",
    "{He} made the best {good} in the {place}, and {his} {tool} was never idle. ",
    "{He} owned nothing but one {tool}, a {colour} {animal} and {number} coins. ",
    "Nobody knew more about {good} than {he} did, and {he} knew it. ",
]
EVENTS = [
    "One day {weather}, and {name} lost the {colour} {thing}. ",
    "{He} looked for the {thing} {hiding}, but found only a {quality} {thing2}. ",
    "{friend} the {trade2} came along the {road} with some {good2}. ",
    '"Have you seen my {thing}?" asked {name}. "It is {colour} and {quality}." ',
    '"I have not," said {friend}, "but my {animal} found something {hiding}." ',
    '"Bring me some of your {good}," said {friend}, "and I will show you the way." ',
    "So they walked {adverb} along the {road} for {number} {unit}. ",
    "{friend} carried the {tool2}, and {name} carried the {tool}. ",
    "Then the {animal} ran {adverb} across the {road} and stopped. ",
    "{He} was {mood}: {he} {reaction}. ",
    "{friend} gave {her} a {quality} {thing2} and asked for nothing. ",
    "The {trade2} repaired the {tool} while {weather}. ",
    "At night {weather}, so they stayed in the {place2}. ",
    "In the {place2} a {trade3} sold {good3} for {number} coins. ",
    "{name} counted {number} {thing2}s and put them {hiding}. ",
    '"Where is the {animal}?" asked {friend}. "In the {place2}," said {name}. ',
    "They shared the {good2} with the {trade3} and the {animal}. ",
    "After {number} {unit} {he} could make {good} without any {tool}. ",
]
FINDINGS = [
    "At last {he} found the {colour} {thing} {hiding}. ",
    "The {animal} had carried the {colour} {thing} home and left it {hiding}. ",
    "{friend} had kept the {thing} {hiding} all the time. ",
]
CLOSINGS = [
    "Since then {name} says that {lesson}.",
    "{name} and {friend} stayed in the {place}, for {lesson}.",
    "And the {thing}? It still lies {hiding} in the {place}.",
    "The {trade} went back to the {place} and learned that {lesson}.",
]


class Stories:
    """Draws stories; only `random.Random.random` is used, whose sequence Python guarantees."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def story(self) -> str:
        slots = self._slots()
        events = [event for event in EVENTS if self._random.random() < 0.45]
        templates = [self._pick(OPENINGS), self._pick(HABITS), *events, self._pick(FINDINGS), self._pick(CLOSINGS)]
        return "".join(template.format(**slots) for template in templates).strip() + "\n"

    def _slots(self) -> dict[str, str]:
        pronoun = self._pick(["she", "he"])
        name = self._pick(PEOPLE[pronoun].split())
        friend = self._pick([other for names in PEOPLE.values() for other in names.split() if other != name])
        trades = [trade.split("|") for trade in self._several(_phrases(TRADES, "  "), 3)]
        mood, reaction = self._pick(_phrases(MOODS, "  ")).split("|")
        place, place2 = self._several(_phrases(PLACES), 2)
        thing, thing2 = self._several(THINGS.split(), 2)
        slots = {"name": name, "friend": friend, "mood": mood, "reaction": reaction, "place": place, "place2": place2}
        slots |= {"thing": thing, "thing2": thing2, "he": pronoun, "He": pronoun.capitalize(), **PRONOUNS[pronoun]}
        for number, (trade, good, tool) in zip(("", "2", "3"), trades, strict=True):
            slots |= {f"trade{number}": trade, f"good{number}": good, f"tool{number}": tool}
        phrases = {"road": ROADS, "weather": WEATHER, "season": SEASONS, "hiding": HIDING, "lesson": LESSONS}
        words = {"animal": ANIMALS, "colour": COLOURS, "quality": QUALITIES, "number": NUMBERS, "unit": UNITS}
        slots |= {slot: self._pick(_phrases(text)) for slot, text in phrases.items()}
        slots |= {slot: self._pick(text.split()) for slot, text in words.items()}
        slots["adverb"] = self._pick(ADVERBS.replace("at once", "at_once").split()).replace("_", " ")
        return slots

    def _pick(self, choices: list[str]) -> str:
        return choices[int(self._random.random() * len(choices))]

    def _several(self, choices: list[str], number: int) -> list[str]:
        left = list(choices)
        return [left.pop(int(self._random.random() * len(left))) for _ in range(number)]


def _phrases(text: str, separator: str = "|") -> list[str]:
    return [phrase for line in text.splitlines() for phrase in line.split(separator)]


def corpus() -> str:
    """The whole file."""
    stories = Stories(SEED)
    return "".join(json.dumps({"text": stories.story()}, ensure_ascii=False) + "\n" for _ in range(STORIES))


if __name__ == "__main__":
    TARGET.write_text(corpus(), encoding="utf-8")
    print(f"{TARGET}: {TARGET.stat().st_size:,} bytes, {STORIES} stories")
