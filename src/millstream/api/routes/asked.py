"""What every route that is answered on its own connection asks for, and how its tasks are made."""

from typing import Annotated, TypeVar

import msgspec
from fastapi import Depends, Request
from pydantic import BaseModel

from millstream.api.admission import Accepted
from millstream.api.auth.caller import Caller
from millstream.api.auth.dependencies import caller_of
from millstream.api.body import read_body
from millstream.api.openai import mapping
from millstream.api.pod import Pod, pod_of
from millstream.api.routes.slots import Slot
from millstream.shared.schemas import TaskRequest

Model = TypeVar("Model", bound=BaseModel)


class Asked(msgspec.Struct, frozen=True):
    """A request and what it is answered with."""

    request: Request
    pod: Pod
    caller: Caller
    slot: Slot

    @property
    def idempotency_key(self) -> str | None:
        """What makes it safe to send again."""
        return self.request.headers.get("idempotency-key")

    async def read(self, schema: type[Model]) -> tuple[Model, bytes]:
        """The body and the bytes it came from; raises as `read_body`."""
        most = self.pod.settings.max_prompt_chars
        return await read_body(self.request, schema, max_prompt_chars=most)

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
            route=self.request.scope["path"],
            body=body,
            # Who sends a key means to come back for the answer, as does who lets it run on its own:
            # it is not bound to this connection.
            attached=key is None and not lasting,
            follow=stream or not lasting,
            priority=mapping.priority_of(service_tier),
        )


# It asks for what it needs itself: FastAPI takes longer for four dependencies of a dependency than
# the pod takes for all else before a task is made. Asynchronous, or it would be sent to a thread.
async def asked_of(request: Request) -> Asked:
    """What a route is given that asks for it (a FastAPI dependency)."""
    pod = await pod_of(request)
    caller = await caller_of(request, pod)
    return Asked(request, pod, caller, Slot(request, pod, caller))


AskedHere = Annotated[Asked, Depends(asked_of)]
