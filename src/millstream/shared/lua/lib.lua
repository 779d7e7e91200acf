-- Shared by all scripts: put between a script's first line and its body.
-- Names are spelled as in keys.py; tests/unit/shared/test_scripts_text.py compares them.
local GROUP = 'workers'
local QUEUE_TTL_S = 7 * 86400 -- a model nobody asks for any more leaves nothing behind
local TOMB_EXTRA_S = 86400 -- how long one can still be told "expired" and not "unknown"

local function int(value) return string.format('%d', value) end
local tag = string.match(KEYS[1], '^{[^}]*}')
local function task_key(id) return tag .. ':task:' .. id end
local function log_key(id) return tag .. ':log:' .. id end
local function tomb_key(id) return tag .. ':tomb:' .. id end
local function queue_key(model) return tag .. ':queue:' .. model end
local function idle_key(model) return tag .. ':idle:' .. model end
local function rate_key(model) return tag .. ':rate:' .. model end
local function dead_key(model) return tag .. ':dead:' .. model end
local function usage_key(caller, day) return tag .. ':usage:' .. caller .. ':' .. int(day) end
local function callers_key(day) return tag .. ':callers:' .. int(day) end
local function ended_key(caller) return tag .. ':ended:' .. caller end
local function pod_channel(pod) return tag .. ':pod:' .. pod end
local function control_channel(worker) return tag .. ':ctl:' .. worker end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- How many tasks of the queue a worker holds. The group is made where it is missing: after a loss
-- of data the first to come makes it again, and tasks in a terminal state are never run twice.
local function pending(queue)
  local answer = redis.pcall('XPENDING', queue, GROUP)
  if answer.err then
    redis.call('XGROUP', 'CREATE', queue, GROUP, '0', 'MKSTREAM')
    redis.call('EXPIRE', queue, QUEUE_TTL_S)
    return 0
  end
  return answer[1]
end

-- The entry by which an unfinished task stands in its queue. One that somebody deleted is put back,
-- or the task would be nobody's once its worker dies.
local function entry_of(id, model, entry)
  local queue = queue_key(model)
  if redis.call('EXISTS', queue) == 1 and #redis.call('XRANGE', queue, entry, entry) == 1 then
    return entry
  end
  pending(queue)
  entry = redis.call('XADD', queue, '*', 'task', id)
  redis.call('EXPIRE', queue, QUEUE_TTL_S)
  redis.call('HSET', task_key(id), 'entry', entry)
  return entry
end

-- A worker whose attempt is ahead of the task's: Redis has lost its claim, for attempts only go up.
-- It holds the whole text, also what readers have seen and Redis has not, so it takes its place again.
local function take_back(id, attempt, me)
  local task = redis.call('HMGET', task_key(id), 'model', 'entry')
  redis.call('HSET', task_key(id), 'state', 'running', 'attempt', attempt, 'worker', me,
    'released', '0')
  redis.call('HSETNX', task_key(id), 'started', int(now_ms()))
  local queue = queue_key(task[1])
  pending(queue)
  redis.call('XCLAIM', queue, GROUP, me, 0, entry_of(id, task[1], task[2]), 'FORCE', 'JUSTID')
end

-- Whether event n of a log has these bytes.
local function holds(id, n, kind, ids, data)
  local entry = redis.call('XRANGE', log_key(id), int(n) .. '-0', int(n) .. '-0')[1]
  return entry and entry[2][2] == kind and entry[2][6] == ids and entry[2][8] == data
end

-- Milliseconds until `places` more tasks have been served: Little's law on the smoothed service time.
local function wait_ms(model, places, running)
  local service = tonumber(redis.call('HGET', rate_key(model), 'service_ms') or '') or 1000
  return math.floor(places * service / math.max(running, 1))
end

-- Workers with free slots stand in a sorted set by their running tasks. One that has been rung and
-- has not claimed since stands behind all others: a frozen one is rung once, not for every task.
local RUNG = 1000000

-- Wake the least loaded worker with a free slot, but for one. One that no longer listens is struck
-- off; one that is frozen costs its task no more than the others' poll interval.
local function ring(model, word, except)
  local idle = idle_key(model)
  local ranked = redis.call('ZRANGE', idle, 0, 7, 'WITHSCORES')
  for at = 1, #ranked, 2 do
    local worker, score = ranked[at], tonumber(ranked[at + 1])
    if worker ~= except then
      if redis.call('SPUBLISH', control_channel(worker), word) > 0 then
        redis.call('ZADD', idle, score % RUNG + RUNG, worker)
        return
      end
      redis.call('ZREM', idle, worker)
    end
  end
end

-- Rows for the pods that follow a task; sent once per pod, whatever the number of tasks.
local outbox = {}
local function post(followers, row)
  for pod in string.gmatch(followers or '', '%S+') do
    local rows = outbox[pod]
    if not rows then
      rows = {}
      outbox[pod] = rows
    end
    rows[#rows + 1] = row
  end
end

local function without(followers, pod)
  local kept = {}
  for name in string.gmatch(followers or '', '%S+') do
    if name ~= pod then kept[#kept + 1] = name end
  end
  return table.concat(kept, ' ')
end

-- A pod that nobody hears is struck off the tasks it followed; it follows again when it is back.
local function send_posts()
  for pod, rows in pairs(outbox) do
    if redis.call('SPUBLISH', pod_channel(pod), cmsgpack.pack(rows)) == 0 then
      for _, row in ipairs(rows) do
        local followers = redis.call('HGET', task_key(row[1]), 'followers')
        if followers then
          redis.call('HSET', task_key(row[1]), 'followers', without(followers, pod))
        end
      end
    end
  end
end

local function usage_json(prompt, completion)
  return string.format(
    '{"prompt_tokens": %d, "completion_tokens": %d, "total_tokens": %d}',
    prompt, completion, prompt + completion)
end

local USAGE_TTL_S = 40 * 86400 -- a month's can be read for some days after its end
local DAY_MS = 86400000

local SETTLE_TTL_S = 120 -- twice the minute in which it matters

-- Count an ended task for its caller. A task ends once, and what Redis loses of this it loses of the
-- end as well, for it is written in the same step: so each task is counted once.
local function count_usage(task, now)
  local caller, day = task.caller or '', math.floor(now / DAY_MS)
  local used, callers = usage_key(caller, day), callers_key(day)
  redis.call('HINCRBY', used, 'tasks ' .. task.model, 1)
  redis.call('HINCRBY', used, 'prompt_tokens ' .. task.model, int(task.prompt_tokens or 0))
  redis.call('HINCRBY', used, 'completion_tokens ' .. task.model, int(task.tokens or 0))
  redis.call('EXPIRE', used, USAGE_TTL_S)
  redis.call('SADD', callers, caller)
  redis.call('EXPIRE', callers, USAGE_TTL_S)
  if (task.reserved or '') ~= '' then -- settled when the caller asks next
    local ended = ended_key(caller)
    redis.call('HSET', ended, task.reserved,
      int(task.prompt_tokens or 0) .. ':' .. int(task.tokens or 0))
    redis.call('EXPIRE', ended, SETTLE_TTL_S)
  end
end

-- End a task: its last event, its state, its place in the queue, its remaining life. `task` holds
-- seq, attempt, entry, model, caller, followers, started, prompt_tokens, tokens (strings or false).
-- `kind` is completed (detail: finish reason), cancelled, or failed (detail: error JSON). `data` is
-- made from them where it is not given.
-- The growing command comes first, so that a full Redis refuses the whole.
local function finish(id, task, kind, detail, result_ttl_s, data)
  local seq = int(tonumber(task.seq or 0) + 1)
  local usage = usage_json(tonumber(task.prompt_tokens or 0), tonumber(task.tokens or 0))
  if data then -- as it was told before it was lost
  elseif kind == 'completed' then
    data = '{"finish_reason": "' .. detail .. '", "usage": ' .. usage .. '}'
  elseif kind == 'cancelled' then
    data = '{"usage": ' .. usage .. '}'
  else
    data = detail
  end
  local now = now_ms()
  redis.call('XADD', log_key(id), seq .. '-0',
    'k', kind, 'a', task.attempt or '0', 'i', '', 'd', data)
  redis.call('HSET', task_key(id), 'state', kind, 'seq', seq, 'finished', int(now),
    kind == 'completed' and 'finish_reason' or 'error', kind == 'cancelled' and '' or detail)
  local queue = queue_key(task.model)
  if task.entry then
    redis.call('XACK', queue, GROUP, task.entry)
    redis.call('XDEL', queue, task.entry)
  end
  redis.call('EXPIRE', task_key(id), result_ttl_s)
  redis.call('EXPIRE', log_key(id), result_ttl_s)
  redis.call('SET', tomb_key(id), task.caller or '', 'EX', int(result_ttl_s + TOMB_EXTRA_S))
  if task.started then
    local rate = rate_key(task.model)
    local service = now - tonumber(task.started)
    local smoothed = tonumber(redis.call('HGET', rate, 'service_ms') or '') or service
    redis.call('HSET', rate, 'service_ms', int(0.8 * smoothed + 0.2 * service))
    redis.call('EXPIRE', rate, 86400)
  end
  count_usage(task, now)
  post(task.followers, {id, tonumber(seq), kind, '', data})
end

-- Make a task and put it into its queue.
local function enqueue(id, model, caller, request, live_ttl_s, orphan_ms)
  local queue = queue_key(model)
  redis.call('HSET', task_key(id), 'request', request, 'model', model, 'caller', caller,
    'state', 'queued', 'attempt', '0', 'seq', '0', 'tokens', '0', 'created', int(now_ms()),
    'orphan_ms', orphan_ms)
  local entry = redis.call('XADD', queue, '*', 'task', id)
  redis.call('HSET', task_key(id), 'entry', entry)
  redis.call('EXPIRE', task_key(id), live_ttl_s)
  redis.call('EXPIRE', queue, QUEUE_TTL_S)
  ring(model, 'new')
end

local function deadline_error(max_task_ms)
  return string.format('{"error": {"message": "The task had not ended after %d s.", '
    .. '"type": "server_error", "param": null, "code": "deadline_exceeded"}}', max_task_ms / 1000)
end

local TASK_FIELDS = {
  'state', 'attempt', 'seq', 'entry', 'model', 'caller', 'followers', 'started', 'prompt_tokens',
  'tokens', 'worker', 'request', 'lost', 'lost_seq', 'released', 'last_error',
  'created', 'rewound_at', 'reserved',
}
local function read_task(id)
  local values = redis.call('HMGET', task_key(id), unpack(TASK_FIELDS))
  local task = {}
  for at, name in ipairs(TASK_FIELDS) do task[name] = values[at] end
  return task
end
