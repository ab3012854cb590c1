"""Save into a real S3 endpoint behind a proxy that fails: the verdict is what is there.

``hold(count)``: so many saves, over an older checkpoint or where nothing is, and as many loads.
The proxy refuses, drops connections before and after the service has answered, cuts bodies, sends
requests twice, and waits.
"""

import contextlib
import http.client
import http.server
import random
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

from common import DOCUMENTED, Row, state, value_of

import shardplan
from shardplan.io import UnsureCommitError
from shardplan.io.stores import open_store

FAULTS = (
    "throttled",
    "error",
    "dropped",
    "lost",
    "late error",
    "midway",
    "shorter",
    "twice",
    "slow",
)
RETRY = {
    "retry_timeout": timedelta(seconds=5),
    "backoff": {
        "init_backoff": timedelta(milliseconds=1),
        "max_backoff": timedelta(milliseconds=5),
        "base": 2,
    },
}
BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a service, a share of them with a fault.

    Attributes:
        share: How many of all requests get a fault, from 0 to 1.
        done: How often each fault was done.
    """

    daemon_threads = True

    def __init__(self, service, seed):
        super().__init__(("127.0.0.1", 0), Passing)
        self.service, self.share, self.done = service, 0.0, Counter()
        self.chance = random.Random(seed)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def choose(self):
        """Return a fault, or None."""
        fault = self.chance.choice(FAULTS) if self.chance.random() < self.share else None
        self.done[fault] += 1
        return fault

    def handle_error(self, request, client_address):
        """Say nothing of connections that were dropped."""


class Passing(http.server.BaseHTTPRequestHandler):
    """Passes one request on."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def pass_on(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.choose()
        if fault == "slow":
            time.sleep(0.05)
        if fault == "dropped":
            return self.drop()
        if fault in ("throttled", "error"):
            return self.answer(503 if fault == "throttled" else 500, [], BUSY)
        if fault == "twice":
            self.ask(body)
        status, headers, found = self.ask(body)
        if fault == "lost":
            return self.drop()
        if fault == "late error":
            return self.answer(500, [], BUSY)
        if fault == "shorter" and self.command == "GET":
            found = found[: len(found) // 2]
        return self.answer(status, headers, found, cut=fault == "midway")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

    def ask(self, body):
        """Ask the service; return its status, headers and body."""
        connection = http.client.HTTPConnection(*self.server.service)
        connection.request(self.command, self.path, body, dict(self.headers))
        with contextlib.closing(connection), connection.getresponse() as answer:
            return answer.status, answer.getheaders(), answer.read()

    def answer(self, status, headers, body, *, cut=False):
        """Answer; or only half, and then drop the connection."""
        own = {"content-length", "transfer-encoding", "connection", "date", "server"}
        length = {name.lower(): value for name, value in headers}.get("content-length", "0")
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in own:
                self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.drop()

    def drop(self):
        """Drop the connection without another word."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(2)

    def log_message(self, format, *arguments):
        """Say nothing."""


def one_save(number, clean, faulty, proxy):
    """Save behind the proxy; return the verdict, and what is wrong, if anything."""
    old = bool(number % 2)
    if old:
        shardplan.save(state(1), clean)
    proxy.share = 0.3
    try:
        shardplan.save(state(2), faulty, overwrite=old)
        verdict, allowed = "ok", {2}
    except UnsureCommitError:
        verdict, allowed = "unsure", {1, 2} if old else {None, 2}
    except DOCUMENTED:
        verdict, allowed = "failed", {1} if old else {None}
    finally:
        proxy.share = 0.0
    there = value_of(clean) if clean.exists("shardplan.json") else None
    if there not in allowed:
        return verdict, f"the verdict is {verdict}, but {there} is there"
    return verdict, ""


def one_load(clean, faulty, proxy):
    """Load behind the proxy; return what is wrong, if anything."""
    proxy.share = 0.3
    try:
        value = value_of(faulty)
    except DOCUMENTED:
        return ""
    finally:
        proxy.share = 0.0
    return "" if value == value_of(clean) else f"{value} was loaded"


def afterwards(clean):
    """Save once more and clean up; return what is wrong, if anything."""
    shardplan.save(state(3), clean, overwrite=True)
    shardplan.prune(clean, keep_last=1, min_age=0)
    left = [name for name in clean.list() if name != "shardplan.json"]
    source = shardplan.verify(clean)
    wrong = "" if source.ok and value_of(clean) == 3 else "the next save is not whole"
    return wrong or (f"{left} are left" if len(left) > 1 else "")


def hold(count):
    """Save and load so often; return a row for each."""
    sys.path.append(str(Path(__file__).parents[1]))
    from conftest import S3Server

    server, wrong, verdicts = S3Server(), [], Counter()
    host, port = server.endpoint.removeprefix("http://").split(":")
    proxy = Proxy((host, int(port)), seed=1)
    endpoint = {"endpoint": f"http://127.0.0.1:{proxy.server_port}"}
    loads = []
    for number in range(count):
        retries = {"retry_config": RETRY | {"max_retries": number % 3}}
        url = f"s3://{server.bucket}/trial-{number}"
        clean = open_store(url, **server.options)
        faulty = open_store(url, **server.options | endpoint | retries)
        verdict, fault = one_save(number, clean, faulty, proxy)
        verdicts[verdict] += 1
        after = afterwards(clean)
        wrong += [f"trial {number}: {text}" for text in (fault, after) if text]
        loads += filter(None, [one_load(clean, faulty, proxy)])
    proxy.shutdown()
    server.close()
    note = ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items()))
    faults = sum(n for fault, n in proxy.done.items() if fault)
    return [
        Row("saves into S3 behind a faulty proxy", count, tuple(wrong), note),
        Row("loads from it", count, tuple(loads), f"{faults} faults in all"),
    ]
