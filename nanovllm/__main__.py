"""`python -m nanovllm`: the command line."""

import sys

from nanovllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
