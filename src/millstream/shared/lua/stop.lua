#!lua flags=allow-oom
-- End a task now, whoever runs it: the log gets its last event in this step, so no later token,
-- worker or restart can undo it. Its worker is told, and every append of it is refused besides.
-- KEYS: task
-- ARGV: id, caller, result_ttl_s, left_by ('' ends it in any case), least_tokens
--       left_by: the pod whose reader has gone: the task goes on if another pod follows it, or if
--       its answer belongs to no connection
--       least_tokens: what it had when it was stopped before: until the log has them again, it goes on
-- -> {state, prompt tokens, completion tokens, 1 if this call has ended it} | {'unknown'} | {'expired'} | {'short'}
local id, left_by = ARGV[1], ARGV[4]
local task = read_task(id)
if not task.state then return {missing(id, ARGV[2])} end
if task.caller ~= ARGV[2] then return {'unknown'} end
local wanted = left_by ~= '' and (
  redis.call('HGET', KEYS[1], 'orphan_ms') == '0' or without(task.followers, left_by) ~= '')
local unfinished = task.state == 'queued' or task.state == 'running'
if unfinished and tonumber(task.tokens) < tonumber(ARGV[5]) then return {'short'} end
local now = unfinished and not wanted
if now then
  cancel(id, task, tonumber(ARGV[3]))
  task.state = 'cancelled'
end
return {task.state, task.prompt_tokens or '0', task.tokens or '0', now and 1 or 0}
