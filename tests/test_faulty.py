"""How the body of a test ends in the child process is how the test ends."""

import pytest
from support.faulty import child, in_child  # noqa: F401


class UnpicklableError(Exception):
    def __init__(self, said, more):
        super().__init__(said)


@in_child
def body(how):
    if how == "raises":
        with pytest.raises(OSError, match="unplugged"):
            pass
    if how == "cannot be pickled":
        raise UnpicklableError("left as text", lambda: None)
    if how == "exits":
        raise SystemExit("out of the test")
    if how in ("skip", "xfail"):
        getattr(pytest, how)("no such disk")
    assert how == "passes", "asserted there"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "DID NOT RAISE"),
        ("cannot be pickled", "UnpicklableError: left as text"),
        ("exits", "SystemExit: out of the test"),
        ("asserts", "AssertionError: asserted there"),
    ],
)
def test_failures_in_the_child(how, said):
    with pytest.raises(pytest.fail.Exception, match=said):
        body(how=how)


@pytest.mark.parametrize("how", ["skip", "xfail"])
def test_no_failures_in_the_child(how):
    with pytest.raises(getattr(pytest, how).Exception, match=r"^no such disk$"):
        body(how=how)
    body(how="passes")
