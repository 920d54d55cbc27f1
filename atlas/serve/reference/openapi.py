"""The OpenAPI document of the server, made from the table of endpoints and the structs that it names.

OpenAPI 3.1: schemas are JSON Schema 2020-12, which msgspec writes. Beyond it stand here what an answer always has,
which errors any endpoint may give, and how a request says who asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, get_origin

import msgspec
from msgspec import inspect

import atlas
from atlas.serve.access.auth import OPEN_PATHS
from atlas.serve.errors import AnthropicErrorResponse, ErrorResponse, speaks_anthropic
from atlas.serve.reference.endpoint import Endpoint, Text

Json = dict[str, Any]

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_GENERIC = re.compile(r"(\w+?)_(\w+)_")
_REFERENCE = "#/components/schemas/{name}"

_ERRORS = {
    400: "A field, a header or the body is wrong; `param` names it.",
    401: "No API key, or a wrong one.",
    403: "Host or Origin is not one that may ask.",
    404: "There is no such model, or no such object.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not declared as application/json.",
    429: "A rate limit, a cap or the queue is full; try again after `Retry-After` seconds.",
    431: "The request's head is too large.",
    500: "The server or the engine failed on this request.",
    501: "This model or server cannot do it; the message says why.",
    503: "Nothing answers requests now: loading, shutting down, or the engine died.",
    504: "`--request-timeout` has passed.",
}
_ANY = (400, 403, 431, 500)
_WITH_BODY = (404, 408, 413, 415, 429, 503, 504)

_TAGS = {
    "OpenAI": "OpenAI's API.",
    "Anthropic": "Anthropic's API.",
    "Tokens": "Between text and token ids.",
    "Server": "How the server is.",
}

_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "OpenAI's clients send this."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "Anthropic's clients send this."},
}

_HEADERS = {
    "x-request-id": ("The request's id, in logs and traces too; the client's own if it sent one.", "string"),
    "x-atlas-ignored-fields": ("Fields of the body that nothing reads, separated by commas.", "string"),
    "x-atlas-max-tokens": ("What max_tokens was cut to for each choice, where the context has no more room.", "string"),
    "Retry-After": ("Seconds after which another try makes sense.", "integer"),
}


def document(endpoints: Sequence[Endpoint], *, keyed: bool = False, strict: bool = False, model: str = "MODEL") -> Json:
    """The document as plain values.

    keyed: requests need an API key.  strict: fields that do not exist are refused.  model: its name in examples.
    """
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    answers = [shape for endpoint in endpoints for shape in _answers(endpoint)]
    schemas, components = _schemas(bodies, [*answers, ErrorResponse, AnthropicErrorResponse], strict)
    paths: Json = {}
    for endpoint in endpoints:
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schemas, keyed, model)
        if endpoint.refused:
            _add_refused(components[_name(schemas[endpoint.body])], endpoint.refused)
    for struct in dict.fromkeys(struct for endpoint in endpoints for struct in endpoint.untagged):
        component, tag = components[struct.__name__], struct.__struct_config__.tag_field
        component["required"].remove(tag)
        component["properties"][tag]["enum"].append(None)
    used = {endpoint.tag for endpoint in endpoints}
    result: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Atlas",
            "version": atlas.__version__,
            "description": "An LLM server with OpenAI's and Anthropic's APIs.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": tag, "description": text} for tag, text in _TAGS.items() if tag in used],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": _error_responses(schemas, keyed, "Anthropic" in used),
            "headers": {name: _header(*about) for name, about in _HEADERS.items()},
            **({"securitySchemes": _SECURITY} if keyed else {}),
        },
    }
    return result


def _answers(endpoint: Endpoint) -> Iterator[Any]:
    yield from (shape for shape in endpoint.answers.values() if shape is not None and not isinstance(shape, Text))
    if endpoint.stream is not None:
        yield endpoint.stream
    yield from (kind for kind, _ in endpoint.query.values())


def _operation(endpoint: Endpoint, schemas: Mapping[Any, Json], keyed: bool, model: str) -> Json:
    words = [word for word in re.split(r"\W+", _PARAMETER.sub(r"\1", endpoint.path)) if word]
    operation: Json = {
        "operationId": "_".join([endpoint.method.lower(), *words]),
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
    }
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
            "example": model if name == "model" else f"${name.upper()}",
        }
        for name in _PARAMETER.findall(endpoint.path)
    ]
    parameters += [
        {"name": name, "in": "query", "description": text, "schema": schemas[kind]}
        for name, (kind, text) in endpoint.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        named = {"model": model} if "model" in endpoint.body.__struct_fields__ else {}
        content = {"application/json": {"schema": schemas[endpoint.body], "example": {**named, **endpoint.example}}}
        operation["requestBody"] = {"required": True, "content": content}
    closed = keyed and endpoint.path not in OPEN_PATHS
    operation["responses"] = _responses(endpoint, schemas, closed)
    if closed:
        operation["security"] = [{name: []} for name in _SECURITY]
    return operation


def _responses(endpoint: Endpoint, schemas: Mapping[Any, Json], closed: bool) -> Json:
    statuses = {*_ANY, *endpoint.errors}
    statuses |= {*_WITH_BODY} if endpoint.body is not None else set()
    statuses |= {415} if endpoint.method == "POST" else set()
    statuses |= {401} if closed else set()
    kind = "Error" if _error_shape(endpoint) is ErrorResponse else "AnthropicError"
    responses: Json = {str(status): {"$ref": f"#/components/responses/{kind}{status}"} for status in statuses}
    for status, answer in endpoint.answers.items():
        names = ["x-request-id", *(["x-atlas-ignored-fields"] if endpoint.body is not None else [])]
        names += ["x-atlas-max-tokens"] if endpoint.stream is not None and endpoint.body is not None else []
        response: Json = {"description": HTTPStatus(status).phrase, "headers": _headers(names)}
        if isinstance(answer, Text):
            response["content"] = {answer.media_type: {"schema": {"type": "string"}}}
        elif answer is not None:
            response["content"] = {"application/json": {"schema": schemas[answer]}}
            if endpoint.stream is not None:
                response["description"] += "; with `stream`, server-sent events: the schema is of one"
                data = {"anyOf": [schemas[endpoint.stream], schemas[_error_shape(endpoint)]]}
                response["content"]["text/event-stream"] = {"schema": _event(data)}
        responses[str(status)] = response
    return dict(sorted(responses.items()))


def _event(data: Json) -> Json:
    """A server-sent event whose data is JSON of a schema; or the one that ends OpenAI's streams."""
    json = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    properties = {"event": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, json]}}
    return {"type": "object", "properties": properties, "required": ["data"]}


def _error_shape(endpoint: Endpoint) -> Any:
    return AnthropicErrorResponse if speaks_anthropic({"path": endpoint.path}) else ErrorResponse


def _error_responses(schemas: Mapping[Any, Json], keyed: bool, anthropic: bool) -> Json:
    result: Json = {}
    kinds = {"Error": ErrorResponse, **({"AnthropicError": AnthropicErrorResponse} if anthropic else {})}
    for kind, shape in kinds.items():
        for status, description in _ERRORS.items():
            names = ["x-request-id", *(["Retry-After"] if status in (429, 503) else [])]
            content = {"application/json": {"schema": schemas[shape]}}
            if keyed or status != 401:
                response = {"description": description, "headers": _headers(names), "content": content}
                result[f"{kind}{status}"] = response
    return result


def _header(text: str, kind: str) -> Json:
    return {"description": text, "schema": {"type": kind}}


def _headers(names: Iterable[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _name(reference: Json) -> str:
    return str(reference["$ref"]).rsplit("/", 1)[1]


# ---- schemas ---------------------------------------------------------------------------------------


def _schemas(bodies: Sequence[Any], answers: Sequence[Any], strict: bool) -> tuple[dict[Any, Json], Json]:
    """The schema of each type, and the components that they refer to."""
    read, written = _structs(bodies), _structs(answers)
    named = list(dict.fromkeys([*read, *written]))
    types = list(dict.fromkeys([*bodies, *answers]))
    found, components = msgspec.json.schema_components([*types, *named], ref_template=_REFERENCE)
    renamed = _short_names(components)
    components = {renamed[name]: _hoisted(component, renamed) for name, component in sorted(components.items())}
    schemas = [_hoisted(schema, renamed) for schema in found]
    for struct, reference in zip(named, schemas[len(types) :], strict=True):
        component = components[_name(reference)]
        if struct not in read:
            component["required"] = _always_there(struct)
            continue
        tag = struct.__struct_config__.tag_field
        if read[struct] and tag in component["required"]:
            component["required"].remove(tag)  # nothing else could be meant there, so msgspec takes it without, too
        if strict and struct not in written:
            component["additionalProperties"] = False
    return dict(zip(types, schemas, strict=False)), components


def _structs(types: Sequence[Any]) -> dict[Any, bool]:
    """The structs that types are made of, in order; and whether each is the only one at some place."""
    seen: dict[Any, bool] = {}

    def visit(kind: inspect.Type, alone: bool = True) -> None:
        match kind:
            case inspect.StructType():
                known = kind.cls in seen
                seen[kind.cls] = alone or seen.get(kind.cls, False)
                for field in () if known else kind.fields:
                    visit(field.type)
            case inspect.Metadata():
                visit(kind.type, alone)
            case inspect.UnionType():
                structs = sum(isinstance(one, inspect.StructType) for one in kind.types)
                for one in kind.types:
                    visit(one, structs < 2)
            case inspect.ListType() | inspect.VarTupleType():
                visit(kind.item_type)
            case inspect.DictType():
                visit(kind.value_type)

    for kind in types:
        visit(inspect.type_info(kind))
    return seen


def _always_there(struct: Any) -> list[str]:
    """The fields that an answer's object has whatever their values are."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    omits = (get_origin(struct) or struct).__struct_config__.omit_defaults
    tag = [info.tag_field] if info.tag_field is not None else []
    return tag + [
        field.encode_name
        for field in info.fields
        # What is neither required nor has a default is UNSET, unless somebody sets it.
        if field.required or not (omits or (field.default, field.default_factory) == (msgspec.NODEFAULT,) * 2)
    ]


def _short_names(components: Iterable[str]) -> dict[str, str]:
    """Names without modules, which msgspec writes before those that several structs have; generic ones as words."""
    short: dict[str, str] = {}
    for name in components:
        module, _, last = _GENERIC.sub(r"\1Of\2", name).rpartition(".")
        if ".anthropic." in module:
            last = f"Anthropic{last}"
        short[name] = name if last in short.values() else last
    return short


def _hoisted(schema: Any, renamed: Mapping[str, str]) -> Any:
    """A schema with references to the short names, and without the `allOf` of one that field descriptions use to say
    more than msgspec does: it takes the place of what it says better."""
    if isinstance(schema, list):
        return [_hoisted(item, renamed) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: _hoisted(value, renamed) for name, value in schema.items()}
    only = schema.get("allOf")
    if isinstance(only, list) and len(only) == 1 and "$ref" not in only[0]:
        del schema["allOf"]
        schema.update(only[0])
    if isinstance(schema.get("$ref"), str):
        schema["$ref"] = _REFERENCE.format(name=renamed[_name(schema)])
    return schema


def _add_refused(component: Json, refused: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in refused.items():
        description = "Not supported: only values that ask for nothing."
        component["properties"].setdefault(name, {"description": description, "enum": [None, *values]})
