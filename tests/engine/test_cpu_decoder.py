"""Whole steps of the CPU kernels: transformers' logits, and the same bits however a step is cut, placed and computed.

Before a decoder's first step its whole KV cache is NaN here, so whatever is read of it without being written shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import cpu_objects
from llm_kernels.decoder import Choice, Decoder, padded
from llm_kernels.families import family_of
from llm_kernels.packed import Arithmetic, Format, Rows
from waiting import eventually

Array = NDArray[np.float32]
VOCABULARY, CONTEXT, WINDOW = 67, 640, 12

_COMMON = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # far from transformers' 0.02, so that logits depend on the whole context
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def shape(hidden: int, inner: int, heads: int, kv_heads: int, dim: int = 0) -> dict[str, Any]:
    """Sizes of a configuration; a head's is hidden / heads where `dim` is 0."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return _COMMON | sizes | ({"head_dim": dim} if dim else {})


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA = {"query_pre_attn_scalar": 20, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_T = transformers
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _T.LlamaConfig(**shape(45, 53, 9, 3, 24)),
    "llama of one KV head": lambda: _T.LlamaConfig(**shape(55, 100, 5, 1, 80)),
    "llama of one row of lanes": lambda: _T.LlamaConfig(**shape(1, 1, 1, 1, 2)),
    "llama 3": lambda: _T.LlamaConfig(rope_parameters=_LLAMA3, **shape(64, 96, 4, 4, 16)),
    "tied llama": lambda: _T.LlamaConfig(**(shape(40, 70, 2, 1) | {"tie_word_embeddings": True})),
    "wide llama": lambda: _T.LlamaConfig(**shape(333, 650, 9, 3, 34)),
    "mistral": lambda: _T.MistralConfig(sliding_window=WINDOW, **shape(42, 64, 6, 2, 16)),
    "mistral of a wide window": lambda: _T.MistralConfig(sliding_window=70, **shape(42, 64, 6, 2, 18)),
    "qwen2": lambda: _T.Qwen2Config(**shape(48, 65, 4, 2)),
    "qwen3": lambda: _T.Qwen3Config(**shape(36, 60, 3, 1, 24)),
    "gemma2": lambda: _T.Gemma2Config(
        attn_logit_softcapping=5.0, final_logit_softcapping=10.0, **_GEMMA, **shape(44, 66, 4, 2, 20)
    ),
    "gemma3": lambda: _T.Gemma3TextConfig(**_GEMMA, **shape(45, 66, 5, 1, 40)),
    "phi3": lambda: _T.Phi3Config(**shape(48, 52, 4, 2)),
    "smollm3": lambda: _T.SmolLM3Config(no_rope_layers=[1, 0], **shape(48, 64, 4, 2)),
    "gpt2": lambda: _T.GPT2Config(
        vocab_size=VOCABULARY, n_embd=39, n_layer=2, n_head=3, n_positions=CONTEXT, initializer_range=0.3,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    ),
}  # fmt: skip

PLAIN = (Format.FLOAT32, Arithmetic.FMA32)
KINDS = {  # formats, arithmetics, and whether keys and values are bfloat16
    "float32": (*PLAIN, False),
    "float32, short KV": (*PLAIN, True),
    "bfloat16": (Format.BFLOAT16, Arithmetic.FMA32, True),
    "int8": (Format.INT8, Arithmetic.Q8DOT, True),
    "int4": (Format.INT4, Arithmetic.Q8DOT, True),
    "int5, wide KV": (Format.INT5, Arithmetic.Q8DOT, False),
    "int4, widened": (Format.INT4, Arithmetic.FMA32, True),
}
every_model = pytest.mark.parametrize("name", MODELS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def model_of(name: str) -> Any:
    """The random model of a name in float32, for evaluation."""
    torch.manual_seed(0)
    config = MODELS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # biases and norms begin as zeros and ones, which would hide what they are for
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.requires_grad_(requires_grad=False)


class ModelTensors:
    """A model's tensors as a Decoder asks for them. `transposed`: how it holds its linears, but for tables."""

    def __init__(self, model: Any, *, transposed: bool, exact: str = "") -> None:
        self._tensors = model.state_dict()
        self._is_transposed = transposed
        self._exact = exact

    def rows(self, name: str) -> Rows:
        tensor = self._tensors[name]
        values = (tensor.T if self._is_transposed and ".h." in name else tensor).contiguous().numpy()
        return Rows.of(values, unpacked=bool(self._exact) and self._exact in name)

    def vector(self, name: str) -> Array | None:
        return self._tensors[name].numpy() if name in self._tensors else None


def windows(config: Any) -> list[int | None]:
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [getattr(config, "sliding_window", None) if kind == "sliding_attention" else None for kind in types]


def decoder(
    name: str,
    choice: Choice,
    *,
    short_kv: bool = False,
    library: Any = None,
    block_size: int = 16,
    threads: int = 2,
    blocks: int = 0,
    exact: str = "",
) -> Decoder:
    """A model's decoder whose KV cache is NaN, with room for three prompts of CONTEXT."""
    model = model_of(name)
    family = family_of(model.config, windows(model.config))
    tensors = ModelTensors(model, transposed=family.transposed, exact=exact)
    blocks = blocks or 3 * -(-CONTEXT // block_size)
    made = Decoder(
        library or cpu_objects.best(), family, tensors, choice,
        slots=blocks * block_size, block_size=block_size, positions=CONTEXT, threads=threads, bfloat16_kv=short_kv,
    )  # fmt: skip
    for layer in made._layers:
        for start, dim in ((layer.key, family.dim), (layer.value, padded(family.dim))):
            ctypes.memset(start, 0xFF, blocks * block_size * family.kv_heads * dim * (2 if short_kv else 4))
    return made


def always(weight_format: Format, arithmetic: Arithmetic) -> Choice:
    return lambda rows: (weight_format, arithmetic)


def step(
    made: Decoder, block_size: int, parts: Sequence[tuple[Sequence[int], int, Sequence[int]]], *, wanted: bool = True
) -> Array:
    """One step of parts (tokens, tokens before, blocks): logits of every row, or of none."""
    lengths = [len(tokens) for tokens, _, _ in parts]
    positions = [range(before, before + n) for n, (_, before, _) in zip(lengths, parts, strict=True)]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for own, (_, _, table) in zip(positions, parts, strict=True)
        for p in own
    ]
    tables = np.full((len(parts), max(len(table) for _, _, table in parts)), -1, np.int32)  # -1: nothing to be read
    for row, (_, _, table) in zip(tables, parts, strict=True):
        row[: len(table)] = table
    heads = np.arange(sum(lengths) if wanted else 0, dtype=np.int64)
    logits = np.full((len(heads), made.vocabulary), np.nan, np.float32)
    made.forward(
        np.array([t for tokens, _, _ in parts for t in tokens], np.int64),
        np.array([p for own in positions for p in own], np.int64),
        np.array(slots, np.int64),
        np.cumsum([0, *lengths]).astype(np.int32),
        np.array([before + n for n, (_, before, _) in zip(lengths, parts, strict=True)], np.int32),
        tables,
        heads,
        logits,
    )
    return logits


def at_once(made: Decoder, tokens: Sequence[int], block_size: int = 16) -> Array:
    """Logits of a prompt alone in one step, in blocks from the first."""
    return step(made, block_size, [(tokens, 0, range(-(-len(tokens) // block_size)))])


def in_parts(made: Decoder, tokens: Sequence[int], sizes: Sequence[int], block_size: int = 16) -> Array:
    table, found, before = list(range(-(-len(tokens) // block_size))), [], 0
    for size in sizes:
        found.append(step(made, block_size, [(tokens[before : before + size], before, table)]))
        before += size
    assert before == len(tokens)
    return np.concatenate(found)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCABULARY, length).tolist()


def reference(name: str, tokens: Sequence[int], model: Any = None) -> Array:
    with torch.inference_mode():
        return (model or model_of(name))(torch.tensor([tokens])).logits[0].numpy()  # type: ignore[no-any-return]


def same(a: Array, b: Array) -> bool:
    """Whether all bits are equal and all numbers finite."""
    return bool(np.isfinite(a).all()) and a.tobytes() == b.tobytes()


@every_model
def test_float32_gives_the_logits_of_transformers(name: str) -> None:
    tokens = prompt(150)
    wanted = reference(name, tokens)
    made = decoder(name, always(*PLAIN))
    assert np.abs(at_once(made, tokens) - wanted).max() <= 1e-4 * wanted.std()


@every_model
@pytest.mark.parametrize("weight_format", list(Format)[1:], ids=lambda value: value.name.lower())
def test_rounded_weights_give_the_logits_of_transformers_with_the_same(name: str, weight_format: Format) -> None:
    model = transformers.AutoModelForCausalLM.from_config(model_of(name).config, attn_implementation="eager").eval()
    state, tokens = dict(model_of(name).state_dict()), prompt(60)
    made = decoder(name, always(weight_format, Arithmetic.FMA32))
    for weight, values in made.rounded():
        found = torch.from_numpy(values)
        state[f"{weight}.weight"] = found.T if made.family.transposed and ".h." in weight else found
    found = at_once(made, tokens)
    if made.family.head == made.family.embedding:
        state["lm_head.weight"] = state[f"{made.family.embedding}.weight"]
    model.load_state_dict(state)
    wanted = reference(name, tokens, model)
    assert np.abs(wanted - reference(name, tokens)).max() > 1e-4 * wanted.std()
    assert np.abs(found - wanted).max() <= 1e-4 * wanted.std()


@every_kind
@every_model
def test_all_levels_give_the_same_bits(name: str, kind: str) -> None:
    *choice, short_kv = KINDS[kind]
    tokens, found = prompt(100), []
    for library in cpu_objects.libraries().values():
        made = decoder(name, always(*choice), short_kv=short_kv, library=library)
        found.append(in_parts(made, tokens, [60, 1, 39]))
    assert all(same(found[0], other) for other in found)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and how many rows each has in every step; a step has rows of one of them at least."""
    prompts = [prompt(draw(st.integers(1, 150)), seed) for seed in range(draw(st.integers(1, 3)))]
    steps, left = [], [len(tokens) for tokens in prompts]
    while any(left):
        rows = [draw(st.sampled_from([0, 1, 2, 5, 16, 33, 64, 150])) for _ in left]
        rows = [min(n, rest) for n, rest in zip(rows, left, strict=True)]
        if not any(rows):
            rows = left
        left = [rest - n for n, rest in zip(rows, left, strict=True)]
        steps.append(rows)
    return prompts, steps


FEW = ("llama", "mistral", "mistral of a wide window", "gemma2", "llama of one KV head", "gpt2")


@every_kind
@given(
    name=st.sampled_from(FEW),
    schedule=schedules(),
    block_size=st.sampled_from([16, 32, 48, 1, 7, 20]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_logits_do_not_depend_on_how_a_step_is_made(
    kind: str, name: str, schedule: tuple[list[list[int]], list[list[int]]], block_size: int, threads: int, seed: int
) -> None:
    *choice, short_kv = KINDS[kind]
    prompts, steps = schedule
    blocks = sum(-(-len(tokens) // block_size) for tokens in prompts) + 2
    shuffled = np.random.default_rng(seed).permutation(blocks).tolist()
    tables = [[shuffled.pop() for _ in range(-(-len(tokens) // block_size))] for tokens in prompts]
    found: list[list[Array]] = [[] for _ in prompts]
    sizes = {"block_size": block_size, "threads": threads, "blocks": blocks}
    made = decoder(name, always(*choice), short_kv=short_kv, **sizes)
    before = [0] * len(prompts)
    for rows in steps:
        taking = [i for i, n in enumerate(rows) if n]
        parts = [(prompts[i][before[i] : before[i] + rows[i]], before[i], tables[i]) for i in taking]
        logits = step(made, block_size, parts)
        for i in taking:
            found[i].append(logits[: rows[i]])
            logits = logits[rows[i] :]
            before[i] += rows[i]
    alone = decoder(name, always(*choice), short_kv=short_kv, threads=1)
    for tokens, own in zip(prompts, found, strict=True):
        assert same(np.concatenate(own), at_once(alone, tokens))


@every_kind
@pytest.mark.parametrize("name", ["wide llama", "mistral of a wide window", "gemma3"])
def test_six_hundred_rows_at_once_are_the_same_as_one_by_one(name: str, kind: str) -> None:
    *choice, short_kv = KINDS[kind]
    tokens = prompt(600)
    made = decoder(name, always(*choice), short_kv=short_kv, threads=3)
    found = at_once(made, tokens)
    made = decoder(name, always(*choice), short_kv=short_kv, block_size=48)
    assert same(in_parts(made, tokens, [300, 1, 1, 31, *[1] * 4, 40, 223], 48), found)
    assert same(in_parts(made, tokens, [*[1] * 70, 530], 48), found)


@pytest.mark.parametrize("name", FEW)
def test_pairs_of_bfloat16_are_summed_alike_however_a_step_is_made(name: str) -> None:
    if not cpu_objects.best().ts_has_dpbf16():
        pytest.skip("this CPU has no vdpbf16ps")
    tokens = prompt(150)
    wanted = reference(name, tokens)
    made = decoder(name, always(Format.BFLOAT16, Arithmetic.DPBF16), short_kv=True)
    found = at_once(made, tokens)
    assert same(in_parts(made, tokens, [40, 1, 1, 20, 88]), found)
    assert np.abs(found - wanted).mean() <= 0.05 * wanted.std()


@pytest.mark.parametrize("exact", ["gate_proj", "up_proj", "q_proj", "k_proj", "o_proj", "lm_head"])
def test_each_weight_may_have_an_arithmetic_of_its_own(exact: str) -> None:
    tokens = prompt(100)
    wanted = reference("llama", tokens)

    def others_int8(rows: Rows) -> tuple[Format, Arithmetic]:
        return PLAIN if rows.unpacked else (Format.INT8, Arithmetic.Q8DOT)

    made = decoder("llama", others_int8, exact=exact)
    found = at_once(made, tokens)
    assert same(in_parts(made, tokens, [20, 1, 79]), found)
    assert made.formats == {PLAIN, (Format.INT8, Arithmetic.Q8DOT)}
    assert np.abs(found - wanted).mean() <= 0.05 * wanted.std()


def test_a_step_without_logits_writes_keys_and_values() -> None:
    tokens = prompt(100)
    made = decoder("llama", always(*PLAIN))
    wanted = at_once(made, tokens)[70:]
    made = decoder("llama", always(*PLAIN))
    table = list(range(7))
    assert step(made, 16, [(tokens[:70], 0, table)], wanted=False).shape == (0, VOCABULARY)
    assert same(step(made, 16, [(tokens[70:], 70, table)]), wanted)


@every_kind
@pytest.mark.parametrize("name", FEW)
def test_keys_and_values_of_others_reach_no_logit(name: str, kind: str) -> None:
    *choice, short_kv = KINDS[kind]
    tokens = prompt(83)
    made = decoder(name, always(*choice), short_kv=short_kv)
    wanted = at_once(made, tokens)
    step(made, 16, [(prompt(90, 1), 0, [5, 4, 3, 2, 1, 0])])  # the same blocks, now longer and in another order
    assert same(at_once(made, tokens), wanted)


def test_threads_end_with_their_decoder() -> None:
    def threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    for _round in range(3):
        before = threads()
        made = decoder("llama", always(*PLAIN), threads=3)
        own = threads() - before
        assert len(own) == 2
        at_once(made, prompt(40))
        del made
        eventually(lambda own=own: not own & threads())  # the system lists a thread for a moment after its end
