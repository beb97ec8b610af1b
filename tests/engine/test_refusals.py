"""What cannot be served is refused at once, with the reason: bad requests at submit, unsafe models at load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from chat_options import ChatOptions
from engine import driver, scripted, tiny_models
from engine.driver import CheckedEngine, serving
from llm_engine import loading
from llm_engine.config import ConfigError
from llm_engine.engine import Engine
from llm_engine.loading import probe_exactness, refuse_unsafe
from llm_engine.request import Code, RequestError, SamplingParams
from prompts import PromptEncoder

VOCAB = tiny_models.vocab_size()
PROMPT = tiny_models.prompt(9)


# Requests


@pytest.mark.parametrize(
    ("told", "prompt", "fields"),
    [
        ("the prompt is empty", [], {}),
        ("the prompt has 40 tokens; at most 39 fit", tiny_models.prompt(40), {}),
        (f"input_ids must hold token ids from 0 to {VOCAB - 1}, got {VOCAB}", [5, VOCAB], {}),
        (f"input_ids must hold token ids from 0 to {VOCAB - 1}, got -1", [-1], {}),
        (f"resume_token_ids must hold .* got {VOCAB}", PROMPT, {"resume_token_ids": (VOCAB,)}),
        ("resume_token_ids holds 32 tokens; at most 31 fit", PROMPT, {"resume_token_ids": (5,) * 32}),
        ("resume_mismatch", PROMPT, {"resume_token_ids": (5,), "resume_fingerprint": "another"}),
        (r"got 'a\\nbc{61}'$", PROMPT, {"resume_token_ids": (5,), "resume_fingerprint": "a\nb" + "c" * 9999}),
        (f"stop_token_ids must hold .* got {VOCAB}", PROMPT, {"params": SamplingParams(stop_token_ids=(VOCAB,))}),
        (f"logit_bias must hold .* got {VOCAB}", PROMPT, {"params": SamplingParams(logit_bias=((VOCAB, 1.0),))}),
    ],
)
def test_a_bad_request_is_refused_with_the_field_and_nobody_notices(
    told: str, prompt: list[int], fields: dict[str, Any]
) -> None:
    with serving(scripted.load(max_context=40), begin=False) as engine:
        other = engine.ask(PROMPT, SamplingParams(max_tokens=3))
        with pytest.raises(RequestError, match=told) as refused:
            engine.ask(prompt, **fields)
        assert refused.value.code == Code.INVALID_ARG
        assert engine.metrics.invalid == 1
        engine.begin()
        assert other.wait().tokens == scripted.expected(PROMPT, 3)


def encoder(engine: CheckedEngine) -> PromptEncoder:
    return PromptEncoder(engine.tokenizer, engine.config.max_context, engine.vocab_size)


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    with serving(scripted.load(), begin=False) as engine:
        first = engine.ask(PROMPT, SamplingParams(max_tokens=3), id="same")
        with pytest.raises(RequestError, match="'same' is already in use"):
            engine.ask(PROMPT, id="same")
        engine.begin()
        first.wait()
        engine.ask(PROMPT, SamplingParams(max_tokens=1), id="same").wait()


@pytest.mark.parametrize("asked", [None, 31, 500])
def test_an_answer_fills_the_context_at_most_and_then_ends_with_length(asked: int | None) -> None:
    with serving(scripted.load(max_context=40)) as engine:
        answer = engine.ask(PROMPT, SamplingParams(max_tokens=asked)).wait()
    assert answer.code == "length"
    assert answer.tokens == scripted.expected(PROMPT, 31)


def test_a_prompt_of_all_but_one_token_of_the_context_is_served() -> None:
    prompt = tiny_models.prompt(39)
    with serving(scripted.load(max_context=40, kv_tokens=40)) as engine:
        assert engine.ask(prompt).wait().tokens == scripted.expected(prompt, 1)


def test_chat_messages_to_a_model_without_a_template_are_refused() -> None:
    with serving(scripted.load()) as engine:
        with pytest.raises(RequestError, match="no chat template; send text_input instead"):
            encoder(engine).messages("messages", [{"role": "user", "content": "hi"}])
        assert engine.info()["chat"] is False


@pytest.mark.parametrize("special", [True, False])
def test_text_that_is_not_unicode_is_refused(special: bool) -> None:
    with serving(scripted.load()) as engine, pytest.raises(RequestError, match="text_input"):
        encoder(engine).text("text_input", "half a pair: \ud83d", ChatOptions(add_special_tokens=special))


def test_a_text_far_longer_than_the_context_is_refused_untokenized() -> None:
    with serving(scripted.load()) as engine, pytest.raises(RequestError, match="more than 512 tokens can hold"):
        encoder(engine).text("text_input", "x" * 1_000_000)


# Models


REFUSED: dict[str, tuple[str, Any]] = {
    "encoder-decoder": ("is an encoder-decoder", lambda: transformers.T5Config()),
    "dynamic rope": (
        "rope type 'dynamic'",
        lambda: transformers.LlamaConfig(
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        ),
    ),
    "longrope": (
        "rope type 'longrope'",
        lambda: transformers.Phi3Config(
            hidden_size=32,
            num_attention_heads=4,
            original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
        ),
    ),
    "rope of one layer type": (
        "rope type 'dynamic'",
        lambda: transformers.Gemma3TextConfig(
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
            }
        ),
    ),
    "recurrent layers": ("linear_attention", lambda: transformers.Qwen3NextConfig()),
    "chunked attention": ("chunk", lambda: transformers.Llama4TextConfig()),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_unsafe_model_is_refused_with_the_reason(kind: str) -> None:
    told, build = REFUSED[kind]
    with pytest.raises(ConfigError, match=told):
        refuse_unsafe(build())


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_verified_family_is_not_refused(family: str) -> None:
    refuse_unsafe(tiny_models.FAMILIES[family](VOCAB))


def test_a_model_whose_layers_are_not_all_attention_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="mamba"):
        loading.attach(model, tiny_models.tokenizer(), driver.config(), "digest")


def test_a_bidirectional_model_is_refused() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCAB, **shape))
    with pytest.raises(ConfigError, match="only causal"):
        loading.attach(model, tiny_models.tokenizer(), driver.config(), "digest")


@pytest.mark.parametrize(
    ("told", "values"),
    [
        ("max_context 300 is more than the model's limit of 256", {"max_context": 300}),
        ("max_context 200 is more than the KV cache holds .160 tokens", {"max_context": 200, "kv_tokens": 160}),
        ("too few for any request; raise kv_tokens", {"kv_tokens": 7}),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(told: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=told):
        driver.load("llama", **values)


def test_a_tokenizer_without_eos_serves_to_max_tokens() -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tiny_models.tokenizer().backend_tokenizer)
    model = tiny_models.build("llama")
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    loaded = loading.attach(model, plain, driver.config(), "digest")
    assert loaded.eos_token_ids == ()
    with serving(loaded) as engine:
        answer = engine.ask(PROMPT, SamplingParams(max_tokens=30, seed=0, min_tokens=2)).wait()
        assert (answer.code, len(answer.tokens)) == ("length", 30)


# The probe


def test_a_forward_whose_rows_stand_alone_is_bitwise() -> None:
    logits = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))
    assert probe_exactness(300, lambda start, count: logits[start : start + count]) == "bitwise"


@pytest.mark.parametrize("worst", [2, 3, 7, 16, 100, 172])
def test_a_forward_that_differs_at_one_number_of_rows_is_sampled(worst: int) -> None:
    logits = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))

    def forward(start: int, count: int) -> torch.Tensor:
        return logits[start : start + count] + (1e-6 if count == worst else 0.0)

    assert probe_exactness(300, forward) == "sampled"


def test_an_engine_over_a_row_dependent_model_says_sampled() -> None:
    loaded = driver.load("llama", "bfloat16", kernels="torch")
    model: Any = loaded.model

    def mixes_rows(_module: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0] + inputs[0].mean(dim=1, keepdim=True) * 0.01,)

    model.model.layers[1].mlp.register_forward_pre_hook(mixes_rows)
    engine = Engine(loaded.config, loaded)
    assert engine.info()["exact"] == "sampled"
    assert engine.info()["digest"].endswith("-sampled")
    engine.close()
