#!lua flags=allow-oom
-- Say that a process lives, by Redis's clock; hear whether it is to drain.
-- KEYS: registry, models, a worker's order to drain
-- ARGV: id, its JSON, ttl_s, model it is ready for or ''
-- -> 1 if it is to drain, else 0
local time = redis.call('TIME')
local now = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[1], ARGV[1], now .. ' ' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3] * 10)
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[2], ARGV[4], now)
  redis.call('EXPIRE', KEYS[2], 7 * 86400)
end
return KEYS[3] and redis.call('EXISTS', KEYS[3]) or 0
