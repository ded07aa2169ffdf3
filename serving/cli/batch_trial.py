"""Whether a batch has a line that can be run, before anything is compiled for it. No JAX."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from serving.cli.batch_formats import Line
from serving.cli.batch_lines import check_fields, read_wish
from serving.run.start import chat_template
from serving.server.dialogue import Dialogue
from serving.server.errors import ServeError
from serving.server.options import ServerOptions, names_of
from serving.server.prompts import Prompts
from serving.server.service import TEXT_THREADS, check_server_limits
from serving.server.texts import Texts
from shiftjax.arch.contexts import longest_context
from shiftjax.config import EngineConfig
from shiftjax.core.limits import RequestLimits, validate_request
from shiftjax.core.request import Request, RequestError
from shiftjax.model_files import ModelFiles
from shiftjax.options import shown

NO_LIMIT = 1 << 40  # of a KV pool whose size is not known yet
MOST_REASONS = 3  # that are shown


class Failure(NamedTuple):
    """A line that cannot be run, and why."""

    line: Line
    error: ServeError


def failures_of_all(
    lines: Sequence[Line], files: ModelFiles, config: EngineConfig, server: ServerOptions
) -> list[Failure]:
    """Why each line cannot be run; [] where one can, as far as can be known without devices.

    Lines after the first that can be run are not looked at. Raises ConfigError and
    ChatTemplateError for a chat template that cannot be used.
    """
    return asyncio.run(_failures_of_all(lines, files, config, server))


def in_words(failures: Sequence[Failure]) -> list[str]:
    """Reasons with the number of lines they are of, the most frequent first."""
    numbers: dict[str, list[int]] = {}
    for line, error in failures:
        numbers.setdefault(line.problem or error.message, []).append(line.number)
    reasons = sorted(numbers.items(), key=lambda item: -len(item[1]))
    words = [_reason(message, of) for message, of in reasons[:MOST_REASONS]]
    rest = len(reasons) - MOST_REASONS
    return [*words, f"  and {rest:,} other reasons"] if rest > 0 else words


def _reason(message: str, numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 1:,} more" if len(numbers) > 1 else ""
    return f"  line {numbers[0]:,}{more}: {message}"


async def _failures_of_all(
    lines: Iterable[Line], files: ModelFiles, config: EngineConfig, server: ServerOptions
) -> list[Failure]:
    model, template = files.source.config, chat_template(files.tokenizer, server)
    longest = longest_context(model, config.model.max_model_len)
    limits = RequestLimits(model.vocab_size, longest, num_kv_tokens=NO_LIMIT)
    names = *names_of(server.served_model_name or config.model.model), *config.lora.modules
    failures: list[Failure] = []
    with ThreadPoolExecutor(TEXT_THREADS) as threads:
        texts = Texts(files.tokenizer, template, longest, threads)
        prompts = Prompts(texts, Dialogue(files.tokenizer, template, server))
        for line in lines:
            try:
                await _try(line, prompts, limits, names, server)
            except ServeError as error:
                failures.append(Failure(line, error))
            else:
                return []
    return failures


async def _try(
    line: Line,
    prompts: Prompts,
    limits: RequestLimits,
    names: Sequence[str],
    server: ServerOptions,
) -> None:
    """Refuse with `ServeError` what the service or the engine would refuse, in their order."""
    if line.problem is not None:
        raise ServeError("invalid", line.problem)
    check_fields(line, server.strict)
    wish = read_wish(line)
    if wish.fields.model is not None and wish.fields.model not in names:
        asked = shown(wish.fields.model)
        message = f"There is no model {asked}: it is called {', '.join(names)}."
        raise ServeError("not_found", message, param="model", code="model_not_found")
    check_server_limits(wish, server)
    for _, ids in await prompts.of(wish):
        try:
            validate_request(Request("trial", ids, wish.sampling, time.monotonic()), limits)
        except RequestError as error:
            raise ServeError("invalid", str(error), code=error.code, param=error.field) from None
