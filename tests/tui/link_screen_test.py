"""The link form: what it asks for, progress, the answer as it streams, cancelling, and the trace that opens."""

from __future__ import annotations

from pathlib import Path

from textual.pilot import Pilot
from textual.widgets import Button, Input, ProgressBar, Select
from traces import make_trace

from pictool.errors import InputError
from pictool.store.store import Store
from pictool.tui.compare_screen import CompareScreen
from pictool.tui.dialogs import ConfirmDialog
from pictool.tui.home_screen import HomeScreen
from pictool.tui.link_screen import LinkScreen
from pictool.tui.services import LinkForm, Listener
from pictool.tui.trace_screen import TraceScreen
from tui.drive import FakeJob, drive, load, make_app, press, put_object, screen_text, settle

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
        assert screen(pilot).query_one("#params", Input).value == "k=16"
        screen(pilot).query_one("#algo", Select).value = "cacheblend"
        await settle(pilot)
        assert screen(pilot).query_one("#params", Input).value == "ratio=0.15 on=v"
        fill(pilot, documents="a.txt 'b c.txt'", query="Does it?", max="7")
        await settle(pilot)  # what the documents are is named below them
        await pilot.click("#start")
        await pilot.pause(0.3)
        assert screen(pilot).query_one("#progress").display and screen(pilot).query_one("#start", Button).disabled
        assert "compiled a.txt (3 tokens)" in note(pilot) and "yes, it does" in screen_text(screen(pilot).pic)
        job._go.set()
        await settle(pilot)
        await settle(pilot)
        assert isinstance(pilot.app.screen, TraceScreen) and pilot.app.screen.loaded.name == "link-1.trace"
        await press(pilot, "escape")
        assert screen(pilot).query_one("#trace", Input).value == "link-2.trace"

    drive(make_app(store, job=job), scenario, SIZE)
    expected = LinkForm(
        ("a.txt", "b c.txt"), "Does it?", "cacheblend", ("ratio=0.15", "on=v"), "link-1.trace", 7, None
    )  # fmt: skip
    assert job.requests == [expected]


def test_several_policies_are_linked_one_after_the_other_and_compared(store: Store) -> None:
    job = FakeJob(make_trace())

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "l")
        fill(pilot, documents="a.txt", query="Does it?", others="none; cacheblend")
        await press(pilot, "ctrl+s")
        assert "none" in note(pilot) and "must be one of" in note(pilot) and not job.requests
        fill(pilot, others="cacheblend ratio=0.5; legolink-1 ;")
        await press(pilot, "ctrl+s")
        await settle(pilot)
        assert isinstance(pilot.app.screen, CompareScreen)
        assert [loaded.name for loaded in pilot.app.screen.loaded] == [
            "link-1.trace",
            "link-1-2.trace",
            "link-1-3.trace",
        ]
        await press(pilot, "escape")
        assert screen(pilot)._answer == "legolink:  yes, it does\ncacheblend:  yes, it does\nlegolink-1:  yes, it does"
        assert "wrote link-1.trace, link-1-2.trace, link-1-3.trace" in note(pilot)

    drive(make_app(store, job=job), scenario, SIZE)
    forms = [(form.algo, form.fields, form.trace) for form in job.requests]
    assert forms == [
        ("legolink", ("k=16",), "link-1.trace"), ("cacheblend", ("ratio=0.5",), "link-1-2.trace"),
        ("legolink-1", (), "link-1-3.trace"),
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
        fill(pilot, documents="a.txt", query="Does it?", others="cacheblend; cacheblend")
        await pilot.press("ctrl+s")
        await pilot.pause(0.3)
        bar = screen(pilot).query_one(ProgressBar)
        assert (bar.progress, bar.total) == (1, 3)
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
        await pilot.press("escape")
        await pilot.pause()
        assert screen(pilot).is_linking  # leaving is refused while it runs
        await press(pilot, "ctrl+g")
        assert not screen(pilot).is_linking and "cancelled; no trace was written" in note(pilot)
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
        assert "a.txt: no such file" in note(pilot) and not screen(pilot).is_linking

    drive(make_app(store, job=job), scenario, SIZE)


def test_questions_without_a_trace_follow_each_other_in_the_form(store: Store) -> None:
    job = FakeJob(make_trace())

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "l")
        fill(pilot, documents="a.txt", query="Does it?", trace="", others="naive")
        await press(pilot, "ctrl+s")
        assert "to compare policies, name a trace to write" in note(pilot) and not job.requests
        fill(pilot, others="")
        for query in ("Does it?", "Does it not?"):
            fill(pilot, query=query)
            await press(pilot, "ctrl+s")
            await settle(pilot)
            assert note(pilot) == "32 of 40 tokens were reused" and screen(pilot)._answer == " yes, it does"
            assert screen(pilot).query_one("#trace", Input).value == ""

    drive(make_app(store, job=job), scenario, SIZE)
    assert [(form.query, form.trace) for form in job.requests] == [("Does it?", ""), ("Does it not?", "")]
    assert not list(Path.cwd().glob("*.trace"))


def test_globs_are_expanded_and_every_document_is_named(store: Store) -> None:
    job = FakeJob(make_trace())
    for name in ("p2.txt", "p1.txt"):
        Path(name).write_text(name)
    key = put_object(store, "The harbour was quiet.", 5)
    app = make_app(store, [load(make_trace(), "0.trace")], job)

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "escape", "l")
        fill(pilot, documents=f"p*.txt {key[:12]} beef", query="Does it?", trace="0.trace")
        await settle(pilot)
        shown = screen_text(app)
        assert "1  p1.txt" in shown and "2  p2.txt" in shown and f"3  {key[:12]}  «The harbour was quiet.»" in shown
        assert "4  beef: neither a file nor an object here" in shown
        fill(pilot, documents="q*.txt")
        await press(pilot, "ctrl+s")
        assert "q*.txt: no file matches" in note(pilot) and not job.requests
        fill(pilot, documents=f"p*.txt {key[:12]}")
        await press(pilot, "ctrl+s")
        assert isinstance(pilot.app.screen, ConfirmDialog) and "0.trace exists. Write over it?" in screen_text(app)
        await press(pilot, "n")
        assert not job.requests and isinstance(pilot.app.screen, LinkScreen)
        await press(pilot, "ctrl+s", "y")
        await settle(pilot)

    drive(app, scenario, SIZE)
    assert [form.documents for form in job.requests] == [("p1.txt", "p2.txt", key[:12])]


def test_an_object_is_named_by_the_document_that_it_came_from(store: Store) -> None:
    key = put_object(store, "The harbour was quiet.", 5)
    trace = make_trace()
    trace = make_trace(chunks=(trace.chunks[0].__class__("docs/harbour.txt", key, 0), trace.chunks[1]))
    app = make_app(store, [load(trace, "0.trace")])

    async def scenario(pilot: Pilot[None]) -> None:
        await press(pilot, "escape")
        assert f"{key[:12]}  docs/harbour.txt" in screen_text(app)  # the preview
        await press(pilot, "space", "l")
        assert f"1  {key[:12]}  docs/harbour.txt" in screen_text(app)

    drive(app, scenario, SIZE)
