"""Find the innermost frame of user code in a stack.

The input is faulthandler's output, the short stack of a recorded operation, or a traceback on
stderr. The text is untrusted, and is never evaluated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_THREAD = re.compile(
    r"^(?:Current thread|Thread) (0x[0-9a-fA-F]+)([^\n]*)\(most recent call first\):"
)
_FRAME = re.compile(r'^  File "([^"\n]*)", line (\d+) in ([^\n]*)$')
_TRACEBACK_FRAME = re.compile(r'^  File "([^"\n]*)", line (\d+), in ([^\n]*)$')
_SITE = re.compile(r"^(.*):(\d+) (\S+)$", re.DOTALL)
_LIBRARY = re.compile(
    r"(?:^|[/\\])(?:site-packages|dist-packages)[/\\]"
    r"|[/\\][Ll]ib[/\\]python3(?:\.\d+)?t?[/\\]"
    r"|[/\\]Python3?\d*[/\\]Lib[/\\]"
    r"|[/\\]Python\.framework[/\\].*[/\\]lib[/\\]"
    r"|[/\\]echelon[/\\](?:dist|host|recorder|store|launcher|analysis)[/\\]"
    r"|[/\\]torchinductor_[^/\\]*[/\\]"
    r"|^<(?:frozen |string>|attrs |eval_with_key>|__array_function__|torch_package)"
)
_MAX_STACK_CHARS = 1 << 20
_MAX_PATH_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Frame:
    """A stack frame: its file, line and function."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """True if the file belongs to the user rather than to echelon, Python or a package."""
        return not _LIBRARY.search(self.file[-_MAX_PATH_CHARS:])

    def __str__(self) -> str:
        """Format the frame briefly, for example as `train.py:88 in wait_for_tokenizer`."""
        return f"{file_name(self.file)}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Thread:
    """The stack of one thread, innermost frame first."""

    name: str
    frames: tuple[Frame, ...]

    @property
    def holds_lock(self) -> bool:
        """True if the thread held the interpreter lock when its stack was captured."""
        return "holds the interpreter's lock" in self.name

    @property
    def is_main(self) -> bool:
        """True if the outermost frame is module-level code or belongs to `runpy`."""
        if not self.frames:
            return False
        outermost = self.frames[-1]
        return outermost.function == "<module>" or "runpy" in outermost.file


def file_name(path: str) -> str:
    """Return the last component of a path whose separators are slashes or backslashes."""
    return re.split(r"[/\\]", path)[-1] or path


def threads(text: str) -> tuple[Thread, ...]:
    """Parse faulthandler's output; return the threads of the last capture in the text."""
    found: list[tuple[str, list[Frame]]] = []
    seen: set[str] = set()
    for line in text[-_MAX_STACK_CHARS:].splitlines():
        head = _THREAD.match(line)
        if head is not None:
            if head[1] in seen:  # the same thread again: a new snapshot begins
                found, seen = [], set()
            seen.add(head[1])
            found.append((head[1] + head[2].rstrip(), []))
            continue
        frame = _FRAME.match(line)
        if frame is not None and found:
            found[-1][1].append(Frame(frame[1], int(frame[2]), frame[3]))
    return tuple(Thread(name, tuple(frames)) for name, frames in found)


@lru_cache(maxsize=16384)  # several rules ask about each rank, and no two texts are equal
def main_thread(text: str) -> Thread | None:
    """Return the last main thread in a dump of stacks or, failing that, the last thread."""
    listed = threads(text)
    mains = [thread for thread in listed if thread.is_main]
    return mains[-1] if mains else (listed[-1] if listed else None)


def users_frame(frames: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost frame of user code or, failing that, the innermost frame with a file."""
    if not frames:
        return None
    own = next((frame for frame in frames if frame.is_users), None)
    # A program given by `python -c` has no file either, but it is a module.
    typed = next((frame for frame in frames if frame.function == "<module>"), None)
    in_file = next((frame for frame in frames if not frame.file.startswith("<")), None)
    return own or (typed if typed and typed.file == "<string>" else in_file) or frames[0]


def site_frame(site: str) -> Frame | None:
    """Parse a recorded site of the form "file:line function"; return None for any other text."""
    match = _SITE.match(site)
    return Frame(match[1], int(match[2]), match[3]) if match else None


def short_site(site: str) -> str:
    """Shorten a recorded site to `train.py:211 in step`; leave unparsable sites unchanged."""
    frame = site_frame(site)
    return str(frame) if frame else site


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception parsed from a traceback, with the innermost frame of user code."""

    type: str
    message: str  # its first line
    frame: Frame | None
    frames: tuple[Frame, ...] = ()  # innermost first
    rest: str = ""  # text after the message: its further lines, or later output


_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_PREFIX = re.compile(r"^(?:\[rank\d{1,7}\]: ?)?(?: *\| ?)?", re.MULTILINE)
_HEAD = re.compile(r"^ *(?:\+ )?(?:Exception Group )?Traceback \(most recent call last\):$")
# Python also prints tracebacks of errors that ended nothing; the line before marks them.
_HARMLESS = re.compile(
    r"^(?:Exception ignored in|--- Logging error ---|Error in (?:atexit|sys\.)|"
    r"Exception in thread )"
)
_MAX_REST_LINES = 8


def last_traceback(stderr: str) -> Raised | None:
    """Return the last complete traceback in stderr, or None if there is no complete traceback.

    Line prefixes such as `[rank3]: ` are removed. Tracebacks of exceptions that did not end the
    process, such as those after "Exception ignored in", are skipped.
    """
    lines = _PREFIX.sub("", stderr[-_MAX_STACK_CHARS:]).splitlines()
    heads = [number for number, line in enumerate(lines) if _HEAD.match(line)]
    for head, end in zip(reversed(heads), [len(lines), *reversed(heads)], strict=False):
        before = next((line for line in reversed(lines[:head]) if line.strip()), "")
        if not _HARMLESS.match(before):
            raised = _traceback(lines[head + 1 : end])
            if raised is not None:
                return raised
    return None


def _traceback(block: list[str]) -> Raised | None:
    """Parse the lines that follow the first line of a traceback."""
    frames: list[Frame] = []
    for number, line in enumerate(block):
        match = _TRACEBACK_FRAME.match(line)
        if match is not None:
            frames.insert(0, Frame(match[1], int(match[2]), match[3]))
            continue
        raised = _RAISED.match(line) if line and not line.startswith(" ") else None
        if raised is not None:
            rest = "\n".join(block[number + 1 : number + 1 + _MAX_REST_LINES])
            kept = tuple(frames)
            return Raised(raised["type"], raised["message"] or "", users_frame(kept), kept, rest)
    return None
