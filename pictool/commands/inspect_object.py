"""`pic inspect OBJECT`: header, layers, text, and what its first tokens draw of its attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pictool.commands.common import open_model
from pictool.store.format import ObjectFile
from pictool.trace.object_stats import LayerStats, object_stats

if TYPE_CHECKING:
    from pictool.commands.inspect import InspectOptions
    from pictool.runtime.model import Model
    from pictool.trace.attention_sinks import AttentionSinks


SHOWN_OFFSETS = 12  # as numbers, in 80 columns
BARS = "▁▂▃▄▅▆▇█"


def inspect_object(path: Path, options: InspectOptions, *, as_json: bool) -> dict[str, Any]:
    """Show an object; returns what `--json` prints."""
    with ObjectFile(path) as file:
        found = _fields(file) | _table(file)
        if options.text:
            found["text"] = file.text()
        layers = object_stats(file) if options.layers else ()
        profile = _sinks(file, options) if options.sinks else None
        checksums = file.checksums
    if not as_json:
        _print(found, checksums, layers, profile)
    if profile is not None and options.plot:
        from pictool.trace.plots import draw_attention_sinks, save

        save(draw_attention_sinks(profile, found["key"][:12]), Path(options.plot))
    found["checksums"] = checksums
    if options.layers:
        found["layer_stats"] = [_layer_json(layer) for layer in layers]
    if profile is not None:
        found["sink_profile"] = sinks_json(profile)
    return found


def describe(path: Path) -> dict[str, Any]:
    """The header of an object, field by field, and its text."""
    with ObjectFile(path) as file:
        return _fields(file) | {"text": file.text()}


def object_json(file: ObjectFile) -> dict[str, Any]:
    """Everything that the object alone says: what `--text --layers --json` prints."""
    stats = [_layer_json(layer) for layer in object_stats(file)]
    return {**_fields(file), "text": file.text(), "checksums": file.checksums, "layer_stats": stats}


def _fields(file: ObjectFile) -> dict[str, Any]:
    meta, target = file.meta, file.meta.target
    return {
        "path": str(file.path), "key": meta.key, "architecture": target.architecture, "model": target.model,
        "tokenizer": target.tokenizer, "tokens": meta.num_tokens, "layers": target.geometry.layers,
        "kv_heads": target.geometry.kv_heads, "head_dim": target.geometry.head_dim, "dtype": target.dtype,
        "sinks": meta.sinks, "codec": meta.codec, "bytes": file.num_bytes, "layer_bytes": file.layer_bytes,
        "fixups": meta.fixups or "none",
    } | ({} if meta.parent is None else {"parent": meta.parent or "none (the first block of a chain)"})  # fmt: skip


def _table(file: ObjectFile) -> dict[str, Any]:
    """The table of fixups, a bar per token, from nothing to the highest score; nothing without one."""
    table = file.fixups()
    if table is None:
        return {}
    scores = table.astype(float)
    levels = (scores / (scores.max() or 1.0) * (len(BARS) - 1)).round().astype(int)
    return {"highest": round(scores.max(), 3), "heat": "".join(BARS[level] for level in levels)}


def _sinks(file: ObjectFile, options: InspectOptions) -> AttentionSinks:
    return profile_of(
        file, open_model(options.model, options.device, options.dtype or file.meta.target.dtype), options.first
    )


def profile_of(file: ObjectFile, model: Model, first: int | None = None) -> AttentionSinks:
    """What the first tokens of an object draw (`None`: of so many as is usual).

    Raises:
        ForeignObjectError: another model's object.
    """
    from pictool.trace.attention_sinks import NUM_INITIAL, attention_sinks

    file.meta.require(model.target, str(file.path))
    dummies = [] if model.bos_id is None else [model.bos_id] * file.meta.sinks
    return attention_sinks(model, file.tokens().tolist(), dummies, first or NUM_INITIAL)


def sinks_json(profile: AttentionSinks) -> dict[str, Any]:
    return {
        "first": profile.num_initial, "rows": profile.num_rows, "if_even": profile.uniform_share,
        "share": profile.initial_share.tolist(), "dummies": profile.dummy_share.tolist(),
        "by_offset": profile.share_by_offset.tolist(),
    }  # fmt: skip


def _layer_json(layer: LayerStats) -> dict[str, Any]:
    return {
        name: {"min": part.min, "max": part.max, "mean_norm": part.mean_norm, "first_norm": part.first_norm}
        for name, part in (("key", layer.key), ("value", layer.value))
    }


def _print(
    found: dict[str, Any], checksums: dict[str, Any], layers: tuple[LayerStats, ...], profile: AttentionSinks | None
) -> None:
    for field, value in found.items():
        print(f"{field:<13}{value}")
    if layers:
        _print_layers(layers, checksums["layers"])
    if profile is not None:
        _print_sinks(profile)


def _print_layers(layers: tuple[LayerStats, ...], checksums: list[str]) -> None:
    from pictool.commands.screen import heading, open_screen, table

    screen = open_screen()
    heading(screen, "layers: L2 norm by token (mean, first) and range; all read and checked")
    rows = []
    for index, (layer, checksum) in enumerate(zip(layers, checksums, strict=True)):
        for name, part in (("K", layer.key), ("V", layer.value)):
            numbers = (part.mean_norm, part.first_norm, part.min, part.max)
            of_layer = [str(index), name] if name == "K" else ["", name]
            rows.append([*of_layer, *(f"{number:.3g}" for number in numbers), checksum[:12] if name == "K" else ""])
    screen.print(table(["layer", "", "norm", "first", "min", "max", "checksum"], rows, left=()))


def _print_sinks(profile: AttentionSinks) -> None:
    from pictool.commands.screen import first_tokens, heading, open_screen, percent_grid

    screen = open_screen()
    rows = [f"layer {layer}" for layer in range(len(profile.initial_share))]
    heading(screen, f"% of attention: {first_tokens(profile.num_initial)}, of the {profile.num_rows} behind")
    screen.print(
        f"{100 * profile.initial_share.mean():.1f} on the mean; {100 * profile.uniform_share:.1f} if all drew alike",
        style="dim",
    )
    percent_grid(screen, profile.initial_share, rows, "h")
    if profile.dummy_share.any():
        heading(screen, "% of attention: the dummy tokens in front (not in the object)")
        percent_grid(screen, profile.dummy_share, rows, "h")
    heading(screen, "% of attention: each token of the chunk (mean of the heads)")
    percent_grid(screen, profile.share_by_offset.mean(1)[:, :SHOWN_OFFSETS], rows, "t")
