# ── 13. Models: what servers really send, over the wire ──
#
# The 229 cases of testdata/quirks.jsonl, served by testdata/replayserver.py, which judges every later request the
# way the real server would. First one request of each, then the session that follows from it.

import functools

import replayserver  # noqa: E402  (beside fakeserver)

CASES = {case["id"]: case for case in QUIRKS}
CHATS = [case for case in QUIRKS if case.get("endpoint") in (None, "/api/generate")]
DISCOVERIES = [case for case in QUIRKS if case["category"] == "discovery"]
WAITS = {"t-stall-mid-stream", "t-stall-before-headers", "t-keepalive-comments-forever"}  # for a timeout of two seconds
READ_TIMEOUT, RUN_TIMEOUT = 2.0, 4.0


def case_params(cases):
    """The cases as parameters, those that wait for a timeout marked as slow."""
    return [pytest.param(case, id=case["id"], marks=[pytest.mark.slow] if case["id"] in WAITS else []) for case in cases]


@pytest.fixture(scope="module")
def replay():
    """(server, base URL) of the replay server; each test has a counter of its own under `id@tag`."""
    server, base = replayserver.serve(gap_ms=0)
    yield server, base
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def replayed_model(base: str, case: dict, tag: str, calls=agentloop.CallMode.NATIVE, seconds: float = RUN_TIMEOUT):
    """A model at one case's address, and the waits that it did not really make."""
    path = "" if case["provider"] == "ollama" else "/v1"
    window = 2_000_000 if "1mb" in case["id"] else 32_768
    options = agentloop.ModelOptions(window, connect_s=READ_TIMEOUT, first_byte_s=READ_TIMEOUT, idle_s=READ_TIMEOUT,
                                     stream=case["stream"])
    choice = agentloop.ModelChoice(case["provider"], "m", f"{base}/case/{case['id']}@{tag}{path}", calls, options)
    with contextlib.closing(agentloop.Http(agentloop.Deadline(time.monotonic() + seconds))) as http:
        model = agentloop.open_model(choice, http, None, None)
        model.waits = []
        model.sleep = model.waits.append
        if case.get("endpoint"):
            model.wire.path = case["endpoint"]
        yield model


def question(tools=tuple(QUIRK_TOOLS)) -> agentloop.Request:
    return agentloop.Request(0, (agentloop.Message(Role.SYSTEM, "s"), agentloop.Message(Role.USER, "u")), tools,
                             agentloop.Offer.FREE, 64)


def read_reply_of(model) -> tuple[agentloop.Reply, str | None]:
    """The reply to one request and what was wrong with it, in the words of the cases."""
    try:
        read = functools.partial(model.read, question(), lambda event: None)
        reply = model.exchange(model.wire.path, model.wire.body(model, question(), agentloop.Dialect()), read)
    except agentloop.ModelError as error:
        return agentloop.Reply(), str(error.kind)
    reply = agentloop.recover_text_calls(reply, QUIRK_TOOLS)
    broken = {"schema" if not call.name or "object is needed" in call.problem else "json" for call in reply.calls
              if call.arguments is None or not call.name}
    return reply, min(broken, default=None)


def test_all_cases_are_played():
    assert len(CASES) == 229 and len(CHATS) + len(DISCOVERIES) == 229


@pytest.mark.parametrize("case", case_params(CHATS))
def test_one_request_is_answered_as_its_server_means_it(replay, case):
    with replayed_model(replay[1], case, "once") as model:
        reply, kind = read_reply_of(model)
    good = [(call.name, call.arguments) for call in reply.calls if call.arguments is not None and call.name]
    assert any((content is None or content == reply.text.strip()) and kind == error and (error or good == calls)
               for content, calls, error in expectations(case)), (reply, kind, case["expect"])
    expect, flags = case["expect"], case["expect"].get("flags", ())
    if not kind and "thinking" in expect:
        assert reply.thinking == expect["thinking"]
    if not kind and "usage" in expect:
        assert reply.usage == agentloop.Usage(*expect["usage"].values())
    if "repaired_args" in flags and good:
        assert [call.repaired for call in reply.calls] == [True]
    if "text_tool_call" in flags:
        assert {call.via for call in reply.calls} == {agentloop.Via.TEXT}
    assert bool(reply.problem) == (case["id"] == "tx-tool-call-bad-json")


@dataclasses.dataclass(frozen=True)
class Recorder:
    """A kind of tool that only notes what it was called with."""

    ran: list
    form: agentloop.ScopeForm = agentloop.ScopeForm.ARGV
    cut: agentloop.CutFrom = agentloop.CutFrom.MIDDLE_KEEP_TAIL

    def canonical(self, name, arguments, places):
        return Canonical(name, self.form, (name, json.dumps(arguments)))

    def run(self, canonical, arguments, context):
        self.ran.append((canonical.tool, arguments))
        return agentloop.ToolOutput(agentloop.ToolStatus.OK, agentloop.whole("done"))

    def is_bounded(self, canonical):
        return True

    def forbidden(self, canonical, places):
        return ""


@dataclasses.dataclass(frozen=True)
class Played:
    """A session that a case was the first reply of."""

    finished: agentloop.SessionFinished
    ran: list
    events: list
    requests: list
    waits: list

    def of(self, cls) -> list:
        return [event for event in self.events if isinstance(event, cls)]


EARLIER = {  # refusals that speak of a history: what the server said before, and how the history was written
    "h-400-groq-property": ({"reasoning_content": "hmm"}, "call_1", agentloop.Dialect()),
    "h-400-deepseek-reasoning": (None, "call_1", agentloop.Dialect()),
    "h-400-dup-id": (None, "call_00_x", agentloop.Dialect()),
    "h-400-xai-flat": (None, "call_1", agentloop.Dialect(habits=(agentloop.Habit.RESULT_NAMES,))),
}


def begun_with(case: dict, started) -> agentloop.State:
    """The state that a case's request is asked in."""
    state = agentloop.apply(agentloop.State(), started)
    if case["id"] not in EARLIER:
        return state
    echo, wire_id, dialect = EARLIER[case["id"]]
    made = agentloop.ToolCall("c1", "now", {}, wire_id=wire_id)
    for event in (agentloop.ModelReplied(1, "", (made,), echo=echo),
                  agentloop.CallDecided("c1", agentloop.Decision.ALLOW, agentloop.DecidedBy.AUTO),
                  agentloop.ToolFinished("c1", "now", agentloop.ToolStatus.OK, "noon"),
                  agentloop.RequestAdapted("", dialect=dialect)):
        state = agentloop.apply(state, event)
    return state


def play(replay, case: dict, tag: str, calls=agentloop.CallMode.NATIVE, seconds: float = RUN_TIMEOUT) -> Played:
    """The whole session over a case: every reply, every call, every refusal."""
    server, base = replay
    ran, events, places = [], [], agentloop.Places("/", "/", os.path.normpath)
    tools = {spec.name: agentloop.Tool(spec.name, spec.description, spec.parameters, Recorder(ran),
                                       agentloop.Approval.AUTO) for spec in QUIRK_TOOLS}
    registry = agentloop.Registry(tools, dict.fromkeys(tools, agentloop.ScopeForm.ARGV))
    with replayed_model(base, case, tag, calls, seconds) as model:
        started = agentloop.SessionStarted(
            "s", "0", 1, "task", case["provider"], "m", model.endpoint, calls, agentloop.Options(), "system", "", (),
            "nonce", tuple(tools), "", (), 0, "", "", "/")
        parts = agentloop.Parts(model, registry, agentloop.DenyAll(), places, None, lambda record, sync: None,
                                (events.append,), contextlib.nullcontext, lambda: None, model.http.deadline, {},
                                lambda state, more: "")
        finished, _ = agentloop.run(agentloop.Session(parts, [], begun_with(case, started)))
    requests = [seen["body"] for seen in server.log.get(f"{case['id']}@{tag}", ()) if seen["path"].endswith(replayserver.CHAT)]
    return Played(finished, ran, events, requests, model.waits)


def runs_of(case: dict):
    """What may have run in a session over a case, as lists of (name, arguments): of replies that did not fail alone."""
    for _, calls, error in expectations(case):
        calls = [] if error else calls
        later = [(made["name"], repeated(made["arguments"])) for reply in case["expect"].get("then_tool_calls", ()) for made in reply]
        valid = [(name, arguments) for name, arguments in calls + later if any(
            spec.name == name and agentloop.argument_problem(spec.parameters, arguments) is None for spec in QUIRK_TOOLS)]
        yield [made for n, made in enumerate(valid) if made not in valid[:n]]  # what is the same in one batch runs once


ENDS_BY_FLAG = {  # (exit code, words of the error) where a case does not end in the answer FINAL
    "context_overflow": (7, "larger window"), "auth": (77, "AGENTLOOP_API_KEY"), "model_not_found": (69, "--model"),
    "wrong_path": (69, "--url"), "redirect": (69, "https://"),
}
ENDS_BY_ID = {
    "oa-lmstudio-overflow-empty": (7, "empty reply to a prompt of 36,012 tokens"), "oa-content-filter-finish": (9, "content filter"),
    "h-413-nginx": (7, "larger window"), "h-422-tgi": (69, "mutually exclusive"), "h-422-fastapi": (69, "Field required"),
    "h-501": (69, "does not support"), "h-400-gemini-array": (69, "thought_signature"), "h-400-litellm-code-string": (69, "BadRequest"),
    "h-400-pairs": (69, "tool_call_ids"), "h-ollama-no-thinking": (69, "does not support thinking"),
}
LEARNED = {  # what the first refusal taught
    "h-400-vllm-maxtokens": agentloop.Dialect(halvings=1),
    "h-400-groq-property": agentloop.Dialect(dropped=("reasoning_content",)),
    "h-400-deepseek-reasoning": agentloop.Dialect(habits=(agentloop.Habit.EMPTY_REASONING,)),
    "h-400-dup-id": agentloop.Dialect(habits=(agentloop.Habit.FRESH_IDS,)),
    "h-400-xai-flat": agentloop.Dialect(("name",), (agentloop.Habit.RESULT_NAMES,)),
    "on-mistral-no-reasoning-echo": agentloop.Dialect(dropped=("reasoning_content",)),
}


@pytest.mark.parametrize("case", case_params(CHATS))
def test_a_session_goes_on_as_its_server_allows(replay, case):
    flags = case["expect"].get("flags", ())
    mode = agentloop.CallMode.AUTO if "no_tool_support" in flags else agentloop.CallMode.NATIVE
    played = play(replay, case, "session", mode, seconds=30.0)
    assert played.ran in list(runs_of(case))
    code, words = ENDS_BY_ID.get(case["id"]) or next((ENDS_BY_FLAG[flag] for flag in flags if flag in ENDS_BY_FLAG), (0, ""))
    assert played.finished.exit_code == code and words in (played.finished.error.message if code else "")
    if code:
        assert len(played.requests) == 1 or "retryable" in flags
        return
    first = expectations(case).__iter__().__next__()
    more = len(played.requests) > 1
    assert played.finished.answer == "FINAL" if more else first[0] in (None, played.finished.answer.strip())
    assert more == bool(first[1] or first[2] or {"empty_reply", "thinking_only", "loaded", "feed_back", "no_tool_support"} & set(flags))
    learned = [event.dialect for event in played.of(agentloop.RequestAdapted) if event.dialect]
    assert learned[-1:] == [LEARNED[case["id"]]] if case["id"] in LEARNED else learned == []
    if "no_tool_support" in flags:
        assert [event.call_mode for event in played.of(agentloop.RequestAdapted)] == [agentloop.CallMode.JSON]
    if "retryable" in flags:
        assert len(played.of(agentloop.ModelRetried)) == 1 and played.waits[0] <= 1.25 + case["expect"].get("retry_after", 0)
    if "feed_back" in flags:
        assert re.search("could not be read|not valid|there is no tool|looks like a tool call", played.requests[1]["messages"][-1]["content"])
    if "retry_after" in case["expect"]:
        assert played.waits == [case["expect"]["retry_after"]]


H, D = agentloop.Habit, agentloop.Dialect
STRICT = {  # what a server insists on, after which case, and what is learned of it, one change a try
    "lm-studio": (["pairs", "args", "content_string"], "oa-frag-args", D(habits=(H.EMPTY_CONTENT,))),
    "nim": (["pairs", "args", "content_not_empty", "content_key"], "oa-frag-args", None),
    "neither": (["pairs", "args", "content_string", "content_not_empty"], "oa-frag-args", D(habits=(H.EMPTY_CONTENT, H.BLANK_CONTENT))),
    "gemini": (["pairs", "tool_msg_name"], "oa-frag-args", D(habits=(H.RESULT_NAMES,))),
    "xai": (["pairs", "no_tool_msg_name"], "oa-frag-args", None),
    "mistral": (["pairs", "id9", "no_extra_keys"], "oa-reasoning-content-and-call", D(("reasoning_content",), (H.FRESH_IDS,))),
    "deepseek": (["pairs", "reasoning_content"], "oa-frag-args", D(habits=(H.EMPTY_REASONING,))),
    "groq": (["pairs", "tool_content_string", "no_extra_keys"], "oa-reasoning-content-and-call", D(("reasoning_content",))),
    "all-at-once": (["pairs", "args", "content_string", "content_not_empty", "tool_msg_name", "id9", "no_extra_keys"],
                    "oa-reasoning-content-and-call",
                    D(("reasoning_content",), (H.EMPTY_CONTENT, H.BLANK_CONTENT, H.RESULT_NAMES, H.FRESH_IDS))),
}


@pytest.mark.parametrize("checks,lead,learned", STRICT.values(), ids=STRICT)
def test_what_a_server_refuses_is_written_otherwise_one_change_a_try(checks, lead, learned):
    case = CASES[lead] | {"turn2": {"checks": checks, "value": ""}}
    server, base = replayserver.serve({lead: case}, gap_ms=0)
    played = play((server, base), case, "strict", seconds=30.0)
    server.shutdown()
    server.server_close()
    dialects = [event.dialect for event in played.of(agentloop.RequestAdapted)]
    assert (played.finished.exit_code, played.finished.answer) == (0, "FINAL")
    assert [set(dialect.dropped + dialect.habits) for dialect in dialects[-1:]] == ([set(learned.dropped + learned.habits)] if learned else [])
    sizes = [len(dialect.dropped) + len(dialect.habits) for dialect in dialects]
    assert sizes == list(range(1, len(sizes) + 1)) and len(played.requests) == 2 + len(sizes)


REFUSALS = {  # (status, words, what is learned from them or None)
    "openai-max-tokens": (400, "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.", D(("max_tokens",))),
    "openai-temperature": (400, "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) value is supported.", D(("temperature",))),
    "azure-stream-options": (400, "Unrecognized request argument supplied: stream_options", D(("stream_options",))),
    "mistral-nested": (422, '{"message": "{\\"detail\\": [{\\"type\\": \\"extra_forbidden\\", \\"loc\\": [\\"body\\", \\"stream_options\\"]}]}"}', D(("stream_options",))),
    "deepseek-format": (400, "This response_format type is unavailable now", D(("response_format",))),
    "lm-studio-null": (400, "Invalid 'content': 'content' field must be a string or an array of objects.", D(habits=(H.EMPTY_CONTENT,))),
    "sglang-key": (422, "messages.2.content: Field required", D(habits=(H.EMPTY_CONTENT,))),
    "mistral-order": (400, "Unexpected role 'user' after role 'tool' (code 3230)", D(habits=(H.JOINED_RESULTS,))),
    "mistral-id": (422, "Tool call id was call_1 but must be a-z, A-Z, 0-9, with a length of 9.", D(habits=(H.FRESH_IDS,))),
    "vllm-max-tokens": (400, "'max_tokens' or 'max_completion_tokens' is too large: 4096.", D(halvings=1)),
    "old-openai": (400, "However, you requested 5000 tokens (3000 in the messages, 2000 in the completion).", D(halvings=1)),
    "unsent": (400, "Unknown parameter: 'top_k'", None),
    "no-words": (400, "Bad Request", None),
    "context": (400, "This model's maximum context length is 4096 tokens.", None),
    "not-a-refusal": (429, "Unsupported parameter: 'max_tokens'", None),
}
BODY = {"model": "m", "messages": [{"role": "user", "content": "u"}], "max_tokens": 64, "stream_options": {}, "temperature": 0, "response_format": {}}


@pytest.mark.parametrize("status,words,learned", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_teaches_one_thing(status, words, learned):
    write = lambda dialect: agentloop.without(BODY | {"as": [dialect.habits, dialect.halvings]}, dialect.dropped)
    error = agentloop.ModelError(agentloop.ErrorKind.HTTP, f"status {status}", status, words)
    lesson = agentloop.lesson(error, D(), write)
    assert (lesson and lesson.dialect) == learned
    if lesson:
        assert agentloop.lesson(error, learned, write) is None or learned.habits == (H.EMPTY_CONTENT,) or learned.halvings


@given(st.lists(st.sampled_from(sorted({words for _, words, _ in REFUSALS.values()})), max_size=40))
@settings(max_examples=50)
def test_a_server_that_refuses_everything_is_given_up(words):
    """However a server goes on refusing, there is an end: each step changes the request, and none is taken back."""
    earlier = agentloop.Message(Role.ASSISTANT, "", (agentloop.ToolCall("c1", "now", {}, wire_id="x"),))
    request = dataclasses.replace(question(), messages=(*question().messages, earlier, agentloop.Message(
        Role.TOOL, "noon", call_id="c1", name="now"), agentloop.Message(Role.USER, "and?")), reply_tokens=2048)
    model = types.SimpleNamespace(name="m", options=agentloop.ModelOptions())
    write, dialect, seen = functools.partial(agentloop.OpenAIWire().body, model, request), D(), []
    for told in words * 20:
        seen.append(json.dumps(write(dialect)))
        lesson = agentloop.lesson(agentloop.ModelError(agentloop.ErrorKind.HTTP, "", 400, told), dialect, write)
        if lesson is None:
            seen.pop()
            continue
        dialect = lesson.dialect
    assert len(set(seen)) == len(seen) < 25


def test_what_was_learned_is_said_once_and_kept_by_resume(home):
    refusal = {"status": 400, "body": json.dumps({"error": {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'."}})}
    strict = lambda reply: lambda body: refusal if "max_tokens" in body else reply
    replies = [strict(call("add", a=12, b=8)), call("add", a=12, b=8), strict({"text": "20"}), strict({"text": "again"})]
    with fakeserver.serve(replies, wire=Wire.OPENAI) as server:
        flags = ("-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml")
        ended = agentloop_run(home, "x", *flags, *GRANTED)
        assert (ended.code, ended.stdout) == (0, "20\n") and ended.stderr.count("'max_tokens' is left out of the requests") == 1
        again = agentloop_run(home, str(journal_of(home)), "more", *GRANTED, "-q", command="resume")
    assert again == Ended(0, "again\n", "") and added(home) == [20]
    keys = [[key for key in agentloop.LIMIT_KEYS if key in seen["body"]] for seen in server.requests]
    assert keys == [["max_tokens"]] + [["max_completion_tokens"]] * 3


LONG = "word " * 2000  # about 2,700 tokens by our count: more than four fifths of what a window of 4,096 leaves


@pytest.mark.parametrize("counted,code", [(2050, 7), (2051, 7), (900, 7), (2600, 0), (2052, 0)])
def test_a_prompt_that_the_server_cut_is_exit_7_and_never_an_answer(home, counted, code):
    usage = {"usage": {"prompt": counted, "completion": 2}}
    replies = [{"text": "I have no tools.", **usage}, {"text": "I know.", "usage": {"prompt": 2600, "completion": 2}}]
    with fakeserver.serve(replies, wire=Wire.OLLAMA) as server:
        ended = agentloop_run(home, "x", "-m", "ollama:m", "--url", server.url, "-t", "none", "-q", "--context", "4096", "--system", LONG)
        records = [json.loads(line) for line in journal_of(home).read_text().splitlines()]
        replied = [record for record in records if record["type"] == "model.replied"]
        assert (ended.code, ended.stdout, replied[0]["text"]) == (code, "" if code else "I have no tools.\n", "I have no tools.")
        assert replied[0]["finish"] == ("prompt_cut" if code else "stop")
        if code:
            again = agentloop_run(home, str(journal_of(home)), "", "-q", command="resume")
            assert again == Ended(0, "I know.\n", "")
            assert server.requests[1]["body"]["messages"] == server.requests[0]["body"]["messages"]


def test_a_call_in_a_reply_to_a_cut_prompt_never_runs(home):
    replies = [call("add", a=1, b=1) | {"usage": {"prompt": 2051, "completion": 2}}, {"text": "no", "usage": {"prompt": 2600, "completion": 2}}]
    with fakeserver.serve(replies, wire=Wire.OLLAMA) as server:
        flags = ("-m", "ollama:m", "--url", server.url, "-t", "m.toml", *GRANTED, "-q", "--context", "4096", "--system", LONG)
        assert agentloop_run(home, "x", *flags).code == 7
        assert agentloop_run(home, str(journal_of(home)), "", *GRANTED, "-q", command="resume").code == 0
    assert added(home) == []


def test_an_empty_reply_is_asked_for_again_then_nudged(home):
    with fakeserver.serve([call("add", a=1, b=1), {"text": " "}, {"text": "\n"}, {"text": "It is 2."}], wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "x", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", *GRANTED, "-q")
    assert ended == Ended(0, "It is 2.\n", "")
    first, second, third = [seen["body"]["messages"] for seen in server.requests[1:]]
    assert first == second and third[:-1] == second and third[-1] == {"role": "user", "content": agentloop.NUDGE}


def test_a_model_that_thinks_up_to_its_limit_is_told_of_the_limit(home):
    with fakeserver.serve([{"text": " ", "finish": "length"}] * 3, wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "x", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", "-q")
    assert ended.code == 5 and ended.way_on[-2:] == ["--reply-tokens", "4096"]


def test_a_redirect_on_the_same_server_is_followed_and_no_other(home):
    moved = lambda place: {"status": 308, "headers": {"Location": place}}
    with fakeserver.serve([moved("/v1/chat/completions"), {"text": "ok"}, moved("http://127.0.0.2:9/v1/chat/completions")], wire=Wire.OPENAI) as server:
        flags = ("-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", "-q")
        assert agentloop_run(home, "x", *flags) == Ended(0, "ok\n", "")
        ended = agentloop_run(home, "x", *flags)
    assert ended.code == 69 and "it redirects to http://127.0.0.2:9/v1/chat/completions" in ended.stderr


def test_a_broken_call_in_text_is_told_off_and_is_no_answer(home):
    broken = {"text": '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'}
    with fakeserver.serve([broken] * 3, wire=Wire.OPENAI) as server:
        ended = agentloop_run(home, "x", "-m", "openai:m", "--url", server.url + "/v1", "-t", "m.toml", *GRANTED, "-q", "--calls", "native")
    assert (ended.code, ended.stdout, added(home)) == (9, "", [])
    assert server.requests[2]["body"]["messages"][-1]["content"] == agentloop.UNREADABLE


CALL_TEXT = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
QUOTED_CALLS = {
    "in-backticks": f"You would write `{CALL_TEXT}`", "before-prose": f"{CALL_TEXT} is how it is written.",
    "in-a-fence": f"For example:\n```\n{CALL_TEXT}\n```", "in-quotes": f'It printed "{CALL_TEXT}', "twice": f"{CALL_TEXT} and then {CALL_TEXT}",
}


@pytest.mark.parametrize("text", QUOTED_CALLS.values(), ids=QUOTED_CALLS)
def test_a_call_that_is_spoken_about_does_not_run(text):
    assert agentloop.recover_text_calls(agentloop.Reply(text), QUIRK_TOOLS).calls == ()


def test_a_reply_may_end_in_several_calls():
    reply = agentloop.recover_text_calls(agentloop.Reply(f"I look.\n{CALL_TEXT}\n{CALL_TEXT}\n"), QUIRK_TOOLS)
    assert (reply.text, [made.name for made in reply.calls]) == ("I look.", ["now", "now"])


def test_a_server_whose_model_has_no_tools_is_not_asked_for_them(replay):
    with replayed_model(replay[1], CASES["ol-stream-call"], "toolless", agentloop.CallMode.AUTO) as model:
        model.facts = agentloop.Facts(4096, "no")
        with pytest.raises(agentloop.Refused) as refused:
            model.ask(question(), None, lambda event: None)
    assert refused.value.learned.call_mode is agentloop.CallMode.JSON and "ol-stream-call@toolless" not in replay[0].log


def test_what_the_user_says_after_a_result_may_stand_in_it():
    history = (agentloop.Message(Role.USER, "a"), agentloop.Message(Role.USER, "b"), agentloop.Message(Role.TOOL, "r", note="n", call_id="c1"),
               agentloop.Message(Role.USER, "c"))
    told = [(message.role, agentloop.wire_content(message)) for message in agentloop.joined(history, D(habits=(H.JOINED_RESULTS,)))]
    assert told == [("user", "a\n\nb"), ("tool", "r\n[n]\n\nc")]
    assert [message.text for message in agentloop.joined(history, D())] == ["a\n\nb", "r", "c"]


TOLD_WINDOWS = {
    "vllm": ({"data": [{"id": "m", "max_model_len": 5000}]}, 5000, ""), "bare-list": ([{"id": "m", "context_length": 5000}], 5000, ""),
    "groq": ({"data": [{"id": "m", "context_window": 5000}]}, 5000, ""), "other": ({"data": [{"id": "x", "max_model_len": 5000}]}, None, ""),
    "lm-studio": ({"models": [{"key": "m", "loaded_instances": [{"config": {"context_length": 5000}}],
                               "capabilities": {"trained_for_tool_use": False}}]}, 5000, "no"),
    "lm-studio-old": ({"data": [{"id": "m", "loaded_context_length": 5000, "capabilities": ["tool_use"]}]}, 5000, "yes"),
    "latest": ({"models": [{"name": "m:latest", "context_length": 5000}]}, 5000, ""), "null": ({"data": None}, None, ""),
    "error": ({"error": "Unexpected endpoint or method."}, None, ""), "odd": ({"data": [None, 3, {"id": "m", "max_model_len": "5000"}]}, None, ""),
    "text": ("no", None, ""), "number": ({"data": 5}, None, ""), "zero": ({"data": [{"id": "m", "max_model_len": 0}]}, None, ""),
}


@pytest.mark.parametrize("told,window,tools", TOLD_WINDOWS.values(), ids=TOLD_WINDOWS)
def test_the_window_is_found_wherever_a_server_says_it(told, window, tools):
    assert agentloop.listed_facts(told, "m") == agentloop.Facts(window, tools)


# Through the real program: what a tool did to the disk shows which calls ran.

QUIRK_MANIFEST = "".join(f"""
[tools.{spec.name}]
kind = "command"
description = "{spec.description}"
argv = ["sh", "-c", 'echo "$0" "$@" >> ran', "{spec.name}"{"".join(f', "{{{name}}}"' for name, told in spec.parameters["properties"].items()
                                                                     if told["type"] != "array" and name in spec.parameters.get("required", ()))}]
approval = "auto"
""" + "".join(f"params.{name} = {{ type = \"{told['type']}\" }}\n" for name, told in spec.parameters["properties"].items()
              if told["type"] != "array" and name in spec.parameters.get("required", ())) for spec in QUIRK_TOOLS)
PROGRAM_CASES = {  # (category, exit code, what ran)
    "oa-parallel-interleaved": ("oa_stream_tools", 0, ["get_weather Paris", "get_weather Rome"]),
    "oa-all-index0-diff-ids": ("oa_stream_tools", 0, ["get_weather Paris", "get_weather Rome"]),
    "on-args-unterminated": ("oa_tools", 0, []),
    "on-args-nan": ("oa_tools", 0, []),
    "on-mistral-no-reasoning-echo": ("oa_tools", 0, ["get_weather Paris"]),
    "on-deepseek-empty-reasoning-echo": ("oa_tools", 0, ["get_weather Paris"]),
    "sse-error-after-call": ("sse", 0, []),
    "sse-eof-after-whole-call": ("sse", 0, []),
    "ol-stream-call": ("ollama", 0, ["get_weather Paris"]),
    "ol-error-after-call": ("ollama", 0, []),
    "ol-thinking-only": ("ollama", 0, []),
    "tx-qwen3coder-no-open": ("text_tools", 0, ["run ls *.md"]),
    "tx-tool-call-bad-json": ("text_tools", 0, []),
    "tx-neg-json-fence-config": ("text_tools", 0, []),
    "h-401-empty": ("http", 77, []),
    "h-301-https": ("http", 69, []),
    "h-400-llamacpp-context": ("http", 7, []),
    "h-400-groq-tool-use-failed": ("http", 0, []),
    "h-500-llamacpp-jinja": ("http", 0, []),
    "hi-parallel-one-bad": ("history", 0, ["get_weather Paris"]),
    "hi-same-id-next-turn-stream": ("history", 0, ["get_weather Paris", "get_weather Rome"]),
    "hi-mistral-user-after-tool": ("history", 0, ["now"]),
    "t-truncated-chunked-mid-call": ("transport", 0, []),
    "t-rst-mid-body": ("transport", 0, []),
    "t-keepalive-closed-between-turns": ("transport", 0, ["now"]),
    "d-show-tools": ("discovery", 0, []),
}


def test_every_category_goes_through_the_real_program():
    assert {category for category, _, _ in PROGRAM_CASES.values()} == {case["category"] for case in QUIRKS}


@pytest.mark.parametrize("name", PROGRAM_CASES)
def test_no_call_of_a_failed_reply_leaves_a_trace_on_the_disk(home, replay, name):
    category, code, ran = PROGRAM_CASES[name]
    case = CASES[name]
    assert case["category"] == category
    (home / "m.toml").write_text(f"[model]\nstream = {json.dumps(case['stream'])}\n" + QUIRK_MANIFEST)
    url = f"{replay[1]}/case/{name}@program" + ("" if case["provider"] == "ollama" else "/v1")
    ended = agentloop_run(home, "x", "-m", f"{case['provider']}:m", "--url", url, "-t", "m.toml", "-q")
    trace = (home / "ran").read_text().splitlines() if (home / "ran").exists() else []
    assert (ended.code, trace) == (code, ran), ended.stderr
    assert (ended.stdout == "FINAL\n") == (code == 0 and name != "tx-neg-json-fence-config")
    assert len(ended.stderr.splitlines()) == (1 if code else 0)


# What a server says of itself and of its models, and vectors.


def facts_of_show(choice, http):
    told = agentloop.get_json(http, choice.url + "/api/show", choice, {"model": "m"})
    return agentloop.shown_facts(told)


def open_at(case: dict, base: str, name: str):
    """The model as the program opens it, at the address of a discovery case."""
    path = "" if case["provider"] == "ollama" else "/v1"
    choice = agentloop.ModelChoice(case["provider"], name, f"{base}/case/{case['id']}{path}")
    return agentloop.open_model(choice, agentloop.Http(agentloop.Deadline(time.monotonic() + 9)), None, None), choice


def names_at(case, base):
    model, choice = open_at(case, base, "m")
    return agentloop.served_models(model.http, choice, model.endpoint)


def asked_window(case, base, name):
    """The window of a model after its first reply."""
    model, _ = open_at(case, base, name)
    agentloop.generate(model, question(()), lambda event: None)
    return model.tokens, model.window()


def vectors_at(case, base, count):
    model, _ = open_at(case, base, "m")
    return agentloop.embed(model, ["text"] * count, lambda event: None)


DISCOVERED = {  # what is asked, and the answer
    "d-show-tools": (lambda case, base: open_at(case, base, "m")[0].facts, agentloop.Facts(16384, "yes")),
    "d-tags": (names_at, ["qwen3:8b"]),
    "d-ps": (lambda case, base: asked_window(case, base, "qwen3:8b"), (16384, 4096)),
    "d-models-null": (names_at, []),
    "d-models-vllm": (lambda case, base: (names_at(case, base), asked_window(case, base, "q")), (["q"], (32768, 32768))),
    "d-models-llamacpp-loading": (lambda case, base: (names_at(case, base), open_at(case, base, "../models/m.gguf")[0].window()),
                                  (["../models/m.gguf"], 32768)),  # not told in the list; the server's /props says it
    "d-version": (lambda case, base: open_at(case, base, "m")[0].window(), 16384),  # it is not needed, and harms nothing
    "d-embed": (lambda case, base: vectors_at(case, base, 2), [[0.1, -0.2], [0.3, 0.4]]),
    "d-embeddings-openai": (lambda case, base: vectors_at(case, base, 2), [[0.1, -0.2], [0.3, 0.4]]),
    "d-embeddings-base64": (lambda case, base: vectors_at(case, base, 1), [[1.0, -2.0]]),
}


@pytest.mark.parametrize("case", [case for case in DISCOVERIES if case["id"] != "d-embed-too-long"], ids=lambda case: case["id"])
def test_what_a_server_says_of_its_models_is_found(replay, case):
    ask, answer = DISCOVERED[case["id"]]
    assert ask(case, replay[1]) == answer


def test_a_text_that_is_too_long_for_a_vector_is_exit_7(replay):
    with pytest.raises(agentloop.ModelError) as raised:
        vectors_at(CASES["d-embed-too-long"], replay[1], 1)
    assert (raised.value.kind, raised.value.code) == ("http", ExitCode.CONTEXT)


def test_a_model_that_is_not_there_is_said_before_the_first_token():
    case = CASES["d-show-tools"] | {"status": 404, "body_chunks": CASES["h-ollama-404-pull"]["body_chunks"]}
    server, base = replayserver.serve({case["id"]: case}, gap_ms=0)
    with pytest.raises(agentloop.ModelError) as raised:
        open_at(case, base, "qwen9")
    assert 'model "qwen9" not found' in raised.value.what and "--model" in raised.value.mend
    server.shutdown()
    server.server_close()


BAD_VECTORS = {
    "too-few": {"embeddings": [[1.0]]}, "lengths": {"embeddings": [[1.0], [1.0, 2.0]]}, "empty": {"embeddings": [[], []]},
    "infinite": {"embeddings": [[1.0], [float("inf")]]}, "text": {"data": [{"embedding": "?"}, {"embedding": "AACAPw=="}]},
    "null": {"data": [{"embedding": None}, None]}, "boolean": {"embeddings": [[True], [1.0]]}, "nothing": {}, "no-object": [],
}


@pytest.mark.parametrize("told", BAD_VECTORS.values(), ids=BAD_VECTORS)
def test_vectors_that_are_none_are_an_error(told):
    with pytest.raises(agentloop.ModelError) as raised:
        agentloop.vectors_in(told, 2)
    assert raised.value.kind == "schema"
