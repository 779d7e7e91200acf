#!lua
-- Accept the tasks of one request, or say why not; all or nothing.
-- KEYS: first task, queue [, idempotency key]
-- ARGV: id, model, caller, request, max_queue, live_ttl_s, body hash, idempotency_ttl_s, orphan_ms,
--       further tasks in msgpack: {id, request, id, request, …}, admitted_ms, reserved, priority,
--       weight, life_ms, promise (0|1), max_waiting of the caller ('': no limit), pod ('': none)
--       orphan_ms > 0: a running task that no pod has followed for so long is stopped
--       admitted_ms: when the request of a limited caller was counted ('': it was not)
--       reserved: per task, with spaces between, what is settled of the caller's tokens at its end
--       life_ms: how long it may take from now to its end
--       promise: who is refused is told a time of its own
--       pod: follows the tasks from their first event on
-- -> {'queued', ids, created_ms, position, eta_ms} | {'known', ids, created_ms} | {'conflict'} | {'full', retry_ms}
--    | {'crowded', retry_ms}
--    crowded: as many of the caller wait as may; ids: with spaces between; eta_ms -1: nothing runs or was measured
local RESENT_MS = 60000 -- a submit is not sent again later
local id, model, caller = ARGV[1], ARGV[2], ARGV[3]
local more = cmsgpack.unpack(ARGV[10])
local ids, count = id, 1 + #more / 2
for at = 1, #more, 2 do ids = ids .. ' ' .. more[at] end
local queue = KEYS[2]
if KEYS[3] then
  local seen = redis.call('HMGET', KEYS[3], 'task', 'body')
  if seen[1] and seen[1] ~= ids then
    if seen[2] ~= ARGV[7] then return {'conflict'} end
    local created = redis.call('HGET', task_key(string.match(seen[1], '^%S+')), 'created')
    return {'known', seen[1], tonumber(created or now_ms())} -- it may have expired
  end
end
local class = class_of(ARGV[13])
local task = {
  model = model, caller = caller, priority = class, weight = ARGV[14], followers = ARGV[18],
}

-- How many are served before the first of them, as if each caller had as many before its next as
-- this one has: right where all have much to wait for, else too many, and never more than wait.
local function position()
  local line, tenant = line_key(model), tenant_of(task)
  local mine = math.max(0, redis.call('ZLEXCOUNT', line, '[' .. class .. ':' .. tenant .. ':',
    '(' .. class .. ':' .. tenant .. ';') - count)
  local turns = turns_key(class, model)
  local before = mine * redis.call('ZCARD', turns) + redis.call('ZRANK', turns, tenant)
  local other = class == 'batch' and 'interactive' or 'batch'
  local others = redis.call('ZLEXCOUNT', line, '[' .. other .. ':', '(' .. other .. ';')
  before = math.min(before, math.max(0, redis.call('ZCARD', line) - others - count))
  local between = math.ceil((before + 1) * CLASS_WEIGHT[other] / CLASS_WEIGHT[class])
  return before + 1 + math.min(others, between)
end

-- Who is refused draws a ticket: the number of tasks that will have been accepted before its turn, one
-- behind its last one for each caller in whose line there is one, with a margin for those who come
-- unasked. What it is told is how long that takes as places become free. So when fewer come free than
-- was thought, those who come then stand behind; and nobody's refusals move another's time but once.
-- Once the last of a caller's should have come back, its tickets begin anew: who stayed away has given up.
-- Nobody is sent away for longer than OpenAI's clients obey; beyond that they come again in half a second.
local MARGIN, GUESS_MS = 1.25, 1000
local HORIZON_MS, BACK_MS = 60000, 2000
local MOST_LINES, REST = 256, 'rest' -- callers with a line of their own; all others have one together

-- A caller's last ticket and when it should be back, if that is to come; and how many have one.
local function last_ticket(refused, who, now)
  local function read(entry) return string.match(entry or '', '^(%S+) (%d+)$') end
  local ticket, back = read(redis.call('HGET', refused, who))
  local lines = redis.call('HLEN', refused)
  if back and tonumber(back) >= now then return tonumber(ticket), tonumber(back), lines end
  local all = redis.call('HGETALL', refused)
  for at = 1, #all, 2 do
    local _, until_then = read(all[at + 1])
    if tonumber(until_then or 0) < now then
      redis.call('HDEL', refused, all[at])
      lines = lines - 1
    end
  end
  return nil, 0, lines
end

local function promise_ms(running)
  local refused, who, now = refused_key(model), tenant_of(task), now_ms()
  local ticket, back, lines = last_ticket(refused, who, now)
  if not ticket and lines >= MOST_LINES then
    who = REST
    ticket, back, lines = last_ticket(refused, who, now)
  end
  if not ticket then lines = lines + 1 end
  local accepted = entries_added(queue)
  local place = wait_ms(model, 1, running)
  if place < 0 then place = GUESS_MS end
  local ahead = math.max(0, (ticket or 0) - accepted) + MARGIN * count * lines
  if ahead * place > HORIZON_MS then -- from the front, but not all at once
    ahead = math.max(MARGIN * count, ahead % (HORIZON_MS / place))
  end
  local wait = math.ceil(ahead * place)
  back = math.max(back, now + wait + BACK_MS)
  redis.call('HSET', refused, who, exact(accepted + ahead) .. ' ' .. int(back))
  redis.call('PEXPIRE', refused, int(math.max(HORIZON_MS, wait) + BACK_MS))
  return wait
end

local room = has_room(model)
local function accepted(at, created)
  local wait = (at == 0 or room) and 0 or wait_ms(model, at, pending(queue))
  return {'queued', ids, tonumber(created), at, wait}
end

if redis.call('EXISTS', KEYS[1]) == 1 then -- sent again after a lost answer
  task = read_task(id)
  local waits = redis.call('ZSCORE', line_key(model), standing(id, task))
  return accepted(waits and position() or 0, task.created)
end
-- Its pod has given up on it and told so, or its result has expired since: this comes too late, and
-- nobody hears the answer.
if redis.call('EXISTS', withdrawn_key(id)) == 1 or buried(id, caller, RESENT_MS) then
  return {'full', 0}
end
local waiting = redis.call('ZCARD', line_key(model))
if waiting + count > tonumber(ARGV[5]) then
  return {'full', ARGV[16] == '1' and promise_ms(pending(queue)) or 0}
end
if ARGV[17] ~= '' then
  local line, tenant, mine = line_key(model), tenant_of(task), 0
  for name in pairs(CLASS_WEIGHT) do
    mine = mine + redis.call('ZLEXCOUNT', line, '[' .. name .. ':' .. tenant .. ':',
      '(' .. name .. ':' .. tenant .. ';')
  end
  if mine + count > tonumber(ARGV[17]) then -- one of its own is served each time all had their turn
    local wait = wait_ms(model, redis.call('ZCARD', turns_key(class, model)), pending(queue))
    return {'crowded', wait < 0 and GUESS_MS or wait}
  end
end
local reserved = string.gmatch(ARGV[12], '%S+')
local function add(task_id, request)
  local heard = enqueue(task_id, task, request, ARGV[6], ARGV[9], ARGV[15])
  room = room and heard -- else those with room have died
  if ARGV[11] ~= '' then
    redis.call('HSET', task_key(task_id), 'created', ARGV[11], 'reserved', reserved() or '')
  end
end

add(id, ARGV[4])
for at = 1, #more, 2 do add(more[at], more[at + 1]) end
if KEYS[3] then
  redis.call('HSET', KEYS[3], 'task', ids, 'body', ARGV[7])
  redis.call('EXPIRE', KEYS[3], ARGV[8])
end
return accepted(waiting == 0 and 1 or position(), ARGV[11] ~= '' and ARGV[11] or now_ms())
