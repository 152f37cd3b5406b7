# ── MCP ──


NEEDS_SDK = pytest.mark.skipif(agentloop.sdk_problem() != "", reason=agentloop.sdk_problem() or "it is there")
MCP_TOOLS = ("echo", "search", "fail", "media", "structured", "environment", "hang", "crash", "change", "ask", "pid")
MCP_GRANTS = tuple(part for name in MCP_TOOLS for part in ("--yes-scope", f"fix__{name}"))

MCP_ERRORS = {
    "neither": ('[mcp.a]\ntools = ["x"]', "m.toml: mcp.a: either argv or url is needed"),
    "both": ('[mcp.a]\nargv = ["s"]\nurl = "https://x/"\ntools = ["x"]', "m.toml: mcp.a: either argv or url is needed"),
    "no-tools": ('[mcp.a]\nargv = ["s"]', "m.toml.mcp.a: the key 'tools' is missing"),
    "empty-tools": ('[mcp.a]\nargv = ["s"]\ntools = []', "m.toml: mcp.a.tools: the names of the tools that may be used"),
    "two-underscores": ('[mcp.a__b]\nargv = ["s"]\ntools = ["x"]', "m.toml: mcp.a__b: a server's name has letters"),
    "dotted-tool": ('[mcp.a]\nargv = ["s"]\ntools = ["x.y"]', "m.toml: mcp.a.tools: 'x.y': a tool's name has letters"),
    "long-name": ('[mcp.a]\nargv = ["s"]\ntools = ["' + "x" * 62 + '"]', "at most 64 with a__"),
    "same-name": ('[mcp.a]\nargv = ["s"]\ntools = ["_x"]\n[mcp.a_]\nargv = ["s"]\ntools = ["x"]', "there is a tool a___x already"),
    "headers": ('[mcp.a]\nargv = ["s"]\ntools = ["x"]\nheaders = {A = "b"}', "m.toml: mcp.a.headers: only a server with url has headers"),
    "env": ('[mcp.a]\nurl = "https://x/"\ntools = ["x"]\nenv = ["A"]', "m.toml: mcp.a.env: only a server with argv has env"),
    "readonly": ('[mcp.a]\nargv = ["s"]\ntools = ["x"]\nreadonly = ["y"]', "m.toml: mcp.a.readonly: 'y' is none of its tools"),
    "duration": ('[mcp.a]\nargv = ["s"]\ntools = ["x"]\ntimeout = "soon"', "m.toml: mcp.a.timeout: a duration"),
    "no-url": ('[mcp.a]\nurl = "ftp://x/"\ntools = ["x"]', "m.toml: mcp.a.url: "),
    "key-in-url": ('[mcp.a]\nurl = "https://u:p@x/"\ntools = ["x"]', "m.toml: mcp.a.url: "),
    "unknown-key": ('[mcp.a]\nargv = ["s"]\ntools = ["x"]\ncwd = "/"', "m.toml.mcp.a: unknown key 'cwd'"),
}


@pytest.mark.parametrize("text,message", MCP_ERRORS.values(), ids=MCP_ERRORS)
def test_a_wrong_mcp_table_is_an_error_with_its_place(text, message):
    with pytest.raises(ConfigError) as caught:
        registry_of(text)
    assert message in str(caught.value)


def test_a_header_is_filled_from_the_environment_and_never_with_nothing():
    entry = agentloop.McpEntry(("x",), url="https://x/", headers={"Authorization": "Bearer ${A_B}", "X": "$A_B {A_B}"})
    assert agentloop.filled_headers(entry, {"A_B": "k"}, "m") == {"Authorization": "Bearer k", "X": "$A_B {A_B}"}
    with pytest.raises(ConfigError, match="^m.headers: the variable A_B is not set"):
        agentloop.filled_headers(entry, {}, "m")
    literal = agentloop.McpEntry(("x",), url="https://x/", headers={"X-Api-Key": "Bearer abcdefgh", "Accept": "application/json"})
    assert agentloop.header_secrets(agentloop.Manifest(mcp={"a": entry, "b": literal}), {"A_B": "kkkk"}) == ("kkkk", "Bearer", "Bearer", "abcdefgh")


OBJECT, DRAFT_2020 = {"type": "object"}, {"additionalProperties": False}
SERVER_SCHEMAS = {
    "closed": (OBJECT, {**OBJECT, **DRAFT_2020}),
    "open-if-said": ({**OBJECT, "additionalProperties": True}, {**OBJECT, "additionalProperties": {}}),
    "no-pattern-but-a-property-of-that-name": (
        {**OBJECT, "properties": {"pattern": {"type": "string", "pattern": "(a+)+$"}}, "patternProperties": {"x": {}}},
        {**OBJECT, "properties": {"pattern": {"type": "string", "minLength": 1}}, **DRAFT_2020}),
    "empty-text-if-declared": ({**OBJECT, "properties": {"a": {"type": "string", "minLength": 0}, "b": {"enum": ["", "x"], "type": "string"}}},
                               {**OBJECT, "properties": {"a": {"type": "string", "minLength": 0}, "b": {"enum": ["", "x"], "type": "string"}}, **DRAFT_2020}),
    "no-default": ({**OBJECT, "properties": {"a": {"type": "integer", "default": None}}},
                   {**OBJECT, "properties": {"a": {"type": "integer"}}, **DRAFT_2020}),
    "references": ({**OBJECT, "$schema": "http://json-schema.org/draft-07/schema#", "$defs": {"a/b": {"type": "integer"}},
                    "properties": {"a": {"$ref": "#/$defs/a~1b", "maximum": 3}, "b": {"type": "array", "items": {"$ref": "#/$defs/a~1b"}}}},
                   {**OBJECT, "properties": {"a": {"type": "integer", "maximum": 3}, "b": {"type": "array", "items": {"type": "integer"}}}, **DRAFT_2020}),
    "a-tree": ({**OBJECT, "$defs": {"n": {**OBJECT, "properties": {"n": {"$ref": "#/$defs/n"}}}}, "properties": {"t": {"$ref": "#/$defs/n"}}},
               {**OBJECT, "properties": {"t": {**OBJECT, "properties": {"n": {}}}}, **DRAFT_2020}),
    "combined": ({**OBJECT, "anyOf": [{"properties": {"a": True}}, {"$ref": "#"}]},
                 {**OBJECT, "anyOf": [{"properties": {"a": {}}}, {**OBJECT, "anyOf": [{"properties": {"a": {}}}, {}]}], "unevaluatedProperties": False}),
}


@pytest.mark.parametrize("told,schema", SERVER_SCHEMAS.values(), ids=SERVER_SCHEMAS)
def test_the_schema_of_a_server_is_closed_and_names_nothing_outside(told, schema):
    assert agentloop.server_schema(told) == schema
    agentloop.argument_problem(schema, {"a": "x"})
    assert agentloop.usage_of(agentloop.Tool("t", "x", schema, None))


DOUBLED = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
REFUSED_SCHEMAS = {
    "outside": ({**OBJECT, "properties": {"x": {"$ref": "http://127.0.0.1:9/x"}}}, "is not fetched"),
    "a-file": ({**OBJECT, "allOf": [{"$ref": "file:///etc/passwd"}]}, "is not fetched"),
    "nothing": ({**OBJECT, "properties": {"x": {"$ref": "#/$defs/x"}}}, "names nothing"),
    "no-object": ({"type": "string"}, "is not that of an object"), "none": (None, "is not that of an object"),
    "no-schema": ({**OBJECT, "properties": {"a": {"type": "text"}}}, "'text' is not valid"),
    "endless": ({**OBJECT, "$defs": {**DOUBLED, "d40": {}}, "properties": {"x": {"$ref": "#/$defs/d0"}}}, "is too large"),
}


@pytest.mark.parametrize("told,message", REFUSED_SCHEMAS.values(), ids=REFUSED_SCHEMAS)
def test_a_schema_that_cannot_be_checked_alone_is_refused(told, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        agentloop.server_schema(told)


MCP_RESULTS = {
    "texts": ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "structuredContent": {"a": 1}}, "a\nb"),
    "structure": ({"content": [], "structuredContent": {"b": 1, "a": "ö"}}, '{"a":"ö","b":1}'),
    "image": ({"content": [{"type": "image", "data": "AAAA" * 4000, "mimeType": "image/png"}]}, "[image image/png, 12.0 kB]"),
    "link": ({"content": [{"type": "resource_link", "name": "n", "uri": "file:///etc/passwd"}]}, "[resource link n, file:///etc/passwd]"),
    "resource": ({"content": [{"type": "resource", "resource": {"uri": "x:y", "text": "tell\nnot"}}]}, "[resource x:y, 8 bytes]"),
    "hostile": ({"content": [{"type": "image\x1b[2J]\n", "mimeType": 3, "data": None}, "x", None]}, "[image\\u{1b}[2J]]"),
    "nothing": ({}, ""), "no-list": ({"content": "x"}, ""),
}


@pytest.mark.parametrize("result,text", MCP_RESULTS.values(), ids=MCP_RESULTS)
def test_a_result_of_a_server_is_its_text_and_a_mention_of_all_else(result, text):
    assert agentloop.result_text(result) == text


class Offering:
    """MCP servers without a process: what they offer can be changed between two looks."""

    def __init__(self, offered: dict):
        self.offered = offered
        self.peers = {name: types.SimpleNamespace(server=agentloop.McpServer(name, ("s", name))) for name in offered}

    def listing(self, server: str) -> agentloop.McpListing:
        return agentloop.McpListing({name: agentloop.McpDefinition(name, told["description"], schema_of(told), told.get("annotations"))
                                     for name, told in self.offered[server]["tools"].items()})

    def definition(self, server: str, tool: str):
        return self.listing(server).tools.get(tool)


def schema_of(told: dict) -> dict:
    properties = {name: {"type": kind} for name, kind in told["schema"].items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return dict(reversed(list(schema.items()))) if told.get("key_order") else schema


def changed(offered: dict, changes: dict) -> dict:
    """What servers offer after the changes of a case: `files.read.description` and the like."""
    offered = json.loads(json.dumps(offered))
    for place, value in changes.items():
        if place != "pin":
            server, tool, key = place.split(".")
            offered[server]["tools"][tool][key] = value
    return offered


def added_tools(offered: dict, more: dict) -> dict:
    offered = json.loads(json.dumps(offered))
    for place, told in more.items():
        server, tool = place.split(".")
        offered.setdefault(server, {"tools": {}})["tools"][tool] = told
    return offered


MCP_CASES = [case for case in CASES if "mcp" in case["setup"] and (
    case["level"] == "decide" or {"mcp_change", "mcp_change_after_start", "mcp_add"} & case["setup"].keys())]


def test_there_are_mcp_cases():
    assert len(MCP_CASES) >= 16


@pytest.mark.parametrize("case", MCP_CASES, ids=[case["id"] for case in MCP_CASES])
def test_an_mcp_case_is_decided_by_the_real_kind(case, tmp_path):
    setup, listed = case["setup"], 'argv = ["s"]\ntools = ["read", "search"]\n'
    manifest = agentloop.parse_manifest(f"[mcp.files]\n{listed}[mcp.evil]\n{listed}", "m.toml")
    before = {"evil": {"tools": {}}, **setup["mcp"]}
    now = added_tools(changed(before, setup.get("mcp_change", {})), setup.get("mcp_add", {}))
    pinned = Offering(now if setup.get("mcp_change", {}).get("pin") else before)
    pins = {f"files__{name}": found.pin(pinned.peers["files"].server) for name, found in pinned.listing("files").tools.items()}
    servers, registry = Offering(now), agentloop.build_registry(manifest, str)
    registry = agentloop.with_server_tools(registry, manifest, servers, {name: servers.listing(name) for name in now}, pins)
    servers.offered = changed(now, setup.get("mcp_change_after_start", {}))
    places = agentloop.Places(str(tmp_path), str(tmp_path), os.path.realpath)
    try:
        grants = [agentloop.parse_grant(text, registry.forms, places) for text in case["scope_grants"]]
        verdict = agentloop.judge(strict_call(case["call"]["name"], json.dumps(case["call"]["arguments"])), registry, grants, places)
        decision = "deny" if verdict.decision is agentloop.Decision.ASK else str(verdict.decision)
    except ConfigError:
        decision = "error"
    assert decision == case["expect"], case["why"]


def test_a_pin_covers_all_that_a_server_says_of_a_tool_and_who_it_is():
    server = agentloop.McpServer("a", ("s", "--x"))
    one = agentloop.McpDefinition("t", "d", {"type": "object", "properties": {"b": {}, "a": {}}}, {"readOnlyHint": True})
    same = dataclasses.replace(one, schema={"properties": {"a": {}, "b": {}}, "type": "object"})
    assert one.pin(server) == same.pin(server)
    others = [dataclasses.replace(one, **{name: "other"}).pin(server) for name in ("name", "description", "schema", "annotations")]
    others += [one.pin(agentloop.McpServer("a", ("s", "--y"))), one.pin(agentloop.McpServer("a", url="https://x/"))]
    assert len({one.pin(server), *others}) == 7


def with_server(home: Path, mode: str, *lines: str) -> None:
    """Adds the fixture server to the manifest; its command line holds the path of `home`, to find it by."""
    argv = [sys.executable, str(TESTDATA / "mcpserver.py"), mode, str(home)]
    text = "\n".join((f"[mcp.fix]\nargv = {json.dumps(argv)}\ntools = {json.dumps(MCP_TOOLS)}", *lines))
    (home / "m.toml").write_text(f"{ARITHMETIC}\n{text}\n")


def servers_left(home: Path) -> bool:
    return subprocess.run(["pgrep", "-f", f"mcpserver.py .*{home}"], capture_output=True).stdout != b""


def finished(ended: Ended) -> list[tuple[str, str]]:
    """(status, output) of every call, in the order of their ends."""
    return [(event["status"], event["output"]) for event in ended.events if event["type"] == "tool.finished"]


@NEEDS_SDK
def test_a_server_is_used_as_it_behaves_and_leaves_nothing_behind(home):
    with_server(home, "noise", 'timeout = "1s"', 'readonly = ["echo", "pid"]')
    replies = [
        {"calls": [call(f"fix__{name}", **arguments)["calls"][0] for name, arguments in (
            ("echo", {"text": "a\x1b[2J"}), ("search", {"query": "q", "limit": None}), ("search", {"query": "q", "limit": 11}),
            ("search", {"query": ""}), ("echo", {"text": "x", "more": 1}), ("fail", {}), ("media", {}), ("ask", {}), ("environment", {}))]},
        call("fix__hang"), call("fix__echo", text="still there"), call("fix__change"), call("fix__echo", text="hi"),
        call("fix__crash"), call("fix__pid"), {"text": "Done."}]
    ended = agentloop_run(home, "x", *script(home, *replies), *MCP_GRANTS, "--on-deny", "tell", "-o", "jsonl", "-q",
                          environ={"OPENAI_API_KEY": "sk-test-12345678"})
    assert ended.code == 4 and not servers_left(home)
    results = finished(ended)
    assert results[:2] == [("ok", "a"), ("ok", "{'query': 'q', 'limit': None}")]
    assert [status for status, _ in results[2:5]] == ["error"] * 3
    assert "limit: 11 is greater than the maximum" in results[2][1] and "query: " in results[3][1] and "'more' was unexpected" in results[4][1]
    assert results[5] == ("failed", "it cannot be done")
    assert results[6][1].split("\n") == ["[image image/png, 12.0 kB]", "[resource link passwords, file:///etc/passwd]",
                                         "[resource file:///notes.txt, text/plain, 12 bytes]"]
    assert results[7] == ("ok", "Sampling not supported; Elicitation not supported; List roots not supported")
    assert "'PATH'" in results[8][1] and "OPENAI" not in results[8][1] and "AGENTLOOP" not in results[8][1]
    assert results[9] == ("timeout", "the MCP server fix: no answer within 1s; what it did until then is not known")
    assert (home / "cancelled").exists()
    assert results[10][0] == "ok" and results[11] == ("ok", "changed")
    assert results[12] == ("denied", "denied: the definition of the tool has changed since it was pinned")
    assert results[13][0] == "failed" and "exit code 7; what it did until then is not known" in results[13][1]
    assert results[13][1].endswith("fatal: out of paper")
    assert results[14] == ("failed", "the MCP server fix: it has ended with exit code 7")
    assert (home / "called").read_text().split() == ["echo", "search", "fail", "media", "ask", "environment", "hang", "echo", "change", "crash"]


DOWN = {"die": ("it has ended with exit code 1; its last words: no configuration found, giving up", ""),
        "mute": ("no answer within 1s", 'start_timeout = "1s"')}


@NEEDS_SDK
@pytest.mark.parametrize("mode,problem,line", [(mode, *told) for mode, told in DOWN.items()], ids=DOWN)
def test_a_server_that_does_not_come_up_is_left_out_with_one_warning(home, mode, problem, line):
    with_server(home, mode, line)
    ended = agentloop_run(home, "x", *script(home, call("fix__echo", text="x"), call("add", a=1, b=2), {"text": "Done."}), *GRANTED,
                          "--yes-scope", "fix__echo", "-o", "jsonl", "-q")
    warnings = [event["text"] for event in ended.events if event["type"] == "warning"]
    assert ended.code == 0 and warnings == [f"the MCP server fix is left out: {problem}"]
    assert finished(ended) == [("error", "error: there is no tool 'fix__echo'. The tools are: add, multiply, run_shell."), ("ok", "3")]
    with_server(home, mode, line, "required = true")
    ended = agentloop_run(home, "x", *script(home, {"text": "Done."}), "-o", "json")
    assert (ended.code, ended.object["outcome"]) == (12, "mcp_missing") and "mcp.fix: the MCP server fix is left out" in ended.stderr
    assert not servers_left(home)


def test_without_the_sdk_or_the_program_the_tools_are_left_out(home, tmp_path):
    (home / "m.toml").write_text('[mcp.a]\nargv = ["no-such-server"]\ntools = ["x"]\n')
    (home / "mcp-9.dist-info").mkdir()
    (home / "mcp-9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mcp\nVersion: 9\n")
    ended = agentloop_run(home, "x", *script(home, {"text": "Done."}), environ={"PYTHONPATH": str(home)})
    assert "warning: the MCP server a is left out: the MCP SDK is 9, and 1.x is needed" in ended.stderr and ended.code == 0
    if not agentloop.sdk_problem():
        ended = agentloop_run(home, "x", *script(home, {"text": "Done."}))
        assert "warning: the MCP server a is left out: cannot start no-such-server: No such file or directory" in ended.stderr


@NEEDS_SDK
def test_a_tool_that_only_is_not_asked_for_starts_no_server(home):
    with_server(home, "die", "required = true")
    assert agentloop_run(home, "x", *script(home, {"text": "Done."}), "--only", "add", "-q") == Ended(0, "Done.\n", "")


@NEEDS_SDK
def test_a_session_keeps_its_pins_and_a_lock_binds(home):
    with_server(home, "answer")
    flags = script(home, call("fix__echo", text="hi"), {"text": "Done."})
    stopped = agentloop_run(home, "x", *flags, "-o", "jsonl", "-q")
    assert stopped.code == 3
    pins = stopped.events[0]["pins"]
    assert set(pins) == {f"fix__{name}" for name in MCP_TOOLS}
    (home / "changed").touch()
    resumed = agentloop_run(home, stopped.way_on[1], "--yes-scope", "fix__echo", "-o", "jsonl", "-q", command="resume")
    assert resumed.code == 3 and "has changed since it was pinned" in resumed.events[-1]["error"]["message"]
    assert not (home / "called").exists()
    (home / "tools.lock").write_text(json.dumps({"mcp": {"fix__echo": pins["fix__echo"]}}))
    locked = agentloop_run(home, "x", *flags, *MCP_GRANTS, "-o", "jsonl", "-q")
    assert locked.code == 3 and not (home / "called").exists()
    warning = next(event["text"] for event in locked.events if event["type"] == "warning")
    assert warning.startswith("the tool fix__echo has changed since it was pinned: every call is denied; its digest is now ")
    (home / "tools.lock").write_text(json.dumps({"mcp": {"fix__echo": warning.split()[-1]}}))
    assert agentloop_run(home, "x", *flags, *MCP_GRANTS, "-q") == Ended(0, "Done.\n", "")
    (home / "tools.lock").write_text('{"mcp": {"fix__echo": 3}}')
    assert agentloop_run(home, "x", *flags).stderr.endswith("tools.lock.mcp.fix__echo: text is needed, not a whole number ('3')\n")


@NEEDS_SDK
@pytest.mark.parametrize("number,code", [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_server_outlives_its_agentloop_not_even_a_stubborn_one(home, number, code):
    with_server(home, "stubborn", 'timeout = "60s"')
    process = agentloop_popen(home, "run", "x", *script(home, call("fix__hang")), *MCP_GRANTS, "-q", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(lambda: (home / "hanging").exists())
    process.send_signal(number)
    before = time.monotonic()
    process.communicate()
    assert process.returncode == code and time.monotonic() - before < 5
    wait_for(lambda: not servers_left(home))


@NEEDS_SDK
def test_read_only_calls_run_at_once_and_a_stop_ends_them_all(home):
    with_server(home, "answer", 'timeout = "60s"', 'readonly = ["hang", "echo"]')
    calls = {"calls": [call("fix__hang")["calls"][0], call("fix__echo", text="x")["calls"][0], call("fix__hang")["calls"][0]]}
    process = agentloop_popen(home, "run", "x", *script(home, calls), *MCP_GRANTS, "-o", "jsonl", "-q", stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: (home / "called").exists() and (home / "called").read_text().count("hang") == 2)
    wait_for(lambda: "tool.finished" in journal_of(home).read_text())
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=10)
    results = finished(Ended(process.returncode, stdout, stderr))
    words = "the MCP server fix: ended because the run was stopped; what it did until then is not known"
    assert process.returncode == 130 and results == [("ok", "x"), ("timeout", words), ("timeout", words)]
    assert not servers_left(home)


@contextlib.contextmanager
def http_server(home: Path):
    """The fixture server behind a URL; yields the URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(TESTDATA / "mcpserver.py"), "http", str(port), str(home)], cwd=home)
    try:
        wait_for(lambda: is_listening(port))
        yield f"http://127.0.0.1:{port}/mcp/"
    finally:
        process.kill()
        process.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@NEEDS_SDK
def test_a_server_behind_a_url_gets_its_headers_which_are_shown_nowhere(home):
    table = 'headers = { Authorization = "Bearer ${SESAME}" }\ntools = ["echo", "hang", "crash", "ask"]\ntimeout = "1s"\n'
    flags = script(home, call("web__ask"), call("web__hang"), call("web__echo", text="hi"), call("web__crash"), call("web__echo", text="hi"), {"text": "Done."})
    grants = [part for name in ("echo", "hang", "crash", "ask") for part in ("--yes-scope", f"web__{name}")]
    with http_server(home) as url:
        (home / "m.toml").write_text(f'[mcp.web]\nurl = "{url}"\n{table}')
        wrong = agentloop_run(home, "x", *script(home, {"text": "Done."}), environ={"SESAME": "close-sesame"})
        assert "warning: the MCP server web is left out: HTTP 401" in wrong.stderr and "sesame" not in wrong.stderr
        script(home, *[call("web__ask"), call("web__hang"), call("web__echo", text="hi"), call("web__crash"), call("web__echo", text="hi"), {"text": "Done."}])
        ended = agentloop_run(home, "x", *flags, *grants, "-o", "jsonl", "-v", environ={"SESAME": "open-sesame"})
    assert ended.code == 0 and "sesame" not in ended.stdout + ended.stderr + journal_of(home).read_text()
    results = finished(ended)
    assert results[0] == ("ok", "Sampling not supported; Elicitation not supported; List roots not supported")
    assert results[1] == ("timeout", "the MCP server web: no answer within 1s; what it did until then is not known")
    assert results[2] == ("ok", "hi") and results[3][0] == "timeout" and results[4][0] == "failed"
    down = agentloop_run(home, "x", *script(home, {"text": "Done."}), "-q", environ={"SESAME": "open-sesame"})
    assert down.code == 0


def test_a_run_without_servers_imports_nothing_of_mcp(home):
    code = ("import sys, agentloop, os; os._exit = sys.exit; sys.argv = ['agentloop', 'run', 'x', '-q', *sys.argv[1:]]\n"
            "try: agentloop.main()\nexcept SystemExit: print([m for m in ('mcp', 'anyio', 'asyncio', 'pydantic') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code, *script(home, {"text": "Done."})], capture_output=True, text=True, cwd=home,
                          stdin=subprocess.DEVNULL, env=program_environment(home, PYTHONPATH=str(HERE)))
    assert done.stdout == "Done.\n[]\n"


@pytest.fixture(scope="module")
def npm_servers(tmp_path_factory):
    """The reference servers as npm packages."""
    if not shutil.which("npm"):
        pytest.skip("npm is not on this machine")
    place = tmp_path_factory.mktemp("npm")
    names = [f"@modelcontextprotocol/server-{name}" for name in ("everything", "filesystem")]
    done = subprocess.run(["npm", "install", "--silent", "--prefix", str(place), *names], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"npm cannot install: {done.stderr[-200:]}")
    return place / "node_modules" / ".bin"


@NEEDS_SDK
@pytest.mark.slow
def test_the_reference_servers_work_over_stdio(home, npm_servers):
    (home / "data").mkdir()
    (home / "data" / "a.txt").write_text("first line\n")
    (home / "m.toml").write_text(f"""
[mcp.all]
argv = ["{npm_servers}/mcp-server-everything", "stdio"]
tools = ["echo", "get-sum", "get-tiny-image", "get-structured-content", "get-resource-links"]
[mcp.files]
argv = ["{npm_servers}/mcp-server-filesystem", "{home}/data"]
tools = ["read_text_file", "list_directory", "write_file", "search_files"]
readonly = ["read_text_file", "list_directory", "search_files"]
""")
    replies = [call("all__echo", message="hi"), call("all__get-sum", a=2, b=3), call("all__get-tiny-image"), call("all__get-resource-links", count=2),
               call("all__get-structured-content", location="Chicago"),
               call("files__read_text_file", path=f"{home}/data/a.txt"), call("files__read_text_file", path="/etc/hostname"),
               call("files__write_file", path=f"{home}/data/b.txt", content="new"),
               call("files__search_files", path=f"{home}/data", pattern="*.txt"), {"text": "Done."}]
    grants = [f"all__{name}" for name in ("echo", "get-sum", "get-tiny-image", "get-structured-content", "get-resource-links")]
    grants += ["files__read_text_file:path=**", f"files__write_file:path={home}/data/* content=*", "files__search_files"]
    ended = agentloop_run(home, "x", *script(home, *replies), *(part for grant in grants for part in ("--yes-scope", grant)), "-o", "jsonl", "-q")
    results = finished(ended)
    assert ended.code == 0, results
    assert results[0][1] == "Echo: hi" and "5" in results[1][1] and "[image image/png, " in results[2][1]
    assert "[resource link " in results[3][1] and "temperature" in results[4][1]
    assert results[5] == ("ok", "first line") and results[6][0] == "failed" and (home / "data" / "b.txt").read_text() == "new"
    assert "a.txt" in results[8][1] and "b.txt" in results[8][1]
    assert subprocess.run(["pgrep", "-f", str(npm_servers)], capture_output=True).stdout == b""


@NEEDS_SDK
@pytest.mark.slow
def test_the_reference_server_works_behind_a_url(home, npm_servers):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([npm_servers / "mcp-server-everything", "streamableHttp"], env={**os.environ, "PORT": str(port)},
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: is_listening(port))
        (home / "m.toml").write_text(f'[mcp.all]\nurl = "http://127.0.0.1:{port}/mcp"\ntools = ["echo", "get-sum"]\n')
        flags = script(home, call("all__echo", message="hi"), call("all__get-sum", a=2, b=3), {"text": "Done."})
        ended = agentloop_run(home, "x", *flags, "--yes-scope", "all__echo:message=hi", "--yes-scope", "all__get-sum:a=* b=3", "-o", "jsonl", "-q")
        assert ended.code == 0 and finished(ended)[0] == ("ok", "Echo: hi") and "5" in finished(ended)[1][1]
    finally:
        process.kill()
        process.wait()


@NEEDS_SDK
@pytest.mark.slow
def test_a_killed_agentloop_leaves_no_reference_server(home, npm_servers):
    (home / "m.toml").write_text(f'{ARITHMETIC.replace(chr(34) + "3s" + chr(34), chr(34) + "60s" + chr(34))}\n[mcp.files]\n'
                                 f'argv = ["{npm_servers}/mcp-server-filesystem", "{home}"]\ntools = ["list_directory"]\n')
    flags = script(home, call("run_shell", command="touch there; sleep 60"))
    process = agentloop_popen(home, "run", "x", *flags, "--yes-scope", "run_shell", "-q", stdin=subprocess.DEVNULL)
    wait_for(lambda: (home / "there").exists())
    assert subprocess.run(["pgrep", "-f", str(npm_servers)], capture_output=True).stdout != b""
    process.kill()
    process.wait()
    wait_for(lambda: subprocess.run(["pgrep", "-f", str(npm_servers)], capture_output=True).stdout == b"")
