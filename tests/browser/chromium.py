"""Debian's Chromium for tests: where it lies, and how it is started. `python -m browser.chromium` fetches it ahead.

It brings its libraries and fonts along, so it starts, and draws the same, on a machine that has none of them. It does
not know what drives it, nor what it shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

from debian_packages import ToolMissing, debian_program

PROGRAM = "usr/lib/chromium/chromium"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>{root}/usr/share/fonts</dir>
  <cachedir>{scratch}/fontconfig</cachedir>
  <alias><family>serif</family><prefer><family>DejaVu Serif</family></prefer></alias>
  <alias><family>sans-serif</family><prefer><family>DejaVu Sans</family></prefer></alias>
  <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
"""


def chromium() -> Path:
    """The path of the program, fetched on first use. Raises ToolMissing."""
    return debian_program("chromium", PROGRAM, beside=["fonts-dejavu-core"])


def environment(program: Path, scratch: Path) -> dict[str, str]:
    """All of the environment for a start of `program`; what it keeps on disk goes under the folder `scratch`."""
    root = Path(str(program).removesuffix(PROGRAM))
    fonts = scratch / "fonts.conf"
    fonts.write_text(FONTS.format(root=root, scratch=scratch))
    return {
        "HOME": str(scratch),
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "LD_LIBRARY_PATH": ":".join(_libraries(root)),
        "FONTCONFIG_FILE": str(fonts),
        "GIO_MODULE_DIR": str(scratch),  # the machine's modules are for the machine's libraries
        "DBUS_SESSION_BUS_ADDRESS": "disabled:",
    }


def _libraries(root: Path) -> list[str]:
    """Every folder that holds a library: some find their neighbours by a path that is right only below `/`."""
    patterns = (f"{top}{below}/lib*.so*" for top in ("", "usr/") for below in ("lib/*-linux-gnu", "lib/*-linux-gnu/*"))
    return sorted({str(library.parent) for pattern in patterns for library in root.glob(pattern)})


if __name__ == "__main__":
    try:
        chromium()
    except ToolMissing as error:
        sys.exit(f"the browser for the tests is missing: {error}")
