"""What an owner does for whom: roles, keys that are taken away, requests for a session, and what its log shows."""

import contextlib
import ctypes
import json
import os
import re
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from support.nets import Net
from support.owner_here import OwnerHere
from support.wire_ends import hear, raw, say
from support.wires import HELLO, files, until, write_certificate

from csd_optim import CSDError, CSDOSError, CSDStoreExistsError, CSDUnavailableError
from csd_optim.bindings import NEW
from csd_optim.serve.messages import ROW, WIRE_HYPER, WIRE_INDEX, raise_failure
from csd_optim.serve.owner import owner_session
from csd_optim.serve.owner.owner_requests import OwnerRequests
from csd_optim.serve.owner.owner_step import OwnerStep
from csd_optim.serve.requests import Failure
from csd_optim.serve.trainer.link import Link
from csd_optim.serve.wire import dial
from csd_optim.serve.wire.connection import FRAME, ConnectionClosed
from csd_optim.serve.wire.init_key import init_key
from csd_optim.serve.wire.keys import Key, Role

__all__ = ["files"]

USUAL = {name: value for name, value in HELLO.items() if name not in ("op", "n")}
SECTIONS = ["master", "exp_avg", "exp_avg_sq"]


class Peer:
    """Somebody who is connected to an owner, and says what he wants to. The `with` block ends the connection."""

    def __init__(self, owner, key=None, pin=None, streams=1, within=5):
        address = "127.0.0.1", owner.port
        self.session = dial.connect(address, key=key, owner=pin, streams=streams, within=within)
        self.n = 0

    def says(self, op, *arrays, **fields):
        """Return the owner's answer. Raises its error."""
        self.n += 1
        say(self.session.control, {"op": op, "n": self.n, **fields}, *(memoryview(a).cast("B") for a in arrays))
        answer, _ = hear(self.session.control)
        if answer["answer"] == "failed":
            raise_failure(Failure(**{name: answer[name] for name in ("error", "errno", "text")}))
        return answer

    def is_ended(self, op, *arrays, **fields):
        """Return whether the owner ends the session when it hears this."""
        with pytest.raises(ConnectionClosed):
            self.says(op, *arrays, **fields)
        return True

    def hello(self, mode="new", **fields):
        return self.says("hello", **USUAL | {"mode": mode} | fields)

    def extend(self, *numels, **fields):
        usual = {"sections": SECTIONS, "codec": "fp32", "param_dtype": "", "first_param": 0, "tile_elems": None}
        return self.says("extend", np.array(numels, ">u8"), **usual | fields)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.session.close()


@pytest.fixture
def owner(tmp_path):
    with OwnerHere(tmp_path / "owner") as there:
        yield there


@contextlib.contextmanager
def with_role(role, files, tmp_path):
    """Return an owner, and how somebody with this role connects to it."""
    with OwnerHere(tmp_path / "owner", key=files.owner, accept=[(role, files.certificate("trainer"))]) as owner:
        yield owner, {"key": Key(files.trainer), "pin": Key(files.owner).fingerprint}


# ---- roles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["new", "resume", "overwrite"])
def test_a_reader_gets_no_session(mode, files, tmp_path):
    with with_role(Role.READER, files, tmp_path) as (owner, how), Peer(owner, **how) as reader:
        with pytest.raises(CSDError, match="accepted as reader, and may not train"):
            reader.hello(mode)
        assert not any((tmp_path / "owner").iterdir())


def test_a_trainer_does_not_erase_or_save(files, tmp_path):
    with with_role(Role.TRAINER, files, tmp_path) as (owner, how):
        with Peer(owner, **how) as trainer, Peer(owner, **how) as other:
            trainer.hello("new")
            with pytest.raises(CSDError, match="overwrite=True erases states, which needs the key of an admin"):
                other.hello("overwrite")
            with pytest.raises(CSDError, match=r"save\(\) needs the key of an admin"):
                trainer.says("save", path=str(tmp_path / "snapshot"))
        with Peer(owner, key=Key(files.owner), pin=how["pin"]) as admin:
            admin.hello("overwrite")


@pytest.mark.parametrize("idle", [False, True])
def test_a_key_that_is_taken_away_ends_the_session(idle, files, tmp_path):
    init_key(tmp_path / "other.pem")
    certificate = tmp_path / "accepted.crt"
    write_certificate(certificate, files.trainer.read_text())
    keys = {"key": files.owner, "accept": [(Role.TRAINER, certificate)]}
    how = {"key": Key(files.trainer), "pin": Key(files.owner).fingerprint}
    with OwnerHere(tmp_path / "owner", timeout=2 if idle else 60, **keys) as owner, Peer(owner, **how) as trainer:
        trainer.hello()
        write_certificate(certificate, (tmp_path / "other.pem").read_text())
        owner.listener.reload()
        if not idle:
            with pytest.raises(ConnectionClosed):
                trainer.says("stats")
        until(lambda: any("its key is no longer accepted" in line for line in owner.lines))


@pytest.mark.parametrize("by", ["CSD_OPTIM_KEY", "key="])
def test_a_configured_key_is_used(by, files, tmp_path, monkeypatch):
    with OwnerHere(tmp_path / "plain") as plain, with_role(Role.TRAINER, files, tmp_path) as (owner, how):
        if by == "key=":
            option = f"&key={files.trainer}"
        else:
            option = ""
            monkeypatch.setenv("CSD_OPTIM_KEY", str(files.trainer))
        with pytest.raises(CSDUnavailableError, match="the owner has no key, and this side insists on one"):
            Net(plain.address + option)
        with pytest.raises(CSDUnavailableError, match="is this the right machine"):
            Net(owner.address + option)
        net = Net(f"{owner.address}{option}&owner={how['pin']}").steps(2)
        assert "trainer, key" in owner.lines[-2]
        net.opt.close()
        monkeypatch.setenv("CSD_OPTIM_KEY", str(tmp_path / "missing"))
        with pytest.raises(CSDOSError, match="the key file cannot be read"):
            Net(plain.address)


# ---- requests for a session ---------------------------------------------------------------------


def test_a_request_that_is_refused_does_not_end_the_session_under_way(owner):
    with Peer(owner) as first:
        first.hello()
        first.extend(1000)
        for wrong, why in (
            ({"mode": "new"}, "states, of step 0"),
            ({"mode": "attach", "store": "1" * 32, "step": 0}, "another store"),
            ({"trainers": 2}, "another number of trainers"),
            ({"trainer": 1}, "the number of a trainer"),
            ({"here": 2}, "the number of a trainer"),
        ):
            with Peer(owner) as second, pytest.raises(CSDError, match=why):
                second.hello(**wrong)
        for wrong, why in (
            ({"mode": "new", "tile_elems": -1}, r"Expected `int` >= 0 - at `\$.tile_elems`"),
            ({"mode": "new", "tile_elems": (1 << 26) + 1}, r"Expected `int` <= 67108864 - at `\$.tile_elems`"),
            ({"store": "another"}, r"Expected `str` matching regex .* - at `\$.store`"),
            ({"mode": "erase"}, "unknown fields or values"),
            ({"protocol": 4}, "unknown fields or values"),
            ({"who": ["somebody"]}, r"Expected `str`, got `array` - at `\$.who`"),
        ):
            with Peer(owner) as second:
                assert second.is_ended("hello", **USUAL | wrong)
            until(lambda why=why: any(re.search(why, line) for line in owner.lines))
        with Peer(owner, streams=0) as second, pytest.raises(CSDError, match="it has no streams"):
            second.hello("resume")
        assert first.says("stats")["devices"]


def test_whoever_asks_for_no_session_leaves(owner, monkeypatch):
    monkeypatch.setattr(owner_session, "HELLO_SECONDS", 0.2)
    with Peer(owner) as silent, pytest.raises(ConnectionClosed, match="closed the connection"):
        hear(silent.session.control)


def test_a_request_for_a_session_is_short(owner):
    announced = json.dumps(HELLO | {"sizes": [1 << 20]}).encode()
    for said in (FRAME.pack(1 << 20, 0), FRAME.pack(len(announced), 1 << 20) + announced):  # and nothing else
        with Peer(owner) as peer:
            raw(peer.session.control).sendall(said)
    until(lambda: any("a message of 1048576 bytes" in line for line in owner.lines))
    until(lambda: any("a message with 1048576 bytes of arrays was refused" in line for line in owner.lines))


@pytest.mark.parametrize("where", [(OwnerStep, "receive"), (OwnerStep, "send_next"), (Link, "_take_params")])
def test_no_error_leaves_anybody_waiting(where, owner, monkeypatch):
    def fails(*_):
        raise MemoryError("there is none")

    net = Net(owner.address).steps(1)
    with monkeypatch.context() as patch:
        patch.setattr(*where, fails)
        with pytest.raises(CSDError):
            net.step()
    until(lambda: any("MemoryError: there is none" in line for line in owner.lines) or where[0] is Link)
    net.step()
    net.opt.close()


@pytest.mark.filterwarnings("ignore:Exception in thread csd_optim session")
@pytest.mark.parametrize("error", [MemoryError, IndexError])
def test_an_error_in_a_request_ends_the_session(error, owner, monkeypatch):
    def fails(*_):
        raise error("somewhere")

    monkeypatch.setattr(OwnerRequests, "end", fails)
    monkeypatch.setattr(OwnerRequests, "_on_stats", fails)
    with Peer(owner) as peer:
        peer.hello()
        with pytest.raises(CSDError, match=f"{error.__name__}: somewhere"):
            peer.says("stats")
    with Peer(owner) as peer:
        peer.hello()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "1"}, "rule of parameter b"),
        ({"rule": "adamw"}, r"extent 1 has the sections \('master', 'exp_avg'\)"),
        ({"extent": 0, "start": 16}, "a parameter's place"),
    ],
)
def test_rules_of_parameters_that_do_not_fit_their_states(changes, message, owner):
    def described(name, extent, **more):
        about = {"name": name, "group": extent, "position": 0, "shape": [5], "dtype": "float32", "stride": [1]}
        return {**about, "extent": extent, "start": 0, "numel": 5, **more}

    with Peer(owner) as peer:
        peer.hello()
        peer.extend(5)
        peer.extend(5, sections=["master", "exp_avg"], first_param=1)
        params = [described("a", 0), described("b", 1, rule="lion")]
        peer.says("describe", manifest={"params": params, "waiting": []})
        with pytest.raises(CSDError, match=message):
            peer.says("describe", manifest={"params": [params[0], {**params[1], **changes}], "waiting": []})


# ---- the log ------------------------------------------------------------------------------------


def test_nobody_forges_lines_of_the_log(owner):
    with Peer(owner) as peer:
        peer.hello(who="x\n\x1b[2Jsession 7: \u202eforged" + "y" * 4000)
    for op in ("reserve\nsession 8: forged", "\x1b[2J", "z" * 4000):
        with Peer(owner) as peer:
            peer.hello("resume")
            assert peer.is_ended(op)
    with Peer(owner) as peer:
        peer.hello("resume")
        with pytest.raises(CSDError, match="the dtype"):
            peer.extend(1000, param_dtype="\nforged")
    assert len(owner.lines) >= 5
    assert all(line.isprintable() and len(line) <= 510 for line in owner.lines)


# ---- memory and disks ---------------------------------------------------------------------------


@pytest.mark.parametrize("tile_elems", [0, 1024])
@pytest.mark.parametrize("codec", ["fp32", "8bit"])
def test_no_number_takes_all_memory_or_disk(tile_elems, codec, owner):
    with Peer(owner) as peer:
        peer.hello(tile_elems=tile_elems)
        for numels in ([1 << 47], [1 << 46] * 2, [1 << 63], [1] * ((1 << 20) + 1), []):
            with pytest.raises(CSDError, match=r"the sizes of parameters|more than \d+ tiles"):
                peer.extend(*numels, codec=codec, param_dtype="float32" if codec == "8bit" else "")
        peer.extend(1000)
        assert peer.is_ended("reserve", record_bytes=1 << 30)


@pytest.mark.parametrize(("codec", "most"), [("fp32", 24), ("8bit", 10)])
def test_the_largest_model(codec, most, tmp_path):
    """In all, however it is divided: parameters of one element take a tile each. What is there stays, and is used."""
    about = {"codec": codec, "param_dtype": "float32" if codec == "8bit" else ""}
    with OwnerHere(tmp_path / "owner", max_model=100_000 * most) as owner:
        with Peer(owner) as peer:
            peer.hello(tile_elems=8192)
            with pytest.raises(CSDError, match=rf"the states .* and the optimizer ranks allow {100_000 * most}:"):
                peer.extend(200_000, **about)
            with pytest.raises(CSDError, match="Invalid codec"):
                peer.extend(1000, codec="other")
            peer.extend(50_000, 10_000, **about)
            small = iter(range(100))
            with pytest.raises(CSDError, match="--max-model"):
                deque(peer.extend(1, first_param=2 + k, **about) for k in small)
            assert 1 < next(small) < 7
        used = sum(file.stat().st_size for file in owner.store.iterdir())
        assert used < 200_000 * most


# ---- snapshots ----------------------------------------------------------------------------------


def test_snapshots_are_made_below_allowed_directories_only(owner, tmp_path):
    net = Net(owner.address).steps(1)
    allowed, elsewhere = tmp_path / "allowed", tmp_path / "elsewhere"
    allowed.mkdir()
    elsewhere.mkdir()
    (allowed / "inside").mkdir()
    (allowed / "link").symlink_to(elsewhere)
    owner.ownership.allow_save = [allowed]
    for path in (elsewhere / "a", allowed, allowed / ".." / "elsewhere" / "a", Path(f"{allowed}-2") / "a"):
        with pytest.raises(CSDError, match="is not where the optimizer ranks may save"):
            net.opt.save(path)
    with pytest.raises(CSDOSError, match=f"cannot save at {allowed / 'link' / 'a'}: "):
        net.opt.save(allowed / "link" / "a")
    assert [*elsewhere.iterdir()] == []
    net.opt.save(allowed / "inside" / "a").result()
    assert (allowed / "inside" / "a").is_dir()
    with pytest.raises(CSDStoreExistsError, match=f"{allowed / 'inside' / 'a'} exists"):
        net.opt.save(allowed / "inside" / "a")
    owner.ownership.allow_save = []
    with pytest.raises(CSDError, match="start them with --allow-save DIR"):
        net.opt.save(allowed / "b")
    net.step()
    net.opt.close()


@pytest.mark.parametrize("codec", ["fp32", "8bit"])
@pytest.mark.parametrize("wrong", [{"master": NEW}, {"master": NEW, "has_grad": 1}, {"in_image": 1}], ids=str)
def test_parameters_are_read_from_images_that_arrive(wrong, codec, owner):
    """Of a new parameter of 8-bit states the owner read the value where nothing was, and had a segmentation fault."""
    row, hyper = np.zeros(1, ROW), np.zeros(1, WIRE_HYPER)
    for name, value in wrong.items():
        row[name] = value
    with Peer(owner) as peer:
        peer.hello(tile_elems=8192)
        peer.extend(1000, codec=codec, param_dtype="float32" if codec == "8bit" else "")
        with pytest.raises(CSDError, match=r"the (new parameters|images) of a step"):
            peer.says("begin", row, hyper, np.zeros(1, WIRE_INDEX), begin=1, step=0, order=0, record_bytes=0)
        assert peer.says("stats")["devices"]


# ---- secrets ------------------------------------------------------------------------------------


def test_an_owner_with_a_key_leaves_no_core_dump(files, tmp_path):
    def dumpable():
        return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)  # PR_GET_DUMPABLE

    def own(key):
        with OwnerHere(tmp_path / "owner", key=key):
            return dumpable()

    for key, expected in ((None, dumpable()), (files.owner, 0)):
        if not (child := os.fork()):
            os._exit(own(key))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == expected
