"""The tokenizer of a model folder, proven usable: a fast one, whole, with no token that the model lacks.

A slow-only one is converted where transformers can. It does not know what is tokenized.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_tools import gguf_tokenizer
from llm_tools.folder import first_line, read_json

from ..config import ConfigError

log = logging.getLogger(__name__)

_FAST = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_JSON = (_SETTINGS, _FAST, "special_tokens_map.json", "added_tokens.json")
# What transformers converts to a fast one.
_SLOW = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "tekken.json")
_CURE = "save it with save_pretrained of a fast tokenizer (tokenizer.json)"


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The fast tokenizer in `folder` for a model that knows `vocab_size` token ids. Raises ConfigError."""
    settings = _check_files(folder)
    tokenizer = _as_written(folder, settings) if (folder / _FAST).is_file() else _converted(folder)
    if not tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False):
        raise ConfigError(f"the tokenizer of {folder} has no tokens; fetch its files again")
    _check_template(folder, tokenizer.chat_template)
    _check_size(folder, tokenizer, vocab_size)
    return tokenizer


def _as_written(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The tokenizer of tokenizer.json, whatever its class makes of that: classes may cut text in their own way."""
    from tokenizers import Tokenizer

    try:
        written = Tokenizer.from_file(str(folder / _FAST))
    except BaseException as error:
        _pass_on(error)
        raise ConfigError(
            f"the tokenizer of {folder} cannot be read ({first_line(error)}); {_FAST} may be damaged, or of a newer "
            f"format than this version of tokenizers reads; fetch it again, or update the library"
        ) from error
    _cut_always_alike(written)
    vocabulary = written.get_vocab()
    stated = _stated_ids(folder, settings)
    found = _by_class(folder)
    templates = settings.get("add_bos_token") is None and settings.get("add_eos_token") is None
    if (
        found is None
        or _steps(found.backend_tokenizer) != _steps(written)
        or (templates and found.backend_tokenizer.encode("").ids != written.encode("").ids)
        or not found.get_vocab().items() <= (stated | vocabulary).items()
    ):
        found = _by_file(folder)
    _cut_always_alike(found.backend_tokenizer)
    _refuse_invented(folder, found, vocabulary, stated)
    return found


def _by_file(folder: Path) -> Any:
    import transformers

    try:
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    except BaseException as error:
        _pass_on(error)
        raise ConfigError(
            f"the tokenizer of {folder} cannot be read ({first_line(error)}), though {_FAST} can; "
            f"check {_SETTINGS}, or fetch it again"
        ) from error


def _by_class(folder: Path) -> Any | None:
    """The fast tokenizer of the class that the folder names, None if there is none without code of the folder's own."""
    import transformers

    if gguf_tokenizer.is_built(folder):
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 whatever a class cannot do, the file can
        reason = first_line(error)
        log.warning("the tokenizer's class is set aside (%s); %s is read as it is written", reason, folder / _FAST)
        return None
    return tokenizer if getattr(tokenizer, "is_fast", False) else None


def _steps(tokenizer: Any) -> list[Any]:
    """How a tokenizer cuts text, without its special tokens and templates, which settings may add to."""
    content = json.loads(tokenizer.to_str())
    options = {
        name: value
        for name, value in content["model"].items()
        if name not in ("vocab", "merges") and value is not None and value is not False and value != ""
    }
    return [options, *(content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder"))]


def _cut_always_alike(tokenizer: Any) -> None:
    """Switch off BPE's dropout, which is for training: it cuts a text at random."""
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None


def _stated_ids(folder: Path, settings: Mapping[str, Any]) -> dict[str, int]:
    """The added tokens of tokenizer_config.json, by text."""
    try:
        added = dict(settings.get("added_tokens_decoder") or {})
        texts = {int(token): entry if isinstance(entry, str) else entry["content"] for token, entry in added.items()}
    except (TypeError, ValueError, KeyError):
        raise ConfigError(
            f"added_tokens_decoder in {folder / _SETTINGS} must be an object of token ids, each with its content; "
            f"fetch it again"
        ) from None
    return {str(text): token for token, text in texts.items()}


def _refuse_invented(folder: Path, tokenizer: Any, written: Mapping[str, int], stated: Mapping[str, int]) -> None:
    """Raise ConfigError for ids that are not those of the files: transformers gives a token without one the next."""
    found = tokenizer.get_vocab()
    for text, token in (*written.items(), *stated.items()):
        if found.get(text) != token:
            place = _FAST if text in written and written[text] == token else _SETTINGS
            raise ConfigError(
                f"token {text!r} of {folder} has id {token} in {place}, but {found.get(text)} in use; its tokenizer's "
                f"files do not belong together: take them from one place"
            )
    roles = {tokenizer.eos_token: "eos_token", tokenizer.bos_token: "bos_token"}
    template = str(tokenizer.chat_template or "")
    for text in sorted(found.keys() - written.keys() - stated.keys()):
        if text in roles or text in template:
            raise ConfigError(
                f"the tokenizer of {folder} lacks {text!r}, its {roles.get(text, 'chat template')}: {_FAST} has no id "
                f"for it; fetch its files again, or correct {_SETTINGS}"
            )


def _check_template(folder: Path, template: Any) -> None:
    texts = template.values() if isinstance(template, dict) else [template or ""]
    for text in texts:
        if not isinstance(text, str):
            raise ConfigError(
                f"the chat template of {folder} must be text, got {text!r}; fetch {_SETTINGS} again, or remove it there"
            )


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


def _check_files(folder: Path) -> dict[str, Any]:
    """Refuse files that are no JSON objects, and return what tokenizer_config.json holds."""
    here = {name: read_json(folder / name) for name in _JSON if (folder / name).is_file()}
    if _FAST not in here and not any((folder / name).is_file() for name in _SLOW):
        raise ConfigError(f"model folder {folder} has no tokenizer ({_FAST}); copy the files that came with the model")
    return here.get(_SETTINGS, {})


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
