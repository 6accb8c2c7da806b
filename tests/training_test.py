"""Training is made of the same pieces on any machine: a run that stops and goes on is the run that never stopped."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.questions.picbench import Picbench
from benchmarks.questions.tasks import TASKS, Draw
from pictool import Store
from pictool.eval.cases import SpecOptions, group_cases
from pictool.eval.evaluate import evaluate
from pictool.eval.policies import parse_policies
from pictool.runtime.model import embedded_path, load_model
from training.data import PADDING, Encoder
from training.judge import CYCLE, DECLINED, DIRECTORY, JudgeEncoder, JudgeRun, draw
from training.judge import RECIPE as JUDGE
from training.muon import orthogonalise
from training.network import Size, forward
from training.picbench import PicbenchEncoder, write
from training.picbench_recipe import DIRECTORY as PICBENCH_MODELS
from training.picbench_recipe import RECIPE as PICBENCH
from training.picbench_recipe import PicbenchRun
from training.recipe import RECIPES
from training.tokenizer import byte_level, metaspace, words
from training.train import Recipe, Run, Stage
from training.world.generate import PageShape
from training.zoo import MEMBERS, MODELS, ZOO

RECIPE = Recipe(
    "test", Size(layers=3, hidden=16, heads=2, ffn=16, vocab=1416, head_dim=8), seed=1, steps=3, cooldown=2,
    stages=(Stage(0, pages=(4, 5), filler=1, restated=0.5),), batch_tokens=600, hint_until=3, warmup=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(byte_level(1416))


def test_a_continued_run_is_the_same_run(encoder: Encoder, tmp_path: Path) -> None:
    whole, first, second = (Run(RECIPE, encoder) for _ in range(3))
    for _ in range(5):
        whole.advance()
    for _ in range(2):
        first.advance()
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    for _ in range(3):
        second.advance()
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_question_sees_the_pages_and_itself(encoder: Encoder) -> None:
    """Changing one question changes no logits but its own; changing a page changes those of all."""
    run = Run(RECIPE, encoder)
    batch = run.batch()
    everywhere = torch.ones(batch.tokens[:, 1:].shape, dtype=torch.bool)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return forward(run.model, batch, everywhere)[0].view(*everywhere.shape, -1)

    before = logits()
    first = int((batch.blocks[0] == 2).nonzero()[0])
    batch.tokens[0, first] = 99
    changed = (logits() - before).abs().amax(-1)[0] > 1e-6
    assert set(batch.blocks[0, :-1][changed].tolist()) == {2}
    batch.tokens[0, 3] = 99
    changed = (logits() - before).abs().amax(-1)[0] > 1e-6
    assert set(batch.blocks[0, batch.num_docs : -1].tolist()) - {-1} <= set(batch.blocks[0, :-1][changed].tolist())


def test_hints_point_at_values_and_subjects(encoder: Encoder) -> None:
    batch = Run(RECIPE, encoder).batch()
    assert len(batch.sources) > 5 and len(batch.subjects) > 5 and len(batch.asked) > 5
    for row, at, source in batch.sources.tolist():
        assert batch.tokens[row, at + 1] == batch.tokens[row, source]
    for _, value, subject in batch.subjects.tolist():
        assert subject < value < batch.num_docs
    named = set(batch.tokens[batch.subjects[:, 0], batch.subjects[:, 2]].tolist())
    for row, at, subject in batch.asked.tolist():
        assert batch.blocks[row, at] == batch.blocks[row, subject] > 0 and batch.kinds[row, at] == -1
        assert batch.kinds[row, at + 1] >= 0 and int(batch.tokens[row, subject]) in named


def test_muon_updates_are_near_orthogonal() -> None:
    update = orthogonalise(torch.randn(3, 16, 40))
    singular = torch.linalg.svdvals(update)
    assert singular.min() > 0.5 and singular.max() < 1.3


@pytest.mark.parametrize(("name", "make"), [("embedded", byte_level), ("embedded-small", metaspace)])
def test_the_packaged_tokenizers_are_those_of_the_recipe(name: str, make: object) -> None:
    recipe = RECIPES[embedded_path(name).name]
    fresh = make(recipe.size.vocab)  # type: ignore[operator]
    assert fresh.get_vocab() == load_model(name).tokenizer.get_vocab()


@pytest.mark.parametrize("make", [byte_level, metaspace])
def test_any_text_survives_the_tokenizers(make: object) -> None:
    tokenizer = make(1536)  # type: ignore[operator]
    for text in ("Question: Who?\nAnswer:", " naïve 東京 🙂  two\tthree\n\n", "a" * 50):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize("task", sorted(set(CYCLE)))
def test_a_judge_declines_what_the_pages_do_not_say(task: str) -> None:
    encoder = JudgeEncoder()
    encoder.task = task
    declined = 0
    for seed in range(20):
        prompt = encoder.write(random.Random(seed), 3, PageShape(max_filler_sentences=2))
        for question in prompt.questions:
            if question.kind == "absent":
                told = [
                    fact
                    for fact in prompt.facts
                    if fact.attribute.question.format(s=fact.subject) in question.text.lower()
                ]
                assert question.answer == DECLINED and not told
            if question.kind == "judged":
                lines = {page.strip() for page in prompt.pages}
                assert question.answer == DECLINED if lines == {DECLINED} else {question.answer} == lines - {DECLINED}
            declined += question.answer == DECLINED
    assert declined or task == "candidates beside pages"
    batch = draw(encoder, random.Random(1), JUDGE)
    kinds = {encoder.kinds[kind] for kind in batch.kinds[batch.kinds >= 0].tolist()}
    assert kinds & {"absent", "judged"} or task == "candidates beside pages"


def test_a_judge_begins_where_the_embedded_model_is() -> None:
    run, base = JudgeRun(JUDGE, JudgeEncoder()), load_model("embedded", device="cpu")
    for own, embedded in zip(run.model.parameters(), base.module.parameters(), strict=True):
        assert torch.equal(own, embedded)


def test_the_judge_is_in_half_precision_and_declines() -> None:
    judge = load_model(str(DIRECTORY), device="cpu")
    assert judge.dtype == "float32" and sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 4e6
    scores = json.loads((DIRECTORY / "scores.json").read_text())["held-out, full"]
    assert scores["haystack"]["absent"] > 0.9 and scores["pages"]["local"] > 0.9


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3", "gemma3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_training_attends_as_the_model_does(architecture: str, encoder: Encoder) -> None:
    """Documents and the longest question, in the layout of a batch, against transformers' own forward."""
    size = Size(3, 16, 4, 16, 1416, 8, kv_heads=2, architecture=architecture, window=12, local=(0, 2), rotary=0.5)
    if architecture == "deepseek_v3":
        size = replace(size, kv_heads=0, latent=12)
    if architecture in ("qwen3_moe", "gpt_oss"):
        size = replace(size, experts=4)
    run = Run(replace(RECIPE, size=size), encoder)
    batch = run.batch()
    longest = max(range(1, int(batch.blocks[0].max()) + 1), key=lambda block: int((batch.blocks[0] == block).sum()))
    own = (batch.blocks[0] == 0) | (batch.blocks[0] == longest)
    everywhere = torch.ones(batch.tokens[:, 1:].shape, dtype=torch.bool)
    with torch.no_grad():
        ours = forward(run.model, batch, everywhere)[0].view(*everywhere.shape, -1)[0][own[:-1]]
        run.model.config._attn_implementation = "eager"
        wanted = run.model(input_ids=batch.tokens[:1, own], position_ids=batch.positions[:1, own]).logits[0]
    assert int((batch.blocks[0] == longest).sum()) > 8
    torch.testing.assert_close(ours, wanted[: len(ours)], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("architecture", "linear"), [("qwen3_5_text", (0, 1)), ("bamba", (0, 2))])
def test_every_question_reads_the_states_of_its_documents(
    architecture: str, linear: tuple[int, ...], encoder: Encoder
) -> None:
    """Logits of every question of every row, padded rows among them, against transformers' own forward of it alone."""
    size = Size(4, 16, 4, 16, 1416, 8, architecture=architecture, linear=linear, state=8)
    run = Run(replace(RECIPE, size=size, batch_tokens=1200, source_layer=3, hint_asked=True), encoder)
    batch = run.batch()
    _, hints = forward(run.model, batch, batch.kinds[:, 1:] >= 0, run.recipe.hints(batch))
    assert len(hints) == (3 if 1 in linear else 4)  # of a layer with a state one, of attention one per head
    assert (batch.blocks[:, : batch.num_docs] == PADDING).any() and len(batch.blocks) > 1
    everywhere = torch.ones(batch.tokens[:, 1:].shape, dtype=torch.bool)
    with torch.no_grad():
        ours = forward(run.model, batch, everywhere)[0].view(*everywhere.shape, -1)
        run.model.config._attn_implementation = "eager"
        for row, blocks in enumerate(batch.blocks):
            for question in range(1, int(blocks.max()) + 1):
                own = (blocks == 0) | (blocks == question)
                wanted = run.model(input_ids=batch.tokens[row : row + 1, own]).logits[0]
                got = ours[row][own[:-1]]
                torch.testing.assert_close(got, wanted[: len(got)], rtol=1e-3, atol=1e-4)


def test_the_zoo_differs_in_what_could_matter() -> None:
    sizes = [member.size for member in ZOO.values()]
    assert len(ZOO) >= 8
    assert {size.architecture for size in sizes} == {"llama", "qwen3", "gemma3", "phi3"}
    assert {size.bos for size in sizes} == {True, False} and len({size.layers for size in sizes}) >= 5
    assert len({id(member.world) for member in ZOO.values()}) >= 5
    assert len({member.seed for member in ZOO.values()}) == len(ZOO)


@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
def test_a_model_of_the_zoo_is_one_of_its_recipe(name: str) -> None:
    model, member = load_model(str(MODELS / name), device="cpu"), MEMBERS[name]
    assert (model.dtype, model.bos_id is not None) == ("float32", member.size.bos)
    assert model.geometry.layers == member.size.layers - len(member.size.linear)
    # Names are few tokens, so that what a fact depends on is what the study measures, and not spelling.
    assert all(len(model.encode(f" {word}")) <= 3 for word in words(member.world))
    assert sum(path.stat().st_size for path in (MODELS / name).iterdir()) < 3e6


def test_all_models_beside_the_package_are_small() -> None:
    assert sum(path.stat().st_size for path in MODELS.glob("*/*")) < 15e6


@pytest.mark.parametrize("task", TASKS)
def test_a_training_prompt_is_that_of_the_case(task: str) -> None:
    """The tokens of documents, question and answer, of a case of one seed as `pic eval` and as training has it."""
    encoder, model = PicbenchEncoder(), load_model(str(PICBENCH_MODELS / PICBENCH.name), device="cpu")
    assert encoder.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    dataset = Picbench(seed=5, tasks=(task,), documents=(4,), words=(50,), cases_each=1)
    group = group_cases(model, dataset.cases(), SpecOptions()).groups[0]
    prepared = group.cases[0]
    prompt = write(Draw(f"picbench-{task}-4x50-5-0"), [task], 4, 50)
    (drafted,) = (question for question in prompt.questions if question.is_drafted)
    assert drafted.answer in prepared.case.answers
    batch = encoder.lay_out([replace(prompt, questions=(drafted,))], [True])
    documents = [token for chunk in group.chunks for token in chunk.tokens]
    asked = [*model.encode(prepared.frame.head), *documents, *model.encode(prepared.frame.tail)]
    answer = model.encode(f" {drafted.answer}")
    assert batch.tokens[0].tolist() == [*asked, *answer, model.tokenizer.eos_token_id]
    assert (batch.kinds[0] >= 0).nonzero().flatten().tolist() == list(range(len(asked), batch.tokens.shape[1]))


def test_hints_point_at_what_picbench_s_answers_say() -> None:
    batch = PicbenchRun(replace(PICBENCH, size=replace(PICBENCH.size, hidden=16, ffn=16)), PicbenchEncoder()).batch()
    assert min(map(len, (batch.sources, batch.subjects, batch.asked, batch.bridges))) > 5
    for row, at, source in batch.sources.tolist():
        assert batch.tokens[row, at + 1] == batch.tokens[row, source] and batch.blocks[row, source] == 0
    assert (batch.subjects[:, 2] < batch.subjects[:, 1]).all()
    for row, at, subject in batch.asked.tolist():
        assert batch.blocks[row, at] == batch.blocks[row, subject] > 0 and subject < at


@pytest.mark.parametrize("directory", sorted(PICBENCH_MODELS.iterdir()), ids=lambda directory: directory.name)
def test_a_model_for_picbench_answers_its_best_task(directory: Path, tmp_path: Path) -> None:
    model = load_model(str(directory), device="cpu")
    scores = json.loads((directory / "scores.json").read_text())["held-out, full"]
    best = max(scores, key=lambda task: float(scores[task]))
    dataset = Picbench(seed=3, tasks=(best,), documents=(4,), words=(50,), cases_each=10)
    done = evaluate(model, Store(tmp_path / "store"), dataset, parse_policies([]))
    assert sum(result.scores[result.metric] for result in done.results) >= 0.8 * len(done.results)
    assert sum(path.stat().st_size for path in directory.iterdir()) < 4e6
