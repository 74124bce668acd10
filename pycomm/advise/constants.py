"""The measured constants of the model, each with its unit and source."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).with_name("constants.json")
COMPRESSIONS = ("none", "bf16", "int8", "topk")
OPERATIONS = ("encode", "decode", "decode_add")  # of all compressions but the first
SCALES = {
    "ns/element": 1e-9,
    "ns/byte": 1e-9,
    "us": 1e-6,
    "ratio": 1.0,
    "ranks": 1.0,
    "Gbit/s": 1e9,
}
# The constants of every machine. If links between nodes were measured, there is also link.rate.
UNITS = {
    "none.add": "ns/element",
    **{f"{name}.{op}": "ns/element" for name in COMPRESSIONS[1:] for op in OPERATIONS},
    "local.latency": "us",
    "local.all_reduce": "ns/byte",
    "local.ranks": "ranks",
    "link.latency": "us",
    "link.busy": "us",
    "link.message": "us",
    "link.core": "ns/byte",
    "link.payload": "ratio",
}


@dataclass(frozen=True)
class Constant:
    """A measured number.

    Attributes:
        value: the number, in `unit`.
        unit: one of `SCALES`.
        source: the measurement, or how the number was derived.
    """

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Constants:
    """All constants of a machine.

    Attributes:
        machine: its description, from :func:`pycomm.bench.report.circumstances`.
        values: the constants by name; docs/how-to/advisor.md explains each.
    """

    machine: dict[str, Any]
    values: dict[str, Constant]

    def __post_init__(self) -> None:
        for name, unit in UNITS.items():
            constant = self.values.get(name)
            if constant is None:
                raise ValueError(f"constants must have {name}, got {', '.join(self.values)}")
            if constant.unit != unit:
                raise ValueError(f"{name} must be in {unit}, got {constant.unit!r}")
            if not 0 < constant.value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {constant.value}")

    def __getitem__(self, name: str) -> float:
        """A constant in base units: seconds, seconds per element or byte, bits per second."""
        constant = self.values[name]
        return constant.value * SCALES[constant.unit]

    @property
    def link_rate(self) -> float | None:
        """Bits per second of messages over the link; None if no link was measured."""
        return self["link.rate"] if "link.rate" in self.values else None


def load(path: Path = SHIPPED) -> Constants:
    """Reads a file that :func:`save` has written.

    Raises:
        ValueError: the file has another form, or a constant is missing.
    """
    try:
        content = json.loads(path.read_text())
        values = {name: Constant(**entry) for name, entry in content["constants"].items()}
        return Constants(content["machine"], values)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be a file that --measure has written: {error!r}") from error


def save(constants: Constants, path: Path) -> None:
    """Writes the constants as JSON, one per line."""
    lines = ",\n".join(
        f"    {json.dumps(name)}: {json.dumps(asdict(constant))}"
        for name, constant in constants.values.items()
    )
    machine = json.dumps(constants.machine, indent=2).replace("\n", "\n  ")
    path.write_text(f'{{\n  "machine": {machine},\n  "constants": {{\n{lines}\n  }}\n}}\n')
