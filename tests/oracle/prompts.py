"""The prompts that SmolLM2 is compared on. Ids are stored in the oracle file, so that arithmetic is
compared on the same ids whatever a tokeniser says."""

LOGIT_PROMPTS = {
    "sentence": "The capital of France is",
    "chat": (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nExplain in two sentences why the sky is blue.<|im_end|>\n<|im_start|>assistant\n"
    ),
    "code": '''import heapq


def shortest_paths(graph, source):
    """Dijkstra's algorithm: distances from source to every reachable node.

    graph maps a node to a list of (neighbour, weight) pairs with weight >= 0.
    """
    distance = {source: 0}
    queue = [(0, source)]
    while queue:
        d, node = heapq.heappop(queue)
        if d > distance.get(node, float("inf")):
            continue
        for neighbour, weight in graph[node]:
            candidate = d + weight
            if candidate < distance.get(neighbour, float("inf")):
                distance[neighbour] = candidate
                heapq.heappush(queue, (candidate, neighbour))
    return distance


if __name__ == "__main__":
    example = {"a": [("b", 7), ("c", 3)], "b": [("d", 2)], "c": [("b", 1), ("d", 8)], "d": []}
    print(shortest_paths(example, "a"))  # {'a': 0, 'c': 3, 'b': 4, 'd': 6}
''',
    "licence": "",  # the first 1,000 tokens of this repository's LICENSE
}

GREEDY_PROMPTS = [
    "Write a short poem about the sea.",
    "What is the largest planet in the solar system?",
    "List three uses of copper.",
    "Translate to French: Good morning, my friend.",
    "How do plants make food?",
    "What is 17 plus 25?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Explain recursion to a child.",
    "Why do cats purr?",
    "Name the seven continents.",
    "Write a Python function that reverses a string.",
    "What causes tides?",
    "Summarise the story of Cinderella in one paragraph.",
    "What is the difference between weather and climate?",
    "Suggest a name for a small bakery.",
    "How many days are there in a leap year?",
    "Describe the taste of a lemon.",
    "Tell me a fact about octopuses.",
    "Write a polite email that declines an invitation.",
]
"""Asked through the chat template, 64 greedy tokens each."""

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)

GREEDY_TOKENS = 64

COLUMNS = 64
"""Vocabulary ids, spread evenly, whose logits are stored at every position."""
