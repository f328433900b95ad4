"""The stream of lines: plain, gzip, pipes, and what is damaged."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from pagedctl.engine.input_lines import InputLines
from pagedctl.errors import ConfigError

BOM = b"\xef\xbb\xbf"


def lines_of(data: bytes) -> list[tuple[int, bytes]]:
    return list(InputLines(io.BytesIO(data), "prompts.jsonl"))


def test_lines_end_at_newline_and_drop_one_carriage_return() -> None:
    assert lines_of(b'{"a": 1}\r\n[2]\r\r\n"\xe2\x80\xa8"\n3') == [
        (1, b'{"a": 1}'),
        (2, b"[2]\r"),
        (3, b'"\xe2\x80\xa8"'),
        (4, b"3"),
    ]


def test_blank_lines_are_counted_and_skipped() -> None:
    assert lines_of(b"\n \t\r\n1\n\n2\n") == [(3, b"1"), (5, b"2")]
    assert lines_of(BOM + b"\n1") == [(2, b"1")]
    assert lines_of(b"") == lines_of(BOM) == []


def test_gzip_is_known_by_its_magic_bytes_not_by_its_name(tmp_path: Path) -> None:
    data = b'{"prompt_token_ids": [1]}\n{"prompt_token_ids": [2]}\n'
    for name, stored in (("a.jsonl", gzip.compress(data)), ("a.gz", data)):
        path = tmp_path / name
        path.write_bytes(stored)
        with InputLines.open(path) as lines:
            assert [line for _, line in lines] == data.splitlines()
            assert lines.sha256 == hashlib.sha256(stored).hexdigest()
            assert lines.size_bytes == len(stored)


def test_gzip_of_several_members_is_read_whole() -> None:
    data = gzip.compress(b"1\n2") + gzip.compress(b"3\n")
    assert lines_of(data) == [(1, b"1"), (2, b"23")]


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:12] + b"junk"])
def test_damaged_gzip_is_refused_and_never_ends_quietly(damage: Any) -> None:
    with pytest.raises(ConfigError, match="gzip data is damaged"):
        lines_of(damage(gzip.compress(b"1\n" * 1000)))


def test_a_pipe_that_delivers_single_bytes_is_read_whole() -> None:
    reader, writer = os.pipe()
    data = gzip.compress(b"1\n2\n")

    def drip() -> None:
        for index in range(len(data)):
            os.write(writer, data[index : index + 1])
        os.close(writer)

    thread = threading.Thread(target=drip)
    thread.start()
    with InputLines(open(reader, "rb", buffering=0), "stdin") as lines:
        assert [line for _, line in lines] == [b"1", b"2"]
    thread.join()


def test_a_non_blocking_pipe_without_data_is_refused_and_not_taken_for_empty() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with (
        InputLines(open(reader, "rb", buffering=0), "stdin") as lines,
        pytest.raises(ConfigError, match="non-blocking"),
    ):
        list(lines)
    os.close(writer)


@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_an_input_that_cannot_be_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught, InputLines.open(tmp_path / name) as lines:
        list(lines)
    assert caught.value.where == str(tmp_path / name)


def test_lines_are_read_one_at_a_time() -> None:
    """Reading stops at the line that was asked for, however long the input is."""

    one_line = io.BytesIO(b'{"prompt_token_ids": [1]}\n')

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return one_line.readinto(buffer) or one_line.seek(0) or one_line.readinto(buffer)

    lines = iter(InputLines(Endless(), "endless"))  # type: ignore[arg-type]
    assert [next(lines)[0] for _ in range(1000)] == list(range(1, 1001))
