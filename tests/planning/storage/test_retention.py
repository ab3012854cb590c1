"""Which checkpoints of a run stay, and which go."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning.storage import Best, Keep, LeftFile, RunEntry, retain, retain_files

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
    keep, drop = retain(entries, Keep(count))
    whole = loadable(entries)
    assert len(keep) == min(count, len(whole))
    assert sorted(keep + drop) == sorted(whole)


@given(ENTRIES, st.integers(1, 5))
def test_the_last_loadable_one_never_goes(entries, count):
    keep, drop = retain(entries, Keep(count))
    assert keep or not drop


@given(ENTRIES, st.integers(1, 5))
def test_none_that_goes_is_newer_than_one_that_stays(entries, count):
    keep, drop = retain(entries, Keep(count))
    when = loadable(entries)
    assert all(when[old] <= when[new] for old in drop for new in keep)


@given(ENTRIES, st.integers(1, 5))
def test_once_pruned_nothing_more_goes(entries, count):
    keep, drop = retain(entries, Keep(count))
    left = [entry for entry in entries if entry.name not in drop]
    assert retain(left, Keep(count)) == (keep, ())


def test_of_one_time_the_larger_number_is_newer():
    steps = [RunEntry("step-10", 1.0), RunEntry("step-9", 1.0)]
    assert retain(steps, Keep(1)).keep == ("step-10",)


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (True, TypeError), (1.5, TypeError)])
def test_a_policy_that_keeps_no_whole_number_is_refused(count, error):
    with pytest.raises(error, match="keep_last"):
        Keep(count)


# Keep by step and by metric

RUN = st.lists(
    st.builds(
        RunEntry,
        st.integers(0, 40).map("step-{}".format),
        st.integers(0, 5).map(float),
        st.booleans(),
        st.integers(0, 40),
        st.dictionaries(st.just("loss"), st.sampled_from([0.5, 1.0, 2.0, math.nan]), max_size=1),
        st.booleans(),
    ),
    unique_by=lambda entry: entry.name,
    max_size=10,
)
POLICIES = st.builds(
    Keep,
    st.integers(1, 3),
    st.none() | st.integers(1, 10),
    st.none()
    | st.builds(Best, st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
)


def badness(entry, policy):
    """Return how bad an entry is by the policy's metric; NaN if that is not known."""
    value = entry.metrics.get("loss", math.nan)
    return value if policy.best is not None and policy.best.mode == "min" else -value


@given(RUN, POLICIES)
def test_what_is_loadable_stays_for_a_reason_or_goes(entries, policy):
    keep, drop = retain(entries, policy)
    assert sorted(keep + drop) == sorted(loadable(entries))
    whole = [entry for entry in entries if entry.whole]
    newest = sorted(whole, key=lambda e: (e.created, int(e.name[5:])))[-policy.last :]
    for entry in whole:
        better = sum(badness(other, policy) < badness(entry, policy) for other in whole)
        equal = sum(badness(other, policy) == badness(entry, policy) for other in whole)
        count = 0 if policy.best is None or not equal else policy.best.count
        must = entry in newest or entry.in_use or better + equal <= count > 0
        must |= policy.every is not None and entry.step % policy.every == 0
        may = better < count  # of equals, only some stay
        assert entry.name in keep if must else entry.name in drop or may


@given(RUN, POLICIES)
def test_the_newest_and_what_is_in_use_never_go(entries, policy):
    drop = set(retain(entries, policy).drop)
    assert not drop & {entry.name for entry in entries if entry.in_use}
    assert not loadable(entries) or drop < set(loadable(entries))


@given(RUN, POLICIES)
def test_the_best_never_goes(entries, policy):
    keep = set(retain(entries, policy).keep)
    if policy.best is not None:
        values = {
            e.name: e.metrics["loss"]
            for e in entries
            if e.whole and not math.isnan(e.metrics.get("loss", math.nan))
        }
        choose = min if policy.best.mode == "min" else max
        if values:
            assert choose(values.values()) in {values.get(name) for name in keep}


@given(RUN, POLICIES)
def test_the_order_of_entries_does_not_matter(entries, policy):
    assert retain(entries, policy) == retain(entries[::-1], policy)


FILES = st.lists(
    st.builds(
        LeftFile, st.text("ab", min_size=1), st.sampled_from("xyz"), st.integers(0, 4).map(float)
    ),
    unique_by=lambda file: file.name,
    max_size=8,
)


@given(FILES, st.integers(0, 4))
def test_files_of_a_save_go_together_and_only_if_all_are_old(files, before):
    keep, drop = retain_files(files, before)
    assert sorted(keep + drop) == sorted(file.name for file in files)
    for file in files:
        alike = [other.modified for other in files if other.save == file.save]
        assert (file.name in drop) is (max(alike) <= before)
