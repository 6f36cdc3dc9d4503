"""The same optimizer step as other libraries do it, timed in the same run.

    torch-fp32           torch.optim.AdamW(fused=True) on fp32 parameters and gradients, in memory
    torch-fp16, -bf16    the same work for a 16-bit model: gradients up-cast, fused AdamW on fp32 masters, parameters
                         down-cast
    deepspeed-cpu-fp32   DeepSpeedCPUAdam, likewise in memory
    deepspeed-cpu-fp16, -bf16
    deepspeed-cpu-bf16-states
                         DeepSpeedCPUAdam with bf16 states of bf16 parameters, without masters
    bitsandbytes-8bit    bitsandbytes' AdamW8bit on the CPU, of bf16 parameters, without masters
    deepspeed-nvme       ZeRO-Infinity: a ZeRO-3 engine with its optimizer state on NVMe, one process on the CPU, bf16
    deepspeed-nvme-muon  the same with its Muon, whose momentum is on NVMe, too
    tensornvme           fp32 state moved by TensorNVMe's DiskOffloader, fused AdamW between, bf16 model
    nvme-stream-fp32     how RL trainers stream Adam states from NVMe, as miles describes it: master and moments of one
    nvme-stream-bf16     bucket after another are read, updated and written, through the page cache, and nothing
                         overlaps. Written here, and compared with torch's AdamW first. Moments in fp32 or bf16

A peer runs in an interpreter of its own, which may be another virtual environment: its memory, threads and imports then
disturb no other measurement. A peer that is not installed is reported as such.

    python -m bench.peers deepspeed-nvme --params 134217728 --runs 5 --directory DIR --json

To install them, in an environment of their own (with a CPU build of torch):

    apt install g++ libaio-dev liburing-dev cmake
    pip install torch numpy ninja setuptools wheel packaging "deepspeed>=0.19,<0.20" "bitsandbytes>=0.50,<0.51"
    HOME=$(mktemp -d) LIBRARY_PATH=/usr/lib/$(gcc -print-multiarch) pip install --no-build-isolation tensornvme

DeepSpeed compiles its kernels when first used, which takes minutes once; if that is interrupted, delete the `lock`
files in TORCH_EXTENSIONS_DIR (by default in ~/.cache/torch_extensions) or the next run waits for ever. TensorNVMe's
installer writes to $HOME/.bashrc, hence the other HOME, and finds a static liburing only through LIBRARY_PATH.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

Result = dict[str, Any]
WARM_UP = 2  # steps; the first creates the states, the second warms up memory and code
TENSOR = 1 << 24  # elements per parameter tensor in memory, a 4096 x 4096 weight
WIDTH = 2048  # of the weights in ZeRO-Infinity's model, which are square
BUCKET = 1 << 25  # parameters that the NVMe stream moves at a time: 400 MB with fp32 moments
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
PEER_PYTHON = "CSD_BENCH_PEER_PYTHON"  # environment variable: the interpreter that has the peers installed


class Skipped(Exception):
    """This peer cannot run here; the message says why."""


def run(
    name: str,
    params: int,
    runs: int = 5,
    directory: Path | str = ".",
    *,
    python: str = sys.executable,
    threads: int | None = None,
    timeout: float = 900,
) -> Result:
    """Time one peer in a fresh interpreter; see `measure` for what comes back.

    The interpreter is the one named by the environment variable CSD_BENCH_PEER_PYTHON, else `python`. `timeout` is in
    seconds and has to leave room for a peer that compiles itself at first use.
    """
    arguments = [name, f"--params={params}", f"--runs={runs}"] + ([f"--threads={threads}"] if threads else [])
    answer = call("bench.peers", arguments, directory, os.environ.get(PEER_PYTHON) or python, timeout)
    return {"name": name, "params": params, **answer} if "skipped" in answer else answer


def call(module: str, arguments: Sequence[str], directory: Path | str, python: str, timeout: float) -> Result:
    """Return the JSON that `python -m module` prints as its last line, or {"skipped": reason}.

    It gets --json and a --directory for its files: a new one below `directory`, which is gone afterwards even if the
    process was killed.
    """
    with tempfile.TemporaryDirectory(prefix="csd-peer-", dir=Path(directory).resolve()) as folder:
        command = [python, "-m", module, *arguments, f"--directory={folder}", "--json"]
        try:
            # In a session of its own, so that compilers that it starts can be killed with it.
            peer = subprocess.Popen(
                command,
                cwd=Path(__file__).parents[1],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            return {"skipped": f"cannot start {python}: {error.strerror}"}
        try:
            out, err = peer.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"skipped": f"not done after {timeout:.0f} s"}
        finally:
            if peer.poll() is None:
                os.killpg(peer.pid, signal.SIGKILL)
                peer.communicate()
    if peer.returncode != 0 or not out.strip():
        last = (err.strip().splitlines() or [f"status {peer.returncode}"])[-1]
        return {"skipped": f"failed: {last}"}
    return json.loads(out.strip().splitlines()[-1])


def measure(name: str, params: int, runs: int, directory: Path, threads: int) -> Result:
    """Time `runs` steps (at least 5) of one peer in this interpreter, after two steps that do not count.

    Returns `name`, `params` (the number really updated, which may be rounded), `threads`, `versions`, `seconds` of
    every step, `mparam_per_s` of the median one, and `peak_bytes`, the most memory that the process has had resident,
    which includes torch itself, parameters and gradients. Peers that use a disk add `bytes_read` and `bytes_written`,
    the mean per step as the kernel counted them for this process. `{"name", "params", "skipped": reason}` if it cannot.
    """
    torch.set_num_threads(threads)
    try:
        result = PEERS[name](params, max(5, runs), directory)
    except ImportError as error:
        return {"name": name, "params": params, "skipped": f"not installed: {error}"}
    except Skipped as error:
        return {"name": name, "params": params, "skipped": str(error)}
    rate = result["params"] / statistics.median(result["seconds"]) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    facts = {"threads": threads, "mparam_per_s": rate, "peak_bytes": peak, "versions": versions()}
    return {"name": name, **facts, **result}


# ---------------------------------------------------------------------------------------------- in memory


def torch_adamw(dtype: torch.dtype) -> Callable[[int, int, Path], Result]:
    """Time torch's fastest AdamW: one fused kernel per tensor, all threads."""
    return lambda params, runs, _: _in_memory(lambda p: torch.optim.AdamW(p, **ADAMW, fused=True), dtype, params, runs)


def deepspeed_cpu(dtype: torch.dtype) -> Callable[[int, int, Path], Result]:
    """Time DeepSpeed's AVX kernel for offloaded state (without NVMe)."""

    def peer(params: int, runs: int, _: Path) -> Result:
        _prepare_deepspeed()
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return _in_memory(lambda p: DeepSpeedCPUAdam(p, **ADAMW, adamw_mode=True), dtype, params, runs)

    return peer


def deepspeed_bf16_states(params: int, runs: int, _: Path) -> Result:
    """Time DeepSpeed's AVX kernel on bf16 states: 6 bytes per parameter, the parameters among them."""
    _prepare_deepspeed()
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return _without_masters(
        lambda p: DeepSpeedCPUAdam(p, **ADAMW, adamw_mode=True, fp32_optimizer_states=False), params, runs
    )


def bitsandbytes_8bit(params: int, runs: int, _: Path) -> Result:
    """Time bitsandbytes' 8-bit AdamW on the CPU: 4 bytes per parameter, the parameters among them."""
    from bitsandbytes.cextension import ErrorHandlerMockBNBNativeLibrary, lib
    from bitsandbytes.optim import AdamW8bit

    if isinstance(lib, ErrorHandlerMockBNBNativeLibrary):
        raise Skipped("bitsandbytes did not find its compiled part, and would quantize in Python")
    return _without_masters(lambda p: AdamW8bit(p, **ADAMW), params, runs)


def _without_masters(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], params: int, runs: int
) -> Result:
    """Time the optimizer from `make` on bf16 parameters that it updates in place."""
    _need_memory(params * 12)
    torch.manual_seed(0)
    sizes = [min(TENSOR, params - first) for first in range(0, params, TENSOR)]
    weights = [torch.nn.Parameter(torch.randn(n, dtype=torch.bfloat16)) for n in sizes]
    for p in weights:
        p.grad = torch.randn_like(p)
    return {"params": params, "seconds": _timed(make(weights).step, runs)}


def _in_memory(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype, params: int, runs: int
) -> Result:
    """Time the optimizer from `make`. With 16-bit `dtype` the step begins and ends with 16-bit tensors.

    The fp32 copies of the gradients are allocated once, before the clock starts.
    """
    _need_memory(params * (16 if dtype == torch.float32 else 20))
    torch.manual_seed(0)
    sizes = [min(TENSOR, params - first) for first in range(0, params, TENSOR)]
    masters = [torch.nn.Parameter(torch.randn(n)) for n in sizes]
    for p in masters:
        p.grad = torch.randn_like(p)
    optimizer = make(masters)
    if dtype == torch.float32:
        return {"params": params, "seconds": _timed(optimizer.step, runs)}

    grads32 = [p.grad for p in masters]
    grads = [g.to(dtype) for g in grads32]
    weights = [p.detach().to(dtype) for p in masters]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_(grads32, grads)
        optimizer.step()
        torch._foreach_copy_(weights, masters)

    return {"params": params, "seconds": _timed(step, runs)}


def _timed(step: Callable[[], Any], runs: int) -> list[float]:
    """Return the seconds of each of `runs` calls, after the warm-up."""
    for _ in range(WARM_UP):
        step()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


# ------------------------------------------------------------------------------------------------- on disk


def deepspeed_nvme(params: int, runs: int, directory: Path, *, muon: bool = False) -> Result:
    """Time ZeRO-Infinity's optimizer step: `engine.step()`, with reads, updates and writes pipelined.

    Only the step is timed. Gradients are swapped out partly in `backward`, before the clock starts; what that wrote is
    `backward_bytes_written`. The settings are the best of those tried here, not the defaults: the default sub-group
    of 1e9 parameters leaves a model of this size nothing to overlap, and four buffers are too few for a pipeline.

    `muon`: with its Muon, which reads and writes the momentum and orthogonalizes in backward. So backward is timed,
    too, and its bytes are counted as those of the step; the matrix products of this model are little beside it.
    """
    width = WIDTH
    layers = max(4, round(params / width**2))  # with fewer, sub-groups would be smaller than DeepSpeed swaps
    params = layers * width**2
    _need_memory(8 * params + (2 << 30))
    with _scratch(directory, 16 * params) as folder:
        start_deepspeed(folder)
        import deepspeed

        torch.manual_seed(0)
        model = _Layers(layers, width).bfloat16()
        for p in model.parameters():
            p.use_muon = muon
        rule = {"lr": ADAMW["lr"], "momentum": 0.95, "weight_decay": 0.1} if muon else ADAMW
        config = zero_infinity(folder, max(1, min(4, layers // 4)) * width**2)
        config["optimizer"] = {"type": "Muon" if muon else "AdamW", "params": rule}
        config["zero_optimization"]["reduce_scatter"] = not muon  # which its Muon refuses
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        batch = torch.randn(1, width, dtype=torch.bfloat16)
        seconds, moved, before_step = [], [], []
        for i in range(WARM_UP + runs):
            loss = engine(batch)
            at_backward, start = io_bytes(), time.perf_counter()
            engine.backward(loss)
            at_step = at_backward if muon else io_bytes()
            start = start if muon else time.perf_counter()
            engine.step()
            elapsed, after = time.perf_counter() - start, io_bytes()
            if i >= WARM_UP:
                seconds.append(elapsed)
                moved.append((after[0] - at_step[0], after[1] - at_step[1]))
                before_step.append(at_step[1] - at_backward[1])
        engine.destroy()
        torch.distributed.destroy_process_group()
    return {
        "params": params,
        "seconds": seconds,
        **_bytes(moved),
        "backward_bytes_written": round(statistics.mean(before_step)),
    }


def start_deepspeed(folder: Path) -> None:
    """Set the environment of a DeepSpeed of one process on the CPU; its group meets in a file in `folder`."""
    _prepare_deepspeed()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import deepspeed

    deepspeed.init_distributed(
        dist_backend="gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1, verbose=False
    )


def zero_infinity(folder: Path, sub_group: int) -> dict[str, Any]:
    """Return a configuration of ZeRO-3 with optimizer states in `folder`, `sub_group` elements of them at a time."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": sub_group,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(folder),
                "buffer_count": 12,  # 4 tensors each of the sub-group read, updated and written
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
        "aio": {"block_size": 8 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True},
    }


class _Layers(torch.nn.Module):
    """Linear layers side by side: each weight gets a gradient of ordinary size, however many there are."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x).float().mean() for layer in self.layers)


def tensornvme(params: int, runs: int, directory: Path) -> Result:
    """Time a loop over chunks of fp32 state, as TensorNVMe suggests: read the next, update this, write the last.

    TensorNVMe offers transfers, not an optimizer, so the loop is ours and the arithmetic is torch's. It goes through
    the page cache. To time the disk and not memory, each step ends when its data has reached the disk (fdatasync) and
    starts with the files dropped from the cache, which is not timed.
    """
    from tensornvme import DiskOffloader
    from torch.optim.adamw import adamw

    chunk = 1 << 24
    sizes = [min(chunk, params - first) for first in range(0, params, chunk)]
    _need_memory(4 * params + 12 * chunk * 8)
    torch.manual_seed(0)
    grads = [torch.randn(n, dtype=torch.bfloat16) for n in sizes]
    weights = [torch.zeros(n, dtype=torch.bfloat16) for n in sizes]
    counters = [torch.zeros(()) for _ in sizes]
    rule = dict(zip(("beta1", "beta2"), ADAMW["betas"], strict=True), **{k: ADAMW[k] for k in ("lr", "eps")})
    rule |= {"weight_decay": ADAMW["weight_decay"], "amsgrad": False, "maximize": False}

    with _scratch(directory, 12 * params) as folder:
        # Waiting for a read waits for everything its offloader does (sync_read_events is bound to the writes), so
        # neighbouring chunks use different offloaders: one reads, one has been read, one writes.
        offloaders = [DiskOffloader(str(folder), n_entries=16, backend="uring") for _ in range(3)]
        states = []
        for i, n in enumerate(sizes):
            states.append([torch.randn(n), torch.zeros(n), torch.zeros(n)])
            offloaders[i % 3].sync_writev(states[i])  # and frees their memory

        def step() -> None:
            offloaders[0].async_readv(states[0])
            for i, state in enumerate(states):
                if i + 1 < len(states):
                    offloaders[(i + 1) % 3].async_readv(states[i + 1])
                offloaders[i % 3].synchronize()
                grad = grads[i].float()
                adamw([state[0]], [grad], [state[1]], [state[2]], [], [counters[i]], fused=True, **rule)
                weights[i].copy_(state[0])
                offloaders[i % 3].async_writev(state)
            for offloader in offloaders:
                offloader.synchronize()
            for file in files:
                os.fdatasync(file)

        files = [os.open(path, os.O_RDWR) for path in folder.iterdir()]
        timed = _timed_on_disk(step, files, runs)
        for file in files:
            os.close(file)
        offloaders.clear()  # deletes their files
    return {"params": params, **timed}


def nvme_stream(moments: torch.dtype) -> Callable[[int, int, Path], Result]:
    """Time the NVMe stream of RL trainers, see the top. Like TensorNVMe's, its steps end when the disk has the data."""

    def peer(params: int, runs: int, directory: Path) -> Result:
        _verify_stream(moments, directory)
        _need_memory(4 * params + 40 * BUCKET)
        torch.manual_seed(0)
        sizes = [min(BUCKET, params - first) for first in range(0, params, BUCKET)]
        grads = [torch.randn(n, dtype=torch.bfloat16) for n in sizes]
        weights = [torch.zeros(n, dtype=torch.bfloat16) for n in sizes]
        with _scratch(directory, (4 + 2 * moments.itemsize) * params) as folder:
            stream = _Stream(folder / "states", (torch.randn(n) for n in sizes), moments)

            def step() -> None:
                stream.step(grads, weights)
                os.fdatasync(stream.file)

            timed = _timed_on_disk(step, [stream.file], runs)
            os.close(stream.file)
        return {"params": params, **timed}

    return peer


class _Stream:
    """AdamW of buckets in a file, each of them its fp32 masters, then both moments."""

    def __init__(self, path: Path, masters: Iterable[torch.Tensor], moments: torch.dtype) -> None:
        """`moments`: their dtype in the file."""
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._moments, self._steps = moments, torch.zeros(())
        self._places = [0]  # where a bucket begins, and the last one ends
        for master in masters:
            state = [master, *(torch.zeros(len(master), dtype=moments) for _ in range(2))]
            self._write(state, self._places[-1])
            self._places.append(self._places[-1] + sum(t.nbytes for t in state))

    @torch.no_grad()
    def step(self, grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
        """Update all buckets, one after another. `grads`, `weights`: bf16, a tensor for each bucket."""
        from torch.optim.adamw import adamw

        rule = {name: ADAMW[name] for name in ("lr", "eps", "weight_decay")}
        rule |= dict(zip(("beta1", "beta2"), ADAMW["betas"], strict=True)) | {"amsgrad": False, "maximize": False}
        for place, grad, weight in zip(self._places, grads, weights, strict=False):
            master = torch.empty(len(grad))
            kept = [torch.empty(len(grad), dtype=self._moments) for _ in range(2)]
            moved = os.preadv(self.file, [_memory(t) for t in (master, *kept)], place)
            if moved != master.nbytes + sum(t.nbytes for t in kept):
                raise OSError(f"{moved} bytes read of a bucket")
            first, second = (t.float() for t in kept)  # the same tensors, if they are fp32
            adamw([master], [grad.float()], [first], [second], [], [self._steps.clone()], fused=True, **rule)
            weight.copy_(master)
            self._write([master, *(t.to(self._moments) for t in (first, second))], place)
        self._steps += 1

    def _write(self, state: Sequence[torch.Tensor], place: int) -> None:
        if os.pwritev(self.file, [_memory(t) for t in state], place) != sum(t.nbytes for t in state):
            raise OSError("a bucket was not written as a whole")


def _memory(t: torch.Tensor) -> memoryview:
    return memoryview(t.view(torch.uint8).numpy())


def _verify_stream(moments: torch.dtype, directory: Path) -> None:
    """Compare five steps of a stream with torch's. Raises SystemExit if masters are not where they should be."""
    torch.manual_seed(0)
    sizes = (1000, 3, 777)
    expected = [torch.nn.Parameter(torch.randn(n)) for n in sizes]
    began = [p.detach().clone() for p in expected]
    weights = [torch.empty(n, dtype=torch.bfloat16) for n in sizes]
    optimizer = torch.optim.AdamW(expected, **ADAMW, fused=True)
    with _scratch(directory, 1 << 20) as folder:
        stream = _Stream(folder / "states", began, moments)
        for _ in range(5):
            grads = [torch.randn(n, dtype=torch.bfloat16) for n in sizes]
            for p, grad in zip(expected, grads, strict=True):
                p.grad = grad.float()
            optimizer.step()
            stream.step(grads, weights)
        for place, p, start, weight in zip(stream._places, expected, began, weights, strict=False):
            master = torch.empty(len(p))
            os.preadv(stream.file, [_memory(master)], place)
            off = float((master - p.detach()).norm() / (p.detach() - start).norm())
            if off > (0 if moments is torch.float32 else 1e-2) or not torch.equal(weight, master.bfloat16()):
                raise SystemExit(f"the stream's masters are off by {off:.1e} of the distance moved: nothing is timed")
        os.close(stream.file)


def _timed_on_disk(step: Callable[[], None], files: Sequence[int], runs: int) -> Result:
    """Time steps that each begin without any page of these files in the cache. Return `seconds` and bytes moved."""
    seconds, moved = [], []
    with torch.no_grad():
        for i in range(WARM_UP + runs):
            for file in files:
                os.fdatasync(file)  # only clean pages can be dropped
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            before, start = io_bytes(), time.perf_counter()
            step()
            elapsed, after = time.perf_counter() - start, io_bytes()
            if i >= WARM_UP:
                seconds.append(elapsed)
                moved.append((after[0] - before[0], after[1] - before[1]))
    return {"seconds": seconds, **_bytes(moved)}


# --------------------------------------------------------------------------------------------------- tools


def _prepare_deepspeed() -> None:
    """Set the environment in which DeepSpeed compiles its kernels at first use: for the CPU, with this venv's ninja."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    missing = [tool for tool in ("ninja", "c++") if shutil.which(tool) is None]
    if missing:
        raise Skipped(f"DeepSpeed needs {' and '.join(missing)} to compile its kernels")


def _scratch(directory: Path, nbytes: int) -> _PathDirectory:
    """Make a temporary directory with room for `nbytes` bytes and some to spare."""
    free = shutil.disk_usage(directory).free
    if free < nbytes * 1.5 + (1 << 30):
        raise Skipped(f"{directory} has {free} bytes free, {nbytes} and half as much again are needed")
    return _PathDirectory(prefix="csd-peer-", dir=directory)


class _PathDirectory(tempfile.TemporaryDirectory):
    """A temporary directory that enters as a Path."""

    def __enter__(self) -> Path:
        return Path(super().__enter__())


def _need_memory(nbytes: int) -> None:
    """Raise Skipped if memory has no room for `nbytes` bytes, rather than swap or be killed."""
    pages = {line.split(":")[0]: line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines()}
    available = int(pages["MemAvailable"]) << 10
    if nbytes > 0.9 * available:
        raise Skipped(f"needs {nbytes} bytes of memory, {available} are available")


def own_stdout() -> TextIO:
    """Return what was stdout. Peers, and compilers that they start, write there, even at exit: that goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answer


def io_bytes() -> tuple[int, int]:
    """Return the bytes this process has had read from and written to block devices so far."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["read_bytes"]), int(counters["write_bytes"])


def _bytes(moved: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return the mean bytes per step."""
    return {
        "bytes_read": round(statistics.mean(read for read, _ in moved)),
        "bytes_written": round(statistics.mean(written for _, written in moved)),
    }


def versions() -> dict[str, str]:
    """Return the versions of torch and of the peers that this interpreter has imported."""
    imported = [name for name in ("torch", "deepspeed", "tensornvme", "bitsandbytes") if name in sys.modules]
    return {name: importlib.metadata.version(name) for name in imported}


PEERS: dict[str, Callable[[int, int, Path], Result]] = {
    "torch-fp32": torch_adamw(torch.float32),
    "torch-fp16": torch_adamw(torch.float16),
    "torch-bf16": torch_adamw(torch.bfloat16),
    "deepspeed-cpu-fp32": deepspeed_cpu(torch.float32),
    "deepspeed-cpu-fp16": deepspeed_cpu(torch.float16),
    "deepspeed-cpu-bf16": deepspeed_cpu(torch.bfloat16),
    "deepspeed-cpu-bf16-states": deepspeed_bf16_states,
    "bitsandbytes-8bit": bitsandbytes_8bit,
    "deepspeed-nvme": deepspeed_nvme,
    "deepspeed-nvme-muon": partial(deepspeed_nvme, muon=True),
    "tensornvme": tensornvme,
    "nvme-stream-fp32": nvme_stream(torch.float32),
    "nvme-stream-bf16": nvme_stream(torch.bfloat16),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time one peer here and now."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=main.__doc__)
    parser.add_argument("name", choices=PEERS)
    parser.add_argument("--params", type=int, default=1 << 26, help="number of parameters (default 67108864)")
    parser.add_argument("--runs", type=int, default=5, help="timed steps, at least 5")
    parser.add_argument("--directory", type=Path, default=Path(), help="where a peer may put its files")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")
    chosen = parser.parse_args(arguments)

    answer = own_stdout()
    result = measure(chosen.name, chosen.params, chosen.runs, chosen.directory.resolve(), chosen.threads)
    with answer:
        if chosen.json:
            print(json.dumps(result), file=answer)
        elif "skipped" in result:
            print(f"{chosen.name}: skipped, {result['skipped']}", file=answer)
        else:
            low, high = min(result["seconds"]), max(result["seconds"])
            print(
                f"{chosen.name}: {result['mparam_per_s']:.1f} Mparam/s, {result['params']} parameters, "
                f"{chosen.threads} threads, {low:.3f} to {high:.3f} s",
                file=answer,
            )


if __name__ == "__main__":
    main()
