"""What a model is told apart by: a digest of all that its answers depend on. It does not know how a model is run."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


def digest_of(folder: Path, tokenizer: Any, dtype: str) -> str:
    """Name weights, tokenizer, template and dtype. Of each weights file: size, header, and 16 samples of 64 KiB."""
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        found.update(f"{file.name}:{size}".encode())
        with file.open("rb") as f:
            for i in range(16):
                f.seek(size * i // 16)
                found.update(f.read(1 << 16))
    found.update(tokenizer.backend_tokenizer.to_str().encode())
    found.update(str(tokenizer.chat_template).encode())
    found.update(dtype.encode())
    return found.hexdigest()
