"""`pic compile`, `pic link` and `pic plan`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from pictool.cli.options import (
    ChunkOption,
    CodecOption,
    DepfileOption,
    DeviceOption,
    DtypeOption,
    EngineOption,
    JsonOption,
    ModelOption,
    RemoteOption,
    SaltOption,
    StoreOption,
    reports_errors,
)


def register(app: typer.Typer) -> None:
    app.command("compile")(compile_command)
    app.command("link")(link_command)
    app.command("plan")(plan_command)


@reports_errors
def compile_command(
    files: Annotated[list[str], typer.Argument(help="UTF-8 text files.")],
    model: ModelOption = None,
    chunk_tokens: ChunkOption = None,
    sinks: Annotated[int, typer.Option("--sinks", min=0, help="Dummy tokens in front, dropped (LegoLink-0: 4).")] = 0,
    codec: CodecOption = None,
    probes: Annotated[
        Optional[int], typer.Option("--probes", min=0, help="Measure tables for --algo fixup (8); costly.")
    ] = None,
    probe_model: Annotated[
        Optional[str], typer.Option("--probe-model", help="The small model that measures; 8 probes, if not said.")
    ] = None,
    output: Annotated[Optional[str], typer.Option("-o", "--output", help="Write one file's object here too.")] = None,
    depfile: DepfileOption = False,
    store: StoreOption = None,
    salt: SaltOption = None,
    remote: RemoteOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    force: Annotated[bool, typer.Option("--force", help="Compute again what is already there.")] = False,
    engine: EngineOption = "torch",
    as_json: JsonOption = False,
) -> None:
    """Compile text files to KV objects. Unchanged input costs no model run."""
    from pictool.commands.compile import run_compile

    run_compile(
        files, model=model, chunk_tokens=chunk_tokens, sinks=sinks, codec=codec, probes=probes,
        probe_model=probe_model, output=output, depfile=depfile, store=store, remote=remote, salt=salt, device=device,
        dtype=dtype, force=force, engine=engine, as_json=as_json,
    )  # fmt: skip


@reports_errors
def link_command(
    documents: Annotated[
        Optional[list[str]], typer.Argument(help="Text files, .kvo objects or keys, in order.")
    ] = None,
    query: Annotated[Optional[str], typer.Option("-q", "--query", help="The question.")] = None,
    algo: Annotated[Optional[str], typer.Option("--algo", help="Policy (legolink); a wrong name lists all.")] = None,
    k: Annotated[Optional[int], typer.Option("-k", help="LegoLink: tokens recomputed per chunk.")] = None,
    ratio: Annotated[
        Optional[str], typer.Option("--ratio", help="Share of rows of policies with one; or auto.")
    ] = None,
    params: Annotated[Optional[list[str]], typer.Option("-p", help="FIELD=VALUE: any field of the policy.")] = None,
    fallback: Annotated[
        Optional[str], typer.Option("--fallback", help="fixup: legolink, for objects without a table.")
    ] = None,
    head: Annotated[Optional[str], typer.Option("--head", help="Text (system message) before the documents.")] = None,
    query_template: Annotated[
        Optional[str], typer.Option("--query-template", help="How {query} stands behind the documents.")
    ] = None,
    script: Annotated[Optional[str], typer.Option("-T", "--script", help="Link script (YAML).")] = None,
    max_new_tokens: Annotated[Optional[int], typer.Option("--max-new-tokens", min=1, help="Default 64.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus sampling.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**64 - 1, help="Of sampling.")] = 0,
    stop: Annotated[Optional[list[str]], typer.Option("--stop", help="Text that ends the answer.")] = None,
    chunk_tokens: ChunkOption = None,
    sinks: Annotated[Optional[int], typer.Option("--sinks", min=0, help="Dummy tokens of texts compiled here.")] = None,
    codec: CodecOption = None,
    engine: EngineOption = "torch",
    compare: Annotated[bool, typer.Option("--compare", help="Run full too; print speedup and agreement.")] = False,
    trace: Annotated[Optional[str], typer.Option("--trace", help="Write what the link did to this file.")] = None,
    output: Annotated[Optional[str], typer.Option("-o", "--output", help="Write the JSON report to this file.")] = None,
    depfile: DepfileOption = False,
    model: ModelOption = None,
    store: StoreOption = None,
    salt: SaltOption = None,
    remote: RemoteOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Link documents into a prompt and answer a query."""
    from pictool.commands.link import LinkOptions, run_link

    options = LinkOptions(
        documents or [], query, algo, k, ratio, params or [], head, query_template, script, max_new_tokens,
        temperature, top_p, seed, stop or [], chunk_tokens, sinks, codec, fallback,
    )  # fmt: skip
    run_link(
        options, model=model, store=store, remote=remote, salt=salt, device=device, dtype=dtype, engine=engine,
        compare=compare,
        trace=trace, output=output, depfile=depfile, as_json=as_json,
    )  # fmt: skip


@reports_errors
def plan_command(
    documents: Annotated[Optional[list[str]], typer.Argument(help="Text files, .kvo objects or keys.")] = None,
    query: Annotated[Optional[str], typer.Option("-q", "--query", help="The question.")] = None,
    algo: Annotated[Optional[str], typer.Option("--algo", help="Policy with a ratio (cacheblend).")] = None,
    ratio: Annotated[
        Optional[float], typer.Option("--ratio", help="Find a tier for this share of rows (0.15).")
    ] = None,
    params: Annotated[Optional[list[str]], typer.Option("-p", help="FIELD=VALUE: any field of the policy.")] = None,
    tiers: Annotated[Optional[str], typer.Option("--tiers", help="YAML of storage tiers, instead of examples.")] = None,
    tokens: Annotated[
        Optional[int], typer.Option("--tokens", min=1, help="Plan for a context of N tokens, without documents.")
    ] = None,
    chunk_tokens: ChunkOption = None,
    check: Annotated[bool, typer.Option("--check", help="Link too; print estimates against measured times.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine again.")] = False,
    codec: CodecOption = None,
    model: ModelOption = None,
    store: StoreOption = None,
    salt: SaltOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate delays by storage tier; choose ratio and tier."""
    from pictool.commands.plan import PlanOptions, run_plan

    options = PlanOptions(
        documents or [], query, algo, ratio, params or [], tiers, tokens, chunk_tokens, check, measure, codec
    )
    run_plan(options, model=model, store=store, salt=salt, device=device, dtype=dtype, as_json=as_json)
