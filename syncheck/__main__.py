"""`python -m syncheck` is `syncheck`, with the same exit codes."""

import sys

if __name__ == "__main__":
    try:
        from syncheck.cli import main

        sys.exit(main())
    except KeyboardInterrupt:  # before `main` handles it
        sys.exit(130)
