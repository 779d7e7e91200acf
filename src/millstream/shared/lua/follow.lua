#!lua flags=allow-oom
-- Read a task's log after event n and, in the same step, follow what comes: no gap between the two.
-- KEYS: task
-- ARGV: id, caller, pod ('' only reads), after, at most so many events
-- -> {'ok', state, seq, model, log entries} | {'unknown'} | {'expired'} | {'rewound'}
local id, pod = ARGV[1], ARGV[3]
clear_broken(id)
local task = redis.call('HMGET', KEYS[1], 'state', 'caller', 'seq', 'model', 'followers', 'entry',
  'rewound_at')
if not task[1] then return {missing(id, ARGV[2])} end
if task[2] ~= ARGV[2] then return {'unknown'} end
if task[7] and tonumber(ARGV[4]) >= tonumber(task[7]) then return {'rewound'} end
local unfinished = task[1] == 'queued' or task[1] == 'running'
if unfinished and entry_of(id, task[4], task[6]) ~= task[6] then ring(task[4], 'new') end
if pod ~= '' and unfinished then
  local followers = task[5] or ''
  if without(followers, pod) == followers then
    redis.call('HSET', KEYS[1], 'followers', followers .. (followers == '' and '' or ' ') .. pod)
    redis.call('HDEL', KEYS[1], 'unheard_since')
  end
end
return {'ok', task[1], task[3], task[4],
  redis.call('XRANGE', log_key(id), int(tonumber(ARGV[4]) + 1) .. '-0', '+', 'COUNT', ARGV[5])}
