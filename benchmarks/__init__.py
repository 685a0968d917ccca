"""Races between the fused ops and what people write instead, one file a family.

Each family builds its cases, :mod:`.measure` times them, :mod:`.report` turns the measured numbers into a CSV file, a
table and a plot, and :mod:`.harness` is the command line: ``pfl-ext bench``, or ``python -m benchmarks`` in the source
tree.
"""
