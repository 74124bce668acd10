"""``python -m pycomm.check``."""

import sys

from pycomm.check.cli import main

if __name__ == "__main__":
    sys.exit(main())
