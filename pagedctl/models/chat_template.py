"""A model's chat template: messages to the text of a prompt, rendered in a sandbox.

A template is a program that came with the model. It sees the messages and the special tokens
and nothing else: attributes that reach into Python, and changes to what it was given, are
refused by the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedctl.errors import Fault, ModelError, RequestError
from pagedctl.models.json_object import read_object
from pagedctl.models.reader import shown
from pagedctl.models.tokenizer_files import TokenizerFiles

DEFAULT_NAME = "default"


class ChatTemplate:
    """One template and the special tokens that it may name.

    Example: ``ChatTemplate(text, where=".../chat_template.jinja", special_tokens={"bos_token":
    "<s>"}).render([{"role": "user", "content": "Hi"}])``.
    """

    def __init__(self, source: str, *, where: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._where = where
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt's text up to where the assistant's turn begins.

        Raises RequestError with the template's own words if it refuses these messages.
        """
        try:
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except jinja2.TemplateSyntaxError as error:
            raise self._refusal(f"cannot be parsed: line {error.lineno}: {error.message}") from None
        except jinja2.TemplateError as error:
            raise self._refusal(f"refuses these messages: {error}") from None
        except Exception as error:  # a template can fail in any way that Python can
            problem = f"fails on these messages: {type(error).__name__}: {error}"
            raise self._refusal(problem) from None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlocks]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self._source)

    def _refusal(self, problem: str) -> RequestError:
        fault = Fault(
            what=f"the chat template {problem}",
            where=self._where,
            rule="messages have the form that the model's chat template takes",
            remedy="change the messages, or give prompt_token_ids",
        )
        return RequestError.of_kind("bad_field", [fault])


class GenerationBlocks(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the model says; the text stays."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def read_chat_template(
    files: TokenizerFiles, special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of a snapshot: chat_template.jinja, else tokenizer_config.json's.

    The latter is a text, or a list of {name, template} of which "default" is taken. None if
    there is neither; ModelError for a file that cannot be read.
    """
    if files.chat_template is not None:
        return ChatTemplate(
            _text_of(files), where=str(files.chat_template), special_tokens=special_tokens
        )
    if files.tokenizer_config is None:
        return None
    where = f"{files.tokenizer_config}, key chat_template"
    found = read_object(files.tokenizer_config).get("chat_template")
    if isinstance(found, list):
        found = _default_of(found, where)
    if found is None:
        return None
    if not isinstance(found, str):
        raise _unusable(f"chat_template is {shown(found)}", where)
    return ChatTemplate(found, where=where, special_tokens=special_tokens)


def _text_of(files: TokenizerFiles) -> str:
    assert files.chat_template is not None
    try:
        return files.chat_template.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"it cannot be read: {error}", str(files.chat_template)) from None


def _default_of(templates: list[Any], where: str) -> object:
    """The template called "default"; one that stands alone needs no such name."""
    if not all(isinstance(one, dict) and {"name", "template"} <= set(one) for one in templates):
        raise _unusable("chat_template is a list of other things than {name, template}", where)
    by_name = {one["name"]: one["template"] for one in templates}
    if len(by_name) == 1:
        return next(iter(by_name.values()))
    if DEFAULT_NAME not in by_name:
        raise _unusable(f'none of {len(by_name)} chat templates is called "default"', where)
    return by_name[DEFAULT_NAME]


def _unusable(problem: str, where: str) -> ModelError:
    return ModelError(
        f"the chat template cannot be used: {problem}",
        where=where,
        rule='a text, or a list of {name, template} with one called "default"',
        remedy="correct the file, or fetch it again",
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: not escaped for HTML, as jinja2's own filter does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
