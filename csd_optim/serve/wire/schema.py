"""Closed structs, from which messages are made: msgspec checks everything that another machine says.

Unknown fields, NaN, booleans for integers, and numbers, texts and lists beyond their limits are refused.
"""

from __future__ import annotations

import errno
from typing import Annotated, TypeVar

from ...errors import CSDRankError, CSDUnavailableError

try:
    import msgspec as msgspec
    from msgspec import Meta as Meta
    from msgspec import Struct as Struct
except ImportError:
    why = "optimizer ranks need msgspec, which checks their messages: pip install csd_optim[serve]"
    raise CSDUnavailableError(errno.ENOPKG, why) from None

T = TypeVar("T")
OUR_WORDS = ("Expected", "Object missing")
MOST_ARRAYS = 64  # in a message
Name = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]  # of a session, or of a store
Number = Annotated[int, Meta(ge=0, le=1 << 53)]
Text = Annotated[str, Meta(max_length=1 << 12)]


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message. `sizes`: bytes of each array after it; together they are the buffers that follow the JSON."""

    sizes: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 30)]], Meta(max_length=MOST_ARRAYS)] = []


def decoded(decoder: msgspec.json.Decoder[T], text: bytes | bytearray | msgspec.Raw) -> T:
    """Return a message. Raises CSDRankError, whose text repeats nothing of the content."""
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as e:
        what = str(e) if str(e).startswith(OUR_WORDS) else "unknown fields or values"  # which would be the other side's
        raise CSDRankError(f"a message cannot be understood: {what}") from None
    except (ValueError, RecursionError):  # also UnicodeDecodeError
        raise CSDRankError("a message cannot be understood: it is no JSON") from None
