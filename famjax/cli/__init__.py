"""The command line: `famjax VERB`, one module per verb.

`famjax.cli.main` dispatches, and turns user errors into one line and an exit status.
"""
