"""SVG as text: elements, colours, words that fit, and the card around a drawing.

There are no scripts, no styles from elsewhere and no ids (a notebook may show many pictures on one
page), and the same input gives the same bytes.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from ..text import human_bytes

INK, MUTED, PAPER, EDGE, EMPTY = "#1f2328", "#59636e", "#ffffff", "#d1d9e0", "#eceff2"

# Okabe and Ito's colours, which people with any colour vision can distinguish; grey for black.
PALETTE: Final = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#9aa4ae",
)  # fmt: skip
GREYS: Final = ("#d8dee4", "#b6bfc8")

# Viridis: even steps of lightness, so that it also reads in grey and with any colour vision.
_VIRIDIS: Final = (
    "#440154", "#482878", "#3e4989", "#31688e", "#26828e",
    "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725",
)  # fmt: skip

MARGIN: Final = 20.0
TOP: Final = 64.0  # where the drawing on a card begins
_LINE: Final = 17.0
_WIDEST: Final = 760.0  # how far a card grows to fit its subtitle


@attrs.frozen(repr=False)
class Picture:
    """A drawing as SVG text, with its title and how to read it; Jupyter shows it.

    >>> Picture("<svg/>", "w", "Four chunks.")
    Picture: w. Four chunks.
    """

    svg: str
    title: str
    caption: str

    def __str__(self) -> str:
        return self.svg

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Picture: {self.title}. {self.caption}".rstrip()


def number(value: float) -> str:
    """Write a coordinate with two decimals at most."""
    short = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if short == "-0" else short


def clean(text: str) -> str:
    """Replace characters that cannot be printed: XML forbids some, others reorder the text."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def element(tag: str, *children: str, **attributes: float | str | None) -> str:
    """Write one element; children are SVG already, attributes are escaped here."""
    words = [tag]
    for key, value in attributes.items():
        if value is not None:
            shown = clean(value) if isinstance(value, str) else number(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{html.escape(shown)}"')
    head = " ".join(words)
    return f"<{head}>{''.join(children)}</{tag}>" if children else f"<{head}/>"


def tag(name: str, words: str, **attributes: float | str | None) -> str:
    """Write an element that holds text."""
    return element(name, html.escape(clean(words), quote=False), **attributes)


def rect(
    x: float, y: float, width: float, height: float, fill: str, tip: str = "", **more: float | str
) -> str:
    """Draw a box; ``tip`` is shown when the pointer rests on it."""
    title = [tag("title", tip)] if tip else []
    return element("rect", *title, x=x, y=y, width=width, height=height, fill=fill, **more)


def text(x: float, y: float, words: str, *, anchor: str | None = None, **more: Any) -> str:
    """Write words; ``y`` is their base line."""
    return tag("text", words, x=x, y=y, text_anchor=anchor, **more)


def middle(x: float, y: float, words: str, fill: str, **more: Any) -> str:
    """Write words whose middle is at ``x``."""
    return text(x, y, words, anchor="middle", fill=fill, **more)


def upright(x: float, y: float, words: str) -> str:
    """Write words that run upwards, around a point."""
    return middle(x, y, words, MUTED, transform=f"rotate(-90 {x:.2f} {y:.2f})")


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, **more: float | str) -> str:
    """Draw a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **more)


def width_of(words: str, size: float) -> float:
    """Estimate how wide some words are, in the widest of the usual fonts."""
    narrow = sum(char in " .,:;'|!fijlrt[]()·" for char in words)
    wide = sum(c in "mwMW@%…→" or unicodedata.east_asian_width(c) in "WF" for c in words)
    return size * (0.38 * narrow + wide + 0.64 * (len(words) - narrow - wide))


def elide(words: str, width: float, size: float) -> str:
    """Shorten words from the middle until they fit: both ends of a tensor's name matter most.

    >>> elide("model.layers.10.mlp.weight", 100, 10)
    'model.la….weight'
    """
    words = clean(words)
    if width_of(words, size) <= width:
        return words
    most = min(len(words), int(width / (0.38 * size)) + 2)  # as many of the narrowest as fit
    for keep in range(most, 1, -1):
        short = f"{words[: keep // 2]}…{words[len(words) - (keep - keep // 2) + 1 :]}"
        if width_of(short, size) <= width:
            return short
    return "…"


def wrap(words: str, width: float, size: float) -> list[str]:
    """Break a text into lines that fit; a word too long for any line is shortened."""
    lines: list[str] = []
    for word in clean(words).split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and width_of(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(elide(word, width, size))
    return lines


def ramp(share: float) -> str:
    """Return viridis at ``share`` of its length, dark at 0 and light at 1."""
    at = min(max(share, 0.0), 1.0) * (len(_VIRIDIS) - 1)
    low = min(int(at), len(_VIRIDIS) - 2)
    pairs = zip(_channels(_VIRIDIS[low]), _channels(_VIRIDIS[low + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in pairs)


def colours_of(keys: Iterable[int]) -> dict[int, str]:
    """Give each of the first ranks its own colour of the palette, or many their place on a ramp.

    >>> colours_of([0, 2]), colours_of([8, 16])
    ({0: '#0072b2', 2: '#009e73'}, {8: '#440154', 16: '#fde725'})
    """
    known = sorted(set(keys))
    if not known or known[-1] < len(PALETTE):
        return {key: PALETTE[key] for key in known}
    return {key: ramp(i / max(1, len(known) - 1)) for i, key in enumerate(known)}


def ink_on(fill: str) -> str:
    """Return black or white, whichever reads better on a colour."""
    return "#000000" if luminance(fill) > 0.179 else "#ffffff"


def luminance(colour: str) -> float:
    """Return how light a colour is, from 0 to 1, as WCAG 2 defines it."""
    shares = [value / 255 for value in _channels(colour)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def block(count: int, most: int) -> int:
    """Return how many neighbours to draw as one so that ``most`` remain, evenly if possible.

    >>> block(8, 16), block(1024, 40), block(13, 4)
    (1, 32, 4)
    """
    least = max(1, -(-count // most))
    return next((k for k in range(least, 2 * least + 1) if count % k == 0), least)


def thin(places: Sequence[float], gap: float) -> list[int]:
    """Choose which of some ascending places to label, first and last always, so that none touch.

    >>> thin([0, 4, 10, 19, 20], 8)
    [0, 2, 4]
    """
    last, kept = len(places) - 1, [0][: len(places)]
    for i in range(1, last):
        if places[i] - places[kept[-1]] >= gap and places[last] - places[i] >= gap:
            kept.append(i)
    return [*kept, last] if last > 0 else kept


def span_names(count: int, step: int, names: Sequence[str] = ()) -> list[str]:
    """Name blocks of ranks, by their own names or by numbers."""
    known = names or [str(i) for i in range(count)]
    ends = [(low, min(low + step, count) - 1) for low in range(0, count, step)]
    return [known[a] if a == b else f"{known[a]}–{known[b]}" for a, b in ends]


def byte_tick(count: float) -> str:
    """Return a number of bytes without a needless decimal."""
    return human_bytes(count).replace(".0 ", " ")


def card(title: str, subtitle: str, body: str, caption: str, size: tuple[float, float]) -> Picture:
    """Put a drawing on paper of its own, so that it reads on light and dark pages alike."""
    width, bottom = size
    width = max(width, min(_WIDEST, width_of(clean(subtitle), 12) + 2 * MARGIN))
    room = width - 2 * MARGIN
    lines = wrap(caption, room, 12)
    height = bottom + _LINE * len(lines) + MARGIN
    parts = [
        tag("title", title),
        tag("desc", f"{subtitle}. {caption}"),
        rect(0.5, 0.5, width - 1, height - 1, PAPER, stroke=EDGE, rx=6),
        text(MARGIN, 30, elide(title, room, 16.5), font_size=15, font_weight=600, fill=INK),
        text(MARGIN, 50, elide(subtitle, room, 12), font_size=12, fill=MUTED),
        body,
    ]
    for i, words in enumerate(lines, 1):
        parts.append(text(MARGIN, bottom + _LINE * i, words, font_size=12, fill=MUTED))
    look: dict[str, float | str] = {
        "xmlns": "http://www.w3.org/2000/svg",
        "width": width,
        "height": height,
        "viewBox": f"0 0 {number(width)} {number(height)}",
        "role": "img",
        "font_family": "system-ui, sans-serif",
        "font_size": 11,
        "style": "max-width:100%;height:auto",
    }
    return Picture(element("svg", *parts, **look), clean(title), clean(caption))
