from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import small_tokenizers
import tiny
import torch
from alone import link
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pictool.core import Sampling
from pictool.errors import InputError
from pictool.linker.policies import make_policy
from pictool.runtime.decode import Generated, TextStream, _Chooser, generate
from pictool.runtime.memory.image import Image
from pictool.runtime.model import Model, wrap_model
from pictool.store.store import Store


@pytest.fixture(scope="module")
def model() -> Model:
    return wrap_model(tiny.random_module(tiny.CONFIGS["llama"]()), tiny.tokenizer())


def linked(model: Model, store: Store) -> Image:
    return link(model, store, [], "nobody knows why", make_policy("full", {}), head="<s>").image


def answer(model: Model, store: Store, sampling: Sampling, count: int = 40) -> Generated:
    return generate(model, linked(model, store), count, sampling)


def test_the_image_grows_past_its_first_buffers(model: Model, store: Store) -> None:
    """400 tokens, past two growth steps, against transformers' own greedy decoding."""
    import reference

    image = linked(model, store)
    ids = torch.tensor(image.layout.tokens.astype("int64"))[None]
    module = reference.eager(tiny.random_module(tiny.CONFIGS["llama"]()))
    module.generation_config.eos_token_id = None
    expected = module.generate(ids, max_new_tokens=400, do_sample=False)[0, ids.shape[1] :].tolist()
    tokens = list(generate(model, image, 400).tokens)
    assert tokens == expected[: len(tokens)]
    assert len(tokens) == 400 or tokens[-1] in model.eos_ids
    assert len(tokens) > 300


def test_log_probabilities_are_those_of_transformers(model: Model, store: Store) -> None:
    """Teacher-forced, by the library's own forward and log-softmax."""
    import reference

    image = linked(model, store)
    ids = image.layout.tokens.tolist()
    done = generate(model, image, 12, Sampling(temperature=1.5, seed=3))
    with torch.inference_mode():
        logits = reference.eager(tiny.random_module(tiny.CONFIGS["llama"]()))(
            torch.tensor([[*ids, *done.tokens]])
        ).logits
    expected = logits[0, len(ids) - 1 : -1].log_softmax(-1)[torch.arange(len(done.tokens)), list(done.tokens)]
    torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("frequency", "presence", "biases"),
    [(0.0, 0.0, ((7, 100.0), (9, -100.0))), (1.5, 0.0, ()), (0.0, 2.0, ()), (-0.4, 1.1, ((5, 4.0), (80, -1.5)))],
)
def test_penalties_and_biases_are_those_of_openai_s_reference(
    model: Model, store: Store, frequency: float, presence: float, biases: tuple[tuple[int, float], ...]
) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, and the bias, over the library's own forward."""
    import reference

    image = linked(model, store)
    ids, found = image.layout.tokens.tolist(), list[int]()
    sampling = Sampling(frequency_penalty=frequency, presence_penalty=presence, logit_bias=biases)
    done = generate(model, image, 24, sampling).tokens
    module = reference.eager(tiny.random_module(tiny.CONFIGS["llama"]()))
    for token in done:
        with torch.inference_mode():
            logits = module(torch.tensor([ids + found])).logits[0, -1]
        logits = logits.clone()
        for chosen in range(len(logits)):
            count = found.count(chosen)
            logits[chosen] += dict(biases).get(chosen, 0.0) - count * frequency - (count > 0) * presence
        assert token == int(logits.argmax())
        found.append(token)
    assert len(found) > 8 and found != list(generate(model, linked(model, store), 24).tokens)


def test_decoding_ends_at_the_last_position(model: Model, store: Store) -> None:
    image = linked(model, store)
    room = model.max_positions - image.num_tokens
    generated = generate(model, image, 10_000)
    assert len(generated.tokens) == room + 1 or generated.tokens[-1] in model.eos_ids


def test_sampling_follows_its_seed(model: Model, store: Store) -> None:
    first, again, other = (answer(model, store, Sampling(1.0, 0.9, seed)).tokens for seed in (1, 1, 2))
    assert first == again != other


def test_sampling_draws_from_the_filtered_distribution() -> None:
    """Frequencies against softmax with temperature, cut to the smallest set that holds top-p."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    choose = _Chooser(Sampling(temperature=0.5, top_p=0.95, seed=0))
    drawn = torch.bincount(torch.tensor([choose(logits) for _ in range(4000)]), minlength=4) / 4000
    expected = (logits / 0.5).softmax(-1)
    expected = torch.where(torch.tensor([True, True, False, False]), expected, 0.0)
    torch.testing.assert_close(drawn, expected / expected.sum(), atol=0.03, rtol=0)


def test_top_p_near_zero_is_greedy(model: Model, store: Store) -> None:
    assert answer(model, store, Sampling(1.0, 1e-9)).tokens == answer(model, store, Sampling()).tokens


@pytest.mark.parametrize("bad", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"stop": ("",)}])
def test_bad_sampling_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Sampling(**bad)  # type: ignore[arg-type]


def test_a_stop_string_ends_the_answer(model: Model, store: Store) -> None:
    whole = answer(model, store, Sampling()).text
    stop = whole[5:8]
    pieces: list[str] = []
    stopped = generate(model, linked(model, store), 40, Sampling(stop=(stop,)), pieces.append)
    assert stopped.text == whole[: whole.index(stop)] == "".join(pieces)


def stream(text: str, stop: Sequence[str] = ()) -> list[str]:
    tokens = tiny.tokenizer().encode(text, add_special_tokens=False)
    text_stream = TextStream(tiny.tokenizer(), tuple(stop))
    return [*(text_stream.push(token) for token in tokens), text_stream.finish()]


def test_text_streams_in_whole_characters() -> None:
    pieces = stream("東京 🙂 naïve")
    assert "".join(pieces) == "東京 🙂 naïve"
    assert not any("\ufffd" in piece for piece in pieces)


def test_nothing_of_a_stop_string_is_shown() -> None:
    text = "It holds a festival in the spring"
    assert "".join(stream(text, ["fest"])).startswith("It holds a ")
    shown = ""
    text_stream = TextStream(tiny.tokenizer(), ("festival in",))
    for token in tiny.tokenizer().encode(text, add_special_tokens=False):
        shown += text_stream.push(token)
        assert "f" not in shown
        if text_stream.is_stopped:
            break
    assert shown == text_stream.text == "It holds a "


def test_an_almost_stop_string_is_shown_in_the_end() -> None:
    assert "".join(stream("It holds", ["holdsx"])) == "It holds"


class Counted(str):
    """A stop string that counts how often a part of it is read."""

    reads = 0

    def __getitem__(self, index: Any) -> str:
        Counted.reads += 1
        return str(super().__getitem__(index))


def test_a_token_costs_the_same_whatever_the_stop_string_and_the_answer() -> None:
    tokenizer, lengths, shown = tiny.tokenizer(), list[int](), ""
    tokens = tokenizer.encode("a" * 500, add_special_tokens=False) * 2

    class Watched:
        def decode(self, tokens: list[int], **more: bool) -> str:
            lengths.append(len(tokens))
            return str(tokenizer.decode(tokens, **more))

    stop = Counted("b" + "a" * 2_000), Counted("a" * 2_000 + "b")
    stream = TextStream(cast("PreTrainedTokenizerBase", Watched()), stop)
    Counted.reads = 0
    for token in tokens:
        shown += stream.push(token)
    assert not shown and Counted.reads < 20 * 1000, "an answer that may yet be the stop string is held back"
    assert shown + stream.finish() == "a" * 1000 and max(lengths) < 100


@pytest.mark.parametrize("kind", list(small_tokenizers.KINDS))
def test_a_long_answer_is_decoded_by_its_last_tokens(kind: str) -> None:
    """Its text is that of all its tokens at once, also where a token is a part of a character, or of a word."""
    text = "It holds a festival. 東京 🙂 naïve, Straße\n\n  and 3.14 tabs\t… nobody's why? " * 12
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=small_tokenizers.train(kind, (text[:40],)), unk_token="<unk>")
    tokens, lengths = tokenizer.encode(text, add_special_tokens=False), list[int]()
    whole = tokenizer.decode(tokens, skip_special_tokens=True)

    class Watched:
        def decode(self, tokens: list[int], **more: bool) -> str:
            lengths.append(len(tokens))
            return str(tokenizer.decode(tokens, **more))

    text_stream = TextStream(cast("PreTrainedTokenizerBase", Watched()), ("3.15 tabs",))
    pieces = [*(text_stream.push(token) for token in tokens), text_stream.finish()]
    assert "".join(pieces) == text_stream.text == whole and len(tokens) > 200
    assert max(lengths) < 100


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_stop_strings_are_found_wherever_pieces_end(pieces: list[str], stop: list[str]) -> None:
    class Joining:
        def decode(self, tokens: list[int], **_: bool) -> str:
            return "".join(pieces[token] for token in tokens)

    text_stream, shown, whole = TextStream(cast("PreTrainedTokenizerBase", Joining()), tuple(stop)), "", "".join(pieces)
    for token in range(len(pieces)):
        shown += text_stream.push(token)
        if text_stream.is_stopped:
            break
    ends = [end for end in range(len(whole) + 1) if whole[:end].endswith(tuple(stop))]
    longest = max((len(text) for text in stop if ends and whole[: ends[0]].endswith(text)), default=0)
    assert text_stream.is_stopped == bool(ends)
    assert shown + text_stream.finish() == text_stream.text == (whole[: ends[0] - longest] if ends else whole)


def test_a_stop_string_is_held_back_beside_half_of_a_character() -> None:
    tokenizer = small_tokenizers.train("gpt2", ("x",))
    tokens = tokenizer.encode("x→y", add_special_tokens=False).ids
    assert len(tokens) > 3, "the arrow is three tokens"
    text_stream = TextStream(cast("PreTrainedTokenizerBase", tokenizer), ("x→y",))
    assert "".join(text_stream.push(token) for token in tokens) == "" and text_stream.is_stopped


def test_a_prompt_that_would_cross_the_long_rope_switch_is_refused(store: Store) -> None:
    model = wrap_model(tiny.random_module(tiny.CONFIGS["phi3-long"]()), tiny.tokenizer())
    image = link(model, store, [], "why " * 20, make_policy("full", {})).image
    with pytest.raises(InputError, match=" 128"):
        generate(model, image, 200)
    assert generate(model, image, 20).tokens
