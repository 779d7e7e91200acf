#!lua flags=allow-oom
-- How deep a model's queue is, class by class.
-- KEYS: queue
-- ARGV: model
-- -> {running, dead letters, {class, waiting, oldest wait in ms, …}}
local model = ARGV[1]
-- Of each caller the first is its oldest. Where more callers wait than this, those served next are
-- looked at: the fair queue lets nobody wait for ever behind them.
local MOST_CALLERS = 256
local line, now, classes = line_key(model), now_ms(), {}
for class in pairs(CLASS_WEIGHT) do
  local since = now
  for _, caller in ipairs(redis.call('ZRANGE', turns_key(class, model), 0, MOST_CALLERS - 1)) do
    local first = anyone(line, class .. ':' .. caller)
    if first then since = math.min(since, tonumber(string.match(first, ':(%d+)-'))) end
  end
  classes[#classes + 1] = class
  classes[#classes + 1] = redis.call('ZLEXCOUNT', line, '[' .. class .. ':', '(' .. class .. ';')
  classes[#classes + 1] = now - since
end
return {pending(KEYS[1]), redis.call('XLEN', dead_key(model)), classes}
