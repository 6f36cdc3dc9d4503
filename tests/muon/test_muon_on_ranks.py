"""Muon where ranks divide the matrices: each is made whole on one of them. Oracle: one process, to the last bit."""

import contextlib
import os
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.comparing import assert_same
from support.divided import DENSE, KINDS, DividedTraining, noise, twin
from support.ranks import KILLED, on_living_ranks, on_ranks
from torch.distributed.tensor import Shard, distribute_tensor

from csd_optim import CSDError, CSDMuon, CSDRankError, CSDValueError
from csd_optim.muon.schedule import LEAST_TILES
from csd_optim.step import two_passes, whole_matrices

KINDS["matrices"] = {**DENSE, "square": (40, 40), "tall": (90, 20), "experts": (6, 8, 10)}
DIVISIONS = [("ddp", 2), ("ddp", 3), ("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4), ("none", 2)]


@contextlib.contextmanager
def small_groups():
    """Groups of few matrices, so that there are several, with other roots."""
    with mock.patch.object(two_passes, "TILE_ELEMS", 1000 // LEAST_TILES):
        yield


def compares(rank, size, kind, division, devices, image, last, rule):
    with small_groups():
        training = DividedTraining(kind, division, rank, size, devices, rule).until(last)
        with training.opt:
            assert_same(training.image(), training.of_twin(image))
            return training.opt.stats()["ns_dtype"]


@pytest.mark.parametrize("devices", ["ram:", "file:"])
@pytest.mark.parametrize(("division", "size"), DIVISIONS)
def test_equals_one_process(tmp_path, division, size, devices):
    image = twin("matrices", 4, "Muon")
    on_living_ranks(size, compares, size, "matrices", division, devices, image, 4, "Muon", directory=tmp_path)


@pytest.mark.parametrize(
    ("division", "size", "devices"), [("ddp", 3, "ram:"), ("fsdp2", 2, "file:"), ("hsdp", 4, "file:")]
)
def test_8_bits_equal_one_process_where_ranks_have_whole_groups(tmp_path, division, size, devices):
    image = twin("aligned", 4, "8bit Muon")
    on_living_ranks(size, compares, size, "aligned", division, devices, image, 4, "8bit Muon", directory=tmp_path)


def trains(rank, size, division, devices):
    with small_groups():
        training = DividedTraining("matrices", division, rank, size, devices, "8bit Muon").until(3)
        with training.opt:
            return all(bool(value.isfinite().all()) for value in training.image().values())


def test_8_bits_train_where_ranks_cut_groups(tmp_path):
    """With other bits than one process has: groups, whose elements share an exponent, are others then."""
    assert all(on_living_ranks(3, trains, 3, "fsdp2", "file:", directory=tmp_path))


@contextlib.contextmanager
def failing(rank, at, what):
    """Fail in the orthogonalization, in the wait for X, or as X is got ready to be sent, of this number on rank 1."""
    owner, name = {
        "orthogonalization": (two_passes.Orthogonal, "of"),
        "first pass": (two_passes.TwoPasses, "_await"),
        "begin": (two_passes.TwoPasses, "tables"),
        "sending": (whole_matrices, "_bytes"),
    }[what]
    real, calls = getattr(owner, name), 0

    def fails(*arguments):
        nonlocal calls
        calls += 1
        if rank == 1 and calls == at:
            raise torch.OutOfMemoryError("no room")
        return real(*arguments)

    with mock.patch.object(owner, name, fails):
        yield


def fails(rank, size, division, at, what, images):
    with small_groups():
        training = DividedTraining("matrices", division, rank, size, "file:", "Muon").until(2)
        with training.opt:
            expected = torch.OutOfMemoryError if rank == 1 else CSDRankError
            with failing(rank, at, what), pytest.raises(expected, match="no room"):
                training.until(3)
            assert_same(training.image(), training.of_twin(images[2]))
            training.until(4)
            assert_same(training.image(), training.of_twin(images[4]))


@pytest.mark.parametrize(
    ("division", "size", "what", "at"),
    [
        ("ddp", 2, "orthogonalization", 1),
        ("ddp", 2, "orthogonalization", 2),
        ("ddp", 2, "first pass", 2),
        ("ddp", 2, "begin", 1),
        ("ddp", 2, "sending", 3),
        ("fsdp2", 3, "orthogonalization", 1),
        ("fsdp2", 3, "first pass", 2),
        ("fsdp2", 3, "begin", 1),
        ("hsdp", 4, "orthogonalization", 1),
    ],
)
def test_a_failure_on_one_rank_undoes_all(tmp_path, division, size, what, at):
    images = {step: twin("matrices", step, "Muon") for step in (2, 4)}
    on_living_ranks(size, fails, size, division, at, what, images, directory=tmp_path)


def dies(rank, size):
    with small_groups():
        training = DividedTraining("matrices", "ddp", rank, size, "file:", "Muon").until(1)
        real = whole_matrices.WholeMatrices.collect

        def collect(exchange, k, rows):
            if rank == 1 and k == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(exchange, k, rows)

        with mock.patch.object(whole_matrices.WholeMatrices, "collect", collect), pytest.raises(CSDError):
            training.until(2)


def test_a_rank_that_dies_hangs_nobody(tmp_path):
    assert on_ranks(2, dies, 2, directory=tmp_path, may_die=(1,)) == [None, KILLED]


def unlike(rank, size):
    training = DividedTraining("matrices", "fsdp2", rank, size, "file:", "Muon").until(1)
    for name, p in training.model.items():
        p.grad = None if rank and name == "square" else torch.zeros_like(p)
    with training.opt, pytest.raises(CSDRankError, match="gradients of different parameters"):
        training.opt.step()


def test_gradients_of_different_matrices_are_refused(tmp_path):
    on_living_ranks(2, unlike, 2, directory=tmp_path)


def steps_of(divide, has_gradients):
    """Two steps of whole matrices, the first ones, and of others to which `divide` is applied. Returns all of them."""
    whole = [torch.nn.Parameter(noise((40, 40), f"whole {k}")) for k in range(3)]
    divided = [torch.nn.Parameter(divide(noise((40, 40), f"divided {k}"))) for k in range(3)]
    with CSDMuon(whole + divided, lr=0.02, devices="file:", tile_size=1024, sharded=False) as opt:
        for step in range(2):
            for k, p in enumerate(whole):
                p.grad = noise((40, 40), f"{k} {step}") if has_gradients(k) else None
            for k, p in enumerate(divided):
                p.grad = divide(noise((40, 40), f"divided {k} {step}"))
            opt.step()
    return [p.detach() for p in whole], [p.detach() for p in divided]


def beside_whole_ones(rank, size):
    with small_groups():
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
        whole, divided = steps_of(lambda t: distribute_tensor(t, mesh, [Shard(0)]), lambda k: k < 2 or rank == 0)
        return whole, [p.full_tensor() for p in divided]


def test_whole_matrices_beside_divided_ones_may_differ(tmp_path):
    """With sharded=False they are each rank's own, and not all ranks need gradients of them."""
    for rank, found in enumerate(on_living_ranks(2, beside_whole_ones, 2, directory=tmp_path)):
        expected = steps_of(lambda t: t, lambda k, rank=rank: k < 2 or rank == 0)
        for mine, alone in zip(found, expected, strict=True):
            assert all(map(torch.equal, mine, alone))


def names_no_rule(rank, size):
    training = DividedTraining("matrices", "ddp", rank, size, "file:", "Muon").until(1)
    with training.opt as opt:
        kept = [group.get("rule") for group in opt.param_groups]
        if rank == 1:
            opt.param_groups[0]["rule"] = "moun"
        with pytest.raises(CSDValueError if rank == 1 else CSDRankError, match="'moun'"):
            training.until(2)
        for group, rule in zip(opt.param_groups, kept, strict=True):
            group.pop("rule", None) if rule is None else group.update(rule=rule)
        training.until(2)


def test_a_rule_that_is_none_on_one_rank_is_told_to_all(tmp_path):
    on_living_ranks(2, names_no_rule, 2, directory=tmp_path)


def columns(rank, size):
    with pytest.raises(CSDValueError, match="otherwise than by rows"):
        DividedTraining("odd", "columns", rank, size, "file:", "Muon")


def test_tensor_parallelism_is_refused(tmp_path):
    on_living_ranks(2, columns, 2, directory=tmp_path)


def overlaps(rank, size, division, image):
    with small_groups():
        training = DividedTraining("matrices", division, rank, size, "file:", "Muon")
        with training.opt as opt:
            opt.overlap(training.model)
            training.until(4)
            opt.wait()
            assert_same(training.image(), training.of_twin(image))
            assert isinstance(opt, CSDMuon)


@pytest.mark.parametrize(("division", "size"), [("fsdp2", 2)])
def test_with_overlap_steps_with_divided_matrices_end_in_step(tmp_path, division, size):
    on_living_ranks(size, overlaps, size, division, twin("matrices", 4, "Muon"), directory=tmp_path)
