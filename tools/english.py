"""Find unidiomatic English in comments, docstrings, messages and docs; part of `make check`.

    python tools/english.py               # prints each hit with what to write instead
    python tools/english.py --sample 7    # draws 100 docstrings and 60 messages with that seed

The script searches the comments, docstrings and messages of Python files, C files as a whole, and
Markdown outside code blocks. A pattern is listed only if it is nearly always wrong; a reader has to
find the other mistakes. If a hit is correct, put `english: ok` on its line (in Markdown within
`<!-- -->`), or add the phrase to `ALLOWED`.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEARCHED = ("echelon", "examples", "tools", "docs", "*.md", "setup.py")
# Tables that scripts write, and pages of results that keep the words of their day.
RESULTS = ("docs/benchmarks/",)
# Not rewritten yet: a path leaves this list once its texts are rewritten.
NOT_YET: tuple[str, ...] = ()
LEFT_OUT = RESULTS + NOT_YET
ESCAPE = "english: ok"
ALLOWED = (
    'user namespace ("nobody")',  # the user's name
    'mostly 65534, "nobody")',
)
_PER = "file|folder|line|row|rank|operation|check|step|node|host|process|group|key|call"
_THING = f"{_PER}|dump|ring|lane|column|thread|worker|stage|report|record|slot|message"

# pattern -> what to write instead
HABITS = {
    r"(?<![Tt]here )\b(?:is|are|was|were) no "
    r"(?!longer\b|more\b|less\b|fewer\b|later\b|earlier\b|other\b|such\b|help\b|\w+er than)\w+": (
        '"is not a ...": the article belongs to the noun'
    ),
    rf"\b(?:a|one) (?:{_THING}|noun) a (?:{_PER})\b": '"one dump per rank"',
    r"\bfor ever\b": '"indefinitely"',
    r"\banew\b": '"again"',
    r"\b[Bb]eneath\b": '"below"',
    r"\b(?:[Ll]ikewise|[Mm]eanwhile)\b": '"also", "in the same way"; "while ..."',
    r"\b(?:[Nn]obody|[Ss]omebody|[Ee]verybody|[Ww]hoever|[Ww]homever)\b": (
        "name the rank, the caller, the process: programs are not persons"
    ),
    r"\b(?:has|have|had) come\b": '"arrived", "joined", "connected", "completed"',
    r"\b(?:[Gg]o|[Gg]oes|[Gg]oing|went|gone) on\b(?! (?:GPUs|CPUs|the|a|to)\b)": '"continue"',
    r"\b(?:go|goes|went|going|gone) away\b": '"exit", "disconnect", "be removed"',
    r"\b(?:come|comes|came|coming) back\b": '"return", "reappear"',
    r"\b(?:give|gives|gave|given|giving) (?:\w+ )?back\b": '"release", "return"',
    r"\b[Ee]nd(?:s|ed|ing)? (?:well|badly)\b|\bwell or badly\b": (
        '"succeed", "exit cleanly"; "fail"'
    ),
    r"\b(?:comes?|came) twice\b": '"appears twice", "is not unique"',
    r"\b[Rr]oll[- ]call\b": '"liveness check"',
    r"\b[Bb](?:ring|rings|rought) home\b": '"collect"',
    r'^\s*"""(?:Tell|Say|Have|Know) (?:whether|which|what|how|that|who|where|if)\b': (
        '"Return whether ..."; a class or an error is a noun phrase'
    ),
    r"(?:^|[.;] )Who (?!\?)(?![^.]*\?)": 'name the subject: "The first rank to ..."',
}
_COMPILED = {re.compile(pattern): instead for pattern, instead in HABITS.items()}


def hits(path: Path, text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the hits in a file: the line number, the text found, and what to write instead."""
    if not any(pattern.search(line) for pattern in _COMPILED for line in text.splitlines()):
        return  # most files: the tokens are not needed
    for number, line in prose(path, text):
        if ESCAPE in line or any(phrase in line for phrase in ALLOWED):
            continue
        for pattern, instead in _COMPILED.items():
            if found := pattern.search(line):
                yield number, found[0].strip(), instead


def prose(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a file that contain prose."""
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT or tokenize.tok_name[token.type].endswith(
                ("STRING", "STRING_MIDDLE")
            ):
                yield from enumerate(token.string.splitlines(), token.start[0])
        return
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if path.suffix == ".md" and line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not (path.suffix == ".md" and line.startswith("    ")):
            yield number, line


def searched() -> list[Path]:
    """Return the tracked files that are searched."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *SEARCHED], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    names = sorted({name for name in listed if name.endswith((".py", ".md", ".c", ".h"))})
    own = Path(__file__).relative_to(ROOT).as_posix()  # it lists the habits
    return [Path(name) for name in names if name != own and not name.startswith(LEFT_OUT)]


def check() -> int:
    """Print every hit; return the number of hits."""
    num_hits = 0
    for path in searched():
        if not (ROOT / path).exists():  # removed, not yet committed
            continue
        for number, found, instead in hits(path, (ROOT / path).read_text()):
            print(f"{path}:{number}: {found!r}: write {instead}")
            num_hits += 1
    return num_hits


def sample(seed: int, num_docstrings: int = 100, num_messages: int = 60) -> Iterator[str]:
    """Yield a random sample of the package's docstrings and messages for a reader to judge."""
    docstrings, messages = [], []
    for path in (one for one in searched() if one.parts[0] == "echelon" and one.suffix == ".py"):
        tree = ast.parse((ROOT / path).read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                if text := ast.get_docstring(node):
                    line = node.body[0].lineno
                    docstrings.append(
                        f"{path}:{line}\n    {text.replace(chr(10), chr(10) + '    ')}"
                    )
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                for text in node.exc.args[:1]:
                    if isinstance(text, (ast.Constant, ast.JoinedStr)):
                        messages.append(f"{path}:{node.lineno}\n    {ast.unparse(text)}")
    drawn = random.Random(seed)
    yield f"# seed {seed}: {num_docstrings} of {len(docstrings)} docstrings"
    yield from drawn.sample(docstrings, num_docstrings)
    yield f"# seed {seed}: {num_messages} of {len(messages)} messages of exceptions"
    yield from drawn.sample(messages, num_messages)


def main() -> int:
    """Run the check, or print a sample; return the exit code."""
    parser = argparse.ArgumentParser(description="Find habits of unidiomatic English.")
    parser.add_argument("--sample", type=int, metavar="SEED", help="draw texts for a reader")
    options = parser.parse_args()
    if options.sample is None:
        return 1 if check() else 0
    print("\n".join(sample(options.sample)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
