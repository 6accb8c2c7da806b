"""Each figure of the page of losses, computed from the committed results file that the page names beside it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "when-not-to-use-it.md").read_text(encoding="utf-8")
PARTS = [" ".join(part.split()) for part in PAGE.split("\n**")]  # a case each


def read(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def exact(results: Any) -> str:
    answers = [each for each in results["answers"] if each["kind"] != "tasks"]
    return f"{sum(each['policies']['auto']['same'] for each in answers)} of {len(answers)}"


def right(*results: Any) -> str:
    prompts = [[each for each in one["answers"] if each["right"]] for one in results]
    kept = [sum(each["policies"]["auto"]["right"] for each in own) for own in prompts]
    full = " and ".join(str(len(own)) for own in prompts)
    return f"of the {full} that full answers right, {' and '.join(map(str, kept))} stay right"


def records(policy: str, *names: str) -> list[str]:
    found = [read(name)["summary"]["records"]["policies"][policy] for name in names]
    return [f"{each['left']:.2f} [{each['low']:.2f}, {each['high']:.2f}]" for each in found]


def lefts(policy: str, kind: str, *names: str) -> str:
    return " and ".join(f"{read(name)['summary'][kind]['policies'][policy]['left']:.2f}" for name in names)


def versions(policy: str) -> str:
    kept = []
    for name in ("picbench_trained", "picbench_trained_hold_out"):
        right: dict[str, set[str]] = defaultdict(set)
        with gzip.open(ROOT / "benchmarks" / "results" / f"{name}.jsonl.gz", "rt") as file:
            for line in list(file)[1:]:
                answer = json.loads(line)
                if answer["kind"] == "versions" and answer["scores"][answer["metric"]]:
                    right[answer["label"]].add(answer["id"])
        kept.append(str(len(right["full"] & right[policy])))
    return " and ".join(kept)


def lost_tools() -> list[str]:
    table = read("tool_choice.json")["summary"]
    asked = round(table["full"][0] * table["questions"])
    kept = {name: round(own["kept"][0] * asked) for name, own in table["policies"].items()}
    assert kept["auto"] == asked and round(100 * (1 - 0.025 ** (1 / asked))) == 7  # Clopper and Pearson
    return [f"lose {asked - kept['naive@none']} of {asked} right choices", "a loss of 7 %"]


def hybrids() -> list[str]:
    models, told = read("hybrids.json")["models"], []
    for key, wanted in (("kl_of_naive", "{:.2f}"), ("won_back", "{:.0%}")):
        values = [models[name]["20"]["policies"]["legolink @ 0.2"][key] for name in ("gated-delta", "mamba2")]
        told.append([wanted.format(value).rstrip("%") for value in values])
    longer = [models[name]["60"]["policies"]["legolink @ 0.2"]["kl_of_naive"] for name in ("gated-delta", "mamba2")]
    (delta, mamba), won = told
    return [
        f"leaves {delta} (Gated DeltaNet) and {mamba} (Mamba2)", f"wins back {won[0]} and {won[1]} %",
        "it leaves {:.2f} and {:.2f}".format(*longer),
    ]  # fmt: skip


def prefixes() -> list[str]:
    found = read("recorded_agent.json")
    return [f"{found['reused'] / found['prompt_tokens']:.1%}".replace("%", " %"), f"{100 * found['share']:.1f} %"]


def edits() -> list[str]:
    policies = read("recorded_edits.json")["policies"]
    turns = {name: [each["computed"] for each in own["dropped"]] for name, own in policies.items()}
    full, auto, legolink = turns["full"], turns["auto"], turns["legolink-16"]
    more = [auto[at] - full[at] for at in (2, 3)]
    assert 4 < (full[1] - auto[1]) / max(more) < (full[1] - auto[1]) / min(more) < 6  # about five turns
    return [
        f"computes {auto[1]:,} tokens instead of {full[1]:,}", f"compute {more[0]:,} and {more[1]:,} more",
        f"compute {legolink[2] - full[2]} and {legolink[3] - full[3]} more",
    ]  # fmt: skip


def short() -> list[str]:
    over = {line["tokens"]: line["full_over"] for line in read("link_lengths_smollm2.json")["lines"]}
    auto, legolink = ([1 / over[tokens][name] for tokens in (128, 256, 320)] for name in ("auto", "legolink-16"))
    return [
        f"{auto[0]:.2f} and {auto[1]:.2f} times full's at 128 and 256 tokens, and {auto[2]:.2f} at 320",
        f"takes {legolink[0]:.2f} and {legolink[1]:.2f} at 128 and 256",
    ]


def on_a_gpu() -> list[str]:
    speedups = {
        (point["tokens"], point["tier"]): f"{point['speedup']:.2f}×"
        for point in read("gpu_context.json")["points"]
        if point["policy"] == "legolink-16"
    }
    rows = []
    for tokens in (4096, 8192, 32768):
        cells = [speedups.get((tokens, tier), "") for tier in ("memory", "page cache", "disk")]
        rows.append(f"| {tokens:,} | " + " | ".join(cells) + " |")
    shapes = {shape["shape"]: shape["speedup"] for shape in read("gpu_kinds.json")["kinds"]}
    return [*(" ".join(row.split()) for row in rows), f"{shapes['deepseek-v2-lite']:.2f}×, `gpu_kinds.json`"]


def throughput() -> list[str]:
    points = {(each["ccr"], each["policy"], each["rate"]): each for each in read("serve_throughput.json")["points"]}
    ttft = [1000 * points[0.25, policy, 1.0]["ttft_p50_s"] for policy in ("full", "legolink-16")]
    gains = [
        points[ccr, "legolink-16", 16.0]["requests_per_s"] / points[ccr, "full", 16.0]["requests_per_s"]
        for ccr in (0.25, 4.0)
    ]
    return [f"from {ttft[0]:.0f} to {ttft[1]:.0f} ms", f"{gains[0]:.1f} times as many", f"{gains[1]:.1f} times if"]


REAL, GGUF = ("real_smollm2.json", "real_gemma3.json"), ("real_smollm2_gguf.json", "real_gemma3_gguf.json")
FIGURES: dict[str, Callable[[], list[str]]] = {
    "Every answer": lambda: [exact(read(name)) for name in REAL] + [right(*map(read, REAL)), docs()],
    "JSON records": lambda: [
        *records("auto", *REAL), f"`prophet-20` leaves {lefts('prophet-20', 'records', *REAL)}",
        f"{lefts('auto', 'records', *GGUF)} are left", f"it leaves {float(lefts('auto', 'all', REAL[0])):.2f}",
    ],
    "Choosing among tools": lost_tools,
    "Documents that contradict": lambda: [
        f"Of the {versions('full')} right", f"`legolink-16` keeps {versions('legolink-16')}",
        f"CacheBlend at 30 % {versions('cacheblend-30')}", f"blind reuse {versions('naive')}",
    ],
    "Short documents on hybrids": hybrids,
    "Prompts that only grow": prefixes,
    "An edit": edits,
    "Texts that come once": lambda: [
        f"{100 * (read('learning_costs.json')['rows']['learn, pause 0 s']['learning']['cpu_ratio'] - 1):.1f} % more CPU"
    ],
    "Fewer than 320": short,
    "A fast GPU": on_a_gpu,
    "Long answers": throughput,
}  # fmt: skip


def docs() -> str:
    found = read("ask_docs_smollm2.json")
    assert found["kept"] == found["full_right"] == 4
    return f"{found['same_text']} of {found['questions']} answers"


@pytest.mark.parametrize("case", FIGURES)
def test_the_page_of_losses_has_the_figures_of_its_files(case: str) -> None:
    own = next(part for part in PARTS if part.startswith(case))
    for figure in FIGURES[case]():
        assert figure in own


def test_every_case_has_figures() -> None:
    assert len(FIGURES) == len(PARTS) - 1
