"""An S3 server as a process of its own (moto's), and a proxy before it that a test makes slow, faulty or absent."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import http.client
import importlib.util
import os
import pathlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree

import pytest

from smp.checkpoint import object_store
from tests.clock import wait_until
from tests.ports import free_port

PIECE = 64 << 10  # what the proxy passes on at a time
# Files of twice this many bytes go up in parts, of this many: as s3fs does with 50 MiB.
PART = 16 << 10


@dataclasses.dataclass
class Request:
    """A request as the proxy saw it; ``status`` is that of an answer which was handed over whole, None before."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    began: float
    size: int  # bytes of its body
    status: int | None = None
    applied: bool = False  # the server has done it

    @property
    def kind(self) -> str:
        """What it does: put, part, begin, complete, abort, get, list, delete, head, or the method."""
        if "uploadId" in self.query:
            return {"PUT": "part", "POST": "complete", "DELETE": "abort"}.get(self.method, self.method)
        if "uploads" in self.query:
            return "begin"
        if "delete" in self.query:
            return "delete"
        if self.method == "GET" and not self.key:
            return "list"
        return self.method.lower()


@dataclasses.dataclass
class Fault:
    """What becomes of a request.

    Attributes:
        delay: seconds before it is looked at.
        status: answered with this error instead of being passed on.
        cut: the connection ends there: ``before`` its body is read, in the ``middle`` of its body, when it is
            ``applied`` and before the answer, in the middle of the answer (``answering``).
        hold: waited for at that place.
        reached: set when the request has got to that place.
    """

    delay: float = 0.0
    status: int | None = None
    cut: str | None = None
    hold: threading.Event | None = None
    reached: threading.Event = dataclasses.field(default_factory=threading.Event)


Rule = Callable[[Request], Fault | None]


def nth(number: int, matches: Callable[[Request], object], fault: Fault) -> Rule:
    """Return a rule that does ``fault`` to the ``number``-th request that matches, from 0 on, and to no other."""
    seen, lock = [0], threading.Lock()

    def rule(request: Request) -> Fault | None:
        if not matches(request):
            return None
        with lock:
            seen[0] += 1
            return fault if seen[0] == number + 1 else None

    return rule


def share(part: float, fault: Fault, *, seed: int, matches: Callable[[Request], object] = lambda r: True) -> Rule:
    """Return a rule that does ``fault`` to this share of the requests that match."""
    random_, lock = random.Random(seed), threading.Lock()

    def rule(request: Request) -> Fault | None:
        with lock:
            return fault if matches(request) and random_.random() < part else None

    return rule


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server, but for what its rules say.

    Attributes:
        rules: asked in turn; the first fault is what is done.
        requests: all of them, in the order in which they came.
        rate: bytes of bodies per second and connection; None: as fast as it goes.
        away: every connection ends at once, as of a server that is not there.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, upstream: int):
        self.upstream = upstream
        self.rules: list[Rule] = []
        self.requests: list[Request] = []
        self.rate: float | None = None
        self.away = False
        super().__init__(("127.0.0.1", free_port()), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault_of(self, request: Request) -> Fault:
        """What the rules say of a request."""
        found = [rule(request) for rule in list(self.rules)]  # each counts, whoever is first
        return next((fault for fault in found if fault is not None), Fault())

    def answered(self, kind: str, ending: str = "") -> list[str]:
        """Keys, ending so, of requests of this kind that were answered with success, in order."""
        return [r.key for r in list(self.requests) if r.kind == kind and r.status and r.status < 300 and
                r.key.endswith(ending)]  # fmt: skip

    def verify_request(self, request, client_address) -> bool:
        """Leave connections to a server that is away unanswered."""
        return not self.away

    def handle_error(self, request, client_address) -> None:
        """Say nothing: clients that are killed leave broken connections."""


class _CutError(Exception):
    """The connection ends here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def setup(self) -> None:
        super().setup()
        self._upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream)

    def finish(self) -> None:
        self._upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format, *args) -> None:
        """Say nothing."""

    def handle_expect_100(self) -> bool:
        """Wait with it until the fault of the request is known."""
        return True

    def _answer(self) -> None:
        address = urlsplit(self.path)
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        size = int(self.headers.get("Content-Length") or 0)
        query = dict(parse_qsl(address.query, keep_blank_values=True))
        request = Request(self.command, bucket, key, query, time.monotonic(), size)
        self.server.requests.append(request)
        fault = self.server.fault_of(request)
        try:
            if self.server.away:
                raise _CutError
            self._serve(request, fault)
        except (_CutError, OSError, http.client.HTTPException):
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer  # noqa: N815  the library's names

    def _place(self, name: str, fault: Fault) -> None:
        if fault.cut == name:
            fault.reached.set()
            if fault.hold is not None:
                fault.hold.wait()
            raise _CutError

    def _slowly(self, count: int) -> None:
        if self.server.rate is not None:
            time.sleep(count / self.server.rate)

    def _body(self, size: int) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        parts: list[bytes] = []
        while size > 0:
            part = self.rfile.read(min(size, PIECE))
            if not part:
                raise _CutError
            self._slowly(len(part))
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _serve(self, request: Request, fault: Fault) -> None:
        time.sleep(fault.delay)
        self._place("before", fault)
        if fault.cut == "middle":
            self._body(request.size // 2)
            self._place("middle", fault)
        body = self._body(request.size)
        if fault.status is not None:
            self._refuse(request, fault.status)
            return
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("expect", "connection")}
        self._upstream.request(self.command, self.path, body=body, headers=headers)
        answer = self._upstream.getresponse()
        content = answer.read()
        request.applied = answer.status < 300
        self._place("applied", fault)
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        length = answer.headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
        if answer.status not in (204, 304):
            self.send_header("Content-Length", length)
        self.end_headers()
        if fault.cut == "answering":
            self.wfile.write(content[: len(content) // 2])
            self._place("answering", fault)
        if self.command != "HEAD":
            for start in range(0, len(content), PIECE):
                self._slowly(min(PIECE, len(content) - start))
                self.wfile.write(content[start : start + PIECE])
        request.status = answer.status

    def _refuse(self, request: Request, status: int) -> None:
        code = "SlowDown" if status == 503 else "InternalError"
        text = f"<Error><Code>{code}</Code><Message>Injected by the test.</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)
        request.status = status


class Server:
    """A running S3 server with one bucket of the test's own."""

    def __init__(self, port: int, bucket: str):
        self.port, self.bucket = port, bucket

    @property
    def url(self) -> str:
        """Of the bucket."""
        return f"s3://{self.bucket}"

    def _ask(self, method: str, key: str = "", *, query: str = "", body: bytes = b"") -> bytes:
        """Ask the server itself and not the proxy; without a client, which takes longer to make than a small job."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as connection:
            signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
            connection.request(method, f"/{self.bucket}/{quote(key)}{query}", body, signed)
            answer = connection.getresponse()
            content = answer.read()
        if answer.status >= 300:
            raise FileNotFoundError(f"{key}: {answer.status} {content.decode()}")
        return content

    def make(self) -> None:
        """Make the bucket."""
        self._ask("PUT")

    def keys(self, prefix: str = "") -> list[str]:
        """Keys of the bucket's objects below a prefix, sorted."""
        listing = ElementTree.fromstring(self._ask("GET", query=f"?list-type=2&prefix={quote(prefix)}"))
        found = [str(element.text) for element in listing.iter() if element.tag.endswith("}Key")]
        return sorted(key for key in found if not prefix or (key + "/").startswith(prefix + "/"))

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        self._ask("PUT", key, body=data)

    def put_folder(self, key: str, folder: pathlib.Path) -> None:
        """Write the files of a folder."""
        for file in folder.iterdir():
            self.put(f"{key}/{file.name}", file.read_bytes())

    def get(self, key: str) -> bytes:
        """Read an object."""
        return self._ask("GET", key)

    def remove(self, key: str) -> None:
        """Delete an object."""
        self._ask("DELETE", key)


def missing() -> str | None:
    """Why there can be no server here, or None."""
    for package in ("moto", "s3fs", "flask"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/moto-api/data.json")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """Start moto's server, which keeps everything in its memory; its port."""
    port = free_port()
    # Parts as small as those of small tests; AWS wants 5 MiB of them.
    environment = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1024", "PYTHONPATH": ""}
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: _answers(port), alive=lambda: process.poll() is None, said=lambda: "moto's server has ended")
        yield port
    finally:
        process.kill()
        process.wait()


_numbers = collections.Counter[int]()


def new_bucket(port: int) -> Server:
    """Make a bucket."""
    _numbers[port] += 1
    server = Server(port, f"bucket{_numbers[port]}")
    server.make()
    return server


def environment(endpoint: str) -> dict[str, str]:
    """What makes S3's clients ask there, and nobody else."""
    return {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


def small_parts(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Let this process's uploads of files of twice `PART` and more go in parts, as large files do."""
    from s3fs import core

    replace(core, "calculate_chunksize", lambda size, chunksize=None, max_chunks=10_000: chunksize or PART)


def few_attempts(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Leave attempts to smp and botocore, without pauses: with s3fs's own of each, a server that is away takes 40 s."""
    import s3fs
    from botocore.retries.standard import ExponentialBackoff

    replace(s3fs.S3FileSystem, "retries", 1)
    replace(ExponentialBackoff, "delay_amount", lambda self, context: 0.01)
    replace(object_store, "FIRST_PAUSE", 0.05)


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Port of the session's server."""
    if reason := missing():
        pytest.skip(reason)
    with s3_server() as port:
        yield port


@functools.cache
def _proxy_before(port: int) -> Proxy:
    """One for all tests: at another address, each of them would have to make new clients."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    return Proxy(port)


@pytest.fixture
def proxy(s3_port: int) -> Proxy:
    """The proxy before the server, which does nothing yet and remembers nothing."""
    found = _proxy_before(s3_port)
    found.rules, found.requests, found.rate, found.away = [], [], None, False
    return found


@pytest.fixture
def s3(s3_port: int, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A bucket of the test's own; this process and those it starts reach it by ``s3://``, through the proxy."""
    for name, value in environment(proxy.url).items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    few_attempts(monkeypatch.setattr)
    return new_bucket(s3_port)
