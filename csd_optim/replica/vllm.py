"""Files with the fields of vLLM's CheckpointWeightPatch, one for each new version in a folder (docs/publish.md)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CSDStoreError, CSDValueError
from ..files import appears
from .blocks import safetensors_header
from .converted import Converted, VersionKey, locked, metadata_of, retire
from .patches import Patch, Patches, index_dtype
from .reading import retried
from .versions import Tensor, Version, way_to_newest

Array = np.ndarray[Any, Any]
NAME = re.compile(r"(full|patch)-v(\d{10,})\.safetensors")
TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16"}


def follow(directory: Path, out: Path) -> tuple[Path, Version] | None:
    """Write the file from the newest version in the folder `out` to the newest version of `directory`.

    Returns (file, version); None without a newer version. The new file is full if the versions do not continue from the
    newest file. With a new full file, all before the previous full one are removed. Memory for one tensor is enough.

    Raises CSDValueError if `out` has files of another folder; CSDBusyError, CSDOSError, CSDStoreError.
    """
    with locked(out):
        return retried(directory, lambda: _follow(directory, out))


def _follow(directory: Path, out: Path) -> tuple[Path, Version] | None:
    files = _files(out)
    have = _have(files[-1]) if files else None
    way = way_to_newest(directory, have)
    if not way:
        return None
    newest, is_full = way[-1], way[0].is_full
    if have and newest.number <= have[0]:
        raise CSDValueError(
            f"{out} has version {have[0]} of another training than {directory}, whose newest version is "
            f"{newest.number}: name an empty directory"
        )
    path = out / f"{'full' if is_full else 'patch'}-{newest.path.name}.safetensors"
    with appears(path, replaces=True) as temporary, Patches(directory, way, whole_if_nan=True) as patches:
        _write(temporary, newest, None if is_full else have, patches)
    if is_full:
        retire(files, lambda file: file.name.startswith("full"))
    return path, newest


def _files(out: Path) -> list[Path]:
    """Return the files in `out`, by version."""
    found = [(int(match[2]), path) for path in out.iterdir() if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _have(path: Path) -> VersionKey:
    with Converted(path) as file:
        if file.have is None:
            raise CSDStoreError(f"{path} is damaged: it does not say which version it has. Remove it")
        return file.have


def _write(path: Path, newest: Version, base: VersionKey | None, patches: Patches) -> None:
    """Write the patches to a file.

    Reads the patches twice: the file begins with all sizes, and memory may hold only one patch.
    """
    sizes = {}
    for tensor in newest.tensors:
        if base is None:
            sizes[tensor.name] = tensor.numel, True
        elif patch := patches.of(tensor):
            sizes[tensor.name] = len(patch.values), patch.indices is None
    tensors = [t for t in newest.tensors if t.name in sizes]
    metadata = {**metadata_of(newest), "csd_optim.patches": json.dumps([_entry(t, sizes[t.name][1]) for t in tensors])}
    if base:
        metadata |= {"csd_optim.base": str(base[0]), "csd_optim.base_id": base[1]}
    parts = [(f"values/{t.name}", t.dtype, sizes[t.name][0], 2) for t in tensors]
    for t in tensors:
        if not sizes[t.name][1]:
            size = index_dtype(t.shape).itemsize
            parts.append((f"indices/{t.name}", f"I{8 * size}", sizes[t.name][0], size))
    parts.sort(key=lambda part: -part[3])  # readers map the file: each part begins at a multiple of its elements' size
    header = safetensors_header([(name, dtype, [n], n * size) for name, dtype, n, size in parts], metadata)
    begins, end = {}, len(header)
    for name, _, n, size in parts:
        begins[name], end = end, end + n * size
    with open(path, "wb") as file:
        file.write(header)
        for tensor in tensors:
            patch = patches.of(tensor)
            assert patch is not None
            for name, array in _arrays(patch).items():
                file.seek(begins[name])
                file.write(array.data)


def _entry(tensor: Tensor, is_whole: bool) -> dict[str, object]:
    dtype = TORCH_DTYPES[tensor.dtype]
    return {
        "name": tensor.name,
        "dtype": dtype,
        "shape": [*tensor.shape],
        "whole": is_whole,
        "checksum": tensor.checksum,
    }


def _arrays(patch: Patch) -> dict[str, Array]:
    found = {f"values/{patch.name}": np.ascontiguousarray(patch.values)}
    if patch.indices is not None:
        found[f"indices/{patch.name}"] = patch.indices.astype(index_dtype(patch.shape))
    return found
