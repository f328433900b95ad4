"""The text of a completion, token by token, behind its prompt. No torch, no tokenizers."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence

Piece = tuple[bytes, str | None]
PieceOf = Callable[[str | None, int], Piece]
"""See :func:`pagedctl.models.token_pieces.pieces_of`."""

REPLACEMENT = "\ufffd"
SURROGATES, BEHIND_SURROGATES = b"\xed\xa0", b"\xee"
MOST_PENDING_BYTES = 3
"""The longest beginning of a UTF-8 character that is not yet the character."""


class TextStream:
    """What output tokens add to the text of a prompt.

    The bytes of a character that is not complete are held back until it is, or until it can
    no longer be one: it is U+FFFD then. So is one that the output ends in; one that the
    prompt ends in is the prompt's, unless the output completes it. The time of a token does
    not depend on what came before it.

    Example, byte-level tokens::

        stream = tokenizer.text_stream(prompt_token_ids)
        [stream.push(token) for token in (ids of " Tom", E6, BC, A2, E6)]
        # [" Tom", "", "", "漢", ""], and then stream.finish() is "\\ufffd"
    """

    def __init__(self, piece_of: PieceOf, prompt_token_ids: Sequence[int]) -> None:
        self._piece_of = piece_of
        self._context, tail = _end_of(piece_of, prompt_token_ids)
        self._pending = _decode_complete(tail)[1]
        self._prompt_is_cut = bool(self._pending)

    def push(self, token_id: int) -> str:
        """The text that is complete now and was not before *token_id*, often none."""
        piece, self._context = self._piece_of(self._context, token_id)
        text, self._pending = _decode_complete(self._pending + piece)
        return self._without_prompt(text)

    def finish(self) -> str:
        """What was held back. No token may be pushed after this."""
        pending, self._pending = self._pending, b""
        return self._without_prompt(pending.decode("utf-8", "replace"))

    def _without_prompt(self, text: str) -> str:
        """*text* without the U+FFFD that ends the text of a prompt that is cut."""
        if text and self._prompt_is_cut:
            self._prompt_is_cut = False
            return text.removeprefix(REPLACEMENT)
        return text


def _decode_complete(found: bytes) -> tuple[str, bytes]:
    """The text of *found*, and the bytes at its end that may still become a character."""
    text, size = utf_8_decode(found, "replace", False)
    pending = found[size:]
    if SURROGATES <= pending < BEHIND_SURROGATES:  # Python waits for the rest; UTF-8 has none
        return text + pending.decode("utf-8", "replace"), b""
    return text, pending


def _end_of(piece_of: PieceOf, token_ids: Sequence[int]) -> tuple[str | None, bytes]:
    """The context behind *token_ids*, and their last bytes, enough to hold a cut character."""
    start, size = len(token_ids), 0
    while start and size < MOST_PENDING_BYTES:
        start -= 1
        size += len(piece_of(None, token_ids[start])[0])
    context, tail = None, b""
    for token_id in token_ids[start:]:
        piece, context = piece_of(context, token_id)
        tail += piece
    return context, tail
