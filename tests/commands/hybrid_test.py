"""Commands with a hybrid: its objects, tables and screens as of any model, and a reason where something cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from tui.job_test import Heard, form

from commands.run import pic, write
from pictool.commands.settings.settings import Settings
from pictool.commands.tui_process.job import WorkerJob
from pictool.errors import PicError
from pictool.trace.format import read_trace

LINES = "The harbour was quiet and nobody knows why it holds a festival in the spring of each year.\n"


@pytest.fixture(scope="module", params=["qwen3_next", "falcon_h1"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with Gated DeltaNet, and one with keys and states in each layer, as directories."""
    return tiny.save_model(tmp_path_factory.mktemp("models") / request.param, tiny.CONFIGS[request.param]())


# What takes seconds runs with the model that has both in each layer.
OF_BOTH = pytest.mark.parametrize("hybrid", ["falcon_h1"], indirect=True)


@pytest.fixture(autouse=True)
def documents() -> None:
    write("a.txt", LINES)
    write("b.txt", LINES.replace("harbour", "mountain"))


def test_objects_have_the_cut_that_is_named(hybrid: Path, model: Path) -> None:
    common = ("-m", hybrid, "--store", "st")
    seen = {}
    for cut, option in ((16, ()), (0, ("--cut", 0)), (8, ("--cut", 8))):
        path = f"cut-{cut}.kvo"
        done = pic("compile", "a.txt", *common, *option, "-o", path, "--json")
        assert done.code == 0 and done.json["objects"][0]["new"]
        assert not pic("compile", "a.txt", *common, *option, "--json").json["objects"][0]["new"]
        shown = pic("inspect", path, "--json").json
        assert shown["cut"] == cut and shown["state_bytes"] > 0 and shown["state_tokens"] > 0
        assert pic("inspect", path).code == 0
        seen[cut] = shown["key"]
    assert len(set(seen.values())) == 3
    for algo, path, rows in (("naive", "cut-0.kvo", 0), ("legolink-8", "cut-8.kvo", 8)):
        report = pic("link", path, "-q", "Who?", *common, "--algo", algo, "--max-new-tokens", 1, "--json")
        assert report.json["tokens"]["recomputed"] == rows and "all of it is computed" not in report.err
    refused = pic("compile", "a.txt", "-m", model, "--cut", 8)
    assert refused.code == 2 and "hybrid" in refused.err


def test_a_stored_beginning_is_shown_and_verified(hybrid: Path) -> None:
    link = ("link", "a.txt", "b.txt", "-q", "Who?", "-m", hybrid, "--store", "st", "--max-new-tokens", 3, "--json")
    full = pic(*link, "--algo", "full").json
    for computed in (True, False):
        prefix = pic(*link, "--algo", "prefix").json
        assert prefix["answer"] == full["answer"] and (prefix["tokens"]["recomputed"] >= 16) == computed
    keys = [path.stem for path in Path("st/objects").rglob("*.kvo")]
    blocks = [shown for key in keys if "parent" in (shown := pic("inspect", key, "--store", "st", "--json").json)]
    assert blocks and all(block["state_bytes"] > 0 and "cut" not in block for block in blocks)
    assert pic("store", "verify", "--store", "st").code == 0


@OF_BOTH
def test_eval_and_tune_take_a_hybrid(hybrid: Path) -> None:
    records = [{"documents": ["a.txt", "b.txt"], "query": "Who knows?", "answers": ["nobody"], "id": "one"}]
    write("q.jsonl", "\n".join(map(json.dumps, records)))
    algos = ("--algo", "naive", "--algo", "legolink-8", "--algo", "legolink-2")
    done = pic("eval", "q.jsonl", "-m", hybrid, *algos, "--store", "st", "--max-new-tokens", 2, "--json")
    assert done.code == 0, done.err
    assert {line["label"] for line in done.json["lines"]} == {"full", "naive", "legolink-8", "legolink-2"}
    write("many.jsonl", "\n".join(json.dumps({"query": f"Who {i}?", "max_new_tokens": 1}) for i in range(40)))
    tuned = pic(
        "tune", "a.txt", "b.txt", "--questions", "many.jsonl", "-m", hybrid, *algos, "--store", "st",
        "--target-answer-kl", 20, "--json", "-n",
    )  # fmt: skip
    assert tuned.code == 0, tuned.err
    assert {line["label"] for line in tuned.json["lines"]} == {"naive", "legolink-8", "legolink-2"} and tuned.json[
        "chosen"
    ]
    refused = pic("eval", "q.jsonl", "-m", hybrid, "--algo", "cacheblend-15", "--store", "st")
    assert refused.code and "cacheblend" in refused.err and "hybrid" in refused.err


@OF_BOTH
def test_the_process_of_the_screens_links_a_hybrid_and_says_what_it_cannot_show(hybrid: Path) -> None:
    heard = Heard()
    with WorkerJob(Settings().override(store="st", model=str(hybrid), device="cpu", dtype="float32")) as job:
        path = job.link(form(), heard)
        assert path is not None and read_trace(path).answer == heard.answer.strip()
        trace = read_trace(path)
        with pytest.raises(PicError, match="hybrid"):
            job.analyse(trace, "out.trace", heard)
