"""The bodies of `sidestream train`, `eval`, `generate` and `solve`.

Each has `run(words, parser, add_fields) -> exit status`.
"""
