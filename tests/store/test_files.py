"""csd_optim/files.py: transfers that are cut short, and files that appear as a whole or not at all."""

import errno
import fcntl
import os
import stat

import pytest

from csd_optim import CSDOSError, CSDStoreExistsError, files


def make(path, kind, meanwhile=lambda: None):
    with files.appears(path, replaces=False) as hidden:
        if kind == "directory":
            hidden.mkdir()
        files.write_file(hidden / "content" if kind == "directory" else hidden, b"new", replaces=False)
        meanwhile()


def refused(*_):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_short_transfers_go_on(tmp_path, monkeypatch):
    data, real = bytes(range(256)), (os.pwrite, os.pread, os.preadv)
    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: real[0](fd, part[:100], at))
    monkeypatch.setattr(os, "pread", lambda fd, n, at: real[1](fd, min(n, 100), at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: real[2](fd, [parts[0][:100]], at))
    files.write_file(tmp_path / "file", data, replaces=False)
    with files.opened(tmp_path / "file") as fd:
        assert files.read(fd, 256, 0) == data
        assert files.read(fd, 256, 10) == data[10:]  # the end of the file
        buffer = bytearray(300)
        assert files.read_into(fd, memoryview(buffer), 0) == 256
        assert buffer[:256] == data
        assert files.read_into(fd, memoryview(buffer), 0, unit=64) == 100  # no page is continued in its middle


def test_a_write_that_writes_nothing_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="Input/output error"):
        files.write_file(tmp_path / "file", b"data", replaces=True)


def test_nobody_can_read_a_key_before_it_is_complete(tmp_path, monkeypatch):
    modes, real = [], os.pwrite

    def noted(fd, data, at):
        modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", noted)
    with files.appears(tmp_path / "key", replaces=False) as hidden:
        files.write_file(hidden, b"secret", replaces=False, mode=0o600)
    assert [*modes, stat.S_IMODE((tmp_path / "key").stat().st_mode)] == [0o600, 0o600]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_another_process_makes_meanwhile_stays(kind, links, tmp_path, monkeypatch):
    if not links:  # as on a file system that has none
        monkeypatch.setattr(os, "link", refused)
    make(tmp_path / "first", kind)
    path = tmp_path / "second"
    with pytest.raises(CSDStoreExistsError, match="second exists"):
        make(path, kind, lambda: path.write_text("old"))
    assert path.read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"first", "second"}


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_name_that_is_not_durable_is_gone_again(kind, tmp_path, monkeypatch):
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: refused() if os.path.samestat(os.fstat(fd), there) else real(fd))
    there = tmp_path.stat()
    with pytest.raises(CSDOSError, match="nothing of it is left"):
        make(tmp_path / "new", kind)
    assert not [*tmp_path.iterdir()]


def test_a_name_is_claimed_where_there_are_no_links(tmp_path, monkeypatch):
    """A file that another process makes after the last look is not replaced."""
    path, exists, looks = tmp_path / "new", os.path.lexists, []

    def looks_too_early(at):
        looks.append(exists(at))
        if len(looks) == 2:
            path.write_text("old")
        return looks[-1]

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(os.path, "lexists", looks_too_early)
    with pytest.raises(CSDOSError, match="File exists"):
        make(path, "file")
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_an_interrupt_lets_go_of_a_lock(tmp_path, monkeypatch):
    real = fcntl.flock

    def interrupted(*arguments):
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            files.lock_folder(tmp_path, "write to", "another process writes to")
    os.close(files.lock_folder(tmp_path, "write to", "another process writes to"))
