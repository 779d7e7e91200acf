#!lua flags=allow-oom
-- End the tasks of a shard whose deadline has passed, waiting or running, whether any worker lives.
-- KEYS: due
-- ARGV: result_ttl_s
-- -> milliseconds until the next deadline; 0: more are due now, -1: there is none
end_due(tonumber(ARGV[1]))
send_posts()
local first = redis.call('ZRANGE', due_key(), 0, 0, 'WITHSCORES')[2]
return first and math.max(0, first - now_ms()) or -1
