"""A check for whoever has a GPU: `python tests/gpu/smoke.py [--device cpu] [--dtype bfloat16]`, under 90 seconds.

A small random Llama answers greedily, its answers are compared with transformers' own `generate` on the same device,
and one JSON object is printed; the exit code is 0 if all is well. It needs no weights, no network and no Triton.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "model_repository" / "llm" / "1"), str(ROOT / "tests")]

import torch  # noqa: E402
import transformers  # noqa: E402

from engine import tiny_models  # noqa: E402
from engine.driver import Answer, config  # noqa: E402
from llm_engine import loading  # noqa: E402
from llm_engine.config import ConfigError  # noqa: E402
from llm_engine.engine import Engine  # noqa: E402
from llm_engine.request import Request, RequestError, SamplingParams  # noqa: E402

PROMPTS = (1, 17, 64, 150)  # tokens
ANSWER = 48
STREAMS = 16
CONTEXT = 1024
MARGIN = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}  # best logits closer than this may change places


@dataclass(frozen=True, slots=True)
class Report:
    """What the script prints; `ok` decides the exit code."""

    ok: bool
    device: str
    dtype: str
    exact: str
    greedy_equals_generate: bool
    company_equals_alone: bool
    tokens_per_second: float
    ttft_seconds: float
    seconds: float
    torch: str
    transformers: str


def build(device: torch.device, dtype: torch.dtype) -> Any:
    """Return a random Llama of about 27 M parameters."""
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=tiny_models.vocab_size(),
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        initializer_range=0.08,
        pad_token_id=tiny_models.PAD,
        bos_token_id=tiny_models.BOS,
        eos_token_id=tiny_models.EOS,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(shape)
    return model.eval().requires_grad_(requires_grad=False).to(device, dtype)


@torch.inference_mode()
def generate(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The greedy answer of transformers and its logits [tokens, vocabulary]."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=ANSWER,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float()


def equal_by_margin(tokens: list[int], expected: list[int], logits: torch.Tensor, margin: float) -> bool:
    """Whether two answers are equal up to a place, if any, where the two best logits are too close to tell."""
    for place, (token, wanted) in enumerate(zip(tokens, expected, strict=False)):
        if token != wanted:
            best = logits[place].topk(2).values
            return bool(best[0] - best[1] < margin)
    return len(tokens) == len(expected)


def ask(engine: Engine, name: str, prompt: list[int], params: SamplingParams) -> Answer:
    """Submit a request."""
    answer = Answer(Request(name, prompt, params))
    engine.submit(answer.request, answer.emit)
    return answer


def check(device: torch.device, dtype: str) -> Report:
    """Run everything. Raises what the engine raises, AssertionError for an answer that breaks the rules."""
    started = time.monotonic()
    model = build(device, getattr(torch, dtype))
    prompts = [tiny_models.prompt(length) for length in PROMPTS]
    model.set_attn_implementation("eager")
    references = [generate(model, prompt) for prompt in prompts]

    settings = config(dtype, device=device.type, max_sequences=STREAMS, max_step_tokens=256, kv_tokens=8192, threads=0)
    engine = Engine(settings, loading.attach(model, tiny_models.tokenizer(), settings, "digest"))
    try:
        greedy = SamplingParams(max_tokens=ANSWER, temperature=0.0)
        drawn = SamplingParams(max_tokens=ANSWER, seed=7, ignore_eos=True)
        alone = [ask(engine, f"alone {i}", prompt, drawn).wait().tokens for i, prompt in enumerate(prompts)]
        answers = [ask(engine, f"greedy {i}", prompt, greedy) for i, prompt in enumerate(prompts)]
        company = [ask(engine, f"company {i}", prompt, drawn) for i, prompt in enumerate(prompts)]
        equal = [
            equal_by_margin(answer.wait().tokens, *reference, MARGIN[dtype])
            for answer, reference in zip(answers, references, strict=True)
        ]
        together = [answer.wait().tokens for answer in company] == alone
        exact = str(engine.info()["exact"])
        rate, ttft = measure(engine)
    finally:
        engine.close()
    return Report(
        ok=all(equal) and (together or exact == "sampled"),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        dtype=dtype,
        exact=exact,
        greedy_equals_generate=all(equal),
        company_equals_alone=together,
        tokens_per_second=round(rate, 1),
        ttft_seconds=round(ttft, 4),
        seconds=round(time.monotonic() - started, 1),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


def measure(engine: Engine) -> tuple[float, float]:
    """Tokens per second of `STREAMS` streams at once, and the median time to the first token in seconds."""
    params = SamplingParams(max_tokens=ANSWER, seed=1, ignore_eos=True)
    started = time.monotonic()
    answers = [ask(engine, f"stream {i}", tiny_models.prompt(32, seed=i), params) for i in range(STREAMS)]
    tokens = sum(len(answer.wait().tokens) for answer in answers)
    elapsed = time.monotonic() - started
    first = sorted(answer.last.timings.first_token for answer in answers if answer.last.timings)
    return tokens / elapsed, first[len(first) // 2]


def main() -> int:
    """Print the report and return the exit code."""
    parser = argparse.ArgumentParser(description="Check the engine on a GPU with random weights.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="float32", choices=tuple(MARGIN))
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps({"ok": False, "error": "torch sees no CUDA device; try --device cpu"}))
        return 1
    try:
        report = check(torch.device(arguments.device), arguments.dtype)
    except (ConfigError, RequestError, RuntimeError, AssertionError) as error:
        print(json.dumps({"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}))
        return 1
    print(json.dumps({name: getattr(report, name) for name in Report.__slots__}))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
