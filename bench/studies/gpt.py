"""A byte-level GPT that studies train from scratch on the standard library's own source, and its batches."""

from __future__ import annotations

import statistics

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.studies.accuracy_tasks import sources, windows


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Bytes [batch, n] to the logits of those that follow, [batch, n, 256], for n up to `length`."""

    def __init__(self, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        for embedding in (self.byte, self.place):
            nn.init.normal_(embedding.weight, std=0.1)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, pieces: Tensor) -> Tensor:
        return self.head(self.layers(self.byte(pieces) + self.place.weight[: pieces.shape[1]]))


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    """Return the loss of pieces [n, length + 1], computed in fp32 whatever the parameters' dtype."""
    weights = {name: p.float() for name, p in model.named_parameters()}
    logits = torch.func.functional_call(model, weights, (pieces[:, :-1],))
    return F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


def pieces_of(held_out: bool, n: int, length: int, rng: np.random.Generator) -> Tensor:
    """Draw n pieces of length + 1 bytes, of the files to train on or of the others: [n, length + 1]."""
    return torch.from_numpy(windows(sources()[held_out], n, length + 1, rng)[1].astype(np.int64))


@torch.no_grad()
def held_out_loss(model: nn.Module, n: int, length: int) -> float:
    """Return the mean loss of n held-out pieces, the same ones for every model, in nats per byte."""
    pieces = pieces_of(True, n, length, np.random.default_rng(0))
    return statistics.fmean(loss_of(model, some).item() for some in pieces.split(256))
