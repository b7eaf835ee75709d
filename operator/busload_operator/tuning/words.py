"""Numbers as people read them. Status objects carry no floats, so these are also what status shows."""


def seconds(value: float | None) -> str:
    """`64ms`, `8.2s`, `140s`; `unknown` for None."""
    if value is None:
        return "unknown"
    if value < 0.0005:
        return "0s"
    if value < 1:
        return f"{1000 * value:.0f}ms"
    return f"{value:.1f}s" if value < 100 else f"{value:.0f}s"


def number(value: float | None) -> str:
    """Three significant digits below 100, whole above; `unknown` for None."""
    if value is None:
        return "unknown"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}"


def percent(share: float) -> str:
    """A share of 1 as `6%`."""
    return f"{100 * share:.0f}%"


def count(amount: float, noun: str) -> str:
    """`1 pod`, `2 pods`."""
    return f"{amount:g} {noun}" if amount == 1 else f"{amount:g} {noun}s"


def size(amount: float) -> str:
    """Bytes as `512 MiB` or `2.0 GiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{number(amount / scale)} {unit}"
    return f"{amount:.0f} bytes"
