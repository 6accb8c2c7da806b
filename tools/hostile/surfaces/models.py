"""Model directories that are damaged, forged or hostile, under compile and link."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands.run import write

from hostile.judge import Case, Step, fine
from hostile.scene import QUERY, check_agreement
from hostile.surfaces.base import Surface, put_something_else
from hostile.values import NUMBERS, SHAPES, dumps, mutate_bytes, mutate_text, mutate_tree, text, value

CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '[' + message['role'] + ']' }}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[answer]' }}{% endif %}"
)
TEMPLATES = (
    "{{1/0}}",
    "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "{% include 'config.json' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{{ messages.__class__.__mro__ }}",
    "{{ undefined.x.y }}",
    "{{ messages[9] }}",
    "{{ raise_exception('no') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{",
    "{% if %}",
    "{% block x %}",
    "{{ messages|tojson }}",
    "{{ cycler.__init__.__globals__.os.system('touch ../outside/own') }}",
    "{{ range(10**12)|list|length }}",
    "{{ ('x' * 10**6) * 10**6 }}",
    "{{ messages|map('upper')|list }}",
    "",
    " ",
    "x",
    "{{ '%s' % () }}",
    "{{ ''.join(messages) }}",
    "{{ 'a'|int('b', 99) }}",
    "{{ strftime_now('%s' * 9999) }}",
    "{{ messages.append(1) }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages[0]['content'] * 100000 }}",
    "{{ '\x1b[2J' }}" + CHAT,
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ lipsum(n=99999) }}",
    "{{ dict(a=1).a.b.c }}",
    "{{ messages[0].content[::-1] }}",
    "{% filter upper %}" + CHAT + "{% endfilter %}",
    CHAT + CHAT,
    "{% raw %}" + CHAT,
)
_LIVE = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size",
    "rope_parameters", "max_position_embeddings", "rms_norm_eps", "hidden_act", "intermediate_size", "bos_token_id",
    "eos_token_id", "dtype", "model_type", "architectures", "attention_bias", "tie_word_embeddings",
)  # fmt: skip
_ROPE = (
    "rope_type",
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "low_freq_factor",
    "original_max_position_embeddings",
)


def edit_json(path: Path, change: Callable[[Any], str]) -> str:
    tree = json.loads(path.read_text())
    what = change(tree)
    path.write_bytes(dumps(tree).encode("utf-8", "surrogatepass"))
    return f"{path.name}: {what}"


def config(model: Path, draw: random.Random) -> str:
    def change(tree: dict[str, Any]) -> str:
        kind = draw.randrange(4)
        if kind == 0:
            return mutate_tree(tree, draw)
        if kind == 1:
            name, new = draw.choice(_ROPE), draw.choice((*NUMBERS, "yarn", "llama3", "dynamic", "nosuch", None, [1.0]))
            tree["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, name: new}
            return f"rope {name} = {str(new)[:30]}"
        name, new = draw.choice(_LIVE), value(draw) if kind == 2 else draw.choice(NUMBERS)
        tree[name] = new
        return f"{name} = {str(new)[:30]!r}"

    return edit_json(model / "config.json", change)


def code(model: Path, draw: random.Random) -> str:
    """Code beside the model, which must never run."""
    write(model / "own.py", "import pathlib; pathlib.Path('../outside/own').touch(); raise SystemExit(77)\n")
    name = draw.choice(("config.json", "tokenizer_config.json"))

    def change(tree: dict[str, Any]) -> str:
        tree["auto_map"] = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", "own.T"]}
        if draw.random() < 0.5:
            tree["model_type" if name == "config.json" else "tokenizer_class"] = "Own"
        return "auto_map"

    return edit_json(model / name, change)


def weights(model: Path, draw: random.Random) -> str:
    """The header or the bytes of the weights."""
    path = model / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = draw.choice([name for name in header if name != "__metadata__"])
    kind = draw.choice(("bytes", "cut", "header", "nan", "huge", "removed", "dtype", "shape", "swapped", "offsets"))
    if kind in ("bytes", "cut"):
        path.write_bytes(mutate_bytes(data, draw)[0] if kind == "bytes" else data[: draw.randrange(len(data))])
        return f"weights: {kind}"
    start, end = header[name]["data_offsets"]
    if kind in ("nan", "huge"):
        bad = struct.pack("<f", float("nan") if kind == "nan" else 1e38)
        at = start + draw.randrange((end - start) // 4) * 4
        body = (
            body[:at] + bad + body[at + 4 :]
            if draw.random() < 0.5
            else body[:start] + bad * ((end - start) // 4) + body[end:]
        )
    elif kind == "removed":
        del header[name]
    elif kind == "dtype":
        header[name]["dtype"] = draw.choice(("F16", "BF16", "I32", "U8", "F64", "F8_E4M3", "X9"))
    elif kind == "shape":
        header[name]["shape"] = draw.choice(
            (header[name]["shape"][::-1], [1, *header[name]["shape"]], [2**62, 4], [-1], [])
        )
    elif kind == "swapped":
        other = draw.choice([other for other in header if other != "__metadata__"])
        header[name], header[other] = header[other], header[name]
    elif kind == "offsets":
        header[name]["data_offsets"] = [draw.choice(NUMBERS), draw.choice(NUMBERS)]
    else:
        kind = mutate_tree(header, draw)
    raw = dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    return f"weights: {name}: {kind}"


def other_weights(model: Path, draw: random.Random) -> str:
    """Other files that look like weights, and indices of them."""
    data = (model / "model.safetensors").read_bytes()
    changed = data[:-4000] + bytes(4000)
    kind = draw.choice(
        ("backup", "bin", "index", "index outside", "adapter", "consolidated", "only bin", "hostile index")
    )
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    if kind == "backup":
        write(model / draw.choice(("a.safetensors", "z.safetensors", "model (copy).safetensors")), changed)
    elif kind in ("bin", "only bin"):
        write(
            model / "pytorch_model.bin",
            draw.choice((b"cos\nsystem\n(S'touch ../outside/own'\ntR.", b"", b"PK\x03\x04")),
        )
        if kind == "only bin":
            (model / "model.safetensors").unlink()
    elif kind == "adapter":
        write(model / "adapter_config.json", '{"base_model_name_or_path": "../../outside", "peft_type": "LORA"}')
        write(model / "adapter_model.safetensors", changed)
    elif kind == "consolidated":
        write(model / "consolidated.safetensors", changed)
    else:
        names = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])
        shard = {"index": "shard.safetensors", "index outside": "../../outside/victim"}.get(kind, "")
        index["weight_map"] = {name: shard or value(draw) for name in names if name != "__metadata__"}
        write(model / "shard.safetensors", changed)
        write(model / "model.safetensors.index.json", dumps(index).encode("utf-8", "surrogatepass"))
        if draw.random() < 0.5:
            (model / "model.safetensors").unlink()
    return f"weights: {kind}"


def tokenizer(model: Path, draw: random.Random) -> str:
    def change(tree: dict[str, Any]) -> str:
        part = draw.choice(("all", "model", "added_tokens", "pre_tokenizer", "decoder", "normalizer", "post_processor"))
        if part == "model":
            name = draw.choice(("merges", "vocab", "unk_token", "type", "dropout", "byte_fallback"))
            tree["model"][name] = draw.choice(
                ({}, [], 1, "x", {"a": -1}, {"a": 2**40}, [["a", "nosuch"]], 0.999, {"<s>": 0, "a": 0})
            )
            return f"model.{name} = {str(tree['model'][name])[:20]}"
        if part in ("added_tokens", "all"):
            tree.pop("model", None) if part == "all" and draw.random() < 0.2 else None
            held = tree["added_tokens"] if part == "added_tokens" else tree
            return f"{part}: {mutate_tree(held, draw)}"
        tree[part] = draw.choice(
            (
                None,
                {},
                {"type": "nosuch"},
                {"type": "Sequence", "pretokenizers": []},
                {"type": "Strip", "strip_left": True, "strip_right": True},
                {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
                {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
                {"type": "Prepend", "prepend": "x" * 1000},
                {"type": "ByteLevel"},
                {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed"},
                {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
                {"type": "Replace", "pattern": {"Regex": "."}, "content": ""},
            )
        )
        return f"{part} = {str(tree[part])[:60]}"

    return edit_json(model / "tokenizer.json", change)


def tokenizer_config(model: Path, draw: random.Random) -> str:
    def change(tree: dict[str, Any]) -> str:
        name = draw.choice(
            (
                "tokenizer_class",
                "bos_token",
                "eos_token",
                "model_max_length",
                "added_tokens_decoder",
                "extra",
                "chat_template",
            )
        )
        tree[name] = draw.choice(
            (
                text(draw),
                value(draw),
                {"999": {"content": "x"}},
                {"__type": "AddedToken", "content": 5},
                "GPT2Tokenizer",
            )
        )
        return f"{name} = {str(tree[name])[:30]!r}"

    return edit_json(model / "tokenizer_config.json", change)


def template(model: Path, draw: random.Random) -> str:
    """A chat template: one of the hostile ones, or an honest one that was damaged."""
    new, what = (draw.choice(TEMPLATES), "") if draw.random() < 0.6 else mutate_text(CHAT, draw)
    if draw.random() < 0.5:
        write(model / "chat_template.jinja", new.encode("utf-8", "surrogatepass"))
    else:
        tree = json.loads((model / "tokenizer_config.json").read_text())
        tree["chat_template"] = draw.choice(
            (new, new, [{"name": "default", "template": new}], [{"name": "x"}], value(draw))
        )
        (model / "tokenizer_config.json").write_bytes(dumps(tree).encode("utf-8", "surrogatepass"))
    return f"template {new[:70]!r} {what}"


def generation_config(model: Path, draw: random.Random) -> str:
    path = model / "generation_config.json"
    if draw.random() < 0.6:
        new = draw.choice((*NUMBERS, *SHAPES, [1, 1], ["x"], [2**40], [[1]], "x", [None], -1))
        return edit_json(
            path, lambda tree: str(tree.update({"eos_token_id": new}) or f"eos_token_id = {str(new)[:30]}")
        )
    return edit_json(path, lambda tree: mutate_tree(tree, draw))


def any_file(model: Path, draw: random.Random) -> str:
    path = draw.choice(sorted(path for path in model.iterdir() if path.is_file()))
    data, what = mutate_bytes(path.read_bytes(), draw)
    path.write_bytes(data)
    return f"{path.name}: {what}"


def a_json_file(model: Path, draw: random.Random) -> str:
    path, new = draw.choice(sorted(model.glob("*.json"))), dumps(value(draw))
    path.write_bytes(new.encode("utf-8", "surrogatepass"))
    return f"{path.name} is {new[:30]}"


def no_file(model: Path, draw: random.Random) -> str:
    path = draw.choice(sorted(model.iterdir()))
    path.unlink()
    return f"{path.name} removed"


SPOILS: tuple[Callable[[Path, random.Random], str], ...] = (
    config, config, config, config, code, weights, weights, weights, other_weights, other_weights, tokenizer, tokenizer,
    tokenizer_config, template, template, template, generation_config, any_file, any_file, a_json_file, no_file,
)  # fmt: skip


class Models(Surface):
    """A spoilt copy of the model, on a store that holds the honest one's objects and chain."""

    name, weight = "models", 8

    def make(self, draw: random.Random) -> Case:
        scene = self.scene
        scene.write_texts()
        model = Path(shutil.copytree(scene.model, "spoilt"))
        if draw.random() < 0.05:
            path = draw.choice(sorted(model.iterdir()))
            what = f"{path.name} is {put_something_else(path, draw, scene.root / 'outside')}"
        else:
            what = draw.choice(SPOILS)(model, draw)
        for name, content in {**scene.objects["none"], **scene.chain}.items():
            write(Path("st", name), content)
        commands = (
            ("compile", "a.txt", "-m", "./spoilt", "--store", "st"), scene.prefix_link(Path("./spoilt")),
            ("link", "a.txt", "b.txt", "-q", QUERY, "-m", "./spoilt", "--store", "st", "--max-new-tokens", 2),
            ("link", "a.txt", "-q", QUERY, "--head", "You answer.", "-m", "./spoilt", "--max-new-tokens", 2),
        )  # fmt: skip
        weights = (2, 3, 2, 2)
        chosen = draw.choices(range(len(commands)), weights, k=draw.choice((1, 1, 2)))
        names = ("spoilt", "a.txt", "no tokens")
        steps = [Step(commands[i], names, check_agreement if i == 1 else fine) for i in chosen]
        return Case(what, tuple(steps), {}, ("st",))
