"""The tokenizer files of a folder, and the end token that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from pagedctl.errors import ModelError
from pagedctl.models.json_object import read_object
from pagedctl.models.reader import ConfigReader, SpecWarning, shown

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """Paths of the tokenizer files that exist; None for each that does not."""

    tokenizer_json: Path | None = None
    tokenizer_config: Path | None = None
    chat_template: Path | None = None


def find_tokenizer_files(folder: Path | None) -> TokenizerFiles:
    """Which of the three files *folder* has; none at all for a model without a folder."""
    if folder is None:
        return TokenizerFiles()
    return TokenizerFiles(
        tokenizer_json=_existing(folder / TOKENIZER_JSON),
        tokenizer_config=_existing(folder / TOKENIZER_CONFIG),
        chat_template=_existing(folder / CHAT_TEMPLATE),
    )


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None


def tokenizer_eos(
    files: TokenizerFiles, input_vocab: int
) -> tuple[tuple[int, ...], tuple[SpecWarning, ...]]:
    """The id of tokenizer_config.json's ``eos_token``, and what there is to say about it.

    The token is a string, or an object with ``content``. Its id is looked up in
    ``added_tokens_decoder``, then in tokenizer.json. An id that cannot be found, or that is
    outside the vocabulary (the embedding may be smaller than the tokenizer), is left out
    with a warning. Raises :class:`ModelError` for a file that cannot be read as JSON.
    """
    if files.tokenizer_config is None:
        return (), ()
    reader = ConfigReader(read_object(files.tokenizer_config), where=str(files.tokenizer_config))
    token = _eos_text(reader)
    if reader.faults:
        raise ModelError.of(reader.faults)
    if token is None:
        return (), ()
    token_id = _id_in_decoder(reader, token)
    if token_id is None and files.tokenizer_json is not None:
        token_id = _id_in_tokenizer(files.tokenizer_json, token)
    if token_id is None:
        text = f"the id of eos_token {shown(token)} is in neither tokenizer file; it is left out"
        reader.warn("eos_unresolved", "eos_token", text)
        return (), tuple(reader.warnings)
    if token_id >= input_vocab:
        text = f"eos_token {shown(token)} is id {token_id}, outside the vocabulary of "
        reader.warn("eos_unresolved", "eos_token", f"{text}{input_vocab}; it is left out")
        return (), tuple(reader.warnings)
    return (token_id,), ()


def _eos_text(reader: ConfigReader) -> str | None:
    if isinstance(reader.get("eos_token"), dict):
        block = reader.mapping("eos_token") or {}
        return reader.child(block, "eos_token").text("content")
    return reader.text("eos_token")


def _id_in_decoder(reader: ConfigReader, token: str) -> int | None:
    """``added_tokens_decoder``: {"151645": {"content": "<|im_end|>", ...}, ...}."""
    decoder = reader.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        return None
    for key, entry in decoder.items():
        if isinstance(entry, dict) and entry.get("content") == token and key.isdecimal():
            return int(key)
    return None


def _id_in_tokenizer(path: Path, token: str) -> int | None:
    """``added_tokens`` of tokenizer.json, else the model's own vocabulary."""
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ModelError(
            f"{path.name} cannot be read: {error}",
            where=str(path),
            rule="tokenizer.json is a JSON object",
            remedy="fetch the file again",
        ) from None
    if not isinstance(content, dict):
        return None
    for entry in content.get("added_tokens") or ():
        if isinstance(entry, dict) and entry.get("content") == token:
            return _token_id(entry.get("id"))
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return _token_id(vocabulary.get(token)) if isinstance(vocabulary, dict) else None


def _token_id(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return value
