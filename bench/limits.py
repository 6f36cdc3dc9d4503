"""What the machine can do at all, measured in the same run as a benchmark.

A figure such as "70 million parameters per second" says little on its own, and on a shared machine it moves by a
factor of two within minutes. So every benchmark measures, beside itself, the two limits an optimizer step can hit:

    fio_mixed    the disk, reading and writing at once, past the page cache
    memory_rmw   the memory, read and written back in place

and `machine` describes what they were measured on.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HUGE_PAGE = 2 << 20  # bytes; a transparent huge page on x86-64 and on arm64 with 4 KiB base pages
SMALL_PAGE = mmap.PAGESIZE

# (bytes per request, requests in flight). Beyond about 8 MiB in flight neither matters much, so four are enough.
FIO_SHAPES = ((512 << 10, 32), (1 << 20, 16), (4 << 20, 8), (256 << 10, 64))
FIO_ENGINES = ("io_uring", "libaio", "psync")  # best first; containers often forbid the first


def fio_mixed(directory: Path, gib: float, seconds: float = 4) -> dict[str, Any]:
    """Best O_DIRECT rate of a 50/50 mix of reads and writes, as fio finds it, on huge-page buffers.

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
    size = int(gib * 2**30) // (32 << 20) * (32 << 20)  # whole requests for each of psync's threads too
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
    """Bytes of `pid`'s anonymous memory that lie on huge pages now; 0 if it has gone."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("AnonHugePages:"))


def memory_rmw(mib: int, threads: int, runs: int) -> dict[str, Any]:
    """Bandwidth of reading `mib` MiB of memory and writing it back in place: the limit of an optimizer in memory.

    `mib` should be several times the last-level cache. Every byte counts twice, once read and once written. Huge and
    ordinary pages are both tried and the better median is returned: `bytes_per_s`, `pages`, `mib`, `threads`, and
    `seconds` of each run.

    AdamW in fp32 reads 16 B per parameter and writes 12, a little less writing than here, so an excellent
    implementation may come out a few per cent above this figure.
    """
    nbytes = mib << 20
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for pages in ("huge", "ordinary"):
            values = _tensor_on(pages, nbytes)
            values.fill_(1.0)  # touch every page: faults are not bandwidth
            values.neg_()
            seconds = []
            for _ in range(max(1, runs)):
                start = time.perf_counter()
                values.neg_()  # one flipped bit per value: nothing to compute, nothing drifts to 0 or infinity
                seconds.append(time.perf_counter() - start)
            rate = 2 * nbytes / statistics.median(seconds)
            results.append({"bytes_per_s": rate, "pages": pages, "mib": mib, "threads": threads, "seconds": seconds})
            del values  # and its mapping, before the next one is made
        return max(results, key=lambda r: r["bytes_per_s"])
    finally:
        torch.set_num_threads(before)


def _tensor_on(pages: str, nbytes: int) -> torch.Tensor:
    """An fp32 tensor of `nbytes` on "huge" or on "ordinary" pages; it keeps its mapping alive."""
    # Private: shared anonymous memory is a file in the kernel, and gets huge pages by another rule.
    mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without huge pages refuses either advice
        mapping.madvise(mmap.MADV_HUGEPAGE if pages == "huge" else mmap.MADV_NOHUGEPAGE)
    raw = torch.frombuffer(mapping, dtype=torch.uint8)
    first = -raw.data_ptr() % HUGE_PAGE
    return raw[first : first + nbytes].view(torch.float32)


def machine(directory: Path | None = None) -> dict[str, Any]:
    """What this runs on: processor, memory, kernel, versions, and the file system and device of `directory`."""
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),  # those we may use, not those that are there
        "memory_bytes": _memory_bytes(),
        "huge_pages": _selected("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if directory is not None:
        facts |= _storage(Path(directory))
    return facts


def _field(path: str, key: str) -> str:
    """The value of the first `key : value` line of a file, or "" ."""
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _text(path: str | Path) -> str:
    """A small system file's text, or "" where it does not exist."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _selected(path: str) -> str:
    """The bracketed word of a sysfs choice such as `always [madvise] never`."""
    return _text(path).partition("[")[2].partition("]")[0]


def _memory_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    group = _text("/proc/self/cgroup").rpartition("::")[2]
    limit = _text(f"/sys/fs/cgroup{group.rstrip('/')}/memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def _storage(directory: Path) -> dict[str, Any]:
    """File system and block device that hold `directory`."""
    where = directory.resolve()
    best: tuple[int, str, str] = (-1, "", "")
    for line in _text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        # The kernel writes a blank in a path as \040; later lines mount over earlier ones.
        mount = Path(left.split()[4].replace("\\040", " "))
        if where.is_relative_to(mount) and len(mount.parts) >= best[0]:
            best = (len(mount.parts), right.split()[0], right.split()[1])
    _, kind, source = best
    number = where.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not (block / "queue").exists():
        block = block.parent  # a partition; its disk is one level up
    storage: dict[str, Any] = {"filesystem": kind, "device": source, "free_bytes": shutil.disk_usage(where).free}
    if (block / "queue").exists():  # tmpfs, overlay and network file systems have no block device
        storage["disk"] = " ".join(filter(None, (block.name, _text(block / "device/model"))))
    return storage


def main(arguments: list[str]) -> None:
    """`python -m bench.limits [DIRECTORY]`: print all of this as JSON."""
    directory = Path(arguments[0] if arguments else ".")
    threads = len(os.sched_getaffinity(0))
    found = {"machine": machine(directory), "memory": memory_rmw(1024, threads, 7), "disk": fio_mixed(directory, 2)}
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main(sys.argv[1:])
