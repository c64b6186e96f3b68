"""Sizes as people write them: ``"12GiB"``, ``"500MB"``, or a number of bytes."""

import re

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


def parse_bytes(size: int | str, *, what: str) -> int:
    """Return ``size`` in bytes; ``what`` names it in the error.

    >>> parse_bytes("12GiB", what="activation_budget")
    12884901888
    >>> parse_bytes("0.5 MB", what="min_bytes")
    500000
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f'{what}={size!r} is not a size; write bytes as a number, or "12GiB", "500MB"')
        return int(float(match[1]) * _UNITS[match[2].lower()])
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(f'{what}={size!r} is not a size; write a number of bytes of at least 0, or a string such as "12GiB"')
    return size


def format_bytes(num_bytes: float) -> str:
    """Return a short text for a table.

    >>> format_bytes(12 * 2**30), format_bytes(1536), format_bytes(3)
    ('12.0 GiB', '1.5 KiB', '3 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
