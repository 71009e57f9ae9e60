"""Files that are whole, or are not there at all."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor


def write_bytes(path: Path, data: bytes) -> None:
    """Write to a file beside it, make that durable, then rename it: a reader sees the old file or the new one."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write named tensors as safetensors, and give back the digest of the file, to know it again."""
    data = save({name: value.contiguous() for name, value in tensors.items()})
    write_bytes(path, data)
    return digest(data)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
