"""Groups may hold what is the program's alone, of any type: a store with it resumes, and what fits is restored."""

import copy
import itertools
import json
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from csd_optim import CSDAdam
from csd_optim.params.groups import hyperparameters_of, restore_hyperparameters

Pair = namedtuple("Pair", "a b")

with torch.inference_mode():
    OF_INFERENCE = torch.arange(3.0)

HELD = {
    "number": 3,
    "text": "rows",
    "None": None,
    "nan": float("nan"),
    "tensor of one element": torch.tensor(2.0),
    "tensor of several": torch.arange(3.0),
    "matrix": torch.ones(2, 2),
    "empty": torch.empty(0),
    "empty rows": torch.empty(0, 3),
    "bool": torch.tensor([True, False]),
    "complex": torch.ones(2, dtype=torch.complex64),
    "large": torch.zeros(5000),
    "on meta": torch.empty(3, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
    "parameter": Parameter(torch.ones(3)),
    "expanded": torch.ones(1).expand(3),
    "of inference mode": OF_INFERENCE,
    "tuple": (1, 2),
    "longer tuple": (1, 2, 3),
    "named tuple": Pair(1, 2),
    "nested tuple": ((1, 2), (3, 4)),
    "tuple with a tensor": (torch.ones(2), 1),
    "list": [1, 2],
    "list with tensors": [torch.ones(2), 1],
    "array": np.arange(3),
    "array without dimensions": np.array(1.0),
    "array of texts": np.array(["a", "b"]),
    "dict": {"a": 1},
    "object": object(),
    "type": torch.float16,
}
PLAIN = ("number", "text", "None", "nan")


@pytest.mark.parametrize("then", HELD)
def test_a_value_is_restored_or_stays(then):
    stored = json.loads(json.dumps(hyperparameters_of({"lr": 0.1, "extra": HELD[then], 5: 1})))
    assert "5" not in stored
    for now, value in HELD.items():
        group = {"lr": 0.1, "extra": copy.copy(value)}
        restore_hyperparameters(group, stored)
        held = group["extra"]
        # A plain value takes the place of another one.
        assert type(held) is type(value) or (now in PLAIN and isinstance(held, (int, float, str, type(None)))), now
        assert getattr(held, "shape", None) == getattr(value, "shape", None), now


FITTING = [
    (torch.arange(3.0), torch.zeros(3)),
    (torch.tensor(2.0), torch.zeros(1)),
    (torch.tensor([True, False]), torch.tensor([False, False])),
    (torch.tensor([[1, 2], [3, 4]]), torch.zeros(2, 2, dtype=torch.int64)),
    (np.arange(3), np.zeros(3, int)),
    ((1, torch.ones(2)), (0, torch.zeros(2))),
    ([1, 2, 3], []),
    ([(1, 2), (3, 4)], [(0, 0), (0, 0)]),
    (7, 5),
    (None, 5),
]


def test_what_fits_is_restored_in_place():
    for then, now in FITTING:
        group = {"lr": 0.1, "extra": now}
        restore_hyperparameters(group, json.loads(json.dumps(hyperparameters_of({"extra": then}))))
        held = group["extra"]
        for a, b in itertools.zip_longest(*(v if isinstance(v, (tuple, list)) else [v] for v in (held, then))):
            assert np.array_equal(np.ravel(a), np.ravel(b)), (then, now)
        if isinstance(now, (torch.Tensor, np.ndarray)):
            assert held is now
    group = {"lr": 0.1, "extra": torch.ones(1).expand(3)}
    restore_hyperparameters(group, {"extra": [5, 6, 7]})  # in place, all three are one number
    assert group["extra"].tolist() == [5, 6, 7]


@pytest.mark.parametrize(
    ("then", "now"), [("tensor of several", "tensor of several"), ("None", "bool"), ("tuple", "longer tuple")]
)
def test_a_store_resumes_whatever_the_group_holds(tmp_path, then, now):
    for resume, value in enumerate((HELD[then], HELD[now])):
        p = Parameter(torch.ones(10))
        with CSDAdam([{"params": [p], "extra": value}], devices=str(tmp_path), resume=bool(resume)) as opt:
            assert opt.param_groups[0]["extra"] is value
            assert opt.committed_step == resume
            p.grad = torch.ones(10)
            opt.step()


@pytest.mark.filterwarnings("ignore:lr of group 0 goes on as")
def test_a_rate_in_an_array_is_taken_on_directories_too(tmp_path):
    for resume, rate in ((False, np.array(0.01)), (True, np.array(1.0))):
        p = Parameter(torch.ones(10))
        with CSDAdam([p], lr=rate, devices=str(tmp_path), resume=resume) as opt:
            assert opt.param_groups[0]["lr"] is rate
            assert rate == 0.01
            p.grad = torch.ones(10)
            opt.step()
