"""The templates in a recipe: Jinja2, sandboxed, where a name that is not defined is an error and nothing is random.

The delimiters of comments are ones that no text has: `${#array[@]}` is shell, and `{#` would begin a comment in it.
"""

from __future__ import annotations

from collections.abc import Mapping

import jinja2
import jinja2.sandbox

from tools import exits

_NO_COMMENT = ("\0{#", "#}\0")


class RecipeError(exits.CommandError):
    """What is wrong with a recipe, and where in it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exits.USAGE)


class Renderer:
    """Templates over the variables of a recipe."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)
        start, end = _NO_COMMENT
        self._environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined,
            comment_start_string=start,
            comment_end_string=end,
            keep_trailing_newline=True,
            autoescape=False,
        )
        self._environment.globals.clear()  # `lipsum` is random, and the rest is for pages
        del self._environment.filters["random"]

    def render(self, text: str, where: str) -> str:
        """The text with its templates carried out. RecipeError names `where` it stands and what was expected."""
        try:
            rendered = self._environment.from_string(text).render(self._variables)
        except jinja2.UndefinedError as error:
            known = ", ".join(sorted(self._variables)) or "none"
            raise RecipeError(f"{where}: {error}; expected one of [variables]: {known}") from error
        except jinja2.TemplateSyntaxError as error:
            raise RecipeError(f"{where}: expected a Jinja2 template: line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise RecipeError(f"{where}: the template failed: {error}") from error
        if "\0" in text + rendered:
            raise RecipeError(f"{where}: expected text without NUL, received {rendered[:100]!r}")
        return rendered
