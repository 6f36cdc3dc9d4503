"""What an owner is started with, and what comes from outside into its log; and a store that somebody has removed."""

import shutil

import pytest
import torch
from support.nets import Net
from support.owners import Owner

from csd_optim import CSDAdam, CSDBusyError, CSDLostError, CSDValueError
from csd_optim.cli.serving import parse_listen, serve
from csd_optim.serve.owner.log import MAX_LINE, printable
from csd_optim.store.file import FILE_NAME


def test_one_line_of_printable_characters():
    assert printable("é, 漢字, 1 < 2") == "é, 漢字, 1 < 2"
    assert printable("a\nb\r\t\x1b[31m\x00\\n") == r"a\nb\r\t\x1b[31m\x00\\n"
    assert printable("\u202e\u2028\x85\ud800\x9b") == r"\u202e\u2028\x85\ud800\x9b"
    assert len(printable("\n" * 10**6)) == MAX_LINE


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
            (["ram:"], "optimizer ranks keep states in named directories"),
        ):
            code, out, err = run("serve", *places, "--listen", "127.0.0.1:0")
            assert (code, out) == (1, "")
            assert why in " ".join(err.split())
            assert "optimizer rank with" not in err
        with pytest.raises(CSDBusyError):
            serve([str(used)], "127.0.0.1:0")
    assert (foreign / FILE_NAME).read_bytes() == b"mine" * 4096


def test_a_start_changes_no_store(tmp_path):
    with Owner(tmp_path) as owner:
        Net(owner.address).steps(1).opt.close()
        owner.stop()
        store = tmp_path / "owner" / FILE_NAME
        before = store.read_bytes()
        owner.start()
        assert store.read_bytes() == before
        assert Net(owner.address, resume=True).opt.committed_step == 1


def test_an_owner_whose_store_was_removed(tmp_path):
    with Owner(tmp_path) as owner:
        net = Net(owner.address).steps(1)
        net.opt.synchronize()
        shutil.rmtree(owner.store)
        net.step()  # its commit is in the background
        with pytest.raises(CSDLostError, match=r"was removed while it was in use.*torch\.save"):
            net.steps(2)
        assert net.opt.state_dict()["state"][0]["step"] >= 2  # what the message advises is possible


@pytest.mark.parametrize("host", ["[::1]", "localhost"])
def test_addresses_of_loopback(host, tmp_path):
    with Owner(tmp_path, host=host) as owner:
        assert Net(owner.address).steps(1).opt.committed_step <= 1
        owner.stop()
