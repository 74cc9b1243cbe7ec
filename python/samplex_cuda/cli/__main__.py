"""`python -m samplex_cuda.cli`."""

import sys

from samplex_cuda.cli import main

if __name__ == "__main__":
    sys.exit(main())
