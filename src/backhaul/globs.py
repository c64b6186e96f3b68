"""Globs over the names of modules.

Covers: what a glob matches ([Note: Globs]), how names that differ in a number are written as one, how a long glob is shown, and which names
come close to one that is not there.
Does not cover: what follows from a match (plans.py).

[Note: Globs]
``*`` stands for any characters, dots too; ``?`` for one; ``[abc]``, ``[a-z]`` and ``[!abc]`` for one of some; ``{this,that}`` for either;
``{0..46}`` for each of these numbers. Case counts. A name matches itself, whatever it holds.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Sequence

_TOKEN = re.compile(
    r"""
    (?P<star>\*+) | (?P<one>\?)
    | \[ (?P<no>!?) (?P<set> \][^]]* | [^]]+ ) \]
    | (?P<open>\{) | (?P<close>\}) | (?P<comma>,) | (?P<span>\d+\.\.\d+)
    | .
    """,
    re.DOTALL | re.VERBOSE,
)


def matches(glob: str, name: str) -> bool:
    """Say whether ``glob`` matches the whole of ``name``.

    >>> matches("*.mlp", "model.layers.0.mlp"), matches("model.layers.{0..3}.*", "model.layers.4.mlp"), matches("*.mlp", "mlp")
    (True, False, False)
    """
    return glob == name or pattern(glob).fullmatch(name) is not None


@functools.lru_cache(maxsize=4096)
def pattern(glob: str) -> re.Pattern[str]:
    """Return a glob as a regular expression, or raise ``ValueError``."""
    parts: list[str] = []
    depth = 0
    for token in _TOKEN.finditer(glob):
        kind, text = token.lastgroup, token[0]
        if kind == "star":
            parts.append(".*")
        elif kind == "one":
            parts.append(".")
        elif kind == "set":
            parts.append(f"[{'^' if token['no'] else ''}{_set(token['set'])}]")
        elif kind == "open":
            depth += 1
            parts.append("(?:")
        elif kind == "close" and depth:
            depth -= 1
            parts.append(")")
        elif kind == "close":
            raise ValueError(f"glob {glob!r} closes a brace that it has not opened")
        elif kind == "comma" and depth:
            parts.append("|")
        elif kind == "span" and depth:
            first, last = sorted(map(int, text.split("..")))
            parts.append("(?:" + "|".join(map(str, range(first, last + 1))) + ")")
        else:
            parts.append(re.escape(text))
    if depth:
        raise ValueError(f"glob {glob!r} does not close a brace")
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise ValueError(f"glob {glob!r} cannot be read: {error}") from error


def _set(characters: str) -> str:
    """Return the inside of ``[...]`` with nothing special in it but ranges."""
    return re.sub(r"([^\w-])", r"\\\1", characters)


def alternatives(glob: str) -> list[str]:
    """Return shorter globs that together match what ``glob`` matches: those between its braces, if nothing is outside of them.

    >>> alternatives("{*.norm,{a,b}.act}"), alternatives("{a,b}.{c,d}")
    (['*.norm', '{a,b}.act'], ['{a,b}.{c,d}'])
    """
    found: list[str] = []
    depth = start = 0
    for token in _TOKEN.finditer(glob):
        kind, end = token.lastgroup, token.end()
        depth += {"open": 1, "close": -1}.get(kind or "", 0)
        if (not depth and end < len(glob)) or (kind == "span" and depth == 1):
            return [glob]
        if (kind == "comma" and depth == 1) or not depth:
            found.append(glob[start + 1 : end - 1])
            start = end - 1
    return found if len(found) > 1 else [glob]


def collapse(names: Iterable[str]) -> dict[str, list[str]]:
    """Write names that differ in numbers alone as one glob; return the names by glob.

    >>> list(collapse(["layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "layers.5.mlp", "norm"]))
    ['layers.{0..2,5}.mlp', 'norm']
    """
    rows: dict[tuple[str, ...], list[str]] = {tuple(name.split(".")): [name] for name in names}
    for position in reversed(range(max(map(len, rows), default=0))):
        groups: dict[tuple[tuple[str, ...], tuple[str, ...] | None], list[tuple[str, ...]]] = {}
        for row in rows:
            numbered = position < len(row) and re.fullmatch(r"0|[1-9][0-9]*", row[position])
            groups.setdefault((row[:position], row[position + 1 :]) if numbered else (row, None), []).append(row)
        rows = {
            before if after is None else (*before, _spans(row[position] for row in group), *after): [
                name for row in group for name in rows[row]
            ]
            for (before, after), group in groups.items()
        }
    return {".".join(row): members for row, members in rows.items()}


def _spans(numbers: Iterable[str]) -> str:
    spans: list[list[int]] = []
    for number in sorted(set(map(int, numbers))):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [str(first) if first == last else f"{first}..{last}" for first, last in spans]
    return texts[0] if len(texts) == 1 and ".." not in texts[0] else "{" + ",".join(texts) + "}"


def closest(glob: str, names: Sequence[str]) -> list[str]:
    """Return up to three globs or names that somebody who wrote ``glob`` may have meant.

    >>> closest("input_layernorm", ["", "layers", "layers.0", "layers.0.input_layernorm", "layers.1.input_layernorm"])
    ['*.input_layernorm']
    """
    parts = glob.split(".")
    # Where there is a brace, another cut might go through it.
    shorter = [".".join(parts[start:]) for start in range(1, len(parts))] if "}" not in glob else [glob.removeprefix("*.")]
    found = [other for other in (f"*.{glob}", *shorter) if re.search(r"\w", other) and any(matches(other, name) for name in names)]
    if not found:
        words = {word.lower(): word for name in names if not (word := name.rpartition(".")[2]).isdecimal()}
        alike = difflib.get_close_matches(parts[-1].lower(), words, n=2, cutoff=0.75)
        found = [f"*.{words[word]}" for word in alike] + similar(glob, collapse(names))
    return list(dict.fromkeys(found))[:3] or similar(glob, collapse(names), cutoff=0.0)


def similar(text: str, others: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Return up to two of ``others`` that read like ``text``."""
    return difflib.get_close_matches(text, [other for other in others if other], n=2, cutoff=cutoff)
