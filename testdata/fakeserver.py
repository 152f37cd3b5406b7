#!/usr/bin/env python3
"""A fake model server: plays a script over both wires, Ollama's native one and the OpenAI-compatible one.

A script is a list of replies, one a request, in the form of agentloop's `script` provider:
`{"text": "…", "calls": [{"name": "add", "arguments": {"a": 12, "b": 8}}]}`. A reply may also say how to fail:
`status` with `headers` and `body`; `raw` (the body to the letter); `cut` (the stream ends without its last
record); `delay_s` (before the head), `stall_s` (after the first record); `finish`; `usage`. In a test a reply may be a function of the request's body.

    with fakeserver.serve(script, wire=Wire.OPENAI, split=Split.BYTES) as server:
        server.url, server.requests

As a program (`fakeserver.py SCRIPT.jsonl`) it prints its URL and plays the script anew for each conversation:
the position is the number of assistant messages in the request. `GET /_log` answers with the times of all requests.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USAGE = {"prompt": 100, "completion": 10}


class Wire(Enum):
    """Which family of endpoints the server has."""

    OLLAMA = ("/api/",)
    OPENAI = ("/v1/",)
    BOTH = ("/api/", "/v1/")


class Split(Enum):
    """How a stream is cut into writes: a record each, or every seven bytes, in the middle of characters too."""

    RECORDS = 0
    BYTES = 7


class Position(Enum):
    """Which reply comes next: the next one, or the one after the assistant messages of the request."""

    NEXT = "next"
    ASSISTANTS = "assistants"


class Server(ThreadingHTTPServer):
    """`models` are the names it offers; `requests` holds what came: path, headers, body, and when it came and was
    answered (nanoseconds)."""

    daemon_threads = True

    def __init__(self, script, wire, split, position, window):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.wire, self.split, self.position, self.window = script, wire, split, position, window
        self.requests, self.lock, self.models = [], threading.Lock(), ["m"]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reply_to(self, body):
        """The script's reply to a chat request, or None past its end."""
        with self.lock:
            turn = sum(1 for message in body["messages"] if message["role"] == "assistant")
            number = turn if self.position is Position.ASSISTANTS else sum("reply" in seen for seen in self.requests)
            reply = self.script[number] if number < len(self.script) else None
        return reply(body) if callable(reply) else reply

    def handle_error(self, request, client_address):
        """A client that went away in the middle of a reply is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, *words):
        pass

    def do_GET(self):
        if self.path == "/_log":
            return self.answer(200, [{"at": seen["at"], "done": seen.get("done")} for seen in self.server.requests])
        known = {"/api/tags": {"models": [{"name": name, "model": name} for name in self.server.models]}, "/api/version": {"version": "0.99.0"},
                 "/api/ps": {"models": []},
                 "/v1/models": {"data": [{"id": name, "object": "model", "max_model_len": self.server.window} for name in self.server.models]}}
        found = known.get(self.path) if self.path.startswith(self.server.wire.value) else None
        self.answer(200 if found else 404, found or {"error": "not found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        seen = {"path": self.path, "headers": dict(self.headers), "body": body, "at": time.monotonic_ns()}
        if self.path == "/api/show":
            return self.answer(200, {"capabilities": ["completion", "tools"],
                                     "model_info": {"general.architecture": "x", "x.context_length": self.server.window}})
        if self.path in ("/api/embed", "/v1/embeddings") and self.path.startswith(self.server.wire.value):
            vectors = [[0.5, -0.5] for _ in body["input"]]
            return self.answer(200, {"embeddings": vectors, "data": [{"index": n, "embedding": vector} for n, vector in enumerate(vectors)]})
        if self.path not in ("/api/chat", "/v1/chat/completions") or not self.path.startswith(self.server.wire.value):
            return self.answer(404, {"error": "not found"})
        reply = self.server.reply_to(body)
        self.server.requests.append(seen | {"reply": reply})
        self.play(reply or {"status": 500, "body": '{"error": {"message": "the script is exhausted"}}'}, body)
        self.server.requests[-1]["done"] = time.monotonic_ns()

    def play(self, reply, body):
        time.sleep(reply.get("delay_s", 0))
        if "status" in reply:
            return self.send(reply["status"], reply.get("headers", {}), [reply.get("body", "").encode()])
        records = OLLAMA_RECORDS if self.path == "/api/chat" else OPENAI_RECORDS
        kind, parts = records(reply, body.get("stream", self.path == "/api/chat"))
        if "raw" in reply:
            parts = [reply["raw"].encode()]
        self.send(200, {"Content-Type": kind}, parts[:-1] if reply.get("cut") else parts, reply.get("stall_s", 0))

    def answer(self, status, value):
        self.send(status, {"Content-Type": "application/json"}, [json.dumps(value).encode()])

    def send(self, status, headers, parts, stall=0):
        """One part has a length; several are chunks, split as the server was told, with a pause after the first."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if len(parts) == 1:
            self.send_header("Content-Length", str(len(parts[0])))
            self.end_headers()
            self.wfile.write(parts[0])
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        size = self.server.split.value
        whole = b"".join(parts)
        for part in [whole[n:n + size] for n in range(0, len(whole), size)] if size else parts:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()
            time.sleep(stall)
        self.wfile.write(b"0\r\n\r\n")


def ollama_records(reply, stream):
    """The body of `/api/chat`: NDJSON, or one object."""
    usage = reply.get("usage", USAGE)
    calls = [{"function": {"name": call["name"], "arguments": call.get("arguments", {})}} for call in reply.get("calls", ())]
    message = {"role": "assistant", "content": reply.get("text", "")} | ({"tool_calls": calls} if calls else {})
    end = {"done": True, "done_reason": reply.get("finish", "stop"), "prompt_eval_count": usage["prompt"],
           "eval_count": usage["completion"]}
    if not stream:
        return "application/json", [json.dumps({"model": "m", "message": message} | end).encode()]
    deltas = [{"role": "assistant", "content": piece} for piece in pieces(message["content"])]
    deltas += [{"role": "assistant", "content": "", "tool_calls": calls}] if calls else []
    lines = [{"model": "m", "message": delta, "done": False} for delta in deltas]
    lines.append({"model": "m", "message": {"role": "assistant", "content": ""}} | end)
    return "application/x-ndjson", [json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines]


def openai_records(reply, stream):
    """The body of `/v1/chat/completions`: SSE, or one object. Arguments come in fragments."""
    usage = reply.get("usage", USAGE)
    told = {"prompt_tokens": usage["prompt"], "completion_tokens": usage["completion"]}
    calls = [(call["name"], text_of(call.get("arguments", {}))) for call in reply.get("calls", ())]
    finish = reply.get("finish", "tool_calls" if calls else "stop")
    if not stream:
        message = {"role": "assistant", "content": reply.get("text")}
        if calls:
            message["tool_calls"] = [{"id": f"call_{n}{time.monotonic_ns()}", "type": "function",
                                      "function": {"name": name, "arguments": text}} for n, (name, text) in enumerate(calls)]
        return "application/json", [json.dumps({"id": "x", "choices": [
            {"index": 0, "message": message, "finish_reason": finish}], "usage": told}).encode()]
    deltas = [{"role": "assistant", "content": piece} for piece in pieces(reply.get("text", ""))]
    for n, (name, text) in enumerate(calls):
        head = {"index": n, "id": f"call_{n}{time.monotonic_ns()}", "type": "function", "function": {"name": name, "arguments": ""}}
        deltas.append({"tool_calls": [head]})
        deltas += [{"tool_calls": [{"index": n, "function": {"arguments": piece}}]} for piece in pieces(text)]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    chunks.append({"choices": [], "usage": told})
    lines = [b"data: " + json.dumps({"id": "x"} | chunk, ensure_ascii=False).encode() + b"\n\n" for chunk in chunks]
    return "text/event-stream", [b"".join(lines[:-2]), lines[-2] + lines[-1] + b"data: [DONE]\n\n"]


def pieces(text):
    """The text in three parts, as a stream would bring it."""
    third = max(1, len(text) // 3)
    return [part for part in (text[:third], text[third:2 * third], text[2 * third:]) if part]


def text_of(arguments):
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


OLLAMA_RECORDS, OPENAI_RECORDS = ollama_records, openai_records


@contextmanager
def serve(script, wire=Wire.BOTH, split=Split.RECORDS, position=Position.NEXT, window=32768):
    """A running Server that plays the script; it ends with the block."""
    server = Server(script, wire, split, position, window)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        replies = [json.loads(line) for line in file]
    with serve(replies, position=Position.ASSISTANTS) as running:
        print(running.url, flush=True)
        sys.stdin.read()
