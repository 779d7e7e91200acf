"""A caller: whose tasks are whose, and what each may ask for."""

from typing import Annotated, Literal

import msgspec

ANONYMOUS_ID = "anonymous"
PRIORITIES = frozenset({"interactive", "batch"})
Priority = Literal["interactive", "batch"]
Amount = Annotated[int, msgspec.Meta(ge=0)]
Weight = Annotated[float, msgspec.Meta(ge=0.01, le=100)]


class CallerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much one caller may use; None: the default in the settings, 0: as much as it likes."""

    requests_per_min: Amount | None = None
    tokens_per_min: Amount | None = None
    concurrent_streams: Amount | None = None
    waiting_tasks: Amount | None = None
    tokens_per_stream: Amount | None = None
    minutes_per_stream: Amount | None = None


# Written by people and by issuers of tokens. A misspelt "models" that was ignored would mean all.
class Rights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a key or a token allows: a line of the key file, or the claim of a JWT, holds it."""

    models: frozenset[str] | None = None
    admin: bool = False
    priorities: frozenset[Priority] | None = None
    limits: CallerLimits = CallerLimits()
    weight: Weight = 1.0


class Caller(msgspec.Struct, frozen=True):
    """Whose request it is, for as long as the request lasts."""

    id: str
    """The owner of tasks; at most 128 characters of ASCII, without blanks: fit for any key."""
    models: frozenset[str] | None = None
    """The models it may use; None: all."""
    admin: bool = False
    """Whether it may see the fleet and what others use."""
    limits: CallerLimits = msgspec.field(default_factory=CallerLimits)
    priorities: frozenset[str] = PRIORITIES
    """The priority classes it may use."""
    weight: float = 1.0
    """What share of its class it has, against the others' weights, while all wait."""

    @classmethod
    def of(cls, name: str, rights: Rights) -> "Caller":
        """A caller with these rights."""
        return cls(
            name,
            rights.models,
            rights.admin,
            rights.limits,
            PRIORITIES if rights.priorities is None else frozenset[str](rights.priorities),
            rights.weight,
        )

    def may_use(self, model: str) -> bool:
        """Whether it may ask this model."""
        return self.models is None or model in self.models


ANONYMOUS = Caller(ANONYMOUS_ID, admin=True)
"""Everyone, where no keys are set: a fleet of one's own."""
