"""A model: tokenizer, fingerprint and weights, each loaded when first needed."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pictool.core import Contexts, Geometry, Identity, PromptText, Target, TokenIds
from pictool.errors import InputError, ModelError, PicError
from pictool.reading import shown, with_home
from pictool.runtime import architectures, checkpoint, fingerprint, gguf, support
from pictool.runtime.device import resolve_device, resolve_dtype
from pictool.runtime.encoder import Encoder
from pictool.runtime.machine import require_memory

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from pictool.runtime.prefill import ChunkKV
    from pictool.runtime.stack import LayerStack


EMBEDDED = {"embedded": "base", "embedded-small": "small"}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
SEPARATOR = "\n\n"  # between two documents of a prompt, where neither the user nor the model names one
DEFAULT_CUT = 16  # tokens, of a hybrid's chunk: those that the default policy computes


def api_name(name: str) -> str:
    """What an API calls a model: a folder or a GGUF file by its own name, any other as it is."""
    path = with_home(name).absolute()
    if name in EMBEDDED or not path.exists():
        return name
    return path.stem if gguf.is_gguf(name) else path.name


def embedded_path(name: str) -> Path:
    """The directory of a model that ships with the package."""
    return Path(__file__).parent.parent / "models" / EMBEDDED[name]


class Model:
    """A decoder and its tokenizer. What needs no weights (tokens, keys) does not load them.

    Attributes:
        name: what the user called it. config: of its language model; whole_config: of all, if that is in a wrapper.
        directory: of its files, or the GGUF file that has all of it; None of a model in memory.
        device: ``cpu``, ``cuda``, …. dtype: dtype of computation.
        salt: the tenant's; objects with another salt are never found.
        separator: what its prompts have between documents (`chat.template.separator_between`): a blank line, or the
            text `document_separator` of `tokenizer_config.json`.
        on_wait: called with the name of a slow step (loading weights); the step lasts as long as the returned context.
        on_note: called with a line about a text that contains something unexpected.
        engine: the name of the engine that runs it, if none is named.
    """

    engine: ClassVar[str] = "torch"
    _encoder: Encoder | None = None

    def __init__(
        self,
        name: str,
        config: PretrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        device: str,
        dtype: str,
        directory: Path | None = None,
        module: Any = None,
        salt: str = "",
    ) -> None:
        assert (directory is None) != (module is None)
        support.require_supported(config, name)
        self.name, self.whole_config, self.tokenizer = name, config, tokenizer
        self.config = architectures.text_config(config)
        self.device, self.dtype, self.directory = device, dtype, directory
        self._module, self.salt = module, salt
        self.separator = _separator_of(tokenizer, name)
        self._state: fingerprint.ModuleState | None = None  # of the module, once it is loaded
        self.on_wait: Callable[[str], AbstractContextManager[None]] = self.no_wait
        self.on_note: Callable[[str], None] = self.no_note

    @staticmethod
    def no_wait(_: str) -> AbstractContextManager[None]:
        """Tell nobody."""
        return nullcontext()

    @staticmethod
    def no_note(_: str) -> None:
        """Tell nobody."""

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {self.device}, {self.dtype})"

    @cached_property
    def _files(self) -> fingerprint.WeightFiles | None:
        """The files of its weights; None of a model that was made in memory."""
        return None if self.directory is None else fingerprint.WeightFiles(self.directory)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of architecture and weights (hex)."""
        if self._files is not None:
            with self.on_wait(f"hashing the weights of {self.name}"):
                return self._files.fingerprint(self.whole_config)
        return fingerprint.module_fingerprint(self.module)

    def require_unchanged(self) -> None:
        """Refuse to go on with weights that are not those of the fingerprint any more, as far as that is noticed.

        It costs a few stats, and a look at the tensors that are loaded (`fingerprint.ModuleState`).

        Raises:
            ModelError: says what changed, and the remedy.
        """
        _ = self.fingerprint  # an engine with weights of its own may not have needed it before
        if self._files is not None:
            self._files.require_unchanged()
        if self._state is not None:
            self._state.require_unchanged()

    def require_storable(self) -> None:
        """`require_unchanged`, and refuse hooks and adapters: before what was computed is stored.

        Raises:
            ModelError: says what changed, and the remedy.
        """
        self.require_unchanged()
        if self._state is not None:
            self._state.require_storable()

    @cached_property
    def target(self) -> Target:
        """What objects for this model are compiled for."""
        tokenizer = fingerprint.tokenizer_fingerprint(self.tokenizer)
        return Target(self.config.model_type, self.fingerprint, tokenizer, self.dtype, self.geometry)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of its weights, or the directory that they are in; none of a model in memory."""
        return () if self.directory is None else (self.directory,)

    @property
    def is_embedded(self) -> bool:
        """Whether it ships with the package, and so knows one invented world."""
        return self.directory is not None and self.directory in map(embedded_path, EMBEDDED)

    # What a model that another library runs does in its own way

    @property
    def is_of_transformers(self) -> bool:
        """Whether it is a module of `transformers`, whose layers are run one by one."""
        return self.own_link is None

    @property
    def own_link(self) -> Callable[[Any], Any] | None:
        """What computes a prepared link (`linker.link.Prepared` to `Linked`) in place of the layers of `stack`."""
        return None

    def require_no_states(self, what: str) -> None:
        """Refuse what is not done with hybrids, as `what` says. Raises ModelError."""
        if self.geometry.states is not None:
            architectures.require_no_states(self.config, what)

    def links(self, policy: Any) -> bool:
        """Whether a policy can be linked (`require_policy`)."""
        try:
            self.require_policy(policy)
        except InputError:
            return False
        return True

    def require_policy(self, policy: Any) -> None:
        """Refuse a policy that cannot be linked, nor what takes its place. Raises InputError: says why."""
        self.linkable(policy)

    def linkable(self, policy: Any) -> Any:
        """The policy, or what takes its place for this model. Raises InputError: neither's rows can be computed."""
        try:
            self._require_rows(policy)
        except InputError:
            if policy.fallback is None:
                raise
            policy = policy.fallback
            self._require_rows(policy)
        return policy

    def _require_rows(self, policy: Any) -> None:
        """Refuse a policy whose rows cannot be computed. Raises InputError: says why."""
        needs = policy.needs
        if self.geometry.states is not None and needs.objects and needs.cut is None:
            raise InputError(
                f"{policy.name}: {self.name} is a hybrid, whose linear layers have states only at cuts that are fixed "
                "before the link; use auto, full, naive, legolink or prefix"
            )

    def prefill(
        self, chunks: Sequence[Sequence[int]], before: Sequence[Sequence[int]] = (), alone: bool = False
    ) -> Iterator[tuple[int, ChunkKV]]:
        """Compute each chunk on its own, for objects (`prefill_chunks`)."""
        from pictool.runtime.prefill import prefill_chunks

        return prefill_chunks(self.stack, chunks, before, alone)

    def next_logits(self, tokens: Sequence[int]) -> Tensor:
        """The logits after each of these tokens, without a prompt before them: float32 [n, vocab]."""
        from pictool.runtime.prefill import last_hidden

        self.require_readable(len(tokens))
        return self.stack.logits(last_hidden(self.stack, tokens)[1][0])

    def require_readable(self, num_tokens: int) -> None:
        """Refuse a text without tokens, or of more than the model has positions. Raises InputError."""
        if not 0 < num_tokens <= self.max_positions:
            raise InputError(f"{num_tokens} tokens: {self.name} accepts 1 to {self.max_positions}")

    def with_salt(self, salt: str) -> Model:
        """The same model, with all that is loaded of it, for another tenant."""
        _ = self.stack, self.target, self.eos_ids, self.encoder
        other = copy(self)
        other.salt = salt
        return other

    def key(self, tokens: Sequence[int] | TokenIds, codec: str, cut: int | None = None, after: Contexts = ()) -> str:
        """The key of an object for this model (`Target.key`), in its salt."""
        return self.identify(tokens, codec, cut, after).key

    def identify(
        self, tokens: Sequence[int] | TokenIds, codec: str, cut: int | None = None, after: Contexts = ()
    ) -> Identity:
        """The same, with what an object's header says of the salt (`Target.identify`)."""
        return self.target.identify(tokens, codec, self.salt, self.cut_of(cut), after)

    def cut_of(self, cut: int | None = None) -> int | None:
        """The cut of a hybrid's objects, of those that were compiled for `cut`; None of every other model.

        It is 0, or at least as long as the convolution reads back: what follows is then exact in the first layer.
        """
        states = self.geometry.states
        if states is None or cut == 0:
            return None if states is None else 0
        return max(DEFAULT_CUT if cut is None else cut, states.columns)

    @cached_property
    def geometry(self) -> Geometry:
        return architectures.geometry_of(self.config)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's K and V through all layers, as objects hold them."""
        return self.geometry.layers * self.geometry.width * self.torch_dtype.itemsize

    @property
    def max_positions(self) -> int:
        return support.max_positions(self.config)

    @property
    def bos_id(self) -> int | None:
        bos: int | None = self.tokenizer.bos_token_id
        return self.config.bos_token_id if bos is None else bos

    @property
    def is_routed_by_rounding(self) -> bool:
        """Whether a router's near ties are decided by rounding: of experts in half precision."""
        return self.dtype != "float32" and hasattr(self.config, "output_router_logits")

    @cached_property
    def module(self) -> Any:
        """The `transformers` model on its device, for inference, with our attention function."""
        import torch

        support.require_transformers()
        from pictool.runtime import attention, products

        if self._module is None:
            _ = self.fingerprint  # first: it is compared with what is loaded
            with self.on_wait(self._loading_text()):
                self._module = self._read_weights(attention.NAME)
        # Moved, not cast: the weights have their dtype, and frequencies of RoPE are float32 in every dtype.
        module = self._module.to(device=torch.device(self.device)).eval()
        module.requires_grad_(False)
        module.set_attn_implementation(attention.NAME)
        products.use_fastest(module)
        self._state = fingerprint.ModuleState(module, self.name)
        return module

    def _loading_text(self) -> str:
        """What `on_wait` is called with: of quantized weights, how much memory they will take."""
        if checkpoint.method_of(self.whole_config) is None:
            return f"loading the weights of {self.name}"
        needed = checkpoint.num_weights(self.whole_config) * self.torch_dtype.itemsize
        return f"dequantizing the weights of {self.name} to {self.dtype} ({needed / 1e9:.1f} GB)"

    def _read_weights(self, attention: str) -> Any:
        """The model of `directory`. Missing weights are an error (transformers would initialise them at random)."""
        assert self.directory is not None and self._files is not None
        with _loading(f"{self.name}: the weights cannot be loaded"), self._files.loading(), _no_bars():
            num_weights = checkpoint.require_weights(self.directory, self.whole_config, self.name)
            require_memory(num_weights * self.torch_dtype.itemsize, self.name, self.dtype, self.device)
            is_quantized = checkpoint.method_of(self.whole_config) is not None
            config = checkpoint.to_dequantize(self.whole_config) if is_quantized else self.whole_config
            module, info = architectures.auto_class(config).from_pretrained(
                **checkpoint.source_of(self.directory), config=config, dtype=self.torch_dtype,
                attn_implementation=attention, ignore_mismatched_sizes=True, output_loading_info=True,
                trust_remote_code=False,
            )  # fmt: skip
            if is_quantized:
                module = checkpoint.plain_module(module, self.whole_config, self.torch_dtype)
        if wrong := sorted([*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]):
            raise ModelError(
                f"{self.name}: {len(wrong)} weights that config.json describes are missing or have a different shape, "
                f"such as {wrong[0]}; {checkpoint.COPY}"
            )
        architectures.keep_language_model(module)
        return module

    @cached_property
    def stack(self) -> LayerStack:
        """The decoder layers, to be run one at a time."""
        from pictool.runtime.stack import LayerStack

        return LayerStack(self.module, self.config, self.geometry, self.device, self.torch_dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer: the generation config's, or the tokenizer's."""
        ids: Any = None
        if self.directory is not None and (self.directory / "generation_config.json").exists():
            ids = checkpoint.read_json(self.directory / "generation_config.json").get("eos_token_id")
        if ids is None:
            ids = self.config.eos_token_id if self.config.eos_token_id is not None else self.tokenizer.eos_token_id
        listed = [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
        if not all(type(token) is int and token >= 0 for token in listed):
            raise ModelError(
                f"{self.name}: eos_token_id is {shown(ids)}, not a token id or a list of them; {checkpoint.COPY}"
            )
        return frozenset(listed)

    @cached_property
    def _image_tokens(self) -> frozenset[int]:
        return architectures.image_tokens(self.whole_config)

    @property
    def encoder(self) -> Encoder:
        """What tokenizes by its tokenizer as it is now."""
        if self._encoder is None or self._encoder.tokenizer is not self.tokenizer:
            self._encoder = Encoder(self.tokenizer)
        return self._encoder

    def encode(self, text: str | PromptText) -> tuple[int, ...]:
        """Token ids of a text, without special tokens before and after it (rule 1); only a `PromptText` may name some.

        Raises:
            ModelError: a tokenizer that fails, or gives tokens that the model does not have.
            InputError: a marker in the text that cannot be told from a control token.
        """
        with _loading(f"{self.name}: the tokenizer (tokenizer.json) fails"):
            ids = self.encoder.encode(text, self.salt)
        if images := self._image_tokens.intersection(ids):
            token = self.tokenizer.decode([min(images)])
            raise ModelError(
                f"{self.name}: the text contains {shown(token)}, an image placeholder; only text is supported"
            )
        if ids and max(ids) >= self.config.vocab_size:
            raise ModelError(
                f"{self.name}: the tokenizer produced token {max(ids)}, but the model has {self.config.vocab_size} "
                "tokens; put the model's own tokenizer into its directory"
            )
        return ids


def _separator_of(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """What a model was trained to read between documents, if its tokenizer says it. Raises ModelError: no text."""
    separator = getattr(tokenizer, "init_kwargs", {}).get("document_separator", SEPARATOR)
    if not isinstance(separator, str):
        raise ModelError(
            f"{name}: document_separator of tokenizer_config.json is {shown(separator)}, not a string; correct it"
        )
    return separator


@contextmanager
def _loading(problem: str) -> Iterator[None]:
    """Turn whatever a library raises on a model's files into a `ModelError`: their parsers have no family of errors."""
    try:
        yield
    except PicError:
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # of a library in Rust, and no `Exception`
        if not (is_panic or isinstance(error, Exception)):
            raise
        raise ModelError(f"{problem} ({checkpoint.reason(error)}); {checkpoint.COPY}") from error


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without the progress bars of `transformers`: who shows one has `Model.on_wait`."""
    from transformers import modeling_gguf_pytorch_utils as of_gguf
    from transformers.utils.logging import set_tqdm_hook

    before = set_tqdm_hook(lambda make, values, options: make(*values, **{**options, "disable": True}))
    bar, of_gguf.tqdm = of_gguf.tqdm, lambda tensors, **_: tensors  # has no hook
    try:
        yield
    finally:
        set_tqdm_hook(before)
        of_gguf.tqdm = bar


def local_directory(name: str | None) -> Path | None:
    """The directory of a model that is here: an embedded one or a path; None for one of the hub."""
    name = name or os.environ.get("PIC_MODEL") or "embedded"
    path = embedded_path(name) if name in EMBEDDED else with_home(name)
    return path if path.is_dir() else None


def require_name(name: str | None) -> None:
    """Refuse what can be the name of no model, without importing what loads one.

    Raises:
        ModelError: no directory of a model, and no name of the hub's.
    """
    name = name or os.environ.get("PIC_MODEL") or "embedded"
    if gguf.is_gguf(name):
        gguf.find_files(name)
        return
    directory, path = local_directory(name), with_home(name)
    if directory is not None:
        if not (directory / "config.json").exists():
            raise ModelError(f"{name}: not a model directory (no config.json); choose another")
    elif path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"{name}: not a model directory; choose one with a config.json{_like(name)}")
    elif "/" not in name and _like(name):  # a name of the hub's has its owner's
        raise ModelError(f"{name}: no such model{_like(name)}")


def _like(name: str) -> str:
    """A model here whose name is nearly this one, as the end of a message."""
    path = with_home(name)
    beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    known = (*EMBEDDED, gguf.PACKAGED) if "/" not in name else ()
    near = difflib.get_close_matches(path.name, [*known, *beside], 1, 0.75)
    return f"; did you mean {name.removesuffix(path.name)}{near[0]}?" if near else ""


def _find_directory(name: str) -> Path:
    """The directory of an embedded model, of a path, or of a hub name (fetched by huggingface_hub if need be), or a
    GGUF file.
    """
    require_name(name)
    if gguf.is_gguf(name):
        return gguf.whole_file(name)
    if (directory := local_directory(name)) is not None:
        return directory
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{name}: not a directory, and not found on the Hub ({checkpoint.reason(error)}){_like(name)}"
        ) from error


def _load_config_and_tokenizer(name: str, directory: Path) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    is_file, source = directory.is_file(), checkpoint.source_of(directory)
    if not is_file:
        checkpoint.require_files(directory)
        support.require_known(checkpoint.read_json(directory / "config.json").get("model_type"), name)
    with _loading(f"{name}: {'the GGUF file' if is_file else 'config.json'} cannot be used"):
        config = AutoConfig.from_pretrained(**source, trust_remote_code=False)
        support.require_supported(config, name)
        support.require_sound(config, name)
        checkpoint.require_loadable(config, name)
    if not (is_file or any((directory / file).exists() for file in _TOKENIZERS)):
        raise ModelError(f"{name}: the directory has no tokenizer (tokenizer.json); save the model's tokenizer into it")
    with _loading(f"{name}: the tokenizer cannot be loaded"):
        return config, AutoTokenizer.from_pretrained(**source, trust_remote_code=False)


def load_model(name: str | None = None, device: str = "auto", dtype: str = "auto", salt: str = "") -> Model:
    """Open a model for torch: an embedded one, a `transformers` directory, a hub name, or a GGUF file, which is
    dequantized (`open_gguf` leaves it to llama.cpp).

    Args:
        name: default `PIC_MODEL`, else ``embedded``.
        device: ``auto`` (an accelerator, if there is one), ``cpu``, ``cuda`` (ROCm too), ``cuda:1``, ``xpu``, ``mps``.
        dtype: ``auto`` (float32 on CPU, else the checkpoint's), ``float32``, ``bfloat16`` or ``float16``.
        salt: separates tenants that share a store: it is part of every object's key.

    Raises:
        ModelError: not a model, no tokenizer, or an architecture that is not supported (named).
    """
    name = name or os.environ.get("PIC_MODEL") or "embedded"
    directory = _find_directory(name)
    config, tokenizer = _load_config_and_tokenizer(name, directory)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device, config)
    return Model(name, config, tokenizer, device, dtype, directory=directory, salt=salt)


def wrap_model(module: Any, tokenizer: PreTrainedTokenizerBase, name: str = "in-memory", salt: str = "") -> Model:
    """A `transformers` causal model in memory, on its device and in its dtype; its attention function is replaced.

    Its weights must stay as they are. `fingerprint.ModuleState` says which changes are noticed, and refused, before
    something is linked or stored; what is not noticed is stored under the key of the weights that it was wrapped with.

    Raises:
        ModelError: an architecture that is not supported, a hook, or an adapter.
    """
    fingerprint.require_plain(dict(module.named_modules()), name)
    parameter = next(module.parameters())
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Model(name, module.config, tokenizer, str(parameter.device), dtype, module=module, salt=salt)


def speculative_name(model: Model) -> str | None:
    """The speculative model of `model`, if it is known: the embedded one has `embedded-small`."""
    return "embedded-small" if model.directory == embedded_path("embedded") else None


def open_speculative(name: str, target: Model) -> Model:
    """Load a speculative model, once per process, in the target's dtype and on its device.

    Raises:
        ModelError: not a model, or not supported.
    """
    return _open(name, target.device, target.dtype)


@lru_cache(maxsize=2)
def _open(name: str, device: str, dtype: str) -> Model:
    return load_model(name, device, dtype)
