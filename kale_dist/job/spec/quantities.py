"""Quantities of Kubernetes: exact texts from numbers, and numbers from what users write. Pure."""

from __future__ import annotations

import math
import re

_GIB = 1 << 30
_UNITS: dict[str, int] = {
    "": 1,
    **{letter: 1000**power for power, letter in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate(("K", "M", "G", "T", "P", "E"), 1)},
}
_SMALL = {"m": 1e-3, "u": 1e-6, "n": 1e-9}
_AMOUNT = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)(?P<unit>[a-zA-Z]*)", re.ASCII)
_QUANTITY = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[a-zA-Z]*)", re.ASCII)


def cpu_text(cores: float) -> str:
    """Cores as a quantity: `2`, `500m`. Parts of a millicore are rounded up."""
    millicores = math.ceil(round(cores * 1000, 6))
    return str(millicores // 1000) if millicores % 1000 == 0 else f"{millicores}m"


def memory_text(gib: float) -> str:
    """GiB as a quantity: `2Gi`, `1536Mi`. Parts of a MiB are rounded up."""
    mib = math.ceil(round(gib * 1024, 6))
    return f"{mib // 1024}Gi" if mib % 1024 == 0 else f"{mib}Mi"


def memory_gib(text: str) -> float:
    """GiB of a quantity such as `2Gi`, `1500M` or `2147483648` (bytes).

    Raises:
        ValueError: This is no quantity; the message shows what to write.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None or found["unit"] not in _UNITS:
        raise ValueError(_explain(text))
    return float(found["number"]) * _UNITS[found["unit"]] / _GIB


def cores(text: str) -> float:
    """Cores of a quantity such as `2`, `0.5` or `500m`.

    Raises:
        ValueError: This is no quantity of cores.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None or found["unit"] not in ("", "m"):
        raise ValueError("Write cores as a number, such as 2 or 0.5, or millicores as '500m'")
    return float(found["number"]) / (1000 if found["unit"] else 1)


def amount(text: str) -> float:
    """Parse an API object's amount of a resource: `250m`, `2Gi`, `1e3`, `4`. What is no quantity counts as nothing."""
    found = _AMOUNT.fullmatch(text.strip())
    return float(found["number"]) * _SMALL.get(found["unit"], _UNITS.get(found["unit"], 0)) if found else 0.0


def amount_text(resource: str, number: float) -> str:
    """An amount as people read it: memory and storage in GiB."""
    return f"{number / _GIB:.3g} GiB" if "memory" in resource or "storage" in resource else f"{number:g}"


def _explain(text: str) -> str:
    """What to write instead of something like `2 GB`."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp])i?b?(?:yte)?s?\s*", text.lower(), re.ASCII)
    if found is None:
        return "Write it as '2Gi' (1024^3 bytes each) or '2G' (1000^3)"
    number, letter = found[1], found[2].upper()
    decimal = "k" if letter == "K" else letter
    power = "KMGTP".index(letter) + 1
    return f"Write '{number}{letter}i' (1024^{power} bytes each) or '{number}{decimal}' (1000^{power})"
