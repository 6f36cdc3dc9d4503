"""A forged store with right checksums is refused: no reader crashes, hangs or raises another error."""

import random
import warnings

import pytest
import torch
from support.forged import Forged

from csd_optim import CSDAdam, CSDError, CSDStoreError
from csd_optim.checkpoint.state_dict import about_of
from csd_optim.checkpoint.verify import verify
from csd_optim.cli.facts import describe_store
from csd_optim.params import groups
from csd_optim.step import initial_groups
from csd_optim.store.check import MAX_SIZE
from csd_optim.store.format import FILE_NAME, PAGE, Superblock, read_commits, unpack
from csd_optim.store.layout import extents_of
from csd_optim.store.reader import residuals_of, tiles_of


def optimizer(directory, **options):
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((80, 60), (7,), (40, 3))]
    groups = [{"params": params[:2]}, {"params": params[2:], "amsgrad": True}]
    devices = [f"file:{directory}/csd{d}?share={share}" for d, share in enumerate((1.0, 0.5))]
    return params, CSDAdam(groups, devices=devices, tile_size=1024, topk=0.1, **options)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The files of a store on two devices."""
    place = tmp_path_factory.mktemp("hostile")
    params, opt = optimizer(place)
    with opt:
        for step in range(2):
            for p in params[: 2 + step]:
                p.grad = torch.randn_like(p)
            opt.user_state = {"step": step}
            opt.step()
    return [(place / f"csd{d}" / FILE_NAME).read_bytes() for d in range(2)]


@pytest.mark.fp32_states("spoils what is said of fp32 states; of codes: test_codes.py")
def test_what_cannot_be_is_refused(stores):
    refused, whole = 0, []
    for data in stores:
        block = Superblock.unpack(data[:PAGE], "")
        parts = [data[r.base : r.base + r.size] for r in (block.manifest, block.table)]
        whole.append(unpack("store", 0, block, *parts, len(data)))
    for seed in range(12_000):
        choose = random.Random(seed)
        d = choose.randrange(2)
        forged = Forged(stores[d], choose)
        try:
            block = Superblock.unpack(forged.block.pack(), "store")
            contents = unpack("store", 0, block, forged.manifest, forged.table, len(forged.data))
            assert contents.end <= MAX_SIZE
            for place in (*tiles_of([contents]), *residuals_of([contents])):
                assert 2 * PAGE <= place.offset <= place.offset + place.size <= len(forged.data)
            about_of(contents)
            held = [*whole]
            held[d] = contents
            extents_of(held)
        except CSDStoreError:
            refused += 1
        except Exception as e:
            raise AssertionError(f"seed {seed}, {forged.what.__name__}: {e!r}") from e
    assert 6000 < refused < 12_000


@pytest.mark.ci
def test_no_reader_fails_otherwise(stores, tmp_path):
    """The same, with files, through everything that opens a store."""
    warnings.simplefilter("ignore")
    opened = 0
    wrong = {}
    for seed in range(100):
        choose = random.Random(-seed)
        place = tmp_path / str(seed)
        for d, data in enumerate(stores):
            (place / f"csd{d}").mkdir(parents=True)
            Forged(data, choose).write(place / f"csd{d}" / FILE_NAME) if choose.random() < 0.7 else (
                place / f"csd{d}" / FILE_NAME
            ).write_bytes(data)
        devices = [place / f"csd{d}" for d in range(2)]
        for reader in (describe_store, verify, CSDAdam.load, None):
            try:
                if reader is None:
                    optimizer(place, resume=True)[1].close()
                else:
                    reader(devices[0] if reader is describe_store else devices)
                opened += 1
            except CSDError:
                pass
            except Exception as e:
                wrong.setdefault(repr(e), (seed, reader))
    assert not wrong, wrong
    assert opened > 50


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a": 1, "a": 1}', b"", b"null", b"NaN", b"\xff", b"1" * 6000])
def test_json_that_is_no_manifest(text, stores, tmp_path):
    forged = Forged(stores[0], random.Random(1))
    forged.what, forged.block = forged._text, Superblock.unpack(stores[0][:PAGE], "")
    forged.manifest = text
    forged.block = forged._place("manifest", text, forged.block)
    forged.write(tmp_path / FILE_NAME)
    with open(tmp_path / FILE_NAME) as file, pytest.raises(CSDStoreError, match=FILE_NAME):
        read_commits(file.fileno(), str(tmp_path / FILE_NAME))


@pytest.mark.parametrize(
    "values",
    [
        {"lr": torch.tensor([1e-3])},
        {"lr": 1, "weight_decay": True},
        {"weight_decay": False, "eps": 1},
        {"maximize": 0, "amsgrad": 1},
    ],
)
def test_what_a_program_may_say_is_not_refused(values, tmp_path):
    for step in range(3):
        p = torch.nn.Parameter(torch.ones(7))
        with CSDAdam([p], devices=[f"file:{tmp_path / 'csd0'}"], resume=step > 0, **values) as opt:
            assert opt.committed_step == step
            p.grad = torch.ones(7)
            opt.step()


def test_a_learning_rate_in_a_list_goes_on_as_a_number(tmp_path, monkeypatch):
    """Stores have such a list if lr was a tensor with one element."""
    of_group = groups.hyperparameters_of

    def as_then(group, needed=()):
        return of_group(group, needed) | {k: v.tolist() for k, v in group.items() if isinstance(v, torch.Tensor)}

    monkeypatch.setattr(initial_groups, "hyperparameters_of", as_then)
    for lr in (torch.tensor([0.5]), 0.5, torch.tensor([0.25])):
        p = torch.nn.Parameter(torch.ones(7))
        resume = (tmp_path / "csd0").exists()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that the store's lr takes precedence
            opt = CSDAdam([p], devices=[f"file:{tmp_path / 'csd0'}"], resume=resume, lr=lr)
        with opt:
            assert float(opt.param_groups[0]["lr"]) == 0.5
            p.grad = torch.ones(7)
            opt.step()


def test_a_copy_that_is_cut_off_leaves_the_other(tmp_path):
    for resume in (False, True):
        p = torch.nn.Parameter(torch.ones(7))
        with CSDAdam([p], devices=[f"file:{tmp_path / 'csd0'}"], resume=resume) as opt:
            assert opt.committed_step == resume
            p.grad = torch.ones(7)
            opt.step()
        file = tmp_path / "csd0" / FILE_NAME
        with open(file, "rb+") as f:
            block = Superblock.unpack(f.read(PAGE), "")
            last = max(block.manifest, block.table)
            assert last.offset(2) == file.stat().st_size
            f.truncate(last.offset(1))
        (verdict,) = verify([file.parent])
        (damage,) = verdict.damage
        assert "copy 1" in damage
        assert "resume=True repairs" in damage


def test_shares_as_unequal_as_they_may_be(tmp_path):
    shares = [0.001] + 8 * [1000]
    devices = [f"file:{tmp_path}/csd{d}?share={share}" for d, share in enumerate(shares)]
    for step in range(2):
        p = torch.nn.Parameter(torch.ones(50_000))
        with CSDAdam([p], devices=devices, tile_size=1024, resume=step > 0) as opt:
            assert opt.committed_step == step
            p.grad = torch.ones(50_000)
            opt.step()
    assert not any(verdict.damage for verdict in verify([tmp_path / f"csd{d}" for d in range(9)]))
