"""Checks what LiveStep promises, at each transition of each step that a test takes."""

import functools

NEED_NO_LOCK = {"keep", "undo", "take_back"}


def watch():
    """Check in this process from now on. May be called again."""
    from csd_optim.step.live import LiveStep

    for name in ("begin", "launch", "confirm", "request", "run", "land", *NEED_NO_LOCK):
        transition = getattr(LiveStep, name, None)
        if transition and not hasattr(transition, "__wrapped__"):
            setattr(LiveStep, name, _checked(transition))


def _checked(transition):
    @functools.wraps(transition)
    def checked(live, *arguments, **named):
        was, taken = live.phase.name, live.history.steps_taken
        assert transition.__name__ in NEED_NO_LOCK or live.engine.lock._is_owned()
        try:
            return transition(live, *arguments, **named)
        finally:
            with live.engine.lock:
                _check(live, was, taken)

    return checked


def _check(live, was, taken):
    """`was`, `taken`: the phase, and the number of steps taken, before the transition."""
    engine, history, now = live.engine, live.history, live.phase.name
    under_way = now in ("GUESS", "OPEN", "STEP")
    has_tiles = bool(len(live.travel.tiles))
    assert engine.stepping == under_way or not has_tiles or engine.closed or history.undoing, (was, now)
    assert engine.is_speculative <= under_way or history.undoing, (was, now)
    assert engine.is_speculative or now not in ("GUESS", "OPEN"), (was, now)
    assert now != "GUESS" or not engine.native.undone()  # nothing that a program can see has been written
    assert live.votes_later or now not in ("LANDED", "FAILED"), (was, now)
    if now in ("KEPT", "LANDED") and was not in ("KEPT", "LANDED"):
        assert history.steps_taken == taken + 1
