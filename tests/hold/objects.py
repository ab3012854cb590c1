"""Save into a real object store behind a proxy that fails: the verdict is what is there.

``hold(count)``: so many saves, over an older checkpoint or where nothing is, and as many loads.
The proxy refuses, drops connections before and after the service has answered, cuts bodies, sends
requests twice, and waits. The stores are S3 (moto's server) and, if azurite is installed, Azure.
"""

import base64
import contextlib
import hmac
import http.client
import http.server
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path

import attrs
from common import DOCUMENTED, Row, state, value_of

import shardplan
from shardplan.io import UnsureCommitError
from shardplan.io.stores import open_store

# What azurite's own documentation gives as the account of every emulator.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
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


@attrs.frozen
class Service:
    """A running object store.

    Attributes:
        url: Where checkpoints may be saved.
        options: What `open_store` needs; ``endpoint`` is the service's own.
        close: Ends it.
    """

    url: str
    options: dict
    close: object

    @property
    def address(self):
        """Its host and port."""
        host, port = self.options["endpoint"].removeprefix("http://").partition("/")[0].split(":")
        return host, int(port)

    def behind(self, proxy):
        """Return the options to reach it through a proxy."""
        own = ":".join(map(str, self.address))
        endpoint = self.options["endpoint"].replace(own, f"127.0.0.1:{proxy.server_port}")
        return self.options | {"endpoint": endpoint}


def s3():
    """Start moto's server."""
    sys.path.append(str(Path(__file__).parents[1]))
    from conftest import S3Server

    server = S3Server()
    return Service(f"s3://{server.bucket}", server.options, server.close)


def azure(program):
    """Start azurite, and make a container."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = ("--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry")
    process = subprocess.Popen(
        [program, *flags, "--blobPort", str(port)], stdout=subprocess.DEVNULL
    )
    account = {"account_name": ACCOUNT, "account_key": KEY}
    endpoint = {"endpoint": f"http://127.0.0.1:{port}/{ACCOUNT}"}
    options = account | endpoint | {"client_options": {"allow_http": True}}
    end = time.monotonic() + 60
    while (status := make_container(port, "bucket")) != 201:
        assert time.monotonic() < end, f"azurite answers {status}"
        time.sleep(0.2)
    return Service("az://bucket", options, process.kill)


def make_container(port, name):
    """Ask azurite for a container; return the status, or None if it is not there yet."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    text = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    signed = hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
    try:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            path = f"/{ACCOUNT}/{name}?restype=container"
            connection.request("PUT", path, headers=headers | {"Content-Length": "0"})
            return connection.getresponse().status
    except OSError:
        return None


def try_service(service, count):
    """Save and load so often; return a row for each."""
    proxy, wrong, verdicts = Proxy(service.address, seed=1), [], Counter()
    loads, name = [], service.url.partition(":")[0]
    for number in range(count):
        retries = {"retry_config": RETRY | {"max_retries": number % 3}}
        url = f"{service.url}/trial-{number}"
        clean = open_store(url, **service.options)
        faulty = open_store(url, **service.behind(proxy) | retries)
        verdict, fault = one_save(number, clean, faulty, proxy)
        verdicts[verdict] += 1
        after = afterwards(clean)
        wrong += [f"trial {number}: {text}" for text in (fault, after) if text]
        loads += filter(None, [one_load(clean, faulty, proxy)])
    proxy.shutdown()
    service.close()
    note = ", ".join(f"{n} {verdict}" for verdict, n in sorted(verdicts.items()))
    faults = sum(n for fault, n in proxy.done.items() if fault)
    return [
        Row(f"saves into {name}:// behind a faulty proxy", count, tuple(wrong), note),
        Row(f"loads from {name}://", count, tuple(loads), f"{faults} faults in all"),
    ]


def hold(count):
    """Save into each store so often, and load as often; return rows."""
    rows, azurite = try_service(s3(), count), shutil.which("azurite-blob")
    return rows + (try_service(azure(azurite), count) if azurite else [])
