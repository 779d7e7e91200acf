#!lua flags=allow-oom
-- Tell a worker to drain: it finds this at its next heartbeat.
-- KEYS: registry of workers, the worker's order
-- ARGV: id, roster's ttl_ms, keep_s
-- -> 1, or 0: no such worker lives
local value = redis.call('HGET', KEYS[1], ARGV[1])
local beat = value and string.match(value, '^(%d+) ')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if not beat or now - tonumber(beat) > tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[2], string.format('%d', now), 'EX', ARGV[3])
return 1
