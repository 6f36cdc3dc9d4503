"""The disk's own limit for an optimizer step: fio's best rate of reads and writes at once, past the page cache."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from csd_optim.engine.placing.tuning import HUGE_PAGE

SMALL_PAGE = mmap.PAGESIZE

# (bytes per request, requests in flight). With more than about 8 MiB in flight, the shape matters little: four suffice.
FIO_SHAPES = ((512 << 10, 32), (1 << 20, 16), (4 << 20, 8), (256 << 10, 64))
FIO_ENGINES = ("io_uring", "libaio", "psync")  # best first; containers often forbid the first


def fio_mixed(directory: Path, gib: float, seconds: float = 4) -> dict[str, Any]:
    """Return the best O_DIRECT rate of a 50/50 mix of reads and writes, as fio finds it, on huge-page buffers.

    `gib` is the size of the file, made and deleted again in `directory`. Make it as large as the store it is compared
    with: a virtual disk whose host caches is faster over a small file (2 GiB ran 1.3 times as fast as 4 or 8 GiB on
    one machine). Each of the few request shapes runs for `seconds`.

    Returns `bytes_per_s` (reads plus writes), `block` (bytes), `depth` (requests in flight), `engine`, `pages` ("huge"
    or "ordinary": what the kernel really gave), and `tried`, the same for every shape; or `{"skipped": reason}`.
    """
    fio = shutil.which("fio")
    if fio is None:
        return {"skipped": "fio is not installed"}
    directory = Path(directory)
    size = int(gib * 2**30) // (32 << 20) * (32 << 20)  # each of psync's threads must get whole requests
    if size < 64 << 20:
        return {"skipped": f"{gib} GiB is too small a file, 0.0625 is the least"}
    free = shutil.disk_usage(directory).free
    if free < size + (1 << 30):
        return {"skipped": f"{directory} has {free} bytes free, fio needs {size} and 1 GiB to spare"}

    handle, name = tempfile.mkstemp(prefix="csd-fio-", suffix=".tmp", dir=directory)
    os.close(handle)
    try:
        engine, complaint = "", ""
        for engine in FIO_ENGINES:
            # The fill is direct too: with a buffered one, write-back would still be running during the measurement.
            filled, complaint = _fio(fio, name, size, engine, 4 << 20, 8, ["--rw=write"])
            if filled is not None:
                break
        else:
            return {"skipped": f"fio cannot do direct I/O in {directory}: {complaint}"}
        timed = ["--rw=rw", "--rwmixread=50", "--time_based", f"--runtime={max(1, round(seconds))}"]
        tried = []
        for block, depth in FIO_SHAPES:
            result, complaint = _fio(fio, name, size, engine, block, depth, timed)
            if result is not None:
                tried.append(result)
        if not tried:
            return {"skipped": f"fio failed: {complaint}"}
        return {**max(tried, key=lambda t: t["bytes_per_s"]), "tried": tried}
    finally:
        Path(name).unlink(missing_ok=True)


def _fio(
    fio: str, name: str, size: int, engine: str, block: int, depth: int, options: list[str]
) -> tuple[dict[str, Any] | None, str]:
    """Run one fio job; return its result, or None and fio's complaint.

    Buffers: `--mem=shmhuge` would need root and a changed vm.nr_hugepages. glibc's malloc gives the same speed to
    anybody when told to `madvise(MADV_HUGEPAGE)`. fio then starts its buffers one small page after the huge-page
    boundary (malloc's header, rounded up) and *adds* `iomem_align` instead of aligning to it; adding the rest of the
    huge page puts every request back on a boundary, which is worth 10 % with small requests.
    """
    environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
    parallel = [f"--size={size}", f"--iodepth={depth}"]
    if engine == "psync":  # one request in flight per thread: depth means threads, each with its part of the file
        part = size // depth
        parallel = [f"--size={part}", f"--offset_increment={part}", f"--numjobs={depth}", "--group_reporting"]
    command = [
        fio, "--name=mixed", f"--filename={name}", "--direct=1", f"--bs={block}",
        f"--ioengine={engine}", "--thread", "--mem=malloc", f"--iomem_align={HUGE_PAGE - SMALL_PAGE}",
        "--output-format=json", *parallel, *options,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        job = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        huge = 0
        try:
            while job.poll() is None:
                time.sleep(0.2)
                huge = max(huge, _huge_bytes(job.pid))
        finally:
            if job.poll() is None:
                job.kill()
                job.wait()
        out.seek(0)
        err.seek(0)
        text, complaint = out.read().decode(errors="replace"), err.read().decode(errors="replace").strip()
    if job.returncode != 0 or "{" not in text:
        return None, (complaint or text.strip() or f"status {job.returncode}")[-300:]
    measured = json.loads(text[text.index("{") :])["jobs"][0]  # warnings may stand before the JSON
    return {
        "bytes_per_s": measured["read"]["bw_bytes"] + measured["write"]["bw_bytes"],
        "block": block,
        "depth": depth,
        "engine": engine,
        "pages": "huge" if huge >= block * depth // 2 else "ordinary",
    }, ""


def _huge_bytes(pid: int) -> int:
    """Return the bytes of `pid`'s anonymous memory that lie on huge pages now; 0 if it has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("AnonHugePages:"))


def main(arguments: list[str]) -> None:
    """Run fio in DIRECTORY and print the result as JSON: `python -m bench.fio [DIRECTORY [GIB]]`."""
    directory, gib = [*arguments, *[".", "2"][len(arguments) :]]
    json.dump(fio_mixed(Path(directory), float(gib)), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main(sys.argv[1:])
