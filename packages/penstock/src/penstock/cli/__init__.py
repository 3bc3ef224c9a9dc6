"""The command line. Each command has its own file and is registered in `main`.

A command only calls public functions of Penstock and prints their results. Commands write data to stdout, and progress
and errors to stderr. Modules that take long to import are imported only when a command needs them.
"""
