#!lua flags=allow-oom
-- Hand tasks over at once: their leases count as lapsed, and another worker is rung.
-- KEYS: queue
-- ARGV: worker, model, lease_ms, blame ('': none; else why the loss counts against the tasks),
--       unheard (0|1), then id and attempt of each task
--       unheard: so do all others of the worker's, without blame: they were started for it as they
--       were submitted, and it has not heard of them
-- -> how many were ours to give
local queue, me, model = KEYS[1], ARGV[1], ARGV[2]
pending(queue) -- makes the group where it is missing
redis.call('ZREM', idle_key(model), me)

local given = 0
local function give(id, attempt, blame)
  local task = redis.call('HMGET', task_key(id), 'state', 'attempt', 'worker', 'entry')
  if task[1] ~= 'running' or task[3] ~= me or (attempt and task[2] ~= attempt) then return end
  redis.call('HSET', task_key(id), 'worker', '',
    'released', blame == '' and '1' or '0', 'last_error', blame)
  redis.call('XCLAIM', queue, GROUP, me, 0, entry_of(id, model, task[4]),
    'IDLE', ARGV[3], 'FORCE', 'JUSTID')
  ring(model, 'released')
  given = given + 1
end

for at = 6, #ARGV, 2 do give(ARGV[at], ARGV[at + 1], ARGV[4]) end
if ARGV[5] == '1' then
  for _, id in ipairs(owned_by(queue, me)) do give(id, nil, '') end
end
return given
