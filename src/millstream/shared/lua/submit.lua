#!lua
-- Accept a task, or say why not; all or nothing.
-- KEYS: task, queue [, idempotency key]
-- ARGV: id, model, caller, request, max_queue, live_ttl_s, body hash, idempotency_ttl_s, orphan_ms
--       orphan_ms > 0: a running task that no pod has followed for so long is stopped
-- -> {'queued', id, position, eta_ms} | {'known', id} | {'conflict', id} | {'full', retry_ms}
local id, model, caller = ARGV[1], ARGV[2], ARGV[3]
local queue = KEYS[2]
if KEYS[3] then
  local seen = redis.call('HMGET', KEYS[3], 'task', 'body')
  if seen[1] and seen[1] ~= id then
    return {seen[2] == ARGV[7] and 'known' or 'conflict', seen[1]}
  end
end
local running = pending(queue)
local waiting = redis.call('XLEN', queue) - running
if redis.call('EXISTS', KEYS[1]) == 1 then -- sent again after a lost answer
  return {'queued', id, waiting, wait_ms(model, waiting, running)}
end
if waiting >= tonumber(ARGV[5]) then
  return {'full', wait_ms(model, 1, running)}
end
enqueue(id, model, caller, ARGV[4], ARGV[6], ARGV[9])
if KEYS[3] then
  redis.call('HSET', KEYS[3], 'task', id, 'body', ARGV[7])
  redis.call('EXPIRE', KEYS[3], ARGV[8])
end
return {'queued', id, waiting + 1, wait_ms(model, waiting + 1, running)}
