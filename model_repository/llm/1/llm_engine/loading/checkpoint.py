"""From a folder of safetensors to a transformers model and its tokenizer. It does not know how a model is batched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from llm_tools import weights
from llm_tools.folder import CONFIG, first_line, read_json, tensors
from llm_tools.tensors import refuse_unproven

from .. import attention
from ..config import ConfigError, EngineConfig, cache_folder
from . import machine
from .attaching import attach
from .generation import check_generation, forget_unstated
from .identity import digest_of_weights, weights_bytes
from .loaded import LoadedModel
from .resources import refuse_too_large, resolve_dtype
from .shape import refuse_unsafe
from .tokenizer import load_tokenizer


def load(config: EngineConfig) -> LoadedModel:
    """Load the model that `config` names. Raises ConfigError with the reason and the cure, and nothing else."""
    device = torch.device(config.device)
    with _one_line(f"model {config.model!r}"):
        attention.register()
        config = resolve_dtype(config, device)
        folder = weights.prepare(config.model)
    with _one_line(f"model folder {folder}"):
        check_generation(folder)
        dtype = getattr(torch, config.dtype)
        memory = machine.memory()
        if device.type == "cpu":
            refuse_too_large(weights_bytes(folder, dtype.itemsize), memory)
        digest = digest_of_weights(folder, cache_folder())
        model = load_model(folder, dtype)
        tokenizer = load_tokenizer(folder, model.get_output_embeddings().weight.shape[0])
        forget_unstated(model, folder)
        model = model.eval().requires_grad_(requires_grad=False).to(device)
        return attach(model, tokenizer, config, digest, memory)


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """The causal language model in `folder`, every weight of which came out of its files. Raises ConfigError."""
    import transformers

    _refuse_foreign_code(folder)
    with _one_line(f"model folder {folder}", f"; check {CONFIG}"):
        model_config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        refuse_unsafe(model_config.get_text_config())
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention.NAME,
            device_map=None,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are told below, by name
            output_loading_info=True,
        )
    refuse_unproven(f"model folder {folder}", model, report, tensors(folder))
    return model


def _refuse_foreign_code(folder: Path) -> None:
    """Raise ConfigError for a model of a kind that transformers does not know; its own code is never run."""
    import transformers

    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"model_type in {folder / CONFIG} must be text, got {kind!r}; correct it, or fetch it again")
    if kind in transformers.CONFIG_MAPPING:
        return
    if config.get("auto_map"):
        raise ConfigError(
            f"model folder {folder} of type {kind!r} needs Python code of its own (auto_map in {CONFIG}), "
            f"which is never run here; choose a model that transformers {transformers.__version__} knows"
        )
    raise ConfigError(
        f"model folder {folder} is of type {kind!r}, which transformers {transformers.__version__} does not know; "
        f"check model_type in {CONFIG}, or choose another model"
    )


@contextmanager
def _one_line(what: str, cure: str = "") -> Iterator[None]:
    """Make whatever a library raises a ConfigError of one line, its cause kept for the log."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        raise ConfigError(f"{what} cannot be loaded: {first_line(error)}{cure}") from error
