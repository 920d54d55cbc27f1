"""Outputs in each family's format, whole and damaged, and what a client must get of them."""

from __future__ import annotations

from tests.parsers.parsing import Case

WEATHER = ("get_weather", '{"city": "Paris"}')
TYPED = ("get_weather", '{"city": "Paris", "days": 3}')
# What a file holds must not end the call it stands in: quotes, braces, tags, escapes, characters of several bytes.
FILE = 'if (a) {\n  print("é😀\\n");  // </b> }]\n}'
FILE_JSON = r'"if (a) {\n  print(\"é😀\\n\");  // </b> }]\n}"'
WRITTEN = ("write_file", '{"path": "a.c", "content": ' + FILE_JSON + "}")

HERMES = [
    Case(
        "one",
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        calls=(WEATHER,),
    ),
    Case(
        "text around two",
        "hermes",
        'Let me look 😀é漢.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"ä": 1}}\n</tool_call>\nDone.',
        content="Let me look 😀é漢.\n\n\n\nDone.",
        calls=(WEATHER, ("f", '{"ä": 1}')),
    ),
    Case(
        "hard string",
        "hermes",
        '<tool_call>{"name": "write_file", "arguments": {"path": "a.c", "content": ' + FILE_JSON + "}}</tool_call>",
        calls=(WRITTEN,),
    ),
    Case(
        "the marker in a string",
        "hermes",
        '<tool_call>{"name": "write_file", "arguments": {"content": "</tool_call><tool_call>{\\"name\\""}}</tool_call>',
        calls=(("write_file", '{"content": "</tool_call><tool_call>{\\"name\\""}'),),
    ),
    Case(
        "nested, escapes, numbers as written",
        "hermes",
        '<tool_call>{"name":"f","arguments":{"map":{"a":[1,{"b":"}"}]},"x":1.50e+3,"y":"\\u00e9\\ud83d\\ude00"}}</tool_call>',
        calls=(("f", '{"map":{"a":[1,{"b":"}"}]},"x":1.50e+3,"y":"\\u00e9\\ud83d\\ude00"}'),),
    ),
    Case(
        "arguments first",
        "hermes",
        '<tool_call>{"arguments": {"ä": 1}, "name": "f"}</tool_call>',
        calls=(("f", '{"ä": 1}'),),
    ),
    Case("no arguments", "hermes", '<tool_call>{"name": "now"}</tool_call>', calls=(("now", "{}"),)),
    Case(
        "empty arguments", "hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', calls=(("now", "{}"),)
    ),
    Case(
        "encoded twice",
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"ä\\": 1}"}</tool_call>',
        calls=(("f", '{"ä": 1}'),),
    ),
    Case(
        "raw line break in a string",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        calls=(("f", '{"a": "x\\ny"}'),),
    ),
    Case(
        "backslashes before raw line breaks in a string",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "ls \\\n-l", "b": "\\\\\n\\\\"}}</tool_call>',
        calls=(("f", r'{"a": "ls \\\n-l", "b": "\\\n\\"}'),),
    ),
    Case(
        "a brace too few",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"ä": 1}\n</tool_call>',
        calls=(("f", '{"ä": 1}'),),
    ),
    Case("no closing tag", "hermes", '<tool_call>{"name": "f", "arguments": {"ä": 1}}', calls=(("f", '{"ä": 1}'),)),
    Case(
        "cut in a string",
        "hermes",
        '<tool_call>{"name": "write_file", "arguments": {"path": "a.c", "content": "abc',
        calls=(("write_file", '{"path": "a.c"'),),
        cut=True,
        rest=' "content": "abc',
    ),
    Case("cut before the first", "hermes", '<tool_call>{"name": "f", "arguments": {', calls=(("f", "{"),), cut=True),
    Case(
        "broken arguments, then text",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1, b: 2, "c": 3}}</tool_call> so.',
        content=" so.",
        calls=(("f", '{"a": 1'),),
        cut=True,
        rest=' b: 2, "c": 3}}',
    ),
    Case(
        "prose",
        "hermes",
        'The <tool_call> tag, or <tool_call>{x} or {"name": 1}.',
        content='The <tool_call> tag, or <tool_call>{x} or {"name": 1}.',
    ),
    Case("no name", "hermes", '<tool_call>{"name": ', content='<tool_call>{"name": '),
    Case(
        "not a call", "hermes", '<tool_call>{"title": "x"}</tool_call>', content='<tool_call>{"title": "x"}</tool_call>'
    ),
    Case(
        "NaN",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        calls=(("f", "{"),),
        cut=True,
        rest='"a": NaN}}',
    ),
]

QWEN = [
    Case(
        "types by the schema",
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        calls=(TYPED,),
    ),
    Case(
        "hard string",
        "qwen3_coder",
        f"ok\n<tool_call>\n<function=write_file>\n<parameter=path>\na.c\n</parameter>\n<parameter=content>\n{FILE}\n"
        "</parameter>\n</function>\n</tool_call>",
        content="ok",
        calls=(WRITTEN,),
    ),
    Case(
        "line breaks of the value stay",
        "qwen3_coder",
        "<tool_call><function=write_file><parameter=content>\n\n  x\n\n</parameter></function></tool_call>",
        calls=(("write_file", '{"content": "\\n  x\\n"}'),),
    ),
    Case(
        "no outer tag",
        "qwen3_coder",
        "Now:\n<function=now>\n</function>\n</tool_call>",
        content="Now:",
        calls=(("now", "{}"),),
    ),
    Case("no outer tag, no such tool", "qwen3_coder", "<function=foo>", content="<function=foo>"),
    Case(
        "prose",
        "qwen3_coder",
        "Use <tool_call> and <function=f, or a < b.",
        content="Use <tool_call> and <function=f, or a < b.",
    ),
    Case(
        "inner tag missing",
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></tool_call>",
        calls=(WEATHER,),
    ),
    Case(
        "parameter without end",
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter><parameter=days>3\n</function></tool_call>\n"
        "<tool_call><function=now></function></tool_call>",
        calls=(("get_weather", '{"city": "Paris"'), ("now", "{}")),
    ),
    Case(
        "cut",
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter><parameter=days>3user: hi",
        calls=(("get_weather", '{"city": "Paris"'),),
        cut=True,
        rest="<parameter=days>3user: hi",
    ),
    Case(
        "values that are not of their type",
        "qwen3_coder",
        "<tool_call><function=f><parameter=ä>007</parameter><parameter=list>[1, 'a']</parameter>"
        '<parameter=map>{"a": [true]}</parameter><parameter=other>5</parameter></function></tool_call>',
        calls=(("f", '{"ä": "007", "list": "[1, \'a\']", "map": {"a": [true]}, "other": "5"}'),),
    ),
]

LLAMA = [
    Case("one", "llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=(WEATHER,)),
    Case(
        "two",
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "f", "parameters": {"ä": 1}}',
        calls=(WEATHER, ("f", '{"ä": 1}')),
    ),
    Case(
        "python tag",
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        calls=(("now", "{}"),),
    ),
    Case(
        "function as name",
        "llama3_json",
        '\n{"type": "function", "function": "f", "parameters": {"ä": 1}}',
        calls=(("f", '{"ä": 1}'),),
    ),
    Case(
        "an answer in JSON",
        "llama3_json",
        '{"name": "Ada", "parameters": {"city": "Paris"}}',
        content='{"name": "Ada", "parameters": {"city": "Paris"}}',
    ),
    Case("a list of people", "llama3_json", '\n{"people": [1]}', content='\n{"people": [1]}'),
    Case("no arguments", "llama3_json", '{"name": "now"}', content='{"name": "now"}'),
    Case(
        "after prose",
        "llama3_json",
        'Call {"name": "f", "parameters": {}}',
        content='Call {"name": "f", "parameters": {}}',
    ),
    Case(
        "a built-in tool",
        "llama3_json",
        '<|python_tag|>brave_search.call(query="x")',
        content='<|python_tag|>brave_search.call(query="x")',
    ),
    Case(
        "text after",
        "llama3_json",
        '{"name": "f", "parameters": {"ä": 1}} Done.',
        content=" Done.",
        calls=(("f", '{"ä": 1}'),),
    ),
    Case(
        "cut",
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1, "b": [2,',
        calls=(("f", '{"a": 1'),),
        cut=True,
        rest=' "b": [2,',
    ),
]

MISTRAL = [
    Case(
        "list",
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "f", "arguments": {"ä": 1}, "id": "abcdefghi"}]',
        calls=(WEATHER, ("f", '{"ä": 1}')),
    ),
    Case(
        "named",
        "mistral",
        'Hm.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        content="Hm.",
        calls=(WEATHER, ("now", "{}")),
    ),
    Case(
        "ids",
        "mistral",
        "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]now[CALL_ID]short[ARGS]{}",
        calls=(("now", "{}"), ("now", "{}")),
        ids=("a1B2c3D4e", "id0"),
    ),
    Case("args marker not shown", "mistral", '[TOOL_CALLS]f{"ä": 1}', calls=(("f", '{"ä": 1}'),)),
    Case(
        "brackets in strings",
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": "]}[TOOL_CALLS]"}}]',
        calls=(("f", '{"x": "]}[TOOL_CALLS]"}'),),
    ),
    Case(
        "prose",
        "mistral",
        "The [TOOL_CALLS] token, as in [TOOL_CALLS] [1] {x}",
        content="The [TOOL_CALLS] token, as in [TOOL_CALLS] [1] {x}",
    ),
    Case("cut", "mistral", '[TOOL_CALLS]f[ARGS]{"a": "\\', calls=(("f", "{"),), cut=True, rest='"a": "\\'),
]

INVOKES = [
    Case(
        "two in one block",
        "minimax",
        'I will.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        content="I will.",
        calls=(TYPED, ("now", "{}")),
    ),
    Case(
        "hard string",
        "minimax",
        f'<minimax:tool_call><invoke name="write_file"><parameter name="path">a.c</parameter>'
        f'<parameter name="content">{FILE}</parameter></invoke></minimax:tool_call>',
        calls=(WRITTEN,),
    ),
    Case("prose", "minimax", "<minimax:tool_call> opens a call", content="<minimax:tool_call> opens a call"),
    Case(
        "parameter without end",
        "minimax",
        '<minimax:tool_call><invoke name="f"><parameter name="ä">1</parameter><parameter name="list">[1</invoke>'
        "</minimax:tool_call>after",
        content="after",
        calls=(("f", '{"ä": 1'),),
        cut=True,
        rest='<parameter name="list">[1</invoke>',
    ),
    Case(
        "stated types",
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="ä" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="q" string="true">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="r" string="false">[1, null]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        calls=(("f", '{"ä": 1, "q": "1", "r": [1, null]}'),),
    ),
]

DEEPSEEK = [
    Case(
        "V3, two",
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls=(WEATHER, ("now", "{}")),
    ),
    Case(
        "V3.1, two",
        "deepseek",
        "Sure.\n\n<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"ä": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        content="Sure.",
        calls=(WEATHER, ("f", '{"ä": 1}')),
    ),
    Case(
        "V3.1, cut",
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"ä": 1',
        calls=(("f", "{"),),
        cut=True,
        rest='"ä": 1',
    ),
    Case("prose", "deepseek", "<｜tool▁calls▁begin｜> is a token", content="<｜tool▁calls▁begin｜> is a token"),
]

GLM = [
    Case(
        "4.5",
        "glm",
        "Hm.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        content="Hm.",
        calls=(TYPED,),
    ),
    Case(
        "4.7",
        "glm",
        f"<tool_call>write_file<arg_key>path</arg_key><arg_value>a.c</arg_value><arg_key>content</arg_key>"
        f"<arg_value>{FILE}</arg_value></tool_call><tool_call>now</tool_call>",
        calls=(WRITTEN, ("now", "{}")),
    ),
    Case(
        "prose",
        "glm",
        "a <tool_call>yes</tool_call> b <tool_call>\n",
        content="a <tool_call>yes</tool_call> b <tool_call>\n",
    ),
    Case(
        "value without end",
        "glm",
        "<tool_call>f<arg_key>ä</arg_key><arg_value>1</arg_value><arg_key>list</arg_key><arg_value>[1</tool_call>x",
        content="x",
        calls=(("f", '{"ä": 1'),),
        cut=True,
        rest="<arg_key>list</arg_key><arg_value>[1",
    ),
]

GEMMA = [
    Case(
        "Gemma 4",
        "gemma",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        calls=(("get_weather", '{"city": "Paris","days": 3}'),),
    ),
    Case(
        "FunctionGemma",
        "gemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        calls=(WEATHER,),
    ),
    Case(
        "nested",
        "gemma",
        '<|tool_call>call:f{map:{a:[1,-2.5,true,None],<|"|>b c<|"|>:<|"|>},"{<|"|>},empty:<|"|><|"|>}<tool_call|>',
        calls=(("f", '{"map": {"a": [1,-2.5,true,null],"b c":"},\\"{"},"empty": ""}'),),
    ),
    Case(
        "two, no end between",
        "gemma",
        "a<|tool_call>call:now{}<|tool_call>call:now{}<tool_call|>b",
        content="ab",
        calls=(("now", "{}"), ("now", "{}")),
    ),
    Case(
        "not in its notation",
        "gemma",
        "<|tool_call>call:f{a:1,b:Paris}<tool_call|>x",
        content="x",
        calls=(("f", '{"a": 1'),),
        cut=True,
        rest="b:Paris}",
    ),
    Case("prose", "gemma", "the <|tool_call> token, call:f{}", content="the <|tool_call> token, call:f{}"),
]

# The second of a list is no call: it is text, and none of it is lost.
SECONDS = [
    Case(
        "second",
        "llama3_json",
        '{"name": "now", "parameters": {}}; {"x": 1}',
        content='; {"x": 1}',
        calls=(("now", "{}"),),
    ),
    Case(
        "second",
        "mistral",
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"x": 1}]',
        content=', {"x": 1}]',
        calls=(("now", "{}"),),
    ),
    Case(
        "second",
        "minimax",
        '<minimax:tool_call><invoke name="now"></invoke> <invoke name="a b">',
        content=' <invoke name="a b">',
        calls=(("now", "{}"),),
    ),
    Case(
        "second",
        "deepseek",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜> <｜tool▁call▁begin｜>a b",
        content=" <｜tool▁call▁begin｜>a b",
        calls=(("now", "{}"),),
    ),
    Case(
        "stated type against the schema",
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f">'
        '<｜DSML｜parameter name="ä" string="true">1</｜DSML｜parameter>'
        "</｜DSML｜invoke></｜DSML｜function_calls>",
        calls=(("f", '{"ä": "1"}'),),
    ),
]

HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"ä": 1}}\n</tool_call>'
F = ("f", '{"ä": 1}')
REASONING = [
    Case("both markers", "", "<think>\nHm.\n</think>\n\nHi", content="Hi", reasoning="Hm.", markers="think"),
    Case(
        "opened by the template", "", "Hm.\n</think>\n\nHi", content="Hi", reasoning="Hm.", markers="think", inside=True
    ),
    Case("opened twice", "", "<think>\nHm.</think>Hi", content="Hi", reasoning="Hm.", markers="think", inside=True),
    Case("no end", "", "<think>\nHm. </thin", reasoning="Hm. </thin", markers="think"),
    Case("none at all", "", "\nHi <think>x</think> \n", content="\nHi <think>x</think> \n", markers="think"),
    Case("a stray end", "", "Hi</think>", content="Hi</think>", markers="think"),
    Case("empty", "", "<think>\n\n</think>\n\nHi\n", content="Hi\n", markers="think"),
    Case(
        "end forced by a budget",
        "",
        "Hm. </th\n\nTime is up.\n</think>\n\n</think>\n\nHi",
        content="Hi",
        reasoning="Hm. </th\n\nTime is up.",
        markers="think",
        inside=True,
    ),
    Case("two blocks", "", "<think>a</think>\n<think>b</think>c", content="c", reasoning="ab", markers="think"),
    Case(
        "mistral",
        "mistral",
        '[THINK]a[/THINK]b[TOOL_CALLS]f[ARGS]{"ä": 1}',
        content="b",
        reasoning="a",
        calls=(F,),
        markers="mistral",
    ),
    Case(
        "gemma",
        "gemma",
        "<|channel>thought\na\n<channel|>b<|tool_call>call:now{}<tool_call|>",
        content="b",
        reasoning="a",
        calls=(("now", "{}"),),
        markers="gemma",
    ),
    Case("call after", "hermes", f"<think>a</think>\n\n{HERMES_CALL}", reasoning="a", calls=(F,), markers="think"),
    Case("call inside, no end", "hermes", f"a\n{HERMES_CALL}", reasoning="a", calls=(F,), markers="think", inside=True),
    Case(
        "call inside, then more",
        "hermes",
        f"a {HERMES_CALL} b</think>c",
        content="c",
        reasoning="a  b",
        calls=(F,),
        markers="think",
        inside=True,
    ),
    Case(
        "a call only thought of",
        "hermes",
        "use <tool_call> for it</think>c",
        content="c",
        reasoning="use <tool_call> for it",
        markers="think",
        inside=True,
    ),
    Case(
        "markers in arguments",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "</think><think>"}}</tool_call>a</think>c',
        content="c",
        reasoning="a",
        calls=(("f", '{"x": "</think><think>"}'),),
        markers="think",
        inside=True,
    ),
    Case(
        "bare JSON after",
        "llama3_json",
        '<think>{"name"</think>\n{"name": "f", "parameters": {"ä": 1}}',
        reasoning='{"name"',
        calls=(F,),
        markers="think",
    ),
]

CASES = [*HERMES, *QWEN, *LLAMA, *MISTRAL, *INVOKES, *DEEPSEEK, *GLM, *GEMMA, *SECONDS, *REASONING]
