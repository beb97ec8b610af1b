"""Beside the engine: weights made ready, and the engine measured.

What $TOKENSTREAM_CPU names caps the libraries of a process from here on, since all that imports torch comes after.
"""

import contextlib

from llm_kernels.cpu_level import CpuLevelError, cap_libraries

with contextlib.suppress(CpuLevelError):  # each tool tells it, in the form that its reader knows
    cap_libraries()
