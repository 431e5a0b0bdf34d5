"""What 'package.module:NAME' stands for: code is named across process borders, never sent."""

from __future__ import annotations

import importlib

from equivtest.errors import Misuse


def load_named(name: str, what: str) -> object:
    """The object that `name`, 'package.module:NAME', stands for.

    Args:
        what: What is named, for the message.

    Raises:
        Misuse: there is no such module, it raises while it is imported, or there is no such name in it.
    """
    module_name, colon, attribute = name.partition(":")
    try:
        if not colon:
            raise ImportError("no ':' between module and name")
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise Misuse(f"{what} {name!r} cannot be imported: {error}; write package.module:NAME") from error
    except Exception as error:  # somebody's module may raise anything
        raise Misuse(f"{what} {name!r} cannot be imported: {type(error).__name__}: {error}; mend its module") from error
