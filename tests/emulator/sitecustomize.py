"""With this folder in PYTHONPATH, every Python program reads this first, and has the devices."""

import emulator  # noqa: F401
