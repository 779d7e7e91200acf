#!lua flags=allow-oom
-- Hand tasks over at once: their leases count as lapsed, and another worker is rung.
-- KEYS: queue
-- ARGV: worker, model, lease_ms, blame ('': none; else why the loss counts against the tasks),
--       then id and attempt of each task
-- -> how many were ours to give
pending(KEYS[1]) -- makes the group where it is missing
local given = 0
redis.call('ZREM', idle_key(ARGV[2]), ARGV[1])
for at = 5, #ARGV, 2 do
  local id, attempt = ARGV[at], ARGV[at + 1]
  local task = redis.call('HMGET', task_key(id), 'state', 'attempt', 'worker', 'entry')
  if task[1] == 'running' and task[2] == attempt and task[3] == ARGV[1] then
    redis.call('HSET', task_key(id), 'worker', '',
      'released', ARGV[4] == '' and '1' or '0', 'last_error', ARGV[4])
    redis.call('XCLAIM', KEYS[1], GROUP, ARGV[1], 0, entry_of(id, ARGV[2], task[4]),
      'IDLE', ARGV[3], 'FORCE', 'JUSTID')
    ring(ARGV[2], 'released')
    given = given + 1
  end
end
return given
