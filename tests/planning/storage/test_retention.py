"""Which checkpoints of a run stay, and which go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning.storage import Policy, RunEntry, retain

ENTRIES = st.lists(
    st.builds(
        RunEntry,
        st.from_regex(r"(step-)?[0-9]{1,3}", fullmatch=True),
        st.none() | st.integers(0, 3).map(float),
        st.booleans(),
    ),
    unique_by=lambda entry: entry.name,
    max_size=8,
)


def loadable(entries):
    return {e.name: e.created for e in entries if e.whole and e.created is not None}


@given(ENTRIES, st.integers(1, 5))
def test_as_many_stay_as_the_policy_says_and_all_others_that_are_whole_go(entries, count):
    keep, drop = retain(entries, Policy(count))
    whole = loadable(entries)
    assert len(keep) == min(count, len(whole))
    assert sorted(keep + drop) == sorted(whole)


@given(ENTRIES, st.integers(1, 5))
def test_the_last_loadable_one_never_goes(entries, count):
    keep, drop = retain(entries, Policy(count))
    assert keep or not drop


@given(ENTRIES, st.integers(1, 5))
def test_none_that_goes_is_newer_than_one_that_stays(entries, count):
    keep, drop = retain(entries, Policy(count))
    when = loadable(entries)
    assert all(when[old] <= when[new] for old in drop for new in keep)


@given(ENTRIES, st.integers(1, 5))
def test_once_pruned_nothing_more_goes(entries, count):
    keep, drop = retain(entries, Policy(count))
    left = [entry for entry in entries if entry.name not in drop]
    assert retain(left, Policy(count)) == (keep, ())


def test_of_one_time_the_larger_number_is_newer():
    steps = [RunEntry("step-10", 1.0), RunEntry("step-9", 1.0)]
    assert retain(steps, Policy(1)).keep == ("step-10",)


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (True, TypeError), (1.5, TypeError)])
def test_a_policy_that_keeps_no_whole_number_is_refused(count, error):
    with pytest.raises(error, match="keep_last"):
        Policy(count)
