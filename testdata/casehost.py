"""agentloop with a small world of its own: `casehost.py WORLD.json -- run TASK …`.

Names resolve and requests are answered as the JSON file says; everything else is the real program. Sinks change the
disk in the middle of the run, and tell at its end what the process used."""

import base64
import dataclasses
import ipaddress
import json
import os
import shutil
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import agentloop  # noqa: E402  (it lies beside the folder of this file)


class Names:
    """Resolves as told: the first question gets the first answer, the last answer stays."""

    def __init__(self, answers):
        self.answers = {host: list(rounds) for host, rounds in answers.items()}

    def __call__(self, host):
        try:
            return (str(ipaddress.ip_address(host.strip("[]"))),)
        except ValueError:
            rounds = self.answers.get(host)
        if not rounds:
            raise agentloop.ToolError("the host cannot be resolved", host)
        return tuple(rounds.pop(0) if len(rounds) > 1 else rounds[0])


class Web:
    """A transport that writes every request down, and answers as told; 200 and "ok" where nothing is."""

    def __init__(self, replies, note):
        self.replies, self.note = replies, note

    def handle_request(self, request):
        import httpx
        host = request.headers.get("host", request.url.netloc.decode())
        url = f"{request.url.scheme}://{host}{request.url.raw_path.decode()}"
        self.note({"request": url, "method": request.method, "ip": request.url.host, "headers": dict(request.headers),
                   "body": base64.b64encode(request.read()).decode()})
        reply = self.replies.get(url, {})
        headers = {"content-type": "text/plain"}
        if "location" in reply:
            headers["location"] = reply["location"]
        if "gzip_zeros_mb" in reply:
            return httpx.Response(200, headers={**headers, "content-encoding": "gzip"}, content=zeros(reply["gzip_zeros_mb"]))
        return httpx.Response(reply.get("status", 200), headers=headers, content=iter([b"ok"]))

    def close(self):
        pass


def zeros(megabytes):
    """A gzip stream of so many megabytes of zeros, made as it is read."""
    packer, block = zlib.compressobj(wbits=31), bytes(1 << 20)
    for _ in range(megabytes):
        yield packer.compress(block)
    yield packer.flush()


def change(operation):
    """One change of the disk. Whatever lies where a link is to be is taken away first."""
    kind, path = operation["op"], operation["path"]
    if kind == "append":
        with open(path, "a") as file:
            file.write(operation["text"])
    elif kind == "rename":
        os.rename(path, operation["to"])
    elif kind == "symlink":
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.remove(path)
        os.symlink(operation["to"], path)
    elif kind == "replace":
        Path(path + ".new").write_text(operation["text"])
        os.rename(path + ".new", path)
    elif kind == "await":  # another process says in this file that it has seen the change
        until = time.monotonic() + 1
        while time.monotonic() < until and operation["text"] not in Path(path).read_text():
            time.sleep(0.01)
    else:
        raise ValueError(f"unknown operation {kind!r}")


class Watch:
    """The sink: changes the disk once the call of the case is decided, or once the session has started."""

    def __init__(self, world, note):
        self.world, self.note, self.done = world, note, set()

    def __call__(self, event):
        kind, inner = type(event).__name__, getattr(event, "event", None)
        if kind == "SessionStarted" or kind == "SessionResumed":
            self.once("after_start")
        if kind == "CallDecided" and event.call == self.world["call"] and inner is None:
            self.once("after_decision")
        if kind == "SessionFinished":
            peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
            self.note({"rss_mb": int(peak) // 1024})

    def once(self, moment):
        if moment not in self.done:
            self.done.add(moment)
            for operation in self.world[moment]:
                change(operation)


def main():
    world = json.loads(Path(sys.argv[1]).read_text())
    sys.argv = ["agentloop", *sys.argv[sys.argv.index("--") + 1:]]
    descriptor = os.open(world["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(record):
        os.write(descriptor, (json.dumps(record) + "\n").encode())

    def heard(name, arguments):
        if name == "open" and arguments[0] in world["watched"]:
            note({"open": arguments[0]})
        if name == "subprocess.Popen":  # here, since a shell hands on only what it takes for a variable
            given = os.environ if arguments[3] is None else arguments[3]
            note({"environment": {os.fsdecode(key): os.fsdecode(value) for key, value in given.items()}})

    os.umask(int(world["umask"], 8))
    sys.addaudithook(heard)
    agentloop.main(lambda: dataclasses.replace(
        agentloop.this_machine(), addresses=Names(world["dns"]), sinks=(Watch(world, note),),
        open_transport=lambda scheme, proxied_host, ca_file, server_name: Web(world["http"], note)))


if __name__ == "__main__":
    main()
