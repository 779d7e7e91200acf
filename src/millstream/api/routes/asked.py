"""What every route that is answered on its own connection asks for, and how its tasks are made."""

from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel

from millstream.api.admission import Accepted
from millstream.api.auth.dependencies import CurrentCaller
from millstream.api.body import largest_body, read_body
from millstream.api.openai import mapping
from millstream.api.pod import CurrentPod
from millstream.api.routes.slots import StreamSlot
from millstream.shared.schemas import TaskRequest

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request and what it is answered with."""

    request: Request
    pod: CurrentPod
    caller: CurrentCaller
    slot: StreamSlot

    @property
    def idempotency_key(self) -> str | None:
        """What makes it safe to send again."""
        return self.request.headers.get("idempotency-key")

    async def read(self, schema: type[Model]) -> tuple[Model, bytes]:
        """The body and the bytes it came from; raises as `read_body`."""
        limit = largest_body(self.pod.settings.max_prompt_chars)
        return await read_body(self.request, schema, most=limit)

    async def submit(
        self,
        *tasks: TaskRequest,
        body: bytes,
        stream: bool,
        key: str | None,
        lasting: bool = False,
        service_tier: str | None = None,
    ) -> Accepted:
        """Make the tasks of the answer; raises as `Admission.submit`.

        Args:
            tasks: What to generate, one a choice.
            body: What is compared when the key comes again.
            stream: Whether the answer is one, which counts as open from now.
            key: What makes it safe to send again.
            lasting: It needs nobody to wait for it.
            service_tier: OpenAI's word for its class.

        Raises:
            RateLimited: the caller has as many streams open as it may.
        """
        if stream:
            await self.slot.take()
        return await self.pod.admission.submit(
            *tasks,
            caller=self.caller,
            idempotency_key=key,
            route=self.request.url.path,
            body=body,
            # Who sends a key means to come back for the answer, as does who lets it run on its own:
            # it is not bound to this connection.
            attached=key is None and not lasting,
            priority=mapping.priority_of(service_tier),
        )


# A function, and an asynchronous one, though it waits for nothing: FastAPI sends anything else, a
# class too, to a thread.
async def asked_of(
    request: Request, pod: CurrentPod, caller: CurrentCaller, slot: StreamSlot
) -> Asked:
    """What a route is given that asks for it (a FastAPI dependency)."""
    return Asked(request, pod, caller, slot)


AskedHere = Annotated[Asked, Depends(asked_of)]
