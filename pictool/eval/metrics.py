"""Metrics of an answer: a prediction and the golds (any is right) → a score from 0 to 1, the best over the golds.

| name | what | source |
|---|---|---|
| `f1` | F1 over the words of the normalised texts, as multisets | SQuAD; LongBench `qa_f1_score` |
| `em` | 1 if the normalised texts are equal | SQuAD |
| `rouge_l` | F-measure of the longest common subsequence of words | `rouge-score`, Lin 2004 |
| `contains` | 1 if the gold is part of the prediction, whatever the case | RULER `string_match_part` |
| `json` | 1 if the prediction's first JSON object equals the gold's, in any order of keys | |

No golds at all score 0. Where a text has no words after normalisation (it is empty, an article, or punctuation), `f1`
is 1 if the other has none either, and 0 otherwise: SQuAD's rule for "no answer". LongBench's own F1 is 0 in both cases.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from pictool.needs import require_extra

Metric = Callable[[str, Sequence[str]], float]

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and the articles a, an, the; words one space apart.

    As SQuAD and LongBench do it, which means: other punctuation (`，`, `“`) stays, accents stay, full-width letters are
    not those of ASCII, and characters are not composed. "don't" becomes "dont", "3.14" becomes "314".
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1(prediction: str, golds: Sequence[str]) -> float:
    """2·|common words| / (|words| + |gold's words|) over normalised words, as multisets."""
    return _best(_f1, prediction, golds)


def em(prediction: str, golds: Sequence[str]) -> float:
    """1.0 if the prediction is equal to a gold, both normalised; 0.0 otherwise."""
    return _best(lambda text, gold: float(normalize_answer(text) == normalize_answer(gold)), prediction, golds)


def rouge_l(prediction: str, golds: Sequence[str]) -> float:
    """ROUGE-L's F-measure (β = 1) by `rouge-score`, without stemming.

    That library keeps a-z and 0-9 only, in lower case: "naïve" is two words, and a text in Chinese has none, which
    scores 0. LongBench's `rouge` package does not stem either, but splits at white space and keeps case, so that its
    numbers are not quite these. CacheBlend's code uses `rouge-score` with stemming: its numbers are never lower.

    Raises:
        InputError: rouge-score is not installed.
    """
    return _best(lambda text, gold: float(_rouge().score(gold, text)["rougeL"].fmeasure), prediction, golds)


def contains(prediction: str, golds: Sequence[str]) -> float:
    """1.0 if a gold is part of the prediction, in any case and with any white space; 0.0 otherwise.

    A part of a word counts, as in RULER ("7" is in "17"). A blank gold is in a blank prediction only.
    """
    return _best(_contains, prediction, golds)


def json_equal(prediction: str, golds: Sequence[str]) -> float:
    """1.0 if the first JSON object in the prediction equals a gold's; text around it does not count."""
    return _best(_json_equal, prediction, golds)


METRICS: Mapping[str, Metric] = {
    "f1": f1, "em": em, "rouge_l": rouge_l, "contains": contains, "json": json_equal,
}  # fmt: skip


def _best(score: Callable[[str, str], float], prediction: str, golds: Sequence[str]) -> float:
    assert not isinstance(golds, str), "golds are a list of texts"
    return max((score(prediction, gold) for gold in golds), default=0.0)


def _f1(prediction: str, gold: str) -> float:
    predicted, right = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if not predicted or not right:
        return float(predicted == right)
    return 2 * (Counter(predicted) & Counter(right)).total() / (len(predicted) + len(right))


def _contains(prediction: str, gold: str) -> float:
    text, part = (" ".join(words.lower().split()) for words in (prediction, gold))
    return float(part in text if part else not text)


def _first_object(text: str) -> Any:
    """The JSON object that begins at the first brace, its numbers of one type; None: there is none."""
    try:
        return json.JSONDecoder(parse_int=float).raw_decode(text[text.index("{") :])[0]
    except (ValueError, RecursionError):
        return None


def _json_equal(prediction: str, gold: str) -> float:
    predicted, right = _first_object(prediction), _first_object(gold)
    return float(right is not None and json.dumps(predicted, sort_keys=True) == json.dumps(right, sort_keys=True))


@cache
def _rouge() -> Any:
    require_extra("eval", "ROUGE-L", "rouge_score")
    from rouge_score.rouge_scorer import RougeScorer  # takes a second to import

    return RougeScorer(["rougeL"], use_stemmer=False)
