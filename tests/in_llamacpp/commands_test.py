"""The commands, the server and span queries with `-m FILE.gguf`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands.run import pic, write
from serve.live import DOCS, NAME, QUESTION, Live, serving, text_of

from pictool.engines.llamacpp.library import Weights, api
from pictool.engines.llamacpp.model import open_gguf
from pictool.linker.grid import parse_policy
from pictool.serve.backends.base import BackendSettings
from pictool.store.store import Store

FIXTURES = Path(__file__).parents[2] / "fixtures"
RESIDENTS = {"Lina": "Rudin", "Pelus": "Bivette"}


@pytest.fixture
def texts() -> list[Path]:
    return [write(f"{name}.txt", text) for name, text in zip("abc", DOCS, strict=True)]


def test_compile_costs_no_model_run_the_second_time(tiny_gguf: Path, texts: list[Path]) -> None:
    first, again = (pic("compile", "-m", tiny_gguf, *texts, "--json").json["objects"] for _ in range(2))
    assert [row["new"] for row in first] == [True] * 3 and [row["new"] for row in again] == [False] * 3
    shown = pic("inspect", first[0]["path"], "--json").json
    assert shown["architecture"] == "gguf.llama" and shown["dtype"] == "float16"
    assert pic("store", "verify").code == 0


@pytest.mark.parametrize("codec", ["zstd", "int8"])
def test_codecs_and_chunks(tiny_gguf: Path, texts: list[Path], codec: str) -> None:
    rows = pic("compile", "-m", tiny_gguf, *texts, "--codec", codec, "--chunk-tokens", 12, "--json").json["objects"]
    assert len(rows) > 3 and max(row["tokens"] for row in rows) <= 12
    assert pic("link", "-m", tiny_gguf, *texts, "-q", QUESTION, "--codec", codec).code == 0


def test_link_compares_streams_and_names_its_engine(tiny_gguf: Path, texts: list[Path]) -> None:
    report = pic("link", "-m", tiny_gguf, *texts, "-q", QUESTION, "--compare", "--json").json
    assert report["engine"] == "llamacpp" and report["compare"]["speedup"] > 0
    assert report["request"]["fingerprint"] == open_gguf(str(tiny_gguf)).fingerprint
    streamed = pic("link", "-m", tiny_gguf, *texts, "-q", QUESTION)
    assert streamed.out.strip() == report["answer"].strip()
    several = pic("link", "-m", tiny_gguf, *texts, "-q", QUESTION, "--algo", "legolink-4", "--algo", "naive", "--json")
    assert [each["algo"] for each in several.json] == ["legolink", "naive"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algo", "cacheblend-15"], "--algo cacheblend: "),
        (["--dtype", "bfloat16"], "--dtype bfloat16: "),
    ],
)
def test_what_it_cannot_do_is_refused(tiny_gguf: Path, texts: list[Path], options: list[str], message: str) -> None:
    done = pic("link", "-m", tiny_gguf, *texts, "-q", QUESTION, *options)
    assert done.code in (1, 2) and message in done.err and done.err.count("pic: error") == 1


def test_torch_runs_it_too(embedded_gguf: Path, texts: list[Path]) -> None:
    asked = (
        "link",
        "-m",
        embedded_gguf,
        *texts,
        "-q",
        QUESTION,
        "--algo",
        "legolink-4",
        "--dtype",
        "float32",
        "--json",
    )
    by_torch, by_llama = pic(*asked, "--engine", "torch").json, pic(*asked).json
    assert (by_torch["engine"], by_llama["engine"]) == ("torch", "llamacpp")
    assert by_torch["answer"] == by_llama["answer"] and by_torch["tokens"] == by_llama["tokens"]


def test_a_trace_is_written_and_read_and_attention_is_refused(tiny_gguf: Path, texts: list[Path]) -> None:
    linked = pic(
        "link", "-m", tiny_gguf, *texts, "-q", QUESTION, "--algo", "legolink-4", "--trace", "x.trace", "--json"
    ).json
    shown = pic("inspect", "x.trace", "--json").json
    assert shown["answer"] == linked["answer"] and shown["tokens"] == linked["tokens"]
    for options in (["--attention"], ["--against", "full"]):
        done = pic("inspect", "x.trace", *options, "-m", tiny_gguf)
        assert done.code == 1 and "this needs a transformers model" in done.err


def test_bench_measures_what_llama_cpp_runs(embedded_gguf: Path) -> None:
    done = pic("bench", "-m", embedded_gguf, "--chunks", 2, "--chunk-tokens", 32, "--repeats", 1, "--json")
    methods = [method["label"] for method in done.json["results"]["methods"]]
    assert methods == ["full", "auto", "naive", "legolink-16"] and "skipped: cacheblend-15 " in done.err


def test_ask_and_tune(embedded_gguf: Path) -> None:
    for file, (name, where) in zip("ab", RESIDENTS.items(), strict=True):
        write(f"notes/{file}.txt", f"{name} lives in {where}. " * 12)
    first, second = (pic("ask", "notes", "-q", "Lina lives", "-m", embedded_gguf, "--json").json for _ in range(2))
    assert first["sources"] and first["answer"] == second["answer"]
    asked = [{"query": f"Where does {name} live?", "answers": [where]} for name, where in RESIDENTS.items()]
    write("q.jsonl", "\n".join(map(json.dumps, asked)))
    tuned = pic("tune", "notes/a.txt", "notes/b.txt", "-m", embedded_gguf, "--questions", "q.jsonl")
    assert tuned.code == 1 and "10 answers" in tuned.err and "2 questions are too few" in tuned.err


def test_files_that_are_none(texts: list[Path]) -> None:
    write("a.gguf", b"GGUF" + bytes(100))
    write("b.gguf", b"nothing")
    for name, message in (("a.gguf", "llama.cpp"), ("b.gguf", "not a GGUF file"), ("c.gguf", "no such GGUF file")):
        done = pic("link", "-m", name, *texts, "-q", QUESTION)
        assert (done.code, done.err.count("\n")) == (1, 1), done.err
        assert message in done.err and name in done.err


def test_the_doctor_proves_shift_removal_and_copy(tiny_gguf: Path) -> None:
    report = pic("doctor", "-m", tiny_gguf, "--dtype", "float32", "--json", "--algo", "legolink-16").json
    checked = {row["check"]: row["status"] for row in report["verdicts"] if row["section"].startswith("exactness")}
    assert len(checked) == 3 and set(checked.values()) == {"ok"}


def test_eval_answers_a_dataset(embedded_gguf: Path) -> None:
    algos = "--algo", "legolink-16", "--algo", "naive"
    done = pic("eval", FIXTURES / "queries.jsonl", "-m", embedded_gguf, "--limit", 3, *algos, "--json")
    assert done.json["questions"] == 3 and all(name in done.out for name in ("legolink-16", "naive"))


@pytest.mark.parametrize("name", ["rag.yaml", "judge.yaml"])
def test_span_queries(embedded_gguf: Path, name: str) -> None:
    """Its prompts are laid out already: plans, whose parts may be pieces of objects."""
    examples = Path(__file__).parents[2] / "examples" / "queries"
    ours = pic("query", examples / name, "--json", "--outputs", "compiled", "--store", "torch").json
    done = pic("query", "-m", embedded_gguf, "--dtype", "float32", examples / name, "--json").json
    assert done["answer"] == ours["answer"]


@pytest.fixture(scope="module")
def live(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model, store = open_gguf(str(tiny_gguf), dtype="float32"), Store(tmp_path_factory.mktemp("served"))
    with serving(model, store, settings=BackendSettings(parse_policy("legolink-4"), refresh_s=3600, name=NAME)) as live:
        yield live


def test_the_server_links_caches(live: Live) -> None:
    ids = [live.cache(text) for text in DOCS]
    response = live.chat(QUESTION, cache_ids=ids)
    assert (
        text_of(response)
        and response["pic"]["chunks"] == 3
        and response["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    )


def test_the_server_interleaves_requests(live: Live) -> None:
    text = "No cache has this text, so that nothing links it. " + QUESTION
    alone = text_of(live.chat(text))
    streams = [
        live.client_of("x").stream(
            "POST", "/v1/chat/completions",
            json={"model": NAME, "temperature": 0, "max_tokens": 8, "stream": True,
                  "messages": [{"role": "user", "content": text}]},
        )
        for _ in range(3)
    ]  # fmt: skip
    for stream in streams:
        with stream as response:
            assert response.status_code == 200 and "[DONE]" in response.read().decode()
    assert text_of(live.chat(text)) == alone


@pytest.mark.parametrize(("device", "layers", "expected"), [("auto", "", -1), ("auto", "7", 7), ("cpu", "7", 0)])
def test_layers_go_to_an_accelerator_unless_the_device_is_the_cpu(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, device: str, layers: str, expected: int
) -> None:
    given = list[int]()

    def weights(path: str, vocab_only: bool = False, gpu_layers: int = 0) -> Weights:
        given.append(gpu_layers)
        return Weights(path, vocab_only, gpu_layers)

    monkeypatch.setattr(api(), "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr("pictool.engines.llamacpp.model.Weights", weights)
    monkeypatch.setenv("PIC_GPU_LAYERS", layers)
    _ = open_gguf(str(tiny_gguf), device).stack
    assert given == [0, expected]  # of the vocabulary alone, and of the model
