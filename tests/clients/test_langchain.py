"""LangChain's ChatOpenAI."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.asking import CAPITAL, GREEDY, STORY, TURNS
from tests.serve.real_server import MODEL, RealServer

CAPITAL_TEXT = CAPITAL[0]["content"]


@pytest.fixture(scope="module")
def model(server: RealServer) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=server.url + "/v1", api_key="none", max_retries=0, temperature=0, max_tokens=12
    )


def answer_of(client: openai.OpenAI, messages: Any) -> Any:
    return client.chat.completions.create(messages=messages, **GREEDY).choices[0].message.content


def test_invoke(model: ChatOpenAI) -> None:
    answer = model.invoke(CAPITAL_TEXT)
    assert answer.content == "The capital of France is Paris."
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL
    usage = answer.usage_metadata
    assert usage is not None and usage["output_tokens"] == 8
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_messages_of_every_kind(model: ChatOpenAI, client: openai.OpenAI) -> None:
    turns = [HumanMessage(TURNS[0]["content"]), AIMessage(TURNS[1]["content"]), HumanMessage(TURNS[2]["content"])]
    assert model.invoke(turns).content == answer_of(client, TURNS) == "The secret word is Zorblax."
    named = [SystemMessage("Your name is Zorblax."), HumanMessage("What is your name?")]
    assert "Zorblax" in model.invoke(named).content
    first = model.invoke(CAPITAL_TEXT)  # an answer goes back as it came
    assert model.invoke([HumanMessage(CAPITAL_TEXT), first, HumanMessage("And of Germany?")]).content


def test_a_stream_is_the_whole(model: ChatOpenAI) -> None:
    whole = model.invoke(STORY[0]["content"])
    chunks = list(model.stream(STORY[0]["content"], stream_usage=True))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert isinstance(total, AIMessageChunk) and len(chunks) > 5
    assert total.content == whole.content
    assert total.response_metadata["finish_reason"] == "length"
    assert total.usage_metadata == whole.usage_metadata


def test_a_batch_is_its_questions_one_by_one(model: ChatOpenAI) -> None:
    questions = [CAPITAL_TEXT, "What is the capital of Germany?", "What is the capital of Italy?"]
    assert [a.content for a in model.batch(questions)] == [model.invoke(q).content for q in questions]


def test_asynchronous(model: ChatOpenAI) -> None:
    async def ask() -> list[str]:
        whole = (await model.ainvoke(CAPITAL_TEXT)).content
        streamed = "".join([str(chunk.content) async for chunk in model.astream(CAPITAL_TEXT)])
        (batched,) = await model.abatch([CAPITAL_TEXT])
        return [str(whole), streamed, str(batched.content)]

    assert asyncio.run(ask()) == ["The capital of France is Paris."] * 3


def test_a_chain(model: ChatOpenAI) -> None:
    chain = (
        ChatPromptTemplate.from_messages([("human", "What is the capital of {country}?")]) | model | StrOutputParser()
    )
    assert "Paris" in chain.invoke({"country": "France"})
    assert "".join(chain.stream({"country": "France"})) == chain.invoke({"country": "France"})


def test_stop_and_log_probabilities(model: ChatOpenAI) -> None:
    assert model.invoke(CAPITAL_TEXT, stop=[" is"]).content == "The capital of France"
    answer = model.bind(logprobs=True, top_logprobs=2).invoke(CAPITAL_TEXT)
    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith(str(answer.content))


def test_several_choices(server: RealServer) -> None:
    model = ChatOpenAI(
        model=MODEL, base_url=server.url + "/v1", api_key="none", n=2, seed=4, temperature=1, max_tokens=10
    )
    (generations,) = model.generate([[HumanMessage(STORY[0]["content"])]]).generations
    assert len({generation.text for generation in generations}) == 2


def test_the_plain_model(server: RealServer) -> None:
    model = OpenAI(model=MODEL, base_url=server.url + "/v1", api_key="none", temperature=0, max_tokens=6)
    text = model.invoke("The capital of France is")
    assert text.startswith(" Paris") and "".join(model.stream("The capital of France is")) == text


class Animal(pydantic.BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    legs: int = pydantic.Field(ge=0, le=8)


def test_structured_output(model: ChatOpenAI) -> None:
    chain = ChatOpenAI(
        model=MODEL, base_url=str(model.openai_api_base), api_key="none", temperature=0, max_tokens=40
    ).with_structured_output(Animal, method="json_schema")
    animal = chain.invoke("Describe a cat.")
    assert isinstance(animal, Animal) and 0 <= animal.legs <= 8
    assert list(chain.stream("Describe a cat."))[-1] == animal


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return f"Rain in {city}"


def test_tools(model: ChatOpenAI) -> None:
    bound = model.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    question = "What is the weather in Paris?"
    answer = bound.invoke(question, max_tokens=60)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Paris", "Rome") and not answer.invalid_tool_calls
    total = None
    for chunk in bound.stream(question, max_tokens=60):
        total = chunk if total is None else total + chunk
    assert isinstance(total, AIMessageChunk)
    assert [(c["name"], c["args"]) for c in total.tool_calls] == [(call["name"], call["args"])]
    result = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([get_weather]).invoke([HumanMessage(question), answer, result]).content


def test_structured_output_by_a_call(model: ChatOpenAI) -> None:
    chain = ChatOpenAI(
        model=MODEL, base_url=str(model.openai_api_base), api_key="none", temperature=0, max_tokens=60
    ).with_structured_output(Animal, method="function_calling")
    animal = chain.invoke("Describe a cat.")
    assert isinstance(animal, Animal) and 0 <= animal.legs <= 8


def test_an_error_is_the_clients_own(model: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        model.invoke(CAPITAL_TEXT, temperature=-3)
    assert caught.value.param == "temperature"
    assert "Paris" in model.invoke(CAPITAL_TEXT).content
