"""`pic serve`: an OpenAI-compatible server with explicit caches."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from pictool import __version__
from pictool.commands.console.errors import UsageError
from pictool.commands.console.verbosity import is_verbose, note, waiting
from pictool.commands.linking.request import policy_of_settings
from pictool.commands.ray.serve import FleetOptions, opened_fleet
from pictool.commands.settings.engine import find_engine
from pictool.commands.settings.options import (
    ANSWER,
    COMPILING,
    MODEL,
    POLICY,
    SALT,
    EngineOption,
    argument,
    command,
    make_app,
    option,
)
from pictool.commands.settings.resources import open_model, open_store
from pictool.commands.settings.settings import Settings
from pictool.commands.settings.types import one_of, parse_algo, parse_policy_name, parse_size
from pictool.errors import InputError
from pictool.needs import require_extra
from pictool.urls import without_credentials

if TYPE_CHECKING:
    from pictool.linker.policies.base import Policy
    from pictool.runtime.model import Model
    from pictool.serve.backends.base import BackendSettings
    from pictool.serve.service import Service
    from pictool.serve.tenants import Keys
    from pictool.serve.work import Backend
    from pictool.store.store import Store

app = make_app()
_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
# Options that replicas do not have, and those that vLLM does not have.
_ALONE = (
    ("--learn", "learn"),
    ("--min-tokens", "min_tokens"),
    ("--pool", "pool"),
    ("--keep-prefixes", "keep_prefixes"),
)
_TORCH_ONLY = ("max_tokens", "pool", "keep_prefixes")
_ACTIVE = 8  # requests that take turns; vLLM batches as many as it is set to
_UPSTREAM_KEY = "PIC_UPSTREAM_KEY"  # the variable with what requests to --upstream carry as their bearer
_BATCHED = 64  # requests that a vLLM has at once, where nobody says it


@dataclass(frozen=True)
class ServeOptions:
    """What a command line says of a server."""

    engine: EngineOption = None
    upstream: Annotated[
        list[str],
        option(
            "--upstream",
            "URL",
            "Route to this vllm serve with PicConnector instead of running a model here. Repeatable.",
        ),
    ] = field(default_factory=list)
    host: Annotated[str, option("--host", "ADDRESS", "Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, option("--port", "N", "Port; 0 takes a free one and prints it to stderr.", min=0, max=65535)
    ] = 8000
    keys: Annotated[
        Optional[str],
        option("--keys", "FILE", "File of bearer keys, one TENANT KEY SALT per line, readable only by its owner."),
    ] = None
    name: Annotated[
        Optional[str], option("--name", "NAME", "Name of the model in the API (that of its folder or file).")
    ] = None
    queue: Annotated[int, option("--queue", "N", "How many requests may wait.", min=1)] = 256
    active: Annotated[
        Optional[int],
        option(
            "--active",
            "N",
            f"How many requests run at once ({_ACTIVE}; {_BATCHED} per vLLM).",
            min=1,
        ),
    ] = None
    algo: Annotated[
        Any,
        option(
            "--algo, --policy",
            "SPEC",
            "Policy for requests that name none (PIC_ALGO; auto).",
            POLICY,
            type=parse_algo,
        ),
    ] = None
    allow: Annotated[
        list[str],
        option("--allow", "NAME", "Policy that requests may name (all). Repeatable.", POLICY, type=parse_policy_name),
    ] = field(default_factory=list)
    check: Annotated[
        str,
        option(
            "--check",
            "ACTION",
            ("What to do if the start-up check fails: exact (answer exactly) or refuse (do not start). off: no check."),
            POLICY,
            type=one_of(("exact", "refuse", "off")),
        ),
    ] = "exact"
    check_limit: Annotated[
        float,
        option("--check-limit", "SHARE", "Highest share of blind reuse's KL that passes the check.", POLICY, min=0),
    ] = 0.3
    max_tokens: Annotated[
        Optional[int], option("--max-tokens", "N", "Generate at most N tokens per answer.", ANSWER, min=1)
    ] = None
    min_tokens: Annotated[
        int, option("--min-tokens", "N", "Recognise documents of at least N tokens.", ANSWER, min=1)
    ] = 16
    ttl: Annotated[float, option("--ttl", "S", "Lifetime in seconds of caches that set none.", COMPILING, min=1)] = (
        3600.0
    )
    leases: Annotated[
        Optional[int],
        option(
            "--leases",
            "SIZE",
            "Bytes that one tenant's caches may hold (3/4 of max_size, divided among tenants).",
            COMPILING,
            type=parse_size,
        ),
    ] = None
    learn: Annotated[
        Optional[int],
        option(
            "--learn",
            "SIZE",
            "Compile texts that requests may repeat, while none runs, up to SIZE of objects, such as 2G (off).",
            COMPILING,
            type=parse_size,
        ),
    ] = None
    pool: Annotated[
        Optional[int],
        option(
            "--pool",
            "SIZE",
            "Keep up to SIZE of KV on the device, such as 500M; 0 for none (1/4 of its memory).",
            MODEL,
            type=parse_size,
        ),
    ] = None
    keep_prefixes: Annotated[
        Optional[int],
        option(
            "--keep-prefixes",
            "SIZE",
            "Also keep up to SIZE of the pool's exact prefixes on disk (none).",
            MODEL,
            type=parse_size,
        ),
    ] = None


@command(
    app,
    "serve",
    "model",
    "device",
    "dtype",
    "store",
    "remote",
    "require_signed",
    "signing_key",
    "separator",
    "after",
    "codec",
    *SALT,
)
def run_serve(
    options: ServeOptions,
    fleet: FleetOptions,
    settings: Settings,
    more: Annotated[
        Optional[list[str]], argument("[-- VLLM-OPTION]...", "With --engine vllm: options of vllm serve.")
    ] = None,
) -> None:
    """Serve a model over HTTP: OpenAI, Anthropic and Gemini APIs.

    \b
      pic serve
      pic serve -m MODEL --store /data/pic --keys keys --host 0.0.0.0
      pic serve -m MODEL --engine vllm -- --tensor-parallel-size 2
      pic serve -m MODEL --upstream http://gpu1:8000 --upstream http://gpu2:8000
      pic serve -m MODEL --ray --replicas 4 --remote s3://bucket/pic
    """
    from pictool.engines import SERVED
    from pictool.runtime.gguf import is_gguf
    from pictool.runtime.model import require_name

    require_extra("serve", "pic serve", *_PACKAGES)
    fleet.check({name: getattr(options, field) != getattr(ServeOptions(), field) for name, field in _ALONE}, settings)
    is_vllm = options.engine == SERVED and not is_gguf(settings.model)
    if not is_vllm:
        find_engine(options.engine, model=settings.model)
    find_policy(options, settings)
    require_name(settings.model)
    check_upstream(options, fleet, settings)
    check_vllm(options, settings, fleet, is_vllm, more or [])
    serve_here(options, fleet, settings, (more or []) if is_vllm else None)


def serve_here(options: ServeOptions, fleet: FleetOptions, settings: Settings, vllm: Sequence[str] | None) -> None:
    """Answer requests until the server ends, in this process or by replicas. `vllm` are options of its own vLLM."""
    with closing(bind(options)) as listener, ExitStack() as resources:
        keys = read_tenants(options, settings)
        if not (options.upstream or fleet.ray or sys.stderr.isatty()):  # a terminal shows each step (`waiting`)
            note(f"loading {settings.model or 'embedded'} …")
        with waiting("loading the server"):
            from pictool.serve.app import make_app as make_application
            from pictool.serve.running import run, share_arenas
            from pictool.serve.start import start_backend, start_upstream  # noqa: F401 (torch, which takes seconds)
        share_arenas()
        store = open_store(settings)
        backend = resources.enter_context(opened_backend(options, fleet, settings, store, vllm, len(keys.tenants)))
        service = make_service(options, backend, store, keys, resources)
        listener.listen()  # from the note on nobody is refused
        note_address(listener, backend)
        run(make_application(service, __version__), listener, backend, service.metrics.summary)
    store.drain()


def show_requests() -> None:
    """Print a line for each request: its tenant, and what became of its prompt."""
    logger, handler = logging.getLogger("pictool.serve"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def note_address(listener: socket.socket, backend: Backend) -> None:
    if is_verbose():
        show_requests()
    host, port = listener.getsockname()[:2]
    note(f"serving {backend.model} on http://{_shown(host)}:{port}/v1 ({backend.status().policy}); Ctrl-C stops it")


def check_vllm(
    options: ServeOptions, settings: Settings, fleet: FleetOptions, is_vllm: bool, more: Sequence[str]
) -> None:
    """Refuse what vLLM has not, and its options where it is not the engine. Raises UsageError."""
    if not is_vllm:
        if more:
            raise UsageError(f"{more[0]}: vLLM options need --engine vllm")
        return
    if fleet.ray is not None:
        raise UsageError(
            "--engine vllm: cannot be used with --ray; start each vllm serve, and pass its URL with --upstream"
        )
    refuse_torch_only(options, settings, "--engine vllm", _TORCH_ONLY)
    from pictool.engines.vllm.needs import require_vllm

    require_vllm()


def make_service(
    options: ServeOptions, backend: Backend, store: Store, keys: Keys, resources: ExitStack
) -> Service:  # fmt: skip
    """The service of a backend. What sends its spans is closed with the resources."""
    from pictool.serve.service import Service, ServiceSettings, lease_share
    from pictool.serve.tracing import make_provider, shut_down

    provider = make_provider()
    if provider is not None:
        resources.callback(shut_down, provider)
    leased = options.leases or lease_share(store.max_bytes, keys)
    service_settings = ServiceSettings(options.ttl, lease_bytes=leased)
    return Service(backend, store.root, keys, service_settings, tracer_provider=provider)


def opened_backend(
    options: ServeOptions, fleet: FleetOptions, settings: Settings, store: Store, vllm: Sequence[str] | None,
    num_tenants: int,
) -> AbstractContextManager[Backend]:  # fmt: skip
    """What answers: the model in this process, replicas of it, or servers with vLLM."""
    from pictool.serve.start import start_backend, start_upstream

    backend_settings, model = make_backend_settings(options, settings), open_model(settings, options.engine)
    limit, refuses = None if options.check == "off" else options.check_limit, options.check == "refuse"
    if vllm is not None:
        from pictool.compiler.compile import CODEC

        active = options.active or _BATCHED
        backend_settings = replace(backend_settings, codec=CODEC, max_active=active, num_tenants=num_tenants)
        require_directory(model)
    if options.upstream:
        active = options.active or _BATCHED * len(options.upstream)
        backend_settings = replace(backend_settings, max_active=active, num_tenants=num_tenants)
        key = os.environ.get(_UPSTREAM_KEY)
        return closing(start_upstream(model, store, backend_settings, options.upstream, limit, refuses, key))
    if fleet.ray is not None:
        return opened_fleet(fleet, model, backend_settings, settings, limit, refuses)
    if vllm is not None:
        return fronted_vllm(options, settings, model, store, backend_settings, vllm)
    return start_backend(model, store, backend_settings, limit, refuses, note)


@contextmanager
def fronted_vllm(
    options: ServeOptions, settings: Settings, model: Model, store: Store, backend_settings: BackendSettings,
    more: Sequence[str],
) -> Iterator[Backend]:  # fmt: skip
    """A `vllm serve` of this process's own, and the router's backend for it."""
    from pictool.engines.vllm.client.process import EngineOptions, vllm_server
    from pictool.linker.grid import label_of
    from pictool.serve.start import start_upstream

    if settings.remote and without_credentials(settings.remote) != settings.remote:
        raise UsageError(
            "--remote: --engine vllm would show these credentials in its command line; set them in the environment"
        )
    limit, refuses = None if options.check == "off" else options.check_limit, options.check == "refuse"
    extra = {
        "store": str(store.root.resolve()), "policy": label_of(find_policy(options, settings)),
        "policies": list(options.allow) or None, "max_bytes": settings.max_size, "memory_bytes": settings.memory,
        "remote": settings.remote or None, "fingerprint": model.fingerprint,
        **({} if store.trust is None else store.trust.fields),
    }  # fmt: skip
    engine, key = EngineOptions(str(model.directory), model.name, model.dtype, extra, more), secrets.token_hex(32)
    with (
        vllm_server(engine, key) as own,
        closing(start_upstream(model, store, backend_settings, [own.url], limit, refuses, key, own.lives)) as backend,
    ):
        yield backend


def check_upstream(options: ServeOptions, fleet: FleetOptions, settings: Settings) -> None:
    """Refuse what a router of other servers has not, and what are no URLs. Raises UsageError."""
    if not options.upstream:
        return
    if options.engine is not None or fleet.ray is not None:
        raise UsageError(f"{'--ray' if options.engine is None else '--engine'}: cannot be used with --upstream")
    refuse_torch_only(options, settings, "--upstream", ("pool", "keep_prefixes"))
    for url in options.upstream:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--upstream {url}: must be a URL such as http://localhost:8000")


def refuse_torch_only(options: ServeOptions, settings: Settings, what: str, names: Sequence[str]) -> None:
    """Raise UsageError for an option that vLLM has not."""
    for name, value in (("codec", settings.option("codec")), *((name, getattr(options, name)) for name in names)):
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')}: cannot be used with {what}, which has its own options")


def require_directory(model: Model) -> None:
    """Raise InputError for a model that vLLM cannot load."""
    if model.directory is None:
        raise InputError(f"{model.name}: vLLM loads models from directories only; save the model to one first")


def find_policy(options: ServeOptions, settings: Settings) -> Policy:
    """The default policy: from the command line, or else from the settings, where `pic tune` writes it.

    Raises:
        InputError: no such policy; the message names the file or variable that sets it.
    """
    return options.algo or policy_of_settings(settings)


def read_tenants(options: ServeOptions, settings: Settings) -> Keys:
    """The tenants that may use the server. Without a file of keys, everybody who reaches it shares one tenant."""
    from pictool.commands.settings.salt import MAKE_ONE, is_weak
    from pictool.serve.tenants import Keys, Tenant, is_loopback, read_keys

    if options.keys is None:
        if not is_loopback(options.host):
            note(
                f"--host {options.host}: anyone who can reach this address can use the server; require keys with "
                "--keys FILE"
            )
        return Keys(default=Tenant("default", settings.salt))
    if settings.salt:
        raise UsageError("--keys: the file already has the tenants' salts; omit --salt")
    keys = read_keys(Path(options.keys))
    for tenant in sorted(keys.tenants, key=lambda tenant: tenant.name):
        if is_weak(tenant.salt):
            note(
                f"{options.keys}: the salt of {tenant.name} is weak: anyone who guesses it finds every object of "
                f"this tenant; {MAKE_ONE}"
            )
    return keys


def make_backend_settings(options: ServeOptions, settings: Settings) -> BackendSettings:
    """How the backend works."""
    from pictool.serve.backends.base import BackendSettings

    return BackendSettings(
        find_policy(options, settings), frozenset(options.allow) if options.allow else None, options.queue,
        options.active or _ACTIVE, options.max_tokens,
        options.min_tokens, codec=settings.codec, after=settings.after, name=options.name,
        learned_bytes=options.learn or 0, pool_bytes=options.pool, kept_bytes=options.keep_prefixes or 0,
        separator=settings.separator,
    )  # fmt: skip


def bind(options: ServeOptions) -> socket.socket:
    """The socket that the server listens on: taken before the model is loaded. Raises InputError."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise InputError(
            f"--host {options.host} --port {options.port}: cannot listen on this address ({error.strerror}); choose "
            "another"
        ) from error
    return listener


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
