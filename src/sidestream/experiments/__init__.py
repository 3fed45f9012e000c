"""The kernel: how an experiment runs, whatever its table.

`table.py` what a table is and which there are, `settings.py` settings as data, `run.py` jobs, run directory, resume and
provenance, `engine.py` where jobs run, `results.py` from one number a problem to values, intervals and tests, `report/`
tables, figures and the page. A table of your own: `docs/reproduce.md` shows a whole one; `table.py` says what belongs
into its file.
"""
