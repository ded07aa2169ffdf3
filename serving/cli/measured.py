"""`--kernels`: a machine whose constants are fitted to measured kernels."""

from dataclasses import replace
from pathlib import Path

from shiftjax.sim.experiments import as_text
from shiftjax.sim.modelled import Target

HEADING = """how far predictions are from the kernels of {path}, before with the constants of
{machine}, then with those fitted here, which all that follows takes: the median of
|predicted / measured - 1|, what 90% stay below, and the median of predicted / measured"""


def with_kernels(target: Target, path: Path | None) -> Target:
    """The target on its machine as the rows of a file have it; prints the errors of each part.

    Raises ConfigError for a file that cannot be read.
    """
    if path is None:
        return target
    from shiftjax.sim.kernel_fit import as_rows, fit_kernels  # SciPy, which nothing else here needs
    from shiftjax.sim.measured_kernels import read_kernels

    rows, before = read_kernels(path), target.machine
    fitted = fit_kernels(before, rows)
    print(HEADING.format(path=path, machine=before.name))
    print(as_text(as_rows(before, fitted, rows)) + "\n")
    return replace(
        target, machine=replace(fitted, measured=f"the kernels of {path}", published=False)
    )
