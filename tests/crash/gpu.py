"""SIGKILL of runs with some states on an accelerator, before, in and after calls by which they change their files.

    python tests/crash/gpu.py SEED KILLS DIRECTORY

By the seed, each run is resumed with `gpu:`, with another room, without `gpu:` or without an accelerator, and with or
without overlap. With an odd seed, states are 8-bit ones.
"""

import os
import random
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from model.automaton import Refused
from support import commit_traces, emulated

from crash.kills import devices_in
from crash.processes import CHANGES, COMMITS, KILL_EFFECTS, Child, Shared, in_child, kill_at, preloaded
from csd_optim import CSDAdam

STEPS = 8
SHAPES = [(3000,), (70, 90), (), (5, 5), (2048,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROOMS = ["1GB", "100kB", "60kB", "1"]
OPTIONS = {}


def opened(devices, place, **options):
    torch.manual_seed(0)
    params = [torch.randn(s).to(place, DTYPES[i % 3]).requires_grad_() for i, s in enumerate(SHAPES)]
    return params, CSDAdam(params, devices=devices, tile_size=2048, lr=0.01, **OPTIONS, **options)


def step(params, opt, k):
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * k + i)).to(p.device, p.dtype)
        p.grad = None if (k + i) % 5 == 0 else grad
    opt.user_state = {"step": k}
    opt.step()


def image(params, opt):
    held = [t for p in params for _, t in [("", p), *sorted(opt.state.get(p, {}).items())]]
    return [t.detach().cpu().reshape(-1).contiguous().view(torch.uint8).tolist() for t in held]


def reference():
    params, opt = opened("ram:", "cpu")
    images = {}
    for k in range(1, STEPS + 1):
        step(params, opt, k)
        images[k] = image(params, opt)
    return images


def resume_and_train(shared, directories, room, place, overlaps, expected):
    """Resume the run, check its state, and train to the end. After each step, note in `shared` what is durable."""
    devices = directories if room is None else [f"gpu:?room={room}", *directories]
    params, opt = opened(devices, place, resume=True)
    if overlaps:
        opt.overlap(torch.nn.ParameterList(params))
    k = opt.user_state.get("step", 0)
    assert k >= shared.numbers[Shared.DURABLE], f"resumed {k}, and {shared.numbers[Shared.DURABLE]} was durable"
    assert k == 0 or image(params, opt) == expected[k], f"resumed {k}: other bits"
    while k < STEPS:
        k += 1
        step(params, opt, k)
        assert image(params, opt) == expected[k], f"step {k}: other bits"
        shared.numbers[Shared.DURABLE] = max(shared.numbers[Shared.DURABLE], opt.committed_step)
    opt.close()


def main():
    seed, kills, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if "CSD_RECORD" not in os.environ:  # restart this program with the libraries preloaded
        os.execve(sys.executable, [sys.executable, *sys.argv], preloaded(Path(directory)))
    warnings.simplefilter("ignore")  # about a store to resume that does not exist yet
    emulated.load()
    choose = random.Random(seed)
    OPTIONS["state_dtype"] = "8bit" if seed % 2 else "fp32"
    try:
        with TemporaryDirectory() as trace, commit_traces.accepted(trace):
            run(choose, kills, directory, seed)
    except Refused as e:
        sys.exit(f"seed {seed}: {e}")


def run(choose, kills, directory, seed):
    expected, killed, ends = in_child(reference), 0, 0
    while killed < kills:
        shared, n = Shared(), choose.randint(1, 2)
        with TemporaryDirectory(dir=directory) as store:
            directories, code = devices_in(store, n), -9
            while code == -9:
                room = choose.choice([*ROOMS, None])
                place = choose.choice(["emu", "cpu"]) if room is None else "emu"
                overlaps = choose.random() < 0.5
                call, kinds = choose.randrange(100), choose.choice([CHANGES, COMMITS])
                effect = KILL_EFFECTS[choose.choice([*KILL_EFFECTS])]
                with (
                    kill_at(call, effect, store, kinds),
                    emulated.schedule(choose.choice(["late", "at once", f"random={seed}"])),
                    Child(shared, resume_and_train, shared, directories, room, place, overlaps, expected) as child,
                ):
                    code = child.wait()
                killed += code == -9
                print(f"\r{killed} kills", end="", file=sys.stderr, flush=True)
            if code:
                how = f"gpu:?room={room}, {n} directories, overlap: {overlaps}"
                sys.exit(f"seed {seed}, kill {killed}, {how}: {shared.said()}")
            ends += 1
    print(f"gpu: {killed} kills in {ends} runs: each one resumed from a committed step")


if __name__ == "__main__":
    main()
