"""The server's repository with a tiny model in place of the default one, at a pace that a test sets while it serves.

The model has the default one's tokenizer, chat template and context. Greedy, it goes from word to word in an order of
its own, by margins that no rounding bridges, so that it says the same on every machine; drawn at temperatures from 1
on it says almost anything, and its whole context counts. A step takes PACE at least: an answer of n tokens is under way
for n * PACE on the fastest machine, and hardly longer on the slowest.
"""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import transformers

from llm_tools import weights
from tokenstream.repository import read_repository
from tokenstream.server import find_repository

PACE = 0.01  # seconds that a step takes, unless a test says otherwise
CONTEXT, VOCABULARY = 8192, 49152
BOS, EOS = 1, 2
HIDDEN = 128
PACED = f'''

class TritonPythonModel(TritonPythonModel):
    """The model, whose steps wait for as long as the file `pace` in the run folder says."""

    def initialize(self, args):
        import time

        super().initialize(args)
        runner, file = self._engine._runner, Path(os.environ["TOKENSTREAM_RUN_DIR"]) / "pace"
        launch = runner.launch

        def pace():
            try:
                return float(file.read_text())
            except FileNotFoundError:
                return {PACE}

        def paced(plan):
            began = time.monotonic()
            while (left := began + pace() - time.monotonic()) > 0:
                time.sleep(min(left, 0.005))
            return launch(plan)

        runner.launch = paced
'''


@contextmanager
def paced(run_dir: Path, seconds: float) -> Iterator[None]:
    """Have each step of the server with this run folder take so long inside the `with`."""
    file, new = run_dir / "pace", run_dir / "pace.new"
    new.write_text(str(seconds))
    new.replace(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def copied(repository: Path, folder: Path, changes: Mapping[str, str]) -> Path:
    """`repository` copied to `folder`, each pattern of `changes` replaced in config.pbtxt exactly once."""
    shutil.copytree(repository, folder, ignore=shutil.ignore_patterns("__pycache__"))
    config = folder / "llm" / "config.pbtxt"
    content = config.read_text()
    for pattern, replacement in changes.items():
        content, count = re.subn(pattern, replacement, content)
        assert count == 1, f"{pattern!r} occurs {count} times in config.pbtxt"
    config.write_text(content)
    return folder


def parameters(**values: object) -> dict[str, str]:
    """Changes for `copied` that set parameters."""
    return {rf'(key: "{name}" value \{{ string_value: )"[^"]*"': rf'\1"{value}"' for name, value in values.items()}


@cache
def repository() -> Path:
    """The repository, made once; it is gone when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="tokenstream-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = copied(find_repository(), folder / "repository", parameters(model=save_model(folder / "model")))
    with (made / "llm" / "1" / "model.py").open("a") as module:
        module.write(PACED)
    return made


def save_model(folder: Path) -> Path:
    """Save model and tokenizer to `folder`, in bfloat16."""
    (default,) = read_repository(find_repository(), env={})
    shutil.copytree(weights.prepare(default.spec), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)  # type: ignore[no-untyped-call,unused-ignore]
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        words = [i for i, text in enumerate(tokenizer.batch_decode([[i] for i in range(VOCABULARY)])) if _plain(text)]
        places = torch.arange(VOCABULARY) % len(words)
        places[words] = torch.arange(len(words))
        kinds = torch.randn(len(words), HIDDEN)
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(kinds[places] + 0.1 * torch.randn(VOCABULARY, HIDDEN))
            head = torch.randn(VOCABULARY, HIDDEN)
            head[words] = kinds.roll(1, dims=0)  # a word's row answers to the word before it
            model.lm_head.weight.copy_(head / HIDDEN**0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def _plain(text: str) -> bool:
    return re.fullmatch(" [a-z]{3,}", text) is not None
