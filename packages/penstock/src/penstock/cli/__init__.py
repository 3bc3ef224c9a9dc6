"""The command line: each command in its own file, registered in `main`.

In: arguments. Out: data on stdout, progress and errors on stderr, an exit code (`main.run`).
Not here: any work; a command calls a public verb and prints what it returns. Nothing heavy is imported before that.
"""
