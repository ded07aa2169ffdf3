"""Mutants of vLLM's request fields: rules of tokens, budgets of thinking, prompts, scores."""

from mutant import Mutant

RULES = "shiftjax/text/token_rules.py"
THINKING = "shiftjax/text/thinking.py"
PROMPTS = "serving/server/prompts.py"
RESPONSES = "serving/server/responses.py"
SCORING = "serving/server/scoring.py"
CHAT = "shiftjax/text/chat.py"

TEST_RULES = "tests/text/test_token_rules.py"
TEST_THINKING = "tests/text/test_thinking.py"
PROMPT_FIELDS = "tests/serving/http/test_prompt_fields.py"
TOKEN_IDS = "tests/serving/http/test_token_ids.py"
BUDGETS = "tests/serving/http/test_thinking_budget.py"
OUTPUT_FIELDS = "tests/serving/http/test_output_fields.py"
SCORES = "tests/embed/test_scores.py"
HTTP_SCORES = "tests/serving/http/test_scores_http.py"

ROWS = (
    Mutant(
        "a draft changes the state of a rule", "token rules", RULES,
        "masks, state = [self.mask], self._state\n        for token in tokens:\n"
        "            if not allows(masks[-1], token):\n                break\n"
        "            state = self._after(state, token)\n",
        "masks, state = [self.mask], self._state\n        for token in tokens:\n"
        "            if not allows(masks[-1], token):\n                break\n"
        "            state = self._state = self._after(state, token)\n",
        (TEST_RULES,), "with drafts banned words come, or others do not",
    ),
    Mutant(
        "words are banned at the beginning alone", "token rules", RULES,
        'for prefix in ("", " ")', 'for prefix in ("",)',
        (TEST_RULES,), "a banned word comes behind a space",
    ),
    Mutant(
        "only one of two constraints forbids", "token rules", RULES,
        "self.mask = first.mask & second.mask", "self.mask = first.mask",
        (TEST_RULES,), "a grammar lets banned words pass, or they let broken JSON pass",
    ),
    Mutant(
        "one token more is thought than the budget has", "token rules", THINKING,
        "if num_thought >= self._budget", "if num_thought > self._budget",
        (TEST_THINKING,), "budgets are overdrawn",
    ),
    Mutant(
        "a later mark begins thoughts", "token rules", THINKING,
        "if not self._again and not", "if self._again and not",
        (TEST_THINKING,), "an answer that quotes a mark is cut",
    ),
    Mutant(
        "GPT-OSS may think again behind its budget", "token rules", THINKING,
        'return self._turning if state.phase == "turning" else self._all', "return self._all",
        (TEST_THINKING,), "the budget of GPT-OSS ends one message, not its thoughts",
    ),
    Mutant(
        "all answers of a request have one state of a rule", "token rules", RULES,
        "made = [rules(index) for index in range(num)]",
        "made = [rules(0)] * num",
        (TEST_RULES, BUDGETS), "with n the thoughts of all answers count as one's",
    ),
    Mutant(
        "a prompt is cut at its end", "schema", PROMPTS,
        'return "left" if side == "right" else "right"', 'return "left"',
        (PROMPT_FIELDS,), "the question is cut off, the history stays",
    ),
    Mutant(
        "a message that is continued is closed", "schema", CHAT,
        "return _cut_at_open_end(prompt) if continue_final_message else prompt", "return prompt",
        (PROMPT_FIELDS,), "the model sees a mark, and begins a new message",
    ),
    Mutant(
        "every chunk repeats the prompt's ids", "schema", RESPONSES,
        "if is_first and self._returns_ids else {}", "if self._returns_ids else {}",
        (TOKEN_IDS,), "streams are as long as the prompt times their chunks",
    ),
    Mutant(
        "tokens without text are not told of in a stream", "schema", RESPONSES,
        "self._tells_tokens = self._returns_ids or has_logprobs",
        "self._tells_tokens = has_logprobs",
        (TOKEN_IDS,), "trainers miss tokens of streams",
    ),
    Mutant(
        "the token that stops is never part of the text", "schema", "shiftjax/outputs.py",
        "if is_stop and not self._has_stop:", "if is_stop:",
        (OUTPUT_FIELDS,), "include_stop_str_in_output loses stop ids",
    ),
    Mutant(
        "both texts of a pair have one type", "scores", "shiftjax/embed/step_device.py",
        "packed[3, r, start + text.second_from : stop] = 1",
        "packed[3, r, start + text.second_from : stop] = 0",
        (SCORES,), "BERT's cross-encoders read a pair as one text",
    ),
    Mutant(
        "a head has no tanh", "scores", "shiftjax/models/bert.py",
        "x = jnp.tanh(self._layer(first, self.dense, self.dense_bias))",
        "x = self._layer(first, self.dense, self.dense_bias)",
        (SCORES,), "scores are not the model's",
    ),
    Mutant(
        "a decoder is scored by its first token", "scores", "shiftjax/embed/step_device.py",
        'return scores_of_last(model, pool(hidden, positions, owners, slots, "last"))',
        'return scores_of_last(model, pool(hidden, positions, owners, slots, "cls"))',
        (SCORES,), "scores depend on nothing but the first word",
    ),
    Mutant(
        "numbers of a head are never activated", "scores", SCORING,
        "if wish.fields.use_activation is not False and wish.fields.activation is not False:",
        "if wish.fields.use_activation is True:",
        (HTTP_SCORES,), "thresholds of clients do not fit",
    ),
    Mutant(
        "anybody resets the caches", "schema", "serving/http/cache.py",
        "if not self._has_keys and self._service.options.host not in LOCAL:", "if False:",
        ("tests/serving/http/test_cache_reset.py",), "strangers slow down everybody",
    ),
)  # fmt: skip
