"""Where the time of the steps in a trace went, and what to change: `python -m mpiddp.report`.

It reads the files of mpiddp/tracing, in a process of its own. docs/how-to/my-step-is-slow.md tells
how it is used, docs/reference/report.md how each number is made.

May import: the leaves and tracing.
Must never be imported by a training, nor use MPI.
"""
