"""From the metadata of a GGUF file to a tokenizer that cuts text as the model's own, and the tokens that end answers.

Byte-level BPE, sentencepiece BPE and Gemma 4's mixture of both are built; ConfigError names what is not. It does not
know the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from llm_engine.config import ConfigError

from .gguf_header import GgufHeader, stated, stated_list
from .gguf_pretokenizers import PRE_TOKENIZERS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # token types
_CONFIG_FILE, _MARK = "tokenizer_config.json", "built_from_gguf"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes a space
_ROLES = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}  # where the file does not say
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
_ENDS_IF_CONTROL = {"</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~["}  # some models have them as text


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokenizer, what transformers' tokenizer_config.json says of it, and the ids that end answers, ascending."""

    backend: Tokenizer
    config: Mapping[str, Any]
    end_ids: tuple[int, ...]

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        self.backend.save(str(folder / "tokenizer.json"))
        (folder / _CONFIG_FILE).write_text(json.dumps(self.config, indent=2, ensure_ascii=False) + "\n")


def is_built(folder: Path) -> bool:
    """Whether the tokenizer in `folder` was built from a GGUF file: it is read as it stands, whatever the model's type.

    For some types of model AutoTokenizer takes no more than the vocabulary from the folder, and cuts text its own way.
    """
    file = folder / _CONFIG_FILE
    return file.is_file() and _MARK in json.loads(file.read_text())


class _Vocabulary:
    """Tokens with their types, scores and roles, checked against each other."""

    def __init__(self, keys: Mapping[str, Any], defaults: Mapping[str, int]) -> None:
        texts = stated_list(keys, "tokens", str)
        self.texts = [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]
        self.ids = {text: token for token, text in enumerate(self.texts)}
        self.types: Sequence[int] = stated_list(keys, "token_type", int) or [_NORMAL] * len(texts)
        self.scores: Sequence[float] = stated_list(keys, "scores", float)
        if not texts or len(self.types) < len(texts) or len(self.ids) < len(texts):
            raise ConfigError("its vocabulary is empty, has a token twice, or lacks the types of some tokens")
        named = {role: stated(keys, f"{key}_token_id", int) for role, key in _ROLES.items()}
        for role, token in named.items():
            if token is not None and token not in range(len(texts)):
                raise ConfigError(
                    f"its {_ROLES[role]}_token_id is {token}, beyond its vocabulary of {len(texts)} tokens"
                )
        ids = {**{role: token for role, token in defaults.items() if token < len(texts)}, **_present(named)}
        self.roles: dict[str, int] = ids

    def named(self) -> Iterable[tuple[str, str]]:
        """Yield the roles that transformers knows, with their tokens. A word that pads is still a word."""
        for role, token in self.roles.items():
            if role in ("bos", "eos") or (role in ("unk", "pad") and self.types[token] != _NORMAL):
                yield role, self.texts[token]

    def is_end(self, token: int) -> bool:
        """Whether the text of `token` says that it ends a turn."""
        text = self.texts[token]
        return text in _ENDS or (text in _ENDS_IF_CONTROL and self.types[token] == _CONTROL)

    def ends(self) -> tuple[int, ...]:
        """Return the ids that end an answer: those named as EOS, EOT and EOM, and those that say it themselves."""
        found = {
            self.ids[text] for text in _ENDS | _ENDS_IF_CONTROL if text in self.ids and self.is_end(self.ids[text])
        }
        found |= {self.roles[role] for role in ("eos", "eot", "eom") if role in self.roles}
        texts = {self.texts[token] for token in found}
        if texts >= {"<|return|>", "<|call|>"} or texts >= {"<|flush|>", "<|calls|>"}:
            found.discard(self.ids.get("<|end|>", -1))  # there it ends a message, and the answer goes on
        return tuple(sorted(found))

    def added(self, *, strip: bool) -> Iterable[AddedToken]:
        """Yield the tokens that are found in a text before it is cut; `strip` has them take white space behind them."""
        for token, (text, kind) in enumerate(zip(self.texts, self.types, strict=False)):
            control = kind in (_CONTROL, _UNKNOWN) or (kind == _NORMAL and self.is_end(token))
            if control or kind == _USER_DEFINED:
                rstrip = strip and text not in ("<unk>", "<s>", "<|endoftext|>")
                yield AddedToken(text, special=control, normalized=False, rstrip=rstrip)


def _present(ids: Mapping[str, int | None]) -> dict[str, int]:
    return {role: token for role, token in ids.items() if token is not None}


def read(header: GgufHeader) -> GgufTokenizer:
    """Return the tokenizer of a GGUF file. Raises ConfigError with the reason."""
    try:
        return _build(header.metadata)
    except ValueError as error:  # ConfigError, or what the tokenizer's library says
        raise ConfigError(
            f"the tokenizer of model file {header.name} cannot be used: {error}; take the model's safetensors"
        ) from None


def _build(metadata: Mapping[str, Any]) -> GgufTokenizer:
    prefix = "tokenizer.ggml."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    kind, name = stated(keys, "model", str), stated(keys, "pre", str)
    add_bos = kind != "gpt2"
    if kind == "llama":
        vocabulary = _Vocabulary(keys, _SENTENCEPIECE_IDS)
        tokenizer = _sentencepiece(vocabulary, add_space=_flag(keys, "add_space_prefix", True))
    elif kind == "gemma4":
        vocabulary = _Vocabulary(keys, {})
        tokenizer = _sentencepiece_with_merges(vocabulary, _merges(keys))
    elif kind == "gpt2":
        if name is None or name not in PRE_TOKENIZERS:
            raise ConfigError(
                f"its pre-tokenizer (tokenizer.ggml.pre) is {name!r}; supported are {', '.join(sorted(PRE_TOKENIZERS))}"
            )
        vocabulary = _Vocabulary(keys, {})
        tokenizer = _byte_level(vocabulary, _merges(keys), name)
        add_bos = PRE_TOKENIZERS[name].add_bos and "bos" in vocabulary.roles
    else:
        raise ConfigError(f"its kind (tokenizer.ggml.model) is {kind!r}; supported are gpt2, llama and gemma4")
    general_name = (stated(metadata, "general.name", str) or "").lower()
    tokenizer.add_tokens(list(vocabulary.added(strip="phi-3" in general_name or "phi3" in general_name)))
    add_bos = _flag(keys, "add_bos_token", add_bos) or kind == "gemma4"  # old files of Gemma 4 deny it
    tokenizer.post_processor = _template(vocabulary, add_bos=add_bos, add_eos=_flag(keys, "add_eos_token", False))
    config = {_MARK: True, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {f"{role}_token": text for role, text in vocabulary.named()} | _chat_template(metadata)
    return GgufTokenizer(tokenizer, config, vocabulary.ends())


def _flag(keys: Mapping[str, Any], key: str, default: bool) -> bool:
    found = stated(keys, key, bool)
    return default if found is None else found


def _merges(keys: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the merges of the file, best first. A token may begin with a space, so the second one may separate."""
    merges = stated_list(keys, "merges", str)
    if not merges:
        raise ConfigError("it has no merges (tokenizer.ggml.merges)")
    cuts = ((merge, merge.find(" ", 1)) for merge in dict.fromkeys(merges))
    return [(merge[:at], merge[at + 1 :]) for merge, at in cuts if at > 0]


def _byte_level(vocabulary: _Vocabulary, merges: list[tuple[str, str]], name: str) -> Tokenizer:
    cut = PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(_bpe(vocabulary, merges, ignore_merges=cut.ignore_merges))
    if cut.compose:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Return what cuts text into words as the pre-tokenizer `name` does, each word spelled in bytes."""
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(vocabulary: _Vocabulary, *, add_space: bool) -> Tokenizer:
    """Build sentencepiece's BPE: of two neighbours that are a token together, those with the best score merge first."""
    if len(vocabulary.scores) < len(vocabulary.texts):
        raise ConfigError("it has no scores (tokenizer.ggml.scores) to merge by")
    mergeable = {
        text: vocabulary.scores[token]
        for text, token in vocabulary.ids.items()
        if vocabulary.types[token] not in (_CONTROL, _UNKNOWN, _BYTE)
    }
    found = [
        (score, text[:at], text[at:])
        for text, score in mergeable.items()
        for at in range(1, len(text))
        if text[:at] in mergeable and text[at:] in mergeable
    ]
    merged = {left + right: score for score, left, right in found}
    if 2 * len(set(merged.values())) < len(merged):
        raise ConfigError("its scores (tokenizer.ggml.scores) do not tell which of its tokens merge first")
    found.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    tokenizer = _spelled_with_spaces(vocabulary, [(left, right) for _, left, right in found])
    if add_space:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), tokenizer.normalizer])
        tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Strip(" ", 1, 0)])
    return tokenizer


def _sentencepiece_with_merges(vocabulary: _Vocabulary, merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = _spelled_with_spaces(vocabulary, merges)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), behavior="isolated")
    return tokenizer


def _spelled_with_spaces(vocabulary: _Vocabulary, merges: list[tuple[str, str]]) -> Tokenizer:
    missing = next((byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary.ids), None)
    if missing is not None:
        raise ConfigError(f"its vocabulary has no token for the byte <0x{missing:02X}>")
    unknown = vocabulary.roles.get("unk")
    tokenizer = Tokenizer(
        _bpe(
            vocabulary,
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else vocabulary.texts[unknown],
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    ids = vocabulary.ids
    for left, right in merges:
        if not (left in ids and right in ids and left + right in ids):
            raise ConfigError(f"its merge of {left!r} with {right!r} is not in its vocabulary")
    return models.BPE(ids, merges, **options)


def _template(vocabulary: _Vocabulary, *, add_bos: bool, add_eos: bool) -> processors.TemplateProcessing:
    """Return what puts BOS before and EOS behind a text."""
    single = ["$A"]
    special: dict[str, int] = {}
    for role, add in (("bos", add_bos), ("eos", add_eos)):
        if add:
            if role not in vocabulary.roles:
                raise ConfigError(f"it adds {role.upper()} to texts (tokenizer.ggml.add_{role}_token), but names none")
            token = vocabulary.roles[role]
            text = vocabulary.texts[token]
            special[text] = token
            single = [text, *single] if role == "bos" else [*single, text]
    return processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=list(special.items()))


def _chat_template(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of tokenizer_config.json for the chat template, or for all by name where there are several."""
    key = "tokenizer.chat_template"
    texts = {"default": stated(metadata, key, str)}
    names = stated_list(metadata, "tokenizer.chat_templates", str)
    texts |= {name: stated(metadata, f"{key}.{name}", str) for name in names}
    found = [{"name": name, "template": text} for name, text in texts.items() if text]
    if [template["name"] for template in found] == ["default"]:
        return {"chat_template": found[0]["template"]}
    return {"chat_template": found} if found else {}
