"""Mutants of what a plan advises to buy: loads, servers, trials, changes, searches."""

from mutant import Mutant

LOAD = "shiftjax/sim/load.py"
SERVERS = "shiftjax/sim/servers.py"
TRIALS = "shiftjax/sim/trials.py"
VARIANTS = "shiftjax/sim/variants.py"
ADVICE = "shiftjax/sim/advice.py"
MOST = "shiftjax/sim/most_load.py"
COMMAND = "shiftjax/sim/serve_command.py"

TEST_LOAD = ("tests/sim/test_load.py",)
TEST_SERVERS = ("tests/sim/test_servers.py",)
TEST_TRIALS = ("tests/sim/test_trials.py",)
TEST_VARIANTS = ("tests/sim/test_variants.py",)
TEST_ADVICE = ("tests/sim/test_advice.py",)
TEST_MOST = ("tests/sim/test_most_load.py",)
TEST_COMMAND = ("tests/serving/cli/test_serve_command.py",)

ROWS: tuple[Mutant, ...] = (
    Mutant(
        "each server has bursts of its own",
        "advice",
        LOAD,
        "cv=servers**-0.5",
        "cv=1.0",
        TEST_LOAD,
        "devices are bought for bursts that a router takes away",
    ),
    Mutant(
        "all seeds are one",
        "advice",
        LOAD,
        "seed=seed)\n        found = requests_at(times, *lengths, length_cv, seed)",
        "seed=0)\n        found = requests_at(times, *lengths, length_cv, 0)",
        TEST_LOAD,
        "five replays say what one says",
    ),
    Mutant(
        "a replay ends before its requests do",
        "advice",
        LOAD,
        "max(LEAST_REQUESTS, own * LIVES * life)",
        "LEAST_REQUESTS",
        TEST_LOAD,
        "a large server is never as full as it will be",
    ),
    Mutant(
        "a tail is longer than the model",
        "advice",
        LOAD,
        "prompt = min(request.num_prompt_tokens, longest - output)",
        "prompt = request.num_prompt_tokens",
        TEST_LOAD,
        "no number of devices keeps the limits",
    ),
    Mutant(
        "no prefix is known",
        "advice",
        LOAD,
        "return max(0.05, 1 - known / total)",
        "return 1.0",
        TEST_LOAD,
        "more devices are bought than agents need",
    ),
    Mutant(
        "closed forms are trusted",
        "advice",
        SERVERS,
        "TPOT_ERROR = 1.4",
        "TPOT_ERROR = 0.8",
        TEST_SERVERS,
        "servers that keep the limits are never tried",
    ),
    Mutant(
        "prompts take no time",
        "advice",
        SERVERS,
        "busy = rate * self.prompt_seconds",
        "busy = 0.0",
        TEST_SERVERS,
        "the search begins far below what is needed",
    ),
    Mutant(
        "codes of KV are as good",
        "advice",
        SERVERS,
        "return int(formats.kv != formats.activations)",
        "return 0",
        TEST_ADVICE + TEST_SERVERS,
        "the cache loses digits for nothing",
    ),
    Mutant(
        "a changed bound keeps its sizes",
        "advice",
        SERVERS,
        "found = deploy(target, text, **budgets)",
        "found = replace(server.deployment, **dict(settings))",
        TEST_SERVERS,
        "replays have steps that the command does not have",
    ),
    Mutant(
        "one replay is enough",
        "advice",
        TRIALS,
        "len(found.measured) < SEEDS",
        "len(found.measured) < 1",
        TEST_TRIALS,
        "what one draw of requests keeps is bought",
    ),
    Mutant(
        "there is no margin",
        "advice",
        TRIALS,
        "ratio <= 1 - self.margin",
        "ratio <= 1",
        TEST_TRIALS,
        "a plan is at the edge",
    ),
    Mutant(
        "who has no room does not count",
        "advice",
        TRIALS,
        "return not measured.refused and",
        "return",
        TEST_TRIALS,
        "long prompts are refused by what was bought",
    ),
    Mutant(
        "users' settings are changed",
        "advice",
        VARIANTS,
        "settings.keys() & self._budgets.keys() or",
        "",
        TEST_VARIANTS,
        "a flag is not what was planned for",
    ),
    Mutant(
        "a change that hurts is made again",
        "advice",
        VARIANTS,
        "return ratio(found.ttft, found.tpot) < ratio(base.ttft, base.tpot)",
        "return True",
        TEST_VARIANTS,
        "replays are spent on what cannot help",
    ),
    Mutant(
        "servers never become one engine",
        "advice",
        VARIANTS,
        'return {"dp": found} if found > 1 else None',
        "return None",
        TEST_VARIANTS,
        "a queue for all of a machine is never tried",
    ),
    Mutant(
        "the dearest come first",
        "advice",
        ADVICE,
        "heappush(heap, (cost, server.rank",
        "heappush(heap, (-cost, server.rank",
        TEST_ADVICE,
        "more is bought than is needed",
    ),
    Mutant(
        "what a stride left out is not tried",
        "advice",
        ADVICE,
        "best = _fewer(trials, best, rate)",
        "pass",
        TEST_ADVICE,
        "more is bought than is needed",
    ),
    Mutant(
        "more of what is idle",
        "advice",
        ADVICE,
        "return trial.rate * life < IDLE",
        "return False",
        TEST_ADVICE,
        "a search for what cannot be has no end",
    ),
    Mutant(
        "the rate of one replay is promised",
        "advice",
        MOST,
        "kept = trials.confirmed(kept, low)  # with all seeds",
        "pass",
        TEST_MOST,
        "a load is promised that four of five draws miss",
    ),
    Mutant(
        "a fleet takes all devices",
        "advice",
        COMMAND,
        'values["devices"] = deployment.grid.num_devices  # else all that there are',
        "pass",
        TEST_COMMAND,
        "two servers want the same devices",
    ),
)
