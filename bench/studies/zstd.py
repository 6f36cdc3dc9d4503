"""Whether versions should be compressed: bytes and seconds to compress, send and decompress. From the project's root:

    python -m bench.studies.zstd                              trains the model of `bench.publish`, five minutes
    python -m bench.studies.zstd KEPT/lr-1e-06 KEPT/lr-1e-05  folders that `bench.publish --part bytes --keep KEPT` left
    python -m bench.studies.zstd --quick --json               to see that it works; everything as JSON

Each of the last versions is measured in three forms, as it is and compressed by one thread with each level of zstd:

    file         the files of the version, as they are
    byte planes  the same as words of 32 bits: all first bytes, then all second ones, and so on
    XOR planes   old ^ new of all elements, low bytes first, then high bytes: a receiver has to have the old weights

What turns a file into the form counts as compression, what turns it back as decompression (NumPy). Nothing overlaps.
Needs `pip install zstandard`. --json prints schema csd_optim.bench.zstd/1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zstandard

from bench.demo import FULL, Size
from bench.publish import bytes_rows
from bench.step import machine_facts, say
from csd_optim import Replica
from csd_optim.replica.patches import Patches
from csd_optim.replica.reading import opened
from csd_optim.replica.replica import Arrays, apply
from csd_optim.replica.versions import Version, directory_of, numbers, read_version

Row = dict[str, Any]
Array = np.ndarray[Any, Any]
LEVELS = (1, 3)


def main() -> None:
    arguments = parse()
    facts = {**machine_facts(), "load_average": os.getloadavg(), "zstandard": zstandard.__version__}
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for folder in arguments.folders or trained(Path(place), arguments.quick):
            rows.append({"folder": folder.name, **measure(folder, arguments.versions, arguments.bits)})
            say(describe(rows[-1]))
    if arguments.json:
        result = {"schema": "csd_optim.bench.zstd/1", "machine": facts, "bits_per_second": arguments.bits, "rows": rows}
        json.dump(result, sys.stdout, indent=1)
        print()


def trained(place: Path, quick: bool) -> list[Path]:
    """Return folders of versions at several learning rates."""
    width, layers, pretrain, steps = (64, 1, 2, 4) if quick else (FULL.width, FULL.layers, 250, 8)
    size = Size(width, layers, 8, 64, 8, 0, 0, 0, 12_000_000, 1e-3)
    return [place / f"lr-{row['lr']:g}" for row in bytes_rows(place, size, pretrain, steps)]


def measure(folder: Path, n: int, bits: float) -> Row:
    """Return for each form and level the medians over the last `n` versions."""
    last = numbers(folder)[-n - 1 :]
    base, held = read_version(folder / directory_of(last[0])), {}
    Replica(folder).load(held, version=base.number)
    found: dict[tuple[str, int], list[Row]] = {}
    params = 0
    for number in last[1:]:
        version = read_version(folder / directory_of(number))
        params = sum(t.numel for t in version.tensors)
        before = {name: values.copy() for name, values in held.items()}
        changed = changes_of(folder, version)
        with opened(version) as files:
            apply(version, files, base, Arrays(held))
        base = version
        for form in (File(version), BytePlanes(version), XorPlanes(before, held, changed)):
            for level in (0, *LEVELS):
                if row := one(form, level, bits):
                    found.setdefault((form.name, level), []).append(row)
    raw = median(row["total"] for row in found["file", 0])
    rows = []
    for (form, level), of in found.items():
        row = {key: median(r[key] for r in of) for key in of[0]}
        row |= {"bytes_per_param": row["bytes"] / params, "faster": raw / row["total"]}
        rows.append({"form": form, "level": level, **row})
    return {"params": params, "versions": len(last) - 1, "forms": rows}


def changes_of(folder: Path, version: Version) -> dict[str, Array]:
    """Return the indices of the elements that a version names, by tensor."""
    with Patches(folder, [version]) as patches:
        found = {t.name: patches.of(t) for t in version.tensors}
    return {name: p.indices for name, p in found.items() if p is not None and p.indices is not None}


class File:
    """The files of a version."""

    name = "file"

    def __init__(self, version: Version) -> None:
        self.data: list[bytes] = [file.path.read_bytes() for file in version.files]

    def parts(self) -> list[bytes]:
        return self.data

    def back(self, parts: Sequence[bytes]) -> list[bytes]:
        return [*parts]

    def check(self, result: list[bytes]) -> bool:
        return result == self.data


class BytePlanes(File):
    """The same in four planes; the files' sizes are multiples of 8."""

    name = "byte planes"

    def parts(self) -> list[bytes]:
        return [planes_of(np.frombuffer(data, np.uint32)) for data in self.data]

    def back(self, parts: Sequence[bytes]) -> list[bytes]:
        return [words_of(part, np.uint32).tobytes() for part in parts]


class XorPlanes:
    """What all weights and those before differ in."""

    name = "XOR planes"

    def __init__(self, before: dict[str, Array], after: dict[str, Array], changed: dict[str, Array]) -> None:
        self.before, self.after, self.changed = before, after, changed

    def parts(self) -> list[bytes]:
        found = []
        for name, at in self.changed.items():
            difference = np.zeros(len(self.before[name]), np.uint16)
            difference[at] = self.before[name][at] ^ self.after[name][at]
            found.append(planes_of(difference))
        return found

    def back(self, parts: Sequence[bytes]) -> list[Array]:
        return [self.before[name] ^ words_of(part, np.uint16) for name, part in zip(self.changed, parts, strict=True)]

    def check(self, result: list[Array]) -> bool:
        return all(np.array_equal(self.after[name], values) for name, values in zip(self.changed, result, strict=True))


def planes_of(words: Array) -> bytes:
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.itemsize).T).tobytes()


def words_of(planes: bytes, dtype: type[np.unsignedinteger[Any]]) -> Array:
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(size, -1).T).view(dtype).reshape(-1)


def one(form: File | XorPlanes, level: int, bits: float) -> Row | None:
    """Compress, decompress and compare. `level` 0: not compressed, which only a version as it is can be."""
    if not level and form.name != "file":
        return None
    if level:
        compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        sent, compress = timed(lambda: [compressor.compress(part) for part in form.parts()])
        result, decompress = timed(lambda: form.back([decompressor.decompress(part) for part in sent]))
    else:
        sent, result, compress, decompress = form.parts(), form.parts(), 0.0, 0.0
    if not form.check(result):  # type: ignore[arg-type]
        raise SystemExit(f"{form.name}, level {level}: what comes back is not what was compressed")
    nbytes = sum(map(len, sent))
    send = 8 * nbytes / bits
    total = compress + send + decompress
    return {"bytes": nbytes, "compress": compress, "send": send, "decompress": decompress, "total": total}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def describe(row: Row) -> str:
    return "\n".join(lines(row))


def lines(row: Row) -> Iterator[str]:
    yield f"{row['folder']}, {row['params'] / 1e6:.1f} M parameters, median of {row['versions']} versions"
    for form in row["forms"]:
        level = f"zstd {form['level']}" if form["level"] else "raw"
        yield (
            f"  {form['form']:11} {level:6} {form['bytes_per_param']:.3f} B/param: {1e3 * form['compress']:.0f} ms + "
            f"{1e3 * form['send']:.0f} + {1e3 * form['decompress']:.0f} = {1e3 * form['total']:.0f}, "
            f"{form['faster']:.2f} x"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="folders of versions")
    parser.add_argument("--versions", type=int, default=5, help="the last so many of each (default 5)")
    parser.add_argument("--bits", type=float, default=1e9, help="of the network, per second (default 1e9)")
    parser.add_argument("--quick", action="store_true", help="tiny")
    parser.add_argument("--json", action="store_true", help="print everything on stdout")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.versions = 2
    return arguments


if __name__ == "__main__":
    main()
