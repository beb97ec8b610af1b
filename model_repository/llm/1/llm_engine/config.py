"""The engine's settings: every unset value is resolved here, once, before anything is built.

Values come as strings from config.pbtxt and may hold `${VAR:-default}`. What depends on the loaded model (dtype,
context length, KV size) is resolved by `loading`; this module knows neither torch nor the model.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNELS = ("auto", "native", "torch")
WEIGHT_FORMATS = ("auto", "float32", "bfloat16", "int8", "int4")
ARITHMETICS = ("auto", "fma32", "q8dot", "dpbf16")
DTYPES = ("auto", "bfloat16", "float16", "float32")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class ConfigError(ValueError):
    """A setting or the machine is not usable. The message is one line: what, with what value, and the cure."""


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder for what is made once and kept: converted weights, compiled code."""
    if explicit := environ.get("TOKENSTREAM_CACHE"):
        return Path(explicit)
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenstream"


def expand(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Replace `${VAR}` and `${VAR:-default}`; an unset or empty VAR without a default is a ConfigError."""

    def value(match: re.Match[str]) -> str:
        found = environ.get(match[1]) or match[2]
        if found is None:
            raise ConfigError(f"environment variable {match[1]} is not set; set it or write ${{{match[1]}:-default}}")
        return found

    return _VARIABLE.sub(value, text)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. 0 means: choose for this machine and model.

    `model` is a folder, a `.gguf` file, `package://NAME/FILE` or a Hugging Face id. `device` is "cpu" or "cuda".
    `kernels`: "native" are this project's C++ ones, "torch" PyTorch's; "auto" takes the native ones where they run.
    `weight_format` and `arithmetic` say how whole native steps hold weights and add products: "auto" takes what the
    checkpoint holds, and the fastest of this CPU; a `dtype` other than "auto" is taken for the format.
    `threads` are this engine's; 0 takes the cores that the process may use, divided by `cpu_share`, the number of
    engines on them.
    `max_context` and `kv_tokens` are in tokens; `max_step_tokens` bounds the tokens computed in one step.
    `max_queue_size` requests of a priority may wait for a seat, none longer than `max_queue_seconds`.
    """

    model: str
    dtype: str = "auto"
    weight_format: str = "auto"
    arithmetic: str = "auto"
    kernels: str = "auto"
    device: str = "cpu"
    threads: int = 0
    cpu_share: int = 1
    max_sequences: int = 32
    max_context: int = 0
    max_step_tokens: int = 2048
    block_size: int = 32
    kv_tokens: int = 0
    prefix_cache: bool = True
    max_queue_size: int = 256
    max_queue_seconds: float = 60.0
    max_request_seconds: float = 600.0

    def __post_init__(self) -> None:
        """Refuse values out of range: ConfigError naming the setting, the bound and the value."""
        if not self.model:
            raise ConfigError("model must name a folder, a .gguf file, package://NAME/FILE or a Hugging Face id")
        for name, allowed in _ALLOWED.items():
            if (chosen := getattr(self, name)) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {chosen!r}")
        for name, low in _LOWEST.items():
            if not low <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} must be at least {low} and finite, got {value}")
        if self.max_step_tokens < self.max_sequences + self.block_size:
            raise ConfigError(
                f"max_step_tokens must be at least max_sequences + block_size "
                f"({self.max_sequences + self.block_size}), got {self.max_step_tokens}"
            )


_ALLOWED = {"dtype": DTYPES, "weight_format": WEIGHT_FORMATS, "arithmetic": ARITHMETICS, "kernels": KERNELS}
_LOWEST = {
    "threads": 0,
    "cpu_share": 1,
    "max_sequences": 1,
    "max_context": 0,
    "block_size": 1,
    "kv_tokens": 0,
    "max_queue_size": 0,
    "max_queue_seconds": 0.001,
    "max_request_seconds": 0.001,
}


def parse(name: str, kind: str, text: str) -> Any:
    """The value of a setting written as text; `kind` is the name of its type. ConfigError if it is not of it."""
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() in ("true", "1", "yes"):
            return True
        if text.lower() in ("false", "0", "no"):
            return False
        raise ConfigError(f"{name} must be true or false, got {text!r}")
    try:
        return int(text) if kind == "int" else float(text)
    except ValueError:
        raise ConfigError(f"{name} must be {'an integer' if kind == 'int' else 'a number'}, got {text!r}") from None
