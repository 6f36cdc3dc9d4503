"""Random histories: whatever happens between steps, file and memory hold the same bits, and checksums are right."""

import copy
import random
from itertools import chain
from pathlib import Path

import pytest
import torch
from support.backends import on_cards
from support.optimizers import ADAMW, CODED, FULL, MIXED, MUON, MUON_IN_8_BITS, RMSPROP, SGD, rules

from csd_optim.bindings import crc32c
from csd_optim.store.format import FILE_NAME, read_contents
from csd_optim.store.sections import sections_of, size_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.complex64]


class Twins:
    """The same optimizer twice: on files (some on cards, if chosen) and in memory."""

    def __init__(self, choose, directory, of):
        self.choose = choose
        self.of = of
        files = (
            [
                [f"xrt:0?nvme={directory}/a&buffers=3&block=4096"],
                [f"{directory}/a", f"xrt:1?nvme={directory}/b&buffers=4&block=12KiB", f"xrt:0?nvme={directory}/c"],
                ["ram:", f"xrt:0?nvme={directory}/a&buffers=1"],
                [f"xrt:0?nvme={directory}/a&p2p=0", f"xrt:1?nvme={directory}&scratch=1"],
            ]
            if on_cards()
            else [
                [f"file:{directory}/a?buffers=3&block=4096&cache={choose.choice(['off', '0', '40KiB', '1MiB'])}"],
                [f"{directory}/a", f"file:{directory}/b?buffers=4&block=12KiB&cache=30KiB&share=0.4", f"{directory}/c"],
                ["ram:", f"file:{directory}/a?buffers=1&cache={choose.choice(['0', '50KiB'])}"],
                ["file:", f"{directory}/a"],
            ]
        )
        self.pairs = self.new_pairs()
        options = of.other if choose.random() < 0.3 and of is not MIXED else {}
        options = {**of.kwargs, **options, "grad_dtype": choose.choice([None, torch.bfloat16])}
        options |= {"tile_size": choose.choice([1024, 2048, 5120, 1 << 16]), "lr": 0.01}
        options |= {"topk": choose.choice([None, 0.02]), "error_feedback": choose.random() < 0.8}
        options |= {"state_dtype": self.state_dtype()}
        mine, others = zip(*self.pairs, strict=True)
        self.file = of.ours(mine, devices=choose.choice(files), **options)
        self.ram = of.ours(others, devices="ram:", **options)

    def state_dtype(self):
        """On cards, checksums of codes cover larger chunks than the tiles of these tests allow."""
        return "fp32" if on_cards() or not self.of.has_codes else self.choose.choice(["fp32", "8bit"])

    def new_pairs(self):
        choose = self.choose
        shapes = [(choose.randint(1, 5000),), (choose.randint(1, 60), 7), (1,), (), (0, 3), (1024,), (2, 3, 4, 5)]
        pairs = []
        for _ in range(choose.randint(1, 5)):
            value = torch.randn(choose.choice(shapes)).to(choose.choice(DTYPES))
            if value.dim() == 4 and choose.random() < 0.5:
                value = value.contiguous(memory_format=torch.channels_last)
            pairs.append(tuple(torch.nn.Parameter(value.clone()) for _ in range(2)))
        return pairs

    def step(self):
        for pair in self.pairs:
            grad = torch.randn_like(pair[0]) if self.choose.random() < 0.75 else None
            for p in pair:
                p.grad = None if grad is None else grad.clone()
        self.file.step()
        self.ram.step()

    # ---- events between steps

    def join(self):
        new = self.new_pairs()
        options = self.of.other if self.choose.random() < 0.5 else {}
        options = {**options, **self.choose.choice([{}, {"topk": None}, {"topk": 0.1}])}
        options |= {"state_dtype": "fp32" if "rule" in options else self.state_dtype()}
        for optimizer, params in zip((self.file, self.ram), zip(*new, strict=True), strict=True):
            optimizer.add_param_group({"params": params, **options})
        self.pairs += new

    def edit_state(self):
        if known := [(p, q) for p, q in self.pairs if p in self.file.state]:
            p, q = self.choose.choice(known)
            for name in self.of.rule.sections_for(self.file.param_groups[0])[1:2]:
                if name in self.file.state[p]:
                    value = torch.rand_like(self.file.state[p][name])
                    self.file.state[p][name].copy_(value)
                    self.ram.state[q][name].copy_(value)

    def load(self):
        state = copy.deepcopy(self.ram.state_dict())
        self.file.load_state_dict(copy.deepcopy(state))
        self.ram.load_state_dict(state)

    def write_parameter(self):
        with torch.no_grad():
            for p in self.choose.choice(self.pairs):
                p.mul_(1.5)

    def set_topk(self):
        share, feedback = self.choose.choice([None, 0.01, 0.3, 1.0]), self.choose.random() < 0.7
        for optimizer in (self.file, self.ram):
            optimizer.param_groups[0]["topk"], optimizer.error_feedback = share, feedback

    def look(self):
        for p, q in self.pairs:
            assert torch.equal(p, q)
            ours, theirs = self.file.state.get(p, {}), self.ram.state.get(q, {})
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():
                # In memory, a parameter is its own master, so one written since the last step already differs.
                if key != "master" or torch.equal(value.to(p.dtype), p):
                    assert torch.equal(value, theirs[key]), key


# Cards differ only in how bytes are moved: a quarter of the histories covers that.
SOAK = [pytest.mark.soak] if on_cards() else []
SEEDS = [pytest.param(seed, ADAMW, id=str(seed), marks=SOAK if seed >= 10 else []) for seed in range(40)]
OTHERS = [
    pytest.param(seed, *of.values, id=f"{of.id} {seed}", marks=[*of.marks, *(SOAK if seed else [])])
    for of in rules([*FULL, SGD, MIXED, MUON, RMSPROP, *CODED, MUON_IN_8_BITS])
    for seed in range(3)
]


@pytest.mark.cards
@pytest.mark.parametrize(("seed", "of"), SEEDS + OTHERS)
def test_random_history(tmp_path, seed, of):
    choose = random.Random(seed)
    torch.manual_seed(seed)
    twins = Twins(choose, tmp_path, of)
    for _ in range(choose.randint(2, 12)):
        for happens in (twins.join, twins.edit_state, twins.load, twins.write_parameter, twins.set_topk, twins.look):
            if choose.random() < 0.15:
                happens()
        twins.step()
    twins.look()
    twins.file.close()
    for store in tmp_path.glob(f"*/{FILE_NAME}"):
        check_sums(store)


def check_sums(store: Path):
    contents, data = read_contents(store), store.read_bytes()
    rows = zip(contents.tiles, chain.from_iterable(contents.sums), strict=True)
    for extent in contents.manifest["extents"]:
        sections, elems, each = sections_of(extent), extent["tile_elems"], extent["sum_elems"]
        for j in range(extent["tiles"]):
            row, held = next(rows)
            at = extent["file_offset"] + (2 * j + int(row["slot"])) * size_of(sections)
            sums = [
                [crc32c(data[at + s.at(first) : at + s.at(min(first + each, elems))]) for s in sections]
                for first in range(0, elems, each)
            ]
            assert not row["summed"] or sums == held.tolist()
