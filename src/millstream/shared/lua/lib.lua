-- Shared by all scripts: put after a script's first line, before fair.lua and tasks.lua.
-- Names are spelled as in keys.py; tests/unit/shared/scripts/test_claim.py compares them.
local GROUP = 'workers'
local QUEUE_TTL_S = 7 * 86400 -- a model nobody asks for any more leaves nothing behind
local RATE_TTL_S = 86400
local TOMB_TTL_MS = 86400000 -- how long one can still be told "expired" and not "unknown"
local TOMB_SPAN_MS = 21600000 -- a quarter of a day

local function int(value) return string.format('%d', value) end
local tag = string.match(KEYS[1], '^{[^}]*}')
local function task_key(id) return tag .. ':task:' .. id end
local function log_key(id) return tag .. ':log:' .. id end
local function withdrawn_key(id) return tag .. ':tomb:' .. id end
local function tombs_key(span, head) return tag .. ':tombs:' .. int(span) .. ':' .. head end
local function queue_key(model) return tag .. ':queue:' .. model end
local function line_key(model) return tag .. ':line:' .. model end
local function fair_key(model) return tag .. ':fair:' .. model end
local function turns_key(level, model) return tag .. ':turns:' .. level .. ':' .. model end
local function spent_key(level, model) return tag .. ':spent:' .. level .. ':' .. model end
local function due_key() return tag .. ':due' end
local function idle_key(model) return tag .. ':idle:' .. model end
local function rate_key(model) return tag .. ':rate:' .. model end
local function refused_key(model) return tag .. ':refused:' .. model end
local function dead_key(model) return tag .. ':dead:' .. model end
local function usage_key(caller, day) return tag .. ':usage:' .. caller .. ':' .. int(day) end
local function callers_key(day) return tag .. ':callers:' .. int(day) end
local function ended_key(caller) return tag .. ':ended:' .. caller end
local function pod_channel(pod) return tag .. ':pod:' .. pod end
local function run_channel(worker) return tag .. ':run:' .. worker end
local function control_channel(worker) return tag .. ':ctl:' .. worker end

-- The same in all of a call.
local read_ms = nil
local function now_ms()
  if not read_ms then
    local time = redis.call('TIME')
    read_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  return read_ms
end

-- Ended tasks leave a tomb, which tells an expired one from one that never was. A key each would be
-- 120 bytes; so those that expire in the same quarter of a day lie together by the head of their ids,
-- some 25 bytes each while a hash is small, and go together. Of an id, 70 of its 130 bits are kept.
local function tomb_place(id, expires_ms)
  local head, mark = string.match(id, '-(.?.?)(.?.?.?.?.?.?.?.?.?.?.?.?)')
  return tombs_key(math.floor(expires_ms / TOMB_SPAN_MS), head), mark
end
local function bury(id, caller, expires_ms)
  local tombs, mark = tomb_place(id, expires_ms)
  redis.pcall('HSET', tombs, mark, caller) -- a key of another type costs a tomb, not the task's end
  redis.call('PEXPIREAT', tombs,
    int((math.floor(expires_ms / TOMB_SPAN_MS) + 1) * TOMB_SPAN_MS + TOMB_TTL_MS))
end
local function dig_up(id, expires_ms)
  redis.pcall('HDEL', tomb_place(id, expires_ms))
end

-- Whether a task of which nothing else is left has expired within the last `ttl_ms`, and was the caller's.
-- One whose keys somebody deleted lies ahead of its time.
local function buried(id, caller, ttl_ms)
  local now = now_ms()
  for at = math.floor(now / TOMB_SPAN_MS) + 1, math.floor((now - ttl_ms) / TOMB_SPAN_MS), -1 do
    if redis.pcall('HGET', tomb_place(id, at * TOMB_SPAN_MS)) == caller then return true end
  end
  return false
end

-- What an id is of which there is no task. Its caller may have withdrawn it, or a script of an older
-- version have ended it.
local function missing(id, caller)
  local expired = redis.call('GET', withdrawn_key(id)) == caller or buried(id, caller, TOMB_TTL_MS)
  return expired and 'expired' or 'unknown'
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

-- How many entries a queue ever had.
local function entries_added(queue)
  local about = redis.call('XINFO', 'STREAM', queue)
  for at = 1, #about, 2 do
    if about[at] == 'entries-added' then return about[at + 1] end
  end
end

-- Workers with free slots stand in a sorted set by their running tasks. One that has been called and
-- has not shown itself since stands behind all others: a frozen one is called once, not for every task.
-- Called is who was rung or sent a task; who claims, or tells how long a task's prompt is, has shown itself.
-- The fraction is how many a worker runs at the most; 0 if it may not be sent tasks, by a shard of
-- several, which does not see what the others give it, or since an older version would not hear of them.
local CALLED = 1000000
local UNIT = 1 / 4096
local function running_of(score) return math.floor(score) % CALLED end
local function most_of(score) return score % 1 / UNIT end

local function shows_itself(model, worker)
  local score = tonumber(redis.pcall('ZSCORE', idle_key(model), worker) or '')
  if score and score >= CALLED then redis.call('ZADD', idle_key(model), score % CALLED, worker) end
end

-- Wake the least loaded worker with a free slot, but for one; whether there is one. One that no longer listens is struck
-- off; one that is frozen costs its task no more than the others' poll interval.
local function ring(model, word, except)
  local idle = idle_key(model)
  local ranked = redis.call('ZRANGE', idle, 0, 7, 'WITHSCORES')
  for at = 1, #ranked, 2 do
    local worker, score = ranked[at], tonumber(ranked[at + 1])
    if worker ~= except then
      if redis.call('SPUBLISH', control_channel(worker), word) > 0 then
        redis.call('ZADD', idle, score % CALLED + CALLED, worker)
        return true
      end
      redis.call('ZREM', idle, worker)
    end
  end
end

-- Rows for the pods that follow a task; sent once per pod, whatever the number of tasks. Most tasks
-- have the same followers, whose names are read once.
local outbox, boxes = {}, {}
local function post(followers, row)
  followers = followers or ''
  local theirs = boxes[followers]
  if not theirs then
    theirs = {}
    for pod in string.gmatch(followers, '%S+') do
      outbox[pod] = outbox[pod] or {}
      theirs[#theirs + 1] = outbox[pod]
    end
    boxes[followers] = theirs
  end
  for at = 1, #theirs do
    local rows = theirs[at]
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
