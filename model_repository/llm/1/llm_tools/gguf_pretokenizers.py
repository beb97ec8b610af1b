r"""How byte-level BPE cuts text into words before it merges, by the names that GGUF files give.

A name stands for regular expressions, applied in turn to what the one before left; a match is a word, and so is what
lies between two. Where llama.cpp only approximates the expression of the model's own tokenizer (it has no \p{Lu}, for
one), the tokenizer's own stands here. What is not here is refused; `superbpe` and `tiny_aya` because there each digit
looks at all behind it, so that a long number would take minutes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPACES = r"|\s+(?!\S)|\s+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _SPACES
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}{_SYMBOLS}{_LINES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{_SYMBOLS}{_LINES}"
_TEKKEN = _CASED_WORD % ("", "") + r"|\p{N}" + _CASED_SYMBOLS + _LINES
_GPT4O = _CASED_WORD % ((_CONTRACTION + "?",) * 2) + r"|\p{N}{1,3}" + _CASED_SYMBOLS + _LINES
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_ASCII_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3 = (
    rf"{_ASCII_SYMBOL}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# DeepSeek LLM's cased letters, as its tokenizer lists them
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one name cuts, and what goes with it: whole words need no merges, BOS is the default, text is composed."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    compose: bool = False  # NFC; llama.cpp does without it, the models' own tokenizers do not


_GPT2_CUT = PreTokenizer((_GPT2,))
_DIGITS_CUT = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_CUT = PreTokenizer((_LLAMA3,))
_QWEN2_CUT = PreTokenizer((_QWEN2,))
_GPT4O_CUT = PreTokenizer((_GPT4O,))
_BLOOM_CUT = PreTokenizer((_BLOOM,))
_DEEPSEEK3_CUT = PreTokenizer((r"\p{N}{1,3}", _DEEPSEEK3_CJK, _DEEPSEEK3))
_BAILING_CUT = PreTokenizer((rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}{_SYMBOLS}|\s*[\r\n]{_SPACES}",))

_NAMES = {
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert "
    "mpt olmo jais trillion granite-docling exaone4": _GPT2_CUT,
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _DIGITS_CUT,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": replace(
        _LLAMA3_CUT, ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": _LLAMA3_CUT,
    "glm4 glm5": replace(_LLAMA3_CUT, ignore_merges=True),
    "qwen2": replace(_QWEN2_CUT, compose=True),
    "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": _QWEN2_CUT,
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_LINES}",
        ),
        compose=True,
    ),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}{_SYMBOLS}{_LINES}",)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True),
    "seed-coder": PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_LINES}",)),
    "bailingmoe bailingmoe2 llada-moe": _BAILING_CUT,
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]{_SPACES}",
        )
    ),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT4O_CUT,
    "youtu": PreTokenizer(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+"
            "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
            "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
        ),
        ignore_merges=True,
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"(?<!\s)\s+$",  # begins where white space does, lest a long run be tried from each of its characters
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK3_CUT,
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _DEEPSEEK3_CJK,
            _DEEPSEEK3.replace(r"[\r\n]*|\s*[\r\n]+", r"|[\r\n]"),
            r"\p{N}",
        )
    ),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}")),
    "poro-chat bloom gpt3-finnish": _BLOOM_CUT,
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "jais-2": PreTokenizer(
        (
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}{_SYMBOLS}|\s*[\r\n]+"
            + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"|\s{1,2}(?!\S)|\s",
        )
    ),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            "([\\t\\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),
}

PRE_TOKENIZERS = {name: cut for names, cut in _NAMES.items() for name in names.split()}
