"""csd-optim import STORE: makes a store of fp32 states from one of 8-bit states, and the other way round."""

import json
import os
import signal
import warnings

import pytest
import torch
from support.beside import everything
from support.codes import ALL, made
from support.comparing import assert_same
from support.forked import printed, python
from support.stores import flip
from support.training import train

from csd_optim import CSDSGD, CSDAdam, CSDOSError, CSDStoreError, CSDStoreExistsError, CSDValueError
from csd_optim.checkpoint.export import export_torch
from csd_optim.checkpoint.importing import import_store
from csd_optim.checkpoint.verify import verify
from csd_optim.engine.commit.durable import DurableCommitter
from csd_optim.store.format import FILE_NAME
from csd_optim.store.report import REPORT_NAME

pytestmark = pytest.mark.at_hand("import writes to windows")

TILE = 4096
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.complex64]


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(90, 70), (64,), (3,), (), (0, 4), (5000,)]
    params = [torch.randn(shape, generator=generator).to(dtype) for dtype in DTYPES for shape in shapes]
    params.append(torch.randn(2, 3, 20, 20, generator=generator).to(memory_format=torch.channels_last))
    return [torch.nn.Parameter(p) for p in params]


def adam(params, devices, state_dtype, **options):
    groups = [{"params": params[::2], "lr": 0.02}, {"params": params[1::2]}]
    return CSDAdam(groups, devices=devices, lr=1e-2, tile_size=TILE, state_dtype=state_dtype, **options)


def resumed(place, state_dtype, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return adam(parameters(seed=1), place, state_dtype, resume=True, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True}, {"topk": 0.05}, {"decoupled_weight_decay": False}],
    ids=lambda o: ",".join(o) or "plain",
)
@pytest.mark.parametrize(("made", "wanted"), [("8bit", "fp32"), ("fp32", "8bit")])
def test_goes_on_as_if_it_had_been_loaded(made, wanted, options, tmp_path, run):
    old, new = [str(tmp_path / "a"), str(tmp_path / "b")], [str(tmp_path / name) for name in "cde"]
    params = parameters()
    with train(adam(params, old, made, **options), 3) as opt:
        opt.user_state = {"epoch": 4}
        train(opt, 1, 3)
        twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = adam(twins, "ram:", wanted, **options)
        other.load_state_dict(opt.state_dict())
    before = [(tmp_path / name / FILE_NAME).read_bytes() for name in "ab"]
    code, out, err = run("import", ",".join(old), *new, "--state-dtype", wanted, "--tile-size", "4096")
    assert (code, err) == (0, "")
    assert f"on 3 devices, in {wanted}; continue with resume=True" in out
    assert [(tmp_path / name / FILE_NAME).read_bytes() for name in "ab"] == before
    assert not any(v.damage or v.unchecked for v in verify(new))
    with resumed(new, wanted, **options) as again:
        assert again.user_state == {"epoch": 4}
        assert [group["lr"] for group in again.param_groups] == [0.02, 0.01]
        for a, b in zip(everything(again), everything(other), strict=True):
            # A master close to a tie is not exact before the next step.
            assert torch.equal(a, b) or (a - b).abs().max() <= 2**-14 * b.abs().max()
        if "topk" not in options:  # Top-K selects within tiles, which are different here
            assert_same(everything(train(again, 2, 4)), everything(train(other, 2, 4)))
    assert {*os.listdir(tmp_path)} == {*"abcde"}
    assert all({*os.listdir(place)} == {FILE_NAME, REPORT_NAME} for place in new)


def test_states_that_are_mixed(tmp_path):
    """All states get the requested dtype; states of this dtype keep their bits."""
    params = parameters()
    groups = [{"params": params[::2], "state_dtype": "fp32"}, {"params": params[1::2]}]
    with train(CSDAdam(groups, devices=tmp_path / "a", tile_size=TILE, state_dtype="8bit"), 2) as opt:
        want = [opt.state[p]["exp_avg"].clone() for p in params]
        masters = [opt.state[p]["master"].clone() for p in params]
    import_store(tmp_path / "a", [tmp_path / "fp32"], TILE, state_dtype="fp32")
    import_store(tmp_path / "a", [tmp_path / "8bit"], TILE, state_dtype="8bit")
    for state_dtype in ("fp32", "8bit"):
        again = parameters(seed=1)
        opt = CSDAdam(
            [{"params": again[::2]}, {"params": again[1::2]}],
            devices=tmp_path / state_dtype,
            state_dtype=state_dtype,
            resume=True,
        )
        which = slice(None) if state_dtype == "fp32" else slice(1, None, 2)
        assert_same([opt.state[p]["exp_avg"] for p in again[which]], want[which])
        assert_same([opt.state[p]["master"] for p in again[which]], masters[which])
        assert_same([p.detach() for p in again], [p.detach() for p in params])
        opt.close()


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_a_store_is_imported_as_it_is(state_dtype, tmp_path, run):
    """Onto another number of devices, without a state_dtype."""
    with train(adam(parameters(), [str(tmp_path / name) for name in "ab"], state_dtype), 3) as opt:
        want = everything(opt)
    code, out, err = run("import", f"{tmp_path / 'a'},{tmp_path / 'b'}", tmp_path / "c", "--tile-size", "4096")
    assert (code, err) == (0, "")
    assert "on 1 device; continue with resume=True" in out
    with resumed(tmp_path / "c", state_dtype) as again:
        assert_same(everything(again), want)


@pytest.mark.parametrize(("made", "wanted"), [("8bit", "fp32"), ("fp32", "8bit")])
def test_an_export_with_another_state_dtype(made, wanted, tmp_path):
    """The same store as from the store itself."""
    with train(adam(parameters(), tmp_path / "a", made), 3):
        pass
    export_torch(tmp_path / "a", tmp_path / "out.pt")
    stores = []
    for name, source in (("b", "a"), ("c", "out.pt")):
        import_store(tmp_path / source, [tmp_path / name], TILE, state_dtype=wanted)
        with resumed(tmp_path / name, wanted) as opt:
            stores.append(everything(opt))
    assert_same(*stores)


def test_what_8_bits_cannot_hold_is_counted(tmp_path, run):
    p = torch.nn.Parameter(torch.ones(100))
    with CSDAdam([p], devices=tmp_path / "a", state_dtype="fp32") as opt:
        p.grad = torch.ones(100)
        opt.step()
        opt.state[p]["exp_avg"][:50] = 20.0
        opt.state[p]["exp_avg_sq"].fill_(1.0)
        p.grad = None
    code, out, err = run("import", tmp_path / "a", tmp_path / "b", "--state-dtype", "8bit", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["clipped"] == 50
    assert CSDAdam.load(tmp_path / "b")["state"][0]["exp_avg"].tolist()[:50] == [15.5] * 50


# ---- refused -------------------------------------------------------------------------------


def test_a_damaged_store_is_refused(tmp_path, run):
    with train(adam(parameters(), [str(tmp_path / "a")], "fp32"), 2):
        pass
    flip(tmp_path / "a", "exp_avg", tile=1)
    code, _, err = run("import", tmp_path / "a", tmp_path / "b", "--state-dtype", "8bit")
    assert code == 1
    assert "exp_avg of tile 1 is damaged" in err
    assert not (tmp_path / "b" / FILE_NAME).exists()


def test_nothing_is_overwritten(tmp_path):
    for name in "ab":
        with train(adam(parameters(), [str(tmp_path / name)], "fp32"), 1):
            pass
    before = (tmp_path / "b" / FILE_NAME).read_bytes()
    for place in ("b", "a"):
        with pytest.raises(CSDStoreExistsError, match="holds a store of step 1"):
            import_store(tmp_path / "a", [tmp_path / "c", tmp_path / place], state_dtype="8bit")
    assert (tmp_path / "b" / FILE_NAME).read_bytes() == before
    assert not (tmp_path / "c" / FILE_NAME).exists()


def test_what_cannot_be_imported(tmp_path, run):
    with train(adam(parameters(), [str(tmp_path / "a")], "8bit"), 1):
        pass
    with pytest.raises(CSDValueError, match="ram: keeps nothing"):
        import_store(tmp_path / "a", ["ram:"], state_dtype="fp32")
    with pytest.raises(CSDOSError, match=r"cannot read .*none: No such file"):
        import_store(tmp_path / "none", [tmp_path / "b"], state_dtype="fp32")
    code, _, err = run("import", tmp_path / "a", tmp_path / "b", "--state-dtype", "int8")
    assert code == 1
    assert "Invalid state_dtype: 'int8'; it is 'fp32' or '8bit'" in err
    assert not (tmp_path / "b" / FILE_NAME).exists()


def test_what_cannot_be_kept_is_refused_before_it_is_read(tmp_path, monkeypatch):
    with train(CSDSGD(parameters(), momentum=0.9, devices=str(tmp_path / "a"), tile_size=TILE), 1):
        pass
    monkeypatch.setattr(DurableCommitter, "check_recovered", lambda *_: pytest.fail("the store is read"))
    with pytest.raises(
        CSDValueError, match=r"states of .*a/csd_optim.store stay fp32: those of sgd are momentum_buffer"
    ):
        import_store(tmp_path / "a", [tmp_path / "b"], state_dtype="8bit")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CSDStoreError, match="is neither a store nor an export of one"):
        import_store(tmp_path / "empty", [tmp_path / "b"])


def test_stores_of_ranks_are_refused(tmp_path, run, monkeypatch):
    """Both a single rank's store and the stores of all ranks."""
    monkeypatch.setitem(ALL, torch.bfloat16, {"weight": (90, 110)})
    ranks = [tmp_path / f"rank{r}" for r in range(2)]
    for r, place in enumerate(ranks):
        made([place], [torch.bfloat16], rank=r)
    before = [(place / FILE_NAME).read_bytes() for place in ranks]
    code, _, err = run("import", ranks[0], tmp_path / "new", "--state-dtype", "fp32")
    assert code == 1
    assert "is one of 2 ranks: export the stores of all, and import that" in " ".join(err.split())
    with pytest.raises(CSDStoreError, match="ranks"):
        import_store(",".join(map(str, ranks)), [tmp_path / "new"])
    assert not (tmp_path / "new" / FILE_NAME).exists()
    assert [(place / FILE_NAME).read_bytes() for place in ranks] == before


KILLED = """
import os, signal, sys
from csd_optim.checkpoint.export import export_torch
from csd_optim.checkpoint.importing import import_store
from csd_optim.engine.commit.durable import DurableCommitter
from csd_optim.engine.engine import Engine
name, skipped = sys.argv[3], int(sys.argv[4])
owner = DurableCommitter if name == "describe" else Engine
was = getattr(owner, name)

def dies(self, *args, **options):
    global skipped
    if self.states.mode == "new":
        skipped -= 1
        if skipped < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return was(self, *args, **options)

setattr(owner, name, dies)
import_store(sys.argv[1], [sys.argv[2]], 4096, state_dtype=sys.argv[5])
"""


@pytest.mark.ci
@pytest.mark.parametrize(("made", "wanted"), [("8bit", "fp32"), ("fp32", "8bit")])
@pytest.mark.parametrize(("method", "skipped"), [("extend", 0), ("extend", 1), ("describe", 0), ("close", 0)])
def test_killed_in_the_middle_it_leaves_nothing_that_resumes(made, wanted, method, skipped, tmp_path):
    with train(adam(parameters(), [str(tmp_path / "a")], made), 1):
        pass
    done = python(KILLED, tmp_path / "a", tmp_path / "b", method, skipped, wanted)
    assert done.returncode in (0, 128 + signal.SIGKILL), done.stderr
    if done.returncode == 0:
        pytest.skip("never came there")
    with pytest.warns(UserWarning, match="there is no store"), adam(parameters(), tmp_path / "b", wanted, resume=True):
        pass
    (tmp_path / "b" / FILE_NAME).unlink(missing_ok=True)  # import never overwrites, not even an incomplete store
    import_store(tmp_path / "a", [tmp_path / "b"], TILE, state_dtype=wanted)
    with resumed(tmp_path / "b", wanted) as opt:
        train(opt, 1, 1)


WATCHED = """
import sys, threading
from csd_optim.checkpoint.export import export_torch
from csd_optim.checkpoint.importing import import_store

def anonymous():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))

done, most, before = threading.Event(), [0], anonymous()
def watch():
    while not done.wait(0.002):
        most.append(anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
import_store(sys.argv[1], [sys.argv[2]], state_dtype=sys.argv[3])
done.set()
watcher.join()
print(max(most) - before)
"""


@pytest.mark.ci
def test_it_takes_little_memory(tmp_path):
    """24 M parameters have 0.29 GB of fp32 states; they are mapped from files, so the system can drop their pages."""
    p = torch.nn.Parameter(torch.zeros(24 << 20, dtype=torch.bfloat16))
    with CSDAdam([p], devices=tmp_path / "a", state_dtype="8bit") as opt:
        p.grad = torch.ones_like(p)
        opt.step()
        expected = opt.state[p]["exp_avg"].clone()
    for source, place, wanted in (("a", "b", "fp32"), ("b", "c", "8bit")):
        assert 0 < int(printed(WATCHED, tmp_path / source, tmp_path / place, wanted)) < 192 << 20
    with CSDAdam([p], devices=tmp_path / "c", state_dtype="8bit", resume=True) as opt:
        assert torch.equal(opt.state[p]["exp_avg"], expected)
