"""Mutants of what clients see: schema, errors, tool calls, texts, structured output; and hosts."""

from mutant import Mutant

SCHEMA = "serving/server/schema.py"
JSON_BODY = "serving/server/json_body.py"
RESPONSES = "serving/server/responses.py"
PARSERS = "serving/server/formats/tool_parsers.py"
GRAMMAR = "serving/server/grammar.py"
DETOKENIZER = "shiftjax/text/detokenizer.py"
HOSTS = "shiftjax/hosts/calls.py"
REPLICAS = "shiftjax/hosts/replicas.py"
TEST_REPLICAS = "tests/hosts/test_replicas.py"

TEST_FIELDS = "tests/serving/server/test_fields.py"
TEST_SCHEMA = "tests/serving/server/test_schema.py"
TEST_ERRORS = "tests/serving/server/test_errors.py"
GENERATE = "tests/serving/http/test_generate.py"
TEST_PARSERS = "tests/serving/server/formats/test_tool_parsers.py"
HTTP_TOOLS = "tests/serving/http/test_tools.py"
TEST_GRAMMAR = "tests/serving/server/test_grammar.py"
GRAMMAR_DRAFTS = "tests/serving/server/test_grammar_drafts.py"
TEST_DETOKENIZER = "tests/text/test_detokenizer.py"
HOST_CALLS = "tests/hosts/test_calls.py"

PARSER_ROWS = (
    Mutant(
        "a call in whole may not have parameters", "tool parsers", PARSERS,
        'call.get("arguments", call.get("parameters", {}))', 'call.get("arguments", {})',
        (TEST_PARSERS,), "calls of Llama lose their arguments",
    ),
    Mutant(
        "parameters do not begin a call", "tool parsers", PARSERS,
        '"(?:arguments|parameters)"', '"arguments"',
        (TEST_PARSERS,), "arguments of Llama's calls do not stream",
    ),
    Mutant(
        "any name is called", "tool parsers", PARSERS,
        "if isinstance(name, str) and name in self._functions:", "if isinstance(name, str):",
        (TEST_PARSERS,), "clients are asked for functions that they do not have",
    ),
    Mutant(
        "one call fewer than is allowed", "tool parsers", PARSERS,
        "self._num_calls <= self._most", "self._num_calls < self._most",
        (TEST_PARSERS,), "a single call is left out",
    ),
    Mutant(
        "calls are counted from one", "tool parsers", PARSERS,
        "CallBegin(self._num_calls - 1, made", "CallBegin(self._num_calls, made",
        (TEST_PARSERS,), "clients put arguments to no call",
    ),
    Mutant(
        "what was held back is lost at the end", "tool parsers", PARSERS,
        "return [Text(rest)] if rest and is_text else []", "return []",
        (TEST_PARSERS,), "texts that end like a mark are cut",
    ),
    Mutant(
        "strings of JSON may not hold brackets", "tool parsers",
        "serving/server/formats/marked_text.py",
        "self._in_string = not self._in_string", "self._in_string = False",
        (TEST_PARSERS,), "arguments end in the middle of a text",
    ),
    Mutant(
        "a stop string ends a call", "tool parsers", RESPONSES,
        'news.finish_reason == "stop" and not isinstance(news.stop_reason, str)',
        'news.finish_reason == "stop"',
        (HTTP_TOOLS,), "clients run a call that was cut",
    ),
    Mutant(
        "tool_choice none is not heard", "tool parsers", "serving/server/tools.py",
        'if choice == "none" or not functions:', "if not functions:",
        (TEST_FIELDS,), "functions are called that must not be",
    ),
    Mutant(
        "calls may be parallel whatever is asked", "tool parsers", "serving/server/tools.py",
        "most = 1 if parallel is False else None", "most = None",
        (HTTP_TOOLS,), "parallel_tool_calls is ignored",
    ),
)  # fmt: skip
SCHEMA_ROWS = (
    Mutant(
        "max_completion_tokens is ignored", "schema", SCHEMA,
        '        given["max_tokens"] = most\n', '        given["max_tokens"] = fields.max_tokens\n',
        (TEST_SCHEMA,), "outputs are longer than was asked and paid for",
    ),
    Mutant(
        "limits that disagree are taken", "schema", SCHEMA,
        "if fields.max_tokens not in (None, most):", "if False:",
        (TEST_SCHEMA,), "which of the two holds is left to chance",
    ),
    Mutant(
        "top_logprobs without logprobs is taken", "schema", SCHEMA,
        "if fields.top_logprobs and not fields.logprobs:", "if False:",
        (TEST_SCHEMA,), "an option is dropped without a word",
    ),
    Mutant(
        "priorities are ignored", "schema", SCHEMA,
        "return self.fields.priority or 0", "return 0",
        (TEST_SCHEMA,), "urgent requests wait like all others",
    ),
    Mutant(
        "salts are ignored", "schema", "serving/server/service.py",
        "cache_salt=fields.cache_salt,", "cache_salt=None,",
        ("tests/serving/hazards/test_model.py::test_prefixes_are_shared_but_not_across_salts",),
        "tenants share their caches",
    ),
    Mutant(
        "an unknown field of an object is not told", "schema", JSON_BODY,
        '                unknown += _unknown_in(inner, each, f"{place}{name}.")\n',
        "                pass\n",
        (TEST_FIELDS,), "misspelt options are dropped without a word",
    ),
    Mutant(
        "false counts as 0", "schema", "serving/server/hints.py",
        "[each for each in harmless if isinstance(each, bool) == isinstance(value, bool)]",
        "harmless",
        (TEST_FIELDS,), "an option of another type passes",
    ),
    Mutant(
        "what a template drops stays dropped", "schema", "serving/server/system_turns.py",
        "return turns if self._keeps(at) else _joined(turns)", "return turns",
        ("tests/serving/server/test_system_turns.py",), "a model never hears what it is told",
    ),
    Mutant(
        "marks in an answer's strings are calls", "schema",
        "serving/server/formats/tool_formats.py",
        "parser = FormParser(parser, wanted.marks.begin)", "pass",
        (HTTP_TOOLS,), "data of an answer becomes a call",
    ),
    Mutant(
        "cut arguments stay text for every template", "schema", "serving/server/tools.py",
        "forms = [_as_object] if any(isinstance(each, str) for each in arguments) else []",
        "forms = []",
        ("tests/serving/http/test_cut_calls.py",), "a conversation never gets over a cut call",
    ),
    Mutant(
        "messages must fit with all that they may say", "schema", "serving/server/schema.py",
        "if not wish.is_capped or most is None:", "if True:",
        ("tests/serving/clients/test_anthropic.py",), "Claude Code needs a context over 32,000",
    ),
    Mutant(
        "an effort is as the client has it", "schema", "serving/server/effort.py",
        'variables["reasoning_effort"] = _nearest(effort, levels)',
        'variables["reasoning_effort"] = effort',
        ("tests/serving/server/test_effort.py",), "a template refuses a level of others",
    ),
    Mutant(
        "a hint is dropped without a word", "schema", "serving/server/hints.py",
        "told.append(place + name)", "pass",
        ("tests/serving/server/test_hints.py",), "clients believe that an option has an effect",
    ),
    Mutant(
        "a full queue is another error", "schema", "serving/server/errors.py",
        '"queue_full": Kind(429,', '"queue_full": Kind(503,',
        (TEST_ERRORS,), "clients do not slow down",
    ),
    Mutant(
        "a quota is never given back", "schema", "serving/server/quotas.py",
        "self._open[name] -= num", "pass",
        ("tests/serving/server/test_quotas.py",), "a client is locked out after a while",
    ),
    Mutant(
        "a single step decides whether all places are taken", "schema",
        "serving/server/bottleneck.py", "return max(self.running, self.peak_running)",
        "return self.running",
        ("tests/serving/server/test_bottleneck.py",), "the sentence flickers between two causes",
    ),
    Mutant(
        "gauges of a pause are those of the load before it", "schema",
        "serving/server/history.py", "slot.index > self._replaced[0]", "False",
        ("tests/serving/server/test_history.py",), "an idle server seems to be full",
    ),
    Mutant(
        "a stalled stream keeps its place under load", "schema", "serving/server/write_limit.py",
        "if is_busy or seconds", "if seconds",
        ("tests/serving/hazards/test_slow_readers.py",), "all others wait for who does not read",
    ),
    Mutant(
        "a duplicate has another code", "schema", "serving/server/errors.py",
        '"duplicate_request_id"', '"duplicate_request"',
        (TEST_ERRORS,), "clients that know the code break",
    ),
    Mutant(
        "usage counts the first prompt alone", "schema", RESPONSES,
        "num_prompt = sum(len(handle.request.prompt_token_ids) for handle in handles)",
        "num_prompt = sum(len(handle.request.prompt_token_ids) for handle in handles[:1])",
        (GENERATE,), "batches are billed as one prompt",
    ),
    Mutant(
        "usage has a token too many", "schema", RESPONSES,
        "num_output = sum(handle.num_output_tokens for handle in handles)",
        "num_output = sum(handle.num_output_tokens + 1 for handle in handles)",
        (GENERATE,), "clients are billed for what they did not get",
    ),
    Mutant(
        "every part of a stream has the prompt", "schema", RESPONSES,
        "if self._fields.echo and is_first:", "if self._fields.echo:",
        (GENERATE,), "streams with echo repeat it",
    ),
    Mutant(
        "rejected predictions count the accepted ones", "schema", RESPONSES,
        "rejected = sum(each.num_prediction_tokens for each in metrics) - accepted",
        "rejected = sum(each.num_prediction_tokens for each in metrics)",
        ("tests/serving/server/test_prediction.py",), "usage says that predictions do not help",
    ),
)  # fmt: skip
TEXT_ROWS = (
    Mutant(
        "a stop string is shown but for its last character", "text", DETOKENIZER,
        "min(self._longest - 1, len(text))", "min(self._longest - 2, len(text))",
        (TEST_DETOKENIZER,), "parts of a stop string leak into streams",
    ),
    Mutant(
        "the stop string that ends last counts", "text", DETOKENIZER,
        "return min(found)[1:] if found else None", "return max(found)[1:] if found else None",
        (TEST_DETOKENIZER,), "text after a stop is shown",
    ),
    Mutant(
        "stop strings are always shown", "text", DETOKENIZER,
        "start + len(self._matched) * self._include", "start + len(self._matched)",
        (TEST_DETOKENIZER,), "clients see what should have been cut",
    ),
    Mutant(
        "half a character at the end is dropped", "text", DETOKENIZER,
        'self._utf8.decode(b"", final=True)', 'self._utf8.decode(b"", final=False)',
        (TEST_DETOKENIZER,), "streams differ from whole texts",
    ),
    Mutant(
        "marks of tools stay hidden", "text", DETOKENIZER,
        "tokenizer.special_ids - visible if", "tokenizer.special_ids if",
        ("tests/serving/http/test_tool_formats.py",),
        "calls of models with special marks are text",
    ),
)  # fmt: skip
STRUCTURE_ROWS = (
    Mutant(
        "a draft leaves the grammar a token ahead", "structured output", GRAMMAR,
        "matcher.rollback(taken)", "matcher.rollback(max(0, taken - 1))",
        (GRAMMAR_DRAFTS,), "the next mask is that of another place",
    ),
    Mutant(
        "choices are regular expressions", "structured output", GRAMMAR,
        'f"\\\\{character}" if character in REGEX_META else character for', "character for",
        (TEST_GRAMMAR,), "a choice matches other texts",
    ),
    Mutant(
        "whitespace is as it comes", "structured output", GRAMMAR,
        'overrides=None if space is None else {"whitespace_pattern": space}', "overrides=None",
        (TEST_GRAMMAR,), "disable_any_whitespace is ignored",
    ),
    Mutant(
        "a mask is used a token too late", "structured output", "shiftjax/core/scheduler.py",
        "sequence.max_length or sequence.constraint is not None):", "sequence.max_length):",
        ("tests/core/test_constraints.py",), "with overlap the output breaks its grammar",
    ),
)  # fmt: skip
HOSTS_ROWS = (
    Mutant(
        "the leader forgets what it has sent", "hosts", HOSTS,
        "            self._known[step.program, index] = flat\n", "",
        (HOST_CALLS,), "followers compute with inputs of earlier steps",
    ),
    Mutant(
        "runs are an element short", "hosts", HOSTS,
        "- starts + np.uint32(1)", "- starts",
        (HOST_CALLS,), "followers miss changes",
    ),
    Mutant(
        "steps of a lost host stay in flight", "hosts", REPLICAS,
        "            lane.in_flight.clear()\n", "",
        (TEST_REPLICAS,), "a host that comes back is asked for what it never heard of",
    ),
    Mutant(
        "a host that comes back is not told so", "hosts", REPLICAS,
        "                lane.runner.begin()\n", "",
        (TEST_REPLICAS,), "its groups read what they do not have",
    ),
    Mutant(
        "what a lost host had in its memory is found", "hosts", REPLICAS,
        "lane.scheduler.tables.clear_cache()\n", "pass\n",
        (TEST_REPLICAS,), "prefixes are restored from nowhere",
    ),
    Mutant(
        "any host may come back", "hosts", "serving/hosts/replicas.py",
        "(is_digest and numbers != agreed)", "False",
        ("tests/serving/hosts/test_replica_links.py",), "hosts run other programs",
    ),
    Mutant(
        "hosts agree on the most", "hosts", "serving/hosts/leader.py",
        "list(map(min, *told))", "list(map(max, *told))",
        ("tests/serving/hosts/test_host_links.py::test_all_hosts_hear_the_least_of_each_number",),
        "a pool is larger than the smallest host has memory for",
    ),
    Mutant(
        "a follower that does nothing is waited for", "hosts", "serving/hosts/leader.py",
        "return now - self.moved_at if self.sent > self.done else 0.0", "return 0.0",
        ("tests/serving/hosts/test_host_links.py::test_a_follower_that_does_no_step_is_lost",),
        "an engine hangs for ever",
    ),
)  # fmt: skip
ROWS: tuple[Mutant, ...] = (
    *PARSER_ROWS,
    *SCHEMA_ROWS,
    *TEXT_ROWS,
    *STRUCTURE_ROWS,
    *HOSTS_ROWS,
)  # fmt: skip
