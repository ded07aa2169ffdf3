"""Stands for vLLM in its own tests: what is taken from it skips the test that uses it."""
# pyright: reportMissingImports=false

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any

import pytest

__version__ = "0.29.0"
__path__: list[str] = []  # so that it has submodules, which `Finder` makes


class Stub:
    """A class of vLLM."""

    def __init__(self, *_: Any, **__: Any):
        pytest.skip("needs vLLM's engine")

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    @classmethod
    def model_validate(cls, *_: Any) -> None:
        """As of pydantic's models."""
        pytest.skip("needs vLLM's engine")


class Module(types.ModuleType):
    """A module of vLLM, which has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Stub,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of vLLM."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """A module that is ours, if the name is of vLLM."""
        is_vllm = name.startswith("vllm.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_vllm else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty module."""
        module = Module(spec.name)
        module.__path__ = []  # it has submodules, too
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Give it what tests need at import, or to write a request."""
        if module.__name__ == "vllm.tokenizers":
            vars(module)["get_tokenizer"] = tokenizer
        if module.__name__ == "vllm.platforms":
            names = ("is_rocm", "is_xpu", "is_cuda", "is_tpu")
            others = {name: lambda: False for name in names}
            vars(module)["current_platform"] = types.SimpleNamespace(is_cpu=lambda: True, **others)
        if module.__name__ == "vllm.version":
            vars(module)["__version__"] = __version__


def tokenizer(*_: Any, **__: Any) -> Any:
    """The tokenizer of the model that is served, by transformers."""
    from transformers import PreTrainedTokenizerFast

    file = os.environ["TOKENIZER"] + "/tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|im_end|>")


def __getattr__(name: str) -> Any:
    return type(name, (Stub,), {})


sys.meta_path.insert(0, Finder())
