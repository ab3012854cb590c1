"""Hypothesis strategies for plans: the public name of `planning.testing.strategies`."""

from .testing.strategies import *  # noqa: F403
from .testing.strategies import __all__ as __all__
