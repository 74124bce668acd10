"""``python -m pycomm.advise``."""

from pycomm.advise.cli import main

if __name__ == "__main__":
    main()
