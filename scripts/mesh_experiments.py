"""Sweeps of mesh configurations, measured on the devices here and modelled on other machines.

    python scripts/mesh_experiments.py experiments.yaml --out results

The same as `shiftjax mesh run`; the format of the file stands in `serving/cli/mesh_run.py`.
"""

import sys

from serving.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["mesh", "run", *sys.argv[1:]]))
