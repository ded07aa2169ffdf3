"""Mutants that change no token and no time: what others would have cost is told wrongly."""

from mutant import Mutant

SAMPLES = "shiftjax/explain/step_samples.py"
ALTERNATIVES = "shiftjax/fleet/alternatives.py"
SETUP = "shiftjax/fleet/setup.py"
TOLD = "shiftjax/sizing/size_stats.py"
ENGINE = "shiftjax/core/engine.py"
ANSWERS = "serving/server/explaining.py"
TEST_CHOICE = ("tests/core/test_lane.py",)
TEST_STEPS = ("tests/explain/test_explanation.py",)
TEST_GROUPS = ("tests/fleet/test_alternatives.py",)
TEST_SIZES = ("tests/sizing/test_size_stats.py",)
TEST_ANSWERS = ("tests/serving/server/test_explaining.py",)

ROWS: tuple[Mutant, ...] = (
    Mutant(
        "all modes take what the chosen one does", "explain", SAMPLES,
        "predicted(costs, m, *step)", "predicted(costs, self.mode, *step)",
        TEST_STEPS, "no other mode is ever quicker or slower",
    ),
    Mutant(
        "other modes need no switch", "explain", SAMPLES,
        "step = self.last_mode, self.work", "step = None, self.work",
        TEST_STEPS, "a switch looks cheaper than it is",
    ),
    Mutant(
        "every step is kept", "explain", SAMPLES,
        "at - kept[-1].at < EVERY_SECONDS", "at - kept[-1].at < 0.0",
        TEST_STEPS, "the host sums up the work of each step for nobody",
    ),
    Mutant(
        "all that was kept is priced at once", "explain", SAMPLES,
        "unseen[PRICED_AT_ONCE:]", "unseen[len(unseen) :]",
        TEST_STEPS, "who opens the page holds up the engine",
    ),
    Mutant(
        "nobody waits when a mode is chosen", "explain", ENGINE,
        "bool(plans), last_mode, num_waiting)", "bool(plans), last_mode, 0)",
        TEST_CHOICE, "a choice for the sake of the queue looks wrong",
    ),
    Mutant(
        "a look fills the prices of the policy", "explain", SETUP,
        "prices = _cost_arrangement(deployment, lanes, policies, costs)\n",
        "prices = policy if isinstance(policy, CostArrangement) else None\n",
        TEST_GROUPS, "groups change otherwise when somebody looks, and only with one policy",
    ),
    Mutant(
        "what does not hold everybody is told", "explain", ALTERNATIVES,
        "if all(map(nodes.is_possible, each))", "if each",
        TEST_GROUPS, "groups look quicker that could not serve what is there",
    ),
    Mutant(
        "the last change is told with the load of now", "explain", ALTERNATIVES,
        "view, copy(self.load), wish", "view, self.load, wish",
        TEST_GROUPS, "a change looks wrong that was right",
    ),
    Mutant(
        "the smallest size is the largest", "explain", TOLD,
        "option(found[0]), option(found[-1])", "option(found[0]), option(found[0])",
        TEST_SIZES, "nobody sees what small steps would have cost",
    ),
    Mutant(
        "an answer that failed is asked for no more", "explain", ANSWERS,
        "            if self._asked is asked:\n                self._asked = None\n",
        "",
        TEST_ANSWERS, "the page tells the same for ever",
    ),
)  # fmt: skip
