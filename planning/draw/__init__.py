"""Pictures: how a tensor is cut, which saved chunk goes where, who reads how much.

Every picture is SVG text, made by a pure function, and shown by notebooks as it is.
"""

from ..reports import traffic_matrix
from .charts import draw_bytes, draw_traffic
from .pictures import draw_reshard, draw_tiling
from .svg import Picture

__all__ = [
    "Picture", "draw_bytes", "draw_reshard", "draw_tiling", "draw_traffic", "traffic_matrix",
]  # fmt: skip
