"""How much there is to read: counts of the code and of the documents, as a table.

    python scripts/count_house.py [--root DIR] [--json FILE] [--list]

Code lines leave out blanks, comments and docstrings. A folder's floors are the modules of its
longest chain of imports. The path of a request is the files that docs/house.md lists for it. A
sentence ends with a full stop, a question mark, an exclamation mark or its paragraph.
"""

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("shiftjax", "serving", "pallas_kernels", "scripts", "deploy", "examples")
BUDGET = 6  # parameters of a function
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
BLOCK = re.compile(r"(?s:```.*?```)|^(?: {4}|\t).*$|^\|.*$|^#.*$", re.MULTILINE)


def modules_of(root: Path) -> dict[str, Path]:
    """The shipped modules by dotted name, without what protoc writes."""
    paths = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    kept = (p for p in sorted(paths) if "_pb2" not in p.name and "__pycache__" not in p.parts)
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in kept}


def code_lines(text: str) -> int:
    """Lines with code: no blanks, no comments, no docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    held = (t for t in tokens if t.type not in NO_CODE and t.string)
    lines = {n for token in held for n in range(token.start[0], token.end[0] + 1)}
    return len(lines - set(_docstring_lines(ast.parse(text))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Lines of texts that are statements: a field's docstring stands behind it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            is_text = isinstance(node.value.value, str)
            yield from range(node.lineno, 1 + (node.end_lineno or node.lineno)) if is_text else ()


def folder_of(module: str) -> str:
    """Two levels of folders, one where there are no more."""
    parts = module.split(".")[:-1]
    return "/".join(parts[:2])


def imports_of(tree: ast.Module, modules: Iterable[str]) -> set[str]:
    """The shipped modules that a module imports, in functions too."""
    known, found = set(modules), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & known


def floors(graph: Mapping[str, set[str]]) -> int:
    """Modules of the longest chain of imports in a folder, which has no circle."""
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = 1 + max((height(below) for below in graph[name]), default=0)
        return heights[name]

    return max(map(height, graph), default=0)


def parameters(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """(name, line, number of parameters beside self and cls) of each function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            own = sum(each.arg not in ("self", "cls") for each in given)
            yield node.name, node.lineno, own


def long_signatures(root: Path) -> Iterator[str]:
    """Each function with more parameters than the budget, as a line."""
    for path in modules_of(root).values():
        for name, line, number in parameters(ast.parse(path.read_text(encoding="utf-8"))):
            if number > BUDGET:
                yield f"{number:3}  {path.relative_to(root)}:{line} {name}"


def holds_config(tree: ast.Module) -> bool:
    """Whether a parameter or a field is an `EngineConfig`."""
    hints = (getattr(node, "annotation", None) for node in ast.walk(tree))
    return any(isinstance(hint, ast.expr) and "EngineConfig" in ast.unparse(hint) for hint in hints)


def path_of_a_request(root: Path) -> list[Path]:
    """The modules that the line about requests of docs/house.md names."""
    house = (root / "docs/house.md").read_text(encoding="utf-8")
    line = house.split("- **Request**", 1)[1].split("\n- **", 1)[0]
    names = dict.fromkeys(re.findall(r"`([a-z_/]+)(?:\.py)?`", line))
    found = (
        path
        for name in names
        for path in modules_of(root).values()
        if str(path.with_suffix("")).endswith("/" + name) and "/" in name
    )
    return list(found)


def sentences(text: str) -> Iterator[int]:
    """Words of each sentence: no tables, headings and commands."""
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] ", BLOCK.sub("\n\n", text)):
        for sentence in re.split(r"(?<=[.?!])\s+", paragraph.strip()):
            if words := sentence.split():
                yield len(words)


def percentile(values: Iterable[int], share: float) -> int:
    """The value that this share of all does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def count(root: Path) -> dict[str, Any]:
    """Every count, by what it is of."""
    modules = modules_of(root)
    texts = {name: path.read_text(encoding="utf-8") for name, path in modules.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines: Counter[str] = Counter()
    inside: dict[str, list[str]] = defaultdict(list)
    for name, text in texts.items():
        lines[folder_of(name)] += code_lines(text)
        if not name.endswith("__init__"):
            inside[".".join(name.split(".")[:-1])].append(name)
    flat = {folder: names for folder, names in inside.items() if folder.startswith("shiftjax.")}
    largest = max(flat, key=lambda folder: len(flat[folder]))
    graph = {name: imports_of(trees[name], flat[largest]) for name in flat[largest]}
    shared = Counter(path.name for path in modules.values() if path.name != "__init__.py")
    path, engine = path_of_a_request(root), _engine(texts)
    documents = [p.read_text(encoding="utf-8") for p in (root / "README.md", *_docs(root))]
    lengths = [n for text in documents for n in sentences(text)]
    return {
        **{f"code lines of {folder}": n for folder, n in sorted(lines.items())},
        "code lines in all": sum(lines.values()),
        f"modules of {largest}, the largest folder of the engine": len(flat[largest]),
        "its floors": floors(graph),
        "imports among them": sum(map(len, graph.values())),
        "modules that build.py imports": len(imports_of(trees["shiftjax.build"], modules)),
        "`is None` and `is not None` of the engine's loop": len(_NONE.findall(engine)),
        "files of the path of a request": len(path),
        "their lines": sum(len(p.read_text(encoding="utf-8").splitlines()) for p in path),
        "file names that occur more than once": sum(n > 1 for n in shared.values()),
        f"functions with more than {BUDGET} parameters": sum(
            n > BUDGET for tree in trees.values() for _, _, n in parameters(tree)
        ),
        "files with a parameter or field of type EngineConfig": sum(
            map(holds_config, trees.values())
        ),
        "words of the documents": sum(len(text.split()) for text in documents),
        "words of a sentence, p50": percentile(lengths, 0.5),
        "words of a sentence, p95": percentile(lengths, 0.95),
    }


_NONE = re.compile(r"\bis (?:not )?None\b")


def _engine(texts: Mapping[str, str]) -> str:
    """The module of the loop, in whatever folder."""
    (name,) = (name for name in texts if re.fullmatch(r"shiftjax\.(core|control)\.engine", name))
    return texts[name]


def _docs(root: Path) -> list[Path]:
    return sorted((root / "docs").rglob("*.md"))


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write them there, too")
    text = f"the functions with more than {BUDGET} parameters, instead"
    parser.add_argument("--list", action="store_true", help=text)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(long_signatures(arguments.root)))
        return
    counts = count(arguments.root)
    width = max(map(len, counts))
    for name, value in counts.items():
        print(f"{name:{width}}  {value:>7,}")
    if arguments.json:
        arguments.json.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
