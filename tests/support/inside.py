"""What tests see of an optimizer's inside.

Most tests need only what a user sees. For those that replace a part of the package, or look at what no user can, each
private attribute is read here, in one place. tests/test_house.py counts those that are read elsewhere.
"""


def engine_of(opt):
    """Return the engine that drives the optimizer's devices."""
    return opt._engine


def idle_engine_of(opt):
    """Return the engine when no step is in flight any more; with overlap on ranks, a collective."""
    return opt._settled_engine()


def state_map_of(opt):
    """Return which parameter's states are where."""
    return opt._state_map


def steps_of(opt):
    """Return what the optimizer's steps share: it prepares and undoes them."""
    return opt._steps


def mode_of(opt):
    """Return how steps overlap with the model: the last call of overlap() chose it."""
    return opt._mode


def flight_of(opt):
    """Return the step whose parameters are still arriving, or None."""
    return mode_of(opt)._flight


def together_of(opt):
    """Return how ranks agree on the steps that go on behind the program."""
    return mode_of(opt).together


def vote_of(opt):
    """Return the vote on the last step that went on behind the program, until the ranks have met."""
    return together_of(opt).vote


def images_back(flight):
    """Return the tiles of a step whose parameters have come back from their images."""
    return {*flight.live.travel.images} - flight.live.travel._not_pulled


def unguarded_rows(overlap):
    """Return the rows of parameters for which step() waits, as no module that uses them does."""
    return {*overlap._unguarded}


def guess_of(opt):
    """Return the step that has begun in backward, or None."""
    early = getattr(mode_of(opt), "_early", None)
    return early and early._guess


def pusher_of(opt):
    """Return the thread that sends gradients in backward, before step() is called."""
    return mode_of(opt)._early._pusher


def committed_in(committer):
    """Return what the next commit would write: whether the manifests, and which residuals, by parameter."""
    return not committer.manifests.written, [*committer.residuals.changed(committer.states.residuals)]


def forget_manifests(committer):
    """Let the next commit write no manifests, whatever has changed in them."""
    committer.manifests.written = True
