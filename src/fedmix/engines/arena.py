"""Tensors handed between processes through shared memory: one copy in, one copy out, and no pickle."""

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmix.errors import FedmixError

ALIGN = 64
Where = list[Any]  # [name, dtype, shape, offset]: JSON


class Arena:
    """A file in memory, without a name, that forked processes share. It grows with its tensors, and ends with them."""

    def __init__(self) -> None:
        shm = Path("/dev/shm")
        self._file = tempfile.TemporaryFile(dir=shm if shm.is_dir() else None)  # noqa: SIM115
        self._size = 0
        self._map: mmap.mmap | None = None
        self._end = 0
        self._placed: dict[int, tuple[Tensor, int]] = {}

    def clear(self) -> None:
        """Forget what is in the arena; its room is used again."""
        self._end, self._placed = 0, {}

    def lay(self, tensors: Mapping[str, Tensor]) -> list[Where]:
        """Copy tensors in and say where they are. The same tensor, laid in again before `clear`, is not copied again."""
        where: list[Where] = []
        for name, value in tensors.items():
            if id(value) not in self._placed:
                # the tensor itself is held, too: as long as it lives no other tensor gets its id
                self._placed[id(value)] = (value, self._copy(value))
            _, offset = self._placed[id(value)]
            dtype = str(value.dtype).removeprefix("torch.")
            where.append([name, dtype, list(value.shape), offset])
        return where

    def _copy(self, value: Tensor) -> int:
        offset = -(-self._end // ALIGN) * ALIGN  # rounded up
        self._end = offset + value.numel() * value.element_size()
        if self._end > self._size:
            self._size = max(self._end, 2 * self._size, 1 << 20)
            self._reserve()
        if value.numel():
            self._view(value.dtype, list(value.shape), offset).copy_(value)
        return offset

    def _reserve(self) -> None:
        """Take the memory now: writing to a file that was only promised memory kills the process when there is none."""
        self._file.truncate(self._size)
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, self._size)
        except OSError as error:
            raise FedmixError(
                f"shared memory must hold {self._size:,} bytes. It cannot ({error.strerror}): give /dev/shm more, "
                "use fewer --workers, or --engine serial."
            ) from error

    def _view(self, dtype: torch.dtype, shape: list[int], offset: int) -> Tensor:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        if self._map is None or offset + count * dtype.itemsize > len(self._map):
            self._map = mmap.mmap(self._file.fileno(), 0)  # the other side may have made it larger
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def take(self, where: list[Where], copy: bool) -> dict[str, Tensor]:
        """The tensors that another process laid in: copies, or views that are good until it clears the arena."""
        views = {name: self._view(getattr(torch, dtype), shape, offset) for name, dtype, shape, offset in where}
        if copy:
            return {name: view.clone() for name, view in views.items()}
        return views

    def close(self) -> None:
        self._placed = {}
        self._map = None
        self._file.close()
