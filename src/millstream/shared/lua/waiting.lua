#!lua
-- How a model's queue stands.
-- KEYS: queue
-- ARGV: model, at most so many of those who wait
-- -> {running, waiting, oldest wait in ms, ms a place (-1 unknown), cost of a task, line, turns}
--    line: {class:caller:place:id, …}; turns: {level, {who, counter, …}, level, {…}, …}
local model = ARGV[1]
local running = pending(KEYS[1])
local line = redis.call('ZRANGE', line_key(model), 0, ARGV[2] - 1)
local now, oldest = now_ms(), 0
for _, member in ipairs(line) do
  oldest = math.max(oldest, now - tonumber(string.match(member, ':(%d+)-')))
end
local turns = {}
for _, level in ipairs({CLASSES, 'interactive', 'batch'}) do
  turns[#turns + 1] = level
  turns[#turns + 1] = redis.call('ZRANGE', turns_key(level, model), 0, -1, 'WITHSCORES')
end
local cost = redis.call('HGET', rate_key(model), 'cost') or int(cost_of(0, PREPAID))
local place = has_room(model) and 0 or wait_ms(model, 1, running)
return {running, redis.call('ZCARD', line_key(model)), oldest, place, tonumber(cost), line, turns}
