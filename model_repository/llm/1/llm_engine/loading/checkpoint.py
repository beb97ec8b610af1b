"""From a folder of safetensors to a transformers model and its tokenizer. It does not know how a model is batched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from llm_kernels.families import MODEL_TYPES
from llm_tools.folder import CONFIG, first_line, read_json, tensors
from llm_tools.prepared import load_reference, prepare_source
from llm_tools.sources import GgufSource
from llm_tools.tensors import refuse_unproven

from .. import attention
from ..config import ConfigError, EngineConfig, cache_folder
from . import machine
from .attaching import attach
from .generation import check_generation, forget_unstated
from .identity import digest_of_weights
from .loaded import LoadedModel
from .machine import Memory
from .resources import refuse_too_large, resolve_dtype
from .shape import refuse_unsafe
from .tokenizer import load_tokenizer


def load(config: EngineConfig) -> LoadedModel:
    """Load the model that `config` names. Raises ConfigError with the reason and the cure, and nothing else."""
    device = torch.device(config.device)
    with _one_line(f"model {config.model!r}"):
        attention.register()
        prepared = prepare_source(config.model)
    folder, source = prepared.folder, prepared.source
    with _one_line(f"model folder {folder}"):
        check_generation(folder)
        memory = machine.memory()
        numbers = sum(math.prod(info.shape) for info in source.tensors().values())
        is_candidate = _may_be_native(config, device, read_json(folder / CONFIG))
        dtype = _reference_dtype(numbers, memory) if is_candidate else resolve_dtype(config, device).dtype
        if device.type == "cpu":
            refuse_too_large(numbers * getattr(torch, dtype).itemsize, memory)
        digest = digest_of_weights(folder, cache_folder(), source.files)
        if isinstance(source, GgufSource):
            model = load_reference(prepared, dtype, attention.NAME)
        else:
            model = load_model(folder, getattr(torch, dtype))
        tokenizer = load_tokenizer(folder, model.get_output_embeddings().weight.shape[0])
        forget_unstated(model, folder)
        model = model.eval().requires_grad_(requires_grad=False).to(device)
        return attach(model, tokenizer, config, digest, memory, source)


def _may_be_native(config: EngineConfig, device: torch.device, described: Mapping[str, Any]) -> bool:
    """Whether the kernels may compute whole steps: transformers' weights are then a reference, and are dropped."""
    return device.type == "cpu" and config.kernels != "torch" and described.get("model_type") in MODEL_TYPES


def _reference_dtype(numbers: int, memory: Memory) -> str:
    """float32 where that leaves room for the packed weights and the rest."""
    return "float32" if 2 * 4 * numbers < memory.left else "bfloat16"


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
