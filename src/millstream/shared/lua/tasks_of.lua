#!lua flags=allow-oom
-- Which tasks of a model run and wait; without a word of what is in them.
-- KEYS: queue
-- ARGV: model, most of each kind
-- -> {{id, caller, state, priority, worker, tokens, created, started}, …}
local FIELDS = {'caller', 'state', 'priority', 'worker', 'tokens', 'created', 'started'}
local rows = {}
local function add(id)
  local values = redis.call('HMGET', task_key(id), unpack(FIELDS))
  if values[2] == 'queued' or values[2] == 'running' then
    local row = {id}
    for at = 1, #FIELDS do row[at + 1] = values[at] or '' end
    rows[#rows + 1] = row
  end
end
if pending(KEYS[1]) > 0 then
  for _, held in ipairs(redis.call('XPENDING', KEYS[1], GROUP, '-', '+', ARGV[2])) do
    local entry = redis.call('XRANGE', KEYS[1], held[1], held[1])[1]
    if entry then add(entry[2][2]) end
  end
end
for _, member in ipairs(redis.call('ZRANGE', line_key(ARGV[1]), 0, ARGV[2] - 1)) do
  add(string.match(member, '([^:]+)$'))
end
return rows
