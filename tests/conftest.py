"""Hypothesis profiles, quick by default, and a real S3 endpoint on loopback."""

import json
import logging
import os
import threading

import pytest
from hypothesis import settings

# In CI the quick examples are the same every time: a red run is then about the change.
settings.register_profile(
    "quick", max_examples=50, deadline=None, derandomize=bool(os.environ.get("CI"))
)
settings.register_profile(
    "thorough", max_examples=2_000, deadline=None, derandomize=False, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


class S3Server:
    """moto's server, with a log of requests and a way to refuse some of them.

    Attributes:
        endpoint: Its address.
        options: What `open_store` needs to reach it.
        requests: (method, path, query, range header, length) of each request so far.
        refuse: Called with each request as logged; those it accepts are answered with 403.
    """

    bucket = "bucket"

    def __init__(self):
        server = pytest.importorskip("moto.server")
        boto3 = pytest.importorskip("boto3")
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.requests, self.refuse = [], None
        self._app = server.DomainDispatcherApplication(server.create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        keys = {"access_key_id": "test", "secret_access_key": "test"}
        self.options = keys | {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "client_options": {"allow_http": True},
        }
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            **{f"aws_{name}": value for name, value in keys.items()},
        )
        self.client.create_bucket(Bucket=self.bucket)

    def _answer(self, environ, start_response):
        names = ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_RANGE", "CONTENT_LENGTH")
        request = tuple(environ.get(name, "") for name in names)
        self.requests.append(request)
        if self.refuse and self.refuse(request):
            environ["wsgi.input"].read(int(request[-1] or 0))
            start_response("403 Forbidden", [("Content-Length", "0")])
            return [b""]
        return self._app(environ, start_response)

    def unfinished_uploads(self):
        """Return the names of files whose upload was begun and neither completed nor aborted."""
        found = self.client.list_multipart_uploads(Bucket=self.bucket)
        return [upload["Key"] for upload in found.get("Uploads", [])]

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="session")
def s3_server():
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server):
    """A real S3 endpoint over HTTP; its log is empty and it refuses nothing."""
    s3_server.requests.clear()
    yield s3_server
    s3_server.refuse = None


def old_manifest(folder, version=2):
    """Return the manifest of a checkpoint as versions 1 and 2 wrote it: by lists alone."""
    from shardplan.io.formats import open_source
    from shardplan.io.formats.native.manifest import sign
    from shardplan.planning import to_json

    source = open_source(folder)
    body = json.loads((folder / "shardplan.json").read_text())
    files, entries = source.manifest.files, source.manifest.entries
    layouts = [
        {"size": list(layout.size), "offsets": t.offsets.tolist(), "sizes": t.sizes.tolist()}
        if "cuts" not in new
        else {"size": list(layout.size), "cuts": [c.tolist() for c in t.cuts]}
        for new, layout in zip(body["layouts"], entries.layouts, strict=True)
        for t in (layout.tiling,)
    ]
    tensors = entries.layout >= 0
    old = body | {
        "files": {
            "names": list(files.names),
            "sizes": files.sizes.tolist(),
            "headers": files.headers.tolist(),
            "xxh3_64": [f"{digest:016x}" for digest in files.digests],
        },
        "layouts": layouts,
        "places": [place.tolist() for place in source.manifest.places],
        "tensors": {
            "names": body["tensors"]["names"],
            "properties": entries.prop[tensors].tolist(),
            "layouts": entries.layout[tensors].tolist(),
            "places": source.manifest.place[tensors].tolist(),
        },
        "planner_data": to_json(source.metadata.planner_data, ""),
        "sums": "".join(f"{int(x):016x}" for name in entries for x in source.sums_of(name)),
    }
    rest = {k: v for k, v in old.items() if k not in ("format", "version", "xxh3_64")}
    return sign(json.dumps(rest, separators=(",", ":")).encode()[1:], version)


@pytest.fixture
def as_old():
    """Give a function that rewrites the manifest of a checkpoint in version 2."""

    def rewrite(folder):
        (folder / "shardplan.json").write_bytes(old_manifest(folder))
        return folder

    return rewrite
