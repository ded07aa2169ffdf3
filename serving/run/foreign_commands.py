"""Commands of vLLM under another name here, translated word by word. No JAX."""

from collections.abc import Sequence

_BATCH = {"-i": "input", "--input-file": "input", "-o": "output", "--output-file": "output"}


def translated_command(argv: Sequence[str]) -> list[str]:
    """The command line with `run-batch -i FILE -o FILE` as `batch FILE --output FILE`."""
    if list(argv[:1]) != ["run-batch"]:
        return list(argv)
    words, files, rest = list(argv[1:]), list[str](), list[str]()
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name not in _BATCH:
            rest.append(word)
            continue
        values = [value] if equals else words[:1]
        del words[: 0 if equals else 1]
        if _BATCH[name] == "input":
            files.extend(values)
        else:
            rest.extend(["--output", *values])
    return ["batch", *files, *rest]
