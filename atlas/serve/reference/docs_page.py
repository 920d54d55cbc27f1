"""GET /docs: the OpenAPI document as one page of HTML, complete in itself: no script, nothing loaded from elsewhere."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from atlas.serve.reference.tables import fields, say

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
"""A page that can do nothing but be read, whatever names a model or a client put into it."""

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ info.title }} {{ info.version }}: API</title>
<style>
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre, summary b { font-family: ui-monospace, monospace; font-size: 0.9em; }
pre { overflow: auto; background: var(--soft); padding: 0.75rem; border-radius: 4px; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 1rem; }
td { vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid var(--line); }
details { border: 1px solid var(--line); border-radius: 4px; margin: 0.5rem 0; padding: 0.5rem 0.75rem; }
summary { cursor: pointer; }
h4 { margin: 1rem 0 0.25rem; }
.method { display: inline-block; min-width: 4rem; }
</style>
</head>
<body>
<h1>{{ info.title }} {{ info.version }}</h1>
<p>{{ info.description }} The same for programs: <a href="openapi.json">openapi.json</a>.</p>
{% if keyed %}
<p>Requests need an API key: <code>Authorization: Bearer KEY</code> or <code>x-api-key: KEY</code>.</p>
{% endif %}
{% for tag in tags %}
<h2>{{ tag.name }}</h2>
<p>{{ tag.description }}</p>
{% for operation in operations if operation.tag == tag.name %}
<details id="{{ operation.id }}">
<summary><b class="method">{{ operation.method }}</b> <b>{{ operation.path }}</b> {{ operation.summary }}</summary>
<h4>Example</h4>
<pre>{{ operation.example }}</pre>
{% if operation.parameters %}
<h4>Parameters</h4>
<table>{% for one in operation.parameters %}
<tr><td><code>{{ one.name }}</code></td><td>in the {{ one.in }}</td><td>{{ one.type }}</td>\
<td>{{ one.description }}</td></tr>
{% endfor %}</table>
{% endif %}
{% if operation.body %}
<h4>Body</h4>
<p>{{ operation.body | linked }}</p>
{% endif %}
<h4>Answers</h4>
<table>{% for answer in operation.answers %}
<tr><td>{{ answer.status }}</td><td>{{ answer.description }}</td><td>{% for media, name in answer.content %}\
<code>{{ media }}</code> {{ name | linked }}<br>{% endfor %}</td></tr>
{% endfor %}</table>
</details>
{% endfor %}
{% endfor %}
<h2>Objects</h2>
{% for object in objects %}
<details id="{{ object.name }}">
<summary><b>{{ object.name }}</b> {{ object.description }}</summary>
<table>
{% for field in object.fields %}
<tr><td><code>{{ field.name }}</code>{% if field.required %}<br>required{% endif %}</td>\
<td>{{ field.type | linked }}</td><td>{{ field.description }}</td></tr>
{% endfor %}</table>
</details>
{% endfor %}
</body>
</html>
"""


def page(document: dict[str, Any], url: str) -> str:
    """The page of an OpenAPI document. url: of the server, for commands."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    components = document["components"]["schemas"]

    def linked(text: str) -> Markup:
        """Names of objects as links to them."""
        words = [
            Markup('<a href="#{0}">{0}</a>').format(word) if word in components else escape(word)
            for word in re.split(r"(\w+)", text)
        ]
        return Markup("").join(words)

    environment.filters["linked"] = linked
    operations = [
        _operation(path, method, operation, document["components"]["responses"], url)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    objects = [
        {"name": name, "description": component.get("description", ""), "fields": fields(components, name)}
        for name, component in components.items()
    ]
    return environment.from_string(_PAGE).render(
        info=document["info"],
        tags=document["tags"],
        keyed="securitySchemes" in document["components"],
        operations=operations,
        objects=objects,
    )


def _operation(path: str, method: str, operation: dict[str, Any], errors: dict[str, Any], url: str) -> dict[str, Any]:
    body = operation.get("requestBody")
    schema = body["content"]["application/json"]["schema"] if body else None
    return {
        "id": operation["operationId"],
        "path": path,
        "method": method.upper(),
        "tag": operation["tags"][0],
        "summary": operation["summary"],
        "example": _command(url + path, method, operation),
        "parameters": [
            {**one, "type": say(one["schema"]), "description": one.get("description", "")}
            for one in operation.get("parameters", ())
        ],
        "body": say(schema) if schema else None,
        "answers": [
            {
                "status": status,
                "description": answer["description"],
                "content": [
                    (media, _content(content["schema"])) for media, content in answer.get("content", {}).items()
                ],
            }
            for status, response in operation["responses"].items()
            for answer in [errors[response["$ref"].rsplit("/", 1)[1]] if "$ref" in response else response]
        ],
    }


def _command(url: str, method: str, operation: dict[str, Any]) -> str:
    """The example as a line for a shell."""
    for one in operation.get("parameters", ()):
        if one["in"] == "path":
            url = url.replace("{" + one["name"] + "}", quote(one["example"], safe="/$"))
    words = ["curl"]
    if method != "get" and "requestBody" not in operation:
        words += ["-X", method.upper()]
    words.append(url)
    if "security" in operation:
        words += ["-H", '"Authorization: Bearer $ATLAS_API_KEY"']
    if body := operation.get("requestBody"):
        example = json.dumps(body["content"]["application/json"]["example"], ensure_ascii=False)
        words += ["-H", "'Content-Type: application/json'", "-d", shlex.quote(example)]
    return " ".join(words)


def _content(schema: dict[str, Any]) -> str:
    if schema == {"type": "string"}:
        return ""
    if event := schema.get("properties", {}).get("data"):
        return " or ".join(say(part.get("contentSchema", part)) for part in event["anyOf"])
    return say(schema)
