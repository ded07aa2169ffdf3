"""All mutants. To add some: a row in the module of their kind, or one more module here."""

from rows_adapters import ROWS as ADAPTERS
from rows_advice import ROWS as ADVICE
from rows_configs import ROWS as CONFIGS
from rows_control import ROWS as CONTROL
from rows_costs import ROWS as COSTS
from rows_device import ROWS as DEVICE
from rows_disk import ROWS as DISK
from rows_experts import ROWS as EXPERTS
from rows_explain import ROWS as EXPLAIN
from rows_four_bits import ROWS as FOUR_BITS
from rows_fp8 import ROWS as FP8
from rows_heads import ROWS as HEADS
from rows_latents import ROWS as LATENTS
from rows_numerics import ROWS as NUMERICS
from rows_plans import ROWS as PLANS
from rows_positions import ROWS as POSITIONS
from rows_reproduce import ROWS as REPRODUCE
from rows_requests import ROWS as REQUESTS
from rows_rollouts import ROWS as ROLLOUTS
from rows_routing import ROWS as ROUTING
from rows_serving import ROWS as SERVING
from rows_sizes import ROWS as SIZES
from rows_stored import ROWS as STORED
from rows_sums import ROWS as SUMS
from rows_time import ROWS as TIME
from rows_windows import ROWS as WINDOWS

MUTANTS = (
    *(*ADAPTERS, *ADVICE, *CONFIGS, *CONTROL, *COSTS, *DEVICE, *DISK, *EXPERTS, *EXPLAIN),
    *(*FOUR_BITS, *FP8, *HEADS, *LATENTS, *NUMERICS, *PLANS, *POSITIONS, *REPRODUCE, *REQUESTS),
    *(*ROLLOUTS, *ROUTING, *SERVING, *SIZES, *STORED, *SUMS, *TIME, *WINDOWS),
)
