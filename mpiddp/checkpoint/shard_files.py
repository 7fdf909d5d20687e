"""The files of torch.distributed.checkpoint: errors in writing that fit, and no code in reading.

torch unpickles its list of shards, ``.metadata``, and whatever is no tensor as it stands.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)

from mpiddp import shown_progress
from mpiddp.checkpoint import folders, progress
from mpiddp.checkpoint.output import Output

__all__ = ["METADATA", "Planner", "Reader", "Refused", "Writer", "read_metadata"]

METADATA = ".metadata"


class Refused(pickle.UnpicklingError):
    """A list of shards makes objects that ``weights_only=True`` does not allow."""


class Writer(FileSystemWriter):
    """Raises OSError where a file cannot be written.

    Args:
        folder: for the files.
        sync_files: see torch's.
    """

    def __init__(self, folder: Path, *, sync_files: bool = True) -> None:
        super().__init__(folder, sync_files=sync_files)
        self.fs = _Files()
        self._whole = folders.whole_of(folder)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this rank's part, and show how far it is. Not collective."""
        parts = [each.tensor_data for each in plan.items if each.tensor_data is not None]
        with progress.shown(
            self._whole,
            "writing",
            lambda: sum(p.chunk.sizes.numel() * p.properties.dtype.itemsize for p in parts),
        ):
            return super().write_data(plan, planner)


class _Files(FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            output = Output(cast("io.BufferedWriter", stream))
            yield cast("io.IOBase", output)
            output.flush()


class Reader(FileSystemReader):
    """Reads shards as a list says that was read before.

    Args:
        folder: where they are.
        metadata: the list, from `read_metadata`.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.folder = folder
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the list. Not collective."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read what this rank needs, and show how far it is. Not collective."""
        with progress.shown(self.folder, "reading", lambda: sum(map(self._size_of, plan.items))):
            return super().read_data(plan, planner)

    def _size_of(self, item: ReadItem) -> int:
        stored = self._metadata.state_dict_metadata[item.dest_index.fqn]
        if isinstance(stored, dcp_metadata.TensorStorageMetadata):
            return item.lengths.numel() * stored.properties.dtype.itemsize
        return int(self.storage_data[item.storage_index].length)


class Planner(DefaultLoadPlanner):
    """Fills a state.

    Args:
        weights_only: whether to refuse what `torch.load` does with it.
    """

    def __init__(self, weights_only: bool) -> None:
        super().__init__()
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take what is no tensor into the state. Not collective."""
        if self._weights_only:
            # torch's own reads without it: it gets what was read with it, not what was in the file.
            plain = torch.load(value, map_location="cpu", weights_only=True)
            value = io.BytesIO()
            torch.save(plain, value)
            value.seek(0)
        super().load_bytes(read_item, value)
        shown_progress.advance(value.getbuffer().nbytes)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Count a tensor that is read. Not collective."""
        super().commit_tensor(read_item, tensor)
        shown_progress.advance(tensor.nbytes)


def read_metadata(folder: Path, weights_only: bool) -> Metadata:
    """Return the list of a checkpoint's shards. Not collective.

    Raises:
        Refused: it holds objects that ``weights_only=True`` does not allow.
    """
    with open(folder / METADATA, "rb") as file:
        found = _OfShards(file, folder).load() if weights_only else pickle.load(file)  # noqa: S301  # asked for
    return cast("Metadata", found)


# What torch's own lists consist of, besides the classes of its module and dtypes.
_ALLOWED: tuple[Any, ...] = (
    _StorageInfo,
    torch.Size,
    torch.device,
    torch.serialization._get_layout,
    *((each, f"pathlib.{each.__qualname__}") for each in (Path, PosixPath, PurePosixPath)),
)


class _OfShards(pickle.Unpickler):
    """Makes no objects but those that lists of shards consist of, and what the user allows torch.

    Args:
        file: the pickle.
        folder: of the checkpoint, for errors.
    """

    def __init__(self, file: io.BufferedReader, folder: Path) -> None:
        super().__init__(file)
        self._folder = folder
        self._allowed: dict[str, Any] = {}
        for each in (*_ALLOWED, *torch.serialization.get_safe_globals()):
            allowed, name = each if isinstance(each, tuple) else (each, "")
            self._allowed[name or f"{allowed.__module__}.{allowed.__qualname__}"] = allowed

    def find_class(self, module: str, name: str) -> Any:
        module = module.removesuffix("._local")  # pathlib's, as Python 3.13 writes it
        if f"{module}.{name}" in self._allowed:
            return self._allowed[f"{module}.{name}"]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        found = vars(dcp_metadata).get(name) if module == dcp_metadata.__name__ else None
        if isinstance(found, type) and found.__module__ == module:
            return found
        raise Refused(
            f"{self._folder / METADATA} has {module}.{name}, which weights_only=True does not "
            f"allow. If you trust who wrote it: load(..., weights_only=False)"
        )
