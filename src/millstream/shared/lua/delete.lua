#!lua flags=allow-oom
-- Forget a task: it ends, if it has not, and nothing of it is left that anybody could ask for.
-- KEYS: task
-- ARGV: id, caller, result_ttl_s, withdraw (0|1)
--       withdraw: its submit had no answer, and may be on its way yet: a tomb refuses it; whoever
--       was told 503 does not pay for it
-- -> 'deleted' | 'unknown'
local id = ARGV[1]
local task = read_task(id)
if ARGV[4] == '1' then
  redis.call('SET', withdrawn_key(id), ARGV[2], 'PX', int(ARGV[3] * 1000 + TOMB_TTL_MS))
end
if not task.state or task.caller ~= ARGV[2] then return 'unknown' end
if task.state == 'queued' or task.state == 'running' then
  cancel(id, task, tonumber(ARGV[3])) -- whoever reads it live sees it end
end
if ARGV[4] == '1' then count_usage(task, tonumber(task.finished or now_ms()), -1) end
dig_up(id, redis.call('PEXPIRETIME', task_key(id)))
redis.call('DEL', task_key(id), log_key(id))
if ARGV[4] == '0' then redis.call('DEL', withdrawn_key(id)) end -- of an older version's end
return 'deleted'
