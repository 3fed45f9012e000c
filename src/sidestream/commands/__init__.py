"""The bodies of `sidestream train`, `eval` and `generate`. Each has `run(words, parser, add_fields) -> exit status`."""
