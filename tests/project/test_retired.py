"""The errors of removed names and options name the replacement."""

import pytest

import pycomm


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("plot_step", r"any more: .*pycomm\.trace .*ui\.perfetto"),
        ("suggest_batches", r"any more: .*stats\.ranks\[rank\]\.own"),
        ("never_was", r"no attribute 'never_was'$"),
    ],
)
def test_attributes_of_the_package(name, replacement):
    with pytest.raises(AttributeError, match=replacement):
        getattr(pycomm, name)
