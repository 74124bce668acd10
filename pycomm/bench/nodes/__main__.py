"""Entry of ``python -m pycomm.bench.nodes``."""

from pycomm.bench.nodes.cli import main

if __name__ == "__main__":
    main()
