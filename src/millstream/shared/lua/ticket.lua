#!lua
-- Make a ticket for a task, which opens one stream of it to whoever holds it.
-- KEYS: task, ticket
-- ARGV: id, caller, grant, ttl_s
-- -> 'ok' | 'unknown' | 'expired'
local owner = redis.call('HGET', KEYS[1], 'caller')
if not owner then return missing(ARGV[1], ARGV[2]) end
if owner ~= ARGV[2] then return 'unknown' end
redis.call('SET', KEYS[2], ARGV[3], 'EX', ARGV[4])
return 'ok'
