"""The examples of the page on training frameworks, which need these."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/integrations.md"


def test_the_examples_of_the_page_print_what_they_say():
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, tried = doctest.testfile(str(PAGE), module_relative=False, optionflags=options)
    assert (failed, tried > 20) == (0, True)
