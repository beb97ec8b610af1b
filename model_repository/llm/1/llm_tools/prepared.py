"""From what the deployer wrote to a folder with the configuration and a source of tensors, nothing inflated.

What a GGUF file says of its model is read by transformers once, and kept in the cache under a digest of the file's
headers; a warm start imports neither torch nor transformers. `load_reference` is transformers' own model of it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_engine.config import ConfigError, cache_folder
from llm_kernels.shared import locked, new_folder, open_to_others

from . import gguf_file, weights
from .describing import describe, is_direct, prove_folder, read_places
from .folder import CONFIG, first_line, tensors
from .gguf_header import GgufHeader, read_header
from .sources import GgufSource, Place, SafetensorsSource, TensorSource
from .tensors import refuse_unproven
from .weights import Progress, silent

_DESCRIPTION = 1  # raised when what `describe` writes changes, or what it refuses


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model: `folder` holds its configuration and tokenizer, in the files of transformers; `source` its tensors."""

    folder: Path
    source: TensorSource


def prepare_source(spec: str, cache: Path | None = None, progress: Progress = silent) -> Prepared:
    """Return the model that `spec` names: a folder, a `.gguf` file, `package://NAME/FILE` or a Hugging Face id.

    A GGUF file is used as it is, or, if it is of an architecture whose tensors are stored otherwise, converted as
    `weights.prepare` does. That tensors fit the configuration is proven for GGUF files and for families whose steps may
    be native; for others by `load_reference`. Raises ConfigError with the cure.
    """
    cache = cache or cache_folder()
    try:
        path = weights.locate(spec, progress)
        if path.suffix != ".gguf":
            return _proven(path, cache, progress)
        progress("reading the weights file", 0, None)
        parts = gguf_file.parts(path)
        headers = [read_header(part) for part in parts]
        gguf_file.check_parts(headers)
        if not is_direct(headers):
            folder = weights.prepare(str(path), cache, progress)
            return Prepared(folder, SafetensorsSource(folder))
        return _described(parts, headers, cache, progress)
    except OSError as error:  # a file that may not be read, a disk that fails
        raise ConfigError(f"model {spec!r} cannot be read: {first_line(error)}") from error


def load_reference(prepared: Prepared, dtype: str = "float32", attention: str | None = None) -> Any:
    """Return transformers' model with every weight out of the source, unpacked and then rounded to `dtype`.

    `attention` names an implementation that transformers knows, by default its own choice. Raises ConfigError unless
    each weight was loaded once, and none is left over.
    """
    import transformers

    folder, source = prepared.folder, prepared.source
    transformers.utils.logging.disable_progress_bar()
    options = {
        "dtype": dtype,
        "attn_implementation": attention,
        "ignore_mismatched_sizes": True,  # they are told below, by name
        "output_loading_info": True,
    }
    if isinstance(source, GgufSource):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        state = {name: _Unread(source, name) for name in source.tensors()}
        model, report = kind.from_pretrained(None, config=config, state_dict=state, **options)
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        stored: Sequence[str] = ()
    else:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, trust_remote_code=False, **options
        )
        stored = list(tensors(folder))
    refuse_unproven(f"model folder {folder}", model, report, stored)
    return model.eval().requires_grad_(requires_grad=False)


class _Unread:
    """A tensor that is unpacked when transformers takes it, as it takes those of safetensors: few are at once."""

    def __init__(self, source: TensorSource, name: str) -> None:
        self._source = source
        self._name = name

    def __getitem__(self, _whole: Any) -> Any:
        import numpy as np
        import torch

        values = self._source.float32(self._name)
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))  # a copy of what is a view of the file


def _proven(folder: Path, cache: Path, progress: Progress) -> Prepared:
    """A folder whose tensors fit its configuration. That is remembered, so that a warm start needs no transformers."""
    source = SafetensorsSource(folder)
    if source.is_canonical:
        shapes = {name: info.shape for name, info in source.tensors().items()}
        proof = cache / "models" / f"proven-{_digest_of_shapes(folder, shapes)}-v{_DESCRIPTION}"
        if not proof.exists():
            progress("checking the model's tensors", 0, None)
            prove_folder(folder, shapes)
            with contextlib.suppress(OSError):  # then the next start proves it again
                proof.parent.mkdir(parents=True, exist_ok=True)
                proof.touch()
    return Prepared(folder, source)


def _digest_of_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> str:
    digest = hashlib.blake2b((folder / CONFIG).read_bytes(), digest_size=8)
    digest.update(repr(sorted(shapes.items())).encode())
    return digest.hexdigest()


def _described(parts: Sequence[Path], headers: Sequence[GgufHeader], cache: Path, progress: Progress) -> Prepared:
    target = cache / "models" / f"{parts[0].stem}-{_digest(headers)}-v{_DESCRIPTION}"
    places = _recall(target, headers)
    if places is None:
        progress("reading the configuration", 0, None)
        try:
            places = _make(target, parts, headers)
        except OSError as error:
            reason = "no space left" if error.errno == errno.ENOSPC else error.strerror or error
            raise ConfigError(
                f"cannot write the configuration of {parts[0].name} to {target.parent}: {reason}; "
                f"set TOKENSTREAM_CACHE to a folder that you can write to"
            ) from None
    return Prepared(target, GgufSource(headers, places))


def _make(target: Path, parts: Sequence[Path], headers: Sequence[GgufHeader]) -> dict[str, Place]:
    """Write the description in a temporary folder and rename it, under a lock, unless another process just has."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / f".{target.name}.lock"):
        if (places := _recall(target, headers)) is not None:
            return places
        for stale in (target, *target.parent.glob(f".{target.name}.tmp-*")):  # damaged, or left by a killed process
            shutil.rmtree(stale, ignore_errors=True)
        work = new_folder(target.parent, f".{target.name}.tmp-")
        try:
            describe(parts, work)
            open_to_others(work)
            work.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return read_places(target)


def _recall(folder: Path, headers: Sequence[GgufHeader]) -> dict[str, Place] | None:
    """The places in an earlier description; None if it is absent or damaged."""
    try:
        places = read_places(folder)
    except (ConfigError, OSError):
        return None
    stored = {tensor.name for header in headers for tensor in header.tensors}
    return places if stored.issuperset(place.stored for place in places.values()) else None


def _digest(headers: Sequence[GgufHeader]) -> str:
    """A digest of all that a description depends on: the headers and the rope's factors, none of the weights."""
    digest = hashlib.blake2b(digest_size=8)
    for header in headers:
        with header.file.open("rb") as file:
            digest.update(file.read(header.data_start))
        digest.update(repr(gguf_file.rope_factors(header)).encode())
    return digest.hexdigest()
