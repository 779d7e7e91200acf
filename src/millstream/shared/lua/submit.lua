#!lua
-- Accept the tasks of one request, or say why not; all or nothing.
-- KEYS: first task, queue [, idempotency key]
-- ARGV: id, model, caller, request, max_queue, live_ttl_s, body hash, idempotency_ttl_s, orphan_ms,
--       further tasks in msgpack: {id, request, id, request, …}, admitted_ms, reserved
--       orphan_ms > 0: a running task that no pod has followed for so long is stopped
--       admitted_ms: when the request of a limited caller was counted ('': it was not)
--       reserved: per task, with spaces between, what is settled of the caller's tokens at its end
-- -> {'queued', ids, position, eta_ms} | {'known', ids} | {'conflict', ids} | {'full', retry_ms}
--    ids: with spaces between
local id, model, caller = ARGV[1], ARGV[2], ARGV[3]
local more = cmsgpack.unpack(ARGV[10])
local ids, count = id, 1 + #more / 2
for at = 1, #more, 2 do ids = ids .. ' ' .. more[at] end
local queue = KEYS[2]
if KEYS[3] then
  local seen = redis.call('HMGET', KEYS[3], 'task', 'body')
  if seen[1] and seen[1] ~= ids then
    return {seen[2] == ARGV[7] and 'known' or 'conflict', seen[1]}
  end
end
local running = pending(queue)
local waiting = redis.call('XLEN', queue) - running
if redis.call('EXISTS', KEYS[1]) == 1 then -- sent again after a lost answer
  local position = math.max(waiting - count + 1, 0)
  return {'queued', ids, position, wait_ms(model, position, running)}
end
local excess = waiting + count - tonumber(ARGV[5])
if excess > 0 then
  return {'full', wait_ms(model, excess, running)}
end
local reserved = string.gmatch(ARGV[12], '%S+')
local function add(task_id, request)
  enqueue(task_id, model, caller, request, ARGV[6], ARGV[9])
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
return {'queued', ids, waiting + 1, wait_ms(model, waiting + 1, running)}
