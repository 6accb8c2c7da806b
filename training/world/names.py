"""The vocabulary of the synthetic world: made-up proper names and ordinary words.

Names are built from syllables by fixed rules, so the lists are the same on every machine. They are drawn from fixed
lists (and not spelled at random) so that a small BPE learns each as one token, which a small model learns several
times faster.
"""

from __future__ import annotations

import itertools

_ONSETS = ["B", "D", "F", "G", "H", "K", "L", "M", "N", "P", "R", "S", "T", "V", "W", "Z"]
_VOWELS = ["a", "e", "i", "o", "u"]
_MIDDLES = ["l", "m", "n", "r", "s", "v", "d", "k", "b"]


def _names(endings: list[str], count: int, stride: int) -> tuple[str, ...]:
    """`count` distinct names ending in `endings`, spread over all syllable combinations by a fixed stride."""
    combinations = list(itertools.product(_ONSETS, _VOWELS, _MIDDLES))
    chosen: list[str] = []
    for i in range(count):
        onset, vowel, middle = combinations[(i * stride) % len(combinations)]
        chosen.append(onset + vowel + middle + endings[i % len(endings)])
    assert len(set(chosen)) == count
    return tuple(chosen)


TOWNS = _names(["dale", "ford", "wick", "holm", "stead"], 64, 67)
COMPANIES = _names(["ex", "tron", "ico", "corp", "tech"], 64, 89)
PEOPLE = _names(["a", "o", "in", "ette", "us"], 64, 101)
FESTIVALS = _names(["lia", "ry", "moon", "fair"], 32, 113)
RIVERS = _names(["wen", "ne", "mere", "low"], 32, 127)

SOUPS = tuple(
    "barley onion carrot pepper lentil turnip potato cabbage mushroom tomato spinach pumpkin celery "
    "garlic radish leek bean pea corn fennel beet squash ginger chestnut".split()
)
PRODUCTS = tuple(
    "clocks boots lamps ropes chairs kettles mirrors buttons ladders candles hammers baskets blankets "
    "bottles brushes carpets engines helmets needles pencils pianos pumps saddles scissors shovels tents "
    "violins wheels whistles windows".split()
)
COLOURS = tuple("red blue green yellow black white orange purple brown pink grey golden silver crimson".split())
INSTRUMENTS = tuple(
    "flute harp drum organ trumpet fiddle cello guitar banjo horn oboe lute zither tuba bassoon clarinet".split()
)
ANIMALS = tuple(
    "dog cat goat horse parrot rabbit goose donkey ferret falcon turtle lizard raven otter badger "
    "hedgehog fox lamb sparrow mule".split()
)
SUBJECTS = tuple(
    "law botany music history physics algebra painting medicine geology logic poetry grammar chemistry "
    "astronomy rhetoric zoology".split()
)
