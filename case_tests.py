# ── The cases that need a run: the real program, each in a world of its own ──


RUN = [case for case in CASES if case["level"] == "run"]
NOT_YET: dict[str, str] = {}
IS_THERE = {"http": lambda: "http" in agentloop.KINDS, "agent": lambda: "agent" in agentloop.KINDS,
            "mcp": lambda: "mcp" in agentloop.Tables.__dataclass_fields__, "skills": lambda: "activate_skill" in agentloop.BUILTINS}
SOFT: dict[str, str] = {}  # cases where deny and error change places: which of the two, and why
SLOW = {"DO-010": "reads five gigabytes", "DO-011": "makes 100,000 files"}
REFUSED_FOR = {"TR-006": "argv[0]", "TR-007": "'aprove'", "TR-009": "tools.toml", "TR-011": "'yes_scope'", "TR-013": "a tool's name",
               "TR-027": "files__read", "LO-012": "another user"}  # the right reason, on stderr
HTTP_TOOLS = r"""
tools.http_get = { kind = "http", description = "x", method = "GET", url = "{url}", params.url = { type = "string" } }
tools.get_item = { kind = "http", description = "x", method = "GET", url = "https://api.example.com/v1/items/{id}?lang={lang}", params.id = { type = "string" }, params.lang = { type = "string" } }
tools.post_note = { kind = "http", description = "x", method = "POST", url = "https://api.example.com/v1/notes", headers = { Authorization = "Bearer ${NOTES_TOKEN}", "X-Tag" = "{tag}" }, body = { text = "{text}" }, params.tag = { type = "string" }, params.text = { type = "string" } }
tools.metrics = { kind = "http", description = "x", method = "GET", url = "http://127.0.0.1:9100/metrics", allow_private = true }
"""
AGENT_TOOLS = """
tools.researcher = { kind = "agent", description = "x", system = "You look things up.", tools = ["read_file", "http_get"] }
"""
SKILL_TOOLS = """
tools.activate_skill = { kind = "builtin" }
"""
MANIFESTS = {"http": HTTP_TOOLS, "agent": AGENT_TOOLS, "skills": SKILL_TOOLS}
STUBBED = ("git", "ping", "tar", "grep", "id", "systemctl", "kubectl", "cat", "touch", "date", "cd")
HARMLESS = ("printenv", "printf", "ls", "setsid", "sleep", "true")  # stubs that go on as the real program
STUB = """#!/bin/sh
# Stands for a program of the cases: leaves its arguments and its environment, and is the real one where that is harmless.
printf '%s\\0' "$#" "${0##*/}" "$@" >> "${0%/*}/../ran/$$"
/bin/cat "/proc/$$/environ" >> "${0%/*}/../ran/$$.environ"
real="${0%/*}/../real/${0##*/}"
[ ! -x "$real" ] || exec "$real" "$@"
"""
QUESTION = r"q = stop\r\n> "
OTHER_USER = 54321


def needed(case: dict) -> set[str]:
    """What of NOT_YET a case needs."""
    skills = "skill" in json.dumps([case["call"]["name"], case["setup"].get("flags", [])])
    return ({case["tool_kind"]} | ({"skills"} if skills else set())) & set(NOT_YET)


@dataclasses.dataclass
class Stage:
    """The world of one case, and how the program is started in it."""

    case: dict
    root: Path
    cwd: str
    manifest: str
    host: dict  # what casehost.py is told
    flags: list[str]
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    turns: list[tuple[dict, str | None]] = dataclasses.field(default_factory=list)  # earlier calls; what is answered to a question
    before: list[dict] = dataclasses.field(default_factory=list)
    after: list[dict] = dataclasses.field(default_factory=list)

    @property
    def setup(self) -> dict:
        return self.case["setup"]

    @property
    def state(self) -> Path:
        return self.root / "S" / "agentloop"

    @property
    def on_terminal(self) -> bool:
        return bool(self.setup.get("interactive")) or "terminal_lacks" in self.case.get("check", {})

    def journal(self) -> Path | None:
        return next((path for path in sorted(self.state.glob("sessions/*.jsonl")) if path.name != "s1.jsonl"), None)


def put(path: str | Path, content: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_text(content)


def put_link(make: typing.Callable[[str, str], None], path: str, target: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    make(target, path)


def put_sparse(path: str, size: int) -> None:
    put(path, "")
    os.truncate(path, size)


def put_many(folder: str, count: int) -> None:
    os.makedirs(folder)
    for n in range(count):
        os.close(os.open(f"{folder}/{n}", os.O_CREAT | os.O_WRONLY))


def put_state(stage: Stage, name: str) -> None:
    os.makedirs(stage.state, mode=0o700)
    os.makedirs(stage.state / "sessions", mode=0o700)
    (stage.state / name).write_text("{}\n")


def play_history(stage: Stage, history: list) -> None:
    """Text that a tool gave earlier: a file that an earlier call read, under a grant for that file alone."""
    for n, (role, text) in enumerate(history):
        assert role == "tool"
        put(f"{stage.cwd}/history-{n}", text)
        stage.flags += ["--yes-scope", f"read_file:history-{n}"]
        stage.turns.append((call("read_file", path=f"history-{n}")["calls"][0], None))


def calls_of(pairs: list) -> list[dict]:
    return [call(name, **arguments)["calls"][0] for name, arguments in pairs]


def edit_shell(stage: Stage, addition: str) -> None:
    stage.manifest = stage.manifest.replace('kind = "shell",', f'kind = "shell", {addition},', 1)


def use_flags(stage: Stage, flags: list[str]) -> None:
    """The flags of a case; a manifest that is named takes the place of the fixture's."""
    if "--tools" in flags:
        stage.manifest = ""
    stage.flags += ["-v" if flag == "--verbose" else flag for flag in flags]


def each(act: typing.Callable) -> typing.Callable[[Stage, dict], None]:
    """A step that does the same for each entry of a table: path, value."""
    return lambda stage, table: [act(path, value) for path, value in table.items() if value is not None] and None


# Every key of a case's setup, in the order in which its world is made; a key that is not here fails the test.
SETUP: dict[str, typing.Callable[[Stage, typing.Any], None]] = {
    "dirs": lambda stage, paths: [os.makedirs(path, exist_ok=True) for path in paths] and None,
    "files": each(put),
    "big_files": each(put_sparse),
    "many_files": each(put_many),
    "symlinks": each(lambda path, target: put_link(os.symlink, path, target)),
    "hardlinks": each(lambda path, target: put_link(os.link, path, target)),
    "fifos": lambda stage, paths: [os.mkfifo(path) for path in paths] and None,
    "state_file": put_state,
    "user_skill_files": lambda stage, skills: [put(
        stage.root / "C/agentloop/skills" / path, f"---\nname: {path.split('/')[0]}\ndescription: d\n---\n{text}\n")
        for path, text in skills.items()] and None,
    "env": lambda stage, environ: stage.environ.update(environ),
    "dns": lambda stage, names: stage.host.update(dns=names),
    "http": lambda stage, replies: stage.host.update(http=replies),
    "umask": lambda stage, umask: stage.host.update(umask=umask),
    "after_decision": lambda stage, operations: stage.host.update(after_decision=operations),
    "manifest_env": lambda stage, names: edit_shell(stage, f"env = {json.dumps(names)}"),
    "timeout_s": lambda stage, seconds: edit_shell(stage, f'timeout = "{seconds}s"'),
    "flags": use_flags,
    "history": play_history,
    "earlier_turns": lambda stage, turns: stage.turns.extend((calls_of([turn[:2]])[0], turn[2]) for turn in turns),
    "batch_before": lambda stage, pairs: stage.before.extend(calls_of(pairs)),
    "batch_before_repeat": lambda stage, told: stage.before.extend(calls_of([told[0]] * told[1])),
    "batch_after": lambda stage, pairs: stage.after.extend(calls_of(pairs)),
}
STEERING = {"cwd", "interactive", "answer", "typed_before_prompt", "stdin_pipe", "only_start", "resume", "inside_agent",
            "no_user_mcp"}  # read where the run is driven


# ── An MCP server that does as a case says ──


MCP_SETUP = {"mcp", "mcp_change", "mcp_change_after_start", "mcp_add", "mcp_result", "mcp_result_link", "mcp_server_requests"}


def mcp_tool(told: dict) -> dict:
    """A tool's definition as `tools/list` gives it."""
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in told["schema"].items()},
              "required": list(told["schema"])}
    return {"description": told["description"], "inputSchema": schema}


def mcp_changed(servers: dict, change: dict) -> dict:
    """The servers with one field of some tools changed."""
    servers = json.loads(json.dumps(servers))
    for place, value in change.items():
        if place == "pin":
            continue
        server, name, field = place.split(".")
        tool = servers[server][name]
        if field == "schema":
            tool["inputSchema"] = mcp_tool({"description": "", "schema": value})["inputSchema"]
        elif field == "key_order":
            servers[server][name] = dict(reversed([*tool.items(), ("inputSchema", dict(reversed(tool["inputSchema"].items())))]))
        elif field in ("description", "annotations"):
            tool[field] = value
        else:
            pytest.fail(f"unknown key {place}")
    return servers


def pin_of(argv: list[str], name: str, tool: dict) -> str:
    """The pin of a definition: the digest of its canonical JSON (approvals.md 6)."""
    return agentloop.digest([argv, name, tool["description"], tool["inputSchema"], tool.get("annotations")])


def put_servers(stage: Stage) -> None:
    """The MCP servers of a case: their tables in the manifest, the pins beside it, and what they will do."""
    setup, behaviour = stage.setup, stage.root / "behaviour.json"
    pinned = {server: {name: mcp_tool(tool) for name, tool in told["tools"].items()} for server, told in setup["mcp"].items()}
    change = setup.get("mcp_change", {})
    servers = mcp_changed(pinned, change)
    pinned = servers if change.get("pin") == "after" else json.loads(json.dumps(pinned))
    for place, told in setup.get("mcp_add", {}).items():
        server, name = place.split(".")
        servers.setdefault(server, {})[name] = mcp_tool(told)
        if server not in pinned:  # a server of its own, that the manifest lists; else a tool that it does not list
            pinned[server] = {name: mcp_tool(told)}
    doing = {"log": str(stage.root / "mcp.jsonl"), "servers": servers, "result": setup.get("mcp_result", "ok"),
             "link": setup.get("mcp_result_link", ""), "requests": setup.get("mcp_server_requests", [])}
    put(behaviour, json.dumps(doing))
    put(doing["log"], "")
    pins = {}
    for server, tools in pinned.items():
        argv = [sys.executable, str(TESTDATA / "casemcp.py"), str(behaviour), server]
        stage.manifest += f"\n[mcp.{server}]\nargv = {json.dumps(argv)}\ntools = {json.dumps(list(tools))}\n"
        pins.update({f"{server}__{name}": pin_of(argv, name, tool) for name, tool in tools.items()})
    put(stage.root / "tools.lock", json.dumps({"mcp": pins}))
    if "mcp_change_after_start" in setup:
        later = {**doing, "servers": mcp_changed(servers, setup["mcp_change_after_start"])}
        stage.host["after_start"] = [{"op": "replace", "path": str(behaviour), "text": json.dumps(later)},
                                     {"op": "await", "path": doing["log"], "text": "list_changed"}]


# ── A case on its stage, and its run ──


def staged(case: dict, root: Path) -> Stage:
    """The world of a case, ready for its run. Fails for a key that nothing here knows."""
    names = {"@T@": f"{root}/T", "@HOME@": f"{root}/H", "@STATE@": f"{root}/S/agentloop"}
    case = filled(case, names)
    unknown = set(case["setup"]) - set(SETUP) - STEERING - MCP_SETUP | set(case.get("check", {})) - set(CHECKS)
    assert not unknown, f"unknown key {', '.join(sorted(unknown))}"
    parts = [text for kind, text in MANIFESTS.items() if kind not in NOT_YET]
    host = {"log": f"{root}/host.jsonl", "dns": {}, "http": {}, "umask": "077", "after_start": [], "after_decision": [],
            "watched": case.get("check", {}).get("not_read", []), "call": ""}
    stage = Stage(case, root, case["setup"].get("cwd", names["@T@"] + "/w"), FIXTURE + "".join(parts), host,
                  [word for grant in case["scope_grants"] for word in ("--yes-scope", grant)])
    for folder in (stage.cwd, names["@HOME@"], f"{root}/S", f"{root}/C"):
        os.makedirs(folder, exist_ok=True)
    for key, act in SETUP.items():
        if key in stage.setup:
            act(stage, stage.setup[key])
    if "mcp" in stage.setup:
        put_servers(stage)
    put_stubs(root)
    put(root / "tools.toml", stage.manifest)
    stage.host["call"] = f"c{len(stage.turns) + len(stage.before) + 1}"
    return stage


def put_stubs(root: Path) -> None:
    """A folder of programs that only say that they ran; what is harmless then really runs."""
    for folder in ("bin", "real", "ran"):
        (root / folder).mkdir()
    (root / "stub").write_text(STUB)
    (root / "stub").chmod(0o700)
    for name in (*STUBBED, *HARMLESS):
        (root / "bin" / name).symlink_to("../stub")
    for name in HARMLESS:
        (root / "real" / name).symlink_to(shutil.which(name))


def replies_of(stage: Stage) -> list[dict]:
    """What the model says: the earlier turns, the turn of the case, the answer."""
    told = stage.case["call"]
    mine = {"name": told["name"], "arguments": told.get("arguments_raw", told.get("arguments"))}
    lines = [{"calls": [earlier]} for earlier, _ in stage.turns]
    if "only_start" in stage.setup:
        return [*lines, {"text": "done"}]
    lines += [call(stage.setup["inside_agent"], task="look")] if "inside_agent" in stage.setup else []
    lines += [{"calls": [*stage.before, mine, *stage.after]}]
    return [*lines, *([{"text": "found"}] if "inside_agent" in stage.setup else []), {"text": "done"}]


@dataclasses.dataclass(frozen=True)
class Ran:
    """How the run of a case went, as seen from outside."""

    stage: Stage
    code: int
    stdout: str  # of a terminal: all that it showed
    stderr: str
    seconds: float
    questions: tuple[str, ...] = ()  # what the terminal showed up to each question

    @property
    def events(self) -> list[dict]:
        journal = self.stage.journal()
        text = self.stdout if not self.stage.on_terminal else journal.read_text() if journal else ""
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    @property
    def own_events(self) -> list[dict]:
        """The events of the session that made the call: those of the sub-agent where the case is inside one."""
        if "inside_agent" in self.stage.setup:
            return [event["event"] for event in self.events if event["type"] == "agent.step"]
        return self.events

    def last(self, kind: str, **wanted: str) -> dict:
        return next((event for event in reversed(self.own_events) if event["type"] == kind and wanted.items() <= event.items()), {})

    @property
    def finished(self) -> dict:
        return self.last("tool.finished", call=self.stage.host["call"])

    @property
    def result(self) -> str:
        """What the model got of the call; a result has no line end at its end."""
        return self.finished.get("output", "") + "\n"

    @property
    def executed(self) -> list[list[str]]:
        """The argument vector of every program that was started."""
        return [argv for path in self.stage.root.glob("ran/*[0-9]") for argv in split_record(path.read_text().split("\0")[:-1])]

    @property
    def environments(self) -> list[dict[str, str]]:
        """The environment of every program that was started, MCP servers among them."""
        stubs = [dict(entry.split("=", 1) for entry in path.read_text().split("\0")[:-1]) for path in self.stage.root.glob("ran/*.environ")]
        return stubs + [line["environment"] for line in records(self.stage.root / "mcp.jsonl") if "environment" in line]

    @property
    def requests(self) -> list[dict]:
        return [line for line in records(self.stage.root / "host.jsonl") if "request" in line]

    @property
    def state_text(self) -> str:
        return "".join(path.read_text() for path in self.stage.state.rglob("*") if path.is_file())

    @property
    def outcome(self) -> str:
        """The decision in the words of the cases."""
        if self.code == 2 and not self.last("model.replied"):
            return "error"
        if "only_start" in self.stage.setup:
            return "allow"
        if self.stage.case["expect"] == "ask" and len(self.questions) == len(answers_of(self.stage)):
            return "ask"
        decided = self.last("call.decided", call=self.stage.host["call"]).get("decision")
        status, spawned = self.finished.get("status"), self.last("tool.spawned", call=self.stage.host["call"])
        if decided != "allow":
            return decided
        if status in ("denied", "error"):
            return {"denied": "deny"}.get(status, status)
        return "allow" if status == "ok" or spawned else "error"


def split_record(words: list[str]) -> typing.Iterator[list[str]]:
    """The argument vectors in what one process left: a count, the name, and so many arguments, again and again."""
    while words:
        count = int(words[0])
        yield words[1:count + 2]
        words = words[count + 2:]


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def host_words(stage: Stage, words: list[str]) -> list[str]:
    put(stage.root / "host.json", json.dumps(stage.host))
    return [sys.executable, str(TESTDATA / "casehost.py"), str(stage.root / "host.json"), "--", *words]


def stage_environment(stage: Stage) -> dict[str, str]:
    return {"PATH": f"{stage.root}/bin", "HOME": f"{stage.root}/H", "LANG": "C.UTF-8", "XDG_STATE_HOME": f"{stage.root}/S",
            "XDG_CONFIG_HOME": f"{stage.root}/C", "XDG_CACHE_HOME": f"{stage.root}/X", **stage.environ}


def run_in_pipes(stage: Stage, words: list[str]) -> Ran:
    """A run with nobody there: no terminal anywhere, stdin a pipe only where the case has one."""
    piped, began = stage.setup.get("stdin_pipe"), time.monotonic()
    process = subprocess.Popen(host_words(stage, [*words, "-o", "jsonl"]), cwd=stage.cwd, env=stage_environment(stage), text=True,
                               stdin=subprocess.DEVNULL if piped is None else subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, start_new_session=True)
    stdout, stderr = process.communicate(piped, timeout=60)
    return Ran(stage, process.returncode, stdout, stderr, time.monotonic() - began)


def run_on_terminal(stage: Stage, words: list[str], answers: list[str | None]) -> Ran:
    """A run at a real terminal, where each question gets the next answer; None is no answer but the end of input."""
    began, questions = time.monotonic(), []
    program, *arguments = host_words(stage, words)
    terminal = pexpect.spawn(program, arguments, cwd=stage.cwd, encoding="utf-8", codec_errors="replace", timeout=30, echo=False,
                             env={**stage_environment(stage), "TERM": "xterm"}, dimensions=(24, 80))
    terminal.delaybeforesend, shown = None, ""
    terminal.send(stage.setup.get("typed_before_prompt", ""))
    for answer in answers:
        if terminal.expect([QUESTION, pexpect.EOF]):
            break
        shown += terminal.before + terminal.after
        questions.append(shown.replace("\r\n", "\n"))
        if answer is None:
            assert terminal.expect([pexpect.TIMEOUT, pexpect.EOF, "done"], timeout=0.3) == 0, "it did not wait for an answer"
        terminal.send("\x04" if answer is None else answer)
    terminal.expect(pexpect.EOF)
    shown += terminal.before
    terminal.wait()
    return Ran(stage, terminal.exitstatus, shown.replace("\r\n", "\n"), "", time.monotonic() - began, tuple(questions))


def answers_of(stage: Stage) -> list[str | None]:
    """What a person types at each question of the run."""
    earlier = [f"{answer}\n" for _, answer in stage.turns if answer is not None]
    return [*earlier, stage.setup.get("answer", "n\n")] if stage.setup.get("interactive") else []


def first_words(stage: Stage) -> list[str]:
    put(stage.root / "script.jsonl", "".join(json.dumps(reply) + "\n" for reply in replies_of(stage)))
    tools = [] if "--tools" in stage.flags else ["--tools", f"{stage.root}/tools.toml"]
    return ["run", "do it", "-m", f"script:{stage.root}/script.jsonl", "--context", "1000000", "--on-deny", "tell", *tools]


def stopped_session(stage: Stage) -> list[str]:
    """A session that stopped at the case's call, after others that a person approved; the words that resume it."""
    told = stage.setup["resume"]
    assert told.keys() <= {"approvals", "always", "owner"}, "unknown key in resume"
    grants = told.get("approvals", [])
    stage.turns = [(call("run_shell", command=grant.partition(":")[2])["calls"][0], None) for grant in grants]
    stage.host["call"] = f"c{len(grants) + 1}"
    answers = ["always\n" if grant in told.get("always", ()) else "y\n" for grant in grants]
    limit = ["--max-turns", str(len(grants) + 1)]
    ran = run_on_terminal(stage, [*first_words(stage), *limit], answers)
    assert (ran.code, len(ran.questions), len(ran.executed)) == (ExitCode.LIMIT, len(grants), len(grants)), ran.stdout
    for path in stage.root.glob("ran/*"):
        path.unlink()
    if told.get("owner") == "other":
        os.chown(stage.journal(), OTHER_USER, -1)
    return ["resume", stage.journal().stem, "--on-deny", "tell", "--max-turns", "20"]


def run_case(stage: Stage) -> Ran:
    words = [*(stopped_session(stage) if "resume" in stage.setup else first_words(stage)), *stage.flags]
    return run_on_terminal(stage, [*words, "-v"], answers_of(stage)) if stage.on_terminal else run_in_pipes(stage, words)


# ── What must hold besides ──


def listed(value: typing.Any) -> list:
    return value if isinstance(value, list) else [value]


def shown_fds(result: str) -> list[int]:
    """The descriptors in what `ls -l /proc/self/fd` showed, but for the one that it read the folder with."""
    found = re.findall(r" (\d+) -> (.*)", result)
    return [int(number) for number, target in found if not re.fullmatch(r"/proc/\d+/fd", target)]


def modes_hold(ran: Ran, wanted: dict[str, str]) -> bool:
    paths = [ran.stage.state, *ran.stage.state.rglob("*")]
    modes = {("dir" if path.is_dir() else "file", f"{stat.S_IMODE(path.stat().st_mode):04o}") for path in paths}
    return modes == set(wanted.items())


CHECKS: dict[str, typing.Callable[[Ran, typing.Any], bool]] = {
    "prompt_has": lambda ran, texts: bool(ran.questions) and all(text in ran.questions[-1] for text in texts),
    "prompt_lacks": lambda ran, texts: bool(ran.questions) and not any(text in ran.questions[-1] for text in texts),
    "terminal_lacks": lambda ran, text: ran.stage.on_terminal and "done" in ran.stdout and text not in ran.stdout,
    "result_has": lambda ran, text: text in ran.result,
    "result_lacks": lambda ran, text: not any(text in event.get("output", "") for event in ran.events),
    "result_bytes_max": lambda ran, most: 100 < len(ran.result.encode()) <= most,
    "executed": lambda ran, commands: all(shlex.split(command) in ran.executed for command in listed(commands)),
    "executed_argv": lambda ran, argv: ran.executed == [argv],
    "not_executed": lambda ran, commands: not any(shlex.split(command) in ran.executed for command in listed(commands)),
    "child_env_lacks": lambda ran, names: bool(ran.environments) and not any(name in env for env in ran.environments for name in names),
    "child_fds": lambda ran, wanted: shown_fds(ran.result) == wanted,
    "fetched": lambda ran, urls: [request["request"] for request in ran.requests] == urls,
    "not_fetched": lambda ran, urls: not any(request["request"] in urls for request in ran.requests),
    "requests_max": lambda ran, most: 0 < len(ran.requests) <= most,
    "connected_ip": lambda ran, address: [request["ip"] for request in ran.requests] == [address],
    "body_json": lambda ran, body: [json.loads(base64.b64decode(request["body"])) for request in ran.requests] == [body],
    "server_requests": lambda ran, how: how == "refused" and [line["refused"] for line in records(
        ran.stage.root / "mcp.jsonl") if "answer" in line] == [True] * len(ran.stage.setup["mcp_server_requests"]),
    "not_read": lambda ran, paths: not any(line.get("open") in paths for line in records(ran.stage.root / "host.jsonl")),
    "file_is": lambda ran, files: all(Path(path).read_text() == text for path, text in files.items()),
    "absent": lambda ran, paths: not any(os.path.lexists(path) for path in paths),
    "state_lacks": lambda ran, text: ran.state_text != "" and text not in ran.state_text,
    "state_modes": modes_hold,
    "stderr_lacks": lambda ran, text: text not in ran.stderr + ran.stdout,
    "system_prompt_lacks": lambda ran, text: ran.state_text != "" and text not in ran.state_text,
    "startup": lambda ran, how: how == "refuse" and ran.code == 2 and not ran.last("model.replied") and ran.executed == [],
    "seconds_max": lambda ran, most: ran.seconds <= most,
    "rss_max_mb": lambda ran, most: [line["rss_mb"] <= most for line in records(ran.stage.root / "host.jsonl") if "rss_mb" in line] == [True],
}


@pytest.fixture
def stage_root():
    """A fresh folder under a name that no check looks for; what a case left running there ends with it."""
    root = Path(os.path.realpath(tempfile.mkdtemp(prefix="case-")))
    yield root
    for path in root.glob("ran/*[0-9]"):
        with contextlib.suppress(OSError):
            if f"{root}/bin" in Path(f"/proc/{path.name}/environ").read_text():
                os.kill(int(path.name), signal.SIGKILL)
    shutil.rmtree(root)


def run_parameters() -> typing.Iterator[typing.Any]:
    for case in RUN:
        marks = [pytest.mark.skip(reason=f"{kind}: {NOT_YET[kind]}") for kind in sorted(needed(case))]
        marks += [pytest.mark.slow] if case["id"] in SLOW else []
        marks += [pytest.mark.skipif(os.getuid() != 0, reason="root alone can give a file away")] if case["id"] == "LO-012" else []
        yield pytest.param(case, id=case["id"], marks=marks)


def test_the_cases_that_need_a_run_are_all_here():
    assert len(RUN) == 122 and {case["id"] for case in RUN} >= SOFT.keys() | SLOW.keys() | REFUSED_FOR.keys()


@pytest.mark.parametrize("kind", NOT_YET)
def test_what_is_not_yet_there_is_not_there(kind):
    assert not IS_THERE[kind](), f"take {kind!r} out of NOT_YET"


@pytest.mark.parametrize("case", list(run_parameters()))
def test_a_case_holds_in_the_real_program(case, stage_root):
    ran = run_case(staged(case, stage_root))
    told = (ran.outcome, ran.code, ran.stdout[-3000:], ran.stderr[-1000:])
    assert (ran.outcome == "allow") == (case["expect"] == "allow"), (case["why"], told)
    assert (ran.outcome == case["expect"]) == (case["id"] not in SOFT), (case["why"], told)
    assert ran.code in (0, 4) or ran.code == 2 and case["expect"] == "error", told
    assert REFUSED_FOR.get(case["id"], "") in ran.stderr, told
    for key, wanted in ran.stage.case.get("check", {}).items():
        assert CHECKS[key](ran, wanted), (key, wanted, told)
