"""Texts that requests repeat: what counts as one, and that a server compiles it after the answer, within its budget."""

from __future__ import annotations

import random
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from pictool.errors import StoreError
from pictool.linker.grid import parse_policy
from pictool.runtime.model import Model
from pictool.serve.backends.base import BackendSettings
from pictool.serve.prompts.learning import Learner, Repeats, paragraphs
from pictool.serve.tenants import Keys, Tenant
from pictool.store.store import Store
from serve.live import RESPONSES, TEMPLATE, Live, serving, text_of, tiny_model, until


def words(seed: int) -> str:
    """A text of paragraphs that no other has."""
    draw = random.Random(seed)
    return "\n\n".join(" ".join(draw.choices(tiny.TEXT.split(), k=14)) for _ in range(5))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pictool.serve.backends.torch.engine_thread.QUIET_S", 0.0)


A, B = words(0), words(1)
KEYS = Keys({"key-of-a": Tenant("a", "salt of a"), "key-of-b": Tenant("b", "salt of b")})


def test_a_part_is_what_followed_one_another_before() -> None:
    repeats = Repeats()
    assert repeats.find("t", ["one\n\ntwo\n\nthree"]) == ([], ["two"])
    assert repeats.find("t", ["new\n\none\n \ntwo\n\nwhat?"]) == (["one\n \ntwo"], [])
    assert repeats.find("t", ["two\n\none"]) == (["two", "one"], [])
    assert repeats.find("another", ["one\n\ntwo"]) == ([], [])
    assert repeats.find("t", ["one", "one"]) == (["one"], [])


def test_a_new_text_is_a_part_without_the_question_after_it() -> None:
    repeats, long, longer = Repeats(), "A long paragraph. " * 20, "Another one. " * 30
    document = f"{long.strip()}\n\nShort.\n\n{longer.strip()}"
    assert repeats.find("t", [f"Read this:\n\n{document}\n\nWhat is it?", "Yes."]) == ([], [document])
    assert repeats.find("t", [f"{document}\n\nWho?"]) == ([document], [])
    assert repeats.find("t", ["One.\n\nTwo.\n\nThree."]) == ([], ["Two."])


@given(st.lists(st.text("ab \n", max_size=12), max_size=6))
def test_parts_are_texts_of_the_request_and_known_only_from_an_earlier_one(texts: list[str]) -> None:
    repeats = Repeats()
    assert repeats.find("t", texts)[0] == []
    parts, _ = repeats.find("t", texts)
    assert all(any(part in text for text in texts) for part in parts)
    assert bool(parts) == any(text.strip() for text in texts)


@given(st.text("ab \n\t\r", max_size=40))
def test_paragraphs_end_at_empty_lines(text: str) -> None:
    by_definition = re.compile(r"\S.*?(?=\s*\n[ \t]*\n|\s*\Z)", re.DOTALL)
    assert list(paragraphs(text)) == [match.span() for match in by_definition.finditer(text)]


@pytest.mark.parametrize("blank", [" ", "\n", "\n ", "\r"])
def test_blanks_are_read_once(blank: str) -> None:
    """By the definition above these take hours."""
    assert len(list(paragraphs(f"x{blank * 400_000}y{blank * 400_000}"))) == 1 + ("\n" in blank)


def test_others_are_answered_while_the_texts_of_a_request_are_read(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def find(*_: object) -> dict[str, bool]:
        begun.set()
        assert may_end.wait(60)
        return {}

    with serving(model, Store(tmp_path / "store"), settings=settings(1 << 30)) as live, ThreadPoolExecutor() as threads:
        monkeypatch.setattr(live.backend._learner, "find", find)
        asking = threads.submit(ask, live, A, "Why?")
        assert begun.wait(60)
        with live.client_of(None) as other:
            assert other.get("/health").json()["status"] == "ok"
        may_end.set()
        assert asking.result(60)


def test_what_is_remembered_is_bounded() -> None:
    repeats = Repeats(remembered=3)
    for number in range(10):
        repeats.find("t", [f"text {number}"])
    assert repeats.find("t", ["text 9"])[0] and not repeats.find("t", ["text 1"])[0]


def settings(learned_bytes: int) -> BackendSettings:
    return BackendSettings(parse_policy("legolink-4"), refresh_s=3600, learned_bytes=learned_bytes)


def ask(live: Live, document: str, question: str, **more: Any) -> Any:
    return live.chat(f"{document}\n\n{question}", **more)


def settled(live: Live) -> None:
    """Until nothing is compiled any more, and the index has read the store."""
    backend = live.backend
    until(lambda: not (backend._finding or backend._is_learning or backend.status().active))
    live.backend.index.refresh()


def test_a_text_is_compiled_after_the_answer_and_then_linked(model: Model, tmp_path: Path) -> None:
    with serving(model, Store(tmp_path / "store"), settings=settings(1 << 30)) as live:
        assert ask(live, A, "Why?")["pic"]["source"] == "none"
        settled(live)
        assert (learned := live.backend.status().learned_bytes) > 0
        linked = ask(live, A, "Where?")
        assert linked["pic"]["source"] == "moved"
        assert linked["pic"]["moved_tokens"] == linked["pic"]["linked_tokens"] > 100
        settled(live)
        assert live.backend.status().learned_bytes == learned  # what the store has is not compiled again
        exact = ask(live, A, "Where?", pic={"policy": "full"})
        assert text_of(ask(live, A, "Where?", pic={"policy": "legolink-4096"})) == text_of(exact)
        assert f"pic_learned_bytes_total {float(learned)}" in live.client.get("/metrics").text


EDITS: dict[str, Callable[[list[str]], list[str]]] = {
    "drop": lambda said: said[1:],
    "trim": lambda said: [said[0][: len(said[0]) // 2], *said[1:]],
    "insert": lambda said: [said[0], "So it is.", *said[1:]],
    "reorder": lambda said: [said[1], said[0], said[2]],
    "compact": lambda said: ["In short: quiet.", said[2]],
}


@pytest.mark.parametrize("edit", EDITS)
def test_messages_of_an_edited_history_are_linked_and_nothing_of_their_old_context_is(
    edit: str, tmp_path: Path
) -> None:
    """After the exact prefix come objects of the messages, compiled alone: a server that never saw the old history
    gives the same, and so does full recompute once all their tokens are computed."""
    rng, templated = random.Random(edit), tiny_model(TEMPLATE)
    said = [" ".join(rng.choices(tiny.TEXT.split(), k=40)) for _ in range(3)]
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}
    history, edited = (
        [{"role": "system", "content": "You are."}, *({"role": "user", "content": text} for text in texts)]
        for texts in (said, EDITS[edit](said))
    )
    with serving(templated, Store(tmp_path / "store"), settings=replace(settings(1 << 30), pool_bytes=None)) as live:
        for _ in range(3):
            live.chat("", messages=history)
            settled(live)
        shutil.copytree(tmp_path / "store", tmp_path / "other")
        first = live.chat("", messages=edited, **more)
        exact = live.chat("", messages=edited, pic={"policy": "full"}, **more)
        moved = live.chat("", messages=edited, pic={"policy": "legolink-4096"}, **more)
    with serving(templated, Store(tmp_path / "other"), settings=settings(0)) as live:
        other = live.chat("", messages=edited, **more)
    assert first["pic"]["linked_tokens"] == first["pic"]["moved_tokens"] > 60 and first["pic"]["source"] == "moved"
    assert (other["pic"]["source"], other["pic"]["moved_tokens"]) == ("recognised", 0)  # no request of its own had them
    for a, b in ((first, other), (moved, exact)):
        assert text_of(a) == text_of(b) and logprobs(a) == pytest.approx(logprobs(b), abs=1e-3)


def logprobs(answer: Any) -> list[float]:
    return [top["logprob"] for top in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]


Messages = list[dict[str, Any]]
FIRST, SECOND = "The harbour was quiet in the spring.", "The harbour was quiet in the summer."


def agent(first: str = FIRST) -> Messages:
    """The messages of an agent: a system text, calls and results of a tool, a question."""
    rng = random.Random("agent")

    def text(num_words: int) -> str:
        return " ".join(rng.choices(tiny.TEXT.split(), k=num_words))

    messages: Messages = [
        {"role": "system", "content": f"{first}\n\n{text(60)}"},
        {"role": "user", "content": "Read all."},
    ]
    for number in range(4):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        messages += [
            {"role": "assistant", "content": "Next.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": text(45)},
        ]
    return [*messages, {"role": "user", "content": "What was it?"}]


def dropped(messages: Messages) -> Messages:
    """The first two results are stubs."""
    return [each | {"content": "[removed]"} if i in (3, 5) else each for i, each in enumerate(messages)]


def compacted(messages: Messages) -> Messages:
    """The first two calls and their results are a summary."""
    return [*messages[:2], {"role": "user", "content": "So far: quiet."}, *messages[6:]]


def with_other_line(_: Messages) -> Messages:
    return agent(SECOND)


@pytest.mark.parametrize(
    ("edit", "before", "moved"), [(dropped, 3, (7, 9)), (compacted, 2, (4, 6)), (with_other_line, 0, (0, 3, 5, 7, 9))]
)
def test_after_an_edit_of_an_agents_prompt_only_what_is_new_or_short_is_computed(
    edit: Callable[[Messages], Messages], before: int, moved: tuple[int, ...], tmp_path: Path
) -> None:
    """Messages before the edit are the prefix; results of tools after it, and the rest of a system text whose first
    line changed, are linked. Without learning, an answer is full's."""
    templated, messages, edited = tiny_model(TEMPLATE, positions=1024), agent(), edit(agent())
    texts = [str(edited[i]["content"]).split("\n\n")[-1] for i in moved]
    lengths = [len(templated.encode(text)) for text in texts]
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 20}
    sizes = replace(settings(1 << 30), pool_bytes=None)
    with serving(templated, Store(tmp_path / "store"), settings=sizes) as live:
        live.chat("", messages=messages)
        settled(live)
        answer = live.chat("", messages=edited)
    found, usage = answer["pic"], answer["usage"]
    assert (found["chunks"], found["source"]) == (len(moved), "moved")
    moved_tokens = found["linked_tokens"] + found["recomputed_tokens"]
    assert 0 <= sum(lengths) - moved_tokens <= 2 * len(moved)  # the tokenizer may join their edges
    assert found["recomputed_tokens"] == 4 * len(moved)
    rendered = "".join(f"[{each['role']}]{each['content']}\n" for each in edited[:before])
    prefix = found["prefix_tokens"]
    assert prefix > len(templated.encode(rendered)) - 16 and (prefix > 16) == (before > 0)
    reused = prefix + found["linked_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == reused > usage["prompt_tokens"] // 2
    with serving(templated, Store(tmp_path / "other"), settings=replace(sizes, learned_bytes=0)) as live:
        live.chat("", messages=messages)
        plain = live.chat("", messages=edited, **more)
        exact = live.chat("", messages=edited, pic={"policy": "full"}, **more)
        assert (plain["pic"]["linked_tokens"], plain["pic"]["prefix_tokens"]) == (0, prefix)
        assert text_of(plain) == text_of(exact) and logprobs(plain) == pytest.approx(logprobs(exact), abs=1e-5)


def test_a_line_within_a_paragraph_is_computed_with_it_once_and_alone_from_then_on(tmp_path: Path) -> None:
    """What is learned of a new text is one object, which another line in it spoils; what follows is then learned."""
    templated, long = tiny_model(TEMPLATE, positions=2048), " ".join(tiny.TEXT.split()[:40])

    def linked(first: str) -> int:
        found = live.chat("", messages=agent(f"{first} {long}"))["pic"]["chunks"]
        settled(live)
        return int(found)

    with serving(templated, Store(tmp_path / "store"), settings=replace(settings(1 << 30), pool_bytes=None)) as live:
        assert [linked(f"Today is {day}.") for day in ("one", "two", "three")] == [0, 4, 5]


@pytest.mark.parametrize(("policy", "goes_on"), [("legolink-4", True), ("prophet-10", False)])
def test_what_an_edited_prompt_computed_is_the_prefix_of_the_next_turn_unless_its_question_chose_the_rows(
    policy: str, goes_on: bool, tmp_path: Path
) -> None:
    """Until a prompt was computed exactly, which is a prefix from then on."""
    templated, sizes = tiny_model(TEMPLATE, positions=2048), replace(settings(1 << 30), pool_bytes=None)
    with serving(templated, Store(tmp_path / "store"), settings=sizes) as live:
        live.chat("", messages=agent())
        settled(live)
    edited: Messages = [*compacted(agent())[:-1], {"role": "user", "content": words(9)}]
    more = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
    with serving(templated, Store(tmp_path / "store"), settings=replace(sizes, learned_bytes=0)) as live:
        first, second = (live.chat("", messages=said, pic={"policy": policy}) for said in (edited, [*edited, *more]))
        assert first["pic"]["chunks"] == second["pic"]["chunks"] == 3
        assert (computed(second) < computed(first) // 2) == goes_on
        live.chat("", messages=edited, pic=False)
        third = live.chat("", messages=[*edited, *more], pic={"policy": policy})
        assert third["pic"]["chunks"] == 0 and computed(third) < 50


def computed(answer: Any) -> int:
    usage = answer["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def test_no_piece_of_a_learned_text_is_computed_after_the_text_before_it(model: Model, tmp_path: Path) -> None:
    """That may be gone from the next prompt."""
    with serving(model, Store(tmp_path / "store")) as live:
        learner = Learner(live.store, 1 << 30, live.backend.index, 16, max_tokens=64)
        chunks = learner.chunks(model, parse_policy("legolink-4"), A + "\n\n" + B)
    assert len(chunks) > 1 and not any(chunk.before for chunk in chunks)


@pytest.mark.parametrize("budget", [0, 1])
def test_without_a_budget_that_holds_an_object_nothing_is(model: Model, tmp_path: Path, budget: int) -> None:
    with serving(model, Store(tmp_path / "store"), settings=settings(budget)) as live:
        for document in (A, A, B, B):
            ask(live, document, "Why?")
            settled(live)
        assert not live.store.keys()


def test_no_part_of_a_chat_s_tools_is_linked(tmp_path: Path) -> None:
    """A tool's schema is no object: a server learns nothing from `tools`, and links nothing there of what it learned
    from messages (docs/studies/answers.md, "Tools, compiled one by one")."""
    listed = "{% for tool in tools or [] %}{{ tool.function.description }}\n\n{% endfor %}{% for message"
    templated = tiny_model(TEMPLATE.replace("{% for message", listed, 1), responses=RESPONSES)
    tools = [{"type": "function", "function": {"name": f"n{i}", "description": inner(i)}} for i in range(2)]
    with serving(templated, Store(tmp_path / "store"), settings=settings(1 << 30)) as live:
        for _ in range(3):
            live.chat("Where?", tools=tools)
            settled(live)
        assert not live.store.keys()
        learn(live, 0, 1)
        assert len(live.store.keys()) == 2
        assert ask(live, inner(1), "Where?")["pic"]["linked_tokens"] > 60
        for own in (tools, tools[1:], tools[::-1]):
            assert live.chat("Where?", tools=own)["pic"]["linked_tokens"] == 0
        both = live.chat(f"{inner(0)} Where?", tools=tools[1:])["pic"]["linked_tokens"]
        assert both == live.chat(f"{inner(0)} Where?")["pic"]["linked_tokens"] > 60


def bytes_of(store: Store) -> list[int]:
    return [entry.num_bytes for entry in store.files().values()]


def learn(live: Live, *seeds: int) -> None:
    for seed in seeds:
        ask(live, words(seed), "Why?")
        settled(live)


def test_what_was_learned_and_used_least_recently_leaves_and_what_was_compiled_stays(
    model: Model, tmp_path: Path
) -> None:
    """A text that somebody compiles himself is not the server's any more; a restart forgets neither kind."""
    store = Store(tmp_path / "store")
    with serving(model, store, settings=settings(1 << 30)) as live:
        learn(live, 2)
        (mine,) = store.keys()
        live.cache(inner(2))
        assert [*store.keys()] == [mine]
        learn(live, 3, 4, 5)
        learned = sum(entry.num_bytes for key, entry in store.files().items() if key != mine)
    with serving(model, store, settings=settings(learned)) as live:
        assert ask(live, words(3), "Where?")["pic"]["source"] == "recognised"  # so 4 was used least recently
        settled(live)  # while one request's texts are compiled, those of others are left out
        learn(live, 6)
        assert mine in store.keys()
    with serving(model, store, settings=settings(0)) as live:  # which learns nothing between the questions
        sources = [ask(live, words(seed), "When?")["pic"]["source"] for seed in (2, 3, 6, 4)]
        assert sources == ["recognised", "recognised", "recognised", "none"]


def inner(seed: int) -> str:
    """What is learned of a text at first, whose ends are short."""
    return "\n\n".join(words(seed).split("\n\n")[1:])


def test_new_texts_are_compiled_while_few_of_them_were_used(model: Model, tmp_path: Path) -> None:
    with serving(model, Store(tmp_path / "store"), settings=settings(1 << 30)) as live:
        learn(live, *range(5))
        assert len(live.store.keys()) == 5
        size = max(bytes_of(live.store))
    with serving(model, Store(tmp_path / "other"), settings=settings(12 * size)) as live:
        learn(live, *range(5))
        num = len(live.store.keys())
        assert 2 <= num < 5
        assert [ask(live, words(seed), "Who?")["pic"]["source"] for seed in range(2)] == ["moved"] * 2
        settled(live)
        learn(live, 7)
        assert len(live.store.keys()) == num + 1


def test_tenants_learn_apart(model: Model, tmp_path: Path) -> None:
    with serving(model, Store(tmp_path / "store"), KEYS, settings(1 << 30), key="key-of-a") as live:
        for key in ("key-of-a", "key-of-b"):
            live.client = live.client_of(key)
            ask(live, A, "Why?")
            settled(live)
        first, second = (list(live.backend.engine_of(tenant).store.keys()) for tenant in KEYS.tenants)
        assert first == second and len(first) == 2  # each its own: its salt is part of the key
        for key in ("key-of-a", "key-of-b"):
            live.client = live.client_of(key)
            assert ask(live, A, "Who?")["pic"]["source"] == "moved"
            settled(live)
        assert len(live.store.keys()) == 2


def test_a_disk_that_is_full_is_counted_and_nothing_is_tried_for_a_while(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def full(self: Store, chunk: object) -> None:
        tried.append(chunk)
        raise StoreError(f"{self.root}: No space left on device")

    with serving(model, Store(tmp_path / "store"), settings=settings(1 << 30)) as live:
        monkeypatch.setattr(Store, "put", full)
        for _ in range(4):
            assert "problem" not in ask(live, A, "Why?")["pic"]
            settled(live)
        status = live.backend.status()
        assert (len(tried), status.learned_bytes, status.learning_failures) == (1, 0, 1)
        assert "pic_learning_failures_total 1.0" in live.client.get("/metrics").text
