#!lua flags=allow-oom
-- Strike a pod off the tasks that none of its readers follows any more.
-- KEYS: any key of the shard
-- ARGV: pod, then task ids
for at = 2, #ARGV do
  local key = task_key(ARGV[at])
  local followers = redis.call('HGET', key, 'followers')
  if followers then redis.call('HSET', key, 'followers', without(followers, ARGV[1])) end
end
return 0
