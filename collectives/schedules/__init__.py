"""Collective algorithms as data: generators of rounds, one family a file."""
