"""Run the guard, which is the parent process of a node's workers.

The guard is a separate program (`python -I -S guard.py FD`) with a single thread. It imports
nothing from the package. The guard can fork safely, because it has no other threads. It outlives a
killed agent long enough to kill the workers and every process that they have started.

* Each worker leads its own session and receives a death signal when the guard exits.
* The guard is a child subreaper. Any process that a worker leaves behind, even after `setsid`,
  becomes a child of the guard.
* The guard reaps the workers itself, so the pid of a running worker is never reused. Other
  processes are signaled through a pidfd, after their parentage has been checked.
* The guard never waits for the agent. Reports are queued until the socket accepts them.
* No error ends the guard before its work is done. Without /proc, the guard still handles its direct
  children.

The agent and the guard communicate over a Unix stream socket. A message is a u32 length followed by
JSON. The descriptors of a worker's streams are sent with the request. If the socket is closed, the
agent has died, and the guard kills all processes.

    agent -> guard   spawn {index, argv, env, cwd, processors, group, waits} + 3 descriptors, or 4
                     take {index, as, env, group} | signal {index, signal, alone}
                     sweep {signal} | hold {folder} | fence {at_s} | end {}, before it disconnects
    guard -> agent   started {index, pid} | failed {index, error}
                     exited {index, code, mono_ns} | swept {count, denied}

A process that is spawned with `waits` is a standby, which inherits the fourth descriptor. `take`
turns the standby into the worker `as`. `group` is the worker's own cgroup, or "" if none can be
created. `alone` excludes the worker's children, because forked data loaders have no handlers for
the user's signals.

No worker is allowed to run after the time given in a `fence`, on a clock that includes suspended
time. At that time, the guard kills all workers, even if the agent is stopped. The guard starts no
more workers until a later fence is set.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_PR_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE_BYTES = 16 << 20
_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)
_OWN_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)  # ignored by the interpreter, not by the user
_BLOCK_BYTES = 1 << 16
_KILL_ROUNDS = 200  # a fork bomb may outrun one walk over its tree; this bounds the race


class Guard:
    """A server for one agent. It stops when the agent closes the connection."""

    def __init__(
        self, agent: socket.socket, prctl: ctypes._NamedFuncPointer, ignored: frozenset[int]
    ) -> None:
        self._agent = agent
        self._ignored = (
            ignored  # ignored when the guard was started, as under nohup; workers inherit this
        )
        self._output = bytearray()
        self._groups: list[str] = []  # cgroups of workers
        self._prctl = prctl
        self._agent_pid = os.getppid()
        self._workers: dict[int, int] = {}  # pid -> index
        self._waiting: set[int] = set()  # pids of those in `_workers` that are standbys
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._input = b""
        self._descriptors: list[int] = []
        self._rings: dict[str, str] = {}  # rank's folder -> folder in memory that holds its ring
        self._held: set[str] = set()  # folders for rings, locked until this process ends
        self._fence_s = float("inf")
        self._is_fenced = False  # whether the fence's moment has passed
        self._is_agent_done = False  # whether the agent has announced its end

    def run(self) -> None:
        """Carry out the agent's requests.

        When the agent exits, kill all processes that were started for it.
        """
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()  # not select(), which is limited to 1024 descriptors
        poll.register(self._wake_read, select.POLLIN)
        try:
            while True:
                wanted = select.POLLIN | (select.POLLOUT if self._output else 0)
                poll.register(self._agent.fileno(), wanted)
                ready = dict(poll.poll(self._until_fence_ms()))
                if self._until_fence_ms() == 0:
                    self._enforce_fence()
                of_agent = ready.get(self._agent.fileno(), 0)
                if of_agent & select.POLLOUT:
                    self._flush()
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                    self._reap()
                if of_agent & ~select.POLLOUT and not self._receive():
                    return
        except OSError:
            return  # the agent died in the middle of a message
        finally:
            if not self._is_agent_done:
                died = f"the launcher (pid {self._agent_pid}) died{_where_none_can_start()}"
                _print(f"{died}; ending all processes that it started")
            self._kill_everything()
            for rank_dir, folder in self._rings.items():
                _bring_home(rank_dir, folder)
            for folder in self._held:
                _remove_if_empty(folder)
            for group in self._groups:
                _remove_group(group)

    def _receive(self) -> bool:
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        try:
            data, descriptors, _, _ = socket.recv_fds(self._agent, 65536, 16, flags)
        except BlockingIOError:
            return True
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
        elif do == "take":
            self._take(message)
        elif do == "signal":
            self._signal(
                int(str(message["index"])), int(str(message["signal"])), bool(message["alone"])
            )
        elif do == "end":
            self._is_agent_done = True
        elif do == "fence":
            self._fence_s, self._is_fenced = float(str(message["at_s"])), False
        elif do == "hold":
            self._hold(str(message["folder"]))
        elif do == "sweep":
            count, denied = self._sweep(int(str(message["signal"])))
            self._say(event="swept", count=count, denied=denied)

    def _until_fence_ms(self) -> int | None:
        """Return how much longer workers are allowed to run, in ms; None if there is no limit."""
        if self._is_fenced or self._fence_s == float("inf"):
            return None
        left_s = self._fence_s - time.clock_gettime(time.CLOCK_BOOTTIME)
        return max(0, math.ceil(left_s * 1000))

    def _enforce_fence(self) -> None:
        self._is_fenced = True
        for pid in self._workers:
            _try(os.killpg, pid, signal.SIGKILL)
        for pid in descendants(os.getpid()):
            _signal_stray(pid, signal.SIGKILL)

    def _spawn(self, message: dict[str, object]) -> None:
        waits = bool(message.get("waits"))
        count = 4 if waits else 3
        streams, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        try:
            if self._is_fenced or self._until_fence_ms() == 0:
                pid, error = 0, "cannot start: the host's lease has expired"
            else:
                pid, error = self._fork(message, streams)
        except OSError as err:  # no more processes, or no more descriptors
            pid, error = 0, f"cannot start a process: {err.strerror}"
        finally:
            for stream in streams:
                os.close(stream)
        group = str(message["group"])
        if group:
            self._groups.append(group)
        if error:
            if pid:
                os.waitpid(pid, 0)
            self._say(event="failed", index=message["index"], error=error)
            return
        self._workers[pid] = int(str(message["index"]))
        if waits:
            self._waiting.add(pid)
        else:
            self._note_ring(message["env"])
        self._say(event="started", index=message["index"], pid=pid)

    def _take(self, message: dict[str, object]) -> None:
        """Turn a standby into a worker, and move it into the worker's cgroup."""
        group, index = str(message["group"]), int(str(message["index"]))
        if group:
            self._groups.append(group)
        found = [pid for pid in self._waiting if self._workers[pid] == index]
        if not found or self._is_fenced:
            self._say(event="failed", index=message["as"], error="the standby has ended")
            return
        (pid,) = found
        self._waiting.discard(pid)
        self._workers[pid] = int(str(message["as"]))
        if group:
            _enter_group(group, pid)
        self._note_ring(message["env"])
        self._say(event="started", index=message["as"], pid=pid)

    def _note_ring(self, env: object) -> None:
        if isinstance(env, dict) and "ECHELON_RING_DIR" in env:
            self._rings[str(env["ECHELON_RANK_DIR"])] = str(env["ECHELON_RING_DIR"])

    def _fork(self, message: dict[str, object], streams: list[int]) -> tuple[int, str]:
        """Start a worker; return its pid and an error message ("" on success).

        Raises:
            OSError: no further process can be created.
        """
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(read_end)
            os.close(write_end)
            raise
        if pid == 0:
            self._become_worker(message, streams, write_end)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            return pid, pipe.read().decode("utf-8", "replace")  # an empty text: exec has succeeded

    def _hold(self, folder: str) -> None:
        """Lock a ring folder until the guard exits, so that no other launcher removes it."""
        self._held.add(folder)
        try:
            fd = os.open(folder + "/home", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # the agent has removed it already
        fcntl.flock(fd, fcntl.LOCK_SH)  # held by the open descriptor

    def _allow_agent(self) -> None:
        """Permit the agent's children to read this process's stacks if Yama restricts such access.

        A process retains the permission across exec, but a forked child does not inherit it.
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
        """Run the worker's program in the child process; never returns."""
        try:
            guard = os.getppid()
            os.setsid()
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guard:  # it died before the death signal was set
                os._exit(1)
            self._allow_agent()
            signal.set_wakeup_fd(-1)
            for number in _ignorable():
                if number not in self._ignored:
                    signal.signal(number, signal.SIG_DFL)  # exec keeps ignored signals ignored
            if message["group"]:
                _enter_group(str(message["group"]))
            for target, source in enumerate((streams[2], streams[0], streams[1])):
                os.dup2(source, target)
            os.chdir(str(message["cwd"]))
            processors = message["processors"]
            if isinstance(processors, list):
                os.sched_setaffinity(0, processors)
            argv, env = message["argv"], message["env"]
            assert isinstance(argv, list)
            assert isinstance(env, dict)
            for own in streams[3:]:
                os.set_inheritable(own, True)
                env["ECHELON_STANDBY_FD"] = str(own)
            os.execvpe(argv[0], argv, env)  # noqa: S606 -- the user's own program
        except OSError as err:
            os.write(write_end, f"cannot start {_program(message)}: {err.strerror}".encode())
        except Exception as err:  # noqa: BLE001 -- such as a NUL in an argument
            os.write(write_end, f"cannot start {_program(message)}: {err}".encode())
        finally:
            os._exit(127)

    def _signal(self, index: int, number: int, alone: bool) -> None:
        """Send a signal to a worker and, unless `alone` is set, to the worker's process group."""
        for pid, known in self._workers.items():
            if known == index:
                _try(os.kill if alone else os.killpg, pid, number)

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
            self._waiting.discard(pid)
            if index is not None:
                code = os.waitstatus_to_exitcode(status)
                self._say(event="exited", index=index, code=code, mono_ns=now)

    def _sweep(self, number: int) -> tuple[int, list[int]]:
        """Signal all descendants except workers, standbys, and the descendants of standbys.

        Standbys are left out because they do not belong to an attempt.

        Returns:
            The number of descendants to signal, and the pids of those that could not be signaled.
        """
        has_workers = len(self._workers) > len(self._waiting)
        if number == signal.SIGKILL and not has_workers:
            for group in self._groups:
                _kill_group(group)
        below = descendants(os.getpid(), self._waiting)
        strays = [pid for pid in below if pid not in self._workers]
        denied = [pid for pid in strays if not _signal_stray(pid, number)]
        if not strays and not has_workers:
            while self._groups:
                _remove_group(self._groups.pop())
        return len(strays), denied

    def _kill_everything(self) -> None:
        for group in self._groups:
            _kill_group(group)
        for pid in self._workers:
            _try(os.killpg, pid, signal.SIGKILL)
        for _ in range(_KILL_ROUNDS):
            left = [pid for pid in descendants(os.getpid()) if _signal_stray(pid, signal.SIGKILL)]
            while _reap_one():
                pass
            if not left:
                return
            time.sleep(0.005)

    def _say(self, **message: object) -> None:
        data = json.dumps(message).encode()
        self._output += len(data).to_bytes(4, "little") + data
        self._flush()

    def _flush(self) -> None:
        """Send as many pending reports as the socket accepts without blocking."""
        try:
            sent = self._agent.send(self._output, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        del self._output[:sent]


def _print(text: str) -> None:
    """Print a line to the launcher's stderr."""
    try:
        os.write(2, f"echelon: {text}\n".encode())
    except OSError:
        return


def _where_none_can_start() -> str:
    """Return a clause that explains why no process can be started; "" if one can be started."""
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    except OSError as err:
        return f" where no process can be started: {err.strerror}; raise pids.max or ulimit -u"
    return ""


def _bring_home(rank_dir: str, folder: str) -> None:
    """Move a ring from memory to its rank's folder, on behalf of a killed agent."""
    link = rank_dir + "/ring"
    try:
        away = os.readlink(link)
        if not away.startswith(folder + "/"):
            return
        with open(away, "rb") as source, open(link + ".part", "wb") as target:
            _copy_sparse(source, target)
        os.chmod(link + ".part", 0o600)
        os.replace(link + ".part", link)
        os.unlink(away)
        os.rmdir(os.path.dirname(away))
    except OSError:
        return  # without a link, nothing was recorded, or the agent has moved the ring


def _copy_sparse(source: io.BufferedReader, target: io.BufferedWriter) -> None:
    """Copy a file, leaving holes for blocks of zeros."""
    zeros = bytes(_BLOCK_BYTES)
    while block := source.read(_BLOCK_BYTES):
        if block == zeros[: len(block)]:
            target.seek(len(block), os.SEEK_CUR)
        else:
            target.write(block)
    target.truncate()


def _remove_if_empty(folder: str) -> None:
    try:
        if os.listdir(folder) == ["home"]:
            os.unlink(folder + "/home")
        os.rmdir(folder)
    except OSError:
        return  # the agent has removed it, or a ring stays because the disk is full


def descendants(root: int, spared: Collection[int] = ()) -> list[int]:
    """Return the pids of all live descendants of `root`, parents first; [] without /proc.

    Args:
        spared: processes to leave out, along with their descendants.
    """
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            parent = _parent(name)
            if parent is not None:
                children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = [pid for pid in children.get(queue.pop(0), []) if pid not in spared]
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


def _signal_stray(pid: int, number: int) -> bool:
    """Signal a descendant of this process, after checking that its pid has not been reused.

    Returns:
        False if this process is not permitted to signal the descendant.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # an old kernel, a filter, or no descriptor left
        return _try(os.kill, pid, number)
    try:
        if _is_below(pid, os.getpid()):
            return _try(signal.pidfd_send_signal, handle, number)
        return True
    finally:
        os.close(handle)


def _is_below(pid: int, root: int) -> bool:
    while pid > 1:
        parent = _parent(str(pid))
        if parent is None:
            return False
        if parent == root:
            return True
        pid = parent
    return False


def _try(send: Callable[[int, int], None], target: int, number: int) -> bool:
    """Send a signal; return False if permission is denied."""
    try:
        send(target, number)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return True


def _program(message: dict[str, object]) -> str:
    argv = message["argv"]
    return str(argv[0]) if isinstance(argv, list) and argv else "?"


def _enter_group(group: str, pid: int = 0) -> None:
    """Move a process into a cgroup. If `pid` is 0, move this process."""
    try:
        with open(group + "/cgroup.procs", "w") as file:
            file.write(str(pid))
    except OSError:
        return  # the worker is found by its parentage anyway


def _kill_group(group: str) -> None:
    try:
        with open(group + "/cgroup.kill", "w") as file:
            file.write("1")
    except OSError:
        return  # a kernel before 5.14


def _remove_group(group: str) -> None:
    try:
        os.rmdir(group)
        os.rmdir(os.path.dirname(group))  # succeeds after the last worker's group
    except OSError:
        return


def _ignorable() -> list[int]:
    """Return the signals that the guard ignores."""
    keep = {*_UNCATCHABLE, *_OWN_FAULTS, signal.SIGCHLD}
    return [number for number in signal.valid_signals() if number not in keep]


def main() -> None:
    """Serve the agent on the descriptor given as the first argument."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ignored = set()
    for number in _ignorable():
        try:
            before = signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue
        if before == signal.SIG_IGN and number not in _PYTHONS:
            ignored.add(int(number))
    agent = socket.socket(fileno=int(sys.argv[1]))
    agent.set_inheritable(False)  # a worker that held it would hide the agent's end
    Guard(agent, prctl, frozenset(ignored)).run()


if __name__ == "__main__":
    main()
