"""Shows examples in docstrings as code: griffe knows them only under a heading of their own."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Examples(Extension):
    """Puts every run of lines that begins with ``>>>`` into a block of code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of a function, class or module."""
        if obj.docstring is not None:
            text = _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
            obj.docstring.value = text
