#!/usr/bin/env python3
"""Write rows of the example task: a spoken request to a home, and the one line of JSON that its controller needs.

    python examples/home_control/make.py --seed 0 --rows 600 --out train.jsonl

A request names one of six actions, a device, a room, and perhaps a value, a time of day, a delay or a duration; people
say numbers in words or digits, correct themselves, and talk about other things. Seed 0 is the training seed. Every other
seed draws from answers that seed 0 never draws from, so that no held-out request, and no held-out answer either, is one
of the training rows. Rows of one seed never repeat. Standard library only; the same arguments write the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

TRAINING_SEED = 0
SYSTEM = "You control a home. Reply in JSON."

#: What people say -> the room's name in the answer.
ROOMS = {
    "kitchen": "kitchen",
    "bedroom": "bedroom",
    "bathroom": "bathroom",
    "living room": "living room",
    "lounge": "living room",
    "study": "study",
    "office": "study",
    "hall": "hall",
    "hallway": "hall",
    "nursery": "nursery",
    "attic": "attic",
    "cellar": "cellar",
    "basement": "cellar",
    "garage": "garage",
    "dining room": "dining room",
}
#: What people say -> the device's name in the answer.
SWITCHED = {
    "light": "light",
    "lights": "light",
    "lamp": "light",
    "fan": "fan",
    "heater": "heater",
    "radio": "radio",
    "TV": "TV",
    "television": "TV",
    "socket": "socket",
}
MOVED = {"blinds": "blinds", "shutters": "blinds", "curtains": "curtains", "window": "window", "windows": "window"}
MUSIC = ("jazz", "rock", "folk", "opera", "piano music", "the news", "a podcast", "soul", "disco", "blues")

#: Sentences that ask for nothing. Some name a room or a number, so that neither can be taken from just anywhere.
ASIDES = (
    "It's been a long day.",
    "My parents will be here soon.",
    "I'm just back from work.",
    "The dog is asleep.",
    "I can't find my glasses.",
    "We have three guests tonight.",
    "I just cleaned the {room}.",
    "The kids are playing in the {room}.",
    "Nobody is in the {room}.",
    "It took me two hours to get home.",
)
POLITE = (
    "{}.",
    "{}",
    "{}!",
    "{}, please.",
    "please {}",
    "could you {}?",
    "can you {}?",
    "could you please {}?",
    "I'd like you to {}.",
    "hey, {}",
    "be so kind and {}.",
    "{}, thanks.",
    "would you {} for me?",
)

#: Per kind of request: orders, which take any of the polite forms, and wishes, which are whole sentences.
ORDERS = {
    "on": (
        "turn on the {device} in the {room}",
        "turn the {room} {device} on",
        "switch on the {room} {device}",
        "put the {device} in the {room} on",
    ),
    "off": (
        "turn off the {device} in the {room}",
        "turn the {room} {device} off",
        "switch off the {room} {device}",
        "shut off the {device} in the {room}",
    ),
    "open": ("open the {device} in the {room}", "open the {room} {device}", "open up the {device} of the {room}"),
    "close": ("close the {device} in the {room}", "close the {room} {device}", "shut the {device} of the {room}"),
    "light": (
        "dim the {room} light to {percent}",
        "set the light in the {room} to {percent}",
        "bring the {room} lamp to {percent}",
    ),
    "heating": ("heat the {room} to {degrees}", "set the {room} to {degrees}", "make it {degrees} in the {room}"),
    "speaker": (
        "set the volume in the {room} to {percent}",
        "turn the speaker in the {room} to {percent}",
        "put the {room} speaker at {percent}",
    ),
    "play": ("play {music} in the {room}", "put on {music} in the {room}", "let me hear {music} in the {room}"),
}
WISHES = {
    "on": ("I need the {device} on in the {room}", "the {device} in the {room} should be on", "{room} {device} on"),
    "off": ("I want the {device} off in the {room}", "the {device} in the {room} should be off", "{room} {device} off"),
    "open": ("the {device} in the {room} should be open", "I want the {room} {device} open", "{room} {device} open"),
    "close": ("the {device} in the {room} should be closed", "I want the {room} {device} closed", "{room} {device} closed"),
    "light": ("I want the light in the {room} at {percent}", "{room} light at {percent}"),
    "heating": ("I want {degrees} in the {room}", "the {room} should be at {degrees}", "{room} {degrees}"),
    "speaker": ("I want the {room} speaker at {percent}", "{room} volume {percent}"),
    "play": ("I want to hear {music} in the {room}", "it is time for {music} in the {room}", "{music} for the {room}"),
}
PERCENTS = tuple(range(10, 100, 10))
DEGREES = tuple(range(15, 26))
MINUTES = (5, 10, 15, 20, 25, 30, 40, 45, 50)
HOURS = tuple(range(6, 23))

# fmt: off
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
TENS = ("zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on


def in_words(number: int) -> str:
    """0 to 99 as people say it."""
    if number < 20:
        return ONES[number]
    tens, ones = divmod(number, 10)
    return TENS[tens] + (f"-{ONES[ones]}" if ones else "")


def say(rng: random.Random, number: int) -> str:
    return rng.choice((str(number), in_words(number)))


def time_of_day(rng: random.Random) -> tuple[str, dict]:
    """A time of day: ("at half past seven in the evening", {"at": "7:30 pm"})."""
    hour, minute = rng.choice(HOURS), rng.choice((0, 15, 30))
    half = "am" if hour < 12 else "pm"
    part = "in the morning" if hour < 12 else "in the afternoon" if hour < 18 else "in the evening"
    hour = hour - 12 if hour > 12 else hour
    answer = {"at": f"{hour}:{minute:02d} {half}"}
    if rng.random() < 0.5:
        return f"at {hour}:{minute:02d} {half}" if minute else f"at {hour} {half}", answer
    return f"at {({0: '', 15: 'quarter past ', 30: 'half past '})[minute]}{in_words(hour)} {part}", answer


def span(rng: random.Random, word: str) -> tuple[str, dict]:
    """A delay ("in") or a duration ("for") in minutes: ("in half an hour", {"in": 30})."""
    whole = {"half an hour": 30, "an hour": 60}
    if rng.random() < 0.3:
        said = rng.choice(tuple(whole))
        return f"{word} {said}", {word: whole[said]}
    minutes = rng.choice(MINUTES)
    return f"{word} {say(rng, minutes)} minutes", {word: minutes}


def when(rng: random.Random, kind: str) -> tuple[str, dict]:
    """Nothing, a time of day, a delay, or (where it has a sense) a duration."""
    ways = ["", "", "at", "at", "in"] + (["for"] if kind in ("on", "play", "heating") else [])
    way = rng.choice(ways)
    if not way:
        return "", {}
    return time_of_day(rng) if way == "at" else span(rng, way)


def value(rng: random.Random, kind: str) -> tuple[str, str, object]:
    """What a setting is set to: its place in the sentence, its words, its value in the answer."""
    if kind == "play":
        music = rng.choice(MUSIC)
        return "music", music, music
    if kind == "heating":
        number = rng.choice(DEGREES)
        return "degrees", f"{say(rng, number)} degrees", number
    number = rng.choice(PERCENTS)
    return "percent", rng.choice((f"{number}%", f"{say(rng, number)} percent")), number


def request(rng: random.Random) -> tuple[str, str]:
    """One request and its answer, from all that can be said."""
    kind = rng.choice(tuple(ORDERS))
    room = rng.choice(tuple(ROOMS))
    words: dict[str, str] = {"room": room}
    if kind in ("on", "off", "open", "close"):
        devices = SWITCHED if kind in ("on", "off") else MOVED
        words["device"] = rng.choice(tuple(devices))
        answer: dict[str, object] = {"action": kind, "device": devices[words["device"]], "room": ROOMS[room]}
    else:
        place, words[place], meant = value(rng, kind)
        action, device = ("play", "speaker") if kind == "play" else ("set", kind)
        answer = {"action": action, "device": device, "room": ROOMS[room], "value": meant}
    moment, moment_answer = when(rng, kind)
    if rng.random() < 0.1:
        other = rng.choice([name for name, meant in ROOMS.items() if meant != ROOMS[room]])
        words["room"] = f"{other}, no, the {room}"
    return spoken(rng, kind, words, moment), json.dumps(answer | moment_answer, separators=(",", ":"))


def spoken(rng: random.Random, kind: str, words: dict[str, str], moment: str) -> str:
    """The sentence: an order or a wish, the moment before or after it, politeness, and sometimes an aside."""
    first = bool(moment) and rng.random() < 0.2
    wish = rng.random() < 0.3
    said = rng.choice((WISHES if wish else ORDERS)[kind]).format(**words)
    if moment and not first:
        said = f"{said} {moment}"
    if not wish:
        said = rng.choice(POLITE).format(said)
    if first:
        said = f"{moment}, {said}"
    if rng.random() < 0.5:
        said = said[0].upper() + said[1:]
    if rng.random() < 0.2:
        said = f"{rng.choice(ASIDES).format(room=rng.choice(tuple(ROOMS)))} {said}"
    return said


def is_for_training(answer: str) -> bool:
    """Half of all answers, told by their hash, belong to the training seed, the other half to all other seeds."""
    return hashlib.sha256(answer.encode()).digest()[0] % 2 == 0


def rows(seed: int, num_rows: int) -> Iterator[dict]:
    """Rows as chat messages, all different. Raises ValueError when a seed has no more of them to give."""
    rng = random.Random(f"home control {seed}")
    given: set[str] = set()
    misses = 0
    while len(given) < num_rows:
        said, answer = request(rng)
        if is_for_training(answer) != (seed == TRAINING_SEED):
            continue
        if said in given:
            misses += 1
            if misses > 1000:
                raise ValueError(f"seed {seed} has only about {len(given)} different requests: ask for fewer --rows")
            continue
        misses = 0
        given.add(said)
        turns = (("system", SYSTEM), ("user", said), ("assistant", answer))
        yield {"messages": [{"role": role, "content": content} for role, content in turns]}


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="0 is the training seed; any other gives held-out rows")
    parser.add_argument("--rows", type=positive, required=True, help="how many rows, at least 1")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    asked = parser.parse_args()
    try:
        lines = [json.dumps(row) + "\n" for row in rows(asked.seed, asked.rows)]
    except ValueError as error:
        parser.error(str(error))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text("".join(lines), encoding="utf-8")
    print(f"{asked.out}: {asked.rows} rows of seed {asked.seed}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
