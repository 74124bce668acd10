"""Constants of nodes that do not exist, for the advisor."""

import dataclasses

from pycomm.advise.constants import COMPRESSIONS, UNITS, Constant, Constants

MACHINE = {"machine": {"cores": 2, "cpu": "imagined"}, "date": "never"}


def imagined(**others):
    """Constants with nearly free cores, except for the given ones."""
    values = {name: Constant(1e-9, unit, "imagined") for name, unit in UNITS.items()}
    values["local.ranks"] = Constant(2.0, "ranks", "imagined")
    values["link.payload"] = Constant(1.0, "ratio", "imagined")
    for name, value in others.items():
        name = name.replace("__", ".")
        values[name] = dataclasses.replace(values[name], value=value)
    return Constants(MACHINE, values)


# As large as on nodes that exist.
TYPICAL = imagined(
    **{name.replace(".", "__"): 0.5 for name in UNITS if name.split(".")[0] in COMPRESSIONS},
    local__latency=2.0,
    local__all_reduce=0.1,
    link__latency=50.0,
    link__message=50.0,
    link__core=0.5,
    link__payload=0.95,
)
