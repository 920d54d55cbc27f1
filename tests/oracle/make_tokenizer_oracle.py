"""Write smollm2_tokens.json: what llama.cpp makes of many texts, for every pre-tokeniser that Atlas knows.

llama.cpp defines what a GGUF's tokenizer metadata means, so its ids are the oracle. Its Python package
is compiled on installation, which takes some minutes, so this is run by hand and its result committed:

    python -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0
    /tmp/llama/bin/python tests/oracle/make_tokenizer_oracle.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

The other pre-tokenisers are asked with a copy of SmolLM2's metadata, without weights, in which
`tokenizer.ggml.pre` is changed. That isolates the rule by which text is cut. SmolLM2 joins no digits,
which would hide the rules for numbers, so the copy gets tokens for all pairs and triples of digits.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import llama_cpp
from gguf import GGUFReader, GGUFValueType, GGUFWriter

OUTPUT = Path(__file__).with_name("smollm2_tokens.json")
OTHERS = ("default", "gpt-2", "llama-bpe", "qwen2")


def texts() -> list[str]:
    """What is known to be cut in different ways, then seeded random mixtures of the same matter."""
    cases = [
        "",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        "\n\n\n",
        "\t",
        "\t\t",
        "\r\n",
        "\r\n\r\n",
        " \n ",
        "\n \n",
        "  \n\t \n",
        "a",
        " a",
        "  a",
        "a ",
        "a  ",
        "a  12",
        "the in  12",
        "12",
        "123",
        "1234567890",
        "3.14159",
        "1,000,000",
        "1 2 3",
        "x1y2z3",
        "2024-01-31T12:34:56Z",
        "0x1F",
        "½ ¼ ² ³",
        "٣٤٥",
        "१२३",
        "Ⅷ Ⅻ",
        "１２３",
        "Hello, world!",
        "Hello  world",
        "Hello\tworld",
        "Hello\nworld",
        "  leading and trailing  ",
        "I'm you're he's we'll they'd I've can't",
        "I'M YOU'RE HE'S WE'LL THEY'D I'VE CAN'T",
        "'s 't 're 've 'm 'll 'd",
        "l'été d'hiver",
        "'ſ",
        "''''",
        "don''t",
        "’s it’s",
        "rock 'n' roll",
        "naïve café résumé",
        "cafe\u0301 re\u0301sume\u0301",
        "Ärger über Öl",
        "ﬁne ﬂow",
        "ǅ ǆ",
        "Привет, мир!",
        "Γειά σου Κόσμε",
        "שלום עולם",
        "مرحبا بالعالم",
        "السَّلَامُ عَلَيْكُمْ",
        "नमस्ते दुनिया",
        "สวัสดีชาวโลก",
        "你好，世界！",
        "こんにちは世界",
        "カタカナ ｶﾀｶﾅ",
        "안녕하세요 세계",
        "漢字かな交じり文123",
        "𠜎𠜱𠝹",
        "👋",
        "👋🏽",
        "👨‍👩‍👧‍👦",
        "🇩🇪🇫🇷",
        "emoji 😀😃 in text",
        "❤️ ☺️",
        "1️⃣ 2️⃣",
        "🏳️‍🌈 flag",
        "\u200b\u200c\u200d",
        "\ufeffBOM",
        "a\u00a0b",
        "a\u2003b",
        "a\u3000b",
        "a\u2028b\u2029c",
        "a\u0085b",
        "a\x0bb\x0cc",
        "\u180e x",
        "\u1680 x",
        "\u202f\u205f",
        "\u2060",
        "\x00",
        "a\x00b",
        "\x01\x02\x03",
        "\x1b[31mred\x1b[0m",
        "\x7f",
        "\ufffd",
        "\ufdd0",
        "\U0010ffff",
        "\ue000",
        "def f(x):\n    return x + 1\n",
        "for (int i = 0; i < 10; ++i) {\n\tsum += a[i];\n}\n",
        '<div class="a">&nbsp;</div>',
        '{"key": [1, 2.5, null, true]}',
        "SELECT * FROM t WHERE a='b';",
        "a=b==c!=d<=e>=f&&g||h",
        "x->y::z // comment",
        "/usr/local/bin/python3.11",
        "https://example.com/a?b=c&d=e#f",
        "user@example.com",
        "C:\\Windows\\System32",
        "$100 €50 £20 ¥30",
        "50% off!!!",
        "a+b=c^2~d|e`f",
        "...",
        "…",
        "?!?!",
        "---",
        "***",
        "___",
        "#include <stdio.h>",
        "\\n is not a newline",
        "\"quoted\" 'single' `back`",
        "(a)[b]{c}",
        "CamelCase snake_case kebab-case",
        "ALLCAPS MiXeD",
        "a" * 300,
        "ab" * 150,
        " " * 200,
        "\n" * 100,
        "1" * 150,
        "!" * 150,
        "é" * 100,
        "😀" * 40,
        "\t \t " * 30,
        "the " * 60,
        "supercalifragilisticexpialidocious" * 4,
        "Donaudampfschifffahrtsgesellschaft",
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "a<|im_end|>b",
        " <|im_end|> ",
        "<|im_end|><|im_end|>",
        "<|im_start|",
        "|im_end|>",
        "<|im_<|im_end|>end|>",
        "<| im_end |>",
        "<repo_name>x<reponame>y<file_sep>z",
        "<filename>a.py<gh_stars>10",
        "<issue_start><issue_comment><issue_closed>",
        "<jupyter_start><jupyter_text>a<jupyter_code>b<jupyter_output>c<jupyter_script><empty_output>",
        "<unk> <s> </s> [INST]",
        "!\n",
        "! \n",
        "!\r\nx",
        "a!\n\nb",
        " \u00e9",
        "x\n  y\n    z",
        "end.  Start",
        "a ,b",
        "a\n,b",
        "1\n2",
        "1 \n 2",
        "é1é",
        "1a 1 a",
    ]
    matter = [case for case in cases if 0 < len(case) <= 12]
    choose = random.Random(2)
    return cases + ["".join(choose.choices(matter, k=choose.randint(2, 7))) for _ in range(40)]


def digit_merges() -> list[str]:
    """Merges of every pair of digits, then of every pair with a third."""
    digits = "0123456789"
    pairs = [f"{a} {b}" for a in digits for b in digits]
    return pairs + [f"{pair.replace(' ', '')} {c}" for pair in pairs for c in digits]


def vocabulary_only(reader: GGUFReader, pre: str, extra_merges: list[str], path: Path) -> None:
    """Write a GGUF of the metadata alone, with another tokenizer.ggml.pre and more merges."""
    more = {
        "tokenizer.ggml.tokens": [merge.replace(" ", "") for merge in extra_merges],
        "tokenizer.ggml.token_type": [1] * len(extra_merges),
        "tokenizer.ggml.merges": extra_merges,
    }
    writer = GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = pre if name == "tokenizer.ggml.pre" else field.contents()
        if name == "llama.vocab_size":
            value += len(extra_merges)
        elif name in more:
            value = value + more[name]
        inner = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    source = Path(sys.argv[1])
    reader = GGUFReader(source)
    cases = texts()
    result: dict[str, object] = {
        "made_by": f"tests/oracle/make_tokenizer_oracle.py with llama-cpp-python {llama_cpp.__version__}",
        "digit_merges": digit_merges(),
        "texts": cases,
    }
    with tempfile.TemporaryDirectory() as folder:
        for pre in ("smollm", *OTHERS):
            path = Path(folder) / f"{pre}.gguf"
            vocabulary_only(reader, pre, digit_merges() if pre in OTHERS else [], path)
            model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            tokenize = [(text.encode(), special) for text in cases for special in (True, False)]
            ids = [model.tokenize(text, add_bos=False, special=special) for text, special in tokenize]
            result[pre] = {"special": ids[0::2], "plain": ids[1::2]}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()]
    OUTPUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(cases)} texts -> {OUTPUT}, {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
