"""What plans cost, who wrote a chunk, why it is read, what changed; answers print as tables."""

from .diff import Difference, PlanDiff, plan_diff
from .explain import CostModel, Report, Totals, explain, figures
from .origins import ElementRead, Why, Writers, why, writers_of
from .reshard import traffic_blocks, traffic_matrix
from .traffic import FileCost, RankCost

__all__ = [
    "CostModel", "Difference", "ElementRead", "FileCost", "PlanDiff", "RankCost", "Report",
    "Totals", "Why", "Writers", "explain", "figures", "plan_diff", "traffic_blocks",
    "traffic_matrix", "why", "writers_of",
]  # fmt: skip
