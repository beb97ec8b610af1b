"""From what the deployer wrote to a folder of safetensors: resolve, and convert a GGUF file once.

A conversion is made in a temporary folder and renamed, under a lock, so a killed one leaves nothing half-made and two
processes convert once. `python -m llm_tools.weights MODEL` does it alone, has the CPU kernels built too, and reports
JSON lines; this module does not know how a model is run.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from llm_engine.config import ConfigError, cache_folder, expand
from llm_kernels.compiling import NativeUnavailableError
from llm_kernels.cpu_level import CpuLevelError, cap_libraries, choose_level
from llm_kernels.objects import Objects
from llm_kernels.shared import locked, new_folder, open_to_others

from . import gguf_file, gguf_tokenizer
from .folder import check_folder, first_line, read_json
from .gguf_header import GgufHeader, read_header
from .gguf_tokenizer import GgufTokenizer
from .json_lines import report, report_progress
from .tensors import refuse_unproven

Progress = Callable[[str, int, int | None], None]

_CONVERSION = 4  # raised when the converted files change, or what is refused, so that old ones are made again
_PACKAGE = "package://"
_SPACE_FACTOR = 4  # a 4-bit GGUF grows to 16 bits per weight


def silent(_stage: str, _done: int, _total: int | None) -> None:
    """Report nothing."""


def prepare(spec: str, cache: Path | None = None, progress: Progress = silent) -> Path:
    """Return the folder that holds config.json, the tokenizer and safetensors for `spec`.

    `spec` is a folder, a `.gguf` file, `package://NAME/FILE` or a Hugging Face id. A GGUF file is converted to
    bfloat16 safetensors in `cache` the first time. Raises ConfigError with the cure.
    """
    try:
        return _prepared(spec, cache or cache_folder(), progress)
    except OSError as error:  # a file that may not be read, a disk that fails
        raise ConfigError(f"model {spec!r} cannot be read: {first_line(error)}") from error


def _prepared(spec: str, cache: Path, progress: Progress) -> Path:
    path = locate(spec, progress)
    return _converted(path, cache, progress) if path.suffix == ".gguf" else path


def locate(spec: str, progress: Progress) -> Path:
    """Return the `.gguf` file or the checked folder of safetensors that `spec` names; fetch it from Hugging Face."""
    path = _package_file(spec) if spec.startswith(_PACKAGE) else Path(spec).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model file {path} does not exist; check the parameter 'model'")
        return path
    if path.is_dir():
        return check_folder(path)
    if spec.startswith((_PACKAGE, "/", ".", "~")) or spec.count("/") > 1:
        raise ConfigError(f"model {spec!r} is neither a folder nor a .gguf file; check the parameter 'model'")
    return _from_hub(spec, progress)


def _package_file(spec: str) -> Path:
    name, _, file = spec.removeprefix(_PACKAGE).partition("/")
    if not name.isidentifier() or not file or ".." in Path(file).parts:
        raise ConfigError(f"model {spec!r} must have the form package://NAME/FILE")
    found = importlib.util.find_spec(name)  # does not import the package, which may need more than its file
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"model {spec!r}: the Python package {name!r} is not installed here; "
            f"install it with pip --no-deps, or set the parameter 'model' to a folder"
        )
    path = Path(next(iter(found.submodule_search_locations))) / file
    if not path.exists():
        raise ConfigError(f"model {spec!r}: the package {name!r} has no file {file!r}")
    return path


def _from_hub(spec: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    progress("fetching the model", 0, None)
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return check_folder(Path(snapshot_download(spec, allow_patterns=patterns)))
    except HFValidationError:
        raise ConfigError(f"model {spec!r} is no folder, no .gguf file and no Hugging Face id") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model {spec!r} is not in the Hugging Face cache and cannot be fetched ({reason}); "
            f"check the name and the network, or set the parameter 'model' to a folder"
        ) from None


def _converted(file: Path, cache: Path, progress: Progress) -> Path:
    progress("reading the weights file", 0, None)
    parts = gguf_file.parts(file)
    target = cache / "weights" / f"{parts[0].stem}-{_digest(parts)}-v{_CONVERSION}"
    if _sound(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.parent / f".{target.name}.lock"):
            if _sound(target):  # another process has just made it
                return target
            shutil.rmtree(target, ignore_errors=True)  # what is there was damaged later, and can be made again
            _convert(file, target, progress)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_space(target.parent, file, _needed(parts, copied=len(parts) > 1)) from None
        raise ConfigError(
            f"cannot write converted weights to {target.parent}: {error.strerror or error}; "
            f"set TOKENSTREAM_CACHE to a folder that you can write to"
        ) from None
    return target


def _sound(folder: Path) -> bool:
    """Whether a converted model is there, as far as its own headers tell."""
    try:
        check_folder(folder)
        read_json(folder / "tokenizer.json")
    except (ConfigError, OSError):
        return False
    return True


def _convert(file: Path, target: Path, progress: Progress) -> None:
    for stale in target.parent.glob(f".{target.name}.tmp*"):  # a killed conversion left it; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    parts = gguf_file.parts(file)
    headers = [read_header(part) for part in parts]
    if len(parts) == 1:
        gguf_file.refuse_part(headers[0])
    copied = gguf_file.must_be_copied(headers)
    needed = _needed(parts, copied=copied)
    if shutil.disk_usage(target.parent).free < needed:
        raise _no_space(target.parent, file, needed)
    work = new_folder(target.parent, f".{target.name}.tmp-")
    try:
        source, out = parts[0], work / "converted"
        if copied:
            source = work / file.name
            progress("merging the parts of the weights" if len(parts) > 1 else "copying the weights", 0, None)
            gguf_file.copy(headers, source)
        _unpack(read_header(source, parts[0]), gguf_tokenizer.read(headers[0]), out, progress)
        open_to_others(out)  # safetensors keeps its files to their owner
        out.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unpack(header: GgufHeader, tokenizer: GgufTokenizer, out: Path, progress: Progress) -> None:
    """Write a file as bfloat16 safetensors with its tokenizer. About 20 seconds for 135 M parameters on two cores."""
    total = 4
    progress("converting the weights", 0, total)
    import torch
    import transformers

    gguf_file.check_types(header)
    source = header.file
    transformers.utils.logging.disable_progress_bar()
    packing = transformers.GgufConfig(dequantize=True)  # packed weights could not be saved
    progress("converting the weights", 1, total)
    try:
        config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
        gguf_file.complete_config(header, config)
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            config=config,
            dtype=torch.bfloat16,
            quantization_config=packing,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        progress("converting the weights", 2, total)
    except ConfigError:
        raise
    except Exception as error:  # its header is sound, so what fails here is what transformers makes of its contents
        raise ConfigError(
            f"model file {header.name} cannot be converted ({first_line(error)}); "
            f"serve the safetensors original of this model"
        ) from error
    refuse_unproven(f"model file {header.name}", model, loading)
    gguf_file.refuse_leftovers(header, model)
    progress("converting the weights", 3, total)
    model.generation_config.eos_token_id = list(tokenizer.end_ids) or None
    model.save_pretrained(out)
    tokenizer.save(out)
    _forget_source(out / "config.json")
    progress("converting the weights", total, total)


def _forget_source(config_file: Path) -> None:
    """Drop what speaks of the packed file, so that the folder loads like any other."""
    config = json.loads(config_file.read_text())
    for key in ("quantization_config", "_model_name_or_path"):
        config.pop(key, None)
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def _digest(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        with file.open("rb") as f:
            hashlib.file_digest(f, lambda: digest)
    return digest.hexdigest()


def _needed(files: list[Path], *, copied: bool) -> int:
    """Bytes that converting `files` takes."""
    return (_SPACE_FACTOR + copied) * sum(file.stat().st_size for file in files)


def _no_space(folder: Path, file: Path, needed: int) -> ConfigError:
    free = shutil.disk_usage(folder).free
    return ConfigError(
        f"no space to convert {file.name} in {folder}: {needed >> 20} MiB needed, {free >> 20} MiB free; "
        f"free some, or set TOKENSTREAM_CACHE to another folder"
    )


def build_kernels(cache: Path, progress: Progress) -> None:
    """Compile the CPU kernels if there are none. Where that fails, the server says why, and does without them."""
    with contextlib.suppress(NativeUnavailableError, CpuLevelError):
        objects, level = Objects(cache), choose_level()
        if not objects.is_ready(level):
            progress("building the CPU kernels", 0, None)
            objects.build(level)


def main() -> int:
    """Prepare one model and the CPU kernels, and report JSON lines: progress, then the path or the error."""
    parser = argparse.ArgumentParser(prog="python -m llm_tools.weights", description=main.__doc__)
    parser.add_argument("model", help="folder, .gguf file, package://NAME/FILE or Hugging Face id")
    spec = parser.parse_args().model

    from .prepared import prepare_source  # which converts by this module

    try:
        cap_libraries()
        path = prepare_source(expand(spec), progress=report_progress).folder
        build_kernels(cache_folder(), report_progress)
    except (ConfigError, CpuLevelError) as error:
        report(error=str(error))
        return 1
    except Exception as error:  # noqa: BLE001 (whoever started this process waits for one line)
        traceback.print_exc()
        report(error=f"model {spec!r}: {type(error).__name__}: {first_line(error)}")
        return 1
    report(path=os.fspath(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
