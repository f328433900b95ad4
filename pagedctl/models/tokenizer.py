"""The tokenizer of a snapshot: text to token ids and back, and chat messages to ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import tokenizers

from pagedctl.errors import Fault, ModelError, RequestError
from pagedctl.models.chat_template import ChatTemplate, read_chat_template
from pagedctl.models.json_object import read_object
from pagedctl.models.text_stream import TextStream
from pagedctl.models.token_pieces import pieces_of
from pagedctl.models.tokenizer_files import TokenizerFiles

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """A snapshot's tokenizer.json, and its chat template.

    tokenizer.json alone decides which special tokens stand around a text: ``add_bos_token`` of
    tokenizer_config.json has no say, as in transformers.

    Example: ``load_tokenizer(resolved.tokenizer).encode("Tom has 3 apples")``.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        """Read tokenizer.json of *files*; ModelError if it cannot be used."""
        self._backend = _backend(files)
        self._files = files
        self._piece_of = pieces_of(self._backend)

    def encode(self, text: str) -> list[int]:
        """The ids of *text*, with the special tokens that the tokenizer puts around a text.

        Raises RequestError where the tokenizer cannot encode it.
        """
        return self._ids(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of *messages* ([{role, content}]) through the model's chat template.

        The template's text holds its special tokens, so none is added to it. Raises
        RequestError where there is no template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise _no_template(self._files)
        text = self._chat_template.render(messages)
        return self._ids(text, add_special_tokens=False)

    def text_stream(self, prompt_token_ids: Sequence[int]) -> TextStream:
        """The text that output tokens add to the text of *prompt_token_ids*, one by one."""
        return TextStream(self._piece_of, prompt_token_ids)

    def completion_text(self, prompt_token_ids: Sequence[int], token_ids: Iterable[int]) -> str:
        """The text that *token_ids* add to the text of *prompt_token_ids*.

        Special tokens are skipped, nothing is cleaned up, and a space that a tokenizer drops at
        the start of a text stays. Bytes that are no UTF-8 text come out as U+FFFD, those of a
        character that is cut at the end too. Only the last tokens of the prompt are read.
        """
        stream = self.text_stream(prompt_token_ids)
        parts = [stream.push(int(token)) for token in token_ids]
        return "".join((*parts, stream.finish()))

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # the library raises nothing narrower
            raise _not_encoded(self._files, error) from None
        return ids

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        return read_chat_template(self._files, _special_tokens(self._files))


def load_tokenizer(files: TokenizerFiles) -> Tokenizer | None:
    """The tokenizer of a snapshot; None if it has no tokenizer.json."""
    return None if files.tokenizer_json is None else Tokenizer(files)


def _backend(files: TokenizerFiles) -> tokenizers.Tokenizer:
    """tokenizer.json as it is, except that truncation and padding stored in it are off."""
    try:
        backend = tokenizers.Tokenizer.from_file(str(files.tokenizer_json))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(
            f"tokenizer.json cannot be used: {error}",
            where=str(files.tokenizer_json),
            rule="tokenizer.json is a file of the tokenizers library",
            remedy="fetch the file again",
        ) from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _special_tokens(files: TokenizerFiles) -> dict[str, str]:
    """Name -> text; in tokenizer_config.json each is a text, or an object with ``content``."""
    config = {} if files.tokenizer_config is None else read_object(files.tokenizer_config)
    found: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _not_encoded(files: TokenizerFiles, error: Exception) -> RequestError:
    fault = Fault(
        what=f"the text cannot be encoded: {error}",
        where=str(files.tokenizer_json),
        rule="a prompt is text (UTF-8) that the model's tokenizer knows",
        remedy="change the text, or give prompt_token_ids",
    )
    return RequestError.of_kind("bad_field", [fault])


def _no_template(files: TokenizerFiles) -> RequestError:
    fault = Fault(
        what="this model has no chat template",
        where=str(files.tokenizer_json),
        rule="messages need chat_template.jinja, or chat_template in tokenizer_config.json",
        remedy="give prompt or prompt_token_ids",
    )
    return RequestError.of_kind("bad_field", [fault])
