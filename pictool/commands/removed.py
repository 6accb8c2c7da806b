"""What earlier versions had, and what to use instead."""

from __future__ import annotations

from collections.abc import Sequence

# Commands, subcommands and options, each after its command.
REMOVED: dict[str, str] = {
    "link --guarantee": "use --verify with --max-kl",
    "link --verify-share": "use --verify with --max-kl",
    "query --plot": "use --explain, which prints both trees",
    "serve --guarantee": "set verify in a share of the requests, or verify a batch: pic link --batch --verify",
    "serve --verify-share": "set verify in a share of the requests, or verify a batch: pic link --batch --verify",
    "serve --reuse-parts": "compile the parts themselves: pic compile --chunk-tokens",
    "serve --queue-bytes": "it is 100 MB; pictool.routing.rank takes any",
    "link -T": "name documents and --query, or put requests into a file for --batch",
    "link --script": "name documents and --query, or put requests into a file for --batch",
    "link --depfile": "use --batch with -o, which recomputes only outdated answers",
    "compile --depfile": "make the text the prerequisite in the Makefile",
    "query -k": "use --algo NAME-NUMBER",
    "query --ratio": "use --algo NAME-NUMBER",
    "query -p": "use --algo NAME:FIELD=VALUE",
    "link -k": "use --algo NAME-NUMBER",
    "link --ratio": "use --algo NAME-NUMBER, or --auto-ratio",
    "link -p": "use --algo NAME:FIELD=VALUE",
    "link --fallback": "omit it: no policy reads tables",
    "link --sinks": "compile the documents with --after",
    "plan --ratio": "use --algo NAME-NUMBER",
    "plan -p": "use --algo NAME:FIELD=VALUE",
    "link --server": "link here, or ask the server: POST /v1/link, and every client of OpenAI's API",
    "store key": "use pic store sign, which makes a key if there is none",
    "store export": "use pic store push KEY -o ARCHIVE",
    "store import": "use pic store pull ARCHIVE",
    "store ls --after": "use --json, which lists all",
    "store ls --by": "use --stats, which lists folders too",
    "store verify --dry-run": "omit --repair",
    "compile --sinks": "use --after head",
    "compile --recursive": "omit it: folders are compiled with what is below them",
    "compile -r": "omit it: folders are compiled with what is below them",
    "query --bulk": "pass a .jsonl file",
    "ask --all": "compile the folder with pic sync",
    "serve --dashboard": "import examples/monitoring/dashboard.json from a checkout",
    **dict.fromkeys(
        ("serve --request-log", "serve --request-log-size"),
        "log at a gateway in front of it; pic estimate reads its log",
    ),
    **{
        f"{command} {name}": instead
        for command in ("ask", "mcp")
        for name, instead in {
            "-k": "use --algo NAME-NUMBER",
            "--ratio": "use --algo NAME-NUMBER",
            "-p": "use --algo NAME:FIELD=VALUE",
            "--fallback": "omit it: no policy reads tables",
            "--head": "set head in pic.yaml",
            "--query-template": "set query_template in pic.yaml",
            "--sinks": "documents are compiled after a context",
            **dict.fromkeys(("--temperature", "--top-p", "--seed", "--stop"), "answers are greedy; pic link samples"),
        }.items()
    },
    "doctor --engine": "pic serve --engine vllm checks its answers at the start (--check), and so does --upstream",
    "diff": "use pic inspect A B --diff",
    "store show": "use pic inspect KEY, and pic store ls --json for the last use",
    "store stats": "use pic store ls --stats",
    "store expire": "use pic store gc KEY, or pic store gc --older-than AGE",
    "store unpin": "use pic store pin --undo",
    **dict.fromkeys(
        ("inspect --header", "inspect --candidates", "inspect --times", "inspect --parts"),
        "pic inspect shows all sections unless --layers or --text is given",
    ),
    "estimate --replay": "ask the server: its responses and /metrics say what was reused",
    "estimate --sample": "ask the server: its responses and /metrics say what was reused",
    "estimate --plot": "use --json",
    "estimate --capacity": "see the KV size of all distinct text, and the server's /metrics",
    "estimate --limit": "use head -n N LOG | pic estimate -",
    "estimate --min-tokens": "it is 16",
    "estimate --shape": "use -m, which sizes KV by that model",
    "estimate --tflops": "use pic plan, which measures this machine",
    "estimate --read-gb-s": "use pic plan, which measures this machine",
    "evidence": "use doctor, bench, tune and eval, or python -m benchmarks.real from a checkout",
    "plan --tiers": "pass your devices' read rates with --read-gb-s, the cheapest device first",
    "plan --check": "measure the machine again with pic plan --measure",
    "bench breakdown": "use python -m benchmarks.breakdown from a checkout",
    "bench storage": "use python -m benchmarks.storage from a checkout",
    "inspect --plot": "use --json, and python -m benchmarks.trace_plots from a checkout",
    **dict.fromkeys(
        ("inspect --attention-sinks", "inspect --first", "inspect --sinks"),
        "use pic tui (a, on an object), or python -m benchmarks.attention_sinks from a checkout",
    ),
    "inspect --scale": "attention is shown as shares of each row",
    "bench context": "use python -m benchmarks.context from a checkout",
    "bench sync": "use pic bench",
    "bench --layers": "use a smaller --shape",
    "bench --threads": "set OMP_NUM_THREADS",
    **dict.fromkeys(("bench -o", "bench --output"), "use --json > FILE"),
    **dict.fromkeys(("bench --seed", "bench --tail-tokens"), "seed and tail are fixed"),
    "bench --plot": "use --json",
    "eval --plot": "use --json, and python -m benchmarks.eval_plot from a checkout",
    "eval --html": "use --json",
    "eval --verify": "use fewer questions with --limit; pic link --batch --verify compares a share",
    "eval --skip-long": "prompts that do not fit the model are always skipped",
    **dict.fromkeys(("eval --jobs", "tune --jobs"), "one process answers; OMP_NUM_THREADS sets its threads"),
    "eval --force": "remove the results file, or choose another with -o",
    "tune --plot": "use --json",
    "tune --by": "the policy with the fewest rows is chosen; --json also has the times",
    "tune --clip": "each KL is capped at 1 nat",
    **dict.fromkeys(("tune --target-kl", "tune --target-left"), "use --target-share, or --target-answer-kl"),
    "tune --skip-long": "prompts that do not fit the model are always skipped",
    "tune --seed": "questions are drawn with a fixed seed",
    "compile --keep-going": "omit the file in the error, or pass its folder, where unreadable files are skipped",
    **dict.fromkeys(("doctor -o", "doctor --output"), "use --json > FILE"),
    **dict.fromkeys(("compile --probes", "compile --probe-model"), "omit it: no policy reads tables"),
    "tui --server": "use GET /health for a server's state; Prometheus reads /metrics",
}


def replacement(arguments: Sequence[str]) -> str | None:
    """A line that names what to use in place of what these arguments still ask for; None if they do not."""
    words = [word.partition("=")[0] for word in arguments]
    while words and words[0].startswith("-"):  # options of the program itself
        words.pop(0)
    options = words[: words.index("--")] if "--" in words else words
    for removed, instead in REMOVED.items():
        *command, name = removed.split()
        given = options if name.startswith("-") else words[len(command) : len(command) + 1]
        if words[: len(command)] == command and name in given:
            return f"{removed}: was removed; {instead}"
    return None
