"""Running queries on the torch engine: prompts, answers, seeds, what fails and what is kept."""

from __future__ import annotations

import asyncio
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from spans.oracle import execute

from pictool.engines.base import Answer, Engine
from pictool.engines.torch import TorchEngine
from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.linker.spec import Spec
from pictool.runtime.model import Model, wrap_model
from pictool.spans import query as nodes
from pictool.spans.dsl import assistant, chat, cross, file, g, monad, par, plus, repeat, retrieve, seq, system, user
from pictool.spans.execute import Executor
from pictool.spans.operators.calls import Call, Generate, Map
from pictool.spans.operators.flow import Ask, Print, Zip
from pictool.spans.operators.joins import Plus
from pictool.spans.optimise import optimise, shape
from pictool.spans.prompt import spans_of
from pictool.spans.query import Options, Query, path_text
from pictool.spans.running import Hooks, QueryBudget, QueryError, Result, RunOptions, node_seed
from pictool.store.store import Store

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FULL, LEGO = make_policy("full"), make_policy("legolink", {"k": 2})
SHORT = RunOptions(FULL, max_new_tokens=5)


def load() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["qwen3"]()), tiny.tokenizer(), "tiny")


@pytest.fixture(scope="module")
def model() -> Model:
    return load()


@pytest.fixture(scope="module")
def chat_model(model: Model) -> Model:
    tokenizer = tiny.tokenizer.__wrapped__()
    tokenizer.chat_template = TEMPLATE
    return wrap_model(model.module, tokenizer, "chatty")


@pytest.fixture
def engine(model: Model, store: Store) -> TorchEngine:
    return TorchEngine(model, store)


@pytest.fixture
def run(engine: Engine) -> Callable[..., Result]:
    def run(query: Query, options: RunOptions = SHORT, **hooks: Any) -> Result:
        return Executor(lambda name: engine, options, Hooks(**hooks)).run(query)

    return run


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text("The harbour was quiet. It holds a festival in the spring.\n")
    (folder / "b.txt").write_text("Nobody knows why. Numbers such as 1,024 stand here too.\n")
    (folder / "c.txt").write_text("Really? she asked. Words, tabs and lines.\n")
    return folder


def g0(*items: Any, **more: Any) -> Generate:
    return g(*items, **{"temperature": 0, **more})


# Prompts


@pytest.mark.parametrize("policy", [FULL, LEGO], ids=["full", "legolink"])
@pytest.mark.parametrize("has_template", [False, True])
def test_a_query_over_files_is_a_link_of_them(
    model: Model, chat_model: Model, store: Store, files: Path, policy: Any, has_template: bool
) -> None:
    engine = TorchEngine(chat_model if has_template else model, store)
    paths = [files / "a.txt", files / "b.txt"]
    answers: list[Answer] = []
    query = g0(system("You judge."), plus(*map(file, paths)), "Who knows?", max_tokens=6)
    Executor(lambda name: engine, RunOptions(policy), Hooks(on_answer=lambda path, answer: answers.append(answer))).run(
        query
    )
    spec = Spec("Who knows?", paths, policy, head="You judge.", max_new_tokens=6)
    linked = engine.answer(spec)
    assert answers[0].link.layout.tokens.tolist() == linked.link.layout.tokens.tolist()
    assert answers[0].link.layout.starts == linked.link.layout.starts
    assert answers[0].generated == linked.generated
    assert answers[0].link.recomputed == linked.link.recomputed


def test_a_chat_is_rendered_as_one_chat(chat_model: Model, store: Store) -> None:
    engine = TorchEngine(chat_model, store)
    texts: list[str] = []

    def keep(path: nodes.Path, answer: Answer) -> None:
        texts.append(str(chat_model.tokenizer.decode(answer.link.layout.tokens.tolist())))

    executor = Executor(lambda name: engine, replace(SHORT, max_new_tokens=1), Hooks(on_answer=keep))
    executor.run(g0(system("S"), "U", assistant("A"), "V"))
    executor.run(g0(system("S"), plus("d1 ", "d2 "), "V", plus("d3 "), assistant("A"), "W", "X"))
    executor.run(g0(system("S"), plus("d1 ", "d2 ")))
    assert texts == [
        "<s>system: S\n<s>user: U\n<s>assistant: A\n<s>user: V\nassistant:",
        "<s>system: S\n<s>user: d1 \n\nd2 \n\nV\n\nd3 \n<s>assistant: A\n<s>user: W\n\nX\nassistant:",
        "<s>system: S\n<s>user: d1 \n\nd2 \nassistant:",
    ]


def test_a_chat_template_that_changes_spans_is_refused(chat_model: Model, store: Store) -> None:
    tokenizer = tiny.tokenizer.__wrapped__()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | replace('\x02', '') }}{% endfor %}"
    engine = TorchEngine(wrap_model(chat_model.module, tokenizer, "odd"), store)
    with pytest.raises(QueryError, match=r"^the query: odd: "):
        Executor(lambda name: engine, SHORT).run(g0(plus("a"), "b"))
    with pytest.raises(QueryError, match="x02"):
        Executor(lambda name: TorchEngine(chat_model, store), SHORT).run(g0(plus("a"), "b\x02"))


def test_spans_are_the_children_of_a_plus() -> None:
    query = seq(system("a"), "b", plus("c", seq("d", assistant("e")), plus("f", par("g", "h"))), seq(), "i", plus(""))
    spans = [("".join(message.text for message in span.messages), span.is_object) for span in spans_of(query)]
    assert spans == [("ab", False), *((text, True) for text in ("c", "de", "f", "g", "h")), ("i", False)]


def test_an_output_is_read_as_it_was_generated(run: Callable[..., Result], model: Model) -> None:
    links: list[Any] = []
    query = g0(system("Judge."), plus(g0("one"), g0("two")), "Which?")
    result = run(query, on_answer=lambda path, answer: links.append(answer.linked))
    first, second, judge = result.done
    assert [path_text(done.path) for done in result.done] == [
        "g.input.cross[1].plus[0]", "g.input.cross[1].plus[1]", "the query",
    ]  # fmt: skip
    layout = links[-1].image.layout
    seam = list(model.encode("\n"))
    spans = [layout.tokens[start:end].tolist() for _, (start, end) in links[-1].documents]
    assert [span[: len(done.tokens)] for span, done in zip(spans, (first, second), strict=True)] == [
        list(first.tokens), list(second.tokens),
    ]  # fmt: skip
    assert all(span[len(done.tokens) :] in (seam, []) for span, done in zip(spans, (first, second), strict=True))
    assert result.text == judge.text.strip()
    assert judge.report()["path"] == "the query" and judge.report()["tokens"]["context"] == layout.num_context


# Answers


def test_every_kind_of_node_runs(run: Callable[..., Result], files: Path) -> None:
    shown: list[str] = []
    query = seq(
        Print("hello"), monad(g0("prepared")), Ask("who?"),
        Zip(user("z"), par("p", "q")), Map(Call("m", 2, 0.0), ("x", "y")), repeat(2, g0("r", max_tokens=2)),
        chat("c", temperature=0, max_tokens=1), file("a.txt"), retrieve("harbour", ".", k=1),
    )  # fmt: skip
    result = run(query, replace(SHORT, base=files), on_print=shown.append, ask=lambda text: f"{text} me")
    assert shown == ["hello"]
    outputs = [done.text for done in result.done]
    assert [path_text(done.path) for done in result.done] == [
        "seq[1].monad", "seq[4].map[0]", "seq[4].map[1]", "seq[5].repeat[0]", "seq[5].repeat[1]", "seq[6]"
    ]  # fmt: skip
    assert outputs[3] == outputs[4] and result.done[4].is_shared
    text = (files / "a.txt").read_text()
    assert result.text == "\n".join(["who? me", "z", "p", "z", "q", *outputs[1:], text, text]).strip()


def test_queries_without_calls_give_what_the_wheel_gives(run: Callable[..., Result]) -> None:
    """The items of what is zipped are messages: the wheel splices some joins in a + that are no items here."""
    rng = random.Random(3)

    def leaf() -> Query:
        return rng.choice([user, system, assistant])(rng.choice(["", *"abcdef"]))

    def query(depth: int) -> Query:
        if depth == 0 or rng.random() < 0.2:
            return leaf()
        join = rng.choice([seq, par, plus, cross])
        below = [query(depth - 1) for _ in range(rng.randint(1, 3))]
        zipped = Zip(below[0], join(*(leaf() for _ in range(rng.randint(0, 3)))))
        return rng.choice([join(*below), join(*below), monad(below[0]), zipped])

    for _ in range(300):
        tree = query(3)
        assert run(tree).text.split() == asyncio.run(execute(tree)).split(), tree


def test_the_same_seed_gives_the_same_tree(run: Callable[..., Result]) -> None:
    query = g(plus(repeat(3, g("candidate", temperature=2.0))), "Which?", temperature=2.0)
    texts = [[done.text for done in run(query, replace(SHORT, seed=seed)).done] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0][:3])) == 3
    assert node_seed(1, ("a",)) != node_seed(1, ("b",)) != node_seed(2, ("b",))


def test_seeds_do_not_depend_on_what_the_optimizer_moves(engine: Engine) -> None:
    """Where it is asked for, children of a + change places; what each draws stays."""
    parts = (
        g("zebra", temperature=2.0),
        repeat(2, g("one", temperature=2.0)),
        Map(Call("m", 5, 2.0), ("x", "y")),
    )
    query = seq(user(""), seq(plus(*parts)))
    exact, other = (Executor(lambda name: engine, replace(SHORT, sorts_plus=flag)) for flag in (True, False))
    trees = [executor.optimise(query).after for executor in (exact, other)]
    assert trees[0] != trees[1]
    drawn = [sorted(done.text for done in executor.run(tree).done) for executor, tree in
             zip((exact, other), trees, strict=True)]  # fmt: skip
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 5


def test_what_is_before_an_item_of_a_zip_is_not_before_nothing(run: Callable[..., Result]) -> None:
    assert run(Zip(user("z"), user(""))).text == run(Zip(user("z"), par(user(""), seq()))).text == ""
    assert run(Zip(user("z"), user("a"))).text == "z\na"


def test_every_judge_of_a_tree_draws_on_its_own_from_the_same_candidates(engine: Engine) -> None:
    query = g(plus("page", repeat(4, g("one", temperature=3.0, max_tokens=6))), "one", temperature=3.0, max_tokens=6)
    flat, tree = (Executor(lambda name: engine, replace(SHORT, arity=arity, policy=FULL)) for arity in (None, 2))
    candidates = [done.text for done in flat.run(flat.optimise(query).after).done][:4]
    done = tree.run(tree.optimise(query).after).done
    assert sorted(each.text for each in done if len(each.spans) == 2) == sorted(candidates)
    judges = [each for each in done if len(each.spans) > 2]
    assert len(judges) == 3 and len({each.text for each in judges}) == 3


def test_equal_calls_at_temperature_0_run_once(run: Callable[..., Result]) -> None:
    answered: list[nodes.Path] = []
    result = run(par(g0("a"), g0("a"), g0(g0("a"))), on_answer=lambda path, answer: answered.append(path))
    assert list(map(path_text, answered)) == ["par[0]", "par[2]"]
    assert [done.is_shared for done in result.done] == [False, True, True, False]


def test_calls_that_are_ready_at_once_reach_the_engine_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    answer_all = engine.answer_all

    def watched(specs: Sequence[Spec]) -> Any:
        batches.append(len(specs))
        return answer_all(specs)

    monkeypatch.setattr(engine, "answer_all", watched)
    inner = repeat(2, g0(plus(g0("a"), g0("b")), "c"))
    query = g0(plus(inner, g0(plus(g0("d"), g0("a")), "e"), g0("f")), seq(g0("g"), g0("h")))
    result = Executor(lambda name: engine, SHORT).run(query)
    assert batches == [5, 3]  # a b d f g; c e h; then one is left, whose text streams
    by_path = {path_text(done.path): done for done in result.done}
    assert sum(done.is_shared for done in result.done) == 2 and len(by_path) == 11
    alone = Executor(lambda name: engine, replace(SHORT, budget=QueryBudget(tokens=999))).run(query)
    assert {path_text(done.path): done.text for done in alone.done} == {path: by_path[path].text for path in by_path}
    assert batches == [5, 3]


@pytest.mark.parametrize("policy", [FULL, LEGO], ids=["full", "legolink"])
def test_one_by_one_a_query_gives_what_it_gives_side_by_side(engine: TorchEngine, policy: Any) -> None:
    events: list[str] = []
    hooks = Hooks(on_done=lambda done: events.append("call"), checkpoint=lambda: events.append("node"))
    options = RunOptions(policy, 3, keeps_outputs=False)
    inner = repeat(2, g(plus(g0("a"), g0("b")), "c", temperature=0.9))
    judged = g0(plus(inner, g0(plus(g0("d"), g0("a")), "e")), seq(g0("g"), g0("h")))
    prepared = seq(monad(plus(g0("the harbour", max_tokens=1), g0("a festival", max_tokens=1))), judged)
    many = [
        par(*(cross("a", plus("b")) for _ in range(30))), Map(Call("m", 1, 0), ("Hi?",) * 40),
        seq(monad(plus(*(g0(f"text {i}", max_tokens=1) for i in range(4)), *["c"] * 30)), repeat(20, g0("b"))),
    ]  # fmt: skip
    rng = random.Random(31)
    for query in (judged, prepared, *many, *(g0(random_query(rng), "Well?", max_tokens=2) for _ in range(6))):
        together = Executor(lambda name: engine, options).run(query)
        events.clear()
        alone = Executor(lambda name: engine, replace(options, side_by_side=False), hooks).run(query)
        assert alone.query == together.query
        assert {done.path: done.text for done in alone.done} == {done.path: done.text for done in together.done}
        assert (events.count("node") > 0) and events.count("call") == len(alone.done)


def test_one_by_one_what_is_below_a_call_is_evaluated_just_before_it(engine: TorchEngine) -> None:
    events: list[str] = []
    hooks = Hooks(on_done=lambda _: events.append("call"), checkpoint=lambda: events.append("node"))
    options = RunOptions(FULL, 1, keeps_outputs=False, side_by_side=False)
    calls = [g0(plus(f"text {i}", "b"), "Well?") for i in range(20)]
    Executor(lambda name: engine, options, hooks).run(par(*calls))
    nodes_before = [len(run.split()) for run in " ".join(events).split("call")][:-1]
    each = sum(1 for _ in nodes.nodes(calls[0])) + 1  # and the call itself, once it is ready
    assert nodes_before == [each + 1, *[each] * 19]  # the par


def test_what_a_checkpoint_raises_ends_a_query(engine: TorchEngine) -> None:
    count = 0

    def checkpoint() -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt

    options = RunOptions(FULL, 1, keeps_outputs=False, side_by_side=False)
    with pytest.raises(KeyboardInterrupt):
        Executor(lambda name: engine, options, Hooks(checkpoint=checkpoint)).run(par(*["a"] * 20))
    assert count == 5


def test_one_by_one_a_call_that_fails_ends_the_query(engine: TorchEngine) -> None:
    executor = Executor(lambda name: engine, RunOptions(FULL, 2, keeps_outputs=False, side_by_side=False))
    with pytest.raises(QueryError, match=r"^par\[1\]: ") as error:
        executor.run(par(g0("a"), g0("word " * 600), g0("b")))
    assert len(error.value.done) == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_calls_that_are_ready_at_once_link_from_one_plan(model: Model, store: Store, files: Path, keeps: bool) -> None:
    options = replace(SHORT, policy=LEGO, base=files, keeps_outputs=keeps)
    pages = [file("a.txt"), file("b.txt"), file("c.txt")]
    calls = [g0(plus(*pages[at:], *pages[:at]), f"what {at}?") for at in range(3)]
    query = g0(plus(par(*calls), seq(*calls[:2])), g0(plus(*pages), "why?"), "who?")

    def answers(pool_bytes: int) -> Result:
        engine = TorchEngine(model, store, pool_bytes)
        return Executor(lambda name: engine, options).run(query)

    plain, pooled = answers(0), answers(1 << 22)
    assert [(done.path, done.tokens, done.object) for done in pooled.done] == [
        (done.path, done.tokens, done.object) for done in plain.done
    ]
    uses = [done.own["pool"] for done in pooled.done if not done.is_shared]
    assert [use["requests"] for use in uses] == [3, 3, 3, 1, 1] and all("pool" not in done.own for done in plain.done)
    assert uses[0]["loaded"] and all(use["shared"] and not use["loaded"] for use in uses[1:3])
    assert uses[3]["stayed"] == uses[0]["loaded"]  # it reads what the first one reads


@pytest.mark.parametrize("keeps", [True, False])
def test_nobody_holds_an_image_when_the_next_call_links(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """So that its room in a pool is there again."""
    images: list[weakref.ref[Any]] = []
    link = engine.link

    def watched(spec: Spec, **more: Any) -> Any:
        assert not any(image() for image in images)
        result = link(spec, **more)
        assert result.linked is not None
        images.append(weakref.ref(result.linked.image))
        return result

    monkeypatch.setattr(engine, "link", watched)
    options = replace(SHORT, policy=LEGO, keeps_outputs=keeps)
    Executor(lambda name: engine, options).run(par(*(g0(plus(text), "Well?") for text in ("a", "b", "c"))))
    assert len(images) == 3


def test_queries_of_a_bulk_reach_the_engine_together_and_fail_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    link_all = engine.link_all

    def watched(specs: Sequence[Spec]) -> Any:
        batches.append(len(specs))
        return link_all(specs)

    monkeypatch.setattr(engine, "link_all", watched)
    queries = [
        g0(plus(g0("a"), g0("b")), "c"),
        par(g0("d"), g0("word " * 999), g0("never")),
        g0(plus(g0("a")), "e", temperature=0.9),
    ]
    ended: list[int] = []
    executor = Executor(lambda name: engine, replace(SHORT, policy=LEGO))
    outcomes = executor.run_all(queries, lambda index, _: ended.append(index))
    assert batches == [6, 2] and ended == [1, 0, 2]
    failed = outcomes[1]
    assert isinstance(failed, QueryError) and str(failed).startswith("par[1]: the prompt has") and len(failed.done) == 1
    for index in (0, 2):
        outcome, alone = outcomes[index], executor.run(queries[index])
        assert isinstance(outcome, Result) and outcome.text == alone.text
        assert [done.tokens for done in outcome.done] == [done.tokens for done in alone.done]


def test_the_deepest_tree_runs(run: Callable[..., Result]) -> None:
    query: Query = user("a")
    while query.depth < nodes.MAX_DEPTH - 1:
        query = g0(query, max_tokens=1)
    assert len(run(query).done) > 40


def test_a_retrieval_is_prepared_before_the_call(engine: Engine, files: Path) -> None:
    executor = Executor(lambda name: engine, RunOptions(LEGO, 3, base=files))
    query = chat(retrieve("Who asked?", ".", k=2), "Who asked?", temperature=0)
    optimised = executor.optimise(query)
    assert shape(optimised.after) == "G(⋈(M(+(G¹(F), G¹(F))), +(F, F), U))"
    result = executor.run(optimised.after)
    assert len(result.done) == 1 and len(result.done[0].spans) == 5  # with the separator
    documents = [files / name for name in ("c.txt", "a.txt")]
    want = engine.answer(Spec("Who asked?", documents, LEGO, max_new_tokens=3))
    got = Executor(lambda name: engine, RunOptions(LEGO, 3, base=files)).run(query)
    assert result.text == got.text
    assert want.link.layout.num_tokens == result.done[0].own["tokens"]["prompt"]


def test_fragments_are_prepared_together(engine: Engine, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[list[str]] = []
    compile_chunks = engine.compile

    def compile(chunks: Any, options: Any) -> Any:
        compiled.append([chunk.text for chunk in chunks])
        return compile_chunks(chunks, options)

    monkeypatch.setattr(engine, "compile", compile)
    query = chat(retrieve("q", ".", k=3), "q", temperature=0)
    for policy in (LEGO, FULL):
        executor = Executor(lambda name: engine, RunOptions(policy, 1, base=files))
        executor.run(executor.optimise(query).after)
    (texts,) = compiled
    assert sorted(texts) == sorted(path.read_text() for path in files.iterdir())


def random_query(rng: random.Random, depth: int = 2) -> Query:
    """Calls at temperature 0 over joins of short messages."""
    join = rng.choice([seq, par, cross, plus, plus])
    below = [
        random_query(rng, depth - 1)
        if depth and rng.random() < 0.5
        else rng.choice([user, system, assistant])(rng.choice(["one two", "the harbour", "a", "", "festival"]))
        for _ in range(rng.randint(1, 3))
    ]
    inner = join(*below)
    return chat(inner, "Who?", temperature=0, max_tokens=2) if rng.random() < 0.5 else inner


def test_optimising_changes_no_answer_where_nothing_commutes(run: Callable[..., Result]) -> None:
    rng, fired = random.Random(11), 0
    for _ in range(25):
        query = g0(random_query(rng), "Well?", max_tokens=2)
        optimised = optimise(query)
        fired += len(optimised.steps)
        assert run(optimised.after).text == run(query).text
    assert fired > 25


def test_an_optimised_query_is_one_of_the_permutations_where_something_does(run: Callable[..., Result]) -> None:
    parts = (user("zebra "), g0("candidate"), user("the harbour "))
    optimised = optimise(g0(plus(*parts), "Which?"), Options(sorts_plus=True))
    assert [step.rule for step in optimised.steps] == ["order +"]
    answers = {order: run(g0(plus(*order), "Which?")).text for order in itertools.permutations(parts)}
    assert len(set(answers.values())) > 1
    assert run(optimised.after).text == answers[optimised.after.children[0].children[0].children]  # type: ignore[index]


def orders(query: Query) -> list[Query]:
    """The query with the children of every + in every order."""
    below = [orders(child) for child in query.children]
    chosen = [query.with_children(children) for children in itertools.product(*below)]
    if not isinstance(query, Plus):
        return chosen
    return [each.with_children(order) for each in chosen for order in itertools.permutations(each.children)]


def test_random_queries_answer_as_one_of_their_permutations(run: Callable[..., Result]) -> None:
    """Under an exact policy; wherever nothing was reordered, as the query that was written."""
    rng, reordered, moved = random.Random(23), 0, 0
    while reordered < 12:
        query = g0(random_query(rng, 1), "Well?", max_tokens=2)
        variants = orders(query)
        if len(variants) > 24:
            continue
        optimised = optimise(query, Options(sorts_plus=True))
        answer = run(optimised.after).text
        if "order +" not in {step.rule for step in optimised.steps}:
            assert answer == run(query).text
            continue
        reordered += 1
        moved += answer != run(query).text
        assert answer in {run(variant).text for variant in variants}
    assert moved


@pytest.mark.parametrize("policy", [make_policy("legolink", {"k": 999}), make_policy("cacheblend", {"ratio": 1.0})])
def test_a_policy_that_recomputes_all_answers_as_full(run: Callable[..., Result], policy: Any) -> None:
    query = g0(plus(g0("one two"), g0("three"), "the harbour "), "Which?")
    everything = replace(SHORT, policy=policy)
    assert [done.text for done in run(query, everything).done] == [done.text for done in run(query).done]


@pytest.mark.parametrize("architecture", ["qwen3_5", "bamba"])
def test_a_hybrid_answers_as_any_model(architecture: str, store: Store, files: Path) -> None:
    """Its states are those of whole chunks, and outputs are linked as texts; with all rows computed it is full."""
    hybrid = wrap_model(tiny.random_module(tiny.CONFIGS[architecture]()), tiny.tokenizer(), architecture)
    engine, query = TorchEngine(hybrid, store), g0(plus(g0("one two"), file("a.txt"), file("b.txt")), "Which?")
    texts: list[list[str]] = []
    computed: list[float] = []
    for policy in (FULL, make_policy("legolink", {"k": 999}), make_policy("legolink", {"k": 4})):
        hooks = Hooks(on_answer=lambda path, answer: computed.append(answer.link.recomputed))
        options = RunOptions(policy, max_new_tokens=5, base=files)
        texts.append([done.text for done in Executor(lambda name: engine, options, hooks).run(query).done])
    full, everything, few = computed[1::2]  # of the outer call; the inner one has no documents
    assert texts[0] == texts[1] and few < everything <= full


# What fails


@pytest.mark.parametrize(
    ("query", "problem", "done"),
    [
        (par(g0("a"), g0(plus(file("no.txt")), "b")), "par[1].g.input.cross[0].plus[0]: no.txt: cannot be read", 1),
        (par(g0("a"), g0(monad("b"))), "par[1]: the input is empty", 1),
        (g0(repeat(2, g0("word " * 600))), "g.input.repeat[0]: the prompt has", 0),
        (
            g0("a", retrieve(Ask("?"), "nowhere")),
            "g.input.cross[1].retrieve.query: asks '?'",
            0,
        ),
        (g0("a", model="other"), "the query: model 'other' is not served", 0),
        (monad(plus(g0(file("no.txt"), max_tokens=1))), "monad.plus[0].g.input: no.txt: cannot be read", 0),
    ],
)
def test_a_node_that_fails_names_its_path_and_keeps_what_was_done(
    engine: Engine, query: Query, problem: str, done: int
) -> None:
    def engine_of(name: str) -> Engine:
        if name == "other":
            raise InputError("model 'other' is not served")
        return engine

    with pytest.raises(QueryError) as error:
        Executor(engine_of, RunOptions(LEGO, 2)).run(query)
    assert str(error.value).startswith(problem) and len(error.value.done) == done


def test_budgets_of_tokens_and_time(run: Callable[..., Result]) -> None:
    query = par(g0("a", max_tokens=4), g0("b", max_tokens=4), g0("c"))
    with pytest.raises(QueryError, match=r"^par\[2\]: .* 6 ") as error:
        run(query, replace(SHORT, budget=QueryBudget(tokens=6)))
    assert [len(done.tokens) for done in error.value.done] == [4, 2]
    with pytest.raises(QueryError, match=r"^par\[0\]: .* 0 s "):
        run(query, replace(SHORT, budget=QueryBudget(seconds=0)))


@pytest.mark.parametrize("side_by_side", [True, False])
def test_a_call_ends_at_its_own_stop_texts_and_samples_by_its_own_top_p(
    run: Callable[..., Result], side_by_side: bool
) -> None:
    options = replace(SHORT, side_by_side=side_by_side, top_p=1e-6)
    (whole,) = run(par(g0("a", max_tokens=8)), options).done
    stop = whole.text[len(whole.text) // 2]
    plain, ended, likeliest, free = run(
        par(g0("a", max_tokens=8), g0("a", max_tokens=8, stop=(stop,)), g("a", temperature=50, max_tokens=8),
            g("a", temperature=50, max_tokens=8, top_p=1)), options,
    ).done  # fmt: skip
    assert (plain.text, likeliest.text) == (whole.text, whole.text)
    assert ended.text == whole.text.partition(stop)[0]
    assert free.text != whole.text


def test_the_text_of_a_query_of_one_call_streams(run: Callable[..., Result]) -> None:
    pieces: list[str] = []
    result = run(g0(plus(g0("inner")), "outer"), on_text=pieces.append)
    assert "".join(pieces).strip() == result.text
