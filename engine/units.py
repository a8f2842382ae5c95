"""Numbers for people: three significant digits and the unit that fits."""

from collections.abc import Sequence

TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
SIZE = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def scale_of(value: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """The unit for a value as (factor, name): the largest that |value| reaches when rounded to three digits, the smallest for
    tiny values, and the plain one (s, B) for 0."""
    if value == 0:
        return next(unit for unit in units if unit[0] == 1.0)
    return next((unit for unit in units if abs(value) >= unit[0] * 0.9995), units[-1])


def seconds(value: float) -> str:
    """`1.23 ms`."""
    factor, name = scale_of(value, TIME)
    return f"{digits(value / factor)} {name}"


def roughly(value: float) -> str:
    """Seconds that are only estimated: `4 s`, `25 s`, `3 min`, `1.5 h`."""
    if value < 10:
        return f"{max(1, round(value))} s"
    if value < 57.5:
        return f"{5 * round(value / 5)} s"
    return f"{max(1, round(value / 60))} min" if value < 5400 else f"{value / 3600:.2g} h"


def size(value: float) -> str:
    """`1.23 MB`."""
    factor, name = scale_of(value, SIZE)
    return f"{digits(value / factor)} {name}"


def quantity(value: str | float, unit: str) -> str:
    """A value in seconds ("s"), as a ratio ("×") or as it is ("")."""
    return {"s": seconds, "×": ratio, "": str}[unit](value)


def bandwidth(value: float) -> str:
    """Bytes/s as `100 Gb/s`, `3.6 Tb/s`."""
    factor, name = (1e12, "Tb/s") if value * 8 >= 0.9995e12 else (1e9, "Gb/s")
    return f"{digits(value * 8 / factor)} {name}"


def share(value: float) -> str:
    """`43 %`; one decimal below ten percent, thousands separated; `< 0.1 %` for a positive share that would round to 0; no
    `-0.0 %`."""
    if 0 < value < 0.0005:
        return "< 0.1 %"
    if -0.0005 < value < 0:
        return "0.0 %"
    return _percent(f"{value:,.0%}" if abs(value) >= 0.1 else f"{value:.1%}")


def in_a_row(words: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def at_most(value: float) -> str:
    """`at most 43 %`; `less than 0.1 %` for a share that would round to 0."""
    text = share(value)
    return f"less than {text[2:]}" if text.startswith("<") else f"at most {text}"


def signed(value: float) -> str:
    """A share with its sign: `+4.2 %`, `−4.2 %`; a share that rounds to 0 has a plus."""
    return _percent(f"{round(value, 3) + 0.0:+,.1%}")


def _percent(text: str) -> str:
    """Python's percentage with a space and the sign for minus, which is as wide as a plus and no hyphen."""
    return text.replace("%", " %").replace("-", "−")


def ratio(value: float) -> str:
    """`1.38×`."""
    return f"{digits(value)}×"


def digits(value: float) -> str:
    """Three significant digits, no exponent for ordinary sizes, thousands separated."""
    if value == 0:
        return "0"
    value = float(f"{value:.12g}")  # 0.9375 and a quotient just below it read alike
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.01 else f"{value:.2e}"
