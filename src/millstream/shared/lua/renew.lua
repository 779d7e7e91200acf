#!lua flags=allow-oom
-- Keep the leases of a worker's tasks. XCLAIM alone asks nobody who owns an entry, so a worker that
-- woke up late would take it back: hence the look at the attempt.
-- KEYS: queue
-- ARGV: worker, live_ttl_s, result_ttl_s, then id and attempt of each task
-- -> per task 1 ours, -1 another attempt owns it, -2 it has ended or expired
pending(KEYS[1]) -- makes the group where it is missing
local result_ttl_s = tonumber(ARGV[3])
local now = now_ms()
local answers = {}
for at = 4, #ARGV, 2 do
  local id, attempt = ARGV[at], ARGV[at + 1]
  clear_broken(id)
  local task = redis.call('HMGET', task_key(id), 'state', 'attempt', 'worker', 'deadline', 'model',
    'entry')
  local unfinished = task[1] == 'queued' or task[1] == 'running'
  local ours = task[1] == 'running' and task[2] == attempt and task[3] == ARGV[1]
  if ours and task[4] and now >= tonumber(task[4]) then
    end_overdue(id, read_task(id), result_ttl_s)
    answers[#answers + 1] = -2
  elseif ours then
    -- FORCE: after a loss of data the group may have been made anew, without its pending list.
    local entry = entry_of(id, task[5], task[6])
    redis.call('XCLAIM', KEYS[1], GROUP, ARGV[1], 0, entry, 'FORCE', 'JUSTID')
    redis.call('EXPIRE', task_key(id), ARGV[2])
    redis.call('EXPIRE', log_key(id), ARGV[2])
    answers[#answers + 1] = 1
  elseif unfinished and tonumber(attempt) > tonumber(task[2]) then
    answers[#answers + 1] = 1 -- Redis lost the claim; the next append takes the task back
  else
    answers[#answers + 1] = task[1] == 'running' and -1 or -2
  end
end
send_posts()
return answers
