"""Adapters to other packages, each a module of its own that needs its package installed."""
