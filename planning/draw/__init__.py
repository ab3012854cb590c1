"""Show me: how a tensor is cut, which saved chunk goes where, who reads how much.

Every picture is SVG text, made by a pure function and shown by notebooks as it is.
"""

from .bars import draw_bytes
from .matrix import traffic_matrix
from .reshards import draw_reshard
from .svg import Picture
from .tilings import draw_tiling
from .traffic import draw_traffic

__all__ = [
    "Picture",
    "draw_bytes",
    "draw_reshard",
    "draw_tiling",
    "draw_traffic",
    "traffic_matrix",
]
