"""What bench/studies/accuracy.py compares: the variants, the training of each, and what is verified first.

The drift is |w - w_ref| / |w_ref - w_0|: how far the weights (for CSDAdam the masters) are from AdamW's with the same
seed, in units of how far AdamW moved them. It is taken at the end or, if a task has several marks, at each.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import rules
from bench.studies.accuracy_tasks import Size, accuracy, backward, batches, examples_of, schedule, start
from csd_optim.optim.optimizer import CSDOptimizer

TILE = 1 << 18  # elements: enough for the whole model
SPARSE_FROM = 4096  # elements: smaller parameters, and one-dimensional ones, are dense
BLOCK = 1 << 16  # elements of a tile whose sparse entries share one count
TOLERANCE = 1e-6  # relative, as everywhere in this project
CODED_DRIFT = 0.1  # the largest drift allowed after ten steps with 8-bit states and AdamW's gradients

Row = dict[str, Any]
Job = tuple[str, int, "Variant", "Size", Path]  # task, seed, ..., encoder


@dataclass(frozen=True)
class Variant:
    """An optimizer and its options. `topk` None is dense; `length` is in units of the usual number of steps."""

    name: str
    csd: bool = True
    topk: float | None = None
    error_feedback: bool = False
    length: float = 1.0
    state_dtype: str = "fp32"
    torchao: bool = False  # use torchao's 8-bit AdamW
    nudge: float = 0.0  # relative change of each weight before the first step
    rule: str = "adamw"  # a name of bench/rules.py
    faster: float = 1.0  # its learning rate as a multiple of AdamW's


ADAMW = Variant("AdamW fp32", csd=False)
HALF = Variant("AdamW fp32, half the steps", csd=False, length=0.5)
NUDGED = Variant("AdamW fp32, nudged", csd=False, nudge=1e-6)  # shows how much drift chaos makes of a tiny difference
DENSE = Variant("CSDAdam dense")
TOP_K = [
    Variant(f"Top-K {r:.0%}{', feedback' * e}", topk=r, error_feedback=e)
    for r in (0.1, 0.05, 0.02, 0.01)
    for e in (True, False)
]
EIGHT_BIT = [
    Variant("8-bit", state_dtype="8bit"),
    Variant("8-bit, Top-K 1%", topk=0.01, error_feedback=True, state_dtype="8bit"),
]
TORCHAO = Variant("torchao AdamW8bit", csd=False, torchao=True)
VARIANTS = [HALF, ADAMW, NUDGED, DENSE, *TOP_K, *EIGHT_BIT, TORCHAO]
# Other optimizers: pairs of torch's on fp32 parameters and ours on bf16 ones.
OTHERS = [
    Variant(f"{rule}{name}", csd=csd, rule=rule, faster=faster)
    for rule, faster in (("adam", 1.0), ("sgd-momentum", 30.0), ("adagrad", 3.0), ("rmsprop", 0.3), ("lion", 0.2))
    for name, csd in ((" fp32", False), (", ours", True))
]
QUICK_VARIANTS = [ADAMW, DENSE, TOP_K[-2], *EIGHT_BIT]


def reference_of(name: str) -> str:
    """Return the variant that `name` is compared with: the same rule in torch, on fp32 parameters."""
    return next((v.rule + " fp32" for v in OTHERS if v.name == name), ADAMW.name)


def csdadam(model: nn.Module, variant: Variant, lr: float) -> Any:
    """Return our optimizer of the variant's rule over the model."""
    pair = rules.PAIRS[variant.rule]
    return pair.ours(
        model.parameters(),
        lr=lr * variant.faster,
        **pair.kwargs,
        devices="ram:",
        tile_size=TILE,
        topk=variant.topk,
        error_feedback=variant.error_feedback,
        state_dtype=variant.state_dtype,
    )


def torchao_adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return torchao's 8-bit AdamW: codes for parameters of at least 4096 elements. Its first step takes seconds to
    compile.
    """
    from torchao.optim import AdamW8bit

    return AdamW8bit(model.parameters(), lr=lr)


def weights_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    """Return all weights in fp32, flattened; for CSDAdam the masters."""
    csd = isinstance(optimizer, CSDOptimizer)
    return torch.cat(
        [(optimizer.state[p]["master"] if csd else p.detach().float()).flatten() for p in model.parameters()]
    )


def mean_root(optimizer: torch.optim.Optimizer) -> float:
    """Return the mean of sqrt(exp_avg_sq) over all elements: the size of recent gradients."""
    roots = [optimizer.state[p]["exp_avg_sq"].dequantize().sqrt() for p in optimizer.param_groups[0]["params"]]
    return float(torch.cat([r.flatten() for r in roots]).mean())


@torch.no_grad()
def nudged(model: nn.Module, nudge: float) -> nn.Module:
    for p in model.parameters() if nudge else ():
        p.mul_(1 + nudge * torch.randn_like(p))
    return model


def run_file(job: Job) -> Path:
    return job[-1].with_name(f"run-{zlib.crc32(repr(job).encode()):08x}.json")


def run(job: Job, again: bool) -> Row:
    """Fine-tune and keep the result in files. Without `again`, a finished run is read from its files instead."""
    path = run_file(job)
    if again or not path.exists():
        done, weights = fine_tune(*job)
        torch.save(weights, path.with_suffix(".pt"))
        path.write_text(json.dumps(done))
    return json.loads(path.read_text())


def drifts(job: Job, adamw: Variant) -> list[float]:
    """Return the drift of a finished run at each mark, from the run `adamw` with the same seed."""
    task, seed, _, size, encoder = job
    ended, reference = (torch.load(run_file(j).with_suffix(".pt")) for j in (job, (task, seed, adamw, size, encoder)))
    begun = weights_of(start(task, seed, encoder))
    return [drifted(e, r, begun) for e, r in zip(ended, reference, strict=True)]


def drifted(weights: Tensor, reference: Tensor, begun: Tensor) -> float:
    return float((weights - reference).norm() / (reference - begun).norm())


def fine_tune(task: str, seed: int, variant: Variant, size: Size, encoder: Path) -> tuple[Row, Tensor]:
    """Run one fine-tuning. Returns its row (held-out accuracy, bytes per parameter and step on the link, ...) and the
    weights at each mark [marks, n].
    """
    began = time.perf_counter()
    training, held_out = examples_of(task, seed, size)
    steps, batch, lr, fall, wrong, marks = size.training(task)
    steps = round(steps * variant.length)
    model = nudged(start(task, seed, encoder), variant.nudge)
    optimizer: torch.optim.Optimizer
    if variant.csd:
        optimizer = csdadam(model.bfloat16(), variant, lr)
    elif variant.torchao:
        optimizer = torchao_adamw(model, lr)
    else:
        pair = rules.PAIRS[variant.rule]
        optimizer = pair.theirs(model.parameters(), lr=lr * variant.faster, **pair.kwargs, **rules.fastest(pair))
    scheduler = schedule(optimizer, steps)
    losses: list[float] = []
    moved: Counter[str] = Counter()
    marked = [round(steps * (i + 1) / marks) for i in range(marks)]
    weights, roots = [], []
    for step, (inputs, labels) in enumerate(batches(training, steps, batch, seed, wrong), 1):
        losses.append(backward(model, inputs, labels, 1.0 if 2 * step <= steps else fall))
        optimizer.step()
        scheduler.step()
        if isinstance(optimizer, CSDOptimizer):
            stats = optimizer.stats()
            moved.update({k: stats[f"{k}_bytes"] for k in ("push", "pull")})
        if step in marked:
            weights.append(weights_of(model, optimizer))
            roots.append(mean_root(optimizer) if variant.rule == "adamw" else 0.0)
    if isinstance(optimizer, CSDOptimizer):
        optimizer.close()
    params = sum(p.numel() for p in model.parameters())
    done = {
        "task": task,
        "seed": seed,
        "variant": variant.name,
        "params": params,
        "accuracy": accuracy(model, held_out),
        "training_loss": statistics.fmean(losses[-len(losses) // 10 :]),
        "link_bytes_per_param": {k: v / steps / params for k, v in moved.items()},
        **({"marks": marked, "mean_root": roots} if marks > 1 and variant.rule == "adamw" else {}),
        "seconds": time.perf_counter() - began,
    }
    return done, torch.stack(weights)


# ---- verified first -------------------------------------------------------------


def ten_steps(
    task: str, size: Size, encoder: Path, variant: Variant
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Run ten steps of `variant`, and of AdamW on fp32 copies with the same gradients.

    Returns the masters, AdamW's parameters, and the initial weights of both.
    """
    _, batch, lr, *_ = size.training(task)
    model = start(task, 0, encoder).bfloat16()
    params = list(model.parameters())
    begun, copies = ([p.detach().float().clone() for p in params] for _ in range(2))
    oracle = torch.optim.AdamW(copies, lr=lr)
    with csdadam(model, variant, lr) as optimizer:
        for inputs, labels in batches(examples_of(task, 0, size)[0], 10, batch, 0):
            backward(model, inputs, labels)
            for p, copy in zip(params, copies, strict=True):
                assert p.grad is not None
                copy.grad = p.grad.float()
            optimizer.step()
            oracle.step()
        masters = [optimizer.state[p]["master"].clone() for p in params]
    return masters, copies, begun


def verify_dense(task: str, size: Size, encoder: Path) -> float:
    """Return dense CSDAdam's largest relative difference from AdamW after ten steps. Raises SystemExit if too large."""
    masters, copies, _ = ten_steps(task, size, encoder, DENSE)
    worst = max(float((m - c).abs().max() / c.abs().max()) for m, c in zip(masters, copies, strict=True))
    if not worst <= TOLERANCE:
        raise SystemExit(f"dense CSDAdam differs from AdamW by {worst:.1e} of the largest weight: nothing is reported")
    return worst


def verify_codes(task: str, size: Size, encoder: Path) -> float:
    """Return the drift from AdamW after ten steps with 8-bit states. Raises SystemExit if it is too large."""
    drift = drifted(*(torch.cat([t.flatten() for t in of]) for of in ten_steps(task, size, encoder, EIGHT_BIT[0])))
    if not drift <= CODED_DRIFT:
        raise SystemExit(f"8-bit states drift {drift:.2f} from AdamW within ten steps: nothing is reported")
    return drift


def verify_bytes(task: str, variant: Variant, size: Size, encoder: Path) -> Row:
    """Return the bytes that the first step with Top-K pushes, and the least and the most that it may push.

    Raises SystemExit if the bytes are outside these bounds.
    """
    _, batch, lr, *_ = size.training(task)
    model = start(task, 0, encoder).bfloat16()
    backward(model, *next(batches(examples_of(task, 0, size)[0], 1, batch, 0)))
    least = most = 4 * TILE // BLOCK  # a 4-byte count for each block
    most += 60 * TILE // BLOCK  # each block is padded to a multiple of 64 bytes
    for p in model.parameters():
        assert p.grad is not None
        if variant.topk and p.dim() > 1 and p.numel() >= SPARSE_FROM:
            entries = min(max(1, round(variant.topk * p.numel())), int(p.grad.count_nonzero()))
            least, most = least + 4 * entries, most + 4 * entries
        else:
            least, most = least + 2 * p.numel(), most + 64 * math.ceil(2 * p.numel() / 64)
    with csdadam(model, variant, lr) as optimizer:
        optimizer.step()
        pushed = optimizer.stats()["push_bytes"]
    if not least <= pushed <= most:
        raise SystemExit(f"{task}, {variant.name}: {pushed} bytes pushed, not {least} to {most}; nothing is reported")
    return {"task": task, "variant": variant.name, "pushed": pushed, "least": least, "most": most}
