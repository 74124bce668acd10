"""The programs on pages run on two ranks."""

import pages
import pytest


def test_another_librarys_users():
    assert pages.run("docs/how-to/coming-from.md") == 13
