"""Notes what launches would compile, instead of running them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from triton.compiler import compiler

from fa_verify.ttir.launch.autotune import pinned
from fa_verify.ttir.launch.driver import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A specialisation of a kernel, as Triton's compiler was asked for it.

    Attributes:
        source: Triton's ASTSource: function, signature, constants, attributes.
        options: Compiler options other than the defaults; a target's own are left to the target.
        config: Text of the autotune configuration, "" where there is none.
    """

    source: Any
    options: dict[str, Any]
    config: str

    @property
    def name(self) -> str:
        """Of the function."""
        return str(self.source.fn.__name__)

    @property
    def location(self) -> tuple[str, int]:
        """File and line of the function."""
        code = self.source.fn.fn.__code__
        return code.co_filename, code.co_firstlineno

    @property
    def constants(self) -> dict[str, Any]:
        """Values of constexpr parameters and of arguments that Triton made constants, by name."""
        names = self.source.fn.arg_names
        return {
            ".".join((names[path[0]], *map(str, path[1:]))): value
            for path, value in self.source.constants.items()
        }

    @property
    def arguments(self) -> dict[str, str]:
        """Types of the arguments at run time by name; "/16" where they are divisible by that."""
        names = self.source.fn.arg_names
        divisible = {
            names[path[0]]
            for path, attributes in self.source.attrs.items()
            if any(name == "tt.divisibility" for name, _ in attributes)
        }
        return {
            name: f"{type_}{'/16' if name in divisible else ''}"
            for name, type_ in self.source.signature.items()
            if type_ != "constexpr"
        }


@contextmanager
def captured(index: int, configs: dict[str, int], *, run: bool = False) -> Iterator[list[Captured]]:
    """Note each launch; inside `execute`, which it may keep from running anything.

    Args:
        index: Which autotune configuration is pinned.
        configs: Function name to the number offered; filled as functions run.
        run: Launches run as well: some launchers look at what a kernel wrote before they go on.

    Yields:
        One entry a launch.
    """
    found: list[Captured] = []
    chosen: dict[str, str] = {}
    launch = Launcher.__call__

    def note(self: Launcher, *args: Any) -> None:
        found.append(
            Captured(
                source=self.src,
                options=_asked(self.metadata),
                config=chosen.get(self.src.fn.__name__, ""),
            )
        )
        if run:
            launch(self, *args)

    with (
        patch.object(Launcher, "__call__", note),
        pinned(index, configs, chosen),
    ):
        yield found


def _asked(metadata: Any) -> dict[str, Any]:
    """The options of a compiled kernel that are not what its backend takes by default."""
    given = metadata._asdict()
    default = compiler.make_backend(metadata.target).parse_options({})
    plain = json.loads(json.dumps(default.__dict__, default=vars))  # as metadata went through JSON
    return {
        name: _hashable(given[name])
        for name, value in plain.items()
        if name in given and given[name] != value
    }


def _hashable(value: Any) -> Any:
    """A list as the tuple that it was before JSON."""
    return tuple(_hashable(x) for x in value) if isinstance(value, list) else value
