#!lua flags=allow-oom
-- Who lives; those silent for too long are struck off on the way.
-- KEYS: registry
-- ARGV: ttl_ms
-- -> {JSON, JSON, …}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local fields = redis.call('HGETALL', KEYS[1])
local living = {}
for at = 1, #fields, 2 do
  local beat, json = string.match(fields[at + 1], '^(%d+) (.*)$')
  if beat and now - tonumber(beat) <= tonumber(ARGV[1]) then
    living[#living + 1] = json
  else
    redis.call('HDEL', KEYS[1], fields[at])
  end
end
return living
