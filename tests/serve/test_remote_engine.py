"""The ordinary optimizer on an owner's engine has the bits of directories, in whatever it can do."""

import copy
import threading

import pytest
import torch
from support.nets import MODES, Net, assert_equal, own
from support.optimizers import CODED, MUON, MUON_IN_8_BITS, PAIRS
from support.owner_here import OwnerHere, OwnersHere
from support.training import Training, resumed
from support.wires import files

from csd_optim import CSDAdam, CSDRankError, CSDStoreExistsError, CSDUnavailableError, CSDValueError
from csd_optim.devices.spec import parse_devices
from csd_optim.serve.owner import ownership
from csd_optim.serve.wire.keys import Role
from csd_optim.step import staging

__all__ = ["files"]  # a fixture

STEPS = 5  # late parameters and a group join before that


@pytest.fixture(params=[1, 2], ids=["", "two owners"])
def owner(tmp_path, request):
    with OwnerHere(tmp_path / "owner") if request.param == 1 else OwnersHere(tmp_path / "owners") as there:
        yield there


def assert_alike(a, b):
    here, there = a.image(), b.image()
    assert here.keys() == there.keys()
    assert [key for key, value in here.items() if value != there[key]] == []


@pytest.mark.parametrize("of", [*PAIRS, MUON, *CODED, MUON_IN_8_BITS], ids=str)
def test_every_rule_has_the_bits_of_directories_and_is_resumed(owner, tmp_path, of):
    ours, served = Training(own(tmp_path), of=of).steps(STEPS), Training(owner.address, of=of).steps(STEPS)
    assert_alike(ours, served)
    served.opt.close()
    served = resumed(owner.address, STEPS, of=of)  # what the owner has in memory
    assert served.opt.committed_step == served.done == STEPS
    ours.step()
    served.step()
    assert_alike(ours, served)
    served.opt.close()
    owner.stop()
    owner.start()
    served = resumed(owner.address, STEPS + 1, of=of)  # and in its store
    assert_alike(ours.steps(2), served.steps(2))


@pytest.mark.parametrize(
    "options",
    [{"topk": 0.1}, {"state_dtype": "8bit"}, {"max_grad_norm": 0.5}, {"grad_dtype": torch.bfloat16}],
    ids=lambda options: next(iter(options)),
)
def test_options_have_the_bits_of_directories(owner, tmp_path, options):
    ours, served = Training(own(tmp_path), **options), Training(owner.address, **options)
    assert_alike(ours.steps(STEPS), served.steps(STEPS))
    stats = served.opt.stats()
    assert stats["params"] == ours.opt.stats()["params"]
    assert stats["flash_write_bytes"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_overlap_has_the_bits_of_directories(owner, tmp_path, mode, dtype):
    ours, served = Net(own(tmp_path), dtype), Net(owner.address, dtype)
    if (options := MODES[mode]) is not None:
        served.opt.overlap(served.model, **options)
    for _ in range(6):
        ours.step()
        served.step()
    assert_equal(ours, served)

    def touch(net):
        net.opt.param_groups[0]["lr"] *= 0.5
        next(net.model.parameters()).grad.data[0] += 1

    if mode != "free":  # which has no gradients left to be edited
        for _ in range(2):
            ours.step(touch)
            served.opt.synchronize()  # a guess begins once the last step is durable
            served.step(touch)
    ours.steps(2)
    served.steps(1)
    served.opt.synchronize()
    served.steps(1)
    assert_equal(ours, served)
    if mode == "backward":
        assert served.opt.stats()["overlap"]["early_params"] > 0
        assert served.opt.stats()["overlap"]["redone"]


@pytest.mark.parametrize("mode", MODES)
def test_several_connections_have_the_bits_of_directories(tmp_path, mode):
    """Tiles that leave by different connections come back in any order."""
    with OwnerHere(tmp_path / "owner") as owner:
        late = mode != "free"  # a gradient that no backward has made is refused there
        ours = Net(own(tmp_path), late=late)
        served = Net(f"{owner.address}&connections=3", late=late)
        if (options := MODES[mode]) is not None:
            served.opt.overlap(served.model, **options)
        assert_equal(ours.steps(6), served.steps(6))
        assert {f"csd_optim sends {k}" for k in range(3)} <= {thread.name for thread in threading.enumerate()}
        served.opt.close()
        for n in (0, 9):
            with pytest.raises(CSDValueError, match="connections is a number from 1 to 8"):
                Net(f"{owner.address}&connections={n}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_in_host_memory_are_sent_and_parameters_received_where_they_lie(owner, tmp_path, dtype, monkeypatch):
    """In staging buffers only what has another dtype there is copied."""
    copied = []
    monkeypatch.setattr(staging, "_copy", lambda to, *_, copy=staging._copy: (copied.append(to.numel()), copy(to, *_)))
    ours, served = Net(own(tmp_path), dtype), Net(owner.address, dtype)
    assert_equal(ours.steps(3), served.steps(3))
    assert not copied
    served.opt.close()
    ours.opt.close()
    served = Net(owner.address, torch.float32, grad_dtype=torch.bfloat16, overwrite=True).steps(1)
    assert sum(copied) == sum(p.numel() for p in served.model.parameters())
    served.opt.close()


@pytest.mark.parametrize("muon", [False, True], ids=["", "muon"])
@pytest.mark.parametrize("mode", MODES)
def test_a_window_of_two_tiles_suffices(tmp_path, monkeypatch, mode, muon):
    """Gradients become final from the last layer to the first, and there are many more tiles than buffers."""
    if muon and mode == "free":
        pytest.skip("free_gradients=True is refused with Muon")
    monkeypatch.setattr(ownership, "WINDOW", 2)
    monkeypatch.setattr(ownership, "LEAST_WINDOW", 2)
    with OwnerHere(tmp_path / "owner") as owner:
        ours, served = Net(own(tmp_path), muon=muon), Net(owner.address, muon=muon)
        if (options := MODES[mode]) is not None:
            served.opt.overlap(served.model, **options)
        for _ in range(4):
            ours.step()
            served.step()
            served.opt.synchronize()
        assert_equal(ours, served)
        served.opt.close()


@pytest.mark.parametrize("mode", MODES)
def test_edits_before_the_order_of_tiles_changes(tmp_path, monkeypatch, mode):
    """The second step with overlap is the first that begins with what forward uses first."""
    monkeypatch.setattr(ownership, "WINDOW", 2)
    monkeypatch.setattr(ownership, "LEAST_WINDOW", 2)
    with OwnerHere(tmp_path / "owner") as owner:
        ours, served = Net(own(tmp_path)), Net(owner.address)
        if (options := MODES[mode]) is not None:
            served.opt.overlap(served.model, **options)
        for _ in range(4):
            for net in (ours, served):
                net.step()
                with torch.no_grad():
                    next(iter(net.model.parameters())).clamp_(-0.05, 0.05)
        assert_equal(ours, served)
        served.opt.close()


def test_days_left_are_those_of_the_owners_drives(tmp_path):
    rated, other = (
        parse_devices([f"file:{tmp_path / name}{rating}"])[0] for name, rating in (("a", "?tbw=1GB"), ("b", ""))
    )
    with OwnerHere(specs=[rated, other], allow_save=tmp_path) as owner:
        served = Net(owner.address).steps(2)
        first, second = served.opt.stats()["devices"]
        assert first["days_left"] > 0
        assert second["days_left"] is None
        served.opt.close()


def test_edits_of_states_and_parameters_have_the_bits_of_directories(owner, tmp_path):
    both = [Net(own(tmp_path), torch.bfloat16), Net(owner.address, torch.bfloat16)]
    for net in both:
        net.steps(3)
        first, second, third, *_ = net.model.parameters()
        net.opt.state[first]["exp_avg"].mul_(3)
        net.opt.state[second]["step"].fill_(7)
        with torch.no_grad():
            second.mul_(2)
            third.data[0] = 1
        net.steps(2)
        with net.opt.loading():
            net.opt.state[first]["exp_avg_sq"].fill_(0.25)
        saved = copy.deepcopy(net.opt.state_dict())
        net.steps(2)
        net.opt.load_state_dict(saved)
        net.step()
    assert_equal(*both)


def test_snapshots_and_what_the_program_stores_are_with_the_owner(owner, tmp_path):
    net = Net(owner.address).steps(2)
    net.opt.user_state = {"position": torch.arange(3)}
    net.step()
    assert net.opt.save(tmp_path / "snapshot").result() == tmp_path / "snapshot"
    net.opt.synchronize()
    assert net.opt.committed_step == 3
    image = net.image()
    net.opt.consolidate_state_dict()
    stored = CSDAdam.load(tmp_path / "snapshot")
    for k, entry in net.opt.state_dict()["state"].items():
        assert all(torch.equal(value, stored["state"][k][name]) for name, value in entry.items())
    net.opt.close()
    with pytest.raises(CSDStoreExistsError, match="resume=True"):
        Net(owner.address)
    again = Net(owner.address, resume=True)
    assert torch.equal(again.opt.user_state["position"], torch.arange(3))
    assert all(torch.equal(a, b) for a, b in zip(image, again.image(), strict=True))
    again.opt.close()
    assert Net(owner.address, overwrite=True).steps(1).opt.state_dict()["state"][0]["step"] == 1


def test_encrypted_frames_have_the_bits_of_directories_and_roles_are_kept(tmp_path, files):
    accept = [(Role.TRAINER, files.certificate("trainer")), (Role.READER, files.certificate("stranger"))]
    with OwnerHere(tmp_path / "owner", key=files.owner, accept=accept) as owner:
        pinned = f"&owner={owner.listener.fingerprint}"
        ours, served = Net(own(tmp_path)), Net(f"{owner.address}&key={files.trainer}{pinned}")
        served.opt.overlap(served.model)
        assert_equal(ours.steps(4), served.steps(4))
        with pytest.raises(CSDRankError, match="key of an admin"):
            served.opt.save(tmp_path / "snapshot").result()
        assert_equal(ours.steps(1), served.steps(1))
        for key, options in ((files.trainer, {"overwrite": True}), (files.stranger, {"resume": True})):
            with pytest.raises(CSDRankError, match="your key is accepted as"):
                Net(f"{owner.address}&key={key}{pinned}", **options)
        with pytest.raises(CSDUnavailableError):
            Net(owner.address, resume=True)
        assert_equal(ours.steps(1), served.steps(1))
        served.opt.close()
        Net(f"{owner.address}&key={files.owner}", overwrite=True).steps(1).opt.close()
