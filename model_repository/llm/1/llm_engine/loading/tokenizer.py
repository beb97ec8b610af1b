"""The tokenizer of a model folder, proven usable: a fast one, whole, with no token that the model lacks.

A slow-only one is converted where transformers can. It does not know what is tokenized.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from llm_tools import gguf_tokenizer
from llm_tools.folder import first_line, read_json

from ..config import ConfigError

log = logging.getLogger(__name__)

_FAST = "tokenizer.json"
# What transformers converts to a fast one.
_SLOW = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")
_CURE = "save it with save_pretrained of a fast tokenizer (tokenizer.json)"


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The fast tokenizer in `folder` for a model that knows `vocab_size` token ids. Raises ConfigError."""
    _check_files(folder)
    tokenizer = _as_written(folder) if (folder / _FAST).is_file() else _converted(folder)
    if not tokenizer.get_vocab():
        raise ConfigError(f"the tokenizer of {folder} has no tokens; fetch its files again")
    _check_size(folder, tokenizer, vocab_size)
    return tokenizer


def _as_written(folder: Path) -> Any:
    """The tokenizer of tokenizer.json, whatever its class makes of that: classes may cut text in their own way."""
    import transformers
    from tokenizers import Tokenizer

    try:
        written = Tokenizer.from_file(str(folder / _FAST))
        named = _by_class(folder)
        if named is not None and _steps(named.backend_tokenizer) == _steps(written):
            return named
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    except BaseException as error:
        _pass_on(error)
        raise ConfigError(
            f"the tokenizer of {folder} cannot be read ({first_line(error)}); {_FAST} may be damaged, or of a newer "
            f"format than this version of tokenizers reads; fetch it again, or update the library"
        ) from error


def _by_class(folder: Path) -> Any | None:
    """The fast tokenizer of the class that the folder names, None if there is none without code of the folder's own."""
    import transformers

    if gguf_tokenizer.is_built(folder):
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:
        log.exception("the tokenizer's class is set aside, and %s is read as it is written", folder / _FAST)
        return None
    return tokenizer if getattr(tokenizer, "is_fast", False) else None


def _steps(tokenizer: Any) -> list[Any]:
    """How a tokenizer cuts text, without its special tokens and templates, which settings may add to."""
    return [json.loads(tokenizer.to_str()).get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]


def _converted(folder: Path) -> Any:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except BaseException as error:
        _pass_on(error)
        reason = first_line(error)
        raise ConfigError(f"the tokenizer of {folder} cannot be converted to a fast one ({reason}); {_CURE}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"the tokenizer of {folder} ({type(tokenizer).__name__}) is not a fast one; {_CURE}")
    return tokenizer


def _pass_on(error: BaseException) -> None:
    """Raise `error` again if it is a request to end; what is left is a failure, for a panic of Rust is no Exception."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error


def _check_files(folder: Path) -> None:
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        read_json(settings)
    if (folder / _FAST).is_file():
        read_json(folder / _FAST)
    elif not any((folder / name).is_file() for name in _SLOW):
        raise ConfigError(f"model folder {folder} has no tokenizer ({_FAST}); copy the files that came with the model")


def _check_size(folder: Path, tokenizer: Any, vocab_size: int) -> None:
    """Refuse tokens that the model lacks, unless they are added ones that nothing but a user's own text can name."""
    beyond = {text: token for text, token in tokenizer.get_vocab().items() if token >= vocab_size}
    if not beyond:
        return
    base = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    used = {tokenizer.eos_token, tokenizer.bos_token}
    template = str(tokenizer.chat_template or "")
    for text, token in sorted(beyond.items(), key=lambda item: item[1]):
        if text in base or text in used or text in template:
            raise ConfigError(
                f"the tokenizer of {folder} has token {token} ({text!r}), but its model knows only {vocab_size}; "
                f"they do not belong together: take both from one place, or resize the model's embedding"
            )
    log.warning("%d added tokens have no place in the model; a prompt that holds one is refused", len(beyond))
