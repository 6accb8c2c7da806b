"""`pic eval`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from pictool.cli.options import (
    ChunkOption,
    CodecOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    RemoteOption,
    StoreOption,
    reports_errors,
)


def register(app: typer.Typer) -> None:
    app.command("eval")(eval_command)


@reports_errors
def eval_command(
    dataset: Annotated[str, typer.Argument(help="A file of questions, or world; a wrong name lists all.")],
    params: Annotated[Optional[list[str]], typer.Option("-p", help="FIELD=VALUE: any field of the dataset.")] = None,
    algo: Annotated[
        Optional[list[str]],
        typer.Option("--algo", help="legolink-16, cacheblend-15, legolink:k=2,16, mapreduce, maprerank …"),
    ] = None,
    output: Annotated[
        Optional[str], typer.Option("-o", "--output", help="Results (jsonl), continued if they are there.")
    ] = None,
    limit: Annotated[Optional[int], typer.Option("--limit", min=1, help="Only the first N questions.")] = None,
    jobs: Annotated[Optional[int], typer.Option("--jobs", min=1, help="Processes, of one thread each.")] = None,
    metric: Annotated[Optional[str], typer.Option("--metric", help="f1, em, rouge_l or contains.")] = None,
    max_new_tokens: Annotated[Optional[int], typer.Option("--max-new-tokens", min=1, help="Of every answer.")] = None,
    head: Annotated[Optional[str], typer.Option("--head", help="Text before the documents.")] = None,
    query_template: Annotated[
        Optional[str], typer.Option("--query-template", help="How {query} stands behind the documents.")
    ] = None,
    chunk_tokens: ChunkOption = None,
    codec: CodecOption = None,
    skip_long: Annotated[bool, typer.Option("--skip-long", help="Leave out what does not fit the model.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Begin the results anew.")] = False,
    plot: Annotated[Optional[str], typer.Option("--plot", help="Quality against TTFT (.svg and .png).")] = None,
    model: ModelOption = None,
    store: StoreOption = None,
    remote: RemoteOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a dataset's questions under several policies; compare with full recompute."""
    from pictool.commands.eval import EvalOptions, run_eval

    options = EvalOptions(
        dataset, params or [], algo or [], output, limit, jobs, chunk_tokens, head, query_template, metric,
        max_new_tokens, skip_long, force, plot, codec,
    )  # fmt: skip
    run_eval(options, model=model, store=store, remote=remote, device=device, dtype=dtype, as_json=as_json)
