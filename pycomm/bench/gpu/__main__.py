"""Entry of ``python -m pycomm.bench.gpu``, another name of ``python -m pycomm.bench gpu``."""

import sys

from pycomm.bench.cli import main

if __name__ == "__main__":
    main(["gpu", *sys.argv[1:]])
