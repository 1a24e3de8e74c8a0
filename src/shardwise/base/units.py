"""Numbers as people read and write them: counts, sizes and times."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Not B for billion, which would be read as bytes.
_COUNT_SUFFIXES = ("", " k", " M", " billion", " trillion")
_LARGEST_WORD = 999.5e12
_SIZE_SUFFIXES = (" B", " KiB", " MiB", " GiB", " TiB", " PiB")


def count(value: float) -> str:
    """The text of a count, in powers of 1,000: `5.3 M`, `6.9 billion`; below 1,000 as it is; beyond, `4.49e20`."""
    if abs(value) >= _LARGEST_WORD:
        return f"{value:.2e}".replace("e+", "e")
    return _scaled(value, 1000.0, _COUNT_SUFFIXES)


def size(value: float) -> str:
    """Bytes as text, in powers of 1,024: `size(3 * 2**29)` is `1.5 GiB`."""
    return _scaled(value, 1024.0, _SIZE_SUFFIXES)


def counted(number: int, noun: str) -> str:
    """A number of things as text: `1 file`, `2,000 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def spans(numbers: Iterable[int]) -> list[str]:
    """Numbers as texts of ranges, in their order: `0-3` and `6`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ["-".join(map(str, ends)) for ends in ranges]


def parse_size(text: str) -> int | None:
    """The bytes that a text names: `5GB` in powers of 1,000, `5GiB` in powers of 1,024, or `5000`; else None."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        return None
    power = " KMGT".index((match[2] or " ").upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def duration(seconds: float) -> str:
    """Seconds in the one or two largest units: `120 ms`, `12.3 s`, `4 min 05 s`, `1 h 02 min`, `3 d 04 h`."""
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return "{} min {:02d} s".format(*divmod(round(seconds), 60))
    if round(seconds / 60) < 24 * 60:
        return "{} h {:02d} min".format(*divmod(round(seconds / 60), 60))
    return "{} d {:02d} h".format(*divmod(round(seconds / 3600), 24))


def step_duration(seconds: float) -> str:
    """Seconds of a step, with the four digits that tell alike layouts apart: `18.99 ms`, `2.612 s`, `1 min 05 s`."""
    if seconds >= 59.95:
        return duration(seconds)
    number, unit = (seconds * 1000, "ms") if seconds < 0.9995 else (seconds, "s")
    return f"{number:#.4g}".rstrip(".") + f" {unit}"


def _scaled(value: float, base: float, suffixes: tuple[str, ...]) -> str:
    if value < 0:
        return "-" + _scaled(-value, base, suffixes)
    number = float(value)
    power = 0
    while power < len(suffixes) - 1 and number >= base - 0.5:
        number /= base
        power += 1
    if power == 0:
        text = f"{number:.0f}" if number == int(number) else f"{number:.3g}"
    else:
        text = f"{number:.0f}" if number >= 99.95 else f"{number:.1f}"
    return text + suffixes[power]
