"""What becomes of each causal LM type that transformers knows, and the table of docs/models.md that says it.

`PYTHONPATH=model_repository/llm/1:tests python -m engine.sweep_outcomes` finds every outcome and writes the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine import driver, sweep_models, tiny_models
from engine.driver import serving
from llm_engine import loading
from llm_engine.config import ConfigError
from llm_engine.loading import LoadedModel
from llm_engine.request import SamplingParams
from llm_kernels import native
from llm_kernels.compiling import NativeUnavailableError

PAGE = Path(__file__).parents[2] / "docs/models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
SERVED, REFUSED, NOT_BUILT = "served", "refused", "not tried"
PROMPTS = (1, 5, 40, 11)
ANSWER = 6
TOLERANCE = 1e-3  # of the logits' spread, in float32


@dataclass(frozen=True, slots=True)
class Outcome:
    """`verdict` is one of the three words above; `reason` is why, or what is special about how it is served."""

    verdict: str
    reason: str = ""


def outcome(model_type: str, dtype: str = "float32", kernels: str = "auto") -> Outcome:
    """Build a tiny random model and load it. Whatever is raised that is not a ConfigError is raised here too."""
    try:
        model = sweep_models.build(model_type, getattr(torch, dtype))
    except Exception as error:  # noqa: BLE001 - whatever the type's own code says of its default configuration
        return Outcome(NOT_BUILT, f"no tiny model can be made: {' '.join(str(error).split())[:110].strip()}")
    try:
        loaded = attach(model, dtype, kernels)
    except ConfigError as error:
        assert "\n" not in str(error)
        return Outcome(REFUSED, str(error))
    return Outcome(SERVED, _particular(loaded))


def attach(model: Any, dtype: str = "float32", kernels: str = "auto") -> LoadedModel:
    """Load a model of the sweep with steps of 20 tokens, so that prompts are cut."""
    config = driver.config(dtype, kernels=kernels, max_step_tokens=20)
    return loading.attach(model, tiny_models.tokenizer(), config, "digest")


def _particular(loaded: LoadedModel) -> str:
    if loaded.steps is not None or loaded.attention is not None:
        return ""
    try:
        for cache in loaded.caches:
            native.refuse(cache.key.shape[2], cache.value.shape[-1], "float32")
    except NativeUnavailableError as error:
        return f"attention by PyTorch, not by the native kernels: {error}"
    return ""


def distance_of_answers(model_type: str, kernels: str) -> float:
    """Let an engine answer several prompts at once; the logits' distance from eager attention's, by their spread."""
    expected = sweep_models.build(model_type)
    expected.set_attn_implementation("eager")
    prompts = [tiny_models.prompt(length) for length in PROMPTS]
    worst = torch.zeros(())
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    with serving(attach(sweep_models.build(model_type), kernels=kernels), begin=False) as engine:
        noted = driver.record_logits(engine)
        answers = [engine.ask(prompt, params) for prompt in prompts]
        engine.begin()
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = answer.wait().tokens
            with torch.inference_mode():
                logits = expected(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            ours = torch.stack([noted[answer.request.id, i] for i in range(len(tokens))])
            off = (ours - logits).square().mean(dim=-1).sqrt() / logits.std(dim=-1).mean()
            worst = torch.maximum(worst, off.max())
    return float(worst)


def told() -> dict[str, Outcome]:
    """The outcomes that docs/models.md tells, by type."""
    rows = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    return {name.strip("` "): Outcome(verdict, reason.replace("\\|", "|")) for name, verdict, reason in cells}


def write(outcomes: Iterable[tuple[str, Outcome]]) -> None:
    """Put `outcomes` into docs/models.md."""
    rows = [f"| `{name}` | {o.verdict} | {o.reason.replace('|', chr(92) + '|')} |" for name, o in outcomes]
    before, _, behind = PAGE.read_text().partition(BEGIN)
    table = "\n".join(["| model type | here | why, or how |", "| --- | --- | --- |", *rows])
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{behind.partition(END)[2]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write((model_type, outcome(model_type)) for model_type in sweep_models.TYPES)
