"""Wrong programs: weights that change while an engine runs, and sleep."""

from mutant import Mutant

MEMORY = "shiftjax/device/group_memory.py"
TEST_UPDATE = "tests/rollouts/test_update_weights.py"
TEST_SLEEP = "tests/rollouts/test_sleep.py"

# fmt: off
ROWS = (
    Mutant(
        "modes keep views of old weights", "rollouts", MEMORY,
        "if key[0] not in gone", "if key[0] >= 0",
        (f"{TEST_UPDATE}::test_no_step_of_any_mode_sees_an_old_weight",),
        "a mode computes with weights of two versions",
    ),
    Mutant(
        "new weights find what old ones have begun", "rollouts", "shiftjax/core/block_tables.py",
        "self._root(request, sequence.version)", "self._root(request, self.version)",
        (f"{TEST_UPDATE}::test_a_block_that_old_weights_have_begun_is_not_found",),
        "a prompt is read with keys and values of other weights",
    ),
    Mutant(
        "sequences keep blocks of pools that are gone", "rollouts",
        "shiftjax/rollouts/control.py",
        "        self.engine.forget_all()\n", "",
        (f"{TEST_SLEEP}::test_requests_that_are_kept_go_on_after_a_sleep",),
        "requests read zeros after the engine has slept",
    ),
)
