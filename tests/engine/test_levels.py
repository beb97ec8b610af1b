"""An engine on a CPU that is capped to fewer instructions: the same fingerprint and the same answers, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import driver, tiny_models
from llm_kernels.cpu_level import VARIABLE, runnable

pytestmark = driver.needs_native()
ROOT = Path(__file__).resolve().parents[2]
WAIT = 300
CAPS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
CODE = """
import json, os, sys
from llm_kernels.cpu_level import cap_libraries
cap_libraries()
from engine import driver, tiny_models
from llm_engine.request import SamplingParams

found = {}
for weight_format, arithmetic in json.loads(sys.argv[2]):
    settings = {"weight_format": weight_format, "arithmetic": arithmetic, "kernels": "native"}
    loaded = driver.loading.load(driver.config("auto", model=sys.argv[1], **settings))
    with driver.serving(loaded) as engine:
        params = [SamplingParams(max_tokens=40, temperature=t, seed=7, top_p=p, logprobs=1, ignore_eos=True)
                  for t, p in ((0.0, 1.0), (1.0, 1.0), (1.5, 0.9))]
        asked = [engine.ask(tiny_models.prompt(n), p) for n, p in zip((9, 70, 33), params)]
        answers = [answer.wait() for answer in asked]
        told = engine.info()
        logprobs = [[entry.logprob.hex() for delta in a.deltas for entry in delta.logprobs or ()] for a in answers]
    found[f"{weight_format} {arithmetic}"] = [told["digest"], told["exact"], [a.tokens for a in answers], logprobs]
print(json.dumps(found))
"""
COMBINATIONS = [
    ("float32", "fma32"),
    ("bfloat16", "fma32"),
    ("int8", "q8dot"),
    ("int4", "q8dot"),
    ("int4", "fma32"),
]


def answers(level: str, folder: Path) -> dict[str, list[object]]:
    environ = {name: value for name, value in os.environ.items() if name not in CAPS}
    paths = [str(ROOT / "model_repository/llm/1"), str(ROOT / "tests"), str(ROOT / "client"), str(ROOT / "loadtest")]
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), json.dumps(COMBINATIONS)],
        env={**environ, VARIABLE: level, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_level_of_this_cpu_gives_the_same_fingerprint_tokens_and_logprobs(tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path)  # torch draws other weights on other levels
    tiny_models.tokenizer().save_pretrained(tmp_path)
    levels = [level.name for level in runnable()]
    if len(levels) < 2:
        pytest.skip(f"this CPU runs the level {levels[0]} alone")
    first, *others = (
        answers(level, tmp_path) for level in dict.fromkeys((levels[0], levels[len(levels) // 2], levels[-1]))
    )
    assert {entry[1] for entry in first.values()} == {"bitwise"}
    for other in others:
        assert other == first
