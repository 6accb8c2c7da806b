"""The link form: what it asks for, progress, the answer as it streams, cancelling, and the trace that opens."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input
from traces import make_trace

from pictool.errors import InputError
from pictool.store.store import Store
from pictool.tui.base import ConfirmDialog
from pictool.tui.compare_screen import CompareScreen
from pictool.tui.home_screen import HomeScreen
from pictool.tui.link_screen import LinkScreen, split_documents
from pictool.tui.services import LinkForm, Listener
from pictool.tui.trace_screen import TraceScreen
from tui.drive import FakeJob, drive, load, make_app, press, screen_text, settle

SIZE = (90, 44)


def screen(pilot: Pilot[None]) -> LinkScreen:
    assert isinstance(pilot.app.screen, LinkScreen)
    return pilot.app.screen


def fill(pilot: Pilot[None], **values: str) -> None:
    for name, value in values.items():
        screen(pilot).query_one(f"#{name}", Input).value = value


def note(pilot: Pilot[None]) -> str:
    return str(screen(pilot).query_one("#note").render())


def test_a_link_streams_writes_its_trace_and_opens_it(store: Store) -> None:
    job = FakeJob(make_trace(), waits=True)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "l")
        fill(pilot, documents="a.txt 'b c.txt'", query="Does it?", max="7")
        await pilot.press("ctrl+s")
        await pilot.pause(0.3)
        assert "compiled a.txt (3 tokens)" in note(pilot) and "yes, it does" in screen_text(screen(pilot).pic)
        job._go.set()
        await settle(pilot)
        await settle(pilot)
        assert isinstance(pilot.app.screen, TraceScreen) and pilot.app.screen.loaded.name == "link-1.trace"
        await press(pilot, "escape")
        assert screen(pilot).query_one("#trace", Input).value == "link-2.trace"

    drive(make_app(store, job=job), scenario, SIZE)
    assert job.requests == [LinkForm(("a.txt", "b c.txt"), "Does it?", "auto", "link-1.trace", 7, None)]


def test_several_policies_are_linked_one_after_the_other_and_compared(store: Store) -> None:
    job = FakeJob(make_trace())

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "l")
        fill(pilot, documents="a.txt", query="Does it?", policies="none cacheblend")
        await press(pilot, "ctrl+s")
        assert "none" in note(pilot) and "must be one of" in note(pilot) and not job.requests
        fill(pilot, policies="legolink cacheblend:ratio=0.5 legolink-1")
        await press(pilot, "ctrl+s")
        await settle(pilot)
        assert isinstance(pilot.app.screen, CompareScreen)
        names = [loaded.name for loaded in pilot.app.screen.loaded]
        assert names == ["link-1.trace", "link-1-2.trace", "link-1-3.trace"]
        await press(pilot, "escape")
        each = "legolink:  yes, it does", "cacheblend:ratio=0.5:  yes, it does", "legolink-1:  yes, it does"
        assert screen(pilot).answer == "\n".join(each)
        assert "wrote link-1.trace, link-1-2.trace, link-1-3.trace" in note(pilot)

    drive(make_app(store, job=job), scenario, SIZE)
    forms = [(form.algo, form.trace) for form in job.requests]
    assert forms == [
        ("legolink", "link-1.trace"), ("cacheblend:ratio=0.5", "link-1-2.trace"), ("legolink-1", "link-1-3.trace")
    ]  # fmt: skip


def test_what_was_linked_before_a_cancel_is_kept(store: Store) -> None:
    class Second(FakeJob):
        """Waits from the second request on."""

        def link(self, form: LinkForm, listener: Listener) -> Path | None:
            self.waits = bool(self.requests)
            return super().link(form, listener)

    job = Second(make_trace())

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "l")
        fill(pilot, documents="a.txt", query="Does it?", policies="legolink cacheblend cacheblend")
        await pilot.press("ctrl+s")
        await pilot.pause(0.3)
        await press(pilot, "ctrl+g")
        assert "cancelled; wrote link-1.trace" in note(pilot) and len(job.requests) == 2
        assert [path.name for path in Path.cwd().glob("*.trace")] == ["link-1.trace"]

    drive(make_app(store, job=job), scenario, SIZE)


def test_a_link_is_cancelled(store: Store) -> None:
    job = FakeJob(make_trace(), waits=True)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "l")
        fill(pilot, documents="a.txt", query="Does it?")
        await pilot.press("ctrl+s")
        await pilot.pause(0.2)
        await press(pilot, "escape")  # cancels, and does not leave
        assert not screen(pilot).pic.is_job_running and note(pilot) == "cancelled"
        assert not list(Path.cwd().glob("*.trace"))
        await press(pilot, "escape")
        assert isinstance(pilot.app.screen, HomeScreen)

    drive(make_app(store, job=job), scenario, SIZE)


def test_what_goes_wrong_is_said_and_the_form_stays(store: Store) -> None:
    job = FakeJob(InputError("a.txt: no such file"))

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "l", "ctrl+s")
        assert "a query is needed" in note(pilot)
        fill(pilot, documents="'a.txt", query="Does it?")
        await press(pilot, "ctrl+s")
        assert "No closing quotation" in note(pilot)
        fill(pilot, documents="a.txt", max="none")
        await press(pilot, "ctrl+s")
        assert "must be a number from 1" in note(pilot) and not job.requests
        fill(pilot, max="3")
        await press(pilot, "ctrl+s")
        assert "a.txt: no such file" in note(pilot)

    drive(make_app(store, job=job), scenario, SIZE)


def test_questions_without_a_trace_follow_each_other_in_the_form(store: Store) -> None:
    job = FakeJob(make_trace())

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "l")
        fill(pilot, documents="a.txt", query="Does it?", trace="", policies="naive full")
        await press(pilot, "ctrl+s")
        assert "to compare policies, name a trace to write" in note(pilot) and not job.requests
        fill(pilot, policies="naive")
        for query in ("Does it?", "Does it not?"):
            fill(pilot, query=query)
            await press(pilot, "ctrl+s")
            await settle(pilot)
            assert note(pilot) == "32 of 40 tokens were reused" and screen(pilot).answer == " yes, it does"
            assert screen(pilot).query_one("#trace", Input).value == ""

    drive(make_app(store, job=job), scenario, SIZE)
    assert [(form.query, form.trace) for form in job.requests] == [("Does it?", ""), ("Does it not?", "")]
    assert not list(Path.cwd().glob("*.trace"))


def test_globs_are_expanded_and_no_trace_is_written_over_unasked(store: Store) -> None:
    job = FakeJob(make_trace())
    for name in ("p2.txt", "p1.txt"):
        Path(name).write_text(name)
    app = make_app(store, [load(make_trace(), "0.trace")], job)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "escape", "l")
        fill(pilot, documents="q*.txt", query="Does it?", trace="0.trace")
        await press(pilot, "ctrl+s")
        assert "q*.txt: no file matches" in note(pilot) and not job.requests
        fill(pilot, documents="p*.txt beef")
        await press(pilot, "ctrl+s")
        assert isinstance(pilot.app.screen, ConfirmDialog) and "Write over 0.trace?" in screen_text(app)
        await press(pilot, "n")
        assert not job.requests and isinstance(pilot.app.screen, LinkScreen)
        await press(pilot, "ctrl+s", "y")
        await settle(pilot)

    drive(app, scenario, SIZE)
    assert [form.documents for form in job.requests] == [("p1.txt", "p2.txt", "beef")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("docs/[ab].txt", ["docs/a.txt", "docs/b.txt"]),
        ("docs/b.txt docs/a*", ["docs/b.txt", "docs/a.txt"]),
        ("docs/**/e.txt", ["docs/deep/e.txt"]),
        ("'docs/c d.txt'", ["docs/c d.txt"]),
        ("docs/[x].txt", ["docs/[x].txt"]),  # a file's own name is no glob
        ("gone.txt 0123abcd", ["gone.txt", "0123abcd"]),
        ("a\0*", ["a\0*"]),
        ("", []),
    ],
)
def test_words_are_expanded(text: str, expected: list[str]) -> None:
    Path("docs/deep").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "c d.txt", "[x].txt", "deep/e.txt"):
        (Path("docs") / name).write_text(name)
    assert split_documents(text) == expected
    with pytest.raises(ValueError, match=r"docs/d\*"):
        split_documents("docs/d*")  # a directory is no document
