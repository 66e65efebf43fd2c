"""Families of models: registry.py finds them, families/ describes them, decoder.py computes them. No torch here."""
