#!/usr/bin/env python3
"""A benchmark: agentloop beside two floors, on the same fake server, interleaved; ratios of medians are printed.

Floor A is the same loop in plain http.client, json and subprocess. Floor B is it on typer, httpx and jsonschema.
Wall and CPU seconds and peak memory are those of the whole process; the turnaround is the time between the last byte
of a reply and the next request, as the server saw it. Nothing here is a test: the figures are for reading.

The imports are few on purpose: Linux never reports a child's peak memory below its parent's size at the fork, so that a
larger benchmark would make the smallest floor look larger than it is."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

FLOOR_A = r'''
import http.client, json, subprocess, sys
host, port = sys.argv[1].removeprefix("http://").split(":")
connection = http.client.HTTPConnection(host, int(port))
tools = json.loads(sys.argv[2])
messages = [{"role": "user", "content": "count"}]
while True:
    body = {"model": "m", "stream": True, "messages": messages, "tools": tools}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response, text, calls = connection.getresponse(), "", {}
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            text += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] += part.get("id", "")
                call["name"] += part["function"].get("name", "")
                call["arguments"] += part["function"].get("arguments", "")
    if not calls:
        print(text)
        break
    messages.append({"role": "assistant", "content": None, "tool_calls": [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in calls.values()]})
    for call in calls.values():
        arguments = json.loads(call["arguments"])
        done = subprocess.run(["/bin/echo", str(arguments["a"]), str(arguments["b"])], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
'''

FLOOR_B = r'''
import json, subprocess
import httpx, jsonschema, typer

def main(url: str, tools_json: str):
    tools = json.loads(tools_json)
    validator = jsonschema.Draft202012Validator(tools[0]["function"]["parameters"])
    messages = [{"role": "user", "content": "count"}]
    with httpx.Client() as client:
        while True:
            body = {"model": "m", "stream": True, "messages": messages, "tools": tools}
            text, calls = "", {}
            with client.stream("POST", url + "/v1/chat/completions", json=body) as response:
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    for choice in json.loads(line[6:])["choices"]:
                        text += choice["delta"].get("content") or ""
                        for part in choice["delta"].get("tool_calls", ()):
                            call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
                            call["id"] += part.get("id", "")
                            call["name"] += part["function"].get("name", "")
                            call["arguments"] += part["function"].get("arguments", "")
            if not calls:
                print(text)
                return
            messages.append({"role": "assistant", "content": None, "tool_calls": [
                {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
                for call in calls.values()]})
            for call in calls.values():
                arguments = json.loads(call["arguments"])
                validator.validate(arguments)
                done = subprocess.run(["/bin/echo", str(arguments["a"]), str(arguments["b"])], stdin=subprocess.DEVNULL,
                                      capture_output=True, text=True)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})

typer.run(main)
'''

ONE_COMMAND = '''
import typer
app = typer.Typer()
@app.command()
def main(version: bool = False):
    print("one 0.1.0")
app()
'''

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"],
              "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}]
MANIFEST = """
[tools.add]
kind = "command"
description = "Add two numbers."
argv = ["/bin/echo", "{a}", "{b}"]
readonly = true
params.a = { type = "number" }
params.b = { type = "number" }

[tools.wait]
kind = "command"
description = "Wait for a second."
argv = ["sleep", "1"]
readonly = true
"""
ANSWER = "That was all."

# Says on stderr when each step of a run was over. Started with the time of its start before the program's own words.
STEPS = r'''
import json, os, sys, time
marks = [("start", float(sys.argv.pop(1))), ("interpreter", time.monotonic())]
import agentloop
marks.append(("import agentloop", time.monotonic()))

def marked(place, name, label):
    function = getattr(place, name)
    def timed(*given, **named):
        result = function(*given, **named)
        if label not in dict(marks):
            marks.append((label, time.monotonic()))
        return result
    setattr(place, name, timed)

marked(agentloop, "import_typer", "import typer")
marked(agentloop, "parse_command_line", "command line")
marked(agentloop, "set_up", "manifest, tools, grants")
marked(agentloop, "import_httpx", "import httpx")
marked(agentloop, "open_model", "window asked for")
marked(agentloop, "react", "first reply")
marked(agentloop, "finish", "the turns")
leave = os._exit
def say(code):
    marks.append(("last words", time.monotonic()))
    sys.stderr.write(json.dumps(marks))
    sys.stderr.flush()
    leave(code)
os._exit = say
agentloop.main()
'''


@dataclass(frozen=True)
class Figures:
    """One run: seconds, seconds, KiB, milliseconds (0 without a turn)."""

    wall: float
    cpu: float
    memory: float
    turnaround: float


@dataclass(frozen=True)
class Contender:
    name: str
    argv: tuple[str, ...]


def run(contender: Contender, folder: Path, answer: str) -> tuple[float, float, float]:
    """Wall, CPU and peak memory of one run. Ends the benchmark when the program does not answer as it should."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"XDG_STATE_HOME": str(folder / "state")}
    with tempfile.TemporaryFile() as out:
        began = time.monotonic()
        process = subprocess.Popen(contender.argv, stdin=subprocess.DEVNULL, stdout=out, env=environ, cwd=folder)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said = out.read().decode().strip()
    if process.returncode or said != answer:
        sys.exit(f"bench.py: {contender.name} exited {process.returncode} and said {said!r}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss


class Server:
    """The fake server in its own process, playing one script."""

    def __init__(self, folder: Path, replies: list[dict]):
        script = folder / f"script{len(replies)}.jsonl"
        script.write_text("".join(json.dumps(reply) + "\n" for reply in replies))
        self.process = subprocess.Popen([sys.executable, HERE / "testdata" / "fakeserver.py", script], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        self.url, self.seen = self.process.stdout.readline().strip(), 0

    def turnaround(self) -> float:
        """The median milliseconds between a reply and the next request, of the requests since the last call."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as reply:
            connection.sendall(b"GET /_log HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
            log = json.loads(reply.read().partition(b"\r\n\r\n")[2])
        new, self.seen = log[self.seen:], len(log)
        gaps = [(after["at"] - before["done"]) / 1e6 for before, after in zip(new, new[1:])]
        return median(gaps) if gaps else 0.0

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def median(values) -> float:
    """The middle value; of an even number of them, the mean of the two in the middle."""
    ranked = sorted(values)
    return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2


def counting(turns: int) -> list[dict]:
    """A script of so many tool turns, each with other numbers, and the answer."""
    return [{"calls": [{"name": "add", "arguments": {"a": n, "b": 1}}]} for n in range(turns)] + [{"text": ANSWER}]


def contenders(folder: Path, program: tuple[str, ...], url: str) -> list[Contender]:
    floors = {"A": FLOOR_A, "B": FLOOR_B}
    for name, source in floors.items():
        (folder / f"floor_{name}.py").write_text(source)
    found = [Contender(name, (sys.executable, str(folder / f"floor_{name}.py"), url, json.dumps(TOOLS))) for name in floors]
    flags = ("run", "count", "-m", "openai:m", "--url", url + "/v1", "-t", str(folder / "tools.toml"), "--yes-scope", "add",
             "--yes-scope", "wait", "-q", "--max-turns", "100")
    return [*found, Contender("agentloop", (*program, *flags))]


def compare(folder: Path, program: tuple[str, ...], turns: int, rounds: int) -> dict[str, Figures]:
    """The medians of every contender over so many tool turns, run in turn with a changing order."""
    server = Server(folder, counting(turns))
    try:
        runners = contenders(folder, program, server.url)
        figures: dict[str, list[Figures]] = {runner.name: [] for runner in runners}
        for number in range(rounds + 1):  # the first round warms up
            for runner in runners[number % 3:] + runners[:number % 3]:
                wall, cpu, memory = run(runner, folder, ANSWER)
                turnaround = server.turnaround()
                if number:
                    figures[runner.name].append(Figures(wall, cpu, memory, turnaround))
    finally:
        server.close()
    return {name: Figures(*(median(getattr(one, key) for one in all_runs) for key in Figures.__dataclass_fields__))
            for name, all_runs in figures.items()}


def print_comparison(turns: int, medians: dict[str, Figures]) -> None:
    a, b, own = medians["A"], medians["B"], medians["agentloop"]
    for key, unit in (("wall", "s"), ("cpu", "s"), ("memory", "KiB"), ("turnaround", "ms")):
        values = [getattr(one, key) for one in (a, b, own)]
        if values[0]:
            print(f"{turns:3} turns  {key:10} A {values[0]:10.3f}  B {values[1]:10.3f}  agentloop {values[2]:10.3f} {unit:4}"
                  f" = {values[2] / values[0]:5.2f} × A, {values[2] / values[1]:5.2f} × B")


def print_startup(folder: Path, program: tuple[str, ...], rounds: int) -> None:
    """`--version` beside a typer program of one command, and where the time of a start goes."""
    (folder / "one.py").write_text(ONE_COMMAND)
    pair = [(Contender("typer", (sys.executable, str(folder / "one.py"), "--version")), "one 0.1.0"),
            (Contender("--version", (*program, "--version")), None)]
    walls: dict[str, list[float]] = {runner.name: [] for runner, _ in pair}
    version = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    for _ in range(rounds):
        for runner, answer in pair:
            walls[runner.name].append(run(runner, folder, answer or version)[0])
    own, floor = median(walls["--version"]), median(walls["typer"])
    print(f"--version  wall {own:.3f} s = {own / floor:.2f} × a typer program of one command ({floor:.3f} s)")
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", "import agentloop, httpx, typer"], capture_output=True,
                          text=True, cwd=folder, env=module_environment())
    rows = sorted(((int(row.split("|")[0].split(":")[1]), row.split("|")[2].strip())
                   for row in done.stderr.splitlines() if row.startswith("import time:") and row.split("|")[1].strip().isdigit()),
                  reverse=True)
    print("imports    " + ", ".join(f"{name} {spent / 1000:.1f} ms" for spent, name in rows[:12]))


def print_steps(folder: Path, program: tuple[str, ...], rounds: int) -> None:
    """Where the milliseconds of a run of five turns go, step by step: the medians."""
    (folder / "steps.py").write_text(STEPS)
    server = Server(folder, counting(5))
    spent: dict[str, list[float]] = {}
    try:
        words = contenders(folder, program, server.url)[-1].argv[len(program):]
        environ = {**module_environment(), "XDG_STATE_HOME": str(folder / "state")}
        for _ in range(rounds):
            argv = [sys.executable, str(folder / "steps.py"), str(time.monotonic()), *words]
            done = subprocess.run(argv, env=environ, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            marks = [*json.loads(done.stderr), ("exit", time.monotonic())]
            for (_, before), (name, after) in zip(marks, marks[1:]):
                spent.setdefault(name, []).append((after - before) * 1e3)
    finally:
        server.close()
    medians = {name: median(values) for name, values in spent.items()}
    medians["the turns"] /= 5
    print("steps      " + ", ".join(f"{name.replace('the turns', 'a turn')} {spent:.1f} ms" for name, spent in medians.items()))


def print_side_by_side(folder: Path, program: tuple[str, ...]) -> None:
    """Runs of five turns at the same time, each waiting a second for every reply: how long the slowest one took."""
    server = Server(folder, [{**reply, "delay_s": 1.0} for reply in counting(5)])
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    try:
        argv = contenders(folder, program, server.url)[-1].argv
        for count in (1, 16, 64, 128):
            began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
            running = [subprocess.Popen(argv, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
                       for _ in range(count)]
            failed = sum(process.wait() != 0 for process in running)
            wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            print(f"at once    {count:4} runs: {wall:6.2f} s until the last has ended, {cpu / count:.3f} CPU seconds each, {failed} failed")
    finally:
        server.close()


def print_batch(folder: Path, program: tuple[str, ...]) -> None:
    """One batch of eight read-only calls that take a second each."""
    batch = [{"calls": [{"name": "wait", "arguments": {}}] * 8}, {"text": ANSWER}]
    server = Server(folder, batch)
    try:
        runner = contenders(folder, program, server.url)[-1]
        print(f"batch      8 read-only calls of one second: {run(runner, folder, ANSWER)[0]:.2f} s")
    finally:
        server.close()


def module_environment() -> dict[str, str]:
    """An environment in which this Python finds agentloop: the one that is installed, else the file beside this one."""
    installed = shutil.which("agentloop", path=os.path.dirname(sys.executable))
    return {**os.environ, **({} if installed else {"PYTHONPATH": str(HERE)})}


def installed_program() -> tuple[str, ...]:
    """The agentloop command of this Python, else the file beside this one."""
    command = shutil.which("agentloop", path=os.path.dirname(sys.executable))
    return (command,) if command else (sys.executable, str(HERE / "agentloop.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--program", nargs="+", default=installed_program())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, program = Path(name), tuple(options.program)
        folder.chmod(0o755)
        (folder / "tools.toml").write_text(MANIFEST)
        for turns, rounds in ((0, options.rounds), (5, options.rounds), (50, max(3, options.rounds // 3))):
            print_comparison(turns, compare(folder, program, turns, rounds))
        print_startup(folder, program, options.rounds)
        print_steps(folder, program, options.rounds)
        print_batch(folder, program)
        print_side_by_side(folder, program)


if __name__ == "__main__":
    main()
