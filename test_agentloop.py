"""The tests of agentloop, in the order of agentloop.py.

The book's own rules first, then section by section: tables of cases, properties, the odd ones; then the real
program by transcript, in which stderr that is not mentioned must be empty; last the README."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import dis
import functools
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import types
import typing
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agentloop
from agentloop import (Canonical, ConfigError, Decision, ErrorKind, ExitCode, ModelError, Role, ScopeForm, ToolCall, ToolError,
                       ToolStatus, Via)

HERE = Path(__file__).parent
TESTDATA = HERE / "testdata"
sys.path.insert(0, str(TESTDATA))
import fakeserver  # noqa: E402  (it lies beside the tables)
from fakeserver import Split, Wire  # noqa: E402

SOURCE = (HERE / "agentloop.py").read_text("utf-8")
TREE = ast.parse(SOURCE)
FUNCTIONS = [node for node in ast.walk(TREE) if isinstance(node, ast.FunctionDef)]
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
JSON_VALUES = st.recursive(st.none() | st.booleans() | st.integers(-10**9, 10**9) | WORDS,
                           lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=8)
settings.register_profile("agentloop", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("agentloop")


# ── The book ──


def section_of(line: int) -> str:
    """The title of the section that a line of agentloop.py stands in."""
    titles = [(n, match[1]) for n, text in enumerate(SOURCE.split("\n"), 1)
              if (match := re.match(r"# ═══ \d+\. (\w+) ═", text))]
    return next((title for n, title in reversed(titles) if n <= line), "")


SECTIONS = [match[1] for match in re.finditer(r"^# ═══ \d+\. (\w+) ═", SOURCE, re.M)]
CORE = ("Values", "Errors", "Data", "Events", "State", "Text", "Scopes", "Manifest", "Session")


def test_the_sections_stand_in_the_order_of_the_table_of_contents():
    numbers = [int(number) for number in re.findall(r"^# ═══ (\d+)\.", SOURCE, re.M)]
    assert numbers == sorted(numbers) and len(numbers) >= 16
    listed = re.findall(r"(\d+) ([A-Z]\w+) {2,}", ast.get_docstring(TREE))
    assert sorted((int(number), name) for number, name in listed) == list(zip(numbers, SECTIONS))


def test_every_function_fits_a_screen():
    assert [f.name for f in FUNCTIONS if f.end_lineno - f.lineno + 1 > 40 and section_of(f.lineno) != "CLI"] == []


def test_no_function_takes_a_boolean_but_typers_own():
    flags = [f"{f.name}({a.arg})" for f in FUNCTIONS for a in f.args.args + f.args.kwonlyargs
             if isinstance(a.annotation, ast.Name) and a.annotation.id == "bool" and section_of(f.lineno) != "CLI"]
    assert flags == []


def test_one_broad_except_stands_in_the_command_line_alone():
    broad = [section_of(node.lineno) for node in ast.walk(TREE) if isinstance(node, ast.ExceptHandler)
             and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))]
    assert broad == ["CLI"]


def test_core_sections_do_no_input_or_output():
    forbidden = {"print", "open", "os", "sys", "subprocess", "socket", "time", "select", "random"}
    used = {(section_of(node.lineno), node.id) for node in ast.walk(TREE)
            if isinstance(node, ast.Name) and node.id in forbidden and section_of(node.lineno) in CORE}
    assert used - {("Session", "time")} == set()  # the clock is a field there, with the real one as its default


def global_names(code):
    """(line, name) of every global that a code object and those inside it read."""
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        line = step.starts_line or line
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield line, step.argval
    for inner in code.co_consts:
        if isinstance(inner, type(code)):
            yield from global_names(inner)


def test_no_section_uses_a_name_of_a_later_one():
    defined: dict[str, str] = {}
    for node in TREE.body:
        names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else [
            target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
        defined.update(dict.fromkeys(names, section_of(node.lineno)))
    late = {(section_of(line), name, defined[name]) for line, name in global_names(compile(SOURCE, "agentloop.py", "exec"))
            if defined.get(name) and SECTIONS.index(defined[name]) > SECTIONS.index(section_of(line) or SECTIONS[-1])}
    assert late == set()


def test_import_does_no_work_and_loads_nothing_heavy():
    code = "import sys, agentloop; print([m for m in ('httpx', 'jsonschema', 'rich', 'yaml', 'typer', 'ssl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_load_no_heavy_module(flag):
    code = (f"import sys, agentloop; sys.argv = ['agentloop', {flag!r}]; "
            "agentloop.command_line([]); print([m for m in ('httpx', 'jsonschema', 'rich', 'yaml') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE, check=True)
    assert done.stdout.endswith("[]\n")


# ── 2. Errors ──


def test_an_error_is_one_line_with_its_place_and_its_mending():
    assert str(ConfigError("unknown key 'x'", "tools.toml: tools.a", "remove it")) == "tools.toml: tools.a: unknown key 'x'; remove it"


def test_the_outcome_is_the_name_of_the_exit_code():
    assert ExitCode(4).outcome == "answered_denied" and ExitCode(141).outcome == "reader_gone"


# ── 3. Data ──


@dataclasses.dataclass(frozen=True)
class Inner:
    n: int
    words: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = Inner(0)
    ratio: float = 1.0
    role: Role = Role.USER
    maybe: int | None = None


agentloop.Inner, agentloop.Outer = Inner, Outer  # type hints are text: they are read where the class is defined

DECODE_ERRORS = {
    "unknown-key": ({"name": "a", "nam": 1}, "here: unknown key 'nam'; known here: name, inner, ratio, role, maybe"),
    "missing-key": ({}, "here: the key 'name' is missing"),
    "wrong-type": ({"name": 3}, "here.name: text is needed, not a whole number ('3')"),
    "bool-is-no-int": ({"name": "a", "inner": {"n": True}}, "here.inner.n: a whole number is needed, not true or false ('True')"),
    "in-a-list": ({"name": "a", "inner": {"n": 1, "words": ["x", 2]}}, "here.inner.words[1]: text is needed, not a whole number ('2')"),
    "not-a-word": ({"name": "a", "role": "boss"}, "here.role: one of system, user, assistant, tool is needed, not text ('boss')"),
    "no-table": ([], "here: a table is needed, not a list"),
}


@pytest.mark.parametrize("data,message", DECODE_ERRORS.values(), ids=DECODE_ERRORS)
def test_decode_names_the_place_of_what_is_wrong(data, message):
    with pytest.raises(ConfigError) as caught:
        agentloop.decode(Outer, data, "here")
    assert str(caught.value) == message


@given(st.builds(Outer, st.text(), st.builds(Inner, st.integers(), st.lists(st.text()).map(tuple)),
                 st.floats(allow_nan=False), st.sampled_from(Role), st.none() | st.integers()))
def test_what_was_encoded_is_decoded_to_the_same(value):
    assert agentloop.decode(Outer, json.loads(json.dumps(agentloop.encode(value))), "here") == value


STRICT_ERRORS = {"repeated-key": '{"a": 1, "a": 2}', "nan": '{"a": NaN}', "infinity": "[-Infinity]", "trailing": "{} x",
                 "nul": '{"a": "\\u0000"}', "half-surrogate": '{"a": "\\ud800"}', "deep": "[" * 65 + "]" * 65,
                 "digits": "1" * 101, "huge": '"' + "x" * (2 << 20) + '"', "empty": "", "overflow": "1e999"}


@pytest.mark.parametrize("text", STRICT_ERRORS.values(), ids=STRICT_ERRORS)
def test_strict_json_refuses_what_two_readers_could_read_differently(text):
    with pytest.raises(ToolError):
        agentloop.strict_json(text)


@given(JSON_VALUES)
def test_strict_json_reads_all_ordinary_json(value):
    assert agentloop.strict_json(json.dumps(value)) == value


@pytest.mark.parametrize("text,seconds", [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5h", 5400), ("7", 7)])
def test_durations(text, seconds):
    assert agentloop.duration(text, "here") == seconds


@pytest.mark.parametrize("text", ["", "s", "-3s", "0", "nan", "inf", "1w", "1e99"])
def test_a_bad_duration_is_an_error_with_its_place(text):
    with pytest.raises(ConfigError, match="^here: a duration such as 90s, 10m or 2h is needed"):
        agentloop.duration(text, "here")


# ── 4. Events ──


def instances(hint):
    """A strategy for the values that a type hint of an event takes."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return JSON_VALUES
    if origin is tuple:
        return st.lists(instances(arguments[0]), max_size=3).map(tuple)
    if origin is types.UnionType:
        return st.none() | instances(arguments[0])
    if origin:  # a mapping
        return st.dictionaries(st.text(max_size=5), instances(arguments[1]), max_size=2)
    if dataclasses.is_dataclass(hint):
        return st.builds(hint, **{name: instances(inner) for name, inner in agentloop.type_hints(hint).items()})
    return st.floats(allow_nan=False) if hint is float else st.from_type(hint)


@pytest.mark.parametrize("name", agentloop.EVENTS)
@given(data=st.data())
@settings(max_examples=20)
def test_an_event_comes_back_from_its_record(name, data):
    event = data.draw(instances(agentloop.EVENTS[name]))
    record = json.loads(json.dumps(agentloop.to_record(event)))
    assert list(record)[0] == "type" and record["type"] == name
    assert agentloop.from_record({"seq": 1, "at": "", **record}, "here") == event


# ── 6. Text ──


def captured(text: str) -> agentloop.Captured:
    capture = agentloop.Capture()
    data = text.encode("utf-8", "surrogatepass")
    for n in range(0, len(data), 5000):
        capture.feed(data[n:n + 5000])
    return capture.captured()


def test_a_short_output_is_whole():
    assert agentloop.truncate(captured("a\nb\n"), 100, agentloop.CutFrom.MIDDLE_KEEP_TAIL) == ("a\nb\n", agentloop.Omitted())


def test_a_long_output_shows_head_and_tail_and_says_what_it_does_not():
    lines = [f"line {n}" for n in range(10_000)]
    text, omitted = agentloop.truncate(captured("\n".join(lines) + "\n"), 1000, agentloop.CutFrom.MIDDLE_KEEP_TAIL)
    shown = text.split("\n")
    assert len(text) <= 1000 and shown[0] == "line 0" and shown[-2] == "line 9999"
    kept = [line for line in shown if line.startswith("line")]
    assert omitted.lines == 10_000 - len(kept)
    assert omitted.bytes == sum(len(line) + 1 for line in lines) - sum(len(line) + 1 for line in kept)
    assert f"[… {omitted.lines:,} lines, {agentloop.human_bytes(omitted.bytes)} omitted …]" in shown


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\x1b", exclude_categories=("Cc", "Cs")), max_size=300), max_size=60),
       st.integers(200, 3000), st.sampled_from(agentloop.CutFrom))
def test_a_truncated_output_never_exceeds_its_budget_and_accounts_for_every_line(lines, budget, cut):
    whole = "\n".join(lines) + "\n"
    text, omitted = agentloop.truncate(captured(whole), budget, cut)
    assert len(text) <= budget
    if omitted.bytes:
        assert text.count("\n") >= 1 and "omitted …]" in text
    else:
        assert text == whole


@pytest.mark.parametrize("data,text", [
    (b"\x1b[31mred\x1b[0m", "red"), (b"\x1b]0;title\x07x", "x"), (b"a\x00b\x08c", "abc"), (b"50%\r100%\n", "50%\n100%\n"),
    (b"\xff\xfe", "\ufffd\ufffd"), ("naïve – 中文".encode(), "naïve – 中文")])
def test_a_model_sees_no_control_characters(data, text):
    assert agentloop.plain(data) == text


def test_a_person_sees_what_is_hidden():
    assert agentloop.visible("a\x1b[2Jb\u202ec\u200b" + " " * 2000 + "d") == "a\\u{1b}[2Jb\\u{202e}c\\u{200b}␠×2000d"


@given(st.text())
def test_what_a_person_sees_is_printable(text):
    assert agentloop.visible(text).replace("\n", "").isprintable()


def test_secrets_are_masked_wherever_they_stand():
    mask = agentloop.secrets_of({"DB_PASSWORD": "hunter2hunter2", "HOME": "/root", "PIN_TOKEN": "short", "MY": "named-one"}, ("MY",))
    assert mask.value({"a": ["x hunter2hunter2 y"], "named-one": "/root short"}) == {
        "a": ["x [masked secret] y"], "[masked secret]": "/root short"}


# ── 9. Edge ──


def run_shell(command: str, timeout: float = 5.0, stop: agentloop.Stop | None = None) -> agentloop.Finished:
    program = agentloop.Program(("/bin/sh", "-c", command), {"PATH": "/usr/bin:/bin"}, "/")
    return agentloop.spawn(program, timeout, stop or agentloop.Stop(), lambda group, at: None)


def test_a_process_gives_both_its_outputs_and_its_exit_code():
    ended = run_shell("echo out; echo err >&2; exit 3")
    assert (ended.end, ended.code, ended.output.head) == (agentloop.ProcessEnd.EXITED, 3, b"out\nerr\n")


HANGS = {
    "a-grandchild-holds-the-pipe": "sleep 321 & echo hi",
    "a-grandchild-ignores-TERM": "(trap '' TERM; sleep 321) & trap '' TERM; sleep 321",
    "it-reads-stdin": "cat; sleep 321",
    "it-closes-its-output": "exec >&- 2>&-; sleep 321",
    "it-reads-the-terminal": "cat </dev/tty; sleep 321",
}


@pytest.mark.parametrize("command", HANGS.values(), ids=HANGS)
def test_no_process_outlasts_its_timeout_by_more_than_a_second_nor_survives_it(command):
    began = time.monotonic()
    run_shell(command.replace("321", str(marker := 100000 + os.getpid())), timeout=0.5)
    assert time.monotonic() - began < 1.5
    assert subprocess.run(["pgrep", "-f", f"sleep {marker}"], capture_output=True).stdout == b""


def test_a_stop_ends_a_running_process():
    stop = agentloop.Stop()
    threading.Timer(0.2, stop.set).start()
    assert run_shell("sleep 60", 30, stop).end is agentloop.ProcessEnd.STOPPED


def test_a_process_has_no_terminal_and_three_descriptors():
    descriptor = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        shown = run_shell("ls /proc/self/fd | sort -n | tr '\\n' ' '; readlink /proc/self/fd/0; (: </dev/tty) 2>&1 || echo none").output.head
    finally:
        os.close(descriptor)
    assert shown.startswith(b"0 1 2 3 /dev/null\n") and shown.endswith(b"none\n")  # 3 is ls reading the folder


def test_memory_stays_bounded_while_a_tool_writes():
    capture = agentloop.Capture()
    for _ in range(1000):
        capture.feed(b"x" * 65536)
    found = capture.captured()
    assert found.total_bytes == 65_536_000 and len(found.head) + len(found.tail) <= 2 * capture.KEEP + 65536


@given(st.lists(st.binary(max_size=50), max_size=30), st.integers(1, 40))
def test_a_capture_keeps_the_first_and_the_last_bytes(chunks, keep):
    capture = agentloop.Capture()
    capture.KEEP = keep
    for chunk in chunks:
        capture.feed(chunk)
    found, whole = capture.captured(), b"".join(chunks)
    assert found.total_bytes == len(whole) and whole.startswith(found.head) and whole.endswith(found.tail)
    assert (found.head == whole) if not found.tail else len(found.head) == keep <= len(found.tail)


def test_a_link_that_came_into_the_way_is_not_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").write_text("x")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ToolError, match="changed since it was approved"):
        agentloop.open_resolved(str(tmp_path / "link" / "f"))
    os.close(agentloop.open_resolved(str(tmp_path / "real" / "f")))


# ── 10. Tools ──


RENDERED = {
    "part-of-an-element": (("x", "--n={n}"), {"n": 3}, (), ("x", "--n=3")),
    "spliced": (("tar", "--", "{f...}"), {"f": ["a b", "-c"]}, (), ("tar", "--", "a b", "-c")),
    "left-out": (("ls", ("-n", "{n}"), "/"), {}, (), ("ls", "/")),
    "put-in": (("ls", ("-n", "{n}"), "/"), {"n": 2}, (), ("ls", "-n", "2", "/")),
    "json-numbers": (("x", "{a}", "{b}"), {"a": 1.5, "b": True}, (), ("x", "1.5", "true")),
    "never-expanded-again": (("x", "{a}"), {"a": "{b} $HOME *"}, (), ("x", "{b} $HOME *")),
    "dash-allowed": (("grep", "-e", "{p}"), {"p": "-v"}, ("p",), ("grep", "-e", "-v")),
    "dash-after-the-guard": (("cat", "--", "{p}"), {"p": "-v"}, (), ("cat", "--", "-v")),
}


@pytest.mark.parametrize("template,arguments,dash,argv", RENDERED.values(), ids=RENDERED)
def test_an_argv_is_rendered(template, arguments, dash, argv):
    assert agentloop.render_argv(template, arguments, dash) == argv


def test_a_value_that_begins_with_a_dash_is_refused():
    with pytest.raises(ToolError, match="may not begin with a dash"):
        agentloop.render_argv(("cat", "{p}"), {"p": "-v"}, ())


READS = {"whole": ({}, "1\n2\n3\n"), "from": ({"offset": 2}, "2\n3\n"), "some": ({"offset": 2, "limit": 1}, "2\n"),
         "last": ({"offset": -1}, "3\n"), "last-two": ({"offset": -2}, "2\n3\n"), "far-back": ({"offset": -9, "limit": 10}, "1\n2\n3\n")}


@pytest.mark.parametrize("arguments,text", READS.values(), ids=READS)
def test_a_file_is_read_by_lines(tmp_path, arguments, text):
    (tmp_path / "f").write_text("1\n2\n3\n")
    assert agentloop.read_lines(str(tmp_path / "f"), arguments).output.head.decode() == text


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    tool = agentloop.BUILTINS["read_file"].kind
    with pytest.raises(ToolError, match="not a regular file"):
        tool.run(Canonical("read_file", ScopeForm.PATH, str(tmp_path / "pipe")), {}, None)


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path):
    (tmp_path / "f").write_text("old")
    (tmp_path / "f").chmod(0o640)
    (tmp_path / "other").hardlink_to(tmp_path / "f")
    agentloop.write_content(str(tmp_path / "f"), {"content": "new"})
    assert (tmp_path / "f").read_text() == "new" and (tmp_path / "other").read_text() == "old"
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640 and sorted(os.listdir(tmp_path)) == ["f", "other"]


def test_a_tool_gets_the_allowlisted_environment_only():
    env = agentloop.tool_environment({"PATH": "/bin", "OPENAI_API_KEY": "k", "LD_PRELOAD": "x", "KUBE": "y"}, ("KUBE",), "key1")
    assert env["PATH"] == "/bin" and env["KUBE"] == "y" and env["AGENTLOOP_CALL_KEY"] == "key1" and env["LC_ALL"] == "C.UTF-8"
    assert not {"OPENAI_API_KEY", "LD_PRELOAD"} & set(env)
