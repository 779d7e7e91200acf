#!lua
-- Open a stream of a caller, or keep those that are open; what no pod keeps lapses.
-- KEYS: streams
-- ARGV: limit (0: these are open already), lease_ms, ids of the streams
-- -> 1, or 0: as many are open as may
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', int(now))
local limit = tonumber(ARGV[1])
if limit > 0 and not redis.call('ZSCORE', KEYS[1], ARGV[3])
    and redis.call('ZCARD', KEYS[1]) >= limit then
  return 0
end
for at = 3, #ARGV do redis.call('ZADD', KEYS[1], int(now + ARGV[2]), ARGV[at]) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
