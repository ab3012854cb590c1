"""What plans cost, who wrote a chunk, why it is read, what changed; answers print as tables."""

from .diff import Difference, PlanDiff, plan_diff
from .explain import CostModel, Report, Totals, explain, figures
from .explore import explorer_data
from .origins import ElementRead, Why, Writers, why, writers_of
from .reshard import traffic_blocks, traffic_matrix
from .show import Amount, Change, PlannerTrace, StepTrace, show, traced
from .traffic import FileCost, RankCost

__all__ = [
    "Amount", "Change", "CostModel", "Difference", "ElementRead", "FileCost", "PlanDiff",
    "PlannerTrace", "RankCost", "Report", "StepTrace", "Totals", "Why", "Writers", "explain",
    "explorer_data", "figures", "plan_diff", "show", "traced", "traffic_blocks", "traffic_matrix",
    "why", "writers_of",
]  # fmt: skip
