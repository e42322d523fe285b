"""The files of a checkpoint in Hugging Face layout: its manifest and digest, and its sharded tensors, read lazily.

folder/  config.json  model.safetensors  or  model.safetensors.index.json + model-0000i-of-0000n.safetensors
         manifest.sha256 (optional)      lines of `sha256  filename`, checked before anything is loaded
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from app.errors import CheckpointError
from app.model.config import FP8_BLOCK
from app.model.fields import read_json
from app.model.uploads import NUM_READERS, Uploader, data_offsets

MANIFEST_FILE = "manifest.sha256"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# What decides a model's output when there is no manifest to say so; cards, licences and figures do not.
_MANIFEST_SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".tiktoken"}
_MANIFEST_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")
SCALE_SUFFIX = "_scale_inv"
Restore = Callable[[torch.Tensor], torch.Tensor]


def checkpoint_digest(folder: str | Path, *, expected: str | None = None) -> str:
    """sha256 over the sorted manifest lines; a manifest is computed from the files if the folder holds none.

    Raises CheckpointError if it is not `expected`. Whether the files match their manifest is `verify_manifest`'s part.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder) or _hash_files(folder, _manifest_names(folder))
    lines = sorted(f"{sha256}  {name}\n" for name, sha256 in manifest.items())
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    if expected is not None and digest != expected:
        raise CheckpointError(f"the checkpoint's digest is {digest}, expected {expected}", file=str(folder))
    return digest


def verify_manifest(folder: str | Path, *, part: int = 0, num_parts: int = 1) -> None:
    """Hash the files, or every `num_parts`-th, and compare them with the folder's manifest, if it has one.

    Raises CheckpointError on a missing or changed file, or a shard that the manifest leaves out.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    if manifest is None:
        return
    for name, actual in _hash_files(folder, sorted(manifest)[part::num_parts]).items():
        if actual != manifest[name]:
            raise CheckpointError(f"sha256 is {actual}, {MANIFEST_FILE} has {manifest[name]}", file=str(folder / name))
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest:
            raise CheckpointError(f"is not listed in {MANIFEST_FILE}", file=str(path))


def _manifest_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise CheckpointError("is not a folder", file=str(folder))
    return sorted(path.name for path in folder.iterdir() if path.suffix in _MANIFEST_SUFFIXES and path.is_file())


def _read_manifest(folder: Path) -> dict[str, str] | None:
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    manifest = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        match = _MANIFEST_LINE.fullmatch(line)
        if match is None or not _is_plain_name(match.group(2)):
            raise CheckpointError(f"line {number}: expected `sha256  filename`, got {line!r}", file=str(path))
        manifest[match.group(2)] = match.group(1)
    return manifest


def _is_plain_name(name: str) -> bool:
    return Path(name).name == name


def _hash_files(folder: Path, names: list[str]) -> dict[str, str]:
    def hash_file(name: str) -> str:
        try:
            with open(folder / name, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror})", file=str(folder / name)) from None

    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(names, pool.map(hash_file, names), strict=True))


@dataclass(frozen=True, slots=True)
class Span:
    """A part of one dimension of a stored tensor."""

    total: int  # the dimension's size in the file
    start: int
    count: int

    @classmethod
    def whole(cls, total: int) -> Span:
        return cls(total, 0, total)

    @property
    def indices(self) -> slice:
        return slice(self.start, self.start + self.count)


class TensorSource(Protocol):
    """What a model's weights are read from."""

    def fill(self, name: str, destination: torch.Tensor, spans: Sequence[Span] = ()) -> None:
        """Write the tensor called `name` in the Hugging Face layout, or the part of it that `spans` name, one for each
        dimension, into `destination`, at the latest at `flush`."""

    def skip(self, name: str) -> None:
        """Take note of a tensor of which this rank needs nothing."""

    def flush(self) -> None:
        """Return when every tensor asked for so far can be read on its device's default stream."""


class Checkpoint:
    """The tensors of a folder by name. Opening reads the headers only; `fill` reads one tensor, or a part of it.

    What goes to a CUDA device is read by several threads at a time, straight into pinned memory and from there to its
    place: `fill` returns at once, and `flush` when all of it has been enqueued on the device.
    """

    def __init__(self, folder: str | Path, num_readers: int = NUM_READERS) -> None:
        """Raises CheckpointError on a missing or corrupt shard, or an index that names a tensor its shard lacks."""
        folder = Path(folder)
        index_path = folder / INDEX_FILE
        self.source = index_path if index_path.exists() else folder / SINGLE_FILE
        weight_map = _read_index(index_path) if index_path.exists() else {}
        self._shards: dict[Path, Any] = {}
        self._files: dict[str, Path] = {}
        for path in [folder / name for name in sorted(set(weight_map.values()))] or [self.source]:
            self._shards[path] = _open_shard(path)
            for name in self._shards[path].keys():  # noqa: SIM118 - a safetensors handle is no mapping
                self._files.setdefault(name, path)
        for name, file in weight_map.items():
            if self._files.get(name) is None or name not in self._shards[folder / file].keys():  # noqa: SIM118
                raise CheckpointError(
                    f"{INDEX_FILE} places it here, but it is absent", file=str(folder / file), tensor=name
                )
            self._files[name] = folder / file
        self._unread = set(self._files)
        self.bytes_read = 0  # or asked for, where `flush` has yet to wait
        self._offsets = {path: data_offsets(path) for path in self._shards}
        self._uploader = Uploader(num_readers)

    def fill(self, name: str, destination: torch.Tensor, spans: Sequence[Span] = ()) -> None:
        """Copy the tensor into `destination`, converting its dtype, device and FP8 blocks.

        spans: one per dimension, if the destination is a part of the tensor; nothing else is read then
        Raises CheckpointError if the tensor is missing, has another shape, or cannot be read; on a CUDA device an
        error of the reading itself comes out of `flush`.
        """
        spans = spans or [Span.whole(size) for size in destination.shape]
        tensor = self._read(name, spans)
        file = str(self._files[name])
        restore: Restore | None = None
        if tensor.dtype == torch.float8_e4m3fn and destination.dtype != torch.float8_e4m3fn:
            scales = self._read(name + SCALE_SUFFIX, [covering_blocks(span) for span in spans])
            skipped = [span.start % FP8_BLOCK for span in spans]
            restore = partial(dequantize_blocks, scales=scales, skipped=skipped)
        elif tensor.dtype != destination.dtype and min(tensor.element_size(), destination.element_size()) == 1:
            raise CheckpointError(f"dtype {tensor.dtype} is not supported here", file=file, tensor=name)
        elif not tensor.dtype.is_floating_point:
            raise CheckpointError(f"dtype {tensor.dtype} is not supported", file=file, tensor=name)
        if destination.is_cuda:
            self._uploader.submit(partial(self._upload, name, tensor, spans, restore, destination))
        else:
            destination.copy_(restore(tensor) if restore else tensor)

    def skip(self, name: str) -> None:
        """Count the tensor as read. Raises CheckpointError if it is missing."""
        self._file_of(name)
        self._unread -= {name, name + SCALE_SUFFIX}

    def _file_of(self, name: str) -> Path:
        if name not in self._files:
            raise CheckpointError("is missing", file=str(self.source), tensor=name)
        return self._files[name]

    def flush(self) -> None:
        """Wait for the reads of `fill`. Raises the first CheckpointError among them."""
        self._uploader.flush()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        """End the readers, whatever was pending."""
        self._uploader.close()

    def _upload(
        self, name: str, tensor: torch.Tensor, spans: Sequence[Span], restore: Restore | None, destination: torch.Tensor
    ) -> None:
        """Runs in a reader's thread."""
        path = self._files[name]
        is_direct = tensor.dtype == destination.dtype and destination.is_contiguous()
        raw = destination if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype, device=destination.device)
        lies_together = all(span.count == span.total for span in spans[1:])  # whole rows, one after the other
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        start = self._offsets[path][name] + (spans[0].start * row_bytes if spans else 0)
        try:
            with torch.cuda.device(destination.device):
                if lies_together:
                    self._uploader.read(path, start, raw)
                else:  # columns of a matrix, out of the memory map
                    raw.copy_(tensor)
                if raw is not destination:
                    destination.copy_(restore(raw) if restore else raw)
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot be read ({error})", file=str(path), tensor=name) from None

    def close(self, is_ignored: Callable[[str], bool]) -> None:
        """Wait for the reads. Raises CheckpointError if a tensor was never read, unless `is_ignored(name)`."""
        self.flush()
        self._shards.clear()
        unexpected = sorted(name for name in self._unread if not is_ignored(name))
        if unexpected:
            others = f" (and {len(unexpected) - 1} more)" if len(unexpected) > 1 else ""
            raise CheckpointError(f"is unexpected{others}", file=str(self._files[unexpected[0]]), tensor=unexpected[0])

    def _read(self, name: str, spans: Sequence[Span]) -> torch.Tensor:
        path = self._file_of(name)
        self._unread.discard(name)
        try:
            stored = self._shards[path].get_slice(name)
            shape, expected = stored.get_shape(), [span.total for span in spans]
            if shape != expected:
                raise CheckpointError(f"expected shape {expected}, got {shape}", file=str(path), tensor=name)
            tensor: torch.Tensor = stored[tuple(span.indices for span in spans)]
        except (SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"cannot be read ({error})", file=str(path), tensor=name) from None
        self.bytes_read += tensor.nbytes
        return tensor


def covering_blocks(span: Span) -> Span:
    """The scales of a span, along its dimension."""
    first, end = span.start // FP8_BLOCK, -(-(span.start + span.count) // FP8_BLOCK)
    return Span(-(-span.total // FP8_BLOCK), first, end - first)


def dequantize_blocks(tensor: torch.Tensor, scales: torch.Tensor, skipped: Sequence[int] = (0, 0)) -> torch.Tensor:
    """FP8 e4m3 [M, N] with one scale per 128x128 block, on any device -> fp32 [M, N].

    skipped: rows and columns of the first blocks that lie before the tensor's own, if it is a part of a larger one
    """
    (rows, columns), (top, left) = tensor.shape, skipped
    by_row = scales.to(tensor.device).float().repeat_interleave(FP8_BLOCK, dim=0)[top : top + rows]
    return tensor.float().mul_(by_row.repeat_interleave(FP8_BLOCK, dim=1)[:, left : left + columns])


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("weight_map: expected an object of tensor names and shard files", file=str(path))
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise CheckpointError(
                f"weight_map: expected a file of the same folder, got {file!r}", file=str(path), tensor=name
            )
    return weight_map


def _open_shard(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError("is missing", file=str(path))
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"is corrupt ({error})", file=str(path)) from None
