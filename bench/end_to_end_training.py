"""One training of bench/end_to_end.py, in an interpreter that may have DeepSpeed and nothing else of this project's
environment: it needs torch and transformers, and csd_optim only to train with it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench import peers

LR, WEIGHT_DECAY = 2e-6, 0.1  # at 1e-5 the loss on the next batch depends on last bits
WARM_UP = 2  # steps that are not timed
SUB_GROUP = 1 << 24  # elements of ZeRO-Infinity's sub-groups: as in peers.py, four weights of 2048 x 2048

# Trains with one batch of tokens, and returns the loss. Then: waits for what it has left to do.
Step = Callable[[torch.Tensor], float]
Training = tuple[Step, Callable[[], Any]]


def train_with(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def adamw(model: torch.nn.Module, _: Path) -> Training:
    """Without masters: AdamW with fp32 masters and states would take 20 bytes of memory per parameter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    return train_with(model, optimizer), lambda: None


def csdadam(overlap: bool, **options: Any) -> Callable[[torch.nn.Module, Path], Training]:
    def start(model: torch.nn.Module, directory: Path) -> Training:
        from csd_optim import CSDAdam

        optimizer = CSDAdam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, devices=[directory], **options)
        if overlap:
            optimizer.overlap(model, backward=True)
        return train_with(model, optimizer), optimizer.synchronize

    return start


def zero_infinity(model: torch.nn.Module, directory: Path) -> Training:
    peers.start_deepspeed(directory)
    import deepspeed

    config = peers.zero_infinity(directory, SUB_GROUP)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(tokens: torch.Tensor) -> float:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, lambda: None


TRAININGS: dict[str, Callable[[torch.nn.Module, Path], Training]] = {
    "adamw": adamw,
    "deepspeed-nvme": zero_infinity,
    "csdadam": csdadam(overlap=False),
    "csdadam-overlap": csdadam(overlap=True),
    "csdadam-8bit": csdadam(overlap=False, state_dtype="8bit"),
    "csdadam-8bit-overlap": csdadam(overlap=True, state_dtype="8bit"),
}


def measure(name: str, model: dict[str, Any], batches: torch.Tensor, directory: Path) -> dict[str, Any]:
    """Train a Llama with random weights. `model`: its configuration; `batches`: int64, [steps, batch, context].

    Returns `params`, `losses` of all steps; of those after the warm-up `seconds`, each from its beginning to that of
    the next, the last one until nothing is left to do; `bytes_read` and `bytes_written` of disks, the mean per step;
    `peak_bytes`, the most memory that the process has had resident.
    """
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_config(LlamaConfig(**model), dtype=torch.bfloat16)
    params = sum(p.numel() for p in net.parameters())
    step, wait = TRAININGS[name](net, directory)
    losses, marks, before = [], [], (0, 0)
    for i, tokens in enumerate(batches):
        if i == WARM_UP:
            wait()  # what these steps have left to write is not counted
            before = peers.io_bytes()
        if i >= WARM_UP:
            marks.append(time.perf_counter())
        losses.append(step(tokens))
    wait()
    marks.append(time.perf_counter())
    moved = [(after - first) / (len(marks) - 1) for after, first in zip(peers.io_bytes(), before, strict=True)]
    return {
        "name": name,
        "params": params,
        "losses": losses,
        "seconds": [end - start for start, end in itertools.pairwise(marks)],
        "bytes_read": moved[0],
        "bytes_written": moved[1],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "versions": peers.versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=TRAININGS)
    parser.add_argument("--model", type=json.loads, required=True, help="configuration of a Llama, as JSON")
    parser.add_argument("--batches", type=Path, required=True, help="a tensor that torch.save() has written")
    parser.add_argument("--directory", type=Path, required=True, help="where optimizer states go")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    answer = peers.own_stdout()
    try:
        result = measure(arguments.name, arguments.model, torch.load(arguments.batches), arguments.directory)
    except (ImportError, peers.Skipped) as error:
        result = {"name": arguments.name, "skipped": str(error)}
    with answer:
        print(json.dumps(result), file=answer)
        answer.flush()
        os._exit(0)  # DeepSpeed's threads may not end


if __name__ == "__main__":
    main()
