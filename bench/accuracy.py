"""What Top-K gradients and 8-bit states cost in accuracy, after fine-tunings that converge. From the project's root:

    python -m bench.accuracy --json result.json --plot result.png      the whole table: one to two hours on two cores
    python -m bench.accuracy --tasks cloze digits --seeds 1
    python -m bench.accuracy --quick                                   half a minute, to see that it works

A small byte-level transformer is pre-trained once as a masked language model and kept below build/. From it each task
is fine-tuned with torch.optim.AdamW on fp32 parameters, and with CSDAdam on bf16 parameters (2 B each way per
parameter): dense, and with Top-K, with and without error feedback; with 8-bit states, dense and with Top-K. Where
torchao is installed, its plain 8-bit AdamW on fp32 parameters is another row. All else is the same: weights and batches
that a seed gives, schedule, learning rate. Nothing is downloaded: text is the Python standard library's own source, and
what is held out comes from other files.

    cloze   which keyword was masked, of six
    kind    what is marked: a comment, a string, a docstring, a name defined, called, or otherwise used
    para    is the second piece the first one, rotated and with upper and lower case exchanged, or from elsewhere
    digits  scikit-learn's handwritten digits; a perceptron, trained from scratch, split anew by each seed

CSDAdam is used as it comes: matrices of at least 4096 elements are sparse, embeddings too; biases, norms and the last
layer are dense. Only the tile is as large as the model, so that Top-K chooses among all elements of a parameter: a
large model's tiles have a million elements, a model as small as this one would be cut finer.

Beside the loss stands the drift, |w - w_ref| / |w_ref - w_0|: how far the weights (of CSDAdam, the masters) are in the
end from those that AdamW has with the same seed, in units of how far it went. Loss hides weights that went astray. Some
of it is chaos: what bf16 parameters alone make of it is in the row of dense CSDAdam.

First, dense CSDAdam is compared with AdamW step by step, 8-bit states are, too, if not to the last digit, and the bytes
that Top-K pushes with what it promises.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import io
import json
import keyword
import math
import multiprocessing
import os
import re
import statistics
import sys
import sysconfig
import time
import tokenize
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sklearn
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bench.demo import source_files, table
from bench.step import machine_facts, say
from csd_optim import CSDAdam

LENGTH = 48  # tokens that the transformer sees: one that stands for the whole, and bytes
WIDTH, LAYERS, HEADS = 96, 2, 4
MASK, WHOLE, BETWEEN, VOCABULARY = 256, 257, 258, 259  # tokens beyond the bytes
KEYWORDS = ("return", "import", "self", "def", "None", "raise")
KINDS = ("comment", "string", "docstring", "defined", "called", "other name")
TILE = 1 << 18  # elements: the whole model in one tile
SPARSE_FROM = 4096  # elements: smaller parameters, and those of one dimension, are dense
BLOCK = 1 << 16  # elements of a tile whose entries are counted together
TOLERANCE = 1e-6  # relative, as everywhere in this project
CODED_DRIFT = 0.1  # of ten steps with 8-bit states and AdamW's gradients

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.int64]
Files = list[Bytes]
Row = dict[str, Any]
Job = tuple[str, int, "Variant", "Size", Path]  # task, seed, ..., encoder


class Training(NamedTuple):
    steps: int
    batch: int
    lr: float  # the highest of the schedule


@dataclass(frozen=True)
class Size:
    """One size of the experiment."""

    pretraining: Training
    cloze: Training
    kind: Training
    para: Training
    digits: Training
    examples: int  # of a text task to train on
    held_out: int  # and to judge by

    def training(self, task: str) -> Training:
        return getattr(self, task)


FULL = Size(
    pretraining=Training(7000, 32, 2e-3),
    cloze=Training(2000, 16, 1e-3),
    kind=Training(2000, 16, 1e-3),
    para=Training(3000, 16, 1e-3),
    digits=Training(1500, 32, 3e-3),
    examples=32768,
    held_out=4096,
)
SHORT = Training(80, 16, 1e-3)
QUICK = Size(Training(50, 32, 2e-3), SHORT, SHORT, SHORT, Training(300, 32, 3e-3), 1024, 1024)


@dataclass(frozen=True)
class Variant:
    """What trains. `topk` None is dense; `length` is in units of the usual number of steps."""

    name: str
    csd: bool = True
    topk: float | None = None
    error_feedback: bool = False
    length: float = 1.0
    state_dtype: str = "fp32"
    torchao: bool = False  # its 8-bit AdamW


ADAMW = Variant("AdamW fp32", csd=False)
HALF = Variant("AdamW fp32, half the steps", csd=False, length=0.5)
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
VARIANTS = [HALF, ADAMW, DENSE, *TOP_K, *EIGHT_BIT, TORCHAO]
QUICK_VARIANTS = [ADAMW, DENSE, TOP_K[-2], *EIGHT_BIT]


# ---- text -----------------------------------------------------------------------


@functools.cache
def sources() -> tuple[Files, Files]:
    """Contents of the standard library's files: to train on, and of every fifth, held out."""
    contents = [np.fromfile(f, np.uint8) for f in source_files(Path(sysconfig.get_paths()["stdlib"]))]
    contents = [c for c in contents if len(c) > 4 * LENGTH]
    return [c for i, c in enumerate(contents) if i % 5], contents[::5]


def windows(files: Files, n: int, length: int, rng: np.random.Generator) -> tuple[NDArray[np.intp], Bytes]:
    """Files in proportion to their sizes [n], and a random window of each [n, length]."""
    sizes = np.array([len(text) for text in files])
    chosen = rng.choice(len(files), n, p=sizes / sizes.sum())
    starts = rng.integers(0, sizes[chosen] - length + 1)
    return chosen, np.stack([files[f][s : s + length] for f, s in zip(chosen, starts, strict=True)])


def two_pieces(files: Files, n: int, rng: np.random.Generator) -> tuple[Bytes, Bytes, Bytes]:
    """A piece, the one that follows it, and another one of the same file; each [n, half of LENGTH - 2]."""
    half = LENGTH // 2 - 1
    chosen, both = windows(files, n, 2 * half, rng)
    other = np.concatenate([windows([files[f]], 1, half, rng)[1] for f in chosen])
    return both[:, :half], both[:, half:], other


def rotated(pieces: Bytes, rng: np.random.Generator) -> Bytes:
    n, length = pieces.shape
    return np.take_along_axis(pieces, (np.arange(length) + rng.integers(1, length, (n, 1))) % length, 1)


def joined(first: Bytes, second: Bytes) -> Tokens:
    return np.concatenate([first, np.full((len(first), 1), BETWEEN), second], 1)


# Each task makes n examples from some files: tokens [n, LENGTH - 1] and labels [n].


def cloze(files: Files, n: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    pattern = re.compile(rb"\b(" + "|".join(KEYWORDS).encode() + rb")\b")
    places = defaultdict(list)
    for text in files:
        for match in pattern.finditer(text.tobytes()):
            if match.start() > LENGTH and match.end() < len(text) - LENGTH:
                places[match[1].decode()].append((text, *match.span()))
    tokens, labels = np.empty((n, LENGTH - 1), np.int64), rng.integers(0, len(KEYWORDS), n)
    for row, label in zip(tokens, labels, strict=True):
        found = places[KEYWORDS[label]]
        text, start, end = found[rng.integers(len(found))]
        before = rng.integers(LENGTH // 4, 3 * LENGTH // 4)
        row[:before], row[before] = text[start - before : start], MASK
        row[before + 1 :] = text[end : end + LENGTH - 2 - before]
    return tokens, labels


def kind(files: Files, n: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    places: list[list[tuple[Bytes, int]]] = [[] for _ in KINDS]
    for text in files:
        for label, at in kinds(text.tobytes()):
            if LENGTH < at < len(text) - LENGTH:
                places[label].append((text, at))
    tokens, labels = np.empty((n, LENGTH - 1), np.int64), rng.integers(0, len(KINDS), n)
    before = LENGTH // 2
    for row, label in zip(tokens, labels, strict=True):
        text, at = places[label][rng.integers(len(places[label]))]
        row[:before], row[before] = text[at - before : at], BETWEEN
        row[before + 1 :] = text[at : at + LENGTH - 2 - before]
    return tokens, labels


def kinds(text: bytes) -> Iterator[tuple[int, int]]:
    """Of comments, strings and names in a file: index into KINDS, and where the middle is."""
    if not text.isascii():
        return  # columns would not be bytes
    lines = [0, *np.cumsum([len(line) for line in text.splitlines(keepends=True)])]
    try:
        found = list(tokenize.tokenize(io.BytesIO(text).readline))
    except (SyntaxError, tokenize.TokenError):
        return  # lib2to3 keeps Python 2 for its tests
    for previous, this, following in zip(found, found[1:], found[2:], strict=False):
        (first_line, first), (last_line, last) = this.start, this.end
        at = int(lines[first_line - 1] + first + lines[last_line - 1] + last) // 2
        if this.type == tokenize.COMMENT:
            yield 0, at
        elif this.type == tokenize.STRING:
            yield (2 if this.string.endswith(('"""', "'''")) else 1), at
        elif this.type == tokenize.NAME and not keyword.iskeyword(this.string):
            yield (3 if previous.string in ("def", "class") else 4 if following.string == "(" else 5), at


def para(files: Files, n: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    first, _, other = two_pieces(files, n, rng)
    labels = rng.integers(0, 2, n)
    second = np.where(labels[:, None] == 1, first, other)
    second = rotated(second, rng)
    lower = second | 0x20  # ASCII letters differ from their other case by this bit
    return joined(first, second ^ (0x20 * ((lower >= ord("a")) & (lower <= ord("z")))).astype(np.uint8)), labels


TEXT_TASKS = {"cloze": (cloze, len(KEYWORDS)), "kind": (kind, len(KINDS)), "para": (para, 2)}
TASKS = [*TEXT_TASKS, "digits"]


def with_whole(tokens: NDArray[Any]) -> Tensor:
    """Tokens [n, LENGTH - 1] with the one that stands for the whole before them."""
    return torch.from_numpy(np.pad(tokens.astype(np.int64), ((0, 0), (1, 0)), constant_values=WHOLE))


def examples_of(task: str, seed: int, size: Size) -> list[tuple[Tensor, Tensor]]:
    """To train on, and held out: inputs [n, LENGTH] or images [n, 64], labels [n]."""
    return digits_examples(seed) if task == "digits" else text_examples(task, size)


@functools.cache
def text_examples(task: str, size: Size) -> list[tuple[Tensor, Tensor]]:
    """The same for every seed."""
    make, _ = TEXT_TASKS[task]
    made = [
        make(files, n, np.random.default_rng(i))
        for i, (files, n) in enumerate(zip(sources(), (size.examples, size.held_out), strict=True))
    ]
    return [(with_whole(tokens), torch.from_numpy(labels)) for tokens, labels in made]


def digits_examples(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Halves, another split for every seed."""
    images, labels = load_digits(return_X_y=True)
    halves = np.array_split(np.random.default_rng(seed).permutation(len(labels)), 2)
    return [(torch.from_numpy(images[h]).float() / 16, torch.from_numpy(labels[h])) for h in halves]


# ---- models ---------------------------------------------------------------------


class Encoder(nn.Module):
    """A transformer that sees all tokens, and what it makes of them: [batch, LENGTH] to [batch, LENGTH, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.token(tokens) + self.position.weight)


class Classifier(nn.Module):
    def __init__(self, encoder: Encoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.last = nn.Linear(WIDTH, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.encoder(tokens)[:, 0])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Up over the first 6 % of the steps, then down to zero."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.06 * steps), 1.0) * (1 - step / steps)
    )


def pretrained(size: Size, directory: Path) -> tuple[Path, float]:
    """A file with an Encoder's weights, made if it is not there, and its loss in nats per masked byte at the end."""
    text = sum(len(text) for text in sources()[0])
    key = (*size.pretraining, LENGTH, WIDTH, LAYERS, HEADS, text, torch.__version__)
    path = directory / f"encoder-{zlib.crc32(repr(key).encode()):08x}.pt"
    if not path.exists():
        encoder, loss = pretrain(*size.pretraining)
        torch.save({"encoder": encoder.state_dict(), "loss": loss}, path)
    return path, torch.load(path)["loss"]


def pretrain(steps: int, batch: int, lr: float) -> tuple[Encoder, float]:
    """Predicts masked bytes: runs of 1 to 5, about every sixth byte. Of a piece and the one that follows it, or of a
    piece and its rotation: then the model learns, as large ones do, to look up in one what the other lacks.
    """
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    encoder, head = Encoder(), nn.Linear(WIDTH, 256)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=lr, fused=True)
    scheduler = schedule(optimizer, steps)
    losses, began = [], time.perf_counter()
    for step in range(steps):
        first, following, _ = two_pieces(sources()[0], batch, rng)
        again = (np.arange(batch) % 2 == 0)[:, None]
        tokens = with_whole(joined(first, np.where(again, rotated(first, rng), following)))
        runs = rng.integers(1, 6, tokens.shape) * (rng.random(tokens.shape) < 0.06)
        masked = np.zeros(tokens.shape, bool)
        for i in range(5):
            masked[:, i + 1 :] |= runs[:, 1 : LENGTH - i] > i
        hidden = torch.from_numpy(masked) & (tokens < 256)
        loss = F.cross_entropy(head(encoder(tokens.masked_fill(hidden, MASK))[hidden]), tokens[hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if (step + 1) % 500 == 0:
            mean, seconds = statistics.fmean(losses[-200:]), time.perf_counter() - began
            say(f"pre-training, step {step + 1}: {mean:.3f} nats per masked byte, {seconds:.0f} s")
    return encoder, statistics.fmean(losses[-200:])


# ---- training -------------------------------------------------------------------


def start(task: str, seed: int, encoder: Path) -> nn.Module:
    """The model that every variant of a task and seed begins with."""
    torch.manual_seed(seed)
    if task == "digits":
        return perceptron()
    model = Classifier(Encoder(), TEXT_TASKS[task][1])
    model.encoder.load_state_dict(torch.load(encoder)["encoder"])
    return model


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """Calculated in fp32, whatever the parameters are."""
    return torch.func.functional_call(model, {n: p.float() for n, p in model.named_parameters()}, (inputs,))


def batches(examples: tuple[Tensor, Tensor], steps: int, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Every example once in random order, then again in another."""
    inputs, labels = examples
    random = torch.Generator().manual_seed(seed)
    epochs = math.ceil(steps * batch / len(labels))
    order = torch.cat([torch.randperm(len(labels), generator=random) for _ in range(epochs)])
    for chosen in order[: steps * batch].split(batch):
        yield inputs[chosen], labels[chosen]


def backward(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Gradients of one batch, and its loss in nats."""
    model.zero_grad()
    loss = F.cross_entropy(logits(model, inputs), labels)
    loss.backward()
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, examples: tuple[Tensor, Tensor]) -> float:
    """In percent."""
    inputs, labels = examples
    hits = sum(
        int((logits(model, i).argmax(1) == y).sum()) for i, y in zip(inputs.split(256), labels.split(256), strict=True)
    )
    return 100 * hits / len(labels)


def csdadam(model: nn.Module, variant: Variant, lr: float) -> CSDAdam:
    return CSDAdam(
        model.parameters(),
        lr=lr,
        devices="ram:",
        tile_size=TILE,
        topk=variant.topk,
        error_feedback=variant.error_feedback,
        state_dtype=variant.state_dtype,
    )


def torchao_adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Its states are 8-bit codes where a parameter has at least 4096 elements."""
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")  # or every shape is compiled first, in every worker: minutes
    return AdamW8bit(model.parameters(), lr=lr)


def weights_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
    """All of them in fp32; those of CSDAdam are its masters."""
    csd = isinstance(optimizer, CSDAdam)
    return torch.cat(
        [(optimizer.state[p]["master"] if csd else p.detach().float()).flatten() for p in model.parameters()]
    )


def run_file(job: Job) -> Path:
    return job[-1].with_name(f"run-{zlib.crc32(repr(job).encode()):08x}.json")


def run(job: Job, again: bool) -> Row:
    """A fine-tuning, kept in files. Without `again`, one that is there already is taken from them."""
    path = run_file(job)
    if again or not path.exists():
        done, weights = fine_tune(*job)
        torch.save(weights, path.with_suffix(".pt"))
        path.write_text(json.dumps(done))
    return json.loads(path.read_text())


def drift(job: Job, adamw: Variant) -> float:
    """Of a finished run, from that of AdamW with the same seed."""
    task, seed, _, size, encoder = job
    ended, reference = (torch.load(run_file(j).with_suffix(".pt")) for j in (job, (task, seed, adamw, size, encoder)))
    return drifted(ended, reference, weights_of(start(task, seed, encoder)))


def drifted(weights: Tensor, reference: Tensor, begun: Tensor) -> float:
    return float((weights - reference).norm() / (reference - begun).norm())


def fine_tune(task: str, seed: int, variant: Variant, size: Size, encoder: Path) -> tuple[Row, Tensor]:
    """One run: accuracy on what is held out, bytes per parameter and step on the link; and the weights."""
    began = time.perf_counter()
    training, held_out = examples_of(task, seed, size)
    steps, batch, lr = size.training(task)
    steps = round(steps * variant.length)
    model = start(task, seed, encoder)
    optimizer: torch.optim.Optimizer
    if variant.csd:
        optimizer = csdadam(model.bfloat16(), variant, lr)
    elif variant.torchao:
        optimizer = torchao_adamw(model, lr)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    scheduler = schedule(optimizer, steps)
    losses: list[float] = []
    moved: Counter[str] = Counter()
    for inputs, labels in batches(training, steps, batch, seed):
        losses.append(backward(model, inputs, labels))
        optimizer.step()
        scheduler.step()
        if isinstance(optimizer, CSDAdam):
            stats = optimizer.stats()
            moved.update({k: stats[f"{k}_bytes"] for k in ("push", "pull")})
    weights = weights_of(model, optimizer)
    if isinstance(optimizer, CSDAdam):
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
        "seconds": time.perf_counter() - began,
    }
    return done, weights


# ---- verified first -------------------------------------------------------------


def ten_steps(
    task: str, size: Size, encoder: Path, variant: Variant
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Masters after ten steps, those of AdamW on fp32 copies with the same gradients, and where both began."""
    _, batch, lr = size.training(task)
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
    """The largest relative difference after ten steps from AdamW."""
    masters, copies, _ = ten_steps(task, size, encoder, DENSE)
    worst = max(float((m - c).abs().max() / c.abs().max()) for m, c in zip(masters, copies, strict=True))
    if not worst <= TOLERANCE:
        raise SystemExit(f"dense CSDAdam differs from AdamW by {worst:.1e} of the largest weight: nothing is reported")
    return worst


def verify_codes(task: str, size: Size, encoder: Path) -> float:
    """The drift from AdamW after ten steps with 8-bit states."""
    drift = drifted(*(torch.cat([t.flatten() for t in of]) for of in ten_steps(task, size, encoder, EIGHT_BIT[0])))
    if not drift <= CODED_DRIFT:
        raise SystemExit(f"8-bit states drift {drift:.2f} from AdamW within ten steps: nothing is reported")
    return drift


def verify_bytes(task: str, variant: Variant, size: Size, encoder: Path) -> Row:
    """The first step of Top-K: what it pushes, and the least and the most that it may."""
    _, batch, lr = size.training(task)
    model = start(task, 0, encoder).bfloat16()
    backward(model, *next(batches(examples_of(task, 0, size)[0], 1, batch, 0)))
    least = most = 4 * TILE // BLOCK  # a count for each block
    most += 60 * TILE // BLOCK  # which ends on a whole 64 bytes
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


# ---- what is shown --------------------------------------------------------------


def summary(runs: list[Row], held_out: dict[str, int]) -> list[Row]:
    """A row for each task and variant, over the seeds. Differences are to AdamW with the same seed, in points.

    `held_out`: examples of each task. By them alone, one accuracy has a standard error of `held_out_noise` points.
    """
    found = {(r["task"], r["variant"], r["seed"]): r for r in runs}
    rows = []
    for task, variant in dict.fromkeys((r["task"], r["variant"]) for r in runs):
        seeds = sorted(seed for t, v, seed in found if (t, v) == (task, variant))
        own = [found[task, variant, seed] for seed in seeds]
        share = statistics.fmean(r["accuracy"] for r in own) / 100
        rows.append(
            {
                "task": task,
                "variant": variant,
                "seeds": seeds,
                "accuracy": [r["accuracy"] for r in own],
                "difference": [r["accuracy"] - found[task, ADAMW.name, r["seed"]]["accuracy"] for r in own],
                "held_out_noise": 100 * math.sqrt(share * (1 - share) / held_out[task]),
                "training_loss": statistics.fmean(r["training_loss"] for r in own),
                "drift": [r["drift"] for r in own],
                "link_bytes_per_param": {
                    k: statistics.fmean(r["link_bytes_per_param"][k] for r in own)
                    for k in own[0]["link_bytes_per_param"]
                },
            }
        )
    return rows


def mean_and_spread(values: list[float], sign: str = "") -> str:
    return f"{statistics.fmean(values):{sign}.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def accuracy_tables(rows: list[Row]) -> Iterator[Table]:
    for task in dict.fromkeys(r["task"] for r in rows):
        noise = max(r["held_out_noise"] for r in rows if r["task"] == task)
        title = f"{task} (by its held-out examples alone, one accuracy has a standard error of {noise:.2f})"
        made = table(title, "", "B pushed", "B pulled", "training loss", "drift", "accuracy, %", "minus AdamW, points")
        for row in rows:
            if row["task"] == task:
                moved = [f"{b:.3f}" for b in row["link_bytes_per_param"].values()] or ["", ""]
                difference = "" if row["variant"] == ADAMW.name else mean_and_spread(row["difference"], "+")
                loss, percent = f"{row['training_loss']:.3f}", mean_and_spread(row["accuracy"])
                astray = "" if row["variant"] == ADAMW.name else mean_and_spread(row["drift"])
                made.add_row(row["variant"], *moved, loss, astray, percent, difference)
        yield made


def plot(rows: list[Row], path: Path) -> None:
    """Accuracy against bytes pushed, a panel for each task."""
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    figure, grid = plt.subplots(
        math.ceil(len(tasks) / 2),
        2,
        figsize=(9, 1 + 3 * math.ceil(len(tasks) / 2)),
        layout="constrained",
        squeeze=False,
    )
    lines = {
        "dense": ("tab:blue", "s", [DENSE]),
        "Top-K with error feedback": ("tab:green", "o", [v for v in TOP_K if v.error_feedback]),
        "8-bit states": ("tab:purple", "D", EIGHT_BIT),
        "Top-K, what is not sent is dropped": ("tab:red", "v", [v for v in TOP_K if not v.error_feedback]),
    }
    for axis, task in zip(grid.flat, tasks, strict=False):
        found = {r["variant"]: r for r in rows if r["task"] == task}
        adamw = found[ADAMW.name]["accuracy"]
        axis.axhspan(min(adamw), max(adamw), color="tab:gray", alpha=0.3, lw=0, label="AdamW fp32")
        axis.axhline(statistics.fmean(adamw), color="tab:gray", lw=1)
        for label, (colour, marker, variants) in lines.items():
            if own := [found[v.name] for v in variants if v.name in found]:
                pushed = [r["link_bytes_per_param"]["push"] for r in own]
                means = [statistics.fmean(r["accuracy"]) for r in own]
                error = [
                    [m - min(r["accuracy"]) for m, r in zip(means, own, strict=True)],
                    [max(r["accuracy"]) - m for m, r in zip(means, own, strict=True)],
                ]
                axis.errorbar(pushed, means, error, color=colour, marker=marker, ms=5, lw=1, capsize=3, label=label)
        axis.set(title=task, xscale="log", ylabel="accuracy, %")
        axis.set_xticks(ticks := [0.05, 0.1, 0.2, 0.5, 1, 2], [f"{t:g}" for t in ticks])
        axis.minorticks_off()
        axis.set_xlim(0.04, 2.6)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in grid.flat[len(tasks) :]:
        axis.set_axis_off()
    figure.suptitle("Held-out accuracy against gradient bytes per parameter and step: mean and range over seeds")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def one_thread() -> None:
    """Workers share the cores, and sums do not depend on how many there are."""
    torch.set_num_threads(1)


def main() -> None:
    arguments = parse()
    size = QUICK if arguments.quick else FULL
    variants = [replace(v, length=arguments.length * v.length) for v in VARIANTS if v.name in arguments.variants]
    began = time.perf_counter()
    one_thread()
    facts = {
        **machine_facts(),
        "numpy": np.__version__,
        "scikit-learn": sklearn.__version__,
        "back end": "ram:",
        **({"torchao": importlib.metadata.version("torchao")} if any(v.torchao for v in variants) else {}),
    }
    say("  ".join(f"{k}: {v}" for k, v in facts.items()))
    arguments.directory.mkdir(parents=True, exist_ok=True)
    encoder, masked_loss = pretrained(size, arguments.directory)
    say(f"pre-trained to {masked_loss:.3f} nats per masked byte")

    verified: Row = {"dense": {}, "8bit": {}, "bytes": []}
    for task in arguments.tasks:
        verified["dense"][task] = verify_dense(task, size, encoder)
        if any(v.state_dtype != "fp32" for v in variants):
            verified["8bit"][task] = verify_codes(task, size, encoder)
        verified["bytes"] += [verify_bytes(task, v, size, encoder) for v in variants if v.topk]
    say(
        f"verified: dense is AdamW to {max(verified['dense'].values()):.1e} after 10 steps; "
        f"8-bit states drift {max(verified['8bit'].values(), default=math.nan):.3f} in them; "
        f"{len(verified['bytes'])} Top-K steps pushed what they promise"
    )

    jobs: list[Job] = [
        (t, s, v, size, encoder) for s in range(arguments.seeds) for t in arguments.tasks for v in variants
    ]
    runs: list[Row] = []
    context = multiprocessing.get_context("forkserver")
    # What takes seconds: once, not in each worker.
    context.set_forkserver_preload(["bench.demo", "sklearn.datasets", "torch._dynamo"])
    with ProcessPoolExecutor(arguments.workers, mp_context=context, initializer=one_thread) as workers:
        for done in as_completed([workers.submit(run, job, not arguments.resume) for job in jobs]):
            runs.append(done.result())
            at = f"{len(runs)}/{len(jobs)} after {time.perf_counter() - began:.0f} s"
            say("{at}: {task}, seed {seed}, {variant}: {accuracy:.2f} %".format(at=at, **runs[-1]))
    order = {(t, s, v.name): i for i, (t, s, v, *_) in enumerate(jobs)}
    runs.sort(key=lambda r: order[r["task"], r["seed"], r["variant"]])
    adamw = next(v for v in variants if v.name == ADAMW.name)
    for job, done_run in zip(jobs, runs, strict=True):
        done_run["drift"] = drift(job, adamw)

    rows = summary(runs, {task: len(examples_of(task, 0, size)[1][1]) for task in arguments.tasks})
    console = Console(file=sys.stdout if arguments.json != "-" else sys.stderr, highlight=False, width=110)
    for made in accuracy_tables(rows):
        console.print(made)
    report = {
        "schema": "csd_optim.bench.accuracy/1",
        "machine": facts,
        "settings": {**asdict(size), "seeds": arguments.seeds, "length": arguments.length, "tile_elems": TILE},
        "masked_loss": masked_loss,
        "verified": verified,
        "rows": rows,
        "runs": runs,
        "seconds": sum(r["seconds"] for r in runs),
    }
    if arguments.json == "-":
        print(json.dumps(report, indent=1))
    elif arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="default: all")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=[v.name for v in VARIANTS],
        metavar="NAME",
        help="those of the table; default: all",
    )
    parser.add_argument("--seeds", type=int, help="runs of everything (3)")
    parser.add_argument("--length", type=float, default=1.0, help="train this many times as long")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of one thread each (cores)")
    parser.add_argument(
        "--directory", type=Path, default=Path("build/accuracy"), help="for what is pre-trained and for finished runs"
    )
    parser.add_argument("--resume", action="store_true", help="take the finished runs of a call that was interrupted")
    parser.add_argument("--quick", action="store_true", help="cloze and digits, one seed, five variants, few steps")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write everything there, or on stdout")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG")
    arguments = parser.parse_args()
    arguments.tasks = arguments.tasks or (["cloze", "digits"] if arguments.quick else TASKS)
    installed = importlib.util.find_spec("torchao") is not None
    if TORCHAO.name in (arguments.variants or ()) and not installed:
        parser.error(f"{TORCHAO.name}: pip install torchao")
    usual = QUICK_VARIANTS if arguments.quick else [v for v in VARIANTS if installed or not v.torchao]
    arguments.variants = arguments.variants or [v.name for v in usual]
    arguments.variants.append(ADAMW.name)  # what all are compared with
    arguments.seeds = arguments.seeds or (1 if arguments.quick else 3)
    return arguments


if __name__ == "__main__":
    main()
