"""From a folder of safetensors to a transformers model and its tokenizer. It does not know how a model is batched."""

from __future__ import annotations

import torch

from llm_tools import weights

from .. import attention
from ..config import ConfigError, EngineConfig, cache_folder
from . import machine
from .attaching import attach
from .identity import digest_of_weights, weights_bytes
from .loaded import LoadedModel
from .resources import refuse_too_large, resolve_dtype
from .shape import refuse_unsafe


def load(config: EngineConfig) -> LoadedModel:
    """Load the model that `config` names. Raises ConfigError with the reason and the cure."""
    import transformers

    attention.register()
    device = torch.device(config.device)
    config = resolve_dtype(config, device)
    folder = weights.prepare(config.model)
    dtype = getattr(torch, config.dtype)
    memory = machine.memory()
    if device.type == "cpu":
        refuse_too_large(weights_bytes(folder, dtype.itemsize), memory)
    digest = digest_of_weights(folder, cache_folder())
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
    return attach(model, tokenizer, config, digest, memory)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
