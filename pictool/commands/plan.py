"""`pic plan`: delays of a prompt by device, the ratio that is free on each, the cheapest device (CacheBlend §5.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool.commands.console.errors import UsageError
from pictool.commands.console.outputs import print_json
from pictool.commands.linking.request import (
    check_documents,
    check_keys,
    make_spec,
    note_measuring,
    with_stdin,
)
from pictool.commands.settings.options import (
    POLICY,
    SALT,
    ChunkOption,
    JsonOption,
    argument,
    command,
    make_app,
    option,
)
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.commands.settings.types import parse_algo, parse_rates

if TYPE_CHECKING:
    from pictool.controller.cost import PromptSize
    from pictool.linker.spec import Spec
    from pictool.runtime.model import Model
    from pictool.store.store import Store

DEFAULT_ALGO = "cacheblend"
DEFAULT_QUERY = "What do these documents say?"  # some tail has to be computed
DEFAULT_CHUNK_TOKENS = 512  # of --tokens
STORE = "store"  # the device on which the store lives

app = make_app()


@dataclass(frozen=True)
class PlanOptions:
    """The options of `pic plan`; None where the user said nothing."""

    documents: Annotated[list[str], argument("DOCUMENT", "Text files (- is stdin), .kvo objects or keys.")] = field(
        default_factory=list
    )
    query: Annotated[str, option("-q, --query", "TEXT", "The question; - is stdin.")] = DEFAULT_QUERY
    tokens: Annotated[
        Optional[int], option("--tokens", "N", "Plan for a context of N tokens, without documents.", min=1)
    ] = None
    rates: Annotated[
        Any,
        option(
            "--read-gb-s",
            "LIST",
            "Read rates of the devices to compare, in GB/s, cheapest first.",
            type=parse_rates,
        ),
    ] = "0.5,1,5,100"
    measure: Annotated[bool, option("--measure", None, "Measure this machine again.")] = False
    policy: Annotated[
        Any,
        option(
            "--algo",
            "SPEC",
            "A policy with the ratio to find a device for. An unknown name lists all.",
            POLICY,
            type=parse_algo,
            show_default=False,
        ),
    ] = DEFAULT_ALGO
    chunk_tokens: ChunkOption = None
    as_json: JsonOption = False


@command(app, "plan", "model", "device", "dtype", "store", *SALT, "codec")
def run_plan(options: PlanOptions, settings: Settings) -> None:
    """Estimate loading and recompute times by storage device.

    \b
      pic plan a.txt b.txt -q "Who?"
      pic plan --tokens 32768 --read-gb-s 0.5,7
    """
    if (options.tokens is None) == (not options.documents):
        raise UsageError("documents and --tokens: use only one of them")
    spec = with_stdin(
        make_spec(
            settings,
            options.query,
            options.policy,
            documents=check_documents(options.documents),
            chunk_tokens=options.chunk_tokens,
        )
    )
    knob = spec.policy.knob
    if knob is None or not knob.is_share:
        raise UsageError(
            f"--algo {spec.policy.name}: has no ratio to plan; use {DEFAULT_ALGO} or another policy with a ratio"
        )
    store = open_store(settings)
    check_keys(store, spec.documents, settings.salt)
    report = make_report(options, open_model(settings), store, spec)
    if options.as_json:
        print_json(report)
    else:
        print_report(report)


def make_report(options: PlanOptions, model: Model, store: Store, spec: Spec) -> dict[str, Any]:
    """Measure, where that is still to be done, and plan; what `--json` prints."""
    from pictool.controller.profile import load_profile, make_estimator

    policy, size = spec.policy, plan_size(model, store, spec, options.tokens)
    assert policy.knob is not None
    ratio = float(policy.params[policy.knob.field])
    estimator = make_estimator(model, policy, options.measure, note_measuring)
    profile = load_profile(model, store, spec.codec, options.measure, note_measuring)
    recompute_s = estimator.recompute_s(ratio, size)
    speeds = {STORE: profile.device} | {name: profile.at(rate) for name, rate in options.rates.items()}
    devices: list[dict[str, Any]] = []
    for name, speed in speeds.items():
        choice = estimator.choose_ratio(size, speed)
        times = {"load_s": choice.load_s, "ttft_s": max(choice.load_s, recompute_s)}
        devices.append({"name": name, **times, "is_hidden": choice.load_s <= recompute_s, "ratio": choice.ratio})
    cheapest = next((device["name"] for device in devices[1:] if device["is_hidden"]), None)
    return {
        "model": model.name, "algo": policy.name, "ratio": ratio,
        "tokens": {"context": size.context, "tail": size.tail}, "objects": size.objects,
        "bytes": round(profile.stored * size.context * size.token_bytes),
        "prefill_s": estimator.prefill_s(size.context + size.tail), "recompute_s": recompute_s,
        "devices": devices,
        "choice": {"ratio": devices[0]["ratio"], "device": cheapest},
    }  # fmt: skip


def plan_size(model: Model, store: Store, spec: Spec, tokens: int | None) -> PromptSize:
    """The size of the prompt that is planned: of the documents, or of so many tokens.

    Raises:
        PicError: an unusable document, or a prompt that is too long for the model.
    """
    from pictool.controller.cost import PromptSize
    from pictool.controller.profile import measure_size, require_room

    if tokens is None:
        return measure_size(model, store, spec)
    objects = -(-tokens // (spec.chunk_tokens or DEFAULT_CHUNK_TOKENS))
    tail = len(model.encode(spec.frame(model).tail))
    return require_room(model, PromptSize(tokens, tail, objects, model.token_bytes))


def print_report(report: dict[str, Any]) -> None:
    from pictool.commands.console.terminal import LabelledTable, open_screen

    tokens, choice = report["tokens"], report["choice"]
    print(
        f"{tokens['context']} tokens of context in {report['objects']} objects ({report['bytes'] / 1e6:.1f} MB), "
        f"{tokens['tail']} of the query; {report['model']} computes them in {_ms(report['prefill_s'])}"
    )
    table = LabelledTable(["device", "load", "recompute", "TTFT", "free ratio"])
    for device in report["devices"]:
        times = (device["load_s"], report["recompute_s"], device["ttft_s"])
        table.add_row(device["name"], *map(_ms, times), f"{device['ratio']:g}")
    open_screen().print(table)
    print(f"ratio   {choice['ratio']:g} of {report['algo']} for the store's device, as --auto-ratio takes it")
    cheapest = f"{choice['device']} is the cheapest whose loading" if choice["device"] else "no loading from these"
    print(f"device  {cheapest} is hidden by recompute at ratio {report['ratio']:g}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
