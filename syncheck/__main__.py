"""`python -m syncheck` is `syncheck`, with the same exit codes."""

import sys

from syncheck.cli import main

if __name__ == "__main__":
    sys.exit(main())
