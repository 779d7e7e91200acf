"""Every name Millstream uses in Redis, each spelled once.

A shard is a hash slot: the tag `{ms:0}` puts all keys of a shard on one node, so that every state
change of a task can be one atomic script, on a cluster too.

| key | type | life |
| --- | --- | --- |
| `{ms:k}:queue:<model>` | STREAM with group `workers` | entries go at the end of their task |
| `{ms:k}:line:<model>` | ZSET class, caller, place, id | those of them that wait |
| `{ms:k}:turns:<level>:<model>` | ZSET who → tokens served | those who wait, a week |
| `{ms:k}:spent:<level>:<model>` | ZSET who → tokens served | those who do not, a week |
| `{ms:k}:fair:<model>` | HASH level → clock | a week |
| `{ms:k}:due` | ZSET id → Unix ms of its deadline | until the task's end |
| `{ms:k}:idle:<model>` | ZSET worker → running tasks | workers that wait for a bell |
| `{ms:k}:rate:<model>` | HASH | smoothed service rate, a day |
| `{ms:k}:refused:<model>` | HASH caller → ticket and Unix ms | ten minutes after a refusal |
| `{ms:k}:task:<id>` | HASH | while the task lives, then RESULT_TTL_S |
| `{ms:k}:log:<id>` | STREAM `1-0`, `2-0`, … | as the task |
| `{ms:k}:tomb:<id>` | STRING caller | a day after the task was withdrawn |
| `{ms:k}:tombs:<span>:<head>` | HASH mark of an id → caller | a day longer than those tasks |
| `{ms:k}:idem:<hash of caller and key>` | HASH task, body | a day |
| `{ms:k}:ticket:<hash of task and ticket>` | STRING caller and limits | a minute, or until used |
| `{ms:k}:dead:<model>` | STREAM | the last 1,000 tasks that failed by MAX_ATTEMPTS |
| `{ms:k}:usage:<caller>:<day>` | HASH what and model → count | 40 days |
| `{ms:k}:callers:<day>` | SET of those who used something that day | as those |
| `{ms:k}:requests:<caller>` | ZSET id → ms | two minutes after the last request |
| `{ms:k}:tokens:<caller>` | ZSET id and amount → ms | as those |
| `{ms:k}:balance:<caller>` | HASH sum, learned | a day |
| `{ms:k}:streams:<caller>` | ZSET id → ms until it lapses | a lease of the pod's |
| `{ms:k}:ended:<caller>` | HASH reserve → use | two minutes after the last end of a task |
| `{ms:k}:pod:<pod>`, `{ms:k}:ctl:<worker>`, `{ms:k}:run:<worker>` | sharded channels | none |
| `{ms}:workers`, `{ms}:apis` | HASH id → heartbeat | removed by readers when stale |
| `{ms}:models` | HASH model → last time a worker was ready for it | a week |
| `{ms}:drain:<worker>` | STRING Unix ms at which it was told to drain | a day |
"""

import hashlib

import msgspec

from millstream.shared.states import Priority

CLASSES = "classes"
"""The upper level of the fair queue."""
LEVELS = (CLASSES, *Priority)
"""A lower one is called as its class."""
WORKERS = "{ms}:workers"
APIS = "{ms}:apis"
MODELS = "{ms}:models"


def drain(worker_id: str) -> str:
    """That a worker is to drain."""
    return f"{{ms}}:drain:{worker_id}"


def home_shard(caller: str, shards: int) -> int:
    """The shard in which all state of a caller's limits lies: one slot, so that it is one step."""
    return int.from_bytes(hashlib.blake2b(caller.encode(), digest_size=8).digest()) % shards


class Keys(msgspec.Struct, frozen=True):
    """The names of one shard."""

    shard: int

    @property
    def tag(self) -> str:
        """The hash tag all names of the shard begin with."""
        return f"{{ms:{self.shard}}}"

    def queue(self, model: str) -> str:
        """The stream of tasks for a model: its length is waiting plus running."""
        return f"{self.tag}:queue:{model}"

    def line(self, model: str) -> str:
        """The tasks that wait, sorted by class, caller and place among the caller's own."""
        return f"{self.tag}:line:{model}"

    def turns(self, level: str, model: str) -> str:
        """Who waits on a level of the fair queue, by the tokens they were served."""
        return f"{self.tag}:turns:{level}:{model}"

    def spent(self, level: str, model: str) -> str:
        """Who does not wait, and was served more than whoever would come now starts with."""
        return f"{self.tag}:spent:{level}:{model}"

    def fair(self, model: str) -> str:
        """Where whoever comes starts, on each level of the fair queue."""
        return f"{self.tag}:fair:{model}"

    def due(self) -> str:
        """The deadlines of the shard's unfinished tasks, of all models."""
        return f"{self.tag}:due"

    def idle(self, model: str) -> str:
        """The workers that found the queue empty and want a bell."""
        return f"{self.tag}:idle:{model}"

    def rate(self, model: str) -> str:
        """How fast tasks of the model have been ending."""
        return f"{self.tag}:rate:{model}"

    def refused(self, model: str) -> str:
        """Who was refused for want of room, and when it should be back."""
        return f"{self.tag}:refused:{model}"

    def dead(self, model: str) -> str:
        """Tasks that took MAX_ATTEMPTS workers down."""
        return f"{self.tag}:dead:{model}"

    def task(self, task_id: str) -> str:
        """A task's state."""
        return f"{self.tag}:task:{task_id}"

    def log(self, task_id: str) -> str:
        """A task's numbered events."""
        return f"{self.tag}:log:{task_id}"

    def tomb(self, task_id: str) -> str:
        """That a task was withdrawn: its submit may be on its way yet."""
        return f"{self.tag}:tomb:{task_id}"

    def tombs(self, span: int, head: str) -> str:
        """What is left of tasks that expired in a quarter of a day, and whose ids begin alike."""
        return f"{self.tag}:tombs:{span}:{head}"

    def idempotency(self, caller: str, key: str) -> str:
        """What a caller's idempotency key stands for; hashed, since both are the caller's text."""
        digest = hashlib.blake2b(f"{caller}\0{key}".encode(), digest_size=16).hexdigest()
        return f"{self.tag}:idem:{digest}"

    def usage(self, caller: str, day: int) -> str:
        """What a caller used on a day, counted since 1970 by UTC."""
        return f"{self.tag}:usage:{caller}:{day}"

    def callers(self, day: int) -> str:
        """Who used something on a day."""
        return f"{self.tag}:callers:{day}"

    def requests(self, caller: str) -> str:
        """The requests of a limited caller in the last minute."""
        return f"{self.tag}:requests:{caller}"

    def tokens(self, caller: str) -> str:
        """What those requests reserved, and what their tasks used."""
        return f"{self.tag}:tokens:{caller}"

    def balance(self, caller: str) -> str:
        """The sum of those tokens, and how long its answers are."""
        return f"{self.tag}:balance:{caller}"

    def streams(self, caller: str) -> str:
        """The open streams of a limited caller."""
        return f"{self.tag}:streams:{caller}"

    def ended(self, caller: str) -> str:
        """What tasks of this shard used, until the caller asks next and it is settled."""
        return f"{self.tag}:ended:{caller}"

    def ticket(self, task_id: str, ticket: str) -> str:
        """What a ticket stands for; hashed, so that who reads Redis's keys cannot use it."""
        digest = hashlib.blake2b(f"{task_id}\0{ticket}".encode(), digest_size=16).hexdigest()
        return f"{self.tag}:ticket:{digest}"

    def pod(self, pod_id: str) -> str:
        """The channel on which a pod hears of the tasks it follows."""
        return f"{self.tag}:pod:{pod_id}"

    def run(self, worker_id: str) -> str:
        """Channel for tasks that were started for a worker as they were submitted."""
        return f"{self.tag}:run:{worker_id}"

    def control(self, worker_id: str) -> str:
        """The channel on which a worker is rung and told of stops."""
        return f"{self.tag}:ctl:{worker_id}"


def keys_of_queue(shard: Keys, model: str) -> list[str]:
    """All that a shard keeps of a model's queue."""
    levels = [key(level, model) for level in LEVELS for key in (shard.turns, shard.spent)]
    rest = (shard.queue, shard.line, shard.fair, shard.idle, shard.rate, shard.refused)
    return [*levels, *(key(model) for key in rest)]
