"""The commands of ``pfl-ext``, one file each.

A command is a module with ``parse(arguments)``, which makes a request of its command line, a frozen dataclass that says
everything and has nothing of argparse, and ``execute(request)``, which carries it out and returns the exit status.
``flags()``, where a module has it, tells how names in messages are spelled on its command line.
"""

__all__: list[str] = []
