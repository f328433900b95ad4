"""What each token adds to a text, in bytes that no later token changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import tokenizers

from pagedctl.models.text_stream import REPLACEMENT, Piece, PieceOf

ANCHOR = "a"
"""Stands for the tokens before one, where it counts that they have text and not which."""

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CACHED_PIECES = 1 << 18
"""More than the tokens of any vocabulary that is common today."""

_LOOK_BACK = frozenset({"BPEDecoder", "CTC"})
"""Decoders in which a token's text depends on the token before it."""


def pieces_of(backend: tokenizers.Tokenizer) -> PieceOf:
    """(context, token id) -> what the token adds behind that context, and the next context.

    A context is None before the first token that is not special, and holds after it what the
    tokenizer's decoder looks at. Special tokens, and ids that the tokenizer lacks, add
    nothing. The pieces of a sequence, joined and read as UTF-8 with one U+FFFD for each part
    that is none, are the sequence's text.

    This is the text of the tokenizers library, but for one thing: where a row of byte tokens
    (<0xE6>) is not UTF-8 as a whole, the library turns each byte of the row into U+FFFD, those
    of complete characters too. Here a complete character stays, whatever comes after it.

    Example: with a Metaspace decoder ``piece_of(None, id of "▁Tom")`` is ``(b"Tom", "a")`` and
    ``piece_of("a", id of "▁Tom")`` is ``(b" Tom", "a")``.
    """
    return lru_cache(CACHED_PIECES)(_Pieces(backend).piece)


class _Pieces:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = backend.decoder
        self._string_of = backend.id_to_token
        self._text_of = " ".join if decoder is None else decoder.decode
        added = backend.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        kinds = frozenset() if decoder is None else frozenset(_kinds(decoder))
        self._bytes_of_chars = _BYTE_LEVEL if "ByteLevel" in kinds else {}
        self._has_byte_tokens = "ByteFallback" in kinds
        self._looks_back = not _LOOK_BACK.isdisjoint(kinds)

    def piece(self, context: str | None, token_id: int) -> Piece:
        token: str | None = self._string_of(token_id)
        if token is None or token in self._special:
            return b"", context
        added = self._bytes(context, token)
        if self._looks_back:
            return added, token
        # Tokens that have no text at the start of a text decide what the next one loses.
        return added, ANCHOR if added or context == ANCHOR else (context or "") + token

    def _bytes(self, context: str | None, token: str) -> bytes:
        text = self._added_text(context, token)
        if REPLACEMENT not in text:
            return text.encode()
        byte_token = BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte_token is not None:
            return bytes.fromhex(byte_token[1])
        if self._bytes_of_chars.keys() >= set(token):
            return bytes(self._bytes_of_chars[char] for char in token)
        return text.encode()

    def _added_text(self, context: str | None, token: str) -> str:
        if context is None:
            return self._text_of([token])
        return self._text_of([context, token])[len(self._text_of([context])) :]


def _kinds(decoder: Any) -> Iterator[str]:
    """The types in a decoder, as tokenizer.json names them."""
    rest = [json.loads(decoder.__getstate__())]
    while rest:
        part = rest.pop()
        rest.extend(part.get("decoders", ()))
        yield part["type"]


def _byte_level_alphabet() -> dict[str, int]:
    """The byte that a character of a byte-level token stands for.

    Printing bytes stand for themselves; the others follow from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)).difference(printing))
    return {chr(byte): byte for byte in printing} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_LEVEL = _byte_level_alphabet()
