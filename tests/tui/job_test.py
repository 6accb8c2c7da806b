"""The process of the job, with a real model: a link, an analysis, another model, cancelling, and its death."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from commands.conftest import save
from commands.run import write

from pictool.commands.settings.settings import Settings
from pictool.commands.tui_process.job import WorkerJob
from pictool.errors import ForeignObjectError, PicError, TraceError
from pictool.runtime.model import load_model
from pictool.store.store import Store
from pictool.trace.analysis import analyse_trace
from pictool.trace.attention_sinks import attention_sinks
from pictool.trace.format import read_trace
from pictool.tui.services import Cancelled, LinkForm


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.answer = ""

    def __call__(self, kind: str, text: str) -> None:
        if kind == "note":
            self.note(text)
        else:
            self.answer += text

    def note(self, text: str) -> None:
        self.notes.append(text)


def form(**changes: object) -> LinkForm:
    fields = {"documents": ("a.txt",), "query": "Who?", "algo": "legolink-2", "trace": "out.trace"}
    return LinkForm(**{**fields, "max_new_tokens": 3, **changes})  # type: ignore[arg-type]


def test_the_process_imports_nothing_from_the_working_directory() -> None:
    for name in ("socket", "pickle", "pictool"):
        write(f"{name}.py", "from pathlib import Path\nPath('ran').touch()\nraise SystemExit(3)\n")
    with WorkerJob(Settings().override(store="st", device="cpu", dtype="float32")) as job, pytest.raises(PicError):
        job.attention_sinks("0" * 64, Heard())
    assert not Path("ran").exists()


def test_the_process_does_what_the_functions_do(tmp_path: Path) -> None:
    model, other = save(tmp_path / "model"), save(tmp_path / "other", seed=1)
    write("a.txt", "The harbour was quiet. It holds a festival.\n")
    heard = Heard()
    with WorkerJob(Settings().override(store="st", model=str(model), device="cpu", dtype="float32")) as job:
        path = job.link(form(), heard)
        assert path is not None
        trace = read_trace(path)
        assert trace.answer == heard.answer.strip() and trace.policy == "legolink k=2"
        assert heard.notes[0] == "loading the model" and any(note.startswith("compiled a.txt") for note in heard.notes)
        analysis = job.analyse(trace, "out.trace", heard)
        expected = analyse_trace(load_model(str(model), dtype="float32"), Store("st"), trace, "out.trace")
        assert (
            analysis.attention is not None
            and expected.attention is not None
            and analysis.deviation
            and expected.deviation
        )
        assert np.allclose(analysis.attention.share(), expected.attention.share(), atol=1e-5)
        assert np.allclose(analysis.deviation.kv.both, expected.deviation.kv.both, atol=1e-4)
        sinks = job.attention_sinks(trace.chunks[0].key, heard)
        with Store("st").peek(trace.chunks[0].key) as file:
            expected_sinks = attention_sinks(
                load_model(str(model), dtype="float32"), file.tokens().tolist(), file.meta.after[0]
            )
        assert np.allclose(sinks.initial_share, expected_sinks.initial_share, atol=1e-5)
        assert np.allclose(sinks.share_by_offset, expected_sinks.share_by_offset, atol=1e-5)
        with pytest.raises(PicError, match="'x'"):
            job.link(form(algo="legolink:x=1"), heard)
        with pytest.raises(PicError, match=r"out\.trace"):
            job.link(form(documents=("out.trace",)), heard)
    with (
        WorkerJob(Settings().override(store="st", model=str(other), device="cpu", dtype="float32")) as job,
        pytest.raises(TraceError, match="-m"),
    ):
        job.analyse(trace, "out.trace", heard)
    with (
        WorkerJob(Settings().override(store="st", model=str(other), device="cpu", dtype="float32")) as job,
        pytest.raises(ForeignObjectError, match="model"),
    ):
        job.attention_sinks(trace.chunks[0].key, heard)


def test_questions_without_a_trace_share_an_engine_and_a_trace_is_of_a_fresh_link(tmp_path: Path) -> None:
    write("a.txt", "The harbour was quiet. It holds a festival in the spring, and then another one.\n" * 3)
    model = save(tmp_path / "model")
    with WorkerJob(Settings().override(store="st", model=str(model), device="cpu", dtype="float32")) as job:
        answers = []
        for trace in ("", "fresh.trace", "", ""):
            heard = Heard()
            assert job.link(form(trace=trace, algo="full"), heard) == (Path(trace) if trace else None)
            answers.append((heard.answer, re.findall("[0-9]+ are of earlier", heard.notes[-1])))
        whole = read_trace(Path("fresh.trace"))
    assert (
        len({answer for answer, _ in answers}) == 1 and whole.report["tokens"]["recomputed"] == whole.layout.num_context
    )
    most = f"{(whole.layout.num_tokens - 1) // 16 * 16} are of earlier"
    assert [reused for _, reused in answers] == [["0 are of earlier"], [], [most], [most]]
    assert not Path("link-1.trace").exists()


def test_a_run_is_cancelled_or_dies_and_the_next_one_works() -> None:
    write("a.txt", "The harbour was quiet.\n")
    with WorkerJob(Settings().override(store="st", model=None, device="cpu", dtype="float32")) as job:

        class Ends(Heard):
            """Ends the process as soon as it says that it loads the model."""

            def __init__(self, by_user: bool) -> None:
                super().__init__()
                self.by_user = by_user

            def note(self, text: str) -> None:
                assert job._process is not None
                if self.by_user:
                    job.cancel()
                else:
                    os.kill(job._process.pid, signal.SIGSEGV)

        with pytest.raises(Cancelled):
            job.link(form(), Ends(by_user=True))
        with pytest.raises(PicError, match="process"):
            job.link(form(), Ends(by_user=False))
        assert not Path("out.trace").exists()
        assert job.link(form(), Heard()) == Path("out.trace")
