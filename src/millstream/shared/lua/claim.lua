#!lua
-- Give a worker tasks to run: first those whose lease has lapsed, then new ones. What is delivered
-- is started in the same step, so nothing can be lost between the two.
-- KEYS: queue
-- ARGV: worker, model, free slots, running tasks, lease_ms, max_attempts, sweep (0|1),
--       recover (0|1), rung (0|1), live_ttl_s, result_ttl_s, max_task_ms,
--       suspects running here, whether it may be sent tasks (1; nil from an older version)
-- A worker that was rung and has no free slot steps out of the idle set, and the next is rung. Another
-- that was rung takes no more than levels the load; one that merely looked takes what is
-- there, for whoever should have it has not come.
-- -> {rows, waiting}; row: {id, attempt, request, log entries, suspect (0|1), age in ms, class,
--    handed over (0|1), the worker lost with it or '', number of the log's last event}
-- A task that one more loss without progress would end is a suspect until it makes progress. A
-- worker runs one suspect at a time, so that a poison task ends itself and not those it met.
local queue, me, model = KEYS[1], ARGV[1], ARGV[2]
local free, running = tonumber(ARGV[3]), tonumber(ARGV[4])
local lease_ms, max_attempts = tonumber(ARGV[5]), tonumber(ARGV[6])
local sweep, recover = ARGV[7] == '1', ARGV[8] == '1'
local rung = ARGV[9] == '1'
local live_ttl_s, result_ttl_s = ARGV[10], tonumber(ARGV[11])
local max_task_ms = tonumber(ARGV[12])
local now = now_ms()
local suspects = tonumber(ARGV[13])
local rows = {}
redis.call('ZCARD', idle_key(model)) -- a key of another type refuses the whole

local function drop(entry)
  redis.call('XACK', queue, GROUP, entry)
  redis.call('XDEL', queue, entry)
end

local function give(id, task, lost)
  if not task.deadline then set_deadline(id, task.created + max_task_ms) end
  redis.call('EXPIRE', task_key(id), live_ttl_s)
  local log = {}
  if task.seq ~= '0' then
    redis.call('EXPIRE', log_key(id), live_ttl_s)
    log = redis.call('XRANGE', log_key(id), '-', '+')
  end
  task.request = task.request or redis.call('HGET', task_key(id), 'request')
  rows[#rows + 1] = {
    id, tonumber(task.attempt), task.request, log,
    (tonumber(task.lost or 0) >= max_attempts - 1 and task.lost_seq == task.seq) and 1 or 0,
    now - tonumber(task.created or now), class_of(task.priority), task.released == '1' and 1 or 0,
    lost or '', tonumber(task.seq),
  }
end

-- Whether the first worker of a task may never have heard of it: it has shown nothing of it, and is
-- frozen or gone with its machine, for one that has died listens no more.
local function unheard(task)
  return task.attempt == '1' and not task.prompt_tokens
    and redis.call('PUBSUB', 'SHARDNUMSUB', run_channel(task.worker))[2] > 0
end

-- A lost worker counts against a task only while the task makes no progress between losses: a
-- poison task dies at the same place each time, a long one on failing machines does not.
local function take_over(id, task, entry)
  if task.released ~= '1' and not unheard(task) then
    local seq = tonumber(task.seq)
    local lost = tonumber(task.lost or 0)
    lost = (seq > tonumber(task.lost_seq or -1)) and 1 or lost + 1
    if lost >= max_attempts then
      local message = 'Given up after ' .. int(lost) .. ' attempts without progress'
      if (task.last_error or '') ~= '' then message = message .. '; the last: ' .. task.last_error end
      finish(id, task, 'failed', '{"error": {"message": ' .. cjson.encode(message)
        .. ', "type": "server_error", "param": null, "code": "max_attempts"}}', result_ttl_s)
      redis.call('XADD', dead_key(model), 'MAXLEN', '~', '1000', '*',
        'task', id, 'caller', task.caller or '', 'priority', class_of(task.priority),
        'weight', task.weight or '1', 'lost', int(lost), 'attempts', task.attempt,
        'error', message, 'request', redis.call('HGET', task_key(id), 'request'))
      redis.call('EXPIRE', dead_key(model), 30 * 86400)
      return
    end
    if lost == max_attempts - 1 then
      if suspects > 0 then -- not here; its lease stays lapsed, for whoever has room for it
        redis.call('XCLAIM', queue, GROUP, me, 0, entry, 'IDLE', lease_ms, 'JUSTID')
        return
      end
      suspects = suspects + 1
    end
    task.lost, task.lost_seq = int(lost), task.seq
    redis.call('HSET', task_key(id), 'lost', task.lost, 'lost_seq', task.seq)
  end
  task.attempt = int(task.attempt + 1)
  redis.call('HSET', task_key(id), 'attempt', task.attempt, 'worker', me, 'released', '0')
  give(id, task, task.worker)
end

local function start(id, task)
  task.attempt = int(task.attempt + 1)
  task.request = redis.call('HGET', task_key(id), 'request')
  pay_turn(task, prompt_guess(task.request or ''))
  redis.call('HSET', task_key(id), 'state', 'running', 'attempt', task.attempt, 'worker', me,
    'started', int(now), 'paid', task.paid)
  step_out(model, standing(id, task))
  give(id, task)
end

local function overdue(task) return task.deadline and now >= tonumber(task.deadline) end

-- An entry whose lease has lapsed.
local function take(entry)
  local id = entry[2][2]
  local task = read_task(id)
  local unfinished = task.state == 'queued' or task.state == 'running'
  if not unfinished or task.entry ~= entry[1] then
    drop(entry[1]) -- expired or ended already, or another entry stands for the task now
  elseif overdue(task) then
    end_overdue(id, task, result_ttl_s)
  elseif task.state == 'queued' then
    start(id, task)
  else
    take_over(id, task, entry[1])
  end
end

-- Whoever is next in the line; it leaves it for good.
local function serve(member)
  local id = string.match(member, '[^:]*$')
  local task = read_task(id)
  if task.state == 'queued' and overdue(task) then
    end_overdue(id, task, result_ttl_s)
  elseif task.state == 'queued' then
    local there = own(queue, task.entry, me)
    start(id, task)
    if not there then own(queue, entry_of(id, model, task.entry), me) end
    if member == standing(id, task) then return end -- it has stepped out
  end -- else: expired, or an older version's script ended or started it
  step_out(model, member)
end

-- The stream and the line tell of different tasks: a key was deleted, the group was made anew, or a
-- process of an older version put a task into the stream alone. Afterwards they agree.
local function mend()
  pending(queue) -- makes the group where it is missing
  local lined = {}
  for _, member in ipairs(redis.call('ZRANGE', line_key(model), 0, -1)) do
    local id = string.match(member, '[^:]*$')
    local task = read_task(id)
    if task.state == 'queued' and not lined[id] then
      lined[id] = true
      line_up(id, task)
      entry_of(id, model, task.entry)
    else
      step_out(model, member)
    end
  end
  for _, entry in ipairs(redis.call('XRANGE', queue, '-', '+')) do
    local id = entry[2][2]
    local task = read_task(id)
    local unfinished = task.state == 'queued' or task.state == 'running'
    if not unfinished or task.entry ~= entry[1] then
      drop(entry[1])
    elseif task.state == 'queued' and not lined[id] then
      redis.call('XACK', queue, GROUP, entry[1])
      line_up(id, task)
    elseif task.state == 'running'
        and #redis.call('XPENDING', queue, GROUP, entry[1], entry[1], 1) == 0 then
      local owner = (task.worker or '') ~= '' and task.worker -- has a lease to renew it in
      redis.call('XCLAIM', queue, GROUP, owner or me, 0, entry[1], 'IDLE', owner and 0 or lease_ms,
        'FORCE', 'JUSTID')
    end
  end
end

-- Somebody deleted entries of running tasks, or the queue. Living workers put theirs back when they
-- renew; those of dead ones would be nobody's.
local function seek()
  for _, id in ipairs(redis.call('ZRANGE', due_key(), 0, -1)) do
    local task = read_task(id)
    if task.state == 'running' and task.model == model then entry_of(id, model, task.entry) end
  end
end

-- Whether the group was made since this was last asked. Entries are claimed by their numbers and never
-- read, so the one that was delivered last is ours to set.
local function is_new(group)
  for _, about in ipairs(redis.call('XINFO', 'GROUPS', queue)) do
    if about[2] == group and about[8] == '0-0' then
      redis.call('XGROUP', 'SETID', queue, group, '0-1')
      return true
    end
  end
  return false
end

if recover or sweep then pending(queue) end -- makes the group where it is missing
if recover then -- an answer to an earlier claim was lost: what we own, under the attempt it has
  for _, id in ipairs(owned_by(queue, me)) do
    local task = read_task(id)
    if task.state == 'running' and task.worker == me then give(id, task) end
  end
end

-- Tasks that it was sent while it asked are in none of its numbers.
if ARGV[14] == '1' and free > 0 and not recover then
  local most = running + free
  local owned = redis.pcall('XPENDING', queue, GROUP, '-', '+', most, me)
  running = math.max(running, #owned) -- nothing where there is no group
  free = most - running
end

local held = 0
if sweep then
  redis.call('EXPIRE', queue, QUEUE_TTL_S)
  end_due(result_ttl_s)
  if is_new(GROUP) then seek() end
  held = pending(queue)
  if redis.call('XLEN', queue) - held ~= redis.call('ZCARD', line_key(model)) then
    mend()
    held = pending(queue)
  end
end
if held > 0 and #rows < free then
  local cursor, rounds = '0-0', 0
  repeat
    local answer = redis.call('XAUTOCLAIM', queue, GROUP, me, lease_ms, cursor,
      'COUNT', free - #rows)
    cursor, rounds = answer[1], rounds + 1
    for _, entry in ipairs(answer[2]) do take(entry) end
    if #(answer[3] or {}) > 0 then seek() end
  until cursor == '0-0' or #rows >= free or rounds >= 50
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', queue, GROUP)) do
    -- {name, x, pending, n, idle, ms, …}; one that owns nothing and was long silent is gone
    if consumer[4] == 0 and consumer[6] > 10 * lease_ms and consumer[2] ~= me then
      redis.call('XGROUP', 'DELCONSUMER', queue, GROUP, consumer[2])
    end
  end
end

local waiting = redis.call('ZCARD', line_key(model))
if waiting > 0 and #rows < free then
  local most = free
  if rung then
    local load, others = running + #rows + waiting, 0
    local idle = redis.call('ZRANGE', idle_key(model), 0, 63, 'WITHSCORES')
    for at = 1, #idle, 2 do
      if idle[at] ~= me then load, others = load + running_of(idle[at + 1]), others + 1 end
    end
    most = math.min(free, math.ceil(load / (1 + others)) - running)
  end
  while waiting > 0 and #rows < most do
    local member = next_in_line(model)
    if not member then
      mend()
      waiting, member = redis.call('ZCARD', line_key(model)), next_in_line(model)
      if not member then break end
    end
    serve(member)
    waiting = waiting - 1
  end
end
if free == 0 and sweep then
  ring(model, 'released', me)
elseif waiting > 0 then
  ring(model, 'new', me)
end
-- What need not be kept alive by each claim is by those that sweep, of which a worker makes one a second.
if #rows >= free then
  redis.call('ZREM', idle_key(model), me)
else
  local most = ARGV[14] == '1' and math.min(running + free, 4095) or 0
  local new = redis.call('ZADD', idle_key(model), exact(running + #rows + most * UNIT), me) == 1
  if new or sweep then redis.call('EXPIRE', idle_key(model), 3600) end
end
send_posts()
return {rows, waiting}
