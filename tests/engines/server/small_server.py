"""A small real server: the API of an inference server over real sockets, with answers that are known exactly.

Its tokens are bytes, and its model is a table: the logits of the next byte, looked up by the byte before. What it does
wrong, if anything, a test decides request by request.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from scoremode.core.scores.answers import Window
from scoremode.core.scores.messages import CONTENT_TYPE, Asked
from scoremode.core.text.token_text import BYTE_ALPHABET
from scoremode.engines.server.served import SERVICE
from scoremode.engines.table.engine import TableEngine
from scoremode.values import Floats

SCORE = f"{SERVICE}/score"
OPENED = 21  # completions until the first window of a run is sent
NAMES = {byte: name for name, byte in BYTE_ALPHABET.items()}  # of bytes, as byte-level tokenizers write them


def sharp_logits(seed: int = 0) -> Floats:
    """Two bytes of 256 have most of the probability, others next to none."""
    random = np.random.default_rng(seed)
    logits = random.normal(0.0, 2.0, (256, 256))
    logits[np.arange(256), random.integers(0, 256, 256)] += 12.0
    return logits


@dataclass
class SmallServer:
    """What is served, and how. Fields may be changed while it runs."""

    logits: Floats = field(default_factory=sharp_logits)
    model: str = "small"
    root: str = "org/small"
    max_model_len: int | None = 600
    version: str | None = "1.0"
    fingerprint: str | None = "small-1.0-abcd"
    weights: str = ""  # what SGLang says instead of a fingerprint
    forms: tuple[str, ...] = ("prompt_logprobs", "echo")
    names_ids: bool = True  # echo: does it write token_id:N?
    tokenizes: bool = True
    most: int = 20
    key: str | None = None
    gives: str = "logprobs"  # or "logits"
    delay: float = 0.0
    trouble: Callable[[str, int], str | None] = lambda path, number: None  # path and number of the request: what to do
    edit: Callable[[str, bytes], bytes] = lambda path, body: body  # path and JSON of an answer: what is sent instead
    wire: Callable[[str], Iterable[bytes] | None] = lambda path: None  # what goes over the connection, instead of HTTP
    ids: int = 256  # the size of its vocabulary
    end: int = -1  # the id with which texts that it writes end
    is_strict: bool = False  # does it refuse sampling parameters that OpenAI's API does not have?
    before_temperature: bool = True  # are the log-probabilities of written tokens those before the temperature?
    more: dict[str, Any] = field(default_factory=dict)  # what other paths answer
    answers_of: Callable[[tuple[Window, ...]], bytes] = lambda windows: b""  # of a scoring service, in its binary form
    completions: int = 0
    lengths: list[int] = field(default_factory=list)  # of the prompts that were scored
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # path and headers of each
    in_flight: int = 0
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.httpd: ThreadingHTTPServer | None = None
        self.port = 0
        self.connections: list[socket.socket] = []

    def start(self) -> SmallServer:
        served = self

        class Handler(_Handler):
            server_ = served

        ThreadingHTTPServer.allow_reuse_address = True
        ThreadingHTTPServer.daemon_threads = True
        self.httpd = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.httpd.server_address[1]
        threading.Thread(target=self.httpd.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self) -> None:
        """End as a process that is killed does: all connections are gone."""
        if self.httpd is not None:
            self.httpd.shutdown()
            self.httpd.server_close()
            self.httpd = None
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def __enter__(self) -> SmallServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def rows(self, ids: list[int]) -> Floats:
        """(n - 1, 256) what is given after each token but the last."""
        table = TableEngine(self.logits).logprobs if self.gives == "logprobs" else self.logits
        rows: Floats = table[np.array(ids[:-1], int)]
        return rows

    def models(self) -> dict[str, Any]:
        entry = {"id": self.model, "object": "model", "root": self.root, "max_model_len": self.max_model_len}
        owner = {"owned_by": "sglang"} if "generate" in self.forms else {}
        return {"object": "list", "data": [entry | owner]}

    def complete(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        ids, k = asked["prompt"], asked.get("prompt_logprobs")
        self.lengths.append(len(ids))
        if asked.get("model") != self.model:
            return 404, {"error": {"message": f"The model `{asked.get('model')}` does not exist."}}
        if self.max_model_len is not None and len(ids) + asked.get("max_tokens", 1) > self.max_model_len:
            return 400, {"error": {"message": f"maximum context length is {self.max_model_len}"}}
        if max(ids) >= self.ids:
            return 400, {"error": {"message": f"Token id {max(ids)} is out of vocabulary"}}
        if max(k or 0, asked.get("logprobs") or 0) > self.most or (k == -1 and self.most < self.ids):
            return 400, {"error": {"message": f"more than max allowed: {self.most}"}}
        echoes_ids = asked.get("echo") and "return_tokens_as_token_ids" in asked
        if (self.is_strict and "top_k" in asked) or (echoes_ids and not self.names_ids):
            return 422, {"detail": "extra fields not permitted"}
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "prompt_logprobs": None}
        if k is not None and "prompt_logprobs" in self.forms:
            choice["prompt_logprobs"] = [None, *self._dictionaries(ids, k)]
        elif asked.get("logprobs") and not asked.get("echo") and k is None:
            choice |= self._written(ids, asked)
        elif asked.get("echo") and "echo" in self.forms:
            choice["logprobs"] = self._echo(ids, asked)
        return 200, {"model": self.model, "choices": [choice], "system_fingerprint": self.fingerprint}

    def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        """As SGLang answers: the last id of a vocabulary is called 0."""
        ids, rows, most = asked["input_ids"], self.rows(asked["input_ids"]), asked.get("top_logprobs_num", 0)
        own = [[self._number(row[i]), i if i < self.ids - 1 else 0, None] for row, i in zip(rows, ids[1:], strict=True)]
        version = {"weight_version": self.weights} if self.weights else {}
        found: dict[str, Any] = {**version, "input_token_logprobs": [[None, ids[0], None], *own]}
        if most:
            top = [[[self._number(row[i]), i, None] for i in np.argsort(-row)[:most].tolist()] for row in rows]
            found["input_top_logprobs"] = [None, *top]
        return {"text": "", "output_ids": [], "meta_info": found}

    def _dictionaries(self, ids: list[int], k: int) -> list[dict[str, Any]]:
        found = []
        for row, own in zip(self.rows(ids), ids[1:], strict=True):
            wanted = dict.fromkeys([own, *np.argsort(-row)[: k if k >= 0 else None].tolist()])
            found.append(
                {str(i): {"logprob": self._number(row[i]), "rank": int((row >= row[i]).sum())} for i in wanted}
            )
        return found

    def _written(self, ids: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        """A text drawn from the table, which ends with the id ``end``; as vLLM answers."""
        random, heat = np.random.default_rng(asked["seed"]), asked["temperature"]
        tokens, numbers, likely, last = list[str](), list[float](), list[dict[str, float]](), ids[-1]
        names = [f"token_id:{i}" if self.names_ids else chr(i) for i in range(256)]
        while len(tokens) < asked["max_tokens"] and (not tokens or last != self.end):
            raw = TableEngine(self.logits).logprobs[last]
            cooled = raw if not heat else raw / heat - np.logaddexp.reduce(raw / heat)
            order = np.argsort(-raw)
            kept = order[: asked["top_k"] if asked.get("top_k", -1) > 0 else 256]
            chance = np.exp(cooled[kept]) / np.exp(cooled[kept]).sum()
            last = int(random.choice(kept, p=chance)) if heat else int(order[0])
            given = raw if self.before_temperature else cooled
            tokens.append(names[last])
            numbers.append(self._number(given[last]))
            likely.append({names[i]: self._number(given[i]) for i in order[: asked["logprobs"]].tolist()})
        found = {"tokens": tokens, "token_logprobs": numbers, "top_logprobs": likely}
        return {"logprobs": found, "finish_reason": "stop" if last == self.end else "length"}

    def _echo(self, ids: list[int], asked: dict[str, Any]) -> dict[str, Any]:
        as_ids = bool(asked.get("return_tokens_as_token_ids"))
        names = [f"token_id:{i}" if as_ids else chr(i) for i in range(len(self.logits))]
        rows = self.rows(ids)
        own = [self._number(row[i]) for row, i in zip(rows, ids[1:], strict=True)]
        top = [{names[i]: self._number(row[i]) for i in np.argsort(-row)[: asked["logprobs"]].tolist()} for row in rows]
        more = [-1.0] * asked["max_tokens"]
        return {
            "tokens": [names[i] for i in ids] + ["x"] * len(more),
            "token_logprobs": [None, *own, *more],
            "top_logprobs": [None, *top, *({} for _ in more)],
        }

    @staticmethod
    def _number(value: float) -> float:
        return -9999.0 if value == -np.inf else float(value)

    def tokenize(self, asked: dict[str, Any]) -> dict[str, Any]:
        ids = list(asked["prompt"].encode())
        more = {"token_strs": [NAMES[i] for i in ids]} if asked.get("return_token_strs") else {}
        return {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len, **more}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_: SmallServer

    def setup(self) -> None:
        super().setup()
        self.server_.connections.append(self.connection)

    def log_message(self, *_: Any) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == SCORE:
            self._raw(self.server_.answers_of(Asked.from_bytes(body).windows), CONTENT_TYPE)
        else:
            self._serve(json.loads(body))

    def _serve(self, asked: dict[str, Any] | None) -> None:
        served, path = self.server_, self.path
        with served.lock:
            served.requests.append((path, {k.lower(): v for k, v in self.headers.items()}))
            served.completions += path == "/v1/completions"
            number = served.completions
            served.in_flight += 1
            served.most_in_flight = max(served.most_in_flight, served.in_flight)
        try:
            self._answer(asked, served, path, served.trouble(path, number))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with served.lock:
                served.in_flight -= 1

    def _answer(self, asked: dict[str, Any] | None, served: SmallServer, path: str, trouble: str | None) -> None:
        if served.key is not None and self.headers.get("Authorization") != f"Bearer {served.key}":
            self._send(401, {"error": f"bad key {self.headers.get('Authorization')}"})
            return
        if (pieces := served.wire(path)) is not None:
            for piece in pieces:
                self.wfile.write(piece)
            self.close_connection = True
            return
        if trouble is not None and self._misbehave(trouble):
            return
        status, value = self._value(asked or {}, served, path)
        is_spoiled = trouble is not None and not trouble.startswith("sleep") and path == "/v1/completions"
        self._send(status, spoiled(value, str(trouble)) if status == 200 and is_spoiled else value)

    def _value(self, asked: dict[str, Any], served: SmallServer, path: str) -> tuple[int, Any]:
        if path == "/v1/completions":
            time.sleep(served.delay)
            return served.complete(asked)
        known: dict[str, Callable[[], Any]] = {"/v1/models": served.models}
        if "generate" in served.forms:
            known["/generate"] = partial(served.generate, asked)
        if served.version is not None:
            known["/version"] = lambda: {"version": served.version}
        if served.tokenizes:
            known["/tokenize"] = lambda: served.tokenize(asked)
            known["/detokenize"] = lambda: {"prompt": bytes(asked["tokens"]).decode("utf-8", "replace")}
        known |= {other: partial(served.more.get, other) for other in served.more}
        return (200, known[path]()) if path in known else (404, {"detail": "Not Found"})

    def _misbehave(self, trouble: str) -> bool:
        """Do something else than answer; False if the answer itself is to be spoiled."""
        name, _, more = trouble.partition(":")
        if name == "status":
            status, _, wait = more.partition(",")
            self._send(int(status), {"error": {"message": "not\x1b[2J now"}}, {"Retry-After": wait} if wait else {})
        elif name == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [{"prompt_log')
            self.close_connection = True
        elif name == "drop":
            self.close_connection = True
            self.connection.close()
        elif name == "sleep":
            time.sleep(float(more))
            return False
        elif name == "html":
            self._raw(b"<html><body>Log in \x1b[31m first</body></html>", "text/html")
        elif name == "empty":
            self._raw(b"", "application/json")
        elif name == "deep":
            self._raw(b"[" * 100_000, "application/json")
        elif name == "redirect":
            self._send(307, {}, {"Location": more})
        elif name == "huge":
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 40))
            self.end_headers()
            while True:
                self.wfile.write(b" " * 65536)
        else:
            return False
        return True

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._raw(self.server_.edit(self.path, json.dumps(value).encode()), "application/json", status, headers)

    def _raw(self, data: bytes, kind: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, text in {**(headers or {}), "Content-Type": kind, "Content-Length": str(len(data))}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)


def spoiled(value: dict[str, Any], trouble: str) -> dict[str, Any]:
    """An answer with one thing wrong about it."""
    choice = value["choices"][0]
    listed = choice["prompt_logprobs"]
    own = next(iter(listed[-1].values()))
    numbers = {"nan": float("nan"), "text": "-1.0", "true": True, "positive": 3.5}
    fields = {"choices": ("choices", []), "list": ("choices", "x"), "other-model": ("model", "another")}
    fields["other-fingerprint"] = ("system_fingerprint", "another")
    lists = {"short": listed[:-1], "long": [*listed, listed[-1]], "shifted": [*listed[1:], None]}
    lists["wrong-id"] = [*listed[:-1], {"7777": own}]
    if trouble in numbers:
        own["logprob"] = numbers[trouble]
    elif trouble in lists:
        choice["prompt_logprobs"] = lists[trouble]
    else:
        name, wrong = fields[trouble]
        value[name] = wrong
    return value
