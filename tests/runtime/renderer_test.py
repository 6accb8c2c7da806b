"""Chat templates are programs of others: rendered as transformers renders them, and bounded in time and memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from transformers.utils.chat_template_utils import render_jinja_template

from pictool.runtime.chat.renderer import Renderer, TemplateFailure, TemplateRefusal

MESSAGES = [{"role": "system", "content": "You are."}, {"role": "user", "content": 'why? "<é>" \ud800'}]
SPECIALS = tiny.tokenizer().special_tokens_map
# Everything that the templates of supported models use.
GOOD = {
    "chatml": "{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}"
    "{{ [1, {'b': 1, 'a': 2}] | tojson(sort_keys=true) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro say(x) %}<{{ x|trim }}>{% endmacro %}{{ say(' a ') }}{{ bos_token }}{{ nothing }}",
    "loop controls": "{% for i in range(9) %}{% if i == 3 %}{% continue %}{% elif i == 6 %}{% break %}{% endif %}"
    "{{ i }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}"
    "{{ x }}{% endfor %}",
    "blocks": "  {% if tools is none and documents is none %}\n  a\n  {%- endif %}\n b",
    "year": "{{ strftime_now('%Y') }}",
    "slices": "{{ messages[1:][0].content.split('?')[0].upper() }}{{ messages | length }}{{ 'x' * 3 }}",
}
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}"
DOUBLE = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
# What fails, and what the message says.
BAD: dict[str, tuple[str, str]] = {
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "syntax": ("{% for %}", "TemplateSyntaxError"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "internals": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "format": ("{{ '{0.__class__.__mro__}'.format(1).x.y }}", "SecurityError|UndefinedError"),
    "globals": ("{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.json }}", "SecurityError"),
    "mutation": ("{{ messages.append(1) }}", "SecurityError"),
    "undefined": ("{{ nothing.at.all }}", "UndefinedError"),
    "range": ("{% for i in range(10**12) %}{% endfor %}", "OverflowError"),
    "large text": ("{{ 'x' * 10**10 }}", "memory"),
    "large text of a filter": ("{{ 'x' | center(10**10) }}", "memory"),
    "large text of a format": ("{{ '%10000000000d' | format(1) }}", "memory"),
    "large list": ("{{ [0] * 10**10 }}", "memory"),
    "long text": ("{{ 'x' * 2**25 }}", "more than 16777216 characters|longer than"),
    "doubling": (DOUBLE, "memory|longer than"),
    "deep": ("{{ " + "(" * 10_000 + ")" * 10_000 + " }}", "RecursionError|TemplateSyntaxError|its process ended"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "power while it is compiled": ("{{ 10 ** (10 ** 9) }}", "longer than 1.5 s"),
    "endless loops": (LOOP, "longer than 1.5 s|memory"),
}  # fmt: skip


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(limit_s=1.5)
    yield renderer
    renderer.close()


def theirs(template: str) -> str:
    rendered: Any = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=True, **SPECIALS)
    return str(rendered[0][0])


@pytest.mark.parametrize("name", GOOD)
def test_it_renders_as_transformers_does(name: str, renderer: Renderer) -> None:
    assert renderer.render(GOOD[name], MESSAGES, SPECIALS) == theirs(GOOD[name])


@pytest.mark.parametrize("name", BAD)
def test_what_fails_or_does_not_end_says_so_and_the_next_one_is_rendered(name: str, renderer: Renderer) -> None:
    template, message = BAD[name]
    with pytest.raises(TemplateFailure, match=message) as caught:
        renderer.render(template, MESSAGES, SPECIALS)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert renderer.render("{{ messages[0].content }}", MESSAGES, SPECIALS) == "You are."


def test_what_a_template_refuses_is_its_own_word(renderer: Renderer) -> None:
    with pytest.raises(TemplateRefusal, match=r"^roles must\s+alternate$"):
        renderer.render("{{ raise_exception('roles must\n alternate') }}", MESSAGES, {})


def test_threads_and_forks_get_their_own_answers(renderer: Renderer) -> None:
    def ask(text: str) -> str:
        return renderer.render("{{ messages[0].content }}", [{"role": "user", "content": text}], {})

    got: dict[int, str] = {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: ask(str(i))})) for i in range(20)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: str(i) for i in range(20)}
    child = os.fork()
    if child == 0:
        os._exit(0 if ask("child") == "child" else 1)
    assert os.waitpid(child, 0)[1] == 0 and ask("parent") == "parent"


def test_a_process_that_was_killed_is_started_again(renderer: Renderer) -> None:
    assert renderer.render("a", [], {}) == "a"
    process = renderer._process._process
    assert process is not None
    process.kill()
    process.wait()
    assert renderer.render("b", [], {}) == "b"
