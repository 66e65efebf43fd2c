#!/usr/bin/env python3
"""Measures the engine, as `nanovllm bench engine` does: bench.py --help."""

from nanovllm.cli.bench.engine import main

if __name__ == "__main__":
    main()
