"""value_exchange: which non-tensor values travel, against all transfers one by one."""

from hypothesis import given
from hypothesis import strategies as st

from shardplan.planning import LoadItemType, LoadPlan, MetadataIndex, ReadItem, Transfer
from shardplan.planning.storage import value_exchange

WORLD = 3
INSIDE = "inside"  # a value that is kept with the metadata
NAMES = st.sampled_from(["a", "b", INSIDE])
# Per value and rank that wants it, the rank that reads it.
WANTED = st.dictionaries(st.tuples(NAMES, st.integers(0, WORLD - 1)), st.integers(0, WORLD - 1))


def read(name):
    return ReadItem(
        LoadItemType.BYTE_IO, MetadataIndex(f"my.{name}"), (), MetadataIndex(name), (), ()
    )


def plan_of(wanted, rank):
    """Return the plan of one rank: its own reads, and the transfers that it takes part in."""
    own = [read(name) for (name, to), source in wanted.items() if to == rank == source]
    moved = [
        Transfer(read(name), source, to)
        for (name, to), source in wanted.items()
        if source != to and rank in (source, to)
    ]
    return LoadPlan(own, transfers=moved)


@given(WANTED)
def test_each_rank_gets_every_value_it_wants_and_what_is_sent_is_expected(wanted):
    parts = [
        value_exchange(plan_of(wanted, rank), rank, lambda name: int(name != INSIDE))
        for rank in range(WORLD)
    ]
    for rank, part in enumerate(parts):
        mine = sorted(name for name, to in wanted if to == rank)
        assert sorted(value.name for value in part.wanted) == mine
        assert all(value.dest == f"my.{value.name}" for value in part.wanted)
        arriving = {name for source in part.sources for name in parts[source].send.get(rank, ())}
        have = {value.name for value in part.alone} | set(part.read) | arriving
        assert have >= set(mine)
        assert INSIDE not in arriving
        expected = {s for (name, to), s in wanted.items() if to == rank != s and name != INSIDE}
        assert set(part.sources) == expected
