"""What kreuzberg reads: kinds of files for which we have no reader of our own. It does no OCR and keeps no cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from pictool.documents.base import HEADING, HEADING_END, Reader, UnreadableError

if TYPE_CHECKING:
    from kreuzberg import ExtractionResult


class Extracting(Reader):
    """A reader that reads with kreuzberg."""

    modules: ClassVar[tuple[str, ...]] = ("kreuzberg",)

    def prepare(self) -> None:
        extract(b"a", "text/plain")  # starts its threads


def extract(data: bytes, mime: str, has_structure: bool = True) -> ExtractionResult:
    """Raises UnreadableError: damaged."""
    import kreuzberg

    config = kreuzberg.ExtractionConfig(
        use_cache=False, enable_quality_processing=False, include_document_structure=has_structure,
        concurrency=kreuzberg.ConcurrencyConfig(max_threads=1),
    )  # fmt: skip
    try:
        return kreuzberg.extract_bytes_sync(data, mime, config)
    except (kreuzberg.KreuzbergError, RuntimeError) as error:
        raise UnreadableError(f"is damaged ({' '.join(str(error).split())[:120]})") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what Rust's panics are in Python; no Exception
            raise
        raise UnreadableError("is damaged (its reader gave up)") from error


def text_of(result: ExtractionResult) -> str:
    """All text in its order, with marked headings (`marked_sections`), lines with tabs for rows."""
    nodes = [] if result.document is None else result.document["nodes"]
    return "\n".join(line for node in nodes for line in _lines(node["content"]))


def _lines(content: Any) -> Iterator[str]:
    match content["node_type"]:
        case "heading":
            yield f"{HEADING}{content['text']}{HEADING_END}"
        case "table":
            rows = dict[int, list[str]]()
            for cell in content["grid"]["cells"]:
                rows.setdefault(cell["row"], []).append(" ".join(cell["content"].split()))
            yield from map("\t".join, rows.values())
        case "metadata_block":
            yield from (": ".join(entry) for entry in content["entries"])
        case _:
            yield content.get("text") or ""
