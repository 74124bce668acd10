"""Entry of ``python -m pycomm.bench``."""

from pycomm.bench.cli import main

if __name__ == "__main__":
    main()
