"""Makes the samples beside this file: stores as the csd_optim writes them that is on the path.

    python tests/store/samples/make.py NAME ...   of FEATURES below

Those of formats 1 to 3 were made by the last version that wrote them, as were `one-slot` and `one-slot-torn`: format-4
with shadow=False, complete and within a fourth step. Values are few, so that they are small.
"""

import hashlib
import json
import sys
import tarfile
import tempfile
from pathlib import Path

import torch

from csd_optim import CSDAdam

HERE = Path(__file__).parent
# Which features a sample shows: shares of its two devices, Top-K, and how states are kept.
FEATURES = {
    "format-1": ([1, 1], None, "fp32"),
    "format-2": ([1, 1], 0.1, "fp32"),
    "format-3": ([1, 2], None, "fp32"),
    "format-3-residuals": ([1, 2], 0.1, "fp32"),
    "format-4": ([1, 2], 0.1, "fp32"),
    "format-4-codes": ([1, 2], 0.1, "8bit"),
    "format-4-rules": ([1, 2], 0.1, "fp32"),
}
RULES = {"format-4-rules": "sgd"}  # that of the last parameter, where it is not the store's
STEPS = 3


def model():
    weight = torch.nn.Parameter((torch.arange(4800) % 7 - 3.0).reshape(60, 80).bfloat16())
    return {"weight": weight, "bias": torch.nn.Parameter(torch.arange(300) % 5 / 4.0)}


def make_steps(params, opt, steps):
    for _ in range(steps):
        step = 1 + int(next((entry["step"] for entry in opt.state.values()), 0))
        for p in params.values():
            p.grad = ((torch.arange(p.numel()) + step) % 3 - 1.0).reshape(p.shape).to(p.dtype)
        opt.user_state = {"made": step}
        opt.step()


def image(params, opt):
    """A checksum of every tensor's bits."""
    tensors = {
        f"{name}.{key}": value
        for name, p in params.items()
        for key, value in ({"param": p} | opt.state.get(p, {})).items()
    }
    return {
        name: hashlib.blake2b(t.detach().reshape(-1).view(torch.uint8).numpy(), digest_size=16).hexdigest()
        for name, t in sorted(tensors.items())
    }


def optimizer(params, directory, name, **options):
    shares, options["topk"], options["state_dtype"] = FEATURES[name]
    devices = [f"file:{directory}/csd{d}?share={share}" for d, share in enumerate(shares)]
    first, last = params.items()
    groups = [first, last]
    if rule := RULES.get(name):
        groups = [{"params": [first]}, {"params": [last], "rule": rule, "lr": 0.125, "momentum": 0.5}]
    return CSDAdam(groups, lr=0.125, devices=devices, tile_size=1024, **options)


def main():
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            params = model()
            with optimizer(params, directory, name) as opt:
                make_steps(params, opt, STEPS)
                found = image(params, opt)
            (HERE / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
            with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as archive:
                for d in range(2):
                    archive.add(f"{directory}/csd{d}", f"csd{d}")


if __name__ == "__main__":
    main()
