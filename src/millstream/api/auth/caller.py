"""A caller: whose tasks are whose, and what each may ask for."""

from dataclasses import dataclass, field

import msgspec

ANONYMOUS_ID = "anonymous"
PRIORITIES = frozenset({"interactive", "batch"})


class CallerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much one caller may use; None: the default in the settings, 0: as much as it likes."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrent_streams: int | None = None
    waiting_tasks: int | None = None
    tokens_per_stream: int | None = None
    minutes_per_stream: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is, for as long as the request lasts."""

    id: str
    """The owner of tasks; at most 128 characters of ASCII, without blanks: fit for any key."""
    models: frozenset[str] | None = None
    """The models it may use; None: all."""
    admin: bool = False
    """Whether it may see the fleet and what others use."""
    limits: CallerLimits = field(default_factory=CallerLimits)
    priorities: frozenset[str] = PRIORITIES
    """The priority classes it may use."""

    def may_use(self, model: str) -> bool:
        """Whether it may ask this model."""
        return self.models is None or model in self.models


ANONYMOUS = Caller(ANONYMOUS_ID, admin=True)
"""Everyone, where no keys are set: a fleet of one's own."""
