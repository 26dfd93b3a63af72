"""The guard: the parent of a node's workers, and the end of everything they start.

Run as a program of its own (`python -I -S guard.py FD`), single-threaded, importing nothing of the
package. It is there for two things that the agent cannot do itself: it forks without threads
beside it, and it outlives the agent by the moment that is needed to end the workers if the agent is
killed.

* Each worker leads its own session and gets a death signal tied to this process.
* The guard is the child subreaper: whatever a worker leaves behind, also after `setsid`, becomes
  the guard's child and is found by walking its descendants.
* It is the only parent, so a pid it addresses was not reaped and cannot have been reused.

The agent talks to it over a Unix stream socket: a u32 length, then JSON; descriptors of a worker's
streams travel with the request. End of file on that socket means that the agent is gone: everything
is killed.

    agent -> guard   spawn {index, argv, env, cwd, processors} + 2 descriptors
                     signal {index, signal} | sweep {signal} | hold {folder}
    guard -> agent   started {index, pid} | failed {index, error}
                     exited {index, code, mono_ns} | swept {count}
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_PR_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE_BYTES = 16 << 20
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)  # the agent decides
_KILL_ROUNDS = 200  # a fork bomb may outrun one walk over its tree; this bounds the race


class Guard:
    """Serve one agent until it hangs up."""

    def __init__(self, agent: socket.socket, prctl: ctypes._NamedFuncPointer) -> None:
        self._agent = agent
        self._prctl = prctl
        self._agent_pid = os.getppid()
        self._workers: dict[int, int] = {}  # pid -> index
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._input = b""
        self._descriptors: list[int] = []
        self._rings: dict[str, str] = {}  # rank's folder -> folder in memory that has its ring
        self._held: set[str] = set()  # such folders, locked until this process ends

    def run(self) -> None:
        """Obey the agent; when it is gone, kill everything and return."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            while True:
                ready, _, _ = select.select([self._agent.fileno(), self._wake_read], [], [])
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                    self._reap()
                if self._agent.fileno() in ready and not self._receive():
                    return
        except OSError:
            return  # the agent is gone in the middle of a message
        finally:
            self._kill_everything()
            for rank_dir, folder in self._rings.items():
                _bring_home(rank_dir, folder)
            for folder in self._held:
                _remove_if_empty(folder)

    def _receive(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._agent, 65536, 16, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        self._input += data
        self._descriptors += descriptors
        while len(self._input) >= 4:
            length = int.from_bytes(self._input[:4], "little")
            assert length <= _MAX_MESSAGE_BYTES, length
            if len(self._input) < 4 + length:
                break
            message = json.loads(self._input[4 : 4 + length])
            self._input = self._input[4 + length :]
            self._obey(message)
        return True

    def _obey(self, message: dict[str, object]) -> None:
        do = message["do"]
        if do == "spawn":
            self._spawn(message)
        elif do == "signal":
            self._signal(int(str(message["index"])), int(str(message["signal"])))
        elif do == "hold":
            self._hold(str(message["folder"]))
        elif do == "sweep":
            self._say(event="swept", count=self._sweep(int(str(message["signal"]))))

    def _spawn(self, message: dict[str, object]) -> None:
        streams, self._descriptors = self._descriptors[:2], self._descriptors[2:]
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            self._become_worker(message, streams, write_end)
        os.close(write_end)
        for stream in streams:
            os.close(stream)
        with os.fdopen(read_end, "rb") as pipe:
            error = pipe.read()  # end of file once exec has succeeded
        if error:
            os.waitpid(pid, 0)
            self._say(event="failed", index=message["index"], error=error.decode())
            return
        self._workers[pid] = int(str(message["index"]))
        env = message["env"]
        if isinstance(env, dict) and "ECHELON_RING_DIR" in env:
            self._rings[str(env["ECHELON_RANK_DIR"])] = str(env["ECHELON_RING_DIR"])
        self._say(event="started", index=message["index"], pid=pid)

    def _hold(self, folder: str) -> None:
        """Keep a folder for rings: no other launcher clears it up while the guard lives."""
        self._held.add(folder)
        try:
            fd = os.open(folder + "/home", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # the agent has removed it already
        fcntl.flock(fd, fcntl.LOCK_SH)  # held by the open descriptor

    def _allow_agent(self) -> None:
        """Let the agent's children read this process's stacks, where Yama allows ancestors only.

        The exception that is made here survives exec, and not a fork: it covers the worker alone.
        """
        try:
            with open(_YAMA) as file:
                restricts = file.read().strip() == "1"
        except OSError:
            return
        if restricts:
            self._prctl(_PR_SET_PTRACER, self._agent_pid, 0, 0, 0)

    def _become_worker(
        self, message: dict[str, object], streams: list[int], write_end: int
    ) -> None:
        """In the child: never returns."""
        try:
            guard = os.getppid()
            os.setsid()
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:  # it died before the signal was tied to it
                os._exit(1)
            self._allow_agent()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGXFSZ, *_IGNORED):
                signal.signal(number, signal.SIG_DFL)  # exec keeps what is ignored
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (streams[0], 1), (streams[1], 2)):
                os.dup2(source, target)
            os.chdir(str(message["cwd"]))
            processors = message["processors"]
            if isinstance(processors, list):
                os.sched_setaffinity(0, processors)
            argv, env = message["argv"], message["env"]
            assert isinstance(argv, list)
            assert isinstance(env, dict)
            os.execvpe(argv[0], argv, env)  # noqa: S606 -- the user's own program
        except OSError as err:
            os.write(write_end, f"{message['argv']}: {err.strerror}".encode())
        finally:
            os._exit(127)

    def _signal(self, index: int, number: int) -> None:
        """Signal a worker's whole process group."""
        for pid, known in self._workers.items():
            if known == index:
                _kill_group(pid, number)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            now = time.monotonic_ns()
            index = self._workers.pop(pid, None)
            if index is not None:
                code = os.waitstatus_to_exitcode(status)
                self._say(event="exited", index=index, code=code, mono_ns=now)

    def _sweep(self, number: int) -> int:
        """Signal every descendant that is no worker; return how many there were."""
        strays = [pid for pid in descendants(os.getpid()) if pid not in self._workers]
        for pid in strays:
            _kill(pid, number)
        return len(strays)

    def _kill_everything(self) -> None:
        for _ in range(_KILL_ROUNDS):
            left = descendants(os.getpid())
            if not left:
                return
            for pid in left:
                _kill(pid, signal.SIGKILL)
            while _reap_one():
                pass
            time.sleep(0.005)

    def _say(self, **message: object) -> None:
        data = json.dumps(message).encode()
        self._agent.sendall(len(data).to_bytes(4, "little") + data)


def _bring_home(rank_dir: str, folder: str) -> None:
    """Move a ring from memory to its rank's folder, as the agent does if it lives to do it."""
    link = rank_dir + "/ring"
    try:
        away = os.readlink(link)
        if not away.startswith(folder + "/"):
            return
        with open(away, "rb") as source, open(link + ".part", "wb") as target:
            target.write(source.read())
        os.chmod(link + ".part", 0o600)
        os.replace(link + ".part", link)
        os.unlink(away)
        os.rmdir(os.path.dirname(away))
    except OSError:
        return  # no link: nothing was recorded, or the agent was here first


def _remove_if_empty(folder: str) -> None:
    try:
        if os.listdir(folder) == ["home"]:
            os.unlink(folder + "/home")
        os.rmdir(folder)
    except OSError:
        return  # the agent did it; or the disk could not take a ring, which stays


def descendants(root: int) -> list[int]:
    """Return the pids of all living processes below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = _parent(name)
            if parent is not None:
                children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def _parent(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[1])


def _reap_one() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def main() -> None:
    """Serve the agent on the descriptor given as the first argument."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    agent = socket.socket(fileno=int(sys.argv[1]))
    agent.set_inheritable(False)  # a worker holding it would hide the agent's end
    Guard(agent, prctl).run()


if __name__ == "__main__":
    main()
