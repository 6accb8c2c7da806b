"""The page of `pic evidence`: one HTML file with all in it, which loads nothing."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from pictool.commands.eval import ms, number, percent

Row = Sequence[str]
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
.failed { color: #a50f15; font-weight: bold } .partial, .left { color: #8c6d31 } img { max-width: 100% }
"""


def make_page(report: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The page of a report; `pictures` are SVG files, by the part's name."""
    model, machine, parts = report["model"], report["machine"], report["parts"]
    title = f"pictool evidence: {model.get('name', 'a model that was not loaded')}"
    versions = ", ".join(f"{name} {machine.get(name)}" for name in ("pictool", "torch", "transformers", "python"))
    place = machine.get("cpu") if model.get("device") == "cpu" else machine.get("gpu")
    facts = [
        ("model", f"{model.get('architecture')}, {model.get('weights', 0) / 1e6:,.4g}M weights, {model.get('dtype')}"),
        ("weights", str(model.get("fingerprint"))),
        ("device", f"{model.get('device')}: {place}, {machine.get('threads')} threads of the CPU"),
        ("versions", f"{versions}, {machine.get('system')}"),
        ("written", f"{report['written']}, {report['seconds'] / 60:.1f} of {report['minutes']:g} minutes"),
    ]
    summary = [(part["title"], part["status"], f"{part['seconds']:.0f} s", part["why"]) for part in parts]
    body = [
        f"<h1>{escape(title)}</h1>", _table((), facts), _table(("part", "result", "time", ""), summary),
        *(_section(part, pictures.get(part["name"])) for part in parts if part["rounds"]),
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{"".join(body)}\n</body></html>\n'


def _section(part: Mapping[str, Any], picture: bytes | None) -> str:
    tables = _TABLES[part["name"].partition("-")[0]]
    drawn = "" if picture is None else f'<img alt="" src="data:image/svg+xml;base64,{b64encode(picture).decode()}">'
    shown = part["rounds"] if part["name"].startswith("bench") else part["rounds"][-1:]
    return f"\n<h2>{escape(part['title'])}</h2>\n" + "\n".join(tables(each["result"]) for each in shown) + drawn


def _table(head: Row, rows: Sequence[Row]) -> str:
    """A table; a cell that is a status has its name as class."""
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"] if head else []
    for row in rows:
        cells = (
            f'<td class="{escape(cell)}">{escape(cell)}</td>' if cell in _STATUSES else f"<td>{escape(cell)}</td>"
            for cell in row
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


_STATUSES = ("failed", "partial", "left out")


def _verdicts(result: Mapping[str, Any]) -> str:
    rows = [(each["section"], each["status"], each["check"], each["text"]) for each in result["verdicts"]]
    return _table(("", "", "check", "found"), rows)


def _bench(result: Mapping[str, Any]) -> str:
    options, measured = result["options"], result["results"]
    caption = f"{measured['prompt_tokens']:,} tokens: {options['chunks']} × {options['chunk_tokens']}, and a tail"
    return f"<p>{escape(caption)}</p>" + (_sync if result["bench"] == "sync" else _breakdown)(measured["methods"])


def _sync(methods: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            each["label"], f"{each['median']['rows']:,.0f}", _range(each["ttft"]), f"{each['speedup']:.2f}×",
            "-" if each["ttft_by_floor"] is None else f"{each['ttft_by_floor']:.2f}",
            "-" if each["median"]["decode_tokens_per_s"] is None else f"{each['median']['decode_tokens_per_s']:.1f}",
        )
        for each in methods
    ]  # fmt: skip
    return _table(("policy", "rows", "TTFT, ms", "speedup", "÷ roofline", "tokens/s"), rows)


def _breakdown(methods: Sequence[Mapping[str, Any]]) -> str:
    def parts(each: Mapping[str, Any]) -> Iterator[str]:
        medians = each["parts"]
        for seconds in (medians["load"], medians["scoring"] + medians["select"], sum(medians["layers"]),
                        sum(medians["checks"]), medians["logits"] + medians["other"]):  # fmt: skip
            yield ms(seconds)

    rows = [(each["label"], _range(each["ttft"]), *parts(each)) for each in methods]
    return _table(("policy", "TTFT, ms", "load", "select", "layers", "checks", "other"), rows)


def _tune(result: Mapping[str, Any]) -> str:
    target = result["target"]
    chosen = result["chosen"] or f"none yet; by the means alone {result['by_mean'] or 'full'}"
    caption = (
        f"{result['units']} of {result['available']} questions ({result['questions']}); target: a mean "
        f"{target['measure']} of at most {target['limit']:g}. Chosen: {chosen}. {result['no_answers']}"
    )
    rows = [
        (
            line["label"], percent(line["rows"]), number(line["kl"]), number(line["answer_kl"]),
            number(line["finding"]["high"]), percent(line["same_answer"]), ms(line["ttft_s"]),
            line["finding"]["status"],
        )
        for line in sorted(result["lines"], key=lambda line: line["rows"])
    ]  # fmt: skip
    head = ("policy", "rows", "KL, first token", "KL, answer", "at most", "same answers", "TTFT, ms", "target")
    return f"<p>{escape(caption)}</p>" + _table(head, rows)


def _answers(result: Mapping[str, Any]) -> str:
    data = result["header"]["dataset"]
    caption = (
        f"{result['questions']} questions over {result['units']} sets of documents, {result['tokens']:,.0f} tokens a "
        f"prompt; {len(result['skipped'])} too long. {data['name']}, content {data['sha256'][:16]}"
    )

    def mean(estimate: Mapping[str, float] | None) -> str:
        return "-" if estimate is None else number(estimate["mean"])

    rows = [
        (
            line["label"], f"{line['score']['mean']:.3f}", f"{line['difference']['mean']:+.3f}", mean(line["kl"]),
            mean(line["answer_kl"]), percent(line["same_answer"]), percent(line["row_share"]),
            ms(line["timing"]["ttft_s"]), f"{line['speedup']:.2f}×",
        )
        for line in result["lines"]
    ]  # fmt: skip
    head = (
        "policy",
        result["metric"],
        "to full",
        "KL, first token",
        "KL, answer",
        "same answers",
        "rows",
        "TTFT, ms",
        "speedup",
    )
    return f"<p>{escape(caption)}</p>" + _table(head, rows)


def _range(times: Mapping[str, float]) -> str:
    return f"{ms(times['median'])} ({ms(times['low'])}–{ms(times['high'])})"


_TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "doctor": _verdicts, "bench": _bench, "tune": _tune, "answers": _answers,
}  # fmt: skip
