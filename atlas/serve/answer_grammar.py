"""The grammar of a chat answer: of its text, of calls that are forced, or of either."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from atlas.engine.grammar import WHITESPACE, mended
from atlas.engine.sampling import Grammar
from atlas.errors import RequestError
from atlas.parsers.grammar_rules import slashed
from atlas.parsers.grammars import tool_grammar
from atlas.serve.errors import ApiError, invalid
from atlas.serve.frontend import Frontend
from atlas.serve.grammars import Wanted, grammar_of, schema_of
from atlas.serve.openai.requests import ChatRequest

BLAME_SECONDS = 10.0
"""For finding the one of many tools whose schema is at fault: others wait for the processes that compile."""


async def answer_grammar(
    frontend: Frontend,
    request: ChatRequest,
    format_name: str | None,
    schemas: Mapping[str, Mapping[str, Any]],
    body_size: int,
    *,
    forced: bool,
    one: bool,
) -> Wanted | None:
    """Checked, and the field that it comes from; None: the answer may be any text.

    format_name, schemas: of the calls that may be made; None: none may.  body_size: bytes of the request.
    forced: the answer is calls and nothing else.  one: it is at most one call.

    Raises:
        ApiError: 400; the grammar is wrong or too large, with the path of the field.
    """
    checker, special = frontend.grammars, frontend.tokenizer.special_tokens
    wanted = await frontend.run(partial(grammar_of, request), body_size)
    text = None if wanted is None else await checker.check(wanted)
    functions = {tool.function.name: tool.function for tool in request.tools or []}
    strict = frozenset(name for name in schemas if functions[name].strict)
    if format_name is None or (text is None and not forced and not strict):
        return wanted
    # What the text must be says nothing of calls: with both, the model chooses by its first token.
    otherwise = _body(text, wanted.where) if wanted and text and not forced else ""
    write = partial(
        tool_grammar,
        format_name,
        special=special,
        one=one,
        strict=strict,
        free=not forced and not otherwise,
        otherwise=otherwise,
    )
    places = {name: f"tools[{place}].function.parameters" for place, name in enumerate(functions)}
    try:
        calls = await frontend.run(partial(write, schemas), body_size)
    except RequestError as error:
        raise invalid(places[error.where], error.found, error.accepted, code="invalid_grammar") from None
    try:
        made = Wanted(Grammar("lark", calls), "tools")
        await checker.check(made)
        return made
    except ApiError:
        enough = time.monotonic() + BLAME_SECONDS
        for name, schema in schemas.items():  # which of them is it?
            if time.monotonic() > enough:
                break
            alone = await frontend.run(partial(write, {name: schema}), body_size)
            try:
                await checker.check(Wanted(Grammar("lark", alone), places[name]))
            except ApiError:
                await checker.check(schema_of(dict(schema), places[name]))
                raise
        raise


def _body(grammar: Grammar, where: str) -> str:
    """The grammar as the body of a rule. Raises ApiError 400 for one that is a whole set of rules."""
    if grammar.syntax in ("json_object", "json_schema"):
        schema: dict[str, Any] = json.loads(grammar.text) if grammar.text else {"type": "object"}
        schema = mended(schema)
        guidance = {"whitespace_pattern": WHITESPACE, "lenient": False}
        return f"%json {json.dumps({**schema, 'x-guidance': guidance}, ensure_ascii=False)}"
    if grammar.syntax == "regex":
        return f"/{slashed(grammar.text)}/"
    if grammar.syntax == "choice":
        choices: Sequence[str] = json.loads(grammar.text)
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    found = f"a grammar ({grammar.syntax}) beside tools that may be called"
    accepted = 'a JSON schema, a regular expression or choices, or tool_choice "none"'
    raise invalid(where, found, accepted, code="conflicting_parameters")
