"""The language of chat templates: Jinja in a sandbox, with what templates written for transformers expect of it.

transformers' own renderer is not used because it takes no clock: a template that prints the date could then not print
the same when an answer is made again elsewhere. It does not know messages.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

_GENERATION = re.compile(r"(\{%[-+]?\s*)(?:end)?generation(\s*[-+]?%\})")  # marks text for training


def compiled(source: str) -> jinja2.Template:
    """The template of `source`; jinja2.TemplateSyntaxError if it is none."""
    return _environment().from_string(_without_generation(source))


def variables(source: str) -> frozenset[str]:
    """The names that the template of `source` reads and does not set itself."""
    return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(_without_generation(source))))


def _without_generation(source: str) -> str:
    return _GENERATION.sub(r"\1set generation_ = 0\2", source)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        autoescape=False,  # a prompt is no HTML
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
