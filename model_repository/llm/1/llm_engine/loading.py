"""From a folder of safetensors to a model that is safe to batch: load, check, attach the KV cache, probe.

A model whose attention, rope or layers could not give the right tokens in a packed batch is refused here with the
reason. The probe decides whether the server may call itself `bitwise`. It does not know requests.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from llm_kernels import native
from llm_kernels.build import NativeUnavailableError
from llm_kernels.native import NativeLlama
from llm_tools import weights

from . import attention
from .attention import KVCache, Layout
from .batch import Batch
from .config import ConfigError, EngineConfig, cache_folder
from .request import RequestError, SamplingParams

log = logging.getLogger(__name__)

CPU_KV_TOKENS = 32768
CUDA_KV_SHARE = 0.8
_ROPE_REFUSED = {
    "dynamic": "its frequencies change with the longest sequence of the batch",
    "longrope": "its factors are chosen by the longest sequence of the batch",
}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device with everything the engine needs to know of it.

    `config` has no unset value left. `exact` is "bitwise" or "sampled". `digest` names weights, tokenizer, template,
    dtype, kernels and exactness. `llama`, if set, computes whole steps in place of `model`.
    """

    config: EngineConfig
    model: nn.Module
    tokenizer: Any
    device: torch.device
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingParams
    caches: tuple[KVCache, ...]
    exact: str
    digest: str
    llama: NativeLlama | None = None

    def forward(self, batch: Batch, head_rows: Tensor) -> Tensor:
        """Logits [head rows, vocabulary] of `batch`; the KV of its rows is written. head_rows: int64 [heads]."""
        block_size = self.config.block_size
        if self.config.kernels == "torch":
            layout: Layout = attention.tile_layout(batch, block_size, self.caches[0].zero_slot)
        else:
            layout = native.PagedLayout.of(batch, block_size, self.config.threads)
            if self.llama is not None:
                return self.llama.forward(batch, head_rows, layout, self.caches)
        out = self.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=head_rows,
            layout=layout,
        )
        return cast(Tensor, out.logits[0])

    @property
    def scratch_slot(self) -> int | None:
        """Where a row that keeps a single row company writes its KV; None where single rows need no company."""
        return self.caches[0].scratch_slot if self.llama is None else None

    def info(self) -> dict[str, Any]:
        """What a client may want to know before it sends anything, ready for JSON."""
        import transformers

        return {
            **asdict(self.config),
            "exact": self.exact,
            "digest": self.digest,
            "vocab_size": self.vocab_size,
            "chat": bool(self.tokenizer.chat_template),
            "eos_token_ids": self.eos_token_ids,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }


def load(config: EngineConfig) -> LoadedModel:
    """Load the model that `config` names. Raises ConfigError with the reason and the cure."""
    import transformers

    attention.register()
    device = torch.device(config.device)
    config = _resolve_dtype(config, device)
    folder = weights.prepare(config.model)
    dtype = getattr(torch, config.dtype)
    try:
        model_config = transformers.AutoConfig.from_pretrained(folder)
        refuse_unsafe(model_config.get_text_config())
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention.NAME, device_map=None
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"model {folder} cannot be loaded: {_first_line(error)}") from error
    model = model.eval().requires_grad_(requires_grad=False).to(device)
    digest = _digest(folder, tokenizer, config.dtype)
    return attach(model, tokenizer, config, digest)


def attach(model: Any, tokenizer: Any, config: EngineConfig, digest: str) -> LoadedModel:
    """Give a transformers model its KV cache and probe it. `config` must name a dtype; ConfigError if it is unsafe."""
    attention.register()
    text_config = model.config.get_text_config()
    refuse_unsafe(text_config)
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"model type {text_config.model_type!r} does not let its attention be replaced; choose another"
        )
    model.set_attn_implementation(attention.NAME)
    device = next(model.parameters()).device
    config = _resolve_threads(config, device)
    dtype = getattr(torch, config.dtype)
    shapes = _discover_attention(model, device)
    if len(shapes) != text_config.num_hidden_layers:
        raise ConfigError(
            f"model type {text_config.model_type!r} has {text_config.num_hidden_layers} layers, {len(shapes)} of them "
            f"with attention; layers with another kind of state cannot be batched here"
        )
    per_token = sum(2 * heads * dim for heads, dim in shapes.values()) * dtype.itemsize
    config = _resolve_sizes(config, text_config, per_token, device)
    config, llama = _choose_kernels(model, config, device)
    slots = config.kv_tokens
    for module, (heads, dim) in shapes.items():
        cast(Any, module).kv_cache = KVCache.empty(slots, heads, dim, dtype, device)
    loaded = LoadedModel(
        config=config,
        model=model,
        tokenizer=tokenizer,
        device=device,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        eos_token_ids=_eos(model, tokenizer),
        defaults=_defaults(model.generation_config),
        caches=tuple(cast(Any, module).kv_cache for module in shapes),
        exact="sampled",
        digest=f"{digest}-{config.kernels}",
        llama=llama,
    )
    log.info("KV cache: %d tokens, %.1f MiB on %s", slots, slots * per_token / 2**20, device)
    return loaded


def refuse_unsafe(config: Any) -> None:
    """Raise ConfigError for a model whose tokens would depend on its neighbours in a packed batch, or be wrong."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"model type {kind!r} is an encoder-decoder; only causal language models are served")
    for rope in _rope_types(config):
        if rope in _ROPE_REFUSED:
            raise ConfigError(
                f"model type {kind!r} uses rope type {rope!r}: {_ROPE_REFUSED[rope]}; choose another model"
            )
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(layer_types - _LAYER_TYPES):
        raise ConfigError(f"model type {kind!r} has layers of kind {unknown[0]!r}, which cannot be batched here")
    if getattr(config, "attention_chunk_size", None):
        raise ConfigError(f"model type {kind!r} attends in chunks, which cannot be batched here")


def _rope_types(config: Any) -> Iterator[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for entry in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        yield str(entry.get("rope_type") or entry.get("type") or "default")


def _discover_attention(model: Any, device: torch.device) -> dict[nn.Module, tuple[int, int]]:
    """Run two tokens and note every attention module with its (kv_heads, head_dim), in the layers' order."""
    from transformers import AttentionInterface

    found: dict[nn.Module, tuple[int, int]] = {}

    def note(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        if getattr(module, "is_causal", True) is False:
            raise ConfigError(f"{type(module).__name__} attends to later tokens too; only causal models are served")
        if key.shape != value.shape:
            raise ConfigError(f"{type(module).__name__} has keys and values of different sizes, which is not supported")
        found[module] = (key.shape[1], key.shape[3])
        return query.transpose(1, 2), None

    AttentionInterface.register(attention.NAME, note)
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device)
        with torch.inference_mode():
            model(input_ids=ids, position_ids=torch.arange(2, device=device)[None], use_cache=False)
    finally:
        attention.register()
    return found


def _resolve_dtype(config: EngineConfig, device: torch.device) -> EngineConfig:
    dtype = choose_dtype(device) if config.dtype == "auto" else config.dtype
    log.info("dtype %s (asked: %s)", dtype, config.dtype)
    return replace(config, dtype=dtype)


def _resolve_threads(config: EngineConfig, device: torch.device) -> EngineConfig:
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // config.cpu_share)
    if device.type == "cpu":
        torch.set_num_threads(threads)
    log.info("device %s, %d threads", device, threads)
    return replace(config, threads=threads)


def _choose_kernels(model: Any, config: EngineConfig, device: torch.device) -> tuple[EngineConfig, NativeLlama | None]:
    """Settle `config.kernels`; with the native ones, also the whole model in native form if it has the shape."""
    if device.type != "cpu" or config.kernels == "torch":
        return replace(config, kernels="torch"), None
    try:
        native.load(cache_folder(), config.dtype)
    except NativeUnavailableError as error:
        if config.kernels == "native":
            raise ConfigError(f"kernels is 'native', but {error}") from None
        times = "one and a half times" if config.dtype == "float32" else "two to five times"
        log.warning("native kernels are off: %s. PyTorch's take their place; a step takes %s as long", error, times)
        return replace(config, kernels="torch"), None
    config = replace(config, kernels="native")
    try:
        llama = NativeLlama.from_model(model, config.max_context)
    except NativeUnavailableError as error:
        log.info("native attention in transformers' layers: %s", error)
        return config, None
    log.info("native kernels for whole steps")
    return config, llama


def choose_dtype(device: torch.device) -> str:
    """bfloat16 where the device computes with it, else float16 on CUDA, else float32."""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    capabilities = torch.cpu.get_capabilities()
    native = ("avx512_bf16", "amx_bf16", "bf16")
    return "bfloat16" if any(capabilities.get(name) for name in native) else "float32"


def _resolve_sizes(config: EngineConfig, model: Any, per_token: int, device: torch.device) -> EngineConfig:
    block = config.block_size
    kv_tokens = config.kv_tokens
    if not kv_tokens and device.type == "cuda":
        kv_tokens = int(CUDA_KV_SHARE * torch.cuda.mem_get_info(device)[0]) // per_token
    kv_tokens = (kv_tokens or CPU_KV_TOKENS) // block * block
    limit = getattr(model, "max_position_embeddings", None) or kv_tokens
    if config.max_context > limit:
        raise ConfigError(f"max_context {config.max_context} is more than the model's limit of {limit} tokens")
    if config.max_context > kv_tokens:
        raise ConfigError(f"max_context {config.max_context} is more than the KV cache holds ({kv_tokens} tokens)")
    max_context = config.max_context or min(limit, kv_tokens)
    if max_context < 2:
        raise ConfigError(f"the KV cache holds {kv_tokens} tokens, too few for any request; raise kv_tokens")
    return replace(config, kv_tokens=kv_tokens, max_context=max_context)


def _eos(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end an answer; empty for a model without any, whose answers end at max_tokens."""
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def _defaults(generation: Any) -> SamplingParams:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    chosen = {name: getattr(generation, name, None) for name in names}
    try:
        return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})
    except RequestError as error:
        raise ConfigError(f"the model's generation_config.json is out of range: {error}") from None


def _digest(folder: Path, tokenizer: Any, dtype: str) -> str:
    """Name weights, tokenizer, template and dtype. Of each weights file: size, header, and 16 samples of 64 KiB."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as f:
            for i in range(16):
                f.seek(size * i // 16)
                digest.update(f.read(1 << 16))
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    digest.update(str(tokenizer.chat_template).encode())
    digest.update(dtype.encode())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


Forward = Callable[[int, int], Tensor]

PROBE_ROWS = (2, 3, 7, 16, 100)


def probe_exactness(rows: int, forward: Forward) -> str:
    """Say "bitwise" if logits do not depend on how a sequence is cut into steps, else "sampled".

    `forward(start, count)` computes rows [start, start + count) of one sequence and returns their logits. One step of
    all `rows` (512 where there is room) is compared, bit by bit, with steps of 2, 3, 7, 16, 100 and the rest: every
    layer and the head see each number of rows.
    """
    whole = forward(0, rows)
    start = 0
    for count in (*PROBE_ROWS, rows):
        count = min(count, rows - start)
        if count < 2:
            break
        if not torch.equal(forward(start, count), whole[start : start + count]):
            return "sampled"
        start += count
    return "bitwise"
