"""What the coordinator decides, each decision against looking at every pair of ranks."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import (
    LoadOffer,
    SaveOffer,
    compare_saves,
    conflicts,
    differing_loads,
    ranks_by_value,
    table_tag,
    unmatched_everywhere,
)

FEW = st.sampled_from(["", "a", "b"])
OFFERS = st.lists(st.builds(SaveOffer, FEW, FEW, FEW, FEW, FEW, FEW, FEW), min_size=1, max_size=4)
TABLES = st.lists(
    st.dictionaries(st.sampled_from(["x", "y", "y\0 at [2]"]), st.integers(0, 2)),
    min_size=1,
    max_size=5,
)


@given(OFFERS, st.integers(0, 3))
def test_a_plan_is_gathered_unless_all_ranks_have_the_same_one(offers, coordinator):
    coordinator %= len(offers)
    verdict = compare_saves(offers, range(len(offers)), coordinator)
    pairs = list(combinations(offers, 2))
    cached = all(o.cached for o in offers) and all(a.cached == b.cached for a, b in pairs)
    kinds = [[offer.described for offer in offers], [offer.templated for offer in offers]]
    tags = min(kinds, key=lambda tags: len({*tags}))
    assert verdict.by_template == (tags is kinds[1])
    derived = "" not in tags and (len({*tags}) == 1 or 2 * len({*tags}) <= len(tags))
    assert verdict.how == ("cached" if cached else "derived" if derived else "gathered")
    told = [tags[place] for place in verdict.describers]
    assert sorted(told) == (
        sorted({*tags}) if verdict.how == "derived" and len({*tags}) > 1 else []
    )
    assert verdict.save_id == offers[coordinator].save_id
    same = all((a.target, a.passes) == (b.target, b.passes) for a, b in pairs)
    assert (verdict.conflict == "") == same


@given(OFFERS)
def test_one_rank_speaks_for_each_table_of_values_and_none_if_all_are_equal(offers):
    speakers = compare_saves(offers, range(len(offers)), 0).speakers
    tables = [offer.held for offer in offers]
    if len(set(tables)) == 1:
        assert speakers == ()
    else:
        assert sorted(tables[place] for place in speakers) == sorted(set(tables))


@given(TABLES)
def test_a_name_conflicts_if_and_only_if_two_ranks_hold_different_data_under_it(tables):
    tags = [table_tag(table) for table in tables]
    found = conflicts(range(len(tables)), tags, tables)
    names = {name for table in tables for name in table}
    holders = {name: [r for r, table in enumerate(tables) if name in table] for name in names}
    expected = [
        (name.partition("\0")[0], ranks)
        for name, ranks in holders.items()
        if any(tables[a][name] != tables[b][name] for a, b in combinations(ranks, 2))
    ]
    assert sorted((issue.fqn, list(issue.ranks)) for issue in found) == sorted(expected)


@given(st.lists(FEW, min_size=1, max_size=6))
def test_ranks_are_listed_by_value_if_values_differ(values):
    text = ranks_by_value(range(len(values)), values)
    assert (text == "") == (len(set(values)) == 1)
    assert text == "" or text.count("; ") == len(set(values)) - 1


def test_one_checkpoint_may_be_at_two_places_and_one_place_hold_two():
    here, there = LoadOffer("1", "/here", ()), LoadOffer("1", "/there", ())
    assert differing_loads([here, there], (0, 1)) == ""
    text = differing_loads([here, LoadOffer("2", "/here", ())], (4, 6))
    assert text == "rank 4: /here, save 1; rank 6: /here, save 2"


@given(st.lists(st.sets(st.sampled_from("abc")), min_size=1, max_size=4))
def test_a_pattern_is_a_mistake_if_it_matches_on_no_rank(unmatched):
    offers = [LoadOffer("1", "x", tuple(patterns)) for patterns in unmatched]
    expected = [p for p in "abc" if all(p in patterns for patterns in unmatched)]
    assert list(unmatched_everywhere(offers)) == expected
