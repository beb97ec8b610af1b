"""Which level of instructions is chosen for which CPU, and what a named one does to torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from llm_kernels import cpu_level
from llm_kernels.cpu_level import CpuLevelError, cap_libraries, choose_level, cpu_flags, levels, runnable

ROOT = Path(__file__).parents[2]
V2 = "fpu pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
ZEN_3, ZEN_4 = V3, f"{V4} avx512_vnni avx512_bf16"
SKYLAKE, CASCADE_LAKE = V4, f"{V4} avx512_vnni"
ALDER_LAKE = f"{V3} avx_vnni"
SAPPHIRE_RAPIDS = f"{ZEN_4} avx_vnni amx_bf16"
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="caps are for x86 alone")


def cpuinfo(*flags: str) -> str:
    """The text of a machine whose processors have these flags."""
    lines = (
        f"processor\t: {n}\nmodel name\t: a CPU\nflags\t\t: {each}\nbugs\t\t: fma\n" for n, each in enumerate(flags)
    )
    return "\n".join(lines)


def chosen(flags: str, name: str | None = None, machine: str = "x86_64") -> str:
    environ = {} if name is None else {"TOKENSTREAM_CPU": name}
    return choose_level(environ, cpu_flags(cpuinfo(flags)), machine).name


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (V2, "generic"),
        (ZEN_3, "x86-64-v3"),
        (ALDER_LAKE, "x86-64-v3-avxvnni"),
        (SKYLAKE, "x86-64-v4"),
        (CASCADE_LAKE, "x86-64-v4-vnni"),
        (ZEN_4, "x86-64-v4-bf16"),
        (SAPPHIRE_RAPIDS, "x86-64-v4-bf16"),
    ],
)
@pytest.mark.parametrize("asked", [None, "", "native"])
def test_a_cpu_gets_the_best_level_that_it_runs(flags: str, name: str, asked: str | None) -> None:
    assert chosen(flags, asked) == name


@pytest.mark.parametrize("missing", sorted({*V4.split()} - {"fpu"}))
def test_a_level_needs_every_one_of_its_instructions(missing: str) -> None:
    flags = " ".join(flag for flag in CASCADE_LAKE.split() if flag != missing)
    assert chosen(flags) == ("x86-64-v3" if missing.startswith("avx512") else "generic")


def test_a_flag_counts_where_all_processors_have_it() -> None:
    assert cpu_flags(cpuinfo("fma avx2", "avx2 sse")) == {"avx2"}
    assert cpu_flags("Features\t: fp asimd\n") == frozenset()


def test_without_cpuinfo_any_cpu_is_assumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_level, "_CPUINFO", tmp_path / "none")
    assert choose_level({}, machine="x86_64").name == "generic"


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_other_machines_have_one_level(machine: str) -> None:
    assert chosen("", machine=machine) == "generic"
    with pytest.raises(CpuLevelError, match=r"^TOKENSTREAM_CPU is 'x86-64-v3'; allowed are native, generic$"):
        chosen("", "x86-64-v3", machine)


def test_a_named_level_is_taken_itself_and_no_better_one() -> None:
    for level in runnable(SAPPHIRE_RAPIDS.split(), "x86_64"):
        assert chosen(SAPPHIRE_RAPIDS, level.name) == level.name


def test_a_name_that_is_none_is_refused_with_those_there_are() -> None:
    names = "native, generic, x86-64-v3, x86-64-v3-avxvnni, x86-64-v4, x86-64-v4-vnni, x86-64-v4-bf16"
    with pytest.raises(CpuLevelError, match=f"^TOKENSTREAM_CPU is 'avx2'; allowed are {names}$"):
        chosen(ZEN_4, "avx2")


def test_a_level_that_the_cpu_does_not_run_is_refused_with_those_it_does() -> None:
    refusal = (
        "^TOKENSTREAM_CPU is 'x86-64-v4-vnni', but this CPU has no avx512_vnni avx512bw avx512cd avx512dq avx512f "
        "avx512vl; allowed here are native, generic, x86-64-v3, x86-64-v3-avxvnni$"
    )
    with pytest.raises(CpuLevelError, match=refusal):
        chosen(ALDER_LAKE, "x86-64-v4-vnni")


def test_levels_differ_in_name_options_and_needs() -> None:
    known = levels("x86_64")
    for kinds in (
        {level.name for level in known},
        {level.options for level in known},
        {level.needs for level in known},
    ):
        assert len(kinds) == len(known)


def test_without_a_name_libraries_are_left_alone() -> None:
    for environ in ({}, {"TOKENSTREAM_CPU": ""}, {"TOKENSTREAM_CPU": "native", "ATEN_CPU_CAPABILITY": "avx2"}):
        before = dict(environ)
        assert cap_libraries(environ) == {}
        assert environ == before


@on_x86
def test_a_named_level_replaces_the_caps_of_whoever_started_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_level, "cpu_flags", lambda: frozenset(ZEN_4.split()))
    environ = {"TOKENSTREAM_CPU": "x86-64-v3"}
    caps = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    assert cap_libraries(environ) == caps
    environ["TOKENSTREAM_CPU"] = "x86-64-v4"
    cap_libraries(environ)
    assert environ["ATEN_CPU_CAPABILITY"] == "avx512"
    assert environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"
    with pytest.raises(CpuLevelError):
        cap_libraries({"TOKENSTREAM_CPU": "x86-64-v3-avxvnni"})


def python(name: str, *code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "model_repository/llm/1"), "TOKENSTREAM_CPU": name},
    )


@on_x86
@pytest.mark.parametrize("first", ["llm_tools", "llm_tools.bench", "llm_tools.beside", "llm_tools.accuracy"])
def test_the_tools_are_capped_before_they_import_torch(first: str) -> None:
    told = python("generic", "-c", f"import {first}, torch; print(torch.backends.cpu.get_cpu_capability())")
    assert (told.stdout, told.returncode) == ("DEFAULT\n", 0), told.stderr


@pytest.mark.parametrize("tool", ["bench", "beside", "weights"])
def test_a_tool_tells_a_name_that_is_none_in_the_line_that_its_reader_knows(tool: str) -> None:
    told = python("avx2", "-m", f"llm_tools.{tool}", "/nonexistent")
    assert told.stdout.startswith('{"error": "TOKENSTREAM_CPU is \'avx2\'; allowed are native, ')
    assert told.stdout.count("\n") == 1
    assert told.returncode == 1


# Triton's module, as far as a model that is not loaded needs it.
ADAPTER = """
import os, sys, types
sys.modules["triton_python_backend_utils"] = backend = types.ModuleType("triton_python_backend_utils")
backend.TritonModelException = type("TritonModelException", (Exception,), {})
backend.__getattr__ = lambda name: 0
from model import TritonPythonModel
try:
    TritonPythonModel().initialize({"model_config": "no JSON"})
except backend.TritonModelException as error:
    print(error)
except ValueError:
    print(os.environ.get("ATEN_CPU_CAPABILITY"), "torch" in sys.modules)
"""


@on_x86
@pytest.mark.parametrize(
    ("name", "told"), [("generic", "default False\n"), ("avx2", "TOKENSTREAM_CPU is 'avx2'; allowed are native, ")]
)
def test_the_model_caps_its_process_before_it_imports_torch(name: str, told: str) -> None:
    done = python(name, "-c", ADAPTER)
    assert done.stdout.startswith(told), done.stderr
    assert done.stdout.count("\n") == 1
