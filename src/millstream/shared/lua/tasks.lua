-- A task's changes of state that several scripts make; put after fair.lua.
local TASK_FIELDS = {
  'state', 'attempt', 'seq', 'entry', 'model', 'caller', 'followers', 'started', 'prompt_tokens',
  'tokens', 'worker', 'lost', 'lost_seq', 'released', 'last_error',
  'created', 'deadline', 'rewound_at', 'priority', 'weight', 'paid',
  'reserved',
}
-- A task one of whose keys somebody has overwritten with another type is gone, and goes as a whole:
-- its errors would fail the call for all tasks of it, for ever. Whether it was so.
local function clear_broken(id)
  local task, log = redis.call('TYPE', task_key(id)).ok, redis.call('TYPE', log_key(id)).ok
  local broken = (task ~= 'hash' and task ~= 'none') or (log ~= 'stream' and log ~= 'none')
  if broken then redis.call('DEL', task_key(id), log_key(id)) end
  return broken
end
local function fields_of(id)
  local values = redis.call('HMGET', task_key(id), unpack(TASK_FIELDS))
  local task = {}
  for at, name in ipairs(TASK_FIELDS) do task[name] = values[at] end
  return task
end
local function read_task(id)
  clear_broken(id)
  return fields_of(id)
end

-- The entry by which an unfinished task stands in its queue. One that somebody deleted is put back,
-- or the task would be nobody's once its worker dies.
local function entry_of(id, model, entry)
  local queue = queue_key(model)
  if redis.call('EXISTS', queue) == 1 and #redis.call('XRANGE', queue, entry, entry) == 1 then
    return entry
  end
  pending(queue)
  local new = redis.call('XADD', queue, '*', 'task', id)
  redis.call('EXPIRE', queue, QUEUE_TTL_S)
  redis.call('HSET', task_key(id), 'entry', new)
  local task = read_task(id)
  if task.state == 'queued' then
    line_up(id, task)
    task.entry = entry
    step_out(model, standing(id, task))
  end
  return new
end

-- Make an entry a worker's, by a lease that begins now; false where somebody has deleted it.
local function own(queue, entry, worker)
  local answer = redis.pcall('XCLAIM', queue, GROUP, worker, 0, entry, 'FORCE', 'JUSTID')
  if answer.err then
    pending(queue) -- makes the group, if it was that
    answer = redis.call('XCLAIM', queue, GROUP, worker, 0, entry, 'FORCE', 'JUSTID')
  end
  return #answer > 0
end

-- The tasks whose entries are a worker's. They are not read again: their leases would begin anew.
local function owned_by(queue, worker)
  local ids = {}
  for _, row in ipairs(redis.call('XPENDING', queue, GROUP, '-', '+', 1000, worker)) do
    local entry = redis.call('XRANGE', queue, row[1], row[1])[1]
    if entry then ids[#ids + 1] = entry[2][2] end
  end
  return ids
end

-- When a task has to have ended. One that has no deadline comes from a pod of an older version.
local function set_due(id, at)
  redis.call('ZADD', due_key(), int(at), id)
  redis.call('EXPIRE', due_key(), QUEUE_TTL_S)
end
local function set_deadline(id, at)
  redis.call('HSET', task_key(id), 'deadline', int(at))
  set_due(id, at)
end

-- A worker whose attempt is ahead of the task's: Redis has lost its claim, for attempts only go up.
-- It holds the whole text, also what readers have seen and Redis has not, so it takes its place again.
local function take_back(id, attempt, me)
  local task = read_task(id)
  if task.state == 'queued' then step_out(task.model, standing(id, task)) end
  redis.call('HSET', task_key(id), 'state', 'running', 'attempt', attempt, 'worker', me,
    'released', '0')
  redis.call('HSETNX', task_key(id), 'started', int(now_ms()))
  if not task.deadline then -- it was lost with the claim that set it: when it would be forgotten
    set_deadline(id, now_ms() + math.max(0, redis.call('PTTL', task_key(id))))
  end
  local queue = queue_key(task.model)
  pending(queue)
  redis.call('XCLAIM', queue, GROUP, me, 0, entry_of(id, task.model, task.entry), 'FORCE', 'JUSTID')
end

-- Whether event n of a log has these bytes.
local function holds(id, n, kind, ids, data)
  local entry = redis.call('XRANGE', log_key(id), int(n) .. '-0', int(n) .. '-0')[1]
  return entry and entry[2][2] == kind and entry[2][6] == ids and entry[2][8] == data
end

local function usage_json(prompt, completion)
  return string.format(
    '{"prompt_tokens": %d, "completion_tokens": %d, "total_tokens": %d}',
    prompt, completion, prompt + completion)
end

-- What a task that has run took: its caller has paid exactly that, and the averages learn of it.
local function measured(task, now)
  local cost = cost_of(tonumber(task.prompt_tokens or 0), tonumber(task.tokens or 0))
  pay(task, cost - tonumber(task.paid or 0))
  local rate, service_ms = rate_key(task.model), now - tonumber(task.started)
  local before = redis.call('HMGET', rate, 'service_ms', 'cost')
  local function smoothed(old, new) return int(0.8 * (tonumber(old or '') or new) + 0.2 * new) end
  redis.call('HSET', rate,
    'service_ms', smoothed(before[1], service_ms), 'cost', smoothed(before[2], cost))
  redis.call('EXPIRE', rate, RATE_TTL_S)
end

local USAGE_TTL_S = 40 * 86400 -- a month's can be read for some days after its end
local DAY_MS = 86400000
local SETTLE_TTL_S = 120 -- twice the minute in which it matters

-- Count a task that ended then for its caller; `times` is 1, or -1 to take that back. A task ends
-- once, and what Redis loses of this it loses of the end as well, for it is written in the same step:
-- so each is counted once.
local function count_usage(task, ended, times)
  local caller, day = task.caller or '', math.floor(ended / DAY_MS)
  local used, callers = usage_key(caller, day), callers_key(day)
  local count = redis.call('HINCRBY', used, 'tasks ' .. task.model, times)
  redis.call('HINCRBY', used, 'prompt_tokens ' .. task.model, int(times * (task.prompt_tokens or 0)))
  redis.call('HINCRBY', used, 'completion_tokens ' .. task.model, int(times * (task.tokens or 0)))
  if count == times then redis.call('EXPIRE', used, USAGE_TTL_S) end -- else it is there, and no day old
  if redis.call('SADD', callers, caller) == 1 then redis.call('EXPIRE', callers, USAGE_TTL_S) end
  if times == 1 and (task.reserved or '') ~= '' then -- settled when the caller asks next
    local ended = ended_key(caller)
    redis.call('HSET', ended, task.reserved,
      int(task.prompt_tokens or 0) .. ':' .. int(task.tokens or 0))
    redis.call('EXPIRE', ended, SETTLE_TTL_S)
  end
end

-- One of a worker's tasks has ended. A worker with room asks for no more then, so this keeps the order
-- in which workers are called; one that does not stand there was full, and asks. Never below nothing.
local function lighten(model, worker)
  local idle = idle_key(model)
  local score = tonumber(redis.pcall('ZADD', idle, 'XX', 'INCR', '-1', worker) or '')
  if score and running_of(score) == CALLED - 1 then redis.call('ZADD', idle, score + 1, worker) end
end

-- End a task, as read: its last event, its state, its place in the queue, its remaining life.
-- `kind` is completed (detail: finish reason), cancelled, or failed (detail: error JSON). `data` is
-- made from them where it is not given.
-- The growing command comes first, so that a full Redis refuses the whole. Returns number and data of
-- the last event.
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
  redis.call('ZREM', due_key(), id)
  if task.state == 'queued' then step_out(task.model, standing(id, task)) end
  if (task.worker or '') ~= '' then lighten(task.model, task.worker) end
  local expires = now + result_ttl_s * 1000
  redis.call('PEXPIREAT', task_key(id), int(expires))
  redis.call('PEXPIREAT', log_key(id), int(expires))
  bury(id, task.caller or '', expires)
  if task.started then measured(task, now) end
  count_usage(task, now, 1)
  post(task.followers, {id, tonumber(seq), kind, '', data})
  return seq, data
end

-- End an unfinished task as cancelled, and have its worker drop it and remember how it ended.
local function cancel(id, task, result_ttl_s)
  local seq, data = finish(id, task, 'cancelled', '', result_ttl_s)
  send_posts()
  if (task.worker or '') ~= '' then
    redis.call('SPUBLISH', control_channel(task.worker),
      table.concat({'stop', id, task.attempt, seq, data}, ' '))
  end
end

-- Whether some worker has a free slot, and was not called for it since it last showed itself.
local function has_room(model)
  return redis.call('ZCOUNT', idle_key(model), '-inf', '(' .. CALLED) > 0
end

-- Milliseconds until the last of `places` waiting tasks is served, by Little's law from the smoothed
-- service time; -1 while nothing runs or was measured. Callers ask first whether a worker has room.
local function wait_ms(model, places, running)
  local service = tonumber(redis.call('HGET', rate_key(model), 'service_ms') or '')
  if not service or running == 0 then return -1 end
  return math.ceil(places * service / running)
end

-- What a prompt is taken to have, until its tokens have been counted.
local function prompt_guess(request) return #request / 4 end

-- Start a new task for the least loaded worker that has room, if nobody waits: it is sent all that it
-- would get by a claim. One that no longer listens is struck off. -> the worker
local function start_at_once(id, task, request)
  if redis.call('EXISTS', line_key(task.model)) == 1 then return nil end
  local idle = idle_key(task.model)
  local ranked = redis.call('ZRANGEBYSCORE', idle, '-inf', '(' .. CALLED, 'WITHSCORES', 'LIMIT', 0, 8)
  for at = 1, #ranked, 2 do
    local worker, score = ranked[at], tonumber(ranked[at + 1])
    if running_of(score) < most_of(score) then
      local message = cmsgpack.pack({id, request, class_of(task.priority)})
      if redis.call('SPUBLISH', run_channel(worker), message) > 0 then
        redis.call('ZADD', idle, score + 1 + CALLED, worker)
        own(queue_key(task.model), task.entry, worker)
        pay_at_once(task, prompt_guess(request))
        return worker
      end
      redis.call('ZREM', idle, worker)
    end
  end
end

-- Make a task and put it into its queue; whether a worker with a free slot has heard of it.
local function enqueue(id, task, request, live_ttl_s, orphan_ms, life_ms)
  local queue, now = queue_key(task.model), now_ms()
  task.entry = redis.call('XADD', queue, '*', 'task', id)
  local worker = start_at_once(id, task, request)
  redis.call('HSET', task_key(id), 'request', request, 'model', task.model, 'caller', task.caller,
    'priority', class_of(task.priority), 'weight', task.weight or '1',
    'state', worker and 'running' or 'queued',
    'attempt', worker and '1' or '0', 'seq', '0', 'tokens', '0', 'created', int(now),
    'orphan_ms', orphan_ms, 'followers', task.followers or '', 'entry', task.entry,
    'deadline', int(now + life_ms),
    unpack(worker and {'worker', worker, 'started', int(now), 'paid', task.paid} or {}))
  redis.call('EXPIRE', task_key(id), live_ttl_s)
  redis.call('EXPIRE', queue, QUEUE_TTL_S)
  set_due(id, now + life_ms)
  if worker then return true end
  line_up(id, task)
  return ring(task.model, 'new')
end

local function end_overdue(id, task, result_ttl_s)
  local message = string.format('The task had not ended after %g s.',
    (task.deadline - task.created) / 1000)
  finish(id, task, 'failed', '{"error": {"message": "' .. message
    .. '", "type": "server_error", "param": null, "code": "deadline_exceeded"}}', result_ttl_s)
  if (task.worker or '') ~= '' then
    redis.call('SPUBLISH', control_channel(task.worker), 'stop ' .. id .. ' ' .. task.attempt)
  end
end

-- End the tasks whose time is up, some at once; how many they were.
local MOST_DUE = 100
local function end_due(result_ttl_s)
  local due = redis.call('ZRANGEBYSCORE', due_key(), '-inf', int(now_ms()), 'LIMIT', 0, MOST_DUE)
  for _, id in ipairs(due) do
    local task = read_task(id)
    if task.state == 'queued' or task.state == 'running' then
      end_overdue(id, task, result_ttl_s)
    else
      redis.call('ZREM', due_key(), id)
    end
  end
  return #due
end
