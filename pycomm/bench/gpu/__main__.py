"""Entry of ``python -m pycomm.bench.gpu``."""

import sys

from pycomm.bench.gpu.cli import main

if __name__ == "__main__":
    sys.exit(main())
