"""Compares this checkout with another commit: every combination of features must give the same bits.

    python tests/soak/same_bits.py 6b54e48                 the commit against this checkout; --quick: a sample
    python tests/soak/same_bits.py 6b54e48 --accelerator   parameters on the emulated accelerator
    python tests/soak/same_bits.py 6b54e48 --stores        stores that one has written are resumed by the other

A combination is an optimizer with its options, a dtype of its states, a mode (a step in `step()`, `overlap()`, begun in
backward, gradients freed in backward) and devices. Each takes 20 steps with parameters in fp32, fp16 and bf16, with one
that has no gradient at first. Losses, parameters and states are compared bit by bit; a combination refused by one
commit must be refused by the other. The other commit is built below build/, and stays there for the next comparison.
"""

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
WIDTH = 24

OPTIMIZERS = {
    "AdamW": ("CSDAdam", {"weight_decay": 0.1}),
    "AdamW amsgrad": ("CSDAdam", {"amsgrad": True}),
    "AdamW clipped": ("CSDAdam", {"max_grad_norm": 0.05}),
    "AdamW Top-K": ("CSDAdam", {"topk": 0.1}),
    "Adam": ("CSDAdam", {"decoupled_weight_decay": False, "weight_decay": 0.1}),
    "SGD": ("CSDSGD", {}),
    "SGD momentum": ("CSDSGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "SGD Nesterov": ("CSDSGD", {"momentum": 0.9, "nesterov": True}),
    "Adagrad": ("CSDAdagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "RMSprop": ("CSDRMSprop", {}),
    "RMSprop centered": ("CSDRMSprop", {"momentum": 0.9, "centered": True}),
    "Lion": ("CSDLion", {"weight_decay": 0.1}),
}
STATES = ("fp32", "8bit")
MODES = {"step": None, "overlap": {}, "backward": {"backward": True}, "freed": {"free_gradients": True}}
DEVICES = {
    "file": ["file:"],
    "3 stores": ["{0}/csd0", "{0}/csd1", "{0}/csd2"],
    "ram": ["ram:"],
    "both": ["ram:", "file:"],
}
ON_ACCELERATOR = {
    "gpu": ["gpu:?room=1GB", "file:"],
    "gpu and stores": ["gpu:?room=20kB", "{0}/csd0"],
    "file": ["file:"],
}


def combinations(accelerator, quick):
    """Return all combinations; with `quick`, only combinations with at most one axis off its first value."""
    axes = [list(OPTIMIZERS), list(STATES), list(MODES), list(ON_ACCELERATOR if accelerator else DEVICES)]
    chosen = itertools.product(*axes)
    if quick:
        chosen = (c for c in chosen if sum(axes[i].index(value) > 0 for i, value in enumerate(c)) <= 1)
    return list(chosen)


# ---- in an interpreter that imports one of the two commits --------------------------------------------------


def make_model(on):
    """Return a model with parameters in three dtypes, over several tiles. Its last layer is not used at first."""
    import torch
    from torch import nn

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.float32]
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)
            self.big = nn.Linear(WIDTH, 400, dtype=torch.bfloat16)

        def forward(self, x, layers):
            for layer in self.layers[:layers]:
                # Elementwise products: unlike a BLAS, they have the same bits in every thread and at every address.
                y = (x.to(layer.weight.dtype).unsqueeze(1) * layer.weight).sum(2) + layer.bias
                x = torch.tanh(y.float())
            return (x.to(torch.bfloat16).unsqueeze(1) * self.big.weight).sum(2) + self.big.bias

    torch.manual_seed(0)
    return Mixed().to(on)


def training(combination, directory, steps, *, on="cpu"):
    """Take these steps, a range; resume if it does not begin at 0. Returns digests of all that a user sees."""
    import torch

    import csd_optim

    optimizer, states, mode, where = combination
    kind, options = OPTIMIZERS[optimizer]
    devices = [d.format(directory) for d in (ON_ACCELERATOR if on != "cpu" else DEVICES)[where]]
    for device in devices:
        if device.startswith("/"):
            Path(device).mkdir(exist_ok=True)
    model, losses = make_model(on), hashlib.sha256()
    resumed = {"resume": True} if steps.start else {}
    opt = getattr(csd_optim, kind)(
        model.named_parameters(), lr=1e-2, devices=devices, tile_size=1024, state_dtype=states, **resumed, **options
    )
    try:
        if MODES[mode] is not None:
            opt.overlap(model, **MODES[mode])
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(3, WIDTH, generator=generator).to(on)
            loss = model(x, 5 if step < 3 else 6).float().square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.update(as_bytes(loss))
        found = {"losses": losses.hexdigest()}
        found |= {name: digest(p) for name, p in model.named_parameters()}
        for key, entry in opt.state_dict()["state"].items():
            found |= {f"{key}.{name}": digest(value) for name, value in entry.items()}
        return found
    finally:
        opt.close()


def as_bytes(tensor):
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(value):
    import torch

    data = as_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def work(arguments):
    """Train what stdin names, and print a line of JSON for each: the digests, or the error."""
    import torch

    torch.set_num_threads(1)
    on = "cpu"
    if arguments.accelerator and not torch.accelerator.is_available():
        sys.path.insert(0, str(ROOT / "tests"))
        from support import emulated

        emulated.load()
    if arguments.accelerator:
        on = torch.accelerator.current_accelerator().type
    for line in sys.stdin:
        combination, directory, begin, end = json.loads(line)
        Path(directory).mkdir(exist_ok=True, parents=True)
        try:
            found = training(combination, directory, range(begin, end), on=on)
        except Exception as error:
            found = {"refused": type(error).__name__, "because": str(error)}
        print(json.dumps(found), flush=True)


# ---- the comparison -------------------------------------------------------------------------------


def built(commit):
    """Return a copy of the commit's files with the native code built. Raises CalledProcessError."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", commit], cwd=ROOT, check=True, capture_output=True, text=True
    )
    tree = ROOT / "build" / "same_bits" / found.stdout.strip()
    if not [*tree.glob("csd_optim/_native*.so")]:
        tree.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x"], cwd=tree, input=archive.stdout, check=True)
        build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        subprocess.run(build, cwd=tree, check=True, stdout=subprocess.DEVNULL)
    return tree


class Worker:
    """An interpreter that imports csd_optim from `tree`."""

    def __init__(self, tree, accelerator):
        command = [sys.executable, __file__, "--work", *["--accelerator"] * accelerator]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, cwd=tree, **pipes)

    def ask(self, combination, directory, begin=0, end=STEPS):
        """Begin a training in the other interpreter."""
        self.process.stdin.write(json.dumps([combination, str(directory), begin, end]) + "\n")
        self.process.stdin.flush()

    def answer(self):
        """Return the digests of the training that was asked for."""
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the interpreter ended with status {self.process.wait()}")
        return json.loads(line)


def differences(one, other):
    """Return the names of what differs."""
    if "refused" in one and "refused" in other:
        return [] if one["refused"] == other["refused"] else [f"{one} / {other}"]
    return [name for name in one | other if one.get(name) != other.get(name)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", help="the other commit")
    parser.add_argument("--accelerator", action="store_true")
    parser.add_argument("--stores", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return work(arguments)
    chosen = combinations(arguments.accelerator, arguments.quick)
    if arguments.stores:
        chosen = [c for c in chosen if "stores" in c[3]]
    workers = [Worker(tree, arguments.accelerator) for tree in (ROOT, built(arguments.commit))]
    failed = refused = 0
    for combination in chosen:
        with tempfile.TemporaryDirectory(prefix="csd_same_bits_") as scratch:
            places = [Path(scratch, name) for name in ("here", "there")]
            if arguments.stores:  # each writes the first half of a store and then resumes the other's
                for worker, place in zip(workers, places, strict=True):
                    worker.ask(combination, place, 0, STEPS // 2)
                halves = [worker.answer() for worker in workers]
                places.reverse()
            for worker, place in zip(workers, places, strict=True):
                worker.ask(combination, place, STEPS // 2 * arguments.stores, STEPS)
            found = [worker.answer() for worker in workers]
        wrong = differences(*found) + (differences(*halves) if arguments.stores else [])
        if arguments.stores and not wrong:
            with tempfile.TemporaryDirectory(prefix="csd_same_bits_") as scratch:
                workers[0].ask(combination, Path(scratch, "whole"))
                whole = workers[0].answer()
            wrong = [name for name in differences(whole, found[0]) if name != "losses"]
        refused += "refused" in found[0]
        failed += bool(wrong)
        if wrong:
            print(f"{', '.join(combination)}: {'; '.join(wrong[:5])}", flush=True)
        if "refused" in found[0]:
            print(f"{', '.join(combination)}: both refuse it: {found[0]['because'][:150]}", flush=True)
    print(
        f"{len(chosen)} combinations: {len(chosen) - failed} the same, of which both refuse {refused}; {failed} differ"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
