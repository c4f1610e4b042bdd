"""Compilers: canonical graph → a plan one kind of machine runs. One file per target; each lowers the graph as it needs."""
