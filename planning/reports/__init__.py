"""What will it cost, who wrote this, why is it read, what changed? Answers that print as tables."""

from .costs import CostModel, FileCost, RankCost, Totals
from .diff import Difference, PlanDiff, plan_diff
from .explain import Report, explain
from .why import ElementRead, Why, why
from .writers import Writers, writers_of

__all__ = [
    "CostModel",
    "Difference",
    "ElementRead",
    "FileCost",
    "PlanDiff",
    "RankCost",
    "Report",
    "Totals",
    "Why",
    "Writers",
    "explain",
    "plan_diff",
    "why",
    "writers_of",
]
