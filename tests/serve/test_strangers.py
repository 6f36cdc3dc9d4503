"""What comes from outside is checked before it is used: owners neither end nor hang, and keep their states.

Trainers check what owners answer.
"""

import json
import math
import shutil
import threading
import time
from unittest import mock

import pytest
import torch
from support.forked import process
from support.inside import engine_of
from support.owners import STARTS, Owners
from test_serve import HYPER, Replicas, a_request

from csd_optim import CSDAdam, CSDBusyError, CSDError, CSDLostError, CSDOSError, CSDRankError, CSDValueError
from csd_optim.cli.serving import parse_listen, serve
from csd_optim.serve.answers import check_open_reply, check_state_list, grad_norm_in
from csd_optim.serve.log import MAX_LINE, printable
from csd_optim.serve.wire import COUNTER, Session, answer_key, connect, listen, request_key
from csd_optim.store.file import FILE_NAME

NAN = math.nan


@pytest.fixture
def owners(tmp_path):
    with Owners(tmp_path) as there:
        yield there


def ask(store, request):
    """Request a session as a trainer does, and return the answer."""
    number = store.add(COUNTER, 1)
    store.set(request_key(number), json.dumps(request))
    return json.loads(store.get(answer_key(number)))


# ---- requests ------------------------------------------------------------------------------

MALFORMED = [
    *({"hyper": {"lr": lr}} for lr in ("x", NAN, math.inf, None, [0.1, 0.2], 10**400)),
    *({"hyper": {"betas": betas}} for betas in ([1], [0.9, "0.9"], [1.0, 0.9], 0.9)),
    {"hyper": {"amsgrad": "no"}},
    {"hyper": {"decoupled_weight_decay": False}},
    {"hyper": {"state_dtype": "4bit"}},
    {"hyper": {"differentiable": True}},
    {"hyper": {"params": 1}},
    {"defaults": {"decoupled_weight_decay": "maybe"}},
    {"optimizer": "CSDSGD"},  # its hyperparameters are others
    *({"options": {"tile_size": size}} for size in (10**30, 0, -1, 1.5, "1", True)),
    {"options": {"state_dtype": "4bit"}},
    {"stride": [1 << 47, 1]},
    {"stride": [1]},
]


def test_all_of_a_request_is_checked_before_it_ends_a_training(owners):
    training = Replicas(owners.address)
    training.step()
    store = connect("127.0.0.1", owners.port, 60)
    for malformed in MALFORMED:
        answer = ask(store, a_request("overwrite", **malformed))
        assert "error" in answer, malformed
    answer = ask(store, {**a_request("overwrite"), "groups": []})
    assert "no parameter groups" in answer["text"]
    training.step()
    training.opt.synchronize()
    assert training.opt.committed_step == 2


def test_a_number_that_anybody_can_set(owners):
    """The counter of sessions, and the keys of the owner, whose prefix strangers can list."""
    training = Replicas(owners.address)
    training.step()
    pids, store = owners.pids, connect("127.0.0.1", owners.port, 60)
    for counter in ("text", str(10**15), "9" * 5000, "-1", ""):
        store.set(COUNTER, counter)
        training.step()
    if hasattr(store, "list_keys"):
        (current,) = (key for key in map(_text, store.list_keys()) if key.endswith("/current"))
        store.set(current.replace("/current", "/stop"), "1")
        training.step()
        store.set(current, "text")
        owners.until("another session has taken over")
    store.set(COUNTER, str(10**15))
    assert owners.pids == pids
    owners.stop()


def _text(key):
    return key.decode() if isinstance(key, bytes) else key


# ---- numbers -------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_is_refused_and_the_session_goes_on(owners):
    training = Replicas(owners.address, max_grad_norm=1.0)
    for _ in range(2):
        training.step()
    image, group = training.image(), training.opt.param_groups[0]
    for name, bad in (("lr", NAN), ("lr", math.inf), ("eps", "0"), ("betas", (0.9, NAN)), ("weight_decay", -math.inf)):
        group[name], good = bad, group[name]
        with pytest.raises(CSDValueError, match=f"Invalid {name}"):
            training.opt.step()
        group[name] = good
    training.params["row"].grad[0, 0] = NAN
    with pytest.raises(CSDValueError, match="multiplied by nan"):
        training.opt.step()
    assert all(torch.equal(a, b) for a, b in zip(image, training.image(), strict=True))
    training.step()
    training.opt.synchronize()
    assert training.opt.committed_step == 3


@pytest.mark.parametrize(
    "bad",
    [
        *({"scale": scale} for scale in (NAN, math.inf, 1e300, 1, "1")),
        *({"hyper": [{**HYPER, **bad}]} for bad in ({"lr": NAN}, {"lr": "x"}, {"betas": [0.9]}, {"eps": math.inf})),
    ],
    ids=str,
)
def test_a_trainer_that_does_not_check_them(owners, bad):
    training = Replicas(owners.address)
    training.step()
    training.opt.synchronize()
    image = training.image()
    message = {"op": "step", "params": [0], "written": [], "hyper": None, "dtypes": ["float32"], "scale": 1.0}
    message |= {"pushed": [0], "backwards": 0, "user_states": None, **bad}
    with pytest.raises(CSDRankError, match="cannot be read"):
        engine_of(training.opt).call(message)
    training.opt.close()
    training = Replicas(owners.address, resume=True)
    assert training.opt.committed_step == 1
    assert all(torch.equal(a, b) for a, b in zip(image, training.image(), strict=True))
    training.step()
    assert all(p.isfinite().all() for p in training.params.values())


# ---- the log -------------------------------------------------------------------------------


def test_one_line_of_printable_characters():
    assert printable("é, 漢字, 1 < 2") == "é, 漢字, 1 < 2"
    assert printable("a\nb\r\t\x1b[31m\x00\\n") == r"a\nb\r\t\x1b[31m\x00\\n"
    assert printable("\u202e\u2028\x85\ud800\x9b") == r"\u202e\u2028\x85\ud800\x9b"
    assert len(printable("\n" * 10**6)) == MAX_LINE


def test_nobody_writes_lines_into_the_log(owners):
    with CSDAdam([("w", torch.nn.Parameter(torch.zeros(3, 3)))], devices=owners.address) as opt:
        opt.param_groups[0]["params"][0].grad = torch.ones(3, 3)
        opt.step()
        forged = "\nsession 7 is over\r\x1b[2J\x1b]0;x\x07\u202e"
        answer = ask(connect("127.0.0.1", owners.port, 60), a_request(name=forged))
        assert forged in answer["text"]
        owners.until(r"is w there and \\nsession 7 is over\\r\\x1b\[2J")
        opt.step()
    assert all(line.isprintable() for line in owners.log.read_bytes().decode().split("\n")[:-1])
    assert "\nsession 7" not in owners.said


# ---- answers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        *({"owners": n} for n in ("x", None, -1, 0, 10**6, 1.5, math.inf, True, [], 10**400)),
        *({"error": "CSDOSError", "errno": n, "text": "full"} for n in ("x", 2**70, -1, [], 1.5, None)),
        *({"error": kind, "text": 5} for kind in ("os", "errno", "CSDWarning", "users_stacklevel", 5, [])),
        {},
        [],
        5,
    ],
    ids=lambda answer: json.dumps(answer)[:60],
)
def test_a_malformed_answer_to_a_request(answer):
    store, port = listen("127.0.0.1", 0)
    store.set(answer_key(1), json.dumps(answer))
    with pytest.raises(CSDError) as raised:
        CSDAdam([torch.nn.Parameter(torch.ones(3))], devices=f"serve://127.0.0.1:{port}?timeout=5")
    assert not isinstance(raised.value, CSDOSError) or raised.value.errno == 5


def test_malformed_replies():
    good = {"committed_step": 3, "recovered": True, "groups": [{}], "steps": [3.0, 0.0], "user_states": {"list": []}}
    check_open_reply(good, 1, 2)
    for bad in (
        *({"committed_step": n} for n in (-1, "x", 1e3, 10**400, None)),
        *({"steps": steps} for steps in ([3.0], [3.0, NAN], [3.0, "x"], [3.0, -1], 5)),
        *({"groups": groups} for groups in ([], [5], {}, None)),
        *({"user_states": states} for states in ({"list": [5]}, {"list": 5}, {"a": 1, "b": 2}, 5)),
        {"recovered": "no"},
    ):
        with pytest.raises(CSDRankError, match="cannot be read"):
            check_open_reply({**good, **bad}, 1, 2)
    sections = ("master", "exp_avg")
    assert check_state_list({"states": [[1, 2.0, ["master"]]]}, 2, sections)
    for states in (None, 5, [5], [[2, 1.0, []]], [["x", 1.0, []]], [[0, "x", []]], [[0, 1.0, ["y"]]], [[0, 1.0, [[]]]]):
        with pytest.raises(CSDRankError, match="cannot be read"):
            check_state_list({"states": states}, 2, sections)
    assert (grad_norm_in({}), grad_norm_in({"grad_norm": 1.5})) == (None, 1.5)
    with pytest.raises(CSDRankError, match="cannot be read"):
        grad_norm_in({"grad_norm": "x"})


# ---- a session is over ---------------------------------------------------------------------


def take_over(address):
    Replicas(address, resume=True).step()


@pytest.mark.parametrize("how", ["taken over", "killed"])
def test_no_thread_is_left_when_a_trainer_is_told(owners, how):
    """An interpreter that exits while a thread waits in gloo ends that thread within C++, and so itself by SIGABRT."""
    training, abort = Replicas(owners.address), Session.abort

    def slow_abort(session):
        abort(session)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)

    def go_on():
        until = time.monotonic() + STARTS
        while time.monotonic() < until:
            training.step()
            if how == "killed" and training.done == 5:
                owners.kill()

    training.step()
    other = process(take_over, owners.address) if how == "taken over" else None
    with mock.patch.object(Session, "abort", slow_abort), pytest.raises(CSDRankError, match="is over"):
        go_on()
    assert "csd_optim step" not in [thread.name for thread in threading.enumerate()]
    if other:
        other.join(STARTS)
        assert other.exitcode == 0


def test_an_owner_whose_store_was_removed(owners):
    training = Replicas(owners.address)
    training.step()
    training.opt.synchronize()
    shutil.rmtree(owners.stores[0])
    training.step()  # its commit is in the background
    with pytest.raises(CSDLostError, match=r"was removed while it was in use.*torch\.save"):
        training.step()
    assert training.opt.state_dict()["state"][0]["step"] >= 2  # what the message advises is possible


# ---- the start -----------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1:٢٩", "127.0.0.1:65536", "127.0.0.1:", "x", ":" + "1" * 5000, "h:+1"])
def test_an_address_that_is_none(address):
    with pytest.raises(CSDValueError, match="Invalid --listen"):
        parse_listen(address)


def test_directories_that_cannot_be_opened(tmp_path, run):
    file, used, foreign = tmp_path / "file", tmp_path / "used", tmp_path / "foreign"
    file.touch()
    foreign.mkdir()
    (foreign / FILE_NAME).write_bytes(b"mine" * 4096)
    with CSDAdam([torch.nn.Parameter(torch.ones(3))], devices=used):
        for places, why in (
            ([file], "is a file; a device is a directory"),
            ([tmp_path / "no" / "where"], "there is no directory"),
            ([used], "is in use by another optimizer of this process"),
            ([tmp_path / "new", foreign], "is no csd_optim store; move it away"),
        ):
            code, out, err = run("serve", *places, "--listen", "127.0.0.1:0")
            assert (code, out) == (1, "")
            assert why in " ".join(err.split())
            assert "optimizer rank" not in err
        with pytest.raises(CSDBusyError):
            serve([str(used)], "127.0.0.1:0")
    assert (foreign / FILE_NAME).read_bytes() == b"mine" * 4096


def test_a_start_changes_no_store(tmp_path):
    with Owners(tmp_path) as owners:
        training = Replicas(owners.address)
        training.step()
        training.opt.close()
        owners.stop()
        store = tmp_path / "owner-0" / FILE_NAME
        before = store.read_bytes()
        owners.start()
        assert store.read_bytes() == before
        assert Replicas(owners.address, resume=True).done == 1
