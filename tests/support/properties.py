"""Properties, checked by hypothesis: how many examples each tier draws, the same ones in every run but soak's."""

from hypothesis import settings
from hypothesis.internal.conjecture import providers

EXAMPLES = {"quick": 40, "test": 40, "ci": 200, "soak": 5000}


def assume(tier):
    """Draw the examples of this tier."""
    # Hypothesis would also draw constants of our source. It parses all modules for them, which takes a second and fills
    # a folder here, and the examples would depend on which modules are loaded.
    providers._get_local_constants = lambda: providers._local_constants
    settings.register_profile(
        tier, max_examples=EXAMPLES[tier], deadline=None, derandomize=tier != "soak", database=None
    )
    settings.load_profile(tier)
