"""A Jinja2 environment in which a template from a model repository can neither reach out nor run away.

Jinja2's own sandbox stops access to Python's internals; it does not bound time or memory. Here every loop
iteration, call, attribute access and printed value checks one `Budget`, and every operation that can make
something large out of something small is measured before it runs. To hold everywhere the checks are put
into the parsed template, not around it: a loop without output never returns to the caller.
"""

from __future__ import annotations

import re
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import do_indent
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_PIECE = 32 << 20
MAX_TOTAL = 1 << 30
MAX_SEQUENCE = 1 << 20
MAX_RANGE = 100_000
MAX_WIDTH = 9_999
MAX_INTEGER_BITS = 4_096

_ALLOWED_FILTERS = """
    abs capitalize count d default dictsort e escape first float format groupby indent int items join
    last length list lower map max min reject rejectattr replace reverse round safe select selectattr
    sort string sum title trim unique upper wordcount
"""
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_LARGE_WIDTH = re.compile(r"\d{5,}|\*")


class TemplateLimitError(SecurityError):
    """The template used more time or memory than it may."""


class Budget:
    """What is left of one rendering's time and of the characters it may handle in total."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._left = MAX_TOTAL
        self._output = 0

    def check(self) -> None:
        """Raise if the time is over."""
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"the template ran for more than {self._seconds:g} s")

    def output(self, size: int) -> None:
        """Account for `size` characters of the result."""
        self.check()
        self._output += size
        if self._output > MAX_PIECE:
            raise TemplateLimitError(f"the prompt is longer than {MAX_PIECE} characters")

    def spend(self, size: int) -> None:
        """Account for `size` characters (or list items) about to be made."""
        self.check()
        self._left -= size
        if size > MAX_PIECE or self._left < 0:
            raise TemplateLimitError("the template makes too much text")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment. Compile and render inside `limits(seconds)`; outside of it nothing is counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        self._local = threading.local()
        # Constants are not folded: that would run the template's filters before any budget counts.
        super().__init__(finalize=self._finalize, optimized=False, **options)
        self.filters = {name: self.filters[name] for name in _ALLOWED_FILTERS.split()}
        self.filters |= {
            "replace": self._replace,
            "join": self._join,
            "indent": self._indent,
            "list": self._list,
            "_ticking": self._ticking,
            "_concat": self._concat,
        }
        self.filters["format"] = self._format
        self.globals.pop("lipsum", None)
        self.globals["range"] = self._range

    @contextmanager
    def limits(self, seconds: float) -> Iterator[Budget]:
        """Count what this thread does inside the block."""
        budget = Budget(seconds)
        self._local.budget = budget
        try:
            yield budget
        finally:
            self._local.budget = None

    def _check(self) -> None:
        budget: Budget | None = getattr(self._local, "budget", None)
        if budget is not None:
            budget.check()

    def _spend(self, size: int) -> None:
        budget: Budget | None = getattr(self._local, "budget", None)
        if budget is not None:
            budget.spend(size)

    # ---- where the template passes through -------------------------------------------------------

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        # What one pass of a loop or macro prints as constants is at most the template's own length.
        self._cost = len(source)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_ticking", [], [], None, None, lineno=loop.lineno)
        _replace_concats(template)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._check()
        if isinstance(__obj, Macro):
            __self._spend(__self._cost)
        __self._check_method(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+":
                self._spend(_size(left) + _size(right))
            case "*":
                self._check_product(left, right)
            case "**":
                if not (isinstance(left, int | float) and isinstance(right, int | float)):
                    raise TemplateLimitError("** takes numbers")
                if isinstance(left, int) and isinstance(right, int):
                    _check_bits(left.bit_length() * max(right, 0))
            case "%" if isinstance(left, str):
                return self._format(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            template = value.__self__
            for _, _, spec, _ in string.Formatter().parse(template):
                if spec and ("{" in spec or _LARGE_WIDTH.search(spec)):
                    raise TemplateLimitError(f"format width {spec!r}")
            fields = template.count("{")
            self._spend(len(template) + fields * (MAX_WIDTH + _size(args) + _size(kwargs)))
            return wrapped(*args, **kwargs)

        return checked

    # ---- what can make much out of little ---------------------------------------------------------

    def _check_method(self, obj: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if not isinstance(owner, str | bytes):
            return
        if name in _PADDING_METHODS:
            width = args[0] if args else kwargs.get("tabsize", 8)
            if not isinstance(width, int) or width > MAX_WIDTH:
                raise TemplateLimitError(f"str.{name} with a width above {MAX_WIDTH}")
            self._spend(len(owner) * (width if name == "expandtabs" else 1) + width)
        elif name == "replace" and len(args) >= 2 and isinstance(owner, str):
            self._spend_replace(owner, args[0], args[1])
        elif name == "join" and args:
            if not isinstance(args[0], str | list | tuple | dict):
                raise TemplateLimitError("str.join of something that is not a list")
            self._spend(_size(args[0]) + len(owner) * len(args[0]))
        elif name in {"translate", "format_map", "encode"}:
            raise TemplateLimitError(f"str.{name} is not available in a chat template")
        else:
            self._spend(len(owner))

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
                self._spend(max(len(sequence), _size(sequence)) * max(count, 0))

    def _spend_replace(self, text: str, old: Any, new: Any) -> None:
        count = text.count(old) if isinstance(old, str) else 0
        self._spend(len(text) + count * len(str(new)))

    def _finalize(self, value: Any) -> Any:
        if isinstance(value, str):
            self._spend(len(value))
            return value
        text = str(value)  # what the template engine would do next, so that it is done once
        self._spend(len(text))
        return text

    def _ticking(self, items: Iterable[Any]) -> Iterable[Any]:
        return _Ticking(items, lambda: self._spend(self._cost))

    def _concat(self, parts: list[Any]) -> str:
        texts = [str(part) for part in parts]
        self._spend(sum(map(len, texts)))
        return "".join(texts)

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        if len(numbers) > MAX_RANGE:
            raise TemplateLimitError(f"range of more than {MAX_RANGE} numbers")
        return numbers

    def _replace(self, text: Any, old: str, new: str, count: int | None = None) -> str:
        self._spend_replace(str(text), old, new)
        return str(text).replace(old, new, -1 if count is None else count)

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        items = self._list(value)
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        self._spend(_size(items) + len(d) * len(items))
        return d.join(map(str, items))

    def _indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        size = len(width) if isinstance(width, str) else width
        self._spend(len(text) + (text.count("\n") + 1) * size)
        return do_indent(text, width, first, blank)

    def _list(self, value: Iterable[Any]) -> list[Any]:
        items = []
        for count, item in enumerate(value):
            if count >= MAX_SEQUENCE:
                raise TemplateLimitError(f"a list of more than {MAX_SEQUENCE} items")
            items.append(item)
        self._spend(len(items))
        return items

    def _format(self, template: str, *args: Any) -> str:
        if _LARGE_WIDTH.search(template):
            raise TemplateLimitError("% formatting with a large or variable width")
        self._spend(len(template) + template.count("%") * (MAX_WIDTH + _size(args)))
        values = args[0] if len(args) == 1 and isinstance(args[0], tuple | dict) else args
        return template % values


class _Ticking:
    """An iterable that checks the budget at each step, and keeps its length for `loop.length`."""

    def __init__(self, items: Iterable[Any], tick: Callable[[], None]) -> None:
        self._items, self._tick = items, tick

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._tick()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # a TypeError is the right answer for a generator


def _size(value: Any) -> int:
    """Characters that printing `value` takes, roughly and without printing it."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(_size(key) + _size(item) for key, item in value.items()) + len(value)
    if isinstance(value, list | tuple):
        return sum(map(_size, value)) + len(value)
    return 32


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"a number of more than {MAX_INTEGER_BITS} bits")


def _replace_concats(node: nodes.Node) -> None:
    """`a ~ b` becomes a call that is counted; Jinja2 offers no hook for this operator."""
    for field, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, field, [_without_concat(item) for item in value])
        else:
            setattr(node, field, _without_concat(value))


def _without_concat(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concats(value)
    if isinstance(value, nodes.Concat):
        parts = nodes.List(value.nodes, lineno=value.lineno)
        return nodes.Filter(parts, "_concat", [], [], None, None, lineno=value.lineno)
    return value
