"""What bench/studies/accuracy.py trains: its tasks, their examples, the models, and the pre-training.

All data is already installed: the Python standard library's own source, of which every fifth file is held out, and
scikit-learn's digits.
"""

from __future__ import annotations

import functools
import io
import keyword
import math
import re
import statistics
import sysconfig
import time
import tokenize
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bench.demo import source_files
from bench.step import say

LENGTH = 48  # tokens that the transformer sees: one that stands for the whole text, then bytes
WIDTH, LAYERS, HEADS = 96, 2, 4
MASK, WHOLE, BETWEEN, VOCABULARY = 256, 257, 258, 259  # tokens beyond the bytes
KEYWORDS = ("return", "import", "self", "def", "None", "raise")
KINDS = ("comment", "string", "docstring", "defined", "called", "other name")

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.int64]
Files = list[Bytes]


class Training(NamedTuple):
    steps: int
    batch: int
    lr: float  # the schedule's peak
    fall: float = 1.0  # factor of the loss in the second half
    wrong: float = 0.0  # share of each batch's labels that are drawn at random
    marks: int = 1  # how often weights are recorded, at equal intervals, the last time at the end


@dataclass(frozen=True)
class Size:
    """One size of the experiment."""

    pretraining: Training
    cloze: Training
    kind: Training
    para: Training
    digits: Training
    long: Training
    falling: Training
    examples: int  # training examples of a text task
    held_out: int  # its examples for evaluation

    def training(self, task: str) -> Training:
        return getattr(self, task)


FULL = Size(
    pretraining=Training(7000, 32, 2e-3),
    cloze=Training(2000, 16, 1e-3),
    kind=Training(2000, 16, 1e-3),
    para=Training(3000, 16, 1e-3),
    digits=Training(1500, 32, 3e-3),
    long=Training(10000, 32, 3e-3, marks=20),
    falling=Training(6000, 32, 3e-3, fall=0.1, wrong=0.1, marks=20),
    examples=32768,
    held_out=4096,
)
SHORT = Training(80, 16, 1e-3)
QUICK = Size(
    pretraining=Training(50, 32, 2e-3),
    cloze=SHORT,
    kind=SHORT,
    para=SHORT,
    digits=Training(300, 32, 3e-3),
    long=Training(200, 32, 3e-3, marks=2),
    falling=Training(200, 32, 3e-3, fall=0.1, wrong=0.1, marks=4),
    examples=1024,
    held_out=1024,
)


# ---- text -----------------------------------------------------------------------


@functools.cache
def sources() -> tuple[Files, Files]:
    """Return the contents of the standard library's files: those to train on, and every fifth, held out."""
    contents = [np.fromfile(f, np.uint8) for f in source_files(Path(sysconfig.get_paths()["stdlib"]))]
    contents = [c for c in contents if len(c) > 4 * LENGTH]
    return [c for i, c in enumerate(contents) if i % 5], contents[::5]


def windows(files: Files, n: int, length: int, rng: np.random.Generator) -> tuple[NDArray[np.intp], Bytes]:
    """Draw n random windows. Returns the index of each one's file [n], drawn by size, and the bytes [n, length]."""
    sizes = np.array([len(text) for text in files])
    chosen = rng.choice(len(files), n, p=sizes / sizes.sum())
    starts = rng.integers(0, sizes[chosen] - length + 1)
    return chosen, np.stack([files[f][s : s + length] for f, s in zip(chosen, starts, strict=True)])


def two_pieces(files: Files, n: int, rng: np.random.Generator) -> tuple[Bytes, Bytes, Bytes]:
    """Return n random pieces, their successors, and other pieces of the same files; each [n, half of LENGTH - 2]."""
    half = LENGTH // 2 - 1
    chosen, both = windows(files, n, 2 * half, rng)
    other = np.concatenate([windows([files[f]], 1, half, rng)[1] for f in chosen])
    return both[:, :half], both[:, half:], other


def rotated(pieces: Bytes, rng: np.random.Generator) -> Bytes:
    n, length = pieces.shape
    return np.take_along_axis(pieces, (np.arange(length) + rng.integers(1, length, (n, 1))) % length, 1)


def joined(first: Bytes, second: Bytes) -> Tokens:
    return np.concatenate([first, np.full((len(first), 1), BETWEEN), second], 1)


# A task's function makes n examples from some files: tokens [n, LENGTH - 1] and labels [n].


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
    """Yield for each comment, string and name in a file its index into KINDS and the offset of its middle."""
    if not text.isascii():
        return  # tokenize counts columns in characters: with non-ASCII text they would not be byte offsets
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
    lower = second | 0x20  # upper and lower case of an ASCII letter differ in this bit
    return joined(first, second ^ (0x20 * ((lower >= ord("a")) & (lower <= ord("z")))).astype(np.uint8)), labels


TEXT_TASKS = {"cloze": (cloze, len(KEYWORDS)), "kind": (kind, len(KINDS)), "para": (para, 2)}
TASKS = [*TEXT_TASKS, "digits", "long", "falling"]


def with_whole(tokens: NDArray[Any]) -> Tensor:
    """Return the tokens [n, LENGTH - 1] with WHOLE, which stands for the whole text, before them: [n, LENGTH]."""
    return torch.from_numpy(np.pad(tokens.astype(np.int64), ((0, 0), (1, 0)), constant_values=WHOLE))


def examples_of(task: str, seed: int, size: Size) -> list[tuple[Tensor, Tensor]]:
    """Return training and held-out examples: inputs [n, LENGTH] or images [n, 64], with labels [n]."""
    return text_examples(task, size) if task in TEXT_TASKS else digits_examples(seed)


@functools.cache
def text_examples(task: str, size: Size) -> list[tuple[Tensor, Tensor]]:
    """Return the examples of a text task, the same for every seed."""
    make, _ = TEXT_TASKS[task]
    made = [
        make(files, n, np.random.default_rng(i))
        for i, (files, n) in enumerate(zip(sources(), (size.examples, size.held_out), strict=True))
    ]
    return [(with_whole(tokens), torch.from_numpy(labels)) for tokens, labels in made]


def digits_examples(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return the digits in two halves, split differently for every seed."""
    images, labels = load_digits(return_X_y=True)
    halves = np.array_split(np.random.default_rng(seed).permutation(len(labels)), 2)
    return [(torch.from_numpy(images[h]).float() / 16, torch.from_numpy(labels[h])) for h in halves]


# ---- models ---------------------------------------------------------------------


class Encoder(nn.Module):
    """A bidirectional transformer: tokens [batch, LENGTH] to features [batch, LENGTH, WIDTH]."""

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
    """Return a schedule: warm-up over the first 6 % of the steps, then decay to zero."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.06 * steps), 1.0) * (1 - step / steps)
    )


def pretrained(size: Size, directory: Path) -> tuple[Path, float]:
    """Return the file with a pre-trained Encoder's weights and its final loss in nats per masked byte.

    Pre-trains if there is no such file in `directory` yet.
    """
    text = sum(len(text) for text in sources()[0])
    key = (*size.pretraining[:3], LENGTH, WIDTH, LAYERS, HEADS, text, torch.__version__)
    path = directory / f"encoder-{zlib.crc32(repr(key).encode()):08x}.pt"
    if not path.exists():
        encoder, loss = pretrain(*size.pretraining[:3])
        torch.save({"encoder": encoder.state_dict(), "loss": loss}, path)
    return path, torch.load(path)["loss"]


def pretrain(steps: int, batch: int, lr: float) -> tuple[Encoder, float]:
    """Pre-train an Encoder to predict masked bytes: runs of 1 to 5, about every sixth byte.

    Each input is a piece and the one that follows it, or a piece and its rotation. From the latter the model learns, as
    large ones do, to look up in one piece what is masked in the other. Returns the Encoder and its final loss in nats
    per masked byte.
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


def start(task: str, seed: int, encoder: Path) -> nn.Module:
    """Return the model with the initial weights that all variants of a task and seed share."""
    torch.manual_seed(seed)
    if task not in TEXT_TASKS:
        return perceptron()
    model = Classifier(Encoder(), TEXT_TASKS[task][1])
    model.encoder.load_state_dict(torch.load(encoder)["encoder"])
    return model


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the model's output, computed in fp32 whatever the parameters' dtype."""
    return torch.func.functional_call(model, {n: p.float() for n, p in model.named_parameters()}, (inputs,))


def batches(
    examples: tuple[Tensor, Tensor], steps: int, batch: int, seed: int, wrong: float = 0.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of the examples in random order, each example once per epoch.

    A share `wrong` of the labels is replaced by random ones, anew in each batch.
    """
    inputs, labels = examples
    random = torch.Generator().manual_seed(seed)
    epochs = math.ceil(steps * batch / len(labels))
    order = torch.cat([torch.randperm(len(labels), generator=random) for _ in range(epochs)])
    for chosen in order[: steps * batch].split(batch):
        these = labels[chosen]
        if wrong:
            drawn = labels[torch.randint(len(labels), these.shape, generator=random)]
            these = torch.where(torch.rand(these.shape, generator=random) < wrong, drawn, these)
        yield inputs[chosen], these


def backward(model: nn.Module, inputs: Tensor, labels: Tensor, factor: float = 1.0) -> float:
    """Compute the gradients of one batch's loss times `factor`. Returns the loss itself, in nats."""
    model.zero_grad()
    loss = F.cross_entropy(logits(model, inputs), labels)
    (factor * loss).backward()
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, examples: tuple[Tensor, Tensor]) -> float:
    """Return the accuracy in percent."""
    inputs, labels = examples
    hits = sum(
        int((logits(model, i).argmax(1) == y).sum()) for i, y in zip(inputs.split(256), labels.split(256), strict=True)
    )
    return 100 * hits / len(labels)
