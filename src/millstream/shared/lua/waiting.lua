#!lua
-- How a model's queue stands.
-- KEYS: queue
-- ARGV: model, at most so many ids
-- -> {running, waiting, oldest wait in ms, service time in ms, ids of the waiting in order}
local running = pending(KEYS[1])
local delivered = '0-0'
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  for at = 1, #group, 2 do
    if group[at] == 'last-delivered-id' then delivered = group[at + 1] end
  end
end
local ids, oldest = {}, 0
for at, entry in ipairs(redis.call('XRANGE', KEYS[1], '(' .. delivered, '+', 'COUNT', ARGV[2])) do
  if at == 1 then oldest = now_ms() - tonumber(string.match(entry[1], '^%d+')) end
  ids[at] = entry[2][2]
end
local service = redis.call('HGET', rate_key(ARGV[1]), 'service_ms')
return {running, redis.call('XLEN', KEYS[1]) - running, oldest, tonumber(service or 1000), ids}
