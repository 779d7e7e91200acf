-- The fair queue: whose task is served next; put after lib.lua. docs/adr/0015 says why it is so.
-- Two levels of one rule: the classes share a model by weight, and within a class the callers. Each
-- has a counter of the tokens it was served, and of those who wait the least served is next.
--   line   who waits, in the order class, caller, place: a caller's own are first come, first served
--   turns  per level the counters of those who wait
--   spent  per level the counters of those who do not, while above the level's clock
--   fair   per level a clock, which follows the counters of those served: whoever comes starts there,
--          so nobody saves up tokens while they ask for nothing
local CLASSES = 'classes' -- the upper level; the lower ones are called as their class
local CLASS_WEIGHT = {interactive = 8, batch = 1}
local OUTPUT_WEIGHT = 2 -- a token made costs more than one read
local PREPAID = 64 -- tokens of an answer that are paid for in advance, again each time they are used up
local TICK = 1 / 1024 -- of a token: among equals, who came first
local MOST_SPENT = 10000 -- counters kept of those who do not wait; beyond, the least debts are forgiven

local function exact(number) return string.format('%.17g', number) end
local function class_of(priority) return CLASS_WEIGHT[priority] and priority or 'interactive' end
local function tenant_of(task)
  task.tenant = task.tenant or string.sub(redis.sha1hex(task.caller or ''), 1, 16)
  return task.tenant
end

-- A model's clocks, as this call has read or set them: it is alone.
local read_clocks = {}
local function clocks_of(model)
  local clocks = read_clocks[model]
  if not clocks then
    clocks = {}
    local fields = redis.call('HGETALL', fair_key(model))
    for at = 1, #fields, 2 do clocks[fields[at]] = tonumber(fields[at + 1]) end
    read_clocks[model] = clocks
  end
  return clocks
end
local function clock_of(level, model) return clocks_of(model)[level] or 0 end

local function set_clock(level, model, time)
  clocks_of(model)[level] = time
  if redis.call('HSET', fair_key(model), level, exact(time)) > 0 then
    redis.call('EXPIRE', fair_key(model), QUEUE_TTL_S)
  end
end

-- Somebody who did not wait does now.
local function join(level, model, who)
  local turns = turns_key(level, model)
  if redis.call('ZSCORE', turns, who) then return end
  local time = clock_of(level, model) + TICK
  local used = tonumber(redis.call('ZSCORE', spent_key(level, model), who) or 0)
  if used > 0 then redis.call('ZREM', spent_key(level, model), who) end
  redis.call('ZADD', turns, exact(math.max(time, used)), who)
  redis.call('EXPIRE', turns, QUEUE_TTL_S)
  set_clock(level, model, time)
end

-- Somebody who has been served waits no more: what becomes of the counter. Once nobody waits the clock
-- goes on to the least one. What lies behind the clock is as good as nothing, and not kept.
local function put_away(level, model, who, used, waited_for)
  local spent, clock = spent_key(level, model), clock_of(level, model)
  if not waited_for then
    local least = redis.call('ZRANGE', spent, 0, 0, 'WITHSCORES')[2]
    clock = math.max(clock, math.min(used, tonumber(least or used)))
    set_clock(level, model, clock)
    if not least and used <= clock then return end
  end
  redis.call('ZREMRANGEBYSCORE', spent, '-inf', exact(clock))
  if used > clock then
    redis.call('ZADD', spent, exact(used), who)
    redis.call('EXPIRE', spent, QUEUE_TTL_S)
    redis.call('ZREMRANGEBYRANK', spent, 0, -1 - MOST_SPENT)
  end
end

-- Somebody has nothing more to wait for. -> whether anybody waits
local function leave(level, model, who)
  local turns = turns_key(level, model)
  local used = tonumber(redis.call('ZSCORE', turns, who) or '')
  if used then redis.call('ZREM', turns, who) end
  local waited_for = redis.call('EXISTS', turns) == 1
  if used then put_away(level, model, who, used, waited_for) end
  return waited_for
end

-- -> the counter after it
local function charge(level, model, who, amount)
  local used = redis.call('ZADD', turns_key(level, model), 'XX', 'INCR', exact(amount), who)
  if used then return tonumber(used) end
  local spent, clock = spent_key(level, model), clock_of(level, model)
  used = (tonumber(redis.call('ZSCORE', spent, who) or '') or clock) + amount
  if used > clock then
    redis.call('ZADD', spent, exact(used), who)
    redis.call('EXPIRE', spent, QUEUE_TTL_S)
  end
  return used
end

local function cost_of(prompt_tokens, tokens) return prompt_tokens + OUTPUT_WEIGHT * tokens end

-- Charge a task's caller and class; a negative amount gives back what was paid in advance.
-- -> per level the counter after it and the amount
local function pay(task, tokens)
  local class, mine = class_of(task.priority), tokens / tonumber(task.weight or 1)
  local ours = tokens / CLASS_WEIGHT[class]
  return charge(class, task.model, tenant_of(task), mine), mine,
    charge(CLASSES, task.model, class, ours), ours
end

-- Pay what is due and some tokens more, so that few steps have to. `paid` is still to be written.
local function pay_ahead(task, due)
  task.paid = exact(tonumber(task.paid or 0) + due + OUTPUT_WEIGHT * PREPAID)
  return pay(task, due + OUTPUT_WEIGHT * PREPAID)
end

-- A task leaves the line to be run. The clocks go on to the middle of what it pays, so that whoever
-- comes next is before this caller, and after finitely many of them so is everybody else.
local function pay_turn(task, due)
  local used, mine, all, ours = pay_ahead(task, due)
  local class, clocks = class_of(task.priority), clocks_of(task.model)
  clocks[class] = math.max(clocks[class] or 0, used - mine / 2)
  clocks[CLASSES] = math.max(clocks[CLASSES] or 0, all - ours / 2)
  redis.call('HSET', fair_key(task.model),
    class, exact(clocks[class]), CLASSES, exact(clocks[CLASSES]))
  redis.call('EXPIRE', fair_key(task.model), QUEUE_TTL_S)
end

-- Nobody waits, so that a task is run as it comes: what joining, paying and leaving would make of a level.
local function pass(level, model, who, amount)
  local spent, clock = spent_key(level, model), clock_of(level, model)
  local before = tonumber(redis.call('ZSCORE', spent, who) or 0)
  if before > 0 then redis.call('ZREM', spent, who) end
  local used = math.max(clock + TICK, before) + amount
  clocks_of(model)[level] = math.max(clock, used - amount / 2)
  put_away(level, model, who, used, false)
end
local function pay_at_once(task, due)
  local class, tokens = class_of(task.priority), due + OUTPUT_WEIGHT * PREPAID
  pass(class, task.model, tenant_of(task), tokens / tonumber(task.weight or 1))
  pass(CLASSES, task.model, class, tokens / CLASS_WEIGHT[class])
  redis.call('EXPIRE', fair_key(task.model), QUEUE_TTL_S)
  task.paid = exact(tokens)
end

-- How a waiting task stands in the line; its entry of the queue is its place among its caller's.
local function standing(id, task)
  local ms, number = string.match(task.entry, '^(%d+)-(%d+)$')
  return string.format('%s:%s:%015d-%010d:%s', class_of(task.priority), tenant_of(task), ms, number, id)
end

local function line_up(id, task)
  local line, class = line_key(task.model), class_of(task.priority)
  redis.call('ZADD', line, 0, standing(id, task))
  redis.call('EXPIRE', line, QUEUE_TTL_S)
  join(class, task.model, tenant_of(task))
  join(CLASSES, task.model, class)
end

local function anyone(line, prefix)
  return redis.call('ZRANGEBYLEX', line, '[' .. prefix .. ':', '(' .. prefix .. ';', 'LIMIT', 0, 1)[1]
end

local function step_out(model, member)
  local line = line_key(model)
  local class, tenant = string.match(member, '^(%a+):(%x+):')
  redis.call('ZREM', line, member)
  if anyone(line, class .. ':' .. tenant) then return end
  if not leave(class, model, tenant) then leave(CLASSES, model, class) end
end

local function least_served(level, model)
  return redis.call('ZRANGE', turns_key(level, model), 0, 0)[1]
end

-- Whose turn it is; nil when nobody waits. It stays in the line until it steps out.
local function next_in_line(model)
  while true do
    local class = least_served(CLASSES, model)
    if not class then return nil end
    local tenant = least_served(class, model)
    local member = tenant and anyone(line_key(model), class .. ':' .. tenant)
    if member then return member end
    leave(tenant and class or CLASSES, model, tenant or class) -- somebody deleted what it waited for
  end
end
