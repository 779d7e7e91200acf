#!lua flags=allow-oom
-- Forget a task: it ends, if it has not, and nothing of it is left that anybody could ask for.
-- KEYS: task
-- ARGV: id, caller, result_ttl_s
-- -> 'deleted' | 'unknown'
local id = ARGV[1]
local task = read_task(id)
if not task.state or task.caller ~= ARGV[2] then return 'unknown' end
if task.state == 'queued' or task.state == 'running' then
  finish(id, task, 'cancelled', '', tonumber(ARGV[3]))
  send_posts() -- whoever reads it live sees it end
  if task.worker and task.worker ~= '' then
    redis.call('SPUBLISH', control_channel(task.worker), 'stop ' .. id .. ' ' .. task.attempt)
  end
end
redis.call('DEL', task_key(id), log_key(id), tomb_key(id))
return 'deleted'
