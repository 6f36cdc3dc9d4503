import pytest

from csd_optim.serve.wire import listener


@pytest.fixture(autouse=True)
def _time_for_a_first_message(monkeypatch):
    """Gives a peer in another thread or process more than two seconds: it may not get the processor for so long."""
    monkeypatch.setattr(listener, "FIRST_SECONDS", 20.0)
