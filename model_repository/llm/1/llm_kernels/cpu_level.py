"""Which instructions of this CPU the kernels are compiled for: a level, the best one unless $TOKENSTREAM_CPU names one.

A named level also caps the instructions of torch, oneDNN and MKL, so that a newer machine computes as an older one. It
imports none of them, and does not know how kernels are compiled.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "TOKENSTREAM_CPU"
_NATIVE = "native"
_X86 = "x86_64"
_CPUINFO = Path("/proc/cpuinfo")

# As the kernel names them: lzcnt is "abm", sse3 is "pni".
_V2 = frozenset(["cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"])
_V3 = _V2 | frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])
_V4 = _V3 | frozenset(["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"])


class CpuLevelError(ValueError):
    """$TOKENSTREAM_CPU is no level, or none of this CPU. The message is one line with what is allowed."""


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions. What runs on one level need not run on the next: not every CPU has the AVX form of VNNI.

    needs: flags of /proc/cpuinfo. options: what tells GCC and Clang. caps: environment variables that keep torch,
    oneDNN and MKL to it; MKL obeys on Intel's CPUs alone.
    """

    name: str
    machine: str
    options: tuple[str, ...]
    needs: frozenset[str] = frozenset()
    caps: Mapping[str, str] = field(default_factory=dict, hash=False)


def levels(machine: str = platform.machine()) -> tuple[Level, ...]:
    """All levels of a machine, as `uname -m` names it, the best last."""
    if machine != _X86:
        return (Level("generic", machine, ("-march=armv8-a",) if machine == "aarch64" else ()),)
    v3, v4 = ("-march=x86-64-v3",), ("-march=x86-64-v4",)
    vnni = _V4 | {"avx512_vnni"}
    return (
        Level("generic", _X86, ("-march=x86-64",), caps=_caps("default", "SSE41", "SSE4_2")),
        Level("x86-64-v3", _X86, v3, _V3, _caps("avx2", "AVX2", "AVX2")),
        Level("x86-64-v3-avxvnni", _X86, (*v3, "-mavxvnni"), _V3 | {"avx_vnni"}, _caps("avx2", "AVX2_VNNI", "AVX2")),
        Level("x86-64-v4", _X86, v4, _V4, _caps("avx512", "AVX512_CORE", "AVX512")),
        Level("x86-64-v4-vnni", _X86, (*v4, "-mavx512vnni"), vnni, _caps("avx512", "AVX512_CORE_VNNI", "AVX512_E1")),
        Level(
            "x86-64-v4-bf16",
            _X86,
            (*v4, "-mavx512vnni", "-mavx512bf16"),
            vnni | {"avx512_bf16"},
            _caps("avx512", "AVX512_CORE_BF16", "AVX512_E3"),
        ),
    )


def cpu_flags(cpuinfo: str | None = None) -> frozenset[str]:
    """Flags that all processors of a /proc/cpuinfo have, this machine's unless its text is given; empty if unknown."""
    if cpuinfo is None:
        try:
            cpuinfo = _CPUINFO.read_text()
        except OSError:
            return frozenset()
    fields = (line.partition(":") for line in cpuinfo.splitlines())
    found = {value for name, _, value in fields if name.strip() == "flags"}
    return frozenset.intersection(*(frozenset(value.split()) for value in found)) if found else frozenset()


def runnable(flags: Collection[str] | None = None, machine: str = platform.machine()) -> list[Level]:
    """The levels that a CPU with `flags` runs, this one unless they are given; the best last, never empty."""
    flags = cpu_flags() if flags is None else flags
    return [level for level in levels(machine) if level.needs <= frozenset(flags)]


def choose_level(
    environ: Mapping[str, str] = os.environ,
    flags: Collection[str] | None = None,
    machine: str = platform.machine(),
) -> Level:
    """The level that $TOKENSTREAM_CPU names; the best one of the CPU if it is unset, empty or "native".

    Raises CpuLevelError.
    """
    flags = cpu_flags() if flags is None else flags
    here = runnable(flags, machine)
    name = environ.get(VARIABLE) or _NATIVE
    if name == _NATIVE:
        return here[-1]
    known = {level.name: level for level in levels(machine)}
    if name not in known:
        raise CpuLevelError(f"{VARIABLE} is {name!r}; allowed are {', '.join((_NATIVE, *known))}")
    if known[name] not in here:
        missing = " ".join(sorted(known[name].needs - frozenset(flags)))
        allowed = ", ".join((_NATIVE, *(level.name for level in here)))
        raise CpuLevelError(f"{VARIABLE} is {name!r}, but this CPU has no {missing}; allowed here are {allowed}")
    return known[name]


def cap_libraries(environ: MutableMapping[str, str] = os.environ) -> Mapping[str, str]:
    """Set in `environ` what keeps torch, oneDNN and MKL to the level that $TOKENSTREAM_CPU names; return what was set.

    Without a name they take what they find. To be called before torch is imported. Raises CpuLevelError.
    """
    if (environ.get(VARIABLE) or _NATIVE) == _NATIVE:
        return {}
    caps = choose_level(environ).caps
    environ.update(caps)
    return caps


def _caps(torch: str, onednn: str, mkl: str) -> dict[str, str]:
    return {"ATEN_CPU_CAPABILITY": torch, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}
