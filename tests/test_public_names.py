"""The public names: what users import stays where it is, whatever moves behind it."""

import json
from importlib import import_module
from pathlib import Path

import pytest

NAMES = json.loads((Path(__file__).parent / "public-names.json").read_text())


@pytest.mark.parametrize("module", NAMES)
def test_no_public_name_is_lost(module):
    there = import_module(module)
    assert [name for name in NAMES[module] if not hasattr(there, name)] == []
    assert set(there.__all__) >= set(NAMES[module])
