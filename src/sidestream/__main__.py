"""`python -m sidestream`, the form that torchrun takes."""

import sys

from sidestream.cli import main

if __name__ == "__main__":
    sys.exit(main())
