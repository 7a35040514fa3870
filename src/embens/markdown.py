"""Texts of the user inside of Markdown and of its YAML front matter.

Names of columns, classes and networks may hold any character. Escaped, they are shown as they are:
they end no table cell, open no HTML element and start no new line.
"""

import re

# A backslash before these characters makes them text. Underscores within a word are text already.
_SPECIAL = re.compile(r"[\\`*\[\]|~#$]|(?<![^\W_])_|_(?![^\W_])")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # of YAML


def one_line(text: object) -> str:
    r"""Return a text in one line: line breaks and control characters become spaces.

    Example:
        >>> one_line("a\r\nb")
        'a b'
    """
    printable = [letter if letter.isprintable() else " " for letter in str(text)]
    return " ".join("".join(printable).split())


def escape(text: object) -> str:
    r"""Return a text for a paragraph, a list item or a table cell of Markdown.

    Example:
        >>> escape("a | <b> [c](d)")
        'a \\| &lt;b&gt; \\[c\\](d)'
    """
    line = one_line(text)
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(lambda match: "\\" + match[0], line)


def code(text: object) -> str:
    """Return a text as a code span of Markdown.

    Example:
        >>> code("a`b")
        '``a`b``'
    """
    line = one_line(text) or " "
    longest = max([0, *(len(run) for run in re.findall("`+", line))])
    fence = "`" * (longest + 1)
    if line.startswith("`") or line.endswith("`"):
        line = f" {line} "
    return f"{fence}{line}{fence}"


def quote(text: object) -> str:
    r"""Return a text as a quoted string of YAML.

    Example:
        >>> quote('a: "b"')
        '"a: \\"b\\""'
    """
    letters = []
    for letter in str(text):
        if letter in '"\\':
            letters.append("\\" + letter)
        elif " " <= letter <= "~":
            letters.append(letter)
        elif "\ud800" <= letter <= "\udfff":  # half of a pair, which no file can hold
            letters.append("\\uFFFD")
        else:
            letters.append(f"\\U{ord(letter):08X}")
    return '"' + "".join(letters) + '"'


def tag(text: object) -> str:
    """Return a text as an item of a list of YAML, quoted unless it is a plain word.

    Example:
        >>> tag("batch_ensemble"), tag("no")
        ('batch_ensemble', '"no"')
    """
    word = str(text)
    if _WORD.fullmatch(word) and word.lower() not in _RESERVED:
        return word
    return quote(word)
