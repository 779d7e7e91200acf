#!lua flags=allow-oom
-- What callers used on one day, as counted on this shard.
-- KEYS: any key of the shard
-- ARGV: day (days since 1970, UTC), caller ('': all)
-- -> {caller, {field, count, …}, caller, {…}, …}; a field is what was counted, a space, the model
local callers = ARGV[2] == '' and redis.call('SMEMBERS', callers_key(ARGV[1])) or {ARGV[2]}
local rows = {}
for _, caller in ipairs(callers) do
  rows[#rows + 1] = caller
  rows[#rows + 1] = redis.call('HGETALL', usage_key(caller, ARGV[1]))
end
return rows
