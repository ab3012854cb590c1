"""Pictures: how a tensor is cut, which saved chunk goes where, who reads how much.

Every picture is SVG text, made by a pure function, and shown by notebooks as it is.
"""

from ..reports import traffic_matrix
from .charts import draw_bytes, draw_traffic
from .svg import Picture
from .tensors import draw_reshard, draw_tiling

__all__ = [
    "Picture", "draw_bytes", "draw_reshard", "draw_tiling", "draw_traffic", "traffic_matrix",
]  # fmt: skip
