"""What owners answer, checked before a trainer uses it: a malformed answer raises a CSDError and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .. import errors
from ..errors import CSDError, CSDOSError, CSDRankError
from .values import unpacked

MAX_OWNERS = 4096
MAX_COUNT = 1 << 53  # of steps and the like: what JSON carries exactly
MAX_ERRNO = 4095  # the kernel's own limit


def error_message(e: BaseException) -> dict[str, Any]:
    """Encode an error as a message for the other side."""
    kind = next((c.__name__ for c in type(e).__mro__ if c.__name__ in vars(errors)), "CSDRankError")
    text = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
    return {"error": kind, "errno": getattr(e, "errno", None) or 5, "text": text}


def raise_if_error(reply: dict[str, Any]) -> None:
    """Raise the error that a message from the other side encodes, if it does."""
    if "error" not in reply:
        return
    kind = getattr(errors, str(reply["error"]), None)
    if not (isinstance(kind, type) and issubclass(kind, CSDError)):
        kind = CSDRankError
    text, code = f"{reply.get('text')} (said by the optimizer ranks)", reply.get("errno")
    code = code if type(code) is int and 0 < code <= MAX_ERRNO else 5
    raise kind(code, text) if issubclass(kind, CSDOSError) else kind(text)


def raise_if_over(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the reply. Raises CSDRankError if it says that the session is over."""
    if "over" in reply:
        raise CSDRankError(str(reply["over"]))
    return reply


def number_in(answer: dict[str, Any], name: str, least: int, most: int, default: int | None = None) -> int:
    """Return an integer of an answer; `default` if there is none. Raises CSDRankError if it is anything else."""
    value = answer.get(name, default)
    if type(value) is int and least <= value <= most:
        return value
    raise _malformed(f"{name} is {value!r}")


def owners_in(answer: dict[str, Any]) -> int:
    """Return the number of owners that grant a session. Raises their error if they refuse it, CSDRankError."""
    raise_if_error(answer)
    return number_in(answer, "owners", 1, MAX_OWNERS)


def grad_norm_in(reply: dict[str, Any]) -> float | None:
    """Return the norm of the gradients in a reply to "step". Raises CSDRankError if it is no number."""
    norm = reply.get("grad_norm")
    if norm is None or type(norm) in (int, float):
        return norm
    raise _malformed(f"grad_norm is {norm!r}")


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn errors from using a part of an answer into CSDRankError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        if isinstance(e, CSDError):
            raise
        raise _malformed(f"{what}: {type(e).__name__}: {e}") from e


def check_open_reply(reply: dict[str, Any], groups: int, params: int) -> None:
    """Raise CSDRankError unless a reply to "open" describes this many groups and parameters."""
    number_in(reply, "committed_step", 0, MAX_COUNT)
    kept, steps = reply.get("groups"), reply.get("steps")
    if not isinstance(reply.get("recovered"), bool) or not isinstance(kept, list) or not isinstance(steps, list):
        raise _malformed("a part of it is missing")
    if len(kept) != groups or not all(isinstance(group, dict) for group in kept):
        raise _malformed(f"it describes {len(kept)} parameter groups, not {groups}")
    if len(steps) != params or not all(isinstance(n, (int, float)) and 0 <= n <= MAX_COUNT for n in steps):
        raise _malformed(f"it describes {len(steps)} parameters, not {params}")
    states = unpacked(reply.get("user_states"))
    if not isinstance(states, list) or not all(isinstance(state, dict) for state in states):
        raise _malformed(f"user_states are {type(states).__name__}")


def check_state_list(reply: dict[str, Any], params: int, sections: tuple[str, ...]) -> list[Any]:
    """Return the list of states in a reply to "state". Raises CSDRankError if it names what there is not."""
    state_list = reply.get("states")
    try:
        known = all(
            type(index) is int and 0 <= index < params and 0 <= step <= MAX_COUNT and {*names} <= {*sections}
            for index, step, names in state_list or ()
        )
    except (TypeError, ValueError):
        known = False
    if not isinstance(state_list, list) or not known:
        raise _malformed("the list of states cannot be read")
    return state_list


def _malformed(why: str) -> CSDRankError:
    return CSDRankError(f"the optimizer ranks have sent an answer that cannot be read: {why[:200]}")
