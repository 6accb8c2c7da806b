"""The metrics against values computed by hand, against independent formulas, and by their properties."""

from __future__ import annotations

import re
import string
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from pictool.eval.metrics import METRICS, contains, em, f1, normalize_answer, rouge_l

WORDS = ["The", "the", "a", "an", "cat", "Cat", "sat", "mat.", "mat", "--", "é", "東京", "don't", "3.14", "ａ", "\n"]
TEXT = st.one_of(st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join), st.text(max_size=20))
GOLDS = st.lists(TEXT, min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The  Cat\tsat,\non a mat!", "cat sat on mat"),
        ("", ""),
        (" \n ", ""),
        ("A an THE", ""),
        ("?!... -- ()", ""),
        ("theatre another ant", "theatre another ant"),
        ("the-a", "thea"),  # punctuation goes before the articles do, and without a space
        ("don't (U.S.) 3.14 1,024", "dont us 314 1024"),
        ("Straße NAÏVE Éclair", "straße naïve éclair"),
        ("東京は、日本。", "東京は、日本。"),  # full-width punctuation is none of ASCII's
        ("Ｔｈｅ　Ａ", "ｔｈｅ ａ"),  # full-width letters are no articles; the full-width space is white space
        ("“the” cat", "“ ” cat"),
    ],
)
def test_normalisation(text: str, words: str) -> None:
    assert normalize_answer(text) == words


# Of (prediction, golds): em and f1 by hand. f1 = 2·common / (words + words).
TABLE = [
    ("Exeter College", ["Exeter College"], 1, Fraction(1)),
    ("exeter college, Oxford.", ["Exeter College"], 0, Fraction(4, 5)),
    ("The Exeter  College!", ["exeter college"], 1, Fraction(1)),
    ("Oxford", ["Exeter College"], 0, Fraction(0)),
    ("Oxford", ["Exeter College", "Oxford"], 1, Fraction(1)),
    ("he was at Oxford", ["Exeter College", "at Oxford in 1620", "Oxford"], 0, Fraction(1, 2)),
    ("", ["Oxford"], 0, Fraction(0)),
    ("Oxford", [""], 0, Fraction(0)),
    ("", [""], 1, Fraction(1)),
    ("", ["Oxford", ""], 1, Fraction(1)),
    ("the", ["a"], 1, Fraction(1)),
    ("the", ["cat"], 0, Fraction(0)),
    ("...", ["the"], 1, Fraction(1)),
    ("...", ["cat"], 0, Fraction(0)),
    ("cat cat cat", ["cat"], 0, Fraction(1, 2)),
    ("cat cat dog", ["cat cat bird bird"], 0, Fraction(4, 7)),
    ("dog cat", ["cat dog"], 0, Fraction(1)),
    ("Zoë", ["zoë"], 1, Fraction(1)),
    ("Zoe", ["Zoë"], 0, Fraction(0)),
    ("Zoe\u0308", ["Zo\u00eb"], 0, Fraction(0)),  # characters are not composed, as in LongBench
    ("東京", ["東京"], 1, Fraction(1)),
    ("東京です", ["東京"], 0, Fraction(0)),  # no white space, one word
    ("Ｔｏｋｙｏ", ["Tokyo"], 0, Fraction(0)),
    ("3.14", ["314"], 1, Fraction(1)),
    ("anything", [], 0, Fraction(0)),
]


@pytest.mark.parametrize(("prediction", "golds", "exact", "share"), TABLE)
def test_em_and_f1_by_hand(prediction: str, golds: list[str], exact: int, share: Fraction) -> None:
    assert em(prediction, golds) == exact
    assert f1(prediction, golds) == pytest.approx(float(share), abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "golds", "share"),
    [
        ("the cat sat on the mat", ["the cat sat on the mat"], Fraction(1)),
        ("police killed the gunman", ["police kill the gunman"], Fraction(3, 4)),  # Lin 2004 §3; no stemming
        ("the gunman kill police", ["police kill the gunman"], Fraction(1, 2)),
        ("The CAT!", ["the cat"], Fraction(1)),  # the articles count
        ("cat cat", ["cat"], Fraction(2, 3)),
        ("a b c d", ["x", "a c"], Fraction(2, 3)),
        ("running", ["run"], Fraction(0)),
        ("naïve", ["na ve"], Fraction(1)),  # only a-z and 0-9 are kept
        ("東京", ["東京"], Fraction(0)),
        ("", [""], Fraction(0)),
        ("", ["cat"], Fraction(0)),
        ("cat", [""], Fraction(0)),
        ("?!", ["?!"], Fraction(0)),
        ("cat", [], Fraction(0)),
        ("first line\nsecond line", ["first line second line"], Fraction(1)),
    ],
)
def test_rouge_l_by_hand(prediction: str, golds: list[str], share: Fraction) -> None:
    assert rouge_l(prediction, golds) == pytest.approx(float(share), abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "golds", "found"),
    [
        ("The number is 7391482.", ["7391482"], 1),
        ("The number is 739 1482.", ["7391482"], 0),
        ("EAT a\n sandwich!", ["eat a sandwich"], 1),
        ("eat sandwich", ["eat a sandwich"], 0),
        ("17", ["7"], 1),
        ("no", ["yes", "No"], 1),
        ("", [""], 1),
        (" \n", [""], 1),
        ("cat", ["", "dog"], 0),
        ("", ["cat"], 0),
        ("cat", [], 0),
        ("答えは東京です。", ["東京"], 1),
        ("ÉCLAIR", ["éclair"], 1),
    ],
)
def test_contains_by_hand(prediction: str, golds: list[str], found: int) -> None:
    assert contains(prediction, golds) == found


# Independent formulas


def reference_words(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in re.sub(r"\b(the|an|a)\b", " ", kept).split() if word]


def reference_f1(prediction: str, gold: str) -> float:
    """By precision and recall over a shrinking list, as the SQuAD paper words it."""
    ours, left = reference_words(prediction), reference_words(gold)
    if not ours or not left:
        return float(not ours and not left)
    recall_of, common = len(left), 0
    for word in ours:
        if word in left:
            left.remove(word)
            common += 1
    if not common:
        return 0.0
    precision, recall = common / len(ours), common / recall_of
    return 2 * precision * recall / (precision + recall)


def longest_common(a: list[str], b: list[str]) -> int:
    row = [0] * (len(b) + 1)
    for word in a:
        previous = row[:]
        for j, other in enumerate(b):
            row[j + 1] = previous[j] + 1 if word == other else max(previous[j + 1], row[j])
    return row[-1]


@settings(max_examples=400, deadline=None)
@given(TEXT, TEXT)
def test_f1_is_precision_and_recall(prediction: str, gold: str) -> None:
    assert f1(prediction, [gold]) == pytest.approx(reference_f1(prediction, gold))
    ours, theirs = Counter(reference_words(prediction)), Counter(reference_words(gold))
    assert em(prediction, [gold]) == (reference_words(prediction) == reference_words(gold))
    assert (f1(prediction, [gold]) == 1) == (ours == theirs)


@settings(max_examples=300, deadline=None)
@given(TEXT, TEXT)
def test_rouge_l_is_the_librarys_and_the_formula(prediction: str, gold: str) -> None:
    got = rouge_l(prediction, [gold])
    assert got == RougeScorer(["rougeL"], use_stemmer=False).score(gold, prediction)["rougeL"].fmeasure
    ours, theirs = (re.findall("[a-z0-9]+", text.lower()) for text in (prediction, gold))
    common = longest_common(ours, theirs)
    assert got == pytest.approx(2 * common / (len(ours) + len(theirs)) if common else 0.0)


@settings(max_examples=200, deadline=None)
@given(TEXT, GOLDS)
@pytest.mark.parametrize("name", [name for name in METRICS if not name.startswith("json")])
def test_every_metric_is_the_best_over_its_golds_and_a_share(name: str, prediction: str, golds: list[str]) -> None:
    metric = METRICS[name]
    got = metric(prediction, golds)
    assert type(got) is float and 0 <= got <= 1
    assert got == max(metric(prediction, [gold]) for gold in golds) == metric(prediction, golds[::-1])
    assert metric(prediction, [*golds, prediction]) >= got


@settings(max_examples=200, deadline=None)
@given(TEXT, TEXT)
@pytest.mark.parametrize("name", ["f1", "em", "rouge_l"])
def test_all_but_contains_are_symmetric(name: str, one: str, other: str) -> None:
    assert METRICS[name](one, [other]) == pytest.approx(METRICS[name](other, [one]), abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(TEXT, TEXT, TEXT)
def test_a_text_contains_its_parts(before: str, part: str, behind: str) -> None:
    assert contains(f"{before} {part} {behind}", [part]) == (
        1.0 if part.split() or not (before + behind).split() else 0
    )


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_a_text_equals_itself(text: str) -> None:
    assert em(text, [text]) == f1(text, [text]) == contains(text, [text]) == 1
    assert normalize_answer(f"\tThe {text} ?!") == normalize_answer(text)


@pytest.mark.parametrize(
    ("prediction", "equal"),
    [
        ('{"a": 1, "b": {"c": "x"}}', 1),
        ('Sure:\n```json\n{"b": {"c": "x"}, "a": 1}\n``` and more }', 1),
        ('{"a": 2, "b": {"c": "y"}}', 0),
        ('{"a": "1", "b": {"c": "x"}}', 0),
        ('{"a": true, "b": {"c": "x"}}', 0),
        ('{"a": 1.0, "b": {"c": "x"}}', 1),
        ('{"a": 1, "b": {}}', 0),
        ('{"a": 1, "b": {"c": "x"}, "d": 0}', 0),
        ('{"a": 1, "b": {"c": "x"', 0),
        ("{" * 100_000, 0),
        ("no object", 0),
        ("", 0),
    ],
)
def test_json(prediction: str, equal: int) -> None:
    golds = ['{"a": 1, "b": {"c": "x"}}']
    assert METRICS["json"](prediction, golds) == equal
    assert METRICS["json"](prediction, ["no JSON"]) == 0


def test_golds_are_a_list() -> None:
    with pytest.raises(AssertionError):
        f1("a", "abc")


def test_the_library_is_loaded_when_it_is_needed() -> None:
    source = "import sys, pictool.eval.metrics; print('nltk' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
