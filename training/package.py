"""Writing a trained model and its tokenizer into the package, as `transformers` directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

SEPARATOR = "\n"  # pages of the training texts end in a line break, and follow one another
MODELS = Path(__file__).parent.parent / "pictool" / "models"


def write_model(model: Any, tokenizer: Tokenizer, name: str) -> None:
    """Save model and tokenizer to `pictool/models/<name>`."""
    directory = MODELS / name
    model.config._attn_implementation = "sdpa"
    model.save_pretrained(directory)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        model_max_length=model.config.max_position_embeddings, clean_up_tokenization_spaces=False,
        document_separator=SEPARATOR,
    )  # fmt: skip
    wrapped.save_pretrained(directory)


def save_half(model: Any, tokenizer: Tokenizer, directory: Path, bos: str | None, positions: int) -> None:
    """Save a model as a directory of `transformers`: float16 weights that load as float32."""
    model.config._attn_implementation = "sdpa"
    model.half().save_pretrained(directory)
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float32"}, indent=2) + "\n")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token="</s>", pad_token="<pad>",
        model_max_length=positions, clean_up_tokenization_spaces=False,
        document_separator=SEPARATOR,
    )  # fmt: skip
    wrapped.save_pretrained(directory)
