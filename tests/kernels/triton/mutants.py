"""Mutants of kernels: copies of their modules in which one piece of text is another."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]


@contextmanager
def mutated(
    folder: Path, leaf: ModuleType, modules: Sequence[ModuleType], old: str, new: str
) -> Iterator[list[Counted]]:
    """While it lasts, *leaf* launches kernels in which *new* stands for *old*.

    *modules* hold the kernels and the device functions that they share. They are copied to
    *folder*, where they import each other, and *old* has to stand in exactly one place of them.
    Yields the kernels of the module that is different, to see whether they were launched.
    """
    names = {module.__name__: f"{folder.name}_{i}" for i, module in enumerate(modules)}
    texts = {name: Path(str(sys.modules[name].__file__)).read_text() for name in names}
    assert sum(text.count(old) for text in texts.values()) == 1, f"not in one place: {old}"
    for name, text in texts.items():
        for original, copy in names.items():
            text = text.replace(f"from {original} import", f"from {copy} import")
        (folder / f"{names[name]}.py").write_text(text.replace(old, new))
    changed = next(name for name, text in texts.items() if old in text)
    kernels: list[Counted] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name, copy in names.items():
            module = importlib.import_module(copy)
            for kernel in [one for one in vars(leaf) if one.endswith("_kernel")]:
                if getattr(leaf, kernel) is getattr(sys.modules[name], kernel, None):
                    counted = Counted(getattr(module, kernel))
                    patch.setattr(leaf, kernel, counted)
                    if uses(texts, name, changed):
                        kernels.append(counted)
        yield kernels


def uses(texts: dict[str, str], name: str, changed: str) -> bool:
    """Whether module *name* is *changed* or imports from it, itself or through another."""
    return name == changed or any(
        f"from {other} import" in texts[name] and uses(texts, other, changed) for other in texts
    )


class Launches:
    """Stands in a leaf's module for a kernel: counts launches, and may change their options."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel = kernel
        self.options = options
        self.count = 0

    def __getitem__(self, grid: Any) -> Any:
        def launch(*operands: Any, **given: Any) -> Any:
            self.count += 1
            return self.kernel[grid](*operands, **{**given, **self.options})

        return launch


class Workshop:
    """Replaces the kernel *name* that *leaf_module* launches."""

    def __init__(
        self, leaf_module: ModuleType, name: str, folder: Path, patch: pytest.MonkeyPatch
    ) -> None:
        self.leaf_module = leaf_module
        self.name = name
        self.folder = folder
        self.patch = patch
        self.kernel = getattr(leaf_module, name)

    def change(self, old: str, new: str) -> Launches:
        """The kernel with the text *old* of its module, which stands there once, made *new*."""
        source = Path(inspect.getfile(self.kernel.fn)).read_text(encoding="utf-8")
        assert source.count(old) == 1
        path = self.folder / f"mutant_of_{self.name}.py"
        path.write_text(source.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return self._put(Launches(getattr(module, self.name)))

    def launch_with(self, **options: Any) -> Launches:
        """The kernel itself, launched with other options."""
        return self._put(Launches(self.kernel, **options))

    def _put(self, launches: Launches) -> Launches:
        self.patch.setattr(self.leaf_module, self.name, launches)
        return launches
