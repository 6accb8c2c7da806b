"""`--remote` of compile, link and eval; `pic store push` and `pull`; what of it the environment and pic.yaml say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import Server, serving

from commands.run import Outcome, flip, pic, without_timing, write
from pictool.errors import RemoteError
from pictool.store.remote.remote import Retry
from pictool.store.store import Store

LINK = ("link", "a.txt", "b.txt", "-q", "Who knows why?", "--algo", "naive", "--max-new-tokens", 4)
Texts = tuple[Path, Path]


@pytest.fixture
def far(model: Path, texts: Texts) -> Store:
    """A store with all that a link of the two texts needs."""
    assert pic(*LINK, "-m", model, "--store", "far").code == 0
    return Store("far")


@pytest.fixture
def server(far: Store) -> Iterator[Server]:
    with serving(far.root.absolute()) as server:
        yield server


def link(model: Path, *more: object) -> Outcome:
    return pic(*LINK, "-m", model, "--store", "near", *more)


def answer(outcome: Outcome) -> dict[str, Any]:
    return without_timing(outcome.json)


def test_link_asks_the_remote_and_keeps_what_it_gives(model: Path, far: Store, server: Server) -> None:
    expected = answer(pic(*LINK, "-m", model, "--store", "far", "--json"))
    first = link(model, "--remote", server.url, "--json")
    assert answer(first) == expected and "compiled" not in first.err
    assert Store("near").keys() == far.keys()
    asked = len(server.asked)
    assert answer(link(model, "--remote", server.url, "--json")) == expected and len(server.asked) == asked


def test_environment_and_settings_name_a_remote(
    model: Path, far: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("pic.yaml", f"remote: {server.url}\nmemory: 1M\n")
    assert "compiled" not in link(model).err and server.asked
    monkeypatch.setenv("PIC_REMOTE", "memory://empty")
    assert "compiled first: a.txt" in pic(*LINK, "-m", model, "--store", "other").err
    asked = len(server.asked)
    assert "compiled first: a.txt" in pic(*LINK, "-m", model, "--store", "third", "--remote", "").err
    assert len(server.asked) == asked


def test_host_memory_is_given_as_a_size(model: Path, texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIC_MEMORY", "much")
    outcome = link(model)
    assert outcome.code == 1 and outcome.err.startswith(
        "pic: error: PIC_MEMORY: memory 'much': must be a size such as "
    )


def test_compile_takes_what_the_remote_has(model: Path, far: Store, server: Server) -> None:
    outcome = pic("compile", "a.txt", "-m", model, "--store", "near", "--remote", server.url, "-o", "a.kvo")
    assert outcome.code == 0 and outcome.err == "pic: 1 chunk, 0 compiled, 1 already in the store\n"
    (key,) = Store("near").keys()
    assert Path("a.kvo").read_bytes() == far.path(key).read_bytes()


def test_a_link_goes_on_without_a_remote_that_is_damaged_or_away(model: Path, far: Store, server: Server) -> None:
    expected = answer(pic(*LINK, "-m", model, "--store", "far", "--json"))
    for key in far.keys():
        flip(far.path(key))
    outcome = link(model, "--remote", server.url, "--json")
    assert answer(outcome) == expected
    lines = [line for line in outcome.err.splitlines() if "does not match its checksum" in line]
    assert lines and all(line.startswith(f"pic: {server.url}/objects/") for line in lines)
    outcome = pic(*LINK, "-m", model, "--store", "other", "--remote", "http://127.0.0.1:1", "--json")
    assert answer(outcome) == expected and "http://127.0.0.1:1/objects/" in outcome.err


def test_a_key_that_the_remote_does_not_give_fails(model: Path, far: Store, server: Server) -> None:
    key = far.keys()[0]
    flip(far.path(key))
    outcome = pic("link", key, "-q", "Why?", "-m", model, "--store", "near", "--remote", server.url)
    assert outcome.code == 1 and outcome.err.startswith(f"pic: error: {server.url}/objects/{key[:2]}/{key}.kvo: ")
    assert outcome.err.count("\n") == 1
    outcome = pic("link", "c" * 64, "-q", "Why?", "-m", model, "--store", "near", "--remote", server.url)
    assert outcome.code == 1 and "no object with this key and salt in the store near" in outcome.err


def test_a_key_comes_from_the_remote(model: Path, far: Store, server: Server) -> None:
    keys = [key for key in far.keys() if "<s>" not in far.peek(key).text()]  # without the head, which is no document
    assert len(keys) == len(far.keys()) - 1 == 2
    outcome = pic("link", *keys, "-q", "Why?", "-m", model, "--store", "near", "--remote", server.url)
    assert outcome.code == 0 and set(keys) <= set(Store("near").keys())


def test_eval_takes_the_objects_of_evaluations_from_the_remote(model: Path, far: Store) -> None:
    record = '{"query": "Who?", "documents": ["a.txt"], "answers": ["nobody"]}\n'
    command = ("eval", write("q.jsonl", record), "-m", model, "--algo", "naive", "--max-new-tokens", 2)
    assert pic(*command, "--store", "far").code == 0
    with serving(Path("far").absolute()) as server:
        outcome = pic(*command, "--store", "near", "--remote", server.url)
        assert outcome.code == 0, outcome.err
    (made,), (there,) = Path("near/eval").glob("????????"), Path("far/eval").glob("????????")
    assert Store(made).keys() == Store(there).keys() == sorted({key for key, _ in server.asked})


def test_push_then_pull(model: Path, far: Store) -> None:
    keys = far.keys()
    done = pic("store", "push", keys[0][:12], "--store", "far", "--remote", "shared", "--json").json
    assert done["keys"] == [keys[0]] and done["present"] == []
    outcome = pic("store", "push", "all", "--store", "far", "--remote", "shared")
    assert outcome.code == 0 and outcome.err.startswith(f"pic: {len(keys) - 1} objects sent (")
    assert "2 objects sent" in outcome.err and ", 1 " in outcome.err
    outcome = pic("store", "pull", *keys, "--store", "near", "--remote", "shared")
    assert outcome.code == 0 and Store("near").keys() == keys


def test_push_all_leaves_prefix_chains_out(model: Path, far: Store) -> None:
    keys = far.keys()
    write("c.txt", "Something that begins another prompt.")
    named = ("-m", model, "--algo", "prefix:block=4", "--max-new-tokens", 1, "--store", "far")
    assert pic("link", "c.txt", "-q", "Why?", *named).code == 0 and len(far.keys()) > len(keys)
    assert pic("store", "push", "all", "--store", "far", "--remote", "other", "--json").json["keys"] == keys


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("push", "all"), "--remote, PIC_REMOTE, or remote in pic.yaml"),
        (("pull", "c" * 64, "--remote", "adl://x"), "pip install adlfs"),
        (("push", "all", "--remote", "nope://x"), "remote nope://x: "),
        (("push", "all", "--remote", "http://127.0.0.1:1"), "http://127.0.0.1:1: "),
        (("pull", "abcd", "--remote", "shared"), "abcd: "),
        (("pull", "c" * 64, "--remote", "shared"), f"{'c' * 64}.kvo: "),
    ],
)
def test_what_cannot_be_done_says_so(arguments: tuple[str, ...], message: str, far: Store) -> None:
    outcome = pic("store", *arguments, "--store", "far")
    assert outcome.code == 1 and message in outcome.err and outcome.err.count("\n") == 1


def test_an_interrupted_command_gives_up_fetching(
    model: Path, far: Store, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own store fetches nothing any more; that of the next command does."""
    keys, stores = far.keys(), list[Store]()

    def interrupted(store: Store, keys: list[str], advance: object) -> None:
        store.prefetch(keys)
        stores.append(store)
        raise KeyboardInterrupt

    server.always = "503"
    with monkeypatch.context() as patch:
        patch.setattr("pictool.store.remote.transfer.pull", interrupted)
        outcome = pic("store", "pull", *keys, "--store", "near", "--remote", server.url)
    assert (outcome.code, outcome.err) == (130, "pic: interrupted\n")
    stores[0].drain()
    asked, server.always = len(server.asked), ""
    with pytest.raises(RemoteError, match=keys[0]):
        stores[0].fetch(keys[0])
    assert len(server.asked) == asked < len(keys) * Retry().attempts and Store("near").keys() == []
    outcome = pic("store", "pull", *keys, "--store", "near", "--remote", server.url)
    assert outcome.code == 0 and Store("near").keys() == keys


def test_a_link_that_fails_leaves_nothing_of_what_was_fetched_for_it(model: Path, far: Store, server: Server) -> None:
    first, *others = far.keys()
    flip(far.path(first))
    outcome = pic("link", first, *others, "-q", "Why?", "-m", model, "--store", "near", "--remote", server.url)
    assert outcome.code == 1 and list(Path("near/tmp").iterdir()) == []
