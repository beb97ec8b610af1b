"""What a model is told apart by: a digest of all that its answers depend on, and a name for what computes them.

The digest covers every byte of the weights, tensor by tensor in the order of their names: neither folders, file names
and times nor the split into shards matter. Hashing is done once for a file, and remembered in the cache folder. It does
not know how a model is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from time import time_ns
from typing import Any, BinaryIO, cast
from uuid import uuid4

import torch

from llm_kernels.objects import source_digest
from llm_tools.gguf_header import read_header
from llm_tools.storage import BY_NUMBER

from ..config import ConfigError, EngineConfig
from . import machine
from .loaded import LoadedModel
from .steps import NativeSteps

_VERSION = 1  # raised when what is hashed, or how, changes
_TORCH_ATTENTION = 1  # raised when attention.py gives other bits
_SAMPLING = 1  # raised when sampling.py draws other tokens from the same logits
_PIECE = 1 << 20
_SETTLED_NS = 2_000_000_000  # a file that was written so lately may be written again under the same time
# What a configuration holds and no result depends on.
_SAYS_NOTHING = {
    *("_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype"),
    *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id"),
    *("problem_type", "_attn_implementation"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a safetensors file: dtype in the format's own words, shape, and where its bytes are in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def weights_files(folder: Path) -> list[Path]:
    """The files that transformers reads from a folder: the one of the usual name, else those of the index, else all."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    with contextlib.suppress(OSError, ValueError, AttributeError):
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        return sorted({folder / str(name) for name in index["weight_map"].values()})
    return sorted(folder.glob("*.safetensors"))


def read_entries(file: BinaryIO) -> list[Entry]:
    """The tensors that a safetensors file says it holds. ValueError or KeyError if that cannot be read."""
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    return [
        Entry(name, said["dtype"], tuple(said["shape"]), *(8 + length + at for at in said["data_offsets"]))
        for name, said in header.items()
        if name != "__metadata__"
    ]


def digest_of_weights(folder: Path, cache: Path, files: Sequence[Path] = ()) -> str:
    """A digest of the name, dtype, shape and bytes of every tensor; hexadecimal. ConfigError if a file is unreadable.

    Of `files`, safetensors or GGUF, or else of those in the folder. About a second per gigabyte and core the first
    time. `cache` need be neither readable nor writable.
    """
    tensors = [pair for file in files or weights_files(folder) for pair in _digests(file, cache / "digests").items()]
    return digest_of(sorted(tensors))


def digest_of(values: Any) -> str:
    """A digest of what JSON can hold, whatever the order of keys; hexadecimal."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest_of_model(weights: str, loaded: LoadedModel) -> str:
    """A digest of all that the answers of `loaded` depend on; `weights` is that of its weights."""
    tokenizer: Any = loaded.tokenizer
    return digest_of(
        {
            "version": _VERSION,
            "weights": weights,
            "config": _telling(cast(Any, loaded.model).config.to_dict()),
            "defaults": asdict(loaded.defaults),
            "eos": sorted(loaded.eos_token_ids),
            "tokenizer": tokenizer.backend_tokenizer.to_str(),
            "special tokens": tokenizer.special_tokens_map,
            "spaces": getattr(tokenizer, "clean_up_tokenization_spaces", None),
            "template": tokenizer.chat_template,
            "dtype": loaded.config.dtype,
            "arithmetic": loaded.arithmetic,
        }
    )


def name_arithmetic(config: EngineConfig, device: torch.device, steps: NativeSteps | None = None) -> str:
    """Name everything that decides which bits come out of the same numbers, so that equal names mean equal bits.

    `steps`: native kernels compute all. Their results depend on no number of threads; those of torch's linears may.
    """
    import transformers

    sampling = f"sampling {_SAMPLING}"
    if device.type == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        chip = f"{torch.cuda.get_device_name(device)} {capability}, CUDA {torch.version.cuda}"
        return f"{_layers(transformers.__version__)}, attention {_TORCH_ATTENTION}, {sampling}, on {chip}"
    processor = f"on {machine.vendor()} {torch.backends.cpu.get_cpu_capability()}"
    if steps is not None:
        processors = f", {processor}" if "dpbf16" in steps.arithmetic else ""  # the others are the same on all
        return f"{steps.name()}, {sampling}{processors}"
    kernels = f"native {source_digest()[:12]}" if config.kernels == "native" else f"attention {_TORCH_ATTENTION}"
    instructions = digest_of({k: v for k, v in torch.cpu.get_capabilities().items() if isinstance(v, bool)})[:8]
    layers = f"{_layers(transformers.__version__)} of {config.threads} threads"
    return f"{layers}, {kernels}, {sampling}, {processor} {instructions}"


def _layers(version: str) -> str:
    return f"layers of transformers {version} in torch {torch.__version__}"


def _telling(config: Any) -> Any:
    """A configuration without what no result depends on, in its parts too."""
    if isinstance(config, dict):
        return {str(key): _telling(value) for key, value in config.items() if str(key) not in _SAYS_NOTHING}
    if isinstance(config, set | frozenset):
        return sorted(map(str, config))  # which have no order of their own
    return [_telling(value) for value in config] if isinstance(config, list | tuple) else config


def _digests(path: Path, cache: Path) -> dict[str, str]:
    """The digest of each tensor of a file, by name."""
    with _readable(path), path.open("rb") as file:
        entries = _gguf_entries(path) if path.suffix == ".gguf" else read_entries(file)
        before = os.fstat(file.fileno())
        identity = (before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns)
        kept = cache / f"{digest_of({'file': identity, 'version': _VERSION})}.json"
        if (found := _recall(kept, entries)) is not None:
            return found
        begun = time_ns()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            found = dict(pool.map(lambda entry: (entry.name, _digest(file.fileno(), entry)), entries))
        after = os.fstat(file.fileno())
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise ConfigError(f"weights file {path} was written while it was read; load again when that is done")
    if begun - max(before.st_mtime_ns, before.st_ctime_ns) > _SETTLED_NS:
        _remember(kept, found)
    return found


def _gguf_entries(path: Path) -> list[Entry]:
    header = read_header(path)
    entries = []
    for tensor in header.tensors:
        begin, kind = header.data_start + tensor.offset, BY_NUMBER[tensor.kind]
        size = tensor.values // kind.values * kind.size
        entries.append(Entry(tensor.name, kind.name, tensor.shape, begin, begin + size))
    return entries


def _digest(descriptor: int, entry: Entry) -> str:
    found = hashlib.blake2b(f"{entry.dtype} {list(entry.shape)}\0".encode(), digest_size=16)
    for at in range(entry.begin, entry.end, _PIECE):
        piece = os.pread(descriptor, min(_PIECE, entry.end - at), at)
        if len(piece) < min(_PIECE, entry.end - at):
            raise EOFError(f"tensor {entry.name} is cut off")
        found.update(piece)
    return found.hexdigest()


def _recall(kept: Path, entries: list[Entry]) -> dict[str, str] | None:
    """What an earlier load wrote; None if nothing, or nothing whole, is there."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(kept.read_bytes())
        if isinstance(found, dict) and found.keys() == {entry.name for entry in entries}:
            return found if all(isinstance(digest, str) for digest in found.values()) else None
    return None


def _remember(kept: Path, digests: dict[str, str]) -> None:
    """Write beside the place and rename, so that nobody reads half of it; where that fails, the next load hashes."""
    beside = kept.with_name(f".{kept.stem}-{uuid4().hex}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(digests))
        beside.replace(kept)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what reading a file raises into ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"weights file {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise ConfigError(f"weights file {path} is damaged ({error}); fetch it again") from None
