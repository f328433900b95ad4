"""Small tokenizers of every kind whose texts differ, built with the library and read from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from pagedctl.models.locate import EMBEDDED_FOLDER
from pagedctl.models.tokenizer import Tokenizer, load_tokenizer
from pagedctl.models.tokenizer_files import find_tokenizer_files

SPECIAL = ["<s>", "</s>"]
CORPUS = ["Tom has 3 apples and buys 4.", "naïve → 漢字 🙂", "  spaces\n\nstay "] * 5
WORDS = ["Tom", "has", "apples", "漢字", "🙂", "\ufffd", "a", ".", " ", "é", "don", "'t", "<0x41>"]
PIECES = ["", *(word for text in WORDS for word in (text, "▁" + text)), "▁", "▁▁", "▁a▁"]


def byte_level() -> tokenizers.Tokenizer:
    """BPE over bytes, with added tokens that are text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(text) for text in ("<think>", "漢字 is added", "é", " \ufffd")])
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2: byte fallback, and one space dropped at the start of a text."""
    return _with_byte_tokens(decoders.Strip(" ", 1, 0))


def sentencepiece_with_every_space() -> tokenizers.Tokenizer:
    """As Gemma: byte fallback, nothing dropped."""
    return _with_byte_tokens()


def metaspace() -> tokenizers.Tokenizer:
    """As T5: the first token's spaces dropped."""
    return _of_words(PIECES, decoders.Metaspace())


def metaspace_with_byte_tokens() -> tokenizers.Tokenizer:
    return _of_words(
        [*_byte_tokens(), *PIECES],
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    )


def wordpiece() -> tokenizers.Tokenizer:
    pieces = [*WORDS, *("##" + word for word in WORDS)]
    return _of_words(pieces, decoders.WordPiece(cleanup=True))


def words() -> tokenizers.Tokenizer:
    """No decoder: the tokens with spaces between."""
    return _of_words(["", *WORDS], None)


def word_ends() -> tokenizers.Tokenizer:
    """As GPT-1: a word's end shows as a space once another token follows."""
    pieces = [*WORDS, *(word + "</w>" for word in WORDS), "</w>"]
    return _of_words(pieces, decoders.BPEDecoder())


BUILDERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    one.__name__: one
    for one in (
        byte_level,
        sentencepiece,
        sentencepiece_with_every_space,
        metaspace,
        metaspace_with_byte_tokens,
        wordpiece,
        words,
        word_ends,
    )
}
EMBEDDED = "embedded"
BYTE_LEVEL = ("byte_level", EMBEDDED)
BYTE_TOKENS = ("sentencepiece", "sentencepiece_with_every_space", "metaspace_with_byte_tokens")


class Specimen:
    """One tokenizer: as the product reads it, and the library's own for reference."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        if name == EMBEDDED:
            folder = EMBEDDED_FOLDER
        else:
            BUILDERS[name]().save(str(folder / "tokenizer.json"))
        self.library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        found = load_tokenizer(find_tokenizer_files(folder))
        assert found is not None
        self.tokenizer: Tokenizer = found
        self.size = self.library.get_vocab_size()

    def id_of(self, token: str) -> int:
        found = self.library.token_to_id(token)
        assert found is not None, token
        return int(found)

    def bytes_ids(self, data: bytes) -> list[int]:
        """*data* as tokens of one byte each."""
        if self.name in BYTE_LEVEL:
            return [self.id_of(CHAR_OF_BYTE[byte]) for byte in data]
        return [self.id_of(f"<0x{byte:02X}>") for byte in data]

    def joint_text(self, prompt: list[int], ids: list[int]) -> str:
        """What the library's text of both has more than that of *prompt*.

        The U+FFFD of a character that the prompt cuts and *ids* complete does not count.
        """
        alone = self.library.decode(prompt, skip_special_tokens=True)
        both: str = self.library.decode(prompt + ids, skip_special_tokens=True)
        return both[len(alone) :] if both.startswith(alone) else both[len(alone) - 1 :]


def _char_of_byte() -> list[str]:
    """The letters of byte-level tokens, as GPT-2 lists them."""
    shown = [chr(byte) if chr(byte).isprintable() and byte != 0x20 else "" for byte in range(256)]
    shown[0xAD] = ""
    hidden = iter(range(256, 512))
    return [char or chr(next(hidden)) for char in shown]


CHAR_OF_BYTE = _char_of_byte()


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _with_byte_tokens(*last: decoders.Decoder) -> tokenizers.Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    return _of_words([*_byte_tokens(), *PIECES], decoders.Sequence(steps))


def _of_words(pieces: list[str], decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    """A vocabulary of *pieces*, the last id of which is special, as the first two are."""
    names = list(dict.fromkeys([*SPECIAL, *pieces, "<end>"]))
    vocabulary = {name: place for place, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([*SPECIAL, "<end>"])
    return backend
