"""Cuts TTIR text into tokens. Knows MLIR's lexical syntax, not its grammar."""

from __future__ import annotations

import re

from fa_verify.ttir.errors import Unsupported

_TOKEN = re.compile(
    r"""(?:\s|//[^\n]*)+
  | loc\((?P<loc>\#loc\d*|unknown)\)
  | (?P<open>loc\()
  | (?P<str>"(?:[^"\\]|\\.)*")
  | (?P<raw>(?:dense|array|dense_resource)<[^>]*>)
  | (?P<type>(?:tensor|!tt\.\w+|!ttg\.\w+|vector)<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>
            |<(?:tensor<[^<>]*>|(?:\d+x)*[a-z]\w*)>)
  | (?P<ssa>%[\w$.-]+(?:\#\d+)?(?::\d+)?)
  | (?P<label>\^\w+)
  | (?P<sym>@(?:[\w$.]+|"[^"]*"))
  | (?P<num>-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?))
  | (?P<word>!?[A-Za-z_][\w$.]*)
  | (?P<punct>->|<\{|\}>|::|[()\[\]{},:=<>*?\#])""",
    re.VERBOSE,
)

_MODULE = re.compile(r"^module\b", re.MULTILINE)


def tokenise(text: str) -> list[tuple[str, str]]:
    """(kind, text) of each token of the module; the text of a location is what loc(...) holds."""
    module = _MODULE.search(text)  # after locations, whose paths may hold the word
    if module is None:
        msg = "TTIR without a module"
        raise Unsupported(msg)
    start = module.start()
    end = text.find("\n#loc", start)  # location definitions follow
    end = len(text) if end < 0 else end
    tokens: list[tuple[str, str]] = []
    append, match_token, position = tokens.append, _TOKEN.match, start
    while position < end:
        match = match_token(text, position, end)
        if match is None:
            msg = f"TTIR syntax {text[position : position + 40]!r}"
            raise Unsupported(msg)
        kind, position = match.lastgroup, match.end()
        if kind is None:
            continue
        if kind == "open":
            close = _balanced(text, position - 1)
            append(("loc", text[position:close]))
            position = close + 1
        else:
            append((kind, match[kind]))
    append(("end", ""))
    return tokens


def _balanced(text: str, position: int) -> int:
    """Index of the parenthesis that closes the one at `position`, strings skipped."""
    depth, quoted = 0, False
    for index in range(position, len(text)):
        char = text[index]
        if quoted:
            quoted = char != '"' or text[index - 1] == "\\"
        elif char == '"':
            quoted = True
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                return index
    msg = "TTIR syntax: unbalanced location"
    raise Unsupported(msg)
