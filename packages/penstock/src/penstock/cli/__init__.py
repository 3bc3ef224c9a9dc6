"""The command line. Each command has its own file and is registered in `main`.

A command only calls public verbs and prints their results. It writes data to stdout, and progress and errors to stderr.
Modules that take long to import are imported only when the verb is called.
"""
