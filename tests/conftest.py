"""Hypothesis profiles: quick by default, HYPOTHESIS_PROFILE=thorough on demand."""

import os

from hypothesis import settings

# In CI the quick examples are the same every time: a red run is then about the change.
settings.register_profile(
    "quick", max_examples=50, deadline=None, derandomize=bool(os.environ.get("CI"))
)
settings.register_profile(
    "thorough", max_examples=2_000, deadline=None, derandomize=False, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
