#!lua flags=allow-oom
-- Forget a request that was admitted and made no task.
-- KEYS: requests, tokens, balance
-- ARGV: id, then what was reserved
redis.call('ZREM', KEYS[1], ARGV[1])
for at = 2, #ARGV do
  if redis.call('ZREM', KEYS[2], ARGV[at]) == 1 then
    redis.call('HINCRBY', KEYS[3], 'sum', -tonumber(string.match(ARGV[at], ':(%d+)$')))
  end
end
return 0
