"""An MCP server on stdin and stdout that does as a JSON file says: `casemcp.py BEHAVIOUR.json SERVER`.

Written by hand, since it must send what no well-behaved library sends: definitions to the letter, requests that the
client never offered to answer, a change in mid-session. What it sees goes to the file that BEHAVIOUR names as "log"."""

import json
import os
import sys
import threading
import time
from pathlib import Path

BEHAVIOUR, SERVER = Path(sys.argv[1]), sys.argv[2]
VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
speaking = threading.Lock()


def behaviour():
    return json.loads(BEHAVIOUR.read_text())


def note(**record):
    with open(behaviour()["log"], "a") as file:
        file.write(json.dumps({"server": SERVER, **record}) + "\n")


def say(**message):
    with speaking:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def definitions():
    """The tools as `tools/list` gives them: exactly what the file says, in its order."""
    return [{"name": name, **tool} for name, tool in behaviour()["servers"].get(SERVER, {}).items()]


def tell_changes():
    """Says list_changed once the definitions are other ones."""
    known = definitions()
    while True:
        time.sleep(0.02)
        if definitions() != known:
            known = definitions()
            say(method="notifications/tools/list_changed")
            note(told="list_changed")


def called():
    """The result of a call; before it, whatever requests the server is to make."""
    told = behaviour()
    for number, method in enumerate(told["requests"]):
        say(id=f"s{number}", method=method, params=REQUESTS[method])
        note(asked=method)
        await_reply(f"s{number}", method)
    if told["link"]:
        return {"content": [{"type": "resource_link", "uri": told["link"], "name": "it"}]}
    return {"content": [{"type": "text", "text": told["result"]}]}


def await_reply(identity, method):
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("id") == identity:
            note(answer=method, refused="error" in message)
            return
        answer(message)


def answer(message):
    method, identity = message.get("method"), message.get("id")
    if identity is None or method is None:
        return
    if method == "initialize":
        wanted = message["params"]["protocolVersion"]
        say(id=identity, result={
            "protocolVersion": wanted if wanted in VERSIONS else VERSIONS[-1],
            "capabilities": {"tools": {"listChanged": True}}, "serverInfo": {"name": SERVER, "version": "1"}})
        threading.Thread(target=tell_changes, daemon=True).start()
    elif method == "tools/list":
        say(id=identity, result={"tools": definitions()})
        note(listed=True)
    elif method == "tools/call":
        note(called=message["params"]["name"])
        say(id=identity, result=called())
    elif method == "ping":
        say(id=identity, result={})
    else:
        say(id=identity, error={"code": -32601, "message": f"no method {method}"})


REQUESTS = {
    "sampling/createMessage": {"messages": [{"role": "user", "content": {"type": "text", "text": "hi"}}], "maxTokens": 9},
    "elicitation/create": {"message": "Your password?", "requestedSchema": {
        "type": "object", "properties": {"p": {"type": "string"}}}},
    "roots/list": {},
}

note(environment=dict(os.environ))
for line in sys.stdin:
    answer(json.loads(line))
