#!lua
-- Count a request of a caller and reserve its tokens, or say when it may come: both or nothing.
-- KEYS: requests, tokens, balance, ended
-- ARGV: id, requests_per_min, tokens_per_min (0: no limit), window_ms, tokens of the prompt of each
--       task, max_tokens of each (0: not said), then reserve and use of tasks that ended elsewhere
-- -> {verdict, retry_ms, at_ms, reserved, requests, their reset_ms, tokens, their reset_ms}
--    reserved: per task, with spaces between
--    verdict: 'admitted', or which limit it would exceed: 'requests', 'tokens'
-- A window of moments, not of a counter: whatever minute one looks at holds no more than the limit.
local requests, tokens, balance, ended = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, most_requests, most_tokens = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local window = tonumber(ARGV[4])
local LEARNED_TTL_S = 86400
local UNKNOWN_ANSWER = 256 -- tokens of a caller's first answer whose length nobody has said
-- Whoever is refused costs no more than this; beyond, it is told when all will have lapsed.
local MOST_SUMMED = 500
local now = now_ms()
local lapsed = '(' .. int(now - window) -- what is exactly so old is still inside

local function amount(member) return tonumber(string.match(member, ':(%d+)$')) end

-- Milliseconds until an entry with this score is outside.
local function left(score) return tonumber(score) + window + 1 - now end

local function reset_of(key)
  local newest = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
  return newest and left(newest) or 0
end

redis.call('ZREMRANGEBYSCORE', requests, '-inf', lapsed)
local count, retry_requests = redis.call('ZCARD', requests), 0
local before = redis.call('ZSCORE', requests, id) -- the answer to an earlier call was lost
if not before and most_requests > 0 and count >= most_requests then
  local place = count - most_requests
  retry_requests = left(redis.call('ZRANGE', requests, place, place, 'WITHSCORES')[2])
end

local sum, learned, retry_tokens = 0, UNKNOWN_ANSWER, 0

-- What a task used takes the place of what was reserved for it, once. If that has lapsed, the task
-- took longer than the window: what it used beyond its reserve counts from now.
local function settle(reserved, used)
  local prompt, answer = string.match(used, '^(%d+):(%d+)$')
  local name, estimate = string.match(reserved, '^(.*):(%d+)$')
  local actual = prompt + answer
  local excess = math.max(0, actual - estimate)
  local settled, late = name .. ':settled:' .. int(actual), name .. ':late:' .. int(excess)
  if redis.call('ZSCORE', tokens, settled) or redis.call('ZSCORE', tokens, late) then return end
  local score = redis.call('ZSCORE', tokens, reserved)
  if score then
    redis.call('ZREM', tokens, reserved)
    redis.call('ZADD', tokens, score, settled)
    sum = sum - estimate + actual
  else
    redis.call('ZADD', tokens, int(now), late)
    sum = sum + excess
  end
  learned = 0.9 * learned + 0.1 * answer
end

local verdict, reserves, need = 'admitted', {}, 0
if most_tokens > 0 then
  local known = redis.call('HMGET', balance, 'sum', 'learned')
  sum, learned = tonumber(known[1] or 0), tonumber(known[2] or learned)
  if redis.call('EXISTS', tokens) == 0 then sum = 0 end
  for _, member in ipairs(redis.call('ZRANGE', tokens, '-inf', lapsed, 'BYSCORE')) do
    sum = sum - amount(member)
  end
  redis.call('ZREMRANGEBYSCORE', tokens, '-inf', lapsed)
  for at = 7, #ARGV, 2 do settle(ARGV[at], ARGV[at + 1]) end
  local here = redis.call('HGETALL', ended)
  for at = 1, #here, 2 do settle(here[at], here[at + 1]) end
  redis.call('DEL', ended)

  if before then
    for _, member in ipairs(redis.call('ZRANGE', tokens, before, before, 'BYSCORE')) do
      if string.sub(member, 1, #id + 1) == id .. '.' then reserves[#reserves + 1] = member end
    end
  else
    local answer = tonumber(ARGV[6])
    if answer == 0 then answer = math.ceil(learned) end
    for prompt in string.gmatch(ARGV[5], '%d+') do
      reserves[#reserves + 1] = id .. '.' .. #reserves .. ':' .. int(prompt + answer)
      need = need + prompt + answer
    end
  end
  -- What could be too long for a whole minute has one for itself.
  local excess = before and 0 or sum + math.min(need, most_tokens) - most_tokens
  if excess > 0 then
    local oldest = redis.call('ZRANGE', tokens, 0, MOST_SUMMED - 1, 'WITHSCORES')
    for at = 1, #oldest, 2 do
      excess, retry_tokens = excess - amount(oldest[at]), left(oldest[at + 1])
      if excess <= 0 then break end
    end
    if excess > 0 then retry_tokens = reset_of(tokens) end
  end
end

if retry_requests > 0 or retry_tokens > 0 then
  verdict = retry_requests >= retry_tokens and 'requests' or 'tokens'
elseif not before then
  redis.call('ZADD', requests, int(now), id)
  redis.call('PEXPIRE', requests, window * 2)
  count = count + 1
  for _, member in ipairs(reserves) do redis.call('ZADD', tokens, int(now), member) end
  sum = sum + need
end
if most_tokens > 0 then
  redis.call('PEXPIRE', tokens, window * 2)
  redis.call('HSET', balance, 'sum', int(sum), 'learned', string.format('%.17g', learned))
  redis.call('EXPIRE', balance, LEARNED_TTL_S)
end
return {verdict, math.max(retry_requests, retry_tokens), tonumber(before or now),
  table.concat(reserves, ' '), count, reset_of(requests), sum, reset_of(tokens)}
