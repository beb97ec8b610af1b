"""What the images and the compose file promise: linted, without root, on loopback, stopped with patience, health known.

Nothing is built here: hadolint and docker-compose read the files, and what they name is looked up in the project.
Both tools must be installed beside the running Python; a missing one fails.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from tokenstream.commands import app

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted(path for path in (ROOT / "docker").rglob("*Dockerfile"))
TRITON = ROOT / "docker/triton.Dockerfile"
COMPOSE = ROOT / "docker/compose.yaml"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = ("cpu", "gpu")
AFTER_DRAIN_SECONDS = 40  # 5 for the drain's last answers, 35 until a server that does not end is killed


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a Dockerfile: its name in capitals, and the rest as one line."""

    name: str
    text: str


def tool(name: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program that is installed beside this Python."""
    program = Path(sys.executable).parent / name
    return subprocess.run(
        [program, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def instructions(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [Instruction(*line.split(maxsplit=1)) for line in whole]


def stage(path: Path, name: str) -> list[Instruction]:
    """The instructions of one stage, behind its FROM."""
    found: list[Instruction] = []
    inside = False
    for instruction in instructions(path):
        if instruction.name == "FROM":
            inside = instruction.text.endswith(f" AS {name}")
        elif inside:
            found.append(instruction)
    assert found, f"{path} has no stage {name}"
    return found


def last(target: str, name: str) -> str:
    return [step.text for step in stage(TRITON, target) if step.name == name][-1]


def composed(profile: str, **environment: str) -> dict[str, Any]:
    """The profile's only service, as docker-compose understands it."""
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}  # no setting of whoever runs the tests
    arguments = ("--file", str(COMPOSE), "--profile", profile, "config", "--format", "json")
    done = tool("docker-compose", *arguments, env={**clean, **environment})
    assert done.returncode == 0, done.stderr
    services: dict[str, dict[str, Any]] = json.loads(done.stdout)["services"]
    assert list(services) == [profile]
    return services[profile]


def seconds(duration: str) -> float:
    """Seconds in a duration as Go writes it, such as 1m15s."""
    units = {"h": 3600, "m": 60, "s": 1}
    parts = re.findall(r"([\d.]+)([hms])", duration)
    assert "".join(value + unit for value, unit in parts) == duration
    return sum(float(value) * units[unit] for value, unit in parts)


def parse_command(command: Iterable[str]) -> dict[str, Any]:
    """The options of a `tokenstream` command line as the program itself reads them; an unknown one raises."""
    _, name, *arguments = command
    subcommand = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    options: dict[str, Any] = subcommand.make_context(name, arguments).params
    return options


def entrypoint(target: str) -> list[str]:
    command: list[str] = json.loads(last(target, "ENTRYPOINT"))
    return command[command.index("tokenstream") :]


def let_in(path: str) -> bool:
    """Whether a path is sent to the builder: the last line that matches it, or a folder above it, decides."""
    inside = True
    for line in TRITON.with_name("triton.Dockerfile.dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line.lstrip("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if re.fullmatch(f"{pattern}(/.*)?", path):
                inside = line.startswith("!")
    return inside


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = tool("hadolint", str(path))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_argument_of_an_image_is_used(path: Path) -> None:
    steps = instructions(path)
    for number, step in enumerate(steps):
        if step.name == "ARG":
            name = step.text.partition("=")[0]
            assert any(f"${{{name}}}" in later.text for later in steps[number + 1 :]), name


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_names_no_version_of_a_package_of_the_project(path: Path) -> None:
    groups = (*PYPROJECT["project"]["optional-dependencies"].values(), *PYPROJECT["dependency-groups"].values())
    lines = [*PYPROJECT["project"]["dependencies"], *(line for group in groups for line in group)]
    names = {re.split(r"[^\w.-]", line)[0] for line in lines if isinstance(line, str)}
    text = "\n".join(step.text for step in instructions(path))
    found = [name for name in names if re.search(rf"\b{re.escape(name)}(\[[\w,]+\])?\s*[=<>~!]=?\s*\d", text)]
    assert not found


@pytest.mark.parametrize(("target", "missing"), [("cpu", set()), ("gpu", {"nvidia-pytriton"})])
def test_an_image_installs_what_pyproject_says_for_a_server(target: str, missing: set[str]) -> None:
    steps = " ".join(step.text for step in stage(TRITON, target) if step.name == "RUN")
    found = re.search(r"python /src/requirements\.py /src/pyproject\.toml (.*?) >", steps)
    assert found is not None
    arguments = ("docker/requirements.py", "pyproject.toml", *found[1].split())
    done = tool("python", *arguments)
    project = PYPROJECT["project"]
    wanted = {*project["dependencies"], *project["optional-dependencies"]["server"]}
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {line for line in wanted if line.split("==")[0] not in missing}
    assert "numpy<2" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "said"), [(("no-such",), "has no extra no-such"), (("server", "--without", "no-such"), "no-such")]
)
def test_requirements_that_cannot_be_told_are_refused_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = tool("python", "docker/requirements.py", "pyproject.toml", *arguments)
    assert done.returncode != 0
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_builder_gets_what_the_image_copies_and_nothing_private() -> None:
    sources = set()
    for step in instructions(TRITON):
        sources |= set(re.findall(r"--mount=type=bind,source=(\S+?),", step.text))
        if step.name == "COPY" and "--from" not in step.text:
            sources |= set(step.text.split()[:-1])
    assert sources >= {"pyproject.toml", "client", "model_repository", "docker/requirements.py"}
    assert all((ROOT / source).exists() and let_in(source) for source in sources)
    private = (".git/config", ".venv/bin/python", ".cache/run/server.log", ".env", "docker/.env", "tests/ops/secret.py")
    assert not any(let_in(path) for path in private)
    assert not let_in("client/tokenstream/__pycache__/cli.cpython-311.pyc")


@pytest.mark.parametrize("target", TARGETS)
def test_the_server_is_not_root(target: str) -> None:
    user, group = map(int, last(target, "USER").split(":"))
    assert user >= 1000
    assert group >= 1000


@pytest.mark.parametrize("name", ["USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "WORKDIR"])
def test_both_images_behave_alike_from_outside(name: str) -> None:
    assert last("cpu", name) == last("gpu", name)
    assert entrypoint("cpu") == entrypoint("gpu")


@pytest.mark.parametrize("target", TARGETS)
def test_the_image_starts_and_asks_with_options_that_the_program_has(target: str) -> None:
    options = parse_command(entrypoint(target))
    ports = {str(options[f"{service}_port"]) for service in ("http", "grpc", "metrics")}
    assert options["host"] == "0.0.0.0"
    assert set(last(target, "EXPOSE").split()) == ports
    check = json.loads(last(target, "HEALTHCHECK").partition("CMD ")[2])
    assert parse_command(check)["live"] is True
    assert last(target, "STOPSIGNAL") == "SIGTERM"


def test_the_repository_of_the_gpu_image_asks_for_a_gpu_and_is_otherwise_the_same() -> None:
    steps = " ".join(step.text for step in stage(TRITON, "gpu") if step.name == "RUN")
    script = re.findall(r"sed -i '([^']+)' /models/llm/config\.pbtxt", steps)
    source = (ROOT / "model_repository/llm/config.pbtxt").read_text()
    edited = subprocess.run(["sed", *script], input=source, capture_output=True, text=True, timeout=10, check=True)
    before, after = (text_format.Parse(text, model_config_pb2.ModelConfig()) for text in (source, edited.stdout))
    kinds = model_config_pb2.ModelInstanceGroup
    assert [group.kind for group in before.instance_group] == [kinds.KIND_CPU]
    assert [group.kind for group in after.instance_group] == [kinds.KIND_GPU]
    before.ClearField("instance_group")
    after.ClearField("instance_group")
    assert before == after


@pytest.mark.parametrize("profile", TARGETS)
def test_a_stop_waits_longer_than_the_drain(profile: str) -> None:
    service = composed(profile)
    options = parse_command([*entrypoint(profile), *service["command"]])
    assert options["drain_seconds"] == 20
    assert seconds(service["stop_grace_period"]) > options["drain_seconds"] + AFTER_DRAIN_SECONDS


@pytest.mark.parametrize("profile", TARGETS)
def test_the_ports_are_on_loopback_unless_asked_for(profile: str) -> None:
    ports = composed(profile)["ports"]
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}
    assert {str(port["target"]) for port in ports} == set(last(profile, "EXPOSE").split())
    opened = composed(profile, TOKENSTREAM_BIND="0.0.0.0", TOKENSTREAM_GRPC_PORT="9001")["ports"]
    assert [(port["host_ip"], port["published"]) for port in opened if port["target"] == 8001] == [("0.0.0.0", "9001")]


@pytest.mark.parametrize("profile", TARGETS)
def test_health_is_asked_for_once_the_first_start_had_its_time(profile: str) -> None:
    check = composed(profile)["healthcheck"]
    assert parse_command(check["test"][1:])["live"] is True
    assert seconds(check["start_period"]) >= 120
    assert seconds(check["timeout"]) <= seconds(check["interval"])


@pytest.mark.parametrize("profile", TARGETS)
def test_the_container_can_write_to_its_cache_and_to_memory_alone(profile: str) -> None:
    service = composed(profile)
    assert service["read_only"] is True
    assert [mount["target"] for mount in service["volumes"]] == [last(profile, "VOLUME")]
    assert service["volumes"][0]["type"] == "volume"
    assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]
    assert int(service["shm_size"]) >= 1 << 30


@pytest.mark.parametrize("profile", TARGETS)
def test_the_container_is_confined_and_comes_back(profile: str) -> None:
    service = composed(profile)
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["mem_limit"]) > int(service["shm_size"])
    assert service["restart"] == "unless-stopped"
    assert "privileged" not in service
    assert "user" not in service  # the image's own


def test_only_the_gpu_profile_reserves_a_gpu() -> None:
    assert "deploy" not in composed("cpu")
    devices = composed("gpu", TOKENSTREAM_GPUS="2")["deploy"]["resources"]["reservations"]["devices"]
    assert [(device["driver"], device["count"], device["capabilities"]) for device in devices] == [
        ("nvidia", 2, ["gpu"])
    ]


@pytest.mark.parametrize("profile", TARGETS)
def test_compose_builds_the_target_of_its_profile_with_arguments_it_has(profile: str) -> None:
    names = ("PYTHON_IMAGE", "PYTHON_TAG", "TRITON_IMAGE", "TRITON_TAG", "TORCH_INDEX", "VERSION", "REVISION")
    build = composed(profile, **dict.fromkeys(names, "given"))["build"]
    declared = {step.text.partition("=")[0] for step in instructions(TRITON) if step.name == "ARG"}
    assert build["target"] == profile
    assert Path(build["context"]) == ROOT
    assert Path(build["context"], build["dockerfile"]) == TRITON
    assert declared - set(build["args"]) == ({"TRITON_IMAGE", "TRITON_TAG"} if profile == "cpu" else set())
    assert set(build["args"]) <= declared
    assert "args" not in composed(profile)["build"]  # unset, the Dockerfile's defaults hold


def test_every_setting_of_compose_is_documented() -> None:
    text = re.sub(r"(?m)^\s*#.*$", "", COMPOSE.read_text())
    names = set(re.findall(r"\$\{(\w+):-", text)) | set(re.findall(r"^ +(\w+):$", text, re.MULTILINE))
    names = {name for name in names if name.isupper()}
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs/containers.md").read_text()))
    assert "TOKENSTREAM_MODEL" in names
    assert names <= documented
