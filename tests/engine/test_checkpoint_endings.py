"""An answer ends where any file of its checkpoint says, and at a stop string that is a special token."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import checkpoints, driver, scripted, tiny_models
from engine.driver import serving
from llm_engine import loading
from llm_engine.config import ConfigError
from llm_engine.request import SamplingParams

PROMPT = tiny_models.prompt(9)
PAD, BOS, EOS, TURN = tiny_models.PAD, tiny_models.BOS, tiny_models.EOS, 7


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A folder of which no file names an end: not the configuration, not the tokenizer."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").unlink()
    checkpoints.edit(tmp_path / "config.json", eos_token_id=None)
    checkpoints.edit(tmp_path / "tokenizer_config.json", eos_token=None)
    return tmp_path


def eos(folder: Path) -> tuple[int, ...]:
    return loading.load(driver.config(model=str(folder), kernels="torch")).eos_token_ids


def test_no_end_is_made_up_where_no_file_names_one(folder: Path) -> None:
    assert eos(folder) == ()


def test_the_ends_of_all_files_are_united(folder: Path) -> None:
    checkpoints.edit(folder / "generation_config.json", eos_token_id=[TURN, 9])
    checkpoints.edit(folder / "config.json", eos_token_id=EOS)
    checkpoints.edit(folder / "tokenizer_config.json", eos_token="<pad>")
    assert eos(folder) == (TURN, 9, EOS, PAD)


def test_a_fine_tune_ends_with_its_tokenizers_end_of_turn(folder: Path) -> None:
    checkpoints.edit(folder / "config.json", eos_token_id=EOS)
    checkpoints.edit(folder / "generation_config.json", eos_token_id=EOS)
    checkpoints.edit(folder / "tokenizer_config.json", eos_token="<pad>")
    assert eos(folder) == (EOS, PAD)


def test_an_end_may_be_written_as_the_tokens_text(folder: Path) -> None:
    checkpoints.edit(folder / "generation_config.json", eos_token_id=["</s>", TURN])
    assert eos(folder) == (EOS, TURN)


@pytest.mark.parametrize("stated", ["<|nowhere|>", {"id": 2}, 1.5, True])
def test_an_end_that_is_no_token_is_refused(folder: Path, stated: Any) -> None:
    checkpoints.edit(folder / "generation_config.json", eos_token_id=stated)
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos(folder)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "cannot be read as JSON"),
        ('{"eos_token_id": 2, "top_p": 0.', "cannot be read as JSON"),
        ("[]", "must hold a JSON object, not list"),
        ("null", "must hold a JSON object, not NoneType"),
        ('{"top_p": "0.9"}', "must be a number, got '0.9'"),
        ('{"temperature": true}', "must be a number, got True"),
        ('{"top_k": 1.5}', "must be a whole number, got 1.5"),
    ],
)
def test_damaged_defaults_are_refused_and_not_passed_over(folder: Path, content: str, told: str) -> None:
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError) as refused:
        eos(folder)
    assert f"{folder}/generation_config.json" in str(refused.value)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_do_sample_changes_no_default(folder: Path) -> None:
    checkpoints.edit(folder / "generation_config.json", do_sample=False, top_k=7)
    loaded = loading.load(driver.config(model=str(folder), kernels="torch"))
    assert loaded.defaults == SamplingParams(top_k=7)


def test_ends_outside_the_vocabulary_are_left_out_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.edit(folder / "config.json", eos_token_id=[EOS, -1, 5000])
    with caplog.at_level(logging.WARNING):
        assert eos(folder) == (EOS,)
    assert "5000" in caplog.text
    assert "-1" in caplog.text


def answer_with(tokens: list[int], params: SamplingParams, **fields: Any) -> tuple[str, list[int], str]:
    """Text, tokens and reason of an answer whose tokens are `tokens`."""
    loaded = scripted.load()
    start = len(PROMPT)
    script = [*tokens, *[5] * 600]

    def follow(_tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.tensor([script[max(0, int(at) + 1 - start)] for at in positions])

    loaded.stage.script = follow
    with serving(loaded) as engine:
        got = engine.ask(PROMPT, params, **fields).wait()
    return got.text, got.tokens, got.code


def text_of(tokens: list[int]) -> str:
    return str(tiny_models.tokenizer().decode(tokens, skip_special_tokens=True))


WORDS = tiny_models.tokenizer()(" quick brown fox", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("stop", "token"), [("<pad>", PAD), ("</s>", EOS)])
def test_a_stop_string_that_is_a_special_token_ends_the_answer_before_it(
    stop: str, token: int, include: bool, ignore_eos: bool
) -> None:
    params = SamplingParams(stop=(stop,), include_stop_str_in_output=include, ignore_eos=ignore_eos)
    text, tokens, code = answer_with([*WORDS, token, *WORDS], params)
    assert (tokens, code) == ([*WORDS, token], "stop")
    assert text == text_of(WORDS) + (stop if include else "")


def test_another_special_token_does_not_end_it() -> None:
    params = SamplingParams(stop=("<pad>",), max_tokens=len(WORDS) + 2)
    text, _, code = answer_with([*WORDS, BOS, WORDS[0]], params)
    assert (text, code) == (text_of([*WORDS, WORDS[0]]), "length")


def test_before_min_tokens_it_is_skipped_as_any_special_token() -> None:
    params = SamplingParams(stop=("<pad>",), min_tokens=len(WORDS) + 2)
    text, tokens, code = answer_with([*WORDS, PAD, *WORDS, PAD, 5], params)
    assert (tokens, code) == ([*WORDS, PAD, *WORDS, PAD], "stop")
    assert text == text_of([*WORDS, *WORDS])


@pytest.mark.parametrize("skip", [True, False])
def test_with_special_tokens_shown_the_text_is_the_same(skip: bool) -> None:
    params = SamplingParams(stop=("<pad>",), skip_special_tokens=skip)
    assert answer_with([*WORDS, PAD], params) == (text_of(WORDS), [*WORDS, PAD], "stop")


def test_what_was_held_back_for_another_stop_string_is_sent_with_it() -> None:
    params = SamplingParams(stop=("<pad>", "fox and"))
    assert answer_with([*WORDS, PAD], params) == (text_of(WORDS), [*WORDS, PAD], "stop")


def test_an_answer_resumed_behind_it_has_ended() -> None:
    params = SamplingParams(stop=("<pad>",))
    assert answer_with([], params, resume_token_ids=(*WORDS, PAD)) == ("", [], "stop")
