"""Entry of ``python -m benchmarks.nodes``."""

from benchmarks.nodes.cli import main

if __name__ == "__main__":
    main()
