"""`truncation: auto`: a conversation that does not fit loses its beginning."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from atlas.serve.chat_generation import Prepared
from atlas.serve.errors import ApiError
from atlas.serve.openai.responses_conversation import Conversation

DROPPED = "x-atlas-dropped-messages"
"""The header that says how many messages are not in the prompt."""


async def fit(
    conversation: Conversation, prepare: Callable[[Conversation], Awaitable[Prepared]], room: int
) -> Prepared:
    """What `prepare` makes of the conversation, or of as much of its end as leaves `room` tokens for the answer.

    Messages go from the beginning up to one of the user's, so that no answer stays without its question and no result
    of a tool without its call; system messages at the very beginning stay. The user's last message stays in any case,
    whatever room it leaves. Raises ApiError 400 if that does not fit, or anything else is wrong.
    """

    async def tried(cut: int) -> Prepared | ApiError:
        try:
            prepared = await prepare(conversation.without(cut))
        except ApiError as error:
            if error.body.code != "context_length_exceeded":
                raise
            return error
        headers = prepared.headers | ({DROPPED: str(cut)} if cut else {})
        return msgspec.structs.replace(prepared, headers=headers)

    def roomy(result: Prepared | ApiError) -> bool:
        return isinstance(result, Prepared) and result.jobs[0].sampling.max_tokens >= room

    result = await tried(0)
    if not roomy(result):
        cuts = conversation.cuts()
        low, high = 0, len(cuts) - 1
        while low <= high:  # the fewest that have to go
            middle = (low + high) // 2
            attempt = await tried(cuts[middle])
            if roomy(attempt) or middle == len(cuts) - 1:
                result = attempt
            low, high = (low, middle - 1) if roomy(attempt) else (middle + 1, high)
    if isinstance(result, ApiError):
        raise result
    return result
