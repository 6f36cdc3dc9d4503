"""What `csd-optim inspect` shows of a folder of published versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from ..errors import CSDError
from ..replica.versions import NAME, Version, directory_of, numbers, read_version
from .output import console, number, size

SHOWN = 20  # versions, unless all are wanted


def is_folder_of_versions(path: Path) -> bool:
    return path.is_dir() and any(NAME.fullmatch(entry.name) for entry in path.iterdir())


def describe_versions(path: Path) -> dict[str, Any]:
    """Return what `inspect` shows, with the versions in ascending order. Raises CSDOSError, CSDStoreError."""
    versions = [read_version(path / directory_of(n)) for n in numbers(path)]
    newest = versions[-1]
    params = sum(t.numel for t in newest.tensors)
    return {
        "directory": str(path),
        "run": newest.run,
        "version": newest.number,
        "step": newest.step,
        "tensors": len(newest.tensors),
        "params": params,
        "bytes": sum(v.nbytes for v in versions),
        "versions": [_describe(v, before) for v, before in zip(versions, [None, *versions], strict=False)],
    }


def _describe(version: Version, before: Version | None) -> dict[str, Any]:
    params = sum(t.numel for t in version.tensors)
    follows = version.base is None or before is None or version.base == before.key
    return {
        "number": version.number,
        "step": version.step,
        "run": version.run,
        "id": version.id,
        "full": version.is_full,
        "follows": follows,
        "bytes": version.nbytes,
        "bytes_per_param": version.nbytes / max(1, params),
        "problem": _problem(version),
    }


def _problem(version: Version) -> str | None:
    """Return why a version cannot be read, from the sizes of its files; their SHA-256 is not computed."""
    try:
        for file in version.files:
            if file.path.stat().st_size != file.nbytes:
                return f"{file.path.name} has not the size that the manifest says"
    except (OSError, CSDError) as e:
        return str(e)
    return None


def show_versions(described: dict[str, Any], everything: bool) -> None:
    out, versions = console(), described["versions"]
    out.print(escape(described["directory"]), style="bold")
    out.print(
        f"version {described['version']}, of step {described['step']}, run {described['run'][:8]}: "
        f"{described['tensors']} tensors of {number(described['params'])} parameters; "
        f"{len(versions)} versions, {size(described['bytes'])}"
    )
    table = Table(box=None, pad_edge=False)
    for name, justify in (("version", "right"), ("step", "right"), ("", "left"), ("bytes", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("B/parameter", justify="right")
    table.add_column("")
    for v in versions if everything else versions[-SHOWN:]:
        note = v["problem"] or ("" if v["follows"] else "does not follow the one before")
        kind = f"full, run {v['run'][:8]}" if v["full"] else ""
        table.add_row(str(v["number"]), str(v["step"]), kind, size(v["bytes"]), f"{v['bytes_per_param']:.3f}", note)
    out.print(table)
    if len(versions) > SHOWN and not everything:
        out.print(f"and {len(versions) - SHOWN} before these: --all")
