"""Chat templates: messages to the prompt text a model was trained on, rendered as Hugging Face does.

The template comes with the model and the messages from a client, so it runs in Jinja's sandbox and sees plain JSON values only.

Raises   UnsupportedFeature when there is no usable template; InvalidRequest for messages the template refuses
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import InvalidRequest, UnsupportedFeature

_MAX_LEVELS = 64  # of lists and objects in each other
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names clients use; templates read the first, or the second


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012  Jinja's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _plain(value: Any, where: str, levels: int = _MAX_LEVELS) -> Any:
    """A copy made of JSON types only: an object's methods are out of the template's reach."""
    if levels == 0:
        raise InvalidRequest(f"{where[:60]}… is nested more than {_MAX_LEVELS} levels deep")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", levels - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", levels - 1) for i, item in enumerate(value)]
    raise InvalidRequest(f"{where} is of type {type(value).__name__} but must be made of JSON values")


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} is {type(message).__name__} but must be an object with a role and content")
    plain = {key: item for key, item in _plain(message, where).items() if item is not None}  # templates print None
    reasoning = next((plain[name] for name in _REASONING_FIELDS if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


class ChatTemplate:
    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources` by name: "default", and where the model has one "tool_use"."""
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = _strftime_now

    def __bool__(self) -> bool:
        return bool(self._sources)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **kwargs: Any) -> str:
        if "continue_final_message" in kwargs:
            raise UnsupportedFeature("continue_final_message is not supported; append the text to the rendered prompt instead")
        if isinstance(messages, (str, bytes, Mapping)) or not messages:
            raise InvalidRequest("messages must be a non-empty list of objects with a role and content")
        template = self._template("tool_use" if kwargs.get("tools") and "tool_use" in self._sources else "default")
        values = {"tools": None, "documents": None, **self._special_tokens, **_plain(kwargs, "chat template arguments")}
        chat = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        try:
            return template.render(messages=chat, add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # anything: the template is a program of the model's, run on a client's data
            raise InvalidRequest(f"the model's chat template refuses these messages: {error or type(error).__name__}") from error

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._sources:
            raise UnsupportedFeature(
                "this model has no chat template, so send plain prompts; add chat_template.jinja to its tokenizer directory"
            )
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(self._sources[name])
            except jinja2.TemplateSyntaxError as error:
                raise UnsupportedFeature(f"the model's chat template has an error in line {error.lineno}: {error}") from error
        return self._compiled[name]
