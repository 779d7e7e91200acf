#!lua
-- Put back what was shown of a task's log and that Redis has lost since.
-- KEYS: task
-- ARGV: id, result_ttl_s, first_seq, msgpack events: kind, ids, data, kind, ids, data, …
-- -> 'whole' all of it is there now; 'short' the log lacks some before them; 'other' it has other
--    bytes under one of these numbers; 'unknown' there is no such task
local id, first = ARGV[1], tonumber(ARGV[3])
local task = read_task(id)
if not task.state then return 'unknown' end
local seq, tokens = tonumber(task.seq), tonumber(task.tokens)
if first > seq + 1 then return 'short' end

-- Nobody who has read so far may read on as if nothing had been.
local function differs(n)
  if not task.rewound_at or n < tonumber(task.rewound_at) then
    redis.call('HSET', task_key(id), 'rewound_at', int(n))
  end
  return 'other'
end

local parts = cmsgpack.unpack(ARGV[4])
local message = {id, seq + 1}
local n = first - 1
for part = 1, #parts, 3 do
  local kind, ids, data = parts[part], parts[part + 1], parts[part + 2]
  n = n + 1
  if n <= seq then
    if not holds(id, n, kind, ids, data) then return differs(n) end
  elseif task.state ~= 'queued' and task.state ~= 'running' then
    return differs(n) -- it ended before
  elseif kind == 't' then
    redis.call('XADD', log_key(id), int(n) .. '-0', 'k', 't', 'a', task.attempt, 'i', ids, 'd', data)
    if ids ~= '' then tokens = tokens + 1 + select(2, string.gsub(ids, ',', '')) end
    local size = #message
    message[size + 1], message[size + 2], message[size + 3] = 't', ids, data
  end
end
if #message > 2 then
  task.seq, task.tokens = int(seq + (#message - 2) / 3), int(tokens)
  redis.call('HSET', task_key(id), 'seq', task.seq, 'tokens', task.tokens)
  redis.call('EXPIRE', log_key(id), redis.call('TTL', task_key(id)))
  post(task.followers, message)
end
local kind, data = parts[#parts - 2], parts[#parts]
if kind ~= 't' and n > seq then
  local body = cjson.decode(data)
  local detail = kind == 'completed' and body.finish_reason or data
  if body.usage then -- as it was told
    task.prompt_tokens = int(body.usage.prompt_tokens)
    redis.call('HSET', task_key(id), 'prompt_tokens', task.prompt_tokens)
  end
  finish(id, task, kind, detail, tonumber(ARGV[2]), data)
end
send_posts()
return 'whole'
