"""What a meeting costs the coordinator and the store of a job of very many ranks.

One process makes the requests of all ranks to one real TCPStore, one after the other, so no rank
waits and the store is never idle: seconds are those in which the store can serve the meeting. The
coordinator's own seconds are those after the last rank has come, until all may read its answer.
"""

import argparse
import json
import time

import torch.distributed as dist

from shardplan.dist.rendezvous import Meetings, _Note

NOTE = 200  # bytes of what each rank says, and of the answer


class Asked:
    """A store that counts requests and their bytes."""

    def __init__(self, store):
        self.store, self.count, self.nbytes = store, 0, 0

    def __getattr__(self, name):
        def ask(*arguments):
            answer = getattr(self.store, name)(*arguments)
            sizes = [len(a) for a in (*arguments, answer) if isinstance(a, (str, bytes))]
            self.count, self.nbytes = self.count + 1, self.nbytes + sum(sizes)
            return answer

        return ask


def measure(server, n):
    """Return what meetings of ``n`` ranks cost: one that goes well, one without coordinator."""
    stores = [Asked(dist.PrefixStore(f"{n}", server.clone())) for _ in range(2)]
    ranks = [Meetings(stores[rank > 0], rank, 0, range(n), 60.0) for rank in range(n)]
    come = _Note("a step", bytes(NOTE), {})
    start = time.perf_counter()
    for meetings in ranks[1:]:
        meetings.number = 1
        meetings._come(come)
    all_came = time.perf_counter()
    ranks[0].open("a step", bytes(NOTE))
    ranks[0].close([bytes(NOTE)])
    answered = time.perf_counter()
    for meetings in ranks[1:]:
        meetings._heard(meetings._verdict(1)[1])
        meetings._forget([], 1)
    ranks[0].worker.call(lambda: None, 60)
    end = time.perf_counter()
    coordinator, others = stores
    report = {
        "ranks": n,
        "coordinator_seconds": answered - all_came,
        "coordinator_requests": coordinator.count,
        "requests_per_rank": others.count / (n - 1),
        "bytes_per_rank": (coordinator.nbytes + others.nbytes) / n,
        "seconds": end - start,
    }
    for meetings in ranks[1:]:
        meetings.number, meetings.timeout = 2, 0.01
        meetings._come(come)
    before, start = others.count, time.perf_counter()
    lost = ranks[1]._inquest("a step")
    ranks[1]._decide(2, lost)
    report["seconds_to_name_the_lost"] = time.perf_counter() - start
    for meetings in ranks[2:]:
        others.add("2/inquest", 1)
        meetings._verdict(2)
    report["requests_if_lost_per_rank"] = (others.count - before) / (n - 1)
    assert list(lost) == [0]
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    reports = [measure(server, n) for n in args.ranks]
    if args.json:
        print(json.dumps(reports, indent=1))
        return
    for name in reports[0]:
        print(f"{name:>28}", *(f"{report[name]:>12,.5g}" for report in reports))


if __name__ == "__main__":
    main()
