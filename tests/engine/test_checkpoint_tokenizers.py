"""A tokenizer is served as its files have it, or refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from engine import checkpoints, tiny_models
from llm_engine.config import ConfigError
from llm_engine.loading.tokenizer import load_tokenizer

TEXT = "the quick  brown\n fox, 2024 jumps </s> over"
VOCAB = tiny_models.vocab_size()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.tokenizer().save_pretrained(tmp_path)
    return tmp_path


def newer(folder: Path, part: str) -> None:
    checkpoints.edit(folder / "tokenizer.json", **{part: {"type": "Telepathic"}})


def of_class(folder: Path, name: str, **more: Any) -> None:
    checkpoints.edit(folder / "tokenizer_config.json", tokenizer_class=name, **more)


def model(folder: Path, **options: Any) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    checkpoints.edit(folder / "tokenizer.json", model={**content["model"], **options})


def setting(**values: Any) -> Callable[[Path], Any]:
    return lambda folder: checkpoints.edit(folder / "tokenizer_config.json", **values)


REFUSED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "absent": ("has no tokenizer", lambda d: (d / "tokenizer.json").unlink()),
    "cut": ("cannot be read as JSON", lambda d: (d / "tokenizer.json").write_text('{"version": "1.0", "mod')),
    "of a newer format": ("of a newer format", lambda d: newer(d, "pre_tokenizer")),
    "of a newer model": ("of a newer format", lambda d: newer(d, "model")),
    "of a newer version": ("of a newer format", lambda d: checkpoints.edit(d / "tokenizer.json", version="9.0")),
    "settings cut": ("tokenizer_config.json cannot be read", lambda d: (d / "tokenizer_config.json").write_text("{")),
    "special tokens cut": (
        "special_tokens_map.json cannot be read",
        lambda d: (d / "special_tokens_map.json").write_text("{"),
    ),
    "settings of another kind": (
        "though tokenizer.json can; check tokenizer_config.json",
        setting(extra_special_tokens=5),
    ),
    "nothing but added tokens": ("has no tokens", lambda d: model(d, vocab={}, merges=[])),
    "an end without an id": (r"lacks '<\|nope\|>', its eos_token", setting(eos_token="<|nope|>")),
    "a beginning without an id": (r"lacks '<\|nope\|>', its bos_token", setting(bos_token="<|nope|>")),
    "a template's token without an id": (
        r"lacks '<\|nope\|>', its chat template",
        setting(additional_special_tokens=["<|nope|>"], chat_template="{{ messages[0].content }}<|nope|>"),
    ),
    "an id that is not the next": (
        r"'<\|x\|>' of .* has id 900 in tokenizer_config.json, but 300 in use",
        setting(added_tokens_decoder={"900": {"content": "<|x|>", "special": True}}),
    ),
    "two ids for one token": (
        "'</s>' of .* has id 7 in tokenizer_config.json, but 2 in use",
        setting(added_tokens_decoder={"7": {"content": "</s>", "special": True}}),
    ),
    "added tokens that are none": ("added_tokens_decoder in", setting(added_tokens_decoder={"seven": 7})),
    "a template that is a number": ("chat template of .* must be text, got 5", setting(chat_template=5)),
    "a template that is true": ("chat template of .* must be text, got True", setting(chat_template=True)),
    "a template among several that is a number": (
        "chat template of .* must be text, got 5",
        setting(chat_template=[{"name": "default", "template": 5}]),
    ),
    "sentencepiece that is none": (
        "cannot be converted to a fast one",
        lambda d: ((d / "tokenizer.json").rename(d / "tokenizer.model"), of_class(d, "LlamaTokenizer")),
    ),
    "slow only": (
        "is not a fast one",
        lambda d: (
            (d / "tokenizer.json").unlink(),
            (d / "vocab.json").write_text('{"a": 0, "<unk>": 1}'),
            (d / "merges.txt").write_text("#version\n"),
            of_class(d, "CTRLTokenizer"),
        ),
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_tokenizer_that_cannot_be_used_is_refused_in_one_line(folder: Path, fault: str) -> None:
    told, spoil = REFUSED[fault]
    spoil(folder)
    with pytest.raises(ConfigError, match=told) as refused:
        load_tokenizer(folder, VOCAB)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GemmaTokenizer", "BertTokenizer", "CTRLTokenizer", "OwnTokenizer"])
def test_the_file_decides_how_text_is_cut_whatever_class_is_named(folder: Path, name: str) -> None:
    of_class(folder, name)
    wanted = tiny_models.tokenizer()
    found = load_tokenizer(folder, VOCAB)
    assert found(TEXT)["input_ids"] == wanted(TEXT)["input_ids"]
    assert found.eos_token_id == tiny_models.EOS


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "CodeGenTokenizer"])
@pytest.mark.parametrize("options", [{"ignore_merges": True, "merges": []}, {"unk_token": "<pad>", "fuse_unk": True}])
def test_the_files_options_hold_whatever_class_is_named(folder: Path, name: str, options: dict[str, Any]) -> None:
    if "unk_token" in options:
        known = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        vocab = {text: token for text, token in known.items() if text not in "xq"}
        options = {**options, "vocab": vocab, "merges": []}
    model(folder, **options)
    of_class(folder, name)
    wanted = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder, VOCAB)(TEXT)["input_ids"] == wanted.encode(TEXT).ids


@pytest.mark.parametrize("name", ["GPTNeoXTokenizer", "RobertaTokenizer"])
@pytest.mark.parametrize("start", [[], [tiny_models.BOS]])
def test_the_file_says_which_tokens_stand_around_a_text(folder: Path, name: str, start: list[int]) -> None:
    if start:
        tokenizer = Tokenizer.from_str(tiny_models.tokenizer().backend_tokenizer.to_str())
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", *start)])
        tokenizer.save(str(folder / "tokenizer.json"))
    of_class(folder, name)
    plain = tiny_models.tokenizer()(TEXT, add_special_tokens=False)["input_ids"]
    assert load_tokenizer(folder, VOCAB)(TEXT)["input_ids"] == [*start, *plain]


def test_dropout_is_off(folder: Path) -> None:
    wanted = tiny_models.tokenizer()(TEXT)["input_ids"]
    model(folder, dropout=0.5)
    found = load_tokenizer(folder, VOCAB)
    assert all(found(TEXT)["input_ids"] == wanted for _ in range(20))


def test_an_added_token_with_the_next_id_stated_is_taken(folder: Path) -> None:
    token = {"content": "<|x|>", "special": True}
    setting(eos_token="<|x|>", added_tokens_decoder={str(VOCAB): token})(folder)
    assert load_tokenizer(folder, VOCAB + 1).eos_token_id == VOCAB


def test_no_end_is_made_up_by_a_class(folder: Path) -> None:
    of_class(folder, "GPT2Tokenizer", eos_token=None, bos_token=None)
    found = load_tokenizer(folder, VOCAB)
    assert (found.eos_token_id, len(found)) == (None, VOCAB)


def test_a_class_that_cannot_be_built_is_one_line_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints.edit(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", errors=5, add_prefix_space=[])
    load_tokenizer(folder, VOCAB)
    (record,) = [record for record in caplog.records if "set aside" in record.message]
    assert record.exc_info is None


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"has token {VOCAB - 1} .*its model knows only {VOCAB - 1}"):
        load_tokenizer(folder, VOCAB - 1)


def added(folder: Path, text: str) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    token = {"content": text, "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    checkpoints.edit(
        folder / "tokenizer.json",
        added_tokens=[*content["added_tokens"], {"id": VOCAB, "single_word": False, **token}],
    )


def test_an_added_token_that_the_model_lacks_is_refused_only_if_answers_or_the_template_need_it(folder: Path) -> None:
    added(folder, "<|im_end|>")
    assert len(load_tokenizer(folder, VOCAB)) == VOCAB + 1
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    with pytest.raises(ConfigError, match=r"'<\|im_end\|>'"):
        load_tokenizer(folder, VOCAB)
    (folder / "chat_template.jinja").unlink()
    checkpoints.edit(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    with pytest.raises(ConfigError, match=r"'<\|im_end\|>'"):
        load_tokenizer(folder, VOCAB)
