"""The bf16 kernels of whole steps: each against torch, and the model that they make against transformers."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine import driver, tiny_models
from llm_engine.batch import Batch, BatchBuilder
from llm_engine.loading import LoadedModel
from llm_engine.request import Request, SamplingParams
from llm_engine.scheduler import Chunk, Plan
from llm_kernels import native
from llm_kernels.native import PagedLayout
from llm_tools.limits import Work

pytestmark = driver.needs_native("bfloat16")
OPS = torch.ops.tokenstream
HALF_ULP = 2**-8  # of a bf16 number, relative
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")  # qwen2 has a bias, qwen3 norms its queries and keys


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("depth", [2, 30, 64, 576])
@pytest.mark.parametrize("columns", [1, 16, 33, 64, 100])
def test_linear_rounds_the_exact_sum_and_treats_every_row_alike(columns: int, depth: int, biased: bool) -> None:
    x, weight = random(40, depth), random(columns, depth)
    bias = random(columns) if biased else None
    packed = native.pack(weight)
    out = OPS.linear(x, packed, columns, bias, 1)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), exact, rtol=HALF_ULP, atol=1e-4 * depth**0.5)
    for rows in (1, 2, 13, 14, 15, 29):
        for threads in (1, 2):
            assert torch.equal(OPS.linear(x[-rows:].contiguous(), packed, columns, bias, threads), out[-rows:])


@pytest.mark.parametrize("width", [2, 16, 50, 576])
def test_rms_norm_is_that_of_transformers(width: int) -> None:
    norm = LlamaRMSNorm(width, eps=1e-5).bfloat16()
    norm.weight.data = random(width)
    x = random(40, width)
    with torch.no_grad():
        expected = norm(x)
    out = OPS.rms_norm(x, norm.weight.data, 1e-5)
    torch.testing.assert_close(out, expected, rtol=2 * HALF_ULP, atol=0)  # the last bit, where 1 / sqrt differs in its
    assert (out != expected).float().mean() < 0.01


def test_a_norm_of_zeros_is_zeros() -> None:
    assert not OPS.rms_norm(torch.zeros(2, 16).bfloat16(), torch.ones(16).bfloat16(), 1e-5).any()


def steps(loaded: LoadedModel, ids: list[int], sizes: list[int], threads: int = 1) -> Tensor:
    """Logits of every row, float32 [rows, vocabulary], computed in steps of `sizes` rows; the rest in one."""
    size = loaded.config.block_size
    request = Request("r", ids, SamplingParams(), tokens=ids, prompt_len=len(ids))
    request.blocks = list(reversed(range(-(-len(ids) // size))))
    builder = BatchBuilder(size, loaded.scratch_slot, torch.zeros(1, dtype=torch.int64))
    out: list[Tensor] = []
    start = 0
    for count in (*sizes, len(ids) - sum(sizes)):
        batch = builder.build(Plan((Chunk(request, start, count, samples=False),)))
        out.append(forward(loaded, batch, torch.arange(count), threads))
        start += count
    return torch.cat(out).float()


def forward(loaded: LoadedModel, batch: Batch, head_rows: Tensor, threads: int = 1) -> Tensor:
    assert loaded.llama is not None
    layout = PagedLayout.of(batch, loaded.config.block_size, threads)
    with torch.inference_mode():
        return loaded.llama.forward(batch, head_rows, layout, loaded.caches)


def of_transformers(family: str, dtype: torch.dtype, ids: list[int], layers: int) -> Tensor:
    model = tiny_models.build(family, torch.bfloat16).to(dtype)  # the same rounded weights in both
    model.set_attn_implementation("eager")
    del model.model.layers[layers:]
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits


def loaded_model(family: str, layers: int = 2) -> LoadedModel:
    model = tiny_models.build(family, torch.bfloat16)
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    config = driver.config("bfloat16", kernels="native")
    loaded = driver.loading.attach(model, tiny_models.tokenizer(), config, "digest")
    assert loaded.llama is not None
    return loaded


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_as_close_to_float32_as_transformers_bf16_is(family: str, layers: int) -> None:
    ids = tiny_models.prompt(150)
    exact = of_transformers(family, torch.float32, ids, layers)
    theirs = (of_transformers(family, torch.bfloat16, ids, layers) - exact).abs()
    ours = (steps(loaded_model(family, layers), ids, []) - exact).abs()
    assert exact.abs().mean() > 1
    assert ours.mean() < 1.1 * theirs.mean()
    assert ours.max() < 1.5 * theirs.max()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_gives_the_same_bits_in_steps_of_any_size_and_with_any_threads(family: str) -> None:
    ids = tiny_models.prompt(150)
    loaded = loaded_model(family)
    whole = steps(loaded, ids, [])
    for sizes in ([1] * 149, [1, 2, 3, 5, 7, 13, 16, 17], [64, 64], [14, 15, 90]):
        for threads in (1, 2):
            assert torch.equal(steps(loaded, ids, sizes, threads), whole)


@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_are_held_once(tied: bool) -> None:
    model = _tied(tied)
    packed = [
        weakref.ref(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.lm_head
    ]
    before = [p.data for p in model.parameters()]  # held, so that no address is given out again
    loaded = driver.loading.attach(model, tiny_models.tokenizer(), driver.config("bfloat16"), "digest")
    assert loaded.llama is not None
    assert [ref() for ref in packed] == [None] * len(packed)
    left = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert {name.split(".")[-2] for name in left} >= {"embed_tokens", "norm", "q_proj"}  # of q_proj the bias
    assert not any(name.endswith("proj.weight") or name.startswith("lm_head") for name in left)
    after = {p.data_ptr() for p in model.parameters() if not p.is_meta}
    assert not after & {tensor.data_ptr() for tensor in before}  # those may lie in a file
    held = [p for p in model.parameters() if not p.is_meta] + [t for t in loaded.llama.weights if t.dim() == 4]
    assert loaded.resources.weights_mib == round(sum(t.nbytes for t in held) / 2**20, 1)
    assert loaded.resources.weights_form == "packed for the native kernels, transformers' copy dropped"
    assert loaded.vocab_size == tiny_models.vocab_size()
    twin = driver.loading.attach(
        _tied(tied), tiny_models.tokenizer(), driver.config("bfloat16", kernels="torch"), "digest"
    )
    assert Work.of(loaded).weight_bytes == Work.of(twin).weight_bytes


def _tied(tied: bool) -> Any:
    model = tiny_models.build("qwen2", torch.bfloat16)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def step_arguments(**changed: Any) -> list[Any]:
    """Sound arguments of llama_forward: 3 rows of a tiny model, context 5, blocks of 8; some of them `changed`."""
    loaded = loaded_model("qwen3")
    llama = loaded.llama
    assert llama is not None
    sound = {
        "token_ids": torch.tensor([5, 6, 7]),
        "positions": torch.tensor([2, 3, 4]),
        "slot_mapping": torch.tensor([10, 11, 12]),
        "block_table": torch.tensor([[1]], dtype=torch.int32),
        "query_start": torch.tensor([0, 3], dtype=torch.int32),
        "context_len": torch.tensor([5], dtype=torch.int32),
        "head_rows": torch.tensor([2]),
        "embedding": llama.embedding,
        "cos": llama.cos,
        "sin": llama.sin,
        "weights": list(llama.weights),
        "keys": [cache.key for cache in loaded.caches],
        "values": [cache.value for cache in loaded.caches],
        "heads": llama.heads,
        "windows": llama.windows,
        "block_size": loaded.config.block_size,
        "scale": llama.scale,
        "eps": llama.eps,
        "threads": 1,
        "seconds": None,
    }
    for name, change in changed.items():
        sound[name] = change(sound[name]) if callable(change) else change
    return list(sound.values())


def put(index: int, value: Any, values: list[Any]) -> list[Any]:
    """`values` with another one at `index`."""
    changed = list(values)
    changed[index] = value
    return changed


NONE = torch.empty(0, dtype=torch.bfloat16)
WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("token_ids must be from 0 to", {"token_ids": torch.tensor([5, 6, 10**6])}),
    ("token_ids must be from 0 to", {"token_ids": torch.tensor([5, -6, 7])}),
    ("token_ids", {"token_ids": torch.tensor([5, 6])}),
    ("positions must be from 0 to 255", {"positions": torch.tensor([2, 3, 256])}),
    ("slot_mapping must be from 0 to", {"slot_mapping": torch.tensor([10, 11, 514])}),
    ("head_rows must be from 0 to 2", {"head_rows": torch.tensor([3])}),
    ("block_table names block 99", {"block_table": torch.tensor([[99]], dtype=torch.int32)}),
    ("context_len", {"context_len": torch.tensor([2], dtype=torch.int32)}),
    ("query_start", {"query_start": torch.tensor([0, 2], dtype=torch.int32)}),
    ("embedding", {"embedding": lambda x: x.float()}),
    ("sin", {"sin": lambda x: x[:-1].clone()}),
    ("cos", {"cos": lambda x: x[:, :-1].clone()}),
    ("weights must hold 9 tensors per layer", {"weights": lambda w: w[:-1]}),
    ("input norm", {"weights": partial(put, 0, NONE)}),
    ("q\\|k\\|v is not packed", {"weights": lambda w: put(1, w[1][:-1].clone(), w)}),
    ("bias of q\\|k\\|v", {"weights": partial(put, 2, torch.zeros(3, dtype=torch.bfloat16))}),
    ("down", {"weights": partial(put, 8, NONE)}),
    ("head", {"weights": lambda w: put(-1, w[-1][:-1].clone(), w)}),
    ("layer 1: weights disagree", {"weights": lambda w: put(9 + 7, w[9 + 7].new_zeros(4, 8, 32, 2), w)}),
    ("value cache", {"values": lambda v: put(1, v[1].float(), v)}),
    ("key cache", {"keys": lambda k: put(0, k[0][:-1].clone(), k)}),
    ("KV caches and windows one per layer", {"keys": lambda k: k[:1]}),
    ("KV caches and windows one per layer", {"windows": [0]}),
    ("heads", {"heads": 3}),
    ("window", {"windows": [0, -1]}),
    ("block_size", {"block_size": 0}),
    ("threads", {"threads": 0}),
    ("seconds", {"seconds": torch.zeros(3, dtype=torch.float64)}),
)


@pytest.mark.parametrize(("named", "changed"), WRONG)
def test_an_input_out_of_range_is_refused_by_name(named: str, changed: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=named):
        OPS.llama_forward(*step_arguments(**changed))


def test_wrong_inputs_of_linear_and_norm_are_refused_by_name() -> None:
    x, packed = random(3, 64), native.pack(random(40, 64))
    for named, call in (
        ("x has 62 columns", lambda: OPS.linear(random(3, 62), packed, 40, None, 1)),
        ("x must be", lambda: OPS.linear(x.float(), packed, 40, None, 1)),
        ("weight is not packed for 65 columns", lambda: OPS.linear(x, packed, 65, None, 1)),
        ("bias must have 40", lambda: OPS.linear(x, packed, 40, random(39), 1)),
        ("bias must be", lambda: OPS.linear(x, packed, 40, random(40).float(), 1)),
        ("threads", lambda: OPS.linear(x, packed, 40, None, 0)),
        ("weight must have 64", lambda: OPS.rms_norm(x, random(63), 1e-5)),
        ("even number of inputs", lambda: OPS.pack_linear(random(40, 63), packed)),
        ("out is packed for 64", lambda: OPS.pack_linear(random(40, 62), packed)),
    ):
        with pytest.raises(RuntimeError, match=named):
            call()


def test_every_operator_is_sound() -> None:
    x, weight = random(3, 64), random(40, 64)
    opcheck = torch.library.opcheck
    opcheck(OPS.pack_linear.default, (weight, native.pack(weight)))
    opcheck(OPS.linear.default, (x, native.pack(weight), 40, random(40), 1))
    opcheck(OPS.rms_norm.default, (x, random(64), 1e-5))
    opcheck(OPS.llama_forward.default, tuple(step_arguments()))


def test_the_seconds_of_a_step_are_told() -> None:
    seconds = torch.zeros(4, dtype=torch.float64)
    OPS.llama_forward(*step_arguments(seconds=seconds))
    assert (seconds > 0).all()


def test_the_largest_logit_is_the_first_of_equals_and_nan_wins() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 1003, generator=generator).mul(2).to(torch.bfloat16)
    logits[1, 77:79] = 50.0
    logits[2, 500] = logits[2, 900] = torch.inf
    logits[3, 9] = torch.nan
    logits[4] = -torch.inf
    logits[5] = -logits[5].abs() - 1
    logits[6] = -1.0
    logits[6, [20, 30]] = torch.tensor([-0.0, 0.0], dtype=torch.bfloat16)
    peak, place = torch.ops.tokenstream.row_max(logits)
    expected = logits.max(dim=-1)
    assert torch.equal(place, expected.indices)
    assert torch.equal(peak.nan_to_num(7.0), expected.values.nan_to_num(7.0))
    torch.library.opcheck(torch.ops.tokenstream.row_max.default, (logits[10:],))
    with pytest.raises(RuntimeError, match="logits"):
        torch.ops.tokenstream.row_max(logits.float())
