"""Commands of a shell script as lists of words, with the variables that the script itself sets. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGN = re.compile(rf"(?:export\s+|readonly\s+|local\s+|declare\s+(?:-\w+\s+)?)?({NAME})(\+?)=(.*)", re.S)
_VARIABLE = re.compile(
    rf"\$\(\((?P<arithmetic>.*?)\)\)(?!\))|\$\{{(?P<braced>{NAME}|\d)(?:\[[@*]\])?(?P<modifier>(?::?[-=+?]|[#%/]).*?)?\}}"
    rf"|\$(?P<plain>{NAME}|[@*#0-9])",
    re.S,
)
_ARITHMETIC = re.compile(r"[\d\s()+*/%-]+")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
_READS = re.compile(rf"\bread\b.*?\s({NAME})\s*<<")
_ARRAY = re.compile(rf"({NAME})(\+?)=\((.*)", re.S)
SEPARATORS = frozenset({"&&", "||", ";", "|", "&"})
_KEYWORDS = frozenset(
    {"if", "then", "else", "elif", "fi", "for", "do", "done", "while", "case", "esac", "in", "function"}
)


@dataclass(kw_only=True)
class Shell:
    """Variables and commands of a script."""

    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    """Words of each command. A variable that the script does not set stays as it is written: `$NAME`."""
    branches: list[tuple[bool, bool | None]] = field(default_factory=list)
    """Of the `if`s around the next line, the innermost last: whether it is read, and whether a branch was taken."""


def read_shell(text: str, environment: Mapping[str, str] | None = None) -> Shell:
    """Reads a script's commands in order. Of an `if` that compares known texts, the branch that runs is read, of others
    all are; of two assignments, the last counts."""
    shell = Shell(variables={"HOME": "~", "PWD": ".", **(environment or {})})
    for line in _lines(re.sub(r"\$\(pwd\)|`pwd`", "$PWD", text), shell):
        _take(line, shell)
    return shell


def _lines(text: str, shell: Shell) -> Iterator[str]:
    """Logical lines: continued ones are joined, comments are removed; the text of a here-document goes to the variable
    that reads it, or is a line of its own."""
    rest = iter(text.replace("\r\n", "\n").split("\n"))
    for first in rest:
        line = _uncommented(first)
        while _is_open(line):
            following = next(rest, None)
            if following is None:
                break
            joined = _uncommented(following) if not _in_quotes(line) else following
            line = line.rstrip()[:-1] + " " + joined if line.rstrip().endswith("\\") else line + "\n" + joined
        if mark := _HEREDOC.search(line):
            body: list[str] = []
            for inner in rest:
                if inner.strip() == mark[1]:
                    break
                body.append(inner)
            content = " ".join(part.rstrip().removesuffix("\\") for part in body)
            if reads := _READS.search(line):
                shell.variables[reads[1]] = content
                continue
            yield from (content,) if "python" in line else ()
            continue
        yield line


def _uncommented(line: str) -> str:
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote and line[at - 1] != "\\" else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (at == 0 or line[at - 1].isspace()):
            before = line[:at].rstrip()
            return f"{before} \\" if before == "" and line.rstrip().endswith("\\") else before
    return line


def _in_quotes(line: str) -> bool:
    quote = ""
    for at, char in enumerate(line):
        if quote:
            quote = "" if char == quote and not (char == '"' and line[at - 1] == "\\") else quote
        elif char in "'\"" and (at == 0 or line[at - 1] != "\\"):
            quote = char
    return bool(quote)


def _is_open(line: str) -> bool:
    """Whether the next line belongs to this one."""
    if line.rstrip().endswith("\\") or _in_quotes(line):
        return True
    array = _ARRAY.match(line.strip())
    return array is not None and not array[3].lstrip().startswith("(") and array[3].count(")") <= array[3].count("(")


def _take(line: str, shell: Shell) -> None:
    line = line.strip()
    if not line:
        return
    if array := _ARRAY.fullmatch(line):
        inside = array[3].rpartition(")")[0]
        items = words(inside, shell)
        shell.arrays[array[1]] = [*shell.arrays.get(array[1], []), *items] if array[2] else items
        return
    for keywords, part, end in _parts(words(line, shell)):
        for keyword in keywords:
            _branch(keyword, None if end in ("&&", "||") else _holds(part), shell)
        if part and all(reads for reads, _ in shell.branches):
            _command(part, shell)


def _parts(found: list[str]) -> Iterator[tuple[list[str], list[str], str]]:
    """The commands of a line, each with the keywords in front of it and the separator behind it."""
    keywords: list[str] = []
    part: list[str] = []
    for word in [*found, ";"]:
        if word in SEPARATORS:
            if part or keywords:
                yield keywords, part, word
            keywords, part = [], []
        elif not part and word in _KEYWORDS:
            keywords.append(word)
        else:
            part.append(word)


def _branch(keyword: str, holds: bool | None, shell: Shell) -> None:
    """Opens, changes or closes the branches of an `if`.

    Args:
        keyword: any of the shell's.
        holds: whether the condition behind it holds; None: the text does not tell.
        shell: what was read so far.
    """
    if keyword == "if":
        shell.branches.append((holds is not False, holds))
    elif keyword in ("elif", "else", "fi") and shell.branches:
        _, taken = shell.branches.pop()
        if keyword == "elif":
            now = holds if taken is False else taken
            shell.branches.append((taken is not True and now is not False, now))
        elif keyword == "else":
            shell.branches.append((taken is not True, taken))


def _holds(part: list[str]) -> bool | None:
    """Whether `[ A = B ]` holds; None: it is another condition, or holds a variable that the script does not set."""
    if not part or part[0] not in ("[", "[[") or any(mark in word for word in part for mark in "$`*?"):
        return None
    match part[1:-1]:
        case [left, "=" | "==", right]:
            return left == right
        case [left, "!=", right]:
            return left != right
    return None


def _command(part: list[str], shell: Shell) -> None:
    """Sets the variables that a command begins with, or keeps the command."""
    rest = list(part)
    while rest and rest[0] in ("export", "readonly", "local", "declare"):
        rest.pop(0)
    set_here: dict[str, str] = {}
    while rest and (assigned := _ASSIGN.fullmatch(rest[0])):
        rest.pop(0)
        value = assigned[3]
        set_here[assigned[1]] = shell.variables.get(assigned[1], "") + value if assigned[2] else value
    if not rest or part[0] in ("export", "readonly", "local", "declare"):
        shell.variables |= set_here
    elif rest:
        shell.commands.append(rest)


def words(line: str, shell: Shell) -> list[str]:
    """The words of a line, with variables in place."""
    found: list[str] = []
    word, is_word, at = "", False, 0

    def end() -> None:
        nonlocal word, is_word
        if is_word:
            found.append(word)
        word, is_word = "", False

    while at < len(line):
        char = line[at]
        if char == "'":
            close = line.find("'", at + 1)
            close = len(line) if close < 0 else close
            word, is_word, at = word + line[at + 1 : close], True, close + 1
        elif char == '"':
            inside, at = _quoted(line, at + 1)
            array = re.fullmatch(rf"\$\{{({NAME})\[@\]\}}", inside)
            if array and not word:
                found.extend(shell.arrays.get(array[1], [inside]))
                continue
            word, is_word = word + expand(inside, shell), True
        elif char == "\\" and at + 1 < len(line):
            word, is_word, at = (
                word + (line[at + 1] if line[at + 1] != "\n" else ""),
                is_word or line[at + 1] != "\n",
                at + 2,
            )
        elif char.isspace():
            end()
            at += 1
        elif line.startswith(("&&", "||"), at) or char in ";|&":
            if (char == "&" and word.endswith((">", "<"))) or line.startswith("&>", at):
                word, is_word, at = word + char, True, at + 1
                continue
            end()
            length = 2 if line.startswith(("&&", "||"), at) else 1
            found.append(line[at : at + length])
            at += length
        elif char == "$":
            at, word, is_word = _unquoted(line, at, word, is_word, found, shell)
        else:
            word, is_word, at = word + char, True, at + 1
    end()
    return found


def _unquoted(line: str, at: int, word: str, is_word: bool, found: list[str], shell: Shell) -> tuple[int, str, bool]:
    """A variable outside of quotes: its value is split into words, unless it is part of one."""
    if line.startswith("$(", at) and not line.startswith("$((", at):
        close = _closing(line, at + 1)
        return close, word + line[at:close], True
    match = _VARIABLE.match(line, at)
    if match is None:
        return at + 1, word + "$", True
    array = shell.arrays.get(match["braced"] or "")
    if array is not None and "[" in match[0]:
        found.extend(array)
        return match.end(), word, is_word
    value = expand(match[0], shell)
    if not value:
        return match.end(), word, is_word
    if "$(" in value or "`" in value:
        return match.end(), word + value, True  # the output of a command: what it says is no words of this one
    inner = re.split(r"\s+", value.strip()) if not re.search(r"['\"{\[]", value) else _split(value)
    if word or (len(inner) == 1 and not value.isspace()):
        return match.end(), word + value, True
    found.extend(words(" ".join(shlex.quote(item) for item in inner), shell) if inner else [])
    return match.end(), "", False


def _split(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:
        return value.split()


def _quoted(line: str, at: int) -> tuple[str, int]:
    """The inside of double quotes, and where it ends."""
    inside = ""
    while at < len(line) and line[at] != '"':
        if line[at] == "\\" and at + 1 < len(line) and line[at + 1] in '"\\`\n':
            inside += line[at + 1] if line[at + 1] != "\n" else ""
            at += 2
            continue
        inside += line[at]
        at += 1
    return inside, at + 1


def _closing(line: str, at: int) -> int:
    depth = 0
    for place in range(at, len(line)):
        depth += {"(": 1, ")": -1}.get(line[place], 0)
        if depth == 0:
            return place + 1
    return len(line)


def expand(text: str, shell: Shell) -> str:
    """The text with the variables that the script sets; others stay as they are written."""

    def value(match: re.Match[str]) -> str:
        if match["arithmetic"] is not None:
            return _computed(match["arithmetic"], shell) or match[0]
        name = match["braced"] or match["plain"]
        if name in ("@", "*", "#") or name.isdigit():
            return _modified(match["modifier"], None, shell) or ""
        known = shell.variables.get(name)
        if match["modifier"]:
            found = _modified(match["modifier"], known, shell)
            return match[0] if found is None else found
        return match[0] if known is None else known

    return _VARIABLE.sub(value, text)


def _modified(modifier: str | None, known: str | None, shell: Shell) -> str | None:
    """`${NAME:-default}` and its relatives."""
    default = re.fullmatch(r":?[-=](.*)", modifier or "", re.S)
    if default is not None:
        return known if known else expand(default[1].strip("'\""), shell)
    if (modifier or "").lstrip(":").startswith("+"):
        return expand((modifier or "").lstrip(":")[1:], shell) if known else ""
    if known is not None and modifier == "##*/":
        return known.rpartition("/")[2]
    return known if (modifier or "").lstrip(":").startswith("?") else None


def _computed(text: str, shell: Shell) -> str | None:
    """The value of whole-number arithmetic; None if a variable is not set."""
    named = re.sub(
        rf"\$?\{{?\b({NAME})\b\}}?", lambda match: shell.variables.get(match[1], match[0]), expand(text, shell)
    )
    if not _ARITHMETIC.fullmatch(named) or "**" in named:
        return None
    import ast

    from rlsdk.migrate.draft import Unknown
    from rlsdk.migrate.values import value_of

    try:
        value = value_of(ast.parse(named.strip().replace("/", "//"), mode="eval").body, {})
    except SyntaxError:
        return None
    return None if isinstance(value, Unknown) else str(int(value))
