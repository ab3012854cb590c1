"""What plans cost, who wrote a chunk, why it is read, what changed; answers print as tables."""

from .diff import Difference, PlanDiff, plan_diff
from .explain import CostModel, Report, Totals, explain, figures
from .reshard import traffic_blocks, traffic_matrix
from .traffic import FileCost, RankCost
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
    "figures",
    "plan_diff",
    "traffic_blocks",
    "traffic_matrix",
    "why",
    "writers_of",
]
