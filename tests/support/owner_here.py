"""An optimizer rank on threads of this process: quick to start, and its inside can be looked at."""

from pathlib import Path

from csd_optim.devices.spec import parse_devices
from csd_optim.serve.owner.owner_session import Owner
from csd_optim.serve.owner.ownership import Ownership
from csd_optim.serve.wire.listener import Listener


class OwnerHere:
    """An owner of the store in `directory`, on loopback. The `with` block closes it.

    Snapshots may be made beside the store.
    """

    def __init__(self, directory=None, timeout=20, specs=None, allow_save=None, max_model=None, **options):
        """`specs`: devices, instead of a directory. `allow_save`, `max_model`: see Ownership. `options`: the key and
        whom it accepts, as for Listener.
        """
        self.timeout, self.lines, self.options, self.max_model = timeout, [], options, max_model
        if specs is None:
            self.store = Path(directory)
            self.store.mkdir(exist_ok=True)
        self.specs = specs or parse_devices([self.store])
        self.allow_save = [allow_save or self.store.parent]
        self.port = 0
        self.start()

    def start(self):
        self.ownership = Ownership(self.specs, self.allow_save, self.max_model)
        self.owner = Owner(self.ownership, self.timeout, self.lines.append)
        self.listener = Listener(
            ("127.0.0.1", self.port),
            on_session=self.owner.serve,
            log=self.lines.append,
            timeout=self.timeout,
            **self.options,
        )
        self.port = self.listener.address[1]

    @property
    def address(self):
        return f"serve://127.0.0.1:{self.port}?timeout={self.timeout}"

    def stop(self):
        self.listener.close()
        self.owner.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class OwnersHere:
    """Several owners, with stores in directories `0`, `1` ... of `directory`. The `with` block closes them."""

    def __init__(self, directory, n=2, **options):
        self.directory = Path(directory)
        self.directory.mkdir(exist_ok=True)
        self.owners = [
            OwnerHere(self.directory / str(k), allow_save=self.directory.parent, **options) for k in range(n)
        ]

    @property
    def address(self):
        return [owner.address for owner in self.owners]

    @property
    def stores(self):
        """The directories of a trainer's stores."""
        return sorted(path.parent for path in self.directory.glob("*/rank-*/csd_optim.store"))

    def start(self):
        for owner in self.owners:
            owner.start()

    def stop(self):
        for owner in self.owners:
            owner.stop()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
