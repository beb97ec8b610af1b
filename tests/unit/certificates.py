"""A certificate authority for one test, made with openssl: it signs a server for 127.0.0.1, and a client.

It does not know who uses them.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Pair:
    """A key and the certificate that goes with it, as PEM files."""

    key: Path
    certificate: Path


class Authority:
    """Keeps its files in `folder`; `root` is the certificate to trust."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = folder / f"{name}.key"
        self.root = folder / f"{name}.pem"
        new = ["req", "-x509", *_NEW_KEY, "-days", "1", "-subj", f"/CN={name}", "-out", str(self.root)]
        _openssl(*new, "-keyout", str(self._key), "-addext", "basicConstraints=critical,CA:TRUE")

    def sign(self, name: str, *alternatives: str) -> Pair:
        """A pair for `name`, with subject alternative names like `IP:127.0.0.1`."""
        key, request, certificate = (self._folder / f"{name}.{kind}" for kind in ("key", "csr", "crt"))
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={','.join(alternatives or (f'DNS:{name}',))}\n")
        signed = ["-CA", str(self.root), "-CAkey", str(self._key), "-CAcreateserial", "-extfile", str(extensions)]
        _openssl("x509", "-req", "-days", "1", "-in", str(request), "-out", str(certificate), *signed)
        return Pair(key, certificate)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
