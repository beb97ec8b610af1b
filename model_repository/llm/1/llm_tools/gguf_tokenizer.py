"""From the metadata of a GGUF file to a tokenizer that cuts text as the model's own, and to the tokens that end answers.

Byte-level BPE, sentencepiece BPE and Gemma 4's mixture of both are built; ConfigError names what is not. It does not
know the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from llm_engine.config import ConfigError

from . import gguf_metadata
from .gguf_pretokenizers import PRE_TOKENIZERS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # token types
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes a space
_ROLES = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}  # where the file does not say
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|eom_id|> "
    "<|end_of_text|> <end_of_utterance> <turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c>".split()
)
_ENDS_IF_CONTROL = frozenset("</s> <eos> <EOT> _<EOT> [EOT] [EOS] [e~[".split())  # some models have them as text


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokenizer as transformers wants it, and the ids of the tokens that end an answer, ascending."""

    fast: Any  # transformers.PreTrainedTokenizerFast
    end_ids: tuple[int, ...]


class _Vocabulary:
    """Tokens with their types, scores and roles, checked against each other."""

    def __init__(self, keys: Mapping[str, Any], defaults: Mapping[str, int]) -> None:
        texts: Sequence[str] = keys.get("tokens") or ()
        self.texts = [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]
        self.ids = {text: token for token, text in enumerate(self.texts)}
        self.types: Sequence[int] = keys.get("token_type") or [_NORMAL] * len(texts)
        self.scores: Sequence[float] = keys.get("scores") or ()
        if not texts or len(self.types) < len(texts) or len(self.ids) < len(texts):
            raise ConfigError("its vocabulary is empty, has a token twice, or lacks the types of some tokens")
        ids = {role: keys.get(f"{key}_token_id", defaults.get(role)) for role, key in _ROLES.items()}
        self.roles: dict[str, int] = {role: token for role, token in ids.items() if token in range(len(texts))}

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


def read(file: Path) -> GgufTokenizer:
    """Return the tokenizer of a GGUF file. Raises ConfigError with the reason."""
    metadata = gguf_metadata.read(file)
    try:
        return _build(metadata)
    except ConfigError as error:
        raise ConfigError(f"the tokenizer of model file {file} cannot be used: {error}") from None


def _build(metadata: Mapping[str, Any]) -> GgufTokenizer:
    from transformers import PreTrainedTokenizerFast

    prefix = "tokenizer.ggml."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    kind, name = keys.get("model"), keys.get("pre")
    add_bos = kind != "gpt2"
    if kind == "llama":
        vocabulary = _Vocabulary(keys, _SENTENCEPIECE_IDS)
        tokenizer = _sentencepiece(vocabulary, add_space=keys.get("add_space_prefix", True))
    elif kind == "gemma4":
        vocabulary = _Vocabulary(keys, {})
        tokenizer = _sentencepiece_with_merges(vocabulary, _merges(keys))
    elif kind == "gpt2":
        if name not in PRE_TOKENIZERS:
            raise ConfigError(
                f"its pre-tokenizer (tokenizer.ggml.pre) is {name!r}; supported are {', '.join(sorted(PRE_TOKENIZERS))}"
            )
        vocabulary = _Vocabulary(keys, {})
        tokenizer = _byte_level(vocabulary, _merges(keys), name)
        add_bos = PRE_TOKENIZERS[name].add_bos and "bos" in vocabulary.roles
    else:
        raise ConfigError(f"its kind (tokenizer.ggml.model) is {kind!r}; supported are gpt2, llama and gemma4")
    general_name = str(metadata.get("general.name", "")).lower()
    tokenizer.add_tokens(list(vocabulary.added(strip="phi-3" in general_name or "phi3" in general_name)))
    add_bos = keys.get("add_bos_token", add_bos)
    tokenizer.post_processor = _template(vocabulary, add_bos=add_bos, add_eos=keys.get("add_eos_token", False))
    named = {f"{role}_token": vocabulary.texts[vocabulary.roles[role]] for role in vocabulary.roles if role in _NAMED}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_chat_template(metadata),
        clean_up_tokenization_spaces=False,
        **named,
    )
    return GgufTokenizer(fast, vocabulary.ends())


_NAMED = ("bos", "eos", "unk", "pad")


def _merges(keys: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the merges of the file, best first. A token may begin with a space, so the second one may separate."""
    if not keys.get("merges"):
        raise ConfigError("it has no merges (tokenizer.ggml.merges)")
    cuts = ((merge, merge.find(" ", 1)) for merge in dict.fromkeys(keys["merges"]))
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
    wanted = [role for role, add in (("bos", add_bos), ("eos", add_eos)) if add]
    for role in wanted:
        if role not in vocabulary.roles:
            raise ConfigError(
                f"it adds {role.upper()} to texts (tokenizer.ggml.add_{role}_token), but names no such token"
            )
    tokens = {role: vocabulary.texts[vocabulary.roles[role]] for role in wanted}
    single = [tokens[role] for role in wanted if role == "bos"] + ["$A"] + [tokens[r] for r in wanted if r == "eos"]
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, "$B:1"],
        special_tokens=[(text, vocabulary.ids[text]) for text in set(tokens.values())],
    )


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or all by name where there are several."""
    key = "tokenizer.chat_template"
    named = {name: metadata.get(f"{key}.{name}") for name in metadata.get("tokenizer.chat_templates") or ()}
    found = {name: text for name, text in {"default": metadata.get(key), **named}.items() if text}
    return found["default"] if found.keys() == {"default"} else found or None
