"""`pic inspect`: what objects and traces say of themselves, and numbers against the library; pictures; `--diff`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from traces import make_trace

from commands.conftest import TEXT, Traces
from commands.run import Objects, flip, pic, section, write
from pictool.core import Geometry, Layout, Target
from pictool.runtime.model import load_model
from pictool.store.objects.format import ObjectFile, ObjectMeta, canonical, metadata_of, seal, tensor_entries
from pictool.store.store import Store
from pictool.trace.analysis import analyse_trace
from pictool.trace.format import read_trace, write_trace

FIELDS = [
    "path", "key", "architecture", "model", "tokenizer", "tokens", "layers", "kv_heads", "head_dim", "dtype", "before",
    "codec", "bytes", "layer_bytes",
]  # fmt: skip


def test_a_file_field_by_field(objects: Objects) -> None:
    shown = dict(line.split(maxsplit=1) for line in pic("inspect", objects.mine).out.splitlines())
    assert list(shown) == FIELDS
    assert (shown["architecture"], shown["layers"], shown["kv_heads"], shown["dtype"]) == ("llama", "3", "2", "float32")
    assert int(shown["bytes"]) == objects.mine.stat().st_size


def test_as_json(objects: Objects) -> None:
    shown = pic("inspect", objects.mine, "--json").json
    assert list(shown) == [*FIELDS, "checksums"]
    assert (shown["head_dim"], shown["path"]) == (8, str(objects.mine))


def test_the_checksums_are_those_of_the_parts(objects: Objects) -> None:
    found = pic("inspect", objects.mine, "--json").json["checksums"]
    with ObjectFile(objects.mine) as file:
        layers = [blake3(bytes(key) + bytes(value)).hexdigest() for key, value in map(file.layer, range(3))]
        text, tokens = (blake3(part).hexdigest() for part in (file.text().encode(), file.tokens().tobytes()))
    assert found == {"layers": layers, "text": text, "tokens": tokens}


def test_a_large_object_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header is all that is read of 10 GB (a file with holes)."""
    target = Target("llama", "a" * 64, "b" * 64, "float32", Geometry(32, 8, 128))
    count = (10 << 30) // (32 * 8 * 128 * 2 * 4)
    meta = ObjectMeta(target.key([1] * count, "none"), target, count, "none")
    header: dict[str, Any] = {
        "__metadata__": metadata_of(meta, {"layers": ["0" * 64] * 32, "text": "0" * 64, "tokens": "0" * 64}),
        **tensor_entries(meta, 4, []),
    }
    header["__metadata__"]["header"] = seal(header)
    raw = canonical(header)
    path = write("large.kvo", len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + header["text"]["data_offsets"][1])
    read = 0
    preadv = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        nonlocal read
        got = preadv(fd, buffers, offset)
        read += got
        return got

    monkeypatch.setattr(os, "preadv", counted)
    shown = pic("inspect", path, "--json").json
    assert shown["tokens"] == count and shown["bytes"] > 10_000_000_000 and read == 8 + len(raw)


def test_the_text_if_asked(objects: Objects) -> None:
    assert pic("inspect", objects.mine, "--text", "--json").json["text"] == TEXT
    assert TEXT in pic("inspect", objects.mine, "--text").out


def test_a_key_and_its_beginning(objects: Objects) -> None:
    key = pic("inspect", objects.mine, "--json").json["key"]
    for name in (key, key[:6]):
        shown = pic("inspect", name, "--store", objects.store, "--json").json
        assert shown["key"] == key and Path(shown["path"]).is_relative_to(objects.store)


def test_a_list_names_its_members(model: Path, texts: tuple[Path, Path]) -> None:
    assert pic("compile", "a.txt", "--chunk-tokens", 16, "-o", "d/a.kvo", "-m", model).code == 0
    members = pic("inspect", "d/a.kvo", "--json").json["objects"]
    assert members[:2] == ["d/a.0000.kvo", "d/a.0001.kvo"] and all(Path(one).exists() for one in members)


def test_what_is_no_object_is_refused(texts: tuple[Path, Path], objects: Objects) -> None:
    damaged = Path("damaged.kvo")
    damaged.write_bytes(objects.mine.read_bytes())
    flip(damaged, 300)
    Path("directory").mkdir()
    for name in ("a.txt", "damaged.kvo", "missing.kvo", "directory", "abcd1234", "no-key"):
        outcome = pic("inspect", name)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
        assert outcome.err.startswith("pic: error: ") and name in outcome.err


# From the trace alone


def test_facts_and_counts(by_hand: Path) -> None:
    shown = pic("inspect", by_hand)
    facts = dict(line.split(maxsplit=1) for line in shown.out.split("\n\n")[0].splitlines())
    assert facts["policy"] == "legolink k=2" and facts["answer"] == "yes"
    assert facts["prompt"] == "10 tokens: head 1, 2 chunks 7, tail 2"
    assert facts["recomputed"] == "2.0 of 8 context tokens per layer"
    parts = [line.split() for line in section(shown, "computed tokens by part")[1:]]
    assert parts == [
        ["head", "0", "1", "0.0", "0", "0"], ["1", "1", "3", "1.0", "2", "3", "a.txt"],
        ["2", "4", "4", "1.0", "5.5", "7", "b.txt"], ["tail", "8", "2", "2.0", "8.5", "9"],
    ]  # fmt: skip
    layers = [line.split()[-3:] for line in section(shown, "computed context tokens by layer")]
    assert layers == [["3", "of", "8"], ["2", "of", "8"], ["1", "of", "8"]]
    times = [line.split() for line in section(shown, "times (first token after 4.0 ms)")]
    assert [(one[0], one[-2]) for one in times] == [
        ("load", "1.0"),
        ("select", "0.0"),
        ("recompute", "3.0"),
        ("decode", "2.0"),
    ]


def test_the_text_has_what_was_computed_marked(by_hand: Path) -> None:
    text = section(pic("inspect", by_hand), "text; marked")
    assert text[1:] == [
        "-- head [0, 1)", "<s>", "-- a.txt [1, 4)", "[a]1[ b]2c", "-- b.txt [4, 8)", "d[e]f g", "-- tail [8, 10)",
        "[ h?]", "-- generated", " yes</s>",
    ]  # fmt: skip


def test_json_of_a_trace(by_hand: Path) -> None:
    shown = pic("inspect", by_hand, "--json").json
    trace = read_trace(by_hand)
    assert {name: shown[name] for name in trace.report} == trace.report
    assert shown["layers"] == [3, 2, 1] and [part["computed"] for part in shown["parts"]] == [0, 1, 1, 2]
    assert "pieces" not in shown
    whole = pic("inspect", by_hand, "--json", "--text").json
    assert whole["pieces"] == list(trace.pieces) and whole["computed_layers"] == [0, 1, 2, 0, 0, 3, 0, 0, 3, 3]
    assert whole["scores"] == list(range(10))


def test_several_traces_are_shown_one_after_another(by_hand: Path) -> None:
    assert len(pic("inspect", by_hand, by_hand, "--json").json) == 2
    out = pic("inspect", by_hand, by_hand).out
    assert out.count("\n-- generated") == 2 and out.count(f"== {by_hand}") == 2


@pytest.mark.parametrize(
    ("section", "has", "lacks"),
    [
        ("--layers", "computed context tokens by layer", "by part"),
        ("--text", "-- generated", "by layer"),
    ],
)
def test_only_the_sections_that_are_asked_for_are_shown(by_hand: Path, section: str, has: str, lacks: str) -> None:
    out = pic("inspect", by_hand, section).out
    assert has in out and lacks not in out
    both = pic("inspect", by_hand, by_hand, section).out
    assert has in both and lacks not in both


def test_the_text_of_an_object_alone(objects: Objects) -> None:
    text = pic("inspect", objects.mine, "--text").out
    assert text.rstrip("\n") == pic("inspect", objects.mine, "--text", "--json").json["text"].rstrip("\n")


def test_a_long_text_is_shown_if_asked() -> None:
    n = 2500
    rows = np.ones((3, n), dtype=bool)
    layout = Layout.of([0], [[1] * (n - 4)], [2, 3, 4])
    by_hand = make_trace()
    counts = by_hand.report["tokens"] | {"context": n - 3, "tail": 3, "prompt": n}
    trace = replace(
        by_hand, layout=layout, rows=rows, pieces=("ab ",) * n, texts=("",) * 3, chunks=by_hand.chunks[:1],
        report={**by_hand.report, "tokens": counts},
    )  # fmt: skip
    write_trace(Path("long.trace"), trace)
    shown = pic("inspect", "long.trace")
    assert "ab ab" not in shown.out and "--text" in shown.err
    assert "ab ab" in pic("inspect", "long.trace", "--text").out


def test_controls_in_a_trace_do_not_steer_the_terminal(by_hand: Path) -> None:
    evil = "\x1b]0;title\x07\u202e"
    trace = replace(make_trace(), pieces=(evil,) * 10, texts=(evil,) * 4)
    trace = replace(trace, report={**trace.report, "answer": evil, "model": evil},
                    chunks=tuple(replace(one, source=evil) for one in trace.chunks),
                    top=tuple(replace(one, text=evil) for one in trace.top),
                    generated=tuple(replace(one, text=evil) for one in trace.generated))  # fmt: skip
    write_trace(Path("evil.trace"), trace)
    for outcome in (pic("inspect", "evil.trace"), pic("inspect", "--diff", "evil.trace", "evil.trace")):
        assert outcome.code == 0 and not any(one in outcome.out for one in ("\x1b", "\x07", "\u202e"))


# With the model


def test_attention_is_that_of_the_library(traces: Traces, model: Path) -> None:
    path = traces("naive")
    shown = pic(
        "inspect",
        path,
        "--attention",
        "--against",
        "full",
        "--store",
        "st",
        "--json",
    ).json
    analysis = analyse_trace(load_model(str(model)), Store("st"), read_trace(path), "t")
    assert analysis.attention is not None and analysis.deviation is not None
    np.testing.assert_allclose(shown["attention"]["share"], analysis.attention.share(), rtol=1e-9)
    np.testing.assert_allclose(np.sum(shown["attention"]["share"], 1), 1, atol=1e-5)
    assert [row["position"] for row in shown["attention"]["rows"]] == analysis.attention.positions.tolist()
    np.testing.assert_allclose(shown["against"]["value"], analysis.deviation.kv.value, rtol=1e-6)
    np.testing.assert_allclose(shown["against"]["attention_gained"], analysis.deviation.attention.gained, atol=1e-9)
    assert [one["kl"] for one in shown["against"]["generated"]] == pytest.approx(
        [token.kl for token in analysis.deviation.generated]
    )
    assert [one["choice_text"] for one in shown["against"]["generated"]] == list(analysis.choices)


def test_what_is_printed_is_what_json_says(traces: Traces) -> None:
    path = traces("blend")
    options = (
        path,
        "--attention",
        "--layer",
        1,
        "--head",
        2,
        "--against",
        "full",
        "--store",
        "st",
    )
    shown, found = pic("inspect", *options), pic("inspect", *options, "--json").json
    share = np.mean(found["attention"]["share"], 0)
    best = [row.split()[-1] for row in section(shown, "tokens that draw most")[1:]]
    assert best == [f"{100 * x:.2f}" for x in -np.sort(-share[: found["tokens"]["prompt"]])[:10]]
    layers = section(shown, "against full, by layer")[1:]
    context = found["tokens"]["context"]
    wanted = [f"{np.mean(layer[:context]):.3g}" for layer in found["against"]["key"]]
    assert [row.split()[2] for row in layers] == wanted
    assert found["attention"]["layers"] == [1] and "layer 1, head 2" in shown.out


def test_another_model_is_refused(traces: Traces, objects: Objects) -> None:
    """In one line that names both sides."""
    other = objects.mine.parent / "other"
    for arguments in (
        (traces("lego"), "--attention"),
        (traces("lego"), "--against", "full"),
    ):
        outcome = pic("inspect", *arguments, "-m", other, "--store", "st")
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
        assert "model" in outcome.err and str(arguments[0]) in outcome.err


def test_a_store_that_changes_underneath(traces: Traces) -> None:
    """What is gone or damaged is compiled again and said. No number is another one."""
    path = traces("naive")
    before = pic("inspect", path, "--attention", "--store", "st", "--json").json
    keys = [part["key"] for part in before["parts"] if "key" in part]
    Store("st").path(keys[0]).unlink()
    again = pic("inspect", path, "--attention", "--store", "st", "--json")
    assert again.json == before and "compiled first: a.txt" in again.err
    flip(Store("st").path(keys[1]))
    damaged = pic("inspect", path, "--attention", "--store", "st", "--json")
    assert damaged.json == before and "checksum" in damaged.err


# Refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("TRACE", "OBJECT"), "objects and traces"),
        (("OBJECT", "--attention"), "--attention"),
        (("OBJECT", "--against", "full"), "--attention"),
        (("TRACE", "--against", "naive"), "full"),
        (("TRACE", "--head", 1), "--head"),
        (("OBJECT", "--layers"), "trace"),
    ],
)
def test_options_that_make_no_sense(arguments: Any, message: str, by_hand: Path, objects: Objects) -> None:
    named = {"TRACE": by_hand, "OBJECT": objects.mine}
    outcome = pic("inspect", *(named.get(one, one) for one in arguments))
    assert (outcome.code, outcome.out) == (2, "") and message in outcome.err


def test_layers_and_heads_that_are_not_are_refused_before_anything_is_shown(traces: Traces) -> None:
    for option, message in (("--layer", "the layers 0 to 2"), ("--head", "the heads 0 to 3")):
        outcome = pic("inspect", traces("naive"), "--attention", option, 7, "--store", "st")
        assert (outcome.code, outcome.out) == (1, "") and message in outcome.err


def test_corrupt_traces_are_one_line(by_hand: Path) -> None:
    whole = by_hand.read_bytes()
    for name, data in (("short", whole[: len(whole) // 2]), ("flipped", whole[:-9] + b"\xff" + whole[-8:])):
        Path(f"{name}.trace").write_bytes(data)
        for outcome in (pic("inspect", f"{name}.trace"), pic("inspect", "--diff", f"{name}.trace", by_hand)):
            assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
            assert f"{name}.trace" in outcome.err
    missing = pic("inspect", "--diff", "missing.trace", by_hand)
    assert missing.code == 1 and "missing.trace" in missing.err and missing.err.count("\n") == 1


def test_other_prompts_cannot_be_compared(traces: Traces, by_hand: Path) -> None:
    outcome = pic("inspect", "--diff", traces("naive"), by_hand)
    assert outcome.code == 1 and "different models" in outcome.err


def test_json_is_json(by_hand: Path) -> None:
    for outcome in (pic("inspect", by_hand, "--json"), pic("inspect", "--diff", by_hand, by_hand, "--json")):
        assert outcome.code == 0 and json.loads(outcome.out)
