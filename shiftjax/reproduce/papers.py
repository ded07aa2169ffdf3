"""Which papers there are. Light: the command line reads this for --help.

A paper is a row here, a file of published figures in `published/NAME.yaml` and a module NAME beside
this one, with `PARTS`: its evaluations by name. A part is a function of the published figures and
the options that yields `Figure`s and `Curve`s (`figures.py`).
"""

from collections.abc import Mapping
from types import MappingProxyType

PAPERS: Mapping[str, str] = MappingProxyType(
    {
        "shift": "Shift Parallelism: latency and throughput of DP, TP, SP and Shift",
        "seesaw": "Seesaw: PP for prompts and TP for decodes, in turns",
        "flying": "Flying Serving: DP groups that bind to TP while they serve",
        "arctic": "Arctic Inference: Shift, SwiftKV and drafts together; embeddings",
    }
)
"""What `shiftjax reproduce` runs, by name, in the order of its report."""
