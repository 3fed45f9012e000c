"""The tables: one file each, found by `experiments.table.listed`.

A folder of your own tables joins them by its name in the environment variable SIDESTREAM_TABLES (several: as in PATH).
"""

import os

__path__ += [folder for folder in os.environ.get("SIDESTREAM_TABLES", "").split(os.pathsep) if folder]
